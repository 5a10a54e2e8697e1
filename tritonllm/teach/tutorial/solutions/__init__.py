"""The exercises, filled in; their holes are marked (:mod:`tritonllm.teach.tutorial.holes`)."""

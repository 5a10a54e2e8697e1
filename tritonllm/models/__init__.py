"""Checkpoints as models: what a configuration says (:class:`ModelSpec`), weights, and the one decoder."""

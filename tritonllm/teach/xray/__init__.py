"""``tritonllm generate --xray``: every stage of a step with its kernels, bytes, FLOPs and time (docs/teach.md).

:mod:`~tritonllm.teach.xray.stages` watches a step, :mod:`~tritonllm.teach.xray.costs` counts its bytes and FLOPs,
:mod:`~tritonllm.teach.xray.roofline` says what the chip could do, :mod:`~tritonllm.teach.xray.lens` looks into layers.
"""

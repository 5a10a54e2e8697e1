"""Published narrow formats of checkpoints: what their tensors are called, how they lie, and what these stand for.

:mod:`tritonllm.models.formats.registry` chooses a format by ``config.json``; each format joins the tensors of a weight
(numbers, scales, zero points, ...) to one :class:`~tritonllm.models.formats.narrow_tensor.NarrowTensor`, which gives
any rectangle of the weight as a :class:`~tritonllm.models.formats.piece.NarrowPiece`. Used by the loader of weights.
"""

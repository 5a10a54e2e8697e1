"""Which models can be batch invariant."""

from tritonllm.models.fallback_decoder import FallbackSpec
from tritonllm.models.spec import ModelSpec


def check_invariance(spec: ModelSpec | FallbackSpec, ranks: int) -> None:
    """Check that all operations of a model have a batch-invariant kernel (:mod:`tritonllm.layers.invariance`), or run
    for one token at a time (:mod:`tritonllm.models.fallback_invariance`).

    Args:
        ranks: how many ranks share the model.

    Raises:
        ValueError: one has none; the message names it.
    """
    missing = None
    if ranks > 1:
        missing = f"the sums over the ranks of tensor_parallel_size={ranks}"
    elif not spec.causal:
        missing = "encoders, whose tokens see those behind them,"
    elif spec.head is not None:
        missing = "the heads of classifiers and reward models"
    if missing is not None:
        raise ValueError(f"deterministic: {missing} are not batch invariant yet: leave deterministic out")

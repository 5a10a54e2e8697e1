"""For which steps the host's launches are what takes longest, so that capturing them pays."""

from collections.abc import Sequence

from tritonllm.models.interface import LayerWork

# Weights that a token meets in a layer, times tokens, for which an H200 takes as long, at 600 TFLOP/s, as the host for
# the launches: 0.9 ms, or 1.6 with experts, whose order, products and sums are more launches. (A slower host: 2.7.)
HOST_BOUND, HOST_BOUND_EXPERTS = 270_000_000_000, 480_000_000_000


def host_bound_tokens(layers: Sequence[LayerWork]) -> int:
    """Tokens of a step from which on the GPU takes longer for it than the host for launching its kernels."""
    bounds = ((HOST_BOUND_EXPERTS if layer.experts else HOST_BOUND) // max(1, layer.weights) for layer in layers)
    return min(bounds, default=0)

"""The sampling parameters of many requests as columns: what a draw reads beside the logits, on the host and the device.

This is the one place that names these columns and their dtypes. The :class:`~tritonllm.SamplingParams` of one request
become a row of the engine's seats (:mod:`tritonllm.engine.step.seats`), the seats' columns go to the device as they
are, and :func:`~tritonllm.kernels.advance_seats` makes the rows of a step of those. No torch.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

if TYPE_CHECKING:
    from tritonllm.config.sampling_params import SamplingParams

Array = TypeVar("Array")  # np.ndarray on the host, torch.Tensor on the device
DTYPES = {
    "temperature": "float32",
    "top_k": "int32",
    "top_p": "float32",
    "min_p": "float32",
    "seeds": "int64",
    "steps": "int64",
}
NEUTRAL = {"top_p": 1.0}  # what stands in a row that nobody has; else 0


class SamplingRows(NamedTuple, Generic[Array]):
    """Parameters of :func:`~tritonllm.kernels.sample`: a value for each of R rows, or of S seats.

    Attributes:
        temperature: float32, which divides the logits; below 1e-5 the most likely token is taken.
        top_k: int32; 0, -1 or the size of the vocabulary and more keep all tokens. Of the three limits ``None`` says
            that no row has such a limit.
        top_p: float32; 1 keeps all tokens.
        min_p: float32; 0 keeps all tokens.
        seeds: int64, the seed of each request's draws.
        steps: int64, the index of the token that is about to be drawn; of a seat that index less the sequence's
            length, which is minus the length of its prompt.
    """

    temperature: Array
    top_k: Array | None
    top_p: Array | None
    min_p: Array | None
    seeds: Array
    steps: Array

    @property
    def limits(self) -> tuple[Array | None, ...]:
        """What leaves a part of the vocabulary: ``top_k``, ``top_p`` and ``min_p``."""
        return self[1:4]

    def each(self, change: Callable[[Array], Array]) -> "SamplingRows[Array]":
        """These parameters with every column changed, but for those that are ``None``."""
        return SamplingRows._make(None if column is None else change(column) for column in self)


def row_of(params: "SamplingParams", seed: int, prompt_tokens: int) -> SamplingRows[float]:
    """The row of a seat.

    Args:
        seed: the seed of the request's draws, its own or one that the engine gave it.
        prompt_tokens: the length of its prompt.
    """
    return SamplingRows(
        temperature=0.0 if params.greedy else params.temperature,
        top_k=max(params.top_k, 0),
        top_p=params.top_p,
        min_p=params.min_p,
        seeds=seed,
        steps=-prompt_tokens,
    )

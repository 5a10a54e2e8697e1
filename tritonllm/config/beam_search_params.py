"""How to search for the most likely continuations of a prompt. Names and defaults are vLLM's."""

from dataclasses import dataclass
from typing import Literal

MAX_BEAM_WIDTH = 256
MOST_PENALTY = 32  # a million tokens to this power is still a number


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """Parameters of :meth:`tritonllm.LLM.beam_search`.

    Args:
        beam_width: how many sequences go on at the same time, and are returned; 1 is greedy.
        max_tokens: the most new tokens of each sequence.
        ignore_eos: go on after the end-of-sequence token.
        temperature: 0 or 1. Beams are compared by the model's own probabilities, which it does not change.
        length_penalty: the power of the length, from -32 to 32. Finished sequences are compared by the sum of their
            tokens' log-probabilities, divided by the number of new tokens to this power. Above 0 it favours long
            sequences, below 0 short ones.
        early_stopping: when to end. True: once ``beam_width`` sequences have finished. False: once the best one that
            goes on would not beat the worst of them if it ended now. ``"never"``: once it could not, however long it
            becomes (with a positive ``length_penalty``; else as False). The argument of transformers' ``generate``.
        include_stop_str_in_output: keep the end-of-sequence token in the text.

    Raises:
        ValueError: a value outside its range; the message names the parameter.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        for name, most in (("beam_width", MAX_BEAM_WIDTH), ("max_tokens", None)):
            value = getattr(self, name)
            if type(value) is not int or value < 1 or (most is not None and value > most):
                limits = "of at least 1" if most is None else f"from 1 to {most}"
                raise ValueError(f"{name} must be an integer {limits}, got {value!r}")
        for name in ("ignore_eos", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if isinstance(self.temperature, bool) or self.temperature not in (0, 1):
            raise ValueError(
                f"temperature must be 0 or 1, got {self.temperature!r}: beams are compared by the model's own "
                "probabilities; to draw tokens, use generate"
            )
        penalty = self.length_penalty
        if not isinstance(penalty, int | float) or isinstance(penalty, bool) or not abs(penalty) <= MOST_PENALTY:
            raise ValueError(f"length_penalty must be a number from -{MOST_PENALTY} to {MOST_PENALTY}, got {penalty!r}")
        if not (isinstance(self.early_stopping, bool) or self.early_stopping == "never"):
            raise ValueError(f"early_stopping must be True, False or 'never', got {self.early_stopping!r}")

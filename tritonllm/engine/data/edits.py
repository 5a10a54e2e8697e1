"""What requests change about their logits, as plain data that the device is told once. No torch.

A request's edits are written to its seat when it is first sampled from (and again after a preemption). From then on
the device counts the tokens by itself: nothing has to come back to the host before the next step can be planned.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tritonllm.engine.data.request import Request

MAX_ENTRIES = 1024  # of one request: biases, bad words, and the tokens that may not end a short output
MAX_BAD_WORD = 17  # tokens


class TokenEdit(NamedTuple):
    """Adds ``value`` to a token's logit while the output has fewer than ``until`` tokens (``None``: always) and ends
    with ``after``."""

    token: int
    value: float
    until: int | None = None
    after: tuple[int, ...] = ()


@dataclass(frozen=True)
class SeatEdits:
    """What :func:`tritonllm.kernels.logit_edits.write_seat` is to write.

    Attributes:
        seat: the seat of the request.
        prompt, output: the request's prompt and output token ids so far.
        repetition, frequency, presence: the penalties of the request, as in :class:`SamplingParams`.
        entries: biases and bans of single tokens.
        allowed: the tokens that may be drawn; ``None`` for all.
    """

    seat: int
    prompt: Sequence[int]
    output: Sequence[int]
    repetition: float
    frequency: float
    presence: float
    entries: tuple[TokenEdit, ...]
    allowed: tuple[int, ...] | None


def entries_of(request: Request) -> tuple[TokenEdit, ...]:
    """Biases and bans of single tokens, with their conditions."""
    params = request.params
    entries = [TokenEdit(token, bias) for token, bias in (params.logit_bias or {}).items()]
    if params.min_tokens and params.structured_outputs is None:  # else the host knows when the form has to end
        ends = {*request.eos_token_ids, *(params.stop_token_ids or ())}
        entries += [TokenEdit(token, -math.inf, until=params.min_tokens) for token in sorted(ends)]
    return (*entries, *(TokenEdit(word[-1], -math.inf, after=word[:-1]) for word in request.bad_words))


def edits_of(request: Request, seat: int) -> SeatEdits:
    """As the request is now; its prompt is shared (it never changes), its output copied."""
    p = request.params
    return SeatEdits(
        seat=seat,
        prompt=request.prompt_token_ids,
        output=tuple(request.output_token_ids),
        repetition=p.repetition_penalty,
        frequency=p.frequency_penalty,
        presence=p.presence_penalty,
        entries=entries_of(request),
        allowed=None if p.allowed_token_ids is None else tuple(p.allowed_token_ids),
    )


def check_edits(request: Request) -> None:
    """Whether the request's wishes fit.

    Raises:
        ValueError: too many biases and bans, too long a bad word, or no token left.
    """
    entries = entries_of(request)
    _check_allowed(request, entries)
    count = len(entries)
    if count > MAX_ENTRIES:
        raise ValueError(
            f"logit_bias, bad_words and (with min_tokens) stop_token_ids name {count} tokens, more than {MAX_ENTRIES}: "
            "leave some out, or use allowed_token_ids"
        )
    longest = max((len(word) for word in request.bad_words), default=0)
    if longest > MAX_BAD_WORD:
        raise ValueError(f"bad_words has one of {longest} tokens, more than {MAX_BAD_WORD}: use its beginning")


def _check_allowed(request: Request, entries: Sequence[TokenEdit]) -> None:
    """Something must be left of ``allowed_token_ids``: with all logits -inf, any token could come."""
    allowed = request.params.allowed_token_ids
    banned = {entry.token for entry in entries if entry.value == -math.inf and not entry.after}
    if allowed is None or not banned.issuperset(allowed):
        return
    words = {word[0] for word in request.bad_words if len(word) == 1}
    by = [] if words.issuperset(allowed) else [f"min_tokens={request.params.min_tokens} (they end the output)"]
    by += ["bad_words"] if words.intersection(allowed) else []
    raise ValueError(f"allowed_token_ids are all banned by {' and '.join(by)}: allow another token, or drop the ban")

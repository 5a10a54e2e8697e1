"""What requests change about their logits, as state on the device that the sampling kernel applies.

A request's wishes are written to its seat when it is first sampled from (and again after a preemption). From then on
the device counts the tokens by itself: nothing has to come back to the host before the next step can be planned.
"""

from collections.abc import Sequence

import numpy as np
import torch

from tritonllm.engine.batch import upload
from tritonllm.engine.request import Request
from tritonllm.engine.scheduler import ScheduledRequest
from tritonllm.kernels.sampling.edits import Entry, LogitEdits, make_logit_edits, write_seat

MAX_ENTRIES = 1024  # of one request: biases, bad words, and the tokens that may not end a short output
MAX_BAD_WORD = 17  # tokens


def entries_of(request: Request) -> list[Entry]:
    """Biases and bans of single tokens, with their conditions."""
    params = request.params
    entries = [Entry(token, bias) for token, bias in (params.logit_bias or {}).items()]
    if params.min_tokens:
        ends = {*request.eos_token_ids, *(params.stop_token_ids or ())}
        entries += [Entry(token, -np.inf, until=params.min_tokens) for token in sorted(ends)]
    return entries + [Entry(word[-1], -np.inf, after=word[:-1]) for word in request.bad_words]


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


def _check_allowed(request: Request, entries: Sequence[Entry]) -> None:
    """Something must be left of ``allowed_token_ids``: with all logits -inf, any token could come."""
    allowed = request.params.allowed_token_ids
    banned = {entry.token for entry in entries if entry.value == -np.inf and not entry.after}
    if allowed is None or not banned.issuperset(allowed):
        return
    words = {word[0] for word in request.bad_words if len(word) == 1}
    by = [] if words.issuperset(allowed) else [f"min_tokens={request.params.min_tokens} (they end the output)"]
    by += ["bad_words"] if words.intersection(allowed) else []
    raise ValueError(f"allowed_token_ids are all banned by {' and '.join(by)}: allow another token, or drop the ban")


def is_edited(item: ScheduledRequest) -> bool:
    """Whether a step must edit the request's logits."""
    return item.request.edits_logits or item.output_index < item.request.params.min_tokens


def make_state(seats: int, vocab: int, device: torch.device) -> LogitEdits:
    return make_logit_edits(seats, vocab, entries=MAX_ENTRIES, longest=MAX_BAD_WORD - 1, device=device)


class SeatEdits:
    """The state of all seats; takes no memory before a request needs it (then 2.25 bytes a seat and token).

    Args:
        seats: most requests running at once.
        vocab: size of the vocabulary.
        device: where the logits are.
    """

    def __init__(self, seats: int, vocab: int, device: torch.device) -> None:
        self._size = seats, vocab
        self._device = device
        self._state: LogitEdits | None = None
        self._admissions = [-1] * seats  # of whom the state holds

    def of(self, items: Sequence[ScheduledRequest]) -> tuple[LogitEdits, torch.Tensor]:
        """The state, and for each item its seat, or -1 if nothing is to be edited, ``[R]`` int32 on the device."""
        if self._state is None:
            self._state = make_state(*self._size, self._device)
        seats = np.full(len(items), -1, dtype=np.int32)
        for row, item in enumerate(items):
            request, seat = item.request, item.request.seat
            if seat is None or not is_edited(item):
                continue
            seats[row] = seat
            if self._admissions[seat] != request.admission:
                self._admissions[seat] = request.admission
                self._write(self._state, request, seat)
        return self._state, upload([seats], self._device)[0]

    @staticmethod
    def _write(state: LogitEdits, request: Request, seat: int) -> None:
        p = request.params
        write_seat(
            state,
            seat,
            prompt=request.prompt_token_ids,
            output=request.output_token_ids,
            repetition=p.repetition_penalty,
            frequency=p.frequency_penalty,
            presence=p.presence_penalty,
            entries=entries_of(request),
            allowed=p.allowed_token_ids,
        )

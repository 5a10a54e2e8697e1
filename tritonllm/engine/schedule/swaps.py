"""What the sequences of a request leave in the host's memory when they are preempted and no prefix cache names their
blocks: the blocks of all of them, or of none. No torch.

The sequences of a request run together (:mod:`tritonllm.engine.schedule.gang`). If some came back by a copy and the
others had to be computed, the request would take as long as if all were computed, and the copies would have taken slots
that others can use. So what is left is kept or given up as a whole (all-or-nothing eviction: Kwon et al.,
"PagedAttention", SOSP 2023, section 4.5). The prompt, which they share, stands for itself: it is of use without the
rest, but the rest is of none without it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from tritonllm.engine.data.request import Request, RequestStatus


def own_labels(request: Request, block_tokens: int) -> tuple[list[bytes], list[bytes]]:
    """Where no prefix cache names blocks by their contents, a request that has been preempted names its own full ones:
    first those of the prompt, which its siblings name alike, then those behind, which it names anew each time.

    ``block_tokens`` are a block's tokens over all ranks. If one of the siblings computes all of its prompt in any case,
    none of them has labels.
    """
    first = request.siblings[0] if request.siblings else request
    if first.computes_all or not request.num_preemptions:
        return [], []
    shared = min(len(request.prompt_token_ids), request.num_tokens - 1) // block_tokens
    labels = [b"%d:%d" % (first.order[2], i) for i in range(shared)]
    last = (request.num_tokens - 1) // block_tokens
    return labels, [b"%d:%d:%d" % (request.order[2], request.num_preemptions, i) for i in range(shared, last)]


@dataclass
class Swap:
    """Blocks of one user's request in the host's memory, by their labels.

    Attributes:
        prompt: the blocks of the prompt, without which the others are of no use. Like ``own`` in order: dicts serve as
            sets.
        own: blocks behind the prompt, of the sequences that are still preempted.
        returns: whether a sequence has come back by a copy, so that the others do, too.
    """

    prompt: dict[bytes, None] = field(default_factory=dict)
    own: dict[bytes, None] = field(default_factory=dict)
    returns: bool = False

    @property
    def labels(self) -> list[bytes]:
        return [*self.own, *self.prompt]

    def lacks(self, request: Request, block_tokens: int) -> bool:
        """The request waits to be computed anew: nothing is here of what it had behind its prompt."""
        if request.status is not RequestStatus.PREEMPTED:
            return False
        _, own = own_labels(request, block_tokens)
        return bool(own) and own[0] not in self.own


class Swaps:
    """The swaps of all requests, each of which has at least one block of its own in the host's memory."""

    def __init__(self) -> None:
        self._swaps: dict[int, Swap] = {}
        self._of: dict[bytes, int] = {}  # whose a label is

    def of(self, request: Request) -> Swap:
        """What the request and its siblings have left; an empty one if that is nothing."""
        return self._swaps.get(self._number(request)) or Swap()

    def leave(self, request: Request, prompt: Iterable[bytes], own: Iterable[bytes]) -> None:
        """The request, or siblings with it, has left these, all of which are stored."""
        number, own = self._number(request), dict.fromkeys(own)
        if own:
            swap = self._swaps.setdefault(number, Swap())
            swap.prompt.update(dict.fromkeys(prompt))
            swap.own.update(own)
            swap.returns = False
            self._of.update(dict.fromkeys([*swap.prompt, *own], number))

    def come_back(self, request: Request, own: Iterable[bytes]) -> None:
        """One of the sequences does not need its own any more."""
        swap = self.of(request)
        for label in own:
            if label in swap.own:
                del swap.own[label], self._of[label]
        if swap.own:
            swap.returns = True
        else:
            self._end(self._number(request))

    def forget(self, request: Request) -> list[bytes]:
        """What the request and its siblings have left is given up. Returns the blocks of their own."""
        return self._end(self._number(request))

    def broken_by(self, label: bytes) -> list[bytes]:
        """This block is given up. Returns the others that are of no use now; they are forgotten."""
        number = self._of.get(label)
        return [] if number is None else [other for other in self._end(number) if other != label]

    def _end(self, number: int) -> list[bytes]:
        swap = self._swaps.pop(number, None) or Swap()
        for label in swap.labels:
            del self._of[label]
        return [*swap.own]

    @staticmethod
    def _number(request: Request) -> int:
        return (request.siblings[0] if request.siblings else request).order[2]

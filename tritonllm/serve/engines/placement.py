"""Which of several replicas of an engine gets a request: the one that has the least left to compute.

A replica's load is its tokens in flight: prompt tokens that it has yet to compute, and output tokens that it may yet
generate. A request adds fewer where a replica has computed the beginning of its prompt before, so requests of one
conversation meet again in one cache, until that replica has so much more to do that computing the prompt elsewhere is
less work. (The idea of cache-aware routing: Zheng et al., "SGLang", NeurIPS 2024, and its router.)

What a replica's cache holds is not asked. It is taken to hold the prompts that it was sent last, as many as fit.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from tritonllm.engine.data.request import PACKED, PACKED_BYTES

PIECE = 64  # prompts are compared in pieces of so many tokens
FIRST_GUESS = 128.0  # tokens of an output, before one has ended
WEIGHT = 0.05  # of an output's length in the mean over outputs
# A prompt token counts so often when a replica is chosen: the request waits for it, and so do others behind it. With 1
# a burst of requests with one long beginning would have every replica compute it; with 2 the first replica has the
# burst until its tokens in flight are twice that beginning.
ANEW = 2


@dataclass(slots=True)
class _InFlight:
    """Tokens that a request still adds to its replica's load."""

    replica: int
    prompt: int
    output: int
    generated: int = 0


class Placement:
    """Places requests; told what becomes of them.

    Args:
        capacities: tokens that each replica's cache holds.
    """

    def __init__(self, capacities: Sequence[int]) -> None:
        if not capacities:
            raise ValueError("capacities must name at least one replica")
        self._most = [max(1, tokens // PIECE) for tokens in capacities]
        self._held: list[OrderedDict[int, None]] = [OrderedDict() for _ in capacities]
        self._loads = [0] * len(capacities)
        self._lost: set[int] = set()
        self._requests: dict[str, _InFlight] = {}
        self._length = FIRST_GUESS  # a mean over outputs
        self._turn = 0

    @property
    def loads(self) -> tuple[int, ...]:
        """Tokens in flight of each replica."""
        return tuple(self._loads)

    def place(self, request_id: str, prompt: Sequence[int], most: int, salt: str | None = None, n: int = 1) -> int:
        """Choose a replica for a request, which is not in flight.

        Args:
            prompt: the token ids of the prompt.
            most: how many output tokens the request may have.
            salt: prompts with different ones share nothing.
            n: how many sequences the request has.

        Raises:
            ValueError: every replica is lost.
        """
        pieces = list(_pieces(prompt, salt))
        count = len(self._loads)
        living = [r for at in range(count) if (r := (self._turn + at) % count) not in self._lost]
        if not living:
            raise ValueError("every replica is lost")
        new = {r: len(prompt) - PIECE * self._known(r, pieces) for r in living}
        replica = min(living, key=lambda r: self._loads[r] + ANEW * new[r])  # of equal ones the next in turn
        self._turn = (replica + 1) % count
        self._remember(replica, pieces)
        entry = _InFlight(replica, new[replica], round(n * min(most, self._length)))
        self._requests[request_id] = entry
        self._loads[replica] += entry.prompt + entry.output
        return replica

    def progress(self, request_id: str, tokens: int) -> None:
        """Note that so many output tokens have come; with the first of them the prompt has been computed."""
        entry = self._requests.get(request_id)
        if entry is not None:
            done = min(entry.output, tokens)
            self._loads[entry.replica] -= entry.prompt + done
            entry.prompt, entry.output = 0, entry.output - done
            entry.generated += tokens

    def end(self, request_id: str) -> None:
        """Note that a request is not in flight any more."""
        entry = self._requests.pop(request_id, None)
        if entry is not None:
            self._loads[entry.replica] -= entry.prompt + entry.output
            if entry.generated:
                self._length += WEIGHT * (entry.generated - self._length)

    def lose(self, replica: int) -> list[str]:
        """Place nothing there any more; returns the requests that are lost with it."""
        self._lost.add(replica)
        self._held[replica].clear()
        lost = [request_id for request_id, entry in self._requests.items() if entry.replica == replica]
        for request_id in lost:
            del self._requests[request_id]
        self._loads[replica] = 0
        return lost

    def find(self, replica: int) -> None:
        """Note that a replica that was lost is there again, and has computed nothing."""
        self._lost.discard(replica)

    def forget(self) -> None:
        """No replica's cache holds anything."""
        for held in self._held:
            held.clear()

    def _known(self, replica: int, pieces: Sequence[int]) -> int:
        held = self._held[replica]
        return next((at for at, piece in enumerate(pieces) if piece not in held), len(pieces))

    def _remember(self, replica: int, pieces: Sequence[int]) -> None:
        held = self._held[replica]
        for piece in reversed(pieces):  # the end of a prompt is forgotten before its beginning
            held[piece] = None
            held.move_to_end(piece)
        while len(held) > self._most[replica]:
            held.popitem(last=False)


def _pieces(prompt: Sequence[int], salt: str | None) -> Iterator[int]:
    """A number for each whole piece, which depends on all tokens up to its end. The last token is never cached."""
    packed = prompt if isinstance(prompt, array) and prompt.typecode == PACKED else array(PACKED, prompt)
    data, size = packed.tobytes(), PIECE * PACKED_BYTES
    parent = xxh3_64_intdigest(b"" if salt is None else salt.encode())
    for start in range(0, (len(prompt) - 1) // PIECE * size, size):
        parent = xxh3_64_intdigest(data[start : start + size], seed=parent)
        yield parent

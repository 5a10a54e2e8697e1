"""The blocks of one replica: those of running requests, and those that are kept for prompts that begin alike.

What is kept are system prompts, shared by all sessions that have them, and sessions. The one that was used longest ago
gives its last blocks up first. A system prompt counts as used with each of its sessions, so it outlives them.
"""

from collections import OrderedDict

from bench.cluster.request import Request, blocks_of
from bench.cluster.step_times import BLOCK


class BlockCache:
    """Args:
        blocks: of the replica.
        keeps: whether blocks of requests that have ended are kept.

    Attributes:
        used: blocks of requests that have been admitted and not released.
        kept_blocks: of those that have ended.
    """

    def __init__(self, blocks: int, keeps: bool = True) -> None:
        self.blocks, self.keeps = blocks, keeps
        self.used = self.kept_blocks = 0
        self._kept: OrderedDict[int, int] = OrderedDict()  # blocks of session s, or of system prompt -1 - s
        self._pins: dict[int, int] = {}  # requests that use a system prompt
        self._computing: set[int] = set()  # system prompts that nobody has computed to the end

    def held(self, request: Request) -> int:
        """Tokens of its history that are here now, without the system prompt."""
        return min(self._kept.get(request.session, 0) * BLOCK, request.history)

    def knows(self, request: Request) -> bool:
        """Whether its system prompt is here."""
        key = -1 - request.system
        return (key in self._pins or key in self._kept) and key not in self._computing

    def admit(self, request: Request, tokens: int) -> int | None:
        """Reserve blocks for a request.

        Args:
            tokens: that it will hold at its end behind the system prompt.

        Returns:
            Tokens of the prompt that need not be computed; ``None`` if there is no room, and then nothing has changed.
        """
        own, shared, key = blocks_of(tokens), request.system_blocks, -1 - request.system
        pinned = key in self._pins
        need = own if pinned else own + shared
        if self.used + need > self.blocks:
            return None
        known = self.knows(request)
        found = max(self.held(request), request.loaded) // BLOCK * BLOCK if known or request.loaded else 0
        self.kept_blocks -= self._kept.pop(request.session, 0)
        if not pinned:
            self.kept_blocks -= self._kept.pop(key, 0)
            if not known and not request.loaded and self.keeps:
                self._computing.add(key)
        self._pins[key] = self._pins.get(key, 0) + 1
        self.used += need
        self._shrink()
        system = request.system_tokens if known or request.loaded else 0
        return min(system + found, request.prompt - 1)

    def computed(self, request: Request) -> None:
        """The prompt has been computed: its system prompt is there for others."""
        self._computing.discard(-1 - request.system)

    def release(self, request: Request, tokens: int) -> None:
        """The request has ended or left; ``tokens`` as in :meth:`admit`."""
        own, key = blocks_of(tokens), -1 - request.system
        self.used -= own
        if self.keeps:
            self._keep(request.session, own)
        self._pins[key] -= 1
        if not self._pins[key]:
            del self._pins[key]
            self.used -= request.system_blocks
            if self.keeps and key not in self._computing:
                self._keep(key, request.system_blocks)
            self._computing.discard(key)

    def fill(self, session: int, tokens: int, system: int, system_tokens: int) -> None:
        """Keep a session and its system prompt as if a request of it had just ended."""
        self._keep(session, blocks_of(tokens))
        self._keep(-1 - system, blocks_of(system_tokens))

    def _keep(self, key: int, blocks: int) -> None:
        self.kept_blocks += blocks - self._kept.pop(key, 0)
        self._kept[key] = blocks
        self._shrink()

    def _shrink(self) -> None:
        while self.used + self.kept_blocks > self.blocks:
            key, blocks = next(iter(self._kept.items()))
            taken = min(blocks, self.used + self.kept_blocks - self.blocks)
            self.kept_blocks -= taken
            if taken == blocks or key < 0:
                self.kept_blocks -= blocks - taken
                del self._kept[key]
            else:
                self._kept[key] = blocks - taken


class Tier:
    """A larger and slower place for sessions: the host's memory beside a GPU, or a store that all of them share.

    Args:
        tokens: that it has room for.
        bytes_per_second: of the link between it and each GPU.
    """

    def __init__(self, tokens: int, bytes_per_second: float) -> None:
        self.tokens, self.bytes_per_second = tokens, bytes_per_second
        self._held: OrderedDict[int, int] = OrderedDict()
        self._sum = 0

    def held(self, request: Request) -> int:
        """Tokens of its history that are here."""
        return min(self._held.get(request.session, 0), request.history)

    def put(self, session: int, tokens: int) -> None:
        """Keep all tokens of a session; the one put longest ago goes."""
        self._sum += tokens - self._held.pop(session, 0)
        self._held[session] = tokens
        while self._sum > self.tokens:
            self._sum -= self._held.popitem(last=False)[1]

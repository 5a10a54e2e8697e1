"""One turn of a chat on its way through the cluster."""

from bench.cluster.step_times import BLOCK


class Request:
    """Args:
        session, turn: which chat, and which of all turns.
        system: of the session; which system prompt.
        system_tokens: of that.
        own: tokens of the prompt behind the system prompt.
        history: of ``own``, those of earlier turns, which some replica may have.
        output: tokens to generate.
        arrival: seconds.

    Attributes:
        first: when the first token came; negative before.
        cached: tokens of the prompt that were not computed.
        loaded: tokens of ``own`` that came from another tier of the cache.
        left, at: tokens of the prompt that are to compute, and those before them.
        home: the replica that has it now.
        placed: the router and replica that count it as in flight, and its tokens there.
        tries: replicas that lost it.
    """

    __slots__ = (
        "arrival", "at", "cached", "first", "history", "home", "left", "loaded", "output", "own", "placed", "session",
        "system", "system_tokens", "tries", "turn",
    )  # fmt: skip

    def __init__(
        self,
        session: int,
        turn: int,
        system: int,
        system_tokens: int,
        own: int,
        history: int,
        output: int,
        arrival: float,
    ) -> None:
        self.session, self.turn, self.system = session, turn, system
        self.system_tokens, self.own, self.history, self.output = system_tokens, own, history, output
        self.arrival, self.first = arrival, -1.0
        self.cached = self.loaded = self.left = self.at = self.tries = 0
        self.home = -1
        self.placed: tuple[int, int, int] | None = None

    @property
    def prompt(self) -> int:
        return self.system_tokens + self.own

    @property
    def system_blocks(self) -> int:
        return blocks_of(self.system_tokens)


def blocks_of(tokens: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-tokens // BLOCK)

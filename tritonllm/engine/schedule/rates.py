"""Whether a block comes back sooner by a copy from the host's memory or by computing it, as far as was measured. No
torch."""

from dataclasses import dataclass

LATENCY = 50e-6  # seconds that a copy takes however short it is: events, launches and the link's own
WEIGHT = 0.2  # of a step in the average


@dataclass
class Rates:
    """What was measured of loading blocks from the host's memory and of computing prompts.

    Attributes:
        block_bytes: how many bytes one block takes in all layers.
        block_tokens: how many tokens a block holds, over all ranks.
        bytes_per_second: how fast blocks are loaded; measured at the start.
        seconds_per_token: how long a prompt's token takes, an average over large steps; 0 as long as there was none:
            then loading pays.
    """

    block_bytes: int = 1
    block_tokens: int = 1
    bytes_per_second: float = float("inf")
    seconds_per_token: float = 0.0
    largest: int = 1
    since: float = 0.0

    def pays(self, blocks: int) -> bool:
        """Whether so many blocks are loaded in less time than they are computed."""
        loading = LATENCY + blocks * self.block_bytes / self.bytes_per_second
        return not self.seconds_per_token or loading < blocks * self.block_tokens * self.seconds_per_token

    def idle(self, now: float) -> None:
        """A step is launched while no other is in flight."""
        self.since = now

    def took(self, tokens: int, now: float) -> None:
        """A step with so many tokens of prompts has ended, and it took since the one before had ended. Small steps say
        little: they take what reading the weights takes."""
        seconds, self.since = now - self.since, now
        if tokens and 2 * tokens >= self.largest:
            self.largest = max(self.largest, tokens)
            each, before = seconds / tokens, self.seconds_per_token
            self.seconds_per_token = before + WEIGHT * (each - before) if before else each

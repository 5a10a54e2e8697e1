"""What a dashboard can look at."""

from typing import Literal, NamedTuple, Protocol

from tritonllm.telemetry.recorder import Gate
from tritonllm.telemetry.snapshot import Snapshot, View


class Status(NamedTuple):
    """How it goes, in words and for the colour."""

    kind: Literal["running", "paused", "ended", "bad"]
    text: str


class SnapshotSource(Protocol):
    """What a dashboard looks at: an engine in this process, or a server.

    Attributes:
        title: a name of what is looked at.
        gate: lets the engine's steps through, if this process has it in its hands.
    """

    title: str
    gate: Gate | None

    def look(self, view: View) -> Snapshot:
        """What there is now. Does not wait for anybody."""
        ...

    def status(self) -> Status: ...

    @property
    def is_over(self) -> bool:
        """Whether nothing more can be seen, so that the screen closes."""
        ...

"""How an output shows which of its text is a thought, for what counts in the answer only."""

from dataclasses import dataclass

KINDS = (None, "tags", "channels")


@dataclass(frozen=True, slots=True)
class ThoughtFormat:
    """What is ``None`` goes by the model's tokenizer and the prompt.

    Args:
        kind: ``"tags"``: the output begins with a thought between two tags, or with the answer; ``"channels"``: it is
            in gpt-oss's harmony format, whose channel ``analysis`` holds thoughts.
        begin, end: texts of the tags.
        inside: the prompt has begun the thought.

    Raises:
        ValueError: a bad value; the message names it.
    """

    kind: str | None = None
    begin: str | None = None
    end: str | None = None
    inside: bool | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind must be tags or channels, got {self.kind!r}")
        for name in ("begin", "end"):
            tag = getattr(self, name)
            if tag is not None and (not isinstance(tag, str) or not tag.strip() or tag != tag.strip()):
                raise ValueError(f"{name} must be a tag without blanks around it, got {tag!r}")
        if (self.begin is None) != (self.end is None):
            raise ValueError("begin and end need each other: give both tags, or none")
        if not isinstance(self.inside, bool | None):
            raise ValueError(f"inside must be true or false, got {self.inside!r}")

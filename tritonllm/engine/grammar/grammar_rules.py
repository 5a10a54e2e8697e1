"""Rules of a grammar in EBNF, as they are written one after the other. No torch."""


class Rules:
    """Names and bodies. The first is ``root``; equal bodies that need no name before are one rule.

    Attributes:
        work: what it took to write them, as who writes them counts it.
    """

    def __init__(self) -> None:
        self.work = 0
        self._bodies: dict[str, str] = {"root": '""'}
        self._names = dict[str, str]()

    def __len__(self) -> int:
        return len(self._bodies)

    def name(self) -> str:
        """A new name, for a rule that is to be defined."""
        name = f"r{len(self._bodies)}"
        self._bodies[name] = '""'
        return name

    def define(self, name: str, body: str) -> None:
        self._bodies[name] = body

    def add(self, body: str) -> str:
        """The name of a rule with this body."""
        if body not in self._names:
            self._names[body] = name = self.name()
            self.define(name, body)
        return self._names[body]

    def __str__(self) -> str:
        return "".join(f"{name} ::= {body}\n" for name, body in self._bodies.items())

"""Who takes part: each sequence's name in the narration, its tokens so far, and what its request asks for."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tritonllm.config.sampling_params import SamplingParams
from tritonllm.engine.text.tokenizer import bad_word_ids
from tritonllm.events import NewTokens, Part, RequestAdded
from tritonllm.teach.narrate.filters import FilterRow, follow
from tritonllm.teach.narrate.recorder import Recorded


@dataclass
class Player:
    """A sequence, as the narration knows it.

    Attributes:
        name: "2", or "2.1" for the first of several continuations of prompt 2.
        prompt, output: the tokens of the prompt and of the output, as far as they were told.
        params: the sampling parameters of its request.
        bad_words: the bad words of its request, tokenized.
        came: whether it was admitted before.
    """

    name: str
    prompt: Sequence[int]
    params: Any
    bad_words: tuple[tuple[int, ...], ...] = ()
    output: list[int] = field(default_factory=list)
    came: bool = False


class Cast:
    """The sequences that the narration tells of.

    Args:
        tokenizer: the tokenizer of the model, or ``None``.
        eos_token_ids: tokens that end an output.
    """

    def __init__(self, tokenizer: Any, eos_token_ids: frozenset[int]) -> None:
        self._tokenizer, self._eos = tokenizer, eos_token_ids
        self._players: dict[str, Player] = {}
        self._requests: dict[str, tuple[str, tuple[str, ...]]] = {}  # of unfinished ones: name, and sequences
        self._count = 0

    def enter(self, event: RequestAdded) -> str:
        """A request came in; returns its name."""
        self._count += 1
        name, params, ids = str(self._count), event.params, event.sequence_ids
        words = params.bad_words if isinstance(params, SamplingParams) else None
        bad = bad_word_ids(self._tokenizer, tuple(words)) if words else ()
        self._requests[event.request_id] = name, ids
        for number, sequence_id in enumerate(ids, 1):
            own = name if len(ids) == 1 else f"{name}.{number}"
            self._players[sequence_id] = Player(own, tuple(event.prompt_token_ids), params, bad)
        return name

    def leave(self, request_id: str) -> str:
        """A request ended; returns its name."""
        name, ids = self._requests.pop(request_id, (request_id, ()))
        for sequence_id in ids:
            self._players.pop(sequence_id, None)
        return name

    def clear(self) -> None:
        self._players.clear()
        self._requests.clear()

    def get(self, sequence_id: str) -> Player | None:
        return self._players.get(sequence_id)

    def name(self, sequence_id: str) -> str:
        player = self._players.get(sequence_id)
        return sequence_id if player is None else player.name

    def known(self, part: Part) -> int:
        """Tokens that a sequence had before a step. (A plan that was made ahead may not know how many guesses before it
        were right.)"""
        player = self._players.get(part.sequence_id)
        return part.num_known_tokens if player is None else len(player.prompt) + len(player.output)

    def add(self, tokens: Iterable[NewTokens]) -> None:
        """Add the tokens that sequences got."""
        for new in tokens:
            player = self._players.get(new.sequence_id)
            if player is not None:
                player.output += new.token_ids

    def rows(self, parts: Iterable[Part], recorded: Sequence[Recorded]) -> dict[str, Recorded]:
        """Which row of logits is which sequence's.

        Args:
            parts: the parts of the step, before its tokens were added. The rows that were recorded are in this order;
                those of sequences that had ended are missing.
            recorded: the rows that the recorder has recorded.
        """
        found: dict[str, Recorded] = {}
        at = 0
        for part in parts:
            player = self._players.get(part.sequence_id)
            if at == len(recorded) or player is None or not part.samples:
                continue
            row = recorded[at]
            if row.output != player.output or row.prompt != list(player.prompt):
                continue
            at += 1
            found[part.sequence_id] = row
        return found

    def follow(self, player: Player, recorded: Recorded, mask: np.ndarray | None) -> FilterRow:
        """What became of a row.

        Args:
            mask: the mask of :class:`~tritonllm.events.StepRestricted`.
        """
        return follow(
            recorded.logits,
            player.params,
            recorded.prompt,
            recorded.output,
            mask=mask,
            eos_token_ids=self._eos,
            bad_words=player.bad_words,
        )

"""How tokens are guessed that a step then verifies: what a user can choose."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tritonllm.config.checks import at_least, is_a, names_code
from tritonllm.config.token_tree import is_chain, parents_of, parse_tree

OF_HEADS = ("eagle", "eagle3")
OF_MODELS = ("draft_model", *OF_HEADS)
METHODS = ("ngram", "suffix", *OF_MODELS)
DRAFTS = 4  # of a model that is named without a number
MOST_DRAFTS, MOST_LOOKUP = 31, 32  # tokens that one launch verifies of a sequence, and that it compares


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Several tokens a step: a drafter guesses what follows, and one pass verifies it (docs/speculation.md).

    Outputs are those of plain decoding. Names are vLLM's.

    Args:
        method: ``ngram`` looks for an earlier occurrence of a sequence's last tokens, and guesses what followed it;
            ``suffix`` looks in the outputs of past requests, too, and guesses more the longer what it found is;
            ``draft_model`` asks a second, smaller model of the same vocabulary, ``eagle`` a head that was trained to go
            on from this model's hidden states, ``eagle3`` one that goes on from the states between its layers;
            ``"module:name"`` makes a drafter of your own (:class:`tritonllm.engine.drafts.drafters.Drafter`).
        model: a folder in Hugging Face format, or a hub id; for ``draft_model``, ``eagle`` and ``eagle3``.
        revision: branch, tag or commit of that hub id.
        num_speculative_tokens: how many tokens are guessed for a sequence in a step, at most 31.
        speculative_token_tree: the tree that the guesses form, several for one place; for ``draft_model``, ``eagle``
            and ``eagle3``. A list of paths of child numbers, or such a list as a string: ``"[(0,), (1,), (0, 0)]"``.
            Without it each guess follows the one before.
        prompt_lookup_min, prompt_lookup_max: how many tokens must have occurred, and how many are compared, at most 32.
            Without either 2 and 5; one alone counts for both.
        suffix_decoding_max_tree_depth: how many tokens ``suffix`` compares, at most 32.
        suffix_decoding_max_spec_factor: how many tokens ``suffix`` guesses at most for each that it found.
        disable_by_batch_size: the most running requests with which steps have guesses; by default as many as one step
            verifies at the price of little more than one token each (:mod:`tritonllm.engine.schedule.speculation`).
        adaptive: leave drafts out of steps where they are not accepted often enough to pay. Without it every step
            verifies some that may, which tests and measurements want. vLLM has no such key.
    """

    method: str = "ngram"
    num_speculative_tokens: int
    model: str | None = None
    revision: str | None = None
    speculative_token_tree: str | Sequence[Sequence[int]] | None = None
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_spec_factor: float = 1.0
    disable_by_batch_size: int | None = None
    adaptive: bool = True

    def __post_init__(self) -> None:
        name = "speculative_config: "
        if not isinstance(self.method, str) or not (self.method in METHODS or names_code(self.method)):
            raise ValueError(f"{name}method must be one of {', '.join(METHODS)} or 'module:name', got {self.method!r}")
        at_least(name + "num_speculative_tokens", self.num_speculative_tokens, 1)
        if self.num_speculative_tokens > MOST_DRAFTS:
            raise ValueError(
                f"{name}num_speculative_tokens must be at most {MOST_DRAFTS}, got {self.num_speculative_tokens}"
            )
        self._check_model(name)
        self._check_tree(name + "speculative_token_tree")
        for field_name in ("prompt_lookup_min", "prompt_lookup_max", "disable_by_batch_size"):
            at_least(name + field_name, getattr(self, field_name), 1)
        depth, factor = self.suffix_decoding_max_tree_depth, self.suffix_decoding_max_spec_factor
        at_least(name + "suffix_decoding_max_tree_depth", depth, 1)
        if depth > MOST_LOOKUP:
            raise ValueError(f"{name}suffix_decoding_max_tree_depth must be at most {MOST_LOOKUP}, got {depth}")
        if not isinstance(factor, int | float) or isinstance(factor, bool) or not factor > 0:
            raise ValueError(f"{name}suffix_decoding_max_spec_factor must be greater than 0, got {factor!r}")
        is_a(name + "adaptive", self.adaptive, bool)
        low, high = self.lookup
        if not low <= high <= MOST_LOOKUP:
            raise ValueError(
                f"{name}prompt_lookup_min ({low}) must be at most prompt_lookup_max ({high}), and that at most "
                f"{MOST_LOOKUP}"
            )

    def _check_model(self, name: str) -> None:
        if self.method in OF_MODELS:
            if not isinstance(self.model, str) or not self.model.strip():
                raise ValueError(
                    f"{name}method={self.method!r} needs model, a folder or a hub id of what drafts with the same "
                    f"vocabulary, got {self.model!r}"
                )
        elif self.model is not None or self.revision is not None:
            raise ValueError(
                f"{name}model and revision are for methods {', '.join(OF_MODELS)}, got method={self.method!r}"
            )

    def _check_tree(self, name: str) -> None:
        if self.speculative_token_tree is None:
            return
        if self.method not in OF_MODELS:
            raise ValueError(
                f"{name} is for methods {', '.join(OF_MODELS)}, got method={self.method!r}: leave the tree out"
            )
        nodes = len(parse_tree(name, self.speculative_token_tree))
        if nodes > MOST_DRAFTS:
            raise ValueError(f"{name} must have at most {MOST_DRAFTS} nodes, got {nodes}: leave some out")
        if nodes != self.num_speculative_tokens:
            raise ValueError(
                f"{name} has {nodes} nodes, and num_speculative_tokens is {self.num_speculative_tokens}: set "
                f"num_speculative_tokens={nodes}"
            )

    @property
    def tree(self) -> tuple[int, ...] | None:
        """The parent of each guess, -1 for those behind the last token; ``None`` for a chain, however it is written."""
        if self.speculative_token_tree is None:
            return None
        parents = parents_of(parse_tree("speculative_token_tree", self.speculative_token_tree))
        return None if is_chain(parents) else parents

    @property
    def depth(self) -> int:
        """Guesses that can be right in one step."""
        if self.speculative_token_tree is None:
            return self.num_speculative_tokens
        return max(map(len, parse_tree("speculative_token_tree", self.speculative_token_tree)))

    @property
    def lookup(self) -> tuple[int, int]:
        """``prompt_lookup_min`` and ``prompt_lookup_max``, their defaults resolved."""
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        if low is None and high is None:
            return 2, 5
        return (low or high or 0), (high or low or 0)

    @classmethod
    def of(cls, value: object) -> "SpeculativeConfig":
        """Make the configuration from vLLM's dictionary, or in short ``"ngram:4"``: a method and
        ``num_speculative_tokens``.

        Raises:
            ValueError: anything else.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            value = _parse_speculative(value)
        if not isinstance(value, Mapping):
            raise ValueError(f"speculative_config must be a dict, a string as ngram:4, or None, got {value!r}")
        given = {name: entry for name, entry in value.items() if entry is not None}
        if "model" in given:
            given.setdefault("method", "draft_model")
        known = [field.name for field in dataclasses.fields(cls)]
        for name in given:
            if name not in known:
                raise ValueError(f"speculative_config: {name!r} is not supported; there are {', '.join(known)}")
        for name in ("method", "num_speculative_tokens"):
            if name not in given:
                example = "{'method': 'ngram', 'num_speculative_tokens': 4}"
                raise ValueError(f"speculative_config: {name} is missing, for example {example}")
        return cls(**given)


def _parse_speculative(text: str) -> object:
    """``ngram:4`` or JSON, as a command line gives it.

    Raises:
        ValueError: neither.
    """
    if text.lstrip().startswith("{"):
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"speculative_config is no JSON ({error}): {text!r}") from error
    method, _, count = text.rpartition(":")
    if not count.isdecimal():
        raise ValueError(f"speculative_config must be a method and a number, as ngram:4, or JSON, got {text!r}")
    return {"method": method, "num_speculative_tokens": int(count)}


def parse_draft(text: str) -> dict[str, object]:
    """``MODEL`` or ``MODEL:K``, as a command line names a draft model that guesses K tokens."""
    model, _, count = text.rpartition(":")
    if not count.isdecimal():
        model, count = text, str(DRAFTS)
    return {"method": "draft_model", "model": model, "num_speculative_tokens": int(count)}

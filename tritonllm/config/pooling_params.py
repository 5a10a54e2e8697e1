"""What a pooling request asks for, and how an engine pools by default. Names and meanings are vLLM's."""

from collections.abc import Collection
from copy import copy
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from tritonllm.config.checks import json_mapping

PoolingTask = Literal["embed", "classify", "token_embed", "token_classify"]
PoolingType = Literal["LAST", "CLS", "MEAN", "ALL", "STEP"]
TASKS: tuple[str, ...] = get_args(PoolingTask)
SEQUENCE_TYPES = ("LAST", "CLS", "MEAN")
TOKEN_TYPES = ("ALL", "STEP")


def _check(name: str, value: object, kind: type, low: int | None = None) -> None:
    if value is None:
        return
    if type(value) is not kind or (low is not None and value < low):
        least = "" if low is None else f" of at least {low}"
        raise ValueError(f"{name} must be of type {kind.__name__}{least}, or None, got {value!r}")


def _check_common(params: "PoolingParams | PoolerConfig") -> None:
    _check("dimensions", params.dimensions, int, 1)
    _check("normalize", params.normalize, bool)
    _check("use_activation", params.use_activation, bool)
    _check("step_tag_id", params.step_tag_id, int, 0)
    ids = params.returned_token_ids
    if ids is not None and (isinstance(ids, str) or not isinstance(ids, Collection) or not ids):
        raise ValueError(f"returned_token_ids must be a list of columns that is not empty, got {ids!r}")
    for column in ids or ():
        _check("returned_token_ids entries", column, int, 0)
    if params.normalize is not None and params.use_activation not in (None, params.normalize):
        raise ValueError("normalize and use_activation mean the same for embeddings: give one")


@dataclass(kw_only=True)
class PoolingParams:
    """How to pool one prompt.

    Attributes:
        truncate_prompt_tokens: use only so many tokens of a longer prompt; -1: as many as the model takes. A decoder
            keeps the last ones; an encoder the first ones and the very last, which is its separator.
        dimensions: how many elements the embedding is cut to (Matryoshka embeddings; Kusupati et al., 2022). Only for
            models whose ``config.json`` says that they were trained for it.
        normalize: divide embeddings by their length; ``None``: as the model's files say, and else yes.
        use_activation: apply the activation of a classifier (softmax or sigmoid); ``None``: yes. Of an embedding the
            activation is the normalization.
        step_tag_id: report only the tokens with this id (process reward models).
        returned_token_ids: report only these columns of what a head computes for each token.
        task: the pooling task, if the method that is called does not say it.
        skip_reading_prefix_cache: compute all tokens, also those that the prefix cache has.

    Raises:
        ValueError: a value of a wrong type or outside its range; the message names the parameter.
    """

    truncate_prompt_tokens: int | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None
    task: PoolingTask | None = None
    skip_reading_prefix_cache: bool | None = None

    def __post_init__(self) -> None:
        _check("truncate_prompt_tokens", self.truncate_prompt_tokens, int, -1)
        if self.truncate_prompt_tokens == 0:
            raise ValueError("truncate_prompt_tokens must be at least 1, or -1 for the model's length, got 0")
        _check_common(self)
        if self.task is not None and self.task not in TASKS:
            raise ValueError(f"task must be one of {', '.join(TASKS)}, got {self.task!r}")
        _check("skip_reading_prefix_cache", self.skip_reading_prefix_cache, bool)

    def clone(self) -> "PoolingParams":
        """A copy of these parameters, which shares nothing that can be changed."""
        other = copy(self)
        other.returned_token_ids = None if self.returned_token_ids is None else list(self.returned_token_ids)
        return other

    def checked(self) -> "PoolingParams":
        """A copy whose values are checked, for the engine to keep.

        Raises:
            ValueError: a value that was assigned is outside its range.
        """
        return replace(self.clone())


@dataclass(frozen=True, kw_only=True)
class PoolerConfig:
    """How an engine pools where a request does not say; ``None`` leaves it to the model's files.

    Attributes:
        pooling_type: sets one of the next two.
        seq_pooling_type: what of a sequence's tokens becomes its vector: ``LAST``, ``CLS`` (the first) or ``MEAN``.
        tok_pooling_type: ``ALL`` tokens, or with ``STEP`` those that ``step_tag_id`` names.
        normalize, use_activation, dimensions, step_tag_id, returned_token_ids: as in :class:`PoolingParams`.

    Raises:
        ValueError: a value outside its range; the message names the argument.
    """

    pooling_type: PoolingType | None = None
    seq_pooling_type: Literal["LAST", "CLS", "MEAN"] | None = None
    tok_pooling_type: Literal["ALL", "STEP"] | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    dimensions: int | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None

    def __post_init__(self) -> None:
        both = (("seq_pooling_type", SEQUENCE_TYPES), ("tok_pooling_type", TOKEN_TYPES))
        for name, allowed in (("pooling_type", SEQUENCE_TYPES + TOKEN_TYPES), *both):
            value = getattr(self, name)
            if value is not None and value not in allowed:
                raise ValueError(f"pooler_config: {name} must be one of {', '.join(allowed)}, got {value!r}")
        for name, allowed in both:
            if self.pooling_type is not None and getattr(self, name) is not None:
                raise ValueError(f"pooler_config: pooling_type and {name} are the same: give one")
            if self.pooling_type in allowed:
                object.__setattr__(self, name, self.pooling_type)
                object.__setattr__(self, "pooling_type", None)
        try:
            _check_common(self)
        except ValueError as error:
            raise ValueError(f"pooler_config: {error}") from error

    @classmethod
    def of(cls, value: object) -> "PoolerConfig":
        """Make the configuration from what vLLM takes: a configuration, a dictionary of its fields, or their JSON as a
        command line gives it.

        Raises:
            ValueError: anything else.
        """
        if isinstance(value, cls):
            return value
        known, forms = [field.name for field in fields(cls)], "a PoolerConfig, a dict or its JSON"
        return cls(**json_mapping("pooler_config", value, known, forms))

    def merged(self, params: PoolingParams) -> PoolingParams:
        """The request's parameters, with ours where it has none and the task takes them."""
        new: dict[str, Any] = {}
        names = ["step_tag_id", "returned_token_ids"] if params.task == "token_classify" else []
        if params.task in ("embed", "token_embed"):
            names.append("dimensions")
        for name in names:
            if getattr(params, name) is None:
                new[name] = getattr(self, name)
        if params.normalize is None and params.use_activation is None:
            embeds = params.task in ("embed", "token_embed") and self.normalize is not None
            new["use_activation"] = self.normalize if embeds else self.use_activation
        return replace(params, **new)

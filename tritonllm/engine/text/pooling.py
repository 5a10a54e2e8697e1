"""What a model can pool, and a pooling request from its parameters to its output."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.nn import functional as F

from tritonllm.config.engine import ModelConfig
from tritonllm.config.pooling_params import PoolerConfig, PoolingParams
from tritonllm.config.prompts import Prompt
from tritonllm.engine.data.outputs import PoolingOutput, PoolingRequestOutput, RequestMetrics
from tritonllm.engine.data.request import AS_SAMPLING, Pooling, Request
from tritonllm.engine.text.input_processor import InputProcessor, TokenizedPrompt
from tritonllm.engine.text.output_processor import RequestState, SequenceOutput
from tritonllm.layers.head import HeadSpec
from tritonllm.models.interface import ModelFacts
from tritonllm.models.sentence_transformers import SentenceModules

How = Literal["last", "cls", "mean", "all"]
_HOW: dict[str, How] = {"LAST": "last", "CLS": "cls", "MEAN": "mean"}
_ALLOWED = {  # parameters that only some tasks take
    "dimensions": ("embed", "token_embed"),
    "normalize": ("embed", "token_embed"),
    "step_tag_id": ("token_classify", "token_embed"),
    "returned_token_ids": ("token_classify", "token_embed"),
}


@dataclass(frozen=True, kw_only=True)
class PoolingAbility:
    """What an engine's model can do beside generating, or instead.

    Attributes:
        architecture: the name of the model's architecture.
        refuses_generation: why it does not generate; ``None`` if it does.
        tasks: the pooling tasks that the model can be asked for.
        how: how each task that pools sequences does so, by the task's name.
        causal: whether a token sees none of those behind it.
        token_types: how many kinds of tokens the model knows; 0 for none.
        labels: how many outputs the model's head has.
        label_names: the names of these outputs in ``config.json``; empty if it has none.
        step_tag_id: the token id to whose positions token classification is limited unless the request says otherwise.
        activation: the function that is applied to the outputs of the head.
        normalize: whether embeddings are normalized unless the request says otherwise.
        width: how many elements an embedding has.
        matryoshka: lengths to which embeddings may be cut: any if it is empty, none if it is ``None``.
        config: the engine's defaults.
    """

    architecture: str = "the model"
    refuses_generation: str | None = None
    tasks: tuple[str, ...] = ()
    how: Mapping[str, How] = field(default_factory=dict)
    causal: bool = True
    token_types: int = 0
    labels: int = 0
    label_names: tuple[str, ...] = ()
    step_tag_id: int | None = None
    activation: Literal["none", "sigmoid", "softmax"] = "none"
    normalize: bool = True
    width: int = 0
    matryoshka: tuple[int, ...] | None = None
    config: PoolerConfig = field(default_factory=PoolerConfig)

    @classmethod
    def of(
        cls, config: ModelConfig, spec: ModelFacts, fields: Mapping[str, Any], modules: SentenceModules | None
    ) -> "PoolingAbility":
        """What a model can pool, by its architecture, its files and the user's wishes.

        Args:
            config: the user's configuration of the model.
            spec: the model.
            fields: the fields of ``config.json``.
            modules: the modules of ``modules.json``; ``None`` without that file.

        Raises:
            ValueError: the user wants what the model cannot do; the message names the argument.
        """
        reason = None
        if not spec.logits or not spec.causal:
            what = "an encoder" if not spec.causal else "without an output projection"
            reason = f"{spec.architecture} is {what} and does not generate: use LLM.embed, LLM.classify or LLM.score"
        if reason is not None and config.runner == "generate":
            raise ValueError(f"runner='generate': {reason}")
        if config.runner == "pooling" and reason is None:
            reason = "this engine was made with runner='pooling' and does not generate: leave runner out"
        tasks: tuple[str, ...] = ("embed", "token_embed")
        if spec.head is not None and config.convert != "embed":
            tasks = ("classify", "token_classify")
        if config.convert == "classify" and spec.head is None:
            raise ValueError(f"convert='classify': {spec.architecture} has no classifier: use convert='embed'")
        if config.runner == "generate" or config.convert == "none":
            tasks = ()
        if modules is not None:
            modules.check_sizes(spec.hidden_size)
        given = config.pooler_config.seq_pooling_type
        of_files = None if modules is None else modules.pooling
        embeds = _HOW[given or of_files or ("LAST" if spec.causal else "CLS")]
        classifies = embeds if spec.head is None else _HOW[given or spec.head.pooling]
        return cls(
            architecture=spec.architecture,
            refuses_generation=reason,
            tasks=tasks,
            how={"embed": embeds, "classify": classifies},
            causal=spec.causal,
            token_types=spec.token_types,
            labels=0 if spec.head is None else spec.head.labels,
            label_names=_label_names(fields) if spec.head is not None else (),
            step_tag_id=_step_tag(config.pooler_config, spec.head),
            activation="none" if spec.head is None else spec.head.activation,
            normalize=modules is None or modules.normalize,
            width=modules.dense[-1][1].out_features if modules is not None and modules.dense else spec.hidden_size,
            matryoshka=_matryoshka(fields),
            config=config.pooler_config,
        )

    def take_params(self, params: PoolingParams) -> PoolingParams:
        """A copy that the user cannot change, checked and complete.

        Raises:
            ValueError: no task, one that the model has not, or parameters that the task does not take.
        """
        params = params.checked()
        if params.task is None:
            raise ValueError("pooling needs a task: call LLM.embed, classify or score, or give PoolingParams a task")
        if params.task not in self.tasks:
            has = f"it has {', '.join(self.tasks)}" if self.tasks else "this engine pools nothing"
            way = " (convert='embed' leaves the head away)" if "embed" in params.task and self.tasks else ""
            raise ValueError(f"task={params.task!r} is not one of {self.architecture}: {has}{way}")
        params = self.config.merged(params)
        if params.task == "token_classify" and params.step_tag_id is None:
            params.step_tag_id = self.step_tag_id
        for name, tasks in _ALLOWED.items():
            if getattr(params, name) is not None and params.task not in tasks:
                raise ValueError(f"{name} is for {' and '.join(tasks)}, the task is {params.task}: leave it out")
        if params.dimensions is not None:
            self._check_dimensions(params.dimensions)
        columns = self.width if "embed" in params.task else self.labels
        for column in params.returned_token_ids or ():
            if column >= columns:
                raise ValueError(f"returned_token_ids has column {column}, but there are {columns}")
        return params

    def _check_dimensions(self, dimensions: int) -> None:
        if self.matryoshka is None:
            raise ValueError(
                f"dimensions={dimensions}: as far as its config.json says, {self.architecture} was not trained for "
                "embeddings that can be cut; if it was, set is_matryoshka to true there"
            )
        if self.matryoshka and dimensions not in self.matryoshka:
            raise ValueError(f"dimensions must be one of {', '.join(map(str, self.matryoshka))}, got {dimensions}")
        if dimensions > self.width:
            raise ValueError(f"dimensions must be at most {self.width}, the embedding's length, got {dimensions}")

    def pooling(self, params: PoolingParams) -> Pooling:
        """What the scheduler and the device do for a request."""
        assert params.task is not None
        how = self.how.get(params.task, "all")
        cached = how == "last" and not params.skip_reading_prefix_cache
        return Pooling(how, head="classify" in params.task, whole=not self.causal, cached=cached)

    def finish(self, rows: torch.Tensor, params: PoolingParams, token_ids: Sequence[int]) -> torch.Tensor:
        """What a request gets of its rows ``[N, outputs]``: a vector, or with tasks of tokens some of the rows."""
        assert params.task is not None
        of_tokens = params.task.startswith("token_")
        if params.returned_token_ids is not None:
            rows = rows[:, params.returned_token_ids]
        if params.step_tag_id is not None:
            rows = rows[torch.tensor(token_ids) == params.step_tag_id]
        rows = rows[:, : params.dimensions]
        wanted = params.normalize if params.use_activation is None else params.use_activation
        if "embed" in params.task:
            if wanted if wanted is not None else self.normalize:
                rows = F.normalize(rows, dim=-1)
        elif wanted is not False and self.activation != "none":
            rows = rows.sigmoid() if self.activation == "sigmoid" else rows.softmax(-1)
        return rows if of_tokens else rows[0]


def _label_names(fields: Mapping[str, Any]) -> tuple[str, ...]:
    names = fields.get("id2label")
    if not isinstance(names, Mapping) or not all(str(key).isdigit() for key in names):
        return ()
    return tuple(str(names[key]) for key in sorted(names, key=int))


def _step_tag(config: PoolerConfig, head: HeadSpec | None) -> int | None:
    """The token id of the tag at which a head scores steps; ``None`` if all tokens are reported.

    Raises:
        ValueError: it is needed and not known.
    """
    tag = None if head is None else head.step_tag_id
    if config.tok_pooling_type == "STEP" and tag is None and config.step_tag_id is None:
        raise ValueError("pooler_config: tok_pooling_type='STEP' needs a step_tag_id")
    return None if config.tok_pooling_type == "ALL" else tag


def _matryoshka(fields: Mapping[str, Any]) -> tuple[int, ...] | None:
    lengths = fields.get("matryoshka_dimensions")
    if isinstance(lengths, list) and lengths:
        return tuple(lengths)
    return () if fields.get("is_matryoshka") else None


def _with_types(prompt: TokenizedPrompt, kinds: int, vocab_size: int) -> Sequence[int]:
    """Token ids with their kinds in them, see :class:`~tritonllm.models.spec.ModelSpec`.

    Raises:
        ValueError: a kind that the model does not know.
    """
    if prompt.token_types is None:
        return prompt.token_ids
    if not all(isinstance(kind, int) and 0 <= kind < kinds for kind in prompt.token_types):
        raise ValueError(f"token_type_ids must be integers below {kinds}, the kinds that the model knows")
    return [token + kind * vocab_size for token, kind in zip(prompt.token_ids, prompt.token_types, strict=True)]


@dataclass
class PoolingState(RequestState):
    """A pooling request: its rows, as they come.

    Attributes:
        pooling_params: complete and checked.
        ability: what the request's model can pool.
        rows: pooled rows by the position of their first token in the prompt.
    """

    pooling_params: PoolingParams = field(default_factory=PoolingParams)
    ability: PoolingAbility = field(default_factory=PoolingAbility)
    rows: dict[int, torch.Tensor] = field(default_factory=dict)

    def take_pooled(self, first: int, rows: torch.Tensor) -> None:
        """Store ``rows[N, outputs]`` from the prompt's position ``first`` on; from 0 on anew, as after a preemption."""
        if first == 0:
            self.rows.clear()
        self.rows[first] = rows

    def output(self) -> PoolingRequestOutput | None:
        """What this step returns of the request: nothing before its end."""
        if not self.finished:
            return None
        self.metrics.finished_time = time.monotonic()
        request = self.sequences[0].request
        error = self.error
        if error is None and request.finish_reason == "abort":
            error = "the request was aborted"
        data = torch.empty(0)
        if error is None:
            parts = [self.rows[first] for first in sorted(self.rows)]
            data = self.ability.finish(torch.cat(parts), self.pooling_params, self.prompt_token_ids)
        return PoolingRequestOutput(
            request_id=self.request_id,
            outputs=PoolingOutput(data),
            prompt_token_ids=self.prompt_token_ids,
            num_cached_tokens=request.num_cached_tokens or 0,
            error=error,
        )


def pooling_state(
    ability: PoolingAbility,
    inputs: InputProcessor,
    request_id: str,
    prompt: Prompt | TokenizedPrompt,
    params: PoolingParams,
    *,
    priority: int = 0,
    arrival: int = 0,
) -> PoolingState:
    """A new pooling request; arguments as of :meth:`LLMEngine.add_request`.

    Raises:
        ValueError: bad input.
    """
    params = ability.take_params(params)
    if (params.truncate_prompt_tokens or 0) > inputs.max_model_len:
        raise ValueError(
            f"truncate_prompt_tokens={params.truncate_prompt_tokens} must fit max_model_len={inputs.max_model_len}: "
            "use at most that, or -1"
        )
    tokenized = inputs.tokenize(prompt, params.truncate_prompt_tokens, continued=False, separated=not ability.causal)
    request = Request(
        request_id=request_id,
        prompt_token_ids=_with_types(tokenized, ability.token_types, inputs.vocab_size),
        params=AS_SAMPLING,
        max_total_tokens=len(tokenized.token_ids) + 1,
        priority=priority,
        arrival=arrival,
        cache_salt=tokenized.cache_salt,
        pooling=ability.pooling(params),
    )
    return PoolingState(
        request_id,
        tokenized.text,
        tokenized.token_ids,
        AS_SAMPLING,
        [SequenceOutput(0, request, None)],
        RequestMetrics(arrival_time=time.monotonic()),
        pooling_params=params,
        ability=ability,
    )

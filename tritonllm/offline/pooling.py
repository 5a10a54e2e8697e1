"""The offline interface's other half: what ``LLM`` does with prompts that it does not continue, as in vLLM."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from tritonllm.config.pooling_params import PoolingParams, PoolingTask
from tritonllm.config.prompts import Prompt, as_list
from tritonllm.config.vllm_arguments import no_adapter, only_none
from tritonllm.engine.data.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from tritonllm.offline.interface import OfflineEngine

Progress = bool | Callable[..., Any]  # whether to show a bar, or what makes one, like tqdm
Prompts = Prompt | Sequence[Prompt]
Params = PoolingParams | Sequence[PoolingParams] | None


class PoolingMethods(ABC):
    """Methods of :class:`~tritonllm.LLM` that pool prompts. They may run beside generation in one engine."""

    @property
    @abstractmethod
    def _engine(self) -> OfflineEngine:
        """What runs the batches."""

    @abstractmethod
    def _complete(self, kind: type, prompts: list[Prompt], params: Any, use_tqdm: Progress) -> list[Any]:
        """Run a batch to its end; ``params`` are one of a ``kind`` for all, or one for each."""

    def encode(
        self,
        prompts: Prompts,
        pooling_params: Params = None,
        *,
        use_tqdm: Progress = True,
        lora_request: None = None,
        tokenization_kwargs: None = None,
        pooling_task: PoolingTask | None = None,
    ) -> list[PoolingRequestOutput]:
        """Pool each prompt.

        Args:
            prompts: as for :meth:`generate`.
            pooling_params: one for all, or one for each prompt.
            use_tqdm: show a progress bar; or what makes the bar, like tqdm.
            lora_request: none; there are no adapters yet.
            tokenization_kwargs: none; only vLLM has them.
            pooling_task: ``embed`` or ``classify`` for a vector of each prompt, ``token_embed`` or ``token_classify``
                for one of each of its tokens; may stand in the parameters instead.

        Returns:
            One output per prompt, in their order; ``.outputs.data`` is a float32 tensor on the CPU.

        Raises:
            ValueError: bad input, naming the prompt by its index, or a task that the model has not; nothing was run.
            RuntimeError: a prompt could not be pooled.
        """
        no_adapter(lora_request)
        only_none(tokenization_kwargs=tokenization_kwargs)
        batch = as_list(prompts)
        given = pooling_params if pooling_params is not None else PoolingParams()
        params: Any
        if isinstance(given, Sequence):
            params = [_with_task(one, pooling_task) for one in given]
        else:
            params = _with_task(given, pooling_task)
        outputs = self._complete(PoolingParams, batch, params, use_tqdm)
        for index, output in enumerate(outputs):
            if output.error is not None:
                raise RuntimeError(f"prompts[{index}] was not pooled: {output.error}")
        return outputs

    def embed(
        self,
        prompts: Prompts,
        *,
        pooling_params: Params = None,
        use_tqdm: Progress = True,
        lora_request: None = None,
        tokenization_kwargs: None = None,
    ) -> list[EmbeddingRequestOutput]:
        """A vector for each prompt, in ``.outputs.embedding``; arguments and errors as for :meth:`encode`."""
        only_none(tokenization_kwargs=tokenization_kwargs)
        more: Any = {"use_tqdm": use_tqdm, "lora_request": lora_request, "pooling_task": "embed"}
        return [EmbeddingRequestOutput.from_base(output) for output in self.encode(prompts, pooling_params, **more)]

    def classify(
        self,
        prompts: Prompts,
        *,
        pooling_params: Params = None,
        use_tqdm: Progress = True,
        lora_request: None = None,
        tokenization_kwargs: None = None,
    ) -> list[ClassificationRequestOutput]:
        """A number for each class, in ``.outputs.probs``; arguments and errors as for :meth:`encode`."""
        only_none(tokenization_kwargs=tokenization_kwargs)
        more: Any = {"use_tqdm": use_tqdm, "lora_request": lora_request, "pooling_task": "classify"}
        outputs = self.encode(prompts, pooling_params, **more)
        return [ClassificationRequestOutput.from_base(output) for output in outputs]

    def reward(
        self,
        prompts: Prompts,
        /,
        *,
        pooling_params: Params = None,
        use_tqdm: Progress = True,
        lora_request: None = None,
        tokenization_kwargs: None = None,
    ) -> list[PoolingRequestOutput]:
        """What a reward model says of each token, ``[tokens, labels]`` in ``.outputs.data``: the last token's is the
        reward of the whole. Arguments and errors as for :meth:`encode`."""
        only_none(tokenization_kwargs=tokenization_kwargs)
        more: Any = {"use_tqdm": use_tqdm, "lora_request": lora_request, "pooling_task": "token_classify"}
        return self.encode(prompts, pooling_params, **more)

    def score(
        self,
        data_1: Prompts,
        data_2: Prompts,
        /,
        *,
        use_tqdm: Progress = True,
        pooling_params: PoolingParams | None = None,
        lora_request: None = None,
        tokenization_kwargs: None = None,
    ) -> list[ScoringRequestOutput]:
        """How well texts fit: a cross-encoder reads each pair, else it is the cosine of two embeddings.

        Args:
            data_1: one, which goes with all of ``data_2``, or as many. A cross-encoder wants texts.
            data_2: one or several.
            use_tqdm, pooling_params, lora_request, tokenization_kwargs: as for :meth:`encode`.

        Returns:
            One output for each of ``data_2``; the number is in ``.outputs.score``.

        Raises:
            ValueError: bad input, or a classifier with more than one label.
            RuntimeError: a text could not be pooled.
        """
        only_none(tokenization_kwargs=tokenization_kwargs)
        first, second = as_list(data_1), as_list(data_2)
        if len(first) not in (1, len(second)):
            raise ValueError(
                f"data_1 has {len(first)} entries and data_2 has {len(second)}: give one for all, or as many"
            )
        if not second:
            return []
        more: Any = {"use_tqdm": use_tqdm, "lora_request": lora_request}
        pooling = self._engine.pooling
        if "classify" not in pooling.tasks:
            outputs = self.encode([*first, *second], pooling_params, pooling_task="embed", **more)
            ones, others = outputs[: len(first)], outputs[len(first) :]
            return [_cosine(*pair) for pair in zip(ones * (len(others) // len(ones)), others, strict=True)]
        if pooling.labels != 1:
            raise ValueError(f"score needs a classifier with one label, this one has {pooling.labels}: use classify")
        pairs = [
            self._engine.inputs.pair(one, other, with_types=pooling.token_types > 1)
            for one, other in zip(first * (len(second) // len(first)), second, strict=True)
        ]
        outputs = self.encode(pairs, pooling_params, pooling_task="classify", **more)
        return [ScoringRequestOutput.from_base(output) for output in outputs]


def _with_task(params: PoolingParams, task: PoolingTask | None) -> PoolingParams:
    if not isinstance(params, PoolingParams):
        raise ValueError(f"pooling_params must be PoolingParams, got {type(params).__name__}")
    if task is None or params.task == task:
        return params
    if params.task is not None:
        raise ValueError(f"pooling_params has task={params.task!r}, but {task!r} is asked for: leave one out")
    params = params.clone()
    params.task = task
    return params


def _cosine(one: PoolingRequestOutput, other: PoolingRequestOutput) -> ScoringRequestOutput:
    cosine: torch.Tensor = F.cosine_similarity(one.outputs.data, other.outputs.data, dim=0)
    base = PoolingRequestOutput(
        request_id=f"{one.request_id}_{other.request_id}",
        outputs=PoolingOutput(cosine),
        prompt_token_ids=[*one.prompt_token_ids, *other.prompt_token_ids],
        num_cached_tokens=one.num_cached_tokens + other.num_cached_tokens,
    )
    return ScoringRequestOutput.from_base(base)

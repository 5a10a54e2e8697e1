"""What ``LLM`` needs of an engine: the one in this process has it, and so have several in processes of their own."""

from collections.abc import Collection, Sequence
from typing import Any, Protocol

from tritonllm.config.beam_search_params import BeamSearchParams
from tritonllm.config.engine import ModelConfig
from tritonllm.config.pooling_params import PoolingParams
from tritonllm.config.prompts import Prompt
from tritonllm.config.sampling_params import SamplingParams
from tritonllm.engine.data.outputs import EngineOutput
from tritonllm.engine.data.stats import EngineStats
from tritonllm.engine.text.input_processor import InputProcessor
from tritonllm.engine.text.pooling import PoolingAbility
from tritonllm.experts.load import ExpertLoad

RequestParams = SamplingParams | BeamSearchParams | PoolingParams


class RequestRefusedError(ValueError):
    """An engine in another process did not take a request.

    Args:
        request_id: the id of the request.
        why: what is wrong with the request.
    """

    def __init__(self, request_id: str, why: str) -> None:
        super().__init__(why)
        self.request_id = request_id


class OfflineEngine(Protocol):
    """The engine or engines of an :class:`~tritonllm.LLM`. The methods are those of :class:`~tritonllm.LLMEngine`."""

    inputs: InputProcessor
    pooling: PoolingAbility

    @property
    def tokenizer(self) -> Any: ...

    @property
    def model_config(self) -> ModelConfig: ...

    @property
    def stats(self) -> EngineStats: ...

    @property
    def is_sleeping(self) -> bool: ...

    def add_request(self, request_id: str, prompt: Prompt, params: RequestParams, *, priority: int = 0) -> None: ...

    def abort_request(self, request_ids: Sequence[str]) -> object: ...

    def has_unfinished_requests(self) -> bool: ...

    def step(self) -> list[EngineOutput]: ...

    def reset_prefix_cache(self) -> bool: ...

    def sleep(self, level: int = 1) -> None: ...

    def wake_up(self, tags: Collection[str] | None = None) -> None: ...

    def reload_weights(self, model: str | None = None) -> None: ...

    def expert_load(self) -> ExpertLoad: ...

    def reset_expert_load(self) -> None: ...

"""What the engine sees of a model, and all it sees."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch

from tritonllm.layers.head import Head, HeadSpec
from tritonllm.layers.metadata import AttentionMetadata, CacheShape, KVCacheView, KVScales


class ModelFacts(Protocol):
    """A model's sizes and limits.

    Attributes:
        caches: the shape of each cache that layers write, in the order of these layers.
        cache_of_layer: for each layer, which of the caches it reads.
    """

    @property
    def architecture(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def caches(self) -> tuple[CacheShape, ...]: ...
    @property
    def cache_of_layer(self) -> Sequence[int]: ...
    @property
    def max_position_embeddings(self) -> int: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def causal(self) -> bool: ...
    @property
    def token_types(self) -> int: ...
    @property
    def logits(self) -> bool: ...
    @property
    def head(self) -> HeadSpec | None: ...


class LayerWork(NamedTuple):
    """What a layer computes of a token.

    Attributes:
        weights: how many weights the token meets; of experts, those of the chosen.
        experts: whether the layer has experts.
    """

    weights: int
    experts: bool


class StagedLM(Protocol):
    """What the transfer between the stages of a pipeline sees of a stage's model."""

    dtype: torch.dtype
    incoming: torch.Tensor | None

    @property
    def spec(self) -> ModelFacts: ...
    @property
    def columns_in(self) -> int: ...
    @property
    def columns_out(self) -> int: ...


class CausalLM(Protocol):
    """A loaded model: :class:`~tritonllm.models.decoder.Decoder`, whose docstrings say what the methods do."""

    dtype: torch.dtype
    supports_graphs: bool

    @property
    def classifier(self) -> Head | None: ...

    @property
    def spec(self) -> ModelFacts: ...
    @property
    def work(self) -> Sequence[LayerWork]: ...
    @property
    def kv_scales(self) -> Sequence[KVScales]: ...

    def __call__(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        kv_cache: Sequence[KVCacheView],
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor: ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor: ...

    def short_keys(self, sequences: int) -> int: ...

    def rehearsal(self) -> AbstractContextManager[None]: ...

"""A model as data: everything the decoder needs to know, and nothing about how files spell it."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from tritonllm.layers.attention import AttentionSpec
from tritonllm.layers.head import HeadSpec
from tritonllm.layers.layer_inputs import LayerInputSpec
from tritonllm.layers.metadata import CacheShape
from tritonllm.layers.mlp import MLPSpec
from tritonllm.layers.moe import MoESpec
from tritonllm.layers.norm import NormSpec


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One layer: attention, then an MLP or experts.

    Attributes:
        keys_from: how many layers before it the layer is whose keys and values it reads; 0 where it has its own. It
            decides what is where and no launch, so layers that differ in nothing else are of one kind.
    """

    attention: AttentionSpec
    mlp: MLPSpec | MoESpec
    keys_from: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        if self.attention.own_keys == (self.keys_from > 0):
            raise ValueError(f"own_keys={self.attention.own_keys} does not go with keys_from={self.keys_from}")


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer, or an encoder: the same with attention to both sides.

    Attributes:
        architecture: the architecture's name in ``config.json``.
        max_position_embeddings: most tokens of a sequence, position scaling included.
        layers: the layers, from the first to the last. They may differ in everything, heads included.
        norm: every norm of the residual stream.
        norm_position: where a block (attention, MLP) and the stream are normalised: ``pre``, the block's input;
            ``post``, the block's output before it is added (OLMo 2); ``sandwich``, both (Gemma 2); ``stream``, the sum
            after it is added, which the stream then is (the original transformer; OPT-350m).
        parallel: attention and MLP both read the layer's input instead of one after the other: ``one norm`` for both,
            or ``two norms``; ``None`` for one after the other. With ``norm_position="pre"``.
        final_norm: whether there is a norm before the output projection.
        embedding_norm: the embeddings are normalised, once all is added to them (BLOOM, BERT).
        first_norm: the first block has a norm before it, as the others have (ModernBERT normalises embeddings instead).
        token_types: kinds of tokens, each with a learned vector that is added to the embeddings (BERT); 0 for none. A
            token of kind t has the id ``t * vocab_size + id``.
        learned_positions: rows of a learned table that is added to the embeddings; 0 for none.
        wave_positions: the base of the waves that are added in its place (:mod:`tritonllm.layers.waves`); ``None`` for
            none.
        position_offset: row of position 0 in either table (OPT begins at 2).
        embedding_size: the size of the token embeddings, which are projected to the hidden size and back (OPT-350m);
            ``None`` if it is the hidden size.
        embedding_multiplier: multiplies the token embeddings.
        residual_multiplier: multiplies what a block adds to the stream.
        logit_scale: multiplies the logits.
        logit_softcap: then replaces them by ``cap * tanh(logit / cap)``; 0 for none.
        logit_bias: whether the output projection has a bias.
        tie_word_embeddings: whether the output projection is the embedding table.
        logits: whether there is an output projection.
        head: what a classifier or a reward model has in its place.
        eos_token_ids: tokens that end a sequence.
        dtype: the dtype of the checkpoint.
        layer_scalars: each layer multiplies the stream by a learned number behind its blocks (Gemma 4).
        residual_weights: each block multiplies the stream, before it adds, by learned numbers, one for each column
            (Doge). With ``norm_position="pre"``, without ``parallel``.
        layer_inputs: what each layer gets of each token beside the stream (Gemma 4); ``None`` for nothing.
        text_of: the architecture whose text model it is, where a checkpoint has towers for images or sound beside it.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    layers: tuple[LayerSpec, ...]
    norm: NormSpec
    norm_position: Literal["pre", "post", "sandwich", "stream"] = "pre"
    parallel: Literal["one norm", "two norms"] | None = None
    final_norm: bool = True
    embedding_norm: bool = False
    first_norm: bool = True
    token_types: int = 0
    learned_positions: int = 0
    wave_positions: float | None = None
    position_offset: int = 0
    embedding_size: int | None = None
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    logit_bias: bool = False
    tie_word_embeddings: bool = False
    logits: bool = True
    head: HeadSpec | None = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    layer_scalars: bool = False
    residual_weights: bool = False
    layer_inputs: LayerInputSpec | None = None
    text_of: str = ""

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("layers must not be empty")
        for place, layer in enumerate(self.layers):
            source = None if layer.keys_from > place else self.layers[place - layer.keys_from].attention
            if isinstance(layer.mlp, MoESpec) and layer.mlp.apart is not None and self.norm_position != "sandwich":
                raise ValueError(f"layer {place}: experts apart need norm_position='sandwich'")
            if layer.keys_from and (source is None or not source.own_keys or source.cache != layer.attention.cache):
                raise ValueError(
                    f"keys_from: the layer {layer.keys_from} before layer {place} must have keys of its own, of the "
                    f"shape {tuple(layer.attention.cache)}"
                )
        chunks = {layer.attention.attention_chunk or 0 for layer in self.layers} - {0}
        if len(chunks) > 1:
            raise ValueError(f"layers with an attention_chunk must agree in it, got {sorted(chunks)}")
        if self.parallel is not None and self.norm_position != "pre":
            raise ValueError(f"parallel={self.parallel!r} needs norm_position='pre', got {self.norm_position!r}")
        if self.residual_weights and (self.norm_position != "pre" or self.parallel is not None):
            raise ValueError("residual_weights need norm_position='pre', and no parallel blocks")

    def up_to(self, length: int) -> "ModelSpec":
        """The model for sequences of at most ``length`` tokens, without what only longer ones have."""

        def shortened(layer: LayerSpec) -> LayerSpec:
            scaling, chunk = layer.attention.query_scaling, layer.attention.attention_chunk
            less: dict[str, Any] = {}
            if scaling is not None and length + scaling.shift <= scaling.every:
                less["query_scaling"] = None
            if chunk is not None and length <= chunk:
                less["attention_chunk"] = None
            return dataclasses.replace(layer, attention=dataclasses.replace(layer.attention, **less)) if less else layer

        return dataclasses.replace(self, layers=tuple(shortened(layer) for layer in self.layers))

    @property
    def causal(self) -> bool:
        """No token sees one behind it."""
        return all(layer.attention.causal for layer in self.layers)

    @property
    def attention_chunk(self) -> int | None:
        """What layers have as ``attention_chunk`` that have one; ``None`` if none has."""
        sizes = (layer.attention.attention_chunk for layer in self.layers)
        return next((size for size in sizes if size is not None), None)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def distinct_layers(self) -> list[int]:
        """Places of one layer of each kind: the first, where the stream begins, and those that differ after it."""
        places = [0]
        for place, layer in enumerate(self.layers):
            if place > 0 and all(layer != self.layers[other] for other in places[1:]):
                places.append(place)
        return places

    def without_repeats(self) -> "ModelSpec":
        """The model with one layer of each kind (:meth:`distinct_layers`). One that reads another's keys reads those of
        the last layer of that one's kind."""
        places, layers = self.distinct_layers(), list[LayerSpec]()
        for place in places:
            layer = self.layers[place]
            if layer.keys_from:
                source = self.layers[place - layer.keys_from]
                at = max(at for at, other in enumerate(layers) if other == source)
                layer = dataclasses.replace(layer, keys_from=len(layers) - at)
            layers.append(layer)
        return dataclasses.replace(self, layers=tuple(layers))

    @property
    def experts(self) -> dict[int, int]:
        """Places of the layers that have experts, and how many each has."""
        return {place: of.mlp.num_experts for place, of in enumerate(self.layers) if isinstance(of.mlp, MoESpec)}

    @property
    def caches(self) -> tuple[CacheShape, ...]:
        """The shape of each cache that layers write, in the order of these layers."""
        return tuple(layer.attention.cache for layer in self.layers if layer.attention.own_keys)

    @property
    def cache_of_layer(self) -> Sequence[int]:
        """For each layer, which of the caches it reads."""
        found: list[int] = []
        for place, layer in enumerate(self.layers):
            found.append(found[place - layer.keys_from] if layer.keys_from else len(set(found)))
        return found

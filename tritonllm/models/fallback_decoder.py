"""A transformers model in the place of our decoder, after a probe has shown that it can be there."""

import dataclasses
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tritonllm.dist.group import ALONE, Group
from tritonllm.layers.metadata import UNSCALED, AttentionMetadata, CacheShape, KVCacheView, KVScales
from tritonllm.layers.segments import Segment, Segments, decodes
from tritonllm.models.fallback_attention import PAGED, PROBE, LayerCall, PagedStep, RecordedCalls
from tritonllm.models.fallback_invariance import tokens_alone
from tritonllm.models.fallback_shards import cut, sharing_of
from tritonllm.models.fallback_stages import AbsentLayer, States, keep_stage, layer_list, watched
from tritonllm.models.fallback_weights import LiveWeights
from tritonllm.models.stages import Stage

# Of each of the probe's two sequences: a token, a chunk, a decode.
PROBE_TOKENS = 6
# Largest relative error of the median token's logits; with wrong positions or neighbours most tokens are off by
# tenths. The median, because in half precision rounding can send a token to another expert.
PROBE_ERROR = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.05}


@dataclasses.dataclass(frozen=True)
class FallbackSpec:
    """What the engine needs to know of a model; fields as in :class:`~tritonllm.models.spec.ModelFacts`.

    ``num_kv_heads`` and ``head_size`` are what ``config.json`` suggests. A loaded decoder's spec has what its layers
    asked for.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_kv_heads: int
    head_size: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype
    causal: bool = True
    token_types: int = 0
    logits: bool = True
    head: None = None

    @property
    def caches(self) -> tuple[CacheShape, ...]:
        """The shapes of the caches, which are the same in all layers."""
        return (CacheShape(self.num_kv_heads, self.head_size),) * self.num_layers

    @property
    def cache_of_layer(self) -> Sequence[int]:
        """The places of the caches that layers read: each its own."""
        return range(self.num_layers)


def refused(architecture: str, reason: str) -> ValueError:
    return ValueError(
        f"{architecture} does not run natively and cannot run through transformers either: {reason} (see "
        "docs/models.md)"
    )


class TransformersDecoder(nn.Module):
    """A causal language model of transformers with the interface of :class:`~tritonllm.models.decoder.Decoder`.

    Construction probes it. First a pass without any attention records what each layer asks of it: every layer must ask
    once, all for keys and values of one shape and for a causal mask or window. Then two short sequences, packed, run in
    a cache that is thrown away, and must give the logits that transformers' own attention gives each of them. So
    tokens meet in attention only, positions are those of the batch, and nothing between base model and logits is lost.
    Of several ranks each has its part by then, and what they compute together is compared with the whole model's.

    Args:
        lm: the whole model; its base model is taken out of it. Of several ranks it is on the host.
        spec: the model's description, as its configuration suggests it.
        dtype: the dtype of the activations and of the cache.
        max_model_len: the longest sequence that may come.
        device: where this rank computes; by default where the model is.
        group: the ranks that share the model, or the stage (:mod:`tritonllm.models.fallback_shards`).
        stage: which layers are here (:mod:`tritonllm.models.fallback_stages`); all of them by default.
        batch_invariant: a token's bits do not depend on the rest of its step
            (:mod:`tritonllm.models.fallback_invariance`).

    Attributes:
        spec: what this rank computes.
        whole: what all ranks compute together, as the configuration says it.
        windows: how many keys a token sees in each layer here, itself included; ``None`` for all.
        weights: the weights that are here, by the names of the whole model, to be overwritten.
        group, stage, batch_invariant: as they were given.
        incoming: as in :class:`~tritonllm.models.decoder.Decoder`.

    Raises:
        ValueError: the model cannot be served, and why.
    """

    supports_graphs = False  # until the probe has captured a step
    classifier = None
    work = ()  # nobody asks what its layers compute

    def __init__(
        self,
        lm: Any,
        spec: FallbackSpec,
        *,
        dtype: torch.dtype,
        max_model_len: int,
        device: torch.device | None = None,
        group: Group = ALONE,
        stage: Stage | None = None,
        batch_invariant: bool = False,
    ) -> None:
        super().__init__()
        self.dtype, self.batch_invariant = dtype, batch_invariant
        self.group, self.stage = group, stage or Stage(0, range(spec.num_layers))
        self.whole = spec
        self.base = lm.base_model
        self.head = lm
        self.windows: tuple[int | None, ...] = ()
        self.incoming: torch.Tensor | None = None
        self._rehearses = False
        self._before: AbsentLayer | None = None
        self._behind: AbsentLayer | None = None
        try:
            with torch.inference_mode():
                self.spec = self._separate(spec, max_model_len, device or lm.device)
        except torch.OutOfMemoryError:
            raise
        except ValueError as error:
            raise refused(spec.architecture, str(error)) from error
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as error:  # of the model's own code
            raise refused(spec.architecture, f"its code stops with {type(error).__name__}: {error}") from error

    @property
    def kv_scales(self) -> list[KVScales]:
        """Scales of each layer, as in :class:`~tritonllm.models.decoder.Decoder`. Transformers reads none."""
        return [UNSCALED] * self.spec.num_layers

    @property
    def columns_in(self) -> int:
        """Elements of a token that come from the stage before."""
        return self.spec.hidden_size

    @property
    def columns_out(self) -> int:
        """Elements of a token that go to the next stage."""
        return self.spec.hidden_size

    @property
    def is_whole(self) -> bool:
        """Whether no other rank has a part of the model."""
        return self.group.size == 1 and self.stage.first and self.stage.last

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        kv_cache: Sequence[KVCacheView],
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run one step; arguments and result as in :meth:`tritonllm.models.decoder.Decoder.forward`."""
        step = PagedStep(metadata, kv_cache, self.windows, self.stage.layers.start)
        run = self._alone if self.batch_invariant else self.run
        hidden = run(input_ids, positions, step)
        return hidden[rows] if rows is not None and self.stage.last else hidden

    def _alone(self, input_ids: torch.Tensor, positions: torch.Tensor, step: PagedStep) -> torch.Tensor:
        """:meth:`run`, one token after the other."""
        begun, hidden, count = self.incoming, [], len(positions)
        for token, metadata in enumerate(tokens_alone(step.metadata, positions)):
            if self._rehearses and token < count - 1:
                continue
            mine = slice(token, token + 1)
            if begun is not None:
                self.incoming = begun[mine].clone()
            one = dataclasses.replace(step, metadata=metadata, batch_invariant=True)
            hidden.append(self.run(input_ids[mine], positions[mine], one))
        self.incoming = begun
        if step.metadata.stored is not None:
            for place in range(len(self.stage.layers)):
                step.metadata.stored(place)
        if not hidden:
            return self.run(input_ids, positions, step)
        return hidden[0].repeat(count, 1) if self._rehearses else torch.cat(hidden)

    def run(self, input_ids: torch.Tensor, positions: torch.Tensor, step: PagedStep | RecordedCalls) -> torch.Tensor:
        """``[T, hidden]`` of all tokens, behind the last layer that is here; ``step`` is what attention gets."""
        output = self._base_output(input_ids, positions, step)
        if self._behind is None:
            hidden: torch.Tensor = output.last_hidden_state
        else:
            assert self._behind.seen is not None  # the base model has run it
            hidden, self._behind.seen = self._behind.seen, None
        return hidden[0]

    def _base_output(self, input_ids: torch.Tensor, positions: torch.Tensor, step: PagedStep | RecordedCalls) -> Any:
        if self._before is None:
            begin = {"input_ids": input_ids.long()[None]}
        else:
            assert self.incoming is not None  # the stage before has sent it
            self._before.given = self.incoming[None, : len(positions)]
            begin = {"inputs_embeds": torch.zeros_like(self._before.given)}  # which CTRL would scale in place
        return self.base(**begin, position_ids=positions[None], use_cache=False, paged_step=step)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``hidden[N, hidden]``, the rows that need logits -> ``[N, vocab]`` float32."""
        if not self.batch_invariant or not len(hidden):
            return self._logits(hidden)
        rows = hidden[-1:] if self._rehearses else hidden
        logits = torch.cat([self._logits(row.clone()) for row in rows.split(1)])
        return logits.repeat(len(hidden), 1) if self._rehearses else logits

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(inputs_embeds=hidden[None], use_cache=False).logits
        return logits[0].float()

    def short_keys(self, sequences: int) -> int:
        """None: the host takes longer for these layers than the attention of few sequences."""
        return 0

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Inside the block a step that is batch invariant runs for its last token alone, and the others get that one's
        results: what it launches is the same for each. Other steps are run as always: transformers runs all its
        layers."""
        self._rehearses = self.batch_invariant
        try:
            yield
        finally:
            self._rehearses = False

    def _separate(self, spec: FallbackSpec, max_model_len: int, device: torch.device) -> FallbackSpec:
        """Take the base model out of the language model and this rank's part out of both, and probe what is left;
        returns the spec with what the layers here use."""
        lm = self.head
        if self.base is lm:
            raise ValueError("its output projection is not separate from a base model")
        tokens = min(PROBE_TOKENS, max_model_len)
        ids = (torch.arange(2 * tokens, device=lm.device) * 7 % spec.vocab_size).view(2, tokens)
        calls, output = self._recorded(ids[0])
        heads, head_size = common_shape(calls, range(spec.num_layers))
        masks = {call.layer: call.mask for call in calls}
        windows = {mask: mask.window(max_model_len, lm.device) for mask in set(masks.values())}
        self.windows = tuple(windows[masks[layer]] for layer in self.stage.layers)

        lm.set_attn_implementation("eager")
        sharing = None
        if self.group.size > 1:
            sizes = {"head_size": head_size, "num_kv_heads": heads}
            sharing = sharing_of(lm, spec.architecture, self.group.size, **sizes)
        expected, states = self._whole_results(ids, spec)
        self.weights = LiveWeights(lm, {} if sharing is None else sharing.splits, self.group)
        if states is not None:
            layers = layer_list(self.base, spec.num_layers)
            keep_stage(lm, layers, self.stage, states.wraps)
            self._before = None if self.stage.first else _absent(layers[self.stage.layers.start - 1])
            self._behind = None if self.stage.last else _absent(layers[self.stage.layers.stop])
            self.incoming = None if self.stage.first else states.before.to(device).flatten(0, 1)
        with torch.inference_mode(False):  # else nobody could change the weights outside of one
            if sharing is None:
                lm.to(device)
            else:
                cut(lm, sharing, self.group, device)
        if sharing is not None:
            self.group.reserve(spec.hidden_size, self.dtype)
            heads, head_size = common_shape(self._recorded(ids[0].to(device))[0], self.stage.layers)

        self.weights.find(lm)
        lm.set_attn_implementation(PAGED)
        setattr(lm, lm.base_model_prefix, _Given(type(output)))
        self._check(ids.to(device), expected.to(device), states, heads, head_size)
        return dataclasses.replace(spec, num_layers=len(self.stage.layers), num_kv_heads=heads, head_size=head_size)

    def _recorded(self, ids: torch.Tensor) -> tuple[list[LayerCall], Any]:
        """What each layer asks of attention, and what the base model returns."""
        self.head.set_attn_implementation(PROBE)
        recording = RecordedCalls()
        output = self._base_output(ids, torch.arange(len(ids), device=ids.device), recording)
        return recording.calls, output

    def _whole_results(self, ids: torch.Tensor, spec: FallbackSpec) -> tuple[torch.Tensor, States | None]:
        """Logits ``[2, tokens, vocab]`` of the whole model, and the states at the ends of a stage, if it is one of
        several."""
        states = None
        if self.stage.first and self.stage.last:
            logits = self.head(input_ids=ids, use_cache=False).logits
        else:
            layers = layer_list(self.base, spec.num_layers)
            with watched(self.base, layers, self.stage) as states:
                logits = self.head(input_ids=ids, use_cache=False).logits
            if states.before.shape != (*ids.shape, spec.hidden_size) or states.before.shape != states.behind.shape:
                raise ValueError(
                    "more than one hidden state of each token goes from layer to layer (leave out "
                    "pipeline_parallel_size)"
                )
        if logits.shape[-1] != spec.vocab_size:
            raise ValueError(f"it has {logits.shape[-1]} logits for a vocabulary of {spec.vocab_size}")
        return logits, states

    def _check(
        self, ids: torch.Tensor, expected: torch.Tensor, states: States | None, heads: int, head_size: int
    ) -> None:
        """Compare what runs here with results of the whole model, and find out about CUDA graphs."""
        tokens, device, begun = ids.shape[1], ids.device, self.incoming
        shape = (len(self.stage.layers), 2, 2, 16, heads, head_size)
        cache = [KVCacheView(*layer) for layer in torch.zeros(shape, dtype=self.dtype, device=device)]
        spans = (range(1), range(1, tokens - 1), range(tokens - 1, tokens))
        parts = [self._span(ids, span, cache, begun) for span in spans if span]
        found, limit = torch.cat(parts, dim=1), PROBE_ERROR[self.dtype]
        if states is not None:
            _compare("hidden states", found, states.behind.to(device), limit)
            found = states.normed.to(device)
        if self.stage.first:
            _compare("logits", self.compute_logits(found.flatten(0, 1)).view_as(expected), expected, limit)
        if device.type == "cuda" and not self.batch_invariant:  # a graph of a step would hold the model for each token
            self.supports_graphs = self._capturable(ids, cache, begun)
        self.incoming = None  # of so many tokens as steps have

    def _span(
        self, ids: torch.Tensor, span: range, cache: Sequence[KVCacheView], begun: torch.Tensor | None
    ) -> torch.Tensor:
        """Hidden states ``[2, len(span), hidden]`` of these positions of ``ids[2, tokens]``; the last runs as a
        decode."""
        positions, metadata = _probe_step(span, ids.device, decode=span.stop == ids.shape[1])
        self._begin_at(span, ids, begun)
        return self(ids[:, span.start : span.stop].flatten(), positions, metadata, cache).unflatten(0, (2, len(span)))

    def _begin_at(self, span: range, ids: torch.Tensor, begun: torch.Tensor | None) -> None:
        """Let this stage go on with ``begun``, states of all of ``ids``, of these positions."""
        if begun is not None:
            self.incoming = begun.view(*ids.shape, -1)[:, span.start : span.stop].flatten(0, 1)

    def _capturable(self, ids: torch.Tensor, cache: Sequence[KVCacheView], begun: torch.Tensor | None) -> bool:
        """Whether a CUDA graph can hold a step.

        It cannot where a layer looks at values on the host (experts in a Python loop, frequencies that the longest
        position decides): that waits for the device, which is an error here. What was captured as the last tokens'
        decode must then give the first tokens' result for their ids, positions and slots.
        """
        device, tokens = ids.device, ids.shape[1]
        inputs = ids[:, tokens - 1].clone()
        positions, metadata = _probe_step(range(tokens - 1, tokens), device, decode=True)
        first_positions, first = _probe_step(range(1), device, decode=True)
        self._begin_at(range(1), ids, begun)
        first_states = self.incoming
        expected = self(ids[:, 0], first_positions, first, cache)
        self._begin_at(range(tokens - 1, tokens), ids, begun)
        graph, mode = torch.cuda.CUDAGraph(), torch.cuda.get_sync_debug_mode()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # it says that it is a prototype
                torch.cuda.set_sync_debug_mode("error")
            self(inputs, positions, metadata, cache)  # before the capture, which an error in its middle would spoil
            with torch.cuda.graph(graph):
                replayed = self(inputs, positions, metadata, cache)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            return False
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        inputs.copy_(ids[:, 0])
        if self.incoming is not None and first_states is not None:
            self.incoming.copy_(first_states)
        positions.copy_(first_positions)
        metadata.slot_mapping.copy_(first.slot_mapping)
        metadata.seq_lens.copy_(first.seq_lens)
        graph.replay()
        return bool((replayed - expected).float().norm() <= PROBE_ERROR[self.dtype] * expected.float().norm())


def _absent(layer: Any) -> AbsentLayer:
    assert isinstance(layer, AbsentLayer)  # it is not this stage's
    return layer


def _probe_step(span: range, device: torch.device, decode: bool) -> tuple[torch.Tensor, AttentionMetadata]:
    """Positions and metadata of the probe's two sequences at these positions."""
    positions = torch.arange(span.start, span.stop, device=device)
    starts = [0] if decode else [0, len(span), 2 * len(span)]
    metadata = AttentionMetadata(
        slot_mapping=torch.cat([positions, positions + 16]),
        block_tables=torch.tensor([[0], [1]], dtype=torch.int32, device=device),
        seq_lens=torch.full((2,), span.stop, dtype=torch.int32, device=device),
        cu_seqlens_q=torch.tensor(starts, dtype=torch.int32, device=device),
        segments=Segments(decodes(2)) if decode else Segments(chunk=Segment(2, 2 * len(span), len(span))),
    )
    return positions.repeat(2), metadata


class _Given(nn.Module):
    """Stands where the base model was, so that the language model's ``forward`` goes on from given hidden states.

    ``output`` is the class that the base model returns. Its other fields are None, as they are in what a base model
    returns that caches and collects nothing; their names are of the model and of the release of transformers.
    """

    def __init__(self, output: type) -> None:
        super().__init__()
        self.output = output

    def forward(self, *args: Any, inputs_embeds: torch.Tensor, **kwargs: Any) -> Any:
        return self.output(last_hidden_state=inputs_embeds)


def common_shape(calls: Sequence[LayerCall], places: range) -> tuple[int, int]:
    """Key/value heads and head size, the same in all of the layers ``places``."""
    layers = [call.layer for call in calls]
    if sorted(layers) != list(places):
        raise ValueError(
            f"each of its {len(places)} layers must do softmax attention once, but those that do are {layers}"
        )
    shapes = {call.shape for call in calls}
    if len(shapes) > 1:
        raise ValueError(f"its layers cache different (heads, key size, value size): {sorted(shapes)}")
    ((heads, key_size, value_size),) = shapes
    if key_size != value_size:
        raise ValueError(f"its keys have {key_size} elements and its values {value_size}, as in latent attention")
    if key_size % 8 or not 16 <= key_size <= 512:
        raise ValueError(f"the kernels take head sizes that are multiples of 8 from 16 to 512, it has {key_size}")
    return heads, key_size


def _compare(what: str, found: torch.Tensor, expected: torch.Tensor, limit: float) -> None:
    sizes = expected.float().norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)  # of a padding token it may be 0
    error = ((found.float() - expected.float()).norm(dim=-1) / sizes).median().item()
    if not error <= limit:
        raise ValueError(
            f"with our attention its {what} differ from its own by {error:.2g} (relative, median of "
            f"{found.shape[0] * found.shape[1]} tokens), more than {limit}"
        )

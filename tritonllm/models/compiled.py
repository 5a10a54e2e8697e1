"""A model whose steps ``torch.compile`` has compiled, in the place of the model.

The whole decoder is one graph (``fullgraph``). What attention does between its projections is one operator in it, which
the compiler does not look into: cache and batch are no inputs of the graph. So no pass can copy the pool, and nothing
about a batch is a guard. What is left of a step is its number of tokens and the number of rows that are wanted, both
dynamic, and what the model plans for them: each plan is a graph of its own.

All graphs are compiled before the first request, by steps in which attention gives zeros. Nothing is compiled later: a
step that fits no graph runs as if there were no compiler.
"""

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol
from weakref import ref

import torch
import torch._dynamo
import torch.fx.experimental._config as symbolic_shapes
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch._dynamo.utils import counters
from torch.library import Library, infer_schema

from tritonllm.kernels.dense.linear import MAX_M
from tritonllm.kernels.runtime.registry import NAMESPACE
from tritonllm.layers.head import Head
from tritonllm.layers.metadata import AttentionMetadata, KVCacheView, KVScales
from tritonllm.models.decoder import Decoder
from tritonllm.models.fallback_attention import PagedStep
from tritonllm.models.fallback_decoder import TransformersDecoder
from tritonllm.models.interface import CausalLM, LayerWork, ModelFacts

logger = logging.getLogger(__name__)
MOST_TOKENS = 2048  # plans for more are those for as many
# With it torch 2.11 stops at OLMo of transformers on a GPU: "CantSplit: 2048 not divisible by 2048*s23".
INDUCTOR: dict[str, str | int | bool | Callable[..., Any]] = {"loop_ordering_after_fusion": False}
MOST_GRAPHS = 64  # torch's own limit, 8, is against programs that compile for ever


class AttentionInputs(NamedTuple):
    """What attention reads of a step, and the graph does not."""

    metadata: AttentionMetadata
    kv_cache: Sequence[KVCacheView]


class ModelParts(Protocol):
    """A model taken apart: its attention, and a step around an operator in attention's place."""

    writes: tuple[str, ...]  # arguments of the operator that attention overwrites
    takes_rows: bool  # the step returns only the rows that are wanted
    device: torch.device

    def attend(self, step: AttentionInputs, *args: Any) -> torch.Tensor:
        """What the operator computes."""

    @property
    def result(self) -> Callable[..., torch.Tensor]:
        """Makes a new tensor of the operator's arguments, as :meth:`attend` returns it; annotated, for a schema."""

    def settle(self, step: AttentionInputs, positions: torch.Tensor) -> AttentionInputs:
        """What :meth:`attend` gets of a step."""

    def kind(self, tokens: int, rows: int | None) -> tuple[Any, ...]:
        """Steps of one kind launch the same operations. First comes what the step takes as its plan."""

    def step(self, operator: Any) -> Callable[..., torch.Tensor]:
        """``(plan, ids, positions, rows)`` -> hidden states; attention is the operator from now on."""


class _DecoderParts:
    """The parts of a model of this package's decoder."""

    def __init__(self, model: Decoder) -> None:
        self._model = model
        self.writes: tuple[str, ...] = ("qkv",)
        self.takes_rows = True
        self.device = model.embed.weight.device
        self._attentions: list[Any] = [layer.attention for layer in model.layers]
        self._attend = [attention.attend for attention in self._attentions]
        self._columns: list[int] = [attention.o.in_features for attention in self._attentions]

    def attend(self, step: AttentionInputs, *args: Any) -> torch.Tensor:
        *tensors, layer = args
        out: torch.Tensor = self._attend[layer](*tensors, step.metadata, step.kv_cache[layer])
        if step.metadata.stored is not None:
            step.metadata.stored(layer)
        return out

    def result(
        self, qkv: torch.Tensor, positions: torch.Tensor, table: torch.Tensor | None, layer: int
    ) -> torch.Tensor:
        return qkv.new_empty(qkv.shape[0], self._columns[layer])

    def settle(self, step: AttentionInputs, positions: torch.Tensor) -> AttentionInputs:
        return step._replace(metadata=self._model.settle(step.metadata, positions, step.kv_cache))

    def kind(self, tokens: int, rows: int | None) -> tuple[Any, ...]:
        # beside the plan, layers.fusion.few_rows decides
        few = [count is not None and count <= MAX_M and self.device.type != "cpu" for count in (tokens, rows)]
        return self._model.plan(tokens, rows, self.device), rows is None, *few

    def step(self, operator: Any) -> Callable[..., torch.Tensor]:
        model = self._model
        no_batch: Any = None  # the operator knows it, and the cache
        no_cache: Any = (None,) * len(self._attend)

        def in_place_of_attention(layer: int) -> Callable[..., torch.Tensor]:
            return lambda qkv, positions, table, metadata, kv_cache: operator(qkv, positions, table, layer)

        for layer, attention in enumerate(self._attentions):
            attention.attend = in_place_of_attention(layer)

        def step(plan: Any, ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
            return model.run(plan, model.begin(ids, positions), positions, no_batch, no_cache, rows)[0]

        return step


class _Through:
    """In the place of a :class:`~tritonllm.models.fallback_attention.PagedStep`."""

    def __init__(self, attend: Callable[..., torch.Tensor]) -> None:
        self.attend = attend


class _TransformersParts:
    """The parts of a model that runs through transformers."""

    def __init__(self, model: TransformersDecoder) -> None:
        self._model = model
        self.writes: tuple[str, ...] = ()
        self.takes_rows = False
        self.device = next(model.parameters()).device

    def attend(self, step: AttentionInputs, *args: Any) -> torch.Tensor:
        return PagedStep(*step, self._model.windows).attend(*args)

    def result(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        scale: float | None,
        softcap: float,
    ) -> torch.Tensor:
        return q.new_empty(q.shape)

    def settle(self, step: AttentionInputs, positions: torch.Tensor) -> AttentionInputs:
        return step

    def kind(self, tokens: int, rows: int | None) -> tuple[Any, ...]:
        return (None,)

    def step(self, operator: Any) -> Callable[..., torch.Tensor]:
        model = self._model
        through: Any = _Through(operator)

        def step(plan: None, ids: torch.Tensor, positions: torch.Tensor, rows: None) -> torch.Tensor:
            return model.run(ids, positions, through)

        return step


class CompiledModel:
    """A model with compiled steps; the model itself must not run any more.

    Args:
        model: the loaded model.
        backend: the backend of ``torch.compile``.
        max_num_seqs: the most rows that are wanted of a step.
        max_num_batched_tokens: the most tokens of a step.

    Raises:
        ValueError: the compiler cannot compile the model, and why.
    """

    def __init__(
        self, model: CausalLM, backend: str | Callable[..., Any], *, max_num_seqs: int, max_num_batched_tokens: int
    ) -> None:
        begin = time.monotonic()
        self._model = model
        self.dtype, self.supports_graphs = model.dtype, model.supports_graphs
        self._parts = _parts_of(model)
        self._bound: AttentionInputs | None = None  # of the step that runs
        self._missed = False  # a step has fitted no graph
        run, weak = self._parts.step(self._define()), ref(self)

        def step(plan: Any, ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
            if not torch.compiler.is_compiling():  # a graph is not this code
                alive = weak()
                if alive is not None:
                    alive._note_missed(ids)
            return run(plan, ids, positions, rows)

        # Dynamo keeps what it compiled with the code: another engine's model must not be in the way
        step.__code__ = step.__code__.replace()
        options = INDUCTOR if backend == "inductor" else None
        self._step = torch.compile(step, fullgraph=True, backend=backend, options=options)
        graphs = counters["stats"]["unique_graphs"]
        for tokens, rows in self._sizes(max_num_batched_tokens, max_num_seqs):
            self._compile(tokens, rows)
        graphs = counters["stats"]["unique_graphs"] - graphs
        logger.info("torch.compile made %d graphs in %.1f s", graphs, time.monotonic() - begin)

    def _note_missed(self, ids: torch.Tensor) -> None:
        if not self._missed:
            self._missed = True
            logger.warning(
                "a step of %d tokens fits no graph of torch.compile and runs without one; so may others", len(ids)
            )

    def _define(self) -> Any:
        """The operator in the place of attention, which has a name of its own and lives as long as this model."""
        weak = ref(self)  # torch keeps what is registered

        def model() -> CompiledModel:
            alive = weak()
            assert alive is not None
            return alive

        def attend(*args: Any) -> torch.Tensor:
            parts, step = model()._parts, model()._bound
            # without a step its graph is compiled, and any result will do
            return parts.result(*args).zero_() if step is None else parts.attend(step, *args)

        namespace = getattr(torch.ops, NAMESPACE)
        name = next(name for i in itertools.count() if not hasattr(namespace, name := f"attention_of_model_{i}"))
        self._library = Library(NAMESPACE, "FRAGMENT")  # what it registers is gone when it is deleted
        self._library.define(name + infer_schema(self._parts.result, mutates_args=self._parts.writes))
        for key in ("CUDA", "CPU"):
            self._library.impl(name, attend, key)
        torch.library.register_fake(
            f"{NAMESPACE}::{name}", lambda *args: model()._parts.result(*args), lib=self._library
        )
        return getattr(namespace, name).default

    def _sizes(self, budget: int, seats: int) -> Iterator[tuple[int, int | None]]:
        """Tokens and rows of a step of each kind. One is a kind of its own, and last: to some models of transformers
        the compiler makes it an exception."""
        counts = [1 << bit for bit in range(min(budget, MOST_TOKENS).bit_length() + 1)]
        pairs: list[tuple[int, int | None]] = [(tokens, None) for tokens in counts]
        if self._parts.takes_rows:
            pairs += [(tokens, rows) for tokens in counts for rows in counts if rows < min(tokens, 2 * seats)]
        seen = set()
        for tokens, rows in sorted(pairs, key=lambda pair: 1 in pair):
            kind = tokens == 1, rows == 1, self._parts.kind(tokens, rows)
            if kind not in seen:
                seen.add(kind)
                yield tokens, rows

    @torch.inference_mode()
    def _compile(self, tokens: int, rows: int | None) -> None:
        ids = torch.zeros(tokens, dtype=torch.int32, device=self._parts.device)
        inputs: list[Any] = [ids, ids.long(), None if rows is None else ids.new_zeros(rows, dtype=torch.int64)]
        for tensor in inputs:
            if tensor is not None:
                torch._dynamo.mark_dynamic(tensor, 0)
        # one token, or one row, is no size of its own, nor are as many tokens as rows
        oblivious = {"backed_size_oblivious": True, "use_duck_shape": False}
        # only what is marked is dynamic: torch would remember other models, and make of what differs a variable
        marked: dict[str, Any] = {
            "automatic_dynamic_shapes": False,
            "specialize_float": True,
            "recompile_limit": MOST_GRAPHS,
        }
        with symbolic_shapes.patch(**oblivious), torch._dynamo.config.patch(**marked):  # type: ignore[attr-defined]
            try:
                self._step(self._parts.kind(tokens, rows)[0], *inputs)
            except (TorchDynamoException, FailOnRecompileLimitHit) as error:
                name, why = self._model.spec.architecture, str(error).strip().partition("\n")[0]
                raise ValueError(
                    f"compilation_config: torch.compile cannot compile {name} ({type(error).__name__}: {why}); leave "
                    "the argument (--compile) out"
                ) from error

    def __call__(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        kv_cache: Sequence[KVCacheView],
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run one step, as :meth:`~tritonllm.models.decoder.Decoder.forward`; never compiles."""
        inside = rows if self._parts.takes_rows else None
        plan = self._parts.kind(len(positions), None if inside is None else len(inside))[0]
        self._bound = self._parts.settle(AttentionInputs(metadata, kv_cache), positions)
        try:
            with torch.compiler.set_stance("eager_on_recompile"):
                hidden: torch.Tensor = self._step(plan, input_ids.int(), positions, inside)
        finally:
            self._bound = None
        return hidden if rows is inside else hidden[rows]

    def rehearsal(self) -> AbstractContextManager[None]:
        """A context in which the model runs whole steps, as always: a graph has all layers."""
        return nullcontext()

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.compute_logits(hidden)

    def short_keys(self, sequences: int) -> int:
        return self._model.short_keys(sequences)

    @property
    def spec(self) -> ModelFacts:
        return self._model.spec

    @property
    def kv_scales(self) -> Sequence[KVScales]:
        return self._model.kv_scales

    @property
    def classifier(self) -> Head | None:
        return self._model.classifier

    @property
    def work(self) -> Sequence[LayerWork]:
        return self._model.work


def _parts_of(model: CausalLM) -> ModelParts:
    if isinstance(model, TransformersDecoder):
        return _TransformersParts(model)
    assert isinstance(model, Decoder)
    return _DecoderParts(model)

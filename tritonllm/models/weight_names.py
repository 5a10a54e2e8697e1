"""What checkpoints call the decoder's weights: names as data, and the map from them to :class:`Slot`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tritonllm.layers.attention import AttentionSpec
from tritonllm.layers.mlp import MLPSpec
from tritonllm.layers.moe import MoESpec
from tritonllm.layers.norm import NormSpec
from tritonllm.models.slots import Slot
from tritonllm.models.spec import ModelSpec

Entry = tuple[str, Slot]


@dataclass(frozen=True, kw_only=True)
class WeightNames:
    """Names of an architecture's modules; ``.weight`` and ``.bias`` follow. The defaults are Llama's.

    Those of a layer follow ``layer``, whose ``{}`` is its number; those of an expert follow ``experts`` and its number.

    Attributes:
        attention_norm, attention_post_norm, mlp_norm, mlp_post_norm: norms of the residual stream before and after
            each block; with ``norm_position="stream"``, the first and third are those after it.
        norm_weights_minus_one: whether these norms' weights are stored minus 1 (Nemotron).
        qkv: three projections, or one that holds all of them.
        qkv_by_group: whether the one projection has the queries, the key and the value of a key head together.
        qkv_order: another order of its heads: from the numbers of heads and of key heads, where each head of the tensor
            goes among queries, keys and values (CodeGen).
        gate: the projection of which a function multiplies attention's output (AFMoE, Laguna).
        qk_norm_by_head: ``q_norm`` and ``k_norm`` have a tensor for each head, under ``norms.{}``.
        up: gate and up, or one projection that holds both, or the only one of an MLP without a gate.
        xielu: the activation's module, of an MLP whose activation has parameters (Apertus).
        transposed: whether weights of the blocks' projections are ``[in, out]``.
        router_transposed: whether the router's weight is ``[in, out]`` (ERNIE 4.5 VL).
        correction_bias_rows: rows of the tensor of the correction bias, of which the first is meant (ERNIE 4.5); 0 if
            it is no matrix.
        expert_up, expert_down: names of projections within one expert; without the first, experts are stacked only.
        stacked_up, stacked_down: names of tensors of all experts, where a checkpoint has those instead.
        shared_up, shared_down: names of projections within the shared MLP; ``shared_up`` as ``up``.
        stacked_transposed: whether the stacked tensors are transposed, and come first (GPT-OSS, Llama 4).
        stacked_either_way: whether the stacked tensors may be transposed (Qwen3-VL, whose published ones are, and those
            that transformers 5 writes are not).
        stacked_interleaved: whether gate and up alternate in those (GPT-OSS).
        flat_up, flat_down: names of tensors with all experts one below the other, gate, up and the transposed
            projection back; with them, there are no others (DBRX).
        key_bias, key_bias_strength: what makes the numbers behind keys (Doge); no ``.weight`` follows the second.
        attention_residual, mlp_residual: the numbers by which the blocks multiply the stream; no ``.weight`` follows.
        scalar: the number that multiplies the stream behind a layer; no ``.weight`` follows (Gemma 4).
        input_table, input_project, input_norm: what makes the inputs of all layers (Gemma 4).
        input_gate, input_back, input_post_norm: what a layer does with its input.
        router_norm: the weight of the norm of the router's input, where experts are apart (Gemma 4); no ``.weight``
            follows, nor behind ``expert_scale``, the numbers that multiply the experts' weights.
        experts_norm, experts_post_norm, shared_post_norm: the other norms of such a block.
        head: dense layers in the place of the output projection, and their norms.
    """

    embed: str = "model.embed_tokens"
    embedding_norm: str = ""
    token_types: str = ""
    positions: str = ""
    project_in: str = ""
    project_out: str = ""
    norm: str = "model.norm"
    lm_head: str = "lm_head"
    layer: str = "model.layers.{}"
    attention_norm: str = "input_layernorm"
    attention_post_norm: str = ""
    mlp_norm: str = "post_attention_layernorm"
    mlp_post_norm: str = ""
    norm_weights_minus_one: bool = False
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    qkv_by_group: bool = False
    qkv_order: Callable[[int, int], tuple[int, ...]] | None = None
    o: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    qk_norm_by_head: bool = False
    gate: str = "self_attn.gate_proj"
    sinks: str = "self_attn.sinks"
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    xielu: str = ""
    down: str = "mlp.down_proj"
    transposed: bool = False
    router: str = "mlp.gate"
    router_transposed: bool = False
    correction_bias: str = "mlp.gate.e_score_correction_bias"
    correction_bias_rows: int = 0
    experts: str = "mlp.experts"
    expert_up: tuple[str, ...] = ("gate_proj", "up_proj")
    expert_down: str = "down_proj"
    stacked_up: str = "mlp.experts.gate_up_proj"
    stacked_down: str = "mlp.experts.down_proj"
    stacked_transposed: bool = False
    stacked_either_way: bool = False
    stacked_interleaved: bool = False
    flat_up: tuple[str, ...] = ()
    flat_down: str = ""
    shared: str = "mlp.shared_experts"
    shared_up: tuple[str, ...] = ("gate_proj", "up_proj")
    shared_down: str = "down_proj"
    shared_gate: str = "mlp.shared_expert_gate"
    key_bias: str = ""
    key_bias_strength: str = ""
    attention_residual: str = ""
    mlp_residual: str = ""
    scalar: str = "layer_scalar"
    input_table: str = "model.embed_tokens_per_layer"
    input_project: str = "model.per_layer_model_projection"
    input_norm: str = "model.per_layer_projection_norm"
    input_gate: str = "per_layer_input_gate"
    input_back: str = "per_layer_projection"
    input_post_norm: str = "post_per_layer_input_norm"
    router_norm: str = ""
    experts_norm: str = ""
    experts_post_norm: str = ""
    shared_post_norm: str = ""
    expert_scale: str = ""
    head: tuple[str, ...] = ()
    head_norms: tuple[str, ...] = ()


def weight_map(spec: ModelSpec, names: WeightNames) -> dict[str, Slot]:
    """Checkpoint tensor name -> :class:`Slot`.

    Experts have two spellings, one by one and stacked; every other place has one.
    """
    entries = [*_outside_of_layers(spec, names), *_layer_inputs(spec, names)]
    for index, layer in enumerate(spec.layers):
        theirs, ours = names.layer.format(index) + ".", f"layers.{index}"
        entries += _layer_norms(spec, names, index, theirs)
        entries += _behind_the_mlp(spec, names, theirs, ours)
        entries += _attention(spec.hidden_size, layer.attention, names, theirs, f"{ours}.attention")
        if isinstance(layer.mlp, MLPSpec):
            up, down = tuple(theirs + name for name in names.up), theirs + names.down
            entries += _mlp(spec.hidden_size, layer.mlp, up, down, f"{ours}.mlp", transposed=names.transposed)
            if layer.mlp.activation == "xielu":
                entries += _xielu(f"{theirs}{names.xielu}", f"{ours}.mlp.act.weight")
        else:
            entries += _moe(spec.hidden_size, layer.mlp, names, theirs, f"{ours}.mlp")
    return dict(entries)


def _outside_of_layers(spec: ModelSpec, names: WeightNames) -> Iterator[Entry]:
    hidden, size = spec.hidden_size, spec.embedding_size or spec.hidden_size
    yield f"{names.embed}.weight", Slot(parameter="embed.weight", shape=(spec.vocab_size, size))
    if spec.embedding_norm:
        yield from _norm(spec.norm, names.embedding_norm, "embedding_norm", (size,))
    if spec.token_types:
        shape = (spec.token_types, hidden)
        yield f"{names.token_types}.weight", Slot(parameter="token_types.weight", shape=shape)
    if spec.learned_positions:
        shape = (spec.learned_positions, hidden)
        yield f"{names.positions}.weight", Slot(parameter="positions.weight", shape=shape)
    if size != hidden:
        yield f"{names.project_in}.weight", Slot(parameter="project_in.weight", shape=(hidden, size))
        yield f"{names.project_out}.weight", Slot(parameter="project_out.weight", shape=(size, hidden))
    if spec.final_norm and spec.norm_position != "stream":
        yield from _stream_norm(spec, names, names.norm, "norm")
    if spec.logits and not spec.tie_word_embeddings:
        yield f"{names.lm_head}.weight", Slot(parameter="lm_head.weight", shape=(spec.vocab_size, size))
    if spec.logit_bias:
        yield f"{names.lm_head}.bias", Slot(parameter="logit_bias", shape=(spec.vocab_size,))
    if spec.head is not None:
        for i, (dense, name) in enumerate(zip(spec.head.dense, names.head, strict=True)):
            yield from _linear(name, f"classifier.{i}", dense.out_features, dense.in_features, bias=dense.bias)
            if dense.norm is not None:
                yield from _norm(dense.norm, names.head_norms[i], f"classifier.{i}.norm", (dense.out_features,))


def _layer_inputs(spec: ModelSpec, names: WeightNames) -> Iterator[Entry]:
    if spec.layer_inputs is not None:
        size = spec.layer_inputs.size
        columns = spec.num_layers * size
        table = Slot(parameter="layer_inputs.table.weight", shape=(spec.layer_inputs.rows, columns))
        yield f"{names.input_table}.weight", table
        yield from _linear(names.input_project, "layer_inputs.project", columns, spec.hidden_size, bias=False)
        yield from _norm(spec.layer_inputs.norm, names.input_norm, "layer_inputs.norm", (size,))


def _behind_the_mlp(spec: ModelSpec, names: WeightNames, theirs: str, ours: str) -> Iterator[Entry]:
    hidden = spec.hidden_size
    if spec.layer_inputs is not None:
        size = spec.layer_inputs.size
        yield from _linear(theirs + names.input_gate, f"{ours}.input.gate", size, hidden, bias=False)
        yield from _linear(theirs + names.input_back, f"{ours}.input.project", hidden, size, bias=False)
        yield from _stream_norm(spec, names, theirs + names.input_post_norm, f"{ours}.input.norm")
    if spec.layer_scalars:
        yield theirs + names.scalar, Slot(parameter=f"{ours}.scalar", shape=(1,))
    if spec.residual_weights:
        for name, place in (names.attention_residual, "attention"), (names.mlp_residual, "mlp"):
            yield theirs + name, Slot(parameter=f"{ours}.{place}_residual", shape=(hidden,))


def _stream_norm(spec: ModelSpec, names: WeightNames, theirs: str, ours: str) -> Iterator[Entry]:
    minus = 1.0 if names.norm_weights_minus_one else 0.0
    yield from _norm(spec.norm, theirs, ours, (spec.hidden_size,), minus=minus)


def _norm(norm: NormSpec, theirs: str, ours: str, shape: tuple[int, ...], *, minus: float = 0.0) -> Iterator[Entry]:
    if norm.weight:
        yield f"{theirs}.weight", Slot(parameter=f"{ours}.weight", shape=shape, minus=minus)
    if norm.bias:
        yield f"{theirs}.bias", Slot(parameter=f"{ours}.bias", shape=shape)


def _layer_norms(spec: ModelSpec, names: WeightNames, index: int, theirs: str) -> Iterator[Entry]:
    ours = f"layers.{index}"
    if spec.norm_position == "stream":
        last = index == spec.num_layers - 1
        pairs = [
            (names.attention_norm, f"{ours}.mlp_norm"),
            (names.mlp_norm, "norm" if last else f"layers.{index + 1}.attention_norm"),
        ]
    else:
        pairs = []
        if spec.norm_position != "post":
            if index > 0 or spec.first_norm:
                pairs.append((names.attention_norm, f"{ours}.attention_norm"))
            if spec.parallel != "one norm":
                pairs.append((names.mlp_norm, f"{ours}.mlp_norm"))
        if spec.norm_position != "pre":
            pairs.append((names.attention_post_norm, f"{ours}.attention_post_norm"))
            pairs.append((names.mlp_post_norm, f"{ours}.mlp_post_norm"))
    for name, place in pairs:
        yield from _stream_norm(spec, names, theirs + name, place)


def _linear(
    theirs: str,
    ours: str,
    rows: int,
    columns: int,
    *,
    bias: bool,
    start: int = 0,
    transposed: bool = False,
    order: tuple[int, ...] | None = None,
) -> Iterator[Entry]:
    shape = (columns, rows) if transposed else (rows, columns)
    yield (
        f"{theirs}.weight",
        Slot(parameter=f"{ours}.weight", shape=shape, start=start, transposed=transposed, order=order),
    )
    if bias:
        yield f"{theirs}.bias", Slot(parameter=f"{ours}.bias", shape=(rows,), start=start, order=order)


def _attention(hidden: int, spec: AttentionSpec, names: WeightNames, theirs: str, ours: str) -> Iterator[Entry]:
    heads, kv_heads, of_heads = spec.num_heads, spec.num_kv_heads, spec.num_heads * spec.output_size
    rows = [count * size for count, size in spec.projections]
    if len(names.qkv) == 1:
        rows = [sum(rows)]
    order = _order_by_group(heads, kv_heads) if names.qkv_by_group else None
    order = order if names.qkv_order is None else names.qkv_order(heads, kv_heads)
    start = 0
    for name, count in zip(names.qkv[: len(rows)], rows, strict=True):
        yield from _linear(
            theirs + name,
            f"{ours}.qkv",
            count,
            spec.input_size or hidden,
            bias=spec.qkv_bias,
            start=start,
            transposed=names.transposed,
            order=order,
        )
        start += count
    yield from _linear(theirs + names.o, f"{ours}.o", hidden, of_heads, bias=spec.o_bias, transposed=names.transposed)
    if spec.qk_norm is not None:
        norms = [(names.q_norm, "q_norm", heads), (names.k_norm, "k_norm", kv_heads)]
        for name, place, count in norms if spec.own_keys else norms[:1]:
            yield from _head_norm(spec, names, theirs + name, f"{ours}.{place}", count)
    if spec.output_gate:
        gates = of_heads // spec.gate_size
        yield from _linear(theirs + names.gate, f"{ours}.gate", gates, spec.input_size or hidden, bias=False)
    if spec.key_bias:
        bias, place = theirs + names.key_bias, f"{ours}.key_bias"
        size = kv_heads * spec.head_size
        yield from _linear(bias, f"{place}.of_values", kv_heads, size, bias=False)
        yield theirs + names.key_bias_strength, Slot(parameter=f"{place}.strength", shape=(kv_heads,))
        if spec.qkv_bias:
            yield f"{bias}.bias", Slot(parameter=f"{place}.shift", shape=(kv_heads,))
    if spec.sinks:
        yield theirs + names.sinks, Slot(parameter=f"{ours}.sinks", shape=(heads,))


def _order_by_group(heads: int, kv_heads: int) -> tuple[int, ...]:
    """Where each head of ``[queries..., key, value]`` by group goes in ``[queries, keys, values]``."""
    group = heads // kv_heads
    order: list[int] = []
    for i in range(kv_heads):
        order += [*range(i * group, (i + 1) * group), heads + i, heads + kv_heads + i]
    return tuple(order)


def _head_norm(spec: AttentionSpec, names: WeightNames, theirs: str, ours: str, heads: int) -> Iterator[Entry]:
    assert spec.qk_norm is not None
    head = spec.head_size
    shape = {"head": (head,), "heads": (heads, head), "all": (heads * head,)}[spec.qk_norm_over]
    if not names.qk_norm_by_head:
        yield from _norm(spec.qk_norm, theirs, ours, shape)
        return
    for i in range(heads):
        yield f"{theirs}.norms.{i}.weight", Slot(parameter=f"{ours}.weight", shape=(head,), expert=i)


def _mlp(
    hidden: int, spec: MLPSpec, up: tuple[str, ...], down: str, ours: str, *, transposed: bool = False
) -> Iterator[Entry]:
    inner = spec.intermediate_size
    rows = (2 * inner if spec.gated else inner) // len(up)
    for i, name in enumerate(up):
        yield from _linear(name, f"{ours}.up", rows, hidden, bias=spec.bias, start=i * rows, transposed=transposed)
    yield from _linear(down, f"{ours}.down", hidden, inner, bias=spec.bias, transposed=transposed)


def _xielu(theirs: str, ours: str) -> Iterator[Entry]:
    for start, (name, shape) in enumerate((("alpha_p", (1,)), ("alpha_n", (1,)), ("beta", ()), ("eps", ()))):
        yield f"{theirs}.{name}", Slot(parameter=ours, shape=shape, start=start)


def _moe(hidden: int, spec: MoESpec, names: WeightNames, theirs: str, ours: str) -> Iterator[Entry]:
    router = f"{ours}.router"
    how: dict[str, Any] = {"bias": spec.router_bias, "transposed": names.router_transposed}
    yield from _linear(theirs + names.router, router, spec.num_experts, hidden, **how)
    if spec.correction_bias:
        rows = names.correction_bias_rows
        shape = (rows, spec.num_experts) if rows else (spec.num_experts,)
        slot = Slot(parameter=f"{ours}.correction_bias", shape=shape, is_row=rows > 0)
        yield theirs + names.correction_bias, slot
    if spec.apart is not None:
        yield theirs + names.router_norm, Slot(parameter=f"{ours}.norms.router.weight", shape=(hidden,))
        norms = (names.experts_norm, "experts"), (names.experts_post_norm, "after")
        for name, place in (*norms, (names.shared_post_norm, "shared_after")):
            yield from _norm(spec.apart, theirs + name, f"{ours}.norms.{place}", (hidden,))
    if spec.expert_scales:
        yield theirs + names.expert_scale, Slot(parameter=f"{ours}.expert_scale", shape=(spec.num_experts,))
    if names.flat_up:
        yield from _flat_experts(hidden, spec, names, theirs, ours)
    elif names.stacked_transposed:
        yield from _transposed_experts(hidden, spec, names, theirs, ours)
    else:
        yield from _experts(hidden, spec, names, theirs, ours)
    if spec.shared is not None:
        shared = theirs + names.shared
        up = tuple(f"{shared}.{name}" for name in names.shared_up)
        yield from _mlp(hidden, spec.shared, up, f"{shared}.{names.shared_down}", f"{ours}.shared")
    if spec.shared_gate:
        yield from _linear(theirs + names.shared_gate, f"{ours}.shared_gate", 1, hidden, bias=False)


def _experts(hidden: int, spec: MoESpec, names: WeightNames, theirs: str, ours: str) -> Iterator[Entry]:
    inner, count = spec.intermediate_size, spec.num_experts
    yield from _one_by_one(hidden, spec, names, theirs, ours)
    how: dict[str, Any] = {"axis": 1, "either_way": names.stacked_either_way}
    yield theirs + names.stacked_up, Slot(parameter=f"{ours}.gate_up", shape=(count, 2 * inner, hidden), **how)
    yield theirs + names.stacked_down, Slot(parameter=f"{ours}.down", shape=(count, hidden, inner), **how)


def _one_by_one(hidden: int, spec: MoESpec, names: WeightNames, theirs: str, ours: str) -> Iterator[Entry]:
    inner, count = spec.intermediate_size, spec.num_experts
    for e in range(count) if names.expert_up else ():
        expert = f"{theirs}{names.experts}.{e}"
        for i, name in enumerate(names.expert_up):
            yield from _of_expert(f"{expert}.{name}", f"{ours}.gate_up", (inner, hidden), e, i * inner, spec.bias)
        yield from _of_expert(f"{expert}.{names.expert_down}", f"{ours}.down", (hidden, inner), e, 0, spec.bias)


def _of_expert(theirs: str, ours: str, shape: tuple[int, int], expert: int, start: int, bias: bool) -> Iterator[Entry]:
    yield f"{theirs}.weight", Slot(parameter=ours, shape=shape, expert=expert, start=start)
    if bias:
        yield f"{theirs}.bias", Slot(parameter=f"{ours}_bias", shape=shape[:1], expert=expert, start=start)


def _flat_experts(hidden: int, spec: MoESpec, names: WeightNames, theirs: str, ours: str) -> Iterator[Entry]:
    inner, count = spec.intermediate_size, spec.num_experts
    shape = (count * inner, hidden)
    for i, name in enumerate(names.flat_up):
        up = Slot(parameter=f"{ours}.gate_up", shape=shape, axis=1, start=i * inner, flat_experts=count)
        yield theirs + name, up
    down = Slot(parameter=f"{ours}.down", shape=shape, axis=1, transposed=True, flat_experts=count)
    yield theirs + names.flat_down, down


def _transposed_experts(hidden: int, spec: MoESpec, names: WeightNames, theirs: str, ours: str) -> Iterator[Entry]:
    inner, count = spec.intermediate_size, spec.num_experts
    order = tuple(i % 2 * inner + i // 2 for i in range(2 * inner)) if names.stacked_interleaved else None
    shape = (count, hidden, 2 * inner)
    up = Slot(parameter=f"{ours}.gate_up", shape=shape, axis=1, transposed=True, order=order)
    down = Slot(parameter=f"{ours}.down", shape=(count, inner, hidden), axis=1, transposed=True)
    yield theirs + names.stacked_up, up
    yield theirs + names.stacked_down, down
    if spec.bias:
        bias = Slot(parameter=f"{ours}.gate_up_bias", shape=(count, 2 * inner), axis=1, order=order)
        yield f"{theirs}{names.stacked_up}_bias", bias
        yield f"{theirs}{names.stacked_down}_bias", Slot(parameter=f"{ours}.down_bias", shape=(count, hidden), axis=1)
    yield from _one_by_one(hidden, spec, names, theirs, ours)

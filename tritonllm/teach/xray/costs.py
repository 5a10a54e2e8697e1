"""How many bytes an operation must move and how many FLOPs it does, from its arguments: one formula for each.

Bytes are the least: every tensor that is read, and every one that is written, once. A multiplication, an addition, a
division, a square root or an exponential is one FLOP. Of a product, attention or experts only multiplications and
additions of the products are counted, as :mod:`torch.utils.flop_counter` counts them, and not what is fused into them.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from tritonllm.kernels import moe_route_ref


class Cost(NamedTuple):
    """How much an operation computes and moves.

    Attributes:
        flops: floating-point operations; ``None`` where there is no formula.
        read, written: how many bytes it reads and writes.
    """

    flops: int | None
    read: int
    written: int

    @property
    def bytes(self) -> int:
        return self.read + self.written


Later = Callable[[], Cost]  # for what depends on values: the device has them when the step is over
Bound = Mapping[str, Any]  # an operation's arguments by name
# Arguments of our operations that are written and not read.
_WRITTEN = {
    "out",
    "lse",
    "normed",
    "scaled",
    "next_squares",
    "ids",
    "drafts",
    "accepted",
    "weights",
    "logprobs",
    "ranks",
}
_NO_DATA = {"workspace"}
_ACTIVATIONS = {"silu": 4, "gelu": 5, "gelu_tanh": 9, "relu": 1, "relu2": 2}


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def nbytes(*values: Any) -> int:
    """Bytes of the tensors among ``values`` and in their lists; what a tensor repeats counts once."""
    total = 0
    for x in tensors_in(values):
        count = x.numel()
        if count and x.layout is torch.strided:
            for size, stride in zip(x.shape, x.stride(), strict=True):
                count //= size if stride == 0 else 1
        total += count * x.element_size()
    return total


def bind(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an operator by their names; a ``window`` of ``None`` where the kernels' operator has 0."""
    names = [argument.name for argument in func._schema.arguments]
    bound = {**dict(zip(names, args, strict=False)), **kwargs}
    return {**bound, "window": bound["window"] or None} if "window" in bound else bound


@functools.cache
def name_of(func: Any) -> str:
    """``aten.linear`` or ``tritonllm.norm``: without the overload."""
    return str(func).rsplit(".", 1)[0]


def cost_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Cost | Later:
    """The cost of one call of an operator."""
    bound = bind(func, args, kwargs)
    formula = FORMULAS.get(name_of(func))
    return _any(func, bound, result) if formula is None else formula(bound, result)


def _any(func: Any, bound: Bound, result: Any) -> Cost:
    """Every argument is read, and what is changed or new is written; an elementwise operation does a FLOP for each."""
    mutated = {a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    only_written = mutated & _WRITTEN
    read = nbytes(*(value for name, value in bound.items() if name not in only_written | _NO_DATA))
    written = nbytes(*(bound[name] for name in mutated - _NO_DATA if name in bound))
    written += 0 if mutated else nbytes(result)
    flops = None
    if torch.Tag.pointwise in func.tags and "copy" not in name_of(func) and not name_of(func).endswith(".to"):
        flops = sum(x.numel() for x in tensors_in(result))
    return Cost(flops, read, written)


def product_flops(rows: int, inner: int, columns: int) -> int:
    return 2 * rows * inner * columns


def _linear(bound: Bound, result: Any) -> Cost:
    """``x[..., K] @ weight[N, K].T``: torch's, oneDNN's, and ours with what is fused into it."""
    x = next(bound[name] for name in ("input", "x", "X") if name in bound)
    weight = next(bound[name] for name in ("weight", "W") if name in bound)
    columns, inner = weight.shape[0], x.shape[-1]
    names = ("bias", "B", "norm_weight", "squares", "next_weight", "scales", "zeros", "row_scales")
    others = [bound.get(name) for name in names]
    written = [result, *(bound.get(name) for name in ("out", "scaled", "next_squares", "logits", "normed"))]
    added = bound["out"] if bound.get("add") else None
    flops = product_flops(x.numel() // max(1, inner), inner, columns)
    return Cost(flops, nbytes(x, weight, *others, added), nbytes(*written))


def _mm(bound: Bound, result: torch.Tensor) -> Cost:
    """Matrices, or batches of them; what is added is read."""
    adds = "mat1" in bound or "batch1" in bound
    a = bound.get("mat1", bound.get("batch1", bound.get("self")))
    b = bound.get("mat2", bound.get("batch2", bound.get("other")))
    return Cost(2 * result.numel() * a.shape[-1], nbytes(a, b, bound["self"] if adds else None), nbytes(result))


def norm_flops(rows: int, size: int, *, mean: bool = False, weight: bool = True, bias: bool = False) -> int:
    """Square and sum up, divide by the root; subtract a mean before; multiply by a weight, add a bias after."""
    each = 3 + (2 if mean else 0) + weight + bias
    return rows * (each * size + (4 if mean else 3))


def _norm(bound: Bound, result: Any) -> Cost:
    x, residual, out = bound["x"], bound.get("residual"), bound["out"]
    weight, bias = bound.get("weight"), bound.get("bias")
    size = x.shape[-1]
    rows = x.numel() // max(1, size)
    flops = norm_flops(rows, size, mean=bool(bound["mean"]), weight=weight is not None, bias=bias is not None)
    if residual is not None:
        flops += x.numel() * (1 if bound["x_scale"] == 1 else 2)
    return Cost(flops, nbytes(x, residual, weight, bias), nbytes(out, residual, bound.get("scale")))


def _torch_norm(bound: Bound, result: Any) -> Cost:
    x, weight = bound["input"], bound.get("weight")
    size = x.shape[-1]
    mean = "bias" in bound or "cudnn_enable" in bound
    bias = bound.get("bias")
    flops = norm_flops(x.numel() // max(1, size), size, mean=mean, weight=weight is not None, bias=bias is not None)
    return Cost(flops, nbytes(x, weight, bias), nbytes(result))


def rope_flops(rows: int, rotary: int) -> int:
    """A pair of numbers turned is four multiplications and two additions."""
    return 3 * rows * rotary


def _rope(bound: Bound, result: Any) -> Cost:
    q, k, table, positions = (bound[name] for name in ("q", "k", "cos_sin_cache", "positions"))
    rotary, tokens = table.shape[1], len(q)
    moved = nbytes(q, k)
    rows = table.element_size() * rotary * tokens
    return Cost(rope_flops(tokens * (q.shape[1] + k.shape[1]), rotary), moved + rows + nbytes(positions), moved)


def _heads(bound: Bound, result: Any) -> Cost:
    """Normalise and rotate the heads of a projection, and store keys and values."""
    qkv, cache, table = bound["qkv"], bound["k_cache"], bound.get("cos_sin_cache")
    kv_heads, size = cache.shape[2:]
    tokens, columns = qkv.shape
    turned = columns // size - kv_heads  # heads of queries and keys
    flops, tables = 0, 0
    if bound.get("q_weight") is not None:
        flops += norm_flops(tokens * turned, size)
    if table is not None:
        flops += rope_flops(tokens * turned, table.shape[1])
        tables = tokens * table.shape[1] * table.element_size()
    small = nbytes(bound.get("q_weight"), bound.get("k_weight"), bound["slot_mapping"], bound.get("positions"))
    stored = 2 * tokens * kv_heads * size * cache.element_size()
    queries = tokens * (turned - kv_heads) * size * qkv.element_size()
    return Cost(flops, nbytes(qkv) + tables + small, stored + queries)


class Pairs(NamedTuple):
    """What the queries of a step see: how many (query, key) pairs, and how many keys at all."""

    pairs: int
    keys: int


def visible(lengths: Sequence[int], queries: Sequence[int], window: int | None = None, causal: bool = True) -> Pairs:
    """How many pairs of query and key there are in sequences of so many keys, the last of which have queries.

    Args:
        window: how many keys a query sees, itself included; ``None`` for all.
        causal: no query sees a key behind it; else a window has two sides.
    """
    pairs = keys = 0
    for length, count in zip(lengths, queries, strict=True):
        if count == 0 or length == 0:
            continue
        lows, highs = [], []
        for position in range(max(0, length - count), length):
            before, behind = (0, length) if window is None else (position - window + 1, position + window)
            lows.append(max(0, before))
            highs.append(position + 1 if causal else min(length, behind))
        pairs += sum(highs) - sum(lows)
        keys += max(highs) - min(lows)
    return Pairs(pairs, keys)


def _attention(bound: Bound, result: Any) -> Later:
    q, out, lens, starts = bound["q"], bound["out"], bound["seq_lens"], bound.get("cu_seqlens_q")
    cache, table = bound["k_cache"], bound["block_tables"]
    heads, size = q.shape[1:]
    kv_heads, block = cache.shape[2], cache.shape[1]
    bytes_of_key = 2 * kv_heads * size * cache.element_size()
    window, causal = bound["window"], bound.get("causal", True)
    fixed, written, count = nbytes(q, lens, starts), nbytes(out, bound.get("lse")), table.element_size()

    def later() -> Cost:
        lengths = lens.tolist()
        ends = list(range(len(lengths) + 1)) if starts is None else starts.tolist()
        queries = [end - begin for begin, end in pairwise(ends)]
        seen = visible(lengths, queries[: len(lengths)], window, causal)
        entries = count * sum(-(-length // block) for length in lengths)
        return Cost(4 * heads * size * seen.pairs, fixed + bytes_of_key * seen.keys + entries, written)

    return later


def _decode(bound: Bound, result: Any) -> Later:
    """All between a decode's projections in one launch."""
    cache, qkv = bound["k_cache"], bound["qkv"]
    size = cache.shape[3]
    q = qkv[:, : qkv.shape[1] - 2 * cache.shape[2] * size].unflatten(1, (-1, size))
    before, attention = _heads(bound, None), _attention({**bound, "q": q}, None)
    queries, q_rows = nbytes(q), q.new_empty(0).element_size() * q.numel()

    def later() -> Cost:
        cost = attention()  # the queries stay where they are, on the chip
        return Cost(
            (before.flops or 0) + (cost.flops or 0),
            before.read + cost.read - queries,
            before.written - q_rows + cost.written,
        )

    return later


def _sdpa(bound: Bound, result: torch.Tensor) -> Cost:
    q, k, v = bound["query"], bound["key"], bound["value"]
    flops = 2 * q.numel() * k.shape[-2] + 2 * result.numel() * k.shape[-2]
    return Cost(flops, nbytes(q, k, v, bound.get("attn_mask")), nbytes(result))


def _experts(bound: Bound, result: Any) -> Later:
    """The two products of those experts that were chosen, whose weights are read."""
    x, up, down, out = bound["x"], bound["w_gate_up"], bound["w_down"], bound["out"]
    logits = bound.get("logits")
    ids = None if logits is not None else bound["ids"]
    top_k = bound["top_k"] if ids is None else ids.shape[1]
    inner, hidden, tokens = up.shape[1] // 2, down.shape[1], len(x)  # a packed weight has fewer columns
    each = (up[0].numel() + down[0].numel()) * up.element_size() if len(up) else 0
    names = [f"{of}_{part}" for of in ("gate_up", "down") for part in ("bias", "scales", "zeros", "row_scales")]
    others = nbytes(*map(bound.get, names)) // max(1, len(up))
    read = nbytes(x, logits, ids, bound.get("weights"), bound.get("norm_weight"), out if bound.get("add") else None)
    written = nbytes(out, bound.get("normed"))
    flops = tokens * top_k * 6 * hidden * inner

    def later() -> Cost:
        chosen = ids
        if chosen is None:
            rule = {name: bound[name] for name in ("renormalize", "scoring", "num_groups", "top_k_groups")}
            chosen = moe_route_ref(logits, top_k, bias=bound.get("correction_bias"), **rule)[1]
        return Cost(flops, read + (each + others) * int(chosen.unique().numel()), written)

    bound = {name: value for name, value in bound.items() if name not in ("x", "out", "normed")}  # free large ones
    return later


def _route(bound: Bound, result: Any) -> Cost:
    return Cost(None, nbytes(bound["router_logits"], bound.get("bias")), nbytes(bound["weights"], bound["ids"]))


def _activation(bound: Bound, result: Any) -> Cost:
    out = bound["out"]
    each = _ACTIVATIONS[bound["activation"]] + (1 if bound["gated"] else 0)
    return Cost(each * out.numel(), nbytes(bound["x"]), nbytes(out))


def _xielu(bound: Bound, result: Any) -> Cost:
    out = bound["out"]
    return Cost(8 * out.numel(), nbytes(bound["x"], bound["parameters"]), nbytes(out))


def _output_gate(bound: Bound, result: Any) -> Cost:
    out = bound["out"]
    return Cost(4 * out.numel(), nbytes(bound["x"], bound["gate"]), nbytes(out))


def _cap(bound: Bound, result: Any) -> Cost:
    logits = bound["logits"]
    each = (1 if bound["scale"] != 1 else 0) + (3 if bound["softcap"] else 0)
    return Cost(each * logits.numel(), nbytes(logits), nbytes(logits))


def _rows(bound: Bound, result: torch.Tensor) -> Cost:
    """Rows of a table."""
    ids = bound.get("indices", bound.get("index"))
    return Cost(0, nbytes(result, ids), nbytes(result))


def _put(bound: Bound, result: Any) -> Cost:
    """Rows or elements written into a larger tensor."""
    new = bound.get("source", bound.get("values", bound.get("src")))
    ids = bound.get("index", bound.get("indices"))
    return Cost(0, nbytes(new, ids), nbytes(new))


def _copy(bound: Bound, result: Any) -> Cost:
    return Cost(0, nbytes(bound["src"]), nbytes(bound["self"]))


def _fill(bound: Bound, result: Any) -> Cost:
    return Cost(0, 0, nbytes(result))


def _store(bound: Bound, result: Any) -> Cost:
    k, v, cache = bound["k"], bound["v"], bound["k_cache"]
    return Cost(0, nbytes(k, v, bound["slot_mapping"]), (k.numel() + v.numel()) * cache.element_size())


def _copy_blocks(bound: Bound, result: Any) -> Cost:
    cache, pairs = bound["k_cache"], bound["pairs"]
    moved = 2 * len(pairs) * cache[0].numel() * cache.element_size() if len(cache) else 0
    return Cost(0, moved + nbytes(pairs), moved)


FORMULAS: dict[str, Callable[[Bound, Any], Cost | Later]] = {
    "aten.linear": _linear,
    "mkldnn._linear_pointwise": _linear,
    "tritonllm.linear": _linear,
    "tritonllm.add_linear": _linear,
    "tritonllm.linear_unnormed": _linear,
    "tritonllm.batch_invariant_linear": _linear,
    "tritonllm.batch_invariant_gated_linear": _linear,
    "tritonllm.moe_logits": _linear,
    "aten.mm": _mm,
    "aten.bmm": _mm,
    "aten.matmul": _mm,
    "aten._grouped_mm": _mm,
    "aten.addmm": _mm,
    "aten.addmm_": _mm,
    "aten.baddbmm": _mm,
    "tritonllm.norm": _norm,
    "aten.rms_norm": _torch_norm,
    "aten._fused_rms_norm": _torch_norm,
    "aten.layer_norm": _torch_norm,
    "aten.native_layer_norm": _torch_norm,
    "tritonllm.apply_rope": _rope,
    "tritonllm.qk_norm_rope_store": _heads,
    "tritonllm.paged_decode_attention": _attention,
    "tritonllm.paged_verify_attention": _attention,
    "tritonllm.varlen_prefill_attention": _attention,
    "tritonllm.batch_invariant_attention": _attention,
    "tritonllm.fused_decode_attention": _decode,
    "aten.scaled_dot_product_attention": _sdpa,
    "tritonllm.fused_moe": _experts,
    "tritonllm.moe_from_logits": _experts,
    "tritonllm.moe_route": _route,
    "tritonllm.activation": _activation,
    "tritonllm.xielu": _xielu,
    "tritonllm.output_gate": _output_gate,
    "tritonllm.cap_logits": _cap,
    "aten.embedding": _rows,
    "aten.index_select": _rows,
    "aten.index": _rows,
    "aten.index_copy_": _put,
    "aten.index_put_": _put,
    "aten.copy_": _copy,
    "aten.new_zeros": _fill,
    "aten.zeros": _fill,
    "aten.ones": _fill,
    "aten.full": _fill,
    "aten.arange": _fill,
    "tritonllm.store_kv": _store,
    "tritonllm.copy_blocks": _copy_blocks,
}
PRODUCTS = frozenset(name for name, formula in FORMULAS.items() if formula in (_linear, _mm))
ATTENTION = frozenset(name for name, formula in FORMULAS.items() if formula in (_attention, _decode, _sdpa))

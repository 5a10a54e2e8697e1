"""Bytes and FLOPs of each operation are those that counting one by one gives."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from tritonllm import kernels
from tritonllm.teach.xray.costs import FORMULAS, Cost, cost_of, nbytes, norm_flops, rope_flops, visible


class Costs(TorchDispatchMode):
    """The costs of our operators, and of torch's, that run inside."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not func.is_view and "empty" not in str(func):
            cost = cost_of(func, args, kwargs or {}, result)
            self.found.append((str(func).rsplit(".", 1)[0], cost if isinstance(cost, Cost) else cost()))
        return result


@torch.inference_mode()
def costs(work):
    with Costs() as seen:
        work()
    return seen.found


def cost(work, name):
    (found,) = [cost for op, cost in costs(work) if op == name]
    return found


class Counted(float):
    """A number that counts what is done to it."""

    count = 0

    def _counts(self, value):
        Counted.count += 1
        return Counted(value)

    def __add__(self, other):
        return self._counts(float(self) + float(other))

    def __sub__(self, other):
        return self._counts(float(self) - float(other))

    def __mul__(self, other):
        return self._counts(float(self) * float(other))

    def __truediv__(self, other):
        return self._counts(float(self) / float(other))

    def root(self):
        return self._counts(math.sqrt(float(self)))


def flops_of(work):
    Counted.count = 0
    work()
    return Counted.count


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", [1, 7])
def test_flops_of_a_norm(size, mean, bias):
    def norm():
        x = [Counted(i + 0.5) for i in range(size)]
        if mean:
            total = Counted(0)
            for value in x:
                total = total + value
            middle = total / size
            x = [value - middle for value in x]
        squares = Counted(0)
        for value in x:
            squares = squares + value * value
        root = (squares / size + 1e-6).root()
        for value in x:
            y = value / root * 0.5
            if bias:
                y + 1.0

    assert norm_flops(1, size, mean=mean, bias=bias) == flops_of(norm)


def test_flops_of_a_rotation():
    def rotate():
        for _ in range(5):  # rows
            for _ in range(4):  # pairs of 8 numbers
                a, b, cos, sin = (Counted(1) for _ in range(4))
                a * cos - b * sin, b * cos + a * sin

    assert rope_flops(5, 8) == flops_of(rotate)


@given(
    lengths=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=4),
    window=st.none() | st.integers(1, 6),
    causal=st.booleans(),
)
def test_what_queries_see(lengths, window, causal):
    sequences = [(keys, min(queries, keys)) for keys, queries in lengths]
    pairs, seen = 0, set()
    for number, (keys, queries) in enumerate(sequences):
        for query in range(keys - queries, keys):
            for key in range(keys):
                near = window is None or abs(query - key) < window
                if near and (key <= query or not causal):
                    pairs += 1
                    seen.add((number, key))
    found = visible([k for k, _ in sequences], [q for _, q in sequences], window, causal)
    assert found == (pairs, len(seen))


@pytest.mark.parametrize(("rows", "bias"), [(1, False), (5, True)])
def test_products(rows, bias):
    x, weight, add = torch.randn(rows, 6), torch.randn(10, 6), torch.randn(10) if bias else None
    with FlopCounterMode(display=False) as counter:
        torch.nn.functional.linear(x, weight, add)
    expected = counter.get_total_flops()
    inputs = 4 * (rows * 6 + 60 + (10 if bias else 0))
    found = cost(lambda: torch.nn.functional.linear(x, weight, add), "aten.linear")
    assert found == (expected, inputs, 4 * rows * 10) and expected == 2 * rows * 6 * 10
    assert cost(lambda: kernels.linear(x, weight, add), "tritonllm.linear") == found
    fused = cost(lambda: kernels.linear(x, weight, add, residual=torch.zeros(rows, 10)), "tritonllm.linear")
    assert fused == (expected, inputs + 4 * rows * 10, 4 * rows * 10)
    gated = cost(lambda: kernels.linear(x, weight, add, activation="silu", gated=True), "tritonllm.linear")
    assert gated == (expected, inputs, 4 * rows * 5)


def test_torch_s_other_products():
    a, b, c = torch.randn(3, 4, 5), torch.randn(3, 5, 6), torch.randn(4, 6)
    attends = lambda: torch.nn.functional.scaled_dot_product_attention(a[None], a[None], a[None])  # noqa: E731
    for work, same in (
        (lambda: a[0] @ b[0], None),
        (lambda: torch.bmm(a, b), None),
        (lambda: a @ b, None),
        (lambda: torch.addmm(c, a[0], b[0]), None),
        (attends, lambda: (a @ a.mT) @ a),  # torch does not count its attention on the CPU
    ):
        with FlopCounterMode(display=False) as counter:
            (same or work)()
        ((_, found),) = [(name, cost) for name, cost in costs(work) if cost.flops]
        assert found.flops == counter.get_total_flops() > 0


def cache_of(tokens, block, kv_heads, size, dtype=torch.float32):
    return [torch.zeros(tokens // block + 3, block, kv_heads, size, dtype=dtype) for _ in "kv"]


@given(
    sequences=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5)), min_size=1, max_size=3),
    window=st.sampled_from([None, 1, 3]),
)
def test_prefill_attention(sequences, window):
    """Sequences with keys in the cache and new tokens; every number that is read or multiplied is counted."""
    heads, kv_heads, size, block = 4, 2, 16, 4
    lengths, queries = [old + new for old, new in sequences], [new for _, new in sequences]
    k_cache, v_cache = cache_of(64, block, kv_heads, size)
    tables = torch.arange(4, dtype=torch.int32).expand(len(lengths), 4).contiguous()
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    q = torch.randn(sum(queries), heads, size)
    multiplied, read = 0, set()
    for number, (length, new) in enumerate(zip(lengths, queries, strict=True)):
        for query in range(length - new, length):
            for key in range(query + 1):
                if window is None or key > query - window:
                    multiplied += heads * 2 * (2 * size)  # q times k, and the weight times v
                    read.add((number, key))
    batch = tables, starts, torch.tensor(lengths, dtype=torch.int32)
    limits = {"max_seqlen_q": max(queries), "window": window}
    found = cost(
        lambda: kernels.varlen_prefill_attention(q, k_cache, v_cache, *batch, **limits),
        "tritonllm.varlen_prefill_attention",
    )
    entries = sum(4 * math.ceil(length / block) for length in lengths)
    small = 4 * len(lengths) + 4 * len(starts) + entries
    assert found.flops == multiplied
    assert found.read == q.nbytes + len(read) * 2 * kv_heads * size * 4 + small
    assert found.written == q.nbytes


def test_kernels_whose_rows_do_not_depend_on_others_cost_what_the_others_cost():
    heads, kv_heads, size = 4, 2, 16
    k_cache, v_cache = cache_of(64, 4, kv_heads, size)
    tables, lens = torch.arange(8, dtype=torch.int32).view(2, 4), torch.tensor([3, 9], dtype=torch.int32)
    q, starts = torch.randn(3, heads, size), torch.tensor([0, 1, 3], dtype=torch.int32)
    batch = q, k_cache, v_cache, tables, starts, lens
    other = cost(lambda: kernels.varlen_prefill_attention(*batch, max_seqlen_q=2), "tritonllm.varlen_prefill_attention")
    name = "tritonllm.batch_invariant_attention"
    assert cost(lambda: kernels.batch_invariant_attention(*batch, max_seqlen_q=2), name) == other
    x, weight, bias = torch.randn(3, 16), torch.randn(8, 16), torch.randn(8)
    found = cost(lambda: kernels.batch_invariant_linear(x, weight, bias), "tritonllm.batch_invariant_linear")
    assert found == (2 * 3 * 16 * 8, nbytes(x, weight, bias), 3 * 8 * 4)
    name = "tritonllm.batch_invariant_gated_linear"
    found = cost(lambda: kernels.batch_invariant_linear(x, weight, activation="silu"), name)
    assert found == (2 * 3 * 16 * 8, nbytes(x, weight), 3 * 4 * 4)


def test_every_operation_with_a_cache_or_weights_has_a_formula():
    """Without one the whole pool of blocks would count as read."""
    ours = [schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("tritonllm::")]
    assert len(ours) > 20
    for schema in ours:
        if {"k_cache", "weight"} & {argument.name for argument in schema.arguments}:
            assert schema.name.replace("::", ".") in FORMULAS, schema.name


def test_decode_attention_and_what_comes_before_it():
    heads, kv_heads, size, block = 4, 2, 16, 4
    k_cache, v_cache = cache_of(64, block, kv_heads, size)
    tables, lens = torch.arange(8, dtype=torch.int32).view(2, 4), torch.tensor([3, 9], dtype=torch.int32)
    q = torch.randn(2, heads, size)
    found = cost(
        lambda: kernels.paged_decode_attention(q, k_cache, v_cache, tables, lens), "tritonllm.paged_decode_attention"
    )
    keys = 4 * 2 * kv_heads * size * 12
    assert found == (4 * heads * size * 12, q.nbytes + keys + 8 + 4 * (1 + 3), q.nbytes)

    table, positions = torch.randn(16, size), torch.tensor([2, 8])
    weights, slots = [torch.ones(size) for _ in "qk"], torch.tensor([2, 24])
    qkv = torch.randn(2, (heads + 2 * kv_heads) * size)
    before = cost(
        lambda: kernels.qk_norm_rope_store(
            qkv.clone(),
            k_cache,
            v_cache,
            slots,
            positions,
            cos_sin_cache=table,
            q_weight=weights[0],
            k_weight=weights[1],
        ),
        "tritonllm.qk_norm_rope_store",
    )
    turned = 2 * (heads + kv_heads)
    assert before.flops == norm_flops(turned, size) + rope_flops(turned, size)
    stored = 4 * 2 * 2 * kv_heads * size
    assert before.read == qkv.nbytes + 2 * size * 4 + nbytes(*weights, slots, positions)
    assert before.written == stored + q.nbytes

    fused = cost(
        lambda: kernels.fused_decode_attention(
            qkv.clone(),
            k_cache,
            v_cache,
            slots,
            tables,
            lens,
            positions=positions,
            cos_sin_cache=table,
            q_weight=weights[0],
            k_weight=weights[1],
        ),
        "tritonllm.fused_decode_attention",
    )
    assert fused.flops == before.flops + found.flops
    # the queries are read once, as a part of the projection, and never written
    assert fused.read == before.read + found.read - q.nbytes
    assert fused.written == stored + q.nbytes


@pytest.mark.parametrize("from_logits", [False, True])
def test_experts(from_logits):
    """Two products for each token and expert that it chose; the weights of those that somebody chose."""
    tokens, hidden, inner, experts, top_k = 3, 8, 12, 6, 2
    x, logits = torch.randn(tokens, hidden), torch.randn(tokens, experts)
    up, down = torch.randn(experts, 2 * inner, hidden), torch.randn(experts, hidden, inner)
    weights, ids = kernels.moe_route_ref(logits, top_k)

    def work():
        if from_logits:
            kernels.moe_from_logits(x, logits, up, down, top_k)
        else:
            kernels.fused_moe(x, up, down, weights, ids)

    with FlopCounterMode(display=False) as counter:
        for token in range(tokens):
            for expert in ids[token].long():
                gate = x[token : token + 1] @ up[expert].T
                gate[:, :inner] @ down[expert].T
    found = cost(work, "tritonllm.moe_from_logits" if from_logits else "tritonllm.fused_moe")
    assert found.flops == counter.get_total_flops()
    touched = len(set(ids.flatten().tolist())) * (up[0].nbytes + down[0].nbytes)
    given = logits.nbytes if from_logits else weights.nbytes + ids.nbytes
    assert found.read == x.nbytes + touched + given
    assert found.written == x.nbytes


def test_rows_and_slots():
    table, ids = torch.randn(100, 8), torch.tensor([3, 3, 99])
    found = cost(lambda: torch.nn.functional.embedding(ids, table), "aten.embedding")
    assert found == (0, 3 * 8 * 4 + ids.nbytes, 3 * 8 * 4)
    k, v = torch.randn(2, 3, 2, 16)
    caches, slots = cache_of(32, 4, 2, 16), torch.tensor([1, 5, 9])
    assert cost(lambda: kernels.store_kv(k, v, *caches, slots), "tritonllm.store_kv") == (
        0,
        k.nbytes + v.nbytes + slots.nbytes,
        k.nbytes + v.nbytes,
    )
    pairs = torch.tensor([[0, 1], [2, 3]])
    moved = 2 * 2 * caches[0][0].nbytes
    assert cost(lambda: kernels.copy_blocks(*caches, pairs), "tritonllm.copy_blocks") == (
        0,
        moved + pairs.nbytes,
        moved,
    )


def test_norms_and_activations():
    x, weight, stream = torch.randn(3, 8), torch.ones(8), torch.zeros(3, 8)
    found = cost(lambda: kernels.rms_norm(x, weight), "tritonllm.norm")
    assert found == (norm_flops(3, 8), x.nbytes + weight.nbytes, x.nbytes)
    added = cost(lambda: kernels.fused_add_rms_norm(x.clone(), stream, weight), "tritonllm.norm")
    assert added.flops == norm_flops(3, 8) + x.numel()
    assert added.bytes == found.bytes + 2 * x.nbytes
    gated = cost(lambda: kernels.silu_and_mul(x), "tritonllm.activation")
    assert gated == (5 * 12, x.nbytes, x.nbytes // 2)  # exponential, sum, quotient, sign, and the product


def test_what_repeats_is_read_once():
    x = torch.randn(1, 8).expand(5, 8)
    assert nbytes(x) == 32
    assert nbytes(None, [x, torch.zeros(0, 3)], "text") == 32
    (found,) = [cost for name, cost in costs(lambda: torch.add(x, x)) if name == "aten.add"]
    assert found == (40, 64, 160)

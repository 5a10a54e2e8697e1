import dataclasses

import pytest
import torch
from support.compare import assert_close
from torch.nn import functional as F

from tritonllm.dist.exchange import NO_EXCHANGE
from tritonllm.layers.exchanged_rows import ExchangedRows
from tritonllm.layers.mlp import MLPSpec
from tritonllm.layers.moe import MoE, MoESpec
from tritonllm.layers.norm import BlockInput, Norm, NormSpec

SIZE, INNER = 8, 6


def make(device: torch.device, **axes) -> MoE:
    spec = MoESpec(**{"num_experts": 4, "top_k": 2, "intermediate_size": INNER, **axes})
    moe = MoE(SIZE, spec, dtype=torch.float32, device=device)
    for p in moe.parameters():
        p.normal_(0, 0.5)
    return moe


def expert(moe: MoE, x: torch.Tensor, e: int) -> torch.Tensor:
    gate, up = F.linear(x, moe.gate_up[e], None if moe.gate_up_bias is None else moe.gate_up_bias[e]).chunk(2)
    if moe.spec.activation == "swigluoai":
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        inner = (up + 1) * gate * torch.sigmoid(1.702 * gate)
    else:
        inner = F.silu(gate) * up
    return F.linear(inner, moe.down[e], None if moe.down_bias is None else moe.down_bias[e])


def want(moe: MoE, x: torch.Tensor) -> torch.Tensor:
    """One token at a time, the definition."""
    spec, rows = moe.spec, []
    for row in x:
        logits = F.linear(row, moe.router.weight, moe.router.bias)
        scores = logits.sigmoid() if "sigmoid" in spec.scoring else logits.softmax(0)
        choice = logits if spec.scoring == "late_sigmoid" else scores
        choice = choice if moe.correction_bias is None else choice + moe.correction_bias
        if spec.num_groups > 1:
            grouped = choice.view(spec.num_groups, -1)
            two_best = grouped.topk(2).values.sum(-1) if moe.correction_bias is not None else grouped.amax(-1)
            kept = two_best.topk(spec.top_k_groups).indices
            masked = torch.full_like(grouped, -torch.inf)
            masked[kept] = grouped[kept]
            choice = masked.flatten()
        ids = choice.topk(spec.top_k).indices
        if spec.scoring == "sparsemixer":
            scores = sparsemixer(logits, ids)
        weights = scores[ids] / (scores[ids].sum() if spec.renormalize else 1)
        out = sum(w * spec.scale * expert(moe, row, int(e)) for w, e in zip(weights, ids, strict=True))
        if moe.shared is not None:
            shared = moe.shared(BlockInput(row[None])).alone()[0]
            out = out + (shared if moe.shared_gate is None else shared * moe.shared_gate(row).sigmoid())
        rows.append(out)
    return torch.stack(rows)


def sparsemixer(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Of each chosen expert what its part is of those left that are not further below it than a fiftieth."""
    parts, left = torch.zeros_like(logits), dict(enumerate(logits.tolist()))
    for chosen in ids.tolist():
        best = left[chosen]
        near = [s for s in left.values() if best - s <= 0.02 * max(abs(s), best)]
        parts[chosen] = 1 / torch.tensor(near).sub(best).exp().sum()
        del left[chosen]
    return parts


SHARED = MLPSpec(intermediate_size=5, activation="silu")


@pytest.mark.parametrize(
    "axes",
    [
        {},
        {"renormalize": False, "scale": 2.5},
        {"correction_bias": True, "router_float32": True},
        {"scoring": "sigmoid", "correction_bias": True},
        {"scoring": "sigmoid", "correction_bias": True, "num_groups": 2, "top_k_groups": 1},
        {"num_groups": 2, "top_k_groups": 1, "top_k": 1},
        {"scoring": "late_sigmoid", "correction_bias": True},
        {"scoring": "sparsemixer", "renormalize": False},
        {"bias": True, "router_bias": True, "activation": "swigluoai"},
        {"shared": SHARED},
        {"shared": SHARED, "shared_gate": True},
    ],
    ids=str,
)
def test_matches_the_definition(device, axes):
    torch.manual_seed(0)
    moe, x = make(device, **axes), torch.randn(9, SIZE, device=device)
    before = x.clone()
    assert_close(moe(BlockInput(x)).alone(), want(moe, before))
    assert torch.equal(x, before)


@pytest.mark.parametrize("tokens", [1, 100])
def test_a_float32_router_tells_experts_apart_that_bfloat16_would_not(device, tokens):
    spec = MoESpec(num_experts=4, top_k=1, intermediate_size=INNER, router_float32=True)
    moe = MoE(SIZE, spec, dtype=torch.bfloat16, device=device)
    for name, p in moe.named_parameters():
        assert p.dtype is (torch.float32 if name == "router.weight" else torch.bfloat16)
        p.fill_(1.0)
    moe.router.weight[2] += 1e-4
    _, routed, _ = moe(BlockInput(torch.ones(tokens, SIZE, dtype=torch.bfloat16, device=device)))
    assert routed.logits.argmax(1).tolist() == [2] * tokens and routed.rows.dtype is torch.bfloat16


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("axes", [{}, {"shared": SHARED}, {"shared": SHARED, "shared_gate": True}], ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 2, 5])
def test_norm_before_and_addition_after(device, tokens, axes, at_once):
    """The router may normalise; the stream is what it was plus the result."""
    torch.manual_seed(0)
    moe = make(device, router_bias=True, **axes)
    norm = Norm((SIZE,), NormSpec(kind="rms", eps=1e-5), dtype=torch.float32, device=device)
    assert norm.weight is not None
    norm.weight.normal_(1, 0.1)
    stream = torch.randn(tokens, SIZE, device=device)
    expected = stream.clone()
    if tokens:
        expected += 0.5 * want(moe, norm.normalize(stream))
    product, routed, _ = moe(BlockInput(stream, norm) if at_once else BlockInput(norm.normalize(stream)))
    product.add_to(stream, routed, 0.5)
    assert_close(stream, expected)


def test_the_sum_normalises_for_the_next_block(device):
    torch.manual_seed(0)
    moe, x, stream = make(device), torch.randn(5, SIZE, device=device), torch.randn(5, SIZE, device=device)
    norm = Norm((SIZE,), NormSpec(kind="rms", eps=1e-2, weight_offset=0.5), dtype=torch.float32, device=device)
    assert norm.weight is not None
    norm.weight.normal_(1, 0.1)
    expected = stream + 0.5 * want(moe, x)
    product, routed, _ = moe(BlockInput(x))
    rows, *left = product.add_and_normalize(stream, routed, norm, 0.5)
    assert left == [None] * 3
    assert_close(stream, expected)
    assert_close(rows, norm.normalize(expected))


@pytest.mark.parametrize("axes", [{}, {"bias": True, "scale": 2.5}, {"shared": SHARED, "shared_gate": True}], ids=str)
def test_rows_that_travel(device, axes):
    """Alone, added to the stream, and added and normalised; padding stays where it is."""
    torch.manual_seed(0)
    moe, x, stream = make(device, **axes), torch.randn(5, SIZE, device=device), torch.randn(5, SIZE, device=device)
    moe.spec = dataclasses.replace(moe.spec, held=range(4), exchanged=True)
    norm = Norm((SIZE,), NormSpec(kind="rms", eps=1e-2, weight_offset=0.5), dtype=torch.float32, device=device)
    assert norm.weight is not None
    norm.weight.normal_(1, 0.1)
    expected, marks = want(moe, x), torch.tensor([3, 0, 9, 1, -1], device=device)
    product, routed, _ = moe(BlockInput(x), None, ExchangedRows(NO_EXCHANGE, 7, marks))
    assert_close(product.alone(routed)[:4], expected[:4])
    if moe.shared is None:
        assert not product.alone(routed)[4].any()
        sums = stream.clone()
        rows, *left = product.add_and_normalize(sums, routed, norm, 0.5)
        assert left == [None] * 3
        assert_close(sums[:4], (stream + 0.5 * expected)[:4])
        assert_close(rows, norm.normalize(sums))
    product.add_to(sums := stream.clone(), routed, 0.5)
    assert_close(sums[:4], (stream + 0.5 * expected)[:4])


def test_no_tokens(device):
    assert make(device, shared=SHARED)(BlockInput(torch.zeros(0, SIZE, device=device))).alone().shape == (0, SIZE)


def test_correction_bias_keeps_its_precision(device):
    spec = MoESpec(num_experts=4, top_k=2, intermediate_size=INNER, scoring="sigmoid", correction_bias=True)
    moe = MoE(SIZE, spec, dtype=torch.bfloat16, device=device)
    assert moe.correction_bias is not None and moe.correction_bias.dtype is torch.float32
    assert moe.router.weight.dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"activation": "relu"}, "activation of experts must be one of silu.*'relu'"),
        ({"num_groups": 3}, r"num_groups \(3\) must divide num_experts \(4\)"),
        ({"num_groups": 2, "top_k_groups": 3}, r"at least top_k_groups \(3\)"),
        ({"top_k": 5}, "top_k must be from 1 to the 4 experts"),
        ({"num_groups": 2, "top_k": 3}, "top_k must be from 1 to the 2 experts"),
        ({"weights_on_input": True}, "weights_on_input needs top_k=1, got 2"),
        ({"apart": NormSpec(kind="rms", eps=1e-6)}, "apart needs a shared MLP without a gate or scale"),
    ],
)
def test_bad_specs(axes, message):
    with pytest.raises(ValueError, match=message):
        MoESpec(**{"num_experts": 4, "top_k": 2, "intermediate_size": INNER, **axes})

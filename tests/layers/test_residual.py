"""The stream is what the plain formula gives, whichever launch adds to it and whichever normalises it."""

import pytest
import torch
from support.compare import assert_close

from tritonllm.dist.group import Group
from tritonllm.kernels import fused_add_rms_norm
from tritonllm.layers.fusion import AddBy, NormBy
from tritonllm.layers.linear import Linear
from tritonllm.layers.mlp import MLP, MLPSpec
from tritonllm.layers.moe import MoE, MoESpec
from tritonllm.layers.norm import BlockInput, Norm, NormSpec
from tritonllm.layers.residual import Addend, Stream

SIZE, INNER, ROWS = 16, 24, 5
RMS = NormSpec(kind="rms", eps=1e-3, weight_offset=0.5)
LAYER = NormSpec(kind="layer", eps=1e-3, bias=True)


def filled(module: torch.nn.Module) -> torch.nn.Module:
    for p in module.parameters():
        p.normal_(0.5, 0.5)
    return module


def norm_of(spec: NormSpec, device: torch.device) -> Norm:
    return filled(Norm((SIZE,), spec, dtype=torch.float32, device=device))


def linear(device: torch.device, bias: bool = True) -> Linear:
    return filled(Linear(INNER, SIZE, bias=bias, dtype=torch.float32, device=device))


def mlp(device: torch.device) -> MLP:
    spec = MLPSpec(intermediate_size=INNER, activation="silu")
    return filled(MLP(SIZE, spec, dtype=torch.float32, device=device))


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("add", "by", "spec"),
    [
        (AddBy.LATER, NormBy.ADDITION, RMS),
        (AddBy.LATER, NormBy.ADDITION, LAYER),
        (AddBy.PRODUCT, NormBy.ALONE, RMS),
        (AddBy.PRODUCT, NormBy.ALONE, LAYER),
        (AddBy.PRODUCT, NormBy.PRODUCT, RMS),
        (AddBy.PRODUCT_WITH_NORM, NormBy.BEFORE, RMS),
        (AddBy.PRODUCT_WITH_NORM, NormBy.PRODUCT, RMS),  # begun in vain
        (AddBy.PRODUCT_WITH_NORM, NormBy.ALONE, RMS),
    ],
)
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_add_and_enter(device, add, by, spec, scale):
    """Twice: what was pending is gone after a block has entered."""
    rows, norm, then = torch.randn(ROWS, SIZE, device=device), norm_of(spec, device), mlp(device)
    stream, want = Stream(rows.clone(), scale=scale), rows
    for bias in (True, False):
        product, x = linear(device, bias), torch.randn(ROWS, INNER, device=device)
        want = want + scale * product(x)
        stream.add(Addend(product, x), add, following=norm)
        entered = then(stream.enter(norm, by)).alone()
        assert_close(stream.rows, want)
        assert_close(entered, then(BlockInput(norm.normalize(want))).alone())


@pytest.mark.parametrize("shared", [None, MLPSpec(intermediate_size=INNER, activation="silu")])
@pytest.mark.parametrize(
    ("add", "by"),
    [
        (AddBy.LATER, NormBy.ADDITION),
        (AddBy.PRODUCT, NormBy.ALONE),
        (AddBy.PRODUCT, NormBy.PRODUCT),
        (AddBy.PRODUCT_WITH_NORM, NormBy.BEFORE),
    ],
)
def test_experts(device, add, by, shared):
    """What sums them up adds, and computes the norm, and their router normalises."""
    if shared is not None and add is AddBy.PRODUCT_WITH_NORM:
        shared = None  # no plan asks for it
    spec = MoESpec(num_experts=4, top_k=2, intermediate_size=INNER, shared=shared)
    moe, norm = filled(MoE(SIZE, spec, dtype=torch.float32, device=device)), norm_of(RMS, device)
    rows, x = torch.randn(2, ROWS, SIZE, device=device)
    stream = Stream(rows.clone(), scale=0.3)
    want = rows + 0.3 * moe(BlockInput(x.clone())).alone()
    stream.add(moe(BlockInput(x)), add, following=norm)
    entered = moe(stream.enter(norm, by)).alone()
    assert_close(stream.rows, want)
    assert_close(entered, moe(BlockInput(norm.normalize(want))).alone())


@pytest.mark.parametrize("by", [NormBy.ALONE, NormBy.PRODUCT])
def test_begins_with_its_rows(device, by):
    """They are not changed by a norm of them."""
    rows, norm, then = torch.randn(ROWS, SIZE, device=device), norm_of(RMS, device), mlp(device)
    stream = Stream(rows.clone(), scale=0.3)
    assert_close(then(stream.enter(norm, by)).alone(), then(BlockInput(norm.normalize(rows))).alone())
    assert torch.equal(stream.rows, rows)


def test_without_a_norm(device):
    """A block reads the stream itself (norms after the blocks)."""
    rows, x = torch.randn(ROWS, SIZE, device=device), torch.randn(ROWS, INNER, device=device)
    stream, product, after = Stream(rows.clone(), scale=0.3), linear(device), norm_of(RMS, device)
    assert stream.enter(None, NormBy.ALONE).rows is stream.rows
    stream.add(Addend(product, x), AddBy.LATER, after=after)
    assert torch.equal(stream.rows, rows)  # pending
    entered = stream.enter(None, NormBy.ADDITION)
    assert entered.norm is None and entered.rows is stream.rows
    assert_close(stream.rows, rows + 0.3 * after.normalize(product(x)))


@pytest.mark.parametrize("spec", [RMS, LAYER])
def test_norms_before_and_after(device, spec):
    """The sandwich of Gemma 2."""
    rows, x = torch.randn(ROWS, SIZE, device=device), torch.randn(ROWS, INNER, device=device)
    stream, product = Stream(rows.clone()), linear(device)
    after, before = norm_of(spec, device), norm_of(spec, device)
    stream.add(Addend(product, x), AddBy.LATER, after=after)
    want = rows + after.normalize(product(x))
    assert_close(stream.enter(before, NormBy.ADDITION).rows, before.normalize(want))
    assert_close(stream.rows, want)


def test_the_stream_becomes_its_norm(device):
    """The original transformer, and OPT-350m."""
    rows, x = torch.randn(ROWS, SIZE, device=device), torch.randn(ROWS, INNER, device=device)
    stream, product, norm = Stream(rows.clone(), becomes_normed=True), linear(device), norm_of(LAYER, device)
    stream.add(Addend(product, x), AddBy.LATER)
    entered = stream.enter(norm, NormBy.ADDITION).rows
    assert entered is stream.rows
    assert_close(entered, norm.normalize(rows + product(x)))


def test_parallel_blocks(device):
    """Both read the stream as it was, and are added together."""
    rows, x, y = torch.randn(ROWS, SIZE, device=device), *torch.randn(2, ROWS, INNER, device=device)
    stream, first, second = Stream(rows.clone(), scale=0.3), linear(device), linear(device)
    norm, following = norm_of(LAYER, device), norm_of(LAYER, device)
    stream.add(Addend(first, x), AddBy.LATER)
    assert_close(stream.enter(norm, NormBy.ALONE).rows, norm.normalize(rows))
    assert torch.equal(stream.rows, rows)
    stream.add(Addend(second, y), AddBy.LATER)
    want = rows + 0.3 * (first(x) + second(y))
    assert_close(stream.enter(following, NormBy.ADDITION).rows, following.normalize(want))
    assert_close(stream.rows, want)


def test_keep(device):
    rows, x = torch.randn(ROWS, SIZE, device=device), torch.randn(2, INNER, device=device)
    stream, product = Stream(rows.clone()), linear(device)
    inputs = stream.layer_inputs = torch.randn(ROWS, 2, 4, device=device)
    stream.keep(torch.tensor([3, 1], device=device))
    assert torch.equal(stream.layer_inputs, inputs[[3, 1]])
    stream.add(Addend(product, x), AddBy.PRODUCT)
    assert_close(stream.rows, rows[[3, 1]] + product(x))


@pytest.mark.parametrize("after", [None, RMS])
@pytest.mark.parametrize("blocks", [1, 2])
def test_parts_are_summed_up_once(after, blocks, monkeypatch):
    """Two parallel blocks that are pending together cost one sum over the ranks; a norm of a result comes behind it."""
    device, sums = torch.device("cpu"), []
    x, rows = torch.randn(ROWS, INNER), torch.randn(ROWS, SIZE)
    parts, norm = [linear(device) for _ in range(blocks)], norm_of(RMS, device)
    behind = None if after is None else norm_of(after, device)
    group = Group(0, 2)
    monkeypatch.setattr(group, "all_reduce", lambda x: sums.append(x.clone()) or x.mul_(3.0))
    stream = Stream(rows.clone(), scale=0.5, group=group)
    for part in parts:
        stream.add(Addend(part, x), AddBy.LATER, after=behind)
    entered = stream.enter(norm, NormBy.ADDITION)
    alone = [3.0 * part(x) for part in parts]
    added = sum(alone if behind is None else [behind.normalize(y) for y in alone])
    assert len(sums) == (1 if behind is None else blocks)
    assert_close(stream.rows, rows + 0.5 * added)
    assert_close(entered.rows, norm.normalize(rows + 0.5 * added))


class FusedGroup(Group):
    """Two ranks with the same parts, whose sum takes the addition and the norm along."""

    def all_reduce(self, x):
        return x.mul_(2.0)

    def add_norm(self, part, added):
        self.fused = True
        residual, weight, eps, offset, x_scale = added
        return fused_add_rms_norm(part.mul_(2.0), residual, weight, eps, weight_offset=offset, x_scale=x_scale)[0]


@pytest.mark.parametrize("after", [None, RMS])
@pytest.mark.parametrize("has_norm", [True, False])
def test_a_sum_takes_the_addition_and_the_norm_along(after, has_norm):
    """Where there is a norm, and what is pending is not summed up yet."""
    device = torch.device("cpu")
    x, rows = torch.randn(ROWS, INNER), torch.randn(ROWS, SIZE)
    part, norm, behind = linear(device), norm_of(RMS, device), None if after is None else norm_of(after, device)
    group = FusedGroup(0, 2)
    stream = Stream(rows.clone(), scale=0.5, group=group)
    stream.add(Addend(part, x), AddBy.LATER, after=behind)
    entered = stream.enter(norm if has_norm else None, NormBy.SUM).rows
    alone = 2.0 * part(x)
    want = rows + 0.5 * (alone if behind is None else behind.normalize(alone))
    assert hasattr(group, "fused") == (has_norm and behind is None)
    assert_close(stream.rows, want)
    assert_close(entered, norm.normalize(want) if has_norm else want)
    assert torch.equal(stream.settled(), stream.rows)  # nothing is pending any more


def test_what_the_stream_settles_to(device):
    """With what is pending, which stays pending."""
    rows, x = torch.randn(ROWS, SIZE, device=device), torch.randn(ROWS, INNER, device=device)
    stream, product, norm = Stream(rows.clone(), scale=0.5), linear(device), norm_of(RMS, device)
    assert torch.equal(stream.settled(), rows) and stream.settled() is not stream.rows
    stream.add(Addend(product, x), AddBy.LATER)
    want = rows + 0.5 * product(x)
    assert_close(stream.settled(), want)
    assert torch.equal(stream.rows, rows)
    assert_close(stream.enter(norm, NormBy.ADDITION).rows, norm.normalize(want))
    assert_close(stream.settled(), want)


def test_the_stream_settles_for_good(device):
    """Nothing is pending any more, and what is changed then is the stream."""
    rows, x = torch.randn(ROWS, SIZE, device=device), torch.randn(ROWS, INNER, device=device)
    stream, product = Stream(rows.clone(), scale=0.5), linear(device)
    stream.add(Addend(product, x), AddBy.LATER)
    stream.settle().mul_(2.0)
    assert_close(stream.rows, 2.0 * (rows + 0.5 * product(x)))
    assert stream.settle() is stream.rows and torch.equal(stream.settled(), stream.rows)


@pytest.mark.parametrize("whole", [False, True])
def test_what_settles_is_summed_up_over_the_ranks_unless_it_is_whole(whole, monkeypatch):
    device, group = torch.device("cpu"), Group(0, 2)
    monkeypatch.setattr(group, "all_reduce", lambda x: x.mul_(3.0))
    rows, x, norm = torch.randn(ROWS, SIZE), torch.randn(ROWS, INNER), norm_of(RMS, device)
    stream, product = Stream(rows.clone(), group=group), linear(device)
    factor = 1.0 if whole else 3.0
    for after in (None, norm):
        before, part = stream.rows.clone(), factor * product(x)
        stream.add(Addend(product, x, whole=whole), AddBy.LATER, after=after)
        assert_close(stream.settle(), before + (part if after is None else after.normalize(part)))


def test_a_rank_s_part_is_not_settled():
    stream = Stream(torch.randn(ROWS, SIZE), group=Group(0, 2))
    stream.add(Addend(linear(torch.device("cpu")), torch.randn(ROWS, INNER)), AddBy.LATER)
    with pytest.raises(ValueError, match="a rank's part"):
        stream.settled()

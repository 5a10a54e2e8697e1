"""The Hopper kernel: when it is taken, and on a Hopper GPU that it computes what the portable ones do."""

from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import pytest
import torch
from support.compare import assert_close, with_row_padding

from tritonllm.kernels import fused_moe, fused_moe_ref
from tritonllm.kernels.elementwise import GATED_ACTIVATIONS
from tritonllm.kernels.moe.sm90 import products as sm90
from tritonllm.kernels.runtime import tuning

BF16, FP16 = torch.bfloat16, torch.float16
# (pairs, and so many more; stages)
TILES = [(16, 0, 3), (32, 0, 9), (64, 16, 8), (64, 32, 7), (128, 0, 6), (256, 0, 4), (256, 16, 3), (256, 32, 4)]


def weights_of(experts=3, n=128, i=64, dtype=BF16):
    return torch.empty(experts, 2 * i, n, dtype=dtype), torch.empty(experts, n, i, dtype=dtype)


@pytest.mark.parametrize(
    ("shape", "fits"),
    [
        ({}, True),
        ({"dtype": FP16, "i": 704}, True),
        ({"dtype": torch.float32}, False),
        ({"n": 96}, False),
        ({"i": 90}, False),
        ({"n": 64, "i": 64}, True),
    ],
)
def test_shapes(shape, fits):
    w_gate_up, w_down = weights_of(**shape)
    assert sm90.fits(torch.empty(5, w_down.shape[1], dtype=w_down.dtype), w_gate_up, w_down) == fits


def test_layouts():
    """Addresses and strides that the copy engine and copies of 16 bytes need."""
    x, (w_gate_up, w_down) = torch.empty(5, 128, dtype=BF16), weights_of()
    assert sm90.fits(with_row_padding(x, 16), with_row_padding(w_gate_up, 8), w_down)
    assert not sm90.fits(with_row_padding(x, 8), w_gate_up, w_down)
    assert not sm90.fits(x, with_row_padding(w_gate_up, 4), w_down)
    assert sm90.fits(x, w_gate_up[:1].expand(3, -1, -1), w_down)
    shifted = torch.empty(w_down.numel() + 1, dtype=BF16)[1:].view(w_down.shape)
    assert sm90.fits(x, w_gate_up, shifted) == (shifted.data_ptr() % 16 == 0)


@contextmanager
def tiles_of(pairs, tail, stages):
    """Calls take the Hopper kernel with such tiles; scratch is poisoned."""
    config = {"kernel": "sm90", "PAIRS": pairs, "TAIL": tail, "STAGES": stages}
    with ExitStack() as stack:
        stack.enter_context(tuning.override("fused_moe", config))
        launch = stack.enter_context(patch.object(sm90, "launch_down", wraps=sm90.launch_down))
        before = torch.are_deterministic_algorithms_enabled()
        stack.callback(torch.use_deterministic_algorithms, before)
        torch.use_deterministic_algorithms(True)
        yield
        assert launch.called


def problem(counts, n, i, dtype, device, top_k=1):
    """Experts with so many pairs each, in random order; the last pairs, to fill a token, have none."""
    ids = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    ids = torch.cat((ids, ids.new_full((-len(ids) % top_k,), -1)))
    ids = ids[torch.randperm(len(ids))].view(-1, top_k).to(device, torch.int32)
    x = torch.randn(len(ids), n, device=device, dtype=dtype)
    w_gate_up = torch.randn(len(counts), 2 * i, n, device=device, dtype=dtype).div_(n**0.5)
    w_down = torch.randn(len(counts), n, i, device=device, dtype=dtype).div_(i**0.5)
    return x, w_gate_up, w_down, torch.rand(ids.shape, device=device), ids


def check(args, **kwargs):
    out = fused_moe(*args, **kwargs)
    assert torch.equal(out, fused_moe(*args, **kwargs))
    assert_close(out, fused_moe_ref(*args, **kwargs).float())


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES)
def test_every_number_of_pairs(device, tile):
    """Experts with 0, 1, ... pairs, around every width of a product and beyond one tile."""
    counts = [0, 1, 15, 16, 17, 31, 33, 63, 0, 64, 65, 80, 81, 95, 97, 127, 129, 191, 193, 255, 257, 272, 273, 0, 288]
    counts += [289, 401, 1001, 0]
    with tiles_of(*tile):
        check(problem(counts, 192, 128, BF16, device, top_k=3))


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("n", "i"), [(64, 64), (128, 192), (320, 704), (2048, 768)])
def test_sizes(device, tile, n, i):
    """Columns that no tile divides; more and fewer steps than stages; both 16-bit dtypes."""
    for dtype in (FP16, BF16):
        with tiles_of(*tile):
            check(problem([70, 0, 300, 5], n, i, dtype, device, top_k=2))


@pytest.mark.gpu
@pytest.mark.parametrize("activation", GATED_ACTIVATIONS)
@pytest.mark.parametrize("tile", TILES)
def test_activations_and_biases(device, activation, tile):
    args = problem([50, 0, 170, 3], 192, 320, BF16, device, top_k=2)
    bias = {"gate_up_bias": torch.randn(4, 640, device=device), "down_bias": torch.randn(4, 192, device=device)}
    with tiles_of(*tile):
        check(args, activation=activation)
        check(args, activation=activation, **bias)


@pytest.mark.gpu
def test_experts_elsewhere(device):
    x, w_gate_up, w_down, weights, ids = problem([40, 100, 7, 0, 160, 30], 128, 128, BF16, device, top_k=4)
    expert_map = torch.tensor([-1, 1, 0, -1, 2, -1], dtype=torch.int32, device=device)
    with tiles_of(*TILES[2]):
        check((x, w_gate_up[:3], w_down[:3], weights, ids), expert_map=expert_map)
        nobody = torch.full_like(expert_map, -1)
        assert (fused_moe(x, w_gate_up[:3], w_down[:3], weights, ids, expert_map=nobody) == 0).all()


@pytest.mark.gpu
def test_only_what_was_hit_is_read_and_nan_stays(device):
    args = problem([40, 0, 90], 128, 128, BF16, device)
    expected = fused_moe_ref(*args).float()
    args[1][1] = args[2][1] = float("nan")
    args[0][5] = float("nan")
    with tiles_of(*TILES[-1]):
        out = fused_moe(*args)
    assert out[5].isnan().all()
    others = torch.arange(130, device=device) != 5
    assert_close(out[others], expected[others])


@pytest.mark.gpu
def test_strides(device):
    x, w_gate_up, w_down, weights, ids = problem([40, 0, 90], 128, 128, BF16, device)
    with tiles_of(*TILES[3]):
        check((with_row_padding(x, 32), with_row_padding(w_gate_up, 8), with_row_padding(w_down, 16), weights, ids))


@pytest.mark.gpu
def test_a_captured_call_follows_new_routing(device):
    """From all tokens at one expert to all experts: the launch depends on shapes alone."""
    args = problem([400, 0, 0, 0], 256, 128, BF16, device, top_k=2)
    with tiles_of(*TILES[-1]):
        fused_moe(*args)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = fused_moe(*args)
        for _ in range(3):
            args[-1].copy_(torch.randint(-1, 5, args[-1].shape))
            args[0].normal_()
            graph.replay()
            assert_close(out, fused_moe_ref(*args).float())

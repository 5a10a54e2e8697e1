import pytest
import torch
from support.aot import assert_resources, compile_kernels

from tritonllm.kernels import fused_moe
from tritonllm.kernels.runtime import tuning

KERNEL = "_grouped_sm90_kernel"


def call(tokens, experts, top_k, n, i, dtype=torch.bfloat16, **kwargs):
    w_gate_up = torch.empty(experts, 2 * i, n, dtype=dtype)
    w_down = torch.empty(experts, n, i, dtype=dtype)
    ids = torch.empty(tokens, top_k, dtype=torch.int32)
    fused_moe(torch.empty(tokens, n, dtype=dtype), w_gate_up, w_down, torch.empty(tokens, top_k), ids, **kwargs)


@pytest.mark.parametrize(
    "tokens", [32, pytest.param(100, marks=pytest.mark.long), 250, pytest.param(400, marks=pytest.mark.long)]
)
def test_defaults_compile(tokens):
    """Every tile that is a default; products on the matrix unit, copies asynchronous."""
    with compile_kernels(90, every=1) as kernels:
        call(tokens, 2, 2, 1024, 768)
    ours = [kernel for kernel in kernels if kernel.name == KERNEL]
    assert len(ours) == 2
    assert_resources(kernels)
    for kernel in ours:
        assert "wgmma.mma_async" in kernel.asm["ptx"]
        assert "cp.async.bulk.tensor" in kernel.asm["ptx"]
    assert "cp.async.cg" in ours[0].asm["ptx"]


@pytest.mark.long
def test_options_compile():
    biases = {"gate_up_bias": torch.empty(4, 640), "down_bias": torch.empty(4, 256, dtype=torch.float16)}
    with compile_kernels(90, every=1) as kernels:
        for activation, tokens in (("gelu", 600), ("gelu_tanh", 128), ("swigluoai", 128), ("swigluoai", 600)):
            call(tokens, 4, 2, 256, 320, torch.float16, activation=activation, **biases)
    assert sum(kernel.name == KERNEL for kernel in kernels) == 8
    assert_resources(kernels)


def test_one_compilation_for_all_steps():
    """Numbers of tokens that have a tile in common do not ask for new kernels."""
    config = {"kernel": "sm90", "PAIRS": 32, "TAIL": 0, "STAGES": 3}
    with compile_kernels(90, every=1) as kernels, tuning.override("fused_moe", config):
        for tokens in (17, 100, 256):
            call(tokens, 4, 2, 256, 320)
    assert len({id(kernel.asm) for kernel in kernels if kernel.name == KERNEL}) == 2


def test_what_is_left_to_the_portable_kernels():
    with compile_kernels(90, every=1) as kernels:
        call(32, 4, 2, 256, 128)  # too few pairs
        call(64, 4, 2, 256, 90)
        call(64, 4, 2, 256, 128, torch.float32)
    with compile_kernels(100) as blackwell:
        call(64, 4, 2, 256, 128)
    assert KERNEL not in {kernel.name for kernel in [*kernels, *blackwell]}

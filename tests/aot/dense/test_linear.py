import pytest
import torch
from support.aot import assert_resources, assert_sass, compile_kernels, each_arch

from tritonllm.kernels import linear


@each_arch()
@pytest.mark.parametrize("m", [1, 2, 3, 64])
def test_compiles(arch, m):
    """Llama-3.1-8B's gate and up, Qwen3-0.6B's down and logits, odd sizes."""
    with compile_kernels(arch) as kernels:
        for dtype in (torch.bfloat16, torch.float16):
            x, weight = torch.empty(m, 4096, dtype=dtype), torch.empty(28672, 4096, dtype=dtype)
            linear(x, weight, norm_weight=torch.empty(4096, dtype=dtype), activation="silu", gated=True)
        x, weight = torch.empty(m, 3072, dtype=dtype), torch.empty(1024, 3072, dtype=dtype)
        linear(x, weight, residual=torch.empty(m, 1024, dtype=dtype), constant_weight=True)
        x, weight = torch.empty(m, 1024, dtype=dtype), torch.empty(151936, 1024, dtype=dtype)
        linear(x, weight, torch.empty(151936, dtype=dtype), out=torch.empty(m, 151936))
        x, weight = torch.empty(m, 336, dtype=dtype), torch.empty(50257, 336, dtype=dtype)
        linear(x, weight, activation="gelu_tanh")
    assert_resources(kernels)


@each_arch()
def test_float32(arch):
    with compile_kernels(arch) as kernels:
        for m in (1, 2):
            linear(torch.empty(m, 1024), torch.empty(6144, 1024), norm_weight=torch.empty(1024), activation="silu")
    assert_resources(kernels)


def test_uses_tensor_cores():
    for arch, instruction in ((80, "HMMA"), (90, "HMMA"), (100, "HMMA")):
        with compile_kernels(arch) as kernels:
            linear(torch.empty(16, 1024).bfloat16(), torch.empty(4096, 1024).bfloat16(), together=2**30)
        assert_sass(kernels, instruction, "linear_tiles_kernel")


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("n", [4096, 6144])
def test_what_is_read_before_the_kernel_before_has_ended(n, constant):
    """The weights, if they are constant, and nothing else; nothing is written. A small weight's kernel lets the next
    one start first of all, one of 25 million elements when its loads are under way."""
    k = 1024 if n == 4096 else 4096
    with compile_kernels(90, every=1) as kernels:
        linear(torch.empty(1, k), torch.empty(n, k), constant_weight=constant)
    before, after = kernels[0].sass.split("ACQBULK")
    assert ("LDG" in before) == constant
    assert "STG" not in before and "LDG" in after and "STG" in after
    ahead, _ = kernels[0].sass.split("PREEXIT")
    assert ("LDG" in ahead) == (n == 6144)

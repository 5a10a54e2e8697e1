import pytest
import torch
from support.aot import assert_resources, assert_sass, compile_kernels, each_arch

from tritonllm.kernels.dense.medium import Unnormed, add_linear, linear_unnormed

KERNEL = "linear_tiles_sm90_kernel"


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype)


def layer(m, dtype=torch.bfloat16):
    """Qwen3-0.6B's products behind attention, and the first of the next layer."""
    stream, norm_weight, early = empty(m, 1024, dtype=dtype), empty(1024, dtype=dtype), {"constant_weight": True}
    left = add_linear(
        empty(m, 4096, dtype=dtype)[:, :2048], empty(1024, 2048, dtype=dtype), None, stream, norm_weight, **early
    )
    inner = linear_unnormed(left, empty(6144, 1024, dtype=dtype), activation="silu", gated=True, **early)
    left = add_linear(inner, empty(1024, 3072, dtype=dtype), None, stream, norm_weight, **early)
    linear_unnormed(left, empty(4096, 1024, dtype=dtype), **early)


@pytest.mark.parametrize("m", [80, 192])
def test_compiles_for_hopper(m):
    """Products on the matrix unit, copies by the bulk copy engine, and nothing beside the launches."""
    with compile_kernels(90, every=1) as kernels:
        layer(m)
    assert [kernel.name for kernel in kernels] == [KERNEL] * 4
    assert_resources(kernels)
    assert_sass(kernels, "HGMMA", KERNEL)
    assert_sass(kernels, "UTMALDG", KERNEL)


def test_options_compile():
    left = Unnormed(empty(100, 264, dtype=torch.half), torch.empty(40, 100), 1e-6)
    weight, bias = empty(1040, 264, dtype=torch.half), empty(1040, dtype=torch.half)
    with compile_kernels(90, every=1) as kernels:
        for activation in ("gelu", "gelu_tanh", "relu", "relu2"):
            linear_unnormed(left, weight, bias, activation=activation, gated=activation == "gelu")
        add_linear(left.scaled, weight, bias, empty(100, 1040, dtype=torch.half), torch.empty(1040))
    assert [kernel.name for kernel in kernels] == [KERNEL] * 5
    assert_resources(kernels)


def test_one_compilation_for_all_steps():
    """Numbers of rows that have a tile in common do not ask for new kernels."""
    with compile_kernels(90, every=1) as kernels:
        for m in (129, 144, 200, 256):
            layer(m)
    assert len({id(kernel.asm) for kernel in kernels}) == 3  # o and down are one


@pytest.mark.parametrize("constant", [False, True])
def test_what_is_read_before_the_kernel_before_has_ended(constant):
    """The weights, if they are constant, and nothing else."""
    left = Unnormed(empty(128, 1024), torch.empty(32, 128), 1e-6)
    with compile_kernels(90, every=1) as kernels:
        linear_unnormed(left, empty(4096, 1024), constant_weight=constant)
    before = kernels[0].asm["ptx"].split("griddepcontrol.wait")[0]
    assert "ld.global" not in before and "st.global" not in before


@each_arch()
def test_what_others_compute(arch):
    """Other chips, other sizes and float32."""
    with compile_kernels(arch) as kernels:
        for m, n, dtype in ((100, 1024, torch.float32), (300, 1024, torch.bfloat16), (100, 128, torch.bfloat16)):
            stream = empty(m, n, dtype=dtype)
            left = add_linear(
                empty(m, 512, dtype=dtype), empty(n, 512, dtype=dtype), None, stream, empty(n, dtype=dtype)
            )
            linear_unnormed(left, empty(n, n, dtype=dtype), activation="silu", gated=True)
        if arch != 90:
            layer(100)
    assert KERNEL not in {kernel.name for kernel in kernels}
    assert_resources(kernels)

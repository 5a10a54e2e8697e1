import pytest
import torch
from support.aot import assert_resources, assert_sass, compile_kernels, each_arch

from tritonllm.kernels import linear
from tritonllm.kernels.dense.linear import GATED

KERNEL = "linear_gated_sm90_kernel"


def call(m, i=3072, k=1024, dtype=torch.bfloat16, bias=None, activation="silu", **options):
    x, weight = torch.empty(m, k, dtype=dtype), torch.empty(2 * i, k, dtype=dtype)
    linear(x, weight, bias, activation=activation, gated=True, **options)


@pytest.mark.parametrize(
    ("activation", "bias"),
    [("silu", False), *(pytest.param(activation, True, marks=pytest.mark.long) for activation in GATED)],
)
def test_compiles_for_hopper(activation, bias):
    """Products on the matrix unit, copies by the bulk copy engine, and nothing beside the launch.

    Of functions that few models have only the form that needs most registers: a compilation takes 3 seconds.
    """
    dtypes = (torch.bfloat16, torch.float16) if activation == "silu" else (torch.bfloat16,)
    with compile_kernels(90, every=1) as kernels:
        for dtype in dtypes:
            for i in (3072, 6144):
                call(1100, i, 1024, dtype, torch.empty(2 * i, dtype=dtype) if bias else None, activation)
    assert [kernel.name for kernel in kernels] == [KERNEL] * 2 * len(dtypes)
    assert_resources(kernels)
    assert_sass(kernels, "HGMMA", KERNEL)
    assert_sass(kernels, "UTMALDG", KERNEL)


@pytest.mark.parametrize(("sizes", "larger"), [((3072, 1024), (1024, 4096)), ((14336, 4096), (12288, 4096))])
def test_one_compilation_for_all_steps(sizes, larger):
    """Numbers of rows do not ask for new kernels, nor do other layers with sizes like these."""
    with compile_kernels(90, every=1) as kernels:
        for m in (1025, 1030, 1040, 2047, 8192, 10000):
            call(m, *sizes)
            call(m, *sizes, residual=torch.empty(m, sizes[0], dtype=torch.bfloat16))
        call(4096, *larger)
    assert [kernel.name for kernel in kernels] == [KERNEL] * 13
    assert len({id(kernel.asm) for kernel in kernels}) == 1
    assert_resources(kernels)


def test_odd_sizes_compile():
    with compile_kernels(90, every=1) as kernels:
        for i, k in ((8, 64), (56, 8), (200, 320), (704, 1000)):
            call(1100, i, k)
    assert [kernel.name for kernel in kernels] == [KERNEL] * 4
    assert_resources(kernels)


def test_what_comes_before_the_kernel_before_has_ended():
    """Nothing is copied."""
    with compile_kernels(90, every=1) as kernels:
        call(1100)
    ptx = kernels[0].asm["ptx"]
    assert ptx.index("griddepcontrol.wait") < ptx.index("cp.async.bulk.tensor")


@each_arch()
def test_what_others_compute(arch):
    """Other chips, fewer rows, other sizes, float32."""
    with compile_kernels(arch) as kernels:
        call(1024)
        call(1100, dtype=torch.float32)
        call(1100, i=20)
        call(1100, k=68)
        call(1100, out=torch.empty(1100, 3072))
        if arch != 90:
            call(1100)
    assert {kernel.name for kernel in kernels} == {"_activation_kernel"}

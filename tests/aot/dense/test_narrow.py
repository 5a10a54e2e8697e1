import pytest
import torch
from support.aot import assert_resources, assert_sass, compile_kernels, each_arch, has_float8

from tritonllm.kernels import Groups, Weight, linear
from tritonllm.kernels.dense.weight import NARROW, PACKED

GROUPS = {"fp4": (Groups(1, 32), Groups(1, 16))}


def empty(n, k, format, groups):
    columns = k // 2 if format in PACKED else k
    data, scales, row_scales = torch.empty(n, columns, dtype=NARROW[format]), torch.empty(groups.shape(n, k)), None
    if format == "fp4":  # as NVFP4 and MXFP4 have them
        row_scales = torch.empty(n) if groups.columns == 16 else None
        scales = scales.to(torch.float8_e8m0fnu if row_scales is None else torch.float8_e4m3fn)
    return Weight(data, scales, format, groups, row_scales=row_scales)


@each_arch()
@pytest.mark.parametrize("format", NARROW)
def test_compiles(arch, format):
    """Llama-3.1-8B's gate and up, and Qwen3-0.6B's down: one row, some, many, and on Hopper the most,
    elsewhere more than the kernels have."""
    if format == "fp8" and not has_float8(arch):
        pytest.skip("no conversion of e4m3 there: such a weight is refused")
    with compile_kernels(arch) as kernels:
        for groups in GROUPS.get(format, (Groups(), Groups(128, 128))):
            for m in (1, 16, 64, 128 if arch == 90 else 65):
                x, norm = torch.empty(m, 4096, dtype=torch.bfloat16), torch.empty(4096, dtype=torch.bfloat16)
                linear(x, empty(28672, 4096, format, groups), norm_weight=norm, activation="silu", gated=True)
                x, residual = x[:, :3072], torch.empty(m, 1024, dtype=torch.bfloat16)
                linear(x, empty(1024, 3072, format, groups), residual=residual, constant_weight=True)
    # one row of a small weight: 4 bytes on a chip that nobody has measured it on
    assert_resources(kernels, 4 if (format, arch) == ("fp4", 100) else 0)


@each_arch()
@pytest.mark.parametrize("format", ["fp8", "int8"])
def test_rows_that_are_rounded(arch, format):
    if format == "fp8" and not has_float8(arch):
        pytest.skip("no conversion of e4m3 there: such a weight is refused")
    with compile_kernels(arch) as kernels:
        for m in (1, 64, 128, 256, 300):
            x, norm = torch.empty(m, 4096, dtype=torch.bfloat16), torch.empty(4096, dtype=torch.bfloat16)
            of = empty(28672, 4096, format, Groups())._replace(rounds_rows=True)
            linear(x, of, norm_weight=norm, activation="silu", gated=True)
            linear(x, empty(1024, 4096, format, Groups())._replace(rounds_rows=True), residual=x[:, :1024].clone())
    assert_resources(kernels)


def test_uses_tensor_cores():
    for format in NARROW:
        with compile_kernels(90) as kernels:
            linear(torch.empty(16, 1024).bfloat16(), empty(4096, 1024, format, GROUPS.get(format, (Groups(),))[0]))
        assert_sass(kernels, "HMMA", "linear_tiles_kernel")

import pytest
import torch
from support.aot import assert_resources, compile_kernels, each_arch
from support.inboxes import local_inboxes

from tritonllm.kernels.collective import AddedNorm, all_reduce, layout_for

REGISTERS, THREADS, PROCESSORS = 65536, 2048, 132
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def call(columns, size, dtype):
    """Alone and with the norm, in one shot and in two; returns the layout."""
    layout = layout_for(columns, dtype, size, PROCESSORS)
    inbox, *_ = local_inboxes(layout._replace(programs=2, slots=1), torch.device("cpu"))
    x, residual = torch.empty(2, 2, columns, dtype=dtype).unbind()
    for two_shot in (False, True):
        all_reduce(x, inbox, two_shot=two_shot)
        all_reduce(x, inbox, added=AddedNorm(residual, torch.empty(columns, dtype=dtype)), two_shot=two_shot)
    return layout


@each_arch()
def test_compiles(arch):
    with compile_kernels(arch) as kernels:
        for columns, size, dtype in ((4096, 2, BF16), (100, 3, FP32)):
            call(columns, size, dtype)
    assert_resources(kernels)


@pytest.mark.parametrize(
    ("columns", "size", "dtype"),
    [
        (1024, 2, BF16),
        (16384, 2, FP16),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in [(4096, 4, BF16), (4096, 8, BF16), (8192, 2, BF16), (8192, 2, FP32)]
        ),
    ],
)
def test_all_programs_fit_on_the_gpu_at_once(columns, size, dtype):
    """They wait for those of other ranks. And each access takes 16 bytes."""
    with compile_kernels(90, every=1) as kernels:
        layout = call(columns, size, dtype)
    assert_resources(kernels)
    for kernel in kernels:
        threads = 32 * kernel.num_warps * layout.programs
        registers, _ = kernel.resource_usage()
        assert threads <= THREADS * PROCESSORS
        assert threads * -(-registers // 8) * 8 <= REGISTERS * PROCESSORS
        assert "LDG.E.128.STRONG.SYS" in kernel.sass
        assert "STG.E.128" in kernel.sass

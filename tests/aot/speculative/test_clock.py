import torch
from support.aot import assert_resources, assert_sass, compile_kernels, each_arch, is_nvidia

from tritonllm.kernels.speculative.clock import note_time


@each_arch(is_nvidia)
def test_reads_the_clock_each_time(arch):
    with compile_kernels(arch, every=1) as kernels:
        for end in (False, True):
            note_time(torch.empty(2, dtype=torch.int64), end=end)
    assert_resources(kernels)
    assert len(kernels) == 2
    assert_sass(kernels, "GLOBALTIMER", "_note_time_kernel")

import re

import pytest
import torch
from support.aot import ARCHS, assert_resources

from tritonllm.kernels import sample, tuning
from tritonllm.kernels.aot import compile_kernels


def parameters(rows, *, limits=True):
    number = torch.empty(rows, dtype=torch.int64)
    of_all = (torch.empty(rows, dtype=torch.int32), torch.empty(rows), torch.empty(rows)) if limits else (None,) * 3
    return torch.empty(rows), *of_all, number, number


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("vocab", "dtype"), [(151936, torch.float32), (50257, torch.bfloat16), (260, torch.float16)])
def test_compiles(arch, vocab, dtype):
    with compile_kernels(arch) as kernels:
        sample(torch.empty(4, vocab, dtype=dtype), *parameters(4))
        sample(torch.empty(4, vocab, dtype=dtype), *parameters(4, limits=False))
    assert_resources(kernels)


@pytest.mark.parametrize(("vocab", "runs"), [(151936, "[4, 8]"), (700, "[1, 32]")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scan_adds_in_one_order(vocab, runs, dtype):
    """The scan's configuration depends on the batch; which threads share a group must not."""
    with compile_kernels(90) as kernels:
        for num_warps in (1, 2, 4, 8, 16):
            with tuning.override("sample_scan", {"TILES": 2, "num_warps": num_warps}):
                sample(torch.empty(2, vocab, dtype=dtype), *parameters(2, limits=False))
    assert_resources(kernels)
    layouts = {re.search(r"#blocked = .*?(threadsPerWarp = .*?\])", k.asm["ttgir"]).group(1) for k in kernels[::2]}
    assert layouts == {f"threadsPerWarp = {runs}"}


def test_smallest_vocabulary_compiles():
    """Sizes of 1 become constants in Triton."""
    with compile_kernels(90) as kernels:
        sample(torch.empty(1, 1), *parameters(1))
    assert_resources(kernels)

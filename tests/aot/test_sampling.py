import pytest
import torch
from support.aot import ARCHS, assert_resources

from tritonllm.kernels import sample
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


@pytest.mark.parametrize("rows", [1, 64, 256])
def test_scan_compiles_at_every_size(rows):
    """The scan's configuration depends on the batch: eight threads must share a group in all of them."""
    with compile_kernels(90) as kernels:
        sample(torch.empty(rows, 151936), *parameters(rows, limits=False))
    assert_resources(kernels)
    scan = next(kernel for kernel in kernels if kernel.name == "_scan_kernel")
    assert "threadsPerWarp = [4, 8]" in scan.asm["ttgir"]
    assert scan.sass.count("LDG.E.128") == 4


def test_smallest_vocabulary_compiles():
    """Sizes of 1 become constants in Triton."""
    with compile_kernels(90) as kernels:
        sample(torch.empty(1, 1), *parameters(1))
    assert_resources(kernels)

import re

import pytest
import torch
from support.aot import assert_resources, compile_kernels, each_arch

from tritonllm.kernels import TokenMasks, sample
from tritonllm.kernels.sampling.edits import make_logit_edits


def parameters(rows, *, limits=True):
    number = torch.empty(rows, dtype=torch.int64)
    of_all = (torch.empty(rows, dtype=torch.int32), torch.empty(rows), torch.empty(rows)) if limits else (None,) * 3
    return torch.empty(rows), *of_all, number, number


def masks(rows, vocab, count=2):
    bitmask = torch.empty(count, -(-vocab // 32), dtype=torch.int32)
    return TokenMasks(torch.empty(rows, dtype=torch.int32), bitmask)


@each_arch()
@pytest.mark.parametrize(("vocab", "dtype"), [(151936, torch.float32), (128256, torch.float32), (260, torch.bfloat16)])
def test_compiles(arch, vocab, dtype):
    with compile_kernels(arch) as kernels:
        for rows in (4, 256):
            sample(torch.empty(rows, vocab, dtype=dtype), *parameters(rows), masks=masks(rows, vocab))
        sample(torch.empty(4, vocab, dtype=dtype), *parameters(4, limits=False), masks=masks(4, vocab))
    assert_resources(kernels)


@each_arch()
def test_compiles_with_edits(arch):
    vocab = 151936
    edits, seats = make_logit_edits(3, vocab, device="cpu"), torch.empty(4, dtype=torch.int32)
    with compile_kernels(arch) as kernels:
        sample(torch.empty(4, vocab), *parameters(4), edits=edits, seats=seats, masks=masks(4, vocab))
    assert_resources(kernels)


def test_the_number_of_masks_compiles_nothing():
    """A step has as many as it has structured requests."""
    with compile_kernels(90, every=1) as kernels:
        for count in (1, 2, 16, 17):
            sample(torch.empty(32, 1000), *parameters(32), masks=masks(32, 1000, count))
    assert len({kernel.asm["ttir"] for kernel in kernels if kernel.name == "_draw_kernel"}) == 1


def test_groups_are_added_in_the_order_of_rows_without_masks():
    """So a row without a mask draws the same token, whoever stands beside it."""
    with compile_kernels(90, every=1) as kernels:
        sample(torch.empty(2, 151936), *parameters(2, limits=False), masks=masks(2, 151936))
    layouts = [re.findall(r"#blocked\d* = .*?threadsPerWarp = \[(\d+, \d+)\]", k.asm["ttgir"]) for k in kernels]
    assert layouts and all("4, 8" in layout for layout in layouts), layouts

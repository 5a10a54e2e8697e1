import re

import pytest
import torch
from support.aot import assert_resources, assert_uniform_sums, compile_kernels, each_arch

from tritonllm.kernels import sample
from tritonllm.kernels.runtime import tuning
from tritonllm.kernels.sampling.common import scan
from tritonllm.kernels.sampling.edits import count_tokens, make_logit_edits


def parameters(rows, *, limits=True):
    number = torch.empty(rows, dtype=torch.int64)
    of_all = (torch.empty(rows, dtype=torch.int32), torch.empty(rows), torch.empty(rows)) if limits else (None,) * 3
    return torch.empty(rows), *of_all, number, number


@each_arch()
@pytest.mark.parametrize(("vocab", "dtype"), [(151936, torch.float32), (50257, torch.bfloat16), (260, torch.float16)])
def test_compiles(arch, vocab, dtype):
    with compile_kernels(arch) as kernels:
        sample(torch.empty(4, vocab, dtype=dtype), *parameters(4))
        sample(torch.empty(4, vocab, dtype=dtype), *parameters(4, limits=False))
    assert_resources(kernels)


@each_arch()
def test_compiles_with_edits(arch):
    vocab = 151936
    edits, seats = make_logit_edits(3, vocab, device="cpu"), torch.empty(4, dtype=torch.int32)
    with compile_kernels(arch) as kernels:
        sample(torch.empty(4, vocab), *parameters(4), edits=edits, seats=seats)
        sample(torch.empty(256, vocab), *parameters(256, limits=False), edits=edits, seats=seats.new_empty(256))
        count_tokens(edits, seats, seats)
    assert_resources(kernels)


@pytest.mark.parametrize(("vocab", "runs"), [(151936, "4, 8"), (700, "1, 32")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_groups_are_added_in_one_order(vocab, runs, dtype):
    """The launch depends on the batch; which threads share a group must not."""
    with compile_kernels(90, every=1) as kernels:
        for num_warps in (1, 2, 4, 8, 16):
            with tuning.override("sample_draw", {"TILES": 2, "num_warps": num_warps}):
                sample(torch.empty(2, vocab, dtype=dtype), *parameters(2, limits=False))
            with tuning.override("sample_scan", {"TILES": 2, "num_warps": num_warps}):
                scan(torch.empty(2, 1, vocab, dtype=dtype), torch.empty(2))
    assert_resources(kernels)
    layouts = [re.findall(r"#blocked.*?threadsPerWarp = \[(\d+, \d+)\]", kernel.asm["ttgir"]) for kernel in kernels]
    assert len(layouts) == 10 and all(layout == [runs] for layout in layouts), layouts


@pytest.mark.parametrize("arch", [80, 90])
@pytest.mark.parametrize("vocab", [200, 700, 2048, 4096])  # a sum over at most a warp's threads needs no shared memory
def test_branches_are_taken_by_all_threads(arch, vocab):
    """They depend on sums of weights; threads that disagree wait for each other at different barriers."""
    with compile_kernels(arch) as kernels:
        sample(torch.empty(4, vocab), *parameters(4))
    assert_uniform_sums(kernels, {"_limited_kernel"})


def test_smallest_vocabulary_compiles():
    """Sizes of 1 become constants in Triton."""
    with compile_kernels(90, every=1) as kernels:
        sample(torch.empty(1, 1), *parameters(1))
    assert_resources(kernels)

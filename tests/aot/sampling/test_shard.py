import re

import pytest
import torch
from support.aot import assert_resources, compile_kernels, each_arch

from tritonllm.dist.group import share_of
from tritonllm.kernels import best_of_shards, sample, sample_limited_shards, sample_shard


@each_arch()
@pytest.mark.parametrize(
    ("first", "vocab", "dtype"), [(0, 76032, torch.float32), (64128, 64128, torch.float32), (256, 44, torch.bfloat16)]
)
def test_compiles(arch, first, vocab, dtype):
    number = torch.empty(4, dtype=torch.int64)
    with compile_kernels(arch) as kernels:
        drawn = sample_shard(torch.empty(4, vocab, dtype=dtype), torch.empty(4), number, number, first=first)
        for shards in (2, 3, 8):
            best_of_shards(drawn.new_empty(shards, 4, 2))
    assert_resources(kernels)


@each_arch()
@pytest.mark.parametrize(("vocab", "ranks"), [(151936, 2), (128256, 4), (912, 2)])
def test_draws_from_what_other_ranks_have_compile(arch, vocab, ranks):
    each = share_of(vocab, ranks)
    number, ones = torch.empty(4, dtype=torch.int64), torch.empty(4)
    found = torch.empty(4, each // 128)
    with compile_kernels(arch) as kernels:
        where = {"rank_steps": torch.empty(ranks, dtype=torch.int64), "vocab": vocab, "out": number}
        limits = torch.empty(4, dtype=torch.int32), ones, ones
        sample_limited_shards(torch.empty(4, each), found, found, ones, *limits, number, number, **where)
    assert_resources(kernels)


@pytest.mark.parametrize(("vocab", "shards"), [(151936, 2), (128256, 8), (262144, 4), (320, 2)])
def test_groups_are_added_as_in_the_draw_from_all_columns(vocab, shards):
    """By the same threads in the same order: scores then have the same bits."""
    each = share_of(vocab, shards)
    number = torch.empty(4, dtype=torch.int64)
    with compile_kernels(90, every=1) as kernels:
        sample(torch.empty(4, vocab), torch.empty(4), None, None, None, number, number)
        for first in (0, (shards - 1) * each):
            sample_shard(torch.empty(4, min(each, vocab - first)), torch.empty(4), number, number, first=first)
    tiles = [kernel for kernel in kernels if kernel.name in ("_draw_kernel", "_scan_kernel")]
    layout = r"#blocked\d* = .*?sizePerThread = (\[1, 4\]), threadsPerWarp = (\[4, 8\])"
    assert len(tiles) == 3 and all(re.search(layout, kernel.asm["ttgir"]) for kernel in tiles)


def test_a_rank_s_place_changes_no_kernel():
    """All ranks launch what rank 0 has compiled, if they have equally many columns."""
    number = torch.empty(4, dtype=torch.int64)
    with compile_kernels(90, every=1) as kernels:
        for first in (0, 128, 64128):
            sample_shard(torch.empty(4, 64128), torch.empty(4), number, number, first=first)
    assert len({kernel.asm["ptx"] for kernel in kernels}) == 2

import pytest
import torch
from support.aot import ARCHS, assert_resources, compile_kernels

from tritonllm.kernels import best_of_shards, sample_shard


@pytest.mark.parametrize("arch", ARCHS)
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


def test_a_rank_s_place_changes_no_kernel():
    """All ranks launch what rank 0 has compiled, if they have equally many columns."""
    number = torch.empty(4, dtype=torch.int64)
    with compile_kernels(90, every=1) as kernels:
        for first in (0, 128, 64128):
            sample_shard(torch.empty(4, 64128), torch.empty(4), number, number, first=first)
    assert len({kernel.asm["ptx"] for kernel in kernels}) == 2

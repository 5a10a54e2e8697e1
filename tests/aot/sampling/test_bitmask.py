import pytest
import torch
from support.aot import ARCHS, assert_resources

from tritonllm.kernels import apply_token_bitmask
from tritonllm.kernels.compile.aot import compile_kernels


@pytest.mark.parametrize("arch", ARCHS)
def test_compiles(arch):
    with compile_kernels(arch) as kernels:
        for vocab in (151936, 32001):
            mask = torch.empty(2, -(-vocab // 32), dtype=torch.int32)
            apply_token_bitmask(torch.empty(4, vocab), torch.empty(2, dtype=torch.int32), mask)
    assert_resources(kernels)

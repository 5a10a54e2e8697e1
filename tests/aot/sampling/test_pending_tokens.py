import pytest
import torch
from support.aot import ARCHS, assert_resources

from tritonllm.kernels import fill_pending_tokens
from tritonllm.kernels.compile.aot import compile_kernels


@pytest.mark.parametrize("arch", ARCHS)
def test_compiles_once_for_all_batch_sizes(arch):
    with compile_kernels(arch) as kernels:
        for n in (1, 3, 256):
            ids = torch.zeros(n, dtype=torch.int32)
            fill_pending_tokens(ids, torch.zeros(256, dtype=torch.int64))
    assert_resources(kernels)
    assert len({kernel.asm["llir"] for kernel in kernels}) == 1

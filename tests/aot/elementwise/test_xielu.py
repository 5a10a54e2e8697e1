import pytest
import torch
from support.aot import assert_resources, compile_kernels, each_arch

from tritonllm.kernels import xielu


@each_arch()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_compiles(arch, dtype):
    with compile_kernels(arch) as kernels:
        for n in (14336, 100):
            x = torch.empty(2, n, dtype=dtype)
            xielu(x, torch.empty(4, dtype=dtype), out=x)
    assert_resources(kernels)

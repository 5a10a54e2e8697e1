import pytest
import torch
from support.aot import assert_resources, compile_kernels, each_arch

from tritonllm.kernels import output_gate


@each_arch()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_compiles(arch, dtype):
    with compile_kernels(arch) as kernels:
        for n in (4096, 100):
            x = torch.empty(2, n, dtype=dtype)
            output_gate(x, torch.empty_like(x), out=x)
        output_gate(x, x[:, :50].contiguous(), function="softplus", out=x)
    assert_resources(kernels)

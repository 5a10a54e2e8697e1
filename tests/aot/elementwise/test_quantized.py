import torch
from support.aot import assert_resources, compile_kernels, each_arch, has_float8

from tritonllm.kernels import fused_add_rms_norm_quantize, quantize_rows, silu_and_mul_quantize


@each_arch(has_float8)
def test_compiles(arch):
    with compile_kernels(arch) as kernels:
        for tokens in (1, 4096):
            for n in (1024, 4096, 16384, 100):
                x = torch.empty(tokens, n, dtype=torch.bfloat16)
                fused_add_rms_norm_quantize(x, torch.empty_like(x), torch.empty(n, dtype=torch.bfloat16))
            for n in (3072, 14336, 53248, 100):
                silu_and_mul_quantize(torch.empty(tokens, 2 * n, dtype=torch.bfloat16))
                quantize_rows(torch.empty(tokens, n, dtype=torch.bfloat16))
    assert_resources(kernels)

import torch
from support.aot import assert_resources, compile_kernels, each_arch

from tritonllm.kernels import moe_logits


@each_arch()
def test_compiles(arch):
    shapes = ((1, 128, 2048), (2, 8, 4096), (1, 32, 2880), (1, 256, 7168), (1, 512, 2048), (1, 1, 1))
    with compile_kernels(arch) as kernels:
        for tokens, experts, k in shapes:
            for dtype in (torch.bfloat16, torch.float32):
                x, weight = torch.empty(tokens, k, dtype=dtype), torch.empty(experts, k, dtype=dtype)
                moe_logits(x, weight, torch.empty(k, dtype=dtype), constant_weight=True)
        moe_logits(x, weight, torch.empty(k), torch.empty(experts), norm_weight_offset=1.0)
    assert_resources(kernels)

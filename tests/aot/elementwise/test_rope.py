import torch
from support.aot import assert_resources, compile_kernels, each_arch

from tritonllm.kernels import apply_rope


@each_arch()
def test_compiles(arch):
    positions = torch.zeros(64, dtype=torch.int64)
    with compile_kernels(arch) as kernels:
        for heads, kv_heads, head_size, rotary, interleaved, dtype in (
            (32, 8, 128, 128, False, torch.bfloat16),
            (32, 8, 128, 128, False, torch.float16),
            (32, 8, 128, 128, True, torch.bfloat16),
            (14, 2, 64, 64, False, torch.bfloat16),
            (8, 8, 80, 20, False, torch.bfloat16),
            (8, 8, 512, 512, True, torch.float32),
            (1, 1, 2, 2, False, torch.float32),
        ):
            q = torch.empty(64, heads, head_size, dtype=dtype)
            k = torch.empty(64, kv_heads, head_size, dtype=dtype)
            apply_rope(q, k, positions, torch.empty(128, rotary), interleaved=interleaved)
    assert_resources(kernels)

import torch
from support.aot import assert_resources, compile_kernels, each_arch, has_float8

from tritonllm.kernels import copy_blocks, store_kv

FP8, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@each_arch()
def test_compiles(arch):
    with compile_kernels(arch) as kernels:
        for tokens, kv_heads, head_size, cache_dtype in (
            (4, 8, 128, torch.bfloat16),
            (4096, 8, 128, torch.bfloat16),
            (4096, 3, 72, torch.bfloat16),
            (4096, 8, 128, FP8),
            (4096, 8, 128, E5M2),
        ):
            if cache_dtype.itemsize == 1 and not has_float8(arch):
                continue
            k = torch.empty(tokens, kv_heads, head_size, dtype=torch.bfloat16)
            pool = torch.empty(4, 2, 16, kv_heads, head_size, dtype=cache_dtype)
            slots = torch.empty(tokens, dtype=torch.int64)
            store_kv(k, k, pool[:, 0], pool[:, 1], slots, k_scale=torch.empty(kv_heads))
        pairs = torch.empty(7, 2, dtype=torch.int64)
        for dtype in (torch.bfloat16, FP8):
            pool = torch.empty(4, 2, 16, 8, 128, dtype=dtype)
            copy_blocks(pool[:, 0], pool[:, 1], pairs)
    assert_resources(kernels)

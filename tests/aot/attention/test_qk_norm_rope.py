import torch
from support.aot import assert_resources, compile_kernels, each_arch, has_float8

from tritonllm.kernels import qk_norm_rope_store

FP8, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@each_arch()
def test_compiles(arch):
    with compile_kernels(arch) as kernels:
        for tokens, heads, kv_heads, head_size, rotary, norm, interleaved, cache_dtype in (
            (1, 16, 8, 128, 128, "head", False, torch.bfloat16),
            (4096, 16, 8, 128, 128, "head", False, torch.bfloat16),
            (4096, 32, 8, 128, 128, None, False, torch.bfloat16),
            (4096, 32, 2, 128, 64, None, True, torch.bfloat16),
            (4096, 8, 4, 80, 20, "heads", False, torch.bfloat16),
            (4096, 4, 2, 512, 512, "head", True, torch.bfloat16),
            (4096, 4, 2, 512, 0, "heads", False, torch.bfloat16),
            (4096, 12, 12, 64, 0, None, False, torch.bfloat16),
            (4096, 32, 8, 128, 128, "head", False, FP8),
            (4096, 32, 8, 128, 128, "head", True, E5M2),
        ):
            if cache_dtype.itemsize == 1 and not has_float8(arch):
                continue
            qkv = torch.empty(tokens, (heads + 2 * kv_heads) * head_size, dtype=torch.bfloat16)
            pool = torch.empty(4, 2, 16, kv_heads, head_size, dtype=cache_dtype)
            slots = torch.empty(tokens, dtype=torch.int64)
            rope = (slots, torch.empty(128, rotary)) if rotary else ()
            options = {"interleaved": interleaved, "k_scale": 0.5 if cache_dtype.itemsize == 1 else None}
            if norm:
                shapes = {"head": [(head_size,)] * 2, "heads": [(heads, head_size), (kv_heads, head_size)]}[norm]
                options |= dict(zip(("q_weight", "k_weight"), map(torch.empty, shapes), strict=True))
            qk_norm_rope_store(qkv, pool[:, 0], pool[:, 1], slots, *rope, **options)
    assert_resources(kernels)

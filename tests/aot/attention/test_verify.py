import torch
from support.aot import assert_resources, compile_kernels, each_arch, has_float8

from tritonllm.kernels import paged_verify_attention

BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
CASES = [
    # new tokens, heads, kv heads, head size, block size, dtype, cache dtype
    (2, 32, 8, 128, 16, BF16, BF16),
    (5, 32, 8, 128, 16, BF16, BF16),
    (16, 32, 8, 128, 16, BF16, BF16),  # the largest tile of rows
    (16, 14, 2, 64, 128, FP16, FP16),
    (16, 8, 4, 256, 16, BF16, BF16),
    (4, 8, 2, 512, 16, BF16, BF16),
    (4, 8, 2, 80, 16, FP32, FP32),
    (5, 32, 8, 128, 16, BF16, FP8),
]


def launch(new, heads, kv_heads, head_size, block_size, dtype, cache_dtype, **options):
    pool = torch.empty(4, 2, block_size, kv_heads, head_size, dtype=cache_dtype)
    tables, lens, cu = (torch.empty(*shape, dtype=torch.int32) for shape in ((8, 512), (8,), (9,)))
    q = torch.empty(8 * new, heads, head_size, dtype=dtype)
    paged_verify_attention(q, pool[:, 0], pool[:, 1], tables, cu, lens, max_seqlen_q=new, **options)


@each_arch()
def test_compiles(arch):
    with compile_kernels(arch) as kernels:
        for case in CASES:
            if case[-1] == FP8 and not has_float8(arch):  # no such conversion there: the launcher raises
                continue
            launch(*case)
            launch(*case, tree_mask=torch.empty(8 * case[0], dtype=torch.int32))
        everything = {"sinks": torch.empty(32), "alibi_slopes": torch.empty(32), "window": 100, "softcap": 5.0}
        launch(8, 32, 8, 80, 16, BF16, BF16, **everything, k_scale=torch.empty(8), return_lse=True)
    assert_resources(kernels)


def test_which_kernel_on_hopper():
    """Decode's up to 32 rows, then prefill's if there are many sequences and no tree, else the portable one."""
    k, v = torch.empty(2, 4, 16, 8, 128, dtype=BF16).unbind()
    names = []
    with compile_kernels(90, every=1) as kernels:
        for batch, new, tree in ((64, 8, True), (64, 16, False), (64, 16, True), (8, 16, False)):
            tables, lens, cu = (torch.empty(*s, dtype=torch.int32) for s in ((batch, 512), (batch,), (batch + 1,)))
            q = torch.empty(batch * new, 32, 128, dtype=BF16)
            mask = torch.empty(batch * new, dtype=torch.int32) if tree else None
            paged_verify_attention(q, k, v, tables, cu, lens, max_seqlen_q=new, tree_mask=mask)
            names.append(kernels[-1].name)
    assert names == ["decode_sm90_kernel", "_prefill_sm90_kernel", "balanced_kernel", "balanced_kernel"]
    assert_resources(kernels)

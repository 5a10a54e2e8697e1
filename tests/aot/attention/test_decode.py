import pytest
import torch
from support.aot import assert_resources, assert_sass, compile_kernels, each_arch, has_float8

from tritonllm.kernels import paged_decode_attention

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FP8, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CASES = [
    # batch, heads, kv heads, head size, block size, dtype, cache dtype
    (1, 32, 8, 128, 16, BF16, BF16),
    (1, 16, 1, 64, 128, FP16, FP16),
    (2, 8, 4, 256, 16, BF16, BF16),
    (8, 32, 8, 128, 16, BF16, BF16),
    (64, 32, 8, 128, 16, BF16, BF16),
    (256, 32, 8, 128, 16, BF16, BF16),
    *((batch, 14, 2, 64, 128, FP16, FP16) for batch in (8, 80)),  # a block holds whole tiles
    *((batch, 71, 1, 64, 16, BF16, BF16) for batch in (8, 160)),  # the largest tile of heads
    *((batch, 8, 4, 256, 16, BF16, BF16) for batch in (8, 40)),
    *((batch, 8, 2, 512, 16, BF16, BF16) for batch in (8, 80)),
    *((batch, 8, 2, 512, 16, FP32, FP32) for batch in (8, 80)),
    (8, 32, 8, 128, 16, BF16, FP8),
    (8, 32, 8, 128, 16, BF16, E5M2),
]


def launch(batch, heads, kv_heads, head_size, block_size, dtype, cache_dtype, apart=False, **options):
    """``apart`` caches are what the Hopper kernel takes."""
    pool = torch.empty(4, 2, block_size, kv_heads, head_size, dtype=cache_dtype)
    if apart:
        pool = pool.transpose(0, 1).contiguous().transpose(0, 1)
    tables, lens = torch.empty(batch, 512, dtype=torch.int32), torch.empty(batch, dtype=torch.int32)
    q = torch.empty(batch, heads, head_size, dtype=dtype)
    paged_decode_attention(q, pool[:, 0], pool[:, 1], tables, lens, **options)


@each_arch()
def test_compiles(arch):
    with compile_kernels(arch) as kernels:
        for case in CASES:
            if case[-1].itemsize == 1 and not has_float8(arch):
                continue
            launch(*case)
        everything = {"sinks": torch.empty(32), "alibi_slopes": torch.empty(32), "window": 100, "softcap": 5.0}
        for batch in (1, 8, 40):
            launch(batch, 32, 8, 80, 16, BF16, BF16, **everything, k_scale=torch.empty(8), return_lse=True)
            launch(batch, 8, 4, 256, 16, BF16, BF16, softcap=50.0, max_seqlen_k=400)  # Gemma 2
    assert_resources(kernels)
    assert {kernel.name for kernel in kernels} == {"balanced_kernel", "few_kernel", "_decode_kernel", "_merge_kernel"}


@pytest.mark.parametrize(
    "cache_dtype", [BF16, *(pytest.param(dtype, marks=pytest.mark.long) for dtype in (FP8, E5M2))], ids=str
)
def test_hopper_kernel(cache_dtype):
    """Bulk copies (UTMALDG) into shared memory, products of warps (HMMA) or of four (HGMMA), no register spilled."""
    everything = {"sinks": torch.empty(32), "alibi_slopes": torch.empty(32), "window": 100, "softcap": 5.0}
    scales = {"k_scale": torch.empty(8), "v_scale": torch.empty(8)}
    with compile_kernels(90) as few:
        for head_size in (64, 128):
            for kv_heads in (4, 8, 16, 32):
                launch(64, 32, kv_heads, head_size, 16, BF16, cache_dtype, apart=True)
            launch(1, 32, 4, head_size, 16, BF16, cache_dtype, apart=True)  # one program a processor
        launch(2, 16, 8, 128, 16, BF16, cache_dtype, apart=True)
        launch(64, 32, 8, 128, 16, BF16, cache_dtype, apart=True, return_lse=True, **everything, **scales)
        order = torch.empty(64, dtype=torch.int32)
        launch(64, 32, 8, 128, 16, BF16, cache_dtype, apart=True, order=order, settled=True)
    with compile_kernels(90) as more:
        launch(80, 32, 2, 128, 64, BF16, cache_dtype, apart=True)
        launch(64, 32, 2, 64, 16, BF16, cache_dtype, apart=True)
        launch(4, 32, 2, 128, 16, BF16, cache_dtype, apart=True)
        launch(64, 32, 2, 128, 16, BF16, cache_dtype, apart=True, order=order, settled=True)
    assert {kernel.name for kernel in [*few, *more]} == {"decode_sm90_kernel"}
    assert_resources([*few, *more])
    for kernels, product in ((few, "HMMA.16816"), (more, "HGMMA")):
        assert_sass(kernels, product, "decode_sm90_kernel")
        assert_sass(kernels, "UTMALDG", "decode_sm90_kernel")


BATCHES = {
    "balanced_kernel": ((0, 17, 512, 128), (1, 30, 100, 1), (3, 32, 33, 100), (7, 132, 16, 4096)),
    "decode_sm90_kernel": ((0, 17, 512, 128), (1, 30, 100, 1), (3, 32, 33, 100), (7, 132, 16, 4096)),
    "_decode_kernel": ((0, 5, 512, 1280), (1, 6, 100, 1001), (3, 5, 133, 4000), (7, 7, 116, 4096)),
    "few_kernel": ((0, 2, 4096, 128), (1, 3, 100, 200), (3, 2, 33, 400), (7, 4, 16, 4096)),
}


@pytest.mark.parametrize("name", BATCHES)
def test_one_compilation_for_all_steps(name):
    """Batch sizes, table widths, windows and offsets into persistent buffers do not ask for new kernels."""
    pool = torch.empty(4, 2, 16, 8, 128, dtype=BF16)
    if name == "decode_sm90_kernel":
        pool = pool.transpose(0, 1).contiguous().transpose(0, 1)
    with compile_kernels(90, every=1) as kernels:
        for at, batch, width, window in BATCHES[name]:
            lens = torch.empty(at + batch, dtype=torch.int32)[at:]
            tables = torch.empty(at + batch, width, dtype=torch.int32)[at:]
            q = torch.empty(batch, 32, 128, dtype=BF16)
            order = torch.empty(at + batch, dtype=torch.int32)[at:]
            paged_decode_attention(q, pool[:, 0], pool[:, 1], tables, lens, window=window, order=order, settled=True)
    kernels = [kernel for kernel in kernels if kernel.name == name]
    assert len(kernels) == 4
    assert len({id(kernel.asm) for kernel in kernels}) == 1

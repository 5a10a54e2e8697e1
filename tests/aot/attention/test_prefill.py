import re

import pytest
import torch
import triton
from support.aot import assert_resources, assert_sass, compile_kernels, each_arch, has_float8

from tritonllm.kernels import varlen_prefill_attention
from tritonllm.kernels.attention.prefill import shared_config
from tritonllm.kernels.runtime import releases, tuning

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FP8, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CASES = [
    # heads, kv heads, head size, block size, dtype, cache dtype, longest sequence
    (14, 2, 64, 128, FP16, FP16, 512),  # a block holds whole tiles
    (32, 8, 128, 16, BF16, BF16, 16),
    (8, 4, 256, 16, BF16, BF16, 512),
    (8, 2, 512, 16, BF16, BF16, 512),
    (16, 8, 128, 16, FP32, FP32, 512),
    (32, 8, 128, 16, BF16, FP8, 512),
]


def launch(
    heads, kv_heads, head_size, block_size, dtype, cache_dtype, longest, apart=False, width=512, tokens=4096, **options
):
    """``apart`` caches are what the Hopper kernel takes; ``width``: blocks that a sequence may have."""
    pool = torch.empty(4, 2, block_size, kv_heads, head_size, dtype=cache_dtype)
    if apart:
        pool = pool.transpose(0, 1).contiguous().transpose(0, 1)
    tables, lens = torch.empty(8, width, dtype=torch.int32), torch.empty(8, dtype=torch.int32)
    q, cu = torch.empty(tokens, heads, head_size, dtype=dtype), torch.empty(9, dtype=torch.int32)
    varlen_prefill_attention(q, pool[:, 0], pool[:, 1], tables, cu, lens, max_seqlen_q=longest, **options)


@each_arch()
def test_compiles(arch):
    with compile_kernels(arch) as kernels:
        for case in CASES:
            if case[-2] == FP8 and not has_float8(arch):  # no such conversion there: the launcher raises
                continue
            launch(*case)
        everything = {"sinks": torch.empty(32), "alibi_slopes": torch.empty(32), "window": 100, "softcap": 5.0}
        launch(32, 8, 80, 16, BF16, BF16, 512, **everything, k_scale=torch.empty(8), return_lse=True)
        launch(14, 2, 64, 16, FP16, FP16, 512, causal=False, softcap=5.0, return_lse=True)  # spilled on sm_100
        launch(8, 4, 256, 16, BF16, BF16, 512, softcap=50.0)  # Gemma 2
        launch(12, 12, 64, 16, BF16, BF16, 512, apart=True, causal=False, window=65)  # ModernBERT
        if has_float8(arch):
            launch(32, 8, 128, 16, BF16, E5M2, 512)
    assert_resources(kernels)


SHARED = [
    (14, 2, 64, 128, FP16, FP16, 64),
    (32, 8, 128, 16, BF16, BF16, 4),
    (32, 8, 128, 16, BF16, BF16, 8),
    (32, 8, 128, 16, BF16, BF16, 64),
    (32, 8, 80, 16, BF16, BF16, 64),
    (8, 4, 256, 16, BF16, BF16, 64),
    (8, 2, 512, 16, BF16, BF16, 64),
    (32, 8, 128, 16, BF16, FP8, 64),
]


@each_arch()
def test_keys_shared_out_compile(arch):
    """Few rows, whose keys are shared out by the portable kernel; parts are counted by one atomic."""

    def shared(heads, kv_heads, head_size, block_size, dtype, cache_dtype, longest, **options):
        rows = triton.next_power_of_2(max(16, heads // kv_heads * longest))
        with tuning.override("varlen_prefill_attention", shared_config(head_size, rows)):
            launch(heads, kv_heads, head_size, block_size, dtype, cache_dtype, longest, tokens=64, **options)

    with compile_kernels(arch) as kernels:
        for case in SHARED:
            if case[-2] == FP8 and not has_float8(arch):
                continue
            shared(*case)
        everything = {"sinks": torch.empty(32), "alibi_slopes": torch.empty(32), "window": 100, "softcap": 5.0}
        shared(32, 8, 80, 16, BF16, BF16, 64, **everything, k_scale=torch.empty(8), return_lse=True)
        shared(14, 2, 64, 16, FP16, FP16, 64, causal=False, softcap=5.0, return_lse=True)
    assert {kernel.name for kernel in kernels} == {"_prefill_kernel"}
    assert_resources(kernels)
    assert all(len(re.findall(r"tt.atomic_rmw", kernel.asm["ttir"])) == 1 for kernel in kernels)


@pytest.mark.parametrize("head_size", [64, 128])
def test_hopper_matrix_products(head_size):
    with compile_kernels(90, every=1) as kernels:
        launch(32, 8, head_size, 16, BF16, BF16, 512)
    assert_resources(kernels)
    assert_sass(kernels, "HGMMA", "_prefill_kernel")


def test_hopper_kernel():
    """Bulk copies (UTMALDG) into shared memory, matrix products from there, no register spilled."""
    sinks = torch.empty(64)
    with compile_kernels(90, every=1) as kernels:
        launch(32, 8, 128, 16, BF16, BF16, 512, apart=True)
        launch(64, 8, 64, 16, BF16, BF16, 512, apart=True, sinks=sinks, window=128, return_lse=True)
        launch(32, 8, 128, 64, FP16, FP16, 512, apart=True, causal=False, return_lse=True)
        for longest in (512, 4096):
            launch(32, 8, 128, 16, BF16, BF16, longest, apart=True, softcap=50.0)
    assert [kernel.name for kernel in kernels] == ["_prefill_sm90_kernel"] * 5
    assert_resources(kernels)
    assert_sass(kernels, "HGMMA", "_prefill_sm90_kernel")
    assert_sass(kernels, "UTMALDG", "_prefill_sm90_kernel")


@pytest.mark.long
def test_hopper_kernel_of_long_prompts():
    """Tiles of 128 keys, with all that leaves the logits as they are."""
    heads, factors = torch.empty(64), torch.empty(8)
    with compile_kernels(90, every=1) as kernels:
        launch(32, 8, 128, 16, BF16, BF16, 4096, apart=True)
        launch(64, 8, 128, 16, FP16, FP16, 4096, apart=True, sinks=heads, k_scale=factors, v_scale=factors)
        launch(16, 8, 128, 128, BF16, BF16, 4096, apart=True, causal=False, return_lse=True)
        launch(64, 8, 64, 16, BF16, BF16, 4096, apart=True, return_lse=True)
    assert [kernel.name for kernel in kernels] == ["_prefill_sm90_kernel"] * 4
    assert_resources(kernels)


@pytest.mark.long
def test_hopper_kernel_of_short_prompts():
    """The loops do the last tile of keys, so products with values stand in two loops and not in a third place too."""
    heads, factors = torch.empty(64), torch.empty(8)
    with compile_kernels(90, every=1) as kernels:
        launch(32, 8, 128, 16, BF16, BF16, 256, apart=True, width=16)
        launch(32, 8, 128, 16, BF16, BF16, 256, apart=True, width=64)
        launch(64, 8, 128, 16, FP16, FP16, 256, apart=True, width=16, sinks=heads, k_scale=factors, v_scale=factors)
        launch(64, 8, 64, 16, BF16, BF16, 256, apart=True, width=16, alibi_slopes=heads, softcap=5.0, return_lse=True)
    assert [kernel.name for kernel in kernels] == ["_prefill_sm90_kernel"] * 4
    assert_resources(kernels)
    short, longer = (len(kernel.asm["ptx"]) for kernel in kernels[:2])
    assert short < 0.9 * longer


@pytest.mark.long
def test_hopper_kernel_with_everything():
    options = {"alibi_slopes": torch.empty(64), "sinks": torch.empty(64), "window": 9, "softcap": 30.0}
    with compile_kernels(90, every=1) as kernels:
        for size in (64, 128):
            scales = {"k_scale": torch.empty(8), "v_scale": torch.empty(8)}
            launch(64, 8, size, 16, BF16, BF16, 512, apart=True, return_lse=True, **options, **scales)
    assert [kernel.name for kernel in kernels] == ["_prefill_sm90_kernel"] * 2
    assert_resources(kernels)


@pytest.mark.parametrize("size", [pytest.param(64, marks=pytest.mark.long), 128])
def test_hopper_kernel_that_shares_keys_out(size):
    """No register spilled, though it merges; the parts are counted, by each of the two groups that multiply.

    (With Triton 3.9 sinks and windows spill some, once for a share, 48 bytes at most.)
    """
    heads, factors = torch.empty(64), torch.empty(8)
    everything = {"sinks": heads, "alibi_slopes": heads, "softcap": 3.0, "window": 128, "return_lse": True}
    with compile_kernels(90, every=1) as kernels:
        launch(32, 8, size, 16, BF16, BF16, 64, apart=True, tokens=64)
        launch(64, 8, size, 16, FP16, FP16, 64, apart=True, tokens=64, **everything, k_scale=factors, v_scale=factors)
        launch(32, 8, size, 128, BF16, BF16, 64, apart=True, tokens=64, causal=False, return_lse=True)
    assert [kernel.name for kernel in kernels] == ["_prefill_sm90_kernel"] * 3
    assert_resources(kernels, most_spilled=0 if releases.TRITON == (3, 6) else 48)
    assert all(
        kernel.asm["ptx"].count("atom.") == 3 for kernel in kernels
    )  # and tiles are drawn, before copying or after


def test_very_few_rows_get_the_kernel_of_decodes():
    with compile_kernels(90, every=1) as kernels:
        launch(32, 8, 128, 16, BF16, BF16, 8, apart=True, tokens=8)
        launch(32, 8, 128, 16, BF16, FP8, 2, apart=True)
    assert [kernel.name for kernel in kernels] == ["decode_sm90_kernel"] * 2
    assert_resources(kernels)


def test_what_the_hopper_kernel_leaves_to_the_portable_one():
    with compile_kernels(90, every=1) as kernels:
        launch(32, 8, 128, 16, BF16, BF16, 8, apart=True, causal=False)  # too few rows
        launch(32, 8, 96, 16, BF16, BF16, 512, apart=True)
        launch(32, 8, 128, 16, BF16, FP8, 512, apart=True)
    with compile_kernels(100) as blackwell:
        launch(32, 8, 128, 16, BF16, BF16, 512, apart=True)
    assert {kernel.name for kernel in [*kernels, *blackwell]} == {"_prefill_kernel"}


@pytest.mark.parametrize("apart", [False, True], ids=["portable", "hopper"])
def test_one_compilation_for_all_steps(apart):
    """Batch sizes, table widths, windows and offsets into persistent buffers do not ask for new kernels."""
    pool = torch.empty(4, 2, 16, 8, 128, dtype=BF16)
    if apart:
        pool = pool.transpose(0, 1).contiguous().transpose(0, 1)
    with compile_kernels(90, every=1) as kernels:
        for at, batch, width, window in ((0, 1, 512, 128), (1, 3, 100, 1), (3, 16, 33, 100)):
            cu, lens = (torch.empty(at + batch + extra, dtype=torch.int32)[at:] for extra in (1, 0))
            tables = torch.empty(at + batch, width, dtype=torch.int32)[at:]
            q = torch.empty(100 + batch, 32, 128, dtype=BF16)
            varlen_prefill_attention(q, pool[:, 0], pool[:, 1], tables, cu, lens, max_seqlen_q=100, window=window)
    assert len(kernels) == 3 and len({id(kernel.asm) for kernel in kernels}) == 1

import torch
from support.aot import assert_resources, compile_kernels, each_arch, has_float8

from tritonllm.kernels import fused_decode_attention
from tritonllm.kernels.attention.portable.few import few_config
from tritonllm.kernels.runtime import tuning

BF16, FP16 = torch.bfloat16, torch.float16
FP8, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CASES = [
    # batch, heads, kv heads, head size, rotary, norm, dtype, cache dtype
    (1, 16, 8, 128, 128, "head", BF16, BF16),
    (1, 32, 8, 128, 128, None, BF16, BF16),
    (1, 32, 4, 128, 128, "head", BF16, BF16),
    (4, 14, 2, 64, 64, None, FP16, FP16),
    (1, 8, 4, 256, 256, "head", BF16, BF16),
    (1, 8, 4, 80, 20, "heads", BF16, BF16),
    (1, 8, 2, 256, 0, None, BF16, BF16),
    (1, 16, 8, 128, 128, "head", BF16, FP8),
    (1, 32, 8, 128, 128, None, FP16, FP8),
    (1, 16, 8, 128, 128, "head", BF16, E5M2),
    (1, 8, 4, 256, 256, "head", BF16, FP8),
    (300, 32, 8, 128, 128, None, BF16, BF16),  # not split
]


def launch(batch, heads, kv_heads, head_size, rotary, norm, dtype, cache_dtype, width=256, **options):
    pool = torch.empty(2, 4, 16, kv_heads, head_size, dtype=cache_dtype)
    tables, lens = torch.empty(batch, width, dtype=torch.int32), torch.empty(batch, dtype=torch.int32)
    slots = torch.empty(batch, dtype=torch.int64)
    qkv = torch.empty(batch, (heads + 2 * kv_heads) * head_size, dtype=dtype)
    rope = (slots, torch.empty(4096, rotary)) if rotary else ()
    if norm:
        shapes = {"head": [(head_size,)] * 2, "heads": [(heads, head_size), (kv_heads, head_size)]}[norm]
        options |= dict(zip(("q_weight", "k_weight"), map(torch.empty, shapes), strict=True))
    workspace = torch.empty(4096, dtype=torch.int32)
    fused_decode_attention(qkv, *pool, slots, tables, lens, *rope, workspace=workspace, settled=True, **options)


def small(head_size, group, programs, **_):
    return few_config(head_size, group, programs)


@each_arch()
def test_compiles(arch):
    everything = {"sinks": torch.empty(16), "alibi_slopes": torch.empty(16), "window": 100, "softcap": 5.0}
    with compile_kernels(arch) as kernels, tuning.override("paged_decode_attention", small):
        for case in CASES:
            if case[-1].itemsize == 1 and not has_float8(arch):
                continue
            launch(*case)
        launch(*CASES[0], **everything, interleaved=True, k_scale=torch.empty(8), v_scale=0.5, return_lse=True)
    assert {kernel.name for kernel in kernels} == {"few_kernel"}
    assert_resources(kernels)


def test_reads_before_it_waits():
    """Sixteen bytes at a time, and all keys and values of a tile before the wait (ACQBULK)."""
    with compile_kernels(90, every=1) as kernels, tuning.override("paged_decode_attention", small):
        launch(*CASES[0])
    # First comes what the newest key's program does, then the others.
    before = kernels[0].sass.split("ACQBULK")[1]
    config = few_config(128, 2, 8)
    assert before.count("LDG.E.128") >= 2 * config["BLOCK_N"] * 128 * 2 // (16 * 32 * config["num_warps"])


def test_one_compilation_for_all_steps():
    """Batch sizes, table widths, windows and offsets into persistent buffers do not ask for new kernels."""
    with compile_kernels(90, every=1) as kernels, tuning.override("paged_decode_attention", small):
        for batch, width, window in ((1, 512, 128), (2, 100, 200), (3, 33, 400), (5, 16, 4096)):
            launch(batch, *CASES[0][1:], width=width, window=window)
    assert len(kernels) == 4
    assert len({id(kernel.asm) for kernel in kernels}) == 1

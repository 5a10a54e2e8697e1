import pytest
import torch
from support.aot import assert_resources, assert_sass, compile_kernels, each_arch, every_of, has_float8

from tritonllm.kernels import Groups, Weight, fused_moe, moe_from_logits
from tritonllm.kernels.dense.narrow import aligned
from tritonllm.kernels.dense.weight import NARROW, PACKED
from tritonllm.kernels.moe import tiles
from tritonllm.kernels.runtime import tuning

QWEN3_30B = (128, 8, 2048, 768)
MIXTRAL = (8, 2, 4096, 14336)
GPT_OSS_20B = (32, 4, 2880, 2880)


def call(tokens, experts, top_k, n, i, dtype=torch.bfloat16, **kwargs):
    """Only addresses and strides matter, so the experts share one block of memory."""
    w_gate_up = torch.empty(2 * i, n, dtype=dtype).expand(experts, -1, -1)
    w_down = torch.empty(n, i, dtype=dtype).expand(experts, -1, -1)
    ids = torch.empty(tokens, top_k, dtype=torch.int32)
    fused_moe(torch.empty(tokens, n, dtype=dtype), w_gate_up, w_down, torch.empty(tokens, top_k), ids, **kwargs)


def portable():
    """On Hopper too."""
    return tuning.override("fused_moe", lambda **key: tiles.FUSED_MOE.default_config(**key | {"arch": "any"}))


@each_arch()
def test_compiles(arch):
    with compile_kernels(arch) as kernels, portable():
        for tokens in (1, 256, 640):
            call(tokens, *QWEN3_30B)
        call(2048, *MIXTRAL, dtype=torch.float16)
        call(1024, 16, 4, 2048, 720, activation="gelu", expert_map=torch.empty(32, dtype=torch.int32))
        call(256, 36, 8, 2048, 768, expert_map=torch.empty(12, 128, dtype=torch.int32))
        call(64, 4, 2, 100, 60, activation="gelu_tanh")
        call(64, *QWEN3_30B, dtype=torch.float32)
        call(1, 1, 1, 1, 1)
    assert_resources(kernels)


@each_arch()
def test_a_few_tokens_compile(arch):
    """Without grouping, in both kernels' own dtypes, sizes and options."""
    with compile_kernels(arch) as kernels:
        for tokens, shape in ((1, QWEN3_30B), (2, (512, 8, 2048, 512)), (1, MIXTRAL), (1, GPT_OSS_20B)):
            call(tokens, *shape)
        call(1, 16, 4, 1000, 90, dtype=torch.float32, activation="gelu", expert_map=torch.empty(32, dtype=torch.int32))
        call(1, 36, 8, 2048, 768, expert_map=torch.empty(12, 128, dtype=torch.int32))
        biases = {"gate_up_bias": torch.empty(32, 5760), "down_bias": torch.empty(32, 2880)}
        call(1, *GPT_OSS_20B, activation="swigluoai", dtype=torch.float16, **biases)
        call(1, *QWEN3_30B, residual=torch.empty(1, 2048, dtype=torch.bfloat16))
    assert {kernel.name for kernel in kernels} == {"_direct_gate_up_kernel", "_direct_down_kernel"}
    assert_resources(kernels)


@each_arch()
def test_one_token_from_logits_compiles(arch):
    correction = {"scoring": "sigmoid", "correction_bias": torch.empty(256)}
    biases = {"gate_up_bias": torch.empty(4, 120), "down_bias": torch.empty(4, 100)}
    qwen2 = (60, 4, 2048, 1408), {"renormalize": False}
    cases = ((QWEN3_30B, {}), qwen2, ((256, 8, 2048, 512), correction), ((4, 2, 100, 60), biases))
    with compile_kernels(arch) as kernels:
        for (experts, top_k, n, i), options in cases:
            w_gate_up = torch.empty(2 * i, n, dtype=torch.bfloat16).expand(experts, -1, -1)
            w_down = torch.empty(n, i, dtype=torch.bfloat16).expand(experts, -1, -1)
            x = torch.empty(1, n, dtype=torch.bfloat16)
            moe_from_logits(x, torch.empty(1, experts), w_gate_up, w_down, top_k, residual=x, **options)
        w_gate_up, w_down = torch.empty(128, 1536, 2048), torch.empty(128, 2048, 768)
        moe_from_logits(x.new_empty(1, 2048).float(), torch.empty(1, 128), w_gate_up, w_down, 8)
    assert {kernel.name for kernel in kernels} == {"_direct_gate_up_kernel", "_direct_down_kernel"}
    assert_resources(kernels)


@each_arch()
def test_sum_and_norm_compile(arch):
    """Of rows as long as one program may have them, and of a length that is no power of two."""
    with compile_kernels(arch) as kernels:
        for n, dtype in ((2048, torch.bfloat16), (2880, torch.float16), (8192, torch.float32)):
            w_gate_up, w_down = torch.empty(4, 128, n, dtype=dtype), torch.empty(4, n, 64, dtype=dtype)
            x, weight = torch.empty(200, n, dtype=dtype), torch.empty(n, dtype=dtype)
            moe_from_logits(x, torch.empty(200, 4), w_gate_up, w_down, 2, residual=x, norm_weight=weight)
    assert [kernel.name for kernel in kernels].count("_sum_kernel") == -(-3 // every_of(arch))
    assert not any("norm" in kernel.name for kernel in kernels)
    assert_resources(kernels)


@each_arch()
def test_gpt_oss_compiles(arch):
    """Every tile, with biases in the dtype of the weights and in float32."""
    experts, _, n, i = GPT_OSS_20B
    with compile_kernels(arch) as kernels, portable():
        for tokens in (1, 128, 256, 1024):
            biases = {"gate_up_bias": torch.empty(experts, 2 * i, dtype=torch.bfloat16)}
            biases["down_bias"] = torch.empty(experts, n, dtype=torch.bfloat16)
            call(tokens, *GPT_OSS_20B, activation="swigluoai", **biases)
        call(8, 4, 2, 100, 60, activation="swigluoai", gate_up_bias=torch.empty(4, 120), dtype=torch.float32)
        biases = {"gate_up_bias": torch.empty(experts, 2 * i), "down_bias": torch.empty(experts, n)}
        call(1024, *GPT_OSS_20B, activation="swigluoai", dtype=torch.float16, **biases)
    assert_resources(kernels)


@pytest.mark.parametrize("tokens", [640, 1024])
def test_hopper_matrix_products(tokens):
    """Blocks of 64 pairs and more use wgmma."""
    with compile_kernels(90, every=1) as kernels, portable():
        call(tokens, *QWEN3_30B)
    assert_sass(kernels, "HGMMA", "_gate_up_kernel")
    assert_sass(kernels, "HGMMA", "_down_kernel")


@each_arch()
@pytest.mark.parametrize("format", NARROW)
def test_narrow_experts_compile(arch, format):
    if format == "fp8" and not has_float8(arch):
        pytest.skip("no conversion of e4m3 there: such a weight is refused")
    with compile_kernels(arch) as kernels:
        narrow(QWEN3_30B, format, Groups(1, 32) if format in PACKED else Groups(128, 128), (1, 64, 640))
    assert_resources(kernels)


@each_arch()
def test_gpt_oss_with_floats_of_four_bits_compiles(arch):
    """Every tile, with the biases, and with scales of MXFP4 and of NVFP4."""
    experts, _, n, i = GPT_OSS_20B
    biases = {"gate_up_bias": torch.empty(experts, 2 * i).bfloat16(), "down_bias": torch.empty(experts, n).bfloat16()}
    with compile_kernels(arch) as kernels:
        for columns in (32, 16):
            narrow(GPT_OSS_20B, "fp4", Groups(1, columns), (1, 128, 256, 1024), activation="swigluoai", **biases)
    assert_resources(kernels)


def narrow(shape, format, groups, counts, **options):
    """Narrow experts with these counts of tokens."""
    (experts, top_k, n, i), both = shape, []
    for rows, k in ((2 * i, n), (n, i)):
        data = torch.empty(rows, k // 2 if format in PACKED else k, dtype=NARROW[format]).expand(experts, -1, -1)
        scales, row_scales = torch.empty(groups.shape(rows, k)), None
        if format == "fp4":
            row_scales = torch.empty(experts, rows) if groups.columns == 16 else None
            scales = aligned(scales.to(torch.float8_e8m0fnu if row_scales is None else torch.float8_e4m3fn))
        both.append(Weight(data, scales.expand(experts, -1, -1), format, groups, row_scales=row_scales))
    for tokens in counts:
        ids = torch.empty(tokens, top_k, dtype=torch.int32)
        x = torch.empty(tokens, n, dtype=torch.bfloat16)
        fused_moe(x, *both, torch.empty(tokens, top_k), ids, **options)

"""Published narrow checkpoints on a GPU: the engine keeps the weights narrow, and computes with their values."""

import pytest
import torch
from support.engines import greedy, token_ids
from support.narrow_formats import float8, integers, is_product, mxfp4, nvfp4, positive, write_pair
from support.tiny_models import random_tokens, tiny_config, write_checkpoint

from tritonllm import LLM, quantize_checkpoint
from tritonllm.layers.linear import Linear
from tritonllm.layers.moe import MoE

pytestmark = pytest.mark.gpu
SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
}
PROMPTS = [random_tokens(n, 100, seed=n) for n in (1, 300, 33, 128, 2, 17, 64)]


def blocks(shape, generator):
    numbers = float8(shape, generator)
    scales = positive((-(-shape[0] // 128), -(-shape[1] // 128)), generator) / 400
    spread = scales.repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]]
    return {".weight": numbers, ".weight_scale_inv": scales}, numbers.float() * spread


def gptq(shape, generator):
    """Four bits down each column, with zero points."""
    (n, k), shifts = shape, torch.arange(0, 32, 4)
    numbers, zeros = integers(0, 15, shape, generator), integers(1, 16, (k // 128, n), generator)
    scales = (positive((k // 128, n), generator) / 6).half()

    def words(values):
        packed = (values << shifts.view(-1, *[1] * (values.dim() - 1))).sum(0)
        return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int()

    parts = {
        ".qweight": words(numbers.T.unflatten(0, (-1, 8)).movedim(1, 0)),
        ".qzeros": words((zeros - 1).unflatten(1, (-1, 8)).movedim(2, 0)),
        ".scales": scales,
        ".g_idx": (torch.arange(k) // 128).int(),
    }
    values = (numbers - zeros.T.repeat_interleave(128, 1)).float() * scales.T.float().repeat_interleave(128, 1)
    return parts, values


CASES = {
    "fp8 blocks": ("qwen3", blocks, {"quant_method": "fp8", "weight_block_size": [128, 128]}, torch.float8_e4m3fn),
    "fp8 experts": ("qwen3_moe", blocks, {"quant_method": "fp8", "weight_block_size": [128, 128]}, torch.float8_e4m3fn),
    "mxfp4 experts": ("gpt_oss", mxfp4, {"quant_method": "mxfp4"}, torch.uint8),
    "nvfp4": ("qwen3", nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, torch.uint8),
    "nvfp4 experts": ("qwen3_moe", nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, torch.uint8),
    "gptq": ("qwen3", gptq, {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}, torch.uint8),
}


@pytest.mark.parametrize("case", CASES)
def test_an_engine_keeps_weights_narrow(tmp_path, case):
    """Captured or not, in any batch and any chunks, the tokens of the widened checkpoint; nothing compiles late."""
    family, form, quantization, dtype = CASES[case]
    where = is_product if family != "gpt_oss" else lambda name: name.endswith("_proj")  # the experts
    pair = write_pair(tmp_path, family, form, quantization, where=where, **SIZES)
    settings = {"skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 512, "num_blocks": 512}
    settings |= {"max_num_seqs": 8, "gpu_memory_utilization": 0.3}
    wide = token_ids(LLM(str(pair.wide), **settings).generate(PROMPTS, greedy(24)))
    llm = LLM(str(pair.narrow), **settings)
    layers = llm.engine._runner._model.layers
    held = [m.held(name) for m in layers.modules() if isinstance(m, Linear | MoE) for name in m.held_names]
    kept = [of for of in held if of.data.dtype == dtype]
    assert len(kept) >= len(held) - len(layers) * {"qwen3_moe": 1, "gpt_oss": 3}.get(family, 0)
    assert token_ids(llm.generate(PROMPTS, greedy(24))) == wide
    assert [token_ids(llm.generate([prompt], greedy(24)))[0] for prompt in PROMPTS] == wide
    assert llm.engine.stats.compilations_after_ready == 0
    chunked = LLM(str(pair.narrow), **settings, enforce_eager=True, max_num_batched_tokens=64)
    assert token_ids(chunked.generate(PROMPTS, greedy(24))) == wide


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize(
    ("format", "made", "dtype"), [("fp8", "fp8", torch.float8_e4m3fn), ("w4a16", "int4", torch.uint8)]
)
def test_a_checkpoint_written_here_is_kept_narrow(tmp_path, family, format, made, dtype):
    """Bit for bit what the same weights become when a model is loaded, and so are the tokens."""
    (tmp_path / "wide").mkdir()
    write_checkpoint(tmp_path / "wide", tiny_config(family, **SIZES))
    quantize_checkpoint(tmp_path / "wide", tmp_path / "narrow", format)
    settings = {"skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 512, "num_blocks": 512}
    settings |= {"max_num_seqs": 8, "gpu_memory_utilization": 0.3}
    read = LLM(str(tmp_path / "narrow"), **settings)
    loaded = LLM(str(tmp_path / "wide"), quantization=made, **settings)
    both = [dict(llm.engine._runner._model.named_parameters()) for llm in (read, loaded)]
    assert both[0].keys() == both[1].keys()
    assert sum(parameter.dtype == dtype for parameter in both[0].values()) == 4 * len(
        loaded.engine._runner._model.layers
    )
    for name, parameter in both[0].items():
        assert torch.equal(parameter.view(torch.uint8), both[1][name].view(torch.uint8)), name
    assert token_ids(read.generate(PROMPTS, greedy(24))) == token_ids(loaded.generate(PROMPTS, greedy(24)))

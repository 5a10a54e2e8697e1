"""Encoders in true shapes on a GPU, against transformers with the same weights, through the whole engine.

As in test_parity_gpu.py, bfloat16 is measured by what transformers' own bfloat16 is away from float32.
"""

from typing import Any

import pytest
import torch
from support.classifiers import write_bare
from support.encoders import encoder_config
from support.engines import greedy, token_ids
from support.real_configs import QWEN3_0_6B
from support.tiny_models import random_tokens, tiny_config, write_checkpoint
from torch.nn import functional as F
from transformers import AutoModel, AutoModelForCausalLM

from tritonllm import LLM, PoolingParams

CONFIGS: dict[str, dict[str, Any]] = {
    "bert-base": encoder_config(
        "bert",
        vocab_size=30522,
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=12,
        max_position_embeddings=512,
    ),
    "xlm-r-large-of-6-layers": encoder_config(
        "xlm-roberta",
        vocab_size=250002,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=6,
        num_attention_heads=16,
        max_position_embeddings=514,
    ),
    "modernbert-base": encoder_config(
        "modernbert",
        vocab_size=50368,
        hidden_size=768,
        intermediate_size=1152,
        num_hidden_layers=22,
        num_attention_heads=12,
        max_position_embeddings=8192,
        local_attention=128,
        global_attn_every_n_layers=3,
        local_rope_theta=10000.0,
    ),
    # run everywhere, so that these tests are themselves tested
    "tiny-bert": encoder_config("bert", max_position_embeddings=512),
    "tiny-modernbert": encoder_config("modernbert", max_position_embeddings=512),
}
FLOAT32_LIMIT, BF16_RATIO = 1e-4, 1.2
LENGTHS = (1, 17, 500, 130, 64, 511, 300, 2)
SETTINGS: dict[str, Any] = {"skip_tokenizer_init": True, "max_model_len": 512, "max_num_batched_tokens": 1024}


def only_on_a_gpu(names) -> list[Any]:
    return [pytest.param(name, marks=[] if name.startswith("tiny") else pytest.mark.gpu) for name in names]


@torch.inference_mode()
def means(folder, prompts, dtype, device) -> list[torch.Tensor]:
    """Of transformers' hidden states, normalized."""
    model = AutoModel.from_pretrained(folder, dtype=dtype, attn_implementation="eager").to(device).eval()
    hidden = [model(torch.tensor([prompt], device=device)).last_hidden_state[0].float() for prompt in prompts]
    return [F.normalize(rows.mean(0), dim=-1).cpu() for rows in hidden]


def error(found, expected) -> float:
    """The largest of all prompts."""
    return max(float((torch.as_tensor(a) - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", only_on_a_gpu(CONFIGS))
def test_embeddings(name, tmp_path, device, record_property):
    config = CONFIGS[name]
    length = min(512, config["max_position_embeddings"] - 2)
    write_bare(tmp_path, config)
    # from 5 on: RoBERTa takes 1 for padding
    prompts = [[5 + token for token in random_tokens(n, config["vocab_size"] - 5, seed=n)] for n in LENGTHS]
    prompts = [prompt[:length] for prompt in prompts]
    exact = means(tmp_path, prompts, torch.float32, device)
    found = {}
    for dtype in ("float32", "bfloat16"):
        settings = {**SETTINGS, "max_model_len": length, "device": device.type, "dtype": dtype}
        llm = LLM(str(tmp_path), pooler_config={"pooling_type": "MEAN"}, gpu_memory_utilization=0.5, **settings)
        outputs = llm.embed(prompts, use_tqdm=False)
        found[dtype] = [output.outputs.embedding for output in outputs]
        assert llm.engine.stats.compilations_after_ready == 0
        del llm
    record_property("float32", error(found["float32"], exact))
    assert error(found["float32"], exact) < FLOAT32_LIMIT
    theirs = error(means(tmp_path, prompts, torch.bfloat16, device), exact)
    record_property("bfloat16", (error(found["bfloat16"], exact), theirs))
    assert error(found["bfloat16"], exact) < BF16_RATIO * theirs


@pytest.mark.parametrize("name", only_on_a_gpu(("qwen3-0.6b-of-8-layers", "tiny-qwen3")))
@pytest.mark.parametrize("way", ["LAST", "MEAN"])
def test_a_decoder_embeds_and_generates(name, way, tmp_path, device):
    """In one engine, with its captured steps."""
    config = tiny_config("qwen3") if name.startswith("tiny") else {**QWEN3_0_6B, "num_hidden_layers": 8}
    write_checkpoint(tmp_path, config)
    prompts = [random_tokens(n, config["vocab_size"], seed=n) for n in (1, 17, 90, 200, 64, 5)]
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    model = model.to(device).eval()
    settings = {**SETTINGS, "max_model_len": 256, "max_num_batched_tokens": 256, "device": device.type}
    pooling = {"pooling_type": way}
    llm = LLM(str(tmp_path), dtype="float32", pooler_config=pooling, gpu_memory_utilization=0.5, **settings)
    alone = token_ids(llm.generate(prompts, greedy(), use_tqdm=False))
    engine, ended = llm.engine, {}
    for index, prompt in enumerate(prompts):
        engine.add_request(f"g{index}", {"prompt_token_ids": prompt}, greedy())
        engine.add_request(f"p{index}", {"prompt_token_ids": prompt}, PoolingParams(task="embed"))
    while engine.has_unfinished_requests():
        ended |= {output.request_id: output for output in engine.step() if output.finished}
    assert token_ids([ended[f"g{index}"] for index in range(len(prompts))]) == alone
    for index, prompt in enumerate(prompts):
        with torch.inference_mode():
            hidden = model.base_model(torch.tensor([prompt], device=device)).last_hidden_state[0]
        vector = F.normalize(hidden[-1] if way == "LAST" else hidden.mean(0), dim=-1).cpu()
        assert error([ended[f"p{index}"].outputs.data], [vector]) < FLOAT32_LIMIT
    assert engine.stats.compilations_after_ready == 0

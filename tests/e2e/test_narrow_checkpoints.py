"""Whole requests with checkpoints that are stored narrow: the tokens are those of the widened weights."""

import pytest
from support.engines import greedy, token_ids
from support.narrow_formats import float8, gptq, of_blocks, positive, write_pair
from support.tiny_models import random_tokens
from support.tiny_tokenizer import VOCAB_SIZE

from tritonllm import LLM

BLOCK = (32, 32)
FP8 = {"quant_method": "fp8", "weight_block_size": list(BLOCK)}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True}


def fp8(shape, generator):
    numbers, across = float8(shape, generator), (-(-shape[0] // BLOCK[0]), -(-shape[1] // BLOCK[1]))
    scales = positive(across, generator) / 100
    return {".weight": numbers, ".weight_scale_inv": scales}, numbers.float() * of_blocks(scales, shape, BLOCK)


def act_order(shape, generator):
    return gptq(shape, generator, group=16, order="act-order")


@pytest.mark.parametrize(("family", "form", "config"), [("qwen3", fp8, FP8), ("mixtral", act_order, GPTQ)])
def test_tokens(tmp_path, family, form, config):
    pair = write_pair(tmp_path, family, form, config, vocab_size=VOCAB_SIZE)
    prompts = [{"prompt_token_ids": random_tokens(length, VOCAB_SIZE, seed=length)} for length in (7, 3)]
    tokens = []
    for folder in (pair.narrow, pair.wide):
        llm = LLM(str(folder), skip_tokenizer_init=True, block_size=4, num_blocks=20, max_num_seqs=2)
        tokens.append(token_ids(llm.generate(prompts, greedy(8), use_tqdm=False)))
    assert tokens[0] == tokens[1] and len(set(tokens[0][0])) > 1

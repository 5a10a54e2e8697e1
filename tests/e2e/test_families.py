"""Whole requests with every family: loaded by path, batched, chunked, preempted, and still transformers' tokens."""

import warnings
from pathlib import Path

import pytest
import torch
from support.engines import greedy
from support.tiny_models import ALL_FAMILIES, random_tokens, reference_logits, tiny_config, write_checkpoint
from support.tiny_tokenizer import VOCAB_SIZE
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tritonllm import LLM
from tritonllm.models.decoder import Decoder
from tritonllm.models.fallback_decoder import TransformersDecoder

LENGTHS, NEW = (19, 3, 30, 11), 16


def check(folder: Path, theirs: PreTrainedModel, **options: str) -> LLM:
    """Greedy tokens of prompts that share a beginning, in a cache that is too small for all of them at once."""
    llm = LLM(
        str(folder),
        skip_tokenizer_init=True,
        block_size=4,
        num_blocks=20,
        max_num_seqs=4,
        max_num_batched_tokens=13,
        **options,
    )
    shared = random_tokens(8, VOCAB_SIZE, seed=9)
    prompts = [shared + random_tokens(length, VOCAB_SIZE, seed=length) for length in LENGTHS]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], greedy(NEW), use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        got = list(output.outputs[0].token_ids)
        assert len(got) == NEW
        assert got == reference_logits(theirs, prompt + got).argmax(-1).tolist()[len(prompt) - 1 : -1]
    return llm


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_family(tmp_path, family):
    theirs = write_checkpoint(tmp_path, tiny_config(family, vocab_size=VOCAB_SIZE))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(tmp_path, theirs)


OTHERS = {"bitnet": "BitNetForCausalLM does not run natively"}


@pytest.mark.parametrize("kind", [kind for kind in OTHERS if kind in CONFIG_MAPPING])
def test_any_other_architecture(tmp_path, kind):
    """There is no family here; transformers computes it, with one warning."""
    config = AutoConfig.for_model(
        kind,
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for p in theirs.parameters():
        p.data.normal_(0, 0.2)
    theirs.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=OTHERS[kind]) as warned:
        check(tmp_path, theirs)
    assert len([w for w in warned if "natively" in str(w.message)]) == 1
    with pytest.raises(ValueError, match=r"architecture .* is not supported; supported: "):
        LLM(str(tmp_path), skip_tokenizer_init=True, model_impl="vllm")


def test_transformers_in_the_place_of_a_family(tmp_path):
    """Loading weights anew goes through it, too."""
    theirs = write_checkpoint(tmp_path, tiny_config("llama", vocab_size=VOCAB_SIZE))
    with pytest.warns(UserWarning, match="LlamaForCausalLM does not run natively: transformers computes it"):
        llm = check(tmp_path, theirs, model_impl="transformers")
    assert isinstance(llm.engine.model, TransformersDecoder)
    llm.reload_weights()
    assert isinstance(check(tmp_path, theirs, model_impl="vllm").engine.model, Decoder)


def test_doge_ends_where_its_mask_would_hide_keys(tmp_path):
    write_checkpoint(tmp_path, tiny_config("doge", vocab_size=VOCAB_SIZE, keep_window_size=40))
    with pytest.raises(ValueError, match=r"max_model_len=41 is beyond .* keep_window_size, if that is less\), 40"):
        LLM(str(tmp_path), skip_tokenizer_init=True, max_model_len=41)

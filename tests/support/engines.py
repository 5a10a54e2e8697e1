"""Engines over tiny checkpoints, for tests of whole requests."""

from functools import cache
from pathlib import Path
from shutil import copytree
from tempfile import mkdtemp
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from support.tiny_models import tiny_config, write_checkpoint
from support.tiny_tokenizer import VOCAB_SIZE, save_tokenizer
from tritonllm import LLM, SamplingParams
from tritonllm.engine.data.outputs import RequestOutput


@cache
def tiny_checkpoint(family: str = "qwen3", **fields: Any) -> Path:
    """A random checkpoint with a tokenizer; <|endoftext|> (0) ends its outputs. ``fields`` are of its config."""
    folder = Path(mkdtemp(prefix="tiny-checkpoint-"))
    write_checkpoint(folder, tiny_config(family, vocab_size=VOCAB_SIZE, bos_token_id=0, eos_token_id=0, **fields))
    save_tokenizer(folder)
    return folder


def shallow_checkpoint(family: str = "qwen3", layers: int = 1) -> Path:
    """The same with so many layers, for what does not depend on them: a third of a step with three is theirs."""
    name = {"gpt2": "n_layer", "mpt": "n_layers"}.get(family, "num_hidden_layers")
    return tiny_checkpoint(family, **{name: layers})


@cache
def thinking_checkpoint() -> Path:
    """The same, whose tokens 1 and 2 begin and end a thought."""
    folder = Path(mkdtemp(prefix="thinking-checkpoint-"))
    copytree(tiny_checkpoint(), folder, dirs_exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (folder / name).read_text()
        (folder / name).write_text(text.replace("<|im_start|>", "<think>").replace("<|im_end|>", "</think>"))
    return folder


@cache
def similar_checkpoint(family: str = "qwen3", noise: float = 0.05) -> Path:
    """The tiny checkpoint with noise on its weights: it drafts many tokens right and many wrong."""
    folder = Path(mkdtemp(prefix="draft-"))
    copytree(tiny_checkpoint(family), folder, dirs_exist_ok=True)
    generator = torch.Generator().manual_seed(3)
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        noisy = {n: t + noise * t.std() * torch.randn(t.shape, generator=generator) for n, t in tensors.items()}
        save_file({n: t.to(tensors[n].dtype) for n, t in noisy.items()}, file, metadata={"format": "pt"})
    return folder


NGRAMS = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}


def tiny_llm(checkpoint: Path | None = None, **kwargs: Any) -> LLM:
    settings: dict[str, Any] = {"block_size": 4, "num_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    settings["max_logprobs"] = -1
    return LLM(str(checkpoint or tiny_checkpoint()), **{**settings, **kwargs})


def always_load(llm: LLM) -> LLM:
    """Whatever was measured, what the host's memory has comes back."""
    tier = llm.engine._scheduler.tier
    assert tier is not None  # the engine was made with one
    tier.rates.pays = lambda blocks: True  # type: ignore[method-assign]
    return llm


def greedy(max_tokens: int = 12, **kwargs: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **kwargs)


def token_ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(completion.token_ids) for output in outputs for completion in output.outputs]

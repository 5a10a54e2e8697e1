"""Requests of several kinds, and engines of several GPUs that are compared with one by them."""

from typing import Any

from support.engines import greedy
from support.tiny_models import random_tokens
from tritonllm import LLM, SamplingParams

PROMPTS = [random_tokens(n, 10000, seed=n) for n in (1, 700, 33, 128, 2, 511, 90, 300)]
KINDS = [
    greedy(40),
    SamplingParams(temperature=1.0, top_p=0.9, seed=1, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.5, seed=3, max_tokens=30, frequency_penalty=1.0, repetition_penalty=1.2),
    SamplingParams(temperature=1.0, seed=4, max_tokens=20, logprobs=2, prompt_logprobs=1),
]


def make(folder: str, **options: Any) -> LLM:
    """float32, where sums in another order differ far less than tokens do."""
    settings = {"load_format": "dummy", "skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 2048}
    return LLM(folder, **{**settings, "num_blocks": 1024, "max_num_seqs": 8, "max_num_batched_tokens": 512, **options})

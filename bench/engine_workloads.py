"""The engine benchmark's models and requests.

Models are configurations in Hugging Face format; weights are made up, since speed does not depend on them. Requests
are token ids from seeds, the same for every engine: :func:`checksum` proves it. Lengths depend on the workload's seed
alone, tokens also on the repetition, so that every repetition has the same shape and nothing that an earlier one left
in a prefix cache.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

TOKEN_IDS = 10000  # tokens are drawn from the first of each vocabulary
_LENGTHS, _OWN, _SHARED = 0, 1, 2  # what a random stream is for

_COMMON: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
    "use_cache": True,
}
_QWEN3: dict[str, Any] = {
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        **_COMMON,
        **_QWEN3,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "max_window_layers": 28,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "llama-3.1-8b": {
        **_COMMON,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "vocab_size": 128256,
    },
    "llama-3.2-1b": {  # drafts for the 8B; its output projection is not tied here, so that it can be made to err
        **_COMMON,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "head_dim": 64,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "vocab_size": 128256,
    },
    "qwen3-30b-a3b": {
        **_COMMON,
        **_QWEN3,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "tie_word_embeddings": False,
    },
}
MODELS["llama-3.1-70b"] = MODELS["llama-3.1-8b"] | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
}


@dataclass(frozen=True)
class Request:
    """One prompt and how many tokens to generate, whatever they are."""

    prompt: list[int]
    max_tokens: int
    temperature: float


@dataclass(frozen=True)
class Workload:
    """A set of requests that arrive together.

    Attributes:
        model: a key of :data:`MODELS`.
        kind: ``throughput`` (output tokens a second), ``latency`` (milliseconds a token at batch 1, prefill left out),
            ``speculation`` (the same with drafts of a set acceptance, bench/speculation.py), ``prefix`` (requests a
            second, prompts that begin alike), ``prefill`` (prompt tokens a second), ``turn`` (milliseconds to the
            first token of a prompt whose ``shared`` beginning is cached: the next turn of a chat) or ``join``
            (milliseconds to the first tokens of prompts that join requests which decode, bench/joining.py).
        count: number of requests.
        prompt: fewest and most tokens of a prompt that are its own.
        output: fewest and most tokens to generate.
        shared: tokens that all prompts of a repetition begin with.
        repeats: how often it is run by default; the result is the median.
        seed: of lengths and tokens.
        joins: of ``join``: how many prompts come at once, and tokens of each that are its own.
        draft: of ``speculation``: a key of :data:`MODELS`, the draft model; ``None``: the drafter knows the texts.
        gpus: fewest that it is meant for; one GPU's benchmark leaves out what is for more.
    """

    name: str
    model: str
    kind: str
    count: int
    prompt: tuple[int, int]
    output: tuple[int, int]
    temperature: float = 0.0
    max_model_len: int = 4096
    shared: int = 0
    repeats: int = 3
    seed: int = 0
    joins: tuple[int, int] = (0, 0)
    draft: str | None = None
    gpus: int = 1


_LONG = (100, 1024)
WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("W1", "qwen3-0.6b", "throughput", 256, _LONG, _LONG, 0.6),
        Workload("W2", "llama-3.1-8b", "throughput", 256, _LONG, _LONG, 0.6),
        Workload("W3a", "qwen3-0.6b", "latency", 1, (128, 128), (256, 256), repeats=5),
        Workload("W3b", "llama-3.1-8b", "latency", 1, (128, 128), (256, 256), repeats=5),
        Workload("W4", "llama-3.1-8b", "prefix", 256, (128, 128), (64, 64), shared=2048),
        Workload("W5", "qwen3-30b-a3b", "throughput", 256, _LONG, (100, 512), 0.6, repeats=2),
        Workload("W5b", "qwen3-30b-a3b", "latency", 1, (128, 128), (256, 256), repeats=5),
        Workload("W6", "llama-3.1-8b", "prefill", 32, (4096, 4096), (1, 1), max_model_len=4608),
        # long contexts, at the models' own max_model_len
        Workload("L1", "qwen3-0.6b", "latency", 1, (30000, 30000), (256, 256), max_model_len=40960),
        Workload("L8", "llama-3.1-8b", "latency", 8, (16000, 16000), (256, 256), max_model_len=131072),
        Workload("L8m", "qwen3-0.6b", "latency", 8, (100, 30000), (256, 256), max_model_len=40960),
        # the next turn of a long chat: few new tokens behind many cached ones
        *(
            Workload(
                f"T{new}", "llama-3.1-8b", "turn", 1, (new, new), (1, 1), max_model_len=36864, shared=32768, repeats=5
            )
            for new in (8, 128)
        ),
        # prompts that join requests which decode: one, a burst of short ones, one behind a beginning that all share
        Workload("J128", "llama-3.1-8b", "join", 70, _LONG, (256, 256), 0.6, joins=(1, 128)),
        Workload("J20", "llama-3.1-8b", "join", 70, _LONG, (256, 256), 0.6, joins=(20, 30)),
        Workload("JS128", "llama-3.1-8b", "join", 70, (128, 128), (256, 256), 0.6, shared=2048, joins=(1, 128)),
        # few sequences, of keys that hardly count
        *(Workload(f"F{n}", "qwen3-0.6b", "latency", n, (128, 128), (256, 256)) for n in (2, 4, 8, 16)),
        # W2 for two engines, or for two stages
        Workload("W2x2", "llama-3.1-8b", "throughput", 512, _LONG, _LONG, 0.6, repeats=2, gpus=2),
        # W5 for several engines
        Workload("W5x2", "qwen3-30b-a3b", "throughput", 512, _LONG, (100, 512), 0.6, repeats=2, gpus=2),
        Workload("W5x4", "qwen3-30b-a3b", "throughput", 1024, _LONG, (100, 512), 0.6, repeats=2, gpus=4),
        # a model that takes several GPUs
        Workload("A2", "llama-3.1-70b", "throughput", 128, _LONG, (100, 512), 0.6, repeats=1, gpus=4),
        Workload("A3", "llama-3.1-70b", "latency", 1, (128, 128), (256, 256), gpus=4),
        # several tokens a step
        Workload("S1", "llama-3.1-8b", "speculation", 1, (128, 128), (256, 256)),
        Workload("S8", "llama-3.1-8b", "speculation", 8, (128, 128), (256, 256)),
        Workload("S64", "llama-3.1-8b", "speculation", 64, (128, 128), (256, 256)),
        Workload("D1", "llama-3.1-8b", "speculation", 1, (128, 128), (256, 256), draft="llama-3.2-1b"),
        Workload("D8", "llama-3.1-8b", "speculation", 8, (128, 128), (256, 256), draft="llama-3.2-1b"),
    )
}


LATENCIES = ("latency", "speculation", "turn", "join")  # kinds whose value is milliseconds


def _tokens(generator: np.random.Generator, count: int) -> list[int]:
    return generator.integers(0, TOKEN_IDS, size=count).tolist()


def requests(workload: Workload, repetition: int = 0, again: int = 0) -> list[Request]:
    """The requests of one repetition.

    Args:
        again: draws the prompts' own tokens anew and keeps the shared beginning of this repetition.
    """
    seed = workload.seed
    lengths = np.random.default_rng([seed, _LENGTHS])
    prompts = lengths.integers(*workload.prompt, size=workload.count, endpoint=True)
    outputs = lengths.integers(*workload.output, size=workload.count, endpoint=True)
    shared = _tokens(np.random.default_rng([seed, _SHARED, repetition]), workload.shared)
    own = np.random.default_rng([seed, _OWN, repetition, again])
    return [
        Request(shared + _tokens(own, prompt), int(output), workload.temperature)
        for prompt, output in zip(prompts.tolist(), outputs.tolist(), strict=True)
    ]


def warm_up_request() -> Request:
    """What an engine answers once before anything is timed."""
    return Request(_tokens(np.random.default_rng([99]), 32), 16, 0.6)


def truncated(batch: Sequence[Request], max_tokens: int) -> list[Request]:
    """The same requests with shorter outputs."""
    return [replace(request, max_tokens=min(request.max_tokens, max_tokens)) for request in batch]


def checksum(batch: Sequence[Request]) -> str:
    """Of prompts and output lengths: engines whose checksums agree ran the same requests."""
    digest = hashlib.sha256()
    for request in batch:
        digest.update(np.asarray([*request.prompt, -request.max_tokens], dtype=np.int64).tobytes())
    return digest.hexdigest()[:12]


def write_model(name: str, config: dict[str, Any], root: Path) -> Path:
    """Write a model's configuration, without weights, to ``root/name`` and return that folder."""
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    ends = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "generation_config.json").write_text(json.dumps(ends))
    return folder

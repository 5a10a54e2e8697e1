"""Options that commands share: how to sample, and the engine's."""

import argparse
from typing import Any

from tritonllm.config.engine import (
    COMPILATION,
    DTYPES,
    EXECUTORS,
    KV_CACHE_DTYPES,
    LOAD_FORMATS,
    LOGPROBS_MODES,
    MODEL_IMPLS,
    NO_COMPILATION,
    STRUCTURED_OUTPUTS_BACKENDS,
)
from tritonllm.config.speculative import parse_draft

# Option -> keywords of add_argument. The name, with underscores, is that of the field of SamplingParams.
SAMPLING: dict[str, dict[str, Any]] = {
    "max-tokens": {"type": int, "metavar": "N", "help": "most tokens to generate (default: 256)"},
    "min-tokens": {"type": int, "metavar": "N", "help": "go on for at least this many tokens"},
    "temperature": {"type": float, "metavar": "X", "help": "0 (default): the most likely token; 1: sample as trained"},
    "top-k": {"type": int, "metavar": "K", "help": "sample from the K most likely tokens"},
    "top-p": {"type": float, "metavar": "P", "help": "sample from the fewest tokens whose probabilities reach P"},
    "min-p": {"type": float, "metavar": "P", "help": "drop tokens less likely than P times the most likely one"},
    "seed": {"type": int, "metavar": "N", "help": "the same seed gives the same text"},
    "n": {"type": int, "metavar": "N", "help": "continuations of each prompt (default: 1)"},
    "stop": {"action": "append", "metavar": "TEXT", "help": "end before TEXT; repeatable"},
    "stop-after-thought": {"action": "store_true", "help": "--stop counts behind a model's thought only"},
    "ignore-eos": {"action": "store_true", "help": "go on after the end-of-sequence token"},
    "presence-penalty": {"type": float, "metavar": "X", "help": "against tokens generated before, -2 to 2"},
    "frequency-penalty": {"type": float, "metavar": "X", "help": "the same, times how often, -2 to 2"},
    "repetition-penalty": {"type": float, "metavar": "X", "help": "above 1: against tokens of prompt and output"},
    "truncate-prompt-tokens": {"type": int, "metavar": "N", "help": "use only the last N tokens; -1: as many as fit"},
    "thinking-token-budget": {"type": int, "metavar": "N", "help": "end a model's thought after N tokens"},
    "logprobs": {
        "type": int,
        "metavar": "N",
        "help": "report the N most likely tokens at each position, -1 for all; needs --json",
    },
}
# The same for LLM's arguments.
# Of the commands that can have several engines.
SEVERAL: dict[str, dict[str, Any]] = {
    "data-parallel-size": {
        "also": "-dp",
        "type": int,
        "metavar": "N",
        "help": "engines with the whole model each, on GPUs of their own; a request goes to the one with the least to "
        "do (default: 1)",
    },
}
ENGINE: dict[str, dict[str, Any]] = {
    "tokenizer": {"metavar": "PATH", "help": "folder or hub id of the tokenizer, if it is not the model's"},
    "revision": {"metavar": "REV", "help": "branch, tag or commit of a hub id"},
    "download-dir": {"metavar": "DIR", "help": "folder that keeps what comes from the hub (default: as HF_HOME says)"},
    "device": {"metavar": "NAME", "help": "auto (default: the GPU if there is one), cpu, cuda, cuda:1"},
    "dtype": {"choices": DTYPES, "help": "default: auto, the model's own on a GPU, float32 on the CPU"},
    "language-model-only": {
        "action": "store_true",
        "help": "of a model that reads images, too, the text model alone: always so, there are no others",
    },
    "load-format": {
        "choices": LOAD_FORMATS,
        "help": "which files (default: auto, safetensors before pt); dummy: random weights, when only speed matters",
    },
    "model-impl": {
        "choices": MODEL_IMPLS,
        "help": "what computes the model (default: auto, a family, and transformers where there is none)",
    },
    "max-model-len": {"type": int, "metavar": "N", "help": "most tokens of prompt and output together"},
    "block-size": {"type": int, "metavar": "N", "help": "tokens per block of a rank's KV cache (default: 16)"},
    "num-blocks": {"type": int, "metavar": "N", "help": "blocks of the KV cache (default: as many as fit)"},
    "gpu-memory-utilization": {"type": float, "metavar": "X", "help": "part of the GPU's memory to use (default: 0.9)"},
    "max-num-seqs": {"type": int, "metavar": "N", "help": "most requests running at once (default: 256)"},
    "max-num-batched-tokens": {"type": int, "metavar": "N", "help": "most tokens in one step (default: 8192)"},
    "enable-chunked-prefill": {
        "action": argparse.BooleanOptionalAction,
        "help": "compute prompts in chunks (default), or each whole in one step; that must hold --max-model-len tokens",
    },
    "long-prefill-token-threshold": {
        "type": int,
        "metavar": "N",
        "help": "most tokens of one prompt in a step (default: 0, as many as the step has left)",
    },
    "max-logprobs": {
        "type": int,
        "metavar": "N",
        "help": "most log-probabilities a position that a request may have (default: 20); -1: the vocabulary's",
    },
    "logprobs-mode": {
        "choices": LOGPROBS_MODES,
        "help": "log-probabilities of the model (raw_logprobs, the default), or of what tokens are drawn from",
    },
    "no-prefix-caching": {
        "action": "store_false",
        "dest": "enable_prefix_caching",
        "help": "compute every prompt from its beginning",
    },
    "kv-offloading-size": {
        "type": float,
        "metavar": "GIB",
        "help": "host memory for blocks that the KV cache gives up, so that they are not computed again (default: 0)",
    },
    "kv-cache-dtype": {
        "choices": KV_CACHE_DTYPES,
        "help": "of keys and values in the KV cache (default: auto, the model's); fp8: a byte each, see docs/engine.md",
    },
    "calculate-kv-scales": {
        "action": "store_true",
        "help": "find scales for --kv-cache-dtype fp8 at the start, where the checkpoint has none, by a fixed prompt",
    },
    "kv-transfer-config": {
        "metavar": "JSON",
        "help": "share the KV cache's blocks with other engines, with vLLM's keys, see docs/kv-transfer.md",
    },
    "tensor-parallel-size": {
        "also": "-tp",
        "type": int,
        "metavar": "N",
        "help": "GPUs, or processes on the CPU, among which each layer is dealt out (default: 1)",
    },
    "pipeline-parallel-size": {
        "also": "-pp",
        "type": int,
        "metavar": "N",
        "help": "stages, each with some of the layers and tensor-parallel-size of those (default: 1)",
    },
    "enable-expert-parallel": {
        "action": "store_true",
        "help": "those processes have whole experts, each some of them, instead of a part of every expert",
    },
    "expert-placement": {
        "metavar": "FILE",
        "help": "which process has which experts: what `tritonllm rebalance-experts` wrote",
    },
    "decode-context-parallel-size": {
        "also": "-dcp",
        "type": int,
        "metavar": "N",
        "help": "of the GPUs that share a key head, so many split the keys of a sequence in the place of copies "
        "(default: 1)",
    },
    "distributed-executor-backend": {
        "choices": EXECUTORS,
        "help": "who starts those processes (default: mp, this one), see docs/distributed.md",
    },
    "worker-timeout": {
        "type": float,
        "metavar": "S",
        "help": "seconds without a sign of life of a process before requests end with an error (default: 10)",
    },
    "disable-custom-all-reduce": {
        "action": "store_true",
        "help": "let NCCL sum up what GPUs compute, also where they reach each other's memory",
    },
    "enforce-eager": {"action": "store_true", "help": "no CUDA graphs"},
    "deterministic": {
        "action": "store_true",
        "help": "a request's tokens have the same bits alone and in any batch, see docs/determinism.md",
    },
    "count-expert-load": {
        "action": "store_true",
        "help": "count how many tokens go to each expert, see docs/distributed.md",
    },
    "compile": {
        "action": "store_const",
        "const": COMPILATION,
        "dest": "compilation_config",
        "help": "torch.compile around the model: a longer start, see docs/start.md",
    },
    "no-compile": {
        "action": "store_const",
        "const": NO_COMPILATION,
        "dest": "compilation_config",
        "help": "no torch.compile, which models that run through transformers on a GPU have by default",
    },
    "speculative": {
        "dest": "speculative_config",
        "metavar": "METHOD:K",
        "help": "guess K tokens a step and verify them at once: ngram:4 guesses what followed the last tokens before",
    },
    "draft": {
        "dest": "speculative_config",
        "type": parse_draft,
        "metavar": "MODEL[:K]",
        "help": "let a smaller model of the same vocabulary guess K tokens a step (default: 4)",
    },
    "speculative-config": {"metavar": "JSON", "help": "the same with vLLM's keys, see docs/speculation.md"},
    "structured-outputs-backend": {
        "choices": STRUCTURED_OUTPUTS_BACKENDS,
        "help": "what holds outputs to a form: xgrammar (default) or guidance, see docs/decoding.md",
    },
    "structured-outputs-config": {
        "metavar": "JSON",
        "help": "the same with vLLM's keys, of which only backend has other values than its default",
    },
    "step-timeout": {"type": float, "metavar": "S", "help": "seconds that a GPU may take for a step (default: 300)"},
    "kernel-cache": {"metavar": "DIR", "help": "folder that `tritonllm precompile` made"},
    "allow-nan": {
        "action": "store_true",
        "help": "load weights that are NaN or infinite, which are an error otherwise",
    },
    "trust-remote-code": {"action": "store_true", "help": "download and run Python code that comes with the model"},
}

# Of what listens to clients: the server and the router.
LIMITS: dict[str, dict[str, Any]] = {
    "max-concurrency": {"type": int, "metavar": "N", "help": "most requests answered at once (default: 4096)"},
    "max-body-bytes": {"type": int, "metavar": "N", "help": "longest body of a request (default: 16 MiB)"},
    "max-header-bytes": {
        "also": "--h11-max-incomplete-event-size",
        "type": int,
        "metavar": "N",
        "help": "longest request line and headers of a request, together, in bytes (default: 65536)",
    },
    "max-header-count": {
        "also": "--h11-max-header-count",
        "type": int,
        "metavar": "N",
        "help": "most headers of a request (default: 256)",
    },
    "header-timeout": {
        "type": float,
        "metavar": "S",
        "help": "how long a client may take to send them (default: 30)",
    },
}


def add_options(group: Any, options: dict[str, dict[str, Any]]) -> None:
    """An option that is not given leaves no trace, so that the engine's own default holds."""
    for name, keywords in options.items():
        spellings = [f"--{name}", *filter(None, [keywords.get("also")])]
        others = {key: value for key, value in keywords.items() if key != "also"}
        group.add_argument(*spellings, default=argparse.SUPPRESS, **others)


def given(args: argparse.Namespace, options: dict[str, dict[str, Any]]) -> dict[str, Any]:
    names = [keywords.get("dest", name.replace("-", "_")) for name, keywords in options.items()]
    return {name: getattr(args, name) for name in names if hasattr(args, name)}

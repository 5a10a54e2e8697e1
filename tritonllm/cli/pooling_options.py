"""Options of models that embed or classify, which several commands have."""

from typing import Any

from tritonllm.config.engine import CONVERSIONS, RUNNERS

# Option -> keywords of add_argument; the name is that of LLM's argument. See docs/pooling.md.
POOLING: dict[str, dict[str, Any]] = {
    "runner": {"choices": RUNNERS, "help": "generate or pooling refuses the other; auto (default) takes both"},
    "convert": {"choices": CONVERSIONS, "help": "embed without a classifier's head, or classify (default: auto)"},
    "pooler-config": {"metavar": "JSON", "help": 'how to pool, \'{"pooling_type": "MEAN"}\' say'},
}

"""``block_size`` is the keys in a block of one rank's cache, ``block_tokens`` the tokens of a block over all ranks."""

import re
from pathlib import Path

import tritonllm
from tritonllm.config.engine import EngineConfig

PACKAGE = Path(tritonllm.__file__).parent
# What plans, counts and routes knows blocks of whole sequences. Only these have a rank's memory before them, or an
# option of the user's.
ONE_RANK = ("kernels", "config", "engine/cache", "engine/start/arg_utils.py", "teach/tutorial")
NAMED_TO_USERS = (
    "weights, dtype or block_size?",
    "cannot be sent: lower block_size",
    "block_size={block_tokens} must divide",
    "take another block_size, or",
    "weight_block_size",  # of a quantization_config
)


def test_ranks_that_split_keys_have_a_block_together():
    split = {"tensor_parallel_size": 4, "decode_context_parallel_size": 2}
    for more, tokens in (({}, 8), ({"tensor_parallel_size": 4}, 8), (split, 16)):
        config = EngineConfig.from_kwargs(model="m", block_size=8, **more)
        assert (config.cache.block_size, config.block_tokens) == (8, tokens)


def test_what_counts_tokens_of_all_ranks_never_says_block_size():
    for file in PACKAGE.rglob("*.py"):
        path, text = file.relative_to(PACKAGE).as_posix(), file.read_text()
        if path.startswith(ONE_RANK):
            continue
        for words in NAMED_TO_USERS:
            text = text.replace(words, "")
        assert not re.search(r"\bblock_size|_block_size", text), (
            f"{path}: block_tokens, or does it mean one rank's cache?"
        )

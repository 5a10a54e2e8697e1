"""Engines that share blocks of the cache by a connector, and prompts whose tokens need not be computed twice."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from support.engines import always_load, greedy, tiny_llm, token_ids
from support.tiny_models import random_tokens
from support.tiny_tokenizer import VOCAB_SIZE
from support.waiting import PATIENCE
from tritonllm import LLM, SamplingParams

ROOM = 0.001  # GiB: some hundred tiny blocks
PROMPTS = [random_tokens(length, VOCAB_SIZE, seed=length) for length in (23, 9, 14, 30, 5, 21)]
FULL = [(len(prompt) - 1) // 4 * 4 for prompt in PROMPTS]  # tokens that need not be computed


@cache
def computed_alone() -> list[list[int]]:
    """16 tokens behind each of ``PROMPTS``, by an engine that shares nothing and keeps nothing."""
    llm = tiny_llm(num_blocks=64, max_num_seqs=1, enable_prefix_caching=False)
    return token_ids(llm.generate(PROMPTS, greedy(16), use_tqdm=False))


def connected_llm(
    connector: str, role: str, settings: dict[str, Any], checkpoint: Path | None = None, **more: Any
) -> LLM:
    """An engine with a connector that loads whatever it finds; ``more`` are other arguments of ``LLM``."""
    transfer = {"kv_connector": connector, "kv_role": role, "kv_connector_extra_config": settings}
    return always_load(tiny_llm(checkpoint, **{"kv_offloading_size": ROOM, "kv_transfer_config": transfer, **more}))


def run_prompts(llm: LLM, params: SamplingParams | list[SamplingParams] | None = None) -> tuple[Any, list[int | None]]:
    """The tokens behind ``PROMPTS``, by default 16 greedy ones each, and how many tokens of each were not computed."""
    outputs = llm.generate(PROMPTS, params or greedy(16), use_tqdm=False)
    return token_ids(outputs), [output.num_cached_tokens for output in outputs]


def all_slots_are_back(llm: LLM) -> bool:
    """A connector that has been closed, or has answered all, holds none of the tier's slots."""
    transfer = llm.engine._transfer
    transfer.follow(0.0)
    return not llm.engine._scheduler.tier._lent


@contextmanager
def peer_engines() -> Iterator[Callable[..., LLM]]:
    """``start(role)`` makes an engine with a :class:`~tritonllm.engine.transfer.peer.Peer`, whose settings it takes by
    name, and the engine's in ``engine``; when all are closed, all slots are back and no thread is left."""
    before, made = set(threading.enumerate()), []

    def start(
        role: str,
        checkpoint: Path | None = None,
        timeout: float = PATIENCE,
        engine: dict[str, Any] | None = None,
        **extra: Any,
    ) -> LLM:
        settings = {"peers": ["127.0.0.1"], "timeout": timeout, "wait": PATIENCE, **extra}
        made.append(connected_llm("Peer", role, settings, checkpoint, **(engine or {})))
        return made[-1]

    yield start
    for llm in made:
        transfer = llm.engine._transfer
        transfer.connector.close()
        assert all_slots_are_back(llm) and not transfer._asking
        stats = llm.engine.stats
        assert stats.num_free_blocks == stats.num_blocks
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("kv-peer"):
            thread.join(PATIENCE)
            assert not thread.is_alive(), thread


def wish(max_tokens: int, **params: Any) -> SamplingParams:
    return greedy(max_tokens, extra_args={"kv_transfer_params": params})


def prefill(llm: LLM) -> list[dict[str, Any]]:
    """What a prefill server's answers say, for each of ``PROMPTS``."""
    outputs = llm.generate(PROMPTS, wish(1, do_remote_decode=True), use_tqdm=False)
    return [output.kv_transfer_params for output in outputs]


def decode(llm: LLM, offers: Sequence[dict[str, Any]]) -> tuple[Any, list[int | None]]:
    """As :func:`run_prompts`, by an engine that may bring their blocks from there."""
    return run_prompts(llm, [wish(16, **offer) for offer in offers])

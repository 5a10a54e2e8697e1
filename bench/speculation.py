"""How much faster an engine is with drafts of a set acceptance than one without, and what a step that verifies costs.

The drafter knows the greedy text that comes and errs at a rate (bench/known_texts.py). An engine without drafts
generates that text first. In bfloat16 kernels of other shapes round differently, and a model of random weights has
tokens that are as good as equally likely: its text would change between the engines. So these weights are made to have
one text (:func:`make_certain`), which costs a step nothing: with 4 drafts and an acceptance of 0.8, 2.36 are accepted.

Where a model drafts, its weights are made to have the same text but for a part of the tokens, behind which it errs.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from bench.engine_workloads import Request, truncated
from bench.known_texts import KnownTexts, drafter_of

DRAFTS, ACCEPTANCE = 4, 0.8
QUIET = 2.0**-12  # of what the layers add to the stream: far less than the embeddings that they add it to
STEP = 7919  # from a token to the one that follows it
PLAIN: dict[str, Any] = {"gpu_memory_utilization": 0.4}  # two engines share the GPU


def with_drafts(draft: Path | None) -> dict[str, Any]:
    """Options of the engine with drafts.

    Args:
        draft: the draft model's folder; ``None``: a drafter that knows the texts.
    """
    config: dict[str, Any] = {"method": "bench.known_texts:make", "num_speculative_tokens": DRAFTS}
    if draft is not None:
        config |= {"method": "draft_model", "model": str(draft), "adaptive": False}
    return {"gpu_memory_utilization": 0.8, "speculative_config": config}


class Engine(Protocol):
    """What :class:`bench.engine_worker.Engine` has."""

    llm: Any

    def generate(self, batch: Sequence[Request]) -> tuple[Any, list[list[int]]]:
        """How long requests take, and their tokens."""


def make_certain(llm: Any) -> None:
    """Let each token be followed by the one ``STEP`` ids behind it, by far; a draft model errs at its rate.

    Raises:
        ValueError: a projection that is the embedding table itself.
    """
    models = llm.engine._runner.caches.models
    for model, acceptance in zip(models, (1.0, ACCEPTANCE), strict=False):
        _follow_one_text(model, acceptance)


def _follow_one_text(model: Any, acceptance: float) -> None:
    """The stream stays nearly the last token's embedding, and the output projection has that row for the next token.
    Of the part that is to err it has none, so some other token follows."""
    if model.lm_head is model.embed:
        raise ValueError("the model must have an output projection of its own")
    with torch.inference_mode():
        for layer in model.layers:
            for product in (layer.attention.o, layer.mlp.down):
                product.weight.mul_(QUIET)
        errs = torch.rand(len(model.embed.weight), generator=torch.Generator().manual_seed(0)) >= acceptance
        model.lm_head.weight.copy_(model.embed.weight.roll(STEP, 0))
        model.lm_head.weight[errs.to(model.lm_head.weight.device)] = 0


def decode(engine: Engine, batch: Sequence[Request]) -> tuple[float, int, list[list[int]]]:
    """Seconds and steps from the first tokens to the last ones, and the tokens. The prompts have been seen before."""
    before = engine.llm.engine.stats.steps
    first, _ = engine.generate(truncated(batch, 1))
    between = engine.llm.engine.stats.steps
    whole, tokens = engine.generate(batch)
    steps = engine.llm.engine.stats.steps - between - (between - before)
    return whole.seconds - first.seconds, steps, tokens


def compare_with_plain(engine: Engine, plain: Engine, batch: list[Request]) -> dict[str, float]:
    """One repetition of a workload with drafts: the row's numbers."""
    plain.generate(batch)  # the prompts are cached from here on, in both engines
    plain_seconds, plain_steps, tokens = decode(plain, batch)
    drafter = drafter_of(engine.llm)
    if isinstance(drafter, KnownTexts):
        drafter.know([[*r.prompt, *ids] for r, ids in zip(batch, tokens, strict=True)], ACCEPTANCE)
    _, found = engine.generate(batch)
    if found != tokens:
        raise RuntimeError("drafts have changed the text: no result")
    before = engine.llm.engine.stats
    seconds, steps, _ = decode(engine, batch)
    after = engine.llm.engine.stats
    drafts = max(1, after.num_drafts - before.num_drafts)
    each = batch[0].max_tokens - 1
    return {
        "value": 1e3 * seconds / each,
        "seconds": seconds,
        "plain_value": 1e3 * plain_seconds / each,
        "times_plain": plain_seconds / seconds,
        "step_ratio": (seconds / steps) / (plain_seconds / plain_steps),
        "steps": steps,
        "plain_steps": plain_steps,
        "accepted_a_step": (after.num_accepted_tokens - before.num_accepted_tokens) / drafts,
    }

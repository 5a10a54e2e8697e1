"""How much faster an engine is with drafts of a set acceptance than one without, and what a step that verifies costs.

The drafter knows the greedy text that comes and errs at a rate (bench/known_texts.py). An engine without drafts
generates that text first. In bfloat16 the two engines' kernels round differently, and a random model has tokens that
are as good as equally likely: where a text changes there, the drafter is told the new one, and it is generated again.
What is left of such changes shows in ``accepted_a_step``: with an acceptance of 0.8 and 4 drafts 2.36 are expected.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from bench.engine_workloads import Request, truncated
from bench.known_texts import drafter_of

DRAFTS, ACCEPTANCE = 4, 0.8
ROUNDS = 6  # of generating with drafts until the text stays as it is
PLAIN: dict[str, Any] = {"gpu_memory_utilization": 0.4}  # two engines share the GPU
WITH_DRAFTS: dict[str, Any] = {
    "gpu_memory_utilization": 0.8,
    "speculative_config": {"method": "bench.known_texts:make", "num_speculative_tokens": DRAFTS},
}


class Engine(Protocol):
    """What :class:`bench.engine_worker.Engine` has."""

    llm: Any

    def generate(self, batch: Sequence[Request]) -> tuple[Any, list[list[int]]]:
        """How long requests take, and their tokens."""


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
    drafter, changed = drafter_of(engine.llm), 0
    for _ in range(ROUNDS):
        drafter.know([[*r.prompt, *ids] for r, ids in zip(batch, tokens, strict=True)], ACCEPTANCE)
        _, found = engine.generate(batch)
        changed = sum(a != b for a, b in zip(found, tokens, strict=True))
        tokens = found
        if not changed:
            break
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
        "texts_that_changed": changed,
    }

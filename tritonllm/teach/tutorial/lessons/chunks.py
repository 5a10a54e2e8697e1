"""Lesson 5: a long prompt shares its steps with those who are writing."""

import time
from collections.abc import Iterator

from tritonllm.teach.tutorial.lab import STORY, Lab, part_of
from tritonllm.teach.tutorial.lesson import LessonQuestion, Number, Say, Step, ValueTable

BUDGET = 32
PROMPT = 128  # a multiple of BUDGET, so that one token less in a step makes one step more


def steps() -> Iterator[Step]:
    yield Say(
        f"""
        Two kinds of work meet in an engine. A decode computes one token of a sequence, and the GPU spends its time
        reading weights. A prefill computes a whole prompt, thousands of tokens perhaps, and the GPU spends its time
        multiplying. If both were taken in turns, everybody who is reading an answer would see it stall when somebody
        else sends a long prompt.

        Attention to a cache makes another way possible. The keys of a prompt's first tokens can be computed in one step
        and those of the next tokens in another: what comes later finds the earlier keys in the cache. So a prompt can
        be cut into chunks. An engine gives each step a budget of tokens (`max_num_batched_tokens`). The decodes take
        one each, and a chunk of a prompt fills the rest.

        Here the budget is {BUDGET} tokens, and a prompt of {PROMPT} tokens comes to an idle engine.
        """
    )
    alone = _engine(BUDGET)
    alone.add("prompt", _prompt(alone), 1)
    by_itself = len(alone.run())
    yield LessonQuestion(
        "How many steps does the prompt take until its first new token is drawn?",
        Number(
            by_itself,
            traps={
                1: f"A step computes at most {BUDGET} tokens.",
                by_itself + 1: "The step that computes the last chunk draws the first token, too.",
            },
        ),
        [f"{PROMPT} / {BUDGET}"],
        f"{by_itself} chunks of {BUDGET} tokens. Only the last one has a row from which a token is drawn.",
    )
    lab, seconds = _beside(BUDGET)
    chunks = [step for step in lab.steps if "prompt" in {part.sequence_id for part in step.parts}]
    until_first = _steps_to_first(lab)
    yield LessonQuestion(
        "Now the same prompt comes while another request is writing: in every step that one needs a token. How many "
        "steps does the prompt take now?",
        Number(
            until_first,
            traps={
                by_itself: f"One of the {BUDGET} tokens of each step is taken by the request that writes.",
                by_itself * 2: "They share each step; nobody takes turns.",
            },
        ),
        [f"{BUDGET - 1} tokens of each step are left for the prompt."],
        f"""
        Each step has {BUDGET - 1} tokens left for the prompt, and {PROMPT} / {BUDGET - 1} is a little more than
        {by_itself}. The last step computes the rest, {part_of(chunks[until_first - 1], "prompt").num_tokens} tokens.
        """,
    )
    yield ValueTable(
        "tokens of each step, as the engine planned them",
        ("step", "writer", "prompt", "together"),
        [
            (i, part_of(s, "writer").num_tokens, part_of(s, "prompt").num_tokens, s.num_tokens)
            for i, s in enumerate(chunks[: until_first + 1], 1)
        ],
    )
    yield from _stall(lab, seconds)


def _stall(lab: Lab, seconds: list[float]) -> Iterator[Step]:
    whole, whole_seconds = _beside(8192)
    largest = max(step.num_tokens for step in whole.steps)
    yield LessonQuestion(
        "Both ran again with a budget of 8192 tokens, so that nothing has to be cut. How many tokens had the "
        "largest step?",
        Number(
            largest,
            traps={
                PROMPT: "The writer is in that step, too.",
                8192: "The budget is a limit. There were not so many tokens to compute.",
                BUDGET: "That was the limit before.",
            },
        ),
        ["In one step the whole prompt was computed, and the writer's token beside it."],
        f"{PROMPT} of the prompt and 1 of the writer. The writer waited for all of them.",
    )
    yield ValueTable(
        "both budgets, measured on this machine just now",
        ("budget", "steps to the prompt's first token", "tokens of the largest step", "longest wait of the writer, ms"),
        [
            (BUDGET, _steps_to_first(lab), max(step.num_tokens for step in lab.steps[1:]), 1e3 * max(seconds)),
            (8192, _steps_to_first(whole), largest, 1e3 * max(whole_seconds)),
        ],
    )
    yield Say(
        """
        That is the trade. Small chunks keep the gaps between the writer's tokens short, but the prompt waits longer for
        its first token: each step reads all weights again. Large chunks are the other way round. On a GPU some hundred
        tokens are computed in the time in which the weights are read anyway, so a chunk of that size beside decodes is
        nearly free. This engine takes chunks of 256 tokens beside decodes, even if the budget is larger, and larger
        ones only if many prompts wait (`engine/schedule/prompt_budget.py` says why).
        """
    )


def _engine(budget: int) -> Lab:
    return Lab(max_num_batched_tokens=budget, max_num_seqs=4, enable_prefix_caching=False)


def _prompt(lab: Lab) -> list[int]:
    return lab.tokens(STORY + STORY)[:PROMPT]


def _beside(budget: int) -> tuple[Lab, list[float]]:
    """A request writes, and the prompt comes after its third token; also the seconds of each step from then on."""
    lab = _engine(budget)
    lab.add("writer", "Once upon a time", 16)
    for _ in range(3):
        lab.step()
    lab.add("prompt", _prompt(lab), 3)
    seconds = []
    while lab.llm.engine.has_unfinished_requests():
        begin = time.perf_counter()
        lab.step()
        seconds.append(time.perf_counter() - begin)
    return lab, seconds


def _steps_to_first(lab: Lab) -> int:
    """Steps with tokens of the prompt, up to the one that draws what follows it."""
    parts = [part for step in lab.steps for part in step.parts if part.sequence_id == "prompt"]
    return sum(part.start < PROMPT for part in parts)

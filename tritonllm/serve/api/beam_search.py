"""Beam search over HTTP: ``use_beam_search`` and ``length_penalty`` of a completion, as vLLM has them."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from tritonllm.config.beam_search_params import BeamSearchParams
from tritonllm.config.sampling_params import ALL, SamplingParams
from tritonllm.engine.data.outputs import CompletionOutput, Logprobs
from tritonllm.serve.api.answering import Outputs
from tritonllm.serve.api.protocol import SAMPLING_FIELDS, SamplingBody

USED = ("n", "temperature", "ignore_eos", "include_stop_str_in_output", "stop_after_thought")
FORMS = ("response_format", "structured_outputs", "repetition_detection")


def search_params(body: SamplingBody, max_tokens: int) -> BeamSearchParams:
    """How to search for what the body asks for; ``n`` is the width, and the temperature changes nothing.

    Raises:
        ValueError: a field that a search cannot follow, at another value than its neutral one.
    """
    neutral = SamplingParams()
    for name in (*SAMPLING_FIELDS, *FORMS):
        value = getattr(body, name)
        if name in USED or value is None or value == getattr(neutral, name, None):
            continue
        if name not in ("response_format",) or value != {"type": "text"}:
            raise ValueError(f"{name}: a beam search does not follow it: leave it out, or leave out use_beam_search")
    return BeamSearchParams(
        beam_width=1 if body.n is None else body.n,
        max_tokens=max_tokens,
        ignore_eos=bool(body.ignore_eos),
        temperature=0.0 if body.temperature is None else body.temperature,
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
    )


async def with_logprobs(outputs: Outputs, count: int | None) -> AsyncGenerator[tuple[int, Any], None]:
    """The outputs of searches, which know more continuations of each token than were asked for.

    Args:
        count: how many of the most likely tokens to report at each position; -1: as many as the search knows; ``None``:
            no log-probabilities.
    """
    async with aclosing(outputs):
        async for index, output in outputs:
            for completion in output.outputs:
                if count != ALL:
                    completion.logprobs = None if count is None else _fewer(completion, count)
            yield index, output


def _fewer(completion: CompletionOutput, count: int) -> list[Logprobs]:
    """The chosen token of each position, and the most likely ones."""
    return [
        {token: entry for token, entry in position.items() if token == chosen or (entry.rank or 0) <= count}
        for chosen, position in zip(completion.token_ids, completion.logprobs or (), strict=False)  # none: aborted
    ]

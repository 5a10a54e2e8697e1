"""Tokens that a grammar forces follow without being drawn, and the next step computes them together. No torch.

Where a mask allows one token only, the draw can give no other. Such tokens are appended when the one before them comes,
and the request's next step is a chunk of several tokens that is sampled from at its end, as a prompt's is. So the text
is, token by token, what it would be without: nothing is tokenized anew, as it is where forced characters are appended
(Zheng et al., "SGLang", 2023, whose jump-forward this resembles).

Beside many requests jumps do not pay: with 64 schemas a step of Llama-3.1-8B takes 5.60 ms on an H200 with jumps and
5.41 without (5.23 without schemas), one of Qwen3-0.6B 4.14 and 3.52, since the host looks for forced tokens of all.

They could also be drafts, which a step verifies with certain success. But a step that verifies has as many tokens of
each of its sequences, so one request's forced tokens would cost all the others padding; and only an engine that was
started with drafts has such steps.

A step with a chunk takes longer than one of decodes alone: it has room for 64 tokens at least, attention to chunks is a
launch of its own, and the draw stands outside of the graph. A step with more chunks than the smallest graph has room
for takes longer still: its graph is for more tokens. So jumps come where few requests run, and only if the step gains
half as many tokens as run.

Steps are planned ahead, so when a token is known, the next one is on its way already. If more are forced behind it, the
request waits for it (``Request.jumps``) and jumps then: it is left out of one step, which costs it a token.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

from tritonllm.engine.data.plan import NewTokens
from tritonllm.engine.data.request import Request

MOST_RUNNING = 15  # requests that may jump at once: captured steps of few tokens have room for so many chunks
WORTH = 2  # the requests that run for each token that is gained, at most


class Appends(Protocol):
    """What a scheduler does."""

    @property
    def num_running(self) -> int:
        """Requests that run."""

    def append(self, request: Request, tokens: Sequence[int]) -> NewTokens:
        """Let tokens follow; returns those that did."""


def forced_tokens(request: Request) -> Sequence[int]:
    """What must follow the output of a request that has no more than one token in flight, that one among it.

    Nothing, if something else depends on each of its tokens being drawn: log-probabilities, or counts on the device.
    """
    params = request.params
    if request.status.is_finished or request.held or request.num_pending_tokens > 1 or len(request.controls) != 1:
        return ()
    if params.logprobs is not None or params.min_tokens or request.edits_logits or request.pooling is not None:
        return ()
    return request.controls[0].forced()[: request.length_limit - request.num_tokens]


def jump(requests: Iterable[Request], scheduler: Appends) -> list[NewTokens]:
    """Append what these requests' grammars force, or let them wait for it, if it pays.

    Args:
        requests: requests that got tokens in the last step; their controls have taken these tokens.
    """
    if scheduler.num_running > MOST_RUNNING:  # who waits for a jump goes on without it
        for request in requests:
            request.jumps = False
        return []
    jumping: list[tuple[Request, Sequence[int]]] = []
    gains: list[tuple[int, Request, Sequence[int]]] = []
    for request in requests:
        tokens, waited = forced_tokens(request), request.jumps
        request.jumps = False
        if waited and tokens and not request.num_pending_tokens:
            jumping.append((request, tokens))
            continue
        gain = len(tokens) - 2 * request.num_pending_tokens  # the one in flight, and one that is not drawn meanwhile
        if gain > 0:
            gains.append((gain, request, tokens))
    if WORTH * sum(gain for gain, _, _ in gains) >= scheduler.num_running:
        for _, request, tokens in gains:
            if request.num_pending_tokens:
                request.jumps = True
            else:
                jumping.append((request, tokens))
    return [scheduler.append(request, tokens) for request, tokens in jumping]

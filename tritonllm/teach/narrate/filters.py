"""What becomes of a row of logits before a token is drawn, stage by stage, as the sampler defines it.

The stages and their order are those of :func:`tritonllm.kernels.sample`, and the arithmetic is that of its references:
edits (penalties, then bans), the mask of a grammar, temperature, min-p, top-k, top-p.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from tritonllm.config.sampling_params import SamplingParams
from tritonllm.engine.data.edits import MAX_BAD_WORD, MAX_ENTRIES, SeatEdits, edits_of
from tritonllm.engine.data.request import Request
from tritonllm.kernels.sampling import clean_ref, keep_ref, limits_ref, scale_ref
from tritonllm.kernels.sampling.edits import ALWAYS, Entry, edit_logits_ref, make_logit_edits, write_seat

GREEDY = "greedy"


class FilterStage(NamedTuple):
    """What one rule did.

    Attributes:
        name: penalties, bans, grammar, temperature, min_p, top_k, top_p, or greedy.
        value: the rule's number; 0 for rules without one.
        before, left: how many tokens could be drawn before and after.
        changed: tokens whose logits it changed and that can still be drawn.
        probabilities: ``[V]`` float64, after it.
    """

    name: str
    value: float
    before: int
    left: int
    changed: int
    probabilities: torch.Tensor


@dataclass(frozen=True)
class FilterRow:
    """A row of logits on its way to a token.

    Attributes:
        model: ``[V]`` float64: the probabilities as the model has them.
        stages: the rules that apply, in their order.
    """

    model: torch.Tensor
    stages: tuple[FilterStage, ...]

    @property
    def final(self) -> torch.Tensor:
        """``[V]`` float64: the probabilities with which the token was drawn."""
        return self.stages[-1].probabilities if self.stages else self.model

    def dropped_by(self, token: int) -> str | None:
        """The stage that left the token no probability."""
        return next((stage.name for stage in self.stages if stage.probabilities[token] == 0), None)


def _edited(x: torch.Tensor, edits: SeatEdits, only_penalties: bool) -> torch.Tensor:
    state = make_logit_edits(1, x.shape[1], entries=MAX_ENTRIES, longest=MAX_BAD_WORD - 1, device="cpu")
    entries = [Entry(e.token, e.value, ALWAYS if e.until is None else e.until, e.after) for e in edits.entries]
    write_seat(
        state,
        0,
        prompt=edits.prompt,
        output=edits.output,
        repetition=edits.repetition,
        frequency=edits.frequency,
        presence=edits.presence,
        entries=() if only_penalties else entries,
        allowed=None if only_penalties else edits.allowed,
    )
    return edit_logits_ref(x, state, torch.tensor([0]), torch.tensor([len(edits.output)]))


class _Funnel:
    """Puts a row through its stages, and notes what each did. ``x`` is ``[1, V]`` float32."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x, self.keep, self.scale = x, x > -torch.inf, scale_ref(torch.ones(1))
        self.stages: list[FilterStage] = []

    def probabilities(self) -> torch.Tensor:
        x = self.x.double().masked_fill(~self.keep, -torch.inf)
        if not self.keep.any():
            return torch.zeros_like(x)[0]
        weights = torch.exp2((x - x.amax()) * self.scale.double()).masked_fill(~self.keep, 0)
        return (weights / weights.sum())[0]

    def stage(self, name: str, value: float, x: torch.Tensor | None = None, keep: torch.Tensor | None = None) -> None:
        before, old = self.keep, self.x
        self.x = old if x is None else x
        self.keep = before & (self.x > -torch.inf) if keep is None else before & keep
        changed = int((self.keep & (self.x != old)).sum())
        self.stages.append(
            FilterStage(name, value, int(before.sum()), int(self.keep.sum()), changed, self.probabilities())
        )

    def limit(self, name: str, params: SamplingParams) -> None:
        """min-p, top-k or top-p, after those before it: the sampler finds all their limits at once."""
        done = [stage.name for stage in self.stages] + [name]
        top_k = torch.tensor([params.top_k], dtype=torch.int32) if "top_k" in done else None
        top_p = torch.tensor([params.top_p]) if "top_p" in done else None
        min_p = torch.tensor([params.min_p]) if "min_p" in done else None
        threshold, last_tie, _ = limits_ref(self.x, self.scale, top_k, top_p, min_p)
        self.stage(name, float(getattr(params, name)), keep=keep_ref(self.x, threshold, last_tie))


def follow(
    logits: torch.Tensor,
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    mask: np.ndarray | None = None,
    eos_token_ids: frozenset[int] = frozenset(),
    bad_words: tuple[tuple[int, ...], ...] = (),
) -> FilterRow:
    """Repeat what the sampler did.

    Args:
        logits: ``[V]``, as the model gave them.
        params: the sampling parameters of the request.
        prompt, output: the tokens before.
        mask: ``[ceil(V / 32)]`` int32: what a grammar allows.
        eos_token_ids: tokens that end an output.
        bad_words: the bad words of the parameters, tokenized.
    """
    funnel = _Funnel(clean_ref(logits[None].cpu()))
    model = funnel.probabilities()
    _edit(funnel, params, prompt, output, eos_token_ids, bad_words)
    if mask is not None:
        bits = np.unpackbits(np.ascontiguousarray(mask).view(np.uint8), bitorder="little")[: len(logits)]
        allowed = torch.from_numpy(bits.astype(bool))[None]
        if not allowed.all():
            funnel.stage("grammar", 0, x=funnel.x.masked_fill(~allowed, -torch.inf))
    if params.greedy:
        best = torch.zeros_like(funnel.keep)
        best[0, funnel.x.argmax()] = True
        funnel.stage(GREEDY, 0, keep=best)
        return FilterRow(model, tuple(funnel.stages))
    if params.temperature != 1:
        funnel.scale = scale_ref(torch.tensor([params.temperature], dtype=torch.float32))
        funnel.stage("temperature", params.temperature)
    if params.min_p > 0:
        funnel.limit("min_p", params)
    if 0 < params.top_k < len(logits):
        funnel.limit("top_k", params)
    if params.top_p < 1:
        funnel.limit("top_p", params)
    return FilterRow(model, tuple(funnel.stages))


def _edit(
    funnel: _Funnel,
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    eos_token_ids: frozenset[int],
    bad_words: tuple[tuple[int, ...], ...],
) -> None:
    request = Request(
        "",
        list(prompt),
        params,
        max_total_tokens=len(prompt) + len(output) + 1,
        eos_token_ids=eos_token_ids,
        bad_words=bad_words,
        output_token_ids=list(output),
    )
    if not request.edits_logits and not params.min_tokens:
        return
    edits = edits_of(request, 0)
    whole = _edited(funnel.x, edits, only_penalties=False)
    if (edits.repetition, edits.frequency, edits.presence) != (1, 0, 0):
        funnel.stage("penalties", 0, x=_edited(funnel.x, edits, only_penalties=True))
    if not torch.equal(whole, funnel.x):
        funnel.stage("bans", 0, x=whole)

"""Events become acts: what is told of a run, in which order, and what is left out. No words, and nothing is printed.

A step is told when its results are in. The first steps are told in full; later ones get a line, unless something
happens in them that was not told before. A lesson explains a thing when it first comes up.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tritonllm.config.sampling_params import SamplingParams
from tritonllm.events import (
    EngineReset,
    Event,
    NewTokens,
    RequestAdded,
    RequestFinished,
    StepFinished,
    StepPlanned,
    StepRestricted,
    TokensForced,
)
from tritonllm.teach.narrate.acts import Act, Count, Line, Said
from tritonllm.teach.narrate.cast import Cast
from tritonllm.teach.narrate.choices import SHOWN, EngineLimits, decodes, preempted, prefills, scheduled
from tritonllm.teach.narrate.draws import from_logprobs, from_row
from tritonllm.teach.narrate.pieces import TokenReader
from tritonllm.teach.narrate.recorder import DrawRecorder, Recorded
from tritonllm.teach.narrate.tables import block_news, block_tables
from tritonllm.teach.narrate.totals import Totals

Masks = dict[str, np.ndarray]  # of sequences


class Detail(NamedTuple):
    """How much is told in full.

    Attributes:
        prompts: how many prompts' tokens are shown.
        prefills: how many steps are told that bring no token.
        steps: how many steps are told that bring tokens.
        draws: how many of each such step's tokens are told with their candidates.
        news: how often a later step tells of the same kind of thing.
    """

    prompts: int = 3
    prefills: int = 2
    steps: int = 4
    draws: int = 2
    news: int = 3


@dataclass
class LeftOut:
    """What was not told."""

    prompts: int = 0
    steps: int = 0
    draws: int = 0
    news: int = 0
    ends: int = 0


class Story:
    """Makes the narration of an engine's events.

    Args:
        tokenizer: the tokenizer of the model, or ``None``.
        eos_token_ids: tokens that end an output.
        limits: the limits of the engine.
        recorder: the recorder of logits, if there is one.
        chat: whether the prompts went through a chat template.
        detail: how much is told.
        evicted: how many blocks had been evicted before.

    Attributes:
        totals: sums of what happened.
        left_out: how much of what happened was not told.
    """

    def __init__(
        self,
        tokenizer: Any,
        eos_token_ids: frozenset[int],
        limits: EngineLimits,
        recorder: DrawRecorder | None = None,
        *,
        chat: bool = False,
        detail: Detail | None = None,
        evicted: int = 0,
    ) -> None:
        self.totals, self.left_out = Totals(), LeftOut()
        self._reader, self._cast = TokenReader(tokenizer), Cast(tokenizer, eos_token_ids)
        self._limits, self._recorder, self._chat = limits, recorder, chat
        self._detail = detail or Detail()
        self._evicted_first = self._evicted = evicted
        self._planned: dict[int, tuple[StepPlanned, int]] = {}  # not finished yet; with how many blocks it evicted
        self._masks: dict[int, Masks] = {}
        self._said: set[str] = set()
        self._news: dict[str, int] = {}
        self._full_prefills = self._full_steps = self._ends = 0

    def tell(self, event: Event) -> list[Act]:
        """What an event adds to the narration."""
        self.totals.add(event, self._evicted_first)
        match event:
            case RequestAdded():
                return self._tell_prompt(event)
            case StepPlanned():
                self._planned[event.step] = event, event.evicted_blocks - self._evicted
                self._evicted = event.evicted_blocks
            case StepRestricted():
                self._masks[event.step] = dict(event.masks)
            case StepFinished():
                return self._tell_step(event)
            case TokensForced():
                self._cast.add(event.tokens)
                return [Act("brief", None, (*self._lessons("forced"), *map(self._forced, event.tokens)))]
            case RequestFinished():
                return self._tell_end(event)
            case EngineReset():
                self._planned.clear()
                self._masks.clear()
                self._cast.clear()
                if self._recorder is not None:
                    self._recorder.take()  # of steps that never end
                return [Act("reset", Said("title_reset"), (Said("reset", {"reason": event.reason}),))]
        return []

    @property
    def unfinished(self) -> list[StepPlanned]:
        """Steps that were told to be planned, and not yet to be finished."""
        return [step for step, _ in self._planned.values()]

    def _lessons(self, *names: str) -> list[Said]:
        new = [name for name in names if name not in self._said]
        self._said.update(new)
        values = {
            "size": Count(self._limits.block_tokens),
            "seats": Count(self._limits.seats),
            "blocks": Count(self._limits.num_blocks),
        }
        return [Said(f"lesson_{name}", values, lesson=True) for name in new]

    def _tell_prompt(self, event: RequestAdded) -> list[Act]:
        name, tokens = self._cast.enter(event), event.prompt_token_ids
        if self.totals.requests > self._detail.prompts:
            self.left_out.prompts += 1
            return []
        lines: list[Line] = [*self._lessons("tokens", *(["chat"] if self._chat else []))]
        lines += [Said("prompt", {"name": name, "tokens": Count(len(tokens))}), self._reader.pieces(tokens)]
        if len(event.sequence_ids) > 1:
            lines.append(Said("continuations", {"name": name, "count": Count(len(event.sequence_ids))}))
        title = Said("title_tokens") if self.totals.requests == 1 else None
        return [Act("tokens", title, tuple(lines))]

    def _tell_step(self, event: StepFinished) -> list[Act]:
        planned, recorded = self._planned.pop(event.step, None), []
        if self._recorder is not None:
            recorded = self._recorder.take()
        masks = self._masks.pop(event.step, {})
        if planned is None:  # it was planned before anybody listened
            self._cast.add(event.tokens)
            return []
        step, evicted = planned
        news = block_news(step, self._limits.block_tokens, self._cast.name, evicted, caches=self._limits.caches)
        if self._in_full(step, {kind for kind, _ in news}):
            rows = self._cast.rows(step.parts, recorded)
            act = self._full(step, event, news, rows, masks)
        else:
            self.left_out.steps += 1
            act = self._brief(step, event, news)
        self._cast.add(event.tokens)
        for part in step.parts:
            player = self._cast.get(part.sequence_id)
            if player is not None:
                player.came = True
        return [act]

    def _in_full(self, step: StepPlanned, news: set[str]) -> bool:
        kinds = {*news, *(part.kind for part in step.parts), *(["preempted"] if step.preempted else [])}
        surprising = not kinds <= self._news.keys()
        draws = any(part.samples for part in step.parts)
        told, most = (self._full_steps, self._detail.steps) if draws else (self._full_prefills, self._detail.prefills)
        full = surprising or told < most
        if full:
            self._full_steps += draws
            self._full_prefills += not draws
        if self._recorder is not None:
            self._recorder.awake = self._full_steps < self._detail.steps
        for kind in kinds:
            self._news.setdefault(kind, 0)
        return full

    def _full(
        self,
        step: StepPlanned,
        event: StepFinished,
        news: list[tuple[str, Said]],
        rows: dict[str, Recorded],
        masks: Masks,
    ) -> Act:
        queue = {"running": Count(step.num_running), "waiting": Count(step.num_waiting)}
        lines: list[Line] = [Said("head_scheduler", queue)]
        lines += scheduled(step, self._cast, self._limits, _verified(event), self._lessons)
        lines += [Said("head_blocks"), *self._lessons("blocks")]
        for kind, said in news:
            if kind != "allocated":
                lines += self._lessons(kind)
            lines.append(said)
        filled = {p.sequence_id: self._cast.known(p) for p in step.parts if p.kind == "verify"}
        for new in event.tokens:
            if new.sequence_id in filled:
                filled[new.sequence_id] += new.accepted
        lines += block_tables(step, self._limits.block_tokens, self._cast.name, filled)
        used = step.num_blocks - step.num_free_blocks
        values = {"used": Count(used), "blocks": Count(step.num_blocks), "cached": Count(step.num_cached_blocks)}
        lines.append(Said("pool" if step.num_cached_blocks else "pool_plain", values))
        lines += self._draws(event, rows, masks)
        return Act("step", Said("title_step", {"step": step.step}), tuple(lines))

    def _draws(self, event: StepFinished, rows: dict[str, Recorded], masks: Masks) -> list[Line]:
        lines: list[Line] = []
        rest: list[NewTokens] = []
        shown = verdicts = 0
        for new in event.tokens:
            player = self._cast.get(new.sequence_id)
            if player is None or not new.token_ids:
                continue
            recorded, room = rows.get(new.sequence_id), self._detail.draws - shown
            verdicts += new.drafts > 0
            if new.drafts and verdicts <= SHOWN:
                lines.append(self._verdict(new))
            if recorded is not None and isinstance(player.params, SamplingParams) and room > 0:
                shown += 1
                row = self._cast.follow(player, recorded, masks.get(new.sequence_id))
                lines += from_row(player.name, row, new.token_ids[0], self._reader, player.params, self._said)
            elif new.logprobs and room > 0:
                for token, scores in [*zip(new.token_ids, new.logprobs, strict=False)][:room]:
                    shown += 1
                    lines += from_logprobs(player.name, token, scores, self._reader, self._said)
            else:
                self.left_out.draws += len(new.token_ids)
                rest.append(new)
        if rest:
            alone = {"name": self._cast.name(rest[0].sequence_id), "text": self._reader.text(rest[0].token_ids)}
            lines.append(Said("got", alone) if len(rest) == 1 else Said("got_more", {"got": self._got(rest)}))
        return [Said("head_draw"), *lines] if lines else [Said("head_draw"), *self._lessons("no_draw"), Said("no_draw")]

    def _verdict(self, new: NewTokens) -> Said:
        right = new.token_ids[: new.accepted]
        values = {
            "name": self._cast.name(new.sequence_id),
            "drafts": Count(new.drafts),
            "accepted": Count(new.accepted),
            "refused": Count(new.drafts - new.accepted),
            "right": self._reader.text(right),
            "own": self._reader.text(new.token_ids[new.accepted :]),
        }
        if len(new.token_ids) <= new.accepted:  # the output ended among the guesses
            return Said("verdict_ended", values)
        if not new.accepted:
            return Said("verdict_none", values)
        return Said("verdict_all" if new.accepted == new.drafts else "verdict_some", values)

    def _forced(self, new: NewTokens) -> Said:
        values = {"name": self._cast.name(new.sequence_id), "tokens": Count(len(new.token_ids))}
        return Said("forced", values | {"text": self._reader.text(new.token_ids)})

    def _brief(self, step: StepPlanned, event: StepFinished, news: list[tuple[str, Said]]) -> Act:
        lines: list[Line] = [*self._lessons("brief")]
        got = [new for new in event.tokens if new.token_ids]
        self.left_out.draws += sum(len(new.token_ids) for new in got)
        values = {"step": step.step, "tokens": Count(step.num_tokens), "requests": Count(len(step.parts))}
        lines.append(Said("brief" if got else "brief_none", values | {"got": self._got(got)}))
        lines += self._brief_news(step, event, news)
        return Act("brief", None, tuple(lines))

    def _got(self, new: list[NewTokens]) -> list[str]:
        return [f"{self._cast.name(each.sequence_id)} {self._reader.text(each.token_ids)}" for each in new]

    def _brief_news(self, step: StepPlanned, event: StepFinished, news: list[tuple[str, Said]]) -> list[Said]:
        """What else happened in a step that gets a line, as long as it is not told too often."""
        found = [("prefill", said) for said in prefills(step, self._cast)]
        found += [("preempted", said) for said in preempted(step, self._cast.name, self._limits)]
        found += [(kind, said) for kind, said in news if kind not in ("allocated", "shared")]
        verifies = [said for said in decodes(step, self._cast, _verified(event)) if said.key == "verifies"]
        found += [("verify", said) for said in verifies]
        checked = [new for new in event.tokens if new.drafts and new.token_ids]
        found += [("verify", self._verdict(new)) for new in checked[:SHOWN]]
        told = []
        counted = set()
        for kind, said in found:
            if self._news.get(kind, 0) < self._detail.news or kind in counted:
                if kind not in counted:
                    counted.add(kind)
                    self._news[kind] = self._news.get(kind, 0) + 1
                told.append(said)
            else:
                self.left_out.news += 1
        return told

    def _tell_end(self, event: RequestFinished) -> list[Act]:
        name = self._cast.leave(event.request_id)
        self._ends += 1
        if self._ends > 2 * self._detail.prompts and event.error is None:
            self.left_out.ends += len(event.finish_reasons)
            return []
        lines: list[Line] = []
        many = len(event.finish_reasons) > 1
        ends = [*enumerate(zip(event.finish_reasons, event.num_output_tokens, strict=True), 1)]
        self.left_out.ends += max(0, len(ends) - SHOWN)
        for number, (reason, count) in ends[:SHOWN]:
            own = f"{name}.{number}" if many else name
            lines.append(Said(f"end_{reason or 'abort'}", {"name": own, "tokens": Count(count)}))
        if event.num_cached_tokens:
            lines.append(Said("end_cached", {"name": name, "cached": Count(event.num_cached_tokens)}))
        if event.num_preemptions:
            lines.append(Said("end_preempted", {"name": name, "times": Count(event.num_preemptions)}))
        if event.error is not None:
            lines.append(Said("end_why", {"error": event.error}))
        return [Act("end", None, tuple(lines))]

    def end(self) -> Act:
        """The last act: the totals, and what was left out."""
        totals, left = self.totals, self.left_out
        values = {name: Count(value) for name, value in vars(totals).items()}
        keys = ["total_requests", "total_steps"]
        keys += [
            key
            for key, there in (
                ("total_cached", totals.cached_tokens),
                ("total_blocks", totals.copied_blocks),
                ("total_evicted", totals.evicted_blocks),
                ("total_preemptions", totals.preemptions),
                ("total_host", totals.stored_blocks + totals.loaded_blocks),
                ("total_drafts", totals.draft_tokens),
                ("total_forced", totals.forced_tokens),
            )
            if there
        ]
        lines: list[Line] = [Said(key, values) for key in keys]
        if self.unfinished:
            lines.append(Said("total_vain", {"count": Count(len(self.unfinished))}))
        lines += [Said(f"left_{name}", {"count": Count(value)}) for name, value in vars(left).items() if value]
        return Act("totals", Said("title_totals"), tuple(lines))


def _verified(event: StepFinished) -> dict[str, int]:
    """The guesses that were checked for each sequence."""
    return {new.sequence_id: new.drafts for new in event.tokens}

"""The viewer of ``tritonllm generate --xray``."""

import statistics
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from tritonllm.events import (
    EngineReset,
    Event,
    RequestAdded,
    StepFinished,
    StepPlanned,
    TokensForced,
)
from tritonllm.teach.viewer import Params, Result
from tritonllm.teach.xray import draw, images
from tritonllm.teach.xray.lens import MOST_TOKENS, attention_pattern, logit_lens
from tritonllm.teach.xray.roofline import Roofline, measure
from tritonllm.teach.xray.stages import StageRecorder
from tritonllm.teach.xray.wishes import Wishes

PLAIN_WIDTH = 140  # where nobody's terminal says how wide it is
OPTIONS: Mapping[str, Any] = MappingProxyType(
    {"enforce_eager": True, "async_scheduling": False, "compilation_config": 0}
)


class XRay:
    """Watches the chosen steps and prints them; then draws what was asked for.

    Args:
        wishes: what is shown.
        console: where it is printed; by default the standard output, or the standard error beside ``--json``.
    """

    shows_text = True  # the text would grow between the tables
    engine_options = OPTIONS

    def __init__(self, wishes: Wishes, console: Console | None = None) -> None:
        self._wishes = wishes
        self._console = console
        self._recorder: StageRecorder | None = None
        self._planned: StepPlanned | None = None
        self._kinds: set[str] = set()  # those that were shown
        self._seen: set[int] = set()
        self._unwatched: dict[str, list[float]] = {}
        self._gone: BrokenPipeError | None = None
        self._followed: str | None = None  # the sequence that is drawn
        self._tokens: list[int] = []

    def adapt(self, params: Params) -> Params:
        return params

    def run(self, llm: Any, work: Callable[[], Result]) -> Result:
        """Do some work, and draw one of its steps.

        Raises:
            ValueError: what is to be drawn cannot be, as far as that is known before.
        """
        engine = llm.engine
        self._model, self._block_tokens = engine.model, engine.config.block_tokens
        self._device = next(self._model.parameters()).device
        if self._console is None:
            self._console = make_console(self._wishes.to_stderr)
        self._check(engine.config.parallel.world_size)
        self._roofline: Roofline = measure(self._device, self._model.dtype)
        draw.print_roofline(self._console, self._roofline)
        unsubscribe = engine.subscribe(self._hear)
        try:
            result = work()
        finally:
            unsubscribe()
            self._abandon()
        if self._gone is not None:
            raise self._gone
        self._print_totals()
        if self._tokens:
            self._draw(engine.tokenizer)
        return result

    def _check(self, ranks: int) -> None:
        wishes, model = self._wishes, self._model
        if ranks > 1 and (wishes.attention or wishes.lens):
            raise ValueError(
                "--xray-attention and --xray-logit-lens need one rank (tensor_parallel_size=1, "
                "pipeline_parallel_size=1): they run the model alone"
            )
        if wishes.attention is not None and wishes.attention[0] >= model.spec.num_layers:
            deepest = model.spec.num_layers - 1
            raise ValueError(f"--xray-attention: layer must be from 0 to {deepest}, got {wishes.attention[0]}")
        if ranks > 1:
            self._say(
                f"This is rank 0 of {ranks}: its part of each layer. Sums over the ranks are not operations here."
            )

    def _hear(self, event: Event) -> None:
        if self._gone is None:
            try:
                self._take_in(event)
            except BrokenPipeError as error:  # whoever read the tables has seen enough
                self._gone = error

    def _take_in(self, event: Event) -> None:
        if isinstance(event, StepPlanned):
            self._planned = event
            if self._wanted(event):
                self._recorder = StageRecorder(self._model, self._device)
                self._recorder.begin()
        elif isinstance(event, StepFinished):
            self._finished(event)
        elif isinstance(event, EngineReset):
            self._abandon()
        elif isinstance(event, RequestAdded) and self._followed is None:
            self._followed, self._tokens = event.sequence_ids[0], list(event.prompt_token_ids)
        if isinstance(event, StepFinished | TokensForced):
            for new in event.tokens:
                if new.sequence_id == self._followed:
                    self._tokens += new.token_ids

    def _wanted(self, step: StepPlanned) -> bool:
        kind = kind_of(step)
        if self._wishes.steps is not None:
            return step.step in self._wishes.steps
        wanted = kind not in self._kinds
        self._kinds.add(kind)
        return wanted

    def _finished(self, event: StepFinished) -> None:
        planned, recorder = self._planned, self._recorder
        self._recorder = None
        if planned is None:
            return
        if recorder is None:
            began = planned.time - planned.seconds
            self._unwatched.setdefault(kind_of(planned), []).append(event.time - began)
            return
        assert self._console is not None
        self._seen.add(planned.step)
        draw.print_step(self._console, planned, recorder.end(), self._roofline, self._block_tokens)

    def _abandon(self) -> None:
        if self._recorder is not None:
            self._recorder.abandon()
            self._recorder = None

    def _print_totals(self) -> None:
        for kind, times in self._unwatched.items():
            median = draw.duration(statistics.median(times))
            self._say(
                f"Not watched, a {kind} step took {median} (median of {len(times)}), from its plan to its tokens."
            )
        missed = sorted(set(self._wishes.steps or ()) - self._seen)
        if missed:
            self._say(f"There was no step {', '.join(map(str, missed))}.")

    def _draw(self, tokenizer: Any) -> None:
        """Files that cannot be drawn are told of: the texts are there, and the command has done its work."""

        def spell(token: int) -> str:
            return f"#{token}" if tokenizer is None else tokenizer.decode([token])

        for wanted, drawing in ((self._wishes.attention, self._draw_attention), (self._wishes.lens, self._draw_lens)):
            if wanted is None:
                continue
            try:
                drawing(spell)
                self._say(f"Wrote {wanted[-1]}.")
            except (ValueError, OSError, torch.OutOfMemoryError) as error:
                self._say(f"Could not write {wanted[-1]}: {error}")

    def _draw_attention(self, spell: images.Spell) -> None:
        assert self._wishes.attention is not None
        layer, head, file = self._wishes.attention
        tokens = self._tokens[:MOST_TOKENS]
        weights = attention_pattern(self._model, self._device, tokens, layer, head)
        which = "mean of all heads" if head is None else f"head {head}"
        images.draw_attention(weights, tokens, spell, f"attention of layer {layer}, {which}", file)

    def _draw_lens(self, spell: images.Spell) -> None:
        assert self._wishes.lens is not None
        position, file = self._wishes.lens
        guesses = logit_lens(self._model, self._device, self._tokens, position)
        at = position % len(self._tokens)
        after = images.label_of(self._tokens[at], spell)
        images.draw_lens(guesses, spell, f"what each layer would say comes after “{after}” (position {at})", file)

    def _say(self, text: str) -> None:
        assert self._console is not None
        self._console.print(Text(text), soft_wrap=True)  # a file's name stays whole


class _Console(Console):
    """Leaves the exit status to the command when nobody reads any more; rich would end the process."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def make_console(to_stderr: bool) -> Console:
    """Plain text as wide as it needs where no terminal reads it."""
    file = sys.stderr if to_stderr else sys.stdout
    return _Console(file=file, highlight=False, width=None if file.isatty() else PLAIN_WIDTH)


def kind_of(step: StepPlanned) -> str:
    """``prefill`` if it has a part of a prompt, else ``decode``."""
    return "prefill" if any(part.kind == "prefill" for part in step.parts) else "decode"

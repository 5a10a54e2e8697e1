"""Narrates a run of ``tritonllm generate`` while it goes on."""

import dataclasses
import re
import sys
import time
from collections.abc import Callable, Mapping
from typing import IO, Any

from tritonllm.config.sampling_params import SamplingParams
from tritonllm.events import Event
from tritonllm.teach.narrate.choices import EngineLimits
from tritonllm.teach.narrate.draws import CANDIDATES
from tritonllm.teach.narrate.recorder import DrawRecorder
from tritonllm.teach.narrate.show import Show, make_console
from tritonllm.teach.narrate.story import Detail, Story
from tritonllm.teach.narrate.words import LANGUAGES
from tritonllm.teach.viewer import Params, Result

WORD, SIGN = 0.2, 0.1  # seconds to read a word of English, or a sign of Chinese
LONGEST = 15.0  # seconds of a pause
_SIGNS = re.compile(r"[\u3400-\u9fff]")


class ReadingPace:
    """Waits as long as it takes to read a text.

    Args:
        speed: 1 for the time above, 2 for half of it; 0 for no time at all.
    """

    def __init__(self, speed: float, sleep: Callable[[float], None] = time.sleep) -> None:
        self._speed, self._sleep = speed, sleep

    def __call__(self, text: str) -> None:
        if self._speed:
            signs = len(_SIGNS.findall(text))
            words = len(_SIGNS.sub(" ", text).split())
            self._sleep(min(LONGEST, WORD * words + SIGN * signs) / self._speed)


def story_of(engine: Any, recorder: DrawRecorder | None, *, chat: bool = False, detail: Detail | None = None) -> Story:
    """A story of an engine, from now on."""
    config = engine.config
    limits = EngineLimits(
        seats=config.scheduler.max_num_seqs,
        block_tokens=config.block_tokens,
        num_blocks=engine.stats.num_blocks,
        caches=config.cache.enable_prefix_caching,
        host=engine.stats.num_host_blocks > 0,
    )
    return Story(engine.tokenizer, engine.inputs.eos_token_ids, limits, recorder, chat=chat, detail=detail)


class Narrator:
    """The viewer of ``--narrate``, which tells what the engine does.

    The engine waits while the narration pauses: its steps come as fast as one reads. With ``json`` results go to
    stdout, so the narration goes to stderr.

    Args:
        language: a key of :data:`~tritonllm.teach.narrate.words.LANGUAGES`.
        speed: see :class:`ReadingPace`; ``None``: 1 on a terminal, 0 elsewhere.
        color: escape codes may be written to a terminal.
        chat: the prompts go through a chat template.
        json: results are for a program.
        speculates: the engine guesses tokens. A function that looks at logits would stop that, so log-probabilities
            are asked for instead.

    Attributes:
        recorder: what looks at logits.
    """

    shows_text = True
    engine_options: Mapping[str, Any] = {}

    def __init__(
        self,
        *,
        language: str = "en",
        speed: float | None = None,
        color: bool = True,
        chat: bool = False,
        json: bool = False,
        speculates: bool = False,
    ) -> None:
        self._language, self._speed, self._color = language, speed, color
        self._chat, self._json = chat, json
        self._speculates, self.recorder = speculates, DrawRecorder()

    def adapt(self, params: Params) -> Params:
        if not isinstance(params, SamplingParams):
            return params
        if not self._speculates or params.structured_outputs is not None:  # who follows a grammar gets no guesses
            functions: list[Callable[..., Any]] = [self.recorder, *(params.logits_processors or ())]
            return dataclasses.replace(params, logits_processors=functions)
        if params.logprobs is None and not self._json:  # which would report what nobody asked for
            return dataclasses.replace(params, logprobs=CANDIDATES)
        return params

    def run(self, llm: Any, work: Callable[[], Result]) -> Result:
        stream: IO[str] = sys.stderr if self._json else sys.stdout
        speed = self._speed if self._speed is not None else float(stream.isatty())
        console = make_console(stream, color=self._color)
        show = Show(LANGUAGES[self._language], console, ReadingPace(speed))
        story = story_of(llm.engine, self.recorder, chat=self._chat)
        sink = Sink(story, show)
        end = llm.engine.subscribe(sink)
        try:
            result = work()
        finally:
            end()
            show.leave()
        if sink.broken is not None:
            raise sink.broken
        if sink.whole:
            show.act(story.end())
        return result


class Sink:
    """Hears events, and has them told and shown.

    Attributes:
        whole: nothing that was told is missing.
        broken: why nothing more could be shown; whoever read it may have seen enough.
    """

    def __init__(self, story: Story, show: Show) -> None:
        self._story, self._show = story, show
        self.whole = True
        self.broken: OSError | None = None

    def __call__(self, event: Event) -> None:
        if self.broken is not None:
            return
        whole, self.whole = self.whole, False
        try:
            for act in self._story.tell(event):
                self._show.act(act)
        except OSError as error:
            self.broken = error
        else:
            self.whole = whole

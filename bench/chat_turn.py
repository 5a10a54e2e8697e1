"""``python -m bench.chat_turn``: what the host does for the next turn of a long chat, without a model or a GPU.

A chat of so many tokens gets one more question, again and again, and its answer is one token. All of it but the newest
question is in the prefix cache, so a GPU takes some milliseconds (T8 of ``bench.engine``), and what the host takes
counts as much. Rows are the median milliseconds of wall time of: ``render``, the chat template; ``whole``, tokenizing
the whole text, as a comparison; ``tokenize``, what the engine does instead (:mod:`tritonllm.engine.text.text_pieces`);
``engine``, from the request to its end, with a runner that builds the step and returns a token at once
(:mod:`bench.host`).

The text is made-up words in the demo model's tokenizer and chat template: more tokens a word than a real one has.
"""

import argparse
import datetime
import json
import platform
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from autotune.revision import commit
from bench.host import BLOCK_SIZE, Clock, Runner, processor
from tritonllm.config.engine import EngineConfig
from tritonllm.config.sampling_params import SamplingParams
from tritonllm.demo import model_path
from tritonllm.engine.loop.engine import LLMEngine
from tritonllm.engine.schedule.scheduler import Scheduler
from tritonllm.engine.text.chat import ChatOptions, render
from tritonllm.engine.text.input_processor import InputProcessor
from tritonllm.engine.text.tokenizer import load_tokenizer

WORDS = 200  # of a message
TURNS = 9
T = TypeVar("T")


def make_engine(longest: int) -> LLMEngine:
    """One request at a time, of so many tokens at most."""
    tokenizer = load_tokenizer(str(model_path()))
    blocks = 4 * -(-longest // BLOCK_SIZE)
    config = EngineConfig.from_kwargs(
        model="none", max_num_seqs=1, num_blocks=blocks, block_size=BLOCK_SIZE, max_num_batched_tokens=longest
    )
    scheduler = Scheduler(config.scheduler, config.block_tokens, blocks, longest)
    inputs = InputProcessor(tokenizer, len(tokenizer), longest, frozenset(), 0)
    return LLMEngine(config, Runner(1, Clock(), longest), scheduler, inputs)  # type: ignore[arg-type]


class Chat:
    """A conversation that grows."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        letters = "etaoinshrdlu"
        self._words = ["".join(self._random.choices(letters, k=self._random.randint(2, 9))) for _ in range(2000)]
        self.messages: list[dict[str, str]] = []

    def ask(self, words: int) -> None:
        """The answer to what was asked before, if anything was, and another question."""
        if self.messages:
            self.messages.append({"role": "assistant", "content": self._text(words)})
        self.messages.append({"role": "user", "content": self._text(words)})

    def _text(self, words: int) -> str:
        return " ".join(self._random.choices(self._words, k=words))


def timed(spent: dict[str, list[float]], name: str, work: Callable[..., T], *args: Any) -> T:
    begin = time.perf_counter()
    result = work(*args)
    spent.setdefault(name, []).append(1e3 * (time.perf_counter() - begin))
    return result


def measure(tokens: int) -> dict[str, Any]:
    """The row of a chat of so many tokens, or a few more.

    Raises:
        RuntimeError: the tokens of a turn are not those of the whole text, or the cache had not all of those before.
    """
    engine, chat = make_engine(tokens + 100 * WORDS), Chat()
    inputs, options = engine.inputs, ChatOptions()

    ids_of = partial(inputs.encode, add_special_tokens=False)
    whole_of = partial(inputs.tokenizer.encode, add_special_tokens=False)

    def rendered() -> str:
        prompt: Any = render(inputs.tokenizer, chat.messages, options, lambda text: [])
        return prompt["prompt"]

    while not chat.messages or len(ids_of(rendered())) < tokens:
        chat.ask(WORDS)
    spent: dict[str, list[float]] = {}
    before = 0
    for turn in range(1 + TURNS):
        times = spent if turn else {}  # the first one computes all of it
        text = timed(times, "render", rendered)
        whole = timed(times, "whole", whole_of, text)
        ids = timed(times, "tokenize", ids_of, text)
        if ids != whole:
            raise RuntimeError("pieces have other tokens than the whole text: no result")
        cached = timed(times, "engine", answer, engine, str(len(ids)), ids)
        if cached < before // BLOCK_SIZE * BLOCK_SIZE:
            raise RuntimeError(f"{cached} of {before} tokens were in the prefix cache: no result")
        before = len(ids) - 1
        chat.ask(4)
    return {"tokens": before + 1, "ms": {name: statistics.median(each) for name, each in spent.items()}}


def answer(engine: LLMEngine, name: str, ids: list[int]) -> int:
    """Run a request of one token; returns how many of the prompt's were cached."""
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    engine.add_request(name, {"prompt_token_ids": ids}, params)
    outputs: list[Any] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return int(outputs[-1].num_cached_tokens)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.chat_turn", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", default="2048,8192,32768", metavar="N,N", help="of the chat (%(default)s)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the numbers as JSON")
    args = parser.parse_args(argv)
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    facts = {"cpu": processor(), "python": platform.python_version(), "commit": commit(), "date": now}
    rows = []
    for tokens in map(int, args.tokens.split(",")):
        rows.append(measure(tokens))
        print(
            f"{rows[-1]['tokens']:>6} tokens", *(f"{name} {ms:.2f}" for name, ms in rows[-1]["ms"].items()), flush=True
        )
    if args.out:
        args.out.write_text(json.dumps({**facts, "chat_turns": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

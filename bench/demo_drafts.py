"""``python -m bench.demo_drafts``: how often each method's drafts are right on real text, with the models that ship.

The demo model continues two kinds of prompts: ``copy`` tells a story twice and begins it a third time, so what comes
stood there before; ``new`` begins stories. Greedy, in float32, on the GPU if there is one. No row without the plain
engine's tokens, up to the first tie. Reported of each method: tokens a step brings to a sequence, how many of 100
first, second, ... drafts were right (of those that were verified as a step's first ones), the part of the time that
making them took, and how many times as fast as plain decoding it was. The models are so small that on a CPU the last
two say little of others.
"""

import argparse
import sys
import time
from dataclasses import dataclass
from typing import Any

from tritonllm import LLM, SamplingParams
from tritonllm.demo import draft_path, model_path

DRAFTS, TOKENS = 4, 120
TIE = 1e-4  # between log-probabilities: up to so much rounding decides
STORY = (
    "Once upon a time there was a fox named Ben, who had a red hat. One day the wind took the hat. Ben ran after it, "
    "over the hill and down to the river. There a frog sat on a stone, and on the frog sat the hat. "
)
TEXTS = {
    "copy": [STORY * 2 + STORY[:40], STORY * 2 + STORY[:90]],
    "new": ["There was a fox named", "Once upon a time", "One night a terrible storm"],
}
METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram"},
    "suffix": {"method": "suffix"},
    "draft_model": {"method": "draft_model", "model": str(draft_path())},
}


@dataclass(frozen=True)
class Row:
    """What a method brought on a kind of text."""

    text: str
    method: str
    tokens_a_step: float
    right: tuple[float, ...]
    drafting: float
    times_plain: float

    def line(self) -> str:
        places = " ".join(f"{100 * part:4.0f}" for part in self.right)
        return (
            f"{self.text:<5} {self.method:<12} {self.tokens_a_step:5.2f} tokens a step | right at each place {places} "
            f"% | drafting {100 * self.drafting:3.0f}% of the time | {self.times_plain:.2f}x plain"
        )


def generate(llm: LLM, prompts: list[str], tokens: int) -> tuple[list[list[int]], float]:
    """The tokens, and the seconds that they took."""
    begin = time.perf_counter()
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs], time.perf_counter() - begin


def is_changed(plain: LLM, prompt: str, expected: list[int], found: list[int]) -> bool:
    """Whether an output has other tokens than the plain one, and rounding does not explain it: of two tokens that are
    equally likely up to that, processors with other instructions take the one or the other."""
    if expected == found:
        return False
    place = next(i for i, (one, other) in enumerate(zip(expected, found, strict=True)) if one != other)
    so_far = {"prompt_token_ids": plain.get_tokenizer().encode(prompt) + expected[:place]}
    (output,) = plain.generate(so_far, SamplingParams(temperature=0, max_tokens=1, logprobs=2), use_tqdm=False)
    best = output.outputs[0].logprobs[0]
    pair = [best[token].logprob for token in (expected[place], found[place]) if token in best]
    return len(pair) < 2 or abs(pair[0] - pair[1]) > TIE


def measure(text: str, method: str, tokens: int, device: str) -> Row:
    """One row.

    Raises:
        RuntimeError: drafts have changed a token that is no tie.
    """
    prompts, options = TEXTS[text], {"dtype": "float32", "max_num_seqs": 8, "device": device}
    plain = LLM(str(model_path()), **options, num_blocks=1024)
    config = METHODS[method] | {"num_speculative_tokens": DRAFTS, "adaptive": False}
    llm = LLM(str(model_path()), **options, num_blocks=1024, speculative_config=config)
    for engine in (plain, llm):  # the prompts are cached from here on
        generate(engine, prompts, 1)
    expected, plain_seconds = generate(plain, prompts, tokens)
    before = llm.engine.stats
    found, seconds = generate(llm, prompts, tokens)
    if any(is_changed(plain, *of_one) for of_one in zip(prompts, expected, found, strict=False)):
        raise RuntimeError(f"{method} has changed a token: no result")
    after = llm.engine.stats
    drafts = max(1, after.num_drafts - before.num_drafts)
    return Row(
        text,
        method,
        1 + (after.num_accepted_tokens - before.num_accepted_tokens) / drafts,
        tuple(count / drafts for count in after.num_accepted_tokens_per_pos),
        (after.draft_seconds - before.draft_seconds) / seconds,
        plain_seconds / seconds,
    )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.demo_drafts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--method", choices=METHODS, action="append", help="repeatable; all of them by default")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of each continuation (%(default)s)")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    args = parser.parse_args(argv)
    for text in TEXTS:
        for method in args.method or METHODS:
            print(measure(text, method, args.tokens, args.device).line(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

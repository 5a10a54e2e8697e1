"""``tritonllm generate``: continue prompts, or answer them."""

import argparse
import dataclasses
import json
import math
import statistics
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tritonllm.cli import teaching
from tritonllm.cli.options import ENGINE, SAMPLING, add_options, given
from tritonllm.cli.prompts import read_prompts
from tritonllm.config.beam_search_params import BeamSearchParams
from tritonllm.config.engine import EngineConfig
from tritonllm.config.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from tritonllm.engine.data.outputs import CompletionOutput, Logprobs, RequestOutput
from tritonllm.teach.viewer import Stops, Viewer, watch_all

DONE, FAILED = 0, 1
STOPPING: dict[str, Any] = {"false": False, "true": True, "never": "never"}

DESCRIPTION = """\
Continue prompts or, with --chat, answer them. A single prompt's text is printed as it is generated. The last line,
on stderr, tells the time to the first token (TTFT), tokens per second, and how many prompt tokens came from the
prefix cache."""
EXAMPLES = """\
examples:
  tritonllm generate --prompt "There was a fox named"
  tritonllm generate Qwen/Qwen3-0.6B --chat --prompt "Why is the sky blue?" --temperature 0.7 --seed 1
  tritonllm generate < article.txt --max-tokens 100
  tritonllm generate ./my-model --prompt-file prompts.txt --json > results.jsonl"""

# Fields of BeamSearchParams, which takes these three of SamplingParams, too.
BEAMS: dict[str, dict[str, Any]] = {
    "beam-width": {"type": int, "metavar": "N", "help": "search for the N most likely continuations of each prompt"},
    "length-penalty": {
        "type": float,
        "metavar": "X",
        "help": "above 0 favours long ones, below short ones (default: 1)",
    },
    "early-stopping": {"choices": list(STOPPING), "help": "when a search ends, see docs/decoding.md (default: false)"},
}
WITH_BEAMS = {"max_tokens", "ignore_eos", "temperature"}
# Fields of StructuredOutputsParams; at most one of them.
STRUCTURE: dict[str, dict[str, Any]] = {
    "json-schema": {"metavar": "SCHEMA", "help": "JSON that fits SCHEMA: its text, or a file's name"},
    "regex": {"metavar": "RE", "help": "text that the regular expression matches as a whole"},
    "choice": {"action": "append", "metavar": "TEXT", "help": "one of these; repeatable"},
}


def add_parser(commands: Any) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "generate",
        help="continue prompts, or answer them",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        usage="tritonllm generate [MODEL] [--prompt TEXT ... | --prompt-file FILE | < FILE] [options]",
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=32, width=120),
    )
    parser.set_defaults(run=run, wrong_usage=parser.error)
    group = parser.add_argument_group("prompts", "without --prompt and --prompt-file, all of stdin is one prompt")
    source = group.add_mutually_exclusive_group()
    source.add_argument("--prompt", action="append", metavar="TEXT", help="repeatable; the prompts run together")
    source.add_argument("--prompt-file", type=Path, metavar="FILE", help="one prompt a line; empty lines are left out")
    group.add_argument("--chat", action="store_true", help="each prompt is a user's turn in the model's chat template")
    group.add_argument("--system", metavar="TEXT", help="system message; implies --chat")
    group.add_argument(
        "--priority", type=int, action="append", metavar="N", help="lower runs first; once for all prompts, or for each"
    )
    add_options(parser.add_argument_group("sampling"), SAMPLING)
    add_options(parser.add_argument_group("beam search"), BEAMS)
    structure = parser.add_argument_group("what the output must look like (needs the extra structured)")
    add_options(structure.add_mutually_exclusive_group(), STRUCTURE)
    add_options(parser.add_argument_group("engine"), ENGINE)
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="one JSON object a line for each prompt, see docs/cli.md")
    group.add_argument("--no-stream", action="store_true", help="print a single prompt's text when it is complete")
    group.add_argument(
        "--expert-load", type=Path, metavar="FILE", help="write how many tokens went to each expert, see docs/cli.md"
    )
    teaching.add_options(parser)
    return parser


@dataclass(frozen=True)
class Job:
    """What was asked for, checked."""

    texts: list[str]
    priorities: list[int]
    params: SamplingParams | BeamSearchParams
    engine_options: dict[str, Any]
    stream: bool
    viewers: list[Viewer]


def check(args: argparse.Namespace) -> Job:
    """What argparse cannot see. Reads the prompts last: that may wait for someone at a terminal.

    Raises:
        ValueError: a bad value, or no prompt.
        OSError: the prompt file cannot be read.
    """
    viewers = teaching.viewers_of(args)
    engine_options = given(args, ENGINE)
    for viewer in viewers:
        engine_options.update(viewer.engine_options)
    if args.expert_load is not None:
        if not args.expert_load.absolute().parent.is_dir():
            raise ValueError(f"--expert-load: {args.expert_load.parent} is no folder")
        engine_options["count_expert_load"] = True
    if args.priority:
        engine_options["policy"] = "priority"
    EngineConfig.from_kwargs(model=args.model, **engine_options)
    params = params_of(args)
    texts = read_prompts(args)
    priorities = args.priority or [0]
    if len(priorities) not in (1, len(texts)):
        raise ValueError(f"--priority: {len(priorities)} values for {len(texts)} prompts; give one, or one for each")
    stream = False
    if isinstance(params, SamplingParams):
        shown = any(viewer.shows_text for viewer in viewers)
        stream = len(texts) == 1 and params.n == 1 and not (args.json or args.no_stream or shown)
        kind = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
        params = dataclasses.replace(params, output_kind=kind)
    for viewer in viewers:
        params = viewer.adapt(params)
    return Job(
        texts=texts,
        priorities=priorities * (len(texts) // len(priorities)),
        params=params,
        engine_options=engine_options,
        stream=stream,
        viewers=viewers,
    )


def params_of(args: argparse.Namespace) -> SamplingParams | BeamSearchParams:
    """How to continue the prompts.

    Raises:
        ValueError: a bad value, or options that do not go together.
        OSError: the schema's file cannot be read.
    """
    wishes, beams = {"max_tokens": 256, "temperature": 0.0, **given(args, SAMPLING)}, given(args, BEAMS)
    structure = structure_of(args)
    if not beams:
        params = SamplingParams(**wishes, structured_outputs=structure)
        if params.logprobs is not None and not args.json:
            raise ValueError("--logprobs needs --json")
        return params
    if "beam_width" not in beams:
        raise ValueError(f"--{next(iter(beams)).replace('_', '-')} needs --beam-width")
    others = [*(name for name in wishes if name not in WITH_BEAMS), *given(args, STRUCTURE)]
    if others:
        raise ValueError(f"--{others[0].replace('_', '-')} does not go with --beam-width")
    if "early_stopping" in beams:
        beams["early_stopping"] = STOPPING[beams["early_stopping"]]
    return BeamSearchParams(**wishes, **beams)


def structure_of(args: argparse.Namespace) -> StructuredOutputsParams | None:
    """What the output must look like, if anything.

    Raises:
        ValueError: a bad value.
        OSError: the schema's file cannot be read.
    """
    wish = given(args, STRUCTURE)
    if not wish:
        return None
    if "json_schema" in wish:
        schema = wish.pop("json_schema")
        inline = schema.lstrip().startswith("{")
        wish["json"] = schema if inline else Path(schema).read_text(encoding="utf-8")
        wish["disable_any_whitespace"] = True  # small models like blanks, which cost tokens
    return StructuredOutputsParams(**wish)


def run(args: argparse.Namespace, make_llm: Callable[..., Any]) -> int:
    try:
        job = check(args)
    except ValueError as error:
        args.wrong_usage(str(error))
    llm = make_llm(args.model, **job.engine_options)
    try:
        prompts = [chat_prompt(llm, text, args.system) for text in job.texts] if args.chat or args.system else job.texts
    except ValueError as error:  # no chat template, or one that refuses these messages
        args.wrong_usage(str(error))
    totals = OutputTotals()
    results = generate(llm.engine, prompts, job, totals)
    status = show(args, job, llm, results, totals)
    if args.expert_load is not None:
        llm.expert_load().save(args.expert_load)
    return status


def show(
    args: argparse.Namespace,
    job: Job,
    llm: Any,
    results: Iterable[tuple[int, RequestOutput | ValueError]],
    totals: "OutputTotals",
) -> int:
    """Print what the prompts bring, while viewers look on, or afterwards; returns the exit status."""
    if not any(isinstance(viewer, Stops) for viewer in job.viewers):
        return watch_all(job.viewers, llm, lambda: answer(args, job, results, totals))
    status = answer(args, job, watch_all(job.viewers, llm, lambda: list(results)), totals)  # the terminal is free again
    if is_stopped(job):
        raise KeyboardInterrupt
    return status


def answer(
    args: argparse.Namespace,
    job: Job,
    results: Iterable[tuple[int, RequestOutput | ValueError]],
    totals: "OutputTotals",
) -> int:
    """Print what the prompts bring; returns the exit status."""
    status = DONE
    for number, result in results:
        if isinstance(result, ValueError):
            status = FAILED
            print(f"error: prompt {number + 1}: {result}", file=sys.stderr)
        elif result.error is not None:
            status = FAILED
            print(f"error: prompt {number + 1}: {result.error}", file=sys.stderr)
        if args.json:
            line = as_json(number, job.texts[number], result)
            print(json.dumps(line, ensure_ascii=False, allow_nan=False), flush=True)
        elif isinstance(result, RequestOutput) and not job.stream:
            print_text(number, job.texts, result.outputs)
    if totals.requests:
        print(totals, file=sys.stderr)
    return status


def is_stopped(job: Job) -> bool:
    """Whether someone who watches has seen enough."""
    return any(isinstance(viewer, Stops) and viewer.stopped for viewer in job.viewers)


def chat_prompt(llm: Any, text: str, system: str | None) -> Any:
    messages = [{"role": "system", "content": system}] if system else []
    return llm.render_chat([*messages, {"role": "user", "content": text}])


def times_of(output: RequestOutput) -> tuple[float, float, float]:
    """When a finished request arrived, had its first token, and ended, in seconds."""
    times = output.metrics
    assert times is not None and times.finished_time is not None
    first = times.finished_time if times.first_token_time is None else times.first_token_time  # it may have had none
    return times.arrival_time, first, times.finished_time


@dataclass
class OutputTotals:
    """Sums over the requests, for the closing line."""

    generated_tokens: int = 0
    requests: list[RequestOutput] = field(default_factory=list)

    def add(self, output: RequestOutput) -> None:
        """Count what a step returned: tokens that no earlier output had."""
        self.generated_tokens += sum(len(completion.token_ids) for completion in output.outputs)
        if output.finished:
            self.requests.append(output)

    def __str__(self) -> str:
        arrivals, firsts, ends = zip(*map(times_of, self.requests), strict=True)
        seconds = max(max(ends) - min(arrivals), 1e-9)
        ttft = statistics.median(first - arrival for arrival, first in zip(arrivals, firsts, strict=True))
        prompt_tokens = sum(len(output.prompt_token_ids) for output in self.requests)
        cached = sum(output.num_cached_tokens for output in self.requests)
        return (
            f"[{prompt_tokens} prompt + {self.generated_tokens} generated tokens in {seconds:.2f} s | "
            f"TTFT {'median ' if len(firsts) > 1 else ''}{1e3 * ttft:.0f} ms | "
            f"{self.generated_tokens / seconds:.1f} tokens/s | prefix cache {cached}/{prompt_tokens} tokens]"
        )


def generate(
    engine: Any, prompts: Sequence[Any], job: Job, totals: OutputTotals
) -> Iterator[tuple[int, RequestOutput | ValueError]]:
    """Run the prompts together.

    Yields:
        Each prompt's number and result, in the order of the prompts, as soon as it and those before it are there.
        The result of a prompt that the engine refuses is the error; the others go on.
    """
    from tqdm import tqdm  # not at the top: `--help` and mistakes answer without it

    results: dict[int, RequestOutput | ValueError] = {}
    ids = [str(number) for number in range(len(prompts))]
    for number, (prompt, priority) in enumerate(zip(prompts, job.priorities, strict=True)):
        try:
            engine.add_request(ids[number], prompt, job.params, priority=priority)
        except ValueError as error:
            results[number] = error
    # results on a terminal show the progress themselves, and so do viewers
    shown = job.stream or any(viewer.shows_text for viewer in job.viewers)
    no_bar = shown or sys.stdout.isatty() or not sys.stderr.isatty()
    with tqdm(total=len(prompts), initial=len(results), unit="prompt", disable=no_bar, leave=False) as bar:
        for number in range(len(prompts)):
            while number not in results:
                for output in engine.abort_request(ids) if is_stopped(job) else engine.step():
                    totals.add(output)
                    if job.stream:
                        print(output.outputs[0].text, end="\n" if output.finished else "", flush=True)
                    if output.finished:
                        results[int(output.request_id)] = output
                        bar.update()
                bar.set_postfix_str(f"{totals.generated_tokens} tokens", refresh=False)
            yield number, results.pop(number)


def print_text(number: int, texts: list[str], outputs: list[CompletionOutput]) -> None:
    """The text alone if it is the only one, else under a heading."""
    for completion in outputs:
        if len(texts) * len(outputs) > 1:
            which = f" ({completion.index + 1}/{len(outputs)})" if len(outputs) > 1 else ""
            print(f"=== {number + 1}/{len(texts)}{which}: {textwrap.shorten(texts[number], 70)}")
        print(completion.text, flush=True)


def as_json(number: int, text: str, result: RequestOutput | ValueError) -> dict[str, Any]:
    """One line of ``--json``; described in docs/cli.md."""
    if isinstance(result, ValueError):
        return {"index": number, "prompt": text, "error": str(result)}
    arrival, first, end = times_of(result)
    return {
        "index": number,
        "prompt": text,
        "prompt_tokens": len(result.prompt_token_ids),
        "cached_tokens": result.num_cached_tokens,
        "ttft_seconds": round(first - arrival, 6),
        "total_seconds": round(end - arrival, 6),
        "outputs": [
            {
                "index": completion.index,
                "text": completion.text,
                "token_ids": list(completion.token_ids),
                "finish_reason": completion.finish_reason,
                "stop_reason": completion.stop_reason,
                "logprobs": completion.logprobs and [logprobs_as_json(entries) for entries in completion.logprobs],
            }
            for completion in result.outputs
        ],
        **({} if result.error is None else {"error": result.error}),
    }


def logprobs_as_json(entries: Logprobs) -> list[dict[str, Any]]:
    """One position: the chosen token, then the most likely ones. JSON has no -Infinity: that is null."""
    return [
        {
            "token_id": token,
            "token": entry.decoded_token,
            "logprob": entry.logprob if math.isfinite(entry.logprob) else None,
            "rank": entry.rank,
        }
        for token, entry in entries.items()
    ]

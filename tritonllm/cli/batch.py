"""``tritonllm batch``: answers a file of requests in OpenAI's batch format."""

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from tritonllm.cli.options import ENGINE, SEVERAL, add_options, given
from tritonllm.cli.serve import EXTRA
from tritonllm.config.engine import EngineConfig
from tritonllm.system.starting import no_searches

DESCRIPTION = """\
Answer a file of requests in OpenAI's batch format: each line has custom_id, url (as /v1/chat/completions) and body. An
answer is appended to the output as soon as it is there. Started again with the same files, the command goes on where
it was, however it ended."""
EXAMPLE = """\
example:
  tritonllm batch Qwen/Qwen3-0.6B -i requests.jsonl -o answers.jsonl"""


def add_parser(commands: Any) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "batch",
        help="answer a file of requests",
        description=DESCRIPTION,
        epilog=EXAMPLE,
        usage="tritonllm batch [MODEL] -i FILE -o FILE [options]",
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=32, width=120),
    )
    parser.set_defaults(run=run, wrong_usage=parser.error)
    group = parser.add_argument_group("files")
    group.add_argument(
        "-i", "--input-file", type=Path, required=True, metavar="FILE", help="requests, a JSON object a line"
    )
    group.add_argument("-o", "--output-file", type=Path, required=True, metavar="FILE", help="answers, appended to")
    group = parser.add_argument_group("requests")
    group.add_argument("--served-model-name", nargs="+", metavar="NAME", help="names in requests (default: MODEL)")
    group.add_argument(
        "--max-concurrency", type=int, metavar="N", help="most requests at once (default: twice what engines run)"
    )
    group.add_argument(
        "--ray", type=int, default=0, metavar="N", help="spread them over N engines on a cluster of Ray (RAY_ADDRESS)"
    )
    group.add_argument("--chat-template", metavar="FILE", help="a Jinja template instead of the tokenizer's")
    group.add_argument("--tool-call-parser", metavar="NAME", help="as in tritonllm serve")
    group.add_argument("--reasoning-parser", metavar="NAME", help="as in tritonllm serve")
    group.add_argument("--tool-parser-plugin", metavar="FILE", help="as in tritonllm serve")
    group.add_argument("--reasoning-parser-plugin", metavar="FILE", help="as in tritonllm serve")
    add_options(parser.add_argument_group("engine"), ENGINE | SEVERAL)
    return parser


def run(args: argparse.Namespace, make_llm: Callable[..., Any]) -> int:
    try:
        with no_searches(ours=True):
            from tritonllm.serve.processes.batch import open_answers, read_lines
    except ImportError as error:
        raise ImportError(EXTRA.replace("serve needs", "batch needs").format(error)) from error
    if args.ray:
        from tritonllm.dist.ray_cluster import import_ray

        import_ray("--ray")  # before a file is read, or made
    with contextlib.ExitStack() as stack:
        try:
            engine, config, at_once = check(args)
            lines = read_lines(args.input_file)
            file, done = stack.enter_context(open_answers(args.output_file))
            if strange := done - {line.custom_id for line in lines}:
                raise ValueError(f"{args.output_file} answers {min(strange)!r}, which is not in {args.input_file}")
        except ValueError as error:
            args.wrong_usage(str(error))
        left = [line for line in lines if line.custom_id not in done]
        print(f"{len(done)} of {len(lines)} requests are answered already", file=sys.stderr)
        if not left:
            return 0
        if args.ray:
            from tritonllm.serve.ray.batch import run_ray_batch

            failed = run_ray_batch(engine, config, left, file, at_once, args.ray)
        else:
            failed = _run_here(engine, config, left, file, at_once)
    print(f"{len(left)} requests answered, {failed} of them with an error", file=sys.stderr)
    return 1 if failed else 0


def _run_here(engine: EngineConfig, config: Any, lines: list[Any], file: IO[bytes], at_once: int) -> int:
    from tritonllm.serve.engines.async_llm import AsyncLLM
    from tritonllm.serve.processes.batch import run_batch

    llm = AsyncLLM(engine, max_queue=max(4 * at_once, 1024))
    try:
        return asyncio.run(run_batch(llm, config, lines, file, at_once))
    except* RuntimeError as errors:
        raise RuntimeError(str(errors.exceptions[0])) from errors
    finally:
        llm.shutdown()


def check(args: argparse.Namespace) -> tuple[EngineConfig, Any, int]:
    """The configurations, and how many requests run at once.

    Raises:
        ValueError: a bad value.
        OSError: the chat template cannot be read.
    """
    from tritonllm.serve.api.config import ServerConfig

    engine = EngineConfig.from_kwargs(model=args.model, **given(args, ENGINE | SEVERAL))
    at_once = args.max_concurrency
    if at_once is None:
        at_once = 2 * engine.scheduler.max_num_seqs * engine.parallel.data_parallel_size
    if at_once < 1:
        raise ValueError(f"--max-concurrency must be at least 1, got {at_once}")
    if args.ray < 0:
        raise ValueError(f"--ray must be at least 0, got {args.ray}")
    if args.ray and engine.parallel.data_parallel_size > 1:
        raise ValueError(f"--ray {args.ray} says how many engines there are: leave --data-parallel-size out")
    template = None if args.chat_template is None else Path(args.chat_template).read_text(encoding="utf-8")
    config = ServerConfig(
        model_names=tuple(args.served_model_name or [args.model]),
        chat_template=template,
        tool_call_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
        tool_parser_plugin=args.tool_parser_plugin,
        reasoning_parser_plugin=args.reasoning_parser_plugin,
        max_concurrency=max(at_once, 1),
        max_body_bytes=1 << 30,
    )
    return engine, config, at_once

"""``tritonllm embed``: prompts to vectors, or to what a classifier says of them."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tritonllm.cli.options import ENGINE, add_options, given
from tritonllm.cli.pooling_options import POOLING
from tritonllm.cli.prompts import read_prompts
from tritonllm.config.engine import EngineConfig
from tritonllm.config.pooling_params import TASKS, PoolingParams

DESCRIPTION = """\
Turn prompts into vectors. Each line of the output is a JSON object with the fields index, prompt, prompt_tokens and
data: a list of numbers, or of a list for each token with a task that begins with token_."""
EXAMPLES = """\
examples:
  tritonllm embed --prompt "There was a fox." --pooler-config '{"pooling_type": "MEAN"}'
  tritonllm embed BAAI/bge-small-en-v1.5 --prompt-file lines.txt > vectors.jsonl
  tritonllm embed ./my-classifier --task classify --prompt "I like it." """
# Option -> keywords of add_argument. The name, with underscores, is that of the field of PoolingParams.
PARAMS: dict[str, dict[str, Any]] = {
    "task": {"choices": TASKS, "help": "default: embed"},
    "dimensions": {"type": int, "metavar": "N", "help": "cut embeddings to N numbers, if the model was trained for it"},
    "no-normalize": {"action": "store_false", "dest": "normalize", "help": "embeddings keep their length"},
    "no-activation": {"action": "store_false", "dest": "use_activation", "help": "logits of a classifier"},
    "truncate-prompt-tokens": {"type": int, "metavar": "N", "help": "use N tokens of longer prompts; -1: what fits"},
}


def add_parser(commands: Any) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "embed",
        help="turn prompts into vectors, or classify them",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        usage="tritonllm embed [MODEL] [--prompt TEXT ... | --prompt-file FILE | < FILE] [options]",
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=32, width=120),
    )
    parser.set_defaults(run=run, wrong_usage=parser.error, system=None)
    group = parser.add_argument_group("prompts", "without --prompt and --prompt-file, all of stdin is one prompt")
    source = group.add_mutually_exclusive_group()
    source.add_argument("--prompt", action="append", metavar="TEXT", help="repeatable; the prompts run together")
    source.add_argument("--prompt-file", type=Path, metavar="FILE", help="one prompt a line; empty lines are left out")
    add_options(parser.add_argument_group("pooling"), {**PARAMS, **POOLING})
    add_options(parser.add_argument_group("engine"), ENGINE)
    return parser


def run(args: argparse.Namespace, make_llm: Callable[..., Any]) -> int:
    try:
        params = PoolingParams(**{"task": "embed", **given(args, PARAMS)})
        options = given(args, {**ENGINE, **POOLING})
        EngineConfig.from_kwargs(model=args.model, **options)
        texts = read_prompts(args)
    except ValueError as error:
        args.wrong_usage(str(error))
    llm = make_llm(args.model, **options)
    for index, (text, output) in enumerate(zip(texts, llm.encode(texts, params, use_tqdm=False), strict=True)):
        line = {"index": index, "prompt": text, "prompt_tokens": len(output.prompt_token_ids)}
        print(json.dumps({**line, "data": output.outputs.data.tolist()}, ensure_ascii=False), flush=True)
    return 0

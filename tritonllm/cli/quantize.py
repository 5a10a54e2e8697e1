"""``tritonllm quantize``: write a model with narrow weights."""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FORMATS = ("fp8", "int8", "w4a16", "mxfp4")
CALIBRATED = "w4a16"
WINDOW, MOST_TOKENS = 512, 8192  # of a sequence of the text, and of all
DESCRIPTION = """\
Write a model with narrow weights, as a folder in the format of compressed-tensors: the weights of the layers' products
and experts; embeddings, the output projection, routers and norms stay as they are. Tensors go one at a time from file
to file, so a small machine without a GPU will do. See docs/models.md.

  fp8    float8 (e4m3), a scale for each row           int8   a scale for each row
  w4a16  integers of 4 bits, a scale for each group    mxfp4  4-bit floats, a power of two for each 32 columns"""
EXAMPLES = """\
examples:
  tritonllm quantize Qwen/Qwen3-0.6B --format fp8 -o qwen3-fp8
  tritonllm generate ./qwen3-fp8 --prompt "There was a fox named"
  tritonllm quantize ./my-model --format w4a16 --group-size 64 --ignore "re:.*down_proj" -o my-model-w4a16"""


def add_parser(commands: Any) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "quantize",
        help="write a model with narrow weights",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        usage="tritonllm quantize [MODEL] --format FORMAT -o DIR [options]",
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=32, width=120),
    )
    parser.set_defaults(run=run, wrong_usage=parser.error)
    parser.add_argument("--format", required=True, choices=FORMATS, metavar="FORMAT", help=", ".join(FORMATS))
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="DIR", help="the new folder")
    parser.add_argument(
        "--group-size", type=int, metavar="N", help="columns of a group of w4a16, a power of two from 32 (default: 128)"
    )
    parser.add_argument(
        "--ignore",
        action="append",
        default=[],
        metavar="PATTERN",
        help="modules that keep their weights: a name, or re: and an expression; repeatable",
    )
    parser.add_argument(
        "--calibrate",
        type=Path,
        metavar="FILE",
        help="of w4a16: a text on which the model runs, so that columns with large inputs become finer (AWQ)",
    )
    parser.add_argument("--overwrite", action="store_true", help="write into a folder that is not empty")
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit of a hub id")
    return parser


def run(args: argparse.Namespace, make_llm: Callable[..., Any]) -> int:
    from tritonllm.models.quantized_checkpoint import quantize_checkpoint, written_format

    try:
        written_format(args.format, args.group_size)
        if args.calibrate is not None and args.format != CALIBRATED:
            raise ValueError(f"--calibrate is of {CALIBRATED}, and this is {args.format}: leave it out")
        text = None if args.calibrate is None else args.calibrate.read_text(encoding="utf-8")
    except (ValueError, OSError) as error:
        args.wrong_usage(str(error))
    begin = time.monotonic()
    done = quantize_checkpoint(
        args.model,
        args.out,
        args.format,
        group_size=args.group_size,
        ignore=args.ignore,
        calibrate=None if text is None else sequences_of(args.model, args.revision, text),
        overwrite=args.overwrite,
        revision=args.revision,
    )
    print(
        f"{done.narrow} weights in {args.format} and {done.others} tensors as they were in {done.folder}: "
        f"{done.bytes_after:,} bytes, were {done.bytes_before:,}, {time.monotonic() - begin:.1f} s"
    )
    return 0


def sequences_of(model: str, revision: str | None, text: str) -> list[list[int]]:
    """The first tokens of a text, cut into sequences."""
    from tritonllm.engine.text.tokenizer import load_tokenizer

    ids = load_tokenizer(model, revision=revision).encode(text)[:MOST_TOKENS]
    return [ids[begin : begin + WINDOW] for begin in range(0, len(ids), WINDOW)]

"""``tritonllm rebalance-experts LOAD ...``: from counted loads to a placement of experts on ranks."""

import argparse
import functools
import json
import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tritonllm.experts.load import ExpertLoad
from tritonllm.experts.rebalance import Balance, LayerReport, overall, rebalance, report

DESCRIPTION = """\
Place a model's experts on ranks by their loads, with copies of those that have the most. The loads are what engines
have counted; several files are added up. An engine reads the placement with --expert-placement. docs/distributed.md
says more."""
EXAMPLES = """\
examples:
  tritonllm generate MODEL -tp 4 --prompt-file prompts.txt --expert-load load.json
  tritonllm rebalance-experts load.json -tp 4 --num-redundant-experts 8 -o placement.json
  tritonllm serve MODEL -tp 4 --enable-expert-parallel --expert-placement placement.json"""


def add_parser(commands: Any) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "rebalance-experts",
        help="place experts on ranks by their loads",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        usage="tritonllm rebalance-experts LOAD [LOAD ...] -tp N [--num-redundant-experts R] -o FILE [--json]",
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=32, width=120),
    )
    parser.set_defaults(run=run, wrong_usage=parser.error)
    parser.add_argument(
        "loads", nargs="+", type=Path, metavar="LOAD", help="counts of an engine, as generate --expert-load writes them"
    )
    parser.add_argument(
        *("-tp", "--tensor-parallel-size"), type=int, required=True, metavar="N", help="ranks of the engine"
    )
    parser.add_argument(
        "--num-redundant-experts", type=int, default=0, metavar="R", help="further copies in each layer (default: 0)"
    )
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="FILE", help="the placement")
    parser.add_argument("--json", action="store_true", help="the balance before and after as one JSON object")
    return parser


def run(args: argparse.Namespace, make_llm: Callable[..., Any]) -> int:
    load = functools.reduce(operator.add, map(ExpertLoad.read, args.loads))
    try:
        placement = rebalance(load, args.tensor_parallel_size, args.num_redundant_experts)
    except ValueError as error:
        args.wrong_usage(str(error))
    lines = report(load, placement)
    placement.save(args.out)
    print(json.dumps(as_json(lines), allow_nan=False) if args.json else as_table(lines))
    return 0


def as_json(lines: Sequence[LayerReport]) -> dict[str, Any]:
    """The balancedness of each layer and of all of them, before (``null`` if there is none) and after."""

    def values(before: float | None, after: float) -> dict[str, float | None]:
        return {"before": before, "after": after}

    def of(balance: Balance | None) -> float | None:
        return None if balance is None else balance.balancedness

    layers = {str(line.layer): values(of(line.before), line.after.balancedness) for line in lines}
    before = [line.before for line in lines if line.before is not None]
    return {**values(overall(before) if before else None, overall([line.after for line in lines])), "layers": layers}


def as_table(lines: Sequence[LayerReport]) -> str:
    """A report of the layers' balance as a table for readers."""
    told = as_json(lines)
    rows = [*((f"{name:>5}", values) for name, values in told["layers"].items()), ("  all", told)]
    texts = ["balancedness: the mean load of the ranks by the largest", "layer  before  after"]
    for name, values in rows:
        before = "     -" if values["before"] is None else f"{values['before']:6.3f}"
        texts.append(f"{name}  {before} {values['after']:6.3f}")
    return "\n".join(texts)

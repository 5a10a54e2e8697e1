"""``python -m bench.plot RESULTS.json -o PLOT.svg``: draw what a benchmark wrote.

``bench.attention``: the sweep over batch and length. ``bench.kernels`` and ``bench.engine``: bars, ours beside others.
``bench.timeline``: one step, kernel by kernel. It needs matplotlib, which the extra ``dev`` installs.
"""

import argparse
import json
import sys
from pathlib import Path

from bench.reports import GROUPS


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.plot", description="Draw the results of a benchmark.")
    parser.add_argument("results", type=Path, help="what a benchmark wrote")
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="FILE", help="the picture to write (.svg)")
    parser.add_argument("--only", default=",".join(GROUPS), metavar="K3,K4", help="groups of bench.kernels (all)")
    args = parser.parse_args(argv)
    chosen = args.only.split(",")
    if unknown := sorted(set(chosen) - GROUPS.keys()):
        parser.error(f"--only must name groups of {','.join(GROUPS)}, got {', '.join(unknown)}")
    try:
        from bench import drawing
    except ModuleNotFoundError as error:
        print(f"{error}: plots need matplotlib, which `pip install -e '.[dev]'` installs", file=sys.stderr)
        return 1
    try:
        figure = drawing.draw(json.loads(args.results.read_text()), chosen)
    except ValueError as error:
        print(f"{args.results}: {error}", file=sys.stderr)
        return 1
    args.out.parent.mkdir(parents=True, exist_ok=True)
    drawing.save(figure, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())

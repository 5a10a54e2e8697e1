"""The options of the narration, and a viewer made of them. Imports nothing that takes time before it is wanted."""

import argparse
import math
from typing import Any

from tritonllm.system.extras import install
from tritonllm.teach.viewer import Viewer

LANGUAGES = ("en", "zh")


def add(group: Any) -> None:
    group.add_argument(
        "--narrate", action="store_true", help="tell in plain words what the engine does, with its own numbers"
    )
    group.add_argument(
        "--speed",
        type=float,
        metavar="X",
        help="of the narration: 1 lets you read along, 2 is twice as fast, 0 makes no pauses (default: on a terminal "
        "1, else 0)",
    )
    group.add_argument("--lang", choices=LANGUAGES, help="language of the narration (default: en)")
    group.add_argument("--no-color", action="store_true", help="narrate without colours")


def make(args: argparse.Namespace) -> Viewer | None:
    """The viewer of ``--narrate``; ``None`` without that option.

    Raises:
        ValueError: an option without ``--narrate``, a bad value, a run that cannot be narrated, or no ``rich``.
    """
    given = {"--speed": args.speed is not None, "--lang": args.lang is not None, "--no-color": args.no_color}
    if not args.narrate:
        for option, there in given.items():
            if there:
                raise ValueError(f"{option} needs --narrate")
        return None
    if args.speed is not None and not (math.isfinite(args.speed) and args.speed >= 0):
        raise ValueError(f"--speed must be a number from 0, got {args.speed:g}")
    if hasattr(args, "beam_width"):
        raise ValueError(
            "--narrate does not go with --beam-width: a beam search draws no tokens. Leave one of them out"
        )
    try:
        import rich  # noqa: F401 - to know now that it is there
    except ImportError as error:
        raise ValueError(f"--narrate needs the package rich: {install('teach')}") from error
    from tritonllm.teach.narrate.viewer import Narrator

    return Narrator(
        language=args.lang or "en",
        speed=args.speed,
        color=not args.no_color,
        chat=bool(args.chat or args.system),
        json=args.json,
        speculates=hasattr(args, "speculative_config"),
    )

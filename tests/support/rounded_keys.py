"""What a cache of float8 does to a model, by transformers alone: each key and value is rounded when it is made."""

import inspect
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from shutil import copytree
from tempfile import mkdtemp
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache

from support.engines import tiny_checkpoint
from tritonllm import LLM, SamplingParams

UNSCALED = (1.0, 1.0)
_NUMBERS = torch.tensor([(0.3 + layer / 7, 0.011 * (layer + 1)) for layer in range(3)])
SCALES = {layer: (k, v) for layer, (k, v) in enumerate(_NUMBERS.tolist())}  # of keys and of values, by layer
OF_CACHE_ALONE = {
    "quant_method": "compressed-tensors",
    "config_groups": {},
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True},
}


@cache
def scaled_checkpoint(times: float = 1.0, **fields: Any) -> Path:
    """The tiny checkpoint with scales of its cache, as llm-compressor writes them: ``SCALES``, so many ``times``.
    ``fields`` are of its config."""
    folder = Path(mkdtemp(prefix="scaled-"))
    copytree(tiny_checkpoint(**fields), folder, dirs_exist_ok=True)
    (file,) = folder.glob("*.safetensors")
    numbers = {
        f"model.layers.{layer}.self_attn.{kind}_scale": torch.tensor([times * scale])
        for layer, scales in SCALES.items()
        for kind, scale in zip("kv", scales, strict=True)
    }
    save_file({**load_file(file), **numbers}, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": OF_CACHE_ALONE}))
    return folder


def rounded(x: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """``x / scale`` in float8, to the nearest, times ``scale``; what is beyond the largest number becomes it."""
    most = torch.finfo(dtype).max
    return (x / scale).clamp(-most, most).to(dtype).to(x.dtype) * scale


class RoundedCache(DynamicCache):  # type: ignore[misc]
    """Args: ``scales``, of keys and of values, by layer; 1 where there are none. ``dtype``: which float8."""

    def __init__(self, scales: Mapping[int, tuple[float, float]], dtype: torch.dtype) -> None:
        super().__init__()
        self._scales, self._dtype = scales, dtype

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *others: Any, **more: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        k_scale, v_scale = self._scales.get(layer, UNSCALED)
        return super().update(
            rounded(keys, k_scale, self._dtype), rounded(values, v_scale, self._dtype), layer, *others, **more
        )


@torch.no_grad()
def log_probabilities(
    folder: Path,
    tokens: list[int],
    scales: Mapping[int, tuple[float, float]] | None = None,
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> torch.Tensor:
    """``[T, V]`` float32, of the token behind each of ``tokens[T]``; keys and values are rounded if there are
    ``scales``."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    cache = DynamicCache() if scales is None else RoundedCache(scales, dtype)
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    logits = model(torch.tensor([tokens]), **{name: cache}, use_cache=True).logits[0]
    return torch.log_softmax(logits.float(), -1)


def engine_log_probabilities(llm: LLM, tokens: list[int]) -> torch.Tensor:
    """The same ``[T, V]`` by an engine with ``max_logprobs=-1``, of a prompt: the last row behind its end."""
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=-1, prompt_logprobs=-1, ignore_eos=True)
    (output,) = llm.generate([tokens], params, use_tqdm=False)
    assert output.prompt_logprobs is not None and output.outputs[0].logprobs is not None
    rows = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    return torch.tensor([[row[token].logprob for token in range(len(row))] for row in rows])


def check_against(
    folder: Path,
    llm: LLM,
    tokens: list[int],
    scales: Mapping[int, tuple[float, float]],
    part: float = 0.1,
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> None:
    """Check an engine's log-probabilities of a prompt.

    A number beside the border between two float8 may be rounded to either: so what counts is how much nearer the result
    is to that with the same rounding than the result without is.

    Args:
        folder: the checkpoint, without scales.
        part: how far the result may be off, of what rounding changes.
        dtype: which float8.
    """
    found = engine_log_probabilities(llm, tokens)
    want, unrounded = log_probabilities(folder, tokens, scales, dtype), log_probabilities(folder, tokens)
    effect = (want - unrounded).abs().max()
    assert effect > 1e-2 and (found - want).abs().max() < part * effect

"""What a cache of float8 does to a model, by transformers alone: each key and value is rounded when it is made."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from tritonllm import LLM, SamplingParams

UNSCALED = (1.0, 1.0)


def rounded(x: torch.Tensor, scale: float) -> torch.Tensor:
    """``x / scale`` in e4m3, to the nearest, times ``scale``; what is beyond the largest number becomes it."""
    return (x / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).to(x.dtype) * scale


class RoundedCache(DynamicCache):  # type: ignore[misc]
    """Args: ``scales``, of keys and of values, by layer; 1 where there are none."""

    def __init__(self, scales: Mapping[int, tuple[float, float]]) -> None:
        super().__init__()
        self._scales = scales

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *others: Any, **more: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        k_scale, v_scale = self._scales.get(layer, UNSCALED)
        return super().update(rounded(keys, k_scale), rounded(values, v_scale), layer, *others, **more)


@torch.no_grad()
def log_probabilities(
    folder: Path, tokens: list[int], scales: Mapping[int, tuple[float, float]] | None = None
) -> torch.Tensor:
    """``[T, V]`` float32, of the token behind each of ``tokens[T]``; keys and values are rounded if there are
    ``scales``."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    cache = DynamicCache() if scales is None else RoundedCache(scales)
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

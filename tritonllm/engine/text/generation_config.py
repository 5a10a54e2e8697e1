"""What a model's own files say of how to continue a prompt: what ends an output, and the default parameters."""

import os
from pathlib import Path
from typing import Any

from tritonllm.config.sampling_params import SamplingParams
from tritonllm.models import checkpoint
from tritonllm.models.interface import ModelFacts

DEFAULTED = {  # entry of generation_config.json: field of SamplingParams
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")},
    "max_new_tokens": "max_tokens",
}


def end_tokens(spec: ModelFacts, generation_config: dict[str, Any], tokenizer: Any = None) -> frozenset[int]:
    """What ends an output: the ids of config.json and generation_config.json, and the tokenizer's ``eos_token``.

    Raises:
        ValueError: generation_config.json has something else than ids.
    """
    ids = generation_config.get("eos_token_id")
    more = ids if isinstance(ids, list) else [ids]
    if not all(token is None or (isinstance(token, int) and not isinstance(token, bool)) for token in more):
        raise ValueError(f"generation_config.json: eos_token_id must be a token id or a list of them, got {ids!r}")
    own = getattr(tokenizer, "eos_token_id", None)
    return frozenset(
        token
        for token in (*spec.eos_token_ids, *more, own)
        if isinstance(token, int) and 0 <= token < spec.vocab_size  # a tokenizer may know tokens that the model lacks
    )


def read_generation_config(source: str, model: Path) -> dict[str, Any]:
    """Read the ``generation_config.json`` of the model (``auto`` and ``vllm``), or of another folder.

    Raises:
        ValueError: no such folder, or no such file in it.
    """
    if source in ("auto", "vllm"):
        return checkpoint.read_generation_config(model)
    folder = Path(os.path.expanduser(source))
    if not (folder / "generation_config.json").is_file():
        raise ValueError(
            f"generation_config={source!r} must be auto, vllm, or a folder that holds generation_config.json"
        )
    return checkpoint.read_generation_config(folder)


def default_params(source: str, generation_config: dict[str, Any]) -> SamplingParams:
    """How a request is continued that brings no parameters; vLLM reads the same entries.

    Raises:
        ValueError: an entry outside its range.
    """
    if source == "vllm":
        return SamplingParams()
    values = {name: generation_config[entry] for entry, name in DEFAULTED.items() if entry in generation_config}
    try:
        return SamplingParams.from_optional(**{name: value for name, value in values.items() if value is not None})
    except ValueError as error:
        raise ValueError(f"generation_config.json: {error}; pass generation_config='vllm' to ignore it") from error

"""What a model's own files say of how to continue a prompt: what ends an output, and the default parameters."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tritonllm.config.sampling_params import OF_MODEL, SamplingParams
from tritonllm.models import checkpoint
from tritonllm.models.interface import ModelFacts

DEFAULTED = {  # entry of generation_config.json: field of SamplingParams
    **{name: name for name in OF_MODEL},
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


def default_params(
    source: str, generation_config: Mapping[str, Any], override: Mapping[str, Any] | None = None
) -> SamplingParams:
    """How a request is continued that brings no parameters; vLLM reads the same entries.

    Args:
        source: ``generation_config`` of the engine; with ``vllm`` the file's entries do not count.
        override: entries that count more than the file's (``override_generation_config``).

    Raises:
        ValueError: an entry outside its range, or an unknown one to override.
    """
    unknown = [entry for entry in override or () if entry not in DEFAULTED]
    if unknown:
        raise ValueError(f"override_generation_config has {unknown[0]!r}: it may have {', '.join(DEFAULTED)}")
    where, values = "generation_config.json", _values({} if source == "vllm" else generation_config)
    try:
        params = SamplingParams.from_optional(**values)
        where = "override_generation_config"
        return SamplingParams.from_optional(**values | _values(override)) if override else params
    except ValueError as error:
        way_out = "; pass generation_config='vllm' to ignore it" if where.endswith("json") else ""
        raise ValueError(f"{where}: {error}{way_out}") from error


def _values(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of SamplingParams, of the entries that say something."""
    return {name: entries[entry] for entry, name in DEFAULTED.items() if entries.get(entry) is not None}

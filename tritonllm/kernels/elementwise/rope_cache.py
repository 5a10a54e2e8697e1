"""Cosine and sine tables for :func:`tritonllm.kernels.apply_rope`, from the settings of a Hugging Face config.

Angles are computed in float32, position times inverse frequency, in the order that ``transformers`` uses: beyond some
ten thousand positions a float32 angle is off by more than a model notices, and equal angles keep outputs equal.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tritonllm.kernels.runtime.checks import FLOATS, require

Scaling = Mapping[str, Any]

# Keys that each type takes; those of COMMON_KEYS mean nothing here, but configs put them in the same place.
COMMON_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings"}
KEYS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "proportional": {"factor"},
    "dynamic": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
    "yarn": {"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"},
    "longrope": {"short_factor", "long_factor", "factor", "attention_factor", "short_mscale", "long_mscale"},
}
LISTS = ("short_factor", "long_factor")  # one number for each frequency


def _need(scaling: Scaling, key: str) -> Any:
    value = scaling.get(key)
    require(bool(value), f"scaling of type {_type(scaling)!r} needs a positive {key!r}, got {value}")
    return value


def _type(scaling: Scaling) -> str:
    name = scaling.get("rope_type") or scaling.get("type") or "default"
    return "longrope" if name == "su" else name  # its name in the first Phi-3 configs


def _trained_length(scaling: Scaling, max_position_embeddings: int | None) -> int:
    key = "original_max_position_embeddings"
    return scaling.get(key) or max_position_embeddings or _need(scaling, key)


def _periods(base: float, rotary_dim: int) -> torch.Tensor:
    return base ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)


def _frequencies(base: float, rotary_dim: int) -> torch.Tensor:
    return 1.0 / _periods(base, rotary_dim)


def _linear(scaling: Scaling, base: float, rotary_dim: int) -> torch.Tensor:
    return _frequencies(base, rotary_dim) / _need(scaling, "factor")


def _proportional(scaling: Scaling, base: float, rotary_dim: int) -> torch.Tensor:
    """The long waves stand still: of the pairs, only the first ``partial_rotary_factor`` turn (Gemma 4)."""
    part = scaling.get("partial_rotary_factor") or 1.0
    require(part <= 1, f"scaling: partial_rotary_factor must be at most 1, got {part}")
    frequencies = _frequencies(base, rotary_dim) / (scaling.get("factor") or 1.0)
    frequencies[int(part * rotary_dim // 2) :] = 0.0
    return frequencies


def _dynamic(scaling: Scaling, base: float, rotary_dim: int, length: int, trained: int) -> torch.Tensor:
    """NTK-aware base for sequences of `length` tokens (the bloc97 and emozilla posts of 2023)."""
    require(rotary_dim > 2, f"rotary_dim must be more than 2 for scaling of type 'dynamic', got {rotary_dim}")
    factor = _need(scaling, "factor")
    stretch = factor * max(length, trained) / trained - (factor - 1)
    return _frequencies(base * stretch ** (rotary_dim / (rotary_dim - 2)), rotary_dim)


def _llama3(scaling: Scaling, base: float, rotary_dim: int, trained: int) -> torch.Tensor:
    """Long waves are slowed by `factor`, short ones kept, those between interpolated (Llama 3.1)."""
    frequencies = _frequencies(base, rotary_dim)
    low, high = _need(scaling, "low_freq_factor"), _need(scaling, "high_freq_factor")
    require(low <= high, f"scaling: low_freq_factor must be at most high_freq_factor, got {low} and {high}")
    turns = trained / (2 * math.pi / frequencies)  # in the trained context
    if low == high:  # Llama 4 Scout: nothing in between
        keep = (turns > low).to(frequencies.dtype)
    else:
        keep = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * frequencies / _need(scaling, "factor") + keep * frequencies


def _yarn(
    scaling: Scaling, base: float, rotary_dim: int, trained: int, max_position_embeddings: int | None
) -> tuple[torch.Tensor, float]:
    """Frequencies and the factor of cosines and sines (Peng et al., "YaRN", 2023)."""
    ratio = max_position_embeddings / trained if max_position_embeddings else None
    factor = scaling.get("factor") or ratio or _need(scaling, "factor")

    def dimension_of(turns: float) -> float:
        return rotary_dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = dimension_of(scaling.get("beta_fast") or 32)
    high = dimension_of(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    slow = ((torch.arange(rotary_dim // 2) - low) / (high - low or 0.001)).clamp(0, 1)
    frequencies = _frequencies(base, rotary_dim)

    def magnitude(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention = scaling.get("attention_factor")
    if attention is None:
        mscale, mscale_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
        attention = magnitude(mscale) / magnitude(mscale_all) if mscale and mscale_all else magnitude(1.0)
    return slow * frequencies / factor + (1 - slow) * frequencies, attention


def _longrope(
    scaling: Scaling, base: float, rotary_dim: int, length: int, trained: int, max_position_embeddings: int | None
) -> tuple[torch.Tensor, float]:
    """A factor for each frequency, and the factor of cosines and sines (Ding et al., "LongRoPE", 2024)."""
    for key in LISTS:
        factors = _need(scaling, key)
        require(
            len(factors) == rotary_dim // 2,
            f"scaling: {key} must have {rotary_dim // 2} numbers (rotary_dim / 2), got {len(factors)}",
        )
    regime = "long" if length > trained else "short"
    attention = scaling.get(f"{regime}_mscale") or scaling.get("attention_factor")
    if attention is None:
        ratio = max_position_embeddings / trained if max_position_embeddings else None
        factor = scaling.get("factor") or ratio or _need(scaling, "factor")
        require(trained > 1, f"scaling: original_max_position_embeddings must be more than 1, got {trained}")
        attention = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    return 1.0 / (
        torch.tensor(scaling[f"{regime}_factor"], dtype=torch.float32) * _periods(base, rotary_dim)
    ), attention


def _check_number(name: str, value: Any, *, positive: bool) -> None:
    require(isinstance(value, int | float) and math.isfinite(value), f"scaling: {name} must be a number, got {value!r}")
    require(value > 0 or not positive, f"scaling: {name} must be positive, got {value}")


def _check_scaling(scaling: Scaling, base: float) -> None:
    kind = _type(scaling)
    require(kind in KEYS, f"scaling: rope type {kind!r} is not supported, expected one of {', '.join(KEYS)}")
    unknown = sorted(set(scaling) - KEYS[kind] - COMMON_KEYS)
    require(not unknown, f"scaling of type {kind!r} has unknown keys: {', '.join(unknown)}")
    theta = scaling.get("rope_theta", base)
    require(theta == base, f"scaling has rope_theta {theta}, but base is {base}")
    for key, value in scaling.items():
        if key in ("rope_type", "type", "truncate") or value is None:
            continue
        if key in LISTS:
            is_list = isinstance(value, Sequence) and not isinstance(value, str)
            require(is_list, f"scaling: {key} must be a list of numbers, got {value!r}")
            for i, number in enumerate(value):
                _check_number(f"{key}[{i}]", number, positive=True)
        else:
            _check_number(key, value, positive=not key.startswith("mscale"))


def build_cos_sin_cache(
    rotary_dim: int,
    max_position: int,
    base: float = 10000.0,
    scaling: Scaling | None = None,
    *,
    max_position_embeddings: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """The table of cosines and sines that :func:`apply_rope` reads.

    Args:
        rotary_dim: elements of a head that are rotated, even: the head size times ``partial_rotary_factor``.
        max_position: rows; positions are 0 to ``max_position - 1``.
        base: ``rope_theta`` of the config.
        scaling: ``rope_scaling`` or ``rope_parameters`` of the config: ``rope_type`` (or ``type``) and its keys.

            - ``default`` or ``None``: none.
            - ``linear``: ``factor``.
            - ``proportional``: ``partial_rotary_factor``, which of the pairs turn at all (1); optional ``factor``.
            - ``dynamic``: ``factor``. A cache of rotated keys cannot follow a growing sequence, so the frequencies are
              those of a sequence of ``max_position`` tokens; up to the trained length that is no scaling.
            - ``llama3``: ``factor``, ``low_freq_factor``, ``high_freq_factor``.
            - ``yarn``: ``factor``; optional ``attention_factor`` or ``mscale`` and ``mscale_all_dim``, ``beta_fast``
              (32), ``beta_slow`` (1), ``truncate`` (true).
            - ``longrope`` (or ``su``): ``short_factor`` and ``long_factor``, lists of ``rotary_dim / 2`` numbers.
              As with ``dynamic``, ``max_position`` decides: the long ones if it is beyond the trained length.
              Optional ``attention_factor``, or ``short_mscale`` and ``long_mscale`` (Phi-3.5-MoE), or ``factor``.

            The last three need the trained length: ``original_max_position_embeddings``.
        max_position_embeddings: the value of this name in the config; stands in for
            ``original_max_position_embeddings`` (which ``dynamic`` ignores, as ``transformers`` does), and for a
            missing ``factor`` of yarn and longrope through their ratio.
        dtype: the dtype of the table; float32 keeps positions apart that bfloat16 cannot.
        device: where to put it.

    Returns:
        ``[max_position, rotary_dim]``: ``rotary_dim / 2`` cosines, then their sines.

    Raises:
        ValueError: an unknown rope type or key, a missing key, or a number out of range, named in the message.
    """
    require(rotary_dim > 0 and rotary_dim % 2 == 0, f"rotary_dim must be even and positive, got {rotary_dim}")
    require(max_position > 0, f"max_position must be positive, got {max_position}")
    require(base > 1, f"base must be more than 1, got {base}")
    require(dtype in FLOATS, f"dtype must be a float dtype, got {dtype}")
    scaling = scaling or {}
    _check_scaling(scaling, base)
    attention = 1.0
    match _type(scaling):
        case "linear":
            frequencies = _linear(scaling, base, rotary_dim)
        case "proportional":
            frequencies = _proportional(scaling, base, rotary_dim)
        case "dynamic":
            trained = max_position_embeddings or _need(scaling, "max_position_embeddings")
            frequencies = _dynamic(scaling, base, rotary_dim, max_position, trained)
        case "llama3":
            frequencies = _llama3(scaling, base, rotary_dim, _trained_length(scaling, max_position_embeddings))
        case "yarn":
            trained = _trained_length(scaling, max_position_embeddings)
            frequencies, attention = _yarn(scaling, base, rotary_dim, trained, max_position_embeddings)
        case "longrope":
            trained = _trained_length(scaling, max_position_embeddings)
            frequencies, attention = _longrope(
                scaling, base, rotary_dim, max_position, trained, max_position_embeddings
            )
        case _:
            frequencies = _frequencies(base, rotary_dim)
    angles = torch.arange(max_position, dtype=torch.float32)[:, None] * frequencies
    return torch.cat((angles.cos() * attention, angles.sin() * attention), dim=-1).to(device=device, dtype=dtype)

"""Checkpoints changed on purpose, and what loading says to them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tritonllm.models.decoder import Decoder
from tritonllm.models.families import spec_from_config
from tritonllm.models.weights import load_weights


def build(config: dict, dtype: torch.dtype = torch.float32) -> Decoder:
    """An unfilled model on the CPU."""
    return Decoder(spec_from_config(config), dtype=dtype, device=torch.device("cpu"), max_model_len=8)


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Rewrite model.safetensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")


def refused_after(change: Callable[[dict[str, torch.Tensor]], object], good: Path, folder: Path, message: str) -> None:
    """Loading says this of a copy in ``folder`` of a good checkpoint, once its tensors are changed."""
    shutil.copytree(good, folder, dirs_exist_ok=True)
    edit(folder, change)
    refused(folder, message)


def refused(folder: Path, message: str) -> None:
    """Loading says this, and leaves the model as it was."""
    model = build(json.loads((folder / "config.json").read_text()))
    for p in model.parameters():
        p.fill_(7.0)
    with pytest.raises(ValueError, match=message):
        load_weights(model, folder)
    assert all(bool((p == 7.0).all()) for p in model.parameters())

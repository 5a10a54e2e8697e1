"""Tiny classifiers and encoders of transformers, written as checkpoints, with what they say of a prompt."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, PreTrainedModel

from support.tiny_configs import reference_config

SHORT = ("architectures", "model_type", "torch_dtype")


def randomize(model: torch.nn.Module, seed: int = 0) -> None:
    """Large random weights, so that nothing can be left out unseen (as in :mod:`support.tiny_models`)."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        centre = 0.0 if type(module).__name__.startswith(("Gemma", "Nemotron")) else 1.0
        for name, p in module.named_parameters(recurse=False):
            if "Norm" in type(module).__name__ and name == "weight":
                p.data.normal_(centre, 0.2, generator=generator)
            else:
                p.data.normal_(0.0, p.shape[-1] ** -0.5 if p.dim() >= 2 else 0.1, generator=generator)


def write_model(
    folder: Path, config: dict[str, Any], kind: Any = AutoModelForSequenceClassification
) -> PreTrainedModel:
    """Write a random checkpoint of a model of transformers, with ``config`` as it is; returns the model."""
    given = reference_config(config)
    fields = {key: value for key, value in given.items() if key not in SHORT}
    model = kind.from_config(
        AutoConfig.for_model(given["model_type"], **fields), attn_implementation="eager", dtype=torch.float32
    ).eval()
    randomize(model)
    model.save_pretrained(folder)
    written = {**config, "architectures": [type(model).__name__]}
    (folder / "config.json").write_text(json.dumps(written))
    return model


def write_bare(folder: Path, config: dict[str, Any]) -> PreTrainedModel:
    """The same without a head."""
    return write_model(folder, config, AutoModel)


@torch.inference_mode()
def logits_of(model: PreTrainedModel, prompt: list[int], **inputs: Any) -> torch.Tensor:
    """``[labels]``."""
    return model(input_ids=torch.tensor([prompt]), **inputs).logits[0]


@torch.inference_mode()
def hidden_of(model: PreTrainedModel, prompt: list[int], **inputs: Any) -> torch.Tensor:
    """``[tokens, hidden]`` of a model without a head."""
    return model(input_ids=torch.tensor([prompt]), **inputs).last_hidden_state[0]

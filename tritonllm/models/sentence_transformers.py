"""The files with which sentence-transformers describes an embedding model beside ``config.json``.

``modules.json`` lists modules: the transformer, a pooling (``1_Pooling/config.json``), perhaps dense layers (a folder
each, with weights) and a normalization. vLLM reads the same files.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from tritonllm.layers.head import DenseSpec, Head
from tritonllm.models.checkpoint import read_json
from tritonllm.models.tensor_files import open_tensors, stored_tensors

_TYPES: dict[str, Literal["LAST", "CLS", "MEAN"]] = {
    "cls_token": "CLS",
    "mean_tokens": "MEAN",
    "lasttoken": "LAST",
    "cls": "CLS",
    "mean": "MEAN",
}
_ACTIVATIONS = {"Identity": None, "Tanh": "tanh", "ReLU": "relu", "GELU": "gelu", "SiLU": "silu"}


@dataclass(frozen=True, kw_only=True)
class SentenceModules:
    """What ``modules.json`` says.

    Attributes:
        pooling: what of a sequence becomes its vector; ``None`` if the files do not say.
        dense: folders of layers behind the pooling, and what they compute.
        normalize: vectors are divided by their length.
        max_seq_length: tokens to which the model was trained; ``None`` if the files do not say.
    """

    pooling: Literal["LAST", "CLS", "MEAN"] | None
    dense: tuple[tuple[Path, DenseSpec], ...] = ()
    normalize: bool = False
    max_seq_length: int | None = None

    def check_sizes(self, hidden_size: int) -> None:
        """Check that each layer takes vectors of the size that the one before gives.

        Raises:
            ValueError: a dense layer takes vectors of another size than it gets.
        """
        size = hidden_size
        for folder, layer in self.dense:
            if layer.in_features != size:
                raise ValueError(f"{folder}: in_features is {layer.in_features}, but the vectors before it have {size}")
            size = layer.out_features

    def projection(self, *, dtype: torch.dtype, device: torch.device) -> Head | None:
        """The dense layers with their weights; ``None`` without any.

        Raises:
            ValueError: weights that are not there, or of another shape.
        """
        if not self.dense:
            return None
        head = Head(tuple(spec for _, spec in self.dense), dtype=dtype, device=device)
        for (folder, _), layer in zip(self.dense, head, strict=True):
            _fill(folder, dict(layer.named_parameters()))
        return head


def read_modules(folder: Path) -> SentenceModules | None:
    """Read ``modules.json`` and what it names; ``None`` if there is none.

    Raises:
        ValueError: a file that cannot be read, or a module that is not known here.
    """
    file = folder / "modules.json"
    if not file.exists():
        return None
    try:
        modules = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(modules, list) or not all(isinstance(m, dict) and "type" in m for m in modules):
        raise ValueError(f"{file} must hold a list of modules, each with a type")
    pooling: Literal["LAST", "CLS", "MEAN"] | None = None
    dense, normalize = [], False
    for module in modules:
        kind, place = str(module["type"]).rpartition(".")[2], folder / str(module.get("path") or "")
        if kind == "Pooling":
            pooling = _pooling(place / "config.json")
        elif kind == "Dense":
            dense.append((place, _dense(place / "config.json")))
        elif kind == "Normalize":
            normalize = True
        elif kind not in ("Transformer", "Dropout"):
            raise ValueError(
                f"{file}: a module of type {module['type']} is not supported; runner='generate' ignores it"
            )
    length = _max_seq_length(folder)
    return SentenceModules(pooling=pooling, dense=tuple(dense), normalize=normalize, max_seq_length=length)


def _of_module(file: Path) -> dict[str, Any]:
    if not file.exists():
        raise ValueError(f"{file}, which modules.json names, is not there: download the model's folders too")
    return read_json(file)


def _pooling(file: Path) -> Literal["LAST", "CLS", "MEAN"]:
    config = _of_module(file)
    modes = [
        name.removeprefix("pooling_mode_") for name, on in config.items() if on is True and "pooling_mode_" in name
    ]
    if isinstance(config.get("pooling_mode"), str):
        modes = [config["pooling_mode"]]
    if len(modes) != 1 or modes[0] not in _TYPES:
        raise ValueError(
            f"{file} asks for pooling by {' and '.join(modes) or 'nothing'}; one of cls_token, mean_tokens and "
            "lasttoken is supported"
        )
    return _TYPES[modes[0]]


def _dense(file: Path) -> DenseSpec:
    config = _of_module(file)
    name = str(config.get("activation_function", "Tanh")).rpartition(".")[2]
    if name not in _ACTIVATIONS:
        raise ValueError(f"{file}: activation_function {name} is not one of {', '.join(_ACTIVATIONS)}")
    sizes: dict[str, Any] = {key: config.get(key) for key in ("in_features", "out_features")}
    if not all(isinstance(size, int) and size > 0 for size in sizes.values()):
        raise ValueError(f"{file}: in_features and out_features must be integers of at least 1, got {sizes}")
    return DenseSpec(**sizes, bias=config.get("bias", True) is not False, activation=_ACTIVATIONS[name])


def _max_seq_length(folder: Path) -> int | None:
    file = folder / "sentence_bert_config.json"
    length = read_json(file).get("max_seq_length") if file.exists() else None
    return length if isinstance(length, int) and length > 0 else None


@torch.no_grad()
def _fill(folder: Path, parameters: dict[str, torch.nn.Parameter]) -> None:
    stored = stored_tensors(folder, "auto")
    for name, parameter in parameters.items():
        tensor = stored.get(f"linear.{name}")
        if tensor is None or tensor.path is None or tensor.shape != tuple(parameter.shape):
            found = "is missing" if tensor is None else f"has shape {list(tensor.shape)}"
            raise ValueError(f"{folder}: tensor linear.{name} {found}; config.json asks for {list(parameter.shape)}")
        with open_tensors(tensor.path) as file:
            parameter.copy_(file.get(f"linear.{name}"))

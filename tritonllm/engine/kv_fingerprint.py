"""Tells models apart by what decides their keys and values."""

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import xxhash

PIECE = 64 << 20  # bytes that are brought to the host at a time
NAMES_ONLY = ("transformers_version", "torch_dtype", "dtype")  # entries of config.json that change no key
BY_LENGTH = ("longrope", '"su"', "dynamic")  # kinds of rotary positions that depend on the longest sequence


def model_fingerprint(
    models: Iterable[Any], config: Mapping[str, Any], max_model_len: int, layout: object
) -> Callable[[], bytes]:
    """What computes a digest of the weights as they are then, and of all else that keys and values depend on.

    All bytes of the weights are read, 64 MB at a time: checkpoints that share a name, a size and most of their tensors
    are still different models. That takes a second for some GB, and is done at the start and when weights change.

    Args:
        models: modules, those that have blocks of the same numbers.
        config: of ``config.json``.
        max_model_len: positions that the model was made for.
        layout: of a block: sizes, dtypes, tokens; anything whose ``repr`` says it.
    """
    models = list(models)
    facts = {name: value for name, value in config.items() if not name.startswith("_") and name not in NAMES_ONLY}
    text = json.dumps(facts, sort_keys=True, default=repr)
    length = max_model_len if any(kind in text for kind in BY_LENGTH) else None

    def fingerprint() -> bytes:
        digest = xxhash.xxh3_128(f"{text} {length} {layout!r}".encode())
        for model in models:
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
                for piece in _bytes_of(tensor.detach()):
                    digest.update(piece)
        return digest.digest()

    return fingerprint


def _bytes_of(tensor: torch.Tensor) -> Iterable[memoryview]:
    if tensor.layout is not torch.strided:  # of oneDNN, on the CPU
        tensor = tensor.to_dense()
    if tensor.numel():
        for piece in tensor.contiguous().view(-1).view(torch.uint8).split(PIECE):
            yield memoryview(piece.cpu().numpy())

"""Tells models apart by what decides their keys and values."""

import json
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import xxhash

from tritonllm.dist.group import ALONE, ConnectedGroup, Group
from tritonllm.engine.transfer.tensor_digest import digest_of

NAMES_ONLY = ("transformers_version", "torch_dtype", "dtype")  # entries of config.json that change no key
BY_LENGTH = ("longrope", '"su"', "dynamic")  # kinds of rotary positions that depend on the longest sequence


def model_fingerprint(
    models: Iterable[Any], config: Mapping[str, Any], max_model_len: int, layout: object, group: Group = ALONE
) -> Callable[[], bytes]:
    """What computes a digest of the weights as they are then, and of all else that keys and values depend on.

    All bytes of the weights are read, where they are (:mod:`tritonllm.engine.transfer.tensor_digest`): checkpoints that
    share a name, a size and most of their tensors are still different models. That is done at the start, and when
    weights change.

    Args:
        models: modules, those that have blocks of the same numbers.
        config: the fields of the model's ``config.json``.
        max_model_len: positions that the model was made for.
        layout: the layout of a block: sizes, dtypes, tokens; any object whose ``repr`` states them.
        group: engines that each have a part of the weights, and blocks that the others can use. All compute it at once.
    """
    models = list(models)
    facts = {name: value for name, value in config.items() if not name.startswith("_") and name not in NAMES_ONLY}
    text = json.dumps(facts, sort_keys=True, default=repr)
    length = max_model_len if any(kind in text for kind in BY_LENGTH) else None

    def fingerprint() -> bytes:
        digest = xxhash.xxh3_128(f"{text} {length} {layout!r}".encode())
        for model in models:
            named = [*model.named_parameters(), *model.named_buffers()]
            for name, tensor in named:
                digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            digest.update(digest_of(tensor for _, tensor in named))
        return _of_all(digest.digest(), group)

    return fingerprint


def _of_all(digest: bytes, group: Group) -> bytes:
    """Combine the digests of all ranks into one that is equal on all of them."""
    if not isinstance(group, ConnectedGroup):
        return digest
    parts = group.exchange(struct.unpack("<qq", digest))
    return xxhash.xxh3_128_digest(b"".join(struct.pack("<qq", *part) for part in parts))

"""The files of a checkpoint that transformers loads, checked from their headers before it does.

Transformers casts whatever a file holds to the dtype that is asked for, so quantized weights would become numbers that
mean nothing; and what it raises about damaged files comes from the libraries that it reads them with.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tritonllm.models.checkpoint import read_json
from tritonllm.models.tensor_files import BITS, FILES, stored_tensors
from tritonllm.models.weights import is_derived

_POSITIONS = re.compile(r"(^|\.)position_ids$")  # transformers ignores them, too


def check_files(folder: Path, load_format: str, empty_model: Callable[[], Any]) -> None:
    """Refuse weights that transformers cannot read, or would misread.

    Args:
        load_format: which files, as in :func:`~tritonllm.models.tensor_files.weight_files`.
        empty_model: makes the model without its weights; called only where a tensor is not floating point.

    Raises:
        ValueError: no files; a file absent, damaged or of more than tensors; an index without what transformers reads
            of it; a tensor that is not floating point, unless it is a buffer.
    """
    stored = stored_tensors(folder, load_format, single_first=True)
    _check_index(folder, load_format)
    others = {
        name: tensor
        for name, tensor in stored.items()
        if tensor.dtype not in BITS and not is_derived(name, tensor) and not _POSITIONS.search(name)
    }
    lm = empty_model() if others else None
    for name, tensor in others.items():
        if not _is_no_weight(lm, name):
            raise ValueError(
                f"{tensor.path}: tensor {name} is {tensor.dtype}, not one of {', '.join(BITS)}; quantized "
                "checkpoints are not supported"
            )


def _check_index(folder: Path, load_format: str) -> None:
    """Where transformers reads an index, it fails without a field that our loader does not need."""
    for index, single in FILES.values() if load_format == "auto" else [FILES[load_format]]:
        if (folder / single).exists():
            return
        if (folder / index).exists():
            if not isinstance(read_json(folder / index).get("metadata"), dict):
                raise ValueError(
                    f'{folder / index} has no metadata, which transformers needs: add "metadata": {{}} to it'
                )
            return


def _is_no_weight(lm: Any, name: str) -> bool:
    """Whether a tensor goes to a buffer of integers (a mask, a counter), or nowhere because the model ignores it."""
    prefix = f"{lm.base_model_prefix}."
    spellings = {name, prefix + name, name.removeprefix(prefix)}  # files may lack the name of the base model
    if any(parameter in spellings for parameter, _ in lm.named_parameters(remove_duplicate=False)):
        return False
    ignored = any(re.search(pattern, name) for pattern in lm._keys_to_ignore_on_load_unexpected or ())
    return ignored or any(
        buffer in spellings and not tensor.is_floating_point() for buffer, tensor in lm.named_buffers()
    )


def check_tied(folder: Path, lm: Any) -> None:
    """Refuse two tensors where the model has one: transformers would keep both.

    Raises:
        ValueError: an output projection that differs from the embeddings it is tied to.
    """
    parameters = dict(lm.named_parameters(remove_duplicate=False))
    for target, source in lm.get_expanded_tied_weights_keys(all_submodels=True).items():
        one, other = parameters.get(target), parameters.get(source)
        if one is None or other is None or one is other:
            continue
        if not torch.equal(one.view(torch.uint8), other.view(torch.uint8)):  # bits: NaN is equal to itself here
            raise ValueError(
                f"{folder}: tensor {target} differs from {source}, but config.json says they are tied; "
                "set tie_word_embeddings to false there"
            )

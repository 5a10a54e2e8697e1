"""An EAGLE head: one decoder layer that goes on from what the large model has computed.

It sees of each place the token and the large model's last hidden state of the place before, both through one linear map
(``fc``), and gives the hidden state that the large model might have there; embeddings and output projection are the
large model's. "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty": Li et al., 2024. Checkpoints are
as published for EAGLE and EAGLE-2, which differ in how drafts are chosen and not in the head.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tritonllm.layers.linear import Linear
from tritonllm.layers.metadata import AttentionMetadata, KVCacheView
from tritonllm.layers.residual import Stream
from tritonllm.models import checkpoint
from tritonllm.models.decoder import Decoder
from tritonllm.models.families import spec_from_config, weight_map
from tritonllm.models.finite import not_finite, refuse
from tritonllm.models.slots import unfilled
from tritonllm.models.spec import ModelSpec
from tritonllm.models.tensor_files import open_tensors, read, stored_tensors

_SHARED = ("embed_tokens.weight", "lm_head.weight")  # some files repeat them


class EagleHead(Decoder):
    """The head over a large model.

    Args:
        spec: of its layer; what :func:`read_eagle_spec` said.
        target: the large model.
        bias: of ``fc``.
        dtype, device, max_model_len: as of :class:`Decoder`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        target: Decoder,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
    ) -> None:
        super().__init__(spec, dtype=dtype, device=device, max_model_len=max_model_len)
        for name in ("embed", "lm_head"):  # in their place the large model's, which are no part of this module
            delattr(self, name)
            vars(self)[name] = target.embed
        self.fc = Linear(2 * spec.hidden_size, spec.hidden_size, bias=bias, dtype=dtype, device=device)
        self._target = (target,)

    def compute(
        self,
        input_ids: torch.Tensor,
        features: torch.Tensor,
        positions: torch.Tensor,
        metadata: AttentionMetadata,
        kv_cache: Sequence[KVCacheView],
        rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As :meth:`Decoder.forward`, with ``features[T, hidden]`` of the place before each token."""
        x = self.fc(torch.cat([self.embed(input_ids), features], -1))
        plan = self.plan(len(positions), None if rows is None else len(rows), positions.device)
        stream = Stream(x, scale=self.spec.residual_multiplier)
        return self.run(plan, stream, positions, metadata, kv_cache, rows)[0]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The large model's."""
        return self._target[0].compute_logits(hidden)

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """There is one layer, which runs either way."""
        yield


def read_eagle_spec(folder: Path) -> ModelSpec:
    """What a head's ``config.json`` describes.

    Raises:
        ValueError: no such file, a head of EAGLE-3, or not one layer of Llama's kind.
    """
    config: Mapping[str, Any] = checkpoint.read_config(folder)
    if isinstance(config.get("model"), Mapping):  # vLLM's converted files
        config = config["model"]
    names = config.get("architectures") or ["LlamaForCausalLM"]
    if "draft_vocab_size" in config or "eagle3" in names[0].lower():
        raise ValueError(f"{folder} has a head of EAGLE-3, which is not supported yet; take one of EAGLE or EAGLE-2")
    if "llama" not in names[0].lower():
        raise ValueError(f"{folder} is {names[0]}: a head is one layer of LlamaForCausalLM")
    spec = spec_from_config({**config, "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True})
    if spec.num_layers != 1:
        raise ValueError(f"{folder} has {spec.num_layers} layers: a head has one; for a whole model use 'draft_model'")
    return dataclasses.replace(spec, first_norm=False, final_norm=False)


def has_bias(folder: Path) -> bool:
    """Whether ``fc`` of a head has one: ``config.json`` says so, or else the files do."""
    said = checkpoint.read_config(folder).get("bias")
    return any(name.endswith("fc.bias") for name in stored_tensors(folder)) if said is None else bool(said)


@torch.no_grad()
def load_eagle_weights(head: EagleHead, folder: Path, *, load_format: str = "auto", allow_nan: bool = False) -> None:
    """Fill a head's own parameters from the files of ``folder``; the tables that it shares are left alone.

    Raises:
        ValueError: a tensor missing, left over or of a wrong shape, or values that are NaN or infinite, unless
            ``allow_nan``.
    """
    parameters = dict(head.named_parameters())
    slots = {n: s for n, s in weight_map(head.spec).items() if s.parameter in parameters}
    places: dict[str, Any] = {name.removeprefix("model."): slot for name, slot in slots.items()}
    places |= {name: None for name in parameters if name.startswith("fc.")}
    stored = {n.removeprefix("model."): (n, tensor) for n, tensor in stored_tensors(folder, load_format).items()}
    stored = {name: found for name, found in stored.items() if name not in _SHARED and "rotary_emb" not in name}
    present = {name: name for name in slots if name.removeprefix("model.") in stored}
    missing = [*unfilled(slots, present), *(n for n in places if places[n] is None and n not in stored)]
    if missing:
        raise ValueError(f"{folder}: tensor {missing[0]} is missing; the files are incomplete, or no head of EAGLE")
    if more := sorted(stored.keys() - places.keys()):
        raise ValueError(f"{folder}: tensor {more[0]} has no place in a head of EAGLE")
    for name, (original, tensor) in stored.items():
        slot = places[name]
        wanted = tuple(parameters[name].shape) if slot is None else slot.shape
        if tensor.shape != wanted:
            raise ValueError(
                f"{folder}: tensor {name} has shape {list(tensor.shape)}, the model asks for {list(wanted)}"
            )
        assert tensor.path is not None
        with open_tensors(tensor.path) as file:
            values = read(file, original, tensor)
        assert isinstance(values, torch.Tensor)
        if slot is None:
            parameters[name].copy_(values)
        else:
            slot.write(parameters[slot.parameter], values)
    if not allow_nan and (bad := not_finite(parameters)):
        refuse(f"{folder}: ", ((name, parameters[name]) for name in bad))


@torch.no_grad()
def dummy_eagle_weights(head: EagleHead, seed: int) -> None:
    """Numbers from ``seed`` in the place of a file's, as :func:`~tritonllm.models.weights.dummy_weights` makes them."""
    generator = torch.Generator(head.fc.weight.device).manual_seed(seed)
    for name, parameter in head.named_parameters():
        is_norm = name.endswith("norm.weight")
        parameter.fill_(1.0) if is_norm else parameter.normal_(0.0, 0.02, generator=generator)


def write_eagle_head(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Save a head as published ones are: for tests, and for what trains one."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config), indent=1) + "\n")
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")

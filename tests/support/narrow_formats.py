"""Checkpoints in narrow formats, made up: random numbers, scales and zero points, laid out as each format's description
says, beside the values that they stand for.

A ``Form`` makes a weight of a shape: its tensors, by what follows the module's name, and its values in float32. Values
are computed here element by element from what was drawn, before it is packed.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from support.tiny_models import tiny_config, write_checkpoint
from tritonllm.dist.group import Group
from tritonllm.kernels import widen_weight
from tritonllm.layers.parameters import HoldsWeights, deferred
from tritonllm.models.decoder import Decoder
from tritonllm.models.families import spec_from_config
from tritonllm.models.local_spec import by_expert
from tritonllm.models.stages import Stage
from tritonllm.models.weights import load_weights

Tensors = dict[str, torch.Tensor]
Form = Callable[[tuple[int, ...], torch.Generator], tuple[Tensors, torch.Tensor]]


@dataclass(frozen=True)
class Pair:
    """A checkpoint with narrow weights, and one with their values.

    Attributes:
        narrow, wide: the folders.
        names: the weights that are narrow in the first.
    """

    narrow: Path
    wide: Path
    names: tuple[str, ...]


def is_product(name: str) -> bool:
    """Whether formats make a tensor narrow by default: the weights of the layers' products, no routers."""
    return ".layers." in name and (name.endswith(("_proj.weight", "_proj")) or ".experts." in name)


def write_pair(
    folder: Path,
    family: str,
    form: Form | Mapping[str, Form],
    quantization: dict[str, Any] | None,
    *,
    where: Callable[[str], bool] = is_product,
    before: Callable[[Tensors], object] | None = None,
    change: Callable[[Tensors], object] | None = None,
    **fields: Any,
) -> Pair:
    """Write both checkpoints of a tiny model.

    Args:
        family: of the model.
        form: how narrow weights lie; or by a part of their names.
        quantization: the ``quantization_config``.
        where: which tensors become narrow.
        before: what to do with the tensors of both checkpoints first.
        change: what to do with the tensors of the narrow one last.
        fields: of the configuration.
    """
    narrow, wide = folder / "narrow", folder / "wide"
    config = tiny_config(family, **fields)
    for each in (narrow, wide):
        each.mkdir()
    write_checkpoint(wide, config)
    tensors, generator = load_file(wide / "model.safetensors"), torch.Generator().manual_seed(1)
    if before is not None:
        before(tensors)
    values, names = dict(tensors), tuple(name for name in sorted(tensors) if where(name))
    assert names
    for name in names:
        make = form if callable(form) else next(one for part, one in form.items() if part in name)
        shape = tuple(tensors.pop(name).shape)
        parts, values[name] = make(shape, generator)
        assert values[name].shape == shape and values[name].dtype == torch.float32
        assert values[name].isfinite().all() and len(values[name].unique()) > 3
        stem = name.removesuffix(".weight")
        tensors |= {stem + end: part for end, part in parts.items()}
    if change is not None:
        change(tensors)
    save_file({name: t.contiguous() for name, t in tensors.items()}, narrow / "model.safetensors")
    save_file({name: t.contiguous() for name, t in values.items()}, wide / "model.safetensors")
    if quantization is not None:
        config = {**config, "quantization_config": quantization}
    (narrow / "config.json").write_text(json.dumps(config))
    return Pair(narrow, wide, names)


def stack_experts(tensors: Tensors) -> None:
    """Experts one by one become tensors of all, as transformers has them in memory."""
    for layer in {name.partition(".experts.")[0] for name in tensors if ".experts." in name}:
        stem, one = f"{layer}.experts", {}
        count = sum(name.startswith(f"{stem}.") and name.endswith("down_proj.weight") for name in tensors)
        for kind in ("gate", "up", "down"):
            one[kind] = torch.stack([tensors.pop(f"{stem}.{e}.{kind}_proj.weight") for e in range(count)])
        tensors[f"{stem}.gate_up_proj"] = torch.cat([one["gate"], one["up"]], 1)
        tensors[f"{stem}.down_proj"] = one["down"]


def config_of(folder: Path) -> dict[str, Any]:
    """The ``config.json`` of a folder."""
    return json.loads((folder / "config.json").read_text())


def decoders(folder: Path, dtype: torch.dtype = torch.float32, *, ranks: bool = True) -> list[Decoder]:
    """The model in a folder: whole; ranks of two, of a model with experts also with whole ones; its last stage."""
    spec = spec_from_config(config_of(folder))
    sizes = {"dtype": dtype, "device": torch.device("cpu"), "max_model_len": 16}
    found = [Decoder(spec, **sizes)]
    if ranks:
        found += [Decoder(spec, **sizes, group=Group(rank, 2)) for rank in range(2)]
        if spec.experts:
            found += [Decoder(by_expert(spec), **sizes, group=Group(rank, 2)) for rank in range(2)]
        found.append(Decoder(spec, **sizes, stage=Stage(1, range(spec.num_layers - 1, spec.num_layers), first=False)))
    for model in found:
        load_weights(model, folder)
    return found


def kept(folder: Path, dtype: torch.dtype = torch.float32, **how: Any) -> Decoder:
    """The model in a folder with its weights as narrow as they are kept on a GPU."""
    with deferred():
        spec = spec_from_config(config_of(folder))
        model = Decoder(spec, dtype=dtype, device=torch.device("cpu"), max_model_len=16, **how)
    load_weights(model, folder)
    return model


def widened(model: Decoder) -> Tensors:
    """The model's tensors, narrow ones widened."""
    found = model.state_dict()
    for path, module in model.named_modules():
        if isinstance(module, HoldsWeights):
            for name in module.held_names:
                of, stem = module.held(name), f"{path}.{name}"
                wide = [widen_weight(one, model.dtype) for one in (of.each() if of.data.dim() == 3 else [of])]
                found[stem] = torch.stack(wide) if of.data.dim() == 3 else wide[0]
                for part in ("scales", "zeros", "row_scales"):
                    found.pop(f"{stem}_{part}", None)
    return found


def check_pair(pair: Pair, dtype: torch.dtype = torch.float32, *, ranks: bool = True) -> None:
    """Every parameter of both checkpoints is equal bit for bit, kept narrow or not."""
    for how in ({}, {"group": Group(1, 2)}) if ranks else ({},):
        spec = spec_from_config(config_of(pair.wide))
        want = Decoder(spec, dtype=dtype, device=torch.device("cpu"), max_model_len=16, **how)
        load_weights(want, pair.wide)
        got = widened(kept(pair.narrow, dtype, **how))
        assert got.keys() == want.state_dict().keys()
        for name, tensor in want.state_dict().items():
            assert torch.equal(got[name], tensor), name
    both = zip(decoders(pair.narrow, dtype, ranks=ranks), decoders(pair.wide, dtype, ranks=ranks), strict=True)
    for got, want in both:
        expected = want.state_dict()
        for name, tensor in got.state_dict().items():
            assert torch.equal(tensor, expected[name]), name


def positive(shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Scales from 0.01 to 0.06."""
    return (0.01 + 0.05 * torch.rand(shape, generator=generator)).to(dtype)


def integers(low: int, high: int, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """int64 from ``low`` to ``high``, both included."""
    return torch.randint(low, high + 1, shape, generator=generator)


def float8(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Every float8_e4m3fn but NaN may come."""
    codes = integers(0, 255, shape, generator)
    return torch.where(codes % 128 == 127, 0, codes).to(torch.uint8).view(torch.float8_e4m3fn)


def floats4(shape: tuple[int, ...], generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Floats of four bits: the bits, int64 from 0 to 15, and the values."""
    codes = integers(0, 15, shape, generator)
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])[codes % 8]
    return codes, torch.where(codes >= 8, -magnitudes, magnitudes)


def mxfp4(shape: tuple[int, ...], generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    """The experts ``[E, K, N]`` of gpt-oss."""
    experts, k, n = shape
    codes, signed = floats4((experts, n, k), generator)
    exponents = integers(119, 123, (experts, n, k // 32), generator)
    packed = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
    parts = {"_blocks": packed.unflatten(-1, (-1, 16)), "_scales": exponents.to(torch.uint8)}
    return parts, (signed * torch.exp2(exponents - 127.0).repeat_interleave(32, -1)).mT.contiguous()


def nvfp4(shape: tuple[int, ...], generator: torch.Generator) -> tuple[Tensors, torch.Tensor]:
    """A weight ``[N, K]`` of ModelOpt."""
    (codes, signed), factor = floats4(shape, generator), positive((), generator) / 500
    scales = (1 + 400 * torch.rand(shape[0], shape[1] // 16, generator=generator)).to(torch.float8_e4m3fn)
    parts = {
        ".weight": (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8),
        ".weight_scale": scales,
        ".weight_scale_2": factor,
        ".input_scale": torch.tensor(2.0),
    }
    return parts, signed * (scales.float() * factor).repeat_interleave(16, 1)


def of_blocks(scales: torch.Tensor, shape: tuple[int, ...], block: tuple[int, int]) -> torch.Tensor:
    """The scale of each element of ``[..., N, K]``."""
    *_, n, k = shape
    return scales[..., torch.arange(n)[:, None] // block[0], torch.arange(k)[None, :] // block[1]]


def stream(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Unsigned numbers ``[A, B]`` into words ``[A * bits / 32, B]``: bit i of a column is bit i % 32 of word i / 32."""
    places = torch.arange(bits)
    flat = (numbers[:, None, :] >> places[:, None] & 1).flatten(0, 1)  # the lowest bit of a number first
    words = (flat.unflatten(0, (-1, 32)).long() << torch.arange(32)[:, None]).sum(1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def gptq(
    shape: tuple[int, ...],
    generator: torch.Generator,
    *,
    bits: int = 4,
    group: int = 32,
    sym: bool = False,
    order: str = "in order",
    minus: int = 1,
) -> tuple[Tensors, torch.Tensor]:
    """A weight as GPTQ stores it.

    Args:
        group: how many columns share a scale; -1 for all.
        order: ``in order``, ``act-order``, or ``left out``: in order, and the file does not say so.
        minus: zero points are stored minus this.
    """
    (n, k), top = shape, (1 << bits) - 1
    groups = -(-k // group) if group > 0 else 1
    numbers = integers(0, top, (k, n), generator)
    zeros = torch.full((groups, n), 1 << bits - 1) if sym else integers(minus, top + minus, (groups, n), generator)
    scales = positive((groups, n), generator, torch.float16)
    column = torch.arange(k) // group if group > 0 else torch.zeros(k, dtype=torch.int64)
    if order == "act-order":
        column = column[torch.randperm(k, generator=generator)]
    parts = {
        ".qweight": stream(numbers, bits),
        ".qzeros": stream((zeros - minus).mT, bits).mT,
        ".scales": scales,
        ".g_idx": column.int(),
    }
    if order == "left out":
        del parts[".g_idx"]
    return parts, ((numbers - zeros[column]).float() * scales.float()[column]).mT.contiguous()

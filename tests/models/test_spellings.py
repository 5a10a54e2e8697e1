"""Names and layouts that checkpoints use for the same weights: all of them load, and to the same model."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.checkpoints import edit, refused
from support.tiny_models import load_decoder, tiny_config, write_checkpoint
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tritonllm.dist.group import Group
from tritonllm.experts.load import ExpertLoad
from tritonllm.experts.rebalance import rebalance
from tritonllm.models.decoder import Decoder
from tritonllm.models.families import spec_from_config
from tritonllm.models.local_spec import by_expert
from tritonllm.models.weights import hf_tensors, load_weights

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path, tiny_config("qwen2"))
    return tmp_path


@pytest.mark.parametrize(("family", "prefix"), [("qwen2", "model."), ("gpt2", "transformer."), ("opt", "model.")])
def test_names_without_the_base_model(tmp_path, family, prefix):
    write_checkpoint(tmp_path, tiny_config(family))
    want = load_decoder(tmp_path).state_dict()
    short: dict[str, torch.Tensor] = {}
    edit(tmp_path, lambda tensors: short.update({n.removeprefix(prefix): tensors.pop(n) for n in list(tensors)}))
    edit(tmp_path, lambda tensors: tensors.update(short))
    assert not any(name.startswith(prefix) for name in load_file(tmp_path / "model.safetensors"))
    got = load_decoder(tmp_path).state_dict()
    assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)


def test_both_names_of_a_tensor(folder):
    edit(folder, lambda tensors: tensors.update({Q_PROJ.removeprefix("model."): tensors[Q_PROJ].clone()}))
    refused(folder, rf"tensors layers\.1\.self_attn\.q_proj\.weight and {Q_PROJ} are two names of one")


def test_a_name_is_not_cut_twice(folder):
    edit(folder, lambda tensors: tensors.update({"weight": tensors.pop("lm_head.weight")}))
    refused(folder, "tensor weight has no place")


@pytest.fixture
def experts(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path, tiny_config("qwen3_moe", num_hidden_layers=1, num_experts=3))
    return tmp_path


EXPERTS = "model.layers.0.mlp.experts"


def stack(tensors: dict[str, torch.Tensor], *, gate_up: bool = True, down: bool = True) -> None:
    """Replace experts one by one by tensors of all."""
    parts = {
        name: torch.stack([tensors[f"{EXPERTS}.{e}.{name}.weight"] for e in range(3)])
        for name in ("gate_proj", "up_proj", "down_proj")
    }
    if gate_up:
        tensors[f"{EXPERTS}.gate_up_proj"] = torch.cat([parts["gate_proj"], parts["up_proj"]], dim=1)
    if down:
        tensors[f"{EXPERTS}.down_proj"] = parts["down_proj"]
    for name in list(tensors):
        if (gate_up and name.endswith(("gate_proj.weight", "up_proj.weight"))) or (down and "down_proj.w" in name):
            del tensors[name]


@pytest.mark.parametrize("gate_up", [True, False])
def test_stacked_experts(experts, gate_up):
    want = load_decoder(experts).state_dict()
    edit(experts, lambda tensors: stack(tensors, gate_up=gate_up))
    got = load_decoder(experts).state_dict()
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_missing_experts(experts):
    gate = f"{EXPERTS}.1.gate_proj.weight"
    edit(experts, lambda tensors: tensors.pop(gate))
    refused(experts, f"tensor {gate} is missing")
    edit(experts, lambda tensors: [tensors.pop(name) for name in list(tensors) if "experts" in name])
    refused(experts, rf"tensor {EXPERTS}\.0\.gate_proj\.weight \(and 8 more\) is missing")


def test_missing_stacked_experts(experts):
    edit(experts, stack)
    edit(experts, lambda tensors: tensors.update({f"{EXPERTS}.down_proj": tensors[f"{EXPERTS}.down_proj"][:2]}))
    refused(experts, rf"tensor {EXPERTS}\.down_proj has shape \[2, 64, 24\], but config\.json asks for \[3, 64, 24\]")


def test_experts_in_two_spellings(experts):
    down = f"{EXPERTS}.1.down_proj.weight"
    edit(experts, lambda tensors: (kept := tensors[down], stack(tensors), tensors.update({down: kept})))
    refused(experts, rf"tensors {down} and {EXPERTS}\.down_proj hold the same weights in two spellings")


def mxfp4_experts(folder: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Pack the experts of a GPT-OSS; returns what they stand for."""
    generator, want = torch.Generator().manual_seed(0), {}

    def pack(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
            experts, columns, rows = tensors.pop(name).shape
            shape = (experts, rows, columns // 32)
            blocks = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=generator)
            scales = torch.randint(120, 130, shape, dtype=torch.uint8, generator=generator)
            tensors.update({f"{name}_blocks": blocks, f"{name}_scales": scales})
            want[name] = convert_moe_packed_tensors(blocks, scales, dtype=dtype)

    edit(folder, pack)
    return want


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_experts(tmp_path, dtype):
    write_checkpoint(tmp_path, tiny_config("gpt_oss", intermediate_size=96))
    want = mxfp4_experts(tmp_path, dtype)
    got = hf_tensors(load_decoder(tmp_path, dtype=dtype))
    assert len(want) == 6
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor)


def test_mxfp4_experts_of_a_rank(tmp_path):
    """Whole experts, and columns of all."""
    write_checkpoint(tmp_path, tiny_config("gpt_oss", intermediate_size=96))
    mxfp4_experts(tmp_path, torch.float32)
    whole = dict(load_decoder(tmp_path).named_parameters())
    spec = spec_from_config(json.loads((tmp_path / "config.json").read_text()))
    sizes = {"dtype": torch.float32, "device": torch.device("cpu"), "max_model_len": 32, "group": Group(1, 2)}
    for name, shards, axis, part in (
        ("down", by_expert(spec), 0, slice(2, 4)),
        ("gate_up", by_expert(spec), 0, slice(2, 4)),
        ("down", spec, 2, slice(48, 96)),
    ):
        rank = Decoder(shards, **sizes)
        load_weights(rank, tmp_path)
        mine, all_of_it = dict(rank.named_parameters())[f"layers.1.mlp.{name}"], whole[f"layers.1.mlp.{name}"]
        assert torch.equal(mine, all_of_it[(slice(None),) * axis + (part,)])
    load = ExpertLoad(spec.architecture, dict.fromkeys(spec.experts, (9, 1, 2, 3)))
    placed = by_expert(spec, rebalance(load, 2, 2))  # 0 and 3 on both ranks
    rank = Decoder(placed, **sizes)
    load_weights(rank, tmp_path)
    for name in ("gate_up", "gate_up_bias", "down", "down_bias"):
        name = f"layers.1.mlp.{name}"
        assert torch.equal(dict(rank.named_parameters())[name], whole[name][list(placed.layers[1].mlp.slots[3:])])


def test_mxfp4_elsewhere(folder):
    name = "model.layers.0.mlp.down_proj.weight"
    packed = {f"{name}_blocks": torch.zeros(1, 88, 2, 16, dtype=torch.uint8)}
    packed[f"{name}_scales"] = packed[f"{name}_blocks"][..., 0].clone()
    edit(folder, lambda tensors: (tensors.pop(name), tensors.update(packed)))
    refused(folder, rf"tensor {name} has shape \[1, 64, 88\], but config\.json asks for \[64, 88\]")


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("zipped", [True, False])
def test_pytorch_files(folder, shards, zipped):
    want = load_decoder(folder).state_dict()
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names, home = sorted(tensors), {}
    for i in range(shards):
        file = f"pytorch_model-{i}.bin" if shards > 1 else "pytorch_model.bin"
        part = {name: tensors[name] for name in names[i::shards]}
        torch.save(part, folder / file, _use_new_zipfile_serialization=zipped)
        home.update(dict.fromkeys(part, file))
    if shards > 1:
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": home}))
    got = load_decoder(folder).state_dict()
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_layers_that_only_draft(tmp_path):
    """GLM-4.5's files have one layer more than the model."""
    write_checkpoint(tmp_path, tiny_config("glm4_moe"))
    edit(tmp_path, lambda tensors: tensors.update({"model.layers.3.eh_proj.weight": torch.zeros(2)}))
    load_decoder(tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({"model.layers.4.eh_proj.weight": torch.zeros(2)}))
    refused(tmp_path, r"tensor model\.layers\.4\.eh_proj\.weight has no place")


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "qwen3_moe", "gpt_oss"])
def test_on_the_device(tmp_path, family):
    """Every layout arrives there as on the CPU, with the conversion on the way."""
    if family == "gpt_oss":
        write_checkpoint(tmp_path, tiny_config(family, intermediate_size=96))
        mxfp4_experts(tmp_path, torch.bfloat16)
    else:
        write_checkpoint(tmp_path, tiny_config(family))
    want = load_decoder(tmp_path, dtype=torch.bfloat16).state_dict()
    got = load_decoder(tmp_path, dtype=torch.bfloat16, device="cuda").state_dict()
    for name, tensor in want.items():
        assert got[name].is_cuda and torch.equal(got[name].cpu(), tensor), name

"""Strict loading: what is wrong with a checkpoint is said, and nothing is loaded from it."""

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkout import environment
from support.checkpoints import build, edit, refused
from support.tiny_models import ALL_FAMILIES, load_decoder, tiny_config, write_checkpoint
from tqdm import tqdm

from tritonllm.layers.norm import Norm
from tritonllm.models import weights
from tritonllm.models.decoder import Decoder
from tritonllm.models.families import spec_from_config, weight_map
from tritonllm.models.weights import copy_tensors, dummy_weights, hf_tensor_names, hf_tensors, load_weights

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path, tiny_config("qwen2"))
    return tmp_path


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path, tiny_config("qwen2"), max_shard_size="40KB")
    return tmp_path


@pytest.mark.parametrize("max_shard_size", ["1GB", "40KB"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_tensor_arrives(tmp_path, dtype, max_shard_size):
    theirs = write_checkpoint(tmp_path, tiny_config("qwen3"), max_shard_size=max_shard_size)
    want = theirs.state_dict()
    got = hf_tensors(load_decoder(tmp_path, dtype=dtype))
    assert got.keys() == want.keys()
    for name, tensor in got.items():
        assert tensor.dtype == dtype
        assert torch.equal(tensor, want[name].to(dtype)), name


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_names_are_those_of_transformers(tmp_path, family):
    config = tiny_config(family)
    write_checkpoint(tmp_path, config)
    written = {name: tuple(t.shape) for name, t in load_file(tmp_path / "model.safetensors").items()}
    assert hf_tensor_names(spec_from_config(config)) == written


def test_a_checkpoint_in_half_precision(folder):
    edit(folder, lambda tensors: tensors.update({name: t.half() for name, t in tensors.items()}))
    want = load_file(folder / "model.safetensors")[Q_PROJ].float()
    assert torch.equal(hf_tensors(load_decoder(folder))[Q_PROJ], want)


def test_missing_tensor(folder):
    edit(folder, lambda tensors: tensors.pop(Q_PROJ))
    refused(folder, f"tensor {Q_PROJ} is missing; the files are incomplete")


def test_missing_tensors(folder):
    edit(folder, lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers.2" in name])
    refused(folder, r"tensor model\.layers\.2\.\S+ \(and 11 more\) is missing")


def test_leftover_tensor(folder):
    edit(folder, lambda tensors: tensors.update({"model.layers.3.mlp.up_proj.weight": torch.zeros(2)}))
    refused(folder, r"model\.safetensors: tensor model\.layers\.3\.mlp\.up_proj\.weight has no place in the model")


def test_wrong_shape(folder):
    edit(folder, lambda tensors: tensors.update({Q_PROJ: torch.zeros(64, 63)}))
    refused(folder, rf"tensor {Q_PROJ} has shape \[64, 63\], but config\.json asks for \[64, 64\]")


def test_not_a_float(folder):
    edit(folder, lambda tensors: tensors.update({Q_PROJ: torch.zeros(64, 64, dtype=torch.int8)}))
    refused(folder, f"tensor {Q_PROJ} is I8, not one of F64, .* not a part of a narrow weight")


def test_the_names_of_a_quantized_checkpoint(folder):
    packed = {Q_PROJ.replace("weight", "qweight"): torch.zeros(8, 64, dtype=torch.int32)}
    edit(folder, lambda tensors: tensors.update(packed))
    refused(folder, r"q_proj\.qweight is I32, not one of .* not a part of a narrow weight")


def test_unreadable_files(folder):
    """What else is wrong with files is tested with the reader."""
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    refused(folder, r"model\.safetensors is not a complete safetensors file .*download it again")
    file.unlink()
    refused(folder, r"has no weights for load_format='auto': expected model\.safetensors")


def test_missing_shard(shards):
    file = max(shards.glob("model-*.safetensors"))
    file.unlink()
    refused(shards, rf"{file.name}, named by model\.safetensors\.index\.json, does not exist")


def test_tensor_in_two_shards(shards):
    first, second = sorted(shards.glob("model-*.safetensors"))[:2]
    double = load_file(first)
    save_file({**load_file(second), **double}, second)
    refused(shards, f"tensor .* is in both .*{first.name} and .*{second.name}")


def test_stale_single_file_beside_an_index(shards):
    """The index decides, as in transformers."""
    (shards / "model.safetensors").write_bytes(b"left over")
    load_decoder(shards)


def test_buffers_of_old_checkpoints_are_known(folder):
    shapes = {"rotary_emb.inv_freq": (8,), "attn.bias": (1, 1, 4, 4), "attention.bias": (1, 1, 4, 4)}
    shapes |= {"attn.masked_bias": (), "attention.masked_bias": ()}
    buffers = {
        f"model.layers.1.self_attn.{name}": torch.ones(shape, dtype=torch.uint8) for name, shape in shapes.items()
    }
    edit(folder, lambda tensors: tensors.update(buffers))
    load_decoder(folder)


@pytest.mark.parametrize("name", ["attn.bias", "c_attn.bias", "rotary_emb.inv_freq.weight", "self_attn.bias"])
def test_what_looks_like_a_buffer_is_not_dropped(folder, name):
    edit(folder, lambda tensors: tensors.update({f"model.layers.1.{name}": torch.ones(64)}))
    refused(folder, rf"tensor model\.layers\.1\.{name} has no place")


def test_biases_where_others_have_masks(tmp_path):
    """GPT-2's fused projection is ``attn.c_attn.bias``, its mask ``attn.bias``."""
    want = write_checkpoint(tmp_path, tiny_config("gpt2")).state_dict()
    masks = {f"transformer.h.{i}.attn.bias": torch.ones(1, 1, 256, 256) for i in range(3)}
    edit(tmp_path, lambda tensors: tensors.update(masks))
    model = load_decoder(tmp_path)
    assert torch.equal(model.layers[1].attention.qkv.bias, want["transformer.h.1.attn.c_attn.bias"])


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path, tiny_config("qwen2", tie_word_embeddings=True))
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tied_table_stored_twice(tied, dtype):
    edit(tied, lambda tensors: tensors.update({"lm_head.weight": tensors[EMBEDDING].to(dtype, copy=True)}))
    model = load_decoder(tied)
    assert model.lm_head is model.embed
    assert torch.equal(model.embed.weight, load_file(tied / "model.safetensors")[EMBEDDING])


def test_tied_table_stored_as_output(tied):
    want = load_decoder(tied).embed.weight
    edit(tied, lambda tensors: tensors.update({"lm_head.weight": tensors.pop(EMBEDDING)}))
    assert torch.equal(load_decoder(tied).embed.weight, want)


def test_tied_table_with_another_output(tied):
    edit(tied, lambda tensors: tensors.update({"lm_head.weight": tensors[EMBEDDING].clone()}))
    edit(tied, lambda tensors: tensors["lm_head.weight"][100, 63].add_(1e-3))
    refused(tied, r"lm_head\.weight differs from model\.embed_tokens\.weight.*set tie_word_embeddings to false")
    edit(tied, lambda tensors: tensors.update({"lm_head.weight": tensors[EMBEDDING][:50].clone()}))
    refused(tied, r"lm_head\.weight has shape \[50, 64\]")


def test_untied_without_output(folder):
    edit(folder, lambda tensors: tensors.pop("lm_head.weight"))
    refused(folder, r"tensor lm_head\.weight is missing; if .* set tie_word_embeddings to true in config\.json")


def test_untied_without_output_of_another_name(tmp_path):
    write_checkpoint(tmp_path, tiny_config("gpt_neox"))
    edit(tmp_path, lambda tensors: tensors.pop("embed_out.weight"))
    refused(tmp_path, r"tensor embed_out\.weight is missing; if .* set tie_word_embeddings to true")


def test_copy_tensors():
    source, model = (build(tiny_config("gpt_neox"), dtype) for dtype in (torch.float32, torch.bfloat16))
    dummy_weights(source, 0)
    tensors = hf_tensors(source)
    copy_tensors(model, tensors)
    for name, p in model.named_parameters():
        assert torch.equal(p, source.get_parameter(name).bfloat16())
    with pytest.raises(ValueError, match=r"^tensor final_layer has no place"):
        copy_tensors(model, {**tensors, "final_layer": torch.zeros(1)})
    name = "gpt_neox.layers.2.attention.dense.bias"
    with pytest.raises(ValueError, match=f"^tensor {name} has shape"):
        copy_tensors(model, {**tensors, name: torch.zeros(1)})
    del tensors[name]
    with pytest.raises(ValueError, match=f"^tensor {name} is missing"):
        copy_tensors(model, tensors)


def test_a_weight_map_of_another_model(monkeypatch):
    """A mistake in a family must not broadcast or leave a parameter out."""
    model = build(tiny_config("llama"))
    slots = weight_map(model.spec)
    tensors = hf_tensors(model)
    monkeypatch.setattr(
        weights, "weight_map", lambda spec: {n: s for n, s in slots.items() if n != "model.norm.weight"}
    )
    with pytest.raises(ValueError, match=r"the weight map gives norm\.weight the shape None, the model \(64,\)"):
        copy_tensors(model, tensors)
    one = slots["model.norm.weight"]
    wrong = {**slots, "model.norm.weight": type(one)(parameter="norm.weight", shape=(1,))}
    monkeypatch.setattr(weights, "weight_map", lambda spec: wrong)
    with pytest.raises(ValueError, match=r"the weight map gives norm\.weight the shape \(1,\), the model \(64,\)"):
        copy_tensors(model, tensors)


def test_a_weight_with_the_name_of_a_buffer(monkeypatch):
    model = build(tiny_config("llama"))
    renamed = {
        name.replace("model.norm.weight", "model.attn.masked_bias"): s for name, s in weight_map(model.spec).items()
    }
    monkeypatch.setattr(weights, "weight_map", lambda spec: renamed)
    dummy_weights(model, 0)
    tensors = {**hf_tensors(model), "model.attn.masked_bias": torch.full((64,), 5.0)}
    copy_tensors(model, tensors)
    assert bool((model.norm.weight == 5).all())


def test_parameters_may_need_gradients(folder):
    """Parameters of ours never do."""
    tensors = {name: torch.nn.Parameter(t) for name, t in load_file(folder / "model.safetensors").items()}
    model = build(tiny_config("qwen2"))
    copy_tensors(model, tensors)
    (folder / "model.safetensors").unlink()
    torch.save(tensors, folder / "pytorch_model.bin")
    for p in [*model.parameters(), *load_decoder(folder).parameters()]:
        assert p.is_leaf and not p.requires_grad


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("terminal", "progress", "shown"),
    [(True, None, True), (False, None, False), (True, False, False), (False, True, True)],
)
def test_progress_bar(shards, monkeypatch, terminal, progress, shown):
    bars: list[Any] = []

    class Recorded(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            bars.append(self)

    stream = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(weights, "tqdm", Recorded)
    model = build(json.loads((shards / "config.json").read_text()))
    load_weights(model, shards, progress=progress)
    (bar,) = bars
    if shown:
        assert bar.n == bar.total == sum(p.numel() * p.itemsize for p in model.parameters())
        assert "loading weights:   0%" in stream.getvalue() and stream.getvalue().split("\r")[-2].isspace()
    else:
        assert stream.getvalue() == ""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("kind", "zipped"),
    [("safetensors", True), *(pytest.param("bin", zipped, marks=pytest.mark.long) for zipped in (True, False))],
)
def test_host_memory(tmp_path, kind, zipped):
    """Beside the model, loading holds what it has touched of one file: here 64 MiB of 384."""
    config = tiny_config("llama", hidden_size=1024, intermediate_size=4096, num_hidden_layers=6, num_key_value_heads=4)
    (tmp_path / "config.json").write_text(json.dumps(config))
    names = hf_tensor_names(spec_from_config(config))
    stem, home = "model" if kind == "safetensors" else "pytorch_model", {}
    for i in range(6):
        part = [name for name in names if f".layers.{i}." in name or (i == 5 and ".layers." not in name)]
        tensors = {name: torch.ones(names[name]) for name in part}
        file = tmp_path / f"{stem}-{i}.{kind}"
        if kind == "safetensors":
            save_file(tensors, file)
        else:
            torch.save(tensors, file, _use_new_zipfile_serialization=zipped)
        home.update(dict.fromkeys(part, file.name))
    (tmp_path / f"{stem}.{kind}.index.json").write_text(json.dumps({"weight_map": home}))
    command = [sys.executable, "-m", "support.measure_loading", str(tmp_path)]
    variables = environment(MALLOC_MMAP_THRESHOLD_="131072")  # glibc gives memory back when it is freed
    result = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    largest = max(file.stat().st_size for file in tmp_path.glob(f"{stem}-*"))
    assert largest // 2 < int(result.stdout) < largest + 2**24


def test_dummy_weights():
    """Biases and sinks are numbers too, and a norm's factor is 1 also where a weight counts from 1."""
    small = {"gpt_oss": "sinks", "gpt_neox": "norm.bias", "gemma3_text": "q_norm", "qwen3": "k_norm"}
    for family, name in small.items():
        models = [build(tiny_config(family)) for _ in range(3)]
        for model in models:
            for p in model.parameters():
                p.fill_(float("nan"))
        for model, seed in zip(models, (3, 3, 4), strict=True):
            dummy_weights(model, seed)
        first, same, other = (dict(model.named_parameters()) for model in models)
        assert any(name in parameter for parameter in first)
        norms = {f"{path}.weight": module for path, module in models[0].named_modules() if isinstance(module, Norm)}
        for parameter, p in first.items():
            assert torch.equal(p, same[parameter])
            if parameter in norms:
                assert bool((p + norms[parameter].spec.weight_offset == 1).all())
            else:
                assert not torch.equal(p, other[parameter])
                assert p.numel() < 64 or 0.012 < float(p.std()) < 0.03, parameter


@pytest.mark.gpu
def test_dummy_weights_on_the_device():
    config = tiny_config("llama", hidden_size=4096, intermediate_size=14336, num_attention_heads=32)
    device = torch.device("cuda")
    model = Decoder(spec_from_config(config), dtype=torch.bfloat16, device=device, max_model_len=8)
    for p in model.parameters():
        p.fill_(float("nan"))
    dummy_weights(model, 0)
    for p in model.parameters():
        assert p.is_cuda and bool(p.isfinite().all())

"""Strict loading: what is wrong with a checkpoint is said, and nothing is loaded from it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_models import load_decoder, tiny_config, write_checkpoint

from tritonllm.models.decoder import Decoder
from tritonllm.models.families import spec_from_config
from tritonllm.models.weights import dummy_weights, hf_tensor_names, hf_tensors, load_weights

CPU = torch.device("cpu")
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
EMBEDDING = "model.embed_tokens.weight"


def build(config: dict, dtype: torch.dtype = torch.float32) -> Decoder:
    return Decoder(spec_from_config(config), dtype=dtype, device=CPU, max_model_len=8)


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Rewrite model.safetensors."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path, tiny_config("qwen2"))
    return tmp_path


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path, tiny_config("qwen2"), max_shard_size="40KB")
    return tmp_path


def refused(folder: Path, message: str) -> None:
    """Loading says this, and leaves the model as it was."""
    model = build(json.loads((folder / "config.json").read_text()))
    for p in model.parameters():
        p.fill_(7.0)
    with pytest.raises(ValueError, match=message):
        load_weights(model, folder)
    assert all(bool((p == 7.0).all()) for p in model.parameters())


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


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_names_are_those_of_transformers(tmp_path, family, tied):
    config = tiny_config(family, tie_word_embeddings=tied)
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
    refused(folder, f"tensor {Q_PROJ} is I8.*quantized checkpoints are not supported")


@pytest.mark.parametrize("keep", [0, 4, 100, -1, -5000])
def test_truncated_file(folder, keep):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    refused(folder, r"model\.safetensors is not a complete safetensors file .*download it again")


def test_corrupt_header(folder):
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[8:40] = b"\xff" * 32
    file.write_bytes(content)
    refused(folder, r"model\.safetensors is not a complete safetensors file")


def test_truncated_shard(shards):
    file = max(shards.glob("model-*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    refused(shards, f"{file.name} is not a complete safetensors file")


def test_missing_shard(shards):
    file = max(shards.glob("model-*.safetensors"))
    file.unlink()
    refused(shards, rf"{file.name}, named by model\.safetensors\.index\.json, does not exist")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not valid JSON"),
        ("[]", "must hold a JSON object"),
        ("{}", "does not say where"),
        ('{"weight_map": 3}', "does not say where"),
        ('{"weight_map": {"a": 1}}', "does not say where"),
    ],
)
def test_bad_index(shards, content, message):
    (shards / "model.safetensors.index.json").write_text(content)
    refused(shards, rf"model\.safetensors\.index\.json {message}")


def test_tensor_in_two_shards(shards):
    first, second = sorted(shards.glob("model-*.safetensors"))[:2]
    double = load_file(first)
    save_file({**load_file(second), **double}, second)
    refused(shards, f"tensor .* is in both .*{first.name} and .*{second.name}")


def test_stale_single_file_beside_an_index(shards):
    """The index decides, as in transformers."""
    (shards / "model.safetensors").write_bytes(b"left over")
    load_decoder(shards)


def test_no_weights(folder):
    (folder / "model.safetensors").unlink()
    refused(folder, r"has no weights: expected model\.safetensors")
    (folder / "pytorch_model.bin").touch()
    refused(folder, r"pytorch_model\*\.bin only; safetensors are needed")


def test_frequencies_of_old_checkpoints_are_known(folder):
    frequencies = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(8) for i in range(3)}
    edit(folder, lambda tensors: tensors.update(frequencies))
    load_decoder(folder)


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path, tiny_config("qwen2", tie_word_embeddings=True))
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    return tmp_path


def test_tied_table_stored_twice(tied):
    edit(tied, lambda tensors: tensors.update({"lm_head.weight": tensors[EMBEDDING].clone()}))
    model = load_decoder(tied)
    assert model.lm_head is model.embed


def test_tied_table_with_another_output(tied):
    edit(tied, lambda tensors: tensors.update({"lm_head.weight": tensors[EMBEDDING] + 1}))
    refused(tied, r"lm_head\.weight differs from model\.embed_tokens\.weight.*set tie_word_embeddings to false")


def test_untied_without_output(folder):
    edit(folder, lambda tensors: tensors.pop("lm_head.weight"))
    refused(folder, r"tensor lm_head\.weight is missing")


def test_dummy_weights():
    models = [build(tiny_config("qwen3", attention_bias=True)) for _ in range(3)]
    for model, seed in zip(models, (3, 3, 4), strict=True):
        dummy_weights(model, seed)
    first, same, other = (dict(model.named_parameters()) for model in models)
    for name, p in first.items():
        assert torch.equal(p, same[name])
        if name.endswith("norm.weight"):
            assert bool((p == 1).all())
        else:
            assert not torch.equal(p, other[name])
            assert 0.012 < float(p.std()) < 0.03, name


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

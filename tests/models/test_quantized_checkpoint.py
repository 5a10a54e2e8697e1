"""``tritonllm quantize``: what it writes is what ``quantization=`` makes of the same weights, and others read it."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engines import greedy, token_ids
from support.narrow_formats import kept, stack_experts, widened
from support.tiny_models import ALL_FAMILIES, load_decoder, reference_logits, tiny_config, write_checkpoint
from transformers import AutoModelForCausalLM
from transformers.utils import is_compressed_tensors_available

from tritonllm import LLM, quantize_checkpoint
from tritonllm.cli import main, quantize
from tritonllm.demo import model_path
from tritonllm.kernels import Groups, quantize_weight
from tritonllm.models.deferred_weights import products_of_layers
from tritonllm.models.formats.writing import WRITTEN
from tritonllm.models.tensor_files import StoredTensor
from tritonllm.models.tensor_writer import TensorWriter

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 32}
ON_THE_FLY = {"fp8": ("fp8", Groups()), "int8": ("int8", Groups()), "w4a16": ("int4", Groups(1, 128))}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model without experts, in several files, and one with; and what stands beside the weights."""
    found = {}
    for kind, more in (("qwen3", {}), ("qwen3_moe", {"moe_intermediate_size": 128})):
        found[kind] = tmp_path_factory.mktemp(kind)
        write_checkpoint(found[kind], tiny_config(kind, **SIZES, **more), seed=5, max_shard_size="300KB")
        (found[kind] / "chat_template.jinja").write_text("{{ messages }}")
        (found[kind] / "pytorch_model.bin").write_bytes(b"other weights")
        (found[kind] / "additional_chat_templates").mkdir()
        (found[kind] / "additional_chat_templates" / "rag.jinja").write_text("{{ documents }}")
    assert len(list(found["qwen3"].glob("*.safetensors"))) > 2
    return found


@pytest.mark.parametrize("format", ON_THE_FLY)
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_numbers_are_those_of_a_model_made_narrow_when_it_is_loaded(folders, tmp_path, kind, format):
    """Bit for bit, numbers and scales, in each weight of products and experts; all else is as it was."""
    quantize_checkpoint(folders[kind], tmp_path / "out", format)
    plain, narrow = load_decoder(folders[kind]), kept(tmp_path / "out")
    products = {name: module.held(own) for name, module, own in products_of_layers(narrow)}
    parameters = dict(plain.named_parameters())
    assert len(products) == 8  # two of attention in each layer, and two of the MLP or of all experts
    for name, found in products.items():
        whole = parameters.pop(name)
        each = list(zip(found.each(), whole, strict=True)) if whole.dim() == 3 else [(found, whole)]
        for mine, weight in each:
            wanted = quantize_weight(weight.data, *ON_THE_FLY[format])
            assert (mine.format, mine.zeros) == (wanted.format, None), name  # a row of 128 columns is one group
            assert torch.equal(mine.data.view(torch.uint8), wanted.data.view(torch.uint8)), name
            assert torch.equal(mine.scales, wanted.scales), name
    others = dict(narrow.named_parameters())
    assert parameters and all(torch.equal(others[name], parameter) for name, parameter in parameters.items())


def test_mxfp4(folders, tmp_path):
    """Each number is the nearest that its block's scale allows, and each scale the better of two."""
    quantize_checkpoint(folders["qwen3"], tmp_path / "out", "mxfp4")
    plain, values = dict(load_decoder(folders["qwen3"]).named_parameters()), widened(kept(tmp_path / "out"))
    products = [name for name, _, _ in products_of_layers(load_decoder(folders["qwen3"]))]
    assert len(products) == 8
    for name in products:
        blocks, found = (of[name].unflatten(-1, (-1, 32)) for of in (plain, values))
        error = (found - blocks).square().sum(-1)
        exponent = torch.floor(torch.log2(blocks.abs().amax(-1))) - 2
        tries = []
        for more in (0, 1):
            grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6]) * torch.exp2(exponent + more)[..., None]
            distance = (blocks.abs()[..., None] - grid[:, :, None, :]).abs().amin(-1)
            tries.append(distance.square().sum(-1))
        torch.testing.assert_close(error, torch.minimum(*tries), rtol=1e-4, atol=1e-9)
        assert (tries[0] < tries[1]).any() and (tries[1] < tries[0]).any()


def test_files(folders, tmp_path):
    """As many as before, which the library of safetensors reads, with the index, the configuration and all else."""
    done = quantize_checkpoint(folders["qwen3"], tmp_path / "out", "w4a16", group_size=32)
    before, after = (sorted(folder.glob("*.safetensors")) for folder in (folders["qwen3"], tmp_path / "out"))
    assert [path.name for path in after] == [
        f"model-{i + 1:05}-of-{len(before):05}.safetensors" for i in range(len(before))
    ]
    home = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    tensors = {path.name: load_file(path) for path in after}
    assert {name: file for file, of in tensors.items() for name in of} == home
    assert done.bytes_after == sum(t.nbytes for of in tensors.values() for t in of.values()) < done.bytes_before
    stem = "model.layers.1.mlp.down_proj"
    parts = {
        end: tensors[home[f"{stem}.{end}"]][f"{stem}.{end}"]
        for end in ("weight_packed", "weight_scale", "weight_shape")
    }
    assert [tuple(part.shape) for part in parts.values()] == [(128, 32), (128, 8), (2,)]
    assert parts["weight_shape"].tolist() == [128, 256]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    said = config.pop("quantization_config")
    assert config == json.loads((folders["qwen3"] / "config.json").read_text())
    assert (said["format"], said["ignore"]) == ("pack-quantized", ["lm_head"])
    assert said["config_groups"]["group_0"]["weights"]["group_size"] == 32
    for name in ("chat_template.jinja", "generation_config.json", "additional_chat_templates/rag.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (folders["qwen3"] / name).read_bytes()
    assert not (tmp_path / "out" / "pytorch_model.bin").exists()


def test_what_stays_is_said(folders, tmp_path):
    """Routers, always, and what the user names."""
    quantize_checkpoint(
        folders["qwen3_moe"], tmp_path / "out", "int8", ignore=["re:.*down_proj", "model.layers.0.self_attn.o_proj"]
    )
    said = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert {"lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate", "model.layers.0.self_attn.o_proj"} <= set(
        said
    )
    assert not any(name.endswith(("up_proj", "layers.1.self_attn.o_proj")) for name in said)
    model = kept(tmp_path / "out")
    assert model.layers[0].attention.o.weight.dtype == torch.float32
    assert model.layers[1].attention.o.weight.dtype == torch.int8


def test_weights_with_rows_and_columns_the_other_way_round(tmp_path):
    """GPT-2's."""
    (tmp_path / "wide").mkdir()
    write_checkpoint(tmp_path / "wide", tiny_config("gpt2", n_embd=64, n_layer=1))
    quantize_checkpoint(tmp_path / "wide", tmp_path / "out", "int8")
    plain, narrow = dict(load_decoder(tmp_path / "wide").named_parameters()), kept(tmp_path / "out")
    for name, module, own in products_of_layers(narrow):
        wanted = quantize_weight(plain[name].data, "int8")
        assert torch.equal(module.held(own).data, wanted.data) and torch.equal(module.held(own).scales, wanted.scales)


STACKED = {"dbrx", "gemma4_text", "granitemoe", "granitemoe_swa", "granitemoeshared"}  # without names for experts


@pytest.mark.long
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_every_family(tmp_path, family):
    (tmp_path / "wide").mkdir()
    write_checkpoint(tmp_path / "wide", tiny_config(family))
    if family in STACKED:
        with pytest.raises(ValueError, match="holds all experts of a layer, and there are no names here for each"):
            quantize_checkpoint(tmp_path / "wide", tmp_path / "out", "int8")
        return
    quantize_checkpoint(tmp_path / "wide", tmp_path / "out", "int8")
    plain, narrow = dict(load_decoder(tmp_path / "wide").named_parameters()), kept(tmp_path / "out")
    for name, module, own in products_of_layers(narrow):
        each = [module.held(own)] if plain[name].dim() == 2 else module.held(own).each()
        for mine, weight in zip(each, plain[name].view(-1, *plain[name].shape[-2:]), strict=True):
            wanted = quantize_weight(weight.data, "int8")
            assert torch.equal(mine.data, wanted.data) and torch.equal(mine.scales, wanted.scales), name


@pytest.mark.parametrize("images", [False, True])
def test_experts_in_one_tensor_become_a_weight_each(tmp_path, images):
    """Of a model of text, and of one with images, too, whose tensors lie turned and whose names begin otherwise."""
    wide, config = tmp_path / "wide", tiny_config("qwen3_moe", num_hidden_layers=1)
    wide.mkdir()
    write_checkpoint(wide, config)
    tensors = load_file(wide / "model.safetensors")
    before = dict(load_decoder(wide).named_parameters())
    stack_experts(tensors)
    if images:
        tensors = {name: t.mT.contiguous() if ".experts." in name else t for name, t in tensors.items()}
        tensors = {name.replace("model.layers", "model.language_model.layers"): t for name, t in tensors.items()}
        tensors["model.visual.blocks.0.attn.qkv.weight"] = torch.zeros(8, 8)
        text = {**config, "model_type": "qwen3_vl_moe_text"}
        config = {"architectures": ["Qwen3VLMoeForConditionalGeneration"], "model_type": "qwen3_vl_moe"}
        config |= {"text_config": text, "vision_config": {}, "tie_word_embeddings": text["tie_word_embeddings"]}
        (wide / "config.json").write_text(json.dumps(config))
    save_file(tensors, wide / "model.safetensors")
    quantize_checkpoint(wide, tmp_path / "out", "int8")
    stem = "model.language_model" if images else "model"
    assert f"{stem}.layers.0.mlp.experts.7.up_proj.weight_scale" in load_file(tmp_path / "out" / "model.safetensors")
    said = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert said == ["lm_head", f"{stem}.layers.0.mlp.gate", *(["model.visual.blocks.0.attn.qkv"] if images else [])]
    model = kept(tmp_path / "out")
    for name, module, own in products_of_layers(model):
        each = [module.held(own)] if before[name].dim() == 2 else module.held(own).each()
        for mine, weight in zip(each, before[name].view(-1, *before[name].shape[-2:]), strict=True):
            wanted = quantize_weight(weight.data, "int8")
            assert torch.equal(mine.data, wanted.data) and torch.equal(mine.scales, wanted.scales)
    with pytest.raises(ValueError, match=r"ignore names some of the weights in .*gate_up_proj, which is one tensor"):
        quantize_checkpoint(wide, tmp_path / "no", "int8", ignore=["re:.*experts.3.gate_proj"])


@pytest.mark.parametrize("format", ["fp8", pytest.param("int8", marks=pytest.mark.long)])
def test_an_engine_gives_the_tokens_of_the_same_weights(tmp_path, format):
    quantize_checkpoint(model_path(), tmp_path / "out", format)
    prompts, how = ["There was a fox named", "What is 47 + 66?"], {"num_blocks": 16, "dtype": "float32"}
    made = LLM(str(model_path()), quantization=format, **how)
    read = LLM(str(tmp_path / "out"), **how)
    assert token_ids(read.generate(prompts, greedy(12))) == token_ids(made.generate(prompts, greedy(12)))


@pytest.mark.skipif(not is_compressed_tensors_available(), reason="compressed-tensors is not installed")
@pytest.mark.parametrize("format", WRITTEN)
def test_transformers_reads_the_same_weights(folders, tmp_path, format):
    from transformers import CompressedTensorsConfig

    quantize_checkpoint(folders["qwen3"], tmp_path / "out", format)
    how = {"dtype": torch.float32, "quantization_config": CompressedTensorsConfig(dequantize=True)}
    model, ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out", **how), widened(kept(tmp_path / "out"))
    for i, layer in enumerate(model.model.layers):
        pieces = [getattr(layer.self_attn, f"{kind}_proj").weight for kind in "qkv"]
        assert torch.equal(ours[f"layers.{i}.attention.qkv.weight"], torch.cat(pieces))
        assert torch.equal(ours[f"layers.{i}.mlp.down.weight"], layer.mlp.down_proj.weight)
    assert reference_logits(model, [1, 2, 3]).isfinite().all()


def test_refused_before_any_work(folders, tmp_path):
    source, out = folders["qwen3"], tmp_path / "out"
    odd, stacked, quantized = tmp_path / "odd", tmp_path / "stacked", tmp_path / "quantized"
    odd.mkdir()
    write_checkpoint(odd, tiny_config("qwen3", hidden_size=64, intermediate_size=96, num_hidden_layers=1))
    with pytest.raises(ValueError, match="format must be one of fp8, int8, w4a16, mxfp4, got 'int4'"):
        quantize_checkpoint(source, out, "int4")
    with pytest.raises(ValueError, match=r"group_size must be one of 32, 64, .*, got 48"):
        quantize_checkpoint(source, out, "w4a16", group_size=48)
    with pytest.raises(ValueError, match="group_size=64: fp8 has a scale for each row: leave it out"):
        quantize_checkpoint(source, out, "fp8", group_size=64)
    columns = (
        r"tensor model\.layers\.0\.\S+ has \d+ columns, .* groups of 128: use group_size=32, or fp8 or int8, or ignore="
    )
    with pytest.raises(ValueError, match=columns):
        quantize_checkpoint(odd, out, "w4a16")
    with pytest.raises(ValueError, match=r"ignore='model\.layers\.9\.mlp' is no module of"):
        quantize_checkpoint(source, out, "fp8", ignore=["model.layers.9.mlp"])
    with pytest.raises(ValueError, match="ignore leaves no weight"):
        quantize_checkpoint(source, out, "fp8", ignore=["re:model"])
    with pytest.raises(ValueError, match=r"out: .* is the model's own folder"):
        quantize_checkpoint(source, source, "fp8", overwrite=True)
    stacked.mkdir()
    write_checkpoint(stacked, tiny_config("granitemoe", num_hidden_layers=1))
    with pytest.raises(ValueError, match=r"tensor \S+ \[.*\] holds all experts of a layer, and there are no names"):
        quantize_checkpoint(stacked, out, "fp8")
    shutil.copytree(source, tmp_path / "part")
    next((tmp_path / "part").glob("*-00002-*.safetensors")).unlink()
    with pytest.raises(ValueError, match=r"named by model\.safetensors\.index\.json, does not exist"):
        quantize_checkpoint(tmp_path / "part", out, "fp8")
    assert not out.exists()
    quantize_checkpoint(source, quantized, "fp8")
    with pytest.raises(ValueError, match=r"narrow already \(compressed-tensors\)"):
        quantize_checkpoint(quantized, out, "fp8")


def test_a_folder_that_is_not_empty(folders, tmp_path):
    """Stays as it is, or loses its weights and nothing else."""
    out = tmp_path / "out"
    quantize_checkpoint(folders["qwen3"], out, "fp8")
    (out / "notes.txt").write_text("mine")
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    with pytest.raises(ValueError, match="is not empty; name another folder, or use overwrite"):
        quantize_checkpoint(model_path(), out, "int8")
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == before
    quantize_checkpoint(model_path(), out, "int8", overwrite=True)
    assert (out / "notes.txt").read_text() == "mine"
    assert [path.name for path in out.glob("*.safetensors*")] == ["model.safetensors"]
    assert json.loads((out / "config.json").read_text())["quantization_config"]["format"] == "int-quantized"


def test_a_value_that_is_not_finite(folders, tmp_path):
    """Ends it with the tensor's name, and the folder has no ``config.json``."""
    shutil.copytree(folders["qwen3"], tmp_path / "bad")
    path = next((tmp_path / "bad").glob("*-00002-*.safetensors"))
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("_proj.weight"))
    tensors[name][0, 0] = float("nan")
    save_file(tensors, path)
    with pytest.raises(ValueError, match=f"tensor {name}: weight must be finite"):
        quantize_checkpoint(tmp_path / "bad", tmp_path / "out", "int8")
    assert not (tmp_path / "out" / "config.json").exists()


def test_command(folders, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ["quantize", str(folders["qwen3"]), "-o", str(out)]
    assert main([*arguments, "--format", "w4a16", "--group-size", "64", "--ignore", "re:.*o_proj"]) == 0
    assert capsys.readouterr().out.startswith(f"12 weights in w4a16 and 13 tensors as they were in {out}: ")
    assert main([*arguments, "--format", "mxfp4"]) == 1
    assert "is not empty" in capsys.readouterr().err
    assert main([*arguments, "--format", "mxfp4", "--overwrite"]) == 0
    for wrong in (["--format", "int4"], ["--format", "fp8", "--group-size", "64"], []):
        with pytest.raises(SystemExit) as end:
            main([*arguments, *wrong])
        assert end.value.code == 2
    assert tuple(WRITTEN) == quantize.FORMATS


@pytest.mark.long
def test_command_calibrates(tmp_path, capsys):
    text, out = tmp_path / "text.txt", tmp_path / "out"
    text.write_text(
        "There was a fox named Snow. She lived with her mother in a den. What is 47 + 66? 47 + 66 = 113. " * 4
    )
    arguments = ["quantize", "-o", str(out), "--calibrate", str(text), "--group-size", "64"]
    assert main([*arguments, "--format", "w4a16"]) == 0
    (output,) = LLM(str(out), num_blocks=16).generate("What is 47 + 66?", greedy(4), use_tqdm=False)
    assert output.outputs[0].text
    for wrong in (["--format", "mxfp4"], ["--format", "w4a16", "--calibrate", str(tmp_path / "nowhere")]):
        with pytest.raises(SystemExit) as end:
            main([*arguments[:5], *wrong])
        assert end.value.code == 2


def test_a_file_is_written_in_any_order(tmp_path):
    """With elements of several sizes, an odd number of bytes and nothing at all; and never without a tensor."""
    tensors = {
        "bytes": torch.arange(3, dtype=torch.uint8),
        "none": torch.empty(0, 4),
        "numbers": torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16),
        "long": torch.tensor([1 << 40]),
        "one": torch.tensor(2.5),
    }
    headers = {
        name: StoredTensor(tuple(t.shape), {1: "U8", 2: "BF16", 4: "F32", 8: "I64"}[t.itemsize])
        for name, t in tensors.items()
    }
    with TensorWriter(tmp_path / "a.safetensors", headers) as file:
        for name in ("one", "bytes", "long", "none", "numbers"):
            file.write(name, tensors[name])
    found = load_file(tmp_path / "a.safetensors")
    assert found.keys() == tensors.keys() and all(torch.equal(found[name], t) for name, t in tensors.items())
    with (
        pytest.raises(ValueError, match="tensor bytes was not written"),
        TensorWriter(tmp_path / "b.safetensors", headers),
    ):
        pass
    with pytest.raises(ValueError, match="tensor x is C64, not one of"):
        TensorWriter(tmp_path / "c.safetensors", {"x": StoredTensor((1,), "C64")})

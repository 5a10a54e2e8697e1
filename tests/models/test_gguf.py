"""GGUF files: what their headers say, their blocks, and models loaded from them beside the same in safetensors."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from support.gguf_files import add_tensor, close, write_gguf
from support.ranks import run_ranks
from support.tiny_models import load_decoder, tiny_config, write_checkpoint

from tritonllm.dist.group import Group
from tritonllm.layers.rope import RopeSpec
from tritonllm.models import checkpoint
from tritonllm.models.decoder import Decoder
from tritonllm.models.families import spec_from_config
from tritonllm.models.gguf import families, header
from tritonllm.models.gguf.blocks import CONVERTERS, convert
from tritonllm.models.gguf.folder import choose, patterns
from tritonllm.models.loading import read_spec
from tritonllm.models.shards import splits
from tritonllm.models.tensor_files import open_tensors, stored_tensors
from tritonllm.models.weights import load_weights

# Of Gemma's scale and Gemma 3's pattern, files say nothing: these are what they mean.
_GEMMA = {"query_pre_attn_scalar": 16}
MODELS = {
    "llama": tiny_config("llama", attention_bias=True),
    "mixtral": tiny_config("mixtral"),
    "qwen2": tiny_config("qwen2"),
    "qwen3": tiny_config("qwen3"),
    "qwen3moe": tiny_config("qwen3_moe", norm_topk_prob=True),
    "phi3": tiny_config("phi3", sliding_window=9),
    "gemma": tiny_config("gemma"),
    "gemma2": tiny_config("gemma2", **_GEMMA),
    "gemma3": tiny_config("gemma3_text", **_GEMMA, sliding_window_pattern=6, rope_local_base_freq=10000.0),
    "gpt-oss": tiny_config("gpt_oss"),
}
LLAMA_CPP = {"mixtral": "llama"}  # its names, where they are others
# What the package gguf can make of numbers; of the other types, blocks of random bytes are read.
KINDS = ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
RARE = ["IQ2_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS", "IQ1_M", "TQ2_0", "MXFP4"]


def test_the_models_are_all():
    assert {LLAMA_CPP.get(name, name) for name in MODELS} == set(families.FAMILIES)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_that_of_its_safetensors(tmp_path, name):
    """Configuration and weights, to the bit; but Gemma's norms, which a float32 plus 1 rounds."""
    write_checkpoint(tmp_path, MODELS[name])
    file = tmp_path / "model.gguf"
    write_gguf(file, tmp_path, LLAMA_CPP.get(name, name))
    config = json.loads((tmp_path / "config.json").read_text())
    said = checkpoint.read_config(file)
    assert spec_from_config({**said, "eos_token_id": config["eos_token_id"]}) == spec_from_config(config)
    want, got = load_decoder(tmp_path), load_decoder(file)
    for (parameter, expected), found in zip(want.named_parameters(), got.parameters(), strict=True):
        if name.startswith("gemma") and parameter.endswith("norm.weight"):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-7)
        else:
            assert torch.equal(found, expected), parameter


def load_rank(file: Path, group: Group) -> Decoder:
    spec = spec_from_config(checkpoint.read_config(file))
    model = Decoder(spec, dtype=torch.float32, device=torch.device("cpu"), max_model_len=32, group=group)
    load_weights(model, file)
    return model


@pytest.mark.parametrize("name", ["llama", "gpt-oss", pytest.param("qwen3moe", marks=pytest.mark.long)])
def test_two_ranks_have_the_parts_of_one(tmp_path, name):
    """In blocks of 32: a rank's columns begin within one."""
    inner = "moe_intermediate_size" if name == "qwen3moe" else "intermediate_size"
    write_checkpoint(tmp_path, {**MODELS[name], inner: 96})
    write_gguf(tmp_path / "model.gguf", tmp_path, name, kind="Q8_0")
    whole = dict(load_decoder(tmp_path / "model.gguf").named_parameters())
    ranks = run_ranks(2, lambda group: dict(load_rank(tmp_path / "model.gguf", group).named_parameters()))
    cut = splits(spec_from_config(checkpoint.read_config(tmp_path / "model.gguf")))
    seen = set()
    for parameter, expected in whole.items():
        split = cut.get(parameter)
        for rank, parameters in enumerate(ranks):
            if not hasattr(split, "held"):
                assert split is not None or torch.equal(parameters[parameter], expected)
                continue
            held = torch.tensor([i for run in split.held(rank, 2) for i in run])
            assert torch.equal(parameters[parameter], expected.index_select(split.axis, held)), parameter
            seen.add(split.axis)
    assert {0, 1} <= seen


def blocks_file(path: Path, kinds: list[str], rows: int = 6, columns: int = 512) -> dict[str, np.ndarray]:
    """A file with a matrix of each type, and three of them in one tensor; what the package makes of each block."""
    writer, generator, want = gguf.GGUFWriter(path, "qwen3moe"), np.random.default_rng(0), {}
    for index, kind in enumerate(kinds):
        number = gguf.GGMLQuantizationType[kind]
        elements, num_bytes = gguf.GGML_QUANT_SIZES[number]
        blocks = generator.integers(0, 100, (3, rows, columns // elements * num_bytes), np.uint8)
        if kind in ("F32", "F16", "BF16"):
            values = generator.normal(size=(3, rows, columns)).astype(np.float32)
            blocks = values if kind == "F32" else gguf.quantize(values, number)
        for name, data in (("attn_q", blocks[0]), ("ffn_up_exps", blocks)):
            plain = kind in ("F32", "F16")
            writer.add_tensor(f"blk.{index}.{name}.weight", data, raw_dtype=None if plain else number)
        want[f"model.layers.{index}.self_attn.q_proj.weight"] = gguf.dequantize(blocks[0], number)
        for expert in range(3):
            place = f"model.layers.{index}.mlp.experts.{expert}.up_proj.weight"
            want[place] = gguf.dequantize(blocks[expert], number)
    close(writer)
    return want


@pytest.mark.parametrize("kinds", [KINDS, RARE], ids=["usual", "rare"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the package gguf, about blocks that are NaN
def test_every_type_is_read_as_the_package_does(tmp_path, kinds):
    """Tensors, and parts of them that begin and end within blocks."""
    want = blocks_file(tmp_path / "model.gguf", kinds)
    with open_tensors(tmp_path / "model.gguf") as file:
        headers = file.headers()
        assert headers.keys() == want.keys()
        for name, array in want.items():
            expected = torch.from_numpy(array.astype(np.float32))
            assert expected.abs().max() > 0
            assert headers[name].shape == tuple(expected.shape)
            assert torch.equal(file.get(name).float().nan_to_num(7), expected.nan_to_num(7)), name
            for index in ((slice(2, 5),), (slice(None), slice(40, 300)), (slice(1, 3), slice(256, 512)), (3,), ()):
                part = file.window(name, index).float().nan_to_num(7)
                assert torch.equal(part, expected[index].nan_to_num(7)), (name, index)


@pytest.mark.parametrize("kind", CONVERTERS)
def test_our_converters_are_the_package_to_the_bit(kind):
    """Of all bytes, with scales that are no number or infinite as well."""
    number = gguf.GGMLQuantizationType[kind]
    elements, num_bytes = gguf.GGML_QUANT_SIZES[number]
    blocks = np.random.default_rng(1).integers(0, 256, (500, num_bytes), np.uint8)
    if kind == "MXFP4":  # whose scale 255 is no number; the package takes it for one
        blocks[:, 0] = blocks[:, 0].clip(0, 254)
    with np.errstate(all="ignore"):
        want = torch.from_numpy(gguf.dequantize(blocks, number)).view(500, elements)
    found = convert(kind, torch.from_numpy(blocks))
    assert found.isfinite().any() and torch.equal(found.isnan(), want.isnan())
    assert torch.equal(found.nan_to_num(7.0, torch.inf, -torch.inf), want.nan_to_num(7.0, torch.inf, -torch.inf))


def test_a_large_tensor_is_converted_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("tritonllm.models.gguf.tensors._PIECE", 1024)
    want = blocks_file(tmp_path / "model.gguf", ["Q4_0"], rows=7)
    with open_tensors(tmp_path / "model.gguf") as file:
        for name, array in want.items():
            assert torch.equal(file.get(name).nan_to_num(7), torch.from_numpy(array).nan_to_num(7))


def test_several_files(tmp_path):
    write_checkpoint(tmp_path, MODELS["llama"])
    write_gguf(tmp_path / "model.gguf", tmp_path, "llama", tensors_per_file=12)
    files = sorted(tmp_path.glob("*.gguf"))
    assert len(files) > 2 and files[0].name == f"model-00001-of-{len(files):05}.gguf"
    want, got = load_decoder(tmp_path), load_decoder(files[0])
    for expected, found in zip(want.parameters(), got.parameters(), strict=True):
        assert torch.equal(found, expected)
    files[1].unlink()
    with pytest.raises(ValueError, match=rf"model-00002-of-{len(files):05}.gguf does not exist"):
        checkpoint.read_config(files[0])


def test_frequencies_of_llama_3(tmp_path):
    """Its files have the factors that the rule gives, in the place of the rule."""
    rule = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rule["original_max_position_embeddings"] = 32
    base = 10000.0 ** -(torch.arange(0, 16, 2) / 16)
    write_checkpoint(tmp_path, tiny_config("llama", rope_scaling=None))
    exact = RopeSpec(base=10000.0, rotary_dim=16, trained_length=256, scaling=rule)
    turned = torch.asin(exact.table(2)[1, 8:].double())  # the angle of position 1
    factors = (base.double() / turned).float().numpy()
    assert factors.max() > 7.9
    write_gguf(tmp_path / "model.gguf", tmp_path, "llama", more={"rope_freqs.weight": factors})
    spec = spec_from_config(checkpoint.read_config(tmp_path / "model.gguf"))
    for length in (16, 256):
        table = spec.layers[0].attention.rope.table(length)
        torch.testing.assert_close(table, exact.table(length), rtol=0, atol=1e-4)
    load_decoder(tmp_path / "model.gguf")


def test_frequencies_of_phi_3(tmp_path):
    write_checkpoint(tmp_path, MODELS["phi3"])
    factors = {"rope_factors_short.weight": 1 + np.arange(8) / 8, "rope_factors_long.weight": 1 + np.arange(8) / 2}
    factors = {name: values.astype(np.float32) for name, values in factors.items()}
    write_gguf(tmp_path / "model.gguf", tmp_path, "phi3", more=factors)
    scaling = spec_from_config(checkpoint.read_config(tmp_path / "model.gguf")).layers[0].attention.rope.scaling
    assert scaling["rope_type"] == "longrope"
    assert scaling["short_factor"] == factors["rope_factors_short.weight"].tolist()
    assert scaling["long_factor"] == factors["rope_factors_long.weight"].tolist()


def written(path: Path, arch: str = "llama", **values) -> gguf.GGUFWriter:
    """A file without tensors so far, with the numbers of the architecture that a configuration needs."""
    writer = gguf.GGUFWriter(path, arch)
    needed = {"embedding_length": 64, "block_count": 1, "context_length": 32, "attention.head_count": 4}
    for key, value in {**needed, **values}.items():
        writer.add_uint32(f"{arch}.{key}", value)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-5)
    return writer


def test_what_ends_an_output(tmp_path):
    """The ids that the file names, and control tokens that end a turn; gpt-oss ends a part of its answer by <|end|>."""
    ends = {}
    for last in ("<|call|>", "<|return|>"):
        writer = written(tmp_path / "model.gguf")
        writer.add_token_list(["a", "<|end|>", "<|im_end|>", "<s>", last])
        writer.add_token_types([1, 3, 1, 3, 3])
        writer.add_eos_token_id(3)
        add_tensor(writer, "token_embd.weight", np.zeros((5, 64), np.float32))
        close(writer)
        ends[last] = set(checkpoint.read_config(tmp_path / "model.gguf")["eos_token_id"])
    assert ends == {"<|call|>": {3, 1, 4}, "<|return|>": {3, 4}}


def test_numbers_are_those_that_were_meant(tmp_path):
    writer = written(tmp_path / "model.gguf")
    add_tensor(writer, "token_embd.weight", np.zeros((5, 64), np.float32))
    close(writer)
    assert checkpoint.read_config(tmp_path / "model.gguf")["rms_norm_eps"] == 1e-5


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path, MODELS["llama"])
    write_gguf(tmp_path / "model.gguf", tmp_path, "llama")
    return tmp_path / "model.gguf"


@pytest.mark.parametrize("keep", [0, 3, 7, 30, 300, 1500, -1, -100])
def test_truncated(model, keep):
    content = model.read_bytes()
    model.write_bytes(content[:keep])
    with pytest.raises(ValueError, match=r"model\.gguf") as error:
        load_decoder(model)
    assert "\n" not in str(error.value)
    assert any(word in str(error.value) for word in ("not a complete GGUF file", "not a GGUF file", "cannot be read"))


@pytest.mark.parametrize("at", [4, 8, 16, 24, 32, 60])
def test_damaged(model, at):
    """Counts and lengths beyond the file: nothing is reserved for them."""
    content = bytearray(model.read_bytes())
    content[at : at + 8] = b"\xff" * 8
    model.write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.gguf"):
        load_decoder(model)


def test_an_unknown_architecture(tmp_path):
    close(written(tmp_path / "model.gguf", "mamba"))
    with pytest.raises(ValueError, match=r"architecture 'mamba' are not supported; supported: llama, .*gpt-oss"):
        checkpoint.read_config(tmp_path / "model.gguf")


def test_a_value_that_is_missing(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    close(writer)
    with pytest.raises(ValueError, match=r"llama\.attention\.head_count is missing; convert"):
        checkpoint.read_config(tmp_path / "model.gguf")


def test_values_that_differ_between_layers(tmp_path):
    writer = written(tmp_path / "model.gguf")
    writer.add_array("llama.feed_forward_length", [64, 32])
    add_tensor(writer, "token_embd.weight", np.zeros((5, 64), np.float32))
    close(writer)
    with pytest.raises(ValueError, match=r"llama\.feed_forward_length differs between layers"):
        checkpoint.read_config(tmp_path / "model.gguf")


def test_a_tensor_too_many_and_one_too_few(tmp_path):
    write_checkpoint(tmp_path, MODELS["llama"])
    write_gguf(tmp_path / "a.gguf", tmp_path, "llama", more={"blk.0.ssm_a.weight": np.zeros((4, 4), np.float32)})
    with pytest.raises(ValueError, match=r"a\.gguf: tensor blk\.0\.ssm_a\.weight has no place in LlamaForCausalLM"):
        load_decoder(tmp_path / "a.gguf")
    content = (tmp_path / "a.gguf").read_bytes()
    (tmp_path / "a.gguf").write_bytes(content.replace(b"blk.0.ssm_a.weight", b"blk.9.ffn_up.weight"[:18]))
    with pytest.raises(ValueError, match=r"tensor blk\.9\.ffn_up\.weigh has no place"):
        load_decoder(tmp_path / "a.gguf")


def test_a_tensor_that_is_missing(model):
    model.write_bytes(model.read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.7.ffn_up.weight"))
    with pytest.raises(ValueError, match=r"tensor model\.layers\.7\.mlp\.up_proj\.weight has no place in the model"):
        load_decoder(model)


def test_types_that_are_not_converted(tmp_path):
    """One that the package does not convert, and one that it does not know."""
    writer = written(tmp_path / "model.gguf")
    writer.add_tensor("token_embd.weight", np.zeros((5, 64), np.int32))
    close(writer)
    with pytest.raises(ValueError, match=r"embed_tokens\.weight has the type I32, which the package gguf does not"):
        load_decoder(tmp_path / "model.gguf")
    content = (tmp_path / "model.gguf").read_bytes()
    at = content.index(b"token_embd.weight") + len("token_embd.weight") + 4 + 2 * 8
    (tmp_path / "model.gguf").write_bytes(content[:at] + b"\x00\x02" + content[at + 2 :])
    with pytest.raises(ValueError, match=r"token_embd\.weight has the type 512, which the installed package gguf"):
        load_decoder(tmp_path / "model.gguf")


def test_without_the_package(model, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    for given in (str(model), str(model.parent), "owner/name:Q4_K_M"):
        (model.parent / "config.json").unlink(missing_ok=True)
        with pytest.raises(ValueError, match=r"need the package gguf, which is not installed: pip install .*\[gguf\]"):
            checkpoint.resolve(given)


def test_only_the_usual_load_format(model):
    with pytest.raises(ValueError, match=r"load_format='pt': .*model\.gguf is a GGUF file: leave load_format out"):
        load_weights(load_decoder(model), model, load_format="pt")


def test_not_through_transformers(model):
    assert read_spec(model, model_impl="vllm") == read_spec(model)
    with pytest.raises(ValueError, match="model_impl='transformers': a GGUF file runs natively alone"):
        read_spec(model, model_impl="transformers")


def touched(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()


def test_the_file_of_a_folder(tmp_path):
    touched(tmp_path, "mmproj-F16.gguf", "a-00001-of-00002.gguf", "a-00002-of-00002.gguf")
    assert checkpoint.resolve(str(tmp_path)) == tmp_path / "a-00001-of-00002.gguf"
    assert checkpoint.resolve(str(tmp_path / "a-00001-of-00002.gguf")) == tmp_path / "a-00001-of-00002.gguf"
    touched(tmp_path, "b.gguf")
    with pytest.raises(ValueError, match=r"several GGUF models: give one, of a-00001-of-00002\.gguf, b\.gguf"):
        checkpoint.resolve(str(tmp_path))
    touched(tmp_path, "config.json", "model.safetensors")
    assert checkpoint.resolve(str(tmp_path)) == tmp_path


def test_a_folder_with_a_configuration_and_no_other_weights(tmp_path):
    """As many repositories of GGUF files have one. A folder may have the name of a file."""
    folder = tmp_path / "folder.gguf"
    touched(tmp_path, "folder.gguf/config.json", "folder.gguf/a.gguf")
    assert checkpoint.resolve(str(folder)) == folder / "a.gguf"
    (folder / "a.gguf").unlink()
    assert checkpoint.resolve(str(folder)) == folder and checkpoint.read_generation_config(folder) == {}
    with pytest.raises(ValueError, match=r"has no weights for load_format='auto'"):
        stored_tensors(folder)


def test_the_file_of_a_type(tmp_path):
    names = ("m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m.Q8_0.gguf", "BF16/m-BF16-00001-of-00002.gguf")
    touched(tmp_path, *names, "BF16/m-BF16-00002-of-00002.gguf")
    for kind, name in zip(("Q4_K_M", "q4_k_s", "Q8_0", "BF16"), names, strict=True):
        assert choose(tmp_path, kind) == tmp_path / name
    for kind in ("Q4_K", "8_0"):
        with pytest.raises(ValueError, match=rf"must have one GGUF model of type {kind}; its files: .*Q4_K_M\.gguf"):
            choose(tmp_path, kind)
    with pytest.raises(ValueError, match=r"has no file other\.gguf"):
        choose(tmp_path, file="other.gguf")


def test_what_is_downloaded(tmp_path, monkeypatch):
    asked = []

    def download(model: str, **kwargs) -> str:
        asked.append((model, kwargs["allow_patterns"]))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    touched(tmp_path, "m-Q4_K_M.gguf", "x/m-00001-of-00002.gguf")
    assert checkpoint.resolve("owner/name:Q4_K_M") == tmp_path / "m-Q4_K_M.gguf"
    assert checkpoint.resolve("owner/name/x/m-00001-of-00002.gguf") == tmp_path / "x/m-00001-of-00002.gguf"
    assert asked[0] == ("owner/name", patterns("Q4_K_M", None))
    assert asked[1] == ("owner/name", ["x/m-*-of-00002.gguf"])
    assert patterns("Q4_K_M", None)[:3] == ["*Q4_K_M.gguf", "*Q4_K_M-*-of-*.gguf", "*Q4_K_M/*.gguf"]


def test_a_header_of_many_strings_is_read_whole(tmp_path):
    writer = written(tmp_path / "model.gguf")
    tokens = ["", "ä", "x" * 300, *map(str, range(50))]
    writer.add_token_list(tokens)
    close(writer)
    read = header.read_header(tmp_path / "model.gguf")
    assert read.metadata["tokenizer.ggml.tokens"] == tokens
    assert read.metadata["llama.embedding_length"] == 64

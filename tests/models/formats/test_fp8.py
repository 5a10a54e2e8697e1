"""float8 weights as Hugging Face's own format has them."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import refused, refused_after
from support.narrow_formats import check_pair, config_of, float8, of_blocks, positive, stack_experts, write_pair

from tritonllm.models.formats.registry import format_of

BLOCK = (24, 40)  # neither divides a head, a rank's part or a row
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)}
NO_BLOCKS = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


def fp8_blocks(shape, generator, *, scale_type=torch.float32, end=".weight", block=BLOCK):
    """``weight_scale_inv`` of blocks, some of them cut off at the edges."""
    *experts, n, k = shape
    numbers, across = float8(shape, generator), (-(-n // block[0]), -(-k // block[1]))
    scales = positive((*experts, *across), generator)
    scales = torch.exp2(scales.log2().round()) if scale_type is torch.float8_e8m0fnu else scales
    scales = scales.to(scale_type)
    values = numbers.float() * of_blocks(scales.float(), shape, block)
    return {end: numbers, f"{end}_scale_inv": scales}, values


def fp8_whole(shape, generator, *, scale_shape=(), end="weight_scale"):
    """One scale, or one for each row."""
    numbers, scales = float8(shape, generator), positive(scale_shape, generator)
    by_row = scales.reshape(-1, 1) if scales.numel() > 1 else scales.reshape(())
    unused = {".input_scale": torch.tensor(0.5), ".activation_scale": torch.tensor([0.5])}
    return {".weight": numbers, f".{end}": scales, **unused}, numbers.float() * by_row


def fp8_rows(shape, generator):
    return fp8_whole(shape, generator, scale_shape=(shape[0], 1))


@pytest.mark.parametrize(
    "scale_type", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.long), torch.float8_e8m0fnu]
)
def test_blocks(tmp_path, scale_type):
    """In all ranks' parts, which cut through blocks both ways; the output projection too."""

    def form(shape, generator):
        return fp8_blocks(shape, generator, scale_type=scale_type)

    where = lambda name: "_proj." in name or name == "lm_head.weight"  # noqa: E731
    check_pair(write_pair(tmp_path, "qwen3", form, FP8, where=where))


@pytest.mark.parametrize(
    "form", [fp8_rows, lambda *a: fp8_whole(*a, end="weight_scale_inv"), lambda *a: fp8_whole(*a, scale_shape=(1,))]
)
def test_one_scale_and_one_a_row(tmp_path, form):
    """Beside scales of activations, and of keys and values, which nothing computes with."""
    kv = {f"model.layers.0.self_attn.{name}_scale": torch.ones(1) for name in "kv"}
    check_pair(write_pair(tmp_path, "llama", form, NO_BLOCKS, change=lambda tensors: tensors.update(kv)))


def test_experts_one_by_one(tmp_path):
    check_pair(write_pair(tmp_path, "qwen3_moe", fp8_blocks, FP8, num_hidden_layers=2, num_experts=4))


@pytest.mark.parametrize("scale_shape", ["blocks", "gate and up"])
def test_stacked_experts(tmp_path, scale_shape):
    """As transformers keeps them in memory: gate and up may have a scale each."""

    def form(shape, generator):
        if scale_shape == "blocks":
            return fp8_blocks(shape, generator, end="")
        experts, n, _ = shape
        parts = 2 if n == 48 else 1
        numbers, scales = float8(shape, generator), positive((experts, parts, 1), generator)
        return {"": numbers, "_scale_inv": scales}, numbers.float() * scales.repeat_interleave(n // parts, 1)

    experts = lambda name: ".experts." in name  # noqa: E731
    config = FP8 if scale_shape == "blocks" else NO_BLOCKS
    fields = {"num_hidden_layers": 2, "num_experts": 4}
    check_pair(write_pair(tmp_path, "qwen3_moe", form, config, where=experts, before=stack_experts, **fields))


def test_values_are_rounded_once(tmp_path):
    """To the model's type, from the exact product."""
    check_pair(write_pair(tmp_path, "llama", fp8_blocks, FP8), torch.bfloat16, ranks=False)


def test_parts_in_two_files(tmp_path):
    """A weight's numbers may lie in one file, and its scales in another."""
    pair = write_pair(tmp_path, "llama", fp8_blocks, FP8)
    tensors = load_file(pair.narrow / "model.safetensors")
    files = {"a.safetensors": {}, "b.safetensors": {}}
    for name, tensor in tensors.items():
        files["b.safetensors" if "scale" in name else "a.safetensors"][name] = tensor
    for file, some in files.items():
        save_file(some, pair.narrow / file)
    home = {name: file for file, some in files.items() for name in some}
    (pair.narrow / "model.safetensors.index.json").write_text(json.dumps({"weight_map": home}))
    (pair.narrow / "model.safetensors").unlink()
    check_pair(pair, ranks=False)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return write_pair(tmp_path_factory.mktemp("fp8"), "llama", fp8_blocks, FP8, num_hidden_layers=1).narrow


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{Q_PROJ}_scale_inv"), rf"tensor {Q_PROJ} \[64, 64\] is fp8 and needs {Q_PROJ}_scale_inv of"),
        (lambda t: t.update({f"{Q_PROJ}_scale_inv": torch.ones(3, 2, dtype=torch.int32)}), "needs .* of type F32 or"),
        (
            lambda t: t.update({f"{Q_PROJ}_scale_inv": torch.ones(3, 3)}),
            rf"{Q_PROJ} .* {Q_PROJ}_scale_inv has shape \[3, 3\]: not one of the whole, of rows, of blocks of",
        ),
        (
            lambda t: t.update({Q_PROJ: t[Q_PROJ][:32].clone(), f"{Q_PROJ}_scale_inv": torch.ones(())}),
            "config.json asks",
        ),
        (lambda t: t.update({Q_PROJ: t[Q_PROJ].view(torch.uint8)}), rf"tensor {Q_PROJ} is U8, not one of"),
        (lambda t: t.update({Q_PROJ: torch.ones(64, 64)}), rf"{Q_PROJ}_scale_inv has no place"),
        (lambda t: t.update({Q_PROJ: t[Q_PROJ].to(torch.float8_e5m2)}), rf"tensor {Q_PROJ} is F8_E5M2, not one of"),
    ],
)
def test_bad_files(tmp_path, good, change, message):
    refused_after(change, good, tmp_path, message)


def test_float8_without_a_word_in_the_configuration(tmp_path, good):
    shutil.copytree(good, tmp_path, dirs_exist_ok=True)
    config = config_of(tmp_path)
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused(tmp_path, r"is F8_E4M3, not one of F64, .* quantization_config of config\.json")


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"weight_block_size": [128]}, r"weight_block_size of the quantization_config must be two sizes, got \[128\]"),
        ({"fmt": "e5m2"}, "fmt of the quantization_config must be 'e4m3', got 'e5m2'"),
    ],
)
def test_bad_configurations(field, message):
    with pytest.raises(ValueError, match=message):
        format_of({**FP8, **field})

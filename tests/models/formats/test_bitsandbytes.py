"""Checkpoints of bitsandbytes: NF4 and FP4 with and without double quantization, and int8."""

import json

import pytest
import torch
from support.checkpoints import refused_after
from support.narrow_formats import check_pair, integers, positive, write_pair

from tritonllm.models.formats.registry import format_of

Q_PROJ = "model.layers.0.self_attn.q_proj"
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def json_bytes(content):
    return torch.tensor(list(json.dumps(content).encode()), dtype=torch.uint8)


def four_bits(shape, generator, *, run=64, nested=0, kind="nf4"):
    (n, k), count = shape, -(-shape[0] * shape[1] // run)
    codes, values = integers(0, 15, (n * k,), generator), torch.rand(16, generator=generator).sort().values * 2 - 1
    state = {"quant_type": kind, "blocksize": run, "dtype": "float16", "shape": list(shape)}
    absmax, parts = positive((count,), generator), {}
    if nested:
        bytes_, outer = integers(0, 255, (count,), generator), positive((-(-count // nested),), generator)
        table, offset = torch.rand(256, generator=generator).sort().values, 0.0625
        absmax = table[bytes_] * outer[torch.arange(count) // nested] + offset
        state |= {"nested_blocksize": nested, "nested_dtype": "float32", "nested_offset": offset}
        parts = {".weight.nested_absmax": outer, ".weight.nested_quant_map": table}
    parts |= {
        ".weight": (codes[::2] << 4 | codes[1::2]).to(torch.uint8)[:, None],
        ".weight.absmax": bytes_.to(torch.uint8) if nested else absmax,
        ".weight.quant_map": values,
        f".weight.quant_state.bitsandbytes__{kind}": json_bytes(state),
    }
    return parts, (values[codes] * absmax[torch.arange(n * k) // run]).view(n, k)


def eight_bits(shape, generator):
    numbers, largest = integers(-127, 127, shape, generator).to(torch.int8), positive((shape[0],), generator) * 127
    parts = {".weight": numbers, ".SCB": largest, ".weight_format": torch.tensor(0, dtype=torch.uint8)}
    return parts, numbers.float() * (largest * (1 / 127))[:, None]


@pytest.mark.parametrize(
    ("run", "nested", "kind"),
    [
        (16, 32, "nf4"),
        (48, 8, "fp4"),
        pytest.param(64, 0, "nf4", marks=pytest.mark.long),
        pytest.param(128, 0, "nf4", marks=pytest.mark.long),
    ],
)
def test_four_bits(tmp_path, run, nested, kind):
    """Runs that end with rows, and runs that go on in the next row."""
    form = lambda *a: four_bits(*a, run=run, nested=nested, kind=kind)  # noqa: E731
    check_pair(write_pair(tmp_path, "llama", form, {**BNB, "bnb_4bit_use_double_quant": nested > 0}))


def test_eight_bits(tmp_path):
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_skip_modules": ["lm_head"]}
    check_pair(write_pair(tmp_path, "llama", eight_bits, config, num_hidden_layers=2))


def test_experts(tmp_path):
    form = lambda *a: four_bits(*a, run=64, nested=256)  # noqa: E731
    check_pair(write_pair(tmp_path, "qwen3_moe", form, BNB, num_hidden_layers=2, num_experts=4))


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bnb")
    forms = {"q_proj": lambda *a: four_bits(*a, nested=8), "k_proj": eight_bits}
    where = lambda name: "q_proj" in name or "k_proj" in name  # noqa: E731
    return write_pair(folder, "llama", forms, BNB, where=where, num_hidden_layers=1).narrow


STATE = f"{Q_PROJ}.weight.quant_state.bitsandbytes__nf4"
WRONG = {"blocksize": 64, "shape": [64, 32]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(STATE), r"q_proj\.weight .* is bitsandbytes and needs .*bitsandbytes__nf4, which is missing"),
        (lambda t: t.update({STATE: json_bytes([1])}), "tensor .*__nf4 must be the bytes of a JSON object"),
        (lambda t: t.update({STATE: json_bytes({**WRONG, "blocksize": 0})}), "lengths of runs above 0"),
        (lambda t: t.update({STATE: json_bytes(WRONG)}), r"does not hold the \[64, 32\] of .*__nf4"),
        (lambda t: t.pop(f"{Q_PROJ}.weight.nested_absmax"), r"needs .*nested_absmax of type F32 and shape \[8\]"),
        (lambda t: t.update({f"{Q_PROJ}.weight.absmax": torch.ones(64)}), r"absmax of type U8 .*, which is F32 \[64\]"),
        (lambda t: t.pop("model.layers.0.self_attn.k_proj.SCB"), r"k_proj\.weight .* needs .*SCB of"),
        (lambda t: t["model.layers.0.self_attn.k_proj.weight_format"].fill_(1), "supported: 0, by rows"),
    ],
)
def test_bad_files(tmp_path, good, change, message):
    refused_after(change, good, tmp_path, message)


def test_another_storage():
    with pytest.raises(ValueError, match="bnb_4bit_quant_storage 'bfloat16' is not supported; supported: uint8"):
        format_of({**BNB, "bnb_4bit_quant_storage": "bfloat16"})

"""Checkpoints of compressed-tensors, in each of its formats."""

import json
import shutil

import pytest
import torch
from support.checkpoints import refused, refused_after
from support.narrow_formats import check_pair, float8, floats4, integers, of_blocks, positive, write_pair

from tritonllm.models.formats.registry import format_of

Q_PROJ = "model.layers.0.self_attn.q_proj"


def configuration(form, *, ignore=("lm_head",), targets=("Linear",), **weights):
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": list(targets), "weights": weights, "input_activations": None}},
        "ignore": list(ignore),
        "kv_cache_scheme": None,
    }


def words(numbers, bits, dim):
    """Unsigned numbers into 32-bit words along a dimension, the first in the lowest bits; the last one is filled."""
    numbers = numbers.movedim(dim, 0)
    per = 32 // bits
    out = torch.zeros((-(-len(numbers) // per), *numbers.shape[1:]), dtype=torch.int64)
    for i, row in enumerate(numbers):
        out[i // per] |= row.long() << bits * (i % per)
    return torch.where(out >= 1 << 31, out - (1 << 32), out).int().movedim(0, dim)


def elements(shape, generator, *, kind, strategy, symmetric=True, group=24):
    """int8 or float8 as it is, with scales by the strategy."""
    (n, k), size = shape, {"tensor": (1,), "channel": (shape[0], 1), "group": (shape[0], -(-shape[1] // group))}
    numbers = float8(shape, generator) if kind == "float" else integers(-128, 127, shape, generator).to(torch.int8)
    block = {"tensor": (n, k), "channel": (1, k), "group": (1, group), "block": (40, 24)}[strategy]
    scale_shape = size.get(strategy, (-(-n // 40), -(-k // 24)))
    scales = positive(scale_shape, generator, torch.bfloat16)
    parts = {".weight": numbers, ".weight_scale": scales}
    zeros = torch.zeros(scale_shape)
    if not symmetric:
        parts[".weight_zero_point"] = integers(-100, 100, scale_shape, generator).to(torch.int8)
        zeros = parts[".weight_zero_point"]
    spread = [of_blocks(each.float().reshape(-(-n // block[0]), -1), shape, block) for each in (zeros, scales)]
    return parts, (numbers.float() - spread[0]) * spread[1]


def packed(shape, generator, *, bits, group=0, symmetric=True, order=None):
    """``weight_packed`` and, where they are asked for, packed zero points and the group of each column."""
    (n, k), half = shape, 1 << (bits - 1)
    across = -(-k // group) if group else 1
    numbers = integers(-half, half - 1, shape, generator)
    scales = positive((n, across), generator, torch.bfloat16)
    parts = {
        ".weight_packed": words(numbers + half, bits, 1),
        ".weight_scale": scales,
        ".weight_shape": torch.tensor(shape),
    }
    zeros = torch.zeros(n, across)
    if not symmetric:
        zeros = integers(-half, half - 1, (n, across), generator)
        parts[".weight_zero_point"] = words(zeros + half, bits, 0)
    column = torch.arange(k) // group if group else torch.zeros(k, dtype=torch.int64)
    if order == "group":
        column = column[torch.randperm(k, generator=generator)]
    if order is not None:
        parts[".weight_g_idx"] = column.int() if order == "group" else torch.full((k,), -1).int()
    return parts, (numbers - zeros[:, column]).float() * scales.float()[:, column]


def four_bit_floats(shape, generator, *, kind):
    """NVFP4 or MXFP4."""
    n, k = shape
    codes, signed = floats4(shape, generator)
    parts = {".weight_packed": (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)}
    if kind == "mxfp4":
        exponents = integers(120, 124, (n, k // 32), generator)
        parts[".weight_scale"] = exponents.to(torch.uint8)
        return parts, signed * torch.exp2(exponents - 127.0).repeat_interleave(32, 1)
    scales, divisor = (1 + 400 * torch.rand(n, k // 16, generator=generator)).to(torch.float8_e4m3fn), 7000.0
    parts |= {".weight_scale": scales, ".weight_global_scale": torch.tensor([divisor])}
    parts |= {".input_global_scale": torch.tensor([3.0])}
    return parts, signed * (scales.float() * torch.tensor(divisor).reciprocal()).repeat_interleave(16, 1)


@pytest.mark.parametrize(
    ("kind", "strategy", "symmetric"),
    [
        pytest.param("float", "tensor", True, marks=pytest.mark.long),
        ("float", "channel", True),
        ("float", "block", True),
        pytest.param("int", "channel", True, marks=pytest.mark.long),
        ("int", "channel", False),
        pytest.param("int", "tensor", False, marks=pytest.mark.long),
        ("int", "group", False),
    ],
)
def test_elements(tmp_path, kind, strategy, symmetric):
    """W8A8 and W8A16."""

    def form(shape, generator):
        return elements(shape, generator, kind=kind, strategy=strategy, symmetric=symmetric)

    sizes = {"group_size": 24} if strategy == "group" else {}
    sizes |= {"block_structure": [40, 24]} if strategy == "block" else {}
    config = configuration(f"{kind}-quantized", num_bits=8, type=kind, strategy=strategy, **sizes)
    check_pair(write_pair(tmp_path, "llama", form, config, num_hidden_layers=2))


@pytest.mark.parametrize(
    ("bits", "group", "symmetric", "order"),
    [
        pytest.param(4, 32, True, None, marks=pytest.mark.long),
        (4, 16, False, "group"),
        pytest.param(4, 0, False, None, marks=pytest.mark.long),
        (8, 0, True, None),
        (8, 16, False, "none"),
        pytest.param(2, 32, False, None, marks=pytest.mark.long),
    ],
)
def test_packed(tmp_path, bits, group, symmetric, order):
    """W4A16 and W8A16, and rows that end within a word and within a group (88 columns, of which a rank has 44)."""

    def form(shape, generator):
        return packed(shape, generator, bits=bits, group=group, symmetric=symmetric, order=order)

    how = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    config = configuration("pack-quantized", num_bits=bits, type="int", symmetric=symmetric, **how)
    fields = {"num_hidden_layers": 2, "intermediate_size": 84}
    check_pair(write_pair(tmp_path, "llama", form, config, **fields))


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4"])
def test_four_bit_floats(tmp_path, kind):
    def form(shape, generator):
        return four_bit_floats(shape, generator, kind=kind)

    config = configuration(f"{kind}-pack-quantized", num_bits=4, type="float", group_size=16)
    check_pair(write_pair(tmp_path, "llama", form, config, num_hidden_layers=2, intermediate_size=96))


def test_a_rule_for_each_module_and_some_ignored(tmp_path):
    """An exact name goes before a pattern, and a pattern before all; what is ignored has 16 bits."""
    forms = {
        "layers.0.self_attn.q_proj": lambda *a: packed(*a, bits=8),
        "self_attn": lambda *a: packed(*a, bits=4, group=32),
        "mlp": lambda *a: elements(*a, kind="float", strategy="channel"),
    }
    config = configuration("mixed-precision", num_bits=8, type="float", strategy="channel")
    groups = config["config_groups"]
    four = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    groups["group_1"] = {"targets": [r"re:.*self_attn\..*_proj$"], "weights": four, "format": "pack-quantized"}
    groups["group_2"] = {"targets": [Q_PROJ], "weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}
    config["ignore"] = ["lm_head", "re:.*layers[.]1[.].*"]
    where = lambda name: "_proj" in name and ".layers.1." not in name  # noqa: E731
    check_pair(write_pair(tmp_path, "qwen3", forms, config, where=where))


def test_experts_one_by_one(tmp_path):
    def form(shape, generator):
        return packed(shape, generator, bits=4, group=8, symmetric=False)

    config = configuration("pack-quantized", num_bits=4, type="int", strategy="group", group_size=8)
    check_pair(write_pair(tmp_path, "qwen3_moe", form, config, num_hidden_layers=2, num_experts=4))


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    def form(shape, generator):
        return packed(shape, generator, bits=4, group=32, symmetric=False, order="group")

    config = configuration("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32)
    return write_pair(tmp_path_factory.mktemp("packed"), "llama", form, config, num_hidden_layers=1).narrow


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.pop(f"{Q_PROJ}.weight_scale"),
            r"q_proj\.weight_packed .* needs .*q_proj\.weight_scale of",
        ),
        (
            lambda t: t.update({f"{Q_PROJ}.weight_scale": torch.ones(64, 3)}),
            r"weight_scale has shape \[64, 3\]: not one of the whole, of rows, of 32 columns",
        ),
        (
            lambda t: t.update({f"{Q_PROJ}.weight_shape": torch.tensor([64, 80])}),
            r"weight_packed \[64, 8\] does not hold the \[64, 80\] of .*weight_shape, 8 numbers to a word",
        ),
        (
            lambda t: t.update({f"{Q_PROJ}.weight_zero_point": torch.zeros(9, 2, dtype=torch.int32)}),
            r"needs .*weight_zero_point of type I32 and shape \[8, 2\], which is I32 \[9, 2\]",
        ),
        (
            lambda t: t.update({f"{Q_PROJ}.weight_g_idx": torch.zeros(9, dtype=torch.int32)}),
            r"needs .*weight_g_idx of .* shape \[64\], which is I32 \[9\]",
        ),
        (lambda t: t.update({f"{Q_PROJ}.weight": torch.ones(64, 64)}), "hold the same weights"),
        (
            lambda t: t.update({"lm_head.weight_packed": torch.zeros(101, 8, dtype=torch.int32)}),
            r"tensor lm_head\.weight_packed .* is narrow, but .* ignores lm_head",
        ),
    ],
)
def test_bad_files(tmp_path, good, change, message):
    refused_after(change, good, tmp_path, message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "marlin-24"}, "format 'marlin-24' is not supported; supported: float-quantized, int-quantized"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "format 'sparse-24-bitmask' is not supported"),
        ({"config_groups": []}, None),
        ({"config_groups": [1]}, "config_groups must be an object"),
    ],
)
def test_configurations(change, message):
    config = {**configuration("pack-quantized", num_bits=4), **change}
    if message is None:
        format_of(config)
        return
    with pytest.raises(ValueError, match=message):
        format_of(config)


def test_bits_and_targets_that_do_not_fit(tmp_path, good):
    config = json.loads((good / "config.json").read_text())
    shutil.copytree(good, tmp_path, dirs_exist_ok=True)
    for change, message in (
        ({"num_bits": 3}, "has 3 bits by .*; supported in packed weights: 2, 4, 8"),
        ({"num_bits": 8}, r"does not hold the \[\d+, \d+\] of .*weight_shape, 4 numbers to a word"),
    ):
        groups = {"group_0": {"targets": ["Linear"], "weights": {"group_size": 32, **change}}}
        config["quantization_config"]["config_groups"] = groups
        (tmp_path / "config.json").write_text(json.dumps(config))
        refused(tmp_path, message)
    one = {"targets": ["re:nothing"], "weights": {"num_bits": 4}}
    config["quantization_config"]["config_groups"] = {"a": one, "b": one}
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused(tmp_path, r"is narrow, but no group of .* has .*proj as a target")

"""Checkpoints of GPTQ: bits, groups, orders, both forms of zero points, and rules for modules."""

import json
import shutil

import pytest
import torch
from support.checkpoints import edit, refused, refused_after
from support.narrow_formats import check_pair, config_of, gptq, write_pair

from tritonllm.models.formats.registry import format_of

Q_PROJ = "model.layers.0.self_attn.q_proj"
FIELDS = {"num_hidden_layers": 2, "intermediate_size": 96}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}


@pytest.mark.parametrize(
    ("bits", "group", "sym", "order", "minus"),
    [
        (4, 32, True, "in order", 1),
        (4, 64, False, "act-order", 0),
        (3, 32, False, "in order", 1),
        pytest.param(2, 16, False, "act-order", 1, marks=pytest.mark.long),
        pytest.param(8, -1, True, "in order", 1, marks=pytest.mark.long),
        (8, 128, False, "left out", 0),
    ],
)
def test_weights(tmp_path, bits, group, sym, order, minus):
    def form(shape, generator):
        return gptq(shape, generator, bits=bits, group=group, sym=sym, order=order, minus=minus)

    config = {**GPTQ, "bits": bits, "group_size": group, "sym": sym, "desc_act": order == "act-order"}
    config |= {"checkpoint_format": "gptq" if minus else "gptq_v2"}
    check_pair(write_pair(tmp_path, "llama", form, config, num_key_value_heads=4, **FIELDS))


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox", "phi3"])
def test_other_families(tmp_path, family):
    """A module is ``[N, K]`` even where 16-bit weights have it turned; with biases, in another order, fused."""
    ends = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight", "query_key_value.weight", ".dense.weight")
    where = lambda name: name.endswith((*ends, "_proj.weight", "h_to_4h.weight", "4h_to_h.weight"))  # noqa: E731

    def form(shape, generator):
        if family != "gpt2":
            return gptq(shape, generator, order="act-order")
        parts, values = gptq(shape[::-1], generator, order="act-order")
        return parts, values.mT

    check_pair(write_pair(tmp_path, family, form, {**GPTQ, "desc_act": True}, where=where))


def test_experts_and_auto_round(tmp_path):
    config = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": 16}
    config |= {"extra_config": {"model.layers.0.mlp.experts.0.down_proj": {"bits": 8}}}
    forms = {
        "layers.0.mlp.experts.0.down_proj": lambda *a: gptq(*a, bits=8, group=16),
        "": lambda *a: gptq(*a, bits=4, group=16),
    }
    fields = {"num_hidden_layers": 2, "num_experts": 4, "moe_intermediate_size": 32}
    check_pair(write_pair(tmp_path, "qwen3_moe", forms, config, **fields))


def test_rules_the_output_projection_and_biases_of_zeros(tmp_path):
    """The first rule that fits counts, from the beginning of a name."""
    dynamic = {
        r"-:.*\.o_proj": {},
        r"+:model\.layers\.0\.mlp": {"bits": 8, "group_size": -1},
        r".*\.mlp": {"bits": 2},
    }
    forms = {
        "layers.0.mlp": lambda *a: gptq(*a, bits=8, group=-1),
        "mlp": lambda *a: gptq(*a, bits=2),
        "": gptq,
    }
    where = lambda name: ("_proj." in name and "o_proj" not in name) or name == "lm_head.weight"  # noqa: E731
    zeros = {f"{Q_PROJ}.bias": torch.zeros(64)}
    config = {**GPTQ, "dynamic": dynamic, "lm_head": True}
    fields = {**FIELDS, "vocab_size": 104}
    pair = write_pair(tmp_path, "llama", forms, config, where=where, change=lambda t: t.update(zeros), **fields)
    check_pair(pair)
    edit(pair.narrow, lambda t: t[f"{Q_PROJ}.bias"].fill_(1.0))
    refused(pair.narrow, rf"tensor {Q_PROJ}\.bias has no place")


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gptq")
    return write_pair(folder, "llama", gptq, GPTQ, num_hidden_layers=1, intermediate_size=96).narrow


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{Q_PROJ}.scales"), r"q_proj\.qweight .* is gptq and needs .*q_proj\.scales of"),
        (
            lambda t: t.pop(f"{Q_PROJ}.qzeros"),
            r"needs .*q_proj\.qzeros of type I32 and shape \[2, 8\], which is missing",
        ),
        (
            lambda t: t.update({f"{Q_PROJ}.scales": torch.ones(3, 64)}),
            r"scales of .* shape \[2, 64\], which is F32 \[3,",
        ),
        (lambda t: t[f"{Q_PROJ}.g_idx"].fill_(2), r"has 2 groups, but .*g_idx gives its columns groups from 2 to 2"),
        (lambda t: t.update({f"{Q_PROJ}.qweight": torch.zeros(8, 64)}), r"\(F32\) does not hold numbers of 4 bits"),
        (lambda t: t.update({f"{Q_PROJ}.weight": torch.ones(64, 64)}), "hold the same weights"),
    ],
)
def test_bad_files(tmp_path, good, change, message):
    refused_after(change, good, tmp_path, message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 5}, "bits 5 are not supported; supported: 2, 3, 4, 8"),
        ({"group_size": 0}, "group_size must be a number of columns, or -1 for all, got 0"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not supported; supported: gptq, gptq_v2"),
        ({"dynamic": {"x": {"bits": 7}}}, "bits 7 are not supported"),
        ({"quant_method": "auto-round", "packing_format": "auto_round:awq"}, "packing_format 'auto_round:awq' is not"),
    ],
)
def test_bad_configurations(change, message):
    with pytest.raises(ValueError, match=message):
        format_of({**GPTQ, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dynamic": {"-:.*q_proj": {}}}, r"q_proj\.qweight .* is narrow, but a rule of .* leaves .*q_proj out"),
        ({"bits": 3}, r"needs .*down_proj\.scales of .* shape \[4, 64\]"),
        ({"bits": 8}, r"needs .*down_proj\.scales of .* shape \[2, 64\]"),
    ],
)
def test_configurations_of_other_files(tmp_path, good, change, message):
    shutil.copytree(good, tmp_path, dirs_exist_ok=True)
    config = config_of(tmp_path)
    config["quantization_config"] |= change
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused(tmp_path, message)


def test_an_order_that_is_missing(tmp_path, good):
    shutil.copytree(good, tmp_path, dirs_exist_ok=True)
    config = config_of(tmp_path)
    config["quantization_config"]["desc_act"] = True
    (tmp_path / "config.json").write_text(json.dumps(config))
    edit(tmp_path, lambda tensors: tensors.pop(f"{Q_PROJ}.g_idx"))
    refused(tmp_path, r"needs .*q_proj\.g_idx of type I32 or I64 and shape \[64\], which is missing")

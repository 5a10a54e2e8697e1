"""Weights that are kept as narrow as the checkpoint has them: which, in what format, and with the same values."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.mechanism_configs import MECHANISMS
from support.narrow_formats import check_pair, float8, integers, kept, mxfp4, nvfp4, positive, widened, write_pair

from tritonllm.dist.group import Group
from tritonllm.kernels import Groups, Weight, widen_weight
from tritonllm.kernels.dense.narrow import e2m1_values
from tritonllm.kernels.dense.weight import PACKED
from tritonllm.kernels.runtime.chip import Chip
from tritonllm.layers.moe import MoE
from tritonllm.layers.parameters import deferred
from tritonllm.models import checkpoint
from tritonllm.models.decoder import Decoder
from tritonllm.models.families import spec_from_config
from tritonllm.models.formats.keeping import Arrival, assemble
from tritonllm.models.formats.piece import NarrowPiece
from tritonllm.models.quantization import narrowing, quantize_layers
from tritonllm.models.slots import Slot
from tritonllm.models.weights import load_weights

SIZES = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "head_dim": 64}


@st.composite
def filled(draw):
    """(shape, arrivals): pieces that fill a parameter, with or without experts, blocks of rows perhaps in another
    order."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    experts, k = draw(st.sampled_from([0, 1, 3])), draw(st.sampled_from([32, 64, 128, 160]))
    columns = draw(st.sampled_from([0, 16, 32, 64, 24]))
    kind = draw(st.sampled_from(["fp8", "int8", "signed nibbles", "nibbles", "bytes", "mxfp4", "nvfp4"]))
    sizes, arrivals = draw(st.lists(st.sampled_from([2, 4, 6]), min_size=1, max_size=3)), []
    for expert in range(experts) if experts else [None]:
        start = 0
        for size in sizes:
            shape = draw(st.sampled_from([(size, 1), (1, size)])) if columns == 0 else (size, 1)
            group_rows = size if shape[0] == 1 else draw(st.sampled_from([1, 2]))
            across = -(-k // columns) if columns else 1
            scales = positive((-(-size // group_rows), across), generator)
            low, high = {"int8": (-128, 127), "signed nibbles": (-8, 7), "nibbles": (0, 15)}.get(kind, (0, 255))
            numbers = integers(low, high, (size, k), generator)
            numbers = numbers.to(torch.int8 if low < 0 else torch.uint8)
            if kind == "fp8":
                numbers = float8((size, k), generator)
            zeros = values = factor = None
            if kind.endswith("fp4"):
                numbers, values = numbers % 16, e2m1_values(torch.device("cpu"))
                factor = None if kind == "mxfp4" else positive((), generator)
                scales = torch.exp2(integers(-9, 9, scales.shape, generator)) if factor is None else scales * 7000
                scales = scales.to(torch.float8_e4m3fn if factor is not None else torch.float32).float()
            if kind in ("nibbles", "bytes"):
                top = 16 if kind == "nibbles" else 255
                zeros = integers(0, top, tuple(scales.shape), generator).int()
            order = draw(st.sampled_from([None, (1, 0)]))
            slot = Slot(parameter="w", shape=(size, k), start=start, expert=expert, order=order)
            piece = NarrowPiece(numbers, scales, Groups(group_rows, columns), zeros, values=values, factor=factor)
            arrivals.append(Arrival(slot, piece))
            start += size
    return ((experts, start, k) if experts else (start, k)), draw(st.permutations(arrivals))


@given(filled())
def test_what_is_kept_has_the_values_of_what_is_widened(filled):
    shape, arrivals = filled
    weight, wide = assemble(shape, arrivals), torch.full(shape, float("nan"))
    for arrival in arrivals:
        arrival.write(wide)
    columns = arrivals[0].piece.groups.columns
    if weight is None:
        some = arrivals[0].piece.numbers.dtype == torch.uint8  # with zero points, perhaps of nine bits
        assert columns == 24 or (some and arrivals[0].piece.values is None) or (columns == 0 and shape[-1] % 128)
        return
    found = torch.stack([widen_weight(one, torch.float32) for one in (weight.each() if len(shape) == 3 else [weight])])
    assert torch.equal(found.view(shape), wide)
    assert weight.format not in PACKED or shape[-1] % (weight.groups.columns or 128) == 0
    assert (weight.format == "fp4") == (arrivals[0].piece.values is not None)


def test_what_is_not_kept():
    piece = NarrowPiece(integers(-8, 7, (4, 64), torch.Generator()).to(torch.int8), torch.ones(4, 2), Groups(1, 32))
    slot = Slot(parameter="w", shape=(4, 64))
    assert assemble((4, 64), [Arrival(slot, piece)]) is not None
    nan = NarrowPiece(torch.full((4, 64), 127, dtype=torch.uint8).view(torch.float8_e4m3fn), torch.ones(4, 1), Groups())
    half = Slot(parameter="w", shape=(4, 32), axis=1)
    bits, of_floats = (piece.numbers % 16).byte(), {"values": e2m1_values(torch.device("cpu"))}
    assert assemble((4, 64), [Arrival(slot, NarrowPiece(bits, piece.scales, piece.groups, **of_floats))]) is not None
    for arrival in (
        Arrival(slot, NarrowPiece(piece.numbers, piece.scales, piece.groups, values=torch.ones(16))),
        Arrival(slot, NarrowPiece(bits, piece.scales * 2.0**121, piece.groups, **of_floats)),
        Arrival(slot, NarrowPiece(bits, piece.scales * -1.0, piece.groups, **of_floats)),
        Arrival(slot, NarrowPiece(bits, piece.scales * 1.01, piece.groups, **of_floats)),
        Arrival(slot, NarrowPiece(piece.numbers, piece.scales, Groups(), column_groups=torch.zeros(64).long())),
        Arrival(slot, piece, turned=True),
        Arrival(half, NarrowPiece(piece.numbers[:, :32], piece.scales[:, :1], piece.groups)),
        Arrival(slot, nan),
        Arrival(slot, NarrowPiece(piece.numbers, torch.full((4, 2), torch.inf), piece.groups)),
    ):
        assert assemble((4, 64), [arrival]) is None
    other = NarrowPiece(piece.numbers, piece.scales[:, :1], Groups())
    assert (
        assemble((8, 64), [Arrival(slot, piece), Arrival(Slot(parameter="w", shape=(4, 64), start=4), other)]) is None
    )


def test_rows_are_rounded_where_both_sides_are_of_eight_bits():
    """As the checkpoint says, in every piece; not beside four bits, by groups of columns, or of experts."""
    bytes_, fp8 = integers(-127, 127, (4, 128), torch.Generator()).to(torch.int8), torch.ones(4, 128)
    bytes_[:, 0] = 127  # more than four bits hold

    def rounds(numbers, *pieces_round, columns=0, expert=None):
        scales = torch.ones(Groups(1, columns).shape(4, 128))
        arrivals = [
            Arrival(
                Slot(parameter="w", shape=(4, 128), start=4 * place, expert=expert),
                NarrowPiece(numbers, scales, Groups(1, columns), rounds_rows=each),
            )
            for place, each in enumerate(pieces_round)
        ]
        shape = 4 * len(arrivals), 128
        return assemble(shape if expert is None else (1, *shape), arrivals).rounds_rows

    for numbers in (bytes_, fp8.to(torch.float8_e4m3fn)):
        assert rounds(numbers, True, True) and not rounds(numbers, False)
        assert not rounds(numbers, True, False)
        assert not rounds(numbers, True, columns=64)
        assert not rounds(numbers, True, expert=0)
    assert not rounds(integers(-8, 7, (4, 128), torch.Generator()).to(torch.int8), True)


def test_float8_is_widened_where_the_chip_does_not_convert_it(monkeypatch):
    numbers = float8((4, 64), torch.Generator())
    arrival = Arrival(Slot(parameter="w", shape=(4, 64)), NarrowPiece(numbers, torch.ones(4, 1), Groups()))
    assert assemble((4, 64), [arrival]).format == "fp8"
    monkeypatch.setattr("tritonllm.kernels.runtime.float8.chip_of", lambda device: Chip("cuda", 80, 108))
    assert assemble((4, 64), [arrival]) is None


def rows(shape, generator):
    """float8, a scale for each row."""
    numbers, scales = float8(shape, generator), positive((shape[0], 1), generator)
    return {".weight": numbers, ".weight_scale": scales}, numbers.float() * scales


def blocks(shape, generator):
    """float8, a scale for each block of 128 x 128."""
    numbers, down = float8(shape, generator), (-(-shape[0] // 128), -(-shape[1] // 128))
    scales = positive(down, generator)
    spread = scales.repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]]
    return {".weight": numbers, ".weight_scale_inv": scales}, numbers.float() * spread


def nibbles(shape, generator):
    """compressed-tensors' words of eight, a scale for each 32 columns."""
    numbers, scales = integers(-8, 7, shape, generator), positive((shape[0], shape[1] // 32), generator, torch.bfloat16)
    each = (numbers + 8).unflatten(1, (-1, 8)) << torch.arange(0, 32, 4)
    packed = each.sum(-1)
    parts = {
        ".weight_packed": torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int(),
        ".weight_scale": scales,
        ".weight_shape": torch.tensor(shape),
    }
    return parts, numbers.float() * scales.float().repeat_interleave(32, 1)


WORDS = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True},
        }
    },
    "ignore": ["lm_head", "re:.*mlp.gate$"],
}
FP8 = {"quant_method": "fp8"}
CASES = {
    "rows": ("qwen3", rows, FP8, "fp8", Groups()),
    "blocks": ("qwen3_moe", blocks, {**FP8, "weight_block_size": [128, 128]}, "fp8", Groups(1, 128)),
    "nibbles": ("qwen3_moe", nibbles, WORDS, "int4", Groups(1, 32)),
    "nvfp4": ("qwen3_moe", nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, "fp4", Groups(1, 16)),
}


@pytest.mark.parametrize(
    "case", ["rows", *(pytest.param(case, marks=pytest.mark.long) for case in CASES if case != "rows")]
)
def test_layers_keep_published_formats(tmp_path, case):
    family, form, quantization, format, groups = CASES[case]
    pair = write_pair(tmp_path, family, form, quantization, **SIZES)
    model = kept(pair.narrow)
    assert model.quantization == format
    for layer in model.layers:
        held = [layer.attention.qkv.operand, layer.attention.o.operand]
        held += [layer.mlp.held("gate_up"), layer.mlp.held("down")] if isinstance(layer.mlp, MoE) else []
        assert all((of.format, of.groups) == (format, groups) for of in held)
        assert not isinstance(layer.mlp, MoE) or layer.mlp.router.operand.format == "plain"
    check_pair(pair, ranks=False)


def test_experts_of_gpt_oss_are_kept(tmp_path):
    """Gates and ups, which alternate, without being widened; half of each expert, too, and whole ones. A rank's part
    that cuts through groups has smaller ones, and so has the other product."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_local_experts": 2, "num_hidden_layers": 1}
    pair = write_pair(
        tmp_path, "gpt_oss", mxfp4, {"quant_method": "mxfp4"}, where=lambda name: name.endswith("_proj"), **sizes
    )
    check_pair(pair)
    for how in ({}, {"group": Group(1, 2)}):
        model = kept(pair.narrow, **how)
        ((up, down),) = [[layer.mlp.held(name) for name in ("gate_up", "down")] for layer in model.layers]
        assert (up.format, down.format, model.quantization) == ("fp4", "fp4", "fp4")
        assert up.groups == down.groups == Groups(1, 32) and up.scales.dtype == torch.float8_e8m0fnu
        assert model.layers[0].attention.o.operand.format == "plain"
    for rank in range(4):
        model, wide = kept(pair.narrow, group=Group(rank, 4)), kept(pair.wide, group=Group(rank, 4))
        held = [model.layers[0].mlp.held(name) for name in ("gate_up", "down")]
        assert all((of.format, of.groups) == ("fp4", Groups(1, 16)) for of in held)
        assert all(torch.equal(tensor, widened(wide)[name]) for name, tensor in widened(model).items())


@pytest.mark.long
def test_experts_of_which_ranks_have_fewer_columns_than_a_group_are_widened(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_local_experts": 2, "num_hidden_layers": 1}
    pair = write_pair(tmp_path, "gpt_oss", mxfp4, None, where=lambda name: name.endswith("_proj"), **sizes)
    mlp = kept(pair.narrow, group=Group(1, 4)).layers[0].mlp
    assert [mlp.held(name).format for name in ("gate_up", "down")] == ["plain", "plain"]


def test_gpt_oss_120b_fits_a_gpu_of_80_gb():
    """By the shapes that its experts have where they are kept; what is 234 GB in 16 bits."""
    config = next(of for name, of in MECHANISMS.items() if name.startswith("gpt-oss"))
    config = config | {"num_hidden_layers": 36, "num_local_experts": 128}
    model = Decoder(spec_from_config(config), dtype=torch.bfloat16, device=torch.device("meta"), max_model_len=16)
    assert sum(p.nbytes for p in model.parameters()) > 233e9
    for layer in model.layers:
        for name in ("gate_up", "down"):
            *experts, n, k = getattr(layer.mlp, name).shape
            data = torch.empty(*experts, n, k // 2, dtype=torch.uint8, device="meta")
            scales = torch.empty(*experts, n, -(-k // 256) * 8, dtype=torch.float8_e8m0fnu, device="meta")  # with gaps
            layer.mlp.hold(name, Weight(data, scales, "fp4", Groups(1, 32)))
    assert sum(p.nbytes for p in model.parameters()) < 66e9


def test_a_stack_of_which_a_part_is_wide_is_widened(tmp_path):
    """Queries alone are narrow, so the stacked projection is not; what is narrow as a whole is kept."""
    pair = write_pair(tmp_path, "qwen3", rows, FP8, where=lambda name: "q_proj" in name or "down_proj" in name, **SIZES)
    (first, *_) = kept(pair.narrow).layers
    assert (first.attention.qkv.operand.format, first.mlp.down.operand.format) == ("plain", "fp8")
    check_pair(pair, ranks=False)


def test_experts_of_two_formats_are_widened(tmp_path):
    pair = write_pair(
        tmp_path, "qwen3_moe", rows, FP8, where=lambda name: ".experts." in name and "down" in name, **SIZES
    )
    (first, *_) = kept(pair.narrow).layers
    assert first.mlp.held("down").format == first.mlp.held("gate_up").format == "plain"
    check_pair(pair, ranks=False)


@pytest.mark.long
@pytest.mark.parametrize("quantization", ["fp8", "int4"])
def test_weights_are_made_narrow_one_by_one(tmp_path, quantization):
    """As if all had been loaded first."""
    pair = write_pair(tmp_path, "qwen3_moe", rows, FP8, **SIZES)
    spec, sizes = spec_from_config(checkpoint.read_config(pair.wide)), {"dtype": torch.float32, "max_model_len": 16}
    with deferred():
        model = Decoder(spec, **sizes, device=torch.device("cpu"))
    load_weights(model, pair.wide, then=narrowing(model, quantization))
    expected = Decoder(spec, **sizes, device=torch.device("cpu"))
    load_weights(expected, pair.wide)
    quantize_layers(expected, quantization)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name

"""Narrow weights made at the start: the engine computes with their numbers, on one rank and on several."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engines import greedy, tiny_llm, token_ids
from support.ranks import run_ranks
from support.tiny_models import PagedRunner, PagedSequence, random_tokens, tiny_config, write_checkpoint

from tritonllm.config.engine import EngineConfig
from tritonllm.engine.start.precompile import Target, kernels_of
from tritonllm.kernels import Groups, quantize_weight, widen_weight
from tritonllm.models import checkpoint
from tritonllm.models.decoder import Decoder
from tritonllm.models.deferred_weights import products_of_layers
from tritonllm.models.families import spec_from_config
from tritonllm.models.quantization import GROUPS, narrowing
from tritonllm.models.weights import load_weights

LAYER = ".layers."
# whole groups of four bits, on two ranks, too
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


def widened(folder, to, quantization):
    """The checkpoint whose matrices of layers hold the numbers that the narrow format leaves of them."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if LAYER in name and tensor.dim() == 2 and not name.endswith("mlp.gate.weight"):
            groups = GROUPS.get(quantization, Groups())
            tensors[name] = widen_weight(quantize_weight(tensor, quantization, groups), tensor.dtype)
    to.mkdir()
    for path in folder.iterdir():
        if path.suffix == ".json":
            (to / path.name).write_bytes(path.read_bytes())
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model without experts, and one with."""
    found = {}
    for kind, more in (("qwen3", {}), ("qwen3_moe", {"moe_intermediate_size": 256})):
        found[kind] = tmp_path_factory.mktemp(kind)
        write_checkpoint(found[kind], tiny_config(kind, **SIZES, **more), seed=5)
    return found


@pytest.fixture(scope="module")
def folder(folders):
    return folders["qwen3"]


_OFTEN = {("qwen3", "fp8"), ("qwen3", "int4"), ("qwen3_moe", "int8")}
CASES = pytest.mark.parametrize(
    ("kind", "quantization"),
    [
        pytest.param(kind, quantization, marks=() if (kind, quantization) in _OFTEN else pytest.mark.long)
        for kind in ("qwen3", "qwen3_moe")
        for quantization in ("fp8", "int8", "int4")
    ],
)


@CASES
def test_an_engine_computes_with_the_numbers_of_the_format(folders, kind, tmp_path, quantization):
    folder = folders[kind]
    prompts, how = [random_tokens(n, 100, seed=n) for n in (3, 21)], {"skip_tokenizer_init": True, "dtype": "float32"}
    params = greedy(8, logprobs=0)
    found = tiny_llm(folder, quantization=quantization, **how).generate(prompts, params)
    expected = tiny_llm(widened(folder, tmp_path / "wide", quantization), **how).generate(prompts, params)
    plain = tiny_llm(folder, **how).generate(prompts, params)
    sums = [[one.outputs[0].cumulative_logprob for one in each] for each in (found, expected, plain)]
    assert token_ids(found) == token_ids(expected) and sums[0] == pytest.approx(sums[1], abs=1e-4)
    assert sums[0] != pytest.approx(sums[2], abs=1e-4)


@CASES
def test_ranks_have_the_weights_of_one(folders, kind, quantization):
    """Rows that are cut have one scale on all ranks."""
    folder = folders[kind]
    tokens = random_tokens(11, 100, seed=2)

    def logits(group):
        spec = spec_from_config(checkpoint.read_config(folder))
        sizes = {"dtype": torch.float32, "device": torch.device("cpu"), "max_model_len": 64}
        model = Decoder(spec, **sizes, group=group)
        load_weights(model, folder, then=narrowing(model, quantization))
        return PagedRunner(model).prefill(PagedSequence(), tokens)

    (alone,), ranks = run_ranks(1, logits), run_ranks(2, logits)
    for each in ranks:
        assert (each - alone).norm() <= 1e-5 * alone.norm()


def test_what_a_start_compiles_reads_narrow_weights():
    """Found on meta tensors, whose weights have no numbers."""
    spec = spec_from_config(tiny_config("qwen3_moe", **SIZES, moe_intermediate_size=256))
    target = Target(arch=90, name=None, dtype=torch.bfloat16, max_model_len=64)
    asked = {}
    for quantization in (None, "fp8", "int8", "int4"):
        config = EngineConfig.from_kwargs(
            model="tiny", max_num_seqs=4, max_num_batched_tokens=128, quantization=quantization
        )
        asked[quantization] = {(k.name, str(k.source.signature)) for k in kernels_of(spec, config, target)}
    for quantization, kind in (("fp8", "fp8e4nv"), ("int8", "i8"), ("int4", "u8")):
        new = {name for name, signature in asked[quantization] if f"*{kind}" in signature}
        one = "_quantize_kernel" if quantization == "fp8" else "linear_rows_kernel"
        assert {one, "linear_tiles_kernel", "_gate_up_kernel", "_down_kernel"} <= new, new
    assert not any("fp8" in signature for _, signature in asked[None])


def test_what_cannot_be_narrow_is_refused_before_any_work(folder, tmp_path):
    (tmp_path / "small").mkdir()
    write_checkpoint(tmp_path / "small", tiny_config("qwen3", hidden_size=64), seed=5)
    with pytest.raises(ValueError, match=r"quantization='awq': config\.json has no quantization_config"):
        tiny_llm(folder, quantization="awq", skip_tokenizer_init=True)
    with pytest.raises(ValueError, match=r"'int4': layers\.0\.attention\.qkv\.weight has 64 columns on a rank"):
        tiny_llm(tmp_path / "small", quantization="int4", skip_tokenizer_init=True)
    with pytest.raises(ValueError, match="quantization: products of narrow weights are not batch invariant"):
        tiny_llm(folder, quantization="int8", deterministic=True)


def test_weights_do_not_change_under_a_narrow_model(folder):
    llm = tiny_llm(folder, quantization="int8", skip_tokenizer_init=True, enable_sleep_mode=True)
    with pytest.raises(ValueError, match="reload_weights: weights are made narrow at the start only"):
        llm.reload_weights(str(folder))
    with pytest.raises(ValueError, match="level=2 drops weights, and narrow ones are made at the start only"):
        llm.sleep(level=2)
    before = token_ids(llm.generate([[1, 2, 3]], greedy(4)))
    llm.sleep(level=1)
    llm.wake_up()
    assert token_ids(llm.generate([[1, 2, 3]], greedy(4))) == before


@pytest.mark.parametrize(("left_out", "rounds_to"), [("", torch.float8_e4m3fn), ("gate", None), ("down", None)])
def test_a_norm_leaves_rounded_rows_where_all_that_read_these_are_products_of_such(left_out, rounds_to):
    """Found on meta tensors; the products that are left out have 16-bit weights, as a checkpoint may say."""
    spec = spec_from_config(tiny_config("qwen3", **SIZES))
    layers = [replace(layer, attention=replace(layer.attention, output_gate="sigmoid")) for layer in spec.layers]
    how = {"dtype": torch.bfloat16, "device": torch.device("meta"), "max_model_len": 64}
    model = Decoder(replace(spec, layers=tuple(layers)), **how)
    narrow = narrowing(model, "fp8")
    for name, module, attribute in list(products_of_layers(model)):
        if not left_out or f".{left_out}." not in name:
            narrow(model.stage.whole_name(name), module, attribute)
    assert {layer.traits.rounds_to for layer in model.layers} == {rounds_to}

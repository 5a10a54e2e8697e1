"""Engines whose ranks have experts by a placement, with copies: their tokens are those of one process."""

import json

import pytest
from support.engines import NGRAMS, tiny_checkpoint, tiny_llm, token_ids
from support.tiny_models import random_tokens
from support.tiny_tokenizer import VOCAB_SIZE

from tritonllm import SamplingParams
from tritonllm.experts.load import ExpertLoad
from tritonllm.experts.rebalance import rebalance
from tritonllm.models.expert_checks import check_agreement, read_placement
from tritonllm.models.families import spec_from_config
from tritonllm.models.local_spec import by_expert

pytestmark = pytest.mark.usefixtures("imported_ranks")
WHOLE = {"enable_expert_parallel": True, "enable_prefix_caching": False, "count_expert_load": True}
PARAMS = [
    SamplingParams(temperature=0, max_tokens=10, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=1, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.8, top_p=0.9, seed=2, max_tokens=8, n=2, ignore_eos=True),
]


def generate(llm):
    prompts = [random_tokens(length, VOCAB_SIZE, length) * 2 for length in (3, 26, 9)]
    return token_ids(llm.generate(prompts, PARAMS, use_tqdm=False))


@pytest.mark.parametrize(
    ("family", "size", "redundant", "options"),
    [
        ("glm4_moe", 2, 4, {"max_num_batched_tokens": 24}),  # a shared MLP, layers without experts
        ("gpt_oss", 4, 4, {"speculative_config": NGRAMS}),  # biases, key heads twice
    ],
)
def test_tokens_and_loads_are_those_of_one_process(tmp_path, family, size, redundant, options):
    folder, path = tiny_checkpoint(family), str(tmp_path / "placement.json")
    alone = tiny_llm(folder, **options, **WHOLE | {"enable_expert_parallel": False})
    expected, load = generate(alone), alone.expert_load()
    rebalance(load, size, redundant).save(path)
    ranks = tiny_llm(folder, **options, **WHOLE, tensor_parallel_size=size, expert_placement=path)
    assert generate(ranks) == expected
    assert ranks.expert_load() == load
    held = [layer.mlp.gate_up.shape[0] for layer in ranks.engine.model.layers if hasattr(layer.mlp, "gate_up")]
    assert set(held) == {(len(load.layers[max(load.layers)]) + redundant) // size}


SPEC = spec_from_config(json.loads((tiny_checkpoint("qwen3_moe") / "config.json").read_text()))
EXPERTS = next(iter(SPEC.experts.values()))
LOAD = ExpertLoad(SPEC.architecture, dict.fromkeys(SPEC.experts, tuple(range(EXPERTS))))
SIZES = {"tensor_parallel_size": 2, "enable_expert_parallel": True}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "Other"}, "is of another model .the architecture: Other, this one has Qwen3MoeForCausalLM"),
        ({"layers": {"1": list(range(EXPERTS))}}, "another model .layers with experts: 1, this one has 0"),
        (
            {"num_experts": 2, "layers": {str(p): [0, 1] for p in SPEC.experts}},
            "another model .experts of a layer: 2, ",
        ),
        ({"tensor_parallel_size": 4}, "is for tensor_parallel_size=4, not 2; make one for that many ranks"),
        ({"layers": {str(p): [0, 1] for p in SPEC.experts}}, "layer 0 has no slot for expert 2"),
        ({"num_experts": "4"}, "this is no placement"),
    ],
)
def test_bad_placements_are_refused_before_anything_is_loaded(tmp_path, changes, message):
    path = tmp_path / "placement.json"
    path.write_text(json.dumps({**rebalance(LOAD, 2).as_json(), **changes}))
    with pytest.raises(ValueError, match=f"expert_placement: .*{message}.*`tritonllm rebalance-experts"):
        tiny_llm(tiny_checkpoint("qwen3_moe"), **SIZES, expert_placement=str(path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "expert_placement: .*nowhere.json cannot be read .No such file"),
        ({"enable_expert_parallel": False}, "expert_placement places whole experts on ranks: give enable_expert"),
        ({"tensor_parallel_size": 1}, "a tensor_parallel_size above 1 with it, or leave it out"),
        ({"expert_placement": 3}, "expert_placement must be of type str"),
    ],
)
def test_options_that_do_not_fit(tmp_path, options, message):
    given = {**SIZES, "expert_placement": str(tmp_path / "nowhere.json"), **options}
    with pytest.raises(ValueError, match=message):
        tiny_llm(tiny_checkpoint("qwen3_moe"), **given)


def test_no_placement_is_deterministic(tmp_path):
    """The place of a token in its step chooses the copy, and sums over ranks have no fixed order anyway."""
    path = tmp_path / "placement.json"
    rebalance(LOAD, 2).save(path)
    with pytest.raises(ValueError, match="deterministic: the sums over the ranks of tensor_parallel_size=2"):
        tiny_llm(tiny_checkpoint("qwen3_moe"), **SIZES, expert_placement=str(path), deterministic=True)


class RankThatReadAnother:
    """A group in which another rank's number is the given one less."""

    def least(self, value):
        return min(value, value - 1)


def test_ranks_must_have_read_the_same(tmp_path):
    path = str(tmp_path / "placement.json")
    rebalance(LOAD, 2, 2).save(path)
    spec = by_expert(SPEC, read_placement(path, SPEC, 2))
    with pytest.raises(ValueError, match="expert_placement: the ranks have read different placements"):
        check_agreement(path, spec, RankThatReadAnother())

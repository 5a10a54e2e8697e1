"""Every family, cut into stages, computes what one rank computes, each stage from its own part of the files."""

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.compare import relative_error
from support.ranks import run_ranks
from support.tiny_models import (
    ALL_FAMILIES,
    PagedRunner,
    PagedSequence,
    load_decoder,
    random_tokens,
    tiny_config,
    write_checkpoint,
)

from tritonllm.models import checkpoint, weights
from tritonllm.models.decoder import Decoder
from tritonllm.models.families import spec_from_config
from tritonllm.models.stages import Stage, stages_of
from tritonllm.models.tensor_files import read
from tritonllm.models.weights import dummy_weights, load_weights, parameter_shapes

LIMIT = 1e-5  # of the logits
SIZES = {"dtype": torch.float32, "device": torch.device("cpu")}


class Chain:
    """Stages one behind the other, as one model."""

    def __init__(self, stages):
        self.stages, self.dtype = stages, stages[0].dtype
        self.spec, self.parameters = stages[0].whole, stages[0].parameters

    def __call__(self, input_ids, positions, metadata, cache, rows=None):
        for model in self.stages:
            layers = model.stage.layers
            mine = dataclasses.replace(metadata)
            hidden = model(input_ids, positions, mine, cache[layers.start : layers.stop], rows)
            if not model.stage.last:
                self.stages[model.stage.index + 1].incoming = hidden
        return hidden

    def compute_logits(self, hidden):
        return self.stages[0].compute_logits(hidden)


def load_stages(folder: Path, count: int, **options) -> list[Decoder]:
    spec = spec_from_config(checkpoint.read_config(folder))
    models = []
    for stage in stages_of(spec, parameter_shapes(spec), count):
        model = Decoder(spec, **SIZES, max_model_len=spec.max_position_embeddings, stage=stage, **options)
        for parameter in model.parameters():
            parameter.fill_(float("nan"))  # what the files do not fill shows
        load_weights(model, folder)
        models.append(model)
    return models


def logits_of(model, tokens: list[int]) -> torch.Tensor:
    """Of a prompt in two chunks and of three decodes behind it."""
    runner, sequence = PagedRunner(model), PagedSequence()
    first = [runner.prefill(sequence, tokens[:9]), runner.prefill(sequence, tokens[9:-3])]
    return torch.cat([*first, *(runner.step([(sequence, [token])])[0] for token in tokens[-3:])])


@pytest.mark.parametrize("family", ALL_FAMILIES)
@torch.inference_mode()
def test_stages_compute_what_one_rank_does(tmp_path, family):
    write_checkpoint(tmp_path, tiny_config(family), seed=1)
    alone = load_decoder(tmp_path)
    tokens = random_tokens(23, alone.spec.vocab_size, seed=2)
    expected = logits_of(alone, tokens)
    own = sum(layer.attention.own_keys for layer in alone.spec.layers)
    for count in {2, alone.spec.num_layers if own == alone.spec.num_layers else 2}:
        assert relative_error(logits_of(Chain(load_stages(tmp_path, count)), tokens), expected) < LIMIT


@torch.inference_mode()
def test_rows_are_narrowed_by_the_last_stage_alone(tmp_path):
    write_checkpoint(tmp_path, tiny_config("qwen3"), seed=1)
    first, last = load_stages(tmp_path, 2)
    runner = PagedRunner(load_decoder(tmp_path))
    tokens, rows = torch.tensor(random_tokens(7, 50, seed=2)), torch.tensor([6, 2])
    metadata = runner._metadata([(PagedSequence([0, 1], 7), tokens.tolist())], list(range(7)), 0)
    whole = runner.model(tokens, torch.arange(7), dataclasses.replace(metadata), runner.cache, rows)
    last.incoming = first(tokens, torch.arange(7), dataclasses.replace(metadata), runner.cache[:1], rows)
    assert last.incoming.shape == (7, first.spec.hidden_size)
    layers = last.stage.layers
    found = last(tokens, torch.arange(7), dataclasses.replace(metadata), runner.cache[layers.start :], rows)
    torch.testing.assert_close(found, whole, atol=1e-5, rtol=1e-5)


def test_a_part_of_a_stage(tmp_path):
    """Tensor and pipeline parallelism together: nothing of the files is left out or read twice."""
    write_checkpoint(tmp_path, tiny_config("qwen2_moe"), seed=1)
    whole = load_decoder(tmp_path)
    for first, last in run_ranks(2, lambda group: load_stages(tmp_path, 2, group=group)):
        here = [first.stage.whole_name(name) for name, _ in first.named_parameters()]
        there = [last.stage.whole_name(name) for name, _ in last.named_parameters()]
        assert sorted(here + there) == sorted(name for name, _ in whole.named_parameters())
        assert not any(parameter.isnan().any() for model in (first, last) for parameter in model.parameters())


def test_reads_only_its_part(tmp_path, monkeypatch):
    write_checkpoint(tmp_path, tiny_config("qwen3"), seed=1)
    read_tensors = []
    monkeypatch.setattr(weights, "read", lambda *given: (read_tensors.append(given[1]), read(*given))[1])
    first, last = load_stages(tmp_path, 2)
    assert len(set(read_tensors)) == len(read_tensors)
    split = read_tensors.index("model.norm.weight") if "model.norm.weight" in read_tensors else -1
    assert split >= 0
    assert not hasattr(last, "embed") and not hasattr(last, "lm_head") and first.norm is None


def test_dummy_weights_are_parts_of_the_whole_ones():
    spec = spec_from_config(tiny_config("gpt_oss"))
    whole = Decoder(spec, **SIZES, max_model_len=32)
    dummy_weights(whole, 3)
    expected = dict(whole.named_parameters())
    for stage in stages_of(spec, parameter_shapes(spec), 2):
        part = Decoder(spec, **SIZES, max_model_len=32, stage=stage)
        dummy_weights(part, 3)
        for name, parameter in part.named_parameters():
            assert torch.equal(parameter, expected[stage.whole_name(name)])


COSTS = st.lists(st.integers(0, 20), min_size=1, max_size=8)


@given(costs=COSTS, head=st.integers(0, 40), data=st.data())
def test_the_largest_stage_is_as_small_as_can_be(costs, head, data):
    count = data.draw(st.integers(1, len(costs)))
    spec = spec_from_config(tiny_config("llama", num_hidden_layers=len(costs)))
    shapes = {f"layers.{place}.mlp.up.weight": (cost,) for place, cost in enumerate(costs)} | {
        "lm_head.weight": (head,)
    }
    stages = stages_of(spec, shapes, count)
    assert [place for stage in stages for place in stage.layers] == list(range(len(costs)))
    assert all(stage.layers for stage in stages)
    assert [(s.index, s.first, s.last) for s in stages] == [(i, i == 0, i == count - 1) for i in range(count)]

    def largest(ends):
        sums = [sum(costs[a:b]) for a, b in itertools.pairwise([0, *ends, len(costs)])]
        return max([sums[0] + head, *sums[1:]])

    cuts = itertools.combinations(range(1, len(costs)), count - 1)
    assert largest([stage.layers.stop for stage in stages[:-1]]) == min(map(largest, cuts))


@given(reads=st.lists(st.booleans(), min_size=2, max_size=8), costs=st.lists(st.integers(0, 20), min_size=8))
def test_a_layer_is_with_the_one_that_it_reads(reads, costs):
    """Where keys are shared a model is cut in fewer places, and there as evenly as can be."""
    (layer, *_) = spec_from_config(tiny_config("llama")).layers
    shared = dataclasses.replace(layer.attention, own_keys=False)
    layers, source = [layer], 0
    for place, reads_others in enumerate(reads, start=1):
        source = source if reads_others else place
        kind = {"attention": shared, "keys_from": place - source} if reads_others else {}
        layers.append(dataclasses.replace(layer, **kind))
    spec = dataclasses.replace(spec_from_config(tiny_config("llama")), layers=tuple(layers))
    shapes = {f"layers.{place}.mlp.up.weight": (costs[place % 8],) for place in range(len(layers))}
    shapes["lm_head.weight"] = (3,)
    places = [place for place, each in enumerate(layers) if place and each.attention.own_keys]
    for count in range(1, len(places) + 2):
        stages = stages_of(spec, shapes, count)
        assert all(stage.of(spec).layers[0].attention.own_keys for stage in stages)  # and `of` refuses a lost one
        assert {stage.layers.start for stage in stages[1:]} <= set(places)
    if len(places) + 1 < len(layers):
        with pytest.raises(ValueError, match=f"must be at most {len(places) + 1} for .*: layers that read the keys"):
            stages_of(spec, shapes, len(places) + 2)


def test_more_stages_than_layers():
    spec = spec_from_config(tiny_config("llama"))
    with pytest.raises(ValueError, match=rf"pipeline_parallel_size=9 must be at most {spec.num_layers}, the number"):
        stages_of(spec, parameter_shapes(spec), 9)


def test_the_names_of_a_stage():
    stage = Stage(1, range(3, 5), first=False, last=True)
    assert stage.whole_name("layers.1.mlp.up.weight") == "layers.4.mlp.up.weight"
    names = ["layers.2.mlp.up.weight", "layers.3.mlp.up.weight", "norm.weight", "embed.weight", "embedding_norm.weight"]
    assert [stage.holds(name) for name in names] == [False, True, True, False, False]

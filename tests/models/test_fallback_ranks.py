"""Models that run through transformers, cut for ranks or stages, compute what transformers' whole model does."""

import copy
import dataclasses
import json
from functools import cache
from typing import Any

import pytest
import torch
from models.causal_types import VOCABULARY, build, tiny
from support.compare import relative_error
from support.ranks import run_ranks
from support.tiny_models import PagedRunner, PagedSequence, random_tokens, reference_logits

from tritonllm.dist.group import ALONE, Group
from tritonllm.models.fallback import fallback_spec, fallback_stages
from tritonllm.models.fallback_attention import register
from tritonllm.models.fallback_decoder import FallbackSpec, TransformersDecoder
from tritonllm.models.fallback_shards import sharing_of
from tritonllm.models.fallback_weights import LiveWriter
from tritonllm.models.stages import Stage

LIMIT = 1e-5  # of the logits: sums in another order
TOKENS = random_tokens(23, VOCABULARY, seed=2)
long = pytest.mark.long
# Gates of heads, whole experts beside others; experts alone; gathered queries; four streams of states; a shared expert.
CUT = ["beam", pytest.param("phimoe", marks=long), pytest.param("minimax_m3_vl_text", marks=long)]
CUT += [pytest.param(kind, marks=long) for kind in ("gemma3n_text", "kolibri1", "laguna")]
# Families of this package, as transformers computes them: stacked projections; sinks, experts with biases; a norm over
# all heads.
CUT += [pytest.param(kind, marks=long) for kind in ("phi3", "gpt_oss", "olmo2")]
STAGED = [
    "beam",
    *(pytest.param(kind, marks=long) for kind in ("bitnet", "ctrl", "jetmoe", "laguna", "modernbert-decoder")),
]


@cache
def whole_model(kind: str, **changes: Any) -> Any:
    config = tiny(kind)
    for name, value in changes.items():
        setattr(config, name, list(value) if isinstance(value, tuple) else value)
    return build(config, kind)


def decoder_of(
    kind: str, group: Group = ALONE, stage: Stage | None = None, *, batch_invariant: bool = False, **changes: Any
) -> TransformersDecoder:
    """A rank's part of the model, which is copied: no file is read."""
    lm = copy.deepcopy(whole_model(kind, **changes)).requires_grad_(False)
    register()
    how = {"group": group, "stage": stage, "batch_invariant": batch_invariant}
    return TransformersDecoder(lm, spec_of(lm), dtype=torch.float32, max_model_len=64, **how)


def spec_of(lm: Any) -> FallbackSpec:
    return FallbackSpec(type(lm).__name__, VOCABULARY, 64, lm.config.num_hidden_layers, 2, 16, 128, (), torch.float32)


def logits_of(model: Any) -> torch.Tensor:
    """Of a prompt in two chunks and of three decodes behind it."""
    runner, sequence = PagedRunner(model), PagedSequence()
    first = [runner.prefill(sequence, TOKENS[:9]), runner.prefill(sequence, TOKENS[9:-3])]
    return torch.cat([*first, *(runner.step([(sequence, [token])])[0] for token in TOKENS[-3:])])


@pytest.mark.parametrize("kind", CUT)
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=long)])
def test_ranks_compute_what_the_whole_model_does(kind, size):
    """All have 4 heads, and 2 key heads: with 4 ranks each of these is there twice."""
    expected = reference_logits(whole_model(kind), TOKENS)
    found = run_ranks(size, lambda group: logits_of(decoder_of(kind, group)))
    assert all(torch.equal(found[0], other) for other in found[1:])
    assert relative_error(found[0], expected) < LIMIT


class Chain:
    """Stages one behind the other, as one model."""

    def __init__(self, stages: list[TransformersDecoder]) -> None:
        self.stages, self.dtype, self.parameters = stages, stages[0].dtype, stages[0].parameters
        self.spec = dataclasses.replace(stages[0].spec, num_layers=stages[-1].stage.layers.stop)
        self.compute_logits = stages[0].compute_logits

    def __call__(self, ids, positions, metadata, cache, rows=None):
        for model in self.stages:
            layers = model.stage.layers
            hidden = model(ids, positions, dataclasses.replace(metadata), cache[layers.start : layers.stop], rows)
            if not model.stage.last:
                self.stages[model.stage.index + 1].incoming = hidden
        return hidden


def stages_of(kind: str, count: int, group: Group = ALONE) -> Chain:
    each = 4 // count
    ranges = [range(i * each, 4 if i == count - 1 else (i + 1) * each) for i in range(count)]
    stages = [Stage(i, layers, first=i == 0, last=i == count - 1) for i, layers in enumerate(ranges)]
    return Chain([decoder_of(kind, group, stage) for stage in stages])


@pytest.mark.parametrize("kind", STAGED)
def test_stages_compute_what_the_whole_model_does(kind):
    expected = reference_logits(whole_model(kind), TOKENS)
    for count in (2, 3):
        assert relative_error(logits_of(stages_of(kind, count)), expected) < LIMIT


def test_ranks_of_stages():
    expected = reference_logits(whole_model("beam"), TOKENS)
    found = run_ranks(2, lambda group: logits_of(stages_of("beam", 2, group)))
    assert relative_error(found[0], expected) < LIMIT


def test_a_tied_output_projection_is_a_part_of_the_table():
    """Each rank multiplies by its rows of it, and has it once."""
    expected = reference_logits(whole_model("beam", tie_word_embeddings=True), TOKENS)

    def work(group: Group) -> tuple[torch.Tensor, int, int]:
        model = decoder_of("beam", group, tie_word_embeddings=True)
        table, head = model.base.embed_tokens.weight, model.head.lm_head.weight
        return logits_of(model), head.shape[0], head.untyped_storage().data_ptr() - table.untyped_storage().data_ptr()

    (found, rows, apart), (_, others, _) = run_ranks(2, work)
    assert relative_error(found, expected) < LIMIT
    assert rows + others == VOCABULARY and apart == 0


def test_what_a_rank_has():
    """Half of what is cut: heads, gates and their biases, intermediate columns, each expert's; a cache of its heads."""
    whole = dict(whole_model("beam").named_parameters())

    def work(group: Group) -> tuple[dict[str, int], int]:
        model = decoder_of("beam", group)
        held = {**dict(model.head.named_parameters()), **{f"model.{n}": p for n, p in model.base.named_parameters()}}
        return {name: p.numel() for name, p in held.items()}, model.spec.num_kv_heads

    for sizes, heads in run_ranks(2, work):
        assert heads == 1 and sizes.keys() == whole.keys()
        halves = {name.rpartition("layers.")[2][2:] for name, p in whole.items() if 2 * sizes[name] == p.numel()}
        assert {"self_attn.q_proj.weight", "self_attn.gate_bias", "mlp.experts.down_proj"} <= halves
        assert sizes["model.embed_tokens.weight"] == whole["model.embed_tokens.weight"].numel()


def test_layers_between_which_more_than_hidden_states_go():
    with pytest.raises(ValueError, match="more than one hidden state of each token goes from layer to layer"):
        decoder_of("gemma3n_text", stage=Stage(0, range(2), last=False))


def test_a_stage_keeps_its_layers_alone():
    first, last = stages_of("beam", 2).stages
    assert {name.split(".")[1] for name, _ in first.base.named_parameters() if name.startswith("layers.")} == {"0", "1"}
    assert {name.split(".")[1] for name, _ in last.base.named_parameters() if name.startswith("layers.")} == {"2", "3"}
    assert not any("embed" in name or "lm_head" in name for name, _ in last.named_parameters())
    assert first.spec.num_layers == last.spec.num_layers == 2 and len(last.windows) == 2


def changed(lm: Any, plan: dict[str, str]) -> Any:
    lm = copy.deepcopy(lm)
    lm._tp_plan = plan
    return lm


PLANS = {
    "none": ({}, 2, "has no plan to cut it"),
    "a style that is not here": (
        {"model.layers.*.mlp": "sequence_parallel"},
        2,
        r"cuts model.layers.0.mlp in an unknown way \(sequence_parallel\)",
    ),
    "heads behind attention": (
        {"model.layers.*.self_attn.o_proj": "rowwise"},
        8,
        r"must divide 4, the number of heads of \S+o_proj",
    ),
    "heads": ({"model.layers.*.self_attn.q_proj": "colwise"}, 3, r"must divide 4, the number of heads of \S+q_proj"),
    "key heads": (
        {"model.layers.*.self_attn.k_proj": "colwise"},
        3,
        r"must divide 2, the number of heads of \S+k_proj",
    ),
    "columns": ({"model.layers.*.mlp.up_proj": "colwise"}, 5, "must divide 96, a size of model.layers.0.mlp.up_proj"),
}


@pytest.mark.parametrize("name", PLANS)
def test_models_that_cannot_be_cut(name):
    plan, size, message = PLANS[name]
    with pytest.raises(ValueError, match=rf"^tensor_parallel_size={size}: Beam .*{message}.*tensor_parallel_size=1"):
        sharing_of(
            changed(whole_model("beam", mlp_layer_types=("dense",) * 4), plan),
            "Beam",
            size,
            head_size=16,
            num_kv_heads=2,
        )


def test_styles_that_cut_nothing():
    """Of modules and of parameters that stand in the plan by themselves; nor does a style that nothing has."""
    lm = whole_model("beam")
    plan = {**lm.tp_plan, "model.layers.*.self_attn.gate_bias": "replicate", "model.layers.*.nowhere": "new"}
    sharing = sharing_of(changed(lm, plan), "Beam", 2, head_size=16, num_kv_heads=2)
    assert not any("norm" in name or "gate_bias" in name or "embed" in name for name in sharing.splits)
    assert any("experts.gate_up_proj" in name for name in sharing.splits)


def test_a_wrong_plan_is_seen():
    """What the ranks compute is compared with the whole model before anything is served."""

    def work(group: Group) -> TransformersDecoder:
        lm = copy.deepcopy(whole_model("beam")).requires_grad_(False)
        plan = {name: style for name, style in lm.tp_plan.items() if not name.endswith("self_attn.gate_bias")}
        lm._tp_plan = {**plan, "model.layers.*.self_attn.o_proj": "colwise_rep"}
        register()
        return TransformersDecoder(lm, spec_of(lm), dtype=torch.float32, max_model_len=64, group=group)

    with pytest.raises(ValueError, match="cannot run through transformers either"):
        run_ranks(2, work)


def test_refused_before_weights_are_read(tmp_path):
    config = tiny("ctrl").to_dict()
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["CTRLLMHeadModel"]}, default=str))
    spec = fallback_spec(tmp_path)
    with pytest.raises(ValueError, match=r"tensor_parallel_size=2: CTRL.* has no plan .* set tensor_parallel_size=1"):
        fallback_stages(tmp_path, spec, 2, 1)
    with pytest.raises(ValueError, match="pipeline_parallel_size=9 must be at most 4, the number of layers"):
        fallback_stages(tmp_path, spec, 1, 9)
    assert [len(stage.layers) for stage in fallback_stages(tmp_path, spec, 1, 2)] == [2, 2]


def other_model(kind: str) -> Any:
    lm = copy.deepcopy(whole_model(kind))
    for parameter in lm.parameters():
        parameter.data = parameter.data.flip(0).contiguous()
    return lm


@pytest.mark.parametrize("kind", ["beam", pytest.param("minimax_m3_vl_text", marks=long)])
def test_other_weights(kind):
    """All of another model, or one by one under the names of transformers' model, into the parts that are here."""
    other = other_model(kind)
    expected = reference_logits(other, TOKENS)

    def work(group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = decoder_of(kind, group), decoder_of(kind, group)
        places = [parameter.data_ptr() for parameter in first.parameters()]
        first.weights.take(other)
        assert places == [parameter.data_ptr() for parameter in first.parameters()]
        writer = LiveWriter(second.weights)
        for name, parameter in other.named_parameters():
            assert not writer.complete
            writer.write(name, parameter.data)
        assert writer.complete
        return logits_of(first), logits_of(second)

    for pair in run_ranks(2, work):
        assert all(relative_error(found, expected) < LIMIT for found in pair)


def test_other_weights_of_stages():
    stages, other = stages_of("beam", 2), other_model("beam")
    for stage in stages.stages:
        stage.weights.take(other)
    assert relative_error(logits_of(stages), reference_logits(other, TOKENS)) < LIMIT


def test_weights_that_do_not_fit():
    model = decoder_of("beam")
    writer, before = LiveWriter(model.weights), logits_of(model)
    name, tensor = next(iter(whole_model("beam").state_dict().items()))
    for wrong, other, message in (
        ("model.nothing", tensor, r"tensor model.nothing has no place .* \(named_parameters\(\)\)"),
        (name, tensor[1:], rf"tensor {name} has shape \[95, 64\], the model's has \[96, 64\]"),
        (name, tensor * torch.nan, "has values that are NaN"),
        (name, tensor.to(torch.int8), "is int8"),
    ):
        with pytest.raises(ValueError, match=message):
            writer.write(wrong, other)
    with pytest.raises(ValueError, match=r"the new model is another one: its .* differs"):
        model.weights.take(whole_model("laguna"))
    assert torch.equal(logits_of(model), before)


def test_tokens_alone_compute_what_the_whole_model_does():
    """Of one rank and of stages: a prompt in chunks, decodes, and several sequences in a step."""
    expected = reference_logits(whole_model("beam"), TOKENS)
    one = decoder_of("beam", batch_invariant=True)
    whole = logits_of(one)
    assert relative_error(whole, expected) < LIMIT
    halves = [decoder_of("beam", stage=stage, batch_invariant=True) for stage in halved()]
    assert torch.equal(logits_of(Chain(halves)), whole)
    runner, sequences = PagedRunner(one), [PagedSequence() for _ in range(3)]
    first = runner.step([(sequence, TOKENS[: 3 + i]) for i, sequence in enumerate(sequences)])
    sizes = (1, 4, 1)
    second = runner.step([(s, TOKENS[s.length :][:n]) for s, n in zip(sequences, sizes, strict=True)])
    for i, size in enumerate(sizes):
        assert torch.equal(torch.cat([first[i], second[i]]), whole[: 3 + i + size])


def test_a_rehearsal_runs_one_token(monkeypatch):
    model, ran = decoder_of("beam", batch_invariant=True), []
    run = model.run
    monkeypatch.setattr(model, "run", lambda ids, *others: ran.append(len(ids)) or run(ids, *others))
    whole = PagedRunner(model).prefill(PagedSequence(), TOKENS)
    assert ran == [1] * len(TOKENS)
    ran.clear()
    with pytest.raises(KeyError), model.rehearsal():
        assert PagedRunner(model).prefill(PagedSequence(), TOKENS).shape == whole.shape
        raise KeyError
    assert ran == [1]
    assert torch.equal(PagedRunner(model).prefill(PagedSequence(), TOKENS), whole)


def halved() -> list[Stage]:
    return [Stage(0, range(2), last=False), Stage(1, range(2, 4), first=False)]

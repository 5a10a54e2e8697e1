"""Every family, cut for several ranks, computes what one rank computes, from its own part of the files."""

from functools import partial
from pathlib import Path

import pytest
import torch
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

from tritonllm.dist.group import ALONE, Group
from tritonllm.experts.load import ExpertLoad
from tritonllm.experts.placement import ExpertPlacement
from tritonllm.experts.rebalance import rebalance
from tritonllm.models import checkpoint
from tritonllm.models.decoder import Decoder
from tritonllm.models.families import spec_from_config
from tritonllm.models.local_spec import by_expert, check_context
from tritonllm.models.shards import Split, splits
from tritonllm.models.weights import dummy_weights, load_weights

LIMIT = 1e-5  # of the logits: sums in another order


def logits_of(model: Decoder, tokens: list[int]) -> torch.Tensor:
    """Of a prompt and of three decodes behind it."""
    runner, sequence = PagedRunner(model), PagedSequence()
    first = runner.prefill(sequence, tokens[:-3])
    return torch.cat([first, *(runner.step([(sequence, [token])])[0] for token in tokens[-3:])])


def load_rank(
    folder: Path,
    group: Group,
    *,
    whole_experts: bool = False,
    placement: ExpertPlacement | None = None,
    context: Group = ALONE,
) -> Decoder:
    spec = spec_from_config(checkpoint.read_config(folder))
    spec = by_expert(spec, placement) if whole_experts or placement is not None else spec
    length = spec.max_position_embeddings
    sizes = {"dtype": torch.float32, "device": torch.device("cpu"), "max_model_len": length}
    model = Decoder(spec, **sizes, group=group, context=context)
    for parameter in model.parameters():
        parameter.fill_(float("nan"))  # what the files do not fill shows
    load_weights(model, folder)
    return model


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_ranks_compute_what_one_does(tmp_path, family):
    """All have 4 heads. With 4 ranks, families with 2 key heads have each of them twice."""
    write_checkpoint(tmp_path, tiny_config(family), seed=1)
    alone = load_decoder(tmp_path)
    tokens = random_tokens(23, alone.spec.vocab_size, seed=2)
    with torch.inference_mode():
        expected = logits_of(alone, tokens)
    for size in (2, 4):
        found = run_ranks(size, lambda group: logits_of(load_rank(tmp_path, group), tokens))
        assert all(torch.equal(found[0], other) for other in found[1:])
        assert relative_error(found[0], expected) < LIMIT


def config_with_one_key_head(family: str) -> dict | None:
    """``None`` if there is none, or if the layers ask for more than split keys can do."""
    config = tiny_config(family, num_key_value_heads=1)
    if family == "mimo_v2_flash":  # for its values, which are not of its keys' size
        config["layer_types"] = ["full_attention"] * 3
    try:
        check_context(spec_from_config(config), 4, 4)
    except ValueError:
        return None
    return config


@pytest.mark.parametrize("family", list(filter(config_with_one_key_head, ALL_FAMILIES)))
def test_ranks_that_split_keys_compute_what_one_does(tmp_path, family):
    write_checkpoint(tmp_path, config_with_one_key_head(family), seed=1)
    alone = load_decoder(tmp_path)
    tokens = random_tokens(23, alone.spec.vocab_size, seed=2)
    with torch.inference_mode():
        expected = logits_of(alone, tokens)
    found = run_ranks(4, lambda group: logits_of(load_rank(tmp_path, group, context=group), tokens))
    assert all(torch.equal(found[0], other) for other in found[1:])
    assert relative_error(found[0], expected) < LIMIT


def test_most_families_can_split_keys():
    found = list(filter(config_with_one_key_head, ALL_FAMILIES))
    assert len(found) > 15 and {"llama", "qwen3", "qwen3_moe", "glm4_moe"} < set(found)


EXPERTS = {  # of each family so many that 4 ranks have equally many
    "mixtral": {},
    "qwen2_moe": {"num_experts": 8},
    "qwen3_moe": {},
    "glm4_moe": {},
    "ernie4_5_moe": {},
    "hunyuan_v1_moe": {"num_experts": 8},
    "gpt_oss": {},
    "hy_v3": {},
    "granitemoeshared": {},
    "cohere2_moe": {},
    "llama4_text": {},
    "aria_text": {},
    "dbrx": {},
    "gemma4_text": {},
    "laguna": {},
    "phimoe": {"num_local_experts": 8},
}


@pytest.mark.parametrize("family", EXPERTS)
def test_ranks_with_whole_experts_compute_what_one_does(tmp_path, family):
    write_checkpoint(tmp_path, tiny_config(family, **EXPERTS[family]), seed=1)
    alone = load_decoder(tmp_path)
    tokens = random_tokens(23, alone.spec.vocab_size, seed=2)
    with torch.inference_mode():
        expected = logits_of(alone, tokens)
    for size in (2, 4):
        found = run_ranks(size, lambda group: logits_of(load_rank(tmp_path, group, whole_experts=True), tokens))
        assert all(torch.equal(found[0], other) for other in found[1:])
        assert relative_error(found[0], expected) < LIMIT


@pytest.mark.parametrize("family", EXPERTS)
def test_ranks_with_copies_of_experts_compute_what_one_does(tmp_path, family):
    write_checkpoint(tmp_path, tiny_config(family, **EXPERTS[family]), seed=1)
    alone = load_decoder(tmp_path)
    tokens = random_tokens(23, alone.spec.vocab_size, seed=2)
    experts = alone.spec.experts
    loads = {place: tuple((7 * place + 5 * e) % 11 for e in range(count)) for place, count in experts.items()}
    with torch.inference_mode():
        expected = logits_of(alone, tokens)
    for size in (2, 4):
        placement = rebalance(ExpertLoad(alone.spec.architecture, loads), size, 4)
        assert placement.turns > 1
        found = run_ranks(size, partial(logits_of_placed, tmp_path, placement, tokens))
        assert all(torch.equal(found[0], other) for other in found[1:])
        assert relative_error(found[0], expected) < LIMIT


def logits_of_placed(folder: Path, placement: ExpertPlacement, tokens: list[int], group: Group) -> torch.Tensor:
    return logits_of(load_rank(folder, group, placement=placement), tokens)


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_reads_only_its_part(tmp_path, elements_read, suffix):
    """Of two ranks each reads half of what is cut, and what is not."""
    model = write_checkpoint(tmp_path, tiny_config("qwen3"), seed=1)
    if suffix == ".bin":
        torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
        (tmp_path / "model.safetensors").unlink()
    load_rank(tmp_path, Group(1, 2))
    whole = {name: p.numel() for name, p in model.named_parameters()}
    kept = sum(n for name, n in whole.items() if "norm" in name or "embed" in name)
    vocabulary = 101 - 56  # rank 0 has share_of(101, 2) of them
    head = vocabulary * whole["lm_head.weight"] // 101
    cut = sum(n for name, n in whole.items() if "_proj" in name)
    assert sum(elements_read) == kept + head + cut // 2


@pytest.mark.parametrize("whole_experts", [False, True])
def test_reads_only_its_part_of_experts_one_below_the_other(tmp_path, elements_read, whole_experts):
    """Half of the rows of each expert, or all rows of half of the experts."""
    model = write_checkpoint(tmp_path, tiny_config("dbrx"), seed=1)
    load_rank(tmp_path, Group(1, 2), whole_experts=whole_experts)
    whole = {name: p.numel() for name, p in model.named_parameters()}
    head = (101 - 56) * whole["lm_head.weight"] // 101  # rank 0 has 56 rows of the vocabulary
    cut = sum(n for name, n in whole.items() if ".experts." in name or ".attn." in name)
    kept = sum(whole.values()) - cut - whole.pop("lm_head.weight")
    assert sum(elements_read) == kept + head + cut // 2


def test_dummy_weights_are_parts_of_the_whole_ones():
    spec = spec_from_config(tiny_config("qwen2", attention_bias=True))
    size = {"dtype": torch.float32, "device": torch.device("cpu"), "max_model_len": 32}
    whole, parts = Decoder(spec, **size), [Decoder(spec, **size, group=Group(rank, 4)) for rank in range(4)]
    for model in (whole, *parts):
        dummy_weights(model, 3)
    split = splits(spec)
    for name, parameter in whole.named_parameters():
        for rank, part in enumerate(parts):
            mine = dict(part.named_parameters())[name]
            how = split.get(name)
            if isinstance(how, Split):
                pieces = [parameter.narrow(how.axis, r.start, len(r)) for r in how.held(rank, 4)]
                assert torch.equal(mine, torch.cat(pieces, how.axis))
            else:
                assert torch.equal(mine, parameter if how is None or rank == 0 else torch.zeros_like(parameter))


def test_pretended_ranks_have_the_shapes_of_real_ones():
    """For plans on meta tensors, which meet nobody."""
    spec = spec_from_config(tiny_config("qwen3"))
    meta = torch.device("meta")
    model = Decoder(spec, dtype=torch.float32, device=meta, max_model_len=8, group=Group(0, 2))
    assert model.compute_logits(torch.empty(3, spec.hidden_size, device=meta)).shape == (3, spec.vocab_size)
    assert (model.spec.caches[0].heads, model.whole.caches[0].heads) == (1, 2)

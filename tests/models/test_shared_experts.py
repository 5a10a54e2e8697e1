"""Engines that share a model's experts: each computes of its own tokens what one with all the experts does."""

import dataclasses
from functools import partial
from pathlib import Path

import pytest
import torch
from support.compare import relative_error
from support.fusion import set_fusion
from support.ranks import run_ranks
from support.tiny_models import PagedRunner, PagedSequence, random_tokens, tiny_config, write_checkpoint

from tritonllm.dist.exchange import NO_EXCHANGE, Exchange
from tritonllm.dist.group import Group
from tritonllm.experts.load import ExpertLoad
from tritonllm.experts.rebalance import rebalance
from tritonllm.layers.fusion import FusionLimits
from tritonllm.layers.metadata import AttentionMetadata
from tritonllm.layers.segments import Segment, Segments, decodes
from tritonllm.models import checkpoint
from tritonllm.models.decoder import Decoder
from tritonllm.models.expert_checks import check_shared
from tritonllm.models.fallback_decoder import FallbackSpec
from tritonllm.models.families import spec_from_config
from tritonllm.models.loading import load_model, stage_model
from tritonllm.models.local_spec import by_expert
from tritonllm.models.shards import expert_splits
from tritonllm.models.weights import dummy_weights, load_weights

LIMIT = 1e-5  # of the logits: sums in another order
CPU = {"dtype": torch.float32, "device": torch.device("cpu")}
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
}
TOKENS = 23, 0, 9, 14  # of each rank
ROWS = 32  # of any step


class Watched(Exchange):
    """Keeps the experts for which rows have come."""

    def __init__(self, group: Group) -> None:
        super().__init__(group)
        self.arrived: list[torch.Tensor] = []

    def dispatch(self, *args):
        arrived = super().dispatch(*args)
        self.arrived.append(arrived.ids)
        return arrived


class Padded:
    """A model whose steps have padding behind their tokens, which reads keys that nobody has written.

    Args:
        padding: rows, 1 to 4.
        narrow: of a step's tokens only the last one's hidden state is wanted, and that of the padding. The others get
            the same.
    """

    def __init__(self, model: Decoder, padding: int, narrow: bool = False) -> None:
        self.model, self.padding, self.narrow = model, padding, narrow
        self.spec, self.dtype, self.parameters = model.spec, model.dtype, model.parameters
        self.compute_logits = model.compute_logits

    def __call__(self, input_ids, positions, metadata, cache):
        count, more, chunk = len(input_ids), self.padding, metadata.segments.chunk
        behind = Segment(chunk.sequences + 1, chunk.tokens + more, max(chunk.longest, more))
        table = metadata.block_tables
        marks = torch.tensor([5 if count else -1, *[-1] * more], dtype=torch.int32)
        metadata = dataclasses.replace(
            metadata,
            segments=dataclasses.replace(metadata.segments, chunk=behind),
            slot_mapping=torch.cat([metadata.slot_mapping, torch.full((more,), -1)]),
            block_tables=torch.cat([table, table.new_zeros(1, table.shape[1])]),
            seq_lens=torch.cat([metadata.seq_lens, torch.tensor([more], dtype=torch.int32)]),
            cu_seqlens_q=torch.cat([metadata.cu_seqlens_q, metadata.cu_seqlens_q[-1:] + more]),
            row_marks=marks,
            exchange_rows=ROWS,
        )
        ids, places = (torch.cat([given, torch.arange(more)]) for given in (input_ids, positions))
        rows = torch.tensor([max(0, count - 1), *range(count, count + more)]) if self.narrow else None
        hidden = self.model(ids, places, metadata, cache, rows)
        return hidden[:1].expand(count, -1) if self.narrow else hidden[:count]


NO_SEQUENCES = AttentionMetadata(
    segments=Segments(decodes(0)),
    slot_mapping=torch.empty(0, dtype=torch.int64),
    block_tables=torch.empty(0, 1, dtype=torch.int32),
    seq_lens=torch.empty(0, dtype=torch.int32),
    cu_seqlens_q=torch.zeros(1, dtype=torch.int32),
)


def load_rank(spec, folder: Path, exchange: Exchange = NO_EXCHANGE, **options) -> Decoder:
    model = Decoder(spec, **CPU, max_model_len=spec.max_position_embeddings, exchange=exchange, **options)
    for parameter in model.parameters():
        parameter.fill_(float("nan"))  # what the files do not fill shows
    load_weights(model, folder)
    return model


def tokens_of(rank: int) -> list[int]:
    return random_tokens(TOKENS[rank], 101, seed=2 + rank)


def logits_of(model, tokens: list[int]) -> torch.Tensor:
    """Of a prompt and of three decodes behind it; of no tokens as many steps."""
    runner, sequence = PagedRunner(model), PagedSequence()
    if not tokens:
        none = torch.empty(0, dtype=torch.int64)
        for _ in range(4):
            hidden = model(none, none, NO_SEQUENCES, runner.cache)
        return model.compute_logits(hidden)
    first = runner.prefill(sequence, tokens[:-3])
    return torch.cat([first, *(runner.step([(sequence, [token])])[0] for token in tokens[-3:])])


def spec_of(family: str, **changes):
    return spec_from_config(tiny_config(family, **EXPERTS[family], **changes))


@pytest.mark.parametrize("family", EXPERTS)
def test_each_rank_computes_of_its_tokens_what_one_with_all_experts_does(tmp_path, family):
    """One of them has only padding. Each counts its own tokens."""
    write_checkpoint(tmp_path, tiny_config(family, **EXPERTS[family]), seed=1)
    spec = spec_from_config(checkpoint.read_config(tmp_path))

    def work(group: Group):
        exchange = Watched(group)
        model = load_rank(spec, tmp_path, exchange, counts_experts=True)
        return (
            logits_of(Padded(model, 1 + group.rank), tokens_of(group.rank)),
            model.expert_counts.read(),
            exchange.arrived,
        )

    for size in (2, 4):
        found = run_ranks(size, work)
        for rank, (logits, counts, _) in enumerate(found):
            alone = load_rank(spec, tmp_path, counts_experts=True)
            if TOKENS[rank]:
                with torch.inference_mode():
                    assert relative_error(logits, logits_of(alone, tokens_of(rank))) < LIMIT
            assert counts == alone.expert_counts.read()
        check_journeys([arrived for _, _, arrived in found], spec)


def check_journeys(arrived: list[list[torch.Tensor]], spec) -> None:
    """Each pair of a token and an expert comes to one rank, and none of padding does."""
    places = list(spec.experts) * 4
    for i, received in enumerate(zip(*arrived, strict=True)):
        top_k = spec.layers[places[i]].mlp.top_k
        pairs = sum((ids >= 0).view(len(arrived), ROWS, -1).sum(2) for ids in received)
        for rank, of_rank in enumerate(pairs.tolist()):
            count = min(1, TOKENS[rank]) if i >= len(spec.experts) else max(0, TOKENS[rank] - 3)
            assert of_rank == [top_k] * count + [0] * (ROWS - count)
    assert len(arrived[0]) == len(places)


def test_three_ranks(tmp_path):
    write_checkpoint(tmp_path, tiny_config("qwen2_moe"), seed=1)  # of 6 experts, and a layer without
    spec = spec_from_config(checkpoint.read_config(tmp_path))

    def work(group: Group):
        return logits_of(Padded(load_rank(spec, tmp_path, Exchange(group)), 2), tokens_of(group.rank))

    for rank, logits in enumerate(run_ranks(3, work)):
        if TOKENS[rank]:
            with torch.inference_mode():
                assert relative_error(logits, logits_of(load_rank(spec, tmp_path), tokens_of(rank))) < LIMIT


@pytest.mark.parametrize(
    "limits",
    [FusionLimits(), FusionLimits(few=0), FusionLimits(few=2), FusionLimits(few=100)],
    ids=["none", "0", "2", "100"],
)
@pytest.mark.parametrize("hands_on", [False, True])
@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe", "gpt_oss"])
def test_wanted_rows_and_all_that_adds(monkeypatch, family, limits, hands_on):
    """What the ranks compute is whole: it can be added by whatever adds on one rank."""
    spec = spec_of(family)

    def work(group: Group):
        model = Decoder(spec, **CPU, max_model_len=64, exchange=Exchange(group))
        dummy_weights(model, 3)
        set_fusion(monkeypatch, model, limits, hands_on=hands_on)
        return logits_of(Padded(model, 2, narrow=True), tokens_of(group.rank))

    alone = Decoder(spec, **CPU, max_model_len=64)
    dummy_weights(alone, 3)
    with torch.inference_mode():
        expected = [logits_of(alone, tokens_of(rank)) for rank in (0, 2)]
    found = run_ranks(4, work)
    for rank, want in zip((0, 2), expected, strict=True):
        assert relative_error(found[rank][-4:], want[-4:]) < LIMIT


def test_steps_of_one_size_need_no_room():
    """All ranks have equally many tokens, and say nothing of a room."""
    spec = spec_of("qwen3_moe")

    def build(exchange: Exchange = NO_EXCHANGE) -> Decoder:
        model = Decoder(spec, **CPU, max_model_len=64, exchange=exchange)
        dummy_weights(model, 3)
        return model

    tokens = [random_tokens(9, 101, seed=rank) for rank in range(2)]
    found = run_ranks(2, lambda group: logits_of(build(Exchange(group)), tokens[group.rank]))
    with torch.inference_mode():
        for logits, mine in zip(found, tokens, strict=True):
            assert relative_error(logits, logits_of(build(), mine)) < LIMIT


def test_more_rows_than_tokens():
    """A captured step may have more room for those that are wanted."""
    spec = spec_of("mixtral")
    rows, marks = torch.tensor([0, 0, 0, 0]), torch.tensor([7, -1, -1, -1], dtype=torch.int32)

    def hidden_of(exchange: Exchange) -> torch.Tensor:
        model = Decoder(spec, **CPU, max_model_len=64, exchange=exchange)
        dummy_weights(model, 3)
        metadata = dataclasses.replace(
            NO_SEQUENCES,
            segments=Segments(decodes(1)),
            slot_mapping=torch.tensor([4]),
            block_tables=torch.tensor([[1]], dtype=torch.int32),
            seq_lens=torch.ones(1, dtype=torch.int32),
            row_marks=marks,
        )
        token = torch.tensor([5 + exchange.rank])
        return model(token, torch.zeros(1, dtype=torch.int64), metadata, PagedRunner(model).cache, rows)[:1]

    first, second = run_ranks(2, lambda group: hidden_of(Exchange(group)))
    with torch.inference_mode():
        assert relative_error(first, hidden_of(NO_EXCHANGE)) < LIMIT
    assert relative_error(second, first) > LIMIT


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_reads_only_its_own_experts(tmp_path, elements_read, suffix):
    model = write_checkpoint(tmp_path, tiny_config("qwen3_moe"), seed=1)
    if suffix == ".bin":
        torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
        (tmp_path / "model.safetensors").unlink()
    spec = spec_from_config(checkpoint.read_config(tmp_path))
    load_rank(spec, tmp_path, Exchange(Group(1, 4)))
    whole = {name: p.numel() for name, p in model.named_parameters()}
    experts = sum(count for name, count in whole.items() if ".experts." in name)
    assert sum(elements_read) == sum(whole.values()) - experts + experts // 4


@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss"])
def test_dummy_weights_are_parts_of_the_whole_ones(family):
    spec, dealt_out = spec_of(family), expert_splits(spec_of(family))
    whole = Decoder(spec, **CPU, max_model_len=32)
    parts = [Decoder(spec, **CPU, max_model_len=32, exchange=Exchange(Group(rank, 4))) for rank in range(4)]
    for model in (whole, *parts):
        dummy_weights(model, 3)
    of_parts = [dict(part.named_parameters()) for part in parts]
    for name, parameter in whole.named_parameters():
        mine = [part[name] for part in of_parts]
        if name in dealt_out:
            assert torch.equal(torch.cat(mine), parameter)
        else:
            assert all(torch.equal(one, parameter) for one in mine)


def test_loading_and_staging(tmp_path):
    """Both give a rank its part."""
    write_checkpoint(tmp_path, tiny_config("qwen3_moe"), seed=1)
    spec, exchange = spec_from_config(checkpoint.read_config(tmp_path)), Exchange(Group(1, 2))
    loaded = load_model(tmp_path, spec, **CPU, max_model_len=32, exchange=exchange)
    staged = stage_model(tmp_path, loaded, load_format="auto", seed=0, allow_nan=False)
    whole = load_rank(spec, tmp_path)
    assert torch.equal(loaded.layers[0].mlp.down, whole.layers[0].mlp.down[4:])
    for (name, ours), theirs in zip(loaded.named_parameters(), staged.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_work():
    """A rank computes as many pairs as its own tokens have, wherever they are from; with tensor parallelism a part."""
    spec, meta = spec_of("qwen3_moe"), {**CPU, "device": torch.device("meta"), "max_model_len": 32}
    (whole, *_), top_k = Decoder(spec, **meta).work, spec.layers[0].mlp.top_k
    assert Decoder(spec, **meta, exchange=Exchange(Group(1, 4))).work[0] == whole
    each = 3 * spec.layers[0].mlp.intermediate_size * spec.hidden_size
    load = ExpertLoad(spec.architecture, {place: (1,) * count for place, count in spec.experts.items()})
    attention = Decoder(spec, **meta, group=Group(1, 2)).work[0].weights - top_k * each // 2
    for placement in (None, rebalance(load, 2, 8)):
        model = Decoder(by_expert(spec, placement), **meta, group=Group(1, 2))
        assert model.work[0].weights == attention + top_k * each // 2


def test_models_without_experts_are_refused(tmp_path):
    name = "data_parallel_size=2 with enable_expert_parallel"
    spec = spec_from_config(tiny_config("llama"))
    with pytest.raises(ValueError, match=f"{name}: LlamaForCausalLM has no experts"):
        check_shared(spec, 2)
    with pytest.raises(ValueError, match=f"{name}: LlamaForCausalLM has no experts"):
        Decoder(spec, **CPU, max_model_len=8, exchange=Exchange(Group(0, 2)))
    other = FallbackSpec("Llama", 101, 64, 3, 2, 16, 256, (2,), torch.float32)
    for refuse in (
        partial(check_shared, other, 2),
        partial(load_model, tmp_path, other, **CPU, max_model_len=8, exchange=Exchange(Group(0, 2))),
    ):
        with pytest.raises(ValueError, match=f"{name}: Llama runs through transformers"):
            refuse()
    check_shared(spec, 1)
    check_shared(other, 1)


def test_what_cannot_be_together_is_refused():
    make, exchange = partial(Decoder, spec_of("mixtral"), **CPU, max_model_len=8), Exchange(Group(0, 2))
    with pytest.raises(ValueError, match=r"data_parallel_size=2 with .*one rank each, not tensor_parallel_size=2"):
        make(exchange=exchange, group=Group(0, 2))
    with pytest.raises(ValueError, match=r"deterministic: .*data_parallel_size=2 with enable_expert_parallel"):
        make(exchange=exchange, batch_invariant=True)

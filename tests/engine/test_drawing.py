"""Ranks that read each other's logits draw from their parts what one rank draws from all of them."""

import threading

import pytest
import torch
from support.ranks import run_ranks
from support.tiny_models import tiny_config, write_checkpoint

from tritonllm.config.sampling_rows import SamplingRows
from tritonllm.dist.group import ConnectedGroup
from tritonllm.dist.shared_rows import SharedRows
from tritonllm.engine.step.device_seats import DeviceSeats
from tritonllm.engine.step.drawing import Drawing
from tritonllm.engine.step.pooler import Pooler
from tritonllm.engine.step.sampler import Sampler
from tritonllm.kernels import SHARD_UNIT, sample
from tritonllm.kernels.sampling.common import STEP
from tritonllm.kernels.sampling.shard import Found
from tritonllm.models import checkpoint
from tritonllm.models.decoder import Decoder
from tritonllm.models.families import spec_from_config
from tritonllm.models.weights import load_weights

CPU = torch.device("cpu")
SEATS = 6


class SharingGroup(ConnectedGroup):
    """Ranks that are threads, so each reads what the others write."""

    def __init__(self, backend, memory, lock):
        super().__init__(backend, CPU)
        self._memory, self._lock = memory, lock

    def share_rows(self, rows, columns):
        groups = columns // SHARD_UNIT
        size = -(-rows * (columns + 2 * groups) // STEP.value) * STEP.value
        with self._lock:
            all_ranks = self._memory.setdefault("rows", torch.full((self.size, size), torch.inf))
        logits, largest, sums, _ = all_ranks[self.rank].split(
            [rows * columns, *[rows * groups] * 2, size - rows * (columns + 2 * groups)]
        )
        steps = (torch.arange(self.size) - self.rank) * (size // STEP.value)
        return SharedRows(logits.view(rows, columns), Found(largest.view(rows, groups), sums.view(rows, groups)), steps)


def load_rank(folder, group):
    spec = spec_from_config(checkpoint.read_config(folder))
    model = Decoder(spec, dtype=torch.float32, device=CPU, max_model_len=64, group=group)
    load_weights(model, folder)
    return model


def make_drawing(model, group):
    seats = DeviceSeats(SEATS, 16, CPU)
    sampler = Sampler(seats.drawn, model.spec.vocab_size)
    return Drawing(model, seats, sampler, Pooler(SEATS, model.spec.hidden_size, CPU), group, CPU)


def wishes_of(rows, generator):
    """Rows with all limits, some, or none, and greedy ones."""

    def any_of(values, dtype):
        return torch.tensor(values, dtype=dtype)[torch.randint(len(values), (rows,), generator=generator)]

    temperature = any_of([0.0, 0.7, 1.0, 2.0], torch.float32)
    limits = (
        any_of([0, 0, 5, 40], torch.int32),
        any_of([1.0, 0.9, 0.4], torch.float32),
        any_of([0.0, 0.2], torch.float32),
    )
    return SamplingRows(temperature, *limits, *torch.randint(2**40, (2, rows), generator=generator))


@pytest.mark.parametrize("vocab", [1008, 912])
@pytest.mark.parametrize("size", [2, 4])
def test_rows_with_limits(tmp_path, size, vocab):
    """The last rank has fewer columns than the others, and no whole groups."""
    write_checkpoint(tmp_path, tiny_config("llama", vocab_size=vocab), seed=1)
    memory, lock = {}, threading.Lock()

    def draw(group):
        group = SharingGroup(group._backend, memory, lock)
        model = load_rank(tmp_path, group)
        drawing = make_drawing(model, group)
        assert drawing.finds_limits
        generator = torch.Generator().manual_seed(size)
        for rows in (6, 1, 4):
            for _ in range(4):
                hidden = torch.randn(rows, model.spec.hidden_size, generator=generator) * 5
                wishes = wishes_of(rows, generator)
                expected = sample(model.compute_logits(hidden), *wishes)
                drawn = drawing._draw_by_shards(hidden, wishes, torch.full((rows,), -1))
                assert torch.equal(drawn, expected)
                group.all_reduce(torch.zeros(1))  # as a step does before it has logits again
        return drawn.tolist()

    tokens = run_ranks(size, draw)
    assert all(other == tokens[0] for other in tokens)


def test_ranks_that_do_not_share_memory_find_no_limits(tmp_path):
    write_checkpoint(tmp_path, tiny_config("llama", vocab_size=1008), seed=1)

    def draw(group):
        drawing = make_drawing(load_rank(tmp_path, group), group)
        return drawing.by_shards, drawing.finds_limits

    assert run_ranks(2, draw) == [(True, False)] * 2

import pytest
import torch

from tritonllm.kernels import count_experts
from tritonllm.layers.expert_counts import ExpertCounts
from tritonllm.layers.metadata import AttentionMetadata
from tritonllm.layers.segments import Segments, decodes

SLOTS, SEATS = torch.tensor([4, -1, 7]), torch.tensor([2, -1], dtype=torch.int32)
METADATA = AttentionMetadata(
    segments=Segments(decodes(3)),
    slot_mapping=SLOTS,
    block_tables=torch.zeros(3, 1, dtype=torch.int32),
    seq_lens=torch.ones(3, dtype=torch.int32),
    cu_seqlens_q=torch.zeros(1, dtype=torch.int32),
    row_marks=SEATS,
)


@pytest.fixture
def counts():
    return ExpertCounts({1: 5, 4: 3}, torch.device("cpu"))


def count(counts, place, ids, *, rows=False, rehearses=False):
    counter = counts.of_layer(place, METADATA, rows=rows, rehearses=rehearses)
    count_experts(torch.tensor(ids), counter.marks, counter.counts)


def test_layers_count_apart_and_padding_does_not_count(counts):
    count(counts, 1, [[0, 4], [0, 4], [1, 4]])
    count(counts, 4, [[2], [1]], rows=True)
    assert counts.read() == {1: (1, 1, 0, 0, 2), 4: (0, 0, 1)}
    assert counts.of_layer(0, METADATA, rows=False, rehearses=False) is None
    counts.reset()
    assert counts.read() == {1: (0,) * 5, 4: (0,) * 3}


def test_rehearsals_do_not_count(counts):
    count(counts, 1, [[0, 4], [0, 4], [1, 4]], rehearses=True)
    assert counts.read() == {1: (0,) * 5, 4: (0,) * 3}


def test_all_counters_are_aligned_alike(counts):
    """Else kernels would be compiled for some layers that the start has not seen."""
    counters = [counts.of_layer(place, METADATA, rows=False, rehearses=again) for place in (1, 4) for again in (0, 1)]
    assert {counter.counts.data_ptr() % 16 for counter in counters} == {0}

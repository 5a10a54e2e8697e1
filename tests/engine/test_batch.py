import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tritonllm.engine.batch import build_batch, slots_of
from tritonllm.engine.request import Request
from tritonllm.engine.scheduler import ScheduledRequest, StepPlan
from tritonllm.engine.shared_prefix import MIN_SAVED_BYTES, CascadePlanner
from tritonllm.sampling_params import SamplingParams

CPU = torch.device("cpu")


@given(block_size=st.integers(1, 9), start=st.integers(0, 40), count=st.integers(0, 30), seed=st.integers(0, 99))
def test_slots(block_size, start, count, seed):
    blocks = np.random.default_rng(seed).permutation(100)[: -(-(start + count) // block_size)].tolist()
    expected = [blocks[p // block_size] * block_size + p % block_size for p in range(start, start + count)]
    assert slots_of(blocks, start, count, block_size).tolist() == expected


def item(request_id, tokens, blocks, start, count, **params):
    request = Request(
        request_id=request_id,
        prompt_token_ids=tokens,
        params=SamplingParams(**params),
        max_total_tokens=100,
        block_ids=blocks,
        seed=len(tokens),
    )
    return ScheduledRequest(request, start, count, samples=start + count == len(tokens))


def test_a_mixed_step():
    decode = item("a", [5, 6, 7, 8, 9], [3, 1], 4, 1, temperature=0.5, top_k=7, top_p=0.9, min_p=0.1)
    last_chunk = item("b", [10, 11, 12], [0], 1, 2, temperature=0)
    first_chunk = item("c", [20, 21, 22, 23], [2, 4], 0, 3)
    plan = StepPlan(scheduled=(decode, last_chunk, first_chunk), preempted=(), num_decodes=1, num_tokens=6)
    batch = build_batch(plan, 4, CPU)
    metadata = batch.metadata
    assert batch.input_ids.tolist() == [9, 11, 12, 20, 21, 22]
    assert batch.positions.tolist() == [4, 1, 2, 0, 1, 2]
    assert metadata.slot_mapping.tolist() == [4, 1, 2, 8, 9, 10]
    assert metadata.block_tables.tolist() == [[3, 1], [0, 0], [2, 0]]
    assert metadata.seq_lens.tolist() == [5, 3, 3]
    assert metadata.cu_seqlens_q.tolist() == [0, 2, 5]
    assert (metadata.num_decodes, metadata.max_seqlen_q) == (1, 3)
    assert batch.logit_rows.tolist() == [0, 2]  # the first chunk of `c` samples nothing
    sampling = batch.sampling
    assert [r.request_id for r in sampling.requests] == ["a", "b"]
    assert sampling.temperature.tolist() == [0.5, 0.0]
    assert sampling.top_k.tolist() == [7, 0]
    assert torch.allclose(sampling.top_p, torch.tensor([0.9, 1.0]))
    assert torch.allclose(sampling.min_p, torch.tensor([0.1, 0.0]))
    assert sampling.seeds.tolist() == [5, 3]
    assert sampling.steps.tolist() == [0, 0]


def test_decodes_only():
    plan = StepPlan(scheduled=(item("a", [5], [3], 0, 1),), preempted=(), num_decodes=1, num_tokens=1)
    metadata = build_batch(plan, 4, CPU).metadata
    assert metadata.cu_seqlens_q.tolist() == [0]
    assert metadata.max_seqlen_q == 0


def test_decodes_that_share_a_prefix():
    """The plan is over the decodes alone, however many chunks begin with the same blocks."""
    decodes = [item(name, [1] * 11, [8, 9, own], 10, 1) for name, own in (("a", 1), ("b", 2), ("c", 3))]
    chunk = item("d", [1] * 11, [8, 9, 4], 8, 3)
    plan = StepPlan(scheduled=(*decodes, chunk), preempted=(), num_decodes=3, num_tokens=6)
    planner = CascadePlanner(block_size=4, block_bytes=MIN_SAVED_BYTES // 4)
    metadata = build_batch(plan, 4, CPU, planner).metadata
    cascade = metadata.cascade
    assert cascade.prefix_tables[cascade.prefix_lens > 0].flatten().tolist() == [8, 9]
    assert cascade.suffix_tables[:, 0].tolist() == [1, 2, 3]
    assert cascade.suffix_lens.tolist() == [3, 3, 3]
    assert metadata.block_tables[:, 1].tolist() == [9] * 4  # whole, for layers that do not share
    assert build_batch(plan, 4, CPU).metadata.cascade is None
    apart = StepPlan(scheduled=(decodes[0], chunk), preempted=(), num_decodes=1, num_tokens=4)
    assert build_batch(apart, 4, CPU, planner).metadata.cascade is None

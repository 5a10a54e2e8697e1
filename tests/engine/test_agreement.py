"""What ranks compare of their steps: evidence, checksums, and when each of them says what."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tritonllm.engine.data.agreement import EVERY, AgreementSampler, Claims, Comparison, DivergedError, Evidence, Sums
from tritonllm.engine.data.inputs import upload_step
from tritonllm.engine.data.step import Step
from tritonllm.engine.data.step_inputs import StepInputs
from tritonllm.layers.segments import Segment, Segments

CPU = torch.device("cpu")


def decode_step(position=5):
    """Two decodes."""
    numbers = {"positions": [position, 9], "seq_lens": [position + 1, 10], "logit_rows": [0, 1], "seats": [0, 1]}
    none = {"drafts": [], "verify_starts": [0], "cu_seqlens_q": [0]}
    arrays = {"slot_mapping": [3, 4], "input_ids": [7, 8], "decode_order": [1, 0], "starts": [4, 8], "limits": [99, 99]}
    dtypes = {field.name: field.metadata["column"].dtype for field in dataclasses.fields(StepInputs)}
    inputs = {name: np.array(values, dtypes[name]) for name, values in {**numbers, **none, **arrays}.items()}
    segments = Segments(Segment(2, 2), Segment(0, 0), Segment(0, 0))
    tables = np.array([[0, 1], [2, 3]], np.int32)
    return Step(segments, StepInputs(**inputs), tables, np.ones(2, bool))


def evidence_of(step, tokens=(1, 2)):
    sampler = AgreementSampler(2)
    return sampler.of(step, upload_step(step, 2, 4, CPU), torch.tensor(tokens))


def differs(own, wanted):
    comparison = Comparison()
    comparison.note(own)
    with pytest.raises(DivergedError) as raised:
        comparison.check(wanted.sums())
    return str(raised.value)


def test_ranks_with_the_same_steps_agree():
    one, other = evidence_of(decode_step()), evidence_of(decode_step())
    assert one.sums() == other.sums()
    assert set(one.sums().values) == {f.name for f in dataclasses.fields(StepInputs)} | {"tokens", "block_tables"}


def test_what_differs_is_named():
    step, first = decode_step(), evidence_of(decode_step())
    assert differs(evidence_of(step, (1, 3)), first) == "in step 1 it had other tokens than rank 0"
    assert "other positions and seq_lens than" in differs(evidence_of(decode_step(4)), first)
    tables = dataclasses.replace(step, block_tables=step.block_tables + 1)
    assert "other block_tables than" in differs(evidence_of(tables), first)
    longer = evidence_of(step, (1, 2, 0))
    assert "other tokens than" in differs(longer, first)
    without = AgreementSampler(2).of(step, upload_step(step, 2, 4, CPU), None)
    assert "other tokens than" in differs(without, first) and "other tokens than" in differs(first, without)


def test_evidence_stays_what_it_was():
    """The next step writes into the same memory."""
    tokens = torch.tensor([1, 2])
    evidence = Evidence(1, {"tokens": tokens}, {})
    before = evidence.sums()
    tokens.zero_()
    assert evidence.sums() == before


@pytest.mark.parametrize(("ranks", "numbers"), [(1, []), (2, [1, 1 + EVERY, 1 + 2 * EVERY])])
def test_every_so_many_steps(ranks, numbers):
    sampler, step = AgreementSampler(ranks), decode_step()
    batch = upload_step(step, 2, 4, CPU)
    found = [sampler.of(step, batch, torch.tensor([1, 2])) for _ in range(3 * EVERY)]
    assert [evidence.number for evidence in found if evidence is not None] == numbers


class Late:
    """Evidence that has arrived when a test says so."""

    def __init__(self, number, value=0):
        self.number, self.is_there, self._value = number, False, value

    def sums(self):
        assert self.is_there
        return Sums(self.number, {"tokens": self._value})


@given(st.lists(st.sampled_from(["launch", "arrive here", "arrive there", "lose"]), max_size=40), st.integers(1, 8))
def test_nobody_waits_and_whatever_differs_is_found(events, wrong):
    """Steps are launched on both, and what they were arrives in any order after that. What rank 0 does not tell, of a
    step that was broken off, is not missed."""
    claims, comparison, numbers = Claims(), Comparison(), 0
    here, there, told = [], [], set()
    with pytest.raises(DivergedError, match=f"in step {wrong} it had other tokens") as raised:
        for event in [*events, *["launch", "arrive here", "arrive there"] * (wrong + 20)]:
            if event in ("launch", "lose"):
                sums = claims.next()
                told |= set() if sums is None else {sums.number}
                comparison.check(sums)
                numbers += 1
                here.append(Late(numbers))
                there.append(Late(numbers, int(numbers == wrong)))
                comparison.note(there[-1])
                if event == "lose" and numbers != wrong:
                    here.pop()
                else:
                    claims.note(here[-1])
            for evidence in here if event == "arrive here" else there if event == "arrive there" else []:
                evidence.is_there = True
    assert wrong in told and "rank 0" in str(raised.value)


def test_a_rank_that_counts_otherwise():
    comparison = Comparison()
    with pytest.raises(DivergedError, match="it has run no step 65, as rank 0 has"):
        comparison.check(Sums(65, {}))

"""The benchmark's drafter: its kernel proposes what the same in plain torch does."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.known_texts import BEGINNING, KnownTexts
from tritonllm.engine.drafts.drafters import DraftStep

VOCAB = 50


@given(seed=st.integers(0, 1000), drafts=st.integers(1, 5), length=st.sampled_from([20, 64]))
def test_the_kernel_proposes_the_same(device, seed, drafts, length):
    rng = np.random.default_rng(seed)
    known = KnownTexts(length, VOCAB, device)
    texts = [[i, *rng.integers(VOCAB, size=rng.integers(1, length)).tolist()] for i in range(6)]
    known.know(texts, 0.5, seed)
    seats, batch = 8, 7
    history = torch.zeros(seats, length, dtype=torch.int32, device=device)
    ends = torch.zeros(batch, dtype=torch.int32, device=device)
    order = torch.from_numpy(rng.permutation(seats)[:batch]).to(device, torch.int32)
    for row, seat in enumerate(order.tolist()):
        text = texts[row % 6]
        ends[row] = int(rng.integers(len(text)))
        history[seat, : len(text)] = torch.tensor(text, dtype=torch.int32)
        if row == 5:
            history[seat, 0] = VOCAB - 1  # nobody's text
    order[3] = -1  # padding
    counts = torch.from_numpy(rng.integers(0, drafts + 1, size=batch)).to(device, torch.int32)

    def proposed(propose):
        ids = torch.full((batch, drafts + 1), 7, dtype=torch.int32, device=device)
        out = torch.full((batch, drafts), 8, dtype=torch.int32, device=device)
        propose(DraftStep(history, order, ends, counts, ids, out, *[None] * 3))
        return torch.cat([ids, out], 1)

    found, expected = proposed(known.launch), proposed(known.propose_in_torch)
    assert torch.equal(found, expected)
    assert (expected[3, -drafts:] == -1).all() and (expected[5, -drafts:] == -1).all()


def test_beginnings_that_end_before_they_differ(device):
    """A sequence that is shorter than what tells texts apart is the first one that begins with it."""
    known = KnownTexts(2 * BEGINNING, VOCAB, device)
    known.know([[1, 2, 3, 4], [1, 2, 3, 5]], 1.0)
    history = torch.zeros(1, 2 * BEGINNING, dtype=torch.int32, device=device)
    history[0, :4] = torch.tensor([1, 2, 3, 5])
    numbers = [torch.tensor([n], dtype=torch.int32, device=device) for n in (0, 2, 2)]
    ids, drafts = (torch.zeros(1, n, dtype=torch.int32, device=device) for n in (3, 2))
    known.launch(DraftStep(history, *numbers, ids, drafts, *[None] * 3))
    assert drafts.tolist() == [[4, -1]] and ids.tolist() == [[0, 4, 0]]

"""Layers of which a product leaves the norm after it to the next one. On Hopper some hundred rows do; here they are
made to."""

import pytest
import torch
from support.fusion import set_fusion
from support.tiny_models import ALL_FAMILIES, PagedRunner, PagedSequence, random_tokens, tiny_config

from tritonllm.layers import linear
from tritonllm.layers.fusion import FusionLimits
from tritonllm.models.decoder import Decoder
from tritonllm.models.families import spec_from_config
from tritonllm.models.weights import dummy_weights
from tritonllm.testing import RELATIVE_ERROR, relative_error

ALL_ROWS = range(1000)


def steps(model: Decoder) -> torch.Tensor:
    """The logits of a prefill of two prompts in one step, and of two decode steps of both."""
    runner = PagedRunner(model)
    prompts = [random_tokens(n, 101, seed=n) for n in (9, 4)]
    sequences = [PagedSequence() for _ in prompts]
    rows = runner.step(list(zip(sequences, prompts, strict=True)))
    for token in (3, 4):
        rows += runner.step([(sequence, [token]) for sequence in sequences])
    return torch.cat(rows)


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_same_logits(monkeypatch, device, family):
    """Where no step, every step, or only the decode steps leave norms."""
    model = Decoder(spec_from_config(tiny_config(family)), dtype=torch.float32, device=device, max_model_len=64)
    dummy_weights(model, 0)
    want = steps(model)
    for most in (2, 100):
        set_fusion(monkeypatch, model, FusionLimits(medium=range(most + 1)))
        assert relative_error(steps(model), want) < 3 * RELATIVE_ERROR[torch.float32]  # of 3 layers


@pytest.mark.parametrize("limit", [0, 3])  # rows that count as few
@pytest.mark.parametrize("family", ["qwen3", "granite", "qwen3_moe"])
def test_wanted_rows(monkeypatch, device, family, limit):
    """The last layer computes them alone, from what the layer before left."""
    model = Decoder(spec_from_config(tiny_config(family)), dtype=torch.float32, device=device, max_model_len=64)
    dummy_weights(model, 0)
    runner, forward = PagedRunner(model), model.forward
    compared = []

    def both(*args):
        set_fusion(monkeypatch, model)
        hidden = forward(*args)
        set_fusion(monkeypatch, model, FusionLimits(few=limit, medium=ALL_ROWS))
        for rows in ([8, 12], [12, 0, 5, 7]):
            wanted = forward(*args, torch.tensor(rows, device=device))
            assert relative_error(wanted, hidden[rows]) < 3 * RELATIVE_ERROR[torch.float32]
            compared.append(rows)
        return hidden

    monkeypatch.setattr(model, "forward", both)
    runner.step([(PagedSequence(), random_tokens(n, 101, seed=n)) for n in (9, 4)])
    assert len(compared) == 2


@pytest.mark.parametrize(("family", "left"), [("qwen3", 5), ("qwen3_moe", 0), ("opt", 0), ("gemma2", 0), ("falcon", 0)])
def test_which_layers_leave_norms(monkeypatch, device, family, left):
    """Three pre-norm layers with dense blocks: one norm within each, one between two."""
    model = Decoder(spec_from_config(tiny_config(family)), dtype=torch.float32, device=device, max_model_len=64)
    dummy_weights(model, 0)
    set_fusion(monkeypatch, model, FusionLimits(medium=ALL_ROWS))
    begun, ended = [], []
    add_linear, linear_unnormed = linear.add_linear, linear.linear_unnormed
    monkeypatch.setattr(linear, "add_linear", lambda *a, **k: begun.append(a) or add_linear(*a, **k))
    monkeypatch.setattr(linear, "linear_unnormed", lambda *a, **k: ended.append(a) or linear_unnormed(*a, **k))
    PagedRunner(model).prefill(PagedSequence(), [5, 6, 7])
    assert len(begun) == len(ended) == left

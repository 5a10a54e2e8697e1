"""Steps of few rows fuse the norms and additions into the products. On a GPU they always do; here they are made to.

And the last layer computes only the rows that are wanted, be they few or many.
"""

from unittest.mock import patch

import pytest
import torch
from support.fusion import set_fusion
from support.tiny_models import ALL_FAMILIES, PagedRunner, PagedSequence, random_tokens, tiny_config

from tritonllm.layers import linear
from tritonllm.layers.fusion import FusionLimits
from tritonllm.layers.norm import Norm
from tritonllm.models.decoder import Decoder
from tritonllm.models.families import spec_from_config
from tritonllm.models.weights import dummy_weights
from tritonllm.testing import RELATIVE_ERROR, relative_error

ALL_ROWS = FusionLimits(few=1000)


def logits(model: Decoder, prompts: list[list[int]]) -> torch.Tensor:
    """A prefill of two prompts in one step, then two decode steps of both."""
    runner = PagedRunner(model)
    sequences = [PagedSequence() for _ in prompts]
    rows = runner.step(list(zip(sequences, prompts, strict=True)))
    for token in (3, 4):
        rows += runner.step([(sequence, [token]) for sequence in sequences])
    return torch.cat(rows)


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_same_logits(monkeypatch, device, family):
    model = Decoder(spec_from_config(tiny_config(family)), dtype=torch.float32, device=device, max_model_len=64)
    dummy_weights(model, 0)
    prompts = [random_tokens(n, 101, seed=n) for n in (9, 4)]
    set_fusion(monkeypatch, model)
    want = logits(model, prompts)
    set_fusion(monkeypatch, model, ALL_ROWS)
    assert relative_error(logits(model, prompts), want) < 3 * RELATIVE_ERROR[torch.float32]  # of 3 layers


@pytest.mark.parametrize("limit", [0, 3, 100])  # no step has few rows; the last layer's are few; all have
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_wanted_rows(monkeypatch, device, family, limit):
    """The hidden states of some tokens are those that all together would give."""
    model = Decoder(spec_from_config(tiny_config(family)), dtype=torch.float32, device=device, max_model_len=64)
    dummy_weights(model, 0)
    runner, forward = PagedRunner(model), model.forward
    prompts = [random_tokens(n, 101, seed=n) for n in (9, 4)]
    hidden: list[torch.Tensor] = []

    def both(*args):
        set_fusion(monkeypatch, model, FusionLimits(few=0))
        hidden.append(forward(*args))
        set_fusion(monkeypatch, model, FusionLimits(few=limit))
        for rows in ([8, 12], [12, 0, 5], []):
            wanted = forward(*args, torch.tensor(rows, dtype=torch.int64, device=device))
            assert wanted.shape == (len(rows), model.spec.hidden_size)
            if rows:
                assert relative_error(wanted, hidden[-1][rows]) < 3 * RELATIVE_ERROR[torch.float32]
        return hidden[-1]

    monkeypatch.setattr(model, "forward", both)
    runner.step([(PagedSequence(), prompt) for prompt in prompts])
    assert len(hidden) == 1


@pytest.mark.parametrize(
    ("family", "adding", "norms"),
    # norms that are kernels of their own: the last one, and of layer norms all
    [("qwen3", 6, 1), ("granite", 6, 1), ("qwen3_moe", 3, 1), ("opt", 6, 7), ("gemma2", 0, 13), ("falcon", 0, 4)],
)
def test_pre_norm_layers_add_and_normalise_in_their_products(monkeypatch, device, family, adding, norms):
    """Three layers: how many products add to the stream, and how many norms are left."""
    model = Decoder(spec_from_config(tiny_config(family)), dtype=torch.float32, device=device, max_model_len=64)
    dummy_weights(model, 0)
    set_fusion(monkeypatch, model, ALL_ROWS)
    added, normed = [], []
    multiply, forward, normalize = linear.multiply, Norm.forward, Norm.normalize
    monkeypatch.setattr(
        linear, "multiply", lambda x, fused, scaled: added.append(fused.add) or multiply(x, fused, scaled)
    )
    monkeypatch.setattr(
        Norm,
        "forward",
        lambda self, x, residual, scale: (
            (normed.append(self) if residual is not None else None) or forward(self, x, residual, scale)
        ),
    )
    monkeypatch.setattr(Norm, "normalize", lambda self, x, **k: normed.append(self) or normalize(self, x, **k))
    PagedRunner(model).prefill(PagedSequence(), [5, 6, 7])
    of_stream = {id(m) for m in model.modules() if isinstance(m, Norm) and m.weight.numel() == 64}
    assert sum(added) == adding
    assert sum(id(norm) in of_stream for norm in normed) == norms


@pytest.mark.parametrize("few_last", [False, True])
def test_what_sums_up_the_experts_normalises(monkeypatch, device, few_last):
    """With many rows: for the next layer, whether that has many rows or (the last one) few that are wanted."""
    spec = spec_from_config(tiny_config("qwen3_moe"))
    model = Decoder(spec, dtype=torch.float32, device=device, max_model_len=64)
    dummy_weights(model, 0)
    runner, forward = PagedRunner(model), model.forward
    results, norms = {}, {}

    def both(*args):
        for handed_on in (True, False):
            set_fusion(monkeypatch, model, FusionLimits(few=3 if few_last else 0), hands_on=handed_on)
            with (
                patch.object(Norm, "forward", autospec=True, side_effect=Norm.forward) as add,
                patch.object(Norm, "normalize", autospec=True, side_effect=Norm.normalize) as alone,
            ):
                results[handed_on] = forward(*args, torch.tensor([8, 12], device=device))
            norms[handed_on] = [call.args[0] for call in (*add.mock_calls, *alone.mock_calls)]
        return forward(*args)

    monkeypatch.setattr(model, "forward", both)
    runner.step([(PagedSequence(), random_tokens(n, 101, seed=n)) for n in (9, 4)])
    assert relative_error(results[True], results[False]) < 3 * RELATIVE_ERROR[torch.float32]
    first = [layer.attention_norm for layer in model.layers]
    assert [any(norm is each for each in norms[True]) for norm in first] == [True, False, False]
    assert all(norm in norms[False] for norm in first[: 2 if few_last else 3])

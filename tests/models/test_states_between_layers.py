"""The residual stream before a layer, which EAGLE-3 heads read, under every plan of fusions."""

import pytest
import torch
from support.fusion import set_fusion
from support.tiny_models import PagedRunner, PagedSequence, load_decoder, random_tokens, tiny_config, write_checkpoint

from tritonllm.layers.fusion import FusionLimits
from tritonllm.models.decoder import Decoder
from tritonllm.models.families import spec_from_config
from tritonllm.models.weights import dummy_weights
from tritonllm.testing import RELATIVE_ERROR, relative_error

FAMILIES = ["llama", "qwen3", "gemma2", "olmo2", "granite", "gpt2", "phi", "falcon", "qwen3_moe", "gpt_oss"]
PLANS = [
    None,
    FusionLimits(routed=-1),
    FusionLimits(few=4),
    FusionLimits(few=100),
    FusionLimits(medium=range(100)),
    FusionLimits(medium=range(5, 20)),
]
BEFORE = [2, 1, 0, 1]
LIMIT = 3 * RELATIVE_ERROR[torch.float32]


def states_of(model, before, work, rows=None):
    """Hidden states and states between layers of one step."""
    runner, found = PagedRunner(model), []
    forward = model.forward

    def both(*args):
        found.append(model.forward_with_states(*args, before, rows))
        return forward(*args)

    model.forward = both
    try:
        runner.step(work)
    finally:
        del model.forward
    return found[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_states_are_those_of_transformers(monkeypatch, tmp_path, family):
    reference = write_checkpoint(tmp_path, tiny_config(family))
    model = load_decoder(tmp_path)
    tokens = random_tokens(9, 101, seed=1)
    with torch.inference_mode():
        want = reference(input_ids=torch.tensor([tokens]), output_hidden_states=True, use_cache=False).hidden_states
    assert relative_error(want[1][0], want[2][0]) > 0.1  # a layer is not mistaken for another
    for limits in PLANS:
        set_fusion(monkeypatch, model, *([] if limits is None else [limits]))
        hidden, states = states_of(model, BEFORE, [(PagedSequence(), tokens)])
        assert len(states) == len(BEFORE)
        for place, state in zip(BEFORE, states, strict=True):
            assert relative_error(state, want[place][0]) < LIMIT
        assert relative_error(hidden, want[-1][0]) < LIMIT


def build(device, layers=4):
    spec = spec_from_config(tiny_config("qwen3", num_hidden_layers=layers))
    model = Decoder(spec, dtype=torch.float32, device=device, max_model_len=64)
    dummy_weights(model, 0)
    return model


def test_all_rows_have_states_where_few_are_wanted(device):
    """The last layer computes the wanted ones alone; the states are nobody's part of what comes behind them."""
    model, tokens = build(device), random_tokens(9, 101, seed=1)
    hidden, states = states_of(model, [3, 0], [(PagedSequence(), tokens)])
    rows = torch.tensor([8, 2], device=device)
    wanted, again = states_of(model, [3, 0], [(PagedSequence(), tokens)], rows)
    assert wanted.shape == (2, 64) and relative_error(wanted, hidden[rows]) < LIMIT
    for first, second in zip(states, again, strict=True):
        assert first.shape == (9, 64) and relative_error(second, first) < LIMIT


def test_a_rehearsal_has_as_many_states(device):
    """Of layers that it runs, in the place of those that it leaves out."""
    model, work = build(device, layers=6), [(PagedSequence(), random_tokens(9, 101, seed=1))]
    with model.rehearsal():
        _, states = states_of(model, [2, 3, 5], work)
    assert [state.shape for state in states] == [(9, 64)] * 3


@pytest.mark.parametrize("place", [-1, 4])
def test_layers_that_are_not_there_are_named(device, place):
    with pytest.raises(ValueError, match=f"before must be layers of 0 to 3, got {place}"):
        states_of(build(device), [1, place], [(PagedSequence(), [5, 6])])

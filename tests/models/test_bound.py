"""What stays the same for a step or a layer is checked once: a decode step's checks do not grow with its layers."""

import sys

import pytest
import torch
from support.tiny_models import PagedRunner, PagedSequence, tiny_config

from tritonllm.kernels.runtime.checks import check_tensor
from tritonllm.models.decoder import Decoder
from tritonllm.models.families import spec_from_config
from tritonllm.models.weights import dummy_weights


def checks_of_a_step(family: str, layers: int, device: torch.device) -> int:
    spec = spec_from_config(tiny_config(family, num_hidden_layers=layers))
    model = Decoder(spec, dtype=torch.float32, device=device, max_model_len=64)
    dummy_weights(model, seed=0)
    runner, sequence = PagedRunner(model), PagedSequence()
    runner.prefill(sequence, [1, 2, 3])
    runner.step([(sequence, [4])])  # binds the layers
    calls = []
    sys.setprofile(lambda frame, *_: calls.append(1) if frame.f_code is check_tensor.__code__ else None)
    try:
        runner.step([(sequence, [5])])
    finally:
        sys.setprofile(None)
    return len(calls)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt2"])
def test_checks_do_not_grow_with_layers(device, family):
    assert checks_of_a_step(family, 2, device) == checks_of_a_step(family, 6, device)

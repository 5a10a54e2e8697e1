"""A step that launches every kernel of a whole one, with few layers."""

import pytest
import torch
from support.tiny_models import PagedRunner, random_tokens, tiny_config

from tritonllm.models.decoder import Decoder
from tritonllm.models.decoder_layer import DecoderLayer
from tritonllm.models.families import spec_from_config
from tritonllm.models.weights import dummy_weights


@pytest.mark.parametrize(("family", "places"), [("llama", [0, 1, 1]), ("gemma2", [0, 1, 2, 2])])
def test_one_layer_of_each_kind(monkeypatch, device, family, places):
    spec = spec_from_config(tiny_config(family, num_hidden_layers=6))
    model = Decoder(spec, dtype=torch.float32, device=device, max_model_len=64)
    dummy_weights(model, seed=0)
    ran = []
    forward = DecoderLayer.forward
    monkeypatch.setattr(DecoderLayer, "forward", lambda self, *args: ran.append(self) or forward(self, *args))
    prompt = random_tokens(9, spec.vocab_size, seed=1)
    whole = PagedRunner(model).greedy(prompt, 1)
    assert ran == list(model.layers)
    ran.clear()
    with pytest.raises(KeyError), model.rehearsal():
        PagedRunner(model).greedy(prompt, 1)
        raise KeyError
    assert ran == [model.layers[place] for place in places]
    assert PagedRunner(model).greedy(prompt, 1) == whole

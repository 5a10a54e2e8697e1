"""What parity with transformers (test_parity.py) does not say about the decoder."""

import pytest
import torch
from support.tiny_models import PagedRunner, PagedSequence, tiny_config

from tritonllm.layers.rope import RopeSpec
from tritonllm.models.decoder import Decoder
from tritonllm.models.families import spec_from_config
from tritonllm.models.weights import dummy_weights


def build(device: torch.device, dtype: torch.dtype = torch.float32, **changes) -> Decoder:
    spec = spec_from_config(tiny_config("qwen3", **changes))
    model = Decoder(spec, dtype=dtype, device=device, max_model_len=32)
    dummy_weights(model, 0)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters(device, dtype):
    model = build(device, dtype)
    assert model.dtype is dtype
    for p in model.parameters():
        assert not p.requires_grad and p.dtype == dtype and p.device.type == device.type


def test_nothing_is_initialised(monkeypatch):
    """Every element stays as `torch.empty` left it, so a loader writes it for the first time."""
    monkeypatch.setattr(torch, "empty", lambda shape, **kwargs: torch.full(shape, float("nan"), **kwargs))
    spec = spec_from_config(tiny_config("llama", attention_bias=True, mlp_bias=True))
    model = Decoder(spec, dtype=torch.float32, device=torch.device("cpu"), max_model_len=8)
    for name, p in model.named_parameters():
        assert bool(p.isnan().all()), name


def test_layers_share_a_rope_table(device, monkeypatch):
    """One for each rotation that differs: Gemma 3 has two, SmolLM3 one and layers without."""
    made = []
    table = RopeSpec.table

    def counted(self, *args):
        made.append(table(self, *args))
        return made[-1]

    for family, different in (("qwen3", 1), ("gemma3_text", 2), ("smollm3", 1), ("gpt2", 0)):
        spec = spec_from_config(tiny_config(family))
        with monkeypatch.context() as patch:
            patch.setattr(RopeSpec, "table", counted)
            model = Decoder(spec, dtype=torch.float32, device=device, max_model_len=32)
        assert len(made) == different
        assert all(t.shape == (32, 16) and t.dtype == torch.float32 for t in made)
        assert all(p.shape != (32, 16) for p in model.state_dict().values())
        made.clear()


@pytest.mark.parametrize("tied", [False, True])
def test_output_projection(device, tied):
    model = build(device, tie_word_embeddings=tied)
    assert (model.lm_head is model.embed) == tied
    assert ("lm_head.weight" in dict(model.named_parameters())) != tied


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_dtypes(device, dtype):
    """Hidden states in the model's dtype, logits in float32, and only the rows that were asked for."""
    model = build(device, dtype)
    hidden = []
    handle = model.register_forward_hook(lambda module, args, output: hidden.append(output))
    PagedRunner(model).prefill(PagedSequence(), [5, 6, 7])
    handle.remove()
    assert hidden[0].shape == (3, 64) and hidden[0].dtype == dtype
    logits = model.compute_logits(hidden[0][2:])
    assert logits.shape == (1, 101) and logits.dtype == torch.float32
    assert model.compute_logits(hidden[0][:0]).shape == (0, 101)


def test_token_ids_may_be_int32(device):
    model = build(device)
    runner = PagedRunner(model)
    want = runner.prefill(PagedSequence(), [5, 6, 7])
    handle = model.register_forward_pre_hook(lambda module, args: (args[0].int(), *args[1:]))
    got = runner.prefill(PagedSequence(), [5, 6, 7])
    handle.remove()
    assert torch.equal(got, want)


def test_wrong_number_of_caches(device):
    runner = PagedRunner(build(device))
    runner.cache.pop()
    with pytest.raises(ValueError, match="one view for each"):
        runner.prefill(PagedSequence(), [1])


def test_a_batch_changes_no_other_sequence(device):
    """The same logits alone and beside others, to rounding."""
    model = build(device)
    runner = PagedRunner(model)
    alone = runner.prefill(PagedSequence(), [9, 8, 7, 6])
    together = runner.step([(PagedSequence(), [1]), (PagedSequence(), [9, 8, 7, 6]), (PagedSequence(), [2, 3])])
    torch.testing.assert_close(together[1], alone, rtol=1e-5, atol=1e-6)

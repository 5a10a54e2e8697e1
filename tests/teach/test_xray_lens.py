"""What the x-ray draws of the inside of a model is what the model computes."""

import pytest
import torch
from matplotlib.image import imread
from support.compare import relative_error
from support.tiny_configs import ALL_FAMILIES, NOT_IN_TRANSFORMERS, WITHOUT_FAMILY
from support.tiny_models import PagedRunner, PagedSequence, load_decoder, random_tokens, tiny_config, write_checkpoint

from tritonllm.models.fallback import fallback_spec, load_fallback
from tritonllm.teach.xray import images
from tritonllm.teach.xray.lens import Guess, attention_pattern, logit_lens

pytestmark = pytest.mark.filterwarnings("ignore:OlmoForCausalLM does not run natively")
CPU = torch.device("cpu")
TOKENS = random_tokens(19, 101, seed=4)
# one head of keys for several of queries, norms of heads; windows and caps; sinks; ALiBi; a window in some layers
ATTENTIONS = ("qwen3", "gemma2", "gpt_oss", "bloom", "cohere2", "olmo3")


def fallback(folder):
    return load_fallback(
        folder,
        fallback_spec(folder, False),
        dtype=torch.float32,
        device=CPU,
        trust_remote_code=False,
        load_format="auto",
        seed=0,
        max_model_len=64,
    )


@pytest.mark.parametrize("family", [*ATTENTIONS, WITHOUT_FAMILY])
def test_attention_is_that_of_transformers(family, tmp_path):
    """Every layer and head, natively and (BitNet) through transformers."""
    native = family in ALL_FAMILIES
    config = tiny_config(family) if native else {**tiny_config("llama"), "model_type": family}
    theirs = write_checkpoint(tmp_path, config, config_style=4 if native else 5)
    ours = load_decoder(tmp_path) if native else fallback(tmp_path)
    with torch.inference_mode():
        output = theirs(input_ids=torch.tensor([TOKENS]), use_cache=False, output_attentions=True)
    for layer, expected in enumerate(output.attentions):
        expected = expected[0, :, :, : len(TOKENS)]
        heads = [attention_pattern(ours, CPU, TOKENS, layer, head) for head in range(len(expected))]
        sums = torch.stack(heads).sum(-1)
        if family == "gpt_oss":
            assert bool((sums < 1).all()), "a sink takes a part"
        else:
            torch.testing.assert_close(sums, torch.ones_like(sums))
        for head, found in enumerate(heads):
            torch.testing.assert_close(found, expected[head].float(), rtol=1e-4, atol=1e-5)
        mean = attention_pattern(ours, CPU, TOKENS, layer, None)
        torch.testing.assert_close(mean, expected.float().mean(0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_the_lens_of_the_last_layer_is_what_the_model_says(family, tmp_path):
    write_checkpoint(tmp_path, tiny_config(family))
    model = load_decoder(tmp_path)
    logits = PagedRunner(model).prefill(PagedSequence(), TOKENS)
    for position in (0, 11, -1):
        guesses = logit_lens(model, CPU, TOKENS, position)
        layers = [f"layer {i}" for i in range(model.spec.num_layers)]
        assert [guess.place for guess in guesses] == ["embedding", *layers]
        assert relative_error(guesses[-1].logits, logits[position]) < 1e-5
        assert all(bool(guess.logits.isfinite().all()) for guess in guesses)


@pytest.mark.parametrize("family", ["qwen3", "granite", "gpt_neox", "olmo2", "opt", "cohere", WITHOUT_FAMILY])
def test_the_lens_of_a_layer_is_its_stream_through_norm_and_output(family, tmp_path):
    """Against the hidden states of transformers: sequential and parallel blocks, multipliers, norms behind blocks."""
    native = family in ALL_FAMILIES
    config = tiny_config(family) if native else {**tiny_config("llama"), "model_type": family}
    theirs = write_checkpoint(tmp_path, config, config_style=4 if native else 5)
    ours = load_decoder(tmp_path) if native else fallback(tmp_path)
    with torch.inference_mode():
        output = theirs(input_ids=torch.tensor([TOKENS]), use_cache=False, output_hidden_states=True)
        base = theirs.base_model
        stack = getattr(base, "decoder", base)
        names = ("norm", "final_layer_norm", "final_layernorm")
        norm = next(getattr(stack, name) for name in names if getattr(stack, name, None) is not None)
        scale = {"granite": lambda x: x / config["logits_scaling"], "cohere": lambda x: x * config["logit_scale"]}
        guesses = logit_lens(ours, CPU, TOKENS, 7)
        for layer in range(1, config.get("num_hidden_layers", 3)):
            hidden = norm(output.hidden_states[layer][0, 7:8])
            expected = theirs.get_output_embeddings()(hidden)[0]
            expected = scale.get(family, lambda x: x)(expected)
            assert relative_error(guesses[layer].logits, expected) < 1e-4, guesses[layer].place
        assert relative_error(guesses[-1].logits, output.logits[0, 7]) < 1e-4


def test_what_cannot_be_told(tmp_path):
    write_checkpoint(tmp_path, tiny_config("qwen3"))
    model = load_decoder(tmp_path)
    with pytest.raises(ValueError, match="layer must be from 0 to 2, got 3"):
        attention_pattern(model, CPU, TOKENS, 3, None)
    with pytest.raises(ValueError, match="head must be from 0 to 3, got 4"):
        attention_pattern(model, CPU, TOKENS, 0, 4)
    for position in (19, -20):
        with pytest.raises(ValueError, match=f"POSITION must be from -19 to 18, got {position}"):
            logit_lens(model, CPU, TOKENS, position)


def spell(token):
    return {0: " a$b_", 1: "\n", 2: "狐"}.get(token, f"w{token}")


def test_labels():
    assert [images.label_of(token, spell) for token in (0, 1, 2)] == ["␣a$b_", "↵", "#2"]
    assert images.label_of(1, lambda token: "x" * 30) == "x" * 11 + "…"
    assert images.label_of(7, lambda token: "") == "#7"


@pytest.mark.parametrize("count", [1, 12, 70])
def test_an_attention_image(count, tmp_path):
    """Its pixels follow the weights: dark where a token looks, white where it cannot."""
    weights = torch.tril(torch.rand(count, count, generator=torch.Generator().manual_seed(1)) + 0.2)
    weights /= weights.sum(1, keepdim=True)
    file = tmp_path / "a.png"
    images.draw_attention(weights, list(range(count)), spell, "title", file)
    assert file.read_bytes().startswith(b"\x89PNG")
    pixels = imread(file)[..., :3]
    assert pixels.shape[0] > 200 and pixels.shape[1] > 200
    assert 0.1 < (pixels.min(-1) < 0.9).mean() < 0.9
    again = tmp_path / "b.png"
    images.draw_attention(weights, list(range(count)), spell, "title", again)
    assert file.read_bytes() == again.read_bytes()


def test_a_lens_image(tmp_path):
    logits = torch.randn(4, 101, generator=torch.Generator().manual_seed(2)) * torch.arange(1, 5)[:, None]
    guesses = [Guess(f"layer {at}", row) for at, row in enumerate(logits)]
    top = guesses[3].top(5)
    assert top[0] == (int(logits[3].argmax()), pytest.approx(float(logits[3].softmax(-1).max())))
    assert [share for _, share in top] == sorted([share for _, share in top], reverse=True)
    file = tmp_path / "l.png"
    images.draw_lens(guesses, spell, "title", file)
    pixels = imread(file)[..., :3]
    assert ((pixels.max(-1) - pixels.min(-1)) > 0.15).mean() > 0.05


assert set(ATTENTIONS) <= set(ALL_FAMILIES) - set(NOT_IN_TRANSFORMERS)

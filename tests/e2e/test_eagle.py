"""EAGLE heads: the drafts are those of a plain computation of the published method, and no token changes."""

import json

import pytest
import torch
from safetensors.torch import load_file
from support.eagle_heads import (
    COURSES,
    ENGINES,
    FAMILIES,
    KINDS,
    PROMPTS,
    certain_pair,
    check_drafts,
    eagle_tensors,
    greedy_texts,
    head_config,
    random_eagle_head,
    texts,
    texts_of_kinds,
    with_head,
)
from support.engines import greedy, tiny_checkpoint, tiny_llm, token_ids
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaModel

from tritonllm.models.checkpoint import read_config
from tritonllm.models.eagle_files import write_eagle_head


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_that_of_plain_decoding(family, ahead):
    folder = tiny_checkpoint(family)
    llm = with_head(folder, random_eagle_head(family), async_scheduling=ahead)
    assert texts(llm.generate(PROMPTS, greedy(24))) == greedy_texts(folder)
    stats = llm.engine.stats
    assert stats.num_draft_tokens > stats.num_accepted_tokens
    assert (stats.num_free_blocks, stats.compilations_after_ready) == (stats.num_blocks, 0)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_no_kind_of_request_changes(engine, ahead):
    model, head = certain_pair()
    before = tuple(range(3, 24))
    prompts = [[*before, *prompt] for prompt in PROMPTS]
    llm = with_head(model, head, async_scheduling=ahead, **engine)
    for _ in range(2):
        assert texts(llm.generate(prompts, KINDS, use_tqdm=False)) == texts_of_kinds(model, before)
    stats = llm.engine.stats
    assert 0.3 * stats.num_draft_tokens < stats.num_accepted_tokens < stats.num_draft_tokens
    assert stats.num_free_blocks == stats.num_blocks


def reference_drafts(model, head, tokens, count):
    """What a head drafts behind ``tokens``, computed anew from the beginning by transformers: pairs of each token and
    the model's state of the place before, zeros for the first, then its own states."""
    target = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    config, parts = read_config(head), load_file(head / "model.safetensors")
    layer = LlamaModel(LlamaConfig(**{**config, "attn_implementation": "eager"}))
    missing, more = layer.load_state_dict({n: t for n, t in parts.items() if n.startswith("layers.")}, strict=False)
    assert not more and set(missing) == {"embed_tokens.weight", "norm.weight", "layers.0.input_layernorm.weight"}
    layer.layers[0].input_layernorm = layer.norm = torch.nn.Identity()
    with torch.no_grad():
        states = target.model(torch.tensor([tokens[:-1]])).last_hidden_state[0]
        states = torch.cat([torch.zeros_like(states[:1]), states])
        known = list(tokens)
        for _ in range(count):
            pairs = torch.cat([target.model.embed_tokens(torch.tensor(known)), states], -1)
            mine = layer(inputs_embeds=(pairs @ parts["fc.weight"].T)[None]).last_hidden_state[0, -1:]
            known.append(int(target.lm_head(mine).argmax()))
            states = torch.cat([states, mine])
    return known[len(tokens) :]


@pytest.mark.parametrize(("most", "twice", "engine"), COURSES)
@pytest.mark.parametrize("ahead", [False, True])
def test_drafts_are_those_of_the_published_method(ahead, most, twice, engine):
    model, head = certain_pair()
    llm = with_head(model, head, drafts=4, most=most, async_scheduling=ahead, **engine)
    check_drafts(llm, [PROMPTS[2], PROMPTS[0]], twice, lambda *args: reference_drafts(model, head, *args))


BAD = {
    "layers": ({"num_hidden_layers": 2}, "has 2 layers: a head has one; for a whole model use 'draft_model'"),
    "width": ({"hidden_size": 128}, "is a head for hidden states of 128 numbers"),
    "vocabulary": ({"vocab_size": 77}, "has a vocabulary of 77 tokens"),
    "eagle3": ({"draft_vocab_size": 30}, "has a head of EAGLE-3, and method is .eagle.: set method=.eagle3."),
    "family": ({"architectures": ["GPT2LMHeadModel"]}, "a head is one layer of LlamaForCausalLM"),
}


@pytest.mark.parametrize("case", BAD)
def test_heads_that_do_not_fit_are_named(tmp_path, case):
    changes, message = BAD[case]
    (tmp_path / "config.json").write_text(json.dumps(head_config(tiny_checkpoint("llama"), **changes)))
    with pytest.raises(ValueError, match=f"speculative_config: model=.*{message}"):
        with_head(tiny_checkpoint("llama"), tmp_path)


def test_bad_tensors_are_named(tmp_path):
    folder = tiny_checkpoint("llama")
    config = head_config(folder)
    whole = eagle_tensors(config)
    name = "layers.0.mlp.up_proj.weight"
    bad = {
        "tensor .*up_proj.weight is missing": {n: t for n, t in whole.items() if n != name},
        "tensor fc.weight is missing": {n: t for n, t in whole.items() if n != "fc.weight"},
        "tensor midlayer.x has no place": {**whole, "midlayer.x": whole[name].clone()},
        r"tensor .*up_proj.weight has shape \[3, 4\]": {**whole, name: torch.zeros(3, 4)},
        "NaN or infinite": {**whole, name: whole[name] / 0},
    }
    for message, tensors in bad.items():
        write_eagle_head(tmp_path, config, tensors)
        with pytest.raises(ValueError, match=f"speculative_config: model=.*{message}"):
            with_head(folder, tmp_path)


def test_a_bias_and_a_file_in_vllms_layout(tmp_path):
    folder = tiny_checkpoint("llama")
    config = head_config(folder)
    tensors = {**eagle_tensors(config), "fc.bias": 0.5 * torch.ones(config["hidden_size"])}
    write_eagle_head(tmp_path, {"model_type": "eagle", "model": config}, {f"model.{n}": t for n, t in tensors.items()})
    llm = with_head(folder, tmp_path)
    assert torch.equal(llm.engine._runner.drafts.drafter.model.fc.bias, tensors["fc.bias"])
    expected = token_ids(tiny_llm(folder).generate(PROMPTS, greedy(12)))
    assert token_ids(llm.generate(PROMPTS, greedy(12))) == expected


def test_a_head_sleeps_with_its_model():
    model, head = certain_pair()
    llm = with_head(model, head, enable_sleep_mode=True)
    before = texts(llm.generate(PROMPTS, greedy(12)))
    accepted = llm.engine.stats.num_accepted_tokens
    own = sum(p.numel() for p in llm.engine._runner.drafts.drafter.model.parameters())
    assert own == sum(t.numel() for n, t in load_file(head / "model.safetensors").items() if n != "embed_tokens.weight")
    llm.sleep(1)
    llm.wake_up()
    assert texts(llm.generate(PROMPTS, greedy(12))) == before
    assert llm.engine.stats.num_accepted_tokens == 2 * accepted > 0

"""EAGLE-3 heads: the drafts are those of a plain computation of the published method, and no token changes."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file
from support.eagle3_heads import (
    READS,
    circular_model,
    config_of,
    head_tensors,
    knowing_head,
    likely_pair,
    random_head,
    reference,
    some_tokens,
    write,
)
from support.eagle_heads import (
    COURSES,
    ENGINES,
    FAMILIES,
    KINDS,
    PROMPTS,
    STEP,
    check_drafts,
    greedy_texts,
    texts,
    texts_of_kinds,
    with_head,
)
from support.engines import greedy, tiny_checkpoint, tiny_llm, token_ids
from support.fusion import set_fusion
from support.tiny_configs import WITHOUT_FAMILY, tiny_config
from support.tiny_tokenizer import VOCAB_SIZE

from tritonllm import LLM, SamplingParams
from tritonllm.config.engine import EngineConfig
from tritonllm.layers.fusion import FusionLimits
from tritonllm.models.checkpoint import read_config
from tritonllm.testing import relative_error


def eagle3(model, head, drafts=3, most=None, **kwargs):
    return with_head(model, head, drafts, most, method="eagle3", **kwargs)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_is_that_of_plain_decoding(family, ahead):
    folder = tiny_checkpoint(family)
    llm = eagle3(folder, random_head(family), async_scheduling=ahead)
    assert texts(llm.generate(PROMPTS, greedy(24))) == greedy_texts(folder)
    stats = llm.engine.stats
    assert stats.num_draft_tokens > stats.num_accepted_tokens
    assert (stats.num_free_blocks, stats.compilations_after_ready) == (stats.num_blocks, 0)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_no_kind_of_request_changes(engine, ahead):
    model, head = likely_pair()
    before = tuple(range(3, 24))
    prompts = [[*before, *prompt] for prompt in PROMPTS]
    llm = eagle3(model, head, async_scheduling=ahead, **engine)
    for _ in range(2):
        assert texts(llm.generate(prompts, KINDS, use_tqdm=False)) == texts_of_kinds(model, before)
    stats = llm.engine.stats
    assert 0.2 * stats.num_draft_tokens < stats.num_accepted_tokens < stats.num_draft_tokens
    assert stats.num_free_blocks == stats.num_blocks


@pytest.mark.parametrize(("most", "twice", "engine"), COURSES)
@pytest.mark.parametrize("ahead", [False, True])
def test_drafts_are_those_of_the_published_method(ahead, most, twice, engine):
    model, head = likely_pair()
    llm = eagle3(model, head, drafts=4, most=most, async_scheduling=ahead, **engine)
    check_drafts(llm, [PROMPTS[2], PROMPTS[0]], twice, lambda *args: reference(model, head, *args)[0])


def test_drafts_go_on_behind_the_texts_that_a_head_was_trained_on(tmp_path):
    """Published heads say 2048; here most drafts lie behind it."""
    model, known = likely_pair()
    head = shutil.copytree(known, tmp_path / "head")
    (head / "config.json").write_text(json.dumps({**read_config(known), "max_position_embeddings": 8}))
    llm = eagle3(model, head, drafts=4)
    check_drafts(llm, [PROMPTS[2], PROMPTS[0]], False, lambda *args: reference(model, head, *args)[0])


@pytest.mark.parametrize(
    "limits", [FusionLimits(few=1), FusionLimits(few=100), FusionLimits(medium=range(100))], ids=str
)
def test_fused_steps_draft_the_same(monkeypatch, limits):
    """On a GPU steps of some sizes are fused; here all models are made to."""
    model, head = likely_pair()
    llm = eagle3(model, head, drafts=4)
    for one in (llm.engine._runner.model, llm.engine._runner.drafts.drafter.model):
        set_fusion(monkeypatch, one, limits)
    check_drafts(llm, [PROMPTS[2], PROMPTS[0]], False, lambda *args: reference(model, head, *args)[0])


def as_published(config, tensors):
    return config, tensors


def normed_feature(config, tensors):
    return {**config, "norm_before_residual": True}, tensors


def named_layers(config, tensors):
    layers = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2]}}
    return {**config, **layers}, {**tensors, "fc.weight": tensors["fc.weight"][:, :128]}


def of_speculators(config, tensors):
    """vLLM's: a configuration in parts, whose layer adds to the normed feature if nothing else is said."""
    layer = {name: value for name, value in config.items() if name not in ("architectures", "draft_vocab_size")}
    outer = {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": 240}
    outer |= {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "transformer_layer_config": layer}
    return outer, {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}


def with_prefix(config, tensors):
    return config, {f"model.{name}": tensor for name, tensor in tensors.items()}


def own_table(config, tensors):
    return config, {**tensors, "embed_tokens.weight": torch.randn(VOCAB_SIZE, 64)}


def narrow(config, tensors):
    """Than the model: with its own table."""
    config = {**config, "hidden_size": 48, "target_hidden_size": 64}
    return config, {**head_tensors(config, target=64), "embed_tokens.weight": torch.randn(VOCAB_SIZE, 48)}


LAYOUTS = [as_published, normed_feature, named_layers, of_speculators, with_prefix, own_table, narrow]


@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_and_drafts_of_every_layout(layout, kv_heads):
    """Of the first drafts behind one token and behind a prompt: the head's logits, and -inf for all other tokens."""
    torch.manual_seed(1)
    model = tiny_checkpoint("llama")
    config = config_of(model, num_key_value_heads=kv_heads)
    head = write(*layout(config, head_tensors(config)))
    reads = {named_layers: (0, 2), of_speculators: (0, 1, 2)}.get(layout, READS)
    others = torch.ones(VOCAB_SIZE, dtype=torch.bool).index_fill_(0, some_tokens(), False)
    for prompt in ([9], PROMPTS[4]):
        llm, found = eagle3(model, head, drafts=4), []
        note_logits(llm.engine._runner.drafts.drafter.model, found)
        first = token_ids(llm.generate([prompt], greedy(6)))[0][0]
        drafts, logits = reference(model, head, [*prompt, first], 4, reads)
        for (mine, *_), draft, want in zip(found, drafts, logits, strict=False):
            # Each draft is computed from the one before: 9e-5 on one processor where another has 5e-5.
            assert relative_error(mine[some_tokens()], want) < 5e-4
            assert mine.dtype == torch.float32 and (mine[others] == -torch.inf).all()
            assert int(mine.argmax()) == draft


def note_logits(head, found):
    compute = head.compute_logits
    head.compute_logits = lambda hidden: found.append(compute(hidden)) or found[-1]


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("by_token", [False, True])
def test_a_head_that_knows_is_right(by_token, ahead):
    """All greedy drafts of one that knows from its feature, and later from its own states. Of one that knows from its
    token also the drafts of seeds, for it has the model's distribution. Both number the tokens in another order."""
    model = circular_model(context=0.0, sharpness=0.2)
    tokens = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(3))
    params = [greedy(40)] * 5
    if by_token:
        params[1:3] = [SamplingParams(temperature=1.0, seed=seed, max_tokens=40, ignore_eos=True) for seed in (1, 2)]
        params[3] = SamplingParams(temperature=1.0, seed=3, top_k=7, top_p=0.9, max_tokens=40, ignore_eos=True)
    expected = texts(tiny_llm(model).generate(PROMPTS, params))
    assert not by_token or expected[1][0] != [(9 + STEP * (place + 1)) % VOCAB_SIZE for place in range(40)]
    llm = eagle3(model, knowing_head(model, tokens, by_token), async_scheduling=ahead)
    assert texts(llm.generate(PROMPTS, params)) == expected
    stats = llm.engine.stats
    assert stats.num_draft_tokens > 100
    assert stats.num_accepted_tokens == stats.num_draft_tokens


def test_tokens_that_a_head_does_not_have_are_not_drafted():
    """The model goes through all tokens; a head with every second one is right until the first that it lacks."""
    model = circular_model(context=0.0)
    llm = eagle3(model, knowing_head(model, torch.arange(0, VOCAB_SIZE, 2), by_token=True))
    expected = [(9 + STEP * (place + 1)) % VOCAB_SIZE for place in range(40)]
    assert token_ids(llm.generate([[9]], greedy(40))) == [expected]
    stats = llm.engine.stats
    assert stats.num_accepted_tokens_per_pos == (stats.num_drafts - 1, 0, 0)  # the next but one is even again


def test_deterministic_requests_keep_their_bits():
    model, head = likely_pair()
    params = [SamplingParams(temperature=1.0, seed=5, max_tokens=16, ignore_eos=True, logprobs=1)] * len(PROMPTS)

    def bits(llm, prompts):
        found = [output.outputs[0] for output in llm.generate(prompts, params[: len(prompts)], use_tqdm=False)]
        return [[(t, e[t].logprob) for t, e in zip(c.token_ids, c.logprobs, strict=True)] for c in found]

    expected = bits(tiny_llm(model, deterministic=True), PROMPTS)
    llm = eagle3(model, head, deterministic=True)
    assert bits(llm, PROMPTS) == expected
    assert bits(llm, PROMPTS[:1]) == expected[:1]
    assert llm.engine.stats.num_accepted_tokens > 0


BAD = {
    "method": ("eagle", {}, "has a head of EAGLE-3, and method is 'eagle': set method='eagle3'"),
    "first": (
        "eagle3",
        {"draft_vocab_size": None, "architectures": ["LlamaForCausalLM"]},
        "EAGLE or EAGLE-2, and .* method='eagle'",
    ),
    "width": ("eagle3", {"target_hidden_size": 128}, "is a head for hidden states of 128 numbers"),
    "hidden": ("eagle3", {"hidden_size": 128}, "is a head for hidden states of 128 numbers"),
    "vocabulary": ("eagle3", {"vocab_size": 277}, "has a vocabulary of 277 tokens, the model one of 320"),
    "drafted": ("eagle3", {"draft_vocab_size": 321}, "draft_vocab_size must be at most vocab_size, 320"),
    "number": ("eagle3", {"draft_vocab_size": "many"}, "draft_vocab_size must be an integer of at least 1, got 'many'"),
    "ids": ("eagle3", {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}, r"reads layers \[0, 1, 3\] \(by eagle_aux"),
    "no ids": ("eagle3", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": "2"}}, "reads layers 2 .* 0 to 2"),
    "layers": ("eagle3", {"num_hidden_layers": 2}, "has 2 layers: a head has one"),
    "family": ("eagle3", {"architectures": ["GptOssForCausalLMEagle3"]}, "a head is one layer of LlamaForCausalLM"),
    "no fc": ("eagle3", {"eagle_config": {"use_aux_hidden_state": False}}, "has use_aux_hidden_state=false"),
    "later": ("eagle3", {"norm_before_fc": True}, "has norm_before_fc, which is not supported"),
}


@pytest.mark.parametrize("case", BAD)
def test_heads_that_do_not_fit_are_named(tmp_path, case):
    """From ``config.json`` alone: there are no weights."""
    method, changes, message = BAD[case]
    said = config_of(tiny_checkpoint("llama"), **changes)
    config = {name: value for name, value in said.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"speculative_config: model=.*{message}"):
        with_head(tiny_checkpoint("llama"), tmp_path, method=method)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (
            "llama",
            {"architectures": ["BitNetForCausalLM"], "model_type": WITHOUT_FAMILY},
            "which must have a family here",
        ),
        ("opt", {"do_layer_norm_before": False, "_remove_final_layer_norm": True}, "has with norms only"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*does not run natively:UserWarning")
def test_models_that_do_not_fit_are_named(tmp_path, family, changes, message):
    """From their configurations: there are no weights."""
    config = {**tiny_config(family), **changes, "vocab_size": VOCAB_SIZE}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=f"speculative_config: model=.*{message}"):
        eagle3(tmp_path, random_head(), max_model_len=64)


def test_what_else_does_not_go_together_is_named():
    config = {"method": "eagle3", "model": "m", "num_speculative_tokens": 3}
    with pytest.raises(ValueError, match="method='eagle3' runs on one GPU so far: leave out tensor_parallel_size=2"):
        EngineConfig.from_kwargs(model="m", speculative_config=config, tensor_parallel_size=2)
    with pytest.raises(ValueError, match=r"compilation_config: .* which method='eagle3' reads: leave it off"):
        EngineConfig.from_kwargs(model="m", speculative_config=config, compilation_config=3)


def test_bad_tensors_are_named():
    folder = tiny_checkpoint("llama")
    config = config_of(folder)
    whole = head_tensors(config)
    name = "midlayer.hidden_norm.weight"
    same = whole["d2t"].clone()
    same[1] -= whole["d2t"][1] - whole["d2t"][0] + 1
    bad = {
        f"tensor {name} is missing": {n: t for n, t in whole.items() if n != name},
        "tensor norm.weight is missing": {n: t for n, t in whole.items() if n != "norm.weight"},
        "tensor lm_head.weight is missing": {n: t for n, t in whole.items() if n != "lm_head.weight"},
        "tensor d2t is missing, which says what the 240 tokens are": {n: t for n, t in whole.items() if n != "d2t"},
        "tensor d2t must give each of 240 rows a token of its own": {**whole, "d2t": same},
        "tensor d2t must give .* of 0 to 319": {**whole, "d2t": whole["d2t"] + VOCAB_SIZE},
        "tensor d2t must": {**whole, "d2t": whole["d2t"][:-1]},
        "tensor input_norm.weight has no place": {**whole, "input_norm.weight": whole["norm.weight"].clone()},
        r"tensor fc.weight has shape \[64, 8\], the model asks for \[64, 192\]": {
            **whole,
            "fc.weight": torch.ones(64, 8),
        },
        "NaN or infinite": {**whole, "lm_head.weight": whole["lm_head.weight"] / 0},
    }
    for message, tensors in bad.items():
        with pytest.raises(ValueError, match=f"speculative_config: model=.*{message}"):
            eagle3(folder, write(config, tensors))


def test_a_table_like_the_models_is_shared():
    """Many files repeat it; one of other numbers is the head's own."""
    folder = tiny_checkpoint("llama")
    config = config_of(folder)
    table = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    for embed, own in ((table, False), (table + 1, True)):
        llm = eagle3(folder, write(config, {**head_tensors(config), "embed_tokens.weight": embed}))
        head, model = llm.engine._runner.drafts.drafter.model, llm.engine._runner.model
        assert (head.embed is not model.embed) == own == ("embed.weight" in dict(head.named_parameters()))
        assert torch.equal(head.embed.weight, embed)


def test_a_pytorch_file_without_a_map(tmp_path):
    """A head of the whole vocabulary needs none."""
    folder = tiny_checkpoint("llama")
    config = config_of(folder, draft_vocab_size=VOCAB_SIZE)
    tensors = {n: t for n, t in head_tensors(config).items() if n not in ("d2t", "t2d")}
    (tmp_path / "config.json").write_text(json.dumps(config))
    torch.save({**tensors, "d2t": torch.zeros(VOCAB_SIZE, dtype=torch.int64)}, tmp_path / "pytorch_model.bin")
    drafted = []
    for head in (tmp_path, write(config, tensors)):
        llm = eagle3(folder, head)
        llm.generate(PROMPTS, greedy(12))
        targets = llm.engine._runner.drafts.drafter.model.targets
        assert torch.equal(targets, torch.arange(VOCAB_SIZE))
        drafted.append((llm.engine.stats.num_draft_tokens, llm.engine.stats.num_accepted_tokens))
    assert drafted[0] == drafted[1]


def test_a_head_sleeps_with_its_model():
    model, head = likely_pair()
    llm = eagle3(model, head, enable_sleep_mode=True)
    before = texts(llm.generate(PROMPTS, greedy(12)))
    accepted = llm.engine.stats.num_accepted_tokens
    own = sum(p.numel() for p in llm.engine._runner.drafts.drafter.model.parameters())
    files = load_file(head / "model.safetensors")
    assert own == sum(t.numel() for name, t in files.items() if name not in ("d2t", "t2d"))
    llm.sleep(1)
    llm.wake_up()
    assert texts(llm.generate(PROMPTS, greedy(12))) == before
    assert llm.engine.stats.num_accepted_tokens == 2 * accepted > 0


def test_weights_that_are_made_up(tmp_path):
    """From ``config.json`` alone, for measurements of speed."""
    for name, folder in (("model", tiny_checkpoint("llama")), ("head", random_head())):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text((folder / "config.json").read_text())
    settings = {"load_format": "dummy", "skip_tokenizer_init": True, "num_blocks": 64, "block_size": 4}
    config = {"method": "eagle3", "model": str(tmp_path / "head"), "num_speculative_tokens": 2, "adaptive": False}
    llm = LLM(str(tmp_path / "model"), speculative_config=config, **settings)
    assert len(token_ids(llm.generate(PROMPTS[:1], greedy(8)))[0]) == 8
    assert llm.engine.stats.num_draft_tokens > 0

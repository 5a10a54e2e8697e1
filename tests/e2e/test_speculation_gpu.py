"""Speculation on a GPU: verified drafts in captured steps, planned ahead, give what plain decoding gives."""

import json

import pytest
import torch
from support.eagle3_heads import circular_model, knowing_head
from support.engines import greedy, tiny_llm, token_ids
from support.real_configs import QWEN3_0_6B
from support.tiny_models import random_tokens
from support.tiny_tokenizer import VOCAB_SIZE

from bench.known_texts import drafter_of
from tritonllm import LLM, SamplingParams
from tritonllm.demo import draft_path, model_path

pytestmark = pytest.mark.gpu

LENGTHS = (1, 700, 33, 128, 2, 511, 90, 300)
PROMPTS = [random_tokens(n, 10000, seed=n) for n in LENGTHS]
KNOWN = {"method": "bench.known_texts:make", "num_speculative_tokens": 4, "adaptive": False}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "adaptive": False}

ENGINES = [
    {},
    {"enforce_eager": True},
    {"async_scheduling": False},
    {"max_num_batched_tokens": 100},
    {"num_blocks": 130},
    {"block_size": 64, "num_blocks": 512},
    {"enable_prefix_caching": False, "max_num_seqs": 3},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("qwen3")
    (folder / "config.json").write_text(json.dumps({**QWEN3_0_6B, "num_hidden_layers": 6}))
    return str(folder)


def make(folder, **kwargs):
    settings = {"load_format": "dummy", "skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 2048}
    return LLM(folder, **{**settings, "num_blocks": 2048, "max_num_seqs": 16, **kwargs})


def know(llm, expected, acceptance=0.7):
    texts = [[*prompt, *ids] for prompt, ids in zip(PROMPTS, expected, strict=True)]
    drafter_of(llm).know(texts, acceptance)


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_drafts_do_not_change_greedy_tokens(folder, engine):
    """float32, where verification and decoding differ by rounding far below the gap between tokens."""
    expected = token_ids(make(folder).generate(PROMPTS, greedy(60), use_tqdm=False))
    llm = make(folder, speculative_config=KNOWN, **engine)
    know(llm, expected)
    for _ in range(2):  # the second time from the prefix cache
        assert token_ids(llm.generate(PROMPTS, greedy(60), use_tqdm=False)) == expected
    stats = llm.engine.stats
    assert stats.num_draft_tokens > 200 and stats.num_accepted_tokens > 0.3 * stats.num_draft_tokens
    assert stats.num_free_blocks == stats.num_blocks


def test_ngrams_do_not_change_greedy_tokens(folder):
    """Prompts that say a beginning again: there is something to find, right or wrong."""
    prompts = [prompt * 2 + prompt[:3] for prompt in PROMPTS]
    expected = token_ids(make(folder).generate(prompts, greedy(60), use_tqdm=False))
    llm = make(folder, speculative_config=NGRAM)
    assert token_ids(llm.generate(prompts, greedy(60), use_tqdm=False)) == expected
    assert llm.engine.stats.num_draft_tokens > 0


def test_past_outputs_are_found_again(folder):
    config = {"method": "suffix", "num_speculative_tokens": 4, "suffix_decoding_max_spec_factor": 4.0}
    config["adaptive"] = False
    expected = token_ids(make(folder).generate(PROMPTS, greedy(60), use_tqdm=False))
    llm = make(folder, speculative_config=config, max_num_seqs=8)
    accepted = []
    for _ in range(3):
        assert token_ids(llm.generate(PROMPTS, greedy(60), use_tqdm=False)) == expected
        accepted.append(llm.engine.stats.num_accepted_tokens)
    assert accepted[2] - accepted[1] > 8 * 60 / 2


def test_drafts_change_no_kind_of_request(folder):
    """Seeds draw what they draw without drafts; penalties and min_tokens count accepted drafts."""
    kinds = [
        greedy(40),
        SamplingParams(temperature=1.0, top_p=0.9, seed=1, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=2, max_tokens=40, stop_token_ids=list(range(0, 151936, 40))),
        SamplingParams(temperature=0.5, seed=3, max_tokens=30, frequency_penalty=1.0, repetition_penalty=1.2),
        SamplingParams(temperature=1.0, seed=4, max_tokens=20, logprobs=2, prompt_logprobs=1),
        SamplingParams(temperature=1.0, seed=5, max_tokens=35, min_tokens=20, logit_bias={7: 5.0}),
        SamplingParams(temperature=0, max_tokens=1),
        SamplingParams(temperature=1.0, seed=6, max_tokens=33, allowed_token_ids=list(range(500))),
    ]
    plain = make(folder).generate(PROMPTS, kinds, use_tqdm=False)
    expected = [(list(o.outputs[0].token_ids), o.outputs[0].finish_reason) for o in plain]
    for engine in ({}, {"async_scheduling": False}, {"enforce_eager": True}):
        llm = make(folder, speculative_config=KNOWN, **engine)
        know(llm, token_ids(plain))
        found = llm.generate(PROMPTS, kinds, use_tqdm=False)
        assert [(list(o.outputs[0].token_ids), o.outputs[0].finish_reason) for o in found] == expected
        for mine, other in zip(found[4].outputs[0].logprobs, plain[4].outputs[0].logprobs, strict=True):
            assert {t: e.logprob for t, e in mine.items()} == pytest.approx(
                {t: e.logprob for t, e in other.items()}, abs=1e-3
            )
        assert llm.engine.stats.num_accepted_tokens > 0


def test_captured_steps_and_kernels_come_before_the_first_request(folder):
    """Nothing is compiled, loaded or captured in service, and no pinned memory is new."""
    plain = make(folder, dtype="bfloat16", max_num_seqs=100).generate(PROMPTS, greedy(20), use_tqdm=False)
    llm = make(folder, dtype="bfloat16", max_num_seqs=100, speculative_config=KNOWN)
    runner = llm.engine._runner
    captured = runner.num_graphs
    know(llm, token_ids(plain), acceptance=0.9)
    before = torch.cuda.host_memory_stats()["num_host_alloc"]
    kinds = [greedy(19), greedy(14, logprobs=3), SamplingParams(temperature=1.0, top_p=0.9, seed=1, max_tokens=13)]
    llm.generate(PROMPTS * 12, kinds * 32, use_tqdm=False)
    llm.generate(PROMPTS, greedy(20, frequency_penalty=0.5), use_tqdm=False)
    assert torch.cuda.host_memory_stats()["num_host_alloc"] == before
    assert llm.engine.stats.compilations_after_ready == 0
    assert runner.num_graphs == captured > 20
    assert llm.engine.stats.num_accepted_tokens > 0


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A draft model of other heads, sizes and depth."""
    folder = tmp_path_factory.mktemp("draft")
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "head_dim": 64}
    (folder / "config.json").write_text(json.dumps({**QWEN3_0_6B, **sizes}))
    return str(folder)


def draft_of(folder, drafts=4):
    return {"model": str(folder), "num_speculative_tokens": drafts, "adaptive": False}


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_a_model_that_drafts_for_itself_is_right(folder, engine):
    """float32, and the same weights, made from the same seed: greedy and sampled. A draft is computed by other kernels
    than its verdict, so one in some thousands may differ by rounding."""
    params = [
        greedy(60),
        SamplingParams(temperature=1.0, top_p=0.9, seed=1, max_tokens=60, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=2, n=3, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=0.7, top_k=50, min_p=0.02, seed=3, max_tokens=50, ignore_eos=True),
    ] * 2
    expected = token_ids(make(folder).generate(PROMPTS, params, use_tqdm=False))
    llm = make(folder, speculative_config=draft_of(folder), **engine)
    for _ in range(2):  # the second time from the prefix cache
        assert token_ids(llm.generate(PROMPTS, params, use_tqdm=False)) == expected
    stats = llm.engine.stats
    assert stats.num_draft_tokens > 300
    assert stats.num_accepted_tokens > 0.99 * stats.num_draft_tokens
    assert stats.num_free_blocks == stats.num_blocks


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_a_small_draft_model_changes_no_token(folder, small, engine):
    expected = token_ids(make(folder).generate(PROMPTS, greedy(60), use_tqdm=False))
    llm = make(folder, speculative_config=draft_of(small, 3), **engine)
    for _ in range(2):
        assert token_ids(llm.generate(PROMPTS, greedy(60), use_tqdm=False)) == expected
    stats = llm.engine.stats
    assert stats.num_draft_tokens > stats.num_accepted_tokens
    assert (stats.num_free_blocks, stats.compilations_after_ready) == (stats.num_blocks, 0)


def test_a_draft_models_steps_are_captured_before_the_first_request(folder, small):
    """Nothing is compiled, loaded or captured in service, and no pinned memory is new; alone, beside prompts, in
    batches of any size, and with requests whose logits are edited."""
    llm = make(folder, dtype="bfloat16", max_num_seqs=100, speculative_config=draft_of(small))
    runner = llm.engine._runner
    captured = runner.num_graphs
    before = torch.cuda.host_memory_stats()["num_host_alloc"]
    kinds = [greedy(19), greedy(14, logprobs=3), SamplingParams(temperature=1.0, top_p=0.9, seed=1, max_tokens=13)]
    llm.generate(PROMPTS * 12, kinds * 32, use_tqdm=False)
    for count in (1, 2, 3, 5, 7):
        llm.generate(PROMPTS[:count], greedy(20, frequency_penalty=0.5 * (count % 2)), use_tqdm=False)
    assert torch.cuda.host_memory_stats()["num_host_alloc"] == before
    assert llm.engine.stats.compilations_after_ready == 0
    assert runner.num_graphs == captured > 20
    assert llm.engine.stats.num_draft_tokens > 1000


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    """An EAGLE head and an EAGLE-3 head, whose weights are made up."""
    names = ("hidden_size", "vocab_size", "head_dim", "hidden_act", "rms_norm_eps", "rope_theta")
    sizes = {"num_attention_heads": 16, "num_key_value_heads": 4, "intermediate_size": 2048, "num_hidden_layers": 1}
    config = {name: QWEN3_0_6B[name] for name in names} | sizes | {"max_position_embeddings": 2048}
    folders = {}
    for method, more in (("eagle", {}), ("eagle3", {"draft_vocab_size": 32000})):
        folders[method] = tmp_path_factory.mktemp(method)
        said = json.dumps({**config, **more, "architectures": ["LlamaForCausalLM"]})
        (folders[method] / "config.json").write_text(said)
    return folders


def with_head(folder, heads, method, **engine):
    return make(folder, speculative_config={**draft_of(heads[method], 3), "method": method}, **engine)


@pytest.mark.parametrize("engine", ENGINES, ids=str)
@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_a_head_changes_no_token(folder, heads, method, engine):
    params = [greedy(60), SamplingParams(temperature=1.0, seed=2, n=2, max_tokens=40, ignore_eos=True)] * 4
    expected = token_ids(make(folder).generate(PROMPTS, params, use_tqdm=False))
    llm = with_head(folder, heads, method, **engine)
    for _ in range(2):
        assert token_ids(llm.generate(PROMPTS, params, use_tqdm=False)) == expected
    stats = llm.engine.stats
    assert stats.num_draft_tokens > stats.num_accepted_tokens
    assert (stats.num_free_blocks, stats.compilations_after_ready) == (stats.num_blocks, 0)


def test_an_eagle_3_heads_steps_are_captured_before_the_first_request(folder, heads):
    """Nothing is compiled, loaded or captured in service, and no pinned memory is new."""
    llm = with_head(folder, heads, "eagle3", dtype="bfloat16", max_num_seqs=100)
    runner = llm.engine._runner
    captured = runner.num_graphs
    before = torch.cuda.host_memory_stats()["num_host_alloc"]
    kinds = [greedy(19), greedy(14, logprobs=3), SamplingParams(temperature=1.0, top_p=0.9, seed=1, max_tokens=13)]
    llm.generate(PROMPTS * 12, kinds * 32, use_tqdm=False)
    for count in (1, 2, 3, 5, 7):
        llm.generate(PROMPTS[:count], greedy(20, frequency_penalty=0.5 * (count % 2)), use_tqdm=False)
    assert torch.cuda.host_memory_stats()["num_host_alloc"] == before
    assert llm.engine.stats.compilations_after_ready == 0
    assert runner.num_graphs == captured > 20
    assert llm.engine.stats.num_draft_tokens > 1000


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("engine", [{}, {"enforce_eager": True}], ids=str)
def test_an_eagle_3_head_that_knows_is_right(by_token, engine):
    """In captured steps and without: a head of which all drafts must be right, as on the CPU."""
    model = circular_model(context=0.0, sharpness=0.2)
    head = knowing_head(model, torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(3)), by_token)
    prompts = [random_tokens(n, VOCAB_SIZE, seed=n) for n in (1, 3, 40, 17)]
    config = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3, "adaptive": False}
    expected = token_ids(tiny_llm(model, device="cpu").generate(prompts, greedy(40), use_tqdm=False))
    llm = tiny_llm(model, device="cuda", dtype="float32", speculative_config=config, **engine)
    assert token_ids(llm.generate(prompts, greedy(40), use_tqdm=False)) == expected
    assert llm.engine.stats.num_accepted_tokens == llm.engine.stats.num_draft_tokens > 100


def test_memory_holds_both_caches(folder, small):
    """As many blocks as fit, of both models: what a full pool computes is what a small one does."""
    llm = make(folder, num_blocks=None, gpu_memory_utilization=0.5, speculative_config=draft_of(small))
    total = torch.cuda.get_device_properties(0).total_memory
    runner = llm.engine._runner
    held = llm.engine.stats.num_blocks * runner.block_bytes
    assert 0.3 * total < held < 0.5 * total
    assert sum(v.k.nbytes + v.v.nbytes for v in (*runner.caches.views, *runner.drafts.drafter.cache)) == held
    expected = token_ids(make(folder, num_blocks=1024).generate(PROMPTS, greedy(20), use_tqdm=False))
    assert token_ids(llm.generate(PROMPTS, greedy(20), use_tqdm=False)) == expected


def test_the_demo_models():
    """Real weights: in float32 the same texts, and four of five drafts are right."""
    prompts = ["There was a fox named", "Once upon a time", "What is 12 + 30?"]
    params = [greedy(200), SamplingParams(temperature=1.0, seed=3, max_tokens=200), greedy(20)]
    plain = LLM(str(model_path()), dtype="float32", num_blocks=512).generate(prompts, params, use_tqdm=False)
    llm = LLM(str(model_path()), dtype="float32", num_blocks=512, speculative_config=draft_of(draft_path()))
    assert token_ids(llm.generate(prompts, params, use_tqdm=False)) == token_ids(plain)
    assert llm.engine.stats.num_accepted_tokens > 0.7 * llm.engine.stats.num_draft_tokens


def test_the_same_tokens_as_on_the_cpu():
    """A tiny model: Triton kernels against the references, through whole requests with n-grams."""
    prompts = [random_tokens(n, 300, seed=n) * 2 for n in (1, 3, 17, 20, 5, 30, 9)]
    options = {"speculative_config": NGRAM, "max_model_len": 128}
    on_cpu = token_ids(tiny_llm(device="cpu", **options).generate(prompts, greedy(), use_tqdm=False))
    llm = tiny_llm(device="cuda", dtype="float32", **options)
    assert token_ids(llm.generate(prompts, greedy(), use_tqdm=False)) == on_cpu


TREE = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0), (0, 0, 0, 0)]


def tree_of(method, model, tree=TREE):
    config = {"method": method, "model": str(model), "num_speculative_tokens": len(tree), "adaptive": False}
    return {**config, "speculative_token_tree": tree}


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_a_draft_models_tree_does_not_change_greedy_tokens(folder, small, engine):
    """Captured and not, planned ahead and not, behind preemptions and hits of the prefix cache."""
    expected = token_ids(make(folder).generate(PROMPTS, greedy(60), use_tqdm=False))
    for draft in (small, folder):  # one that errs, and the model itself, whose first path is right
        llm = make(folder, speculative_config=tree_of("draft_model", draft), **engine)
        for _ in range(2):
            assert token_ids(llm.generate(PROMPTS, greedy(60), use_tqdm=False)) == expected
        stats = llm.engine.stats
        assert stats.num_free_blocks == stats.num_blocks
        assert stats.compilations_after_ready == 0
        assert draft is small or stats.num_accepted_tokens_per_pos[3] > 0.5 * stats.num_drafts


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("engine", [{}, {"enforce_eager": True}, {"max_num_seqs": 3}], ids=str)
def test_an_eagle_3_heads_tree(by_token, engine):
    """Of a head that knows the first path is right in every step, so its keys and states are where they belong."""
    model = circular_model(context=0.0, sharpness=0.2)
    head = knowing_head(model, torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(3)), by_token)
    prompts = [random_tokens(n, VOCAB_SIZE, seed=n) for n in (1, 3, 40, 17)]
    expected = token_ids(tiny_llm(model, device="cpu").generate(prompts, greedy(40), use_tqdm=False))
    llm = tiny_llm(model, device="cuda", dtype="float32", speculative_config=tree_of("eagle3", head), **engine)
    for _ in range(2):
        assert token_ids(llm.generate(prompts, greedy(40), use_tqdm=False)) == expected
    stats = llm.engine.stats
    accepted = stats.num_accepted_tokens_per_pos
    assert accepted[0] == stats.num_drafts and accepted[3] > stats.num_drafts / 2  # all but where texts end
    assert stats.compilations_after_ready == 0


def test_a_trees_seeds_penalties_and_scores():
    """As on the CPU, with a head that errs."""
    model = circular_model(sharpness=0.4)
    head = knowing_head(model, torch.arange(VOCAB_SIZE), by_token=True, noise=0.12)
    params = [
        greedy(30, logprobs=1),
        SamplingParams(temperature=1.0, seed=5, max_tokens=30, ignore_eos=True),
        SamplingParams(temperature=0.8, seed=6, top_p=0.9, frequency_penalty=0.5, max_tokens=30, ignore_eos=True),
    ]
    prompts = [random_tokens(n, VOCAB_SIZE, seed=n) for n in (5, 40, 17)]
    options = {"dtype": "float32", "speculative_config": tree_of("eagle3", head)}
    plain = tiny_llm(model, device="cuda", dtype="float32")
    expected = token_ids(plain.generate(prompts, params, use_tqdm=False))
    llm = tiny_llm(model, device="cuda", **options)
    assert token_ids(llm.generate(prompts, params, use_tqdm=False)) == expected
    assert llm.engine.stats.num_accepted_tokens > 20

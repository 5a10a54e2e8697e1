"""torch.compile around a model: the same tokens, no compilation after the start, nothing of the pool in the graph."""

import dataclasses
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
from support.engines import greedy, shallow_checkpoint, tiny_checkpoint, tiny_llm, token_ids
from support.tiny_models import PagedRunner, random_tokens, tiny_config, write_checkpoint
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache, run_and_get_code
from transformers import AutoConfig, AutoModelForCausalLM

from bench.known_texts import drafter_of
from tritonllm import LLM
from tritonllm.config.engine import CompilationConfig, EngineConfig
from tritonllm.engine.schedule.speculation import Drafting
from tritonllm.engine.start.start_compilers import compiled_if_asked
from tritonllm.kernels.compile.aot import pretend, target_of
from tritonllm.layers.attention import Attention
from tritonllm.models.compiled import CompiledModel
from tritonllm.models.decoder import Decoder
from tritonllm.models.fallback import fallback_spec, load_fallback
from tritonllm.models.families import spec_from_config
from tritonllm.models.weights import dummy_weights

CPU = torch.device("cpu")
PROMPTS = [[5, 6, 7], [9], list(range(10, 50)), [3] * 17, [5, 6, 7, 8, 9]]
SMALL = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 88,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
}
_ROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "rope_theta": 10000.0}
_ROPE |= {"short_mscale": 1.1, "long_mscale": 1.2, "original_max_position_embeddings": 128}
LONGROPE = {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": _ROPE}


def eager(**fields):
    return {"compilation_config": {"mode": 3, "backend": "eager", **fields}}


@pytest.fixture
def must_fit(monkeypatch):
    """A step that no graph was made for, which would run without a compiler, is an error."""
    set_stance = torch.compiler.set_stance

    def strict(stance):
        assert stance == "eager_on_recompile"
        return set_stance("fail_on_recompile")

    monkeypatch.setattr(torch.compiler, "set_stance", strict)


def compiled(model, backend="eager", **limits):
    return CompiledModel(model, backend, **{"max_num_seqs": 8, "max_num_batched_tokens": 64, **limits})


def decoder(family="qwen3", dtype=torch.float32, device=CPU, **fields):
    spec = spec_from_config(tiny_config(family, **{"num_hidden_layers": 2, **fields}))
    return Decoder(spec, dtype=dtype, device=device, max_model_len=128)


def paged(model):
    """A driver of the steps, which asks a module where its parameters are."""
    if isinstance(model, CompiledModel):
        model.parameters = model._model.parameters
    return PagedRunner(model)


FAMILIES = ["llama", "qwen3", "gemma2", "gpt2", "falcon", "cohere", "opt", "qwen2_moe", "gpt_oss", "ministral3"]
OF_MAKE_TEST = ["qwen3", "gpt2", "gpt_oss"]


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in OF_MAKE_TEST else pytest.mark.long) for name in FAMILIES]
)
def test_greedy_tokens_are_the_same(must_fit, family):
    """Prompts in chunks, beside decodes, alone; nothing is compiled for any of these steps."""
    folder = str(shallow_checkpoint(family, layers=2))  # each layer is traced; families have two kinds at most
    settings = {"block_size": 4, "num_blocks": 64, "max_num_seqs": 3}
    settings |= {"max_num_batched_tokens": 16, "skip_tokenizer_init": True}
    expected = token_ids(LLM(folder, **settings).generate(PROMPTS, greedy(), use_tqdm=False))
    llm = LLM(folder, **settings, **eager())
    ready = counters["stats"]["unique_graphs"]
    assert token_ids(llm.generate(PROMPTS, greedy(), use_tqdm=False)) == expected
    alone = [token_ids(llm.generate([prompt], greedy(), use_tqdm=False))[0] for prompt in PROMPTS]
    assert alone == expected
    assert counters["stats"]["unique_graphs"] == ready
    assert llm.engine.stats.compilations_after_ready == 0


def test_drafts_are_verified_in_the_compiled_graph(must_fit, monkeypatch):
    monkeypatch.setattr(Drafting, "now", lambda self, running: self.most)
    folder, settings = str(tiny_checkpoint("llama")), {"block_size": 4, "num_blocks": 64, "max_num_seqs": 3}
    settings |= {"max_num_batched_tokens": 16, "skip_tokenizer_init": True}
    expected = token_ids(LLM(folder, **settings).generate(PROMPTS, greedy(20), use_tqdm=False))
    llm = LLM(folder, **settings, **eager(), speculative_config="bench.known_texts:make:3")
    drafter_of(llm).know([[*p, *ids] for p, ids in zip(PROMPTS, expected, strict=True)], 0.7)
    ready = counters["stats"]["unique_graphs"]
    assert token_ids(llm.generate(PROMPTS, greedy(20), use_tqdm=False)) == expected
    assert llm.engine.stats.num_accepted_tokens > 20
    assert counters["stats"]["unique_graphs"] == ready


@pytest.mark.parametrize("options", [{"prompt_logprobs": 2}, {"logprobs": 2}])
def test_log_probabilities_are_the_same(must_fit, options):
    params = greedy(4, **options)
    plain, got = (
        tiny_llm(**more).generate([{"prompt_token_ids": PROMPTS[2]}], params, use_tqdm=False) for more in ({}, eager())
    )
    for mine, other in ((got[0].prompt_logprobs, plain[0].prompt_logprobs), (got[0].outputs, plain[0].outputs)):
        assert str(mine) == str(other)


def transformers_model(folder, name, **fields):
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **SMALL, **fields)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    settings = {"trust_remote_code": False, "load_format": "auto", "seed": 0, "max_model_len": 128}
    spec = fallback_spec(folder, trust_remote_code=False)
    return [load_fallback(folder, spec, dtype=torch.float32, device=CPU, **settings) for _ in range(2)]


@pytest.mark.filterwarnings("ignore:.*does not run natively:UserWarning")
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("helium", {"head_dim": 16}),
        ("starcoder2", {"sliding_window": 9}),
        ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    ],
)
def test_models_of_transformers(must_fit, tmp_path, name, fields):
    plain, other = transformers_model(tmp_path, name, **fields)
    model, prompt = compiled(other), random_tokens(20, 101, seed=1)
    assert paged(model).greedy(prompt, 6) == paged(plain).greedy(prompt, 6)


@pytest.mark.filterwarnings("ignore:.*does not run natively:UserWarning")
def test_rows_of_a_model_of_transformers(tmp_path):
    plain, other = transformers_model(tmp_path, "helium", head_dim=16)
    model, seen = compiled(other), []
    runner = paged(plain)
    plain_forward = plain.forward

    def both(ids, positions, metadata, cache, rows=None):
        wanted = torch.tensor([4, 1])
        seen.append((model(ids, positions, metadata, cache, wanted), plain_forward(ids, positions, metadata, cache)))
        return seen[-1][1]

    plain.forward = both
    runner.greedy(random_tokens(6, 101, seed=1), 1)
    torch.testing.assert_close(seen[0][0], seen[0][1][[4, 1]])


@pytest.mark.filterwarnings("ignore:.*does not run natively:UserWarning")
def test_what_cannot_be_compiled_is_refused(tmp_path):
    """Frequencies that the largest position decides, which is on the device."""
    _, model = transformers_model(tmp_path, "phimoe", **LONGROPE)
    with pytest.raises(ValueError, match=r"^compilation_config: torch.compile cannot compile Phimoe.*--compile"):
        compiled(model)


@pytest.mark.filterwarnings("ignore:.*does not run natively:UserWarning")
def test_by_default_a_model_of_transformers_in_graphs_is_compiled(tmp_path, caplog):
    """If torch can; native models are not, nor what is to run eagerly."""
    config = EngineConfig.from_kwargs(model="m", compilation_config={"backend": "eager"}, max_num_seqs=8)
    plain, model = transformers_model(tmp_path, "helium", head_dim=16)
    assert compiled_if_asked(model, config) is model  # on a CPU there are no graphs
    model.supports_graphs = True
    assert compiled_if_asked(model, dataclasses.replace(config, enforce_eager=True)) is model
    off = dataclasses.replace(config, compilation_config=CompilationConfig(mode=0))
    assert compiled_if_asked(model, off) is model
    assert compiled_if_asked(native := decoder(), config) is native
    prompt = random_tokens(20, 101, seed=1)
    fast = compiled_if_asked(model, config)
    assert isinstance(fast, CompiledModel) and paged(fast).greedy(prompt, 4) == paged(plain).greedy(prompt, 4)


@pytest.mark.filterwarnings("ignore:.*does not run natively:UserWarning")
def test_by_default_what_cannot_be_compiled_runs_without(tmp_path, caplog):
    config = EngineConfig.from_kwargs(model="m", compilation_config={"backend": "eager"}, max_num_seqs=8)
    plain, model = transformers_model(tmp_path, "phimoe", **LONGROPE)
    model.supports_graphs = True
    assert compiled_if_asked(model, config) is model
    assert "torch.compile cannot compile Phimoe" in caplog.text
    prompt = random_tokens(20, 101, seed=1)
    assert paged(model).greedy(prompt, 4) == paged(plain).greedy(prompt, 4)


def test_the_graph_has_no_pool():
    """Its inputs are weights, tables, ids, positions and rows: no tensor of the cache or the batch."""
    graphs = []

    def backend(graph, inputs):
        graphs.append((graph, inputs))
        return graph

    model = decoder()
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), *model._tables)}
    compiled(model, backend)
    assert len(graphs) == 2  # all rows, some rows
    for (graph, inputs), others in zip(graphs, ([(2,), (2,)], [(4,), (4,), (2,)]), strict=True):
        foreign = [t for t in inputs if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in own]
        assert sorted(tuple(map(int, t.shape)) for t in foreign) == sorted(others)
        calls = [str(node.target) for node in graph.graph.nodes if "attention_of_model" in str(node.target)]
        assert len(calls) == model.spec.num_layers
        assert not any("store" in str(node.target) for node in graph.graph.nodes)


@pytest.mark.long
def test_inductor(must_fit, tmp_path):
    """The default backend: the same tokens, and code that calls attention on the product itself, not on a copy."""
    settings = {"block_size": 4, "num_blocks": 64, "skip_tokenizer_init": True}
    write_checkpoint(tmp_path, tiny_config("qwen3", num_hidden_layers=1))
    folder = str(tmp_path)
    expected = token_ids(LLM(folder, **settings).generate(PROMPTS, greedy(), use_tqdm=False))
    with fresh_cache():
        llm, codes = run_and_get_code(lambda: LLM(folder, **settings, compilation_config=3))
    assert len(codes) == 2
    for code in codes:
        assert code.count("attention_of_model") > 0
        assert "clone" not in code and "auto_functionalized" not in code
    assert token_ids(llm.generate(PROMPTS, greedy(), use_tqdm=False)) == expected


def test_a_step_without_a_graph_runs_all_the_same(caplog):
    """Here another number of threads, by which Dynamo guards: no compilation, the same result, one warning."""
    model, plain = decoder(), decoder()
    dummy_weights(model, seed=0)
    dummy_weights(plain, seed=0)
    prompt = random_tokens(9, model.spec.vocab_size, seed=1)
    expected, model = PagedRunner(plain).greedy(prompt, 3), compiled(model)
    runner, ready, threads = paged(model), counters["stats"]["unique_graphs"], torch.get_num_threads()
    runner.greedy(prompt, 3)
    assert "fits no graph" not in caplog.text
    torch.set_num_threads(threads + 1)
    try:
        assert paged(model).greedy(prompt, 3) == expected
    finally:
        torch.set_num_threads(threads)
    assert counters["stats"]["unique_graphs"] == ready and caplog.text.count("fits no graph") == 1


def test_a_rehearsal_runs_what_is_captured(monkeypatch):
    """All layers: a capture may launch nothing that has not run before."""
    ran = []
    attend = Attention.attend
    monkeypatch.setattr(Attention, "attend", lambda self, *args: ran.append(self) or attend(self, *args))
    inner = decoder()
    dummy_weights(inner, seed=0)
    layers, model = [layer.attention for layer in inner.layers], compiled(inner)
    assert not ran  # attention gives zeros while the graphs are compiled
    with model.rehearsal():
        paged(model).greedy([1, 2, 3], 1)
    assert ran == layers


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gemma2"])
def test_every_size_of_a_gpu_has_a_graph(family):
    """Traced for an H200 without one: what is fused depends on the size, and each way is compiled at the start."""
    large = {"hidden_size": 2048, "intermediate_size": 4096, "num_attention_heads": 16, "num_key_value_heads": 8}
    large["num_hidden_layers"] = 2
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    with pretend(target_of(90)):
        model = compiled(
            decoder(family, torch.bfloat16, torch.device("meta"), **large),
            backend,
            max_num_seqs=256,
            max_num_batched_tokens=8192,
        )
        kind = model._parts.kind
        known = {kind(*size) for size in model._sizes(8192, 256)}
        assert 1 < len(known) == len(graphs) < 12  # one token, or one row, needs none of its own
        for tokens in (*range(1, 700), 2048, 4096, 8192):
            for rows in (None, 1, 2, 8, 16, 17, 32, 64, 65, 96, 256):
                assert (rows is not None and rows >= tokens) or kind(tokens, rows) in known, (tokens, rows)


def test_engines_do_not_share_graphs():
    """Two models in one process, each with its own operator; torch lets both go."""
    inner = [decoder() for _ in range(2)]
    for seed, model in enumerate(inner):
        dummy_weights(model, seed)
    plain = [PagedRunner(model).greedy([1, 2, 3], 5) for model in inner]
    both = [compiled(model) for model in inner]
    assert [paged(model).greedy([1, 2, 3], 5) for model in both] == plain
    assert plain[0] != plain[1]
    alive = [weakref.ref(model) for model in inner]
    del model, inner, both
    gc.collect()
    assert [model() for model in alive] == [None, None]


def test_an_error_in_a_step_leaves_nothing_bound():
    model = compiled(decoder())
    with pytest.raises(AttributeError):
        model(torch.tensor([1]), torch.tensor([0]), SimpleNamespace(), [None] * model.spec.num_layers)
    assert model._bound is None

"""The engine of examples/nano.py: its tokens are those of LLM, whatever waits, is cut into chunks or preempted."""

import runpy
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engines import tiny_checkpoint
from support.tiny_models import random_tokens, tiny_config, write_checkpoint

from examples import nano
from tritonllm import LLM, SamplingParams
from tritonllm.demo import model_path

SOURCE = Path(nano.__file__)
LIMITS = {  # of nano's engine: everything at once; few seats; chunks; few blocks, so that requests give up theirs
    "all at once": {"max_seqs": 32, "num_blocks": 512, "max_len": 256},
    "few seats": {"max_seqs": 3, "num_blocks": 512, "max_len": 256},
    "chunks": {"max_seqs": 8, "num_blocks": 512, "budget": 8, "max_len": 256},
    "few blocks": {"max_seqs": 8, "num_blocks": 12, "budget": 64, "max_len": 192},
}


def llm_of(folder: Path) -> LLM:
    sizes = {"num_blocks": 256, "max_num_seqs": 16, "max_num_batched_tokens": 512}
    return LLM(str(folder), dtype="float32", skip_tokenizer_init=True, **sizes)


@cache
def demo() -> LLM:
    return llm_of(model_path())


def answers(llm: LLM, requests: list[nano.Request], stops: list[int]) -> list[list[int]]:
    params = [
        SamplingParams(
            temperature=r.temperature, seed=r.seed, max_tokens=r.max_tokens, ignore_eos=True, stop_token_ids=stops
        )
        for r in requests
    ]
    outputs = llm.generate([{"prompt_token_ids": list(r.tokens)} for r in requests], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def many(vocab: int, stops: list[int], temperature: float = 0.0, count: int = 20) -> list[nano.Request]:
    """Prompts of 1 to 90 tokens, outputs of 1 to 40."""
    sizes = [(1 + 37 * i % 90, 1 + 23 * i % 40) for i in range(count)]
    return [
        nano.Request(random_tokens(prompt, vocab, seed=i), output, temperature, i, frozenset(stops))
        for i, (prompt, output) in enumerate(sizes)
    ]


def test_it_has_300_lines():
    assert len(SOURCE.read_text(encoding="utf-8").splitlines()) <= 300


def test_it_runs_as_is(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [str(SOURCE), str(model_path()), "47 + 38 ="])
    runpy.run_path(str(SOURCE), run_name="__main__")
    assert capsys.readouterr().out.startswith("47 + 38 = 85\n")


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tokens_are_those_of_llm(limits, temperature):
    """Drawn ones, too: a token depends on its seed and its number, not on what else is in the step."""
    stops = [2, 0]
    expected = answers(demo(), many(2048, stops, temperature), stops)
    assert any(len(tokens) < r.max_tokens for tokens, r in zip(expected, many(2048, stops), strict=True))
    engine = nano.Engine(model_path(), torch.float32, "cpu", **LIMITS[limits])
    assert engine.generate(many(2048, stops, temperature)) == expected
    assert (engine.scheduler.preemptions > 0) == (limits == "few blocks")
    assert sorted(engine.scheduler.free) == list(range(LIMITS[limits]["num_blocks"]))  # no block is lost, none is twice


def test_an_engine_answers_again():
    engine = nano.Engine(model_path(), torch.float32, "cpu", **LIMITS["few blocks"])
    first = engine.generate(many(2048, [], 0.9, count=6))
    assert engine.generate(many(2048, [], 0.9, count=6)) == first
    others = many(2048, [], 0.9, count=6)
    for request in others:
        request.seed += 100
    assert engine.generate(others) != first


class Graph:
    """In the place of a CUDA graph: the same step again, on the tensors that it was captured with."""

    def __init__(self) -> None:
        self.count = 0

    def pool(self) -> None:
        """Where a graph's memory would lie."""

    def replay(self) -> None:
        self.count += 1
        self.engine.compute(self.engine.graphs[self.size][1], 1)


def test_captured_steps_are_padded(monkeypatch):
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, pool: nullcontext())
    engine = nano.Engine(model_path(), torch.float32, "cpu", num_blocks=512, max_seqs=12, max_len=256)
    before = engine.cache.clone()
    for size in (12, 8, 4, 2, 1):
        engine.capture(size)
        graph, _ = engine.graphs[size]
        graph.engine, graph.size = engine, size
    assert torch.equal(engine.cache, before)  # padding stores nothing
    assert engine.generate(many(2048, [2, 0], 0.8)) == answers(demo(), many(2048, [2, 0], 0.8), [2, 0])
    assert all(graph.count for graph, _ in engine.graphs.values())


@pytest.mark.gpu
def test_captured_steps_on_a_gpu():
    """In float32 the tokens are those of the CPU. In bfloat16 those with graphs are mostly those without them."""
    sizes = {"max_seqs": 12, "num_blocks": 512, "max_len": 256}
    expected = nano.Engine(model_path(), torch.float32, "cpu", **sizes).generate(many(2048, [2, 0]))
    captured = nano.Engine(model_path(), torch.float32, "cuda", **sizes)
    assert sorted(captured.graphs) == [1, 2, 4, 8, 12]
    assert captured.generate(many(2048, [2, 0])) == expected
    outputs = []
    for graphs in (True, False):
        engine = nano.Engine(model_path(), **sizes)
        engine.graphs = engine.graphs if graphs else {}
        outputs.append(engine.generate(many(2048, [2, 0])))
    same = [a == b for a, b in zip(*outputs, strict=True)]
    assert sum(same) >= 0.8 * len(same)  # padding changes the sizes of products, and so their last bits


CONFIGS = {
    "llama": {},
    "llama tied": {"tie_word_embeddings": True, "num_key_value_heads": 4},
    "llama with all biases": {"attention_bias": True, "mlp_bias": True},
    "llama 3": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "qwen3 tied": {"tie_word_embeddings": True},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_families(name, tmp_path):
    config = tiny_config(name.split()[0]) | CONFIGS[name]
    write_checkpoint(tmp_path, config, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    expected = answers(llm_of(tmp_path), many(101, [2], count=8), [2])
    engine = nano.Engine(tmp_path, torch.float32, "cpu", num_blocks=14, max_seqs=4, budget=40, max_len=160)
    assert engine.generate(many(101, [2], count=8)) == expected


def test_what_it_does_not_know_is_refused(tmp_path):
    write_checkpoint(tmp_path, tiny_config("gemma2"))
    with pytest.raises(ValueError, match=r"must be one of LlamaForCausalLM, .*Qwen3ForCausalLM"):
        nano.Engine(tmp_path)
    write_checkpoint(tmp_path, tiny_config("mistral") | {"sliding_window": 8})
    with pytest.raises(ValueError, match="without sliding_window"):
        nano.Engine(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"), r"no tensor model\.layers\.1\.mlp\.up_proj"),
        (lambda tensors: tensors.update(extra=torch.ones(1)), "reads these tensors of the checkpoint: extra"),
    ],
)
def test_a_checkpoint_must_fit(change, message, tmp_path):
    write_checkpoint(tmp_path, tiny_config("qwen3"))
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        nano.Engine(tmp_path)


@pytest.mark.parametrize(("prompt", "max_tokens"), [([], 1), ([1], 0), ([1] * 60, 5)])
def test_a_request_must_fit(prompt, max_tokens):
    engine = nano.Engine(tiny_checkpoint(), num_blocks=4, max_len=256)
    with pytest.raises(ValueError, match=r"at least 1, and 64 together, got \d+ \+ \d"):
        engine.generate([nano.Request(prompt, max_tokens)])

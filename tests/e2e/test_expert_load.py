"""How many tokens went to each expert, against a count of what transformers' routers choose for the same tokens."""

import pytest
import torch
from support.engines import NGRAMS, greedy, tiny_checkpoint, tiny_llm, token_ids
from support.expert_choice import experts_of
from support.tiny_models import random_tokens
from support.tiny_tokenizer import VOCAB_SIZE
from transformers import AutoModelForCausalLM

from tritonllm.cli import main
from tritonllm.experts.load import ExpertLoad

pytestmark = pytest.mark.usefixtures("imported_ranks")
PLAIN = {"count_expert_load": True, "enable_prefix_caching": False}


def prompts_of(*lengths):
    return [random_tokens(length, VOCAB_SIZE, seed) for seed, length in enumerate(lengths)]


def generate(llm, prompts, tokens):
    return token_ids(llm.generate(prompts, greedy(tokens), use_tqdm=False))


def counted(family, prompts, outputs, experts):
    """``[layers][experts]``: of all tokens that were computed, in the last layer of those that were sampled from."""
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint(family), dtype=torch.float32).eval()
    model.set_experts_implementation("eager")
    counts = None
    for prompt, output in zip(prompts, outputs, strict=True):
        with torch.no_grad(), experts_of(model) as chosen:
            model(torch.tensor([[*prompt, *output[:-1]]]))
        chosen[-1] = chosen[-1][len(prompt) - 1 :]
        new = [torch.bincount(ids.flatten(), minlength=experts) for ids in chosen]
        counts = new if counts is None else [a + b for a, b in zip(counts, new, strict=True)]
    return [tuple(of_layer.tolist()) for of_layer in counts]


def assert_counted(load, family, prompts, outputs):
    experts = len(next(iter(load.layers.values())))
    assert list(load.layers.values()) == counted(family, prompts, outputs, experts)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_counts_are_those_of_the_routers(family, asynchronous):
    """With prompts in chunks, decodes beside them, and rows that are padded: three of them have room for four."""
    llm = tiny_llm(tiny_checkpoint(family), **PLAIN, max_num_batched_tokens=24, async_scheduling=asynchronous)
    prompts = prompts_of(50, 3, 17)
    outputs = generate(llm, prompts, 6)
    load = llm.expert_load()
    assert load.architecture == llm.engine.model.spec.architecture
    assert_counted(load, family, prompts, outputs)


def test_reset_and_add():
    llm = tiny_llm(tiny_checkpoint("qwen3_moe"), **PLAIN)
    empty = llm.expert_load()
    assert all(set(counts) == {0} for counts in empty.layers.values())
    prompts = prompts_of(9, 12)
    outputs = generate(llm, prompts, 4)
    first = llm.expert_load()
    assert_counted(first, "qwen3_moe", prompts, outputs)
    generate(llm, prompts, 4)
    assert llm.expert_load() == first + first
    llm.reset_expert_load()
    assert llm.expert_load() == empty
    generate(llm, prompts[:1], 3)
    assert_counted(llm.expert_load(), "qwen3_moe", prompts[:1], [outputs[0][:3]])


@pytest.mark.parametrize("options", [{}, {"deterministic": True}])
def test_tokens_are_those_of_an_engine_that_does_not_count(options):
    prompts = prompts_of(30, 5, 2)
    plain = generate(tiny_llm(tiny_checkpoint("glm4_moe"), **options), prompts, 8)
    llm = tiny_llm(tiny_checkpoint("glm4_moe"), **options, count_expert_load=True)
    assert generate(llm, prompts, 8) == plain
    dense = llm.engine.model.spec.num_layers - len(llm.expert_load().layers)
    assert min(llm.expert_load().layers) == dense > 0  # the first layers have no experts


def test_drafts_are_counted():
    """What verifies computes three tokens more of a sequence, if that many may still come, found or not."""
    prompts = [prompt * 3 for prompt in prompts_of(6, 7)]
    llm = tiny_llm(tiny_checkpoint("qwen3_moe"), **PLAIN, speculative_config=NGRAMS)
    outputs = generate(llm, prompts, 12)
    stats, layers = llm.engine.stats, llm.expert_load().layers
    rejected = stats.num_draft_tokens - stats.num_accepted_tokens
    assert stats.num_draft_tokens > 0
    tokens = sum(len(p) + len(o) - 1 for p, o in zip(prompts, outputs, strict=True))
    most = tokens + 3 * sum(len(o) - 1 for o in outputs)
    assert 2 * (tokens + rejected) <= sum(layers[0]) <= 2 * most


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_count_all_tokens_once(size):
    llm = tiny_llm(tiny_checkpoint("qwen3_moe"), **PLAIN, tensor_parallel_size=size, enable_expert_parallel=size == 2)
    prompts = prompts_of(20, 4)
    outputs = generate(llm, prompts, 5)
    assert_counted(llm.expert_load(), "qwen3_moe", prompts, outputs)


def test_a_file_of_loads(tmp_path):
    llm = tiny_llm(tiny_checkpoint("qwen3_moe"), **PLAIN)
    generate(llm, prompts_of(9), 4)
    llm.expert_load().save(tmp_path / "loads.json")
    assert ExpertLoad.read(tmp_path / "loads.json") == llm.expert_load()
    assert [path.name for path in tmp_path.iterdir()] == ["loads.json"]


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("qwen3", {"count_expert_load": True}, "count_expert_load: Qwen3ForCausalLM has no experts: leave it out"),
        ("qwen3_moe", {"count_expert_load": True, "compilation_config": 3}, "leave it off with count_expert_load"),
        ("qwen3_moe", {"count_expert_load": 1}, "count_expert_load must be of type bool"),
    ],
)
def test_what_cannot_be_counted(family, settings, message):
    with pytest.raises(ValueError, match=message):
        tiny_llm(tiny_checkpoint(family), **settings)


def test_an_engine_that_does_not_count_says_so():
    llm = tiny_llm(tiny_checkpoint("qwen3_moe"))
    for ask in (llm.expert_load, llm.reset_expert_load):
        with pytest.raises(ValueError, match="make it with count_expert_load=True"):
            ask()


def test_the_command_line_writes_them(tmp_path, capsys):
    folder, file = tiny_checkpoint("qwen3_moe"), tmp_path / "load.json"
    arguments = [
        "generate",
        str(folder),
        "--prompt",
        "the fox",
        "--max-tokens",
        "3",
        "--ignore-eos",
        "--num-blocks",
        "64",
    ]
    assert main([*arguments, "--expert-load", str(file)]) == 0
    llm = tiny_llm(folder, **PLAIN)
    llm.generate(["the fox"], greedy(3), use_tqdm=False)
    assert ExpertLoad.read(file) == llm.expert_load()
    with pytest.raises(SystemExit) as end:
        main([*arguments, "--expert-load", str(tmp_path / "nowhere" / "load.json")])
    assert end.value.code == 2 and "is no folder" in capsys.readouterr().err

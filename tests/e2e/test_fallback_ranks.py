"""Models that run through transformers on ranks, processes that meet by gloo, give the tokens of one process."""

import json
import warnings
from pathlib import Path
from shutil import copytree

import pytest
import torch
from models.causal_types import VOCABULARY, build, tiny
from safetensors.torch import load_file, save_file
from support.engines import greedy, tiny_checkpoint, tiny_llm, token_ids
from support.tiny_models import random_tokens
from support.wishes import SIZES, generate
from transformers import AutoModelForCausalLM

from tritonllm import LLM, SamplingParams

pytestmark = [
    pytest.mark.usefixtures("imported_ranks"),
    pytest.mark.filterwarnings("ignore:.*does not run natively:UserWarning"),
]
WISHES = [
    greedy(32),
    SamplingParams(temperature=1.0, seed=1, max_tokens=18, ignore_eos=True),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=2, max_tokens=14, ignore_eos=True),
    greedy(12, repetition_penalty=1.3),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("beam")
    build(tiny("beam"), "beam").save_pretrained(found)
    return found


def llm_of(folder: Path, **options) -> LLM:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return tiny_llm(folder, **{**SIZES, "skip_tokenizer_init": True, "max_model_len": 96, **options})


@pytest.fixture(scope="module")
def alone(folder):
    return llm_of(folder)


def prompts_of(lengths, seed):
    """With beginnings in common, for the prefix cache."""
    shared = random_tokens(9, VOCABULARY, seed)
    return [shared[: n // 2] + random_tokens(n - n // 2, VOCABULARY, seed + 1 + i) for i, n in enumerate(lengths)]


def answers(llm, seed=0):
    """Of more requests than there are blocks for, so that prompts are cut and some are preempted."""
    prompts = prompts_of([3, 11, 26, 7, 18, 33, 9, 4], seed)
    return token_ids(generate(llm, prompts, WISHES * 2))


@pytest.fixture(
    scope="module",
    params=[
        {"tensor_parallel_size": 2},
        pytest.param({"pipeline_parallel_size": 2, "async_scheduling": True}, marks=pytest.mark.long),
        pytest.param({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, marks=pytest.mark.long),
    ],
    ids=["two ranks", "two stages", "two stages of two ranks"],
)
def llm(folder, request):
    return llm_of(folder, **request.param)


def test_requests_together(llm, alone):
    before = llm.engine.stats.preemptions
    assert answers(llm) == answers(alone)
    stats = llm.engine.stats
    assert stats.preemptions > before and stats.num_free_blocks == stats.num_blocks
    stages = llm.engine.config.parallel.pipeline_parallel_size
    assert llm.engine.model.spec.num_layers == alone.engine.model.spec.num_layers // stages


REFUSED = {
    "split keys": (
        {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
        "decode_context_parallel_size=2: BeamForCausalLM runs through transformers",
    ),
    "whole experts": (
        {"tensor_parallel_size": 2, "enable_expert_parallel": True},
        "enable_expert_parallel: BeamForCausalLM runs through transformers",
    ),
    "heads": ({"tensor_parallel_size": 3}, "must divide 4, the number of heads of .*: set tensor_parallel_size=1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_work(folder, name):
    options, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        llm_of(folder, **options)


@pytest.fixture(scope="module")
def other(folder, tmp_path_factory) -> Path:
    """The same architecture with other weights."""
    found = tmp_path_factory.mktemp("other") / "model"
    copytree(folder, found)
    for file in found.glob("*.safetensors"):
        tensors = {name: tensor.flip(0).contiguous() for name, tensor in load_file(file).items()}
        save_file(tensors, file, metadata={"format": "pt"})
    return found


@pytest.mark.long
def test_other_weights(folder, alone, other, tmp_path):
    """Of a folder, or one by one; level 2 of sleep wants all of them."""
    llm, fresh = llm_of(folder, enable_sleep_mode=True), answers(llm_of(other))
    before = answers(alone)
    llm.reload_weights(str(other))
    assert answers(llm) == fresh != before
    llm.sleep(level=2)
    llm.wake_up()
    trained = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    weights = list(trained.named_parameters())
    llm.llm_engine.load_weights(weights[1:])
    assert llm.engine.stats.takes_requests is False
    assert llm.llm_engine.load_weights(weights[:1]) == {weights[0][0]}
    assert answers(llm) == before
    with pytest.raises(ValueError, match=r"reload_weights: .* holds a"):
        llm.reload_weights(str(tiny_checkpoint()))
    copytree(other, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    with pytest.raises(ValueError, match="describes another model: its rms_norm_eps differs"):
        llm.reload_weights(str(tmp_path / "model"))
    assert answers(llm) == before


def test_other_weights_of_ranks(llm, folder, alone, other):
    fresh, before = answers(llm_of(other)), answers(alone)
    llm.reload_weights(str(other))
    assert answers(llm) == fresh != before
    trained = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    llm.llm_engine.load_weights(trained.named_parameters())
    assert answers(llm) == before

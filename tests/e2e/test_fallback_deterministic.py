"""With ``deterministic=True`` a request has the same bits in any batch, also with models that run through
transformers."""

import warnings
from pathlib import Path
from typing import Any

import pytest
from models.causal_types import VOCABULARY, build, tiny
from support.engines import tiny_llm
from support.tiny_models import random_tokens

from tritonllm import LLM, SamplingParams

PROMPTS = [random_tokens(n, VOCABULARY, seed=n) for n in (1, 3, 17, 33)]
PROMPTS.append([*PROMPTS[-1][:20], 5, 6, 5, 6, 5])  # begins as another
PARAMS = [
    SamplingParams(temperature=0, max_tokens=14, logprobs=3, ignore_eos=True),
    SamplingParams(temperature=0.8, top_p=0.9, seed=4, max_tokens=14, logprobs=1, ignore_eos=True, prompt_logprobs=1),
]
WANTED = [PARAMS[i % 2] for i in range(len(PROMPTS))]
HOW: dict[str, dict[str, Any]] = {
    "a batch, then from the cache": {},
    "small chunks": {"max_num_batched_tokens": 13, "max_num_seqs": 5},
    "few blocks, so that some are preempted": {"num_blocks": 28, "max_num_seqs": 5},
    "drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}},
}

OF_MAKE_TEST = ("a batch, then from the cache", "drafts")


@pytest.fixture(scope="module", params=["beam", pytest.param("jetmoe", marks=pytest.mark.long)])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp(request.param)
    build(tiny(request.param), request.param).save_pretrained(found)
    return found


def llm_of(folder: Path, **options: Any) -> LLM:
    sizes = {"skip_tokenizer_init": True, "max_model_len": 64, "dtype": "float32", "deterministic": True}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return tiny_llm(folder, **{**sizes, **options})


def told(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[Any]:
    """All that requests are told, as exact numbers."""
    found = []
    for output in llm.generate(prompts, params, use_tqdm=False):
        (completion,) = output.outputs
        rows = [row for row in (*completion.logprobs, *(output.prompt_logprobs or ())) if row is not None]
        found.append((completion.token_ids, [{token: x.logprob for token, x in row.items()} for row in rows]))
    return found


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[Any]:
    """Each request by itself, with nothing cached."""
    llm = llm_of(folder, enable_prefix_caching=False)
    return [told(llm, [prompt], [params])[0] for prompt, params in zip(PROMPTS, WANTED, strict=True)]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in OF_MAKE_TEST else pytest.mark.long) for name in HOW]
)
def test_a_request_has_the_same_bits_alone_and_in_any_batch(folder, expected, name):
    llm = llm_of(folder, **HOW[name])
    for _ in range(2 if "cache" in name else 1):
        assert told(llm, PROMPTS[::-1], WANTED[::-1]) == expected[::-1]
    assert "preempted" not in name or llm.engine.stats.preemptions


@pytest.mark.long
@pytest.mark.usefixtures("imported_ranks")
def test_stages_have_the_same_bits(folder, expected):
    assert told(llm_of(folder, pipeline_parallel_size=2, async_scheduling=True), PROMPTS, WANTED) == expected


@pytest.mark.long
def test_without_it_bits_differ(folder, expected):
    llm = llm_of(folder, deterministic=False, enable_prefix_caching=False)
    alone = [told(llm, [prompt], [params])[0] for prompt, params in zip(PROMPTS, WANTED, strict=True)]
    assert told(llm, PROMPTS, WANTED) != alone


def test_sums_over_ranks_are_refused(folder):
    with pytest.raises(ValueError, match=r"the sums over the ranks of tensor_parallel_size=2|has no plan to cut it"):
        llm_of(folder, tensor_parallel_size=2)

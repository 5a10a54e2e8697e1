"""Models that run through transformers on two GPUs give the tokens of one, and the same bits in any batch on one."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from models.causal_types import VOCABULARY, build, tiny
from support.engines import greedy, tiny_llm, token_ids
from support.tiny_models import random_tokens
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from tritonllm import LLM, SamplingParams

pytestmark = pytest.mark.gpu
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
PROMPTS = [random_tokens(n, VOCABULARY, seed=n) for n in (1, 3, 17, 33, 40, 26)]
RANKS = [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}]


@pytest.fixture(scope="module", params=["jetmoe", "beam", "beam, dense", "qwen3_moe", "llama, dense"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With experts, which transformers may choose on the host, and without: those steps are CUDA graphs. The last two
    have a plan for ranks in every release of transformers, and families here, in the place of which it computes."""
    model_type, *dense = request.param.split(", ")
    if model_type not in CONFIG_MAPPING:
        pytest.skip("a type that this release of transformers does not know")
    found, config = tmp_path_factory.mktemp("dense" if dense else "sparse"), tiny(model_type)
    if dense and hasattr(config, "mlp_layer_types"):
        config.mlp_layer_types = ["dense"] * config.num_hidden_layers
    build(config, model_type).save_pretrained(found)
    return found


def skip_without_plan(folder: Path, ranks: dict[str, int]) -> None:
    if "tensor_parallel_size" in ranks and not AutoConfig.from_pretrained(folder).base_model_tp_plan:
        pytest.skip("this release of transformers has no plan to cut the type")


def llm_of(folder: Path, **options: Any) -> LLM:
    sizes = {"skip_tokenizer_init": True, "max_model_len": 96, "dtype": "float32", "compilation_config": 0}
    sizes["model_impl"] = "transformers"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return tiny_llm(folder, **{**sizes, **options})


def answers(llm: LLM) -> list[list[int]]:
    return token_ids(llm.generate(PROMPTS, greedy(32), use_tqdm=False))


@two_gpus
@pytest.mark.parametrize("ranks", RANKS, ids=["ranks", "stages"])
def test_tokens_are_those_of_one_gpu(folder, ranks):
    skip_without_plan(folder, ranks)
    one, two = llm_of(folder), llm_of(folder, **ranks)
    for _ in range(2):  # the second time from the prefix cache
        assert answers(two) == answers(one)
    assert two.engine.stats.compilations_after_ready == 0
    if folder.name.startswith("dense"):
        assert two.engine._runner._runner.num_graphs > 0


@two_gpus
@pytest.mark.parametrize("ranks", RANKS, ids=["ranks", "stages"])
def test_other_weights(folder, ranks, tmp_path):
    """Captured steps go on with them."""
    skip_without_plan(folder, ranks)
    trained = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for parameter in trained.parameters():
        parameter.data = parameter.data.flip(0).contiguous()
    trained.save_pretrained(tmp_path)
    before, fresh = answers(llm_of(folder)), answers(llm_of(tmp_path))
    llm = llm_of(folder, **ranks)
    assert answers(llm) == before
    llm.llm_engine.load_weights((name, parameter.data.cuda()) for name, parameter in trained.named_parameters())
    assert answers(llm) == fresh != before
    llm.reload_weights()
    assert answers(llm) == before


def test_a_request_has_the_same_bits_alone_and_in_a_batch(folder):
    llm = llm_of(folder, deterministic=True, enable_prefix_caching=False)
    params = SamplingParams(temperature=0, max_tokens=9, logprobs=2, ignore_eos=True)

    def told(prompts: list[list[int]]) -> list[Any]:
        found = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
        return [(one.token_ids, [{t: x.logprob for t, x in row.items()} for row in one.logprobs]) for one in found]

    assert told(PROMPTS) == [told([prompt])[0] for prompt in PROMPTS]

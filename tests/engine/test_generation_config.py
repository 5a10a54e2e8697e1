"""What generation_config.json says of the end of an output."""

from types import SimpleNamespace

import pytest
from support.engines import tiny_llm

from tritonllm.config.engine import EngineConfig
from tritonllm.config.sampling_params import SamplingParams
from tritonllm.engine.text.generation_config import default_params, end_tokens, read_generation_config

SPEC = SimpleNamespace(eos_token_ids=(1,), vocab_size=10)


@pytest.mark.parametrize(("given", "ids"), [(None, {1}), (3, {1, 3}), ([3, None, 4], {1, 3, 4}), ([99], {1})])
def test_ids(given, ids):
    assert end_tokens(SPEC, {"eos_token_id": given}) == ids
    assert end_tokens(SPEC, {}) == {1}


@pytest.mark.parametrize("given", [2.0, "2", {"id": 2}, [2, "3"], True])
def test_what_is_no_id(given):
    with pytest.raises(ValueError, match=r"generation_config.json: eos_token_id must be a token id or a list of them"):
        end_tokens(SPEC, {"eos_token_id": given})


def test_a_folder_of_the_home_folder(tmp_path, monkeypatch):
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.5}')
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    assert read_generation_config(f"~/{tmp_path.name}", tmp_path / "other") == {"temperature": 0.5}


def test_entries_that_count_more_than_the_file():
    file = {"temperature": 0.5, "top_k": 20, "max_new_tokens": 7}
    params = default_params("auto", file, {"temperature": 0, "top_k": None, "min_p": 0.1})
    assert (params.temperature, params.top_k, params.min_p, params.max_tokens) == (0, 20, 0.1, 7)
    params = default_params("vllm", file, {"temperature": 0.25})
    assert (params.temperature, params.top_k) == (0.25, SamplingParams().top_k)
    with pytest.raises(ValueError, match=r"override_generation_config has 'n': it may have temperature, "):
        default_params("auto", file, {"n": 2})
    with pytest.raises(ValueError, match=r"^override_generation_config: temperature must .*[^t]$"):
        default_params("auto", file, {"temperature": -1})
    with pytest.raises(ValueError, match=r"^generation_config.json: .*pass generation_config='vllm' to ignore it"):
        default_params("auto", {"temperature": -1}, {"temperature": 1})


def test_it_comes_as_json_and_through_the_engine():
    given = EngineConfig.from_kwargs(model="m", override_generation_config='{"temperature": 0.5}')
    assert given.model.override_generation_config == {"temperature": 0.5}
    with pytest.raises(ValueError, match="override_generation_config is no JSON"):
        EngineConfig.from_kwargs(model="m", override_generation_config="{")
    llm = tiny_llm(override_generation_config={"temperature": 0, "max_new_tokens": 3})
    (output,) = llm.generate([[1, 2, 3]], use_tqdm=False)
    assert llm.get_default_sampling_params().temperature == 0 and len(output.outputs[0].token_ids) <= 3

"""What generation_config.json says of the end of an output."""

from types import SimpleNamespace

import pytest

from tritonllm.engine.text.generation_config import end_tokens, read_generation_config

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

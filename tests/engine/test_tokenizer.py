"""The tokenizer as it is loaded."""

import copy
import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tritonllm.demo import model_path
from tritonllm.engine.text.tokenizer import load_tokenizer

LONG = "the little dog " * 2000


def test_it_does_not_warn_of_long_texts_and_others_still_do(caplog):
    tokenizer = load_tokenizer(str(model_path()))
    assert len(tokenizer.encode(LONG)) > tokenizer.model_max_length
    tokenizer(LONG, LONG)
    copy.deepcopy(tokenizer).encode(LONG)
    assert not caplog.records
    AutoTokenizer.from_pretrained(str(model_path())).encode(LONG)
    assert "sequence length is longer" in caplog.text


def test_a_field_of_the_configuration_that_transformers_refuses(tmp_path):
    folder = Path(shutil.copytree(model_path(), tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"use_cache": None}))
    with pytest.raises(ValueError, match=r"tokenizer: none could be loaded from .*use_cache"):
        load_tokenizer(str(folder))


def test_a_folder_of_the_home_folder(tmp_path, monkeypatch):
    shutil.copytree(model_path(), tmp_path / "model")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(load_tokenizer("~/model")) == len(load_tokenizer(str(model_path())))

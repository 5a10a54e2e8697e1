"""A GGUF file in the place of a folder: the same tokens and texts."""

import pytest
from support.engines import tiny_checkpoint, tiny_llm
from support.gguf_files import write_gguf

from tritonllm import SamplingParams
from tritonllm.cli import main

PROMPTS = ["the quick brown", "the cat sat on the"]
CONVERSATION = [{"role": "user", "content": "the cat"}]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_gguf(path, tiny_checkpoint(), "qwen3")
    return path


def texts(llm) -> list[tuple[str, tuple[int, ...]]]:
    params = SamplingParams(temperature=0, max_tokens=8)
    outputs = [*llm.generate(PROMPTS, params, use_tqdm=False), *llm.chat(CONVERSATION, params, use_tqdm=False)]
    return [(output.outputs[0].text, tuple(output.outputs[0].token_ids)) for output in outputs]


def test_texts_are_those_of_the_folder(file):
    """Of the file, and of the folder that holds it."""
    want = texts(tiny_llm())
    assert texts(tiny_llm(file)) == want
    assert texts(tiny_llm(file.parent)) == want


def test_weights_are_read_again(file):
    llm = tiny_llm(file)
    want = texts(llm)
    llm.reload_weights()
    assert texts(llm) == want
    llm.reload_weights(str(tiny_checkpoint()))
    assert texts(llm) == want


def test_the_command_line(file, capsys):
    assert main(["info", str(file)]) == 0
    assert "Qwen3ForCausalLM" in capsys.readouterr().out

"""The demo model through the whole engine: its answers mean something, so a test can check sense, not only numbers."""

import json
from collections import defaultdict
from pathlib import Path

import pytest

from tritonllm import LLM, SamplingParams
from tritonllm.demo import draft_path, model_path

QUESTIONS = json.loads((Path(__file__).parent / "demo_eval.json").read_text())
LEAST = {"addition": 0.95, "addition completion": 0.95, "sort": 0.9, "fact": 0.9}


@pytest.fixture(scope="module")
def llm():
    return LLM(str(model_path()))


def is_right(reply, expected):
    lines = reply.strip().splitlines()
    return bool(lines) and lines[0].strip() == expected


def test_held_out_questions(llm):
    """One batch of all: chat turns and bare completions, through chunked prefill and the prefix cache."""
    tokenizer = llm.get_tokenizer()
    prompts = []
    for question in QUESTIONS:
        if question["kind"] == "addition completion":
            prompts.append(question["prompt"])
        else:
            turn = [{"role": "user", "content": question["prompt"]}]
            prompts.append(tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True))
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=40), use_tqdm=False)
    right = defaultdict(list)
    for question, output in zip(QUESTIONS, outputs, strict=True):
        right[question["kind"]].append(is_right(output.outputs[0].text, question["reply"]))
    shares = {kind: sum(answers) / len(answers) for kind, answers in right.items()}
    assert shares.keys() == LEAST.keys()
    assert all(shares[kind] >= LEAST[kind] for kind in LEAST), shares


def test_a_story_ends_by_itself_in_sentences(llm):
    (output,) = llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=None), use_tqdm=False)
    story = output.outputs[0]
    assert story.finish_reason == "stop"
    assert story.text.startswith(",") and story.text.rstrip().endswith((".", "!", "?", '"'))
    assert 50 < len(story.text.split()) < 600


def test_the_draft_speaks_the_same_tokens(llm):
    draft = LLM(str(draft_path()))
    text = "What is 12 + 30?"
    assert draft.get_tokenizer().encode(text) == llm.get_tokenizer().encode(text)
    (output,) = draft.chat([{"role": "user", "content": text}], SamplingParams(temperature=0), use_tqdm=False)
    assert is_right(output.outputs[0].text, "12 + 30 = 42")


def test_the_checkpoint_is_small_enough_to_ship():
    assert (model_path() / "model.safetensors").stat().st_size <= 6_000_000
    assert (draft_path() / "model.safetensors").stat().st_size <= (
        model_path() / "model.safetensors"
    ).stat().st_size / 4

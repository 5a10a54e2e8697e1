"""lm-evaluation-harness drives this package through its adapter for vLLM."""

import json

import pytest

from tritonllm import as_vllm
from tritonllm.demo import model_path

lm_eval = pytest.importorskip("lm_eval", reason="the extra `real` brings lm_eval")

QUESTIONS = [
    {"q": "What is 47 + 38?\n47 + 38 =", "a": " 85", "b": " 12"},
    {"q": "A young cat is called a", "a": " kitten", "b": " calf"},
    {"q": "The capital of France is", "a": " Paris", "b": " fox"},
]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Two tasks over a file: a choice by log-likelihood, and generated text."""
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "data.jsonl")}},
        "test_split": "test",
        "doc_to_text": "{{q}}",
    }
    choice = {"output_type": "multiple_choice", "doc_to_choice": ["{{a}}", "{{b}}"], "doc_to_target": 0}
    text = {"output_type": "generate_until", "doc_to_target": "{{a}}", "generation_kwargs": {"until": ["\n"]}}
    text["generation_kwargs"] |= {"max_gen_toks": 8, "do_sample": False, "temperature": 0.0}
    metric = {"aggregation": "mean", "higher_is_better": True}
    return [
        {**common, **choice, "task": "choice", "metric_list": [{"metric": "acc", **metric}]},
        {**common, **text, "task": "text", "metric_list": [{"metric": "exact_match", **metric}]},
    ]


def evaluate(model, tasks, **arguments):
    done = lm_eval.simple_evaluate(
        model, {"pretrained": str(model_path()), "dtype": "float32", **arguments}, [dict(task) for task in tasks],
        log_samples=True, batch_size=4, bootstrap_iters=0,
    )  # fmt: skip
    return {task["task"]: [sample["filtered_resps"] for sample in done["samples"][task["task"]]] for task in tasks}


@pytest.mark.long
def test_the_adapter_for_vllm_gives_what_transformers_gives(tasks, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    as_vllm.install()
    ours = evaluate("vllm", tasks, max_model_len=256)
    theirs = evaluate("hf", tasks, device="cpu")
    assert ours["text"] == theirs["text"]
    for mine, other in zip(ours["choice"], theirs["choice"], strict=True):
        for (logprob, greedy), (wanted, is_greedy) in zip(mine, other, strict=True):
            assert float(logprob) == pytest.approx(float(wanted), abs=1e-3) and bool(greedy) == bool(is_greedy)

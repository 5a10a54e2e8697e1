"""``tritonllm embed``: what it prints, and what it refuses."""

import json

import pytest
from support.engines import tiny_checkpoint, tiny_llm

from tritonllm import PoolingParams
from tritonllm.cli import main

SMALL = ["--block-size", "4", "--num-blocks", "64", "--max-num-seqs", "8", "--max-num-batched-tokens", "64"]


def run(capsys, *args):
    status = main(["embed", str(tiny_checkpoint()), *SMALL, *args])
    out = capsys.readouterr().out
    return status, [json.loads(line) for line in out.splitlines()]


def test_a_line_for_each_prompt(capsys, tmp_path):
    texts = ["the quick brown fox", "héllo"]
    (tmp_path / "prompts").write_text("\n\n".join(texts))
    config = {"pooling_type": "MEAN"}
    llm = tiny_llm(pooler_config=config)
    expected = llm.encode(texts, PoolingParams(task="embed", normalize=False), use_tqdm=False)
    given = ["--prompt-file", str(tmp_path / "prompts"), "--no-normalize", "--pooler-config", json.dumps(config)]
    status, lines = run(capsys, *given)
    assert status == 0 and [line["prompt"] for line in lines] == texts
    for index, (line, output) in enumerate(zip(lines, expected, strict=True)):
        assert (line["index"], line["prompt_tokens"]) == (index, len(output.prompt_token_ids))
        assert line["data"] == pytest.approx(output.outputs.data.tolist(), rel=1e-5)


def test_a_list_for_each_token(capsys):
    _, (line,) = run(capsys, "--prompt", "the fox", "--task", "token_embed", "--truncate-prompt-tokens", "2")
    assert len(line["data"]) == 2 and len(line["data"][0]) == 64


def test_a_task_that_the_model_lacks(capsys):
    assert main(["embed", str(tiny_checkpoint()), *SMALL, "--prompt", "the", "--task", "classify"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and "task='classify' is not one of Qwen3ForCausalLM" in captured.err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--dimensions", "0"], "dimensions must be of type int of at least 1"),
        (["--task", "rank"], "invalid choice: 'rank'"),
        (["--pooler-config", "{"], "pooler_config is no JSON"),
        (["--pooler-config", '{"pooling_type": "MAX"}'], "pooling_type must be one of LAST, CLS, MEAN"),
        (["--runner", "generate", "--convert", "embed"], "runner='generate' contradicts convert='embed'"),
    ],
)
def test_wrong_usage(capsys, args, message):
    with pytest.raises(SystemExit) as ended:
        main(["embed", "model", "--prompt", "the", *args])
    assert ended.value.code == 2 and message in capsys.readouterr().err

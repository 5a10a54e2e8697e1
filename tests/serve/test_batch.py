"""``tritonllm batch``: every request is answered once, whatever happens on the way."""

import json
import subprocess
import sys

import pytest
from support import forked_programs
from support.imported_processes import imported_processes
from support.server import MODEL, ROOT, eventually

from tritonllm import SamplingParams
from tritonllm.cli import main
from tritonllm.serve.processes.batch import open_answers, read_lines
from tritonllm.system.extras import install

COUNT = 24


GREEDY = {"max_tokens": 60, "temperature": 0, "ignore_eos": True}


def write_requests(path, count=COUNT):
    requests = [
        {
            "custom_id": f"number-{i}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": MODEL, "prompt": f"{i} + {i} =", **GREEDY},
        }
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(request) + "\n" for request in requests))


def command(folder, *options):
    files = ["-i", str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl")]
    return [sys.executable, "-m", "tritonllm", "batch", *files, "--served-model-name", MODEL, *options]


def run(folder, *options):
    """In this process, and its engines are forks of one that has imported all they need; returns the exit status."""
    with imported_processes():
        return main(command(folder, *options)[3:])


def answers(folder):
    return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


@pytest.mark.long
def test_killed_and_started_again(tmp_path, llm):
    write_requests(tmp_path / "in.jsonl")
    out = tmp_path / "out.jsonl"
    process = forked_programs.Popen(command(tmp_path, "--max-concurrency", "3"), cwd=ROOT, stderr=subprocess.DEVNULL)
    eventually(lambda: out.exists() and out.read_bytes().count(b"\n") >= 4)
    process.kill()
    process.wait()
    finished = out.read_bytes().rpartition(b"\n")[0].splitlines()
    assert 4 <= len(finished) < COUNT, "it was killed on its way"
    with out.open("ab") as file:
        file.write(b'{"id": "batch-half')  # as if killed in the middle of a line
    again = forked_programs.run(command(tmp_path), cwd=ROOT)
    assert again.returncode == 0, again.stderr
    assert f"{len(finished)} of {COUNT} requests are answered already" in again.stderr
    assert out.read_bytes().splitlines()[: len(finished)] == finished, "nothing is redone"
    found = {answer["custom_id"]: answer["response"]["body"]["choices"][0]["text"] for answer in answers(tmp_path)}
    assert len(answers(tmp_path)) == len(found) == COUNT
    expected = llm.generate([f"{i} + {i} =" for i in range(COUNT)], SamplingParams(**GREEDY), use_tqdm=False)
    assert [found[f"number-{i}"] for i in range(COUNT)] == [output.outputs[0].text for output in expected]
    third = forked_programs.run(command(tmp_path), cwd=ROOT)
    assert (third.returncode, len(answers(tmp_path))) == (0, COUNT)


def test_answers_of_all_kinds(tmp_path, capsys):
    ask = [{"role": "user", "content": "What is 47 + 66?"}]
    bodies = {
        "chat": ("/v1/chat/completions", {"messages": ask, "max_tokens": 9}),
        "responses": ("/v1/responses", {"input": "What is 47 + 66?", "max_output_tokens": 9}),
        "refused": ("/v1/chat/completions", {"messages": ask, "max_tokens": 0}),
        "lost": ("/v1/nothing", {}),
    }
    lines = [{"custom_id": name, "url": url, "body": body} for name, (url, body) in bodies.items()]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert run(tmp_path) == 1 and "2 of them with an error" in capsys.readouterr().err
    found = {answer["custom_id"]: answer["response"] for answer in answers(tmp_path)}
    assert {name: answer["status_code"] for name, answer in found.items()} == {
        "chat": 200,
        "responses": 200,
        "refused": 400,
        "lost": 404,
    }
    assert found["chat"]["body"]["object"] == "chat.completion"
    assert "max_tokens" in found["refused"]["body"]["error"]["message"]


def test_several_engines(tmp_path, llm):
    write_requests(tmp_path / "in.jsonl", 8)
    assert run(tmp_path, "-dp", "2") == 0
    found = {answer["custom_id"]: answer["response"]["body"]["choices"][0]["text"] for answer in answers(tmp_path)}
    expected = llm.generate([f"{i} + {i} =" for i in range(8)], SamplingParams(**GREEDY), use_tqdm=False)
    assert found == {f"number-{i}": output.outputs[0].text for i, output in enumerate(expected)}


def test_without_ray_one_line_says_so(tmp_path, capsys, monkeypatch):
    """Before a file is read or made."""
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(command(tmp_path, "--ray", "2")[3:]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --ray needs Ray (") and line.endswith(f"{install('ray')}, or leave it out")
    assert not [*tmp_path.iterdir()]


def test_engines_are_counted_once(tmp_path, capsys):
    write_requests(tmp_path / "in.jsonl", 1)
    with pytest.raises(SystemExit):
        main(command(tmp_path, "-dp", "2", "--ray", "2")[3:])
    assert "--ray 2 says how many engines there are: leave --data-parallel-size out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not valid JSON"),
        ("[" * 100_000, "line 2 is nested too deep"),
        (r'{"custom_id": "\ud800", "url": "/v1/completions", "body": {}}', "line 2 is not valid JSON"),
        ("[]", "must be an object"),
        ('{"custom_id": "a"}', "needs custom_id and url"),
        ('{"custom_id": "number-0", "url": "/v1/completions", "body": {}}', "is there twice"),
        ('{"custom_id": "a", "url": "/metrics", "body": {}}', "/v1/"),
        ('{"custom_id": "a", "url": "/v1/completions", "body": {"stream": true}}', "cannot be streamed"),
    ],
)
def test_a_bad_line_is_found_before_a_model_is_loaded(tmp_path, line, message, capsys):
    write_requests(tmp_path / "in.jsonl", count=1)
    with (tmp_path / "in.jsonl").open("a") as file:
        file.write(line)
    with pytest.raises(SystemExit) as caught:
        main(command(tmp_path)[3:])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_lines_end_at_line_feeds_only(tmp_path):
    """And the file may begin with a byte-order mark."""
    text = "a\u2028b\u2029c\x85d"
    lines = [{"custom_id": name, "url": "/v1/completions", "body": {"prompt": text}} for name in "xy"]
    written = "\r\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
    (tmp_path / "in.jsonl").write_bytes(b"\xef\xbb\xbf" + written.encode())
    assert [(line.custom_id, line.body["prompt"]) for line in read_lines(tmp_path / "in.jsonl")] == [
        ("x", text),
        ("y", text),
    ]


def test_another_file_is_not_overwritten(tmp_path, capsys):
    write_requests(tmp_path / "in.jsonl", count=1)
    for text, message in (
        ("my thesis\n", "line 1 is no answer of a batch"),
        ("my thesis", "line 1 is no answer of a batch"),
        ('{"custom_id": "x"}', "line 1 is no answer of a batch"),
        ('{"custom_id": "x"}\n', "answers 'x', which"),
    ):
        (tmp_path / "out.jsonl").write_text(text)
        with pytest.raises(SystemExit):
            main(command(tmp_path)[3:])
        assert message in capsys.readouterr().err
        assert (tmp_path / "out.jsonl").read_text() == text


@pytest.mark.parametrize(
    "begun", [b"{", b'{"id":"ba', b'{"id": "batch-half', b'{"id":"batch-12","custom_id":"a","resp']
)
def test_an_answer_that_was_not_finished_is_given_again(tmp_path, begun):
    path, whole = tmp_path / "out.jsonl", b'{"id":"batch-1","custom_id":"a"}\n'
    path.write_bytes(whole + begun)
    with open_answers(path) as (_, done):
        assert done == {"a"}
    assert path.read_bytes() == whole


def test_two_do_not_write_to_one_file(tmp_path):
    path = tmp_path / "out.jsonl"
    with open_answers(path), pytest.raises(ValueError, match="another process"), open_answers(path):
        pass
    write_requests(tmp_path / "in.jsonl", count=2)
    assert [line.custom_id for line in read_lines(tmp_path / "in.jsonl")] == ["number-0", "number-1"]

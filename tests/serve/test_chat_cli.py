"""``tritonllm chat`` and ``tritonllm complete``: an engine in the process, or a server; the same answers."""

import io
import json
import sys

import pytest
from support.fake_server import fake_server

from tritonllm import SamplingParams
from tritonllm.cli import main

ASK, STORY = "What is 47 + 66?", "There was a fox named"
GREEDY = ["--temperature", "0", "--max-tokens", "30"]


def spoken(monkeypatch, capsys, *lines, use="chat", options=(), make_llm=None):
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(line + "\n" for line in lines)))
    more = {} if make_llm is None else {"make_llm": make_llm}
    assert main([use, *GREEDY, *options], **more) == 0
    return capsys.readouterr()


@pytest.fixture(params=["local", "remote"])
def where(request, server, llm):
    """Options, and how to make an engine."""
    if request.param == "remote":
        return {"options": ["--url", server.url]}
    return {"make_llm": lambda model, **options: llm}


def conversation(llm, *asked):
    messages = []
    for text in asked:
        messages.append({"role": "user", "content": text})
        params = SamplingParams(temperature=0, max_tokens=30)
        (output,) = llm.chat(messages, params, use_tqdm=False)
        messages.append({"role": "assistant", "content": output.outputs[0].text})
    return messages


def test_a_conversation(where, llm, monkeypatch, capsys, tmp_path):
    path = tmp_path / "saved.json"
    lines = [ASK, "", "And 1 + 2?", f"/save {path}", "/help", "/reset", ASK, "/quit", "never said"]
    shown = spoken(monkeypatch, capsys, *lines, **where)
    expected = conversation(llm, ASK, "And 1 + 2?")
    assert json.loads(path.read_text()) == expected
    said = [message["content"] for message in expected if message["role"] == "assistant"]
    assert shown.out == f"{said[0]}\n{said[1]}\n{said[0]}\n", "after /reset it begins anew"
    assert "/save FILE" in shown.err


def test_one_answer_with_a_system_prompt(where, llm, monkeypatch, capsys):
    options = [*where.get("options", ()), "--quick", ASK, "--system-prompt", "Be brief."]
    shown = spoken(monkeypatch, capsys, **{**where, "options": options})
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": ASK}]
    (output,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=30), use_tqdm=False)
    assert shown.out == output.outputs[0].text + "\n"


def test_texts_are_continued(where, llm, monkeypatch, capsys):
    shown = spoken(monkeypatch, capsys, STORY, "47 + 38 =", use="complete", **where)
    outputs = llm.generate([STORY, "47 + 38 ="], SamplingParams(temperature=0, max_tokens=30), use_tqdm=False)
    assert shown.out == "".join(output.outputs[0].text + "\n" for output in outputs)


def test_what_is_refused_does_not_end_it(where, monkeypatch, capsys, tmp_path):
    too_long = "word " * 3000
    shown = spoken(monkeypatch, capsys, too_long, f"/save {tmp_path}", ASK, **where)
    assert shown.err.count("error: ") == 2
    assert "113" in shown.out


class Interrupted:
    """An engine whose second part is interrupted."""

    def chat(self, messages):
        yield "Once "
        raise KeyboardInterrupt

    complete = None


def test_ctrl_c_ends_an_answer(capsys):
    from tritonllm.cli.chat import Conversation

    conversation = Conversation(Interrupted(), None, chat=True)
    conversation.say("Tell me.")
    assert conversation.messages[-1] == {"role": "assistant", "content": "Once "}
    assert capsys.readouterr().out == "Once \n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model-name", "x"], "give --url"),
        (["--url", "http://127.0.0.1:9", "--max-num-seqs", "3"], "--model-name is one of its names"),
        (["--temperature", "-1"], "temperature must be"),
    ],
)
def test_a_mistake_is_wrong_usage(options, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["chat", *options])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_no_server(capsys):
    assert main(["chat", "--url", "http://127.0.0.1:9", "-q", "Hi"]) == 1
    assert "does not answer" in capsys.readouterr().err
    assert main(["chat", "--url", "http://127.0.0.1:80a0", "-q", "Hi"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --url: ") and "80a0" in line


MODELS = (200, [b'{"data": [{"id": "m"}]}'])


@pytest.mark.parametrize(
    ("models", "answer", "message"),
    [
        ((200, [b'{"models": ["m"]}']), None, 'brought no list of models, but: {"models": ["m"]}'),
        ((200, [b'{"error": "asleep"}']), None, "brought no list of models, but: asleep"),
        ((401, [b'{"error": {"message": "give an API key"}}']), None, "the server: give an API key (status 401)"),
        (MODELS, (503, [b'{"error": "busy"}']), "the server: busy (status 503)"),
        (MODELS, (200, [b'data: {"error": "overloaded"}\n\n']), "the server: overloaded"),
        (MODELS, (200, [b'data: {"error": {"message": "no room"}}\n\n']), "the server: no room"),
        (MODELS, (200, [b"data: {broken\n\n"]), "the server's answer cannot be read: JSONDecodeError"),
        (MODELS, (200, [b'data: {"choices": [{}]}\n\n']), "the server's answer cannot be read: KeyError: 'delta'"),
        (MODELS, (200, [b"data: [1]\n\n"]), "the server's answer cannot be read: AttributeError"),
    ],
)
def test_an_answer_that_nobody_expects_is_an_error_in_one_line(models, answer, message, capsys):
    with fake_server({"/v1/models": [models], "/v1/chat/completions": [answer]}) as url:
        assert main(["chat", "--url", url, "-q", "Hi"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line

"""``python -m bench.chat_turn``."""

import json

import pytest

from bench import chat_turn, report, reports, tables

pytestmark = pytest.mark.long


@pytest.mark.smoke
def test_writes_results(tmp_path, capsys):
    out = tmp_path / "turns.json"
    assert chat_turn.main(["--tokens", "300,900", "--out", str(out)]) == 0
    written = json.loads(out.read_text())
    assert [row["tokens"] // 300 for row in written["chat_turns"]] >= [1, 3]
    for row in written["chat_turns"]:
        assert set(row["ms"]) == {"render", "whole", "tokenize", "engine"} and min(row["ms"].values()) > 0
    assert {"cpu", "python", "commit", "date"} <= set(written)
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert reports.kind_of(written) == "chat-turn"
    assert tables.table(written, ()).count("\n") == 5
    assert "The next turn of a chat" in report.results([report.File(out.name, "chat-turn", written)])


def test_a_turn_that_was_not_cached_is_no_result(monkeypatch):
    monkeypatch.setattr(chat_turn, "answer", lambda engine, name, ids: 0)
    with pytest.raises(RuntimeError, match=r"0 of \d+ tokens were in the prefix cache"):
        chat_turn.measure(300)


def test_other_tokens_are_no_result(monkeypatch):
    encode = chat_turn.InputProcessor.encode
    monkeypatch.setattr(chat_turn.InputProcessor, "encode", lambda *args, **more: [*encode(*args, **more), 7])
    with pytest.raises(RuntimeError, match="other tokens than the whole"):
        chat_turn.measure(300)

"""What the benchmark of real drafts reports, on few tokens."""

import pytest

from bench import demo_drafts


def test_a_row_of_each_kind_of_text(capsys):
    assert demo_drafts.main(["--method", "draft_model", "--tokens", "24", "--device", "cpu"]) == 0
    copied, new = capsys.readouterr().out.splitlines()
    assert copied.startswith("copy  draft_model") and new.startswith("new   draft_model")
    row = demo_drafts.measure("new", "draft_model", 24, "cpu")
    assert row.tokens_a_step == pytest.approx(1 + sum(row.right))
    assert 2 < row.tokens_a_step <= 5 and 0 < row.drafting < 1 and row.times_plain > 0
    assert list(row.right) == sorted(row.right, reverse=True)


def test_no_row_where_drafts_change_a_token(monkeypatch):
    tokens = iter([[[1]], [[1]], [[1, 2]], [[1, 3]]])
    monkeypatch.setattr(demo_drafts, "generate", lambda *args: (next(tokens), 1.0))
    with pytest.raises(RuntimeError, match="ngram has changed a token"):
        demo_drafts.measure("copy", "ngram", 2, "cpu")

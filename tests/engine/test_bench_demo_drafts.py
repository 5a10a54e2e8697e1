"""What the benchmark of real drafts reports, on few tokens."""

from types import SimpleNamespace

import pytest

from bench import demo_drafts

pytestmark = pytest.mark.long


def test_a_row_of_each_kind_of_text(capsys):
    assert demo_drafts.main(["--method", "draft_model", "--tokens", "24", "--device", "cpu"]) == 0
    copied, new = capsys.readouterr().out.splitlines()
    assert copied.startswith("copy  draft_model") and new.startswith("new   draft_model")
    row = demo_drafts.measure("new", "draft_model", 24, "cpu")
    assert row.tokens_a_step == pytest.approx(1 + sum(row.right))
    assert 2 < row.tokens_a_step <= 5 and 0 < row.drafting < 1 and row.times_plain > 0
    assert list(row.right) == sorted(row.right, reverse=True)


def test_no_row_where_drafts_change_a_token(monkeypatch):
    found = iter([[[1]], [[1]], [[1, 2]], [[1, 3]]])  # of which no two are equally likely
    monkeypatch.setattr(demo_drafts, "generate", lambda *args: (next(found), 1.0))
    with pytest.raises(RuntimeError, match="ngram has changed a token"):
        demo_drafts.measure("copy", "ngram", 2, "cpu")


@pytest.mark.smoke
def test_a_tie_is_no_change():
    """What two processors with other instructions may decide differently; there is such a place in the demo model."""

    class Plain:
        def get_tokenizer(self):
            return SimpleNamespace(encode=lambda prompt: [9])

        def generate(self, prompt, params, use_tqdm):
            assert prompt == {"prompt_token_ids": [9, 4]}
            scores = {5: SimpleNamespace(logprob=-1.07597), 6: SimpleNamespace(logprob=-1.07598)}
            return [SimpleNamespace(outputs=[SimpleNamespace(logprobs=[scores])])]

    assert not demo_drafts.is_changed(Plain(), "p", [4, 5, 7], [4, 5, 7])
    assert not demo_drafts.is_changed(Plain(), "p", [4, 5, 7], [4, 6, 8])
    assert demo_drafts.is_changed(Plain(), "p", [4, 5, 7], [4, 3, 8])

"""docs/models.md: what it says of each causal text model type is so."""

from pathlib import Path

import pytest
import transformers
from models import causal_types

TABLE = causal_types.written()
VERDICTS = causal_types.read_table(TABLE)
SAME_RELEASE = f"transformers {transformers.__version__} " in TABLE
AS_WRITTEN = pytest.mark.skipif(not SAME_RELEASE, reason="the table is of another release of transformers")


@AS_WRITTEN
def test_the_table_has_each_type_once():
    assert sorted(VERDICTS) == causal_types.text_types()
    assert causal_types.table(VERDICTS) == TABLE


@AS_WRITTEN
@pytest.mark.parametrize("kind", ["arcee", "gpt_neo", "bitnet", "mamba", "deepseek_v3", "gemma4_text", "xlnet"])
def test_a_type_is_what_the_table_says(kind):
    assert causal_types.judge(kind) == VERDICTS[kind]


@AS_WRITTEN
@pytest.mark.long
def test_all_types_are_what_the_table_says():
    assert causal_types.judge_all(VERDICTS) == VERDICTS


def test_the_table_is_written_in_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    page = tmp_path / "models.md"
    page.write_text(f"before\n{causal_types.BEGIN}old\n{causal_types.END}after\n", encoding="utf-8")
    monkeypatch.setattr(causal_types, "DOC", page)
    monkeypatch.setattr(causal_types, "text_types", lambda: ["mamba"])
    causal_types.main()
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"before\n{causal_types.BEGIN}") and text.endswith(f"{causal_types.END}after\n")
    assert list(causal_types.read_table(causal_types.written())) == ["mamba"]

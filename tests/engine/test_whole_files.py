"""Files that are replaced as a whole."""

import os
from pathlib import Path

import pytest
from support.foreign_files import what_is

from tritonllm.system.whole_files import replace_text


def test_a_file_is_replaced_and_links_are_not_followed(tmp_path, monkeypatch):
    folder, other = tmp_path / "folder", tmp_path / "other"
    folder.mkdir()
    other.write_text("other")
    before = what_is(other)
    for name in ("a.json.tmp", f"a.json.{os.getpid()}.tmp", f"a.json.{os.getpid()}", "a.json"):
        (folder / name).symlink_to(other)
    there = sorted(folder.iterdir())
    for text in ("first", "ä second"):
        replace_text(folder / "a.json", text)
        assert (folder / "a.json").read_text(encoding="utf-8") == text and not (folder / "a.json").is_symlink()
    assert sorted(folder.iterdir()) == there and what_is(other) == before

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        replace_text(folder / "a.json", "third")
    assert sorted(folder.iterdir()) == there and (folder / "a.json").read_text(encoding="utf-8") == "ä second"

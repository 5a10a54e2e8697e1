"""Every code block of README.md, CONTRIBUTING.md and docs/ works.

Python runs, page by page, in a temporary folder: a page's blocks share their names, and a block with a
``if __name__ == "__main__"`` is a program of its own. Where a page names a model of the hub, the folder has the demo
model under that name (``HUB``). Of shell blocks every command goes through the parser of the program that it names, so
a renamed option fails, and the quick ones run. What cannot run here says so above the block, in a comment:
``<!-- not run: it needs two GPUs -->``. A block under ``<!-- from examples/nano.py -->`` quotes that file.
"""

import argparse
import importlib
import re
import shlex
import sys
import textwrap
import tomllib
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import pytest
from support import forked_programs
from support.checkout import environment
from support.waiting import PATIENCE

from tritonllm import cli
from tritonllm.demo import model_path
from tritonllm.serve.ray.options import read_plan

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]
FENCE = re.compile(
    r"^(?:<!-- (?P<comment>[^\n]*?) -->\n+)?```(?P<kind>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
HUB = (
    "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3-Embedding-0.6B",
    "BAAI/bge-small-en-v1.5",
    "meta-llama/Llama-3.1-8B",
    "my-model",
    "my-newer-checkpoint",
)
FILES = {"prompts.txt": "47 + 38 =\n12 + 4 =\n", "lines.txt": "There was a fox.\n"}
MOST_NOT_RUN = 3
QUICK = ("generate", "embed", "info")  # commands of tritonllm that run, on one rank; outputs are cut to a few tokens
OTHERS = ("curl", "ray")  # programs that are not ours
SHELLS = ("bash", "sh", "console")
KINDS = ("python", *SHELLS, "text", "json", "toml", "yaml", "mermaid")


class Block(NamedTuple):
    page: str
    line: int
    kind: str
    text: str
    not_run: str | None  # why
    quotes: str | None = None  # a file

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: Path) -> list[Block]:
    text, found = page.read_text(encoding="utf-8"), []
    for fence in FENCE.finditer(text):
        line = text[: fence.start("text")].count("\n")
        comment = re.fullmatch(r"not run: (.+)", fence["comment"] or "")
        why = comment[1] if comment else None
        source = re.fullmatch(r"from (\S+)", fence["comment"] or "")
        place = str(page.relative_to(ROOT)), line
        found.append(Block(*place, fence["kind"], fence["text"], why, source[1] if source else None))
    return found


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
RUNNABLE = [block for block in BLOCKS if block.kind == "python" and block.not_run is None and block.quotes is None]
PYTHON = sorted({block.page for block in RUNNABLE})
QUOTES = [block for block in BLOCKS if block.quotes is not None]


def commands_of(block: Block) -> list[list[str]]:
    """The words of each command of a shell block; ``$(python -c ...)`` is what that prints."""

    def printed(found: re.Match[str]) -> str:
        out = StringIO()
        with redirect_stdout(out):
            exec(found[1], {})
        return out.getvalue().strip()

    text = re.sub(r"\$\(python -c '([^']*)'\)", printed, block.text.replace("\\\n", " "))
    lines = text.splitlines()
    if block.kind == "console":  # commands and what they print
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


COMMANDS = [(block, words) for block in BLOCKS if block.kind in SHELLS for words in commands_of(block)]


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """The folder of a reader: models under the names that pages give them, and files to read."""
    for name in HUB:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(model_path())
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_block_says_what_it_is():
    assert len(BLOCKS) >= 25
    assert [str(block) for block in BLOCKS if block.kind not in KINDS] == []
    fences = {page: len(re.findall("^```", page.read_text(encoding="utf-8"), re.MULTILINE)) for page in PAGES}
    assert sum(fences.values()) == 2 * len(BLOCKS)  # none is overlooked


def test_few_blocks_are_not_run(capsys):
    left_out = [block for block in BLOCKS if block.not_run is not None]
    with capsys.disabled():
        lines = [f"{len(left_out)} of {len(BLOCKS)} code blocks are not run"]
        sys.stdout.write("\n  ".join(["", *lines, *(f"{block}: {block.not_run}" for block in left_out), ""]))
    assert len(left_out) <= MOST_NOT_RUN


def test_python_was_found():
    assert {"README.md", "docs/pooling.md", "docs/serving.md", "docs/speculation.md"} <= set(PYTHON)


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=() if page == "README.md" else pytest.mark.long) for page in PYTHON]
)
def test_python_runs(page, workplace):
    names: dict[str, object] = {"__name__": "__page__"}
    for block in RUNNABLE:
        if block.page != page:
            continue
        if "__main__" in block.text:
            (workplace / "script.py").write_text(block.text)
            done = forked_programs.run([sys.executable, "script.py"], env=environment(), timeout=PATIENCE)
            assert done.returncode == 0, f"{block}: {done.stderr}"
        else:
            # as many lines above as on the page, so that a traceback names the right one
            exec(compile("\n" * block.line + block.text, block.page, "exec"), names)


@pytest.mark.parametrize("block", QUOTES, ids=str)
def test_a_quotation_is_in_its_file(block):
    source = (ROOT / str(block.quotes)).read_text(encoding="utf-8")
    assert any(textwrap.indent(block.text, " " * depth) in source for depth in (0, 4, 8))


class Parsed(Exception):
    """The arguments were good."""


def parse_only(run, words, monkeypatch):
    """Let a program read its arguments, and no more."""
    right = argparse.ArgumentParser.parse_args

    def parse_args(self, args=None, namespace=None):
        right(self, args, namespace)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    with pytest.raises(Parsed):
        run(words)


def without_redirections(words):
    """A command's words before ``|`` and without ``> file``."""
    words = words[: words.index("|")] if "|" in words else words
    return words[: words.index(">")] if ">" in words else words


def check_module(name, words, monkeypatch):
    if name == "pytest":
        assert [word for word in words if "/" in word and not (ROOT / word).exists()] == []
    elif name == "tritonllm.as_vllm":
        assert words[0] == "-m" or words[0].endswith(".py")
    elif name not in ("mkdocs",):
        module = importlib.import_module(f"{name}.__main__" if (ROOT / name.replace(".", "/")).is_dir() else name)
        parse_only(module.main, words, monkeypatch)


@pytest.mark.parametrize(("block", "words"), COMMANDS, ids=[f"{block} {' '.join(w[:2])}" for block, w in COMMANDS])
def test_a_command_exists(block, words, monkeypatch):
    words = without_redirections(words)
    while re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    program, *rest = words
    program = Path(program).name
    if program == "tritonllm":
        parse_only(cli.main, rest, monkeypatch)
    elif program == "python" and rest[0] == "-m":
        check_module(rest[1], rest[2:], monkeypatch)
    elif program == "python":
        assert (ROOT / rest[0]).is_file(), f"{rest[0]} is not there"
    elif program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
        assert set(rest) <= set(targets)
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert all(extra in extras for word in rest for extra in re.findall(r"\[(\w+)\]", word))
    elif program == "mkdocs":
        assert rest[0] in ("build", "serve")
    elif program == "serve":  # Ray Serve's
        path, *arguments = rest[1:]
        module, _, name = path.partition(":")
        assert rest[0] == "run" and callable(getattr(importlib.import_module(module), name))
        read_plan(dict(word.split("=", 1) for word in arguments))
    else:
        assert program in OTHERS, f"nothing here knows how to check {program}"


RUNS = [
    (block, words)
    for block, words in COMMANDS
    if words[0] == "tritonllm" and words[1] in QUICK and block.not_run is None and "-tp" not in words
]


def test_commands_that_run_were_found():
    assert len(RUNS) >= 5


@pytest.mark.parametrize(("block", "words"), RUNS, ids=[f"{block} {' '.join(words[:2])}" for block, words in RUNS])
def test_a_quick_command_runs(block, words, workplace, capsys):
    words = without_redirections(words)[1:]
    assert cli.main([*words, *(["--max-tokens", "4"] if words[0] == "generate" else [])]) == 0
    assert capsys.readouterr().out.strip()


# ---------------------------------------------------------------- and the test itself can fail


def page_of(tmp_path, text):
    page = tmp_path / "page.md"
    page.write_text(text)
    return page


def test_blocks_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    text = "# A\n\n```python\nx = 1\n```\n\n<!-- not run: no GPU -->\n```bash\ntritonllm info  # all\n```\n"
    first, second = blocks_of(page_of(tmp_path, text))
    assert first == Block("page.md", 3, "python", "x = 1\n", None)
    assert second.not_run == "no GPU" and commands_of(second) == [["tritonllm", "info"]]
    (session,) = blocks_of(page_of(tmp_path, "```console\n$ tritonllm info \\\n    -v\nNVIDIA H200\n```\n"))
    assert commands_of(session) == [["tritonllm", "info", "-v"]]


@pytest.mark.parametrize("words", [["generate", "--promt", "x"], ["no-such-command"]])
def test_a_renamed_option_fails(words, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        parse_only(cli.main, words, monkeypatch)
    assert "unrecognized arguments" in (said := capsys.readouterr().err) or "invalid choice" in said

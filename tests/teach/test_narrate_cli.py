"""``tritonllm generate --narrate``: on a terminal, in a pipe, and broken off."""

import io
import json
import re
import subprocess
import sys
import termios

import pexpect
import pytest
from support.waiting import PATIENCE

from tritonllm import LLM, SamplingParams
from tritonllm.cli import main
from tritonllm.demo import model_path
from tritonllm.teach.narrate import picture
from tritonllm.teach.narrate.viewer import Narrator

BASE = ["generate", "--prompt", "There was a fox named", "--max-tokens", "6"]
ESCAPE = "\x1b"


def run(argv, capsys):
    status = main(argv)
    return status, *capsys.readouterr()


def session(*options, **more):
    argv = ["-m", "tritonllm", *BASE, "--narrate", *options]
    return pexpect.spawn(sys.executable, argv, encoding="utf-8", timeout=PATIENCE, dimensions=(40, 90), **more)


def test_a_session_in_english():
    child = session("--speed", "100", "--temperature", "0.8", "--top-p", "0.9", "--seed", "3")
    child.expect("The text becomes tokens")
    child.expect("Request 1 has a prompt of 5 tokens")
    child.expect("675")  # the number of "There"
    child.expect("Step 1")
    child.expect("The scheduler: 1 running, 0 waiting")
    child.expect("1 free block goes to request 1")
    child.expect("could be drawn")
    child.expect("next token")
    child.expect(r"top-p 0\.9 keeps the likeliest")
    child.expect("Step 2")
    child.expect("This is called decoding")
    child.expect("From here on each step gets one line")
    child.expect("Request 1 has ended after 6 tokens")
    child.expect("The whole run in numbers")
    child.expect("1 request with 5 prompt tokens got 6 new tokens")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0


@pytest.mark.long
def test_a_session_in_chinese_is_broken_off():
    """At reading pace, with colours; Ctrl-C ends it at once and leaves the terminal as it was."""
    child = session("--lang", "zh", "--max-tokens", "200")
    before = termios.tcgetattr(child.child_fd)
    child.logfile_read = log = Log()
    child.expect("文本变成词元")
    child.expect("语言模型不认字母")
    child.expect("请求 1 的提示词有 5 个词元")
    child.sendintr()
    child.expect("interrupted")
    child.expect(pexpect.EOF)
    assert termios.tcgetattr(child.child_fd) == before
    child.close()
    assert child.exitstatus == 130
    check_whole(log.text)


class Log:
    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text

    def flush(self):
        """Nothing to do."""


def check_whole(text):
    """Only colours were used, and they end."""
    codes = re.findall(r"\x1b\[([\d;?]*)([a-zA-Z])", text)
    assert codes and {letter for _, letter in codes} == {"m"}, "no cursor was hidden, no screen was changed"
    assert codes[-1][0] in ("0", "")
    assert ESCAPE not in re.sub(r"\x1b\[[\d;]*m", "", text)


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


@pytest.mark.parametrize("color", [False, True])
def test_colours_on_a_terminal(color, monkeypatch):
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    assert main([*BASE, "--narrate", "--speed", "0", *([] if color else ["--no-color"])]) == 0
    assert "Step 2" in terminal.getvalue()
    if color:
        check_whole(terminal.getvalue())
    assert (ESCAPE in terminal.getvalue()) == color


def test_a_pipe_gets_no_escape_codes(capsys):
    status, out, err = run([*BASE, "--narrate"], capsys)
    assert status == 0 and ESCAPE not in out + err
    assert "Step 1 ─" in out and err.startswith("[5 prompt + 6 generated tokens")
    assert not any(line.endswith("  ") and not line.startswith("  ") for line in out.splitlines())


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--temperature", "1", "--seed", "4", "--n", "2"],
        ["--regex", "(yes|no), my friend"],
        ["--speculative", "ngram:2", "--temperature", "0.5", "--seed", "1"],
        ["--frequency-penalty", "1", "--top-k", "5", "--temperature", "0.9", "--seed", "2"],
    ],
)
def test_results_are_the_same_with_it(options, capsys):
    """With --json they are on stdout alone, and the narration is on stderr."""
    argv = [*BASE, *options, "--json"]
    _, plain, _ = run(argv, capsys)
    status, out, err = run([*argv, "--narrate"], capsys)
    assert status == 0
    without_times = [
        [{k: v for k, v in json.loads(line).items() if not k.endswith("seconds")} for line in text.splitlines()]
        for text in (plain, out)
    ]
    assert without_times[0] == without_times[1] and without_times[0][0]["outputs"][0]["token_ids"]
    assert "The whole run in numbers" in err and "subscriber" not in err


@pytest.mark.parametrize(
    "options, says",
    [
        (["--speed", "2"], "--speed needs --narrate"),
        (["--lang", "zh"], "--lang needs --narrate"),
        (["--no-color"], "--no-color needs --narrate"),
        (["--narrate", "--speed", "-1"], "--speed must be a number from 0"),
        (["--narrate", "--speed", "nan"], "--speed must be a number from 0"),
        (["--narrate", "--lang", "fr"], "--lang"),
        (["--narrate", "--beam-width", "3"], "--narrate does not go with --beam-width"),
    ],
)
def test_wrong_options(options, says, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*BASE, *options], make_llm=lambda *_, **__: pytest.fail("a model was loaded"))
    assert ended.value.code == 2 and says in capsys.readouterr().err


def test_without_rich(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    with pytest.raises(SystemExit):
        main([*BASE, "--narrate"])
    assert "pip install '.[teach]'" in capsys.readouterr().err


def test_help_imports_nothing_heavy():
    code = (
        "import sys\nfrom tritonllm.cli import main\n"
        "try: main(['generate', '--help'])\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'rich', 'textual', 'matplotlib'} & set(sys.modules)\nsys.exit(1 if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "--narrate" in done.stdout


class Deaf(Terminal):
    """Its reader goes away after some lines."""

    def write(self, text):
        if len(self.getvalue()) > 500:
            raise BrokenPipeError
        return super().write(text)

    def fileno(self):
        raise BrokenPipeError


def test_a_reader_that_went_away(monkeypatch, caplog):
    """The work is not stopped in the middle of a step; then the command says what it says of a broken pipe."""
    monkeypatch.setattr(sys, "stdout", Deaf())
    narrator = Narrator(speed=0)
    llm = LLM(str(model_path()), num_blocks=16)
    with pytest.raises(BrokenPipeError):
        narrator.run(llm, lambda: llm.generate(["There"], SamplingParams(max_tokens=3), use_tqdm=False))
    assert "subscriber" not in caplog.text
    assert llm.engine.stats.generated_tokens == 3


def test_the_picture_in_the_docs_is_made_by_the_program(tmp_path):
    target = tmp_path / "narrate.svg"
    assert picture.main([str(target)]) == 0
    svg = target.read_text(encoding="utf-8").replace("&#160;", " ")
    assert svg.startswith("<svg") and "http" not in svg.replace("http://www.w3.org/2000/svg", "")
    assert "could be drawn" in svg and "Step 1" in svg

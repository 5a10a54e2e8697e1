"""The conversation, its progress, and the command, mostly with a lesson of a few lines."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pexpect
import pytest
from support.tutorial import recorded, talk
from support.waiting import PATIENCE

import tritonllm
from tritonllm.cli import main
from tritonllm.teach.tutorial import screen as screens
from tritonllm.teach.tutorial.lesson import (
    Exercise,
    LessonQuestion,
    MultipleChoice,
    NotAnAnswer,
    Number,
    Say,
    ShortText,
    ValueTable,
)
from tritonllm.teach.tutorial.progress import ProgressFile, Reached
from tritonllm.teach.tutorial.screen import Screen, table_lines
from tritonllm.teach.tutorial.session import fast_forward, next_lesson

PAGE = Say("The page of the question.")
HINTS = ["A first hint.", "A second hint."]
ASK = LessonQuestion("How many?", Number(3, traps={2: "Round up."}), HINTS, "It is three.")
COLOUR = LessonQuestion(
    "Which colour?", ShortText(["red"], traps={"green": "That is the grass."}), ["Think of blood."], "Red it is."
)
SMALL = (
    Say("The beginning."),
    PAGE,
    ValueTable("a table", ("x",), [(1,)]),
    ASK,
    Say("The middle."),
    COLOUR,
    Say("The end."),
)


@pytest.fixture
def progress(tmp_path):
    return ProgressFile(tmp_path / "state" / "tutorial.json")


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The folder of the command's progress, which is not there yet."""
    monkeypatch.setenv("PYTHONPATH", str(Path(tritonllm.__file__).parents[1]))  # another one may be installed
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "tritonllm"


def small(number: int = 1):
    return recorded(number, SMALL)


def test_a_lesson_from_its_beginning_to_its_end(progress):
    said = talk(progress, small(), "3", "red")
    for text in ("The beginning.", "a table", "It is three.", "The middle.", "Red it is.", "The end.", "is done"):
        assert text in said
    assert progress.read().of(1) == Reached(step=0, finished=True)


def test_hints_come_one_by_one_then_the_answer(progress):
    said = talk(progress, small(), "?", "?", "?", "s", "red")
    assert said.index("A first hint.") < said.index("A second hint.") < said.index("There is no other hint")
    assert "The answer is 3." in said and "It is three." in said


def test_a_wrong_answer_gets_its_mistake_or_the_next_hint(progress):
    said = talk(progress, small(), "2", "7", "8", "9", "3", "Green", "RED")
    assert "Not so. Round up." in said and "Not so. A first hint." in said and "Not so. A second hint." in said
    assert "Not so. `s` shows the answer." in said and "That is the grass." in said


def test_what_is_no_answer_costs_no_hint(progress):
    said = talk(progress, small(), "many", "", "7", "3", "red")
    assert said.count("The answer is a number") == 2 and "Not so. A first hint." in said


def test_quitting_in_the_middle_and_continuing(progress, monkeypatch):
    said = talk(progress, small(), "q")
    assert "Your progress is kept" in said and "The middle." not in said
    assert progress.read().of(1) == Reached(step=3)
    monkeypatch.setattr("tritonllm.teach.tutorial.session.LESSONS", (small(),))
    said = talk(progress, None, "3", "red")
    assert "The beginning." not in said, "what lies before the question's page is not shown again"
    assert "The page of the question." in said and "a table" in said and "It is three." in said
    assert progress.read().of(1).finished


def test_the_end_of_input_is_like_quitting(progress):
    said = talk(progress, small(), "3", end="")
    assert "Your progress is kept" in said
    assert progress.read().of(1) == Reached(step=5)


def test_finished_stays_finished_when_a_lesson_is_repeated(progress):
    talk(progress, small(), "3", "red")
    talk(progress, small(), "q")
    assert progress.read().of(1) == Reached(step=3, finished=True)


def test_another_terminal_is_not_undone(progress):
    """An exercise is checked in a second terminal while a session waits."""
    other = ProgressFile(progress.path)
    progress.change(9, step=4)
    other.change(9, solved=True)
    progress.change(9, step=5)
    assert other.read().of(9) == Reached(step=5, solved=True)


def test_which_lesson_is_next(progress):
    assert next_lesson(progress.read()).number == 1
    progress.change(1, finished=True)
    assert next_lesson(progress.read()).number == 2
    progress.change(7, step=3)
    assert next_lesson(progress.read()).number == 7
    for number in range(1, 11):
        progress.change(number, finished=True, step=0)
    assert next_lesson(progress.read()) is None
    assert "finished all lessons" in talk(progress, None)


def test_a_lesson_that_became_shorter_begins_anew():
    steps, page = fast_forward(small(), len(SMALL) + 1)
    assert [*steps] == [*SMALL] and page == []


CORRUPT = {
    "{": "Expecting",
    "[]": "list indices",
    "{}": "it has no 'version'",
    '{"version": 2}': "version must be 1, got 2",
    '{"version": 1, "current": 1, "lessons": {"1": {"step": -1}}}': "the step of lesson 1",
    '{"version": 1, "current": 1, "lessons": {"1": {"steps": 1}}}': "unexpected keyword argument 'steps'",
    "\xff": "utf-8",
}


@pytest.mark.parametrize("content", CORRUPT)
def test_a_corrupt_file_is_told_and_kept(home, capsys, content):
    home.mkdir()
    file = home / "tutorial.json"
    file.write_bytes(content.encode("latin-1"))
    for argv in (["tutorial"], ["tutorial", "--list"]):
        assert main(argv) == 1
        said = capsys.readouterr().err
        assert str(file) in said and CORRUPT[content] in said and "--reset" in said
    assert file.read_bytes() == content.encode("latin-1")
    assert main(["tutorial", "--reset"]) == 0
    assert not file.exists() and (home / "tutorial.json.old").read_bytes() == content.encode("latin-1")
    assert "tutorial.json.old" in capsys.readouterr().out


def test_a_state_folder_that_is_none(home, capsys):
    home.write_text("a file stands there")
    assert main(["tutorial"]) == 1
    assert "cannot keep the tutorial's progress (Not a directory): set XDG_STATE_HOME" in capsys.readouterr().err


def test_reset_with_nothing(home, capsys):
    assert main(["tutorial", "--reset"]) == 0
    assert capsys.readouterr().out == "There was no progress to forget.\n"


def test_list(home, capsys):
    assert main(["tutorial", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 11 and "Paging and copy-on-write" in lines[2] and not home.exists()
    progress = ProgressFile(home / "tutorial.json")
    progress.change(2, finished=True, solved=True)
    progress.change(4, step=3)
    main(["tutorial", "--list"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].endswith("done, exercise solved") and lines[4].endswith("begun, step 3")


def test_a_relative_state_folder_is_ignored(home, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", "here")
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    progress = tmp_path / "me" / ".local" / "state" / "tritonllm" / "tutorial.json"
    ProgressFile(progress).change(1, step=2)
    assert main(["tutorial", "--reset"]) == 0
    assert not progress.exists()


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--lesson", "11"], "lesson 11 does not exist: there are 1 to 10"),
        (["--lesson", "x"], "invalid int value"),
        (["--list", "--reset"], "give one"),
        (["exercise", "0"], "lesson 0 does not exist"),
        (["exercise", "1"], "lesson 1 has no exercise; these have one: 2, 6, 7, 9"),
        (["check", "9"], "there is no lesson9.py; `tritonllm tutorial exercise 9` writes lesson9.py"),
        (["nothing"], "invalid choice: 'nothing'"),
    ],
)
def test_wrong_usage(home, capsys, argv, says):
    with pytest.raises(SystemExit) as ended:
        main(["tutorial", *argv])
    assert ended.value.code == 2
    assert says in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["tutorial", "--help"], 0),
        (["tutorial", "--list"], 0),
        (["tutorial", "check", "--help"], 0),
        (["tutorial", "--lesson", "99"], 2),
    ],
)
def test_answers_without_torch(home, argv, code):
    script = "import sys; from tritonllm.cli import main\ntry: code = main(sys.argv[1:])\n"
    script += "except SystemExit as e: code = e.code\n"
    script += "sys.exit(100 if {'torch', 'rich', 'triton'} & sys.modules.keys() else code)"
    done = subprocess.run([sys.executable, "-c", script, *argv], capture_output=True, text=True)
    assert done.returncode == code, done.stderr


def test_stdin_is_closed(home):
    command = f"{sys.executable} -m tritonllm tutorial <&-"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.returncode == 2 and "stdin is closed" in done.stderr


def test_stdin_is_empty(home):
    done = subprocess.run([sys.executable, "-m", "tritonllm", "tutorial"], input="", capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
    assert "Lesson 1: Attention and its cache" in done.stdout and "Your progress is kept" in done.stdout
    assert json.loads((home / "tutorial.json").read_text())["lessons"]["1"]["step"] == 2


@pytest.mark.parametrize(
    ("typed", "right"),
    [("3", True), (" 3 blocks", True), ("3.0", True), ("+3", True), ("3.", True), ("-3", False), (".3", False)],
)
def test_numbers(typed, right):
    assert Number(3).is_right(typed) == right


@pytest.mark.parametrize("typed", ["", "three", "3 + 1", "x3", ".", "nan", "inf", "3,0", "-", "1,00", "3e0"])
def test_no_numbers(typed):
    with pytest.raises(NotAnAnswer):
        Number(3).is_right(typed)


@pytest.mark.parametrize("typed", ["99072", "99,072", "99_072", "99,072 bytes", "99072.0"])
def test_large_numbers(typed):
    assert Number(99072).is_right(typed)


def test_numbers_near_enough():
    answer = Number(0.65, tolerance=0.03)
    assert answer.is_right("0.64") and answer.is_right(".67") and not answer.is_right("0.6")
    assert str(answer) == "0.65" and str(Number(131072)) == "131072" and str(Number(2.5)) == "2.5"


def test_choices():
    answer = MultipleChoice(("more", "fewer"), 1)
    assert answer.is_right("b") and answer.is_right(" B) ") and not answer.is_right("a")
    assert str(answer) == "b) fewer"
    for typed in ("", "c", "ab", "fewer"):
        with pytest.raises(NotAnAnswer, match="one of the letters a, b"):
            answer.is_right(typed)


def test_tables():
    lines = table_lines(("name", "n"), [("a", 12), ("long", 3.14159), ("b", (1, 2))])
    assert lines == ["name   n", "a      12", "long   3.14", "b      1 2"]
    assert table_lines(("n",), [(1,), (200,)]) == ["  n", "  1", "200"]


def test_prose_is_wrapped_and_code_is_not():
    out = io.StringIO()
    Screen(out, io.StringIO()).say("word " * 40 + "\n\n" + "    code  stays" + " x" * 60)
    lines = out.getvalue().splitlines()
    assert max(map(len, lines[:4])) <= screens.WIDEST and lines[-1].startswith("    code  stays x x")


def test_exercises_in_a_session(progress, tmp_path):
    """Written, checked (it has holes yet), not written twice, and left open."""
    lesson = recorded(7, (Say("Now."), Exercise("Write it.")))
    said = talk(progress, lesson, "c", "w", "w", "c", "nonsense", "", folder=tmp_path)
    assert "there is no" in said and "Fill the holes in lesson7.py" in said
    assert "is there already" in said and "This hole is not filled yet" in said
    assert progress.read().of(7) == Reached(finished=True)
    solution = talk(progress, lesson, "s", "q", folder=tmp_path).split("exercise> s")[1]
    assert "if coin < p[draft] / q[draft]:" in solution


def begin(*argv):
    """A learner at a terminal."""
    return pexpect.spawn(sys.executable, ["-m", "tritonllm", "tutorial", *argv], encoding="utf-8", timeout=PATIENCE)


def test_a_dumb_terminal_gets_no_colours(home, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    learner = begin("--lesson", "9")  # its first question comes without the engine
    learner.expect("How many programs are launched")
    assert "\x1b" not in learner.before
    learner.expect("\n> ")  # the terminal is ready for Ctrl-D
    learner.sendeof()
    learner.expect("Your progress is kept")
    learner.expect(pexpect.EOF)


@pytest.mark.long
def test_on_a_terminal(home, monkeypatch):
    """Lesson 3 is left in the middle and continued in another process."""
    monkeypatch.setenv("TERM", "xterm")
    learner = begin("--lesson", "3")
    learner.expect("Lesson 3: Continuous batching")
    learner.expect("In which step does C run")
    learner.sendline("4")
    learner.expect("A still runs in that step")
    learner.sendline("?")
    learner.expect("A draws a token in each of its steps")
    learner.sendline("5")
    learner.expect("Right")
    learner.expect("How many does it take now")
    learner.sendline("q")
    learner.expect("Your progress is kept")
    learner.expect(pexpect.EOF)
    assert json.loads((home / "tutorial.json").read_text())["current"] == 3
    learner = begin()
    learner.expect("How many does it take now")
    assert "The answer was 5." in " ".join(learner.before.split())
    learner.sendline("20")
    learner.expect("Enter")
    learner.sendline("")
    learner.expect("as in the batch")
    learner.sendline("a")
    learner.expect("Lesson 3 is done")
    learner.expect("q quits: ")
    learner.sendeof()
    learner.expect(pexpect.EOF)
    learner.close()
    assert learner.exitstatus == 0
    assert json.loads((home / "tutorial.json").read_text())["lessons"]["3"]["finished"]

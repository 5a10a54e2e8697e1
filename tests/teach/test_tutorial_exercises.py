"""Every exercise: its solution is right; holes and typical mistakes are told apart, and the message helps."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
from support.waiting import PATIENCE, eventually

from tritonllm import env
from tritonllm.cli import main
from tritonllm.teach.tutorial import workshop
from tritonllm.teach.tutorial.checks.__main__ import load
from tritonllm.teach.tutorial.holes import Unfilled, Wrong
from tritonllm.teach.tutorial.lessons import LESSONS
from tritonllm.teach.tutorial.progress import ProgressFile

HAVING = [lesson for lesson in LESSONS if lesson.has_exercise]
KERNEL = LESSONS[8]
# Lesson -> what a learner wrote instead, and a part of what the check says.
MISTAKES = {
    2: [
        (
            "return block * block_size + position % block_size",
            "return position",
            "stored token 8 in slot 20; you say 8",
        ),
        ("return block * block_size + position % block_size", "return block * block_size", "you say 0"),
        ("if users[block] == 1:", "if True:", "Who wrote into a block that both use"),
        ("return [(block, mine)]", "return []", "a copy left out"),
        ("return [(block, mine)]", "return None", "must return a list of pairs"),
        ("users[block] -= 1", "pass", "2 blocks were copied where 1 would do"),
    ],
    6: [
        ("probabilities[token] / total", "probabilities[token]", "must add up to 1, not to 0.6"),
        ("total >= limit", "total > 2 * limit", "the first token alone has 0.6"),
        ("-probabilities[token])", "probabilities[token])", "the first token alone has 0.6"),
        ("return result", "return kept", "must return a list of 3 probabilities"),
    ],
    7: [
        ("p[draft] / q[draft]", "p[draft]", "min(1, p/q) would accept 0.600"),
        ("p[draft] / q[draft]", "1", "min(1, p/q) would accept 0.600"),
        ("max(0.0, a - b) for", "a for", "look at what replaces a rejected one"),
        ("return draft, True", "return 0, True", "returns token 0"),
    ],
}
KERNEL_MISTAKES = [
    ("(block * S + places)", "(i * S + places)", "look at the address of the block"),
    ("fade = tl.exp(largest - new_largest)", "fade = 1.0", "multiply it by exp(largest - new_largest)"),
    ('tl.where(i * S + places < length, b_scores, float("-inf"))', "b_scores", "must get the score -inf"),
    ("fade = tl.exp(largest - new_largest)", "fade = wrong", "NameError: name 'wrong' is not defined\nline 50"),
]


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """A check is not ended where it only takes long."""
    monkeypatch.setattr(workshop.check, "__defaults__", (PATIENCE,))


def changed(lesson, before: str, after: str) -> str:
    text = workshop.solution_text(lesson)
    assert text.count(before) == 1
    return text.replace(before, after)


def checked_here(lesson, text: str, tmp_path) -> str:
    """The check in this process, which has torch already."""
    path = tmp_path / "mine.py"
    path.write_text(text)
    return importlib.import_module(f"tritonllm.teach.tutorial.checks.{lesson.name}").check(load(path))


@pytest.mark.parametrize("number", MISTAKES)
def test_solution(number, tmp_path):
    lesson = LESSONS[number - 1]
    assert checked_here(lesson, workshop.solution_text(lesson), tmp_path).startswith("Right.")


@pytest.mark.parametrize("number", MISTAKES)
def test_unfilled(number, tmp_path):
    lesson = LESSONS[number - 1]
    with pytest.raises(Unfilled):
        checked_here(lesson, workshop.exercise_text(lesson), tmp_path)


CASES = [(number, *mistake) for number, mistakes in MISTAKES.items() for mistake in mistakes]


@pytest.mark.parametrize(("number", "before", "after", "says"), CASES)
def test_mistakes(number, before, after, says, tmp_path):
    lesson = LESSONS[number - 1]
    with pytest.raises(Wrong) as error:
        checked_here(lesson, changed(lesson, before, after), tmp_path)
    assert says in str(error.value)


def test_solution_of_the_kernel(tmp_path):
    path = tmp_path / "lesson9.py"
    path.write_text(workshop.solution_text(KERNEL))
    verdict = workshop.check(KERNEL, path)
    assert verdict.right and verdict.message.startswith("Right. 16 programs")


def test_mistakes_in_the_kernel(tmp_path):
    """All in one process, which takes a while to start; the exercise with its holes is one of them."""
    cases = [(changed(KERNEL, before, after), says) for before, after, says in KERNEL_MISTAKES]
    cases.append((workshop.exercise_text(KERNEL), "This hole is not filled yet: where the key_head"))
    files = [tmp_path / f"{number}.py" for number in range(len(cases))]
    for file, (text, _) in zip(files, cases, strict=True):
        file.write_text(text)
    script = "import sys\nfrom tritonllm.teach.tutorial.checks.__main__ import main\n"
    script += "for file in sys.argv[1:]: print('status', main('kernel', file), end='|')"
    command = [sys.executable, "-c", script, *map(str, files)]
    done = subprocess.run(command, env=env.of_interpreted_process(), capture_output=True, text=True, check=True)
    said = done.stdout.split("|")
    for (_, says), message in zip(cases, said[:-1], strict=True):
        assert says in message and f"status {workshop.WRONG}" in message


@pytest.mark.parametrize("lesson", HAVING, ids=lambda lesson: lesson.name)
def test_a_solution_is_its_exercise_filled(lesson):
    """They do not drift apart: what is no hole stands in both."""
    exercise, solution = workshop.exercise_text(lesson), workshop.solution_text(lesson)
    for line in exercise.splitlines():
        if "hole" not in line:
            assert line in solution.splitlines(), line
    assert 1 <= exercise.count(" hole(") + exercise.count("(hole(") <= 3
    assert "hole(" not in solution


def test_the_command(tmp_path, monkeypatch, capsys):
    """Write the file, check it with its holes, fill them, check again."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.setattr("tritonllm.cli.tutorial.Path.cwd", lambda: folder)
    assert main(["tutorial", "exercise", "7"]) == 0
    file = folder / "lesson7.py"
    assert file.read_text() == workshop.exercise_text(LESSONS[6])
    file.write_text(file.read_text() + "# mine\n")
    with pytest.raises(SystemExit):
        main(["tutorial", "exercise", "7"])
    assert file.read_text().endswith("# mine\n"), "a learner's work was overwritten"
    progress = ProgressFile(tmp_path / "tritonllm" / "tutorial.json")
    capsys.readouterr()
    assert main(["tutorial", "check", "7", str(file)]) == 1
    assert capsys.readouterr().out.startswith("This hole is not filled yet: the probability with which")
    assert not progress.read().of(7).solved
    file.write_text(workshop.solution_text(LESSONS[6]))
    assert main(["tutorial", "check", "7", str(file)]) == 0
    assert capsys.readouterr().out.startswith("Right.") and progress.read().of(7).solved


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def verify(:\n", "Python cannot read the file: "),
        ("x = 1\n", "AttributeError: module 'exercise' has no attribute 'verify'"),
        ("x = 1\ny = x.z\n", "AttributeError: 'int' object has no attribute 'z'\nline 2: `y = x.z`"),
        ("raise SystemExit(0)\n", "SystemExit: 0"),
        ("import os\nprint('bye', flush=True)\nos._exit(0)\n", "bye\n\nThe process of the check ended with status 0."),
    ],
)
def test_files_that_do_not_work(text, says, tmp_path):
    path = tmp_path / "lesson7.py"
    path.write_text(text)
    verdict = workshop.check(LESSONS[6], path)
    assert not verdict.right and says in verdict.message and "Traceback" not in verdict.message


def test_a_loop_that_never_ends(tmp_path, monkeypatch):
    """It is ended with what it started."""
    path, number = tmp_path / "lesson7.py", tmp_path / "number"
    path.write_text(
        "import subprocess\nprocess = subprocess.Popen(['sleep', '60'], stdout=-3, stderr=-3)\n"
        f"open({str(number)!r}, 'w').write(str(process.pid))\nprocess.wait()\n"
    )
    communicate = subprocess.Popen.communicate

    def once_it_loops(process, *arguments, **options):
        eventually(lambda: number.exists() and number.read_text())
        return communicate(process, *arguments, **options)

    monkeypatch.setattr(subprocess.Popen, "communicate", once_it_loops)
    verdict = workshop.check(LESSONS[6], path, seconds=3.0)
    assert verdict == (False, "The check was ended after 3 s. Is there a loop that never ends?")
    command = Path(f"/proc/{number.read_text()}/cmdline")

    def has_ended():
        try:
            return command.read_bytes() == b""
        except OSError:
            return True

    eventually(has_ended)  # it was told to, and nobody waited for that

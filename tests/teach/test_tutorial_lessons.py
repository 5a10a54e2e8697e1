"""Every lesson runs on the CPU, its answers are right and wrong ones are refused with a hint."""

import re
from pathlib import Path

import pytest
from support.tutorial import recorded, right_answer, steps_of, talk, wrong_answers

from tritonllm.teach.tutorial.lesson import Exercise, LessonQuestion, Say, ValueTable
from tritonllm.teach.tutorial.lessons import LESSONS
from tritonllm.teach.tutorial.progress import ProgressFile
from tritonllm.teach.tutorial.screen import table_lines

PAGE = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text(encoding="utf-8")
NUMBERS = [lesson.number for lesson in LESSONS]
# What the questions must come to, worked out by hand: the engine gives the same, or it or the lesson has changed.
ANSWERS = {
    1: ["b", "22", "3072"],  # 11 + 12 - 1; 6 layers x 2 x 2 heads x 32 x 4 bytes
    2: ["3", "12", None, "4", "0"],  # ceil(37 / 16); 3 x 16 - 37 + 1; from the table; 2 shared + 2; none
    3: ["5", "20", "a"],
    4: ["48", "32", "16", "16"],
    5: ["4", "5", "129"],  # 128 / 32; 128 / 31; 128 + 1
    6: [None, "5", "c", "a"],  # 0.154 / 0.241, measured
    7: ["11", "a", None],  # 40 - 29; 0.6, measured
    8: ["0.00255", "99072", "a", "3"],  # 0.3242 / 127; 192 x 512 + 192 x 4
    9: ["12", "11", "0.174"],
    10: ["a", "12", "1536", "a"],
}


def questions(number: int) -> list[LessonQuestion]:
    return [step for step in steps_of(number) if isinstance(step, LessonQuestion)]


def test_lessons_are_numbered():
    assert [lesson.number for lesson in LESSONS] == list(range(1, 11)) == list(ANSWERS)


@pytest.mark.parametrize("number", NUMBERS)
def test_answers(number):
    asked = questions(number)
    assert len(asked) == len(ANSWERS[number])
    for ask, known in zip(asked, ANSWERS[number], strict=True):
        if known is not None:
            assert ask.answer.is_right(known), (ask.question, str(ask.answer))
        assert ask.answer.is_right(right_answer(ask.answer))
        assert not any(map(ask.answer.is_right, wrong_answers(ask.answer)))
        assert ask.hints and ask.why.strip()


@pytest.mark.parametrize(("number", "index", "expected"), [(6, 0, 0.154 / 0.241), (7, 2, 0.6)])
def test_measured_answers(number, index, expected):
    assert questions(number)[index].answer.is_right(f"{expected:.2f}")


@pytest.mark.parametrize("number", NUMBERS)
def test_a_lesson_is_prose_first_and_has_what_its_entry_says(number):
    steps = steps_of(number)
    assert isinstance(steps[0], Say)
    assert any(isinstance(step, Exercise) for step in steps) == LESSONS[number - 1].has_exercise
    for step in steps:
        if isinstance(step, ValueTable):
            assert step.rows and all(len(row) == len(step.columns) for row in step.rows)
            assert max(map(len, table_lines(step.columns, step.rows))) < 120
        if isinstance(step, Say | Exercise):
            assert "{" not in step.text  # an f was forgotten


@pytest.mark.parametrize("number", NUMBERS)
def test_a_learner_goes_through(number, tmp_path):
    """Wrong first, with every known mistake; a hint, or the answer of it; then right."""
    typed = []
    for step in steps_of(number):
        if isinstance(step, LessonQuestion):
            typed += [*wrong_answers(step.answer), "?", right_answer(step.answer)]
        elif isinstance(step, Exercise):
            typed.append("")
    progress = ProgressFile(tmp_path / "tutorial.json")
    screen = " ".join(talk(progress, recorded(number), *typed, folder=tmp_path).split())
    assert progress.read().of(number).finished
    assert screen.count("Right.") == len(questions(number)) + screen.count("Right. 16 programs")
    for ask in questions(number):
        assert " ".join(ask.why.split()) in screen
        for wrong in wrong_answers(ask.answer):
            hint = ask.answer.trap(wrong) or ask.hints[0]
            assert f"Not so. {' '.join(hint.split())}" in screen


def test_the_page_lists_the_lessons():
    rows = re.findall(r"^\| (\d+) ([^|]+) \|[^|]+\| ([^|]*)\|$", PAGE, flags=re.MULTILINE)
    assert [(int(number), title, bool(exercise.strip())) for number, title, exercise in rows] == [
        (lesson.number, lesson.title, lesson.has_exercise) for lesson in LESSONS
    ]


def test_the_lesson_on_the_page_runs():
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)
    scope = {}
    exec(code, scope)
    say, ask = scope["steps"]()
    tokens = int(re.search(r"\d+", say.text)[0])
    assert ask.answer.value == -(-tokens // 16) > tokens // 16, "the trap would be right"


def test_the_slot_of_lesson_2_is_of_the_table():
    table = next(step for step in steps_of(2) if isinstance(step, ValueTable)).rows[0]
    _, tokens, blocks = table
    ask = questions(2)[2]
    assert list(blocks) != sorted(range(len(blocks))), "the blocks lie in order: the question needs no table"
    assert ask.answer.value == blocks[(tokens - 1) // 16] * 16 + (tokens - 1) % 16

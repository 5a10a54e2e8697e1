"""Lesson 8: fewer bits for a number, and what that costs."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tritonllm.demo import model_path
from tritonllm.kernels import silu_and_mul, silu_and_mul_quantize
from tritonllm.teach.tutorial.lab import Lab
from tritonllm.teach.tutorial.lesson import LessonQuestion, MultipleChoice, Number, Say, Step, ValueTable

NAME = "model.layers.0.mlp.down_proj.weight"
WEIGHTS = "model.safetensors"
SUMS = {
    "47 + 38 =": "85",
    "12 + 59 =": "71",
    "66 + 27 =": "93",
    "8 + 75 =": "83",
    "31 + 31 =": "62",
    "90 + 14 =": "104",
}
BITS = (16, 8, 6, 4, 3, 2)


def rounded(weight: torch.Tensor, bits: int, *, by_row: bool = True) -> torch.Tensor:
    """The weight after a round trip through integers of so many bits, with one scale or one for each row."""
    weight = weight.float()
    top = 2 ** (bits - 1) - 1
    largest = weight.abs().amax(-1, keepdim=True) if by_row else weight.abs().amax()
    scale = largest / top
    return (weight / scale).round().clamp(-top, top) * scale


def error(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float((result.float() - expected.float()).norm() / expected.float().norm())


def steps() -> Iterator[Step]:
    weights = load_file(model_path() / WEIGHTS)
    weight = weights[NAME].float()
    yield from _scale(weight)
    yield from _rows(weight)
    yield from _float8()
    yield from _whole_model(weights)


def _scale(weight: torch.Tensor) -> Iterator[Step]:
    rows, columns = weight.shape
    largest = float(weight.abs().amax())
    yield Say(
        f"""
        A decode step reads all weights, so it is as fast as the weights are small. The demo model's weights are 16 bits
        each. Quantization stores them in 8 bits or less, which makes a model that is already trained both smaller and
        faster. (The engine of this package serves no quantized weights yet; its kernels can quantize what
        flows between the layers, as you will see.)

        The simplest way is to divide by a scale and round to an integer. With 8 bits there are the integers -127 to
        127. The scale is chosen so that the largest number just fits. Here is a real weight of the demo model,
        `{NAME}`, with {rows} rows of {columns} numbers. Its largest magnitude is {largest:.4f}.
        """
    )
    scale = largest / 127
    small = rounded(weight, 8, by_row=False).unique()
    gap = float(small.diff().median())
    yield LessonQuestion(
        "After rounding with one scale for the whole weight, how far are two neighbouring values apart? (Two digits "
        "will do.)",
        Number(
            gap,
            tolerance=0.02 * gap,
            traps={
                largest / 255: "The integers go from -127 to 127, and the largest magnitude becomes 127.",
                largest / 256: "The integers go from -127 to 127, and the largest magnitude becomes 127.",
            },
        ),
        [f"The integer 127 stands for {largest:.4f}, and 0 for 0."],
        f"""
        {largest:.4f} / 127 = {scale:.5f}: that is the scale. Rounding is off by half of it at most. Over the whole
        weight the relative error is {error(rounded(weight, 8, by_row=False), weight):.2%}.
        """,
    )


def _rows(weight: torch.Tensor) -> Iterator[Step]:
    rows, columns = weight.shape
    integers, scales = torch.empty(rows, columns, dtype=torch.int8), torch.empty(rows, dtype=torch.float32)
    small = integers.nbytes + scales.nbytes
    yield Say(
        """
        One large number makes the scale large for all. So one takes a scale for each row: a few bytes more, and a large
        number harms its own row only.
        """
    )
    yield LessonQuestion(
        f"In 16 bits the weight takes {rows} x {columns} x 2 = {2 * rows * columns:,} bytes. How many does it take "
        "as 8-bit integers with a float32 scale (4 bytes) for each row?",
        Number(
            small,
            traps={
                rows * columns: "And the scales?",
                rows * columns + 4: "That is with one scale for the whole weight.",
                rows * columns + 4 * columns: f"There are {rows} rows; {columns} is the length of one.",
            },
        ),
        [f"{rows} x {columns} integers of a byte, and {rows} scales."],
        f"{rows * columns:,} + {4 * rows:,} = {small:,} bytes, {small / (2 * rows * columns):.1%} of before.",
    )
    outlier = weight.clone()
    outlier[0, 0] = 20 * weight.abs().amax()
    rest = slice(1, None)
    whole = error(rounded(outlier, 8, by_row=False)[rest], outlier[rest])
    each = error(rounded(outlier, 8)[rest], outlier[rest])
    before = error(rounded(weight, 8, by_row=False)[rest], weight[rest])
    yield LessonQuestion(
        "Now the first number of row 0 is made 20 times as large as the largest one, and the weight is rounded "
        "again. We look at the error of all other rows. Where is it larger than before?",
        MultipleChoice(
            ("with one scale for all", "with a scale for each row", "with both"),
            [(True, False), (False, True), (True, True)].index((whole > 1.5 * before, each > 1.5 * before)),
            traps={1: "The other rows have scales of their own, which did not change."},
        ),
        ["Which rows use a scale that depends on that number?"],
        f"""
        With one scale for all, the error of the other rows went from {before:.2%} to {whole:.1%}; with a scale for each
        row it is {each:.2%}. Large models have a few such outliers in what flows between their layers, which is why the
        simplest way fails there.
        """,
    )


def _float8() -> Iterator[Step]:
    x = torch.randn(4, 512, generator=torch.Generator().manual_seed(0)) * torch.tensor([[0.01], [0.1], [1.0], [10.0]])
    q, scale = silu_and_mul_quantize(x)
    exact = silu_and_mul(x)
    yield Say(
        """
        Integers are evenly spaced. The format float8 (e4m3) is not: like all floating-point numbers it has small gaps
        between small numbers and large gaps between large ones. It has 4 bits for the exponent, 3 for the digits, and
        its largest number is 448. Recent GPUs multiply it twice as fast as 16-bit numbers.

        The kernel `silu_and_mul_quantize` computes the activation of an MLP and writes it as float8, with one scale for
        each row, in one pass. Here it runs on four rows of very different size.
        """
    )
    yield ValueTable(
        "silu_and_mul_quantize",
        ("row", "largest magnitude", "scale", "largest stored", "relative error"),
        [
            (
                *(i, float(exact[i].abs().amax()), float(scale[i]), float(q[i].float().abs().amax())),
                error(q[i].float() * scale[i], exact[i]),
            )
            for i in range(len(x))
        ],
    )
    yield Say(
        """
        Every row's largest number is stored as 448, and the error is about the same in all rows, however large they
        are.
        """
    )


def _whole_model(weights: dict[str, torch.Tensor]) -> Iterator[Step]:
    yield Say(
        f"""
        Does an error of some percent matter? The demo model can add. All of its weight matrices are now rounded to
        fewer and fewer bits, with a scale for each row, and each of these models is asked {len(SUMS)} sums:
        {", ".join(SUMS)}
        """
    )
    rows, story = [], {}
    for bits in BITS:
        right, text = _try(weights, bits)
        rows.append((bits, error(_matrix(weights, bits), weights[NAME]), right))
        story[bits] = text
    enough = min(bits for bits, _, right in rows if right == len(SUMS))
    shown = [(bits, off) for bits, off, _ in rows]
    yield ValueTable("error of one weight", ("bits", "relative error"), shown)
    yield LessonQuestion(
        f"Guess: with how many bits are all {len(SUMS)} sums still right? Give the smallest number of the table.",
        Number(
            enough,
            traps={
                bits: f"It gets them all right with {bits} bits, but fewer will do." for bits in BITS if bits > enough
            }
            | {bits: f"With {bits} bits it gets {right} of {len(SUMS)}." for bits, _, right in rows if bits < enough},
        ),
        [
            "Networks bear errors well that are as often up as down: in a sum of hundreds of products they mostly "
            "cancel."
        ],
        f"""
        {enough} bits. A sum has one right answer that is far more likely than all others, so it survives an error of
        {dict(shown)[enough]:.0%} in every weight. Where many continuations are about equally likely the text changes
        much earlier. Greedy from "Once upon a time":
        """,
    )
    yield ValueTable(
        "what it writes", ("bits", "sums right", "story"), [(b, f"{r} of {len(SUMS)}", story[b]) for b, _, r in rows]
    )


def _matrix(weights: dict[str, torch.Tensor], bits: int) -> torch.Tensor:
    return weights[NAME] if bits == 16 else rounded(weights[NAME], bits)


def _try(weights: dict[str, torch.Tensor], bits: int) -> tuple[int, str]:
    """Sums that a rounded model gets right, and how its story begins."""
    with tempfile.TemporaryDirectory() as folder:
        for file in model_path().iterdir():
            if file.name != WEIGHTS:
                shutil.copy(file, folder)
        some = {n: rounded(w, bits).to(w.dtype) if w.ndim == 2 and bits < 16 else w for n, w in weights.items()}
        save_file(some, Path(folder) / WEIGHTS, metadata={"format": "pt"})
        lab = Lab(model=folder)
    answers = {question: lab.ask(question, question, 4).outputs[0].text.split() for question in SUMS}
    right = sum(answers[question][:1] == [answer] for question, answer in SUMS.items())
    return right, " ".join(lab.ask("story", "Once upon a time", 14).outputs[0].text.split())

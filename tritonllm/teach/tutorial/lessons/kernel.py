"""Lesson 9: what a Triton kernel is, and the one behind lessons 1 and 2 in 60 lines."""

import math
from collections.abc import Iterator
from pathlib import Path

import torch

from tritonllm.teach.tutorial import solutions, workshop
from tritonllm.teach.tutorial.checks.kernel import Case, make_case
from tritonllm.teach.tutorial.lesson import Exercise, LessonQuestion, Number, Say, Step
from tritonllm.teach.tutorial.lessons import find

LENGTHS = (37, 64, 5)
HEADS, SIZE = 4, 16


def steps() -> Iterator[Step]:
    case = make_case(LENGTHS, heads=HEADS, size=SIZE)
    yield from _programs(case)
    yield from _loop(case)
    yield from _softmax(case)
    ran = workshop.check(find(9), Path(solutions.__file__).with_name("kernel.py"))
    yield Say(
        f"""
        The finished kernel just ran in a process of its own, with TRITON_INTERPRET=1: Triton's interpreter executes the
        programs one after the other with numpy, so no GPU is needed, and a debugger or a `print` works. The result was
        compared with `paged_decode_attention_ref`, plain torch of this package. The check says:

            {ran.message}
        """
    )
    yield Exercise(
        """
        Now it is your turn: the exercise is this kernel with three holes, the address, the mask and the factor. The
        check begins with the simplest case, so its message tells you which hole is wrong.
        """
    )


def _programs(case: Case) -> Iterator[Step]:
    sequences, heads, _ = case.q.shape
    yield Say(
        f"""
        A GPU has over a hundred processors, each of which works on blocks of numbers. In Triton you write what one
        program does with its block, and launch a grid of programs. Each asks for its own number (`tl.program_id`) and
        finds out from it what its part is. A value in a program is a number or a small array, and an operation works on
        all of an array at once: `tl.load` takes an array of addresses, `tl.sum` adds up, `tl.where` chooses. How the
        elements are dealt out to threads is the compiler's business.

        We write decode attention over a paged cache: one query for each sequence, {heads} heads, blocks of {SIZE}
        tokens. Here are {sequences} sequences of {", ".join(map(str, LENGTHS))} tokens. A program computes one head of
        one sequence:

            sequence = tl.program_id(0)
            head = tl.program_id(1)
        """
    )
    yield LessonQuestion(
        "How many programs are launched?",
        Number(
            sequences * heads,
            traps={
                sequences: "That is one for each sequence. Each has several heads.",
                sum(-(-n // SIZE) for n in LENGTHS): "That is how many blocks there are. A program loops over them.",
            },
        ),
        ["A head of a sequence is one program."],
        f"""
        {sequences} x {heads} = {sequences * heads}. A GPU with 132 processors would mostly idle with that. So real
        decode kernels also cut long sequences into parts, one program each, and merge the parts' results.
        """,
    )


def _loop(case: Case) -> Iterator[Step]:
    code = workshop.exercise_text(find(9)).split("\n")
    begin = next(i for i, line in enumerate(code) if "for i in range" in line)
    shown = "\n".join(" " * 8 + line for line in code[begin : begin + 7])
    used = -(-LENGTHS[0] // SIZE)
    yield Say(
        f"""
        A program walks along its sequence's block table. In each round it reads the number of a block, computes where
        its keys and values lie, loads them, and multiplies:

{shown}

        `rows` is for you to find: the cache is [blocks, places, key heads, head size], and the last index is the one
        that moves fastest. With {HEADS} query heads and {case.k_cache.shape[2]} key heads, neighbouring query heads
        share a key head.
        """
    )
    yield LessonQuestion(
        f"The sequence of {LENGTHS[0]} tokens takes {used} rounds of {SIZE} tokens. How many of the loaded keys of "
        "the last round are not its own?",
        Number(
            used * SIZE - LENGTHS[0],
            traps={LENGTHS[0] % SIZE: "So many of the last round are its own."},
        ),
        [f"{used} rounds load {used * SIZE} keys."],
        f"""
        {used * SIZE - LENGTHS[0]}: those places hold what an earlier owner of the block left there. Their scores must
        be set to -inf, so that their weights are exp(-inf) = 0. This is the mask.
        """,
    )


def _softmax(case: Case) -> Iterator[Step]:
    key_heads = case.k_cache.shape[2]
    blocks = case.block_tables[0]
    scale = case.q.shape[2] ** -0.5
    largest = []
    for head in range(HEADS):
        keys = case.k_cache[blocks[:2].long(), :, head // (HEADS // key_heads)]  # [2, S, D]
        largest.append([float(m) for m in ((keys @ case.q[0, head]) * scale).amax(-1)])
    head = max(range(HEADS), key=lambda h: largest[h][1] - largest[h][0])
    one, two = largest[head]
    factor = float(torch.tensor(one - max(one, two)).exp())
    yield Say(
        """
        Softmax divides exp(score) by the sum of all of them. exp overflows soon, so one subtracts the largest score
        first. But the largest of all scores is known only after the last round. FlashAttention goes on with what it
        has: keep the largest score so far, and a total and an output relative to it. When a larger one comes, multiply
        what was summed up by exp(old largest - new largest). Then all is as if the new one had been known from the
        start (this is called online softmax: Milakov and Gimelshein, 2018).
        """
    )
    yield LessonQuestion(
        f"In head {head} of the first sequence the largest score of the first block is {one:.2f} and that of the "
        f"second is {two:.2f}. By what is the total of the first block multiplied in the second round?",
        Number(
            factor,
            tolerance=0.02 * max(factor, 0.1),
            traps={
                math.exp(two - one): "The other way round: what was there before becomes smaller, not larger.",
                1.0: "Only if the second block had no larger score.",
            },
        ),
        [f"exp(old largest - new largest), with {one:.2f} and {two:.2f}."],
        f"""
        exp({one:.2f} - {two:.2f}) = {factor:.3f}. All of the first block's weights shrink by it, in the total and in
        the output alike, and their ratios stay. So attention needs no memory for its scores, however long the sequence.
        """,
    )

"""Lesson 3: who shares a step, and why nobody waits for the longest one."""

from collections.abc import Iterator, Sequence

from tritonllm.events import StepPlanned
from tritonllm.teach.tutorial.lab import Lab
from tritonllm.teach.tutorial.lesson import LessonQuestion, MultipleChoice, Number, Say, Step, ValueTable

LENGTHS = {"A": 4, "B": 20, "C": 12}
PROMPTS = {"A": "47 + 38 =", "B": "Once upon a time", "C": "There was a fox named"}
SEATS = 2


def steps() -> Iterator[Step]:
    yield Say(
        f"""
        A step of a large model is bound by memory: to compute one token, a GPU reads all weights once, and multiplies
        each of them with very little. If it reads the weights for two sequences at once, the step takes about as long
        and brings two tokens. So an engine runs as many sequences together as it can: a batch.

        Here three requests come at the same time. A wants {LENGTHS["A"]} tokens, B {LENGTHS["B"]} and C {LENGTHS["C"]}.
        To see more with less, this engine has only {SEATS} seats (`max_num_seqs={SEATS}`): two sequences run at a time.
        A prompt's step draws the first token, so a request of k tokens takes k steps.

        First the old way, static batching. A and B form a batch, and C waits until both have ended.
        """
    )
    static = Lab(max_num_seqs=SEATS)
    for batch in ("AB", "C"):
        for name in batch:
            static.add(name, PROMPTS[name], LENGTHS[name])
        static.run()
    yield ValueTable("static batching: a # is a token", ("request", "step by step"), timeline(static.steps))
    lab = Lab(max_num_seqs=SEATS)
    for name, length in LENGTHS.items():
        lab.add(name, PROMPTS[name], length)
    ran = lab.run()
    first = next(i for i, step in enumerate(ran, 1) if "C" in names(step))
    yield LessonQuestion(
        f"That took {len(static.steps)} steps, and for many of them a seat was empty. Now let C take a seat as soon as "
        "one is free. In which step does C run for the first time?",
        Number(
            first,
            traps={
                LENGTHS["A"]: "A still runs in that step: it draws its last token there.",
                LENGTHS["B"] + 1: "C needs only one seat. A leaves long before B.",
                1: f"There are {SEATS} seats, and A and B have them.",
            },
        ),
        ["A draws a token in each of its steps, the first one included. When has it all of them?"],
        f"""
        A runs in steps 1 to {LENGTHS["A"]}. The scheduler looks at its queue before every step, so C has A's seat in
        step {first}.
        """,
    )
    yield LessonQuestion(
        f"Static batching took {len(static.steps)} steps. How many does it take now, for all three?",
        Number(
            len(ran),
            traps={
                LENGTHS["B"] + LENGTHS["C"]: "C no longer waits for B.",
                sum(LENGTHS.values()): "That many tokens are drawn, but a step can bring two.",
            },
        ),
        [f"C begins in step {first} and takes {LENGTHS['C']} steps. B runs from step 1 on. Who is the last to end?"],
        f"""
        {len(ran)}: C runs beside B all the time, and B is the last to end. This is continuous batching, also called
        iteration-level scheduling: the batch is put together anew for every step.
        """,
    )
    yield ValueTable("continuous batching", ("request", "step by step"), timeline(ran))
    yield from _same_text(lab)


def _same_text(lab: Lab) -> Iterator[Step]:
    alone = Lab()
    same = all(
        list(alone.ask(name, PROMPTS[name], length).outputs[0].token_ids)
        == list(lab.outputs[name].outputs[0].token_ids)
        for name, length in LENGTHS.items()
    )
    yield Say(
        """
        B was computed beside A at first and beside C later, and in step 5 a whole prompt was computed beside B's single
        token. Each token attends to the keys in its own block table only.
        """
    )
    yield LessonQuestion(
        "The three requests were just run once more, each alone. Were their texts the same as in the batch?",
        MultipleChoice(("yes, all three", "no, the neighbours changed something"), 0 if same else 1),
        ["What does a token read that belongs to another request?"],
        f"""
        {"They were." if same else "They were not."} Neighbours share the weights that are read and nothing else. (On a
        GPU sums may be added up in another order when a batch has another size. So of two tokens that are as good as
        equally likely the other one may win, in 16-bit numbers above all.) B wrote: "{lab.text("B").strip()}".
        """,
    )


def names(step: StepPlanned) -> set[str]:
    """Who has a part in it."""
    return {part.sequence_id for part in step.parts}


def timeline(ran: Sequence[StepPlanned]) -> list[tuple[str, str]]:
    """For each request a line with a # for each step that it is in."""
    everyone = sorted({name for step in ran for name in names(step)})
    lines = [(name, "".join("#" if name in names(step) else "." for step in ran)) for name in everyone]
    return [*lines, ("steps", f"{len(ran)}, with {sum(len(step.parts) for step in ran)} tokens drawn")]

"""Lesson 10: one model in two processes."""

from collections.abc import Iterator
from typing import Any

import torch
from safetensors.torch import load_file
from torch.nn.functional import silu

from tritonllm.demo import model_path
from tritonllm.teach.tutorial.lab import Lab
from tritonllm.teach.tutorial.lesson import LessonQuestion, MultipleChoice, Number, Say, Step, ValueTable

PROMPT, NEW, RANKS = "There was a fox named", 16, 2


def steps() -> Iterator[Step]:
    yield from _by_hand()
    yield Say(
        f"""
        Now two processes really start, each with half of the model (`tensor_parallel_size={RANKS}`). On GPUs there
        would be one for each; here they meet on the CPU. This takes some seconds.
        """
    )
    lab = Lab(tensor_parallel_size=RANKS)
    group = lab.model.group
    sums = _count(group)
    lab.add("story", PROMPT, NEW)
    lab.step()
    begin = len(sums)
    lab.step()
    yield from _in_the_engine(lab, len(sums) - begin)
    lab.run()
    yield from _same_text(lab)


def _by_hand() -> Iterator[Step]:
    weights = load_file(model_path() / "model.safetensors")
    gate, up, down = (weights[f"model.layers.0.mlp.{name}_proj.weight"].float() for name in ("gate", "up", "down"))
    x = torch.randn(1, gate.shape[1], generator=torch.Generator().manual_seed(0))
    y = (silu(x @ gate.T) * (x @ up.T)) @ down.T
    half = len(gate) // RANKS
    yield Say(
        f"""
        A model that does not fit on one GPU, or is too slow there, is cut. Tensor parallelism cuts every layer, so that
        all GPUs work on every token together. The art is to cut so that they rarely have to talk.

        An MLP of the demo model has an input x of {gate.shape[1]} numbers. Two matrices make {len(gate)} numbers of it
        each (gate and up), these are combined one by one, and a third matrix (down) makes {len(down)} of them again.
        Each of the {len(gate)} numbers in the middle is computed from x alone, so a rank can compute half of them
        without the others: rank 0 takes the first {half} rows of gate and up, rank 1 the rest. Each then multiplies its
        {half} numbers with its {half} columns of down, and has a result of {len(down)} numbers.
        """
    )
    mine = [slice(rank * half, (rank + 1) * half) for rank in range(RANKS)]
    parts = [(silu(x @ gate[rows].T) * (x @ up[rows].T)) @ down[:, rows].T for rows in mine]
    yield ValueTable(
        "the first numbers of the results, from the real weights of layer 0",
        ("", "number 0", "number 1", "number 2"),
        [
            (name, *values[0, :3].tolist())
            for name, values in (("rank 0", parts[0]), ("rank 1", parts[1]), ("whole", y))
        ],
    )
    ways = {
        "add them up": parts[0] + parts[1],
        "take the mean": (parts[0] + parts[1]) / 2,
        "take the larger": torch.maximum(*parts),
    }
    errors = [float((result - y).norm()) for result in ways.values()]
    yield LessonQuestion(
        "What must be done with the two results to get the whole one?",
        MultipleChoice(tuple(ways), errors.index(min(errors))),
        ["A row of down times all the numbers is a sum of products. Each rank has half of the products."],
        """
        A product of matrices is a sum over the numbers in the middle. Each rank has the sum over its half, so the sum
        of both is the whole. It is called all-reduce, because all ranks get the result: each needs it for the next
        block. Attention is cut alike, by heads: each rank has some of them, with their keys and values, and multiplies
        with its part of the output projection.
        """,
    )


def _count(group: Any) -> list[int]:
    """Keep the size of each sum over the ranks from now on."""
    sums: list[int] = []
    reduce = group.all_reduce

    def counted(x: torch.Tensor) -> torch.Tensor:
        sums.append(x.numel())
        return reduce(x)

    group.all_reduce = counted
    return sums


def _in_the_engine(lab: Lab, sums: int) -> Iterator[Step]:
    spec = lab.model.spec
    layers = spec.num_layers
    yield LessonQuestion(
        f"The demo model has {layers} layers, each with attention and an MLP. How many sums over the ranks did one "
        "step take?",
        Number(
            sums,
            traps={
                layers: "That is one for each layer. Attention and the MLP both end with a product that was cut.",
                1: "A block needs its whole input before it can begin. So the parts are summed up behind each block.",
            },
        ),
        ["Behind each block that was cut there is one."],
        f"""
        {sums}: two for each layer, counted in rank 0 while it ran. Each rank waits for the other {sums} times a step,
        which is why tensor parallelism wants fast connections and stays inside one machine.
        """,
    )
    alone = Lab()
    part, whole = spec.layers[0].attention, alone.model.spec.layers[0].attention
    yield LessonQuestion(
        f"In one process a token takes {alone.bytes_per_token} bytes of cache (lesson 1). How many does it take in "
        f"each of the {RANKS} ranks?",
        Number(
            lab.bytes_per_token,
            traps={
                alone.bytes_per_token: "A rank attends with its own heads only. Whose keys and values does it need?"
            },
        ),
        ["The key and value heads are dealt out, too."],
        f"""
        {lab.bytes_per_token}: each rank has {part.num_kv_heads} of the {whole.num_kv_heads} key heads and
        {part.num_heads} of the {whole.num_heads} query heads. So the same memory of a GPU now holds twice the tokens,
        besides half of the weights.
        """,
    )


def _same_text(lab: Lab) -> Iterator[Step]:
    alone = Lab().ask("story", PROMPT, NEW).outputs[0]
    same = list(alone.token_ids) == list(lab.outputs["story"].outputs[0].token_ids)
    yield LessonQuestion(
        "Sums are added up in another order than before, so the last digits differ. Is the text the same as in one "
        "process?",
        MultipleChoice(("yes", "no"), 0 if same else 1),
        ["How close must two tokens be for the last digits to matter?"],
        f"""
        {"It is" if same else "It is not"}: "{PROMPT}{alone.text}". Rank 0 schedules and draws the tokens; the other
        follows, a step at a time. The scheduler, the block tables and the prefix cache know nothing of ranks.
        """,
    )
    yield Say(
        """
        That is the whole engine: a cache in blocks, a scheduler that fills each step, a step that computes, and a draw.
        `docs/design.md` names the file of each. You now know enough to read them.
        """
    )

"""Lesson 2: the cache in blocks, tables of them, and sequences that share them until they write."""

from collections.abc import Iterator

from tritonllm.teach.tutorial.lab import STORY, Lab, part_of
from tritonllm.teach.tutorial.lesson import Exercise, LessonQuestion, Number, Say, Step, ValueTable

SIZE = 16
PROMPT_TOKENS = 37


def steps() -> Iterator[Step]:
    lab = Lab(block_size=SIZE, enable_prefix_caching=False)
    prompt = lab.tokens(STORY, PROMPT_TOKENS)
    yield from _blocks(lab, prompt)
    yield from _addresses(lab)
    yield from _sharing(prompt)
    yield Exercise(
        """
        Now write it yourself. The exercise has two functions of a few lines: one finds the slots of a sequence's tokens
        from its block table, the other makes room for a new token, with copy-on-write. The check compares the first
        with what the engine's kernels read.
        """
    )


def _blocks(lab: Lab, prompt: list[int]) -> Iterator[Step]:
    longest = lab.llm.engine.config.model.max_model_len or 2048
    yield Say(
        f"""
        Where do a sequence's keys and values go? The simple way is one long array for each sequence, with room for the
        longest text that the model allows, {longest:,} tokens here. But nobody knows beforehand how long a text
        becomes, and most stay short. Kwon and others measured such systems: 20 to 38% of their cache held tokens, and
        the rest was reserved and empty.

        PagedAttention does what operating systems do with memory. The cache is a pool of blocks of a fixed size, here
        {SIZE} tokens. A sequence gets a block when it needs one, any block that is free, and keeps a list of their
        numbers in order: its block table. Token i lies in block `table[i // {SIZE}]`, in place `i % {SIZE}` of it.

        A request with a prompt of {len(prompt)} tokens comes to an engine with {lab.llm.engine.stats.num_blocks}
        blocks.
        """
    )
    lab.add("A", prompt, 36)
    first = lab.step()
    table = part_of(first, "A").block_ids
    yield LessonQuestion(
        f"How many blocks does the prompt of {len(prompt)} tokens take?",
        Number(
            len(table),
            traps={
                len(prompt) // SIZE: "Rounded down, the last tokens have no place. They need a block, too.",
                len(prompt): f"A block holds {SIZE} tokens.",
                len(prompt) / SIZE: "A sequence cannot have a part of a block: round up.",
            },
        ),
        [f"{len(prompt)} / {SIZE} = {len(prompt) / SIZE:g}, and the last block may be filled in part."],
        f"""
        The engine gave it {len(table)} blocks, its table is {list(table)}: {len(prompt) // SIZE} full ones and one with
        {len(prompt) % SIZE} of {SIZE} places used. The {len(table) * SIZE - len(prompt)} places that are empty are all
        that paging wastes for this sequence; the long array would keep {longest - len(prompt):,} empty.
        """,
    )
    while len(part_of(lab.steps[-1], "A").block_ids) == len(table):
        lab.step()
    last = part_of(lab.steps[-1], "A")
    drawn = last.start - len(prompt) + 1
    yield LessonQuestion(
        "Each step now computes one generated token and stores its key and value. The first generated token is "
        "number 1. Which generated token is the first that needs a new block?",
        Number(
            drawn,
            traps={
                drawn - 1: "That one takes the last free place of the block.",
                SIZE: "The last block of the prompt is not full yet.",
            },
        ),
        [
            f"{len(table)} blocks have {len(table) * SIZE} places, and the prompt fills {len(prompt)} of them.",
        ],
        f"""
        {len(table) * SIZE - len(prompt)} generated tokens fit behind the prompt. When number {drawn} was computed (at
        position {last.start}, counted from 0), the engine had to allocate, and the table became {list(last.block_ids)}.
        """,
    )


def _addresses(lab: Lab) -> Iterator[Step]:
    lab.add("B", lab.tokens(STORY)[40:60], 40)
    lab.run()
    step = [step for step in lab.steps if len(step.parts) == 2][-1]
    a, b = part_of(step, "A"), part_of(step, "B")
    yield Say(
        """
        Meanwhile a second request has come, B, and both grow in turns. Their blocks are mixed in the pool, and neither
        of them notices: attention looks up every address in the table.
        """
    )
    yield ValueTable(
        "block tables",
        ("request", "tokens", "table"),
        [("A", a.start + a.num_tokens, a.block_ids), ("B", b.start + b.num_tokens, b.block_ids)],
    )
    position = a.start
    slot = a.block_ids[position // SIZE] * SIZE + position % SIZE
    yield LessonQuestion(
        f"The pool is one array of slots: block b holds slots {SIZE}b to {SIZE}b + {SIZE - 1}. In which slot does "
        f"this step store token {position} of request A (counted from 0)?",
        Number(
            slot,
            traps={
                position: "That would be so if its blocks were the first of the pool, in order. Look at its table.",
                a.block_ids[position // SIZE]: "That is the block. Which slot of the pool is it?",
                a.block_ids[position // SIZE] * SIZE: "That is the first slot of the right block.",
            },
        ),
        [
            f"{position} // {SIZE} = {position // SIZE}: take that entry of A's table (counted from 0).",
            f"Entry {position // SIZE} is block {a.block_ids[position // SIZE]}; the place in it is {position} % "
            f"{SIZE}.",
        ],
        f"""
        Table entry {position // SIZE} is block {a.block_ids[position // SIZE]}, and the place in it is {position} %
        {SIZE} = {position % SIZE}: {a.block_ids[position // SIZE]} x {SIZE} + {position % SIZE} = {slot}. The engine
        does this once for each token that it stores (`slot_mapping`), and its kernels for each token that they read.
        """,
    )


def _sharing(prompt: list[int]) -> Iterator[Step]:
    lab = Lab(block_size=SIZE, enable_prefix_caching=False)
    full, rest = divmod(len(prompt), SIZE)
    yield Say(
        f"""
        A table makes it easy to share. Ask for two continuations of one prompt (`n=2`), and the prompt is computed
        once: both tables name the same blocks, and each block counts how many tables name it.

        They must part when they write. The {full} full blocks are never written again, so they stay shared. The last
        block holds {rest} tokens of the prompt and has room for {SIZE - rest} more, but the two sequences will put
        different tokens there. So the one that finds it shared gets a block of its own, and the {rest} tokens are
        copied into it first: copy-on-write.
        """
    )
    lab.add("C", prompt, 6, n=2, temperature=1.0, seed=7)
    lab.step()
    shared = lab.used_blocks
    lab.step()
    apart, copies = lab.used_blocks, lab.steps[-1].copies
    alone = 2 * shared
    yield LessonQuestion(
        f"The same prompt of {len(prompt)} tokens, {SIZE} to a block, n=2. After the first step, with the prompt "
        f"computed, {shared} blocks are in use. How many are in use after the second step, when each of the two has "
        "stored a token?",
        Number(
            apart,
            traps={
                alone: "That is what two separate requests take. The full blocks can be shared.",
                shared: "Both would write their own token into the same place of the last block.",
                shared + 2: "One of the two can go on in the block that is there; only the other needs a copy.",
            },
        ),
        [
            "Which blocks of the prompt will still be written to?",
            "The last block is needed twice, every other one once.",
        ],
        f"""
        {apart}: {full} shared ones and one for each sequence, where separate requests would take {alone}. The step
        began by copying {_copies(copies)}. The other sequence went on in the block that it had. With n=8 and a prompt
        of 1,000 tokens, sharing saves most of the memory: that is why parallel samples and beams are cheap.
        """,
    )
    lab.run()
    even = Lab(block_size=SIZE, enable_prefix_caching=False)
    even.add("D", prompt[: 2 * SIZE], 3, n=2, temperature=1.0, seed=7)
    even.step()
    even.step()
    even.run()
    copied = sum(len(step.copies) for step in even.steps)
    yield LessonQuestion(
        f"One more: with a prompt of exactly {2 * SIZE} tokens and n=2, how many blocks are copied?",
        Number(copied, traps={1: "Is there a block that is shared and still has room to write?"}),
        [f"{2 * SIZE} tokens fill {2} blocks of {SIZE}. Where does the next token go?"],
        f"""
        {copied}: the prompt ends where a block ends. The next token of each sequence begins a new block, and nothing
        that is shared is ever written.
        """,
    )


def _copies(copies: tuple[tuple[int, int], ...]) -> str:
    return ", ".join(f"block {source} to block {target}" for source, target in copies)

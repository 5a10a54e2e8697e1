"""Lesson 4: prompts that begin alike are computed once."""

from collections.abc import Iterator

from tritonllm.teach.tutorial.lab import STORY, Lab
from tritonllm.teach.tutorial.lesson import LessonQuestion, Number, Say, Step, ValueTable

SIZE = 16
SHARED = 57  # tokens that prompts have in common


def steps() -> Iterator[Step]:
    lab = Lab(block_size=SIZE)
    story = lab.tokens(STORY)
    begin = story[:SHARED]
    yield Say(
        f"""
        Many prompts begin alike: the same instructions, the same examples, the same conversation with one more turn.
        The keys and values of a token depend on the tokens before it and on nothing else. So if two prompts begin with
        the same tokens, the blocks of the cache for that beginning are the same, and need not be computed again.

        When a request ends, its blocks are free, but they are not erased. The engine remembers what each full block
        holds, and takes it back if a prompt asks for it before somebody else needs the memory.

        A first request with a prompt of {SHARED + 8} tokens has just run. Now a second one comes. Its prompt has the
        same {SHARED} tokens at the beginning and 8 others behind them. Blocks have {SIZE} tokens.
        """
    )
    first = lab.ask("first", begin + story[100:108], 4)
    second = lab.ask("second", begin + story[120:128], 4)
    cached = second.num_cached_tokens
    yield LessonQuestion(
        "How many of the second prompt's tokens came from the cache?",
        Number(
            cached,
            traps={
                SHARED: "Only whole blocks are remembered. The last shared tokens share a block with others.",
                SHARED // SIZE: "That many blocks. How many tokens are in them?",
                cached + SIZE: "The block behind these holds other tokens, too: it differs.",
            },
        ),
        [f"{SHARED} shared tokens fill {SHARED // SIZE} blocks of {SIZE}, and a part of the next one."],
        f"""
        {cached} (`num_cached_tokens` of the output; the first request had {first.num_cached_tokens}). The
        {SHARED % SIZE} shared tokens behind them lie in a block with tokens that differ, so they were computed again.
        """,
    )
    yield from _whole_prompt(lab, story)
    yield from _chain(lab, begin, story)
    yield from _eviction(story)


def _whole_prompt(lab: Lab, story: list[int]) -> Iterator[Step]:
    prompt = story[60 : 60 + 3 * SIZE]
    lab.ask("once", prompt, 4)
    again = lab.ask("again", prompt, 4).num_cached_tokens
    yield LessonQuestion(
        f"A prompt of exactly {3 * SIZE} tokens, {3} full blocks, is sent twice. How many tokens come from the cache "
        "the second time?",
        Number(
            again,
            traps={
                3 * SIZE: "Then nothing would be computed. But where do the logits come from that the first token is "
                "drawn from?",
                3 * SIZE - 1: "Nearly: the last token must be computed. But only whole blocks come from the cache.",
            },
        ),
        [
            "A step must compute at least one token, or there is nothing to draw the next one from.",
            "The last token of the prompt has to run through the model. Whole blocks before it can come from the "
            "cache.",
        ],
        f"""
        {again}. The cache holds keys and values, not results. The last token must go through the model to give the
        probabilities of what follows. So the last block is computed again, and the others come from the cache.
        """,
    )


def _chain(lab: Lab, begin: list[int], story: list[int]) -> Iterator[Step]:
    yield Say(
        f"""
        How does the engine find the blocks? It gives each full block a hash of its tokens and of the hash of the block
        before it. Equal hashes then mean that everything up to there is equal. Looking up a prompt is a walk: hash the
        first {SIZE} tokens, look in a dictionary, hash the next {SIZE} together with that, and so on until nothing is
        found.

        Now the prompt of the first request comes again, with one token changed: first token 0, then token 20 instead.
        """
    )
    prompt = begin + story[100:108]
    hits = {}
    for place in (0, 20):
        changed = [*prompt[:place], prompt[place] + 1, *prompt[place + 1 :]]
        hits[place] = lab.ask(f"changed {place}", changed, 4).num_cached_tokens
    unchanged = lab.ask("unchanged", prompt, 4).num_cached_tokens
    yield LessonQuestion(
        f"The prompt has {len(prompt)} tokens. How many came from the cache when token 20 was another one?",
        Number(
            hits[20],
            traps={
                20: "Only whole blocks count.",
                unchanged
                - SIZE: "The blocks behind token 20 hold the same tokens as before, but do they have the same "
                "keys and values?",
            },
        ),
        [f"Token 20 is in block {20 // SIZE} (counted from 0). What does the hash of block 2 depend on?"],
        f"""
        {hits[20]}: the walk ended at the block with token 20. The blocks behind it hold the same tokens, but each of
        them has attended to token 20, so their keys and values are others. The chain of hashes says just that.
        """,
    )
    yield ValueTable(
        "tokens from the cache",
        ("prompt", "cached tokens"),
        [("unchanged", unchanged), ("token 20 changed", hits[20]), ("token 0 changed", hits[0])],
    )
    yield Say(
        """
        So put what changes, the date or the user's name, at the end of a prompt and not at its beginning.
        """
    )


def _eviction(story: list[int]) -> Iterator[Step]:
    blocks = 8
    small = Lab(block_size=SIZE, num_blocks=blocks)
    prompt = story[: 3 * SIZE + 1]
    small.ask("first", prompt, 1)
    other = story[60 : 60 + 6 * SIZE + 1]
    small.ask("other", other, 1)
    needed = -(-len(other) // SIZE)
    left = small.ask("first again", prompt, 1).num_cached_tokens
    yield LessonQuestion(
        f"Memory ends. This cache has {blocks} blocks. A prompt of {len(prompt)} tokens ran and left 3 full blocks "
        f"behind. Then an unrelated prompt of {len(other)} tokens ran, which takes {needed} blocks. Then the first "
        "one came again. How many of its tokens were still in the cache? (Of a sequence's blocks the last is given "
        "up first, because a beginning is of use to more prompts.)",
        Number(
            left,
            traps={
                3 * SIZE: f"The second prompt took {needed} of {blocks} blocks: some of the 3 had to go.",
                0: f"{blocks} - {needed} = 1 block was left alone. Which one?",
            },
        ),
        [f"{needed} of {blocks} blocks were taken, first those that hold nothing, then old ones. One block is left."],
        f"""
        {left}: one block survived, and it was the first of the prompt. Free blocks stand in a queue, the least recently
        used in front. A sequence returns its blocks from the last to the first, so the end of a prompt is lost before
        its beginning. A cached block costs nothing until somebody needs its memory.
        """,
    )

"""Finds the leading blocks that the decodes of a step share, and whether it pays to read them once for all. No torch.

Sequences share blocks where the prefix cache gave both the same ones. The engine sees it in their block tables, anew in
each step: the requests that computed a prompt before it was cached hold copies of their own, so what is looked for is
the group of decodes that is worth most, not a prefix of all.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from tritonllm.engine.data.step import SharedPrefix, Step

# Reading the shared keys apart takes three more launches. On an H200 (32 heads, 8 of keys) it gained from 127 to 255 MB
# on at any batch size: batch 128 x 256 shared keys (127 MB) 52.5 us against 57.5, 256 x 128 (128 MB) 78.8 against 78.4.
MIN_SAVED_BYTES = 128 << 20
# Beside prompts no captured step shares keys, and launching a layer's kernels one by one takes the host 0.9 ms: of that
# a captured step needs 0.2 to 0.5 ms for products, and in the rest reads so many keys again.
MIN_SAVED_BESIDE_PROMPTS = 2 << 30


def find_shared_prefix(tables: np.ndarray, full_blocks: np.ndarray, least: int) -> SharedPrefix | None:
    """The leading blocks whose sharing saves most reads.

    Args:
        tables: ``[B, M]``, each sequence's blocks in order.
        full_blocks: ``[B]``, how many of them may be shared.
        least: block reads that sharing must save, at least 1; n sequences that share m blocks save ``(n - 1) m``.

    Returns:
        How many blocks, and ``[B]`` bool which sequences begin with them; None if too few reads would be saved, or if
        fewer than half of the sequences would share: the others' queries visit the shared keys in vain.
    """
    batch = len(tables)
    if batch < 2 or (batch - 1) * int(full_blocks.max()) < least:
        return None
    # Even if all of them share, it takes blocks up to this column: the largest group that agrees there is followed.
    column = -(-least // (batch - 1)) - 1
    candidates = np.flatnonzero(full_blocks > column)
    _, first, counts = np.unique(tables[candidates, column], return_index=True, return_counts=True)
    if 2 * counts.max(initial=0) < batch:
        return None
    leader = candidates[first[counts.argmax()]]
    width = full_blocks[leader]
    differs = np.ones((batch, width + 1), dtype=bool)  # the last column ends every row
    np.not_equal(tables[:, :width], tables[leader, :width], out=differs[:, :width])
    common = np.minimum(differs.argmax(1), full_blocks)  # leading blocks that each shares with the leader
    lengths = np.sort(common)[::-1]
    saved = lengths * np.arange(batch)  # by the sequences up to this one, cut to the shortest of them
    saved[: (batch - 1) // 2] = 0
    best = int(saved.argmax())
    if saved[best] < least:
        return None
    return SharedPrefix(int(lengths[best]), common >= lengths[best])


class CascadePlanner:
    """Looks for steps that gain from attention to a shared prefix apart.

    Args:
        block_tokens: tokens of a block; no ranks split its keys where prefixes are attended to apart.
        block_bytes: bytes of a block's keys and values in one layer; where layers differ, on average.
    """

    def __init__(self, block_tokens: int, block_bytes: int) -> None:
        self._block_tokens = block_tokens
        self._least = max(1, -(-MIN_SAVED_BYTES // block_bytes))
        self._least_beside_prompts = max(1, -(-MIN_SAVED_BESIDE_PROMPTS // block_bytes))

    def may_plan(self, sequences: int, longest: int) -> bool:
        """Whether a step of so many decodes of at most ``longest`` tokens can ever gain."""
        return (sequences - 1) * (longest // self._block_tokens) >= self._least

    def plan(self, tables: np.ndarray, seq_lens: np.ndarray) -> SharedPrefix | None:
        """What decodes with these block tables ``[D, M]`` and lengths ``[D]`` share; ``None`` if it does not pay.

        The block that takes a sequence's new token is never shared.
        """
        return find_shared_prefix(tables, (seq_lens - 1) // self._block_tokens, self._least)

    def unless_captured(self, step: Step, captured: Callable[[Step], object]) -> Step:
        """A step of decodes that share and of prompts; if it is captured without sharing, and sharing would save too
        little for what launching it takes, the decodes share nothing.

        Args:
            captured: what holds a step; ``None`` if nothing does.
        """
        shared = step.shared
        if shared is None or shared.blocks * (int(shared.shares.sum()) - 1) >= self._least_beside_prompts:
            return step
        apart = replace(step, shared=None)
        return step if captured(apart) is None else apart

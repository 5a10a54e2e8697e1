"""Which sizes of steps are captured: enough that padding costs little, and few enough for a short start. No torch."""

from bisect import bisect_left
from collections.abc import Sequence

SMALL = (64, 128, 192, 256, 384, 512, 768, 1024)  # prompt tokens of captured steps
# and, beside the largest step, of those that are worth it only where the host is what takes longer
LARGE = (2048, 4096)
FREE_ROWS = 128  # that take hardly longer than one: reading the weights bounds their products
FEWEST = 8  # decodes that a room beside prompts holds


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture: dense where padding would cost most, then every 16."""
    sizes = [n for n in (1, 2, 4, 8) if n <= max_num_seqs]
    sizes += range(16, max_num_seqs + 1, 16)
    return sizes if sizes[-1] == max_num_seqs else [*sizes, max_num_seqs]


def shared_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture of sequences that share a prefix: fewer, since their padding costs little beside the keys
    that they have."""
    sizes = [n for n in (16, 32) if n < max_num_seqs]
    return [*sizes, *range(64, max_num_seqs, 64), max_num_seqs]


def padded(n: int, sizes: Sequence[int]) -> int:
    """The smallest of the sizes, in their order, that holds ``n`` rows; 0 for none.

    Logits are computed of so many rows, also in steps that are not captured: with the rows cuBLAS changes kernels, and
    loads each when it first comes, which waits for all that the device is doing. These have come in the captures.
    """
    return sizes[bisect_left(sizes, n)] if n else 0


def late_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture of decodes that are drawn outside of their graph: few, for there are few such steps."""
    return [*(n for n in (8, 64) if n < max_num_seqs), max_num_seqs]


def decode_sizes(max_num_seqs: int, tokens: int) -> list[int]:
    """Room for decodes beside so many prompt tokens: a step has at most a third more rows than the next smaller one,
    beyond those that cost no more than reading the weights. Beside more tokens than ``SMALL`` a padded decode costs
    nothing.

    (With room for 8, 64 and 256, and prompts of 64, 256, 512 and 1024 tokens, a prompt of 128 tokens beside 70 decodes
    would be a step of 512 rows, which takes Llama-3.1-8B 13.1 ms on an H200; one of 208 takes 7.9.)
    """
    sizes = [max_num_seqs]
    if tokens > SMALL[-1]:
        return sizes
    while sizes[0] + tokens > FREE_ROWS:
        most = (sizes[0] + tokens) * 3 // 4 - tokens
        fewer = [n for n in graph_sizes(max_num_seqs) if FEWEST <= n <= most]
        if not fewer:
            break
        sizes.insert(0, fewer[-1] if fewer[-1] >= 4 * FEWEST else FEWEST)
    pays = sizes[0] > FEWEST and 20 * (sizes[0] + tokens) >= 21 * (FEWEST + tokens)
    return [FEWEST, *sizes] if pays else sizes


def token_sizes(budget: int, host_bound: int) -> list[int]:
    """Room for prompt tokens in captured steps.

    Args:
        budget: most tokens of a step.
        host_bound: tokens of a step from which on the GPU takes longer than the host for its launches.
    """
    large = (n for n in sorted({*LARGE, budget}) if SMALL[-1] < n <= min(budget, host_bound))
    return [*(n for n in SMALL if n <= budget), *large]


def chunk_capacity(tokens: int) -> int:
    """Room for prompt chunks in a captured step, the padding's among them: of four tokens each, 16 to 64. A chunk that
    is not there costs a row of logits."""
    return min(64, max(16, tokens // 4))

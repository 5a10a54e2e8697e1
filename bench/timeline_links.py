"""What the ranks of a tensor parallel engine exchange in one decode step, and how long that takes."""

from collections.abc import Sequence
from typing import Any

from tritonllm.dist.symmetric import FURTHER, REACH

COLLECTIVES = ("_all_reduce_kernel", "nccl", "_shard_kernel", "_limited_kernel")
SUMS_A_LAYER = 2  # behind attention, and behind the MLP or the experts
ELEMENT = 2  # bytes, bfloat16


def bytes_sent(nbytes: int, ranks: int) -> float:
    """What one rank sends to the others for one sum of so many bytes, in the way that the engine takes for it: in one
    shot its part to each of them; in two shots, or by NCCL, what reducing and gathering sends at least."""
    one_shot = nbytes <= REACH.get(ranks, FURTHER).one_shot
    return nbytes * (ranks - 1) if one_shot else nbytes * 2 * (ranks - 1) / ranks


def links(kernels: Sequence[dict[str, Any]], running: int, config: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Of a decode step in bfloat16 without stages: the time of all collectives in microseconds and their share of it,
    and what a rank sends for the sums behind its blocks, in bytes and in GB/s of the time that these take.

    Args:
        kernels: a row for each kernel of the step (:func:`bench.timeline.table`).
        running: sequences.
        config: the model's, in Hugging Face format.
    """
    found = [kernel for kernel in kernels if kernel["name"].startswith(COLLECTIVES)]
    sums = SUMS_A_LAYER * config["num_hidden_layers"]
    sent = sums * bytes_sent(running * config["hidden_size"] * ELEMENT, ranks)
    summing = sum(kernel["us"] for kernel in found if kernel["count"] >= sums)
    result = {"ranks": ranks, "collectives_us": sum(kernel["us"] for kernel in found)}
    result |= {"share": sum(kernel["share"] for kernel in found), "sums": sums, "bytes_sent": sent}
    return result | {"sums_us": summing, "gb_per_s": sent / summing / 1e3 if summing else 0.0}


def line(found: dict[str, Any]) -> str:
    """The same in words."""
    return (
        f"{found['ranks']} ranks: collectives {found['collectives_us']:.0f} us of a step ({found['share']:.1f}%); each "
        f"rank sends {found['bytes_sent'] / 1e6:.1f} MB over the links for {found['sums']} sums, "
        f"{found['gb_per_s']:.0f} GB/s while they run"
    )

"""Mixture of experts: which kernels :func:`tritonllm.kernels.fused_moe` takes, and with what tiles."""

from typing import Any

import torch
import triton

from tritonllm.kernels.dense import FP4
from tritonllm.kernels.moe.arguments import Experts
from tritonllm.kernels.runtime import tuning
from tritonllm.kernels.runtime.variants import Variant, Variants

# Loads of 16 bytes need rows that are a multiple of 16 elements; without them, and in float32, tiles stay small.
SMALL_TILE = {"BLOCK_N": 32, "BLOCK_K": 32, "GROUP_M": 1, "num_warps": 4, "num_stages": 2}
TILES = {  # by BLOCK_M; 60 to 150 KB of loads in flight on an SM
    16: {"BLOCK_N": 64, "BLOCK_K": 128, "GROUP_M": 1, "num_warps": 4, "num_stages": 4},
    32: {"BLOCK_N": 128, "BLOCK_K": 128, "GROUP_M": 1, "num_warps": 4, "num_stages": 3},
    64: {"BLOCK_N": 128, "BLOCK_K": 64, "GROUP_M": 8, "num_warps": 4, "num_stages": 4},
    128: {"BLOCK_N": 256, "BLOCK_K": 64, "GROUP_M": 16, "num_warps": 8, "num_stages": 3},
}
SM90_SHARE = 32  # pairs an expert from which the Hopper kernel wins; below, weights bound both


def portable_config(
    tokens: int, top_k: int, experts: int, n: int, i: int, itemsize: int, activation: str
) -> tuning.Config:
    """One tile for both products. BLOCK_M holds an expert's share of the pairs and a quarter more, so that most weights
    are read once; long rows pay for a deeper pipeline (16 tokens of E8 643 us with five stages, 670 with four; E128
    202 and 200).
    """
    pairs = tokens * top_k
    small = itemsize == 4 or n % 16 != 0 or i % 16 != 0
    share = triton.next_power_of_2(triton.cdiv(5 * pairs, 4 * experts))
    block_m = max(16, min(share, 32 if small else 128))
    config = {"kernel": "portable", "BLOCK_M": block_m, **(SMALL_TILE if small else TILES[block_m])}
    if not small and block_m == 16 and min(n, i) >= 4096:
        config["num_stages"] = 5
    if activation == "gelu" and block_m == 128:
        config["BLOCK_N"] = 128  # erf needs registers that the larger product has taken (sm_80)
    return config


def narrow_config(
    tokens: int,
    top_k: int,
    experts: int,
    n: int,
    i: int,
    itemsize: int,
    activation: str,
    arch: str,
    format: str,
    group: int,
) -> tuning.Config:
    """For weights of a byte or half a byte an element: the tiles of 16 bits, the largest half as wide, since widened
    weights need registers, too. Of floats of four bits all have 128 columns: so many scales are one word."""
    config = portable_config(tokens, top_k, experts, n, i, itemsize, activation)
    if format == FP4 and config["BLOCK_K"] == 64:
        config |= {"BLOCK_K": 128, "num_stages": config["num_stages"] - 1, "num_warps": 8}
    return config | {"BLOCK_N": 128} if config["BLOCK_N"] > 128 else config


def invariant_config(
    *, tokens: int, top_k: int, experts: int, n: int, i: int, itemsize: int, activation: str, arch: str
) -> tuning.Config:
    """For :func:`tritonllm.kernels.fused_moe` with ``batch_invariant``: the portable kernels at any size.

    Their sums are one chain along K in every tile, as those of `kernels/dense/invariant.py`, so the tile may follow the
    number of pairs. The direct kernels cut a sum among their threads. From no table, since an entry may name those.
    """
    return portable_config(tokens, top_k, experts, n, i, itemsize, activation)


def sm90_config(tokens: int, top_k: int, experts: int) -> tuning.Config:
    """A tile holds all pairs of most experts, up to 288: then each weight is read once; larger shares are cut in 272.

    E8, 1024 tokens: tiles of up to 288 leave the second product 256 tiles for 132 processors, two rounds instead of
    three with 272 (374 us instead of 458).
    """
    pairs = tokens * top_k
    share = 5 * pairs / (4 * experts)
    tiles = {80: (64, 16, 8), 128: (128, 0, 6)}
    wide = (256, 32, 4) if pairs <= 288 * experts else (256, 16, 4)
    place, tail, stages = next((tiles[most] for most in tiles if share <= most), wide)
    return {"kernel": "sm90", "PAIRS": place, "TAIL": tail, "STAGES": stages}


def at_most(tokens: int) -> int:
    """The next power of two: whatever decides which kernel is compiled asks for this many tokens, so that steps between
    two powers need no other kernels than those that have been warmed up."""
    return triton.next_power_of_2(tokens)


def eviction_policy(out: torch.Tensor, top_k: int) -> str:
    """The eviction policy of a product's stores: the second-level cache (60 MB on an H200) is to hold a small result
    for the next kernel.

    Otherwise weights push it out: 256 tokens of E128 take 290 us instead of 297. Larger results gain less: 1024 tokens
    328 us with the first product's 13 MB held, 329 with the second's 34 MB too, 331 with neither.
    """
    pairs, columns = out.shape
    most = at_most(pairs // top_k) * top_k * columns * out.element_size()
    return "evict_last" if most <= 16e6 else ""


def _direct_pays(tokens: int, top_k: int, experts: int) -> bool:
    """One token's pairs share no expert, so there is nothing to group; with few experts for two tokens grouping wins:
    E8 295 us against 312, but E128 46 against 38."""
    return tokens == 1 or 8 * tokens * top_k <= experts


def _sm90_pays(tokens: int, top_k: int, experts: int) -> bool:
    return tokens * top_k >= SM90_SHARE * experts


# The direct kernels have tables of their own.
FUSED_MOE = Variants(
    "fused_moe",
    Variant("direct", "moe/portable/direct.py", pays=_direct_pays),
    Variant("sm90", "moe/sm90/products.py", (90,), "fits", _sm90_pays, sm90_config),
    Variant("portable", "moe/portable/products.py", config=portable_config),
)


def config_key(x: torch.Tensor, experts: Experts, top_k: int, num_ids: int) -> dict[str, Any]:
    """What a configuration depends on. ``num_ids``: experts here and elsewhere; those elsewhere take their share."""
    arch = "any" if experts.narrow else FUSED_MOE.own_arch(x.device, x, experts.w_gate_up, experts.w_down)
    _, n, i = experts.sizes()
    sizes = {
        "tokens": at_most(len(x)),
        "top_k": top_k,
        "experts": num_ids,
        "n": n,
        "i": i,
        "itemsize": x.element_size(),
    }
    return {**sizes, "activation": experts.activation, "arch": arch}

"""Mixture of experts: the default tiles of the two grouped products of :mod:`tritonllm.kernels.moe_gemm`."""

import triton

from tritonllm.kernels import tuning

# Loads of 16 bytes need rows that are a multiple of 16 elements; without them, and in float32, tiles stay small.
SMALL_TILE = {"BLOCK_N": 32, "BLOCK_K": 32, "GROUP_M": 1, "num_warps": 4, "num_stages": 2}
TILES = {  # by BLOCK_M; 60 to 150 KB of loads in flight on an SM
    16: {"BLOCK_N": 64, "BLOCK_K": 128, "GROUP_M": 1, "num_warps": 4, "num_stages": 4},
    32: {"BLOCK_N": 128, "BLOCK_K": 128, "GROUP_M": 1, "num_warps": 4, "num_stages": 3},
    64: {"BLOCK_N": 128, "BLOCK_K": 64, "GROUP_M": 8, "num_warps": 4, "num_stages": 4},
    128: {"BLOCK_N": 256, "BLOCK_K": 64, "GROUP_M": 16, "num_warps": 8, "num_stages": 3},
}


def _tile(block_m: int, k: int) -> tuning.Config:
    """Long rows pay for a deeper pipeline: 16 tokens of E8 643 us with five stages, 670 with four; E128 202 and 200."""
    return TILES[block_m] | ({"num_stages": 5} if block_m == 16 and k >= 4096 else {})


def _needs_small_tile(n: int, k: int, itemsize: int) -> bool:
    return itemsize == 4 or n % 16 != 0 or k % 16 != 0


def default_gate_up_config(pairs: int, experts: int, n: int, k: int, itemsize: int, activation: str) -> tuning.Config:
    """BLOCK_M holds an expert's share of the pairs and a quarter more, so that most weights are read once."""
    small = _needs_small_tile(n, k, itemsize)
    share = triton.next_power_of_2(triton.cdiv(5 * pairs, 4 * experts))
    block_m = max(16, min(share, 32 if small else 128))
    config = {"BLOCK_M": block_m, **(SMALL_TILE if small else _tile(block_m, k))}
    if activation == "gelu" and block_m == 128:
        config["BLOCK_N"] = 128  # erf needs registers that the larger product has taken (sm_80)
    return config


def default_down_config(pairs: int, experts: int, n: int, k: int, itemsize: int, block_m: int) -> tuning.Config:
    """The tile for a BLOCK_M that the first product has chosen."""
    return SMALL_TILE if _needs_small_tile(n, k, itemsize) else _tile(block_m, k)


def is_direct(tokens: int, pairs: int, experts: int) -> bool:
    """One token's pairs share no expert, so there is nothing to group; of two tokens some do, and grouping wins."""
    return tokens == 1 or 16 * pairs <= experts


SM90_SHARE = 32  # pairs an expert from which the Hopper kernel wins; below, weights bound both


def default_sm90_config(pairs: int, experts: int, itemsize: int, n: int, k: int) -> tuning.Config:
    """A tile holds all pairs of most experts, up to 272: then each weight is read once."""
    if 5 * pairs <= 4 * 128 * experts:
        return {"PAIRS": 128, "TAIL": 0, "WB": 1, "STAGES": 6}
    return {"PAIRS": 256, "TAIL": 16, "WB": 1, "STAGES": 4}

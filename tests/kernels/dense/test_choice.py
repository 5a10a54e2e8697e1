"""What products of few rows do where no table says: a function of sizes, no kernel."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tritonllm.kernels.dense.choice import MIN_PART, PROCESSORS, TORCH, default_config
from tritonllm.kernels.dense.linear import MIN_BLOCK_N
from tritonllm.kernels.dense.portable.rows import MAX_ROWS

MEMORY = 227 << 10  # of a processor, for its programs; each takes 1 KiB more than it asks for
LEAST_MEMORY = 163 << 10  # of an A100's program

ROWS = [2, 4, 8, 16, 32, 64]


def bytes_of(config, m):
    return (config["BLOCK_N"] + max(16, m)) * config["BLOCK_K"] * 2 * config["num_stages"]


def filled(config, m, n):
    """The part of the places for programs that is taken while they run."""
    places = PROCESSORS * (MEMORY // (bytes_of(config, m) + 1024))
    programs = math.ceil(n / config["BLOCK_N"]) * config["SPLIT_K"]
    return programs / (places * math.ceil(programs / places))


@pytest.mark.parametrize("m", [4, 16])
@pytest.mark.parametrize("k", [4096, 5120, 8192, 14336])
def test_no_last_round_of_a_few_programs(m, k):
    """Of 5120 rows of a weight 160 programs ran on 132 processors in two rounds: 1.5 times as long."""
    tiles = {n: default_config(m, n, k, 2, "no") for n in range(1024, 16384, 64)}
    parts = {n: filled(config, m, n) for n, config in tiles.items() if config != TORCH}
    assert len(parts) > 80 and min(parts.values()) > 2 / 3, min(parts.items(), key=lambda item: item[1])


@pytest.mark.parametrize("m", [32, 64])
@pytest.mark.parametrize("k", [4096, 8192, 14336])
def test_one_well_filled_round_or_cublas(m, k):
    """17 to 64 rows of a large weight: the products of a rank's share of 70 billion weights took 4 to 5% longer."""
    for n in range(2112, 16384, 64):
        config = default_config(m, n, k, 2, "no")
        programs = math.ceil(n / config["BLOCK_N"]) * config["SPLIT_K"] if config != TORCH else PROCESSORS
        assert 0.84 <= programs / PROCESSORS <= 1, (n, config)
    assert default_config(m, 8192, k, 2, "no") != TORCH and default_config(m, 5120, k, 2, "no") == TORCH


@given(
    m=st.sampled_from(ROWS),
    n=st.integers(1, 2**15),
    k=st.integers(1, 2**10).map(lambda k: 16 * k),
    gated=st.sampled_from(["yes", "no"]),
)
def test_tiles_fit(m, n, k, gated):
    """Into a processor's memory, also of one before Hopper; and no part of K is shorter than it was meant to be."""
    config = default_config(m, n, k, 2, gated)
    if config["kernel"] != "tiles":
        assert config == TORCH or m <= MAX_ROWS
        return
    assert config["BLOCK_N"] >= MIN_BLOCK_N and bytes_of(config, m) <= LEAST_MEMORY
    assert config["SPLIT_K"] == 1 or k // config["SPLIT_K"] >= MIN_PART // 2


@pytest.mark.parametrize(("itemsize", "k"), [(4, 4096), (2, 4097)])
def test_without_tensor_cores_and_wide_loads(itemsize, k):
    assert default_config(16, 4096, k, itemsize, "no") == TORCH

"""Which kernel multiplies up to 64 rows, and by what tile, where no table says.

Reading the weight bounds such a product, so what counts is that all processors read all the time: how many programs
there are beside how many find room. docs/notebook/products.md has the measurements.
"""

import math
from typing import NamedTuple

import triton

from tritonllm.kernels.dense.invariant import SMALL
from tritonllm.kernels.dense.portable.rows import MAX_ROWS
from tritonllm.kernels.dense.weight import INT4, PACKED
from tritonllm.kernels.runtime import tuning

TORCH = {"kernel": "torch"}
WIDEST = {"kernel": "tiles", "BLOCK_N": 128, "BLOCK_K": 128, "SPLIT_K": 1, "num_warps": 8, "num_stages": 3}
PROCESSORS = 132  # of an H200 and an H100, for which the defaults are
MIN_PART, MAX_PARTS = 1024, 4  # of K: the least columns and the most parts
WELL_FILLED = 0.84  # 7168 rows of a weight fill 0.85 of the chip, and tiles are as fast as cuBLAS


class WeightTile(NamedTuple):
    """A program's part of a product in `portable/tiles.py`; with four warps.

    Attributes:
        block_n: how many rows of the weight.
        block_k: how many columns at once.
        stages: how many stages the pipeline has.
        programs: how many programs find room on a processor.
    """

    block_n: int
    block_k: int
    stages: int
    programs: int = 1

    def config(self, split: int) -> tuning.Config:
        tile = {"BLOCK_N": self.block_n, "BLOCK_K": self.block_k, "SPLIT_K": split, "num_warps": 4}
        return {"kernel": "tiles", **tile, "num_stages": self.stages}

    def rounds(self, n: int, split: int) -> float:
        """How often the chip is filled, the last time in part."""
        return triton.cdiv(n, self.block_n) * split / (PROCESSORS * self.programs)

    def filled(self, n: int, split: int) -> float:
        """The part of the places for programs that is taken while they run."""
        rounds = self.rounds(n, split)
        return rounds / math.ceil(rounds)

    def one_round(self, n: int, k: int) -> int:
        """The parts of K with which all programs run at once and are the most, each long enough; 0: even one are too
        many."""
        return min(PROCESSORS * self.programs // triton.cdiv(n, self.block_n), max(1, k // MIN_PART), MAX_PARTS)


# Memory of a program: 147, 74 and 123 kB for up to 16 rows, 147 for 32, 131 and 147 for 64.
DEEP, THIRD, WIDE = WeightTile(32, 256, 6), WeightTile(32, 128, 6, programs=3), WeightTile(64, 128, 6)
WIDE_OF_64, NARROW_OF_64 = WeightTile(64, 64, 8), WeightTile(32, 128, 6)


def default_config(m: int, n: int, k: int, itemsize: int, gated: str) -> tuning.Config:
    """What was fastest on an H200 among some 20 configurations for each size of Qwen3-0.6B and Llama-3.1-8B, and of 20
    weights of other models and of ranks that share one.

    Chosen in decode steps as a whole, in which a product's weights are loaded while the kernel before it ends. One row,
    and two of a small weight: fewer weights a thread where the rows are few, more of a small or gated weight. Up to 16
    rows, and 64 of a small weight: tiles. More rows of a large weight: tiles if there are several for each processor, 2
    to 12% faster than cuBLAS for 10 such weights of 8 models (with 64 rows two are 1% slower), or if one for each fills
    the chip; otherwise cuBLAS comes near, and a wrong choice costs most.
    """
    small = n * k <= SMALL
    if m == 1 or (m <= MAX_ROWS and small):
        block_n = 4 if n >= 2048 and k <= 8192 else 2
        whole = max(32, triton.next_power_of_2(k))
        many = m == 1 and itemsize == 2 and (small or gated == "yes")
        per_thread = 32 if n < 2048 else 128 if many else 64
        most = 8 if itemsize == 2 and block_n * whole <= 2**15 else 16
        warps = min(most, max(1, block_n * whole // (32 * per_thread)))
        tile = {"BLOCK_N": block_n, "BLOCK_K": min(whole, 4096 if k < 4096 else 2048), "num_warps": warps}
        return {"kernel": "rows", "LATE": SMALL < n * k <= 2**25} | tile
    if itemsize == 4 or k % 16:  # no tensor cores, no wide loads
        return TORCH
    if m <= 16:
        return _tile_of_16_rows(n, k)
    if small:
        split = max(1, min(PROCESSORS * 32 // n, k // 512))
        if m <= 32:  # 98 kB: two programs find room on a processor
            split = max(split, min(2 * PROCESSORS * 32 // n, k // MIN_PART, MAX_PARTS))
        stages = 6 if m <= 32 or n * split <= PROCESSORS * 32 else 4  # 147 kB: one program a processor
        return WeightTile(32, 128, stages).config(split)
    if n < 16384:
        return _tile_of_one_round(m, n, k)
    if m <= 32:
        return WIDEST
    return WeightTile(64, 64, 3).config(1)


def default_narrow_config(m: int, n: int, k: int, gated: str, format: str, group: int) -> tuning.Config:
    """For weights of a byte or half a byte an element, up to 128 rows; ``group``: the columns that share a scale, 0 for
    all.

    Of some 30 configurations for four weights of Llama-3.1-8B, on an H200. One row: 4 rows of a weight of up to 4096
    columns, one of a longer; of four bits and gated, tiles. Up to 32 rows the tensor cores take the rows as their left
    operand, beyond them the weights, from registers. What a group scales is a product of its own, so tiles have its
    columns at most (docs/notebook/narrow-products.md); floats of four bits get their scales where they are widened, and
    have the tiles of integers in groups of 128.
    """
    small, bits4 = n * k <= SMALL, format in PACKED
    if m == 1 and not (bits4 and gated == "yes" and not small):
        return _rows_of_one(n, k, gated, group)
    if small and not group:
        return _of(WeightTile(32, 128, 6), _parts(n, k, 32, 4 * PROCESSORS))
    tiles = triton.cdiv(n, 64)
    if m <= 16 and not group:
        return _of(WeightTile(32, 256, 4), _parts(n, k, 32, 4 * PROCESSORS))
    if m <= 16 and tiles < 3 * PROCESSORS and not (bits4 and k >= 8 * MIN_PART):
        return _of(WeightTile(64, 128, 8), _parts(n, k, 64, (3 if bits4 else 2) * PROCESSORS))
    if m <= 32:
        split = min(max(2, 512 // tiles), max(1, k // MIN_PART), 8)
        return _of(WeightTile(64, 128, 4), split, turned=bits4 and m > 16)
    if format == INT4 and m <= 64 and tiles >= 2 * PROCESSORS:
        return _of(WeightTile(128, 128, 3), 1, turned=True)
    split = _parts(n, k, 64, 3 * PROCESSORS) if m <= 64 else _parts(n, k, 64, PROCESSORS, 2)
    if m > 64 and not group and tiles * split <= PROCESSORS:
        return _of(WeightTile(64, 256, 3), split, turned=True)
    return _of(WeightTile(64, 128, 4 if tiles * split <= 2 * PROCESSORS else 3), split, turned=True)


MANY = {"kernel": "tiles", "BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 128, "SPLIT_K": 1, "num_warps": 8}
MANY |= {"num_stages": 3, "TURNED": True}


def default_rounded_config(m: int, n: int, k: int) -> tuning.Config:
    """For rows and weights of 8 bits: tiles up to 256 rows.

    Of 11 configurations for four weights of Llama-3.1-8B and six numbers of rows, on an H200, as many parts of K as
    give a processor four programs of few rows, and one of 256 (docs/notebook/narrow-products.md).
    """
    if m > 256:
        return TORCH
    if m > 128 and n >= 16384:
        return _of(WeightTile(128, 128, 4), 1, turned=True) | {"num_warps": 8}
    programs = PROCESSORS * 4 if m <= 32 else PROCESSORS * 2 if m <= 64 else 200 if m <= 128 else PROCESSORS
    split = _parts(n, k, 64, programs, 2 if m > 64 else MAX_PARTS)  # more than two parts of 64 columns spill registers
    deep = m <= 128 and triton.cdiv(n, 64) * split <= 2 * PROCESSORS and not 32 < m <= 64
    return _of(WeightTile(64, 128, 6 if deep else 4), split, turned=True) | {"num_warps": 8 if m > 128 else 4}


def _rows_of_one(n: int, k: int, gated: str, group: int) -> tuning.Config:
    """One row with a narrow weight: 32 to 128 elements a thread."""
    whole = max(32, triton.next_power_of_2(k))
    if n * k <= SMALL:
        block_n = 4 if n >= 2048 else 2
        tile = {"BLOCK_N": block_n, "BLOCK_K": min(whole, 4096), "num_warps": max(1, min(8, block_n * whole // 2048))}
    elif k <= 4096:
        tile = {"BLOCK_N": 4, "BLOCK_K": min(whole, 2048 if group else 4096), "num_warps": 4}
    else:
        tile = {"BLOCK_N": 2, "BLOCK_K": 4096, "num_warps": 8} if gated == "yes" else _LONG
    return {"kernel": "rows", "LATE": SMALL < n * k <= 2**25} | tile


_LONG = {"BLOCK_N": 1, "BLOCK_K": 4096, "num_warps": 4}


def _of(tile: WeightTile, split: int, *, turned: bool = False) -> tuning.Config:
    return tile.config(split) | {"TURNED": turned}


def _parts(n: int, k: int, block_n: int, programs: int, most: int = MAX_PARTS) -> int:
    """The parts of K, a power of two, with which there are so many programs at most, each part long enough."""
    parts = max(1, min(programs // triton.cdiv(n, block_n), k // MIN_PART, most))
    return 1 << (parts.bit_length() - 1)


def _tile_of_16_rows(n: int, k: int) -> tuning.Config:
    """Tiles that fill the chip: a last round of a few programs takes as long as a full one. With tiles of 32 rows of
    the weight, 5120 and 2560 of them took 1.5 and 1.3 times as long as with the best."""
    if n >= 16384:
        return WIDEST
    if n > PROCESSORS * 64 or (n > PROCESSORS * 48 and n * k > 2**26):
        return TORCH  # 14336 x 4096, 16 rows: 31.9 us with the best tiles, 30.7 with cuBLAS
    deep = max(1, min(PROCESSORS * 32 // n, k // 512))
    parts = range(1, max(1, min(k // MIN_PART, MAX_PARTS)) + 1)
    tiles = [(DEEP, deep), *((THIRD, split) for split in parts), *((WIDE, split) for split in parts[:3])]
    tile, split = max(
        ((tile, split) for tile, split in tiles if tile is WIDE or tile.rounds(n, split) <= 1),
        key=lambda each: each[0].filled(n, each[1]),
    )
    return tile.config(split)


def _tile_of_one_round(m: int, n: int, k: int) -> tuning.Config:
    """17 to 64 rows of a large weight: tiles if as many as there are processors take it all, else cuBLAS."""
    tiles = [(WIDE, WIDE.one_round(n, k))]
    if m > 32:
        tiles = [(NARROW_OF_64, 1), (WIDE_OF_64, WIDE_OF_64.one_round(n, k))]
    for tile, split in tiles:
        if WELL_FILLED <= tile.rounds(n, split) <= 1:
            return tile.config(split)
    return TORCH

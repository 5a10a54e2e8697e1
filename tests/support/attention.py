"""Attention problems with a hostile cache: blocks in random order, NaN in every slot that no query sees, and ids that
point nowhere in every table entry that no query needs."""

import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st

FP8, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FLOAT8 = {False: None, True: FP8, "e5m2": E5M2}  # of a cache, as problems name it; None: as queries
NOWHERE = (-1, 2**31 - 1, 1_000_000_007)
LAYOUTS = ("apart", "pool", "heads first")

# One configuration of each portable kernel, small enough for small problems.
TILE = {"BLOCK_M": 16, "BLOCK_N": 16, "num_warps": 4, "num_stages": 2}
FEW = {"kernel": "few", "BLOCK_M": 8, "BLOCK_N": 16, "PROGRAMS": 18, "MIN_TILES": 1, "MERGE": 4}
DECODES = {
    "balanced": {"kernel": "balanced", "PROGRAMS": 5, **TILE},
    "split": {"kernel": "split", "SPLIT_TO": 1, **TILE},
    "split in parts": {"kernel": "split", "SPLIT_TO": 18, **TILE},
    "few": FEW | {"PROGRAMS": 1, "num_warps": 1, "num_stages": 1},
    "few in parts": FEW | {"num_warps": 1, "num_stages": 1},
}
PREFILL = {"kernel": "portable", "SPLIT": 0, **TILE}


@dataclass(frozen=True)
class Problem:
    """The arguments of one call; ``options`` are the keywords that decode and prefill share."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_tables: torch.Tensor
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    options: dict[str, Any]

    @property
    def decode(self) -> tuple[torch.Tensor, ...]:
        return self.q, self.k_cache, self.v_cache, self.block_tables, self.seq_lens

    @property
    def prefill(self) -> tuple[torch.Tensor, ...]:
        return self.q, self.k_cache, self.v_cache, self.block_tables, self.cu_seqlens_q, self.seq_lens

    def exact(self) -> "Problem":
        """The same values in float32, for the reference."""
        caches = (
            {}
            if self.k_cache.dtype in (FP8, E5M2)
            else {"k_cache": self.k_cache.float(), "v_cache": self.v_cache.float()}
        )
        return replace(self, q=self.q.float(), **caches)


def nan_caches(shape: tuple[int, int, int, int], layout: str, dtype: torch.dtype, device: torch.device):
    """Two ``[P, S, K, D]`` caches full of NaN: tensors of their own, views of one pool, or with heads outside slots."""
    p, s, k, d = shape
    if layout == "pool":
        pool = torch.full((p, 2, s, k, d), float("nan"), device=device).to(dtype)
        return pool[:, 0], pool[:, 1]
    if layout == "heads first":
        pool = torch.full((2, p, k, s, d), float("nan"), device=device).to(dtype)
        return pool[0].transpose(1, 2), pool[1].transpose(1, 2)
    pool = torch.full((2, p, s, k, d), float("nan"), device=device).to(dtype)
    return pool[0], pool[1]


def make_problem(
    device: torch.device,
    q_lens: list[int],
    seq_lens: list[int],
    *,
    kv_heads: int = 2,
    group: int = 2,
    head_size: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    float8: bool | str = False,
    layout: str = "pool",
    padding: int = 0,
    **options: Any,
) -> Problem:
    """A random problem. Options as in the operations, but ``sinks=True`` and ``alibi_slopes=True`` stand for random
    tensors, and so does ``"heads"`` for a cache scale; ``padding`` tokens of q belong to no sequence."""
    heads = kv_heads * group
    counts = [-(-n // block_size) for n in seq_lens]
    total = sum(counts) + 2
    sizes = (total, block_size, kv_heads, head_size)
    k_cache, v_cache = nan_caches(sizes, layout, FLOAT8[float8] or dtype, device)
    ids = random.Random(0).sample(range(total), total)
    width = max(counts, default=0) + 2
    tables = torch.tensor(NOWHERE, dtype=torch.int32).repeat(len(counts), width)[:, :width].contiguous()
    for b, (q_len, n) in enumerate(zip(q_lens, seq_lens, strict=True)):
        first = max(0, n - q_len + 1 - (options.get("window") or n)) if q_len else n  # the first key that a query sees
        mine = torch.tensor([ids.pop() for _ in range(counts[b])], dtype=torch.int32)
        tables[b, first // block_size : counts[b]] = mine[first // block_size :]
        at = torch.arange(first, n)
        block, slot = mine[at // block_size].long().to(device), (at % block_size).to(device)
        for cache in (k_cache, v_cache):
            cache[block, slot] = torch.randn(len(at), kv_heads, head_size, device=device).to(cache.dtype)
    if options.get("sinks"):
        options["sinks"] = torch.randn(heads, device=device)
    if options.get("alibi_slopes"):
        options["alibi_slopes"] = torch.rand(heads, device=device) / 8
    for name in ("k_scale", "v_scale"):
        if options.get(name) == "heads":
            options[name] = torch.rand(kv_heads, device=device) + 0.5
    tokens = sum(q_lens) + padding
    fused = torch.randn(tokens, heads + 2 * kv_heads, head_size, device=device).to(dtype)  # q is a slice of q, k, v
    cu = torch.tensor([0, *torch.tensor(q_lens, dtype=torch.int64).cumsum(0).tolist()], dtype=torch.int32)
    lens = torch.tensor(seq_lens, dtype=torch.int32, device=device)
    return Problem(fused[:, :heads], k_cache, v_cache, tables.to(device), cu.to(device), lens, options)


def options() -> st.SearchStrategy[dict[str, Any]]:
    """Every keyword that decode and prefill share, alone and together."""
    cache_scale = st.sampled_from([None, 0.75, "heads"])
    return st.fixed_dictionaries(
        {
            "scale": st.sampled_from([None, 0.3]),
            "window": st.none() | st.integers(1, 70),
            "softcap": st.sampled_from([0.0, 4.0]),
            "sinks": st.sampled_from([None, True]),
            "alibi_slopes": st.sampled_from([None, True]),
            "k_scale": cache_scale,
            "v_scale": cache_scale,
        }
    )


def shapes() -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            "kv_heads": st.integers(1, 2),
            "group": st.sampled_from([1, 2, 3, 7]),
            "head_size": st.sampled_from([16, 24, 40, 64]),
            "block_size": st.sampled_from([1, 3, 5, 16, 32, 256]),
            "layout": st.sampled_from(LAYOUTS),
            "float8": st.sampled_from([False, True, "e5m2"]),
        }
    )


def random_tree(size: int, draw: random.Random) -> list[int]:
    """Each token's ancestors and itself, as bits; some trees are chains, some bushes, some several roots."""
    bits: list[int] = []
    for i in range(size):
        parent = draw.randint(max(-1, i - 3), i - 1)
        bits.append((bits[parent] if parent >= 0 else 0) | 1 << i)
    return bits


def tree_masks(q_lens: list[int], device: torch.device) -> torch.Tensor:
    bits = [b for q_len in q_lens for b in random_tree(q_len, random.Random(q_len))]
    return torch.tensor([b - (1 << 32) if b >> 31 else b for b in bits], dtype=torch.int32, device=device)

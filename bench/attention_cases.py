"""The attention benchmarks' cases: K1 and K2 in each precision, and a sweep over batch and length with
keys of 16 bits and of float8.

K1 (decode) and K2 (prefill) have the shapes, dtypes, block size and ragged lengths at which the peers in
``listed_peers.json`` were measured.
"""

import zlib
from dataclasses import dataclass, replace

import torch

from autotune.paged import paged_cache
from autotune.problem import Inputs, Problem, TensorFactory, Work
from tritonllm.kernels import WORKSPACE_SIZE, paged_decode_attention, varlen_prefill_attention

FLOAT8_STEPS = 32.0  # the float8 cache holds values of this standard deviation: 448, its largest, is 14 of them away
MAX_LOGITS = 2**27  # of the reference, at a time


@dataclass(frozen=True)
class Precision:
    """Of queries and outputs, and of the cache; ``scales``: how many factors a float8 cache has."""

    dtype: torch.dtype
    cache: torch.dtype
    scales: str | None = None


PRECISIONS = {
    "bf16": Precision(torch.bfloat16, torch.bfloat16),
    "fp16": Precision(torch.float16, torch.float16),
    "fp8": Precision(torch.bfloat16, torch.float8_e4m3fn, "one"),
    "fp8 by head": Precision(torch.bfloat16, torch.float8_e4m3fn, "one a head"),
}


def ragged_lengths(batch: int, longest: int) -> list[int]:
    """Uniform from 1 to ``longest``, from the seed with which the listed peers' lengths were drawn."""
    seed = zlib.crc32(repr(("K1len", batch, longest)).encode()) + 1
    return torch.randint(1, longest + 1, (batch,), generator=torch.Generator().manual_seed(seed)).tolist()


@dataclass(frozen=True)
class Attention(Problem):
    """Causal attention over a paged cache: the last ``new`` of each sequence's ``length`` tokens are the queries.

    One new token is a decode, more are a prefill. ``ragged``: lengths from 1 to ``length``, for decodes.
    """

    batch: int
    new: int
    length: int
    q_heads: int = 32
    kv_heads: int = 8
    head_size: int = 128
    ragged: bool = False
    precision: str = "bf16"
    block_size: int = 16

    @property
    def decode(self) -> bool:
        return self.new == 1

    @property
    def group(self) -> str:
        return "K1" if self.decode else "K2"

    @property
    def size(self) -> str:
        """The name without the precision: what ``listed_peers.json`` calls the case."""
        heads = f"H{self.q_heads}/{self.kv_heads} D{self.head_size}"
        if self.decode:
            return f"decode B{self.batch} {heads} L{'1..' if self.ragged else ''}{self.length}"
        cached = self.length - self.new
        return f"prefill {self.batch}x{self.new}{f' over {cached} cached' if cached else ''} {heads}"

    @property
    def name(self) -> str:
        return f"{self.size} {self.precision}"

    def lengths(self) -> list[int]:
        return ragged_lengths(self.batch, self.length) if self.ragged else [self.length] * self.batch

    def shared(self, new: TensorFactory) -> Inputs:
        return {"workspace": new.filled(0, WORKSPACE_SIZE, dtype=torch.int32)}

    def inputs(self, new: TensorFactory) -> Inputs:
        kind = PRECISIONS[self.precision]
        lengths = self.lengths()
        x = paged_cache(new, lengths, max(lengths), self.block_size, self.kv_heads, self.head_size)
        x["q"] = new.normal(self.batch * self.new, self.q_heads, self.head_size, dtype=kind.dtype)
        # once a step in an engine, so not in the time; nor is what FlashInfer plans
        x["order"] = new.tensor(sorted(range(self.batch), key=lambda i: -lengths[i]), torch.int32)
        x["cu_seqlens_q"] = new.tensor(range(0, (self.batch + 1) * self.new, self.new), torch.int32)
        for cache, scale in (("k_cache", "k_scale"), ("v_cache", "v_scale")):
            if kind.scales is None:
                x[cache] = x[cache].to(kind.cache)
                continue
            x[cache] = x[cache].mul_(FLOAT8_STEPS).to(kind.cache)
            x[scale] = 1 / FLOAT8_STEPS if kind.scales == "one" else (1 + new.uniform(self.kv_heads)) / FLOAT8_STEPS
        return x

    def run(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        caches = (x["q"], x["k_cache"], x["v_cache"], x["block_tables"])
        scales = {"k_scale": x.get("k_scale"), "v_scale": x.get("v_scale")}
        if self.decode:
            out = paged_decode_attention(*caches, x["seq_lens"], **scales, workspace=x["workspace"], order=x["order"])
        else:
            lengths = (x["cu_seqlens_q"], x["seq_lens"])
            workspace = x["workspace"]
            out = varlen_prefill_attention(*caches, *lengths, max_seqlen_q=self.new, **scales, workspace=workspace)
        assert isinstance(out, torch.Tensor)
        return (out,)

    def reference(self, x: Inputs) -> tuple[torch.Tensor, ...]:
        """In float32, from the cache as it is stored, one sequence and at most ``MAX_LOGITS`` logits at a time."""
        q = x["q"].float().unflatten(0, (self.batch, self.new))
        out = torch.empty_like(q)
        rows = max(1, MAX_LOGITS // (self.q_heads * self.length))
        for sequence, length in enumerate(self.lengths()):
            k, v = dense_cache(x, x["block_tables"][sequence, None], length, torch.float32)
            for begin in range(0, self.new, rows):
                end = min(begin + rows, self.new)
                first = length - self.new + begin  # position of the first of these queries
                visible = length - self.new + end
                parts = q[sequence, begin:end], k[0, :, :visible], v[0, :, :visible]
                out[sequence, begin:end] = _attend(*parts, first)
        return (out.flatten(0, 1),)

    def work(self, x: Inputs) -> Work:
        return self.least_work()

    def least_work(self) -> Work:
        """Keys, values and queries read once and outputs written once; the causal square counts half."""
        kind = PRECISIONS[self.precision]
        keys = sum(self.lengths())
        pairs = keys if self.decode else self.batch * (self.new * (self.length - self.new) + self.new**2 / 2)
        cache = 2 * keys * self.kv_heads * self.head_size * kind.cache.itemsize
        rest = 2 * self.batch * self.new * self.q_heads * self.head_size * kind.dtype.itemsize
        return Work(bytes=cache + rest, flops=4 * pairs * self.q_heads * self.head_size)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: int) -> torch.Tensor:
    """Causal attention of queries ``[N, H, D]`` from position ``first`` on over ``k, v [K, L, D]``: ``[N, H, D]``."""
    grouped = q.unflatten(1, (len(k), -1)).permute(1, 2, 0, 3)  # [K, G, N, D]
    logits = grouped.flatten(1, 2) @ k.mT * q.shape[-1] ** -0.5
    position = torch.arange(first, first + len(q), device=q.device)
    hidden = torch.arange(k.shape[1], device=q.device) > position[:, None]
    weights = logits.unflatten(1, grouped.shape[1:3]).masked_fill_(hidden, -torch.inf).softmax(-1)
    return (weights.flatten(1, 2) @ v).view_as(grouped).permute(2, 0, 1, 3).flatten(1, 2)


def dense_cache(x: Inputs, tables: torch.Tensor, length: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The first ``length`` keys and values of the sequences of ``tables [B, M]``, each ``[B, K, length, D]``.

    In memory a token's heads lie together, as in the cache. A float8 cache comes multiplied by its scales.
    """

    def gather(cache: torch.Tensor, scale: float | torch.Tensor | None) -> torch.Tensor:
        blocks = tables[:, : -(-length // cache.shape[1])]
        stored = cache.view(torch.uint8)[blocks].view(cache.dtype).flatten(1, 2)[:, :length]  # bytes: float8 cannot
        if scale is None:
            return stored.to(dtype).transpose(1, 2)
        factor = scale[:, None] if isinstance(scale, torch.Tensor) else scale
        return (stored.float() * factor).to(dtype).transpose(1, 2)

    return gather(x["k_cache"], x.get("k_scale")), gather(x["v_cache"], x.get("v_scale"))


def _rows() -> list[Attention]:
    sizes = [
        (1, 32768, 32, 8),
        (8, 8192, 32, 8),
        (64, 4096, 32, 8),
        (256, 1024, 32, 8),
        (64, 4096, 32, 4),
        (128, 2048, 16, 8),
    ]
    decodes = [
        [
            *(Attention(batch, 1, length, q, kv, precision=precision) for batch, length, q, kv in sizes),
            Attention(64, 1, 8192, ragged=True, precision=precision),
        ]
        for precision in PRECISIONS
    ]
    squares = [Attention(batch, new, new) for batch, new in ((1, 16384), (4, 4096), (16, 1024), (64, 256))]
    prefills = [*squares, Attention(4, 1024, 8192)]
    return [*decodes[0], *prefills, *(row for rows in decodes[1:] for row in rows)]


def _powers(first: int, last: int) -> list[int]:
    return [first << doublings for doublings in range((last // first).bit_length())]


def _sweep() -> list[Attention]:
    """Llama-3.1-8B's heads; prefills of up to 65536 tokens in all. The same sizes with a float8 cache, from 128 keys to
    32,768 and up to 128 sequences, to be set beside."""
    decodes = [Attention(batch, 1, length) for batch in _powers(1, 256) for length in _powers(128, 32768)]
    sizes = [(batch, new) for batch in _powers(1, 64) for new in _powers(64, 16384) if batch * new <= 65536]
    wide = [*decodes, *(Attention(batch, new, new) for batch, new in sizes)]
    some = [case for case in wide if (case.batch <= 128 if case.decode else case.batch in (1, 16))]
    return [*wide, *(replace(case, precision="fp8") for case in some)]


ROWS = _rows()
SWEEP = _sweep()

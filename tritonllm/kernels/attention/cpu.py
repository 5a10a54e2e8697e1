"""Attention on the CPU: blocks gathered into rows, and torch's scaled_dot_product_attention, a tiled kernel, over them.

What that cannot compute (softcap, sinks, ALiBi, the denominator, float8 caches, scales of heads) is the references'.
"""

from typing import NamedTuple

import torch
from torch.nn import functional as F

from tritonllm.kernels.attention.arguments import AttentionArgs, Heads, Hints, Pages, Queries, Scales, Slots
from tritonllm.kernels.elementwise import NormOptions, Rotation, normalized, turn_of, turned
from tritonllm.kernels.runtime.checks import FLOATS

MASK_ELEMENTS = 2**22  # queries times keys of a prompt's chunk whose mask, or logits, are made at once


def takes(k_cache: torch.Tensor, args: AttentionArgs) -> bool:
    """Only a scale and a window."""
    plain = args.softcap == 0 and args.sinks is None and args.alibi_slopes is None and args.lse is None
    return plain and args.k_scale is None and args.v_scale is None and k_cache.dtype in FLOATS


def decode(q: torch.Tensor, pages: Pages, hints: Hints, args: AttentionArgs) -> bool:
    """The operator ``paged_decode_attention``."""
    if not takes(pages.k_cache, args):
        return False
    decodes = CpuDecodes(pages.block_tables, pages.seq_lens, pages.k_cache.shape[1])
    args.out.copy_(decodes.attend(q, pages.k_cache, pages.v_cache, args))
    return True


class CpuGroup(NamedTuple):
    """Sequences of about the same length, which attend together: a batch is padded to its longest."""

    rows: slice  # of the batch
    blocks: slice | torch.Tensor  # of the cache: their blocks one after the other
    seen: slice  # keys of a sequence's blocks that some query sees
    mask: torch.Tensor | None  # [N, 1, 1, keys]; None: all queries see them all
    unseen: torch.Tensor | None  # keys of these blocks that may hold anything, and read as 0
    empty: torch.Tensor | None  # [N, 1, 1], where a sequence has length 0


class CpuDecodes:
    """What the CPU's attention finds out about a step's decodes: the same for every layer.

    Args:
        block_tables, seq_lens: see ``paged_decode_attention``.
        block_size: how many tokens a block of the cache holds.
    """

    def __init__(self, block_tables: torch.Tensor, seq_lens: torch.Tensor, block_size: int) -> None:
        self._tables = block_tables
        self._seq_lens = seq_lens
        self._lens: list[int] = seq_lens.tolist()
        self._size = block_size
        self._groups: dict[int, list[CpuGroup]] = {}  # by window

    def attend(
        self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, args: AttentionArgs
    ) -> torch.Tensor:
        """``q[B, H, D]`` -> a new tensor of that shape."""
        groups = self._groups.get(args.window)
        if groups is None:
            groups = self._groups[args.window] = self._grouped(args.window)
        parts = [_attend(group, q[group.rows], k_cache, v_cache, args) for group in groups]
        return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else torch.zeros_like(q)

    def _grouped(self, window: int) -> list[CpuGroup]:
        lens = self._lens
        longest = max(lens, default=0)
        if longest == 0:
            return []
        if 2 * sum(lens) >= longest * len(lens):
            return [self._group(slice(0, len(lens)), window)]
        # rather one after the other than more than twice the work
        return [self._group(slice(i, i + 1), window) for i in range(len(lens))]

    def _group(self, rows: slice, window: int) -> CpuGroup:
        size, lens = self._size, self._lens[rows]
        shortest, longest = min(lens), max(lens)
        before = max(0, shortest - (window or longest))  # no query sees these keys
        begin = before // size
        blocks = self._tables[rows, begin : -(-longest // size)]
        if shortest == longest:
            seen = slice(before - begin * size, longest - begin * size)
            return CpuGroup(rows, _consecutive(blocks), seen, None, None, None)
        count = blocks.shape[1] * size
        seq_lens = self._seq_lens[rows, None]
        key = torch.arange(begin * size, begin * size + count)
        visible = key < seq_lens
        if window:
            visible &= key >= seq_lens - window
        blocks = blocks.masked_fill(~visible.unflatten(1, (-1, size)).any(-1), 0)
        unseen = (~visible).flatten().nonzero().flatten()
        empty = (seq_lens == 0)[:, None] if shortest == 0 else None
        return CpuGroup(rows, blocks.flatten(), slice(0, count), visible[:, None, None], unseen, empty)


def _consecutive(blocks: torch.Tensor) -> slice | torch.Tensor:
    """``blocks[N, M]`` one after the other; as a slice, of which no key need be copied, if they lie so."""
    flat = blocks.flatten()
    ids = flat.tolist() if len(blocks) == 1 else []
    together = ids and ids == list(range(ids[0], ids[0] + len(ids)))
    return slice(ids[0], ids[0] + len(ids)) if together else flat


def _attend(
    group: CpuGroup, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, args: AttentionArgs
) -> torch.Tensor:
    """``q[N, H, D]`` of the group -> a new tensor; heads that share keys are rows of one product."""
    if group.seen.stop == 0:
        return torch.zeros_like(q)
    k, v = (_seen_rows(cache, group, len(q)) for cache in (k_cache, v_cache))  # [N, K, L, D]
    grouped = q.view(len(q), k.shape[1], -1, q.shape[2])
    out = F.scaled_dot_product_attention(grouped, k, v, group.mask, scale=args.scale).reshape(q.shape)
    if args.v_factor != 1.0:
        out *= args.v_factor
    return out if group.empty is None else out.masked_fill_(group.empty, 0.0)


def _seen_rows(cache: torch.Tensor, group: CpuGroup, count: int) -> torch.Tensor:
    """Keys or values ``[N, K, L, D]``."""
    blocks = group.blocks
    x = cache[blocks] if isinstance(blocks, slice) else cache.index_select(0, blocks)
    x = x.reshape(count, -1, *cache.shape[2:])
    if group.unseen is not None:
        x.flatten(0, 1).index_fill_(0, group.unseen, 0.0)
    return x[:, group.seen].transpose(1, 2)


def _spans(queries: Queries, pages: Pages) -> list[tuple[int, int, int]] | None:
    """Where each sequence's queries begin and end, and its keys; None if some queries see nothing."""
    assert queries.cu_seqlens_q is not None
    begins, lens = queries.cu_seqlens_q.tolist(), pages.seq_lens.tolist()
    spans = list(zip(begins[:-1], begins[1:], lens, strict=True))
    return None if any(end - begin > length for begin, end, length in spans) else spans


def prefill(queries: Queries, pages: Pages, hints: Hints, args: AttentionArgs) -> bool:
    """The operator ``varlen_prefill_attention``."""
    spans = _spans(queries, pages)
    if spans is None or not takes(pages.k_cache, args):
        return False
    for table, (begin, end, length) in zip(pages.block_tables, spans, strict=True):
        step = max(1, MASK_ELEMENTS // max(1, length))
        for at in range(begin, end, step):
            tokens = slice(at, min(at + step, end))
            out = args._replace(out=args.out[tokens])
            _prefill_one(queries.q[tokens], pages, table, length - end + at, length, queries.causal, out)
    return True


def verify(queries: Queries, pages: Pages, hints: Hints, args: AttentionArgs) -> bool:
    """The operator ``paged_verify_attention``: a chain of drafts is a chunk of a prompt."""
    if queries.tree_mask is None:
        return prefill(queries, pages, hints, args)
    spans = _spans(queries, pages)
    if spans is None or not takes(pages.k_cache, args) or args.window:
        return False
    for table, (begin, end, length) in zip(pages.block_tables, spans, strict=True):
        if begin == end:
            continue
        tokens, count = slice(begin, end), end - begin
        mask = torch.ones(count, length, dtype=torch.bool)
        mask[:, length - count :] = (queries.tree_mask[tokens, None] >> torch.arange(count)) & 1
        out = args._replace(out=args.out[tokens])
        _one_sequence(queries.q[tokens], pages, table, slice(0, length), mask, out)
    return True


def _prefill_one(
    q: torch.Tensor, pages: Pages, table: torch.Tensor, position: int, length: int, causal: bool, args: AttentionArgs
) -> None:
    """``q[N, H, D]`` from ``position`` on of one sequence."""
    count, window = len(q), args.window
    first = max(0, position - window + 1) if window else 0
    end = position + count if causal else length  # of the keys that are seen
    mask, square = None, causal and first == 0 and end == count and not (window and window < count)
    if not square:
        key, pos = torch.arange(first, end), torch.arange(position, position + count)[:, None]
        mask = key <= pos if causal else torch.ones(count, end - first, dtype=torch.bool)
        if window:
            mask &= key > pos - window
            if not causal:
                mask &= key < pos + window
    _one_sequence(q, pages, table, slice(first, end), mask, args)


def _one_sequence(
    q: torch.Tensor, pages: Pages, table: torch.Tensor, seen: slice, mask: torch.Tensor | None, args: AttentionArgs
) -> None:
    """``q[N, H, D]`` over these keys of one sequence. ``mask[N, keys]``: which they see; None: N keys, each those up to
    its own."""
    size, kv_heads = pages.k_cache.shape[1:3]
    begin = seen.start // size * size
    blocks = _consecutive(table[None, begin // size : -(-seen.stop // size)])
    group = CpuGroup(slice(0, 1), blocks, slice(seen.start - begin, seen.stop - begin), None, None, None)
    k, v = (_seen_rows(cache, group, 1)[0].transpose(0, 1) for cache in (pages.k_cache, pages.v_cache))
    grouped = q.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)  # [K, G, N, D]
    if q.dtype == torch.float32:
        out = _exact(grouped, k, v, mask if mask is not None else _causal(len(q)), args.scale)
    else:  # keys and values are repeated by strides: [K, G, L, D]
        k, v = (x.transpose(0, 1).unsqueeze(1).expand(-1, grouped.shape[1], -1, -1) for x in (k, v))
        out = F.scaled_dot_product_attention(grouped, k, v, mask, is_causal=mask is None, scale=args.scale)
    args.out.copy_(out.permute(2, 0, 1, 3).flatten(1, 2))
    if args.v_factor != 1.0:
        args.out.mul_(args.v_factor)


def _causal(count: int) -> torch.Tensor:
    return torch.ones(count, count, dtype=torch.bool).tril_()


def _exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """``q[K, G, N, D]``, ``k`` and ``v [L, K, D]``, ``mask[N, L]`` -> ``[K, G, N, D]``, float32 in every step: the
    exponentials of the tiled kernel are good to some 20 units in the last place."""
    rows = (q * scale).flatten(1, 2)  # heads that share keys are rows of one product
    logits = torch.bmm(rows, k.permute(1, 2, 0)).unflatten(1, q.shape[1:3])
    weights = logits.masked_fill_(~mask, -torch.inf).softmax(-1)
    return torch.bmm(weights.flatten(1, 2), v.transpose(0, 1)).view(q.shape)


class Store(NamedTuple):
    """A layer's cache for :func:`project_and_store`: ``[P S, K, D]`` each."""

    k: torch.Tensor
    v: torch.Tensor


def store_of(k_cache: torch.Tensor, v_cache: torch.Tensor, heads: Heads, scales: Scales) -> Store | None:
    """``None``: a kind of cache, or of norm, that :func:`project_and_store` does not know."""
    known = k_cache.dtype in FLOATS and not scales.given
    if not known or any(w is not None and w.dim() != 1 for w in (heads.q_weight, heads.k_weight)):
        return None
    if any(cache.stride(0) != cache.shape[1] * cache.stride(1) for cache in (k_cache, v_cache)):
        return None
    return Store(k_cache.flatten(0, 1), v_cache.flatten(0, 1))


def all_stored(slot_mapping: torch.Tensor) -> bool:
    """Whether no token is to be left out."""
    return not len(slot_mapping) or int(slot_mapping.min()) >= 0


def project_and_store(
    qkv: torch.Tensor, slot_mapping: torch.Tensor, store: Store, heads: Heads, turn: Rotation | None
) -> torch.Tensor:
    """Normalise, turn and store the rows' heads; the queries ``[T, H, D]``, a new tensor if they changed."""
    kv_heads, head_size = store.k.shape[1:]
    x = qkv.unflatten(1, (-1, head_size))
    v = x[:, -kv_heads:]
    x = x[:, :-kv_heads]
    if heads.q_weight is not None and heads.k_weight is not None:
        parts = (x[:, :-kv_heads], heads.q_weight), (x[:, -kv_heads:], heads.k_weight)
        how = heads.eps, heads.weight_offset, False, heads.batch_invariant
        norms = [normalized(part, NormOptions(w, None, *how)) for part, w in parts]
        x = torch.cat([part.to(qkv.dtype) for part in norms], dim=1)
    if turn is not None:
        x = turned(x, turn)
    store.k.index_copy_(0, slot_mapping, x[:, -kv_heads:])
    store.v.index_copy_(0, slot_mapping, v)
    return x[:, :-kv_heads]


def _project(qkv: torch.Tensor, slots: Slots, heads: Heads, scales: Scales) -> torch.Tensor | None:
    """:func:`project_and_store` of arguments as the operators have them. ``None``: nothing was done."""
    store = store_of(slots.k_cache, slots.v_cache, heads, scales)
    if store is None or not all_stored(slots.slot_mapping):
        return None
    turn = None
    if heads.positions is not None and heads.cos_sin_cache is not None:
        turn = turn_of(heads.positions, heads.cos_sin_cache, heads.interleaved)
    return project_and_store(qkv, slots.slot_mapping, store, heads, turn)


def qk_norm_rope_store(qkv: torch.Tensor, constant_weight: bool, slots: Slots, heads: Heads, scales: Scales) -> bool:
    """The operator of this name."""
    q = _project(qkv, slots, heads, scales)
    if q is None:
        return False
    mine = qkv[:, : q.shape[1] * q.shape[2]].unflatten(1, q.shape[1:])
    if q.data_ptr() != mine.data_ptr():  # they changed
        mine.copy_(q)
    return True


def fused_decode(
    qkv: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_factor: float,
    pages: Pages,
    heads: Heads,
    hints: Hints,
    args: AttentionArgs,
) -> bool:
    """The operator ``fused_decode_attention``."""
    if not takes(pages.k_cache, args):
        return False
    scales = Scales(None, None, k_factor, args.v_factor)
    q = _project(qkv, Slots(pages.k_cache, pages.v_cache, slot_mapping), heads, scales)
    return q is not None and decode(q, pages, hints, args)

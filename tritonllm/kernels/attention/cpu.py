"""Attention on the CPU: blocks gathered into rows, and torch's scaled_dot_product_attention, a tiled kernel, over them.

What that cannot compute (softcap, sinks, ALiBi, the denominator, float8 caches, scales of heads) is the references'.
"""

import torch
from torch.nn import functional as F

from tritonllm.kernels.attention.arguments import AttentionArgs, Heads, Hints, Pages, Queries, Scales, Slots
from tritonllm.kernels.elementwise import normalized, turned
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
    lens = pages.seq_lens.tolist()
    longest = max(lens, default=0)
    if longest == 0:
        args.out.zero_()
    elif 2 * sum(lens) >= longest * len(lens):
        _decode_together(q, pages, min(lens), longest, args)
    else:  # a batch is padded to its longest sequence: rather one after the other than more than twice the work
        for i, length in enumerate(lens):
            one = slice(i, i + 1)
            mine = args._replace(out=args.out[one])
            if length:
                alone = pages._replace(block_tables=pages.block_tables[one], seq_lens=pages.seq_lens[one])
                _decode_together(q[one], alone, length, length, mine)
            else:
                mine.out.zero_()
    return True


def _decode_together(q: torch.Tensor, pages: Pages, shortest: int, longest: int, args: AttentionArgs) -> None:
    """``q[B, H, D]`` of sequences of about the same length; heads that share keys are rows of one product."""
    k_cache, v_cache, block_tables, seq_lens = pages
    batch, size, (kv_heads, head_size) = len(q), k_cache.shape[1], k_cache.shape[2:]
    window = args.window or longest
    begin = max(0, shortest - window) // size  # no query sees a block before this one
    blocks = block_tables[:, begin : -(-longest // size)]
    first, last = max(0, shortest - window) - begin * size, longest - begin * size
    mask = unseen = None
    if shortest == longest:
        seen = slice(first, last)
    else:
        seen = slice(0, blocks.shape[1] * size)
        key = torch.arange(begin * size, begin * size + seen.stop)
        visible = key < seq_lens[:, None]
        if args.window:
            visible &= key >= seq_lens[:, None] - args.window
        blocks = blocks.masked_fill(~visible.unflatten(1, (-1, size)).any(-1), 0)
        mask = visible[:, None, None]
        unseen = (~visible).flatten().nonzero().flatten()
    k, v = (_rows(cache, blocks, unseen)[:, seen].transpose(1, 2) for cache in (k_cache, v_cache))  # [B, K, L, D]
    grouped = q.view(batch, kv_heads, -1, head_size)
    out = F.scaled_dot_product_attention(grouped, k, v, mask, scale=args.scale)
    if shortest == 0:
        out.masked_fill_((seq_lens == 0)[:, None, None, None], 0.0)
    _write(args.out.view(grouped.shape), out, args.v_factor)


def _rows(cache: torch.Tensor, blocks: torch.Tensor, unseen: torch.Tensor | None = None) -> torch.Tensor:
    """Keys or values of ``blocks[B, M]``: ``[B, M S, K, D]``; 0 in the rows at ``unseen``, which may hold anything."""
    x = cache.index_select(0, blocks.flatten()).view(len(blocks), -1, *cache.shape[2:])
    if unseen is not None:
        x.flatten(0, 1).index_fill_(0, unseen, 0.0)
    return x


def _write(target: torch.Tensor, out: torch.Tensor, factor: float) -> None:
    torch.mul(out, factor, out=target) if factor != 1.0 else target.copy_(out)


def prefill(queries: Queries, pages: Pages, hints: Hints, args: AttentionArgs) -> bool:
    """The operator ``varlen_prefill_attention``."""
    assert queries.cu_seqlens_q is not None
    if not takes(pages.k_cache, args):
        return False
    begins, lens = queries.cu_seqlens_q.tolist(), pages.seq_lens.tolist()
    spans = list(zip(begins[:-1], begins[1:], lens, strict=True))
    if any(end - begin > length for begin, end, length in spans):  # queries that see nothing
        return False
    for table, (begin, end, length) in zip(pages.block_tables, spans, strict=True):
        step = max(1, MASK_ELEMENTS // max(1, length))
        for at in range(begin, end, step):
            tokens = slice(at, min(at + step, end))
            out = args._replace(out=args.out[tokens])
            _prefill_one(queries.q[tokens], pages, table, length - end + at, length, queries.causal, out)
    return True


def _prefill_one(
    q: torch.Tensor, pages: Pages, table: torch.Tensor, position: int, length: int, causal: bool, args: AttentionArgs
) -> None:
    """``q[N, H, D]`` from ``position`` on of one sequence."""
    size, kv_heads = pages.k_cache.shape[1:3]
    count, window = len(q), args.window
    first = max(0, position - window + 1) if window else 0
    end = position + count if causal else length  # of the keys that are seen
    begin = first // size * size
    blocks = table[None, begin // size : -(-end // size)]
    mask, square = None, causal and first == 0 and end == count and not (window and window < count)
    if not square:
        key, pos = torch.arange(first, end), torch.arange(position, position + count)[:, None]
        mask = key <= pos if causal else torch.ones(count, end - first, dtype=torch.bool)
        if window:
            mask &= key > pos - window
            if not causal:
                mask &= key < pos + window
    k, v = (_rows(cache, blocks)[0, first - begin : end - begin] for cache in (pages.k_cache, pages.v_cache))
    grouped = q.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)  # [K, G, N, D]
    if q.dtype == torch.float32:
        out = _exact(grouped, k, v, mask if mask is not None else _causal(count), args.scale)
    else:  # keys and values are repeated by strides: [K, G, L, D]
        k, v = (x.transpose(0, 1).unsqueeze(1).expand(-1, grouped.shape[1], -1, -1) for x in (k, v))
        out = F.scaled_dot_product_attention(grouped, k, v, mask, is_causal=square, scale=args.scale)
    _write(args.out, out.permute(2, 0, 1, 3).flatten(1, 2), args.v_factor)


def _causal(count: int) -> torch.Tensor:
    return torch.ones(count, count, dtype=torch.bool).tril_()


def _exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
    """``q[K, G, N, D]``, ``k`` and ``v [L, K, D]``, ``mask[N, L]`` -> ``[K, G, N, D]``, float32 in every step: the
    exponentials of the tiled kernel are good to some 20 units in the last place."""
    rows = (q * scale).flatten(1, 2)  # heads that share keys are rows of one product
    logits = torch.bmm(rows, k.permute(1, 2, 0)).unflatten(1, q.shape[1:3])
    weights = logits.masked_fill_(~mask, -torch.inf).softmax(-1)
    return torch.bmm(weights.flatten(1, 2), v.transpose(0, 1)).view(q.shape)


def project_and_store(qkv: torch.Tensor, slots: Slots, heads: Heads, scales: Scales) -> torch.Tensor | None:
    """Normalise, turn and store the rows' heads; the queries ``[T, H, D]``. ``None``: nothing was done."""
    k_cache, v_cache, slot_mapping = slots
    weights = heads.q_weight, heads.k_weight
    if scales.given or k_cache.dtype not in FLOATS or any(w is not None and w.dim() != 1 for w in weights):
        return None
    flat = _slots(k_cache), _slots(v_cache)
    if flat[0] is None or flat[1] is None or (len(qkv) and int(slot_mapping.min()) < 0):
        return None
    kv_heads, head_size = k_cache.shape[2:]
    x = qkv.unflatten(1, (-1, head_size))
    v = x[:, -kv_heads:]
    x = x[:, :-kv_heads]
    if heads.q_weight is not None and heads.k_weight is not None:
        parts = (x[:, :-kv_heads], heads.q_weight), (x[:, -kv_heads:], heads.k_weight)
        x = torch.cat([normalized(part, w, heads.eps, heads.weight_offset).to(qkv.dtype) for part, w in parts], dim=1)
    if heads.positions is not None and heads.cos_sin_cache is not None:
        x = turned(x, heads.positions, heads.cos_sin_cache, heads.interleaved)
    flat[0].index_copy_(0, slot_mapping, x[:, -kv_heads:])
    flat[1].index_copy_(0, slot_mapping, v)
    return x[:, :-kv_heads]


def _slots(cache: torch.Tensor) -> torch.Tensor | None:
    """The cache as ``[P S, K, D]``, if its slots lie so."""
    fits = cache.stride(0) == cache.shape[1] * cache.stride(1)
    return cache.flatten(0, 1) if fits else None


def qk_norm_rope_store(qkv: torch.Tensor, constant_weight: bool, slots: Slots, heads: Heads, scales: Scales) -> bool:
    """The operator of this name."""
    q = project_and_store(qkv, slots, heads, scales)
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
    q = project_and_store(qkv, Slots(pages.k_cache, pages.v_cache, slot_mapping), heads, scales)
    return q is not None and decode(q, pages, hints, args)

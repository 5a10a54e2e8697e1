"""What the parity tests do not see: which kernels a step launches."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from tritonllm.kernels import DecodeStep, apply_rope, paged_decode_attention, plan_cascade
from tritonllm.layers import attention
from tritonllm.layers.attention import Attention, AttentionSpec
from tritonllm.layers.metadata import AttentionMetadata, KVCacheView
from tritonllm.layers.norm import BlockInput, NormSpec
from tritonllm.layers.rope import RopeSpec
from tritonllm.layers.segments import Segment, Segments, decodes, verified

HEADS, HEAD, BLOCK = 2, 16, 4


def make(device: torch.device) -> Attention:
    spec = AttentionSpec(
        num_heads=HEADS,
        num_kv_heads=1,
        head_size=HEAD,
        rope=RopeSpec(base=1e4, rotary_dim=HEAD, trained_length=BLOCK),
    )
    layer = Attention(24, spec, dtype=torch.float32, device=device)
    for p in layer.parameters():
        p.normal_(0, 0.2)
    return layer


def run(layer: Attention, x: torch.Tensor, *step) -> torch.Tensor:
    return layer(BlockInput(x), *step).alone()


def batch(num_decodes: int, chunks: list[int], device: torch.device) -> AttentionMetadata:
    """Sequences without a past, one block each."""
    lengths = [1] * num_decodes + chunks
    blocks = torch.arange(len(lengths))
    slots = torch.cat([b * BLOCK + torch.arange(n) for b, n in zip(blocks, lengths, strict=True)])
    return AttentionMetadata(
        slot_mapping=slots.to(device),
        block_tables=blocks[:, None].to(device, torch.int32),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        cu_seqlens_q=torch.tensor([0, *chunks], device=device).cumsum(0).to(torch.int32),
        segments=Segments(decodes(num_decodes), chunk=Segment(len(chunks), sum(chunks), max(chunks, default=0))),
    )


@pytest.mark.parametrize("window", [0, -1, True, 4.0])
def test_no_window_is_none_and_no_number(window):
    sizes = {"num_heads": HEADS, "num_kv_heads": 1, "head_size": HEAD}
    assert AttentionSpec(**sizes).window is None and AttentionSpec(**sizes, window=1).window == 1
    with pytest.raises(ValueError, match=f"window must be an integer of at least 1, got {window}"):
        AttentionSpec(**sizes, window=window)


def test_what_values_of_another_size_do_not_go_with():
    sizes = {"num_heads": HEADS, "num_kv_heads": 1, "head_size": HEAD, "value_size": 8}
    assert AttentionSpec(**sizes).projections == ((HEADS, HEAD), (1, HEAD), (1, 8))
    for wrong in (
        {"value_size": HEAD},
        {"values_are_keys": True},
        {"v_norm": NormSpec(kind="rms", eps=0.0, weight=False)},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            AttentionSpec(**{**sizes, **wrong})
    with pytest.raises(ValueError, match="values_are_keys with a value_size or value_scale"):
        AttentionSpec(**{**sizes, "value_size": None, "values_are_keys": True, "value_scale": 2.0})


def test_values_without_rest_are_whole_ones(device):
    """Where what a projection gives behind each head's values is zero, and nothing reads it."""
    small = make(device)
    large = Attention(24, replace(small.spec), dtype=torch.float32, device=device)
    small = Attention(24, replace(small.spec, value_size=8, value_scale=0.5), dtype=torch.float32, device=device)
    keys = (HEADS + 1) * HEAD
    for p in small.parameters():
        p.normal_(0, 0.2)
    large.qkv.weight.zero_()
    large.qkv.weight[: keys + 8] = small.qkv.weight
    large.qkv.weight[keys:] *= 0.5
    large.o.weight.zero_()
    large.o.weight.view(24, HEADS, HEAD)[..., :8] = small.o.weight.view(24, HEADS, 8)
    x, step = torch.randn(6, 24, device=device), batch(2, [3, 1], device)
    found = []
    for layer in (small, large):
        cache = KVCacheView(*(torch.full((4, BLOCK, 1, HEAD), torch.nan, device=device) for _ in range(2)))
        table = layer.spec.rope.table(BLOCK).to(device)
        found.append(run(layer, x, torch.tensor([0, 0, 0, 1, 2, 0], device=device), table, step, cache))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize(("num_decodes", "chunks"), [(3, []), (0, [2, 4]), (2, [3, 1])])
def test_launches_only_what_there_is(device, num_decodes, chunks):
    layer, metadata = make(device), batch(num_decodes, chunks, device)
    tokens = num_decodes + sum(chunks)
    positions = metadata.slot_mapping % BLOCK
    angles = torch.zeros(BLOCK, HEAD // 2, device=device)
    cache = KVCacheView(*torch.full((2, 8, BLOCK, 1, HEAD), float("nan"), device=device))
    x = torch.randn(tokens, 24, device=device)
    with (
        patch.object(DecodeStep, "attend", autospec=True, side_effect=DecodeStep.attend) as fused,
        patch.object(attention, "paged_decode_attention", wraps=attention.paged_decode_attention) as decode,
        patch.object(attention, "varlen_prefill_attention", wraps=attention.varlen_prefill_attention) as prefill,
    ):
        out = run(layer, x, positions, torch.cat((angles.cos(), angles.sin()), -1), metadata, cache)
    assert fused.call_count == (len(chunks) == 0)
    assert decode.call_count == (num_decodes > 0 and len(chunks) > 0)
    assert prefill.call_count == (len(chunks) > 0)
    assert out.shape == (tokens, 24) and out.isfinite().all()
    assert int(cache.k.isfinite().all(-1).sum()) == tokens  # every key stored, nothing else


def test_drafts_are_verified_between_decodes_and_chunks(device):
    """Each segment by its own kernel, with the results that chunks of the same tokens would have."""
    lengths = [3, 5, 2]  # keys of a decode, of 3 drafts after 2 keys, of a chunk
    tables = torch.tensor([[0, 0], [1, 2], [3, 0]], dtype=torch.int32, device=device)
    starts = lambda *ends: torch.tensor(ends, dtype=torch.int32, device=device)  # noqa: E731
    tensors = {
        "slot_mapping": torch.full((6,), -1, device=device),
        "block_tables": tables,
        "seq_lens": torch.tensor(lengths, dtype=torch.int32, device=device),
    }
    segments = Segments(decodes(1), Segment(1, 3, 3), Segment(1, 2, 2))
    metadata = AttentionMetadata(segments, **tensors, cu_seqlens_q=starts(0, 2), verify_starts=starts(0, 3))
    chunks = AttentionMetadata(Segments(chunk=Segment(3, 6, 3)), **tensors, cu_seqlens_q=starts(0, 1, 4, 6))
    q = torch.randn(6, HEADS, HEAD, device=device)
    cache = KVCacheView(*torch.randn(2, 4, BLOCK, 1, HEAD, device=device))
    with patch.object(attention, "paged_verify_attention", wraps=attention.paged_verify_attention) as verify:
        got = attention.paged_attention(q, metadata, cache)
    assert verify.call_count == 1
    torch.testing.assert_close(got, attention.paged_attention(q, chunks, cache))


@pytest.mark.parametrize(
    ("kind", "over", "after", "interleaved", "fused"),
    [
        ("rms", "head", False, False, True),
        ("rms", "heads", False, False, True),
        ("rms", "all", False, False, False),
        ("layer", "heads", False, False, False),
        ("rms", "head", True, False, False),
        ("rms", "all", True, True, False),
        ("layer", "heads", True, False, False),
    ],
)
def test_the_norm_of_queries_and_keys(device, kind, over, after, interleaved, fused):
    """In the launch that rotates and stores where that kernel knows it, else before; in both cases with this result."""
    rope = RopeSpec(base=1e4, rotary_dim=HEAD, trained_length=BLOCK, interleaved=interleaved)
    norm = NormSpec(kind=kind, eps=1e-5, weight_offset=0.5 if kind == "rms" else 0.0)
    norms = {"qk_norm": norm, "qk_norm_over": over, "qk_norm_after_rope": after}
    spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_size=HEAD, rope=rope, **norms)
    layer = Attention(24, spec, dtype=torch.float32, device=device)
    for p in layer.parameters():
        p.normal_(0, 0.2)
    metadata, x = batch(2, [1], device), torch.randn(3, 24, device=device)
    positions, table = metadata.slot_mapping % BLOCK, rope.table(BLOCK, device)
    cache = KVCacheView(*torch.zeros(2, 8, BLOCK, 2, HEAD, device=device))
    with (
        patch.object(attention, "qk_norm_rope_store", wraps=attention.qk_norm_rope_store) as store,
        patch.object(attention, "paged_attention", wraps=attention.paged_attention) as attend,
    ):
        out = run(layer, x, positions, table, metadata, cache)
    assert ("q_weight" in store.call_args.kwargs) == fused
    another = KVCacheView(*torch.zeros(2, 8, BLOCK, 2, HEAD, device=device))
    torch.testing.assert_close(run(layer, x, positions, table, batch(3, [], device), another), out)
    torch.testing.assert_close((another.k, another.v), (cache.k, cache.v))

    q, k, v = layer.qkv(x).unflatten(1, (8, HEAD)).split((4, 2, 2), dim=1)
    if after:
        apply_rope(q, k, positions, table, interleaved=interleaved)
    for module, heads in ((layer.q_norm, q), (layer.k_norm, k)):
        heads = heads.view(3, -1) if over == "all" else heads
        module.normalize(heads, out=heads)
    if not after:
        apply_rope(q, k, positions, table, interleaved=interleaved)
    stored = [c.flatten(0, 1)[metadata.slot_mapping] for c in (cache.k, cache.v)]
    for got, want in zip((attend.call_args.args[0], *stored), (q, k, v), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    ("options", "shared"),
    [({}, True), ({"softcap": 3.0, "sinks": True}, True), ({"window": 3}, False), ({"alibi_slopes": True}, False)],
)
def test_a_shared_prefix_changes_only_who_reads_it(device, options, shared):
    """Two decodes that share a block, one that does not, and a prefill chunk behind them."""
    tables = torch.tensor([[0, 1, 0], [0, 2, 0], [3, 4, 5], [6, 0, 0]], dtype=torch.int32, device=device)
    lens = torch.tensor([6, 8, 11, 3], dtype=torch.int32, device=device)
    shares = torch.tensor([True, True, False], device=device)
    plan = plan_cascade(tables[:3], lens[:3], shares, 1, BLOCK, parts=2)
    metadata = AttentionMetadata(
        slot_mapping=torch.full((6,), -1, device=device),
        block_tables=tables,
        seq_lens=lens,
        cu_seqlens_q=torch.tensor([0, 3], dtype=torch.int32, device=device),
        segments=Segments(decodes(3), chunk=Segment(1, 3, 3)),
    )
    tensors = {"sinks": torch.randn(HEADS, device=device), "alibi_slopes": torch.rand(HEADS, device=device)}
    options = {name: tensors[name] if value is True else value for name, value in options.items()}
    q = torch.randn(6, HEADS, HEAD, device=device)
    cache = KVCacheView(*torch.randn(2, 8, BLOCK, 1, HEAD, device=device))
    want = attention.paged_attention(q, metadata, cache, **options)
    with patch.object(attention, "cascade_decode_attention", wraps=attention.cascade_decode_attention) as cascade:
        got = attention.paged_attention(q, replace(metadata, cascade=plan), cache, **options)
    assert cascade.called == shared
    torch.testing.assert_close(got, want)


def test_batch_invariant_attention_is_told_how_long_drafts_make_a_sequence(device, monkeypatch):
    """Those behind the last token of the longest sequence are computed, too, though nobody may take them."""
    told = []

    def noted(q, *tensors, max_seqlen_q, max_seqlen_k, out, **options):
        told.append((max_seqlen_q, max_seqlen_k))

    monkeypatch.setattr(attention, "batch_invariant_attention", noted)
    starts = torch.tensor([0, 6], dtype=torch.int32, device=device)
    segments = Segments(decodes(2), verified(1, 6), Segment(1, 3, 3))
    numbers = torch.zeros(11, dtype=torch.int64, device=device)
    tables, lens = torch.zeros(4, 1, dtype=torch.int32, device=device), torch.ones(4, dtype=torch.int32, device=device)
    chunk = torch.tensor([0, 3], dtype=torch.int32, device=device)
    more = {"cu_seqlens_q": chunk, "verify_starts": starts, "decode_order": lens[:2], "max_decode_len": 4096}
    metadata = AttentionMetadata(segments=segments, slot_mapping=numbers, block_tables=tables, seq_lens=lens, **more)
    cache = torch.zeros(1, 16, 1, 16, device=device)
    attention.invariant_attention(torch.zeros(11, 1, 16, device=device), metadata, KVCacheView(cache, cache))
    assert told == [(1, 4096), (6, 4101), (None, 4096)]


def test_padding_of_a_captured_batch(device):
    """Sequences of length 0 whose token stores nothing change nothing for the others."""
    layer, metadata = make(device), batch(2, [], device)
    padding = torch.zeros(3, dtype=torch.int32, device=device)
    padded = AttentionMetadata(
        slot_mapping=torch.cat((metadata.slot_mapping, torch.full((3,), -1, device=device))),
        block_tables=torch.cat((metadata.block_tables, padding[:, None])),
        seq_lens=torch.cat((metadata.seq_lens, padding)),
        cu_seqlens_q=metadata.cu_seqlens_q,
        segments=Segments(decodes(5)),
    )
    x = torch.randn(5, 24, device=device)
    table = torch.cat((torch.ones(BLOCK, HEAD // 2), torch.zeros(BLOCK, HEAD // 2)), -1).to(device)
    positions = torch.zeros(5, dtype=torch.int64, device=device)
    caches = [KVCacheView(*torch.full((2, 8, BLOCK, 1, HEAD), float("nan"), device=device)) for _ in range(2)]
    want = run(layer, x[:2], positions[:2], table, metadata, caches[0])
    got = run(layer, x, positions, table, padded, caches[1])
    torch.testing.assert_close(got[:2], want)
    torch.testing.assert_close(caches[1].k, caches[0].k, equal_nan=True)


def test_numbers_may_change_between_compiled_calls():
    """Dynamo makes variables of them then; Gemma 2 and 3 have softcaps and scales of their own."""
    q, cache = torch.randn(3, 4, 16), torch.randn(8, 4, 2, 16)
    tables, lens = torch.zeros(3, 2, dtype=torch.int32), torch.tensor([3, 5, 8], dtype=torch.int32)

    def attend(scale, softcap):
        return paged_decode_attention(q, cache, cache, tables, lens, scale=scale, softcap=softcap)

    compiled = torch.compile(attend, fullgraph=True, backend="eager")
    for numbers in ((0.3, 50.0), (0.3, 30.0), (0.2, 20.0), (0.2, 0.0)):
        assert torch.equal(compiled(*numbers), attend(*numbers))

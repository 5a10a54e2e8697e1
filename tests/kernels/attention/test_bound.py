"""Bound layers and steps against the public function, which checks and looks up everything in each call."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.attention import make_problem
from support.compare import FLOATS, assert_close

from tritonllm.kernels import DecodeStep, bind_layer, fused_decode_attention
from tritonllm.kernels.attention import bound, cpu

HEADS, KV_HEADS, SIZE, BLOCK = 6, 2, 16, 4


def make_step(device, lens, dtype=torch.float32):
    p = make_problem(device, [1] * len(lens), lens, kv_heads=KV_HEADS, group=3, head_size=SIZE, block_size=BLOCK)
    last = (p.seq_lens - 1).long()
    slots = p.block_tables.gather(1, last[:, None].clamp(min=0) // BLOCK)[:, 0] * BLOCK + last % BLOCK
    slots = torch.where(last < 0, -1, slots)
    caches = [cache.to(dtype).nan_to_num() for cache in (p.k_cache, p.v_cache)]
    return caches, (slots, p.block_tables, p.seq_lens), last.clamp(min=0)


OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "scale": st.just(0.3),
        "window": st.integers(1, 30),
        "softcap": st.just(4.0),
        "k_scale": st.just(0.75),
        "v_scale": st.just(1.5),
        "eps": st.just(1e-3),
        "weight_offset": st.just(1.0),
        "interleaved": st.just(True),
    },
)


@given(
    lens=st.lists(st.integers(0, 30), min_size=1, max_size=4),
    dtype=st.sampled_from(FLOATS),
    rotary=st.sampled_from([None, 8, 16]),
    normed=st.booleans(),
    sinks=st.booleans(),
    options=OPTIONS,
    in_torch=st.booleans(),
)
def test_gives_what_the_public_function_gives(device, lens, dtype, rotary, normed, sinks, options, in_torch):
    caches, sequences, positions = make_step(device, lens, dtype)
    new = lambda *shape: torch.randn(*shape, device=device).to(dtype)  # noqa: E731
    qkv, table = new(len(lens), (HEADS + 2 * KV_HEADS) * SIZE), None
    if rotary:
        table = torch.randn(40, rotary, device=device)
    if normed:
        options |= {"q_weight": new(SIZE), "k_weight": new(SIZE)}
    if sinks:
        options["sinks"] = new(HEADS)
    copies = [cache.clone() for cache in caches]
    turn = (positions, table) if rotary else (None, None)
    want = fused_decode_attention(qkv.clone(), *copies, *sequences, *turn, **options)
    step = DecodeStep(*sequences, positions)
    layer = bind_layer(HEADS, dtype, *caches, table, **options)
    with patch.object(bound, "runs_in_torch", lambda x: in_torch and x.is_cpu):
        assert_close(step.attend(qkv, layer), want, dtype)
    for mine, theirs in zip(caches, copies, strict=True):
        assert_close(mine, theirs, dtype)


def test_a_step_looks_lengths_blocks_and_angles_up_once(monkeypatch):
    """For all layers with the same window and table, on the CPU."""
    caches, sequences, positions = make_step(torch.device("cpu"), [9, 12])
    found = []
    for module, name in ((cpu.CpuDecodes, "_group"), (bound, "turn_of"), (cpu, "all_stored")):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args, real=real, name=name: found.append(name) or real(*args))
    monkeypatch.setattr(bound, "runs_in_torch", lambda x: True)
    tables = torch.randn(2, 20, 16).unbind()
    step = DecodeStep(*sequences, positions)
    for table, window in ((0, None), (0, None), (1, 5), (1, None), (0, 5)):
        layer = bind_layer(HEADS, torch.float32, *caches, tables[table], window=window)
        step.attend(torch.randn(2, (HEADS + 2 * KV_HEADS) * SIZE), layer)
    assert sorted(found) == ["_group"] * 2 + ["all_stored"] + ["turn_of"] * 2


def test_calls_check_nothing_that_is_bound(device, monkeypatch):
    caches, sequences, positions = make_step(device, [9, 12])
    step, layer = DecodeStep(*sequences, positions), bind_layer(HEADS, torch.float32, *caches)
    for name in [name for name in vars(bound) if name.startswith("check_")]:
        monkeypatch.setattr(bound, name, lambda *args, **kwargs: pytest.fail("checked again"))
    step.attend(torch.randn(2, (HEADS + 2 * KV_HEADS) * SIZE, device=device), layer)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": 0}, "window must be"),
        ({"scale": -1.0}, "scale must be positive"),
        ({"q_weight": torch.ones(SIZE)}, "q_weight and k_weight must both"),
        ({"sinks": torch.ones(3)}, r"sinks must have shape \[6\]"),
        ({"cos_sin_cache": torch.ones(9, 18)}, "cos_sin_cache must have an even number"),
        ({"workspace": torch.ones(4)}, "workspace must be torch.int32"),
        ({"dtype": torch.bfloat16}, "k_cache .* must have the dtype of the rows"),
        ({"num_heads": 5}, "num_heads must be a multiple of k_cache's 2 heads"),
    ],
)
def test_a_layer_that_does_not_fit(change, message):
    given = {"num_heads": HEADS, "dtype": torch.float32, "k_cache": torch.zeros(3, BLOCK, KV_HEADS, SIZE)}
    with pytest.raises(ValueError, match=message):
        bind_layer(**{**given, "v_cache": given["k_cache"].clone(), **change})


@pytest.mark.parametrize(
    ("place", "wrong", "message"),
    [
        (0, torch.zeros(2, dtype=torch.int32), "slot_mapping must be torch.int64"),
        (1, torch.zeros(3, 1, dtype=torch.int32), "block_tables must have shape"),
        (2, torch.zeros(2), "seq_lens must be torch.int32"),
        (3, torch.zeros(3, dtype=torch.int64), "positions must have shape"),
    ],
)
def test_a_step_that_does_not_fit(place, wrong, message):
    _, sequences, positions = make_step(torch.device("cpu"), [2, 3])
    given = [*sequences, positions]
    given[place] = wrong
    with pytest.raises(ValueError, match=message):
        DecodeStep(*given)
    with pytest.raises(ValueError, match="max_seqlen_k"):
        DecodeStep(*sequences, positions, max_seqlen_k=0)

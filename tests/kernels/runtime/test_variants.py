"""Which kernel a call takes on which chip, and that the documentation has the table of all of them."""

from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chips import CHIPS, chosen_for
from support.compare import with_row_padding
from support.examples import examples

import tritonllm
from tritonllm.kernels.attention import prefill, verify
from tritonllm.kernels.attention.arguments import AttentionArgs, Hints, Pages, Queries
from tritonllm.kernels.attention.decode import config_key, decode_config
from tritonllm.kernels.dense import invariant, linear, medium
from tritonllm.kernels.moe import tiles
from tritonllm.kernels.moe.arguments import Experts
from tritonllm.kernels.runtime import variants
from tritonllm.kernels.runtime.variants import TABLE, Variant, Variants

BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
CPU = torch.device("cpu")


def pages_of(batch, kv_heads=8, head_size=128, dtype=BF16, block_size=16, width=512):
    k, v = torch.empty(2, 4, block_size, kv_heads, head_size, dtype=dtype).unbind()
    return Pages(k, v, torch.empty(batch, width, dtype=torch.int32), torch.empty(batch, dtype=torch.int32))


def decode(batch, group=4, dtype=BF16, cache_dtype=None, keys=None, **pages):
    p = pages_of(batch, dtype=cache_dtype or dtype, **pages)
    q = torch.empty(batch, group * p.k_cache.shape[2], p.k_cache.shape[3], dtype=dtype)
    return decode_config(q, p, Hints(None, max_seqlen_k=keys), 0)["kernel"]


def prefill_of(tokens, longest, group=4, dtype=BF16, causal=True, window=0, batch=1, cache_dtype=None, **pages):
    p = pages_of(batch, dtype=cache_dtype or dtype, **pages)
    q = torch.empty(tokens, group * p.k_cache.shape[2], p.k_cache.shape[3], dtype=dtype)
    args = AttentionArgs(q, None, None, None, None, None, 1.0, 1.0, window, 0.0)
    key = prefill._config_key(Queries(q, None, longest, causal), p, args)
    return prefill.PREFILL.default_config(**key)["kernel"]


def verify_of(batch, new, group=4, tree="no", dtype=BF16, cache_dtype=None, **pages):
    p = pages_of(batch, dtype=cache_dtype or dtype, **pages)
    q = torch.empty(batch * new, group * p.k_cache.shape[2], p.k_cache.shape[3], dtype=dtype)
    return verify.VERIFY.default_config(**config_key(q, p, new), tree=tree)["kernel"]


def moe(tokens, experts=8, top_k=2, n=128, dtype=BF16):
    w_gate_up, w_down = torch.empty(1, 128, n, dtype=dtype), torch.empty(1, n, 64, dtype=dtype)
    x = torch.empty(tokens, n, dtype=dtype)
    key = tiles.config_key(x, Experts(w_gate_up, w_down, None, None, "silu"), top_k, experts)
    return tiles.FUSED_MOE.default_config(**key)["kernel"]


def matrices(m, n=2048, k=64, dtype=BF16, padding=0):
    return with_row_padding(torch.empty(m, k, dtype=dtype), padding), torch.empty(n, k, dtype=dtype)


def name(variant):
    return variant and variant.kernel


def few(m, together=2**20, norm=None, **sizes):
    x, weight = matrices(m, **sizes)
    return name(linear.LINEAR.own(CPU, x, weight, norm, together))


def gated(m, of=linear.GATED_LINEAR, out_dtype=None, **sizes):
    x, weight = matrices(m, **sizes)
    return name(of.own(CPU, x, weight, torch.empty(m, len(weight) // 2, dtype=out_dtype or x.dtype)))


def around_the_stream(m, gated=False, **sizes):
    return name(medium.MEDIUM.own(CPU, *matrices(m, **sizes), gated))


CASES = [  # a call, its kernel on Hopper, and on all other chips; None: those that every chip has, as a table says
    (lambda: decode(8), "sm90", "split"),
    (lambda: decode(8, keys=100), "few", "few"),
    (lambda: decode(8, keys=10_000), "sm90", "split"),
    (lambda: decode(64), "sm90", "balanced"),
    (lambda: decode(300), "split", "split"),
    (lambda: decode(300, cache_dtype=FP8), "sm90", "balanced"),
    (lambda: decode(8, keys=100, cache_dtype=FP8), "few", "few"),
    (lambda: decode(64, group=33), "balanced", "balanced"),
    (lambda: decode(8, head_size=80), "split", "split"),
    (lambda: decode(8, block_size=4), "split", "split"),
    (lambda: decode(8, dtype=FP32), "split", "split"),
    (lambda: prefill_of(4096, 4096), "sm90", "portable"),
    (lambda: prefill_of(16, 8), "decode", "portable"),
    (lambda: prefill_of(16, 9), "sm90", "portable"),
    (lambda: prefill_of(64, 8, cache_dtype=FP8), "decode", "portable"),
    (lambda: prefill_of(64, 64, cache_dtype=FP8), "portable", "portable"),
    (lambda: prefill_of(64, 8, causal=False), "portable", "portable"),
    (lambda: prefill_of(64, 64, causal=False), "sm90", "portable"),
    (lambda: prefill_of(64, 64, causal=False, window=9), "portable", "portable"),
    (lambda: prefill_of(64, 64, head_size=96), "portable", "portable"),
    (lambda: verify_of(8, 8), "sm90", "balanced"),
    (lambda: verify_of(8, 9), "balanced", "balanced"),
    (lambda: verify_of(17, 9), "prefill", "balanced"),
    (lambda: verify_of(17, 9, tree="yes"), "balanced", "balanced"),
    (lambda: verify_of(17, 9, cache_dtype=FP8), "balanced", "balanced"),
    (lambda: moe(1), "direct", "direct"),
    (lambda: moe(2, experts=32), "direct", "direct"),
    (lambda: moe(64), "portable", "portable"),
    (lambda: moe(128), "sm90", "portable"),
    (lambda: moe(128, dtype=FP32), "portable", "portable"),
    (lambda: moe(128, n=144), "portable", "portable"),
    (lambda: few(1), None, None),
    (lambda: few(2), None, None),
    (lambda: few(2, n=2**17 + 8), "few", None),
    (lambda: few(3), "few", None),
    (lambda: few(16, dtype=FP16), "few", None),
    (lambda: few(16, dtype=FP16, norm=torch.empty(64)), None, None),
    (lambda: few(17), None, None),
    (lambda: few(8, together=2**27 + 1), None, None),
    (lambda: few(8, k=72), None, None),
    (lambda: gated(1), None, None),
    (lambda: gated(3), "invariant", None),
    (lambda: gated(64), None, None),
    (lambda: gated(256), "invariant", None),
    (lambda: gated(64, n=2**17 + 16), "invariant", None),
    (lambda: gated(65, n=2**17 + 16), None, None),
    (lambda: gated(32, padding=4), None, None),
    (lambda: gated(1024), None, None),
    (lambda: gated(1025), "gated", None),
    (lambda: gated(1025, out_dtype=FP32), None, None),
    (lambda: gated(1025, of=invariant.INVARIANT_GATED), "gated", None),
    (lambda: gated(256, of=invariant.INVARIANT_GATED), None, None),
    (lambda: around_the_stream(64), None, None),
    (lambda: around_the_stream(65), "tiles", None),
    (lambda: around_the_stream(256, gated=True), "tiles", None),
    (lambda: around_the_stream(257), None, None),
    (lambda: around_the_stream(100, n=1016), None, None),
    (lambda: around_the_stream(100, n=2**17 + 8), None, None),
    (lambda: around_the_stream(100, dtype=FP32), None, None),
]


@pytest.mark.parametrize("arch", CHIPS)
def test_which_kernel_a_call_takes(arch):
    for place, (call, on_hopper, elsewhere) in enumerate(CASES):
        with chosen_for(arch):
            assert call() == (on_hopper if arch == 90 else elsewhere), place


@settings(max_examples=examples(100))
@given(
    call=st.sampled_from([decode, prefill_of, verify_of]),
    batch=st.integers(1, 300),
    new=st.integers(1, 100),
    shape=st.fixed_dictionaries(
        {
            "group": st.integers(1, 40),
            "kv_heads": st.sampled_from([1, 2, 8]),
            "head_size": st.sampled_from([16, 64, 80, 128, 256]),
            "block_size": st.sampled_from([1, 8, 12, 16, 128]),
            "dtype": st.sampled_from([BF16, FP16, FP32]),
            "cache_dtype": st.sampled_from([None, FP8]),
        }
    ),
    arch=st.sampled_from([chip for chip in CHIPS if chip is not None]),
)
def test_no_chip_takes_a_kernel_of_another(call, batch, new, shape, arch):
    """And one that has none of its own takes what all have."""
    sizes = {decode: (batch,), prefill_of: (new * batch, new), verify_of: (batch, new)}[call]
    with chosen_for(arch):
        taken = call(*sizes, **shape)
    with chosen_for(None):
        common = call(*sizes, **shape)
    of = {decode: "paged_decode_attention", prefill_of: "varlen_prefill_attention", verify_of: "paged_verify_attention"}
    rows = TABLE[of[call]].rows
    assert taken == common or arch in {row.kernel: row for row in rows}[taken].archs
    if not any(arch in row.archs for table in TABLE.values() for row in table.rows):
        assert taken == common


@pytest.mark.parametrize("operation", sorted(TABLE))
def test_rows(operation):
    """The last one is for every chip and asks for nothing; what a row names is there."""
    rows = TABLE[operation].rows
    assert rows[-1].archs == () and rows[-1].fits is rows[-1].pays is None
    assert len({row.kernel for row in rows}) == len(rows)
    for row in rows:
        assert row.module.__name__.startswith("tritonllm.kernels.")
        assert all(map(callable, (row.asked(row.fits), row.asked(row.pays))))
        assert row.archs or row.fits is None


def test_a_chip_more_is_a_row_more():
    """Rows are asked in order, on their chips only; a file is imported when one of its chips asks."""
    there = SimpleNamespace(fits=lambda n: n != 3, pays=lambda n: n > 1, launch=lambda *args: args)
    with patch.dict(TABLE), patch.object(variants, "_module", return_value=there) as imported:
        table = Variants(
            "op",
            Variant("new", "new.py", ("gfx950", 110), "fits", "pays"),
            Variant("newer", "newer.py", (110,), pays=lambda n: n == 3),
            Variant("every", "every.py"),
        )
        with chosen_for(90):
            assert table.own(CPU, 2) is None and table.own_arch(CPU, 2) == "any"
        assert not imported.called
        with chosen_for("gfx950"):
            assert [name(table.own(CPU, n)) for n in (1, 2, 3)] == [None, "new", None]
        with chosen_for(110):
            assert [name(table.own(CPU, n)) for n in (1, 2, 3)] == [None, "new", "newer"]


def test_configurations_name_their_kernel():
    """A row is given what it names of the key."""
    launched = []
    there = SimpleNamespace(launch=lambda *args: launched.append(args))
    with patch.dict(TABLE), patch.object(variants, "_module", return_value=there):
        table = Variants(
            "op",
            Variant("own", "own.py", (90,), pays=lambda n: n < 5, config=lambda n, m: {"BLOCK": n * m}),
            Variant("every", "every.py", config=lambda arch: {"FOR": arch}),
        )
        assert table.default_config(n=4, m=3, arch="sm90") == {"BLOCK": 12, "kernel": "own"}
        assert table.default_config(n=5, m=3, arch="sm90") == {"FOR": "sm90", "kernel": "every"}
        assert table.default_config(n=4, m=3, arch="any") == {"FOR": "any", "kernel": "every"}
        table.launch({"kernel": "own", "BLOCK": 12}, 1, 2)
    assert launched == [(1, 2, {"BLOCK": 12})]


def documented():
    """The table as docs/kernels.md has it."""
    lines = ["| operation | kernel | file | chips |", "|---|---|---|---|"]
    for operation, table in sorted(TABLE.items()):
        for place, row in enumerate(table.rows):
            chips = ", ".join(f"sm_{arch}" if isinstance(arch, int) else arch for arch in row.archs) or "all"
            lines.append(f"| {'' if place else f'`{operation}`'} | {row.kernel} | `{row.source}` | {chips} |")
    return "\n".join(lines)


def test_the_documentation_has_the_table():
    page = Path(tritonllm.__file__).parents[1] / "docs" / "kernels.md"
    assert documented() in page.read_text(), f"docs/kernels.md must have this table:\n\n{documented()}"

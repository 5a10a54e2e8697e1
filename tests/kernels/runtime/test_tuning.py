import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.chips import chosen_for

from tritonllm.kernels.runtime import tuning
from tritonllm.kernels.runtime.gpus import Gpu, nearest, tuned_gpus
from tritonllm.kernels.runtime.tuning import FAR, distance, get_config, gpu_slug, override

GPU = torch.device("cuda", 0)  # only named: these tests launch nothing


def default(**key):
    return {"BLOCK": 64, "key": key}


@pytest.fixture
def tables(monkeypatch, tmp_path):
    """Makes this machine's GPU an "NVIDIA Test" whose tables lie in an empty folder; write(op, entries) adds one."""

    def forget():
        tuning.load_table.cache_clear()
        tuning._lookup.cache_clear()

    def write(op, entries):
        path = tmp_path / "nvidia_test" / f"{op}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"op": op, "entries": entries}))
        forget()

    monkeypatch.setattr(tuning, "TABLES", tmp_path)
    monkeypatch.setattr(tuning, "_gpu_slug_of", lambda index: "nvidia_test")
    forget()
    yield write
    forget()


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("NVIDIA H200", "nvidia_h200"),
        ("NVIDIA A100-SXM4-80GB", "nvidia_a100_sxm4_80gb"),
        ("AMD  MI300X ", "amd_mi300x"),
    ],
)
def test_gpu_slug(name, slug):
    assert gpu_slug(name) == slug


@given(
    tokens=st.lists(st.integers(0, 20), min_size=1, max_size=6, unique=True),
    wanted=st.integers(1, 2**20),
)
def test_lookup_takes_the_nearest_entry(tokens, wanted):
    table = {"entries": [{"key": {"tokens": 1 << t, "dtype": "bf16"}, "config": {"BLOCK": 1 << t}} for t in tokens]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "load_table", lambda slug, op: table)
        found = tuning._lookup.__wrapped__("gpu", "op", default, (("tokens", wanted), ("dtype", "bf16")))
    stand_in = 1 << math.ceil(math.log2(wanted))
    ratios = {1 << t: abs(math.log2(((1 << t) + 1) / (stand_in + 1))) for t in tokens}
    near = min(ratios.values())
    if "key" in found:  # the default
        assert near >= FAR and found["key"]["tokens"] == stand_in
    else:
        assert ratios[found["BLOCK"]] == pytest.approx(near) and near <= FAR


def test_the_default_takes_the_place_of_what_says_nothing(tables):
    """An entry where the default was not beaten, and one with another kernel that the key is not exactly of."""

    def chosen(rows):
        return {"kernel": "few" if rows < 100 else "many", "BLOCK": rows}

    others = [{"key": {"rows": 512}}, {"key": {"rows": 64}, "config": {"kernel": "few", "BLOCK": 7}}]
    tables("op", [{"key": {"rows": 128}, "config": {"kernel": "few", "BLOCK": 5}}, *others])
    found = {rows: get_config("op", GPU, chosen, rows=rows) for rows in (63, 64, 95, 127, 128, 129, 182, 300, 512)}
    assert [config["kernel"] for config in found.values()] == ["few"] * 5 + ["many"] * 4
    assert [config["BLOCK"] for config in found.values()] == [7, 7, 5, 5, 5, 256, 256, 512, 512]


def test_a_default_that_was_not_beaten_is_that_of_the_models_own_sizes(tables):
    """One that knows a weight's size is asked for this weight, at the number of rows that was measured."""

    def chosen(m, n):
        return {"ROWS": m, "BLOCK": n}

    tables("op", [{"key": {"m": 16, "n": 4096}}])
    assert get_config("op", GPU, chosen, m=20, n=2100) == {"ROWS": 16, "BLOCK": 2100}
    assert get_config("op", GPU, chosen, m=100, n=4096) == {"ROWS": 128, "BLOCK": 4096}, "far away"
    assert get_config("op", GPU, chosen, m=100, n=40000) == {"ROWS": 100, "BLOCK": 40000}, "another model"


@given(
    entries=st.dictionaries(st.integers(0, 16), st.sampled_from([None, "few", "many"]), min_size=1, max_size=4),
    model=st.sampled_from([1, 2, 3, 100]),
    few=st.integers(0, 17),
    up_to=st.integers(1, 2**17),
    times=st.integers(1, 9),
)
def test_what_lies_between_powers_of_two_has_no_configuration_of_its_own(entries, model, few, up_to, times):
    """A start that visits the powers of two of a step's tokens, and the most that there may be, has met all."""

    def chosen(rows, n):
        return {"kernel": "few" if rows <= 1 << few else "many", "BLOCK": rows.bit_length() - (rows & (rows - 1) == 0)}

    configs = {
        bit: {} if kernel is None else {"config": {"kernel": kernel, "BLOCK": -bit}} for bit, kernel in entries.items()
    }
    table = {"entries": [{"key": {"rows": 1 << bit, "n": 1}, **config} for bit, config in configs.items()]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "load_table", lambda slug, op: table)

        def found(tokens):
            key = (("rows", times * tokens), ("n", model))
            return tuple(tuning._lookup.__wrapped__("gpu", "op", chosen, key).items())

        visited = {found(1 << bit) for bit in range(up_to.bit_length())} | {found(up_to)}
        between = {up_to * part // 40 for part in range(1, 41)} | {(1 << bit) * 5 // 4 for bit in range(17)}
        assert {found(tokens) for tokens in between if 1 <= tokens <= up_to} <= visited


keys = st.dictionaries(
    st.sampled_from(["n", "tokens", "dtype", "head_size"]), st.integers(0, 2**31) | st.sampled_from(["a", "b"])
)


@given(keys, keys, keys)
def test_distance_is_a_metric(a, b, c):
    assert distance(a, a) == 0
    assert distance(a, b) == distance(b, a) >= 0
    assert distance(a, c) <= distance(a, b) + distance(b, c) + 1e-6


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"n": 1}, {"m": 1}),
        ({"n": 1}, {"n": 1, "m": 1}),
        ({"dtype": "bfloat16"}, {"dtype": "float16"}),
        ({"n": 1}, {"n": "1"}),
        ({"head_size": 128}, {"head_size": 256}),
        ({"itemsize": 2}, {"itemsize": 4}),
    ],
)
def test_what_is_never_near(a, b):
    assert distance(a, b) == math.inf


def test_exact_key_wins_over_its_neighbours(tables):
    tables("op", [{"key": {"n": n}, "config": {"BLOCK": n}} for n in (1, 2, 3, 1024)])
    assert [get_config("op", GPU, default, n=n)["BLOCK"] for n in (1, 2, 3, 1024)] == [1, 2, 3, 1024]


def test_default_without_a_table_an_entry_or_a_gpu(tables):
    tables("op", [{"key": {"n": 8, "dtype": "bfloat16"}, "config": {"BLOCK": 1}}])
    tables("empty", [])
    assert get_config("op", GPU, default, n=8, dtype="bfloat16") == {"BLOCK": 1}
    for op, device, key in [
        ("op", GPU, {"n": 8, "dtype": "float16"}),  # no entry for that string
        ("op", torch.device("cpu"), {"n": 8, "dtype": "bfloat16"}),
        ("empty", GPU, {"n": 8}),
        ("unknown", GPU, {"n": 8}),
    ]:
        assert get_config(op, device, default, **key) == {"BLOCK": 64, "key": key}


def test_only_a_default_is_fitted_to_99_kb(tables, monkeypatch):
    monkeypatch.setattr(tuning.chip, "has_small_memory", lambda device: True)

    def deep(n):
        return {"BLOCK": n, "num_stages": 4}

    tables("op", [{"key": {"n": 8}, "config": {"BLOCK": 8, "num_stages": 3}}, {"key": {"n": 1024}}])
    found = [get_config("op", GPU, deep, n=n)["num_stages"] for n in (8, 1024, 2**20)]
    assert found == [3, 2, 2]  # tuned on such a chip; not beaten there; no entry is near
    assert get_config("other", GPU, lambda n: {"num_stages": 1}, n=8) == {"num_stages": 1}
    with override("op", deep):
        assert get_config("op", GPU, deep, n=1024)["num_stages"] == 4, "what the tuner asks for"


def test_override(tables):
    tables("op", [{"key": {"n": 1}, "config": {"BLOCK": 1}}])
    with override("op", {"BLOCK": 2}) as outer:
        assert get_config("op", GPU, default, n=1) == {"BLOCK": 2}
        assert get_config("other", GPU, default, n=1) == default(n=1)
        with override("op", lambda n: {"BLOCK": 10 * n}) as inner:
            assert get_config("op", GPU, default, n=7) == {"BLOCK": 70}
        assert get_config("op", GPU, default, n=3) == {"BLOCK": 2}
    assert (outer, inner) == ([{"n": 1}, {"n": 3}], [{"n": 7}])
    with pytest.raises(KeyError, match="boom"), override("op", {"BLOCK": 2}):
        raise KeyError("boom")
    assert get_config("op", GPU, default, n=1) == {"BLOCK": 1}


def test_why_a_configuration_was_chosen(tables):
    """Whoever watches learns of each choice what decided it; nothing else changes, and nobody watches afterwards."""

    def chosen(n):
        return {"kernel": "few" if n < 100 else "many", "BLOCK": n}

    tables("op", [{"key": {"n": 120}, "config": {"kernel": "few", "BLOCK": 5}}, {"key": {"n": 400}}])
    asked = [("op", GPU, 120), ("op", GPU, 119), ("op", GPU, 401), ("op", GPU, 9000), ("other", GPU, 1)]
    asked.append(("op", torch.device("cpu"), 120))
    expected = [get_config(op, device, chosen, n=n) for op, device, n in asked]
    for _ in range(2):  # what was looked up before has a reason, too
        with tuning.watched() as choices:
            assert [get_config(op, device, chosen, n=n) for op, device, n in asked] == expected
        assert [(c.op, c.key, c.config) for c in choices] == [
            (op, {"n": n}, config) for (op, _, n), config in zip(asked, expected, strict=True)
        ]
        assert [c.reason for c in choices] == [
            "table entry nvidia_test/op, exactly this size",
            "the default: the table entry nvidia_test/op, nearest to n=120, takes another kernel",
            "the default, not beaten in nvidia_test/op, nearest to n=400",
            "the default: no entry of nvidia_test/op is near",
            "the default: nvidia_test has no table of other",
            "the default: tensors are not on a GPU",
        ]
    tables("rows", [{"key": {"rows": 128}}])
    with tuning.watched() as of_rows:
        get_config("rows", GPU, lambda rows: {}, rows=100)
    assert of_rows[0].reason == "the default, not beaten in nvidia_test/rows, nearest to rows=128"
    get_config("op", GPU, chosen, n=120)
    assert len(choices) == len(asked)


H100, H200 = Gpu("NVIDIA H100 80GB HBM3", 90, 132, 79), Gpu("NVIDIA H200", 90, 132, 140)
PCIE, B200 = Gpu("NVIDIA H100 PCIe", 90, 114, 79), Gpu("NVIDIA B200", 100, 148, 180)


@pytest.mark.parametrize(
    ("gpu", "tuned", "wanted"),
    [
        (H200, [H100, H200], H200),
        (H100, [H200, B200], H200),
        (PCIE, [H200, H100, B200], H100),
        (B200, [H200, H100], None),
        (H100, [], None),
        (H100._replace(arch=80), [H200, H100], H100),  # the name decides first
    ],
)
def test_nearest_relative(gpu, tuned, wanted):
    assert nearest(gpu, tuned) == wanted


def test_the_shipped_tables_name_their_gpu():
    gpus = {gpu.name: gpu for gpu in tuned_gpus(tuning.TABLES)}
    assert gpus["NVIDIA H200"] == H200
    assert tuning.name_in_tables(H100) == "NVIDIA H200" and tuning.name_in_tables(B200) == "NVIDIA B200"


@pytest.mark.parametrize(
    ("arch", "stages"), [(80, 4), (86, 2), (89, 2), (90, 4), (100, 4), (120, 2), ("gfx942", 4), (None, 4)]
)
def test_two_tiles_are_in_flight_where_a_program_may_use_99_kb(tables, arch, stages):
    """Configurations are for the 163 KB of an A100 or more."""
    with chosen_for(arch):
        assert get_config("op", GPU, lambda: {"num_stages": 4}) == {"num_stages": stages}
        assert get_config("op", GPU, lambda: {"num_stages": 1}) == {"num_stages": 1}
        assert get_config("op", GPU, lambda: {"BLOCK": 64}) == {"BLOCK": 64}

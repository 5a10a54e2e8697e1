import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.compare import FLOATS, assert_close, relative_error
from transformers import GptOssConfig, LlamaConfig, Phi3Config, PhimoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as gptj_rope
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama_rope
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding
from transformers.models.phimoe.modeling_phimoe import PhimoeRotaryEmbedding

from tritonllm.kernels import apply_rope, apply_rope_ref, build_cos_sin_cache

dtypes = st.sampled_from(FLOATS)


def fused_qkv(tokens, heads, kv_heads, head_size, dtype, device):
    """The query, key and value slices of one fused projection."""
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_size).to(device, dtype)
    q, k, v = qkv.split([heads * head_size, kv_heads * head_size, kv_heads * head_size], dim=1)
    return q.view(tokens, heads, head_size), k.view(tokens, kv_heads, head_size), v


@given(
    tokens=st.integers(0, 3),
    heads=st.integers(0, 5),
    kv_heads=st.integers(0, 3),
    half=st.integers(1, 20),
    rest=st.integers(0, 5),
    dtype=dtypes,
    cache_dtype=dtypes,
    positions_dtype=st.sampled_from([torch.int32, torch.int64]),
    interleaved=st.booleans(),
)
def test_matches_reference(
    device, tokens, heads, kv_heads, half, rest, dtype, cache_dtype, positions_dtype, interleaved
):
    """Slices of one projection turned in place; what is not rotated keeps every bit."""
    rotary = 2 * half
    q, k, v = fused_qkv(tokens, heads, kv_heads, rotary + rest, dtype, device)
    before_q, before_k, before_v = q.clone(), k.clone(), v.clone()
    cache = build_cos_sin_cache(rotary, 50, dtype=cache_dtype, device=device)
    positions = torch.randint(0, 50, (tokens,)).to(device, positions_dtype)
    assert apply_rope(q, k, positions, cache, interleaved=interleaved) == (q, k)
    expected_q, expected_k = apply_rope_ref(
        before_q.float(), before_k.float(), positions, cache.float(), interleaved=interleaved
    )
    assert_close(q, expected_q)
    assert_close(k, expected_k)
    assert torch.equal(q[..., rotary:], before_q[..., rotary:])
    assert torch.equal(k[..., rotary:], before_k[..., rotary:])
    assert torch.equal(v, before_v)


@given(interleaved=st.booleans(), shift=st.integers(0, 40))
def test_depends_on_relative_position_only(device, interleaved, shift):
    """What the rotation is for: the product of a query and a key moved by the same shift stays."""
    q, k = torch.randn(1, 1, 32, device=device), torch.randn(1, 1, 32, device=device)
    cache = build_cos_sin_cache(32, 64, device=device)

    def product(i, j):
        a, b = q.clone(), k.clone()
        apply_rope(a, a.clone(), torch.tensor([i], device=device), cache, interleaved=interleaved)
        apply_rope(b, b.clone(), torch.tensor([j], device=device), cache, interleaved=interleaved)
        return (a * b).sum()

    assert abs(product(7 + shift, 3 + shift) - product(7, 3)) < 1e-4 * q.norm() * k.norm()


def test_position_zero_changes_nothing(device):
    q, k, _ = fused_qkv(2, 3, 2, 16, torch.bfloat16, device)
    before = q.clone(), k.clone()
    apply_rope(q, k, torch.zeros(2, dtype=torch.int64, device=device), build_cos_sin_cache(16, 4, device=device))
    assert torch.equal(q, before[0])
    assert torch.equal(k, before[1])


@pytest.mark.parametrize("interleaved", [False, True])
def test_reference_matches_transformers(device, interleaved):
    """Llama's pairing (i, i + D/2) and GPT-J's (2i, 2i + 1)."""
    q, k = torch.randn(5, 4, 32, device=device), torch.randn(5, 2, 32, device=device)
    positions = torch.tensor([0, 3, 1, 40, 7], device=device)
    cache = build_cos_sin_cache(32, 64, device=device)
    cos, sin = cache[positions][None].chunk(2, dim=-1)
    if interleaved:
        expected = [gptj_rope(t[None], sin, cos)[0] for t in (q, k)]
    else:
        cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
        expected = [t[0] for t in llama_rope(q[None], k[None], cos, sin, unsqueeze_dim=2)]
    apply_rope_ref(q, k, positions, cache, interleaved=interleaved)
    assert_close(q, expected[0])
    assert_close(k, expected[1])


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": YARN,
    "yarn, all keys": {**YARN, "factor": 40.0, "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.25},
    "yarn, mscale": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.2},
    "yarn, not truncated": {**YARN, "truncate": False},
    "yarn, GPT-OSS": {**YARN, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
}


def longrope(rotary: int, **changes) -> dict:
    """Factors that tell the lists and their elements apart."""
    short = [1.0 + 0.1 * i for i in range(rotary // 2)]
    scaling = {"rope_type": "longrope", "short_factor": short, "long_factor": [3 * f for f in short]}
    return {**scaling, "original_max_position_embeddings": 64, **changes}


def rotary_table(embedding, rows: int) -> torch.Tensor:
    """The cosines and sines of a transformers module for so many positions, in our layout."""
    cos, sin = (t[0] for t in embedding(torch.zeros(1), torch.arange(rows)[None]))
    if not isinstance(embedding, GptOssRotaryEmbedding):  # the others give each angle twice
        cos, sin = cos.chunk(2, dim=-1)[0], sin.chunk(2, dim=-1)[0]
    return torch.cat((cos, sin), -1)


def assert_tables_match(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """A frequency that differs in its last bit turns position p by up to p * 2^-24."""
    assert ours.shape == theirs.shape
    assert ours.dtype == torch.float32
    rows = len(ours)
    assert relative_error(ours, theirs) < 1e-8 * rows
    assert (ours - theirs).abs().max() < 2 * rows * 2.0**-24


def llama_table(rows: int, base: float, head_size: int, scaling: dict) -> torch.Tensor:
    config = LlamaConfig(
        hidden_size=2 * head_size,
        num_attention_heads=2,
        head_dim=head_size,
        max_position_embeddings=128,
        rope_parameters={**scaling, "rope_theta": base},
    )
    return rotary_table(LlamaRotaryEmbedding(config), rows)


@pytest.mark.parametrize("base", [10000.0, 1000000.0])
@pytest.mark.parametrize(("head_size", "partial"), [(64, 1.0), (64, 0.5), (80, 0.4), (96, 0.75)])
@pytest.mark.parametrize("name", sorted(SCALINGS))
def test_cache_matches_transformers(name, head_size, partial, base):
    """The table equals the cosines and sines of transformers' Llama, attention factor included, whatever the part of
    the head that is rotated."""
    scaling = {**SCALINGS[name], "partial_rotary_factor": partial, "rope_theta": base}
    rotary = int(head_size * partial)
    ours = build_cos_sin_cache(rotary, 500, base, scaling, max_position_embeddings=128)
    assert_tables_match(ours, llama_table(500, base, head_size, scaling))
    assert relative_error(ours, build_cos_sin_cache(rotary, 500, base)) > 1e-2


@pytest.mark.parametrize("more", [{}, {"factor": 4.0}])
@pytest.mark.parametrize(("head_size", "partial"), [(64, 0.25), (96, 0.4), (64, 1.0)])
def test_proportional_cache_matches_transformers(head_size, partial, more):
    """Its table has all pairs of a head, of which some stand still."""
    scaling = {"rope_type": "proportional", "partial_rotary_factor": partial, "rope_theta": 1e6, **more}
    ours = build_cos_sin_cache(head_size, 500, 1e6, scaling)
    assert_tables_match(ours, llama_table(500, 1e6, head_size, scaling))
    turned = int(partial * head_size // 2)
    assert int((ours[1:, head_size // 2 :] == 0).all(0).sum()) == head_size // 2 - turned


@pytest.mark.parametrize("base", [10000.0, 1000000.0])
def test_unscaled_cache_matches_transformers(base):
    scaling = {"rope_type": "default", "rope_theta": base}
    assert_tables_match(build_cos_sin_cache(64, 500, base, scaling), llama_table(500, base, 64, scaling))


@pytest.mark.parametrize("rows", [64, 65, 500])
@pytest.mark.parametrize("changes", [{}, {"factor": 3.0}, {"factor": 0.5}, {"attention_factor": 1.3}])
@pytest.mark.parametrize("partial", [1.0, 0.75])
def test_longrope_matches_transformers(rows, changes, partial):
    """The short factors up to the trained length of 64, the long ones beyond; Phi-3 calls the type "su"."""
    rotary = int(64 * partial)
    scaling = {**longrope(rotary, **changes), "partial_rotary_factor": partial}
    config = Phi3Config(
        hidden_size=128,
        num_attention_heads=2,
        max_position_embeddings=512,
        original_max_position_embeddings=64,
        rope_parameters={**scaling, "rope_theta": 10000.0},
        pad_token_id=None,
    )
    theirs = rotary_table(Phi3RotaryEmbedding(config), rows)
    ours = build_cos_sin_cache(rotary, rows, scaling=scaling, max_position_embeddings=512)
    assert_tables_match(ours, theirs)
    renamed = {**{key: value for key, value in scaling.items() if key != "rope_type"}, "type": "su"}
    assert torch.equal(build_cos_sin_cache(rotary, rows, scaling=renamed, max_position_embeddings=512), ours)


def test_longrope_lists_differ():
    """What the comparison with transformers relies on."""
    scaling = longrope(16)
    short, long = (build_cos_sin_cache(16, n, scaling=scaling, max_position_embeddings=512) for n in (64, 65))
    assert relative_error(short, long[:64]) > 1e-2
    assert torch.equal(long, build_cos_sin_cache(16, 500, scaling=scaling, max_position_embeddings=512)[:65])


@pytest.mark.parametrize(("rows", "magnitude"), [(64, 1.25), (65, 1.5)])
def test_longrope_mscale(rows, magnitude):
    """Phi-3.5-MoE names the factor of cosines and sines for each list; it goes before attention_factor."""
    mscales = {"short_mscale": 1.25, "long_mscale": 1.5}
    scaling = longrope(64, **mscales)
    ours = build_cos_sin_cache(64, rows, scaling={**scaling, "attention_factor": 2.0}, max_position_embeddings=512)
    plain = build_cos_sin_cache(64, rows, scaling=longrope(64, attention_factor=1.0))
    assert torch.equal(ours, plain * magnitude)
    if rows == 64:  # beyond, transformers' Phimoe takes long_mscale with the short factors
        config = PhimoeConfig(hidden_size=128, num_attention_heads=2, max_position_embeddings=512)
        config.rope_parameters = {**scaling, "rope_theta": 10000.0}
        assert_tables_match(ours, rotary_table(PhimoeRotaryEmbedding(config), rows))


def test_gpt_oss_table():
    """Its own settings, as transformers has them by default, over a long stretch of positions."""
    config = GptOssConfig()
    scaling = dict(config.rope_parameters)
    ours = build_cos_sin_cache(64, 5000, scaling["rope_theta"], scaling, max_position_embeddings=131072)
    assert (scaling["factor"], scaling["truncate"], scaling["rope_theta"]) == (32.0, False, 150000.0)
    assert_tables_match(ours, rotary_table(GptOssRotaryEmbedding(config), 5000))


def test_dynamic_within_the_trained_length_is_no_scaling():
    scaling = {"type": "dynamic", "factor": 4.0}
    assert torch.equal(
        build_cos_sin_cache(16, 64, scaling=scaling, max_position_embeddings=64), build_cos_sin_cache(16, 64)
    )


def test_legacy_and_derived_keys():
    assert torch.equal(
        build_cos_sin_cache(16, 64, scaling={"type": "linear", "factor": 2}),
        build_cos_sin_cache(16, 64, scaling={"rope_type": "linear", "factor": 2}),
    )
    derived = {"rope_type": "yarn", "original_max_position_embeddings": 32}
    assert torch.equal(
        build_cos_sin_cache(16, 64, scaling=derived, max_position_embeddings=128),
        build_cos_sin_cache(16, 64, scaling={**derived, "factor": 4.0}),
    )


def test_cache_dtype_and_device():
    cache = build_cos_sin_cache(16, 64, dtype=torch.bfloat16, device="cpu")
    assert cache.dtype == torch.bfloat16
    assert torch.equal(cache, build_cos_sin_cache(16, 64).bfloat16())


@pytest.mark.parametrize(
    ("scaling", "names"),
    [
        ({"rope_type": "ntk"}, "'ntk' is not supported.*llama3"),
        ({"rope_type": "linear"}, "'linear' needs a positive 'factor'"),
        ({"rope_type": "linear", "factor": 0}, "factor must be positive"),
        ({"rope_type": "linear", "factor": "2"}, "factor must be a number"),
        ({"rope_type": "linear", "factor": float("nan")}, "factor must be a number"),
        (
            {"rope_type": "proportional", "partial_rotary_factor": 1.5},
            "scaling: partial_rotary_factor must be at most 1, got 1.5",
        ),
        ({"rope_type": "dynamic", "factor": 2.0}, "'dynamic' needs a positive 'max_position_embeddings'"),
        ({"rope_type": "yarn", "factor": 2.0}, "'yarn' needs a positive 'original_max_position_embeddings'"),
        ({"rope_type": "yarn", "original_max_position_embeddings": 8}, "'yarn' needs a positive 'factor'"),
        ({**SCALINGS["llama3"], "low_freq_factor": None}, "'llama3' needs a positive 'low_freq_factor'"),
        ({**SCALINGS["llama3"], "low_freq_factor": 4.5}, "low_freq_factor must be at most"),
        ({"type": "su", "original_max_position_embeddings": 8}, "'longrope' needs a positive 'short_factor'"),
        (longrope(16, long_factor=None), "'longrope' needs a positive 'long_factor'"),
        (longrope(16, long_factor=[1.0] * 7), r"long_factor must have 8 numbers \(rotary_dim / 2\), got 7"),
        (longrope(16, short_factor=[1.0] * 9), r"short_factor must have 8 numbers \(rotary_dim / 2\), got 9"),
        (longrope(16, short_factor=2.0), "short_factor must be a list of numbers, got 2.0"),
        (longrope(16, short_factor="12345678"), "short_factor must be a list of numbers, got '12345678'"),
        (longrope(16, short_factor=[1.0] * 7 + [0.0]), r"short_factor\[7\] must be positive, got 0.0"),
        (longrope(16, long_factor=["1.0"] * 8), r"long_factor\[0\] must be a number, got '1.0'"),
        (longrope(16, long_factor=[float("nan")] * 8), r"long_factor\[0\] must be a number, got nan"),
        (longrope(16, factor=[2.0]), r"factor must be a number, got \[2.0\]"),
        (longrope(16), "'longrope' needs a positive 'factor'"),
        (longrope(16, factor=2.0, original_max_position_embeddings=1), "must be more than 1, got 1"),
        (
            longrope(16, factor=2.0, original_max_position_embeddings=None),
            "positive 'original_max_position_embeddings'",
        ),
        ({"rope_type": "linear", "factor": 2.0, "long_factor": [1.0]}, "unknown keys: long_factor"),
        ({"rope_type": "default", "mrope_section": [1, 2]}, "unknown keys: mrope_section"),
        ({"rope_type": "default", "rope_theta": 5.0}, "rope_theta 5.0, but base is 10000"),
    ],
)
def test_bad_scaling(scaling, names):
    with pytest.raises(ValueError, match=names):
        build_cos_sin_cache(16, 64, scaling=scaling)


@pytest.mark.parametrize(
    ("kwargs", "names"),
    [
        ({"rotary_dim": 15}, "rotary_dim must be even"),
        ({"max_position": 0}, "max_position must be positive"),
        ({"base": 1.0}, "base must be more than 1"),
        ({"dtype": torch.int32}, "dtype must be a float"),
        (
            {"rotary_dim": 2, "scaling": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": 8},
            "rotary_dim must be more than 2",
        ),
    ],
)
def test_bad_cache_arguments(kwargs, names):
    with pytest.raises(ValueError, match=names):
        build_cos_sin_cache(**{"rotary_dim": 16, "max_position": 64, **kwargs})


@pytest.mark.parametrize(
    ("kwargs", "names"),
    [
        ({"q": torch.zeros(2, 8)}, "q must have shape"),
        ({"q": torch.zeros(2, 3, 8, dtype=torch.int32)}, "q must be torch.float16"),
        ({"q": torch.zeros(2, 8, 3).transpose(1, 2)}, "q must be contiguous"),
        ({"k": torch.zeros(3, 1, 8)}, r"k must have shape \[2, K, 8\]"),
        ({"k": torch.zeros(2, 1, 6)}, r"k must have shape \[2, K, 8\]"),
        ({"positions": torch.zeros(2)}, "positions must be torch.int32"),
        ({"positions": torch.zeros(3, dtype=torch.int64)}, r"positions must have shape \[2\]"),
        ({"cos_sin_cache": torch.zeros(4, 10)}, "at most the head size 8, got 10"),
        ({"cos_sin_cache": torch.zeros(4, 5)}, "even number of columns"),
        ({"cos_sin_cache": torch.zeros(4, 8, device="meta")}, "cos_sin_cache must be on cpu"),
    ],
)
def test_bad_arguments(kwargs, names):
    good = {
        "q": torch.zeros(2, 3, 8),
        "k": torch.zeros(2, 1, 8),
        "positions": torch.zeros(2, dtype=torch.int64),
        "cos_sin_cache": torch.zeros(4, 8),
    }
    with pytest.raises(ValueError, match=names):
        apply_rope(**{**good, **kwargs})


def test_operator(device):
    """Registered well enough for torch.compile: schema, fake tensors and functionalisation."""
    q, k = torch.randn(3, 4, 8, device=device), torch.randn(3, 2, 8, device=device)
    positions = torch.tensor([1, 0, 5], device=device)
    cache = build_cos_sin_cache(8, 8, device=device)
    torch.library.opcheck(torch.ops.tritonllm.apply_rope.default, (q, k, positions, cache, False))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 64, 4096])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_size", "rotary", "interleaved"),
    [(32, 8, 128, 128, False), (14, 2, 64, 64, False), (32, 8, 128, 128, True), (32, 32, 80, 32, False)],
)
def test_real_shapes(device, dtype, tokens, heads, kv_heads, head_size, rotary, interleaved):
    q, k, _ = fused_qkv(tokens, heads, kv_heads, head_size, dtype, device)
    cache = build_cos_sin_cache(rotary, 131072, 500000.0, device=device)
    positions = torch.randint(0, 131072, (tokens,), device=device)
    expected = apply_rope_ref(q.float(), k.float(), positions, cache, interleaved=interleaved)
    apply_rope(q, k, positions, cache, interleaved=interleaved)
    assert_close(q, expected[0])
    assert_close(k, expected[1])


@pytest.mark.gpu
def test_offsets_beyond_int32(device):
    """2^31 elements and more: the last token is right."""
    tokens = 2**31 // (32 * 128) + 3
    q = torch.zeros(tokens, 32, 128, device=device, dtype=torch.bfloat16)
    k = torch.zeros(tokens, 1, 128, device=device, dtype=torch.bfloat16)
    q[-1].normal_()
    cache = build_cos_sin_cache(128, 64, device=device)
    positions = torch.full((tokens,), 63, device=device)
    expected, _ = apply_rope_ref(q[-1:].float(), k[-1:].float(), positions[-1:], cache)
    apply_rope(q, k, positions, cache)
    assert_close(q[-1:], expected)


@pytest.mark.gpu
def test_fullgraph_compile(device):
    """Slices of one projection: functionalisation must keep both writes."""
    cache = build_cos_sin_cache(16, 64, device=device)
    positions = torch.arange(8, device=device)

    def rotate(qkv):
        qkv = qkv * 2
        q, k = qkv[:, :64].view(8, 4, 16), qkv[:, 64:96].view(8, 2, 16)
        apply_rope(q, k, positions, cache)
        return qkv, q.sum(1), k + 1

    qkv = torch.randn(8, 128, device=device)
    for out, expected in zip(torch.compile(rotate, fullgraph=True)(qkv), rotate(qkv), strict=True):
        assert_close(out, expected)

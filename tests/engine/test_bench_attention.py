"""The attention benchmark without a GPU: cases, work, references, peers, the results file, and the table."""

import itertools
import json
import sys
import zlib
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend

from autotune.problem import make_sets
from autotune.verify import prepare, verify
from autotune.worker import Failed
from bench import attention, attention_cases, attention_peers, attention_runner
from bench.attention_cases import PRECISIONS, ROWS, SWEEP, Attention, ragged_lengths
from bench.attention_peers import PEERS, Peer
from bench.attention_runner import AttentionRunner, peer_timed
from tritonllm.kernels import varlen_prefill_attention_ref
from tritonllm.testing import relative_error

pytestmark = pytest.mark.long

CPU = torch.device("cpu")
TINY = [
    *(Attention(2, 1, 40, 4, 2, 16, precision=precision) for precision in PRECISIONS),
    Attention(3, 1, 40, 4, 2, 16, ragged=True),
    Attention(3, 1, 40, 4, 2, 16, ragged=True, precision="fp8 by head"),
    Attention(2, 20, 20, 4, 2, 16),
    Attention(2, 5, 17, 4, 1, 16, precision="fp16"),
    Attention(2, 5, 17, 4, 4, 16, precision="fp8"),
]
PLAIN = [problem for problem in TINY if PRECISIONS[problem.precision].scales is None]


def timer(call, sets):
    call(sets - 1)
    return 10.0


def names(problem):
    return problem.name


def test_rows_are_those_of_the_listed_peers():
    bf16 = [row for row in ROWS if row.precision == "bf16"]
    assert [row.size for row in bf16] == list(attention.LISTED)
    assert [row.group for row in bf16] == ["K1"] * 7 + ["K2"] * 5
    sizes = [(row.q_heads, row.kv_heads, row.head_size, row.block_size) for row in bf16]
    assert sizes == [*[(32, 8, 128, 16)] * 4, (32, 4, 128, 16), (16, 8, 128, 16), *[(32, 8, 128, 16)] * 6]
    for precision in PRECISIONS.keys() - {"bf16"}:
        assert [row.size for row in ROWS if row.precision == precision] == [row.size for row in bf16[:7]]
    assert [len(listed) for listed in attention.LISTED.values()] == [5] * 7 + [6, 6, 6, 6, 5]


def test_ragged_lengths_are_those_of_the_listed_peers():
    lengths = ragged_lengths(64, 8192)
    assert (lengths[:3], sum(lengths), zlib.crc32(repr(lengths).encode())) == ([2168, 2883, 2366], 267127, 812520322)
    (row,) = (row for row in ROWS if row.ragged and row.precision == "bf16")
    assert row.lengths() == lengths


def test_sweep_covers_the_grid():
    wide = [case for case in SWEEP if case.precision == "bf16"]
    decodes, prefills = ([case for case in wide if case.group == group] for group in ("K1", "K2"))
    assert {case.batch for case in decodes} == {2**n for n in range(9)} and len(decodes) == 81
    assert {case.length for case in decodes} == {2**n for n in range(7, 16)}
    assert {case.batch for case in prefills} == {2**n for n in range(7)}
    assert {case.new for case in prefills} == {2**n for n in range(6, 15)}
    assert max(case.batch * case.new for case in prefills) == 65536 and len(prefills) == 53
    narrow = [case for case in SWEEP if case.precision == "fp8"]
    assert {case.size for case in narrow} < {case.size for case in wide} and len(wide) + len(narrow) == len(SWEEP)
    assert sum(case.decode and case.length >= 1024 for case in narrow) == 8 * 6
    assert len(set(SWEEP)) == len(SWEEP)


@pytest.mark.parametrize(
    ("problem", "nbytes", "flops"),
    [
        # 2 sequences x 40 keys x 2 heads x 16 elements x (K, V) x 2 bytes, and q and out of 2 x 4 x 16 elements
        (Attention(2, 1, 40, 4, 2, 16), 10240 + 512, 4 * 80 * 4 * 16),
        (Attention(2, 1, 40, 4, 2, 16, precision="fp8"), 5120 + 512, 4 * 80 * 4 * 16),
        # 3 new over 5 cached: 3 x 5 + 9 / 2 pairs
        (Attention(1, 3, 8, 4, 2, 16), 1024 + 768, 4 * 19.5 * 4 * 16),
        # Llama-3.1-8B, 4096 keys: 1 GiB of keys and values
        (Attention(64, 1, 4096), 2**30 + 2**20, 2**32),
    ],
)
def test_work_by_hand(problem, nbytes, flops):
    assert problem.least_work().bytes == nbytes and problem.least_work().flops == flops


@pytest.mark.parametrize("problem", TINY, ids=names)
def test_ours_agrees_with_the_reference(problem):
    ready = prepare(problem, CPU)
    assert ready.expected[0].dtype == torch.float32
    assert verify(problem, ready.untouched, ready.expected).ok
    assert ready.untouched["k_cache"].dtype == PRECISIONS[problem.precision].cache
    scale = ready.untouched.get("v_scale")
    if problem.precision == "fp8 by head":
        assert scale.shape == (problem.kv_heads,) and len(set(scale.tolist())) == problem.kv_heads
    else:
        assert scale == (1 / 32 if problem.precision == "fp8" else None)


def test_reference_in_slices_is_the_same(monkeypatch):
    problem = Attention(2, 5, 17, 4, 2, 16)
    (x,) = make_sets(problem, CPU, 1)
    (whole,) = problem.reference(x)
    monkeypatch.setattr(attention_cases, "MAX_LOGITS", 2 * 4 * 17)  # two queries at a time
    (sliced,) = problem.reference(x)
    torch.testing.assert_close(sliced, whole, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("problem", PLAIN, ids=names)
def test_torch_agrees_with_the_reference(problem, monkeypatch):
    monkeypatch.setitem(PEERS, "math", Peer("torch", attention_peers.sdpa(SDPBackend.MATH), lambda problem: True))
    result = peer_timed("math", prepare(problem, CPU), timer)
    assert result["us"] == 10.0 and result["error"] < 5e-3


def test_torch_repeats_heads_for_a_backend_without_groups(monkeypatch):
    real = torch.nn.functional.scaled_dot_product_attention

    def no_groups(q, k, v, *, enable_gqa, **rest):
        if enable_gqa or q.shape[1] != k.shape[1]:
            raise RuntimeError("No available kernel. Aborting execution.")
        return real(q, k, v, **rest)

    monkeypatch.setattr(attention_peers.F, "scaled_dot_product_attention", no_groups)
    monkeypatch.setitem(PEERS, "math", Peer("torch", attention_peers.sdpa(SDPBackend.MATH), lambda problem: True))
    assert peer_timed("math", prepare(TINY[0], CPU), timer)["error"] < 5e-3


class FakeFlashInfer:
    """FlashInfer's two wrappers: what they are planned with decides what they compute."""

    def __init__(self, workspace, layout, use_tensor_cores=True):
        assert layout == "NHD" and workspace.dtype == torch.uint8

    def run(self, q, paged_kv_cache, *, out):
        counts = self.begins.diff()
        tables = torch.zeros(len(counts), int(counts.max()), dtype=torch.int32)
        for table, pages in zip(tables, self.indices.split(counts.tolist()), strict=True):
            table[: len(pages)] = pages
        lengths = (counts - 1) * self.page_size + self.last
        most = int(self.q_begins.diff().max())
        return varlen_prefill_attention_ref(
            q, *paged_kv_cache, tables, self.q_begins, lengths, max_seqlen_q=most, out=out
        )


class FakeDecode(FakeFlashInfer):
    def plan(self, indptr, indices, last_page_len, q_heads, kv_heads, head_dim, page_size, q_data_type, kv_data_type):
        self.begins, self.indices, self.last, self.page_size = indptr, indices, last_page_len, page_size
        self.q_begins = torch.arange(len(indptr), dtype=torch.int32)


class FakePrefill(FakeDecode):
    def plan(self, qo_indptr, *rest, causal, **dtypes):
        assert causal
        super().plan(*rest, **dtypes)
        self.q_begins = qo_indptr


def attend(q, k, v, tables, begins, lengths, most, out):
    return varlen_prefill_attention_ref(q, k, v, tables, begins, lengths, max_seqlen_q=most, out=out)


def plan(*, batch_size, cache_seqlens, cu_seqlens_q, causal, **rest):
    assert batch_size == len(cache_seqlens) == len(cu_seqlens_q) - 1 and causal
    assert rest.keys() == {
        *("max_seqlen_q", "max_seqlen_k", "num_heads_q", "num_heads_kv", "headdim", "qkv_dtype", "page_size")
    }
    return "plan"


def with_kvcache(q, k, v, *, cache_seqlens, page_table, cu_seqlens_q, max_seqlen_q, causal, scheduler_metadata):
    assert causal and scheduler_metadata == "plan"
    return attend(q, k, v, page_table, cu_seqlens_q, cache_seqlens, max_seqlen_q, None)


def varlen(*, q, k, v, cu_seqlens_q, max_seqlen_q, seqused_k, block_table, out, **rest):
    assert rest["causal"] and rest["softmax_scale"] == q.shape[-1] ** -0.5
    assert rest["max_seqlen_k"] >= int(seqused_k.max())
    assert rest.get("fa_version") == 3 or rest["softmax_segm_output"].shape[1:3] == (q.shape[1], 16)
    attend(q, k, v, block_table, cu_seqlens_q, seqused_k, max_seqlen_q, out)


@pytest.fixture
def fakes(monkeypatch):
    """The libraries' entry points, with the names of their arguments, over our reference."""
    fa3 = SimpleNamespace(get_scheduler_metadata=plan, flash_attn_with_kvcache=with_kvcache)
    vllm_fa3 = SimpleNamespace(get_scheduler_metadata=plan, flash_attn_varlen_func=varlen)
    flashinfer = SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=FakeDecode, BatchPrefillWithPagedKVCacheWrapper=FakePrefill
    )
    modules = {
        "flash_attn_interface": fa3,
        "vllm.vllm_flash_attn": vllm_fa3,
        "vllm.v1.attention.ops.triton_unified_attention": SimpleNamespace(unified_attention=varlen),
        "flashinfer": flashinfer,
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(attention_peers, "FLASHINFER_WORKSPACE", 16)


@pytest.mark.parametrize("problem", PLAIN, ids=names)
@pytest.mark.parametrize("name", ["FA3", "vLLM FA3", "vLLM Triton", "FlashInfer"])
def test_peers_are_called_with_the_problem(fakes, name, problem):
    assert PEERS[name].takes(problem)
    result = peer_timed(name, prepare(problem, CPU), timer)
    assert result["us"] == 10.0 and result["error"] < 5e-3


def test_a_wrong_or_missing_peer_has_no_time(monkeypatch):
    ready = prepare(TINY[0], CPU)
    with pytest.raises(Failed, match="ModuleNotFoundError: No module named 'flash_attn_interface'"):
        peer_timed("FA3", ready, timer)
    monkeypatch.setitem(PEERS, "zero", Peer("torch", lambda problem, sets: lambda i: (sets[i]["q"] * 0,), None))
    with pytest.raises(Failed, match=r"zero, output 0: error 1 > 0.01"):
        peer_timed("zero", ready, timer)


def test_installed_peers():
    found = attention_peers.installed()
    assert found["SDPA cuDNN"] == torch.__version__ and "FA3" not in found


def test_every_plain_row_has_torch_beside_it():
    for row in ROWS:
        torch_peers = [name for name, peer in PEERS.items() if peer.package == "torch" and peer.takes(row)]
        assert len(torch_peers) == (2 if row.precision in ("bf16", "fp16") else 0)


class Gpu:
    """The worker's calls, on the CPU and in this process."""

    def __init__(self, handler):
        self.runner = AttentionRunner(CPU, timer)

    def call(self, method, timeout, **args):
        fixed = {
            "machine": {"gpu": "NVIDIA Test", "driver": "1"},
            "ceilings": {"copy_gb_per_s": 4000.0, "matmul_tflop_per_s": 700.0},
            "memory_gb": 1.0,
        }
        return fixed[method] if method in fixed else getattr(self.runner, method)(**args)

    def close(self):
        pass


@pytest.fixture
def tiny(monkeypatch):
    """The whole benchmark at tiny sizes: three rows, a sweep of two, and two peers."""
    rows = [TINY[0], Attention(2, 20, 20, 4, 2, 16), TINY[2]]
    sweep = [Attention(1, 1, 32, 4, 2, 16), Attention(2, 8, 8, 4, 2, 16), Attention(2, 1, 2**20)]
    for module in (attention, attention_runner):
        monkeypatch.setattr(module, "CASES", [*rows, *sweep])
    monkeypatch.setattr(attention, "ROWS", rows)
    monkeypatch.setattr(attention, "SWEEP", sweep)
    monkeypatch.setattr(attention, "LISTED", {row.size: {"FA3": 20.0, "FA2": 30.0} for row in rows[:2]})
    peers = {
        "SDPA math": Peer("torch", attention_peers.sdpa(SDPBackend.MATH), lambda problem: True),
        "SDPA wrong": Peer("torch", lambda problem, sets: lambda i: (sets[i]["q"],), lambda problem: True),
        "FA3": Peer("flash_attn_interface", attention_peers.fa3, lambda problem: problem.precision == "bf16"),
    }
    for module in (attention, attention_peers, attention_runner):
        monkeypatch.setattr(module, "PEERS", peers)
    monkeypatch.setattr(attention, "installed", lambda: dict.fromkeys(peers, "1.0"))
    monkeypatch.setattr(attention, "Worker", Gpu)


@pytest.mark.smoke
def test_results_and_table(tiny, fakes, capsys, tmp_path):
    out = tmp_path / "new" / "results.json"
    assert attention.main(["--out", str(out)]) == 0
    report = json.loads(out.read_text())
    assert report.keys() == {"machine", "commit", "date", "ceilings", "peers", "rows", "sweep"}
    decode, prefill, fp8 = report["rows"]
    assert (decode["group"], decode["case"], decode["precision"]) == ("K1", "decode B2 H4/2 D16 L40", "bf16")
    assert decode["us"] == 10.0 and 0 < decode["error"] < 5e-3 and decode["bytes"] == 10752
    assert decode["percent"] == pytest.approx(100 * 10752 / 4e6 / 10, rel=1e-4)
    assert decode["peers"]["SDPA wrong"]["failed"].startswith("SDPA wrong, output 0: error")
    assert decode["peers"]["FA3"]["times_faster"] == 1.0
    assert (decode["torch"], decode["torch_us"], decode["times_faster_than_torch"]) == ("SDPA math", 10.0, 1.0)
    assert (decode["listed_best"], decode["times_faster_than_listed"]) == ("FA3", 2.0)
    assert prefill["new"] == prefill["length"] == 20
    assert fp8["of_bf16"] == 1.0 and "FA3" not in fp8["peers"] and "listed_us" not in fp8
    assert [(case["batch"], case["length"]) for case in report["sweep"]] == [(1, 32), (2, 8)]
    assert all("peers" not in case for case in report["sweep"])
    printed = capsys.readouterr().out
    for said in (
        *("K1 decode B2", "10.0 us", "1 GB/s", "SDPA math 10.0 1.00x", "FA3 10.0 1.00x", "listed FA3 20.0 2.00x"),
        *("1.00 of bf16's time", "1 of 3 sizes of the sweep need too much memory", "0 of our cases failed"),
    ):
        assert said in printed
    assert "SDPA wrong" not in printed


def test_quick_leaves_the_sweep_out(tiny, fakes, tmp_path):
    out = tmp_path / "results.json"
    assert attention.main(["--out", str(out), "--quick"]) == 0
    report = json.loads(out.read_text())
    assert len(report["rows"]) == 3 and report["sweep"] == []


@pytest.mark.smoke
def test_precisions_that_are_named_are_measured_alone(tiny, fakes, tmp_path, capsys):
    out = tmp_path / "results.json"
    assert attention.main(["--out", str(out), "--quick", "--precision", "fp8,bf16"]) == 0
    assert [row["precision"] for row in json.loads(out.read_text())["rows"]] == ["bf16", "bf16", "fp8"]
    assert attention.main(["--out", str(out), "--precision=fp8"]) == 0
    report = json.loads(out.read_text())
    assert [row["precision"] for row in report["rows"]] == ["fp8"] and report["sweep"] == []
    assert attention.main(["--out", str(out), "--group=K2"]) == 0
    assert {row["group"] for part in ("rows", "sweep") for row in json.loads(out.read_text())[part]} == {"K2"}
    with pytest.raises(SystemExit):
        attention.main(["--precision", "fp4"])
    assert "no such precision: fp4; there are bf16, fp16, fp8, fp8 by head" in capsys.readouterr().err


def test_a_wrong_result_has_no_number_and_the_exit_code_is_1(tiny, fakes, capsys, tmp_path, monkeypatch):
    right = Attention.run
    monkeypatch.setattr(Attention, "run", lambda self, x: (right(self, x)[0] * (1.02 if self.decode else 1),))
    out = tmp_path / "results.json"
    assert attention.main(["--out", str(out)]) == 1
    decode, prefill, fp8 = json.loads(out.read_text())["rows"]
    for row in (decode, fp8):
        assert row["failed"].startswith("tritonllm, output 0: error 0.02") and not row.keys() & {
            "us",
            "peers",
            "percent",
        }
    assert prefill["us"] == 10.0
    printed = capsys.readouterr().out
    assert "FAILED: tritonllm, output 0: error 0.02" in printed and "3 of our cases failed" in printed


def test_no_gpu(monkeypatch, capsys, tmp_path):
    class NoGpu(Gpu):
        def call(self, method, timeout, **args):
            raise Failed("the worker died (exit code 1): no CUDA GPUs are available")

    monkeypatch.setattr(attention, "Worker", NoGpu)
    assert attention.main(["--out", str(tmp_path / "results.json")]) == 1
    assert "no GPU to measure on: the worker died" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_list(capsys):
    assert attention.main(["--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(ROWS) + len(SWEEP)


def test_reference_against_plain_softmax():
    """Independent of the library: one sequence written out."""
    problem = Attention(1, 3, 5, 2, 1, 16)
    (x,) = make_sets(problem, CPU, 1)
    k, v = (x[name][0, :5, 0].float() for name in ("k_cache", "v_cache"))
    expected = torch.empty(3, 2, 16)
    for token, head in itertools.product(range(3), range(2)):
        seen = token + 3
        weights = (k[:seen] @ x["q"][token, head].float() / 4).softmax(-1)
        expected[token, head] = weights @ v[:seen]
    assert relative_error(problem.reference(x)[0], expected) < 1e-6

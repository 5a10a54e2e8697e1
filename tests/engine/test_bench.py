"""The kernel benchmarks without a GPU: cases and baselines at tiny sizes on the CPU path, and the results file."""

import json

import pytest
import torch

from autotune.ops.attention.copy_blocks import CopyBlocks
from autotune.ops.attention.paged_decode_attention import DecodeAttention
from autotune.ops.attention.qk_norm_rope_store import QkNormRopeStore
from autotune.ops.attention.store_kv import StoreKv
from autotune.ops.attention.varlen_prefill_attention import PrefillAttention
from autotune.ops.dense.linear import Product
from autotune.ops.elementwise.act_and_mul import GatedActivation
from autotune.ops.elementwise.apply_rope import Rope
from autotune.ops.elementwise.fused_add_rms_norm import AddRmsNorm
from autotune.ops.elementwise.rms_norm import HeadNorm, RmsNorm
from autotune.ops.elementwise.silu_and_mul_quantize import QuantizedActivation
from autotune.ops.moe.fused_moe import FusedMoe
from autotune.ops.moe.moe_route import Route
from autotune.ops.sampling.sample import MODES, FlatSampling, Sampling
from autotune.ops.speculative.rejection_judge import DRAFTS, RejectionSampling
from autotune.worker import Failed
from bench import baselines, kernels
from bench.cases import CASES, Case
from bench.logprobs import TokenLogprobs, log_softmax_and_topk
from bench.reports import GROUPS
from bench.runner import measure, rates

TINY = [
    Case("K1", DecodeAttention(2, 4, 2, 16, 40), baselines.sdpa_decode),
    Case("K1", DecodeAttention(3, 4, 2, 16, 40, ragged=True, capacity=64), None),
    Case("K2", PrefillAttention(2, 20, q_heads=4, kv_heads=2, head_size=16), baselines.sdpa_prefill),
    Case("K2", PrefillAttention(2, 5, cached=12, q_heads=4, kv_heads=2, head_size=16), baselines.sdpa_prefill),
    Case("K3", AddRmsNorm(3, 32), baselines.add_rms_norm),
    Case("K3", RmsNorm(3, 32), None),
    Case("K3", HeadNorm(3, 4, 2, 16), None),
    Case("K3", Rope(3, 4, 2, 16), baselines.rope),
    Case("K3", GatedActivation(3, 32), baselines.silu_and_mul),
    Case("K3", StoreKv(5, 2, 16, q_heads=4, blocks=8), baselines.index_put),
    Case("K3", StoreKv(1030, 1, 16, q_heads=1, blocks=70), baselines.index_put),
    Case("K3", CopyBlocks(3, 2, 16, blocks=8), None),
    Case("K3", QkNormRopeStore(5, 4, 2, 16, blocks=8), None),
    Case("K3", QkNormRopeStore(1030, 2, 1, 16, norm=False, blocks=70), None),
    Case("K3", QuantizedActivation(3, 32), None),
    Case("K4", FusedMoe(5, 4, 2, 32, 16), baselines.grouped_mm),
    Case("K4", Route(5, 8, 2), None),
    *(Case("K5", Sampling(3, (mode,), vocab=300), baselines.sort_and_sample, same_result=False) for mode in MODES),
    Case("K5", FlatSampling(3, MODES[1:2], vocab=300), baselines.sort_and_sample, same_result=False),
    Case("K5", TokenLogprobs(3, 4, vocab=300), log_softmax_and_topk),
    *(
        Case("K6", RejectionSampling(3, 2, draft, vocab=300), baselines.reject_and_sample, draft == "greedy")
        for draft in DRAFTS
    ),
    Case("K7", Product(3, 40, 32), baselines.linear),
    Case("K7", Product(3, 40, 32, norm=True, gated=True), baselines.linear),
    Case("K7", Product(3, 40, 32, residual=True), baselines.linear),
]


def timer(call, sets):
    for i in range(min(sets, 2)):
        call(i)
    return 10.0


@pytest.mark.parametrize("case", TINY, ids=lambda case: case.name)
def test_cases_and_baselines_run(case):
    result = measure(case, torch.device("cpu"), timer)
    assert result["us"] == 10.0 and result["error"] <= result["limit"] and result["bytes"] > 0
    assert result.get("torch_us") == (10.0 if case.baseline else None), result


def test_every_group_and_kind_of_case_is_covered():
    assert {case.group for case in CASES} == GROUPS.keys()
    assert {type(case.problem) for case in CASES} <= {type(case.problem) for case in TINY}
    assert len({case.name for case in CASES}) == len(CASES)


def test_wrong_result_has_no_time(monkeypatch):
    case = Case("K3", GatedActivation(3, 32), baselines.silu_and_mul)
    monkeypatch.setattr(GatedActivation, "run", lambda self, x: (x["x"][:, :32] * 1.02,))
    timed = []
    with pytest.raises(Failed, match=r"tritonllm, output 0: error .* > 0\.01"):
        measure(case, torch.device("cpu"), lambda call, sets: timed.append(sets))
    assert not timed


def test_wrong_baseline_has_no_time():
    case = Case("K3", GatedActivation(3, 32), lambda problem, sets: lambda i: (sets[i]["x"][:, :32],))
    result = measure(case, torch.device("cpu"), timer)
    assert result["us"] == 10.0 and "torch_us" not in result
    assert result["torch_failed"].startswith("torch, output 0: error")


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        ({"bytes": 4e6, "flops": 0}, {"floor_us": 1.0, "gb_per_s": 2000.0, "percent": 50.0}),
        ({"bytes": 4e3, "flops": 7e8}, {"floor_us": 1.0, "tflop_per_s": 350.0, "percent": 50.0}),
    ],
)
def test_rates(work, expected):
    result = rates({"us": 2.0, "torch_us": 3.0} | work, copy=4000.0, matmul=700.0)
    assert {name: result[name] for name in expected} == pytest.approx(expected)
    assert result["times_faster_than_torch"] == 1.5 and ("gb_per_s" in result) != ("tflop_per_s" in result)


class FakeGpu:
    def call(self, method, timeout, **args):
        if method == "machine":
            return {"gpu": "NVIDIA Test", "driver": "1"}
        if method == "ceilings":
            return {"copy_gb_per_s": 4000.0, "matmul_tflop_per_s": 700.0}
        case = CASES[args["case"]]
        if args["case"] == 1:
            raise Failed("error 0.5 > 0.01")
        result = {"group": case.group, "case": case.problem.name, "us": 2.0, "error": 1e-3, "limit": 1e-2}
        return result | {"bytes": 4e6, "flops": 0, "sets": 1, "torch_us": 3.0}

    def close(self):
        pass


def test_results_file(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(kernels, "Worker", lambda handler: FakeGpu())
    out = tmp_path / "new" / "results.json"
    assert kernels.main(["--only", "K1", "--out", str(out)]) == 1
    written = json.loads(out.read_text())
    assert {"machine", "commit", "date", "ceilings", "cases"} == written.keys()
    first, second, *rest = written["cases"]
    assert (first["us"], first["percent"], first["times_faster_than_torch"]) == (2.0, 50.0, 1.5)
    assert second["failed"] == "error 0.5 > 0.01" and "us" not in second
    assert {case["group"] for case in rest} == {"K1"} and len(rest) == 5
    printed = capsys.readouterr().out
    assert "50%" in printed and "FAILED: error 0.5 > 0.01" in printed and "6 of 7 cases" in printed


@pytest.mark.parametrize(
    ("argv", "says"), [(["--only", "K1,K9"], "got K9"), (["--only", ""], "got "), (["--no"], "--no")]
)
def test_bad_arguments(capsys, argv, says):
    with pytest.raises(SystemExit) as stopped:
        kernels.main(argv)
    assert stopped.value.code == 2
    assert says in capsys.readouterr().err


def test_list(capsys):
    assert kernels.main(["--list", "--only", "K6"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3

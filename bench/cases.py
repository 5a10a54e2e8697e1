"""The kernel benchmarks' cases, in groups K1 to K7: sizes of real models, each with the torch operation beside it.

Inputs are seeded by the case itself (:func:`autotune.problem.make_sets`), so they are the same in every run.
"""

from dataclasses import dataclass

from autotune.ops.attention.paged_decode_attention import DecodeAttention
from autotune.ops.attention.qk_norm_rope_store import QkNormRopeStore
from autotune.ops.attention.store_kv import StoreKv
from autotune.ops.attention.varlen_prefill_attention import PrefillAttention
from autotune.ops.dense.linear import LAYERS, Product
from autotune.ops.elementwise.act_and_mul import GatedActivation
from autotune.ops.elementwise.apply_rope import Rope
from autotune.ops.elementwise.fused_add_rms_norm import AddRmsNorm
from autotune.ops.elementwise.silu_and_mul_quantize import QuantizedActivation
from autotune.ops.moe.fused_moe import FusedMoe
from autotune.ops.sampling.sample import MODES, FlatSampling, Sampling
from autotune.ops.speculative.rejection_judge import DRAFTS, RejectionSampling
from autotune.problem import Problem
from bench import baselines
from bench.logprobs import TokenLogprobs, log_softmax_and_topk


@dataclass(frozen=True)
class Case:
    group: str
    problem: Problem
    baseline: baselines.Baseline | None  # None: torch has no such operation
    same_result: bool = True  # False: the baseline draws other random numbers, so only ours is compared

    @property
    def name(self) -> str:
        return f"{self.group} {self.problem.name}"


def _decode() -> list[Case]:
    sizes = [
        (1, 32, 8, 32768),
        (8, 32, 8, 8192),
        (64, 32, 8, 4096),
        (256, 32, 8, 1024),
        (64, 32, 4, 4096),
        (128, 16, 8, 2048),
    ]
    even = [DecodeAttention(batch, q, kv, 128, context) for batch, q, kv, context in sizes]
    ragged = DecodeAttention(64, 32, 8, 128, 8192, ragged=True)
    return [*(Case("K1", problem, baselines.sdpa_decode) for problem in even), Case("K1", ragged, None)]


def _prefill() -> list[Case]:
    sizes = [(1, 16384), (4, 4096), (16, 1024), (64, 256), (4, 1024, 7168)]
    return [Case("K2", PrefillAttention(*size), baselines.sdpa_prefill) for size in sizes]


def _memory_bound() -> list[Case]:
    tokens = (1, 64, 4096, 16384)
    return [
        *(Case("K3", AddRmsNorm(t, n), baselines.add_rms_norm) for n in (1024, 4096, 8192) for t in tokens),
        *(Case("K3", Rope(t, 32, 8, 128), baselines.rope) for t in tokens),
        *(Case("K3", GatedActivation(t, 14336), baselines.silu_and_mul) for t in tokens),
        *(Case("K3", StoreKv(t, 8, 128), baselines.index_put) for t in tokens),
        *(Case("K3", QkNormRopeStore(t, 16, 8, 128), None) for t in tokens),
        *(Case("K3", QkNormRopeStore(t, 32, 8, 128, norm=False), None) for t in tokens),
        *(Case("K3", QuantizedActivation(t, 14336), None) for t in tokens),
    ]


def _experts() -> list[Case]:
    shapes = ((128, 8, 2048, 768), (8, 2, 4096, 14336))
    tokens = (1, 16, 64, 256, 1024, 8192)
    return [Case("K4", FusedMoe(t, *shape), baselines.grouped_mm) for shape in shapes for t in tokens]


def _sampling() -> list[Case]:
    problems = [Sampling(batch, (mode,)) for mode in MODES for batch in (1, 16, 64, 256)]
    problems += [FlatSampling(batch, ("top_p",)) for batch in (1, 64, 256)]
    return [Case("K5", problem, baselines.sort_and_sample, same_result=False) for problem in problems]


def _logprobs() -> list[Case]:
    problems = [TokenLogprobs(rows, top) for rows in (1, 64, 256) for top in (0, 5, 20)]
    return [Case("K5", problem, log_softmax_and_topk) for problem in problems]


def _rejection() -> list[Case]:
    problems = [RejectionSampling(64, 4, draft) for draft in DRAFTS]
    return [Case("K6", p, baselines.reject_and_sample, same_result=p.draft == "greedy") for p in problems]


def _products() -> list[Case]:
    """Every tuned size, the two that are compared with other libraries (4096 and 14336 x 4096) among them."""
    problems = [Product(m, **layer) for layer in LAYERS for m in (1, 16, 64)]
    return [Case("K7", problem, baselines.linear) for problem in problems]


CASES = [
    *_decode(),
    *_prefill(),
    *_memory_bound(),
    *_experts(),
    *_sampling(),
    *_logprobs(),
    *_rejection(),
    *_products(),
]

"""The same operations in torch's own kernels: SDPA, grouped products, or a composite that torch.compile fuses.

A baseline takes a problem and its input sets, prepares what its kernels want outside the timing, and returns one call
on set ``i`` that gives what ``problem.run`` gives.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from autotune.ops.attention.paged_decode_attention import DecodeAttention
from autotune.ops.attention.store_kv import StoreKv
from autotune.ops.attention.varlen_prefill_attention import PrefillAttention
from autotune.ops.dense.linear import Product
from autotune.ops.elementwise.act_and_mul import GatedActivation
from autotune.ops.elementwise.apply_rope import Rope
from autotune.ops.elementwise.fused_add_rms_norm import AddRmsNorm
from autotune.ops.moe.fused_moe import FusedMoe
from autotune.ops.sampling.sample import Sampling
from autotune.ops.speculative.rejection_judge import RejectionSampling
from autotune.problem import Inputs

Call = Callable[[int], Sequence[torch.Tensor]]
Baseline = Callable[[Any, list[Inputs]], Call]


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True) if torch.cuda.is_available() else function


def _silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)


def silu_and_mul(problem: GatedActivation, sets: list[Inputs]) -> Call:
    return lambda i: (_compiled(_silu_and_mul)(sets[i]["x"]),)


def _add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> None:
    total = (x.float() + residual.float()).to(residual.dtype)
    residual.copy_(total)
    total = total.float()
    x.copy_(total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-6) * weight)


def add_rms_norm(problem: AddRmsNorm, sets: list[Inputs]) -> Call:
    def call(i: int) -> Sequence[torch.Tensor]:
        x = sets[i]
        _compiled(_add_rms_norm)(x["x"], x["residual"], x["weight"])
        return x["x"], x["residual"]

    return call


def _rope(qkv: torch.Tensor, heads: int, positions: torch.Tensor, cos_sin: torch.Tensor) -> None:
    cos, sin = cos_sin[positions][:, None].float().chunk(2, dim=-1)
    turned = qkv.view(len(qkv), -1, cos_sin.shape[1])[:, :heads]
    a, b = turned.float().chunk(2, dim=-1)
    turned.copy_(torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1))


def rope(problem: Rope, sets: list[Inputs]) -> Call:
    def call(i: int) -> Sequence[torch.Tensor]:
        x = sets[i]
        _compiled(_rope)(x["qkv"], problem.q_heads + problem.kv_heads, x["positions"], x["cos_sin"])
        return (x["qkv"],)

    return call


def index_put(problem: StoreKv, sets: list[Inputs]) -> Call:
    def call(i: int) -> Sequence[torch.Tensor]:
        x = sets[i]
        _, k, v = x["qkv"].split((problem.q_heads, problem.kv_heads, problem.kv_heads), dim=1)
        x["k_cache"].flatten(0, 1)[x["slots"]] = k
        x["v_cache"].flatten(0, 1)[x["slots"]] = v
        return x["k_cache"], x["v_cache"]

    return call


def _contiguous(x: Inputs, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values ``[B, K, L, D]`` out of the paged cache: what torch's attention reads."""
    k, v = (x[name][x["block_tables"]].flatten(1, 2)[:, :length] for name in ("k_cache", "v_cache"))
    return k.transpose(1, 2), v.transpose(1, 2)


def sdpa_decode(problem: DecodeAttention, sets: list[Inputs]) -> Call:
    caches = [_contiguous(x, problem.context) for x in sets]

    def call(i: int) -> Sequence[torch.Tensor]:
        k, v = caches[i]
        return (F.scaled_dot_product_attention(sets[i]["q"][:, :, None], k, v, enable_gqa=True)[:, :, 0],)

    return call


def sdpa_prefill(problem: PrefillAttention, sets: list[Inputs]) -> Call:
    length = problem.cached + problem.new
    caches = [_contiguous(x, length) for x in sets]
    mask = causal_lower_right(problem.new, length)  # SDPA's own mask if nothing is cached

    def call(i: int) -> Sequence[torch.Tensor]:
        k, v = caches[i]
        q = sets[i]["q"].unflatten(0, (problem.batch, problem.new)).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return (out.transpose(1, 2).flatten(0, 1),)

    return call


def _combine(y: torch.Tensor, inverse: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (y[inverse].unflatten(0, weights.shape).float() * weights[..., None]).sum(1).to(y.dtype)


def grouped_mm(problem: FusedMoe, sets: list[Inputs]) -> Call:
    experts = torch.arange(problem.experts, dtype=torch.int32, device=sets[0]["ids"].device)

    def call(i: int) -> Sequence[torch.Tensor]:
        x = sets[i]
        by_expert, order = x["ids"].flatten().sort()
        ends = torch.searchsorted(by_expert, experts, right=True, out_int32=True)
        h = F.grouped_mm(x["x"][order // problem.top_k], x["w_gate_up"].transpose(1, 2), offs=ends)
        y = F.grouped_mm(_compiled(_silu_and_mul)(h), x["w_down"].transpose(1, 2), offs=ends)
        return (_compiled(_combine)(y, order.argsort(), x["weights"]),)

    return call


def _gumbel_argmax(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    return (logits / temperature[:, None] - (-torch.rand_like(logits).log()).log()).argmax(-1)


def _pick(weights: torch.Tensor) -> torch.Tensor:
    """One column for each row, with probability in proportion to its weight: the winner of an exponential race."""
    return (weights / torch.empty_like(weights).exponential_()).argmax(-1)


def sort_and_sample(problem: Sampling, sets: list[Inputs]) -> Call:
    """Draws noise of its own, so its tokens cannot be compared."""
    (mode,) = problem.modes

    def call(i: int) -> Sequence[torch.Tensor]:
        x = sets[i]
        if mode == "temperature":
            return (_compiled(_gumbel_argmax)(x["logits"], x["temperature"]),)
        logits = x["logits"] / x["temperature"][:, None]
        best, ids = logits.topk(50, dim=-1) if "top_k" in mode else logits.sort(dim=-1, descending=True)
        probs = best.softmax(-1)
        kept = probs.masked_fill(probs.cumsum(-1) - probs >= x["top_p"][:, None], 0.0)
        return (ids.gather(1, _pick(kept)[:, None])[:, 0],)

    return call


def reject_and_sample(problem: RejectionSampling, sets: list[Inputs]) -> Call:
    """Draws noise of its own, so its tokens cannot be compared (but under temperature 0)."""

    def call(i: int) -> Sequence[torch.Tensor]:
        x = sets[i]
        logits, draft, q = x["target_logits"], x["draft_ids"], x["draft_probs"]
        if problem.draft == "greedy":
            choice = logits.argmax(-1)
            accepted = choice[:, :-1] == draft
        else:
            p = (logits / x["temperature"][:, None, None]).softmax(-1)
            p_draft = p[:, :-1].gather(2, draft[..., None])[..., 0]
            q_draft = torch.ones_like(p_draft) if q is None else q.gather(2, draft[..., None])[..., 0]
            left = p[:, :-1].scatter(2, draft[..., None], 0.0) if q is None else (p[:, :-1] - q).clamp_min(0)
            accepted = torch.rand_like(p_draft) * q_draft < p_draft
        at = accepted.long().cumprod(-1).sum(-1, keepdim=True)
        if problem.draft != "greedy":
            rows = torch.cat((left, p[:, -1:]), dim=1).gather(1, at[..., None].expand(-1, 1, problem.vocab))[:, 0]
            choice = _pick(rows)[:, None].expand(-1, problem.drafts + 1)
        position = torch.arange(problem.drafts + 1, device=logits.device)
        ids = torch.where(position < at, F.pad(draft, (0, 1)), torch.where(position == at, choice, -1))
        return ids, at[:, 0]

    return call


def _rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = x.float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6) * weight).to(x.dtype)


def linear(problem: Product, sets: list[Inputs]) -> Call:
    """cuBLAS; what our product fuses in kernels of their own."""

    def call(i: int) -> Sequence[torch.Tensor]:
        x = sets[i]
        h = _compiled(_rms_norm)(x["x"], x["norm_weight"]) if problem.norm else x["x"]
        if problem.logits:
            return (torch.mm(h, x["weight"].t(), out_dtype=torch.float32),)
        y = F.linear(h, x["weight"])
        if problem.gated:
            y = _compiled(_silu_and_mul)(y)
        return (x["residual"].add_(y) if problem.residual else y,)

    return call

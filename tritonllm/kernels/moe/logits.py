"""Mixture of experts: the router's logits of a token or two, with the norm before.

What the router reads of a layer is little (0.5 MB for Qwen3-30B-A3B), but the experts' weights cannot be asked for
before it has chosen, so its time is latency: one launch that normalises and multiplies. The weights are on their way
before the kernel before has ended (`dependent_launch`). The first program stores the normalised row, for the experts.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tritonllm.kernels.dense import Weight, elements, load_tile, tile_at
from tritonllm.kernels.elementwise import rms_norm
from tritonllm.kernels.runtime import tuning
from tritonllm.kernels.runtime.checks import check_same_dtype, check_tensor
from tritonllm.kernels.runtime.dependent_launch import dependent_launch, let_next_start, wait_for_previous
from tritonllm.kernels.runtime.registry import register_op, with_reference


@triton.jit
def _router_kernel(
    x_ptr,  # [T, K]
    norm_ptr,  # [K]
    weight_ptr,  # [E, K]
    bias_ptr,  # [E] or None
    logits_ptr,  # [T, E] float32
    normed_ptr,  # [T, K]
    eps,
    norm_offset,
    E,
    stride_x,
    stride_weight,
    K: tl.constexpr,
    EARLY: tl.constexpr,  # no kernel in flight writes the weights
    PDL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    let_next_start(PDL)
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    token = tl.program_id(0).to(tl.int64)  # the first axis: the others end at 65,535
    b_expert = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.broadcast_to(tl.arange(0, BLOCK_K)[None, :], (BLOCK_N, BLOCK_K))
    p_weight = tile_at(weight_ptr, tl.minimum(b_expert, E - 1), k, stride_weight)
    if not EARLY:
        wait_for_previous(PDL)
    weights = ()  # type: tuple
    norms = ()  # type: tuple
    for step in tl.static_range(STEPS):
        m_k = step * BLOCK_K + k < K
        weights += (load_tile(p_weight, step * BLOCK_K, m_k, ""),)
        norms += (tl.load(norm_ptr + step * BLOCK_K + k, mask=m_k, other=0.0),)
    if EARLY:
        wait_for_previous(PDL)
    xs = ()  # type: tuple
    b_sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    b_squares = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for step in tl.static_range(STEPS):
        m_k = step * BLOCK_K + k < K
        b_x = tl.load(x_ptr + token * stride_x + step * BLOCK_K + k, mask=m_k, other=0.0).to(tl.float32)
        b_squares += b_x * b_x
        b_x *= norms[step].to(tl.float32) + norm_offset
        b_sums += weights[step].to(tl.float32) * b_x
        xs += (b_x,)
    b_factor = tl.rsqrt(tl.sum(b_squares, axis=1) / K + eps)
    b_y = tl.sum(b_sums, axis=1) * b_factor
    if bias_ptr is not None:
        b_y += tl.load(bias_ptr + b_expert, mask=b_expert < E, other=0.0).to(tl.float32)
    tl.store(logits_ptr + token * E + b_expert, b_y, mask=b_expert < E)
    if tl.program_id(1) == 0:
        m_first = tl.arange(0, BLOCK_N)[:, None] == 0
        for step in tl.static_range(STEPS):
            b_normed = (xs[step] * b_factor[:, None]).to(normed_ptr.dtype.element_ty)
            at = step * BLOCK_K + k
            tl.store(normed_ptr + token * K + at, b_normed, mask=m_first & (at < K))


def default_config(experts: int, k: int) -> tuning.Config:
    """A program for an expert or two, so that nothing but latency is left, and 16 elements a thread."""
    block = min(4096, triton.next_power_of_2(k))
    rows = max(1, experts // 128)
    return {"BLOCK_N": rows, "BLOCK_K": block, "num_warps": max(1, min(8, rows * block // 512))}


class RouterOperands(NamedTuple):
    """What the operator reads and writes; see :func:`moe_logits`."""

    x: torch.Tensor
    norm_weight: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    logits: torch.Tensor
    normed: torch.Tensor
    eps: float
    norm_offset: float
    constant_weight: bool


def _reference(router: RouterOperands) -> None:
    x, norm_weight, weight, bias, logits, normed, eps, norm_offset, _ = router
    y = rms_norm(x.float(), norm_weight, eps, weight_offset=norm_offset)
    normed.copy_(y)
    torch.matmul(y, weight.float().T, out=logits)
    if bias is not None:
        logits += bias


@register_op(mutates=("logits", "normed"), reference=_reference)
def _moe_logits(router: RouterOperands) -> None:
    x, norm_weight, weight, bias, logits, normed, eps, norm_offset, constant_weight = router
    (tokens, k), experts = x.shape, weight.shape[0]
    if tokens == 0:
        return
    config = tuning.get_config("moe_logits", x.device, default_config, experts=experts, k=k)
    _router_kernel[(tokens, triton.cdiv(experts, config["BLOCK_N"]))](
        *(x, norm_weight, weight, bias, logits, normed, eps, norm_offset, experts, x.stride(0), weight.stride(0)),
        **dependent_launch(x.device),
        K=k,
        EARLY=constant_weight,
        **config,
    )


def moe_logits(
    x: torch.Tensor,
    weight: torch.Tensor | Weight,
    norm_weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm_eps: float = 1e-6,
    norm_weight_offset: float = 0.0,
    constant_weight: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A router's logits, ``rms_norm(x) @ weight.T + bias``, and ``rms_norm(x)``, in one launch; for a few tokens.

    Both are computed in float32; the logits are not rounded: two experts that bfloat16 takes for equal would be chosen
    by their number.

    Args:
        x: ``[T, K]`` float16, bfloat16 or float32; contiguous in the last dimension.
        weight: ``[E, K]`` of the dtype of ``x``, a row for each expert: a tensor or a :class:`Weight`.
        norm_weight: ``[K]`` of a float dtype.
        bias: ``[E]`` of a float dtype.
        norm_eps: added to the mean square.
        norm_weight_offset: added to ``norm_weight``, in float32.
        constant_weight: no kernel that may still run writes ``weight`` or ``norm_weight`` (true while a model is
            served): they are read before the kernel before this one ends.

    Returns:
        ``(logits, normed)``: ``[T, E]`` float32 for :func:`moe_route`, and ``[T, K]`` of the dtype of ``x`` for
        :func:`fused_moe`.

    Raises:
        ValueError: a wrong shape, dtype or device.
    """
    weight = elements("weight", weight)
    check_tensor("x", x, ("T", "K"))
    tokens, k = x.shape
    check_tensor("weight", weight, ("E", k), like=x)
    check_same_dtype("weight", weight, "x", x)
    check_tensor("norm_weight", norm_weight, (k,), like=x)
    if bias is not None:
        check_tensor("bias", bias, (weight.shape[0],), like=x)
    logits = torch.empty(tokens, weight.shape[0], dtype=torch.float32, device=x.device)
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _moe_logits(x, norm_weight, weight, bias, logits, normed, norm_eps, norm_weight_offset, constant_weight)
    return logits, normed


moe_logits_ref = with_reference(moe_logits)

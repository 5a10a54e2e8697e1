"""Mixture of experts, second half: the experts' gated MLPs, and each token's weighted sum of them.

Three ways; the configuration's ``kernel`` says which (``FUSED_MOE`` of :mod:`tritonllm.kernels.moe.tiles`):

- ``direct`` (:mod:`tritonllm.kernels.moe.portable.direct`), for a token or two: no grouping, a program for some columns
  of one pair (token, expert), and of one token for the second product and the sum;
- ``sm90`` (:mod:`tritonllm.kernels.moe.sm90.products`), for many pairs an expert on Hopper, and
- ``portable`` (:mod:`tritonllm.kernels.moe.portable.products`): pairs ordered by expert
  (:mod:`tritonllm.kernels.moe.grouping`), two grouped products, and a last kernel that adds the ``k`` weighted rows of
  a token in float32, in the order of the choices, so results do not depend on timing.

The floor is reading the weights of the experts that were hit (``3 I N`` elements each; all 128 experts of 768 x 2048
in bfloat16 are 1.2 GB, 250 us at 4.8 TB/s) or, from some hundred tokens an expert, ``6 T k I N`` operations. The gated
activation and the rows of the second product are rounded to the dtype of ``x``; all sums are float32.
"""

import functools

import torch
import triton
import triton.language as tl

from tritonllm.kernels.dense import (
    NARROW,
    Groups,
    Scaled,
    Weight,
    check_narrow,
    elements,
    format_of,
    narrow_key,
    row_by_row,
    widen_numbers,
)
from tritonllm.kernels.elementwise import GATED_ACTIVATIONS, NormOptions, check_affine, gated_reference
from tritonllm.kernels.moe.arguments import ExpertChoice, Experts, Result, map_size
from tritonllm.kernels.moe.grouping import expert_of_pairs, group_by_expert
from tritonllm.kernels.moe.portable import direct, products
from tritonllm.kernels.moe.tiles import FUSED_MOE, config_key, eviction_policy, invariant_config, narrow_config
from tritonllm.kernels.runtime import tuning
from tritonllm.kernels.runtime.checks import check_same_dtype, check_scaled, check_tensor, require
from tritonllm.kernels.runtime.chip import processors
from tritonllm.kernels.runtime.dependent_launch import dependent_launch, let_next_start, wait_for_previous
from tritonllm.kernels.runtime.registry import OPS, register_op, with_reference

MAX_NORMED = 8192  # columns of a token that the last kernel normalises, too, by one program for all of them


@triton.jit
def _sum_kernel(
    y_ptr,  # [T * TOP_K, N]
    weights_ptr,  # [T, TOP_K]
    ids_ptr,
    map_ptr,
    out_ptr,  # [T, N]; read too if ADD
    norm_ptr,  # [N], or None: no norm of what is in out_ptr then
    normed_ptr,  # [T, N]
    scale,
    eps,
    norm_offset,
    N,
    experts,
    num_ids,
    stride_weights,
    stride_ids,
    stride_out,
    TOP_K: tl.constexpr,
    MAP_ROWS: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK: tl.constexpr,  # columns of a program: with a norm all of them
):
    wait_for_previous(PDL)
    let_next_start(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_column = column < N
    if norm_ptr is not None:
        b_weight = tl.load(norm_ptr + column, mask=m_column, other=0.0).to(tl.float32) + norm_offset
    b_sum = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOP_K):
        pair = token * TOP_K + j
        # a pair without an expert here was never written
        here = expert_of_pairs(ids_ptr, map_ptr, pair, pair + 1, experts, num_ids, stride_ids, TOP_K, MAP_ROWS) >= 0
        weight = tl.load(weights_ptr + token * stride_weights + j, mask=here, other=0.0).to(tl.float32)
        b_sum += tl.load(y_ptr + pair * N + column, mask=m_column & here, other=0.0).to(tl.float32) * weight
    p_out = out_ptr + token * stride_out + column
    if ADD:
        b_sum = tl.load(p_out, mask=m_column, other=0.0).to(tl.float32) + b_sum * scale
    tl.store(p_out, b_sum.to(out_ptr.dtype.element_ty), mask=m_column)
    if norm_ptr is not None:
        b_normed = b_sum * tl.rsqrt(tl.sum(b_sum * b_sum, 0) / N + eps) * b_weight
        tl.store(normed_ptr + token * N + column, b_normed.to(normed_ptr.dtype.element_ty), mask=m_column)


def _wide(weight: torch.Tensor, scaled: Scaled, expert: int) -> torch.Tensor:
    """An expert's weight in float32."""
    if scaled.scales is None:
        return weight[expert].float()
    zeros, row_scales = (None if part is None else part[expert] for part in (scaled.zeros, scaled.row_scales))
    of_one = scaled._replace(scales=scaled.scales[expert], zeros=zeros, row_scales=row_scales)
    return widen_numbers(weight[expert], of_one, torch.float32)


def _one_expert(rows: torch.Tensor, experts: Experts, expert: int) -> torch.Tensor:
    """``rows[R, N]`` -> ``[R, N]`` in float32."""
    gate_up = rows.float() @ _wide(experts.w_gate_up, experts.scaled_gate_up, expert).T
    if experts.gate_up_bias is not None:
        gate_up += experts.gate_up_bias[expert]
    row = gated_reference(gate_up, experts.activation) @ _wide(experts.w_down, experts.scaled_down, expert).T
    return row if experts.down_bias is None else row + experts.down_bias[expert]


def _reference(x: torch.Tensor, experts: Experts, choice: ExpertChoice, result: Result, batch_invariant: bool) -> None:
    weights, ids, expert_map = choice
    local = ids
    if expert_map is not None:
        map_rows, num_ids = map_size(expert_map, 0)
        known = (ids >= 0) & (ids < num_ids)
        row = torch.arange(len(ids), device=ids.device)[:, None] % map_rows
        local = expert_map.view(map_rows, num_ids)[row, ids.where(known, 0)].where(known, -1)
    y = x.new_zeros((*ids.shape, x.shape[1]), dtype=torch.float32)
    for expert in local.unique().tolist():
        if 0 <= expert < len(experts.w_down):
            token, place = (local == expert).nonzero(as_tuple=True)
            compute = functools.partial(_one_expert, experts=experts, expert=expert)
            if batch_invariant:
                row = x.new_empty((len(token), x.shape[1]), dtype=torch.float32)
                row_by_row(compute, x[token], row)
            else:
                row = compute(x[token])
            y[token, place] = row * weights[token, place, None]
    out = result.out
    out.copy_(torch.add(out.float(), y.sum(1), alpha=result.scale) if result.add else y.sum(1))
    normalise(result, batch_invariant)


def _launch_products(x: torch.Tensor, experts: Experts, choice: ExpertChoice, config: tuning.Config) -> torch.Tensor:
    """The row of each pair that has an expert: ``y [T * k, N]``."""
    ids, expert_map = choice.ids, choice.expert_map
    (pairs, top_k), (num_experts, n, i) = (ids.numel(), ids.shape[1]), experts.sizes()
    h = torch.empty((pairs, i), dtype=x.dtype, device=x.device)
    y = torch.empty((pairs, n), dtype=x.dtype, device=x.device)
    keep_h, keep_y = eviction_policy(h, top_k), eviction_policy(y, top_k)
    config = dict(config)
    if config.pop("kernel") == "sm90":
        sm90 = FUSED_MOE.named["sm90"].module
        blocks = group_by_expert(ids, num_experts, config["PAIRS"] + config["TAIL"], expert_map, unit=sm90.UNIT)
        programs = processors(x.device)
        sm90.launch_gate_up(x, experts, h, blocks, top_k, keep_h, programs, config)
        sm90.launch_down(h, experts, y, blocks, keep_y, programs, config)
    else:
        blocks = group_by_expert(ids, num_experts, config["BLOCK_M"], expert_map)
        products.launch_gate_up(x, experts, h, blocks, top_k, keep_h, config)
        products.launch_down(h, experts, y, blocks, keep_y, config)
    return y


@register_op(mutates=("out", "normed"), reference=_reference)
def _fused_moe(x: torch.Tensor, experts: Experts, choice: ExpertChoice, result: Result, batch_invariant: bool) -> None:
    weights, ids, expert_map = choice
    tokens, top_k = ids.shape
    if tokens == 0:
        return
    num_experts, n, _ = experts.sizes()
    map_rows, num_ids = map_size(expert_map, num_experts)
    key = config_key(x, experts, top_k, num_ids)
    if batch_invariant:
        config = invariant_config(**key)
    elif experts.narrow:
        more = narrow_key(experts.w_down, experts.scaled_down)
        config = tuning.get_config("fused_moe_narrow", x.device, narrow_config, **key, **more)
    else:
        config = tuning.get_config("fused_moe", x.device, FUSED_MOE.default_config, **key)
    if config["kernel"] == "direct":
        direct.launch(x, experts, choice, result)
    else:
        y = _launch_products(x, experts, choice, config)
        out, add, scale, normed, norm_weight, eps, norm_offset = result
        norm = (norm_weight, normed) if n <= MAX_NORMED else (None, None)
        block = triton.next_power_of_2(n)
        block = min(1024, block) if norm[0] is None else block
        parts = triton.cdiv(n, block)
        _sum_kernel[(tokens, parts)](
            *(y, weights, ids, ids if expert_map is None else expert_map, out, *norm, scale, eps, norm_offset),
            *(n, num_experts, num_ids, weights.stride(0), ids.stride(0), out.stride(0)),
            **dependent_launch(x.device, tokens * parts),
            TOP_K=top_k,
            MAP_ROWS=map_rows,
            ADD=add,
            BLOCK=block,
            num_warps=max(1, block // 256),
        )
    if config["kernel"] == "direct" or n > MAX_NORMED:
        normalise(result, batch_invariant)


def normalise(result: Result, batch_invariant: bool = False) -> None:
    """The norm of what is written, if it is asked for, in a launch of its own."""
    if result.normed is not None:
        norm = NormOptions(result.norm_weight, None, result.norm_eps, result.norm_offset, False, batch_invariant)
        OPS["norm"](result.out, None, result.normed, None, 1.0, *norm)


def make_experts(
    w_gate_up: torch.Tensor | Weight,
    w_down: torch.Tensor | Weight,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    activation: str,
) -> Experts:
    """What operators take.

    Raises:
        ValueError: one weight is narrow and the other is not of its format and groups; a format that is neither plain
            nor narrow.
    """
    both = [w if isinstance(w, Weight) else Weight(w) for w in (w_gate_up, w_down)]
    if not any(w.format in NARROW for w in both):
        weights = elements("w_gate_up", w_gate_up), elements("w_down", w_down)
        return Experts(*weights, gate_up_bias, down_bias, activation)
    up, down = both
    same = up.format == down.format and up.groups == down.groups
    require(same, f"w_down must have the format and groups of w_gate_up, {up.format!r} and {up.groups}")
    for name, w in (("w_gate_up", up), ("w_down", down)):
        require(w.scales is not None, f"{name}.scales must be there for the format {w.format!r}")
    of_both = up.scales, down.scales, up.zeros, down.zeros, up.row_scales, down.row_scales
    return Experts(up.data, down.data, gate_up_bias, down_bias, activation, *of_both, *up.groups)


def check_experts(x: torch.Tensor, experts: Experts, residual: torch.Tensor | None) -> None:
    """All but the choice."""
    w_gate_up, w_down, gate_up_bias, down_bias, activation = experts[:5]
    require(
        activation in GATED_ACTIVATIONS, f"activation must be one of {', '.join(GATED_ACTIVATIONS)}, got {activation!r}"
    )
    check_tensor("x", x, ("T", "N"))
    n = x.shape[1]
    if experts.gate_up_scales is not None:
        format = format_of(w_gate_up, experts.gate_up_scales)
        groups = Groups(experts.group_rows, experts.group_columns)
        for name, weight, scaled, k in (
            ("w_gate_up", w_gate_up, experts.scaled_gate_up, n),
            ("w_down", w_down, experts.scaled_down, experts.sizes()[2]),
        ):
            of = Weight(weight, scaled.scales, format, groups, scaled.zeros, scaled.row_scales)
            check_narrow(name, of, k, x, stacked=True)
        count, rows, _ = w_gate_up.shape
        i = rows // 2
        require(rows % 2 == 0, f"w_gate_up must have an even number of rows (gate, then up), got {rows}")
        fits = w_down.shape[:2] == (count, n)
        require(fits, f"w_down must have shape [{count}, {n}, {i}], got {list(w_down.shape)}")
    else:
        check_tensor("w_down", w_down, ("E", n, "I"), like=x)
        count, _, i = w_down.shape
        check_tensor("w_gate_up", w_gate_up, (count, 2 * i, n), like=x)
        check_same_dtype("w_gate_up", w_gate_up, "x", x)
        check_same_dtype("w_down", w_down, "x", x)
    require(w_down.numel() > 0, f"w_down must not be empty, got shape {list(w_down.shape)}")
    if gate_up_bias is not None:
        check_tensor("gate_up_bias", gate_up_bias, (count, 2 * i), like=x)
    if down_bias is not None:
        check_tensor("down_bias", down_bias, (count, n), like=x)
    if residual is not None:
        check_tensor("residual", residual, x.shape, like=x)
        check_same_dtype("residual", residual, "x", x)


def make_result(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    scale: float,
    weight: torch.Tensor | None,
    eps: float,
    offset: float,
    out: torch.Tensor | None = None,
) -> Result:
    """What is written: ``residual``, ``out`` (checked here) or a new tensor, and its norm if ``weight`` (checked here)
    asks for it."""
    if out is not None:
        require(residual is None, "out must not come together with residual, which the result is added to")
        check_tensor("out", out, x.shape, dtype=x.dtype, like=x)
        require(out.is_contiguous(), f"out must be contiguous, got strides {tuple(out.stride())}")
    elif residual is None:
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    else:
        out = residual
    normed = None
    if weight is not None:
        check_affine("norm_weight", weight, x)
        normed = torch.empty_like(x, memory_format=torch.contiguous_format)
    return Result(out, residual is not None, scale, normed, weight, eps, offset)


def check_map(x: torch.Tensor, expert_map: torch.Tensor | None, batch_invariant: bool) -> None:
    if expert_map is None:
        return
    shape = ("experts",) if expert_map.dim() == 1 else ("rows", "experts")
    check_tensor("expert_map", expert_map, shape, dtype=torch.int32, like=x)
    rows, _ = map_size(expert_map, 0)
    require(expert_map.is_contiguous(), "expert_map must be contiguous")
    require(rows > 0, f"expert_map must have at least one row, got shape {list(expert_map.shape)}")
    require(
        rows == 1 or not batch_invariant,
        f"expert_map must have one row with batch_invariant: with {rows}, a token's place in the batch decides which "
        "expert computes it",
    )


def _check_choice(x: torch.Tensor, choice: ExpertChoice, batch_invariant: bool) -> None:
    weights, ids, expert_map = choice
    check_tensor("ids", ids, (len(x), "k"), dtype=(torch.int32, torch.int64), like=x)
    require(ids.shape[1] > 0, "ids must have at least one expert for each token, got none")
    # without the number: to write it down would make it a constant of a compiled graph
    require(ids.numel() < 2**31, "ids must have fewer than 2^31 elements: split the tokens")
    check_tensor("weights", weights, ids.shape, like=x)
    check_map(x, expert_map, batch_invariant)


def fused_moe(
    x: torch.Tensor,
    w_gate_up: torch.Tensor | Weight,
    w_down: torch.Tensor | Weight,
    weights: torch.Tensor,
    ids: torch.Tensor,
    *,
    activation: str = "silu",
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    scale: float = 1.0,
    norm_weight: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    norm_weight_offset: float = 0.0,
    batch_invariant: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The weighted sum over each token's experts of ``(act(x @ gate.T) * (x @ up.T)) @ down.T``, biases included.

    Only the weights of experts that were hit are read. An id out of range has no expert and adds nothing, so padding
    tokens may carry -1.

    Args:
        x: ``[T, N]`` float16, bfloat16 or float32; contiguous in the last dimension, as all arguments.
        w_gate_up: ``[E, 2I, N]`` of the dtype of ``x``: the gate projection's rows, then the up projection's. A tensor
            or a :class:`Weight`, which may be ``"fp8"``, ``"int8"``, ``"int4"`` or ``"fp4"``, too: its data
            ``[E, 2I, N]``, or ``[E, 2I, N / 2]`` of four bits, and its scales ``[E, *groups.shape(2I, N)]``; then
            ``w_down`` is as well.
        w_down: ``[E, N, I]`` of the dtype of ``x``, as ``w_gate_up``.
        weights: ``[T, k]`` of a float dtype, usually from :func:`moe_route`.
        ids: ``[T, k]`` int32 or int64 experts of each token.
        activation: ``"silu"``, ``"gelu"`` (erf), ``"gelu_tanh"``, or ``"swigluoai"`` (GPT-OSS): with the gate limited
            to at most 7 and up to -7 to 7, ``gate * sigmoid(1.702 * gate) * (up + 1)``.
        gate_up_bias: ``[E, 2I]`` of a float dtype, in the order of ``w_gate_up``.
        down_bias: ``[E, N]`` of a float dtype; the routing weight multiplies it too.
        expert_map: ``[E_global]`` int32 from an id to one of the ``E`` experts here, or -1 for one that lives elsewhere
            and adds nothing here (expert parallelism); by default ids are experts. Or ``[R, E_global]``: token ``t``
            goes by row ``t % R``, so tokens share the copies of an expert, here or elsewhere.
        residual: ``[T, N]`` of the dtype of ``x``, to which ``scale`` times the result is added in place; may be ``x``.
        scale: see ``residual``, without which it must be 1.
        norm_weight: ``[N]`` of a float dtype: also compute :func:`rms_norm` of what is returned, for what follows;
            ``norm_eps`` and ``norm_weight_offset`` are its.
        batch_invariant: a token's bits depend on its own row, weights and experts alone, not on the other tokens.
        out: ``[T, N]`` of the dtype of ``x``, contiguous, in which the result is written: memory that others read, say.
            Not ``x``, and not together with ``residual``. A token without experts gets zeros.

    Returns:
        ``residual``, ``out``, or a new tensor ``[T, N]`` of the dtype of ``x``; with ``norm_weight`` that and its norm.
        The same input gives the same bits.

    Raises:
        ValueError: a wrong shape, dtype or device, another activation, ``residual`` and ``out``, or ``batch_invariant``
            with an ``expert_map`` of several rows.
    """
    check_scaled(scale, residual)
    experts = make_experts(w_gate_up, w_down, gate_up_bias, down_bias, activation)
    choice = ExpertChoice(weights, ids, expert_map)
    check_experts(x, experts, residual)
    _check_choice(x, choice, batch_invariant)
    result = make_result(x, residual, scale, norm_weight, norm_eps, norm_weight_offset, out)
    _fused_moe(x, *experts, *choice, *result, batch_invariant)
    return result.out if result.normed is None else (result.out, result.normed)


fused_moe_ref = with_reference(fused_moe)

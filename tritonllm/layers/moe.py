"""Mixture of experts: each token goes through a few of many MLPs (Shazeer et al., 2017)."""

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from tritonllm.dist.group import ALONE, Group
from tritonllm.experts.placement import taken_slots
from tritonllm.kernels import cap_logits, count_experts, fused_moe, moe_from_logits, moe_logits, moe_route
from tritonllm.kernels.dense import row_by_row
from tritonllm.layers.exchanged_rows import ExchangedRows
from tritonllm.layers.expert_counts import LayerCounter
from tritonllm.layers.linear import Linear, linear_float32
from tritonllm.layers.mlp import MLP, MLPSpec
from tritonllm.layers.norm import BlockInput, Norm, NormSpec
from tritonllm.layers.parameters import HoldsWeights, empty_parameter, product_weight
from tritonllm.layers.residual import Addend

EXPERT_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "swigluoai")


@dataclass(frozen=True, kw_only=True)
class MoESpec:
    """Experts and how they are chosen.

    Attributes:
        num_experts: gated MLPs to choose from.
        top_k: how many experts a token goes through.
        intermediate_size: the columns between an expert's two products.
        activation: one of ``EXPERT_ACTIVATIONS``.
        bias: whether the experts' projections have a bias.
        router_bias: whether a bias is added to the router's logits.
        router_float32: whether the router's weight is float32 in every dtype, as are the rows that it multiplies (ERNIE
            4.5).
        router_softcap: replaces the router's logits by ``cap * tanh(logit / cap)``; 0 for none (Laguna).
        scoring: the function that makes scores of the logits: ``softmax``; ``sigmoid``; ``late_sigmoid``, for which the
            correction bias is added to the logits (Kolibri 1); ``sparsemixer`` (Phi-3.5-MoE), which has neither
            correction bias nor groups.
        renormalize: the chosen experts' weights sum to one.
        correction_bias: added to the scores for the choice only (DeepSeek-V3).
        num_groups: experts are chosen within the best ``top_k_groups`` of this many groups; 1 for no groups.
        top_k_groups: see ``num_groups``.
        scale: multiplies the weights.
        weights_on_input: a weight multiplies what goes into its expert, not what comes out (Llama 4); with ``top_k`` 1.
        shared: an MLP that every token goes through as well.
        shared_scale: multiplies that MLP's output (Cohere 2 averages).
        apart: the norms of a block in which the shared MLP and the experts have norms of their own (Gemma 4): the
            experts' input, the router's, and both results before they are summed; all of the stream or of such a
            result. ``None``: the experts and the shared MLP read the block's input.
        expert_scales: a learned number for each expert multiplies its weights, once they are chosen and renormalised.
        shared_gate: a sigmoid of one more projection multiplies the shared MLP's output (Qwen2-MoE).
        by_expert: several ranks have whole experts, each some of them, instead of a part of every expert.
        slots: the expert in each slot of all ranks together, those of rank 0 first, with ``by_expert``: an expert may
            have several. ``None``: expert i is in slot i. It decides what is where and no launch, so layers that differ
            in nothing else are of one kind.
        turns: rows of the table by which tokens take an expert's copies in turns; 1 if there are none.
        held: the slots that are here; ``None`` for all.
        exchanged: each rank has rows of its own, and sends them to the experts that others hold
            (:mod:`tritonllm.dist.exchange`). Otherwise all ranks have the same rows.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    activation: str = "silu"
    bias: bool = False
    router_bias: bool = False
    router_float32: bool = False
    router_softcap: float = 0.0
    scoring: Literal["softmax", "sigmoid", "late_sigmoid", "sparsemixer"] = "softmax"
    renormalize: bool = True
    correction_bias: bool = False
    num_groups: int = 1
    top_k_groups: int = 1
    scale: float = 1.0
    weights_on_input: bool = False
    shared: MLPSpec | None = None
    shared_scale: float = 1.0
    shared_gate: bool = False
    apart: NormSpec | None = None
    expert_scales: bool = False
    by_expert: bool = False
    slots: tuple[int, ...] | None = field(default=None, compare=False)
    turns: int = 1
    held: range | None = None
    exchanged: bool = False

    @property
    def num_slots(self) -> int:
        """How many slots all ranks have together; without copies one for each expert."""
        return self.num_experts if self.slots is None else len(self.slots)

    def __post_init__(self) -> None:
        if self.activation not in EXPERT_ACTIVATIONS:
            known = ", ".join(EXPERT_ACTIVATIONS)
            raise ValueError(f"activation of experts must be one of {known}, got {self.activation!r}")
        if self.num_experts % self.num_groups or not 1 <= self.top_k_groups <= self.num_groups:
            raise ValueError(
                f"num_groups ({self.num_groups}) must divide num_experts ({self.num_experts}) and be at least "
                f"top_k_groups ({self.top_k_groups})"
            )
        available = self.num_experts // self.num_groups * self.top_k_groups
        if not 1 <= self.top_k <= available:
            raise ValueError(f"top_k must be from 1 to the {available} experts to choose from, got {self.top_k}")
        if self.weights_on_input and self.top_k != 1:
            raise ValueError(f"weights_on_input needs top_k=1, got {self.top_k}")
        if self.apart is not None and (self.shared is None or self.shared_gate or self.shared_scale != 1.0):
            raise ValueError("apart needs a shared MLP without a gate or scale")


class ExpertNorms(nn.Module):
    """The norms of a block whose shared MLP and experts are ``apart``: of the router's and the experts' input, and of
    both results."""

    def __init__(self, hidden_size: int, spec: NormSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        how: dict[str, Any] = {"dtype": dtype, "device": device}
        self.router, self.experts, self.after, self.shared_after = (Norm((hidden_size,), spec, **how) for _ in range(4))


class Routed(NamedTuple):
    """What the sum over experts needs: ``rows[T, hidden]``, and the router's ``logits[T, experts]`` in float32; where
    the choice is counted, if it is; and the way to experts elsewhere, if there are some."""

    rows: torch.Tensor
    logits: torch.Tensor
    counter: LayerCounter | None = None
    exchanged: ExchangedRows | None = None
    of_shared: torch.Tensor | None = None


def _places(spec: MoESpec, held: range) -> torch.Tensor:
    """``[turns, experts]`` int32: where the slot that a token takes for each expert lies among those held, or -1."""
    slots = range(spec.num_experts) if spec.slots is None else spec.slots
    taken = torch.tensor(taken_slots(slots, spec.num_experts, spec.turns), dtype=torch.int32)
    here = (taken >= held.start) & (taken < held.stop)
    return (taken - held.start).where(here, -1)


class MoE(HoldsWeights):
    """Routing, the experts' two grouped products, and the shared MLP.

    A rank that holds some of the experts routes every token, and computes those pairs (token, expert) whose expert is
    here: a part of the sum. Where an expert has copies, the token's place in the step says which of them computes it:
    all ranks have the same steps, so exactly one does.

    Where ranks have rows of their own (``exchanged``), each routes these, sends them to their experts, and gets the
    whole sum back.
    """

    batch_invariant = False
    expert_map: torch.Tensor | None

    def __init__(
        self, hidden_size: int, spec: MoESpec, *, dtype: torch.dtype, device: torch.device, group: Group = ALONE
    ) -> None:
        super().__init__()
        self.spec, self._group, self.dtype = spec, group, dtype
        experts, inner = spec.num_experts, spec.intermediate_size
        exact = torch.float32 if spec.router_float32 else dtype
        self.router = Linear(hidden_size, experts, bias=spec.router_bias, dtype=exact, device=device)
        here = experts if spec.held is None else len(spec.held)
        self.gate_up: nn.Parameter
        self.down: nn.Parameter
        self.hold("gate_up", product_weight(here, 2 * inner, hidden_size, dtype=dtype, device=device))
        self.hold("down", product_weight(here, hidden_size, inner, dtype=dtype, device=device))
        places = None if spec.held is None or spec.exchanged else _places(spec, spec.held).to(device)
        self.register_buffer("expert_map", places, persistent=False)
        self.gate_up_bias = self.down_bias = self.correction_bias = self.shared = self.shared_gate = None
        if spec.bias:
            self.gate_up_bias = empty_parameter(here, 2 * inner, dtype=dtype, device=device)
            self.down_bias = empty_parameter(here, hidden_size, dtype=dtype, device=device)
        if spec.correction_bias:
            # near 30 in trained models, with differences that bfloat16 would round away
            self.correction_bias = empty_parameter(experts, dtype=torch.float32, device=device)
        if spec.shared is not None:
            self.shared = MLP(hidden_size, spec.shared, dtype=dtype, device=device)
        self.norms = None if spec.apart is None else ExpertNorms(hidden_size, spec.apart, dtype=dtype, device=device)
        self.expert_scale = empty_parameter(experts, dtype=dtype, device=device) if spec.expert_scales else None
        if spec.shared_gate:
            self.shared_gate = Linear(hidden_size, 1, bias=False, dtype=dtype, device=device)

    def forward(
        self,
        x: BlockInput,
        counter: LayerCounter | None = None,
        exchanged: ExchangedRows | None = None,
        stream: torch.Tensor | None = None,
    ) -> Addend:
        """``[T, hidden]`` -> ``[T, hidden]``, to be added; ``counter`` says where the chosen experts are counted,
        ``exchanged``, where experts are ``exchanged``, how rows get to them, and ``stream[T, hidden]``, where they are
        ``apart``, what ``x`` is a norm of.

        The router's logits are in float32: two experts that bfloat16 takes for equal would be chosen by their number.
        """
        rows, weight, bias = x.rows, self.router.operand, self.router.bias
        of_shared, to_route = None, rows
        if self.norms is not None:
            assert stream is not None and x.norm is None
            of_shared, rows = rows, self.norms.experts.normalize(stream)
            to_route = self.norms.router.normalize(stream).mul_(stream.shape[1] ** -0.5)
        if x.norm is None:
            columns = self.spec.num_experts if self.batch_invariant else None
            together = self.router.together
            logits = linear_float32(to_route.to(weight.data.dtype), weight, bias, columns=columns, together=together)
        else:
            norm, spec = x.norm, x.norm.spec
            assert norm.weight is not None
            numbers = {"norm_eps": spec.eps, "norm_weight_offset": spec.weight_offset}
            logits, rows = moe_logits(rows, weight, norm.weight, bias, **numbers, constant_weight=True)
        if self.spec.router_softcap:
            cap_logits(logits, softcap=self.spec.router_softcap)
        return Addend(self, Routed(rows, logits, counter, exchanged, of_shared), whole=of_shared is not None)

    def alone(self, x: Routed) -> torch.Tensor:
        """This and what follows: a block's last product (:class:`~tritonllm.layers.residual.LastProduct`)."""
        out = self._sum(x, None, 1.0)
        assert isinstance(out, torch.Tensor)
        if self.norms is None:
            self._add_shared(out, x.rows, 1.0)
            return out
        assert self.shared is not None and x.of_shared is not None
        both = out, self.shared(BlockInput(x.of_shared)).alone()
        if self._group.size > 1:
            both = self._group.all_reduce(both[0]), self._group.all_reduce(both[1])
        ours, shared = both
        self.norms.after.normalize(ours, out=ours)
        return ours.add_(self.norms.shared_after.normalize(shared, out=shared))

    def add_to(self, stream: torch.Tensor, x: Routed, scale: float) -> None:
        self._sum(x, stream, scale)
        self._add_shared(stream, x.rows, scale)

    def add_and_normalize(self, stream: torch.Tensor, x: Routed, norm: Norm, scale: float) -> BlockInput:
        """Add the experts' sum to the stream, and normalise the result; for blocks without a shared MLP."""
        return BlockInput(self._sum(x, stream, scale, norm)[1])

    def _sum(
        self, x: Routed, residual: torch.Tensor | None, scale: float, following: Norm | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """The experts' part, as :func:`moe_from_logits` returns it; in several operations if experts are counted or
        elsewhere, or if weights go into them."""
        spec = self.spec
        rule: dict[str, Any] = {
            "renormalize": spec.renormalize,
            "scoring": spec.scoring,
            "num_groups": spec.num_groups,
            "top_k_groups": spec.top_k_groups if spec.num_groups > 1 else 1,
            "batch_invariant": self.batch_invariant,
        }
        experts: dict[str, Any] = {
            "activation": spec.activation,
            "gate_up_bias": self.gate_up_bias,
            "down_bias": self.down_bias,
            "expert_map": self.expert_map,
        }
        end: dict[str, Any] = {"residual": residual, "scale": scale}
        if following is not None:
            norm = following.spec
            end |= {"norm_weight": following.weight, "norm_eps": norm.eps, "norm_weight_offset": norm.weight_offset}
        weights, bias = (self.held("gate_up"), self.held("down")), self.correction_bias
        if x.counter is None and x.exchanged is None and not spec.weights_on_input and self.expert_scale is None:
            chosen: dict[str, Any] = {"correction_bias": bias, "routing_scale": spec.scale}
            return moe_from_logits(x.rows, x.logits, *weights, spec.top_k, **chosen, **rule, **experts, **end)
        choice = moe_route(x.logits, spec.top_k, bias=bias, scale=spec.scale, **rule)
        if x.counter is not None:
            count_experts(choice[1], x.counter.marks, x.counter.counts)
        if self.expert_scale is not None:
            choice = choice[0] * self.expert_scale[choice[1].long()].float(), choice[1]
        rows = x.rows
        if spec.weights_on_input:
            rows, choice = rows * choice[0].to(rows.dtype), (torch.ones_like(choice[0]), choice[1])
        if x.exchanged is None:
            return fused_moe(rows, *weights, *choice, batch_invariant=self.batch_invariant, **experts, **end)
        return self._exchanged(rows, x.exchanged, choice, experts, residual, scale, following)

    def _exchanged(
        self,
        rows: torch.Tensor,
        exchanged: ExchangedRows,
        choice: tuple[torch.Tensor, torch.Tensor],
        experts: dict[str, Any],
        residual: torch.Tensor | None,
        scale: float,
        following: Norm | None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """As :meth:`_sum`, of experts that are here and elsewhere."""
        exchange, (weights, ids) = exchanged.exchange, choice
        sizes = exchanged.marks, len(self.gate_up), exchanged.rows
        arrived = exchange.dispatch(rows, weights, ids, *sizes)
        experts |= {"out": exchange.parts(exchanged.rows, rows)}
        both = self.held("gate_up"), self.held("down")
        parts = fused_moe(arrived.x, *both, arrived.weights, arrived.ids, **experts)
        assert isinstance(parts, torch.Tensor)
        if residual is None:
            return exchange.combine(parts, ids, *sizes)
        if following is None:
            return exchange.combine_added(parts, ids, *sizes, residual, scale)
        return residual, exchange.combine_normed(parts, ids, *sizes, following.after_adding(residual, scale))

    def _add_shared(self, out: torch.Tensor, rows: torch.Tensor, scale: float) -> None:
        """Add ``scale`` times what the shared MLP, if there is one, makes of the same rows."""
        if self.shared is None:
            return
        part, scale = self.shared(BlockInput(rows)), scale * self.spec.shared_scale
        if self.shared_gate is None:
            part.product.add_to(out, part.x, scale)
        else:
            gate = self.shared_gate(rows)
            if self.batch_invariant and gate.is_cpu:  # torch has two exponentials: one for the end of a tensor
                row_by_row(torch.sigmoid, gate, gate)
            else:
                gate = gate.sigmoid()
            out.add_(part.alone() * gate, alpha=scale)

"""Linear maps and the embedding table: weights, and the product with them.

Many rows go to cuBLAS, with nothing fused but (on Hopper) the gate of an MLP. Few rows, whose product is bound by
reading the weights, go to :func:`tritonllm.kernels.linear`, which takes the norm before, and the activation or the
addition after, along. With some hundred rows one product can leave the norm after it to the next
(:mod:`tritonllm.kernels.dense.medium`). Which of these a block does, :mod:`tritonllm.layers.fusion` decides.
A module that is batch invariant (:mod:`tritonllm.layers.invariance`) has one kind of product for any number of rows.
Parameters are for inference only (no gradient) and are left uninitialised: a loader writes every element once.
"""

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn import functional as F

from tritonllm.kernels import apply_activation, linear
from tritonllm.kernels.dense.arguments import NOT_SCALED, Fused, Operands
from tritonllm.kernels.dense.cpu import pack_weight, product, row_by_row
from tritonllm.kernels.dense.invariant import multiply_gated_invariantly, multiply_invariantly
from tritonllm.kernels.dense.linear import linear_workspace_size, multiply
from tritonllm.kernels.dense.medium import Unnormed, add_linear, linear_unnormed
from tritonllm.kernels.dense.narrow import scales_of
from tritonllm.kernels.dense.weight import PLAIN, Weight, elements
from tritonllm.kernels.elementwise import ACTIVATIONS, act_and_mul, cpu
from tritonllm.kernels.runtime.registry import runs_in_torch
from tritonllm.layers.fusion import few_rows
from tritonllm.layers.norm import BlockInput, Norm, NormSpec
from tritonllm.layers.parameters import HoldsWeights, empty_parameter, product_weight

_NO_NORM = NormSpec(kind="rms", eps=0.0)


def _invariant_product(x: torch.Tensor, of: Weight, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    """``x[T, in] @ of.T + bias`` -> ``out[T, columns]`` of which no row depends on another."""
    if runs_in_torch(x):
        row_by_row(lambda rows: product(rows, of, bias), x, out)
        return out
    return multiply_invariantly(x, elements("weight", of), bias, out)


def linear_float32(
    x: torch.Tensor,
    of: Weight,
    bias: torch.Tensor | None = None,
    *,
    columns: int | None = None,
    out: torch.Tensor | None = None,
    together: int = 0,
) -> torch.Tensor:
    """``x[N, in] @ of[out, in].T + bias[out]`` -> ``[N, out]`` float32, whatever the dtype of the arguments.

    Args:
        columns: ``out``, for a product that is batch invariant; ``None`` for one that need not be.
        out: where to write it, by default a new tensor; of a GPU only.
        together: as of :func:`tritonllm.kernels.linear`.

    On CUDA the product itself writes float32: rounded to bfloat16 first, logits near 16 would be 1/8 apart, and an
    argmax would meet ties that the model does not have.
    """
    if columns is not None:
        out = torch.empty(x.shape[0], columns, dtype=torch.float32, device=x.device) if out is None else out
        return _invariant_product(x, of, bias, out)
    weight = of.data
    if few_rows(x) or (x.is_cuda and x.dtype != torch.float32):
        out = torch.empty(x.shape[0], weight.shape[0], dtype=torch.float32, device=x.device) if out is None else out
        return linear(x, of, bias, out=out, constant_weight=True, together=together)
    y = product(x, of, bias).float()
    return y if out is None else out.copy_(y)


class Linear(HoldsWeights):
    """``x[..., in_features] @ weight[out_features, in_features].T + bias[out_features]``.

    Projections of the same input (q, k and v; gate and up) are stacked along ``out_features``: one product reads the
    input once.

    Attributes:
        dtype: the dtype of what comes and goes; of the weight, too, unless it is narrow.
        together: elements of the weights of all products of its layer, of which those of few rows choose one kind of
            kernel; 0 for four times its own.
    """

    workspace: torch.Tensor
    batch_invariant = False
    together = 0

    def __init__(
        self, in_features: int, out_features: int, *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self._scaled = NOT_SCALED  # what kernels take of a narrow weight, made once
        self.weight: nn.Parameter
        self.hold("weight", product_weight(out_features, in_features, dtype=dtype, device=device))
        self.in_features, self.dtype = in_features, dtype
        self._packed = False
        self._columns = out_features
        self.bias = empty_parameter(out_features, dtype=dtype, device=device) if bias else None
        workspace = torch.zeros(linear_workspace_size(out_features), dtype=torch.int32, device=device)
        self.register_buffer("workspace", workspace, persistent=False)

    @property
    def operand(self) -> Weight:
        """The weight as products take it."""
        return self.held("weight")

    def forward(
        self,
        x: torch.Tensor,
        norm: Norm | None = None,
        squares: torch.Tensor | None = None,
        scales: torch.Tensor | None = None,
        *,
        activation: str | None = None,
        gated: bool = False,
        residual: torch.Tensor | None = None,
        scale: float = 1.0,
    ) -> torch.Tensor:
        """``x[T, in]`` -> ``[T, out]``, with what surrounds the product: in one launch if there are few rows.

        Args:
            x, norm, squares, scales: a :class:`~tritonllm.layers.norm.BlockInput`. With ``squares`` there is no
                ``residual``.
            activation: the function that is applied to the result; with ``gated`` to its first half, which then
                multiplies the second.
            residual: ``[T, out]``, to which ``scale`` times the result is added in place.

        Returns:
            ``residual`` if there is one, else a new tensor.
        """
        if self.batch_invariant:
            assert norm is None and squares is None  # no plan of such a model leaves norms to products
            return self._invariantly(x, activation, gated, residual, scale)
        if squares is not None:
            assert norm is not None and residual is None
            begun = Unnormed(x, squares, norm.spec.eps)
            return linear_unnormed(
                begun, self.operand, self.bias, activation=activation, gated=gated, constant_weight=True
            )
        if x.is_cpu and norm is None and (residual is None or self._packed):
            return self._on_cpu(x, activation, gated, residual, scale)
        narrow = self._scaled.scales is not None
        if activation is None and norm is None and residual is None and not (few_rows(x) or narrow):
            return F.linear(x, self.weight, self.bias)
        # without the checks of `linear`: what a layer multiplies fits in every step
        columns = self.weight.shape[0] // 2 if gated else self.weight.shape[0]
        out = x.new_empty(x.shape[0], columns, dtype=self.dtype) if residual is None else residual
        norm_weight, spec = (None, _NO_NORM) if norm is None else (norm.weight, norm.spec)
        numbers = spec.eps, spec.weight_offset, activation, gated, residual is not None, scale, True, self.together
        operands = Operands(x, self.weight, self.bias, norm_weight, out, self.workspace)
        scaled = self._scaled if scales is None else self._scaled._replace(of_rows=scales)
        return multiply(operands, Fused(*numbers), scaled)

    def _invariantly(
        self, x: torch.Tensor, activation: str | None, gated: bool, residual: torch.Tensor | None, scale: float
    ) -> torch.Tensor:
        """A product of which no row depends on another, and what follows it in launches of its own."""
        if not runs_in_torch(x):
            if gated and activation is not None:
                y = x.new_empty(x.shape[0], self._columns // 2)
                multiply_gated_invariantly(x, elements("weight", self.operand), self.bias, activation, y)
                return y if residual is None else residual.add_(y, alpha=scale)
            y = _invariant_product(x, self.operand, self.bias, x.new_empty(x.shape[0], self._columns))
            return _activated(y, activation, gated, residual, scale)

        def block(rows: torch.Tensor) -> torch.Tensor:  # torch has two exponentials: one for the end of a tensor
            return _activated(product(rows, self.operand, self.bias), activation, gated, None, 1.0)

        y = x.new_empty(x.shape[0], self._columns // 2 if gated else self._columns)
        row_by_row(block, x, y)
        return y if residual is None else residual.add_(y, alpha=scale)

    def _on_cpu(
        self, x: torch.Tensor, activation: str | None, gated: bool, residual: torch.Tensor | None, scale: float
    ) -> torch.Tensor:
        """The product on the CPU. The reference of `linear` would convert a 16-bit weight each time."""
        return _activated(product(x, self.operand, self.bias), activation, gated, residual, scale)

    def hold(self, name: str, to: torch.Tensor | Weight) -> None:
        super().hold(name, to)
        self._scaled = scales_of(self.operand)

    def pack(self) -> None:
        """The weight is final: on the CPU, lay it out as products read it. Nothing else can read it from here on."""
        self.hold("weight", pack_weight(self.weight))
        self._packed = self.operand.format != PLAIN

    @property
    def rounds_to(self) -> torch.dtype | None:
        """What it rounds its rows to, if it does."""
        return self.weight.dtype if self._scaled.rounds_rows else None

    def alone(self, x: torch.Tensor | BlockInput) -> torch.Tensor:
        """This and what follows: a block's last product (:class:`~tritonllm.layers.residual.LastProduct`)."""
        return self.forward(*x) if isinstance(x, BlockInput) else self.forward(x)

    def add_to(self, stream: torch.Tensor, x: torch.Tensor | BlockInput, scale: float) -> None:
        x = x if isinstance(x, BlockInput) else BlockInput(x)
        self.forward(*x, residual=stream, scale=scale)

    def add_and_normalize(self, stream: torch.Tensor, x: torch.Tensor, norm: Norm, scale: float) -> BlockInput:
        """The norm is only begun: the product that follows ends it."""
        assert norm.weight is not None
        begun = add_linear(
            x,
            self.operand,
            self.bias,
            stream,
            norm.weight,
            norm_eps=norm.spec.eps,
            norm_weight_offset=norm.spec.weight_offset,
            scale=scale,
            constant_weight=True,
        )
        return BlockInput(begun.scaled, norm, begun.squares)


def _activated(
    y: torch.Tensor, activation: str | None, gated: bool, residual: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """What follows a product, in launches of its own; may overwrite ``y``."""
    if activation is not None:
        if not gated:
            y = apply_activation(y, activation, out=y)
        elif runs_in_torch(y):
            y = cpu.act_and_mul(y, ACTIVATIONS[activation])
        else:
            y = act_and_mul(y, activation)
    return y if residual is None else residual.add_(y, alpha=scale)


class Embedding(nn.Module):
    """Rows of ``weight[num_embeddings, size]``, and the same table as an output projection.

    Args:
        projects: the rows with which it is an output projection; ``None`` for all.

    Attributes:
        together: as of :class:`Linear`, for the projection.
    """

    batch_invariant = False
    together = 0

    def __init__(
        self,
        num_embeddings: int,
        size: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        projects: range | None = None,
    ) -> None:
        super().__init__()
        self.weight = empty_parameter(num_embeddings, size, dtype=dtype, device=device)
        self._projects = projects
        self._packed: Weight | None = None

    def _output(self) -> torch.Tensor:
        rows = self._projects
        return self.weight if rows is None else self.weight[rows.start : rows.stop]

    def pack(self) -> None:
        """As :meth:`Linear.pack`, for :meth:`logits`; rows are looked up in the table itself, which stays."""
        self._packed = pack_weight(self._output())

    def take_pack(self, other: "Embedding") -> None:
        """Go on with what another of the same weight has packed, if it has."""
        if other._packed is not None:
            self._packed = other._packed

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """``ids[T]`` int32 or int64 -> ``[T, size]``."""
        return F.embedding(ids, self.weight)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """``hidden[N, size] @ weight.T`` -> ``[N, num_embeddings]`` float32, or as many as it ``projects`` with;
        ``out`` or a new tensor."""
        columns = len(self._output()) if self.batch_invariant else None
        weight = Weight(self._output()) if self._packed is None else self._packed
        return linear_float32(hidden, weight, columns=columns, out=out, together=self.together)


def put_beside(modules: Iterable[nn.Module], together: int) -> None:
    """Products among these come before or after layers whose products have weights of so many elements: where those
    have other kernels of few rows, or a product is large itself, it has none of its own."""
    for module in modules:
        if isinstance(module, Linear | Embedding):
            module.together = max(together, 4 * module.weight.numel())

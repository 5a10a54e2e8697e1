"""The residual stream of a step: what every block reads and adds to, and what is pending on it.

A block (attention, an MLP) enters the stream, which gives it its input, and its result is added. Which launch does the
adding and which the norm is planned (:mod:`tritonllm.layers.fusion`), so two things may be pending: a result that is
not added yet, or a norm that the launch which added has begun or computed for the block that follows.

With tensor parallelism a block's result is a rank's part of a sum, which is pending, too: what adds it sums it up over
the ranks first, or one launch sums up, adds and normalises. Two parallel blocks are summed up once. No block sees that.
What else will be pending here is an adapter's part of a block's last product: one more thing that an :class:`Addend`
brings along.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch

from tritonllm.dist.group import ALONE, Group
from tritonllm.layers.fusion import AddBy, NormBy
from tritonllm.layers.norm import BlockInput, Norm


class LastProduct(Protocol):
    """The product that ends a block: a linear map, or the sum over experts. ``x`` is what the block has for it."""

    def alone(self, x: Any) -> torch.Tensor:
        """The result, ``[T, hidden]``."""

    def add_to(self, stream: torch.Tensor, x: Any, scale: float) -> None:
        """Add ``scale`` times the result to ``stream[T, hidden]``."""

    def add_and_normalize(self, stream: torch.Tensor, x: Any, norm: Norm, scale: float) -> BlockInput:
        """:meth:`add_to`; returns what the next block begins with, which is this RMS norm of the stream."""


class Addend(NamedTuple):
    """A block's result but for its last product, which may take the addition along.

    Attributes:
        whole: the result is no rank's part of a sum, although there are several ranks.
    """

    product: LastProduct
    x: Any
    whole: bool = False

    def alone(self) -> torch.Tensor:
        """The result, added to nothing."""
        return self.product.alone(self.x)


class Stream:
    """The residual stream.

    Args:
        rows: ``[T, hidden]``, with which it begins; changed in place.
        scale: multiplies what is added (Granite, MiniCPM).
        becomes_normed: a norm's result is the stream from there on (the original transformer).
        group: the ranks whose parts add up to a block's result; each has the whole stream.
        given: the first block's input, where that is not a norm of the stream (``NormBy.BEFORE``).
        layer_inputs: ``[T, layers, size]``, what each layer gets beside the stream.
    """

    def __init__(
        self,
        rows: torch.Tensor,
        *,
        scale: float = 1.0,
        becomes_normed: bool = False,
        group: Group = ALONE,
        given: BlockInput | None = None,
        layer_inputs: torch.Tensor | None = None,
    ) -> None:
        self.rows = rows
        self.layer_inputs = layer_inputs
        self._group = group
        self._scale = scale
        self._becomes_normed = becomes_normed
        self._addend: torch.Tensor | None = None  # a result to be added, or this rank's part of it
        self._partial = False  # it is a part
        self._input = given  # the next block's, as far as it is computed

    def enter(self, norm: Norm | None, by: NormBy, rounds_to: torch.dtype | None = None) -> BlockInput:
        """The input of a block that begins with ``norm`` (``None``: with the stream itself), which ``by`` computes; an
        addition leaves it in ``rounds_to``, if it is there."""
        given, self._input = self._input, None
        if by is NormBy.BEFORE:
            assert given is not None
            return given
        if by is NormBy.PRODUCT:
            return BlockInput(self.rows, norm)
        if by in (NormBy.ADDITION, NormBy.SUM):
            addend, self._addend = self._addend, None
            partial, self._partial = self._partial, False
            assert addend is not None
            if partial and by is NormBy.SUM and norm is not None:
                normed = self._group.add_norm(addend, norm.after_adding(self.rows, self._scale))
            else:
                if partial:
                    addend = self._group.all_reduce(addend)
                if norm is None:
                    self.rows.add_(addend, alpha=self._scale)
                    return BlockInput(self.rows)
                if rounds_to is not None:
                    return norm.add_and_round(addend, self.rows, self._scale, rounds_to)
                normed, _ = norm(addend, self.rows, self._scale)
        elif norm is None:
            return BlockInput(self.rows)
        else:
            normed = norm.normalize(self.rows)
        if self._becomes_normed:
            self.rows = normed
        return BlockInput(normed)

    def add(self, block: Addend, by: AddBy, *, after: Norm | None = None, following: Norm | None = None) -> None:
        """Add a block's result, as ``by`` says.

        Args:
            after: a norm of the result, before it is added.
            following: the norm with which the next block begins, for ``AddBy.PRODUCT_WITH_NORM``.
        """
        if by is AddBy.PRODUCT:
            block.product.add_to(self.rows, block.x, self._scale)
        elif by is AddBy.PRODUCT_WITH_NORM:
            assert following is not None
            self._input = block.product.add_and_normalize(self.rows, block.x, following, self._scale)
        else:
            result = block.product.alone(block.x)
            self._partial = self._group.size > 1 and not block.whole
            if after is not None:
                if self._partial:
                    result, self._partial = self._group.all_reduce(result), False
                after.normalize(result, out=result)
            # of two parallel blocks both are pending: their sum is added at once
            self._addend = result if self._addend is None else self._addend.add_(result)

    def settle(self) -> torch.Tensor:
        """Add what is pending; no norm may be begun. Returns the stream, which may be changed."""
        addend, self._addend = self._addend, None
        if addend is not None:
            partial, self._partial = self._partial, False
            self.rows.add_(self._group.all_reduce(addend) if partial else addend, alpha=self._scale)
        return self.rows

    def settled(self) -> torch.Tensor:
        """``[T, hidden]``, a new tensor: the stream with what is pending added, and nothing changed.

        It is right between two blocks under every plan: what has begun or computed a norm has added before.

        Raises:
            ValueError: what is pending is a rank's part of a sum.
        """
        if self._partial:
            raise ValueError("the stream's addend is a rank's part of a sum, which only all ranks together can add")
        return self.rows.clone() if self._addend is None else self.rows.add(self._addend, alpha=self._scale)

    def keep(self, rows: torch.Tensor) -> None:
        """Go on with these rows alone, ``[R]`` int64; nothing may be pending."""
        self.rows = self.rows.index_select(0, rows)
        if self.layer_inputs is not None:
            self.layer_inputs = self.layer_inputs.index_select(0, rows)

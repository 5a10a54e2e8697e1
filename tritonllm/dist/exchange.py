"""Ranks that each have tokens of their own and some of the experts: the exchange of rows between them.

With ``data_parallel_size`` and ``enable_expert_parallel`` engines share one model's experts. Each computes attention
for its own requests. Behind a layer's router every rank sends each row to the ranks that have one of its experts
(*dispatch*), each computes its experts for the rows that came, and every rank adds up what the others have made of its
rows (*combine*). (Lepikhin et al., "GShard", 2020; with attention in data parallel as in Rajbhandari et al.,
"DeepSpeed-MoE", 2022.)

Rows lie where they came from: row ``i`` of rank ``s`` is row ``s * rows + i`` of what every rank receives, where
``rows`` is at least as many as any rank has, the same number on all ranks of a step. Nothing is packed, so nobody has
to know how many rows another one sends; where a row has no expert on a rank, its ids are -1 there, and its elements are
whatever was there before.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch

from tritonllm.dist.group import ALONE, Group

if TYPE_CHECKING:  # kernels are imported where there is a GPU
    from tritonllm.kernels.collective import AddedNorm


class Arrived(NamedTuple):
    """What a rank has received: ``size * rows`` rows.

    Attributes:
        x: ``[size * rows, columns]``.
        weights: ``[size * rows, top_k]`` float32.
        ids: ``[size * rows, top_k]`` int32, of the experts held here, from 0 on; -1 for one that is elsewhere.
    """

    x: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor


class Exchange:
    """The way of rows to experts and back. All ranks call the same methods in the same order: :meth:`dispatch` and one
    of those that combine, in turns.

    Args:
        group: the ranks. Of several that are not connected, the tensors are meta tensors.
    """

    def __init__(self, group: Group = ALONE) -> None:
        self.group = group

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def size(self) -> int:
        return self.group.size

    def reserve(self, columns: int, dtype: torch.dtype, top_k: int, rows: int) -> None:
        """Prepare for steps of at most so many ``rows`` of each rank; all ranks call it."""

    def dispatch(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, marks: torch.Tensor, held: int, rows: int
    ) -> Arrived:
        """Send rows to their experts, and receive those for the experts here.

        Args:
            x: ``[T, columns]``; T is at most ``rows``, and may differ between ranks.
            weights, ids: ``[T, top_k]`` float32 and int32, the choice among all experts: expert ``e`` is expert
                ``e % held`` of rank ``e // held``.
            marks: ``[T]`` int32 or int64; a row whose mark is negative is padding and goes nowhere.
            held: experts of each rank.
            rows: room for the rows of a rank, the same number on all ranks.
        """
        count, top_k = ids.shape
        ids = ids.masked_fill(marks[:, None] < 0, -1)
        sent = x.new_zeros(rows, x.shape[1]), weights.new_zeros(rows, top_k), ids.new_full((rows, top_k), -1)
        for room, part in zip(sent, (x, weights, ids), strict=True):
            room[:count] = part
        x, weights, ids = (self.group.stack(part).flatten(0, 1) for part in sent)
        local = ids - self.rank * held
        return Arrived(x, weights, local.masked_fill((local < 0) | (local >= held), -1))

    def parts(self, rows: int, like: torch.Tensor) -> torch.Tensor | None:
        """``[size * rows, columns]``, where the experts' result is best written: :meth:`combine` takes it from there.

        Args:
            rows: as :meth:`dispatch` gets it.
            like: ``[*, columns]``, of the dtype and the columns of the result.

        Returns:
            ``None`` if any place will do. Else what is there is read until the next :meth:`dispatch`, by other ranks.
        """
        return None

    def combine(
        self,
        parts: torch.Tensor,
        ids: torch.Tensor,
        marks: torch.Tensor,
        held: int,
        rows: int,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """What all ranks have made of this rank's rows.

        Args:
            parts: ``[size * rows, columns]`` of the dtype of ``x``, what this rank's experts have made of what
                :meth:`dispatch` gave.
            ids, marks, held, rows: as :meth:`dispatch` got them.
            out: ``[T, columns]`` of the dtype of ``parts``, for the result; by default a new tensor.

        Returns:
            ``[T, columns]``: the sums in float32 in the order of the ranks, rounded to the dtype of ``parts``.
        """
        count = len(ids)
        back = self.group.all_to_all(parts.view(self.size, rows, -1))[:, :count]
        there = torch.where((ids >= 0) & (marks[:, None] >= 0), ids // held, -1)
        total = torch.zeros(count, parts.shape[1], dtype=torch.float32, device=parts.device)
        for rank in range(self.size):
            here = (there == rank).any(1, keepdim=True)
            total += back[rank].float().where(here, 0.0)
        return total.to(parts.dtype) if out is None else out.copy_(total)

    def combine_added(
        self,
        parts: torch.Tensor,
        ids: torch.Tensor,
        marks: torch.Tensor,
        held: int,
        rows: int,
        residual: torch.Tensor,
        scale: float = 1.0,
    ) -> torch.Tensor:
        """Add ``scale`` times what :meth:`combine` gives to ``residual[T, columns]``, which is returned."""
        return residual.add_(self.combine(parts, ids, marks, held, rows), alpha=scale)

    def combine_normed(
        self, parts: torch.Tensor, ids: torch.Tensor, marks: torch.Tensor, held: int, rows: int, added: "AddedNorm"
    ) -> torch.Tensor:
        """What :meth:`combine` gives, added to the residual stream of ``added`` in place -> the norm of that."""
        from tritonllm.kernels import fused_add_rms_norm

        total = self.combine(parts, ids, marks, held, rows)
        residual, weight, eps, offset, scale = added
        return fused_add_rms_norm(total, residual, weight, eps, weight_offset=offset, x_scale=scale)[0]

    def shut(self) -> None:
        """End all waiting for other ranks; idempotent, and for any thread."""


NO_EXCHANGE = Exchange()

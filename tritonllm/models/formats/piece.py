"""A rectangle of a narrow weight in one form, whatever format it came from."""

from dataclasses import dataclass

import torch

from tritonllm.kernels.dense.weight import Groups

# Elements widened at a time, each with some 16 bytes beside the result: on the CPU those of a cache.
_PIECE = {"cpu": 1 << 16}
_PIECE_ELSEWHERE = 1 << 24


@dataclass(frozen=True)
class NarrowPiece:
    """Rows and columns of a weight ``[N, K]``: an element is (its number minus its zero point) times its scale.

    Attributes:
        numbers: ``[R, C]`` int8, uint8 or float8_e4m3fn.
        scales: ``[r, c]`` float32, one for each group.
        groups: the rows and columns that share a scale, counted from the piece's own first ones.
        zeros: ``[r, c]`` int32, or ``None`` for zeros.
        column_groups: ``[C]`` int64, which column of ``scales`` a column has, where ``groups.columns`` does not say it:
            columns in another order (GPTQ's act-order), or groups that the piece cuts through.
        values: ``[16]`` or more float32, what each number stands for; ``None``: itself.
        factor: a float32 number that multiplies all scales; ``None``: 1.
        rounds_rows: the checkpoint's products round their rows, too.
    """

    numbers: torch.Tensor
    scales: torch.Tensor
    groups: Groups
    zeros: torch.Tensor | None = None
    column_groups: torch.Tensor | None = None
    values: torch.Tensor | None = None
    factor: torch.Tensor | None = None
    rounds_rows: bool = False

    def widen(self, dtype: torch.dtype) -> torch.Tensor:
        """The elements ``[R, C]``, on the piece's device: computed in float32 and rounded once to ``dtype``."""
        out = torch.empty(self.numbers.shape, dtype=dtype, device=self.numbers.device)
        rows, columns = self.numbers.shape
        step = max(1, _PIECE.get(out.device.type, _PIECE_ELSEWHERE) // max(1, columns))
        for begin in range(0, rows, step):
            some = range(begin, min(begin + step, rows))
            out[some.start : some.stop] = self._widened(some)
        return out

    def _widened(self, rows: range) -> torch.Tensor:
        numbers = self.numbers[rows.start : rows.stop]
        if self.values is None:
            wide = numbers.float()
        else:  # five times as fast on the CPU as indexing with a matrix
            wide = self.values.index_select(0, numbers.flatten().int()).view(numbers.shape)
        groups = self.groups.columns
        whole = groups and numbers.shape[1] % groups == 0  # groups as a dimension: nothing is repeated in memory
        shaped = wide.unflatten(1, (-1, groups)) if whole else wide
        if self.zeros is not None:
            shaped -= self._of_each(self.zeros, rows)
        scales = self._of_each(self.scales, rows)
        shaped *= scales if self.factor is None else scales * self.factor
        return wide

    def _of_each(self, by_group: torch.Tensor, rows: range) -> torch.Tensor:
        """What the elements of some rows have of ``[r, c]``: ``[R, C]``, ``[R, 1]``, or ``[R, c, 1]``."""
        groups, columns = self.groups.columns, self.numbers.shape[1]
        if self.groups.rows == 1:
            mine = by_group[rows.start : rows.stop]
        else:
            mine = by_group[torch.arange(rows.start, rows.stop, device=by_group.device) // self.groups.rows]
        if self.column_groups is not None:
            return mine[:, self.column_groups]
        if groups == 0:
            return mine
        return mine.unsqueeze(2) if columns % groups == 0 else mine.repeat_interleave(groups, 1)[:, :columns]


def cut_out(
    numbers: torch.Tensor,
    scales: torch.Tensor,
    groups: Groups,
    rows: range,
    columns: range,
    *,
    zeros: torch.Tensor | None = None,
    column_groups: torch.Tensor | None = None,
    values: torch.Tensor | None = None,
    factor: torch.Tensor | None = None,
    rounds_rows: bool = False,
) -> NarrowPiece:
    """The piece of a weight whose scales are given as a whole.

    Args:
        numbers: ``[len(rows), len(columns)]``, those of the piece.
        scales: float32, those of the whole weight, as ``groups`` says.
        rows, columns: where the piece lies in the weight.
        zeros: as ``scales``, int32.
        column_groups: ``[K]``, which column of ``scales`` each column of the weight has.
        values: what each number stands for.
        factor: a number that multiplies all scales.
        rounds_rows: as of the piece.
    """
    device = scales.device
    which: slice | torch.Tensor
    if len(scales) == 1:
        which, own = slice(None), max(1, len(rows))
    elif rows.start % groups.rows == 0:
        which, own = slice(rows.start // groups.rows, -(-rows.stop // groups.rows)), groups.rows
    else:
        which, own = torch.arange(rows.start, rows.stop, device=device) // groups.rows, 1
    scales, zeros = scales[which], None if zeros is None else zeros[which]
    across = groups.columns
    if column_groups is not None:
        column_groups, across = column_groups[columns.start : columns.stop].long(), 0
    elif across and columns.start % across == 0:
        some = slice(columns.start // across, -(-columns.stop // across))
        scales, zeros = scales[:, some], None if zeros is None else zeros[:, some]
    elif across:
        column_groups, across = torch.arange(columns.start, columns.stop, device=device) // across, 0
    return NarrowPiece(numbers, scales, Groups(own, across), zeros, column_groups, values, factor, rounds_rows)

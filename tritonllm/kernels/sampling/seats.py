"""What :func:`~tritonllm.kernels.advance_seats` reads and writes."""

from typing import NamedTuple

import torch


class SeatState(NamedTuple):
    """What the device knows of S seats.

    Attributes:
        last_tokens: ``[S]`` int32, drawn last.
        positions: ``[S]`` int32, of the token that was sampled from last; once settled, of the one to compute next.
        row_seats: ``[S]`` int32, the seat of each row of the step before; -1 for none.
    """

    last_tokens: torch.Tensor
    positions: torch.Tensor
    row_seats: torch.Tensor


class StepRows(NamedTuple):
    """The R sequences that a step samples from.

    Attributes:
        seats: ``[R]`` int32, no seat twice; -1 for padding.
        starts: ``[R]`` int32, the position of the token that is sampled from, the first one where drafts follow it; -1
            takes the seat's, and is replaced.
        tokens: ``[R]`` int64, which of the step's tokens it is; those of decodes come first.
    """

    seats: torch.Tensor
    starts: torch.Tensor
    tokens: torch.Tensor


class Decodes(NamedTuple):
    """The D decodes of a step, its first sequences, of G tokens each: the last one of a sequence and G - 1 drafts.

    Attributes:
        ids: ``[D G]`` int32; -1 for a first token takes the seat's last one, and is replaced. Drafts are left alone.
        positions, slots: ``[D G]`` int64, written.
        lengths: ``[D]`` int32, written.
        tables: ``[D, M]`` int32, blocks.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    lengths: torch.Tensor
    tables: torch.Tensor


class Verdict(NamedTuple):
    """What a step that verified drafts gave to N rows, as :func:`~tritonllm.kernels.rejection_sample` writes it.

    Attributes:
        ids: ``[N, G]`` int64, the new tokens of each row.
        accepted: ``[N]`` int64, how many of them follow the first; -1 after a step that verified nothing, whose token
            is in ``drawn``. :func:`advance_seats` sets it to -1.
    """

    ids: torch.Tensor
    accepted: torch.Tensor

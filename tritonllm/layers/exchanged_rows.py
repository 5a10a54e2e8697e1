"""The way of one layer's rows to the experts of other ranks and back (:mod:`tritonllm.dist.exchange`)."""

from typing import NamedTuple

import torch

from tritonllm.dist.exchange import Exchange


class ExchangedRows(NamedTuple):
    """What a layer with experts needs to know of it.

    Attributes:
        exchange: the exchange between the ranks that have the experts.
        rows: room for the rows of a rank, the same number on all ranks.
        marks: ``[tokens]`` int32 or int64; of padding, which stays where it is, negative.
    """

    exchange: Exchange
    rows: int
    marks: torch.Tensor

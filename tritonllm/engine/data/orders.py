"""What rank 0 has the other ranks do between steps, as data: take a weight, read all weights anew, call a function."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

PIECE = 1 << 26  # bytes of a weight that an order carries at most
DTYPES = {str(dtype): dtype for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)}


@dataclass(frozen=True)
class Order:
    """One thing to do.

    Attributes:
        kind: ``weight`` brings a piece of a weight; ``reload`` has weights read anew; ``call`` brings a function.
        text: the weight's name; of ``reload`` the folder or hub id, empty for the engine's own.
        dtype, shape: the type and shape of the whole weight.
        begin: the first byte of the weight that is here.
        data: bytes: of the weight, or of the pickled function. Only ranks that rank 0 has spawned take the latter.
    """

    kind: Literal["weight", "reload", "call"]
    text: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    begin: int = 0
    data: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint8))


def weight_orders(name: str, tensor: torch.Tensor) -> Iterator[Order]:
    """A weight in pieces.

    Raises:
        ValueError: it is of a type that does not travel.
    """
    dtype, shape = str(tensor.dtype), tuple(tensor.shape)
    if dtype not in DTYPES:
        raise ValueError(f"tensor {name} is {dtype}: ranks take {', '.join(DTYPES)}; cast it")
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    for begin in range(0, max(1, len(data)), PIECE):
        yield Order("weight", name, dtype, shape, begin, data[begin : begin + PIECE])


class WeightPieces:
    """Puts weights together again."""

    def __init__(self) -> None:
        self._data = torch.empty(0, dtype=torch.uint8)

    def add(self, order: Order) -> torch.Tensor | None:
        """The weight, once its last piece has come.

        Raises:
            ValueError: the piece is not the next one of a weight.
        """
        like = torch.empty(order.shape, dtype=DTYPES[order.dtype], device="meta")
        size, end = like.numel() * like.itemsize, order.begin + len(order.data)
        if order.begin == 0:
            self._data = torch.empty(size, dtype=torch.uint8)
        if len(self._data) != size or end > size:
            raise ValueError(f"this is no piece of {order.text}")
        self._data[order.begin : end] = torch.from_numpy(order.data)
        if end < size:
            return None
        whole, self._data = self._data, torch.empty(0, dtype=torch.uint8)
        return whole.view(like.dtype).view(order.shape)

"""A number that is added to all logits of a key, computed from its token's values: dynamic mask attention.

Shi et al., "Wonderful Matrices" (2024), as Doge has it. With a key ``[k, bias / (scale c)]`` and a query ``[q, c]`` the
scaled product is ``scale q k + bias``. So the number lies behind the key in the cache, and no kernel of attention knows
of it. It has two elements there, the second for what rounding takes from the first: in 16 bits the bias may be larger
than the products, and is as exact as they are. ``c`` is a power of two, which rounds nothing.
"""

import math

import torch
from torch import nn
from torch.nn.functional import pad, softplus

from tritonllm.dist.group import ALONE, Group
from tritonllm.layers.linear import Linear
from tritonllm.layers.parameters import empty_parameter

ROOM = 8  # elements behind a key, of which the first two are the number: kernels know heads of multiples of 8


class KeyBias(nn.Module):
    """The numbers of a layer: of each key head ``exp(strength * softplus(W v + shift))``, with ``v`` the values of all.

    Args:
        num_heads: query heads here.
        num_kv_heads: heads of keys and values here.
        of: heads of keys and values on all ranks.
        head_size: elements of a head.
        scale: multiplies the query-key products.
        shift: whether there is one.
        group: the ranks among which the heads are dealt out.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        *,
        of: int,
        head_size: int,
        scale: float,
        shift: bool,
        dtype: torch.dtype,
        device: torch.device,
        group: Group = ALONE,
    ) -> None:
        super().__init__()
        self.of_values = Linear(num_kv_heads * head_size, of, bias=False, dtype=dtype, device=device)
        self.strength = empty_parameter(num_kv_heads, dtype=dtype, device=device)
        self.shift = empty_parameter(num_kv_heads, dtype=dtype, device=device) if shift else None
        self._heads, self._group = (num_heads, num_kv_heads), group
        self._first, self._copies = group.rank * of // group.size, max(1, group.size // of)
        self._of_query = 2.0 ** math.ceil(-math.log2(scale))
        self._of_key = 1.0 / (scale * self._of_query)

    def append(self, heads: torch.Tensor) -> torch.Tensor:
        """``[T, H + 2 K, D]``, queries, keys and values -> ``[T, H + 2 K, D + ROOM]``, a new tensor; zeros behind
        values."""
        queries, keys = self._heads
        # of fewer heads than ranks each is on equally many, and so often in the sum
        sums = self._group.all_reduce(self.of_values(heads[:, queries + keys :].flatten(1)).float()) / self._copies
        sums = sums[:, self._first : self._first + keys]
        sums = sums if self.shift is None else sums + self.shift.float()
        numbers = (self.strength.float() * softplus(sums)).exp() * self._of_key
        wide, behind = pad(heads, (0, ROOM)), heads.shape[-1]
        wide[:, :queries, behind : behind + 2] = self._of_query
        rounded = numbers.to(wide.dtype)
        wide[:, queries : queries + keys, behind] = rounded
        wide[:, queries : queries + keys, behind + 1] = numbers - rounded.float()
        return wide

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

# Elements behind a key, of which the first two are the number. Of heads that are no multiple of 16 kernels read single
# elements (of 136 for sm_90 the prefill's spills 3 KB of registers, of 144 none).
ROOM = 16


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
        # float64: so exact that an exponential has the same float32 in a vector and alone
        sums = sums[:, self._first : self._first + keys].double()
        sums = sums if self.shift is None else sums + self.shift
        numbers = ((self.strength * softplus(sums)).exp() * self._of_key).float()
        wide, behind = pad(heads, (0, ROOM)), heads.shape[-1]
        wide[:, :queries, behind : behind + 2] = self._of_query
        rounded = numbers.to(wide.dtype)
        wide[:, queries : queries + keys, behind] = rounded
        wide[:, queries : queries + keys, behind + 1] = numbers - rounded.float()
        return wide

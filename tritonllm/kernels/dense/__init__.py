"""Products of rows with a weight, with what comes before and after them in a layer.

The names here are open to other wings: what a weight is, how its tiles are read and widened, and how the CPU keeps rows
apart.
"""

from tritonllm.kernels.dense.arguments import Scaled, half_unit
from tritonllm.kernels.dense.cpu import row_by_row, rows_apart
from tritonllm.kernels.dense.narrow import check_narrow, narrow_key, widen_numbers
from tritonllm.kernels.dense.weight import FORMAT_OF, NARROW, Groups, Weight, elements, load_tile, tile_at
from tritonllm.kernels.dense.widen import widen_bytes, widen_nibbles, widens_in_place

__all__ = [
    "FORMAT_OF",
    "NARROW",
    "Groups",
    "Scaled",
    "Weight",
    "check_narrow",
    "elements",
    "half_unit",
    "load_tile",
    "narrow_key",
    "row_by_row",
    "rows_apart",
    "tile_at",
    "widen_bytes",
    "widen_nibbles",
    "widen_numbers",
    "widens_in_place",
]

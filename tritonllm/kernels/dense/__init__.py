"""Products of rows with a weight, with what comes before and after them in a layer.

The names here are open to other wings: what a weight is, how its tiles are read and widened, and how the CPU keeps rows
apart.
"""

from tritonllm.kernels.dense.arguments import Scaled
from tritonllm.kernels.dense.cpu import row_by_row, rows_apart
from tritonllm.kernels.dense.narrow import check_narrow, narrow_key, widen_numbers
from tritonllm.kernels.dense.reading import tile_reading
from tritonllm.kernels.dense.weight import FP4, NARROW, Groups, Weight, elements, format_of, load_tile, tile_at
from tritonllm.kernels.dense.widen import (
    load_scales,
    read_scales,
    widen_bytes,
    widen_floats4,
    widen_nibbles,
)

__all__ = [
    "FP4",
    "NARROW",
    "Groups",
    "Scaled",
    "Weight",
    "check_narrow",
    "elements",
    "format_of",
    "load_scales",
    "load_tile",
    "narrow_key",
    "read_scales",
    "row_by_row",
    "rows_apart",
    "tile_at",
    "tile_reading",
    "widen_bytes",
    "widen_floats4",
    "widen_nibbles",
    "widen_numbers",
]

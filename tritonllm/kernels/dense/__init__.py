"""Products of rows with a weight, with what comes before and after them in a layer.

The names here are open to other wings: what a weight is, how its tiles are read, and how the CPU keeps rows apart.
"""

from tritonllm.kernels.dense.cpu import row_by_row, rows_apart
from tritonllm.kernels.dense.weight import Weight, elements, load_tile, tile_at

__all__ = ["Weight", "elements", "load_tile", "row_by_row", "rows_apart", "tile_at"]

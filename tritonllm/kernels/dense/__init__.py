"""Products of rows with a weight, with what comes before and after them in a layer.

The names here are open to other wings: what a weight is, and how its tiles are read.
"""

from tritonllm.kernels.dense.weight import Weight, elements, load_tile, tile_at

__all__ = ["Weight", "elements", "load_tile", "tile_at"]

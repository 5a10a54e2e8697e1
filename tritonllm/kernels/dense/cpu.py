"""Products on the CPU: weights that are laid out once as oneDNN's kernels read them.

A decode step reads every weight once, so it is as fast as that. From rows as they lie in a checkpoint, MKL and oneDNN
read them at half of what the memory gives and less: of Zen 4 (one core, 3072 x 576), a row took 619 us in float32 and
433 in bfloat16, 4 rows 800 and 493; packed 479 and 255, 4 rows 376 and 209.
"""

from collections.abc import Callable, Iterator

import torch
from torch.nn import functional as F

from tritonllm.kernels.dense.weight import ONEDNN, Weight

# Rows for which the packed layout is chosen; it serves any number (1 to 512 rows: chosen for 8 to 512, the same within
# 5%, for one row twice as slow with more of them).
PACKED_FOR = 64
# In float32, and of a large weight, fewer rows are slower than as many as these: one of 49152 x 576 in float32 7.2 ms,
# four 5.5 (bfloat16 3.5 and 2.8); of 3072 x 576 458 us and 342, but in bfloat16 192 and 183, and to pad takes 8.
LEAST_ROWS = 4
LARGE = 2**22  # elements of a weight


def can_pack(weight: torch.Tensor) -> bool:
    """oneDNN multiplies this dtype here, and there is something to multiply."""
    if not weight.is_cpu or weight.dim() != 2 or not weight.numel():
        return False
    if not torch.backends.mkldnn.is_available():
        return False
    return weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and multiplies_bfloat16())


def multiplies_bfloat16() -> bool:
    """The CPU has instructions for products of bfloat16 (AVX512_BF16 or AMX, of x86)."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def pack_weight(weight: torch.Tensor) -> Weight:
    """``weight[N, K]`` in oneDNN's own layout, for :func:`product` alone; or as it is, where that is of no use."""
    if not can_pack(weight):
        return Weight(weight)
    return Weight(torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR), format=ONEDNN)


def whole_rows(x: torch.Tensor) -> torch.Tensor:
    """``x[T, K]``, its rows one after the other if they are bfloat16 and K is no multiple of 32. With AMX, oneDNN reads
    such rows up to the next multiple and multiplies what is there by 0: of a NaN that is a NaN (torch 2.13)."""
    return x.contiguous() if x.dtype == torch.bfloat16 and x.shape[1] % 32 else x


def product(x: torch.Tensor, of: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``x[T, K] @ weight[N, K].T + bias[N]`` -> ``[T, N]``, of a weight in either format."""
    weight, x = of.data, whole_rows(x)
    if of.format != ONEDNN:
        return F.linear(x, weight, bias)
    rows = x.shape[0]
    if 0 < rows < LEAST_ROWS and (weight.dtype == torch.float32 or weight.numel() > LARGE):
        x = F.pad(x, (0, 0, 0, LEAST_ROWS - rows))
        return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")[:rows]
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")


def rows_apart(x: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Each row of ``x`` by itself, ``[1, K]``, and where it lies.

    A library's product chooses how it sums by the number of rows, by a row's place among them and by where its memory
    begins (of 16 rows of 31 elements, the same row had four results). A row alone, copied to memory of its own, is
    always summed alike: tests/e2e/test_deterministic.py looks whether that is so.
    """
    for i in range(len(x)):
        yield slice(i, i + 1), x[i : i + 1].clone()


def row_by_row(compute: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, out: torch.Tensor) -> None:
    """``compute(x)`` into ``out``, so that no row depends on another (:func:`rows_apart`)."""
    for place, row in rows_apart(x):
        out[place] = compute(row)

"""Which tokens a grammar allows next, applied to some rows of logits: the others of the row become -inf.

A launch of its own, on the rows that need it, before `sample` reads the logits: that kernel is tuned, and a mask in it
would be one more tensor for every draw. The launch reads V / 8 bytes a row and no logits, and writes only what is
banned. The form of the mask is xgrammar's: Dong et al., "XGrammar", 2024.
"""

import torch
import triton
import triton.language as tl

from tritonllm.kernels.runtime.checks import check_tensor, require
from tritonllm.kernels.runtime.registry import register_op, with_reference

_BLOCK = 2048  # tokens of a program


@triton.jit(do_not_specialize=["B"])
def _bitmask_kernel(
    logits_ptr,  # [B, V]
    rows_ptr,  # [N]
    bitmask_ptr,  # [N, words]
    B,
    V,
    words,
    stride_b,
    PROGRAMS: tl.constexpr,  # of a row
    BLOCK: tl.constexpr,
):
    n = (tl.program_id(0) // PROGRAMS).to(tl.int64)
    b_token = tl.program_id(0) % PROGRAMS * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows_ptr + n).to(tl.int64)
    if (row >= 0) & (row < B):
        b_word = tl.load(bitmask_ptr + n * words + b_token // 32, mask=b_token < V, other=0)
        m_banned = (b_token < V) & (((b_word >> (b_token % 32)) & 1) == 0)
        b_nothing = tl.full((BLOCK,), float("-inf"), tl.float32)
        tl.store(logits_ptr + row * stride_b + b_token, b_nothing, mask=m_banned)


def _reference(logits: torch.Tensor, rows: torch.Tensor, bitmask: torch.Tensor) -> None:
    mine = ((rows >= 0) & (rows < len(logits))).nonzero()[:, 0]
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = ((bitmask[mine, :, None] >> shifts) & 1).flatten(1)[:, : logits.shape[1]].bool()
    at = rows[mine].long()
    logits[at] = logits[at].masked_fill(~allowed, -torch.inf)


@register_op(mutates=("logits",), reference=_reference)
def _apply_token_bitmask(logits: torch.Tensor, rows: torch.Tensor, bitmask: torch.Tensor) -> None:
    (batch, vocab), programs = logits.shape, triton.cdiv(logits.shape[1], _BLOCK)
    given = (logits, rows, bitmask, batch, vocab, bitmask.shape[1], logits.stride(0))
    _bitmask_kernel[(len(rows) * programs,)](*given, PROGRAMS=programs, BLOCK=_BLOCK, num_warps=4)


def apply_token_bitmask(logits: torch.Tensor, rows: torch.Tensor, bitmask: torch.Tensor) -> None:
    """Set the logits of tokens that are not allowed to -inf, in place.

    Args:
        logits: ``[B, V]`` float16, bfloat16 or float32; contiguous in the last dimension.
        rows: ``[N]`` int32, the rows that have a mask, none twice; others than 0 to B - 1 are left out.
        bitmask: ``[N, ceil(V / 32)]`` int32, contiguous: bit ``t % 32`` of word ``t // 32`` says that token t may come.

    Raises:
        ValueError: a wrong shape, dtype or device.
    """
    check_tensor("logits", logits, ("B", "V"))
    check_tensor("rows", rows, ("N",), dtype=torch.int32, like=logits)
    shape = (len(rows), triton.cdiv(logits.shape[1], 32))
    check_tensor("bitmask", bitmask, shape, dtype=torch.int32, like=logits)
    require(bitmask.is_contiguous(), "bitmask must be contiguous")
    if len(rows) and logits.numel():
        _apply_token_bitmask(logits, rows, bitmask)


apply_token_bitmask_ref = with_reference(apply_token_bitmask)

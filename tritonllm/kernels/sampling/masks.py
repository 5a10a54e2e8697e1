"""Which tokens a grammar allows next: masks that the pass over the logits reads beside them (`draw.py`).

A mask has V / 8 bytes and a row of logits 4 V, so beside an allowed token a 32nd is read more, and of a stretch of
which nothing is allowed the logits are not read at all. A launch of its own before the pass, as there once was, wrote
-inf to whatever was banned, up to 4 V bytes a row, which the pass then read. The form of a mask is xgrammar's: Dong et
al., "XGrammar", 2024.

The pass is compiled twice, with masks and without, so steps in which nobody has a mask do not pay for those of others.
The launches behind it read single groups of logits in many places (`limited.py`): for rows with limits and a mask the
pass writes -inf where those would find what is banned.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tritonllm.kernels.runtime.checks import check_tensor, require
from tritonllm.kernels.sampling.common import GROUP, RUN, load_run


class TokenMasks(NamedTuple):
    """Which tokens may come in B rows.

    Attributes:
        rows: ``[B]`` int32: of each row the place of its mask, not the same for two; others than 0 to N - 1: all tokens
            may come.
        bitmask: ``[N, ceil(V / 32)]`` int32, contiguous: bit ``t % 32`` of word ``t // 32`` says that token t may come.
    """

    rows: torch.Tensor
    bitmask: torch.Tensor


class MaybeMasks(NamedTuple):
    """:class:`TokenMasks`, or nothing."""

    mask_rows: torch.Tensor | None
    bitmask: torch.Tensor | None


NO_MASKS = MaybeMasks(None, None)


@triton.jit
def mask_of_row(mask_rows_ptr, bitmask_ptr, row, n_masks, words):
    """Where a row's mask begins, and how many words it has: none if all tokens may come."""
    at = tl.load(mask_rows_ptr + row).to(tl.int64)
    return bitmask_ptr + at * words, tl.where((at >= 0) & (at < n_masks), words, 0)


@triton.jit
def _words_of_run(mask, b_group, run):
    """The mask of a run of each group: a word each."""
    p_mask, words = mask
    b_at = b_group * (GROUP // RUN) + run
    return tl.load(p_mask + b_at, mask=b_at < words, other=-1)


@triton.jit
def _bits(b_word):
    """Which tokens of each word's run may come, [groups, RUN]."""
    return ((b_word[:, None] >> tl.arange(0, RUN)[None, :]) & 1) != 0


@triton.jit
def load_allowed_run(p_row, b_group, run, V, mask):
    """``load_run`` with -inf for what the mask bans. A run is loaded or left out, for one load takes four tokens."""
    b_word = _words_of_run(mask, b_group, run)
    b_x = load_run(p_row, b_group, run, V, (b_word != 0)[:, None])
    return tl.where(_bits(b_word), b_x, float("-inf"))


@triton.jit
def allowed_tokens(mask, b_token):
    """Which of these tokens may come."""
    p_mask, words = mask
    b_word = tl.load(p_mask + b_token // 32, mask=b_token // 32 < words, other=-1)
    return ((b_word >> (b_token % 32)) & 1) != 0


@triton.jit
def ban_groups(p_row, first_group, V, mask, GROUPS: tl.constexpr, TILES: tl.constexpr):
    """Write -inf where a stretch of the row is banned."""
    b_nothing = tl.full((GROUPS, RUN), float("-inf"), tl.float32)
    for tile in range(TILES):
        b_group = first_group + tile * GROUPS + tl.arange(0, GROUPS)
        for run in range(GROUP // RUN):
            b_token = b_group[:, None] * GROUP + run * RUN + tl.arange(0, RUN)[None, :]
            b_word = _words_of_run(mask, b_group, run)
            tl.store(p_row + b_token, b_nothing, mask=(b_token < V) & (_bits(b_word) == 0))


def check_masks(masks: TokenMasks, logits: torch.Tensor) -> None:
    """Check the masks of ``logits[B, V]``."""
    batch, vocab = logits.shape
    check_tensor("masks.rows", masks.rows, (batch,), dtype=torch.int32, like=logits)
    shape = ("N", triton.cdiv(vocab, 32))
    check_tensor("masks.bitmask", masks.bitmask, shape, dtype=torch.int32, like=logits)
    require(masks.bitmask.is_contiguous(), "masks.bitmask must be contiguous")


def ban_ref(logits: torch.Tensor, masks: MaybeMasks) -> None:
    """Set what may not come in ``logits[B, V]`` to -inf."""
    rows, bitmask = masks
    if rows is None or bitmask is None:
        return
    mine = ((rows >= 0) & (rows < len(bitmask))).nonzero()[:, 0]
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    words = bitmask[rows[mine].long()]
    allowed = ((words[..., None] >> shifts) & 1).flatten(1)[:, : logits.shape[1]].bool()
    logits[mine] = logits[mine].masked_fill(~allowed, -torch.inf)

"""From the target's token at each row to what a sequence emits: the path of drafts that the tokens agree with.

Row 0 of a sequence holds the target's token in place of its first draft. A draft that is this token is accepted, and
the next token is that of the draft's own row; the first token that no draft foresaw ends the path. Drafts are a chain,
where draft j is to follow draft j - 1, or a tree, where each names its parent.
"""

import torch
import triton
import triton.language as tl

from tritonllm.kernels.runtime.dependent_launch import dependent_launch, let_next_start, wait_for_previous

_NONE = tl.constexpr(0x7FFFFFFF)


@triton.jit(do_not_specialize=["draft_ids_ptr", "G", "stride_draft"])
def _chain_kernel(
    draft_ids_ptr,  # [B, G]
    tokens_ptr,  # [B * (G + 1)] int64
    ids_ptr,  # [B, G + 1] int64
    accepted_ptr,  # [B] int64
    G,
    stride_draft,
    POSITIONS: tl.constexpr,
    PDL: tl.constexpr,
):
    seq = tl.program_id(0).to(tl.int64)
    b_position = tl.arange(0, POSITIONS)
    # Before the wait: what gives the tokens has waited for all kernels before it (see `sampling`'s kernel on `.cg`)
    p_draft = draft_ids_ptr + seq * stride_draft + b_position
    b_draft = tl.load(p_draft, mask=b_position < G, other=-1, cache_modifier=".cg")
    wait_for_previous(PDL)
    let_next_start(PDL)
    b_token = tl.load(tokens_ptr + seq * (G + 1) + b_position, mask=b_position <= G, other=0)
    accepted = tl.min(tl.where(b_token == b_draft, _NONE, b_position))
    b_id = tl.where(b_position <= accepted, b_token, -1)
    tl.store(ids_ptr + seq * (G + 1) + b_position, b_id, mask=b_position <= G)
    tl.store(accepted_ptr + seq, accepted.to(tl.int64))


@triton.jit(do_not_specialize=["draft_ids_ptr", "parents_ptr", "G", "stride_draft", "stride_parents"])
def _tree_kernel(
    draft_ids_ptr,  # [B, G]
    parents_ptr,  # [B, G]
    tokens_ptr,  # [B * (G + 1)] int64
    ids_ptr,  # [B, G + 1] int64
    accepted_ptr,  # [B] int64
    path_ptr,  # [B, G + 1] int64
    G,
    stride_draft,
    stride_parents,
    POSITIONS: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_previous(PDL)
    seq = tl.program_id(0).to(tl.int64)
    b_position = tl.arange(0, POSITIONS)
    b_draft = tl.load(draft_ids_ptr + seq * stride_draft + b_position, mask=b_position < G, other=-1)
    b_parent = tl.load(parents_ptr + seq * stride_parents + b_position, mask=b_position < G, other=-2)
    b_id = tl.full([POSITIONS], -1, tl.int64)
    b_path = tl.full([POSITIONS], -1, tl.int64)
    row = tl.zeros((), tl.int32)
    length = tl.zeros((), tl.int32)
    while row >= 0:
        token = tl.load(tokens_ptr + seq * (G + 1) + row)
        b_id = tl.where(b_position == length, token, b_id)
        b_path = tl.where(b_position == length, row, b_path)
        # a child comes after its parent, which also keeps wrong parents from leading in a circle
        m_child = (b_parent == row - 1) & (b_draft == token) & (b_position >= row)
        child = tl.min(tl.where(m_child, b_position, _NONE))
        row = tl.where(child < _NONE, child + 1, -1)
        length += 1
    tl.store(ids_ptr + seq * (G + 1) + b_position, b_id, mask=b_position <= G)
    tl.store(path_ptr + seq * (G + 1) + b_position, b_path, mask=b_position <= G)
    tl.store(accepted_ptr + seq, (length - 1).to(tl.int64))


@triton.jit(do_not_specialize=["parents_ptr", "G", "stride_parents"])
def _depths_kernel(
    parents_ptr,  # [B, G]
    depths_ptr,  # [B, G + 1] int32
    G,
    stride_parents,
    POSITIONS: tl.constexpr,
):
    seq = tl.program_id(0).to(tl.int64)
    b_row = tl.arange(0, POSITIONS)
    p_parents = parents_ptr + seq * stride_parents
    b_depth = tl.zeros([POSITIONS], tl.int32)
    b_at = tl.where(b_row <= G, b_row - 1, -1)  # an ancestor, as a draft
    while tl.max(b_at) >= 0:
        b_depth += (b_at >= 0).to(tl.int32)
        b_parent = tl.load(p_parents + b_at, mask=b_at >= 0, other=-1).to(tl.int32)
        b_at = tl.where(b_parent < b_at, b_parent, -1)  # a parent that is no earlier draft is none
    tl.store(depths_ptr + seq * (G + 1) + b_row, b_depth, mask=b_row <= G)


def follow_chain(draft_ids: torch.Tensor, tokens: torch.Tensor, ids: torch.Tensor, accepted: torch.Tensor) -> None:
    """``draft_ids [B, G]`` and ``tokens [B, G + 1]`` int64 to ``ids [B, G + 1]``, ``accepted [B]`` int64."""
    batch, positions = ids.shape
    sizes = (positions - 1, draft_ids.stride(0))
    options = {"POSITIONS": triton.next_power_of_2(positions), "num_warps": 1}
    _chain_kernel[(batch,)](draft_ids, tokens, ids, accepted, *sizes, **options, **dependent_launch(ids.device))


def follow_chain_ref(draft_ids: torch.Tensor, tokens: torch.Tensor, ids: torch.Tensor, accepted: torch.Tensor) -> None:
    """:func:`follow_chain` in torch."""
    agree = tokens[:, :-1] == draft_ids
    torch.sum(agree.long().cumprod(-1), -1, out=accepted)
    position = torch.arange(ids.shape[1], device=ids.device)
    ids.copy_(torch.where(position <= accepted[:, None], tokens, -1))


def tree_depths(parents: torch.Tensor) -> torch.Tensor:
    """How many drafts lead to each row: ``parents [B, G]`` to ``[B, G + 1]`` int32."""
    batch, drafts = parents.shape
    depths = torch.empty(batch, drafts + 1, dtype=torch.int32, device=parents.device)
    positions = triton.next_power_of_2(drafts + 1)
    _depths_kernel[(batch,)](parents, depths, drafts, parents.stride(0), POSITIONS=positions, num_warps=1)
    return depths


def tree_depths_ref(parents: torch.Tensor) -> torch.Tensor:
    """:func:`tree_depths` in torch."""
    batch, drafts = parents.shape
    depths = torch.zeros(batch, drafts + 1, dtype=torch.int32, device=parents.device)
    for j in range(drafts):
        parent = torch.where((parents[:, j] >= -1) & (parents[:, j] < j), parents[:, j], -1).long()
        depths[:, j + 1] = depths.gather(1, parent[:, None] + 1)[:, 0] + 1
    return depths


def follow_tree(
    draft_ids: torch.Tensor,
    parents: torch.Tensor,
    tokens: torch.Tensor,
    ids: torch.Tensor,
    accepted: torch.Tensor,
    path: torch.Tensor,
) -> None:
    """As :func:`follow_chain` for a tree; ``path [B, G + 1]`` int64 gets the rows whose tokens are emitted, then -1."""
    batch, positions = ids.shape
    sizes = (positions - 1, draft_ids.stride(0), parents.stride(0))
    options = {"POSITIONS": triton.next_power_of_2(positions), "num_warps": 1, **dependent_launch(ids.device)}
    _tree_kernel[(batch,)](draft_ids, parents, tokens, ids, accepted, path, *sizes, **options)


def follow_tree_ref(
    draft_ids: torch.Tensor,
    parents: torch.Tensor,
    tokens: torch.Tensor,
    ids: torch.Tensor,
    accepted: torch.Tensor,
    path: torch.Tensor,
) -> None:
    """:func:`follow_tree` in torch."""
    drafts = draft_ids.shape[1]
    later = torch.arange(drafts, device=ids.device)
    row = torch.zeros_like(accepted)
    accepted.fill_(-1)
    ids.fill_(-1)
    path.fill_(-1)
    for length in range(drafts + 1):
        alive = row >= 0
        token = tokens.gather(1, row.clamp_min(0)[:, None])
        ids[:, length] = torch.where(alive, token[:, 0], -1)
        path[:, length] = row
        accepted += alive
        child = (parents == row[:, None] - 1) & (draft_ids == token) & (later >= row[:, None]) & alive[:, None]
        row = torch.where(child.any(-1), child.long().argmax(-1) + 1, -1) if drafts else row - 1

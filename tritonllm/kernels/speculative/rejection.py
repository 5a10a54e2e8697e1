"""Speculative decoding's verdict on draft tokens: the longest accepted beginning, and one token more.

Without draft probabilities every row of target logits draws its token just as :func:`sample` would, with the noise of
its seed and step, and drafts are accepted as long as they are these tokens. So the result is what decoding without
drafts would have given, token by token, whatever the drafts, and a tree of drafts is as easy as a chain. A draft that
does not depend on the noise (an n-gram, the drafter's argmax) is accepted with the target's probability of it, which
no method can better. A drafter that draws by :func:`sample` with the same seeds and steps shares the noise, and so most
of the tokens: Daliri, Musco and Suresh, "Coupling without communication and drafter-invariant speculative decoding",
2024. Trees of drafts: Miao et al., "SpecInfer", 2023.

With draft probabilities q a draft d is accepted with probability min(1, p(d) / q(d)), p being the target's distribution
there (after temperature, min-p, top-k and top-p); at the first rejection one token is drawn from max(p - q, 0),
normalised (`residual.py`), and after the last draft one from p. The tokens then have the target's distribution,
whatever q (Leviathan, Kalman and Matias, "Fast inference from transformers via speculative decoding", 2023; Chen et
al., "Accelerating large language model decoding with speculative sampling", 2023).

Either way each row gives one token, a draft or another, and `draft_path` finds where they part. Floor: the target
logits' bytes over the memory bandwidth, 46 us for 64 sequences of 4 drafts and V = 151936 in float32 on an H200; of q
only single values are read, but in the rare rows whose proposals all fail.
"""

from typing import NamedTuple

import torch

from tritonllm.config.sampling_rows import SamplingRows
from tritonllm.kernels import sample
from tritonllm.kernels.runtime.checks import FLOATS, check_tensor, require
from tritonllm.kernels.runtime.registry import register_op, with_reference
from tritonllm.kernels.sampling import check_parameters, sample_rows
from tritonllm.kernels.speculative.draft_path import (
    follow_chain,
    follow_chain_ref,
    follow_tree,
    follow_tree_ref,
    tree_depths,
    tree_depths_ref,
)
from tritonllm.kernels.speculative.judge import judge, judge_ref


class DraftChain(NamedTuple):
    """Drafts one after the other, and the verdict on them."""

    draft_ids: torch.Tensor
    draft_probs: torch.Tensor | None
    target_logits: torch.Tensor
    workspace: torch.Tensor | None
    ids: torch.Tensor
    accepted: torch.Tensor


class Tree(NamedTuple):
    """Drafts of which several may follow one, and the verdict on them."""

    draft_ids: torch.Tensor
    parents: torch.Tensor
    target_logits: torch.Tensor
    workspace: torch.Tensor | None
    ids: torch.Tensor
    accepted: torch.Tensor
    path: torch.Tensor


def sample_rows_ref(
    target_logits: torch.Tensor, parameters: SamplingRows[torch.Tensor], offsets: torch.Tensor
) -> torch.Tensor:
    """``sampling.sample_rows`` in torch, ``[B, N, V]`` to ``[B, N]``; ``offsets`` are ``[B, N]`` or ``[N]``."""
    batch, positions, vocab = target_logits.shape
    temperature, *limits, seeds, steps = parameters
    top_k, top_p, min_p = (None if t is None else t.repeat_interleave(positions) for t in limits)
    temperature, seeds = temperature.repeat_interleave(positions), seeds.repeat_interleave(positions)
    steps = (steps[:, None] + offsets.expand(batch, positions)).flatten()
    tokens = sample(target_logits.reshape(-1, vocab), temperature, top_k, top_p, min_p, seeds, steps)
    return tokens.view(batch, positions)


def _reference(chain: DraftChain, parameters: SamplingRows[torch.Tensor]) -> None:
    draft_ids, draft_probs, target_logits, _, ids, accepted = chain
    tokens = sample_rows_ref(target_logits, parameters, torch.arange(ids.shape[1], device=ids.device))
    if draft_probs is not None:
        tokens = judge_ref(draft_ids, draft_probs, target_logits, parameters, tokens)
    follow_chain_ref(draft_ids, tokens, ids, accepted)


@register_op(mutates=("workspace", "ids", "accepted"), reference=_reference)
def _rejection_sample(chain: DraftChain, parameters: SamplingRows[torch.Tensor]) -> None:
    draft_ids, draft_probs, target_logits, workspace, ids, accepted = chain
    if len(ids) == 0:
        return
    tokens = torch.empty_like(ids)
    if draft_probs is None:
        sample_rows(target_logits, parameters, None, None, workspace, tokens)
    else:
        judge(draft_ids, draft_probs, target_logits, parameters, tokens)
    follow_chain(draft_ids, tokens, ids, accepted)


def rejection_sample(
    draft_ids: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    seeds: torch.Tensor,
    steps: torch.Tensor,
    *,
    min_p: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept or reject draft tokens, and add one token of the target's own.

    Position i draws with step ``steps + i``, so ``steps`` counts the tokens of a sequence, and no noise is used twice.
    The drafter may draw with the same seeds and steps through :func:`sample`: without ``draft_probs`` it then agrees
    with the target more often, and with them a token in place of a rejected draft has noise of its own. A sequence
    without drafts gets the token that :func:`sample` draws from its first row; without ``draft_probs`` all tokens are
    those that :func:`sample` would have drawn one by one.

    Args:
        draft_ids: ``[B, G]`` int32 or int64; at an id outside [0, V), such as -1, a sequence has no more drafts.
        draft_probs: ``[B, G, V]`` float16, bfloat16 or float32, the distributions that the drafts were drawn from; only
            the last dimension must be contiguous. ``None`` for drafts that were not drawn (n-grams, argmax), and for
            those drawn by :func:`sample` from a drafter close to the target.
        target_logits: ``[B, G + 1, V]`` float16, bfloat16 or float32: row i is what follows draft i - 1. As
            ``draft_probs``, it may have any strides but the last.
        temperature: ``[B]`` float32; below 1e-5 a draft is accepted if it is the argmax.
        top_k, top_p, min_p: ``[B]``, limits of the target's distribution as in :func:`sample`, or ``None``.
        seeds, steps: ``[B]`` int64; a step is the number of the sequence's token at position 0.
        workspace: at least ``[B * (G + 1)]`` int32 zeros, as of :func:`sample`.
        out: tensors to write the results into, contiguous; by default new ones.

    Returns:
        ``ids [B, G + 1]`` int64: the accepted drafts, one token more, then -1; ``accepted [B]`` int64: how many
        drafts were accepted.

    Raises:
        ValueError: a wrong shape, dtype or device, or an empty vocabulary.
    """
    check_drafts(draft_ids, target_logits, workspace)
    batch, positions, vocab = target_logits.shape
    if draft_probs is not None:
        check_tensor("draft_probs", draft_probs, (batch, positions - 1, vocab), dtype=FLOATS, like=target_logits)
    parameters = SamplingRows(temperature, top_k, top_p, min_p, seeds, steps)
    check_parameters(batch, target_logits, parameters)
    if out is None:
        ids = torch.empty(batch, positions, dtype=torch.int64, device=target_logits.device)
        out = ids, torch.empty(batch, dtype=torch.int64, device=target_logits.device)
    ids, accepted = out
    check_tensor("out[0]", ids, (batch, positions), dtype=torch.int64, like=target_logits)
    check_tensor("out[1]", accepted, (batch,), dtype=torch.int64, like=target_logits)
    require(ids.is_contiguous() and accepted.is_contiguous(), "out must be contiguous")
    _rejection_sample(draft_ids, draft_probs, target_logits, workspace, ids, accepted, *parameters)
    return ids, accepted


rejection_sample_ref = with_reference(rejection_sample)


def check_drafts(draft_ids: torch.Tensor, target_logits: torch.Tensor, workspace: torch.Tensor | None) -> None:
    """Check what chains and trees of drafts share."""
    check_tensor("target_logits", target_logits, ("B", "G + 1", "V"))
    batch, positions, vocab = target_logits.shape
    require(positions > 0, "target_logits must have a row for each draft and one more, got none")
    require(vocab > 0, "target_logits must have at least one column (the vocabulary is empty)")
    drafts = (batch, positions - 1)
    check_tensor("draft_ids", draft_ids, drafts, dtype=(torch.int32, torch.int64), like=target_logits)
    if workspace is not None:
        check_tensor("workspace", workspace, ("B * (G + 1)",), dtype=torch.int32, like=target_logits)
        least = batch * positions
        require(len(workspace) >= least, f"workspace must have at least {least} elements, got {len(workspace)}")


def _tree_reference(tree: Tree, parameters: SamplingRows[torch.Tensor]) -> None:
    tokens = sample_rows_ref(tree.target_logits, parameters, tree_depths_ref(tree.parents))
    follow_tree_ref(tree.draft_ids, tree.parents, tokens, tree.ids, tree.accepted, tree.path)


@register_op(mutates=("workspace", "ids", "accepted", "path"), reference=_tree_reference)
def _rejection_sample_tree(tree: Tree, parameters: SamplingRows[torch.Tensor]) -> None:
    if len(tree.ids) == 0:
        return
    tokens, depths = torch.empty_like(tree.ids), tree_depths(tree.parents)
    sample_rows(tree.target_logits, parameters, None, None, tree.workspace, tokens, depths)
    follow_tree(tree.draft_ids, tree.parents, tokens, tree.ids, tree.accepted, tree.path)


def rejection_sample_tree(
    draft_ids: torch.Tensor,
    parents: torch.Tensor,
    target_logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    seeds: torch.Tensor,
    steps: torch.Tensor,
    *,
    min_p: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """:func:`rejection_sample` without draft probabilities, for drafts that form a tree: several may follow one.

    The tokens are those that :func:`sample` would have drawn one by one, whatever the tree. A row draws with the step
    of its depth; so a drafter whose candidates at a node are the likeliest under that step's noise is the best match.

    Args:
        draft_ids: ``[B, G]`` int32 or int64; an id outside [0, V), such as -1, is no draft.
        parents: ``[B, G]`` int32 or int64: the draft that each draft follows, an earlier one, or -1 for the first
            token. Of two equal drafts with one parent the first counts. A draft whose parent is not an earlier draft
            is not reached.
        target_logits: ``[B, G + 1, V]``: row 0 is what comes first, row j + 1 what follows draft j.
        temperature, top_k, top_p, seeds, steps, min_p, workspace: as of :func:`rejection_sample`.
        out: tensors to write the results into, contiguous; by default new ones.

    Returns:
        ``ids [B, G + 1]`` int64: the accepted drafts, one token more, then -1; ``accepted [B]`` int64: how many drafts
        were accepted; ``path [B, G + 1]`` int64: the rows of ``target_logits`` that gave the ids, then -1. The first is
        0, and the others are the accepted drafts plus 1: keys and values of the rest can be dropped.

    Raises:
        ValueError: a wrong shape, dtype or device, or an empty vocabulary.
    """
    check_drafts(draft_ids, target_logits, workspace)
    batch, positions, _ = target_logits.shape
    check_tensor("parents", parents, (batch, positions - 1), dtype=(torch.int32, torch.int64), like=target_logits)
    parameters = SamplingRows(temperature, top_k, top_p, min_p, seeds, steps)
    check_parameters(batch, target_logits, parameters)
    if out is None:
        ids = torch.empty(batch, positions, dtype=torch.int64, device=target_logits.device)
        out = ids, torch.empty(batch, dtype=torch.int64, device=target_logits.device), torch.empty_like(ids)
    ids, accepted, path = out
    for place, shape in enumerate(((batch, positions), (batch,), (batch, positions))):
        check_tensor(f"out[{place}]", out[place], shape, dtype=torch.int64, like=target_logits)
        require(out[place].is_contiguous(), "out must be contiguous")
    _rejection_sample_tree(draft_ids, parents, target_logits, workspace, ids, accepted, path, *parameters)
    return ids, accepted, path


rejection_sample_tree_ref = with_reference(rejection_sample_tree)

"""Lesson 9: decode attention over a paged cache, in one Triton kernel.

One program computes one query head of one sequence. It walks along the sequence's block table, loads a block of keys
and values at a time, and keeps a running softmax, so the scores of the whole sequence never have to be in memory.

The exercise: replace each `hole` by an expression. `tritonllm tutorial check 9` checks it.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def decode_kernel(
    q_ptr,  # [B, H, D]
    k_ptr,  # [P, S, K, D]: blocks, places in a block, key heads, numbers of a head
    v_ptr,  # [P, S, K, D]
    table_ptr,  # [B, M]: the block tables
    length_ptr,  # [B]: tokens of each sequence
    out_ptr,  # [B, H, D]
    M,  # entries of a block table
    scale,  # 1 / sqrt(D)
    H: tl.constexpr,
    K: tl.constexpr,
    S: tl.constexpr,
    D: tl.constexpr,
):
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    key_head = head // (H // K)  # H // K query heads share a key head
    length = tl.load(length_ptr + sequence)
    places = tl.arange(0, S)
    dims = tl.arange(0, D)
    b_q = tl.load(q_ptr + (sequence * H + head) * D + dims)  # [D]

    b_out = tl.zeros([D], tl.float32)  # the values seen so far, weighted
    largest = float("-inf")  # of the scores seen so far
    total = 0.0  # of the weights seen so far
    for i in range(tl.cdiv(length, S)):
        block = tl.load(table_ptr + sequence * M + i)  # where the i-th S tokens of this sequence lie
        # exercise: rows = hole("where the key_head of each of the S tokens of the block begins in k_ptr, [S]")
        rows = ((block * S + places) * K + key_head) * D  # [S]: where the heads of these tokens begin
        # until here
        b_k = tl.load(k_ptr + rows[:, None] + dims[None, :])  # [S, D]
        b_v = tl.load(v_ptr + rows[:, None] + dims[None, :])  # [S, D]
        b_scores = tl.sum(b_q[None, :] * b_k, axis=1) * scale  # [S]
        # exercise: b_scores = hole("b_scores, but -inf for the places behind the sequence's end")
        b_scores = tl.where(i * S + places < length, b_scores, float("-inf"))  # no weight behind the end
        # until here

        new_largest = tl.maximum(largest, tl.max(b_scores, axis=0))
        b_weights = tl.exp(b_scores - new_largest)  # [S]
        # exercise: fade = hole("what total and b_out are multiplied by, as they were relative to the old largest")
        fade = tl.exp(largest - new_largest)  # what was summed up before was relative to the old largest
        # until here
        total = total * fade + tl.sum(b_weights, axis=0)
        b_out = b_out * fade + tl.sum(b_weights[:, None] * b_v, axis=0)
        largest = new_largest
    tl.store(out_ptr + (sequence * H + head) * D + dims, b_out / total)


def decode_attention(q, k_cache, v_cache, block_tables, lengths):
    """``q [B, H, D]`` over ``k_cache`` and ``v_cache [P, S, K, D]``; ``block_tables [B, M]``, ``lengths [B]``."""
    sequences, heads, size = q.shape
    _, places, key_heads, _ = k_cache.shape
    out = torch.empty_like(q)
    decode_kernel[(sequences, heads)](
        *(q, k_cache, v_cache, block_tables, lengths, out),
        *(block_tables.shape[1], size**-0.5),
        *(heads, key_heads, places, size),
    )
    return out

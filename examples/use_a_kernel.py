"""One kernel in your own code: attention over a paged cache, without the engine. Runs on a GPU or the CPU."""

import torch

from tritonllm.kernels import paged_decode_attention, paged_decode_attention_ref, store_kv

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.bfloat16 if device == "cuda" else torch.float32
heads, kv_heads, head_size, block_size, blocks = 8, 2, 64, 16, 32

# A pool of blocks, and two sequences of 40 and 7 tokens that live in some of them.
k_cache, v_cache = torch.zeros(2, blocks, block_size, kv_heads, head_size, device=device, dtype=dtype)
block_tables = torch.tensor([[5, 9, 2], [7, 0, 0]], device=device, dtype=torch.int32)
seq_lens = torch.tensor([40, 7], device=device, dtype=torch.int32)

# Write their keys and values: a token's slot is its block times the block size, plus its place in the block.
for table, length in zip(block_tables.tolist(), seq_lens.tolist(), strict=True):
    slots = torch.tensor([table[i // block_size] * block_size + i % block_size for i in range(length)], device=device)
    k, v = torch.randn(2, length, kv_heads, head_size, device=device, dtype=dtype)
    store_kv(k, v, k_cache, v_cache, slots)

# One query per sequence sees all of its keys.
q = torch.randn(2, heads, head_size, device=device, dtype=dtype)
out = paged_decode_attention(q, k_cache, v_cache, block_tables, seq_lens)

reference = paged_decode_attention_ref(q.float(), k_cache.float(), v_cache.float(), block_tables, seq_lens)
error = (out.float() - reference).norm() / reference.norm()
print(f"{tuple(out.shape)} on {device}, relative error {error:.1e}")

"""The small kernels of a decoder layer in your own code, without the engine. Runs on a GPU or the CPU."""

import torch

from tritonllm.kernels import (
    build_cos_sin_cache,
    fused_add_rms_norm,
    qk_norm_rope_store,
    qk_norm_rope_store_ref,
    silu_and_mul,
)

device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
tokens, hidden, heads, kv_heads, head_size, block_size, blocks = 7, 256, 4, 2, 64, 16, 8


def weights(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=device, dtype=dtype) * shape[-1] ** -0.5


# A layer begins: add what the last block computed to the residual stream and normalise, in place, in one launch.
x, stream = torch.randn(2, tokens, hidden, device=device, dtype=dtype)
x, stream = fused_add_rms_norm(x, stream, torch.ones(hidden, device=device, dtype=dtype))

# Between the projection and attention: normalise and rotate q and k, and store k and v in the paged cache, at once.
qkv = x @ weights((heads + 2 * kv_heads) * head_size, hidden).t()
k_cache, v_cache = torch.zeros(2, blocks, block_size, kv_heads, head_size, device=device, dtype=dtype)
positions = torch.arange(tokens, device=device)
slots = 5 * block_size + positions  # the sequence lives in block 5
table = build_cos_sin_cache(head_size, 1024, base=1e6, device=device)
norms = {"q_weight": torch.ones(head_size, device=device), "k_weight": torch.ones(head_size, device=device)}
q = qk_norm_rope_store(qkv.clone(), k_cache, v_cache, slots, positions, table, **norms)

# And inside the MLP: silu(gate) * up in one pass over the fused projection.
inner = silu_and_mul(x @ weights(2 * 512, hidden).t())

expected = qk_norm_rope_store_ref(qkv.float(), k_cache.float(), v_cache.float(), slots, positions, table, **norms)
error = (q.float() - expected).norm() / expected.norm()
stored = int(k_cache.any(-1).any(-1).sum())
print(f"q {tuple(q.shape)} on {device}, relative error {error:.1e}; {stored} tokens stored; inner {tuple(inner.shape)}")

"""A mixture of experts in your own code: routing, both products and the sum. Runs on a GPU or the CPU."""

import torch

from tritonllm.kernels import fused_moe, fused_moe_ref, moe_route

device = "cuda" if torch.cuda.is_available() else "cpu"
dtype = torch.bfloat16 if device == "cuda" else torch.float32
tokens, experts, top_k, hidden, inner = 5, 16, 4, 256, 128

x = torch.randn(tokens, hidden, device=device, dtype=dtype)
w_router = torch.randn(experts, hidden, device=device, dtype=dtype) / hidden**0.5
w_gate_up = torch.randn(experts, 2 * inner, hidden, device=device, dtype=dtype) / hidden**0.5  # gate rows, then up
w_down = torch.randn(experts, hidden, inner, device=device, dtype=dtype) / inner**0.5

# The best experts of each token, and their weights. Other ways to choose: scoring, bias, num_groups (DeepSeek).
weights, ids = moe_route(x @ w_router.T, top_k)
out = fused_moe(x, w_gate_up, w_down, weights, ids)

reference = fused_moe_ref(x.float(), w_gate_up.float(), w_down.float(), weights, ids)
error = (out.float() - reference).norm() / reference.norm()
print(f"{tuple(out.shape)} on {device}, relative error {error:.1e}")

# Expert parallelism: each rank holds half of the experts and maps the others to -1; the ranks' results add up.
total = torch.zeros_like(out)
for rank in range(2):
    own = slice(rank * experts // 2, (rank + 1) * experts // 2)
    expert_map = torch.full((experts,), -1, device=device, dtype=torch.int32)
    expert_map[own] = torch.arange(experts // 2, device=device, dtype=torch.int32)
    total += fused_moe(x, w_gate_up[own], w_down[own], weights, ids, expert_map=expert_map)
print(f"two ranks' sum differs by {(total - out).float().norm() / out.float().norm():.1e}")

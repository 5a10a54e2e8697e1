"""What every public operation refuses: a tensor that autograd would follow."""

import inspect

import pytest
import torch

from tritonllm import kernels

CACHE = torch.zeros(4, 16, 2, 64)
X, HEADS, PAIR = torch.zeros(2, 8), torch.zeros(2, 4, 64), torch.zeros(2)
INDEX = torch.zeros(2, dtype=torch.int64)
INT32 = INDEX.int()
TABLES = torch.zeros(2, 2, dtype=torch.int32)
ATTENTION = {"k_cache": CACHE, "v_cache": CACHE, "block_tables": TABLES, "seq_lens": INT32}
EXPERTS = {"w_gate_up": torch.zeros(3, 12, 8), "w_down": torch.zeros(3, 8, 6)}
LIMITS = {"temperature": PAIR, "top_k": INT32, "top_p": PAIR, "min_p": PAIR, "seeds": INDEX, "steps": INDEX}
CALLS = {
    "silu_and_mul": {"x": X},
    "gelu_and_mul": {"x": X},
    "apply_activation": {"x": X, "activation": "silu"},
    "xielu": {"x": X, "parameters": torch.zeros(4)},
    "output_gate": {"x": X, "gate": X},
    "store_kv": {"k": CACHE[0, :2], "v": CACHE[0, :2], "k_cache": CACHE, "v_cache": CACHE, "slot_mapping": INDEX},
    "copy_blocks": {"k_cache": CACHE, "v_cache": CACHE, "pairs": torch.zeros(1, 2, dtype=torch.int64)},
    "pack_blocks": {"pool": CACHE[0], "blocks": INDEX, "packed": torch.zeros(2, 16, 64)},
    "unpack_blocks": {"packed": torch.zeros(2, 16, 64), "blocks": INDEX, "pool": CACHE[0]},
    "paged_decode_attention": {"q": HEADS, **ATTENTION},
    "varlen_prefill_attention": {
        "q": HEADS,
        **ATTENTION,
        "cu_seqlens_q": torch.arange(3, dtype=torch.int32),
        "max_seqlen_q": 1,
    },
    "rms_norm": {"x": X, "weight": X[0]},
    "fused_add_rms_norm": {"x": X, "residual": X, "weight": X[0]},
    "layer_norm": {"x": X, "weight": X[0]},
    "linear": {"x": X, "weight": X, "bias": PAIR, "norm_weight": X[0]},
    "add_linear": {"x": X, "weight": X, "bias": PAIR, "stream": torch.zeros(2, 2), "norm_weight": PAIR},
    "apply_rope": {"q": HEADS, "k": HEADS, "positions": INDEX, "cos_sin_cache": torch.zeros(5, 64)},
    "moe_route": {"router_logits": X, "top_k": 2},
    "fused_moe": {"x": X, **EXPERTS, "weights": torch.zeros(2, 2), "ids": TABLES},
    "moe_from_logits": {"x": X, "logits": torch.zeros(2, 3), **EXPERTS, "top_k": 2},
    "cap_logits": {"logits": X},
    "sample": {"logits": X, **LIMITS},
    "token_logprobs": {"logits": X, "chosen": INDEX, "top_n": 1},
}
CASES = [
    (name, argument)
    for name, call in CALLS.items()
    for argument, value in call.items()
    if isinstance(value, torch.Tensor) and value.is_floating_point()
]


@pytest.mark.parametrize(("name", "argument"), CASES)
def test_gradients_are_refused(device, name, argument):
    """Not a silently wrong gradient: no operation has a backward pass. Under no_grad the same call works."""
    operation = getattr(kernels, name)
    call = {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in CALLS[name].items()}
    call[argument] = call[argument].clone().requires_grad_()
    with pytest.raises(ValueError, match=rf"{argument} requires grad.*torch\.no_grad\(\) or detach"):
        operation(**call)
    assert argument in inspect.signature(operation).parameters
    with torch.no_grad():
        operation(**call)

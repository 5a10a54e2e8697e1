"""The kernel library: every public operation and its plain-torch twin ``<name>_ref``.

Importing this package imports no kernel; an attribute access imports the one file that holds it.
"""

import importlib
from typing import Any

_HOME = {
    "silu_and_mul": "activation",
    "gelu_and_mul": "activation",
    "apply_activation": "activation",
    "store_kv": "kv_cache",
    "copy_blocks": "kv_cache",
    "paged_decode_attention": "attention_decode",
    "paged_verify_attention": "attention_verify",
    "fused_decode_attention": "attention_fused",
    "varlen_prefill_attention": "attention_prefill",
    "cascade_decode_attention": "attention_cascade",
    "merge_attention_states": "attention_merge",
    "rms_norm": "norm",
    "fused_add_rms_norm": "norm",
    "fused_add_rms_norm_quantize": "quantized",
    "silu_and_mul_quantize": "quantized",
    "layer_norm": "layernorm",
    "fused_add_layer_norm": "layernorm",
    "linear": "linear_skinny",
    "add_linear": "linear_medium",
    "linear_unnormed": "linear_medium",
    "apply_rope": "rope",
    "qk_norm_rope_store": "qk_norm_rope",
    "moe_route": "moe_routing",
    "moe_logits": "moe_router",
    "fused_moe": "moe_gemm",
    "moe_from_logits": "moe_routed",
    "cap_logits": "logits",
    "advance_seats": "seat_state",
    "sample": "sampling",
    "count_tokens": "logit_edits",
    "rejection_sample": "rejection",
    "rejection_sample_tree": "rejection",
    "token_logprobs": "logprobs",
}

_HELPERS = {  # no kernels, so no twins
    "CascadePlan": "attention_cascade",
    "plan_cascade": "attention_cascade",
    "LogitEdits": "logit_edits",
    "make_logit_edits": "logit_edits",
    "write_seat": "logit_edits",
}

__all__ = sorted([*_HOME, *(f"{name}_ref" for name in _HOME), *_HELPERS])


def __getattr__(name: str) -> Any:
    home = _HELPERS.get(name) or _HOME.get(name.removesuffix("_ref"))
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return __all__

"""The kernel library: every public operation, its plain-torch twin ``<name>_ref``, and what its arguments are made of.

Each folder is a wing, and holds what belongs together (docs/design.md).

Importing this package imports no kernel; an attribute access imports the one file that holds it, with what that needs.
"""

import importlib
from typing import Any

_HOME = {
    "silu_and_mul": "elementwise.activation",
    "gelu_and_mul": "elementwise.activation",
    "apply_activation": "elementwise.activation",
    "xielu": "elementwise.xielu",
    "output_gate": "elementwise.output_gate",
    "store_kv": "attention.kv_cache",
    "copy_blocks": "attention.kv_cache",
    "pack_blocks": "attention.packed_blocks",
    "unpack_blocks": "attention.packed_blocks",
    "paged_decode_attention": "attention.decode",
    "paged_verify_attention": "attention.verify",
    "fused_decode_attention": "attention.fused",
    "varlen_prefill_attention": "attention.prefill",
    "batch_invariant_attention": "attention.invariant",
    "cascade_decode_attention": "attention.cascade",
    "merge_attention_states": "attention.merge",
    "rms_norm": "elementwise.norm",
    "fused_add_rms_norm": "elementwise.norm",
    "fused_add_rms_norm_quantize": "elementwise.quantized",
    "silu_and_mul_quantize": "elementwise.quantized",
    "quantize_rows": "elementwise.quantized",
    "layer_norm": "elementwise.layernorm",
    "fused_add_layer_norm": "elementwise.layernorm",
    "linear": "dense.linear",
    "batch_invariant_linear": "dense.invariant",
    "add_linear": "dense.medium",
    "linear_unnormed": "dense.medium",
    "apply_rope": "elementwise.rope",
    "qk_norm_rope_store": "attention.qk_norm_rope",
    "moe_route": "moe.route",
    "moe_logits": "moe.logits",
    "fused_moe": "moe.experts",
    "moe_from_logits": "moe.from_logits",
    "count_experts": "moe.count",
    "cap_logits": "elementwise.logits",
    "advance_seats": "sampling.seat_state",
    "sample": "sampling.sample",
    "sample_shard": "sampling.shard",
    "best_of_shards": "sampling.shard",
    "sample_limited_shards": "sampling.shard_limits",
    "count_tokens": "sampling.edits",
    "propose_ngrams": "speculative.ngram",
    "rejection_sample": "speculative.rejection",
    "rejection_sample_tree": "speculative.rejection",
    "token_logprobs": "sampling.logprobs",
    "widen_weight": "dense.narrow",
}

_HELPERS = {  # what arguments of these operations are made of, or with; no kernels, so no twins
    "BoundLayer": "attention.bound",
    "CascadePlan": "attention.cascade",
    "DecodeStep": "attention.bound",
    "Entry": "sampling.edits",
    "Groups": "dense.weight",
    "LogitEdits": "sampling.edits",
    "ROW_UNIT": "sampling.shard",
    "SHARD_UNIT": "sampling.shard",
    "TokenMasks": "sampling.masks",
    "Unnormed": "dense.medium",
    "WORKSPACE_SIZE": "attention.decode",
    "Weight": "dense.weight",
    "bind_layer": "attention.bound",
    "build_cos_sin_cache": "elementwise.rope_cache",
    "cascade_parts": "attention.cascade",
    "decode_short_keys": "attention.decode",
    "linear_workspace_size": "dense.linear",
    "make_logit_edits": "sampling.edits",
    "plan_cascade": "attention.cascade",
    "quantize_weight": "dense.narrow",
    "write_seat": "sampling.edits",
}

__all__ = sorted([*_HOME, *(f"{name}_ref" for name in _HOME), *_HELPERS])


def __getattr__(name: str) -> Any:
    home = _HELPERS.get(name) or _HOME.get(name.removesuffix("_ref"))
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return __all__

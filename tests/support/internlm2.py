"""InternLM 2 is Llama under other names: a Llama's weights as its own code would save them.

It keeps the queries of a key head, that key and that value together in one projection, group by group.
"""

import torch

_NAMES = {
    "model.embed_tokens": "model.tok_embeddings",
    "lm_head": "output",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}


def internlm2_tensors(llama: dict[str, torch.Tensor], heads: int, kv_heads: int) -> dict[str, torch.Tensor]:
    """The state of a Llama under InternLM 2's names, in its layout."""
    tensors = {}
    for name, tensor in llama.items():
        if ".k_proj." in name or ".v_proj." in name:
            continue
        if ".q_proj." in name:
            parts = [llama[name.replace(".q_proj.", f".{part}_proj.")] for part in "qkv"]
            groups = [part.unflatten(0, (kv_heads, -1, len(tensor) // heads)) for part in parts]
            tensors[name.replace("self_attn.q_proj", "attention.wqkv")] = torch.cat(groups, 1).flatten(0, 2)
            continue
        for theirs, ours in _NAMES.items():
            name = name.replace(theirs, ours)
        tensors[name] = tensor.clone()
    return tensors

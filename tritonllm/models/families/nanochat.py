"""NanoChat: norms without weights, also of the embeddings and of the heads after a rotation that turns backwards."""

import dataclasses
from typing import Any

from tritonllm.layers.norm import NormSpec
from tritonllm.models.config_reader import ConfigReader
from tritonllm.models.families.common import Family, always, attention, head_size, mlp, same_layers
from tritonllm.models.families.llama import COMMON
from tritonllm.models.weight_names import WeightNames


def _nanochat(config: ConfigReader) -> dict[str, Any]:
    norm, bias = NormSpec(kind="rms", eps=config.epsilon("rms_norm_eps"), weight=False), config.flag("attention_bias")
    rope = dataclasses.replace(config.rope(head_size(config)), backwards=True)
    attends = attention(config, rope=rope, qk_norm=norm, qk_norm_after_rope=True, qkv_bias=bias, o_bias=bias)
    return {
        "norm": norm,
        "embedding_norm": True,
        "layers": same_layers(config, attends, mlp(config, gated=False)),
        "logit_softcap": config.cap("final_logit_softcapping"),
    }


FAMILIES: dict[str, Family] = {
    "NanoChatForCausalLM": Family(
        model_type="nanochat",
        axes=_nanochat,
        names=always(WeightNames(up=("mlp.fc1",), down="mlp.fc2")),
        defaults={
            **COMMON,
            "intermediate_size": 8192,
            "hidden_act": "relu2",
            "max_position_embeddings": 2048,
            "final_logit_softcapping": 15.0,
            "eos_token_id": 1,
        },
        reads=frozenset({"final_logit_softcapping"}),
    ),
}

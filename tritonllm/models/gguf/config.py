"""What a GGUF file says of its model, as the ``config.json`` of the same model in Hugging Face's format."""

import struct
from pathlib import Path
from typing import Any

from tritonllm.models.gguf.families import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS, family_of
from tritonllm.models.gguf.header import GGUFHeader, GGUFTensor, read_header, shards

# Tokens that end a turn by their text, as llama.cpp looks for them: many files name one end of a text only.
_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>", "<|return|>", "<|call|>")
CONTROL = 3  # among the types of tokens
_DTYPES = {0: "float32", 1: "float16"}  # by general.file_type; the rest are blocks of integers, or bfloat16
_GEMMA2_27B, _GEMMA3_27B = 46, 62  # layers of the models whose scores are scaled by their width; the files do not say


def read_gguf_config(path: Path) -> dict[str, Any]:
    """The fields of ``config.json`` for the model of which ``path`` is a file.

    Raises:
        ValueError: a file is absent, damaged or truncated, of an architecture that is not supported, or says too little
            or something that is not supported.
    """
    headers = [read_header(file) for file in shards(path)]
    family = family_of(headers[0])
    return {"architectures": [family.architecture], **_Metadata(headers).fields(family.architecture)}


class _Metadata:
    """Fields of a configuration, from the first file's metadata and the tensors of all."""

    def __init__(self, headers: list[GGUFHeader]) -> None:
        self._path, self._values = headers[0].path, headers[0].metadata
        self._tensors = {name: (header.path, t) for header in headers for name, t in header.tensors.items()}
        self._arch = self._values["general.architecture"]

    def fields(self, architecture: str) -> dict[str, Any]:
        heads, hidden = self._need("attention.head_count"), self._need("embedding_length")
        head = self._get("attention.key_length") or self._get("rope.dimension_count") or hidden // max(1, heads)
        found = {
            "vocab_size": self._rows("token_embd.weight"),
            "hidden_size": hidden,
            "intermediate_size": self._get("feed_forward_length", 1),
            "num_hidden_layers": self._need("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._get("attention.head_count_kv", heads),
            "head_dim": head,
            "max_position_embeddings": self._need("context_length"),
            "rms_norm_eps": self._need("attention.layer_norm_rms_epsilon"),
            "rope_theta": self._get("rope.freq_base", 10000.0),
            "rope_scaling": self._rope_scaling(),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "bos_token_id": self._values.get("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self._ends(),
            "torch_dtype": self._dtype(),
        }
        return {**found, **getattr(self, f"_{self._arch.replace('-', '_')}")(found)}

    def _dtype(self) -> str:
        kind = self._values.get("general.file_type")
        return _DTYPES.get(kind, "bfloat16") if isinstance(kind, int) else "bfloat16"

    def _get(self, key: str, default: Any = None) -> Any:
        """A number of the architecture; of one for each layer, which are all equal, one."""
        value = self._values.get(f"{self._arch}.{key}", default)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise ValueError(f"{self._path}: {self._arch}.{key} differs between layers, which is not supported")
            value = value[0]
        if value is not None and (not isinstance(value, int | float) or isinstance(value, bool)):
            raise ValueError(f"{self._path}: {self._arch}.{key} is {value!r}, not a number; convert the model again")
        return value

    def _need(self, key: str) -> Any:
        value = self._get(key)
        if value is None:
            raise ValueError(f"{self._path}: {self._arch}.{key} is missing; convert the model again")
        return value

    def _tensor(self, name: str) -> tuple[Path, GGUFTensor]:
        if name not in self._tensors:
            raise ValueError(f"{self._path}: tensor {name} is missing; the files are incomplete")
        return self._tensors[name]

    def _rows(self, name: str) -> int:
        return self._tensor(name)[1].shape[0]

    def _ends(self) -> list[int]:
        """The ids that end an output."""
        said = [self._values.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
        ids = [token for token in said if isinstance(token, int)]
        lists = (self._values.get(f"tokenizer.ggml.{kind}") for kind in ("tokens", "token_type"))
        tokens, kinds = (values if isinstance(values, list) else [] for values in lists)
        special = {token: i for i, (token, kind) in enumerate(zip(tokens, kinds, strict=False)) if kind == CONTROL}
        ends = [end for end in _ENDS if end in special and not (end == "<|end|>" and "<|return|>" in special)]
        return list(dict.fromkeys([*ids, *(special[end] for end in ends)]))

    def _rope_scaling(self) -> dict[str, Any] | None:
        length = self._get("rope.scaling.original_context_length") or self._need("context_length")
        trained = {"original_max_position_embeddings": length}
        if ROPE_FACTORS in self._tensors:  # Llama 3.1's rule, as what it comes to
            factors = self._floats(ROPE_FACTORS)
            each = {"short_factor": factors, "long_factor": factors}
            return {"rope_type": "longrope", **each, "attention_factor": 1.0, **trained}
        if LONG_FACTORS in self._tensors:
            each = {"short_factor": self._floats(SHORT_FACTORS), "long_factor": self._floats(LONG_FACTORS)}
            factor = self._get("rope.scaling.attn_factor")
            known = {} if factor is None else {"attention_factor": factor}
            return {"rope_type": "longrope", **each, **known, **trained}
        kind = self._values.get(f"{self._arch}.rope.scaling.type", "none")
        if kind == "none":
            return None
        if kind not in ("linear", "yarn"):
            raise ValueError(f"{self._path}: {self._arch}.rope.scaling.type {kind!r} without factors is not supported")
        scaling = {"rope_type": kind, "factor": self._need("rope.scaling.factor")}
        return scaling if kind == "linear" else {**scaling, **trained}

    def _floats(self, name: str) -> list[float]:
        path, tensor = self._tensor(name)
        if tensor.kind != "F32" or len(tensor.shape) != 1:
            raise ValueError(f"{path}: tensor {name} must be a row of F32, got {tensor.kind} {list(tensor.shape)}")
        with path.open("rb") as file:
            file.seek(tensor.begin)
            return list(struct.unpack(f"<{tensor.shape[0]}f", file.read(tensor.num_bytes)))

    def _llama(self, found: dict[str, Any]) -> dict[str, Any]:
        if self._get("expert_count"):
            return self._experts("num_local_experts") | {"sliding_window": None}
        return {"attention_bias": "blk.0.attn_q.bias" in self._tensors}

    def _qwen2(self, found: dict[str, Any]) -> dict[str, Any]:
        return {}

    _qwen3 = _qwen2

    def _qwen3moe(self, found: dict[str, Any]) -> dict[str, Any]:
        inner = self._need("expert_feed_forward_length")
        return {**self._experts("num_experts"), "moe_intermediate_size": inner, "norm_topk_prob": True}

    def _experts(self, count: str) -> dict[str, Any]:
        return {count: self._need("expert_count"), "num_experts_per_tok": self._need("expert_used_count")}

    def _phi3(self, found: dict[str, Any]) -> dict[str, Any]:
        head = max(1, found["hidden_size"] // max(1, found["num_attention_heads"]))
        return {
            "head_dim": head,
            "partial_rotary_factor": (self._get("rope.dimension_count") or head) / head,
            "original_max_position_embeddings": self._get("rope.scaling.original_context_length"),
            "sliding_window": self._get("attention.sliding_window") or None,
        }

    def _gemma(self, found: dict[str, Any]) -> dict[str, Any]:
        wide = self._values.get("general.file_type") != 0  # float16 is too small for this family's activations
        return {"hidden_act": "gelu_pytorch_tanh"} | ({"torch_dtype": "bfloat16"} if wide else {})

    def _gemma2(self, found: dict[str, Any]) -> dict[str, Any]:
        return self._gemma(found) | {
            "query_pre_attn_scalar": self._scores_by(_GEMMA2_27B, found),
            "sliding_window": self._need("attention.sliding_window"),
            "attn_logit_softcapping": self._get("attn_logit_softcapping", 50.0),
            "final_logit_softcapping": self._get("final_logit_softcapping", 30.0),
        }

    def _gemma3(self, found: dict[str, Any]) -> dict[str, Any]:
        return self._gemma(found) | {
            "query_pre_attn_scalar": self._scores_by(_GEMMA3_27B, found),
            "sliding_window": self._need("attention.sliding_window"),
            "rope_theta": self._get("rope.freq_base", 1000000.0),
            "rope_local_base_freq": self._get("rope.freq_base_swa", 10000.0),
            "final_logit_softcapping": self._get("final_logit_softcapping"),
        }

    def _scores_by(self, layers_of_widest: int, found: dict[str, Any]) -> int:
        if found["num_hidden_layers"] == layers_of_widest:
            return found["hidden_size"] // max(1, found["num_attention_heads"])
        return found["head_dim"]

    def _gpt_oss(self, found: dict[str, Any]) -> dict[str, Any]:
        more = {"intermediate_size": self._need("expert_feed_forward_length"), "attention_bias": True}
        scaling = found["rope_scaling"]
        if scaling is not None and scaling["rope_type"] == "yarn":
            more["rope_scaling"] = {**scaling, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
        return {**self._experts("num_local_experts"), **more, "sliding_window": self._need("attention.sliding_window")}

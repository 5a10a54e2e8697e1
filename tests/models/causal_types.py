"""What becomes of each causal text model type that transformers knows: a family here computes it, or transformers with
our attention, or it is refused.

``python tests/models/causal_types.py`` writes the table of docs/models.md anew. Each type is built tiny, from what its
configuration class has by default, and run: it is native if a family's logits are those of transformers. Nothing is
downloaded.
"""

import copy
import json
import re
import sys
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

sys.path.insert(0, str(Path(__file__).parents[1]))  # where it runs as a program

from support.compare import relative_error
from support.tiny_models import PagedRunner, PagedSequence, random_tokens, reference_logits

from tritonllm.models.decoder import Decoder
from tritonllm.models.loading import load_model, read_spec

DOC = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- tests/models/causal_types.py writes from here -->\n", "<!-- to here -->\n"
CLASSES: dict[str, str] = dict(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
NATIVE, THROUGH, REFUSED = "native", "through transformers", "refused"
LIMIT = 1e-4  # of the logits: a bias that is left out is 1e-2 off
VOCABULARY = 96
MOST_PARAMETERS = 20_000_000

# Sizes of a tiny model, by what configuration classes call them.
_SIZES: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads", "attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank"), 32),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 16),
    **dict.fromkeys(("num_key_value_heads", "num_experts_per_tok"), 2),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "rotary_dim": 8,
}
# What else a type's class asks for so that it can be tiny.
_MORE: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "dots3_note_text": {"num_key_value_heads": 4},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots1": {"n_shared_experts": 1, "num_key_value_heads": 4},
    "gemma3n_text": {
        "num_hidden_layers": 10,
        "num_kv_shared_layers": 4,
        "intermediate_size": [96] * 10,
        "vocab_size_per_layer_input": VOCABULARY,
    },
    "gemma4_text": {"vocab_size_per_layer_input": VOCABULARY},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},  # those of published models
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mimo_v2_flash": {"head_dim": 24},  # of which a third rotates
    "mamba2": {"num_heads": 8},
    "llama4_text": {"num_experts_per_tok": 1},
    "zaya": {"num_experts_per_tok": 1},
}
# Why a type is refused, in the words of the table: the first that is found in the error.
_REASONS: dict[str, str] = {
    r"as in latent attention|different \(heads, key size, value size\)": "keys and values of different sizes",
    r"indexed_attention|compressed": "attention to keys that an indexer chooses",
    r"a window \(": "layers that keep a state instead of keys and values",
    r"attention interface": "attention that does not go through transformers' interface",
    r"softmax attention once": "layers that attend twice or not at all, or run more than once",
    r"per-layer attribute": "heads that differ between layers",
    r"parameters are left|cannot be built": "not tried: its class cannot be made small",
}


def text_types() -> list[str]:
    """Types of causal models of text: no encoders with an output projection, and none that read more than text."""
    others = {"bert-generation", "moshi", "trocr"}  # decoders of something else, which are in no such list
    for name in ("MASKED_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ"):
        others |= set(getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES"))
    others |= set(modeling_auto.MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING_NAMES)
    return sorted(kind for kind in CLASSES if kind not in others and not kind.endswith("_assistant"))


def tiny(kind: str) -> PreTrainedConfig:
    """The type's default configuration with small sizes, as many of them as the class takes."""
    config_class = CONFIG_MAPPING[kind]
    default = config_class().to_dict()
    known = {*default, *config_class.attribute_map}
    sizes: dict[str, Any] = {name: size for name, size in _SIZES.items() if name in known}
    if default.get("pad_token_id") is not None:
        sizes["pad_token_id"] = 0  # a place of the small vocabulary
    return config_class(**{**sizes, **_MORE.get(kind, {})})


def build(config: PreTrainedConfig, kind: str) -> PreTrainedModel:
    """transformers' model with random weights: larger than those of a fresh one, norms and biases, too."""
    torch.manual_seed(0)
    config._attn_implementation = "eager"
    model_class = getattr(transformers, CLASSES[kind])
    with torch.device("meta"):
        parameters = sum(p.numel() for p in model_class(copy.deepcopy(config)).parameters())
    if parameters > MOST_PARAMETERS:
        raise ValueError(f"{parameters / 1e6:.0f} million parameters are left")
    model = model_class(config).eval()
    for p in model.parameters():
        if p.is_floating_point() and p.dim() > 1:
            p.data.normal_(0.0, p.shape[-1] ** -0.5)
        elif p.is_floating_point():
            p.data.add_(torch.randn(p.shape), alpha=0.1)
    return model


def judge(kind: str) -> str:
    """What becomes of a type, in the words of the table."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return _run(kind, Path(folder))
        except ValueError as error:
            found = (words for pattern, words in _REASONS.items() if re.search(pattern, str(error)))
            return f"{REFUSED}: {next(found, None) or _said(error)}"


def _said(error: ValueError) -> str:
    """What is behind the general words of an error, without what is in brackets."""
    words = str(error).split("\n")[0].rpartition(" either: ")[2].removesuffix("(see docs/models.md)")
    return re.sub(r" \([^)]*\)|, got .*", "", words).strip()


def _run(kind: str, folder: Path) -> str:
    theirs = None
    try:
        config = tiny(kind)
        theirs = build(config, kind)
        theirs.save_pretrained(folder)
    except Exception as error:  # whatever stops transformers; a bad configuration may be refused for another reason
        default = CONFIG_MAPPING[kind]().to_dict()
        (folder / "config.json").write_text(json.dumps({**default, "architectures": [CLASSES[kind]]}, default=str))
        read_spec(folder)
        raise ValueError(f"cannot be built: {error}") from error
    sizes: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu"), "max_model_len": 64}
    ours: Any = load_model(folder, read_spec(folder), **sizes)
    tokens = random_tokens(20, VOCABULARY, seed=1)
    found = PagedRunner(ours).prefill(PagedSequence(), tokens, [13, 7])
    error_of_logits = relative_error(found, reference_logits(theirs, tokens))
    if not error_of_logits < LIMIT:
        raise AssertionError(f"{kind}: the logits are {error_of_logits:.2g} from those of transformers")
    return NATIVE if isinstance(ours, Decoder) else THROUGH


def judge_all(kinds: Iterable[str]) -> dict[str, str]:
    return {kind: judge(kind) for kind in kinds}


def table(verdicts: Mapping[str, str]) -> str:
    """The table of docs/models.md: a row for each that may become of a type, most types first."""
    ways = sorted(set(verdicts.values()), key=lambda way: (way != NATIVE, way.startswith(REFUSED), way))
    rows = [f"| of {len(verdicts)} types of transformers {transformers.__version__} | |", "|---|---|"]
    for way in ways:
        kinds = [f"`{kind}`" for kind in sorted(verdicts) if verdicts[kind] == way]
        rows.append(f"| {way}: {len(kinds)} | {', '.join(kinds)} |")
    return "\n".join(rows) + "\n"


def written() -> str:
    """The table that docs/models.md has."""
    return DOC.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]


def read_table(text: str) -> dict[str, str]:
    """What becomes of each type, as a table says."""
    rows = re.findall(r"^\| (.*): \d+ \| (.*) \|$", text, flags=re.MULTILINE)
    return {kind: way for way, kinds in rows for kind in re.findall(r"`([^`]+)`", kinds)}


def main() -> None:
    before, _, rest = DOC.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    DOC.write_text(before + BEGIN + table(judge_all(text_types())) + END + after, encoding="utf-8")


if __name__ == "__main__":
    main()

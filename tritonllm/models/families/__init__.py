"""Supported architectures as data: ``config.json`` -> :class:`ModelSpec`, and where each checkpoint tensor goes.

Field names and defaults are those of Hugging Face's configuration files, of transformers 4 (``rope_theta``,
``rope_scaling``, ``torch_dtype``) and of transformers 5 (``rope_parameters``, ``dtype``). A field that would change
the computation in a way the decoder does not know is an error: a wrong model that runs is worse than none.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from tritonllm.models import text_part, weight_names
from tritonllm.models.config_reader import ConfigReader
from tritonllm.models.families import (
    alibi,
    apertus,
    aria,
    bert,
    cohere_compass,
    cohere_moe,
    dbrx,
    doge,
    ernie,
    exaone,
    experts,
    gemma,
    gemma4,
    gpt,
    gpt_neo,
    granite,
    granite_moe,
    hunyuan,
    internlm,
    kolibri,
    laguna,
    llama,
    llama4,
    mimo,
    ministral,
    nanochat,
    nemotron,
    olmo,
    phimoe,
    sigmoid_experts,
    starcoder,
    waves,
)
from tritonllm.models.families.common import Family
from tritonllm.models.families.heads import BY_SUFFIX, FamilyHead
from tritonllm.models.formats.registry import format_of, quantization_of
from tritonllm.models.slots import Slot
from tritonllm.models.spec import ModelSpec

Config = Mapping[str, Any]

_DENSE = (llama, ministral, granite, apertus, olmo, exaone, internlm, gemma, nemotron, gpt, gpt_neo, starcoder, alibi)
_OTHERS = (cohere_compass, nanochat, gemma4, waves, doge)
_EXPERTS = (experts, sigmoid_experts, granite_moe, cohere_moe, llama4, aria, dbrx, laguna, kolibri, mimo, phimoe)
_FILES = (*_DENSE, *_OTHERS, *_EXPERTS, ernie, hunyuan, bert)
FAMILIES: dict[str, Family] = {name: family for file in _FILES for name, family in file.FAMILIES.items()}
_ALIASES = {alias: name for name, family in FAMILIES.items() for alias in family.aliases}
_GENERATES = ("ForCausalLM", "LMHeadModel")  # ends of their names
_CLASSIFIES = "ForSequenceClassification"

# Fields that some architectures compute with, and the values at which they do nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "use_mrope": (None, False),
    "alibi": (None, False),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "use_bidirectional_attention": (None, False),
    "add_cross_attention": (None, False),
    "clip_qkv": (None,),
    "apply_residual_connection_post_layernorm": (None, False),
    "use_cla": (None, False),
    "moe_layer_num_skipped": (None, 0),
    "sparse_config": (None,),
    "logit_scale": (None, 1, 1.0),
    "embedding_multiplier": (None, 1, 1.0),
    "residual_multiplier": (None, 1, 1.0),
    "output_vocab_size": (None,),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
}


def spec_from_config(config: Config) -> ModelSpec:
    """Read the contents of a ``config.json``.

    Raises:
        ValueError: an architecture that is not supported, a field missing or with a bad value, or a field that would
            change the computation in a way the decoder does not know.
    """
    text_of, alone = "", None if _known(config) else _text_alone(config)
    if alone is not None:
        text_of, config = _named(config), alone
    architecture = _architecture(config)
    family, head = _find(architecture)
    if (quantization := quantization_of(config)) is not None:
        format_of(quantization)
    for name, neutral in _NEUTRAL.items():
        if name not in family.reads and config.get(name) not in neutral:
            raise ValueError(f"{architecture} with {name}={config[name]!r} is not supported")
    reader = ConfigReader(config, family.defaults, family.renames)
    vocab_size, hidden_size = reader.size("vocab_size"), reader.size("hidden_size")
    axes = family.axes(reader)
    if head is not None:
        axes = {**axes, "logits": False, "logit_bias": False, "head": None if head.spec is None else head.spec(reader)}
    fields = {
        "architecture": architecture,
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "max_position_embeddings": max(reader.longest(layer.attention.rope) for layer in axes["layers"]),
        "tie_word_embeddings": reader.flag("tie_word_embeddings"),
        "eos_token_ids": reader.token_ids("eos_token_id"),
        "dtype": reader.dtype(),
        "text_of": text_of,
    }
    return ModelSpec(**{**fields, **axes})


def is_supported(config: Config) -> bool:
    """Whether there is a family for this configuration's architecture, or for the text model in it."""
    return _known(config) is not None or _text_alone(config) is not None


def _text_alone(config: Config) -> Config | None:
    """The configuration of the text model of a checkpoint of more than text, if there is a family for it."""
    if not text_part.has_text_part(config):
        return None
    by_type = {family.model_type: name for name, family in FAMILIES.items() if name.endswith(_GENERATES)}
    return text_part.text_part(config, by_type)


def _named(config: Config) -> str:
    """What a configuration calls its architecture."""
    return ", ".join(config.get("architectures") or []) or str(config.get("model_type"))


def _known(config: Config) -> str | None:
    named = config.get("architectures") or [
        name for name, family in FAMILIES.items() if family.model_type == config.get("model_type")
    ]
    named = [_own_name(name, config.get("model_type")) for name in named]
    return next((name for name in (_ALIASES.get(name, name) for name in named) if _homes(name)), None)


def _own_name(name: str, model_type: Any) -> str:
    """An architecture as its family calls it, where transformers 5 calls it as another one."""
    for own, family in FAMILIES.items():
        if family.written_as and family.model_type == model_type:
            ours, theirs = (_without_end(known) for known in (own, family.written_as))
            return ours + name.removeprefix(theirs) if name.startswith(theirs) else name
    return name


def _without_end(name: str) -> str:
    for end in _GENERATES:
        name = name.removesuffix(end)
    return name


def _homes(name: str) -> list[tuple[Family, FamilyHead | None]]:
    """The family of an architecture, and what it has in the place of the family's output projection; none or one."""
    if name in FAMILIES:
        return [(FAMILIES[name], None)]
    homes: list[tuple[Family, FamilyHead | None]]
    homes = [(family, family.heads[name]) for family in FAMILIES.values() if name in family.heads]
    for suffix, head in BY_SUFFIX.items():
        others = [name.removesuffix(suffix) + end for end in _GENERATES if name.endswith(suffix)]
        others = [_ALIASES.get(other, other) for other in others]
        homes += [(FAMILIES[other], head) for other in others if other in FAMILIES]
    return homes[:1]


def _find(name: str) -> tuple[Family, FamilyHead | None]:
    return _homes(name)[0]


def as_classifier(config: Config) -> Config:
    """The configuration of the classifier over a causal model's layers; others are as they were."""
    named = [str(name) for name in config.get("architectures") or []]
    for end in _GENERATES:
        named = [name.removesuffix(end) + _CLASSIFIES if name.endswith(end) else name for name in named]
    return {**config, "architectures": named} if named else config


def _architecture(config: Config) -> str:
    known = _known(config)
    if known is None:
        raise ValueError(f"architecture {_named(config)} is not supported; supported: {', '.join(sorted(FAMILIES))}")
    return known


def weight_map(spec: ModelSpec) -> dict[str, Slot]:
    """Checkpoint tensor name -> :class:`Slot`, for every tensor that a checkpoint of ``spec`` may have.

    Experts have two spellings, one by one and stacked, and some families have others in transformers' memory than in
    files. The first spelling is that of files.
    """
    family, head = _find(spec.architecture)
    places: dict[str, Slot] = {}
    for spelling in filter(None, (family.names, family.in_memory)):
        names = spelling(spec)
        if head is not None:
            names = dataclasses.replace(names, head=head.names, head_norms=head.norm_names)
        for name, slot in weight_names.weight_map(spec, names).items():
            places.setdefault(name, slot)
    return places


def _of_shared_keys(spec: ModelSpec, family: Family) -> set[str]:
    """What files may have of layers that read the keys of others: projections and norms that nothing computes with."""
    names, found = family.names(spec), set[str]()
    for place, layer in enumerate(spec.layers):
        if not layer.attention.own_keys:
            ends = [*names.qkv[1:], names.k_norm]
            found |= {f"{names.layer.format(place)}.{end}.{kind}" for end in ends for kind in ("weight", "bias")}
    if spec.text_of:
        found |= {other for name in found for other in text_part.names_in_files(name)}
    return found


def is_extra(spec: ModelSpec, name: str) -> bool:
    """A tensor of the layers that draft tokens for this model, such as GLM-4.5's, and are not part of it."""
    family, _ = _find(spec.architecture)
    if name in _of_shared_keys(spec, family) or family.is_extra(spec, name):
        return True
    if name.startswith(family.extra_names) or (spec.text_of and text_part.is_of_a_tower(name)):
        return True
    layers = range(spec.num_layers, spec.num_layers + family.extra_layers)
    return any(name.startswith(f"{family.names(spec).layer.format(i)}.") for i in layers)

"""Classifiers, reward models and bare models: a family's architectures with something else for an output projection."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tritonllm.layers.head import DenseSpec, HeadSpec
from tritonllm.models.config_reader import ConfigReader

STEP_TAG = 151651  # <extra_0> of Qwen2.5-Math-PRM, behind each step of a solution
_OF_CROSS_ENCODERS: dict[str, Literal["none", "sigmoid"]] = {"Identity": "none", "Sigmoid": "sigmoid"}


@dataclass(frozen=True, kw_only=True)
class FamilyHead:
    """What an architecture has in the place of the output projection of its family.

    Attributes:
        spec: makes the head's description from the configuration; ``None``: there is nothing.
        names: what checkpoints call its dense layers.
        norm_names: and their norms, ``""`` where there is none.
    """

    spec: Callable[[ConfigReader], HeadSpec] | None = None
    names: tuple[str, ...] = ()
    norm_names: tuple[str, ...] = ()


def count_labels(config: ConfigReader) -> int:
    """``num_labels``, or as many as ``id2label`` has; 2 if neither is there."""
    names = config.get("id2label")
    return config.size_or("num_labels", len(names) if isinstance(names, Mapping) and names else 2)


def label_activation(config: ConfigReader, labels: int) -> Literal["none", "sigmoid", "softmax"]:
    """The activation of a classifier, as vLLM has it: by ``problem_type``, by what a cross-encoder's files say, and
    else by the number of labels."""
    kinds: dict[str, Literal["none", "sigmoid", "softmax"]] = {
        "regression": "none",
        "multi_label_classification": "sigmoid",
        "single_label_classification": "softmax",
    }
    problem = config.get("problem_type")
    if problem is not None:
        if problem not in kinds:
            raise ValueError(f"config.json: problem_type must be one of {', '.join(kinds)}, got {problem!r}")
        return kinds[problem]
    nested: Any = config.get("sentence_transformers")
    given = nested.get("activation_fn") if isinstance(nested, Mapping) else None
    given = given or config.get("sbert_ce_default_activation_function")
    if given is not None:
        name = str(given).rpartition(".")[2]
        if name not in _OF_CROSS_ENCODERS:
            raise ValueError(f"config.json: activation_fn {given!r} is not one of {', '.join(_OF_CROSS_ENCODERS)}")
        return _OF_CROSS_ENCODERS[name]
    return "sigmoid" if labels == 1 else "softmax"


def _score(config: ConfigReader) -> HeadSpec:
    """One product with the last token, without a bias: all decoders of transformers."""
    hidden, labels = config.size("hidden_size"), count_labels(config)
    if config.size_or("word_embed_proj_dim", hidden) != hidden:
        raise ValueError("config.json: a classifier with word_embed_proj_dim other than hidden_size is not supported")
    dense = DenseSpec(in_features=hidden, out_features=labels)
    return HeadSpec(dense=(dense,), pooling="LAST", activation=label_activation(config, labels))


def _two_layers(config: ConfigReader, labels: int) -> tuple[DenseSpec, DenseSpec]:
    hidden = config.size("hidden_size")
    first = DenseSpec(in_features=hidden, out_features=hidden, bias=True, activation="relu")
    return first, DenseSpec(in_features=hidden, out_features=labels, bias=True)


def _qwen2_reward(config: ConfigReader) -> HeadSpec:
    return HeadSpec(dense=_two_layers(config, 1), pooling="LAST", activation="none")


def _qwen2_process_reward(config: ConfigReader) -> HeadSpec:
    tag = STEP_TAG if config.size("vocab_size") > STEP_TAG else None
    return HeadSpec(dense=_two_layers(config, 2), pooling="LAST", activation="softmax", step_tag_id=tag)


def _v_head(config: ConfigReader) -> HeadSpec:
    dense = DenseSpec(in_features=config.size("hidden_size"), out_features=1)
    return HeadSpec(dense=(dense,), pooling="LAST", activation="none")


# Ends of the names of architectures, for each family that generates.
BY_SUFFIX: dict[str, FamilyHead] = {
    "ForSequenceClassification": FamilyHead(spec=_score, names=("score",)),
    "Model": FamilyHead(),
}
QWEN2_REWARDS = {
    "Qwen2ForRewardModel": FamilyHead(spec=_qwen2_reward, names=("score.0", "score.2")),
    "Qwen2ForProcessRewardModel": FamilyHead(spec=_qwen2_process_reward, names=("score.0", "score.2")),
}
INTERNLM2_REWARDS = {"InternLM2ForRewardModel": FamilyHead(spec=_v_head, names=("v_head",))}

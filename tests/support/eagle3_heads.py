"""EAGLE-3 heads for tests: random ones, and some that must be right, with a model of one text for them."""

import math
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from support.eagle_heads import STEP, certain_model, head_config, layer_tensors
from support.tiny_tokenizer import VOCAB_SIZE
from tritonllm.models.eagle_files import write_eagle_head

DRAFTED = 240  # of 320 tokens


def config_of(folder: Path, **changes: Any) -> dict[str, Any]:
    sizes: dict[str, Any] = {"draft_vocab_size": DRAFTED, "max_position_embeddings": 256, "num_key_value_heads": 4}
    return head_config(folder, **{"architectures": ["LlamaForCausalLMEagle3"], **sizes, **changes})


def some_tokens(count: int = DRAFTED, seed: int = 0) -> torch.Tensor:
    """In ascending order, as published heads have them."""
    return torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))[:count].sort().values


def tables(tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """What files say of the drafted tokens."""
    drafted = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
    drafted[tokens] = True
    return {"d2t": tokens - torch.arange(len(tokens)), "t2d": drafted}


def head_tensors(config: dict[str, Any], target: int | None = None, scale: float = 0.3) -> dict[str, torch.Tensor]:
    """Under published names."""
    hidden, generator = config["hidden_size"], torch.Generator().manual_seed(0)
    tensors = layer_tensors(config, generator, scale, "midlayer", 2 * hidden)
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    for name in (*(f"midlayer.{norm}" for norm in norms), "norm"):
        tensors[f"{name}.weight"] = 1 + 0.2 * torch.randn(hidden, generator=generator)
    tensors["fc.weight"] = scale * torch.randn(hidden, 3 * (target or hidden), generator=generator)
    tensors["lm_head.weight"] = torch.randn(config["draft_vocab_size"], hidden, generator=generator)
    return {**tensors, **tables(some_tokens(config["draft_vocab_size"]))}


def write(config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    folder = Path(mkdtemp(prefix="eagle3-"))
    write_eagle_head(folder, config, tensors)
    return folder


@cache
def circle() -> tuple[torch.Tensor, torch.Tensor]:
    """``[VOCAB_SIZE, 64]``: embeddings as points of circles, on which a step is a rotation, and a constant before them;
    and that rotation, which takes each embedding to the next token's."""
    frequencies = torch.randperm(VOCAB_SIZE // 2 - 1, generator=torch.Generator().manual_seed(2))[:31] + 1
    each = 2 * math.pi * frequencies / VOCAB_SIZE
    angles = torch.arange(VOCAB_SIZE)[:, None] * each
    embed = torch.cat([torch.ones(VOCAB_SIZE, 1), angles.cos(), angles.sin(), torch.zeros(VOCAB_SIZE, 1)], 1)
    cos, sin = (STEP * each).cos(), (STEP * each).sin()
    turn, at = torch.eye(64), torch.arange(31) + 1
    turn[at, at] = turn[at + 31, at + 31] = cos
    turn[at, at + 31], turn[at + 31, at] = -sin, sin
    return embed, turn


def knowing_head(model: Path, tokens: torch.Tensor, by_token: bool, noise: float = 0.0) -> Path:
    """A head that gives its token's embedding, as the model does, and has the model's output projection.

    Args:
        tokens: that it drafts.
        by_token: each place looks at its own token alone, and takes the feature away again. Otherwise it turns the
            feature, which is the embedding of the token before, and what it has turned is the next feature.
        noise: scale of what is added to all weights.
    """
    embed, turn = circle()
    size = float(embed[0].square().mean().sqrt())  # of all embeddings
    config = config_of(model, draft_vocab_size=len(tokens), intermediate_size=64)
    tensors = {name: torch.zeros_like(tensor) for name, tensor in head_tensors(config).items()}
    for name in tensors:
        if "norm" in name:
            tensors[name] += 1
    if by_token:
        for name in ("q_proj", "k_proj"):  # the constant, so that the rotation alone decides: nothing is nearer
            tensors[f"midlayer.self_attn.{name}.weight"].view(4, 16, 128)[:, :8, 0] = 15.0
        tensors["midlayer.self_attn.v_proj.weight"] += size * torch.cat([torch.eye(64), -torch.eye(64)], 1)
        tensors["midlayer.self_attn.o_proj.weight"] += torch.eye(64)
    else:
        tensors["midlayer.mlp.gate_proj.weight"][:, 0] = size  # 1, of which SiLU is a known number
        tensors["midlayer.mlp.up_proj.weight"] += torch.eye(64)
        tensors["midlayer.mlp.down_proj.weight"] += size * (turn - torch.eye(64)) / float(F.silu(torch.ones(())))
        tensors["fc.weight"][:, :64] += torch.eye(64)  # of a model whose layers add nothing
    tensors["lm_head.weight"] += load_file(model / "model.safetensors")["lm_head.weight"][tokens]
    generator = torch.Generator().manual_seed(5)
    noisy = {name: t + noise * torch.randn(t.shape, generator=generator) for name, t in tensors.items()}
    return write(config, {**noisy, **tables(tokens)})


@cache
def circular_model(**options: float) -> Path:
    return certain_model(circle()[0].clone(), **options)

"""EAGLE-3 heads for tests: random ones, and some that must be right, with a model of one text for them."""

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from support.eagle_heads import STEP, certain_model, head_config, layer_tensors
from support.engines import tiny_checkpoint
from support.tiny_tokenizer import VOCAB_SIZE
from tritonllm.models.checkpoint import read_config
from tritonllm.models.eagle_files import write_eagle_head

DRAFTED = 240  # of 320 tokens
READS = (2, 1, 0)  # the published choice for 3 layers: 2, L // 2, L - 3


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


@cache
def random_head(family: str = "llama", **changes: Any) -> Path:
    config = config_of(tiny_checkpoint(family), **changes)
    return write(config, head_tensors(config))


@cache
def likely_pair() -> tuple[Path, Path]:
    """A model of which much is known, and a head that knows much of that, though not all tokens."""
    model = circular_model(sharpness=0.4)
    return model, knowing_head(model, some_tokens(), by_token=True, noise=0.09)


def reference(
    model: Path,
    head: Path,
    tokens: Sequence[int],
    count: int,
    reads: Sequence[int] = READS,
    forced: Sequence[int] = (),
) -> tuple[list[int], list[torch.Tensor]]:
    """What a head drafts behind ``tokens`` and from which logits over its tokens, computed anew from the beginning in
    plain torch: pairs of each token and the feature of the place before, zeros for the first. Its first drafts are
    ``forced``."""
    target = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    config, parts = read_config(head), load_file(head / "model.safetensors")
    if "transformer_layer_config" in config:
        config = {"norm_before_residual": True, **config["transformer_layer_config"]}
    parts = {n.removeprefix("model.").replace("layers.0.", "midlayer."): tensor for n, tensor in parts.items()}
    table = parts.get("embed_tokens.weight", target.get_input_embeddings().weight)
    layer = {name.removeprefix("midlayer."): t for name, t in parts.items() if name.startswith("midlayer.")}
    size, heads, kv_heads = config["head_dim"], config["num_attention_heads"], config["num_key_value_heads"]

    def norm(x, weight):
        return weight * x * (x.square().mean(-1, keepdim=True) + config["rms_norm_eps"]).rsqrt()

    def attend(x):
        place = torch.arange(len(x))
        angles = place[:, None] / 10000.0 ** (torch.arange(0, size, 2) / size)
        cos, sin = (torch.cat([f, f], -1)[:, None] for f in (angles.cos(), angles.sin()))
        q, k, v = (F.linear(x, layer[f"self_attn.{n}_proj.weight"]).unflatten(-1, (-1, size)) for n in "qkv")
        q, k = (y * cos + torch.cat([-y[..., size // 2 :], y[..., : size // 2]], -1) * sin for y in (q, k))
        k, v = (y.repeat_interleave(heads // kv_heads, 1) for y in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * size**-0.5
        weights = scores.masked_fill(place > place[:, None], -torch.inf).softmax(-1)
        return F.linear(torch.einsum("hqk,khd->qhd", weights, v).flatten(1), layer["self_attn.o_proj.weight"])

    def run(embedded, features):
        normed = norm(features, layer["hidden_norm.weight"])
        residual = normed if config.get("norm_before_residual") else features
        x = residual + attend(torch.cat([norm(embedded, layer["input_layernorm.weight"]), normed], -1))
        y = norm(x, layer["post_attention_layernorm.weight"])
        gate, up = F.linear(y, layer["mlp.gate_proj.weight"]), F.linear(y, layer["mlp.up_proj.weight"])
        return x + F.linear(F.silu(gate) * up, layer["mlp.down_proj.weight"])

    known, logits = list(tokens), []
    with torch.no_grad():
        features = torch.zeros(1, config["hidden_size"])
        if len(tokens) > 1:
            states = target(torch.tensor([tokens[:-1]]), output_hidden_states=True).hidden_states
            seen = F.linear(torch.cat([states[place][0] for place in reads], -1), parts["fc.weight"])
            features = torch.cat([features, seen])
        for place in range(count):
            features = torch.cat([features, run(table[torch.tensor(known)], features)[-1:]])
            logits.append(F.linear(norm(features[-1], parts["norm.weight"]), parts["lm_head.weight"]))
            best = int(logits[-1].argmax())
            drafted = best + int(parts["d2t"][best]) if "d2t" in parts else best
            known.append(forced[place] if place < len(forced) else drafted)
    return known[len(tokens) :], logits

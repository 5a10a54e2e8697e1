"""What the tests of EAGLE heads of both kinds share: files, engines, and a look at the drafts."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from shutil import copytree
from tempfile import mkdtemp
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from support.engines import greedy, tiny_checkpoint, tiny_llm
from support.tiny_models import random_tokens
from support.tiny_tokenizer import VOCAB_SIZE
from tritonllm import LLM, SamplingParams
from tritonllm.engine.data.outputs import RequestOutput
from tritonllm.models.checkpoint import read_config
from tritonllm.models.eagle_files import write_eagle_head

FAMILIES = ["llama", "gemma2", "gpt2", "qwen3_moe"]
STEP = 7  # from a token to the one that follows it, in a model of one text
PROMPTS = [[3, 4, 5, 6, 7, 8] * 3, [9], list(range(3, 40)), [5, 5, 5, 5], random_tokens(30, VOCAB_SIZE, seed=1)]
KINDS = [
    greedy(24),
    SamplingParams(temperature=1.0, seed=5, max_tokens=24, ignore_eos=True, logprobs=1),
    SamplingParams(temperature=1.0, seed=6, top_p=0.9, max_tokens=20, frequency_penalty=0.5),
    SamplingParams(temperature=0.7, seed=7, max_tokens=17, stop=["e"]),
    SamplingParams(temperature=0.9, seed=8, n=3, max_tokens=11, ignore_eos=True),
]
ENGINES: list[dict[str, Any]] = [
    {},
    {"max_num_batched_tokens": 16},
    {"num_blocks": 22, "kv_offloading_size": 1 / 256},
    {"max_num_seqs": 3, "enable_prefix_caching": False},
]
# Most requests of a step with drafts, each step twice, and the engine: prompts that end inside of blocks, steps without
# drafts, and steps that run twice: what a step writes it may write again.
COURSES: list[tuple[int | None, bool, dict[str, Any]]] = [
    (None, False, {}),
    (1, False, {"max_num_batched_tokens": 13}),
    (1, True, {"enable_prefix_caching": False}),
    (None, False, {"block_size": 1, "num_blocks": 200}),
]


def head_config(folder: Path, **changes: Any) -> dict[str, Any]:
    said = read_config(folder)
    hidden = said["hidden_size"] if "hidden_size" in said else said["n_embd"]
    sizes = {"hidden_size": hidden, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1}
    limits = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0}
    return {**config, **sizes, **limits, "hidden_act": "silu", "head_dim": 16, **changes}


def layer_tensors(
    config: dict[str, Any], generator: torch.Generator, scale: float, layer: str = "layers.0", inputs: int | None = None
) -> dict[str, torch.Tensor]:
    """Random weights of a head's layer, under published names."""
    hidden, inner, size = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv, inputs = config["num_attention_heads"] * size, config["num_key_value_heads"] * size, inputs or hidden
    attention = {"q_proj": (q, inputs), "k_proj": (kv, inputs), "v_proj": (kv, inputs), "o_proj": (hidden, q)}
    mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    shapes = {f"{layer}.self_attn.{n}.weight": s for n, s in attention.items()}
    shapes |= {f"{layer}.mlp.{n}.weight": s for n, s in mlp.items()}
    return {name: scale * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def certain_model(embed: torch.Tensor, context: float = 0.02, sharpness: float = 1.0) -> Path:
    """A model in which a token decides the next one, ``STEP`` behind it.

    Args:
        embed: ``[VOCAB_SIZE, 64]``, its embeddings.
        context: scale of what the layers add.
        sharpness: scale of the logits.
    """
    model = Path(mkdtemp(prefix="certain-"))
    copytree(tiny_checkpoint("llama"), model, dirs_exist_ok=True)
    (file,) = model.glob("*.safetensors")
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor *= context
        if name == "model.norm.weight":
            tensor.fill_(1.0)
    projection = sharpness * embed.roll(STEP, 0).contiguous()
    tensors |= {"model.embed_tokens.weight": embed, "lm_head.weight": projection}
    save_file(tensors, file, metadata={"format": "pt"})
    (model / "config.json").write_text(json.dumps({**read_config(model), "tie_word_embeddings": False}))
    return model


def with_head(
    checkpoint: Path, head: Path, drafts: int = 3, most: int | None = None, method: str = "eagle", **kwargs: Any
) -> LLM:
    config = {"method": method, "model": str(head), "num_speculative_tokens": drafts, "adaptive": False}
    return tiny_llm(checkpoint, speculative_config={**config, "disable_by_batch_size": most}, **kwargs)


def texts(outputs: list[RequestOutput]) -> list[tuple[list[int], str, str | None]]:
    return [(list(c.token_ids), c.text, c.finish_reason) for output in outputs for c in output.outputs]


@cache
def greedy_texts(model: Path) -> list[tuple[list[int], str, str | None]]:
    """How plain decoding goes on with the prompts."""
    return texts(tiny_llm(model).generate(PROMPTS, greedy(24)))


@cache
def texts_of_kinds(model: Path, before: tuple[int, ...] = ()) -> list[tuple[list[int], str, str | None]]:
    """The same, each as its kind of request wants it, with these tokens before each prompt."""
    prompts = [[*before, *prompt] for prompt in PROMPTS]
    return texts(tiny_llm(model).generate(prompts, KINDS, use_tqdm=False))


def check_drafts(
    llm: LLM, prompts: list[list[int]], twice: bool, reference: Callable[[list[int], int], list[int]]
) -> None:
    """In every step: behind a prompt, behind rejected drafts and behind accepted ones, behind plain steps, chunks, and
    hits of the prefix cache, the second time all of them.

    Args:
        twice: each step runs again: what it writes it may write again.
        reference: so many drafts behind tokens.
    """
    drafter: Any = llm.engine._runner.drafts.drafter
    propose, follow = drafter.propose, drafter.follow
    seen: list[tuple[int, int, list[int]]] = []

    def noting(step: Any) -> None:
        propose(step)
        seen.extend(zip(step.ends.tolist(), step.ids[:, 0].tolist(), step.drafts.tolist(), strict=True))

    drafter.propose = noting
    if twice:
        drafter.follow = lambda *args: (follow(*args), follow(*args))
    params = [greedy(24), greedy(6)]
    found = texts(llm.generate(prompts, params))
    assert texts(llm.generate(prompts, params)) == found
    stats = llm.engine.stats
    assert (stats.prefix_cache_hit_tokens > 0) != twice
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    whole = [[*prompt, *text] for prompt, (text, _, _) in zip(prompts, found, strict=True)]
    checked = 0
    for end, last, drafts in seen:
        wanted = [draft for draft in drafts if draft >= 0]
        mine = [tokens for tokens in whole if end < len(tokens) and tokens[end] == last]
        if mine and wanted:  # else planned ahead, behind the end of the text
            assert wanted in [reference(tokens[: end + 1], len(wanted)) for tokens in mine]
            checked += 1
    assert checked >= 12


def eagle_tensors(config: dict[str, Any], scale: float = 0.3, seed: int = 0) -> dict[str, torch.Tensor]:
    """Under published names."""
    hidden, generator = config["hidden_size"], torch.Generator().manual_seed(seed)
    tensors = layer_tensors(config, generator, scale)
    tensors["layers.0.post_attention_layernorm.weight"] = 1 + 0.2 * torch.randn(hidden, generator=generator)
    tensors["fc.weight"] = scale * torch.randn(hidden, 2 * hidden, generator=generator)
    return tensors


@cache
def random_eagle_head(family: str = "llama") -> Path:
    folder = Path(mkdtemp(prefix="eagle-"))
    config = head_config(tiny_checkpoint(family))
    write_eagle_head(folder, config, eagle_tensors(config))
    return folder


@cache
def certain_pair() -> tuple[Path, Path]:
    """A model in which a token decides the next one by far, and a head that mostly knows it: ``fc`` passes the
    embedding on, with some of the states, and its layer adds a little."""
    embed = torch.randn(VOCAB_SIZE, 64, generator=torch.Generator().manual_seed(1))
    model, head = certain_model(embed), Path(mkdtemp(prefix="eagle-"))
    config = head_config(model)
    parts = eagle_tensors(config, scale=0.12)
    hidden = config["hidden_size"]
    parts["fc.weight"][:, :hidden] += torch.eye(hidden)
    write_eagle_head(head, config, {**parts, "embed_tokens.weight": embed})
    return model, head

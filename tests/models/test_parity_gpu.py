"""True shapes on a GPU: our kernels against transformers, both with the same seeded weights.

The weights are bfloat16 numbers in every copy of a model, so that in bfloat16 only the arithmetic differs from the
float32 reference. How far bfloat16 may be from it is not a constant of ours: transformers in bfloat16 makes the same
number of roundings or more, so its own error is the yardstick.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest
import torch
from support.compare import median_error, relative_error
from support.expert_choice import can_be_forced, experts_of, forced_on_ours
from support.mechanism_configs import MECHANISMS, MORE_MECHANISMS
from support.real_configs import LLAMA_3_1_8B, QWEN3_0_6B
from support.tiny_models import (
    PagedRunner,
    PagedSequence,
    build_reference,
    random_tokens,
    reference_logits,
    reference_state,
    tiny_config,
)
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.falcon import modeling_falcon

from tritonllm.layers.moe import MoESpec
from tritonllm.models.decoder import Decoder
from tritonllm.models.families import spec_from_config
from tritonllm.models.weights import dummy_weights

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": QWEN3_0_6B,
    "llama-3.1-8b-of-4-layers": {**LLAMA_3_1_8B, "num_hidden_layers": 4},
    **MECHANISMS,
    **MORE_MECHANISMS,
    "tiny-qwen3": tiny_config("qwen3", max_position_embeddings=512, tie_word_embeddings=True),
    "tiny-qwen3-moe": tiny_config("qwen3_moe", max_position_embeddings=512),
    "tiny-ernie4.5-moe": tiny_config("ernie4_5_moe", max_position_embeddings=512),
    "tiny-dbrx": tiny_config("dbrx", max_seq_len=512),
    "tiny-hunyuan": tiny_config("hunyuan_v1_dense", max_position_embeddings=512),
    "tiny-hunyuan-moe": tiny_config("hunyuan_v1_moe", max_position_embeddings=512),
    "tiny-nemotron": tiny_config("nemotron", max_position_embeddings=512),
    "tiny-gemma4": tiny_config("gemma4_text", max_position_embeddings=512),
    "tiny-laguna": tiny_config("laguna", max_position_embeddings=512),
    "tiny-gptj": tiny_config("gptj", n_positions=512),
    "tiny-bloom": tiny_config("bloom", seq_length=512),
    "tiny-mpt": tiny_config("mpt", max_seq_len=512),
    "tiny-gpt-neox": tiny_config("gpt_neox", max_position_embeddings=512),
    "tiny-falcon-alibi": tiny_config("falcon", max_position_embeddings=512, alibi=True, multi_query=False),
    "tiny-llama": tiny_config("llama", max_position_embeddings=512, rope_scaling=LLAMA_3_1_8B["rope_scaling"]),
}
# So that these tests are themselves tested: with experts that are forced upon a model, in all layers or some, and with
# slopes that are made exact. What families compute on the CPU is for test_parity.py.
EVERYWHERE = ("tiny-qwen3-moe", "tiny-ernie4.5-moe", "tiny-dbrx", "tiny-falcon-alibi")
FLOAT32_LIMIT = 1e-4  # the two compute the powers of the rope base on different devices
BF16_RATIO = 1.2
TIE = 1e-3  # of logits' standard deviation: of two tokens as near as that, either is the likeliest

Error = Callable[[torch.Tensor, torch.Tensor], float]

BLOCK, SHARED, DECODES = 16, 128, 64
CHUNKS = ((128, 1, 100, 71), (45, 2))  # of the first prompt, and of what the second has beyond the shared blocks


@dataclass
class Models:
    """One configuration in both implementations and precisions."""

    config: dict[str, Any]
    device: torch.device

    @cached_property
    def weights(self) -> dict[str, torch.Tensor]:
        """The parameters of our model, bfloat16."""
        model = self._decoder(torch.bfloat16)
        dummy_weights(model, seed=0)
        return dict(model.named_parameters())

    def _decoder(self, dtype: torch.dtype) -> Decoder:
        return Decoder(spec_from_config(self.config), dtype=dtype, device=self.device, max_model_len=512)

    def ours(self, dtype: torch.dtype) -> Decoder:
        model = self._decoder(dtype)
        for name, parameter in model.named_parameters():
            parameter.copy_(self.weights[name])
        return model

    def theirs(self, dtype: torch.dtype) -> PreTrainedModel:
        model = build_reference(self.config, dtype=dtype, device=self.device)
        state = reference_state(model, spec_from_config(self.config), self.weights)
        missing, unexpected = model.load_state_dict(state, strict=False)
        tied = model.config.tie_word_embeddings
        assert unexpected == [] and missing == (["lm_head.weight"] if tied else [])
        return model

    @cached_property
    def prompts(self) -> list[list[int]]:
        """The second begins with the first's ``SHARED`` tokens; both end with what the decode steps are fed."""
        vocab = self.config["vocab_size"]
        first = random_tokens(sum(CHUNKS[0]) + DECODES, vocab, seed=1)
        return [first, first[:SHARED] + random_tokens(sum(CHUNKS[1]) + DECODES, vocab, seed=2)]

    @cached_property
    def _exact(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        model = self.theirs(torch.float32)
        with experts_of(model) as chosen:
            return [reference_logits(model, tokens) for tokens in self.prompts], chosen

    @property
    def exact(self) -> list[torch.Tensor]:
        """Logits of transformers in float32."""
        return self._exact[0]

    @property
    def experts(self) -> list[torch.Tensor]:
        """Those that transformers chooses in float32: ``[tokens, k]`` for each prompt and layer with experts."""
        return self._exact[1]

    def experts_of_steps(self) -> list[torch.Tensor]:
        """The same, row by row as :func:`paged_logits` runs the prompts: ``[rows, k]`` for each step and layer."""
        layers = len(self.experts) // 2
        first, second = self.experts[:layers], self.experts[layers:]
        steps = [[ids.split([*CHUNKS[0], *[1] * DECODES]) for ids in first]]
        steps.append([ids[SHARED:].split([*CHUNKS[1], *[1] * DECODES]) for ids in second])
        found = []
        for chunks, of_layers in zip(CHUNKS, steps, strict=True):
            found += [ids[i] for i in range(len(chunks)) for ids in of_layers]
        for t in range(-DECODES, 0):
            found += [torch.cat((a[t], b[t])) for a, b in zip(*steps, strict=True)]
        return found


@pytest.fixture(autouse=True)
def exact_alibi(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers multiplies Falcon's slopes by positions in bfloat16, which beyond 256 is no longer exact."""
    build = modeling_falcon.build_alibi_tensor

    def exact(attention_mask: torch.Tensor, num_heads: int, dtype: torch.dtype) -> torch.Tensor:
        slopes = build(torch.ones_like(attention_mask[:1, :2]), num_heads, torch.float32)[
            ..., 1:
        ]  # those of position 1
        return (slopes * torch.arange(attention_mask.shape[1], device=slopes.device)).to(dtype)

    monkeypatch.setattr(modeling_falcon, "build_alibi_tensor", exact)


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[] if name in EVERYWHERE else pytest.mark.gpu) for name in CONFIGS],
)
def models(request: pytest.FixtureRequest, device: torch.device) -> Iterator[Models]:
    if CONFIGS[request.param]["model_type"] not in CONFIG_MAPPING:
        pytest.skip("a type that this release of transformers does not know")
    yield Models(CONFIGS[request.param], device)
    gc.collect()  # a model of transformers refers to itself
    if device.type == "cuda":
        torch.cuda.empty_cache()


def paged_logits(model: Decoder, prompts: list[list[int]]) -> list[torch.Tensor]:
    """Chunked prefill of the first prompt, of the second on the first's blocks, then both decode side by side."""
    runner = PagedRunner(model, block_size=BLOCK, num_blocks=64)
    first = PagedSequence()
    starts = [len(tokens) - DECODES for tokens in prompts]
    logits = [[runner.prefill(first, prompts[0][: starts[0]], CHUNKS[0])]]
    second = runner.share(first, SHARED)
    logits.append([runner.prefill(second, prompts[1][SHARED : starts[1]], CHUNKS[1])])
    for t in range(DECODES):
        work = [
            (sequence, [tokens[start + t]])
            for sequence, tokens, start in zip((first, second), prompts, starts, strict=True)
        ]
        for rows, row in zip(logits, runner.step(work), strict=True):
            rows.append(row)
    return [torch.cat(rows) for rows in logits]


def errors(logits: list[torch.Tensor], exact: list[torch.Tensor], error: Error) -> list[float]:
    """Of the prefill and of the decode steps of each sequence, apart: 64 rows must not hide among 300."""
    found = []
    for got, want in zip(logits, exact, strict=True):
        want = want[-got.shape[0] :]  # a sequence has no logits for blocks that were there already
        found += [error(got[:-DECODES], want[:-DECODES]), error(got[-DECODES:], want[-DECODES:])]
    return found


def test_float32(models, record_property):
    got = paged_logits(models.ours(torch.float32), models.prompts)
    worst = max(errors(got, models.exact, relative_error))
    record_property("relative_error", worst)
    assert worst < FLOAT32_LIMIT
    for logits, exact in zip(got, models.exact, strict=True):
        exact = exact[-logits.shape[0] :]
        chosen = exact.gather(-1, logits.argmax(-1, keepdim=True))[:, 0]
        assert (chosen >= exact.amax(-1) - TIE * exact.std(-1)).all()


def test_bfloat16(models, record_property):
    spec = spec_from_config(models.config)
    exact = models.exact  # first of all: its model must be gone before ours is built
    error = relative_error
    ours, theirs = nullcontext(), None
    if can_be_forced(spec):
        ours, theirs = forced_on_ours(models.experts_of_steps()), models.experts
    elif any(isinstance(layer.mlp, MoESpec) for layer in spec.layers):
        error = median_error  # a few tokens that rounding sends to other experts must not decide the error of the whole
    with ours:
        got = errors(paged_logits(models.ours(torch.bfloat16), models.prompts), exact, error)
    model = models.theirs(torch.bfloat16)
    with experts_of(model, theirs):
        logits = [reference_logits(model, tokens).float() for tokens in models.prompts]
    logits[1] = logits[1][SHARED:]
    yardsticks = errors(logits, exact, error)
    record_property("relative_error", max(got))
    record_property("relative_error_of_transformers", max(yardsticks))
    for our, yardstick in zip(got, yardsticks, strict=True):
        assert our <= BF16_RATIO * yardstick


def test_greedy_tokens_in_float32(models, record_property):
    theirs = models.theirs(torch.float32)
    runner = PagedRunner(models.ours(torch.float32), block_size=BLOCK)
    for prompt in (models.prompts[0][:100], models.prompts[1][-33:]):
        got = runner.greedy(prompt, DECODES)
        assert got == reference_logits(theirs, prompt + got).argmax(-1).tolist()[len(prompt) - 1 : -1]
    record_property("equal_tokens", 2 * DECODES)

"""Tiny checkpoints in Hugging Face format, and a driver that runs our decoder over a paged cache.

The checkpoints are written by transformers, whose eager float32 model is the reference. Weights are larger than those
of a fresh model, norms and biases random: with transformers' own initialisation a bias or a rotation left out would
hardly show.
"""

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from support.internlm2 import internlm2_tensors
from support.tiny_configs import ALL_FAMILIES as ALL_FAMILIES  # most tests want configurations and models
from support.tiny_configs import NOT_IN_TRANSFORMERS as NOT_IN_TRANSFORMERS
from support.tiny_configs import reference_config as reference_config
from support.tiny_configs import tiny_config as tiny_config
from tritonllm.layers.metadata import AttentionMetadata, KVCacheView
from tritonllm.layers.segments import Segment, Segments, decodes
from tritonllm.models import checkpoint
from tritonllm.models.decoder import Decoder
from tritonllm.models.fallback_decoder import TransformersDecoder
from tritonllm.models.families import spec_from_config, weight_map
from tritonllm.models.spec import ModelSpec
from tritonllm.models.weights import load_weights


def build_reference(
    config: dict[str, Any], *, dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> PreTrainedModel:
    """The model of transformers, with weights as it initialises them.

    Eager, but for Falcon with ALiBi, whose eager path adds the bias twice (in the mask and again to the logits).
    """
    config = copy.deepcopy(reference_config(config))  # configuration classes write into what they are given
    fields = {key: value for key, value in config.items() if key not in ("architectures", "model_type", "torch_dtype")}
    attention = "sdpa" if config.get("alibi") else "eager"
    with torch.device(device or "cpu"):
        return AutoModelForCausalLM.from_config(
            AutoConfig.for_model(config["model_type"], **fields), attn_implementation=attention, dtype=dtype
        ).eval()


def reference_state(
    model: PreTrainedModel, spec: ModelSpec, parameters: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Our parameters under the names that a model of transformers has in memory; what it has not is left out."""
    known = model.state_dict().keys()
    places = ((name, slot) for name, slot in weight_map(spec).items() if name in known)
    return {name: slot.read(parameters[slot.parameter]) for name, slot in places}


def reference_model(config: dict[str, Any], *, seed: int = 0) -> PreTrainedModel:
    """The float32 model of transformers on the CPU, with random weights."""
    model = build_reference(config)
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        # Gemma and Nemotron store their norms' weights as differences from 1
        minus_one = ("Gemma", "VaultGemma", "Nemotron")
        kind = type(module).__name__
        centre = 0.0 if kind.startswith(minus_one) and not kind.startswith("Gemma4") else 1.0
        is_norm = "Norm" in kind
        for name, p in module.named_parameters(recurse=False):
            if (is_norm and name == "weight") or kind == "Gemma4TextRouter" or name.endswith("_residual"):
                p.data.normal_(centre, 0.2, generator=generator)
            else:
                p.data.normal_(0.0, p.shape[-1] ** -0.5 if p.dim() >= 2 else 0.1, generator=generator)
        for name, buffer in module.named_buffers(recurse=False):
            if name == "e_score_correction_bias":
                buffer.normal_(0.0, 0.2, generator=generator)
            if name == "layer_scalar":
                buffer.normal_(1.0, 0.2, generator=generator)
    return model


def write_checkpoint(
    folder: Path, config: dict[str, Any], *, seed: int = 0, max_shard_size: str = "1GB", config_style: int = 4
) -> PreTrainedModel:
    """Write a checkpoint of :func:`reference_model` with ``config.json`` as transformers 4 or 5 writes it.

    Returns:
        The model that was written.
    """
    model = reference_model(config, seed=seed)
    if config["model_type"] == "internlm2":
        heads = config["num_attention_heads"], config["num_key_value_heads"]
        save_file(internlm2_tensors(model.state_dict(), *heads), folder / "model.safetensors")
    else:
        model.save_pretrained(folder, max_shard_size=max_shard_size)
    if config_style == 4:
        (folder / "config.json").write_text(json.dumps(config))
    return model


def load_decoder(
    folder: Path, *, dtype: torch.dtype = torch.float32, device: str = "cpu", max_model_len: int | None = None
) -> Decoder:
    spec = spec_from_config(checkpoint.read_config(folder))
    length = max_model_len or spec.max_position_embeddings
    model = Decoder(spec, dtype=dtype, device=torch.device(device), max_model_len=length)
    load_weights(model, folder)
    return model


@torch.inference_mode()
def reference_logits(model: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    """``[len(tokens), vocab]`` from one pass of transformers without a cache."""
    ids = torch.tensor([list(tokens)], device=model.device)
    return model(input_ids=ids, use_cache=False).logits[0]


def random_tokens(length: int, vocab_size: int, seed: int) -> list[int]:
    return torch.randint(vocab_size, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@dataclass
class PagedSequence:
    """One sequence in the cache of a :class:`PagedRunner`."""

    blocks: list[int] = field(default_factory=list)
    length: int = 0


class PagedRunner:
    """Steps a decoder over a paged cache with whatever chunking a test asks for.

    The cache begins as NaN and blocks are handed out in random order, so a read of a slot that no step wrote shows.
    """

    def __init__(
        self, model: Decoder | TransformersDecoder, *, block_size: int = 4, num_blocks: int = 128, seed: int = 0
    ) -> None:
        spec, device = model.spec, next(model.parameters()).device
        context = model.context.size if isinstance(model, Decoder) else 1  # ranks have a part of each block's keys
        self.model = model
        self.device = device
        self.block_size = block_size
        sizes = [(num_blocks, block_size // context, *shape) for shape in spec.caches]
        nan, how = float("nan"), {"dtype": model.dtype, "device": device}
        caches = [KVCacheView(*(torch.full(size, nan, **how) for _ in "kv")) for size in sizes]
        self.cache = [caches[cache] for cache in spec.cache_of_layer]
        self._free = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).tolist()

    def share(self, sequence: PagedSequence, num_tokens: int) -> PagedSequence:
        """A new sequence that begins with the blocks of another, as after a hit in a prefix cache."""
        assert num_tokens % self.block_size == 0 and num_tokens <= sequence.length
        return PagedSequence(sequence.blocks[: num_tokens // self.block_size], num_tokens)

    @torch.inference_mode()
    def step(self, work: Sequence[tuple[PagedSequence, list[int]]], *, decode: bool = True) -> list[torch.Tensor]:
        """Append tokens to sequences in one step.

        Args:
            work: sequences with their next tokens.
            decode: run single tokens as decodes; otherwise as prefill chunks of one.

        Returns:
            For each, the logits ``[len(tokens), vocab]``.
        """
        ordered = sorted(range(len(work)), key=lambda i: not decode or len(work[i][1]) > 1)
        num_decodes = sum(decode and len(tokens) == 1 for _, tokens in work)
        ids, positions, slots = [], [], []
        for i in ordered:
            sequence, tokens = work[i]
            at = range(sequence.length, sequence.length + len(tokens))
            while len(sequence.blocks) * self.block_size < at.stop:
                sequence.blocks = [*sequence.blocks, self._free.pop()]
            ids += tokens
            positions += at
            slots += [sequence.blocks[p // self.block_size] * self.block_size + p % self.block_size for p in at]
            sequence.length = at.stop
        metadata = self._metadata([work[i] for i in ordered], slots, num_decodes)
        hidden = self.model(self._tensor(ids), self._tensor(positions), metadata, self.cache)
        parts = self.model.compute_logits(hidden).split([len(work[i][1]) for i in ordered])
        by_item = dict(zip(ordered, parts, strict=True))
        return [by_item[i] for i in range(len(work))]

    def _metadata(
        self, work: list[tuple[PagedSequence, list[int]]], slots: list[int], num_decodes: int
    ) -> AttentionMetadata:
        width = max(len(sequence.blocks) for sequence, _ in work)
        tables = [sequence.blocks + [0] * (width - len(sequence.blocks)) for sequence, _ in work]
        chunks = [len(tokens) for _, tokens in work[num_decodes:]]
        return AttentionMetadata(
            slot_mapping=self._tensor(slots),
            block_tables=self._tensor(tables, torch.int32),
            seq_lens=self._tensor([sequence.length for sequence, _ in work], torch.int32),
            cu_seqlens_q=self._tensor([0, *torch.tensor(chunks).cumsum(0).tolist()], torch.int32),
            segments=Segments(decodes(num_decodes), chunk=Segment(len(chunks), sum(chunks), max(chunks, default=0))),
        )

    def _tensor(self, values: list, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def prefill(self, sequence: PagedSequence, tokens: list[int], chunks: Sequence[int] | None = None) -> torch.Tensor:
        """Append a prompt, in one step or in chunks of these sizes; returns the logits ``[len(tokens), vocab]``."""
        pieces = torch.tensor(tokens).split(list(chunks) if chunks else len(tokens))
        return torch.cat([self.step([(sequence, piece.tolist())])[0] for piece in pieces])

    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        """The most likely continuation."""
        sequence = PagedSequence()
        logits = self.prefill(sequence, prompt)
        output = [int(logits[-1].argmax())]
        while len(output) < num_tokens:
            output.append(int(self.step([(sequence, output[-1:])])[0][-1].argmax()))
        return output

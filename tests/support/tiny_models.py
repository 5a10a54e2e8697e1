"""Tiny checkpoints in Hugging Face format, and a driver that runs our decoder over a paged cache.

The checkpoints are written by transformers, whose eager float32 model is the reference. Weights are larger than those
of a fresh model, norms and biases random: with transformers' own initialisation a bias or a rotation left out would
hardly show.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tritonllm.layers.metadata import AttentionMetadata, KVCacheView
from tritonllm.models import checkpoint
from tritonllm.models.decoder import Decoder
from tritonllm.models.families import FAMILIES, spec_from_config
from tritonllm.models.weights import load_weights

_SMALL = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
_EXTRA: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": False, "mlp_bias": False},
    "mistral": {"sliding_window": None},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {"head_dim": 16, "attention_bias": False, "use_sliding_window": False},
}


def tiny_config(family: str, **changes: Any) -> dict[str, Any]:
    """A ``config.json`` in the style of transformers 4."""
    (architecture,) = (name for name, known in FAMILIES.items() if known.model_type == family)
    return {"architectures": [architecture], "model_type": family, **_SMALL, **_EXTRA[family], **changes}


def build_reference(
    config: dict[str, Any], *, dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> PreTrainedModel:
    """The model of transformers, eager, with weights as it initialises them."""
    fields = {key: value for key, value in config.items() if key not in ("architectures", "model_type", "torch_dtype")}
    with torch.device(device or "cpu"):
        return AutoModelForCausalLM.from_config(
            AutoConfig.for_model(config["model_type"], **fields), attn_implementation="eager", dtype=dtype
        ).eval()


def reference_model(config: dict[str, Any], *, seed: int = 0) -> PreTrainedModel:
    """The float32 model of transformers on the CPU, with random weights."""
    model = build_reference(config)
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        if name.endswith("norm.weight"):
            p.data.normal_(1.0, 0.2, generator=generator)
        else:
            p.data.normal_(0.0, p.shape[1] ** -0.5 if p.dim() == 2 else 0.5, generator=generator)
    return model


def write_checkpoint(
    folder: Path, config: dict[str, Any], *, seed: int = 0, max_shard_size: str = "1GB", config_style: int = 4
) -> PreTrainedModel:
    """Write a checkpoint of :func:`reference_model` with ``config.json`` as transformers 4 or 5 writes it.

    Returns:
        The model that was written.
    """
    model = reference_model(config, seed=seed)
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

    def __init__(self, model: Decoder, *, block_size: int = 4, num_blocks: int = 128, seed: int = 0) -> None:
        spec, device = model.spec, model.embed.weight.device
        shape = (num_blocks, block_size, spec.num_kv_heads, spec.head_size)
        self.model = model
        self.device = device
        self.block_size = block_size
        self.cache = [
            KVCacheView(*(torch.full(shape, float("nan"), dtype=model.dtype, device=device) for _ in "kv"))
            for _ in range(spec.num_layers)
        ]
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
            num_decodes=num_decodes,
            max_seqlen_q=max(chunks, default=0),
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

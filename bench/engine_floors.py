"""The roofline floors of the engine benchmark: the least time that one GPU needs for a workload in bfloat16.

All prompts are computed at the rate of large products. Then each decode step takes the longer of its bytes (every
weight that it touches once, and the keys and values of every running sequence) over the bandwidth of reads, and its
FLOPs over the rate of products (the roofline model: Williams, Waterman, Patterson, CACM 52(4), 2009). With drafts it is
still the floor of plain decoding, a token a step. A turn behind cached tokens is a step like those, and so is one of
prompts that join requests which decode, half-way through their outputs.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.engine_workloads import LATENCIES, Request, Workload, requests

READ_OVER_COPY = 1.03  # attention has read at 103% of the bandwidth of a copy, whose bytes are half writes
ELEMENT = 2  # bytes, bfloat16


@dataclass(frozen=True)
class Shape:
    """Sizes of a model in elements: per layer but for ``head``, and ``kv`` bytes of one token in all layers."""

    layers: int
    attention: int
    expert: int
    experts: int
    active: int
    router: int
    head: int
    kv: int
    query: int

    @classmethod
    def of(cls, config: dict[str, Any]) -> "Shape":
        hidden, size = config["hidden_size"], config["head_dim"]
        heads, kv_heads, layers = (
            config[name] for name in ("num_attention_heads", "num_key_value_heads", "num_hidden_layers")
        )
        experts = config.get("num_experts", 0)
        inner = config["moe_intermediate_size"] if experts else config["intermediate_size"]
        return cls(
            layers=layers,
            attention=hidden * size * (heads + 2 * kv_heads) + heads * size * hidden,
            expert=3 * hidden * inner,
            experts=experts or 1,
            active=config["num_experts_per_tok"] if experts else 1,
            router=hidden * experts,
            head=hidden * config["vocab_size"],
            kv=2 * layers * kv_heads * size * ELEMENT,
            query=heads * size,
        )

    def weight_bytes(self, tokens: int) -> float:
        """Bytes of the weights that a step of so many tokens touches; experts are drawn evenly."""
        distinct = self.experts * (1 - (1 - self.active / self.experts) ** tokens)
        return ELEMENT * (self.layers * (self.attention + distinct * self.expert + self.router) + self.head)

    @property
    def token_flops(self) -> int:
        """Of one token through all layers, without attention's scores and without the output projection."""
        return 2 * self.layers * (self.attention + self.active * self.expert + self.router)

    @property
    def pair_flops(self) -> int:
        """Of one token looking at one other, in all layers."""
        return 4 * self.layers * self.query


@dataclass(frozen=True)
class Floor:
    """Seconds of prefill and of decode, and the number of decode steps."""

    prefill: float
    decode: float
    steps: int

    def value(self, workload: Workload, batch: list[Request]) -> float:
        """In the unit in which the workload is reported."""
        seconds = self.prefill + self.decode
        if workload.kind in ("turn", "join"):
            return 1e3 * self.prefill
        if workload.kind in LATENCIES:
            return 1e3 * self.decode / self.steps
        if workload.kind == "prefix":
            return len(batch) / seconds
        lengths = [len(r.prompt) if workload.kind == "prefill" else r.max_tokens for r in batch]
        return sum(lengths) / seconds


def floor(
    workload: Workload, config: dict[str, Any], *, copy_gb_per_s: float, matmul_tflop_per_s: float, share: bool = False
) -> Floor:
    """The least time of one repetition.

    Args:
        config: the model's, in Hugging Face format.
        copy_gb_per_s: bandwidth of a large copy on the device, bytes read and written.
        matmul_tflop_per_s: rate of a large bfloat16 product.
        share: a decode step reads the prompts' shared beginning once, and not once for every sequence.
    """
    shape, batch = Shape.of(config), requests(workload)
    peak, bandwidth = matmul_tflop_per_s * 1e12, READ_OVER_COPY * copy_gb_per_s * 1e9
    prompts = np.array([len(request.prompt) for request in batch])
    if workload.kind == "join":
        return Floor(_joined_step(shape, workload, prompts, peak, bandwidth, share), 0.0, 0)
    turn = workload.kind == "turn"
    cached = np.where((np.arange(len(batch)) > 0) | turn, workload.shared, 0)  # by the first request, for the others
    pairs = (prompts * (prompts - 1) - cached * (cached - 1)) / 2
    prefill = ((prompts - cached) * shape.token_flops + pairs * shape.pair_flops + 2 * shape.head).sum() / peak
    if turn:  # as few tokens as a decode step has: they read all weights and keys
        read = shape.weight_bytes(int((prompts - cached).sum())) + prompts.sum() * shape.kv
        prefill = max(prefill, read / bandwidth)
    left = np.array([request.max_tokens - 1 for request in batch])
    decode, steps = 0.0, int(left.max(initial=0))
    for step in range(steps):
        contexts = prompts[left > step] + step
        running = len(contexts)
        keys = contexts.sum() - (workload.shared * (running - 1) if share else 0)
        flops = running * (shape.token_flops + 2 * shape.head) + contexts.sum() * shape.pair_flops
        decode += max((shape.weight_bytes(running) + keys * shape.kv) / bandwidth, flops / peak)
    return Floor(float(prefill), float(decode), steps)


def _joined_step(
    shape: Shape, workload: Workload, prompts: np.ndarray, peak: float, bandwidth: float, share: bool
) -> float:
    """Seconds of a step of decodes and of the prompts that join them, whose shared beginning is cached."""
    contexts = prompts + workload.output[0] / 2
    (many, own), running = workload.joins, len(contexts)
    seen = many * own * (workload.shared + (own - 1) / 2)
    flops = (running + many * own) * shape.token_flops + (running + many) * 2 * shape.head
    flops += (contexts.sum() + seen) * shape.pair_flops
    keys = contexts.sum() + many * (workload.shared + own)
    keys -= workload.shared * (running + many - 1) if share else 0
    return float(max((shape.weight_bytes(running + many * own) + keys * shape.kv) / bandwidth, flops / peak))

"""One layer of the decoder: attention and an MLP or experts around a residual stream."""

import dataclasses
from typing import Any

import torch
from torch import nn

from tritonllm.dist.group import ALONE, Group
from tritonllm.kernels.dense.arguments import HEAVY
from tritonllm.layers.attention import Attention
from tritonllm.layers.exchanged_rows import ExchangedRows
from tritonllm.layers.expert_counts import LayerCounter
from tritonllm.layers.fusion import LayerPlan, LayerTraits
from tritonllm.layers.layer_inputs import LayerInput
from tritonllm.layers.linear import Linear
from tritonllm.layers.metadata import AttentionMetadata, KVCacheView
from tritonllm.layers.mlp import MLP, MLPSpec
from tritonllm.layers.moe import MoE
from tritonllm.layers.norm import BlockInput, Norm
from tritonllm.layers.parameters import empty_parameter
from tritonllm.layers.residual import Stream
from tritonllm.models.interface import LayerWork
from tritonllm.models.spec import ModelSpec


class DecoderLayer(nn.Module):
    """Attention and MLP around a residual stream; with a ``group``, a rank's part of both."""

    def __init__(
        self,
        spec: ModelSpec,
        index: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        group: Group = ALONE,
        context: Group = ALONE,
    ) -> None:
        super().__init__()
        layer = spec.layers[index]
        before = spec.norm_position in ("pre", "sandwich")
        after = spec.norm_position in ("post", "sandwich")
        of_stream = spec.norm_position == "stream"
        self.one_norm = spec.parallel == "one norm"

        def norm(exists: bool) -> Norm | None:
            return Norm((spec.hidden_size,), spec.norm, dtype=dtype, device=device) if exists else None

        # with norms of the stream, the one after a layer's MLP is where the next layer enters
        first = index == 0
        self.attention_norm = norm((before and (spec.first_norm or not first)) or (of_stream and not first))
        how: dict[str, Any] = {"dtype": dtype, "device": device}
        self.attention = Attention(spec.hidden_size, layer.attention, group=group, context=context, **how)
        self.attention_post_norm = norm(after)
        self.mlp_norm = norm((before or of_stream) and not self.one_norm)
        self.mlp: MLP | MoE
        if isinstance(layer.mlp, MLPSpec):
            self.mlp = MLP(spec.hidden_size, layer.mlp, dtype=dtype, device=device)
        else:
            self.mlp = MoE(spec.hidden_size, layer.mlp, dtype=dtype, device=device, group=group)
        self.mlp_post_norm = norm(after)
        self.input = None
        if spec.layer_inputs is not None:
            self.input = LayerInput(spec.hidden_size, spec.layer_inputs, spec.norm, **how)
        self.scalar = empty_parameter(1, **how) if spec.layer_scalars else None
        self.attention_residual = self.mlp_residual = None
        if spec.residual_weights:
            self.attention_residual = empty_parameter(spec.hidden_size, **how)
            self.mlp_residual = empty_parameter(spec.hidden_size, **how)
        # a router's bits must not depend on how many experts a rank has
        self.together = HEAVY if isinstance(self.mlp, MoE) else sum(p.numel() for p in self.parameters())
        for module in self.modules():
            if isinstance(module, Linear):
                module.together = self.together
        self._spec, self._partial = spec, group.size > 1

    @property
    def norms_blocks(self) -> bool:
        """Whether a norm before a block is of that block's input alone."""
        return self._spec.norm_position in ("pre", "sandwich") and not self.one_norm

    @property
    def traits(self) -> LayerTraits:
        """What of the layer, with the weights that it has now, decides its fusions."""
        attention, mlp, spec = self.attention, self.mlp, self._spec
        parallel, settles = spec.parallel is not None, self.input is not None or self.scalar is not None
        traits = {
            "sequential": spec.norm_position == "pre" and not (parallel or settles or spec.residual_weights),
            "rms": spec.norm.kind == "rms",
            "parallel": parallel,
            "partial": self._partial,
        }
        if isinstance(mlp, MoE):
            router, shared = mlp.router.weight, mlp.shared is not None
            same = router.dtype == attention.qkv.dtype
            found = LayerTraits.of_experts(**traits, router=router, shared=shared, norms_router=same)
        else:
            weights = [product.operand for product in (attention.qkv, attention.o, mlp.up, mlp.down)]
            found = LayerTraits.of_dense(**traits, weights=weights)
            if attention.gate is not None and attention.gate.rounds_to != found.rounds_to:
                found = dataclasses.replace(found, rounds_to=None)  # it reads the rows that the projection does
        return dataclasses.replace(found, settles=settles)

    def forward(
        self,
        stream: Stream,
        plan: LayerPlan,
        positions: torch.Tensor,
        cos_sin_cache: torch.Tensor | None,
        metadata: AttentionMetadata,
        kv_cache: KVCacheView,
        rows: torch.Tensor | None = None,
        following: Norm | None = None,
        counter: LayerCounter | None = None,
        exchanged: ExchangedRows | None = None,
        query_scale: torch.Tensor | None = None,
        place: int = 0,
    ) -> None:
        """Read the stream and add to it.

        Args:
            plan: which launches normalise and add.
            rows: the tokens with which the stream goes on after all tokens were attended to; ``None`` for all.
            following: the norm with which the next layer begins.
            counter: where the experts that tokens choose are counted, if there are any.
            exchanged: how rows get to experts on other ranks, if there are any.
            query_scale: ``[T, 1, 1]``, what queries grow by; ``None`` where they do not.
            place: which of the stream's layer inputs is this layer's.
        """
        x = stream.enter(self.attention_norm, plan.attention_norm, plan.rounds_to)
        if rows is not None:
            stream.keep(rows)
        if self.attention_residual is not None:
            stream.rows.mul_(self.attention_residual)  # nothing is pending, and no product reads it for its norm
        stream.add(  # without a name for what is added: its memory would be held during the MLP
            self.attention(x, positions, cos_sin_cache, metadata, kv_cache, rows, query_scale),
            plan.attention_add,
            after=self.attention_post_norm,
            following=self.mlp_norm,
        )
        if not self.one_norm:
            x = stream.enter(self.mlp_norm, plan.mlp_norm, plan.rounds_to)
        elif rows is not None:
            x = BlockInput(x.rows.index_select(0, rows))
        if self.mlp_residual is not None:
            stream.rows.mul_(self.mlp_residual)
        addend = self.mlp(x, counter, exchanged, stream.rows) if isinstance(self.mlp, MoE) else self.mlp(x)
        stream.add(addend, plan.mlp_add, after=self.mlp_post_norm, following=following)
        if self.input is not None:
            assert stream.layer_inputs is not None
            stream.rows = stream.settle().add_(self.input(stream.rows, stream.layer_inputs[:, place]))
        if self.scalar is not None:
            stream.settle().mul_(self.scalar)


def work_of(layer: nn.Module) -> LayerWork:
    """What such a layer computes of a token; of experts what this rank does on average."""
    weights, mlp = sum(p.numel() for p in layer.parameters()), layer.mlp
    if not isinstance(mlp, MoE):
        return LayerWork(weights, experts=False)
    here, spec = mlp.gate_up.numel() + mlp.down.numel(), mlp.spec
    # for each of its own tokens a rank computes as many pairs with experts as that has, be they tokens from elsewhere;
    # of a token that all ranks have, each computes some of its pairs
    among = len(mlp.gate_up) if spec.exchanged else spec.num_slots
    return LayerWork(weights - here + here * spec.top_k // among, experts=True)

"""Looks into the layers of a model: what a head attends to, and what each layer would say comes next.

The engine's own steps fuse what one would like to see. So a sequence that was served runs once more through the same
model as one prompt, in a cache of its own, and there its queries and its residual stream are read off.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tritonllm.models.decoder import Decoder
from tritonllm.models.one_sequence import run_alone
from tritonllm.teach.xray.costs import bind, name_of
from tritonllm.teach.xray.stages import layers_of

MOST_TOKENS = 4096  # of a pattern: one head's is 64 MB
ATTENTION = "tritonllm.varlen_prefill_attention"


class _Calls(TorchDispatchMode):
    """Keeps the arguments of one layer's attention."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self._left = layer
        self.weights: torch.Tensor | None = None
        self.sinks = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if name_of(func) == ATTENTION:
            if self._left == 0:
                bound = bind(func, args, kwargs or {})
                self.weights, self.sinks = attention_weights(bound), bound.get("sinks") is not None
            self._left -= 1
        return result


def attention_weights(bound: dict[str, Any]) -> torch.Tensor:
    """The softmax of one sequence's attention, from the operator's arguments.

    Returns:
        ``[H, T, T]`` float32: what each query gives each key. A row sums to 1, but for what a sink takes.
    """
    q, count = bound["q"].float(), int(bound["seq_lens"][0])
    keys = bound["k_cache"][bound["block_tables"][0].long()].flatten(0, 1)[:count].float()  # [T, K, D]
    heads, kv_heads = q.shape[1], keys.shape[1]
    position = torch.arange(count, device=q.device)
    distance = position[:, None] - position[None]
    hidden = distance < 0 if bound["causal"] else torch.zeros_like(distance, dtype=torch.bool)
    if bound["window"] is not None:
        hidden = hidden | (distance.abs() >= bound["window"])
    out = torch.empty(heads, count, count, dtype=torch.float32, device="cpu")
    for head in range(heads):
        logits = bound["scale"] * (q[:, head] @ keys[:, head * kv_heads // heads].T)
        if bound["softcap"]:
            logits = bound["softcap"] * torch.tanh(logits / bound["softcap"])
        if bound["alibi_slopes"] is not None:
            logits = logits - bound["alibi_slopes"][head].float() * distance
        logits = logits.masked_fill(hidden, float("-inf"))
        if bound["sinks"] is not None:
            sink = bound["sinks"][head].float().expand(count, 1)
            logits = torch.cat([logits, sink], dim=1)
        out[head] = logits.softmax(dim=1)[:, :count].cpu()
    return out


@torch.inference_mode()
def attention_pattern(
    model: Any, device: torch.device, token_ids: Sequence[int], layer: int, head: int | None
) -> torch.Tensor:
    """``[T, T]`` float32: what each token attends to in a head, or in all of them on average.

    Raises:
        ValueError: there is no such layer or head, or the model does not tell.
    """
    depth = model.spec.num_layers
    if not 0 <= layer < depth:
        raise ValueError(f"--xray-attention: layer must be from 0 to {depth - 1}, got {layer}")
    with _Calls(layer) as calls:
        run_alone(model, device, token_ids)
    if calls.weights is None:
        raise ValueError("--xray-attention: this model does not attend by our kernels, so nobody sees its queries")
    heads = len(calls.weights)
    if head is not None and head >= heads:
        raise ValueError(f"--xray-attention: head must be from 0 to {heads - 1}, got {head}")
    return calls.weights.mean(0) if head is None else calls.weights[head]


@dataclass(frozen=True)
class Guess:
    """What would come next if the model stopped behind a layer: logits ``[vocab]`` float32."""

    place: str
    logits: torch.Tensor

    def top(self, count: int) -> list[tuple[int, float]]:
        """The likeliest tokens with their probabilities."""
        found = self.logits.softmax(-1).topk(min(count, len(self.logits)))
        return list(zip(found.indices.tolist(), found.values.tolist(), strict=True))


@torch.inference_mode()
def logit_lens(model: Any, device: torch.device, token_ids: Sequence[int], position: int) -> list[Guess]:
    """What the embedding and each layer would say comes after ``position``: the last one's is what the model says.

    The residual stream behind a layer goes through the final norm and the output projection (nostalgebraist,
    "Interpreting GPT: the logit lens", 2020).

    Raises:
        ValueError: no such position, no output projection, or a model whose last norm cannot be found.
    """
    count = len(token_ids)
    if not -count <= position < count:
        raise ValueError(f"--xray-logit-lens: POSITION must be from {-count} to {count - 1}, got {position}")
    if not model.spec.logits:
        raise ValueError("--xray-logit-lens: this model has no output projection")
    ours = isinstance(model, Decoder)
    rows, finish, last = (_of_decoder if ours else _of_others)(model, device, token_ids, position % count)
    names = ["embedding", *(f"layer {index}" for index in range(model.spec.num_layers))]
    guesses = [finish(at, row) for at, row in enumerate(rows[:-1])]
    # the last one is not made again: it is the model's own result
    states = torch.cat([*guesses, last])
    logits = model.compute_logits(states).float().cpu()
    return [Guess(name, row) for name, row in zip(names, logits, strict=True)]


Finish = Callable[[int, torch.Tensor], torch.Tensor]
Seen = tuple[list[torch.Tensor], Finish, torch.Tensor]


def _of_decoder(model: Decoder, device: torch.device, token_ids: Sequence[int], position: int) -> Seen:
    """``[1, hidden]`` before each layer and behind the last, what a row goes through, and the model's own result."""
    rows: list[torch.Tensor] = []

    def before(module: nn.Module, args: Any) -> None:
        rows.append(args[0].settled()[position : position + 1])

    hooks = [layer.register_forward_pre_hook(before) for layer in model.layers]
    try:
        hidden = run_alone(model, device, token_ids)[position : position + 1]
    finally:
        for hook in hooks:
            hook.remove()

    def finish(at: int, row: torch.Tensor) -> torch.Tensor:
        norm: Any = model.norm
        if model.spec.norm_position == "stream":  # there the next layer's norm ends a layer
            norm = model.layers[at].attention_norm
        return row if norm is None else norm.normalize(row)

    return [*rows, hidden], finish, hidden


def _of_others(model: Any, device: torch.device, token_ids: Sequence[int], position: int) -> Seen:
    """The states of a model that runs through transformers. What follows its layers is found by watching, and
    checked."""
    layers = layers_of(model)
    if not layers:
        raise ValueError("--xray-logit-lens: the layers of this model cannot be found")
    parent = model.get_submodule(next(iter(layers)).rpartition(".")[0].rpartition(".")[0])
    rows: list[torch.Tensor] = []
    after: list[nn.Module] = []

    def first(module: nn.Module, args: Any, kwargs: Any) -> None:
        rows.append(_hidden(args[0] if args else kwargs["hidden_states"])[position : position + 1].clone())

    def behind(module: nn.Module, args: Any, result: Any) -> None:
        rows.append(_hidden(result)[position : position + 1].clone())

    def later(module: nn.Module, args: Any, result: Any) -> None:
        if len(rows) > len(layers):
            after.append(module)

    modules = [model.get_submodule(path) for path in layers]
    hooks = [modules[0].register_forward_pre_hook(first, with_kwargs=True)]
    hooks += [module.register_forward_hook(behind) for module in modules]
    hooks += [child.register_forward_hook(later) for child in parent.children() if not isinstance(child, nn.ModuleList)]
    try:
        hidden = run_alone(model, device, token_ids)[position : position + 1]
    finally:
        for hook in hooks:
            hook.remove()

    def finish(at: int, row: torch.Tensor) -> torch.Tensor:
        for module in after:
            row = module(row[None])[0]
        return row

    if len(rows) != len(layers) + 1 or not torch.allclose(finish(0, rows[-1]), hidden, rtol=1e-2, atol=1e-3):
        raise ValueError("--xray-logit-lens: what follows this model's layers cannot be told")
    return rows, finish, hidden


def _hidden(value: Any) -> torch.Tensor:
    """``[T, hidden]`` of what a layer takes or gives."""
    x = value[0] if isinstance(value, tuple) else value
    return x[0] if x.dim() == 3 else x

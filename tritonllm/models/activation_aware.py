"""Activation-aware scaling of weights (Lin et al., "AWQ: Activation-aware Weight Quantization", 2023).

A column of a weight that meets large inputs matters more than others. It is multiplied by a factor, and what makes its
input is divided by that: the model computes what it did, and the column's numbers are finer after rounding. Of a column
the factor is mean|x| to the power of an alpha from 0 to 1, of which a search takes the one whose rounded weight leaves
the smallest error of the product. What is divided are the norm before queries, keys and values and the one before gate
and up, the rows of values (for the output projection, one factor for all query heads that share them) and those of up
(for down). Rows have scales of their own, so that division costs nothing.

A norm is rounded to its dtype first, and the columns get what it was divided by in truth.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from tritonllm.layers.linear import Linear
from tritonllm.layers.mlp import MLP
from tritonllm.layers.norm import Norm
from tritonllm.models.decoder import Decoder
from tritonllm.models.decoder_layer import DecoderLayer
from tritonllm.models.one_sequence import run_alone

STEPS = 20  # values of alpha
ROWS, OUTPUTS = 256, 1024  # of a product the inputs and the rows of its weight that the search multiplies
_LEAST = 1e-4
Rounded = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class Rescaling:
    """Other values of a model's parameters with which it computes what it did.

    Attributes:
        vectors: new values of norms and biases, by the parameter's name.
        rows: ``[N]``, what the rows of a weight ``[N, K]`` are multiplied by, by its name.
        columns: ``[K]``, what its columns are multiplied by.
    """

    vectors: dict[str, torch.Tensor] = field(default_factory=dict)
    rows: dict[str, torch.Tensor] = field(default_factory=dict)
    columns: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def touched(self) -> set[str]:
        """The parameters that change."""
        return {*self.vectors, *self.rows, *self.columns}

    def of_rows(self, parameter: str, weight: torch.Tensor, start: int) -> torch.Tensor:
        """Rows ``[n, K]`` of a parameter from ``start`` on, float32, as they are from here on."""
        if parameter in self.columns:
            weight = weight * self.columns[parameter]
        if parameter in self.rows:
            weight = weight * self.rows[parameter][start : start + len(weight), None]
        return weight


@dataclass
class _Inputs:
    """What a product has met: the sum of magnitudes of each column, and some rows."""

    magnitude: torch.Tensor
    count: int
    rows: torch.Tensor

    @property
    def mean(self) -> torch.Tensor:
        return self.magnitude / self.count


@torch.no_grad()
def rescaling(model: Decoder, sequences: Sequence[Sequence[int]], rounded: Rounded, dtype: torch.dtype) -> Rescaling:
    """Find the factors of each layer of a model.

    Args:
        model: on the CPU, with plain weights in float32.
        sequences: token ids of texts.
        rounded: what a weight ``[N, K]`` becomes when it is made narrow, as float32.
        dtype: the dtype that norms are stored in.

    Raises:
        ValueError: no layer is of a kind that can be scaled.
    """
    with _watched(model, -(-ROWS // len(sequences))) as inputs:
        for ids in sequences:
            run_alone(model, torch.device("cpu"), ids)
    search = _Search(inputs, rounded, dtype)
    for place, layer in enumerate(model.layers):
        assert isinstance(layer, DecoderLayer)
        search.scale(f"layers.{place}", layer)
    if not search.found.touched:
        raise ValueError("calibrate: no norm of this model comes right before a product, and no MLP has a gate")
    return search.found


@contextmanager
def _watched(model: Decoder, rows: int) -> Iterator[dict[str, _Inputs]]:
    """Inside the block the inputs of the layers' products are kept, by the name of each; so many rows of a pass."""
    inputs: dict[str, _Inputs] = {}
    products = {name: m for name, m in model.layers.named_modules(prefix="layers") if isinstance(m, Linear)}

    def watch(name: str, product: Linear) -> None:
        forward = product.forward

        def watching(x: torch.Tensor, norm: Norm | None = None, *args: Any, **kwargs: Any) -> torch.Tensor:
            met = (x if norm is None else norm.normalize(x)).float().flatten(0, -2)
            known = inputs.setdefault(name, _Inputs(torch.zeros(met.shape[1]), 0, met[:0].clone()))
            known.magnitude += met.abs().sum(0)
            known.count += len(met)
            known.rows = torch.cat((known.rows, met[:: -(-len(met) // rows)]))
            return forward(x, norm, *args, **kwargs)

        product.forward = watching  # type: ignore[method-assign]

    for name, product in products.items():
        watch(name, product)
    try:
        yield inputs
    finally:
        for product in products.values():
            del product.forward


@dataclass
class _Search:
    """The search for the factors of a model, layer by layer.

    Attributes:
        inputs: what the products have met, by their names.
        rounded, dtype: as of :func:`rescaling`.
        found: what was found so far.
    """

    inputs: Mapping[str, _Inputs]
    rounded: Rounded
    dtype: torch.dtype
    found: Rescaling = field(default_factory=Rescaling)

    def scale(self, path: str, layer: DecoderLayer) -> None:
        """Add the factors of a layer."""
        attention, mlp, spec = layer.attention, layer.mlp, layer.attention.spec
        if attention.gate is None:
            if layer.norms_blocks and layer.attention_norm is not None:
                before = f"{path}.attention_norm", layer.attention_norm
                self._behind_norm(*before, f"{path}.attention.qkv", attention.qkv)
            if spec.v_norm is None and spec.own_keys and not spec.values_are_keys and spec.clip_qkv is None:
                self._behind_values(path, layer)
        if not isinstance(mlp, MLP):
            return
        if layer.norms_blocks and layer.mlp_norm is not None:
            self._behind_norm(f"{path}.mlp_norm", layer.mlp_norm, f"{path}.mlp.up", mlp.up)
        if mlp.spec.gated:
            factors = self._best(f"{path}.mlp.down", mlp.down, (mlp.spec.intermediate_size,))
            self.found.columns[f"{path}.mlp.down.weight"] = factors
            self._divide_rows(f"{path}.mlp.up", mlp.up, mlp.spec.intermediate_size, factors)

    def _behind_norm(self, norm_name: str, norm: Norm, name: str, product: Linear) -> None:
        if norm.weight is None or not norm.spec.weight:
            return
        offset = norm.spec.weight_offset
        before = norm.weight.float() + offset
        stored = (before / self._best(name, product, (product.in_features,)) - offset).to(self.dtype).float()
        exact = torch.where(stored + offset != 0, before / (stored + offset), 1.0)
        self.found.vectors[f"{norm_name}.weight"] = stored
        if norm.bias is not None:
            self.found.vectors[f"{norm_name}.bias"] = norm.bias.float() / exact
        self.found.columns[f"{name}.weight"] = exact

    def _behind_values(self, path: str, layer: DecoderLayer) -> None:
        attention, spec = layer.attention, layer.attention.spec
        heads, size = spec.num_kv_heads, spec.output_size
        share = heads, spec.num_heads // heads, size
        factors = self._best(f"{path}.attention.o", attention.o, share)
        self.found.columns[f"{path}.attention.o.weight"] = factors.expand(share).flatten()
        begin = len(attention.qkv.weight) - heads * size
        self._divide_rows(f"{path}.attention.qkv", attention.qkv, begin, factors.flatten())

    def _divide_rows(self, name: str, product: Linear, begin: int, factors: torch.Tensor) -> None:
        """Divide rows of a product, and of its bias, from ``begin`` on."""
        rows = torch.ones(len(product.weight))
        rows[begin : begin + len(factors)] = 1 / factors
        self.found.rows[f"{name}.weight"] = rows
        if product.bias is not None:
            self.found.vectors[f"{name}.bias"] = product.bias.float() * rows

    def _best(self, name: str, product: Linear, share: tuple[int, ...]) -> torch.Tensor:
        """The factors of a product's columns whose rounded weight leaves the smallest error.

        Args:
            share: ``(K,)``; or a shape of all columns, of which those along the second dimension share a factor.

        Returns:
            ``share``, with 1 in the second dimension if there are several.
        """
        met, weight = self.inputs[name], product.weight[:: -(-len(product.weight) // OUTPUTS)].float()
        means = met.mean.view(share)
        means = means.mean(1, keepdim=True) if len(share) > 1 else means
        wanted, best, least = met.rows @ weight.mT, torch.ones_like(means), torch.inf
        for step in range(STEPS):
            factors = means.clamp(min=_LEAST) ** (step / STEPS)
            factors = factors / (factors.max() * factors.min()).sqrt()
            columns = factors.expand(share).flatten()
            error = float((met.rows @ (self.rounded(weight * columns) / columns).mT - wanted).square().mean())
            if error < least:
                best, least = factors, error
        return best

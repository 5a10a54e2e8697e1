"""Inputs that each layer gets for each token beside the residual stream: a second, narrow embedding with a row for each
layer, as Gemma 4's E2B and E4B have it.

They are made once for a step, of the tokens' ids and embeddings. Behind its MLP each layer gates its own by the stream,
and adds a projection of them. Both are small: every rank computes them whole.
"""

from dataclasses import dataclass

import torch
from torch import nn

from tritonllm.layers.linear import Embedding, Linear
from tritonllm.layers.norm import Norm, NormSpec


@dataclass(frozen=True, kw_only=True)
class LayerInputSpec:
    """The inputs of a model's layers.

    Attributes:
        rows: rows of the table: at least one for each token of the vocabulary.
        size: elements of a layer's input.
        activation: the function of the stream's projection that multiplies an input, as of an MLP.
        norm: the norm of the embedding's projection to the inputs, before the tokens' own rows are added.
    """

    rows: int
    size: int
    activation: str
    norm: NormSpec


class LayerInputs(nn.Module):
    """What makes the inputs of all layers: the mean, but for a factor, of a table's rows and of a projection.

    Args:
        hidden_size, layers: the model's hidden size and number of layers.
    """

    def __init__(
        self,
        hidden_size: int,
        layers: int,
        spec: LayerInputSpec,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self._shape = layers, spec.size
        columns = layers * spec.size
        self.table = Embedding(spec.rows, columns, dtype=dtype, device=device)
        self.project = Linear(hidden_size, columns, bias=False, dtype=dtype, device=device)
        self.norm = Norm((spec.size,), spec.norm, dtype=dtype, device=device)
        # a model multiplies its embeddings by a number of its own dtype
        self._table_scale = float(torch.tensor(spec.size**0.5, dtype=dtype))
        self._project_scale = hidden_size**-0.5

    def forward(self, input_ids: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """``input_ids[T]``, and ``embedded[T, hidden]`` with which the stream begins -> ``[T, layers, size]``."""
        inputs = self.project(embedded).mul_(self._project_scale).unflatten(1, self._shape)
        self.norm.normalize(inputs, out=inputs)
        rows = self.table(input_ids).mul_(self._table_scale).unflatten(1, self._shape)
        return inputs.add_(rows).mul_(2.0**-0.5)


class LayerInput(nn.Module):
    """What a layer does with its input: ``norm(project(act(gate(stream)) * input))``.

    Args:
        norm: the norm of the result.
    """

    def __init__(
        self, hidden_size: int, spec: LayerInputSpec, norm: NormSpec, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self._activation = spec.activation
        self.gate = Linear(hidden_size, spec.size, bias=False, dtype=dtype, device=device)
        self.project = Linear(spec.size, hidden_size, bias=False, dtype=dtype, device=device)
        self.norm = Norm((hidden_size,), norm, dtype=dtype, device=device)

    def forward(self, stream: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """``stream[T, hidden]`` and ``inputs[T, size]`` -> ``[T, hidden]``, to be added; nothing is changed."""
        gated = self.gate(stream, activation=self._activation, gated=False)
        result = self.project(gated.mul_(inputs))
        return self.norm.normalize(result, out=result)

"""What a layer launches on an H200, by the number of rows: the operations of a step of three layers, in their order."""

import dataclasses
from typing import Any

import pytest
import torch
from support.mechanism_configs import MECHANISMS
from support.real_configs import QWEN3_0_6B

from tritonllm.engine.start.precompile import META, pretend, target_of
from tritonllm.kernels.compile.parallel import list_kernels
from tritonllm.kernels.runtime.meta_mode import MetaMode
from tritonllm.kernels.runtime.registry import LAUNCHERS
from tritonllm.layers.metadata import AttentionMetadata, KVCacheView
from tritonllm.layers.segments import Segments, decodes
from tritonllm.models.decoder import Decoder
from tritonllm.models.families import spec_from_config

MODELS = {name.split(" (")[0]: config for name, config in MECHANISMS.items()} | {"qwen3-0.6b": QWEN3_0_6B}
OURS = {func: str(func).split(".")[1] for func in LAUNCHERS}
TORCHS = {
    torch.ops.aten.linear.default: "product",
    torch.ops.aten.add_.Tensor: "add",
    torch.ops.aten.index_select.default: "select",
}
ATTENTION = "fused_decode_attention"


class Noting(MetaMode):
    """Notes what the layers call; not what launchers call in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self._inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._inside or (func not in OURS and func not in TORCHS):
            return super().__torch_dispatch__(func, types, args, kwargs)
        self.names.append(OURS.get(func) or TORCHS[func])
        self._inside = func in OURS
        try:
            return super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self._inside = False


def launches(model: str, rows: int, wanted: int | None = None) -> list[str]:
    """Of a step of decodes."""
    spec = spec_from_config(MODELS[model])
    spec = dataclasses.replace(spec, layers=spec.layers[:1] * 3)
    with pretend(target_of(90)), list_kernels("NVIDIA H200"), torch.inference_mode():
        decoder = Decoder(spec, dtype=torch.bfloat16, device=META, max_model_len=64)

        def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=META)

        lengths, slots = empty(rows, dtype=torch.int32), empty(rows, dtype=torch.int64)
        tables = empty(rows, 4, dtype=torch.int32)
        metadata = AttentionMetadata(Segments(decodes(rows)), slots, tables, lengths, empty(1, dtype=torch.int32))
        shape = (2, 64, 16, *spec.caches[0])
        cache = [KVCacheView(*empty(*shape, dtype=torch.bfloat16)) for _ in spec.layers]
        with Noting() as noting:
            decoder(lengths, slots, metadata, cache, None if wanted is None else empty(wanted, dtype=torch.int64))
    return noting.names


@pytest.mark.parametrize("rows", [1, 16, 64])
def test_few_rows_of_a_dense_model(rows):
    layer = ["linear", ATTENTION, "linear", "linear", "linear"]
    assert launches("qwen3-0.6b", rows) == [*layer * 3, "norm"]


@pytest.mark.parametrize("rows", [65, 256])
def test_some_hundred_rows_of_a_dense_model(rows):
    within = [ATTENTION, "add_linear", "linear_unnormed"]
    layers = ["linear", *within, "add_linear"], ["linear_unnormed", *within, "add_linear"]
    last = ["linear_unnormed", *within, "linear"]
    assert launches("qwen3-0.6b", rows) == [*layers[0], *layers[1], *last, "norm"]


def test_many_rows_of_a_dense_model():
    layer = ["norm", "product", ATTENTION, "product", "norm", "linear", "product"]
    assert launches("qwen3-0.6b", 257) == [*layer * 3, "norm"]


@pytest.mark.parametrize(
    ("rows", "last"),
    [
        (300, ["norm", "select", "product", ATTENTION, "select", "linear", "linear", "linear", "norm"]),
        (128, ["select", "linear", ATTENTION, "select", "linear", "linear", "linear", "norm"]),
    ],
)
def test_few_wanted_rows_of_a_dense_model(rows, last):
    """The last layer is one of few rows behind its attention; the two before are as ever."""
    names = launches("qwen3-0.6b", rows, wanted=3)
    assert names[-len(last) :] == last
    assert names[: -len(last)] == launches("qwen3-0.6b", rows)[: len(names) - len(last)]


@pytest.mark.parametrize(("rows", "router"), [(1, ["moe_logits"]), (16, ["moe_logits"]), (17, ["norm", "linear"])])
def test_few_rows_of_experts(rows, router):
    layer = ["linear", ATTENTION, "linear", *router, "moe_from_logits"]
    assert launches("qwen3-30b-a3b", rows) == [*layer * 3, "norm"]


@pytest.mark.parametrize("rows", [65, 300])
def test_many_rows_of_experts(rows):
    layer = ["product", ATTENTION, "product", "norm", "product", "moe_from_logits"]
    assert launches("qwen3-30b-a3b", rows) == ["norm", *layer * 3, "norm"]


@pytest.mark.parametrize(("rows", "product", "down"), [(7, "linear", "linear"), (128, "product", "product")])
def test_a_sandwich_of_norms(rows, product, down):
    """Norms before and after each block: sum and norm are one launch, and no more."""
    layer = ["norm", product, ATTENTION, product, "norm", "norm", "linear", down, "norm"]
    assert launches("gemma-2-9b", rows) == [*layer * 3, "norm"]

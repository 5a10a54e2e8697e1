"""Checkpoints of AWQ."""

import pytest
import torch
from support.checkpoints import refused_after
from support.narrow_formats import check_pair, integers, positive, write_pair

from tritonllm.models.formats.registry import format_of

Q_PROJ = "model.layers.0.self_attn.q_proj"
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of eight numbers, those that a word has from its lowest bits on


def words(numbers):
    """``[A, B]`` into ``[A, B / 8]``."""
    out = torch.zeros(len(numbers), numbers.shape[1] // 8, dtype=torch.int64)
    for place, which in enumerate(ORDER):
        out |= numbers[:, which::8] << 4 * place
    return torch.where(out >= 1 << 31, out - (1 << 32), out).int()


def awq(shape, generator, *, group=32):
    (n, k), size = shape, group if group > 0 else shape[1]
    numbers, zeros = integers(0, 15, (k, n), generator), integers(0, 15, (-(-k // size), n), generator)
    scales = positive(tuple(zeros.shape), generator, torch.float16)
    column = torch.arange(k) // size
    parts = {".qweight": words(numbers), ".qzeros": words(zeros), ".scales": scales}
    return parts, ((numbers - zeros[column]).float() * scales.float()[column]).mT.contiguous()


@pytest.mark.parametrize("group", [32, 24, -1])
def test_weights(tmp_path, group):
    """Ranks' parts begin within words (heads of 4 rows) and within groups."""
    form = lambda *a: awq(*a, group=group)  # noqa: E731
    where = lambda name: "_proj." in name and ".layers.1." not in name  # noqa: E731
    config = {**AWQ, "group_size": group, "modules_to_not_convert": ["layers.1"]}
    check_pair(write_pair(tmp_path, "qwen3", form, config, where=where, intermediate_size=72, num_hidden_layers=2))


def test_experts(tmp_path):
    form = lambda *a: awq(*a, group=8)  # noqa: E731
    config = {**AWQ, "group_size": 8, "version": "GEMM"}
    check_pair(write_pair(tmp_path, "mixtral", form, config, where=lambda name: ".experts." in name))


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return write_pair(tmp_path_factory.mktemp("awq"), "llama", awq, AWQ, num_hidden_layers=1).narrow


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{Q_PROJ}.scales"), r"q_proj\.qweight .* is awq and needs .*q_proj\.scales of"),
        (
            lambda t: t.update({f"{Q_PROJ}.qzeros": torch.ones(2, 4).int()}),
            r"qzeros of .* \[2, 8\], which is I32",
        ),
        (lambda t: t.update({f"{Q_PROJ}.qweight": torch.zeros(64, 8)}), r"q_proj\.qweight .* is F32; awq has words of"),
    ],
)
def test_bad_files(tmp_path, good, change, message):
    refused_after(change, good, tmp_path, message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 8}, "bits 8 is not supported; supported: 4"),
        ({"version": "gemv"}, "version 'gemv' is not supported; supported: gemm"),
        ({"zero_point": False}, "zero_point false is not supported"),
        ({"group_size": "all"}, "group_size must be a number of columns, or -1 for all, got 'all'"),
    ],
)
def test_bad_configurations(change, message):
    with pytest.raises(ValueError, match=message):
        format_of({**AWQ, **change})

"""A weight as a value: operations take one like a tensor, and refuse a format that they cannot read."""

import pytest
import torch

from tritonllm.kernels import Weight, add_linear, fused_moe, linear, linear_unnormed, moe_from_logits, moe_logits


def new(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


X, MATRIX, NORM = new(2, 16), new(16, 16), new(16)
UP, DOWN = new(3, 16, 16), new(3, 16, 8)
OPERATIONS = {
    "linear": lambda of: linear(X, of(MATRIX)),
    "add_linear": lambda of: add_linear(X, of(MATRIX), None, X.clone(), NORM).scaled,
    "linear_unnormed": lambda of: linear_unnormed(add_linear(X, MATRIX, None, X.clone(), NORM), of(MATRIX)),
    "moe_logits": lambda of: moe_logits(X, of(MATRIX), NORM)[0],
    "fused_moe": lambda of: fused_moe(X, of(UP), of(DOWN), torch.ones(2, 1), torch.tensor([[0], [2]])),
    "moe_from_logits": lambda of: moe_from_logits(X, new(2, 3), of(UP), of(DOWN), 2),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_is_taken_like_a_tensor(name):
    assert torch.equal(OPERATIONS[name](Weight), OPERATIONS[name](lambda tensor: tensor))


@pytest.mark.parametrize("name", OPERATIONS)
def test_another_format_is_refused(name):
    with pytest.raises(ValueError, match="must be a plain weight here, got one of the format 'onednn'"):
        OPERATIONS[name](lambda tensor: Weight(tensor, format="onednn"))

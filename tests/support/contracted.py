"""Lets Triton's interpreter compute ``a * b + c`` as a GPU does: with one rounding, where a compiler sees both."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import triton.runtime.interpreter as interpreter

TensorHandle = interpreter.TensorHandle


class Product(np.ndarray):
    """A rounded product that knows the exact one, which two float32 have in float64. What is made of it does not."""

    exact: np.ndarray | None = None


def _exact(handle: TensorHandle) -> np.ndarray | None:
    return getattr(handle.data, "exact", None)


@contextmanager
def contracted_products() -> Iterator[None]:
    """A float32 product that is added to something, or from or to which something is subtracted, is not rounded."""
    builder = interpreter.InterpreterBuilder
    multiply, add, subtract = builder.create_fmul, builder.create_fadd, builder.create_fsub

    def create_fmul(self, lhs, rhs):
        out = multiply(self, lhs, rhs)
        if out.data.dtype != np.float32:
            return out
        data = out.data.view(Product)
        with np.errstate(all="ignore"):
            data.exact = np.asarray(lhs.data, np.float64) * np.asarray(rhs.data, np.float64)
        return TensorHandle(data, out.dtype)

    def contracted(stock, op):
        def create(self, lhs, rhs):
            one, other = _exact(lhs), _exact(rhs)
            if one is None and other is None:
                return stock(self, lhs, rhs)
            left = np.asarray(lhs.data, np.float64) if one is None else one
            right = other if one is None else np.asarray(rhs.data, np.float64)
            with np.errstate(all="ignore"):
                return TensorHandle(op(left, right).astype(np.float32), lhs.dtype)

        return create

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "create_fmul", create_fmul)
        patch.setattr(builder, "create_fadd", contracted(add, np.add))
        patch.setattr(builder, "create_fsub", contracted(subtract, np.subtract))
        yield

"""Spares Triton's interpreter (triton 3.6 to 3.9) what is the same every time. For tests only.

What a profile of `tests/kernels/speculative/test_rejection_tree.py` showed, and most other tests of kernels with it:

- 43% went to reductions with a function of the kernel's own. The interpreter calls it once for each element, and each
  operation in it goes through all of Triton's checks of types. Here it is called once for each halving of the axis.
- 23% to patching `triton.language` anew in each call of a device function, though the kernel's launch had done it.
- 9% to a table of 20 dtypes, made anew for each look at it, and 17% to the shapes of types and tensors.
- With these gone, a fifth of what was left to comparing shapes and dtypes that are the same objects.

With all of it the file takes 25 s of processor time, of 110; `tests/kernels` takes less than a third of what it took.
"""

import ast
import inspect
import textwrap
from typing import Any

import numpy as np
import triton.language as tl
import triton.runtime.interpreter as interpreter
from triton.language.semantic import TritonSemantic

DECIDES = (ast.BoolOp, ast.Not, ast.If, ast.IfExp, ast.While, ast.For)  # what asks a block for one truth, or elements


def apply() -> None:
    """Patch the interpreter of this process (idempotent)."""
    if hasattr(interpreter, "_tritonllm_is_faster"):
        return
    _keep_dtypes()
    _keep_shapes()
    _compare_at_once()
    _patch_the_language_once_a_launch()
    _reduce_by_halves()
    interpreter._tritonllm_is_faster = True


def _keep_dtypes() -> None:
    stock, known = interpreter._get_np_dtype, {}

    def get_np_dtype(dtype: tl.dtype) -> np.dtype:
        found = known.get(dtype.name)
        if found is None:
            found = known[dtype.name] = stock(dtype)
        return found

    interpreter._get_np_dtype = get_np_dtype


def _keep_shapes() -> None:
    """Types of blocks and tensors take their shape, which they unwrap, check and wrap, from the first of their kind."""
    block_init, tensor_init = tl.block_type.__init__, tl.tensor.__init__
    blocks: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
    shapes: dict[tuple[int, ...], Any] = {}
    tensors: dict[str, dict[str, Any]] = {}

    def init_block(self: Any, element_ty: tl.dtype, shape: Any) -> None:
        key = element_ty.name, tuple(n.value if isinstance(n, tl.constexpr) else n for n in shape)
        if key not in blocks:
            block_init(self, element_ty, shape)
            self.shape = shapes.setdefault(key[1], self.shape)
            blocks[key] = dict(vars(self))
        else:
            vars(self).update(blocks[key], element_ty=element_ty)

    def init_tensor(self: Any, handle: Any, type: tl.dtype) -> None:
        if type.name not in tensors:
            tensor_init(self, handle, type)
            tensors[type.name] = dict(vars(self))
        else:
            vars(self).update(tensors[type.name], handle=handle, type=type, dtype=type.scalar)

    tl.block_type.__init__, tl.tensor.__init__ = init_block, init_tensor


def _compare_at_once() -> None:
    """Every operation compares the shapes of its operands, as lists, and their dtypes. Equal shapes are one object."""
    stock_broadcast, stock_equals = TritonSemantic.broadcast_impl_value, tl.dtype.__eq__

    def broadcast(self: Any, lhs: tl.tensor, rhs: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
        if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape is rhs.type.shape:
            return lhs, rhs
        return stock_broadcast(self, lhs, rhs)

    def equals(self: Any, other: Any) -> bool:
        return self is other or (self.name == other.name if type(other) is tl.dtype else stock_equals(self, other))

    TritonSemantic.broadcast_impl_value, tl.dtype.__eq__ = broadcast, equals


class _Scope:
    """What undoes the patches of a launch."""

    def __init__(self, stock: Any, patched: set[int]) -> None:
        self.stock, self.patched = stock, patched

    def restore(self) -> None:
        self.patched.clear()
        self.stock.restore()


def _patch_the_language_once_a_launch() -> None:
    """A launch patches what its kernel's module sees of the language, and undoes that. A device function is called
    inside a launch: its module's language is patched then, unless it sees more of it, which the first call finds."""
    stock = interpreter._patch_lang
    patched: set[int] = set()  # modules, by their globals, within one launch
    names: dict[Any, list[str]] = {}

    def patch_lang(fn: Any) -> Any:
        if id(fn.__globals__) in patched:
            return interpreter._LangPatchScope()  # with nothing to undo
        is_launch = not patched
        patched.add(id(fn.__globals__))
        scope = stock(fn)
        return _Scope(scope, patched) if is_launch else scope

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        if package not in names:
            names[package] = [name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]
        for name in names[package]:
            member = getattr(package, name)
            if tl.core.is_builtin(member):
                interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_lang, interpreter._patch_builtin = patch_lang, patch_builtin


def is_elementwise(fn: Any) -> bool:
    """Whether a function of scalars computes the same of blocks, element by element."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(fn)))
    return not any(isinstance(node, DECIDES) for node in ast.walk(tree))


def _reduce_by_halves() -> None:
    """A reduction's function gets neighbours, then neighbouring pairs, and so on, as on a GPU. The stock interpreter
    adds one element after the other, so that the function never sees two results of its own."""
    stock = interpreter.ReduceOps.generic_reduce
    elementwise: dict[Any, bool] = {}

    def halve(op: Any, blocks: list[np.ndarray], dtypes: list[tl.dtype], axis: int) -> list[np.ndarray]:
        before = (slice(None),) * axis
        pairs = [
            op.to_tensor(block[(*before, slice(first, None, 2))], dtype)
            for first in (0, 1)
            for block, dtype in zip(blocks, dtypes, strict=True)
        ]
        combined = op.combine_fn.fn(*pairs)
        combined = combined if isinstance(combined, tuple) else (combined,)
        return [np.asarray(c.handle.data).astype(block.dtype) for c, block in zip(combined, blocks, strict=True)]

    def generic_reduce(self: Any, input: tuple) -> list:
        fn = self.combine_fn.fn
        if fn not in elementwise:
            elementwise[fn] = is_elementwise(fn)
        if not elementwise[fn]:
            return stock(self, input)
        original_axis = self.axis
        input, axis = self.unravel(input, original_axis)
        blocks, dtypes = [x.handle.data for x in input], [x.dtype for x in input]
        axis %= blocks[0].ndim
        while blocks[0].shape[axis] > 1:
            blocks = halve(self, blocks, dtypes, axis)
        if not self.keep_dims:
            blocks = [block.squeeze(axis) for block in blocks]
        return [self.to_tensor(block, dtype) for block, dtype in zip(blocks, dtypes, strict=True)]

    interpreter.ReduceOps.generic_reduce = generic_reduce

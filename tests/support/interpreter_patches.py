"""Makes Triton's interpreter compute bfloat16 and float8 as a GPU does. For tests only.

The stock interpreter (triton 3.6 to 3.9) keeps bfloat16 values as their 16 bits and does integer arithmetic on them,
and rounds to float8 in its own way. Here every bfloat16 operation goes through float32 and rounds to nearest even, and
float8 casts go through torch. Triton 3.6 also lacks ``__index__`` on scalars, which numpy >= 2.4 asks for. Triton 3.9
takes only masks of bytes, while the compiler takes any integers: a scalar's comparison is an int32 in the interpreter.
"""

import numpy as np
import torch
import triton
import triton.language as tl
import triton.runtime.interpreter as interpreter

TensorHandle = interpreter.TensorHandle
FLOAT8 = {tl.float8e4nv: torch.float8_e4m3fn, tl.float8e5: torch.float8_e5m2}


def bits_to_float32(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def float32_to_bits(x: np.ndarray) -> np.ndarray:
    """Round to nearest even; any NaN becomes the quiet one."""
    x = np.asarray(x, np.float32)
    u = np.ascontiguousarray(x).view(np.uint32)
    rounded = ((u + (((u >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded).reshape(x.shape)


def _is_bf16(handle: TensorHandle) -> bool:
    return handle.dtype.scalar == tl.bfloat16


def _widen(handle: TensorHandle) -> TensorHandle:
    return TensorHandle(bits_to_float32(handle.data), tl.float32) if _is_bf16(handle) else handle


def _to_float8(x: np.ndarray, dtype: tl.dtype) -> np.ndarray:
    """Round to nearest even and saturate, as ``cvt.rn.satfinite`` does."""
    torch_dtype = FLOAT8[dtype]
    limit = torch.finfo(torch_dtype).max
    t = torch.from_numpy(np.ascontiguousarray(x, np.float32)).clamp(-limit, limit)
    return t.to(torch_dtype).view(torch.uint8).numpy()


def apply() -> None:
    """Patch the interpreter of this process (idempotent)."""
    builder = interpreter.InterpreterBuilder
    if getattr(builder, "_tritonllm_patched", False):
        return
    stock_dot, stock_binary, stock_unary = builder.create_dot, builder.binary_op, builder.unary_op
    stock_cast, stock_fp_to_fp = builder.cast_impl, builder.create_fp_to_fp
    stock_load, stock_store = builder.create_masked_load, builder.create_masked_store

    def create_dot(self, a, b, d, *rest):
        return stock_dot(self, _widen(a), _widen(b), d, *rest)

    def binary_op(self, lhs, rhs, op):
        if not _is_bf16(lhs):
            return stock_binary(self, lhs, rhs, op)
        out = op(bits_to_float32(lhs.data), bits_to_float32(rhs.data))
        if out.dtype == np.bool_:
            return TensorHandle(out, tl.int1)
        return TensorHandle(float32_to_bits(out), tl.bfloat16)

    def unary_op(self, arg, op):
        if not _is_bf16(arg):
            return stock_unary(self, arg, op)
        return TensorHandle(float32_to_bits(op(bits_to_float32(arg.data))), tl.bfloat16)

    def cast_impl(self, src, dst_type):
        source, target = src.dtype.scalar, dst_type.scalar
        if source == target:
            return src
        if source == tl.bfloat16:
            wide = bits_to_float32(src.data)
            return TensorHandle(wide.astype(interpreter._get_np_dtype(target)), target)
        if target == tl.bfloat16:
            return TensorHandle(float32_to_bits(src.data.astype(np.float32)), target)
        return stock_cast(self, src, dst_type)

    def create_fp_to_fp(self, src, dst_type, rounding_mode):
        source, target = src.dtype.scalar, dst_type.scalar
        if target in FLOAT8 and source in (tl.float32, tl.float16, tl.bfloat16):
            return TensorHandle(_to_float8(_widen(src).data.astype(np.float32), target), target)
        wide_enough = source.primitive_bitwidth >= 16 and target.primitive_bitwidth >= 16
        if tl.bfloat16 in (source, target) and wide_enough:
            return cast_impl(self, src, dst_type)
        return stock_fp_to_fp(self, src, dst_type, rounding_mode)

    def create_masked_load(self, ptrs, mask, *rest):
        return stock_load(self, ptrs, TensorHandle(mask.data.astype(np.bool_), tl.int1), *rest)

    def create_masked_store(self, ptrs, value, mask, *rest):
        return stock_store(self, ptrs, value, TensorHandle(mask.data.astype(np.bool_), tl.int1), *rest)

    builder.create_masked_load, builder.create_masked_store = create_masked_load, create_masked_store
    builder.create_dot, builder.binary_op, builder.unary_op = create_dot, binary_op, unary_op
    builder.cast_impl, builder.create_fp_to_fp = cast_impl, create_fp_to_fp
    for name in ("si_to_fp", "ui_to_fp", "fp_to_si", "fp_to_ui", "fp_ext", "fp_trunc"):
        setattr(builder, f"create_{name}", lambda self, src, dst_type: cast_impl(self, src, dst_type))
    builder._tritonllm_patched = True

    if triton.__version__.startswith("3.6"):
        stock_patch = interpreter._patch_lang_tensor

        def patch_lang_tensor(tensor, *scope):
            stock_patch(tensor, *scope)
            tensor.__index__ = lambda self: int(self.handle.data.item())

        interpreter._patch_lang_tensor = patch_lang_tensor

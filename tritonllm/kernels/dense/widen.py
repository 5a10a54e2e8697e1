"""Narrow numbers as the operands of a product: bytes of a tile in registers to float16, bfloat16 or float32.

Triton converts float8 to bfloat16 through float16 and float32, and integers through float32: conversions run at a
quarter of the rate of other instructions or less. Here four bytes of a register become four numbers in place. A byte of
float8 (e4m3) is moved to where bfloat16 has its exponent and mantissa, and times 2^120 it is the number (the exponents'
biases are 7 and 127): 2.5 instructions an element. An integer becomes the low bits of a number whose step is 1, from
which the offset is taken away (Kim et al., "Who Says Elephants Can't Run" (2022)): 1.4 instructions for four bits. All
are exact: what e4m3, int8 and four bits hold, bfloat16 holds; but the two bytes that e4m3 has for NaN become 480.

A float of four bits (E2M1) is twice an integer, so a permutation finds it as such in a table of bytes (two: one for
each sign), and the fused multiplication that takes the offset away gives it its scale: 2.1 instructions. With a scale
that is a power of two (E8M0), or has four bits (e4m3), the product is exact in bfloat16, too.

Where there is no such assembly (the interpreter, other makers' chips), Triton's conversions give the same numbers.
"""

import torch
import triton
import triton.language as tl

from tritonllm.kernels.runtime.chip import chip_of

# Two bytes in the upper halves of 16 bits each; then sign, and exponent with mantissa, each in its place; times 2^120.
_FP8_TO_BF16 = tl.constexpr("""{
.reg .b32 a, b, c, d;
prmt.b32 a, $2, 0, 0x1404;
prmt.b32 b, $2, 0, 0x3424;
shr.b32 c, a, 4;
shr.b32 d, b, 4;
and.b32 a, a, 0x80008000;
and.b32 b, b, 0x80008000;
lop3.b32 a, c, 0x07f007f0, a, 0xea;
lop3.b32 b, d, 0x07f007f0, b, 0xea;
mov.b32 c, 0x7b807b80;
mov.b32 d, 0x80008000;
fma.rn.bf16x2 $0, a, c, d;
fma.rn.bf16x2 $1, b, c, d;
}""")
# The byte plus 128 as the lowest byte of 2^23, in float32; bfloat16 has the difference exactly.
_INT8_TO_BF16 = tl.constexpr("""{
.reg .b32 w, m;
.reg .f32 a, b, c, d, o;
.reg .b32 p, q, r, s;
xor.b32 w, $2, 0x80808080;
mov.b32 m, 0x4b000000;
prmt.b32 p, w, m, 0x7440;
prmt.b32 q, w, m, 0x7441;
prmt.b32 r, w, m, 0x7442;
prmt.b32 s, w, m, 0x7443;
mov.b32 a, p;
mov.b32 b, q;
mov.b32 c, r;
mov.b32 d, s;
mov.f32 o, 0f4B000080;
sub.f32 a, a, o;
sub.f32 b, b, o;
sub.f32 c, c, o;
sub.f32 d, d, o;
cvt.rn.bf16x2.f32 $0, b, a;
cvt.rn.bf16x2.f32 $1, d, c;
}""")
_INT8_TO_FP16 = tl.constexpr("""{
.reg .b32 w, m, o;
xor.b32 w, $2, 0x80808080;
mov.b32 m, 0x64646464;
mov.b32 o, 0x64806480;
prmt.b32 $0, w, m, 0x4140;
prmt.b32 $1, w, m, 0x4342;
sub.f16x2 $0, $0, o;
sub.f16x2 $1, $1, o;
}""")
# Four low and four high nibbles, each as the low bits of 128 (bfloat16) or 1024 (float16), plus what is given.
_INT4_TO_BF16 = tl.constexpr("""{
.reg .b32 l, h, m, o;
and.b32 l, $4, 0x0f0f0f0f;
shr.b32 h, $4, 4;
and.b32 h, h, 0x0f0f0f0f;
mov.b32 m, 0x43434343;
mov.b32 o, 0x3f803f80;
prmt.b32 $0, l, m, 0x4140;
prmt.b32 $1, l, m, 0x4342;
prmt.b32 $2, h, m, 0x4140;
prmt.b32 $3, h, m, 0x4342;
fma.rn.bf16x2 $0, $0, o, $5;
fma.rn.bf16x2 $1, $1, o, $6;
fma.rn.bf16x2 $2, $2, o, $5;
fma.rn.bf16x2 $3, $3, o, $6;
}""")
_INT4_TO_FP16 = tl.constexpr("""{
.reg .b32 l, h, m;
and.b32 l, $4, 0x0f0f0f0f;
shr.b32 h, $4, 4;
and.b32 h, h, 0x0f0f0f0f;
mov.b32 m, 0x64646464;
prmt.b32 $0, l, m, 0x4140;
prmt.b32 $1, l, m, 0x4342;
prmt.b32 $2, h, m, 0x4140;
prmt.b32 $3, h, m, 0x4342;
add.f16x2 $0, $0, $5;
add.f16x2 $1, $1, $6;
add.f16x2 $2, $2, $5;
add.f16x2 $3, $3, $6;
}""")

# One permutation looks up four nibbles. A set sign bit makes it give the highest bit of the byte, 0, instead; so of 64
# plus twice the number, for one sign, and 64 less that, for the other, one is there: the lowest byte of 128.
_FP4_TO_BF16 = tl.constexpr("""{
.reg .b32 w, x, v, u;
mov.b32 w, $4;
xor.b32 x, w, 0x88888888;
prmt.b32 v, 0x43424140, 0x4c484644, w;
prmt.b32 u, 0x3d3e3f40, 0x34383a3c, x;
or.b32 v, v, u;
shr.b32 w, w, 16;
shr.b32 x, x, 16;
prmt.b32 $0, v, 0x43434343, 0x4240;
prmt.b32 $2, v, 0x43434343, 0x4341;
prmt.b32 v, 0x43424140, 0x4c484644, w;
prmt.b32 u, 0x3d3e3f40, 0x34383a3c, x;
or.b32 v, v, u;
prmt.b32 $1, v, 0x43434343, 0x4240;
prmt.b32 $3, v, 0x43434343, 0x4341;
fma.rn.bf16x2 $0, $0, $5, $7;
fma.rn.bf16x2 $1, $1, $6, $8;
fma.rn.bf16x2 $2, $2, $5, $7;
fma.rn.bf16x2 $3, $3, $6, $8;
}""")


def widens_in_place(device: torch.device) -> bool:
    """Whether the chip behind ``device`` has the instructions: NVIDIA's from compute capability 8.0 on."""
    chip = chip_of(device)
    return chip is not None and isinstance(chip.arch, int) and chip.arch >= 80


@triton.jit
def widen_bytes(b_bytes, dtype: tl.constexpr, IN_PLACE: tl.constexpr):
    """Numbers of float8 (e4m3) or int8 in another dtype."""
    if not IN_PLACE:
        b_wide = b_bytes.to(dtype)
    elif dtype == tl.float32 and b_bytes.dtype == tl.int8:
        b_wide = widen_bytes(b_bytes, tl.bfloat16, True).to(tl.float32)
    elif dtype == tl.bfloat16:
        ASM: tl.constexpr = _INT8_TO_BF16 if b_bytes.dtype == tl.int8 else _FP8_TO_BF16
        b_wide = tl.inline_asm_elementwise(ASM, "=r,=r,r", [b_bytes], dtype=tl.bfloat16, is_pure=True, pack=4)
    elif b_bytes.dtype == tl.int8:
        b_wide = tl.inline_asm_elementwise(_INT8_TO_FP16, "=r,=r,r", [b_bytes], dtype=tl.float16, is_pure=True, pack=4)
    else:
        b_wide = b_bytes.to(dtype)  # through float16, of which one instruction makes two
    return b_wide


@triton.jit
def widen_nibbles(b_bytes, b_zero, dtype: tl.constexpr, IN_PLACE: tl.constexpr):
    """The low and the high four bits of each byte less ``b_zero`` (float32, 0 to 16, as wide as the tile or 1)."""
    if dtype == tl.float32:
        b_low, b_high = widen_nibbles(b_bytes, b_zero, tl.bfloat16, IN_PLACE)
        b_low, b_high = b_low.to(tl.float32), b_high.to(tl.float32)
    elif IN_PLACE:
        if dtype == tl.bfloat16:
            b_offset = tl.broadcast_to((-128.0 - b_zero).to(tl.bfloat16), b_bytes.shape)
            b_low, b_high = tl.inline_asm_elementwise(
                _INT4_TO_BF16,
                "=r,=r,=r,=r,r,r,r",
                [b_bytes, b_offset],
                dtype=(tl.bfloat16, tl.bfloat16),
                is_pure=True,
                pack=4,
            )
        else:
            b_offset = tl.broadcast_to((-1024.0 - b_zero).to(tl.float16), b_bytes.shape)
            b_low, b_high = tl.inline_asm_elementwise(
                _INT4_TO_FP16,
                "=r,=r,=r,=r,r,r,r",
                [b_bytes, b_offset],
                dtype=(tl.float16, tl.float16),
                is_pure=True,
                pack=4,
            )
    else:
        b_low = ((b_bytes & 15).to(tl.float32) - b_zero).to(dtype)
        b_high = ((b_bytes >> 4).to(tl.float32) - b_zero).to(dtype)
    return b_low, b_high


@triton.jit
def read_scales(b_scale, KIND: tl.constexpr):
    """Scales as float32, of which bytes are E8M0 or not negative e4m3 (``KIND``, by
    :func:`~tritonllm.kernels.dense.arguments.scales_for_kernel`)."""
    if KIND is None:
        b_read = b_scale.to(tl.float32)
    elif KIND == "e8m0":  # the byte 0 is 2^-127, which float32 has without its leading one
        b_read = tl.maximum(b_scale.to(tl.int32) << 23, 0x400000).to(tl.float32, bitcast=True)
    else:
        b_number = b_scale.to(tl.int32)
        b_read = ((b_number << 20) + (120 << 23)).to(tl.float32, bitcast=True)
        b_read = tl.where(b_number < 8, b_number.to(tl.float32) * 0.001953125, b_read)
    return b_read


@triton.jit
def load_scales(
    p_row,
    m_row,
    start,
    K,
    GROUP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    KIND: tl.constexpr,
    WORDS: tl.constexpr,
):
    """The scales of ``BLOCK_K`` columns from ``start`` on, ``[N, groups]`` float32, of rows that begin at
    ``p_row [N, 1]``; where ``m_row [N, 1]`` (``None``: everywhere) is False, or there is no group, any finite ones.

    With ``WORDS`` those of a row are one word, which is copied ahead as weights are: single bytes are not.
    """
    GROUPS: tl.constexpr = max(1, BLOCK_K // GROUP_K)
    b_group = start // GROUP_K + tl.arange(0, GROUPS)[None, :]
    if WORDS:
        WORD: tl.constexpr = tl.uint32 if GROUPS == 4 else tl.uint64
        p_word = (p_row + start // GROUP_K).to(tl.pointer_type(WORD))
        b_word = tl.load(p_word) if m_row is None else tl.load(p_word, mask=m_row, other=0)
        b_scale = read_scales((b_word >> (8 * tl.arange(0, GROUPS)[None, :])) & 255, KIND)
        b_scale = tl.where(b_group * GROUP_K < K, b_scale, 1.0)
    else:
        m_group = b_group * GROUP_K < K
        m_group = m_group if m_row is None else m_group & m_row
        b_scale = read_scales(tl.load(p_row + b_group, mask=m_group, other=0), KIND)
    return b_scale


@triton.jit
def _of_each(b_scale, SHAPE: tl.constexpr):
    """``[N or 1, groups]`` for every byte ``[N, bytes]``, whose groups lie one after the other."""
    GROUPS: tl.constexpr = b_scale.shape[1]
    if GROUPS > 1:
        b_scale = tl.broadcast_to(b_scale[:, :, None], [SHAPE[0], GROUPS, SHAPE[1] // GROUPS])
        b_scale = tl.reshape(b_scale, SHAPE)
    else:
        b_scale = tl.broadcast_to(b_scale, SHAPE)
    return b_scale


@triton.jit
def _float4(b_nibble, b_half, dtype: tl.constexpr):
    """Floats of four bits, times twice ``b_half`` (float32)."""
    b_shift = tl.maximum(b_nibble >> 1 & 3, 1) - 1
    b_twice = ((b_nibble & 1) + 2) << b_shift
    b_twice = tl.where((b_nibble & 6) == 0, b_nibble & 1, b_twice).to(tl.float32)
    return (tl.where(b_nibble >= 8, -b_twice, b_twice) * b_half).to(dtype)


@triton.jit
def widen_floats4(b_bytes, b_scale, dtype: tl.constexpr, IN_PLACE: tl.constexpr):
    """The low and the high four bits of each byte ``[N, bytes]`` as E2M1, times ``b_scale [N or 1, groups]`` float32 (a
    number of bfloat16, up to 2^120), rounded to ``dtype``; groups of a row have equally many bytes."""
    b_half = b_scale * 0.5
    if IN_PLACE and dtype == tl.bfloat16:
        b_low, b_high = tl.inline_asm_elementwise(
            _FP4_TO_BF16,
            "=r,=r,=r,=r,r,r,r,r,r",
            [
                b_bytes,
                _of_each(b_half.to(tl.bfloat16), b_bytes.shape),
                _of_each((b_half * -192).to(tl.bfloat16), b_bytes.shape),
            ],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    elif IN_PLACE:
        b_low, b_high = widen_floats4(b_bytes, b_scale, tl.bfloat16, True)
        b_low, b_high = b_low.to(dtype), b_high.to(dtype)
    else:
        b_half = _of_each(b_half, b_bytes.shape)
        b_low, b_high = _float4(b_bytes & 15, b_half, dtype), _float4(b_bytes >> 4, b_half, dtype)
    return b_low, b_high

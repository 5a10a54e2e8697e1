"""Narrow numbers as the operands of a product: bytes of a tile in registers to float16, bfloat16 or float32.

Triton converts float8 to bfloat16 through float16 and float32, and integers through float32: conversions run at a
quarter of the rate of other instructions or less. Here four bytes of a register become four numbers in place. A byte of
float8 (e4m3) is moved to where bfloat16 has its exponent and mantissa, and times 2^120 it is the number (the exponents'
biases are 7 and 127): 2.5 instructions an element. An integer becomes the low bits of a number whose step is 1, from
which the offset is taken away (Kim et al., "Who Says Elephants Can't Run" (2022)): 1.4 instructions for four bits. All
are exact: what e4m3, int8 and four bits hold, bfloat16 holds; but the two bytes that e4m3 has for NaN become 480.

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

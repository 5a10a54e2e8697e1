"""What the Hopper kernel of :mod:`tritonllm.kernels.dense.sm90.tiles` does around its products: what it fetches before
one, and what it does with 64 rows of sums after it."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tritonllm.kernels.elementwise import activate


@gluon.jit
def _place(out, shape, row, column, WIDTH: gl.constexpr, layout: gl.constexpr):
    """Addresses of 64 rows of `WIDTH` columns of the result, rows, columns, and which elements are there."""
    M, N = shape
    b_row = row + gl.arange(0, 64, gl.SliceLayout(1, layout))
    b_col = column + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    p_out = out[0] + b_row.to(gl.int64)[:, None] * out[1] + b_col[None, :]
    return p_out, b_row, b_col, (b_row < M)[:, None] & (b_col < N)[None, :]


@gluon.jit
def fetch_stream(out, shape, begin, row, column, WIDTH: gl.constexpr):
    """What a product is added to: fetched before the product, after which it would be half a microsecond more."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    p_out, b_row, b_col, m_out = _place(out, shape, row, column, WIDTH, layout)
    return gl.load(p_out, mask=m_out & (b_row >= begin)[:, None], other=0.0)


@gluon.jit
def add_to_stream(b_acc, b_before, bias_ptr, out, following, shape, scale, begin, row, first):
    """The tile's 64 rows from `row` on: added to the stream, and what the norm after it needs; only those from `begin`
    on, since another tile adds the others."""
    M, N = shape
    scaled_ptr, norm_ptr, norm_offset, squares_ptr = following
    WIDTH: gl.constexpr = b_acc.shape[1]
    layout: gl.constexpr = b_acc.type.layout
    p_out, b_row, b_col, m_out = _place(out, shape, row, first, WIDTH, layout)
    m_out = m_out & (b_row >= begin)[:, None]
    if bias_ptr is not None:
        b_acc += gl.load(bias_ptr + b_col, mask=b_col < N, other=0.0).to(gl.float32)[None, :]
    b_out = (b_before.to(gl.float32) + b_acc * scale).to(out[0].dtype.element_ty)
    gl.store(p_out, b_out, mask=m_out)
    b_out = b_out.to(gl.float32)
    b_norm = gl.load(norm_ptr + b_col, mask=b_col < N, other=0.0).to(gl.float32) + norm_offset
    p_scaled = scaled_ptr + b_row.to(gl.int64)[:, None] * N + b_col[None, :]
    gl.store(p_scaled, (b_out * b_norm[None, :]).to(scaled_ptr.dtype.element_ty), mask=m_out)
    gl.store(squares_ptr + first // WIDTH * M + b_row, gl.sum(b_out * b_out, 1), mask=(b_row >= begin) & (b_row < M))


@gluon.jit
def fetch_squares(norm, M, row, TERMS: gl.constexpr):
    """Parts of the sums of squares of 64 rows: fetched before the product, added up after it."""
    squares_ptr, terms, eps = norm
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    b_row = row + gl.arange(0, 64, gl.SliceLayout(0, layout))
    b_term = gl.arange(0, TERMS, gl.SliceLayout(1, layout))
    p_squares = squares_ptr + b_term[:, None] * M + b_row[None, :]
    return gl.load(p_squares, mask=(b_term < terms)[:, None] & (b_row < M)[None, :], other=0.0)


@gluon.jit
def normalise_and_activate(b_acc, b_factor, bias_ptr, out, shape, row, first, GATED: gl.constexpr, ACT: gl.constexpr):
    """The norm's factor, bias, activation and store of a tile's 64 rows; of the weight's rows from `first` on."""
    M, N = shape
    WIDTH: gl.constexpr = b_acc.shape[1]
    layout: gl.constexpr = b_acc.type.layout
    b_acc *= gl.convert_layout(b_factor, gl.SliceLayout(1, layout))[:, None]
    if GATED:
        # a thread holds a gate and the up 8 columns further, so they are taken apart in registers
        b_both = gl.permute(gl.reshape(b_acc, [64, WIDTH // 16, 2, 8]), (0, 1, 3, 2))
        b_y, b_up = gl.split(gl.reshape(b_both, [64, WIDTH // 2, 2]))
        half: gl.constexpr = b_y.type.layout
        p_out, b_row, b_col, m_out = _place(out, shape, row, first // 2, WIDTH // 2, half)
    else:
        b_y = b_acc
        p_out, b_row, b_col, m_out = _place(out, shape, row, first, WIDTH, layout)
    if bias_ptr is not None:
        m_col = b_col < N
        b_y += gl.load(bias_ptr + b_col, mask=m_col, other=0.0).to(gl.float32)[None, :]
        if GATED:
            b_up += gl.load(bias_ptr + N + b_col, mask=m_col, other=0.0).to(gl.float32)[None, :]
    if ACT is not None:
        b_y = activate(b_y, ACT)
    if GATED:
        b_y *= b_up
    gl.store(p_out, b_y.to(out[0].dtype.element_ty), mask=m_out)

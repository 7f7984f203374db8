"""Where things lie: batch entries, chunks and rows as 64-bit offsets."""

import triton
import triton.language as tl


@triton.jit
def batch_of(b, n1, n2):
    """The three batch indices of entry number b (int64)."""
    return b // (n2 * n1), (b // n2) % n1, b % n2


@triton.jit
def entry(pointer, strides, b0, b1, b2):
    """A view's pointer moved to a batch entry."""
    return pointer + (b0 * strides[0] + b1 * strides[1] + b2 * strides[2])


@triton.jit
def chunk_bounds(chunks, n, T, TABLE: tl.constexpr, C: tl.constexpr):
    """The first token of chunk n and the one behind its last (int64)."""
    if TABLE:
        start = tl.load(chunks + n * 3)
        stop = tl.load(chunks + n * 3 + 1)
    else:
        start = n * C
        stop = tl.minimum(start + C, T)
    return start, stop


@triton.jit
def load_rows(pointer, strides, t, valid, columns, width, DOT: tl.constexpr):
    """Tokens t of a stream, (C, columns), as an operand of a product; zero where a token or column is not there."""
    at = pointer + t[:, None] * strides[3] + columns[None, :].to(tl.int64) * strides[4]
    return tl.load(at, mask=valid[:, None] & (columns[None, :] < width), other=0.0).to(DOT)


@triton.jit
def store_rows(pointer, strides, t, inside, columns, width, value):
    """Writes tokens t of a stream."""
    at = pointer + t[:, None] * strides[3] + columns[None, :].to(tl.int64) * strides[4]
    tl.store(at, value.to(pointer.dtype.element_ty), mask=inside[:, None] & (columns[None, :] < width))


@triton.jit
def matrix(pointer, strides, n, rows, columns):
    """Pointers to a tile of the n-th matrix of a view whose own axes are (n, row, column)."""
    at = n * strides[3] + rows[:, None].to(tl.int64) * strides[4]
    return pointer + (at + columns[None, :].to(tl.int64) * strides[5])


@triton.jit
def load_matrix(pointer, strides, n, rows, height, columns, width):
    """A tile of a matrix, zero outside it."""
    mask = (rows[:, None] < height) & (columns[None, :] < width)
    return tl.load(matrix(pointer, strides, n, rows, columns), mask=mask, other=0.0)


@triton.jit
def store_matrix(pointer, strides, n, rows, height, columns, width, value):
    """Writes a tile of a matrix."""
    mask = (rows[:, None] < height) & (columns[None, :] < width)
    tl.store(matrix(pointer, strides, n, rows, columns), value.to(pointer.dtype.element_ty), mask=mask)

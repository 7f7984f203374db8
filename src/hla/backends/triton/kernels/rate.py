r"""All chunks at once: the gradient of the log-decays through one read, r = x·X with X = Σ y zᵀ.

d log γ_s is p times the sum of Γ(t,j)^p (x_t·y_j)(z_j·d_t) over all pairs with j < s ≤ t (strict: j < s < t), where d
is the cotangent of r. Each kind of pair is summed by itself, so that no difference of long sums loses digits: both
tokens in the chunk; j to its left, through the state X that enters it; t to its right, through the cotangent dX of the
state that leaves it; one on either side, ⟨X, dX⟩.
"""

import triton
import triton.language as tl

from hla.backends.triton.kernels.decay import pair_factors, read_clock, reader_factors, through_factor, writer_factors
from hla.backends.triton.kernels.views import batch_of, chunk_bounds, entry, load_matrix, load_rows


@triton.jit
def rate(
    x, y, z, d, state, after, result, gate, chunks,
    s_x, s_y, s_z, s_d, s_state, s_after, s_result, s_gate,
    n1, n2, T, count,
    by_pair, by_left, by_right, by_span,
    D: tl.constexpr, DZ: tl.constexpr, BD: tl.constexpr,
    POWER: tl.constexpr, DECAY: tl.constexpr, STRICT: tl.constexpr, ADD: tl.constexpr, TABLE: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, C: tl.constexpr, BZ: tl.constexpr,
):  # fmt: skip
    """Widths: x and y D, padded to BD; z and d DZ, in blocks of BZ. d None: nothing is read, the state only passes."""
    pid = tl.program_id(0).to(tl.int64)
    n = pid % count
    b0, b1, b2 = batch_of(pid // count, n1, n2)
    start, stop = chunk_bounds(chunks, n, T, TABLE, C)
    t = start + tl.arange(0, C)
    valid, clock = read_clock(gate, s_gate, b0, b1, b2, start, stop, DECAY, STRICT, C)
    rows = tl.arange(0, BD)
    y_rows = load_rows(entry(y, s_y, b0, b1, b2), s_y, t, valid, rows, D, DOT)
    weights = tl.zeros([C, C], dtype=tl.float32)
    left = tl.zeros([C], dtype=tl.float32)
    right = tl.zeros([C], dtype=tl.float32)
    span = tl.zeros([], dtype=tl.float32)
    if d is not None:
        x_rows = load_rows(entry(x, s_x, b0, b1, b2), s_x, t, valid, rows, D, DOT)
    for k in range(0, DZ, BZ):
        columns = k + tl.arange(0, BZ)
        z_rows = load_rows(entry(z, s_z, b0, b1, b2), s_z, t, valid, columns, DZ, DOT)
        before = load_matrix(entry(state, s_state, b0, b1, b2), s_state, n, rows, D, columns, DZ)
        behind = load_matrix(entry(after, s_after, b0, b1, b2), s_after, n, rows, D, columns, DZ)
        span += tl.sum(tl.sum(before.to(tl.float32) * behind.to(tl.float32), axis=1), axis=0)
        moved = tl.dot(y_rows, behind.to(DOT), input_precision=PRECISION)
        right += tl.sum(moved * z_rows.to(tl.float32), axis=1)
        if d is not None:
            d_rows = load_rows(entry(d, s_d, b0, b1, b2), s_d, t, valid, columns, DZ, DOT)
            weights = tl.dot(d_rows, tl.trans(z_rows), weights, input_precision=PRECISION)
            seen = tl.dot(x_rows, before.to(DOT), input_precision=PRECISION)
            left += tl.sum(seen * d_rows.to(tl.float32), axis=1)

    row = tl.arange(0, C)[:, None]
    column = tl.arange(0, C)[None, :]
    earlier = column < row  # of tokens (s, j): j < s
    reaches, factor = writer_factors(clock, POWER, DECAY)
    right = tl.where(reaches, right * factor, 0.0) * by_right
    total = tl.sum(tl.where(earlier, right[None, :], 0.0), axis=1)
    factor = through_factor(clock, POWER, DECAY)
    total += tl.where(factor == 0.0, 0.0, span * factor) * by_span
    if d is not None:
        later = row > column if STRICT else row >= column  # of tokens (t, s): t reads across s
        looks, factor = reader_factors(clock, POWER, DECAY)
        left = tl.where(looks, left * factor, 0.0) * by_left
        total += tl.sum(tl.where(later, left[:, None], 0.0), axis=0)
        product = tl.dot(x_rows, tl.trans(y_rows), input_precision=PRECISION) * weights
        product = pair_factors(product, clock, POWER, False, STRICT, DECAY, C) * by_pair
        # of tokens (t, j): Σ over all up to j, which tokens s = j + 1 ≤ t have before them. To subtract a token from
        # its own sum would lose the others, where one γ is tiny.
        reached = tl.cumsum(product, axis=1)
        beyond = row > column + 1 if STRICT else row > column
        inside = tl.sum(tl.where(beyond, reached, 0.0), axis=0)
        total += tl.sum(tl.where(column + 1 == row, inside[None, :], 0.0), axis=1)
    total = tl.where(valid, total * POWER, 0.0)
    at = entry(result, s_result, b0, b1, b2) + t * s_result[3]
    inside = t < stop
    if ADD:
        total += tl.load(at, mask=inside, other=0.0)
    tl.store(at, total, mask=inside)

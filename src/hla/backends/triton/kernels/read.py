r"""All chunks at once: reads r = x·X + Σ (x·y) z, from the states at the chunks' borders.

A result is one such term or the sum of two, forwards or backwards in time. A program makes one chunk's rows of some
columns.
"""

import triton
import triton.language as tl

from hla.backends.triton.kernels.decay import pair_factors, read_clock, reader_factors, separate, writer_factors
from hla.backends.triton.kernels.views import batch_of, chunk_bounds, entry, load_matrix, load_rows, store_rows


@triton.jit
def read(
    x, y, z, state, x2, y2, z2, state2, r, gate, chunks,
    s_x, s_y, s_z, s_state, s_x2, s_y2, s_z2, s_state2, s_r, s_gate,
    n1, n2, T, count,
    by_state, by_pair, by_state2, by_pair2,
    D: tl.constexpr, D2: tl.constexpr, DZ: tl.constexpr,
    POWER: tl.constexpr, POWER2: tl.constexpr, DECAY: tl.constexpr, STRICT: tl.constexpr, REVERSE: tl.constexpr,
    PER_CHUNK: tl.constexpr, ADD: tl.constexpr, TABLE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    C: tl.constexpr, BK: tl.constexpr, BK2: tl.constexpr, BZ: tl.constexpr,
):  # fmt: skip
    """Widths: x and y D, their seconds D2, z and r DZ; blocks of BK, BK2 and BZ. x2 None: one term. y None: no pairs,
    and without PER_CHUNK one state per packed sequence. ADD: to what r holds."""
    pid = tl.program_id(0).to(tl.int64)
    blocks = (DZ + BZ - 1) // BZ
    columns = (pid % blocks).to(tl.int32) * BZ + tl.arange(0, BZ)
    n = (pid // blocks) % count
    b0, b1, b2 = batch_of(pid // blocks // count, n1, n2)
    start, stop = chunk_bounds(chunks, n, T, TABLE, C)
    t = start + tl.arange(0, C)
    inside = t < stop
    valid, clock = read_clock(gate, s_gate, b0, b1, b2, start, stop, DECAY, STRICT, C)
    if not PER_CHUNK:
        n = tl.load(chunks + n * 3 + 2) if TABLE else n * 0

    total = _term(
        x, y, z, state, s_x, s_y, s_z, s_state, b0, b1, b2, n, t, valid, clock, columns, by_state, by_pair,
        D, DZ, POWER, DECAY, STRICT, REVERSE, DOT, PRECISION, C, BK, BZ,
    )  # fmt: skip
    if x2 is not None:
        total += _term(
            x2, y2, z2, state2, s_x2, s_y2, s_z2, s_state2, b0, b1, b2, n, t, valid, clock, columns, by_state2,
            by_pair2, D2, DZ, POWER2, DECAY, STRICT, REVERSE, DOT, PRECISION, C, BK2, BZ,
        )  # fmt: skip
    at = entry(r, s_r, b0, b1, b2)
    if ADD:
        total += load_rows(at, s_r, t, inside, columns, DZ, tl.float32)
    store_rows(at, s_r, t, inside, columns, DZ, total)


@triton.jit
def _term(
    x, y, z, state, s_x, s_y, s_z, s_state, b0, b1, b2, n, t, valid, clock, columns, by_state, by_pair,
    D: tl.constexpr, DZ: tl.constexpr, POWER: tl.constexpr, DECAY: tl.constexpr, STRICT: tl.constexpr,
    REVERSE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    BZ: tl.constexpr,
):  # fmt: skip
    across = tl.zeros([C, BZ], dtype=tl.float32)
    product = tl.zeros([C, C], dtype=tl.float32)
    x = entry(x, s_x, b0, b1, b2)
    for k in range(0, D, BK):
        some = k + tl.arange(0, BK)
        x_rows = load_rows(x, s_x, t, valid, some, D, DOT)
        if state is not None:
            tile = load_matrix(entry(state, s_state, b0, b1, b2), s_state, n, some, D, columns, DZ)
            across = tl.dot(x_rows, tile.to(DOT), across, input_precision=PRECISION)
        if y is not None:
            y_rows = load_rows(entry(y, s_y, b0, b1, b2), s_y, t, valid, some, D, DOT)
            product = tl.dot(x_rows, tl.trans(y_rows), product, input_precision=PRECISION)
    if DECAY > 0:
        if REVERSE:
            seen, factor = writer_factors(clock, POWER, DECAY)
        else:
            seen, factor = reader_factors(clock, POWER, DECAY)
        across = tl.where(seen[:, None], across * factor[:, None], 0.0)
    total = across * by_state
    if y is not None:
        z_rows = load_rows(entry(z, s_z, b0, b1, b2), s_z, t, valid, columns, DZ, DOT)
        if DECAY == 2:
            z_rows, spoilt = separate(z_rows)
            product += spoilt[None, :]
        pairs = pair_factors(product, clock, POWER, REVERSE, STRICT, DECAY, C)
        total += tl.dot(pairs.to(DOT), z_rows, input_precision=PRECISION) * by_pair
    return total

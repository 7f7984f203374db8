r"""One chunk after another: a state, what is read of it, and a second state that takes the result.

    X = Σ y zᵀ        r = x·X (and the pairs inside the chunk)        X' = Σ w rᵀ        o = x·X' (and the pairs)

A program owns some columns of z, and so of X, r, X' and o: it needs nothing from its neighbours. With v for w this is
the first pass of HLA₂ (X = S, r = u, X' = Fᵀ), with k for w, and o, all of AHLA; backwards in time it is the first pass
of both gradients. Without the second half it is a state alone. States stay in registers, in float32; they are written
as they enter each chunk, for `hla.backends.triton.kernels.read`.
"""

import triton
import triton.language as tl

from hla.backends.triton.kernels.decay import (
    pair_factors,
    read_clock,
    reader_factors,
    separate,
    through_factor,
    writer_factors,
)
from hla.backends.triton.kernels.views import (
    batch_of,
    chunk_bounds,
    entry,
    load_matrix,
    load_rows,
    store_matrix,
    store_rows,
)


@triton.jit
def chain(
    x, y, z, w, r, o, borders, borders2, initial, initial2, final, final2, through, gate, chunks, parts,
    s_x, s_y, s_z, s_w, s_r, s_o, s_borders, s_borders2, s_initial, s_initial2, s_final, s_final2, s_through, s_gate,
    n1, n2, T, count, part_count,
    by_state, by_pair, into_state, into_state2, by_pair2,
    D: tl.constexpr, DW: tl.constexpr, DZ: tl.constexpr, BD: tl.constexpr, BW: tl.constexpr,
    POWER: tl.constexpr, POWER2: tl.constexpr, DECAY: tl.constexpr, STRICT: tl.constexpr, REVERSE: tl.constexpr,
    TABLE: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, C: tl.constexpr, BZ: tl.constexpr,
):  # fmt: skip
    """Widths: x and y D, w DW, z DZ; blocks BD, BW ≥ them, BZ columns a program. x None: a state alone. y None: a state
    that only decays."""
    pid = tl.program_id(0).to(tl.int64)
    blocks = (DZ + BZ - 1) // BZ
    columns = (pid % blocks).to(tl.int32) * BZ + tl.arange(0, BZ)
    part = (pid // blocks) % part_count
    b0, b1, b2 = batch_of(pid // blocks // part_count, n1, n2)
    rows = tl.arange(0, BD)
    rows_w = tl.arange(0, BW)

    state = tl.zeros([BD, BZ], dtype=tl.float32)
    if initial is not None:
        at = entry(initial, s_initial, b0, b1, b2)
        state = load_matrix(at, s_initial, part, rows, D, columns, DZ).to(tl.float32)
    state2 = tl.zeros([BW, BZ], dtype=tl.float32)
    if initial2 is not None:
        at = entry(initial2, s_initial2, b0, b1, b2)
        state2 = load_matrix(at, s_initial2, part, rows_w, DW, columns, DZ).to(tl.float32)
    passed = 1.0
    first = tl.zeros([], dtype=tl.int64)
    last = first + count
    if parts is not None:
        first = tl.load(parts + part)
        last = tl.load(parts + part + 1)

    for step in range(last - first):
        n = last - 1 - step if REVERSE else first + step
        start, stop = chunk_bounds(chunks, n, T, TABLE, C)
        t = start + tl.arange(0, C)
        inside = t < stop
        valid, clock = read_clock(gate, s_gate, b0, b1, b2, start, stop, DECAY, STRICT, C)
        if borders is not None:
            store_matrix(entry(borders, s_borders, b0, b1, b2), s_borders, n, rows, D, columns, DZ, state)
        if borders2 is not None:
            store_matrix(entry(borders2, s_borders2, b0, b1, b2), s_borders2, n, rows_w, DW, columns, DZ, state2)

        if y is not None:
            y_rows = load_rows(entry(y, s_y, b0, b1, b2), s_y, t, valid, rows, D, DOT)
            z_rows = load_rows(entry(z, s_z, b0, b1, b2), s_z, t, valid, columns, DZ, DOT)
        if x is not None:
            x_rows = load_rows(entry(x, s_x, b0, b1, b2), s_x, t, valid, rows, D, DOT)
            product = tl.dot(x_rows, tl.trans(y_rows), input_precision=PRECISION)
            sound = z_rows
            if DECAY == 2:
                sound, spoilt = separate(z_rows)
                product += spoilt[None, :]
            pairs = pair_factors(product, clock, POWER, REVERSE, STRICT, DECAY, C)
            across = tl.dot(x_rows, state.to(DOT), input_precision=PRECISION)
            if DECAY > 0:
                across = _reach(across, clock, POWER, REVERSE, DECAY)
            result = across * by_state + tl.dot(pairs.to(DOT), sound, input_precision=PRECISION) * by_pair
            result = result.to(DOT)
            if r is not None:
                store_rows(entry(r, s_r, b0, b1, b2), s_r, t, inside, columns, DZ, result)
            if o is not None:
                sound = result
                if DECAY == 2:
                    sound, spoilt = separate(result)
                    product += spoilt[None, :]
                if POWER2 != POWER or DECAY == 2:
                    pairs = pair_factors(product, clock, POWER2, REVERSE, STRICT, DECAY, C)
                across = tl.dot(x_rows, state2.to(DOT), input_precision=PRECISION)
                if DECAY > 0:
                    across = _reach(across, clock, POWER2, REVERSE, DECAY)
                output = across * by_state + tl.dot(pairs.to(DOT), sound, input_precision=PRECISION) * by_pair2
                store_rows(entry(o, s_o, b0, b1, b2), s_o, t, inside, columns, DZ, output)
            leaves = valid
            if DECAY > 0:
                state2 = _pass(state2, through_factor(clock, POWER2, DECAY))
                leaves, result = _leave(valid, result, clock, POWER2, REVERSE, DECAY, DOT)
            w_rows = load_rows(entry(w, s_w, b0, b1, b2), s_w, t, leaves, rows_w, DW, DOT)
            state2 += tl.dot(tl.trans(w_rows), result, input_precision=PRECISION) * into_state2

        if DECAY > 0:
            factor = through_factor(clock, POWER, DECAY)
            passed *= factor
            state = _pass(state, factor)
            if y is not None:
                leaves, z_rows = _leave(valid, z_rows, clock, POWER, REVERSE, DECAY, DOT)
                if DECAY == 2:
                    y_rows = load_rows(entry(y, s_y, b0, b1, b2), s_y, t, leaves, rows, D, DOT)
        if y is not None:
            state += tl.dot(tl.trans(y_rows), z_rows, input_precision=PRECISION) * into_state

    if final is not None:
        at = entry(final, s_final, b0, b1, b2)
        store_matrix(at, s_final, part, rows, D, columns, DZ, state)
    if final2 is not None:
        at = entry(final2, s_final2, b0, b1, b2)
        store_matrix(at, s_final2, part, rows_w, DW, columns, DZ, state2)
    if through is not None:  # noqa: SIM102 (this is settled when the kernel is compiled)
        if pid % blocks == 0:
            tl.store(entry(through, s_through, b0, b1, b2) + part * s_through[3], passed)


@triton.jit
def _reach(across, clock, POWER: tl.constexpr, REVERSE: tl.constexpr, DECAY: tl.constexpr):
    """What reaches the rows from outside the chunk, from its left or, backwards, from its right."""
    if REVERSE:
        seen, factor = writer_factors(clock, POWER, DECAY)
    else:
        seen, factor = reader_factors(clock, POWER, DECAY)
    return tl.where(seen[:, None], across * factor[:, None], 0.0)


@triton.jit
def _leave(valid, z, clock, POWER: tl.constexpr, REVERSE: tl.constexpr, DECAY: tl.constexpr, DOT: tl.constexpr):
    """Which tokens enter the state that leaves the chunk, and their z; those of another era never do."""
    if REVERSE:
        seen, factor = reader_factors(clock, POWER, DECAY)
    else:
        seen, factor = writer_factors(clock, POWER, DECAY)
    return valid & seen, tl.where(seen[:, None], z.to(tl.float32) * factor[:, None], 0.0).to(DOT)


@triton.jit
def _pass(state, factor):
    """A state moved through a chunk; dropped where the factor is 0, whatever it holds."""
    return tl.where(factor == 0.0, 0.0, state * factor)

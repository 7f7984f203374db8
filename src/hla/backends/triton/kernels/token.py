r"""Token after token: form "recurrent", and with one token the decode step of every head in one launch.

    X_t = γ_t^p X_{t−1} + y_t z_tᵀ        r_t = x_tᵀ X_t, strict: x_tᵀ X_{t−1}

for each line of a program in turn (`hla.recurrent`). A program of the grid has a head's states to itself: it streams
them through its registers in blocks of rows, from `before` to `after`, which may be the same memory. Results pass from
line to line through memory, as other threads need other parts of them: hence the barriers.
"""

import triton
import triton.language as tl

from hla.backends.triton.kernels.views import batch_of, entry, load_matrix, store_matrix


@triton.jit
def token(
    streams, before, after, output, log_decay, mask, starts, bounds,
    s_streams, s_before, s_after, s_output, s_log_decay, s_mask, s_starts,
    n1, n2, T, part_count,
    factors, weights, masses, eps,
    LINES: tl.constexpr, SCRATCH: tl.constexpr, WIDTHS: tl.constexpr, OUTPUT: tl.constexpr, MASSES: tl.constexpr,
    DV: tl.constexpr, BV: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """LINES: (key, value, state to move or −1, power, query or −1, result, state to read, strict); streams by number.
    SCRATCH: per stream, whether it holds one token of each sequence, and not all. SIZE: numbers of a block."""
    pid = tl.program_id(0).to(tl.int64)
    part = pid % part_count
    b0, b1, b2 = batch_of(pid // part_count, n1, n2)
    start = tl.zeros([], dtype=tl.int64)
    stop = start + T
    if bounds is not None:
        start = tl.load(bounds + part)
        stop = tl.load(bounds + part + 1)
    if start == stop:  # no token: the state goes through
        for line in tl.static_range(len(LINES)):
            if LINES[line][2] >= 0:
                _move(
                    streams, before, after, s_streams, s_before, s_after, factors, b0, b1, b2, part, start,
                    0.0, False, False, True, line, LINES, SCRATCH, WIDTHS, SIZE,
                )  # fmt: skip
    for step in range(stop - start):
        t = start + step  # 64 bits wide, as start is
        kept = True
        if mask is not None:
            kept = tl.load(entry(mask, s_mask, b0, b1, b2) + t * s_mask[3]) != 0
        g = 0.0
        if log_decay is not None:
            g = tl.load(entry(log_decay, s_log_decay, b0, b1, b2) + t * s_log_decay[3]).to(tl.float32)
        begins = False
        if starts is not None:
            begins = tl.load(entry(starts, s_starts, b0, b1, b2) + t * s_starts[3]) != 0
        for line in tl.static_range(len(LINES)):
            _move(
                streams, before, after, s_streams, s_before, s_after, factors, b0, b1, b2, part, t,
                g, kept, begins, t == start, line, LINES, SCRATCH, WIDTHS, SIZE,
            )  # fmt: skip
            tl.debug_barrier()
        columns = tl.arange(0, BV)
        total = tl.zeros([BV], dtype=tl.float32)
        for i in tl.static_range(len(OUTPUT)):
            total += (
                _vector(streams, s_streams, factors, b0, b1, b2, part, t, OUTPUT[i], SCRATCH, columns, DV) * weights[i]
            )
        if len(MASSES) > 0:
            mass = eps
            for i in tl.static_range(len(MASSES)):
                one = _vector(streams, s_streams, factors, b0, b1, b2, part, t, MASSES[i], SCRATCH, tl.arange(0, 1), 1)
                mass += tl.sum(one, axis=0) * masses[i]
            total = total / mass
        at = entry(output, s_output, b0, b1, b2) + t * s_output[3] + columns.to(tl.int64) * s_output[4]
        tl.store(at, tl.where(kept, total, 0.0).to(output.dtype.element_ty), mask=columns < DV)
        tl.debug_barrier()


@triton.jit
def _address(streams, strides, b0, b1, b2, part, t, stream: tl.constexpr, SCRATCH: tl.constexpr, columns):
    """Pointers to a token's vector of a stream."""
    view = strides[stream]
    row = part if SCRATCH[stream] else t
    return entry(streams[stream], view, b0, b1, b2) + row * view[3] + columns.to(tl.int64) * view[4]


@triton.jit
def _vector(
    streams, strides, factors, b0, b1, b2, part, t, stream: tl.constexpr, SCRATCH: tl.constexpr, columns, width
):  # fmt: skip
    """A token's vector of a stream, float32."""
    at = _address(streams, strides, b0, b1, b2, part, t, stream, SCRATCH, columns)
    return tl.load(at, mask=columns < width, other=0.0).to(tl.float32) * factors[stream]


@triton.jit
def _move(
    streams, before, after, s_streams, s_before, s_after, factors, b0, b1, b2, part, t, g, kept, begins, fresh,
    line: tl.constexpr, LINES: tl.constexpr, SCRATCH: tl.constexpr, WIDTHS: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """One line: a state takes the token, a query reads it. `fresh`: the state still lies in `before`."""
    KEY: tl.constexpr = LINES[line][0]
    VALUE: tl.constexpr = LINES[line][1]
    MOVED: tl.constexpr = LINES[line][2]
    QUERY: tl.constexpr = LINES[line][4]
    STRICT: tl.constexpr = LINES[line][7]
    STATE: tl.constexpr = MOVED if MOVED >= 0 else LINES[line][6]
    HEIGHT: tl.constexpr = WIDTHS[KEY]
    WIDTH: tl.constexpr = WIDTHS[VALUE]
    BW: tl.constexpr = triton.next_power_of_2(WIDTH)
    ROOM: tl.constexpr = SIZE // BW if SIZE > BW else 1
    FULL: tl.constexpr = triton.next_power_of_2(HEIGHT)
    BH: tl.constexpr = ROOM if ROOM < FULL else FULL

    columns = tl.arange(0, BW)
    old = entry(after[STATE], s_after[STATE], b0, b1, b2)
    old_strides = s_after[STATE]
    result = tl.zeros([BW], dtype=tl.float32)
    for k in range(0, HEIGHT, BH):
        rows = k + tl.arange(0, BH)
        if MOVED >= 0 or STRICT:  # where the token before left it
            if fresh:
                if before[STATE] is not None:
                    at = entry(before[STATE], s_before[STATE], b0, b1, b2)
                    tile = load_matrix(at, s_before[STATE], part, rows, HEIGHT, columns, WIDTH).to(tl.float32)
                else:
                    tile = tl.zeros([BH, BW], dtype=tl.float32)
            else:
                tile = load_matrix(old, old_strides, part, rows, HEIGHT, columns, WIDTH)
            if begins:
                tile = tl.zeros([BH, BW], dtype=tl.float32)
        else:
            tile = load_matrix(old, old_strides, part, rows, HEIGHT, columns, WIDTH)
        if MOVED >= 0:
            factor = tl.exp(g * LINES[line][3])
            moved = tl.where(factor == 0.0, 0.0, tile * factor)
            key = _vector(streams, s_streams, factors, b0, b1, b2, part, t, KEY, SCRATCH, rows, HEIGHT)
            value = _vector(streams, s_streams, factors, b0, b1, b2, part, t, VALUE, SCRATCH, columns, WIDTH)
            tile = tl.where(kept, moved + key[:, None] * value[None, :], tile)
            store_matrix(old, old_strides, part, rows, HEIGHT, columns, WIDTH, tile)
        if QUERY >= 0:
            query = _vector(streams, s_streams, factors, b0, b1, b2, part, t, QUERY, SCRATCH, rows, HEIGHT)
            result += tl.sum(query[:, None] * tile, axis=0)
    if QUERY >= 0:
        RESULT: tl.constexpr = LINES[line][5]
        at = _address(streams, s_streams, b0, b1, b2, part, t, RESULT, SCRATCH, columns)
        tl.store(at, result, mask=columns < WIDTH)

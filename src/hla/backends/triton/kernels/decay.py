r"""What the kernels need of a chunk's decay factors.

A token has two clocks: as a writer (of y, z) it stands at c_t, as a reader at c_t too, or, when reads are strict, at
c_{t−1}. Factors go from a writer to a reader, whichever way the kernel runs through time. The clock is the tuple

    (high and low sums of the writers, their era, high and low sums of the readers, their era, whether a reader may look
    back, high sum, low sum and era at the chunk's end)

and DECAY says how it came about: 0, γ = 1, nothing is looked at; 1, one log-decay for all tokens, `high` holds ages and
`low` the log-decay; 2, the arrays of `hla.backends.triton.kernels.clock`.
"""

import triton
import triton.language as tl

from hla.backends.triton.kernels.clock import ERA, MASKED, START
from hla.backends.triton.kernels.views import entry


@triton.jit
def read_clock(gate, strides, b0, b1, b2, start, stop, DECAY: tl.constexpr, STRICT: tl.constexpr, C: tl.constexpr):
    """Which tokens of a chunk count, and its clock."""
    i = tl.arange(0, C)
    t = start + i
    valid = t < stop
    high = i.to(tl.float32) + 1.0
    era = tl.zeros([C], dtype=tl.int32)
    if DECAY == 2:
        place = b0 * strides[0] + b1 * strides[1] + b2 * strides[2] + t
        high = tl.load(gate[0] + place, mask=valid, other=0.0)
        low = tl.load(gate[1] + place, mask=valid, other=0.0)
        code = tl.load(gate[2] + place, mask=valid, other=0)
        era = code // ERA
        looks = (code & START) == 0
        final = i == (stop - start - 1)
        last_high = tl.sum(tl.where(final, high, 0.0), axis=0)
        last_low = tl.sum(tl.where(final, low, 0.0), axis=0)
        last_era = tl.sum(tl.where(final, era, 0), axis=0)
        reader_high, reader_low, reader_era = high, low, era
        if STRICT:
            before = valid & (i > 0)
            reader_high = tl.load(gate[0] + place - 1, mask=before, other=0.0)
            reader_low = tl.load(gate[1] + place - 1, mask=before, other=0.0)
            reader_era = tl.load(gate[2] + place - 1, mask=before, other=0) // ERA
        else:
            looks = tl.full([C], 1, dtype=tl.int1)
        valid = valid & ((code & MASKED) == 0)
    else:
        rate = 0.0
        if DECAY == 1:
            rate = tl.load(entry(gate, strides, b0, b1, b2)).to(tl.float32)
        low = tl.zeros([C], dtype=tl.float32) + rate
        reader_high, reader_low, reader_era = high, low, era
        if STRICT:
            reader_high = high - 1.0
        looks = tl.full([C], 1, dtype=tl.int1)
        last_high = (stop - start).to(tl.float32)
        last_low = rate
        last_era = 0
    return valid, (high, low, era, reader_high, reader_low, reader_era, looks, last_high, last_low, last_era)


@triton.jit
def _exponent(reader_high, reader_low, high, low, DECAY: tl.constexpr):
    """The log of the factor from a writer to a reader."""
    if DECAY == 1:
        return (reader_high - high) * low
    return (reader_high - high) + (reader_low - low)


@triton.jit
def _power(log, seen, POWER: tl.constexpr):
    """exp of the log's multiple. Tokens behind the chunk's end would make logs above 0, and infinities."""
    return tl.exp(tl.where(seen & ~(log > 0.0), log, 0.0) * POWER)


@triton.jit
def pair_factors(
    product, clock, POWER: tl.constexpr, REVERSE: tl.constexpr, STRICT: tl.constexpr, DECAY: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """The products of all pairs (C, C) times their factors, 0 where the row does not see the column. Rows are readers
    when running forwards, writers when running backwards."""
    row = tl.arange(0, C)[:, None]
    column = tl.arange(0, C)[None, :]
    if REVERSE:  # noqa: SIM108
        seen = column > row if STRICT else column >= row
    else:
        seen = row > column if STRICT else row >= column
    if DECAY > 0:
        if REVERSE:
            log = _exponent(clock[3][None, :], clock[4][None, :], clock[0][:, None], clock[1][:, None], DECAY)
        else:
            log = _exponent(clock[3][:, None], clock[4][:, None], clock[0][None, :], clock[1][None, :], DECAY)
        if DECAY == 2:
            if REVERSE:
                seen = seen & (clock[5][None, :] == clock[2][:, None]) & clock[6][None, :]
            else:
                seen = seen & (clock[5][:, None] == clock[2][None, :]) & clock[6][:, None]
        product = product * _power(log, seen, POWER)
    return tl.where(seen, product, 0.0)


@triton.jit
def separate(z):
    """Rows that are not finite as zeros, and for each row 0 or NaN: added to its column of products, that spoils the
    tokens that see it. In a product 0·NaN would spoil those of other eras too."""
    spoilt = tl.sum(z.to(tl.float32) * 0.0, axis=1)
    return tl.where((spoilt == 0.0)[:, None], z, tl.zeros_like(z)), spoilt


@triton.jit
def reader_factors(clock, POWER: tl.constexpr, DECAY: tl.constexpr):
    """From the state that enters the chunk to each reader: whether any, and the factor."""
    seen = (clock[5] == 0) & clock[6]
    log = clock[3] * clock[4] if DECAY == 1 else clock[3] + clock[4]
    return seen, _power(log, seen, POWER)


@triton.jit
def writer_factors(clock, POWER: tl.constexpr, DECAY: tl.constexpr):
    """From each writer to the state that leaves the chunk: whether any, and the factor."""
    seen = clock[2] == clock[9]
    log = _exponent(clock[7], clock[8], clock[0], clock[1], DECAY)
    return seen, _power(log, seen, POWER)


@triton.jit
def through_factor(clock, POWER: tl.constexpr, DECAY: tl.constexpr):
    """From the state that enters the chunk to the one that leaves it; 0 for nothing at all."""
    log = clock[7] * clock[8] if DECAY == 1 else clock[7] + clock[8]
    return tl.where(clock[9] == 0, tl.exp(tl.where(clock[9] == 0, log, 0.0) * POWER), 0.0)

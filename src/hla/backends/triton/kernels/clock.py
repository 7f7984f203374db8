r"""Decay factors inside a chunk, from sums of log-decays.

Γ(t,j) = exp(c_t − c_j). A difference of long float32 sums loses digits, so every log-decay is split: g = h + l with h a
multiple of 2⁻⁹ and |l| ≤ 2⁻¹⁰. Sums of h are exact, sums of l tiny, and (h_t − h_j) + (l_t − l_j) is c_t − c_j to about
its last bit. Tokens between two resets share an era: nothing passes from one era to another, whatever it holds. An era
begins with a packed sequence's first token, and with a log-decay below −110, whose exp is 0 in float32.
"""

import triton
import triton.language as tl

from hla.backends.triton.kernels.views import batch_of, chunk_bounds, entry

MASKED = tl.constexpr(1)
START = tl.constexpr(2)
ERA = tl.constexpr(4)
"""An era's number is multiplied by this; below it stand the two flags."""
_GRID = tl.constexpr(512.0)
_RESET = tl.constexpr(-110.0)


@triton.jit
def clock(
    log_decay, mask, starts, high, low, era, chunks,
    s_log_decay, s_mask, s_starts, s_out, n1, n2, T, count,
    TABLE: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Per token: the sums of h and of l since its era or the chunk began, and the era's number with the flags."""
    pid = tl.program_id(0).to(tl.int64)
    b0, b1, b2 = batch_of(pid // count, n1, n2)
    start, stop = chunk_bounds(chunks, pid % count, T, TABLE, C)
    t = start + tl.arange(0, C)
    inside = t < stop
    flags = tl.zeros([C], dtype=tl.int32)
    begins = tl.zeros([C], dtype=tl.int32)
    g = tl.zeros([C], dtype=tl.float32)
    if log_decay is not None:
        at = entry(log_decay, s_log_decay, b0, b1, b2) + t * s_log_decay[3]
        g = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    if mask is not None:
        kept = tl.load(entry(mask, s_mask, b0, b1, b2) + t * s_mask[3], mask=inside, other=0) != 0
        g = tl.where(kept, g, 0.0)
        flags = tl.where(kept, 0, MASKED)
    resets = g < _RESET
    g = tl.where(resets, 0.0, g)
    begins = tl.where(resets, 1, begins)
    if starts is not None:
        first = tl.load(entry(starts, s_starts, b0, b1, b2) + t * s_starts[3], mask=inside, other=0) != 0
        flags = tl.where(first, flags + START, flags)
        begins = tl.where(first, 1, begins)
    number = tl.cumsum(begins, axis=0)
    h = tl.floor(g * _GRID + 0.5) / _GRID
    row = tl.arange(0, C)[:, None]
    column = tl.arange(0, C)[None, :]
    within = (column <= row) & (number[:, None] == number[None, :])
    high_sum = tl.sum(tl.where(within, h[None, :], 0.0), axis=1)
    low_sum = tl.sum(tl.where(within, (g - h)[None, :], 0.0), axis=1)
    place = b0 * s_out[0] + b1 * s_out[1] + b2 * s_out[2] + t
    tl.store(high + place, high_sum, mask=inside)
    tl.store(low + place, low_sum, mask=inside)
    tl.store(era + place, number * ERA + flags, mask=inside)

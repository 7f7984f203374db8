r"""What precedes each part of a sequence: X_{m+1} = Γ X_m + the total of part m, part after part.

A long sequence of few heads is cut into parts, so that more programs have work: first each part's total, then this,
then each part from the right start. A program makes a tile of a state. Backwards in time the last part comes first.
"""

import triton
import triton.language as tl

from hla.backends.triton.kernels.views import batch_of, entry, load_matrix, store_matrix


@triton.jit
def carry(
    total, through, initial, before, final, s_total, s_through, s_initial, s_before, s_final, n1, n2, part_count,
    D: tl.constexpr, DZ: tl.constexpr, REVERSE: tl.constexpr, BD: tl.constexpr, BZ: tl.constexpr,
):  # fmt: skip
    """total, before: (parts, D, DZ); through: what a part lets pass, its Γ; initial and final: (1, D, DZ)."""
    pid = tl.program_id(0).to(tl.int64)
    across = (DZ + BZ - 1) // BZ
    blocks = (D + BD - 1) // BD * across
    rows = (pid % blocks // across).to(tl.int32) * BD + tl.arange(0, BD)
    columns = (pid % across).to(tl.int32) * BZ + tl.arange(0, BZ)
    b0, b1, b2 = batch_of(pid // blocks, n1, n2)
    state = tl.zeros([BD, BZ], dtype=tl.float32)
    if initial is not None:
        state = load_matrix(entry(initial, s_initial, b0, b1, b2), s_initial, 0, rows, D, columns, DZ).to(tl.float32)
    for step in range(part_count):
        part = part_count - 1 - step if REVERSE else step
        part = tl.zeros([], dtype=tl.int64) + part
        store_matrix(entry(before, s_before, b0, b1, b2), s_before, part, rows, D, columns, DZ, state)
        factor = tl.load(entry(through, s_through, b0, b1, b2) + part * s_through[3])
        added = load_matrix(entry(total, s_total, b0, b1, b2), s_total, part, rows, D, columns, DZ)
        state = tl.where(factor == 0.0, 0.0, state * factor) + added
    if final is not None:
        store_matrix(entry(final, s_final, b0, b1, b2), s_final, 0, rows, D, columns, DZ, state)

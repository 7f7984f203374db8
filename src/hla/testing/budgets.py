r"""How large an error is, and how large it may be.

Errors are per token: outputs grow with t, so one global measure would let the first hundreds of rows be entirely wrong.
Budgets are the unit roundoff of the accumulating dtype times a growth that is derived here, never chosen.

A read r_t = Σ_j Γ(t,j)^p (a_t·b_j) c_j adds d products, then at most T. Rounding errors of a sum of n terms, taken as
independent with mean zero, stay below λ·u·√n with probability 1 − 2·exp(−λ²/2) (Higham and Mary, SIAM J. Sci. Comput.
41, 2019); λ = √(2 ln(2N/δ)) makes that hold for all N sums of a comparison at once, but for δ = 10⁻⁹. An operator is a
chain of L reads, whose relative errors add:

    budget = λ·u·L·(√T + √d)·amplification + u_out

| amplification | of what |
|---|---|
| 1 | the exact operators: sums that do not cancel systematically |
| 2 | `normalize`: numerator and denominator each bring the error |
| 2·2 | HLA₂ as printed: two sums, each twice as many pairs as remain |
| 4·⅔T | HLA₃ as printed: four sums of t³ triples, of which those that remain number about 3t²/2 |
| L + 1 | gradients: each input's is a sum over the L reads, whose inputs are recomputed |

`u_out` is the unit roundoff of the output's dtype: its one rounding at the end.

A backend that multiplies 16-bit inputs in 16 bits (`BackendSpec.products`) also rounds what it multiplies to w: of each
read the weights of pairs or the state, the operand that goes into the state, and the result. These are three roundings
of each term, independent of how many terms there are, and as above they add up as a root: λ·w·√3·L·amplification more.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

from hla.arrays import FLOATING, Array, dtype_name
from hla.errors import OptionError, ShapeError, message

UNIT_ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
"""Half the distance from 1 to the next number."""
FAILURE = 1e-9
"""δ: how often a comparison of correct results may exceed its budget."""
FIRST_ROWS = 4
"""These share one scale: a single product q·k can be near zero by chance, and its relative error large."""


def error_budget(
    operator: str,
    dtype: Any,
    T: int,
    d: int,
    *,
    dv: int | None = None,
    order: int | None = None,
    definition: str = "exact",
    normalize: bool = False,
    gradient: bool = False,
    values: int | None = None,
    products: str | None = None,
) -> float:
    r"""What `per_token_error` of a correct result stays below: λ·u·L·(√T + √d)·amplification + u_out, see above.

    Args:
        operator: the operator's name.
        dtype: of v and the output, as a dtype or its name; accumulation is float64 for float64, else float32.
        T: the number of tokens that reach one output.
        d: features of q and k.
        dv: features of v, d where it is not given.
        order: of "higher_order".
        definition: as for the operator.
        normalize: as for the operator.
        gradient: for gradients with respect to q, k, v, the decays or a state.
        values: how many numbers are compared (N), by default T·(d + dv).
        products: the dtype to which operands of products are rounded, if it is less than that of accumulation.

    Returns:
        The budget, relative to the scale of a row as `per_token_error` takes it.

    Raises:
        OptionError: an unknown operator or dtype.

    Example:
        >>> f"{error_budget('hla2', 'float32', T=4096, d=64):.1e}"
        '7.2e-05'
    """
    name = dtype if isinstance(dtype, str) else dtype_name(dtype)
    if name not in FLOATING:
        raise OptionError(message("dtype", f"one of {', '.join(FLOATING)}", repr(name), "Pass a floating dtype."))
    depth = reads(operator, order)
    count = max(T, 1) * (d + (d if dv is None else dv)) if values is None else max(values, 1)
    factor = math.sqrt(2 * math.log(2 * count * depth / FAILURE))
    amplification = 1.0
    if definition == "as_printed":
        amplification *= 4 if depth == 2 else 4 * max(1.0, 2 * T / 3)
    if normalize:
        amplification *= 2
    if gradient:
        amplification *= depth + 1
    accumulated = UNIT_ROUNDOFF["float64" if name == "float64" else "float32"] * (math.sqrt(max(T, 1)) + math.sqrt(d))
    rounded = 0.0 if products is None else UNIT_ROUNDOFF[products] * math.sqrt(3)
    return factor * depth * (accumulated + rounded) * amplification + UNIT_ROUNDOFF[name]


def reads(operator: str, order: int | None = None) -> int:
    """L: how many reads follow one another in an operator; its order, but for AHLA, which has two."""
    known = {"linear_attention": 1, "hla2": 2, "ahla": 2, "hla3": 3, "higher_order": order}
    found = known.get(operator)
    if found is None:
        raise OptionError(message("operator", f"one of {', '.join(known)}", repr(operator), "Give order=…, too."))
    return found


def per_token_error(o: Array, reference: Array, *, cu_seqlens: Any = None) -> float:
    r"""The largest error of a token, relative to the scale of its row.

    $$\max_t \frac{\max_c |o_{tc} - r_{tc}|}{\max(\max_c |r_{tc}|,\; s_t)}, \qquad
    s_t^2 = \frac{1}{t+1} \sum_{u \le t} \max_c |r_{uc}|^2$$

    The running scale s_t starts with 4 rows at once, and anew in each packed sequence. Where the scale is 0 the output
    has to be exactly 0; anything not finite has an infinite error.

    Args:
        o: (*batch, T, dv), any library.
        reference: the same shape, any library.
        cu_seqlens: offsets of packed sequences along T.

    Returns:
        The error; 0.0 where there is nothing to compare.

    Raises:
        ShapeError: the shapes differ.

    Example:
        >>> import numpy as np
        >>> r = np.full((5, 2), 4.0)
        >>> round(per_token_error(r + 0.004, r), 6)
        0.001
    """
    import numpy as np

    from hla.testing.libraries import to_numpy

    got, want = to_numpy(o), to_numpy(reference)
    if got.shape != want.shape:
        raise ShapeError(message("o", f"the reference's shape {want.shape}", f"{got.shape}", "Compare like with like."))
    if got.size == 0:
        return 0.0
    if cu_seqlens is not None:
        offsets = [int(i) for i in to_numpy(cu_seqlens)]
        pieces = [per_token_error(got[..., a:b, :], want[..., a:b, :]) for a, b in pairwise(offsets)]
        return max(pieces, default=0.0)
    if not np.isfinite(got).all():
        return math.inf
    rows = np.abs(want).max(axis=-1)
    error = np.abs(got - want).max(axis=-1)
    mean = np.cumsum(rows**2, axis=-1) / np.arange(1, rows.shape[-1] + 1)
    head = min(FIRST_ROWS, rows.shape[-1])
    mean[..., :head] = mean[..., head - 1 : head]
    scale = np.maximum(rows, np.sqrt(mean))
    with np.errstate(divide="ignore", invalid="ignore"):
        relative = np.where(error == 0, 0.0, error / scale)
    return float(relative.max())

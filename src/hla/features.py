"""Feature maps φ for queries and keys (§2.2)."""

from __future__ import annotations

from hla import arrays
from hla.arrays import Array
from hla.errors import DTypeError, OptionError, ShapeError, message

NAMES = ("identity", "elu+1", "relu", "softmax")


def feature_map(x: Array, name: str) -> Array:
    r"""φ(x), applied to q and k before an operator (§2.2).

    "identity" x; "elu+1" x + 1 for x > 0, else exp(x); "relu" max(x, 0); "softmax" softmax of x/√d over the last axis.
    All but the identity are ≥ 0, which keeps the denominators of ``normalize=True`` from changing sign.

    Args:
        x: (*batch, T, d), floating dtype.
        name: "identity", "elu+1", "relu" or "softmax".

    Returns:
        φ(x) in the shape, dtype and library of x.

    Raises:
        OptionError: an unknown name.
        DTypeError: x is no floating array.
        ShapeError: x has no axes.

    Example:
        >>> import numpy as np, hla
        >>> hla.feature_map(np.asarray([-1.0, 0.0, 2.0]), "relu")
        array([0., 0., 2.])
    """
    xp = arrays.namespace(x, "x")
    found = arrays.dtype_name(x.dtype)
    if found not in arrays.FLOATING:
        raise DTypeError(message("x", "a floating dtype", found, "Convert x to a floating dtype."))
    if x.ndim == 0:
        raise ShapeError(message("x", "at least one axis, the features", "shape ()", "Pass (*batch, T, d)."))
    if name not in NAMES:
        raise OptionError(message("name", f"one of {', '.join(NAMES)}", repr(name), "Check the spelling."))
    if name == "identity":
        return x
    inside = arrays.cast(xp, x, xp.float64 if found == "float64" else xp.float32)
    zero = xp.zeros_like(inside)
    if name == "relu":
        result = xp.where(inside < 0, zero, inside)  # not >: NaN stays NaN
    elif name == "elu+1":
        result = xp.where(inside > 0, inside + 1, xp.exp(xp.where(inside > 0, zero, inside)))
    else:
        scaled = inside * float(x.shape[-1]) ** -0.5
        shifted = xp.exp(scaled - xp.max(scaled, axis=-1, keepdims=True))
        result = shifted / xp.sum(shifted, axis=-1, keepdims=True, dtype=shifted.dtype)
    return arrays.cast(xp, result, x.dtype)

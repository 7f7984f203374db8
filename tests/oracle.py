"""The definitions of the family, summed term by term in float64 NumPy.

The judge of every test: slow, plain, and without a recurrence, a cumulative sum or a
composition of operators for orders 1 to 3, so that it shares no idea with the code it judges.
One head at a time: ``q``, ``k`` are (T, d), ``v`` is (T, dv), ``log_decay`` is (T,).

    attend("hla2", q, k, v, normalize=True, log_decay=g)  ->  (T, dv)
    weights("hla2", q, k, log_decay=g)                    ->  (T, T), row t weighs the values in o_t
"""

from __future__ import annotations

from typing import Any

import numpy as np

Matrix = np.ndarray[Any, np.dtype[np.float64]]


def attend(
    op: str,
    q: Any,
    k: Any,
    v: Any,
    *,
    normalize: bool = False,
    eps: float = 1e-6,
    log_decay: Any = None,
    scale: float = 1.0,
    mask: str = "causal",
    definition: str = "exact",
    ridge: float = 0.0,
    order: int | None = None,
) -> Matrix:
    """Output (T, dv) of operator ``op`` on one head; ``order`` goes with ``op="higher_order"``."""
    if op == "higher_order":
        w = _higher_order(order, q, k, log_decay=log_decay, scale=scale, mask=mask)
    else:
        w = weights(op, q, k, log_decay=log_decay, scale=scale, mask=mask, definition=definition, ridge=ridge)
    values = np.asarray(v, dtype=np.float64)
    ones = np.ones((values.shape[0], 1))
    return w @ values / (w @ ones + eps) if normalize else w @ values


def weights(
    op: str,
    q: Any,
    k: Any,
    *,
    log_decay: Any = None,
    scale: float = 1.0,
    mask: str = "causal",
    definition: str = "exact",
    ridge: float = 0.0,
) -> Matrix:
    """Matrix (T, T) whose entry [t, j] is the weight of v_j in o_t."""
    if mask not in ("causal", "prefix", "none"):
        raise ValueError(f"mask: {mask!r}")
    if definition not in ("exact", "as_printed"):
        raise ValueError(f"definition: {definition!r}")
    if mask == "none" and log_decay is not None:
        raise ValueError("the bidirectional operators have no decay")
    if definition == "as_printed" and mask != "causal":
        raise ValueError("the printed definitions are causal")
    if ridge and op != "hla2":
        raise ValueError("ridge belongs to hla2")
    queries = scale * np.asarray(q, dtype=np.float64)
    keys = np.asarray(k, dtype=np.float64)
    count = queries.shape[0]
    survival = _survival(count, log_decay)
    row = {"linear_attention": _order_one, "hla2": _hla2, "ahla": _ahla, "hla3": _hla3}[op]
    affinity = queries @ keys.T
    out = np.zeros((count, count))
    for t in range(count):
        last = count if mask == "none" else t + 1
        out[t, :last] = row(t, affinity[:, :last], survival, mask, definition)[:last]
        if ridge:
            out[t, :last] += ridge * survival[t, :last] * (queries[:last] @ queries[t])
    return out


def _survival(count: int, log_decay: Any) -> Matrix:
    """[t, j] = what is left at t of something written at j <= t; ones above the diagonal, never used there."""
    steps = np.zeros(count) if log_decay is None else np.asarray(log_decay, dtype=np.float64)
    left = np.ones((count, count))
    for t in range(count):
        for j in range(t):
            left[t, j] = np.exp(steps[j + 1 : t + 1].sum())
    return left


def _order_one(t: int, affinity: Matrix, survival: Matrix, mask: str, definition: str) -> Matrix:
    last = affinity.shape[1]
    fade = np.ones(last) if mask == "none" else survival[t, :last]
    return fade * affinity[t]


def _hla2(t: int, affinity: Matrix, survival: Matrix, mask: str, definition: str) -> Matrix:
    """Sum over i of (q_t k_i)(q_j k_i); axes of the grids: i, j."""
    last = affinity.shape[1]
    i, j = np.ogrid[:last, :last]
    terms = affinity[t, i] * affinity[j, i]
    if mask == "none":
        return np.asarray((terms).sum(axis=0))
    coefficient = survival[t, i] * survival[t, j]
    if mask == "causal" and definition == "exact":
        coefficient = coefficient * (i <= j)
    elif mask == "causal":
        # G takes the pairs with i after j away, at the decay they had when i was read.
        coefficient = coefficient - np.where(i > j, survival[t, i] * survival[np.maximum(i - 1, 0), j], 0.0)
    return np.asarray((coefficient * terms).sum(axis=0))


def _ahla(t: int, affinity: Matrix, survival: Matrix, mask: str, definition: str) -> Matrix:
    """Sum over i of (q_t k_i)(q_i k_j); axes of the grids: i, j."""
    last = affinity.shape[1]
    i, j = np.ogrid[:last, :last]
    terms = affinity[t, i] * affinity[i, j]
    if mask == "none":
        return np.asarray(terms.sum(axis=0))
    if mask == "prefix":
        return np.asarray((survival[t, i] * survival[t, j] * terms).sum(axis=0))
    return np.asarray((survival[t, i] * survival[i, j] * (j <= i) * terms).sum(axis=0))


def _hla3(t: int, affinity: Matrix, survival: Matrix, mask: str, definition: str) -> Matrix:
    """Sum over i, u of (q_t k_i)(q_u k_i)(q_u k_j); axes of the grids: i, u, j."""
    last = affinity.shape[1]
    i, u, j = np.ogrid[:last, :last, :last]
    terms = affinity[t, i] * affinity[u, i] * affinity[u, j]
    if mask == "none":
        return np.asarray(terms.sum(axis=(0, 1)))
    coefficient = survival[t, i] * survival[t, u] * survival[t, j]
    if mask == "causal" and definition == "exact":
        coefficient = coefficient * ((i <= u) & (j <= u))
    elif mask == "causal":
        # One of the three is strictly the latest: its cross-summary takes the triple away.
        for late, one, two in ((i, u, j), (u, i, j), (j, i, u)):
            before = np.maximum(late - 1, 0)
            taken = survival[t, late] * survival[before, one] * survival[before, two]
            coefficient = coefficient - np.where((one < late) & (two < late), taken, 0.0)
    return np.asarray((coefficient * terms).sum(axis=(0, 1)))


def _higher_order(order: int | None, q: Any, k: Any, **options: Any) -> Matrix:
    """Orders above 3 are defined by composition: order 2m is HLA2 m times, order 2m + 1 ends in HLA3."""
    if order is None or order < 1:
        raise ValueError(f"order: {order!r}")
    if order == 1:
        return weights("linear_attention", q, k, **options)
    second = weights("hla2", q, k, **options)
    total = second if order % 2 == 0 else weights("hla3", q, k, **options)
    for _ in range(order // 2 - 1):
        total = second @ total
    return total

"""The paper's Algorithm 1 as it is written, token by token: the plain loop that others are measured against."""

from __future__ import annotations

from typing import Any


def algorithm_1(xp: Any, q: Any, k: Any, v: Any) -> Any:
    """Algorithm 1 without decay, for NumPy or torch: (H, T, d), (H, T, d), (H, T, dv) → (H, T, dv).

    The state holds m and h, the denominators' sums, as the algorithm does, whether or not they are used.
    """
    heads, length, d = q.shape
    dv = v.shape[-1]
    s, c, g = (xp.zeros((heads, d, size), dtype=q.dtype) for size in (d, dv, dv))
    m, h = (xp.zeros((heads, d), dtype=q.dtype) for _ in range(2))
    output = xp.empty((heads, length, dv), dtype=v.dtype)
    for t in range(length):
        q_t, k_t, v_t = q[:, t], k[:, t], v[:, t]
        g += k_t[:, :, None] * (k_t[:, None, :] @ c)
        h += k_t * (k_t * m).sum(-1)[:, None]
        s += k_t[:, :, None] * k_t[:, None, :]
        c += q_t[:, :, None] * v_t[:, None, :]
        m += q_t
        output[:, t] = ((q_t[:, None, :] @ s) @ c - q_t[:, None, :] @ g)[:, 0]
    return output

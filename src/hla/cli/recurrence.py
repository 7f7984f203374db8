"""The recurrences written by hand: one token as a function of the state, and a plain loop over tokens.

HLA₂, for example: S ← S + kkᵀ, F ← F + (S q)vᵀ, o = qᵀF. Plain code for any array library; it shares nothing with the
operators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from hla.testing.libraries import Placement

Array: TypeAlias = Any
States: TypeAlias = tuple[Array, ...]
Step: TypeAlias = Callable[[States, Array, Array, Array], tuple[States, Array]]
"""(states, q_t, k_t, v_t) → (states, o_t), for all heads: (H, d), (H, d), (H, dv)"""


def token_loop(place: Placement, operator: str) -> Callable[[Array, Array, Array], Array]:
    """A plain loop over tokens on (H, T, d), (H, T, d), (H, T, dv): `lax.scan` for JAX, else Python's.

    Example:
        >>> import numpy as np
        >>> x = np.ones((1, 3, 1))
        >>> token_loop(Placement("numpy"), "hla2")(x, x, x)[0, :, 0]
        array([1., 3., 6.])
    """
    step, xp = STEPS[operator], place.xp

    def loop(q: Array, k: Array, v: Array) -> Array:
        q, k, values = (x if x.dtype.itemsize > 2 else xp.astype(x, xp.float32) for x in (q, k, v))
        states = empty_states(xp, operator, q, values)
        if place.library == "jax":
            import jax

            tokens = tuple(x.swapaxes(0, 1) for x in (q, k, values))
            output = jax.lax.scan(lambda carry, token: step(carry, *token), states, tokens)[1].swapaxes(0, 1)
        else:
            outputs = []
            for t in range(q.shape[1]):
                states, o = step(states, q[:, t], k[:, t], values[:, t])
                outputs.append(o)
            output = xp.stack(outputs, axis=1)
        return output if output.dtype == v.dtype else xp.astype(output, v.dtype)

    return loop


def empty_states(xp: Any, operator: str, q: Array, v: Array) -> States:
    """Zeros in the dtype of v and on its device, for (H, T, d) and (H, T, dv)."""
    rows = {"d": q[:, 0, :, None], "dv": v[:, 0, :, None]}
    columns = {"d": q[:, 0, None, :], "dv": v[:, 0, None, :]}
    return tuple(xp.zeros_like(rows["d"] * columns[size]) for size in _COLUMNS[operator])


def _outer(a: Array, b: Array) -> Array:
    return a[:, :, None] * b[:, None, :]


def _read(a: Array, state: Array) -> Array:
    return (a[:, None, :] @ state)[:, 0, :]


def _linear_attention(states: States, q: Array, k: Array, v: Array) -> tuple[States, Array]:
    (p,) = states
    p = p + _outer(k, v)
    return (p,), _read(q, p)


def _hla2(states: States, q: Array, k: Array, v: Array) -> tuple[States, Array]:
    s, f = states
    s = s + _outer(k, k)
    f = f + _outer(_read(q, s), v)
    return (s, f), _read(q, f)


def _ahla(states: States, q: Array, k: Array, v: Array) -> tuple[States, Array]:
    p, e = states
    p = p + _outer(k, v)
    e = e + _outer(k, _read(q, p))
    return (p, e), _read(q, e)


def _hla3(states: States, q: Array, k: Array, v: Array) -> tuple[States, Array]:
    s, p, f = states
    s, p = s + _outer(k, k), p + _outer(k, v)
    f = f + _outer(_read(q, s), _read(q, p))
    return (s, p, f), _read(q, f)


STEPS: dict[str, Step] = {
    "linear_attention": _linear_attention,
    "hla2": _hla2,
    "ahla": _ahla,
    "hla3": _hla3,
}
_COLUMNS = {
    "linear_attention": ("dv",),
    "hla2": ("d", "dv"),
    "ahla": ("dv", "dv"),
    "hla3": ("d", "dv", "dv"),
}

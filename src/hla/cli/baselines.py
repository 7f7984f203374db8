"""What the operators are compared with: softmax attention, a plain loop over tokens, and the machine's matmul rate.

Plain code for NumPy, PyTorch and JAX arrays; it shares nothing with the operators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from hla.testing.libraries import Placement

Array: TypeAlias = Any
Step: TypeAlias = Callable[[tuple[Array, ...], Array, Array, Array], tuple[tuple[Array, ...], Array]]
"""(states, q_t, k_t, v_t) → (states, o_t)"""

LOOPS = ("linear_attention", "hla2", "ahla", "hla3")
QUERY_BLOCK = 256


def softmax_attention(place: Placement) -> Callable[[Array, Array, Array], Array]:
    """Causal softmax attention with scale d^-1/2 on (H, T, d), (H, T, d), (H, T, dv).

    PyTorch's `scaled_dot_product_attention`, JAX's `dot_product_attention`; elsewhere `blocked_softmax`.
    """
    if place.library == "torch":
        import torch

        def attend_torch(q: Array, k: Array, v: Array) -> Array:
            return torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]

        return attend_torch
    if place.library == "jax":
        import jax

        def attend_jax(q: Array, k: Array, v: Array) -> Array:
            q, k, v = (x.swapaxes(0, 1)[None] for x in (q, k, v))
            return jax.nn.dot_product_attention(q, k, v, is_causal=True)[0].swapaxes(0, 1)

        compiled: Callable[[Array, Array, Array], Array] = jax.jit(attend_jax)
        return compiled
    return lambda q, k, v: blocked_softmax(place.xp, q, k, v)


def blocked_softmax(xp: Any, q: Array, k: Array, v: Array) -> Array:
    """Softmax attention of a block of queries at a time over all keys up to it, as NumPy and CuPy do it well.

    Example:
        >>> import numpy as np
        >>> x = np.ones((1, 3, 2))
        >>> blocked_softmax(np, x, x, x)[0, :, 0]
        array([1., 1., 1.])
    """
    length, scale = q.shape[-2], q.shape[-1] ** -0.5
    output = xp.empty((*q.shape[:-1], v.shape[-1]), dtype=v.dtype)
    for start in range(0, length, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, length)
        scores = (q[..., start:stop, :] * scale) @ k[..., :stop, :].swapaxes(-1, -2)
        future = xp.arange(start, stop)[:, None] < xp.arange(start, stop)[None, :]
        scores[..., start:stop][..., future] = -float("inf")
        scores -= scores.max(axis=-1, keepdims=True)
        xp.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        output[..., start:stop, :] = scores @ v[..., :stop, :]
    return output


def token_loop(place: Placement, operator: str) -> Callable[[Array, Array, Array], Array]:
    """A plain loop over tokens on the states of the paper's recurrences (corrected): `lax.scan` for JAX, else Python's.

    HLA₂, for example: S ← S + kkᵀ, F ← F + (S q)vᵀ, o = qᵀF.
    """
    step, states = _STEPS[operator], _STATES[operator]

    def start(q: Array, v: Array) -> tuple[Array, ...]:
        sizes = {"d": q.shape[-1], "dv": v.shape[-1]}
        placed = {} if place.device is None else {"device": place.device}
        return tuple(place.xp.zeros((q.shape[0], sizes["d"], sizes[e]), dtype=v.dtype, **placed) for e in states)

    if place.library == "jax":
        import jax

        def scan(q: Array, k: Array, v: Array) -> Array:
            tokens = tuple(x.swapaxes(0, 1) for x in (q, k, v))
            return jax.lax.scan(lambda carry, token: step(carry, *token), start(q, v), tokens)[1].swapaxes(0, 1)

        compiled: Callable[[Array, Array, Array], Array] = jax.jit(scan)
        return compiled

    def loop(q: Array, k: Array, v: Array) -> Array:
        carry = start(q, v)
        output = place.xp.empty_like(v)
        for t in range(q.shape[-2]):
            carry, output[:, t] = step(carry, q[:, t], k[:, t], v[:, t])
        return output

    return loop


def _outer(a: Array, b: Array) -> Array:
    return a[:, :, None] * b[:, None, :]


def _read(a: Array, state: Array) -> Array:
    return (a[:, None, :] @ state)[:, 0, :]


def _step_linear(states: tuple[Array, ...], q: Array, k: Array, v: Array) -> tuple[tuple[Array, ...], Array]:
    (p,) = states
    p = p + _outer(k, v)
    return (p,), _read(q, p)


def _step_hla2(states: tuple[Array, ...], q: Array, k: Array, v: Array) -> tuple[tuple[Array, ...], Array]:
    s, f = states
    s = s + _outer(k, k)
    f = f + _outer(_read(q, s), v)
    return (s, f), _read(q, f)


def _step_ahla(states: tuple[Array, ...], q: Array, k: Array, v: Array) -> tuple[tuple[Array, ...], Array]:
    p, e = states
    p = p + _outer(k, v)
    e = e + _outer(k, _read(q, p))
    return (p, e), _read(q, e)


def _step_hla3(states: tuple[Array, ...], q: Array, k: Array, v: Array) -> tuple[tuple[Array, ...], Array]:
    s, p, f = states
    s, p = s + _outer(k, k), p + _outer(k, v)
    f = f + _outer(_read(q, s), _read(q, p))
    return (s, p, f), _read(q, f)


_STEPS: dict[str, Step] = {
    "linear_attention": _step_linear,
    "hla2": _step_hla2,
    "ahla": _step_ahla,
    "hla3": _step_hla3,
}
_STATES = {
    "linear_attention": ("dv",),
    "hla2": ("d", "dv"),
    "ahla": ("dv", "dv"),
    "hla3": ("d", "dv", "dv"),
}


MATMUL_SIZE = 1024
MATMUL_FLOPS = 2 * MATMUL_SIZE**3


def matmul(place: Placement) -> Callable[[], Array]:
    """A float32 matrix product of `MATMUL_FLOPS`, ready to be timed: the ceiling of anything made of such products."""
    placed = {} if place.device is None else {"device": place.device}
    xp = place.xp
    x = xp.ones((MATMUL_SIZE, MATMUL_SIZE), dtype=xp.float32, **placed)
    product = place.compiled(lambda a, b: a @ b)
    place.wait(product(x, x))
    return lambda: product(x, x)

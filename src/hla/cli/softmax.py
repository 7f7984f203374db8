"""Causal softmax attention with scale d^-1/2 on (H, T, d), (H, T, d), (H, T, dv): the libraries' own, or in blocks.

What is computed in blocks is the peer where a library has none, and in float64 the judge of the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from hla.testing.libraries import Placement

Array: TypeAlias = Any

QUERY_BLOCK = 256


def softmax_attention(place: Placement) -> Callable[[Array, Array, Array], Array]:
    """PyTorch's `scaled_dot_product_attention`, JAX's `dot_product_attention`; elsewhere `blocked_softmax`."""
    own = _of_the_library(place, causal=True)
    return own or (lambda q, k, v: _as(place.xp, blocked_softmax(place.xp, *_wide(place.xp, q, k, v)), v))


def softmax_pull(place: Placement) -> Callable[..., Any] | None:
    """(q, k, v, do) → (o, (dq, dk, dv)) where no library differentiates; None where one does."""
    if place.library in ("torch", "jax"):
        return None
    xp = place.xp

    def pull(q: Array, k: Array, v: Array, do: Array) -> Any:
        o, found = blocked_softmax_and_pull(xp, *_wide(xp, q, k, v, do))
        return _as(xp, o, v), tuple(_as(xp, x, v) for x in found)

    return pull


def softmax_step(place: Placement) -> Callable[[tuple[Array, Array], Array, Array, Array], Any]:
    """One token against a key-value cache (H, T, ·) that holds the token's own key and value already.

    That spares the copy that appending costs. Returns (cache, o_t).
    """
    xp = place.xp
    own = _of_the_library(place, causal=False)
    attend = own or (lambda q, k, v: _as(xp, last_rows(xp, *_wide(xp, q, k, v)), v))

    def step(cache: tuple[Array, Array], q: Array, k: Array, v: Array) -> tuple[tuple[Array, Array], Array]:
        return cache, attend(q[:, None, :], *cache)[:, 0, :]

    return step


def _of_the_library(place: Placement, causal: bool) -> Callable[[Array, Array, Array], Array] | None:
    if place.library == "torch":
        import torch

        def attend_torch(q: Array, k: Array, v: Array) -> Array:
            return torch.nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=causal)[0]

        return attend_torch
    if place.library == "jax":
        import jax

        def attend_jax(q: Array, k: Array, v: Array) -> Array:
            scale, size = q.shape[-1] ** -0.5, v.shape[-1]
            width = max(q.shape[-1], size)  # it takes one width only: zeros change nothing
            q, k, v = (place.xp.pad(x, ((0, 0), (0, 0), (0, width - x.shape[-1]))) for x in (q, k, v))
            q, k, v = (x.swapaxes(0, 1)[None] for x in (q, k, v))
            o = jax.nn.dot_product_attention(q, k, v, scale=scale, is_causal=causal)[0].swapaxes(0, 1)
            return o[..., :size]

        return attend_jax
    return None


def _wide(xp: Any, *arrays: Array) -> tuple[Array, ...]:
    """16-bit floats as float32: no library's attention forms its sums in 16 bits."""
    return tuple(x if x.dtype.itemsize > 2 else xp.astype(x, xp.float32) for x in arrays)


def _as(xp: Any, x: Array, like: Array) -> Array:
    return x if x.dtype == like.dtype else xp.astype(x, like.dtype)


def blocked_softmax(xp: Any, q: Array, k: Array, v: Array) -> Array:
    """Softmax attention of a block of queries at a time over all keys up to it, as NumPy and CuPy do it well.

    Example:
        >>> import numpy as np
        >>> x = np.ones((1, 3, 2))
        >>> blocked_softmax(np, x, x, x)[0, :, 0]
        array([1., 1., 1.])
    """
    output = xp.empty((*q.shape[:-1], v.shape[-1]), dtype=v.dtype)
    for start, stop in _blocks(q.shape[-2]):
        output[..., start:stop, :] = last_rows(xp, q[..., start:stop, :], k[..., :stop, :], v[..., :stop, :])
    return output


def last_rows(xp: Any, q: Array, k: Array, v: Array) -> Array:
    """Attention of the last queries, (H, n, d), over all keys, (H, T, d)."""
    return _weights(xp, q, k, k.shape[-2] - q.shape[-2]) @ v


def blocked_softmax_and_pull(
    xp: Any, q: Array, k: Array, v: Array, do: Array
) -> tuple[Array, tuple[Array, Array, Array]]:
    """The output, and the gradients of Σ do·o with respect to q, k and v, block by block.

    Example:
        >>> import numpy as np
        >>> x = np.ones((1, 2, 1))
        >>> blocked_softmax_and_pull(np, x, x, x, x)[1][2][0, :, 0]
        array([1.5, 0.5])
    """
    output = xp.empty((*q.shape[:-1], v.shape[-1]), dtype=v.dtype)
    dq, dk, dv = xp.empty_like(q), xp.zeros_like(k), xp.zeros_like(v)
    for start, stop in _blocks(q.shape[-2]):
        rows = slice(start, stop)
        output[..., rows, :], found = last_rows_and_pull(
            xp, q[..., rows, :], k[..., :stop, :], v[..., :stop, :], do[..., rows, :]
        )
        dq[..., rows, :] = found[0]
        dk[..., :stop, :] += found[1]
        dv[..., :stop, :] += found[2]
    return output, (dq, dk, dv)


def last_rows_and_pull(xp: Any, q: Array, k: Array, v: Array, do: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    """As `last_rows`, with the gradients that come from these rows."""
    weights = _weights(xp, q, k, k.shape[-2] - q.shape[-2])
    d_weights = do @ v.swapaxes(-1, -2)
    d_scores = weights * (d_weights - (weights * d_weights).sum(axis=-1, keepdims=True)) * q.shape[-1] ** -0.5
    transposed = d_scores.swapaxes(-1, -2)
    return weights @ v, (d_scores @ k, transposed @ q, weights.swapaxes(-1, -2) @ do)


def _weights(xp: Any, q: Array, k: Array, offset: int) -> Array:
    """softmax(q·k/√d) where the first query stands at token `offset`."""
    scores = (q * q.shape[-1] ** -0.5) @ k.swapaxes(-1, -2)
    future = xp.arange(q.shape[-2])[:, None] < xp.arange(k.shape[-2] - offset)[None, :]
    scores[..., offset:][..., future] = -float("inf")
    scores -= scores.max(axis=-1, keepdims=True)
    xp.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return scores


def _blocks(length: int) -> list[tuple[int, int]]:
    return [(start, min(start + QUERY_BLOCK, length)) for start in range(0, length, QUERY_BLOCK)]

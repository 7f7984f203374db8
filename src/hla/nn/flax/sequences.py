"""Which token follows which: rows of a batch, padded rows, or packed sequences. Convolutions and positions ask here.

Rows with skipped tokens are first moved together, present tokens in front and in their order. What was skipped then
comes after everything that it could influence, so left padding, right padding and none are the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array


@dataclass(frozen=True)
class Rows:
    """Sequences that are the rows of a batch (B, T, ·); with `counts` (B,) only the first tokens of each are there."""

    counts: Array | None = None

    def positions(self, seen: Array, length: int) -> Array:
        """(B, T): how many tokens came before, `seen` (B,) of them before these rows."""
        return seen[:, None] + _range(length)

    def seen(self, seen: Array, length: int) -> Array:
        """(B,): `seen` after these rows."""
        return seen + (length if self.counts is None else self.counts)

    def convolve(self, x: Array, window: Array, weight: Array) -> tuple[Array, Array]:
        """Depthwise: Σ_j weight_j · x_{t−K+1+j}; the K − 1 tokens before the first are `window` (B, K − 1, channels).

        Returns the result (B, T, channels) and the window after these rows.
        """
        stream = jnp.concatenate([window.astype(x.dtype), x], axis=1)
        length, behind = x.shape[1], window.shape[1]
        result = _slide(stream, weight, length)
        if self.counts is None:
            return result, stream[:, length:].astype(window.dtype)
        return result, _take(stream, self.counts[:, None] + _range(behind)).astype(window.dtype)


@dataclass(frozen=True)
class Packed:
    """Sequences one after another in a single row (1, T, ·): sequence n is tokens offsets[n] to offsets[n + 1]."""

    offsets: Array
    owner: Array
    """(T,): the sequence of each token"""

    def positions(self, seen: Array, length: int) -> Array:
        """(1, T)."""
        since = _range(length) - self.offsets[self.owner]
        return (seen[self.owner] + since)[None]

    def seen(self, seen: Array, length: int) -> Array:
        """(N,)."""
        return seen + jnp.diff(self.offsets)

    def convolve(self, x: Array, window: Array, weight: Array) -> tuple[Array, Array]:
        """As for rows, the window (N, K − 1, channels): one stream in which each sequence comes after its window."""
        count, behind, channels = window.shape
        length = x.shape[1]
        token = _range(length)
        before = _range(count)[:, None] * behind + _range(behind)
        places = jnp.concatenate([token + (self.owner + 1) * behind, (self.offsets[:-1, None] + before).ravel()])
        parts = jnp.concatenate([x[0], window.astype(x.dtype).reshape(count * behind, channels)])
        stream = parts[jnp.argsort(places)][None]
        result = _slide(stream, weight, length + max(count - 1, 0) * behind)
        last = self.offsets[1:, None] + before
        return result[:, token + self.owner * behind], stream[0][last].astype(window.dtype)


def packed(offsets: Array, length: int) -> Packed:
    """The packed sequences of cumulative lengths `offsets` (N + 1,)."""
    offsets = jnp.asarray(offsets, jnp.int32)
    return Packed(offsets, jnp.searchsorted(offsets[1:], _range(length), side="right").astype(jnp.int32))


def move_together(x: Array, skipped: Array) -> tuple[Array, Array, Array]:
    """(rows with present tokens first, their counts, for each token its new place); what was skipped is 0."""
    order = jnp.argsort(skipped, axis=1, stable=True)
    counts = x.shape[1] - skipped.sum(axis=1, dtype=jnp.int32)
    return _take(blank(x, skipped), order), counts, jnp.argsort(order, axis=1)


def move_back(y: Array, places: Array, skipped: Array) -> Array:
    """The inverse of `move_together`; 0 where a token was skipped."""
    return blank(_take(y, places), skipped)


def blank(x: Array, skipped: Array) -> Array:
    """x with 0 at skipped tokens, whatever it holds there."""
    return jnp.where(skipped[..., None], jnp.zeros((), x.dtype), x)


def _take(x: Array, index: Array) -> Array:
    """x[b, index[b, i]] for x (B, T, ·) and index (B, i)."""
    return jnp.take_along_axis(x, index[..., None], axis=1, mode="clip")


def _range(count: int) -> Array:
    return jnp.arange(count, dtype=jnp.int32)


def _slide(stream: Array, weight: Array, length: int) -> Array:
    """Σ_j weight_j · stream_{t+j}, for t < length, in the weight's dtype."""
    total = weight[0] * stream[:, :length]
    for j in range(1, weight.shape[0]):
        total = total + weight[j] * stream[:, j : j + length]
    return total

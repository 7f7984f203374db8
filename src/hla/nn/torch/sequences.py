"""Which token follows which: rows of a batch, padded rows, or packed sequences. Convolutions and positions ask here.

Rows with skipped tokens are first moved together, present tokens in front and in their order. What was skipped then
comes after everything that it could influence, so left padding, right padding and none are the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rows:
    """Sequences that are the rows of a batch (B, T, ·); with `counts` (B,) only the first tokens of each are there."""

    counts: Tensor | None = None

    def positions(self, seen: Tensor, length: int) -> Tensor:
        """(B, T): how many tokens came before, `seen` (B,) of them before these rows."""
        return seen[:, None] + torch.arange(length, device=seen.device)

    def seen(self, seen: Tensor, length: int) -> Tensor:
        """(B,): `seen` after these rows."""
        return seen + (length if self.counts is None else self.counts)

    def tail(self, x: Tensor, count: int) -> Tensor:
        """(B, count, ·): the last tokens of each row, at the end; before them anything."""
        stream = torch.cat([x.new_zeros(x.shape[0], count, x.shape[2]), x], dim=1)
        if self.counts is None:
            return stream[:, x.shape[1] :]
        return _take(stream, self.counts[:, None] + torch.arange(count, device=x.device))

    def convolve(self, x: Tensor, window: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Depthwise: Σ_j weight_j · x_{t−K+1+j}; the K − 1 tokens before the first are `window` (B, K − 1, channels).

        Returns the result (B, T, channels) and the window after these rows.
        """
        stream = torch.cat([window.to(x.dtype), x], dim=1)
        length, behind = x.shape[1], window.shape[1]
        result = _slide(stream, weight, length)
        if self.counts is None:  # a view would keep all tokens alive; of equal strides a compiler returns one
            own = stream[:, length:].to(window.dtype, copy=True, memory_format=torch.contiguous_format)
            return result, own
        last = self.counts[:, None] + torch.arange(behind, device=x.device)
        return result, _take(stream, last).to(window.dtype)


@dataclass(frozen=True)
class Packed:
    """Sequences one after another in a single row (1, T, ·): sequence n is tokens offsets[n] to offsets[n + 1]."""

    offsets: Tensor
    owner: Tensor
    """(T,): the sequence of each token"""

    def positions(self, seen: Tensor, length: int) -> Tensor:
        """(1, T)."""
        since = torch.arange(length, device=seen.device) - self.offsets[self.owner]
        return (seen[self.owner] + since)[None]

    def seen(self, seen: Tensor, length: int) -> Tensor:
        """(N,)."""
        return seen + self.offsets.diff()

    def tail(self, x: Tensor, count: int) -> Tensor:
        """(N, count, ·), as for rows."""
        stream = torch.cat([x.new_zeros(count, x.shape[2]), x[0]])
        return stream[self.offsets[1:, None] + torch.arange(count, device=x.device)]

    def convolve(self, x: Tensor, window: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """As for rows, the window (N, K − 1, channels): one stream in which each sequence comes after its window."""
        count, behind, channels = window.shape
        length = x.shape[1]
        token = torch.arange(length, device=x.device)
        within = torch.arange(behind, device=x.device)
        before = torch.arange(count, device=x.device)[:, None] * behind + within
        places = torch.cat([token + (self.owner + 1) * behind, (self.offsets[:-1, None] + before).flatten()])
        parts = torch.cat([x[0], window.to(x.dtype).reshape(count * behind, channels)])
        stream = parts[places.argsort()][None]
        result = _slide(stream, weight, length + max(count - 1, 0) * behind)
        last = self.offsets[1:, None] + before
        return result[:, token + self.owner * behind], stream[0][last].to(window.dtype)


def packed(offsets: Tensor, length: int, device: torch.device) -> Packed:
    """The packed sequences of cumulative lengths `offsets` (N + 1,)."""
    offsets = offsets.to(device=device, dtype=torch.int64)
    token = torch.arange(length, device=device)
    return Packed(offsets, torch.searchsorted(offsets[1:].contiguous(), token, right=True))


def move_together(x: Tensor, skipped: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(rows with present tokens first, their counts, for each token its new place); what was skipped is 0."""
    order = skipped.to(torch.uint8).argsort(dim=1, stable=True)
    x = x.masked_fill(skipped[..., None], 0.0)
    return _take(x, order), x.shape[1] - skipped.sum(dim=1), order.argsort(dim=1)


def move_back(y: Tensor, places: Tensor, skipped: Tensor) -> Tensor:
    """The inverse of `move_together`; 0 where a token was skipped."""
    return _take(y, places).masked_fill(skipped[..., None], 0.0)


def _take(x: Tensor, index: Tensor) -> Tensor:
    """x[b, index[b, i]] for x (B, T, ·) and index (B, i)."""
    return x[torch.arange(x.shape[0], device=x.device)[:, None], index]


def _slide(stream: Tensor, weight: Tensor, length: int) -> Tensor:
    """Σ_j weight_j · stream_{t+j}, for t < length, in the weight's dtype."""
    total = weight[0] * stream[:, :length]
    for j in range(1, weight.shape[0]):
        total = total + weight[j] * stream[:, j : j + length]
    return total

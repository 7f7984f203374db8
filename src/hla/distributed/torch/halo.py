"""What a layer needs of the slices before its own besides the operators' states: the last tokens, for a convolution,
and how many there were, for positions.

Each rank sends its last K − 1 tokens of every row, and knows from the counts which of all these come last before its
slice: from several ranks, where slices are shorter than that.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hla.distributed.torch.groups import Place


class Halo(NamedTuple):
    """Rows of a batch spread over ranks, or packed sequences, which are rows here too."""

    place: Place
    counts: Tensor
    """(ranks, B): tokens of each row on each rank"""

    @classmethod
    def of_lengths(cls, place: Place, lengths: tuple[int, ...], batch: int, device: torch.device) -> Halo:
        """Rows that are whole slices."""
        return cls(place, torch.tensor(lengths, device=device)[:, None].expand(-1, batch))

    @classmethod
    def of_offsets(
        cls, place: Place, lengths: tuple[int, ...], offsets: list[int], device: torch.device
    ) -> tuple[Halo, Tensor]:
        """Packed sequences, and their offsets within this rank's slice, (N + 1,)."""
        borders = torch.tensor(list(accumulate(lengths, initial=0)))
        local = torch.minimum(torch.clamp(torch.tensor(offsets) - borders[:-1, None], min=0), borders.diff()[:, None])
        return cls(place, local.diff(dim=1).to(device)), local[place.rank].to(device)

    @classmethod
    def of_counts(cls, place: Place, counts: Tensor) -> Halo:
        """Rows with skipped tokens; `counts` (B,) of this rank. One exchange."""
        return cls(place, place.gather(counts))

    @property
    def before(self) -> Tensor:
        """(B,): tokens on the ranks before this one."""
        return self.counts[: self.place.rank].sum(0)

    @property
    def total(self) -> Tensor:
        """(B,): tokens on all ranks."""
        return self.counts.sum(0)

    def windows(self, tails: Tensor, initial: Tensor, tie: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """(the last K − 1 tokens before this rank's slice, the last of all, tie), tokens of `initial` being before the
        first. One exchange.

        Args:
            tails: (B, K − 1, channels), this rank's last tokens, at the end.
            initial: likewise, before the first rank; that of rank 0 counts.
            tie: see `hla.distributed.torch.exchange.Exchanges`.
        """
        found: tuple[Tensor, Tensor, Tensor] = Spread.apply(self, tie, tails, initial)  # type: ignore[no-untyped-call]
        return found

    def sources(self, behind: int) -> list[Tensor]:
        """For each rank, and for what comes after all, (B, K − 1): which of the tokens (B, (1 + ranks)·(K − 1)), the
        initial ones and the tails in order, it takes."""
        ranks, batch = self.counts.shape
        slot = torch.arange(behind, device=self.counts.device)
        there = slot >= behind - self.counts[..., None]  # (ranks, B, K − 1), tails lie at the end
        there = torch.cat([torch.ones_like(there[:1]), there]).movedim(0, 1).reshape(batch, -1)
        found = []
        for rank in range(ranks + 1):
            seen = there.clone()
            seen[:, (1 + rank) * behind :] = False
            order = seen.to(torch.uint8).argsort(dim=1, stable=True)  # those that are there come last, in order
            found.append(order[:, order.shape[1] - behind :])
        return found


class Spread(torch.autograd.Function):
    """(halo, tie, tails, initial) → (window of this rank, window after all, tie). Linear; `Return` is its transpose."""

    @staticmethod
    def forward(ctx: Any, halo: Halo, tie: Tensor | None, tails: Tensor, initial: Tensor) -> tuple[Tensor, ...]:
        """The tails of all ranks, of which each takes its own."""
        ctx.halo, ctx.shape = halo, tails.shape
        ctx.save_for_backward(tie)
        place, behind = halo.place, tails.shape[1]
        sent = torch.stack([tails, initial]) if place.rank == 0 else torch.stack([tails, torch.zeros_like(tails)])
        heard = place.gather(sent.reshape(-1)).reshape(place.size, 2, *tails.shape)
        slots = torch.cat([heard[0, 1], *heard[:, 0]], dim=1)
        sources = halo.sources(behind)
        own, last = (_take(slots, sources[i]) for i in (place.rank, place.size))
        return own, last, tails.new_zeros(())

    @staticmethod
    def backward(ctx: Any, d_own: Tensor, d_last: Tensor, d_tie: Tensor) -> tuple[Any, ...]:
        """By `Return`."""
        d_tails, d_initial = Return.apply(ctx.halo, *ctx.saved_tensors, d_own, d_last)  # type: ignore[no-untyped-call]
        return None, d_tie, d_tails, d_initial


class Return(torch.autograd.Function):
    """(halo, tie, cotangents of the windows) → cotangents of tails and initial window."""

    @staticmethod
    def forward(ctx: Any, halo: Halo, tie: Tensor | None, d_own: Tensor, d_last: Tensor) -> tuple[Tensor, ...]:
        """Those of all ranks, of which each takes what fell on its own tokens."""
        ctx.halo = halo
        ctx.save_for_backward(tie)
        place, behind = halo.place, d_own.shape[1]
        heard = place.gather(torch.stack([d_own, d_last]).reshape(-1)).reshape(place.size, 2, *d_own.shape)
        sources = halo.sources(behind)
        slots = d_own.new_zeros(d_own.shape[0], (1 + place.size) * behind, d_own.shape[2])
        for rank in range(place.size):
            for source, d in ((sources[rank], heard[rank, 0]), (sources[-1], heard[rank, 1])):
                slots.scatter_add_(1, source[..., None].expand(d.shape), d)
        start = (1 + place.rank) * behind
        initial = slots[:, :behind] if place.rank == 0 else torch.zeros_like(d_own)
        return slots[:, start : start + behind].clone(), initial.clone()

    @staticmethod
    def backward(ctx: Any, d_tails: Tensor, d_initial: Tensor) -> tuple[Any, ...]:
        """By `Spread`."""
        d_own, d_last, _ = Spread.apply(ctx.halo, *ctx.saved_tensors, d_tails, d_initial)  # type: ignore[no-untyped-call]
        return None, None, d_own, d_last


def _take(slots: Tensor, source: Tensor) -> Tensor:
    return slots.gather(1, source[..., None].expand(*source.shape, slots.shape[2]))

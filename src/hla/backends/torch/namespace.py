"""The part of the Array API that the core uses, spelled in torch itself, and the two operations that it may fuse.

`array_api_compat` would do, at 2–5 µs a call: as much as a small matrix product takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Namespace:
    """torch as an Array API namespace. With `eager`, values are known and no derivative is recorded: then temporaries
    are overwritten, and the core may look at values on the CPU."""

    __name__ = "torch"

    def __init__(self, eager: bool) -> None:
        self.eager = eager
        self._places: dict[str, Tensor] = {}

    bool, int32, int64 = torch.bool, torch.int32, torch.int64
    float32, float64 = torch.float32, torch.float64

    matmul = staticmethod(torch.matmul)
    where = staticmethod(torch.where)
    zeros, ones, empty, full = (staticmethod(f) for f in (torch.zeros, torch.ones, torch.empty, torch.full))
    arange = staticmethod(torch.arange)
    zeros_like, full_like = staticmethod(torch.zeros_like), staticmethod(torch.full_like)
    exp, log = staticmethod(torch.exp), staticmethod(torch.log)
    isfinite, isinf = staticmethod(torch.isfinite), staticmethod(torch.isinf)
    logical_and, logical_not = staticmethod(torch.logical_and), staticmethod(torch.logical_not)
    broadcast_to, reshape, moveaxis = (staticmethod(f) for f in (torch.broadcast_to, torch.reshape, torch.movedim))

    def multiply_add(self, x: Tensor, y: Tensor, z: Tensor, spare: Any) -> Tensor:
        """x @ y + z; eager, into z where that is not needed any more."""
        if x.ndim == 3 and y.ndim == 3 and z.ndim == 3 and x.shape[0] == y.shape[0] == z.shape[0]:
            return z.baddbmm_(x, y) if spare and self.eager else torch.baddbmm(z, x, y)
        product = torch.matmul(x, y)
        return product.add_(z) if self.eager and _covers(product, z) else product + z

    def add_outer(self, x: Tensor, y: Tensor, z: Tensor, spare: Any) -> Tensor:
        """z + x · y for a column and a row; eager, into z where that is not needed any more."""
        if spare and self.eager and x.shape[:-2] == z.shape[:-2] == y.shape[:-2]:
            return z.addcmul_(x, y)
        return torch.addcmul(z, x, y)

    def scaled(self, x: Tensor, factor: Tensor | float) -> Tensor:
        """x · factor; eager, into x."""
        return x.mul_(factor) if self.eager and (isinstance(factor, float) or _covers(x, factor)) else x * factor

    def fleeting(self, x: Tensor, factor: Tensor, slot: str) -> Tensor:
        """x · factor, for one use; eager, in memory used again and again: new memory costs more than to fill it."""
        if not self.eager or not _covers(x, factor):
            return x * factor
        return torch.mul(x, factor, out=self._place(slot, x.shape, x.dtype, x.device))

    def forgetting(self, log_decay: Tensor, visible: Tensor, later: Tensor) -> tuple[Tensor, Tensor]:
        """Γ(t,j) over a chunk's tokens and Γ(t,−1), of log-decays (*b, C, 1) on the CPU; the first in memory that the
        next chunk takes again. `later`: 1 where token s comes after j."""
        shape, dtype, device = (*log_decay.shape[:-1], log_decay.shape[-2]), log_decay.dtype, log_decay.device
        between = torch.mul(log_decay, later, out=self._place("between", shape, dtype, device))
        pairs = torch.cumsum(between, dim=-2, out=self._place("pairs", shape, dtype, device))
        return pairs.exp_().mul_(visible), torch.cumsum(log_decay, dim=-2).exp_()

    def _place(self, slot: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        place = self._places.get(slot)
        if place is None or place.shape != shape or place.dtype != dtype or place.device != device:
            place = self._places[slot] = torch.empty(tuple(shape), dtype=dtype, device=device)
        return place

    @staticmethod
    def ones_like(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
        """As in the standard."""
        return torch.ones_like(x, dtype=dtype)

    @staticmethod
    def asarray(x: Any, *, dtype: torch.dtype | None = None, device: Any = None) -> Tensor:
        """As in the standard; only ever of numbers, which are made on the device, and host arrays."""
        if isinstance(x, (bool, int, float)):
            return torch.full((), x, dtype=dtype, device=device)
        return torch.as_tensor(x, dtype=dtype, device=device)

    @staticmethod
    def astype(x: Tensor, dtype: torch.dtype, *, copy: Any = True) -> Tensor:
        """As in the standard, but never a needless copy."""
        return x.to(dtype)

    @staticmethod
    def concat(arrays: Sequence[Tensor], *, axis: int) -> Tensor:
        """As in the standard."""
        return torch.cat(tuple(arrays), dim=axis)

    @staticmethod
    def stack(arrays: Sequence[Tensor], *, axis: int) -> Tensor:
        """As in the standard."""
        return torch.stack(tuple(arrays), dim=axis)

    @staticmethod
    def flip(x: Tensor, *, axis: int) -> Tensor:
        """As in the standard."""
        return torch.flip(x, dims=(axis,))

    @staticmethod
    def sum(x: Tensor, *, axis: Any = None, dtype: torch.dtype | None = None, keepdims: Any = False) -> Tensor:
        """As in the standard."""
        return torch.sum(x, dtype=dtype) if axis is None else torch.sum(x, dim=axis, dtype=dtype, keepdim=keepdims)

    @staticmethod
    def cumulative_sum(x: Tensor, *, axis: int, dtype: torch.dtype | None = None) -> Tensor:
        """As in the standard."""
        return torch.cumsum(x, dim=axis, dtype=dtype)

    @staticmethod
    def matrix_transpose(x: Tensor) -> Tensor:
        """As in the standard."""
        return x.mT

    @staticmethod
    def take(x: Tensor, indices: Tensor, *, axis: int = 0) -> Tensor:
        """As in the standard."""
        return torch.index_select(x, axis, indices)

    @staticmethod
    def all(x: Tensor, *, axis: int | None = None, keepdims: Any = False) -> Tensor:
        """As in the standard."""
        return torch.all(x) if axis is None else torch.all(x, dim=axis, keepdim=keepdims)

    @staticmethod
    def any(x: Tensor, *, axis: int, keepdims: Any = False) -> Tensor:
        """As in the standard."""
        return torch.any(x, dim=axis, keepdim=keepdims)


def _covers(x: Tensor, other: Tensor) -> bool:
    """Whether x has the common shape of both."""
    missing = x.ndim - other.ndim
    return missing >= 0 and all(n in (1, m) for n, m in zip(other.shape, x.shape[missing:], strict=True))


EAGER, PLAIN = Namespace(eager=True), Namespace(eager=False)
"""for steps and for watched code; a whole call has a namespace of its own, as it keeps memory"""

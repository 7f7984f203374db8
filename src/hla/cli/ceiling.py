"""The machine's rates in each array library: of matrix products, which operators consist of, and of moving memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from hla.testing.libraries import Placement

SIDE, BATCH = 64, 64
"""64 products of 64×64: what chunks of 64 tokens consist of at d = 64. They stay in cache, 3 MiB with the
result: a larger batch measures memory, and would be a lower ceiling."""
LARGE = 1024
COPIED = 2**24
"""numbers of a copy: 64 MiB, more than caches hold"""


class Work(NamedTuple):
    """Something to time that is counted."""

    run: Callable[[], Any]
    amount: int
    """of floating-point operations, or of bytes moved"""


def batched_matmul(place: Placement) -> Work:
    """`BATCH` float32 products of `SIDE`×`SIDE`."""
    return Work(_product(place, (BATCH, SIDE, SIDE)), 2 * BATCH * SIDE**3)


def large_matmul(place: Placement) -> Work:
    """One float32 product of `LARGE`×`LARGE`.

    Example:
        >>> work = large_matmul(Placement("numpy"))
        >>> work.run().shape, work.amount
        ((1024, 1024), 2147483648)
    """
    return Work(_product(place, (LARGE, LARGE)), 2 * LARGE**3)


def large_copy(place: Placement) -> Work:
    """One float32 array read and another written, of `COPIED` numbers each.

    Example:
        >>> work = large_copy(Placement("numpy"))
        >>> work.run().shape, work.amount
        ((16777216,), 134217728)
    """
    placed = {} if place.device is None else {"device": place.device}
    x = place.xp.ones((COPIED,), dtype=place.xp.float32, **placed)
    copy = place.compiled(lambda x: x + 1.0)
    return Work(lambda: place.wait(copy(x)), 2 * 4 * COPIED)


def _product(place: Placement, shape: tuple[int, ...]) -> Callable[[], Any]:
    placed = {} if place.device is None else {"device": place.device}
    x = place.xp.ones(shape, dtype=place.xp.float32, **placed)
    product = place.compiled(lambda a, b: a @ b)
    return lambda: place.wait(product(x, x))

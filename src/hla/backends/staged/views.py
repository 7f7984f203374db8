"""Arrays as the kernels see them: a pointer, strides over three batch axes, and strides of their own axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from hla.arrays import Array
from hla.backends.staged.engine import Engine

BATCH_AXES = 3


class View(NamedTuple):
    """An array (*batch, own axes) with its batch axes broadcast to a launch's."""

    tensor: Array
    strides: tuple[int, ...]
    """of the three batch axes, then of the array's own"""


class Grid(NamedTuple):
    """The batch of a launch as three axes, and its arrays on them."""

    sizes: tuple[int, int, int]
    views: dict[str, View | None]

    @property
    def batch(self) -> int:
        """How many entries the batch has."""
        return math.prod(self.sizes)


def arrange(engine: Engine, batch: tuple[int, ...], tensors: dict[str, tuple[Array, int] | None]) -> Grid:
    """Lay arrays on a batch. `tensors`: each with how many axes are its own; None stays None.

    Neighbouring axes become one where every array allows it. Where more than three remain, which takes inputs that
    broadcast in turns, those arrays that do not lie so are copied.
    """
    given = {name: x for name, x in tensors.items() if x is not None}
    strides = {name: _batch_strides(engine, x, own, batch) for name, (x, own) in given.items()}
    sizes, merged = _merge(batch, list(strides.values()))
    if len(sizes) > BATCH_AXES:
        given = {name: (_dense(engine, x, own, batch), own) for name, (x, own) in given.items()}
        strides = {name: _batch_strides(engine, x, own, batch) for name, (x, own) in given.items()}
        sizes, merged = _merge(batch, list(strides.values()))
    missing = BATCH_AXES - len(sizes)
    n0, n1, n2 = (*(1,) * missing, *sizes)
    views: dict[str, View | None] = dict.fromkeys(tensors)
    for (name, (x, own)), axes in zip(given.items(), merged, strict=True):
        views[name] = View(x, (*(0,) * missing, *axes, *engine.strides(x)[x.ndim - own :]))
    return Grid((n0, n1, n2), views)


def _batch_strides(engine: Engine, x: Array, own: int, batch: tuple[int, ...]) -> tuple[int, ...]:
    """Strides over the batch axes, 0 along those that the array lacks."""
    axes = x.ndim - own
    shape, steps = x.shape[:axes], engine.strides(x)[:axes]
    found = [0 if n == 1 else step for n, step in zip(shape, steps, strict=True)]
    return (*(0,) * (len(batch) - axes), *found)


def _merge(batch: tuple[int, ...], strides: Sequence[tuple[int, ...]]) -> tuple[list[int], list[list[int]]]:
    sizes: list[int] = []
    merged: list[list[int]] = [[] for _ in strides]
    for axis, n in enumerate(batch):
        if n == 1:
            continue
        if sizes and all(kept[-1] == step[axis] * n for kept, step in zip(merged, strides, strict=True)):
            sizes[-1] *= n
            for kept, step in zip(merged, strides, strict=True):
                kept[-1] = step[axis]
            continue
        sizes.append(n)
        for kept, step in zip(merged, strides, strict=True):
            kept.append(step[axis])
    return sizes, merged


def _dense(engine: Engine, x: Array, own: int, batch: tuple[int, ...]) -> Array:
    """An array whose batch axes are one, all of them there; what broadcasts along all of them stays as it is."""
    axes = tuple(x.shape[: x.ndim - own])
    if all(n == 1 for n in axes):
        return x
    if axes == batch and len(_merge(batch, [engine.strides(x)[: len(axes)]])[0]) <= 1:
        return x
    return engine.dense(engine.xp.broadcast_to(x, (*batch, *x.shape[x.ndim - own :])))

"""All batch axes as one, where that needs no copy: three axes are what torch multiplies in one call."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

from torch import Tensor

from hla.arrays import sum_to
from hla.gradients import ProblemGradients
from hla.problem import Problem


class Flat:
    """A problem with one batch axis, or as it was where its inputs broadcast or do not lie so."""

    def __init__(self, problem: Problem) -> None:
        self.problem = self._given = problem
        self._batch: tuple[int, ...] | None = None
        batch = tuple(problem.v.shape[:-2])
        inputs = (problem.q, problem.k, problem.v)
        if len(batch) == 1 or any(x.shape[:-2] != batch for x in inputs) or not all(map(_lies_flat, inputs)):
            return
        self._batch = batch
        flat = self.flat

        def option(x: Tensor | None) -> Tensor | None:
            return None if x is None else flat(x)

        self.problem = replace(
            problem,
            q=flat(problem.q),
            k=flat(problem.k),
            v=flat(problem.v),
            log_decay=option(problem.log_decay),
            token_mask=option(problem.token_mask),
            starts=option(problem.starts),
            initial=None if problem.initial is None else {s: flat(x) for s, x in problem.initial.items()},
        )

    def flat(self, x: Tensor) -> Tensor:
        """An array with one batch axis, of size 1 where it has no other."""
        if self._batch is None:
            return x
        if any(n != 1 for n in x.shape[:-2]):
            return x.expand(*self._batch, *x.shape[-2:]).reshape(math.prod(self._batch), *x.shape[-2:])
        return x.reshape(1, *x.shape[-2:])

    def restore(self, x: Tensor) -> Tensor:
        """An output or state with its own batch axes."""
        return x if self._batch is None else x.reshape(*self._batch, *x.shape[-2:])

    def restore_gradients(self, found: ProblemGradients) -> ProblemGradients:
        """Gradients of the problem as it was given."""
        if self._batch is None:
            return found
        given = self._given

        def option(d: Tensor, x: Any) -> Tensor:
            if d.shape[0] == 1:
                return d.reshape(x.shape)
            result: Tensor = sum_to(given.xp, self.restore(d), (*(1,) * (given.v.ndim - x.ndim), *x.shape))
            return result.reshape(x.shape)

        return ProblemGradients(
            self.restore(found.q),
            self.restore(found.k),
            self.restore(found.v),
            None if found.log_decay is None else option(found.log_decay, given.log_decay),
            {symbol: option(d, (given.initial or {})[symbol]) for symbol, d in found.initial.items()},
            found.scale,
        )


def _lies_flat(x: Tensor) -> bool:
    """Whether the batch axes of `x` can be viewed as one."""
    axes = [(n, step) for n, step in zip(x.shape[:-2], x.stride()[:-2], strict=True) if n != 1]
    return all(outer == n * step for (_, outer), (n, step) in pairwise(axes))

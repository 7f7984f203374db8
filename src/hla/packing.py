"""Packed sequences given by `cu_seqlens`: results equal each sequence on its own, with a state for each.

Where the offsets are known, the sequences are run one after another on slices (views, where the library has them).
Under a transformation that hides the offsets, sequences become a batch axis: (N, *batch, T, ·) with a token mask.
That costs N times the work and is used only where states are asked for; without states a boundary mask does.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

from hla.arrays import Array, Namespace, broadcast_shapes, is_numpy
from hla.errors import OptionError, message
from hla.gradients import ProblemGradients
from hla.loops import Joined
from hla.problem import Problem, Runner, States


def run(problem: Problem, one: Runner) -> tuple[Array, States]:
    """Output (*batch, T, dv) and final states (N, *batch, d, ·) of a packed problem; `one` runs a single sequence."""
    if isinstance(problem.cu_seqlens, list):
        return _run_known(problem, problem.cu_seqlens, one)
    if problem.return_state or problem.initial is not None:
        return _run_padded(problem, one)
    return one(replace(problem, starts=_starts(problem), cu_seqlens=None))


def sequences(problem: Problem, offsets: list[int]) -> list[Problem]:
    """The problem of each sequence."""
    result = []
    for n, (start, stop) in enumerate(pairwise(offsets)):

        def cut(x: Any, start: int = start, stop: int = stop) -> Any:
            return None if x is None else _cut(x, start, stop)

        result.append(
            replace(
                problem,
                q=cut(problem.q),
                k=cut(problem.k),
                v=cut(problem.v),
                log_decay=problem.log_decay if problem.constant else cut(problem.log_decay),
                token_mask=cut(problem.token_mask),
                initial=None if problem.initial is None else {s: x[n, ...] for s, x in problem.initial.items()},
                cu_seqlens=None,
            )
        )
    return result


def _cut(x: Array, start: int, stop: int) -> Array:
    """The tokens from start to stop; the array itself where these are all, as torch's batched gradients need it."""
    return x if start == 0 and stop == x.shape[-2] else x[..., start:stop, :]


def _run_known(problem: Problem, offsets: list[int], one: Runner) -> tuple[Array, States]:
    xp = problem.xp
    rank = max(x.ndim for x in (problem.q, problem.k, problem.v)) - 2
    if len(offsets) == 1:
        empty, states = one(replace(problem, cu_seqlens=None, initial=None))
        return empty, {s: _with_batch_rank(xp, x, rank)[None, ...][:0, ...] for s, x in states.items()}
    whole = None
    if is_numpy(xp):
        whole = xp.empty((*problem.output_batch(), problem.length, problem.v.shape[-1]), dtype=problem.v.dtype)
    joined, finals = Joined(xp, problem.length, whole), []
    for start, single in zip(offsets, sequences(problem, offsets), strict=False):
        place = None if whole is None else whole[..., start : start + single.length, :]
        output, states = one(replace(single, out=place))
        if output is not place and (single.length or not problem.length):
            joined.put(start, output)
        finals.append(states)
    return joined.array(), {
        s: _stacked(xp, [_with_batch_rank(xp, states[s], rank) for states in finals]) for s in finals[0]
    }


def _stacked(xp: Namespace, found: list[Array]) -> Array:
    """A state's arrays along a new axis N; a scan has widened its states' batch axes, an empty sequence has not."""
    shape = broadcast_shapes(*(tuple(x.shape) for x in found))
    return xp.stack([x if tuple(x.shape) == shape else xp.broadcast_to(x, shape) for x in found], axis=0)


def _with_batch_rank(xp: Namespace, x: Array, rank: int) -> Array:
    """A state's array with size-1 axes in front up to the batch's rank, so that N can stand before them."""
    missing = rank - (x.ndim - 2)
    return x if missing <= 0 else xp.reshape(x, (*(1,) * missing, *x.shape))


def _starts(problem: Problem) -> Array:
    """bool (T, 1): where a sequence starts."""
    xp = problem.xp
    offsets: Array = problem.cu_seqlens
    time = xp.arange(problem.length, **problem.placed)[:, None]
    return xp.any(time == offsets[None, :-1], axis=-1, keepdims=True)


def _run_padded(problem: Problem, one: Runner) -> tuple[Array, States]:
    xp, length = problem.xp, problem.length
    offsets: Array = problem.cu_seqlens
    count = offsets.shape[0] - 1
    index = offsets[:-1, None] + xp.arange(length, **problem.placed)[None, :]
    present = index < offsets[1:, None]
    flat = xp.reshape(xp.where(present, index, xp.zeros_like(index)), (-1,))

    def spread(x: Array) -> Array:
        x = xp.take(x, flat, axis=-2)
        return xp.moveaxis(xp.reshape(x, (*x.shape[:-2], count, length, x.shape[-1])), -3, 0)

    # rank of the batch, so that the axis N of every array stands before all batch axes
    rank = max(x.ndim for x in (problem.q, problem.k, problem.v))

    def aligned(x: Array) -> Array:
        return spread(xp.reshape(x, (*(1,) * (rank - x.ndim), *x.shape)))

    mask = xp.reshape(present, (count, *(1,) * (rank - 2), length, 1))
    if problem.token_mask is not None:
        mask = xp.logical_and(mask, aligned(problem.token_mask))
    log_decay = problem.log_decay
    if log_decay is not None:
        if problem.constant:
            log_decay = xp.broadcast_to(log_decay, (*log_decay.shape[:-2], length, 1))
        log_decay = aligned(log_decay)
    padded = replace(
        problem,
        q=aligned(problem.q),
        k=aligned(problem.k),
        v=aligned(problem.v),
        token_mask=mask,
        log_decay=log_decay,
        constant=log_decay is None,
        cu_seqlens=None,
    )
    output, states = one(padded)
    time = xp.arange(length, **problem.placed)
    sequence = xp.sum(xp.astype(offsets[None, 1:] <= time[:, None], offsets.dtype), axis=-1, dtype=offsets.dtype)
    place = sequence * length + time - xp.take(offsets, sequence)
    output = xp.moveaxis(output, 0, -3)
    output = xp.reshape(output, (*output.shape[:-3], count * length, output.shape[-1]))
    return xp.take(output, place, axis=-2), states


def pull(problem: Problem, d_output: Array, d_final: States | None, one: Any) -> ProblemGradients:
    """The gradient of a packed problem from those of its sequences; `one` pulls through a single sequence."""
    offsets, xp = problem.cu_seqlens, problem.xp
    if not isinstance(offsets, list):
        raise OptionError(
            message(
                "cu_seqlens", "offsets with known values in hla.vjp", "a traced array", "Differentiate with JAX itself."
            )
        )
    found = [
        one(
            single,
            _cut(d_output, start, stop),
            None if d_final is None else {s: x[n, ...] for s, x in d_final.items()},
        )
        for n, (single, start, stop) in enumerate(zip(sequences(problem, offsets), offsets, offsets[1:], strict=False))
    ]
    if not found:
        empty: ProblemGradients = one(replace(problem, cu_seqlens=None), d_output, None)
        return empty
    log_decay: Array | None = None
    if problem.log_decay is not None:
        parts = [g.log_decay for g in found]
        log_decay = sum(parts[1:], start=parts[0]) if problem.constant else xp.concat(parts, axis=-2)
    return ProblemGradients(
        xp.concat([g.q for g in found], axis=-2),
        xp.concat([g.k for g in found], axis=-2),
        xp.concat([g.v for g in found], axis=-2),
        log_decay,
        {s: xp.stack([g.initial[s] for g in found], axis=0) for s in (problem.initial or {})},
        sum((g.scale for g in found[1:]), start=found[0].scale) if problem.scale_varies else None,
    )

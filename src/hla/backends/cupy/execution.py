"""Problems on the CUDA kernels; those of other libraries through DLPack, both ways without copies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hla import arrays
from hla.arrays import Array, dtype_name
from hla.backends.cupy import HIGHEST, exchange
from hla.backends.cupy.engine import ENGINE
from hla.backends.staged import execution
from hla.gradients import ProblemGradients
from hla.problem import Problem, States

_ARRAYS = ("q", "k", "v", "log_decay", "token_mask", "starts", "scale")


def plain_form(problem: Problem) -> str:
    """The form that runs: a single token, too, is a chunk where a program has more states than the kernel takes."""
    if problem.form == "auto" and problem.program.spec.order > HIGHEST:
        return "chunkwise"
    return execution.plain_form(problem)


def run(problem: Problem) -> tuple[Array, States]:
    """Output and final states of any problem."""
    problem = replace(problem, form=plain_form(problem))
    if arrays.family(problem.v) == "cupy":
        with arrays.at_home(problem.v):
            return execution.compute(ENGINE, problem)
    with exchange.stream_of(problem.v):
        adopted, back = _adopted(problem), exchange.back_to(problem.v)
        with arrays.at_home(adopted.v):
            output, states = execution.compute(ENGINE, adopted)
            return back(output), {symbol: back(x) for symbol, x in states.items()}


def pull(problem: Problem, d_output: Array, d_final: States | None) -> ProblemGradients:
    """The gradient of `run` applied to cotangents of output and final states."""
    if arrays.family(problem.v) == "cupy":
        with arrays.at_home(problem.v):
            return execution.differentiate(ENGINE, problem, d_output, d_final)
    with exchange.stream_of(problem.v):
        adopted, back = _adopted(problem), exchange.back_to(problem.v)
        d, d_states = exchange.take(d_output), {symbol: exchange.take(x) for symbol, x in (d_final or {}).items()}
        with arrays.at_home(adopted.v):
            found = execution.differentiate(ENGINE, adopted, d, d_states or None)
            initial = {symbol: back(x) for symbol, x in found.initial.items()}
            log_decay, scale = (None if x is None else back(x) for x in (found.log_decay, found.scale))
            return ProblemGradients(back(found.q), back(found.k), back(found.v), log_decay, initial, scale)


def _adopted(problem: Problem) -> Problem:
    """A problem of another library on CuPy's arrays, in the same memory."""
    take: Callable[[Any], Any] = exchange.take
    given = {name: getattr(problem, name) for name in _ARRAYS}
    changed: dict[str, Any] = {name: x if x is None or isinstance(x, float) else take(x) for name, x in given.items()}
    initial = None if problem.initial is None else {symbol: take(x) for symbol, x in problem.initial.items()}
    dtype = getattr(ENGINE.xp, dtype_name(problem.dtype))
    return replace(problem, xp=ENGINE.xp, dtype=dtype, initial=initial, **changed)

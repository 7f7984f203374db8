"""All forms on any problem, in the problem's own namespace: what the backends that interpret programs are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from hla import arrays, bidirectional, chunkwise, gradients, packing, parallel, recurrent, scanwise
from hla.arrays import Array
from hla.gradients import ProblemGradients
from hla.problem import Problem, Runner, States

Puller: TypeAlias = "Callable[[Problem, Array, States | None], ProblemGradients]"

FORMS: dict[str, Runner] = {
    "recurrent": recurrent.run,
    "scan": scanwise.run,
    "chunkwise": chunkwise.run,
    "parallel": parallel.run,
}


def run(problem: Problem) -> tuple[Array, States]:
    """Output and final states of any problem."""
    if problem.cu_seqlens is not None:
        return packing.run(problem, run)
    return run_one(problem)


def run_one(problem: Problem) -> tuple[Array, States]:
    """As `run`, without packed sequences."""
    whole = problem.program.spec.mask == "none"
    if problem.length == 0:  # states are copied: what is returned must not be the caller's own arrays
        return _empty(problem), {} if whole else {s: x + 0.0 for s, x in problem.initial_states().items()}
    if whole:
        return bidirectional.run(problem), {}
    return FORMS[plain_form(problem)](problem)


def plain_form(problem: Problem) -> str:
    """The form that runs: as asked, or for "auto" chunkwise, but for a single token recurrent.

    Where torch traces a program, a Python loop over chunks would be unrolled into it: the scan over chunks is the same
    all at once.
    """
    spec, form = problem.program.spec, problem.form
    if form == "auto":
        form = "recurrent" if problem.length == 1 and spec.mask != "none" else "chunkwise"
    if form == "chunkwise" and spec.mask != "none" and arrays.family(problem.v) == "torch":
        return "scan" if arrays.unrolls(problem.v) else form
    return form


def _empty(problem: Problem) -> Array:
    """No tokens, made from those of the inputs: on a JAX mesh these know how it is spread."""
    q, k, v = (arrays.cast(problem.xp, x, problem.dtype) for x in (problem.q, problem.k, problem.v))
    return arrays.cast(problem.xp, q[..., :1] + k[..., :1] + v, problem.v.dtype)


def pull(problem: Problem, d_output: Array, d_final: States | None) -> ProblemGradients:
    """The gradient of `run` applied to cotangents of output and final states."""
    if problem.cu_seqlens is not None:
        return packing.pull(problem, d_output, d_final, pull)
    if problem.length == 0:
        return gradients.pull_empty(problem, d_final)
    return gradients.pull(problem, d_output, d_final)

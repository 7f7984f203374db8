"""How a problem runs: which form, and what needs no kernel."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from hla import forms, gradients, packing
from hla.arrays import Array
from hla.backends.staged import backward, forward, recurrent
from hla.backends.staged.engine import Engine
from hla.backends.staged.whole import Whole
from hla.gradients import ProblemGradients
from hla.problem import Problem, States


def plain_form(problem: Problem) -> str:
    """The form that runs: "auto" is chunkwise, and recurrent for a single token."""
    if problem.form != "auto":
        return problem.form
    return "recurrent" if problem.length == 1 and problem.program.spec.mask != "none" else "chunkwise"


def compute(engine: Engine, problem: Problem) -> tuple[Array, States]:
    """Output and final states, without a graph."""
    if problem.program.spec.mask == "none":
        if problem.length == 0:
            return forms.run_one(replace(problem, cu_seqlens=None))
        return Whole(engine, problem).output(), {}
    if problem.cu_seqlens is not None and (len(problem.cu_seqlens) == 1 or problem.length == 0):
        return packing.run(problem, partial(compute, engine))
    if problem.length == 0:
        return forms.run_one(problem)
    if plain_form(problem) == "recurrent":
        return recurrent.run(engine, problem)
    return forward.run(engine, problem)


def differentiate(
    engine: Engine, problem: Problem, d_output: Array, d_final: States | None, *, rate: bool = True
) -> ProblemGradients:
    """The gradient of `compute`. `rate`: whether that of the log-decays is wanted."""
    if problem.length == 0 or (problem.cu_seqlens is not None and len(problem.cu_seqlens) == 1):
        if problem.cu_seqlens is not None:
            return packing.pull(problem, d_output, d_final, partial(differentiate, engine))
        return gradients.pull_empty(problem, d_final)
    if problem.program.spec.mask == "none":
        return Whole(engine, problem).pull(d_output)
    return backward.pull(engine, problem, d_output, d_final, rate=rate)

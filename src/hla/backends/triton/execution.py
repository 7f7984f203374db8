"""How a problem runs: which form, packed sequences, and what is watched by autograd or a transformation."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from hla import forms, gradients, packing
from hla.backends.triton import backward, forward, recurrent
from hla.backends.triton.whole import Whole
from hla.gradients import ProblemGradients
from hla.problem import Problem, States


def plain_form(problem: Problem) -> str:
    """The form that runs: "auto" is chunkwise, and recurrent for a single token."""
    if problem.form != "auto":
        return problem.form
    return "recurrent" if problem.length == 1 and problem.program.spec.mask != "none" else "chunkwise"


def compute(problem: Problem) -> tuple[Tensor, States]:
    """Output and final states, without a graph."""
    if problem.program.spec.mask == "none":
        if problem.length == 0:
            return forms.run_one(replace(problem, cu_seqlens=None))
        return Whole(problem).output(), {}
    if problem.cu_seqlens is not None and len(problem.cu_seqlens) == 1:
        return packing.run(problem, compute)
    if problem.length == 0:
        return packing.run(problem, compute) if problem.cu_seqlens is not None else forms.run_one(problem)
    if plain_form(problem) == "recurrent":
        return recurrent.run(problem)
    return forward.run(problem)


def differentiate(problem: Problem, d_output: Tensor, d_final: States | None, *, rate: bool = True) -> ProblemGradients:
    """The gradient of `compute`. `rate`: whether that of the log-decays is wanted."""
    if problem.length == 0 or (problem.cu_seqlens is not None and len(problem.cu_seqlens) == 1):
        if problem.cu_seqlens is not None:
            return packing.pull(problem, d_output, d_final, differentiate)
        return gradients.pull_empty(problem, d_final)
    if problem.program.spec.mask == "none":
        return Whole(problem).pull(d_output)
    return backward.pull(problem, d_output, d_final, rate=rate)

"""Backend "numpy": the Array API core, which runs every form on any namespace. Other backends are tested against it."""

from __future__ import annotations

from hla import arrays, bidirectional, chunkwise, gradients, packing, parallel, recurrent, scanwise
from hla.arrays import Array, undisturbed
from hla.backends.registry import Backend, BackendSpec
from hla.gradients import ProblemGradients
from hla.problem import Problem, States

FORMS = {"recurrent": recurrent.run, "scan": scanwise.run, "chunkwise": chunkwise.run, "parallel": parallel.run}


def run(problem: Problem) -> tuple[Array, States]:
    """Output and final states of any problem."""
    with undisturbed(problem.xp, problem.v):
        return _run(problem)


def _run(problem: Problem) -> tuple[Array, States]:
    if problem.cu_seqlens is not None:
        return packing.run(problem, _run)
    whole = problem.program.spec.mask == "none"
    if problem.length == 0:  # states are copied: what is returned must not be the caller's own arrays
        return _empty(problem), {} if whole else {s: x + 0.0 for s, x in problem.initial_states().items()}
    if whole:
        return bidirectional.run(problem), {}
    return FORMS[plain_form(problem)](problem)


def plain_form(problem: Problem) -> str:
    """The form that runs: as asked, or for "auto" chunkwise, but for a single token recurrent.

    Where torch traces, a Python loop over chunks would be unrolled into the program: the scan over chunks is the same
    all at once.
    """
    spec, form = problem.program.spec, problem.form
    if form == "auto":
        form = "recurrent" if problem.length == 1 and spec.mask != "none" else "chunkwise"
    if form == "chunkwise" and spec.mask != "none" and arrays.family(problem.v) == "torch":
        return "scan" if arrays.is_traced(problem.v) else form
    return form


def _empty(problem: Problem) -> Array:
    return problem.xp.zeros((*problem.output_batch(), 0, problem.v.shape[-1]), dtype=problem.v.dtype, **problem.placed)


def pull(problem: Problem, d_output: Array, d_final: States | None) -> ProblemGradients:
    """The gradient of `run` applied to cotangents of output and final states."""
    with undisturbed(problem.xp, problem.v):
        return _pull(problem, d_output, d_final)


def _pull(problem: Problem, d_output: Array, d_final: States | None) -> ProblemGradients:
    if problem.cu_seqlens is not None:
        return packing.pull(problem, d_output, d_final, _pull)
    if problem.length == 0:
        return gradients.pull_empty(problem, d_final)
    return gradients.pull(problem, d_output, d_final)


def backend() -> Backend:
    """The registry's entry."""
    spec = BackendSpec(
        name="numpy",
        families=("*",),
        description="the Array API reference; runs any namespace",
        forms=("recurrent", "scan", "chunkwise", "parallel"),
        gradients=True,
        priority=0,
    )
    return Backend(spec=spec, load=lambda operator: run, load_gradient=lambda operator: pull, plain_form=plain_form)

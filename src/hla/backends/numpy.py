"""Backend "numpy": the Array API core, which runs every form on any namespace. Other backends are tested against it."""

from __future__ import annotations

from hla import forms
from hla.arrays import Array, undisturbed
from hla.backends.registry import Backend, BackendSpec
from hla.gradients import ProblemGradients
from hla.problem import Problem, States


def run(problem: Problem) -> tuple[Array, States]:
    """Output and final states of any problem."""
    with undisturbed(problem.xp, problem.v):
        return forms.run(problem)


def pull(problem: Problem, d_output: Array, d_final: States | None) -> ProblemGradients:
    """The gradient of `run` applied to cotangents of output and final states."""
    with undisturbed(problem.xp, problem.v):
        return forms.pull(problem, d_output, d_final)


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
    return Backend(
        spec=spec,
        load=lambda operator: run,
        load_gradient=lambda operator: pull,
        plain_form=forms.plain_form,
        step_namespaces=lambda problem: (problem.xp, problem.xp),
    )

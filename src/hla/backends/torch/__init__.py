"""Backend "torch": the core on a namespace of torch's own functions, with its own backward, on any device."""

from __future__ import annotations

from typing import Any

from hla import forms
from hla.backends.registry import Backend, BackendSpec, Gradient
from hla.problem import Problem, Runner


def _load(operator: str) -> Runner:
    from hla.backends.torch.execution import run

    return run


def _load_gradient(operator: str) -> Gradient:
    from hla.backends.torch.execution import pull

    return pull


def _step_namespaces(problem: Problem) -> tuple[Any, Any]:
    from hla.backends.torch.namespace import EAGER, PLAIN

    return PLAIN, EAGER


def backend() -> Backend:
    """The registry's entry."""
    spec = BackendSpec(
        name="torch",
        families=("torch",),
        description="PyTorch on any device; a loop over chunks, recomputing backward",
        requires=("torch",),
        extra="torch",
        forms=("recurrent", "scan", "chunkwise", "parallel"),
        gradients=True,
        priority=10,
    )
    return Backend(
        spec=spec,
        load=_load,
        load_gradient=_load_gradient,
        plain_form=forms.plain_form,
        step_namespaces=_step_namespaces,
    )

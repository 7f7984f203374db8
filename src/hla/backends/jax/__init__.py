"""Backend "jax": the core as one compiled program, chunks in `lax.scan`, products in full precision."""

from __future__ import annotations

from hla import forms
from hla.backends.registry import Backend, BackendSpec, Gradient
from hla.problem import Runner


def _load(operator: str) -> Runner:
    from hla.backends.jax.execution import run

    return run


def _load_gradient(operator: str) -> Gradient:
    from hla.backends.jax.execution import pull

    return pull


def backend() -> Backend:
    """The registry's entry."""
    spec = BackendSpec(
        name="jax",
        families=("jax",),
        description="JAX on any device; compiled, a scan over chunks with recomputing backward",
        requires=("jax",),
        extra="jax",
        forms=("recurrent", "scan", "chunkwise", "parallel"),
        gradients=True,
        priority=10,
    )
    return Backend(spec=spec, load=_load, load_gradient=_load_gradient, plain_form=forms.plain_form)

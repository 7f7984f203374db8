"""What is timed of a function (q, k, v) → o: its value, its value with gradients, or one token after others.

Gradients are taken as a library's users take them: PyTorch's autograd, JAX's `jit(value_and_grad)`, and for NumPy the
function's own pull, `hla.vjp` for the operators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from hla.testing.libraries import Placement

Array: TypeAlias = Any
Attend: TypeAlias = Callable[[Array, Array, Array], Array]
Pull: TypeAlias = Callable[[Array, Array, Array, Array], tuple[Any, tuple[Array, Array, Array]]]
"""(q, k, v, do) → (o or the loss Σ do·o, (dq, dk, dv))"""

PASSES = ("forward", "backward", "decode")


def forward(place: Placement, attend: Attend) -> Attend:
    """The function as its library's users call it: under jit for JAX, without a graph for PyTorch."""
    if place.library != "torch":
        compiled: Attend = place.compiled(attend)
        return compiled
    import torch

    def run(q: Array, k: Array, v: Array) -> Array:
        with torch.no_grad():
            return attend(q, k, v)

    return run


def backward(place: Placement, attend: Attend, pull: Pull | None = None) -> Pull | None:
    """Forward and backward in one; None for a library that does not differentiate, and a function without a pull."""
    if place.library == "torch":
        import torch

        def differentiate(q: Array, k: Array, v: Array, do: Array) -> Any:
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            o = attend(*leaves)
            return o.detach(), torch.autograd.grad(o, leaves, do)

        return differentiate
    if place.library == "jax":
        import jax

        def loss(q: Array, k: Array, v: Array, do: Array) -> Array:
            return (attend(q, k, v) * do).sum()

        compiled: Pull = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
        return compiled
    return pull

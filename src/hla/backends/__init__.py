"""Backends: who computes. See docs/backends.md for choosing, and for adding one."""

from __future__ import annotations

from hla.backends.registry import (
    Backend,
    BackendSpec,
    Call,
    Guests,
    Verdict,
    get,
    register_backend,
    registered,
    unregister_backend,
)
from hla.backends.selection import (
    Candidate,
    Plan,
    available,
    get_backend,
    restore,
    set_backend,
    snapshot,
    use_backend,
)

__all__ = [
    "Backend",
    "BackendSpec",
    "Call",
    "Candidate",
    "Guests",
    "Plan",
    "Verdict",
    "available",
    "get",
    "get_backend",
    "register_backend",
    "registered",
    "restore",
    "set_backend",
    "snapshot",
    "unregister_backend",
    "use_backend",
]


def builtin() -> dict[str, Backend]:
    """The backends of this distribution; each file imports its framework only when it is loaded."""
    from hla.backends import cupy, jax, numpy, torch, triton

    made = (numpy.backend(), torch.backend(), triton.backend(), jax.backend(), cupy.backend())
    return {backend.spec.name: backend for backend in made}

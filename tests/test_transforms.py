"""Gradients on every library. What PyTorch and JAX transform themselves is in test_torch*.py and test_jax.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import budget
import hla

BATCH, HEADS, TOKENS, D, DV = 2, 3, 17, 5, 7
CHUNK = 5
FEW: dict[str, tuple[str, dict[str, Any]]] = {
    "hla2": ("hla2", {"ridge": 0.7}),
    "ahla": ("ahla", {}),
    "hla3 printed": ("hla3", {"definition": "as_printed"}),
    "order 4": ("higher_order", {"order": 4}),
}


def close(x: Any, y: Any, label: str = "", rtol: float = 1e-9) -> None:
    x, y = np.asarray(x), np.asarray(y)
    assert x.shape == y.shape, label
    assert np.allclose(x, y, rtol=rtol, atol=rtol * max(1.0, np.abs(y).max(initial=0.0))), label


@pytest.mark.parametrize("name", FEW)
def test_one_array_as_queries_and_keys(lib: Any, name: str) -> None:
    """The same object twice, or three times: the gradient is the sum of those of its places."""
    op, own = FEW[name]
    rng = np.random.default_rng(41)
    q, v, do = (0.7 * rng.normal(size=(BATCH, HEADS, TOKENS, n)) for n in (D, DV, DV))
    values = (q, q, v)
    x, z, d = (lib.asarray(a) for a in (q, v, do))
    options = {**own, "decay": 0.9, "chunk_size": CHUNK}
    out, pull = hla.vjp(op, x, x, z, **options)
    want = budget.expected(op, *values, log_decay=np.full((1, TOKENS), np.log(0.9)), **own)
    most = budget.tolerance("float64", TOKENS, D, 6)
    budget.assert_within(lib.numpy(out), want, most, "float64")
    _, apart = hla.vjp(op, lib.asarray(np.array(q)), lib.asarray(np.array(q)), z, **options)
    one, other = pull(d), apart(d)
    for label in ("q", "k", "v"):
        close(lib.numpy(getattr(one, label)), lib.numpy(getattr(other, label)), label)
    together = lib.numpy(one.q) + lib.numpy(one.k)
    if lib.name == "torch":
        leaf = x.clone().requires_grad_()
        getattr(hla, op)(leaf, leaf, z, **options).backward(d)
        close(leaf.grad, together)
    if lib.name == "jax":
        import jax

        close(jax.grad(lambda a: (getattr(hla, op)(a, a, z, **options) * d).sum())(x), together)

"""Backend "jax" under JAX's transformations: derivatives, vectorisation, compilation, memory, meshes, threads.

The judges: the dense definitions (`oracle` in NumPy, `hla.reference` where they are differentiated), and `hla.vjp` on
NumPy arrays, which shares nothing with JAX's own differentiation. Sizes are distinct primes, and chunks are shorter
than the sequence.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import budget
import hla
import libraries
from hla import arrays, reference
from samples import BATCH, CHUNK, DV, FEW, FORMS, HEADS, NAMES, OPERATORS, TOKENS, D, draw

jax: Any = libraries.only("jax")

import jax.numpy as jnp  # noqa: E402

FEW_IN_ONE_FORM = list(zip(FEW, ("recurrent", "scan", "chunkwise", "chunkwise"), strict=True))


optimised = pytest.mark.optimised


@pytest.fixture(autouse=True)
def quick_programs(request: pytest.FixtureRequest) -> Iterator[None]:
    """XLA compiles three times as fast without most optimisations; some of each kind of test have them."""
    jax.config.update("jax_disable_most_optimizations", not request.node.get_closest_marker("optimised"))
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def put(values: Any, dtype: Any = None) -> list[Any]:
    return [jnp.asarray(x, dtype) for x in values]


def call(
    name: str, q: Any, k: Any, v: Any, log_decay: Any = None, *, backend: str | None = None, **options: Any
) -> Any:
    """An operator on JAX arrays (backend "jax" runs, unless another is named) or on NumPy arrays."""
    op, own = OPERATORS[name]
    options = {"chunk_size": CHUNK, "log_decay": log_decay, "backend": backend, **own, **options}
    plan = hla.explain(op, q, k, v, **options)
    assert plan.backend == (backend or arrays.family(v))
    assert plan.form == options.get("form", "chunkwise")
    return getattr(hla, op)(q, k, v, **options)


def dense(name: str, q: Any, k: Any, v: Any, log_decay: Any = None, **options: Any) -> Any:
    """The definition, by all pairs of tokens, as plain JAX operations."""
    op, own = OPERATORS[name]
    return reference.attend(op, q, k, v, log_decay=log_decay, **own, **options)


def start(name: str) -> Any:
    """A state that some tokens have made, in NumPy."""
    rng = np.random.default_rng(42)
    return call(name, *(rng.normal(size=(BATCH, HEADS, 4, n)) for n in (D, D, DV)), return_state=True)[1]


def as_jax(state: Any) -> Any:
    return type(state)(*put(state))


def judge(name: str, arrays: Any, do: Any, **options: Any) -> Any:
    """Value and gradients by hla.vjp in NumPy; the last state's cotangent is the state itself."""
    op, own = OPERATORS[name]
    q, k, v, log_decay = arrays
    options = {"chunk_size": CHUNK, "log_decay": log_decay, "return_state": True, **own, **options}
    (out, state), pull = hla.vjp(op, q, k, v, **options)
    return (out, state), pull(do, state)


def close(x: Any, y: Any, label: str = "", rtol: float = 1e-9) -> None:
    x, y = np.asarray(x), np.asarray(y)
    assert x.shape == y.shape, label
    assert np.allclose(x, y, rtol=rtol, atol=rtol * max(1.0, np.abs(y).max(initial=0.0))), label


def all_close(x: Any, y: Any, label: str = "", rtol: float = 1e-9) -> None:
    """Two trees of arrays."""
    assert jax.tree.structure(x) == jax.tree.structure(y), label
    for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True):
        close(a, b, label, rtol)


def same(found: Any, want: Any, label: str = "") -> None:
    """Gradients, and those of the initial state."""
    for name in NAMES:
        close(found[name], getattr(want, name), f"{label}: {name}")
    for field, x, y in zip(want.initial_state._fields, found["initial_state"], want.initial_state, strict=True):
        close(x, y, f"{label}: {field}")


def inner(jaxpr: Any) -> Iterator[Any]:
    """Equations of a program, those of its inner programs included."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for part in value if isinstance(value, (tuple, list)) else (value,):
                part = getattr(part, "jaxpr", part)
                if hasattr(part, "eqns"):
                    yield from inner(part)


def equations(function: Callable[..., Any], *xs: Any) -> list[Any]:
    return list(inner(jax.make_jaxpr(function)(*xs).jaxpr))


class Traced:
    """A compiled function that counts how often it was traced."""

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        self.count = 0

        def counted(*xs: Any) -> Any:
            self.count += 1
            return function(*xs)

        self._compiled = jax.jit(counted, **options)

    def __call__(self, *xs: Any) -> Any:
        return self._compiled(*xs)


# Derivatives

EACH = [(name, FORMS[i % 4], None) for i, name in enumerate(OPERATORS)] + [("hla2", form, None) for form in FORMS[2:]]
ON_THE_CORE = [(name, form, "numpy") for name, form in FEW_IN_ONE_FORM]
COMPILED = [pytest.param(*case, marks=[optimised] if case[0] == "hla2" else []) for case in EACH + ON_THE_CORE]


@pytest.mark.parametrize(("name", "form", "backend"), COMPILED)
def test_compiled_values_and_gradients(name: str, form: str, backend: str | None) -> None:
    """jit and grad through outputs and states, with respect to everything."""
    *inputs, do = draw()
    state = start(name)
    (out, last), want = judge(name, inputs, do, initial_state=state)
    fixed = as_jax(last)

    def loss(given: Any) -> Any:
        more = {n: given[n] for n in ("log_decay", "initial_state")}
        options = {"form": form, "return_state": True, "backend": backend, **more}
        found, final = call(name, given["q"], given["k"], given["v"], **options)
        total = (found * do).sum() + sum((x * y).sum() for x, y in zip(final, fixed, strict=True))
        return total, (found, final)

    given = dict(zip(NAMES, put(inputs), strict=True))
    given["initial_state"] = as_jax(state)
    (_, (found, final)), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(given)
    close(found, out, form)
    all_close(final, as_jax(last), form)
    same(gradients, want, f"{name}, {form}")


@pytest.mark.parametrize("backend", [None, "numpy"])
def test_gradients_without_compilation(backend: str | None) -> None:
    name = "hla2"
    *inputs, do = draw(CHUNK)
    (_, fixed), want = judge(name, inputs, do, initial_state=start(name))

    def loss(given: Any) -> Any:
        more = {n: given[n] for n in ("log_decay", "initial_state")}
        found, final = call(
            name, given["q"], given["k"], given["v"], return_state=True, chunk_size=3, backend=backend, **more
        )
        return (found * do).sum() + sum((x * y).sum() for x, y in zip(final, fixed, strict=True))

    given = dict(zip(NAMES, put(inputs), strict=True))
    given["initial_state"] = as_jax(start(name))
    same(jax.grad(loss)(given), want, name)
    with jax.disable_jit():
        same(jax.grad(loss)(given), want, name)


@optimised
@pytest.mark.parametrize(("name", "form"), [*((name, "chunkwise") for name in FEW), ("hla2", "recurrent")])
def test_two_loops_one_value(name: str, form: str) -> None:
    """Values and derivatives run through loops of their own: the values are the same, and those of the definition."""
    op, own = OPERATORS[name]
    *inputs, _ = draw()
    x = put(inputs)

    def run(*xs: Any) -> Any:
        return call(name, *xs, form=form, return_state=True)

    values = jax.jit(run)(*x)
    derived, _ = jax.jit(lambda *xs: jax.jvp(run, xs, xs))(*x)
    all_close(values, derived, name, rtol=1e-13)
    want = budget.expected(op, *inputs[:3], log_decay=inputs[3], **own)
    passes = budget.stages(op, own.get("order"), own.get("definition", "exact"))
    budget.assert_within(values[0], want, budget.tolerance("float64", TOKENS, D, passes), "float64", name)


CUTS = {"dynamic_slice", "dynamic_update_slice", "scatter-add", "scatter", "gather"}
"""What a loop that cuts its pieces out of the whole is made of, and the derivative of that."""


def test_derivatives_take_the_other_loop() -> None:
    """The derivative of cutting a chunk out is an array of the whole length per chunk: no derivative may meet one."""
    x = put(draw()[:4])

    def run(*xs: Any) -> Any:
        return call("hla2", *xs)

    def loss(*xs: Any) -> Any:
        return (run(*xs) ** 2).sum()

    def stacked(*xs: Any) -> Any:
        return jax.lax.scan(lambda v, _: (call("hla2", xs[0], xs[1], v, xs[3]), None), xs[2], None, 2)[0].sum()

    assert {e.primitive.name for e in equations(run, *x)} & CUTS, "the loop for values has gone"
    for label, derivative in {
        "grad": jax.grad(loss, argnums=(0, 1, 2, 3)),
        "grad of jit": jax.grad(jax.jit(loss)),
        "vmap of grad": jax.vmap(jax.grad(loss, argnums=(0, 3))),
        "jvp": lambda *xs: jax.jvp(run, xs, xs),
        "linearize": lambda *xs: jax.linearize(loss, *xs)[1](*xs),
        "vjp": lambda *xs: jax.vjp(run, *xs)[1](xs[2]),
        "grad of checkpoint": jax.grad(jax.checkpoint(loss)),
        "grad of scan": jax.grad(stacked, argnums=(1, 2)),
        "hvp": lambda *xs: jax.jvp(jax.grad(loss), xs, xs),
        "grad of jvp": jax.grad(lambda *xs: jax.jvp(loss, xs, xs)[1]),
    }.items():
        found = {e.primitive.name for e in equations(derivative, *x)} & CUTS
        assert not found, label


@pytest.mark.parametrize(("name", "form"), FEW_IN_ONE_FORM)
def test_forward_mode(name: str, form: str) -> None:
    """It is the transpose of the reverse mode, ⟨do, J x⟩ = ⟨Jᵀ do, x⟩; jvp, linearize and jax.vjp say the same."""
    *inputs, do = draw()
    op, own = OPERATORS[name]
    _, pull = hla.vjp(op, *inputs[:3], log_decay=inputs[3], chunk_size=CHUNK, **own)
    want = pull(do)
    rng = np.random.default_rng(43)
    tangents = [rng.normal(size=x.shape) for x in inputs]

    def run(*xs: Any) -> Any:
        return call(name, *xs, form=form)

    @jax.jit
    def all_of_them(xs: Any, ts: Any, d: Any) -> Any:
        value, tangent = jax.jvp(run, xs, ts)
        again, linear = jax.linearize(run, *xs)
        _, back = jax.vjp(run, *xs)
        return value, tangent, again, linear(*ts), back(d)

    value, tangent, again, linear, back = all_of_them(tuple(put(inputs)), tuple(put(tangents)), jnp.asarray(do))
    close(again, value, rtol=1e-13)
    close(linear, tangent)
    total = sum((getattr(want, n) * x).sum() for n, x in zip(NAMES, tangents, strict=True))
    assert np.isclose(float((tangent * do).sum()), total, rtol=1e-9)
    for n, x in zip(NAMES, back, strict=True):
        close(x, getattr(want, n), n)


@pytest.mark.parametrize("name", ["ahla", "order 4"])
def test_jacobians(name: str) -> None:
    """Forward and reverse agree, row by row with hla.vjp; nothing flows back from earlier outputs to later tokens."""
    q, k, v, log_decay, _ = draw(4, batch=())
    run = lambda a: call(name, a, *put((k, v, log_decay)), chunk_size=3)  # noqa: E731
    forward, reverse = jax.jit(lambda a: (jax.jacfwd(run)(a), jax.jacrev(run)(a)))(jnp.asarray(q))
    close(forward, reverse)
    _, pull = hla.vjp(OPERATORS[name][0], q, k, v, log_decay=log_decay, chunk_size=3, **OPERATORS[name][1])
    for t, c in np.ndindex(4, DV):
        unit = np.zeros((4, DV))
        unit[t, c] = 1.0
        close(forward[t, c], pull(unit).q)
        assert not np.asarray(forward[t, c, t + 1 :]).any()


@pytest.mark.parametrize(("name", "form"), [("hla2", "chunkwise"), ("ahla", "scan"), ("hla3 printed", "recurrent")])
def test_second_derivatives(name: str, form: str) -> None:
    """Products with the Hessian: forward over reverse, reverse over reverse, reverse over forward: the definition's."""
    x = tuple(put(draw(5, batch=())[:4]))
    rng = np.random.default_rng(44)
    u = tuple(jnp.asarray(rng.normal(size=a.shape)) for a in x)
    options = {"normalize": True, "eps": 3.0}

    def loss(*xs: Any) -> Any:
        return jnp.sin(call(name, *xs, form=form, chunk_size=2, **options)).sum()

    def defined(*xs: Any) -> Any:
        return jnp.sin(dense(name, *xs, **options)).sum()

    def along(f: Any) -> Any:
        return jax.jvp(jax.grad(f, argnums=(0, 1, 2, 3)), x, u)[1]

    @jax.jit
    def products() -> Any:
        grad = jax.grad(loss, argnums=(0, 1, 2, 3))
        twice = jax.grad(
            lambda *xs: sum((a * b).sum() for a, b in zip(grad(*xs), u, strict=True)), argnums=(0, 1, 2, 3)
        )(*x)
        mixed = jax.grad(lambda *xs: jax.jvp(loss, xs, u)[1], argnums=(0, 1, 2, 3))(*x)
        return along(loss), twice, mixed

    want = jax.jit(lambda: along(defined))()
    assert all(np.abs(w).max() > 1e-3 for w in want)
    for label, found in zip(("forward over reverse", "reverse twice", "reverse over forward"), products(), strict=True):
        all_close(found, want, label)


def test_hessian() -> None:
    x = jnp.asarray(draw(4, batch=())[2])
    q, k, _, g, _ = put(draw(4, batch=()))
    f = lambda run: lambda v: (run("hla2", q * v[:, :D], k, v, g) ** 2).sum()  # noqa: E731
    chunks = lambda *xs: call(*xs, chunk_size=3)  # noqa: E731
    found, want = jax.jit(lambda v: (jax.hessian(f(chunks))(v), jax.hessian(f(dense))(v)))(x)
    close(found, want)


@pytest.mark.parametrize("name", ["hla2", "hla3 printed"])
def test_vmap(name: str) -> None:
    """Over any axes, in and out of jit, also where k or the decay has none: what batch axes would do."""
    inputs = draw()
    q, k, v, log_decay, do = put(inputs)
    mapped = jax.vmap(jax.vmap(lambda *xs: call(name, *xs)))
    close(jax.jit(mapped)(q, k, v, log_decay), call(name, *inputs[:4]))
    close(mapped(q, k, v, log_decay), call(name, *inputs[:4]))
    inside = jax.vmap(jax.jit(lambda a: call(name, a, k[0, 0], v[0, 0])))
    close(inside(q[0]), call(name, inputs[0][0], inputs[1][:1, 0], inputs[2][:1, 0]))
    without = jax.jit(jax.vmap(lambda a, c: call(name, a, k[0], c), in_axes=(0, 1), out_axes=1))
    close(without(q, v.swapaxes(0, 1)), call(name, inputs[0], inputs[1][:1], inputs[2]).swapaxes(0, 1))
    decays = np.asarray([0.5, 0.9, 1.0])
    over_decay = jax.vmap(lambda g: call(name, q[0, 0], k[0, 0], v[0, 0], decay=g))(jnp.asarray(decays))
    close(over_decay, call(name, *(np.stack([x[0, 0]] * 3) for x in inputs[:3]), decay=decays))

    def loss(a: Any, b: Any, c: Any, g: Any, d: Any) -> Any:
        return (call(name, a, b, c, g) * d).sum()

    per_example = jax.jit(jax.vmap(jax.vmap(jax.grad(loss, argnums=(0, 1, 2, 3)))))(q, k, v, log_decay, do)
    op, own = OPERATORS[name]
    _, pull = hla.vjp(op, *inputs[:3], log_decay=inputs[3], chunk_size=CHUNK, **own)
    want = pull(inputs[4])
    for label, x in zip(NAMES, per_example, strict=True):
        close(x, getattr(want, label), label)


@pytest.mark.parametrize("name", ["hla2", "hla3"])
def test_layers(name: str) -> None:
    """lax.scan over stacked layers, each under checkpoint and a jit of its own; against the definition in a loop."""
    rng = np.random.default_rng(45)
    width, layers = D, 3
    weights = {n: jnp.asarray(rng.normal(size=(layers, width, width)) / width) for n in ("q", "k", "v")}
    weights["gate"] = jnp.asarray(rng.normal(size=(layers, width)))
    x = jnp.asarray(rng.normal(size=(BATCH, TOKENS, width)))

    def layer(run: Any, x: Any, w: Any) -> Any:
        gate = jax.nn.log_sigmoid(x @ w["gate"] + 2.0)
        return x + jnp.tanh(run(name, x @ w["q"], x @ w["k"], x @ w["v"], gate, scale=width**-0.5))

    def model(weights: Any, x: Any) -> Any:
        each = jax.checkpoint(jax.jit(lambda x, w: layer(call, x, w)))
        return (jax.lax.scan(lambda x, w: (each(x, w), None), x, weights)[0] ** 2).sum()

    def plain(weights: Any, x: Any) -> Any:
        for i in range(layers):
            x = layer(dense, x, jax.tree.map(lambda w: w[i], weights))  # noqa: B023
        return (x**2).sum()

    found = jax.jit(jax.value_and_grad(model, argnums=(0, 1)))(weights, x)
    want = jax.jit(jax.value_and_grad(plain, argnums=(0, 1)))(weights, x)
    all_close(found, want, name)


@pytest.mark.parametrize("policy", ["nothing_saveable", "dots_saveable", "everything_saveable"])
def test_checkpoint(policy: str) -> None:
    *inputs, do = draw()
    x = put(inputs)
    loss = jax.checkpoint(lambda *xs: (call("ahla", *xs) * do).sum(), policy=getattr(jax.checkpoint_policies, policy))
    found = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(*x)
    _, pull = hla.vjp("ahla", *inputs[:3], log_decay=inputs[3])
    want = pull(do)
    for label, g in zip(NAMES, found, strict=True):
        close(g, getattr(want, label), label)


@pytest.mark.parametrize("name", ["hla2", "hla3 printed"])
def test_traced_decay_and_options(name: str) -> None:
    """A constant decay, scale, masks and ids whose values are hidden; gradients of decay and scale; one program."""
    op, own = OPERATORS[name]
    q, k, v, _, do = draw()
    mask = np.random.default_rng(44).random((BATCH, 1, TOKENS)) < 0.8
    ids = np.asarray([0] * 4 + [1] * 7 + [3] * 6)

    def run(decay: Any, scale: Any, mask: Any, ids: Any) -> Any:
        options = {"decay": decay, "scale": scale, "token_mask": mask, "segment_ids": ids, "normalize": True}
        return call(name, *put((q, k, v)), **options, eps=3.0)

    both = Traced(
        lambda g, s, *xs: (run(g, s, *xs), jax.grad(lambda h, t: (run(h, t, *xs) * do).sum(), argnums=(0, 1))(g, s))
    )
    for decay, scale in ((0.9, 0.5), (0.7, 1.0), (1.0, -1.5)):
        decays = np.asarray([0.6, decay, 1.0]) if name == "hla2" else np.asarray(decay)
        options = {**own, "decay": decays, "token_mask": mask, "segment_ids": ids, "normalize": True, "eps": 3.0}
        out, pull = hla.vjp(op, q, k, v, scale=np.asarray(scale), chunk_size=CHUNK, **options)
        found, (d_decay, d_scale) = both(*put((decays, scale, mask, ids)))
        close(found, out)
        close(d_decay, pull(do).decay)
        close(d_scale, pull(do).scale)
    assert both.count == 1


def test_static_decay() -> None:
    """A plain number is a constant of the program, and equal to an array of it."""
    q, k, v, _, _ = draw()
    want = call("hla3", q, k, v, decay=0.9)
    for decay in (0.9, np.float64(0.9), np.asarray(0.9), jnp.asarray(0.9)):
        close(jax.jit(lambda *xs: call("hla3", *xs, decay=decay))(*put((q, k, v))), want)  # noqa: B023


@pytest.mark.parametrize("form", FORMS)
def test_resets(form: str) -> None:
    """Where a decay is a reset its gradient is 0 and not NaN, and nothing before it has one."""
    q, k, v, gates, do = draw()
    gates = np.array(gates)
    gates[..., [3, 9]] = -np.inf
    loss = lambda *xs: (call("hla2", *xs, form=form) * do)[..., 9:, :].sum()  # noqa: E731
    found = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(*put((q, k, v, gates)))
    _, pull = hla.vjp("hla2", q, k, v, log_decay=gates, chunk_size=CHUNK, ridge=0.7)
    late = np.where(np.arange(TOKENS)[:, None] >= 9, do, 0.0)
    want = pull(late)
    for label, g in zip(NAMES, found, strict=True):
        close(g, getattr(want, label), label)
        at = np.asarray(g).reshape(BATCH, HEADS, TOKENS, -1)
        assert not at[:, :, :9].any()
    assert not np.asarray(found[3])[..., [3, 9]].any()


def test_nan_checks_stay_silent() -> None:
    """jax.debug_nans: no NaN appears on the way from resets, masked tokens and masked NaN."""
    q, k, v, gates, do = draw()
    gates = np.array(gates)
    gates[..., [3, 9]] = -np.inf
    mask = np.arange(TOKENS) % 4 != 1
    f = lambda *xs: (call("hla3", *xs, token_mask=mask, normalize=True, eps=3.0) * do).sum()  # noqa: E731
    with jax.debug_nans(True):
        value, slopes = jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2, 3)))(*put((q, k, v, gates)))
        assert np.isfinite(float(value))
        assert all(np.isfinite(g).all() and np.abs(g).max() > 0 for g in slopes)
        with pytest.raises(FloatingPointError):
            jax.jit(f)(*put((q * np.nan, k, v, gates)))


# Packed sequences


@pytest.mark.parametrize("states", [False, True])
def test_traced_offsets(states: bool) -> None:
    """cu_seqlens as an argument of a compiled function: each sequence by itself, and one program for all offsets."""
    q, k, v, g, do = draw()
    initial = [start("hla2") for _ in range(3)]
    rng = np.random.default_rng(46)
    stacked = type(initial[0])(*(rng.normal(size=(3, *x.shape)) for x in initial[0]))

    def run(q: Any, offsets: Any, first: Any) -> Any:
        more = {"initial_state": first, "return_state": True} if states else {}
        return call("hla2", q, *put((k, v, g)), cu_seqlens=offsets, **more)

    def loss(*xs: Any) -> Any:
        found = run(*xs)
        return ((found[0] if states else found) * do).sum(), found

    compiled = Traced(jax.value_and_grad(loss, has_aux=True))
    for offsets in ([0, 4, 4, TOKENS], [0, 0, 11, TOKENS], [0, 16, TOKENS, TOKENS]):
        (_, found), slope = compiled(jnp.asarray(q), jnp.asarray(offsets), as_jax(stacked))
        for n, (a, b) in enumerate(pairwise(offsets)):
            first = type(stacked)(*(x[n] for x in stacked))
            more = {"initial_state": first, "return_state": True} if states else {}
            cut = (q[..., a:b, :], k[..., a:b, :], v[..., a:b, :])
            want, pull = hla.vjp("hla2", *cut, log_decay=g[..., a:b], ridge=0.7, **more)
            if states:
                close(found[0][..., a:b, :], want[0])
                for x, y in zip(found[1], want[1], strict=True):
                    close(x[n], y)
            else:
                close(found[..., a:b, :], want)
            d = do[..., a:b, :]
            close(slope[..., a:b, :], pull(d, None).q if states else pull(d).q)
    assert compiled.count == 1


# States


def test_states_are_pytrees() -> None:
    """A state is the carry of lax.scan over steps, and passes through jit, grad and tree functions."""
    q, k, v, log_decay, _ = put(draw())
    want, last = call("hla3", q, k, v, log_decay, return_state=True, normalize=True)
    first = hla.init_state("hla3", batch=(BATCH, HEADS), d=D, dv=DV, like=q, normalize=True)
    leaves, structure = jax.tree.flatten(first)
    assert len(leaves) == len(first)
    assert type(jax.tree.unflatten(structure, leaves)) is type(first)
    assert type(jax.tree.map(lambda x: x + 1, first)) is type(first)

    def body(state: Any, token: Any) -> Any:
        out, state = hla.step(state, *token[:3], log_decay=token[3], normalize=True)
        return state, out

    tokens = (*(x.transpose(2, 0, 1, 3) for x in (q, k, v)), log_decay.transpose(2, 0, 1))
    final, outs = jax.jit(lambda s, t: jax.lax.scan(body, s, t))(first, tokens)
    close(outs.transpose(1, 2, 0, 3), want)
    all_close(final, last)


@optimised
@pytest.mark.parametrize("name", FEW)
def test_decoding_with_a_donated_state(name: str) -> None:
    """Compiled once, each step writes its state where the old one was."""
    fixed = {n: x for n, x in OPERATORS[name][1].items() if n != "order"}
    q, k, v, g, _ = put(draw())
    want, last = call(name, q, k, v, g, return_state=True)

    def step(state: Any, *token: Any) -> Any:
        return hla.step(state, *token[:3], log_decay=token[3], **fixed)

    compiled = Traced(step, donate_argnums=0)
    _, state = call(name, *(x[..., :CHUNK, :] for x in (q, k, v)), g[..., :CHUNK], return_state=True)
    token = (*(x[..., 0, :] for x in (q, k, v)), g[..., 0])
    memory = jax.jit(step, donate_argnums=0).lower(state, *token).compile().memory_analysis()
    assert memory.alias_size_in_bytes == sum(x.nbytes for x in state)
    for t in range(CHUNK, TOKENS):
        before = state
        token = (*(x[..., t, :] for x in (q, k, v)), g[..., t])
        out, state = compiled(state, *token)
        assert all(x.is_deleted() for x in before)
        close(out, want[..., t, :], f"token {t}")
    all_close(state, last)
    assert compiled.count == 1


def test_steps_have_gradients() -> None:
    """Through a scan of steps, as through the whole."""
    q, k, v, g, do = put(draw())
    first = as_jax(start("ahla"))

    def steps(first: Any, *xs: Any) -> Any:
        tokens = (*(x.transpose(2, 0, 1, 3) for x in xs[:3]), xs[3].transpose(2, 0, 1))
        body = lambda s, t: hla.step(s, *t[:3], log_decay=t[3])[::-1]  # noqa: E731
        return (jax.lax.scan(body, first, tokens)[1].transpose(1, 2, 0, 3) * do).sum()

    def whole(first: Any, *xs: Any) -> Any:
        return (call("ahla", *xs, initial_state=first) * do).sum()

    both = jax.jit(lambda *xs: [jax.grad(f, argnums=(0, 1, 2, 3, 4))(*xs) for f in (steps, whole)])
    all_close(*both(first, q, k, v, g))


# Precision


def attention(name: str, form: str, **options: Any) -> Callable[..., Any]:
    return lambda *xs: call(name, *xs[:3], xs[3], form=form, return_state=True, **options)


def total(run: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *xs: sum((x.astype("float32") ** 2).sum() for x in jax.tree.leaves(run(*xs)))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_products_are_in_full_precision(dtype: str) -> None:
    """Every product has operands of 32 bits and is asked for in full; nothing has 64, also not from options."""
    inputs = put(draw()[:4], dtype)
    highest = (jax.lax.Precision.HIGHEST,) * 2
    for i, name in enumerate(OPERATORS):
        form = FORMS[i % 4]
        run = attention(name, form, normalize=True, scale=0.3)
        grad = jax.grad(total(run), argnums=(0, 1, 2, 3))
        programs = [run, grad] if dtype == "float32" else [run]
        for program in programs:
            found = equations(program, *inputs)
            products = [e for e in found if e.primitive.name == "dot_general"]
            assert products, name
            for e in products:
                assert e.params["precision"] == highest, f"{name}, {form}"
                assert {x.aval.dtype.name for x in (*e.invars, *e.outvars)} == {"float32"}, f"{name}, {form}"
            assert "f64" not in str(jax.make_jaxpr(program)(*inputs)), f"{name}, {form}"
    assert "f64" not in str(jax.make_jaxpr(lambda *xs: call("hla2", *xs, decay=0.9))(*inputs[:3]))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_without_64_bits(dtype: str) -> None:
    """x64 off, as JAX comes: inputs in a few bits, sums in 32, by the budget of their rounded values."""
    rounded = [np.asarray(jnp.asarray(x, dtype).astype("float64")) for x in draw()[:3]]
    for name, form in FEW_IN_ONE_FORM if dtype == "float32" else FEW_IN_ONE_FORM[1:3]:
        op, own = OPERATORS[name]
        with jax.enable_x64(False):
            run = lambda *xs: call(name, *xs, form=form, decay=0.9, return_state=True)  # noqa: B023, E731
            both = jax.jit(lambda *xs: (run(*xs), jax.grad(total(run))(*xs)))  # noqa: B023
            (out, state), slope = both(*put(rounded, dtype))
        assert out.dtype == slope.dtype == dtype
        assert {x.dtype.name for x in state} == {"float32"}
        want = budget.expected(op, *rounded, log_decay=np.full(TOKENS, np.log(0.9)), **own)
        passes = budget.stages(op, own.get("order"), own.get("definition", "exact"))
        allowed = budget.tolerance("float32", TOKENS, D, passes)
        budget.assert_within(np.asarray(out.astype("float32")), want, allowed, dtype, f"{name}, {form}")


# Programs


@pytest.mark.parametrize("backend", ["jax", "numpy"])
@pytest.mark.parametrize(("name", "form"), [("hla2", "chunkwise"), ("hla3 printed", "recurrent")])
def test_programs_do_not_grow_with_the_length(name: str, form: str, backend: str) -> None:
    """Chunks and tokens are scanned, never unrolled; in values, gradients, and hla.vjp."""
    op, own = OPERATORS[name]

    def value(*xs: Any) -> Any:
        return call(name, *xs[:4], form=form, return_state=True, chunk_size=64, backend=backend)[0]

    def gradient(*xs: Any) -> Any:
        return jax.value_and_grad(lambda *ys: (value(*ys) * xs[4]).sum(), argnums=(0, 1, 2, 3))(*xs[:4])

    def by_hand(*xs: Any) -> Any:
        _, pull = hla.vjp(op, *xs[:3], log_decay=xs[3], form=form, chunk_size=64, backend=backend, **own)
        return pull(xs[4])[:3]

    for function in (value, gradient, by_hand):
        sizes = [len(equations(function, *put(draw(length, batch=())))) for length in (128, 4096)]
        assert sizes[0] == sizes[1] > 10, function.__name__


def needed(name: str, length: int, chunk: int) -> tuple[Any, Any]:
    """Temporary bytes of value_and_grad over one batch entry, and a bound: inputs, gradients, carries, a chunk."""
    op, own = OPERATORS[name]
    shapes = [jax.ShapeDtypeStruct((HEADS, length, n), "float32") for n in (D, D, DV)]
    loss = lambda *xs: getattr(hla, op)(*xs, chunk_size=chunk, decay=0.9, **own).sum()  # noqa: E731
    compiled = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2))).lower(*shapes).compile()
    state = hla.init_state(op, batch=(HEADS,), d=D, dv=DV, like=jnp.zeros(1, "float32"), **own)
    carries = -(-length // chunk) * sum(x.nbytes for x in state)
    tokens = sum(4 * HEADS * length * n for n in (D, D, DV, DV))
    pairs = 4 * HEADS * chunk * chunk
    return compiled.memory_analysis().temp_size_in_bytes, 3 * tokens + 2 * carries + 32 * pairs


@optimised
@pytest.mark.parametrize("name", ["linear_attention", "hla2", "hla3"])
def test_memory_of_gradients(name: str) -> None:
    """Kept are the states between chunks; all else is computed again. Nothing of T·C or T² is there."""
    (small, _), (large, most) = needed(name, 2048, 32), needed(name, 4096, 32)
    assert small < large < 2.1 * small
    assert large < most


def test_shapes_without_values() -> None:
    """eval_shape, and a program that serves any values of its shapes."""
    shape = jax.ShapeDtypeStruct((BATCH, HEADS, TOKENS, D), "bfloat16")
    value = jax.ShapeDtypeStruct((BATCH, HEADS, TOKENS, DV), "float16")
    out, state = jax.eval_shape(lambda q, k, v: call("hla2", q, k, v, return_state=True), shape, shape, value)
    assert (out.shape, out.dtype) == ((BATCH, HEADS, TOKENS, DV), "float16")
    assert (state.key_moment.shape, state.key_moment.dtype) == ((BATCH, HEADS, D, D), "float32")


# hla.vjp


@pytest.mark.parametrize(("name", "form"), FEW_IN_ONE_FORM)
def test_vjp_is_jaxs(name: str, form: str) -> None:
    """hla.vjp on tracers pulls back what jax.vjp does, through outputs and states, to every input."""
    op, own = OPERATORS[name]
    q, k, v, g, do = put(draw())
    first = as_jax(start(name))

    @jax.jit
    def both(q: Any, k: Any, v: Any, g: Any, s: Any, first: Any, do: Any) -> Any:
        options = {"chunk_size": CHUNK, "form": form, "return_state": True, **own}
        keywords = lambda g, s, first: {"log_decay": g, "scale": s, "initial_state": first}  # noqa: E731
        value, pull = hla.vjp(op, q, k, v, backend="jax", **options, **keywords(g, s, first))
        found = pull(do, value[1])
        run = lambda q, k, v, *xs: getattr(hla, op)(q, k, v, **options, **keywords(*xs))  # noqa: E731
        also, back = jax.vjp(run, q, k, v, g, s, first)
        gradients = [getattr(found, n) for n in (*NAMES, "scale", "initial_state")]
        return (value, gradients), (also, list(back((do, also[1]))))

    found, want = both(q, k, v, g, jnp.asarray(-0.7), first, do)
    all_close(found, want, name)


# Several threads


def test_threads_with_choices_of_their_own() -> None:
    """One compiled function, two threads, two backends: each gets its own program, and the right result."""
    q, k, v, _, _ = draw()
    want = call("hla2", q, k, v)
    seen: dict[str, set[str]] = {"jax": set(), "numpy": set()}

    @jax.jit
    def attend(*xs: Any) -> Any:
        seen[hla.get_backend()].add(hla.explain("hla2", *xs).backend)
        return hla.hla2(*xs, ridge=0.7)

    gate = threading.Barrier(2)
    failed: list[BaseException] = []

    def work(name: str) -> None:
        try:
            x = put((q, k, v))
            with hla.use_backend(name):
                gate.wait(60)
                for _ in range(5):
                    close(attend(*x), want, name)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in seen]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed
    assert seen == {name: {name} for name in seen}


# Several devices

ON_FOUR = """
import itertools, re
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import hla

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_disable_most_optimizations", True)
assert jax.device_count() == 4
B, H, T, D, DV = 4, 4, 11, 3, 5
rng = np.random.default_rng(0)
q, k, v = (rng.normal(size=(B, H, T, n)) for n in (D, D, DV))
g = -rng.exponential(0.2, size=(B, H, T))
SPREAD = re.compile("all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter")
programs = 0


def mesh_of(kind):
    return jax.make_mesh((4,), ("x",), axis_types=(kind,))


def same(found, want, label):
    assert len(jax.tree.leaves(found)) == len(jax.tree.leaves(want)), label
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(want)):
        assert x.shape == y.shape and np.allclose(x, y, rtol=1e-9, atol=1e-9), label


def on(mesh, spec, *xs):
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x in xs]
"""

SHARDED = (
    ON_FOUR
    + """
CASES = (
    ("hla2", "chunkwise", P(None, "x"), dict(normalize=True, eps=3.0)),
    ("hla3", "chunkwise", P(None, "x"), dict(definition="as_printed")),
    ("ahla", "scan", P(None, "x"), dict(token_mask=np.arange(T) % 3 != 1)),
    ("hla2", "recurrent", P("x"), dict(cu_seqlens=np.asarray([0, 3, 3, T]))),
)
for name, form, spec, own in CASES:
    options = dict(form=form, chunk_size=4, return_state=True, **own)
    value, pull = hla.vjp(name, q, k, v, log_decay=g, **options)
    slopes = pull(value)
    want = value, value, (slopes.q, slopes.k, slopes.v, slopes.log_decay), slopes[:3]
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh, label = mesh_of(kind), f"{name}, {form}, {own}, {kind}"

        def run(q, k, v, g):
            return getattr(hla, name)(q, k, v, log_decay=g, **options)

        @jax.jit
        def everything(q, k, v, g):
            out, pull = jax.vjp(run, q, k, v, g)
            also, by_hand = hla.vjp(name, q, k, v, log_decay=g, **options)
            return run(q, k, v, g), out, pull(out), by_hand(also)[:3]

        xs = on(mesh, spec, q, k, v, g)
        with jax.set_mesh(mesh):
            compiled = everything.lower(*xs).compile()
            found = compiled(*xs)
        assert not SPREAD.findall(compiled.as_text()), label
        for x in jax.tree.leaves(found):
            assert len(x.sharding.device_set) == 4 and not x.sharding.is_fully_replicated, label
        assert found[0][0].sharding.is_equivalent_to(xs[0].sharding, 4), label
        same(found, want, label)
        programs += 1
print(programs)
"""
)

MAPPED = (
    ON_FOUR
    + """
CASES = (
    ("hla2", "chunkwise", P(None, "x"), True, {}),
    ("hla3", "recurrent", P(None, "x"), True, dict(definition="as_printed")),
    ("ahla", "scan", P("x"), False, {}),
)
for name, form, spec, shared, own in CASES:
    key_spec = P() if shared else spec
    inputs = (q, *(x[:, :1] if shared else x for x in (k, v)))
    options = dict(form=form, chunk_size=4, decay=0.9, return_state=True, **own)
    value, pull = hla.vjp(name, *inputs, **options)
    want = value, pull(value)[:3]
    state_spec = type(value[1])(*(key_spec if field == "key_moment" else spec for field in value[1]._fields))
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh, label = mesh_of(kind), f"{name}, {form}, {kind}"
        xs = [*on(mesh, spec, q), *on(mesh, key_spec, *inputs[1:])]

        def run(q, k, v):
            return getattr(hla, name)(q, k, v, **options)

        specs = dict(in_specs=(spec, key_spec, key_spec), out_specs=(spec, state_spec))
        mapped = jax.shard_map(run, mesh=mesh, **specs)

        @jax.jit
        def both(*xs):
            out, pull = jax.vjp(mapped, *xs)
            return mapped(*xs), pull(out)

        same(both(*xs), want, label)
        programs += 1
there = jax.devices()[2]
out, state = hla.hla2(*(jax.device_put(x, there) for x in (q, k, v)), decay=0.9, chunk_size=4, return_state=True)
assert all(x.devices() == {there} for x in (out, *state))
moved = hla.step(state, *(jax.device_put(x[..., 0, :], there) for x in (q, k, v)), decay=0.9)
assert all(x.devices() == {there} for x in jax.tree.leaves(moved))
print(programs)
"""
)


@pytest.mark.parametrize(("script", "programs"), [(SHARDED, 8), (MAPPED, 6)], ids=["sharded", "shard_map"])
def test_on_four_devices(script: str, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads or batch spread over a mesh: no communication, results spread as the inputs, on both kinds of axes."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4", prepend=" ")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) == programs

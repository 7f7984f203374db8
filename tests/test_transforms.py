"""The core under the transformations of JAX: gradients, vectorisation, compilation. PyTorch's are in test_torch*.py.

The judge of gradients is `hla.vjp` on NumPy arrays, which shares nothing with JAX's differentiation. All
calls name the backend "numpy", which is the Array API core on any arrays; `plan` asserts that it is what runs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import budget
import hla

BATCH, HEADS, TOKENS, D, DV = 2, 3, 17, 5, 7
CHUNK = 5
FORMS = ("recurrent", "scan", "chunkwise", "parallel")
OPERATORS: dict[str, tuple[str, dict[str, Any]]] = {
    "linear_attention": ("linear_attention", {}),
    "hla2": ("hla2", {"ridge": 0.7}),
    "hla2 prefix": ("hla2", {"mask": "prefix"}),
    "hla2 printed": ("hla2", {"definition": "as_printed"}),
    "ahla": ("ahla", {}),
    "hla3": ("hla3", {}),
    "hla3 printed": ("hla3", {"definition": "as_printed"}),
    "order 4": ("higher_order", {"order": 4}),
}
FEW = ("hla2", "ahla", "hla3 printed", "order 4")
NAMES = ("q", "k", "v", "log_decay")


def only_with(request: pytest.FixtureRequest, name: str) -> Any:
    if request.config.getoption("--arrays") != name:
        pytest.skip(f"of --arrays={name}")
    return __import__(name)


@pytest.fixture
def jax(request: pytest.FixtureRequest) -> Any:
    """JAX, where it is the chosen library."""
    return only_with(request, "jax")


def draw(length: int = TOKENS, *, batch: tuple[int, ...] = (BATCH, HEADS)) -> tuple[Any, ...]:
    """q, k, v, log-decays and a cotangent of the output, in NumPy float64."""
    rng = np.random.default_rng(41)
    q, k, v = (0.7 * rng.normal(size=(*batch, length, n)) for n in (D, D, DV))
    return q, k, v, -rng.exponential(0.2, size=(*batch, length)), rng.normal(size=(*batch, length, DV))


def call(name: str, q: Any, k: Any, v: Any, log_decay: Any = None, **options: Any) -> Any:
    op, own = OPERATORS[name]
    options = {"backend": "numpy", "chunk_size": CHUNK, "log_decay": log_decay, **own, **options}
    plan = hla.explain(op, q, k, v, **options)
    assert plan.backend == "numpy"
    assert plan.form == options.get("form", "chunkwise")
    return getattr(hla, op)(q, k, v, **options)


def start(name: str, like: Any = None) -> Any:
    """A state that some tokens have made, in NumPy."""
    rng = np.random.default_rng(42)
    return call(name, *(rng.normal(size=(BATCH, HEADS, 4, n)) for n in (D, D, DV)), return_state=True)[1]


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


def same(found: Any, want: Any, label: str = "") -> None:
    """Gradients, and those of the initial state."""
    for name in NAMES:
        close(found[name], getattr(want, name), f"{label}: {name}")
    for field, x, y in zip(want.initial_state._fields, found["initial_state"], want.initial_state, strict=True):
        close(x, y, f"{label}: {field}")


# JAX


IN_TWO_FORMS = [(name, FORMS[(i + j) % 4]) for i, name in enumerate(OPERATORS) for j in (0, 1)]


@pytest.mark.parametrize(("name", "form"), IN_TWO_FORMS)
def test_jax_compiled_values_and_gradients(jax: Any, name: str, form: str) -> None:
    """jit and grad through outputs and states, with respect to everything; compiled and not."""
    *arrays, do = draw()
    state = start(name)
    (out, last), want = judge(name, arrays, do, initial_state=state)
    fixed = type(last)(*(jax.numpy.asarray(x) for x in last))

    def loss(inputs: Any) -> Any:
        more = {n: inputs[n] for n in ("log_decay", "initial_state")}
        found, final = call(name, inputs["q"], inputs["k"], inputs["v"], form=form, return_state=True, **more)
        total = (found * do).sum() + sum((x * y).sum() for x, y in zip(final, fixed, strict=True))
        return total, (found, final)

    inputs = dict(zip(NAMES, map(jax.numpy.asarray, arrays), strict=True))
    inputs["initial_state"] = type(state)(*(jax.numpy.asarray(x) for x in state))
    (_, (found, final)), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(inputs)
    close(found, out, form)
    for x, y in zip(final, last, strict=True):
        close(x, y, form)
    same(gradients, want, f"{name}, {form}")


def test_jax_gradients_without_compilation(jax: Any) -> None:
    name = "hla2"
    *arrays, do = draw(CHUNK)
    state = start(name)
    _, want = judge(name, arrays, do, initial_state=state)
    fixed = judge(name, arrays, do, initial_state=state)[0][1]

    def loss(inputs: Any) -> Any:
        more = {n: inputs[n] for n in ("log_decay", "initial_state")}
        found, final = call(name, inputs["q"], inputs["k"], inputs["v"], return_state=True, **more)
        return (found * do).sum() + sum((x * y).sum() for x, y in zip(final, fixed, strict=True))

    inputs = dict(zip(NAMES, map(jax.numpy.asarray, arrays), strict=True))
    inputs["initial_state"] = type(state)(*(jax.numpy.asarray(x) for x in state))
    same(jax.grad(loss)(inputs), want, name)


@pytest.mark.parametrize(("name", "form"), list(zip(FEW, ("recurrent", "scan", "chunkwise", "recurrent"), strict=True)))
def test_jax_jvp(jax: Any, name: str, form: str) -> None:
    """Forward mode is the transpose of the reverse mode: ⟨do, J x⟩ = ⟨Jᵀ do, x⟩."""
    *arrays, do = draw()
    _, pull = hla.vjp(OPERATORS[name][0], *arrays[:3], log_decay=arrays[3], chunk_size=CHUNK, **OPERATORS[name][1])
    want = pull(do)
    rng = np.random.default_rng(43)
    tangents = [rng.normal(size=x.shape) for x in arrays]
    run = jax.jit(lambda *xs: jax.jvp(lambda *ys: call(name, *ys, form=form), xs[:4], xs[4:]))
    _, tangent = run(*map(jax.numpy.asarray, (*arrays, *tangents)))
    total = sum((getattr(want, n) * x).sum() for n, x in zip(NAMES, tangents, strict=True))
    assert np.isclose(float((tangent * do).sum()), total, rtol=1e-9)


@pytest.mark.parametrize("name", ["hla2", "hla3 printed"])
def test_jax_vmap(jax: Any, name: str) -> None:
    """Over any axes, also where k has none: what batch axes would do; and per-example gradients."""
    arrays = draw()
    q, k, v, log_decay, do = map(jax.numpy.asarray, arrays)
    mapped = jax.jit(jax.vmap(jax.vmap(lambda *xs: call(name, *xs))))(q, k, v, log_decay)
    close(mapped, call(name, *arrays[:4]))
    without = jax.jit(jax.vmap(lambda a, c: call(name, a, k[0], c), in_axes=(0, 1), out_axes=1))
    close(without(q, v.swapaxes(0, 1)), call(name, arrays[0], arrays[1][:1], arrays[2]).swapaxes(0, 1))

    def loss(a: Any, b: Any, c: Any, g: Any, d: Any) -> Any:
        return (call(name, a, b, c, g) * d).sum()

    per_example = jax.jit(jax.vmap(jax.vmap(jax.grad(loss, argnums=(0, 1, 2, 3)))))(q, k, v, log_decay, do)
    op, own = OPERATORS[name]
    _, pull = hla.vjp(op, *arrays[:3], log_decay=arrays[3], chunk_size=CHUNK, **own)
    want = pull(arrays[4])
    for label, x in zip(NAMES, per_example, strict=True):
        close(x, getattr(want, label), label)


@pytest.mark.parametrize("name", ["ahla", "order 4"])
def test_jax_jacobians(jax: Any, name: str) -> None:
    """Forward and reverse agree, row by row with hla.vjp; nothing flows back from earlier outputs to later tokens."""
    q, k, v, log_decay, _ = draw(4, batch=())
    run = lambda a: call(name, a, *map(jax.numpy.asarray, (k, v, log_decay)), chunk_size=3)  # noqa: E731
    forward, reverse = (jax.jit(j(run))(jax.numpy.asarray(q)) for j in (jax.jacfwd, jax.jacrev))
    close(forward, reverse)
    _, pull = hla.vjp(OPERATORS[name][0], q, k, v, log_decay=log_decay, chunk_size=3, **OPERATORS[name][1])
    for t, c in np.ndindex(4, DV):
        unit = np.zeros((4, DV))
        unit[t, c] = 1.0
        close(forward[t, c], pull(unit).q)
        assert not np.asarray(forward[t, c, t + 1 :]).any()


@pytest.mark.parametrize(("name", "form"), [("hla2", "chunkwise"), ("ahla", "recurrent")])
def test_jax_second_derivatives(jax: Any, name: str, form: str) -> None:
    """Against differences: none is silently dropped."""
    from jax.test_util import check_grads

    arrays = tuple(map(jax.numpy.asarray, draw(4, batch=())[:4]))
    run = jax.jit(lambda *xs: call(name, *xs, form=form, chunk_size=2, normalize=True, eps=3.0))
    check_grads(run, arrays, order=2, modes=["rev"], rtol=1e-4, atol=1e-4)


def equations(jaxpr: Any) -> int:
    """Equations of a program, those of its inner programs included."""
    total = 0
    for equation in jaxpr.eqns:
        total += 1
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                total += equations(inner) if hasattr(inner, "eqns") else 0
    return total


@pytest.mark.parametrize("name", ["hla2", "hla3 printed"])
@pytest.mark.parametrize("form", ["recurrent", "chunkwise"])
def test_jax_programs_do_not_grow_with_the_length(jax: Any, name: str, form: str) -> None:
    """Chunks and tokens are scanned, never unrolled; in values, gradients, and hla.vjp."""
    op, own = OPERATORS[name]

    def value(*xs: Any) -> Any:
        return call(name, *xs[:4], form=form, return_state=True)[0]

    def gradient(*xs: Any) -> Any:
        return jax.grad(lambda *ys: (value(*ys) * xs[4]).sum(), argnums=(0, 1, 2, 3))(*xs[:4])

    def by_hand(*xs: Any) -> Any:
        _, pull = hla.vjp(op, *xs[:3], log_decay=xs[3], form=form, chunk_size=CHUNK, backend="numpy", **own)
        return pull(xs[4])[:3]

    for function in (value, gradient, by_hand):
        sizes = []
        for chunks in (4, 32):
            arrays = map(jax.numpy.asarray, draw(chunks * CHUNK, batch=()))
            sizes.append(equations(jax.make_jaxpr(function)(*arrays).jaxpr))
        assert sizes[0] == sizes[1] > 10, function.__name__


@pytest.mark.parametrize("name", ["hla2", "hla3 printed"])
def test_jax_traced_decay_and_options(jax: Any, name: str) -> None:
    """A constant decay, scale, masks and ids whose values are hidden; gradients with respect to decay."""
    op, own = OPERATORS[name]
    q, k, v, _, do = draw()
    mask = np.random.default_rng(44).random((BATCH, 1, TOKENS)) < 0.8
    ids = np.asarray([0] * 4 + [1] * 7 + [3] * 6)

    def run(decay: Any, scale: Any, mask: Any, ids: Any) -> Any:
        options = {"decay": decay, "scale": scale, "token_mask": mask, "segment_ids": ids, "normalize": True}
        return call(name, *map(jax.numpy.asarray, (q, k, v)), **options, eps=3.0)

    decay = np.asarray([0.6, 0.9, 1.0]) if name == "hla2" else np.asarray(0.9)
    arrays = [jax.numpy.asarray(x) for x in (decay, np.asarray(0.5), mask, ids)]
    options = {**own, "decay": decay, "token_mask": mask, "segment_ids": ids, "normalize": True, "eps": 3.0}
    out, pull = hla.vjp(op, q, k, v, scale=0.5, chunk_size=CHUNK, **options)
    both = jax.jit(lambda g, *xs: (run(g, *xs), jax.grad(lambda h: (run(h, *xs) * do).sum())(g)))
    found, slope = both(*arrays)
    close(found, out)
    close(slope, pull(do).decay)
    # Where the decay is a reset, its gradient is 0 and not NaN.
    gates = np.array(draw()[3])
    gates[..., [3, 9]] = -np.inf
    hidden = jax.jit(jax.grad(lambda g: (call(name, *map(jax.numpy.asarray, (q, k, v)), g) * do).sum()))
    found = np.asarray(hidden(jax.numpy.asarray(gates)))
    if own.get("definition") != "as_printed":
        _, pull = hla.vjp(op, q, k, v, log_decay=gates, chunk_size=CHUNK, **own)
        close(found, pull(do).log_decay)
        assert not found[..., [3, 9]].any()


def test_jax_states_are_pytrees(jax: Any) -> None:
    """A state is the carry of lax.scan over steps, and passes through jit, grad and tree functions."""
    q, k, v, log_decay, _ = map(jax.numpy.asarray, draw())
    want, last = call("hla3", q, k, v, log_decay, return_state=True, normalize=True)
    first = hla.init_state("hla3", batch=(BATCH, HEADS), d=D, dv=DV, like=q, normalize=True)
    leaves, structure = jax.tree_util.tree_flatten(first)
    assert len(leaves) == len(first)
    assert type(jax.tree_util.tree_unflatten(structure, leaves)) is type(first)

    def body(state: Any, token: Any) -> Any:
        out, state = hla.step(state, *token[:3], log_decay=token[3], normalize=True, backend="numpy")
        return state, out

    tokens = (*(x.transpose(2, 0, 1, 3) for x in (q, k, v)), log_decay.transpose(2, 0, 1))
    final, outs = jax.jit(lambda s, t: jax.lax.scan(body, s, t))(first, tokens)
    close(outs.transpose(1, 2, 0, 3), want)
    assert type(final) is type(last)
    for x, y in zip(final, last, strict=True):
        close(x, y)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_jax_makes_no_float64(jax: Any, dtype: str) -> None:
    """Unless an input is; also not from options in float64."""
    arrays = [jax.numpy.asarray(x).astype(dtype) for x in draw()[:3]]
    gates = jax.numpy.asarray(draw()[3]).astype(dtype)
    for name in OPERATORS:
        for form in FORMS:
            options = {"form": form, "normalize": True, "scale": 0.3, "return_state": True}
            text = str(jax.make_jaxpr(lambda *xs: call(name, *xs, **options))(*arrays, gates))  # noqa: B023
            assert "f32" in text
            assert "f64" not in text, f"{name}, {form}"
    small = str(jax.make_jaxpr(lambda *xs: call("hla2", *xs, decay=0.9))(*arrays))
    assert "f64" not in small


def test_jax_shapes_without_values(jax: Any) -> None:
    """eval_shape, and a program that serves any values of its shapes."""
    shape = jax.ShapeDtypeStruct((BATCH, HEADS, TOKENS, D), "bfloat16")
    value = jax.ShapeDtypeStruct((BATCH, HEADS, TOKENS, DV), "float16")
    out, state = jax.eval_shape(lambda q, k, v: call("hla2", q, k, v, return_state=True), shape, shape, value)
    assert (out.shape, out.dtype) == ((BATCH, HEADS, TOKENS, DV), "float16")
    assert (state.key_moment.shape, state.key_moment.dtype) == ((BATCH, HEADS, D, D), "float32")


def test_jax_vjp_under_jit(jax: Any) -> None:
    """hla.vjp works on tracers, and agrees with itself in NumPy."""
    *arrays, do = draw()
    for name in ("hla2", "hla3 printed"):
        op, own = OPERATORS[name]

        def run(q: Any, k: Any, v: Any, g: Any, d: Any, op: str = op, own: Any = own) -> Any:
            (_, state), pull = hla.vjp(op, q, k, v, log_decay=g, return_state=True, chunk_size=CHUNK, **own)
            return pull(d, state)

        found = jax.jit(run)(*map(jax.numpy.asarray, (*arrays, do)))
        _, want = judge(name, arrays, do)
        for label in NAMES:
            close(getattr(found, label), getattr(want, label), f"{name}: {label}")


# Both, and NumPy


@pytest.mark.parametrize("name", FEW)
def test_one_array_as_queries_and_keys(lib: Any, name: str) -> None:
    """The same object twice, or three times: the gradient is the sum of those of its places."""
    op, own = OPERATORS[name]
    q, _, v, _, do = draw()
    values = (q, q, v)
    x, z, d = (lib.asarray(a) for a in (q, v, do))
    options = {**own, "decay": 0.9, "chunk_size": CHUNK, "backend": "numpy"}
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

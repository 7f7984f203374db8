"""`hla.distributed.jax` on simulated devices: `jax.vmap` over slices with a named axis exchanges as devices do.

The judge is `hla.vjp` on NumPy arrays, of the whole sequence: values, states and all gradients. Every number of every
token may be off by 1e-12 of what it would be were all terms that are added up in it positive, which is the same call on
absolute values. Real devices: tests/test_distributed_jax_devices.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import hla
import libraries
from samples import BATCH, DV, HEADS, D

jax: Any = libraries.only("jax")

import jax.numpy as jnp  # noqa: E402

import hla.distributed.jax as distributed  # noqa: E402

AXIS = "seq"
CLOSE = 1e-12
NAMES = ("q", "k", "v", "log_decay", "initial_state")


@pytest.fixture(autouse=True)
def scarce_programs() -> Iterator[None]:
    yield
    jax.clear_caches()


def draw(length: int, seed: int = 1, *, positive: bool = False) -> tuple[Any, ...]:
    """q, k, v, log-decays with resets, a cotangent of the output, in NumPy."""
    rng = np.random.default_rng(seed)
    q, k, v = (0.7 * rng.normal(size=(BATCH, HEADS, length, n)) for n in (D, D, DV))
    log_decay = -rng.exponential(0.2, size=(BATCH, HEADS, length))
    log_decay[rng.random(log_decay.shape) < 0.05] = -np.inf
    do = rng.normal(size=(BATCH, HEADS, length, DV))
    return (*map(np.abs, (q, k, v)), log_decay, np.abs(do)) if positive else (q, k, v, log_decay, do)


def masked(length: int, devices: int, seed: int = 2) -> Any:
    """Slices of which each keeps another part of its tokens, one of them none."""
    rng = np.random.default_rng(seed)
    mask = rng.random((BATCH, HEADS, devices, length // devices)) < rng.uniform(0.2, 0.9, size=(devices, 1))
    mask[:, :, devices // 2] = False
    return mask.reshape(BATCH, HEADS, length)


def cut(x: Any, devices: int, axis: int) -> Any:
    """Slices of time along a new first axis."""
    x = jnp.asarray(x)
    axis %= x.ndim
    return jnp.moveaxis(x.reshape(*x.shape[:axis], devices, -1, *x.shape[axis + 1 :]), axis, 0)


def joined(x: Any, axis: int = -2) -> Any:
    x = np.asarray(x)
    axis = axis % (x.ndim - 1)
    x = np.moveaxis(x, 0, axis)
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


def over(devices: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function(slices, the same on all)` on simulated devices."""
    return jax.vmap(function, in_axes=(0, None), axis_name=AXIS, axis_size=devices)


BY_TOKEN = ("token_mask", "segment_ids")


def spread(operator: str, devices: int, arrays: dict[str, Any], do: Any, dstate: Any, **options: Any) -> Any:
    """(output, state), gradients of one call over devices, joined. The state and its cotangents are those of all."""
    split = {n: cut(x, devices, -1 if n == "log_decay" else -2) for n, x in arrays.items() if n != "initial_state"}
    split |= {n: cut(options.pop(n), devices, -1) for n in BY_TOKEN if n in options}
    whole = {n: jax.tree.map(jnp.asarray, x) for n, x in arrays.items() if n == "initial_state"}
    names = [n for n in NAMES if n in arrays]

    def run(split: Any, whole: Any) -> Any:
        given = {**split, **whole}
        q, k, v = (given.pop(n) for n in ("q", "k", "v"))
        found = getattr(distributed, operator)(q, k, v, axis_name=AXIS, **given, **options)
        return found if options.get("return_state") else (found, ())

    def loss(given: dict[str, Any]) -> Any:
        parts = {**split, **{n: x for n, x in given.items() if n != "initial_state"}}
        o, states = over(devices, run)(parts, {n: given[n] for n in whole})
        total = (o * cut(do, devices, -2)).sum()
        # every device returns the whole sequence's state: any may be used
        total += sum((x[i % devices] * y).sum() for i, (x, y) in enumerate(zip(states, dstate or (), strict=True)))
        return total, (o, states)

    given = {n: ({**split, **whole})[n] for n in names}
    (_, (o, states)), slopes = jax.jit(jax.value_and_grad(loss, has_aux=True))(given)
    for x in states:  # replicated
        assert all(np.array_equal(x[0], x[i]) for i in range(devices))
    slopes = {
        n: tuple(map(np.asarray, slopes[n]))
        if n == "initial_state"
        else joined(slopes[n], -1 if n == "log_decay" else -2)
        for n in names
    }
    return (joined(o), tuple(np.asarray(x[0]) for x in states)), slopes


def judge(operator: str, arrays: dict[str, Any], do: Any, dstate: Any, **options: Any) -> Any:
    q, k, v = (arrays[n] for n in ("q", "k", "v"))
    more = {n: x for n, x in arrays.items() if n not in ("q", "k", "v")}
    value, pull = hla.vjp(operator, q, k, v, **more, **options)
    states = options.get("return_state")
    found = pull(do, type(value[1])(*dstate)) if states else pull(do)
    out, last = value if states else (value, ())
    return (out, tuple(last)), {n: getattr(found, n) for n in NAMES if n in arrays}


def within(found: Any, want: Any, scale: Any, label: str) -> None:
    found, want, scale = np.asarray(found), np.asarray(want), np.abs(np.asarray(scale))
    assert found.shape == want.shape, label
    apart = np.abs(found - want)
    assert (apart <= CLOSE * np.maximum(np.abs(want), scale)).all(), (
        f"{label}: {np.nanmax(apart / (scale + 1e-300)):.3g}"
    )


def alike(found: Any, want: Any, scale: Any, label: str) -> None:
    """Output, states, gradients."""
    within(found[0][0], want[0][0], scale[0][0], f"{label}: o")
    for i, parts in enumerate(zip(found[0][1], want[0][1], scale[0][1], strict=True)):
        within(*parts, f"{label}: state {i}")
    for name, slope in want[1].items():
        if name != "initial_state":
            within(found[1][name], slope, scale[1][name], f"{label}: d {name}")
            continue
        for i, parts in enumerate(zip(found[1][name], slope, scale[1][name], strict=True)):
            within(*parts, f"{label}: d initial {i}")


def start(operator: str, count: int | None = None, **options: Any) -> Any:
    """A state that some tokens have made, or one for each of `count` sequences; positive."""
    q, k, v, log_decay, _ = draw(4, 3, positive=True)
    kept = {n: x for n, x in options.items() if n in ("mask", "definition", "order", "normalize", "ridge")}
    state = getattr(hla, operator)(q, k, v, log_decay=log_decay, return_state=True, **kept)[1]
    return state if count is None else type(state)(*(np.stack([(n + 1) * x for n in range(count)]) for x in state))


def compared(
    operator: str, devices: int, tokens: int, exchange: str = "gather", method: str = "auto", **options: Any
) -> None:
    """A call over devices, and its gradients, against the whole."""
    length = devices * tokens
    options = {
        "return_state": "segment_ids" not in options and options.get("mask") != "none",
        "chunk_size": 4,
        **options,
    }
    count = len(options["cu_seqlens"]) - 1 if "cu_seqlens" in options else None
    results = []
    for positive in (False, True):
        *inputs, do = draw(length, positive=positive)
        arrays = dict(zip(("q", "k", "v", "log_decay"), inputs, strict=True))
        if options.get("mask") == "none":
            del arrays["log_decay"]
        dstate = ()
        if options["return_state"]:
            state = start(operator, count, **options)
            arrays["initial_state"] = state
            rng = np.random.default_rng(5)
            dstate = tuple(rng.normal(size=x.shape) for x in state)
            dstate = tuple(map(np.abs, dstate)) if positive else dstate
        results.append((arrays, do, dstate))
    sizes = bounds(operator, *results[1], **options)
    found = spread(operator, devices, *results[0], exchange=exchange, method=method, **options)
    alike(found, judge(operator, *results[0], **options), sizes, f"{operator} on {devices}, {exchange}, {method}")


def bounds(operator: str, arrays: Any, do: Any, dstate: Any, **options: Any) -> Any:
    """The sizes of the terms: of what is printed, those added and those taken away."""
    found = judge(operator, arrays, do, dstate, **options)
    if options.get("definition") != "as_printed":
        return found
    plain = {n: x for n, x in arrays.items() if n != "initial_state"}
    options = {**options, "definition": "exact", "mask": "prefix", "return_state": False}
    (added, _), slopes = judge(operator, plain, do, (), **options)
    # with a state to start from there is more, which this much covers on the inputs here
    output = np.maximum(4 * np.abs(added), np.abs(found[0][0]))
    return (output, found[0][1]), {
        n: np.maximum(4 * np.abs(slopes[n]).max(), np.abs(x))
        if n in slopes
        else tuple(np.abs(y).max() + 0 * y for y in x)
        for n, x in found[1].items()
    }


MASK = masked(12, 4)
CASES: list[tuple[str, int, int, str, str, dict[str, Any]]] = [
    ("linear_attention", 5, 3, "doubling", "auto", {"token_mask": masked(15, 5)}),
    ("hla2", 4, 3, "gather", "segments", {"token_mask": MASK}),
    ("hla2", 1, 5, "gather", "auto", {}),
    ("hla2", 5, 3, "doubling", "segments", {"ridge": 0.7}),
    ("hla2", 3, 5, "gather", "stages", {"token_mask": masked(15, 3), "ridge": 0.7}),
    ("hla2", 3, 4, "doubling", "stages", {"mask": "prefix"}),
    ("hla2", 3, 4, "gather", "auto", {"definition": "as_printed"}),
    ("ahla", 3, 5, "gather", "auto", {}),
    ("ahla", 4, 3, "doubling", "auto", {"token_mask": MASK}),
    ("hla3", 4, 3, "gather", "auto", {"token_mask": MASK}),
    ("hla3", 3, 4, "doubling", "auto", {}),
    ("hla3", 3, 4, "gather", "auto", {"definition": "as_printed", "token_mask": masked(12, 3)}),
    ("higher_order", 2, 4, "doubling", "auto", {"order": 5}),
    ("hla2", 3, 5, "gather", "auto", {"mask": "none", "ridge": 0.7, "token_mask": masked(15, 3)}),
    ("higher_order", 2, 5, "gather", "auto", {"mask": "none", "order": 4}),
]


@pytest.mark.parametrize(("operator", "devices", "tokens", "exchange", "method", "options"), CASES)
def test_values_and_gradients(
    operator: str, devices: int, tokens: int, exchange: str, method: str, options: dict[str, Any]
) -> None:
    compared(operator, devices, tokens, exchange, method, **options)


# Packed sequences: borders of slices at 5, 10, 15

OFFSETS = np.asarray([0, 0, 3, 10, 11, 17, 17, 20])
"""Empty sequences, one that starts at a border, one that ends there, one across; device 0 has two."""


def ids() -> Any:
    """Other boundaries in every row: none at all, at borders only, anywhere."""
    rng = np.random.default_rng(6)
    steps = rng.random((BATCH, HEADS, 20)) < 0.2
    steps[0, 0] = False
    steps[0, 1] = np.arange(20) % 5 == 0
    return np.cumsum(steps, axis=-1)


@pytest.mark.parametrize(
    ("operator", "exchange", "options"),
    [
        ("hla2", "gather", {"cu_seqlens": OFFSETS, "return_state": False}),
        ("ahla", "doubling", {"cu_seqlens": OFFSETS, "token_mask": masked(20, 4)}),
        ("hla2", "gather", {"segment_ids": ids(), "definition": "as_printed"}),
        ("ahla", "doubling", {"segment_ids": ids(), "token_mask": masked(20, 4)}),
    ],
)
def test_packed_sequences_across_borders(operator: str, exchange: str, options: dict[str, Any]) -> None:
    compared(operator, 4, 5, exchange, **options)


def test_traced_offsets() -> None:
    """One program for all offsets; an empty sequence keeps its state."""
    q, k, v, _, _ = draw(20)
    state = start("hla2", len(OFFSETS) - 1)
    parts = tuple(cut(x, 4, -2) for x in (q, k, v))

    @jax.jit
    def run(offsets: Any, state: Any) -> Any:
        def own(slices: Any, state: Any) -> Any:
            more = {"cu_seqlens": offsets, "initial_state": state, "decay": 0.9, "return_state": True}
            return distributed.hla2(*slices, axis_name=AXIS, **more)

        return over(4, own)(parts, state)

    for offsets in (OFFSETS, np.asarray([0, 1, 1, 4, 5, 16, 20, 20])):
        o, last = run(jnp.asarray(offsets), jax.tree.map(jnp.asarray, state))
        want = hla.hla2(q, k, v, decay=0.9, cu_seqlens=offsets, initial_state=state, return_state=True)
        np.testing.assert_allclose(joined(o), want[0], rtol=1e-10, atol=1e-10)
        for x, y in zip(last, want[1], strict=True):
            np.testing.assert_allclose(x[0], y, rtol=1e-10, atol=1e-10)
    assert run._cache_size() == 1


@pytest.mark.parametrize(("operator", "exchange"), [("ahla", "doubling"), ("hla3", "gather")])
def test_what_is_not_finite_stays_in_its_sequence(operator: str, exchange: str) -> None:
    """A NaN in the second slice, whose sequence ends in the third."""
    q, k, v, log_decay, _ = draw(20)
    segment_ids = np.repeat([0, 1, 2], [6, 6, 8])
    for x in (q, k, v):
        x[0, 1, 7] = np.nan
    log_decay[0, 1, 8] = np.nan

    def own(slices: Any, _: Any) -> Any:
        q, k, v, log_decay, segment_ids = slices
        more = {"log_decay": log_decay, "segment_ids": segment_ids}
        return getattr(distributed, operator)(q, k, v, axis_name=AXIS, exchange=exchange, **more)

    parts = (*(cut(x, 4, -2) for x in (q, k, v)), cut(log_decay, 4, -1), cut(segment_ids, 4, -1))
    o = joined(jax.jit(over(4, own))(parts, ()))
    clean = np.isfinite(o)
    assert clean[np.asarray([[True, False, True], [True] * 3])].all()
    assert clean[0, 1, :5].all()  # the sixth is in the chunk
    assert clean[0, 1, 12:].all()
    assert not clean[0, 1, 9:12].any()


# What varies but not over time


@pytest.mark.parametrize(
    ("operator", "form", "options"),
    [
        ("hla2", "recurrent", {"decay": 0.9, "normalize": True, "eps": 3.0, "ridge": 0.7}),
        ("hla3", "scan", {"decay": np.linspace(0.5, 1.0, HEADS)}),
        ("ahla", "parallel", {"scale": 0.6, "normalize": True, "eps": 3.0, "mask": "prefix"}),
        ("higher_order", "auto", {"order": 4, "decay": 0.9}),
    ],
)
def test_forms_heads_and_axes(operator: str, form: str, options: dict[str, Any]) -> None:
    """Keys and values for all heads, time before the heads; values and states."""
    q, k, v, _, _ = draw(15)
    k, v = k[:, :1], v[:, :1]
    options = {"form": form, "axis": -3, "return_state": True, "chunk_size": 2, **options}
    q, k, v = (np.swapaxes(x, 1, 2) for x in (q, k, v))
    want = getattr(hla, operator)(q, k, v, **options)

    def own(slices: Any, _: Any) -> Any:
        return getattr(distributed, operator)(*slices, axis_name=AXIS, **options)

    o, last = jax.jit(over(3, own))(tuple(cut(x, 3, -3) for x in (q, k, v)), ())
    assert type(last) is type(want[1])
    np.testing.assert_allclose(joined(o, -3), want[0], rtol=1e-11, atol=1e-11)
    for x, y in zip(last, want[1], strict=True):
        assert x.shape[1:] == y.shape
        np.testing.assert_allclose(x[2], y, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision(dtype: str) -> None:
    """Summaries in float32: output rounded once, states as those of one device to float32's accuracy."""
    q, k, v, log_decay, _ = (jnp.asarray(0.3 * x, dtype) for x in draw(12))
    o, state = hla.hla2(q, k, v, log_decay=log_decay, return_state=True)

    def own(slices: Any, _: Any) -> Any:
        return distributed.hla2(*slices[:3], axis_name=AXIS, log_decay=slices[3], return_state=True)

    parts = (*(cut(x, 3, -2) for x in (q, k, v)), cut(log_decay, 3, -1))
    found, last = jax.jit(over(3, own))(parts, ())
    assert found.dtype == dtype
    one_ulp = 2.0 ** {"float16": -10, "bfloat16": -7}[dtype]
    np.testing.assert_allclose(joined(found.astype(jnp.float32)), o.astype(jnp.float32), rtol=one_ulp, atol=1e-6)
    for x, y in zip(last, state, strict=True):
        assert x.dtype == jnp.float32
        np.testing.assert_allclose(x[0], y, rtol=1e-5, atol=1e-6)


def test_forward_mode_and_products_with_the_hessian() -> None:
    """The tangent of the output, and that of the gradient, are those of one device."""
    *inputs, _ = draw(12)
    inputs[3] = np.maximum(inputs[3], -2.0)
    rng = np.random.default_rng(7)
    along = [rng.normal(size=x.shape) for x in inputs]

    def parts(xs: Any) -> Any:
        return (*(cut(x, 3, -2) for x in xs[:3]), cut(xs[3], 3, -1))

    def loss(attend: Any) -> Any:
        return lambda *xs: (attend(*xs) ** 2).sum()

    def own(slices: Any, _: Any) -> Any:
        return distributed.hla2(*slices[:3], axis_name=AXIS, log_decay=slices[3], exchange="doubling")

    def spread(*slices: Any) -> Any:
        return over(3, own)(slices, ())

    def whole(*xs: Any) -> Any:
        return hla.hla2(*xs[:3], log_decay=xs[3])

    def both(attend: Any, xs: Any, tangents: Any) -> Any:
        values = jax.jvp(attend, xs, tangents)
        return values, jax.jvp(jax.grad(loss(attend), argnums=(0, 3)), xs, tangents)

    found = jax.jit(lambda xs, ts: both(spread, xs, ts))(parts(inputs), parts(along))
    want = jax.jit(lambda xs, ts: both(whole, xs, ts))(tuple(map(jnp.asarray, inputs)), tuple(map(jnp.asarray, along)))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        x = joined(x, -2 if x.ndim == 5 else -1)
        np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-12 * np.abs(y).max())


def test_without_tokens() -> None:
    """The state is the initial one."""
    state = start("hla2")
    empty = [jnp.zeros((2, BATCH, HEADS, 0, n)) for n in (D, D, DV)]

    def own(slices: Any, state: Any) -> Any:
        return distributed.hla2(*slices, axis_name=AXIS, initial_state=state, return_state=True)

    o, last = jax.jit(over(2, own))(empty, jax.tree.map(jnp.asarray, state))
    assert o.shape == (2, BATCH, HEADS, 0, DV)
    for x, y in zip(last, state, strict=True):
        assert np.array_equal(x[1], y)


# Errors


def refused(kind: type[Exception], words: str, function: Callable[..., Any], *xs: Any, **options: Any) -> None:
    with pytest.raises(kind, match=words):
        function(*xs, **options)


def test_errors() -> None:
    q, k, v = (jnp.ones((4, n)) for n in (D, D, DV))
    mesh = jax.make_mesh((1,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    place = jax.sharding.PartitionSpec

    def mapped(**options: Any) -> Any:
        run = jax.vmap(lambda *xs: distributed.hla2(*xs, axis_name=AXIS, **options), axis_name=AXIS)
        return run(*(x[None] for x in (q, k, v)))

    def elsewhere(name: Any) -> Any:
        return jax.vmap(lambda *xs: distributed.hla2(*xs, axis_name=name), axis_name=AXIS)(
            *(x[None] for x in (q, k, v))
        )

    attend = distributed.hla2
    refused(hla.OptionError, r"axis_name: expected a named axis .* mesh=", attend, q, k, v, axis_name=AXIS)
    refused(hla.OptionError, "axis_name: .*'time', which is none here", elsewhere, "time")
    refused(hla.OptionError, "axis_name: .*'time'.*, which is none here", elsewhere, (AXIS, "time"))
    refused(hla.OptionError, "axis_name: .*None, which is none here", elsewhere, None)
    refused(hla.OptionError, "axis_name: expected an axis of the mesh", attend, q, k, v, axis_name="time", mesh=mesh)
    refused(hla.OptionError, "mesh: expected a jax.sharding.Mesh", attend, q, k, v, axis_name=AXIS, mesh=place())
    refused(hla.DTypeError, "q: expected a JAX array", attend, np.ones((4, D)), k, v, axis_name=AXIS, mesh=mesh)
    refused(hla.OptionError, "exchange: expected one of gather, doubling", mapped, exchange="ring")
    refused(hla.OptionError, "method: expected one of auto, segments, stages", mapped, method="fused")
    refused(hla.OptionError, 'method: expected "stages"', mapped, method="segments", definition="as_printed")
    refused(hla.OptionError, "mask: .*packed", mapped, mask="none", segment_ids=jnp.zeros(4, int))
    refused(hla.OptionError, "cu_seqlens: expected offsets from 0 to T = 4", mapped, cu_seqlens=np.asarray([0, 3]))
    refused(hla.OptionError, "segment_ids: ", mapped, segment_ids=jnp.zeros(4, int), return_state=True)
    both = {"segment_ids": jnp.zeros(4, int), "cu_seqlens": np.asarray([0, 4])}
    refused(hla.OptionError, "segment_ids or cu_seqlens, got both", mapped, **both)
    refused(TypeError, "unexpected keyword argument 'decai'", mapped, decai=0.5)
    for options in ({}, {"mesh": mesh}):
        run = attend if options else mapped
        xs = (q, k, v) if options else ()
        named = {"axis_name": AXIS, **options} if options else {}
        refused(hla.OptionError, "decay: expected a number in", run, *xs, decay=2.0, **named)
        refused(hla.DTypeError, "initial_state: expected a state", run, *xs, initial_state=(q,), **named)
    ids = np.asarray([0, 2, 1, 1])
    refused(
        hla.OptionError, "segment_ids: .*non-decreasing", attend, q, k, v, axis_name=AXIS, mesh=mesh, segment_ids=ids
    )

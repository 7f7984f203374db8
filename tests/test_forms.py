"""Form, chunk size and backend change how, never what: all forms agree, and any split equals the whole."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import budget
import hla
from hla import rules
from hla.checks import check_call
from hla.options import Options

BATCH, HEADS, TOKENS, D, DV = 2, 3, 17, 5, 7
CHUNK = 5
SIZES = (1, CHUNK - 1, CHUNK, CHUNK + 1, TOKENS, 2 * TOKENS)
FORMS = ("recurrent", "scan", "chunkwise", "parallel")
# operator, its own options, the fields of its state by letter
OPERATORS: dict[str, tuple[str, dict[str, Any], str]] = {
    "linear_attention": ("linear_attention", {}, "P"),
    "hla2": ("hla2", {}, "S F"),
    "hla2 ridge": ("hla2", {"ridge": 0.7}, "S F C"),
    "hla2 prefix": ("hla2", {"mask": "prefix"}, "S C"),
    "hla2 prefix ridge": ("hla2", {"mask": "prefix", "ridge": -0.7}, "S C"),
    "hla2 printed": ("hla2", {"definition": "as_printed"}, "S C G"),
    "ahla": ("ahla", {}, "P E"),
    "ahla prefix": ("ahla", {"mask": "prefix"}, "R P"),
    "hla3": ("hla3", {}, "S P F"),
    "hla3 prefix": ("hla3", {"mask": "prefix"}, "S Q P"),
    "hla3 printed": ("hla3", {"definition": "as_printed"}, "S Q P"),
    "order 4": ("higher_order", {"order": 4}, "S F F2"),
    "order 5": ("higher_order", {"order": 5}, "S P F F2"),
}
WORDS = {
    "S": "key_moment", "P": "key_value_moment", "C": "query_value_moment", "Q": "query_moment",
    "R": "key_query_moment", "F": "corrected_state", "E": "cascade_state", "G": "correction", "F2": "corrected_state_2",
}  # fmt: skip
MASSES = {
    "P": "key_mass", "C": "query_mass", "F": "corrected_mass", "E": "cascade_mass", "G": "correction_mass",
    "F2": "corrected_mass_2",
}  # fmt: skip
DECAYS = ("none", "number", "per token", "resets", "strong")
named = pytest.mark.parametrize("name", OPERATORS)


def sizes(lib: Any) -> tuple[int, ...]:
    """Chunk sizes."""
    return (CHUNK, 2 * TOKENS) if lib.name == "jax" else SIZES


def draw(length: int = TOKENS, seed: int = 1) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(seed)
    shape = (BATCH, HEADS, length)
    return rng.normal(size=(*shape, D)), rng.normal(size=(*shape, D)), rng.normal(size=(*shape, DV))


def draw_options(kind: str, masked: bool, length: int = TOKENS) -> dict[str, Any]:
    """Decay and token mask in NumPy."""
    rng = np.random.default_rng(2)
    found: dict[str, Any] = {}
    if kind == "number":
        found["decay"] = 0.9
    elif kind != "none":
        found["log_decay"] = -rng.exponential(0.2, size=(BATCH, HEADS, length))
        if kind == "strong":  # from none to less than the smallest number, so that no quotient of products would do
            found["log_decay"] = -rng.choice([0.0, 1e-3, 5.0, 50.0, 800.0], size=(BATCH, HEADS, length))
        if kind == "resets":
            found["log_decay"][rng.random((BATCH, HEADS, length)) < 0.2] = -np.inf
    if masked:
        found["token_mask"] = rng.random((BATCH, 1, length)) < 0.8
    return found


def placed(lib: Any, options: dict[str, Any]) -> dict[str, Any]:
    return {n: lib.asarray(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}


def call(lib: Any, name: str, arrays: Any, **options: Any) -> Any:
    op, own, _ = OPERATORS[name]
    return getattr(hla, op)(*(lib.asarray(x) for x in arrays), **own, **placed(lib, options))


def allowed(name: str, length: int = TOKENS, normalize: bool = False) -> float:
    op, own, _ = OPERATORS[name]
    passes = budget.stages(op, own.get("order"), own.get("definition", "exact"))
    return budget.tolerance("float64", length, D, passes + 2 * normalize)


def judge(name: str, arrays: Any, options: dict[str, Any]) -> budget.Expected:
    op, own, _ = OPERATORS[name]
    options = dict(options)
    decay = options.pop("decay", None)
    if decay is not None:
        options["log_decay"] = np.full((1, arrays[0].shape[-2]), math.log(decay))
    return budget.expected(op, *arrays, **own, **options)


def serial(name: str, arrays: Any, options: dict[str, Any], start: Any = None) -> dict[str, Any]:
    """The state after the last token by its defining recurrence, one head and one token at a time, from zeros."""
    _, own, letters = OPERATORS[name]
    q, k, v = arrays
    log_decay = options.get("log_decay", np.full((1, 1, 1), math.log(options.get("decay", 1.0))))
    log_decay = np.broadcast_to(log_decay, q.shape[:-1])
    mask = np.broadcast_to(options.get("token_mask", True), q.shape[:-1])
    prefix = own.get("mask") == "prefix"
    square = {"S": (D, D), "Q": (D, D), "R": (D, D)}
    found = {x: np.zeros((*q.shape[:-2], *square.get(x, (D, v.shape[-1])))) for x in ("S", "Q", "R", *WORDS)}
    if start is not None:
        found |= {x: np.array(np.broadcast_to(value, found[x].shape)) for x, value in start.items()}
    for at in np.ndindex(q.shape[:-2]):
        x = {letter: value[at] for letter, value in found.items()}
        for t in np.flatnonzero(mask[at]):
            a, b, c, g = q[at][t], k[at][t], v[at][t], np.exp(log_decay[at][t])
            old = dict(x)
            x["S"] = g * x["S"] + np.outer(b, b)
            x["Q"] = g * x["Q"] + np.outer(a, a)
            x["R"] = g * x["R"] + np.outer(b, a)
            x["P"] = g * x["P"] + np.outer(b, c)
            x["C"] = g * x["C"] + np.outer(a, c)
            x["E"] = g * x["E"] + np.outer(b, a @ x["P"])
            x["G"] = g * x["G"] + np.outer(b, b @ old["C"])
            third = "P" in letters and not prefix and name != "ahla"
            x["F"] = (
                g**3 * x["F"] + np.outer(x["S"] @ a, a @ x["P"]) if third else g**2 * x["F"] + np.outer(x["S"] @ a, c)
            )
            x["F2"] = g**2 * x["F2"] + np.outer(x["S"] @ a, a @ x["F"])
        for letter in found:
            found[letter][at] = x[letter]
    return {letter: found[letter] for letter in letters.split()}


def assert_state(lib: Any, state: Any, want: dict[str, Any], label: str) -> None:
    for letter, value in want.items():
        size = np.abs(value).max(axis=(-2, -1), keepdims=True)
        apart = np.abs(lib.numpy(getattr(state, WORDS[letter])) - value)
        assert (apart <= 1e-12 * np.maximum(size, 1.0)).all(), f"{label}: {WORDS[letter]}"


def same_states(lib: Any, one: Any, other: Any, label: str) -> None:
    assert type(one) is type(other)
    for field, x, y in zip(one._fields, one, other, strict=True):
        x, y = lib.numpy(x), lib.numpy(y)
        assert x.shape == y.shape, f"{label}: {field}"
        assert np.allclose(x, y, rtol=1e-11, atol=1e-11 * max(1.0, np.abs(x).max(initial=0.0))), f"{label}: {field}"


@named
@pytest.mark.parametrize("kind", DECAYS)
def test_all_forms_and_chunk_sizes_agree(lib: Any, name: str, kind: str) -> None:
    """With each other through the definition; states with the serial recurrence."""
    number = list(OPERATORS).index(name) + DECAYS.index(kind)
    masked, normalize = number % 2 == 1, number % 3 == 1
    arrays, options = draw(), draw_options(kind, masked)
    scale = (1.0, 0.3, -1.7)[number % 3]
    want = judge(name, arrays, {**options, "normalize": normalize, "scale": scale})
    state = serial(name, (scale * arrays[0], *arrays[1:]), options)
    for form in FORMS:
        for size in sizes(lib) if form in ("scan", "chunkwise") else (None,):
            more = {"form": form, "chunk_size": size, "normalize": normalize, "scale": scale, "return_state": True}
            out, last = call(lib, name, arrays, **options, **more)
            label = f"{name}, {kind}, {form}, {size}"
            budget.assert_within(lib.numpy(out), want, allowed(name, normalize=normalize), "float64", label)
            assert_state(lib, last, state, label)


@pytest.mark.parametrize("op", ["linear_attention", "hla2", "ahla", "hla3", "higher_order"])
def test_bidirectional_chunk_sizes_agree(lib: Any, op: str) -> None:
    arrays = draw()
    mask = np.random.default_rng(3).random((BATCH, 1, TOKENS)) < 0.8
    own: dict[str, Any] = {"mask": "none", "scale": 0.3, "normalize": True}
    if op == "higher_order":
        own["order"] = 5
    want = budget.expected(op, *arrays, token_mask=mask, **own)
    most = budget.tolerance("float64", TOKENS, D, 7)
    for form, size in [("parallel", None), *(("chunkwise", n) for n in sizes(lib))]:
        options = {**own, "token_mask": lib.asarray(mask), "form": form, "chunk_size": size}
        out = getattr(hla, op)(*(lib.asarray(x) for x in arrays), **options)
        budget.assert_within(lib.numpy(out), want, most, "float64", f"{op}, {form}, {size}")


@named
@pytest.mark.parametrize("length", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK])
def test_every_length_in_every_form(lib: Any, name: str, length: int) -> None:
    """With a state, which without tokens comes back as it was given."""
    number = list(OPERATORS).index(name)
    options = draw_options(DECAYS[number % 5], number % 2 == 1, length)
    arrays = draw(length)
    before = draw(CHUNK, seed=4)
    _, start = call(lib, name, before, form="recurrent", return_state=True)
    for form in FORMS:
        out, last = call(lib, name, arrays, **options, form=form, chunk_size=CHUNK, return_state=True)
        budget.assert_within(
            lib.numpy(out), judge(name, arrays, options), allowed(name, length), "float64", f"{form}, T = {length}"
        )
        assert_state(lib, last, serial(name, arrays, options), f"{form}, T = {length}")
        more = {"form": form, "chunk_size": CHUNK, "initial_state": start, "return_state": True}
        out, last = call(lib, name, arrays, **options, **more)
        assert tuple(out.shape) == (BATCH, HEADS, length, DV)
        if length == 0:
            for x, y in zip(start, last, strict=True):
                assert np.array_equal(lib.numpy(x), lib.numpy(y))
        if form == FORMS[0]:
            first, first_state = out, last
        scale = judge(name, [np.concatenate(x, axis=-2) for x in zip(before, arrays, strict=True)], {}).scale
        want = budget.Expected(lib.numpy(first), scale[..., CHUNK:])
        budget.assert_within(lib.numpy(out), want, 2 * allowed(name, length + CHUNK), "float64", form)
        same_states(lib, first_state, last, form)


@pytest.mark.parametrize("op", ["linear_attention", "hla2", "ahla", "hla3"])
@pytest.mark.parametrize("length", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1])
def test_bidirectional_lengths(lib: Any, op: str, length: int) -> None:
    arrays = draw(length)
    for form in ("chunkwise", "parallel"):
        out = getattr(hla, op)(*(lib.asarray(x) for x in arrays), mask="none", form=form, chunk_size=CHUNK)
        want = budget.expected(op, *arrays, mask="none")
        budget.assert_within(lib.numpy(out), want, budget.tolerance("float64", length, D, 3), "float64", form)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(data=st.data())
@named
def test_any_split_equals_the_whole(lib: Any, name: str, data: st.DataObject) -> None:
    """Cut anywhere, into any pieces, each in any form: outputs and last state are those of the whole."""
    places = st.sampled_from([0, CHUNK, TOKENS]) if lib.name == "jax" else st.integers(0, TOKENS)
    cuts = [0, *sorted(data.draw(st.lists(places, max_size=4), label="cuts")), TOKENS]
    kind = data.draw(st.sampled_from(DECAYS), label="decay")
    masked = data.draw(st.booleans(), label="token_mask")
    normalize = data.draw(st.booleans(), label="normalize")
    forms = [data.draw(st.sampled_from((*FORMS, "auto")), label="form") for _ in cuts[1:]]
    arrays, options = draw(), draw_options(kind, masked)
    whole = judge(name, arrays, {**options, "normalize": normalize})
    outs: list[Any] = []
    state = None
    for form, (start, stop) in zip(forms, itertools.pairwise(cuts), strict=True):
        piece = {n: x[..., start:stop] if isinstance(x, np.ndarray) else x for n, x in options.items()}
        more = {"form": form, "chunk_size": CHUNK, "normalize": normalize, "initial_state": state, "return_state": True}
        out, state = call(lib, name, [x[..., start:stop, :] for x in arrays], **piece, **more)
        outs.append(lib.numpy(out))
    budget.assert_within(np.concatenate(outs, axis=-2), whole, 2 * allowed(name, normalize=normalize), "float64")
    assert_state(lib, state, serial(name, arrays, options), "last")


@named
@pytest.mark.parametrize("kind", DECAYS)
def test_the_recurrent_form_is_step_after_step(lib: Any, name: str, kind: str) -> None:
    op, own, _ = OPERATORS[name]
    number = list(OPERATORS).index(name) + DECAYS.index(kind)
    masked, normalize = number % 2 == 0, number % 3 == 0
    arrays, options = draw(), placed(lib, draw_options(kind, masked))
    more = {"normalize": normalize, "scale": 0.3}
    whole, last = call(lib, name, arrays, **options, **more, form="recurrent", return_state=True)
    q, k, v = (lib.asarray(x) for x in arrays)
    state = hla.init_state(op, batch=(BATCH, HEADS), d=D, dv=DV, like=q, normalize=normalize, **own)
    assert type(state) is type(last)
    own = {n: x for n, x in own.items() if n != "order"}
    outs = []
    for t in range(TOKENS):
        now = {n: x[..., t] if n in ("log_decay", "token_mask") else x for n, x in options.items()}
        out, state = hla.step(state, q[..., t, :], k[..., t, :], v[..., t, :], **own, **now, **more)
        assert tuple(out.shape) == (BATCH, HEADS, DV)
        outs.append(lib.numpy(out))
    steps = np.stack(outs, axis=-2)
    size = np.maximum.accumulate(np.abs(lib.numpy(whole)).max(axis=-1), axis=-1)
    budget.assert_within(steps, budget.Expected(lib.numpy(whole), size), 1e-14, "float64", "step")
    same_states(lib, last, state, "step")


@named
@pytest.mark.parametrize("normalize", [False, True])
def test_shapes_and_dtypes_of_the_state(lib: Any, name: str, normalize: bool) -> None:
    """Fields in words; float32, and float64 for float64 inputs; denominators without the axis of v."""
    op, own, letters = OPERATORS[name]
    for dtype in lib.floats:
        q, k, v = (lib.asarray(x, dtype) for x in draw(CHUNK))
        for form in FORMS:
            out, state = getattr(hla, op)(q, k, v, form=form, normalize=normalize, return_state=True, **own)
            assert out.dtype == v.dtype
            shapes = {field: tuple(x.shape[len((BATCH, HEADS)) :]) for field, x in state._asdict().items()}
            square = {"S", "Q", "R"}
            for letter in letters.split():
                assert shapes[WORDS[letter]] == ((D, D) if letter in square else (D, DV))
                if normalize and letter not in square:
                    assert shapes[MASSES[letter]] == (D,)
            if own.get("definition") != "as_printed" or op == "hla2":
                masses = [x for x in letters.split() if x not in square] if normalize else []
                assert set(shapes) == {WORDS[x] for x in letters.split()} | {MASSES[x] for x in masses}
            for field, x in state._asdict().items():
                assert x.dtype == lib.dtype("float64" if dtype == "float64" else "float32"), field
                assert tuple(x.shape[:2]) == (BATCH, HEADS), field


@pytest.mark.parametrize("kind", ["none", "per token"])
def test_a_given_state_is_where_the_recurrence_starts(lib: Any, kind: str) -> None:
    """Also one that no tokens have made, of smaller batch axes, in every form."""
    rng = np.random.default_rng(5)
    arrays, options = draw(), draw_options(kind, False)
    half = rng.normal(size=(1, HEADS, D, D))
    start = {"S": half @ np.swapaxes(half, -1, -2), "F": rng.normal(size=(BATCH, 1, D, DV))}
    want = serial("hla2", arrays, options, start)
    made = hla.init_state("hla2", batch=(1,), d=D, dv=DV, like=lib.asarray(arrays[0]))
    made = made._replace(key_moment=lib.asarray(start["S"]), corrected_state=lib.asarray(start["F"]))
    outs = []
    for form in FORMS:
        out, last = call(
            lib, "hla2", arrays, **options, initial_state=made, form=form, chunk_size=CHUNK, return_state=True
        )
        assert_state(lib, last, want, form)
        outs.append(lib.numpy(out))
        assert np.allclose(outs[0], outs[-1], rtol=1e-11, atol=1e-11 * np.abs(outs[0]).max()), form
    # The first token by hand: S = γ S + k kᵀ, F = γ² F + (S q) vᵀ, o = qᵀ F.
    q, k, v = (x[..., 0, :] for x in arrays)
    g = np.exp(options["log_decay"][..., 0])[..., None, None] if options else 1.0
    moment = g * start["S"] + k[..., :, None] * k[..., None, :]
    corrected = g**2 * start["F"] + (moment @ q[..., None]) * v[..., None, :]
    first = (q[..., None, :] @ corrected)[..., 0, :]
    assert np.allclose(outs[0][..., 0, :], first, rtol=1e-12, atol=1e-12)


@pytest.fixture
def combinations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one whenever segments are combined."""
    calls: list[int] = []
    combine = rules.combine_values

    def counted(*arguments: Any) -> Any:
        calls.append(len(calls))
        return combine(*arguments)

    monkeypatch.setattr(rules, "combine_values", counted)
    return calls


@pytest.mark.parametrize("length", [1, 2, 3, 8, TOKENS, 64])
@pytest.mark.parametrize("name", ["linear_attention", "hla2", "ahla", "hla3", "hla2 prefix", "hla2 printed"])
def test_the_scan_form_has_logarithmic_depth(lib: Any, name: str, length: int, combinations: list[int]) -> None:
    """At token level segments are combined at most 2⌈log₂ T⌉ + 2 times, all that are ready at once."""
    op, own, _ = OPERATORS[name]
    arrays = [lib.asarray(x) for x in draw(length)]
    options = {**own, "form": "scan", "chunk_size": 1, "backend": "numpy"}
    assert hla.explain(op, *arrays, **options).form == "scan"
    getattr(hla, op)(*arrays, **options)
    assert 1 <= len(combinations) <= 2 * math.ceil(math.log2(length)) + 2


@pytest.mark.parametrize(("name", "fields"), [("order 4", 3), ("order 5", 4), ("hla3 printed", 6)])
def test_without_segments_the_scan_form_goes_stage_by_stage(
    lib: Any, name: str, fields: int, combinations: list[int]
) -> None:
    """At most one scan for each field of the state."""
    op, own, _ = OPERATORS[name]
    arrays = [lib.asarray(x) for x in draw()]
    getattr(hla, op)(*arrays, **own, form="scan", chunk_size=1, backend="numpy")
    assert 1 <= len(combinations) <= fields * (2 * math.ceil(math.log2(TOKENS)) + 2)


@pytest.mark.parametrize("name", ["hla2", "hla3 printed", "order 5"])
def test_options_that_do_not_matter(lib: Any, name: str) -> None:
    """Every backend and form that takes the call; forms without chunks ignore chunk_size, to the last bit."""
    op, own, _ = OPERATORS[name]
    arrays, options = draw(), draw_options("per token", True)
    want = judge(name, arrays, options)
    x, y, z = (lib.asarray(a) for a in arrays)
    options = placed(lib, options)
    auto = call(lib, name, arrays, **options)
    budget.assert_within(lib.numpy(auto), want, allowed(name), "float64", "auto")
    for form in ("auto", *FORMS):
        plan = hla.explain(op, x, y, z, **own, **options, form=form)
        able = [c.name for c in plan.candidates if c.ok]
        assert plan.backend in able
        assert plan.form in FORMS
        assert form in ("auto", plan.form)
        for backend in (*able, "auto", [*able]):
            out = call(lib, name, arrays, **options, form=form, backend=backend)
            budget.assert_within(lib.numpy(out), want, allowed(name), "float64", f"{form} on {backend}")
    for form in ("recurrent", "parallel"):
        one, other = (lib.numpy(call(lib, name, arrays, **options, form=form, chunk_size=n)) for n in (1, None))
        assert np.array_equal(one, other)


@pytest.mark.parametrize("name", ["linear_attention", "hla2", "ahla", "hla3 printed", "order 5"])
def test_the_time_axis_may_stand_elsewhere(lib: Any, name: str) -> None:
    """(B, T, H, d) by axis −3 or 1; decay arrays, masks and states keep the layout of the batch."""
    op, own, _ = OPERATORS[name]
    arrays, options = draw(), draw_options("per token", True)
    kept = placed(lib, options)
    want, state = call(lib, name, arrays, **options, normalize=True, return_state=True)
    moved = [lib.asarray(np.ascontiguousarray(np.swapaxes(x, -2, -3))) for x in arrays]
    for axis in (-3, 1):
        for form in FORMS:
            options = {**kept, "axis": axis, "form": form, "normalize": True, "return_state": True, **own}
            out, last = getattr(hla, op)(*moved, **options)
            assert tuple(out.shape) == (BATCH, TOKENS, HEADS, DV)
            close = np.swapaxes(lib.numpy(out), -2, -3), lib.numpy(want)
            assert np.allclose(*close, rtol=1e-9, atol=1e-9), f"{form}, {axis}"
            same_states(lib, state, last, form)
    out, _ = getattr(hla, op)(*moved, **{**options, "initial_state": state})
    again, _ = call(lib, name, arrays, **kept, normalize=True, initial_state=state, return_state=True)
    assert np.allclose(np.swapaxes(lib.numpy(out), -2, -3), lib.numpy(again), rtol=1e-9, atol=1e-9)


def test_time_first_and_time_in_gradients(lib: Any) -> None:
    """Axis 0 of (T, B, H, d), and the gradients of vjp in the layout of the inputs."""
    arrays = draw()
    x, y, z = (lib.asarray(np.ascontiguousarray(np.moveaxis(a, -2, 0))) for a in arrays)
    do = np.random.default_rng(6).normal(size=(BATCH, HEADS, TOKENS, DV))
    for axis in (0, -4):
        out, pull = hla.vjp("hla2", x, y, z, decay=0.9, axis=axis)
        assert tuple(out.shape) == (TOKENS, BATCH, HEADS, DV)
        found = pull(lib.asarray(np.ascontiguousarray(np.moveaxis(do, -2, 0))))
        plain, plain_pull = hla.vjp("hla2", *(lib.asarray(a) for a in arrays), decay=0.9)
        assert np.allclose(np.moveaxis(lib.numpy(out), 0, -2), lib.numpy(plain), rtol=1e-12, atol=1e-10)
        want = plain_pull(lib.asarray(do))
        for one, other in zip(found[:3], want[:3], strict=True):
            assert np.allclose(np.moveaxis(lib.numpy(one), 0, -2), lib.numpy(other), rtol=1e-10, atol=1e-8)


def test_the_time_axis_is_not_copied() -> None:
    """What a backend is given are views of the caller's arrays."""
    rng = np.random.default_rng(7)
    q, k, v = (rng.normal(size=(BATCH, TOKENS, HEADS, n)) for n in (D, D, DV))
    problem = check_call("hla2", q, k, v, Options(axis=-3)).problem
    for x, y in ((q, problem.q), (k, problem.k), (v, problem.v)):
        assert np.shares_memory(x, y)
        assert y.shape == (BATCH, HEADS, TOKENS, x.shape[-1])

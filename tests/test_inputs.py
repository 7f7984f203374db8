"""Whatever arrays a caller may hand in: layouts in memory, sizes, batch axes, dtypes; and nothing is written to."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import budget
import hla
import samples
from hla.arrays import leaves, namespace
from samples import BATCH, CHUNK, DV, FORMS, HEADS, TOKENS, D

OPERATORS = {name: samples.OPERATORS[name] for name in samples.OPERATORS if name not in ("hla2 prefix", "hla3 printed")}


def draw(*batch: int, length: int = TOKENS, d: int = D, dv: int = DV) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(11)
    return tuple(rng.normal(size=(*batch, length, n)) for n in (d, d, dv))  # type: ignore[return-value]


def draw_log_decay(*batch: int, length: int = TOKENS) -> Any:
    return -np.random.default_rng(12).exponential(0.2, size=(*batch, length))


def allowed(op: str, options: dict[str, Any], length: int = TOKENS, d: int = D, dtype: str = "float64") -> float:
    passes = budget.stages(op, options.get("order"), options.get("definition", "exact"))
    return budget.tolerance(dtype, length, d, passes + 2)


def close(lib: Any, x: Any, y: Any, label: str = "", rtol: float = 1e-10) -> None:
    """Two arrays or states of one library, up to the order in which they were summed."""
    for one, other in zip(leaves([x]), leaves([y]), strict=True):
        one, other = lib.numpy(one), lib.numpy(other)
        assert one.shape == other.shape, label
        assert np.allclose(one, other, rtol=rtol, atol=rtol * np.abs(other).max(initial=1e-300)), label


# Layouts: each makes an array that holds the values of x, laid out in its own way.


def _contiguous(lib: Any, x: Any) -> Any:
    return lib.asarray(x)


def _strided(lib: Any, x: Any) -> Any:
    """Every second number of every axis; the others are NaN."""
    wide = np.full([2 * n for n in x.shape], False if x.dtype == bool else np.nan, dtype=x.dtype)
    wide[tuple(slice(None, None, 2) for _ in x.shape)] = x
    return lib.asarray(wide)[tuple(slice(None, None, 2) for _ in x.shape)]


def _transposed(lib: Any, x: Any) -> Any:
    made = lib.asarray(np.ascontiguousarray(np.swapaxes(x, -1, -2)))
    return namespace(made).matrix_transpose(made)


def _fortran(lib: Any, x: Any) -> Any:
    made = lib.asarray(np.ascontiguousarray(np.transpose(x)))
    return namespace(made).permute_dims(made, tuple(reversed(range(made.ndim))))


def _offset(lib: Any, x: Any) -> Any:
    """A slice out of the middle, surrounded by NaN."""
    wide = np.full([n + 2 for n in x.shape], False if x.dtype == bool else np.nan, dtype=x.dtype)
    wide[tuple(slice(1, -1) for _ in x.shape)] = x
    return lib.asarray(wide)[tuple(slice(1, -1) for _ in x.shape)]


def _reversed(lib: Any, x: Any) -> Any:
    return np.flip(np.flip(x).copy())


def _read_only(lib: Any, x: Any) -> Any:
    made = np.array(x)
    made.flags.writeable = False
    return made


LAYOUTS: dict[str, Callable[[Any, Any], Any]] = {
    "strided": _strided, "transposed": _transposed, "fortran": _fortran, "offset": _offset,
    "reversed": _reversed, "read-only": _read_only,
}  # fmt: skip
ONLY_NUMPY = ("reversed", "read-only")


def layouts(lib: Any) -> Iterator[tuple[str, Callable[[Any, Any], Any]]]:
    """Those the library has."""
    return ((n, f) for n, f in LAYOUTS.items() if lib.name == "numpy" or n not in ONLY_NUMPY)


def test_the_layouts_are_what_they_say() -> None:
    import libraries

    x = draw(BATCH, HEADS)[0]
    made = {name: layout(libraries.Library("numpy"), x) for name, layout in LAYOUTS.items()}
    assert all(np.array_equal(x, y) for y in made.values())
    assert not any(made[name].flags.c_contiguous for name in ("strided", "transposed", "fortran", "offset", "reversed"))
    assert made["fortran"].flags.f_contiguous
    assert all(n < 0 for n in made["reversed"].strides)
    assert not made["read-only"].flags.writeable


@pytest.mark.parametrize("name", OPERATORS)
def test_layout_in_memory_does_not_matter(lib: Any, name: str) -> None:
    """Outputs, states and gradients of views equal those of the same values in contiguous arrays."""
    op, own = OPERATORS[name]
    arrays, log_decay = draw(BATCH, HEADS), draw_log_decay(BATCH, HEADS)
    mask = np.random.default_rng(13).random((BATCH, HEADS, TOKENS)) < 0.8
    do = np.random.default_rng(14).normal(size=(BATCH, HEADS, TOKENS, DV))
    want = budget.expected(op, *arrays, log_decay=log_decay, token_mask=mask, **own)

    def run(layout: Callable[[Any, Any], Any], form: str) -> tuple[Any, Any]:
        options = {**own, "log_decay": layout(lib, log_decay), "token_mask": layout(lib, mask)}
        options |= {"form": form, "chunk_size": CHUNK, "return_state": True}
        (out, state), pull = hla.vjp(op, *(layout(lib, x) for x in arrays), **options)
        budget.assert_within(lib.numpy(out), want, allowed(op, own), "float64", f"{layout.__name__}, {form}")
        return state, pull(layout(lib, do), None)

    state, gradients = run(_contiguous, "chunkwise")
    for number, (label, layout) in enumerate(layouts(lib)):
        for form in FORMS if lib.name == "numpy" else (FORMS[number % 4],):
            other_state, other_gradients = run(layout, form)
            close(lib, other_state, state, f"{label}, {form}")
            close(lib, other_gradients, gradients, f"gradients, {label}")


@pytest.mark.parametrize("layout", ["strided", "fortran", "reversed", "read-only"])
def test_states_in_any_layout(lib: Any, layout: str) -> None:
    """As initial states, and in a step."""
    if lib.name != "numpy" and layout in ONLY_NUMPY:
        pytest.skip(f"{lib.name} has no such arrays")
    arrays = draw(BATCH, HEADS)
    x, y, z = (lib.asarray(a) for a in arrays)
    _, state = hla.hla3(x, y, z, normalize=True, return_state=True)
    moved = type(state)(*(LAYOUTS[layout](lib, np.array(lib.numpy(a))) for a in state))
    for form in FORMS:
        options: dict[str, Any] = {"normalize": True, "form": form, "chunk_size": CHUNK, "return_state": True}
        close(lib, hla.hla3(x, y, z, initial_state=moved, **options), hla.hla3(x, y, z, initial_state=state, **options))
    tokens = [a[..., 3, :] for a in (x, y, z)]
    close(lib, hla.step(moved, *tokens, normalize=True), hla.step(state, *tokens, normalize=True))


@pytest.mark.parametrize("name", OPERATORS)
def test_broadcast_inputs(lib: Any, name: str) -> None:
    """Stride 0 along batch, heads or time: values as if they were copied; gradients of full shape."""
    op, own = OPERATORS[name]
    q, k, v = draw(BATCH, HEADS)
    small = (q[:1, :1, :1], k[:, :1], v[:1])
    full = [np.array(np.broadcast_to(x, y.shape)) for x, y in zip(small, (q, k, v), strict=True)]
    do = lib.asarray(np.random.default_rng(14).normal(size=(BATCH, HEADS, TOKENS, DV)))
    copied, copied_pull = hla.vjp(op, *(lib.asarray(x) for x in full), decay=0.9, **own)
    if lib.name == "numpy":
        views = [np.broadcast_to(x, y.shape) for x, y in zip(small, full, strict=True)]
        assert all(0 in x.strides and not x.flags.writeable for x in views)
    else:
        made = [lib.asarray(x) for x in small]
        views = [namespace(x).broadcast_to(x, y.shape) for x, y in zip(made, full, strict=True)]
    for form in FORMS:
        out, pull = hla.vjp(op, *views, decay=0.9, form=form, chunk_size=CHUNK, **own)
        want = budget.expected(op, *full, log_decay=np.full((1, TOKENS), np.log(0.9)), **own)
        budget.assert_within(lib.numpy(out), want, allowed(op, own), "float64", form)
        close(lib, out, copied)
    close(lib, pull(do), copied_pull(do), "gradients")


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("form", FORMS)
def test_nothing_is_written_to(lib: Any, name: str, form: str) -> None:
    """Neither inputs nor options, cotangents and states; NumPy's are read-only, so that writing would raise."""
    if lib.name == "jax":
        pytest.skip("JAX arrays cannot be written to")
    op, own = OPERATORS[name]
    arrays = [lib.asarray(np.array(x)) for x in draw(BATCH, HEADS)]
    mask = lib.asarray(np.random.default_rng(13).random((BATCH, 1, TOKENS)) < 0.8)
    log_decay = lib.asarray(draw_log_decay(BATCH, 1))
    do = lib.asarray(np.random.default_rng(14).normal(size=(BATCH, HEADS, TOKENS, DV)))
    _, state = getattr(hla, op)(*arrays, normalize=True, return_state=True, **own)
    offsets = lib.asarray(np.asarray([0, 4, 4, TOKENS]))
    ids = lib.asarray(np.asarray([0] * 4 + [2] * (TOKENS - 4)))
    decay = lib.asarray(np.asarray([0.9, 0.5, 1.0]))
    everything = [*arrays, mask, log_decay, do, *state, offsets, ids, decay]
    before = [np.array(lib.numpy(x)) for x in everything]
    if lib.name == "numpy":
        for x in everything:
            x.flags.writeable = False
    versions = [x._version for x in everything] if lib.name == "torch" else []
    shared = {"normalize": True, "form": form, "chunk_size": CHUNK, **own}
    options = {**shared, "log_decay": log_decay, "token_mask": mask, "initial_state": state, "return_state": True}
    (_, last), pull = hla.vjp(op, *arrays, **options)
    pull(do, last)
    pull((do, state))
    for packed in ({"cu_seqlens": offsets}, {"segment_ids": ids}):
        getattr(hla, op)(*arrays, **shared, **packed, decay=decay)
    single = {n: x for n, x in own.items() if n != "order"}
    hla.step(state, *(x[..., 0, :] for x in arrays), decay=decay, normalize=True, **single)
    for x, y in zip(everything, before, strict=True):
        assert np.array_equal(lib.numpy(x), y)
    assert [x._version for x in everything if lib.name == "torch"] == versions


@pytest.mark.parametrize("op", ["linear_attention", "hla2", "ahla", "hla3"])
def test_bidirectional_inputs_are_not_written_to(lib: Any, op: str) -> None:
    if lib.name == "jax":
        pytest.skip("JAX arrays cannot be written to")
    arrays = [lib.asarray(np.array(x)) for x in draw(BATCH, HEADS)]
    mask = lib.asarray(np.random.default_rng(13).random((BATCH, 1, TOKENS)) < 0.8)
    before = [np.array(lib.numpy(x)) for x in (*arrays, mask)]
    if lib.name == "numpy":
        for x in (*arrays, mask):
            x.flags.writeable = False
    out, pull = hla.vjp(op, *arrays, mask="none", token_mask=mask, chunk_size=CHUNK)
    pull(out)
    for x, y in zip((*arrays, mask), before, strict=True):
        assert np.array_equal(lib.numpy(x), y)


def test_results_are_the_callers_own() -> None:
    """Writing into a result changes neither inputs nor other results (NumPy, whose arrays can be written to)."""
    arrays = [np.array(x) for x in draw(BATCH, HEADS)]
    before = [np.array(x) for x in arrays]
    for form, length in itertools.product(FORMS, (0, 1, TOKENS)):
        pieces = [x[..., :length, :] for x in arrays]
        start = hla.init_state("hla2", batch=(BATCH, HEADS), d=D, dv=DV, like=arrays[0], ridge=1.0)
        out, state = hla.hla2(*pieces, ridge=1.0, form=form, initial_state=start, return_state=True)
        results = [out, *state]
        for x, y in itertools.combinations(results, 2):
            assert not np.shares_memory(x, y)
        for x in results:
            x[...] = np.nan
        assert all(np.array_equal(x, y) for x, y in zip(arrays, before, strict=True))
        assert not any(np.isnan(x).any() for x in start), f"{form}, T = {length}"


@pytest.mark.parametrize(("d", "dv"), [(1, 1), (1, 7), (8, 5), (60, 100), (100, 8), (128, 1)])
def test_small_and_odd_sizes(lib: Any, d: int, dv: int) -> None:
    length = 3
    arrays = draw(1, length=length, d=d, dv=dv)
    for op, form in zip(("linear_attention", "hla2", "ahla", "hla3"), FORMS, strict=True):
        for normalize in (False, True):
            options: dict[str, Any] = {"scale": d**-0.5, "normalize": normalize}
            (out, state), pull = hla.vjp(
                op, *(lib.asarray(x) for x in arrays), form=form, chunk_size=2, return_state=True, **options
            )
            want = budget.expected(op, *arrays, **options)
            budget.assert_within(lib.numpy(out), want, allowed(op, options, length, d), "float64", f"{op}, {form}")
            assert all(x.shape[-1] in (d, dv) for x in state)
            found = pull(out, None)
            assert [tuple(x.shape) for x in found[:3]] == [(1, length, n) for n in (d, d, dv)]
            assert all(np.isfinite(lib.numpy(x)).all() for x in found[:3])


@pytest.mark.parametrize("batch", [(0,), (0, HEADS), (BATCH, 0)])
@pytest.mark.parametrize("form", FORMS)
def test_an_empty_batch(lib: Any, batch: tuple[int, ...], form: str) -> None:
    """Also with options, packed, and in gradients; for T = 0 too."""
    for name, (op, own) in OPERATORS.items():
        for length in (0, TOKENS) if name in ("hla2", "hla2 printed") else (TOKENS,):
            arrays = [lib.asarray(x) for x in draw(*batch, length=length)]
            mask = lib.asarray(np.ones((*batch, length), dtype=bool))
            options = {**own, "form": form, "chunk_size": CHUNK, "normalize": True, "token_mask": mask}
            (out, state), pull = hla.vjp(op, *arrays, decay=0.9, return_state=True, **options)
            assert tuple(out.shape) == (*batch, length, DV)
            assert all(tuple(x.shape[: len(batch)]) == batch for x in state)
            found = pull(out, state)
            assert [x.shape for x in found[:3]] == [x.shape for x in arrays]
            assert float(found.decay) == 0.0
            offsets = lib.asarray(np.asarray([0, 0, length]))
            out, state = getattr(hla, op)(*arrays, cu_seqlens=offsets, return_state=True, **options)
            assert tuple(out.shape) == (*batch, length, DV)
            assert all(tuple(x.shape[: 1 + len(batch)]) == (2, *batch) for x in state)
    if form in ("chunkwise", "parallel"):
        arrays = [lib.asarray(x) for x in draw(*batch)]
        for op in ("linear_attention", "hla2", "ahla", "hla3"):
            assert tuple(getattr(hla, op)(*arrays, mask="none", form=form).shape) == (*batch, TOKENS, DV)


GROUPS, KV = 3, 2


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("per_query_head", [False, True])
def test_grouped_heads(lib: Any, name: str, per_query_head: bool) -> None:
    """q (B, Hkv, G, T, d) with k, v (B, Hkv, 1, T, ·): as if the heads of k and v were repeated.

    The key-only S is kept once per k/v head, unless the decay differs within a group.
    """
    op, own = OPERATORS[name]
    q = draw(BATCH, KV, GROUPS)[0]
    k, v = draw(BATCH, KV, 1)[1:]
    repeated = [q, *(np.repeat(x, GROUPS, axis=2) for x in (k, v))]
    decay = np.asarray([[0.6, 0.9, 1.0], [0.8, 0.5, 0.7]]) if per_query_head else np.asarray([[0.6], [0.9]])
    per_head = np.broadcast_to(np.log(decay)[..., None], (BATCH, KV, GROUPS, TOKENS))
    want = budget.expected(op, *repeated, log_decay=per_head, normalize=True, **own)
    do = lib.asarray(np.random.default_rng(14).normal(size=(BATCH, KV, GROUPS, TOKENS, DV)))
    shared = {**own, "decay": lib.asarray(decay), "normalize": True, "chunk_size": CHUNK, "return_state": True}
    (_, plain), plain_pull = hla.vjp(op, *(lib.asarray(x) for x in repeated), **shared)
    own_heads = GROUPS if per_query_head else 1
    for form in FORMS:
        (out, state), pull = hla.vjp(op, *(lib.asarray(x) for x in (q, k, v)), form=form, **shared)
        budget.assert_within(lib.numpy(out), want, allowed(op, own), "float64", form)
        for field, x, y in zip(state._fields, state, plain, strict=True):
            assert tuple(x.shape[:3]) == (BATCH, KV, own_heads if field == "key_moment" else GROUPS)
            one, other = lib.numpy(x), lib.numpy(y)
            close(lib, lib.asarray(np.array(np.broadcast_to(one, other.shape))), y, field)
    found, whole = pull(do, None), plain_pull(do, None)
    assert [tuple(x.shape) for x in found[:3]] == [q.shape, k.shape, v.shape]
    close(lib, found.q, whole.q, "q", 1e-8)
    assert np.allclose(lib.numpy(found.decay), lib.numpy(whole.decay), rtol=1e-8, atol=1e-6)
    for x, y in ((found.k, whole.k), (found.v, whole.v)):
        close(lib, x, lib.asarray(lib.numpy(y).sum(axis=2, keepdims=True)), "k, v", 1e-8)


def test_grouped_heads_step_by_step(lib: Any) -> None:
    """A state made with kv_batch keeps its size-1 axis, and serves steps and further calls."""
    q = draw(BATCH, KV, GROUPS)[0]
    k, v = draw(BATCH, KV, 1)[1:]
    x, y, z = (lib.asarray(a) for a in (q, k, v))
    state = hla.init_state("hla2", batch=(BATCH, KV, GROUPS), kv_batch=(BATCH, KV, 1), d=D, dv=DV, like=x)
    outs = []
    for t in range(TOKENS):
        out, state = hla.step(state, x[..., t, :], y[..., t, :], z[..., t, :], decay=0.9)
        outs.append(lib.numpy(out))
        assert tuple(state.key_moment.shape) == (BATCH, KV, 1, D, D)
    want = budget.expected("hla2", q, k, v, log_decay=np.full((1, TOKENS), np.log(0.9)))
    budget.assert_within(np.stack(outs, axis=-2), want, allowed("hla2", {}), "float64")
    _, last = hla.hla2(x, y, z, decay=0.9, return_state=True)
    close(lib, state, last)
    _, more = hla.hla2(x, y, z, decay=0.9, initial_state=state, return_state=True)
    assert tuple(more.key_moment.shape) == (BATCH, KV, 1, D, D)


@pytest.mark.parametrize("name", OPERATORS)
def test_inputs_of_different_rank(lib: Any, name: str) -> None:
    """Batch axes broadcast: k for all, v per head, and the other way round; gradients have their inputs' shapes."""
    op, own = OPERATORS[name]
    for shapes in (((BATCH, HEADS), (), (HEADS,)), ((), (BATCH, 1), (HEADS,)), ((HEADS,), (), (BATCH, 1))):
        arrays = [draw(*shape)[i] for i, shape in enumerate(shapes)]
        want = budget.expected(op, *arrays, **own)
        for form in FORMS if op == "hla2" else ("chunkwise", "recurrent"):
            (out, state), pull = hla.vjp(
                op, *(lib.asarray(x) for x in arrays), form=form, chunk_size=CHUNK, return_state=True, **own
            )
            budget.assert_within(lib.numpy(out), want, allowed(op, own), "float64", f"{shapes}, {form}")
            for field, x in state._asdict().items():
                full = (BATCH, HEADS)
                keys = (*(1,) * (2 - len(shapes[1])), *shapes[1])
                assert tuple(x.shape[:2]) == (keys if field == "key_moment" else full), field
            found = pull(lib.asarray(np.ones((BATCH, HEADS, TOKENS, DV))), None)
            assert [tuple(x.shape) for x in found[:3]] == [x.shape for x in arrays]


@pytest.mark.parametrize("names", [
    ("float16", "float32", "bfloat16"), ("float32", "float32", "float16"), ("bfloat16", "float16", "float32"),
    ("float64", "float32", "float32"), ("float32", "float64", "float32"), ("float32", "float32", "float64"),
    ("bfloat16", "float64", "float16"),
])  # fmt: skip
def test_mixed_dtypes(lib: Any, names: tuple[str, str, str]) -> None:
    """Accumulated in float64 if any is, else in float32; outputs have the dtype of v, gradients that of their input."""
    if not set(names) <= set(lib.floats):
        pytest.skip(f"{lib.name} has {lib.floats}")
    wide = budget.accumulator(*names)
    made = [lib.asarray(0.4 * x, n) for x, n in zip(draw(BATCH, HEADS), names, strict=True)]
    values = [lib.numpy(x).astype(np.float64) for x in made]
    for number, (op, own) in enumerate(OPERATORS.values()):
        for form in (FORMS[number % 4], "chunkwise"):
            (out, state), pull = hla.vjp(op, *made, decay=0.9, form=form, chunk_size=CHUNK, return_state=True, **own)
            assert out.dtype == lib.dtype(names[2])
            assert all(x.dtype == lib.dtype(wide) for x in state)
            want = budget.expected(op, *values, log_decay=np.full((1, TOKENS), np.log(0.9)), **own)
            budget.assert_within(lib.numpy(out), want, allowed(op, own, dtype=wide), names[2], f"{op}, {form}")
        found = pull(out, state)
        assert [x.dtype for x in found[:3]] == [lib.dtype(n) for n in names]
        if "float64" in names:
            reference, plain = hla.vjp(op, *values, decay=0.9, form=form, chunk_size=CHUNK, return_state=True, **own)
            for x, y, n in zip(found[:3], plain(lib.numpy(out).astype(float), reference[1])[:3], names, strict=True):
                assert np.allclose(lib.numpy(x), y, rtol=4 * budget.UNIT[n], atol=1e-9 * np.abs(y).max())


def test_decays_never_promote(lib: Any) -> None:
    """Decay arrays and scale of any floating dtype, with inputs of any dtype: the inputs decide."""
    per_head, per_token = np.asarray([0.5, 0.75, 1.0]), draw_log_decay(BATCH, HEADS)
    pairs = itertools.product(lib.floats, lib.floats)
    for inputs, decays in [("bfloat16", "float64"), ("float64", "float16")] if lib.name == "jax" else pairs:
        made = [lib.asarray(0.4 * x, inputs) for x in draw(BATCH, HEADS)]
        values = [lib.numpy(x).astype(np.float64) for x in made]
        wide = budget.accumulator(inputs)
        gates = lib.asarray(per_token, decays)
        for name, x, log in (
            ("decay", lib.asarray(per_head, decays), np.log(per_head)[:, None] + np.zeros(TOKENS)),
            ("log_decay", gates, lib.numpy(gates).astype(np.float64)),
        ):
            (out, state), pull = hla.vjp("hla2", *made, **{name: x}, chunk_size=CHUNK, return_state=True)
            assert out.dtype == lib.dtype(inputs)
            assert all(s.dtype == lib.dtype(wide) for s in state)
            want = budget.expected("hla2", *values, log_decay=log)
            # A decay in float64 is rounded to float32 before its logarithm is taken.
            budget.assert_within(lib.numpy(out), want, allowed("hla2", {}, dtype=wide), inputs, f"{inputs}, {decays}")
            found = pull(out, state)
            assert [g.dtype for g in found[:3]] == [lib.dtype(inputs)] * 3
            assert getattr(found, name).dtype == lib.dtype(decays)
            assert getattr(found, name).shape == x.shape
        scale = namespace(gates).reshape(lib.asarray(np.asarray([0.5]), decays), ())
        out, state = hla.hla2(*made, scale=scale, return_state=True)
        assert out.dtype == lib.dtype(inputs)
        assert all(s.dtype == lib.dtype(wide) for s in state)
        token, _ = hla.step(state, *(x[..., 0, :] for x in made), scale=scale, log_decay=gates[..., 0])
        assert token.dtype == lib.dtype(inputs)


@pytest.mark.parametrize("form", FORMS)
def test_float16_outputs_overflow_to_infinity(lib: Any, form: str) -> None:
    """Outputs grow like t³: what float16 cannot hold is infinite, not an error; the state is float32 and holds it."""
    if "float16" not in lib.floats:
        pytest.skip(f"{lib.name} has {lib.floats}")
    made = [lib.asarray(2 * x, "float16") for x in draw(BATCH, HEADS)]
    values = [lib.numpy(x).astype(np.float64) for x in made]
    want = budget.expected("hla3", *values)
    out, state = hla.hla3(*made, form=form, chunk_size=CHUNK, return_state=True)
    assert out.dtype == lib.dtype("float16")
    out = lib.numpy(out)
    over, under = np.abs(want.value) > 65536.0, np.abs(want.value) < 65504.0
    assert over.any()
    assert under[..., :2, :].all()
    assert np.array_equal(out[over], np.sign(want.value[over]) * np.inf)
    assert np.isfinite(out[under]).all()
    kept = budget.Expected(np.where(under, want.value, 0.0), want.scale)
    budget.assert_within(np.where(under, out, 0.0), kept, allowed("hla3", {}, dtype="float32"), "float16", form)
    assert all(np.isfinite(lib.numpy(x)).all() for x in state)
    token, _ = hla.step(state, *(x[..., -1, :] for x in made))
    assert np.isinf(lib.numpy(token)).any()

"""Several sequences in one call, and tokens that are not there: results equal each sequence on its own."""

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
import libraries

BATCH, HEADS, TOKENS, D, DV = 2, 3, 17, 5, 7
CHUNK = 5
FORMS = ("recurrent", "scan", "chunkwise", "parallel")
# Sequences within a chunk, across chunks, ending at one, of one token, and empty ones at every place.
OFFSETS = (0, 0, 3, 10, 10, 10, 11, 15, 17, 17)
# JAX compiles every operation for every shape that it meets: there most sequences are as long as chunks.
REGULAR = (0, 0, 5, 10, 10, 10, 10, 15, 17, 17)
OPERATORS: dict[str, tuple[str, dict[str, Any]]] = {
    "linear_attention": ("linear_attention", {}),
    "hla2": ("hla2", {"ridge": 0.7}),
    "hla2 prefix": ("hla2", {"mask": "prefix"}),
    "hla2 printed": ("hla2", {"definition": "as_printed"}),
    "ahla": ("ahla", {}),
    "ahla prefix": ("ahla", {"mask": "prefix"}),
    "hla3": ("hla3", {}),
    "hla3 prefix": ("hla3", {"mask": "prefix"}),
    "hla3 printed": ("hla3", {"definition": "as_printed"}),
    "order 4": ("higher_order", {"order": 4}),
    "order 5": ("higher_order", {"order": 5}),
}
WHOLE = ("linear_attention", "hla2", "ahla", "hla3")
named = pytest.mark.parametrize("name", OPERATORS)


def draw(length: int = TOKENS, seed: int = 21) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(seed)
    return tuple(rng.normal(size=(BATCH, HEADS, length, n)) for n in (D, D, DV))  # type: ignore[return-value]


def draw_options(number: int, length: int = TOKENS) -> dict[str, Any]:
    """In NumPy: one of four kinds of decay, and every other time a token mask and normalisation."""
    rng = np.random.default_rng(22)
    found: dict[str, Any] = {"scale": (1.0, 0.3, -1.7)[number % 3], "normalize": number % 2 == 0}
    kind = number % 4
    if kind == 1:
        found["decay"] = 0.9
    elif kind > 1:
        found["log_decay"] = -rng.exponential(0.2, size=(BATCH, HEADS, length))
        if kind == 3:
            found["log_decay"][rng.random((BATCH, HEADS, length)) < 0.2] = -np.inf
    if number % 5 < 2:
        found["token_mask"] = rng.random((BATCH, 1, length)) < 0.8
    return found


def offsets_for(lib: Any) -> tuple[int, ...]:
    return REGULAR if lib.name == "jax" else OFFSETS


def piece(options: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
    return {n: x[..., start:stop] if isinstance(x, np.ndarray) else x for n, x in options.items()}


def judge(op: str, arrays: Any, offsets: Any, options: dict[str, Any]) -> budget.Expected:
    """The definition, sequence by sequence."""
    parts = []
    for start, stop in itertools.pairwise(offsets):
        own = piece(options, start, stop)
        if "decay" in own:
            own["log_decay"] = np.full((1, stop - start), math.log(own.pop("decay")))
        parts.append(budget.expected(op, *(x[..., start:stop, :] for x in arrays), **own))
    return budget.Expected(
        np.concatenate([p.value for p in parts], axis=-2), np.concatenate([p.scale for p in parts], axis=-1)
    )


def ids(offsets: Any) -> Any:
    """Segment ids, not consecutive where sequences are empty."""
    return np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))


def placed(lib: Any, options: dict[str, Any]) -> dict[str, Any]:
    return {n: lib.asarray(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}


def call(lib: Any, name: str, arrays: Any, **options: Any) -> Any:
    op, own = OPERATORS[name]
    return getattr(hla, op)(*(lib.asarray(x) for x in arrays), **own, **placed(lib, options))


def within(lib: Any, out: Any, want: budget.Expected, name: str, label: str) -> None:
    op, own = OPERATORS[name]
    passes = budget.stages(op, own.get("order"), own.get("definition", "exact"))
    most = budget.tolerance("float64", TOKENS, D, passes + 2)
    budget.assert_within(lib.numpy(out), want, most, "float64", f"{name}, {label}")


def close(lib: Any, x: Any, y: Any, label: str) -> None:
    one, other = lib.numpy(x), lib.numpy(y)
    assert one.shape == other.shape, label
    assert np.allclose(one, other, rtol=1e-11, atol=1e-11 * np.abs(other).max(initial=1e-300)), label


@named
@pytest.mark.parametrize("form", FORMS)
def test_packed_sequences_equal_each_on_its_own(lib: Any, name: str, form: str) -> None:
    op, own = OPERATORS[name]
    number = list(OPERATORS).index(name) + 3 * FORMS.index(form)
    arrays, options, offsets = draw(), draw_options(number), offsets_for(lib)
    want = judge(op, arrays, offsets, {**own, **options})
    more = {**options, "form": form, "chunk_size": CHUNK}
    out = call(lib, name, arrays, segment_ids=ids(offsets), **more)
    within(lib, out, want, name, f"{form}, segment_ids")
    out, state = call(lib, name, arrays, cu_seqlens=np.asarray(offsets), return_state=True, **more)
    within(lib, out, want, name, f"{form}, cu_seqlens")
    for n, (start, stop) in enumerate(itertools.pairwise(offsets)):
        alone = {**piece(options, start, stop), "form": form, "chunk_size": CHUNK, "return_state": True}
        _, last = call(lib, name, [x[..., start:stop, :] for x in arrays], **alone)
        assert type(last) is type(state)
        for field, x, y in zip(state._fields, state, last, strict=True):
            close(lib, x[n, ...], y, f"{field} of sequence {n}")


@pytest.mark.parametrize("op", [*WHOLE, "higher_order"])
@pytest.mark.parametrize("form", ["chunkwise", "parallel"])
def test_packed_bidirectional_sequences(lib: Any, op: str, form: str) -> None:
    own: dict[str, Any] = {"mask": "none"} | ({"order": 5} if op == "higher_order" else {})
    own |= {"ridge": 0.7} if op == "hla2" else {}
    arrays = draw()
    for normalize, masked in itertools.product((False, True), (False, True)):
        options = {"scale": 0.3, "normalize": normalize}
        if masked:
            options["token_mask"] = np.random.default_rng(23).random((BATCH, 1, TOKENS)) < 0.8
        want = judge(op, arrays, offsets_for(lib), {**own, **options})
        inputs = [lib.asarray(x) for x in arrays]
        most = budget.tolerance("float64", TOKENS, D, 7)
        for packed in ({"segment_ids": ids(offsets_for(lib))}, {"cu_seqlens": np.asarray(offsets_for(lib))}):
            more = placed(lib, {**options, **packed})
            out = getattr(hla, op)(*inputs, **own, **more, form=form, chunk_size=CHUNK)
            budget.assert_within(lib.numpy(out), want, most, "float64", f"{op}, {form}, {[*packed]}")


@settings(max_examples=15, deadline=None, derandomize=True)
@given(data=st.data())
def test_random_offsets(lib: Any, data: st.DataObject) -> None:
    """Any number of sequences of any length, most of them short or empty, in any form."""
    few = lib.name == "jax"
    name = data.draw(st.sampled_from(["hla2 printed", "hla3"] if few else [*OPERATORS]), label="operator")
    form = data.draw(st.sampled_from(FORMS[:3:2] if few else FORMS), label="form")
    places = st.sampled_from([0, TOKENS] if few else [0, 1, 4, 5, 6, 10, 16, 17])
    cuts = data.draw(st.lists(places, max_size=6), label="cuts")
    offsets = [0, *sorted([*cuts, *([5, 10, 15] if few else [])]), TOKENS]
    arrays, options = draw(), draw_options(data.draw(st.integers(0, 59), label="options"))
    op, own = OPERATORS[name]
    want = judge(op, arrays, offsets, {**own, **options})
    more = {**options, "form": form, "chunk_size": CHUNK}
    out, state = call(lib, name, arrays, cu_seqlens=np.asarray(offsets), return_state=True, **more)
    within(lib, out, want, name, f"{form}, {offsets}")
    assert all(x.shape[0] == len(offsets) - 1 for x in state)
    within(lib, call(lib, name, arrays, segment_ids=ids(offsets), **more), want, name, f"{form}, {offsets}, ids")


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_offsets_may_stay_on_the_host(lib: Any, dtype: str) -> None:
    """NumPy arrays of any integer dtype serve every library; so do ids that differ between heads."""
    arrays = [lib.asarray(x) for x in draw()]
    offsets = np.asarray(OFFSETS, dtype=dtype)
    there = hla.hla2(*arrays, cu_seqlens=lib.asarray(offsets))
    close(lib, hla.hla2(*arrays, cu_seqlens=offsets), there, "host")
    close(lib, hla.hla2(*arrays, segment_ids=ids(OFFSETS).astype(dtype)), there, "ids")
    cuts = [[0, 3, TOKENS], [0, TOKENS, TOKENS], [0, 5, TOKENS]]
    heads = np.stack([ids(offsets) for offsets in cuts]).astype(dtype)
    out = hla.hla2(*arrays, segment_ids=lib.asarray(heads), chunk_size=CHUNK)
    for h, offsets in enumerate(cuts):
        want = judge("hla2", [x[:, h] for x in draw()], offsets, {})
        within(lib, out[:, h, ...], want, "hla2", f"head {h}")


@named
@pytest.mark.parametrize("offsets", [(0, 0), (0, 0, 0, 0), (0,)])
def test_nothing_but_empty_sequences(lib: Any, name: str, offsets: tuple[int, ...]) -> None:
    """T = 0 with N sequences, also N = 0: no output, zero states, or those that were given."""
    count = len(offsets) - 1
    arrays = draw(0)
    _, start = call(lib, name, draw(4), form="recurrent", return_state=True)
    for form in FORMS:
        options = {"cu_seqlens": np.asarray(offsets), "form": form, "return_state": True}
        out, state = call(lib, name, arrays, **options)
        assert tuple(out.shape) == (BATCH, HEADS, 0, DV)
        for x, y in zip(state, start, strict=True):
            assert tuple(x.shape) == (count, *y.shape)
            assert x.dtype == y.dtype
            assert not lib.numpy(x).any()
        lead = [np.arange(1.0, count + 1).reshape(count, *(1,) * len(y.shape)) * lib.numpy(y)[None] for y in start]
        given_states = type(start)(*(lib.asarray(x) for x in lead))
        out, state = call(lib, name, arrays, initial_state=given_states, **options)
        for x, y in zip(state, lead, strict=True):
            assert np.array_equal(lib.numpy(x), y)
    out = call(lib, name, arrays, segment_ids=np.zeros(0, dtype=np.int64))
    assert tuple(out.shape) == (BATCH, HEADS, 0, DV)


@named
@pytest.mark.parametrize("form", FORMS)
def test_a_state_for_every_sequence(lib: Any, name: str, form: str) -> None:
    """Prefill packed, go on packed, and decode from what comes back: as each sequence on its own."""
    op, own = OPERATORS[name]
    number = list(OPERATORS).index(name) + 3 * FORMS.index(form)
    first, second = np.asarray((0, 5, 5, 10, TOKENS)), np.asarray((0, 0, 10, 12, TOKENS))
    before, after = draw(), draw(seed=24)
    options = {n: x for n, x in draw_options(number).items() if n != "token_mask"}
    shared = {"form": form, "chunk_size": CHUNK, "return_state": True, **options}
    _, states = call(lib, name, before, cu_seqlens=first, **shared)
    assert all(tuple(x.shape[:3]) == (4, BATCH, HEADS) for x in states)
    out, states = call(lib, name, after, cu_seqlens=second, initial_state=states, **shared)
    pieces = []
    for n in range(4):
        spans = (slice(first[n], first[n + 1]), slice(second[n], second[n + 1]))
        arrays = [np.concatenate([x[..., s, :] for x, s in zip(xs, spans, strict=True)], axis=-2)
                  for xs in zip(before, after, strict=True)]  # fmt: skip
        alone = dict(options)
        if "log_decay" in alone:
            alone["log_decay"] = np.concatenate([alone["log_decay"][..., s] for s in spans], axis=-1)
        length = arrays[0].shape[-2]
        want = judge(op, arrays, (0, length), {**own, **alone})
        size = int(second[n + 1] - second[n])
        pieces.append(budget.Expected(want.value[..., length - size :, :], want.scale[..., length - size :]))
    whole = budget.Expected(
        np.concatenate([p.value for p in pieces], axis=-2), np.concatenate([p.scale for p in pieces], axis=-1)
    )
    within(lib, out, whole, name, form)
    # What came back is an ordinary state of batch (N, *batch).
    token = [np.random.default_rng(25).normal(size=(4, BATCH, HEADS, n)) for n in (D, D, DV)]
    own = {n: x for n, x in own.items() if n != "order"}
    now = {n: x for n, x in options.items() if n != "log_decay"}
    step, following = hla.step(states, *(lib.asarray(x) for x in token), **own, **now)
    assert tuple(step.shape) == (4, BATCH, HEADS, DV)
    for n in range(4):
        one = type(states)(*(x[n, ...] for x in states))
        alone, last = hla.step(one, *(lib.asarray(x[n]) for x in token), **own, **now)
        close(lib, step[n, ...], alone, "step")
        for x, y in zip(following, last, strict=True):
            close(lib, x[n, ...], y, "state after a step")


def test_packed_states_keep_the_heads_of_the_keys(lib: Any) -> None:
    """With grouped heads S has a size-1 axis behind N."""
    q, k, v = draw()
    arrays = [lib.asarray(x) for x in (q, k[:, :1], v)]
    offsets = lib.asarray(np.asarray((0, 4, 4, TOKENS)))
    out, states = hla.hla2(*arrays, cu_seqlens=offsets, return_state=True)
    assert tuple(states.key_moment.shape) == (3, BATCH, 1, D, D)
    assert tuple(states.corrected_state.shape) == (3, BATCH, HEADS, D, DV)
    within(lib, out, judge("hla2", (q, k[:, :1], v), (0, 4, 4, TOKENS), {}), "hla2", "grouped")
    _, more = hla.hla2(*arrays, cu_seqlens=offsets, initial_state=states, return_state=True)
    assert [x.shape for x in more] == [x.shape for x in states]
    flat = [x[0, 0, ...] for x in arrays]
    _, none = hla.hla2(*flat, cu_seqlens=offsets, return_state=True)
    assert tuple(none.key_moment.shape) == (3, D, D)


@named
@pytest.mark.parametrize("wide", ["q", "k", "v"])
def test_grouped_heads_with_an_empty_sequence_in_a_scan(lib: Any, name: str, wide: str) -> None:
    """A scan widens the batch axes of its states, an empty sequence has nothing to scan."""
    op, own = OPERATORS[name]
    q, k, v = (lib.asarray(x if letter == wide else x[:, :1]) for letter, x in zip("qkv", draw(10), strict=True))
    options = {**own, "normalize": True, "return_state": True, "cu_seqlens": np.asarray((0, 0, 5, 10))}
    o, state = getattr(hla, op)(q, k, v, form="scan", chunk_size=CHUNK, **options)
    expected, states = getattr(hla, op)(q, k, v, form="chunkwise", chunk_size=CHUNK, **options)
    np.testing.assert_allclose(lib.numpy(o), lib.numpy(expected), rtol=1e-6, atol=1e-9)
    for x, y in zip(state, states, strict=True):
        np.testing.assert_allclose(lib.numpy(x), lib.numpy(y), rtol=1e-9, atol=1e-9)


@named
@pytest.mark.parametrize("form", FORMS)
def test_padding_does_not_matter(lib: Any, name: str, form: str) -> None:
    """Tokens under the mask, to the left, to the right or between, whatever they hold: as if they were not there."""
    op, own = OPERATORS[name]
    number = list(OPERATORS).index(name) + FORMS.index(form)
    arrays = draw(TOKENS - 5)
    log_decay = -np.random.default_rng(26).exponential(0.2, size=(BATCH, HEADS, TOKENS - 5))
    gates = (None, {"decay": 0.8}, {"log_decay": log_decay})[number % 3] or {}
    gates = {**gates, "normalize": number % 2 == 0, "eps": 0.0}  # without ε nothing is 0/0 under the mask
    options = {**gates, "form": form, "chunk_size": CHUNK, "return_state": True}
    plain = judge(op, arrays, (0, TOKENS - 5), {**own, **gates})
    _, last = call(lib, name, arrays, **options)
    for places in (range(5), range(TOKENS - 5, TOKENS), (0, 4, 9, 10, TOKENS - 1)):
        mask = np.ones(TOKENS, dtype=bool)
        mask[list(places)] = False
        for filling in (np.nan, np.inf, 3.0):
            padded = [np.full((BATCH, HEADS, TOKENS, x.shape[-1]), filling) for x in arrays]
            for x, y in zip(padded, arrays, strict=True):
                x[..., mask, :] = y
            own_gates = dict(gates)
            if "log_decay" in gates:
                own_gates["log_decay"] = np.full((BATCH, HEADS, TOKENS), np.nan if np.isnan(filling) else -filling)
                own_gates["log_decay"][..., mask] = log_decay
            out, state = call(lib, name, padded, token_mask=mask, **{**options, **own_gates})
            values = lib.numpy(out)
            assert not values[..., ~mask, :].any()
            within(lib, lib.asarray(values[..., mask, :]), plain, name, f"{form}, padding at {list(places)}")
            for field, x, y in zip(state._fields, state, last, strict=True):
                close(lib, x, y, f"{field}, padding at {list(places)}")


@pytest.mark.parametrize("op", WHOLE)
@pytest.mark.parametrize("form", ["chunkwise", "parallel"])
def test_padding_does_not_matter_to_bidirectional_operators(lib: Any, op: str, form: str) -> None:
    arrays = draw(TOKENS - 5)
    want = budget.expected(op, *arrays, mask="none", normalize=True)
    mask = np.ones(TOKENS, dtype=bool)
    mask[[0, 4, 9, 10, TOKENS - 1]] = False
    padded = [np.full((BATCH, HEADS, TOKENS, x.shape[-1]), np.nan) for x in arrays]
    for x, y in zip(padded, arrays, strict=True):
        x[..., mask, :] = y
    options: dict[str, Any] = {"mask": "none", "normalize": True, "form": form, "chunk_size": CHUNK}
    out = getattr(hla, op)(*(lib.asarray(x) for x in padded), token_mask=lib.asarray(mask), **options)
    values = lib.numpy(out)
    assert not values[..., ~mask, :].any()
    budget.assert_within(values[..., mask, :], want, budget.tolerance("float64", TOKENS, D, 5), "float64", form)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(data=st.data())
def test_to_skip_is_to_remove(lib: Any, data: st.DataObject) -> None:
    """A mask that differs between batch entries and heads, with the initial state, in values and gradients."""
    few = lib.name == "jax"
    name = data.draw(st.sampled_from(["hla2"] if few else [*OPERATORS]), label="operator")
    form = data.draw(st.sampled_from(["chunkwise"] if few else FORMS), label="form")
    some = [0, 0b11111, 0b10101010100000000, 2**TOKENS - 1]  # the lengths 0, 5 and 17
    patterns = st.sampled_from(some) if few else st.integers(0, 2**TOKENS - 1)
    rows = data.draw(st.lists(patterns, min_size=HEADS, max_size=HEADS), label="mask")
    mask = np.asarray([[bool(row >> t & 1) for t in range(TOKENS)] for row in rows])
    op, own = OPERATORS[name]
    arrays = draw()
    log_decay = -np.random.default_rng(26).exponential(0.2, size=(BATCH, HEADS, TOKENS))
    do = np.random.default_rng(27).normal(size=(BATCH, HEADS, TOKENS, DV))
    _, start = call(lib, name, draw(4), form="recurrent", return_state=True)
    options = {**own, "form": form, "chunk_size": CHUNK, "return_state": True}
    more = {"log_decay": lib.asarray(log_decay), "token_mask": lib.asarray(mask), "initial_state": start}
    (out, state), pull = hla.vjp(op, *(lib.asarray(x) for x in arrays), **options, **more)
    found = pull(lib.asarray(do), state)
    for h in range(HEADS):
        kept = np.flatnonzero(mask[h])
        pieces = [lib.asarray(x[:, h][:, kept]) for x in arrays]
        head = type(start)(*(x[:, h, ...] for x in start))
        gate = lib.asarray(log_decay[:, h][:, kept])
        (alone, last), alone_pull = hla.vjp(op, *pieces, log_decay=gate, initial_state=head, **options)
        values = lib.numpy(out)[:, h]
        assert not np.delete(values, kept, axis=1).any()
        close(lib, lib.asarray(values[:, kept]), alone, "output")
        want = alone_pull(lib.asarray(do[:, h][:, kept]), last)
        for x, y in zip(state, last, strict=True):
            close(lib, x[:, h, ...], y, "state")
        for label in ("q", "k", "v", "log_decay"):
            gradient = lib.numpy(getattr(found, label))[:, h]
            assert not np.delete(gradient, kept, axis=1).any(), label
            one, other = gradient[:, kept], lib.numpy(getattr(want, label))
            assert np.allclose(one, other, rtol=1e-9, atol=1e-9 * np.abs(other).max(initial=1.0)), label
        for x, y in zip(found.initial_state, want.initial_state, strict=True):
            close(lib, x[:, h, ...], y, "gradient of the initial state")


@pytest.mark.parametrize("name", ["hla2", "ahla", "hla3 printed", "order 5"])
def test_gradients_of_packed_sequences(lib: Any, name: str) -> None:
    """Those of each sequence on its own, also through the states."""
    op, own = OPERATORS[name]
    arrays, offsets = draw(), offsets_for(lib)
    rng = np.random.default_rng(28)
    do = rng.normal(size=(BATCH, HEADS, TOKENS, DV))
    log_decay = -rng.exponential(0.2, size=(BATCH, HEADS, TOKENS))
    _, states = call(lib, name, draw(seed=24), cu_seqlens=np.asarray(offsets), return_state=True)
    options = {**own, "chunk_size": CHUNK, "return_state": True}
    inputs, gate = [lib.asarray(x) for x in arrays], lib.asarray(log_decay)
    places = lib.asarray(np.asarray(offsets))
    (_, last), pull = hla.vjp(op, *inputs, log_decay=gate, cu_seqlens=places, initial_state=states, **options)
    found = pull(lib.asarray(do), last)
    out, ids_pull = hla.vjp(op, *inputs, log_decay=gate, segment_ids=lib.asarray(ids(offsets)), chunk_size=CHUNK, **own)
    by_ids = ids_pull(lib.asarray(do))
    plain, plain_pull = hla.vjp(op, *inputs, log_decay=gate, cu_seqlens=places, chunk_size=CHUNK, **own)
    by_offsets = plain_pull(lib.asarray(do))
    close(lib, out, plain, "outputs")
    for n, (start, stop) in enumerate(itertools.pairwise(offsets)):
        pieces = [lib.asarray(x[..., start:stop, :]) for x in arrays]
        own_gate = lib.asarray(log_decay[..., start:stop])
        state = type(states)(*(x[n, ...] for x in states))
        _, alone = hla.vjp(op, *pieces, log_decay=own_gate, initial_state=state, **options)
        want = alone(lib.asarray(do[..., start:stop, :]), type(last)(*(x[n, ...] for x in last)))
        _, alone = hla.vjp(op, *pieces, log_decay=own_gate, chunk_size=CHUNK, **own)
        stateless = alone(lib.asarray(do[..., start:stop, :]))
        for label in ("q", "k", "v", "log_decay"):
            axis = -1 if label == "log_decay" else -2
            for got, other in ((found, want), (by_ids, stateless), (by_offsets, stateless)):
                x = np.take(lib.numpy(getattr(got, label)), range(start, stop), axis=axis)
                y = lib.numpy(getattr(other, label))
                assert np.allclose(x, y, rtol=1e-9, atol=1e-9 * np.abs(y).max(initial=1.0)), f"{label}, sequence {n}"
        for x, y in zip(found.initial_state, want.initial_state, strict=True):
            close(lib, x[n, ...], y, "initial state")


@pytest.fixture
def jax_lib(request: pytest.FixtureRequest) -> libraries.Library:
    """JAX, where it is the chosen library."""
    if request.config.getoption("--arrays") != "jax":
        pytest.skip("of --arrays=jax")
    return libraries.Library("jax")


@pytest.mark.parametrize("name", ["hla2", "hla3 printed"])
def test_offsets_that_a_transformation_hides(jax_lib: libraries.Library, name: str) -> None:
    """Under jax.jit the offsets have no values: with states and without, as if they had."""
    import jax

    lib = jax_lib
    op, own = OPERATORS[name]
    arrays = [lib.asarray(x) for x in draw()]
    gate = lib.asarray(-np.random.default_rng(26).exponential(0.2, size=(HEADS, TOKENS)))
    mask = lib.asarray(np.random.default_rng(23).random((BATCH, 1, TOKENS)) < 0.8)
    _, states = call(lib, name, draw(seed=24), cu_seqlens=np.asarray(OFFSETS), return_state=True)
    shared = {**own, "log_decay": gate, "token_mask": mask, "chunk_size": CHUNK}

    def run(offsets: Any, with_states: bool, initial: Any) -> Any:
        more = {"return_state": with_states, "initial_state": initial}
        return getattr(hla, op)(*arrays, cu_seqlens=offsets, **shared, **more)

    compiled = jax.jit(run, static_argnums=1)
    for offsets in (OFFSETS, (0, 5, 5, 5, 5, 5, 5, 5, 5, TOKENS)):
        known = lib.asarray(np.asarray(offsets))
        close(lib, compiled(known, False, None), run(known, False, None), "outputs")
        for initial in (None, states):
            (out, last), (want, want_last) = compiled(known, True, initial), run(known, True, initial)
            close(lib, out, want, "outputs with states")
            for x, y in zip(last, want_last, strict=True):
                close(lib, x, y, "states")
    assert compiled._cache_size() == 3


def test_offsets_that_a_transformation_hides_without_tokens_or_sequences(jax_lib: libraries.Library) -> None:
    import jax

    lib = jax_lib
    arrays = [lib.asarray(x) for x in draw()]
    for offsets, length in (((0, TOKENS), TOKENS), ((0, 0, 0), 0), ((0,), 0)):
        pieces = [x[..., :length, :] for x in arrays]

        def run(offsets: Any, pieces: Any = pieces) -> Any:
            return hla.hla2(*pieces, decay=0.9, cu_seqlens=offsets, return_state=True)

        known = lib.asarray(np.asarray(offsets))
        (out, last), (want, want_last) = jax.jit(run)(known), run(known)
        close(lib, out, want, f"{offsets}")
        for x, y in zip(last, want_last, strict=True):
            close(lib, x, y, f"{offsets}")

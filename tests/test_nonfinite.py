"""Where a NaN or an infinity may get to, and where it never does.

In recurrent form: outputs at or after its own token. In the others: also the other tokens of its chunk, never an
earlier chunk. In no form: another batch entry, or by way of the carry another packed sequence or what follows a reset.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import hla
import libraries
import samples
from samples import BATCH, DV, FORMS, HEADS, OPERATORS, TOKENS, D

CHUNK = 16 if libraries.chosen == "cupy" else samples.CHUNK  # whose kernels have no shorter ones
SPOILT = (1, 2)
"""The batch entry and head that hold the bad value."""
named = pytest.mark.parametrize("name", OPERATORS)
in_every_form = pytest.mark.parametrize("form", FORMS)


def draw() -> tuple[Any, Any, Any, Any]:
    """q, k, v and log-decays, in NumPy."""
    rng = np.random.default_rng(31)
    q, k, v = (rng.normal(size=(BATCH, HEADS, TOKENS, n)) for n in (D, D, DV))
    return q, k, v, -rng.exponential(0.2, size=(BATCH, HEADS, TOKENS))


def spoil(arrays: Any, which: str, token: int, value: float) -> tuple[Any, ...]:
    """Copies with one bad value in q, k, v or the log-decays."""
    copies = tuple(np.array(x) for x in arrays)
    x = copies[("q", "k", "v", "log_decay").index(which)]
    x[(*SPOILT, token, 1) if x.ndim == 4 else (*SPOILT, token)] = value
    return copies


def call(lib: Any, name: str, arrays: Any, form: str, **options: Any) -> Any:
    op, own = OPERATORS[name]
    q, k, v, log_decay = (lib.asarray(x) for x in arrays)
    options = {n: lib.asarray(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}
    own = {"log_decay": log_decay, **own}
    if own["log_decay"] is not None and options.pop("no_decay", False):
        del own["log_decay"]
    return getattr(hla, op)(q, k, v, form=form, chunk_size=CHUNK, **own, **options)


def first_within_reach(form: str, token: int) -> int:
    """The first token that a bad value at `token` may spoil."""
    return {"recurrent": token, "parallel": 0}.get(form, token // CHUNK * CHUNK)


def assert_same(out: Any, clean: Any, where: Any, label: str) -> None:
    """Equal in the places `where` (*batch, T) marks."""
    size = np.abs(clean).max(axis=-1, keepdims=True)
    apart = np.abs(out - clean) <= 1e-11 * np.maximum(size, 1.0)  # False for NaN
    assert bool(apart.all(axis=-1)[where].all()), label


def everywhere(value: bool = True) -> Any:
    return np.full((BATCH, HEADS, TOKENS), value)


@named
@in_every_form
def test_bad_values_spoil_no_earlier_chunk_and_no_other_entry(lib: Any, name: str, form: str) -> None:
    arrays = draw()
    cases = (("q", np.nan, 7), ("k", np.inf, 7), ("v", np.nan, 0), ("v", -np.inf, TOKENS - 1), ("k", np.nan, 11))
    for no_decay in (False, True):
        clean = lib.numpy(call(lib, name, arrays, form, no_decay=no_decay))
        for which, value, token in cases if no_decay else (*cases, ("log_decay", np.nan, 7)):
            out = lib.numpy(call(lib, name, spoil(arrays, which, token, value), form, no_decay=no_decay))
            safe = everywhere()
            safe[(*SPOILT, slice(first_within_reach(form, token), None))] = False
            assert_same(out, clean, safe, f"{name}, {form}, {value} in {which} at {token}")


@named
@in_every_form
def test_bad_values_do_not_vanish(lib: Any, name: str, form: str) -> None:
    """They show at their own token; those of k and v, which the state keeps, at all later ones too.

    Also with resets and packed boundaries elsewhere, where sums are selected instead of multiplied by zero.
    """
    arrays = draw()
    token = 7
    resets = (*arrays[:3], np.array(arrays[3]))
    resets[3][..., 3] = -np.inf
    ids = np.asarray([0] * 3 + [1] * (TOKENS - 3))
    for inputs, options in ((arrays, {}), (arrays, {"no_decay": True}), (resets, {}), (arrays, {"segment_ids": ids})):
        for which, value in (("q", np.nan), ("k", np.nan), ("v", np.inf)):
            out = lib.numpy(call(lib, name, spoil(inputs, which, token, value), form, normalize=True, **options))
            bad = ~np.isfinite(out[SPOILT]).all(axis=-1)
            assert bad[token], f"{name}, {form}, {value} in {which}"
            if which != "q":
                assert bad[token:].all(), f"{name}, {form}, {value} in {which}"


@named
@in_every_form
@pytest.mark.parametrize("huge", [False, True])
def test_the_carry_takes_nothing_across_a_packed_boundary(lib: Any, name: str, form: str, huge: bool) -> None:
    """Neither a NaN nor finite values whose products overflow."""
    arrays = draw()
    offsets = np.asarray([0, 3, 10, 12, TOKENS])
    ids = np.repeat(np.arange(4), np.diff(offsets))
    for packed in ({"segment_ids": ids}, {"cu_seqlens": offsets}):
        clean = lib.numpy(call(lib, name, arrays, form, **packed))
        for which, token in (("q", 7), ("k", 7), ("v", 11), ("k", 11), ("v", 1)):
            value = 1e200 if huge else np.nan
            out = lib.numpy(call(lib, name, spoil(arrays, which, token, value), form, **packed))
            sequence = ids[token]
            safe = everywhere()
            safe[SPOILT] = ids != sequence
            if "segment_ids" in packed and form != "recurrent":  # a chunk may hold several sequences
                start = first_within_reach(form, token)
                safe[(*SPOILT, slice(start, TOKENS if form == "parallel" else start + CHUNK))] = False
            else:
                before = np.arange(TOKENS) < token if form == "recurrent" else ids < sequence
                safe[SPOILT] |= before
            label = f"{name}, {form}, {[*packed]}, {value} in {which} at {token}"
            assert_same(out, clean, safe, label)


@named
@in_every_form
def test_the_carry_takes_nothing_across_a_reset(lib: Any, name: str, form: str) -> None:
    """log_decay = −inf drops the state, whatever it holds (as printed, its strict reads are not decayed)."""
    if OPERATORS[name][1].get("definition") == "as_printed":
        return
    arrays = draw()
    arrays[3][..., [9, 12]] = -np.inf
    clean = lib.numpy(call(lib, name, arrays, form))
    cases = [("q", np.nan, 7), ("k", np.nan, 11), ("v", np.nan, 1), ("k", 1e200, 7), ("v", np.inf, 11)]
    if form == "recurrent":  # within a chunk decays are sums of log-decays, and −inf + NaN is no reset
        cases.append(("log_decay", np.nan, 7))
    for which, value, token in cases:
        out = lib.numpy(call(lib, name, spoil(arrays, which, token, value), form))
        reset = 9 if token < 9 else 12
        start = first_within_reach(form, token)
        safe = everywhere()
        stop = {"recurrent": reset, "parallel": TOKENS}.get(form, max(reset, start + CHUNK))
        safe[(*SPOILT, slice(start, stop))] = False
        assert_same(out, clean, safe, f"{name}, {form}, {value} in {which} at {token}")


@named
@in_every_form
def test_states_stay_within_their_entry_and_sequence(lib: Any, name: str, form: str) -> None:
    """Bad tokens spoil the state of their own batch entry and sequence, a bad state its own outputs."""
    arrays = draw()
    _, clean = call(lib, name, arrays, form, return_state=True)
    _, state = call(lib, name, spoil(arrays, "k", 7, np.nan), form, return_state=True)
    for field, x, y in zip(clean._fields, clean, state, strict=True):
        x, y = lib.numpy(x), np.array(lib.numpy(y))
        y[SPOILT] = x[SPOILT]
        assert np.allclose(x, y, rtol=1e-11, atol=1e-11), field
    values = [np.array(lib.numpy(x)) for x in clean]
    for x in values:
        x[SPOILT] = np.nan
    bad = type(clean)(*(lib.asarray(x) for x in values))
    plain = lib.numpy(call(lib, name, arrays, form, initial_state=clean))
    out = lib.numpy(call(lib, name, arrays, form, initial_state=bad))
    safe = everywhere()
    safe[SPOILT] = False
    assert_same(out, plain, safe, f"{name}, {form}")
    assert not np.isfinite(out[SPOILT]).any()
    # Packed: the third of four sequences starts from the bad state, and the second holds a bad token.
    offsets = np.asarray([0, 3, 10, 12, TOKENS])
    packed = [np.stack([np.array(lib.numpy(x))] * 4) for x in clean]
    good = type(clean)(*(lib.asarray(x) for x in packed))
    options = {"cu_seqlens": offsets, "return_state": True}
    plain_out, plain_state = call(lib, name, arrays, form, initial_state=good, **options)
    for x in packed:
        x[(2, *SPOILT)] = np.nan
    bad = type(clean)(*(lib.asarray(x) for x in packed))
    out, state = call(lib, name, spoil(arrays, "v", 3, np.nan), form, initial_state=bad, **options)
    safe = everywhere()
    safe[(*SPOILT, slice(3, 12))] = False
    assert_same(lib.numpy(out), lib.numpy(plain_out), safe, f"{name}, {form}, packed")
    for field, x, y in zip(state._fields, plain_state, state, strict=True):
        x, y = lib.numpy(x), np.array(lib.numpy(y))
        for n in (1, 2):
            y[(n, *SPOILT)] = x[(n, *SPOILT)]
        assert np.allclose(x, y, rtol=1e-11, atol=1e-11), f"{field}, packed"


@pytest.mark.parametrize("name", ["linear_attention", "hla2", "ahla", "hla3", "order 4"])
@in_every_form
def test_a_reset_drops_a_bad_initial_state(lib: Any, name: str, form: str) -> None:
    arrays = draw()
    arrays[3][..., 0] = -np.inf
    _, clean = call(lib, name, arrays, form, return_state=True)
    bad = type(clean)(*(lib.asarray(np.full(x.shape, np.nan)) for x in clean))
    plain, last = call(lib, name, arrays, form, return_state=True)
    out, state = call(lib, name, arrays, form, initial_state=bad, return_state=True)
    assert_same(lib.numpy(out), lib.numpy(plain), everywhere(), f"{name}, {form}")
    for x, y in zip(last, state, strict=True):
        assert np.allclose(lib.numpy(x), lib.numpy(y), rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("op", ["linear_attention", "hla2", "ahla", "hla3"])
@pytest.mark.parametrize("form", ["chunkwise", "parallel"])
def test_bidirectional_operators(lib: Any, op: str, form: str) -> None:
    """Other batch entries never; other packed sequences not by way of the carry."""
    arrays = draw()
    offsets = np.asarray([0, 3, 10, 12, TOKENS])
    ids = np.repeat(np.arange(4), np.diff(offsets))
    for packed in ({}, {"segment_ids": ids}, {"cu_seqlens": offsets}):
        options: dict[str, Any] = {"mask": "none", "form": form, "chunk_size": CHUNK}
        options |= {n: lib.asarray(x) for n, x in packed.items()}
        clean = lib.numpy(getattr(hla, op)(*(lib.asarray(x) for x in arrays[:3]), **options))
        for which, token in itertools.product(("q", "k", "v"), (1, 7, 11)):
            bad = spoil(arrays, which, token, np.nan)
            out = lib.numpy(getattr(hla, op)(*(lib.asarray(x) for x in bad[:3]), **options))
            safe = everywhere()
            safe[SPOILT] = ids != ids[token] if packed else False
            if "segment_ids" in packed:  # its chunk counted from the left, and from the right
                start, stop = token // CHUNK * CHUNK, TOKENS - (TOKENS - 1 - token) // CHUNK * CHUNK
                near = slice(min(start, stop - CHUNK), max(start + CHUNK, stop)) if form == "chunkwise" else slice(None)
                safe[(*SPOILT, near)] = False
            assert_same(out, clean, safe, f"{op}, {form}, {[*packed]}, {which} at {token}")


@named
@in_every_form
def test_gradients_stay_within_their_entry(lib: Any, name: str, form: str) -> None:
    """Pulling through bad values does not raise, and other batch entries get their own gradients."""
    op, own = OPERATORS[name]
    arrays = draw()
    do = lib.asarray(np.random.default_rng(32).normal(size=(BATCH, HEADS, TOKENS, DV)))

    def gradients(arrays: Any) -> Any:
        q, k, v, log_decay = (lib.asarray(x) for x in arrays)
        options = {**own, "log_decay": log_decay, "form": form, "chunk_size": CHUNK, "return_state": True}
        (_, state), pull = hla.vjp(op, q, k, v, **options)
        return pull(do, state)

    clean = gradients(arrays)
    for which in ("q", "k", "v", "log_decay"):
        found = gradients(spoil(arrays, which, 7, np.nan))
        for label in ("q", "k", "v", "log_decay"):
            x, y = lib.numpy(getattr(clean, label)), np.array(lib.numpy(getattr(found, label)))
            y[SPOILT] = x[SPOILT]
            assert np.allclose(x, y, rtol=1e-9, atol=1e-9), f"{label} with NaN in {which}"


@named
def test_gradients_under_the_mask(lib: Any, name: str) -> None:
    """Skipped tokens may hold anything: their gradients are 0, the others are those without them."""
    op, own = OPERATORS[name]
    arrays = draw()
    mask = np.random.default_rng(33).random((BATCH, HEADS, TOKENS)) < 0.7
    do = np.random.default_rng(32).normal(size=(BATCH, HEADS, TOKENS, DV))

    def gradients(filling: float) -> Any:
        copies = [np.array(x) for x in (*arrays, do)]
        for x in copies:
            x[~mask] = filling
        copies[3][~mask] = np.nan if np.isnan(filling) else -1.0
        q, k, v, log_decay, d = (lib.asarray(x) for x in copies)
        options = {**own, "log_decay": log_decay, "token_mask": lib.asarray(mask), "normalize": True}
        out, pull = hla.vjp(op, q, k, v, chunk_size=CHUNK, **options)
        assert not lib.numpy(out)[~mask].any()
        return pull(d)

    clean, found = gradients(0.0), gradients(np.nan)
    for label in ("q", "k", "v", "log_decay"):
        x, y = lib.numpy(getattr(clean, label)), lib.numpy(getattr(found, label))
        assert np.isfinite(x).all(), label
        assert np.array_equal(x, y), label
        assert not y[~mask].any(), label


def test_steps_with_bad_values(lib: Any) -> None:
    """One token: other batch entries keep their state, and a reset brings a spoilt one back."""
    arrays = draw()
    _, state = call(lib, "hla3", arrays, "chunkwise", return_state=True)
    q, k, v, _ = (x[..., 3, :] if x.ndim == 4 else x for x in arrays)
    bad = np.array(k)
    bad[(*SPOILT, 0)] = np.nan
    tokens = [lib.asarray(x) for x in (q, k, v)]
    out, good = hla.step(state, *tokens)
    spoilt_out, spoilt = hla.step(state, tokens[0], lib.asarray(bad), tokens[2])
    for x, y in zip((out, *good), (spoilt_out, *spoilt), strict=True):
        x, y = lib.numpy(x), np.array(lib.numpy(y))
        assert not np.isfinite(y[SPOILT]).all()
        y[SPOILT] = x[SPOILT]
        assert np.array_equal(x, y)
    reset = lib.asarray(np.full((BATCH, HEADS), -np.inf))
    for x, y in zip(hla.step(spoilt, *tokens, log_decay=reset), hla.step(good, *tokens, log_decay=reset), strict=True):
        for one, other in zip(*(z if isinstance(z, tuple) else (z,) for z in (x, y)), strict=True):
            assert np.array_equal(lib.numpy(one), lib.numpy(other))

"""`hla.nn.flax`: any split, any padding and any packing give what each sequence gives by itself."""

from __future__ import annotations

import copy
import pickle
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import layers
from layers import BATCH, BIDIRECTIONAL, CAUSAL, D_MODEL, MASKS, OFFSETS, TOKENS
from libraries import only

jax: Any = only("jax")
nnx: Any = pytest.importorskip("flax.nnx")
pytest.importorskip("torch")

import jax.numpy as jnp  # noqa: E402

from hla.nn.flax import LayerState  # noqa: E402
from test_nn_flax import allowed, assert_close, assert_same_state, make, parameters, tokens  # noqa: E402

RICH = {**layers.RICH, "operator": ["hla2", "ahla"] * 3}
"""Everything, with two kinds of heads: XLA compiles each by itself."""
PLAIN = {"operator": "hla2", "decay": "forget_gate", "rotary": True}
LIGHT = {**PLAIN, "operator": "linear_attention"}
"""Where the operator does not matter."""


def compiled(layer: Any) -> Any:
    """A call and a scan of steps, which return outputs and states."""

    @jax.jit
    def call(x: Any, state: Any = None, **told: Any) -> Any:
        return layer(x, state, True, **told)

    @jax.jit
    def steps(x: Any, state: Any, mask: Any = None) -> Any:
        def step(state: Any, token: Any) -> Any:
            return layer.step(token[0], state, key_padding_mask=token[1])[::-1]

        state, y = jax.lax.scan(step, state, (x.swapaxes(0, 1), None if mask is None else mask.T))
        return y.swapaxes(0, 1), state

    return call, steps


@pytest.mark.parametrize("options", [CAUSAL[4], *CAUSAL[11::2]], ids=layers.name_of)
def test_steps(options: dict[str, Any]) -> None:
    layer, x = make(options), tokens()
    y, state = compiled(layer)[1](x, layer.init_state(BATCH))
    want = layers.batched(parameters(layer), x, options)
    assert_close(y, want, allowed(layer, options, x) / 2)
    assert state.position.tolist() == [TOKENS] * BATCH


def test_pieces() -> None:
    """Whole, in pieces, an empty one among them, and by steps: outputs and states."""
    layer, x = make(RICH), tokens()[:, :10]  # two equal pieces are one program
    call, steps = compiled(layer)
    whole, last = call(x)
    y, state = call(x[:, :5], layer.init_state(BATCH))
    empty, state = call(x[:, 5:5], state)
    z, end = call(x[:, 5:], state)
    t, final = steps(x[:, 5:], state)
    assert empty.shape == (BATCH, 0, D_MODEL)
    bound = allowed(layer, RICH, x)
    for rest in (z, t):
        assert_close(np.concatenate([y, rest], 1), whole, bound)
    for found in (end, final):
        assert_same_state(found, last)


def test_gradients_through_the_state() -> None:
    """Backwards through a state, and through what it holds besides outputs, as through the whole sequence."""
    layer, x = make(LIGHT), tokens()
    weights = tokens(3)
    graph, given = nnx.split(layer)

    def in_pieces(given: Any, x: Any) -> Any:
        layer = nnx.merge(graph, given)
        y, state = layer(x[:, :9], return_state=True)
        state, z = jax.lax.scan(lambda s, x_t: layer.step(x_t, s)[::-1], state, x[:, 9:].swapaxes(0, 1))
        return (jnp.concatenate([y, z.swapaxes(0, 1)], 1) * weights).sum()

    def as_a_whole(given: Any, x: Any) -> Any:
        return (nnx.merge(graph, given)(x) * weights).sum()

    found, want = (jax.jit(jax.grad(loss, argnums=(0, 1)))(given, x) for loss in (in_pieces, as_a_whole))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        assert jnp.abs(a - b).max() <= 1e-10 * jnp.abs(b).max()


# --- padding ---------------------------------------------------------------------------------------------------------

BOTH = [(RICH, True), (BIDIRECTIONAL[1], False)]


@pytest.mark.parametrize(("options", "causal"), BOTH, ids=["causal", "bidirectional"])
def test_padding(options: dict[str, Any], causal: bool) -> None:
    """Each row is what its tokens are by themselves, NaN in the padding or not."""
    layer = make(options, causal=causal)
    given, call = parameters(layer), jax.jit(lambda x, mask: layer(x, key_padding_mask=mask))
    for where, padding in MASKS.items():
        x, mask = tokens(), np.array(padding, dtype=bool)
        x[mask] = np.nan
        y = np.asarray(call(x, mask))
        assert np.array_equal(y[mask], np.zeros_like(y[mask]))
        for row, skipped, out in zip(x, mask, y, strict=True):
            kept = row[~skipped][None]
            if kept.size:
                want = layers.batched(given, kept, options, causal=causal)
                bound = allowed(layer, options, kept, causal=causal) / 2
                assert_close(out[~skipped][None], want, bound, where)


def test_padding_in_states() -> None:
    """A state after padded tokens is that of the tokens alone, and goes on like it, padded steps between."""
    layer, x = make(RICH), tokens()
    call, steps = compiled(layer)
    mask = np.array([[0, 1, 1, 0, 0, 1, 0, 0, 0, 1, 0], [1, 0, 0, 1, 1, 0, 0, 1, 0, 0, 0]], dtype=bool)
    hidden = np.where(mask[..., None], np.nan, x)
    y, state = call(hidden[:, :6], layer.init_state(BATCH), key_padding_mask=mask[:, :6])
    z, state = steps(hidden[:, 6:], state, mask[:, 6:])
    found = np.concatenate([y, z], 1)
    assert np.array_equal(found[mask], np.zeros_like(found[mask]))
    assert state.position.tolist() == [7, 7]
    kept = x[~mask].reshape(BATCH, 7, D_MODEL)
    want, last = call(kept)
    assert_close(found[~mask].reshape(kept.shape), want, allowed(layer, RICH, kept))
    assert_same_state(state, last)


@pytest.mark.parametrize("causal", [True, False])
def test_gradients_pass_padding_by(causal: bool) -> None:
    layer, x, weights = make(LIGHT if causal else {"operator": "linear_attention"}, causal=causal), tokens(), tokens(3)
    mask = np.array([[1] * 4 + [0] * 7, [0] * 5 + [1] * 4 + [0] * 2], dtype=bool)
    graph, given = nnx.split(layer)

    @jax.jit
    @jax.grad
    def gradient(inputs: Any, weights: Any, mask: Any) -> Any:
        given, x = inputs
        return (nnx.merge(graph, given)(x, key_padding_mask=mask) * weights).sum()

    found = gradient((given, np.where(mask[..., None], np.nan, x)), weights, mask)
    kept = [y[~mask].reshape(BATCH, 7, D_MODEL) for y in (x, weights)]
    want = gradient((given, kept[0]), kept[1], np.zeros((BATCH, 7), dtype=bool))
    assert not np.asarray(found[1])[mask].any()
    assert np.allclose(np.asarray(found[1])[~mask], want[1].reshape(-1, D_MODEL), rtol=1e-10, atol=1e-10)
    for a, b in zip(jax.tree.leaves(found[0]), jax.tree.leaves(want[0]), strict=True):
        assert jnp.abs(a - b).max() <= 1e-10 * jnp.abs(b).max()


# --- packed sequences ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "causal"), BOTH, ids=["causal", "bidirectional"])
def test_packed(options: dict[str, Any], causal: bool) -> None:
    """Offsets that are arguments of the program; two kinds of them."""
    layer, x = make(options, causal=causal), tokens(shape=(1, TOKENS, D_MODEL))
    given, call = parameters(layer), jax.jit(lambda x, offsets: layer(x, cu_seqlens=offsets))
    for offsets in (OFFSETS, [0, 0, 2, 6, 6, 6, 11]):
        y = call(x, np.asarray(offsets))
        for start, stop in pairwise(offsets):
            if start < stop:
                own = x[:, start:stop]
                want = layers.batched(given, own, options, causal=causal)
                assert_close(y[:, start:stop], want, allowed(layer, options, own, causal=causal) / 2)


def test_packed_with_known_offsets() -> None:
    """They are part of the program then; and 32 bits are as good as 64."""
    layer, x = make(LIGHT), tokens(shape=(1, TOKENS, D_MODEL))
    known = jax.jit(lambda x: layer(x, return_state=True, cu_seqlens=np.asarray(OFFSETS)))(x)
    given = jax.jit(lambda x, n: layer(x, return_state=True, cu_seqlens=n))(x, jnp.asarray(OFFSETS, jnp.int32))
    assert_close(known[0], given[0], allowed(layer, LIGHT, x))
    assert_same_state(known[1], given[1])


def test_packed_states() -> None:
    """States of packed sequences are those of a batch: packed prefill goes on as a batch, and the other way round."""
    layer = make(RICH)
    call, steps = compiled(layer)
    rows = tokens(shape=(3, 9, D_MODEL))
    want, last = call(rows)
    one = np.concatenate([rows[0, :4], rows[2, :7]])[None]
    y, state = call(one, layer.init_state(3), cu_seqlens=np.array([0, 4, 4, 11]))
    assert state.batch == 3
    assert [s.shape for s in state.arrays()] == [s.shape for s in layer.init_state(3).arrays()]
    assert state.position.tolist() == [4, 0, 7]
    # the rest: two tokens of the first, one of the third, all but one of the second, packed; then one token each
    rest = np.concatenate([rows[0, 4:6], rows[1, 0:8], rows[2, 7:8]])[None]
    z, state = call(rest, state, cu_seqlens=np.array([0, 2, 10, 11]))
    assert state.position.tolist() == [6, 8, 8]
    places = [6, 8, 8]
    end, state = steps(rows[np.arange(3), places][:, None], state)
    bound = allowed(layer, RICH, rows)
    for found, row, part in (
        (y[0, 0:4], 0, slice(0, 4)),
        (y[0, 4:11], 2, slice(0, 7)),
        (z[0, 0:2], 0, slice(4, 6)),
        (z[0, 2:10], 1, slice(0, 8)),
        (z[0, 10:11], 2, slice(7, 8)),
        *((end[n, 0], n, place) for n, place in enumerate(places)),
    ):
        assert_close(found, want[row, part], bound[row, part])
    whole = jnp.asarray([1, 2])
    assert_same_state(state.reorder(whole), last.reorder(whole))


def test_no_packed_sequences() -> None:
    layer = make(LIGHT)
    x = jnp.zeros((1, 0, D_MODEL))
    y, state = jax.jit(lambda x: layer(x, return_state=True, cu_seqlens=jnp.asarray([0])))(x)
    assert y.shape == x.shape
    assert state.batch == 0


# --- states ----------------------------------------------------------------------------------------------------------


def test_rows_are_independent() -> None:
    """No row of a batch reaches another; a state's entries may be taken in any order."""
    layer, x = make(PLAIN), tokens(shape=(3, TOKENS, D_MODEL))
    call, steps = compiled(layer)
    other = x.copy()
    other[1] = tokens(4, shape=x.shape[1:])
    (y, state), (z, other_state) = call(x), call(other)
    keep = jnp.asarray([0, 2])
    assert np.array_equal(y[keep], z[keep])
    assert not np.array_equal(y[1], z[1])
    assert_same_state(state.reorder(keep), other_state.reorder(keep), 0.0)
    beams = np.array([1, 1, 0])
    found, _ = steps(x[beams, 3:4], state.reorder(jnp.asarray(beams)))
    want, _ = steps(x[:, 3:4], state)
    assert np.allclose(found, want[beams], rtol=1e-12, atol=1e-12)


def test_states_survive_copies() -> None:
    layer, x = make(LIGHT), tokens()
    call, steps = compiled(layer)
    _, state = call(x)
    want, _ = steps(x[:, :1], state)
    on_the_host = state.map(np.asarray)
    assert {type(s) for s in on_the_host.arrays()} == {np.ndarray}
    for again in (copy.deepcopy(state), pickle.loads(pickle.dumps(state)), on_the_host):
        assert isinstance(again, LayerState)
        assert np.array_equal(steps(x[:, :1], again)[0], want)
    assert np.array_equal(layer.step(x[:, 0], on_the_host)[0], layer.step(x[:, 0], state)[0])


def test_states_cut_from_the_graph() -> None:
    layer, x = make(LIGHT), tokens()

    @jax.jit
    @jax.grad
    def gradient(first: Any, cut: Any) -> Any:
        _, state = layer(first, return_state=True)
        kept = jax.tree.map(lambda s: jnp.where(cut, jax.lax.stop_gradient(s), s), state)
        return layer.step(x[:, 9], kept)[0].sum()

    assert gradient(x[:, :9], False).any()
    assert not gradient(x[:, :9], True).any()

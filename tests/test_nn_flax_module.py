"""`hla.nn.flax` among the rest of Flax and JAX: transformations, saving, copies, stacks of layers, training."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from layers import BATCH, D_MODEL, TOKENS
from libraries import only

jax: Any = only("jax")
nnx: Any = pytest.importorskip("flax.nnx")
optax: Any = pytest.importorskip("optax")
pytest.importorskip("torch")

import jax.numpy as jnp  # noqa: E402

from hla.nn.flax import HigherOrderAttention, load_torch, to_torch  # noqa: E402
from test_nn_flax import make, tokens  # noqa: E402
from test_nn_flax_streams import LIGHT, RICH  # noqa: E402


def assert_equal(found: Any, want: Any, bound: float = 1e-12) -> None:
    """The same computation, maybe with sums in another order."""
    assert jax.tree.structure(found) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape
        assert np.abs(a - b).max(initial=0.0) <= bound * max(np.abs(b).max(initial=0.0), 1.0)


# --- saving and copying ----------------------------------------------------------------------------------------------


def test_split_and_merge() -> None:
    layer, x = make(RICH), tokens()
    graph, state = nnx.split(layer)
    want = jax.jit(layer)(x)
    again = nnx.merge(graph, jax.tree.map(np.asarray, state))
    assert_equal(jax.jit(again)(x), want)
    fresh = HigherOrderAttention(D_MODEL, 6, head_dim=8, value_dim=7, param_dtype="float64", rngs=nnx.Rngs(1), **RICH)
    assert nnx.graphdef(fresh) == graph, "equal options are equal programs"
    nnx.update(fresh, nnx.to_pure_dict(nnx.state(layer)))
    assert_equal(to_torch(fresh), to_torch(layer), 0.0)


def test_copies() -> None:
    layer = make({**RICH, "dropout": 0.1})
    for again in (copy.deepcopy(layer), nnx.clone(layer), pickle.loads(pickle.dumps(layer))):
        assert_equal(to_torch(again), to_torch(layer), 0.0)
        assert again.options == layer.options
        load_torch(again, {name: 0 * p for name, p in to_torch(layer).items()})
    assert to_torch(layer)["q_proj.weight"].any()


def test_shapes_before_parameters() -> None:
    """A layer may be made without memory, and be filled from a checkpoint."""
    layer = make(LIGHT)
    told = {"head_dim": 8, "value_dim": 7, "param_dtype": "float64", **LIGHT}
    empty = nnx.eval_shape(lambda: HigherOrderAttention(D_MODEL, 6, rngs=nnx.Rngs(0), **told))
    graph, shapes = nnx.split(empty)
    assert {type(x) for x in jax.tree.leaves(shapes)} == {jax.ShapeDtypeStruct}
    assert empty.state_bytes(2) == layer.state_bytes(2)
    y = jax.eval_shape(lambda s, x: nnx.merge(graph, s)(x), shapes, tokens())
    assert y.shape == (BATCH, TOKENS, D_MODEL)
    full = nnx.merge(graph, nnx.state(layer))
    assert_equal(to_torch(full), to_torch(layer), 0.0)


# --- transformations -------------------------------------------------------------------------------------------------


def test_jit_traces_once() -> None:
    """A layer is an argument of `nnx.jit`: other weights, tokens and states do not compile again."""
    traced = []

    @nnx.jit
    def call(layer: Any, x: Any, state: Any) -> Any:
        traced.append(x)
        return layer(x, state, return_state=True)

    layer, other, x = make(LIGHT), make(LIGHT), tokens()
    state = layer.init_state(BATCH)
    for _ in range(2):
        y, state = call(layer, x, state)
    load_torch(other, {name: p + 0.1 for name, p in to_torch(layer).items()})
    z, _ = call(other, x, state)
    assert len(traced) == 1
    assert not np.array_equal(y, z)
    assert state.position.tolist() == [2 * TOKENS] * BATCH


def test_donated_states() -> None:
    layer, x = make(LIGHT), tokens()
    step = jax.jit(layer.step, donate_argnums=1)
    state = layer.init_state(BATCH)
    kept = state.map(jnp.copy)
    y, after = step(x[:, 0], state)
    assert all(s.is_deleted() for s in state.arrays() if s.size)
    assert_equal((y, after), step(x[:, 0], kept))


def test_vmap() -> None:
    """Over tokens, over states, and over layers."""
    layer, x = make(LIGHT), tokens(shape=(3, BATCH, TOKENS, D_MODEL))
    call = jax.jit(lambda x: layer(x, return_state=True))
    y, states = jax.jit(jax.vmap(call))(x)
    for n in range(3):
        assert_equal((y[n], states.map(lambda s, n=n: s[n])), call(x[n]))
    z, _ = jax.jit(jax.vmap(layer.step))(x[:, :, 0], states)
    want, _ = jax.jit(layer.step)(x[1, :, 0], states.map(lambda s: s[1]))
    assert_equal(z[1], want)


def test_gradients_per_example() -> None:
    layer, x = make(LIGHT), tokens()
    graph, weights = nnx.split(layer)

    def loss(weights: Any, row: Any) -> Any:
        return jnp.square(nnx.merge(graph, weights)(row[None])).sum()

    found = jax.jit(jax.vmap(jax.grad(loss), in_axes=(None, 0)))(weights, x)
    one = jax.jit(jax.grad(loss))
    for row in range(BATCH):
        assert_equal(jax.tree.map(lambda g, row=row: g[row], found), one(weights, x[row]), 1e-10)


def test_remat() -> None:
    """With dropout, which has to be the same in the second forward pass."""
    layer, x = make({**LIGHT, "dropout": 0.2}), tokens()

    def gradient(call: Any) -> Any:
        def loss(layer: Any, x: Any) -> Any:
            return jnp.square(call(layer, x)).sum()

        return nnx.jit(nnx.grad(loss))(nnx.clone(layer), x)

    def call(layer: Any, x: Any) -> Any:
        return layer(x)

    assert_equal(gradient(nnx.remat(call)), gradient(call))


def test_gradients_of_gradients() -> None:
    layer, x, along = make(LIGHT), jnp.asarray(tokens()), jnp.asarray(tokens(2))
    slope = jax.grad(lambda x: jnp.square(layer(x)).sum())
    found = jax.jit(lambda x: jax.jvp(slope, (x,), (along,))[1])(x)
    first = jax.jit(slope)

    def differences(step: float) -> Any:
        return (first(x + step * along) - first(x - step * along)) / (2 * step)

    coarse, fine = differences(2e-5), differences(1e-5)
    allowed = np.abs(coarse - fine).max()  # three times the truncation of the fine one
    assert allowed < 1e-5 * np.abs(fine).max()
    assert np.abs(found - fine).max() <= allowed


SHARDED = """
import re
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from flax import nnx
from hla.nn.flax import HigherOrderAttention
jax.config.update("jax_disable_most_optimizations", True)
layer = HigherOrderAttention(12, 2, operator="linear_attention", rotary=True, rngs=nnx.Rngs(0))
graph, weights = nnx.split(layer)
x = np.random.default_rng(0).normal(size=(4, 7, 12)).astype(np.float32)
mask = np.arange(7) < np.array([[3], [0], [2], [0]])

@jax.jit
def call(weights, x, mask):
    return nnx.merge(graph, weights)(x, return_state=True, key_padding_mask=mask)

@jax.jit
def step(weights, x_t, state):
    return nnx.merge(graph, weights).step(x_t, state)

def loss(weights, x):
    return jnp.square(nnx.merge(graph, weights)(x)).sum()

want = call(weights, x, mask)
want_grad = jax.jit(jax.grad(loss))(weights, x)
for kind in (AxisType.Auto, AxisType.Explicit):
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        whole, rows = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("rows",)))
        own = jax.device_put(weights, whole)
        x_rows, mask_rows = jax.device_put((x, mask), rows)
        y, state = call(own, x_rows, mask_rows)
        assert all(z.sharding.spec[0] == "rows" for z in (y, *state.arrays()))
        for program in (call.lower(own, x_rows, mask_rows), step.lower(own, x_rows[:, 0], state)):
            assert not re.search("all-|collective", program.compile().as_text())
        for a, b in zip(jax.tree.leaves((y, state)), jax.tree.leaves(want)):
            assert np.allclose(a, b, rtol=1e-5, atol=1e-5)
        for a, b in zip(jax.tree.leaves(jax.jit(jax.grad(loss))(own, x_rows)), jax.tree.leaves(want_grad)):
            assert np.allclose(a, b, rtol=1e-4, atol=1e-4)
"""


def test_rows_on_several_devices() -> None:
    """A batch spread over two devices: nothing is exchanged on the way there, with either kind of axes."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    subprocess.run([sys.executable, "-c", SHARDED], check=True, timeout=300, env={**os.environ, "XLA_FLAGS": flags})


class Stack(nnx.Module):
    """Layers as one scan, each with a state of its own."""

    def __init__(self, depth: int, rngs: Any) -> None:
        self.depth = depth

        @nnx.split_rngs(splits=depth)
        @nnx.vmap(in_axes=0, out_axes=0)
        def made(rngs: Any) -> Any:
            return HigherOrderAttention(D_MODEL, 2, head_dim=4, param_dtype="float64", rngs=rngs, **LIGHT)

        self.layers = made(rngs)

    def __call__(self, x: Any) -> Any:
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=(nnx.Carry, 0))
        def forward(layer: Any, x: Any) -> Any:
            y, state = layer(x, return_state=True)
            return x + y, state

        return forward(self.layers, x)


def test_layers_in_a_scan() -> None:
    stack, x = Stack(3, nnx.Rngs(0)), tokens()
    y, states = nnx.jit(lambda stack, x: stack(x))(stack, x)
    graph, weights = nnx.split(stack.layers)
    want = x
    for n in range(3):
        layer = nnx.merge(graph, jax.tree.map(lambda w, n=n: w[n], weights))
        out, state = jax.jit(lambda x, layer=layer: layer(x, return_state=True))(want)
        assert_equal(jax.tree.map(lambda s, n=n: s[n], states), state)
        want = want + out
    assert_equal(y, want)
    assert not np.array_equal(weights.q_proj.kernel[0], weights.q_proj.kernel[1])


# --- training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{"dropout": 0.05}, {"operator": ["ahla", "linear_attention"], "decay": "learned"}], ids=str
)
def test_training_in_bfloat16(options: dict[str, Any]) -> None:
    """Nothing becomes NaN, and the loss falls to less than half: which token comes, two after an earlier one."""

    class Model(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.embed = nnx.Embed(8, 16, dtype=jnp.bfloat16, param_dtype=jnp.float32, rngs=rngs)
            self.layer = HigherOrderAttention(16, 2, dtype=jnp.bfloat16, rngs=rngs, **options)
            self.norm = nnx.LayerNorm(16, param_dtype=jnp.float32, rngs=rngs)
            self.head = nnx.Linear(16, 8, param_dtype=jnp.float32, rngs=rngs)

        def __call__(self, text: Any) -> Any:
            x = self.embed(text)
            return self.head(self.norm((x + self.layer(x)).astype(jnp.float32)))

    def loss(model: Any, text: Any) -> Any:
        logits = model(text)[:, 2:]
        return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, :-2]).mean()

    @nnx.jit
    def train(model: Any, optimizer: Any, text: Any) -> Any:
        found, gradients = nnx.value_and_grad(loss)(model, text)
        optimizer.update(model, gradients)
        return found

    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(2e-2), wrt=nnx.Param)
    rng = np.random.default_rng(0)
    losses = [float(train(model, optimizer, rng.integers(8, size=(4, 32)))) for _ in range(80)]
    weights = jax.tree.leaves(nnx.state(model, nnx.Param))
    assert all(p.dtype == jnp.float32 and jnp.isfinite(p).all() for p in weights)
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5]), losses[::8]


def test_long_sequences_at_the_start() -> None:
    """The defaults at 1024 tokens in bfloat16: outputs and gradients are finite and of the size of the inputs."""
    layer = HigherOrderAttention(16, 1, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    x = tokens(shape=(1, 1024, 16)).astype(np.float32)

    def loss(layer: Any, x: Any) -> Any:
        y = layer(x).astype(jnp.float32)
        return jnp.square(y).mean(), y

    (_, y), gradients = nnx.jit(nnx.value_and_grad(loss, has_aux=True))(layer, x)
    assert 0.1 < float(y.std()) < 2
    assert all(jnp.isfinite(g).all() for g in jax.tree.leaves(gradients))
    late = y[:, -100:].std() / y[:, 100:200].std()
    assert 0.5 < float(late) < 2, "the output's size does not grow with the sequence"


# --- imports ---------------------------------------------------------------------------------------------------------


def test_imports() -> None:
    """Without PyTorch, and in 32 bits: a layer, a call, a step."""
    script = """
import sys
import jax.numpy as jnp
from flax import nnx
from hla.nn.flax import HigherOrderAttention
layer = HigherOrderAttention(8, 2, rngs=nnx.Rngs(0))
y, state = layer(jnp.ones((1, 3, 8)), return_state=True)
y, state = layer.step(jnp.ones((1, 8)), state)
assert {x.dtype.name for x in state.arrays()} == {"float32", "int32"}
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True, timeout=300)

"""`hla.nn.flax`: with the same weights it is the layer of `hla.nn.torch` in outputs, gradients, steps and states.

XLA needs seconds for the gradients of one configuration: they are those of nine, in which every choice is made. Of the
others every second one is called here, the rest by steps in tests/test_nn_flax_streams.py.

Tolerance. For outputs that of tests/layers.py, twice, as two evaluations are compared. For gradients the same model:
the way back rounds about twice as often as the way there, so n is three times as large, and how far they move with
their inputs is measured, on PyTorch's, likewise.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import budget
import hla
import layers
from layers import BATCH, BIDIRECTIONAL, CAUSAL, D_MODEL, DV, HEADS, RICH, TOKENS, D
from libraries import only

jax: Any = only("jax")
nnx: Any = pytest.importorskip("flax.nnx")
torch: Any = pytest.importorskip("torch")

import jax.numpy as jnp  # noqa: E402

import hla.nn.torch  # noqa: E402
from hla.nn.flax import HigherOrderAttention, HigherOrderOperator, from_torch, load_torch, to_torch  # noqa: E402

FULL, CALLED = [*CAUSAL[:7], *CAUSAL[8:10]], [CAUSAL[7], *CAUSAL[10::2]]
BOTH = [(options, True) for options in FULL] + [(options, False) for options in BIDIRECTIONAL]
NAMES = [layers.name_of(options) + ("" if causal else "-bidirectional") for options, causal in BOTH]
UNIT = budget.UNIT["float64"]
SIZES = {"head_dim": D, "value_dim": DV}


def make(options: dict[str, Any], *, causal: bool = True, dtype: Any = None, param_dtype: Any = "float64") -> Any:
    """A layer whose parameters are all drawn at random, the biases and norms included."""
    told = {
        "d_model": D_MODEL,
        "num_heads": HEADS,
        **SIZES,
        "causal": causal,
        "dtype": dtype,
        "param_dtype": param_dtype,
        **options,
    }
    layer = HigherOrderAttention(rngs=nnx.Rngs(5), **told)
    rng = np.random.default_rng(5)
    drawn = {}
    for name, p in to_torch(layer).items():
        noise = rng.normal(size=p.shape)
        if "norm" in name:
            drawn[name] = p + 0.3 * noise
        elif "bias" in name:
            drawn[name] = p + 0.5 * noise
        else:
            drawn[name] = 0.5 * noise if "decay" in name else 1.5 * p
    load_torch(layer, drawn)
    return layer


def parameters(layer: Any) -> dict[str, Any]:
    return {name: p.astype(np.float64) for name, p in to_torch(layer).items()}


def tokens(seed: int = 7, shape: tuple[int, ...] = (BATCH, TOKENS, D_MODEL)) -> Any:
    return np.random.default_rng(seed).normal(size=shape)


def by_name(state: Any) -> dict[str, Any]:
    """Arrays of a state of parameters or gradients, by the names of PyTorch, in its shapes."""
    found = {}
    for path, p in nnx.to_flat_state(state):
        x = np.asarray(p[...])
        found[".".join(path).replace("kernel", "weight")] = x.T if path[-1] == "kernel" else x
    return found


def assert_close(out: Any, want: Any, allowed: Any, label: str = "") -> None:
    """(…, T, d_model) within `allowed` (…, T)."""
    apart = np.abs(np.asarray(out, dtype=np.float64) - np.asarray(want, dtype=np.float64)).max(-1)
    assert apart.shape == np.broadcast_shapes(apart.shape, np.shape(allowed))
    assert (apart <= allowed).all(), f"{label}: {(apart / allowed).max():.3g} times what is allowed"


def allowed(layer: Any, options: dict[str, Any], x: Any, *, causal: bool = True) -> Any:
    """(B, T): twice the error of one evaluation, as two are compared."""
    moved = layers.sensitivity(parameters(layer), x, options, causal=causal)
    return 2 * moved * layers.tolerance(options, x.shape[1], UNIT)


def assert_same_state(found: Any, want: Any, bound: float = 2 * 30 * layers.tolerance(RICH, TOKENS, UNIT)) -> None:
    """All arrays, relative to the largest entry: of degree 6 at most in q, k, v, which a few times a change moves."""
    found, want = ([np.asarray(x) for x in jax.tree.leaves(s)] for s in (found, want))
    assert len(found) == len(want)
    for a, b in zip(found, want, strict=True):
        assert a.shape == b.shape
        assert a.dtype.kind == b.dtype.kind
        if b.size:
            assert np.abs(a - b).max() <= bound * np.abs(b).max()


# --- the same as in PyTorch ------------------------------------------------------------------------------------------


def in_torch(given: dict[str, Any], options: dict[str, Any], causal: bool) -> Any:
    layer = hla.nn.torch.HigherOrderAttention(D_MODEL, HEADS, causal=causal, dtype=torch.float64, **SIZES, **options)
    layer.load_state_dict({name: torch.from_numpy(x) for name, x in given.items()})
    return layer


def torch_gradients(
    given: dict[str, Any], x: Any, cotangent: Any, options: dict[str, Any], causal: bool
) -> dict[str, Any]:
    layer, x = in_torch(given, options, causal), torch.from_numpy(x).requires_grad_()
    (layer(x) * torch.from_numpy(cotangent)).sum().backward()
    return {name: p.grad.numpy() for name, p in layer.named_parameters()} | {"x": x.grad.numpy()}


def gradient_tolerance(
    want: dict[str, Any], given: dict[str, Any], x: Any, cotangent: Any, options: dict[str, Any], causal: bool
) -> dict[str, float]:
    """For each gradient, how far it moves when its inputs are changed at random, per relative change, times λ √(3n) u;
    twice."""
    rng = np.random.default_rng(17)
    step = 1e-7
    moved = {name: np.abs(g).max() for name, g in want.items()}
    for _ in range(3):
        inputs = ({n: p * (1 + step * rng.normal(size=p.shape)) for n, p in given.items()},)
        inputs += tuple(y * (1 + step * rng.normal(size=y.shape)) for y in (x, cotangent))
        for name, g in torch_gradients(*inputs, options, causal).items():
            moved[name] = max(moved[name], np.abs(g - want[name]).max() / step)
    return {name: 2 * 3**0.5 * layers.tolerance(options, TOKENS, UNIT) * size for name, size in moved.items()}


def compare_with_torch(options: dict[str, Any], causal: bool, gradients: bool) -> None:
    layer, x, cotangent = make(options, causal=causal), tokens(), tokens(11)
    given = to_torch(layer)
    graph, weights = nnx.split(layer, nnx.Param)

    def call(weights: Any, x: Any) -> Any:
        layer = nnx.merge(graph, weights)
        return layer(x, return_state=True) if causal else (layer(x), None)

    def loss(weights: Any, x: Any) -> Any:
        y, state = call(weights, x)
        return (y * cotangent).sum(), (y, state)

    if gradients:
        (dp, dx), (y, state) = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(weights, x)
    else:
        y, state = jax.jit(call)(weights, x)
    other = in_torch(given, options, causal)
    bound = allowed(layer, options, x, causal=causal)
    with torch.no_grad():
        want, last = other(torch.from_numpy(x), return_state=True) if causal else (other(torch.from_numpy(x)), None)
    assert np.median(bound) < 1e-11 * want.abs().max(), "these options compare nothing"
    assert_close(y, want, bound, "call")
    if causal:
        assert_same_state(state, last)
    if not gradients:
        return
    found = by_name(dp) | {"x": np.asarray(dx)}
    wanted = torch_gradients(given, x, cotangent, options, causal)
    limit = gradient_tolerance(wanted, given, x, cotangent, options, causal)
    assert found.keys() == wanted.keys()
    for name, g in wanted.items():
        assert found[name].shape == g.shape
        assert limit[name] < 1e-9 * np.abs(g).max(), f"{name}: these gradients prove nothing"
        assert np.abs(found[name] - g).max() <= limit[name], name


@pytest.mark.parametrize("options", CALLED, ids=layers.name_of)
def test_outputs_are_those_of_torch(options: dict[str, Any]) -> None:
    compare_with_torch(options, causal=True, gradients=False)


@pytest.mark.parametrize(("options", "causal"), BOTH, ids=NAMES)
def test_gradients_are_those_of_torch(options: dict[str, Any], causal: bool) -> None:
    """And outputs, and the last state."""
    compare_with_torch(options, causal=causal, gradients=True)


@pytest.mark.parametrize("options", [RICH, CALLED[0]], ids=layers.name_of)
def test_steps_are_those_of_torch(options: dict[str, Any]) -> None:
    layer, x = make(options), tokens()
    other = in_torch(to_torch(layer), options, True)
    bound = allowed(layer, options, x)
    state, last = layer.init_state(BATCH), other.init_state(BATCH)
    step = jax.jit(lambda x_t, state: layer.step(x_t, state))
    for t in range(7):
        y, state = step(x[:, t], state)
        with torch.no_grad():
            want, last = other.step(torch.from_numpy(x[:, t]), last)
        assert_close(y, want, bound[:, t], f"step {t}")
    assert_same_state(state, last)


def test_every_choice_is_compared() -> None:
    def choices(options: dict[str, Any]) -> set[str]:
        numbers = isinstance(options["decay"], list)
        return {f"{name} {'numbers' if numbers and name == 'decay' else options[name]}" for name in layers.CHOICES}

    found = set().union(*map(choices, FULL))
    assert not [x for options in CAUSAL for x in choices(options) if x not in found]


@pytest.mark.parametrize("options", [*CAUSAL[:3], RICH], ids=layers.name_of)
def test_weights_there_and_back(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    module = hla.nn.torch.HigherOrderAttention(D_MODEL, HEADS, **SIZES, dropout=0.1, **options)
    layer = from_torch(module.eval())
    assert layer.options == module.options
    assert layer.dropout.deterministic
    assert not from_torch(module.train()).dropout.deterministic
    carried = to_torch(layer)
    given = module.state_dict()
    assert sorted(carried) == sorted(given)
    for name, x in given.items():
        assert carried[name].dtype == np.float32
        assert np.array_equal(carried[name], x.numpy()), name
    with torch.no_grad():  # of its own: neither shares memory with the other
        for p in module.parameters():
            p.zero_()
    for name, x in to_torch(layer).items():
        assert np.array_equal(carried[name], x)
        x += 1.0
    assert np.array_equal(to_torch(layer)["q_proj.weight"], carried["q_proj.weight"])


def test_weights_in_bfloat16() -> None:
    module = hla.nn.torch.HigherOrderAttention(12, 4, dtype=torch.bfloat16)
    layer = from_torch(module)
    assert layer.q_proj.kernel.dtype == jnp.bfloat16
    for name, x in to_torch(layer).items():
        assert np.array_equal(x, module.state_dict()[name].float().numpy()), name


def test_weights_of_a_whole_module() -> None:
    module = hla.nn.torch.HigherOrderAttention(12, 4)
    layer = HigherOrderAttention(12, 4, rngs=nnx.Rngs(0))
    load_torch(layer, module)
    for name, x in to_torch(layer).items():
        assert np.array_equal(x, module.state_dict()[name].numpy()), name


def test_names_of_parameters() -> None:
    """They are what a saved model holds: a change of them is a change of format."""
    layer = HigherOrderAttention(12, 4, num_kv_heads=2, bias=True, rngs=nnx.Rngs(0))
    shapes = {".".join(path): p.shape for path, p in nnx.to_flat_state(nnx.state(layer))}
    assert shapes == {
        "q_proj.kernel": (12, 12),
        "q_proj.bias": (12,),
        "k_proj.kernel": (12, 6),
        "k_proj.bias": (6,),
        "v_proj.kernel": (12, 6),
        "v_proj.bias": (6,),
        "output_gate.kernel": (12, 12),
        "output_gate.bias": (12,),
        "out_proj.kernel": (12, 12),
        "out_proj.bias": (12,),
        "q_conv.weight": (4, 12),
        "k_conv.weight": (4, 6),
        "v_conv.weight": (4, 6),
        "q_norm.weight": (3,),
        "k_norm.weight": (3,),
        "decay.proj.kernel": (12, 2),
        "decay.bias": (2,),
        "output_norm.weight": (4, 3),
    }


def test_options_of_torch() -> None:
    """The same names, the same order, the same defaults."""
    for name in ("HigherOrderAttention", "HigherOrderOperator"):
        own, other = (inspect.signature(getattr(m, name).__init__).parameters for m in (hla.nn.flax, hla.nn.torch))
        mine = [p for p in own.values() if p.name not in ("dtype", "param_dtype", "rngs")]
        theirs = [p for p in other.values() if p.name not in ("dtype", "device", "process_group")]
        assert [(p.name, p.default, p.kind) for p in mine] == [(p.name, p.default, p.kind) for p in theirs]


# --- other dtypes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "causal"), BOTH[:6:2] + BOTH[-1:], ids=NAMES[:6:2] + NAMES[-1:])
def test_outputs_in_float32(options: dict[str, Any], causal: bool) -> None:
    layer, x = make(options, causal=causal, param_dtype="float32"), tokens().astype(np.float32)
    given, at = parameters(layer), x.astype(np.float64)
    want = layers.batched(given, at, options, causal=causal)
    y = jax.jit(layer)(x)
    assert y.dtype == jnp.float32
    unit = layers.tolerance(options, TOKENS, budget.UNIT["float32"])
    assert_close(y, want, unit * layers.sensitivity(given, at, options, causal=causal))


@pytest.mark.parametrize(("options", "how"), [(CAUSAL[0], "parameters"), (CAUSAL[5], "dtype")], ids=["hla2", "ahla"])
def test_outputs_in_bfloat16(options: dict[str, Any], how: str) -> None:
    """What is rounded to 16 bits: x, W, projections, q, k, v, o, and the output: ten roundings at most in a row.

    A call and steps round in the same places."""
    told = {"dtype": jnp.bfloat16, "param_dtype": "float32"} if how == "dtype" else {"param_dtype": "bfloat16"}
    layer, x = make(options, **told), tokens().astype(np.float32)
    x = jnp.asarray(x, jnp.float32 if how == "dtype" else jnp.bfloat16)
    given, at = parameters(layer), np.asarray(x.astype(np.float64))
    want = layers.batched(given, at, options)

    @jax.jit
    def compute(x: Any) -> Any:
        y, state = layer(x, return_state=True)
        return (
            y,
            state,
            jax.lax.scan(lambda s, x_t: layer.step(x_t, s)[::-1], layer.init_state(BATCH), x.swapaxes(0, 1)),
        )

    y, state, (last, steps) = compute(x)
    bound = budget.LAMBDA * 10**0.5 * budget.UNIT["bfloat16"] * layers.sensitivity(given, at, options)
    for found in (y, steps.swapaxes(0, 1)):
        assert found.dtype == jnp.bfloat16
        assert_close(found, want, bound)
    for s in (state, last):
        assert {a.dtype for a in s.arrays()} == {jnp.dtype("float32"), jnp.dtype("int32")}


def test_dtypes() -> None:
    """As in Flax: `dtype` is that of the computation, by default the common one of x and the parameters."""
    for dtype, param_dtype, given, want in (
        (None, "float32", "bfloat16", "float32"),
        (None, "bfloat16", "float32", "float32"),
        (None, "bfloat16", "bfloat16", "bfloat16"),
        ("bfloat16", "float32", "float32", "bfloat16"),
        ("float32", "bfloat16", "bfloat16", "float32"),
        (None, "float64", "float32", "float64"),
        ("float32", "float64", "float64", "float32"),
    ):
        told = {"operator": "hla2", "rotary": True, "decay": "learned"}
        layer = make(told, dtype=dtype, param_dtype=param_dtype)
        assert {p.dtype.name for p in jax.tree.leaves(nnx.state(layer))} == {param_dtype}
        x = jax.ShapeDtypeStruct((BATCH, TOKENS, D_MODEL), given)
        y, state = jax.eval_shape(lambda x, layer=layer: layer(x, layer.init_state(BATCH), True), x)
        assert y.dtype.name == want, (dtype, param_dtype, given)
        wide = "float64" if want == "float64" else "float32"
        assert {s.dtype.name for s in state.arrays()} == {wide, "int32"}


def test_float16_does_not_overflow_before_the_norm() -> None:
    """Unnormalised HLA₃ grows like t³: past 65504 within these tokens, while the layer's output is of order 1."""
    told = {"operator": "hla3", "decay": None, "conv_size": None, "scale": 1.0}
    layer = HigherOrderAttention(32, 2, dtype="float16", rngs=nnx.Rngs(0), **told)
    x = np.tile(tokens(shape=(1, 3, 32)), (1, 50, 1)).astype(np.float32)
    y = jax.jit(layer)(x)
    assert y.dtype == jnp.float16
    assert jnp.isfinite(y).all()


# --- how it is computed ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how", [{"form": "recurrent"}, {"chunk_size": 3}, {"form": "scan"}, {"backend": ["numpy"]}], ids=str
)
def test_how_it_is_computed_changes_nothing(how: dict[str, Any]) -> None:
    """And it reaches the operator."""
    options = {"operator": "ahla", "decay": "forget_gate", "num_kv_heads": 3}
    layer, other, x = make(options), make({**options, **how}), tokens()
    want = layers.batched(parameters(layer), x, options)
    assert_close(jax.jit(other)(x), want, allowed(layer, options, x) / 2)
    for operator in other.operators:
        told = {name: getattr(operator.options, name) for name in how}
        assert told == {name: tuple(x) if isinstance(x, list) else x for name, x in how.items()}


@pytest.mark.parametrize("decay", ["learned", [1e-50, 1e-60, 1e-70]], ids=str)
def test_decays_that_round_to_zero(decay: Any) -> None:
    """Every token is alone, and nothing becomes NaN."""
    options = {"operator": layers.MIXED, "num_kv_heads": 3, "conv_size": None, "decay": decay}
    layer, x = make(options, param_dtype="float32"), tokens().astype(np.float32)
    if decay == "learned":
        layer.decay.bias[...] = jnp.full(3, -200.0)
    given = parameters(layer)
    allowed = layers.sensitivity(given, x, options) * layers.tolerance(options, TOKENS, budget.UNIT["float32"])
    assert_close(layer(x), layers.batched(given, x, options), allowed)
    if decay == "learned":
        gradients = nnx.jit(nnx.grad(lambda layer: jnp.square(layer(x[:, :5])).sum()))(layer)
        assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradients))


@pytest.mark.parametrize("power", [40, 66])
def test_outputs_as_large_as_after_millions_of_tokens(power: int) -> None:
    """The output norm makes the same of them as of smaller ones; powers of two round nothing."""
    norm = make({"operator": "hla2"}, param_dtype="float32").output_norm
    o, cotangent = (tokens(seed, (3, HEADS, DV)).astype(np.float32) for seed in (1, 2))
    found = []
    for size in (2.0**10, 2.0**power):
        y, pull = jax.vjp(norm, jnp.asarray(o * np.float32(size)))
        found.append((y, pull(cotangent)[0] * size))
    for large, small in zip(found[1], found[0], strict=True):
        np.testing.assert_allclose(large, small, rtol=1e-6, atol=1e-6 * np.abs(small).max())


@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (2, 1), (0, 0)])
def test_empty(shape: tuple[int, int]) -> None:
    layer = make({"operator": "hla2", "rotary": True})
    x = jnp.zeros((*shape, D_MODEL))
    y, state = jax.jit(lambda x: layer(x, return_state=True))(x)
    assert y.shape == x.shape
    assert [s.shape for s in state.arrays()] == [s.shape for s in layer.init_state(shape[0]).arrays()]
    padded = jax.jit(lambda x, mask: layer(x, key_padding_mask=mask))(x, jnp.ones(shape, bool))
    assert np.array_equal(padded, np.zeros_like(x))


# --- dropout ---------------------------------------------------------------------------------------------------------


def test_dropout() -> None:
    """Features of the heads' outputs, in training only; with p they are 0 or 1/(1 − p) times as large."""
    width = HEADS * D_MODEL
    plain = {"qk_norm": None, "conv_size": None, "output_norm": False, "output_gate": False, "decay": 0.9}
    layer = make({"operator": "linear_attention", "dropout": 0.25, "value_dim": D_MODEL, **plain})
    layer.out_proj = nnx.Linear(width, width, use_bias=False, param_dtype="float64", rngs=nnx.Rngs(0))
    layer.out_proj.kernel[...] = jnp.eye(width)
    x, state = jnp.asarray(tokens()), layer.init_state(BATCH)
    want = layer(x, deterministic=True)
    kept = layer(x) / want
    assert np.allclose(kept[kept != 0], 4 / 3)
    assert 0.15 < (kept == 0).mean() < 0.35
    assert not np.array_equal(layer(x), layer(x)), "every call draws anew"
    again = [layer(x, rngs=jax.random.key(3)) for _ in range(2)]
    assert np.array_equal(*again)
    assert (layer.step(x[:, 0], state)[0] == 0).any()
    layer.eval()
    assert np.array_equal(layer(x), want)
    assert not (layer.step(x[:, 0], state)[0] == 0).any()
    assert (layer.step(x[:, 0], state, deterministic=False)[0] == 0).any()
    layer.train()
    assert (layer(x) == 0).any()
    assert np.array_equal(nnx.view(layer, deterministic=True)(x), want)


# --- the module around one operator ----------------------------------------------------------------------------------


@pytest.mark.parametrize("operator", ["hla2", "linear_attention"])
def test_operator_module(operator: str) -> None:
    """It is the public function, streaming included."""
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(np.abs(rng.normal(size=(2, 3, TOKENS, n)))) for n in (D, D, DV))
    told: dict[str, Any] = {"normalize": True, "scale": 0.3, "eps": 0.01, "decay": 0.9, "chunk_size": 4}
    told |= {"ridge": 0.2} if operator == "hla2" else {}
    module = HigherOrderOperator(operator, **told)
    want, want_state = getattr(hla, operator)(q, k, v, **told, return_state=True)
    o, state = module(q, k, v, return_state=True)
    assert np.array_equal(o, want)
    assert all(np.array_equal(a, b) for a, b in zip(state, want_state, strict=True))
    state = module.init_state((2, 3), D, DV, dtype=jnp.float64)
    o, state = module(q[:, :, :9], k[:, :, :9], v[:, :, :9], state, return_state=True)
    pieces = [o]
    for t in range(9, TOKENS):
        o_t, state = module.step(q[:, :, t], k[:, :, t], v[:, :, t], state)
        pieces.append(o_t[:, :, None])
    bound = 5 * (3 * (2 * TOKENS + D + 4)) ** 0.5 * UNIT * float(jnp.abs(want).max()) * 10
    assert float(jnp.abs(jnp.concatenate(pieces, 2) - want).max()) < bound
    assert not jax.tree.leaves(module)


def test_operator_module_takes_what_belongs_to_a_call() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, TOKENS, 3, n))) for n in (D, D, DV))
    log_decay = -jnp.asarray(rng.exponential(size=(2, 3, TOKENS)))
    mask = jnp.asarray(rng.random((2, 1, TOKENS)) < 0.7)
    module = HigherOrderOperator("ahla")
    o = module(q, k, v, log_decay=log_decay, token_mask=mask, axis=-3)
    assert np.array_equal(o, hla.ahla(q, k, v, log_decay=log_decay, token_mask=mask, axis=-3))
    told = {"decay": jnp.asarray([0.5, 0.9, 1.0]), "cu_seqlens": jnp.asarray([0, 4, 4, TOKENS]), "axis": -3}
    o, state = module(q, k, v, **told, return_state=True)
    assert np.array_equal(o, hla.ahla(q, k, v, **told))
    again = module(q, k, v, state, **told)
    assert np.array_equal(again, hla.ahla(q, k, v, **told, initial_state=state))
    bidirectional = HigherOrderOperator("ahla", causal=False)
    assert np.array_equal(bidirectional(q, k, v, axis=-3), hla.ahla(q, k, v, axis=-3, mask="none"))


# --- what the layer says of itself -----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", CAUSAL[::4], ids=layers.name_of)
def test_flops_and_bytes_are_those_of_torch(options: dict[str, Any]) -> None:
    """But for positions, which have 32 bits here."""
    layer = make(options, param_dtype="float32")
    other = hla.nn.torch.HigherOrderAttention(D_MODEL, HEADS, **SIZES, **options)
    assert layer.flops(TOKENS, 3) == other.flops(TOKENS, 3)
    assert layer.state_bytes(3) == other.state_bytes(3) - 3 * 4
    state = layer.init_state(3)
    assert state.nbytes == layer.state_bytes(3) == sum(x.nbytes for x in jax.tree.leaves(state))
    assert state.batch == 3


def test_bytes_of_bidirectional_layers() -> None:
    assert make(BIDIRECTIONAL[0], causal=False).state_bytes(3) == 0


def test_key_only_state_is_stored_once_per_key_value_head() -> None:
    for decay in ("forget_gate", "learned", 0.9, None, layers.NUMBERS[3]):
        layer = make({"operator": "hla2", "num_kv_heads": 3, "decay": decay})
        mask, x = jnp.zeros((BATCH, TOKENS), bool), tokens()
        after = jax.eval_shape(lambda x, layer=layer, mask=mask: layer(x, None, True, key_padding_mask=mask)[1], x)
        for state in (layer.init_state(BATCH), after):
            assert state.operators[0].key_moment.shape == (BATCH, 3, 1, D, D)
            assert state.operators[0].corrected_state.shape == (BATCH, 3, 2, D, DV)


@pytest.mark.parametrize("heads", [1, 7])
def test_decays_at_the_start(heads: int) -> None:
    """γ from the first to the last key/value head, 1 − γ spaced geometrically, 0.97 to 0.999 by default."""
    for low, high in ((0.97, 0.999), (0.5, 0.5), (0.2, 0.9)):
        told: dict[str, Any] = {"param_dtype": "float64", "rngs": nnx.Rngs(0)}
        told |= {} if low == 0.97 else {"decay_range": (low, high)}
        learned = HigherOrderAttention(28, heads, decay="learned", **told)
        gated = HigherOrderAttention(28, heads, decay="forget_gate", **told)
        assert np.array_equal(learned.decay.bias[...], gated.decay.bias[...])
        share = [i / (heads - 1) for i in range(heads)] if heads > 1 else [0.5]
        want = [1 - (1 - low) ** (1 - s) * (1 - high) ** s for s in share]
        assert np.allclose(jax.nn.sigmoid(learned.decay.bias[...]), want, rtol=0, atol=1e-14)
        # and for tokens of unit variance γ stays near: |w·x| is below 0.5 (five standard deviations)
        assert np.abs(tokens(shape=(50, 28)) @ gated.decay.proj.kernel[...]).max() < 0.5


def test_initial_parameters() -> None:
    """Xavier's rule for projections, no biases, norms of 1; as in PyTorch, from other random numbers."""
    layer = HigherOrderAttention(64, 4, num_kv_heads=2, bias=True, rngs=nnx.Rngs(0))
    for name in ("q_proj", "k_proj", "v_proj", "output_gate", "out_proj"):
        projection = getattr(layer, name)
        bound = (6 / (projection.in_features + projection.out_features)) ** 0.5
        assert 0.97 * bound < float(jnp.abs(projection.kernel[...]).max()) <= bound
        assert not projection.bias[...].any()
    convolution = float(jnp.abs(layer.q_conv.weight[...]).max())
    assert 0.97 * 0.5 < convolution <= 0.5
    assert (layer.output_norm.weight[...] == 1).all()
    other = HigherOrderAttention(64, 4, num_kv_heads=2, bias=True, rngs=nnx.Rngs(1))
    assert not np.array_equal(other.q_conv.weight[...], layer.q_conv.weight[...])


@pytest.fixture(autouse=True, scope="module")
def forgotten() -> Iterator[None]:
    """Programs are of no use to other files."""
    yield
    jax.clear_caches()

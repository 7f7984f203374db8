"""`hla.nn.flax`: what contradicts itself is refused, at construction where it can be, and errors say the way out."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import hla
from layers import BATCH, CONTRADICTIONS, D_MODEL, OTHERS, SAME, TOKENS
from libraries import only

jax: Any = only("jax")
nnx: Any = pytest.importorskip("flax.nnx")
torch: Any = pytest.importorskip("torch")

import jax.numpy as jnp  # noqa: E402

import hla.nn.torch  # noqa: E402
from hla.nn.flax import HigherOrderAttention, HigherOrderOperator, from_torch, load_torch, to_torch  # noqa: E402
from test_nn_flax import make, tokens  # noqa: E402

OPTION, SHAPE, DTYPE = hla.OptionError, hla.ShapeError, hla.DTypeError


def refused(kind: Any, says: str, call: Any) -> None:
    with pytest.raises(kind, match=re.escape(says)) as caught:
        call()
    assert re.search(r"got .+\. \S.+\.$", str(caught.value)), "it says what to do"


@pytest.fixture(scope="module")
def layer() -> Any:
    return make({"operator": "hla2"})


# --- construction ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("told", "says"), CONTRADICTIONS, ids=[str(c[0]) for c in CONTRADICTIONS])
def test_construction(told: dict[str, Any], says: str) -> None:
    refused(OPTION, says, lambda: HigherOrderAttention(**{"d_model": 12, "num_heads": 4, "rngs": nnx.Rngs(0), **told}))


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ({"operator": "softmax"}, "operator: expected one of"),
        ({"causal": False, "decay": 0.9}, "decay: expected None with causal=False"),
        ({"decay": 2.0}, "decay: expected a number in (0, 1]"),
    ],
)
def test_construction_of_the_operator(told: dict[str, Any], says: str) -> None:
    refused(OPTION, says, lambda: HigherOrderOperator(**told))


@pytest.mark.parametrize(("backend", "got"), [("zz", "'zz'"), (3, "3"), (["torch", "zz"], "'zz'")], ids=str)
def test_backends_that_there_are_not(backend: Any, got: str) -> None:
    says = f"backend: expected one of cupy, jax, numpy, torch, triton, auto, got {got}. Register it"
    refused(hla.UnknownBackendError, says, lambda: HigherOrderAttention(12, 4, backend=backend, rngs=nnx.Rngs(0)))


@pytest.mark.parametrize("name", ["dtype", "param_dtype"])
@pytest.mark.parametrize("wrong", ["int32", "bool", "complex64", "float8_e4m3fn", "single precision", 3])
def test_dtypes(name: str, wrong: Any) -> None:
    says = f"{name}: expected one of float16, bfloat16, float32, float64"
    refused(DTYPE, says, lambda: HigherOrderAttention(12, 4, **{name: wrong}, rngs=nnx.Rngs(0)))


def test_64_bits_need_to_be_on() -> None:
    with jax.enable_x64(False):
        for name in ("dtype", "param_dtype"):
            says = f"{name}: expected at most 32 bits, got float64. Set jax_enable_x64 first"
            refused(DTYPE, says, lambda n=name: HigherOrderAttention(12, 4, **{n: jnp.float64}, rngs=nnx.Rngs(0)))


def test_rngs() -> None:
    for streams, told, says in (
        ({"params": 0}, {"dropout": 0.1}, "rngs: expected a stream dropout, or a default one, got params. Pass"),
        ({"other": 0}, {"dropout": 0.1}, "rngs: expected a stream params and dropout, or a default one, got other."),
        ({"dropout": 0}, {}, "rngs: expected a stream params, or a default one, got dropout. Pass nnx.Rngs(0)"),
        ({}, {}, "rngs: expected a stream params, or a default one, got none. Pass nnx.Rngs(0)"),
    ):
        refused(OPTION, says, lambda s=streams, t=told: HigherOrderAttention(12, 4, **t, rngs=nnx.Rngs(**s)))
    for streams, dropout in (({"params": 0}, 0.0), ({"params": 0, "dropout": 1}, 0.1), ({"default": 0}, 0.1)):
        HigherOrderAttention(12, 4, dropout=dropout, rngs=nnx.Rngs(**streams))
    refused(DTYPE, "rngs: expected an nnx.Rngs, got int", lambda: HigherOrderAttention(12, 4, rngs=0))
    with pytest.raises(TypeError, match="rngs"):
        HigherOrderAttention(12, 4)
    with pytest.raises(TypeError, match="num_key_heads"):
        HigherOrderAttention(12, 4, num_key_heads=2, rngs=nnx.Rngs(0))


# --- calls -----------------------------------------------------------------------------------------------------------


def test_inputs(layer: Any) -> None:
    x, state = jnp.asarray(tokens()), layer.init_state(BATCH)
    for wrong, kind, says in (
        (x[0], SHAPE, "x: expected shape (B, T, d_model = 13), got (11, 13)"),
        (x[..., :12], SHAPE, "x: expected shape (B, T, d_model = 13), got (2, 11, 12)"),
        (x.astype(int), DTYPE, "x: expected a floating dtype, got int64"),
        (x > 0, DTYPE, "x: expected a floating dtype, got bool"),
        (x.astype(complex), DTYPE, "x: expected a floating dtype, got complex128"),
        (x.tolist(), DTYPE, "x: expected an array of JAX or NumPy, got list"),
        (torch.zeros(x.shape), DTYPE, "x: expected an array of JAX or NumPy, got Tensor"),
        (np.ma.masked_array(tokens()), DTYPE, "x: expected an array of JAX or NumPy, got MaskedArray"),
        (tokens().astype(object), DTYPE, "x: expected an array of JAX or NumPy"),
        (nnx.Param(x), DTYPE, "x: expected an array of JAX or NumPy, got Param"),
    ):
        refused(kind, says, lambda wrong=wrong: layer(wrong))
    refused(SHAPE, "x_t: expected shape (B, d_model = 13)", lambda: layer.step(x, state))
    refused(SHAPE, "x_t: expected shape (B, d_model = 13), got (2, 7)", lambda: layer.step(x[:, 0, :7], state))
    single = make({"operator": "hla2"}, param_dtype="float32")
    refused(DTYPE, "x: expected float32, as the parameters, or fewer bits, got float64", lambda: single(x))
    for given in (jax.jit(lambda x: layer(x[0])), jax.vmap(layer)):  # the same while JAX traces
        refused(SHAPE, "x: expected shape (B, T, d_model = 13), got (11, 13)", lambda given=given: given(x))


def test_masks(layer: Any) -> None:
    x = tokens()
    mask = jnp.zeros((BATCH, TOKENS), bool)
    for wrong, kind, says in (
        (mask.astype(int), DTYPE, "key_padding_mask: expected a bool array, True for padding, got int64"),
        (mask.astype(float), DTYPE, "key_padding_mask: expected a bool array"),
        (mask.tolist(), DTYPE, "key_padding_mask: expected a bool array, True for padding, got list"),
        (mask[:1], SHAPE, "key_padding_mask: expected shape (2, 11), got (1, 11)"),
        (mask[:, :1], SHAPE, "key_padding_mask: expected shape (2, 11), got (2, 1)"),
        (np.zeros(TOKENS, bool), SHAPE, "key_padding_mask: expected shape (2, 11), got (11,)"),
    ):
        refused(kind, says, lambda wrong=wrong: layer(x, key_padding_mask=wrong))
    state = layer.init_state(BATCH)
    refused(SHAPE, "expected shape (2,), got (1,)", lambda: layer.step(x[:, 0], state, key_padding_mask=mask[:1, 0]))
    both = {"key_padding_mask": mask[:1], "cu_seqlens": jnp.asarray([0, TOKENS])}
    refused(OPTION, "key_padding_mask: expected none beside cu_seqlens", lambda: layer(x[:1], **both))


@pytest.mark.parametrize("library", [np, jnp])
@pytest.mark.parametrize(
    ("offsets", "kind", "says"),
    [
        ([0, 5], OPTION, "cu_seqlens: expected offsets from 0 to T = 11, got 0 … 5"),
        ([1, 11], OPTION, "cu_seqlens: expected offsets from 0 to T = 11"),
        ([0, 7, 4, 11], OPTION, "cu_seqlens: expected non-decreasing offsets"),
        ([[0, 11]], SHAPE, "cu_seqlens: expected shape (N + 1,), got (1, 2)"),
        ([], DTYPE, "cu_seqlens: expected an integer array"),
        ([0.0, 11.0], DTYPE, "cu_seqlens: expected an integer array"),
        ([False, True], DTYPE, "cu_seqlens: expected an integer array"),
    ],
)
def test_offsets(layer: Any, library: Any, offsets: Any, kind: Any, says: str) -> None:
    x = tokens(shape=(1, TOKENS, D_MODEL))
    refused(kind, says, lambda: layer(x, cu_seqlens=library.asarray(offsets)))


def test_packed_sequences_are_one_row(layer: Any) -> None:
    x = tokens()
    refused(SHAPE, "x: expected shape (1, T, d_model)", lambda: layer(x, cu_seqlens=jnp.asarray([0, TOKENS])))
    refused(DTYPE, "cu_seqlens: expected an integer array", lambda: layer(x[:1], cu_seqlens=[0, TOKENS]))


@pytest.mark.parametrize(("options", "says"), OTHERS, ids=[str(told) for told, _ in OTHERS])
def test_states_of_other_layers(layer: Any, options: dict[str, Any], says: str) -> None:
    other, x = make({"operator": "hla2", **options}), tokens()
    y = np.zeros((BATCH, TOKENS, options.get("d_model", D_MODEL)))
    state = layer.init_state(BATCH)
    refused(OPTION, f"state: expected that of a layer with {says}", lambda: other(y, state))
    refused(OPTION, f"state: expected that of a layer with {says}", lambda: jax.jit(other.step)(y[:, 0], state))
    refused(OPTION, "A state serves only layers with", lambda: layer(x, other.init_state(BATCH)))


@pytest.mark.parametrize("options", SAME, ids=str)
def test_states_go_on_where_only_the_way_of_computing_differs(layer: Any, options: dict[str, Any]) -> None:
    other, x = make({"operator": "hla2", **options}), tokens()
    other.eval()
    load_torch(other, to_torch(layer))
    _, state = layer(x[:, :5], return_state=True)
    np.testing.assert_allclose(other(x[:, 5:], state), layer(x)[:, 5:], rtol=1e-12, atol=1e-12)


def test_states_of_other_sizes(layer: Any) -> None:
    x = tokens()
    wide = HigherOrderAttention(D_MODEL, 6, head_dim=8, value_dim=5, param_dtype="float64", rngs=nnx.Rngs(0))
    refused(OPTION, "with value_dim=7, got value_dim=5", lambda: layer(x, wide.init_state(BATCH)))
    narrow = layer.init_state(BATCH).map(lambda x: x[..., :3])
    refused(OPTION, "state.key_moment: expected (B, 6, 1, 8, 8), got", lambda: layer(x, narrow))
    for batch in (1, 3):  # one row never serves a whole batch
        state = layer.init_state(batch)
        refused(SHAPE, f"expected a batch of 2, as x, got {batch}", lambda s=state: layer(x, s))
        refused(SHAPE, f"expected a batch of 2, as x, got {batch}", lambda s=state: layer.step(x[:, 0], s))
        refused(SHAPE, "expected a batch of 2", lambda s=state: jax.jit(layer.step)(x[:, 0], s))
    offsets = jnp.asarray([0, 4, 8, TOKENS])
    state = layer.init_state(BATCH)
    refused(SHAPE, "expected a batch of 3, as x, got 2", lambda: layer(x[:1], state, cu_seqlens=offsets))
    single = make({"operator": "hla2"}, param_dtype="float32")
    refused(DTYPE, "state.key_moment: expected float64, got float32", lambda: layer(x, single.init_state(BATCH)))
    refused(DTYPE, "state: expected a LayerState, got ndarray", lambda: layer(x, x))
    refused(DTYPE, "state: expected a LayerState, got Hla2State", lambda: layer.step(x[:, 0], state.operators[0]))
    long = state._replace(position=state.position.astype("int64"))
    refused(DTYPE, "state.position: expected int32, got int64", lambda: layer(x, long))
    refused(DTYPE, "state.position: expected an array", lambda: layer(x, state._replace(position=[0, 0])))
    # every field is checked, not only the first
    leaves, tree = jax.tree.flatten(state)
    for i in range(len(leaves)):
        broken = jax.tree.unflatten(tree, [s[:1] if j == i else s for j, s in enumerate(leaves)])
        refused(SHAPE, "expected a batch of 2, as x, got 1", lambda b=broken: layer(x, b))


def test_entries_of_a_batch(layer: Any) -> None:
    state = layer.init_state(BATCH)
    for wrong, kind, says in (
        (jnp.asarray([5]), OPTION, "index: expected entries 0 ≤ i < 2 of the batch, got [5]. Pass"),
        (np.array([0, 2, -1]), OPTION, "index: expected entries 0 ≤ i < 2 of the batch, got [2, -1]. Pass"),
        (jnp.asarray([True, False]), DTYPE, "index: expected an integer array (N,), got bool. Pass"),
        (jnp.asarray([0.0]), DTYPE, "index: expected an integer array (N,), got float64. Pass"),
        (jnp.asarray([[0, 1]]), SHAPE, "index: expected shape (N,), got (1, 2). Pass"),
        (np.array(0), SHAPE, "index: expected shape (N,), got (). Pass"),
        ([0], DTYPE, "index: expected an integer array (N,), got list. Pass"),
    ):
        refused(kind, says, lambda wrong=wrong: state.reorder(wrong))
    moved = state._replace(position=jnp.asarray([7, 9], jnp.int32))
    assert moved.reorder(np.array([1, 0, 1])).position.tolist() == [9, 7, 9]
    assert jax.jit(moved.reorder)(jnp.asarray([1])).position.tolist() == [9], "traced entries are not known"


def test_sizes_of_states(layer: Any) -> None:
    for batch in (-1, 2.0, (2,), True):
        refused(OPTION, "batch: expected an integer ≥ 0", lambda b=batch: layer.init_state(b))
        refused(OPTION, "batch: expected an integer ≥ 0", lambda b=batch: layer.flops(TOKENS, b))
        refused(OPTION, "batch: expected an integer ≥ 0", lambda b=batch: layer.state_bytes(b))


def test_bidirectional_layers_have_no_state(layer: Any) -> None:
    other, x = make({"operator": "hla2"}, causal=False), tokens()
    state = layer.init_state(BATCH)
    for name, call in (
        ("return_state", lambda: other(x, return_state=True)),
        ("state", lambda: other(x, state)),
        ("step", lambda: other.step(x[:, 0], state)),
        ("init_state", lambda: other.init_state(2)),
    ):
        refused(OPTION, f"{name}: expected a causal module, got causal=False", call)


def test_operator_module() -> None:
    q = jnp.zeros((2, 3, TOKENS, 8))
    module = HigherOrderOperator("hla2", decay=0.9)
    gates = jnp.zeros((2, 3, TOKENS))
    refused(OPTION, "decay: expected none, as the module has decay=0.9", lambda: module(q, q, q, log_decay=gates))
    state = module.init_state((1, 3), 8, 8, dtype=jnp.float64)
    refused(SHAPE, "state.corrected_state: expected the batch axes (2, 3)", lambda: module(q, q, q, state))
    at = q[:, :, 0]
    refused(SHAPE, "state.corrected_state: expected the batch axes (2, 3)", lambda: module.step(at, at, at, state))
    for wrong in (None, 3, (q,), np.zeros(3)):
        says = f"state: expected a state, got {type(wrong).__name__}"
        refused(DTYPE, says, lambda wrong=wrong: module.step(at, at, at, wrong))
        if wrong is not None:
            says = f"initial_state: expected a state of this library, got {type(wrong).__name__}"
            refused(DTYPE, says, lambda wrong=wrong: module(q, q, q, wrong))
    state = module.init_state((2, 3), 8, 8)
    refused(DTYPE, "q: expected an array", lambda: module([1.0], q, q, state))
    refused(DTYPE, "q: expected an array", lambda: module.step([1.0], at, at, state))
    refused(SHAPE, "batch axes that broadcast", lambda: module.step(at, at[:, :2], at, state))
    refused(OPTION, "axis: expected an axis", lambda: module(q, q, q, state, axis=7))
    state = module.init_state((1, 3), 8, 8, dtype=jnp.float64)
    other = HigherOrderOperator("ahla")
    refused(OPTION, "initial_state: expected a state of ahla", lambda: other(q[:1], q[:1], q[:1], state))
    bidirectional = HigherOrderOperator("hla2", causal=False)
    refused(OPTION, "step: expected a causal module", lambda: bidirectional.step(at, at, at, state))
    refused(OPTION, "init_state: expected a causal module", lambda: bidirectional.init_state((2,), 3, 4))


# --- weights ---------------------------------------------------------------------------------------------------------


def test_weights(layer: Any) -> None:
    given, before = to_torch(layer), to_torch(layer)
    for wrong, kind, says in (
        ({n: x for n, x in given.items() if n != "decay.bias"}, OPTION, "got none for decay.bias. Make the layer"),
        ({**given, "rotary": given["decay.bias"]}, OPTION, "got more: rotary. Make the layer"),
        ({f"layers.0.{n}": x for n, x in given.items()}, OPTION, "or take the prefix off the names"),
        ({**given, "v_proj.weight": given["v_proj.weight"].T}, SHAPE, "v_proj.weight: expected shape (42, 13), got"),
        ({**given, "decay.bias": given["decay.bias"][:3]}, SHAPE, "decay.bias: expected shape (6,), got (3,)"),
        ({**given, "decay.bias": [0.0] * 6}, DTYPE, "decay.bias: expected a tensor or array, got list"),
        ({**given, "decay.bias": np.zeros(6, int)}, DTYPE, "decay.bias: expected a floating dtype, got int64"),
        ({**given, "decay.bias": torch.zeros(6) > 0}, DTYPE, "decay.bias: expected a floating dtype, got bool"),
        ({**given, "decay.bias": torch.zeros(6, device="meta")}, DTYPE, "decay.bias: expected a tensor with values"),
    ):
        wrong["q_proj.weight"] = given["q_proj.weight"] + 1
        refused(kind, says, lambda wrong=wrong: load_torch(layer, wrong))
    after = to_torch(layer)
    assert all(np.array_equal(x, after[name]) for name, x in before.items()), "all or none"
    for wrong in (layer, None, [1.0]):
        says = f"state_dict: expected arrays by name, or a module of PyTorch, got {type(wrong).__name__}"
        refused(DTYPE, says, lambda wrong=wrong: load_torch(layer, wrong))
    empty = hla.nn.torch.HigherOrderAttention(12, 4, device="meta")
    refused(DTYPE, "expected a tensor with values, got one of the device meta", lambda: from_torch(empty))
    refused(OPTION, "got none for", lambda: load_torch(layer, torch.nn.Linear(3, 4)))
    for module in (torch.nn.Linear(3, 4), given, 3):
        refused(DTYPE, "layer: expected a hla.nn.flax.HigherOrderAttention", lambda m=module: to_torch(m))
        refused(DTYPE, "layer: expected a hla.nn.flax.HigherOrderAttention", lambda m=module: load_torch(m, given))
    for module in (torch.nn.Linear(3, 4), layer, None):
        refused(DTYPE, "module: expected a hla.nn.torch.HigherOrderAttention, got", lambda m=module: from_torch(m))

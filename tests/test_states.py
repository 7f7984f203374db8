"""States and `hla.step`: what a state holds, that it is plain immutable data, and one token at a time."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import pytest

import hla
from libraries import Library

TOKENS, HEADS, D, DV = 11, 3, 5, 7
NUMPY = Library("numpy")

FIELDS = {  # by operator, mask, definition: matrices and, with normalize=True, denominators
    ("linear_attention", "causal", "exact"): (["key_value_moment"], ["key_mass"]),
    ("linear_attention", "prefix", "exact"): (["key_value_moment"], ["key_mass"]),
    ("hla2", "causal", "exact"): (["key_moment", "corrected_state"], ["corrected_mass"]),
    ("hla2", "prefix", "exact"): (["key_moment", "query_value_moment"], ["query_mass"]),
    ("hla2", "causal", "as_printed"): (
        ["key_moment", "query_value_moment", "correction"],
        ["query_mass", "correction_mass"],
    ),
    ("ahla", "causal", "exact"): (["key_value_moment", "cascade_state"], ["key_mass", "cascade_mass"]),
    ("ahla", "prefix", "exact"): (["key_query_moment", "key_value_moment"], ["key_mass"]),
    ("hla3", "causal", "exact"): (
        ["key_moment", "key_value_moment", "corrected_state"],
        ["key_mass", "corrected_mass"],
    ),
    ("hla3", "prefix", "exact"): (["key_moment", "query_moment", "key_value_moment"], ["key_mass"]),
    ("hla3", "causal", "as_printed"): (
        ["key_moment", "query_moment", "key_value_moment", "correction", "correction_2", "correction_3"],
        ["key_mass", "correction_mass", "correction_mass_2", "correction_mass_3"],
    ),
    ("order 4", "causal", "exact"): (
        ["key_moment", "corrected_state", "corrected_state_2"],
        ["corrected_mass", "corrected_mass_2"],
    ),
    ("order 5", "causal", "exact"): (
        ["key_moment", "key_value_moment", "corrected_state", "corrected_state_2"],
        ["key_mass", "corrected_mass", "corrected_mass_2"],
    ),
    ("order 6", "causal", "exact"): (
        ["key_moment", "corrected_state", "corrected_state_2", "corrected_state_3"],
        ["corrected_mass", "corrected_mass_2", "corrected_mass_3"],
    ),
}
SQUARE = ("key_moment", "query_moment", "key_query_moment")


class Kind(NamedTuple):
    """An operator and the options that fix its state."""

    operator: str
    options: dict[str, Any]
    matrices: list[str]
    masses: list[str]

    def init(self, lib: Library, batch: tuple[int, ...] = (HEADS,), dtype: str = "float64", **more: Any) -> Any:
        like = lib.asarray(np.zeros(1), dtype)
        return hla.init_state(self.operator, batch=batch, d=D, dv=DV, like=like, **self.options, **more)

    def run(self, q: Any, k: Any, v: Any, **more: Any) -> Any:
        given = {**self.options, **more}
        if self.operator == "higher_order":
            return hla.higher_order(q, k, v, **given)
        return getattr(hla, self.operator)(q, k, v, **given)


def make_kind(name: str, mask: str, definition: str, normalize: bool, ridge: float) -> Kind:
    options: dict[str, Any] = {"mask": mask, "definition": definition, "normalize": normalize, "ridge": ridge}
    operator = name
    if name.startswith("order"):
        operator, options["order"] = "higher_order", int(name[-1])
    matrices, masses = (list(x) for x in FIELDS[name, mask, definition])
    if ridge and "query_value_moment" not in matrices:
        matrices.append("query_value_moment")
        masses.append("query_mass")
    return Kind(operator, options, matrices, masses if normalize else [])


KINDS = {
    " ".join([*key, *(["normalize"] if normalize else []), *(["ridge"] if ridge else [])]): make_kind(
        *key, normalize, ridge
    )
    for key in FIELDS
    for normalize in (False, True)
    for ridge in (0.0, 0.7)
    if ridge == 0 or key[0] == "hla2"
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
FEW_KINDS = [
    KINDS[name] for name in ("hla2 causal exact normalize ridge", "hla3 causal as_printed", "order 5 causal exact")
]


@pytest.fixture(autouse=True)
def few_where_every_shape_is_compiled(request: pytest.FixtureRequest) -> None:
    given = getattr(getattr(request.node, "callspec", None), "params", {})
    if "lib" in given and given["lib"].name == "jax" and given.get("kind") not in (None, *FEW_KINDS):
        pytest.skip("three kinds of state on jax, where every shape is compiled")


def inputs(lib: Library, batch: tuple[int, ...] = (HEADS,), tokens: int = TOKENS, seed: int = 0) -> list[Any]:
    """q, k, v with denominators away from zero."""
    rng = np.random.default_rng(seed)
    return [lib.asarray(abs(rng.normal(size=(*batch, tokens, size))) / size) for size in (D, D, DV)]


def leaves_close(lib: Library, got: Any, expected: Any, rtol: float = 1e-12) -> None:
    assert type(got) is type(expected)
    for name, x in expected._asdict().items():
        y = lib.numpy(x)
        np.testing.assert_allclose(lib.numpy(getattr(got, name)), y, rtol=rtol, atol=rtol, err_msg=name)


# --- fields ----------------------------------------------------------------------------------------------------------


@every_kind
def test_fields_and_shapes(lib: Library, kind: Kind) -> None:
    """The same of `init_state` and of the operator; matrices (*batch, d, ·), denominators (*batch, d)."""
    _, returned = kind.run(*inputs(lib), return_state=True)
    for state in (kind.init(lib), returned):
        assert set(state._fields) == {*kind.matrices, *kind.masses}
        for name, x in state._asdict().items():
            width = () if name in kind.masses else (D,) if name in SQUARE else (DV,)
            assert tuple(x.shape) == (HEADS, D, *width), name
            assert x.dtype == lib.dtype("float64"), name
    assert type(kind.init(lib)) is type(returned)
    assert all(not lib.numpy(x).any() for x in kind.init(lib))


def test_letters_of_a_state() -> None:
    """The values behind the words, on two tokens without decay: S, P, F and E of docs/mathematics.md."""
    rng = np.random.default_rng(1)
    q, k, v = (rng.normal(size=(2, size)) for size in (D, D, DV))
    S, P = k.T @ k, k.T @ v
    first = np.outer(k[0], k[0])
    F = np.outer(first @ q[0], v[0]) + np.outer(S @ q[1], v[1])
    E = np.outer(k[0], q[0] @ np.outer(k[0], v[0])) + np.outer(k[1], q[1] @ P)
    cubic = np.outer(first @ q[0], q[0] @ np.outer(k[0], v[0])) + np.outer(S @ q[1], q[1] @ P)
    for operator, expected in {
        "linear_attention": {"key_value_moment": P},
        "hla2": {"key_moment": S, "corrected_state": F},
        "ahla": {"key_value_moment": P, "cascade_state": E},
        "hla3": {"key_moment": S, "key_value_moment": P, "corrected_state": cubic},
    }.items():
        _, state = getattr(hla, operator)(q, k, v, return_state=True)
        for name, x in expected.items():
            np.testing.assert_allclose(getattr(state, name), x, rtol=1e-13, err_msg=f"{operator}.{name}")


def numbers(operator: str, **options: Any) -> int:
    state = hla.init_state(operator, batch=(), d=D, dv=DV, like=np.zeros(1), **options)
    return sum(x.size for x in state)


def test_how_much_a_state_holds() -> None:
    square, wide = D * D, D * DV
    assert numbers("linear_attention") == wide
    assert numbers("hla2") == square + wide
    assert numbers("ahla") == 2 * wide
    assert numbers("hla3") == square + 2 * wide
    assert numbers("hla2", ridge=0.1) == square + 2 * wide
    assert numbers("hla2", normalize=True) == square + wide + D
    for m in (2, 3, 4):
        assert numbers("higher_order", order=2 * m) == square + m * wide
        assert numbers("higher_order", order=2 * m + 1) == square + (m + 1) * wide


@pytest.mark.parametrize("order", [10, 11, 22, 23, 42, 43])
@pytest.mark.parametrize("normalize", [False, True])
def test_many_stages(order: int, normalize: bool) -> None:
    """Stages beyond the ninth, whose names have two digits, are stages and no denominators."""
    rng = np.random.default_rng(7)
    q, k, v = (abs(rng.normal(size=(5, size))) / 4 for size in (2, 2, 3))
    options = {"order": order, "normalize": normalize}
    whole, state = hla.higher_order(q, k, v, return_state=True, **options)
    first, middle = hla.higher_order(q[:3], k[:3], v[:3], return_state=True, **options)
    second, final = hla.higher_order(q[3:], k[3:], v[3:], initial_state=middle, return_state=True, **options)
    np.testing.assert_allclose(np.concatenate([first, second]), whole, rtol=1e-11)
    leaves_close(NUMPY, final, state)
    stages = [name for name in state._fields if name.startswith("corrected_state")]
    assert len(stages) == order // 2
    assert {getattr(state, name).shape for name in stages} == {(2, 3)}


@every_kind
def test_constant_size(kind: Kind) -> None:
    """Whatever has been seen."""
    shapes = []
    for tokens in (0, 1, TOKENS):
        _, state = kind.run(*inputs(NUMPY, tokens=tokens), return_state=True)
        shapes.append([x.shape for x in state])
    assert shapes[0] == shapes[1] == shapes[2]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_dtype_of_a_state(lib: Library, dtype: str) -> None:
    """float64 for float64, else float32; of the operator and of `init_state`; the output in the dtype of v."""
    if dtype not in lib.floats:
        pytest.skip(f"{lib.name} has no {dtype}")
    if (lib.name, dtype) == ("numpy", "bfloat16"):
        pytest.importorskip("ml_dtypes")
    wide = lib.dtype("float64" if dtype == "float64" else "float32")
    q, k, v = (lib.asarray(lib.numpy(x), dtype) for x in inputs(lib))
    o, state = hla.hla3(q, k, v, return_state=True, normalize=True)
    assert o.dtype == lib.dtype(dtype)
    fresh = hla.init_state("hla3", batch=(HEADS,), d=D, dv=DV, like=q, normalize=True)
    o_t, stepped = hla.step(fresh, q[:, 0, :], k[:, 0, :], v[:, 0, :], normalize=True)
    assert o_t.dtype == lib.dtype(dtype)
    for x in (*state, *fresh, *stepped):
        assert x.dtype == wide


def test_mixed_dtypes(lib: Library) -> None:
    """float64 if any of q, k, v is; decay arrays never promote."""
    q, k, v = inputs(lib)
    narrow = [lib.asarray(lib.numpy(x), "float32") for x in (q, k, v)]
    decay = lib.asarray(np.full(HEADS, 0.9))
    _, state = hla.hla2(*narrow, decay=decay, return_state=True)
    assert all(x.dtype == lib.dtype("float32") for x in state)
    for i in range(3):
        given = [x if i == j else y for j, (x, y) in enumerate(zip((q, k, v), narrow, strict=True))]
        o, state = hla.hla2(*given, decay=decay, return_state=True)
        assert all(x.dtype == lib.dtype("float64") for x in state)
        assert o.dtype == given[2].dtype


@pytest.mark.parametrize("operator", ["hla2", "hla3"])
def test_grouped_heads_store_the_key_moment_once(lib: Library, operator: str) -> None:
    """S has the batch axes of k, decay, token mask and initial state; the other fields have those of the output."""
    rng = np.random.default_rng(2)
    q = lib.asarray(rng.normal(size=(HEADS, 2, TOKENS, D)))
    k, v = (lib.asarray(rng.normal(size=(HEADS, 1, TOKENS, size))) for size in (D, DV))
    run = getattr(hla, operator)

    def moment(**options: Any) -> tuple[int, ...]:
        _, state = run(q, k, v, return_state=True, **options)
        rest = {name: tuple(x.shape[:2]) for name, x in state._asdict().items() if name != "key_moment"}
        assert set(rest.values()) == {(HEADS, 2)}
        return tuple(state.key_moment.shape)

    shared, own = (HEADS, 1, D, D), (HEADS, 2, D, D)
    assert moment() == moment(decay=0.9) == shared
    assert moment(decay=lib.asarray(rng.uniform(0.5, 1, (HEADS, 1)))) == shared
    assert moment(decay=lib.asarray(rng.uniform(0.5, 1, 2))) == own
    assert moment(token_mask=lib.asarray(rng.random(TOKENS) < 0.5)) == shared
    assert moment(token_mask=lib.asarray(rng.random((2, TOKENS)) < 0.5)) == own
    like = lib.asarray(np.zeros(1))
    for kv_batch, expected in (((HEADS, 1), shared), ((HEADS, 2), own), (None, own)):
        start = hla.init_state(operator, batch=(HEADS, 2), kv_batch=kv_batch, d=D, dv=DV, like=like)
        assert tuple(start.key_moment.shape) == expected
        assert moment(initial_state=start) == expected


def test_fewer_batch_axes_in_k(lib: Library) -> None:
    """S keeps the rank of the batch, so that heads stay where they are."""
    rng = np.random.default_rng(3)
    q, v = (lib.asarray(rng.normal(size=(2, HEADS, TOKENS, size))) for size in (D, DV))
    k = lib.asarray(rng.normal(size=(TOKENS, D)))
    _, state = hla.hla2(q, k, v, return_state=True)
    assert tuple(state.key_moment.shape) == (1, 1, D, D)
    o, _ = hla.step(state, q[:, :, 0, :], k[0, :], v[:, :, 0, :])
    assert tuple(o.shape) == (2, HEADS, DV)


# --- plain immutable data --------------------------------------------------------------------------------------------


@every_kind
def test_pickle_and_copy(kind: Kind) -> None:
    _, state = kind.run(*inputs(NUMPY), return_state=True)
    copies = [pickle.loads(pickle.dumps(state, protocol)) for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1)]
    for other in (*copies, copy.copy(state), copy.deepcopy(state)):
        assert type(other) is type(state)
        for x, y in zip(other, state, strict=True):
            np.testing.assert_array_equal(x, y)
    deep = copy.deepcopy(state)
    assert all(x is not y for x, y in zip(deep, state, strict=True))


def test_immutable() -> None:
    _, state = hla.hla2(*inputs(NUMPY), return_state=True)
    with pytest.raises(AttributeError):
        state.key_moment = np.zeros(1)
    with pytest.raises(TypeError):
        state[0] = np.zeros(1)
    assert isinstance(state, tuple)
    replaced = state._replace(key_moment=np.zeros((HEADS, D, D)))
    assert type(replaced) is type(state)


@every_kind
def test_tree(lib: Library, kind: Kind) -> None:
    """A state is a node of the library's trees, and comes back as itself, with what it knows of its options."""
    _, state = kind.run(*inputs(lib), return_state=True)
    if lib.name == "jax":
        import jax

        flat, form = jax.tree_util.tree_flatten(state)
        back = jax.tree_util.tree_unflatten(form, flat)
        zeros = jax.tree_util.tree_map(lambda x: 0 * x, state)
    elif lib.name == "torch":
        from torch.utils import _pytree

        flat, form = _pytree.tree_flatten(state)
        back = _pytree.tree_unflatten(flat, form)
        zeros = _pytree.tree_map(lambda x: 0 * x, state)
    else:
        flat, back, zeros = list(state), type(state)(*state), type(state)(*(0 * x for x in state))
    assert len(flat) == len(state)
    assert all(x is y for x, y in zip(back, state, strict=True))
    q, k, v = inputs(lib)
    o, _ = kind.run(q, k, v, initial_state=zeros, return_state=True)
    np.testing.assert_array_equal(lib.numpy(o), lib.numpy(kind.run(q, k, v)))


def test_two_classes_of_state_are_told_apart() -> None:
    """Equal field names do not make equal classes: what fixes a state's meaning is in its class."""
    plain, printed = (
        type(hla.init_state("hla2", batch=(), d=D, dv=DV, like=np.zeros(1), **options))
        for options in ({"mask": "prefix"}, {"mask": "prefix", "ridge": 0.1})
    )
    assert plain._fields == printed._fields
    assert plain is not printed


def test_states_cross_a_compiled_loop(lib: Library) -> None:
    if lib.name != "jax":
        pytest.skip("jax.lax.scan: in the session of jax")
    import jax

    kind = KINDS["hla3 causal exact normalize"]
    q, k, v = inputs(lib)

    def body(state: Any, token: Any) -> Any:
        o, state = hla.step(state, *token, normalize=True, decay=0.9)
        return state, o

    tokens = tuple(jax.numpy.moveaxis(x, 1, 0) for x in (q, k, v))
    state, o = jax.lax.scan(body, kind.init(lib), tokens)
    expected, final = kind.run(q, k, v, decay=0.9, return_state=True)
    np.testing.assert_allclose(lib.numpy(o).swapaxes(0, 1), lib.numpy(expected), rtol=1e-12)
    leaves_close(lib, state, final)


# --- step ------------------------------------------------------------------------------------------------------------

DECAYS: dict[str, Callable[[np.random.Generator], dict[str, Any]]] = {
    "none": lambda rng: {},
    "number": lambda rng: {"decay": 0.9},
    "heads": lambda rng: {"decay": rng.uniform(0.5, 1, HEADS)},
    "tokens": lambda rng: {"log_decay": -rng.exponential(0.3, (HEADS, TOKENS))},
    "resets": lambda rng: {
        "log_decay": np.where(rng.random((HEADS, TOKENS)) < 0.2, -np.inf, -rng.exponential(0.3, (HEADS, TOKENS)))
    },
}


def at(options: dict[str, Any], t: int) -> dict[str, Any]:
    """The options of one token."""
    return {name: x[:, t] if name in ("log_decay", "token_mask") else x for name, x in options.items()}


def place(lib: Library, options: dict[str, Any]) -> dict[str, Any]:
    return {name: lib.asarray(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}


@every_kind
@pytest.mark.parametrize("decay", DECAYS)
def test_steps_are_the_whole(lib: Library, kind: Kind, decay: str) -> None:
    """Prefill, then every token by itself, with scale, eps, masked tokens and every decay."""
    if lib.name == "jax" and decay not in ("number", "resets"):
        pytest.skip("two kinds of decay on jax, where every shape is compiled")
    rng = np.random.default_rng(4)
    options = {**DECAYS[decay](rng), "token_mask": rng.random((HEADS, TOKENS)) < 0.8}
    fixed = {"scale": 0.37, "eps": 0.3}
    arrays = inputs(lib, seed=4)
    whole, final = kind.run(*arrays, **place(lib, options), **fixed, return_state=True)
    start = 8 if lib.name == "jax" else 4
    pre = {name: x[:, :start] if name in ("log_decay", "token_mask") else x for name, x in options.items()}
    _, state = kind.run(*(x[:, :start, :] for x in arrays), **place(lib, pre), **fixed, return_state=True)
    for t in range(start, TOKENS):
        q, k, v = (x[:, t, :] for x in arrays)
        o, following = hla.step(state, q, k, v, **place(lib, at(options, t)), **fixed, **kind.options)
        assert type(following) is type(state)
        assert tuple(o.shape) == (HEADS, DV)
        expected = lib.numpy(whole)[:, t]
        np.testing.assert_allclose(lib.numpy(o), expected, rtol=1e-11, atol=1e-13 * np.max(np.abs(expected)))
        state = following
    leaves_close(lib, state, final)


def test_a_step_without_batch(lib: Library) -> None:
    q, k, v = inputs(lib, batch=())
    state = hla.init_state("hla2", batch=(), d=D, dv=DV, like=q)
    for t in range(TOKENS):
        o, state = hla.step(state, q[t, :], k[t, :], v[t, :], decay=0.9, token_mask=lib.asarray(np.full((1,), True))[0])
        assert tuple(o.shape) == (DV,)
    expected = hla.hla2(*(lib.numpy(x) for x in (q, k, v)), decay=0.9)
    np.testing.assert_allclose(lib.numpy(o), expected[t], rtol=1e-12)


def test_a_step_of_grouped_heads(lib: Library) -> None:
    rng = np.random.default_rng(5)
    q = lib.asarray(rng.normal(size=(HEADS, 2, TOKENS, D)))
    k, v = (lib.asarray(rng.normal(size=(HEADS, 1, TOKENS, size))) for size in (D, DV))
    whole = lib.numpy(hla.hla2(q, k, v, decay=0.9))
    state = hla.init_state("hla2", batch=(HEADS, 2), kv_batch=(HEADS, 1), d=D, dv=DV, like=q)
    for t in range(3):
        o, state = hla.step(state, q[:, :, t, :], k[:, :, t, :], v[:, :, t, :], decay=0.9)
        assert tuple(state.key_moment.shape) == (HEADS, 1, D, D)
        np.testing.assert_allclose(lib.numpy(o), whole[:, :, t], rtol=1e-11, atol=1e-12)


def test_the_state_of_packed_sequences_is_an_ordinary_one(lib: Library) -> None:
    """Batch (N, *batch): every sequence goes on by itself; an empty one starts from where it was."""
    q, k, v = inputs(lib)
    offsets = [0, 4, 4, TOKENS]
    _, state = hla.hla2(q, k, v, cu_seqlens=lib.asarray(np.asarray(offsets)), decay=0.9, return_state=True)
    assert tuple(state.corrected_state.shape) == (3, HEADS, D, DV)
    more = inputs(lib, batch=(3, HEADS), tokens=1, seed=6)
    o, following = hla.step(state, *(x[:, :, 0, :] for x in more), decay=0.9)
    assert tuple(o.shape) == (3, HEADS, DV)
    for n in range(3):
        parts = [
            np.concatenate([lib.numpy(x)[:, offsets[n] : offsets[n + 1]], lib.numpy(y)[n]], axis=1)
            for x, y in zip((q, k, v), more, strict=True)
        ]
        expected, final = hla.hla2(*parts, decay=0.9, return_state=True)
        np.testing.assert_allclose(lib.numpy(o)[n], expected[:, -1], rtol=1e-12, atol=1e-14)
        for x, y in zip(following, final, strict=True):
            np.testing.assert_allclose(lib.numpy(x)[n], y, rtol=1e-12, atol=1e-14)


def test_nothing_is_written_to(lib: Library) -> None:
    """Neither the state nor the inputs of `step`, nor the initial state of an operator."""
    q, k, v = inputs(lib)
    _, state = hla.hla3(q, k, v, normalize=True, return_state=True)
    token = [x[:, 0, :] for x in (q, k, v)]
    before = [lib.numpy(x).copy() for x in (*state, *token)]
    if lib.name == "numpy":
        for x in (*state, *token):
            x.flags.writeable = False
    _, following = hla.step(state, *token, normalize=True, decay=0.5)
    hla.hla3(q, k, v, normalize=True, initial_state=state, return_state=True)
    for x, y in zip((*state, *token), before, strict=True):
        np.testing.assert_array_equal(lib.numpy(x), y)
    assert all(x is not y for x, y in zip(following, state, strict=True))


@pytest.mark.parametrize("operator", ["linear_attention", "hla2", "ahla", "hla3"])
def test_in_place(lib: Library, operator: str) -> None:
    """The old state's arrays hold the new state, and it is the old state that comes back."""
    q, k, v = inputs(lib)
    _, state = getattr(hla, operator)(q, k, v, return_state=True)
    token = [x[:, 0, :] for x in (q, k, v)]
    if lib.name == "jax":
        with pytest.raises(hla.OptionError, match=r"^inplace: expected False for JAX arrays, got True\. .*donate"):
            hla.step(state, *token, inplace=True)
        return
    expected, following = hla.step(state, *token, decay=0.9)
    kept = list(state)
    o, same = hla.step(state, *token, decay=0.9, inplace=True)
    assert same is state
    assert all(x is y for x, y in zip(state, kept, strict=True))
    np.testing.assert_array_equal(lib.numpy(o), lib.numpy(expected))
    for x, y in zip(state, following, strict=True):
        np.testing.assert_array_equal(lib.numpy(x), lib.numpy(y))
    o, again = hla.step(state, *token, decay=0.9, inplace=False)
    assert again is not state


def test_in_place_is_all_or_nothing(lib: Library) -> None:
    """A field that cannot take the new value leaves all the others as they were."""
    if lib.name == "jax":
        pytest.skip("refused for JAX as such")
    q, k, v = inputs(lib)
    start = hla.init_state("hla2", batch=(HEADS,), kv_batch=(1,), d=D, dv=DV, like=q)
    token = [x[:, 0, :] for x in (q, k, v)]
    with pytest.raises(hla.OptionError, match=r"^inplace: expected key_moment of shape .*, got .*\. "):
        hla.step(start, *token, inplace=True)
    assert not any(lib.numpy(x).any() for x in start)
    narrow = hla.init_state("hla2", batch=(HEADS,), d=D, dv=DV, like=lib.asarray(np.zeros(1), "float32"))
    with pytest.raises(hla.OptionError, match=r"^inplace: expected key_moment of shape .*float64, got .*float32"):
        hla.step(narrow, *token, inplace=True)
    if lib.name == "numpy":
        frozen = hla.init_state("hla2", batch=(HEADS,), d=D, dv=DV, like=q)
        frozen.corrected_state.flags.writeable = False
        with pytest.raises(hla.OptionError, match=r"^inplace: expected writable arrays, got a read-only corrected_sta"):
            hla.step(frozen, *token, inplace=True)
        assert not any(x.any() for x in frozen)


@pytest.mark.parametrize("operator", ["linear_attention", "hla2", "ahla", "hla3"])
@pytest.mark.parametrize("decay", [0.9, Fraction(9, 10), None, "()", "(H,)"])
def test_repeated_steps(lib: Library, operator: str, decay: Any) -> None:
    """From the second one on a step's checks are not repeated; what it computes is the same, in place or not."""
    q, k, v = inputs(lib)
    options = {} if decay is None else {"decay": decay}
    if isinstance(decay, str):
        options["decay"] = lib.asarray(np.asarray(0.9) if decay == "()" else np.linspace(0.5, 0.9, HEADS))
    whole, _ = getattr(hla, operator)(q, k, v, return_state=True, **options)
    for inplace in (False,) if lib.name == "jax" else (False, True):
        state = hla.init_state(operator, batch=(HEADS,), d=D, dv=DV, like=q)
        for t in range(5):
            o, state = hla.step(state, q[:, t, :], k[:, t, :], v[:, t, :], inplace=inplace, **options)
            np.testing.assert_allclose(lib.numpy(o), lib.numpy(whole[:, t, :]), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ["read-only", "broadcast", "leaf", "inference"])
def test_in_place_is_all_or_nothing_in_repeated_steps(lib: Library, kind: str) -> None:
    if lib.name != ("numpy" if kind == "read-only" else "torch"):
        pytest.skip("another library's")
    q, k, v = inputs(lib)
    token = [x[:, 0, :] for x in (q, k, v)]
    state = hla.init_state("hla2", batch=(HEADS,), d=D, dv=DV, like=q)
    for _ in range(3):
        hla.step(state, *token, decay=0.9, inplace=True)
    bad = state.corrected_state
    if kind == "read-only":
        bad = bad.copy()
        bad.flags.writeable = False
    elif kind == "broadcast":
        bad = bad[:1].expand(bad.shape)
    elif kind == "leaf":
        bad = bad.clone().requires_grad_()
    else:
        with lib.module.inference_mode():
            bad = bad.clone()
    fixed = state._replace(corrected_state=bad)
    before = [lib.numpy(x).copy() for x in fixed]
    for _ in range(2):
        with pytest.raises(hla.OptionError, match=rf"^inplace: expected writable arrays, got an? {kind} "):
            hla.step(fixed, *token, decay=0.9, inplace=True)
    for x, y in zip(fixed, before, strict=True):
        np.testing.assert_array_equal(lib.numpy(x), y)


@pytest.mark.parametrize("value", [1, 0, None, "yes"])
def test_in_place_is_a_flag(value: Any) -> None:
    q, k, v = inputs(NUMPY)
    start = hla.init_state("hla2", batch=(HEADS,), d=D, dv=DV, like=q)
    with pytest.raises(hla.OptionError, match=r"^inplace: expected True or False, got "):
        hla.step(start, q[:, 0], k[:, 0], v[:, 0], inplace=value)


@pytest.mark.parametrize(("operator", "options"), [("linear_attention", {}), ("hla2", {}), ("hla3", {"order": 3})])
def test_the_order_of_a_state(operator: str, options: dict[str, Any]) -> None:
    """Orders 1, 2 and 3 of `higher_order` are the named operators, their states the same."""
    q, k, v = inputs(NUMPY)
    order = {"linear_attention": 1, "hla2": 2, "hla3": 3}[operator]
    _, state = hla.higher_order(q, k, v, order=order, return_state=True)
    _, named = getattr(hla, operator)(q, k, v, return_state=True)
    assert type(state) is type(named)
    token = [x[:, 0] for x in (q, k, v)]
    o, _ = hla.step(state, *token, order=order)
    p, _ = hla.step(state, *token, **options)
    np.testing.assert_array_equal(o, p)
    with pytest.raises(hla.OptionError, match=rf"^order: expected {order}, as the state is of {operator} with .*got 7"):
        hla.step(state, *token, order=7)


def test_a_prefix_state_of_linear_attention_is_the_causal_one(lib: Library) -> None:
    q, k, v = inputs(lib)
    _, state = hla.linear_attention(q, k, v, mask="prefix", return_state=True)
    o, _ = hla.step(state, q[:, 0, :], k[:, 0, :], v[:, 0, :])
    p, _ = hla.step(state, q[:, 0, :], k[:, 0, :], v[:, 0, :], mask="prefix")
    np.testing.assert_array_equal(lib.numpy(o), lib.numpy(p))


# --- a state under other options -------------------------------------------------------------------------------------

OTHERS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("hla2", {}, {"normalize": True}),
    ("hla2", {"normalize": True}, {}),
    ("hla2", {}, {"ridge": 0.1}),
    ("hla2", {"ridge": 0.1}, {}),
    ("hla2", {}, {"mask": "prefix"}),
    ("hla2", {"mask": "prefix"}, {}),
    ("hla2", {}, {"definition": "as_printed"}),
    ("hla2", {"definition": "as_printed"}, {}),
    ("hla3", {}, {"definition": "as_printed"}),
    ("ahla", {}, {"mask": "prefix"}),
    ("linear_attention", {}, {"normalize": True}),
]


@pytest.mark.parametrize(("operator", "made", "used"), OTHERS)
def test_a_state_serves_only_its_own_options(operator: str, made: dict[str, Any], used: dict[str, Any]) -> None:
    q, k, v = inputs(NUMPY)
    run = getattr(hla, operator)
    _, state = run(q, k, v, return_state=True, **made)
    with pytest.raises(hla.OptionError, match=rf"^initial_state: expected a state of {operator} with .*, got one of "):
        run(q, k, v, initial_state=state, **used)
    with pytest.raises(hla.OptionError, match=r"^initial_state: expected a state of "):
        hla.step(state, q[:, 0], k[:, 0], v[:, 0], **used)


@pytest.mark.parametrize("operator", ["linear_attention", "hla2", "ahla", "hla3"])
def test_a_state_serves_only_its_own_operator(operator: str) -> None:
    q, k, v = inputs(NUMPY)
    _, state = getattr(hla, operator)(q, k, v, return_state=True)
    for other in {"linear_attention", "hla2", "ahla", "hla3"} - {operator}:
        with pytest.raises(
            hla.OptionError, match=rf"^initial_state: expected a state of {other} .* got one of {operator}"
        ):
            getattr(hla, other)(q, k, v, initial_state=state)
    with pytest.raises(hla.OptionError, match=r"^initial_state: expected a state of higher_order\(order=4\)"):
        hla.higher_order(q, k, v, order=4, initial_state=state)


def test_another_strength_of_ridge_is_the_same_state() -> None:
    """λ, eps, scale and the decay are not in the state."""
    q, k, v = inputs(NUMPY)
    _, state = hla.hla2(q, k, v, ridge=0.1, normalize=True, eps=1e-6, decay=0.9, return_state=True)
    hla.hla2(q, k, v, ridge=0.9, normalize=True, eps=0.1, decay=0.5, scale=2.0, initial_state=state)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"d": 4}, r"initial_state\.key_moment: expected last axes \(5, 5\) .*, got shape \(3, 4, 4\)"),
        ({"dv": 4}, r"initial_state\.corrected_state: expected last axes \(5, 7\) .*, got shape \(3, 5, 4\)"),
        ({"batch": (2,)}, r"initial_state\.key_moment: expected an array that broadcasts to .*, got shape \(2, 5, 5\)"),
        (
            {"batch": (2, 3)},
            r"initial_state\.key_moment: expected an array that broadcasts to .*, got shape \(2, 3, 5, 5\)",
        ),
    ],
)
def test_a_state_of_other_sizes(lib: Library, sizes: dict[str, Any], words: str) -> None:
    q, k, v = inputs(lib)
    state = hla.init_state("hla2", **{"batch": (HEADS,), "d": D, "dv": DV, "like": q, **sizes})
    with pytest.raises(hla.ShapeError, match="^" + words):
        hla.hla2(q, k, v, initial_state=state)
    with pytest.raises(hla.ShapeError, match="^" + words):
        hla.step(state, *(x[:, 0, :] for x in (q, k, v)))


def test_smaller_batch_axes_broadcast(lib: Library) -> None:
    """One state for all heads."""
    q, k, v = inputs(lib)
    _, one = hla.hla2(*(x[0, ...] for x in (q, k, v)), return_state=True)
    o, state = hla.hla2(q, k, v, initial_state=one, return_state=True)
    for head in range(HEADS):
        expected = hla.hla2(*(lib.numpy(x)[head] for x in (q, k, v)), initial_state=lib.tree(one))
        np.testing.assert_allclose(lib.numpy(o)[head], expected, rtol=1e-12)
    assert all(x.shape[0] == HEADS for x in state)

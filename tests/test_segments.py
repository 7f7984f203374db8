"""`hla.segments`: the algebra of summaries, for every operator, mask, definition, normalisation, ridge and decay.

The laws are judged against a second implementation in this file, written from the table of docs/mathematics.md,
"Segments", in NumPy, one token at a time: `token`, `concat` and `printed_third` share nothing with the package. All
comparisons are in float64. Every field is a sum of products, so it may differ by at most a multiple of the same sum
over absolute values (`Scale`).
"""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hla
import oracle
from hla import segments
from libraries import Library

TOKENS, HEADS, D, DV = 7, 3, 5, 2
EPS = np.finfo(np.float64).eps
EXAMPLES = {"numpy": 12, "torch": 6, "strict": 3, "jax": 2, "cupy": 2}
DECAYS = ("none", "number", "heads", "tokens", "shared tokens", "resets")


class Kind(NamedTuple):
    """What fixes a segment's fields."""

    operator: str
    mask: str = "causal"
    definition: str = "exact"
    normalize: bool = False
    ridge: float = 0.0

    @property
    def options(self) -> dict[str, Any]:
        return {
            "mask": self.mask,
            "definition": self.definition,
            "normalize": self.normalize,
            "ridge": self.ridge,
        }

    def __str__(self) -> str:
        words = [self.operator, *(x for x in (self.mask, self.definition) if x not in ("causal", "exact"))]
        return " ".join([*words, *(["normalize"] if self.normalize else []), *(["ridge"] if self.ridge else [])])


KINDS = [
    Kind(operator, mask, definition, normalize, ridge)
    for operator in ("linear_attention", "hla2", "ahla", "hla3")
    for mask in ("causal", "prefix")
    for definition in ("exact", "as_printed")
    for normalize in (False, True)
    for ridge in (0.0, 0.7)
    if (definition == "exact" or (operator in ("hla2", "hla3") and mask == "causal"))
    and (ridge == 0 or operator == "hla2")
    and (operator, mask) != ("linear_attention", "prefix")  # the same as causal, see below
]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=str)
FEW_KINDS = [
    Kind("hla2", definition="as_printed", ridge=0.7),
    Kind("ahla", mask="prefix"),
    Kind("hla3", normalize=True),
]


@pytest.fixture(autouse=True)
def few_where_every_shape_is_compiled(request: pytest.FixtureRequest) -> None:
    given = getattr(getattr(request.node, "callspec", None), "params", {})
    if "lib" not in given or given["lib"].name != "jax":
        return
    if given.get("kind") not in (None, *FEW_KINDS) or given.get("decay") not in (None, "number", "resets"):
        pytest.skip("three kinds of segment, two of decay on jax, where every shape is compiled")


# --- the table of math "Segments", once more -------------------------------------------------------------------------

Fields = dict[str, Any]


def token(kind: Kind, q: Any, k: Any, v: Any, gamma: Any) -> Fields:
    """The segment of one token of one head."""
    one = np.ones(1)
    outer, kq = np.outer, k @ q
    if kind.mask == "prefix":
        table = {
            "linear_attention": {"P": outer(k, v)},
            "hla2": {"S": outer(k, k), "C": outer(q, v), "m": q},
            "ahla": {"R": outer(k, q), "P": outer(k, v), "n": k},
            "hla3": {"S": outer(k, k), "Q": outer(q, q), "P": outer(k, v), "n": k},
        }
    else:
        table = {
            "linear_attention": {"P": outer(k, v), "n": k},
            "hla2": {
                "S": outer(k, k),
                "C": outer(q, v),
                "m": q,
                "F": kq * outer(k, v),
                "eta": kq * k,
            },
            "ahla": {
                "R": outer(k, q),
                "P": outer(k, v),
                "n": k,
                "E": kq * outer(k, v),
                "e": kq * k,
            },
            "hla3": {
                "S": outer(k, k),
                "Q": outer(q, q),
                "P": outer(k, v),
                "n": k,
                "W": kq * outer(q, v),
                "w": kq * q,
                "U": kq * outer(k, q),
                "F": kq**2 * outer(k, v),
                "eta": kq**2 * k,
            },
        }
        if kind.definition == "as_printed":  # D is ρ·T with T = Σ kkᵀ/γ
            table["hla2"] = {
                "S": outer(k, k),
                "C": outer(q, v),
                "m": q,
                "D": outer(k, k),
                "G": np.zeros((D, v.size)),
                "g": np.zeros(D),
            }
    return {"rho": one * gamma, **table[kind.operator]}


def concat(kind: Kind, a: Fields, b: Fields) -> Fields:
    """A ⊕ B for one head."""
    r = b["rho"]
    out = {name: r * a[name] + b[name] for name in a}
    out["rho"] = a["rho"] * r
    if kind.mask == "prefix":
        return out
    if kind.operator == "hla2" and kind.definition == "as_printed":
        out["D"] = r * a["D"] + a["rho"] * b["D"]
        out["G"] = r * a["G"] + b["G"] + b["D"] @ a["C"]
        out["g"] = r * a["g"] + b["g"] + b["D"] @ a["m"]
    elif kind.operator == "hla2":
        out["F"] = r**2 * a["F"] + b["F"] + r * a["S"] @ b["C"]
        out["eta"] = r**2 * a["eta"] + b["eta"] + r * a["S"] @ b["m"]
    elif kind.operator == "ahla":
        out["R"] = a["R"] + b["R"]
        out["E"] = r * a["E"] + b["E"] + r * b["R"] @ a["P"]
        out["e"] = r * a["e"] + b["e"] + r * b["R"] @ a["n"]
    elif kind.operator == "hla3":
        out["W"] = r**2 * a["W"] + b["W"] + r * b["Q"] @ a["P"]
        out["w"] = r**2 * a["w"] + b["w"] + r * b["Q"] @ a["n"]
        out["U"] = r**2 * a["U"] + b["U"] + r * a["S"] @ b["Q"]
        for cubic, value, inner in (("F", "P", "W"), ("eta", "n", "w")):
            out[cubic] = (
                r**3 * a[cubic]
                + b[cubic]
                + r**2 * a["S"] @ b["Q"] @ a[value]
                + r * a["S"] @ b[inner]
                + r * b["U"] @ a[value]
            )
    return out


FIELD = {
    "rho": "decay",
    "S": "key_moment",
    "P": "key_value_moment",
    "C": "query_value_moment",
    "Q": "query_moment",
    "R": "key_query_moment",
    "E": "cascade_state",
    "U": "corrected_query_moment",
    "W": "corrected_value_moment",
    "F": "corrected_state",
    "G": "correction",
    "D": "strict_key_moment",
    "n": "key_mass",
    "m": "query_mass",
    "eta": "corrected_mass",
    "e": "cascade_mass",
    "g": "correction_mass",
    "w": "corrected_value_mass",
    # of the printed third order
    "K": "spanned_key_moment",
    "N": "spanned_query_moment",
    "X": "spanned_key_value_moment",
    "L": "key_query_coupling",
    "T": "query_value_coupling",
    "V": "query_key_coupling",
    "Y": "key_value_coupling",
    "M": "key_map",
    "Z": "value_map",
    "H": "correction_2",
    "J": "correction_3",
    "x1": "spanned_key_mass",
    "t1": "query_coupling_mass",
    "y1": "key_coupling_mass",
    "m1": "key_map_mass",
    "z1": "value_map_mass",
    "h1": "correction_mass_2",
    "j1": "correction_mass_3",
}
MASSES = ("n", "m", "eta", "e", "g", "w")


def printed_third(q: Any, k: Any, v: Any, gamma: Any) -> Fields:
    """The segment of Algorithm 3 as printed, of one head, from the sums that define it.

    With g_t the decay over the tokens before t, w_t that over the tokens after t, and S, Q, P before t was added:
    what the tokens take away from a state to their left is linear in it, and M and Z are the maps of §7.3.
    """
    S, Q, P = np.zeros((D, D)), np.zeros((D, D)), np.zeros((D, v.shape[1]))
    total: Fields = {}

    def add(name: str, x: Any) -> None:
        total[name] = total.get(name, 0.0) + x

    for t in range(len(q)):
        g, w = np.prod(gamma[:t]), np.prod(gamma[t + 1 :])
        kk, qq, kv = np.outer(k[t], k[t]), np.outer(q[t], q[t]), np.outer(k[t], v[t])
        add("K", w * g**2 * kk)
        add("N", w * g**2 * qq)
        add("X", w * g**2 * kv)
        add("L", w * g * kk @ Q)
        add("T", w * g * qq @ P)
        add("V", w * g * S @ qq)
        add("Y", w * g * Q @ kv)
        add("M", w * g * np.einsum("ab,ce->abce", kk, P))
        add("Z", w * g * np.einsum("ab,ce->abce", S, kv))
        add("G", w * kk @ Q @ P)
        add("H", w * S @ qq @ P)
        add("J", w * S @ Q @ kv)
        S, Q, P = gamma[t] * S + kk, gamma[t] * Q + qq, gamma[t] * P + kv
    return {"rho": np.prod(gamma), "S": S, "Q": Q, "P": P, **total}


THIRD_MASSES = {"P": "n", "X": "x1", "T": "t1", "Y": "y1", "M": "m1", "Z": "z1", "G": "g", "H": "h1", "J": "j1"}


def is_printed_third(kind: Kind) -> bool:
    return (kind.operator, kind.definition) == ("hla3", "as_printed")


def fields_of(kind: Kind) -> list[str]:
    """The letters of a segment's fields."""
    one = np.ones((1, D)), np.ones((1, D)), np.ones((1, DV)), np.ones(1)
    if is_printed_third(kind):
        letters = list(printed_third(*one))
        return [*letters, *(THIRD_MASSES.values() if kind.normalize else ())]
    return [x for x in token(kind, *(x[0] for x in one)) if kind.normalize or x not in MASSES]


def fold(kind: Kind, q: Any, k: Any, v: Any, log_decay: Any) -> Fields:
    """All tokens, one after another, of all heads: fields with a leading axis of heads."""
    heads = []
    for head in range(q.shape[0]):
        gamma = np.exp(log_decay[head])
        if is_printed_third(kind):
            found = printed_third(q[head], k[head], v[head], gamma)
            masses = printed_third(q[head], k[head], np.ones((len(gamma), 1)), gamma)
            heads.append({**found, **{twin: masses[letter][..., 0] for letter, twin in THIRD_MASSES.items()}})
            continue
        tokens = [token(kind, q[head, t], k[head, t], v[head, t], gamma[t]) for t in range(q.shape[1])]
        heads.append(functools.reduce(functools.partial(concat, kind), tokens))
    return {x: np.stack([np.squeeze(head[x]) if x == "rho" else head[x] for head in heads]) for x in heads[0]}


# --- inputs and comparisons ------------------------------------------------------------------------------------------


class Tokens(NamedTuple):
    """q, k, v of all heads, the decay options, and the same as log γ (heads, tokens)."""

    q: Any
    k: Any
    v: Any
    decay: dict[str, Any]
    log_decay: Any

    def part(self, start: int, stop: int) -> Tokens:
        """Some consecutive tokens."""
        decay = {
            name: x[..., start:stop] if name == "log_decay" and x.shape[-1] > 1 else x for name, x in self.decay.items()
        }
        q, k, v = (x[:, start:stop] for x in (self.q, self.k, self.v))
        return Tokens(q, k, v, decay, self.log_decay[:, start:stop])

    def absolute(self) -> Tokens:
        return self._replace(q=abs(self.q), k=abs(self.k), v=abs(self.v))


def make_tokens(decay: str, seed: int = 0, tokens: int = TOKENS) -> Tokens:
    rng = np.random.default_rng(seed)
    q, k, v = (rng.normal(size=(HEADS, tokens, size)) for size in (D, D, DV))
    options: dict[str, Any] = {
        "none": dict,
        "number": lambda: {"decay": float(rng.uniform(0.3, 1))},
        "heads": lambda: {"decay": rng.uniform(0.3, 1, HEADS)},
        "tokens": lambda: {"log_decay": -rng.exponential(0.5, (HEADS, tokens))},
        "shared tokens": lambda: {"log_decay": -rng.exponential(0.5, tokens)},
        "resets": lambda: {
            "log_decay": np.where(rng.random((HEADS, tokens)) < 0.3, -np.inf, -rng.exponential(0.5, (HEADS, tokens)))
        },
    }[decay]()
    if "decay" in options:
        log_decay = np.broadcast_to(np.log(options["decay"])[..., None], (HEADS, tokens))
    else:
        log_decay = np.broadcast_to(options.get("log_decay", 0.0), (HEADS, tokens))
    for x in (q, k, v, *options.values()):
        if isinstance(x, np.ndarray):
            x.flags.writeable = False
    return Tokens(q, k, v, options, log_decay)


def summary(lib: Library, kind: Kind, tokens: Tokens, **more: Any) -> Any:
    decay = {name: lib.asarray(x) if isinstance(x, np.ndarray) else x for name, x in tokens.decay.items()}
    q, k, v = (lib.asarray(x) for x in tokens[:3])
    return segments.from_tokens(kind.operator, q, k, v, **decay, **kind.options, **more)


def numbers(lib: Library, segment: Any) -> dict[str, Any]:
    return {name: lib.numpy(x) for name, x in segment._asdict().items()}


@functools.cache
def _numpy() -> Library:
    return Library("numpy")


class Scale:
    """What each field of the segment of some tokens is compared with: the sum of its terms' absolute values.

    Two ways to evaluate a term round it at most 3·(tokens + d) times each, decays included, by half of EPS.
    """

    def __init__(self, kind: Kind, tokens: Tokens) -> None:
        self._kind, self._tokens = kind, tokens
        self._fields: dict[str, Any] | None = None

    def allowed(self) -> dict[str, Any]:
        if self._fields is None:
            found = summary(_numpy(), self._kind, self._tokens.absolute())
            self._fields = {name: 3 * (TOKENS + D) * EPS * x for name, x in found._asdict().items()}
        return self._fields


def assert_close(got: dict[str, Any], expected: dict[str, Any], allowed: dict[str, Any]) -> None:
    assert got.keys() == expected.keys() == allowed.keys()
    for name in got:
        assert got[name].shape == expected[name].shape, name
        error = np.abs(got[name] - expected[name])
        assert np.all(error <= allowed[name]), f"{name}: {np.max(error / (allowed[name] + 1e-300))} of what is allowed"


def for_all(lib: Library, check: Callable[[st.DataObject], None], examples: dict[str, int] = EXAMPLES) -> None:
    """Run a property on examples, as many as the library is fast."""
    run = given(st.data())(lambda data: check(data))
    settings(max_examples=examples[lib.name], deadline=None, database=None, derandomize=True)(run)()


def draw_tokens(data: st.DataObject) -> Tokens:
    return make_tokens(data.draw(st.sampled_from(DECAYS), "decay"), data.draw(st.integers(0, 2**16), "seed"))


def draw_pieces(data: st.DataObject, tokens: int = TOKENS) -> list[tuple[int, int]]:
    """Any cuts, also none and also twice at the same place."""
    cuts = sorted(data.draw(st.lists(st.integers(0, tokens), max_size=4), "cuts"))
    return list(zip([0, *cuts], [*cuts, tokens], strict=True))


def bracketed(data: st.DataObject, items: list[Any]) -> Any:
    """All items combined in order under a random bracketing."""
    items = list(items)
    while len(items) > 1:
        i = data.draw(st.integers(0, len(items) - 2), "bracket")
        items[i : i + 2] = [segments.combine(items[i], items[i + 1])]
    return items[0]


# --- the laws --------------------------------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("decay", DECAYS)
def test_from_tokens_is_the_fold_of_its_tokens(lib: Library, kind: Kind, decay: str) -> None:
    """Fields, values and order of magnitude of every letter, from the table."""
    tokens = make_tokens(decay, seed=1)
    got = numbers(lib, summary(lib, kind, tokens))
    expected = fold(kind, *tokens[:3], tokens.log_decay)
    wanted = {FIELD[letter]: expected[letter] for letter in fields_of(kind)}
    assert set(got) == set(wanted)
    assert_close({name: got[name] for name in wanted}, wanted, {n: Scale(kind, tokens).allowed()[n] for n in wanted})


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not is_printed_third(kind)], ids=str)
def test_one_token(lib: Library, kind: Kind) -> None:
    tokens = make_tokens("tokens", seed=2, tokens=1)
    got = numbers(lib, summary(lib, kind, tokens))
    for head in range(HEADS):
        q, k, v = (x[head, 0] for x in tokens[:3])
        expected = token(kind, q, k, v, np.exp(tokens.log_decay[head, 0]))
        for letter in fields_of(kind):
            value = expected[letter] if letter != "rho" else expected[letter][0]
            np.testing.assert_allclose(got[FIELD[letter]][head], value, rtol=1e-14, atol=1e-15)


def identity_of(lib: Library, kind: Kind, batch: tuple[int, ...] = (HEADS,), dtype: str = "float64") -> Any:
    like = lib.asarray(np.zeros(1), dtype)
    return segments.identity(kind.operator, batch=batch, d=D, dv=DV, like=like, **kind.options)


@every_kind
def test_identity_on_both_sides(lib: Library, kind: Kind) -> None:
    """Exactly, bit for bit."""
    unit = identity_of(lib, kind)
    for decay in ("none", "heads", "resets"):
        x = summary(lib, kind, make_tokens(decay, seed=3))
        for both in (segments.combine(unit, x), segments.combine(x, unit)):
            assert type(both) is type(x)
            for mine, its in zip(both, x, strict=True):
                assert mine.dtype == its.dtype
                np.testing.assert_array_equal(lib.numpy(mine), lib.numpy(its))


@every_kind
def test_no_tokens_are_the_identity(lib: Library, kind: Kind) -> None:
    nothing = summary(lib, kind, make_tokens("tokens", seed=4).part(2, 2))
    unit = identity_of(lib, kind)
    assert type(nothing) is type(unit)
    for mine, its in zip(nothing, unit, strict=True):
        assert mine.dtype == its.dtype
        np.testing.assert_array_equal(lib.numpy(mine), lib.numpy(its))


@every_kind
def test_any_cut_and_any_bracketing(lib: Library, kind: Kind) -> None:
    """Associativity, and with it that a sequence may be cut anywhere."""

    def check(data: st.DataObject) -> None:
        tokens = draw_tokens(data)
        pieces = [summary(lib, kind, tokens.part(start, stop)) for start, stop in draw_pieces(data)]
        got, whole = bracketed(data, pieces), summary(lib, kind, tokens)
        assert type(got) is type(whole)
        assert_close(numbers(lib, got), numbers(lib, whole), Scale(kind, tokens).allowed())

    for_all(lib, check)


@every_kind
def test_associativity_of_any_elements(lib: Library, kind: Kind) -> None:
    """Also of elements that no tokens have made: every field drawn for itself, decays from 0 to 1."""
    unit = identity_of(lib, kind, batch=(2,))

    def element(rng: np.random.Generator, absolute: bool) -> Any:
        values = []
        for name, x in unit._asdict().items():
            drawn = rng.choice([0.0, 0.25, 0.5, 1.0], x.shape) if name == "decay" else rng.integers(-3, 4, x.shape)
            values.append(lib.asarray(abs(drawn) if absolute else drawn, "float64"))
        return type(unit)(*values)

    def check(data: st.DataObject) -> None:
        seed = data.draw(st.integers(0, 2**16), "seed")
        a, b, c = (element(np.random.default_rng([seed, i]), False) for i in range(3))
        left = segments.combine(segments.combine(a, b), c)
        right = segments.combine(a, segments.combine(b, c))
        # small integers times powers of a quarter: every product and sum is exact
        for name, mine, its in zip(left._fields, left, right, strict=True):
            np.testing.assert_array_equal(lib.numpy(mine), lib.numpy(its), err_msg=name)

    for_all(lib, check)


@every_kind
@pytest.mark.parametrize("decay", ["none", "tokens", "resets"])
def test_reading_the_prefixes_gives_the_operator(kind: Kind, decay: str) -> None:
    """o_t = q_tᵀF(prefix up to and including t), and alike for the others: the algebra against the definition."""
    tokens = make_tokens(decay, seed=5)
    if kind.normalize:  # away from denominators near zero
        tokens = tokens.absolute()
    lib = _numpy()
    outputs = []
    for t in range(TOKENS):
        x = numbers(lib, summary(lib, kind, tokens.part(0, t + 1)))
        outputs.append(read(kind, x, tokens.q[:, t]))
    got = np.stack(outputs, axis=1)
    for head in range(HEADS):
        q, k, v = (x[head] for x in tokens[:3])
        log_decay = None if decay == "none" else tokens.log_decay[head]
        expected = oracle.attend(kind.operator, q, k, v, log_decay=log_decay, **kind.options)
        np.testing.assert_allclose(got[head], expected, rtol=1e-10, atol=1e-10 * np.max(np.abs(expected)))


def read(kind: Kind, x: dict[str, Any], q: Any) -> Any:
    """The output of one token from the segment that ends with it: q (heads, d) → (heads, dv)."""

    def times(row: Any, *fields: str) -> Any:
        for field in fields:
            matrix = x[field] if x[field].ndim == 3 else x[field][..., None]
            row = np.einsum("hd,hde->he", row, matrix)
        return row

    v_paths: list[tuple[float, tuple[str, ...]]]
    if kind.mask == "prefix":
        v_paths = {
            "linear_attention": [(1.0, ("key_value_moment",))],
            "hla2": [(1.0, ("key_moment", "query_value_moment"))],
            "ahla": [(1.0, ("key_query_moment", "key_value_moment"))],
            "hla3": [(1.0, ("key_moment", "query_moment", "key_value_moment"))],
        }[kind.operator]
    elif kind.definition == "as_printed":
        first = ("key_moment", "query_value_moment")
        corrections = ["correction"]
        if kind.operator == "hla3":
            first = ("key_moment", "query_moment", "key_value_moment")
            corrections += ["correction_2", "correction_3"]
        v_paths = [(1.0, first), *((-1.0, (name,)) for name in corrections)]
    else:
        v_paths = {
            "linear_attention": [(1.0, ("key_value_moment",))],
            "hla2": [(1.0, ("corrected_state",))],
            "ahla": [(1.0, ("cascade_state",))],
            "hla3": [(1.0, ("corrected_state",))],
        }[kind.operator]
    if kind.ridge:
        v_paths = [*v_paths, (kind.ridge, ("query_value_moment",))]
    total = sum(weight * times(q, *path) for weight, path in v_paths)
    if not kind.normalize:
        return total
    mass = {
        "key_value_moment": "key_mass",
        "query_value_moment": "query_mass",
        "corrected_state": "corrected_mass",
        "cascade_state": "cascade_mass",
        "correction": "correction_mass",
        "correction_2": "correction_mass_2",
        "correction_3": "correction_mass_3",
    }
    below = sum(weight * times(q, *path[:-1], mass[path[-1]]) for weight, path in v_paths)
    return total / (below + 1e-6)


# --- states ----------------------------------------------------------------------------------------------------------

OPERATORS: dict[str, Callable[..., Any]] = {
    "linear_attention": hla.linear_attention,
    "hla2": hla.hla2,
    "ahla": hla.ahla,
    "hla3": hla.hla3,
}


def run(lib: Library, kind: Kind, tokens: Tokens, state: Any = None) -> Any:
    decay = {name: lib.asarray(x) if isinstance(x, np.ndarray) else x for name, x in tokens.decay.items()}
    q, k, v = (lib.asarray(x) for x in tokens[:3])
    operator = OPERATORS[kind.operator]
    return operator(q, k, v, initial_state=state, return_state=True, **decay, **kind.options)[1]


@every_kind
def test_advance_is_running_the_operator_on(lib: Library, kind: Kind) -> None:
    def check(data: st.DataObject) -> None:
        tokens = draw_tokens(data)
        cut = data.draw(st.integers(0, TOKENS), "cut")
        state = run(lib, kind, tokens.part(0, cut))
        before = numbers(lib, state)
        moved = segments.advance(state, summary(lib, kind, tokens.part(cut, TOKENS)))
        whole = run(lib, kind, tokens)
        assert type(moved) is type(state) is type(whole)
        allowed = Scale(kind, tokens).allowed()
        assert_close(numbers(lib, moved), numbers(lib, whole), {name: allowed[name] for name in whole._fields})
        for name, x in numbers(lib, state).items():
            np.testing.assert_array_equal(x, before[name])

    for_all(lib, check)


@every_kind
def test_advance_from_nothing(lib: Library, kind: Kind) -> None:
    """A state is a segment without what only combining needs."""
    tokens = make_tokens("resets", seed=7)
    start = hla.init_state(kind.operator, batch=(HEADS,), d=D, dv=DV, like=lib.asarray(np.zeros(1)), **kind.options)
    segment = summary(lib, kind, tokens)
    for name, x in segments.advance(start, segment)._asdict().items():
        np.testing.assert_array_equal(lib.numpy(x), lib.numpy(getattr(segment, name)))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.definition == "exact"], ids=str)
def test_what_lies_before_a_reset_is_gone(lib: Library, kind: Kind) -> None:
    """A segment with decay 0 lets nothing through from the left, not even NaN; only AHLA's R does not decay.

    The printed recurrences are left out: they read undecayed, so a reset does not clear them.
    """
    tokens = make_tokens("resets", seed=8)._replace(log_decay=np.full((HEADS, TOKENS), -np.inf))
    tokens = tokens._replace(decay={"log_decay": tokens.log_decay})
    right = summary(lib, kind, tokens)
    left = type(right)(*(x * float("nan") for x in right))
    zero = type(right)(*(lib.asarray(np.zeros(x.shape)) for x in right))
    got = numbers(lib, segments.combine(left, right))
    for name, x in numbers(lib, segments.combine(zero, right)).items():
        if name == "decay" or (name, kind.operator, kind.mask) == ("key_query_moment", "ahla", "causal"):
            continue
        np.testing.assert_array_equal(got[name], x, err_msg=name)


# --- the adjoint ⊕* --------------------------------------------------------------------------------------------------


def random_segment(kind: Kind, batch: tuple[int, ...], seed: int, lib: Library | None = None) -> Any:
    """Every field drawn for itself, decays inside (0, 1)."""
    lib = lib or _numpy()
    rng = np.random.default_rng(seed)
    unit = identity_of(_numpy(), kind, batch)
    values = [rng.uniform(0.2, 0.9, x.shape) if i == 0 else rng.normal(size=x.shape) for i, x in enumerate(unit)]
    return type(unit)(*(lib.asarray(x) for x in values))


def inner(a: Any, b: Any) -> float:
    return sum(float(np.sum(x * y)) for x, y in zip(a, b, strict=True))


def difference(function: Callable[[float], float], h: float = 2.0**-8) -> float:
    """f'(0); exact for polynomials up to degree 4."""
    return (8 * (function(h) - function(-h)) - (function(2 * h) - function(-2 * h))) / (12 * h)


@every_kind
@pytest.mark.parametrize(("left", "right"), [((), ()), ((3,), (3,)), ((1, 3), (2, 1)), ((), (2, 3)), ((2, 1, 3), (3,))])
def test_combine_vjp(lib: Library, kind: Kind, left: tuple[int, ...], right: tuple[int, ...]) -> None:
    """Against differences of `combine` along random directions, in each field of each side."""
    if lib.name == "jax" and left != (1, 3):
        pytest.skip("one pair of batch axes on jax, where every shape is compiled")
    a, b = random_segment(kind, left, 1), random_segment(kind, right, 2)
    value, pull = segments.combine_vjp(lib.tree(a), lib.tree(b))
    expected = segments.combine(a, b)
    for mine, its in zip(value, expected, strict=True):
        np.testing.assert_allclose(lib.numpy(mine), its, rtol=1e-13, atol=1e-13)
    rng = np.random.default_rng(3)
    d = type(expected)(*(rng.normal(size=x.shape) for x in expected))
    gradients = pull(lib.tree(d))
    for side, given_segment, gradient in (("left", a, gradients[0]), ("right", b, gradients[1])):
        assert type(gradient) is type(given_segment)
        gradient = lib.tree(gradient)
        for i, field in enumerate(given_segment._fields):
            assert gradient[i].shape == given_segment[i].shape
            direction = rng.normal(size=given_segment[i].shape)

            def moved(step: float, i: int = i, direction: Any = direction, side: str = side) -> float:
                def shifted(segment: Any) -> Any:
                    return type(segment)(*(x + step * direction if j == i else x for j, x in enumerate(segment)))

                pair = (shifted(a), b) if side == "left" else (a, shifted(b))
                return inner(segments.combine(*pair), d)

            got = float(np.sum(gradient[i] * direction))
            wanted = difference(moved)
            scale = max(abs(wanted), float(np.sum(np.abs(gradient[i] * direction))), 1.0)
            assert abs(got - wanted) <= 1e-11 * scale, f"{side}.{field}: {got} against {wanted}"


@every_kind
def test_combine_vjp_at_a_reset(lib: Library, kind: Kind) -> None:
    """ρ_B = 0 is an ordinary point of ⊕, which is a polynomial: nothing is selected away in the gradient."""
    a, b = random_segment(kind, (3,), 4), random_segment(kind, (3,), 5)
    b = b._replace(decay=np.zeros(3))
    rng = np.random.default_rng(6)
    d = type(a)(*(rng.normal(size=x.shape) for x in a))
    gradient = lib.tree(segments.combine_vjp(lib.tree(a), lib.tree(b))[1](lib.tree(d))[1])
    direction = rng.normal(size=3)
    wanted = difference(lambda h: inner(segments.combine(a, b._replace(decay=h * direction)), d))
    assert float(np.sum(gradient.decay * direction)) == pytest.approx(wanted, rel=1e-10)
    assert all(np.isfinite(x).all() for x in gradient)


def test_combine_vjp_of_another_segment(lib: Library) -> None:
    a = random_segment(KINDS[0], (3,), 1, lib)
    other = random_segment(Kind("ahla"), (3,), 1, lib)
    _, pull = segments.combine_vjp(a, a)
    with pytest.raises(hla.OptionError, match=r"^cotangent: expected LinearAttentionSegment, got AhlaSegment\. "):
        pull(other)


# --- options and shapes ----------------------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("scale", [1.0, 0.37, -2.0])
def test_a_segment_holds_the_scaled_q(lib: Library, kind: Kind, scale: float) -> None:
    tokens = make_tokens("tokens", seed=9)
    scaled = tokens._replace(q=scale * tokens.q)
    got = numbers(lib, summary(lib, kind, tokens, scale=scale))
    assert_close(got, numbers(lib, summary(lib, kind, scaled)), Scale(kind, scaled).allowed())


@every_kind
def test_masked_tokens_are_not_there(lib: Library, kind: Kind) -> None:
    """Whatever they hold, in q, k, v and the decay."""
    tokens = make_tokens("tokens", seed=10)
    mask = np.asarray([True, False, True, True, False, False, True])
    spoilt = [np.where(mask[:, None], x, np.nan) for x in tokens[:3]]
    spoilt_decay = np.where(mask, tokens.log_decay, -np.inf)
    given_tokens = Tokens(*spoilt, {"log_decay": spoilt_decay}, spoilt_decay)
    got = numbers(lib, summary(lib, kind, given_tokens, token_mask=lib.asarray(mask)))
    kept = Tokens(
        *(x[:, mask] for x in tokens[:3]), {"log_decay": tokens.log_decay[:, mask]}, tokens.log_decay[:, mask]
    )
    assert_close(got, numbers(lib, summary(lib, kind, kept)), Scale(kind, kept).allowed())


def test_a_masked_token_does_not_decay(lib: Library) -> None:
    """Also where the decay is constant, and the mask differs from head to head."""
    kind = Kind("hla2")
    tokens = make_tokens("number", seed=11)
    mask = np.ones((HEADS, TOKENS), dtype=bool)
    mask[0, 3:] = mask[1, :2] = False
    got = summary(lib, kind, tokens, token_mask=lib.asarray(mask))
    gamma = tokens.decay["decay"]
    np.testing.assert_allclose(lib.numpy(got.decay), gamma ** mask.sum(axis=1), rtol=1e-14)


@every_kind
@pytest.mark.parametrize("chunk_size", [1, 3, TOKENS, 11])
def test_chunk_size_changes_nothing(kind: Kind, chunk_size: int) -> None:
    tokens = make_tokens("resets", seed=12)
    got = numbers(_numpy(), summary(_numpy(), kind, tokens, chunk_size=chunk_size))
    assert_close(got, numbers(_numpy(), summary(_numpy(), kind, tokens)), Scale(kind, tokens).allowed())


@every_kind
def test_time_on_another_axis(lib: Library, kind: Kind) -> None:
    tokens = make_tokens("tokens", seed=13)
    moved = tokens._replace(q=tokens.q.swapaxes(0, 1), k=tokens.k.swapaxes(0, 1), v=tokens.v.swapaxes(0, 1))
    got = numbers(lib, summary(lib, kind, moved, axis=-3))
    assert_close(got, numbers(lib, summary(lib, kind, tokens)), Scale(kind, tokens).allowed())


def test_prefix_mask_of_linear_attention_is_the_causal_one(lib: Library) -> None:
    tokens = make_tokens("tokens", seed=14)
    causal = summary(lib, Kind("linear_attention"), tokens)
    assert type(summary(lib, Kind("linear_attention", "prefix"), tokens)) is type(causal)


@pytest.mark.parametrize(("order", "operator"), [(1, "linear_attention"), (2, "hla2"), (3, "hla3")])
def test_orders_up_to_three(lib: Library, order: int, operator: str) -> None:
    tokens = make_tokens("tokens", seed=15)
    got = summary(lib, Kind("higher_order"), tokens, order=order)
    expected = summary(lib, Kind(operator), tokens)
    assert type(got) is type(expected)
    for mine, its in zip(got, expected, strict=True):
        np.testing.assert_array_equal(lib.numpy(mine), lib.numpy(its))


@every_kind
def test_grouped_heads(lib: Library, kind: Kind) -> None:
    """k and v on a size-1 axis: the key-only field is stored once per key head, through combine and advance too."""
    rng = np.random.default_rng(16)
    q = rng.normal(size=(3, 2, TOKENS, D))
    k, v = rng.normal(size=(3, 1, TOKENS, D)), rng.normal(size=(3, 1, TOKENS, DV))

    def make(start: int, stop: int, *inputs: Any) -> Any:
        part = (lib.asarray(x[..., start:stop, :]) for x in inputs)
        return segments.from_tokens(kind.operator, *part, decay=0.9, **kind.options)

    both = segments.combine(make(0, 4, q, k, v), make(4, TOKENS, q, k, v))
    wide = [np.broadcast_to(x, (3, 2, *x.shape[2:])) for x in (k, v)]
    full = make(0, TOKENS, q, *wide)
    operator = OPERATORS[kind.operator]
    _, state = operator(*(lib.asarray(x[..., :4, :]) for x in (q, k, v)), decay=0.9, return_state=True, **kind.options)
    moved = segments.advance(state, make(4, TOKENS, q, k, v))
    for name, x in both._asdict().items():
        expected = lib.numpy(getattr(full, name))
        shape = {"key_moment": (3, 1, D, D), "decay": (3, 1)}.get(name, expected.shape)
        assert tuple(x.shape) == shape, name
        np.testing.assert_allclose(
            np.broadcast_to(lib.numpy(x), expected.shape), expected, rtol=1e-12, atol=1e-12, err_msg=name
        )
        if name in moved._fields:
            assert tuple(getattr(moved, name).shape) == shape, name
            np.testing.assert_allclose(lib.numpy(getattr(moved, name)), lib.numpy(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_fields_are_in_the_dtype_of_accumulation(lib: Library, dtype: str) -> None:
    if dtype not in lib.floats:
        pytest.skip(f"{lib.name} has no {dtype}")
    if (lib.name, dtype) == ("numpy", "bfloat16"):
        pytest.importorskip("ml_dtypes")
    tokens = make_tokens("heads", seed=17)
    wide = "float64" if dtype == "float64" else "float32"
    q, k, v = (lib.asarray(x, dtype) for x in tokens[:3])
    for kind in KINDS if lib.name != "jax" else FEW_KINDS[:1]:
        found = segments.from_tokens(kind.operator, q, k, v, decay=lib.asarray(tokens.decay["decay"]), **kind.options)
        assert all(x.dtype == lib.dtype(wide) for x in found)
        rounded = tokens._replace(q=lib.numpy(q), k=lib.numpy(k), v=lib.numpy(v))
        exact = numbers(_numpy(), summary(_numpy(), kind, rounded._replace(q=rounded.q.astype(np.float64))))
        units = 3 * (TOKENS + D) * np.finfo(wide).eps
        allowed = {n: units * x for n, x in numbers(_numpy(), summary(_numpy(), kind, rounded.absolute())).items()}
        assert_close(numbers(lib, found), exact, allowed)


def test_identity_takes_batch_axes_of_keys(lib: Library) -> None:
    like = lib.asarray(np.zeros(1), "float32")
    unit = segments.identity("hla2", batch=(3, 2), kv_batch=(3, 1), d=D, dv=DV, like=like, normalize=True)
    assert {name: tuple(x.shape) for name, x in unit._asdict().items()} == {
        "decay": (3, 1),
        "key_moment": (3, 1, D, D),
        "query_value_moment": (3, 2, D, DV),
        "corrected_state": (3, 2, D, DV),
        "query_mass": (3, 2, D),
        "corrected_mass": (3, 2, D),
    }
    assert all(x.dtype == lib.dtype("float32") for x in unit)


# --- a segment is plain data -----------------------------------------------------------------------------------------


@every_kind
def test_pickle_and_copy(kind: Kind) -> None:
    segment = summary(_numpy(), kind, make_tokens("heads", seed=18))
    copies = [pickle.loads(pickle.dumps(segment, protocol)) for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1)]
    for other in (*copies, copy.copy(segment), copy.deepcopy(segment)):
        assert type(other) is type(segment)
        for mine, its in zip(other, segment, strict=True):
            np.testing.assert_array_equal(mine, its)


@every_kind
def test_tree(lib: Library, kind: Kind) -> None:
    """A segment is a node of the library's trees, and comes back as itself."""
    segment = summary(lib, kind, make_tokens("heads", seed=19))
    if lib.name == "jax":
        import jax

        leaves, form = jax.tree_util.tree_flatten(segment)
        back = jax.tree_util.tree_unflatten(form, leaves)
        doubled = jax.tree_util.tree_map(lambda x: 2 * x, segment)
    elif lib.name == "torch":
        from torch.utils import _pytree

        leaves, form = _pytree.tree_flatten(segment)
        back = _pytree.tree_unflatten(leaves, form)
        doubled = _pytree.tree_map(lambda x: 2 * x, segment)
    else:
        leaves, back, doubled = list(segment), type(segment)(*segment), type(segment)(*(2 * x for x in segment))
    assert len(leaves) == len(segment)
    assert type(back) is type(doubled) is type(segment)
    assert all(x is y for x, y in zip(back, segment, strict=True))
    np.testing.assert_array_equal(lib.numpy(doubled[-1]), 2 * lib.numpy(segment[-1]))


def test_compiled(lib: Library) -> None:
    if lib.name != "jax":
        pytest.skip("jax.jit: in the session of jax")
    import jax

    for kind in (Kind("hla3", normalize=True), Kind("hla2", definition="as_printed", ridge=0.7)):
        tokens = make_tokens("tokens", seed=20)
        both = [summary(lib, kind, tokens.part(0, 3)), summary(lib, kind, tokens.part(3, TOKENS))]
        state = run(lib, kind, tokens.part(0, 3))

        @jax.jit
        def moved(a: Any, b: Any, state: Any) -> Any:
            return segments.combine(a, b), segments.advance(state, b)

        combined, advanced = moved(*both, state)
        allowed = Scale(kind, tokens).allowed()
        assert_close(numbers(lib, combined), numbers(lib, summary(lib, kind, tokens)), allowed)
        whole = numbers(lib, run(lib, kind, tokens))
        assert_close(numbers(lib, advanced), whole, {name: allowed[name] for name in whole})


@every_kind
def test_nothing_is_written_to(kind: Kind) -> None:
    a, b = random_segment(kind, (3,), 1), random_segment(kind, (3,), 2)
    state = run(_numpy(), kind, make_tokens("heads", seed=21))
    for x in (*a, *b, *state):
        x.flags.writeable = False
    segments.combine(a, b)
    segments.combine_vjp(a, b)[1](a)
    segments.advance(state, a)


# --- errors ----------------------------------------------------------------------------------------------------------


def segment_of(
    lib: Library, operator: str = "hla2", *, d: int = D, dv: int = DV, batch: int = 3, **options: Any
) -> Any:
    rng = np.random.default_rng(22)
    q, k, v = (lib.asarray(rng.normal(size=(batch, TOKENS, size))) for size in (d, d, dv))
    return segments.from_tokens(operator, q, k, v, **options)


@pytest.mark.parametrize("function", [segments.combine, segments.combine_vjp])
def test_pairs_that_do_not_fit(lib: Library, function: Callable[..., Any]) -> None:
    good = segment_of(lib)
    for other in (segment_of(lib, "ahla"), segment_of(lib, normalize=True), segment_of(lib, mask="prefix")):
        with pytest.raises(hla.OptionError, match=r"^b: expected a segment of hla2 with .*, got one of .*\. Combine"):
            function(good, other)
    for other in (segment_of(lib, d=4), segment_of(lib, dv=4), segment_of(lib, batch=2)):
        with pytest.raises(hla.ShapeError, match=r"^b(\.\w+)?: expected .*, got .*\. "):
            function(good, other)
    state = hla.init_state("hla2", batch=(3,), d=D, dv=DV, like=good.decay)
    for pair, name in (((state, good), "a"), ((good, state), "b"), ((good, tuple(good)), "b"), ((None, good), "a")):
        with pytest.raises(hla.DTypeError, match=rf"^{name}: expected a segment, got \w+\. Make one with"):
            function(*pair)


def test_a_segment_that_does_not_fit_the_state(lib: Library) -> None:
    good = segment_of(lib)
    state = hla.init_state("hla2", batch=(3,), d=D, dv=DV, like=good.decay)
    for other in (segment_of(lib, "ahla"), segment_of(lib, ridge=0.7), segment_of(lib, definition="as_printed")):
        with pytest.raises(hla.OptionError, match=r"^segment: expected one of hla2 with .*, got one of .*\. Make"):
            segments.advance(state, other)
    for other in (segment_of(lib, d=4), segment_of(lib, dv=4), segment_of(lib, batch=2)):
        with pytest.raises(hla.ShapeError, match=r"^segment(\.\w+)?: expected .*, got .*\. "):
            segments.advance(state, other)
    with pytest.raises(hla.DTypeError, match=r"^state: expected a state, got Hla2Segment\. "):
        segments.advance(good, good)
    with pytest.raises(hla.DTypeError, match=r"^segment: expected a segment, got Hla2State\. "):
        segments.advance(state, state)


def test_segments_of_two_libraries(lib: Library) -> None:
    if lib.name == "numpy":
        pytest.skip("needs a second library")
    here, there = segment_of(lib), segment_of(_numpy())
    with pytest.raises(hla.MixedArrayError, match=rf"^b: expected an array of the same library as .* \({lib.family}\)"):
        segments.combine(here, there)
    state = hla.init_state("hla2", batch=(3,), d=D, dv=DV, like=here.decay)
    with pytest.raises(hla.MixedArrayError, match=r"^segment: expected an array of the same library"):
        segments.advance(state, there)


@pytest.mark.parametrize(
    ("operator", "options", "argument"),
    [
        ("higher_order", {"order": 4}, "order"),
        ("higher_order", {"order": 5}, "order"),
        ("higher_order", {"order": 0}, "order"),
        ("hla2", {"mask": "none"}, "mask"),
        ("linear_attention", {"mask": "none"}, "mask"),
        ("hla4", {}, "operator"),
        ("ahla", {"ridge": 0.1}, "ridge"),
    ],
)
def test_operators_without_segments(operator: str, options: dict[str, Any], argument: str) -> None:
    x = np.ones((TOKENS, D))
    with pytest.raises(hla.OptionError, match=rf"^{argument}: expected .*, got .*\. "):
        segments.from_tokens(operator, x, x, x, **options)
    with pytest.raises(hla.OptionError, match=rf"^{argument}: expected .*, got .*\. "):
        segments.identity(operator, batch=(), d=D, dv=DV, like=x, **options)


@pytest.mark.parametrize(
    ("given_name", "close"),
    [("normalise", "normalize"), ("log_decays", "log_decay"), ("return_state", None), ("cu_seqlens", None)],
)
def test_unknown_keyword(given_name: str, close: str | None) -> None:
    x = np.ones((TOKENS, D))
    with pytest.raises(TypeError, match=rf"^from_tokens\(\) got an unexpected keyword argument '{given_name}'\. ") as e:
        segments.from_tokens("hla2", x, x, x, **{given_name: True})
    assert (f"Did you mean {close!r}?" in str(e.value)) or close is None

"""`hla.paper` against the definitions, and the algebra of its operators."""

from __future__ import annotations

import doctest
import functools
import importlib
import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hla
import oracle
from hla import paper

TOKENS, HEADS, D, DV = 13, 3, 5, 7
ORDER = {"hla2": 2, "ahla": 2, "hla3": 3}
EPS = 0.3
PER_HEAD_DECAY = np.array([0.5, 0.9, 1.0])

# algorithm, the operator it computes, and by which definition under decay
ALGORITHMS = [
    pytest.param(paper.algorithm1, "hla2", "as_printed", id="algorithm1"),
    pytest.param(paper.algorithm2, "ahla", "exact", id="algorithm2"),
    pytest.param(paper.algorithm3, "hla3", "as_printed", id="algorithm3"),
    pytest.param(paper.algorithm4, "hla3", "as_printed", id="algorithm4"),
]


def inputs(seed: int = 0, tokens: int = TOKENS, heads: int = HEADS) -> tuple[Any, Any, Any]:
    """Read-only q, k (heads, tokens, D), v (heads, tokens, DV) in float64."""
    rng = np.random.default_rng(seed)
    arrays = (
        rng.normal(size=(heads, tokens, D)),
        rng.normal(size=(heads, tokens, D)),
        rng.normal(size=(heads, tokens, DV)),
    )
    for x in arrays:
        x.flags.writeable = False
    return arrays


def reference(op: str, q: Any, k: Any, v: Any, *, decay: Any = None, **options: Any) -> Any:
    """The oracle, head by head, with a constant decay."""
    rows = []
    for head in range(q.shape[0]):
        gamma = None if decay is None else np.broadcast_to(decay, q.shape[:1])[head]
        log_decay = None if gamma is None else np.full(q.shape[1], np.log(gamma))
        rows.append(oracle.attend(op, q[head], k[head], v[head], log_decay=log_decay, **options))
    return np.stack(rows)


def assert_agrees(
    got: Any, op: str, q: Any, k: Any, v: Any, *, dtype: Any = np.float64, normalize: bool = False, **options: Any
) -> None:
    """Per token, no further from the definition than rounding allows.

    Every value is a sum of products of the inputs, evaluated in chains of at most order * (T + d) + 8 additions, so it
    is off by at most that many units of rounding of the same sum with all terms positive (no decay, nothing
    masked). A quotient inherits the errors of its two parts.
    """
    units = np.finfo(dtype).eps * (ORDER[op] * (q.shape[-2] + q.shape[-1]) + 8)
    ridge = options.get("ridge", 0.0)
    ones = np.ones_like(v[..., :1])
    positive = [np.abs(x) for x in (q, k)]
    slack = units * reference(op, *positive, np.abs(v), mask="prefix", ridge=ridge)
    expected = reference(op, q, k, v, normalize=normalize, **options)
    if normalize:
        below = reference(op, q, k, ones, **options) + options.get("eps", 1e-6)
        below_slack = units * reference(op, *positive, ones, mask="prefix", ridge=ridge)
        assert np.all(below_slack < np.abs(below)), "the inputs give a denominator lost in rounding"
        slack = (slack + np.abs(expected) * below_slack) / (np.abs(below) - below_slack)
    assert got.shape == expected.shape
    error, allowed = per_token(got - expected, expected), per_token(slack, expected)
    assert np.all(error <= allowed), f"token errors {error.max(axis=0)} above {allowed.max(axis=0)}"


def per_token(difference: Any, expected: Any) -> Any:
    """max|difference_t| over the largest output up to token t."""
    running = np.maximum.accumulate(np.max(np.abs(expected), axis=-1), axis=-1)
    return np.max(np.abs(difference), axis=-1) / running


# --- algorithms and theorems ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("algorithm", "op", "definition"), ALGORITHMS)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("decay", [None, 0.9, 1, PER_HEAD_DECAY], ids=["none", "0.9", "one", "per head"])
def test_algorithms_compute_their_definition(
    algorithm: Callable[..., Any], op: str, definition: str, decay: Any, normalize: bool
) -> None:
    q, k, v = inputs()
    got = algorithm(q, k, v, decay=decay, normalize=normalize, eps=0.01)
    assert_agrees(got, op, q, k, v, decay=decay, normalize=normalize, eps=0.01, definition=definition)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("decay", [None, PER_HEAD_DECAY], ids=["none", "per head"])
def test_algorithm1_ridge(decay: Any, normalize: bool) -> None:
    q, k, v = inputs(1)
    got = paper.algorithm1(q, k, v, decay=decay, ridge=0.7, normalize=normalize)
    assert_agrees(got, "hla2", q, k, v, decay=decay, ridge=0.7, normalize=normalize, definition="as_printed")


@pytest.mark.parametrize("normalize", [False, True])
def test_reading_a_segment_with_ridge(normalize: bool) -> None:
    q, k, v = (x[0] for x in inputs(28))
    total = functools.reduce(paper.hla2_concat, [paper.hla2_token(q[t], k[t], v[t]) for t in range(TOKENS)])
    got = paper.hla2_output(total, q[-1], ridge=0.7, normalize=normalize, eps=EPS)
    expected = paper.algorithm1(q, k, v, ridge=0.7, normalize=normalize, eps=EPS)[-1]
    np.testing.assert_allclose(got, expected, rtol=1e-11)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(
    ("algorithm", "operator", "options"),
    [
        (paper.algorithm1, hla.hla2, {"definition": "as_printed"}),
        (paper.algorithm1, hla.hla2, {"definition": "as_printed", "ridge": 0.7}),
        (paper.algorithm2, hla.ahla, {}),
        (paper.algorithm3, hla.hla3, {"definition": "as_printed"}),
    ],
)
def test_the_library_offers_the_printed_algorithms(
    algorithm: Callable[..., Any], operator: Callable[..., Any], options: dict[str, Any], normalize: bool
) -> None:
    q, k, v = (np.abs(x) for x in inputs(30))  # away from denominators near zero
    ridge = {"ridge": options["ridge"]} if "ridge" in options else {}
    expected = algorithm(q, k, v, decay=PER_HEAD_DECAY, normalize=normalize, eps=EPS, **ridge)
    got = operator(q, k, v, decay=PER_HEAD_DECAY, normalize=normalize, eps=EPS, **options)
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-9 * np.max(np.abs(expected)))


def test_undecayed_algorithms_1_and_2_are_the_exact_operators() -> None:
    q, k, v = inputs(2)
    assert_agrees(paper.algorithm1(q, k, v), "hla2", q, k, v, definition="exact")
    assert_agrees(paper.algorithm2(q, k, v), "ahla", q, k, v, definition="exact")


@pytest.mark.parametrize(
    ("algorithm", "op", "decay"), [(paper.algorithm1, "hla2", 0.5), (paper.algorithm3, "hla3", None)]
)
def test_where_the_printed_algorithm_is_not_the_operator(algorithm: Callable[..., Any], op: str, decay: Any) -> None:
    """Only the first token agrees; the worst is off by more than a tenth of the output in every head: no rounding."""
    q, k, v = inputs(3)
    exact = reference(op, q, k, v, decay=decay)
    error = per_token(algorithm(q, k, v, decay=decay) - exact, exact)
    assert np.all(error[:, 0] < 1e-13)
    assert np.all(error[:, 1:].max(axis=-1) > 0.1)


@pytest.mark.parametrize("chunk_size", [1, 2, 5, TOKENS, 17])
@pytest.mark.parametrize("normalize", [False, True])
def test_algorithm4_any_chunk_size(chunk_size: int, normalize: bool) -> None:
    q, k, v = inputs(4)
    got = paper.algorithm4(q, k, v, chunk_size=chunk_size, normalize=normalize)
    assert_agrees(got, "hla3", q, k, v, definition="as_printed", normalize=normalize)


@pytest.mark.parametrize(
    ("theorem", "op", "definition"),
    [
        (paper.theorem_3_1, "hla2", "exact"),
        (paper.theorem_4_1, "hla2", "exact"),
        (paper.theorem_6_1, "ahla", "exact"),
        (paper.section_6_2_scan, "ahla", "exact"),
        (paper.theorem_7_1, "hla3", "as_printed"),
        (paper.equation_7_5, "hla3", "as_printed"),
        (paper.theorem_7_2, "hla3", "as_printed"),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
@pytest.mark.parametrize("normalize", [False, True])
def test_theorems_without_decay(theorem: Callable[..., Any], op: str, definition: str, normalize: bool) -> None:
    q, k, v = inputs(5)
    got = theorem(q, k, v, normalize=normalize, eps=0.01)
    assert_agrees(got, op, q, k, v, normalize=normalize, eps=0.01, definition=definition)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("decay", [None, PER_HEAD_DECAY], ids=["none", "per head"])
def test_equation_3_1(decay: Any, normalize: bool) -> None:
    q, k, v = inputs(6)
    got = paper.equation_3_1(q, k, v, decay=decay, normalize=normalize)
    assert_agrees(got, "hla2", q, k, v, decay=decay, normalize=normalize, mask="prefix")


@pytest.mark.parametrize("normalize", [False, True])
def test_third_order_unmasked_factorization(normalize: bool) -> None:
    q, k, v = inputs(7)
    got = paper.hla3_unmasked(q, k, v, normalize=normalize)
    assert_agrees(got, "hla3", q, k, v, normalize=normalize, mask="prefix")


@pytest.mark.parametrize(
    ("tensor", "op"), [(paper.hla2_tensor, "hla2"), (paper.ahla_tensor, "ahla"), (paper.hla3_tensor, "hla3")]
)
def test_bidirectional_operators(tensor: Callable[..., Any], op: str) -> None:
    q, k, v = inputs(8)
    expected = reference(op, q, k, v, mask="none")
    magnitude = reference(op, np.abs(q), np.abs(k), np.abs(v), mask="none")
    units = np.finfo(np.float64).eps * (ORDER[op] * (TOKENS + D) + 8)
    assert np.all(np.abs(tensor(q, k, v) - expected) <= units * magnitude)


# --- figures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("figure", "op"), [(paper.figure_1b, "hla2"), (paper.figure_2b, "ahla")])
def test_parallel_forms(figure: Callable[..., Any], op: str) -> None:
    q, k, v = inputs(9)
    assert_agrees(figure(q, k, v), op, q, k, v)


@pytest.mark.parametrize("chunk_size", [1, 2, 5, TOKENS, 17])
@pytest.mark.parametrize(("figure", "op"), [(paper.figure_1c_corrected, "hla2"), (paper.figure_2c_corrected, "ahla")])
def test_corrected_chunk_formulas(figure: Callable[..., Any], op: str, chunk_size: int) -> None:
    q, k, v = inputs(10)
    assert_agrees(figure(q, k, v, chunk_size=chunk_size), op, q, k, v)


@pytest.mark.parametrize("chunk_size", [2, 5])
@pytest.mark.parametrize(
    ("printed", "op"),
    [(paper.figure_1c, "hla2"), (paper.figure_2c, "ahla")],
)
def test_printed_chunk_formulas_hold_in_the_first_chunk_only(
    printed: Callable[..., Any], op: str, chunk_size: int
) -> None:
    q, k, v = inputs(11)
    got = printed(q, k, v, chunk_size=chunk_size)
    first = slice(0, chunk_size)
    assert_agrees(got[:, first], op, q[:, first], k[:, first], v[:, first])
    exact = reference(op, q, k, v)
    assert np.all(per_token(got - exact, exact)[:, chunk_size:].max(axis=-1) > 0.1)


def test_the_missing_terms_of_the_chunk_formulas() -> None:
    """Figure 1(C) lacks q_t S_A C_t; Figure 2(C) lacks q_t k_t (q_t P_A): nothing else is wrong."""
    q, k, v = (x[0] for x in inputs(12))
    size = 5
    for t in range(size, TOKENS):
        start = t - t % size
        key_moment = sum(np.outer(k[i], k[i]) for i in range(start))
        query_value = sum(np.outer(q[i], v[i]) for i in range(start, t + 1))
        missing = paper.figure_1c_corrected(q, k, v, chunk_size=size)[t] - paper.figure_1c(q, k, v, chunk_size=size)[t]
        np.testing.assert_allclose(missing, q[t] @ key_moment @ query_value, rtol=1e-11)
        value = sum(np.outer(k[i], v[i]) for i in range(start))
        missing = paper.figure_2c_corrected(q, k, v, chunk_size=size)[t] - paper.figure_2c(q, k, v, chunk_size=size)[t]
        np.testing.assert_allclose(missing, (q[t] @ k[t]) * (q[t] @ value), rtol=1e-11)


# --- the operators: small integers and halves, so that float64 is exact and equality means equality -----------------


class Algebra(NamedTuple):
    """An operator with its tokens, and what reading the total must give."""

    token: Callable[..., Any]
    concat: Callable[..., Any]
    output: Callable[..., Any]
    op: str
    definition: str
    decayed: bool
    mask: str = "causal"


def unmasked_output(segment: paper.UnmaskedSegment, q_t: Any, *, normalize: bool, eps: float) -> Any:
    """Eqs. (3.1) and (3.2)."""
    reading = q_t @ segment.key_moment
    return reading @ segment.query_value / (reading @ segment.query_sum + eps if normalize else 1.0)


ASSOCIATIVE = [
    pytest.param(
        Algebra(paper.unmasked_token, paper.unmasked_concat, unmasked_output, "hla2", "exact", True, "prefix"),
        id="unmasked",
    ),
    pytest.param(
        Algebra(paper.hla2_token, paper.hla2_concat, paper.hla2_output, "hla2", "exact", False), id="hla2 Eq. 4.1"
    ),
    pytest.param(
        Algebra(paper.hla2_token, paper.hla2_concat_decayed_corrected, paper.hla2_output, "hla2", "exact", True),
        id="hla2 corrected",
    ),
    pytest.param(
        Algebra(paper.hla2_printed_token, paper.hla2_concat_printed, paper.hla2_output, "hla2", "as_printed", True),
        id="hla2 Section 4.3",
    ),
    pytest.param(
        Algebra(paper.ahla_token, paper.ahla_concat, paper.ahla_output, "ahla", "exact", False), id="ahla Eq. 6.2"
    ),
    pytest.param(
        Algebra(paper.ahla_token, paper.ahla_concat_decayed_corrected, paper.ahla_output, "ahla", "exact", True),
        id="ahla corrected",
    ),
    pytest.param(
        Algebra(paper.hla3_token, paper.hla3_concat, paper.hla3_output, "hla3", "as_printed", False), id="hla3 Eq. 7.7"
    ),
    pytest.param(
        Algebra(paper.hla3_corrected_token, paper.hla3_concat_corrected, paper.hla3_output, "hla3", "exact", True),
        id="hla3 corrected",
    ),
]

NOT_ASSOCIATIVE = [
    pytest.param(paper.hla2_token, paper.hla2_concat_decayed, "cross_value", "cross_sum", id="hla2 Section 4.2"),
    pytest.param(paper.ahla_token, paper.ahla_concat_decayed, "routed_value", "routed_sum", id="ahla Section 6.2"),
    pytest.param(
        paper.hla3_token, paper.hla3_concat_decayed, "corrected_value", "corrected_sum", id="hla3 Section 7.3"
    ),
]


@st.composite
def exact_tokens(draw: st.DrawFn) -> tuple[Any, Any, Any, Any]:
    """q, k (n, 3), v (n, 2) of small integers, decay (n,) of ones and halves; n from 1 to 6."""
    count = draw(st.integers(1, 6))
    small = st.integers(-2, 2)

    def matrix(columns: int) -> Any:
        rows = draw(st.lists(st.lists(small, min_size=columns, max_size=columns), min_size=count, max_size=count))
        return np.array(rows, dtype=np.float64)

    decay = draw(st.lists(st.sampled_from([0.5, 1.0]), min_size=count, max_size=count))
    return matrix(3), matrix(3), matrix(2), np.array(decay)


def bracket(draw: Callable[[st.SearchStrategy[int]], int], concat: Callable[..., Any], segments: list[Any]) -> Any:
    """All segments concatenated in order, in a bracketing of Hypothesis's choice."""
    if len(segments) == 1:
        return segments[0]
    cut = draw(st.integers(1, len(segments) - 1))
    return concat(bracket(draw, concat, segments[:cut]), bracket(draw, concat, segments[cut:]))


def make_tokens(token: Callable[..., Any], q: Any, k: Any, v: Any, decay: Any) -> list[Any]:
    return [token(q[t], k[t], v[t], decay=float(decay[t])) for t in range(len(decay))]


def assert_same(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    for name, x, y in zip(a._fields, a, b, strict=True):
        np.testing.assert_array_equal(x, y, err_msg=name)


@pytest.mark.parametrize("algebra", ASSOCIATIVE)
@settings(max_examples=40, deadline=None)
@given(data=st.data(), tokens=exact_tokens())
def test_associativity(algebra: Algebra, data: st.DataObject, tokens: tuple[Any, ...]) -> None:
    segments = make_tokens(algebra.token, *tokens)
    serial = functools.reduce(algebra.concat, segments)
    assert_same(bracket(data.draw, algebra.concat, segments), serial)
    zero = paper.identity(segments[0])
    assert_same(algebra.concat(zero, serial), serial)
    assert_same(algebra.concat(serial, zero), serial)


@pytest.mark.parametrize("algebra", ASSOCIATIVE)
@settings(max_examples=25, deadline=None)
@given(tokens=exact_tokens())
def test_reading_the_total_gives_the_definition(algebra: Algebra, tokens: tuple[Any, ...]) -> None:
    q, k, v, decay = tokens
    segments = make_tokens(algebra.token, *tokens)
    total = functools.reduce(algebra.concat, segments)
    log_decay = np.log(decay) if algebra.decayed else None
    options: dict[str, Any] = {"log_decay": log_decay, "definition": algebra.definition, "mask": algebra.mask}
    denominator = oracle.attend(algebra.op, q, k, np.ones_like(v), **options)[-1, 0] + EPS
    for normalize in [False, True] if abs(denominator) > 0.01 else [False]:
        got = algebra.output(total, q[-1], normalize=normalize, eps=EPS)
        with np.errstate(divide="ignore", invalid="ignore"):  # earlier rows may divide by zero
            expected = oracle.attend(algebra.op, q, k, v, normalize=normalize, eps=EPS, **options)[-1]
        # The oracle's exp(log 0.5) is off by rounding; sums stay below 2²⁰, a quotient divides by 0.01 or more.
        np.testing.assert_allclose(got, expected, rtol=1e-10, atol=1e-8)


@pytest.mark.parametrize(("token", "concat", "value", "mass"), NOT_ASSOCIATIVE)
def test_printed_decayed_operators_are_not_associative(
    token: Callable[..., Any], concat: Callable[..., Any], value: str, mass: str
) -> None:
    """The two bracketings differ by ρ_B ρ_C (1 − ρ_C) times what A and B add to each other, here at least an eighth."""
    one = np.ones(1)
    a = token(one, one, one, decay=0.5)
    left, right = concat(concat(a, a), a), concat(a, concat(a, a))
    for field in (value, mass):
        assert np.all(getattr(left, field) - getattr(right, field) >= 0.125)

    q, k, v = (x[0] for x in inputs(13, tokens=3))
    a, b, c = (token(q[t], k[t], v[t], decay=rho) for t, rho in enumerate((0.9, 0.7, 0.4)))
    left, right = concat(concat(a, b), c), concat(a, concat(b, c))
    together = concat(a._replace(attenuation=np.ones(())), b._replace(attenuation=np.ones(())))
    for field in (value, mass):
        met = getattr(together, field) - getattr(a, field) - getattr(b, field)
        gap = getattr(left, field) - getattr(right, field)
        np.testing.assert_allclose(gap, 0.7 * 0.4 * (1 - 0.4) * met, rtol=1e-11, atol=1e-12)
        assert np.max(np.abs(gap)) > 0.05 * np.max(np.abs(getattr(left, field)))


def test_printed_decayed_second_order_fold_is_not_algorithm_1() -> None:
    """Its fold reads γ C of token t − 1 where line 6 reads C."""
    q, k, v = (x[0] for x in inputs(14))
    segments = [paper.hla2_token(q[t], k[t], v[t], decay=0.5) for t in range(TOKENS)]
    got = paper.hla2_output(functools.reduce(paper.hla2_concat_decayed, segments), q[-1])
    serial = paper.algorithm1(q, k, v, decay=0.5)[-1]
    assert np.max(np.abs(got - serial)) > 0.1 * np.max(np.abs(serial))


def test_printed_decayed_ahla_fold_is_algorithm_2() -> None:
    q, k, v = (x[0] for x in inputs(15))
    segments = [paper.ahla_token(q[t], k[t], v[t], decay=0.5) for t in range(TOKENS)]
    got = paper.ahla_output(functools.reduce(paper.ahla_concat_decayed, segments), q[-1])
    np.testing.assert_allclose(got, paper.algorithm2(q, k, v, decay=0.5)[-1], rtol=1e-12)


def test_decayed_third_order_fold_is_not_algorithm_3() -> None:
    q, k, v = (x[0] for x in inputs(16))
    segments = [paper.hla3_token(q[t], k[t], v[t], decay=0.5) for t in range(TOKENS)]
    got = paper.hla3_output(functools.reduce(paper.hla3_concat_decayed, segments), q[-1])
    serial = paper.algorithm3(q, k, v, decay=0.5)[-1]
    assert np.max(np.abs(got - serial)) > 0.1 * np.max(np.abs(serial))


@pytest.mark.parametrize(
    ("scan", "op", "printed", "corrected"),
    [
        (paper.theorem_4_1, "hla2", paper.algorithm1, paper.hla2_concat_decayed_corrected),
        (paper.section_6_2_scan, "ahla", paper.algorithm2, paper.ahla_concat_decayed_corrected),
    ],
    ids=["Theorem 4.1", "Section 6.2"],
)
def test_decayed_scans(
    scan: Callable[..., Any], op: str, printed: Callable[..., Any], corrected: Callable[..., Any]
) -> None:
    q, k, v = inputs(17)
    exact = reference(op, q, k, v, decay=0.5)
    assert_agrees(scan(q, k, v, decay=0.5, concat=corrected), op, q, k, v, decay=0.5)
    assert_agrees(
        scan(q, k, v, decay=PER_HEAD_DECAY, concat=corrected, normalize=True),
        op, q, k, v, decay=PER_HEAD_DECAY, normalize=True,
    )  # fmt: skip
    as_printed = scan(q, k, v, decay=0.5)
    assert per_token(as_printed - exact, exact).max() > 0.01
    serial = printed(q, k, v, decay=0.5)
    assert per_token(as_printed - serial, serial).max() > 0.01


@given(count=st.integers(0, 40))
def test_exclusive_scan_keeps_order(count: int) -> None:
    words = [chr(97 + i % 26) for i in range(count)]
    assert paper.exclusive_scan(lambda a, b: a + b, words, "") == ["".join(words[:i]) for i in range(count)]


def test_exclusive_scan_has_logarithmic_depth() -> None:
    depths = paper.exclusive_scan(lambda a, b: max(a, b) + 1, [0] * 1000, 0)
    assert max(depths) <= 2 * 10


def test_map_sizes() -> None:
    """What Section 7.3 stores per segment, against what the operator needs."""
    token = (np.ones(D), np.ones(D), np.ones(DV))
    printed, corrected = paper.hla3_token(*token), paper.hla3_corrected_token(*token)
    assert printed.value_map.size == D**3 * DV
    assert printed.sum_map.size == D**3
    assert sum(x.size for x in corrected) == 3 * D**2 + 3 * D * DV + 3 * D + 1


# --- arrays ---------------------------------------------------------------------------------------------------------

SEQUENCE_FUNCTIONS = [
    getattr(paper, name)
    for name in paper.__all__
    if name.startswith(("algorithm", "theorem", "equation", "figure", "section"))
    or name.endswith(("tensor", "unmasked"))
]


@pytest.mark.parametrize("function", SEQUENCE_FUNCTIONS, ids=lambda f: f.__name__)
def test_every_function_on_every_library(function: Callable[..., Any], library: str) -> None:
    """Each library in float32 as NumPy in float64, to the rounding of float32."""
    q, k, v = (x.astype(np.float32) for x in inputs(18, tokens=6))
    expected = function(*(x.astype(np.float64) for x in (q, k, v)))
    xp = importlib.import_module(library)
    got = function(*(xp.asarray(x.copy()) for x in (q, k, v)))
    assert type(got).__module__.partition(".")[0] in (library.partition(".")[0], "jaxlib")
    assert str(got.dtype).endswith("float32")
    # At most 3 (T + d) + 8 additions of terms that cancel at most a hundredfold.
    np.testing.assert_array_less(
        per_token(np.asarray(got) - expected, expected), 100 * np.finfo(np.float32).eps * (3 * (6 + D) + 8)
    )


@pytest.fixture(params=["numpy", "array_api_strict", "torch", "jax.numpy"])
def library(request: pytest.FixtureRequest) -> str:
    pytest.importorskip(request.param)
    return str(request.param)


@pytest.mark.parametrize(("algorithm", "op", "definition"), ALGORITHMS)
def test_options_on_every_library(algorithm: Callable[..., Any], op: str, definition: str, library: str) -> None:
    xp = importlib.import_module(library)
    q, k, v = (x.astype(np.float32) for x in inputs(19))
    decay = PER_HEAD_DECAY.astype(np.float32)
    got = algorithm(*(xp.asarray(x.copy()) for x in (q, k, v)), decay=xp.asarray(decay))
    wide = (x.astype(np.float64) for x in (q, k, v))
    assert_agrees(np.asarray(got), op, *wide, decay=decay.astype(np.float64), definition=definition, dtype=np.float32)


@pytest.mark.parametrize(("algorithm", "op", "definition"), ALGORITHMS)
def test_traced_by_jax(algorithm: Callable[..., Any], op: str, definition: str) -> None:
    """Under jit, with a traced decay, nothing is read and nothing changes."""
    jax = pytest.importorskip("jax")
    q, k, v = (x.astype(np.float32) for x in inputs(29, tokens=4))
    decay = PER_HEAD_DECAY.astype(np.float32)
    got = jax.jit(lambda *x: algorithm(*x[:3], decay=x[3]))(q, k, v, decay)
    wide = (x.astype(np.float64) for x in (q, k, v))
    assert_agrees(np.asarray(got), op, *wide, decay=decay.astype(np.float64), definition=definition, dtype=np.float32)


@pytest.mark.parametrize(("algorithm", "op", "definition"), ALGORITHMS)
def test_low_precision_accumulates_in_float32(algorithm: Callable[..., Any], op: str, definition: str) -> None:
    q, k, v = (x.astype(np.float16) for x in inputs(20, tokens=5))
    got = algorithm(q, k, v, decay=0.9)
    wide = algorithm(*(x.astype(np.float32) for x in (q, k, v)), decay=0.9)
    assert got.dtype == np.float16
    assert wide.dtype == np.float32
    np.testing.assert_array_equal(got, wide.astype(np.float16))


def test_one_float64_input_makes_the_sums_float64() -> None:
    q, k, v = inputs(21)
    narrow = v.astype(np.float32)
    got = paper.algorithm1(q, k, narrow)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, paper.algorithm1(q, k, narrow.astype(np.float64)).astype(np.float32))


def test_a_float64_decay_promotes_nothing() -> None:
    q, k, v = (x.astype(np.float32) for x in inputs(22))
    wide = paper.algorithm2(q, k, v, decay=PER_HEAD_DECAY)
    np.testing.assert_array_equal(wide, paper.algorithm2(q, k, v, decay=PER_HEAD_DECAY.astype(np.float32)))


@pytest.mark.parametrize("function", SEQUENCE_FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("tokens", [0, 1, 2])
def test_short_sequences(function: Callable[..., Any], tokens: int) -> None:
    q, k, v = inputs(23, tokens=tokens)
    got = function(q, k, v)
    assert got.shape == v.shape
    if tokens == 1:  # one term, (q·k) once per factor
        third = {paper.algorithm3, paper.algorithm4, paper.equation_7_5, paper.theorem_7_1, paper.theorem_7_2}
        order = 3 if function in third | {paper.hla3_tensor, paper.hla3_unmasked} else 2
        np.testing.assert_allclose(got, np.sum(q * k, axis=-1, keepdims=True) ** order * v, rtol=1e-12)


@pytest.mark.parametrize("function", SEQUENCE_FUNCTIONS, ids=lambda f: f.__name__)
def test_batch_axes_broadcast(function: Callable[..., Any]) -> None:
    """Grouped heads: q (2, 3, T, d) over one k and v per group."""
    rng = np.random.default_rng(24)
    q, k, v = rng.normal(size=(2, 3, 4, D)), rng.normal(size=(2, 1, 4, D)), rng.normal(size=(2, 1, 4, DV))
    got = function(q, k, v)
    assert got.shape == (2, 3, 4, DV)
    for group in range(2):
        for head in range(3):
            np.testing.assert_allclose(got[group, head], function(q[group, head], k[group, 0], v[group, 0]), rtol=1e-12)


# --- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", SEQUENCE_FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    ("shapes", "argument", "got"),
    [
        (((4, 5), (3, 5), (4, 7)), "k", "got T = 3"),
        (((4, 5), (4, 3), (4, 7)), "k", "got d = 3"),
        (((4, 5), (4, 5), (3, 7)), "v", "got T = 3"),
        (((5,), (4, 5), (4, 7)), "q", "(5,)"),
        (((2, 4, 5), (3, 4, 5), (4, 7)), "q, k, v", "(3,)"),
    ],
)
def test_shapes_that_disagree(
    function: Callable[..., Any], shapes: tuple[tuple[int, ...], ...], argument: str, got: str
) -> None:
    with pytest.raises(ValueError, match="expected") as error:
        function(*(np.ones(shape) for shape in shapes))
    assert str(error.value).startswith(f"{argument}: expected ")
    assert got in str(error.value)


@pytest.mark.parametrize(("algorithm", "op", "definition"), ALGORITHMS)
@pytest.mark.parametrize("decay", [0.0, -0.5, 1.5, float("nan"), np.ones(2), np.ones((2, 3))])
def test_bad_decay(algorithm: Callable[..., Any], op: str, definition: str, decay: Any) -> None:
    with pytest.raises(ValueError, match=r"^decay: expected "):
        algorithm(*inputs(25), decay=decay)


@pytest.mark.parametrize("function", [paper.algorithm4, paper.figure_1c, paper.figure_2c_corrected])
@pytest.mark.parametrize("chunk_size", [0, -1, 2.0, True])
def test_bad_chunk_size(function: Callable[..., Any], chunk_size: Any) -> None:
    with pytest.raises(ValueError, match=r"^chunk_size: expected "):
        function(*inputs(26), chunk_size=chunk_size)


@pytest.mark.parametrize(
    "bad", [np.ones((HEADS, TOKENS, D), dtype=np.int64), [[1.0]], np.ones((HEADS, TOKENS, D)) * 1j]
)
def test_bad_arrays(bad: Any) -> None:
    q, _, v = inputs(27)
    with pytest.raises(TypeError, match=r"^k: expected "):
        paper.algorithm1(q, bad, v)
    with pytest.raises(TypeError, match=r"^decay: expected "):
        paper.algorithm1(q, q, v, decay=np.array([1, 1, 1]))


@pytest.mark.parametrize("token", [paper.hla2_token, paper.ahla_token, paper.hla3_token, paper.unmasked_token])
def test_token_shapes(token: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"^k: expected the feature size of q, d = 5"):
        token(np.ones(5), np.ones(4), np.ones(7))


# --- the module -----------------------------------------------------------------------------------------------------


def test_examples() -> None:
    with np.printoptions(legacy=False):
        result = doctest.testmod(paper)
    assert result.attempted > 100
    assert result.failed == 0


@pytest.mark.parametrize("name", paper.__all__)
def test_public_names_are_documented(name: str) -> None:
    documented = inspect.getdoc(getattr(paper, name))
    assert documented is not None
    if inspect.isfunction(getattr(paper, name)):
        assert ">>>" in documented


def test_all_is_complete() -> None:
    defined = {
        name
        for name, thing in vars(paper).items()
        if not name.startswith("_") and getattr(thing, "__module__", None) == "hla.paper" and callable(thing)
    }
    assert defined - {"Segment", "Values"} == set(paper.__all__)


def test_import_brings_no_framework() -> None:
    code = (
        "import sys, hla.paper\nsys.exit(len({'numpy', 'torch', 'jax', 'cupy', 'array_api_strict'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

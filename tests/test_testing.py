"""hla.testing: the judge itself. Errors are seen where they are, budgets hold and are not wide."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import hla
import oracle
from hla import reference, testing
from hla.backends import Backend, BackendSpec, registered
from hla.testing.cases import CASES, FORMS, OPERATORS

T, D, DV = 23, 3, 5
RNG = np.random.default_rng(20251027)
Q, K = RNG.normal(size=(2, T, D))
V = RNG.normal(size=(T, DV))
LOG_DECAY = -RNG.exponential(0.3, size=T)
RESETS = np.where(np.isin(np.arange(T), (5, 6, 17)), -np.inf, LOG_DECAY)


# --- the definitions --------------------------------------------------------------------------------------------


def combinations() -> list[tuple[str, dict[str, Any]]]:
    found: list[tuple[str, dict[str, Any]]] = []
    for operator in ("linear_attention", "hla2", "ahla", "hla3"):
        for log_decay in (None, LOG_DECAY, RESETS):
            found += [(operator, {"mask": mask, "log_decay": log_decay}) for mask in ("causal", "prefix")]
            if operator in ("hla2", "hla3"):
                found.append((operator, {"definition": "as_printed", "log_decay": log_decay}))
            if operator == "hla2":
                found.append((operator, {"ridge": 0.7, "log_decay": log_decay}))
        found.append((operator, {"mask": "none"}))
    found += [("higher_order", {"order": n, "log_decay": x}) for n in (1, 2, 3, 4, 5, 6, 7) for x in (None, RESETS)]
    return found


@pytest.mark.parametrize(("operator", "options"), combinations())
def test_the_definition_is_the_sum_term_by_term(operator: str, options: dict[str, Any]) -> None:
    want = oracle.attend(operator, Q, K, V, scale=0.6, **options)
    got = reference.attend(operator, Q, K, V, scale=0.6, **options)
    assert testing.per_token_error(got, want) < 1e-12
    weights = reference.weights(operator, Q, K, scale=0.6, **options)
    assert testing.per_token_error(weights @ V, want) < 1e-12


@pytest.mark.parametrize("operator", ["linear_attention", "hla2", "ahla", "hla3"])
def test_the_definition_normalised(operator: str) -> None:
    options: dict[str, Any] = {"normalize": True, "eps": 0.3, "log_decay": LOG_DECAY}
    got = reference.attend(operator, abs(Q), abs(K), V, **options)
    assert testing.per_token_error(got, oracle.attend(operator, abs(Q), abs(K), V, **options)) < 1e-12


@pytest.mark.parametrize("mask", ["causal", "prefix", "none"])
def test_the_definition_of_packed_sequences(mask: str) -> None:
    offsets = [0, 7, 7, 18, T]
    ids = np.repeat(np.arange(4), np.diff(offsets))
    options: dict[str, Any] = {} if mask == "none" else {"log_decay": LOG_DECAY}
    got = reference.attend("hla3", Q, K, V, mask=mask, segment_ids=ids, **options)
    for a, b in pairwise(offsets):
        own = {} if mask == "none" else {"log_decay": LOG_DECAY[a:b]}
        alone = reference.attend("hla3", Q[a:b], K[a:b], V[a:b], mask=mask, **own)
        assert np.allclose(got[a:b], alone, rtol=1e-12, atol=0)


@pytest.mark.parametrize("operator", ["linear_attention", "hla2", "ahla", "hla3"])
def test_the_definition_skips_masked_tokens(operator: str) -> None:
    present = RNG.random(T) < 0.6
    spoilt = [np.where(present[:, None], x, np.nan) for x in (Q, K, V)]
    got = reference.attend(operator, *spoilt, log_decay=LOG_DECAY, token_mask=present)
    kept = reference.attend(operator, Q[present], K[present], V[present], log_decay=LOG_DECAY[present])
    assert np.allclose(got[present], kept, rtol=1e-12, atol=0)
    assert np.all(got[~present] == 0)


@pytest.mark.parametrize(
    ("operator", "options"),
    [
        ("hla4", {}),
        ("higher_order", {}),
        ("higher_order", {"order": 0}),
        ("hla2", {"mask": "full"}),
        ("hla2", {"definition": "printed"}),
        ("hla2", {"mask": "none", "log_decay": LOG_DECAY}),
        ("hla2", {"mask": "prefix", "definition": "as_printed"}),
        ("ahla", {"definition": "as_printed"}),
        ("ahla", {"ridge": 1.0}),
        ("higher_order", {"order": 4, "mask": "prefix"}),
    ],
)
def test_what_is_not_defined(operator: str, options: dict[str, Any]) -> None:
    with pytest.raises(hla.OptionError):
        reference.attend(operator, Q, K, V, **options)


# --- errors and budgets -----------------------------------------------------------------------------------------


def test_one_wrong_row_is_seen_among_growing_ones() -> None:
    want = reference.attend("hla3", Q, K, V)
    for t in range(T):
        got = want.copy()
        got[t] *= 1.01
        # the first rows share a scale, of outputs that grow like t³
        assert testing.per_token_error(got, want) > 1e-4
    relative_to_all = abs(0.01 * want[3]).max() / abs(want).max()
    got = want.copy()
    got[3] *= 1.01
    assert testing.per_token_error(got, want) > 30 * relative_to_all


def test_error_of_a_value_that_is_not_finite() -> None:
    got = np.ones((T, DV))
    got[3, 1] = np.nan
    assert testing.per_token_error(got, np.ones((T, DV))) == math.inf


def test_where_the_reference_is_zero_only_zero_is_right() -> None:
    zeros = np.zeros((T, DV))
    assert testing.per_token_error(zeros, zeros) == 0
    assert testing.per_token_error(zeros + 1e-300, zeros) == math.inf


def test_scale_starts_anew_in_each_packed_sequence() -> None:
    want = np.concatenate([np.full((11, DV), 1e6), np.full((12, DV), 1.0)])
    got = want.copy()
    got[15] += 1e-3
    assert testing.per_token_error(got, want) < 1e-8
    assert testing.per_token_error(got, want, cu_seqlens=np.array([0, 11, 11, T])) == pytest.approx(1e-3)


def test_error_of_nothing() -> None:
    assert testing.per_token_error(np.zeros((3, 0, 2)), np.zeros((3, 0, 2))) == 0.0


def test_shapes_have_to_agree() -> None:
    with pytest.raises(hla.ShapeError):
        testing.per_token_error(np.zeros((T, DV)), np.zeros((T, 1)))


def test_budgets_grow_with_the_sums_and_the_roundoff() -> None:
    budget = testing.error_budget
    assert budget("hla2", "float32", 100, 16) < budget("hla2", "float32", 10_000, 16) < 1e-3
    assert budget("linear_attention", "float32", T, D) < budget("hla2", "float32", T, D)
    assert budget("hla2", "float64", T, D) < 1e-8 * budget("hla2", "float32", T, D)
    assert budget("hla2", "float16", T, D) - budget("hla2", "float32", T, D) == pytest.approx(2.0**-11, rel=1e-2)
    assert budget("hla3", np.dtype(np.float32), T, D) == budget("higher_order", "float32", T, D, order=3)
    for operator, dtype in (("hla2", "int32"), ("hla9", "float32"), ("higher_order", "float32")):
        with pytest.raises(hla.OptionError):
            budget(operator, dtype, T, D)


@pytest.mark.parametrize("operator", ["linear_attention", "hla2", "ahla", "hla3"])
@pytest.mark.parametrize("length", [13, 997])
def test_correct_results_stay_within_their_budget_and_not_far_below(operator: str, length: int) -> None:
    inputs = testing.make_inputs(np, T=length, d=7, dv=5, batch=(3,), seed=length)
    error = testing.per_token_error(
        getattr(hla, operator)(*inputs, form="recurrent"), testing.expected(operator, *inputs)
    )
    budget = testing.error_budget(operator, "float32", length, 7, dv=5)
    assert budget / 1000 < error < budget


# --- inputs -----------------------------------------------------------------------------------------------------


def test_inputs_are_reproducible_and_of_length_one() -> None:
    first, again = (testing.make_inputs(np, T=31, d=64, dv=5, batch=(2, 3), seed=7) for _ in range(2))
    other = testing.make_inputs(np, T=31, d=64, dv=5, batch=(2, 3), seed=8)
    assert all(np.array_equal(x, y) for x, y in zip(first, again, strict=True))
    assert not np.array_equal(first.q, other.q)
    assert 0.5 < np.linalg.norm(first.q, axis=-1).mean() < 1.5
    assert min(x.min() for x in testing.make_inputs(np, T=31, d=64, dv=5, positive=True)[:2]) >= 0


def test_offsets_are_offsets() -> None:
    for seed in range(20):
        offsets = testing.make_cu_seqlens(np, T=31, count=5, seed=seed)
        assert offsets[0] == 0
        assert offsets[-1] == 31
        assert (np.diff(offsets) >= 0).all()
        assert (np.diff(offsets) == 0).any()
        ids = testing.make_segment_ids(np, T=31, count=5, seed=seed)
        assert np.array_equal(np.bincount(ids, minlength=5), np.diff(offsets))


# --- gradients --------------------------------------------------------------------------------------------------


def test_expected_gradients_of_a_sum_that_is_known() -> None:
    q, k, v, do = (RNG.normal(size=(1, 5, 2)) for _ in range(4))
    found = testing.expected_gradients("linear_attention", q, k, v, do, decay=0.8)
    weights = np.tril(0.8 ** np.subtract.outer(np.arange(5), np.arange(5)).clip(0))
    scores = do[0] @ v[0].T * weights
    assert np.allclose(found["q"][0], scores @ k[0], rtol=1e-9)
    assert np.allclose(found["k"][0], scores.T @ q[0], rtol=1e-9)
    assert np.allclose(found["v"][0], (q[0] @ k[0].T * weights).T @ do[0], rtol=1e-9)
    powers = np.tril(np.subtract.outer(np.arange(5), np.arange(5)))
    assert np.allclose(found["decay"], (scores * powers / 0.8 * (q[0] @ k[0].T)).sum(), rtol=1e-9)


# --- the matrix -------------------------------------------------------------------------------------------------


def test_the_reference_backend_passes_the_whole_matrix() -> None:
    checks = testing.plan_checks("numpy", testing.Placement("numpy"))
    rows = [check.run() for check in checks]
    failed = [row for row in rows if row.status == "failed"]
    assert not failed, failed[0]
    seen = {(row.operator, row.order, row.form, row.case) for row in rows if row.status == "ok"}
    wanted = {
        (operator, order, form, case.name)
        for operator, order in OPERATORS
        for form in FORMS
        for case in CASES
        if case.exists_for(operator, order, form) and case.dtype != "bfloat16"
    }
    assert wanted <= seen
    assert all(row.backend == "numpy" for row in rows)


@pytest.mark.parametrize("coverage", ["one", "few", "pairs"])
def test_smaller_coverages_are_parts_of_the_whole(coverage: str) -> None:
    place = testing.Placement("numpy")
    whole = set(testing.plan_checks("numpy", place))
    part = testing.plan_checks("numpy", place, coverage)
    assert len(set(part)) == len(part)
    assert set(part) < whole
    assert {(c.operator, c.order) for c in part} == set(OPERATORS)
    if coverage != "one":
        assert {c.case.name for c in part} == {case.name for case in CASES}
        assert {(c.operator, c.form) for c in part} >= {(o, f) for o, _ in OPERATORS for f in FORMS}


def test_case_names_are_unique() -> None:
    assert len({case.name for case in CASES}) == len(CASES)


def test_a_backend_that_refuses_is_not_a_failure_and_not_a_success() -> None:
    numpy = registered()["numpy"]
    spec = BackendSpec(name="narrow", families=("numpy",), forms=("chunkwise",), operators=("hla2",), priority=-1)
    hla.register_backend(Backend(spec=spec, load=numpy.load))
    try:
        checks = testing.plan_checks("narrow", testing.Placement("numpy"), "few")
        rows = [check.run() for check in checks if check.case.name == "plain"]
    finally:
        hla.backends.unregister_backend("narrow")
    statuses = {(row.operator, row.order, row.form): row.status for row in rows}
    assert statuses.pop(("hla2", None, "chunkwise")) == "ok"
    assert statuses.pop(("higher_order", 2, "chunkwise")) == "ok"
    assert set(statuses.values()) == {"unsupported"}
    assert all(row.note and row.error is None for row in rows if row.status == "unsupported")


def test_a_call_that_another_backend_would_run_fails() -> None:
    numpy = registered()["numpy"]
    spec = BackendSpec(name="other_form", families=("numpy",), forms=FORMS, priority=-1)
    swap = Backend(spec=spec, load=numpy.load, plain_form=lambda problem: "parallel")
    hla.register_backend(swap)
    try:
        check = testing.plan_checks("other_form", testing.Placement("numpy"), "one")[0]
        row = check.run()
    finally:
        hla.backends.unregister_backend("other_form")
    assert row.status == "failed"
    assert "would run" in row.note


def test_an_unknown_coverage() -> None:
    with pytest.raises(hla.OptionError):
        testing.plan_checks("numpy", testing.Placement("numpy"), "all")


def test_check_backend_counts_and_names_its_steps() -> None:
    steps: list[tuple[int, int, str]] = []
    rows = testing.check_backend(
        "numpy", coverage="one", libraries=["numpy"], progress=lambda *step: steps.append(step)
    )
    assert len(rows) == len(steps) == len(OPERATORS)
    assert [done for done, _, _ in steps] == list(range(len(rows)))
    assert all("numpy" in what for _, _, what in steps)


def test_check_backend_that_cannot_run() -> None:
    spec = BackendSpec(name="absent", families=("numpy",), requires=("no_such_package_hla",), extra="torch")
    hla.register_backend(Backend(spec=spec, load=registered()["numpy"].load))
    try:
        with pytest.raises(hla.BackendUnsupportedError, match=r'pip install "hla\[torch\]"'):
            testing.check_backend("absent")
    finally:
        hla.backends.unregister_backend("absent")
    with pytest.raises(hla.UnknownBackendError):
        testing.check_backend("nump")

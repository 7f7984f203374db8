"""The backend computes what the definition says, refuses the rest, and does not push itself forward."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path
from typing import Any

import hla
import numpy as np
import pytest
from hla.testing import check_backend, error_budget, per_token_error

from hla_plugin_example import SPEC, backend, compiler

OPERATORS = ("linear_attention", "hla2", "ahla", "hla3")


@pytest.fixture(autouse=True)
def needs_compiler(request: pytest.FixtureRequest) -> None:
    if compiler.command() is None and "monkeypatch" not in request.fixturenames:
        pytest.skip("with a C compiler")


def inputs(dtype: str = "float64", batch: tuple[int, ...] = (2, 3), T: int = 13) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=(*batch, T, n)).astype(dtype) for n in (5, 5, 7)]


def test_hla_finds_it_by_its_entry_point() -> None:
    assert hla.backends.registered()[SPEC.name].load.__module__ == "hla_plugin_example"
    assert SPEC.name in hla.backends.available()


def test_every_operator_and_option_against_the_definition() -> None:
    rows = check_backend(SPEC.name, libraries=["numpy"])
    assert [row for row in rows if row.status not in ("ok", "unsupported")] == []
    assert {row.operator for row in rows if row.status == "ok"} == {*OPERATORS, "higher_order"}
    notes = [row.note for row in rows if row.status == "unsupported"]
    assert {note.rpartition("c_loop: ")[2].partition(". Choose")[0] for note in notes} == {
        "has the forms recurrent, not scan",
        "has the forms recurrent, not chunkwise",
        "has the forms recurrent, not parallel",
        "takes float32, float64, not float16",
        "takes float32, float64, not bfloat16",
        "has only the exact definition",
        "has no gradient for hla.vjp",
    }


@pytest.mark.parametrize("operator", OPERATORS)
def test_heads_that_share_keys_share_their_state(operator: str) -> None:
    q, k, v = inputs(batch=(2, 3, 4))
    k, v = k[:, :, :1], v[:, :, :1]
    options: dict[str, Any] = {"decay": np.full((3, 1), 0.9), "return_state": True}
    o, state = getattr(hla, operator)(q, k, v, **options, backend=SPEC.name)
    want, last = getattr(hla, operator)(q, k, v, **options, backend="numpy")
    budget = 2 * error_budget(operator, "float64", 13, 5, dv=7, values=want.size)
    assert per_token_error(o, want) <= budget
    for x, y in zip(state, last, strict=True):
        assert x.shape == y.shape
        assert per_token_error(x, y) <= budget


@pytest.mark.parametrize("T", [0, 1, 2])
@pytest.mark.parametrize("batch", [(), (0,), (2, 3)])
def test_short_and_empty(T: int, batch: tuple[int, ...]) -> None:
    q, k, v = inputs(batch=batch, T=T)
    o, state = hla.hla2(q, k, v, return_state=True, backend=SPEC.name)
    want, last = hla.hla2(q, k, v, return_state=True, backend="numpy")
    assert o.shape == want.shape == v.shape
    np.testing.assert_allclose(o, want, rtol=1e-13, atol=1e-13)
    assert [x.shape for x in state] == [x.shape for x in last]


def test_a_bad_value_reaches_no_earlier_token_and_no_other_sequence() -> None:
    q, k, v = inputs(batch=(), T=11)
    k[4, 1] = np.nan
    o = hla.hla2(q, k, v, segment_ids=np.array([0] * 7 + [1] * 4), backend=SPEC.name)
    assert np.isfinite(o).all(axis=-1).tolist() == [True] * 4 + [False] * 3 + [True] * 4


def test_inputs_and_states_stay_as_they_are() -> None:
    q, k, v = inputs()
    _, state = hla.hla2(q, k, v, return_state=True, backend=SPEC.name)
    before = [x.copy() for x in (q, k, v, *state)]
    for x in (q, k, v, *state):
        x.flags.writeable = False
    hla.hla2(q[..., ::-1], k[..., ::-1], v, initial_state=state, decay=0.5, backend=SPEC.name)
    hla.step(state, q[..., 0, :], k[..., 0, :], v[..., 0, :], backend=SPEC.name)
    assert all(np.array_equal(x, y) for x, y in zip((q, k, v, *state), before, strict=True))


def test_it_runs_only_when_it_is_named() -> None:
    q, k, v = inputs()
    assert hla.explain("hla2", q, k, v).backend == "numpy"
    assert hla.explain("hla2", q, k, v, form="recurrent").backend == "numpy"
    plan = hla.explain("hla2", q, k, v, backend=SPEC.name)
    assert (plan.backend, plan.form) == (SPEC.name, "recurrent")
    first = replace(backend(), spec=replace(SPEC, name="c_loop_first", priority=100))
    hla.register_backend(first)
    try:
        assert hla.backends.available()[0] == "c_loop_first"
        assert hla.explain("hla2", q, k, v).backend == "numpy"
    finally:
        hla.backends.unregister_backend("c_loop_first")


def test_it_refuses_what_it_cannot_do() -> None:
    q, k, v = inputs()
    for options, reason in (
        ({"mask": "none"}, "runs forward in time only"),
        ({"definition": "as_printed"}, "has only the exact definition"),
        ({"form": "chunkwise"}, "has the forms recurrent, not chunkwise"),
    ):
        with pytest.raises(hla.BackendUnsupportedError, match=reason):
            hla.hla2(q, k, v, **options, backend=SPEC.name)
    with pytest.raises(hla.BackendUnsupportedError, match="has no gradient"):
        hla.vjp("hla2", q, k, v, backend=SPEC.name)
    assert not SPEC.gradients


def test_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    verdict = backend().availability()
    assert (verdict.ok, verdict.reason) == (False, "no C compiler: install one, or name it in the variable CC")


def test_a_compiler_that_does_not_work_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho out of order >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    compiler.function.cache_clear()
    assert backend().availability().ok
    verdict = backend().check()
    assert not verdict.ok
    assert "out of order" in verdict.reason
    monkeypatch.undo()
    if compiler.command() is not None:
        assert backend().check() == (True, "compiles, and agrees with the definition")


def test_a_compiler_that_miscompiles_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def zeros(T: int, n: int, d: int, dv: int, g: int, b: int, c: int, a: int, r: int, X: int) -> None:
        ctypes.memset(r, 0, T * n * dv * 4)

    monkeypatch.setattr(compiler, "function", lambda dtype: zeros)
    assert backend().check().reason.startswith("its results are wrong here")

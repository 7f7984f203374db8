"""`hla.inspect` against plain float64 NumPy, on every array library."""

from __future__ import annotations

import builtins
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import budget
import hla
from hla import inspect as looking
from libraries import Library

BATCH, HEADS, TOKENS, D, DV = 2, 3, 11, 5, 7
FLOATS = ("float32", "float64")


def random(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=shape)


def close(found: Any, want: Any, roundings: float, dtype: str) -> None:
    """Within so many roundings of the largest value, sums of n terms counting λ √n."""
    allowed = budget.LAMBDA * math.sqrt(roundings) * budget.UNIT[dtype] * np.max(np.abs(want))
    assert found.shape == want.shape
    assert np.max(np.abs(found - want)) <= allowed


def skip_without(lib: Library, dtype: str) -> None:
    if dtype not in lib.floats:
        pytest.skip(f"{lib.name} has no {dtype}")
    if (lib.name, dtype) == ("numpy", "bfloat16"):
        pytest.importorskip("ml_dtypes")


def linear_algebra(lib: Library) -> None:
    if lib.name == "cupy" and not hasattr(getattr(lib.module, "linalg", None), "eigvalsh"):
        pytest.skip("what stands in for CuPy has no eigenvalues")


# --- spectrum --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
def test_spectrum(lib: Library, dtype: str) -> None:
    """Against the singular values of the weighted keys: λ = σ²."""
    linear_algebra(lib)
    q, k, v = (lib.asarray(random(BATCH, HEADS, TOKENS, n, seed=n), dtype) for n in (D, D, DV))
    _, state = hla.hla2(q, k, v, decay=0.8, return_state=True)
    found = looking.spectrum(state)
    weights = 0.8 ** np.arange(TOKENS - 1, -1, -1)
    keys = np.sqrt(weights)[:, None] * lib.numpy(k).astype(np.float64)
    want = np.linalg.svd(keys, compute_uv=False) ** 2
    n = 2 * TOKENS + D * D  # the sums of S, and a rotation for each pair of features
    close(lib.numpy(found.eigenvalues), want, n, dtype)
    rank = want.sum(-1) ** 2 / (want**2).sum(-1)
    close(lib.numpy(found.effective_rank), rank, 4 * n, dtype)  # numerator and denominator are squares
    condition = want[..., 0] / want[..., -1]
    relative = np.abs(lib.numpy(found.condition) / condition - 1)
    # an error of λ_d is relative to λ_1
    assert (relative <= budget.LAMBDA * math.sqrt(n) * budget.UNIT[dtype] * 2 * condition).all()
    assert found.eigenvalues.dtype == state.key_moment.dtype
    again = looking.spectrum(state.key_moment)
    assert np.array_equal(lib.numpy(again.eigenvalues), lib.numpy(found.eigenvalues))


@pytest.mark.parametrize("size", [1.0, 1e15, 1e-15])
def test_spectrum_of_keys_that_point_one_way(lib: Library, size: float) -> None:
    """Rank 1, whatever rounding leaves; squares of these eigenvalues are no float32."""
    linear_algebra(lib)
    k = random(HEADS, 1, D)
    S = lib.asarray(size**2 * k.mT @ k if hasattr(k, "mT") else size**2 * np.swapaxes(k, -1, -2) @ k, "float32")
    found = looking.spectrum(S)
    values = lib.numpy(found.eigenvalues)
    assert (values[:, 1:] <= values[:, :1] * 1e-6).all()
    close(lib.numpy(found.effective_rank), np.ones(HEADS), D * D, "float32")
    assert (lib.numpy(found.condition) >= 1e6).all()


def test_spectrum_of_the_identity_and_of_nothing(lib: Library) -> None:
    linear_algebra(lib)
    S = np.stack([np.eye(D), np.zeros((D, D)), np.diag([1.0, 0, 0, 0, 0])])
    found = looking.spectrum(lib.asarray(S, "float32"))
    close(lib.numpy(found.effective_rank), np.asarray([D, 0.0, 1.0]), D * D, "float32")
    condition = lib.numpy(found.condition)
    assert abs(condition[0] - 1) < 1e-5
    assert np.isinf(condition[1:]).all()


def test_what_is_not_finite_stays_in_its_place(lib: Library) -> None:
    """It is what one looks for: nothing raises, and other heads and tokens are as without it."""
    linear_algebra(lib)
    k = random(HEADS, TOKENS, D)
    good = np.swapaxes(k, -1, -2) @ k
    for bad in (np.nan, np.inf):
        S = good.copy()
        S[1, 2, 2] = bad
        found, want = looking.spectrum(lib.asarray(S, "float32")), looking.spectrum(lib.asarray(good, "float32"))
        for got, clean in zip(found, want, strict=True):
            values = lib.numpy(got)
            assert np.isnan(values[1]).all()
            np.testing.assert_array_equal(values[::2], lib.numpy(clean)[::2])
        x = np.arange(1.0, TOKENS + 1)[:, None] ** 2 * np.ones(DV)
        x[4, 1] = bad
        scales = looking.token_scales(lib.asarray(x, "float32"))
        assert np.flatnonzero(~np.isfinite(lib.numpy(scales.norm))).tolist() == [4]
        assert abs(float(lib.numpy(scales.exponent)) - 2) < 1e-5


def test_spectrum_refuses() -> None:
    x = random(TOKENS, D)
    _, state = hla.ahla(x, x, x, return_state=True)
    for given, error, said in (
        (state, hla.OptionError, "key_value_moment"),
        ((state,), hla.DTypeError, r"state\.operators"),
        (x, hla.ShapeError, "square"),
        (np.ones(D), hla.ShapeError, "square"),
        (np.ones((2, 0, 0)), hla.ShapeError, "d ≥ 1"),
        (np.ones((D, D), np.int64), hla.DTypeError, "int64"),
        ([[1.0]], hla.DTypeError, "array"),
    ):
        with pytest.raises(error, match=said):
            looking.spectrum(given)


def test_the_way_out_of_a_state_without_S() -> None:
    k = random(HEADS, TOKENS, D)
    S = hla.linear_attention(k, k, k, decay=0.8, return_state=True)[1].key_value_moment
    _, state = hla.hla2(k, k, k, decay=0.8, return_state=True)
    np.testing.assert_allclose(S, state.key_moment, rtol=1e-13, atol=1e-13)


# --- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_token_scales(lib: Library, dtype: str) -> None:
    skip_without(lib, dtype)
    o = lib.asarray(random(BATCH, HEADS, TOKENS, DV) * np.arange(1.0, TOKENS + 1)[:, None] ** 1.5, dtype)
    found = looking.token_scales(o)
    exact = lib.numpy(o).astype(np.float64)
    norm = np.sqrt((exact**2).sum(-1))
    wide = "float64" if dtype == "float64" else "float32"
    close(lib.numpy(found.norm), norm, DV + 4, wide)
    assert found.norm.dtype == lib.dtype(wide)
    fits = [np.polyfit(np.log(np.arange(1, TOKENS + 1)), np.log(row), 1)[0] for row in norm.reshape(-1, TOKENS)]
    close(lib.numpy(found.exponent), np.reshape(fits, (BATCH, HEADS)), 8 * TOKENS, wide)


@pytest.mark.parametrize("power", [-1.0, 0.0, 0.5, 3.0])
def test_powers_are_found(lib: Library, power: float) -> None:
    x = np.arange(1.0, TOKENS + 1)[:, None] ** power * np.ones(DV)
    found = lib.numpy(looking.token_scales(lib.asarray(x, "float32")).exponent)
    assert abs(float(found) - power) <= budget.LAMBDA * math.sqrt(8 * TOKENS) * budget.UNIT["float32"] * 4


def test_zeros_do_not_count(lib: Library) -> None:
    x = np.arange(1.0, TOKENS + 1)[:, None] ** 2 * np.ones((3, TOKENS, DV))
    x[0, 3:6] = 0.0
    x[1, 1:] = 0.0
    x[2] = 0.0
    exponent = lib.numpy(looking.token_scales(lib.asarray(x, "float32")).exponent)
    assert abs(exponent[0] - 2) < 1e-5
    assert np.isnan(exponent[1:]).all()


def test_sizes_beyond_what_squares_can_hold(lib: Library) -> None:
    x = random(TOKENS, DV)
    for size in (1e30, 1e-30):
        found = lib.numpy(looking.token_scales(lib.asarray(size * x, "float32")).norm)
        close(found, size * np.linalg.norm(x, axis=-1), DV + 4, "float32")


@pytest.mark.parametrize("axis", [-3, 1])
def test_axis(lib: Library, axis: int) -> None:
    x = random(BATCH, TOKENS, HEADS, DV)
    found = looking.token_scales(lib.asarray(x), axis=axis)
    want = looking.token_scales(np.moveaxis(x, 1, 2))
    np.testing.assert_allclose(lib.numpy(found.norm), want.norm, rtol=1e-5)
    np.testing.assert_allclose(lib.numpy(found.exponent), want.exponent, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("shape", [(0, DV), (1, DV), (0, TOKENS, DV), (TOKENS, 0)])
def test_nothing_to_measure(lib: Library, shape: tuple[int, ...]) -> None:
    found = looking.token_scales(lib.asarray(np.ones(shape), "float32"))
    assert tuple(found.norm.shape) == shape[:-1]
    assert np.isnan(lib.numpy(found.exponent)).all()


def test_token_scales_refuses() -> None:
    x = random(TOKENS, DV)
    for given, axis, error, said in (
        (x[0], -2, hla.ShapeError, "dv"),
        (x, -1, hla.OptionError, "axis"),
        (x, 1, hla.OptionError, "axis"),
        (x, -3, hla.OptionError, "axis"),
        (x, 0.5, hla.OptionError, "axis"),
        (x.astype(int), -2, hla.DTypeError, "floating"),
    ):
        with pytest.raises(error, match=said):
            looking.token_scales(given, axis=axis)


# --- memory ----------------------------------------------------------------------------------------------------------


def remembered(log_decay: Any) -> Any:
    """The definition, summed: M_t = Σ_j Π_{s=j+1..t} γ_s, of one sequence."""
    gamma = np.exp(log_decay)
    return np.asarray([sum(np.prod(gamma[j + 1 : t + 1]) for j in range(t + 1)) for t in range(len(gamma))])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_memory_length(lib: Library, dtype: str) -> None:
    skip_without(lib, dtype)
    given = -np.abs(random(BATCH, HEADS, TOKENS)) / 3
    given[1, 2, 4] = -np.inf
    given[0, 1] = 0.0
    log_decay = lib.asarray(given, dtype)
    found = looking.memory_length(log_decay)
    exact = lib.numpy(log_decay).astype(np.float64)
    want = np.stack([[remembered(row) for row in rows] for rows in exact])
    wide = "float64" if dtype == "float64" else "float32"
    close(lib.numpy(found), want, 2 * TOKENS + 5, wide)
    assert found.dtype == lib.dtype(wide)
    assert lib.numpy(found)[1, 2, 4] == 1.0
    np.testing.assert_allclose(lib.numpy(found)[0, 1], np.arange(1, TOKENS + 1), rtol=1e-6)


def test_constant_decays_tend_to_their_limit() -> None:
    for gamma in (0.5, 0.9, 0.97):
        length = math.ceil(36.7 / -math.log(gamma))  # γ^T below the unit roundoff of float64
        found = looking.memory_length(np.full(length, math.log(gamma)))
        assert found[-1] == pytest.approx(1 / (1 - gamma), rel=1e-12)


def test_memory_of_packed_and_skipped_tokens() -> None:
    log_decay = -np.abs(random(TOKENS))
    found = looking.memory_length(log_decay, cu_seqlens=np.asarray([0, 4, TOKENS]))
    np.testing.assert_allclose(found, np.concatenate([remembered(log_decay[:4]), remembered(log_decay[4:])]))
    mask = np.arange(TOKENS) != 3
    found = looking.memory_length(log_decay, token_mask=mask)
    assert found[3] == 0
    np.testing.assert_allclose(found[mask], remembered(log_decay[mask]))


def test_memory_length_refuses() -> None:
    with pytest.raises(hla.DTypeError, match="log_decay"):
        looking.memory_length(np.zeros(3, np.int64))
    with pytest.raises(hla.DTypeError, match="log_decay"):
        looking.memory_length(0.9)
    with pytest.raises(hla.ShapeError, match="constant"):
        looking.memory_length(np.asarray(-0.1))
    with pytest.raises(hla.OptionError, match="log_decay: expected numbers ≤ 0, got some above 0"):
        looking.memory_length(np.asarray([-0.1, 0.9, -0.2]))
    with pytest.raises(TypeError, match="scale"):
        looking.memory_length(np.zeros(3), scale=2.0)


# --- all of it -------------------------------------------------------------------------------------------------------


def test_report(lib: Library) -> None:
    linear_algebra(lib)
    q, k, v, do = (lib.asarray(random(HEADS, TOKENS, n, seed=i)) for i, n in enumerate((D, D, DV, DV)))
    log_decay = lib.asarray(-np.abs(random(HEADS, TOKENS)))
    found = looking.report("hla2", q, k, v, do=do, log_decay=log_decay, scale=0.3)
    (o, state), pull = hla.vjp("hla2", q, k, v, log_decay=log_decay, scale=0.3, return_state=True)
    gradients = pull((do, None))
    for got, want in (
        (found.output.norm, np.linalg.norm(lib.numpy(o), axis=-1)),
        (found.gradients["q"].norm, np.linalg.norm(lib.numpy(gradients.q), axis=-1)),
        (found.gradients["k"].norm, np.linalg.norm(lib.numpy(gradients.k), axis=-1)),
        (found.gradients["v"].norm, np.linalg.norm(lib.numpy(gradients.v), axis=-1)),
        (found.memory, lib.numpy(looking.memory_length(log_decay))),
        (found.spectrum.eigenvalues, lib.numpy(looking.spectrum(state).eigenvalues)),
    ):
        np.testing.assert_allclose(lib.numpy(got), want, rtol=1e-5)


@pytest.mark.parametrize("axis", [-2, -3])
@pytest.mark.parametrize("operator", ["linear_attention", "hla2", "ahla", "hla3", "higher_order"])
def test_report_of_every_operator(operator: str, axis: int) -> None:
    q, k, v, do = (np.moveaxis(random(HEADS, TOKENS, n, seed=i), -2, axis) for i, n in enumerate((D, D, DV, DV)))
    order: dict[str, Any] = {"order": 4} if operator == "higher_order" else {}
    found = looking.report(operator, q, k, v, do=do, decay=0.9, axis=axis, **order)
    assert (found.spectrum is None) is (operator in ("linear_attention", "ahla"))
    assert found.output.norm.shape == found.memory.shape == (HEADS, TOKENS)
    assert {x.norm.shape for x in found.gradients.values()} == {(HEADS, TOKENS)}
    np.testing.assert_allclose(found.memory[1], remembered(np.full(TOKENS, math.log(0.9))))
    assert looking.report(operator, q, k, v, axis=axis, **order).gradients is None


def test_report_of_a_bidirectional_operator() -> None:
    x = random(TOKENS, D)
    found = looking.report("hla2", x, x, x, do=x, mask="none")
    assert found.spectrum is None
    assert found.memory is None
    assert found.gradients["q"].norm.shape == (TOKENS,)


def test_report_refuses() -> None:
    x = random(TOKENS, D)
    with pytest.raises(hla.OptionError, match="return_state"):
        looking.report("hla2", x, x, x, return_state=True)
    with pytest.raises(hla.ShapeError, match="do"):
        looking.report("hla2", x, x, x, do=x[1:])
    with pytest.raises(TypeError, match="colour"):
        looking.report("hla2", x, x, x, colour="red")


# --- the picture -----------------------------------------------------------------------------------------------------


def made(heads: int = HEADS) -> Any:
    q, k, v, do = (random(heads, TOKENS, n, seed=i) for i, n in enumerate((D, D, DV, DV)))
    return looking.report("hla2", q, k, v, do=do, decay=0.9)


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_plot(tmp_path: Path, ending: str) -> None:
    pytest.importorskip("matplotlib")
    looking.plot(made(), tmp_path / f"a.{ending}", title="layer 3")
    written = (tmp_path / f"a.{ending}").read_bytes()
    assert written.startswith(b"<?xml" if ending == "svg" else b"\x89PNG")


def test_what_the_picture_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    found = made(heads=20)
    looking.plot(found, tmp_path / "a.svg")
    said = (tmp_path / "a.svg").read_text(encoding="utf-8")
    for text in ("spectrum of S", "effective rank", "grows like t^p", "gradients", "the first 16 of 20 rows"):
        assert text in said
    assert f"at the end {found.memory[0, -1]:.3g}" in said
    looking.plot(looking.report("ahla", *random(3, TOKENS, D), mask="none"), tmp_path / "b.svg")
    assert "spectrum" not in (tmp_path / "b.svg").read_text(encoding="utf-8")


def test_plot_of_nothing(tmp_path: Path) -> None:
    """No tokens, or nothing but zeros."""
    pytest.importorskip("matplotlib")
    for i, x in enumerate((np.zeros((TOKENS, D)), np.zeros((0, D)), np.zeros((0, TOKENS, D)))):
        looking.plot(looking.report("hla2", x, x, x, do=x), tmp_path / f"{i}.png")
        assert (tmp_path / f"{i}.png").stat().st_size > 0


def test_plot_refuses(tmp_path: Path) -> None:
    with pytest.raises(hla.DTypeError, match="Report"):
        looking.plot(made().output, tmp_path / "a.svg")
    pytest.importorskip("matplotlib")
    with pytest.raises(hla.OptionError, match="svg"):
        looking.plot(made(), tmp_path / "a.doc")
    with pytest.raises(OSError, match="absent"):
        looking.plot(made(), tmp_path / "absent" / "a.svg")
    assert not list(tmp_path.iterdir())


def test_plot_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r'pip install "hla\[cli\]"'):
        looking.plot(made(), tmp_path / "a.svg")

"""`hla.feature_map` against plain formulas in float64, in every dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hla
from libraries import Library

TOKENS, HEADS, D = 11, 3, 5


def softmax(x: Any) -> Any:
    scaled = x / np.sqrt(x.shape[-1])
    shifted = np.exp(scaled - scaled.max(axis=-1, keepdims=True))
    return shifted / shifted.sum(axis=-1, keepdims=True)


FORMULAS: dict[str, Callable[[Any], Any]] = {
    "identity": lambda x: x,
    "elu+1": lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))),
    "relu": lambda x: np.maximum(x, 0),
    "softmax": softmax,
}
UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
every_map = pytest.mark.parametrize("name", FORMULAS)


def values(scale: float = 1.0) -> Any:
    return scale * np.random.default_rng(0).normal(size=(HEADS, TOKENS, D))


@every_map
@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
def test_formula(lib: Library, name: str, dtype: str, scale: float) -> None:
    """Rounded once to the dtype, after a few roundings in the wider one: of the input's scale, exp and a sum of d."""
    if dtype not in lib.floats:
        pytest.skip(f"{lib.name} has no {dtype}")
    if (lib.name, dtype) == ("numpy", "bfloat16"):
        pytest.importorskip("ml_dtypes")
    x = lib.asarray(values(scale), dtype)
    got = hla.feature_map(x, name)
    assert got.dtype == x.dtype
    assert got.shape == x.shape
    assert type(got) is type(x)
    exact = lib.numpy(x).astype(np.float64)
    expected = FORMULAS[name](exact)
    wide = UNIT["float64" if dtype == "float64" else "float32"]
    inside = (4 + D + 4 * np.max(np.abs(exact), axis=-1, keepdims=True)) * wide
    smallest = {"float16": 2.0**-25, "bfloat16": 2.0**-134, "float32": 2.0**-150, "float64": 2.0**-1075}[dtype]
    allowed = (UNIT[dtype] * (1 + inside) + (0 if name in ("identity", "relu") else inside)) * np.abs(
        expected
    ) + smallest
    error = np.abs(lib.numpy(got).astype(np.float64) - expected)
    assert np.all(error <= allowed), np.max(error / allowed)


@every_map
@pytest.mark.parametrize("shape", [(D,), (TOKENS, D), (2, HEADS, TOKENS, D), (0, D), (TOKENS, 1), (2, 0, 3)], ids=str)
def test_shapes(lib: Library, name: str, shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(1).normal(size=shape)
    got = hla.feature_map(lib.asarray(x), name)
    assert tuple(got.shape) == shape
    if x.size:
        np.testing.assert_allclose(lib.numpy(got), FORMULAS[name](x), rtol=1e-14, atol=1e-300)


@pytest.mark.parametrize("name", ["elu+1", "relu", "softmax"])
@pytest.mark.parametrize("size", [1e2, 1e4, 1e30])
def test_never_negative_and_never_too_large(lib: Library, name: str, size: float) -> None:
    """Large values neither overflow nor become NaN, and nothing is below 0."""
    x = lib.asarray(values(size), "float32")
    got = lib.numpy(hla.feature_map(x, name))
    assert np.isfinite(got).all()
    assert (got >= 0).all()
    if name == "softmax":
        np.testing.assert_allclose(got.sum(axis=-1), 1, rtol=1e-6)


def test_softmax_in_half_precision_is_summed_in_single(lib: Library) -> None:
    """2048 equal entries: in float16 their sum stalls at 2048·2⁻¹¹ at the latest."""
    if "float16" not in lib.floats:
        pytest.skip(f"{lib.name} has no float16")
    got = lib.numpy(hla.feature_map(lib.asarray(np.zeros((1, 4099)), "float16"), "softmax"))
    np.testing.assert_allclose(got, 1 / 4099, rtol=2.0**-10)


def test_the_identity_is_the_array_itself(lib: Library) -> None:
    x = lib.asarray(values())
    assert hla.feature_map(x, "identity") is x


@every_map
def test_inputs_are_not_written_to(name: str) -> None:
    x = values()
    x.flags.writeable = False
    before = x.copy()
    hla.feature_map(x, name)
    hla.feature_map(x[:, ::-1, ::-1], name)
    hla.feature_map(np.broadcast_to(x[0, 0], (TOKENS, D)), name)
    np.testing.assert_array_equal(x, before)


@every_map
def test_non_finite_values_pass(lib: Library, name: str) -> None:
    """NaN stays NaN in its own row, infinities do what the formula says, other rows are untouched."""
    x = np.ones((4, 3))
    x[1, 1], x[2, 0], x[3, 2] = np.nan, -np.inf, np.inf
    with np.errstate(invalid="ignore"):
        got = lib.numpy(hla.feature_map(lib.asarray(x), name))
    assert np.isfinite(got[0]).all()
    assert np.isnan(got[1, 1])
    if name != "softmax":
        np.testing.assert_array_equal(got[2:], FORMULAS[name](x)[2:])
    else:
        np.testing.assert_allclose(got[2], [0, 0.5, 0.5])


@every_map
def test_gradients(lib: Library, name: str) -> None:
    """Those of the formula, by differences; finite also where exp of the other branch would overflow."""
    x = np.asarray([[-1000.0, -2.0, -0.5, 0.25, 3.0, 800.0]])
    direction = np.asarray([[0.3, -0.7, 0.2, 0.5, -0.4, 0.1]])
    weights = np.asarray([[1.0, -2.0, 0.5, 3.0, 1.5, -1.0]])
    if lib.name == "torch":
        given = lib.asarray(x).requires_grad_()
        (hla.feature_map(given, name) * lib.asarray(weights)).sum().backward()
        got = given.grad
    elif lib.name == "jax":
        import jax

        got = jax.grad(lambda x: (hla.feature_map(x, name) * weights).sum())(lib.asarray(x))
    else:
        pytest.skip("a library without gradients")
    h = 1e-6
    difference = np.sum(weights * (FORMULAS[name](x + h * direction) - FORMULAS[name](x - h * direction))) / (2 * h)
    assert np.isfinite(lib.numpy(got)).all()
    assert float(np.sum(lib.numpy(got) * direction)) == pytest.approx(difference, rel=1e-6, abs=1e-9)


def test_with_an_operator(lib: Library) -> None:
    """Non-negative maps keep the denominator of normalize=True positive: a weighted mean of the values."""
    rng = np.random.default_rng(2)
    q, k, v = (lib.asarray(rng.normal(size=(HEADS, TOKENS, D))) for _ in range(3))
    for name in ("elu+1", "softmax"):
        mapped = (hla.feature_map(x, name) for x in (q, k))
        o = lib.numpy(hla.hla2(*mapped, v, normalize=True, eps=0.0))
        low, high = (f.accumulate(lib.numpy(v), axis=1) for f in (np.minimum, np.maximum))
        assert np.all(o >= low - 1e-12)
        assert np.all(o <= high + 1e-12)

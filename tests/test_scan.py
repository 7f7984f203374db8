"""`hla.scan.associative_scan`: any monoid, any axis, any nest of arrays, in logarithmic depth."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

import hla
from hla.scan import associative_scan
from libraries import Library

LENGTHS = (*range(18), 31, 61)
FEW_LENGTHS = (0, 1, 2, 3, 6, 13, 17)
"""Where every new shape is compiled anew."""
MODULUS = 10_007


def lengths(lib: Library) -> tuple[int, ...]:
    return FEW_LENGTHS if lib.name == "jax" else LENGTHS


class Affine(NamedTuple):
    """x ↦ slope·x + offset; slopes and offsets modulo a prime, so that every comparison is exact."""

    slope: Any
    offset: Any


def compose(earlier: Affine, later: Affine) -> Affine:
    """First `earlier`, then `later`."""
    slope = later.slope * earlier.slope % MODULUS
    return Affine(slope, (later.slope * earlier.offset + later.offset) % MODULUS)


def concatenate(earlier: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    """Words over the digits 1–9 as numbers: the word, and 10 to the power of its length."""
    return {
        "word": earlier["word"] * later["power"] + later["word"],
        "power": earlier["power"] * later["power"],
    }


def words(lib: Library, letters: str) -> dict[str, Any]:
    digits = np.asarray([int(c) for c in letters], dtype=np.int64)
    return {"word": lib.asarray(digits), "power": lib.asarray(np.full(len(letters), 10, dtype=np.int64))}


def affine_maps(count: int, seed: int = 0) -> list[tuple[int, int]]:
    rng = np.random.default_rng([seed, count])
    return [(int(a), int(b)) for a, b in rng.integers(1, MODULUS, size=(count, 2))]


def folds(maps: list[tuple[int, int]], *, reverse: bool = False, exclusive: bool = False) -> list[tuple[int, int]]:
    """All prefixes (or suffixes), one after another, from the definition."""
    result = []
    for t in range(len(maps)):
        own = slice(t + exclusive, None) if reverse else slice(t + 1 - exclusive)
        slope, offset = 1, 0
        for a, b in maps[own]:
            slope, offset = a * slope % MODULUS, (a * offset + b) % MODULUS
        result.append((slope, offset))
    return result


def stacked(lib: Library, maps: list[tuple[int, int]]) -> Affine:
    table = np.asarray(maps, dtype=np.int64).reshape(-1, 2)
    return Affine(lib.asarray(table[:, 0]), lib.asarray(table[:, 1]))


def unstacked(lib: Library, maps: Affine) -> list[tuple[int, int]]:
    return list(zip(*(lib.numpy(x).tolist() for x in maps), strict=True))


UNIT = (1, 0)


@pytest.mark.parametrize("exclusive", [False, True], ids=["inclusive", "exclusive"])
@pytest.mark.parametrize("reverse", [False, True], ids=["forwards", "backwards"])
def test_every_prefix_of_a_monoid_that_does_not_commute(lib: Library, exclusive: bool, reverse: bool) -> None:
    identity = Affine(*(lib.asarray(np.asarray(x, dtype=np.int64)) for x in UNIT)) if exclusive else None
    for length in lengths(lib):
        maps = affine_maps(length)
        elems = stacked(lib, maps)
        got = associative_scan(compose, elems, 0, exclusive=exclusive, reverse=reverse, identity=identity)
        assert type(got) is Affine
        assert unstacked(lib, got) == folds(maps, reverse=reverse, exclusive=exclusive), length


def test_operands_keep_their_order(lib: Library) -> None:
    """Written as words: what a scan that swaps (earlier, later) would spell backwards."""
    forwards = associative_scan(concatenate, words(lib, "12345"), 0)
    assert lib.numpy(forwards["word"]).tolist() == [1, 12, 123, 1234, 12345]
    backwards = associative_scan(concatenate, words(lib, "12345"), 0, reverse=True)
    assert lib.numpy(backwards["word"]).tolist() == [12345, 2345, 345, 45, 5]


@pytest.mark.parametrize("length", [2, 5])
@pytest.mark.parametrize("axis", [0, 1, 2, -3, -4, -5])
@pytest.mark.parametrize("reverse", [False, True], ids=["forwards", "backwards"])
def test_matrices_along_every_axis(lib: Library, length: int, axis: int, reverse: bool) -> None:
    """2×2 integer matrices with two batch axes; the scanned axis stands anywhere before them."""
    if lib.name == "jax" and (length, axis < 0) != (5, True):
        pytest.skip("one length on jax, where every shape is compiled")
    rng = np.random.default_rng(length)
    matrices = rng.integers(-1, 2, size=(length, 2, 3, 2, 2))
    xp = lib.module

    def product(earlier: Any, later: Any) -> Any:
        return xp.matmul(earlier, later)

    given = np.moveaxis(matrices, 0, axis if axis >= 0 else axis + 5)
    got = lib.numpy(associative_scan(product, lib.asarray(given), axis, reverse=reverse))
    expected = [matrices[-1] if reverse else matrices[0]]
    for t in range(1, length):
        expected.append(matrices[length - 1 - t] @ expected[-1] if reverse else expected[-1] @ matrices[t])
    if reverse:
        expected.reverse()
    np.testing.assert_array_equal(np.moveaxis(got, axis if axis >= 0 else axis + 5, 0), np.stack(expected))


def test_the_last_axis(lib: Library) -> None:
    x = np.arange(2 * 7).reshape(2, 7)
    for axis in (1, -1):
        got = associative_scan(lambda a, b: a + b, lib.asarray(x), axis)
        np.testing.assert_array_equal(lib.numpy(got), np.cumsum(x, axis=1))


class Pair(NamedTuple):
    left: Any
    right: Any


def leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, (tuple, list)):
        for part in tree:
            yield from leaves(part)
    else:
        yield tree


def map_leaves(function: Callable[..., Any], *trees: Any) -> Any:
    first = trees[0]
    if isinstance(first, dict):
        return type(first)((key, map_leaves(function, *(t[key] for t in trees))) for key in first)
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(map_leaves(function, *parts) for parts in zip(*trees, strict=True)))
    if isinstance(first, (tuple, list)):
        return type(first)(map_leaves(function, *parts) for parts in zip(*trees, strict=True))
    return function(*trees)


STRUCTURES = {
    "array": lambda a, b, c, d: a,
    "tuple": lambda a, b, c, d: (a, b),
    "list": lambda a, b, c, d: [a, b, c],
    "dict": lambda a, b, c, d: {"x": a, "y": b},
    "ordered dict": lambda a, b, c, d: OrderedDict(z=a, y=b),
    "named tuple": lambda a, b, c, d: Pair(a, b),
    "nested": lambda a, b, c, d: {"outer": (Pair(a, [b, c]), {"inner": d})},
}


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("exclusive", [False, True], ids=["inclusive", "exclusive"])
def test_structures(lib: Library, structure: str, exclusive: bool) -> None:
    """The leaves differ in rank and in what follows the scanned axis; each is scanned for itself."""
    rng = np.random.default_rng(5)
    arrays = [rng.integers(-9, 9, size=(5, *rest)) for rest in ((), (3,), (2, 3), (1,))]
    elems = STRUCTURES[structure](*(lib.asarray(x) for x in arrays))
    identity = STRUCTURES[structure](*(lib.asarray(np.zeros(x.shape[1:], dtype=x.dtype)) for x in arrays))

    def add(earlier: Any, later: Any) -> Any:
        assert type(earlier) is type(later) is type(elems)
        return map_leaves(lambda x, y: x + y, earlier, later)

    got = associative_scan(add, elems, 0, exclusive=exclusive, identity=identity)
    assert type(got) is type(elems)
    wanted = STRUCTURES[structure](*(np.cumsum(x, axis=0) - exclusive * x for x in arrays))
    for mine, its in zip(leaves(got), leaves(wanted), strict=True):
        np.testing.assert_array_equal(lib.numpy(mine), its)


@pytest.mark.parametrize("shape", [(3,), (1, 3), ()], ids=["without axis", "size-1 axis", "broadcast"])
def test_forms_of_the_identity(lib: Library, shape: tuple[int, ...]) -> None:
    x = np.arange(1.0, 16.0).reshape(5, 3)
    zero = lib.asarray(np.zeros(shape))
    got = lib.numpy(associative_scan(lambda a, b: a + b, lib.asarray(x), 0, exclusive=True, identity=zero))
    np.testing.assert_array_equal(got, np.cumsum(x, axis=0) - x)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_dtype_and_shape_stay(lib: Library, dtype: str) -> None:
    x = lib.asarray(np.ones((7, 2)), dtype)
    zero = lib.asarray(np.zeros(2), "float64")
    got = associative_scan(lambda a, b: a + b, x, 0, exclusive=True, identity=zero)
    assert got.dtype == x.dtype
    assert got.shape == x.shape


@pytest.mark.parametrize("reverse", [False, True], ids=["forwards", "backwards"])
def test_logarithmically_many_calls(lib: Library, reverse: bool) -> None:
    """At most 2⌈log₂ T⌉ calls, no call on more than half of the elements, fewer than 2 T combinations in all."""
    sizes: list[int] = []

    def add(earlier: Any, later: Any) -> Any:
        assert earlier.shape == later.shape
        sizes.append(int(earlier.shape[0]))
        return earlier + later

    for length in lengths(lib):
        sizes.clear()
        x = np.arange(length)
        got = associative_scan(add, lib.asarray(x), 0, reverse=reverse)
        expected = np.cumsum(x[::-1])[::-1] if reverse else np.cumsum(x)
        np.testing.assert_array_equal(lib.numpy(got), expected)
        assert len(sizes) <= (2 * math.ceil(math.log2(length)) if length > 1 else 0)
        assert all(2 * size <= length for size in sizes)
        assert sum(sizes) < 2 * max(length, 1)


def test_elements_are_not_written_to() -> None:
    x = np.arange(7.0)
    x.flags.writeable = False
    np.testing.assert_array_equal(associative_scan(lambda a, b: a + b, x, 0), np.cumsum(x))


def test_nothing_to_scan() -> None:
    assert associative_scan(lambda a, b: a, (), 0) == ()


def test_segments_scan(lib: Library) -> None:
    """The segments of HLA₂ under decay, one token each: element t is the segment of the tokens 0 … t."""
    rng = np.random.default_rng(3)
    q, k, v = (rng.normal(size=(7, 1, size)) for size in (5, 5, 2))
    log_decay = -rng.exponential(0.3, size=(7, 1))
    log_decay[4] = -np.inf
    tokens = hla.segments.from_tokens("hla2", *map(lib.asarray, (q, k, v)), log_decay=lib.asarray(log_decay))
    prefixes = associative_scan(hla.segments.combine, tokens, 0)
    assert type(prefixes) is type(tokens)
    for t in range(7):
        whole = hla.segments.from_tokens("hla2", *(x[: t + 1, 0] for x in (q, k, v)), log_decay=log_decay[: t + 1, 0])
        for mine, its in zip(prefixes, whole, strict=True):
            np.testing.assert_allclose(lib.numpy(mine)[t], its, rtol=1e-12, atol=1e-12)


# --- errors ----------------------------------------------------------------------------------------------------------


def test_lengths_disagree(lib: Library) -> None:
    elems = (lib.asarray(np.zeros(3)), lib.asarray(np.zeros(4)))
    with pytest.raises(hla.ShapeError, match=r"^elems: expected one length along axis 0, got \[3, 4\]\. "):
        associative_scan(lambda a, b: a, elems, 0)


@pytest.mark.parametrize("axis", [2, -3])
def test_no_such_axis(lib: Library, axis: int) -> None:
    with pytest.raises(hla.ShapeError, match=rf"^elems: expected arrays with an axis {axis}, got shape \(3, 2\)\. "):
        associative_scan(lambda a, b: a, lib.asarray(np.zeros((3, 2))), axis)


@pytest.mark.parametrize("length", [0, 1, 3])
def test_exclusive_without_identity(lib: Library, length: int) -> None:
    with pytest.raises(hla.OptionError, match=r"^identity: expected an identity element with exclusive=True, got None"):
        associative_scan(lambda a, b: a, lib.asarray(np.zeros(length)), 0, exclusive=True)


def test_no_array() -> None:
    with pytest.raises(hla.DTypeError, match=r"^elems: expected an array .*, got builtins\.str\. "):
        associative_scan(lambda a, b: a, ["one", "two"], 0)


# --- under a transformation ------------------------------------------------------------------------------------------


def test_compiled(lib: Library) -> None:
    if lib.name != "jax":
        pytest.skip("jax.jit: in the session of jax")
    import jax

    def scan(elems: Affine, identity: Affine, exclusive: bool, reverse: bool) -> Affine:
        return associative_scan(compose, elems, 0, exclusive=exclusive, reverse=reverse, identity=identity)

    compiled = jax.jit(scan, static_argnums=(2, 3))
    identity = Affine(*(lib.asarray(np.asarray(x)) for x in UNIT))
    for length in (0, 1, 6, 13):
        maps = affine_maps(length)
        for exclusive in (False, True):
            for reverse in (False, True):
                got = compiled(stacked(lib, maps), identity, exclusive, reverse)
                assert unstacked(lib, got) == folds(maps, reverse=reverse, exclusive=exclusive)


def test_gradient_through_a_scan(lib: Library) -> None:
    """d/dx_s of Σ_t x_0 ⋯ x_t, in closed form."""
    x = np.asarray([0.5, -1.5, 2.0, 0.25, 3.0])
    prefix = np.cumprod(x)
    expected = np.cumsum(prefix[::-1])[::-1] / x
    if lib.name == "jax":
        import jax

        got = jax.grad(lambda x: associative_scan(lambda a, b: a * b, x, 0).sum())(lib.asarray(x))
    elif lib.name == "torch":
        given = lib.asarray(x).requires_grad_()
        associative_scan(lambda a, b: a * b, given, 0).sum().backward()
        got = given.grad
    else:
        pytest.skip("a library without gradients")
    np.testing.assert_allclose(lib.numpy(got), expected, rtol=1e-13)

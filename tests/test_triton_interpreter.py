"""Triton's interpreter: bfloat16 after its repair, and the guards of its memory. In a process with TRITON_INTERPRET=1.

The judge of bfloat16 is PyTorch, in float32 and rounded by PyTorch.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import libraries

torch: Any = libraries.only("torch")

if os.environ.get("TRITON_INTERPRET") != "1" or importlib.util.find_spec("triton") is None:
    pytest.skip("of TRITON_INTERPRET=1, with triton", allow_module_level=True)
if "HLA_TEST_DEVICE" in os.environ:
    pytest.skip("of the interpreter alone", allow_module_level=True)

import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.runtime import interpreter as machine  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

if not isinstance(tl.sum, machine.InterpretedFunction):
    pytest.skip("TRITON_INTERPRET=1 came after triton", allow_module_level=True)

from hla.backends.triton import interpreter  # noqa: E402
from triton_bounds import checked, nan_filled  # noqa: E402

BUILDER = machine.InterpreterBuilder
METHODS = [(owner, name) for owner, name, _ in interpreter._REPAIRS]
METHODS += [(BUILDER, name) for name in interpreter._REFUSALS if hasattr(BUILDER, name)]
overflowing = pytest.mark.filterwarnings("ignore::RuntimeWarning")
"""For inf − inf and the like, of which NumPy warns."""


@pytest.fixture(autouse=True, scope="module")
def repaired() -> None:
    interpreter.repair()


@pytest.fixture
def unrepaired(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter as triton has it, for one test."""
    for owner, name in METHODS:
        monkeypatch.setattr(owner, name, getattr(owner, name).__wrapped__)


def methods() -> list[Any]:
    return [vars(owner)[name] for owner, name in METHODS]


def same(got: Any, want: Any, *, zeros: bool = True) -> None:
    """Equal numbers, NaN at the same places, and, but where it is left open, zeros of the same sign."""
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    if zeros:
        number = ~torch.isnan(want)
        assert torch.equal(torch.signbit(got[number]), torch.signbit(want[number]))


def bits(pattern: Any) -> Any:
    """bfloat16 with these bits."""
    return torch.as_tensor(pattern).to(torch.int32).to(torch.int16).view(torch.bfloat16)


EDGES = [
    *(0x0000, 0x0001, 0x0047, 0x007F, 0x0080),  # zero, three subnormal numbers, the smallest normal one
    *(0x3F00, 0x3F7F, 0x3F80, 0x3F81, 0x3FFF, 0x4049, 0x4380, 0x4381),  # about 1, ⅓ ulp around it, π, 256
    *(0x5F00, 0x7F00, 0x7F7F, 0x7F80, 0x7FC0),  # 2⁶³, large, the largest, infinity, NaN
]
VALUES = bits([x | sign for x in EDGES for sign in (0, 0x8000)])
N = 2048


def operands(count: int) -> list[Any]:
    """All pairs of edge cases, then random numbers; further operands are drawn from the edge cases and the numbers."""
    generator = torch.Generator().manual_seed(5)
    pairs = torch.cartesian_prod(VALUES, VALUES)
    numbers = (torch.randn(N - len(pairs), 2, generator=generator) * 4).bfloat16()
    a, b = torch.cat([pairs, numbers]).unbind(1)
    more = [a[torch.randperm(N, generator=generator)] for _ in range(count - 2)]
    return [x.contiguous() for x in (a, b, *more)][:count]


@triton.jit
def elementwise(x, y, z, out, NAME: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i)
    b = tl.load(y + i)
    c = tl.load(z + i)
    if NAME == "a + b":
        r = a + b
    if NAME == "a - b":
        r = a - b
    if NAME == "a * b":
        r = a * b
    if NAME == "a / b":
        r = a / b
    if NAME == "a % b":
        r = a % b
    if NAME == "a * 0.1":
        r = a * 0.1
    if NAME == "1 - a":
        r = 1 - a
    if NAME == "full":
        r = tl.full([N], 1 / 3, tl.bfloat16)
    if NAME == "-a":
        r = -a
    if NAME == "abs":
        r = tl.abs(a)
    if NAME == "minimum":
        r = tl.minimum(a, b)
    if NAME == "maximum":
        r = tl.maximum(a, b)
    if NAME == "minimum, NaN":
        r = tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)
    if NAME == "maximum, NaN":
        r = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    if NAME == "clamp":
        r = tl.clamp(c, tl.minimum(a, b), tl.maximum(a, b))
    if NAME == "clamp, NaN":
        r = tl.clamp(c, tl.minimum(a, b), tl.maximum(a, b), propagate_nan=tl.PropagateNan.ALL)
    if NAME == "where":
        r = tl.where(a < b, b, c)
    if NAME == "fma":
        r = tl.fma(a, b, c)
    if NAME == "a + float32":
        r = a + c.to(tl.float32)
    if NAME == "a < b":
        r = a < b
    if NAME == "a <= b":
        r = a <= b
    if NAME == "a > b":
        r = a > b
    if NAME == "a >= b":
        r = a >= b
    if NAME == "a == b":
        r = a == b
    if NAME == "a != b":
        r = a != b
    if NAME == "a < b and not b > c":
        r = (a < b) & ~(b > c)
    if NAME == "a < 1":
        r = a < 1
    tl.store(out + i, r)


TENTH, THIRD = bits(0x3DCD).float(), bits(0x3EAB).float()
SINGLE: dict[str, Callable[[Any, Any, Any], Any]] = {
    "a + b": lambda a, b, c: a + b,
    "a - b": lambda a, b, c: a - b,
    "a * b": lambda a, b, c: a * b,
    "a / b": lambda a, b, c: a / b,
    "a % b": lambda a, b, c: torch.from_numpy(np.fmod(a.numpy(), b.numpy())),  # torch.fmod of far ones is NaN
    "a * 0.1": lambda a, b, c: a * TENTH,
    "1 - a": lambda a, b, c: 1 - a,
    "full": lambda a, b, c: THIRD.expand(N),
    "-a": lambda a, b, c: -a,
    "abs": lambda a, b, c: abs(a),
    "minimum": lambda a, b, c: torch.fmin(a, b),
    "maximum": lambda a, b, c: torch.fmax(a, b),
    "minimum, NaN": lambda a, b, c: torch.minimum(a, b),
    "maximum, NaN": lambda a, b, c: torch.maximum(a, b),
    "clamp": lambda a, b, c: torch.fmin(torch.fmax(c, torch.fmin(a, b)), torch.fmax(a, b)),
    "clamp, NaN": lambda a, b, c: torch.minimum(torch.maximum(c, torch.fmin(a, b)), torch.fmax(a, b)),
    "where": lambda a, b, c: torch.where(a < b, b, c),
    "fma": lambda a, b, c: (a.double() * b.double() + c.double()).float(),
}
COMPARISONS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "a < b": lambda a, b, c: a < b,
    "a <= b": lambda a, b, c: a <= b,
    "a > b": lambda a, b, c: a > b,
    "a >= b": lambda a, b, c: a >= b,
    "a == b": lambda a, b, c: a == b,
    "a != b": lambda a, b, c: a != b,
    "a < b and not b > c": lambda a, b, c: (a < b) & ~(b > c),
    "a < 1": lambda a, b, c: a < 1,
}


def compute(name: str, dtype: Any = torch.bfloat16) -> Any:
    out = torch.zeros(N, dtype=dtype)
    elementwise[(1,)](*operands(3), out, NAME=name, N=N)
    return out


@overflowing
@pytest.mark.parametrize("name", SINGLE)
def test_elementwise(name: str) -> None:
    a, b, c = (x.float() for x in operands(3))
    same(compute(name), SINGLE[name](a, b, c).bfloat16(), zeros="m" not in name)


@overflowing
@pytest.mark.parametrize("name", ["a + b", "a - b", "a * b", "a / b", "minimum, NaN", "maximum, NaN", "-a", "abs"])
def test_elementwise_as_pytorch_in_bfloat16(name: str) -> None:
    same(compute(name), SINGLE[name](*operands(3)), zeros="m" not in name)


@pytest.mark.parametrize("name", COMPARISONS)
def test_comparisons(name: str) -> None:
    assert torch.equal(compute(name, torch.bool), COMPARISONS[name](*operands(3)))


@overflowing
def test_other_dtypes_beside_bfloat16() -> None:
    a, _, c = (x.float() for x in operands(3))
    same(compute("a + float32", torch.float32), a + c)


@overflowing
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["a + b", "a / b", "clamp", "a < b"])
def test_other_dtypes_are_as_before(dtype: Any, name: str) -> None:
    a, b, c = (x.to(dtype) for x in operands(3))
    want = {**SINGLE, **COMPARISONS}[name](a, b, c)
    out = torch.zeros_like(want)
    elementwise[(1,)](a, b, c, out, NAME=name, N=N)
    same(out, want, zeros=name != "clamp")


@overflowing
@pytest.mark.parametrize("name", ["exp", "exp2", "log", "log2", "sin", "cos", "sqrt", "precise_sqrt", "floor", "ceil"])
def test_functions(name: str) -> None:
    """tl.exp and the like refuse bfloat16 themselves; the interpreter's own methods do not."""
    (a,) = operands(1)
    function = getattr(np, name.removeprefix("precise_"))
    same(call(f"create_{name}", a), torch.from_numpy(function(a.float().numpy())).bfloat16())


@overflowing
def test_functions_of_their_own() -> None:
    (a,) = operands(1)
    same(call("create_rsqrt", a), torch.from_numpy(1 / np.sqrt(a.float().numpy())).bfloat16())
    torch.testing.assert_close(
        call("create_erf", a), torch.erf(a.float()).bfloat16(), rtol=2**-8, atol=0, equal_nan=True
    )


def call(name: str, x: Any) -> Any:
    """A method of the interpreter on bfloat16."""
    handle = machine.TensorHandle(x.view(torch.int16).numpy().view(np.uint16), tl.bfloat16)
    result = getattr(machine.interpreter_builder, name)(handle)
    assert result.dtype == tl.bfloat16
    return torch.from_numpy(result.data.view(np.int16)).view(torch.bfloat16)


@triton.jit
def convert(x, out, TO: tl.constexpr, ROUNDING: tl.constexpr, N: tl.constexpr):
    i = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out + i, tl.load(x + i).to(TO, fp_downcast_rounding=ROUNDING))


DTYPES = {name: (getattr(torch, name), getattr(tl, name)) for name in ("bfloat16", "float16", "float32", "float64")}
DTYPES |= {name: (getattr(torch, name), getattr(tl, name)) for name in ("int8", "uint8", "int16", "int32", "int64")}


def cast(x: Any, to: str, rounding: str | None = None) -> Any:
    out = torch.zeros(x.shape, dtype=DTYPES[to][0])
    size = min(x.numel(), 1 << 16)
    assert x.numel() % size == 0
    convert[(x.numel() // size,)](x, out, TO=DTYPES[to][1], ROUNDING=rounding, N=size)
    return out


ALL = bits(torch.arange(1 << 16))
"""every bfloat16"""


def all_about(low: int) -> Any:
    """float32 above each bfloat16 by `low` 65536ths of the distance to the next."""
    return ((torch.arange(1 << 16, dtype=torch.int64) << 16) + low).to(torch.int32).view(torch.float32)


def test_every_bfloat16_as_float32() -> None:
    same(cast(ALL, "float32"), ALL.float())


@pytest.mark.parametrize("low", [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_float32_is_rounded_to_nearest_even(low: int) -> None:
    same(cast(all_about(low), "bfloat16"), all_about(low).bfloat16())


def test_ties_by_hand() -> None:
    ulp = 2.0**-7
    x = torch.tensor(
        [1 + ulp / 2, 1 + 3 * ulp / 2, -1 - ulp / 2, -1 - 3 * ulp / 2, 2 - ulp / 2, 3.4e38, -3.4e38, 2**-134]
    )
    want = torch.tensor([1, 1 + 2 * ulp, -1, -1 - 2 * ulp, 2, torch.inf, -torch.inf, 0])
    same(cast(x, "bfloat16").float(), want)


@pytest.mark.parametrize("low", [0, 1, 0x8000, 0xFFFF])
def test_float32_toward_zero(low: int) -> None:
    x = all_about(low)
    want = torch.where(torch.isnan(x), torch.nan, ALL.float()).bfloat16()
    same(cast(x, "bfloat16", "rtz"), want)


def test_float64_toward_zero_rounds_once() -> None:
    x = torch.tensor([1 + 2**-7 - 2**-40, -1 - 2**-7 + 2**-40, 1 + 2**-7, torch.nan], dtype=torch.float64)
    same(cast(x, "bfloat16", "rtz"), torch.tensor([1, -1, 1 + 2**-7, torch.nan]).bfloat16())


@overflowing
def test_casts_of_other_floats() -> None:
    halves = torch.arange(1 << 16).to(torch.int16).view(torch.float16)
    same(cast(halves, "bfloat16"), halves.float().bfloat16())
    same(cast(ALL, "float16"), ALL.float().half())
    same(cast(ALL, "float64"), ALL.double())
    doubles = torch.cat([all_about(0x8000).double(), torch.tensor([1e300, -1e300, 1e-300, 0.1] * 16384).double()])
    same(cast(doubles, "bfloat16"), doubles.float().bfloat16())


@pytest.mark.parametrize("name", ["int8", "uint8", "int16", "int32", "int64"])
def test_casts_of_integers(name: str) -> None:
    generator = torch.Generator().manual_seed(7)
    dtype, _ = DTYPES[name]
    limits = torch.iinfo(dtype)
    x = torch.randint(limits.min, limits.max, (1024,), generator=generator, dtype=dtype)
    x[:4] = torch.tensor([0, 1, limits.min, limits.max], dtype=dtype)
    same(cast(x, "bfloat16"), x.float().bfloat16())
    y = (torch.randn(1024, generator=generator) * 40).clamp(0 if limits.min == 0 else -127, 127).bfloat16()
    assert torch.equal(cast(y, name), y.float().to(dtype))


def test_booleans() -> None:
    x = torch.tensor([True, False] * 8)
    assert torch.equal(cast(x, "bfloat16"), x.bfloat16())
    out = torch.zeros(len(VALUES) - 4, dtype=torch.bool)  # 32 of them
    convert[(1,)](VALUES, out, TO=tl.int1, ROUNDING=None, N=len(out))
    assert torch.equal(out, VALUES[: len(out)] != 0)


@triton.jit
def move(x, y, out, n, N: tl.constexpr):
    """y where it is larger, and 0.1 behind the first n."""
    i = tl.arange(0, N)
    a = tl.load(x + i, mask=i < n, other=0.1)
    b = tl.load(y + i, mask=a < tl.load(y + i), other=0)
    tl.store(out + i, tl.where(b == 0, a, b), mask=i % 2 == 0)


def test_masks_and_what_replaces_the_masked() -> None:
    x, y = (torch.tensor([[3.0, -1, 2, 5], [4, -2, 1, 7]]).repeat(1, 4).bfloat16()).unbind(0)
    out = torch.full((16,), 9.0).bfloat16()
    move[(1,)](x, y, out, 14, N=16)
    a = torch.where(torch.arange(16) < 14, x.float(), TENTH)
    want = torch.where(torch.arange(16) % 2 == 0, torch.maximum(a, y.float()), 9.0)
    same(out, want.bfloat16())


@triton.jit
def matrix_product(x, y, z, out, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr):
    m = tl.arange(0, M)[:, None]
    n = tl.arange(0, N)[None, :]
    a = tl.load(x + m * K + tl.arange(0, K)[None, :])
    b = tl.load(y + tl.arange(0, N)[:, None] * K + tl.arange(0, K)[None, :])
    c = tl.load(z + m * N + n)
    tl.store(out + m * N + n, tl.dot(a, tl.trans(b), acc=c))


def test_dot() -> None:
    """Quarters of small integers have exact products and sums in float32, but none in bfloat16."""
    generator = torch.Generator().manual_seed(3)
    x, y, z = (torch.randint(-99, 99, s, generator=generator) / 4 for s in ((16, 64), (32, 64), (16, 32)))
    out = torch.zeros(16, 32)
    matrix_product[(1,)](x.bfloat16(), y.bfloat16(), z, out, M=16, K=64, N=32)
    assert torch.equal(out, x @ y.mT + z)


def test_dot_of_inf_and_nan() -> None:
    x, y, out = torch.ones(16, 16).bfloat16(), torch.ones(16, 16).bfloat16(), torch.zeros(16, 16)
    x[3, 2], x[5, 7] = torch.inf, torch.nan
    matrix_product[(1,)](x, y, torch.zeros(16, 16), out, M=16, K=16, N=16)
    same(out, x.float() @ y.float())


@triton.jit
def _fading(a, b):
    return (a + b) * 0.75


@triton.jit
def _larger(a, i, b, j):
    return tl.where(a > b, a, b), tl.where(a > b, i, j)


@triton.jit
def reduction(x, out, NAME: tl.constexpr, AXIS: tl.constexpr, KEEP: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """The result at each element that it is of."""
    i = tl.arange(0, M)[:, None]
    j = tl.arange(0, N)[None, :]
    a = tl.load(x + i * N + j)
    if NAME == "sum":
        r = tl.sum(a, axis=AXIS, keep_dims=KEEP)
        tl.static_assert(r.dtype == x.dtype.element_ty)
    if NAME == "max":
        r = tl.max(a, axis=AXIS, keep_dims=KEEP)
    if NAME == "min":
        r = tl.min(a, axis=AXIS, keep_dims=KEEP)
    if NAME == "argmax":
        r = tl.argmax(a, axis=AXIS, keep_dims=KEEP)
    if NAME == "argmin":
        r = tl.argmin(a, axis=AXIS, keep_dims=KEEP)
    if NAME == "max and where":
        r, place = tl.max(a, axis=AXIS, keep_dims=KEEP, return_indices=True)
        tl.static_assert(r.dtype == x.dtype.element_ty)
        r = r + place
    if NAME == "reduce":
        r = tl.reduce(a, AXIS, _fading, keep_dims=KEEP)
    if NAME == "reduce two":
        r, place = tl.reduce((a, i + tl.zeros_like(j)), AXIS, _larger, keep_dims=KEEP)
        r = r + place
    if not KEEP and AXIS is not None:
        r = tl.expand_dims(r, AXIS)
    tl.store(out + i * N + j, r + tl.zeros([M, N], r.dtype))


def reduced(name: str, x: Any, axis: int | None, keep: bool) -> Any:
    out = torch.zeros(x.shape, dtype=torch.int32 if name.startswith("arg") else torch.bfloat16)
    reduction[(1,)](x, out, NAME=name, AXIS=axis, KEEP=keep, M=x.shape[0], N=x.shape[1])
    return out


TABLE = ((torch.arange(8 * 16) * 37 % 101 - 60) / 4).view(8, 16).bfloat16()
"""all different"""
REDUCTIONS: dict[str, Callable[[Any, int], Any]] = {
    "sum": lambda x, axis: x.sum(axis, keepdim=True),
    "max": lambda x, axis: x.amax(axis, keepdim=True),
    "min": lambda x, axis: x.amin(axis, keepdim=True),
    "argmax": lambda x, axis: x.argmax(axis, keepdim=True).int(),
    "argmin": lambda x, axis: x.argmin(axis, keepdim=True).int(),
    "max and where": lambda x, axis: x.amax(axis, keepdim=True) + x.argmax(axis, keepdim=True),
}


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(name: str, axis: int, keep: bool) -> None:
    want = REDUCTIONS[name](TABLE.float(), axis).expand(8, 16)
    got = reduced(name, TABLE, axis, keep)
    same(got, want.to(got.dtype))


@pytest.mark.parametrize("name", ["sum", "max", "min"])
def test_reductions_to_a_scalar(name: str) -> None:
    want = REDUCTIONS[name](TABLE.float().view(1, -1), 1).expand(8, 16)
    same(reduced(name, TABLE, None, False), want.bfloat16())


def test_a_sum_is_rounded_once() -> None:
    x = torch.ones(512, 1).bfloat16()
    x[0] = 1 + 2**-7
    assert reduced("sum", x, 0, False)[0].item() == 512
    x[1:] = 3 / 512
    assert reduced("sum", x, 0, False)[0].item() == 4  # 4.00195…


def test_extremes_pass_over_nan() -> None:
    x = TABLE.clone()
    x[2, 3] = torch.nan
    for name, fill in (("max", -torch.inf), ("argmax", -torch.inf), ("min", torch.inf), ("argmin", torch.inf)):
        got = reduced(name, x, 1, False)
        want = REDUCTIONS[name](torch.where(torch.isnan(x), fill, x).float(), 1).expand(8, 16)
        same(got, want.to(got.dtype))


def test_reductions_with_a_function() -> None:
    """Each step is rounded."""
    want = TABLE[0]
    for row in TABLE[1:]:
        want = (want + row) * 0.75
    same(reduced("reduce", TABLE, 0, False), want.expand(8, 16))
    largest = TABLE.float().amax(0) + TABLE.float().argmax(0)
    same(reduced("reduce two", TABLE, 0, False), largest.bfloat16().expand(8, 16))


@triton.jit
def running(x, out, NAME: tl.constexpr, AXIS: tl.constexpr, REVERSE: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    a = tl.load(x + at)
    if NAME == "cumsum":
        r = tl.cumsum(a, axis=AXIS, reverse=REVERSE)
    if NAME == "cumprod":
        r = tl.cumprod(a, axis=AXIS, reverse=REVERSE)
    if NAME == "scan":
        r = tl.associative_scan(a, AXIS, _fading, reverse=REVERSE)
    tl.static_assert(r.dtype == x.dtype.element_ty)
    tl.store(out + at, r)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("name", ["cumsum", "cumprod", "scan"])
def test_scans(name: str, axis: int, reverse: bool) -> None:
    x = TABLE if name != "cumprod" else bits(TABLE.view(torch.int16) & 0x80FF | 0x3F00)  # about 1
    out = torch.zeros_like(x)
    running[(1,)](x, out, NAME=name, AXIS=axis, REVERSE=reverse, M=8, N=16)
    ordered = x.flip(axis) if reverse else x
    if name == "cumsum":
        want = ordered.float().cumsum(axis).bfloat16()
    elif name == "cumprod":
        want = torch.from_numpy(np.cumprod(ordered.float().numpy(), axis=axis)).bfloat16()
    else:
        rows = list(ordered.unbind(axis))
        for k in range(1, len(rows)):
            rows[k] = (rows[k - 1] + rows[k]) * 0.75
        want = torch.stack(rows, axis)
    same(out, want.flip(axis) if reverse else want)


def test_a_running_sum_does_not_stall() -> None:
    x, out = torch.ones(512, 1).bfloat16(), torch.zeros(512, 1).bfloat16()
    running[(1,)](x, out, NAME="cumsum", AXIS=0, REVERSE=False, M=512, N=1)
    same(out[:, 0], torch.arange(1.0, 513).bfloat16())


# What cannot be repaired.


@triton.jit
def scaled(x, s, out):
    i = tl.arange(0, 32)
    a = tl.load(x + i[:, None] * 32 + i[None, :])
    scale = tl.load(s + i[:, None])
    tl.store(out + i[:, None] * 32 + i[None, :], tl.dot_scaled(a, None, "bf16", a, scale, "bf16"))


def test_a_scaled_dot_is_refused() -> None:
    with pytest.raises(machine.InterpreterError, match="dot_scaled: expected operands of 8 or 4 bits"):
        scaled[(1,)](torch.ones(32, 32).bfloat16(), torch.full((32, 1), 127, dtype=torch.uint8), torch.zeros(32, 32))


@triton.jit
def described(x, out, rows, PADDING: tl.constexpr):
    tile = tl.make_tensor_descriptor(x, [rows, 16], [16, 1], [8, 16], padding_option=PADDING)
    tl.store(out + tl.arange(0, 8)[:, None] * 16 + tl.arange(0, 16)[None, :], tile.load([0, 0]))


def test_descriptors_pad_with_zeros_alone() -> None:
    x, out = torch.ones(6, 16).bfloat16(), torch.full((8, 16), 3.0).bfloat16()
    described[(1,)](x, out, 6, PADDING="zero")
    assert torch.equal(out[:6], x)
    assert not out[6:].any()
    with pytest.raises(machine.InterpreterError, match="descriptor: expected padding with zeros"):
        described[(1,)](x, out, 6, PADDING="nan")
    single = torch.zeros(8, 16)
    described[(1,)](x.float(), single, 6, PADDING="nan")
    assert single[6:].isnan().all()


# The repair itself.


def test_without_the_repair_values_are_wrong(unrepaired: None) -> None:
    assert len(interpreter._wrong()) > 3


def test_repairing_twice_changes_nothing() -> None:
    before = methods()
    interpreter.repair()
    assert methods() == before


def test_where_it_computes_rightly_nothing_changes(unrepaired: None, monkeypatch: pytest.MonkeyPatch) -> None:
    before = methods()
    monkeypatch.setattr(interpreter, "_wrong", list)
    interpreter.repair()
    assert methods() == before


def test_where_kernels_are_compiled_nothing_changes(unrepaired: None, monkeypatch: pytest.MonkeyPatch) -> None:
    before = methods()
    monkeypatch.setattr(interpreter, "_trial", object())
    interpreter.repair()
    assert methods() == before


@pytest.mark.parametrize(("owner", "name"), [(owner, name) for owner, name, _ in interpreter._REPAIRS])
def test_a_missing_method(owner: Any, name: str, unrepaired: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(owner, name)
    before = [vars(owner).get(name) for owner, name in METHODS]
    with pytest.raises(RuntimeError, match=rf"triton .*: expected a method {owner.__name__}.{name}, got none. Use "):
        interpreter.repair()
    assert [vars(owner).get(name) for owner, name in METHODS] == before


def test_a_repair_that_does_not_help_is_undone(unrepaired: None, monkeypatch: pytest.MonkeyPatch) -> None:
    before = methods()
    narrow = interpreter._narrow

    def up(x: Any) -> Any:
        return machine.TensorHandle(narrow(x).data + np.uint16(1), tl.bfloat16)

    monkeypatch.setattr(interpreter, "_narrow", up)
    with pytest.raises(
        RuntimeError, match="expected right bfloat16 values after the repair, got wrong ones of a cast from"
    ):
        interpreter.repair()
    assert methods() == before


def test_it_repairs(unrepaired: None) -> None:
    interpreter.repair()
    assert interpreter._wrong() == []


# Bounds.


@triton.jit
def copy(x, out, first, n, s_x, N: tl.constexpr):
    i = first + tl.arange(0, N)
    tl.store(out + tl.arange(0, N), tl.load(x + i * s_x, mask=i < n, other=0), mask=i < n)


@pytest.fixture
def guarded() -> Iterator[None]:
    with checked():
        yield


def test_within_bounds(guarded: None) -> None:
    x, out = torch.arange(7.0), torch.zeros(7)
    copy[(1,)](x, out, 0, 7, 1, N=8)
    assert torch.equal(out, x)
    full, out = torch.arange(8.0), torch.zeros(8)
    copy[(1,)](full, out, 0, 99, 1, N=8)
    assert torch.equal(out, full)


def test_one_too_far(guarded: None) -> None:
    x, out = torch.arange(7.0), torch.zeros(8)
    line = copy.fn.__code__.co_firstlineno + 3
    found = rf"tl.load at test_triton_interpreter.py:{line} \(copy\), program \(0, 0, 0\): 1 of 8 lanes out of bounds, "
    with pytest.raises(IndexError, match=found + r"first \(7,\): 1 elements of 4 bytes past the end of x"):
        copy[(1,)](x, out, 0, 8, 1, N=8)
    with pytest.raises(IndexError, match=r"tl.store .*first \(7,\): 1 elements of 4 bytes past the end of out"):
        copy[(1,)](torch.arange(8.0), out[:7], 0, 8, 1, N=8)
    with pytest.raises(IndexError, match=r"tl.load .*: 2 of 8 .*first \(0,\): 2 elements of 4 bytes before the start"):
        copy[(1,)](torch.arange(8.0), out, -2, 8, 1, N=8)


def test_the_program_is_named(guarded: None) -> None:
    with pytest.raises(IndexError, match=r"program \(3, 0, 0\): 8 of 8 lanes out of bounds, first \(0,\)"):
        convert[(5,)](torch.zeros(24), torch.zeros(40), TO=tl.float32, ROUNDING=None, N=8)


def test_a_view_ends_where_it_ends(guarded: None) -> None:
    """The memory beside a view belongs to somebody else."""
    buffer, out = torch.arange(40.0), torch.zeros(8)
    copy[(1,)](buffer[4:12], out, 0, 8, 1, N=8)
    assert torch.equal(out, buffer[4:12])
    for first, n in ((1, 9), (-1, 7)):
        with pytest.raises(IndexError, match=r"tl.load .*1 elements of 4 bytes"):
            copy[(1,)](buffer[4:12], out, first, n, 1, N=8)


def test_strided_views(guarded: None) -> None:
    buffer, out = torch.arange(40.0), torch.zeros(8)
    copy[(1,)](buffer[1:23:3], out, 0, 8, 3, N=8)
    assert torch.equal(out, buffer[1:23:3])
    with pytest.raises(IndexError, match=r"3 elements of 4 bytes past the end of x"):
        copy[(1,)](buffer[1:23:3], out, 1, 9, 3, N=8)
    columns = buffer.view(5, 8).mT[2:4]  # strides 1 and 8, at 2 … 35
    copy[(1,)](columns, out, 0, 5, 8, N=8)
    assert torch.equal(out[:5], columns[0])
    with pytest.raises(IndexError, match=r"7 elements of 4 bytes past the end of x"):
        copy[(1,)](columns, out, 0, 6, 8, N=8)


def test_broadcast_views(guarded: None) -> None:
    x, out = torch.full((1,), 3.0).expand(8), torch.zeros(8)
    copy[(1,)](x, out, 0, 8, 0, N=8)
    assert torch.equal(out, x)
    with pytest.raises(IndexError, match=r"7 of 8 lanes .* 1 elements of 4 bytes past the end of x"):
        copy[(1,)](x, out, 0, 8, 1, N=8)


def test_empty_tensors(guarded: None) -> None:
    copy[(1,)](torch.zeros(0), torch.zeros(0), 0, 0, 1, N=8)
    with pytest.raises(IndexError, match="the launch has no tensors"):
        copy[(1,)](torch.zeros(0), torch.zeros(0), 0, 1, 1, N=8)


@triton.jit
def gathered(xs, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out[1][0] + i, _both(xs, i))


@triton.jit
def _both(xs, i):
    return tl.load(xs[0] + i) + tl.load(xs[1] + i)


def test_tuples_of_pointers(guarded: None) -> None:
    x, y, out = torch.arange(8.0), torch.ones(8), torch.zeros(8)
    gathered[(1,)]((x, y), (None, (out,)), N=8)
    assert torch.equal(out, x + y)
    with pytest.raises(IndexError, match=r"\(_both\).* 1 elements of 4 bytes past the end of xs\[1\]"):
        gathered[(1,)]((x, y[:7]), (None, (out,)), N=8)
    with pytest.raises(
        IndexError, match=r"\(gathered\).* 2 of 8 .* 1 elements of 4 bytes past the end of out\[1\]\[0\]"
    ):
        gathered[(1,)]((x, y), (None, (out[:6],)), N=8)


@triton.jit
def counting(x, n, CAS: tl.constexpr):
    i = tl.arange(0, 8)
    if CAS:
        tl.atomic_cas(x + i, tl.zeros([8], tl.int32), tl.full([8], 5, tl.int32))
    else:
        tl.atomic_add(x + i, 1, mask=i < n)


def test_atomics(guarded: None) -> None:
    x = torch.zeros(8, dtype=torch.int32)
    counting[(1,)](x[:6], 6, CAS=False)
    assert x.tolist() == [1] * 6 + [0] * 2
    counting[(1,)](x, 6, CAS=True)
    assert x.tolist() == [1] * 6 + [5] * 2
    with pytest.raises(IndexError, match=r"tl.atomic at .* 1 elements of 4 bytes past the end of x"):
        counting[(1,)](x[:6], 7, CAS=False)
    with pytest.raises(IndexError, match=r"tl.atomic_cas at .* 2 of 8 lanes"):
        counting[(1,)](x[:6], 7, CAS=True)


def test_descriptors(guarded: None) -> None:
    x, out = torch.ones(6, 16), torch.full((8, 16), 3.0)
    described[(1,)](x, out, 6, PADDING="zero")
    with pytest.raises(IndexError, match=r"tl.load at .*: 32 of 128 lanes out of bounds, first \(6, 0\)"):
        described[(1,)](x, out, 8, PADDING="zero")


@triton.jit
def taken(tile, out):
    tl.store(out + tl.arange(0, 8)[:, None] * 16 + tl.arange(0, 16)[None, :], tile.load([0, 0]).to(tl.float32))


def test_descriptors_of_the_host(guarded: None) -> None:
    buffer, out = torch.arange(8 * 16.0).view(8, 16), torch.zeros(8, 16)
    taken[(1,)](TensorDescriptor(buffer, [8, 16], [16, 1], [8, 16]), out)
    assert torch.equal(out, buffer)
    with pytest.raises(
        IndexError, match=r"32 of 128 lanes out of bounds, .* 1 elements of 4 bytes past the end of tile"
    ):
        taken[(1,)](TensorDescriptor(buffer[:6], [8, 16], [16, 1], [8, 16]), out)


def test_tensors_under_another_dtype(guarded: None) -> None:
    x, out = torch.arange(8.0), torch.zeros(8, dtype=torch.int32)
    copy[(1,)](triton.reinterpret(x, tl.int32), out, 0, 8, 1, N=8)
    assert torch.equal(out.view(torch.float32), x)
    with pytest.raises(
        IndexError, match=r"2 of 8 lanes out of bounds, first \(6,\): 1 elements of 4 bytes past the end of x"
    ):
        copy[(1,)](triton.reinterpret(x[:6], tl.int32), out, 0, 8, 1, N=8)


def test_bfloat16_within_bounds(guarded: None) -> None:
    x, out = torch.arange(8.0).bfloat16(), torch.zeros(8).bfloat16()
    copy[(1,)](x, out, 0, 8, 1, N=8)
    assert torch.equal(out, x)
    with pytest.raises(IndexError, match=r"1 elements of 2 bytes past the end of x"):
        copy[(1,)](x[:7], out, 0, 8, 1, N=8)


@triton.jit
def failing(x):
    tl.static_assert(False, "of the kernel itself")


def test_other_errors_stay(guarded: None) -> None:
    with pytest.raises(machine.InterpreterError, match="of the kernel itself"):
        failing[(1,)](torch.zeros(1))


def test_guards_are_undone() -> None:
    def current() -> list[Any]:
        return [*vars(BUILDER).values(), *vars(machine.GridExecutor).values()]

    before = current()
    with checked():
        assert current() != before
        with pytest.raises(IndexError):
            copy[(1,)](torch.zeros(7), torch.zeros(8), 0, 8, 1, N=8)
    assert current() == before
    with pytest.raises(KeyError), checked():
        raise KeyError
    assert current() == before


# What nobody wrote.


@pytest.mark.parametrize("before", [False, True])
def test_new_memory_is_nan(before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", before)
    x = torch.zeros(3)
    with nan_filled():
        for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
            made = [torch.empty(5, 7, dtype=dtype), x.new_empty((4,), dtype=dtype), torch.empty_like(x, dtype=dtype)]
            made += [torch.empty_strided((3, 2), (1, 3), dtype=dtype), x.new_empty_strided((2, 3), (3, 1), dtype=dtype)]
            assert all(m.isnan().all() for m in made)
        for dtype in (torch.uint8, torch.int32, torch.int64):
            assert (torch.empty(5, dtype=dtype) == torch.iinfo(dtype).max).all()
            assert (x.new_empty(5, dtype=dtype) == torch.iinfo(dtype).max).all()
        assert not torch.zeros(5).any()


def test_what_a_kernel_left_out_shows() -> None:
    x = torch.arange(8.0)
    with nan_filled():
        out = torch.empty(8)
        copy[(1,)](x, out, 0, 5, 1, N=8)
    assert torch.equal(out[:5], x[:5])
    assert out[5:].isnan().all()


@pytest.mark.parametrize("mode", [(False, False), (True, True), (True, False)])
@pytest.mark.parametrize("fill", [False, True])
def test_filling_is_undone(mode: tuple[bool, bool], fill: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", fill)
    torch.use_deterministic_algorithms(mode[0], warn_only=mode[1])
    try:
        with pytest.raises(KeyError), nan_filled():
            raise KeyError
        now = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        assert now == mode
        assert torch.utils.deterministic.fill_uninitialized_memory == fill
    finally:
        torch.use_deterministic_algorithms(False)

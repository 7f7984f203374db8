"""bfloat16 in Triton's interpreter, which keeps it as 16-bit integers and computes with those: silently wrong values.

Here every operation on bfloat16 becomes the same operation on float32, its result rounded to the nearest bfloat16, ties
to even, as compilers do where a chip has no such instruction. Loads, stores and whatever only moves elements are right
as they are: they move bits. The interpreter is for tests (TRITON_INTERPRET=1); compiled kernels never see it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter as machine

from hla.errors import message

__all__ = ["repair"]

Method = Callable[..., Any]


def repair() -> None:
    """Make Triton's interpreter compute with bfloat16 as float32, rounded to the nearest, ties to even.

    Sums, products, maxima and minima of many elements are taken in float32 and rounded once. A scaled dot and the NaN
    padding of a tensor descriptor have no right result to offer and are refused. Nothing happens where kernels are
    compiled, and nothing where the interpreter computes rightly: because it was repaired, or needs no repair. Which it
    is, a small kernel finds out. Call it once before the first kernel runs; another thread must not run one meanwhile.

    Raises:
        RuntimeError: Triton's interpreter is not as expected. It is left as it was.

    """
    if not isinstance(_trial, machine.InterpretedFunction) or not _wrong():
        return
    old: dict[tuple[Any, str], Method] = {}
    for owner, name, _ in _REPAIRS:
        if not hasattr(owner, name):
            raise RuntimeError(_unexpected(f"a method {owner.__name__}.{name}", "none"))
        old[owner, name] = getattr(owner, name)
    for owner, name, wrap in _REPAIRS:
        setattr(owner, name, wrap(old[owner, name]))
    wrong = _wrong()
    if wrong:
        for (owner, name), method in old.items():
            setattr(owner, name, method)
        raise RuntimeError(_unexpected("right bfloat16 values after the repair", f"wrong ones of {', '.join(wrong)}"))
    for name, wrap in _REFUSALS.items():
        if hasattr(machine.InterpreterBuilder, name):
            setattr(machine.InterpreterBuilder, name, wrap(getattr(machine.InterpreterBuilder, name)))


def _unexpected(expected: str, got: str) -> str:
    todo = "Use a version of triton that hla is tested with, or test with float32 and float16 alone."
    return message(f"the interpreter of triton {triton.__version__}", expected, got, todo)


# Handles: the interpreter's values, a NumPy array with Triton's dtype.


def _is_bfloat16(x: Any) -> bool:
    """Whether these are bits of bfloat16. A comparison's handle has its operands' dtype, and holds booleans."""
    return isinstance(x, machine.TensorHandle) and x.dtype.scalar == tl.bfloat16 and x.data.dtype == np.uint16


def _widen(x: Any) -> Any:
    """Bits of bfloat16 as float32, exactly; anything else as it is."""
    if not _is_bfloat16(x):
        return x
    bits = np.asarray(x.data.astype(np.uint32) << np.uint32(16))
    return machine.TensorHandle(bits.view(np.float32), tl.float32)


def _narrow(x: Any) -> Any:
    """Bits of the bfloat16 nearest to each float32, ties to even; NaN stays NaN."""
    nan = np.isnan(x.data)
    bits = np.where(nan, np.uint32(0), np.asarray(x.data).view(np.uint32))  # or the carry of a NaN would run over
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    bits = (bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)
    return machine.TensorHandle(np.where(nan, np.uint32(0x7FC0), bits).astype(np.uint16), tl.bfloat16)


# What the methods become. Each of these takes the interpreter's own method.


def _in_float32(method: Method) -> Method:
    """An operation on elements, its operands in any place. Comparisons keep their booleans."""

    @functools.wraps(method)
    def repaired(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if not any(map(_is_bfloat16, (*arguments, *keywords.values()))):
            return method(self, *arguments, **keywords)
        result = method(self, *map(_widen, arguments), **{name: _widen(x) for name, x in keywords.items()})
        if result.data.dtype == np.bool_:
            return machine.TensorHandle(result.data, tl.int1)
        return _narrow(result)

    return repaired


def _dot(method: Method) -> Method:
    """A matrix product: products of two bfloat16 are exact in float32, the sum has the accumulator's dtype."""

    @functools.wraps(method)
    def repaired(self: Any, a: Any, b: Any, *rest: Any, **keywords: Any) -> Any:
        return method(self, _widen(a), _widen(b), *rest, **keywords)

    return repaired


def _cast(method: Method) -> Method:
    """To and from every dtype but those of 8 bits; by way of float32, as in torch, also from float64 and integers."""

    @functools.wraps(method)
    def repaired(self: Any, source: Any, to: Any) -> Any:
        if _is_bfloat16(source):
            wide = source if to.scalar == tl.bfloat16 else _widen(source)
            return wide if to.scalar in (tl.bfloat16, tl.float32) else method(self, wide, to)
        if to.scalar == tl.bfloat16:
            return _narrow(source if source.dtype.scalar == tl.float32 else method(self, source, tl.float32))
        return method(self, source, to)

    return repaired


def _cast_floats(method: Method) -> Method:
    """From a wider float, with a rounding mode: to the nearest, or toward zero."""

    @functools.wraps(method)
    def repaired(self: Any, source: Any, to: Any, rounding: Any) -> Any:
        if to.scalar == tl.bfloat16 and source.dtype.scalar in (tl.float16, tl.float32, tl.float64):
            nearest = self.cast_impl(source, to)
            if rounding != machine._ir.ROUNDING_MODE.RTZ:
                return nearest
            beyond = np.abs(_widen(nearest).data) > np.abs(source.data)
            return machine.TensorHandle(nearest.data - beyond.astype(np.uint16), tl.bfloat16)
        return method(self, source, to, rounding)

    return repaired


def _of_many(method: Method) -> Method:
    """A reduction or a scan that NumPy makes, of a tensor; its results may be several, indices among them."""

    @functools.wraps(method)
    def repaired(self: Any, value: Any, *rest: Any, **keywords: Any) -> Any:
        if not _is_bfloat16(value.handle):
            return method(self, value, *rest, **keywords)
        result = method(self, _as(value, _widen(value.handle)), *rest, **keywords)
        if not isinstance(result, (tuple, list)):
            return _rounded(result)
        return type(result)(_rounded(x) for x in result)

    return repaired


def _as(x: Any, handle: Any) -> Any:
    """A tensor of the same shape with another handle."""
    return tl.tensor(handle, tl.block_type(handle.dtype, x.type.shape) if x.type.is_block() else handle.dtype)


def _rounded(x: Any) -> Any:
    return _as(x, _narrow(x.handle)) if x.dtype == tl.float32 else x


def _without_scales(method: Method) -> Method:
    """A scaled dot goes by way of float16, out of whose range bfloat16 runs."""

    @functools.wraps(method)
    def repaired(self: Any, *arguments: Any, **keywords: Any) -> Any:
        if any(map(_is_bfloat16, (*arguments, *keywords.values()))):
            raise NotImplementedError(_refused("dot_scaled", "operands of 8 or 4 bits", "bfloat16"))
        return method(self, *arguments, **keywords)

    return repaired


def _without_nan(method: Method) -> Method:
    """A descriptor's padding is made as a number of the integers that stand for bfloat16: NaN would be 0."""

    @functools.wraps(method)
    def repaired(self: Any, descriptor: Any, *rest: Any, **keywords: Any) -> Any:
        bfloat16 = descriptor.base.get_element_ty() == tl.bfloat16
        if bfloat16 and getattr(descriptor, "padding", None) == machine._ir.PADDING_OPTION.PAD_NAN:
            raise NotImplementedError(_refused("descriptor", "padding with zeros", "NaN for bfloat16"))
        return method(self, descriptor, *rest, **keywords)

    return repaired


def _refused(what: str, expected: str, got: str) -> str:
    return message(what, f"{expected} in Triton's interpreter", got, "Use float32 or float16 there, or a GPU.")


_REPAIRS: tuple[tuple[Any, str, Callable[[Method], Method]], ...] = (
    *(
        (machine.InterpreterBuilder, name, _in_float32)
        for name in ("binary_op", "unary_op", "create_fma", "create_clampf", "create_erf", "create_rsqrt")
    ),
    (machine.InterpreterBuilder, "create_dot", _dot),
    (machine.InterpreterBuilder, "cast_impl", _cast),
    (machine.InterpreterBuilder, "create_fp_to_fp", _cast_floats),
    (machine.ReduceOps, "sum", _of_many),
    (machine.ReduceOps, "min_max", _of_many),
    (machine.ScanOps, "cumsum", _of_many),
    (machine.ScanOps, "cumprod", _of_many),
)
_REFUSALS: dict[str, Callable[[Method], Method]] = {
    "create_dot_scaled": _without_scales,
    "create_descriptor_load": _without_nan,
}
"""Not every version has these."""


# Is it right as it is?


def _trial_kernel(x: Any, y: Any, single: Any, result: Any) -> None:
    """A row of 16 numbers for each kind of operation, then the 16 rows of a dot."""
    i = tl.arange(0, 16)
    a = tl.load(x + i)
    b = tl.load(y + i)
    square = i[:, None] * 16 + i[None, :]
    matrix = tl.load(x + square)
    ones = tl.zeros([16], tl.float32) + 1.0
    tl.store(result + i, a.to(tl.float32))
    tl.store(result + 16 + i, tl.load(single + i).to(tl.bfloat16).to(tl.float32))
    tl.store(result + 32 + i, (i * 257).to(tl.bfloat16).to(tl.float32))
    tl.store(result + 48 + i, (a * b).to(tl.float32))
    tl.store(result + 64 + i, (-a).to(tl.float32))
    tl.store(result + 80 + i, tl.where(a < b, ones, 0.0))
    tl.store(result + 96 + i, tl.fma(a, b, a).to(tl.float32))
    tl.store(result + 112 + i, tl.clamp(a, b, tl.load(y + 16 + i)).to(tl.float32))
    tl.store(result + 128 + i, ones * tl.sum(a, axis=0).to(tl.float32))
    tl.store(result + 144 + i, ones * tl.argmax(a, axis=0).to(tl.float32))
    tl.store(result + 160 + i, tl.cumsum(a, axis=0).to(tl.float32))
    tl.store(result + 176 + i, tl.cumprod(a, axis=0).to(tl.float32))
    tl.store(result + 192 + square, tl.dot(matrix, matrix))


_trial = triton.jit(_trial_kernel)


def _wrong() -> list[str]:
    """The kinds of operation that the interpreter gets wrong. All sums and products here are exact in float32."""
    i = torch.arange(256, device="cpu")
    x = ((i * 37 % 11 - 5) / 4).bfloat16()
    y = ((i * 29 % 13 - 6) / 8 + 1 / 256).bfloat16()
    single = (1 + i[:16] / 512).float()
    result = torch.full((28, 16), torch.nan, dtype=torch.float32, device="cpu")
    try:
        with np.errstate(all="ignore"):
            _trial[(1,)](x, y, single, result)
    except Exception as error:
        return [f"a kernel that does not run ({error!r})"]
    a, b, c, square = x[:16].float(), y[:16].float(), y[16:32].float(), x.float().view(16, 16)
    kinds = {
        "a cast to float32": a,
        "a cast from float32": single,
        "a cast from an integer": i[:16] * 257.0,
        "arithmetic": a * b,
        "a sign": -a,
        "a comparison": (a < b).float(),
        "a fused product and sum": a * b + a,
        "a clamp": a.clamp(b, c),
        "a sum": a.sum().expand(16),
        "the place of a maximum": a.argmax().expand(16),
        "a running sum": a.cumsum(0),
        "a running product": a.cumprod(0),
    }
    wants = torch.stack([row.bfloat16().float() for row in kinds.values()])
    right = (result[:12] == wants).all(1).tolist()
    found = [kind for kind, ok in zip(kinds, right, strict=True) if not ok]
    return found if torch.equal(result[12:], square @ square) else [*found, "a dot"]

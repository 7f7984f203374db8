"""What a backend brings: kernels, and arrays that they take."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, Protocol

from hla.arrays import Array, DType, Namespace
from hla.problem import Problem


class Arithmetic(NamedTuple):
    """Numbers in the kernels."""

    operands: DType
    """of the operands of products, and of what is kept between launches"""
    precision: str
    """of these products, in the engine's own words"""
    sums: DType
    """of accumulators and states"""


def rounded_chunk(problem: Problem, most: int) -> int:
    """Tokens per chunk: the power of two at or below what was asked for, at least 16 and at most `most`."""
    asked = problem.chunk_size or most
    return max(16, min(most, 1 << (asked.bit_length() - 1)))


class Engine(Protocol):
    """Kernels, and the arrays that they take. An engine is one object, as it is part of cache keys."""

    def __hash__(self) -> int: ...

    @property
    def xp(self) -> Namespace:
        """For the little that is done outside the kernels: where, sums to a shape, products of one number a token."""

    @property
    def scratch(self) -> bool:
        """Whether the kernel `token` wants room for one token of every stream that it makes."""

    def empty(self, like: Array, shape: tuple[int, ...], dtype: DType) -> Array:
        """A new array on the device of another."""

    def number(self, like: Array, value: float) -> Array:
        """An array without axes, of the dtype and on the device of another."""

    def strides(self, x: Array) -> tuple[int, ...]:
        """In elements."""

    def dense(self, x: Array) -> Array:
        """The same array without gaps, copied if need be."""

    def fill(self, target: Array, source: Array) -> None:
        """Write one array into another."""

    def place(self, x: Array) -> Hashable:
        """The device of an array, as part of a key."""

    def table(self, where: Any, rows: Sequence[Any]) -> Array:
        """Whole numbers of 64 bits on a device, which `place` gave."""

    def arithmetic(self, problem: Problem) -> Arithmetic:
        """The dtypes of a call."""

    def chunk_size(self, problem: Problem, arithmetic: Arithmetic) -> int:
        """Tokens per chunk: a power of two, at or below what was asked for, at least 16."""

    def chains(self, arithmetic: Arithmetic, chunk: int, rows: int, wide: int, columns: int, like: Array) -> bool:
        """Whether `chain` can run a state of `rows` and one of `wide` rows in one pass."""

    def launch(self, kernel: str, batch: int, arguments: dict[str, Any], arithmetic: Arithmetic, like: Array) -> None:
        """Launch a kernel for a number of batch entries. Lower-case arguments are arrays or None, strides ("s_x") and
        numbers; those in capitals are known beforehand: widths, powers, which kind of pass."""

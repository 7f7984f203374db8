"""Memory in Triton's interpreter (TRITON_INTERPRET=1), which reads and writes wherever it is told to.

`checked()` reports every access outside the tensors of a launch; `nan_filled()` makes what nobody wrote show.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
from triton.runtime import interpreter as machine


class OutOfBoundsError(IndexError):
    """A lane of a load, a store or an atomic outside the tensors of its launch; says where."""


class Extent(NamedTuple):
    """The bytes of an argument, from its first element to its last: what a view does not span is not in it."""

    name: str
    start: int
    stop: int


ACCESSES: dict[str, tuple[str, int, int | None]] = {
    "create_masked_load": ("load", 0, 1),
    "create_masked_store": ("store", 0, 2),
    "create_atomic_rmw": ("atomic", 1, 3),
    "create_atomic_cas": ("atomic_cas", 0, None),
}
"""All that touches memory: what a kernel calls it, and which of its arguments are the pointers and the mask."""


@contextmanager
def checked() -> Iterator[None]:
    """Every lane of an access that is not masked must hit an argument of the launch, or the launch raises.

    Arguments are tensors, tensor descriptors and tuples of them, however deep. An access through the pointer of one
    argument may hit another.
    """
    extents: list[Extent] = []

    def guard(name: str, method: Any) -> Any:
        access, pointers, mask = ACCESSES[name]

        @functools.wraps(method)
        def guarded(self: Any, *arguments: Any, **keywords: Any) -> Any:
            check(access, arguments[pointers], None if mask is None else arguments[mask], extents)
            return method(self, *arguments, **keywords)

        return guarded

    def note(method: Any) -> Any:
        """Where the interpreter copies arguments to the host: these copies are what kernels see."""

        @functools.wraps(method)
        def noting(self: Any, arguments: Any, keywords: Any) -> Any:
            positional, named = method(self, arguments, keywords)
            found = {**dict(zip(self.arg_names, positional, strict=False)), **named}
            extents[:] = [extent for name, value in found.items() for extent in spanned(name, value)]
            return positional, named

        return noting

    def unwrap(method: Any) -> Any:
        """The interpreter wraps an error in its own, once for each function that the kernel was in."""

        @functools.wraps(method)
        def unwrapping(self: Any, *arguments: Any, **keywords: Any) -> Any:
            try:
                return method(self, *arguments, **keywords)
            except Exception as error:
                cause: BaseException | None = error
                while cause is not None and not isinstance(cause, OutOfBoundsError):
                    cause = cause.__cause__
                if cause is None:
                    raise
                raise cause from None

        return unwrapping

    wraps: dict[tuple[Any, str], Any] = {
        (machine.InterpreterBuilder, name): functools.partial(guard, name) for name in ACCESSES
    }
    wraps[machine.GridExecutor, "_init_args_hst"] = note
    wraps[machine.GridExecutor, "__call__"] = unwrap
    methods = {(owner, name): getattr(owner, name) for owner, name in wraps}
    try:
        for (owner, name), wrap in wraps.items():
            setattr(owner, name, wrap(methods[owner, name]))
        yield
    finally:
        for (owner, name), method in methods.items():
            setattr(owner, name, method)


def spanned(name: str, value: Any) -> Iterator[Extent]:
    """The extents of an argument."""
    if isinstance(value, tuple):
        for i, part in enumerate(value):
            yield from spanned(f"{name}[{i}]", part)
    elif not isinstance(value, torch.Tensor):
        base = getattr(value, "base", None)  # of a descriptor, or of a tensor under another dtype
        if base is not None:
            yield from spanned(name, base)
    elif value.numel():
        count = 1 + sum((n - 1) * stride for n, stride in zip(value.shape, value.stride(), strict=True))
        yield Extent(name, value.data_ptr(), value.data_ptr() + count * value.element_size())


def check(access: str, pointers: Any, mask: Any, extents: list[Extent]) -> None:
    """Raise for the first lane that is not masked and hits no extent."""
    size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
    start = np.asarray(pointers.data).astype(np.int64)
    allowed = np.zeros(start.shape, dtype=bool)
    if mask is not None:
        allowed |= ~np.broadcast_to(np.asarray(mask.data).astype(bool), start.shape)
    for extent in extents:
        allowed |= (start >= extent.start) & (start + size <= extent.stop)
    if allowed.all():
        return
    lane = tuple(int(i) for i in np.argwhere(~allowed)[0])
    raise OutOfBoundsError(
        f"tl.{access} at {where()}, program {machine.interpreter_builder.grid_idx}: {np.sum(~allowed)} of "
        f"{allowed.size} lanes out of bounds, first {lane}: {how_far(int(start[lane]), size, extents)}"
    )


def how_far(start: int, size: int, extents: list[Extent]) -> str:
    """From the nearest argument to an element that is in none."""
    before = [(extent.start - start, f"before the start of {extent.name}") for extent in extents]
    after = [(start + size - extent.stop, f"past the end of {extent.name}") for extent in extents]
    out = [(distance, side) for distance, side in before + after if distance > 0]
    if not out:
        return "the launch has no tensors"
    distance, side = min(out)
    return f"{distance / size:g} elements of {size} bytes {side}"


LIBRARY = str(Path(triton.__file__).parent)


def where() -> str:
    """The line of the kernel, or of the function that it called, that is running."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and (frame.f_code.co_filename == __file__ or frame.f_code.co_filename.startswith(LIBRARY)):
        frame = frame.f_back
    if frame is None:
        return "an unknown line"
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} ({frame.f_code.co_name})"


@contextmanager
def nan_filled() -> Iterator[None]:
    """New memory that nobody wrote to holds NaN, that of integers their largest number.

    PyTorch does that, for all that allocates (`torch.empty`, `Tensor.new_empty`, …), as part of its deterministic mode.
    """
    mode = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*determinis", UserWarning)  # of operations that have no such mode
        try:
            torch.use_deterministic_algorithms(True, warn_only=True)
            torch.utils.deterministic.fill_uninitialized_memory = True
            yield
        finally:
            torch.utils.deterministic.fill_uninitialized_memory = filled
            torch.use_deterministic_algorithms(mode[0], warn_only=mode[1])

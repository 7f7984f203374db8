"""The CUDA kernels on NumPy arrays, and what they should compute: the definitions, summed pair by pair in float64.

An array here has the three batch axes of a launch, broadcast where need be, and then its own.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import budget
from cuda import cpu
from hla.backends.cupy import parameters

KERNELS = Path(parameters.__file__).parent / "kernels"
KINDS = {"float": np.dtype("float32"), "double": np.dtype("float64")}
BATCH = (2, 1, 3)
LOWEST = {"float": -110.0, "double": -750.0}
"""Log-decays below are resets."""
orders: list[str] = ["forward"]
"""The last is that of the launches to come; "every": all of them, and the results compared."""


@cache
def compiled(folder: Path, kernel: str, variant: str, macros: tuple[tuple[str, int], ...]) -> cpu.Kernel:
    """An instance of a kernel."""
    return cpu.compile(folder / f"{kernel}.cu", kernels=[variant], macros=dict(macros)).kernel(variant)


def launch(kernel: str, kind: str, variant: tuple[int, int], arguments: dict[str, Any], folder: Path = KERNELS) -> None:
    """Run a kernel for the whole batch."""
    a = {"batch": math.prod(BATCH), "n1": BATCH[1], "n2": BATCH[2], **arguments}
    name = parameters.name(kernel, kind, *variant)
    found = compiled(folder, kernel, name, parameters.macros(kernel, a))
    packed = [
        x.view(np.uint8) if isinstance(x, np.ndarray) and x.dtype == bool else x for x in parameters.pack(kernel, a)
    ]
    packed[-1] = packed[-1][()]
    blocks = parameters.grid(kernel, a, variant[1])
    shared = parameters.shared_bytes(kernel, kind, *variant, a)
    if blocks == 0:
        return
    if orders[-1] == "every":
        cpu.in_every_order(found, (blocks,), (parameters.THREADS,), packed, shared)
    else:
        found((blocks,), (parameters.THREADS,), packed, shared, orders[-1])


def launch_far(
    kernel: str, kind: str, variant: tuple[int, int], arguments: dict[str, Any], before: dict[str, int]
) -> None:
    """Run a kernel for one batch entry. Pointers are given that many elements before what they point to."""
    a = {"n1": 1, "n2": 1, "batch": 1, **arguments}
    found = compiled(KERNELS, kernel, parameters.name(kernel, kind, *variant), parameters.macros(kernel, a))
    packed = parameters.pack(kernel, a)
    names = ("q", "k", "v", *TOKEN) if kernel == "token" else parameters.KERNELS[kernel].pointers
    values: list[Any] = []
    for i, x in enumerate(packed[:-1]):
        offset = before.get(names[i], 0) if i < len(names) else 0
        values.append(ctypes.c_void_p(0 if x is None else x.ctypes.data - offset * x.itemsize))
    values.append(ctypes.create_string_buffer(packed[-1].tobytes()))
    geometry = (parameters.grid(kernel, a, variant[1]), 1, 1, parameters.THREADS, 1, 1)
    geometry = (*geometry, parameters.shared_bytes(kernel, kind, *variant, a), 0, 0)
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(x) for x in values))
    assert not found._launch(pointers, (ctypes.c_longlong * 9)(*geometry)), found._message()


TOKEN = ("output", "log_decay", "mask", "starts", "bounds")


# ---- arrays


def strides(x: np.ndarray) -> tuple[int, ...]:
    return tuple(step // x.itemsize for step in x.strides)


def stored(x: np.ndarray, dtype: str) -> np.ndarray:
    """An array as a kernel gets it; bfloat16 as its bits."""
    if dtype == "bfloat16":
        import ml_dtypes

        return np.asarray(x, ml_dtypes.bfloat16).view(np.uint16)
    return np.asarray(x, dtype)


def value(x: np.ndarray) -> np.ndarray:
    """The numbers of an array."""
    if x.dtype == np.uint16:
        with np.errstate(invalid="ignore"):  # NaN of any kind
            return (x.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return x.astype(np.float64)


def laid(x: np.ndarray, layout: str) -> np.ndarray:
    """The same numbers otherwise in memory. Layouts of (*batch, a, b) or (*batch, n, a, b):

    plain; heads (the last batch axis lies behind a); turned (a and b change places); odd (rows with a gap, from an odd
    address); shifted (rows are aligned, but for the address of the first); broadcast (the same for all along the last
    batch axis).
    """
    if layout == "plain":
        return np.ascontiguousarray(x)
    if layout == "heads":
        return np.moveaxis(np.ascontiguousarray(np.moveaxis(x, 2, -2)), -2, 2)
    if layout == "turned":
        return np.swapaxes(np.ascontiguousarray(np.swapaxes(x, -1, -2)), -1, -2)
    if layout == "odd":
        wide = np.zeros((*x.shape[:-1], x.shape[-1] + 3), x.dtype)
        wide[..., 1:-2] = x
        return wide[..., 1:-2]
    if layout == "shifted":
        wide = np.zeros((*x.shape[:-1], x.shape[-1] + 4), x.dtype)
        wide[..., 1:-3] = x
        return wide[..., 1:-3]
    assert layout == "broadcast"
    return np.broadcast_to(np.ascontiguousarray(x[:, :, :1]), x.shape)


class Maker:
    """Random arrays, from one seed."""

    def __init__(self, seed: int, dtype: str = "float32", layout: str = "plain") -> None:
        self.random = np.random.default_rng(seed)
        self.dtype, self.layout = dtype, layout

    def __call__(self, *own: int, dtype: str | None = None, layout: str | None = None) -> np.ndarray:
        x = self.random.standard_normal((*BATCH, *own)) / 2
        return laid(stored(x, dtype or self.dtype), layout or self.layout)

    def empty(self, *own: int, dtype: str | None = None, layout: str = "plain") -> np.ndarray:
        """An output: NaN throughout."""
        return laid(stored(np.full((*BATCH, *own), np.nan), dtype or self.dtype), layout)


def views(**arrays: np.ndarray | None) -> dict[str, Any]:
    """Arguments for arrays and their strides."""
    found: dict[str, Any] = {}
    for name, x in arrays.items():
        found[name] = x
        found[f"s_{name}"] = (0,) if x is None else strides(x)
    return found


# ---- time


class Time(NamedTuple):
    """Chunks, and parts of them."""

    T: int
    C: int
    offsets: tuple[int, ...] | None = None
    """of packed sequences"""
    pieces: int = 1
    """or else into which one sequence is cut"""

    @property
    def chunks(self) -> list[tuple[int, int, int]]:
        bounds = self.offsets or (0, self.T)
        return [
            (t, min(t + self.C, stop), i)
            for i, (start, stop) in enumerate(pairwise(bounds))
            for t in range(start, stop, self.C)
        ]

    @property
    def parts(self) -> list[int]:
        """The first chunk of each, and the end."""
        if self.offsets:
            numbers = [n for _, _, n in self.chunks]
            return [sum(n < i for n in numbers) for i in range(len(self.offsets))]
        count = len(self.chunks)
        each = max(1, -(-count // self.pieces))
        return [*range(0, count, each), count]

    def arguments(self) -> dict[str, Any]:
        table = np.array(self.chunks, np.int64).reshape(-1, 3) if self.offsets else None
        parts = np.array(self.parts, np.int64) if len(self.parts) > 2 else None
        return {
            "T": self.T,
            "C": self.C,
            "count": len(self.chunks),
            "chunks": table,
            "parts": parts,
            "part_count": len(self.parts) - 1,
        }


class Gate(NamedTuple):
    """Log-decays (*BATCH, T), masks and starts likewise, as a definition needs them."""

    kind: int
    log: np.ndarray
    resets: np.ndarray
    starts: np.ndarray
    kept: np.ndarray
    arguments: dict[str, Any]


def no_gate(T: int) -> Gate:
    shape = (*BATCH, T)
    no = np.zeros(shape, bool)
    return Gate(0, np.zeros(shape), no, no, ~no, {"gate": None, "s_gate": (0, 0, 0), "DECAY": 0})


def constant_gate(T: int, dtype: str = "float32") -> Gate:
    log = stored(np.linspace(-0.3, -0.01, math.prod(BATCH)).reshape(*BATCH, 1, 1), dtype)
    found = no_gate(T)
    arguments = {"gate": log, "s_gate": strides(log)[:3], "DECAY": 1}
    return found._replace(kind=1, log=np.broadcast_to(value(log)[..., 0], (*BATCH, T)), arguments=arguments)


def clock_inputs(time: Time, kind: str, seed: int, dtype: str = "float32") -> tuple[dict[str, Any], Gate]:
    """Log-decays with resets, a mask and starts; the arguments of `clock`, and what it should make of them."""
    random = np.random.default_rng(seed)
    shape = (*BATCH, time.T)
    log = -random.gamma(0.5, 0.4, shape)
    log[random.random(shape) < 0.06] = -np.inf
    log[random.random(shape) < 0.03] = LOWEST[kind] - 1
    log[random.random(shape) < 0.03] = -40.0
    kept = random.random((*BATCH[:2], 1, time.T)) > 0.15
    mask = np.broadcast_to(kept, shape)
    starts = np.zeros(shape, bool)
    for start in (time.offsets or (0, time.T))[:-1]:
        starts[..., start : start + 1] = start < time.T
    starts |= random.random(shape) < 0.02
    given = stored(log, dtype)
    high, low = (np.full(shape, np.nan, KINDS[kind]) for _ in range(2))
    era = np.full(shape, -7, np.int32)
    arguments = {
        **views(log_decay=given, mask=mask, starts=starts),
        "high": high,
        "low": low,
        "era": era,
        "s_out": strides(high),
        **time.arguments(),
    }
    own = np.where(mask, value(given), 0.0)
    resets = (own < LOWEST[kind]) | starts
    gate = Gate(
        2, np.where(resets, 0.0, own), resets, starts, mask,
        {"gate": (high, low, era), "s_gate": strides(high)[:3], "DECAY": 2},
    )  # fmt: skip
    return arguments, gate


def clocked(time: Time, kind: str, seed: int) -> Gate:
    """A gate of kind 2, with the arrays of the kernel `clock`."""
    arguments, gate = clock_inputs(time, kind, seed)
    launch("clock", kind, (time.C, 0), arguments)
    return gate


def gates(decay: int, time: Time, kind: str, seed: int = 0) -> Gate:
    """One of each kind."""
    if decay == 0:
        return no_gate(time.T)
    return constant_gate(time.T) if decay == 1 else clocked(time, kind, seed)


# ---- definitions, of one batch entry


class Factors:
    """The factors of one chunk; None where nothing passes."""

    def __init__(self, gate: Gate, b: tuple[int, ...], start: int, stop: int, strict: bool) -> None:
        self.log, self.resets, self.starts = gate.log[b], gate.resets[b], gate.starts[b]
        self.start, self.stop, self.strict = start, stop, strict

    def span(self, first: int, stop: int) -> float | None:
        """Through the tokens first, …, stop − 1."""
        if self.resets[first:stop].any():
            return None
        return math.exp(self.log[first:stop].sum())

    def pair(self, t: int, j: int) -> float | None:
        """From writer j to reader t."""
        if t < j or (self.strict and (t == j or self.starts[t])):
            return None
        return self.span(j + 1, t + (not self.strict))

    def reach(self, t: int) -> float | None:
        """From the state that enters to reader t."""
        return None if self.strict and self.starts[t] else self.span(self.start, t + (not self.strict))

    def leave(self, j: int) -> float | None:
        """From writer j to the state that leaves."""
        return self.span(j + 1, self.stop)

    @property
    def through(self) -> float | None:
        return self.span(self.start, self.stop)


def entries() -> Iterator[tuple[int, ...]]:
    """The batch."""
    yield from product(*map(range, BATCH))


def read_chunk(
    f: Factors, x: np.ndarray, y: np.ndarray | None, z: np.ndarray | None, state: np.ndarray | None, kept: np.ndarray,
    power: int, by_state: float, by_pair: float, reverse: bool,
) -> np.ndarray:  # fmt: skip
    """The reads of one chunk's tokens."""
    width = state.shape[-1] if z is None else z.shape[-1]  # type: ignore[union-attr]
    result = np.zeros((f.stop - f.start, width))
    for i in range(f.start, f.stop):
        if not kept[i]:
            continue
        enters = f.leave(i) if reverse else f.reach(i)
        if enters is not None and state is not None:
            result[i - f.start] += by_state * enters**power * (x[i] @ state)
        for j in range(f.start, f.stop) if y is not None else ():
            factor = f.pair(j, i) if reverse else f.pair(i, j)
            if factor is not None and kept[j]:
                result[i - f.start] += by_pair * factor**power * (x[i] @ y[j]) * z[j]  # type: ignore[index]
    return result


def move_state(
    f: Factors, state: np.ndarray, y: np.ndarray | None, z: np.ndarray | None, kept: np.ndarray, power: int,
    into: float, reverse: bool,
) -> np.ndarray:  # fmt: skip
    """A state moved through one chunk."""
    through = f.through
    result = np.zeros_like(state) if through is None else through**power * state
    for j in range(f.start, f.stop) if y is not None else ():
        factor = f.reach(j) if reverse else f.leave(j)
        if factor is not None and kept[j]:
            result = result + into * factor**power * np.outer(y[j], z[j])  # type: ignore[index]
    return result


# ---- judging


def compare(
    out: np.ndarray, want: np.ndarray, scale: np.ndarray, kind: str, length: int, width: int, passes: int,
    label: str = "",
) -> None:  # fmt: skip
    """Within the roundings of `passes` stages and one to the result's own type, of each number by itself."""
    got = value(out)
    assert got.shape == want.shape, label
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want), err_msg=label)
    name = "bfloat16" if out.dtype == np.uint16 else out.dtype.name
    allowed = budget.tolerance(KINDS[kind].name, length, width, passes) * scale
    allowed = allowed + length * float(np.finfo(KINDS[kind]).tiny)  # terms below that are 0
    if name != KINDS[kind].name:
        allowed = allowed + budget.UNIT[name] * np.abs(want) + budget.LEAST[name]
    there = ~np.isnan(want)
    worst = (np.abs(got - want) - allowed)[there]
    assert worst.size == 0 or worst.max() <= 0, f"{label}: off by {worst.max()} more than allowed"


def numbers(*arrays: np.ndarray | None) -> Sequence[np.ndarray | None]:
    return [None if x is None else value(x) for x in arrays]

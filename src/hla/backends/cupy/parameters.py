"""What the CUDA kernels take: their arguments, blocks and shared memory.

A kernel's arguments are pointers, and then one struct by value, all of whose fields have eight bytes: for every pointer
that has strides a view, then numbers. Both come from a dict of arguments by the names that the schedule of
`hla.backends.staged` uses. This file and the sources in kernels/ say the same thing twice, and tests compare them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from hla.arrays import Array

THREADS = 256
"""of a block"""
SLAB, ROWS, PAD = 32, 64, 4
"""as in kernels/tile.cuh"""
MOST_BYTES = 4096
"""that all arguments of a kernel may have together"""
BYTES = {"float": 4, "double": 8}
"""of a number, by the type of accumulators"""
TYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 3, "uint16": 3, "bool": 4, "uint8": 4, "int32": 5}
"""How numbers are stored, as kernels/views.cuh has it. bfloat16 may come as its 16 bits."""

VARIANTS: dict[str, tuple[tuple[int, int], ...]] = {
    "clock": ((64, 0), (32, 0), (16, 0)),
    "state": ((64, 64), (64, 32), (64, 16), (32, 32), (32, 16), (16, 32), (16, 16)),
    "chain": ((64, 32), (64, 16), (32, 32), (32, 16), (16, 32), (16, 16)),
    "carry": ((0, 0),),
    "read": ((64, 64), (64, 32), (64, 16), (32, 32), (32, 16), (16, 32), (16, 16)),
    "rate": ((64, 32), (32, 32), (16, 32)),
    "token": ((0, 0),),
}
"""Tokens per chunk and columns per block that each kernel is worth compiling for, 0 where it has no such number. For
each number of tokens the first is the default."""


class Kernel(NamedTuple):
    """The arguments of a kernel, in order."""

    pointers: tuple[str, ...]
    views: tuple[str, ...]
    numbers: tuple[str, ...]
    """The factors, which begin with by_ or into_, are doubles, all others are whole."""


_GATE = ("gate0", "gate1", "gate2")
_TIME = ("n1", "n2", "T", "count")
KERNELS: dict[str, Kernel] = {
    "clock": Kernel(
        ("log_decay", "mask", "starts", "high", "low", "era", "chunks"),
        ("log_decay", "mask", "starts", "out"),
        (*_TIME, "batch"),
    ),
    "state": Kernel(
        ("y", "z", "borders", "initial", "final", "through", *_GATE, "chunks", "parts"),
        ("y", "z", "borders", "initial", "final", "through", "gate"),
        (*_TIME, "part_count", "into_state", "D", "DZ", "POWER", "DECAY", "STRICT", "REVERSE"),
    ),
    "chain": Kernel(
        (
            *("x", "y", "z", "w", "r", "o", "borders", "borders2", "initial", "initial2", "final", "final2"),
            *("through", *_GATE, "chunks", "parts"),
        ),
        (
            *("x", "y", "z", "w", "r", "o", "borders", "borders2", "initial", "initial2", "final", "final2"),
            *("through", "gate"),
        ),
        (
            *(*_TIME, "part_count", "by_state", "by_pair", "into_state", "into_state2", "by_pair2"),
            *("D", "DW", "DZ", "POWER", "POWER2", "DECAY", "STRICT", "REVERSE"),
        ),
    ),
    "carry": Kernel(
        ("total", "through", "initial", "before", "final"),
        ("total", "through", "initial", "before", "final"),
        ("n1", "n2", "part_count", "D", "DZ", "REVERSE"),
    ),
    "read": Kernel(
        ("x", "y", "z", "state", "x2", "y2", "z2", "state2", "r", *_GATE, "chunks"),
        ("x", "y", "z", "state", "x2", "y2", "z2", "state2", "r", "gate"),
        (
            *(*_TIME, "by_state", "by_pair", "by_state2", "by_pair2", "D", "D2", "DZ"),
            *("POWER", "POWER2", "DECAY", "STRICT", "REVERSE", "PER_CHUNK", "ADD"),
        ),
    ),
    "rate": Kernel(
        ("x", "y", "z", "d", "state", "after", "result", *_GATE, "chunks"),
        ("x", "y", "z", "d", "state", "after", "result", "gate"),
        (*_TIME, "by_pair", "by_left", "by_right", "by_span", "D", "DZ", "POWER", "DECAY", "STRICT", "ADD"),
    ),
}
"""All but `token`, whose tables depend on how many states there are."""


def name(kernel: str, kind: str, chunk: int, columns: int) -> str:
    """An instance of a kernel's template, for accumulators of the type "float" or "double"."""
    return f"hla::{kernel}<{', '.join([kind, *(str(n) for n in (chunk, columns) if n)])}>"


def macros(kernel: str, arguments: dict[str, Any]) -> tuple[tuple[str, int], ...]:
    """Macros that the kernel is compiled with."""
    if kernel != "token":
        return ()
    return (
        ("STATES", len(arguments["after"])),
        ("LINES", len(arguments["LINES"])),
        ("STREAMS", len(arguments["WIDTHS"])),
    )


def grid(kernel: str, arguments: dict[str, Any], columns: int) -> int:
    """The number of blocks, all on axis x; `arguments["batch"]` is that of batch entries."""
    a, batch = arguments, int(arguments["batch"])
    if kernel == "clock":
        return -(-batch * int(a["count"]) // (THREADS // int(a["C"])))
    if kernel == "carry":
        return batch * -(-int(a["D"]) * int(a["DZ"]) // THREADS)
    if kernel == "token":
        return batch * int(a["part_count"])
    if kernel == "rate":
        return batch * int(a["count"])
    across = -(-int(a["DZ"]) // columns)
    if kernel == "read":
        return batch * int(a["count"]) * across
    across *= -(-int(a["D"]) // ROWS) if kernel == "state" else 1
    return batch * int(a["part_count"]) * across


def shared_bytes(kernel: str, kind: str, chunk: int, columns: int, arguments: dict[str, Any]) -> int:
    """Bytes of shared memory that a block takes, all of them dynamic."""
    size, stride = BYTES[kind], chunk + PAD
    if kernel == "carry":
        return 0
    if kernel == "clock":
        return THREADS * (2 * size + 4)
    if kernel == "token":
        widths = arguments["WIDTHS"]
        tables = -(-(16 * len(arguments["after"]) + 4 * len(widths)) // 16) * 16
        return tables + size * (4 * THREADS + sum(-(-int(n) // 4) * 4 for n in widths))
    clock = size * (8 * chunk + 4) + 12 * chunk
    if kernel == "state":
        return clock + size * chunk * (ROWS + PAD + columns)
    if kernel == "chain":
        scratch = max(2 * SLAB * stride, chunk * stride, chunk * (ROWS + PAD))
        states = (int(arguments["D"]) + int(arguments["DW"])) * columns
        return clock + size * (chunk + chunk * columns + scratch + states)
    if kernel == "read":
        pairs, rows = max(2 * SLAB, chunk) * stride, max(chunk * columns, SLAB * (columns + PAD))
        return clock + size * (chunk + pairs + rows)
    assert kernel == "rate"
    slabs = 2 * SLAB * (stride + columns + PAD)
    scratch = max(slabs, 2 * columns * stride, chunk * (chunk + 1))
    return clock + size * (2 * chunk + THREADS // 32 + scratch)


def pack(kernel: str, arguments: dict[str, Any]) -> list[Any]:
    """The arguments of a launch: arrays or None for the pointers, and a structured array of one element."""
    if kernel == "token":
        return _pack_token(arguments)
    table, a = KERNELS[kernel], dict(arguments)
    gate = a.get("gate")
    if "gate" in table.views:
        a["gate0"], a["gate1"], a["gate2"] = gate if isinstance(gate, tuple) else (gate, None, None)
        a["gate"] = a["gate0"]
    elif kernel == "clock":
        a["out"] = a["high"]
    values: list[float] = []
    for view in table.views:
        values += _view(a.get(view), a.get(f"s_{view}"))
    values += [float(a[x]) if _factor(x) else int(a[x]) for x in table.numbers]
    return [*(a.get(x) for x in table.pointers), _structured(_layout(kernel), values)]


def _pack_token(a: dict[str, Any]) -> list[Any]:
    before, after, widths = a["before"], a["after"], a["WIDTHS"]
    streams = (*a["streams"][:3], a["output"], a["log_decay"], a["mask"], a["starts"])
    strides = (*a["s_streams"][:3], a["s_output"], a["s_log_decay"], a["s_mask"], a["s_starts"])
    values: list[float] = []
    for x, steps in zip((*streams, *before, *after), (*strides, *a["s_before"], *a["s_after"]), strict=True):
        values += _view(x, steps)
    values += [int(a[x]) for x in ("n1", "n2", "T", "part_count")]
    values += [float(x) for x in a["factors"]]
    values += _spread(a["OUTPUT"], a["weights"], len(widths))
    values += _spread(a["MASSES"], a["masses"], len(widths))
    values += [float(a["eps"]), _bits(a["OUTPUT"]), _bits(a["MASSES"])]
    values += [sum(int(n) + 1 << 8 * i for i, n in enumerate(line)) for line in a["LINES"]]
    values += [int(n) for n in widths]
    values.append(int(a["DV"]))
    counts = (len(after), len(a["LINES"]), len(widths))
    return [*streams, a.get("bounds"), *before, *after, _structured(_token_layout(*counts), values)]


def argument_bytes(kernel: str, arguments: dict[str, Any]) -> int:
    """Bytes of all arguments together; a GPU takes MOST_BYTES of them."""
    packed = pack(kernel, arguments)
    return 8 * (len(packed) - 1) + int(packed[-1].dtype.itemsize)


def takes(states: int, lines: int, streams: int) -> bool:
    """Whether `token` takes a program of that size."""
    pointers, layout = 8 + 2 * states, _token_layout(states, lines, streams)
    return states <= 32 and streams <= 63 and 8 * pointers + layout.dtype.itemsize <= MOST_BYTES


class Layout(NamedTuple):
    """Of a struct."""

    code: struct.Struct
    dtype: np.dtype[np.void]


@cache
def _layout(kernel: str) -> Layout:
    """Of the struct of a kernel."""
    table = KERNELS[kernel]
    views = [f"{view}.{part}" for view in table.views for part in _VIEW]
    return _struct([(x, "q") for x in views] + [(x, "d" if _factor(x) else "q") for x in table.numbers])


@cache
def _token_layout(states: int, lines: int, streams: int) -> Layout:
    views = ["q", "k", "v", "output", "log_decay", "mask", "starts"]
    views += [f"before{i}" for i in range(states)] + [f"after{i}" for i in range(states)]
    fields = [(f"{view}.{part}", "q") for view in views for part in _VIEW]
    fields += [(x, "q") for x in ("n1", "n2", "T", "part_count")]
    fields += [(f"{x}{i}", "d") for x in ("factor", "weight", "mass") for i in range(streams)]
    fields += [("eps", "d"), ("outputs", "q"), ("denominators", "q")]
    fields += [(f"line{i}", "q") for i in range(lines)] + [(f"width{i}", "q") for i in range(streams)]
    return _struct([*fields, ("DV", "q")])


_VIEW = ("b0", "b1", "b2", "s0", "s1", "s2", "type")


def _factor(number: str) -> bool:
    return number.startswith(("by_", "into_"))


def _struct(fields: list[tuple[str, str]]) -> Layout:
    codes = {"q": "<i8", "d": "<f8"}
    dtype = np.dtype([(field, codes[code]) for field, code in fields])
    return Layout(struct.Struct("<" + "".join(code for _, code in fields)), dtype)


def _structured(layout: Layout, values: Sequence[float]) -> np.ndarray[Any, np.dtype[np.void]]:
    return np.frombuffer(layout.code.pack(*values), layout.dtype).reshape(())


_NOTHING = (0,) * 7


def _view(x: Array | None, strides: Sequence[int] | None) -> tuple[int, ...]:
    if x is None or strides is None:
        return _NOTHING
    return (*strides, *(0,) * (6 - len(strides)), _type(x.dtype))


@cache
def _type(dtype: np.dtype[Any]) -> int:
    return TYPES[dtype.name]


def _spread(streams: Sequence[int], weights: Sequence[float], count: int) -> list[float]:
    """The weight of every stream."""
    found = [0.0] * count
    for stream, weight in zip(streams, weights, strict=True):
        found[stream] += float(weight)
    return found


def _bits(streams: Sequence[int]) -> int:
    return sum(1 << stream for stream in set(streams))

"""The kernels as functions of tensors: outputs allocated, views laid, blocks chosen."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from hla.arrays import broadcast_shapes
from hla.backends.triton.kernels.carry import carry as _carry
from hla.backends.triton.kernels.chain import chain as _chain
from hla.backends.triton.kernels.clock import clock as _clock
from hla.backends.triton.kernels.rate import rate as _rate
from hla.backends.triton.kernels.read import read as _read
from hla.backends.triton.launch import Config, Kernel
from hla.backends.triton.timeline import Timeline, in_parts
from hla.backends.triton.views import Grid, arrange

_DOT = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
Batch = tuple[int, ...]


def padded(width: int) -> int:
    """A block that holds a width: a power of two, at least 16, as products of tiles need."""
    return max(16, 1 << (width - 1).bit_length())


def _bytes(arguments: dict[str, Any]) -> int:
    return 4 if arguments["DOT"] == tl.float32 else 2


def _chain_shared(a: dict[str, Any], c: Config) -> int:
    """The tiles of a chunk, for every stage of the pipeline, and the states as operands."""
    columns = c.blocks["BZ"]
    held = (max(a["BD"], a["BW"]) + a["C"]) * columns + a["C"] * a["C"]
    tiles = 0
    if c.stages > 1 and not _scalar(a):
        rows = (a["x"] is not None) + (a["y"] is not None) * (2 if a["DECAY"] == 2 else 1)
        tiles = a["C"] * (a["BD"] * rows + a["BW"] * (a["w"] is not None) + columns) * c.stages
    return int((tiles + held) * _bytes(a))


def _read_shared(a: dict[str, Any], c: Config) -> int:
    block, columns = max(a["BK"], a["BK2"]), c.blocks["BZ"]
    return int((2 * a["C"] * block + block * columns + a["C"] * (columns + a["C"])) * _bytes(a))


def _rate_shared(a: dict[str, Any], c: Config) -> int:
    columns = c.blocks["BZ"]
    return int((a["C"] * (2 * a["BD"] + 2 * columns) + 2 * a["BD"] * columns) * _bytes(a))


def _useful(a: dict[str, Any], c: Config) -> bool:
    """Blocks no wider than the matrix; without tensor cores small ones, shared by many threads."""
    if c.blocks["BZ"] > padded(a["DZ"]):
        return False
    if not _scalar(a):
        return True
    most = 16 if a.get("x2") is not None or "d" in a else 32  # two terms, or a rate: more to hold
    return c.blocks["BZ"] <= most and c.warps == 8 and c.stages == 1


def _scalar(a: dict[str, Any]) -> bool:
    """Whether products run without tensor cores."""
    return bool(a["DOT"] == tl.float32 and a["PRECISION"] == "ieee")


CHAIN = Kernel(
    _chain,
    [
        Config({"BZ": 16}, 8, 2),
        Config({"BZ": 32}, 4, 2),
        Config({"BZ": 32}, 8, 2),
        Config({"BZ": 64}, 8, 2),
        Config({"BZ": 16}, 4, 2),
        Config({"BZ": 32}, 8, 1),
        Config({"BZ": 16}, 8, 1),
    ],
    ("D", "DW", "DZ", "DOT", "C"),
    ("BD", "BW", "x", "y", "w", "DECAY", "PRECISION"),
    shared=_chain_shared,
    useful=_useful,
)
READ = Kernel(
    _read,
    [
        Config({"BZ": 64}, 4, 2),
        Config({"BZ": 64}, 8, 2),
        Config({"BZ": 128}, 8, 2),
        Config({"BZ": 64}, 4, 3),
        Config({"BZ": 32}, 8, 2),
        Config({"BZ": 32}, 8, 1),
        Config({"BZ": 32}, 4, 2),
        Config({"BZ": 16}, 8, 1),
        Config({"BZ": 16}, 4, 1),
    ],
    ("D", "D2", "DZ", "DOT", "C"),
    ("BK", "BK2", "x2", "PRECISION"),
    shared=_read_shared,
    useful=_useful,
    writes=("r",),
)
RATE = Kernel(
    _rate,
    [Config({"BZ": 32}, 8, 1), Config({"BZ": 64}, 8, 1), Config({"BZ": 16}, 8, 1), Config({"BZ": 16}, 4, 1)],
    ("D", "DZ", "DOT", "C"),
    ("BD", "PRECISION"),
    shared=_rate_shared,
    useful=_useful,
    writes=("result",),
)
CLOCK = Kernel(_clock, [Config({}, 4, 1)])
CARRY = Kernel(_carry, [Config({"BD": 16, "BZ": 64}, 4, 1)])


class Stream(NamedTuple):
    """A stream as it lies in memory, (*batch, T, width), and the number that multiplies it."""

    tensor: Tensor
    factor: float = 1.0

    @property
    def width(self) -> int:
        """Its last axis."""
        return int(self.tensor.shape[-1])


class Gate(NamedTuple):
    """Decay, masks and boundaries of the tokens."""

    kind: int
    """DECAY of `hla.backends.triton.kernels.decay`"""
    tensors: tuple[Tensor, ...] = ()
    """kind 1: log-decays (*b, 1, 1); kind 2: the arrays of the clock, each (*b, T)"""

    @property
    def batch(self) -> Batch:
        """The batch axes over which it varies."""
        return tuple(self.tensors[0].shape[: -2 if self.kind == 1 else -1]) if self.tensors else ()


@dataclass(frozen=True)
class Setting:
    """What all launches of a call share."""

    timeline: Timeline
    gate: Gate
    dtype: torch.dtype
    """of the operands of products, and of what is kept between launches"""
    precision: str
    """of these products: "ieee", or "tf32" for float16 inputs, which it holds exactly"""

    @property
    def scalar(self) -> bool:
        """Whether products run without tensor cores."""
        return self.dtype == torch.float32 and self.precision == "ieee"

    def common(self) -> dict[str, Any]:
        """Arguments by these names."""
        return {
            "chunks": self.timeline.chunks,
            "T": self.timeline.length,
            "TABLE": self.timeline.chunks is not None,
            "C": self.timeline.size,
        }

    def products(self) -> dict[str, Any]:
        """Arguments of kernels that multiply."""
        return {**self.common(), "DOT": _DOT[self.dtype], "PRECISION": self.precision, "DECAY": self.gate.kind}


class State(NamedTuple):
    """A state X = Σ y zᵀ of width (y, z), and how it runs."""

    y: Stream | None
    z: Stream | None
    sizes: tuple[int, int]
    power: int
    batch: Batch
    initial: Tensor | None = None
    """(*b, parts, y, z)"""
    reverse: bool = False
    strict: bool = False


class Found(NamedTuple):
    """A state that has run."""

    borders: Tensor | None
    """(*b, chunks, y, z): as it enters each chunk"""
    final: Tensor | None
    """(*b, parts, y, z), float32"""


class Term(NamedTuple):
    """A read, r = weight · (x·X + Σ (x·y) z), or one of the two whose sum r is."""

    x: Stream
    y: Stream | None
    z: Stream | None
    state: Tensor | None
    """X at the chunks' borders, (*b, chunks, x, r)"""
    power: int = 1
    weight: float = 1.0


def clock(setting: Setting, log_decay: Tensor | None, mask: Tensor | None, starts: Tensor | None) -> Gate:
    """The clock arrays of log-decays (*b, T, 1) or (*b, 1, 1), a mask (*b, T, 1) and starts (*b, T, 1)."""
    given = [x for x in (log_decay, mask, starts) if x is not None]
    batch = broadcast_shapes(*(tuple(x.shape[:-2]) for x in given))
    length = setting.timeline.length
    high, low = (given[0].new_empty((*batch, length), dtype=torch.float32) for _ in range(2))
    era = given[0].new_empty((*batch, length), dtype=torch.int32)

    def column(x: Tensor | None) -> tuple[Tensor, int] | None:
        if x is None:
            return None
        x = x.view(torch.uint8) if x.dtype == torch.bool else x
        return x[..., 0].expand(*x.shape[:-2], length), 1

    grid = arrange(
        batch,
        {"log_decay": column(log_decay), "mask": column(mask), "starts": column(starts), "out": (high, 1)},
    )
    arguments = _arguments(grid, ("log_decay", "mask", "starts"))
    arguments |= {"high": high, "low": low, "era": era, "s_out": _strides(grid, "out")}
    arguments |= {"count": setting.timeline.count, **setting.common()}
    CLOCK(lambda _: grid.batch * setting.timeline.count, arguments, high)
    return Gate(2, (high, low, era))


def run_state(setting: Setting, state: State, *, borders: bool, final: bool, like: Tensor) -> Found:
    """A state over all chunks."""
    parts = setting.timeline.parts
    cut = pieces(setting, state.batch, state.sizes[1])
    if cut > 1:
        return _run_in_parts(setting, state, cut, borders=borders, final=final, like=like)
    kept = new_borders(setting, state.batch, state.sizes, like) if borders else None
    last = new_final(state.batch, parts, state.sizes, like) if final else None
    _launch_chain(setting, state, kept, last, like)
    return Found(kept, last)


def new_borders(setting: Setting, batch: Batch, sizes: tuple[int, int], like: Tensor) -> Tensor:
    """Room for a state as it enters each chunk."""
    return like.new_empty((*batch, setting.timeline.count, *sizes), dtype=setting.dtype)


def new_final(batch: Batch, parts: int, sizes: tuple[int, int], like: Tensor) -> Tensor:
    """Room for a state at the end of each part; its axis lies first, as callers get it."""
    return like.new_empty((parts, *batch, *sizes), dtype=torch.float32).movedim(0, -3)


def _launch_chain(
    setting: Setting,
    state: State,
    borders: Tensor | None,
    final: Tensor | None,
    like: Tensor,
    through: Tensor | None = None,
    second: dict[str, Any] | None = None,
) -> None:
    second = second or {}
    rows, columns = state.sizes
    wide = second.get("DW", 1)
    tensors: dict[str, tuple[Tensor, int] | None] = {
        "x": _own(second.get("x"), 2),
        "y": _own(state.y, 2),
        "z": _own(state.z, 2),
        "w": _own(second.get("w"), 2),
        "r": _own(second.get("r"), 2),
        "o": _own(second.get("o"), 2),
        "borders": _own(borders, 3),
        "borders2": _own(second.get("borders2"), 3),
        "initial": _own(state.initial, 3),
        "initial2": _own(second.get("initial2"), 3),
        "final": _own(final, 3),
        "final2": _own(second.get("final2"), 3),
        "through": _own(through, 1),
        "gate": _gate_tensor(setting.gate),
    }
    grid = arrange(state.batch, tensors)
    arguments = _arguments(grid, [name for name in tensors if name != "gate"])
    arguments |= _gate_arguments(setting.gate, grid)
    timeline = setting.timeline
    into = (1.0 if state.y is None else state.y.factor) * (1.0 if state.z is None else state.z.factor)
    arguments |= {
        "count": timeline.count,
        "parts": timeline.borders,
        "part_count": timeline.parts,
        "by_state": second.get("by_state", 1.0),
        "by_pair": second.get("by_pair", 1.0),
        "into_state": into,
        "into_state2": second.get("into_state2", 1.0),
        "by_pair2": second.get("by_pair2", 1.0),
        "D": rows,
        "DW": wide,
        "DZ": columns,
        "BD": padded(rows),
        "BW": padded(wide),
        "POWER": state.power,
        "POWER2": second.get("power2", 1),
        "STRICT": state.strict,
        "REVERSE": state.reverse,
        **setting.products(),
    }
    CHAIN(lambda meta: grid.batch * timeline.parts * -(-columns // meta["BZ"]), arguments, like)


class Chained(NamedTuple):
    """What a chain leaves."""

    first: Found
    result: Tensor | None
    second: Found
    output: Tensor | None


def run_chain(
    setting: Setting,
    state: State,
    x: Stream,
    w: Stream,
    power2: int,
    *,
    initial2: Tensor | None,
    keep: tuple[bool, bool],
    final: tuple[bool, bool],
    result: bool,
    output: torch.dtype | None,
    like: Tensor,
) -> Chained:
    """A state, its read by x, and the second state Σ w rᵀ, all (*state.batch). `output`: also x's read of the second
    state, in that dtype; then w is y."""
    assert state.y is not None
    assert state.z is not None
    timeline, batch = setting.timeline, state.batch
    columns, sizes2 = state.sizes[1], (w.width, state.sizes[1])
    first = Found(
        new_borders(setting, batch, state.sizes, like) if keep[0] else None,
        new_final(batch, timeline.parts, state.sizes, like) if final[0] else None,
    )
    second = Found(
        new_borders(setting, batch, sizes2, like) if keep[1] else None,
        new_final(batch, timeline.parts, sizes2, like) if final[1] else None,
    )
    shape = (*batch, timeline.length, columns)
    r = like.new_empty(shape, dtype=setting.dtype) if result else None
    o = None if output is None else like.new_empty(shape, dtype=output)
    more = {
        "x": x,
        "w": w,
        "r": r,
        "o": o,
        "borders2": second.borders,
        "final2": second.final,
        "initial2": initial2,
        "by_state": x.factor,
        "by_pair": x.factor * state.y.factor * state.z.factor,
        "by_pair2": x.factor * w.factor,
        "into_state2": w.factor,
        "DW": w.width,
        "power2": power2,
    }
    _launch_chain(setting, state, first.borders, first.final, like, second=more)
    return Chained(first, r, second, o)


WIDE_ENOUGH = 128
"""Programs that keep a GPU busy."""


def pieces(setting: Setting, batch: Batch, width: int) -> int:
    """Into how many parts one sequence is cut, so that few heads keep a GPU busy."""
    timeline = setting.timeline
    if timeline.borders is not None or timeline.count < 2 * FEWEST_CHUNKS:
        return 1
    programs = math.prod(batch) * -(-width // 32)
    return max(1, min(WIDE_ENOUGH // max(programs, 1), timeline.count // FEWEST_CHUNKS))


def is_long(setting: Setting, batch: Batch, width: int) -> bool:
    """Whether a state of that width is run in parts."""
    return pieces(setting, batch, width) > 1


FEWEST_CHUNKS = 16
"""In a part, so that its own start costs little."""


def _run_in_parts(setting: Setting, state: State, cut_in: int, *, borders: bool, final: bool, like: Tensor) -> Found:
    """Totals of the parts, what precedes each of them, and then the parts side by side."""
    cut = replace(setting, timeline=in_parts(setting.timeline, cut_in))
    parts = cut.timeline.parts
    totals = new_final(state.batch, parts, state.sizes, like)
    through = like.new_empty((*state.batch, parts), dtype=torch.float32)
    _launch_chain(cut, state._replace(initial=None), None, totals, like, through)
    before = like.new_empty((*state.batch, parts, *state.sizes), dtype=torch.float32)
    last = new_final(state.batch, 1, state.sizes, like) if final else None
    tensors: dict[str, tuple[Tensor, int] | None] = {
        "total": (totals, 3),
        "through": (through, 1),
        "initial": _own(state.initial, 3),
        "before": (before, 3),
        "final": _own(last, 3),
    }
    grid = arrange(state.batch, tensors)
    rows, columns = state.sizes
    arguments = _arguments(grid, list(tensors))
    arguments |= {"part_count": parts, "D": rows, "DZ": columns, "REVERSE": state.reverse}
    CARRY(lambda meta: grid.batch * -(-rows // meta["BD"]) * -(-columns // meta["BZ"]), arguments, like)
    kept = None
    if borders:
        kept = new_borders(setting, state.batch, state.sizes, like)
        _launch_chain(cut, state._replace(initial=before), kept, None, like)
    return Found(kept, last)


def run_read(
    setting: Setting,
    terms: list[Term],
    batch: Batch,
    dtype: torch.dtype,
    *,
    reverse: bool = False,
    strict: bool = False,
    per_chunk: bool = True,
    into: Tensor | None = None,
) -> Tensor:
    """The sum of terms, (*batch, T, width), two at a time; added to `into` where that is given."""
    like = terms[0].x.tensor
    assert terms[0].state is not None or terms[0].z is not None
    width = int(terms[0].state.shape[-1]) if terms[0].state is not None else terms[0].z.width  # type: ignore[union-attr]
    timeline, widest = setting.timeline, 32 if setting.scalar else 64
    several = into is not None or len(terms) > 2
    add = into is not None
    if into is None:
        kind = torch.float32 if several else dtype
        into = like.new_empty((*batch, timeline.length, width), dtype=kind)
    for i in range(0, len(terms), 2):
        pair = terms[i : i + 2]
        a, b = pair[0], pair[1] if len(pair) > 1 else None
        tensors: dict[str, tuple[Tensor, int] | None] = {
            "x": (a.x.tensor, 2),
            "y": _own(a.y, 2),
            "z": _own(a.z, 2),
            "state": _own(a.state, 3),
            "x2": None if b is None else (b.x.tensor, 2),
            "y2": None if b is None else _own(b.y, 2),
            "z2": None if b is None else _own(b.z, 2),
            "state2": None if b is None else _own(b.state, 3),
            "r": (into, 2),
            "gate": _gate_tensor(setting.gate),
        }
        grid = arrange(batch, tensors)
        arguments = _arguments(grid, [name for name in tensors if name != "gate"])
        arguments |= _gate_arguments(setting.gate, grid)
        other = a if b is None else b
        arguments |= {
            "count": timeline.count,
            "by_state": a.weight * a.x.factor,
            "by_pair": _pair_factor(a),
            "by_state2": other.weight * other.x.factor,
            "by_pair2": _pair_factor(other),
            "D": a.x.width,
            "D2": other.x.width,
            "DZ": width,
            "BK": min(widest, padded(a.x.width)),
            "BK2": min(widest, padded(other.x.width)),
            "POWER": a.power,
            "POWER2": other.power,
            "STRICT": strict,
            "REVERSE": reverse,
            "PER_CHUNK": per_chunk,
            "ADD": add,
            **setting.products(),
        }
        _launch_read(grid, timeline, width, arguments, like)
        add = True
    return into


def _launch_read(grid: Grid, timeline: Timeline, width: int, arguments: dict[str, Any], like: Tensor) -> None:
    READ(lambda meta: grid.batch * timeline.count * -(-width // meta["BZ"]), arguments, like)


def _pair_factor(term: Term) -> float:
    y, z = term.y, term.z
    return term.weight * term.x.factor * (1.0 if y is None else y.factor) * (1.0 if z is None else z.factor)


def run_rate(
    setting: Setting,
    streams: tuple[Stream, Stream, Stream, Stream | None],
    states: tuple[Tensor, Tensor],
    power: int,
    strict: bool,
    batch: Batch,
    into: Tensor | None,
) -> Tensor:
    """d log γ (*batch, T) through one read: streams (x, y, z, d), states as they enter, their cotangents as they leave
    each chunk; added to `into`."""
    x, y, z, d = streams
    add = into is not None
    timeline = setting.timeline
    if into is None:
        into = y.tensor.new_empty((*batch, timeline.length), dtype=torch.float32)
    tensors: dict[str, tuple[Tensor, int] | None] = {
        "x": _own(x, 2),
        "y": _own(y, 2),
        "z": _own(z, 2),
        "d": _own(d, 2),
        "state": (states[0], 3),
        "after": (states[1], 3),
        "result": (into, 1),
        "gate": _gate_tensor(setting.gate),
    }
    grid = arrange(batch, tensors)
    arguments = _arguments(grid, [name for name in tensors if name != "gate"])
    arguments |= _gate_arguments(setting.gate, grid)
    read = x.factor * (1.0 if d is None else d.factor)
    arguments |= {
        "count": timeline.count,
        "by_pair": read * y.factor * z.factor,
        "by_left": read,
        "by_right": y.factor * z.factor,
        "by_span": 1.0,
        "D": y.width,
        "DZ": z.width,
        "BD": padded(y.width),
        "POWER": power,
        "STRICT": strict,
        "ADD": add,
        **setting.products(),
    }
    RATE(lambda _: grid.batch * timeline.count, arguments, y.tensor)
    return into


def _own(x: Stream | Tensor | None, axes: int) -> tuple[Tensor, int] | None:
    if x is None:
        return None
    return (x.tensor if isinstance(x, Stream) else x), axes


def _gate_tensor(gate: Gate) -> tuple[Tensor, int] | None:
    return (gate.tensors[0], 2 if gate.kind == 1 else 1) if gate.tensors else None


def _gate_arguments(gate: Gate, grid: Grid) -> dict[str, Any]:
    view = grid.views["gate"]
    if view is None:
        return {"gate": None, "s_gate": (0, 0, 0)}
    tensors = gate.tensors
    if view.tensor is not tensors[0]:  # copied, so that the batch fits on three axes
        batch = view.tensor.shape[: -2 if gate.kind == 1 else -1]
        tensors = (view.tensor, *(x.expand(*batch, x.shape[-1]).contiguous() for x in tensors[1:]))
    return {"gate": tensors[0] if gate.kind == 1 else tensors, "s_gate": view.strides[:3]}


def _strides(grid: Grid, name: str) -> tuple[int, ...]:
    view = grid.views[name]
    return (0,) if view is None else view.strides


def _arguments(grid: Grid, names: Any) -> dict[str, Any]:
    """Pointers and strides of views, and the batch's axes."""
    found: dict[str, Any] = {"n1": grid.sizes[1], "n2": grid.sizes[2]}
    for name in names:
        view = grid.views[name]
        found[name] = None if view is None else view.tensor
        found[f"s_{name}"] = _strides(grid, name)
    return found

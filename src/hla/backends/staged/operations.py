"""The kernels as functions of arrays: outputs allocated, views laid."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from hla.arrays import Array, DType, Namespace, broadcast_shapes, moveaxis, transpose
from hla.backends.staged.engine import Arithmetic, Engine
from hla.backends.staged.timeline import Timeline, in_parts
from hla.backends.staged.views import Grid, arrange

Batch = tuple[int, ...]


class Stream(NamedTuple):
    """A stream as it lies in memory, (*batch, T, width), and the number that multiplies it."""

    tensor: Array
    factor: float = 1.0

    @property
    def width(self) -> int:
        """Its last axis."""
        return int(self.tensor.shape[-1])


class Gate(NamedTuple):
    """Decay, masks and boundaries of the tokens."""

    kind: int
    """DECAY of `hla.backends.triton.kernels.decay`"""
    tensors: tuple[Array, ...] = ()
    """kind 1: log-decays (*b, 1, 1); kind 2: the arrays of the clock, each (*b, T)"""

    @property
    def batch(self) -> Batch:
        """The batch axes over which it varies."""
        return tuple(self.tensors[0].shape[: -2 if self.kind == 1 else -1]) if self.tensors else ()


@dataclass(frozen=True)
class Setting:
    """What all launches of a call share."""

    engine: Engine
    timeline: Timeline
    gate: Gate
    arithmetic: Arithmetic

    @property
    def xp(self) -> Namespace:
        """The arrays' namespace."""
        return self.engine.xp

    @property
    def dtype(self) -> DType:
        """Of the operands of products, and of what is kept between launches."""
        return self.arithmetic.operands

    @property
    def sums(self) -> DType:
        """Of accumulators and states."""
        return self.arithmetic.sums

    def common(self) -> dict[str, Any]:
        """Arguments by these names."""
        timeline = self.timeline
        return {"chunks": timeline.chunks, "T": timeline.length, "count": timeline.count, "C": timeline.size}

    def launch(self, kernel: str, grid: Grid, arguments: dict[str, Any], like: Array) -> None:
        """Launch a kernel for all entries of a batch."""
        self.engine.launch(kernel, grid.batch, arguments, self.arithmetic, like)


class State(NamedTuple):
    """A state X = Σ y zᵀ of width (y, z), and how it runs."""

    y: Stream | None
    z: Stream | None
    sizes: tuple[int, int]
    power: int
    batch: Batch
    initial: Array | None = None
    """(*b, parts, y, z)"""
    reverse: bool = False
    strict: bool = False


class Found(NamedTuple):
    """A state that has run."""

    borders: Array | None
    """(*b, chunks, y, z): as it enters each chunk"""
    final: Array | None
    """(*b, parts, y, z), in the dtype of sums"""

    def turned(self, xp: Namespace) -> Found:
        """That of the transposed state."""
        return Found(*(None if x is None else transpose(xp, x) for x in self))


class Term(NamedTuple):
    """A read, r = weight · (x·X + Σ (x·y) z), or one of the two whose sum r is."""

    x: Stream
    y: Stream | None
    z: Stream | None
    state: Array | None
    """X at the chunks' borders, (*b, chunks, x, r)"""
    power: int = 1
    weight: float = 1.0


def clock(setting: Setting, log_decay: Array | None, mask: Array | None, starts: Array | None) -> Gate:
    """The clock arrays of log-decays (*b, T, 1) or (*b, 1, 1), a mask (*b, T, 1) and starts (*b, T, 1)."""
    given = [x for x in (log_decay, mask, starts) if x is not None]
    batch = broadcast_shapes(*(tuple(x.shape[:-2]) for x in given))
    engine, length = setting.engine, setting.timeline.length
    high, low = (engine.empty(given[0], (*batch, length), setting.sums) for _ in range(2))
    era = engine.empty(given[0], (*batch, length), setting.xp.int32)
    tensors = {
        "log_decay": column(setting.xp, log_decay, length),
        "mask": column(setting.xp, mask, length),
        "starts": column(setting.xp, starts, length),
        "out": (high, 1),
    }
    grid = arrange(engine, batch, tensors)
    arguments = _arguments(grid, ("log_decay", "mask", "starts"))
    arguments |= {"high": high, "low": low, "era": era, "s_out": _strides(grid, "out"), **setting.common()}
    setting.launch("clock", grid, arguments, high)
    return Gate(2, (high, low, era))


def column(xp: Namespace, x: Array | None, length: int) -> tuple[Array, int] | None:
    """A number for each token, of (*b, T, 1) or (*b, 1, 1), with how many axes are its own."""
    return None if x is None else (xp.broadcast_to(x[..., 0], (*x.shape[:-2], length)), 1)


def run_state(setting: Setting, state: State, *, borders: bool, final: bool, like: Array) -> Found:
    """A state over all chunks."""
    parts = setting.timeline.parts
    cut = pieces(setting, state.batch, state.sizes[1])
    if cut > 1:
        return _run_in_parts(setting, state, cut, borders=borders, final=final, like=like)
    kept = new_borders(setting, state.batch, state.sizes, like) if borders else None
    last = new_final(setting, state.batch, parts, state.sizes, like) if final else None
    _launch_chain(setting, state, kept, last, like)
    return Found(kept, last)


def new_borders(setting: Setting, batch: Batch, sizes: tuple[int, int], like: Array) -> Array:
    """Room for a state as it enters each chunk."""
    return setting.engine.empty(like, (*batch, setting.timeline.count, *sizes), setting.dtype)


def new_final(setting: Setting, batch: Batch, parts: int, sizes: tuple[int, int], like: Array) -> Array:
    """Room for a state at the end of each part; its axis lies first, as callers get it."""
    return moveaxis(setting.xp, setting.engine.empty(like, (parts, *batch, *sizes), setting.sums), 0, -3)


def _launch_chain(
    setting: Setting,
    state: State,
    borders: Array | None,
    final: Array | None,
    like: Array,
    through: Array | None = None,
    second: dict[str, Any] | None = None,
) -> None:
    second = second or {}
    rows, columns = state.sizes
    wide = second.get("DW", 1)
    tensors: dict[str, tuple[Array, int] | None] = {
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
    grid = arrange(setting.engine, state.batch, tensors)
    arguments = _arguments(grid, [name for name in tensors if name != "gate"])
    arguments |= _gate_arguments(setting, grid)
    timeline = setting.timeline
    into = (1.0 if state.y is None else state.y.factor) * (1.0 if state.z is None else state.z.factor)
    arguments |= {
        **setting.common(),
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
        "POWER": state.power,
        "POWER2": second.get("power2", 1),
        "STRICT": state.strict,
        "REVERSE": state.reverse,
        "DECAY": setting.gate.kind,
    }
    setting.launch("chain", grid, arguments, like)


class Chained(NamedTuple):
    """What a chain leaves."""

    first: Found
    result: Array | None
    second: Found
    output: Array | None


def run_chain(
    setting: Setting,
    state: State,
    x: Stream,
    w: Stream,
    power2: int,
    *,
    initial2: Array | None,
    keep: tuple[bool, bool],
    final: tuple[bool, bool],
    result: bool,
    output: DType | None,
    like: Array,
) -> Chained:
    """A state, its read by x, and the second state Σ w rᵀ, all (*state.batch). `output`: also x's read of the second
    state, in that dtype; then w is y."""
    assert state.y is not None
    assert state.z is not None
    timeline, batch = setting.timeline, state.batch
    columns, sizes2 = state.sizes[1], (w.width, state.sizes[1])
    first = Found(
        new_borders(setting, batch, state.sizes, like) if keep[0] else None,
        new_final(setting, batch, timeline.parts, state.sizes, like) if final[0] else None,
    )
    second = Found(
        new_borders(setting, batch, sizes2, like) if keep[1] else None,
        new_final(setting, batch, timeline.parts, sizes2, like) if final[1] else None,
    )
    shape = (*batch, timeline.length, columns)
    r = setting.engine.empty(like, shape, setting.dtype) if result else None
    o = None if output is None else setting.engine.empty(like, shape, output)
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


def in_one_pass(setting: Setting, batch: Batch, rows: int, wide: int, columns: int, like: Array) -> bool:
    """Whether a state of (rows, columns) and one of (wide, columns) are run together: not where they run in parts."""
    if pieces(setting, batch, columns) > 1:
        return False
    return setting.engine.chains(setting.arithmetic, setting.timeline.size, rows, wide, columns, like)


FEWEST_CHUNKS = 16
"""In a part, so that its own start costs little."""


def _run_in_parts(setting: Setting, state: State, cut_in: int, *, borders: bool, final: bool, like: Array) -> Found:
    """Totals of the parts, what precedes each of them, and then the parts side by side."""
    cut = replace(setting, timeline=in_parts(setting.engine, setting.timeline, cut_in, setting.engine.place(like)))
    parts = cut.timeline.parts
    totals = new_final(setting, state.batch, parts, state.sizes, like)
    through = setting.engine.empty(like, (*state.batch, parts), setting.sums)
    _launch_chain(cut, state._replace(initial=None), None, totals, like, through)
    before = setting.engine.empty(like, (*state.batch, parts, *state.sizes), setting.sums)
    last = new_final(setting, state.batch, 1, state.sizes, like) if final else None
    tensors: dict[str, tuple[Array, int] | None] = {
        "total": (totals, 3),
        "through": (through, 1),
        "initial": _own(state.initial, 3),
        "before": (before, 3),
        "final": _own(last, 3),
    }
    grid = arrange(setting.engine, state.batch, tensors)
    rows, columns = state.sizes
    arguments = _arguments(grid, list(tensors))
    arguments |= {"part_count": parts, "D": rows, "DZ": columns, "REVERSE": state.reverse}
    cut.launch("carry", grid, arguments, like)
    kept = None
    if borders:
        kept = new_borders(setting, state.batch, state.sizes, like)
        _launch_chain(cut, state._replace(initial=before), kept, None, like)
    return Found(kept, last)


def run_read(
    setting: Setting,
    terms: list[Term],
    batch: Batch,
    dtype: DType,
    *,
    reverse: bool = False,
    strict: bool = False,
    per_chunk: bool = True,
    into: Array | None = None,
) -> Array:
    """The sum of terms, (*batch, T, width), two at a time; added to `into` where that is given."""
    like = terms[0].x.tensor
    assert terms[0].state is not None or terms[0].z is not None
    width = int(terms[0].state.shape[-1]) if terms[0].state is not None else terms[0].z.width  # type: ignore[union-attr]
    several = into is not None or len(terms) > 2
    add = into is not None
    if into is None:
        kind = setting.sums if several else dtype
        into = setting.engine.empty(like, (*batch, setting.timeline.length, width), kind)
    for i in range(0, len(terms), 2):
        pair = terms[i : i + 2]
        a, b = pair[0], pair[1] if len(pair) > 1 else None
        tensors: dict[str, tuple[Array, int] | None] = {
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
        grid = arrange(setting.engine, batch, tensors)
        arguments = _arguments(grid, [name for name in tensors if name != "gate"])
        arguments |= _gate_arguments(setting, grid)
        other = a if b is None else b
        arguments |= {
            **setting.common(),
            "by_state": a.weight * a.x.factor,
            "by_pair": _pair_factor(a),
            "by_state2": other.weight * other.x.factor,
            "by_pair2": _pair_factor(other),
            "D": a.x.width,
            "D2": other.x.width,
            "DZ": width,
            "POWER": a.power,
            "POWER2": other.power,
            "STRICT": strict,
            "REVERSE": reverse,
            "PER_CHUNK": per_chunk,
            "ADD": add,
            "DECAY": setting.gate.kind,
        }
        setting.launch("read", grid, arguments, like)
        add = True
    return into


def _pair_factor(term: Term) -> float:
    y, z = term.y, term.z
    return term.weight * term.x.factor * (1.0 if y is None else y.factor) * (1.0 if z is None else z.factor)


def run_rate(
    setting: Setting,
    streams: tuple[Stream, Stream, Stream, Stream | None],
    states: tuple[Array, Array],
    power: int,
    strict: bool,
    batch: Batch,
    into: Array | None,
) -> Array:
    """d log γ (*batch, T) through one read: streams (x, y, z, d), states as they enter, their cotangents as they leave
    each chunk; added to `into`."""
    x, y, z, d = streams
    add = into is not None
    if into is None:
        into = setting.engine.empty(y.tensor, (*batch, setting.timeline.length), setting.sums)
    tensors: dict[str, tuple[Array, int] | None] = {
        "x": _own(x, 2),
        "y": _own(y, 2),
        "z": _own(z, 2),
        "d": _own(d, 2),
        "state": (states[0], 3),
        "after": (states[1], 3),
        "result": (into, 1),
        "gate": _gate_tensor(setting.gate),
    }
    grid = arrange(setting.engine, batch, tensors)
    arguments = _arguments(grid, [name for name in tensors if name != "gate"])
    arguments |= _gate_arguments(setting, grid)
    read = x.factor * (1.0 if d is None else d.factor)
    arguments |= {
        **setting.common(),
        "by_pair": read * y.factor * z.factor,
        "by_left": read,
        "by_right": y.factor * z.factor,
        "by_span": 1.0,
        "D": y.width,
        "DZ": z.width,
        "POWER": power,
        "STRICT": strict,
        "ADD": add,
        "DECAY": setting.gate.kind,
    }
    setting.launch("rate", grid, arguments, y.tensor)
    return into


def _own(x: Stream | Array | None, axes: int) -> tuple[Array, int] | None:
    if x is None:
        return None
    return (x.tensor if isinstance(x, Stream) else x), axes


def _gate_tensor(gate: Gate) -> tuple[Array, int] | None:
    return (gate.tensors[0], 2 if gate.kind == 1 else 1) if gate.tensors else None


def _gate_arguments(setting: Setting, grid: Grid) -> dict[str, Any]:
    view, gate = grid.views["gate"], setting.gate
    if view is None:
        return {"gate": None, "s_gate": (0, 0, 0)}
    tensors = gate.tensors
    if view.tensor is not tensors[0]:  # copied, so that the batch fits on three axes
        batch = view.tensor.shape[: -2 if gate.kind == 1 else -1]
        broadcast = setting.xp.broadcast_to
        more = (setting.engine.dense(broadcast(x, (*batch, x.shape[-1]))) for x in tensors[1:])
        tensors = (view.tensor, *more)
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

"""Form "recurrent" and decode steps: all lines of a program, for every head, in one launch."""

from __future__ import annotations

from functools import cache
from typing import Any

from hla.arrays import Array, broadcast_shapes, device, moveaxis
from hla.backends.staged.engine import Engine
from hla.backends.staged.forward import final_state, inputs, natural, with_parts
from hla.backends.staged.operations import column
from hla.backends.staged.timeline import timeline
from hla.backends.staged.views import arrange
from hla.family import Program
from hla.problem import Problem, States
from hla.recurrent import lines as recurrence

NOTHING = -1


@cache
def encoded(program: Program) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
    """Streams by number, and the program's lines in the kernel's terms.

    Strict reads come first: they look at a state that another line moves on. What they ask with is there by then.
    """
    names = ["q", "k", "v", "one", *(read.result for read in program.reads)]
    symbols = [s.symbol for s in program.states]
    lines = recurrence(program)
    ordered = [line for line in lines if line[1] is not None and line[1].strict]
    ordered += [line for line in lines if line not in ordered]
    result: list[tuple[int, ...]] = []
    for state, read in ordered:
        moved = program.state(read.state) if state is None and read is not None else state
        assert moved is not None
        result.append(
            (
                names.index(moved.key),
                names.index(moved.value),
                NOTHING if state is None else symbols.index(state.symbol),
                moved.power,
                NOTHING if read is None else names.index(read.query),
                NOTHING if read is None else names.index(read.result),
                symbols.index(moved.symbol),
                int(read is not None and read.strict),
            )
        )
    return tuple(names), tuple(result)


def run(engine: Engine, problem: Problem) -> tuple[Array, States]:
    """Output and final states, token after token."""
    program, v = problem.program, problem.v
    shapes = natural(problem).shapes()
    names, lines = encoded(program)
    options = [x for x in (problem.log_decay, problem.token_mask, problem.starts) if x is not None]
    batch = broadcast_shapes(
        problem.output_batch(), *(shape[:-2] for shape in shapes.state.values()), *(x.shape[:-2] for x in options)
    )
    offsets = tuple(problem.cu_seqlens) if problem.cu_seqlens is not None else None
    cut = timeline(engine, problem.length, 16, offsets, device(v))
    output_batch = broadcast_shapes(*(shapes.batch[name] for name, _ in (*program.output, *program.denominator)))
    output = engine.empty(v, (*batch, problem.length, int(v.shape[-1])), v.dtype)
    arithmetic = engine.arithmetic(problem)

    given = inputs(engine, problem)
    given.setdefault("one", given["v"])
    streams = {name: x.tensor for name, x in given.items()}
    results = {read.result for read in program.reads}
    if engine.scratch:  # a place for one token of one sequence
        for name in results:
            streams[name] = engine.empty(v, (*batch, cut.parts, shapes.width[name]), arithmetic.sums)

    before: dict[str, Array | None] = {}
    after: dict[str, Array] = {}
    for state in program.states:
        start = with_parts(engine, problem, (problem.initial or {}).get(state.symbol))
        before[state.symbol] = start
        place = _in_place(engine, problem, start, (*batch, cut.parts, *shapes.state[state.symbol][-2:]))
        if place is None:
            place = engine.empty(v, (cut.parts, *batch, *shapes.state[state.symbol][-2:]), arithmetic.sums)
            place = moveaxis(engine.xp, place, 0, -3)
        after[state.symbol] = place

    tensors: dict[str, tuple[Array, int] | None] = {
        "output": (output, 2),
        "log_decay": column(engine.xp, problem.log_decay, problem.length),
        "mask": column(engine.xp, problem.token_mask, problem.length),
        "starts": column(engine.xp, problem.starts, problem.length),
    }
    tensors |= {f"stream {name}": (x, 2) for name, x in streams.items()}
    tensors |= {f"before {name}": None if x is None else (x, 3) for name, x in before.items()}
    tensors |= {f"after {name}": (x, 3) for name, x in after.items()}
    grid = arrange(engine, batch, tensors)

    def pointers(kind: str, of: tuple[str, ...]) -> tuple[tuple[Array | None, ...], tuple[tuple[int, ...], ...]]:
        views = [grid.views.get(f"{kind} {name}") for name in of]
        return (
            tuple(None if view is None else view.tensor for view in views),
            tuple((0,) if view is None else view.strides for view in views),
        )

    symbols = tuple(s.symbol for s in program.states)
    arguments: dict[str, Any] = {"n1": grid.sizes[1], "n2": grid.sizes[2]}
    for name in ("output", "log_decay", "mask", "starts"):
        view = grid.views[name]
        arguments[name] = None if view is None else view.tensor
        arguments[f"s_{name}"] = (0,) if view is None else view.strides
    arguments["streams"], arguments["s_streams"] = pointers("stream", names)
    arguments["before"], arguments["s_before"] = pointers("before", symbols)
    arguments["after"], arguments["s_after"] = pointers("after", symbols)
    arguments |= {
        "bounds": cut.tokens,
        "T": problem.length,
        "part_count": cut.parts,
        "factors": tuple(given[name].factor if name in given else 1.0 for name in names),
        "weights": tuple(problem.ridge if w is None else w for _, w in program.output),
        "masses": tuple(problem.ridge if w is None else w for _, w in program.denominator),
        "eps": problem.eps,
        "LINES": lines,
        "SCRATCH": tuple(name in results for name in names),
        "WIDTHS": tuple(shapes.width[name] for name in names),
        "OUTPUT": tuple(names.index(name) for name, _ in program.output),
        "MASSES": tuple(names.index(name) for name, _ in program.denominator),
        "DV": int(v.shape[-1]),
    }
    engine.launch("token", grid.batch, arguments, arithmetic, v)
    for symbol, x in after.items():
        view = grid.views[f"after {symbol}"]
        if view is not None and view.tensor is not x:
            engine.fill(x, view.tensor)
    finals: States = {}
    for symbol, x in after.items():
        own = _at(x, (*shapes.state[symbol][:-2], cut.parts), 2)
        finals[symbol] = final_state(engine, problem, own)
    return _at(output, output_batch, 2), finals


def _in_place(engine: Engine, problem: Problem, start: Array | None, shape: tuple[int, ...]) -> Array | None:
    """The given state's own memory, if the caller wants it overwritten and every head has its own."""
    if start is None or not problem.overwrite or tuple(start.shape) != shape or start.dtype != problem.dtype:
        return None
    spread = all(step != 0 or n == 1 for n, step in zip(start.shape, engine.strides(start), strict=True))
    return start if spread else None


def _at(x: Array, batch: tuple[int, ...], own: int) -> Array:
    """The first along every axis that `batch` lacks."""
    axes = x.ndim - own
    wanted = (*(1,) * (axes - len(batch)), *batch)
    for axis, n in enumerate(wanted):
        if n == 1 and x.shape[axis] != 1:
            x = x[(slice(None),) * axis + (slice(0, 1),)]
    return x[(0,) * (axes - len(batch))] if len(batch) < axes else x

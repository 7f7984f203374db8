"""Form "recurrent" and decode steps: all lines of a program, for every head, in one launch.

A state that several heads share, as those of grouped keys do, would have to move once for all of them and be read by
each: for a decode step it moves in a launch before.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

from hla.arrays import Array, broadcast_shapes, moveaxis
from hla.backends.staged.engine import Engine
from hla.backends.staged.forward import final_state, inputs, natural, with_parts
from hla.backends.staged.operations import Batch, column
from hla.backends.staged.timeline import timeline
from hla.backends.staged.views import arrange
from hla.family import Program
from hla.problem import Problem, States
from hla.recurrent import lines as recurrence

KEY, VALUE, MOVED, POWER, QUERY, RESULT, STATE, STRICT = range(8)
"""Places in a line."""
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
    tokens = _Tokens(engine, problem)
    program, v = problem.program, problem.v
    output = engine.empty(v, (*tokens.batch, problem.length, int(v.shape[-1])), v.dtype)
    _, lines = encoded(program)
    shared = tokens.shared
    if shared:
        symbols = tuple(s.symbol for s in program.states)
        for batch in dict.fromkeys(tokens.natural(symbol) for symbol in shared):
            own = tuple(_moving(x) for x in lines if x[MOVED] != NOTHING and tokens.natural(symbols[x[MOVED]]) == batch)
            nothing = engine.empty(v, (*batch, 1, int(v.shape[-1])), v.dtype)
            tokens.launch(batch, own, nothing, outputs=False)
        lines = tuple(_moved(x) if x[MOVED] != NOTHING and symbols[x[MOVED]] in shared else x for x in lines)
    tokens.launch(tokens.batch, lines, output, outputs=True)
    names = [name for name, _ in (*program.output, *program.denominator)]
    output_batch = broadcast_shapes(*(tokens.shapes.batch[name] for name in names))
    return _at(output, output_batch, 2), tokens.finals()


def _moving(line: tuple[int, ...]) -> tuple[int, ...]:
    """A line that moves its state and reads nothing."""
    return (*line[:QUERY], NOTHING, NOTHING, *line[RESULT + 1 :])


def _moved(line: tuple[int, ...]) -> tuple[int, ...]:
    """A line whose state has moved already."""
    return (*line[:MOVED], NOTHING, *line[MOVED + 1 :])


class _Tokens:
    """The states of one run, and launches over them."""

    def __init__(self, engine: Engine, problem: Problem) -> None:
        self.engine, self.problem = engine, problem
        self.shapes = natural(problem).shapes()
        self.arithmetic = engine.arithmetic(problem)
        options = [x for x in (problem.log_decay, problem.token_mask, problem.starts) if x is not None]
        self.batch = broadcast_shapes(
            problem.output_batch(),
            *(shape[:-2] for shape in self.shapes.state.values()),
            *(x.shape[:-2] for x in options),
        )
        offsets = None if problem.cu_seqlens is None else tuple(problem.cu_seqlens)
        self.cut = timeline(engine, problem.length, 16, offsets, engine.place(problem.v))
        self.given = inputs(engine, problem)
        self.given.setdefault("one", self.given["v"])
        self.shared = self._shared()
        given, symbols = problem.initial or {}, tuple(s.symbol for s in problem.program.states)
        self.before = {symbol: with_parts(engine, problem, given.get(symbol)) for symbol in symbols}
        # into the given states' memory all or none of them, as the caller refuses a state that would change its shape
        inplace = problem.overwrite and all(
            symbol in given and self._keeps(given[symbol], symbol) for symbol in symbols
        )
        self.after = {symbol: self._place(symbol, inplace) for symbol in symbols}

    def natural(self, symbol: str) -> Batch:
        """A state's own batch axes."""
        return self.shapes.state[symbol][:-2]

    def _shared(self) -> frozenset[str]:
        """States that several heads share and that one token moves: these move first, once, in a launch of their own.

        Their streams must be inputs, and no read may look at them as they were before. Other shared states are kept
        once for each head while the tokens run.
        """
        problem = self.problem
        if problem.length != 1 or problem.cu_seqlens is not None:
            return frozenset()
        strict = {read.state for read in problem.program.reads if read.strict}
        heads = math.prod(self.batch)
        return frozenset(
            s.symbol
            for s in problem.program.states
            if {s.key, s.value} <= {"q", "k", "v", "one"}
            and s.symbol not in strict
            and math.prod(self.natural(s.symbol)) < heads
        )

    def _keeps(self, state: Array, symbol: str) -> bool:
        """Whether a state comes out as it went in."""
        shape = (*(() if self.problem.cu_seqlens is None else (self.cut.parts,)), *self.shapes.state[symbol])
        return tuple(state.shape) == shape and state.dtype == self.problem.dtype

    def _place(self, symbol: str, inplace: bool) -> Array:
        """Room for a state: the given one's own memory, if the caller wants that, and if every head has its own."""
        engine, start = self.engine, self.before[symbol]
        batch = self.natural(symbol) if symbol in self.shared else self.batch
        sizes = self.shapes.state[symbol][-2:]
        if inplace and start is not None and tuple(start.shape) == (*batch, self.cut.parts, *sizes):
            steps = zip(start.shape, engine.strides(start), strict=True)
            if all(step != 0 or n == 1 for n, step in steps):
                return start
        made = engine.empty(self.problem.v, (self.cut.parts, *batch, *sizes), self.arithmetic.sums)
        return moveaxis(engine.xp, made, 0, -3)

    def launch(self, batch: Batch, lines: tuple[tuple[int, ...], ...], output: Array, *, outputs: bool) -> None:
        """Run lines for all tokens of a batch. Without `outputs` only states are of interest."""
        engine, problem, cut = self.engine, self.problem, self.cut
        program, names = problem.program, encoded(problem.program)[0]
        results = {read.result for read in program.reads}
        used = {x[i] for x in lines for i in (KEY, VALUE, QUERY)} | ({names.index("v")} if outputs else set())
        touched = {x[i] for x in lines for i in (MOVED, STATE)}
        streams = {name: x.tensor for name, x in self.given.items() if names.index(name) in used}
        if engine.scratch and outputs:  # a place for one token of one sequence
            for name in results:
                sizes = (*batch, cut.parts, self.shapes.width[name])
                streams[name] = engine.empty(problem.v, sizes, self.arithmetic.sums)
        symbols = tuple(s.symbol for s in program.states)
        states = [symbol for i, symbol in enumerate(symbols) if i in touched]
        tensors: dict[str, tuple[Array, int] | None] = {
            "output": (output, 2),
            "log_decay": column(engine.xp, problem.log_decay, problem.length),
            "mask": column(engine.xp, problem.token_mask, problem.length),
            "starts": column(engine.xp, problem.starts, problem.length),
        }
        tensors |= {f"stream {name}": (x, 2) for name, x in streams.items()}
        before = {symbol: self.before[symbol] for symbol in states}
        tensors |= {f"before {symbol}": None if x is None else (x, 3) for symbol, x in before.items()}
        tensors |= {f"after {symbol}": (self.after[symbol], 3) for symbol in states}
        grid = arrange(engine, batch, tensors)

        def pointers(kind: str, of: tuple[str, ...]) -> tuple[tuple[Array | None, ...], tuple[tuple[int, ...], ...]]:
            views = [grid.views.get(f"{kind} {name}") for name in of]
            return (
                tuple(None if view is None else view.tensor for view in views),
                tuple((0,) if view is None else view.strides for view in views),
            )

        arguments: dict[str, Any] = {"n1": grid.sizes[1], "n2": grid.sizes[2]}
        for name in ("output", "log_decay", "mask", "starts"):
            view = grid.views[name]
            arguments[name] = None if view is None else view.tensor
            arguments[f"s_{name}"] = (0,) if view is None else view.strides
        arguments["streams"], arguments["s_streams"] = pointers("stream", names)
        arguments["before"], arguments["s_before"] = pointers("before", symbols)
        arguments["after"], arguments["s_after"] = pointers("after", symbols)
        made, masses = (program.output, program.denominator) if outputs else ((), ())
        factors = (self.given[name].factor if name in self.given else 1.0 for name in names)
        arguments |= {
            "bounds": cut.tokens,
            "T": problem.length,
            "part_count": cut.parts,
            "factors": tuple(factors),
            "weights": tuple(problem.ridge if w is None else w for _, w in made),
            "masses": tuple(problem.ridge if w is None else w for _, w in masses),
            "eps": problem.eps,
            "LINES": lines,
            "SCRATCH": tuple(name in results for name in names),
            "WIDTHS": tuple(self.shapes.width[name] for name in names),
            "OUTPUT": tuple(names.index(name) for name, _ in made),
            "MASSES": tuple(names.index(name) for name, _ in masses),
            "DV": int(problem.v.shape[-1]),
        }
        engine.launch("token", grid.batch, arguments, self.arithmetic, problem.v)
        for symbol in states:
            x, view = self.after[symbol], grid.views[f"after {symbol}"]
            if view is not None and view.tensor is not x:
                engine.fill(x, view.tensor)

    def finals(self) -> States:
        """Final states as callers get them."""
        result: States = {}
        for symbol, x in self.after.items():
            own = _at(x, (*self.natural(symbol), self.cut.parts), 2)
            result[symbol] = final_state(self.engine, self.problem, own)
        return result


def _at(x: Array, batch: tuple[int, ...], own: int) -> Array:
    """The first along every axis that `batch` lacks."""
    axes = x.ndim - own
    wanted = (*(1,) * (axes - len(batch)), *batch)
    for axis, n in enumerate(wanted):
        if n == 1 and x.shape[axis] != 1:
            x = x[(slice(None),) * axis + (slice(0, 1),)]
    return x[(0,) * (axes - len(batch))] if len(batch) < axes else x

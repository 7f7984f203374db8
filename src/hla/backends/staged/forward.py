r"""A program, stage by stage: each state at the chunks' borders, then what is read of it, for all chunks at once.

Where a state takes the result of the read before it, both run in one pass (`hla.backends.triton.kernels.chain`): then
HLA₂ and HLA₃ are that and the last read, AHLA is that alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hla import traffic
from hla.arrays import Array, DType, broadcast_shapes, cast, moveaxis, transpose
from hla.backends.staged import operations
from hla.backends.staged.engine import Engine
from hla.backends.staged.operations import Batch, Found, Gate, Setting, Stream, Term, run_chain, run_read, run_state
from hla.backends.staged.timeline import timeline
from hla.family import Program, Read, State, steps
from hla.problem import Problem, States


def setting_of(engine: Engine, problem: Problem) -> Setting:
    """How a call is cut into chunks, its clock, and its arithmetic."""
    arithmetic = engine.arithmetic(problem)
    offsets = None if problem.cu_seqlens is None else tuple(problem.cu_seqlens)
    size = engine.chunk_size(problem, arithmetic)
    setting = Setting(
        engine, timeline(engine, problem.length, size, offsets, engine.place(problem.v)), Gate(0), arithmetic
    )
    log_decay, mask, starts = problem.log_decay, problem.token_mask, problem.starts
    if mask is None and starts is None and (log_decay is None or problem.constant):
        return setting if log_decay is None else replace(setting, gate=Gate(1, (log_decay,)))
    return replace(setting, gate=operations.clock(setting, log_decay, mask, starts))


class Forward:
    """One run of a problem's program."""

    def __init__(self, problem: Problem, setting: Setting, *, keep: bool) -> None:
        """`keep`: the states at the chunks' borders and all streams, for the gradient; then no output is made."""
        self.problem, self.setting, self.keep = problem, setting, keep
        self.program: Program = problem.program
        self.shapes = natural(problem).shapes()
        self.streams: dict[str, Stream] = inputs(setting.engine, problem)
        self.found: dict[str, Found] = {}
        self.output: Array | None = None
        """where a chain has made it already"""
        self._like = problem.v

    def run(self) -> None:
        """All states and all reads but those that make the output."""
        lines = steps(self.program)
        final = {name for name, _ in (*self.program.output, *self.program.denominator)}
        for i, (symbol, state, read) in enumerate(lines):
            if symbol not in self.found and not self._chained(lines, i, final):
                self._run_state(state)
            if self.output is not None or read is None or read.result in final:
                continue
            if read.result not in self.streams:
                terms = [self._term(read)]
                batch = self.shapes.batch[read.result]
                made = run_read(self.setting, terms, batch, self.setting.dtype, strict=read.strict)
                self.streams[read.result] = Stream(made)

    def outputs(self, names: tuple[tuple[str, float | None], ...], dtype: DType) -> Array:
        """The weighted sum of reads."""
        reads = {read.result: read for read in self.program.reads}
        terms: dict[bool, list[Term]] = {False: [], True: []}
        batch: Batch = ()
        for name, weight in names:
            read = reads[name]
            factor = self.problem.ridge if weight is None else weight
            terms[read.strict].append(self._term(read)._replace(weight=factor))
            batch = broadcast_shapes(batch, self.shapes.batch[name])
        assert not terms[True]  # no program's output is a strict read
        return cast(self.setting.xp, run_read(self.setting, terms[False], batch, dtype), dtype)

    def finals(self) -> States:
        """Final states by symbol, with a leading axis for packed sequences."""
        result: States = {}
        for symbol, found in self.found.items():
            assert found.final is not None
            result[symbol] = final_state(self.setting.engine, self.problem, found.final)
        return result

    def initial(self, symbol: str) -> Array | None:
        """(*b, parts, ·, ·), or None for zeros."""
        return with_parts(self.setting.engine, self.problem, (self.problem.initial or {}).get(symbol))

    def _run_state(self, state: State) -> None:
        self.found[state.symbol] = run_state(
            self.setting, self._state(state), borders=True, final=self._wants_final, like=self._like
        )

    @property
    def _wants_final(self) -> bool:
        return self.problem.return_state and not self.keep

    def _state(self, state: State) -> operations.State:
        y, z = self.streams[state.key], self.streams[state.value]
        batch = self.shapes.state[state.symbol][:-2]
        return operations.State(y, z, (y.width, z.width), state.power, batch, self.initial(state.symbol))

    def _term(self, read: Read) -> Term:
        state = self.program.state(read.state)
        return Term(
            self.streams[read.query],
            self.streams[state.key],
            self.streams[state.value],
            self.found[read.state].borders,
            state.power,
        )

    def _chained(self, lines: Any, i: int, final: set[str]) -> bool:
        """Run this line's state, its read and the state that takes the result in one pass, if they are such."""
        symbol, state, read = lines[i]
        if read is None or read.strict or read.result in final:
            return False
        following = traffic.successor(self.program, read.result, set(self.streams), set(self.found) | {symbol})
        if following is None:
            return False
        batch = self.shapes.state[symbol][:-2]
        if {self.shapes.batch[read.result], self.shapes.state[following.symbol][:-2]} != {batch}:
            return False  # grouped heads: the state is one for several of them
        first = self._state(state)
        turned = following.key == read.result
        other = self.streams[following.value if turned else following.key]
        rows, columns = first.sizes
        if not operations.in_one_pass(self.setting, batch, rows, other.width, columns, self._like):
            return False
        initial = self.initial(following.symbol)
        last = None if self.keep else traffic.last_read(self.program, read, following)
        more = sum(line.state.symbol == symbol and line.read is not None for line in lines) > 1
        needed = following.symbol not in {r.state for r in self.program.reads} or last is None
        made = run_chain(
            self.setting,
            first,
            self.streams[read.query],
            other,
            following.power,
            initial2=initial if initial is None or not turned else transpose(self.setting.xp, initial),
            keep=(self.keep or more, needed),
            final=(self._wants_final, self._wants_final),
            result=last is None,
            output=None if last is None else self.problem.v.dtype,
            like=self._like,
        )
        self.found[symbol] = made.first
        second = made.second
        if turned:
            second = second.turned(self.setting.xp)
        self.found[following.symbol] = second
        if made.result is not None:
            self.streams[read.result] = Stream(made.result)
        self.output = made.output
        return True


def inputs(engine: Engine, problem: Problem) -> dict[str, Stream]:
    """The input streams. A scale that is an array is multiplied in here; a number waits for the kernels."""
    if isinstance(problem.scale, float):
        q = Stream(problem.q, problem.scale)
    else:
        q = Stream(cast(engine.xp, problem.q, problem.dtype) * problem.scale)
    found = {"q": q, "k": Stream(problem.k), "v": Stream(problem.v)}
    if problem.program.denominator:
        one = engine.number(problem.v, 1.0)
        found["one"] = Stream(engine.xp.broadcast_to(one, (*problem.v.shape[:-1], 1)))
    return found


def with_parts(engine: Engine, problem: Problem, state: Array | None) -> Array | None:
    """A state as callers give it, as (*b, parts, ·, ·)."""
    if state is None:
        return None
    return state[..., None, :, :] if problem.cu_seqlens is None else moveaxis(engine.xp, state, 0, -3)


def final_state(engine: Engine, problem: Problem, x: Array) -> Array:
    """A final state (*b, parts, ·, ·) as callers get it: for packed sequences with their axis before all batch axes."""
    x = moveaxis(engine.xp, x, -3, 0)
    if problem.cu_seqlens is None:
        return x[0, ...]
    missing = max(y.ndim for y in (problem.q, problem.k, problem.v)) - (x.ndim - 1)
    return x if missing <= 0 else engine.xp.reshape(x, (x.shape[0], *(1,) * missing, *x.shape[1:]))


def seen(engine: Engine, problem: Problem, x: Array) -> Array:
    """x (*b, T, ·), 0 at skipped tokens, whatever they hold."""
    mask = problem.token_mask
    return x if mask is None else engine.xp.where(mask, x, engine.number(x, 0.0))


def natural(problem: Problem) -> Problem:
    """The problem of one packed sequence, as far as shapes go."""
    if problem.cu_seqlens is None:
        return problem
    initial = None if problem.initial is None else {s: x[0] for s, x in problem.initial.items()}
    return replace(problem, initial=initial, cu_seqlens=None)


def run(engine: Engine, problem: Problem) -> tuple[Array, States]:
    """Output and final states of a causal or prefix problem with tokens."""
    forward = Forward(problem, setting_of(engine, problem), keep=False)
    forward.run()
    output = finish(problem, forward)
    return output, forward.finals() if problem.return_state else {}


def finish(problem: Problem, forward: Forward) -> Array:
    """The output: the reads' weighted sum, divided by the denominator's."""
    if forward.output is not None:
        return forward.output
    program, dtype, setting = problem.program, problem.v.dtype, forward.setting
    if not program.denominator:
        return forward.outputs(program.output, dtype)
    mass = forward.outputs(program.denominator, setting.sums) + problem.eps
    made = seen(setting.engine, problem, forward.outputs(program.output, setting.sums) / mass)  # 0 / eps may be NaN
    return cast(setting.xp, made, dtype)

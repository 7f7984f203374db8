r"""A program, stage by stage: each state at the chunks' borders, then what is read of it, for all chunks at once.

Where a state takes the result of the read before it, both run in one pass (`hla.backends.triton.kernels.chain`): then
HLA₂ and HLA₃ are that and the last read, AHLA is that alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hla import traffic
from hla.arrays import broadcast_shapes
from hla.backends.triton import operations
from hla.backends.triton.operations import Batch, Found, Gate, Setting, Stream, Term, run_chain, run_read, run_state
from hla.backends.triton.timeline import timeline
from hla.family import Program, Read, State, steps
from hla.problem import Problem, States


def setting_of(problem: Problem) -> Setting:
    """How a call is cut into chunks, its clock, and the dtype of its products."""
    dtype, precision = arithmetic(problem)
    offsets = None if problem.cu_seqlens is None else tuple(problem.cu_seqlens)
    cut = timeline(problem.length, chunk_size(problem, dtype, precision), offsets, problem.v.device)
    setting = Setting(cut, Gate(0), dtype, precision)
    log_decay, mask, starts = problem.log_decay, problem.token_mask, problem.starts
    if mask is None and starts is None and (log_decay is None or problem.constant):
        return setting if log_decay is None else replace(setting, gate=Gate(1, (log_decay,)))
    return replace(setting, gate=operations.clock(setting, log_decay, mask, starts))


def arithmetic(problem: Problem) -> tuple[torch.dtype, str]:
    """The dtype of operands and their precision.

    bfloat16 is multiplied as it is. float16 cannot hold what stages hand on, which grows like t²: its inputs are
    multiplied as TF32, which holds them exactly. Everything else is float32 throughout.
    """
    kinds = {x.dtype for x in (problem.q, problem.k, problem.v)}
    if kinds == {torch.bfloat16} and not problem.scale_varies:
        return torch.bfloat16, "ieee"
    if kinds == {torch.float16} and torch.version.hip is None:
        return torch.float32, "tf32"
    return torch.float32, "ieee"


def chunk_size(problem: Problem, dtype: torch.dtype, precision: str) -> int:
    """Tokens per chunk: the power of two at or below what was asked for that the tiles allow, at least 16."""
    widest = max(operations.padded(int(x.shape[-1])) for x in (problem.q, problem.v))
    if dtype == torch.float32 and precision == "ieee":  # no tensor cores: tiles live in the registers
        most = 32 if widest <= 128 else 16
    else:
        most = max(16, min(64, 128 * 64 // widest // (1 if dtype == torch.bfloat16 else 2)))
    asked = problem.chunk_size or most
    return max(16, min(most, 1 << (asked.bit_length() - 1)))


class Forward:
    """One run of a problem's program."""

    def __init__(self, problem: Problem, setting: Setting, *, keep: bool) -> None:
        """`keep`: the states at the chunks' borders and all streams, for the gradient; then no output is made."""
        self.problem, self.setting, self.keep = problem, setting, keep
        self.program: Program = problem.program
        self.shapes = natural(problem).shapes()
        self.streams: dict[str, Stream] = inputs(problem)
        self.found: dict[str, Found] = {}
        self.output: Tensor | None = None
        """where a chain has made it already"""
        self._like = problem.v

    def run(self) -> None:
        """All states and all reads but those that make the output."""
        lines = steps(self.program)
        final = {name for name, _ in (*self.program.output, *self.program.denominator)}
        for i, (symbol, state, read) in enumerate(lines):
            if symbol not in self.found and not self._chained(lines, i, final):
                self._run_state(state)
            if read is not None and read.result not in self.streams and read.result not in final:
                terms = [self._term(read)]
                batch = self.shapes.batch[read.result]
                made = run_read(self.setting, terms, batch, self.setting.dtype, strict=read.strict)
                self.streams[read.result] = Stream(made)

    def outputs(self, names: tuple[tuple[str, float | None], ...], dtype: torch.dtype) -> Tensor:
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
        return run_read(self.setting, terms[False], batch, dtype).to(dtype)

    def finals(self) -> States:
        """Final states by symbol, with a leading axis for packed sequences."""
        result: States = {}
        for symbol, found in self.found.items():
            assert found.final is not None
            result[symbol] = final_state(self.problem, found.final.movedim(-3, 0))
        return result

    def initial(self, symbol: str) -> Tensor | None:
        """(*b, parts, ·, ·), or None for zeros."""
        given: Tensor | None = (self.problem.initial or {}).get(symbol)
        if given is None:
            return None
        return given.movedim(0, -3) if self.problem.cu_seqlens is not None else given.unsqueeze(-3)

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
        if operations.is_long(self.setting, batch, first.sizes[1]):
            return False
        turned = following.key == read.result
        other = following.value if turned else following.key
        initial = self.initial(following.symbol)
        last = None if self.keep else traffic.last_read(self.program, read, following)
        more = sum(line.state.symbol == symbol and line.read is not None for line in lines) > 1
        needed = following.symbol not in {r.state for r in self.program.reads} or last is None
        made = run_chain(
            self.setting,
            first,
            self.streams[read.query],
            self.streams[other],
            following.power,
            initial2=initial if initial is None or not turned else initial.mT,
            keep=(self.keep or more, needed),
            final=(self._wants_final, self._wants_final),
            result=last is None,
            output=None if last is None else self.problem.v.dtype,
            like=self._like,
        )
        self.found[symbol] = made.first
        second = made.second
        if turned:
            second = Found(*(None if x is None else x.mT for x in second))
        self.found[following.symbol] = second
        if made.result is not None:
            self.streams[read.result] = Stream(made.result)
        self.output = made.output
        return True


def inputs(problem: Problem) -> dict[str, Stream]:
    """The input streams. A scale that is an array is multiplied in here; a number waits for the kernels."""
    if isinstance(problem.scale, Tensor):
        q = Stream(problem.q.float() * problem.scale)
    else:
        q = Stream(problem.q, problem.scale)
    found = {"q": q, "k": Stream(problem.k), "v": Stream(problem.v)}
    if problem.program.denominator:
        one = problem.v.new_ones(())
        found["one"] = Stream(one.expand(*problem.v.shape[:-1], 1))
    return found


def final_state(problem: Problem, x: Tensor) -> Tensor:
    """A final state (parts, *b, ·, ·) as callers get it: for packed sequences with their axis before all batch axes."""
    if problem.cu_seqlens is None:
        return x[0]
    missing = max(y.ndim for y in (problem.q, problem.k, problem.v)) - (x.ndim - 1)
    return x if missing <= 0 else x.reshape(x.shape[0], *(1,) * missing, *x.shape[1:])


def seen(problem: Problem, x: Tensor) -> Tensor:
    """x (*b, T, ·), 0 at skipped tokens, whatever they hold."""
    mask = problem.token_mask
    return x if mask is None else torch.where(mask, x, x.new_zeros(()))


def natural(problem: Problem) -> Problem:
    """The problem of one packed sequence, as far as shapes go."""
    if problem.cu_seqlens is None:
        return problem
    initial = None if problem.initial is None else {s: x[0] for s, x in problem.initial.items()}
    return replace(problem, initial=initial, cu_seqlens=None)


def run(problem: Problem) -> tuple[Tensor, States]:
    """Output and final states of a causal or prefix problem with tokens."""
    forward = Forward(problem, setting_of(problem), keep=False)
    forward.run()
    output = finish(problem, forward)
    return output, forward.finals() if problem.return_state else {}


def finish(problem: Problem, forward: Forward) -> Tensor:
    """The output: the reads' weighted sum, divided by the denominator's."""
    if forward.output is not None:
        return forward.output
    program, dtype = problem.program, problem.v.dtype
    if not program.denominator:
        return forward.outputs(program.output, dtype)
    mass = forward.outputs(program.denominator, torch.float32) + problem.eps
    made = (forward.outputs(program.output, torch.float32) / mass).to(dtype)
    if problem.token_mask is not None:  # 0 / eps, and eps may be 0
        made = torch.where(problem.token_mask, made, made.new_zeros(()))
    return made

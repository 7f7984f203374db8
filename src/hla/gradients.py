r"""Reverse mode through a whole program: the gradient of the family is the family again (math, "Gradients").

A program is a list of reads, each one pass of the primitive, so its adjoint is the passes' adjoints in reverse.
Kept: the stages' results over all tokens and one state per chunk and pass. Nothing of size T×T exists.
"""

from __future__ import annotations

from typing import NamedTuple

from hla.arrays import Array, cast, sum_to
from hla.bidirectional import packed_setting, whole
from hla.chunkwise import default_chunk
from hla.family import weighted_sum
from hla.primitive import Cotangents, Setting, backward, forward
from hla.problem import Problem, States


class ProblemGradients(NamedTuple):
    """Gradients of a `Problem`'s arrays, each in its array's own shape and dtype of accumulation."""

    q: Array
    k: Array
    v: Array
    log_decay: Array | None
    initial: States


def pull(problem: Problem, d_output: Array, d_final: States | None) -> ProblemGradients:
    """The gradient of (output, final states) applied to (d_output, d_final). Missing entries of d_final count as 0."""
    xp, program = problem.xp, problem.program
    streams = problem.streams(problem.q, problem.k, problem.v, problem.token_mask)
    passes = {read.result: _Pass(problem, read.result) for read in program.reads}
    for read in program.reads:
        state = program.state(read.state)
        streams[read.result] = passes[read.result].run(streams[read.query], streams[state.key], streams[state.value])
    cotangents = _output_cotangents(problem, streams, cast(xp, d_output, problem.dtype))
    log_decay: Array | None = None
    initial: States = {}
    pending = {symbol: cast(xp, x, problem.dtype) for symbol, x in (d_final or {}).items()}
    for read in reversed(program.reads):
        state = program.state(read.state)
        d = cotangents.pop(read.result, None)
        d_state = pending.pop(read.state, None)
        if d is None and d_state is None:
            continue
        if d is None:
            d = xp.zeros_like(streams[read.result])
        found = passes[read.result].pull(streams[read.query], streams[state.key], streams[state.value], d, d_state)
        for name, x in ((read.query, found.a), (state.key, found.b), (state.value, found.c)):
            cotangents[name] = x if name not in cotangents else cotangents[name] + x
        initial[read.state] = found.initial if read.state not in initial else initial[read.state] + found.initial
        if found.log_decay is not None:  # summed over its own batch axes first: adding would count narrow ones twice
            rate = _decay_gradient(problem, found.log_decay)
            log_decay = rate if log_decay is None else log_decay + rate
    return ProblemGradients(
        _input_gradient(problem, problem.q, cotangents.get("q"), scaled=True),
        _input_gradient(problem, problem.k, cotangents.get("k"), scaled=False),
        _input_gradient(problem, problem.v, cotangents.get("v"), scaled=False),
        _decay_gradient(problem, None) if log_decay is None else log_decay,
        {
            symbol: sum_to(xp, initial[symbol], x.shape) if symbol in initial else xp.zeros_like(x)
            for symbol, x in (problem.initial or {}).items()
        },
    )


class _Pass:
    """One read of the program as a pass of the primitive over all tokens."""

    def __init__(self, problem: Problem, result: str) -> None:
        read = next(r for r in problem.program.reads if r.result == result)
        self._bidirectional = problem.program.spec.mask == "none"
        self._initial = (problem.initial or {}).get(read.state)
        if self._initial is not None:
            self._initial = cast(problem.xp, self._initial, problem.dtype)
        if self._bidirectional:
            self._setting = packed_setting(problem)
            return
        self._setting = Setting(
            problem.xp,
            problem.dtype,
            problem.placed,
            problem.chunk_size or default_chunk(problem),
            problem.program.state(read.state).power,
            read.strict,
            problem.masked_log_decay(problem.log_decay, problem.token_mask),
            problem.constant,
            problem.starts,
        )

    def run(self, a: Array, b: Array, c: Array) -> Array:
        if self._bidirectional:
            return whole(self._setting, a, b, c)
        return forward(self._setting, a, b, c, self._initial)[0]

    def pull(self, a: Array, b: Array, c: Array, d: Array, d_state: Array | None) -> Cotangents:
        if not self._bidirectional:
            return backward(self._setting, a, b, c, self._initial, d, d_state)
        xp, setting = self._setting.xp, self._setting
        return Cotangents(
            sum_to(xp, whole(setting, d, c, b), a.shape),
            sum_to(xp, whole(setting, c, d, a), b.shape),
            sum_to(xp, whole(setting, b, a, d), c.shape),
            setting.zeros(b, c),
            None,
        )


def _output_cotangents(problem: Problem, streams: dict[str, Array], d: Array) -> dict[str, Array]:
    """Back through masking, normalisation and the weighted sum of reads."""
    xp, program = problem.xp, problem.program
    if problem.token_mask is not None:
        d = xp.where(problem.token_mask, d, xp.zeros_like(d))
    result: dict[str, Array] = {}
    if program.denominator:
        numerator = weighted_sum(program.output, streams, problem.ridge)
        denominator = weighted_sum(program.denominator, streams, problem.ridge) + problem.eps
        inverse = 1.0 / denominator
        if problem.token_mask is not None:  # 0/0 at a skipped token would make 0·NaN below
            inverse = xp.where(problem.token_mask, inverse, xp.zeros_like(inverse))
        d_denominator = -xp.sum(d * numerator, axis=-1, keepdims=True, dtype=d.dtype) * inverse * inverse
        d = d * inverse
        _scatter(problem, program.denominator, d_denominator, result)
    _scatter(problem, program.output, d, result)
    return {name: sum_to(xp, x, streams[name].shape) for name, x in result.items()}


def _scatter(problem: Problem, terms: tuple[tuple[str, float | None], ...], d: Array, into: dict[str, Array]) -> None:
    for name, weight in terms:
        into[name] = d * (problem.ridge if weight is None else weight)


def _input_gradient(problem: Problem, x: Array, d: Array | None, scaled: bool) -> Array:
    """Back through masking and scaling, to the shape and dtype of the input."""
    xp = problem.xp
    if d is None:
        return xp.zeros_like(x)
    if problem.token_mask is not None:
        d = xp.where(problem.token_mask, d, xp.zeros_like(d))
    if scaled:
        d = d * problem.scale
    return cast(xp, sum_to(xp, d, x.shape), x.dtype)


def _decay_gradient(problem: Problem, d: Array | None) -> Array | None:
    """Per token to the shape of log_decay; a skipped token's decay has no effect, a reset's gradient is 0."""
    log_decay, xp = problem.log_decay, problem.xp
    if log_decay is None:
        return None
    if d is None:
        return xp.zeros_like(log_decay)
    if problem.token_mask is not None:
        d = xp.where(problem.token_mask, d, xp.zeros_like(d))
    if not problem.constant:
        d = xp.where(xp.isinf(log_decay), xp.zeros_like(d), d)
    return sum_to(xp, d, log_decay.shape)


def pull_empty(problem: Problem, d_final: States | None) -> ProblemGradients:
    """The gradient of a call on no tokens: the final state is the initial one."""
    xp, given = problem.xp, problem.initial or {}
    return ProblemGradients(
        xp.zeros_like(problem.q),
        xp.zeros_like(problem.k),
        xp.zeros_like(problem.v),
        None if problem.log_decay is None else xp.zeros_like(problem.log_decay),
        {
            symbol: sum_to(xp, (d_final or {})[symbol], x.shape) if symbol in (d_final or {}) else xp.zeros_like(x)
            for symbol, x in given.items()
        },
    )

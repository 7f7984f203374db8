r"""mask="none": every token sees the whole sequence, or the whole of its packed sequence.

    read r_t = a_tᵀ X,  X = Σ_j b_j c_jᵀ

with the programs of the prefix mask, whose reads then multiply to Q(KᵀK)(QᵀV), Q(KᵀQ)(KᵀV), Q(KᵀK)(QᵀQ)(KᵀV).
"""

from __future__ import annotations

from dataclasses import replace

from hla.arrays import Array, transpose
from hla.chunkwise import default_chunk, token_arrays
from hla.family import steps
from hla.loops import Tokens, fold
from hla.primitive import Setting, forward, reversed_time
from hla.problem import Problem, States


def run(problem: Problem) -> Array:
    """The output (*batch, T, dv)."""
    if problem.starts is not None:
        return _run_packed(problem)
    xp, program = problem.xp, problem.program
    tokens = token_arrays(problem)
    length = problem.length
    step = length if problem.form == "parallel" else problem.chunk_size or default_chunk(problem)
    shapes = problem.initial_states()
    totals: States = {}

    def streams_of(piece: Tokens) -> dict[str, Array]:
        streams = problem.streams(piece["q"], piece["k"], piece["v"], piece["token_mask"])
        for symbol, _, read in steps(program):
            if read is not None and symbol in totals and read.query in streams:
                streams[read.result] = xp.matmul(streams[read.query], totals[symbol])
        return streams

    def add(states: States, piece: Tokens, _: None) -> tuple[States, Tokens, None]:
        streams = streams_of(piece)
        return (
            {
                symbol: before
                + xp.matmul(transpose(xp, streams[program.state(symbol).key]), streams[program.state(symbol).value])
                for symbol, before in states.items()
            },
            {},
            None,
        )

    def output(states: States, piece: Tokens, _: None) -> tuple[States, Tokens, None]:
        return states, {"o": problem.finish(streams_of(piece), piece["token_mask"])}, None

    known = {"q", "k", "v", "one"}
    while len(totals) < len(program.states):  # one pass per stage: a stage's state needs the reads of the one before
        ready = {
            s.symbol: shapes[s.symbol]
            for s in program.states
            if s.symbol not in totals and s.key in known and s.value in known
        }
        found, _, _ = fold(xp, add, ready, tokens, length, step)
        totals.update(found)
        known |= {r.result for r in program.reads if r.state in totals and r.query in known}
    return fold(xp, output, {}, tokens, length, step)[1]["o"]


def _run_packed(problem: Problem) -> Array:
    program = problem.program
    streams = problem.streams(problem.q, problem.k, problem.v, problem.token_mask)
    setting = packed_setting(problem)
    for read in program.reads:
        state = program.state(read.state)
        streams[read.result] = whole(setting, streams[read.query], streams[state.key], streams[state.value])
    return problem.finish(streams, problem.token_mask)


def packed_setting(problem: Problem) -> Setting:
    """How the primitive runs for this problem's packed sequences."""
    step = problem.length if problem.form == "parallel" else problem.chunk_size or default_chunk(problem)
    return Setting(problem.xp, problem.dtype, problem.placed, step, starts=problem.starts)


def whole(setting: Setting, a: Array, b: Array, c: Array) -> Array:
    """a_tᵀ Σ b_j c_jᵀ over all j of t's packed sequence: those up to t, and, backwards in time, those after it."""
    xp = setting.xp
    if setting.starts is None or a.shape[-2] == 1:
        return xp.matmul(a, xp.matmul(transpose(xp, b), c))
    up_to = forward(setting, a, b, c)
    strict = replace(setting, strict=True)
    flipped = (xp.flip(x, axis=-2) for x in (a, b, c))
    after = forward(reversed_time(strict), *flipped)
    return up_to + xp.flip(after, axis=-2)

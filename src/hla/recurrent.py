r"""Form "recurrent": one token at a time, and the decode step.

For every state of a program, X_t = γ_t^p X_{t−1} + b_t c_tᵀ, then its reads, r_t = a_tᵀ X_t (strict: a_tᵀ X_{t−1}).
This is the streaming form of the paper's Theorems 3.1 and 6.1 on the corrected states of docs/mathematics.md.
Memory beyond inputs and output is one state, whatever T.
"""

from __future__ import annotations

from functools import cache

from hla.arrays import Array, Namespace, add_outer, scaled, transpose
from hla.chunkwise import token_arrays
from hla.family import Program, Read, State, steps
from hla.loops import Tokens, fold
from hla.problem import Problem, States


def run(problem: Problem) -> tuple[Array, States]:
    """The output (*batch, T, dv) and the final states, token by token."""

    def body(states: States, tokens: Tokens, _: None) -> tuple[States, Tokens, None]:
        states, output = advance(problem, states, tokens)
        return states, {"o": output}, None

    states, outputs, _ = fold(
        problem.xp, body, problem.initial_states(), token_arrays(problem), problem.length, 1, out=problem.out
    )
    return outputs["o"], states


def advance(problem: Problem, states: States, tokens: Tokens) -> tuple[States, Array]:
    """States and finished output after one more token; `tokens` has a time axis of one."""
    xp, mask = problem.xp, tokens["token_mask"]
    streams = problem.streams(tokens["q"], tokens["k"], tokens["v"], mask)
    log_decay = tokens["log_decay"] if not problem.constant else problem.log_decay
    log_decay = problem.masked_log_decay(log_decay, mask)
    decay = None if log_decay is None else xp.exp(log_decay)
    states = token(xp, problem.program, decay, tokens["starts"], states, streams, problem.resets)
    return states, problem.finish(streams, mask)


def token(
    xp: Namespace,
    program: Program,
    decay: Array | float | None,
    start: Array | None,
    states: States,
    streams: dict[str, Array],
    resets: bool,
    *,
    spare: bool = False,
) -> States:
    """One token of a program: adds the result of every read to `streams`, returns the states after the token.

    `spare`: the arrays of `states` are not needed any more and may be overwritten; only without strict reads.
    """
    if start is not None:
        states = {symbol: xp.where(start, xp.zeros_like(x), x) for symbol, x in states.items()}
    following: States = {}
    for state, read in lines(program):
        if state is not None:
            before = states[state.symbol]
            if decay is not None:
                before = _decayed(xp, before, decay, state.power, resets, spare)
            key, value = streams[state.key], streams[state.value]
            following[state.symbol] = add_outer(xp, transpose(xp, key), value, before, spare=spare)
        if read is not None:
            seen = states if read.strict else following
            streams[read.result] = xp.matmul(streams[read.query], seen[read.state])
    return following


@cache
def lines(program: Program) -> tuple[tuple[State | None, Read | None], ...]:
    """What happens at a token, in order: a state moves on, then it is read; a strict read needs no move."""
    moved: set[str] = set()
    result: list[tuple[State | None, Read | None]] = []
    for symbol, state, read in steps(program):
        moves = symbol not in moved and not (read is not None and read.strict)
        if moves:
            moved.add(symbol)
        result.append((state if moves else None, read))
    return (*result, *((state, None) for state in program.states if state.symbol not in moved))


def _decayed(xp: Namespace, state: Array, decay: Array | float | None, power: int, resets: bool, spare: bool) -> Array:
    """γ^power · state; where γ is exactly 0 the state is dropped, whatever it holds."""
    if decay is None:
        return state
    factor = decay
    for _ in range(power - 1):
        factor = factor * decay
    if resets:
        return xp.where(factor == 0, xp.zeros_like(state), state * factor)
    return scaled(xp, state, factor) if spare else state * factor

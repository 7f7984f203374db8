r"""Form "recurrent": one token at a time, and the decode step.

For every state of a program, X_t = γ_t^p X_{t−1} + b_t c_tᵀ, then its reads, r_t = a_tᵀ X_t (strict: a_tᵀ X_{t−1}).
This is the streaming form of the paper's Theorems 3.1 and 6.1 on the corrected states of docs/mathematics.md.
Memory beyond inputs and output is one state, whatever T.
"""

from __future__ import annotations

from hla.arrays import Array, Namespace, transpose
from hla.chunkwise import token_arrays
from hla.family import Program, steps
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
    decay: Array | None,
    start: Array | None,
    states: States,
    streams: dict[str, Array],
    resets: bool,
) -> States:
    """One token of a program: adds the result of every read to `streams`, returns the states after the token."""
    following: States = {}
    for symbol, state, step in steps(program):
        before = states[symbol]
        if start is not None:
            before = xp.where(start, xp.zeros_like(before), before)
        if step is not None and step.strict:
            streams[step.result] = xp.matmul(streams[step.query], before)
            continue
        if symbol not in following:
            following[symbol] = _decayed(xp, before, decay, state.power, resets) + (
                transpose(xp, streams[state.key]) * streams[state.value]
            )
        if step is not None:
            streams[step.result] = xp.matmul(streams[step.query], following[symbol])
    for state in program.states:  # states that only strict reads have touched so far
        if state.symbol not in following:
            before = states[state.symbol]
            if start is not None:
                before = xp.where(start, xp.zeros_like(before), before)
            following[state.symbol] = _decayed(xp, before, decay, state.power, resets) + (
                transpose(xp, streams[state.key]) * streams[state.value]
            )
    return following


def _decayed(xp: Namespace, state: Array, decay: Array | None, power: int, resets: bool) -> Array:
    """γ^power · state; where γ is exactly 0 the state is dropped, whatever it holds."""
    if decay is None:
        return state
    factor = decay
    for _ in range(power - 1):
        factor = factor * decay
    return xp.where(factor == 0, xp.zeros_like(state), state * factor) if resets else state * factor

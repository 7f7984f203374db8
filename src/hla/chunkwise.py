r"""Form "chunkwise": C tokens at a time, states carried from chunk to chunk (math, "Chunkwise form").

For every read and state of a program (`hla.family`), with Γ from `hla.decays`:

    read    r_t = Σ_{j in chunk} Γ(t,j)^p (a_t·b_j) c_j + Γ(t,−1)^p a_tᵀ X_in
    state   X_out = Γ(C−1,−1)^p X_in + Σ_j Γ(C−1,j)^p b_j c_jᵀ

All stages of an operator run inside one chunk, so no stage's result of length T is ever in memory. `chunk` below is
also what form "parallel" (one chunk of T tokens) and form "scan" (all chunks at once) are made of.
"""

from __future__ import annotations

import math
from typing import Any, TypeAlias

from hla.arrays import (
    Array,
    Namespace,
    family,
    fleeting,
    is_numpy,
    multiply_add,
    scaled,
    transpose,
    unrolls,
    writable,
)
from hla.decays import Decay, Decays
from hla.family import Program, steps
from hla.loops import Tokens, fold
from hla.problem import Problem, States

DEFAULT_CHUNK = 64


def run(problem: Problem) -> tuple[Array, States]:
    """The output (*batch, T, dv) and the final states, chunk by chunk."""
    output, states, _ = run_and_keep(problem, keep=False)
    return output, states


def run_and_keep(problem: Problem, keep: bool = True) -> tuple[Array, States, Any]:
    """As `run`, with the states that enter each chunk, as notes of a fold: what the gradient starts from."""
    decays = Decays.of(problem)

    def body(states: States, tokens: Tokens, _: None) -> tuple[States, Tokens, Any]:
        following, output = advance(problem, decays, states, tokens, spare=not keep)
        return following, {"o": output}, states if keep else None

    states, outputs, entering = fold(
        problem.xp,
        body,
        problem.initial_states(own=not keep and writable(problem.xp)),
        token_arrays(problem),
        problem.length,
        problem.chunk_size or default_chunk(problem),
        out=problem.out,
    )
    return outputs["o"], states, entering


def default_chunk(problem: Problem) -> int:
    """Tokens per chunk where the caller leaves it open; measured in benchmarks/chunk_size.py.

    With few and narrow heads a chunk's operations cost more to start than to compute: then larger ones win.
    """
    d = int(problem.q.shape[-1])
    library = family(problem.v)
    if library == "jax":  # compiled: nothing to start, and small tiles stay in the cache
        return 32 if d <= 32 and problem.length > DEFAULT_CHUNK else DEFAULT_CHUNK
    if library == "torch" and unrolls(problem.v):  # sizes may be symbols there
        return DEFAULT_CHUNK
    work = d * math.prod(problem.output_batch())
    if is_numpy(problem.xp):
        return DEFAULT_CHUNK if work <= 128 else 32
    return 256 if work <= 32 else 128 if work < 256 else DEFAULT_CHUNK


def token_arrays(problem: Problem) -> Tokens:
    """Everything with a time axis."""
    return {
        "q": problem.q,
        "k": problem.k,
        "v": problem.v,
        "log_decay": None if problem.constant else problem.log_decay,
        "token_mask": problem.token_mask,
        "starts": problem.starts,
    }


def advance(
    problem: Problem, decays: Decays, states: States, tokens: Tokens, *, spare: bool = False
) -> tuple[States, Array]:
    """States and finished output after one more chunk."""
    mask = tokens["token_mask"]
    streams = problem.streams(tokens["q"], tokens["k"], tokens["v"], mask)
    log_decay = problem.masked_log_decay(tokens["log_decay"], mask)
    decay = decays.chunk(int(streams["v"].shape[-2]), log_decay, tokens["starts"])
    states = chunk(problem.xp, problem.program, decay, states, streams, spare=spare)
    return states, problem.finish(streams, mask)


Scores: TypeAlias = dict[tuple[str, str, int, bool], Array]
"""Γ(t,j)^p (a_t·b_j) by (stream a, stream b, p, strict): reads share them"""


def chunk(
    xp: Namespace, program: Program, decay: Decay, states: States, streams: dict[str, Array], *, spare: bool = False
) -> States:
    """One chunk of a program: adds the result of every read to `streams`, returns the states after the chunk.

    `spare`: the arrays of `states` are not needed any more and may be overwritten.
    """
    read_chunk(xp, program, decay, states, streams)
    return {
        s.symbol: accumulate(xp, decay, states[s.symbol], streams[s.key], streams[s.value], s.power, spare)
        for s in program.states
    }


def read_chunk(xp: Namespace, program: Program, decay: Decay, states: States, streams: dict[str, Array]) -> Scores:
    """Adds the result of every read to `streams`; `states` are those that enter the chunk."""
    scores: Scores = {}
    for symbol, state, read in steps(program):
        if read is None:
            continue
        query, key, value = streams[read.query], streams[state.key], streams[state.value]
        name = (read.query, state.key, state.power, read.strict)
        if name not in scores:
            scores[name] = _scores(xp, decay, query, key, state.power, read.strict)
        streams[read.result] = _read(
            xp, decay, scores[name], query, key, value, states[symbol], state.power, read.strict
        )
    return scores


def _scores(xp: Namespace, decay: Decay, query: Array, key: Array, power: int, strict: bool) -> Array:
    """Γ(t,j)^p (a_t·b_j), exactly 0 where t does not see j."""
    raw = xp.matmul(query, transpose(xp, key))
    pairs = decay.pairs(power, strict)
    if decay.resets:  # an overflowing product across a boundary must not become 0·inf
        return xp.where(pairs == 0, xp.zeros_like(raw), raw * pairs)
    return scaled(xp, raw, pairs)


def _read(
    xp: Namespace,
    decay: Decay,
    scores: Array,
    query: Array,
    key: Array,
    value: Array,
    state: Array,
    power: int,
    strict: bool,
) -> Array:
    inter = xp.matmul(query, state)
    into = decay.into(power, strict)
    if into is not None:
        inter = scaled(xp, inter, into) if not decay.resets else xp.where(into == 0, xp.zeros_like(inter), inter * into)
    if not decay.resets:
        return multiply_add(xp, scores, value, inter, spare=True)
    value, spoilt = _separate_non_finite(xp, key, value)
    result = xp.matmul(scores, value) + inter
    if spoilt is None:
        return result
    # A token that holds NaN or inf spoils just the tokens that see it; 0·NaN in the product would spoil the others.
    scores_seen = xp.astype(decay.pairs(power, strict) != 0, spoilt.dtype)
    hit = xp.matmul(scores_seen, spoilt) > 0
    return xp.where(hit, xp.full_like(result, float("nan")), result)


def _separate_non_finite(xp: Namespace, key: Array, value: Array) -> tuple[Array, Array | None]:
    """`value` with the rows of non-finite tokens set to 0, and which rows those are (*b, C, 1); None for none."""
    good = xp.logical_and(
        xp.all(xp.isfinite(key), axis=-1, keepdims=True), xp.all(xp.isfinite(value), axis=-1, keepdims=True)
    )
    if is_numpy(xp) and bool(xp.all(good)):
        return value, None
    return xp.where(good, value, xp.zeros_like(value)), xp.astype(xp.logical_not(good), value.dtype)


def accumulate(xp: Namespace, decay: Decay, state: Array, key: Array, value: Array, power: int, spare: bool) -> Array:
    """The state after the chunk."""
    out, through = decay.out(power), decay.through(power)
    if out is not None:
        if decay.resets:  # a token before a boundary may hold NaN: leave it out instead of multiplying it by 0
            value = xp.where(out == 0, xp.zeros_like(value), value)
            key = xp.where(out == 0, xp.zeros_like(key), key * out)
        else:
            key = fleeting(xp, key, out, "key")
    if through is None:
        return multiply_add(xp, transpose(xp, key), value, state, spare=spare)
    if decay.resets:
        state = xp.where(through == 0, xp.zeros_like(state), state * through)
    else:
        state = scaled(xp, state, through) if spare else state * through
    return multiply_add(xp, transpose(xp, key), value, state, spare=True)

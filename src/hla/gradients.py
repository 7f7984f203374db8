r"""Reverse mode through a whole program: the gradient of the family is the family again (math, "Gradients").

The states are run forwards once, keeping those that enter each chunk, and then a loop over chunks runs backwards: it
recomputes the chunk's reads and pulls through them (`hla.adjoint`), carrying the cotangents of the states from right to
left. Kept: inputs, gradients, and one set of states per chunk. No stage's result of length T, nothing of size T×T.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from hla.adjoint import ChunkAdjoint, Rate
from hla.arrays import Array, broadcast_shapes, cast, sum_to
from hla.bidirectional import packed_setting, whole
from hla.chunkwise import chunk, default_chunk, read_chunk, token_arrays
from hla.decays import Decays
from hla.family import Program, weighted_sum
from hla.loops import Tokens, fold
from hla.problem import Problem, States


class ProblemGradients(NamedTuple):
    """Gradients of a `Problem`'s arrays, each in its array's own shape and dtype of accumulation."""

    q: Array
    k: Array
    v: Array
    log_decay: Array | None
    initial: States
    scale: Array | None = None
    """of a scale that is an array"""


def pull(problem: Problem, d_output: Array, d_final: States | None, entering: Any = None) -> ProblemGradients:
    """The gradient of (output, final states) applied to (d_output, d_final). Missing entries of d_final count as 0.

    `entering`: what `chunkwise.run_and_keep` kept, if it ran on this problem.
    """
    if problem.program.spec.mask == "none":
        return _pull_whole(problem, d_output)
    xp, program = problem.xp, problem.program
    step = problem.chunk_size or default_chunk(problem)
    if entering is None:
        entering = _entering(problem, step)
    decays = Decays.of(problem)
    batch = None if problem.log_decay is None else broadcast_shapes(*problem.token_batches())  # masked per head, say

    def body(leaving: States, tokens: Tokens, before: States) -> tuple[States, Tokens, None]:
        mask, length = tokens["token_mask"], int(tokens["v"].shape[-2])
        streams = problem.streams(tokens["q"], tokens["k"], tokens["v"], mask)
        decay = decays.chunk(length, problem.masked_log_decay(tokens["log_decay"], mask), tokens["starts"])
        scores = read_chunk(xp, program, decay, before, streams)
        rate = None if batch is None else Rate(xp, decays, batch)
        adjoint = ChunkAdjoint(xp, decay, streams, scores, before, leaving, rate)
        adjoint.pull(program, _output_cotangents(problem, streams, cast(xp, tokens["d"], problem.dtype), mask))
        outputs = _input_gradients(problem, tokens, adjoint.cotangents, mask)
        if rate is not None:
            outputs["log_decay"] = rate.total(length)
        return adjoint.states, outputs, None

    initial, outputs, _ = fold(
        xp,
        body,
        _final_cotangents(problem, d_final),
        {**token_arrays(problem), "d": d_output},
        problem.length,
        step,
        reverse=True,
        notes=entering,
    )
    given = problem.initial or {}
    return ProblemGradients(
        outputs["q"],
        outputs["k"],
        outputs["v"],
        _decay_gradient(problem, outputs.get("log_decay")),
        {symbol: sum_to(xp, initial[symbol], x.shape) for symbol, x in given.items()},
        xp.sum(outputs["scale"], dtype=problem.dtype) if "scale" in outputs else None,
    )


@cache
def _feeding(program: Program) -> Program:
    """The program without the reads that only make the output: what moves the states."""
    wanted: set[str] = {name for state in program.states for name in (state.key, state.value)}
    reads: list[Any] = []
    for read in reversed(program.reads):
        if read.result in wanted:
            wanted.add(read.query)
            reads.insert(0, read)
    return Program(program.spec, program.states, tuple(reads), ())


def _entering(problem: Problem, step: int) -> Any:
    """The states that enter each chunk, as notes of a fold."""
    xp, decays, program = problem.xp, Decays.of(problem), _feeding(problem.program)

    def body(states: States, tokens: Tokens, _: None) -> tuple[States, Tokens, States]:
        mask = tokens["token_mask"]
        streams = problem.streams(tokens["q"], tokens["k"], tokens["v"], mask)
        log_decay = problem.masked_log_decay(tokens["log_decay"], mask)
        decay = decays.chunk(int(streams["v"].shape[-2]), log_decay, tokens["starts"])
        return chunk(xp, program, decay, states, streams), {}, states

    return fold(xp, body, problem.initial_states(), token_arrays(problem), problem.length, step)[2]


def _final_cotangents(problem: Problem, d_final: States | None) -> States:
    """Cotangents of all final states at the states' own shapes."""
    xp, result = problem.xp, {}
    for symbol, state in problem.initial_states().items():
        d, shape = (d_final or {}).get(symbol), state.shape
        if d is None:
            result[symbol] = xp.zeros_like(state)
        else:  # a finished state is its own, broadcast to the batch
            d = cast(xp, d, problem.dtype)
            own = (*(1,) * (d.ndim - len(shape)), *shape)
            result[symbol] = xp.reshape(sum_to(xp, d, own), shape)
    return result


def _output_cotangents(
    problem: Problem, streams: dict[str, Array], d: Array, token_mask: Array | None
) -> dict[str, Array]:
    """Back through masking, normalisation and the weighted sum of reads."""
    xp, program = problem.xp, problem.program
    if token_mask is not None:
        d = xp.where(token_mask, d, xp.zeros_like(d))
    result: dict[str, Array] = {}
    if program.denominator:
        numerator = weighted_sum(program.output, streams, problem.ridge)
        denominator = weighted_sum(program.denominator, streams, problem.ridge) + problem.eps
        inverse = 1.0 / denominator
        if token_mask is not None:  # 0/0 at a skipped token would make 0·NaN below
            inverse = xp.where(token_mask, inverse, xp.zeros_like(inverse))
        d_denominator = -xp.sum(d * numerator, axis=-1, keepdims=True, dtype=d.dtype) * inverse * inverse
        d = d * inverse
        _scatter(problem, program.denominator, d_denominator, result)
    _scatter(problem, program.output, d, result)
    return {name: sum_to(xp, x, streams[name].shape) for name, x in result.items()}


def _scatter(problem: Problem, terms: tuple[tuple[str, float | None], ...], d: Array, into: dict[str, Array]) -> None:
    for name, weight in terms:
        factor = problem.ridge if weight is None else weight
        into[name] = d if factor == 1.0 else d * factor


def _input_gradients(problem: Problem, tokens: Tokens, cotangents: dict[str, Array], mask: Array | None) -> Tokens:
    """Back through masking and scaling, to the shapes and dtypes of the inputs."""
    xp = problem.xp
    result: Tokens = {}
    for name in ("q", "k", "v"):
        x, d = tokens[name], cotangents.get(name)
        if d is None:
            result[name] = xp.zeros_like(x)
            continue
        if mask is not None:
            d = xp.where(mask, d, xp.zeros_like(d))
        if name == "q":
            if problem.scale_varies:
                result["scale"] = xp.sum(d * cast(xp, x, d.dtype), axis=-1, keepdims=True, dtype=d.dtype)
            if problem.scaled:
                d = d * problem.scale
        result[name] = cast(xp, sum_to(xp, d, x.shape), x.dtype)
    return result


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


def _pull_whole(problem: Problem, d_output: Array) -> ProblemGradients:
    """mask="none": a read a_tᵀ Σ_j b_j c_jᵀ is three such reads backwards."""
    xp, program, mask = problem.xp, problem.program, problem.token_mask
    streams = problem.streams(problem.q, problem.k, problem.v, mask)
    setting = packed_setting(problem)
    for read in program.reads:
        state = program.state(read.state)
        streams[read.result] = whole(setting, streams[read.query], streams[state.key], streams[state.value])
    cotangents = _output_cotangents(problem, streams, cast(xp, d_output, problem.dtype), mask)
    for read in reversed(program.reads):
        state, d = program.state(read.state), cotangents.pop(read.result)
        a, b, c = streams[read.query], streams[state.key], streams[state.value]
        for name, x in (
            (read.query, whole(setting, d, c, b)),
            (state.key, whole(setting, c, d, a)),
            (state.value, whole(setting, b, a, d)),
        ):
            x = sum_to(xp, x, streams[name].shape)
            cotangents[name] = x if name not in cotangents else cotangents[name] + x
    found = _input_gradients(problem, {"q": problem.q, "k": problem.k, "v": problem.v}, cotangents, mask)
    scale = xp.sum(found["scale"], dtype=problem.dtype) if "scale" in found else None
    return ProblemGradients(found["q"], found["k"], found["v"], None, {}, scale)


def pull_empty(problem: Problem, d_final: States | None) -> ProblemGradients:
    """The gradient of a call on no tokens: the final state is the initial one."""
    xp, given, d_final = problem.xp, problem.initial or {}, d_final or {}
    return ProblemGradients(
        xp.zeros_like(problem.q),
        xp.zeros_like(problem.k),
        xp.zeros_like(problem.v),
        None if problem.log_decay is None else xp.zeros_like(problem.log_decay),
        {
            symbol: sum_to(xp, d_final[symbol], x.shape) + 0.0 if symbol in d_final else xp.zeros_like(x)
            for symbol, x in given.items()  # a sum, as the caller keeps the cotangent
        },
        xp.zeros((), dtype=problem.dtype, **problem.placed) if problem.scale_varies else None,
    )

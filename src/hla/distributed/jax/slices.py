"""One device's part of a call: its slice is summed up, the summaries travel, and the operator runs on the slice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from hla import arrays
from hla.backends import selection
from hla.backends.jax.namespace import XP
from hla.checks import Checked, check_call, check_offsets, check_state
from hla.chunkwise import chunk, default_chunk, token_arrays
from hla.decays import Decays
from hla.distributed.jax.exchange import EXCHANGES, Axis
from hla.distributed.rounds import Round, rounds
from hla.errors import DTypeError, OptionError, message
from hla.family import Program, steps
from hla.loops import Tokens, fold
from hla.options import Options
from hla.problem import Problem, States
from hla.rules import RHO
from hla.states import finished


class Call(NamedTuple):
    """An operator and how its slices are joined."""

    operator: str
    order: int | None
    axis_name: Any
    exchange: str
    method: str


def run(call: Call, q: Any, k: Any, v: Any, options: Options) -> Any:
    """Output (and the last state of the whole sequence) of a call on one device's slices."""
    axis = Axis.called(call.axis_name)
    packed = options.cu_seqlens is not None
    alone = packed and options.segment_ids is None  # both are refused
    own = replace(options, cu_seqlens=None, initial_state=None) if alone else options
    checked = check_call(call.operator, q, k, v, own, call.order)
    if arrays.family(v) != "jax":
        raise DTypeError(message("q, k, v", "JAX arrays", arrays.family(v), "Convert them with jax.numpy.asarray."))
    _check_spread(axis, q, k, v)
    problem, batch = _joined(checked.problem, options.segment_ids, axis), checked.batch
    if problem.program.spec.mask == "none":
        if packed or problem.starts is not None:
            raise OptionError(
                message("mask", '"causal" or "prefix" for packed sequences over devices', '"none"', "Use one of these.")
            )
        return arrays.moveaxis(XP, _everything(problem, axis), -2, checked.axis)
    several = packed and (options.return_state or options.initial_state is not None)
    if packed:
        offsets = check_offsets(options.cu_seqlens, axis.size * problem.length)
        if options.initial_state is not None:
            spec = problem.program.spec
            initial = check_state(options.initial_state, spec, v, batch, q, v, problem.dtype, offsets)
            problem = replace(problem, initial=initial)
        offsets = jnp.asarray(offsets)
        problem = _along_sequences(problem, offsets, axis, len(batch)) if several else _bounded(problem, offsets, axis)
        batch = (offsets.shape[0] - 1, *batch) if several else batch
    entering = _entering(problem, rounds(problem.program.spec, call.method), call.exchange, axis)
    output, states = _on_backend(checked, replace(problem, initial=entering), options)
    if several:  # a token belongs to one sequence, its output in the others is zero
        output = jnp.sum(output, axis=0)
    output = arrays.moveaxis(XP, output, -2, checked.axis)
    if not options.return_state:
        return output
    last = {symbol: axis.last(axis.spread(x)) for symbol, x in states.items()}
    return output, finished(XP, problem.program, last, batch)


def _on_backend(checked: Checked, problem: Problem, options: Options) -> tuple[Array, States]:
    """The operator on the slice, by the backend that the options, settings or circumstances choose."""
    problem = replace(problem, xp=checked.problem.xp)
    backend = selection.resolve(selection.call_of(problem, checked.form), options.backend)
    output, states = backend.runner(problem.program.spec.operator)(problem)
    return output, states


def _check_spread(axis: Axis, *inputs: Array) -> None:
    """An error where JAX knows that all devices hold the same tokens: then these are no slices."""
    names = _varies_over(axis.rank)
    if axis.size > 1 and names and not any(names & _varies_over(x) for x in inputs):
        raise OptionError(
            message(
                "q, k, v",
                f"slices, spread over axis {axis.name!r}",
                "the same on all of its devices",
                f"Name {axis.name!r} at the time axis in shard_map's in_specs.",
            )
        )


def _varies_over(x: Array) -> frozenset[Any]:
    """The mesh axes along which x may differ, where `jax.shard_map` keeps track (check_vma=True)."""
    kind = jax.typeof(x)
    found: frozenset[Any] = getattr(kind, "vma", frozenset())  # before JAX 0.10
    return getattr(getattr(kind, "manual_axis_type", None), "varying", found)


# Packed sequences


def _joined(problem: Problem, segment_ids: Any, axis: Axis) -> Problem:
    """The problem, in JAX's namespace, whose slice starts a packed sequence only where the ids before it are others."""
    problem = replace(problem, xp=XP)
    if segment_ids is None or not problem.length:
        return problem
    ids, starts = axis.spread(jnp.asarray(segment_ids)), jnp.asarray(problem.starts)
    other = (ids[..., :1] != axis.from_before(ids[..., -1:], 1)) | (axis.rank == 0)
    first = jnp.broadcast_to(other[..., None], starts[..., :1, :].shape)
    return replace(problem, starts=jnp.concat([first, starts[..., 1:, :]], axis=-2))


def _places(problem: Problem, axis: Axis) -> Array:
    """Of the slice's tokens in the whole sequence."""
    return axis.rank * problem.length + jnp.arange(problem.length)


def _bounded(problem: Problem, offsets: Array, axis: Axis) -> Problem:
    """Packed sequences by their offsets in the whole, as boundaries."""
    starts = jnp.any(_places(problem, axis)[:, None] == offsets[None, :-1], axis=-1, keepdims=True)
    return replace(problem, starts=starts)


def _along_sequences(problem: Problem, offsets: Array, axis: Axis, rank: int) -> Problem:
    """Packed sequences by their offsets in the whole, as an axis before the batch: each skips the others' tokens."""
    length, count = problem.length, offsets.shape[0] - 1
    sequence = jnp.sum(offsets[None, 1:] <= _places(problem, axis)[:, None], axis=-1)
    mask = jnp.reshape(sequence == jnp.arange(count)[:, None], (count, *(1,) * rank, length, 1))
    if problem.token_mask is not None:
        mask = jnp.logical_and(mask, problem.token_mask)
    log_decay = problem.log_decay
    if log_decay is not None and problem.constant:
        log_decay = jnp.broadcast_to(log_decay, (*log_decay.shape[:-2], length, 1))
    v = jnp.broadcast_to(problem.v, (count, *(1,) * (rank + 2 - problem.v.ndim), *problem.v.shape))
    return replace(problem, v=v, token_mask=mask, log_decay=log_decay, constant=log_decay is None)


# States


def _everything(problem: Problem, axis: Axis) -> Array:
    """The output for mask "none": every state is a sum over all tokens."""
    streams = problem.streams(problem.q, problem.k, problem.v, problem.token_mask)
    sums: States = {}
    for symbol, state, read in steps(problem.program):
        if symbol not in sums:
            key, value = streams[state.key], streams[state.value]
            sums[symbol] = axis.total(axis.spread(XP.matmul(jnp.matrix_transpose(key), value)))
        if read is not None:
            streams[read.result] = XP.matmul(streams[read.query], sums[symbol])
    output: Array = problem.finish(streams, problem.token_mask)
    return output


def _entering(problem: Problem, plan: tuple[Round, ...], exchange: str, axis: Axis) -> States:
    """The states before the slice's first token."""
    through = axis.spread(_through(problem))
    kept = {state.symbol for state in problem.program.states}
    entering: States = {}
    for program, rule in plan:
        sums = _sums(problem, program, entering)
        own = {RHO: through, **{symbol: axis.spread(sums[symbol]) for symbol in rule.symbols}}
        initial = {symbol: jnp.zeros_like(own[symbol]) for symbol in rule.symbols if symbol in kept}
        if problem.initial is not None:
            initial = {s: zero + arrays.cast(XP, problem.initial[s], problem.dtype) for s, zero in initial.items()}
        entering |= EXCHANGES[exchange](rule, own, initial, axis)
    return entering


def _through(problem: Problem) -> Array:
    """ρ, the decay through the whole slice: (*b, 1, 1)."""
    log_decay = problem.masked_log_decay(problem.log_decay, problem.token_mask)
    if log_decay is None:
        rho = jnp.ones((1, 1), problem.dtype)
    elif problem.constant:
        rho = jnp.exp(problem.length * log_decay)
    else:
        rho = jnp.exp(jnp.sum(log_decay, axis=-2, keepdims=True))
    if problem.starts is None:
        return jnp.asarray(rho)
    return jnp.where(jnp.any(problem.starts, axis=-2, keepdims=True), jnp.zeros_like(rho), rho)


def _sums(problem: Problem, program: Program, entering: States) -> States:
    """The states of `program` after the slice: those that are known enter it, the others start from zero."""
    decays, tokens = Decays.of(problem), token_arrays(problem)

    def after(states: States, tokens: Tokens) -> States:
        mask = tokens["token_mask"]
        streams = problem.streams(tokens["q"], tokens["k"], tokens["v"], mask)
        log_decay = problem.masked_log_decay(tokens["log_decay"], mask)
        decay = decays.chunk(int(streams["v"].shape[-2]), log_decay, tokens["starts"])
        return chunk(XP, program, decay, states, streams)

    def body(states: States, tokens: Tokens, _: None) -> tuple[States, Tokens, None]:
        return after(states, tokens), {}, None

    # What a scan carries keeps its type, and how an array is spread is part of it: zeros like the states after a token.
    # XLA drops the token, which is made of all.
    token = {n: None if x is None else jnp.sum(x, axis=-2, dtype=x.dtype, keepdims=True) for n, x in tokens.items()}
    width = _widths(program, int(problem.q.shape[-1]), int(problem.v.shape[-1]))
    states = {s.symbol: jnp.zeros((width[s.key], width[s.value]), problem.dtype) for s in program.states}
    for _ in range(2 if any(read.strict for read in program.reads) else 1):  # these read what was before the token
        found = after({s: entering.get(s, x) for s, x in states.items()}, token)
        states = {symbol: jnp.zeros_like(x) for symbol, x in found.items()}
    states = {s: entering.get(s, x) for s, x in states.items()}
    if not problem.length:
        return states
    step = problem.chunk_size or default_chunk(problem)
    sums: States = fold(XP, body, states, tokens, problem.length, step)[0]
    return sums


def _widths(program: Program, d: int, dv: int) -> dict[str, int]:
    """The last axis of every stream."""
    width = {"q": d, "k": d, "v": dv, "one": 1}
    for _, state, read in steps(program):
        if read is not None:
            width[read.result] = width[state.value]
    return width

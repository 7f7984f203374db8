r"""Form "scan": an associative scan over segments of `chunk_size` tokens (1 = token level), in logarithmic depth.

All segments are summarised at once, scanned with `hla.scan.associative_scan` under `segments.combine`, and the states
that result are where each segment's own tokens start from. Operators without segments of matrix size (orders above 3,
the printed third order) scan stage by stage: a stage's state is a decayed sum once its two streams are known, which is
linear attention's segment.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hla import rules, segments
from hla.arrays import Array, Namespace, broadcast_shapes
from hla.chunkwise import advance, chunk, default_chunk, token_arrays
from hla.decays import Decay, Decays
from hla.family import Program, Spec, State, steps
from hla.problem import Problem, States
from hla.scan import associative_scan


def run(problem: Problem) -> tuple[Array, States]:
    """The output (*batch, T, dv) and the final states."""
    xp = problem.xp
    step = int(min(problem.chunk_size or default_chunk(problem), problem.length))  # no symbol of a tracer: a key below
    cut = _cut(problem, step)
    tokens = token_arrays(cut)
    decays = Decays.of(cut)
    streams = cut.streams(tokens["q"], tokens["k"], tokens["v"], cut.token_mask)
    log_decay = cut.masked_log_decay(tokens["log_decay"], cut.token_mask)
    decay = decays.chunk(step, log_decay, cut.starts)
    spec = problem.program.spec
    # The printed G ← … + D_B C_A has no ρ that a boundary could select by: a NaN in C_A would get past D_B = 0.
    boundaries = spec.definition == "as_printed" and problem.starts is not None
    if rules.has_matrices(spec) and not boundaries:
        entering, final = _scan_segments(problem, cut, decay, streams)
    else:
        entering, final = _scan_stages(problem, cut, decay, streams)
    _, output = advance(cut, decays, entering, tokens)
    output = xp.reshape(output, (*output.shape[:-3], output.shape[-3] * step, output.shape[-1]))
    return output[..., : problem.length, :], final


def _cut(problem: Problem, step: int) -> Problem:
    """The problem with time cut into an axis of segments before it; skipped tokens fill the last one."""
    xp, length = problem.xp, problem.length
    count = -(-length // step)
    missing = count * step - length

    def cut(x: Array | None) -> Array | None:
        if x is None:
            return None
        if missing:
            x = xp.concat([x, xp.zeros_like(x[..., :missing, :])], axis=-2)
        return xp.reshape(x, (*x.shape[:-2], count, step, x.shape[-1]))

    mask, log_decay = problem.token_mask, problem.log_decay
    if missing and mask is None:
        mask = xp.ones((length, 1), dtype=xp.bool, **problem.placed)
        if log_decay is not None and problem.constant:
            log_decay = xp.broadcast_to(log_decay, (*log_decay.shape[:-2], length, 1))
    constant = log_decay is None or log_decay.shape[-2] != length
    return replace(
        problem,
        q=cut(problem.q),
        k=cut(problem.k),
        v=cut(problem.v),
        token_mask=cut(mask),
        starts=cut(problem.starts),
        log_decay=log_decay if log_decay is None else log_decay[..., None, :, :] if constant else cut(log_decay),
        constant=constant,
        initial=None,
    )


def _after_and_entering(problem: Problem, initial: Array, after: Array) -> tuple[Array, Array]:
    """(states entering each segment, final state) from the initial state and those after each segment (…, n, d, dv)."""
    xp = problem.xp
    first = xp.broadcast_to(initial[..., None, :, :], (*after.shape[:-3], 1, *after.shape[-2:]))
    return xp.concat([first, after[..., :-1, :, :]], axis=-3), after[..., -1, :, :]


def _scan_of(xp: Namespace) -> Callable[..., Any]:
    """The namespace's own associative scan, or ours."""
    return getattr(xp, "associative_scan", associative_scan)


def _scan_segments(problem: Problem, cut: Problem, decay: Decay, streams: dict[str, Array]) -> tuple[States, States]:
    xp, spec = problem.xp, problem.program.spec
    found = rules.rule(spec)
    count = cut.v.shape[-3]
    elements = {
        symbol: xp.broadcast_to(x, (*x.shape[:-3], count, *x.shape[-2:]))
        for symbol, x in segments.summarise_chunk(xp, found, decay, streams, problem.dtype, problem.placed).items()
    }
    elements = _alike(problem, elements)

    def combine(earlier: States, later: States) -> States:
        return rules.combine_values(xp, found, earlier, later, found.symbols)

    prefixes = _scan_of(xp)(combine, elements, -3)
    initial = problem.initial_states()
    lifted = {symbol: x[..., None, :, :] for symbol, x in initial.items()}
    after = rules.combine_values(xp, found, lifted, prefixes, tuple(lifted))
    both = {symbol: _after_and_entering(problem, initial[symbol], x) for symbol, x in after.items()}
    return {s: x for s, (x, _) in both.items()}, {s: x for s, (_, x) in both.items()}


def _alike(problem: Problem, elements: States) -> States:
    """The fields of all segments at the batch axes that combining gives them, so that scanning keeps shapes."""
    xp = problem.xp
    batch = broadcast_shapes(*(tuple(x.shape[:-3]) for x in elements.values()))
    keys = broadcast_shapes(*(tuple(elements[s].shape[:-3]) for s in ("rho", "S", "D") if s in elements))
    return {
        s: xp.broadcast_to(x, (*(keys if s in ("rho", "S", "D") else batch), *x.shape[-3:]))
        for s, x in elements.items()
    }


_ADDITIVE = rules.rule(Spec("linear_attention"))


def _scan_stages(problem: Problem, cut: Problem, decay: Decay, streams: dict[str, Array]) -> tuple[States, States]:
    xp, program = problem.xp, problem.program
    streams = dict(streams)
    initial = problem.initial_states()
    entering: States = {}
    final: States = {}
    for symbol, state, read in steps(program):
        if symbol not in entering:
            entering[symbol], final[symbol] = _scan_state(problem, cut, decay, state, initial[symbol], streams)
        if read is not None:
            single = Program(program.spec, (state,), (read,), ())
            chunk(xp, single, decay, entering, streams)
    return entering, final


def _scan_state(
    problem: Problem, cut: Problem, decay: Decay, state: State, initial: Array, streams: dict[str, Array]
) -> tuple[Array, Array]:
    xp = problem.xp
    single = Program(problem.program.spec, (state,), (), ())
    zero = xp.zeros(initial.shape[-2:], dtype=problem.dtype, **problem.placed)
    own = chunk(xp, single, decay, {state.symbol: zero}, streams)[state.symbol]
    own = xp.broadcast_to(own, (*initial.shape[:-2], cut.v.shape[-3], *own.shape[-2:]))
    through = decay.through(state.power)
    rho = xp.ones_like(own[..., :1, :1]) if through is None else xp.broadcast_to(through, (*own.shape[:-2], 1, 1))

    def combine(earlier: States, later: States) -> States:
        return rules.combine_values(xp, _ADDITIVE, earlier, later, ("P",))

    prefixes = _scan_of(xp)(combine, {"rho": rho, "P": own}, -3)
    after = rules.combine_values(xp, _ADDITIVE, {"P": initial[..., None, :, :]}, prefixes, ("P",))["P"]
    return _after_and_entering(problem, initial, after)

r"""What the tokens of one slice add to states, from inputs that are kept and nothing else.

A state whose streams are inputs is one product over all tokens, Σ_t Γ(T−1,t) b_t c_tᵀ. One that takes the result of a
read is run chunk by chunk, as the operators are; on Triton as the operator itself.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hla import gradients, packing
from hla.adjoint import ChunkAdjoint, Rate
from hla.arrays import broadcast_shapes, sum_to, undisturbed
from hla.backends import selection
from hla.backends.torch.autograd import Split
from hla.backends.torch.flattening import Flat
from hla.backends.torch.namespace import PLAIN, Namespace
from hla.checks import Checked
from hla.chunkwise import chunk, default_chunk, read_chunk, token_arrays
from hla.decays import Decays
from hla.family import Program, Read, program
from hla.loops import Tokens, fold
from hla.options import Options
from hla.problem import Problem, States
from hla.rules import RHO, Rule

_INPUTS = ("q", "k", "v", "one")
_BLOCK = 4096
"""tokens in one product, so that their copies in the dtype of sums stay small"""


def slice_sums(checked: Checked, options: Options, part: Program, rule: Rule, known: States) -> States:
    """ρ and the rule's fields, summed from zero over the slice; `known` are states that enter it. With packed sequences
    by their offsets, along a leading axis."""
    problem = checked.problem
    if isinstance(problem.cu_seqlens, list):
        offsets = problem.cu_seqlens
        found = []
        for n, single in enumerate(packing.sequences(problem, offsets)):
            entering = {s: x[n] for s, x in known.items()}
            found.append(slice_sums(checked._replace(problem=single), options, part, rule, entering))
        return {s: torch.stack([x[s] for x in found]) for s in found[0]}
    sizes = field_shapes(problem, part)
    if not problem.length:
        zeros = {s: problem.v.new_zeros(sizes[s], dtype=problem.dtype) for s in rule.symbols}
        return {RHO: problem.v.new_ones(decay_shape(problem), dtype=problem.dtype), **zeros}
    found_states: States = {}
    coupled, missing = _coupled(part, rule.symbols)
    if missing:
        found_states = _run(checked, options, coupled, known)
    result = {RHO: _through(problem)}
    span: Any = None
    for state in part.states:
        if state.symbol not in rule.symbols:
            continue
        if state.symbol not in found_states:
            if span is None:
                span = (_suffix(problem),)
            b, c = _stream(problem, state.key), _stream(problem, state.value)
            assert state.power <= 1  # others are of reads
            total = DecayedSum.of(b, c, span[0] if state.power else None, problem.token_mask, problem.dtype)
            for name in (state.key, state.value):
                if name == "q" and problem.scaled:
                    total = total * problem.scale
            found_states[state.symbol] = total
        x = found_states[state.symbol]
        result[state.symbol] = x if x.shape == sizes[state.symbol] else x.expand(sizes[state.symbol])
    return result


def field_shapes(problem: Problem, part: Program) -> dict[str, tuple[int, ...]]:
    """The shapes of a program's states over one sequence of this problem."""
    given = replace(problem, program=part, cu_seqlens=None, initial=None).shapes().state
    own = problem.shapes().state  # in which initial states have a say
    return {s: own.get(s, shape) for s, shape in given.items()}


def decay_shape(problem: Problem) -> tuple[int, ...]:
    """The shape of ρ."""
    return (*broadcast_shapes(*problem.token_batches()), 1, 1)


def _through(problem: Problem) -> Tensor:
    """ρ, the decay through the slice."""
    dtype, shape = problem.dtype, decay_shape(problem)
    log_decay = problem.masked_log_decay(problem.log_decay, problem.token_mask)
    if log_decay is None:
        rho = problem.v.new_ones((1, 1), dtype=dtype)
    elif problem.constant:
        rho = torch.exp(log_decay * problem.length)
    else:
        rho = torch.exp(log_decay.sum(-2, keepdim=True, dtype=_wide(log_decay)).to(dtype))
    if problem.starts is not None:
        rho = torch.where(problem.starts.any(-2, keepdim=True), 0.0, rho)
    found: Tensor = rho.expand(shape)
    return found


def _suffix(problem: Problem) -> Tensor | None:
    """log Γ(T−1, t), (*b, T, 1): each a sum over the tokens after t, so that a reset is no difference of infinities."""
    log_decay, length = problem.masked_log_decay(problem.log_decay, problem.token_mask), problem.length
    if log_decay is None and problem.starts is None:
        return None
    if log_decay is not None and problem.constant and problem.starts is None:
        after = torch.arange(length - 1, -1, -1, device=log_decay.device, dtype=log_decay.dtype)
        return torch.mul(after[:, None], log_decay)
    if log_decay is None:
        log_decay = problem.v.new_zeros((length, 1), dtype=problem.dtype)
    elif problem.constant:
        log_decay = log_decay.expand(*log_decay.shape[:-2], length, 1)
    if problem.starts is not None:
        log_decay = torch.where(problem.starts, float("-inf"), log_decay)
    later = torch.cat([log_decay[..., 1:, :], torch.zeros_like(log_decay[..., :1, :])], dim=-2)
    return torch.cumsum(later.flip(-2), -2, dtype=_wide(later)).flip(-2)


def _wide(x: Tensor) -> torch.dtype:
    """The dtype of running sums over many tokens."""
    return x.dtype if x.device.type == "mps" else torch.float64


def _stream(problem: Problem, name: str) -> Tensor:
    if name == "one":
        return torch.ones((), dtype=problem.v.dtype, device=problem.v.device).expand(*problem.v.shape[:-1], 1)
    x: Tensor = getattr(problem, name)
    return x


class DecayedSum(torch.autograd.Function):
    """Σ_t Γ(T−1,t) b_t c_tᵀ over tokens that are not skipped, summed and returned in `dtype`."""

    @staticmethod
    def of(b: Tensor, c: Tensor, span: Tensor | None, mask: Tensor | None, dtype: torch.dtype) -> Tensor:
        """(*b, T, d), (*b, T, dv), log Γ (*b, T, 1) → (*b, d, dv)."""
        result: Tensor = DecayedSum.apply(b, c, span, mask, dtype)  # type: ignore[no-untyped-call]
        return result

    @staticmethod
    def forward(ctx: Any, b: Tensor, c: Tensor, span: Tensor | None, mask: Tensor | None, dtype: torch.dtype) -> Tensor:
        """In blocks of tokens."""
        ctx.save_for_backward(b, c, span, mask)
        ctx.dtype = dtype
        total: Tensor | None = None
        for part in _blocks(b.shape[-2]):
            left, right, factor = _weighed(b, c, span, mask, dtype, part)
            product = (left if factor is None else left * factor).mT @ right
            total = product if total is None else total.add_(product)
        assert total is not None
        return total

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Any, ...]:
        """The primitive's gradient where nothing is read: db_t = Γ dX c_t, dc_t = Γ dXᵀ b_t."""
        with undisturbed(PLAIN, d):
            return DecayedSum._pull(ctx, d)

    @staticmethod
    def _pull(ctx: Any, d: Tensor) -> tuple[Any, ...]:
        b, c, span, mask = ctx.saved_tensors
        parts: list[tuple[Tensor, ...]] = []
        for part in _blocks(b.shape[-2]):
            left, right, factor = _weighed(b, c, span, mask, ctx.dtype, part)
            d_left, d_right = right @ d.mT, left @ d
            if factor is not None:
                d_left, d_right = d_left * factor, d_right * factor
            if mask is not None:
                d_left, d_right = (torch.where(mask[..., part, :], x, 0.0) for x in (d_left, d_right))
            made = [_like(d_left, b, part), _like(d_right, c, part)]
            if span is not None and ctx.needs_input_grad[2]:
                made.append(_like((d_left * left).sum(-1, keepdim=True), span, part))
            parts.append(tuple(made))
        joined = [torch.cat(x, dim=-2) if len(x) > 1 else x[0] for x in zip(*parts, strict=True)]
        return joined[0], joined[1], joined[2] if len(joined) > 2 else None, None, None


def _blocks(length: int) -> list[slice]:
    return [slice(start, min(start + _BLOCK, length)) for start in range(0, length, _BLOCK)]


def _weighed(
    b: Tensor, c: Tensor, span: Tensor | None, mask: Tensor | None, dtype: torch.dtype, part: slice
) -> tuple[Tensor, Tensor, Tensor | None]:
    """b and c of some tokens, and Γ; 0 where a token is skipped or cut off, whatever it holds."""
    left, right = b[..., part, :].to(dtype), c[..., part, :].to(dtype)
    seen = None if mask is None else mask[..., part, :]
    factor = None
    if span is not None:
        factor = torch.exp(span[..., part, :]).to(dtype)
        seen = factor != 0 if seen is None else seen & (factor != 0)
    if seen is not None:
        left, right = torch.where(seen, left, 0.0), torch.where(seen, right, 0.0)
    return left, right, factor


def _like(d: Tensor, x: Tensor, part: slice) -> Tensor:
    shape = (*x.shape[:-2], part.stop - part.start, x.shape[-1])
    result: Tensor = sum_to(PLAIN, d, shape)
    return result.to(x.dtype)


@cache
def _coupled(part: Program, symbols: tuple[str, ...]) -> tuple[Program, bool]:
    """What of a program is needed for the states that take results of reads, and whether there are any."""
    wanted = {s.symbol for s in part.states if s.symbol in symbols and {s.key, s.value} - {*_INPUTS}}
    streams = {name for s in part.states if s.symbol in wanted for name in (s.key, s.value)}
    reads: list[Read] = []
    for read in reversed(part.reads):
        if read.result in streams:
            state = part.state(read.state)
            streams |= {read.query, state.key, state.value}
            wanted.add(read.state)
            reads.insert(0, read)
    states = tuple(s for s in part.states if s.symbol in wanted)
    return Program(part.spec, states, tuple(reads), ()), bool(reads)


def _run(checked: Checked, options: Options, part: Program, known: States) -> States:
    """The states of `part` after the slice; those that are not known start from zero."""
    problem = checked.problem
    whole = program(problem.program.spec)
    if {s.symbol for s in part.states} <= {s.symbol for s in whole.states}:
        backend = selection.resolve(selection.call_of(problem, checked.form), options.backend)
        if backend.spec.name == "triton":  # the output is not used, but has to be finite
            started = replace(problem, initial=known or None, return_state=True, eps=1e30)
            states: States = backend.runner(whole.spec.operator)(started)[1]
            return states
    own = {s.symbol for s in part.states}
    initial = {s: x for s, x in known.items() if s in own}
    return Sums.of(replace(problem, program=part, initial=initial or None))


class Sums(torch.autograd.Function):
    """(split, *tensors) → final states of a program without output: one node, as that of the operators."""

    @staticmethod
    def of(problem: Problem) -> States:
        """The final states."""
        with undisturbed(problem.xp, problem.v):
            split = Split(problem)
            found = Sums.apply(split, *split.tensors(problem))  # type: ignore[no-untyped-call]
            return dict(zip(split.states, found, strict=True))

    @staticmethod
    def forward(ctx: Any, split: Split, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Chunk by chunk; the states that enter each are kept."""
        flat = Flat(split.problem(tensors, Namespace(eager=True)))
        states, entering = _run_chunks(flat.problem)
        kept = [entering[i][symbol] for i in range(len(entering)) for symbol in split.states]
        ctx.split, ctx.count = split, len(tensors)
        ctx.save_for_backward(*tensors, *kept)
        return tuple(flat.restore(states[symbol]) for symbol in split.states)

    @staticmethod
    def backward(ctx: Any, *d_states: Tensor) -> tuple[Any, ...]:
        """By plain operations where a graph is wanted."""
        split, saved = ctx.split, ctx.saved_tensors
        d_final = dict(zip(split.states, d_states, strict=True))
        if torch.is_grad_enabled():
            problem = split.problem(saved[: ctx.count], PLAIN)
            with undisturbed(problem.xp, problem.v):
                found = _pull(problem, d_final, _run_chunks(problem)[1])
        else:
            problem = split.problem(saved[: ctx.count], Namespace(eager=True))
            each = len(split.states)
            pieces = (saved[i : i + each] for i in range(ctx.count, len(saved), each))
            entering = {i: dict(zip(split.states, piece, strict=True)) for i, piece in enumerate(pieces)}
            with undisturbed(problem.xp, problem.v):
                flat = Flat(problem)
                found = _pull(flat.problem, {s: flat.flat(d) for s, d in d_final.items()}, entering)
                found = flat.restore_gradients(found)
        given = {**found._asdict(), "token_mask": None, "starts": None}
        return (None, *(given[name] for name in split.fields), *(found.initial[s] for s in split.symbols))


def _streams(problem: Problem, tokens: Tokens) -> tuple[dict[str, Tensor], Tensor | None]:
    """The input streams of some tokens, and their log-decays."""
    mask = tokens["token_mask"]
    streams = problem.streams(tokens["q"], tokens["k"], tokens["v"], mask)
    streams["one"] = torch.ones_like(streams["v"][..., :1]) if mask is None else mask.to(problem.dtype)
    return streams, problem.masked_log_decay(tokens["log_decay"], mask)


def _run_chunks(problem: Problem) -> tuple[States, Any]:
    """The final states, and those that enter each chunk."""
    decays = Decays.of(problem)

    def body(states: States, tokens: Tokens, _: None) -> tuple[States, Tokens, States]:
        streams, log_decay = _streams(problem, tokens)
        decay = decays.chunk(int(tokens["v"].shape[-2]), log_decay, tokens["starts"])
        return chunk(problem.xp, problem.program, decay, states, streams), {}, states

    step = problem.chunk_size or default_chunk(problem)
    start = problem.initial_states()
    states, _, entering = fold(problem.xp, body, start, token_arrays(problem), problem.length, step)
    return states, entering


def _pull(problem: Problem, d_final: States, entering: Any) -> gradients.ProblemGradients:
    """As `hla.gradients.pull`, for a program without output."""
    xp, decays = problem.xp, Decays.of(problem)
    batch = None if problem.log_decay is None else broadcast_shapes(*problem.token_batches())

    def body(leaving: States, tokens: Tokens, before: States) -> tuple[States, Tokens, None]:
        length = int(tokens["v"].shape[-2])
        streams, log_decay = _streams(problem, tokens)
        decay = decays.chunk(length, log_decay, tokens["starts"])
        scores = read_chunk(xp, problem.program, decay, before, streams)
        rate = None if batch is None else Rate(xp, decays, batch)
        adjoint = ChunkAdjoint(xp, decay, streams, scores, before, leaving, rate)
        adjoint.pull(problem.program, {})
        outputs = gradients._input_gradients(problem, tokens, adjoint.cotangents, tokens["token_mask"])
        if rate is not None:
            outputs["log_decay"] = rate.total(length)
        return adjoint.states, outputs, None

    step = problem.chunk_size or default_chunk(problem)
    tokens = token_arrays(problem)
    initial, outputs, _ = fold(xp, body, d_final, tokens, problem.length, step, reverse=True, notes=entering)
    return gradients.ProblemGradients(
        outputs["q"],
        outputs["k"],
        outputs["v"],
        gradients._decay_gradient(problem, outputs.get("log_decay")),
        {symbol: sum_to(xp, initial[symbol], x.shape) for symbol, x in (problem.initial or {}).items()},
        xp.sum(outputs["scale"], dtype=problem.dtype) if "scale" in outputs else None,
    )

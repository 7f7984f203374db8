"""What a call costs: arithmetic, memory, and what it is compared with. Counted from the programs of `hla.family`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from hla import arrays, traffic
from hla.arrays import FLOATING
from hla.checks import spec_of
from hla.distributed.rounds import Round, rounds
from hla.errors import OptionError, message
from hla.family import Program, program, shapes, steps
from hla.options import FORMS, Options
from hla.rules import Rule

_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
_DEFAULT_CHUNK = 64
_EXCHANGES = ("gather", "doubling")
_LIBRARIES = ("jax", "torch")


@dataclass(frozen=True, slots=True)
class Cost:
    """What `cost` answers; for one sequence with all its heads.

    On several devices, flops, activation_bytes and the two of traffic are those of one device, with a slice of ⌈T/P⌉
    tokens; state_bytes, kv_cache_bytes and crossover are about the whole sequence, as on one device.

    Attributes:
        flops: floating-point operations of the forward pass, a multiply-add counted as two.
        state_bytes: the state, in float32, or float64 for float64 inputs.
        activation_bytes: peak memory of the forward pass beyond inputs, output and states.
        kv_cache_bytes: softmax attention's key-value cache at T tokens in the inputs' dtype: what the state replaces.
        crossover: the number of tokens from which causal softmax attention takes more flops than this.
        traffic_bytes: what the forward pass has to move between memory and processor at least; a decode step is
            ``form="recurrent"`` with ``T=1``.
        backward_traffic_bytes: the same of the gradient, chunkwise.
        devices: P.
        rounds: exchanges of the forward pass one after another, each waiting for the one before; 0 on one device. The
            backward pass has as many.
        sent_bytes: what a device sends in the forward pass, whatever T.
        backward_sent_bytes: what it sends in the backward pass.
        device_bytes: memory of the forward pass on one device: its slices of q, k, v and o, its state, the summaries it
            holds, and activation_bytes.
    """

    flops: int
    state_bytes: int
    activation_bytes: int
    kv_cache_bytes: int
    crossover: int
    traffic_bytes: int
    backward_traffic_bytes: int
    devices: int
    rounds: int
    sent_bytes: int
    backward_sent_bytes: int
    device_bytes: int


def cost(
    operator: str,
    *,
    T: int,
    d: int,
    dv: int,
    heads: int = 1,
    form: str = "chunkwise",
    chunk_size: int | None = None,
    dtype: str = "float32",
    order: int | None = None,
    normalize: bool = False,
    mask: str = "causal",
    definition: str = "exact",
    ridge: float = 0.0,
    devices: int = 1,
    exchange: str = "gather",
    method: str = "auto",
    library: str = "jax",
) -> Cost:
    r"""Flops, state and memory of a call (§5).

    Per token and head, with C tokens per chunk, a read of a state d×e costs 2·C·e + 2·d·e flops and 2·C·d for its
    scores (shared by reads of the same pair), a state's update 2·d·e. Linear attention: 2C(d + dv) + 4·d·dv; HLA₂ twice
    that for d = dv. Causal softmax attention is counted as T(d + dv) per token, half of all T² pairs.

    Traffic, chunkwise: linear attention 3(d + dv) + 2·d·dv/C numbers per token and head, HLA₂ 5d + 3dv + 2·d·dv/C, AHLA
    2(d + dv), all in the inputs' dtype; recurrent: each state read and written for every token.

    Over P devices (`hla.distributed`) a slice's summary has n numbers per head, in float32 or float64: the fields of a
    segment, and ρ. To gather all of them a device sends (P − 1)·n, in one exchange; doubling sends n in each of
    ⌈log₂(P − 1)⌉ + 1. JAX runs the exchanges backwards for the gradient, which sends as much again; PyTorch sends the
    cotangents of the states alone, (P − 1) states. Asking for the last state adds 2(P − 1)/P states in JAX, and another
    (P − 1) states to PyTorch's gradient. Mask "none" adds its states up: in JAX 2(P − 1)/P of them each way, one
    exchange per stage; in PyTorch (P − 1) of them forwards and 2(P − 1) backwards, one exchange per state, and
    forwards one more number in each, whatever the heads.

    Args:
        operator: the operator's name.
        T: tokens.
        d: features of q and k.
        dv: features of v.
        heads: number of heads.
        form: "chunkwise" ("auto" is the same), "recurrent", "scan" or "parallel".
        chunk_size: tokens per chunk, 64 by default.
        dtype: of the inputs: "float16", "bfloat16", "float32" or "float64".
        order: of "higher_order".
        normalize: as for the operator.
        mask: as for the operator.
        definition: as for the operator.
        ridge: as for the operator.
        devices: P, over which the sequence is spread.
        exchange: "gather" or "doubling", as for `hla.distributed.jax`.
        method: "auto", "segments" or "stages", as for `hla.distributed`.
        library: "jax" or "torch": whose backward pass sends.

    Returns:
        A `Cost`.

    Raises:
        OptionError: an unknown operator, form, dtype, exchange, method or library, or a size below 1 (T below 0).

    Example:
        >>> import hla
        >>> c = hla.cost("hla2", T=4096, d=64, dv=64, heads=8)
        >>> c.state_bytes, c.kv_cache_bytes, c.crossover
        (262144, 16777216, 512)
        >>> c = hla.cost("hla2", T=10**7, d=64, dv=64, heads=8, devices=64)
        >>> c.rounds, c.sent_bytes
        (1, 24774624)
    """
    sizes = (("T", T, 0), ("d", d, 1), ("dv", dv, 1), ("heads", heads, 1), ("devices", devices, 1))
    for name, size, least in sizes:
        if not arrays.is_integer(size) or size < least:
            raise OptionError(message(name, f"an integer ≥ {least}", repr(size), "Pass a size."))
    if chunk_size is not None and (not arrays.is_integer(chunk_size) or chunk_size < 1):
        raise OptionError(message("chunk_size", "an integer ≥ 1 or None", repr(chunk_size), "Pass a size."))
    T, d, dv, heads, devices = int(T), int(d), int(dv), int(heads), int(devices)
    for name, word, known in (
        ("form", form, FORMS),
        ("dtype", dtype, FLOATING),
        ("exchange", exchange, _EXCHANGES),
        ("library", library, _LIBRARIES),
    ):
        if word not in known:
            raise OptionError(message(name, f"one of {', '.join(known)}", repr(word), "Check the spelling."))
    if library == "torch" and exchange != "gather":
        raise OptionError(message("exchange", '"gather" with library="torch"', repr(exchange), "Only JAX has others."))
    options = Options(mask=mask, definition=definition, normalize=normalize, ridge=ridge)
    found = program(spec_of(operator, options, order))
    plan = rounds(found.spec, method)
    tokens = -(-T // devices)
    longest = {"recurrent": 1, "parallel": max(tokens, 1)}.get(form, int(chunk_size or _DEFAULT_CHUNK))
    chunk = min(longest, max(tokens, 1))
    wide = 8 if dtype == "float64" else 4
    state = 0 if mask == "none" else _state_numbers(found, d, dv)
    in_long_sequences = ("chunkwise", _DEFAULT_CHUNK) if form == "parallel" else (form, longest)
    activation = _activation_numbers(found, d, dv, chunk, tokens, form)
    flops = _flops_per_token(found, d, dv, chunk, form)
    moved = _bytes(traffic.forward(found, d, dv, chunk, form, tokens), _BYTES[dtype], wide)
    moved_back = _bytes(traffic.backward(found, d, dv, chunk), _BYTES[dtype], wide)
    joining = _Joining(0, 0, 0, 0, 0)
    if devices > 1:
        joining = _joining(plan, d, dv, heads, devices, exchange, library)
        within = min(int(chunk_size or _DEFAULT_CHUNK), max(tokens, 1))
        for part in () if mask == "none" else plan:  # there the states are summed once anyway
            flops += _flops_per_token(part.program, d, dv, within, "chunkwise")
            forth = traffic.forward(part.program, d, dv, within, "chunkwise", tokens)
            moved += _bytes(forth, _BYTES[dtype], wide)
            moved_back += _bytes(traffic.backward(part.program, d, dv, within), _BYTES[dtype], wide)
    return Cost(
        flops=(flops * tokens + joining.flops) * heads,
        state_bytes=state * wide * heads,
        activation_bytes=activation * wide * heads,
        kv_cache_bytes=T * (d + dv) * _BYTES[dtype] * heads,
        crossover=math.ceil(_flops_per_token(found, d, dv, in_long_sequences[1], in_long_sequences[0]) / (d + dv)),
        traffic_bytes=moved * tokens * heads,
        backward_traffic_bytes=moved_back * tokens * heads,
        devices=devices,
        rounds=joining.rounds,
        sent_bytes=math.ceil(joining.sent * wide * heads),
        backward_sent_bytes=math.ceil(joining.sent_back * wide * heads),
        device_bytes=(2 * (d + dv) * tokens * _BYTES[dtype] + (state + activation) * wide) * heads
        + math.ceil(joining.held * wide * heads),
    )


class _Joining(NamedTuple):
    """What joining the slices takes, per device and head; numbers, not bytes."""

    rounds: int
    sent: int | Fraction
    sent_back: int | Fraction
    held: int | Fraction
    flops: int


def _joining(
    plan: tuple[Round, ...], d: int, dv: int, heads: int, devices: int, exchange: str, library: str
) -> _Joining:
    sizes = [shapes(part.program, (), (), (), d, dv).state for part in plan]
    sent = [sum(math.prod(size[s]) for s in part.rule.symbols) for part, size in zip(plan, sizes, strict=True)]
    if plan[0].program.spec.mask == "none":  # all devices add up
        if library == "torch":  # each state by itself, with one ρ for all heads
            count = sum(len(part.rule.symbols) for part in plan)
            forth = sum(sent) + Fraction(count, heads)
            return _Joining(count, (devices - 1) * forth, 2 * (devices - 1) * sum(sent), devices * forth, 0)
        added = Fraction(2 * (devices - 1) * sum(sent), devices)
        return _Joining(len(plan), added, added, sum(sent), 0)
    kept = {state.symbol for state in program(plan[0].program.spec).states}
    numbers = sum(sent) + len(plan)  # ρ
    states = sum(
        math.prod(size[s]) for part, size in zip(plan, sizes, strict=True) for s in part.rule.symbols if s in kept
    )
    moving = sum(_combination_flops(part.rule, size, kept) for part, size in zip(plan, sizes, strict=True))
    if exchange == "gather":
        others = devices - 1
        back = states if library == "torch" else numbers
        return _Joining(len(plan), others * numbers, others * back, devices * numbers, devices * moving)
    hops = 1 + (devices - 2).bit_length()  # ⌈log₂(P − 1)⌉
    whole = sum(
        _combination_flops(part.rule, size, set(part.rule.symbols)) for part, size in zip(plan, sizes, strict=True)
    )
    return _Joining(hops * len(plan), hops * numbers, hops * numbers, 2 * numbers, (hops - 1) * whole + moving)


def _combination_flops(found: Rule, sizes: dict[str, tuple[int, ...]], wanted: set[str]) -> int:
    """Of the matrix products when two summaries are combined."""
    total = 0
    for symbol in found.symbols:
        for term in found.terms[symbol] if symbol in wanted else ():
            first, *others = (sizes[name][::-1] if turned else sizes[name] for name, _, turned in term.factors)
            total += sum(2 * first[0] * rows * columns for rows, columns in others)
    return total


def _bytes(moved: traffic.Numbers, stored: int, wide: int) -> int:
    """Per token, rounded up."""
    return math.ceil(moved.stored * stored + moved.accumulated * wide)


def _state_numbers(found: Program, d: int, dv: int) -> int:
    return sum(shape[-2] * shape[-1] for shape in shapes(found, (), (), (), d, dv).state.values())


def _flops_per_token(found: Program, d: int, dv: int, chunk: int, form: str) -> int:
    sizes = shapes(found, (), (), (), d, dv)
    alone = form == "recurrent" or found.spec.mask == "none"  # no pairs of tokens: states only
    within = 0 if alone else chunk
    scored: set[tuple[str, str, int, bool]] = set()
    total = 0
    for symbol, state, read in steps(found):
        if read is None:
            continue
        rows, columns = sizes.state[symbol][-2:]
        pair = (read.query, state.key, state.power, read.strict)
        if pair not in scored:
            scored.add(pair)
            total += 2 * within * rows
        total += 2 * within * columns
        total += 0 if form == "parallel" and not alone else 2 * rows * columns
    updates = sum(2 * shape[-2] * shape[-1] for shape in sizes.state.values())
    if form == "scan":  # summaries of the segments, and about two combinations a segment
        updates += updates + 4 * updates // max(chunk, 1)
    return total + updates


def _activation_numbers(found: Program, d: int, dv: int, chunk: int, T: int, form: str) -> int:
    sizes = shapes(found, (), (), (), d, dv)
    widths = sum(sizes.width.values())
    pairs = {(r.query, found.state(r.state).key, found.state(r.state).power, r.strict) for r in found.reads}
    one = len(pairs) * chunk * chunk + widths * chunk
    if form == "recurrent":
        return widths
    if form == "scan":
        segments = -(-T // chunk) if T else 0
        return segments * (one + 2 * _state_numbers(found, d, dv))
    return one

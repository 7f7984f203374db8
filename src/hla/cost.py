"""What a call costs: arithmetic, memory, and what it is compared with. Counted from the programs of `hla.family`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hla import arrays, traffic
from hla.arrays import FLOATING
from hla.checks import spec_of
from hla.errors import OptionError, message
from hla.family import Program, program, shapes, steps
from hla.options import FORMS, Options

_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
_DEFAULT_CHUNK = 64


@dataclass(frozen=True, slots=True)
class Cost:
    """What `cost` answers; for one sequence with all its heads.

    Attributes:
        flops: floating-point operations of the forward pass, a multiply-add counted as two.
        state_bytes: the state, in float32, or float64 for float64 inputs.
        activation_bytes: peak memory of the forward pass beyond inputs, output and states.
        kv_cache_bytes: softmax attention's key-value cache at T tokens in the inputs' dtype: what the state replaces.
        crossover: the number of tokens from which causal softmax attention takes more flops than this.
        traffic_bytes: what the forward pass has to move between memory and processor at least; a decode step is
            ``form="recurrent"`` with ``T=1``.
        backward_traffic_bytes: the same of the gradient, chunkwise.
    """

    flops: int
    state_bytes: int
    activation_bytes: int
    kv_cache_bytes: int
    crossover: int
    traffic_bytes: int
    backward_traffic_bytes: int


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
) -> Cost:
    r"""Flops, state and memory of a call (§5).

    Per token and head, with C tokens per chunk, a read of a state d×e costs 2·C·e + 2·d·e flops and 2·C·d for its
    scores (shared by reads of the same pair), a state's update 2·d·e. Linear attention: 2C(d + dv) + 4·d·dv; HLA₂ twice
    that for d = dv. Causal softmax attention is counted as T(d + dv) per token, half of all T² pairs.

    Traffic, chunkwise: linear attention 3(d + dv) + 2·d·dv/C numbers per token and head, HLA₂ 5d + 3dv + 2·d·dv/C, AHLA
    2(d + dv), all in the inputs' dtype; recurrent: each state read and written for every token.

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

    Returns:
        A `Cost`.

    Raises:
        OptionError: an unknown operator, form or dtype, or a size below 1 (T below 0).

    Example:
        >>> import hla
        >>> c = hla.cost("hla2", T=4096, d=64, dv=64, heads=8)
        >>> c.state_bytes, c.kv_cache_bytes, c.crossover
        (262144, 16777216, 512)
    """
    for name, size, least in (("T", T, 0), ("d", d, 1), ("dv", dv, 1), ("heads", heads, 1)):
        if not arrays.is_integer(size) or size < least:
            raise OptionError(message(name, f"an integer ≥ {least}", repr(size), "Pass a size."))
    if chunk_size is not None and (not arrays.is_integer(chunk_size) or chunk_size < 1):
        raise OptionError(message("chunk_size", "an integer ≥ 1 or None", repr(chunk_size), "Pass a size."))
    T, d, dv, heads = int(T), int(d), int(dv), int(heads)
    if form not in FORMS:
        raise OptionError(message("form", f"one of {', '.join(FORMS)}", repr(form), "Check the spelling."))
    if dtype not in FLOATING:
        raise OptionError(message("dtype", f"one of {', '.join(FLOATING)}", repr(dtype), "Check the spelling."))
    options = Options(mask=mask, definition=definition, normalize=normalize, ridge=ridge)
    found = program(spec_of(operator, options, order))
    longest = {"recurrent": 1, "parallel": max(T, 1)}.get(form, int(chunk_size or _DEFAULT_CHUNK))
    chunk = min(longest, max(T, 1))
    wide = 8 if dtype == "float64" else 4
    state = 0 if mask == "none" else _state_numbers(found, d, dv)
    in_long_sequences = ("chunkwise", _DEFAULT_CHUNK) if form == "parallel" else (form, longest)
    return Cost(
        flops=_flops_per_token(found, d, dv, chunk, form) * T * heads,
        state_bytes=state * wide * heads,
        activation_bytes=_activation_numbers(found, d, dv, chunk, T, form) * wide * heads,
        kv_cache_bytes=T * (d + dv) * _BYTES[dtype] * heads,
        crossover=math.ceil(_flops_per_token(found, d, dv, in_long_sequences[1], in_long_sequences[0]) / (d + dv)),
        traffic_bytes=_bytes(traffic.forward(found, d, dv, chunk, form, T), _BYTES[dtype], wide) * T * heads,
        backward_traffic_bytes=_bytes(traffic.backward(found, d, dv, chunk), _BYTES[dtype], wide) * T * heads,
    )


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

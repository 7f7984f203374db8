r"""Segments: the summary of consecutive tokens as a monoid element (math, "Segments"; §4).

A segment of tokens A and one of the tokens B that follow combine into the segment of both; a state is moved past a
segment by the same rules. Streaming, chunking, packing, prefill and sequence parallelism are all this one fact.
`combine` is associative for every operator and every decay, with `identity` as the neutral element.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeAlias

from hla import arrays
from hla.arrays import Array, Namespace, broadcast_shapes, transpose
from hla.checks import check_call
from hla.chunkwise import chunk, default_chunk, token_arrays
from hla.decays import Decay, Decays
from hla.errors import DTypeError, OptionError, ShapeError, message
from hla.family import Spec, shapes
from hla.loops import Tokens, fold
from hla.options import read_options, unknown_keyword
from hla.problem import Problem, States
from hla.rules import RHO, STRICT, Rule, combine_values, feature_axes, field_shape, pull_values, rule
from hla.states import describe_spec, from_arrays, init_state, is_mass, is_state, state_type, to_arrays, tuple_type

Segment: TypeAlias = Any
"""A segment: a flat named tuple of arrays; `decay` is ρ = Π γ (*batch,), the other fields are those of states."""


def _rebuild(spec: tuple[Any, ...], values: tuple[Any, ...]) -> Segment:
    return segment_type(Spec(*spec))(*values)


@cache
def segment_type(spec: Spec) -> Any:
    """The class of an operator's segments."""
    name = state_type(spec).__name__.removesuffix("State") + "Segment"
    return tuple_type(name, spec, (RHO, *rule(spec).symbols), _rebuild, f"Segment of {describe_spec(spec)}.")


def is_segment(x: Any) -> bool:
    """Whether `x` is a segment of this library."""
    spec = getattr(type(x), "spec", None)
    return isinstance(spec, Spec) and type(x).__name__.endswith("Segment")


def _values(segment: Segment) -> States:
    """Arrays by symbol, with the decay as (*batch, 1, 1) and denominators with a last axis of one."""
    return {
        s: x[..., None, None] if s == RHO else x[..., None] if is_mass(s) else x
        for s, x in zip(segment.symbols, segment, strict=True)
    }


def _segment(spec: Spec, values: States) -> Segment:
    made = segment_type(spec)
    return made(
        *(values[s][..., 0, 0] if s == RHO else values[s][..., 0] if is_mass(s) else values[s] for s in made.symbols)
    )


def identity(operator: str, **options: Any) -> Segment:
    """The segment of no tokens: zeros, decay 1. Combining with it on either side changes nothing.

    Args:
        operator: "linear_attention", "hla2", "ahla" or "hla3".
        **options: as for `hla.init_state`: batch, d, dv, like, kv_batch, mask, definition, order, normalize, ridge.

    Raises:
        OptionError: the operator has no segments of matrix size.

    Example:
        >>> import numpy as np, hla
        >>> e = hla.segments.identity("hla2", batch=(3,), d=5, dv=7, like=np.zeros(1))
        >>> e._fields
        ('decay', 'key_moment', 'query_value_moment', 'corrected_state')
    """
    state = init_state(operator, **options)
    spec, one = state.spec, state[0]
    found = rule(spec)
    batch = tuple(options["batch"])
    kv_batch = batch if options.get("kv_batch") is None else tuple(options["kv_batch"])
    xp, placed = arrays.namespace(one), arrays.beside(one)
    values = {
        symbol: xp.zeros((*(kv_batch if symbol == "S" else batch), *size), dtype=one.dtype, **placed)
        for symbol, size in _sizes(found, int(options["d"]), int(options["dv"])).items()
    }
    values[RHO] = xp.ones((*kv_batch, 1, 1), dtype=one.dtype, **placed)
    return _segment(spec, values)


def _sizes(found: Rule, d: int, dv: int) -> dict[str, tuple[int, ...]]:
    """The feature axes of every field but the decay."""
    states = shapes(found.program, (), (), (), d, dv).state
    return {symbol: field_shape(symbol, d, dv) or states[symbol] for symbol in found.symbols}


TOKEN_OPTIONS = (
    "scale",
    "decay",
    "log_decay",
    "normalize",
    "mask",
    "definition",
    "ridge",
    "token_mask",
    "axis",
    "chunk_size",
)


def from_tokens(operator: str, q: Array, k: Array, v: Array, *, order: int | None = None, **options: Any) -> Segment:
    """The summary of all T tokens (math, "Segments").

    Args:
        operator: "linear_attention", "hla2", "ahla" or "hla3" (or "higher_order" with `order` up to 3).
        q: (*batch, T, d), any floating dtype.
        k: (*batch, T, d).
        v: (*batch, T, dv).
        order: of "higher_order".
        **options: scale, decay, log_decay, normalize, mask, definition, ridge, token_mask, axis and chunk_size as for
            the operators. A segment holds the scaled q.

    Returns:
        A flat named tuple of arrays in float32, or float64 for float64 inputs: ``decay`` and the fields of
        `hla.states`, matrices (*batch, d, ·) and denominators (*batch, d). ``decay`` (*batch,) and the key-only
        ``key_moment`` keep size-1 axes where k, decays and token_mask have them.

    Raises:
        OptionError, ShapeError, DTypeError, MixedArrayError: as the operators.

    Example:
        >>> import numpy as np, hla
        >>> rng = np.random.default_rng(0)
        >>> q, k, v = rng.normal(size=(3, 11, 5))
        >>> whole = hla.segments.from_tokens("hla2", q, k, v, decay=0.9)
        >>> left = hla.segments.from_tokens("hla2", q[:4], k[:4], v[:4], decay=0.9)
        >>> right = hla.segments.from_tokens("hla2", q[4:], k[4:], v[4:], decay=0.9)
        >>> both = hla.segments.combine(left, right)
        >>> all(np.allclose(x, y) for x, y in zip(whole, both))
        True
    """
    for name in options:
        if name not in TOKEN_OPTIONS:
            raise unknown_keyword("from_tokens", name, TOKEN_OPTIONS)
    checked = check_call(operator, q, k, v, read_options("from_tokens", options), order)
    return _summary(checked.problem, checked.batch)


def _summary(problem: Problem, batch: tuple[int, ...]) -> Segment:
    xp, spec = problem.xp, problem.program.spec
    found = rule(spec)
    decays = Decays.of(problem)
    extra = broadcast_shapes(*problem.token_batches())
    d, dv = int(problem.q.shape[-1]), int(problem.v.shape[-1])
    q, k, v = (tuple(x.shape[:-2]) for x in (problem.q, problem.k, problem.v))
    states = shapes(found.program, q, k, v, d, dv, extra).state
    keys = broadcast_shapes(extra, tuple(problem.k.shape[:-2]))
    nothing: States = {RHO: xp.ones((*keys, 1, 1), dtype=problem.dtype, **problem.placed)}
    for symbol, size in _sizes(found, d, dv).items():
        own = states[symbol][:-2] if symbol in states else batch
        nothing[symbol] = xp.zeros((*own, *size), dtype=problem.dtype, **problem.placed)

    def body(values: States, tokens: Tokens, _: None) -> tuple[States, Tokens, None]:
        mask = tokens["token_mask"]
        streams = problem.streams(tokens["q"], tokens["k"], tokens["v"], mask)
        log_decay = problem.masked_log_decay(tokens["log_decay"], mask)
        decay = decays.chunk(int(streams["v"].shape[-2]), log_decay, None)
        later = summarise_chunk(xp, found, decay, streams, problem.dtype, problem.placed)
        return combine_values(xp, found, values, later, found.symbols), {}, None

    values = nothing
    if problem.length:
        step = 1 if found.token_by_token else problem.chunk_size or default_chunk(problem)
        values, _, _ = fold(xp, body, nothing, token_arrays(problem), problem.length, step)
    for symbol, x in values.items():
        features = feature_axes(symbol)
        own, size = tuple(x.shape[:-features]), x.shape[-features:]
        if symbol in ("S", RHO):  # the key-only field keeps its own batch axes, and so the decay that multiplies it
            values[symbol] = xp.reshape(x, (*(1,) * (len(batch) - len(own)), *x.shape))
        elif own != batch:
            values[symbol] = xp.broadcast_to(x, (*batch, *size)) + 0.0
    return _segment(spec, values)


def summarise_chunk(
    xp: Namespace, found: Rule, decay: Decay, streams: dict[str, Array], dtype: Any, placed: dict[str, Any]
) -> States:
    """The segment of one chunk of tokens, from its input streams."""
    streams = dict(streams)
    batch = broadcast_shapes(*(tuple(x.shape[:-2]) for x in streams.values()))
    d, dv = int(streams["q"].shape[-1]), int(streams["v"].shape[-1])
    sizes = _sizes(found, d, dv)
    empty = {
        s: xp.zeros(size, dtype=dtype, **placed) for s, size in shapes(found.program, (), (), (), d, dv).state.items()
    }
    values = chunk(xp, found.program, decay, empty, streams)
    through = decay.through(1)
    values[RHO] = xp.ones((1,) * (len(batch) + 2), dtype=dtype, **placed) if through is None else through
    for symbol in found.symbols:
        if symbol == STRICT:
            key = streams["k"]
            left = key if decay.trivial else key * decay.out(1) * decay.into(1, strict=True)
            values[symbol] = xp.matmul(transpose(xp, left), key)
        elif symbol not in values:  # what couples a token with those before it in the segment: none, for one token
            values[symbol] = xp.zeros((*(1,) * len(batch), *sizes[symbol]), dtype=dtype, **placed)
    return {s: values[s] for s in (RHO, *found.symbols)}


def _check_pair(a: Any, b: Any) -> Namespace:
    for name, x in (("a", a), ("b", b)):
        if not is_segment(x):
            raise DTypeError(message(name, "a segment", type(x).__name__, "Make one with segments.from_tokens."))
    if a.spec != b.spec:
        raise OptionError(
            message(
                "b",
                f"a segment of {describe_spec(a.spec)}",
                f"one of {describe_spec(b.spec)}",
                "Combine like with like.",
            )
        )
    _check_fit("a", a, "b", b)
    return arrays.namespace(a[0])


def _check_fit(reference: str, first: Any, name: str, second: Any) -> None:
    """Errors unless `second`, the argument `name`, has the library, device, sizes and batch axes to go with `first`."""
    arrays.same_library_and_device(first[0], reference, **{name: second[0]})
    own, other = (dict(zip(x.symbols, zip(x._fields, x, strict=True), strict=True)) for x in (first, second))
    batches = []
    for symbol in own.keys() & other.keys():
        field, y = other[symbol]
        x = own[symbol][1]
        size = 0 if symbol == RHO else feature_axes(symbol) - is_mass(symbol)
        wanted, got = tuple(x.shape[x.ndim - size :]), tuple(y.shape[y.ndim - size :])
        if wanted != got:
            raise ShapeError(message(f"{name}.{field}", f"last axes {wanted}", f"{got}", "Use one d and dv."))
        batches += [tuple(x.shape[: x.ndim - size]), tuple(y.shape[: y.ndim - size])]
    try:
        broadcast_shapes(*batches)
    except ValueError:
        found = " and ".join(sorted({str(shape) for shape in batches}))
        raise ShapeError(message(name, "batch axes that broadcast together", found, "Use equal batches.")) from None


def combine(a: Segment, b: Segment) -> Segment:
    r"""The segment of A's tokens followed by B's: A ⊕ B (§4.1, §6.2, §7.3; decays corrected as in docs/errata.md).

    HLA₂, for example, with r = ρ_B:

        S = rS_A + S_B        C = rC_A + C_B        F = r²F_A + F_B + r S_A C_B

    Args:
        a: the earlier segment.
        b: the later segment, of the same operator and options. Batch axes broadcast.

    Returns:
        A segment in the shapes and dtype of the two.

    Raises:
        OptionError: segments of different operators or options.
        ShapeError: different d or dv.

    Example:
        >>> import numpy as np, hla
        >>> x = np.ones((4, 3))
        >>> a = hla.segments.from_tokens("ahla", x, x, x)
        >>> hla.segments.combine(a, a).key_value_moment[0]
        array([8., 8., 8.])
    """
    xp = _check_pair(a, b)
    found = rule(a.spec)
    return _segment(a.spec, combine_values(xp, found, _values(a), _values(b), found.symbols))


def advance(state: Any, segment: Segment) -> Any:
    """A state moved past a segment: what it would be had it seen the segment's tokens.

    The rules are those of `combine` with the state to the left: injecting retrieved tokens, joining devices.

    Args:
        state: a state of the same operator and options.
        segment: the tokens to pass.

    Returns:
        A new state; the given one is not written to.

    Raises:
        OptionError: state and segment of different operators or options.

    Example:
        >>> import numpy as np, hla
        >>> q, k, v = np.random.default_rng(0).normal(size=(3, 9, 4))
        >>> _, state = hla.hla2(q[:6], k[:6], v[:6], return_state=True)
        >>> _, whole = hla.hla2(q, k, v, return_state=True)
        >>> moved = hla.segments.advance(state, hla.segments.from_tokens("hla2", q[6:], k[6:], v[6:]))
        >>> all(np.allclose(x, y) for x, y in zip(moved, whole))
        True
    """
    if not is_state(state):
        raise DTypeError(message("state", "a state", type(state).__name__, "Use return_state=True or init_state."))
    if not is_segment(segment):
        raise DTypeError(message("segment", "a segment", type(segment).__name__, "Use segments.from_tokens."))
    if state.spec != segment.spec:
        raise OptionError(
            message("segment", f"one of {describe_spec(state.spec)}", f"one of {describe_spec(segment.spec)}",
                    "Make the segment with the state's options.")
        )  # fmt: skip
    _check_fit("state", state, "segment", segment)
    values = to_arrays(state)
    moved = combine_values(arrays.namespace(state[0]), rule(state.spec), values, _values(segment), tuple(values))
    return from_arrays(state.spec, moved)


def combine_vjp(a: Segment, b: Segment) -> tuple[Segment, Callable[[Segment], tuple[Segment, Segment]]]:
    r"""`combine` and its adjoint, the paper's ⊕* (§4).

    Args:
        a: the earlier segment.
        b: the later segment.

    Returns:
        (c, pull): c = combine(a, b), and pull(dc) = (da, db), cotangents in the shapes of c, a and b, as segments.

    Raises:
        OptionError, ShapeError: as `combine`.

    Example:
        >>> import numpy as np, hla
        >>> x = np.ones((2, 3))
        >>> a = hla.segments.from_tokens("linear_attention", x, x, x, decay=0.5)
        >>> c, pull = hla.segments.combine_vjp(a, a)
        >>> da, db = pull(c._replace(decay=np.asarray(0.0), key_value_moment=np.ones((3, 3))))
        >>> float(da.key_value_moment[0, 0]), float(db.key_value_moment[0, 0])
        (0.25, 1.0)
    """
    xp = _check_pair(a, b)
    found, left, right = rule(a.spec), _values(a), _values(b)
    value = _segment(a.spec, combine_values(xp, found, left, right, found.symbols))

    def pull(cotangent: Segment) -> tuple[Segment, Segment]:
        if type(cotangent) is not type(value):
            raise OptionError(
                message(
                    "cotangent", type(value).__name__, type(cotangent).__name__, "Pass a segment like combine's value."
                )
            )
        da, db = pull_values(xp, found, left, right, _values(cotangent))
        return _segment(a.spec, da), _segment(a.spec, db)

    return value, pull


__all__ = ["advance", "combine", "combine_vjp", "from_tokens", "identity"]

r"""Segments: the summary of consecutive tokens as a monoid element (math, "Segments"; §4).

A segment of tokens A and one of the tokens B that follow combine into the segment of both; a state is moved past a
segment by the same rules. Streaming, chunking, packing, prefill and sequence parallelism are all this one fact.
`combine` is associative for every operator and every decay, with `identity` as the neutral element.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, TypeAlias

from hla import arrays
from hla.arrays import Array, Namespace, broadcast_shapes, sum_to, transpose
from hla.checks import check_call
from hla.chunkwise import chunk, default_chunk, token_arrays
from hla.decays import Decay, Decays
from hla.errors import DTypeError, OptionError, ShapeError, message
from hla.family import MASS, Program, Spec, State, program, shapes
from hla.loops import Tokens, fold
from hla.options import read_options, unknown_keyword
from hla.problem import Problem, States
from hla.states import describe_spec, from_arrays, init_state, is_mass, is_state, state_type, to_arrays, tuple_type

Segment: TypeAlias = Any
"""A segment: a flat named tuple of arrays; `decay` is ρ = Π γ (*batch,), the other fields are those of states."""

# Each field of A·B as a sum of products. r is ρ_B, s is ρ_A; S_A is the field S of the earlier segment, A.
_RULES: dict[str, dict[str, tuple[str, ...]]] = {
    "linear_attention": {"P": ("r P_A", "P_B")},
    "hla2": {
        "S": ("r S_A", "S_B"),
        "C": ("r C_A", "C_B"),
        "F": ("r r F_A", "F_B", "r S_A C_B"),
    },
    "ahla": {
        "R": ("R_A", "R_B"),
        "P": ("r P_A", "P_B"),
        "E": ("r E_A", "E_B", "r R_B P_A"),
    },
    "hla3": {
        "S": ("r S_A", "S_B"),
        "Q": ("r Q_A", "Q_B"),
        "P": ("r P_A", "P_B"),
        "W": ("r r W_A", "W_B", "r Q_B P_A"),
        "U": ("r r U_A", "U_B", "r S_A Q_B"),
        "F": ("r r r F_A", "F_B", "r r S_A Q_B P_A", "r S_A W_B", "r U_B P_A"),
    },
    # §4.2 corrected for the printed recurrence of §4.3: D = ρ·Σ kkᵀ/γ, kept multiplied out so that γ = 0 is allowed.
    "hla2 as_printed": {
        "S": ("r S_A", "S_B"),
        "C": ("r C_A", "C_B"),
        "D": ("r D_A", "s D_B"),
        "G": ("r G_A", "G_B", "D_B C_A"),
    },
}
# The fields that a state of the operator does not have, as sums over tokens: key, value, decay exponent.
_EXTRA: dict[str, tuple[State, ...]] = {
    "linear_attention": (),
    "hla2": (State("C", "q", "v", 1),),
    "ahla": (State("R", "k", "q", 0),),
    "hla3": (State("Q", "q", "q", 1), State("W", "q", "w", 2), State("U", "u", "q", 2)),
    "hla2 as_printed": (),
}
_LINEAR_IN_V = ("P", "C", "F", "E", "W", "G")
_STRICT = "D"


class Term(NamedTuple):
    """One product: ρ_B^later · ρ_A^earlier · the product of fields."""

    later: int
    earlier: int
    factors: tuple[tuple[str, bool], ...]
    """(symbol, whether of A)"""


class Rule(NamedTuple):
    """What a segment of an operator holds and how two combine."""

    program: Program
    """the operator's states and the extra fields, without the reads that only make output"""
    terms: dict[str, tuple[Term, ...]]

    @property
    def symbols(self) -> tuple[str, ...]:
        """The fields but for the decay, in order."""
        return tuple(self.terms)


def _parse(text: str, twin: bool) -> Term:
    tokens = text.split()
    factors = [(t[:-2], t.endswith("_A")) for t in tokens if "_" in t]
    if twin:
        factors = [(symbol + MASS if symbol in _LINEAR_IN_V else symbol, early) for symbol, early in factors]
    return Term(tokens.count("r"), tokens.count("s"), tuple(factors))


def has_rule(spec: Spec) -> bool:
    """Whether the operator's segments are matrices: not above order 3, nor for the printed third order."""
    return not spec.order and not (spec.operator == "hla3" and spec.definition == "as_printed")


@cache
def rule(spec: Spec) -> Rule:
    """The rule of an operator; OptionError where segments of matrix size do not exist."""
    if spec.mask == "none":
        raise OptionError(
            message("mask", '"causal" or "prefix"', '"none"', "A bidirectional operator has no segments.")
        )
    if not has_rule(spec):
        raise OptionError(
            message("operator", "one whose segments are matrices (orders 1 to 3, the third exact)", describe_spec(spec),
                    "Compose it from segments of lower order, stage by stage.")
        )  # fmt: skip
    base = program(spec)
    if spec.mask == "prefix":
        symbols = {s.symbol for s in base.states if not is_mass(s.symbol)}
        lines: dict[str, tuple[str, ...]] = {symbol: (f"r {symbol}_A", f"{symbol}_B") for symbol in sorted(symbols)}
        extra: tuple[State, ...] = ()
    else:
        kind = f"{spec.operator} as_printed" if spec.definition == "as_printed" else spec.operator
        lines, extra = _RULES[kind], _EXTRA[kind]
    terms = {symbol: tuple(_parse(t, False) for t in line) for symbol, line in lines.items()}
    if spec.normalize:
        terms |= {s + MASS: tuple(_parse(t, True) for t in lines[s]) for s in lines if s in _LINEAR_IN_V}
    own = {s.symbol for s in base.states}
    twins = {"v": "one", "w": "w" + MASS}
    more = [s for s in extra if s.symbol not in own]
    if spec.normalize:
        more += [
            State(s.symbol + MASS, s.key, twins[s.value], s.power)
            for s in extra
            if s.value in twins and s.symbol + MASS not in own
        ]
    states = (*base.states, *more)
    needed = {name for s in states for name in (s.key, s.value)}
    reads = tuple(r for r in base.reads if r.result in needed)
    return Rule(Program(spec, states, reads, ()), terms)


def _rebuild(spec: tuple[Any, ...], values: tuple[Any, ...]) -> Segment:
    return segment_type(Spec(*spec))(*values)


@cache
def segment_type(spec: Spec) -> Any:
    """The class of an operator's segments."""
    name = state_type(spec).__name__.removesuffix("State") + "Segment"
    return tuple_type(name, spec, ("rho", *rule(spec).symbols), _rebuild, f"Segment of {describe_spec(spec)}.")


def is_segment(x: Any) -> bool:
    """Whether `x` is a segment of this library."""
    spec = getattr(type(x), "spec", None)
    return isinstance(spec, Spec) and type(x).__name__.endswith("Segment")


def _values(segment: Segment) -> States:
    """Arrays by symbol, all as matrices: "rho" (*batch, 1, 1)."""
    return {
        s: x[..., None, None] if s == "rho" else x[..., None] if is_mass(s) else x
        for s, x in zip(segment.symbols, segment, strict=True)
    }


def _segment(spec: Spec, values: States) -> Segment:
    made = segment_type(spec)
    return made(*(values[s][..., 0, 0] if s == "rho" else values[s][..., 0] if is_mass(s) else values[s]
                  for s in made.symbols))  # fmt: skip


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
    spec = state.spec
    found = rule(spec)
    one = state[0]
    d, dv, batch = int(options["d"]), int(options["dv"]), tuple(options["batch"])
    sizes = shapes(found.program, (), (), (), d, dv).state
    xp, where = arrays.namespace(one), arrays.device(one)
    placed = {} if where is None else {"device": where}
    kv_batch = batch if options.get("kv_batch") is None else tuple(options["kv_batch"])
    values = {
        symbol: xp.zeros(
            (*(kv_batch if symbol == "S" else batch), *((d, d) if symbol == _STRICT else sizes[symbol])),
            dtype=one.dtype,
            **placed,
        )
        for symbol in found.symbols
    }
    values["rho"] = xp.ones((*batch, 1, 1), dtype=one.dtype, **placed)
    return _segment(spec, values)


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
        A flat named tuple of arrays in float32, or float64 for float64 inputs: ``decay`` (*batch,) and the fields of
        `hla.states`, matrices (*batch, d, ·) and denominators (*batch, d).

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
    placed = {} if problem.device is None else {"device": problem.device}
    extra = broadcast_shapes(*problem.token_batches())
    d, dv = int(problem.q.shape[-1]), int(problem.v.shape[-1])
    batches = (tuple(x.shape[:-2]) for x in (problem.q, problem.k, problem.v))
    sizes = dict(shapes(found.program, *batches, d, dv, extra).state)
    if _STRICT in found.symbols:
        sizes[_STRICT] = (*sizes["S"][:-2], d, d)
    nothing = {s: xp.zeros(sizes[s], dtype=problem.dtype, **placed) for s in found.symbols}
    nothing["rho"] = xp.ones((*extra, 1, 1), dtype=problem.dtype, **placed)

    def body(values: States, tokens: Tokens, _: None) -> tuple[States, Tokens, None]:
        mask = tokens["token_mask"]
        streams = problem.streams(tokens["q"], tokens["k"], tokens["v"], mask)
        log_decay = problem.masked_log_decay(tokens["log_decay"], mask)
        decay = decays.chunk(int(streams["v"].shape[-2]), log_decay, None)
        later = summarise_chunk(xp, found, decay, streams, problem.dtype, placed)
        return combine_values(xp, found, values, later, found.symbols), {}, None

    values = nothing
    if problem.length:
        step = problem.chunk_size or default_chunk(problem)
        values, _, _ = fold(xp, body, nothing, token_arrays(problem), problem.length, step)
    for symbol, x in values.items():
        if symbol == "S":
            wanted: tuple[int, ...] = (*(1,) * (len(batch) - (x.ndim - 2)), *x.shape)
            values[symbol] = xp.reshape(x, wanted)
        elif tuple(x.shape[:-2]) != batch:
            values[symbol] = xp.asarray(xp.broadcast_to(x, (*batch, *x.shape[-2:])), copy=True)
    return _segment(spec, values)


def summarise_chunk(
    xp: Namespace, found: Rule, decay: Decay, streams: dict[str, Array], dtype: Any, placed: dict[str, Any]
) -> States:
    """The segment of one chunk of tokens, from its input streams."""
    streams = dict(streams)
    batch = broadcast_shapes(*(tuple(x.shape[:-2]) for x in streams.values()))
    width = {"q": streams["q"].shape[-1], "k": streams["k"].shape[-1], "v": streams["v"].shape[-1], "one": 1}
    sizes = shapes(found.program, (), (), (), int(width["q"]), int(width["v"])).state
    empty = {s.symbol: xp.zeros(sizes[s.symbol], dtype=dtype, **placed) for s in found.program.states}
    values = chunk(xp, found.program, decay, empty, streams)
    through = decay.through(1)
    values["rho"] = xp.ones((1,) * (len(batch) + 2), dtype=dtype, **placed) if through is None else through
    if _STRICT in found.symbols:
        key = streams["k"]
        left = key if decay.trivial else key * decay.out(1) * decay.into(1, strict=True)
        values[_STRICT] = xp.matmul(transpose(xp, left), key)
    return {s: values[s] for s in ("rho", *found.symbols)}


def _product(xp: Namespace, term: Term, a: States, b: States) -> Array:
    """The product of a term's fields, without its decay factors."""
    result: Array | None = None
    for symbol, early in term.factors:
        x = (a if early else b)[symbol]
        result = x if result is None else xp.matmul(result, x)
    return result


def _coefficient(term: Term, a: States, b: States) -> Array | None:
    result: Array | None = None
    for count, values in ((term.later, b), (term.earlier, a)):
        for _ in range(count):
            result = values["rho"] if result is None else result * values["rho"]
    return result


def combine_values(xp: Namespace, found: Rule, a: States, b: States, symbols: tuple[str, ...]) -> States:
    """`combine` on arrays by symbol, for the fields asked for."""
    result: States = {}
    for symbol in symbols:
        total: Array | None = None
        for term in found.terms[symbol]:
            x, factor = _product(xp, term, a, b), _coefficient(term, a, b)
            if factor is not None:  # where a reset lies between, nothing from the left may come through, not even NaN
                x = xp.where(factor == 0, xp.zeros_like(x), x * factor)
            total = x if total is None else total + x
        result[symbol] = total
    if "rho" in a:
        result["rho"] = a["rho"] * b["rho"]
    return result


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
    arrays.same_library_and_device(a[0], "a", b=b[0])
    for field, x, y in zip(a._fields, a, b, strict=True):
        size = 0 if field == "decay" else 1 if is_mass(a.symbols[a._fields.index(field)]) else 2
        if x.shape[x.ndim - size :] != y.shape[y.ndim - size :]:
            raise ShapeError(
                message(f"b.{field}", f"last axes {x.shape[x.ndim - size :]}", f"{y.shape}", "Use one d and dv.")
            )
    return arrays.namespace(a[0])


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
    arrays.same_library_and_device(state[0], "state", segment=segment[0])
    return from_arrays(
        state.spec, advance_values(arrays.namespace(state[0]), state.spec, to_arrays(state), _values(segment))
    )


def advance_values(xp: Namespace, spec: Spec, state: States, segment: States) -> States:
    """`advance` on arrays by symbol."""
    return combine_values(xp, rule(spec), state, segment, tuple(state))


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
        d = _values(cotangent)
        da = {symbol: xp.zeros_like(x) for symbol, x in left.items()}
        db = {symbol: xp.zeros_like(x) for symbol, x in right.items()}

        def add(early: bool, symbol: str, x: Array) -> None:
            into, of = (da, left) if early else (db, right)
            into[symbol] = into[symbol] + sum_to(xp, x, of[symbol].shape)

        add(True, "rho", d["rho"] * right["rho"])
        add(False, "rho", d["rho"] * left["rho"])
        for symbol in found.symbols:
            for term in found.terms[symbol]:
                _pull_term(xp, term, left, right, d[symbol], add)
        return _segment(a.spec, da), _segment(a.spec, db)

    return value, pull


def _pull_term(
    xp: Namespace, term: Term, a: States, b: States, d: Array, add: Callable[[bool, str, Array], None]
) -> None:
    factor = _coefficient(term, a, b)
    scaled = d if factor is None else d * factor
    fields = [(symbol, early, (a if early else b)[symbol]) for symbol, early in term.factors]
    for i, (symbol, early, _) in enumerate(fields):
        x = scaled
        for _, _, left in fields[:i]:
            x = xp.matmul(transpose(xp, left), x)
        for _, _, right in reversed(fields[i + 1 :]):
            x = xp.matmul(x, transpose(xp, right))
        add(early, symbol, x)
    if factor is None:
        return
    inner = xp.sum(d * _product(xp, term, a, b), axis=(-2, -1), keepdims=True, dtype=d.dtype)
    for count, early, other in ((term.later, False, term.earlier), (term.earlier, True, term.later)):
        if count:
            own, opposite = (a, b) if early else (b, a)
            x = inner * count
            for _ in range(count - 1):
                x = x * own["rho"]
            for _ in range(other):
                x = x * opposite["rho"]
            add(early, "rho", x)


__all__ = ["advance", "combine", "combine_vjp", "from_tokens", "identity"]

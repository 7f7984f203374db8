r"""The operators as compositions of one primitive: this file is the whole family.

The primitive is causal linear attention with decay exponent p (math, "Definitions"):

    LA_p(a, b, c)_t = Σ_{j≤t} Γ(t,j)^p (a_t·b_j) c_j        state  X_t = γ_t^p X_{t−1} + b_t c_tᵀ,  read  a_tᵀ X_t

A `Program` names the states an operator keeps (`State`: which two streams it multiplies, and its decay exponent)
and the reads of them in order (`Read`: result_t = query_tᵀ X_t, or of X_{t−1} when strict). Streams are "q" (scaled),
"k", "v", "one" (a column of ones, for denominators) and the results of earlier reads. HLA₂ = LA_2(q, LA_1(q,k,k), v):

    State S = Σ k kᵀ       Read u = q·S
    State F = Σ u vᵀ       Read o = q·F

Every form (recurrent, scan, chunkwise, parallel), the gradient and every backend interpret these programs, so an
operator's mathematics stands in one place. Letters are those of docs/mathematics.md; `hla.states` spells them out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

from hla.arrays import Array, broadcast_shapes

OPERATORS = ("linear_attention", "hla2", "ahla", "hla3", "higher_order")
"""Public operators. Orders 1, 2 and 3 of `higher_order` are the first, second and fourth."""
MASKS = ("causal", "prefix", "none")
DEFINITIONS = ("exact", "as_printed")
MASS = "'"
"""Suffix of a denominator's twin: state "F'" is F with every v_j replaced by 1."""


class Spec(NamedTuple):
    """What fixes an operator's mathematics, and with it the fields of its state."""

    operator: str
    mask: str = "causal"
    definition: str = "exact"
    order: int = 0
    """Only for operator "higher_order", then at least 4; 0 otherwise."""
    normalize: bool = False
    ridge: bool = False


@dataclass(frozen=True, slots=True)
class State:
    """X_t = γ_t^power X_{t−1} + key_t value_tᵀ."""

    symbol: str
    key: str
    value: str
    power: int


@dataclass(frozen=True, slots=True)
class Read:
    """result_t = query_tᵀ X_t; strict reads X_{t−1}, not yet decayed by γ_t."""

    result: str
    query: str
    state: str
    strict: bool = False


@dataclass(frozen=True, eq=False)
class Program:
    """An operator: its states, its reads in order, and the weighted reads that make its output."""

    spec: Spec
    states: tuple[State, ...]
    reads: tuple[Read, ...]
    output: tuple[tuple[str, float | None], ...]
    """(read, weight); the weight None stands for the ridge λ."""
    denominator: tuple[tuple[str, float | None], ...] = ()

    def state(self, symbol: str) -> State:
        """The state of that symbol."""
        return next(s for s in self.states if s.symbol == symbol)


_S, _Q, _P = State("S", "k", "k", 1), State("Q", "q", "q", 1), State("P", "k", "v", 1)
_C, _R = State("C", "q", "v", 1), State("R", "k", "q", 1)
_HLA3_STATES = (_S, _P, State("F", "u", "w", 3))
_HLA3_READS = (Read("u", "q", "S"), Read("w", "q", "P"), Read("o", "q", "F"))

_CAUSAL: dict[str, tuple[tuple[State, ...], tuple[Read, ...]]] = {
    # LA_1(q, k, v)
    "linear_attention": ((_P,), (Read("o", "q", "P"),)),
    # LA_2(q, LA_1(q,k,k), v)
    "hla2": ((_S, State("F", "u", "v", 2)), (Read("u", "q", "S"), Read("o", "q", "F"))),
    # LA_1(q, k, LA_1(q,k,v))
    "ahla": ((_P, State("E", "k", "w", 1)), (Read("w", "q", "P"), Read("o", "q", "E"))),
    # LA_3(q, LA_1(q,k,k), LA_1(q,k,v))
    "hla3": (_HLA3_STATES, _HLA3_READS),
}

_PREFIX: dict[str, tuple[tuple[State, ...], tuple[Read, ...]]] = {
    "linear_attention": _CAUSAL["linear_attention"],
    # LA_1(LA_1(q,k,k), q, v)
    "hla2": ((_S, _C), (Read("u", "q", "S"), Read("o", "u", "C"))),
    # LA_1(LA_1(q,k,q), k, v)
    "ahla": ((_R, _P), (Read("u", "q", "R"), Read("o", "u", "P"))),
    # LA_1(LA_1(LA_1(q,k,k), q, q), k, v)
    "hla3": ((_S, _Q, _P), (Read("u", "q", "S"), Read("x", "u", "Q"), Read("o", "x", "P"))),
}

_Output = tuple[tuple[str, float | None], ...]
_AS_PRINTED: dict[str, tuple[tuple[State, ...], tuple[Read, ...], _Output]] = {
    # LA_1(LA_1(q,k,k), q, v) − LA_1(q, k, LAx_1(k, q, v))
    "hla2": (
        (_S, _C, State("G", "k", "x", 1)),
        (Read("u", "q", "S"), Read("y", "u", "C"), Read("x", "k", "C", strict=True), Read("z", "q", "G")),
        (("y", 1.0), ("z", -1.0)),
    ),
    # LA_1(LA_1(LA_1(q,k,k),q,q),k,v) − LA_1(q,k,LAx(LAx(k,q,q),k,v)) − LA_1(q,LAx(q,k,k),LAx(q,k,v))
    #   − LA_1(q,LAx(LAx(k,q,q),k,k),v)
    "hla3": (
        (_S, _Q, _P, State("G", "k", "g", 1), State("H", "h", "i", 1), State("J", "j", "v", 1)),
        (
            Read("u", "q", "S"),
            Read("x", "u", "Q"),
            Read("y", "x", "P"),
            Read("n", "k", "Q", strict=True),
            Read("g", "n", "P", strict=True),
            Read("h", "q", "S", strict=True),
            Read("i", "q", "P", strict=True),
            Read("j", "n", "S", strict=True),
            Read("zg", "q", "G"),
            Read("zh", "q", "H"),
            Read("zj", "q", "J"),
        ),
        (("y", 1.0), ("zg", -1.0), ("zh", -1.0), ("zj", -1.0)),
    ),
}


def _higher(order: int, mask: str) -> tuple[tuple[State, ...], tuple[Read, ...], _Output]:
    """Order 2m: HLA₂ m times; order 2m+1: HLA₂ m−1 times after HLA₃. Stage n ≥ 2 is called F2, F3, … or C2, C3, …"""
    table = _PREFIX if mask == "none" else _CAUSAL
    states, reads = table["hla2" if order % 2 == 0 else "hla3"]
    result = "o"
    for stage in range(2, (order if order % 2 == 0 else order - 1) // 2 + 1):
        into = f"o{stage}"
        if mask == "none":
            more, read = State(f"C{stage}", "q", result, 1), Read(into, "u", f"C{stage}")
        else:
            more, read = State(f"F{stage}", "u", result, 2), Read(into, "q", f"F{stage}")
        states, reads, result = (*states, more), (*reads, read), into
    return states, reads, ((result, 1.0),)


@cache
def program(spec: Spec) -> Program:
    """The program of an operator; one object per spec, so that identity may serve as a cache key."""
    if spec.operator == "higher_order":
        states, reads, output = _higher(spec.order, spec.mask)
    elif spec.definition == "as_printed" and spec.operator in _AS_PRINTED:
        states, reads, output = _AS_PRINTED[spec.operator]
    else:
        states, reads = (_CAUSAL if spec.mask == "causal" else _PREFIX)[spec.operator]
        output = (("o", 1.0),)
    if spec.ridge:  # Algorithm 1: S + λI at read-out, which adds λ·LA_1(q, q, v)
        states = states if _C in states else (*states, _C)
        reads, output = (*reads, Read("r", "q", "C")), (*output, ("r", None))
    denominator: _Output = ()
    if spec.normalize:
        states, reads, denominator = _with_masses(states, reads, output)
    return Program(spec, states, reads, output, denominator)


def _with_masses(
    states: tuple[State, ...], reads: tuple[Read, ...], output: _Output
) -> tuple[tuple[State, ...], tuple[Read, ...], _Output]:
    """Twins of all states and reads that v reaches, over a column of ones: o is linear in v, so its twin is Eq. 3.4's
    denominator."""
    twin = {"v": "one"}
    more_states: list[State] = []
    more_reads: list[Read] = []
    pending = list(reads)
    by_symbol = {s.symbol: s for s in states}
    massed: set[str] = set()
    for read in pending:
        state = by_symbol[read.state]
        if state.value not in twin:
            continue
        if state.symbol not in massed:
            massed.add(state.symbol)
            more_states.append(State(state.symbol + MASS, state.key, twin[state.value], state.power))
        twin[read.result] = read.result + MASS
        more_reads.append(Read(read.result + MASS, read.query, state.symbol + MASS, read.strict))
    return (*states, *more_states), (*reads, *more_reads), tuple((twin[name], weight) for name, weight in output)


Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Shapes:
    """Batch axes and last-axis sizes of everything a program touches."""

    batch: dict[str, Shape]
    """of every stream"""
    width: dict[str, int]
    """last axis of every stream"""
    state: dict[str, Shape]
    """full shape of every state, at its natural batch axes: k/v heads stay size-1 axes where only k and v enter"""


def shapes(
    program: Program,
    q: Shape,
    k: Shape,
    v: Shape,
    d: int,
    dv: int,
    decay: Shape = (),
    initial: tuple[tuple[str, Shape], ...] = (),
) -> Shapes:
    """Infer all shapes from the batch axes of q, k, v, of the decays and of the initial states."""
    try:
        return _known_shapes(program, q, k, v, d, dv, decay, initial)
    except TypeError:  # sizes that a tracer keeps open have no hash
        return _infer_shapes(program, q, k, v, d, dv, decay, initial)


def _infer_shapes(
    program: Program,
    q: Shape,
    k: Shape,
    v: Shape,
    d: int,
    dv: int,
    decay: Shape,
    initial: tuple[tuple[str, Shape], ...],
) -> Shapes:
    batch = {"q": q, "k": k, "v": v, "one": v}
    width = {"q": d, "k": d, "v": dv, "one": 1}
    start = dict(initial)
    state: dict[str, Shape] = {}
    for symbol, found, read in steps(program):
        if symbol not in state:
            axes = broadcast_shapes(batch[found.key], batch[found.value], decay, start.get(symbol, ()))
            state[symbol] = (*axes, width[found.key], width[found.value])
        if read is not None:
            batch[read.result] = broadcast_shapes(batch[read.query], state[symbol][:-2])
            width[read.result] = state[symbol][-1]
    return Shapes(batch, width, state)


_known_shapes = lru_cache(maxsize=4096)(_infer_shapes)


class Step(NamedTuple):
    """One line of a program as it is evaluated."""

    symbol: str
    state: State
    read: Read | None
    """None for a state that nothing reads"""


@cache
def steps(program: Program) -> tuple[Step, ...]:
    """The reads in order of evaluation, each with its state; states that nothing reads come last."""
    by_symbol = {s.symbol: s for s in program.states}
    read_states = {r.state for r in program.reads}
    reads = (Step(r.state, by_symbol[r.state], r) for r in program.reads)
    rest = (Step(s.symbol, s, None) for s in program.states if s.symbol not in read_states)
    return (*reads, *rest)


def weighted_sum(terms: _Output, values: dict[str, Array], ridge: float) -> Array:
    """Σ weight · value over a program's output or denominator."""
    total: Array = None
    for name, weight in terms:
        factor = ridge if weight is None else weight
        value = values[name]
        if total is None:
            total = value if factor == 1.0 else value * factor
        elif factor == 1.0:
            total = total + value
        elif factor == -1.0:
            total = total - value
        else:
            total = total + value * factor
    return total

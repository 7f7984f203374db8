r"""How two segments combine: the algebra behind `hla.segments`, on arrays by symbol (math, "Segments").

Every field of A·B is a sum of products of fields of A and of B with powers of ρ_A and ρ_B, so a table says it all, and
one interpreter gives combination, read-out of states and the adjoint.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from hla.arrays import Array, Namespace, sum_to, transpose
from hla.errors import OptionError, message
from hla.family import MASS, Program, Spec, State, program
from hla.problem import States

RHO = "rho"
"""The segment's decay ρ = Π γ, as (*batch, 1, 1)."""
STRICT = "D"
"""The one field that is no plain decayed sum over tokens: ρ Σ kkᵀ/γ."""
TENSORS = ("M", "Z")
"""Fields with four feature axes."""

# r is ρ_B, s is ρ_A; S_A is the field S of the earlier segment, S^ its transpose. "X*Y" is the outer product X_ab Y_ce
# of two matrices, "M:Q" the contraction Σ_bc M_abce Q_bc. S is symmetric; it is transposed where the programs' reads
# qᵀS say so, so that its gradient is the same in every form.
_TABLE: dict[str, dict[str, tuple[str, ...]]] = {
    "linear_attention": {"P": ("r P_A", "P_B")},
    "hla2": {
        "S": ("r S_A", "S_B"),
        "C": ("r C_A", "C_B"),
        "F": ("r r F_A", "F_B", "r S^_A C_B"),
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
        "U": ("r r U_A", "U_B", "r S^_A Q_B"),
        "F": ("r r r F_A", "F_B", "r r S^_A Q_B P_A", "r S^_A W_B", "r U_B P_A"),
    },
    # §4.2 corrected for the printed recurrence of §4.3: D = ρ·Σ kkᵀ/γ, kept multiplied out so that γ = 0 is allowed.
    "hla2 as_printed": {
        "S": ("r S_A", "S_B"),
        "C": ("r C_A", "C_B"),
        "D": ("r D_A", "s D_B"),
        "G": ("r G_A", "G_B", "D_B C_A"),
    },
    # §7.3 for Algorithm 3 under decay. With g_t the decay from the segment's left end to t−1, w_t from t to its right
    # end, and X' the strict state of the segment's own tokens: K = Σ w g² kkᵀ, N = Σ w g² qqᵀ, X = Σ w g² kvᵀ,
    # L = Σ w g k(kᵀQ'), T = Σ w g q(qᵀP'), V = Σ w g (S'q)qᵀ, Y = Σ w g Q'kvᵀ, M = Σ w g kkᵀ⊗P', Z = Σ w g S'⊗kvᵀ.
    # M and Z are the paper's O(d³dv) maps: the printed operator needs them, the exact one does not.
    "hla3 as_printed": {
        "S": ("r S_A", "S_B"),
        "Q": ("r Q_A", "Q_B"),
        "P": ("r P_A", "P_B"),
        "K": ("r K_A", "s s K_B"),
        "N": ("r N_A", "s s N_B"),
        "X": ("r X_A", "s s X_B"),
        "L": ("r L_A", "s L_B", "s K_B Q_A"),
        "T": ("r T_A", "s T_B", "s N_B P_A"),
        "V": ("r V_A", "s V_B", "s S_A N_B"),
        "Y": ("r Y_A", "s Y_B", "s Q_A X_B"),
        "M": ("r M_A", "s M_B", "s K_B*P_A"),
        "Z": ("r Z_A", "s Z_B", "s S_A*X_B"),
        "G": ("r G_A", "G_B", "K_B Q_A P_A", "M_B:Q_A", "L_B P_A"),
        "H": ("r H_A", "H_B", "S_A N_B P_A", "S_A T_B", "V_B P_A"),
        "J": ("r J_A", "J_B", "S_A Q_A X_B", "S_A Y_B", "Z_B:Q_A"),
    },
}
# The fields that a state of the operator does not have, as sums over tokens: key, value, decay exponent.
_EXTRA: dict[str, tuple[State, ...]] = {
    "linear_attention": (),
    "hla2": (State("C", "q", "v", 1),),
    "ahla": (State("R", "k", "q", 0),),
    "hla3": (State("Q", "q", "q", 1), State("W", "q", "w", 2), State("U", "u", "q", 2)),
    "hla2 as_printed": (),
    # For a single token, which is all that this operator is summarised from; its other fields are 0 there.
    "hla3 as_printed": (State("K", "k", "k", 0), State("N", "q", "q", 0), State("X", "k", "v", 0)),
}
_LINEAR_IN_V = ("P", "C", "F", "E", "W", "G", "H", "J", "X", "T", "Y", "M", "Z")


class Term(NamedTuple):
    """One product: ρ_B^later · ρ_A^earlier · the product of fields."""

    later: int
    earlier: int
    kind: str
    """"chain" of matrices, "outer" product or "contraction" """
    factors: tuple[tuple[str, bool, bool], ...]
    """(symbol, whether of A, whether transposed)"""


class Rule(NamedTuple):
    """What a segment of an operator holds and how two combine."""

    program: Program
    """the operator's states and the extra fields, without the reads that only make output"""
    terms: dict[str, tuple[Term, ...]]
    token_by_token: bool
    """whether summaries start from single tokens, not from chunks"""

    @property
    def symbols(self) -> tuple[str, ...]:
        """The fields but for the decay, in order."""
        return tuple(self.terms)


def _parse(text: str, twin: bool) -> Term:
    kind = "outer" if "*" in text else "contraction" if ":" in text else "chain"
    tokens = text.replace("*", " ").replace(":", " ").split()
    factors = [(t[:-2].removesuffix("^"), t.endswith("_A"), "^" in t) for t in tokens if "_" in t]
    if twin:
        factors = [(s + MASS if s in _LINEAR_IN_V else s, early, turned) for s, early, turned in factors]
    return Term(tokens.count("r"), tokens.count("s"), kind, tuple(factors))


def has_matrices(spec: Spec) -> bool:
    """Whether the operator's segments are matrices: not above order 3, nor for the printed third order."""
    return not spec.order and not (spec.operator == "hla3" and spec.definition == "as_printed")


@cache
def rule(spec: Spec) -> Rule:
    """The rule of an operator; OptionError where there is none."""
    if spec.mask == "none":
        raise OptionError(
            message("mask", '"causal" or "prefix"', '"none"', "A bidirectional operator has no segments.")
        )
    if spec.order:
        raise OptionError(
            message(
                "order",
                "1, 2 or 3",
                f"{spec.order}",
                "A segment of higher order would grow with every order: compose stages, each with its own segments.",
            )
        )
    base = program(spec)
    kind = f"{spec.operator} as_printed" if spec.definition == "as_printed" else spec.operator
    if spec.mask == "prefix":
        plain = [s.symbol for s in base.states if s.value != "one"]
        lines: dict[str, tuple[str, ...]] = {symbol: (f"r {symbol}_A", f"{symbol}_B") for symbol in plain}
        extra: tuple[State, ...] = ()
    else:
        lines, extra = _TABLE[kind], _EXTRA[kind]
    terms = {symbol: tuple(_parse(t, False) for t in line) for symbol, line in lines.items()}
    if spec.normalize:
        terms |= {s + MASS: tuple(_parse(t, True) for t in lines[s]) for s in lines if s in _LINEAR_IN_V}
    states = list(base.states)
    twins = {"v": "one", "w": "w" + MASS}
    for state in extra:
        states.append(state)
        if spec.normalize and state.value in twins:
            states.append(State(state.symbol + MASS, state.key, twins[state.value], state.power))
    by_symbol = {state.symbol: state for state in states}  # ridge gives hla2 its C already
    needed = {name for s in by_symbol.values() for name in (s.key, s.value)}
    needed |= {r.query for r in base.reads if r.result in needed}  # a read of a read, in the printed third order
    reads = tuple(r for r in base.reads if r.result in needed)
    return Rule(Program(spec, tuple(by_symbol.values()), reads, ()), terms, not has_matrices(spec))


def feature_axes(symbol: str) -> int:
    """How many feature axes a field has inside."""
    return 4 if symbol[0] in TENSORS else 2


def field_shape(symbol: str, d: int, dv: int) -> tuple[int, ...] | None:
    """The feature axes of the fields that are no states of a program; None for the others."""
    if symbol == STRICT or symbol in ("L", "V"):
        return (d, d)
    width = 1 if symbol.endswith(MASS) else dv
    if symbol[0] in TENSORS:
        return (d, d, d, width)
    return (d, width) if symbol[0] in ("T", "Y") else None


def combine_values(xp: Namespace, found: Rule, a: States, b: States, symbols: tuple[str, ...]) -> States:
    """The fields asked for of A·B; with the decay where A has one. A state serves as A for the fields it has."""
    result: States = {}
    for symbol in symbols:
        total: Array | None = None
        for term in found.terms[symbol]:
            x, factor = _product(xp, term, a, b), _coefficient(term, symbol, a, b)
            if factor is not None:  # where a reset lies between, nothing from the left may come through, not even NaN
                x = xp.where(factor == 0, xp.zeros_like(x), x * factor)
            total = x if total is None else total + x
        result[symbol] = total
    if RHO in a:
        result[RHO] = a[RHO] * b[RHO]
    return result


def _fields(xp: Namespace, term: Term, a: States, b: States) -> list[Array]:
    fields = ((a if early else b)[symbol] for symbol, early, _ in term.factors)
    return [transpose(xp, x) if factor[2] else x for x, factor in zip(fields, term.factors, strict=True)]


def _product(xp: Namespace, term: Term, a: States, b: States) -> Array:
    """The product of a term's fields, without its decay factors."""
    fields = _fields(xp, term, a, b)
    if term.kind == "outer":
        return fields[0][..., :, :, None, None] * fields[1][..., None, None, :, :]
    if term.kind == "contraction":
        product = fields[0] * fields[1][..., None, :, :, None]
        return xp.sum(product, axis=(-3, -2), dtype=product.dtype)
    result = fields[0]
    for x in fields[1:]:
        result = xp.matmul(result, x)
    return result


def _coefficient(term: Term, symbol: str, a: States, b: States) -> Array | None:
    result: Array | None = None
    for count, values in ((term.later, b), (term.earlier, a)):
        for _ in range(count):
            result = values[RHO] if result is None else result * values[RHO]
    return result if result is None or feature_axes(symbol) == 2 else result[..., None, None]


def pull_values(xp: Namespace, found: Rule, a: States, b: States, d: States) -> tuple[States, States]:
    """The adjoint of `combine_values` at (A, B) applied to d: cotangents of A and of B."""
    da = {symbol: xp.zeros_like(x) for symbol, x in a.items()}
    db = {symbol: xp.zeros_like(x) for symbol, x in b.items()}

    def add(early: bool, symbol: str, x: Array) -> None:
        into, of = (da, a) if early else (db, b)
        into[symbol] = into[symbol] + sum_to(xp, x, of[symbol].shape)

    add(True, RHO, d[RHO] * b[RHO])
    add(False, RHO, d[RHO] * a[RHO])
    for symbol in found.symbols:
        for term in found.terms[symbol]:
            factor = _coefficient(term, symbol, a, b)
            scaled = d[symbol] if factor is None else d[symbol] * factor
            for (name, early, turned), x in zip(term.factors, _pull_product(xp, term, a, b, scaled), strict=True):
                add(early, name, transpose(xp, x) if turned else x)
            _pull_coefficient(xp, term, a, b, d[symbol], add)
    return da, db


def _pull_product(xp: Namespace, term: Term, a: States, b: States, d: Array) -> list[Array]:
    """The cotangents of a term's fields."""
    fields = _fields(xp, term, a, b)
    if term.kind == "outer":
        left, right = d * fields[1][..., None, None, :, :], d * fields[0][..., :, :, None, None]
        return [xp.sum(left, axis=(-2, -1), dtype=d.dtype), xp.sum(right, axis=(-4, -3), dtype=d.dtype)]
    if term.kind == "contraction":
        spread = d[..., :, None, None, :]
        return [spread * fields[1][..., None, :, :, None], xp.sum(fields[0] * spread, axis=(-4, -1), dtype=d.dtype)]
    result = []
    for i in range(len(fields)):
        x = d
        for left in fields[:i]:
            x = xp.matmul(transpose(xp, left), x)
        for right in reversed(fields[i + 1 :]):
            x = xp.matmul(x, transpose(xp, right))
        result.append(x)
    return result


def _pull_coefficient(
    xp: Namespace, term: Term, a: States, b: States, d: Array, add: Callable[[bool, str, Array], None]
) -> None:
    """d ρ_A and d ρ_B of one term."""
    if not term.later and not term.earlier:
        return
    product = d * _product(xp, term, a, b)
    inner = xp.sum(product, axis=(-2, -1), keepdims=True, dtype=d.dtype)
    if term.kind == "outer" or any(feature_axes(symbol) == 4 for symbol, _, _ in term.factors):
        inner = xp.sum(inner[..., 0, 0], axis=(-2, -1), keepdims=True, dtype=d.dtype)
    for count, early, other in ((term.later, False, term.earlier), (term.earlier, True, term.later)):
        if not count:
            continue
        own, opposite = (a, b) if early else (b, a)
        x = inner * count
        for factor in [own[RHO]] * (count - 1) + [opposite[RHO]] * other:
            x = x * factor
        add(early, RHO, x)

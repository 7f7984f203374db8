"""The paper as printed, by equation number: "Higher-order Linear Attention", arXiv 2510.27258 (v3).

Every public function here names the equation, theorem, algorithm or figure it follows. Where the
printed formula does not give the operator it is printed for, the docstring says so and a corrected
one stands beside it (``…_corrected``); ``docs/errata.md`` shows each difference in numbers. These
functions are for reading, checking and comparing: they walk over tokens in Python. To compute, use
`hla.hla2`, `hla.ahla` and `hla.hla3`.

All of them take arrays of any library with an Array API namespace, accumulate in float64 if any of
q, k, v is float64 and in float32 otherwise, and return the dtype of v. Axes: T tokens, d features
of q and k, dv features of v; any leading batch axes broadcast. Wrong shapes raise `hla.ShapeError`,
wrong dtypes `hla.DTypeError`, wrong option values `hla.OptionError`.

The paper's symbols, and the field names that stand for them:

| paper | here | sum over the tokens i of a segment | shape |
|---|---|---|---|
| S, S^K | ``key_moment`` | k kᵀ | (d, d) |
| S^Q | ``query_moment`` | q qᵀ | (d, d) |
| C, C^QV | ``query_value`` | q vᵀ | (d, dv) |
| P, P^KV | ``key_value`` | k vᵀ | (d, dv) |
| m^Q | ``query_sum`` | q | (d,) |
| m^K | ``key_sum`` | k | (d,) |
| G, h | ``cross_value``, ``cross_sum`` | k kᵀ C_{i−1}, k kᵀ m_{i−1} | (d, dv), (d,) |
| R^KQ | ``key_query`` | k qᵀ | (d, d) |
| E, n | ``routed_value``, ``routed_sum`` | k (qᵀ P_i), k (qᵀ m_i) | (d, dv), (d,) |
| F, η | ``corrected_value``, ``corrected_sum`` | Eq. (7.4) | (d, dv), (d,) |
| R^QP, r^Qm | ``query_key_value``, ``query_key_sum`` | q qᵀ k vᵀ, q qᵀ k | (d, dv), (d,) |
| U^KQ | ``key_query_route`` | k kᵀ q qᵀ | (d, d) |
| M^KQP, M^KQm | ``value_map``, ``sum_map`` | Z ↦ k kᵀ Z k vᵀ, Z ↦ k kᵀ Z k | (d², d·dv), (d², d) |
| ρ | ``attenuation`` | the product of γ | () |
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, NamedTuple, TypeVar

from hla.arrays import (
    FLOATING,
    Array,
    DType,
    Namespace,
    broadcast_shapes,
    cast,
    convert_option,
    device,
    dtype_name,
    family,
    namespace,
    same_library_and_device,
)
from hla.checks import accumulation_dtype, check_inputs, check_shapes
from hla.errors import DTypeError, OptionError, ShapeError, message

__all__ = [
    "AHLASegment",
    "HLA2PrintedSegment",
    "HLA2Segment",
    "HLA3CorrectedSegment",
    "HLA3Segment",
    "UnmaskedSegment",
    "ahla_concat",
    "ahla_concat_decayed",
    "ahla_concat_decayed_corrected",
    "ahla_output",
    "ahla_tensor",
    "ahla_token",
    "algorithm1",
    "algorithm2",
    "algorithm3",
    "algorithm4",
    "equation_3_1",
    "equation_7_5",
    "exclusive_scan",
    "figure_1b",
    "figure_1c",
    "figure_1c_corrected",
    "figure_2b",
    "figure_2c",
    "figure_2c_corrected",
    "hla2_concat",
    "hla2_concat_decayed",
    "hla2_concat_decayed_corrected",
    "hla2_concat_printed",
    "hla2_output",
    "hla2_printed_token",
    "hla2_tensor",
    "hla2_token",
    "hla3_concat",
    "hla3_concat_corrected",
    "hla3_concat_decayed",
    "hla3_corrected_token",
    "hla3_output",
    "hla3_tensor",
    "hla3_token",
    "hla3_unmasked",
    "identity",
    "section_6_2_scan",
    "theorem_3_1",
    "theorem_4_1",
    "theorem_6_1",
    "theorem_7_1",
    "theorem_7_2",
    "unmasked_concat",
    "unmasked_token",
]

Segment = TypeVar("Segment")
Values = TypeVar("Values", bound="tuple[Array, ...]")


# --- Section 3: second order ------------------------------------------------------------------------------------


def hla2_tensor(q: Array, k: Array, v: Array) -> Array:
    """Section 3, the unmasked operator over the whole sequence: HLA₂(Q, K, V) = T₂V, T₂ = (QKᵀ)(QKᵀ)ᵀ = Q(KᵀK)Qᵀ.

    Args:
        q, k: (*batch, T, d).
        v: (*batch, T, dv).

    Returns:
        (*batch, T, dv), every token reading every other one.

    >>> import numpy as np
    >>> hla2_tensor(np.ones((3, 1)), np.ones((3, 1)), np.ones((3, 1)))[:, 0]
    array([9., 9., 9.])
    """
    call = _prepare(q, k, v)
    moment = call.transpose(call.k) @ call.k
    return call.finish(call.q @ (moment @ (call.transpose(call.q) @ call.v)))


def equation_3_1(
    q: Array, k: Array, v: Array, *, decay: float | Array | None = None, normalize: bool = False, eps: float = 1e-6
) -> Array:
    """Eq. (3.1), the unmasked streaming form o_t = q_tᵀ S_t C_t; normalised, Eq. (3.2), divided by q_tᵀ S_t m_t + ε.

    "Unmasked" means that all pairs of the prefix count, also those with the key after the query that reads it.
    With ``decay`` the summaries are those of Section 4.3.

    Args:
        q, k: (*batch, T, d).
        v: (*batch, T, dv).
        decay: γ in (0, 1], a number or an array that broadcasts to (*batch,).
        normalize: divide by the denominator.
        eps: ε.

    Returns:
        (*batch, T, dv).

    >>> import numpy as np
    >>> equation_3_1(np.ones((3, 1)), np.ones((3, 1)), np.ones((3, 1)))[:, 0]
    array([1., 4., 9.])
    """
    call = _prepare(q, k, v, decay)
    moment, value, mass = call.zeros(call.d, call.d), call.zeros(call.d, call.dv), call.zeros(call.d)
    outputs = []
    for q_t, k_t, v_t in call.tokens():
        moment = call.gamma_matrix * moment + _outer(k_t, k_t)
        value = call.gamma_matrix * value + _outer(q_t, v_t)
        mass = call.gamma_vector * mass + q_t
        reading = _row(q_t, moment)
        outputs.append(_ratio(_row(reading, value), _dot(reading, mass), normalize, eps))
    return call.stack(outputs)


def theorem_3_1(q: Array, k: Array, v: Array, *, normalize: bool = False, eps: float = 1e-6) -> Array:
    """Theorem 3.1, the masked streaming identity: o_t = q_tᵀ(S_t C_t − G_t), Eq. (3.3); normalised, Eq. (3.4).

    With S_t = Σ_{i≤t} k_i k_iᵀ, C_t = Σ_{i≤t} q_i v_iᵀ, G_t = Σ_{i≤t} k_i k_iᵀ C_{i−1}, taken here as prefix
    sums, this equals ((WWᵀ) ⊙ L)V with W = L ⊙ QKᵀ (`figure_1b`). Eq. (3.4) divides by q_tᵀ(S_t m_t − h_t) + ε.
    The denominator may be negative or near zero: that is the operator.

    Args:
        q, k: (*batch, T, d).
        v: (*batch, T, dv).
        normalize: Eq. (3.4) instead of (3.3).
        eps: ε.

    Returns:
        (*batch, T, dv).

    >>> import numpy as np
    >>> theorem_3_1(np.ones((3, 1)), np.ones((3, 1)), np.ones((3, 1)))[:, 0]
    array([1., 3., 6.])
    """
    call = _prepare(q, k, v)
    moment = call.prefix_sum(_outer(call.k, call.k), axis=-3)
    value = call.prefix_sum(_outer(call.q, call.v), axis=-3)
    mass = call.prefix_sum(call.q, axis=-2)
    cross = call.prefix_sum(_outer(call.k, _row(call.k, call.before(value, axis=-3))), axis=-3)
    cross_mass = call.prefix_sum(call.k * _dot(call.k, call.before(mass, axis=-2))[..., None], axis=-2)
    reading = _row(call.q, moment)
    numerator = _row(reading, value) - _row(call.q, cross)
    denominator = _dot(reading, mass) - _dot(call.q, cross_mass)
    return call.finish(_ratio(numerator, denominator, normalize, eps))


def figure_1b(q: Array, k: Array, v: Array) -> Array:
    """Figure 1(B), the parallel form: O = ((WWᵀ) ⊙ L)V with W = L ⊙ QKᵀ, in O(T²) memory.

    Args:
        q, k: (*batch, T, d).
        v: (*batch, T, dv).

    Returns:
        (*batch, T, dv).

    >>> import numpy as np
    >>> figure_1b(np.ones((3, 1)), np.ones((3, 1)), np.ones((3, 1)))[:, 0]
    array([1., 3., 6.])
    """
    call = _prepare(q, k, v)
    return call.finish(_masked_second_order(call, call.q, call.k, call.v))


def figure_1c(q: Array, k: Array, v: Array, *, chunk_size: int = 16) -> Array:
    """Figure 1(C) as printed: o_t = q_tᵀ(S_A C_A − G_A) + [((WWᵀ) ⊙ L)V]_t, A all chunks before that of t.

    This misses q_tᵀ S_A C_t, C_t summed inside the chunk up to t: keys before the chunk that meet a query of
    the chunk. So it equals the operator only in the first chunk. `figure_1c_corrected` has the term.

    Args:
        q, k: (*batch, T, d).
        v: (*batch, T, dv).
        chunk_size: tokens per chunk, at least 1; T need not be a multiple of it.

    Returns:
        (*batch, T, dv).

    >>> import numpy as np
    >>> figure_1c(np.ones((4, 1)), np.ones((4, 1)), np.ones((4, 1)), chunk_size=2)[:, 0]
    array([1., 3., 4., 6.])
    """
    return _figure_1c(q, k, v, chunk_size, missing_term=False)


def figure_1c_corrected(q: Array, k: Array, v: Array, *, chunk_size: int = 16) -> Array:
    """Figure 1(C) with its missing term: o_t = q_tᵀ(S_A C_A − G_A + S_A C_t) + [((WWᵀ) ⊙ L)V]_t.

    Args:
        q, k: (*batch, T, d).
        v: (*batch, T, dv).
        chunk_size: tokens per chunk, at least 1; T need not be a multiple of it.

    Returns:
        (*batch, T, dv), equal to `figure_1b` for every chunk size.

    >>> import numpy as np
    >>> figure_1c_corrected(np.ones((4, 1)), np.ones((4, 1)), np.ones((4, 1)), chunk_size=2)[:, 0]
    array([ 1.,  3.,  6., 10.])
    """
    return _figure_1c(q, k, v, chunk_size, missing_term=True)


def _figure_1c(q: Array, k: Array, v: Array, chunk_size: int, *, missing_term: bool) -> Array:
    call = _prepare(q, k, v)
    moment, value, cross = call.zeros(call.d, call.d), call.zeros(call.d, call.dv), call.zeros(call.d, call.dv)
    outputs = []
    for q_c, k_c, v_c in call.chunks(chunk_size):
        output = q_c @ (moment @ value - cross) + _masked_second_order(call, q_c, k_c, v_c)
        if missing_term:
            output = output + call.xp.tril((q_c @ moment) @ call.transpose(q_c)) @ v_c
        outputs.append(output)
        # The carry, by Eq. (4.1); G of the chunk alone is Kᵀ (KQᵀ below the diagonal) V.
        keys = call.transpose(k_c)
        moment_c, value_c = keys @ k_c, call.transpose(q_c) @ v_c
        cross_c = keys @ (call.xp.tril(k_c @ call.transpose(q_c), k=-1) @ v_c)
        cross = cross + cross_c + moment_c @ value
        moment, value = moment + moment_c, value + value_c
    return call.join(outputs)


def _masked_second_order(call: _Call, q: Array, k: Array, v: Array) -> Array:
    weight = call.xp.tril(q @ call.transpose(k))
    return call.xp.tril(weight @ call.transpose(weight)) @ v


# --- Section 4: chunk-parallel training; Section 5: Algorithm 1 ------------------------------------------------------


class UnmaskedSegment(NamedTuple):
    """The unmasked state (S, C, m) of Section 4.1, with the attenuation ρ of Section 4.2."""

    key_moment: Array
    query_value: Array
    query_sum: Array
    attenuation: Array


class HLA2Segment(NamedTuple):
    """The masked state (S, C, m, G, h, ρ) of Section 4.2; ρ is 1 without decay."""

    key_moment: Array
    query_value: Array
    query_sum: Array
    cross_value: Array
    cross_sum: Array
    attenuation: Array


class HLA2PrintedSegment(NamedTuple):
    """`HLA2Segment` with T = Σ k_i k_iᵀ / γ_i, which the recurrence of Section 4.3 needs and the paper lacks."""

    key_moment: Array
    query_value: Array
    query_sum: Array
    cross_value: Array
    cross_sum: Array
    undecayed_key_moment: Array
    attenuation: Array


def unmasked_token(q: Array, k: Array, v: Array, *, decay: float | Array | None = None) -> UnmaskedSegment:
    """Section 4.1, the segment of one token: (k kᵀ, q vᵀ, q) and ρ = γ.

    Args:
        q, k: (*batch, d).
        v: (*batch, dv).
        decay: γ in (0, 1], a number or an array that broadcasts to (*batch,).

    >>> import numpy as np
    >>> unmasked_token(np.ones(1), 2 * np.ones(1), 3 * np.ones(1)).key_moment
    array([[4.]])
    """
    token = _prepare_token(q, k, v, decay)
    return UnmaskedSegment(_outer(token.k, token.k), _outer(token.q, token.v), token.q, token.gamma)


def unmasked_concat(a: UnmaskedSegment, b: UnmaskedSegment) -> UnmaskedSegment:
    """Sections 4.1 and 4.2, unmasked ⊕ and ⊕γ: (ρ_B S_A + S_B, ρ_B C_A + C_B, ρ_B m_A + m_B, ρ_A ρ_B). Associative.

    Args:
        a, b: adjacent segments, a the earlier one.

    >>> import numpy as np
    >>> a = unmasked_token(np.ones(1), np.ones(1), np.ones(1), decay=0.5)
    >>> unmasked_concat(a, a).key_moment
    array([[1.5]])
    """
    matrix, vector = b.attenuation[..., None, None], b.attenuation[..., None]
    return UnmaskedSegment(
        matrix * a.key_moment + b.key_moment,
        matrix * a.query_value + b.query_value,
        vector * a.query_sum + b.query_sum,
        a.attenuation * b.attenuation,
    )


def hla2_token(q: Array, k: Array, v: Array, *, decay: float | Array | None = None) -> HLA2Segment:
    """Section 4.2, the segment of one token: (k kᵀ, q vᵀ, q, 0, 0) and ρ = γ.

    Args:
        q, k: (*batch, d).
        v: (*batch, dv).
        decay: γ in (0, 1], a number or an array that broadcasts to (*batch,).

    >>> import numpy as np
    >>> hla2_token(np.ones(1), 2 * np.ones(1), 3 * np.ones(1)).cross_value
    array([[0.]])
    """
    token = _prepare_token(q, k, v, decay)
    xp, value = token.xp, _outer(token.q, token.v)
    return HLA2Segment(
        _outer(token.k, token.k), value, token.q, xp.zeros_like(value), xp.zeros_like(token.q), token.gamma
    )


def hla2_concat(a: HLA2Segment, b: HLA2Segment) -> HLA2Segment:
    """Eq. (4.1), the masked ⊕ without decay: G_AB = G_A + G_B + S_B C_A, h_AB = h_A + h_B + S_B m_A. Associative.

    Args:
        a, b: adjacent segments, a the earlier one; their ρ is multiplied and otherwise not used.

    >>> import numpy as np
    >>> a = hla2_token(np.ones(1), np.ones(1), np.ones(1))
    >>> hla2_concat(a, a).cross_value
    array([[1.]])
    """
    return HLA2Segment(
        a.key_moment + b.key_moment,
        a.query_value + b.query_value,
        a.query_sum + b.query_sum,
        a.cross_value + b.cross_value + b.key_moment @ a.query_value,
        a.cross_sum + b.cross_sum + _column(b.key_moment, a.query_sum),
        a.attenuation * b.attenuation,
    )


def hla2_concat_decayed(a: HLA2Segment, b: HLA2Segment) -> HLA2Segment:
    """Section 4.2, the masked ⊕γ as printed: G_AB = ρ_B G_A + G_B + S_B(ρ_B C_A). **Not associative.**

    The paper says that it is, and Theorem 4.1 rests on that. Yet (A⊕B)⊕C and A⊕(B⊕C) differ in G by
    ρ_B ρ_C (1 − ρ_C) S_B C_A. Nor is adding one token at a time the recurrence of Section 4.3, which reads
    C_{t−1} where this reads γ C_{t−1}. `hla2_concat_decayed_corrected` is associative and gives the decayed
    masked operator; `hla2_concat_printed` is associative and gives the recurrence of Section 4.3.

    Args:
        a, b: adjacent segments, a the earlier one.

    >>> import numpy as np
    >>> a = hla2_token(np.ones(1), np.ones(1), np.ones(1), decay=0.5)
    >>> hla2_concat_decayed(hla2_concat_decayed(a, a), a).cross_value
    array([[1.]])
    >>> hla2_concat_decayed(a, hla2_concat_decayed(a, a)).cross_value
    array([[0.875]])
    """
    return _hla2_decayed(a, b, cross_exponent=1)


def hla2_concat_decayed_corrected(a: HLA2Segment, b: HLA2Segment) -> HLA2Segment:
    """⊕γ of Section 4.2 corrected: G_AB = ρ_B² G_A + G_B + ρ_B S_B C_A, h alike. Associative.

    Its single-token fold is G_t = γ² G_{t−1} + γ k_t k_tᵀ C_{t−1}, and q_tᵀ(S_t C_t − G_t) is then the masked
    operator whose pairs carry Γ(t, i) Γ(t, j).

    Args:
        a, b: adjacent segments, a the earlier one.

    >>> import numpy as np
    >>> a = hla2_token(np.ones(1), np.ones(1), np.ones(1), decay=0.5)
    >>> hla2_concat_decayed_corrected(hla2_concat_decayed_corrected(a, a), a).cross_value
    array([[0.875]])
    >>> hla2_concat_decayed_corrected(a, hla2_concat_decayed_corrected(a, a)).cross_value
    array([[0.875]])
    """
    return _hla2_decayed(a, b, cross_exponent=2)


def _hla2_decayed(a: HLA2Segment, b: HLA2Segment, *, cross_exponent: int) -> HLA2Segment:
    matrix, vector = b.attenuation[..., None, None], b.attenuation[..., None]
    return HLA2Segment(
        matrix * a.key_moment + b.key_moment,
        matrix * a.query_value + b.query_value,
        vector * a.query_sum + b.query_sum,
        matrix**cross_exponent * a.cross_value + b.cross_value + b.key_moment @ (matrix * a.query_value),
        vector**cross_exponent * a.cross_sum + b.cross_sum + _column(b.key_moment, vector * a.query_sum),
        a.attenuation * b.attenuation,
    )


def hla2_printed_token(q: Array, k: Array, v: Array, *, decay: float | Array | None = None) -> HLA2PrintedSegment:
    """One token for `hla2_concat_printed`: `hla2_token` and T = k kᵀ / γ.

    Args:
        q, k: (*batch, d).
        v: (*batch, dv).
        decay: γ in (0, 1], a number or an array that broadcasts to (*batch,).

    >>> import numpy as np
    >>> hla2_printed_token(np.ones(1), np.ones(1), np.ones(1), decay=0.5).undecayed_key_moment
    array([[2.]])
    """
    segment = hla2_token(q, k, v, decay=decay)
    undecayed = segment.key_moment / segment.attenuation[..., None, None]
    return HLA2PrintedSegment(*segment[:-1], undecayed, segment.attenuation)


def hla2_concat_printed(a: HLA2PrintedSegment, b: HLA2PrintedSegment) -> HLA2PrintedSegment:
    """The associative operator whose fold is the recurrence printed in Section 4.3; not in the paper.

    T_AB = T_A + T_B, G_AB = ρ_B G_A + G_B + ρ_B T_B C_A, h alike; S, C, m decay as in Section 4.2.

    Args:
        a, b: adjacent segments, a the earlier one.

    >>> import numpy as np
    >>> a = hla2_printed_token(np.ones(1), np.ones(1), np.ones(1), decay=0.5)
    >>> hla2_concat_printed(hla2_concat_printed(a, a), a).cross_value
    array([[2.]])
    >>> hla2_concat_printed(a, hla2_concat_printed(a, a)).cross_value
    array([[2.]])
    """
    matrix, vector = b.attenuation[..., None, None], b.attenuation[..., None]
    return HLA2PrintedSegment(
        matrix * a.key_moment + b.key_moment,
        matrix * a.query_value + b.query_value,
        vector * a.query_sum + b.query_sum,
        matrix * (a.cross_value + b.undecayed_key_moment @ a.query_value) + b.cross_value,
        vector * (a.cross_sum + _column(b.undecayed_key_moment, a.query_sum)) + b.cross_sum,
        a.undecayed_key_moment + b.undecayed_key_moment,
        a.attenuation * b.attenuation,
    )


def hla2_output(
    segment: HLA2Segment | HLA2PrintedSegment,
    q_t: Array,
    *,
    normalize: bool = False,
    eps: float = 1e-6,
    ridge: float = 0.0,
) -> Array:
    """Eqs. (3.3) and (3.4) with lines 7–16 of Algorithm 1: o_t = q_tᵀ((S + λI)C − G), divided if ``normalize``.

    Args:
        segment: all tokens up to and including t.
        q_t: (*batch, d).
        normalize: divide by q_tᵀ((S + λI)m − h) + ε.
        eps: ε.
        ridge: λ.

    Returns:
        (*batch, dv) in the dtype of the segment.

    >>> import numpy as np
    >>> a = hla2_token(np.ones(1), np.ones(1), np.ones(1))
    >>> hla2_output(hla2_concat(a, a), np.ones(1))
    array([3.])
    """
    q_t = cast(namespace(q_t, "q_t"), q_t, segment.query_sum.dtype)
    reading = _row(q_t, segment.key_moment) + ridge * q_t
    numerator = _row(reading, segment.query_value) - _row(q_t, segment.cross_value)
    denominator = _dot(reading, segment.query_sum) - _dot(q_t, segment.cross_sum)
    return _ratio(numerator, denominator, normalize, eps)


def identity(segment: Values) -> Values:
    """Remark 4.2, the zero-length segment (0, …, 0, ρ = 1) of the kind, shapes and dtype of ``segment``.

    Both linear maps of Section 7.3 are the zero map in it.

    >>> import numpy as np
    >>> a = hla2_token(np.ones(1), np.ones(1), np.ones(1), decay=0.5)
    >>> identity(a).key_moment, float(identity(a).attenuation)
    (array([[0.]]), 1.0)
    """
    xp = namespace(segment[0])
    return type(segment)(*(xp.zeros_like(x) for x in segment[:-1]), xp.ones_like(segment[-1]))  # type: ignore[call-arg]


def exclusive_scan(
    concat: Callable[[Segment, Segment], Segment], segments: Sequence[Segment], zero: Segment
) -> list[Segment]:
    """Remark 4.2, the exclusive Blelloch scan: P_t = zero ⊕ T_1 ⊕ … ⊕ T_{t−1}, by a tree of logarithmic depth.

    The bracketing is the tree's: with an operator that is not associative the result is not that of a serial fold.

    Args:
        concat: the operator, called (earlier, later).
        segments: T_1, …, T_n.
        zero: its identity.

    Returns:
        P_1, …, P_n.

    >>> exclusive_scan(lambda a, b: a + b, ["h", "l", "a"], "")
    ['', 'h', 'hl']
    """
    if len(segments) <= 1:
        return [zero] * len(segments)
    pairs = [concat(segments[i], segments[i + 1]) for i in range(0, len(segments) - 1, 2)]
    if len(segments) % 2:
        pairs.append(segments[-1])
    prefixes: list[Segment] = []
    for i, prefix in enumerate(exclusive_scan(concat, pairs, zero)):
        prefixes.append(prefix)
        if 2 * i + 1 < len(segments):
            prefixes.append(concat(prefix, segments[2 * i]))
    return prefixes


def theorem_4_1(
    q: Array,
    k: Array,
    v: Array,
    *,
    decay: float | Array | None = None,
    normalize: bool = False,
    eps: float = 1e-6,
    concat: Callable[[HLA2Segment, HLA2Segment], HLA2Segment] | None = None,
) -> Array:
    """Theorem 4.1, scan equivalence: the outputs of P_t ⊕ T_t with P_t from an exclusive Blelloch scan.

    The theorem says that these are the outputs of the serial recurrence. Without decay they are. With decay the
    printed operator is not associative (`hla2_concat_decayed`), so they depend on the tree and are neither those of
    `algorithm1` nor of the decayed masked operator; ``concat=hla2_concat_decayed_corrected`` gives the latter.

    Args:
        q, k: (*batch, T, d).
        v: (*batch, T, dv).
        decay: γ in (0, 1], a number or an array that broadcasts to (*batch,).
        normalize: Eq. (3.4) instead of (3.3).
        eps: ε.
        concat: the operator; None takes the printed one, `hla2_concat` or with decay `hla2_concat_decayed`.

    Returns:
        (*batch, T, dv).

    >>> import numpy as np
    >>> one = np.ones((5, 1))
    >>> theorem_4_1(one, one, one)[:, 0]
    array([ 1.,  3.,  6., 10., 15.])
    >>> theorem_4_1(one, one, one, decay=0.5)[4], algorithm1(one, one, one, decay=0.5)[4]
    (array([2.22265625]), array([0.50390625]))
    """
    call = _prepare(q, k, v, decay)
    if concat is None:
        concat = hla2_concat if decay is None else hla2_concat_decayed
    tokens = [hla2_token(*token, decay=call.gamma) for token in call.tokens()]
    prefixes = exclusive_scan(concat, tokens, identity(tokens[0])) if tokens else []
    return call.stack(
        [
            hla2_output(concat(prefix, token), q_t, normalize=normalize, eps=eps)
            for prefix, token, (q_t, _, _) in zip(prefixes, tokens, call.tokens(), strict=True)
        ]
    )


def algorithm1(
    q: Array,
    k: Array,
    v: Array,
    *,
    decay: float | Array | None = None,
    normalize: bool = False,
    eps: float = 1e-6,
    ridge: float = 0.0,
) -> Array:
    """Algorithm 1, masked second-order HLA: o_t = q_tᵀ((S_t + λI)C_t − G_t), decayed as in Section 4.3.

    Lines 5–6 are folded serially: S_t = γS_{t−1} + k_t k_tᵀ, C and m alike, G_t = γG_{t−1} + k_t k_tᵀ C_{t−1}, h alike.
    Line 2 asks for a scan instead; without decay that is the same (Theorem 4.1), with decay it is not, because
    the printed ⊕γ is not associative and reads γC_{t−1} where line 6 reads C_{t−1}; see `theorem_4_1`.

    Without decay and ridge this is the masked operator of Theorem 3.1. With decay it is not the decayed masked
    operator (pairs with the key after the query come back with negative weight); that is `hla.hla2`. This one is
    ``hla.hla2(…, definition="as_printed")``.

    Args:
        q, k: (*batch, T, d).
        v: (*batch, T, dv).
        decay: γ in (0, 1], a number or an array that broadcasts to (*batch,).
        normalize: divide by q_tᵀ((S_t + λI)m_t − h_t) + ε (lines 12–16).
        eps: ε.
        ridge: λ (line 7). It adds λ q_tᵀ C_t, which is no part of the masked bilinear form.

    Returns:
        (*batch, T, dv).

    >>> import numpy as np
    >>> one = np.ones((3, 1))
    >>> algorithm1(one, one, one)[:, 0]
    array([1., 3., 6.])
    >>> algorithm1(one, one, one, decay=0.5)[:, 0]
    array([1.    , 1.25  , 1.0625])
    """
    call = _prepare(q, k, v, decay)
    gamma_matrix, gamma_vector = call.gamma_matrix, call.gamma_vector
    moment, value, mass = call.zeros(call.d, call.d), call.zeros(call.d, call.dv), call.zeros(call.d)
    cross, cross_mass = call.zeros(call.d, call.dv), call.zeros(call.d)
    outputs = []
    for q_t, k_t, v_t in call.tokens():
        cross = gamma_matrix * cross + _outer(k_t, _row(k_t, value))  # line 6 reads C and m before line 5 moves them
        cross_mass = gamma_vector * cross_mass + k_t * _dot(k_t, mass)[..., None]
        moment = gamma_matrix * moment + _outer(k_t, k_t)  # line 5
        value = gamma_matrix * value + _outer(q_t, v_t)
        mass = gamma_vector * mass + q_t
        reading = _row(q_t, moment) + ridge * q_t  # lines 7, 9
        numerator = _row(reading, value) - _row(q_t, cross)  # line 10
        denominator = _dot(reading, mass) - _dot(q_t, cross_mass)  # line 14
        outputs.append(_ratio(numerator, denominator, normalize, eps))
    return call.stack(outputs)


# --- Section 6: AHLA ----------------------------------------------------------------------------------------------


class AHLASegment(NamedTuple):
    """The augmented state (R, P, m, E, n, ρ) of Section 6.2; ρ is 1 without decay. Streaming needs no R."""

    key_query: Array
    key_value: Array
    key_sum: Array
    routed_value: Array
    routed_sum: Array
    attenuation: Array


def ahla_tensor(q: Array, k: Array, v: Array) -> Array:
    """Section 6, the unmasked operator over the whole sequence: AHLA(Q, K, V) = AAV = Q(KᵀQ)(KᵀV).

    Args:
        q, k: (*batch, T, d).
        v: (*batch, T, dv).

    Returns:
        (*batch, T, dv), every token reading every other one.

    >>> import numpy as np
    >>> ahla_tensor(np.ones((3, 1)), np.ones((3, 1)), np.ones((3, 1)))[:, 0]
    array([9., 9., 9.])
    """
    call = _prepare(q, k, v)
    keys = call.transpose(call.k)
    return call.finish(call.q @ ((keys @ call.q) @ (keys @ call.v)))


def theorem_6_1(q: Array, k: Array, v: Array, *, normalize: bool = False, eps: float = 1e-6) -> Array:
    """Theorem 6.1, the masked streaming identity for AHLA: o_t = q_tᵀE_t; normalised, divided by q_tᵀn_t + ε.

    With P_t = Σ_{j≤t} k_j v_jᵀ and E_t = Σ_{i≤t} k_i (q_iᵀ P_i), taken here as prefix sums, this equals Eq. (6.1),
    ((AA) ⊙ L)V with A = L ⊙ QKᵀ (`figure_2b`).

    Args:
        q, k: (*batch, T, d).
        v: (*batch, T, dv).
        normalize: divide by the denominator.
        eps: ε.

    Returns:
        (*batch, T, dv).

    >>> import numpy as np
    >>> theorem_6_1(np.ones((3, 1)), np.ones((3, 1)), np.ones((3, 1)))[:, 0]
    array([1., 3., 6.])
    """
    call = _prepare(q, k, v)
    value = call.prefix_sum(_outer(call.k, call.v), axis=-3)
    mass = call.prefix_sum(call.k, axis=-2)
    routed = call.prefix_sum(_outer(call.k, _row(call.q, value)), axis=-3)
    routed_mass = call.prefix_sum(call.k * _dot(call.q, mass)[..., None], axis=-2)
    return call.finish(_ratio(_row(call.q, routed), _dot(call.q, routed_mass), normalize, eps))


def figure_2b(q: Array, k: Array, v: Array) -> Array:
    """Figure 2(B) and Eq. (6.1), the parallel form of AHLA: O = ((AA) ⊙ L)V with A = L ⊙ QKᵀ, in O(T²) memory.

    Args:
        q, k: (*batch, T, d).
        v: (*batch, T, dv).

    Returns:
        (*batch, T, dv).

    >>> import numpy as np
    >>> figure_2b(np.ones((3, 1)), np.ones((3, 1)), np.ones((3, 1)))[:, 0]
    array([1., 3., 6.])
    """
    call = _prepare(q, k, v)
    return call.finish(_masked_cascade(call, call.q, call.k, call.v))


def figure_2c(q: Array, k: Array, v: Array, *, chunk_size: int = 16) -> Array:
    """Figure 2(C) as printed: o_t = q_tᵀ(E_A + R_{<t} P_A) + [((AA) ⊙ L)V]_t, R summed inside the chunk.

    The sum in the carry must run to t itself, R_{≤t}: k_t may route what came before the chunk too. So as printed
    it equals the operator only in the first chunk; `figure_2c_corrected` runs to t.

    Args:
        q, k: (*batch, T, d).
        v: (*batch, T, dv).
        chunk_size: tokens per chunk, at least 1; T need not be a multiple of it.

    Returns:
        (*batch, T, dv).

    >>> import numpy as np
    >>> figure_2c(np.ones((4, 1)), np.ones((4, 1)), np.ones((4, 1)), chunk_size=2)[:, 0]
    array([1., 3., 4., 8.])
    """
    return _figure_2c(q, k, v, chunk_size, diagonal=-1)


def figure_2c_corrected(q: Array, k: Array, v: Array, *, chunk_size: int = 16) -> Array:
    """Figure 2(C) with the right index: o_t = q_tᵀ(E_A + R_{≤t} P_A) + [((AA) ⊙ L)V]_t.

    Args:
        q, k: (*batch, T, d).
        v: (*batch, T, dv).
        chunk_size: tokens per chunk, at least 1; T need not be a multiple of it.

    Returns:
        (*batch, T, dv), equal to `figure_2b` for every chunk size.

    >>> import numpy as np
    >>> figure_2c_corrected(np.ones((4, 1)), np.ones((4, 1)), np.ones((4, 1)), chunk_size=2)[:, 0]
    array([ 1.,  3.,  6., 10.])
    """
    return _figure_2c(q, k, v, chunk_size, diagonal=0)


def _figure_2c(q: Array, k: Array, v: Array, chunk_size: int, *, diagonal: int) -> Array:
    call = _prepare(q, k, v)
    value, routed = call.zeros(call.d, call.dv), call.zeros(call.d, call.dv)
    outputs = []
    for q_c, k_c, v_c in call.chunks(chunk_size):
        keys = call.transpose(k_c)
        affinity = q_c @ keys
        carried = q_c @ routed + call.xp.tril(affinity, k=diagonal) @ (q_c @ value)
        outputs.append(carried + _masked_cascade(call, q_c, k_c, v_c))
        # The carry, by Eq. (6.2); E of the chunk alone is Kᵀ (L ⊙ QKᵀ) V.
        routed = routed + keys @ (call.xp.tril(affinity) @ v_c) + (keys @ q_c) @ value
        value = value + keys @ v_c
    return call.join(outputs)


def _masked_cascade(call: _Call, q: Array, k: Array, v: Array) -> Array:
    affinity = call.xp.tril(q @ call.transpose(k))
    return call.xp.tril(affinity @ affinity) @ v


def ahla_token(q: Array, k: Array, v: Array, *, decay: float | Array | None = None) -> AHLASegment:
    """Section 6.2, the segment of one token: (k qᵀ, k vᵀ, k, (qᵀk) k vᵀ, (qᵀk) k) and ρ = γ.

    Args:
        q, k: (*batch, d).
        v: (*batch, dv).
        decay: γ in (0, 1], a number or an array that broadcasts to (*batch,).

    >>> import numpy as np
    >>> ahla_token(np.ones(1), 2 * np.ones(1), 3 * np.ones(1)).routed_value
    array([[12.]])
    """
    token = _prepare_token(q, k, v, decay)
    value, meeting = _outer(token.k, token.v), _dot(token.q, token.k)[..., None]
    return AHLASegment(
        _outer(token.k, token.q), value, token.k, meeting[..., None] * value, meeting * token.k, token.gamma
    )


def ahla_concat(a: AHLASegment, b: AHLASegment) -> AHLASegment:
    """Eq. (6.2), ⊕_AHLA without decay: E_AB = E_A + E_B + R_B P_A, n_AB = n_A + n_B + R_B m_A. Associative.

    Args:
        a, b: adjacent segments, a the earlier one; their ρ is multiplied and otherwise not used.

    >>> import numpy as np
    >>> a = ahla_token(np.ones(1), np.ones(1), np.ones(1))
    >>> ahla_concat(a, a).routed_value
    array([[3.]])
    """
    return AHLASegment(
        a.key_query + b.key_query,
        a.key_value + b.key_value,
        a.key_sum + b.key_sum,
        a.routed_value + b.routed_value + b.key_query @ a.key_value,
        a.routed_sum + b.routed_sum + _column(b.key_query, a.key_sum),
        a.attenuation * b.attenuation,
    )


def ahla_concat_decayed(a: AHLASegment, b: AHLASegment) -> AHLASegment:
    """Section 6.2, the decayed ⊕_AHLA as printed: R_AB = ρ_B R_A + R_B. **Not associative.**

    E_AB = ρ_B E_A + E_B + R_B(ρ_B P_A), n alike. The paper says that it is associative; (A⊕B)⊕C and A⊕(B⊕C)
    differ in E by ρ_B ρ_C (1 − ρ_C) R_B P_A. Adding one token at a time gives Algorithm 2, any other bracketing
    does not. `ahla_concat_decayed_corrected` leaves R undecayed and is associative.

    Args:
        a, b: adjacent segments, a the earlier one.

    >>> import numpy as np
    >>> a = ahla_token(np.ones(1), np.ones(1), np.ones(1), decay=0.5)
    >>> ahla_concat_decayed(ahla_concat_decayed(a, a), a).routed_value
    array([[2.75]])
    >>> ahla_concat_decayed(a, ahla_concat_decayed(a, a)).routed_value
    array([[2.625]])
    """
    return _ahla_decayed(a, b, b.attenuation[..., None, None] * a.key_query + b.key_query)


def ahla_concat_decayed_corrected(a: AHLASegment, b: AHLASegment) -> AHLASegment:
    """⊕_AHLA of Section 6.2 corrected: R_AB = R_A + R_B, all else as printed. Associative.

    Args:
        a, b: adjacent segments, a the earlier one.

    >>> import numpy as np
    >>> a = ahla_token(np.ones(1), np.ones(1), np.ones(1), decay=0.5)
    >>> ahla_concat_decayed_corrected(ahla_concat_decayed_corrected(a, a), a).routed_value
    array([[2.75]])
    >>> ahla_concat_decayed_corrected(a, ahla_concat_decayed_corrected(a, a)).routed_value
    array([[2.75]])
    """
    return _ahla_decayed(a, b, a.key_query + b.key_query)


def _ahla_decayed(a: AHLASegment, b: AHLASegment, key_query: Array) -> AHLASegment:
    matrix, vector = b.attenuation[..., None, None], b.attenuation[..., None]
    return AHLASegment(
        key_query,
        matrix * a.key_value + b.key_value,
        vector * a.key_sum + b.key_sum,
        matrix * a.routed_value + b.routed_value + b.key_query @ (matrix * a.key_value),
        vector * a.routed_sum + b.routed_sum + _column(b.key_query, vector * a.key_sum),
        a.attenuation * b.attenuation,
    )


def ahla_output(segment: AHLASegment, q_t: Array, *, normalize: bool = False, eps: float = 1e-6) -> Array:
    """Theorem 6.1, the read-out o_t = q_tᵀE_t, divided by q_tᵀn_t + ε if ``normalize``.

    Args:
        segment: all tokens up to and including t.
        q_t: (*batch, d).
        normalize: divide by the denominator.
        eps: ε.

    Returns:
        (*batch, dv) in the dtype of the segment.

    >>> import numpy as np
    >>> a = ahla_token(np.ones(1), np.ones(1), np.ones(1))
    >>> ahla_output(ahla_concat(a, a), np.ones(1))
    array([3.])
    """
    q_t = cast(namespace(q_t, "q_t"), q_t, segment.key_sum.dtype)
    return _ratio(_row(q_t, segment.routed_value), _dot(q_t, segment.routed_sum), normalize, eps)


def section_6_2_scan(
    q: Array,
    k: Array,
    v: Array,
    *,
    decay: float | Array | None = None,
    normalize: bool = False,
    eps: float = 1e-6,
    concat: Callable[[AHLASegment, AHLASegment], AHLASegment] | None = None,
) -> Array:
    """Section 6.2, "scan equivalence" of AHLA: the outputs of P_t ⊕ T_t with P_t from an exclusive Blelloch scan.

    Without decay these are the outputs of `algorithm2`. With decay and the printed operator they are not, since it is
    not associative; with ``concat=ahla_concat_decayed_corrected`` they are.

    Args:
        q, k: (*batch, T, d).
        v: (*batch, T, dv).
        decay: γ in (0, 1], a number or an array that broadcasts to (*batch,).
        normalize: divide by the denominator.
        eps: ε.
        concat: the operator; None takes the printed one, `ahla_concat` or with decay `ahla_concat_decayed`.

    Returns:
        (*batch, T, dv).

    >>> import numpy as np
    >>> one = np.ones((5, 1))
    >>> section_6_2_scan(one, one, one, decay=0.5)[4], algorithm2(one, one, one, decay=0.5)[4]
    (array([3.46875]), array([3.5625]))
    """
    call = _prepare(q, k, v, decay)
    if concat is None:
        concat = ahla_concat if decay is None else ahla_concat_decayed
    tokens = [ahla_token(*token, decay=call.gamma) for token in call.tokens()]
    prefixes = exclusive_scan(concat, tokens, identity(tokens[0])) if tokens else []
    return call.stack(
        [
            ahla_output(concat(prefix, token), q_t, normalize=normalize, eps=eps)
            for prefix, token, (q_t, _, _) in zip(prefixes, tokens, call.tokens(), strict=True)
        ]
    )


def algorithm2(
    q: Array, k: Array, v: Array, *, decay: float | Array | None = None, normalize: bool = False, eps: float = 1e-6
) -> Array:
    """Algorithm 2, AHLA streaming: P_t = γP_{t−1} + k_t v_tᵀ, E_t = γE_{t−1} + k_t(q_tᵀP_t), o_t = q_tᵀE_t.

    This is the masked operator of Eq. (6.1), with decay too: in o_t, v_j has the weight
    Σ_{j≤i≤t} Γ(t,i)Γ(i,j)(q_t·k_i)(q_i·k_j), Γ(t,j) the product of γ over j+1, …, t.

    Args:
        q, k: (*batch, T, d).
        v: (*batch, T, dv).
        decay: γ in (0, 1], a number or an array that broadcasts to (*batch,).
        normalize: divide by q_tᵀn_t + ε, n_t = γn_{t−1} + k_t(q_tᵀm_t), m_t = γm_{t−1} + k_t (lines 8–10).
        eps: ε.

    Returns:
        (*batch, T, dv).

    >>> import numpy as np
    >>> one = np.ones((3, 1))
    >>> algorithm2(one, one, one, decay=0.5)[:, 0]
    array([1.  , 2.  , 2.75])
    """
    call = _prepare(q, k, v, decay)
    gamma_matrix, gamma_vector = call.gamma_matrix, call.gamma_vector
    value, mass = call.zeros(call.d, call.dv), call.zeros(call.d)
    routed, routed_mass = value, mass
    outputs = []
    for q_t, k_t, v_t in call.tokens():
        value = gamma_matrix * value + _outer(k_t, v_t)  # line 3
        mass = gamma_vector * mass + k_t
        routed = gamma_matrix * routed + _outer(k_t, _row(q_t, value))  # lines 4, 6
        routed_mass = gamma_vector * routed_mass + k_t * _dot(q_t, mass)[..., None]  # lines 5, 6
        outputs.append(_ratio(_row(q_t, routed), _dot(q_t, routed_mass), normalize, eps))  # lines 7–10
    return call.stack(outputs)


# --- Section 7: third order ---------------------------------------------------------------------------------------


class HLA3Segment(NamedTuple):
    """The scan state of Section 7.3, with ρ (1 without decay); `value_map` alone has d³·dv entries."""

    key_moment: Array
    query_moment: Array
    key_value: Array
    key_sum: Array
    corrected_value: Array
    corrected_sum: Array
    query_key_value: Array
    query_key_sum: Array
    key_query_route: Array
    value_map: Array
    sum_map: Array
    attenuation: Array


class HLA3CorrectedSegment(NamedTuple):
    """The scan state of the masked third-order operator itself: matrices of size d×d and d×dv only.

    ``routed_value`` is Σ q_t(q_tᵀP_t), ``routed_sum`` the same of m, ``key_query_route`` is Σ (S_t q_t) q_tᵀ and
    ``corrected_value`` is Σ (S_t q_t)(q_tᵀP_t), each with its decay.
    """

    key_moment: Array
    query_moment: Array
    key_value: Array
    key_sum: Array
    routed_value: Array
    routed_sum: Array
    key_query_route: Array
    corrected_value: Array
    corrected_sum: Array
    attenuation: Array


def hla3_tensor(q: Array, k: Array, v: Array) -> Array:
    """Section 7.1, the unmasked operator over the whole sequence: HLA₃(Q, K, V) = AAᵀAV = Q(KᵀK)(QᵀQ)(KᵀV).

    Args:
        q, k: (*batch, T, d).
        v: (*batch, T, dv).

    Returns:
        (*batch, T, dv), every token reading every other one.

    >>> import numpy as np
    >>> hla3_tensor(np.ones((3, 1)), np.ones((3, 1)), np.ones((3, 1)))[:, 0]
    array([27., 27., 27.])
    """
    call = _prepare(q, k, v)
    keys = call.transpose(call.k)
    return call.finish(call.q @ ((keys @ call.k) @ ((call.transpose(call.q) @ call.q) @ (keys @ call.v))))


def hla3_unmasked(q: Array, k: Array, v: Array, *, normalize: bool = False, eps: float = 1e-6) -> Array:
    """Section 7.1, unmasked: o_t = q_tᵀ S^K_t S^Q_t P_t; or that divided by q_tᵀ S^K_t S^Q_t m_t + ε.

    "Unmasked" means that all triples of the prefix count.

    Args:
        q, k: (*batch, T, d).
        v: (*batch, T, dv).
        normalize: divide by the denominator.
        eps: ε.

    Returns:
        (*batch, T, dv).

    >>> import numpy as np
    >>> hla3_unmasked(np.ones((3, 1)), np.ones((3, 1)), np.ones((3, 1)))[:, 0]
    array([ 1.,  8., 27.])
    """
    call = _prepare(q, k, v)
    key_moment = call.prefix_sum(_outer(call.k, call.k), axis=-3)
    query_moment = call.prefix_sum(_outer(call.q, call.q), axis=-3)
    value, mass = call.prefix_sum(_outer(call.k, call.v), axis=-3), call.prefix_sum(call.k, axis=-2)
    reading = _row(_row(call.q, key_moment), query_moment)
    return call.finish(_ratio(_row(reading, value), _dot(reading, mass), normalize, eps))


def theorem_7_1(q: Array, k: Array, v: Array, *, normalize: bool = False, eps: float = 1e-6) -> Array:
    """Theorem 7.1 as printed: o_t = q_tᵀ(S^K_t S^Q_t P_t − G⁽¹⁾_t − G⁽²⁾_t − G⁽³⁾_t), Eqs. (7.1) to (7.3).

    G⁽¹⁾ = Σ k_i k_iᵀ S^Q_{i−1} P_{i−1}, G⁽²⁾ = Σ S^K_{i−1} q_i q_iᵀ P_{i−1}, G⁽³⁾ = Σ S^K_{i−1} S^Q_{i−1} k_i v_iᵀ,
    taken here as prefix sums; normalised, divided by the same with m for P and h for G, plus ε.

    The theorem says that this is the masked operator ((WWᵀ) ⊙ L)WV. It is not: it sums the triples (i, u, j) whose
    latest index occurs at least twice, so it lacks those with u alone the latest (G⁽²⁾ takes them away) and keeps
    those with i = j > u. The masked operator is `hla.hla3`, and `hla3_concat_corrected` in the style of Section 7.3.

    Args:
        q, k: (*batch, T, d).
        v: (*batch, T, dv).
        normalize: divide by the denominator.
        eps: ε.

    Returns:
        (*batch, T, dv).

    >>> import numpy as np
    >>> theorem_7_1(np.ones((3, 1)), np.ones((3, 1)), np.ones((3, 1)))[:, 0]  # the masked operator: 1, 5, 14
    array([ 1.,  5., 12.])
    """
    call = _prepare(q, k, v)
    q, k, v = call.q, call.k, call.v
    key_moment = call.prefix_sum(_outer(k, k), axis=-3)
    query_moment = call.prefix_sum(_outer(q, q), axis=-3)
    value, mass = call.prefix_sum(_outer(k, v), axis=-3), call.prefix_sum(k, axis=-2)
    key_before, query_before = call.before(key_moment, axis=-3), call.before(query_moment, axis=-3)
    value_before, mass_before = call.before(value, axis=-3), call.before(mass, axis=-2)
    first, second = _row(k, query_before), _column(key_before, q)
    third = _column(key_before, first)  # S^Q is symmetric
    cross = (
        _outer(k, _row(first, value_before)) + _outer(second, _row(q, value_before)) + _outer(third, v)
    )  # the summands of G⁽¹⁾, G⁽²⁾, G⁽³⁾
    cross_mass = k * _dot(first, mass_before)[..., None] + second * _dot(q, mass_before)[..., None] + third
    reading = _row(_row(q, key_moment), query_moment)
    numerator = _row(reading, value) - _row(q, call.prefix_sum(cross, axis=-3))
    denominator = _dot(reading, mass) - _dot(q, call.prefix_sum(cross_mass, axis=-2))
    return call.finish(_ratio(numerator, denominator, normalize, eps))


def algorithm3(
    q: Array, k: Array, v: Array, *, decay: float | Array | None = None, normalize: bool = False, eps: float = 1e-6
) -> Array:
    """Algorithm 3, the third-order streaming kernel: o_t = q_tᵀ(S^K_t S^Q_t P_t − G⁽¹⁾_t − G⁽²⁾_t − G⁽³⁾_t).

    Line by line as printed, decay included: the moments and each G⁽ⁿ⁾ decay by γ, the G⁽ⁿ⁾ read the moments of token
    t − 1 undecayed. This is ``hla.hla3(…, definition="as_printed")``, and not the masked third-order operator; see
    `theorem_7_1`.

    Args:
        q, k: (*batch, T, d).
        v: (*batch, T, dv).
        decay: γ in (0, 1], a number or an array that broadcasts to (*batch,).
        normalize: divide by q_tᵀ(S^K_t S^Q_t m_t − h⁽¹⁾_t − h⁽²⁾_t − h⁽³⁾_t) + ε (lines 15–18).
        eps: ε.

    Returns:
        (*batch, T, dv).

    >>> import numpy as np
    >>> one = np.ones((3, 1))
    >>> algorithm3(one, one, one)[:, 0]
    array([ 1.,  5., 12.])
    """
    call = _prepare(q, k, v, decay)
    gamma_matrix, gamma_vector = call.gamma_matrix, call.gamma_vector
    square, rectangle, vector = call.zeros(call.d, call.d), call.zeros(call.d, call.dv), call.zeros(call.d)
    key_moment, query_moment, value, mass = square, square, rectangle, vector  # line 1
    cross1 = cross2 = cross3 = rectangle  # line 2
    mass1 = mass2 = mass3 = vector
    outputs = []
    for q_t, k_t, v_t in call.tokens():
        first = _column(query_moment, k_t)  # line 9
        cross1 = gamma_matrix * cross1 + _outer(k_t, _row(first, value))
        mass1 = gamma_vector * mass1 + k_t * _dot(first, mass)[..., None]
        second = _column(key_moment, q_t)  # line 10
        cross2 = gamma_matrix * cross2 + _outer(second, _row(q_t, value))
        mass2 = gamma_vector * mass2 + second * _dot(q_t, mass)[..., None]
        third = _column(key_moment, first)  # line 11
        cross3 = gamma_matrix * cross3 + _outer(third, v_t)
        mass3 = gamma_vector * mass3 + third
        # Lines 6 and 7, after the cross-summaries so that those read the previous moments (line 4).
        key_moment = gamma_matrix * key_moment + _outer(k_t, k_t)
        query_moment = gamma_matrix * query_moment + _outer(q_t, q_t)
        value = gamma_matrix * value + _outer(k_t, v_t)
        mass = gamma_vector * mass + k_t
        reading = _column(query_moment, _column(key_moment, q_t))  # line 13
        numerator = _row(reading, value) - _row(q_t, cross1) - _row(q_t, cross2) - _row(q_t, cross3)
        denominator = _dot(reading, mass) - _dot(q_t, mass1 + mass2 + mass3)  # lines 16, 17
        outputs.append(_ratio(numerator, denominator, normalize, eps))
    return call.stack(outputs)


def equation_7_5(q: Array, k: Array, v: Array, *, normalize: bool = False, eps: float = 1e-6) -> Array:
    """Eqs. (7.4) and (7.5), the recurrence of the corrected state F = S^K S^Q P − G⁽¹⁾ − G⁽²⁾ − G⁽³⁾; o_t = q_tᵀF_t.

    F_t = F_{t−1} + S^K_{t−1} D^Q D^P + D^K S^Q_{t−1} D^P + D^K D^Q P_{t−1} + D^K D^Q D^P with D^K = k_t k_tᵀ,
    D^Q = q_t q_tᵀ, D^P = k_t v_tᵀ; η alike. Equal to Theorem 7.1, hence not the masked operator either.

    Args:
        q, k: (*batch, T, d).
        v: (*batch, T, dv).
        normalize: divide by q_tᵀη_t + ε.
        eps: ε.

    Returns:
        (*batch, T, dv).

    >>> import numpy as np
    >>> equation_7_5(np.ones((3, 1)), np.ones((3, 1)), np.ones((3, 1)))[:, 0]
    array([ 1.,  5., 12.])
    """
    call = _prepare(q, k, v)
    square, rectangle, vector = call.zeros(call.d, call.d), call.zeros(call.d, call.dv), call.zeros(call.d)
    key_moment, query_moment, value, mass = square, square, rectangle, vector
    corrected, corrected_mass = rectangle, vector
    outputs = []
    for q_t, k_t, v_t in call.tokens():
        meeting = _dot(q_t, k_t)[..., None]
        # (S^K D^Q + D^K S^Q + D^K D^Q) D^P is one column times v_tᵀ.
        column = meeting * (_column(key_moment, q_t) + meeting * k_t)
        column = column + k_t * _dot(k_t, _column(query_moment, k_t))[..., None]
        corrected = corrected + _outer(column, v_t) + _outer(meeting * k_t, _row(q_t, value))
        corrected_mass = corrected_mass + column + meeting * k_t * _dot(q_t, mass)[..., None]
        key_moment, query_moment = key_moment + _outer(k_t, k_t), query_moment + _outer(q_t, q_t)
        value, mass = value + _outer(k_t, v_t), mass + k_t
        outputs.append(_ratio(_row(q_t, corrected), _dot(q_t, corrected_mass), normalize, eps))
    return call.stack(outputs)


def hla3_token(q: Array, k: Array, v: Array, *, decay: float | Array | None = None) -> HLA3Segment:
    """Algorithm 4, lines 1 and 2: the third-order segment of one token, and ρ = γ.

    S^K = D^K = k kᵀ, S^Q = D^Q = q qᵀ, P = D^P = k vᵀ, F = D^K D^Q D^P, R^QP = D^Q D^P, U^KQ = D^K D^Q, and the map
    M^KQP[Z] = D^K Z D^P as a matrix of shape (d², d·dv) that multiplies Z from the right, Z as a row.

    Args:
        q, k: (*batch, d).
        v: (*batch, dv).
        decay: γ in (0, 1], a number or an array that broadcasts to (*batch,).

    >>> import numpy as np
    >>> hla3_token(np.ones(5), np.ones(5), np.ones(7)).value_map.shape
    (25, 35)
    """
    token = _prepare_token(q, k, v, decay)
    key_moment, value, meeting = _outer(token.k, token.k), _outer(token.k, token.v), _dot(token.q, token.k)[..., None]
    flat_moment = token.flatten(key_moment)
    return HLA3Segment(
        key_moment,
        _outer(token.q, token.q),
        value,
        token.k,
        (meeting * meeting)[..., None] * value,
        meeting * meeting * token.k,
        meeting[..., None] * _outer(token.q, token.v),
        meeting * token.q,
        meeting[..., None] * _outer(token.k, token.q),
        _outer(flat_moment, token.flatten(value)),
        _outer(flat_moment, token.k),
        token.gamma,
    )


def hla3_concat(a: HLA3Segment, b: HLA3Segment) -> HLA3Segment:
    """Eqs. (7.6) and (7.7), ⊗₃ without decay: F_AB = F_A + F_B + S^K_A R^QP_B + M^KQP_B[S^Q_A] + U^KQ_B P_A.

    Associative; η alike, all else adds up. It composes what Theorem 7.1 computes, which is not the masked operator;
    that one needs no maps, see `hla3_concat_corrected`.

    Args:
        a, b: adjacent segments, a the earlier one; their ρ is multiplied and otherwise not used.

    >>> import numpy as np
    >>> a = hla3_token(np.ones(1), np.ones(1), np.ones(1))
    >>> hla3_concat(a, a).corrected_value
    array([[5.]])
    """
    return _third_order(a, b)


def hla3_concat_decayed(a: HLA3Segment, b: HLA3Segment) -> HLA3Segment:
    """⊗₃ with decay by "the same carry-scaling convention", as Section 7.3 ends. **Not associative.**

    No formula is printed. Read as in Section 4.2, everything of A is scaled by ρ_B on its way into AB, the summaries
    R^QP, r^Qm, U^KQ and the maps included, so
    F_AB = ρ_B F_A + F_B + (ρ_B S^K_A)R^QP_B + M^KQP_B[ρ_B S^Q_A] + U^KQ_B(ρ_B P_A). Then (A⊗B)⊗C and A⊗(B⊗C) differ by
    ρ_B ρ_C (1 − ρ_C) times the cross terms of A and B, and adding one token at a time is not Algorithm 3 with decay
    either. `hla3_concat_corrected` is associative.

    Args:
        a, b: adjacent segments, a the earlier one.

    >>> import numpy as np
    >>> a = hla3_token(np.ones(1), np.ones(1), np.ones(1), decay=0.5)
    >>> hla3_concat_decayed(hla3_concat_decayed(a, a), a).corrected_value
    array([[4.75]])
    >>> hla3_concat_decayed(a, hla3_concat_decayed(a, a)).corrected_value
    array([[4.375]])
    """
    matrix, vector = b.attenuation[..., None, None], b.attenuation[..., None]
    vectors = ("key_sum", "corrected_sum", "query_key_sum", "attenuation")
    scaled = {name: (vector if name in vectors else matrix) * x for name, x in a._asdict().items()}
    return _third_order(HLA3Segment(**scaled | {"attenuation": a.attenuation}), b)


def _third_order(a: HLA3Segment, b: HLA3Segment) -> HLA3Segment:
    merged = HLA3Segment(*(x + y for x, y in zip(a, b, strict=True)))
    return merged._replace(
        corrected_value=merged.corrected_value
        + a.key_moment @ b.query_key_value
        + _apply_map(b.value_map, a.query_moment, a.key_value)
        + b.key_query_route @ a.key_value,
        corrected_sum=merged.corrected_sum
        + _column(a.key_moment, b.query_key_sum)
        + _apply_map(b.sum_map, a.query_moment, a.key_sum)
        + _column(b.key_query_route, a.key_sum),
        attenuation=a.attenuation * b.attenuation,
    )


def _apply_map(linear_map: Array, z: Array, like: Array) -> Array:
    """The map on the matrix z, in the shape of ``like``."""
    xp = namespace(z)
    row = xp.reshape(z, (*z.shape[:-2], 1, z.shape[-2] * z.shape[-1]))
    return xp.reshape(row @ linear_map, like.shape)


def hla3_corrected_token(q: Array, k: Array, v: Array, *, decay: float | Array | None = None) -> HLA3CorrectedSegment:
    """One token for `hla3_concat_corrected`.

    (k kᵀ, q qᵀ, k vᵀ, k, (q·k) q vᵀ, (q·k) q, (q·k) k qᵀ, (q·k)² k vᵀ, (q·k)² k) and ρ = γ.

    Args:
        q, k: (*batch, d).
        v: (*batch, dv).
        decay: γ in (0, 1], a number or an array that broadcasts to (*batch,).

    >>> import numpy as np
    >>> max(x.size for x in hla3_corrected_token(np.ones(5), np.ones(5), np.ones(7)))
    35
    """
    token = _prepare_token(q, k, v, decay)
    value, meeting = _outer(token.k, token.v), _dot(token.q, token.k)[..., None]
    return HLA3CorrectedSegment(
        _outer(token.k, token.k),
        _outer(token.q, token.q),
        value,
        token.k,
        meeting[..., None] * _outer(token.q, token.v),
        meeting * token.q,
        meeting[..., None] * _outer(token.k, token.q),
        (meeting * meeting)[..., None] * value,
        meeting * meeting * token.k,
        token.gamma,
    )


def hla3_concat_corrected(a: HLA3CorrectedSegment, b: HLA3CorrectedSegment) -> HLA3CorrectedSegment:
    """⊗₃ for the masked third-order operator ((WWᵀ) ⊙ L)WV itself, with decay; not in the paper. Associative.

    With r = ρ_B and S, Q, P the moments, E the routed value, U the route, F the corrected value:
    E ← r²E_A + E_B + rQ_B P_A, U ← r²U_A + U_B + rS_A Q_B, F ← r³F_A + F_B + r²S_A Q_B P_A + rS_A E_B + rU_B P_A; the
    sums (m for P) alike. Its fold is F_t = γ³F_{t−1} + (S_t q_t)(q_tᵀP_t), so no map and nothing of size d³ is needed.

    Args:
        a, b: adjacent segments, a the earlier one.

    >>> import numpy as np
    >>> a = hla3_corrected_token(np.ones(1), np.ones(1), np.ones(1))
    >>> hla3_concat_corrected(a, hla3_concat_corrected(a, a)).corrected_value
    array([[14.]])
    """
    matrix, vector = b.attenuation[..., None, None], b.attenuation[..., None]
    key_moment, value, mass = matrix * a.key_moment, matrix * a.key_value, vector * a.key_sum
    return HLA3CorrectedSegment(
        key_moment + b.key_moment,
        matrix * a.query_moment + b.query_moment,
        value + b.key_value,
        mass + b.key_sum,
        matrix**2 * a.routed_value + b.routed_value + b.query_moment @ value,
        vector**2 * a.routed_sum + b.routed_sum + _column(b.query_moment, mass),
        matrix**2 * a.key_query_route + b.key_query_route + key_moment @ b.query_moment,
        matrix**3 * a.corrected_value
        + b.corrected_value
        + key_moment @ (b.query_moment @ value + b.routed_value)
        + b.key_query_route @ value,
        vector**3 * a.corrected_sum
        + b.corrected_sum
        + _column(key_moment, _column(b.query_moment, mass) + b.routed_sum)
        + _column(b.key_query_route, mass),
        a.attenuation * b.attenuation,
    )


def hla3_output(
    segment: HLA3Segment | HLA3CorrectedSegment, q_t: Array, *, normalize: bool = False, eps: float = 1e-6
) -> Array:
    """Algorithm 4, lines 7 to 10: o_t = q_tᵀF, divided by q_tᵀη + ε if ``normalize``.

    Args:
        segment: all tokens up to and including t.
        q_t: (*batch, d).
        normalize: divide by the denominator.
        eps: ε.

    Returns:
        (*batch, dv) in the dtype of the segment.

    >>> import numpy as np
    >>> a = hla3_token(np.ones(1), np.ones(1), np.ones(1))
    >>> hla3_output(hla3_concat(a, a), np.ones(1))
    array([5.])
    """
    q_t = cast(namespace(q_t, "q_t"), q_t, segment.key_sum.dtype)
    return _ratio(_row(q_t, segment.corrected_value), _dot(q_t, segment.corrected_sum), normalize, eps)


def theorem_7_2(q: Array, k: Array, v: Array, *, normalize: bool = False, eps: float = 1e-6) -> Array:
    """Theorem 7.2, third-order scan equivalence: q_tᵀF(P_t ⊗₃ T_t) with P_t from an exclusive scan over all tokens.

    Equal to Algorithm 3 with γ = 1, as the theorem says. Memory O(T d³ dv) for the maps.

    Args:
        q, k: (*batch, T, d).
        v: (*batch, T, dv).
        normalize: divide by the denominator.
        eps: ε.

    Returns:
        (*batch, T, dv).

    >>> import numpy as np
    >>> theorem_7_2(np.ones((3, 1)), np.ones((3, 1)), np.ones((3, 1)))[:, 0]
    array([ 1.,  5., 12.])
    """
    return algorithm4(q, k, v, normalize=normalize, eps=eps, chunk_size=sys.maxsize)


def algorithm4(
    q: Array,
    k: Array,
    v: Array,
    *,
    decay: float | Array | None = None,
    normalize: bool = False,
    eps: float = 1e-6,
    chunk_size: int = 16,
) -> Array:
    """Algorithm 4, chunk-parallel third-order HLA: o_t = q_tᵀF(P⁽ᵇ⁾ ⊗₃ P_t ⊗₃ T_t), by scans within and across chunks.

    Equal to Algorithm 3 (Theorem 7.2), and like it not the masked third-order operator. Memory O(T d³ dv).

    The algorithm is printed for γ = 1; for decay the paper refers to the convention of Section 4.2, which is not
    associative here either and whose fold is not Algorithm 3 (`hla3_concat_decayed`). So, as in `algorithm1`, with
    decay the printed recurrence is folded serially: the result is that of `algorithm3`, and ``chunk_size`` has no part
    in it.

    Args:
        q, k: (*batch, T, d).
        v: (*batch, T, dv).
        decay: γ in (0, 1], a number or an array that broadcasts to (*batch,).
        normalize: divide by q_tᵀη + ε.
        eps: ε.
        chunk_size: tokens per chunk, at least 1; T need not be a multiple of it.

    Returns:
        (*batch, T, dv).

    >>> import numpy as np
    >>> one = np.ones((3, 1))
    >>> algorithm4(one, one, one, chunk_size=2)[:, 0]
    array([ 1.,  5., 12.])
    """
    if decay is not None:
        return algorithm3(q, k, v, decay=decay, normalize=normalize, eps=eps)
    call = _prepare(q, k, v)
    chunks = [[hla3_token(*token) for token in tokens] for tokens in call.token_chunks(chunk_size)]
    if not chunks:
        return call.stack([])
    zero = identity(chunks[0][0])
    local = [exclusive_scan(hla3_concat, tokens, zero) for tokens in chunks]
    totals = [hla3_concat(prefixes[-1], tokens[-1]) for prefixes, tokens in zip(local, chunks, strict=True)]
    carried = exclusive_scan(hla3_concat, totals, zero)
    inclusive = [
        hla3_concat(hla3_concat(carry, prefix), token)  # line 6
        for carry, prefixes, tokens in zip(carried, local, chunks, strict=True)
        for prefix, token in zip(prefixes, tokens, strict=True)
    ]
    return call.stack(
        [
            hla3_output(segment, q_t, normalize=normalize, eps=eps)
            for segment, (q_t, _, _) in zip(inclusive, call.tokens(), strict=True)
        ]
    )


# --- Shared by all ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Call:
    """Checked inputs of one call, broadcast to one batch and in the dtype of accumulation."""

    xp: Namespace
    q: Array
    k: Array
    v: Array
    gamma: Array
    out_dtype: DType

    @property
    def d(self) -> int:
        return int(self.q.shape[-1])

    @property
    def dv(self) -> int:
        return int(self.v.shape[-1])

    @property
    def gamma_matrix(self) -> Array:
        return self.gamma[..., None, None]

    @property
    def gamma_vector(self) -> Array:
        return self.gamma[..., None]

    def zeros(self, *shape: int) -> Array:
        return self.xp.zeros((*self.gamma.shape, *shape), dtype=self.v.dtype, device=device(self.v))

    def transpose(self, x: Array) -> Array:
        return self.xp.matrix_transpose(x)

    def flatten(self, x: Array) -> Array:
        return self.xp.reshape(x, (*x.shape[:-2], x.shape[-2] * x.shape[-1]))

    def tokens(self) -> Iterator[tuple[Array, Array, Array]]:
        for t in range(self.q.shape[-2]):
            yield self.q[..., t, :], self.k[..., t, :], self.v[..., t, :]

    def token_chunks(self, chunk_size: int) -> Iterator[list[tuple[Array, Array, Array]]]:
        tokens = list(self.tokens())
        for start in range(0, len(tokens), _checked_chunk_size(chunk_size)):
            yield tokens[start : start + chunk_size]

    def chunks(self, chunk_size: int) -> Iterator[tuple[Array, Array, Array]]:
        count = self.q.shape[-2]
        for start in range(0, count, _checked_chunk_size(chunk_size)):
            stop = min(start + chunk_size, count)
            yield self.q[..., start:stop, :], self.k[..., start:stop, :], self.v[..., start:stop, :]

    def prefix_sum(self, x: Array, *, axis: int) -> Array:
        return self.xp.cumulative_sum(x, axis=axis, dtype=x.dtype)

    def before(self, sums: Array, *, axis: int) -> Array:
        """The prefix sums one token earlier, zero for the first."""
        if not sums.shape[axis]:
            return sums
        matrix = axis == -3
        first = sums[..., :1, :, :] if matrix else sums[..., :1, :]
        others = sums[..., :-1, :, :] if matrix else sums[..., :-1, :]
        return self.xp.concat([self.xp.zeros_like(first), others], axis=axis)

    def stack(self, outputs: list[Array]) -> Array:
        return self.finish(self.xp.stack(outputs, axis=-2) if outputs else self.zeros(0, self.dv))

    def join(self, outputs: list[Array]) -> Array:
        return self.finish(self.xp.concat(outputs, axis=-2) if outputs else self.zeros(0, self.dv))

    def finish(self, output: Array) -> Array:
        return cast(self.xp, output, self.out_dtype)


def _prepare(q: Array, k: Array, v: Array, decay: float | Array | None = None) -> _Call:
    xp = check_inputs(q, k, v, 2)
    batch = check_shapes(q, k, v)
    dtype, out_dtype = accumulation_dtype(xp, q, k, v), v.dtype
    q, k, v = (xp.broadcast_to(cast(xp, x, dtype), (*batch, *x.shape[-2:])) for x in (q, k, v))
    return _Call(xp, q, k, v, _gamma(xp, decay, batch, v), out_dtype)


def _prepare_token(q: Array, k: Array, v: Array, decay: float | Array | None) -> _Call:
    check_inputs(q, k, v, 1)
    call = _prepare(q[..., None, :], k[..., None, :], v[..., None, :], decay)
    return replace(call, q=call.q[..., 0, :], k=call.k[..., 0, :], v=call.v[..., 0, :])


def _gamma(xp: Namespace, decay: Any, batch: tuple[int, ...], like: Array) -> Array:
    """γ as an array of shape batch; ones where there is no decay."""
    if decay is None or isinstance(decay, Real):
        gamma = 1.0 if decay is None else float(decay)
        if isinstance(decay, bool) or not 0.0 < gamma <= 1.0:
            raise OptionError(message("decay", "a number in (0, 1]", repr(decay), "Pass γ itself, not its logarithm."))
        return xp.full(batch, gamma, dtype=like.dtype, device=device(like))
    host = family(decay) == "numpy"
    if dtype_name(decay.dtype) not in FLOATING:
        raise DTypeError(message("decay", "a number or a floating array", dtype_name(decay.dtype), "Convert it."))
    if host and not bool(((decay > 0) & (decay <= 1)).all()):
        raise OptionError(message("decay", "values in (0, 1]", f"{decay}", "Pass γ itself, not its logarithm."))
    decay = convert_option(xp, decay, like)
    same_library_and_device(like, "v", decay=decay)
    try:
        fits = broadcast_shapes(tuple(decay.shape), batch) == batch
    except ValueError:
        fits = False
    if not fits:
        expected = f"a number or an array that broadcasts to the batch axes {batch}"
        raise ShapeError(message("decay", expected, f"shape {tuple(decay.shape)}", "It has no axis for T or d."))
    return xp.broadcast_to(cast(xp, decay, like.dtype), batch)


def _checked_chunk_size(chunk_size: int) -> int:
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1:
        raise OptionError(message("chunk_size", "an integer ≥ 1", f"{chunk_size!r}", "Pass the tokens per chunk."))
    return chunk_size


def _outer(x: Array, y: Array) -> Array:
    """x yᵀ."""
    return x[..., :, None] * y[..., None, :]


def _row(x: Array, matrix: Array) -> Array:
    """xᵀ M."""
    return (x[..., None, :] @ matrix)[..., 0, :]


def _column(matrix: Array, x: Array) -> Array:
    """M x."""
    return (matrix @ x[..., :, None])[..., 0]


def _dot(x: Array, y: Array) -> Array:
    """xᵀ y."""
    return (x[..., None, :] @ y[..., :, None])[..., 0, 0]


def _ratio(numerator: Array, denominator: Array, normalize: bool, eps: float) -> Array:
    return numerator / (denominator + eps)[..., None] if normalize else numerator

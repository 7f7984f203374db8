r"""The definitions, dense: every weight of every pair of tokens, in float64. What results are judged by at run time.

With A = a bᵀ over all pairs of tokens, Γ the decay between them and L the pairs a token sees, one matrix is enough:

    W_p(a, b) = L ∘ Γ^p ∘ (a bᵀ)             W⁻(a, b): strict, row t sees j < t at the decay Γ(t−1, j)

and an operator is a sum of products of such matrices, applied to v. HLA₂, for example, is
((W Wᵀ) ∘ L) V = W_2(q, W_1(q, k) k) V. O(T²) time and memory. The forms that compute never import this file, and it
imports nothing of theirs: no state, no recurrence over tokens, no chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from hla.arrays import Array, Namespace, device, dtype_name, namespace
from hla.errors import DTypeError, OptionError, message

__all__ = ["attend", "weights"]

Pair: TypeAlias = Callable[..., Array]
"""pair(a, b, power=1, strict=False) → (*batch, T, T)"""
Term: TypeAlias = tuple[float, tuple[Array, ...]]
"""A sign, and matrices whose product weighs the values."""

_BY_ORDER = {1: "linear_attention", 2: "hla2", 3: "hla3"}


def attend(
    operator: str,
    q: Array,
    k: Array,
    v: Array,
    *,
    order: int | None = None,
    log_decay: Array | None = None,
    scale: float = 1.0,
    mask: str = "causal",
    definition: str = "exact",
    ridge: float = 0.0,
    normalize: bool = False,
    eps: float = 1e-6,
    token_mask: Array | None = None,
    segment_ids: Array | None = None,
) -> Array:
    r"""The output of an operator from its definition.

    $$o_t = \sum_j w_{tj}\, v_j \qquad \text{or, normalised,} \qquad
    o_t = \frac{\sum_j w_{tj}\, v_j}{\sum_j w_{tj} + \varepsilon}$$

    Args:
        operator: "linear_attention", "hla2", "ahla", "hla3" or "higher_order".
        q: (*batch, T, d), any floating dtype; taken in float64.
        k: (*batch, T, d).
        v: (*batch, T, dv).
        order: of "higher_order".
        log_decay: log γ ≤ 0, broadcastable to (*batch, T); −inf forgets everything before its token.
        scale: multiplies q.
        mask: "causal", "prefix" or "none".
        definition: "exact" or "as_printed".
        ridge: λ of Algorithm 1.
        normalize: divide by the same sum over values of 1, plus `eps`.
        eps: see `normalize`.
        token_mask: bool, broadcastable to (*batch, T): False takes the token out and makes its output 0.
        segment_ids: int, broadcastable to (*batch, T): tokens see only their own packed sequence.

    Returns:
        (*batch, T, dv) in float64.

    Raises:
        OptionError: an unknown name, or options that are not defined together.
        DTypeError: the library has no float64 at the moment (JAX without ``jax_enable_x64``).

    Example:
        >>> import numpy as np
        >>> x = np.ones((3, 1))
        >>> attend("hla2", x, x, x)[:, 0]
        array([1., 3., 6.])
    """
    xp = namespace(q, "q")
    values, present = _values(xp, v, token_mask)
    terms = _terms(operator, order, q, k, log_decay, scale, mask, definition, ridge, token_mask, segment_ids)
    output = _apply(xp, terms, values)
    if normalize:
        output = output / (_apply(xp, terms, xp.ones_like(values[..., :1])) + eps)
    return output if present is None else xp.where(present, output, xp.zeros_like(output))


def weights(
    operator: str,
    q: Array,
    k: Array,
    *,
    order: int | None = None,
    log_decay: Array | None = None,
    scale: float = 1.0,
    mask: str = "causal",
    definition: str = "exact",
    ridge: float = 0.0,
    token_mask: Array | None = None,
    segment_ids: Array | None = None,
) -> Array:
    r"""The matrix whose entry [t, j] is the weight of v_j in o_t, before any normalisation. O(T³).

    Args:
        operator: as for `attend`, like all others.
        q: (*batch, T, d).
        k: (*batch, T, d).
        order: of "higher_order".
        log_decay: log γ ≤ 0.
        scale: multiplies q.
        mask: "causal", "prefix" or "none".
        definition: "exact" or "as_printed".
        ridge: λ.
        token_mask: columns of tokens that are False are 0.
        segment_ids: pairs of two packed sequences are 0.

    Returns:
        (*batch, T, T) in float64.

    Raises:
        OptionError, DTypeError: as `attend`.

    Example:
        >>> import numpy as np
        >>> x = np.ones((3, 1))
        >>> weights("hla2", x, x)
        array([[1., 0., 0.],
               [1., 2., 0.],
               [1., 2., 3.]])
    """
    xp = namespace(q, "q")
    total: Array | None = None
    for factor, matrices in _terms(
        operator, order, q, k, log_decay, scale, mask, definition, ridge, token_mask, segment_ids
    ):
        product = matrices[0]
        for matrix in matrices[1:]:
            product = xp.matmul(product, matrix)
        total = factor * product if total is None else total + factor * product
    return total


def _apply(xp: Namespace, terms: list[Term], values: Array) -> Array:
    total: Array | None = None
    for factor, matrices in terms:
        result = values
        for matrix in reversed(matrices):
            result = xp.matmul(matrix, result)
        total = factor * result if total is None else total + factor * result
    return total


def _terms(
    operator: str,
    order: int | None,
    q: Array,
    k: Array,
    log_decay: Array | None,
    scale: float,
    mask: str,
    definition: str,
    ridge: float,
    token_mask: Array | None,
    segment_ids: Array | None,
) -> list[Term]:
    name, stages = _stages(operator, order, mask, definition, ridge, log_decay is not None)
    xp = namespace(q, "q")
    q, k = scale * _float64(xp, q, "q"), _float64(xp, k, "k")
    if log_decay is not None:
        log_decay = _per_token(xp, _float64(xp, log_decay, "log_decay"), q)
    if token_mask is not None:
        present = token_mask[..., None]
        q, k = xp.where(present, q, xp.zeros_like(q)), xp.where(present, k, xp.zeros_like(k))
        if log_decay is not None:
            log_decay = xp.where(token_mask, log_decay, xp.zeros_like(log_decay))
    pair = _pairs(xp, q, log_decay, segment_ids, bidirectional=mask == "none")
    if definition == "as_printed":
        terms = _PRINTED[name](xp, pair, q, k)
    else:
        table = _CAUSAL if mask == "causal" else _PREFIX
        matrices = table[name](xp, pair, q, k)
        terms = [(1.0, table["hla2"](xp, pair, q, k) * (stages - 1) + matrices)] if stages > 1 else [(1.0, matrices)]
    if ridge:
        terms.append((ridge, (pair(q, q),)))
    return terms


def _stages(
    operator: str, order: int | None, mask: str, definition: str, ridge: float, decays: bool
) -> tuple[str, int]:
    """(the operator applied to v, how many operators there are in all, the others being HLA₂)."""
    for argument, value, allowed in (
        ("operator", operator, (*_CAUSAL, "higher_order")),
        ("mask", mask, ("causal", "prefix", "none")),
        ("definition", definition, ("exact", "as_printed")),
    ):
        if value not in allowed:
            raise OptionError(message(argument, f"one of {', '.join(allowed)}", repr(value), "Check the spelling."))
    if operator == "higher_order":
        if order is None or order < 1:
            raise OptionError(message("order", "an integer ≥ 1", repr(order), "Pass order=…, e.g. order=2 for hla2."))
        name = _BY_ORDER[order] if order < 4 else _BY_ORDER[2 + order % 2]
        stages = 1 if order < 4 else order // 2
    else:
        name, stages = operator, 1
    if mask == "none" and decays:
        raise OptionError(message("log_decay", 'no decay with mask="none"', "a decay", "Drop it."))
    if definition == "as_printed" and (mask != "causal" or stages > 1 or name not in _PRINTED):
        raise OptionError(message("definition", "the causal hla2 or hla3", f"{operator}, {mask}", 'Use "exact".'))
    if ridge and name != "hla2":
        raise OptionError(message("ridge", "0 for operators other than hla2", repr(ridge), "Drop it."))
    if stages > 1 and (mask == "prefix" or ridge):
        raise OptionError(message("order", "at most 3 with these options", repr(order), "Drop mask or ridge."))
    return name, stages


def _float64(xp: Namespace, x: Array, argument: str) -> Array:
    x = xp.astype(x, xp.float64)
    if dtype_name(x.dtype) != "float64":
        raise DTypeError(
            message(
                argument, "a library with float64", dtype_name(x.dtype), "Set jax_enable_x64, or pass NumPy arrays."
            )
        )
    return x


def _values(xp: Namespace, v: Array, token_mask: Array | None) -> tuple[Array, Array | None]:
    v = _float64(xp, v, "v")
    if token_mask is None:
        return v, None
    present = token_mask[..., None]
    return xp.where(present, v, xp.zeros_like(v)), present


def _per_token(xp: Namespace, x: Array, q: Array) -> Array:
    return xp.broadcast_to(x, (*x.shape[:-1], q.shape[-2]))


def _pairs(xp: Namespace, q: Array, log_decay: Array | None, segment_ids: Array | None, *, bidirectional: bool) -> Pair:
    """The function W of this file's head, for the decays and the visible pairs of a call."""
    where = device(q)
    placed = {} if where is None else {"device": where}
    time = xp.arange(q.shape[-2], **placed)
    row, column = time[:, None], time[None, :]
    before = row > column
    visible = xp.ones_like(before) if bidirectional else row >= column
    span: Array | None = None
    if log_decay is not None:
        # −inf is a boundary: it is selected, and left out of the sums that differences are taken of.
        boundary = xp.isinf(log_decay)
        reset = xp.cumulative_sum(xp.astype(boundary, xp.int64), axis=-1)
        kept = reset[..., :, None] == reset[..., None, :]
        total = xp.cumulative_sum(xp.where(boundary, xp.zeros_like(log_decay), log_decay), axis=-1)
        span = total[..., :, None] - total[..., None, :]
        visible = xp.logical_and(visible, kept)
        before = xp.logical_and(before, _one_row_later(xp, kept))
    if segment_ids is not None:
        ids = _per_token(xp, segment_ids, q)
        same = ids[..., :, None] == ids[..., None, :]
        visible, before = xp.logical_and(visible, same), xp.logical_and(before, same)

    def pair(a: Array, b: Array, power: int = 1, strict: bool = False) -> Array:
        product = xp.matmul(a, xp.matrix_transpose(b))
        seen = before if strict else visible
        if span is not None:
            logarithm = power * (_one_row_later(xp, span) if strict else span)
            product = product * xp.exp(xp.where(seen, logarithm, xp.zeros_like(logarithm)))
        return xp.where(seen, product, xp.zeros_like(product))

    return pair


def _one_row_later(xp: Namespace, x: Array) -> Array:
    """Row t becomes row t + 1: what token t+1 finds before it acts itself. Row 0 has no meaning and is never seen."""
    return xp.concat([x[..., :1, :], x[..., :-1, :]], axis=-2)


# Each function returns the matrices whose product weighs the values.


def _linear(xp: Namespace, pair: Pair, q: Array, k: Array) -> tuple[Array, ...]:
    return (pair(q, k),)


def _hla2(xp: Namespace, pair: Pair, q: Array, k: Array) -> tuple[Array, ...]:
    """Γ² ∘ (A Wᵀ): A Wᵀ = Q (W K)ᵀ."""
    return (pair(q, xp.matmul(pair(q, k), k), 2),)


def _ahla(xp: Namespace, pair: Pair, q: Array, k: Array) -> tuple[Array, ...]:
    """W W."""
    first = pair(q, k)
    return first, first


def _hla3(xp: Namespace, pair: Pair, q: Array, k: Array) -> tuple[Array, ...]:
    """(Γ³ ∘ (A Wᵀ)) W."""
    first = pair(q, k)
    return pair(q, xp.matmul(first, k), 3), first


def _hla2_prefix(xp: Namespace, pair: Pair, q: Array, k: Array) -> tuple[Array, ...]:
    """Γ ∘ (W Aᵀ)."""
    return (pair(xp.matmul(pair(q, k), k), q),)


def _ahla_prefix(xp: Namespace, pair: Pair, q: Array, k: Array) -> tuple[Array, ...]:
    """Γ ∘ (W A)."""
    return (pair(xp.matmul(pair(q, k), q), k),)


def _hla3_prefix(xp: Namespace, pair: Pair, q: Array, k: Array) -> tuple[Array, ...]:
    """Γ ∘ ((Γ ∘ (W Aᵀ)) A)."""
    (second,) = _hla2_prefix(xp, pair, q, k)
    return (pair(xp.matmul(second, q), k),)


def _hla2_printed(xp: Namespace, pair: Pair, q: Array, k: Array) -> list[Term]:
    """§4.3: LA(LA(q,k,k), q, v) − LA(q, k, LAx(k, q, v))."""
    return [(1.0, _hla2_prefix(xp, pair, q, k)), (-1.0, (pair(q, k), pair(k, q, strict=True)))]


def _hla3_printed(xp: Namespace, pair: Pair, q: Array, k: Array) -> list[Term]:
    """Theorem 7.1: all triples, less those of which one index alone is the latest (that of k, of q, of the last k)."""
    keys = xp.matmul(pair(k, q, strict=True), q)  # LAx(k, q, q)
    before = pair(keys, k, strict=True)
    return [
        (1.0, _hla3_prefix(xp, pair, q, k)),
        (-1.0, (pair(q, k), before)),
        (-1.0, (pair(q, xp.matmul(pair(q, k, strict=True), k)), pair(q, k, strict=True))),
        (-1.0, (pair(q, xp.matmul(before, k)),)),
    ]


_Matrices: TypeAlias = Callable[[Namespace, Pair, Array, Array], tuple[Array, ...]]
_CAUSAL: dict[str, _Matrices] = {"linear_attention": _linear, "hla2": _hla2, "ahla": _ahla, "hla3": _hla3}
# "none" is "prefix" over all pairs.
_PREFIX: dict[str, _Matrices] = {
    "linear_attention": _linear,
    "hla2": _hla2_prefix,
    "ahla": _ahla_prefix,
    "hla3": _hla3_prefix,
}
_PRINTED: dict[str, Callable[[Namespace, Pair, Array, Array], list[Term]]] = {
    "hla2": _hla2_printed,
    "hla3": _hla3_printed,
}

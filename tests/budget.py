r"""What a result should be, token by token, and how far it may be off.

Judge. `expected` sums the definition (`oracle`) head by head in float64. Skipped tokens are taken out of the sequence
before, so nothing here shares the idea of a mask with the code it judges.

Error. Outputs grow with t, so that one norm over all tokens would let the first hundreds be wrong. Per token, with
the rounding of the result to its own dtype taken off first:

    err_t = max_c (|o_tc − ref_tc| − u_out |ref_tc|)₊ / max(|ref_t|, scale_t)

scale_t is the running scale of that row: the sum of the *absolute values* of the terms that are added up in o_t, which
is the same operator on |q|, |k|, |v|. Where terms cancel, |ref_t| may be small while no summation order can do better
than u · scale_t. After a reset scale_t is small again, unlike a running maximum. With normalize o = N / (D + ε), and to
first order |δo| ≤ (|δN| + |o| |δD|) / |D + ε|, so scale_t = (scale of N + |o_t| · scale of D) / |D + ε|.

Tolerance. A stage (one pass of the primitive) adds T·d products, d of them to a score and T scores to a result, and
multiplies each by the exponential of at most T log-decays that were added up. Whatever the order in which a form takes
them, n = s (2 T + d + 4) roundings at most lie on the way from an input to an output through s stages. In the model of
independent rounding errors (Higham and Mary, SIAM J. Sci. Comput. 41, 2019)

    |δo_t| ≤ λ √n u scale_t        except with a probability below 2 n exp(−λ²/2),

and λ = 5 puts that below one in a thousand for the sizes tested. So err_t ≤ 5 √(s (2 T + d + 4)) u, with u the unit
roundoff of the accumulators.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

import oracle

UNIT = {"float64": 2.0**-53, "float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Unit roundoffs: half the distance from 1 to the next number."""
LEAST = {"float64": 0.0, "float32": 0.0, "float16": 2.0**-25, "bfloat16": 0.0}
"""Half the smallest number, where outputs may come near it."""
LAMBDA = 5.0


class Expected(NamedTuple):
    """The values of a result and the running scale of its rows."""

    value: np.ndarray
    """(*batch, T, dv)"""
    scale: np.ndarray
    """(*batch, T)"""


def stages(op: str, order: int | None = None, definition: str = "exact") -> int:
    """Passes of the primitive in a row: the order; the printed forms subtract sums of one more pass."""
    own = {"linear_attention": 1, "hla2": 2, "ahla": 2, "hla3": 3, "higher_order": order or 0}[op]
    return own + (definition == "as_printed")


def tolerance(dtype: str, length: int, d: int, passes: int) -> float:
    """The largest err_t allowed, for accumulators of `dtype`; see this file's head."""
    return LAMBDA * math.sqrt(passes * (2 * length + d + 4)) * UNIT[dtype]


def accumulator(*dtypes: str) -> str:
    """The dtype in which inputs of these dtypes are accumulated."""
    return "float64" if "float64" in dtypes else "float32"


def errors(out: Any, want: Expected, dtype: str) -> np.ndarray:
    """err_t (*batch, T) of a result that was rounded to `dtype`."""
    out = np.asarray(out, dtype=np.float64)
    assert out.shape == want.value.shape, f"shape {out.shape}, expected {want.value.shape}"
    size = np.abs(want.value)
    apart = np.maximum(np.abs(out - want.value) - UNIT[dtype] * size - LEAST[dtype], 0.0)
    floor = np.maximum(size.max(axis=-1), want.scale)
    worst = apart.max(axis=-1)
    return np.where(worst == 0.0, 0.0, worst / np.where(floor == 0.0, 1e-300, floor))


def assert_within(out: Any, want: Expected, allowed: float, dtype: str, label: str = "") -> None:
    """Every token of a result within its budget; `dtype` is what the result was rounded to."""
    found = errors(out, want, dtype)
    if found.size and not bool((found <= allowed).all()):  # a NaN is not within
        place = np.unravel_index(int(np.argmax(np.nan_to_num(found, nan=np.inf))), found.shape)
        at = tuple(int(i) for i in place)
        raise AssertionError(
            f"{label} token {at[-1]} of batch {at[:-1]}: error {found[place]:.3g}, allowed {allowed:.3g}"
        )


def expected(
    op: str,
    q: Any,
    k: Any,
    v: Any,
    *,
    log_decay: Any = None,
    token_mask: Any = None,
    **options: Any,
) -> Expected:
    """The definition over batches: q, k (*batch, T, d), v (*batch, T, dv), log_decay and token_mask (*batch, T)."""
    q, k, v = (np.asarray(x, dtype=np.float64) for x in (q, k, v))
    batch = np.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    length, dv = v.shape[-2:]
    q, k, v = (np.broadcast_to(x, (*batch, *x.shape[-2:])) for x in (q, k, v))
    if log_decay is not None:
        log_decay = np.broadcast_to(np.asarray(log_decay, dtype=np.float64), (*batch, length))
    if token_mask is not None:
        token_mask = np.broadcast_to(np.asarray(token_mask), (*batch, length))
    value, scale = np.zeros((*batch, length, dv)), np.zeros((*batch, length))
    for at in np.ndindex(*batch):
        kept = np.arange(length) if token_mask is None else np.flatnonzero(token_mask[at])
        decays = None if log_decay is None else log_decay[at][kept]
        value[(*at, kept)], scale[(*at, kept)] = _one_head(
            op, q[at][kept], k[at][kept], v[at][kept], log_decay=decays, **options
        )
    return Expected(value, scale)


def _one_head(
    op: str, q: Any, k: Any, v: Any, *, normalize: bool = False, eps: float = 1e-6, **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Value (T, dv) and scale (T,)."""
    w, absolute = _weights(op, q, k, **options), _absolute(op, q, k, **options)
    value, sizes = w @ v, absolute @ np.abs(v)
    if normalize:
        bottom = w.sum(axis=-1, keepdims=True) + eps
        value = value / bottom
        sizes = (sizes + np.abs(value) * absolute.sum(axis=-1, keepdims=True)) / np.abs(bottom)
    return value, sizes.max(axis=-1, initial=0.0)


def _weights(op: str, q: Any, k: Any, *, order: int | None = None, **options: Any) -> np.ndarray:
    """The oracle's weights, also for `higher_order`."""
    if op == "higher_order":
        return oracle.attend(op, q, k, np.eye(q.shape[0]), order=order, **options)
    return oracle.weights(op, q, k, **options)


def _absolute(op: str, q: Any, k: Any, **options: Any) -> np.ndarray:
    """What the weights would be if every term counted positively."""
    options = {**options, "scale": abs(options.get("scale", 1.0)), "ridge": abs(options.get("ridge", 0.0))}
    q, k = np.abs(q), np.abs(k)
    if options.get("definition", "exact") == "exact":
        return _weights(op, q, k, **options)
    # printed = all − taken, with both positive here: all + taken = 2 all − printed
    everything = _weights(op, q, k, **{**options, "definition": "exact", "mask": "prefix"})
    return 2.0 * everything - _weights(op, q, k, **options)

"""Associative scans over any monoid: logarithmic depth, any length, any nest of arrays.

The scan is the work-efficient odd–even recursion (Blelloch 1990): combine neighbours, scan the half, fill in the rest.
For T elements it calls the operator at most 2⌈log₂ T⌉ times, each time on stacked elements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from hla import arrays
from hla.arrays import Array, Namespace
from hla.errors import OptionError, ShapeError, message

__all__ = ["associative_scan"]

Tree = TypeVar("Tree")


def associative_scan(
    op: Callable[[Tree, Tree], Tree],
    elems: Tree,
    axis: int,
    *,
    exclusive: bool = False,
    reverse: bool = False,
    identity: Tree | None = None,
) -> Tree:
    r"""All prefixes of elems under an associative operator: y_t = x_0 ⊕ x_1 ⊕ … ⊕ x_t (§4, Theorem 4.1).

    Args:
        op: the operator, vectorised over stacked elements, always called as ``op(earlier, later)``, also with
            `reverse` (where `jax.lax.associative_scan` swaps them).
        elems: an array, or tuples, lists, dicts and named tuples of arrays that all have T elements along `axis`.
        axis: the axis of the elements in every array; negative axes count from each array's end.
        exclusive: leave out the element itself, y_t = x_0 ⊕ … ⊕ x_{t−1}; needs `identity`.
        reverse: suffixes instead, y_t = x_t ⊕ … ⊕ x_{T−1}.
        identity: one element e with e ⊕ x = x, in the structure of elems; arrays without `axis`, with a size-1 axis
            there, or anything that broadcasts to that.

    Returns:
        The prefixes, in the structure, shapes and dtypes of elems.

    Raises:
        ShapeError: the arrays disagree in length along `axis`.
        OptionError: `exclusive` without `identity`.

    Example:
        >>> import numpy as np, operator
        >>> from hla.scan import associative_scan
        >>> associative_scan(operator.add, np.asarray([1, 2, 3, 4]), 0)
        array([ 1,  3,  6, 10])
        >>> associative_scan(operator.add, np.asarray([1, 2, 3, 4]), 0, exclusive=True, identity=np.asarray(0))
        array([0, 1, 3, 6])
    """
    flat = list(arrays.leaves(elems))
    if not flat:
        return elems
    xp = arrays.namespace(flat[0], "elems")
    length = _length(flat, axis)
    if exclusive and identity is None:
        raise OptionError(message("identity", "an identity element with exclusive=True", "None", "Pass identity=…."))
    if length == 0:
        return elems
    if reverse:
        elems = _map(lambda x: xp.flip(x, axis=axis), elems)
    combine = (lambda later, earlier: op(earlier, later)) if reverse else op
    result: Any = _scan(xp, combine, elems, length, axis)
    if exclusive:
        result = _map(lambda x, e: _shift(xp, x, e, axis), result, identity)
    if reverse:
        result = _map(lambda x: xp.flip(x, axis=axis), result)
    return result  # type: ignore[no-any-return]


def _length(flat: list[Array], axis: int) -> int:
    lengths = set()
    for x in flat:
        if not -x.ndim <= axis < x.ndim:
            raise ShapeError(
                message("elems", f"arrays with an axis {axis}", f"shape {tuple(x.shape)}", "Choose another axis.")
            )
        lengths.add(int(x.shape[axis]))
    if len(lengths) > 1:
        raise ShapeError(
            message("elems", f"one length along axis {axis}", f"{sorted(lengths)}", "Stack equally many elements.")
        )
    return lengths.pop()


def _scan(xp: Namespace, op: Callable[[Any, Any], Any], elems: Any, length: int, axis: int) -> Any:
    if length == 1:
        return elems
    half = length // 2
    pairs = op(_every(elems, axis, 0, 2 * half, 2), _every(elems, axis, 1, 2 * half, 2))
    odd = _scan(xp, op, pairs, half, axis)
    first = _every(elems, axis, 0, 1, 1)
    if length == 2:
        return _map(lambda a, b: xp.concat([a, b], axis=axis), first, odd)
    count = (length + 1) // 2 - 1
    rest = op(_every(odd, axis, 0, count, 1), _every(elems, axis, 2, length, 2))
    even = _map(lambda a, b: xp.concat([a, b], axis=axis), first, rest)
    return _map(lambda a, b: _interleave(xp, a, b, axis), even, odd)


def _index(x: Array, axis: int, start: int, stop: int, step: int) -> Array:
    axis = axis % x.ndim
    return x[(*(slice(None),) * axis, slice(start, stop, step), ...)]


def _every(elems: Any, axis: int, start: int, stop: int, step: int) -> Any:
    return _map(lambda x: _index(x, axis, start, stop, step), elems)


def _interleave(xp: Namespace, even: Array, odd: Array, axis: int) -> Array:
    """even[0], odd[0], even[1], odd[1], …; even may be one longer."""
    axis = axis % even.ndim
    half = odd.shape[axis]
    both = xp.stack([_index(even, axis, 0, half, 1), odd], axis=axis + 1)
    both = xp.reshape(both, (*odd.shape[:axis], 2 * half, *odd.shape[axis + 1 :]))
    if even.shape[axis] == half:
        return both
    return xp.concat([both, _index(even, axis, half, half + 1, 1)], axis=axis)


def _shift(xp: Namespace, x: Array, identity: Array, axis: int) -> Array:
    axis = axis % x.ndim
    shape = (*x.shape[:axis], 1, *x.shape[axis + 1 :])
    if identity.ndim == x.ndim - 1:
        identity = xp.expand_dims(identity, axis=axis)
    first = xp.broadcast_to(xp.astype(identity, x.dtype, copy=False), shape)
    return xp.concat([first, _index(x, axis, 0, x.shape[axis] - 1, 1)], axis=axis)


def _map(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """`function` over the arrays of trees of one structure."""
    if isinstance(tree, dict):
        return type(tree)((key, _map(function, value, *(o[key] for o in others))) for key, value in tree.items())
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_map(function, *parts) for parts in zip(tree, *others, strict=True)))
    if isinstance(tree, (tuple, list)):
        return type(tree)(_map(function, *parts) for parts in zip(tree, *others, strict=True))
    return None if tree is None else function(tree, *others)

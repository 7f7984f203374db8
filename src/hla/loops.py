"""Running a body over consecutive pieces of the time axis, carrying states along.

Eager arrays are sliced in a Python loop. Under a JAX transformation a Python loop would be unrolled into the program
(128 chunks compile for half a minute), so there the full pieces go through `jax.lax.scan` and only a shorter last
piece is run on its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from hla.arrays import Array, Namespace, beside, is_traced, leaves, loaded, writable

Tokens: TypeAlias = dict[str, Any]
"""Arrays with time on axis −2, or None, by name."""
Carry: TypeAlias = Any
Body: TypeAlias = Callable[[Carry, Tokens, Any], tuple[Carry, Tokens, Any]]
"""(carry, tokens of the piece, note left for the piece) → (carry, outputs of the piece, note of the piece)"""


def fold(
    xp: Namespace,
    body: Body,
    carry: Carry,
    tokens: Tokens,
    length: int,
    step: int,
    *,
    reverse: bool = False,
    notes: Any = None,
    out: Array | None = None,
) -> tuple[Carry, Tokens, Any]:
    """Run `body` over pieces of `step` tokens (the last one may be shorter), first to last or last to first.

    Returns the last carry, the outputs joined along time, and the notes of the pieces. Notes pass one piece's value
    from a forward fold to a backward one over the same pieces; their form is this module's own affair. `out` is where
    the output "o" is to be written, where arrays can be; elsewhere it is left alone.
    """
    if length == 0:
        raise ValueError("fold needs at least one token")
    step = min(step, length)
    if loaded("jax") is not None and any(is_traced(x) and "jax" in type(x).__module__ for x in leaves([carry, tokens])):
        if out is not None:
            return _fold_cut(body, carry, tokens, length, step, out)
        return _fold_traced(xp, body, carry, tokens, length, step, reverse, notes)
    return _fold_eager(xp, body, carry, tokens, length, step, reverse, notes, out)


def _slice(tokens: Tokens, start: int, stop: int) -> Tokens:
    """The tokens of a piece; the arrays themselves where it is everything."""

    def piece(x: Array) -> Array:
        return x if start == 0 and stop == x.shape[-2] else x[..., start:stop, :]

    return {name: None if x is None else piece(x) for name, x in tokens.items()}


def _fold_eager(
    xp: Namespace,
    body: Body,
    carry: Carry,
    tokens: Tokens,
    length: int,
    step: int,
    reverse: bool,
    notes: Any,
    out: Array | None,
) -> tuple[Carry, Tokens, Any]:
    pieces = range(-(-length // step))
    joined: dict[str, Joined] = {}
    left: dict[int, Any] = {}
    for i in reversed(pieces) if reverse else pieces:
        start = i * step
        piece = _slice(tokens, start, min(start + step, length))
        carry, outputs, note = body(carry, piece, None if notes is None else notes[i])
        if note is not None:
            left[i] = note
        for name, x in outputs.items():
            if x is None:
                continue
            if name not in joined:
                joined[name] = Joined(xp, length, out if name == "o" else None)
            joined[name].put(start, x)
    return carry, {name: pieces.array() for name, pieces in joined.items()}, left


class Joined:
    """An array of `length` tokens put together from pieces, in any order.

    Where arrays can be written to, each piece goes to its place at once, so that a long output exists once; elsewhere
    (immutable arrays, autograd, vmap) the pieces are joined at the end.
    """

    def __init__(self, xp: Namespace, length: int, out: Array | None = None) -> None:
        self._xp, self._length = xp, length
        self._pieces: list[tuple[int, Array]] = []
        self._whole = out

    def put(self, start: int, piece: Array) -> None:
        """The tokens from `start` on."""
        if self._whole is None:
            if not writable(self._xp) or piece.shape[-2] == self._length:
                self._pieces.append((start, piece))
                return
            shape = (*piece.shape[:-2], self._length, piece.shape[-1])
            self._whole = self._xp.empty(shape, dtype=piece.dtype, **beside(piece))
        self._whole[..., start : start + piece.shape[-2], :] = piece

    def array(self) -> Array:
        """All tokens."""
        if self._whole is not None:
            return self._whole
        pieces = [piece for _, piece in sorted(self._pieces, key=lambda item: item[0])]
        return pieces[0] if len(pieces) == 1 else self._xp.concat(pieces, axis=-2)


def _fold_traced(
    xp: Namespace, body: Body, carry: Carry, tokens: Tokens, length: int, step: int, reverse: bool, notes: Any
) -> tuple[Carry, Tokens, Any]:
    import jax

    full = length // step
    cut = full * step
    tail = length - cut

    def stacked(x: Array) -> Array:
        shape = (*x.shape[:-2], full, step, x.shape[-1])
        return xp.moveaxis(xp.reshape(x[..., :cut, :], shape), -3, 0)

    def joined(x: Array) -> Array:
        x = xp.moveaxis(x, 0, -3)
        return xp.reshape(x, (*x.shape[:-3], cut, x.shape[-1]))

    # Of the pieces a derivative keeps only the carries and computes the rest again.
    body = jax.checkpoint(body, prevent_cse=False)

    def scan_body(state: Carry, piece: tuple[Tokens, Any]) -> tuple[Carry, tuple[Tokens, Any]]:
        state, outputs, note = body(state, piece[0], piece[1])
        return state, (outputs, note)

    scan_notes, tail_note = (None, None) if notes is None else notes
    tail_outputs: Tokens = {}
    tail_left: Any = None
    if tail and reverse:
        carry, tail_outputs, tail_left = body(carry, _slice(tokens, cut, length), tail_note)
    pieces = {name: None if x is None else stacked(x) for name, x in tokens.items()}
    carry, (scanned, left) = jax.lax.scan(scan_body, carry, (pieces, scan_notes), reverse=reverse)
    if tail and not reverse:
        carry, tail_outputs, tail_left = body(carry, _slice(tokens, cut, length), tail_note)
    outputs = {name: None if x is None else joined(x) for name, x in scanned.items()}
    for name, x in tail_outputs.items():
        if x is not None:
            outputs[name] = xp.concat([outputs[name], x], axis=-2)
    return carry, outputs, (left, tail_left)


def _fold_cut(
    body: Body, carry: Carry, tokens: Tokens, length: int, step: int, out: Array
) -> tuple[Carry, Tokens, Any]:
    """As `_fold_traced`, for a body whose only output is "o" and where no derivative is taken: each piece is cut out of
    the whole and its output put into `out`. So nothing but inputs and output has their length."""
    import jax

    def cut(start: Any, size: int) -> Tokens:
        return {
            name: None if x is None else jax.lax.dynamic_slice_in_dim(x, start, size, x.ndim - 2)
            for name, x in tokens.items()
        }

    def put(out: Array, start: Any, found: Tokens) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(out, found["o"], start, out.ndim - 2)

    def turn(i: Any, state: tuple[Carry, Array]) -> tuple[Carry, Array]:
        carry, found, _ = body(state[0], cut(i * step, step), None)
        return carry, put(state[1], i * step, found)

    full = length // step
    carry, out = jax.lax.fori_loop(0, full, turn, (carry, out))
    if full * step < length:
        carry, found, _ = body(carry, cut(full * step, length - full * step), None)
        out = put(out, full * step, found)
    return carry, {"o": out}, None

r"""The operators as straightforward compositions of chunked linear attention, all chunks at once, and their gradient.

What one would write by hand from the definitions, in the array library itself:

$$\mathrm{LA}(a, b, c)_t = \sum_{j \le t} (a_t \cdot b_j)\, c_j, \qquad
\mathrm{HLA}_2 = \mathrm{LA}(q, \mathrm{LA}(q, k, k), v)$$

It shares nothing with the operators. In the array's own precision it is one of the peers of `hla bench`; in float64 it
judges long sequences, for which the dense definition is too large, and gradients. No decays, masks or options.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

Array: TypeAlias = Any
Streams: TypeAlias = dict[str, Array]

CHUNK = 64


class Line(NamedTuple):
    """result = LA(a, b, c), of streams by name."""

    result: str
    a: str
    b: str
    c: str


_LINEAR = (Line("o", "q", "k", "v"),)
_HLA2 = (Line("u", "q", "k", "k"), Line("o", "q", "u", "v"))
_AHLA = (Line("w", "q", "k", "v"), Line("o", "q", "k", "w"))
_HLA3 = (Line("u", "q", "k", "k"), Line("w", "q", "k", "v"), Line("o", "q", "u", "w"))


def lines(operator: str, order: int | None = None) -> tuple[Line, ...]:
    """An operator as lines, the last of which is its output.

    Of order 2m: HLA₂ m times, each on the output of the one before. Of order 2m + 1: HLA₃, then HLA₂ m − 1 times.

    Example:
        >>> lines("higher_order", 4)[-1]
        Line(result='o2', a='q', b='u', c='o')
    """
    known = {"linear_attention": _LINEAR, "hla2": _HLA2, "ahla": _AHLA, "hla3": _HLA3}
    if operator != "higher_order":
        return known[operator]
    assert order is not None
    if order == 1:
        return _LINEAR
    found = _HLA2 if order % 2 == 0 else _HLA3
    for stage in range(2, order // 2 + 1):
        found = (*found, Line(f"o{stage}", "q", "u", found[-1].result))
    return found


def attend(xp: Any, operator: str, q: Array, k: Array, v: Array, *, order: int | None = None) -> Array:
    """(H, T, d), (H, T, d), (H, T, dv) → (H, T, dv).

    Example:
        >>> import numpy as np
        >>> x = np.ones((1, 3, 1))
        >>> attend(np, "hla2", x, x, x)[0, :, 0]
        array([1., 3., 6.])
    """
    program = lines(operator, order)
    streams = _run(xp, program, _split(xp, q, k, v))
    return _join(xp, streams[program[-1].result], v)


def attend_and_pull(
    xp: Any, operator: str, q: Array, k: Array, v: Array, do: Array, *, order: int | None = None
) -> tuple[Array, tuple[Array, Array, Array]]:
    r"""The output, and the gradients of Σ do·o with respect to q, k and v.

    $$da = \mathrm{LA}(do, c, b), \quad db = \mathrm{LA}^r(c, do, a), \quad dc = \mathrm{LA}^r(b, a, do)$$

    with LAʳ the same run backwards in time.

    Example:
        >>> import numpy as np
        >>> x = np.ones((1, 3, 1))
        >>> attend_and_pull(np, "linear_attention", x, x, x, x)[1][2][0, :, 0]
        array([3., 2., 1.])
    """
    program = lines(operator, order)
    streams = _run(xp, program, _split(xp, q, k, v))
    gradients: Streams = {program[-1].result: _chunks(xp, do)}

    def add(name: str, term: Array) -> None:
        gradients[name] = gradients[name] + term if name in gradients else term

    for result, a, b, c in reversed(program):
        d = gradients.pop(result)
        add(a, linear(xp, d, streams[c], streams[b]))
        add(b, _reversed(xp, streams[c], d, streams[a]))
        add(c, _reversed(xp, streams[b], streams[a], d))
    found = tuple(_join(xp, gradients[name], like) for name, like in (("q", q), ("k", k), ("v", v)))
    return _join(xp, streams[program[-1].result], v), (found[0], found[1], found[2])


def states_after(xp: Any, operator: str, q: Array, k: Array, v: Array, *, order: int | None = None) -> list[Array]:
    """The state Σ b cᵀ of each line after all tokens, (H, ·, ·)."""
    program = lines(operator, order)
    streams = _run(xp, program, _split(xp, q, k, v))
    return [(streams[line.b].swapaxes(-1, -2) @ streams[line.c]).sum(1) for line in program]


def linear(xp: Any, a: Array, b: Array, c: Array) -> Array:
    """LA on chunks: (H, n, C, d), (H, n, C, d), (H, n, C, dv) → (H, n, C, dv)."""
    inside = xp.tril(a @ b.swapaxes(-1, -2)) @ c
    states = b.swapaxes(-1, -2) @ c
    before = xp.concat([xp.zeros_like(states[:, :1]), xp.cumulative_sum(states, axis=1)[:, :-1]], axis=1)
    return inside + a @ before


def _reversed(xp: Any, a: Array, b: Array, c: Array) -> Array:
    a, b, c = (xp.flip(x, axis=(1, 2)) for x in (a, b, c))
    return xp.flip(linear(xp, a, b, c), axis=(1, 2))


def _run(xp: Any, program: tuple[Line, ...], streams: Streams) -> Streams:
    for result, a, b, c in program:
        streams[result] = linear(xp, streams[a], streams[b], streams[c])
    return streams


def _split(xp: Any, q: Array, k: Array, v: Array) -> Streams:
    return {"q": _chunks(xp, q), "k": _chunks(xp, k), "v": _chunks(xp, v)}


def _chunks(xp: Any, x: Array) -> Array:
    """(H, T, ·) → (H, n, C, ·), zeros after the last token; 16-bit floats become float32, in which sums are formed."""
    if x.dtype.itemsize == 2:
        x = xp.astype(x, xp.float32)
    missing = -x.shape[1] % CHUNK
    if missing:
        like = xp.broadcast_to(x[:, :1], (x.shape[0], missing, x.shape[2]))
        x = xp.concat([x, xp.zeros_like(like)], axis=1)
    return xp.reshape(x, (x.shape[0], -1, CHUNK, x.shape[-1]))


def _join(xp: Any, x: Array, like: Array) -> Array:
    x = xp.reshape(x, (x.shape[0], -1, x.shape[-1]))[:, : like.shape[1]]
    return x if x.dtype == like.dtype else xp.astype(x, like.dtype)

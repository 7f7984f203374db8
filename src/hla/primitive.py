r"""The primitive over all tokens, and its gradient: everything the family's gradient needs (math, "Gradients").

With d_t the cotangent of r_t and Y the state run backwards in time, Y_t = Σ_{s≥t} Γ(s,t)^p a_s d_sᵀ + Γ(T−1,t)^p dX_T:

    da_t = X_t d_t        db_j = Y_j c_j        dc_j = Y_jᵀ b_j        dX_{−1} = the rest of Y that reaches the left end

and d log γ_s = p · (the sum of all weights Γ(t,j)^p (a_t·b_j)(c_j·d_t) over pairs with j < s ≤ t). Per chunk that sum
splits into pairs inside the chunk, pairs with one or the other end outside, and pairs that span it; each is formed on
its own, so no long running sum loses digits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from hla.arrays import Array, Device, DType, Namespace, broadcast_shapes, sum_to, transpose
from hla.chunkwise import accumulate, chunk
from hla.decays import Decays
from hla.family import Program, Read, Spec, State
from hla.loops import Tokens, fold


@dataclass(frozen=True, eq=False, slots=True)
class Setting:
    """How one pass of the primitive runs. log_decay, constant and starts are those of `hla.problem.Problem`."""

    xp: Namespace
    dtype: DType
    placed: dict[str, Device]
    chunk_size: int
    power: int = 1
    strict: bool = False
    log_decay: Array | None = None
    constant: bool = True
    starts: Array | None = None

    def decays(self) -> Decays:
        """The decay factors of the pass."""
        return Decays(self.xp, self.dtype, self.placed, self.log_decay if self.constant else None)

    def tokens(self, **streams: Array) -> Tokens:
        """The streams, and the options that have a time axis."""
        return {**streams, "log_decay": None if self.constant else self.log_decay, "starts": self.starts}

    def zeros(self, *streams: Array) -> Array:
        """The zero state Σ b cᵀ of two streams (b, c), at the batch axes of all streams and options given."""
        options = [x for x in (self.log_decay, self.starts) if x is not None]
        batch = broadcast_shapes(*(tuple(x.shape[:-2]) for x in (*streams, *options)))
        shape = (*batch, streams[0].shape[-1], streams[1].shape[-1])
        return self.xp.zeros(shape, dtype=self.dtype, **self.placed)

    def spread_cotangent(self, d: Array | None, *streams: Array) -> Array:
        """`d`, or zeros, at the shape that a loop backwards over tokens will keep.

        The adjoint of broadcasting sums, so that copies of `d` would count several times: it goes to the first entry of
        each axis that it lacks, and zeros to the others.
        """
        xp, zeros = self.xp, self.zeros(*streams)
        if d is None:
            return zeros
        shape = broadcast_shapes(tuple(d.shape), tuple(zeros.shape))
        own = (*(1,) * (len(shape) - d.ndim), *d.shape)
        d = xp.broadcast_to(xp.reshape(d, own), shape)
        for axis, (have, want) in enumerate(zip(own, shape, strict=True)):
            if have != want:
                first = xp.arange(want, **self.placed) == 0
                d = xp.where(xp.reshape(first, (want, *(1,) * (len(shape) - axis - 1))), d, xp.zeros_like(d))
        return d

    def spread(self, state: Array | None, *streams: Array) -> Array:
        """`state`, or zeros, at the shape that a loop over tokens will keep."""
        zeros = self.zeros(*streams)
        if state is None:
            return zeros
        shape = broadcast_shapes(tuple(state.shape), tuple(zeros.shape))
        return state if state.shape == shape else self.xp.broadcast_to(state, shape)


def _program(power: int, strict: bool) -> Program:
    return Program(
        Spec("linear_attention"), (State("X", "b", "c", power),), (Read("r", "a", "X", strict),), (("r", 1.0),)
    )


def forward(setting: Setting, a: Array, b: Array, c: Array, initial: Array | None = None) -> tuple[Array, Array]:
    """LA_p(a, b, c), or LAx_p when strict: (*batch, T, dv), and the final state (*batch, d, dv)."""
    xp, decays, program = setting.xp, setting.decays(), _program(setting.power, setting.strict)

    def body(state: Array, tokens: Tokens, _: None) -> tuple[Array, Tokens, None]:
        streams: dict[str, Array] = {"a": tokens["a"], "b": tokens["b"], "c": tokens["c"]}
        decay = decays.chunk(int(streams["a"].shape[-2]), tokens["log_decay"], tokens["starts"])
        state = chunk(xp, program, decay, {"X": state}, streams)["X"]
        return state, {"r": streams["r"]}, None

    state, outputs, _ = fold(
        xp,
        body,
        setting.spread(initial, b, c),
        setting.tokens(a=a, b=b, c=c),
        int(a.shape[-2]),
        setting.chunk_size,
    )
    return outputs["r"], state


class Cotangents(NamedTuple):
    """Gradients of one pass, in the shapes of what they belong to."""

    a: Array
    b: Array
    c: Array
    initial: Array
    log_decay: Array | None
    """(*b, T, 1), per token also where the decay is constant"""


def backward(
    setting: Setting, a: Array, b: Array, c: Array, initial: Array | None, d: Array, d_final: Array | None
) -> Cotangents:
    """The adjoint of `forward` at (a, b, c, initial), applied to (d, d_final).

    Recomputes the states, keeps one per chunk: memory O(inputs + (T/C) d dv).
    """
    xp, decays, decays_back = setting.xp, setting.decays(), setting.decays()  # a traced loop's factors stay inside it
    length = int(a.shape[-2])

    def keep(state: Array, tokens: Tokens, _: None) -> tuple[Array, Tokens, Any]:
        decay = decays.chunk(int(tokens["b"].shape[-2]), tokens["log_decay"], tokens["starts"])
        return accumulate(xp, decay, state, tokens["b"], tokens["c"], setting.power), {}, state

    start = setting.spread(initial, b, c)
    _, _, entering = fold(xp, keep, start, setting.tokens(b=b, c=c), length, setting.chunk_size)

    def body(state: Array, tokens: Tokens, before: Array) -> tuple[Array, Tokens, None]:
        decay = decays_back.chunk(int(tokens["a"].shape[-2]), tokens["log_decay"], tokens["starts"])
        return _chunk_backward(setting, decay, tokens, before, state)

    if d_final is not None:
        d_final = _no_wider(xp, d_final, tuple(start.shape))
    finish = setting.spread_cotangent(d_final, a, d, b, c)
    state, outputs, _ = fold(
        xp,
        body,
        finish,
        setting.tokens(a=a, b=b, c=c, d=d),
        length,
        setting.chunk_size,
        reverse=True,
        notes=entering,
    )
    return Cotangents(
        sum_to(xp, outputs["a"], a.shape),
        sum_to(xp, outputs["b"], b.shape),
        sum_to(xp, outputs["c"], c.shape),
        state if initial is None else sum_to(xp, state, initial.shape),
        outputs.get("log_decay"),
    )


def _no_wider(xp: Namespace, x: Array, shape: tuple[int, ...]) -> Array:
    """`x` summed over the axes along which it was broadcast from an array of that shape, where it is the wider one.

    Else what a batch entry's tokens get from within would be counted once for each copy of the final state.
    """
    rank = min(x.ndim, len(shape))
    have, own = tuple(x.shape)[x.ndim - rank :], shape[len(shape) - rank :]
    return sum_to(xp, x, tuple(1 if m == 1 else n for n, m in zip(have, own, strict=True)))


def _chunk_backward(
    setting: Setting, decay: Any, tokens: Tokens, before: Array, after: Array
) -> tuple[Array, Tokens, None]:
    """One chunk: the state `before` enters it from the left, the cotangent `after` from the right."""
    xp, power, strict = setting.xp, setting.power, setting.strict
    a, b, c, d = tokens["a"], tokens["b"], tokens["c"], tokens["d"]
    pairs = decay.pairs(power, strict)
    weights, values = xp.matmul(a, transpose(xp, b)), xp.matmul(d, transpose(xp, c))
    weighted, valued = _select(xp, decay, pairs, weights), _select(xp, decay, pairs, values)
    from_left = _select(xp, decay, decay.into(power, strict), xp.matmul(d, transpose(xp, before)))
    key_from_right = _select(xp, decay, decay.out(power), xp.matmul(c, transpose(xp, after)))
    value_from_right = _select(xp, decay, decay.out(power), xp.matmul(b, after))
    outputs: Tokens = {
        "a": xp.matmul(valued, b) + from_left,
        "b": xp.matmul(transpose(xp, valued), a) + key_from_right,
        "c": xp.matmul(transpose(xp, weighted), d) + value_from_right,
    }
    spanning = _select(xp, decay, decay.through(power), after)
    if setting.log_decay is not None:
        inside = (
            weighted * values if not decay.resets else xp.where(pairs == 0, xp.zeros_like(weighted), weighted * values)
        )
        outputs["log_decay"] = _log_decay(
            setting,
            inside,
            _total(xp, a * from_left),
            _total(xp, b * key_from_right),
            xp.sum(before * spanning, axis=(-2, -1), keepdims=True, dtype=setting.dtype),
        )
    entering = _select(xp, decay, decay.into(power, strict), a)
    return spanning + xp.matmul(transpose(xp, entering), d), outputs, None


def _select(xp: Namespace, decay: Any, factor: Array | None, x: Array) -> Array:
    """factor · x, and exactly 0 where the factor is."""
    if factor is None:
        return x
    return xp.where(factor == 0, xp.zeros_like(x), factor * x) if decay.resets else factor * x


def _total(xp: Namespace, x: Array) -> Array:
    return xp.sum(x, axis=-1, keepdims=True, dtype=x.dtype)


def _log_decay(setting: Setting, inside: Array, left: Array, right: Array, spanning: Array) -> Array:
    """p · Σ over pairs (t, j) with j < s ≤ t (strict: s < t), for every token s of the chunk: (*b, C, 1).

    Only sums, no differences of sums: a token that nothing reaches across gets exactly 0.
    """
    xp = setting.xp
    length = int(inside.shape[-1])
    reader, token = (xp.arange(length, **setting.placed) for _ in range(2))
    reads = reader[:, None] > token if setting.strict else reader[:, None] >= token
    up_to = _before(xp, inside, axis=-1)  # Σ_{j<s} for every pair (t, s)
    pairs = xp.sum(xp.where(reads, up_to, xp.zeros_like(up_to)), axis=-2, keepdims=True, dtype=setting.dtype)
    later = xp.flip(_cumulative(xp, xp.flip(left, axis=-2), axis=-2), axis=-2)  # Σ_{t≥s}
    if setting.strict:
        later = xp.concat([later[..., 1:, :], xp.zeros_like(later[..., :1, :])], axis=-2)
    return setting.power * (transpose(xp, pairs) + later + _before(xp, right, axis=-2) + spanning)


def _cumulative(xp: Namespace, x: Array, axis: int) -> Array:
    return xp.cumulative_sum(x, axis=axis, dtype=x.dtype)


def _before(xp: Namespace, x: Array, axis: int) -> Array:
    """The sums of all that stands before each entry."""
    total = _cumulative(xp, x, axis)
    first = total[..., :1] if axis == -1 else total[..., :1, :]
    rest = total[..., :-1] if axis == -1 else total[..., :-1, :]
    return xp.concat([xp.zeros_like(first), rest], axis=axis)


def reversed_time(setting: Setting) -> Setting:
    """The setting under which flipped streams see each other as in `setting`, for γ = 1 (packed boundaries only)."""
    starts = setting.starts
    if starts is None:
        return setting
    xp = setting.xp
    shifted = xp.concat([starts[..., 1:, :], xp.zeros_like(starts[..., :1, :])], axis=-2)
    return replace(setting, starts=xp.flip(shifted, axis=-2))

"""A call after its checks: what every form, the gradient and every backend are given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from hla.arrays import Array, Device, DType, Namespace, beside, broadcast_shapes, cast
from hla.family import Program, Shapes, shapes, weighted_sum

States: TypeAlias = dict[str, Array]
"""Arrays by symbol (`hla.family.State.symbol`), all of rank ≥ 2: (*batch, d, dv)."""
Runner: TypeAlias = "Callable[[Problem], tuple[Array, States]]"


@dataclass(frozen=True, eq=False, slots=True)
class Problem:
    """One operator on one set of arrays. Time is axis −2 everywhere; batch axes broadcast and are not expanded."""

    xp: Namespace
    program: Program
    q: Array
    """(*b, T, d), as the caller gave it: its own dtype, not scaled, not masked"""
    k: Array
    """(*b, T, d)"""
    v: Array
    """(*b, T, dv)"""
    dtype: DType
    """of accumulators and states"""
    log_decay: Array | None = None
    """(*b, T, 1) per token, (*b, 1, 1) constant; None for γ = 1"""
    constant: bool = True
    """whether log_decay is the constant kind"""
    token_mask: Array | None = None
    """bool (*b, T, 1), False where the token is skipped"""
    starts: Array | None = None
    """bool (*b, T, 1), True where a packed sequence starts"""
    cu_seqlens: list[int] | Array | None = None
    """packed sequences along T: offsets from 0 to T, an array only while its values are traced"""
    initial: States | None = None
    """with cu_seqlens with a leading axis N"""
    scale: float | Array = 1.0
    eps: float = 1e-6
    ridge: float = 0.0
    return_state: bool = False
    """whether the caller wants the final states; without it a backend may leave them out"""
    out: Array | None = None
    """where the output may be written, so that it exists once; a form may return its own. For NumPy, and for JAX
    where no derivative is taken"""
    overwrite: bool = False
    """whether a backend may write the final states over the initial ones: a decode step in place"""
    form: str = "chunkwise"
    chunk_size: int | None = None

    @property
    def length(self) -> int:
        """T"""
        length: int = self.v.shape[-2]  # in a traced torch program a symbol, which int() would fix to this T
        return length

    @property
    def placed(self) -> dict[str, Device]:
        """Keyword arguments that put a new array on the device of these."""
        return beside(self.v)

    @property
    def resets(self) -> bool:
        """Whether a decay factor can be exactly 0."""
        return self.starts is not None or (self.log_decay is not None and not self.constant)

    @property
    def scale_varies(self) -> bool:
        """Whether the scale is an array, which has a gradient."""
        return not isinstance(self.scale, float)

    @property
    def scaled(self) -> bool:
        """Whether the scale changes anything."""
        return self.scale_varies or self.scale != 1.0

    def token_batches(self) -> tuple[tuple[int, ...], ...]:
        """Batch axes of the options that vary over heads: they reach every state."""
        return tuple(tuple(x.shape[:-2]) for x in (self.log_decay, self.token_mask, self.starts) if x is not None)

    def output_batch(self) -> tuple[int, ...]:
        """The batch axes of the output."""
        return broadcast_shapes(*(tuple(x.shape[:-2]) for x in (self.q, self.k, self.v)))

    def shapes(self) -> Shapes:
        """The shapes of all streams and states of this call."""
        extra = broadcast_shapes(*self.token_batches())
        return shapes(
            self.program,
            tuple(self.q.shape[:-2]),
            tuple(self.k.shape[:-2]),
            tuple(self.v.shape[:-2]),
            int(self.q.shape[-1]),
            int(self.v.shape[-1]),
            extra,
            tuple((symbol, tuple(x.shape[:-2])) for symbol, x in (self.initial or {}).items()),
        )

    def initial_states(self, *, own: bool = False) -> States:
        """All states before the first token, at their natural shapes: those given, zeros for the others.

        `own`: as arrays that nobody else holds, to be written to.
        """
        xp = self.xp
        result: States = {}
        placed = getattr(xp, "zero_states", None)
        zeros = None if placed is None or self.initial is not None else placed(self)
        for symbol, shape in self.shapes().state.items():
            given = (self.initial or zeros or {}).get(symbol)
            if given is None:
                result[symbol] = xp.zeros(shape, dtype=self.dtype, **self.placed)
            else:
                given = cast(xp, given, self.dtype)
                result[symbol] = given if given.shape == shape else xp.broadcast_to(given, shape)
                if own:
                    result[symbol] = result[symbol] + 0.0
        return result

    def streams(self, q: Array, k: Array, v: Array, token_mask: Array | None) -> dict[str, Array]:
        """Some of the tokens as the program's input streams: cast, scaled, masked."""
        xp = self.xp
        q, k, v = (cast(xp, x, self.dtype) for x in (q, k, v))
        if self.scaled:
            q = q * self.scale
        one: Array | None = None
        if token_mask is not None:
            zero = xp.zeros((), dtype=self.dtype, **self.placed)
            q, k, v = (xp.where(token_mask, x, zero) for x in (q, k, v))
            one = cast(xp, token_mask, self.dtype)
        result = {"q": q, "k": k, "v": v}
        if self.program.denominator:
            result["one"] = xp.ones_like(v[..., :1]) if one is None else one
        return result

    def masked_log_decay(self, log_decay: Array | None, token_mask: Array | None) -> Array | None:
        """Log-decays of some of the tokens, 0 where the token is skipped."""
        if log_decay is None or token_mask is None:
            return log_decay
        return self.xp.where(token_mask, log_decay, self.xp.zeros_like(log_decay))

    def finish(self, streams: dict[str, Array], token_mask: Array | None) -> Array:
        """The output from the program's reads: weighted, normalised (Eq. 3.4), zero at skipped tokens, dtype of v."""
        o = combine_reads(self.program, streams, self.ridge, self.eps)
        if token_mask is not None:
            o = self.xp.where(token_mask, o, self.xp.zeros_like(o))
        return cast(self.xp, o, self.v.dtype)


def combine_reads(program: Program, streams: dict[str, Array], ridge: float, eps: float) -> Array:
    """The program's reads as its output: weighted, normalised (Eq. 3.4)."""
    o: Array = weighted_sum(program.output, streams, ridge)
    if program.denominator:
        o = o / (weighted_sum(program.denominator, streams, ridge) + eps)
    return o

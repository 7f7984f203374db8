r"""The decay factors Γ of one chunk.

Γ(t,j) = Π_{s=j+1..t} γ_s for j ≤ t. Everything is built from log-decays summed over exactly the tokens in between:

    D[t, j] = Σ_{s=j+1..t} log γ_s,        column j = −1 standing for the state carried into the chunk,

one sum per pair (a product with a triangle of ones) instead of the difference c_t − c_j of two running sums: a
difference of large sums loses digits. In these sums −∞ counts as a number so low that exp of it is the exact 0 of a
reset, as 0·∞ would be NaN. Packed boundaries are kept apart from the log-decays: they clear also what a strict read
would see, and no NaN in a log-decay may jump over them.
"""

from __future__ import annotations

from hla.arrays import Array, Device, DType, Namespace, fleeting, scaled, values_at_hand
from hla.problem import Problem

_RESET = -1.0e4
"""stands for −∞: exp of it is 0 in float64 too, and a chunk's sum of it is far from overflow"""
_SAFE = -80.0
"""exp of this is a normal number in float32; 3 is the largest decay exponent of the family"""


class Decays:
    """Makes the factors of one chunk after another; what does not depend on the tokens is computed once."""

    def __init__(self, xp: Namespace, dtype: DType, placed: dict[str, Device], constant: Array | None) -> None:
        self.xp, self.dtype, self.placed = xp, dtype, placed
        self._constant = constant
        self._triangles: dict[tuple[int, bool], Array] = {}
        self._memo: dict[int, Decay] = {}

    @classmethod
    def of(cls, problem: Problem) -> Decays:
        """For the chunks of one problem."""
        return cls(problem.xp, problem.dtype, problem.placed, problem.log_decay if problem.constant else None)

    def chunk(self, length: int, log_decay: Array | None, starts: Array | None) -> Decay:
        """The factors of a chunk. log_decay: (*b, C, 1) per token, or None; starts: bool (*b, C, 1), or None."""
        if log_decay is None and starts is None:
            if length not in self._memo:
                self._memo[length] = Decay(self, length, self._constant, True, None)
            return self._memo[length]
        if log_decay is None:
            return Decay(self, length, self._constant, True, starts)
        return Decay(self, length, log_decay, False, starts)

    def triangle(self, length: int, strict: bool = False) -> Array:
        """Ones below, and unless strict on, the diagonal, (C, C): what a read sees. Times it, a column is summed up."""
        found = self._triangles.get((length, strict))
        if found is None:
            row, column = self.xp.arange(length, **self.placed)[:, None], self.xp.arange(length, **self.placed)[None, :]
            found = self.xp.astype(row > column if strict else row >= column, self.dtype)
            self._triangles[length, strict] = found
        return found


class Decay:
    """The factors of one chunk of `length` tokens. Column −1 of D is kept apart: a square of C × C is what is fast."""

    def __init__(self, of: Decays, length: int, log_decay: Array | None, constant: bool, starts: Array | None) -> None:
        self._xp, self._of, self._length = of.xp, of, length
        self.trivial = log_decay is None and starts is None
        self.resets = starts is not None or (log_decay is not None and not constant)
        """whether a factor can be exactly 0, so that sums must select instead of multiplying by it"""
        self._memo: dict[tuple[str, int, bool], Array] = {}
        self._has_log = log_decay is not None
        self._sequence = None if starts is None else self._sequences(starts)
        self._given, self._is_constant, self._fleets = log_decay, constant, False
        self._spans: tuple[Array, Array] | None = None
        if log_decay is None:
            return
        if self.resets and starts is None and values_at_hand(self._xp, log_decay):
            # D's least entry is the chunk's whole span. Selecting costs more than this look.
            span = self._xp.sum(log_decay, axis=-2, dtype=of.dtype)
            self.resets = not bool(self._xp.all(3 * span > _SAFE))
            quick = getattr(self._xp, "forgetting", None)
            if quick is not None and not self.resets:
                made = quick(log_decay, of.triangle(length), of.triangle(length, strict=True))
                self._memo["pairs", 1, False], self._memo["into", 1, False] = made
                self._fleets = True

    def _log(self, part: int, strict: bool) -> Array:
        """D over the tokens of the chunk, (*b, C, C), 0 where j > t (part 0), or its column −1, (*b, C, 1) (part 1)."""
        if self._spans is None:
            self._spans = self._constant(self._given) if self._is_constant else self._per_token(self._given)
        return self._before(self._spans[part]) if strict else self._spans[part]

    def _constant(self, log_decay: Array) -> tuple[Array, Array]:
        xp, of = self._xp, self._of
        time = xp.arange(self._length, **of.placed)[:, None]
        ages = xp.astype(time - time[:, 0], of.dtype) * of.triangle(self._length)
        return ages * log_decay, xp.astype(time + 1, of.dtype) * log_decay

    def _per_token(self, log_decay: Array) -> tuple[Array, Array]:
        xp, of = self._xp, self._of
        floor = xp.asarray(_RESET, dtype=of.dtype, **of.placed)
        log_decay = xp.where(log_decay < floor, floor, log_decay)
        later = of.triangle(self._length, strict=True)  # [s, j]: s > j
        if self._sequence is None:
            between = log_decay * later
        else:  # a NaN reaches no sequence after its own
            between = xp.where(later > 0, log_decay, xp.zeros_like(log_decay))
        triangle = of.triangle(self._length)
        return xp.matmul(triangle, between), xp.matmul(triangle, log_decay)

    def _sequences(self, starts: Array) -> Array:
        """How many packed sequences have started in the chunk, up to each token: (*b, C, 1)."""
        return self._xp.cumulative_sum(self._xp.astype(starts, self._xp.int32), axis=-2, dtype=self._xp.int32)

    def _before(self, x: Array) -> Array:
        """The row above: what a strict read of token t sees is what t−1 left."""
        return self._xp.concat([self._xp.zeros_like(x[..., :1, :]), x[..., :-1, :]], axis=-2)

    def pairs(self, power: int, strict: bool) -> Array:
        """Γ(t,j)^p over the tokens of the chunk, 0 where t does not see j: (*b, C, C)."""
        found = self._memo.get(("pairs", power, strict))
        if found is None:
            found = self._raised(power, strict) if power > 1 else self._pairs(strict)
            self._memo["pairs", power, strict] = found
        return found

    def _pairs(self, strict: bool) -> Array:
        xp, of = self._xp, self._of
        visible = of.triangle(self._length, strict)
        if self._sequence is not None:
            same = self._sequence == xp.matrix_transpose(self._sequence)
            if not self._has_log:
                return xp.where(same, visible, xp.zeros_like(visible))
            nothing = xp.asarray(float("-inf"), dtype=of.dtype, **of.placed)
            return xp.exp(xp.where(xp.logical_and(same, visible > 0), self._log(0, strict), nothing))
        if not self._has_log:
            return visible
        # D is 0 where nothing is seen: a product is much faster there than exp(−∞)
        return scaled(xp, xp.exp(self._log(0, strict)), visible)

    def into(self, power: int, strict: bool) -> Array | None:
        """The factor on the carried-in state when token t reads it: (*b, C, 1); None for 1."""
        if self.trivial:
            return None
        found = self._memo.get(("into", power, strict))
        if found is None:
            if power > 1:
                lower, base = self.into(power - 1, strict), self.into(1, strict)
                assert lower is not None
                found = lower * base
            else:
                found = self._into(strict)
            self._memo["into", power, strict] = found
        return found

    def _into(self, strict: bool) -> Array:
        xp, of = self._xp, self._of
        found = None
        if self._has_log:
            found = xp.exp(self._log(1, strict))
        if self._sequence is None:
            return found
        first = self._sequence == 0
        return xp.astype(first, of.dtype) if found is None else xp.where(first, found, xp.zeros_like(found))

    def _raised(self, power: int, strict: bool) -> Array:
        lower, base = self.pairs(power - 1, strict), self.pairs(1, strict)
        return fleeting(self._xp, lower, base, f"pairs {power} {strict}") if self._fleets else lower * base

    def out(self, power: int) -> Array | None:
        """The factor on token j's contribution at the end of the chunk: (*b, C, 1); None for 1."""
        return None if self.trivial or power == 0 else self._xp.matrix_transpose(self.pairs(power, False)[..., -1:, :])

    def through(self, power: int) -> Array | None:
        """The factor on the carried-in state at the end of the chunk: (*b, 1, 1); None for 1."""
        into = None if power == 0 else self.into(power, False)
        return None if into is None else into[..., -1:, :]

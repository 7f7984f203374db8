r"""The decay factors Γ of one chunk.

Γ(t,j) = Π_{s=j+1..t} γ_s for j ≤ t. Everything is built from log-decays summed over exactly the tokens in between:

    D[t, j] = Σ_{s=j+1..t} log γ_s,        column j = −1 standing for the state carried into the chunk,

one sum per pair (a product with a triangle of ones) instead of the difference c_t − c_j of two running sums: a
difference of large sums loses digits. In these sums −∞ counts as a number so low that exp of it is the exact 0 of a
reset, as 0·∞ would be NaN. Packed boundaries are kept apart from the log-decays: they clear also what a strict read
would see, and no NaN in a log-decay may jump over them.
"""

from __future__ import annotations

from hla.arrays import Array, Device, DType, Namespace, scaled, values_at_hand
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
        self._grids: dict[int, tuple[Array, Array, dict[bool, Array]]] = {}
        self._triangles: dict[tuple[int, bool | None], Array] = {}
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

    def grid(self, length: int) -> tuple[Array, Array, dict[bool, Array]]:
        """Row t and column j (from −1) of D, and which columns a read and a strict read may see."""
        if length not in self._grids:
            row = self.xp.arange(length, **self.placed)[:, None]
            column = self.xp.arange(-1, length, **self.placed)[None, :]
            self._grids[length] = row, column, {False: column <= row, True: column < row}
        return self._grids[length]

    def between(self, length: int) -> Array:
        """Ones where s > j, for tokens s and columns j from −1, (C, C + 1)."""
        found = self._triangles.get((length, None))
        if found is None:
            row, column, _ = self.grid(length)
            found = self._triangles[length, None] = self.xp.astype(row > column, self.dtype)
        return found

    def triangle(self, length: int, strict: bool = False) -> Array:
        """Ones below, and unless strict on, the diagonal, (C, C): times it, a column becomes its running sum."""
        found = self._triangles.get((length, strict))
        if found is None:
            row, column = self.xp.arange(length, **self.placed)[:, None], self.xp.arange(length, **self.placed)[None, :]
            found = self.xp.astype(row > column if strict else row >= column, self.dtype)
            self._triangles[length, strict] = found
        return found


class Decay:
    """The factors of one chunk of `length` tokens."""

    def __init__(self, of: Decays, length: int, log_decay: Array | None, constant: bool, starts: Array | None) -> None:
        self._xp, self._dtype, self._placed = of.xp, of.dtype, of.placed
        self.trivial = log_decay is None and starts is None
        self.resets = starts is not None or (log_decay is not None and not constant)
        """whether a factor can be exactly 0, so that sums must select instead of multiplying by it"""
        self._memo: dict[tuple[str, int, bool], Array] = {}
        row, column, self._visible = of.grid(length)
        self._packed, self._lasting = starts is not None, self.trivial or (constant and starts is None)
        if log_decay is not None:
            self._log = self._spans(log_decay, constant, row, column, of)
            if self.resets and starts is None and values_at_hand(self._xp, log_decay):
                # D's least entry is the chunk's whole span. Selecting costs more than this look.
                span = self._log[..., -1, 0]
                self.resets = not bool(self._xp.all(3 * span > _SAFE))
        if starts is not None:
            self._visible = self._same_sequence(starts)
        self._has_log = log_decay is not None

    def _spans(self, log_decay: Array, constant: bool, row: Array, column: Array, of: Decays) -> Array:
        """D."""
        xp = self._xp
        if constant:
            return xp.astype(xp.where(row > column, row - column, xp.zeros_like(row)), self._dtype) * log_decay
        floor = xp.asarray(_RESET, dtype=self._dtype, **self._placed)
        log_decay = xp.where(log_decay < floor, floor, log_decay)
        length = int(row.shape[0])
        if self._packed:  # a NaN stays in its own sequence
            between = xp.where(row > column, log_decay, xp.zeros_like(log_decay))
        else:
            between = log_decay * of.between(length)
        return xp.matmul(of.triangle(length), between)

    def _seen_from(self, strict: bool) -> Array:
        """D of a read. A strict read of token t sees what t−1 left, the row above; row 0 the carried-in state."""
        span = self._log
        if not strict:
            return span
        return self._xp.concat([self._xp.zeros_like(span[..., :1, :]), span[..., :-1, :]], axis=-2)

    def _same_sequence(self, starts: Array) -> dict[bool, Array]:
        """What is visible, within one packed sequence."""
        xp = self._xp
        count = xp.cumulative_sum(xp.astype(starts, xp.int32), axis=-2, dtype=xp.int32)
        same = count == xp.matrix_transpose(xp.concat([xp.zeros_like(count[..., :1, :]), count], axis=-2))
        return {strict: xp.logical_and(same, visible) for strict, visible in self._visible.items()}

    def _factors(self, power: int, strict: bool) -> Array:
        """exp(power · D) where token t sees column j, else exactly 0: (*b, C, C + 1)."""
        found = self._memo.get(("factors", power, strict))
        if found is not None:
            return found
        xp = self._xp
        if power > 1:
            base = found = self._factors(1, strict)
            for _ in range(power - 1):
                found = found * base
        elif self._has_log:
            seen, visible = self._seen_from(strict), self._visible[strict]
            if self._packed:
                nothing = xp.asarray(float("-inf"), dtype=self._dtype, **self._placed)
                found = xp.exp(xp.where(visible, seen, nothing))
            else:  # D is 0 where nothing is seen: a product is much faster there than exp(−∞)
                found = scaled(xp, xp.exp(seen), xp.astype(visible, self._dtype))
        else:
            found = xp.astype(self._visible[strict], self._dtype)
        self._memo["factors", power, strict] = found
        return found

    def pairs(self, power: int, strict: bool) -> Array:
        """Γ(t,j)^p over the tokens of the chunk, 0 where t does not see j: (*b, C, C)."""
        return self._memoise("pairs", power, strict)

    def into(self, power: int, strict: bool) -> Array | None:
        """The factor on the carried-in state when token t reads it: (*b, C, 1); None for 1."""
        return None if self.trivial else self._memoise("into", power, strict)

    def out(self, power: int) -> Array | None:
        """The factor on token j's contribution at the end of the chunk: (*b, C, 1); None for 1."""
        return None if self.trivial or power == 0 else self._memoise("out", power, False)

    def through(self, power: int) -> Array | None:
        """The factor on the carried-in state at the end of the chunk: (*b, 1, 1); None for 1."""
        return None if self.trivial or power == 0 else self._memoise("through", power, False)

    def _memoise(self, part: str, power: int, strict: bool) -> Array:
        found = self._memo.get((part, power, strict))
        if found is None:
            factors = self._factors(power, strict)
            if part == "pairs":
                found = factors[..., :, 1:]
                if self._lasting:  # used for every chunk: worth a copy that lies in one piece
                    found = found + 0.0
            elif part == "into":
                found = factors[..., :, :1]
            elif part == "out":
                found = self._xp.matrix_transpose(factors[..., -1:, 1:])
            else:
                found = factors[..., -1:, :1]
            self._memo[part, power, strict] = found
        return found

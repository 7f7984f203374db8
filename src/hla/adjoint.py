r"""The adjoint of one chunk of a program: reverse mode through its reads and states (math, "Gradients").

With d_t the cotangent of a read's result r_t, X_in the state that enters the chunk and X_out the one that leaves it:

    read    r_t = Σ_j Γ(t,j)^p (a_t·b_j) c_j + Γ(t,−1)^p a_tᵀ X_in                          W = Γ^p ∘ (d cᵀ)
            da = W b + Γ(·,−1)^p d X_inᵀ    db = Wᵀ a    dc = (Γ^p ∘ a bᵀ)ᵀ d    dX_in = Σ_t Γ(t,−1)^p a_t d_tᵀ
    state   X_out = Γ(C−1,−1)^p X_in + Σ_j Γ(C−1,j)^p b_j c_jᵀ
            db_j = Γ(C−1,j)^p dX_out c_j    dc_j = Γ(C−1,j)^p dX_outᵀ b_j    dX_in = Γ(C−1,−1)^p dX_out

which is linear attention again, run backwards in time: dX is the state of that recurrence. And d log γ_s is p · (the
sum of the weights Γ(t,j)^p (a_t·b_j)(c_j·d_t) over all pairs with j < s ≤ t). It splits into pairs inside the chunk,
pairs with one or the other end outside, and pairs that span it; each is formed on its own, so that no difference of
long sums loses digits.
"""

from __future__ import annotations

from hla.arrays import Array, Namespace, multiply_add, scaled, sum_to, transpose
from hla.chunkwise import Scores
from hla.decays import Decay, Decays
from hla.family import Program, Read, State, steps
from hla.problem import States


class ChunkAdjoint:
    """Reverse mode through one chunk. Everything is summed to the batch axes of what it belongs to at once, as adding
    an array along an axis that it lacks would count it once for every entry."""

    def __init__(
        self,
        xp: Namespace,
        decay: Decay,
        streams: dict[str, Array],
        scores: Scores,
        entering: States,
        leaving: States,
        rate: Rate | None,
    ) -> None:
        """`streams` with all results and `scores` from `hla.chunkwise.read_chunk`; `entering` are the states that enter
        the chunk, `leaving` the cotangents of those that leave it."""
        self._xp, self._decay, self._streams, self._scores = xp, decay, streams, scores
        self._entering, self._leaving, self._rate = entering, leaving, rate
        self.states: States = {}
        """cotangents of the entering states"""
        self.cotangents: dict[str, Array] = {}
        """cotangents of the streams that are no results"""

    def pull(self, program: Program, outputs: dict[str, Array]) -> None:
        """Fill `states` and `cotangents` from the cotangents of the program's output reads."""
        lines = steps(program)
        first = {line.symbol: i for i, line in reversed(list(enumerate(lines)))}
        for i, (symbol, state, read) in reversed(list(enumerate(lines))):
            if read is not None:
                d, own = self.cotangents.pop(read.result, None), outputs.get(read.result)
                d = own if d is None else d if own is None else d + own
                if d is not None:
                    self._through_read(state, read, d)
            if first[symbol] == i:
                self._through_state(state)

    def _add_product(self, name: str, x: Array, y: Array) -> None:
        """cotangents[name] += x @ y."""
        xp, shape = self._xp, self._streams[name].shape
        before = self.cotangents.get(name)
        if before is None:
            self.cotangents[name] = sum_to(xp, xp.matmul(x, y), shape)
        elif x.shape[:-2] == shape[:-2] and y.shape[:-2] == shape[:-2]:
            self.cotangents[name] = multiply_add(xp, x, y, before, spare=True)
        else:
            self.cotangents[name] = before + sum_to(xp, xp.matmul(x, y), shape)

    def _add(self, name: str, x: Array) -> None:
        x = sum_to(self._xp, x, self._streams[name].shape)
        before = self.cotangents.get(name)
        self.cotangents[name] = x if before is None else before + x

    def _through_read(self, state: State, read: Read, d: Array) -> None:
        xp, decay, power = self._xp, self._decay, state.power
        a, b, c = self._streams[read.query], self._streams[state.key], self._streams[state.value]
        before = self._entering[state.symbol]
        weighted = self._scores[read.query, state.key, power, read.strict]
        pairs, into = decay.pairs(power, read.strict), decay.into(power, read.strict)
        valued = xp.matmul(d, transpose(xp, c))
        if self._rate is not None:
            self._rate.inside(_where_seen(xp, decay, pairs, weighted * valued), power, read.strict)
        valued = scaled(xp, valued, pairs) if not decay.resets else _selected(xp, pairs, valued)
        if into is None:
            decayed, query = d, a
        else:
            decayed, query = d * into, a
            if decay.resets:
                decayed, query = (_where_seen(xp, decay, into, x) for x in (decayed, a))
        if self._rate is None and not decay.resets:
            self._add_product(read.query, decayed, transpose(xp, before))
            self._add_product(read.query, valued, b)
        else:  # what comes from the left is wanted by itself
            left = _where_seen(xp, decay, into, xp.matmul(decayed, transpose(xp, before)))
            if self._rate is not None:
                self._rate.left(a * left, power, read.strict)
            self._add(read.query, left)
            self._add_product(read.query, valued, b)
        self._add_product(state.key, transpose(xp, valued), a)
        self._add_product(state.value, transpose(xp, weighted), d)
        found = sum_to(xp, xp.matmul(transpose(xp, query), decayed), before.shape)
        other = self.states.get(state.symbol)
        self.states[state.symbol] = found if other is None else other + found

    def _through_state(self, state: State) -> None:
        xp, decay, power = self._xp, self._decay, state.power
        b, c = self._streams[state.key], self._streams[state.value]
        after = self._leaving[state.symbol]
        out, through = decay.out(power), decay.through(power)
        if self._rate is None and not decay.resets:
            self._add_product(state.key, c if out is None else c * out, transpose(xp, after))
            self._add_product(state.value, b if out is None else b * out, after)
        else:
            right = _selected(xp, out, xp.matmul(c, transpose(xp, after)))
            if self._rate is not None:
                self._rate.right(b * right, power)
            self._add(state.key, right)
            self._add(state.value, _selected(xp, out, xp.matmul(b, after)))
        spanning = after
        if through is not None:
            spanning = after * through if not decay.resets else _selected(xp, through, after)
        if self._rate is not None:
            self._rate.spanning(self._entering[state.symbol] * spanning, power)
        found = self.states.get(state.symbol)
        self.states[state.symbol] = spanning if found is None else found + spanning


def _selected(xp: Namespace, factor: Array | None, x: Array) -> Array:
    """factor · x, and exactly 0 where the factor is."""
    return x if factor is None else xp.where(factor == 0, xp.zeros_like(x), factor * x)


def _where_seen(xp: Namespace, decay: Decay, factor: Array | None, x: Array) -> Array:
    """x, which holds the factor already; exactly 0 where the factor is."""
    return xp.where(factor == 0, xp.zeros_like(x), x) if decay.resets and factor is not None else x


class Rate:
    """Collects d log γ over the reads and states of one chunk."""

    def __init__(self, xp: Namespace, decays: Decays, batch: tuple[int, ...]) -> None:
        self._xp, self._decays, self._batch = xp, decays, batch
        self._sums: dict[tuple[str, bool], Array] = {}

    def _collect(self, part: str, strict: bool, power: int, x: Array) -> None:
        x = sum_to(self._xp, x, (*self._batch, *x.shape[-2:]))
        x = x if power == 1 else x * power
        before = self._sums.get((part, strict))
        self._sums[part, strict] = x if before is None else before + x

    def inside(self, x: Array, power: int, strict: bool) -> None:
        """The weights of pairs within the chunk: (*b, C, C)."""
        self._collect("inside", strict, power, x)

    def left(self, x: Array, power: int, strict: bool) -> None:
        """a ∘ da for what token t reads of the entering state: (*b, C, d)."""
        self._collect("left", strict, power, self._xp.sum(x, axis=-1, keepdims=True, dtype=x.dtype))

    def right(self, x: Array, power: int) -> None:
        """b ∘ db for what token j adds to the leaving state: (*b, C, d)."""
        self._collect("right", False, power, self._xp.sum(x, axis=-1, keepdims=True, dtype=x.dtype))

    def spanning(self, x: Array, power: int) -> None:
        """X_in ∘ dX_in for what passes the chunk: (*b, d, dv)."""
        self._collect("spanning", False, power, self._xp.sum(x, axis=(-2, -1), keepdims=True, dtype=x.dtype))

    def total(self, length: int) -> Array:
        """d log γ_s of every token of the chunk: (*b, C, 1)."""
        xp = self._xp
        earlier = self._decays.triangle(length, strict=True)  # [s, j]: j < s
        found: Array = None
        for (part, strict), x in self._sums.items():
            reached = self._decays.triangle(length, strict=strict)  # [t, s]: t reads across s
            if part == "inside":
                up_to = xp.matmul(x, transpose(xp, earlier))  # Σ_{j<s} for every pair (t, s)
                x = transpose(xp, xp.sum(up_to * reached, axis=-2, keepdims=True, dtype=x.dtype))
            elif part == "left":
                x = xp.matmul(transpose(xp, reached), x)
            elif part == "right":
                x = xp.matmul(earlier, x)
            found = x if found is None else found + x
        return found

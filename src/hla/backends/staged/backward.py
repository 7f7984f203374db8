r"""The gradient of a program: its stages from the last to the first (`hla.adjoint` has the formulas of one).

For a read r = x·X of the state X = Σ y zᵀ, with d the cotangent of r:

    dx is a read forwards, of X:  d·Xᵀ and pairs (d·z) y
    dX = Σ x dᵀ runs backwards;   dy, dz are reads backwards, of it:  z·dXᵀ and (z·d) x,   y·dX and (y·x) d

Cotangents of one stream that lie in the same direction are one launch. Where the cotangent of an earlier read's result
is one such read of dX, all of it happens in one pass (`hla.backends.triton.kernels.chain`, backwards in time).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hla.arrays import Array, DType, cast, moveaxis, sum_to, transpose
from hla.backends.staged import operations
from hla.backends.staged.engine import Engine
from hla.backends.staged.forward import Forward, seen, setting_of, with_parts
from hla.backends.staged.operations import Batch, Found, Setting, Stream, Term, run_chain, run_rate, run_read, run_state
from hla.family import Read, State, steps
from hla.gradients import ProblemGradients
from hla.problem import Problem, States


@dataclass(eq=False)
class Cotangent:
    """The cotangent of a state by one of its reads, or by the final state alone: it runs when it is asked for."""

    setting: Setting
    state: operations.State
    like: Array
    wanted: bool
    """whether that of the initial state is"""
    found: Found | None = None

    def run(self) -> Found:
        """As it leaves each chunk, and at the beginning."""
        if self.found is None:
            self.found = run_state(self.setting, self.state, borders=True, final=self.wanted, like=self.like)
        return self.found


class Pending(NamedTuple):
    """A cotangent that a stream gets, from the right or from the left, on the batch of its read."""

    term: Term
    reverse: bool
    strict: bool
    batch: Batch
    source: Cotangent | None
    """whose state at the borders the term reads, once it has run"""
    turned: bool = False
    """whether it reads the transpose"""

    def ready(self) -> Term:
        """The term with its state."""
        if self.source is None:
            return self.term
        borders = self.source.run().borders
        assert borders is not None
        turned = transpose(self.source.setting.xp, borders) if self.turned else borders
        return self.term._replace(state=turned)


class Rate(NamedTuple):
    """A read whose part in the gradient of the log-decays is still to be added."""

    state: State
    streams: tuple[Stream, Stream, Stream, Stream | None]
    source: Cotangent
    batch: Batch
    strict: bool


class Backward:
    """One pull through a problem."""

    def __init__(
        self, engine: Engine, problem: Problem, d_output: Array, d_final: States | None, *, rate: bool
    ) -> None:
        """`rate`: whether the gradient of the log-decays is wanted."""
        self.problem, self.rate = problem, rate and problem.log_decay is not None
        self.engine, self.setting = engine, setting_of(engine, problem)
        self.forward = Forward(problem, self.setting, keep=True)
        self.forward.run()
        self.program, self.shapes = problem.program, self.forward.shapes
        self._d_final = d_final or {}
        self._outputs = self._output_cotangents(d_output)
        self._pending: dict[str, list[Pending]] = {}
        self._cotangents: dict[str, list[Cotangent]] = {s.symbol: [] for s in self.program.states}
        self._rates: list[Rate] = []

    def run(self) -> ProblemGradients:
        """The gradients."""
        problem = self.problem
        for symbol, state, read in reversed(steps(self.program)):
            if read is not None:
                d, source = self._cotangent(read)
                if d is not None:
                    self._through(state, read, d, source)
            if symbol in self._d_final:
                self._through_final(state)
        q, k, v = (self._input(name) for name in ("q", "k", "v"))
        scale = None
        if not isinstance(problem.scale, float):
            scale = self._sum_to(seen(self.engine, problem, q * problem.q), tuple(problem.scale.shape))
            q = q * problem.scale
        initial = {symbol: self._initial(symbol) for symbol in problem.initial or {}}
        return ProblemGradients(cast(self.engine.xp, q, problem.q.dtype), k, v, self._log_decay(), initial, scale)

    def _output_cotangents(self, d: Array) -> dict[str, Stream]:
        """Back through the weighted sum of reads and the normalisation. Masked tokens are left out by the kernels."""
        problem, program = self.problem, self.program
        result: dict[str, Stream] = {}
        if program.denominator:
            xp, sums = self.engine.xp, self.setting.sums
            shared = cast(xp, d, sums)
            numerator = self.forward.outputs(program.output, sums)
            inverse = seen(self.engine, problem, 1.0 / (self.forward.outputs(program.denominator, sums) + problem.eps))
            d_mass = -xp.sum(shared * numerator, axis=-1, keepdims=True) * inverse * inverse
            d = shared * inverse
            for name, weight in program.denominator:
                result[name] = Stream(d_mass, problem.ridge if weight is None else weight)
        for name, weight in program.output:
            result[name] = Stream(d, problem.ridge if weight is None else weight)
        return {name: self._fitted(x, self.shapes.batch[name]) for name, x in result.items()}

    def _sum_to(self, x: Array, shape: tuple[int, ...]) -> Array:
        return sum_to(self.engine.xp, x, shape)

    def _fitted(self, x: Stream, batch: Batch) -> Stream:
        """A cotangent summed to the batch of what it belongs to."""
        wanted = (*batch, *x.tensor.shape[-2:])
        return x if tuple(x.tensor.shape) == wanted else Stream(self._sum_to(x.tensor, wanted), x.factor)

    def _cotangent(self, read: Read) -> tuple[Stream | None, Cotangent | None]:
        """The cotangent of a read's result, None if there is none; and that of the read's state, if it came along."""
        own, pending = self._outputs.get(read.result), self._pending.pop(read.result, [])
        if not pending:
            return own, None
        made = self._chained(read, pending) if own is None else None
        if made is not None:
            return made
        found = self._sum(pending, self.shapes.batch[read.result], self.setting.dtype)
        return Stream(found if own is None else found + own.tensor * own.factor), None

    def _chained(self, read: Read, pending: list[Pending]) -> tuple[Stream, Cotangent] | None:
        """Run what the one pending read needs, that read, and the cotangent of this read's state in one pass."""
        only, source = pending[0], pending[0].source
        state, batch = self.program.state(read.state), self.shapes.batch[read.result]
        if len(pending) > 1 or source is None or source.found is not None or only.strict or read.strict:
            return None
        if {only.batch, source.state.batch} != {batch} or only.term.y is None or only.term.z is None:
            return None
        sizes = (only.term.y.width, only.term.z.width)
        query = self.forward.streams[read.query]
        if not operations.in_one_pass(self.setting, batch, sizes[0], query.width, sizes[1], self.problem.v):
            return None
        seed, initial = self._seed(state, batch), source.state.initial
        if only.turned and initial is not None:  # the pending read's own orientation is the one that runs
            initial = transpose(self.engine.xp, initial)
        wanted = self._wants_initial(state.symbol)
        made = run_chain(
            self.setting,
            source.state._replace(y=only.term.y, z=only.term.z, sizes=sizes, initial=initial),
            only.term.x,
            query,
            state.power,
            initial2=seed,
            keep=(True, True),
            final=(source.wanted, wanted),
            result=True,
            output=None,
            like=self.problem.v,
        )
        assert made.result is not None
        source.found = made.first.turned(self.engine.xp) if only.turned else made.first
        d = Stream(made.result)
        run = operations.State(query, d, (query.width, d.width), state.power, batch, seed, True, False)
        return d, Cotangent(self.setting, run, self.problem.v, wanted, made.second)

    def _through(self, state: State, read: Read, d: Stream, source: Cotangent | None) -> None:
        """Back through a read and the state it reads; `source`: the state's cotangent, if it has run."""
        streams, batch = self.forward.streams, self.shapes.batch[read.result]
        x, y, z = streams[read.query], streams[state.key], streams[state.value]
        borders, power, strict = self.forward.found[state.symbol].borders, state.power, read.strict
        assert borders is not None
        if source is None:
            seed = self._seed(state, batch)
            run = operations.State(x, d, (x.width, d.width), power, batch, seed, True, strict)
            source = Cotangent(self.setting, run, self.problem.v, self._wants_initial(state.symbol))
        if source.state.initial is not None:
            del self._d_final[state.symbol]
        self._cotangents[state.symbol].append(source)
        turned = transpose(self.engine.xp, borders)
        self._add(read.query, Pending(Term(d, z, y, turned, power), False, strict, batch, None))
        self._add(state.key, Pending(Term(z, d, x, None, power), True, strict, batch, source, turned=True))
        self._add(state.value, Pending(Term(y, x, d, None, power), True, strict, batch, source))
        if self.rate:
            self._rates.append(Rate(state, (x, y, z, d), source, batch, strict))

    def _through_final(self, state: State) -> None:
        """Back from the final state to what went into it, where no read has taken that along."""
        streams, batch = self.forward.streams, self.shapes.state[state.symbol][:-2]
        seed = self._seed(state, batch)
        del self._d_final[state.symbol]
        y, z = streams[state.key], streams[state.value]
        run = operations.State(None, None, (y.width, z.width), state.power, batch, seed, True, False)
        source = Cotangent(self.setting, run, self.problem.v, self._wants_initial(state.symbol))
        self._cotangents[state.symbol].append(source)
        self._add(state.key, Pending(Term(z, None, None, None, state.power), True, False, batch, source, turned=True))
        self._add(state.value, Pending(Term(y, None, None, None, state.power), True, False, batch, source))
        if self.rate:
            self._rates.append(Rate(state, (y, y, z, None), source, batch, False))

    def _add(self, name: str, pending: Pending) -> None:
        if name != "one":
            self._pending.setdefault(name, []).append(pending)

    def _seed(self, state: State, batch: Batch) -> Array | None:
        """The cotangent of a final state, (*b, parts, ·, ·), if `batch` is the state's own: elsewhere it would count
        once for every entry."""
        d, shape = self._d_final.get(state.symbol), self.shapes.state[state.symbol]
        if d is None or batch != shape[:-2]:
            return None
        d = with_parts(self.engine, self.problem, d)
        assert d is not None
        return self._sum_to(cast(self.engine.xp, d, self.setting.sums), (*batch, d.shape[-3], *shape[-2:]))

    def _wants_initial(self, symbol: str) -> bool:
        return symbol in (self.problem.initial or {})

    def _sum(self, pending: list[Pending], batch: Batch, dtype: DType) -> Array:
        """All pending cotangents of a stream, summed to its batch: those of one direction in one launch."""
        groups: dict[tuple[bool, bool, Batch], list[Pending]] = {}
        for one in pending:
            groups.setdefault((one.reverse, one.strict, one.batch), []).append(one)
        alone = len(groups) == 1 and next(iter(groups))[-1] == batch
        exact = dtype if alone else self.setting.sums
        total: Array | None = None
        for (reverse, strict, wide), some in groups.items():
            terms = [one.ready() for one in some]
            into = total if total is not None and wide == batch and tuple(total.shape[:-2]) == batch else None
            made = run_read(self.setting, terms, wide, exact, reverse=reverse, strict=strict, into=into)
            if into is None:
                made = self._sum_to(made, (*batch, *made.shape[-2:]))
                total = made if total is None else total + made
        assert total is not None
        return total

    def _input(self, name: str) -> Array:
        """The gradient of an input in its dtype; that of q in float32 where the scale is an array."""
        x: Array = getattr(self.problem, name)
        xp = self.engine.xp
        dtype = self.setting.sums if name == "q" and self.problem.scale_varies else x.dtype
        pending = self._pending.pop(name, [])
        if not pending:
            return xp.zeros_like(x, dtype=dtype)
        factor = self.forward.streams[name].factor
        pending = [one._replace(term=one.term._replace(weight=factor)) for one in pending]
        return cast(xp, self._sum(pending, tuple(x.shape[:-2]), dtype), dtype)

    def _initial(self, symbol: str) -> Array:
        """The gradient of an initial state."""
        given = (self.problem.initial or {})[symbol]
        packed = self.problem.cu_seqlens is not None
        total = self.engine.xp.zeros_like(given, dtype=self.setting.sums)
        for source in self._cotangents[symbol]:
            found = source.run().final
            assert found is not None
            found = moveaxis(self.engine.xp, found, -3, 0)
            total = total + self._sum_to(found if packed else found[0, ...], tuple(given.shape))
        return total

    def _log_decay(self) -> Array | None:
        """Per token and head, or summed to a constant one."""
        log_decay = self.problem.log_decay
        if log_decay is None:
            return None
        found: dict[Batch, Array] = {}
        for state, streams, source, batch, strict in self._rates:
            before, after = self.forward.found[state.symbol].borders, source.run().borders
            assert before is not None
            assert after is not None
            into = found.get(batch)
            found[batch] = run_rate(self.setting, streams, (before, after), state.power, strict, batch, into)
        total = self.engine.xp.zeros_like(log_decay, dtype=self.setting.sums)
        for x in found.values():
            total = total + self._sum_to(x[..., None], tuple(log_decay.shape))
        return cast(self.engine.xp, total, log_decay.dtype)


def pull(
    engine: Engine, problem: Problem, d_output: Array, d_final: States | None, *, rate: bool = True
) -> ProblemGradients:
    """The gradient of a causal or prefix problem with tokens. `rate`: whether that of the log-decays is wanted."""
    return Backward(engine, problem, d_output, dict(d_final or {}), rate=rate).run()

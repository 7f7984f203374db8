r"""mask="none": every token sees the whole sequence, or the whole of its packed sequence.

A read r = x·Σ y zᵀ is of the state at the end, one for each sequence. With boundaries among the tokens it is the causal
read plus the strict read backwards in time. Backwards, a read is three such reads.
"""

from __future__ import annotations

from hla.arrays import Array, broadcast_shapes, cast, sum_to
from hla.backends.staged import operations
from hla.backends.staged.engine import Engine
from hla.backends.staged.forward import inputs, seen, setting_of
from hla.backends.staged.operations import Setting, Stream, Term, run_read, run_state
from hla.family import weighted_sum
from hla.gradients import ProblemGradients
from hla.problem import Problem, combine_reads


def read(setting: Setting, packed: bool, x: Stream, y: Stream, z: Stream) -> Array:
    """x·Σ y zᵀ for every token, in the dtype of sums. `packed`: the gate has boundaries."""
    batch = broadcast_shapes(setting.gate.batch, *(tuple(s.tensor.shape[:-2]) for s in (x, y, z)))
    inner = broadcast_shapes(setting.gate.batch, *(tuple(s.tensor.shape[:-2]) for s in (y, z)))
    sizes = (y.width, z.width)
    if not packed:
        state = operations.State(y, z, sizes, 1, inner)
        found = run_state(setting, state, borders=False, final=True, like=x.tensor)
        term = Term(x, None, None, found.final)
        return run_read(setting, [term], batch, setting.sums, per_chunk=False)
    total: Array | None = None
    for reverse in (False, True):
        state = operations.State(y, z, sizes, 1, inner, None, reverse)
        found = run_state(setting, state, borders=True, final=False, like=x.tensor)
        term = Term(x, y, z, found.borders)
        total = run_read(setting, [term], batch, setting.sums, reverse=reverse, strict=reverse, into=total)
    assert total is not None
    return total


class Whole:
    """One problem with mask="none"."""

    def __init__(self, engine: Engine, problem: Problem) -> None:
        self.engine, self.problem, self.setting = engine, problem, setting_of(engine, problem)
        self._packed = problem.starts is not None
        self.streams = inputs(engine, problem)
        for line in problem.program.reads:
            state = problem.program.state(line.state)
            made = self._read(*(self.streams[name] for name in (line.query, state.key, state.value)))
            self.streams[line.result] = Stream(made)

    def _read(self, x: Stream, y: Stream, z: Stream) -> Array:
        return read(self.setting, self._packed, x, y, z)

    def output(self) -> Array:
        """(*batch, T, dv)."""
        problem = self.problem
        made = combine_reads(problem.program, self._results(), problem.ridge, problem.eps)
        return cast(self.engine.xp, seen(self.engine, problem, made), problem.v.dtype)

    def _results(self) -> dict[str, Array]:
        return {line.result: self.streams[line.result].tensor for line in self.problem.program.reads}

    def pull(self, d_output: Array) -> ProblemGradients:
        """The gradient."""
        problem, program, xp = self.problem, self.problem.program, self.engine.xp
        found: dict[str, Array] = self._output_cotangents(self._results(), d_output)
        for line in reversed(program.reads):
            state, d = program.state(line.state), Stream(found.pop(line.result))
            x, y, z = (self.streams[name] for name in (line.query, state.key, state.value))
            for name, parts in ((line.query, (d, z, y)), (state.key, (z, d, x)), (state.value, (y, x, d))):
                if name == "one":
                    continue
                stream = self.streams[name].tensor
                made = sum_to(xp, self._read(*parts), tuple(stream.shape))
                found[name] = found[name] + made if name in found else made
        q, scale = found["q"] * self.streams["q"].factor, None
        if not isinstance(problem.scale, float):
            scale = sum_to(xp, seen(self.engine, problem, q * problem.q), tuple(problem.scale.shape))
            q = q * problem.scale
        given = (problem.q, problem.k, problem.v)
        q, k, v = (cast(xp, d, x.dtype) for d, x in zip((q, found["k"], found["v"]), given, strict=True))
        return ProblemGradients(q, k, v, None, {}, scale)

    def _output_cotangents(self, results: dict[str, Array], d: Array) -> dict[str, Array]:
        """Back through masking, normalisation and the weighted sum of reads."""
        problem, program, xp = self.problem, self.problem.program, self.engine.xp
        found: dict[str, Array] = {}
        d = seen(self.engine, problem, cast(xp, d, self.setting.sums))
        if program.denominator:
            numerator, mass = (weighted_sum(x, results, problem.ridge) for x in (program.output, program.denominator))
            inverse = seen(self.engine, problem, 1.0 / (mass + problem.eps))
            d_mass = -xp.sum(d * numerator, axis=-1, keepdims=True) * inverse * inverse
            d = d * inverse
            for name, weight in program.denominator:
                found[name] = d_mass * (problem.ridge if weight is None else weight)
        for name, weight in program.output:
            found[name] = d * (problem.ridge if weight is None else weight)
        return {name: sum_to(xp, x, tuple(results[name].shape)) for name, x in found.items()}

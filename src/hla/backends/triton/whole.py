r"""mask="none": every token sees the whole sequence, or the whole of its packed sequence.

A read r = x·Σ y zᵀ is of the state at the end, one for each sequence. With boundaries among the tokens it is the causal
read plus the strict read backwards in time. Backwards, a read is three such reads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hla.arrays import broadcast_shapes, sum_to
from hla.backends.torch.namespace import PLAIN
from hla.backends.triton import operations
from hla.backends.triton.forward import inputs, seen, setting_of
from hla.backends.triton.operations import Setting, Stream, Term, run_read, run_state
from hla.gradients import ProblemGradients
from hla.problem import Problem, combine_reads


def read(setting: Setting, packed: bool, x: Stream, y: Stream, z: Stream) -> Tensor:
    """x·Σ y zᵀ for every token, float32. `packed`: the gate has boundaries."""
    batch = broadcast_shapes(setting.gate.batch, *(tuple(s.tensor.shape[:-2]) for s in (x, y, z)))
    inner = broadcast_shapes(setting.gate.batch, *(tuple(s.tensor.shape[:-2]) for s in (y, z)))
    sizes = (y.width, z.width)
    if not packed:
        state = operations.State(y, z, sizes, 1, inner)
        found = run_state(setting, state, borders=False, final=True, like=x.tensor)
        term = Term(x, None, None, found.final)
        return run_read(setting, [term], batch, torch.float32, per_chunk=False)
    total: Tensor | None = None
    for reverse in (False, True):
        state = operations.State(y, z, sizes, 1, inner, None, reverse)
        found = run_state(setting, state, borders=True, final=False, like=x.tensor)
        term = Term(x, y, z, found.borders)
        total = run_read(setting, [term], batch, torch.float32, reverse=reverse, strict=reverse, into=total)
    assert total is not None
    return total


class Whole:
    """One problem with mask="none"."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.setting = problem, setting_of(problem)
        self._packed = problem.starts is not None
        self.streams = inputs(problem)
        for line in problem.program.reads:
            state = problem.program.state(line.state)
            made = self._read(*(self.streams[name] for name in (line.query, state.key, state.value)))
            self.streams[line.result] = Stream(made)

    def _read(self, x: Stream, y: Stream, z: Stream) -> Tensor:
        return read(self.setting, self._packed, x, y, z)

    def output(self) -> Tensor:
        """(*batch, T, dv)."""
        problem, mask = self.problem, self.problem.token_mask
        made = combine_reads(problem.program, self._results(), problem.ridge, problem.eps)
        made = made if mask is None else torch.where(mask, made, made.new_zeros(()))
        result: Tensor = made.to(problem.v.dtype)
        return result

    def _results(self) -> dict[str, Tensor]:
        return {line.result: self.streams[line.result].tensor for line in self.problem.program.reads}

    def pull(self, d_output: Tensor) -> ProblemGradients:
        """The gradient."""
        problem, program = self.problem, self.problem.program
        found: dict[str, Tensor] = output_cotangents(problem, self._results(), d_output)
        for line in reversed(program.reads):
            state, d = program.state(line.state), Stream(found.pop(line.result))
            x, y, z = (self.streams[name] for name in (line.query, state.key, state.value))
            for name, parts in ((line.query, (d, z, y)), (state.key, (z, d, x)), (state.value, (y, x, d))):
                if name == "one":
                    continue
                stream = self.streams[name].tensor
                made = sum_to(PLAIN, self._read(*parts), tuple(stream.shape))
                found[name] = found[name] + made if name in found else made
        q, scale = found["q"] * self.streams["q"].factor, None
        if isinstance(problem.scale, Tensor):
            scale = sum_to(PLAIN, seen(problem, q * problem.q), tuple(problem.scale.shape))
            q = q * problem.scale
        k, v = found["k"].to(problem.k.dtype), found["v"].to(problem.v.dtype)
        return ProblemGradients(q.to(problem.q.dtype), k, v, None, {}, scale)


def output_cotangents(problem: Problem, results: dict[str, Tensor], d: Tensor) -> dict[str, Tensor]:
    """Back through masking, normalisation and the weighted sum of reads."""
    program, mask = problem.program, problem.token_mask
    found: dict[str, Tensor] = {}
    d = d.float()
    if mask is not None:
        d = torch.where(mask, d, d.new_zeros(()))
    if program.denominator:
        only = {"output": program.output, "denominator": program.denominator}
        numerator, mass = (_weighted(problem, only[name], results) for name in ("output", "denominator"))
        inverse = 1.0 / (mass + problem.eps)
        if mask is not None:
            inverse = torch.where(mask, inverse, inverse.new_zeros(()))
        d_mass = -(d * numerator).sum(-1, keepdim=True) * inverse * inverse
        d = d * inverse
        for name, weight in program.denominator:
            found[name] = d_mass * (problem.ridge if weight is None else weight)
    for name, weight in program.output:
        found[name] = d * (problem.ridge if weight is None else weight)
    return {name: sum_to(PLAIN, x, tuple(results[name].shape)) for name, x in found.items()}


def _weighted(problem: Problem, terms: tuple[tuple[str, float | None], ...], results: dict[str, Tensor]) -> Tensor:
    return sum((results[name] * (problem.ridge if weight is None else weight) for name, weight in terms), start=0.0)  # type: ignore[return-value]

"""Whether a result may be timed: outputs, gradients and decoded tokens against the definition, in float64 on the host.

Up to `FIRST_TOKENS` the judge is the dense definition of `hla.reference`. Beyond, where T² pairs are too many, it is
`hla.cli.composition` in float64, which is itself held against the definition on the first tokens; a causal output does
not depend on what follows. Gradients are the composition's in float64; a test holds them against differences of the
definition. Every value is compared, but for softmax attention, a peer: there the first and the last rows.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple, Protocol

from hla.cli import composition, softmax
from hla.testing.budgets import UNIT_ROUNDOFF, error_budget, per_token_error
from hla.testing.expected import expected
from hla.testing.inputs import Inputs
from hla.testing.libraries import to_numpy

FIRST_TOKENS = 128


class Verdict(NamedTuple):
    """The largest error per token, and what rounding may make of it."""

    error: float
    budget: float

    @property
    def ok(self) -> bool:
        """Whether it is no larger; NaN is not."""
        return self.error <= self.budget


class Judge(Protocol):
    """What the results of one operator have to be on given inputs."""

    def forward(self, o: Any) -> Verdict:
        """Of the output (H, T, dv)."""

    def backward(self, value: Any, gradients: tuple[Any, Any, Any]) -> Verdict:
        """Of (dq, dk, dv), and of the output or the loss Σ do·o."""

    def decode(self, rows: Any) -> Verdict:
        """Of the outputs of the last tokens (H, n, dv)."""


def judge_of(operator: str, order: int | None, inputs: Inputs, do: Any, dtype: str) -> Judge:
    """The judge of an operator, or of "softmax", on inputs (H, T, ·) of any library."""
    host = Inputs(*map(to_numpy, inputs))
    if operator == "softmax":
        return _OfSoftmax(host, to_numpy(do), dtype)
    return _OfOperator(operator, order, host, to_numpy(do), dtype)


class _OfOperator:
    def __init__(self, operator: str, order: int | None, host: Inputs, do: Any, dtype: str) -> None:
        self._operator, self._order, self._host, self._do, self._dtype = operator, order, host, do, dtype

    @cached_property
    def _output(self) -> Any:
        import numpy as np

        length, d = self._host.q.shape[-2:]
        first = expected(self._operator, *(x[:, :FIRST_TOKENS] for x in self._host), order=self._order)
        if length <= FIRST_TOKENS:
            return first
        heads = range(len(self._host.q))  # one after another, to need the memory of one
        found = [composition.attend(_numpy(), self._operator, *self._head(h), order=self._order) for h in heads]
        output = np.concatenate(found)
        error = per_token_error(output[:, :FIRST_TOKENS], first)
        budget = error_budget(self._operator, "float64", FIRST_TOKENS, d, order=self._order, values=first.size)
        if not error <= budget:
            raise AssertionError(f"the judge of {self._operator} is off by {error:.1e}, allowed {budget:.1e}")
        return output

    @cached_property
    def _gradients(self) -> tuple[Any, ...]:
        import numpy as np

        found = [
            composition.attend_and_pull(
                _numpy(), self._operator, *self._head(h), self._do[h : h + 1], order=self._order
            )[1]
            for h in range(len(self._host.q))
        ]
        return tuple(np.concatenate(parts) for parts in zip(*found, strict=True))

    def _head(self, h: int) -> Inputs:
        return Inputs(*(x[h : h + 1] for x in self._host))

    def _budget(self, values: int, *, gradient: bool = False) -> float:
        length, d = self._host.q.shape[-2:]
        dv = self._host.v.shape[-1]
        return error_budget(
            self._operator, self._dtype, length, d, dv=dv, order=self._order, gradient=gradient, values=values
        )

    def forward(self, o: Any) -> Verdict:
        return Verdict(per_token_error(o, self._output), self._budget(self._output.size))

    def backward(self, value: Any, gradients: tuple[Any, Any, Any]) -> Verdict:
        errors = [per_token_error(got, want) for got, want in zip(gradients, self._gradients, strict=True)]
        errors.append(_value_error(value, self._output, self._do))
        return Verdict(max(errors), self._budget(self._output.size, gradient=True))

    def decode(self, rows: Any) -> Verdict:
        want = self._output[:, -rows.shape[1] :]
        return Verdict(per_token_error(rows, want), self._budget(want.size))


class _OfSoftmax:
    """One read with weights of sum 1, hence the budget of one normalised read. The exponential adds to it: an error of
    the score s is one of exp(s), relative to it, and |s| ≤ |q||k|/√d is below 1 for the inputs of `make_inputs`."""

    _ROUNDINGS = 8
    """16-bit kernels round the weights, the scores' gradients and their sums as well as the result."""

    def __init__(self, host: Inputs, do: Any, dtype: str) -> None:
        self._host, self._do, self._dtype = host, do, dtype
        self._n = min(FIRST_TOKENS, host.q.shape[-2])

    @cached_property
    def _first(self) -> Any:
        q, k, v = (x[:, : self._n] for x in self._host)
        return softmax.last_rows_and_pull(_numpy(), q, k, v, self._do[:, : self._n])

    @cached_property
    def _last(self) -> Any:
        q, k, v = self._host
        return softmax.last_rows_and_pull(_numpy(), q[:, -self._n :], k, v, self._do[:, -self._n :])

    def _budget(self, values: int, *, gradient: bool = False) -> float:
        length, d = self._host.q.shape[-2:]
        found = error_budget(
            "linear_attention", self._dtype, length, d, normalize=True, gradient=gradient, values=values
        )
        narrow = self._dtype in ("float16", "bfloat16")
        return found + (self._ROUNDINGS * UNIT_ROUNDOFF[self._dtype] if narrow else 0.0)

    def forward(self, o: Any) -> Verdict:
        n = self._n
        error = max(per_token_error(o[:, :n], self._first[0]), per_token_error(o[:, -n:], self._last[0]))
        return Verdict(error, self._budget(to_numpy(o).size))

    def backward(self, value: Any, gradients: tuple[Any, Any, Any]) -> Verdict:
        """All rows of dq stand for themselves; dk and dv of the last tokens come from the last rows alone.

        A loss, which is a sum over all rows, is not judged."""
        n = self._n
        dq, *others = (to_numpy(x) for x in gradients)
        errors = [
            per_token_error(dq[:, :n], self._first[1][0]),
            per_token_error(dq[:, -n:], self._last[1][0]),
            *(per_token_error(got[:, -n:], want[:, -n:]) for got, want in zip(others, self._last[1][1:], strict=True)),
        ]
        if value.ndim:
            errors.append(self.forward(value).error)
        return Verdict(max(errors), self._budget(dq.size, gradient=True))

    def decode(self, rows: Any) -> Verdict:
        want = self._last[0][:, -rows.shape[1] :]
        return Verdict(per_token_error(rows, want), self._budget(want.size))


def _value_error(value: Any, output: Any, do: Any) -> float:
    """Of the output, or of the loss relative to the sum of its terms' sizes."""
    if value.ndim:
        return per_token_error(value, output)
    terms = do * output
    return float(abs(to_numpy(value) - terms.sum()) / abs(terms).sum())


def _numpy() -> Any:
    from hla.testing.libraries import find_library

    return find_library("numpy")

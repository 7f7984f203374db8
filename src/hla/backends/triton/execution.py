"""Problems on the Triton kernels."""

from __future__ import annotations

from torch import Tensor

from hla.backends.staged import execution
from hla.backends.triton.engine import ENGINE
from hla.gradients import ProblemGradients
from hla.problem import Problem, States


def compute(problem: Problem) -> tuple[Tensor, States]:
    """Output and final states, without a graph."""
    return execution.compute(ENGINE, problem)


def differentiate(problem: Problem, d_output: Tensor, d_final: States | None, *, rate: bool = True) -> ProblemGradients:
    """The gradient of `compute`. `rate`: whether that of the log-decays is wanted."""
    return execution.differentiate(ENGINE, problem, d_output, d_final, rate=rate)

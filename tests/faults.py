"""Runners of backends that are wrong on purpose."""

from __future__ import annotations

from typing import Any

import numpy as np

from hla.backends import registered
from hla.problem import Problem


def fault_late(problem: Problem) -> Any:
    """Right until token 20, where one output of one head is off by a thousandth."""
    output, states = registered()["numpy"].runner(problem.program.spec.operator)(problem)
    if problem.length > 20:
        output = output.copy()
        output[..., 20, 0] *= np.asarray(1.001, output.dtype)
    return output, states


def fault_in_the_state(problem: Problem) -> Any:
    """Right outputs, and a state that is off by a thousandth."""
    output, states = registered()["numpy"].runner(problem.program.spec.operator)(problem)
    return output, {name: x * np.asarray(1.001, x.dtype) for name, x in states.items()}


def fault_raises(problem: Problem) -> Any:
    raise RuntimeError("planted")

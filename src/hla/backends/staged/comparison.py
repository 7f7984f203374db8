"""What a backend's test of itself compares: results against the reference in float64, within the budget of errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hla.arrays import Array
from hla.gradients import ProblemGradients
from hla.problem import States
from hla.testing.budgets import per_token_error

Host = Callable[[Array], Any]
"""From an array of the backend to one that may be compared with the reference's."""


def fault_of_values(found: tuple[Array, States], right: tuple[Array, States], budget: float, host: Host) -> str:
    """What is wrong with output and final states, or nothing."""
    error = per_token_error(host(found[0]), right[0])
    if not error <= budget:
        return f"output off by {error:.1e}, allowed {budget:.1e}"
    for symbol, x in right[1].items():
        error = _relative(host(found[1][symbol]), x)
        if not error <= budget:
            return f"state {symbol} off by {error:.1e}, allowed {budget:.1e}"
    return ""


def fault_of_gradients(found: ProblemGradients, right: ProblemGradients, budget: float, host: Host) -> str:
    """What is wrong with gradients, or nothing."""
    budget *= 3  # as error_budget: one more for each of the reads, recomputed
    for name in ("q", "k", "v", "log_decay"):
        error = _relative(host(getattr(found, name)), getattr(right, name))
        if not error <= budget:
            return f"gradient of {name} off by {error:.1e}, allowed {budget:.1e}"
    return ""


def _relative(x: Any, wanted: Any) -> float:
    return float(abs(x - wanted).max() / abs(wanted).max())

"""For those who write a backend: inputs, errors per token, error budgets, and the matrix of checks of `hla verify`.

    from hla.testing import check_backend
    assert all(row.status != "failed" for row in check_backend("mine"))

Everything is judged by the dense definitions of `hla.reference`, in float64 on the host. Needs NumPy.
"""

from hla.testing.budgets import error_budget, per_token_error
from hla.testing.cases import CASES, Case
from hla.testing.expected import expected, expected_gradients
from hla.testing.inputs import (
    Inputs,
    make_cu_seqlens,
    make_decay,
    make_inputs,
    make_log_decay,
    make_segment_ids,
    make_token_mask,
)
from hla.testing.libraries import Placement, installed_libraries, placements, to_numpy
from hla.testing.matrix import Check, Row, check_backend, plan_checks

__all__ = [
    "CASES",
    "Case",
    "Check",
    "Inputs",
    "Placement",
    "Row",
    "check_backend",
    "error_budget",
    "expected",
    "expected_gradients",
    "installed_libraries",
    "make_cu_seqlens",
    "make_decay",
    "make_inputs",
    "make_log_decay",
    "make_segment_ids",
    "make_token_mask",
    "per_token_error",
    "placements",
    "plan_checks",
    "to_numpy",
]

"""A test of the kernels on the GPU at hand, for `hla info`: against the reference in float64 on the host."""

from __future__ import annotations

from typing import Any

from hla import forms
from hla.arrays import Array
from hla.backends.cupy import execution, launch
from hla.backends.cupy.launch import cupy
from hla.backends.registry import Verdict
from hla.backends.staged.comparison import fault_of_gradients, fault_of_values
from hla.checks import check_call
from hla.options import Options
from hla.testing.budgets import error_budget

_LENGTH, _D, _DV = 19, 20, 24
_CASES = (
    ("hla2", "float32", "chunkwise"),
    ("ahla", "float32", "chunkwise"),
    ("hla2", "float16", "chunkwise"),
    ("hla2", "float64", "recurrent"),
)
"""Operator, dtype and form; the first with its gradient."""


def check() -> Verdict:
    """Whether the kernels agree with the reference on the current device."""
    module = cupy()
    number = int(module.cuda.runtime.getDevice())
    where = f"CuPy {module.__version__} on compute capability {launch.capability(number)}"
    for operator, dtype, form in _CASES:
        try:
            fault = _fault(operator, dtype, form)
        except Exception as error:  # a compiler or driver may raise anything
            fault = f"{type(error).__name__}: {error}"
        if fault:
            return Verdict(False, f"failed its test of itself with {where} ({operator}, {dtype}, {form}: {fault})")
    return Verdict(True, f"passed its test of itself with {where}")


def _fault(operator: str, dtype: str, form: str) -> str:
    """What is wrong, or nothing."""
    import numpy as np

    rng = np.random.default_rng(0)
    q, k, v = ((0.5 * rng.normal(size=(2, _LENGTH, n))).astype(dtype) for n in (_D, _D, _DV))
    q[0, 0] = np.finfo(np.float16).smallest_subnormal * 3  # as all small numbers it has to arrive
    log_decay = -0.1 * np.abs(rng.normal(size=(2, _LENGTH))).astype(v.dtype)
    d = rng.normal(size=v.shape).astype(dtype)
    budget = error_budget(operator, dtype, _LENGTH, _D, dv=_DV)

    def problem(convert: Any) -> Any:
        options = Options(log_decay=convert(log_decay), return_state=True, form=form, chunk_size=16)
        return check_call(operator, convert(q), convert(k), convert(v), options).problem

    exact = problem(lambda x: x.astype(np.float64))
    fault = fault_of_values(execution.run(problem(cupy().asarray)), forms.run(exact), budget, _host)
    if fault or (operator, dtype, form) != _CASES[0]:
        return fault
    found = execution.pull(problem(cupy().asarray), cupy().asarray(d), None)
    return fault_of_gradients(found, forms.pull(exact, d.astype(np.float64), None), budget, _host)


def _host(x: Array) -> Any:
    return x.get().astype("float64")

"""A first-use test of the kernels on the chip at hand: a compiler may be wrong on one chip and right on another."""

from __future__ import annotations

import threading
from dataclasses import replace

import torch
import triton
from torch import Tensor

from hla import forms
from hla.backends.registry import Verdict
from hla.backends.staged.comparison import fault_of_gradients, fault_of_values
from hla.backends.triton import interpreter, launch
from hla.checks import check_call
from hla.options import Options
from hla.problem import Problem
from hla.testing.budgets import error_budget

_results: dict[tuple[str, str], Verdict] = {}
_lock = threading.RLock()
_LENGTH, _D, _DV = 19, 20, 24
_CASES: tuple[tuple[str, torch.dtype, str, bool], ...] = (
    ("hla2", torch.float32, "chunkwise", True),
    ("ahla", torch.float32, "chunkwise", True),
    ("hla2", torch.bfloat16, "chunkwise", True),
    ("hla2", torch.float32, "recurrent", False),
)
"""Operator, dtype, form, and whether its gradient is looked at."""


def selftest(device: str) -> Verdict:
    """Whether the kernels agree with the reference on a device; found out once for each Triton version and chip."""
    key = (triton.__version__, launch.chip(torch.device(device)))
    with _lock:
        if key not in _results:
            _results[key] = Verdict(True, "supported")  # for calls that the test itself makes
            _results[key] = _test(torch.device(device), f"triton {key[0]} on {key[1]}")
        return _results[key]


def forget() -> None:
    """Test again at the next use."""
    with _lock:
        _results.clear()


def _test(device: torch.device, where: str) -> Verdict:
    if launch.interpreting():
        try:
            interpreter.repair()
        except RuntimeError as error:
            return Verdict(False, str(error))
    for operator, dtype, form, gradient in _CASES:
        what = f"{operator}, {str(dtype).removeprefix('torch.')}, {form}"
        try:
            fault = _fault(device, operator, dtype, form, gradient)
        except Exception as error:  # a compiler may raise anything
            fault = f"{type(error).__name__}: {error}"
        if fault:
            return Verdict(False, f"failed its test of itself with {where} ({what}: {fault}); use backend 'torch'")
    return Verdict(True, f"supported; passed its test of itself with {where}")


def _fault(device: torch.device, operator: str, dtype: torch.dtype, form: str, gradient: bool) -> str:
    """What is wrong, or nothing."""
    from hla.backends.triton.execution import compute, differentiate

    with torch.no_grad():
        problem, exact = _problems(device, operator, dtype, form)
        name = str(dtype).removeprefix("torch.")
        budget = error_budget(operator, name, _LENGTH, _D, dv=_DV, products=_PRODUCTS.get(name))
        right = forms.run(exact)
        fault = fault_of_values(compute(problem), right, budget, _host)
        if fault or not gradient:
            return fault
        generator = torch.Generator().manual_seed(1)
        d = torch.randn(right[0].shape, generator=generator, dtype=torch.float64)
        found = differentiate(problem, d.to(device, dtype), None)
        return fault_of_gradients(found, forms.pull(exact, d.to(dtype).double(), None), budget, _host)


_PRODUCTS = {"bfloat16": "bfloat16"}


def _problems(device: torch.device, operator: str, dtype: torch.dtype, form: str) -> tuple[Problem, Problem]:
    """A small call, and the same numbers in float64 on the CPU."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k, v = (0.5 * draw(1, _LENGTH, n).to(dtype) for n in (_D, _D, _DV))
    log_decay = -0.1 * draw(1, _LENGTH).abs().float()

    def problem(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> Problem:
        options = Options(log_decay=log_decay, return_state=True, chunk_size=16, form="chunkwise")
        return check_call(operator, q, k, v, options).problem

    exact = problem(q.double(), k.double(), v.double(), log_decay.double())
    return replace(problem(*(x.to(device) for x in (q, k, v, log_decay))), form=form), exact


def _host(x: Tensor) -> Tensor:
    return x.cpu().double()

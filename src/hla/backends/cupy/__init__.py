"""Backend "cupy": CUDA C++ kernels for CuPy arrays, and on request for other arrays on an NVIDIA GPU."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Callable
from typing import Any

from hla.arrays import Array
from hla.backends.registry import Backend, BackendSpec, Call, Gradient, Guests, Verdict
from hla.problem import Problem, Runner

_DRIVERS = ("/dev/nvidiactl", "/dev/dxg")
"""What NVIDIA's driver leaves in the file system, but on Windows."""
DEVICES = ("cuda", "gpu")
"""How torch and JAX begin the names of NVIDIA's devices."""
OLDEST = 75
"""Compute capability, times ten."""
HIGHEST = 18
"""The highest order of form "recurrent": each state is a parameter of its kernel, and all of them are 4096 bytes at
most."""


def _load(operator: str) -> Runner:
    from hla.backends.cupy.execution import run

    return run


def _load_gradient(operator: str) -> Gradient:
    from hla.backends.cupy.execution import pull

    return pull


def _check() -> Verdict:
    from hla.backends.cupy.selftest import check

    return check()


def _take(x: Any) -> Any:
    from hla.backends.cupy import exchange

    return exchange.take_guest(x)


def _back(like: Any) -> Callable[[Array], Any]:
    from hla.backends.cupy import exchange

    return exchange.back_to_guest(like)


def _plain_form(problem: Problem) -> str:
    from hla.backends.cupy.execution import plain_form

    return plain_form(problem)


def _probe() -> Verdict:
    """Without importing cupy for it, as this is asked for arrays of other libraries too."""
    cupy = sys.modules.get("cupy")
    if cupy is not None:
        if cupy.cuda.runtime.is_hip:
            return Verdict(False, "has kernels for NVIDIA GPUs, and this CuPy is for ROCm")
        found = bool(cupy.cuda.is_available())
    else:
        found = os.name != "posix" or any(map(os.path.exists, _DRIVERS))
    return Verdict(True, "available") if found else Verdict(False, "no NVIDIA GPU that CuPy can use")


def _supports(call: Call) -> Verdict:
    if call.order > HIGHEST and call.form == "recurrent":
        return Verdict(False, f"has form recurrent for orders up to {HIGHEST}, not {call.order}")
    if "bfloat16" in call.dtypes and importlib.util.find_spec("ml_dtypes") is None:
        return Verdict(False, "takes bfloat16 where CuPy 14 and ml_dtypes are installed")
    if call.family == "cupy":
        return _runs_on(call)
    if call.traced:
        return Verdict(False, f"takes {call.family} arrays as they are, not while they are traced or transformed")
    if call.needs_grad:
        return Verdict(
            False, "is not followed by torch's autograd; take the gradient with hla.vjp, or backend 'triton'"
        )
    if not call.device.lower().startswith(DEVICES):
        return Verdict(False, f"runs on NVIDIA GPUs, not {call.device}")
    import cupy

    if "bfloat16" in call.dtypes and int(cupy.__version__.partition(".")[0]) < 14:
        return Verdict(False, f"takes bfloat16 with CuPy 14 or later, not {cupy.__version__}")
    found = _runs_on(call)
    return Verdict(True, f"supported; takes {call.family} arrays through DLPack") if found.ok else found


def _runs_on(call: Call) -> Verdict:
    """Whether the GPU is new enough."""
    from hla.backends.cupy import launch

    number = re.search(r"\d+", call.device)
    found = int(launch.capability(int(number[0]) if number else 0))
    if found < OLDEST:
        return Verdict(False, f"needs a GPU of compute capability {OLDEST / 10} or later, not {found / 10}")
    return Verdict(True, "supported")


def _offers(call: Call) -> Verdict:
    if call.family == "cupy":
        return Verdict(True, "supported")
    return Verdict(False, f"takes {call.family} arrays only when it is named")


def backend() -> Backend:
    """The registry's entry."""
    spec = BackendSpec(
        name="cupy",
        families=("cupy", "torch", "jax"),
        description="CUDA C++ kernels for CuPy arrays; fused HLA₂, HLA₃ and AHLA",
        requires=("cupy",),
        extra="cupy",
        forms=("recurrent", "chunkwise"),
        gradients=True,
        priority=15,
    )
    return Backend(
        spec=spec,
        load=_load,
        load_gradient=_load_gradient,
        probe=_probe,
        supports=_supports,
        offers=_offers,
        check=_check,
        plain_form=_plain_form,
        guests=Guests(_take, _back),
    )

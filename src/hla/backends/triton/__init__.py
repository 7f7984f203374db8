"""Backend "triton": kernels for GPUs, and on the CPU in Triton's interpreter. The kernels are in `kernels/`."""

from __future__ import annotations

import os
import sys

from hla.backends.registry import Backend, BackendSpec, Call, Gradient, Verdict
from hla.problem import Problem, Runner

WIDEST = 256
"""The largest d and dv: a chunk of them fits into the registers and shared memory of one program."""
_OLDEST = (3, 4)
_DEVICES = ("cuda", "xpu")
_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dri", "/dev/dxg")
"""What the drivers of GPUs leave in the file system."""


def _load(operator: str) -> Runner:
    from hla.backends.triton.autograd import run

    return run


def _load_gradient(operator: str) -> Gradient:
    from hla.backends.triton.autograd import pull

    return pull


def _plain_form(problem: Problem) -> str:
    from hla.backends.staged.execution import plain_form

    return plain_form(problem)


def _probe() -> Verdict:
    """Without importing torch or triton for it, as this is asked before there are any tensors."""
    import importlib.metadata

    version = importlib.metadata.version("triton")
    if tuple(int(n) for n in version.split(".")[:2]) < _OLDEST:
        least = ".".join(map(str, _OLDEST))
        return Verdict(False, f"needs triton {least} or later, not {version}, whose compiler fails on these kernels")
    if _interpreting():
        return Verdict(True, "available in Triton's interpreter (TRITON_INTERPRET=1)")
    torch = sys.modules.get("torch")
    devices = any(getattr(torch, kind).is_available() for kind in _DEVICES) if torch is not None else None
    found = any(map(os.path.exists, _DRIVERS)) if devices is None else devices
    if not found:
        return Verdict(False, "no GPU here; to run on the CPU set TRITON_INTERPRET=1 before triton is imported")
    return Verdict(True, "available")


def _interpreting() -> bool:
    if "triton" in sys.modules:
        from hla.backends.triton import launch

        return launch.interpreting()
    return os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y", "t")


def _supports(call: Call) -> Verdict:
    from hla.backends.triton import launch
    from hla.backends.triton.selftest import selftest

    kind = call.device.partition(":")[0]
    if kind not in (*_DEVICES, "cpu", "meta"):
        return Verdict(False, f"runs on {', '.join(_DEVICES)} devices, not {kind}")
    if kind == "cpu" and not launch.interpreting():
        return Verdict(False, "runs CPU tensors only with TRITON_INTERPRET=1, set before triton is imported")
    if max(call.d, call.dv) > WIDEST:
        return Verdict(False, f"takes d and dv up to {WIDEST}, not {max(call.d, call.dv)}")
    if kind == "meta":
        return Verdict(True, "supported")
    return selftest(call.device)


def _offers(call: Call) -> Verdict:
    if call.device.partition(":")[0] in _DEVICES:
        return Verdict(True, "supported")
    return Verdict(False, "runs CPU tensors in an interpreter, slowly: only when it is named")


def _check() -> Verdict:
    from hla.backends.triton import launch
    from hla.backends.triton.selftest import selftest

    device = "cpu" if launch.interpreting() else launch.gpu()
    return Verdict(False, "no GPU that torch can use") if device is None else selftest(str(device))


def backend() -> Backend:
    """The registry's entry."""
    spec = BackendSpec(
        name="triton",
        families=("torch",),
        description="Triton kernels for CUDA, ROCm and XPU tensors; fused HLA₂, HLA₃ and AHLA",
        requires=("triton", "torch"),
        extra="triton",
        forms=("recurrent", "chunkwise"),
        dtypes=("float16", "bfloat16", "float32"),
        products={"bfloat16": "bfloat16", "float16": "float16"},  # TF32 rounds as float16 does
        gradients=True,
        priority=20,
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
    )

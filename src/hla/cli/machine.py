"""The machine and the versions that a measured number depends on."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from pathlib import Path

LIBRARIES = ("numpy", "torch", "jax", "cupy")


def machine() -> dict[str, str]:
    """Names and values, all text.

    Example:
        >>> sorted(machine().keys() & {"hla", "python", "processor"})
        ['hla', 'processor', 'python']
    """
    import hla

    found = {
        "hla": hla.__version__,
        "python": platform.python_version(),
        **{name: version for name in LIBRARIES if (version := _version(name))},
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": str(os.cpu_count()),
    }
    if "torch" in found:
        import torch

        found["torch threads"] = str(torch.get_num_threads())
        if torch.cuda.is_available():
            found["gpu"] = torch.cuda.get_device_name()
    return found


def _version(name: str) -> str:
    if importlib.util.find_spec(name) is None:
        return ""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:  # CuPy's distribution is named after the CUDA version
        return "installed"


def _processor() -> str:
    """Its model; on Linux `platform` knows the architecture only."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()

"""Which array libraries are installed, on which devices a backend takes their arrays, and the way to the host."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hla import arrays
from hla.arrays import Array, Device, Namespace
from hla.errors import BackendNotInstalledError, BackendUnsupportedError

LIBRARIES = ("numpy", "torch", "jax", "cupy", "array_api_strict")
"""Libraries that are looked for, in the order in which they are reported."""


@dataclass(frozen=True)
class Placement:
    """An array library and one of its devices."""

    library: str
    device: Device = field(default=None, hash=False)
    """None where the library has one place only, or for its default"""

    @property
    def xp(self) -> Namespace:
        """The library's Array API namespace."""
        return installed_libraries()[self.library]

    def __str__(self) -> str:
        if self.device is None:
            return self.library
        name = str(self.device).removeprefix("array_api_strict.Device('").removesuffix("')")
        return f"{self.library} {name}"


_found: dict[str, Namespace] = {}
_searched: list[bool] = []


def installed_libraries() -> dict[str, Namespace]:
    """The Array API namespaces of the array libraries that can be imported here, by name.

    Returns:
        A dict from "numpy", "torch", "jax", "cupy", "array_api_strict" to namespaces; imports what is installed.

    Example:
        >>> "numpy" in installed_libraries()
        True
    """
    if not _searched:
        for name in LIBRARIES:
            if importlib.util.find_spec(name) is None:
                continue
            try:
                _found[name] = _namespace(name)
            except ImportError:  # present, but of no use on this machine, e.g. CuPy without its driver
                continue
        _searched.append(True)
    return dict(_found)


def _namespace(name: str) -> Namespace:
    import importlib

    module = importlib.import_module(name)
    if name == "cupy" and not _works(lambda: module.zeros(1)):
        raise ImportError("no device")
    sample = importlib.import_module("jax.numpy").zeros(1) if name == "jax" else module.zeros(1)
    return arrays.namespace(sample)


def _works(attempt: Callable[[], Any]) -> bool:
    try:
        attempt()
    except Exception:  # whatever a driver raises, the library is of no use here
        return False
    return True


def devices(library: str) -> list[Device]:
    """The devices of an installed library that are worth a run each; None stands for the only or default one."""
    if library == "torch":
        import torch

        return [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]
    if library == "array_api_strict":
        import array_api_strict

        return [None, array_api_strict.Device("device1")]
    return [None]


def placements(backend: str, *, every_device: bool = True) -> list[Placement]:
    """Where a backend runs: the installed libraries, and their devices, whose arrays it accepts.

    Args:
        backend: the name of a registered backend.
        every_device: also second devices of a library that exist for testing only.

    Returns:
        Placements on which the backend accepts a plain causal call; empty when it cannot run here.

    Raises:
        UnknownBackendError: no backend of that name.

    Example:
        >>> [str(p) for p in placements("numpy")][0]
        'numpy'
    """
    import hla
    from hla.testing.inputs import make_inputs

    families = hla.backends.get(backend).spec.families
    result = []
    for library, xp in installed_libraries().items():
        if "*" not in families and library not in families:
            continue
        for device in devices(library):
            if library == "array_api_strict" and device is not None and not every_device:
                continue
            q, k, v = make_inputs(xp, T=2, d=2, dv=2, device=device)
            try:
                hla.explain("linear_attention", q, k, v, backend=backend)
            except (BackendUnsupportedError, BackendNotInstalledError):
                continue
            result.append(Placement(library, device))
    return result


def to_numpy(x: Array) -> Any:
    """An array of any library as a NumPy array on the host; floating dtypes become float64.

    Args:
        x: any array; gradients are cut.

    Returns:
        A NumPy array, float64 for every floating dtype, else the dtype as it was.

    Example:
        >>> import numpy as np
        >>> to_numpy(np.ones(2, np.float16)).dtype
        dtype('float64')
    """
    import numpy as np

    library = arrays.family(x)
    floating = arrays.dtype_name(x.dtype) in arrays.FLOATING
    if library == "torch":
        x = x.detach().cpu()
        x = (x.double() if floating else x).numpy()
    elif library == "cupy":
        x = x.get()
    elif library == "array_api_strict":
        import array_api_strict

        x = x.to_device(array_api_strict.Device("CPU_DEVICE"))
    return np.asarray(x).astype(np.float64) if floating else np.asarray(x)

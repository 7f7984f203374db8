"""Which array libraries are installed, on which devices a backend takes their arrays, and the way to the host."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
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
        return find_library(self.library)

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` under jit for JAX, as it is used there: op by op it would compile hundreds of tiny programs."""
        if self.library != "jax":
            return function
        import jax

        compiled: Callable[..., Any] = jax.jit(function)
        return compiled

    def wait(self, result: Any) -> Any:
        """`result` when it is there: JAX, CuPy and torch on a GPU return before the work is done."""
        if self.library == "jax":
            import jax

            jax.block_until_ready(result)  # type: ignore[no-untyped-call,unused-ignore]
        elif self.library == "torch" and self.device is not None and self.device.type == "cuda":
            import torch

            torch.cuda.synchronize()
        elif self.library == "cupy":
            import cupy

            cupy.cuda.get_current_stream().synchronize()
        return result

    def __str__(self) -> str:
        if self.device is None:
            return self.library
        name = str(self.device).removeprefix("array_api_strict.Device('").removesuffix("')")
        return f"{self.library} {name}"


_found: dict[str, Namespace | None] = {}


def installed_libraries() -> dict[str, Namespace]:
    """The Array API namespaces of the array libraries that can be imported here, by name.

    Returns:
        A dict from "numpy", "torch", "jax", "cupy", "array_api_strict" to namespaces; imports what is installed.

    Example:
        >>> "numpy" in installed_libraries()
        True
    """
    found = ((name, find_library(name)) for name in LIBRARIES)
    return {name: xp for name, xp in found if xp is not None}


def find_library(name: str) -> Namespace | None:
    """A library's namespace; None where it is not installed, or cannot make an array on this machine."""
    if name not in _found:
        _found[name] = None
        if importlib.util.find_spec(name) is not None:
            try:
                module = importlib.import_module("jax.numpy" if name == "jax" else name)
                _found[name] = arrays.namespace(module.zeros(1))
            except Exception:  # whatever a missing driver raises, the library is of no use here
                return None
    return _found[name]


def devices(library: str) -> list[Device]:
    """The devices of an installed library that are worth a run each; None stands for the only or default one."""
    if library == "torch":
        import torch

        return [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]
    if library == "array_api_strict":
        import array_api_strict

        return [None, array_api_strict.Device("device1")]
    return [None]


def placements(backend: str, libraries: Sequence[str] | None = None, *, every_device: bool = True) -> list[Placement]:
    """Where a backend runs: the installed libraries, and their devices, whose arrays it accepts.

    Args:
        backend: the name of a registered backend.
        libraries: names of array libraries to look at; None for all.
        every_device: also second devices of a library that exist for testing only.

    Returns:
        Placements on which the backend accepts a plain causal call; empty when it cannot run here.

    Raises:
        UnknownBackendError: no backend of that name.

    Example:
        >>> [str(p) for p in placements("numpy", ["numpy"])]
        ['numpy']
    """
    import hla
    from hla.testing.inputs import make_inputs

    families = hla.backends.get(backend).spec.families
    result = []
    for library in LIBRARIES:
        wanted = (libraries is None or library in libraries) and ("*" in families or library in families)
        xp = find_library(library) if wanted else None
        if xp is None:
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


def home(backend: str) -> Placement | None:
    """Where a backend is at home: its own library's arrays, on a GPU if there is one; None where it cannot run.

    Example:
        >>> str(home("numpy"))
        'numpy'
    """
    import hla

    families = hla.backends.get(backend).spec.families
    found = placements(backend, ["numpy"] if "*" in families else families)
    return found[-1] if found else None


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

"""The array libraries that the shared tests run on, behind one small interface."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

chosen = "numpy"
"""what --arrays says; set before any test is collected"""
NAMES = ("numpy", "strict", "torch", "jax", "cupy")
FLOATS = {
    "numpy": ("float16", "bfloat16", "float32", "float64"),
    "strict": ("float32", "float64"),
    "torch": ("float16", "bfloat16", "float32", "float64"),
    "jax": ("float16", "bfloat16", "float32", "float64"),
    "cupy": ("float16", "bfloat16", "float32", "float64"),
}


@dataclass(frozen=True)
class Library:
    """One library on one device. `asarray` takes NumPy arrays in, `numpy` gives them back."""

    name: str
    device: str | None = None

    @property
    def module(self) -> Any:
        """The library's own module (not the compatibility layer)."""
        return importlib.import_module({"strict": "array_api_strict", "jax": "jax.numpy"}.get(self.name, self.name))

    @property
    def family(self) -> str:
        """As hla names it."""
        return {"strict": "array_api_strict"}.get(self.name, self.name)

    @property
    def floats(self) -> tuple[str, ...]:
        """Floating dtypes by name."""
        return FLOATS[self.name]

    def dtype(self, name: str) -> Any:
        """The library's dtype of that name."""
        if name == "bfloat16" and self.name in ("numpy", "cupy"):
            import ml_dtypes

            return np.dtype(ml_dtypes.bfloat16)
        if self.name in ("numpy", "cupy"):
            return np.dtype(name)
        return getattr(self.module, name)

    def asarray(self, x: Any, dtype: str | None = None) -> Any:
        """A NumPy array (or a nest of lists) in this library, on this device."""
        x = np.asarray(x)
        if self.name == "numpy":
            return x if dtype is None else x.astype(self.dtype(dtype))
        if self.name == "strict":
            device = self.module.Device(self.device)
            made = self.module.asarray(np.array(x, order="C"), device=device)
            return made if dtype is None else self.module.astype(made, self.dtype(dtype))
        if self.name == "torch":
            made = self.module.asarray(np.array(x, order="C"))
            return made if dtype is None else made.to(self.dtype(dtype))
        made = self.module.asarray(x)
        return made if dtype is None else made.astype(self.dtype(dtype))

    def numpy(self, x: Any) -> np.ndarray:
        """Back to NumPy; 16-bit floats as float32."""
        if self.name == "torch":
            x = x.detach()
            x = x.float() if str(x.dtype) in ("torch.bfloat16", "torch.float16") else x
            return x.numpy()
        if self.name == "cupy":
            x = x.get()
        if self.name == "strict":
            return np.from_dlpack(self.module.asarray(x, device=self.module.Device("CPU_DEVICE")))
        made = np.asarray(x)
        return made.astype(np.float32) if made.dtype.name in ("bfloat16", "float16") else made

    def tree(self, state: Any) -> Any:
        """A named tuple of NumPy arrays in this library, or the other way round."""
        return type(state)(*(self.asarray(x) if isinstance(x, np.ndarray) else self.numpy(x) for x in state))


def libraries(name: str) -> list[Library]:
    """The library of that name on each of its devices; fails when it is not installed."""
    if name == "strict":
        return [Library(name, "CPU_DEVICE"), Library(name, "device1")]
    return [Library(name)]


def only(name: str) -> Any:
    """The module of that name, for files whose tests are about it alone; they are skipped with any other --arrays."""
    if chosen != name:
        pytest.skip(f"of --arrays={name}", allow_module_level=True)
    return importlib.import_module(name)

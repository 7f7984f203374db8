"""Higher-order Linear Attention (arXiv 2510.27258): exact, causal, with a state of fixed size, on any array type.

Importing this package imports no array framework, not even NumPy.
"""

from typing import Any

from hla import backends, scan, segments
from hla.backends import get_backend, register_backend, set_backend, use_backend
from hla.cost import cost
from hla.differentiation import vjp
from hla.errors import (
    BackendNotInstalledError,
    BackendUnsupportedError,
    DTypeError,
    MixedArrayError,
    OptionError,
    ShapeError,
    UnknownBackendError,
)
from hla.features import feature_map
from hla.ops import ahla, explain, higher_order, hla2, hla3, linear_attention
from hla.states import init_state
from hla.storage import load_state, pack_symmetric, save_state, unpack_symmetric
from hla.streaming import step

__version__ = "0.1.0"

_ON_DEMAND = ("inspect", "models", "nn", "paper", "testing")


def __getattr__(name: str) -> Any:
    """Modules that most programs do not need are imported when they are first used."""
    if name in _ON_DEMAND:
        import importlib

        return importlib.import_module(f"hla.{name}")
    raise AttributeError(f"module 'hla' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_ON_DEMAND})


__all__ = [
    "BackendNotInstalledError",
    "BackendUnsupportedError",
    "DTypeError",
    "MixedArrayError",
    "OptionError",
    "ShapeError",
    "UnknownBackendError",
    "ahla",
    "backends",
    "cost",
    "explain",
    "feature_map",
    "get_backend",
    "higher_order",
    "hla2",
    "hla3",
    "init_state",
    "linear_attention",
    "load_state",
    "pack_symmetric",
    "paper",
    "register_backend",
    "save_state",
    "scan",
    "segments",
    "set_backend",
    "step",
    "unpack_symmetric",
    "use_backend",
    "vjp",
]

"""The errors of the public contract.

Every message has the same four parts, in this order: which argument, what was expected, what came, what to do.
"""

from __future__ import annotations

__all__ = [
    "BackendNotInstalledError",
    "BackendUnsupportedError",
    "DTypeError",
    "MixedArrayError",
    "OptionError",
    "ShapeError",
    "UnknownBackendError",
    "message",
]


class ShapeError(ValueError):
    """Two shapes disagree, or an array has too few axes."""


class DTypeError(TypeError):
    """An argument is no array, or an array of a kind that is refused (integer, complex, bool, object, masked …)."""


class OptionError(ValueError):
    """An option has a value that is not allowed, or two options exclude each other."""


class MixedArrayError(TypeError):
    """The arrays of one call come from two libraries or live on two devices."""


class UnknownBackendError(ValueError):
    """No backend of that name is registered."""


class BackendNotInstalledError(ImportError):
    """The named backend needs a package that is not installed; the message holds the pip command."""


class BackendUnsupportedError(NotImplementedError):
    """The named backends cannot run this call; the message holds the reason of each."""


def message(argument: str, expected: str, got: str, todo: str) -> str:
    """One line in the house form, for example::

    q: expected a floating-point array, got int64. Convert it, e.g. xp.astype(q, xp.float32).
    """
    return f"{argument}: expected {expected}, got {got}. {todo}"

"""Layers: `hla.nn.torch`, `hla.nn.flax`. Importing this package imports no framework, importing one of these does.

`convert` is that of `hla.nn.torch`, imported when it is first used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hla.nn.torch.conversion import convert

__all__ = ["convert"]


def __getattr__(name: str) -> Any:
    if name == "convert":
        from hla.nn.torch import conversion

        return conversion.convert
    raise AttributeError(f"module 'hla.nn' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), "convert"})

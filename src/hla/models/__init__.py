"""Whole language models, small enough to read: `ModelConfig` and, for PyTorch, `Decoder`.

Importing this package imports no framework; `Decoder` imports PyTorch when it is first used.
"""

from typing import TYPE_CHECKING, Any

from hla.models.config import ModelConfig

if TYPE_CHECKING:
    from hla.nn.torch.decoder import Decoder, DecoderState

__all__ = ["Decoder", "DecoderState", "ModelConfig"]

_TORCH = ("Decoder", "DecoderState")


def __getattr__(name: str) -> Any:
    if name in _TORCH:
        from hla.nn.torch import decoder

        return getattr(decoder, name)
    raise AttributeError(f"module 'hla.models' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_TORCH})

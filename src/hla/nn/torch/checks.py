"""What a layer asks of the tensors of a call, and the errors it raises."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hla import arrays
from hla.errors import DTypeError, MixedArrayError, OptionError, ShapeError, message
from hla.nn.refusals import check_field_shape, check_known_offsets


def is_cast(x: Tensor, own: torch.dtype) -> bool:
    """Whether autocast brings x and parameters of this dtype together."""
    if not x.dtype.is_floating_point or torch.float64 in (x.dtype, own) or x.is_meta:
        return False
    return torch.is_autocast_enabled(x.device.type)


FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_dtype(dtype: Any) -> None:
    """DTypeError unless parameters can have this dtype."""
    if dtype is not None and dtype not in FLOATING:
        raise DTypeError(
            message("dtype", f"one of {', '.join(map(str, FLOATING))}, or None", repr(dtype), "Pass a floating dtype.")
        )


def check_index(index: Any, batch: int | None, name: str = "index") -> None:
    """Errors unless these are numbers of entries of a batch, which is None where it is not known yet."""
    if not isinstance(index, Tensor) or index.dtype not in (torch.int64, torch.int32):
        got = f"{index.dtype}" if isinstance(index, Tensor) else type(index).__name__
        raise DTypeError(message(name, "an int64 or int32 tensor", got, "Convert it, e.g. torch.as_tensor."))
    if index.ndim != 1:
        raise ShapeError(message(name, "shape (N,)", f"{tuple(index.shape)}", "One number for each new entry."))
    if batch is not None and (outside := _outside(index, batch)):
        raise OptionError(
            message(name, f"entries of a batch of {batch}, from 0", outside, "Pass numbers below the batch.")
        )


def check_tokens(tokens: Any, vocab_size: int, axes: tuple[str, ...] = ("B", "T")) -> None:
    """Errors unless these are numbers of tokens with these axes."""
    if not isinstance(tokens, Tensor) or tokens.dtype not in (torch.int64, torch.int32):
        got = f"{tokens.dtype}" if isinstance(tokens, Tensor) else type(tokens).__name__
        raise DTypeError(message("tokens", "an int64 or int32 tensor", got, "Pass token numbers."))
    if tokens.ndim != len(axes):
        layout = f"({', '.join(axes)}{',' if len(axes) == 1 else ''})"
        raise ShapeError(message("tokens", f"shape {layout}", f"{tuple(tokens.shape)}", "One entry for each sequence."))
    if outside := _outside(tokens, vocab_size):
        raise OptionError(
            message("tokens", f"numbers below vocab_size = {vocab_size}, from 0", outside,
                    "Make the model with a larger vocabulary; at padding use any token.")
        )  # fmt: skip


def _outside(x: Tensor, count: int) -> str:
    """The least or the greatest number that is not in 0 … count − 1; "" where there is none, or none is known here."""
    if x.device.type != "cpu" or arrays.is_traced(x) or not x.numel():
        return ""
    low, high = (int(y) for y in x.aminmax())
    return str(low) if low < 0 else str(high) if high >= count else ""


def check_mask(mask: Any, shape: tuple[int, ...], x: Tensor) -> None:
    """Errors unless a padding mask is bool, of exactly this shape, and beside x."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = f"{mask.dtype}" if isinstance(mask, Tensor) else type(mask).__name__
        raise DTypeError(
            message("key_padding_mask", "a bool tensor, True for padding", got,
                    "Compare first: attention_mask == 0 where 1 means a token.")
        )  # fmt: skip
    if mask.shape != shape:
        raise ShapeError(
            message("key_padding_mask", f"shape {tuple(shape)}", f"{tuple(mask.shape)}", "One entry for each token.")
        )
    if mask.device != x.device:
        raise MixedArrayError(
            message("key_padding_mask", f"a tensor on {x.device}, as x", f"{mask.device}", f"Move it to {x.device}.")
        )


def check_offsets(offsets: Any, x: Tensor, *, slice_only: bool = False) -> int:
    """The number of packed sequences. `slice_only`: x is a slice of them, of unknown place."""
    if not isinstance(offsets, Tensor) or not _is_integer(offsets.dtype):
        got = f"{offsets.dtype}" if isinstance(offsets, Tensor) else type(offsets).__name__
        raise DTypeError(message("cu_seqlens", "an integer tensor (N + 1,)", got, "Pass cumulative lengths."))
    if offsets.ndim != 1 or offsets.shape[0] < 1:
        raise ShapeError(message("cu_seqlens", "shape (N + 1,)", f"{tuple(offsets.shape)}", "Pass cumulative lengths."))
    if x.shape[0] != 1:
        raise ShapeError(
            message("x", "shape (1, T, d_model) with cu_seqlens", f"{tuple(x.shape)}", "Put all sequences in one row.")
        )
    known = None if slice_only or arrays.is_compiling() else arrays.host_integers(offsets)
    if known is not None:
        check_known_offsets(known, x.shape[1])
    return int(offsets.shape[0]) - 1


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def check_field(name: str, found: Any, shape: tuple[int, ...], dtype: torch.dtype, x: Tensor) -> None:
    """Errors unless a tensor of a state has this shape, batch first, and dtype, and is beside x."""
    if not isinstance(found, Tensor):
        raise DTypeError(
            message(f"state.{name}", "a torch.Tensor", type(found).__name__, "Convert it, e.g. torch.as_tensor.")
        )
    check_field_shape(name, tuple(found.shape), shape)
    if found.dtype != dtype:
        raise DTypeError(message(f"state.{name}", f"{dtype}", f"{found.dtype}", "States keep the dtype they came in."))
    if found.device != x.device:
        raise MixedArrayError(
            message(
                f"state.{name}", f"a tensor on {x.device}, as x", f"{found.device}", "Move it with state.to(device)."
            )
        )

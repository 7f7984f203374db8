"""Errors that layers of every framework raise in the same words."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from hla import arrays
from hla.errors import OptionError, ShapeError, message


def no_state(where: str) -> OptionError:
    """The error for asking a bidirectional module for a state."""
    return OptionError(
        message(where, "a causal module", "causal=False", "A bidirectional module has no state: call it as a whole.")
    )


def other_layer(name: str, expected: Any, got: Any) -> OptionError:
    """The error for a state of a layer with other options."""
    return OptionError(
        message(name, f"{expected}", f"{got}", "A state serves only layers with the options that made it.")
    )


def check_field_shape(name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    """Errors unless an array of a state has this shape, batch first."""
    if found[1:] != wanted[1:] or len(found) != len(wanted):
        raise other_layer(f"state.{name}", f"(B, {', '.join(map(str, wanted[1:]))})", found)
    if found[0] != wanted[0]:
        raise ShapeError(
            message(f"state.{name}", f"a batch of {wanted[0]}, as x", f"{found[0]}",
                    "Use a state for this batch: init_state(batch), or state.reorder(index).")
        )  # fmt: skip


def check_known_offsets(known: Sequence[int], length: int) -> None:
    """OptionError unless offsets of packed sequences run from 0 to the length."""
    if known[0] != 0 or known[-1] != length:
        got = f"{known[0]} … {known[-1]}"
        raise OptionError(message("cu_seqlens", f"offsets from 0 to T = {length}", got, "Start at 0 and end at T."))
    if any(b < a for a, b in pairwise(known)):
        raise OptionError(message("cu_seqlens", "non-decreasing offsets", f"{known}", "Pass cumulative lengths."))


def check_count(name: str, value: Any, what: str = "the number of sequences") -> int:
    """A number of things, of which there may be none; else an OptionError."""
    if not arrays.is_integer(value) or value < 0:
        raise OptionError(message(name, "an integer ≥ 0", repr(value), f"Pass {what}."))
    return int(value)


def check_batch(state: Any, tokens: Sequence[Any], axis: int | None, cu_seqlens: Any = None) -> None:
    """ShapeError unless the state's own fields have exactly the batch of these q, k and v, whose time axis this is, or
    None for single tokens; all else is checked by the operator."""
    batch = None if getattr(type(state), "spec", None) is None else _batch_of(tokens, axis, cu_seqlens)
    if batch is None:
        return
    for field, x in zip(state._fields, state, strict=True):
        if field == "key_moment":  # stored once for each key/value head
            continue
        axes = tuple(x.shape[: -1 if field.endswith("mass") or "_mass_" in field else -2])
        if axes != batch:
            raise ShapeError(
                message(f"state.{field}", f"the batch axes {batch} of these tokens", f"{axes}",
                        "A state serves the batch that it was made for.")
            )  # fmt: skip


def _batch_of(tokens: Sequence[Any], axis: int | None, cu_seqlens: Any) -> tuple[int, ...] | None:
    """The batch axes of a state of these q, k and v; None where they cannot be, as the operator says."""
    try:
        shapes = [list(x.shape) for x in tokens]
        for shape in shapes:
            if axis is not None:
                del shape[axis]
            del shape[-1]
        batch = arrays.broadcast_shapes(*map(tuple, shapes))
        return batch if cu_seqlens is None else (len(cu_seqlens) - 1, *batch)
    except (AttributeError, IndexError, TypeError, ValueError):
        return None

"""Packed sequences: several in one row, told in the ways that Transformers has for it.

They become `offsets`, int (N + 1,): where each starts in the tokens of all rows, one row after another. Offsets are on
the CPU, which lays out the work, and without empty sequences, unless the program is traced.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from hla import arrays
from hla.errors import DTypeError, OptionError, ShapeError, message
from hla.nn.torch.sequences import packed

P = ParamSpec("P")
R = TypeVar("R")


class Told(NamedTuple):
    """The arguments that tell of packed sequences, as `DataCollatorWithFlattening` makes them."""

    position_ids: Tensor | None = None
    cu_seq_lens_q: Tensor | None = None
    cu_seq_lens_k: Tensor | None = None
    max_length_q: int | None = None
    max_length_k: int | None = None
    seq_idx: Tensor | None = None

    def given(self) -> dict[str, Any]:
        """Those that are not None."""
        return {name: x for name, x in self._asdict().items() if x is not None}


def read(told: Told, rows: int, columns: int) -> Tensor | None:
    """The offsets in rows without padding and cache; None where each row is one sequence.

    All that is told has to agree, as far as values can be looked at: in a traced program `cu_seq_lens_q` alone counts.
    Values on a GPU are waited for.
    """
    given = told.given()
    if not given or rows * columns == 0:
        return None
    _check(given, rows, columns)
    if not any(isinstance(x, Tensor) and arrays.is_traced(x) for x in given.values()):
        return _agreed(given, rows, columns)
    if told.cu_seq_lens_q is not None:
        begins = columns * torch.arange(1, rows, device=told.cu_seq_lens_q.device)
        # where they are there already, a sequence between them is empty
        return told.cu_seq_lens_q if rows == 1 else torch.cat([told.cu_seq_lens_q, begins]).sort().values
    if torch.compiler.is_dynamo_compiling():
        return _agreed_outside(given, rows, columns)
    raise OptionError(
        message(", ".join(given), "cu_seq_lens_q in a traced program", "none",
                "A tracer sees no values: let the collator make cumulative lengths (return_flash_attn_kwargs=True).")
    )  # fmt: skip


def refuse_beside(what: str, told: Told) -> None:
    """Errors for packed sequences beside `what`. Positions may be those of one text."""
    for name in told._replace(position_ids=None).given():
        raise OptionError(
            message(name, f"none beside {what}", "one", "Packed sequences have no padding and no cache: pass them "
                    "without attention_mask and with use_cache=False, or each as a row of its own.")
        )  # fmt: skip


def refuse_groups(layers: Iterable[Any]) -> None:
    """Errors for packed sequences in layers with a process group."""
    for layer in layers:
        if layer.attention.process_group is not None:
            raise OptionError(
                message("process_group", "None beside packed sequences", "a group",
                        "A rank sees its slice alone, not where sequences start in the whole: call the layers with "
                        "cu_seqlens.")
            )  # fmt: skip


def starts(offsets: Tensor, rows: int, columns: int, device: torch.device) -> Tensor:
    """bool (rows, columns), True at the first token of each sequence."""
    texts = packed(offsets, rows * columns, device)
    return (texts.positions(torch.zeros_like(texts.offsets[1:]), rows * columns) == 0).view(rows, columns)


def _check(given: dict[str, Any], rows: int, columns: int) -> None:
    for name, x in given.items():
        if name.startswith("max_length"):
            if not arrays.is_integer(x):
                raise DTypeError(message(name, "an integer", type(x).__name__, "Leave it out: it is not needed."))
            continue
        if not isinstance(x, Tensor) or x.dtype not in (torch.int64, torch.int32):
            got = f"{x.dtype}" if isinstance(x, Tensor) else type(x).__name__
            raise DTypeError(message(name, "an int64 or int32 tensor", got, "Pass what the collator makes."))
        if name.startswith("cu_seq_lens"):
            if x.ndim != 1 or not x.shape[0]:
                raise ShapeError(message(name, "shape (N + 1,)", f"{tuple(x.shape)}", "Pass cumulative lengths."))
        elif x.ndim != 2 or x.shape[0] not in (1, rows) or x.shape[1] != columns:
            raise ShapeError(
                message(name, f"shape ({rows}, {columns})", f"{tuple(x.shape)}", "One number for each token.")
            )


def _agreed(given: dict[str, Any], rows: int, columns: int) -> Tensor | None:
    found = {}
    for name, x in given.items():
        if name == "position_ids":
            found[name] = _from_positions(x.cpu(), rows)
        elif name == "seq_idx":
            found[name] = _from_numbers(x.cpu(), rows)
        elif name.startswith("cu_seq_lens"):
            found[name] = _from_offsets(name, x.tolist(), rows, columns)
    first, offsets = next(iter(found.items()), ("", list(range(0, rows * columns + 1, columns))))
    for name, other in found.items():
        if other != offsets:
            raise OptionError(
                message(f"{first}, {name}", "the same sequences", f"{offsets} and {other}",
                        "Both say where sequences start: pass one of them, or make both of the same lengths.")
            )  # fmt: skip
    longest = max(b - a for a, b in pairwise(offsets))
    for name in ("max_length_q", "max_length_k"):
        if given.get(name, longest) < longest:
            raise OptionError(
                message(name, f"{longest}, the tokens of the longest sequence, or more", f"{given[name]}",
                        "Leave it out: it is not needed.")
            )  # fmt: skip
    return None if len(offsets) == rows + 1 else torch.tensor(offsets, device="cpu")


def _from_positions(positions: Tensor, rows: int) -> list[int]:
    at_start = positions == 0
    place = torch.arange(positions.shape[1]).expand_as(positions)
    if bool((positions != place - torch.where(at_start, place, 0).cummax(1).values).any()):
        raise OptionError(
            message("position_ids", "none, or 0, 1, 2, … from the start of each sequence", "others",
                    "The model counts tokens itself. Positions that go on after a cache, or count tokens beside "
                    "padding, go with that cache and that attention_mask.")
        )  # fmt: skip
    return _from_starts(at_start, rows)


def _from_numbers(numbers: Tensor, rows: int) -> list[int]:
    steps = numbers.diff(dim=1)
    if bool((steps < 0).any()):
        raise OptionError(message("seq_idx", "non-decreasing numbers", "others", "Count the sequences: 0, 0, 1, …"))
    return _from_starts(torch.cat([torch.ones_like(numbers[:, :1]), steps], 1) != 0, rows)


def _from_starts(at_start: Tensor, rows: int) -> list[int]:
    every = at_start.expand(rows, -1).flatten()
    return [*every.nonzero()[:, 0].tolist(), every.numel()]


def _from_offsets(name: str, offsets: list[int], rows: int, columns: int) -> list[int]:
    total = rows * columns
    if offsets[0] != 0 or offsets[-1] != total or any(b < a for a, b in pairwise(offsets)):
        raise OptionError(
            message(name, f"cumulative lengths, from 0 to {total} tokens", f"{offsets}", "None may decrease.")
        )
    if not set(range(0, total, columns)) <= set(offsets):
        raise OptionError(
            message(name, f"a start at each of {rows} rows", f"{offsets}", "No sequence goes on in another row.")
        )
    return sorted(set(offsets))


def _outside(function: Callable[P, R], reason: str) -> Callable[P, R]:
    """torch.compile leaves its program for the function; with fullgraph=True it says why it cannot."""
    disable: Any = torch.compiler.disable
    takes_reason = "reason" in inspect.signature(disable).parameters  # newer versions do
    called: Callable[P, R] = disable(function, **({"reason": reason} if takes_reason else {}))
    return called


_agreed_outside = _outside(_agreed, "pass cu_seq_lens_q: where positions start anew is not known in the program")

"""Whether all ranks make the same call: without it, messages of different sizes would hang or mix up numbers."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hla.distributed.torch import waiting
from hla.distributed.torch.groups import Place
from hla.distributed.torch.rows import APART, ASTRAY, FINE, REFUSED, Row
from hla.errors import DTypeError, OptionError, ShapeError, message

Claim = tuple[tuple[str, str], ...]
"""What must be equal: (argument, its value in words)."""


class Agreed(NamedTuple):
    """What the ranks told each other."""

    lengths: tuple[int, ...]
    """tokens on each"""
    needs_grad: bool
    """whether any wants a gradient"""


def agree(
    place: Place, device: torch.device, claim: Claim, length: int, needs_grad: bool, refusal: Exception | None
) -> Agreed:
    """Tell the others, and hear them. Raises `refusal`, or an error that is the same on all ranks where they differ."""
    if refusal is not None:
        row = Row(REFUSED, length, needs_grad, f"{type(refusal).__name__}: {refusal}")
    else:
        row = Row(FINE, length, needs_grad, "\n".join(f"{name}\t{value}" for name, value in claim))
    try:
        heard = waiting.compare(place, row, device)
    finally:
        if refusal is not None:
            raise refusal
    for rank, said in enumerate(heard):
        if said.verdict == APART:
            waiting.answer(said)
            raise OptionError(said.text)
        if said.verdict in (REFUSED, ASTRAY):
            raise waiting.refused_elsewhere(f"rank {rank}", said.text)
    for rank, said in enumerate(heard):
        if said.text != heard[0].text:
            raise _difference(heard[0].text, rank, said.text)
    return Agreed(tuple(said.length for said in heard), any(said.needs_grad for said in heard))


def _difference(first: str, rank: int, other: str) -> Exception:
    for mine, yours in zip(first.split("\n"), other.split("\n"), strict=False):
        if mine != yours:
            name, value = (*mine.split("\t"), "")[:2]
            break
    else:
        name, value, yours = "call", first, other
    kind = ShapeError if name.startswith("shape of ") else DTypeError if name.startswith("dtype of ") else OptionError
    got = (*yours.split("\t"), "")[1]
    return kind(message(name, f"{value} on every rank, as on rank 0", f"{got} on rank {rank}", "Pass the same."))

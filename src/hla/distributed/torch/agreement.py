"""Whether all ranks make the same call: without it, messages of different sizes would hang or mix up numbers."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import torch

from hla.distributed.torch.groups import Place
from hla.errors import DTypeError, OptionError, ShapeError, message

_BYTES = 1024
_HEAD = 24
"""three int64: whether the arguments were refused, tokens, whether a gradient is wanted"""

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
        text = f"{type(refusal).__name__}: {refusal}"
    else:
        text = "\n".join(f"{name}\t{value}" for name, value in claim)
    head = torch.tensor([int(refusal is not None), length, int(needs_grad)], dtype=torch.int64).view(torch.uint8)
    row = torch.zeros(_BYTES, dtype=torch.uint8)
    row[:_HEAD] = head
    data = _fitted(text.encode())
    row[_HEAD : _HEAD + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    try:
        heard = place.gather(row.to(device)).cpu()
    finally:
        if refusal is not None:
            raise refusal
    heads = heard[:, :_HEAD].contiguous().view(torch.int64).tolist()
    texts = [bytes(x[_HEAD:].tolist()).rstrip(b"\0").decode(errors="replace") for x in heard]
    for rank, (refused, _, _) in enumerate(heads):
        if refused:
            said = texts[rank].removesuffix(".")
            raise OptionError(
                message("group", "arguments that every rank can take", f"an error on rank {rank}: {said}",
                        "See what was passed there.")
            )  # fmt: skip
    for rank, other in enumerate(texts):
        if other != texts[0]:
            raise _difference(texts[0], rank, other)
    return Agreed(tuple(n for _, n, _ in heads), any(wanted for _, _, wanted in heads))


def _fitted(data: bytes) -> bytes:
    """As it is, or with a digest for what is too long."""
    room = _BYTES - _HEAD
    if len(data) <= room:
        return data
    digest = b"\nall of it\t" + hashlib.sha256(data).hexdigest().encode()
    return data[: room - len(digest)] + digest


def _difference(first: str, rank: int, other: str) -> Exception:
    for mine, yours in zip(first.split("\n"), other.split("\n"), strict=False):
        if mine != yours:
            name, value = (*mine.split("\t"), "")[:2]
            break
    else:
        name, value, yours = "call", first, other
    kind = ShapeError if "shape" in name else DTypeError if "dtype" in name else OptionError
    got = (*yours.split("\t"), "")[1]
    return kind(message(name, f"{value} on every rank, as on rank 0", f"{got} on rank {rank}", "Pass the same."))

"""What a rank says when calls are compared: a row of bytes, as long as that of any other."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import torch
from torch import Tensor

from hla.errors import message

BYTES = 1024
_HEAD = 48
"""six int64: that it is a row, which one of its group, then the fields"""
_MAGIC = 0x48C1A5B20E97D364

FINE, REFUSED, ASTRAY, APART = range(4)
"""Verdicts: a call; arguments that were refused; a group that was, so that only those who wait for this rank hear it;
ranks that wait for each other in different groups."""


class Row(NamedTuple):
    """The words of one rank."""

    verdict: int
    length: int
    """tokens"""
    needs_grad: bool
    text: str
    """the call, or what is wrong"""
    refusals: int = 0
    """groups that were refused so far"""

    def write(self, turn: int) -> Tensor:
        """(BYTES,), on the host, in this comparison of the group."""
        head = [_MAGIC, turn, self.verdict, self.length, int(self.needs_grad), self.refusals]
        row = torch.zeros(BYTES, dtype=torch.uint8)
        row[:_HEAD] = torch.tensor(head, dtype=torch.int64).view(torch.uint8)
        data = _fitted(self.text.encode())
        row[_HEAD : _HEAD + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return row


def read(rows: Tensor, turn: int) -> list[Row]:
    """The rows of all ranks, (size, BYTES) on the host. RuntimeError where one is none, or of another comparison."""
    heads = rows[:, :_HEAD].contiguous().view(torch.int64).tolist()
    for rank, (magic, other, *_) in enumerate(heads):
        if (magic, other) != (_MAGIC, turn):
            got = f"that of call {other}" if magic == _MAGIC else "something else"
            raise RuntimeError(
                message("group", f"what each rank says of call {turn} on the group", f"{got} from rank {rank}",
                        "A rank has left a call, or makes others. Make a new group.")
            )  # fmt: skip
    texts = [bytes(x[_HEAD:].tolist()).rstrip(b"\0").decode(errors="replace") for x in rows]
    return [Row(x[2], x[3], bool(x[4]), text, x[5]) for x, text in zip(heads, texts, strict=True)]


def _fitted(data: bytes) -> bytes:
    """As it is, or with a digest for what is too long."""
    room = BYTES - _HEAD
    if len(data) <= room:
        return data
    digest = b"\nall of it\t" + hashlib.sha256(data).hexdigest().encode()
    return data[: room - len(digest)] + digest

"""What a rank says when calls are compared: a row of bytes, as long as that of any other."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import torch
from torch import Tensor

BYTES = 1024
_HEAD = 24
"""three int64: verdict, tokens, whether a gradient is wanted"""

FINE, REFUSED, ASTRAY, APART = range(4)
"""Verdicts: a call; arguments that were refused; a group that was, so that only those who wait for this rank hear it;
ranks that wait for each other in different groups."""


class Row(NamedTuple):
    """The words of one rank."""

    verdict: int
    length: int
    """tokens; with ASTRAY how many groups have been refused"""
    needs_grad: bool
    text: str
    """the call, or what is wrong"""

    def write(self) -> Tensor:
        """(BYTES,), on the host."""
        head = torch.tensor([self.verdict, self.length, int(self.needs_grad)], dtype=torch.int64).view(torch.uint8)
        row = torch.zeros(BYTES, dtype=torch.uint8)
        row[:_HEAD] = head
        data = _fitted(self.text.encode())
        row[_HEAD : _HEAD + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return row


def read(rows: Tensor) -> list[Row]:
    """The rows of all ranks, (size, BYTES) on the host."""
    heads = rows[:, :_HEAD].contiguous().view(torch.int64).tolist()
    texts = [bytes(x[_HEAD:].tolist()).rstrip(b"\0").decode(errors="replace") for x in rows]
    return [Row(verdict, n, bool(wanted), text) for (verdict, n, wanted), text in zip(heads, texts, strict=True)]


def _fitted(data: bytes) -> bytes:
    """As it is, or with a digest for what is too long."""
    room = BYTES - _HEAD
    if len(data) <= room:
        return data
    digest = b"\nall of it\t" + hashlib.sha256(data).hexdigest().encode()
    return data[: room - len(digest)] + digest

"""How the tokens of a call are cut: into chunks, and the chunks into parts that are run through one after another."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from hla.arrays import Array
from hla.backends.staged.engine import Engine


@dataclass(frozen=True, eq=False)
class Timeline:
    """Chunks of `size` tokens. Packed sequences have chunks and a part of their own."""

    length: int
    """T"""
    size: int
    """C"""
    count: int
    """of chunks"""
    parts: int
    """of parts: packed sequences, or pieces of one long one"""
    chunks: Array | None = None
    """int64 (count, 3): first token, token behind the last, number of the packed sequence; None for one sequence"""
    borders: Array | None = None
    """int64 (parts + 1,): first chunk of each part; None for one part"""
    tokens: Array | None = None
    """int64 (parts + 1,): first token of each packed sequence; None for one sequence"""


@lru_cache(maxsize=256)
def timeline(engine: Engine, length: int, size: int, offsets: tuple[int, ...] | None, where: Hashable) -> Timeline:
    """The chunks of one sequence, or of the packed sequences between `offsets`; tables lie on the device `where`."""
    if offsets is None:
        return Timeline(length, size, -(-length // size), 1)
    rows: list[tuple[int, int, int]] = []
    borders = [0]
    for number, (start, stop) in enumerate(pairwise(offsets)):
        rows += [(t, min(t + size, stop), number) for t in range(start, stop, size)]
        borders.append(len(rows))
    chunks = engine.table(where, rows).reshape(-1, 3)
    tables = engine.table(where, borders), engine.table(where, offsets)
    return Timeline(length, size, len(rows), len(offsets) - 1, chunks, *tables)


@lru_cache(maxsize=256)
def in_parts(engine: Engine, of: Timeline, parts: int, where: Hashable) -> Timeline:
    """One long sequence in about that many pieces of whole chunks."""
    each = -(-of.count // parts)
    borders = [*range(0, of.count, each), of.count]
    return Timeline(of.length, of.size, of.count, len(borders) - 1, of.chunks, engine.table(where, borders))

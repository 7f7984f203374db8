"""Ranks that wait for each other where they cannot hear each other.

Calls are compared by a collective of the group (`hla.distributed.torch.agreement`), which tells nothing to a rank that
was given another group, and nothing to those who wait for one whose group was refused. So a rank that waits for longer
than `PATIENCE` leaves a note in the store of the default group, and reads those of the others. Earlier it writes and
reads nothing. It then joins the comparisons that wait for it, whichever group they are of, to say what is wrong: all
hear of it, and no group is left with a collective that only some of its ranks have made.

A note says in which group G the rank waits, in the how manieth comparison of G, and how many comparisons of each group
it has joined in all. Rank a *waits for* b where b is in a's group and has joined fewer of its comparisons than a. If a
waits for b, b for another, and so on until one waits for a, none of them can go on, and that is the error.

It is never a false one, however old the notes are and however slow the machine. Let a be the first of these ranks to
leave the comparison that its note is about. Then b, for which it waits, has joined this comparison before. b's note
counts fewer, so it was written earlier than that; since a rank joins nothing while it waits, b has left the comparison
of its own note in between, and a was not the first. Ranks that wait in groups without each other, groups used in turn,
or late ranks never form such a circle.

The proof needs a process to wait in one place at a time: while another thread is alive that is no daemon, or has
compared calls, nothing is concluded and no note left. What remains is the first comparison of a daemon thread. That a
rank whose group was refused does not come proves nothing: it may have caught the error. So what it leaves in its note
is read where a collective has failed, and there alone.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d

from hla.distributed.torch.groups import Place, leave, named
from hla.distributed.torch.rows import APART, ASTRAY, Row, read
from hla.errors import OptionError, message

PATIENCE = 1.0
"""seconds that a comparison takes before its ranks ask why"""

_LONGEST, _LINGER, _GRACE = 16, 5, 10
"""In units of it: the longest time between two looks; how long a rank whose group was refused looks for those who wait
for it; for how long to wait until all have heard."""

_joined: WeakKeyDictionary[ProcessGroup, int] = WeakKeyDictionary()
"""comparisons that this process has joined"""
_threads: set[int] = set()
"""that have compared calls"""
_defaults: WeakKeyDictionary[ProcessGroup, int] = WeakKeyDictionary()
_started = count(1)
"""Default groups, in the order in which this process has had them: one store may be that of several."""
_refusals = 0
"""groups that were refused, on this process or others as it has heard"""
_noted = False
"""whether this process has left a note"""


class Note(NamedTuple):
    """What a rank tells those that it cannot reach."""

    joined: dict[str, int]
    """comparisons, by the name of the group"""
    group: str = ""
    """in which it waits"""
    ranks: tuple[int, ...] = ()
    """its processes"""
    turn: int = 0
    """which comparison of it this is, from 1"""
    device: str = "cpu"
    refusal: str = ""
    """or why it has no group"""
    refusals: int = 0
    """how often that was so"""

    def lacks(self, rank: int, other: Note | None) -> bool:
        """Whether this note's rank waits for that one."""
        return other is not None and rank in self.ranks and other.joined.get(self.group, 0) < self.turn


class Board:
    """The notes of all processes, in the store of the default group. None once that has failed, as where the process
    that keeps it has ended."""

    def __init__(self) -> None:
        self._store: Any = distributed_c10d._get_default_store()  # type: ignore[attr-defined]
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._prefix = f"hla/waiting/{_generation()}"

    @property
    def lost(self) -> bool:
        """Whether the store has failed."""
        return self._store is None

    def write(self, note: Note) -> None:
        """This process's note, instead of the one before."""
        global _noted
        _noted = bool(note.group or note.refusal)
        self._use(lambda store: store.set(f"{self._prefix}/{self.rank}", json.dumps(note)))

    def clear(self) -> None:
        """This process has no more to say."""
        self.write(Note({}, refusals=_refusals))

    def read(self, rank: int) -> Note | None:
        """That of a process."""
        key = f"{self._prefix}/{rank}"
        text = self._use(lambda store: store.get(key) if store.check([key]) else None)
        return None if text is None else Note(*json.loads(text))

    def others(self) -> list[Note | None]:
        """Those of all others."""
        return [self.read(rank) for rank in range(self.size) if rank != self.rank]

    def _use(self, work: Callable[[Any], Any]) -> Any:
        if self._store is None:
            return None
        try:
            return work(self._store)
        except RuntimeError:
            self._store = None


def _generation() -> int:
    """Which default group of this process the present one is."""
    world: Any = dist.group.WORLD
    if world not in _defaults:
        _defaults[world] = next(_started)
    return _defaults[world]


def _alone() -> bool:
    """Whether no other thread is known that may compare calls."""
    own = threading.current_thread()
    return all(x is own or (x.daemon and x.ident not in _threads) for x in threading.enumerate())


class _Asked(NamedTuple):
    """A collective on its way."""

    work: Any
    device: str

    def done(self, seconds: float) -> bool:
        """Whether it is complete, within that time. Its error, if it has failed."""
        if self.device != "cpu":  # where to wait with a limit may give the collective up
            end = time.monotonic() + seconds
            while not self.work.is_completed():
                if time.monotonic() >= end:
                    return False
                time.sleep(1e-3)
        else:
            try:
                self.work.wait(timedelta(seconds=seconds))
                return True
            except RuntimeError:
                if not self.work.is_completed():
                    return False
        self.work.wait()
        return True


def compare(place: Place, row: Row, device: torch.device) -> list[Row]:
    """What each rank says. An OptionError where this one waits in vain, a RuntimeError where the collective fails."""
    global _refusals
    turn = _joined[place.group] = _joined.get(place.group, 0) + 1
    _threads.add(threading.get_ident())
    _generation()
    if _noted:
        Board().clear()
    own = row._replace(refusals=_refusals).write(turn).to(device)
    heard = place.gather(own, lambda work: _wait(place, turn, _Asked(work, device.type))).cpu()
    try:
        rows = read(heard, turn)
    except RuntimeError:
        leave(place.group)
        raise
    _refusals = max(said.refusals for said in rows)
    return rows


def answer(row: Row) -> None:
    """Say so to all who wait for this rank."""
    _settle(_answer(Board(), row))


@contextmanager
def heard() -> Iterator[None]:
    """Within it a call looks for its group: where it is refused one, those who wait for this rank hear of it."""
    try:
        yield
    except OptionError as error:
        if dist.is_available() and dist.is_initialized():
            tell(error)
        raise


def tell(refusal: Exception) -> None:
    """This rank raises an error before it joins the others; let them know."""
    global _refusals
    _refusals += 1
    board, row = Board(), Row(ASTRAY, 0, False, f"{type(refusal).__name__}: {refusal}", _refusals)
    board.write(Note(_counts(), refusal=row.text, refusals=_refusals))
    end = time.monotonic() + _LINGER * PATIENCE
    while _alone() and not all(note is not None and note.refusals >= _refusals for note in board.others()):  # all alike
        if board.lost:
            return
        asked = _answer(board, row)
        if asked or time.monotonic() >= end:
            _settle(asked)
            return
        time.sleep(0.05 * PATIENCE)


def _counts() -> dict[str, int]:
    return {group.group_name: count for group, count in _joined.items()}


def _wait(place: Place, turn: int, asked: _Asked) -> None:
    """Until all ranks have joined."""
    board: Board | None = None
    pause = PATIENCE
    try:
        while not asked.done(pause):
            pause = min(2 * pause, _LONGEST * PATIENCE)
            board = board or Board()
            if _alone():
                _look(board, _note(place, turn, asked.device), asked)
            else:
                board.clear()
    except RuntimeError as error:
        todo = "See whether one of them has ended, makes other calls, or passes another group."
        refused = _refusal(Board(), _note(place, turn, asked.device))
        raise refused or place.failure("a call by", error, todo) from error
    finally:
        if board is not None:
            board.clear()


def _note(place: Place, turn: int, device: str) -> Note:
    ranks = tuple(dist.get_process_group_ranks(place.group))
    return Note(_counts(), place.group.group_name, ranks, turn, device, refusals=_refusals)


def _look(board: Board, own: Note, asked: _Asked) -> None:
    """Whether to go on waiting: no error, or all who wait for this rank have been told."""
    board.write(own)
    circle = _circle(board, own)
    if circle:
        got = "; ".join(f"process {rank} waiting in {named(note.group, note.ranks)}" for rank, note in circle)
        told = message("group", "the same group on all of its ranks", got, "Pass the same, in calls in the same order.")
        answers = _answer(board, Row(APART, 0, False, told))
        board.write(own._replace(joined=_counts()))
        heard_all = asked.done(_GRACE * PATIENCE)
        _settle(answers)
        if not heard_all:
            raise OptionError(told)


def _circle(board: Board, own: Note) -> list[tuple[int, Note]]:
    """Ranks of which each waits for the next and the last for the first, with this one; or none."""
    notes: dict[int, Note | None] = {board.rank: own}
    before: dict[int, int] = {}
    todo = [(board.rank, own)]
    while todo:
        rank, note = todo.pop()
        for other in note.ranks:
            if other not in notes:
                notes[other] = board.read(other)
            found = notes[other]
            if found is None or other in before or not note.lacks(other, found):
                continue
            before[other] = rank
            todo.append((other, found))
    path = [board.rank] if board.rank in before else []
    while path and (len(path) == 1 or path[-1] != board.rank):
        path.append(before[path[-1]])
    return [(rank, found) for rank in path[:0:-1] if (found := notes[rank]) is not None]


def _refusal(board: Board, own: Note) -> OptionError | None:
    """What a rank was refused that is waited for, where this one was not refused as often."""
    for rank in own.ranks:
        note = None if rank == board.rank else board.read(rank)
        if note is not None and note.refusals > own.refusals and note.refusal and own.lacks(rank, note):
            return refused_elsewhere(f"process {rank}", note.refusal)
    return None


def refused_elsewhere(rank: str, text: str) -> OptionError:
    """For ranks whose own arguments are fine."""
    got = f"an error on {rank}: {text.removesuffix('.')}"
    return OptionError(message("group", "arguments that every rank can take", got, "See what was passed there."))


def _answer(board: Board, row: Row) -> list[_Asked]:
    """Join all comparisons that wait for this rank, with these words."""
    asked: list[_Asked] = []
    for note in board.others():
        if note is None or board.rank not in note.ranks:
            continue
        group = _group(note.group)
        if group is None or _joined.get(group, 0) != note.turn - 1:
            continue
        _joined[group] = note.turn
        place = Place(group, dist.get_rank(group), dist.get_world_size(group))
        with suppress(RuntimeError, OptionError):
            place.gather(row.write(note.turn).to(note.device), partial(_keep, asked, note.device))
    return asked


def _keep(asked: list[_Asked], device: str, work: Any) -> None:
    asked.append(_Asked(work, device))


def _group(name: str) -> ProcessGroup | None:
    resolve: Any = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    try:
        found: ProcessGroup = resolve(name)
    except (RuntimeError, ValueError, LookupError):
        return None
    return found


def _settle(asked: list[_Asked]) -> None:
    """Until the others have heard, or failed, or some time has gone by: whoever has spoken may end the process."""
    end = time.monotonic() + _GRACE * PATIENCE
    for one in asked:
        with suppress(RuntimeError):
            one.done(max(0.0, end - time.monotonic()))

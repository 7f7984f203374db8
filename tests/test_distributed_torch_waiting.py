"""When ranks wait for each other for ever: `hla.distributed.torch.waiting` on programs that are played through."""

from __future__ import annotations

import random
from typing import Any

import pytest

from libraries import only

torch: Any = only("torch")
pytest.importorskip("hla.distributed.torch")

from hla.distributed.torch import rows, waiting  # noqa: E402
from hla.distributed.torch.waiting import Note  # noqa: E402

Program = list[list[str]]


class Play:
    """Ranks that each compare calls in their own list of groups, one after another, in a random order of steps."""

    def __init__(self, groups: dict[str, tuple[int, ...]], program: Program, chance: random.Random) -> None:
        self.groups, self.program, self.chance = groups, program, chance
        self.joined: list[dict[str, int]] = [{} for _ in program]
        self.at = [0] * len(program)
        self.waits = [False] * len(program)
        self.history: list[list[Note]] = [[] for _ in program]
        """all that a rank has written down"""

    def note(self, rank: int) -> Note:
        group = self.program[rank][self.at[rank]]
        return Note(dict(self.joined[rank]), group, self.groups[group], self.joined[rank][group])

    def able(self, rank: int) -> bool:
        """Whether the rank can go on."""
        if not self.waits[rank]:
            return self.at[rank] < len(self.program[rank])
        note = self.note(rank)
        return all(self.joined[other].get(note.group, 0) >= note.turn for other in note.ranks)

    def step(self) -> bool:
        """One rank joins a comparison, or leaves it; False where none can."""
        ranks = [rank for rank in range(len(self.program)) if self.able(rank)]
        if not ranks:
            return False
        rank = self.chance.choice(ranks)
        if self.waits[rank]:
            self.at[rank] += 1
        else:
            group = self.program[rank][self.at[rank]]
            self.joined[rank][group] = self.joined[rank].get(group, 0) + 1
        self.waits[rank] = not self.waits[rank]
        for each in range(len(self.program)):
            if self.waits[each] and self.chance.random() < 0.5:
                self.history[each].append(self.note(each))
        return True

    def circle(self, rank: int, old: bool) -> list[tuple[int, Note]]:
        """What a rank that waits finds; `old`: in notes of any age."""

        class Board:
            def read(board, other: int) -> Note | None:
                if not old:
                    return self.note(other) if self.waits[other] else None
                return self.chance.choice([None, *self.history[other]])

        board: Any = Board()
        board.rank = rank
        return waiting._circle(board, self.note(rank))


def some_groups(chance: random.Random, size: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{i}": tuple(sorted(chance.sample(range(size), chance.randint(2, size)))) for i in range(chance.randint(2, 5))
    }


@pytest.mark.parametrize("size", [2, 3, 5])
def test_no_false_alarm(size: int) -> None:
    """Where all ranks make their calls in one order, no notes of whatever age make a circle."""
    chance, looks = random.Random(size), 0
    for _ in range(100):
        groups = some_groups(chance, size)
        order = [chance.choice(list(groups)) for _ in range(12)]
        play = Play(groups, [[g for g in order if rank in groups[g]] for rank in range(size)], chance)
        while play.step():
            for rank in range(size):
                if play.waits[rank]:
                    looks += 1
                    assert not play.circle(rank, old=True)
        assert all(at == len(calls) for at, calls in zip(play.at, play.program, strict=True))
    assert looks > 1000


@pytest.mark.parametrize("size", [2, 3, 5])
def test_ranks_that_wait_for_each_other_find_it(size: int) -> None:
    """Where none can go on and all that are waited for wait too, some find the circle that they are in."""
    chance, found = random.Random(size), 0
    for _ in range(300):
        groups = some_groups(chance, size)
        calls = [[g for g in groups if rank in groups[g]] for rank in range(size)]
        play = Play(groups, [[chance.choice(x) for _ in range(6)] if x else [] for x in calls], chance)
        while play.step():
            pass
        stuck = [rank for rank in range(size) if play.waits[rank]]
        lacking = {
            rank: [
                x for x in play.note(rank).ranks if play.joined[x].get(play.note(rank).group, 0) < play.note(rank).turn
            ]
            for rank in stuck
        }
        if not stuck or not all(other in stuck for others in lacking.values() for other in others):
            continue
        found += 1
        circles = [circle for rank in stuck if (circle := play.circle(rank, old=False))]
        assert circles
        for circle in circles:
            ranks = [rank for rank, _ in circle]
            assert all(after in lacking[rank] for rank, after in zip(ranks, [*ranks[1:], ranks[0]], strict=True))
    assert found > 20, found


def test_rows_are_known_from_other_messages() -> None:
    """Numbers, or what a rank says of another call, are not read as its words."""
    said = [rows.Row(rows.FINE, 7, True, "operator\thla2", 3), rows.Row(rows.REFUSED, 0, False, "no", 0)]
    sent = torch.stack([row.write(5) for row in said])
    assert rows.read(sent, 5) == said
    with pytest.raises(RuntimeError, match="call 6 on the group, got that of call 5 from rank 0"):
        rows.read(sent, 6)
    numbers = torch.linspace(0.5, 1.5, rows.BYTES // 8, dtype=torch.float64).view(torch.uint8)
    with pytest.raises(RuntimeError, match="got something else from rank 1"):
        rows.read(torch.stack([sent[0], numbers]), 5)

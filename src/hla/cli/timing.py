"""Rounds in which all contenders take turns (A, B, C, A, B, C, …), so that a busy machine is unfair to none of them."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Timing:
    """Samples of one contender, in seconds a call."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        """What is reported: half of the samples were no slower."""
        return statistics.median(self.samples)

    @property
    def fastest(self) -> float:
        """The least disturbed sample."""
        return min(self.samples)


def in_turns(
    contenders: Mapping[Name, Callable[[], Any]], rounds: int, *, least: float = 0.0, most: float = math.inf
) -> dict[Name, Timing]:
    """Time every contender once in each round, after one call that is not counted.

    Args:
        contenders: functions by name. They return when the work is done, and have run before, so that nothing compiles.
        rounds: samples of each.
        least: seconds that a sample lasts at least: a quick function is called several times in it.
        most: seconds after which a contender takes no more samples; one it has in any case.

    Returns:
        A `Timing` by name.

    Example:
        >>> found = in_turns({"a": lambda: None, "b": lambda: sum(range(1000))}, rounds=3)
        >>> len(found["a"].samples), found["a"].median < found["b"].median
        (3, True)
    """
    calls: dict[Name, int] = {}
    for name, run in contenders.items():
        once = _seconds(run, 1)
        calls[name] = max(1, math.ceil(least / max(once, 1e-7)))
    samples: dict[Name, list[float]] = {name: [] for name in contenders}
    spent = dict.fromkeys(contenders, 0.0)
    for _ in range(rounds):
        for name, run in contenders.items():
            if samples[name] and spent[name] >= most:
                continue
            seconds = _seconds(run, calls[name])
            spent[name] += seconds
            samples[name].append(seconds / calls[name])
    return {name: Timing(tuple(found)) for name, found in samples.items()}


def _seconds(run: Callable[[], Any], calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return time.perf_counter() - start

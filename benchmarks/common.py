"""What the benchmarks share: rounds in which all contenders take turns, so that a busy machine is unfair to none."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any


def in_turns(contenders: Mapping[Any, Callable[[], Any]], rounds: int) -> dict[Any, float]:
    """Median seconds of each contender, after one unmeasured call, over rounds in which each runs once."""
    for run in contenders.values():
        run()
    times: dict[Any, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(found) for name, found in times.items()}


def machine() -> str:
    """The versions that a number depends on."""
    import numpy as np

    import hla

    return f"hla {hla.__version__}, NumPy {np.__version__}, Python {platform.python_version()}, {platform.machine()}"


def verdict(name: str, value: str, target: str, reached: bool) -> str:
    """One line: a number, its target, and whether it is reached."""
    return f"{name}: {value} (target {target}: {'reached' if reached else 'NOT reached'})"

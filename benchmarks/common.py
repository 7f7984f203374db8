"""What the benchmarks share: turns of all contenders within a run, the machine, a number beside its target, an
optimizer."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from typing import Any

from hla.cli import timing

LEAST = 2e-3
"""Seconds that a sample lasts at least: quick functions are called several times in it."""


def in_turns(contenders: Mapping[Any, Callable[[], Any]], rounds: int) -> dict[Any, float]:
    """Median seconds of each contender, after one unmeasured call, over rounds in which each takes its turn."""
    return {name: found.median for name, found in timing.in_turns(contenders, rounds, least=LEAST).items()}


def machine() -> str:
    """The versions that a number depends on."""
    import numpy as np

    import hla

    return f"hla {hla.__version__}, NumPy {np.__version__}, Python {platform.python_version()}, {platform.machine()}"


def verdict(name: str, value: str, target: str, reached: bool) -> str:
    """One line: a number, its target, and whether it is reached."""
    return f"{name}: {value} (target {target}: {'reached' if reached else 'NOT reached'})"


def adamw(model: Any, lr: float) -> Any:
    """The optimizer of the trainings, with weight decay for matrices alone: it would pull on decays."""
    import torch

    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))


def place_of(library: str) -> Any:
    """The default place of a library's arrays, the CPU for torch; SystemExit where it is not installed."""
    from hla.testing.libraries import Placement, find_library

    if find_library(library) is None:
        raise SystemExit(f'{library} is not installed. Run: pip install "hla[{library}]"')
    if library == "torch":
        import torch

        return Placement(library, torch.device("cpu"))
    return Placement(library)

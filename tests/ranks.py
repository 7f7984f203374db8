"""Processes of `torch.distributed` for tests: they meet at a file, and a hang is an error after seconds."""

from __future__ import annotations

import datetime
import multiprocessing
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

SECONDS = 30.0
"""that a collective may wait for the other ranks"""


def run(work: str, size: int, folder: Path, *arguments: Any, alive: int | None = None, seconds: float = 240) -> None:
    """Run "module:function" as function(rank, size, *arguments) in `size` processes; an error where one has failed.

    `alive`: how many are to report, where some are killed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.tensor", "hla.distributed.torch"])  # imported once for all
    processes = [
        context.Process(target=_begin, args=(work, rank, size, str(folder), arguments), daemon=True)
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    end = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    late = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for rank in late:
        processes[rank].kill()
    assert not late, f"ranks {late} hang"
    told = [(folder / f"{rank}").read_text() for rank in range(size) if (folder / f"{rank}").exists()]
    failures = "\n".join(text for text in told if text)
    assert not failures, failures
    assert len(told) == (size if alive is None else alive), f"only {len(told)} ranks of {size} came to an end"


def _begin(work: str, rank: int, size: int, folder: str, arguments: Any) -> None:
    import importlib

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    text = ""
    try:
        store = dist.FileStore(str(Path(folder) / "meeting"), size)
        limit = datetime.timedelta(seconds=SECONDS)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
        module, name = work.split(":")
        getattr(importlib.import_module(module), name)(rank, size, *arguments)
        dist.destroy_process_group()
    except BaseException:
        text = f"rank {rank} of {size}: {traceback.format_exc()}"
    (Path(folder) / f"{rank}").write_text(text)


def attempt(failures: list[str], name: str, case: Callable[[], None]) -> None:
    """Run a case; what it raises is kept for the end, as the other ranks go on."""
    try:
        case()
    except AssertionError as error:
        failures.append(f"{name}: {error}")

"""Peak memory of one call, its results included."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable
from typing import Any

from hla.testing.libraries import Placement


def peak_bytes(place: Placement, function: Callable[..., Any], arguments: tuple[Any, ...]) -> int | None:
    """The most bytes at a time that a call allocates; None where the library does not tell.

    NumPy registers its arrays with `tracemalloc`; PyTorch's allocator counts on a GPU, and on a CPU tells its profiler;
    JAX's compiler says what it has reserved.

    Args:
        place: where the arrays are.
        function: what is called.
        arguments: its arrays.

    Example:
        >>> import numpy as np
        >>> peak_bytes(Placement("numpy"), lambda n: np.ones(n), (1000,)) >= 8000
        True
    """
    if place.library == "numpy":
        tracemalloc.start()
        try:
            function(*arguments)
            return int(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    if place.library == "torch":
        on_gpu = place.device is not None and place.device.type == "cuda"
        return _on_gpu(function, arguments) if on_gpu else _on_cpu(function, arguments)
    if place.library == "jax" and hasattr(function, "lower"):
        found = function.lower(*arguments).compile().memory_analysis()
        return None if found is None else int(found.temp_size_in_bytes + found.output_size_in_bytes)
    return None


def _on_gpu(function: Callable[..., Any], arguments: tuple[Any, ...]) -> int:
    import torch

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = function(*arguments)
    torch.cuda.synchronize()
    del result
    return int(torch.cuda.max_memory_allocated() - before)


def _on_cpu(function: Callable[..., Any], arguments: tuple[Any, ...]) -> int | None:
    """From the profiler's record of every allocation and release, in order."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler says on stderr that it starts and stops
    from torch.autograd.profiler import profile

    with profile(profile_memory=True) as found:
        function(*arguments)
    if found.kineto_results is None:
        return None
    events = [event for event in found.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return int(peak) if events else None

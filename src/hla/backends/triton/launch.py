"""Launching kernels: with which blocks, on which device, and how often each was launched."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch._subclasses import FakeTensor

counts: Counter[str] = Counter()
"""Launches so far, by kernel."""
watchers: list[Callable[[Launch], None]] = []
"""Called with every launch, before it happens."""
forced: dict[str, int] = {}
"""Which of its configurations a kernel takes, by the kernel's name: for tests that try them all."""


OPTIONS = {"enable_fp_fusion": True}
"""Of the compiler; Triton warns where this one is left to the environment."""
DEVICES = ("cuda", "xpu")
"""Devices that Triton compiles for, as torch calls them; ROCm's are "cuda" too."""
_one_at_a_time = threading.Lock()
"""The interpreter puts functions of its own in Triton's place while a kernel runs."""


class Config(NamedTuple):
    """Blocks of a kernel, and how the compiler schedules it."""

    blocks: dict[str, int]
    warps: int = 4
    stages: int = 2


def _known(x: Any) -> Any:
    """What a choice may depend on: a number or name, and of a tensor whether it is there."""
    return x is not None if isinstance(x, Tensor) or x is None else x


class Launch(NamedTuple):
    """One launch, as it was asked for."""

    kernel: str
    programs: int
    arguments: dict[str, Any]
    config: Config


Programs = Callable[[dict[str, int]], int]
"""From blocks to the number of programs."""


class Kernel:
    """A kernel with its configurations. On a GPU the fastest that fits is found out once for every size and dtype; the
    length of the sequence plays no part. Triton's interpreter and fake tensors take the first."""

    def __init__(
        self,
        function: Any,
        configs: Sequence[Config],
        keys: Sequence[str] = (),
        sizes: Sequence[str] = (),
        *,
        shared: Callable[[dict[str, Any], Config], int] | None = None,
        useful: Callable[[dict[str, Any], Config], bool] | None = None,
        writes: Sequence[str] = (),
    ) -> None:
        """`keys`: arguments that the choice depends on; `sizes`: what else `shared` and `useful` look at. `shared`:
        bytes of shared memory that a configuration needs at least. `useful`: whether one is worth trying at all.
        `writes`: arguments that are added to."""
        self.function, self.configs, self._keys = function, tuple(configs), tuple(keys)
        self._shared, self._useful, self._writes = shared, useful, tuple(writes)
        self._sizes = (*keys, *sizes)
        self._tuned: dict[Any, Any] = {}
        self._fitting: dict[Any, list[Config]] = {}

    @property
    def name(self) -> str:
        """As in the counters."""
        name: str = self.function.__name__
        return name

    def candidates(self, arguments: dict[str, Any], limit: int) -> list[Config]:
        """The configurations that fit the sizes and a device with `limit` bytes of shared memory for a program."""
        useful = [c for c in self.configs if self._useful is None or self._useful(arguments, c)]
        if self._shared is None:
            return useful
        need = {id(c): self._shared(arguments, c) for c in useful}
        fitting = [c for c in useful if need[id(c)] <= limit]
        return fitting or [min(useful, key=lambda c: need[id(c)])]

    def _found(self, arguments: dict[str, Any], limit: int) -> list[Config]:
        """As `candidates`, remembered for what they depend on."""
        key: tuple[Any, ...] = (limit, *(_known(arguments[name]) for name in self._sizes))
        if key not in self._fitting:
            self._fitting[key] = self.candidates(arguments, limit)
        return self._fitting[key]

    def __call__(self, programs: Programs, arguments: dict[str, Any], where: Tensor) -> None:
        """Launch on the device of `where`, unless there is nothing to do."""
        limit = shared_memory(where.device)
        found = self._found(arguments, limit)
        chosen = found[forced[self.name] % len(found)] if self.name in forced else found[0]
        count = programs(chosen.blocks)
        if count == 0:
            return
        counts[self.name] += 1
        for watch in watchers:
            watch(Launch(self.name, count, arguments, chosen))
        if isinstance(where, FakeTensor) or where.is_meta:
            return
        with _on(where):
            if len(found) > 1 and not interpreting() and self.name not in forced:
                self._tuner(found, where)[lambda meta: (programs(meta),)](**arguments, **OPTIONS)
                return
            if interpreting():
                with _one_at_a_time:
                    self.function[(count,)](**arguments, **chosen.blocks)
                return
            options = {"num_warps": chosen.warps, "num_stages": chosen.stages}
            self.function[(count,)](**arguments, **chosen.blocks, **options, **OPTIONS)

    def _tuner(self, found: list[Config], where: Tensor) -> Any:
        """Triton's autotuner over some configurations; one for each chip and set."""
        key = (chip(where.device), *((tuple(c.blocks.values()), c.warps, c.stages) for c in found))
        if key not in self._tuned:
            configs = [triton.Config(dict(c.blocks), num_warps=c.warps, num_stages=c.stages) for c in found]
            decorate = triton.autotune(configs, key=list(self._keys), restore_value=list(self._writes) or None)
            self._tuned[key] = decorate(self.function)
        return self._tuned[key]


def gpu() -> torch.device | None:
    """The GPU that torch uses, if it is of a kind that Triton compiles for."""
    for kind in DEVICES:
        module = getattr(torch, kind)
        if module.is_available():
            return torch.device(kind, module.current_device())
    return None


def interpreting() -> bool:
    """Whether the kernels were made for Triton's interpreter (TRITON_INTERPRET=1 when triton was imported)."""
    from triton.runtime.interpreter import InterpretedFunction

    from hla.backends.triton.kernels.read import read

    return isinstance(read, InterpretedFunction)


def chip(device: torch.device) -> str:
    """What a kernel is compiled for, "cuda 90" for example."""
    if interpreting() or device.type in ("cpu", "meta"):
        return "interpreter"
    target = triton.runtime.driver.active.get_current_target()
    return f"{target.backend} {target.arch}"


_SHARED: dict[Any, int] = {}


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may take; as on an H100 where there is no device to ask."""
    here = gpu()
    if here is None or here.type != device.type:
        return 232_448
    if device not in _SHARED:
        index = here.index if device.index is None else device.index
        properties = triton.runtime.driver.active.utils.get_device_properties(index)
        _SHARED[device] = int(properties["max_shared_mem"])
    return _SHARED[device]


def _on(x: Tensor) -> AbstractContextManager[Any]:
    if x.device.type == "cpu":
        return nullcontext()
    found: AbstractContextManager[Any] = getattr(torch, x.device.type).device(x.device)
    return found

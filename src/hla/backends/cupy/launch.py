"""Launching kernels: compiled for which device, with which blocks, and how often each was launched."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from hla.arrays import Array
from hla.errors import BackendUnsupportedError, message

SOURCES = Path(__file__).parent / "kernels"
STANDARD = "-std=c++17"
UNASKED = 48 * 1024
"""Bytes of shared memory that a block may have without having asked."""

counts: Counter[str] = Counter()
"""Launches so far, by kernel."""
watchers: list[Callable[[Launch], None]] = []
"""Called with every launch, before it happens."""

_compiling = threading.Lock()
_kernels: dict[Any, Any] = {}


class Launch(NamedTuple):
    """One launch."""

    kernel: str
    """As in the counters"""
    variant: str
    """The instance of the template"""
    blocks: int
    shared: int
    """Bytes of a block"""
    arguments: dict[str, Any]


def cupy() -> Any:
    """The module, wherever it comes from."""
    import cupy

    return cupy


def device(x: Array) -> int:
    """The number of an array's device."""
    return int(x.device.id)


@cache
def capability(number: int) -> str:
    """Compute capability of a device, "80" for example."""
    return str(cupy().cuda.Device(number).compute_capability)


@cache
def shared_memory(number: int) -> int:
    """Bytes of shared memory that a block may ask for."""
    return int(cupy().cuda.Device(number).attributes["MaxSharedMemoryPerBlockOptin"])


@cache
def fingerprint() -> str:
    """Of all sources. CuPy keeps compiled kernels by source and options, but looks at no included file."""
    text = b"".join(path.read_bytes() for path in sorted(SOURCES.iterdir()) if path.suffix in (".cu", ".cuh"))
    return hashlib.sha256(text).hexdigest()[:16]


def options(macros: tuple[tuple[str, int], ...] = ()) -> tuple[str, ...]:
    """The compiler's options."""
    return (STANDARD, f"-I{SOURCES}", f"-DHLA_SOURCES=0x{fingerprint()}", *(f"-D{name}={n}" for name, n in macros))


def kernel(file: str, variant: str, macros: tuple[tuple[str, int], ...], number: int) -> Any:
    """An instance of a template, compiled for a device at its first use."""
    key = (file, variant, macros, number)
    found = _kernels.get(key)
    if found is None:
        with _compiling:
            found = _kernels.get(key)
            if found is None:
                found = _kernels[key] = _compiled(file, variant, macros, number)
    return found


def _compiled(file: str, variant: str, macros: tuple[tuple[str, int], ...], number: int) -> Any:
    code = f'#include "{file}.cu"\n'  # ASCII, as CuPy writes it to a file in the encoding of the locale
    try:
        made = cupy().RawModule(code=code, options=options(macros), name_expressions=(variant,))
        return made.get_function(variant)
    except Exception as error:  # of the compiler, or as there is none, or of the driver
        chip = f"compute capability {capability(number)}"
        raise BackendUnsupportedError(
            message("backend", f"kernels that compile for {chip}", f"this of {file}.cu, {variant}:\n{error}\n",
                    "Use another backend, and report this with the versions of CuPy and CUDA (hla info).")
        ) from error  # fmt: skip


def launch(
    name: str,
    variant: str,
    blocks: int,
    threads: int,
    packed: list[Any],
    shared: int,
    arguments: dict[str, Any],
    where: Array,
    macros: tuple[tuple[str, int], ...] = (),
) -> None:
    """Launch on the current device, which is that of an array, and its current stream, unless there is nothing to do.
    Nothing is waited for."""
    if blocks == 0:
        return
    counts[name] += 1
    for watch in watchers:
        watch(Launch(name, variant, blocks, shared, arguments))
    found = kernel(name, variant, macros, device(where))
    if shared > UNASKED and found.max_dynamic_shared_size_bytes < shared:
        found.max_dynamic_shared_size_bytes = shared
    found((blocks,), (threads,), tuple(packed), shared_mem=shared)

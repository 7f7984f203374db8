"""The CUDA kernels of the CuPy backend, compiled for GPUs that are not here: registers, spills, shared memory.

`python tests/test_cupy_compile.py` prints a table of all of it.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import pytest

import libraries
from cuda import nvrtc
from hla.backends.cupy import parameters

libraries.only("numpy")

KERNELS = Path(parameters.__file__).parent / "kernels"
RESIDENT = {"float": 2, "double": 1}
"""Blocks of 256 threads that a multiprocessor's 65,536 registers are to hold, as in kernels/views.cuh."""
EVERY = "sm_90"
"""What all variants are compiled for."""
SPILLS = 64
"""Bytes of a thread's stores and loads that are put up with: outside of the loops over features, a few a chunk."""
SIZES = {"D": 128, "DW": 128, "DZ": 128, "WIDTHS": (128, 128, 128, 1, 128, 128), "after": (None,) * 2}

needed = pytest.mark.skipif(not nvrtc.available(), reason="with nvidia-cuda-nvrtc-cu12")


def variants(kernel: str, kind: str) -> list[tuple[int, int]]:
    """Those that are used: in float64 chunks are no longer than 32 tokens."""
    return [v for v in parameters.VARIANTS[kernel] if kind == "float" or v[0] <= 32]


def chosen(kernel: str, kind: str, architecture: str) -> list[tuple[int, int]]:
    """All of float32 and one of float64 for one GPU, the default for the others: all together take minutes."""
    found = variants(kernel, kind)
    if architecture == EVERY:
        return found if kind == "float" else found[:1]
    return found[:1] if kind == "float" else []


@cache
def compiled(kernel: str, architecture: str, every: bool = False) -> nvrtc.Compiled:
    """A kernel's variants, those that are chosen or every one."""
    found = [(kind, v) for kind in RESIDENT for v in variants(kernel, kind)]
    names = [parameters.name(kernel, kind, *v) for kind, v in found if every or v in chosen(kernel, kind, architecture)]
    return nvrtc.compile(KERNELS / f"{kernel}.cu", architecture, kernels=names)


@needed
@pytest.mark.parametrize("kernel", parameters.VARIANTS)
@pytest.mark.parametrize("architecture", nvrtc.ARCHITECTURES)
def test_what_kernels_take(kernel: str, architecture: str) -> None:
    made = compiled(kernel, architecture)
    for kind, resident in RESIDENT.items():
        for variant in chosen(kernel, kind, architecture):
            usage = made.usage[parameters.name(kernel, kind, *variant)]
            print(architecture, parameters.name(kernel, kind, *variant), usage)
            assert 0 < usage.registers <= min(255, 65_536 // parameters.THREADS // resident), variant
            assert usage.spills <= SPILLS, variant
            assert usage.shared == 0, "all shared memory is dynamic"
            assert usage.stack <= SPILLS, variant
    assert "warning" not in made.log


@pytest.mark.parametrize("kernel", parameters.VARIANTS)
@pytest.mark.parametrize("architecture", nvrtc.ARCHITECTURES)
def test_some_variant_fits_into_shared_memory(kernel: str, architecture: str) -> None:
    """At d = dv = 128, for each number of tokens per chunk."""
    for kind in RESIDENT:
        for chunk in {c for c, _ in variants(kernel, kind)}:
            least = min(
                parameters.shared_bytes(kernel, kind, *v, SIZES) for v in variants(kernel, kind) if v[0] == chunk
            )
            assert least <= nvrtc.SHARED[architecture], (kind, chunk)


def table(kernel: str, architecture: str) -> str:
    """Of every variant: registers, spilt bytes, and bytes of shared memory at d = dv = 128."""
    made, lines = compiled(kernel, architecture, every=True), []
    for kind in RESIDENT:
        for variant in variants(kernel, kind):
            name = parameters.name(kernel, kind, *variant)
            usage, shared = made.usage[name], parameters.shared_bytes(kernel, kind, *variant, SIZES)
            lines.append(f"{architecture:7} {name:28} {usage.registers:4} {usage.spills:4} {shared:7}")
    return "\n".join(lines)


if __name__ == "__main__":
    for architecture in sys.argv[1:] or nvrtc.ARCHITECTURES:
        for kernel in parameters.VARIANTS:
            print(table(kernel, architecture))

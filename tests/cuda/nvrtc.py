"""CUDA C++ kernels compiled for GPUs that are not here: registers, spills, shared memory, and what the compiler says.

NVIDIA's run-time compiler, the package nvidia-cuda-nvrtc-cu12, needs no GPU and no driver. It is called through CuPy
or, without CuPy, by itself. Headers such as cuda_fp16.h are those of nvidia-cuda-runtime-cu12.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ARCHITECTURES = ("sm_75", "sm_80", "sm_90", "sm_100")
"""T4, A100, H100, B200"""
SHARED = {"sm_75": 65_536, "sm_80": 166_912, "sm_90": 232_448, "sm_100": 232_448}
"""bytes that a block may take, all that is dynamic with the launch's consent"""


class CompileError(RuntimeError):
    """What the compiler says."""


class Usage(NamedTuple):
    """What a compiled kernel takes."""

    registers: int
    """of a thread"""
    spills: int
    """bytes of a thread's stores and loads of what does not fit into the registers"""
    stack: int
    """bytes of a thread's own memory, arrays that are indexed at run time among them"""
    shared: int
    """bytes of a block, without those of the launch"""


class Compiled(NamedTuple):
    """A source compiled for one architecture."""

    usage: dict[str, Usage]
    """of each kernel, by the name that it was asked for under, or its own"""
    log: str
    """of the compiler, with warnings"""
    cubin: bytes
    seconds: float


def available() -> bool:
    """Whether there is a compiler."""
    return bool(_compilers())


def version() -> tuple[int, int]:
    """Of the compiler, which is that of CUDA."""
    return _compiler().version()


def includes() -> bool:
    """Whether headers such as cuda_fp16.h are there."""
    return any((folder / "cuda_fp16.h").exists() for folder in _folders("include"))


def compile(
    source: Path,
    architecture: str,
    *,
    kernels: Sequence[str] = (),
    macros: Mapping[str, object] | None = None,
    flags: Sequence[str] = (),
) -> Compiled:
    """Compile all that the file has, and of its templates those named, such as `"name<float, 4>"`."""
    options = [
        f"-arch={architecture}",
        "-std=c++17",
        "--ptxas-options=-v",
        "-ftz=true",  # as CuPy does
        f"-I{Path(source).resolve().parent}",
        *(f"-I{folder}" for folder in _folders("include")),
        *(f"-D{name}={value}" for name, value in (macros or {}).items()),
        *flags,
    ]
    start = time.perf_counter()
    done, log, cubin, lowered = _compiler().compile(Path(source).read_text(), str(source), options, list(kernels))
    if not done:
        raise CompileError(f"{Path(source).name} does not compile for {architecture}:\n{log}")
    asked = {low: name for name, low in lowered.items()}
    found = {asked.get(name, name): usage for name, usage in _usage(log).items()}
    return Compiled(found, log, cubin, time.perf_counter() - start)


ENTRY = re.compile(
    r"Compiling entry function '(?P<name>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)


def _usage(log: str) -> dict[str, Usage]:
    result = {}
    for entry in ENTRY.finditer(log):
        shared = re.search(r"(\d+) bytes smem", entry["rest"])
        spills = int(entry["stores"]) + int(entry["loads"])
        result[entry["name"]] = Usage(
            int(entry["registers"]), spills, int(entry["stack"]), int(shared[1]) if shared else 0
        )
    return result


def _folders(kind: str) -> list[Path]:
    """The folders "include" or "lib" of NVIDIA's packages."""
    spec = importlib.util.find_spec("nvidia")
    roots = [Path(root) for root in (spec.submodule_search_locations or [])] if spec else []
    return sorted(folder for root in roots for folder in root.glob(f"*/{kind}") if folder.is_dir())


@functools.cache
def _compilers() -> dict[str, Any]:
    """By each way that there is, the preferred one first."""
    found: dict[str, Any] = {}
    with contextlib.suppress(ImportError, RuntimeError):  # CuPy looks for the library only when it is used
        from cupy.cuda import nvrtc

        nvrtc.getVersion()
        found["cupy"] = _CuPy(nvrtc)
    for path in (path for folder in _folders("lib") for path in folder.glob("libnvrtc.so.*")):
        found["ctypes"] = _Library(ctypes.CDLL(str(path)))
    return found


def _compiler() -> Any:
    return next(iter(_compilers().values()))


class _CuPy:
    """The compiler as CuPy has it."""

    def __init__(self, nvrtc: Any) -> None:
        self.nvrtc = nvrtc

    def version(self) -> tuple[int, int]:
        return tuple(self.nvrtc.getVersion())

    def compile(
        self, text: str, name: str, options: list[str], kernels: list[str]
    ) -> tuple[bool, str, bytes, dict[str, str]]:
        program = self.nvrtc.createProgram(text, name, (), ())
        try:
            for kernel in kernels:
                self.nvrtc.addNameExpression(program, kernel)
            try:
                self.nvrtc.compileProgram(program, tuple(options))
            except self.nvrtc.NVRTCError:
                return False, self.nvrtc.getProgramLog(program), b"", {}
            lowered = {kernel: self.nvrtc.getLoweredName(program, kernel) for kernel in kernels}
            return True, self.nvrtc.getProgramLog(program), self.nvrtc.getCUBIN(program), lowered
        finally:
            self.nvrtc.destroyProgram(program)


class _Library:
    """The compiler by itself."""

    def __init__(self, library: Any) -> None:
        self.library = library

    def call(self, name: str, *args: Any) -> None:
        status = self.library[name](*args)
        if status:
            raise RuntimeError(f"{name}: status {status}")

    def text(self, name: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self.call(f"{name}Size", program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        self.call(name, program, text)
        return text.raw

    def version(self) -> tuple[int, int]:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self.call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        return major.value, minor.value

    def compile(
        self, text: str, name: str, options: list[str], kernels: list[str]
    ) -> tuple[bool, str, bytes, dict[str, str]]:
        program = ctypes.c_void_p()
        self.call("nvrtcCreateProgram", ctypes.byref(program), text.encode(), name.encode(), 0, None, None)
        try:
            for kernel in kernels:
                self.call("nvrtcAddNameExpression", program, kernel.encode())
            encoded = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            status = self.library.nvrtcCompileProgram(program, len(options), encoded)
            log = self.text("nvrtcGetProgramLog", program).rstrip(b"\0").decode()
            if status:
                return False, log, b"", {}
            lowered = {}
            for kernel in kernels:
                low = ctypes.c_char_p()
                self.call("nvrtcGetLoweredName", program, kernel.encode(), ctypes.byref(low))
                lowered[kernel] = (low.value or b"").decode()
            return True, log, self.text("nvrtcGetCUBIN", program), lowered
        finally:
            self.call("nvrtcDestroyProgram", ctypes.byref(program))

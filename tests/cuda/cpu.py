"""CUDA C++ kernels on the CPU: the same .cu file, compiled by g++, launched on NumPy arrays.

    module = cpu.compile(Path("scale.cu"), macros={"BLOCK": 128})
    module.kernel("scale")((blocks,), (128,), (x, y, np.int32(n)), shared_bytes=0, order="reverse")

What a launch finds by itself, and raises as a `KernelError` with kernel, file and line: barriers that some threads of a
block or lanes of a warp miss; accesses not aligned to their type; indices out of the bounds of an array; failed
assertions. Without a line: stores just outside an argument or a variable in shared memory; arguments that do not fit;
grids and blocks that no GPU takes. For each block shared memory starts as NaN, which also surrounds the
arguments, and is what a lane gets from one that takes no part in a shuffle; variables without a value start as a very
large negative number. Threads and blocks run forward, in reverse or shuffled: `in_every_order` compares the results.

What needs a build of its own, in a process that has the sanitizer's library loaded first: accesses out of bounds of any
memory and undefined arithmetic (build "address"), and races between the threads of a launch (build "thread").
`sanitized` calls a function in such a process and reports; to run a whole program there:

    python tests/cuda/cpu.py address pytest --arrays=numpy -k cupy tests

cpu.h says what kernels may use, and what differs from a GPU. The folder is no package: `cuda` is also NVIDIA's.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import pickle
import re
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hla-cuda-cpu"
ORDERS = ("forward", "reverse", "shuffled")
"""of the blocks of a launch, of the warps of a block and of the lanes of a warp"""

COMMON = ("-std=c++20", "-fPIC", "-fvisibility=hidden", "-fno-gnu-unique", "-fno-strict-aliasing", "-fno-math-errno")
EXACT = ("-ffp-contract=off", "-Werror=return-type")
DEBUGGED = ("-O1", "-g", "-fno-omit-frame-pointer")
BUILDS = {
    "plain": ("-O2", "-fsanitize=alignment,bounds", "-fno-sanitize-recover=all", "-Wl,--as-needed"),
    "address": (*DEBUGGED, "-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    "thread": (*DEBUGGED, "-fsanitize=thread"),
}
RUNTIME = {"plain": (), "address": ("-DHLA_CPU_ADDRESS",), "thread": ("-DHLA_CPU_THREAD",)}
LIBRARIES = {"address": ("libasan.so", "libstdc++.so"), "thread": ("libtsan.so",)}
"""What a process has to load first."""
SETTINGS = {
    "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "ignore_noninstrumented_modules=1:history_size=4:exitcode=66",
    "OPENBLAS_NUM_THREADS": "1",
}


class CompileError(RuntimeError):
    """What g++ says."""


class KernelError(RuntimeError):
    """A launch that a GPU would refuse, or whose result it does not define."""


# ---- compiling


def available() -> bool:
    """Whether there is a g++."""
    return shutil.which("g++") is not None


def compile(
    source: Path,
    *,
    kernels: Sequence[str] = (),
    macros: Mapping[str, object] | None = None,
    include: Sequence[Path] = (),
    flags: Sequence[str] = (),
    build: str | None = None,
) -> Module:
    """The kernels of a .cu file: those named, `"name"` or `"name<float, 4>"`; or else all that are no templates.

    `macros` are defined, `flags` are g++'s. The build is "plain", "address" or "thread", or else what the environment
    says in HLA_CUDA_BUILD. A process reads a file once, and files that g++ made stay in a cache for the next.
    """
    defined = "".join(f"#define {name} {value}\n" for name, value in (macros or {}).items())
    folders = tuple(f"-I{folder}" for folder in include)
    build = build or os.environ.get("HLA_CUDA_BUILD", "plain")
    return _module(Path(source).resolve(), tuple(kernels), defined, (*folders, *flags), build)


@functools.cache
def _module(source: Path, kernels: tuple[str, ...], defined: str, flags: tuple[str, ...], build: str) -> Module:
    included = f'#include "{HERE}/cpu.h"\n{defined}namespace {{\n#include "{source}"\n}}\n'
    text = _gxx(["-E", f"-I{HERE}/include", *COMMON, *flags, "-x", "c++", "-"], included, source.name)
    names = kernels or tuple(_named(text))
    if not names:
        raise CompileError(f"{source.name}: no kernels, or only templates: name those that you want")
    text = _rewritten(text) + "".join(_exported(i, name) for i, name in enumerate(names))
    initialised = ("-ftrivial-auto-var-init=pattern",) if _version() >= 12 else ()
    options = (*COMMON, *EXACT, *BUILDS[build], *initialised, *flags)
    runtime = _cached(".o", lambda path: [*COMMON, "-O2", *RUNTIME[build], *flags, "-c", "-o", path], HERE / "cpu.cpp")
    library = _cached(".so", lambda path: [*options, "-shared", "-o", path, str(runtime)], source, text)
    loaded = ctypes.PyDLL(str(library))
    return Module(source, build, {name: Kernel(loaded, i, name, source, build) for i, name in enumerate(names)})


def _cached(suffix: str, command: Callable[[str], list[str]], source: Path, text: str | None = None) -> Path:
    """What g++ makes of a file, or of preprocessed text, made once for each content and command."""
    content = source.read_text() + (HERE / "cpu.h").read_text() if text is None else text
    key = hashlib.sha256("\0".join([content, *command(""), str(_version())]).encode()).hexdigest()[:24]
    CACHE.mkdir(parents=True, exist_ok=True)
    path = CACHE / f"{source.stem}-{key}{suffix}"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            made = Path(folder) / path.name
            given = [str(source)] if text is None else ["-x", "c++-cpp-output", "-"]
            _gxx([*command(str(made)), *given], text or "", source.name)
            made.replace(path)  # at once: others may be about to do the same
    return path


def _gxx(arguments: list[str], text: str, name: str) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
    done = subprocess.run(["g++", *arguments], input=text, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise CompileError(f"{name} does not compile:\n{done.stderr}")
    return done.stdout


@functools.cache
def _version() -> int:
    return int(_gxx(["-dumpversion"], "", "g++").partition(".")[0])


GLOBAL = re.compile(r"(template\s*<[^;{}]*>\s*)?(?:extern\s*\"C\"\s*)?__global__\s+(?:static\s+)?void\s+(\w+)\s*\(")
SHARED = re.compile(r"(?:\bstatic\s+|\b(extern)\s+)?\b__shared__\b([^;]*);")
ALIGNED = re.compile(r"alignas\s*\(((?:[^()]|\([^()]*\))*)\)")
DECLARED = re.compile(r"\s*(.*?)\b(\w+)\s*((?:\[[^\]]*\]\s*)*)", re.DOTALL)


def _named(text: str) -> Iterator[str]:
    """The kernels in a preprocessed source, without templates."""
    for template, name in GLOBAL.findall(re.sub(r"^#.*$", "", text, flags=re.MULTILINE)):
        if not template:
            yield name


def _rewritten(text: str) -> str:
    """A preprocessed source without the two words that g++ lacks and no macro can stand for."""
    return re.sub(r"\b__global__\b", "", SHARED.sub(_shared, text))


def _shared(found: re.Match[str]) -> str:
    """For `__shared__ float a[4][5], b;` references to memory that the runtime keeps; for extern a pointer to it.

    The lambda gives each declaration a type of its own, and by its `&` fails to compile outside of functions.
    """
    extern, declaration = found.groups()
    aligned = ["0", *ALIGNED.findall(declaration)][-1]
    depth, parts = 0, [""]
    for letter in ALIGNED.sub("", declaration):
        depth += (letter in "[(<{") - (letter in "])>}")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    kind, result = "", ""
    for part in parts:
        declared = DECLARED.fullmatch(part)
        if declared is None:
            raise CompileError(f"not understood: {' '.join(found[0].split())}")
        kind = kind or declared[1].rstrip("* \n")
        name, sizes = declared[2], declared[3]
        own = kind + "*" * declared[1].count("*")
        if extern:
            result += f"{own}* const {name} = cpu::dynamic_shared<{own}>([&] {{}});"
        else:
            result += f'{own} (&{name}){sizes} = cpu::shared<{own}{sizes}, {aligned}>("{name}", [&] {{}});'
    return result


def _exported(number: int, name: str) -> str:
    kind = 'extern "C" __attribute__((visibility("default")))'
    return (
        f'\n# {number + 1} "kernels"\n'
        f"{kind} const cpu::Parameter* hla_parameters_{number}() {{ return cpu::Entry<{name}>::parameters(); }}"
        f"{kind} int hla_launch_{number}(void** a, const long long* g) {{ return cpu::Entry<{name}>::launch(a, g); }}"
    )


# ---- launching


@dataclass(frozen=True)
class Module:
    """The kernels of a file in one build."""

    source: Path
    build: str
    kernels: dict[str, Kernel]

    def kernel(self, name: str) -> Kernel:
        if name not in self.kernels:
            raise KeyError(f"{self.source.name} has no kernel {name!r}; it has {', '.join(self.kernels)}")
        return self.kernels[name]


class _Parameter(ctypes.Structure):
    _fields_ = (("type", ctypes.c_char_p), ("size", ctypes.c_int))


TYPES = {
    "float": "float32",
    "double": "float64",
    "__half": "float16",
    "__nv_bfloat16": "bfloat16",
    "bool": "bool",
    "char": "int8",
    "signed char": "int8",
    "short int": "int16",
    "int": "int32",
    "long int": "int64",
    "long long int": "int64",
    "unsigned char": "uint8",
    "short unsigned int": "uint16",
    "unsigned int": "uint32",
    "long unsigned int": "uint64",
    "long long unsigned int": "uint64",
}
"""As g++ spells a type, and as NumPy does. Other types are checked by their size, pointers to them not at all."""

_order = ["forward"]


@contextmanager
def order(name: str) -> Iterator[None]:
    """The order of launches that name none."""
    _order.append(name)
    try:
        yield
    finally:
        _order.pop()


class Kernel:
    """A kernel, launched as CuPy launches one: grid, block, arguments."""

    def __init__(self, library: Any, number: int, name: str, source: Path, build: str) -> None:
        self.name, self.source, self.build = name, source, build
        self._launch = getattr(library, f"hla_launch_{number}")
        self._message = library.hla_message
        self._message.restype = ctypes.c_char_p
        listed = getattr(library, f"hla_parameters_{number}")
        listed.restype = ctypes.POINTER(_Parameter)
        self.parameters = tuple(_parameters(listed()))
        """type and size of each"""

    def __call__(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: Sequence[Any],
        shared_bytes: int = 0,
        order: str | None = None,
        seed: int = 0,
    ) -> None:
        """Run it. For a pointer there is an array or None, for all else a scalar of the parameter's very type.

        A Python integer is 64 bits and a Python float a double, as for CuPy. Raises `KernelError`.
        """
        geometry = self._geometry(grid, block, shared_bytes)
        order = order or _order[-1]
        if order not in ORDERS:
            raise ValueError(f"order: expected one of {ORDERS}, got {order!r}")
        if len(args) != len(self.parameters):
            raise self._error(f"expected {len(self.parameters)} arguments, got {len(args)}")
        for i, argument in enumerate(args):
            self._check(i, argument)
        memory = _Memory(args, exact=self.build == "address")
        values = [
            ctypes.create_string_buffer(_bytes(argument, memory), size)
            for argument, (_, size) in zip(args, self.parameters, strict=True)
        ]
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        numbers = (ctypes.c_longlong * 9)(*geometry, ORDERS.index(order), seed)
        failed = self._launch(pointers, numbers)
        memory.copy_back()
        if failed or memory.trespass:
            raise self._error(self._message().decode() if failed else memory.trespass)

    def _error(self, text: str) -> KernelError:
        return KernelError(f"kernel {self.name} in {self.source.name}: {text}")

    def _geometry(self, grid: tuple[int, ...], block: tuple[int, ...], shared_bytes: int) -> list[int]:
        """What every GPU from compute capability 7.5 on takes, but for shared memory: that is what the largest has."""
        sizes = [*grid, *(1,) * (3 - len(grid)), *block, *(1,) * (3 - len(block)), shared_bytes]
        most = (2**31 - 1, 65_535, 65_535, 1024, 1024, 64, 232_448)
        words = ("grid x", "grid y", "grid z", "block x", "block y", "block z", "shared_bytes")
        for i, (word, size, limit) in enumerate(zip(words, sizes, most, strict=True)):
            if not int(i < 6) <= size <= limit:
                raise self._error(f"{word}: expected {int(i < 6)} to {limit}, got {size}")
        if sizes[3] * sizes[4] * sizes[5] > 1024:
            raise self._error(f"block: expected 1024 threads at most, got {sizes[3] * sizes[4] * sizes[5]}")
        return sizes

    def _check(self, i: int, argument: Any) -> None:
        kind, size = self.parameters[i]
        element = TYPES.get(kind.removesuffix("*").removeprefix("const ").strip())
        if kind.endswith("*"):
            fits = argument is None or (
                isinstance(argument, np.ndarray)
                and element in (None, argument.dtype.name)
                and (kind.startswith("const ") or argument.flags.writeable)
            )
        elif element:
            fits = not isinstance(argument, np.ndarray) and _scalar(argument).dtype.name == element
        else:
            fits = isinstance(argument, np.generic) and argument.itemsize == size
        if not fits:
            got = type(argument).__name__
            if isinstance(argument, np.ndarray):
                got = f"{'an' if argument.flags.writeable else 'a read-only'} array of {argument.dtype.name}"
            raise self._error(f"argument {i}: expected {kind}, got {got}")


def _parameters(listed: Any) -> Iterator[tuple[str, int]]:
    for entry in listed:
        if entry.type is None:
            return
        yield entry.type.decode().partition("[with T = ")[2].removesuffix("]"), entry.size


def _scalar(value: Any) -> np.generic:
    for kind, made in ((bool, np.bool_), (int, np.int64), (float, np.float64)):
        if type(value) is kind:
            return made(value)
    return value if isinstance(value, np.generic) else np.void(b"")


def _bytes(value: Any, memory: _Memory) -> bytes:
    if isinstance(value, np.ndarray) or value is None:
        value = np.uintp(0 if value is None else memory.address(value))
    return _scalar(value).tobytes()


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def _span(array: np.ndarray) -> tuple[int, int]:
    """The memory of a view, from its first byte to its last."""
    start = stop = _address(array)
    if array.size:
        reach = [(n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True)]
        start += sum(x for x in reach if x < 0)
        stop += sum(x for x in reach if x > 0) + array.itemsize
    return start, stop


class _Memory:
    """Copies of the arrays of a launch, each between margins of NaN, or exact, between the address sanitizer's own.

    Arrays that overlap stay together, and an address is as aligned as it was.
    """

    MARGIN = 1 << 16

    def __init__(self, args: Sequence[Any], exact: bool) -> None:
        arrays = {i: a for i, a in enumerate(args) if isinstance(a, np.ndarray)}
        self.margin = 0 if exact else self.MARGIN
        self.trespass = ""
        """after the launch, where it stored and should not have"""
        self.spans: list[list[int]] = []
        """the first and the last address of arrays that overlap"""
        for start, stop in sorted(map(_span, arrays.values())):
            if self.spans and start < self.spans[-1][1]:
                self.spans[-1][1] = max(stop, self.spans[-1][1])
            else:
                self.spans.append([start, stop])
        self.copies = {start: self._copy(start, stop) for start, stop in self.spans}
        self.owners: dict[int, list[int]] = {start: [] for start in self.copies}
        self.written = {self._start(a) for a in arrays.values() if a.flags.writeable}
        for i, array in arrays.items():
            self.owners[self._start(array)].append(i)

    def _start(self, array: np.ndarray) -> int:
        return max(start for start in self.copies if start <= _span(array)[0])

    def _copy(self, start: int, stop: int) -> np.ndarray:
        copy = np.full(self.margin + start % 16 + stop - start + self.margin, 0xFF, np.uint8)
        ctypes.memmove(_address(copy) + self.margin + start % 16, start, stop - start)
        self._mark("poison", copy, start % 16)
        return copy

    def _mark(self, how: str, copy: np.ndarray, size: int) -> None:
        """Tell the address sanitizer that nobody, or that anybody, may use the first bytes of a copy."""
        if not self.margin:
            mark = ctypes.CDLL(None)[f"__asan_{how}_memory_region"]
            mark(ctypes.c_void_p(_address(copy)), ctypes.c_size_t(size))

    def address(self, array: np.ndarray) -> int:
        """Where a kernel finds the array."""
        start = self._start(array)
        return _address(self.copies[start]) + self.margin + start % 16 + _address(array) - start

    def copy_back(self) -> None:
        """After the launch."""
        for start, stop in self.spans:
            copy, front = self.copies[start], start % 16
            self._mark("unpoison", copy, front)
            if start in self.written:
                ctypes.memmove(start, _address(copy) + self.margin + front, stop - start)
            before = np.flatnonzero(copy[: self.margin + front] != 0xFF)
            after = np.flatnonzero(copy[len(copy) - self.margin :] != 0xFF)
            which = " or ".join(f"argument {i}" for i in self.owners[start])
            if before.size and self.margin:
                self.trespass = f"a store {self.margin + front - int(before[-1])} bytes before the start of {which}"
            elif after.size:
                self.trespass = f"a store {int(after[0])} bytes past the end of {which}"


def in_every_order(
    kernel: Kernel, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any], shared_bytes: int = 0
) -> None:
    """Run it in every order from the same arguments; they hold the results, which must agree bit by bit.

    Where they do not, a barrier is missing, or blocks write over each other, and a `KernelError` says where it shows.
    Sums by atomicAdd on floating numbers depend on the order, and are not for this.
    """
    arrays = {i: a for i, a in enumerate(args) if isinstance(a, np.ndarray) and a.flags.writeable}
    before = {i: a.copy() for i, a in arrays.items()}
    first: dict[int, np.ndarray] = {}
    for name, seed in (("forward", 0), ("reverse", 0), ("shuffled", 1), ("shuffled", 2)):
        for i, a in arrays.items():
            a[...] = before[i]
        kernel(grid, block, args, shared_bytes, name, seed)
        for i, a in arrays.items():
            result = a.copy()
            expected = first.setdefault(i, result)
            differ = (_raw(result) != _raw(expected)).any(-1)
            if differ.any():
                where = tuple(int(k) for k in np.unravel_index(differ.argmax(), a.shape))
                raise kernel._error(
                    f"the result depends on the order of threads: argument {i} at {where} is {expected[where]} "
                    f"forward and {result[where]} {name}; {int(differ.sum())} of {a.size} elements differ"
                )


def _raw(array: np.ndarray) -> np.ndarray:
    return np.frombuffer(array.tobytes(), np.uint8).reshape(array.size, array.itemsize)


# ---- sanitizers


@dataclass(frozen=True)
class Fault:
    """What a sanitizer reports: the kind of fault, and the lines of .cu files that it names, "file.cu:12", in order."""

    kind: str
    places: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class Report:
    """How a call went: its faults, its result if it came to one, and all that was printed."""

    faults: tuple[Fault, ...]
    result: Any
    text: str


def sanitized(build: str, function: Callable[..., Any], *args: Any, timeout: float = 300) -> Report:
    """Call a module's function in a process of its own, where `compile` makes that build; arguments and result pickled.

    An exception there is raised here, unless there are faults: then they are what is reported.
    """
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer"
        request = pickle.dumps((sys.path, str(answer))) + pickle.dumps((function, args))
        command = _preloaded(build, [sys.executable, "-c", "from cuda import cpu; cpu._answer()"])
        done = subprocess.run(
            command, input=request, capture_output=True, env=_environment(build), timeout=timeout, check=False
        )
        text = (done.stdout + done.stderr).decode(errors="replace")
        faults = tuple(_faults(text))
        if faults:
            return Report(faults, None, text)
        if not answer.exists():
            raise RuntimeError(f"the process for {function.__qualname__} ended with {done.returncode}:\n{text}")
        result, error = pickle.loads(answer.read_bytes())
    if error is not None:
        raise error
    return Report(faults, result, text)


def _environment(build: str) -> dict[str, str]:
    path = [str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, **SETTINGS, "HLA_CUDA_BUILD": build, "PYTHONPATH": os.pathsep.join(path)}


def _preloaded(build: str, words: list[str]) -> list[str]:
    """The command that runs a command with the sanitizer's library loaded first.

    The thread sanitizer knows some layouts of memory only: where addresses are too random for it, they must be fixed.
    """
    libraries = [_gxx([f"-print-file-name={name}"], "", "g++").strip() for name in LIBRARIES[build]]
    preload = os.pathsep.join(str(Path(library).resolve()) for library in libraries)
    fixed = ["setarch", "--addr-no-randomize"]
    may = build == "thread" and shutil.which("setarch") and not subprocess.run([*fixed, "true"], check=False).returncode
    return [*(fixed if may else ()), "env", f"LD_PRELOAD={preload}", *words]


def _answer() -> None:
    """In the process of its own."""
    os.environ.pop("LD_PRELOAD", None)  # loaded by now; not for the processes that this one starts
    sys.path[:], path = pickle.load(sys.stdin.buffer)
    function, args = pickle.load(sys.stdin.buffer)
    outcome: tuple[Any, Any]
    try:
        outcome = function(*args), None
    except Exception as error:
        traceback.print_exc()
        outcome = None, error
    Path(path).write_bytes(pickle.dumps(outcome))


REPORTS = (
    re.compile(r"ERROR: AddressSanitizer: (?P<kind>\S+).*?(?=\nSUMMARY|\Z)", re.DOTALL),
    re.compile(r"\S+:\d+:\d+: runtime error: (?P<kind>[^\n]*).*?(?=\n\S+ runtime error: |\n=====|\Z)", re.DOTALL),
    re.compile(r"WARNING: ThreadSanitizer: (?P<kind>.*?) \(pid.*?(?=\n=====|\Z)", re.DOTALL),
)
PLACE = re.compile(r"([\w.+-]+\.cuh?:\d+)")


def _faults(text: str) -> Iterator[Fault]:
    for pattern in REPORTS:
        for found in pattern.finditer(text):
            yield Fault(found["kind"], tuple(dict.fromkeys(PLACE.findall(found[0]))), found[0])


if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[1] not in LIBRARIES:
        sys.exit(f"usage: python {sys.argv[0]} {{{','.join(LIBRARIES)}}} COMMAND ...")
    words = _preloaded(sys.argv[1], sys.argv[2:])
    os.execvpe(words[0], words, _environment(sys.argv[1]))

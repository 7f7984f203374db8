"""A stand-in for CuPy on machines without a GPU: its arrays are NumPy's, its kernels are run by cpu.py.

    with standin.install() as cupy:
        x = cupy.arange(6, dtype="float32")
        module = cupy.RawModule(code=text, options=("-DBLOCK=128",), name_expressions=("scale<float>",))
        module.get_function("scale<float>")((blocks,), (128,), (x, y, np.int32(6)), shared_mem=0)
        standin.launches[-1].grid

As CuPy does it: arrays do not become NumPy's by themselves, nor NumPy's arrays theirs, but for `asarray` and `array`,
which copy; results without axes are arrays; there are devices and a current one; a launch takes what CuPy takes, and
a grid of 0 blocks has one; more than 48 KiB of shared memory have to be asked for, and there is as much as the device
has; errors have CuPy's types, and most its words. What is not here and is in CuPy is an AttributeError.

What is stricter: sources are ASCII; arrays that `empty` made are NaN, or else far from zero; an argument of a kernel
has the very type of the parameter (cpu.py says more); whatever lies on another device than the current one is no
operand; broadcast arrays are not written to.

What differs: memory is the CPU's, and DLPack says so, both ways; work is done at once, so streams are names only; sums
and products are NumPy's.

Within `kernels_only()`, CuPy's own products and running sums are errors: what a backend should leave to its kernels.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import math
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import numpy as np

from cuda import cpu

VERSION = "14.2.0"
"""The CuPy that this stands in for."""
UNASKED = 48 * 1024
"""Bytes of shared memory that a block may have without having asked."""


class Launch(NamedTuple):
    """One launch, as it was asked for."""

    kernel: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared_mem: int


class Machine(NamedTuple):
    """The devices, all alike."""

    devices: int = 1
    compute_capability: str = "80"
    shared_memory: int = 166_912
    """bytes of a block, at most"""
    processors: int = 108


launches: list[Launch] = []
"""Since `install`."""
compilations: list[tuple[tuple[str, ...], tuple[str, ...]]] = []
"""Options and name expressions of every module that was compiled since `install`."""

_machine = Machine()
_guards = 0


class _Current(threading.local):
    device = 0
    stream = None


_current = _Current()


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


@contextmanager
def kernels_only() -> Iterator[None]:
    """Within, products and running sums outside of kernels are AssertionErrors."""
    global _guards
    _guards += 1
    try:
        yield
    finally:
        _guards -= 1


GUARDED = _names("matmul einsum dot vdot inner outer tensordot kron cumsum cumprod cumulative_sum cumulative_prod")


def _guard(name: str) -> None:
    if _guards and name in GUARDED:
        raise AssertionError(f"cupy.{name} was called, which is for a kernel to do")


# ---- errors


class CUDARuntimeError(RuntimeError):
    """Of the CUDA runtime, by number."""

    _messages: ClassVar = {
        35: "cudaErrorInsufficientDriver: CUDA driver version is insufficient for CUDA runtime version",
        100: "cudaErrorNoDevice: no CUDA-capable device is detected",
        101: "cudaErrorInvalidDevice: invalid device ordinal",
    }

    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(self._messages[status])


class CUDADriverError(RuntimeError):
    """Of the CUDA driver, by number."""

    _messages: ClassVar = {
        1: "CUDA_ERROR_INVALID_VALUE: invalid argument",
        500: "CUDA_ERROR_NOT_FOUND: named symbol not found",
        700: "CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered",
    }

    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(self._messages[status])


class CompileException(Exception):
    """What the compiler says."""

    def __init__(self, msg: str, source: str, name: str, options: tuple[str, ...], backend: str = "nvrtc") -> None:
        self._msg, self.source, self.name, self.options, self.backend = msg, source, name, options, backend
        super().__init__()

    def __str__(self) -> str:
        return self._msg

    def get_message(self) -> str:
        return self._msg


# ---- devices, streams and memory


class Device:
    """A GPU by number, and as a context the current one. It has no hash, as CuPy's has none."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, device: int | Device | None = None) -> None:
        self.id = _current.device if device is None else int(device)
        self._before: list[int] = []

    def __int__(self) -> int:
        return self.id

    def __eq__(self, other: object) -> bool:
        return self.id == other.id if isinstance(other, Device) else NotImplemented

    def __repr__(self) -> str:
        return f"<CUDA Device {self.id}>"

    def use(self) -> None:
        if not 0 <= self.id < _machine.devices:
            raise CUDARuntimeError(101)
        _current.device = self.id

    def __enter__(self) -> Device:
        before = _current.device
        self.use()
        self._before.append(before)
        return self

    def __exit__(self, *error: object) -> None:
        _current.device = self._before.pop()

    def synchronize(self) -> None:
        pass

    @property
    def compute_capability(self) -> str:
        return _machine.compute_capability

    @property
    def attributes(self) -> dict[str, int]:
        return {
            "ComputeCapabilityMajor": int(_machine.compute_capability[:-1]),
            "ComputeCapabilityMinor": int(_machine.compute_capability[-1]),
            "MaxSharedMemoryPerBlock": UNASKED,
            "MaxSharedMemoryPerBlockOptin": _machine.shared_memory,
            "MaxThreadsPerBlock": 1024,
            "MultiProcessorCount": _machine.processors,
            "WarpSize": 32,
        }


class Stream:
    """An order of work, which is done at once anyway."""

    null: ClassVar[Stream]

    def __init__(self, null: bool = False, non_blocking: bool = False, ptds: bool = False) -> None:
        self.ptr = 0 if null else id(self)
        self._before: list[Any] = []

    def use(self) -> Stream:
        _current.stream = self
        return self

    def __enter__(self) -> Stream:
        self._before.append(_current.stream)
        return self.use()

    def __exit__(self, *error: object) -> None:
        _current.stream = self._before.pop()

    def synchronize(self) -> None:
        pass


Stream.null = Stream(null=True)


class ExternalStream(Stream):
    """A stream of somebody else, by address."""

    def __init__(self, ptr: int, device_id: int = -1) -> None:
        super().__init__()
        self.ptr = ptr


def get_current_stream(device_id: int = -1) -> Stream:
    return _current.stream or Stream.null


class UnownedMemory:
    """Somebody else's memory."""

    def __init__(self, ptr: int, size: int, owner: object, device_id: int = -1) -> None:
        self.ptr, self.size, self.owner = ptr, size, owner
        self.device_id = _current.device if device_id < 0 else device_id


class MemoryPointer:
    """A place in memory."""

    def __init__(self, mem: Any, offset: int) -> None:
        self.mem, self.ptr, self.device_id = mem, mem.ptr + offset, mem.device_id

    @property
    def device(self) -> Device:
        return Device(self.device_id)


def _address(host: np.ndarray) -> int:
    return int(host.__array_interface__["data"][0])


def _at(
    address: int, shape: tuple[int, ...], dtype: np.dtype, strides: tuple[int, ...] | None, owner: object
) -> np.ndarray:
    """The NumPy array at an address, which keeps the memory's owner alive."""
    if 0 in shape:
        return np.empty(shape, dtype)
    if strides is None:
        strides = tuple(dtype.itemsize * math.prod(shape[i + 1 :]) for i in range(len(shape)))
    reach = [(n - 1) * step for n, step in zip(shape, strides, strict=True)]
    first = sum(x for x in reach if x < 0)
    memory = (ctypes.c_byte * (sum(abs(x) for x in reach) + dtype.itemsize)).from_address(address + first)
    memory.owner = owner
    return np.ndarray(shape, dtype, memory, -first, strides)


# ---- arrays


class Flags:
    """Of an array: how it lies in memory, and no more."""

    def __init__(self, host: np.ndarray) -> None:
        self.c_contiguous, self.f_contiguous = host.flags.c_contiguous, host.flags.f_contiguous
        self.owndata = host.base is None

    def __getitem__(self, name: str) -> bool:
        if name not in ("C_CONTIGUOUS", "F_CONTIGUOUS", "OWNDATA"):
            raise KeyError(f"{name} is not defined for cupy.ndarray.flags")
        return bool(getattr(self, name.lower()))


class ndarray:
    """CuPy's array, around one of NumPy."""

    __slots__ = ("__weakref__", "_device", "_host")
    __hash__ = None  # type: ignore[assignment]
    __array_priority__ = 100
    __module__ = "cupy"
    _host: np.ndarray
    _device: int

    def __init__(
        self,
        shape: int | tuple[int, ...],
        dtype: Any = float,
        memptr: MemoryPointer | None = None,
        strides: tuple[int, ...] | None = None,
        order: str = "C",
    ) -> None:
        self._device = _current.device if memptr is None else memptr.device_id
        if memptr is None:
            if strides is not None:
                raise ValueError("memptr is required if strides is given.")
            self._host = _poisoned(np.empty(shape, dtype, order))  # type: ignore[call-overload]
        else:
            shape = shape if isinstance(shape, tuple) else (shape,)
            self._host = _at(memptr.ptr, shape, np.dtype(dtype), strides, memptr)

    # memory

    shape = property(lambda self: self._host.shape)
    strides = property(lambda self: self._host.strides)
    dtype = property(lambda self: self._host.dtype)
    ndim = property(lambda self: self._host.ndim)
    size = property(lambda self: self._host.size)
    itemsize = property(lambda self: self._host.itemsize)
    nbytes = property(lambda self: self._host.nbytes)
    flags = property(lambda self: Flags(self._host))
    device = property(lambda self: Device(self._device))
    T = property(lambda self: self._view(self._host.T))
    real = property(lambda self: self._view(self._host.real))
    imag = property(lambda self: self._view(self._host.imag))

    @property
    def mT(self) -> ndarray:
        if self.ndim < 2:
            raise ValueError("matrix transpose with ndim < 2 is undefined")
        return self._view(self._host.swapaxes(-1, -2))

    @property
    def data(self) -> MemoryPointer:
        return MemoryPointer(UnownedMemory(_address(self._host), self.nbytes, self._host, self._device), 0)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "descr": self.dtype.descr,
            "stream": 1,
            "version": 3,
            "strides": None if self._host.flags.c_contiguous else self.strides,
            "data": (_address(self._host) if self.size else 0, False),
        }

    def __dlpack__(
        self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: Any = None
    ) -> Any:
        return self._host.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._host.__dlpack_device__()  # type: ignore[return-value]

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        raise TypeError(
            "Implicit conversion to a NumPy array is not allowed. Please use `.get()` to construct a NumPy array "
            "explicitly."
        )

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        return _namesake(ufunc)(*inputs, **options) if method == "__call__" else NotImplemented

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        return _namesake(function)(*args, **kwargs)

    def _view(self, host: np.ndarray) -> ndarray:
        return self if host is self._host else _wrap(host, self._device)

    def _here(self) -> np.ndarray:
        """What NumPy may compute with: it lies on the current device."""
        if self._device != _current.device:
            raise ValueError(
                f"The device where the array resides ({self._device}) is different from the current device "
                f"({_current.device}). Peer access is unavailable between these devices."
            )
        return self._host

    # to the host and back

    def get(self, stream: Any = None, order: str = "C", out: np.ndarray | None = None, blocking: bool = True) -> Any:
        if out is not None:
            out[...] = self._host
            return out
        return self._host.copy(order)  # type: ignore[arg-type]

    def set(self, arr: np.ndarray, stream: Any = None) -> None:
        if not isinstance(arr, np.ndarray):
            raise TypeError("Only numpy.ndarray can be set to cupy.ndarray")
        if arr.dtype != self.dtype or arr.shape != self.shape:
            raise ValueError(f"{arr.dtype}{arr.shape} array cannot be set to {self.dtype}{self.shape} array")
        self._host[...] = arr

    def item(self) -> Any:
        if self.size != 1:
            raise ValueError("can only convert an array of size 1 to a Python scalar")
        return self._host.item()

    def tolist(self) -> Any:
        return self._host.tolist()

    def tobytes(self, order: str = "C") -> bytes:
        return self._host.tobytes(order)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return bool(self._host)

    def __int__(self) -> int:
        return int(self.item())

    def __float__(self) -> float:
        return float(self.item())

    def __complex__(self) -> complex:
        return complex(self.item())

    def __repr__(self) -> str:
        return repr(self._host)

    def __str__(self) -> str:
        return str(self._host)

    # parts

    def __len__(self) -> int:
        return len(self._host)

    def __iter__(self) -> Iterator[ndarray]:
        if not self.ndim:
            raise TypeError("iteration over a 0-d array")
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: Any) -> ndarray:
        return _wrap(self._host[_index(index)], self._device)

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(value, np.ndarray):
            if value.ndim:
                raise ValueError("non-scalar numpy.ndarray cannot be used for fill")
            value = value[()]
        with np.errstate(all="ignore"):
            self._host[_index(index)] = _unwrapped(value)

    # methods that need more than NumPy's of that name

    def astype(
        self, dtype: Any, order: str = "K", casting: Any = None, subok: Any = None, copy: bool = True
    ) -> ndarray:
        with np.errstate(all="ignore"):
            return self._view(self._here().astype(dtype, order=order, copy=copy))  # type: ignore[call-overload]

    def copy(self, order: str = "C") -> ndarray:
        return _wrap(self._host.copy(order))  # type: ignore[arg-type]

    __copy__ = copy

    def __deepcopy__(self, memo: Any) -> ndarray:
        return self.copy()

    def view(self, dtype: Any = None) -> ndarray:
        return self._view(self._host.view() if dtype is None else self._host.view(dtype))

    def fill(self, value: Any) -> None:
        self[...] = value


def _wrap(host: np.ndarray, device: int | None = None) -> ndarray:
    made = ndarray.__new__(ndarray)
    made._host, made._device = host, _current.device if device is None else device
    return made


def _poisoned(host: np.ndarray) -> np.ndarray:
    """New memory with what nobody takes for a result."""
    if host.dtype.kind in "iu":
        limits = np.iinfo(host.dtype)
        host.fill(limits.min or limits.max)
    elif host.dtype.kind != "b":
        host.fill(np.nan)
    return host


def _index(index: Any) -> tuple[Any, ...]:
    """For NumPy, and so that it makes a view, not a scalar, of a single element."""
    parts = index if isinstance(index, tuple) else (index,)
    parts = tuple(x._host if isinstance(x, ndarray) else x for x in parts)
    return parts if any(x is Ellipsis for x in parts) else (*parts, Ellipsis)


def _unwrapped(x: Any) -> Any:
    """An argument for NumPy."""
    if isinstance(x, ndarray):
        return x._here()
    if isinstance(x, np.ndarray):
        raise TypeError(f"Unsupported type {type(x)}")
    if type(x) in (list, tuple):
        return type(x)(_unwrapped(y) for y in x)
    return x


def _wrapped(result: Any, given: Sequence[Any]) -> Any:
    """A result of NumPy's: arrays without axes instead of scalars, and an argument that comes back as it was."""
    if isinstance(result, (np.ndarray, np.generic)):
        for x in given:
            if isinstance(x, ndarray) and x._host is result:
                return x
        return _wrap(np.asarray(result))
    if isinstance(result, tuple) and hasattr(result, "_fields"):
        return type(result)(*(_wrapped(x, given) for x in result))
    if isinstance(result, (list, tuple)):
        return type(result)(_wrapped(x, given) for x in result)
    return result


def _computed(function: Callable[..., Any], name: str, args: Sequence[Any], options: dict[str, Any]) -> Any:
    _guard(name)
    with np.errstate(all="ignore"):
        result = function(*map(_unwrapped, args), **{key: _unwrapped(x) for key, x in options.items()})
    return _wrapped(result, (*args, *options.values()))


def _method(name: str) -> Callable[..., Any]:
    function = getattr(np.ndarray, name)

    def method(self: ndarray, *args: Any, **options: Any) -> Any:
        return _computed(function, name, (self, *args), options)

    method.__name__ = name
    return method


def _view_method(name: str) -> Callable[..., Any]:
    function = getattr(np.ndarray, name)

    def method(self: ndarray, *args: Any, **options: Any) -> ndarray:
        return self._view(function(self._host, *args, **options))

    method.__name__ = name
    return method


METHODS = _names(
    """
    all any argmax argmin argsort clip conj cumprod cumsum dot flatten max mean min nonzero prod repeat round
    searchsorted sort std sum take trace var
    """
)
VIEWS = _names("diagonal ravel reshape squeeze swapaxes transpose")
SCALARS = (bool, int, float, complex, np.generic)
BINARY = {
    "add": "add", "sub": "subtract", "mul": "multiply", "truediv": "true_divide", "floordiv": "floor_divide",
    "mod": "remainder", "pow": "power", "divmod": "divmod", "matmul": "matmul", "and": "bitwise_and",
    "or": "bitwise_or", "xor": "bitwise_xor", "lshift": "left_shift", "rshift": "right_shift",
}  # fmt: skip
NOT_IN_PLACE = ("divmod", "matmul")
COMPARISONS = {
    "lt": "less", "le": "less_equal", "eq": "equal", "ne": "not_equal", "gt": "greater", "ge": "greater_equal",
}  # fmt: skip
UNARY = {"neg": "negative", "pos": "positive", "abs": "absolute", "invert": "invert"}


def _binary(name: str, *, swapped: bool = False, inplace: bool = False) -> Callable[..., Any]:
    ufunc = getattr(np, name)

    def operator(self: ndarray, other: Any) -> Any:
        if getattr(other, "__array_ufunc__", self) is None:
            return NotImplemented
        if not isinstance(other, (ndarray, *SCALARS)):
            raise TypeError(f"Unsupported type {type(other)}")
        pair = (other, self) if swapped else (self, other)
        return _computed(ufunc, name, pair, {"out": self} if inplace else {})

    return operator


def _unary(name: str) -> Callable[..., Any]:
    ufunc = getattr(np, name)

    def operator(self: ndarray) -> Any:
        return _computed(ufunc, name, (self,), {})

    return operator


def _complete() -> None:
    for name in METHODS:
        setattr(ndarray, name, _method(name))
    for name in VIEWS:
        setattr(ndarray, name, _view_method(name))
    for name, ufunc in (BINARY | COMPARISONS).items():
        setattr(ndarray, f"__{name}__", _binary(ufunc))
    for name, ufunc in BINARY.items():
        setattr(ndarray, f"__r{name}__", _binary(ufunc, swapped=True))
        if name not in NOT_IN_PLACE:
            setattr(ndarray, f"__i{name}__", _binary(ufunc, inplace=True))
    for name, ufunc in UNARY.items():
        setattr(ndarray, f"__{name}__", _unary(ufunc))


_complete()


# ---- functions


def array(
    obj: Any,
    dtype: Any = None,
    copy: bool | None = True,
    order: str = "K",
    subok: bool = False,
    ndmin: int = 0,
    *,
    blocking: bool = False,
) -> ndarray:
    """An array of anything, on the current device; of another library's CUDA array the same memory, unless copied."""
    if isinstance(obj, ndarray):
        here = obj._device == _current.device
        made = obj if here else _wrap(obj._host.copy())
        made = made if dtype is None else made.astype(dtype, copy=False)
        made = made.copy() if copy and made is obj else made
    elif (interface := getattr(obj, "__cuda_array_interface__", None)) is not None:
        if interface.get("mask") is not None:
            raise ValueError("CuPy currently does not support masked arrays")
        address, kind = interface["data"][0], np.dtype(interface["typestr"])
        made = _wrap(_at(address, tuple(interface["shape"]), kind, interface.get("strides"), obj))
        made = made if dtype is None else made.astype(dtype, copy=False)
        made = made.copy() if copy else made
    else:
        made = _wrap(np.array(_gathered(obj), dtype))
    if order in ("C", "F"):
        made = made._view(np.asarray(made._host, order=order))  # type: ignore[call-overload]
    return made if made.ndim >= ndmin else made.reshape((1,) * (ndmin - made.ndim) + made.shape)


def _gathered(obj: Any) -> Any:
    """A nest of lists whose arrays are NumPy's."""
    if isinstance(obj, (list, tuple)):
        return [_gathered(x) for x in obj]
    return obj._here() if isinstance(obj, ndarray) else obj


def asarray(
    a: Any, dtype: Any = None, order: str | None = None, *, copy: bool | None = None, blocking: bool = False
) -> ndarray:
    return array(a, dtype, copy=bool(copy), order=order or "K")


def empty(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    return ndarray(shape, dtype, order=order)


def empty_like(
    prototype: ndarray, dtype: Any = None, order: str = "K", subok: Any = None, shape: Any = None
) -> ndarray:
    return _wrap(_poisoned(np.empty_like(_unwrapped(prototype), dtype, order, shape=shape)))  # type: ignore[call-overload]


def asnumpy(
    a: Any, stream: Any = None, order: str = "C", out: np.ndarray | None = None, *, blocking: bool = True
) -> np.ndarray:
    if isinstance(a, ndarray):
        return a.get(order=order, out=out)  # type: ignore[no-any-return]
    return np.asarray(a)


def get_array_module(*args: Any) -> ModuleType:
    return sys.modules["cupy" if any(isinstance(x, ndarray) for x in args) else "numpy"]


class _DLTensor(ctypes.Structure):
    """What a capsule of DLPack points to."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


KINDS = {0: "int", 1: "uint", 2: "float", 5: "complex"}


def from_dlpack(array: Any, *, device: Any = None, copy: bool | None = None) -> ndarray:
    """The array in another library's memory, which is the CPU's where CuPy's would be a GPU's."""
    if array.__dlpack_device__()[0] != 1:
        raise TypeError(f"Unsupported array type: {array.__dlpack_device__()[0]}")
    capsule = array.__dlpack__()
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    tensor = _DLTensor.from_address(pointer(capsule, b"dltensor"))
    if tensor.code == 4:
        dtype = np.dtype(importlib.import_module("ml_dtypes").bfloat16)
    else:
        dtype = np.dtype(bool if tensor.code == 6 else f"{KINDS[tensor.code]}{tensor.bits}")
    shape = tuple(tensor.shape[: tensor.ndim])
    strides = tuple(n * dtype.itemsize for n in tensor.strides[: tensor.ndim]) if tensor.strides else None
    made = _wrap(_at((tensor.data or 0) + tensor.byte_offset, shape, dtype, strides, capsule))
    return made.copy() if copy else made


TYPES = _names(
    """
    bool_ int8 int16 int32 int64 uint8 uint16 uint32 uint64 intp int_ float16 float32 float64 complex64 complex128
    generic number integer signedinteger unsignedinteger inexact floating complexfloating dtype finfo iinfo pi e
    inf nan newaxis
    """
)
ABOUT = _names(
    """
    result_type promote_types can_cast issubdtype isdtype min_scalar_type isscalar ndim size shape
    broadcast_shapes may_share_memory shares_memory iscomplexobj isrealobj
    """
)
"""Functions whose results are no arrays."""
# element by element, along axes, products, shapes, order and choice, made of numbers
FUNCTIONS = _names(
    """
    abs absolute add arccos arccosh arcsin arcsinh arctan arctan2 arctanh bitwise_and bitwise_or bitwise_xor cbrt ceil
    clip conj conjugate copysign cos cosh divide divmod equal exp exp2 expm1 fabs floor floor_divide fmax fmin fmod
    frexp greater greater_equal hypot imag invert isclose isfinite isinf isnan ldexp left_shift less less_equal log
    log10 log1p log2 logaddexp logaddexp2 logical_and logical_not logical_or logical_xor maximum minimum mod multiply
    nan_to_num negative nextafter not_equal positive power real reciprocal remainder right_shift rint round sign
    signbit sin sinh sqrt square subtract tan tanh true_divide trunc where

    all allclose amax amin any argmax argmin array_equal average count_nonzero cumprod cumsum cumulative_prod
    cumulative_sum diff max mean median min nanmax nanmin nansum prod std sum var

    cross dot einsum inner kron matmul outer tensordot trace vdot

    append array_split ascontiguousarray asfortranarray atleast_1d atleast_2d broadcast_arrays broadcast_to concatenate
    copy copyto diagonal expand_dims flip hstack matrix_transpose meshgrid moveaxis pad ravel repeat reshape roll
    rollaxis split squeeze stack swapaxes tile transpose vstack

    argsort argwhere choose compress extract flatnonzero isin nonzero put_along_axis searchsorted sort take
    take_along_axis unique

    arange diag eye full full_like identity indices linspace logspace ones ones_like tri tril tril_indices triu
    triu_indices zeros zeros_like
    """
)
LINALG = _names(
    """
    cholesky cond det eigh eigvalsh inv lstsq matrix_power matrix_rank norm pinv qr slogdet solve svd
    """
)
FFT = _names(
    """
    fft fftfreq fftn fftshift hfft ifft ifftn ifftshift ihfft irfft irfftn rfft rfftfreq rfftn
    """
)


def _function(name: str, of: Any = np) -> Callable[..., Any]:
    original = getattr(of, name)

    def function(*args: Any, **options: Any) -> Any:
        return _computed(original, name, args, options)

    def about(*args: Any, **options: Any) -> Any:
        return original(*map(_unwrapped, args), **options)

    made = about if of is np and name in ABOUT else function
    made.__name__ = name
    made.__doc__ = f"NumPy's {name} on CuPy's arrays."
    return made


def _namesake(function: Any) -> Callable[..., Any]:
    """CuPy's own function for one of NumPy that was called on its arrays."""
    own = getattr(sys.modules.get("cupy"), function.__name__, None)
    if own is None:
        raise TypeError(f"no implementation found for {function.__name__} on types that implement __array_function__")
    return own  # type: ignore[no-any-return]


# ---- kernels


def _passed(x: Any, kind: str) -> Any:
    """An argument of a launch as cpu.py takes it: an array or None for a pointer, or else a NumPy scalar.

    CuPy's rules: numbers of Python have 64 bits, and a NumPy array of one element is passed by value, as a structure.
    """
    if x is None:
        return None
    if isinstance(x, ndarray):
        if x._device != _current.device:
            raise CUDADriverError(700)
        return x._host
    if isinstance(x, np.ndarray):
        if x.size != 1:
            raise TypeError(
                f"You are trying to pass a numpy.ndarray of shape {x.shape} as a kernel parameter. Only numpy.ndarrays "
                "of size one can be passed by value. If you meant to pass a pointer to __global__ memory, you need to "
                "pass a cupy.ndarray instead."
            )
        x = x.reshape(())[()]
        if kind in cpu.TYPES or x.dtype.kind == "V":
            return x
        return np.void(x.tobytes())
    for python, numpy in ((bool, np.bool_), (int, np.int64), (float, np.float64), (complex, np.complex128)):
        if type(x) is python:
            return numpy(x)
    if not isinstance(x, np.generic):
        raise TypeError(f"Unsupported type {type(x)}")
    return x


IGNORED = _names(
    """
    -std --std -lineinfo --generate-line-info -w --disable-warnings --use_fast_math -use_fast_math -fmad --fmad
    -maxrregcount --maxrregcount -ptxas-options --ptxas-options -diag-suppress --diag-suppress
    """
)
"""Options of NVRTC that mean nothing here."""


class _Options(NamedTuple):
    """What they mean to cpu.py."""

    macros: dict[str, str]
    include: tuple[Path, ...]

    @classmethod
    def of(cls, options: tuple[str, ...]) -> _Options:
        macros: dict[str, str] = {}
        include: list[Path] = []
        rest = list(options)
        while rest:
            option = rest.pop(0)
            if option in ("-D", "--define-macro", "-I", "--include-path"):
                option += "=" + rest.pop(0) if option.startswith("--") else rest.pop(0)
            name, _, value = option.partition("=")
            if name.startswith("-D") or name == "--define-macro":
                text = value if name == "--define-macro" else option[2:]
                macro, given, number = text.partition("=")
                macros[macro] = number if given else "1"
            elif name.startswith("-I") or name == "--include-path":
                include.append(Path(value if name == "--include-path" else option[2:]))
            elif name not in IGNORED:
                raise cpu.CompileError(f"nvrtc: error: unrecognized option {option} found")
        return cls(macros, tuple(include))


class RawModule:
    """Kernels of a source, compiled when the first is asked for. `backend` and the like are taken and mean nothing."""

    def __init__(
        self,
        code: str | None = None,
        *,
        path: str | None = None,
        options: tuple[str, ...] = (),
        backend: str = "nvrtc",
        translate_cucomplex: bool = False,
        enable_cooperative_groups: bool = False,
        name_expressions: Sequence[str] | None = None,
        jitify: Any = None,
    ) -> None:
        if (code is None) == (path is None):
            raise TypeError("Exactly one of `code` and `path` keyword arguments must be given.")
        if type(options) is not tuple:
            raise TypeError(f"Argument 'options' has incorrect type (expected tuple, got {type(options).__name__})")
        if code is None:
            raise NotImplementedError("the stand-in has no compiled modules")
        self.code, self.options, self.backend = code, options, backend
        self.name_expressions = None if name_expressions is None else tuple(name_expressions)
        self._kernels: dict[str, RawKernel] = {}

    @functools.cached_property
    def module(self) -> cpu.Module:
        """The file that it is compiled from has its content in its name: cpu.py reads a file once."""
        folder = cpu.CACHE / "sources"
        folder.mkdir(parents=True, exist_ok=True)
        source = folder / f"module-{hashlib.sha256(self.code.encode()).hexdigest()[:24]}.cu"
        if not source.exists():
            beside = source.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
            beside.write_text(self.code, encoding="ascii")  # CuPy writes it in the encoding of the locale
            beside.replace(source)
        compilations.append((self.options, self.name_expressions or ()))
        try:
            macros, include = _Options.of(self.options)
            return cpu.compile(source, kernels=self.name_expressions or (), macros=macros, include=include)
        except cpu.CompileError as error:
            raise CompileException(str(error), self.code, source.name, self.options) from None

    def compile(self, log_stream: Any = None) -> None:
        _ = self.module

    def get_function(self, name: str) -> RawKernel:
        """A kernel: by an expression that was given before, or else by a name that C++ did not change."""
        if name not in self._kernels:
            if self.module.kernels.get(name) is None or (self.name_expressions is None and not _is_c(self.code, name)):
                raise CUDADriverError(500)
            self._kernels[name] = RawKernel._of(self, name)
        return self._kernels[name]


def _is_c(code: str, name: str) -> bool:
    """Whether the source declares the kernel to be of C, alone or in a block."""
    alone = re.search(rf'extern\s*"C"\s*(__global__\b[^;{{}}]*?)\b{re.escape(name)}\s*\(', code)
    return bool(alone) or re.search(r'extern\s*"C"\s*\{', code) is not None


class RawKernel:
    """A kernel that can be launched."""

    def __init__(self, code: str, name: str, options: tuple[str, ...] = (), backend: str = "nvrtc") -> None:
        self._set(RawModule(code=code, options=options, backend=backend), name)

    @classmethod
    def _of(cls, module: RawModule, name: str) -> RawKernel:
        made = cls.__new__(cls)
        made._set(module, name)
        return made

    def _set(self, module: RawModule, name: str) -> None:
        self._module, self.name, self.__name__ = module, name, name
        self.code, self.options = module.code, module.options
        self._allowed = UNASKED

    @property
    def kernel(self) -> cpu.Kernel:
        if self.name not in self._module.module.kernels:
            raise CUDADriverError(500)
        return self._module.module.kernel(self.name)

    @property
    def max_threads_per_block(self) -> int:
        return 1024

    @property
    def max_dynamic_shared_size_bytes(self) -> int:
        return self._allowed

    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, size: int) -> None:
        if not 0 <= size <= _machine.shared_memory:
            raise CUDADriverError(1)
        self._allowed = size

    def __call__(
        self,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        args: Sequence[Any],
        *,
        shared_mem: int = 0,
        stream: Any = None,
        enable_cooperative_groups: bool = False,
    ) -> None:
        for word, value in (("grid", grid), ("block", block)):
            if type(value) is not tuple:
                raise TypeError(f"Argument '{word}' has incorrect type (expected tuple, got {type(value).__name__})")
        kernel = self.kernel
        if not 0 <= shared_mem <= self._allowed:
            raise CUDADriverError(1)
        kinds = [kind for kind, _ in kernel.parameters]
        if len(args) == len(kinds):  # or else cpu.py says so
            args = [_passed(x, kind) for x, kind in zip(args, kinds, strict=True)]
        launches.append(Launch(self.name, grid, block, shared_mem))
        wide, high = (tuple(max(1, n) for n in (*given, 1, 1)[:3]) for given in (grid, block))
        kernel(wide, high, tuple(args), shared_bytes=shared_mem)


# ---- the module


def _device_count() -> int:
    if not _machine.devices:
        raise CUDARuntimeError(100)
    return _machine.devices


def _set_device(number: int) -> None:
    Device(number).use()


def _properties(number: int) -> dict[str, Any]:
    attributes = Device(number).attributes
    return {
        "name": b"a stand-in",
        "major": attributes["ComputeCapabilityMajor"],
        "minor": attributes["ComputeCapabilityMinor"],
        "multiProcessorCount": _machine.processors,
        "sharedMemPerBlock": UNASKED,
        "sharedMemPerBlockOptin": _machine.shared_memory,
    }


def _module(name: str, content: dict[str, Any], package: bool = False) -> ModuleType:
    made = ModuleType(name, f"A stand-in for {name}.")
    made.__spec__ = ModuleSpec(name, None, is_package=package)
    if package:
        made.__path__ = []
    made.__dict__.update(content)
    return made


def modules() -> dict[str, ModuleType]:
    """CuPy and its submodules, by name. `cuda.driver` cannot be imported, as with CuPy, but is there."""
    runtime = _module(
        "cupy.cuda.runtime",
        {
            "CUDARuntimeError": CUDARuntimeError, "getDeviceCount": _device_count, "setDevice": _set_device,
            "getDevice": lambda: _current.device, "getDeviceProperties": _properties, "deviceSynchronize": lambda: None,
            "runtimeGetVersion": lambda: 12_090, "driverGetVersion": lambda: 12_090, "is_hip": False,
        },
    )  # fmt: skip
    driver = _module("cupy_backends.cuda.api.driver", {"CUDADriverError": CUDADriverError})
    compiler = _module("cupy.cuda.compiler", {"CompileException": CompileException})
    device = _module("cupy.cuda.device", {"Device": Device})
    cuda = _module(
        "cupy.cuda",
        {
            "runtime": runtime, "driver": driver, "compiler": compiler, "device": device, "Device": Device,
            "is_available": lambda: _machine.devices > 0, "get_device_id": lambda: _current.device, "Stream": Stream,
            "ExternalStream": ExternalStream, "get_current_stream": get_current_stream, "MemoryPointer": MemoryPointer,
            "UnownedMemory": UnownedMemory,
        },
        package=True,
    )  # fmt: skip
    functions = {name: _function(name) for name in (*ABOUT, *FUNCTIONS) if hasattr(np, name)}
    linalg = {name: _function(name, np.linalg) for name in LINALG}
    linalg |= {"LinAlgError": np.linalg.LinAlgError, "matmul": functions["matmul"]}
    fft = {name: _function(name, np.fft) for name in FFT}
    content = {
        **{name: getattr(np, name) for name in TYPES},
        **functions,
        **{x.__name__: x for x in (array, asarray, empty, empty_like, asnumpy, get_array_module, from_dlpack)},
        **{x.__name__: x for x in (ndarray, RawModule, RawKernel)},
        "bool": np.bool_,
        "asanyarray": asarray,
        "ufunc": np.ufunc,
        "is_available": cuda.is_available,
        "cuda": cuda,
        "__version__": VERSION,
        "linalg": _module("cupy.linalg", linalg),
        "fft": _module("cupy.fft", fft),
    }
    found = [_module("cupy", content, package=True), cuda, runtime, compiler, device]
    return {module.__name__: module for module in (*found, content["linalg"], content["fft"])}


def _of_cupy(name: str) -> bool:
    return name.startswith(("cupy.", "array_api_compat.cupy.")) or name in ("cupy", "array_api_compat.cupy")


def _forget() -> None:
    """What others remember of CuPy, or of its absence."""
    import array_api_compat

    from hla import arrays
    from hla.backends import registry, selection

    helpers = [sys.modules["array_api_compat.common._helpers"]]
    own = [module for name, module in sys.modules.items() if name.startswith("hla.backends.cupy") and module]
    for module in (*helpers, *own):
        for value in list(vars(module).values()):
            if hasattr(value, "cache_clear"):
                value.cache_clear()
    for module in own:
        vars(module).get("_kernels", {}).clear()
    arrays._namespaces.clear()
    if "cupy" in registry.registered():
        registry.get("cupy")._memo.clear()
    selection._choices.clear()
    for name in [name for name in sys.modules if _of_cupy(name)]:
        del sys.modules[name]
    vars(array_api_compat).pop("cupy", None)


@contextmanager
def install(**machine: Any) -> Iterator[Any]:
    """CuPy, for whoever imports it within; see `Machine` for what the devices can be told to be.

    No array of it lives on afterwards.
    """
    global _machine
    before = {name: module for name, module in sys.modules.items() if _of_cupy(name)}
    settings, _machine = _machine, Machine(**machine)
    _forget()
    launches.clear()
    compilations.clear()
    sys.modules.update(modules())
    try:
        yield sys.modules["cupy"]
    finally:
        _forget()
        sys.modules.update(before)
        if "array_api_compat.cupy" in before:
            vars(sys.modules["array_api_compat"])["cupy"] = before["array_api_compat.cupy"]
        _machine, _current.device, _current.stream = settings, 0, None

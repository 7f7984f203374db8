"""Arrays of other libraries as CuPy's, and back: the same memory, through DLPack."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hla.arrays import Array, dtype_name, family, is_array, loaded
from hla.backends.cupy.launch import cupy
from hla.errors import DTypeError, message


def take(x: Array) -> Array:
    """A CuPy array in the memory of another library's array. bfloat16 travels as 16 bits."""
    library = family(x)
    if library == "torch":
        torch: Any = loaded("torch")
        x = x.detach()
        if x.dtype == torch.bfloat16:
            return cupy().from_dlpack(x.view(torch.int16)).view(_bfloat16())
        if x.dtype == torch.bool:
            return cupy().from_dlpack(x.view(torch.uint8)).view("bool")
    elif dtype_name(x.dtype) == "bfloat16":
        raise DTypeError(
            message("q, k, v", "float16, float32 or float64 from JAX", "bfloat16, which it has no view of as 16 bits",
                    'Convert them, or use backend="jax".')
        )  # fmt: skip
    return cupy().from_dlpack(x)


@contextmanager
def stream_of(x: Array) -> Iterator[None]:
    """CuPy's current device and stream are those of another library's array within: so that its own work and the
    kernels stay in order, and are captured together."""
    torch: Any = loaded("torch")
    if family(x) != "torch" or not x.is_cuda:
        yield
        return
    with cupy().cuda.Device(x.device.index), _stream(torch.cuda.current_stream(x.device), x.device.index):
        yield


def _stream(stream: Any, index: int) -> Any:
    own = cupy().cuda
    if hasattr(own.Stream, "from_external") and hasattr(stream, "__cuda_stream__"):
        return own.Stream.from_external(stream)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return own.ExternalStream(stream.cuda_stream, index)


def back_to(like: Array) -> Callable[[Array], Array]:
    """From a CuPy array to one of the library of `like`, in the same memory."""
    library = family(like)
    if library == "torch":
        return _to_torch
    jax: Any = loaded("jax")
    return lambda x: jax.dlpack.from_dlpack(cupy().ascontiguousarray(x))


def take_guest(x: Any) -> Any:
    """A CuPy array in the memory of an object that is no array, but has `__cuda_array_interface__`."""
    return cupy().asarray(x) if hasattr(x, "__cuda_array_interface__") and not is_array(x) else x


def back_to_guest(like: Any) -> Callable[[Array], Any]:
    """From a CuPy array to what the caller's library makes of it: Numba's device array; for others it stays."""
    if type(like).__module__.partition(".")[0] != "numba":
        return lambda x: x
    numba: Any = loaded("numba")
    waits = bool(cupy().cuda.get_current_stream().ptr)  # Numba works on the default stream
    return lambda x: numba.cuda.as_cuda_array(x, sync=waits)


def _to_torch(x: Array) -> Array:
    torch: Any = loaded("torch")
    if dtype_name(x.dtype) == "bfloat16":
        return torch.from_dlpack(x.view("int16")).view(torch.bfloat16)
    return torch.from_dlpack(x)


def _bfloat16() -> Any:
    import ml_dtypes

    return ml_dtypes.bfloat16

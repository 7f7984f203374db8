"""The one place that knows how array libraries differ.

Everything else in the core is written in the Array API standard and gets its namespace, `xp`, passed in.
Importing this module imports no array framework: `array_api_compat` looks at ``sys.modules`` only.
"""

from __future__ import annotations

import numbers
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any, TypeAlias

import array_api_compat

from hla.errors import DTypeError, MixedArrayError, message

Array: TypeAlias = Any
"""An array of any library with an Array API namespace."""
Namespace: TypeAlias = Any
"""The Array API namespace of a library, by convention called `xp`."""
DType: TypeAlias = Any
Device: TypeAlias = Any

FLOATING = ("float16", "bfloat16", "float32", "float64")
INTEGER = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")

_UNCHANGED = nullcontext()
_namespaces: dict[type, tuple[Namespace, str]] = {}
_dtype_names: dict[Any, str] = {}


def _is_refused_subclass(x: Any) -> bool:
    """np.matrix multiplies differently and masked arrays drop their mask in matmul: both would be silently wrong."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(x, (numpy.matrix, numpy.ma.MaskedArray))


def _lookup(x: Any, argument: str) -> tuple[Namespace, str]:
    kind = type(x)
    found = _namespaces.get(kind)
    if found is not None:
        return found
    if _is_refused_subclass(x):
        raise DTypeError(
            message(
                argument, "a plain array", f"{kind.__module__}.{kind.__qualname__}", "Pass numpy.asarray(...) of it."
            )
        )
    xp: Namespace
    try:
        xp = array_api_compat.array_namespace(x, use_compat=None)
    except TypeError:
        raise DTypeError(
            message(
                argument,
                "an array of NumPy, PyTorch, JAX, CuPy or another library with an Array API namespace",
                f"{kind.__module__}.{kind.__qualname__}",
                "Convert it first, e.g. numpy.asarray(..., dtype=numpy.float32).",
            )
        ) from None
    if kind.__module__.partition(".")[0] == "numpy" and not hasattr(x, "shape"):
        raise DTypeError(message(argument, "an array", repr(x), "Pass an array."))
    plain: Namespace = loaded("numpy")
    if _family(xp) == "numpy" and hasattr(plain, "cumulative_sum"):
        xp = plain  # since 2.1 NumPy is the standard itself; the compatibility layer costs a microsecond a call
    found = _namespaces[kind] = (xp, _family(xp))
    return found


def _family(xp: Namespace) -> str:
    name: str = xp.__name__
    return name.removeprefix("array_api_compat.").partition(".")[0]


def namespace(x: Any, argument: str = "array") -> Namespace:
    """The Array API namespace of `x`; DTypeError when it has none or is a kind of array that is refused."""
    return _lookup(x, argument)[0]


def family(x: Any) -> str:
    """The library of `x` by name: "numpy", "torch", "jax", "cupy", "array_api_strict", …"""
    return _lookup(x, "array")[1]


def is_array(x: Any) -> bool:
    """Whether `x` belongs to a library with an Array API namespace (Python and NumPy scalars do not count)."""
    if isinstance(x, (bool, int, float, complex, str, list, tuple, type(None))):
        return False
    return type(x) in _namespaces or (hasattr(x, "shape") and array_api_compat.is_array_api_obj(x))


def dtype_name(dtype: DType) -> str:
    """`dtype` by its common name, for every library ("float32" for ``torch.float32`` too)."""
    key = (type(dtype), dtype)  # array-api-strict's dtypes hash like NumPy's, and warn when compared with them
    name = _dtype_names.get(key)
    if name is None:
        if isinstance(dtype, type):  # NumPy's dtypes are also spelled as classes
            name = dtype.__name__
        else:
            name = getattr(dtype, "name", None) or str(dtype).rpartition(".")[2]
        _dtype_names[key] = name
    return name


def device(x: Array) -> Device:
    """The device of `x`, or None where it has none to speak of (under a JAX transformation)."""
    library = family(x)
    if library == "numpy" or (library == "jax" and is_traced(x)):
        return None
    return x.device if library == "torch" else array_api_compat.device(x)


def beside(x: Array) -> dict[str, Device]:
    """Keyword arguments that put a new array on the device of `x`."""
    where = device(x)
    return {} if where is None else {"device": where}


def same_library_and_device(reference: Array, argument: str, **others: Array) -> None:
    """MixedArrayError unless all arrays are of one library and, where both are known, on one device."""
    library = family(reference)
    where = device(reference)
    for name, x in others.items():
        if _lookup(x, name)[1] != library:
            raise MixedArrayError(
                message(
                    name,
                    f"an array of the same library as {argument} ({library})",
                    family(x),
                    f"Convert one of them, e.g. through DLPack: {library}'s from_dlpack({name}).",
                )
            )
        if where is None:
            continue
        elsewhere = device(x)
        if elsewhere is not None and elsewhere != where:
            raise MixedArrayError(
                message(
                    name, f"an array on the device of {argument} ({where})", f"{elsewhere}", f"Move {name} to {where}."
                )
            )


def is_integer(x: Any) -> bool:
    """Whether `x` is an integer of Python or NumPy; a bool is none."""
    return isinstance(x, numbers.Integral) and not isinstance(x, bool)


def is_number(x: Any) -> bool:
    """Whether `x` is a real number of Python or NumPy; a bool is none."""
    return isinstance(x, numbers.Real) and not isinstance(x, bool)


def is_traced(x: Any) -> bool:
    """Whether `x` stands for values that are not known yet (a JAX tracer, a torch fake or functorch tensor)."""
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(x, jax.core.Tracer):
        return True
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        return bool(
            torch.compiler.is_compiling()
            or x.is_meta
            or torch._C._functorch.is_functorch_wrapped_tensor(x)
            or isinstance(x, torch._subclasses.FakeTensor)
        )
    return False


def is_compiling() -> bool:
    """Whether torch.compile or torch.export traces this very code."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.compiler.is_compiling())


def is_transformed() -> bool:
    """Whether a `torch.func` transformation is at work, under which a tensor may be more than it seems."""
    return sys.modules["torch"]._C._functorch.peek_interpreter_stack() is not None


def unrolls(x: Any) -> bool:
    """Whether a torch tensor belongs to a program being traced, into which a Python loop would be unrolled."""
    torch = sys.modules["torch"]
    return bool(torch.compiler.is_compiling() or x.is_meta or isinstance(x, torch._subclasses.FakeTensor))


def is_numpy(xp: Namespace) -> bool:
    """Whether `xp` is NumPy, where values are at hand and writing into an array is plain."""
    return _family(xp) == "numpy"


def writable(xp: Namespace) -> bool:
    """Whether the core may write into arrays that it made itself: neither immutable nor watched by autograd."""
    return is_numpy(xp) or getattr(xp, "eager", False)


def unwritable(x: Array) -> str:
    """What keeps a caller's mutable array from being written to, with an article; "" for nothing."""
    library = family(x)
    if library == "numpy":
        return "" if x.flags.writeable else "a read-only"
    if library == "cupy":
        return "a broadcast" if any(step == 0 and n > 1 for n, step in zip(x.shape, x.strides, strict=True)) else ""
    if library != "torch" or is_traced(x):
        return ""
    torch = sys.modules["torch"]
    if any(step == 0 and n > 1 for n, step in zip(x.shape, x.stride(), strict=True)):
        return "a broadcast"
    if x.requires_grad and x.is_leaf and torch.is_grad_enabled():
        return "a leaf"
    return "an inference" if x.is_inference() and not torch.is_inference_mode_enabled() else ""


def writability(x: Array) -> Any:
    """What `unwritable` depends on beside type, device and gradients, as a key; quick to make."""
    if family(x) == "numpy":
        return x.flags.writeable
    torch = sys.modules["torch"]
    return x.stride(), x.is_inference(), torch.is_inference_mode_enabled(), torch.is_grad_enabled(), x.is_leaf


def values_at_hand(xp: Namespace, x: Array) -> bool:
    """Whether looking at a value of `x` costs next to nothing: no device to wait for, no transformation to break."""
    return is_numpy(xp) or (getattr(xp, "eager", False) and x.device.type == "cpu")


def at_home(x: Any) -> AbstractContextManager[Any]:
    """A context in which the device of a CuPy array is CuPy's current one, as its functions need it."""
    cupy = sys.modules.get("cupy")
    if cupy is None or not isinstance(x, cupy.ndarray):
        return _UNCHANGED
    device: AbstractContextManager[Any] = x.device
    return device


def undisturbed(xp: Namespace, x: Array) -> AbstractContextManager[Any]:
    """The library's own ambient settings off while the core computes on arrays like `x`.

    NumPy's warnings about overflow and NaN: what comes out of non-finite input is part of the contract. torch's
    autocast: it would multiply in 16 bits what has to be accumulated in 32.
    """
    library = _family(xp)
    if library == "torch":
        torch = sys.modules["torch"]
        kind = x.device.type
        if kind != "meta" and torch.is_autocast_enabled(kind):
            disabled: AbstractContextManager[Any] = torch.autocast(kind, enabled=False)
            return disabled
        return _UNCHANGED
    if library in ("jax", "cupy"):
        return _UNCHANGED
    found: AbstractContextManager[Any] = sys.modules["numpy"].errstate(all="ignore")  # others may be NumPy underneath
    return found


def host_integers(x: Any) -> list[int] | None:
    """The values of a one-dimensional integer array as a list, or None while they are not known (traced)."""
    if is_traced(x):
        return None
    return [int(i) for i in (x.tolist() if hasattr(x, "tolist") else x)]


def cast(xp: Namespace, x: Array, dtype: DType) -> Array:
    """`x` in `dtype`, itself where it already is."""
    return x if x.dtype == dtype else xp.astype(x, dtype, copy=False)


def convert_option(xp: Namespace, x: Any, like: Array) -> Array:
    """An option array for a call on `like`: NumPy arrays are host data for every library, others pass through."""
    if family(x) == "numpy" and not is_numpy(xp):
        return xp.asarray(x, **beside(like))
    return x


def moveaxis(xp: Namespace, x: Array, source: int, target: int) -> Array:
    """`x` with axis `source` moved to `target` (a view where the library has views)."""
    if source == target:
        return x
    if hasattr(x, "movedim"):  # torch, whose moveaxis is not known to vmap
        return x.movedim(source, target)
    return xp.moveaxis(x, source, target)


def transpose(xp: Namespace, x: Array) -> Array:
    """The last two axes swapped."""
    return x.mT if hasattr(x, "mT") else xp.matrix_transpose(x)  # NumPy before 2.0 has no .mT


def multiply_add(xp: Namespace, x: Array, y: Array, z: Array, *, spare: bool) -> Array:
    """x @ y + z, in one call where the namespace has one. `spare`: z is not needed any more and may be overwritten."""
    fused = getattr(xp, "multiply_add", None)
    return xp.matmul(x, y) + z if fused is None else fused(x, y, z, spare)


def add_outer(xp: Namespace, x: Array, y: Array, z: Array, *, spare: bool) -> Array:
    """z + x·y for a column x (…, d, 1) and a row y (…, 1, dv), in one call where the namespace has one. `spare` as in
    `multiply_add`."""
    fused = getattr(xp, "add_outer", None)
    return z + x * y if fused is None else fused(x, y, z, spare)


def scaled(xp: Namespace, x: Array, factor: Array | float) -> Array:
    """x · factor. x is a temporary of the caller, which may be overwritten."""
    inplace = getattr(xp, "scaled", None)
    return x * factor if inplace is None else inplace(x, factor)


def fleeting(xp: Namespace, x: Array, factor: Array, slot: str) -> Array:
    """x · factor, for use within one chunk: the next such product for the same slot may take its memory."""
    reused = getattr(xp, "fleeting", None)
    return x * factor if reused is None else reused(x, factor, slot)


def broadcast_shapes(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The common shape by the Array API's broadcasting rules; ValueError where there is none."""
    rank = max([0, *[len(s) for s in shapes]])
    result = [1] * rank
    for shape in shapes:
        for i, size in enumerate(shape, rank - len(shape)):
            if size == 1 or size == result[i]:
                continue
            if result[i] != 1:
                raise ValueError(f"shapes {shapes} do not broadcast together")
            result[i] = size
    return tuple(result)


def sum_to(xp: Namespace, x: Array, shape: tuple[int, ...]) -> Array:
    """`x` summed over the axes along which `shape` was broadcast to it: the adjoint of broadcasting."""
    extra = x.ndim - len(shape)
    if extra:
        x = xp.sum(x, axis=tuple(range(extra)), dtype=x.dtype)
    axes = tuple(i for i, (have, want) in enumerate(zip(x.shape, shape, strict=True)) if want == 1 and have != 1)
    return xp.sum(x, axis=axes, keepdims=True, dtype=x.dtype) if axes else x


def loaded(module: str) -> ModuleType | None:
    """The module if some code has imported it already; never imports."""
    return sys.modules.get(module)


def leaves(tree: Any) -> Iterator[Array]:
    """The arrays of a nest of tuples, lists and dicts, in order."""
    if isinstance(tree, dict):
        for value in tree.values():
            yield from leaves(value)
    elif isinstance(tree, (tuple, list)):
        for value in tree:
            yield from leaves(value)
    elif tree is not None:
        yield tree


def same_memory(x: Array, y: Array) -> bool:
    """Whether two torch tensors are one array: same place, same layout. Elsewhere, whether they are one object."""
    if x is y or family(x) != "torch" or unrolls(x):  # a tracer's tensor has no place
        return x is y
    return bool(x.data_ptr() == y.data_ptr() and x.shape == y.shape and x.stride() == y.stride())

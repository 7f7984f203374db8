"""States on disk, and symmetric matrices in half the space (§5.2)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from hla import arrays
from hla.arrays import Array
from hla.checks import spec_of
from hla.errors import DTypeError, OptionError, ShapeError, message
from hla.family import Spec, program, shapes
from hla.files import write_whole
from hla.options import Options
from hla.states import SYMMETRIC, State, field_name, is_mass, is_state, state_type

FORMAT = "hla-state"
VERSION = "1"


def pack_symmetric(S: Array) -> Array:
    r"""The upper triangle of symmetric matrices, row by row (§5.2).

    Args:
        S: (*batch, d, d); what is below the diagonal is not read.

    Returns:
        (*batch, d(d+1)/2) in the dtype and library of S.

    Raises:
        ShapeError: the last two axes differ.

    Example:
        >>> import numpy as np, hla
        >>> hla.pack_symmetric(np.asarray([[1.0, 2.0], [2.0, 3.0]]))
        array([1., 2., 3.])
    """
    xp = arrays.namespace(S, "S")
    if S.ndim < 2 or S.shape[-1] != S.shape[-2]:
        raise ShapeError(
            message("S", "square matrices (*batch, d, d)", f"shape {tuple(S.shape)}", "Check the last two axes.")
        )
    d = int(S.shape[-1])
    index = [i * d + j for i in range(d) for j in range(i, d)]
    return _take(xp, xp.reshape(S, (*S.shape[:-2], d * d)), index)


def unpack_symmetric(x: Array) -> Array:
    r"""The symmetric matrices of which `pack_symmetric` kept the upper triangle (§5.2).

    Args:
        x: (*batch, d(d+1)/2).

    Returns:
        (*batch, d, d) in the dtype and library of x.

    Raises:
        ShapeError: the last axis is no triangular number.

    Example:
        >>> import numpy as np, hla
        >>> hla.unpack_symmetric(np.asarray([1.0, 2.0, 3.0]))
        array([[1., 2.],
               [2., 3.]])
    """
    xp = arrays.namespace(x, "x")
    count = int(x.shape[-1]) if x.ndim else 0
    d = _triangular_root(count)
    if d is None:
        raise ShapeError(
            message("x", "a last axis of size d(d+1)/2", f"shape {tuple(x.shape)}", "Pass what pack_symmetric gave.")
        )
    row_start = [i * d - i * (i - 1) // 2 - i for i in range(d)]  # place of (i, j ≥ i) is row_start[i] + j
    index = [row_start[min(i, j)] + max(i, j) for i in range(d) for j in range(d)]
    return xp.reshape(_take(xp, x, index), (*x.shape[:-1], d, d))


def _triangular_root(count: int) -> int | None:
    d = int(((8 * count + 1) ** 0.5 - 1) / 2 + 0.5)
    return d if count > 0 and d * (d + 1) // 2 == count else None


def _take(xp: Any, x: Array, index: list[int]) -> Array:
    return xp.take(x, xp.asarray(index, dtype=xp.int64 if _has_int64(xp) else xp.int32, **arrays.beside(x)), axis=-1)


def _has_int64(xp: Any) -> bool:
    """JAX without x64 has no 64-bit integers and warns when asked for them."""
    jax = arrays.loaded("jax")
    return not (jax is not None and xp is jax.numpy and not jax.config.jax_enable_x64)


def save_state(path: str | os.PathLike[str], state: State) -> None:
    """A state as a safetensors file: S (and Q) packed as upper triangles, options in the metadata.

    The file is complete or absent: it is written beside `path` and then renamed.

    Args:
        path: where to; an existing file is replaced.
        state: a state of any operator and library.

    Raises:
        DTypeError: `state` is no state.
        OSError: the file cannot be written.

    Example:
        >>> import numpy as np, hla, tempfile, pathlib
        >>> x = np.ones((3, 2))
        >>> _, state = hla.hla2(x, x, x, return_state=True)
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "state.safetensors"
        >>> hla.save_state(path, state)
        >>> hla.load_state(path).key_moment
        array([[3., 3.],
               [3., 3.]])
    """
    from safetensors.numpy import save

    if not is_state(state):
        raise DTypeError(message("state", "a state", type(state).__name__, "Use return_state=True or init_state."))
    tensors = {
        field: _to_numpy(pack_symmetric(x) if symbol in SYMMETRIC else x)
        for symbol, field, x in zip(state.symbols, state._fields, state, strict=True)
    }
    metadata = {"format": FORMAT, "version": VERSION, "operator": json.dumps(dict(state.spec._asdict()))}
    data = save(tensors, metadata)
    write_whole(path, data)


def _to_numpy(x: Array) -> Any:
    """A contiguous NumPy array on the host."""
    import numpy

    library = arrays.family(x)
    if library == "torch":
        x = x.detach().cpu().numpy()
    elif library == "cupy":
        x = x.get()
    elif library not in ("numpy", "jax"):
        x = numpy.from_dlpack(x)
    return numpy.ascontiguousarray(numpy.asarray(x))


def load_state(path: str | os.PathLike[str], like: Array | None = None) -> State:
    """A state that `save_state` wrote.

    Args:
        path: the file.
        like: an array that gives library and device; NumPy without it. The dtype stays as saved.

    Returns:
        The state.

    Raises:
        ValueError: the file is damaged or holds no state; the message says what is wrong.
        FileNotFoundError: there is no such file.
        DTypeError: `like` belongs to a library that cannot hold the saved dtype (JAX without x64, float64).

    Example:
        See `save_state`.
    """
    if like is not None:
        arrays.namespace(like, "like")
    data = Path(path).read_bytes()
    spec, tensors = _read(os.fspath(path), data)
    state = state_type(spec)(**tensors)
    if like is None or arrays.family(like) == "numpy":
        return state
    xp = arrays.namespace(like, "like")
    moved = []
    for field, x in zip(state._fields, state, strict=True):
        if x.dtype.name == "float64" and not _has_int64(xp):
            raise DTypeError(
                message("like", "a library that holds float64, as saved", "JAX without x64",
                        "Enable jax_enable_x64, or load as NumPy and convert.")
            )  # fmt: skip
        made = xp.asarray(x, **arrays.beside(like))
        if arrays.dtype_name(made.dtype) != x.dtype.name:
            raise DTypeError(
                message("like", f"a library that keeps {x.dtype.name}", f"{made.dtype} for {field}", "Load as NumPy.")
            )
        moved.append(made)
    return type(state)(*moved)


def _read(name: str, data: bytes) -> tuple[Spec, dict[str, Any]]:
    """Spec and fields of a file's bytes; ValueError with what is wrong."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    def wrong(what: str) -> ValueError:
        return ValueError(
            message("path", "a state written by hla.save_state", f"{name}: {what}", "Save the state again.")
        )

    try:
        tensors = load(data)
        metadata = _metadata(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise wrong(f"not a safetensors file, or damaged ({error})") from None
    if metadata.get("format") != FORMAT:
        raise wrong("a safetensors file without the mark of a state")
    if metadata.get("version") != VERSION:
        raise wrong(f"format version {metadata.get('version')}, this release reads {VERSION}")
    spec = _read_spec(metadata, wrong)
    if spec.order > 2 * len(tensors):
        raise wrong(f"{len(tensors)} fields for order {spec.order}")
    symbols = {field_name(s.symbol): s.symbol for s in program(spec).states}
    if set(tensors) != set(symbols):
        raise wrong(f"fields {sorted(tensors)}, expected {sorted(symbols)}")
    fields = {}
    for field, symbol in symbols.items():
        x = tensors[field]
        if x.dtype.name not in ("float32", "float64"):
            raise wrong(f"{field} in {x.dtype.name}")
        if symbol in SYMMETRIC:
            if x.ndim == 0 or _triangular_root(x.shape[-1]) is None:
                raise wrong(f"{field} of shape {x.shape} is no packed symmetric matrix")
            x = unpack_symmetric(x)
        fields[field] = x
    _check_sizes(spec, symbols, fields, wrong)
    return spec, fields


def _metadata(data: bytes) -> dict[str, str]:
    """The metadata of a safetensors file: its header is a length (8 bytes, little endian) and JSON."""
    size = int.from_bytes(data[:8], "little")
    found = json.loads(data[8 : 8 + size]).get("__metadata__") or {}
    return {str(key): str(value) for key, value in found.items()}


def _read_spec(metadata: dict[str, str], wrong: Any) -> Spec:
    try:
        given = json.loads(metadata["operator"])
        spec = Spec(**given)
        options = Options(
            mask=spec.mask, definition=spec.definition, normalize=spec.normalize, ridge=1.0 if spec.ridge else 0.0
        )
        if spec != spec_of(spec.operator, options, spec.order or None) or spec.mask == "none":
            raise OptionError(f"{given}")
    except (KeyError, TypeError, ValueError) as error:
        raise wrong(f"no known operator in its metadata ({error})") from None
    return spec


def _check_sizes(spec: Spec, symbols: dict[str, str], fields: dict[str, Any], wrong: Any) -> None:
    """All fields of one d and dv, one dtype, and batch axes that fit together."""
    found = {symbols[field]: x[..., None] if is_mass(symbols[field]) else x for field, x in fields.items()}
    if any(x.ndim < 2 for x in found.values()):
        raise wrong("a field with too few axes")
    d = next(iter(found.values())).shape[-2]
    dv = max(x.shape[-1] for s, x in found.items() if not is_mass(s) and s not in ("S", "Q", "R"))
    sizes = shapes(program(spec), (), (), (), d, dv).state
    for symbol, x in found.items():
        if tuple(x.shape[-2:]) != sizes[symbol]:
            raise wrong(f"{field_name(symbol)} of shape {x.shape}, expected last axes {sizes[symbol]}")
    if d < 1 or dv < 1:
        raise wrong("a field without values")
    if len({x.dtype for x in found.values()}) > 1:
        raise wrong("fields of different dtypes")
    batches = {x.shape[:-2] for symbol, x in found.items() if symbol != "S"}
    keys = found["S"].shape[:-2] if "S" in found else ()
    try:
        fits = len(batches) == 1 and arrays.broadcast_shapes(keys, *batches) in batches
    except ValueError:
        fits = False
    if not fits:
        raise wrong("fields whose batch axes do not fit together")

"""What a layer asks of the arrays of a call, and the errors it raises."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from hla import arrays
from hla.errors import DTypeError, OptionError, ShapeError, message
from hla.nn.refusals import check_field_shape, check_known_offsets


def read_dtype(name: str, dtype: Any) -> Any:
    """A floating dtype that JAX has now, or an error; None stays None."""
    if dtype is None:
        return None
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or found.name not in arrays.FLOATING:
        got = repr(dtype) if found is None else found.name
        raise DTypeError(message(name, f"one of {', '.join(arrays.FLOATING)}", got, "Pass a floating dtype."))
    if jax.dtypes.canonicalize_dtype(found) != found:
        raise DTypeError(
            message(name, "at most 32 bits", "float64", "Set jax_enable_x64 first: JAX has no 64 bits without it.")
        )
    return found


def check_rngs(rngs: Any, streams: tuple[str, ...]) -> None:
    """Errors unless these are random numbers of Flax with these streams, or with a default one."""
    if not isinstance(rngs, nnx.Rngs):
        raise DTypeError(message("rngs", "an nnx.Rngs", type(rngs).__name__, "Pass nnx.Rngs(0), for example."))
    missing = () if "default" in rngs else [name for name in streams if name not in rngs]
    if missing:
        raise OptionError(
            message("rngs", f"a stream {' and '.join(missing)}, or a default one", f"{', '.join(rngs) or 'none'}",
                    "Pass nnx.Rngs(0), or nnx.Rngs(params=0, dropout=1).")
        )  # fmt: skip


def as_array(name: str, x: Any, todo: str = "Convert it, e.g. jnp.asarray.") -> Array:
    """x as an array of JAX, where it is one of JAX or NumPy."""
    if isinstance(x, Array):
        return x
    if type(x) is not np.ndarray or x.dtype == object:
        raise DTypeError(message(name, "an array of JAX or NumPy", type(x).__name__, todo))
    return jnp.asarray(x)


def read_input(name: str, x: Any, axes: tuple[str, ...], d_model: int, dtype: Any, param_dtype: Any) -> Array:
    """x as an array of JAX, or an error."""
    found = as_array(name, x)
    if found.ndim != len(axes) + 1 or found.shape[-1] != d_model:
        layout = f"({', '.join(axes)}, d_model = {d_model})"
        raise ShapeError(message(name, f"shape {layout}", f"{found.shape}", "One row for each sequence."))
    if found.dtype.name not in arrays.FLOATING:
        raise DTypeError(message(name, "a floating dtype", found.dtype.name, f"Convert it with {name}.astype(…)."))
    if found.dtype == jnp.float64 and dtype is None and param_dtype != jnp.float64:
        raise DTypeError(
            message(name, f"{param_dtype}, as the parameters, or fewer bits", "float64",
                    "Convert it, or make the layer with dtype=… or param_dtype=jnp.float64.")
        )  # fmt: skip
    return found


def read_mask(mask: Any, shape: tuple[int, ...]) -> Array:
    """A padding mask as an array of JAX; errors unless it is bool and of exactly this shape."""
    todo = "Compare first: attention_mask == 0 where 1 means a token."
    if not isinstance(mask, (Array, np.ndarray)) or mask.dtype != bool:
        got = mask.dtype.name if isinstance(mask, (Array, np.ndarray)) else type(mask).__name__
        raise DTypeError(message("key_padding_mask", "a bool array, True for padding", got, todo))
    if mask.shape != shape:
        raise ShapeError(message("key_padding_mask", f"shape {shape}", f"{mask.shape}", "One entry for each token."))
    return as_array("key_padding_mask", mask)


def check_offsets(offsets: Any, x: Array) -> int:
    """The number of packed sequences."""
    todo = "Pass cumulative lengths."
    if not isinstance(offsets, (Array, np.ndarray)) or offsets.dtype.name not in arrays.INTEGER:
        got = offsets.dtype.name if isinstance(offsets, (Array, np.ndarray)) else type(offsets).__name__
        raise DTypeError(message("cu_seqlens", "an integer array (N + 1,)", got, todo))
    if offsets.ndim != 1 or offsets.shape[0] < 1:
        raise ShapeError(message("cu_seqlens", "shape (N + 1,)", f"{offsets.shape}", todo))
    if x.shape[0] != 1:
        raise ShapeError(
            message("x", "shape (1, T, d_model) with cu_seqlens", f"{x.shape}", "Put all sequences in one row.")
        )
    known = arrays.host_integers(offsets)
    if known is not None:
        check_known_offsets(known, x.shape[1])
    return int(offsets.shape[0]) - 1


def check_index(index: Any, batch: int) -> None:
    """Errors unless these are entries of a batch, as far as they are known."""
    todo = "Pass the entries to take, e.g. jnp.asarray([0, 0])."
    if not isinstance(index, (Array, np.ndarray)) or index.dtype.name not in arrays.INTEGER:
        got = index.dtype.name if isinstance(index, (Array, np.ndarray)) else type(index).__name__
        raise DTypeError(message("index", "an integer array (N,)", got, todo))
    if index.ndim != 1:
        raise ShapeError(message("index", "shape (N,)", f"{index.shape}", todo))
    outside = [i for i in arrays.host_integers(index) or () if not 0 <= i < batch]
    if outside:
        raise OptionError(message("index", f"entries 0 ≤ i < {batch} of the batch", f"{outside}", todo))


def check_field(name: str, found: Any, shape: tuple[int, ...], dtype: Any) -> None:
    """Errors unless an array of a state has this shape, batch first, and dtype."""
    found = as_array(f"state.{name}", found, "Restore the state as arrays.")
    check_field_shape(name, tuple(found.shape), shape)
    if found.dtype != dtype:
        raise DTypeError(
            message(f"state.{name}", jnp.dtype(dtype).name, found.dtype.name, "States keep the dtype they came in.")
        )

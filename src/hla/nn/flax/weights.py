"""Weights between `hla.nn.torch` and this package. Nothing here imports PyTorch.

Both layers have parameters of the same names and shapes, but for the matrices of linear layers: W (out, in), called
``weight``, in PyTorch, and its transpose (in, out), called ``kernel``, in Flax.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from hla.arrays import FLOATING, dtype_name
from hla.errors import DTypeError, OptionError, ShapeError, message
from hla.nn.flax.attention import HigherOrderAttention
from hla.nn.options import LayerOptions


def from_torch(module: Any, *, dtype: Any = None, rngs: nnx.Rngs | None = None) -> HigherOrderAttention:
    """A layer with the options and a copy of the parameters of a `hla.nn.torch.HigherOrderAttention`.

    A `process_group` is left behind: the layer of Flax runs over whole sequences.

    Args:
        module: the layer of PyTorch, on any device. Its parameters give `param_dtype`; whether it is in training
            gives whether dropout is on.
        dtype: as for `HigherOrderAttention`.
        rngs: as for `HigherOrderAttention`, `nnx.Rngs(0)` by default; only the dropout keeps something of it.

    Returns:
        The layer of Flax.

    Raises:
        DTypeError: another module, a dtype that JAX does not have now, or parameters without values (device meta).

    Example:
        >>> import torch
        >>> import hla.nn.torch
        >>> from hla.nn.flax import from_torch
        >>> layer = from_torch(hla.nn.torch.HigherOrderAttention(32, 4, operator="ahla", num_kv_heads=2))
        >>> layer.options.operators[0], layer.k_proj.kernel.shape
        ('ahla', (32, 16))
    """
    options = getattr(module, "options", None)
    if not isinstance(options, LayerOptions) or not hasattr(module, "state_dict"):
        raise DTypeError(
            message("module", "a hla.nn.torch.HigherOrderAttention", type(module).__name__,
                    "Make a layer with its options and use load_torch(layer, state_dict).")
        )  # fmt: skip
    layer = HigherOrderAttention(
        **options.arguments(),
        dtype=dtype,
        param_dtype=dtype_name(module.q_proj.weight.dtype),
        rngs=nnx.Rngs(0) if rngs is None else rngs,
    )
    load_torch(layer, module.state_dict())
    layer.set_attributes(deterministic=not module.training, raise_if_not_found=False)
    return layer


def load_torch(layer: HigherOrderAttention, state_dict: Any) -> None:
    """Put copies of the parameters of a layer of PyTorch into a layer of Flax with the same options, all or none.

    Args:
        layer: whose parameters change; they keep their dtype.
        state_dict: tensors, or arrays of NumPy or JAX, by the names of the layer of PyTorch: what its `state_dict()`
            or `to_torch` returns, or safetensors as they are read. Or the layer of PyTorch itself.

    Raises:
        OptionError: names are missing, or there are others: the layers differ in options.
        ShapeError: a parameter has another shape.
        DTypeError: `state_dict` is neither; a value is no array, not floating, or of the device meta; `layer` is none.
    """
    _check_module(layer)
    if hasattr(state_dict, "state_dict"):
        state_dict = state_dict.state_dict()
    if not isinstance(state_dict, Mapping):
        raise DTypeError(
            message("state_dict", "arrays by name, or a module of PyTorch", type(state_dict).__name__,
                    "Pass module.state_dict(), or to_torch(layer) of a layer of Flax.")
        )  # fmt: skip
    flat = dict(nnx.to_flat_state(nnx.state(layer, nnx.Param)))
    paths = {_name(path): path for path in flat}
    absent, others = sorted(paths.keys() - state_dict.keys()), sorted(state_dict.keys() - paths.keys())
    if absent or others:
        got = "; ".join(
            f"{what} {', '.join(names)}" for what, names in (("none for", absent), ("more:", others)) if names
        )
        raise OptionError(
            message("state_dict", "the parameters of a layer with these options", got,
                    "Make the layer with the options of the other one, or take the prefix off the names.")
        )  # fmt: skip
    loaded = {}
    for name, path in paths.items():
        old, x = flat[path], _host(name, state_dict[name])
        x = x.T if path[-1] == "kernel" else x
        if x.shape != old.shape:
            wanted = old.shape[::-1] if path[-1] == "kernel" else old.shape
            raise ShapeError(
                message(name, f"shape {wanted}", f"{np.shape(state_dict[name])}", "The layers differ in sizes.")
            )
        loaded[path] = old.replace(jnp.array(x, old.dtype))
    nnx.update(layer, nnx.from_flat_state(loaded))


def to_torch(layer: HigherOrderAttention) -> dict[str, np.ndarray[Any, Any]]:
    """The parameters by the names and in the shapes of `hla.nn.torch`, as arrays of NumPy of their own.

    bfloat16, which NumPy does not have, becomes float32; `load_state_dict` rounds it back.

    Args:
        layer: the layer of Flax.

    Returns:
        Arrays by name.

    Raises:
        DTypeError: no module of Flax.

    Example:
        >>> import torch
        >>> import hla.nn.torch
        >>> from flax import nnx
        >>> from hla.nn.flax import HigherOrderAttention, to_torch
        >>> layer = HigherOrderAttention(32, 4, rngs=nnx.Rngs(0))
        >>> other = hla.nn.torch.HigherOrderAttention(32, 4)
        >>> other.load_state_dict({name: torch.from_numpy(x) for name, x in to_torch(layer).items()})
        <All keys matched successfully>
    """
    _check_module(layer)
    found = {}
    for path, parameter in nnx.to_flat_state(nnx.state(layer, nnx.Param)):
        x = np.asarray(parameter[...])
        x = x.astype(np.float32) if x.dtype.name == "bfloat16" else x
        found[_name(path)] = np.array(x.T if path[-1] == "kernel" else x, order="C")
    return found


def _check_module(layer: Any) -> None:
    if not isinstance(layer, nnx.Module):
        raise DTypeError(
            message("layer", "a hla.nn.flax.HigherOrderAttention", type(layer).__name__,
                    "Make one, or use from_torch(module).")
        )  # fmt: skip


def _name(path: tuple[Any, ...]) -> str:
    """The name in PyTorch."""
    return ".".join(map(str, (*path[:-1], "weight" if path[-1] == "kernel" else path[-1])))


def _host(name: str, x: Any) -> np.ndarray[Any, Any]:
    """A tensor or array on the host."""
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise DTypeError(message(name, "a tensor or array", type(x).__name__, "Pass a state_dict."))
    kind = dtype_name(x.dtype)
    if kind not in FLOATING:
        raise DTypeError(message(name, "a floating dtype", kind, "Convert it first."))
    if getattr(x, "is_meta", False):
        raise DTypeError(message(name, "a tensor with values", "one of the device meta", "Load the weights first."))
    if hasattr(x, "detach"):
        x = x.detach().cpu()
        x = (x.float() if kind == "bfloat16" else x).numpy()
    return np.asarray(x)

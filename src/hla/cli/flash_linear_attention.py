"""flash-linear-attention's reference functions for plain linear attention, where that package is installed.

`fla.ops.linear_attn.naive`: plain PyTorch, a loop over tokens and one over chunks of 64. They take (B, T, H, d).
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

Array: TypeAlias = Any

MODULE = "fla.ops.linear_attn.naive"
FUNCTIONS = {"chunk": "naive_chunk_linear_attn", "recurrent": "naive_recurrent_linear_attn"}
CHUNK = 64


class References(NamedTuple):
    """What was found."""

    functions: dict[str, Callable[[Array, Array, Array], Array]]
    """on (H, T, d), (H, T, d), (H, T, dv); empty where there are none"""
    reason: str
    """why there are none"""


def find_references() -> References:
    """The reference functions under the names "fla, chunk" and "fla, recurrent"."""
    if importlib.util.find_spec("fla") is None:
        return References({}, "flash-linear-attention: not installed")
    try:
        module = importlib.import_module(MODULE)
    except Exception as error:  # it imports its GPU kernels, and with them whatever a machine without a GPU lacks
        return References({}, f"flash-linear-attention: {MODULE} fails to load: {type(error).__name__}: {error}")
    if not all(hasattr(module, name) for name in FUNCTIONS.values()):
        # Versions without the loop over tokens took (B, H, T, d).
        wanted = " and ".join(FUNCTIONS.values())
        return References({}, f"flash-linear-attention: {MODULE} does not have {wanted}")
    functions = {f"fla, {kind}": _adapted(getattr(module, name), kind) for kind, name in FUNCTIONS.items()}
    return References(functions, "")


def _adapted(function: Callable[..., Any], kind: str) -> Callable[[Array, Array, Array], Array]:
    def attend(q: Array, k: Array, v: Array) -> Array:
        length = v.shape[1]
        if kind == "chunk" and length % CHUNK:  # it takes whole chunks only
            import torch

            q, k, v = (torch.nn.functional.pad(x, (0, 0, 0, -length % CHUNK)) for x in (q, k, v))
        found = function(*(x.transpose(0, 1)[None] for x in (q, k, v)), scale=1.0)
        output = found[0] if isinstance(found, tuple) else found
        return output[0].transpose(0, 1)[:, :length]

    return attend

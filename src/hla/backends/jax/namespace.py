"""jax.numpy as the core's namespace, with the two things it has to say differently."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.lax import Precision


class Namespace:
    """jax.numpy, but for products and scans."""

    __name__ = "jax"

    def __init__(self, slices: bool) -> None:
        """`slices`: loops cut each piece out of the whole as they go. A third faster than to lay all pieces out first,
        but the derivative of a cut is an array of the whole length, added up at every step."""
        self.slices = slices

    def __getattr__(self, name: str) -> Any:
        return getattr(jnp, name)

    @staticmethod
    def matmul(x: Array, y: Array) -> Array:
        """In the precision of the inputs: by default accelerators would round float32 to fewer bits. An object, not its
        name: names are resolved differently on GPUs."""
        return jnp.matmul(x, y, precision=Precision.HIGHEST)

    @staticmethod
    def associative_scan(op: Callable[[Any, Any], Any], elements: Any, axis: int) -> Any:
        """`jax.lax.associative_scan`, which calls op(earlier, later) as `hla.scan` does when it runs forwards."""
        return jax.lax.associative_scan(op, elements, axis=axis)


DERIVED, VALUES = Namespace(slices=False), Namespace(slices=True)
"""where derivatives are taken, and where only values are wanted"""

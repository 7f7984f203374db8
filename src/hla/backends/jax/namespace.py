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
    def associative_scan(op: Callable[[Any, Any], Any], elements: dict[str, Array], axis: int) -> dict[str, Array]:
        """`jax.lax.associative_scan`, which calls op(earlier, later) as `hla.scan` does when it runs forwards.

        It counts the axis from the front of the first array, so all get one rank for it.
        """
        rank = max(x.ndim for x in elements.values())
        aligned = {name: jnp.reshape(x, (*(1,) * (rank - x.ndim), *x.shape)) for name, x in elements.items()}
        scanned = jax.lax.associative_scan(op, aligned, axis=axis)
        return {name: jnp.reshape(x, elements[name].shape) for name, x in scanned.items()}


DERIVED, VALUES = Namespace(slices=False), Namespace(slices=True)
"""where derivatives are taken, and where only values are wanted"""

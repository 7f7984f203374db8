"""jax.numpy as the core's namespace, with the two things it has to say differently."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.lax import Precision

from hla.chunkwise import token_arrays
from hla.problem import Problem, States
from hla.recurrent import advance


class Namespace:
    """jax.numpy, but for products and scans."""

    __name__ = "jax"

    def __getattr__(self, name: str) -> Any:
        return getattr(jnp, name)

    @staticmethod
    def matmul(x: Array, y: Array) -> Array:
        """In the precision of the inputs: by default accelerators would round float32 to fewer bits. An object, not its
        name: names are resolved differently on GPUs."""
        return jnp.matmul(x, y, precision=Precision.HIGHEST)

    @staticmethod
    def zero_states(problem: Problem) -> States | None:
        """States before the first token, sharded as those after a token; None where no mesh is in sight.

        On a mesh of explicit axes, and within `jax.shard_map`, how an array is spread is part of its type, and what a
        scan carries keeps its type. XLA drops the token, which is made of all, as there may be none.
        """
        if all(jax.typeof(x).sharding.mesh.empty for x in (problem.q, problem.k, problem.v)):
            return None
        token = {
            name: None if x is None else jnp.sum(x, axis=-2, dtype=x.dtype, keepdims=True)
            for name, x in token_arrays(problem).items()
        }
        sizes = problem.shapes().state
        states = {symbol: jnp.zeros(shape[-2:], problem.dtype) for symbol, shape in sizes.items()}
        for _ in range(2 if any(read.strict for read in problem.program.reads) else 1):  # these read what was before
            states = {symbol: jnp.zeros_like(x) for symbol, x in advance(problem, states, token)[0].items()}
        return states

    @staticmethod
    def associative_scan(op: Callable[[Any, Any], Any], elements: dict[str, Array], axis: int) -> dict[str, Array]:
        """`jax.lax.associative_scan`, which calls op(earlier, later) as `hla.scan` does when it runs forwards.

        It counts the axis from the front of the first array, so all get one rank for it.
        """
        rank = max(x.ndim for x in elements.values())
        aligned = {name: jnp.reshape(x, (*(1,) * (rank - x.ndim), *x.shape)) for name, x in elements.items()}
        scanned = jax.lax.associative_scan(op, aligned, axis=axis)
        return {name: jnp.reshape(x, elements[name].shape) for name, x in scanned.items()}


XP = Namespace()

"""What a layer remembers of the tokens it has seen."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import Array

from hla.nn.flax.checks import check_index


class LayerState(NamedTuple):
    """The state of a `HigherOrderAttention`: a named tuple of arrays, so a pytree, whose size is constant.

    It is the carry of a `lax.scan`, an argument and a result of `jit`, and may be donated. Every array has the batch as
    its first axis and is float32 (float64 for layers in float64), `position` int32.

    Attributes:
        operators: a state of `hla` for each group of heads, of batch (B, key/value heads, query heads of each); the
            field ``key_moment`` is stored once for each key/value head. A named tuple whose class knows the options of
            the layer that made it: layers with others refuse it.
        windows: what the short convolutions of q, k and v need, their last ``conv_size - 1`` inputs (B, ·, channels);
            empty without a convolution.
        position: (B,), the number of tokens seen, without the skipped ones.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from hla.nn.flax import HigherOrderAttention
        >>> state = HigherOrderAttention(32, 4, rngs=nnx.Rngs(0)).init_state(3)
        >>> state.position.tolist(), state.reorder(jnp.asarray([0, 0])).batch
        ([0, 0, 0], 2)
    """

    operators: Any
    windows: tuple[Array, ...]
    position: Array

    def map(self, function: Callable[[Array], Array]) -> LayerState:
        """The state with `function` applied to each of its arrays: `jax.tree.map`."""
        found: LayerState = jax.tree.map(function, self)
        return found

    def reorder(self, index: Array) -> LayerState:
        """The entries of the batch that `index` (int, (N,)) names, in its order, as a beam search needs them.

        Raises:
            DTypeError: the index is no integer array.
            ShapeError: it has not one axis.
            OptionError: an entry is negative or not in the batch, where the values are known.
        """
        check_index(index, self.batch)
        return self.map(lambda x: x[index])

    def arrays(self) -> list[Array]:
        """All arrays, in order."""
        return jax.tree.leaves(self)

    @property
    def batch(self) -> int:
        """The size of the batch."""
        return int(self.position.shape[0])

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays; also of their shapes alone, as `jax.eval_shape` gives them."""
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in self.arrays())

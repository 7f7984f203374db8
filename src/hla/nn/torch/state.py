"""What a layer remembers of the tokens it has seen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hla import states
from hla.nn import kinds
from hla.nn.torch.checks import check_index


class LayerState(NamedTuple):
    """The state of a `HigherOrderAttention`: a named tuple of tensors, so a pytree, whose size is constant.

    Every tensor has the batch as its first axis and is float32 (float64 for layers in float64), `position` int64.

    Attributes:
        operators: a state of `hla` for each group of heads, of batch (B, key/value heads, query heads of each); the
            field ``key_moment`` is stored once for each key/value head. A named tuple whose class knows the options of
            the layer that made it: layers with others refuse it.
        windows: what the short convolutions of q, k and v need, their last ``conv_size - 1`` inputs (B, ·, channels);
            empty without a convolution.
        position: (B,), the number of tokens seen, without the skipped ones.

    Example:
        >>> import torch
        >>> from hla.nn.torch import HigherOrderAttention
        >>> state = HigherOrderAttention(32, 4).init_state(3)
        >>> state.position.tolist(), state.reorder(torch.tensor([0, 0])).batch
        ([0, 0, 0], 2)
    """

    operators: Any
    windows: tuple[Tensor, ...]
    position: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> LayerState:
        """The state with `function` applied to each of its tensors."""
        return LayerState(
            type(self.operators)(*(type(state)(*(function(x) for x in state)) for state in self.operators)),
            tuple(function(x) for x in self.windows),
            function(self.position),
        )

    def to(self, device: torch.device | str, non_blocking: bool = False) -> LayerState:
        """The state on another device; the dtypes stay."""
        return self.map(lambda x: x.to(device, non_blocking=non_blocking))

    def detach(self) -> LayerState:
        """The state cut off from the graph, for truncated backpropagation."""
        return self.map(lambda x: x.detach())

    def reorder(self, index: Tensor) -> LayerState:
        """The entries of the batch that `index` (int, (N,)) names, in its order, as a beam search needs them.

        Raises:
            DTypeError, ShapeError, OptionError: `index` is no int tensor (N,), or names an entry that is none.
        """
        check_index(index, self.batch)
        return self.map(lambda x: x.index_select(0, index.to(x.device)))

    def tensors(self) -> list[Tensor]:
        """All tensors, in order."""
        return [x for state in self.operators for x in state] + [*self.windows, self.position]

    @property
    def batch(self) -> int:
        """The size of the batch."""
        return int(self.position.shape[0])

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(x.numel() * x.element_size() for x in self.tensors())


# what torch.load(…, weights_only=True), its default, needs to know to read states
torch.serialization.add_safe_globals([LayerState, kinds.rebuild, states._rebuild])

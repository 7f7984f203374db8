"""Layers for PyTorch, built on the public operators.

`HigherOrderAttention` takes the place of the attention of a transformer block; `HigherOrderOperator` is the operator
alone, for q, k and v that are ready.
"""

from hla.nn.torch.attention import HigherOrderAttention
from hla.nn.torch.operator import HigherOrderOperator
from hla.nn.torch.state import LayerState

__all__ = ["HigherOrderAttention", "HigherOrderOperator", "LayerState"]

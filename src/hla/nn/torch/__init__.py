"""Layers for PyTorch, built on the public operators.

`HigherOrderAttention` takes the place of the attention of a transformer block; `HigherOrderOperator` is the operator
alone, for q, k and v that are ready; `convert` replaces the attention of a model that is there already.
"""

from hla.nn.torch.attention import HigherOrderAttention
from hla.nn.torch.conversion import ConvertedAttention, convert, from_projections
from hla.nn.torch.operator import HigherOrderOperator
from hla.nn.torch.state import LayerState

__all__ = [
    "ConvertedAttention",
    "HigherOrderAttention",
    "HigherOrderOperator",
    "LayerState",
    "convert",
    "from_projections",
]

"""Layers for Flax (NNX), built on the public operators: those of `hla.nn.torch`, with the same options and names.

`HigherOrderAttention` takes the place of the attention of a transformer block; `HigherOrderOperator` is the operator
alone, for q, k and v that are ready; `from_torch`, `load_torch` and `to_torch` carry weights over.
"""

from hla.nn.flax.attention import HigherOrderAttention
from hla.nn.flax.operator import HigherOrderOperator
from hla.nn.flax.state import LayerState
from hla.nn.flax.weights import from_torch, load_torch, to_torch

__all__ = [
    "HigherOrderAttention",
    "HigherOrderOperator",
    "LayerState",
    "from_torch",
    "load_torch",
    "to_torch",
]

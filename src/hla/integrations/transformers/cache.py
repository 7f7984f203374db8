"""What the model remembers between calls, as a cache of Transformers. It holds states, and no token."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from hla.arrays import is_integer, is_traced
from hla.errors import DTypeError, OptionError, ShapeError, message
from hla.nn.torch.checks import check_index
from hla.nn.torch.softmax import SoftmaxState
from hla.nn.torch.state import LayerState


class HLACacheLayer(CacheLayerMixin):
    """The state of one layer, of constant size unless the layer is softmax attention.

    Attributes:
        state: a `LayerState`, the keys and values of a softmax layer, or None before the first token.
        seen: how many columns of tokens went by, padding included, as Transformers counts.
        home: where the state was before it was offloaded; None where it is not.
    """

    is_compileable = False
    is_croppable = False
    is_sliding = True  # beside layers of keys and values Transformers takes the sizes of masks from those
    supports_early_init = False

    def __init__(self) -> None:
        super().__init__()
        self.state: Any = None
        self.seen = 0
        self.home: torch.device | None = None

    def advance(self, state: Any, columns: int) -> None:
        """Take the state after so many columns more.

        Raises:
            DTypeError: it is no state of a layer.
        """
        if not isinstance(state, (LayerState, SoftmaxState)):
            raise DTypeError(
                message("state", "the state of a layer", type(state).__name__, "Call the layer with return_state=True.")
            )
        self.state = state.map(_alone)
        self.seen = self.seen + columns

    @property
    def batch_size(self) -> int:
        """The number of sequences; no attribute before the first token."""
        if self.state is None:
            raise AttributeError("batch_size")
        return int(self.state.position.shape[0])

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return 0 if self.state is None else sum(x.numel() * x.element_size() for x in self.state.tensors())

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> NoReturn:
        """Raises: there are no keys and values."""
        raise _no_keys()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises: there are no keys and values."""
        raise _no_keys()

    def get_seq_length(self) -> int:
        """Columns of tokens, padding included."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The keys of a call are those of its own columns: their number, and where they start."""
        return query_length, self.seen

    def get_max_length(self) -> int:
        """−1: there is no maximum."""
        return -1

    def reset(self) -> None:
        """Forget everything."""
        self.state = None
        self.seen = 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """The sequences that `beam_idx` names, in its order."""
        if self.state is not None:
            self.state = self.state.map(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_select_indices(self, indices: Tensor) -> None:
        """The sequences that `indices` names, or for which it is True."""
        if self.state is not None:
            self.state = self.state.map(lambda x: x[indices.to(x.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence so many times."""
        if self.state is not None:
            self.state = self.state.map(lambda x: x.repeat_interleave(repeats, dim=0))

    def crop(self, tokens_to_remove: int) -> None:
        """Raises unless it is 0: a state cannot give tokens back."""
        if tokens_to_remove != 0:
            raise OptionError(
                message("crop", "0 tokens to remove", f"{tokens_to_remove}",
                        "A state is a sum over all tokens, and none can be taken out: keep a copy from before "
                        "(copy.deepcopy(cache)); assisted generation, which rolls back, is not possible.")
            )  # fmt: skip

    def offload(self) -> None:
        """Move the state to the CPU."""
        if self.state is not None and self.home is None:
            self.home = self.state.position.device
            self.state = self.state.map(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Move it back."""
        if self.state is not None and self.home is not None:
            home, self.home = self.home, None
            self.state = self.state.map(lambda x: x.to(home, non_blocking=True))


class HLACache(Cache):
    """The states of all layers of a model.

    Args:
        config: of the model; only its `num_hidden_layers` counts.

    Raises:
        DTypeError, ShapeError, OptionError: a config without that, or indices that name no sequence.

    Example:
        >>> import torch
        >>> from hla.integrations.transformers import HLACache, HLAConfig, HLAForCausalLM
        >>> config = HLAConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2)
        >>> model, cache = HLAForCausalLM(config).eval(), HLACache(config)
        >>> _ = model(torch.randint(50, (1, 10)), cache=cache)
        >>> size = cache.nbytes
        >>> _ = model(torch.randint(50, (1, 90)), cache=cache)
        >>> cache.get_seq_length(), cache.nbytes == size
        (100, True)
    """

    def __init__(self, config: Any) -> None:
        depth: Any = getattr(config, "num_hidden_layers", None)
        if not is_integer(depth) or depth < 1:
            raise DTypeError(
                message("config", "a config with num_hidden_layers", type(config).__name__, "Pass model.config.")
            )
        super().__init__(layers=[HLACacheLayer() for _ in range(depth)])

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(layer.nbytes for layer in self.layers)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """The sequences that `beam_idx` names, in its order."""
        check_index(beam_idx, self._known_batch(), "beam_idx")
        super().reorder_cache(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """The sequences that `indices` names, or for which it is True."""
        if isinstance(indices, Tensor) and indices.dtype == torch.bool:
            batch = self._known_batch()
            if batch is not None and indices.shape != (batch,):
                raise ShapeError(
                    message("indices", f"shape ({batch},)", f"{tuple(indices.shape)}",
                            "One entry for each sequence of the cache.")
                )  # fmt: skip
        else:
            check_index(indices, self._known_batch(), "indices")
        super().batch_select_indices(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence so many times."""
        if not is_integer(repeats) or repeats < 1:
            raise OptionError(message("repeats", "an integer ≥ 1", repr(repeats), "How many of each sequence."))
        super().batch_repeat_interleave(repeats)

    def _known_batch(self) -> int | None:
        """None before the first token."""
        batch: int = self.batch_size
        return None if batch < 0 else batch


def cache_layer(cache: Any, index: int) -> HLACacheLayer:
    """Where a layer with states keeps its own, in an `HLACache` or in the cache that `generate` has made.

    Args:
        cache: an `HLACache`, or a `DynamicCache`, where it takes the place of keys and values before the first token.
        index: the number of the layer in the model.

    Returns:
        The layer of the cache: call with its `state`, then `advance` it.

    Raises:
        DTypeError: another kind of cache.
        OptionError: a `DynamicCache` that has keys and values of this layer, or no layer of that number.

    Example:
        >>> import torch
        >>> from transformers import DynamicCache
        >>> from hla.integrations.transformers import cache_layer
        >>> from hla.nn.torch import HigherOrderAttention
        >>> layer, x, own = HigherOrderAttention(32, 4), torch.randn(2, 7, 32), cache_layer(DynamicCache(), 0)
        >>> for part in x.split([4, 3], dim=1):
        ...     y, state = layer(part, own.state, return_state=True)
        ...     own.advance(state, part.shape[1])
        >>> own.seen, torch.allclose(y, layer(x)[:, 4:], atol=1e-5)
        (7, True)
    """
    if not isinstance(cache, (HLACache, DynamicCache)):
        raise DTypeError(
            message("cache", "an HLACache or a DynamicCache", type(cache).__name__,
                    "Leave cache_implementation alone: the state has a constant size anyway.")
        )  # fmt: skip
    whole = is_integer(index) and index >= 0
    while whole and cache.layer_class_to_replicate is not None and index >= len(cache.layers):
        cache.layers.append(cache.layer_class_to_replicate())  # as for keys and values
    if not whole or index >= len(cache.layers):
        raise OptionError(
            message("index", f"the number of one of {len(cache.layers)} layers", repr(index), "Pass block.layer_idx.")
        )
    found = cache.layers[index]
    if isinstance(found, HLACacheLayer):
        return found
    if found.get_seq_length() > 0:
        raise OptionError(
            message("cache", "no tokens in it that this layer has not seen", f"{found.get_seq_length()}",
                    "Keys and values of another attention say nothing here: begin with an empty cache.")
        )  # fmt: skip
    cache.layers[index] = made = HLACacheLayer()
    return made


def _alone(x: Tensor) -> Tensor:
    """x, or a copy of it if it is a view that keeps much more alive: all tokens of a prompt, say."""
    if is_traced(x) or x.untyped_storage().nbytes() <= 2 * x.numel() * x.element_size():
        return x
    return x.clone()


def _no_keys() -> OptionError:
    return OptionError(
        message("cache", "a cache of keys and values", "an HLACache, which has states",
                "Only layers that keep states can use it: pass no cache, and this model makes its own.")
    )  # fmt: skip

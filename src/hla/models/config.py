"""The sizes of a model and the kinds of its layers, for any framework."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from hla.arrays import is_integer, is_number
from hla.errors import OptionError, message
from hla.nn.options import (
    DEFAULTS,
    OPERATORS,
    check_norm_eps,
    check_rotary_base,
    check_softmax_sizes,
    read_layer_options,
)

KINDS = (*OPERATORS, "softmax")
Layer = str | tuple[str, ...]

_OWN = ("d_model", "num_heads", "num_kv_heads", "operator", "causal", "device", "dtype")


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only language model: embedding, blocks of attention and SwiGLU behind RMS norms, logits.

    Attributes:
        vocab_size: number of different tokens.
        d_model: features of the residual stream.
        num_layers: number of blocks.
        num_heads: query heads of each layer.
        num_kv_heads: key/value heads of each layer; `num_heads` by default.
        layers: the attention of all blocks, or a list with that of each: an operator's name, a list of one operator for
            each head, or "softmax" (with rotary positions). In a list for blocks, heads come as lists of their own.
        hidden_size: inner features of SwiGLU; by default 8/3 of `d_model`, rounded up to a multiple of 8.
        attention: further options of `HigherOrderAttention` for the layers with operators.
        rotary_base: of the softmax layers.
        norm_eps: of the RMS norms between layers.
        dropout: probability that a feature is dropped from the embedding and from what a layer adds, in training.
        tie_embeddings: logits are inner products with the embedding, not with a matrix of their own.

    Raises:
        OptionError: a size that is none or that does not divide, an unknown kind of layer, a list of the wrong length,
            or `attention` as the layer refuses it.

    Example:
        >>> from hla.models import ModelConfig
        >>> config = ModelConfig(vocab_size=256, d_model=64, num_layers=2, num_heads=4, layers=["hla2", "softmax"])
        >>> config.kinds(), config.inner
        (('hla2', 'softmax'), 176)
    """

    vocab_size: int
    d_model: int = 256
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int | None = None
    layers: str | Sequence[str | Sequence[str]] = "hla2"
    hidden_size: int | None = None
    attention: Mapping[str, Any] = field(default_factory=dict)
    rotary_base: float = 10_000.0
    norm_eps: float = 1e-6
    dropout: float = 0.0
    tie_embeddings: bool = True

    def __post_init__(self) -> None:
        for name in ("vocab_size", "d_model", "num_layers", "num_heads", "num_kv_heads", "hidden_size"):
            value = getattr(self, name)
            if value is None and name in ("num_kv_heads", "hidden_size"):
                continue
            if not is_integer(value) or value < 1:
                raise OptionError(message(name, "an integer ≥ 1", repr(value), "Pass a size."))
        if not isinstance(self.tie_embeddings, bool):
            raise OptionError(
                message("tie_embeddings", "True or False", repr(self.tie_embeddings), "Pass a Python bool.")
            )
        if not is_number(self.dropout) or not 0 <= self.dropout < 1:
            raise OptionError(message("dropout", "a probability in [0, 1)", repr(self.dropout), "0 for none."))
        check_rotary_base(self.rotary_base)
        check_norm_eps(self.norm_eps)
        self._check_attention()
        kv_heads = self.num_kv_heads or self.num_heads
        for kind in dict.fromkeys(self.kinds()):
            if kind == "softmax":
                check_softmax_sizes(self.d_model, self.num_heads, kv_heads)
            else:
                own = {"d_model": self.d_model, "num_heads": self.num_heads, "num_kv_heads": kv_heads, "operator": kind}
                read_layer_options(**{**DEFAULTS, **self.attention, **own})
        for own_field in fields(self):
            object.__setattr__(self, own_field.name, _plain(getattr(self, own_field.name)))

    def _check_attention(self) -> None:
        """OptionError unless `attention` has names of options that the model leaves open."""
        if not isinstance(self.attention, Mapping):
            raise OptionError(
                message("attention", "a mapping from options to values", repr(self.attention), "Pass {} for none.")
            )
        names = set(self.attention)
        if own := names & set(_OWN):
            raise OptionError(
                message("attention", "options that the model does not set itself", ", ".join(sorted(own)),
                        "Use the fields of the same name, or layers for operators.")
            )  # fmt: skip
        if "process_group" in names:
            raise OptionError(
                message("attention", "options that a file can hold", "process_group",
                        "Set it on the layers: block.attention.process_group = group for each of model.blocks.")
            )  # fmt: skip
        if unknown := names - set(DEFAULTS):
            raise OptionError(
                message("attention", "options of HigherOrderAttention", ", ".join(sorted(map(repr, unknown))),
                        f"It knows {', '.join(x for x in DEFAULTS if x not in _OWN)}.")
            )  # fmt: skip

    @property
    def inner(self) -> int:
        """Inner features of SwiGLU."""
        return self.hidden_size or -(-self.d_model * 8 // 24) * 8

    def kinds(self) -> tuple[Layer, ...]:
        """The attention of each block: a name, or one name for each head."""
        if isinstance(self.layers, str):
            return (_kind("layers", self.layers, self.num_heads),) * self.num_layers
        if not isinstance(self.layers, (list, tuple)) or len(self.layers) != self.num_layers:
            got = f"{len(self.layers)}" if isinstance(self.layers, (list, tuple)) else repr(self.layers)
            raise OptionError(
                message("layers", f"a name, or a list of one for each of num_layers = {self.num_layers} blocks", got,
                        "For mixed heads in every block repeat the list of heads.")
            )  # fmt: skip
        return tuple(_kind(f"layers[{i}]", x, self.num_heads) for i, x in enumerate(self.layers))

    def to_json(self) -> str:
        """The config as text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ModelConfig:
        """The inverse of `to_json`; ValueError for anything else."""
        found = json.loads(text)
        known = {f.name for f in fields(cls)}
        if not isinstance(found, dict) or not set(found) <= known or "vocab_size" not in found:
            raise ValueError(message("text", f"an object with the fields {sorted(known)}", text[:80], "See to_json."))
        return cls(**found)


def _plain(x: Any) -> Any:
    """A copy that later changes of the original do not reach, and that JSON holds: numbers of Python for NumPy's."""
    if isinstance(x, Mapping):
        return {key: _plain(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return tuple(map(_plain, x))
    return int(x) if is_integer(x) else float(x) if is_number(x) else x


def _kind(name: str, kind: Any, num_heads: int) -> Layer:
    if isinstance(kind, (list, tuple)):
        if len(kind) != num_heads or not all(x in OPERATORS for x in kind):
            raise OptionError(
                message(name, f"one of {', '.join(OPERATORS)} for each of num_heads = {num_heads} heads",
                        repr(list(kind)), "Softmax is for whole layers.")
            )  # fmt: skip
        return tuple(kind)
    if kind not in KINDS:
        raise OptionError(message(name, f"one of {', '.join(KINDS)}", repr(kind), "Check the spelling."))
    return str(kind)

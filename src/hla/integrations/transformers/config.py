"""The configuration of the model, under the names that Transformers has for sizes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import field
from difflib import get_close_matches
from typing import Any

from transformers import PretrainedConfig

from hla.errors import OptionError, message
from hla.models.config import ModelConfig
from hla.nn.options import DEFAULTS, check_norm_eps

_NAMES = {
    "vocab_size": "vocab_size",
    "d_model": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "layers": "layers",
    "hidden_size": "intermediate_size",
    "attention": "attention",
    "rotary_base": "rotary_base",
    "norm_eps": "rms_norm_eps",
    "dropout": "dropout",
    "tie_embeddings": "tie_word_embeddings",
}
"""The fields of `ModelConfig` and what they are called here."""
_ELSEWHERE = {
    **{name: f'Use attention={{"{name}": …}}.' for name in DEFAULTS},
    **{own: f"Use {name}=…." for own, name in _NAMES.items()},
    **dict.fromkeys(("operator", "mixer"), "Use layers=…."),
    "causal": "The model is causal.",
    "attention_dropout": "Use dropout=…: there are no attention weights to drop.",
    "rope_theta": 'Use rotary_base=… for softmax layers, attention={"rotary": True, "rotary_base": …} for others.',
    "n_embd": "Use hidden_size=….",
    "n_layer": "Use num_hidden_layers=….",
    "n_head": "Use num_attention_heads=….",
    "layer_types": "Use layers=….",
    "attention_bias": 'Use attention={"bias": …}.',
    "sliding_window": 'Layers see all tokens before: use attention={"decay": …}.',
    **dict.fromkeys(("rope_scaling", "rope_parameters"), 'Use rotary_base=…, or attention={"rotary_base": …}.'),
    "hidden_act": "The MLPs are SwiGLU.",
}
"""Names from elsewhere that a config would keep and nobody read, and what to do."""


class HLAConfig(PretrainedConfig):
    """A decoder-only language model, as `hla.models.ModelConfig`, with the names that Transformers uses.

    Attributes:
        vocab_size: number of different tokens.
        hidden_size: features of the residual stream.
        num_hidden_layers: number of blocks.
        num_attention_heads: query heads of each layer.
        num_key_value_heads: key/value heads of each layer; by default as many.
        layers: the attention of all blocks, or a list with that of each: an operator's name, a list of one operator for
            each head, or "softmax" (with rotary positions).
        intermediate_size: inner features of SwiGLU; by default 8/3 of `hidden_size`, rounded up to a multiple of 8.
        attention: further options of `HigherOrderAttention` for the layers with operators.
        rotary_base: of the softmax layers.
        rms_norm_eps: of the RMS norms between layers.
        dropout: probability that a feature is dropped from the embedding and from what a layer adds, in training.
        tie_word_embeddings: logits are inner products with the embedding.
        use_cache: return the states, outside of training, unless a call says otherwise.
        pad_token_id: as for every model, like `bos_token_id` and `eos_token_id`.
        bos_token_id: see `pad_token_id`.
        eos_token_id: see `pad_token_id`.

    Further keywords are those that every `PretrainedConfig` takes.

    Raises:
        OptionError: a size that is none, an unknown kind of layer, options that contradict each other, or a keyword
            that looks like a misspelt one or belongs elsewhere, as `d_model` or `decay`.

    Example:
        >>> from hla.integrations.transformers import HLAConfig
        >>> config = HLAConfig(
        ...     hidden_size=64, num_hidden_layers=2, layers=["hla2", "softmax"], attention={"decay": 0.99}
        ... )
        >>> config.intermediate_size, config.to_model_config().kinds()
        (176, ('hla2', 'softmax'))
    """

    model_type = "hla"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # noqa: RUF012 (`Trainer` adds a list to it)

    vocab_size: int = 32_000
    hidden_size: int = 256
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int | None = None
    layers: str | list[str | list[str]] = "hla2"
    intermediate_size: int | None = None
    attention: dict[str, Any] = field(default_factory=dict)
    rotary_base: float = 10_000.0
    rms_norm_eps: float = 1e-6
    dropout: float = 0.0
    tie_word_embeddings: bool = True
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        for name in kwargs:
            if name in _ELSEWHERE:
                raise OptionError(message(name, "a field of HLAConfig", "another name", _ELSEWHERE[name]))
            if close := get_close_matches(name, _NAMES.values(), 1, 0.8):
                raise OptionError(message(name, "a known field", "another name", f"Did you mean {close[0]}?"))
        for name in ("is_encoder_decoder", "add_cross_attention", "output_attentions"):
            if kwargs.get(name, getattr(self, name, False)):
                raise OptionError(message(name, "False", "True", "The model is a decoder without attention weights."))
        check_norm_eps(self.rms_norm_eps, "rms_norm_eps")
        for name in ("d_model", "num_heads", "num_kv_heads", "operator", "causal"):
            if isinstance(self.attention, dict) and name in self.attention:
                raise OptionError(
                    message("attention", "options that the model does not set itself", name, _ELSEWHERE[name])
                )
        told = self.to_model_config()
        for own, name in _NAMES.items():
            setattr(self, name, _as_lists(getattr(told, own)))
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        self.intermediate_size = told.inner
        super().__post_init__(**kwargs)

    def to_model_config(self) -> ModelConfig:
        """The same as a `ModelConfig`."""
        with _translated():
            return ModelConfig(**{own: getattr(self, name) for own, name in _NAMES.items()})

    @classmethod
    def from_model_config(cls, config: ModelConfig, **kwargs: Any) -> HLAConfig:
        """The same as a `ModelConfig`; keywords are for the fields that it does not have, as `eos_token_id`."""
        return cls(**{**{name: getattr(config, own) for own, name in _NAMES.items()}, **kwargs})


@contextmanager
def _translated() -> Iterator[None]:
    """Errors say what was expected under the names that the fields have here; what came stays as it is.

    So does `norm_eps`: here it can only be the option in `attention`.
    """
    names = {own: name for own, name in _NAMES.items() if own != "norm_eps"}
    try:
        yield
    except OptionError as error:
        expected, got, rest = str(error).partition(", got ")
        expected = re.sub(rf"\b({'|'.join(names)})\b", lambda found: names[found[0]], expected)
        raise OptionError(expected + got + rest) from None


def _as_lists(value: Any) -> Any:
    """As JSON gives it back."""
    if isinstance(value, dict):
        return {name: _as_lists(x) for name, x in value.items()}
    return [_as_lists(x) for x in value] if isinstance(value, (list, tuple)) else value

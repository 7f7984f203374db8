"""The operators as attention functions, for models of Transformers that exist."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_MAPPING, AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

import hla
from hla import arrays, features
from hla.errors import DTypeError, OptionError, ShapeError, message
from hla.nn.options import OPERATORS, OperatorOptions, read_operator_options
from hla.nn.torch.parts import accumulation_dtype, fixed_decays

_HARMLESS = frozenset({
    "cache_position", "is_causal", "labels", "layer_idx", "logits_to_keep", "max_length_k", "max_length_q",
    "num_items_in_batch", "output_hidden_states", "output_router_logits", "position_embeddings", "position_ids",
    "return_dict", "use_cache", "cache", "past_key_values", "kwargs",
})  # fmt: skip
"""Keywords that models pass along and that say nothing about attention, or nothing that is not known already."""
_REFUSED = {
    "softcap": "There are no scores to cap.",
    "s_aux": "There is no softmax for a sink to take part in.",
    "sinks": "There is no softmax for a sink to take part in.",
    "position_bias": "There are no scores to add a bias to.",
    "head_mask": "Scale the heads' outputs in the model instead.",
    "output_attentions": "There are no attention weights.",
    "indices": "Every token counts: there is no selection of keys.",
    "block_indices": "Every token counts: there is no selection of keys.",
    "cu_seq_lens_q": "Packed sequences are told by position_ids, without attention_mask and with use_cache=False.",
    "cu_seq_lens_k": "Packed sequences are told by position_ids, without attention_mask and with use_cache=False.",
    "seq_idx": "Packed sequences are told by position_ids, without attention_mask and with use_cache=False.",
}
_NAME = re.compile(r"[A-Za-z0-9_.-]*")
_TAKEN = ("flash", "flex", "sdpa", "paged", "eager")


def register(
    operators: str | Sequence[str] = OPERATORS,
    *,
    prefix: str = "",
    decay: float | Sequence[float] | None = None,
    feature_map: str = "identity",
    normalize: bool = False,
    eps: float = 1e-6,
    ridge: float = 0.0,
    form: str = "auto",
    chunk_size: int | None = None,
    backend: Any = None,
) -> tuple[str, ...]:
    r"""Add operators to what `attn_implementation` takes, with the mask that they need.

    In a layer of such a model o = HLA(s q, k, v; γ) with its own q, k, v (rotated or not), scale s and causality. Query
    heads share keys as the model says. Padding (a 2-D attention mask) and packed sequences (position ids that start
    anew) are as if each sequence were alone.

    Args:
        operators: a name, or several: "hla2", "ahla", "hla3", "linear_attention".
        prefix: comes before the names, so that one operator can be there with several options.
        decay: γ in (0, 1], or one for each key/value head; for causal layers only.
        feature_map: φ of q and k: "identity", "elu+1", "relu" or "softmax".
        normalize: as for the operators, like `eps`, `ridge` (for hla2 alone), `form`, `chunk_size` and `backend`.
        eps: see `normalize`.
        ridge: see `normalize`.
        form: see `normalize`.
        chunk_size: see `normalize`.
        backend: see `normalize`.

    Returns:
        The names that were added. A name that was added before gets the new options, in existing models, too.

    Raises:
        OptionError: an unknown operator, an option that is not allowed, a prefix that Transformers would misread.
            Later, in a call of the model: a cache with tokens in it, cross-attention, dropout of attention weights, a
            sliding window, soft caps, sinks, biases, 4-D masks, and keywords that are not known.

    Example:
        >>> import torch
        >>> from transformers import AutoModelForCausalLM, LlamaConfig
        >>> from hla.integrations.transformers import register
        >>> register("hla2", prefix="mean-", decay=0.99, feature_map="elu+1", normalize=True)
        ('mean-hla2',)
        >>> config = LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        ...                      num_attention_heads=4, num_key_value_heads=2)
        >>> model = AutoModelForCausalLM.from_config(config, attn_implementation="mean-hla2")
        >>> model.generate(torch.randint(3, 50, (2, 7)), max_new_tokens=3, use_cache=False).shape[0]
        2
    """
    names = (operators,) if isinstance(operators, str) else tuple(operators)
    if not isinstance(prefix, str) or not _NAME.fullmatch(prefix) or any(word in prefix for word in _TAKEN):
        raise OptionError(
            message("prefix", f"letters, digits, '_', '.' and '-', without {', '.join(_TAKEN)}", repr(prefix),
                    "Transformers takes other names for kernels of its own.")
        )  # fmt: skip
    if feature_map not in features.NAMES:
        raise OptionError(
            message("feature_map", f"one of {', '.join(features.NAMES)}", repr(feature_map), "Check the spelling.")
        )
    decays: Any = decay if decay is None or not arrays.is_number(decay) else (decay,)
    decays = tuple(decays) if isinstance(decays, (list, tuple)) else decays
    made = {}
    if decays is not None and not (isinstance(decays, tuple) and decays):
        raise OptionError(
            message("decay", "a number in (0, 1], or a list of one for each key/value head", repr(decay), "None is 1.")
        )
    for name in names:
        options = [
            read_operator_options(
                operator=name,
                causal=True,
                decay=x,
                scale=1.0,
                normalize=normalize,
                eps=eps,
                ridge=ridge if name == "hla2" or "hla2" not in names else 0.0,
                form=form,
                chunk_size=chunk_size,
                backend=backend,
            )
            for x in decays or (None,)
        ]
        made[prefix + name] = partial(_attend, options[0], decays, feature_map)
    for name, function in made.items():
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, _mask)
    return tuple(made)


def _attend(
    options: OperatorOptions,
    decays: tuple[float, ...] | None,
    feature_map: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """q (B, H, T, d), k, v (B, Hkv, T, ·) → (o (B, T, H, dv), None)."""
    _check_call(module, query, key, dropout, sliding_window, kwargs)
    batch, heads, length, d = query.shape
    kv_heads = key.shape[1]
    causal = _is_causal(module) if is_causal is None else is_causal
    told = _told(attention_mask, batch, length, module, kwargs)
    decay: Any = None
    if decays is not None:
        if not causal:
            raise OptionError(
                message("decay", "None in a bidirectional layer", repr(decays), "It has no order of time: register "
                        "the operator once more, with another prefix and without decay.")
            )  # fmt: skip
        if len(decays) not in (1, kv_heads):
            raise OptionError(
                message("decay", f"a number, or one for each of {kv_heads} key/value heads", f"{len(decays)} numbers",
                        "Heads that share keys share the decay.")
            )  # fmt: skip
        decay = decays[0]
        if len(decays) > 1:
            decay = fixed_decays(decays, value)
    if feature_map != "identity":
        query, key = (hla.feature_map(x.to(accumulation_dtype(x)), feature_map) for x in (query, key))
    o = getattr(hla, options.operator)(
        query.view(batch, kv_heads, heads // kv_heads, length, d),
        key[:, :, None],
        value[:, :, None],
        decay=decay,
        scale=d**-0.5 if scaling is None else float(scaling),
        normalize=options.normalize,
        eps=options.eps,
        mask="causal" if causal else "none",
        form=options.form,
        chunk_size=options.chunk_size,
        backend=options.backend,
        **({"ridge": options.ridge} if options.operator == "hla2" else {}),
        **told,
    )
    return o.flatten(1, 2).transpose(1, 2).contiguous(), None


def _is_causal(module: nn.Module) -> bool:
    """What the layer says of itself; its model may make it see the future."""
    told = getattr(module, "is_causal", None)
    if told is None:
        raise OptionError(
            message("is_causal", "an attribute of the layer, True or False", f"none in {type(module).__name__}",
                    "It does not say whether it sees the future: set it in each of these layers, to False in an "
                    "encoder.")
        )  # fmt: skip
    return bool(told and getattr(_config(module), "is_causal", True))


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """What the layers are told: bool (B, T), False for padding; int (B, T), the packed sequence of each token; or None.

    `mask_function(b, h, i, j)` says whether token i sees token j.
    """
    config = kwargs.get("config")
    _check_model(config)
    if q_length != kv_length:
        return None  # the layers refuse it and say why
    if attention_mask is not None:
        attention_mask = attention_mask[:, -kv_length:]
        if not arrays.is_traced(attention_mask) and bool(attention_mask.all()):
            attention_mask = None
    if mask_function is causal_mask_function or mask_function is bidirectional_mask_function:
        return attention_mask
    windowed = getattr(config, "sliding_window", None) is not None  # the layers look at it, too
    segments = _segments(batch_size, q_length, mask_function, attention_mask, use_vmap, windowed, device)
    return segments if attention_mask is None else attention_mask


def _segments(
    batch: int,
    length: int,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None,
    use_vmap: bool,
    windowed: bool,
    device: torch.device | str | None,
) -> Tensor | None:
    """The packed sequences of a mask that is causal in each of them, as int (B, T). Any other mask is refused.

    A sequence starts where a token does not see the one before. Windows and holes at its start, and a view of the
    future, are found by asking for its first token, and for the next one.
    """
    refused = OptionError(
        message("mask", "causal or bidirectional attention, or packed sequences", "another mask",
                "Sliding windows, chunks beside padding, blocks that see their future and masks of your own cannot be "
                "told to these operators: use sdpa for such a model.")
    )  # fmt: skip
    if use_vmap or (attention_mask is not None and not windowed and arrays.is_traced(attention_mask)):
        raise refused
    if length < 2:
        return None
    rows = torch.arange(batch, device=device)[:, None]
    time = torch.arange(length, device=device)[None]
    head = torch.zeros((), dtype=torch.int64, device=device)

    def sees(i: Tensor, j: Tensor) -> Tensor:
        return torch.as_tensor(mask_function(rows, head, i, j), device=device).expand(batch, i.shape[-1])

    starts = ~sees(time[:, 1:], time[:, :-1])
    starts = torch.cat([torch.ones_like(starts[:, :1]), starts], 1)
    if not arrays.is_traced(starts):
        first = torch.where(starts, time, 0).cummax(1).values
        before = (first - 1).clamp_min(0)
        strange = ~sees(time.expand(batch, -1), first) | ((first > 0) & sees(time.expand(batch, -1), before))
        strange[:, :-1] |= sees(time[:, :-1], time[:, 1:])
        packed = bool(starts[:, 1:].any())
        if bool(strange.any()) or (attention_mask is not None and packed):
            raise refused
        if not packed:
            return None
    return starts.cumsum(1) - 1


def _told(attention_mask: Any, batch: int, length: int, module: nn.Module, kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """What `_mask` made, as keywords of the operators, and what it was not told of packed sequences."""
    if attention_mask is not None:
        if not isinstance(attention_mask, Tensor) or attention_mask.dtype not in (torch.bool, torch.int64):
            got = f"{attention_mask.dtype}" if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
            raise DTypeError(
                message("attention_mask", "bool, False for padding", got,
                        "Pass a mask (B, T) of 0 and 1 to the model.")
            )  # fmt: skip
        if attention_mask.shape != (batch, length):
            raise ShapeError(
                message("attention_mask", f"shape ({batch}, {length})", f"{tuple(attention_mask.shape)}",
                        "Masks of queries by keys cannot be told to these operators: pass a mask (B, T) to the model.")
            )  # fmt: skip
        if attention_mask.dtype == torch.int64:
            return {"segment_ids": attention_mask[:, None, None]}
    told = {} if attention_mask is None else {"token_mask": attention_mask[:, None, None]}
    segments = _untold(attention_mask, kwargs.get("position_ids"), length, module)
    return told if segments is None else {**told, "segment_ids": segments[:, None, None]}


def _untold(present: Tensor | None, positions: Any, length: int, module: nn.Module) -> Tensor | None:
    """Packed sequences that Transformers does not tell of, since there is a cache or a mask: refused, or int (B, T).

    Positions go on by one, or by the columns in between where tokens are skipped. In a traced program that cannot be
    looked at, so there tokens are kept apart.
    """
    if not isinstance(positions, Tensor) or positions.ndim != 2 or positions.shape[1] != length or length < 2:
        return None
    traced = arrays.is_traced(positions)
    if not traced and not _is_first(module):
        return None
    if present is None:
        starts = positions.diff(dim=1) != 1
        starts = torch.cat([torch.zeros_like(starts[:, :1]), starts], 1)
    else:
        positions = positions.expand(present.shape)
        column = torch.arange(length, device=present.device)
        last = torch.where(present, column, -1).cummax(1).values
        last = torch.cat([torch.full_like(last[:, :1], -1), last[:, :-1]], 1)
        step = positions - positions.gather(1, last.clamp_min(0))
        starts = present & (last >= 0) & (step != 1) & (step != column - last)
    if traced:
        return starts.cumsum(1)
    if bool(starts.any()):
        raise OptionError(
            message("position_ids", "positions in a row beside a cache or an attention_mask", "packed sequences",
                    "Pass use_cache=False and no attention_mask. A model that then still comes here does not tell its "
                    "attention of packed sequences.")
        )  # fmt: skip
    return None


def _is_first(module: nn.Module) -> bool:
    """Whether positions have not been looked at in an earlier layer; they are waited for."""
    config = _config(module)
    kinds: Any = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ["attention"]
    return getattr(module, "layer_idx", 0) in (0, None) or "attention" not in kinds[0]


def _check_model(config: Any) -> None:
    """OptionError for models that make masks as others do and then compute softmax attention by themselves."""
    if arrays.is_compiling() or type(config) not in MODEL_MAPPING or config.get_text_config() is not config:
        return
    models = MODEL_MAPPING[type(config)]
    for model in models if isinstance(models, (list, tuple)) else [models]:
        if not hasattr(sys.modules[model.__module__], "ALL_ATTENTION_FUNCTIONS"):
            raise OptionError(
                message("attn_implementation", "a model that looks up its attention by name", model.__name__,
                        "It would compute softmax attention all the same: use hla.nn.convert.")
            )  # fmt: skip


def _check_call(
    module: nn.Module, query: Tensor, key: Tensor, dropout: float, sliding_window: int | None, kwargs: dict[str, Any]
) -> None:
    """Errors for what a model asks of its attention and these operators cannot do."""
    config = _config(module)
    crossed = getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False)
    # of a decoder that a model has alone (BartForCausalLM), the config says neither
    crossed = crossed or (getattr(module, "is_decoder", False) and getattr(module, "is_causal", None) is False)
    if crossed or getattr(module, "is_cross_attention", False) or "cross" in type(module).__name__.lower():
        raise OptionError(
            message("attn_implementation", "a model without cross-attention", type(module).__name__,
                    "These operators sum over tokens that have a query and a key. In models with an encoder and a "
                    "decoder replace the self-attention alone, with hla.nn.convert.")
        )  # fmt: skip
    if query.shape[2] != key.shape[2]:
        raise OptionError(
            message("cache", "no tokens in it with this attention",
                    f"{query.shape[2]} queries and {key.shape[2]} keys",
                    "A cache keeps keys and values, but these operators need past queries, too. Call "
                    "generate(use_cache=False), or use a model with states of constant size: "
                    "hla.integrations.transformers.HLAForCausalLM, or hla.nn.convert.")
        )  # fmt: skip
    if dropout:
        raise OptionError(
            message("dropout", "0", repr(dropout), "There are no attention weights to drop: set attention_dropout "
                    "(attn_pdrop, attention_probs_dropout_prob) in the config to 0.")
        )  # fmt: skip
    if sliding_window is not None and sliding_window < query.shape[2]:
        raise OptionError(
            message("sliding_window", "None, or no fewer than the tokens", repr(sliding_window),
                    "These operators see all tokens so far: set it to None in the config, and use a decay.")
        )  # fmt: skip
    for name, given in kwargs.items():
        if given is None or given is False or name in _HARMLESS:
            continue
        if name in _REFUSED:
            raise OptionError(message(name, "none", type(given).__name__, _REFUSED[name]))
        raise OptionError(
            message(name, "a keyword that is known", type(given).__name__,
                    "What the model means by it could be lost: use another attention for this model.")
        )  # fmt: skip


def _config(module: nn.Module) -> Any:
    return getattr(module, "config", None)

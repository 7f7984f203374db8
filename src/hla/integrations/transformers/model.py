"""The model: the blocks of `hla.models.Decoder` with the interface of Transformers."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from hla import arrays
from hla.errors import DTypeError, OptionError, ShapeError, message
from hla.integrations.transformers import packing
from hla.integrations.transformers.cache import HLACache
from hla.integrations.transformers.config import HLAConfig
from hla.integrations.transformers.packing import Told
from hla.nn.torch.checks import check_tokens
from hla.nn.torch.decoder import STD, Block, Decoder
from hla.nn.torch.parts import RMSNorm

CACHE = "cache" if "cache" in {f.name for f in fields(CausalLMOutputWithPast)} else "past_key_values"
"""What this version of Transformers calls the cache: "cache" from 5.24 on."""
_RENAMED = (("embedding.", "model.embed_tokens."), ("blocks.", "model.layers."), ("norm.", "model.norm."),
            ("head.", "lm_head."))  # fmt: skip
"""Parameters of `Decoder`, and what they are called here."""


class HLALayer(GradientCheckpointingLayer, Block):
    """A block of the decoder that can be checkpointed."""


class HLAPreTrainedModel(PreTrainedModel):
    """What the models have in common."""

    config_class = HLAConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ("HLALayer",)
    _is_stateful = True

    def __init__(self, config: HLAConfig, *args: Any, **kwargs: Any) -> None:
        if not isinstance(config, HLAConfig):
            raise DTypeError(message("config", "an HLAConfig", type(config).__name__, "Make one of its values."))
        super().__init__(config, *args, **kwargs)
        chosen = self.config._attn_implementation
        if chosen not in (None, "eager"):
            raise _no_choice(chosen)

    def set_attn_implementation(self, attn_implementation: Any, *args: Any, **kwargs: Any) -> None:
        """Raises unless it is "eager": the config says what each layer is."""
        if attn_implementation not in (None, "eager"):
            raise _no_choice(attn_implementation)

    def _initialize_weights(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        super()._initialize_weights(module)  # of classes outside of Transformers it would leave out the blocks

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """As the decoder; what was loaded from a file stays."""
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=STD)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, RMSNorm):
            module.reset_parameters()
        elif isinstance(module, Block):
            loaded = [p for p in module.parameters() if getattr(p, "_is_hf_initialized", False)]
            kept = [p.clone() for p in loaded]
            if len(loaded) < len(list(module.parameters())):
                module.reset_parameters()
            for p, value in zip(loaded, kept, strict=True):
                p.copy_(value)


class HLAModel(HLAPreTrainedModel):
    """The decoder without its logits: tokens (B, T) → (B, T, hidden_size).

    Args:
        config: an `HLAConfig`.
    """

    def __init__(self, config: HLAConfig) -> None:
        super().__init__(config)
        told = config.to_model_config()
        self.embed_tokens = nn.Embedding(told.vocab_size, told.d_model)
        self.layers = nn.ModuleList(HLALayer(told, kind) for kind in told.kinds())
        self.norm = RMSNorm((told.d_model,), told.norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: HLACache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        cache: HLACache | None = None,
        position_ids: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        max_length_q: int | None = None,
        max_length_k: int | None = None,
        seq_idx: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Hidden states behind the last norm.

        Args:
            input_ids: int (B, T).
            attention_mask: bool or int (B, T), or with the columns that the cache has seen in front: 1 for tokens and 0
                for padding, which may be anywhere and changes nothing.
            past_key_values: an `HLACache`, which is advanced; Transformers calls it `cache` from 5.24 on, and both
                names are taken.
            inputs_embeds: (B, T, hidden_size), in place of `input_ids`.
            use_cache: return a cache; by default as the config says, but not in training or for packed sequences.
            output_hidden_states: return those before each block and the last, too.
            return_dict: False for a tuple.
            cache: see `past_key_values`.
            position_ids: int (B, T) or (1, T), how many tokens come before each, as they are counted anyway. Without
                mask and cache they may start anew at 0: then several sequences are packed in a row.
            cu_seq_lens_q: int (N + 1,), cumulative lengths of packed sequences, of all rows one after another; as
                `position_ids`, if they are given, too.
            cu_seq_lens_k: the same once more.
            max_length_q: not needed; no less than the longest sequence.
            max_length_k: see `max_length_q`.
            seq_idx: int (B, T), the number of the packed sequence of each token.
            **kwargs: none that has a value.

        Raises:
            OptionError, ShapeError, DTypeError, TypeError: what the model cannot do, or does not know.
        """
        cache = _one_cache(cache, past_key_values)
        config = self.config
        if (input_ids is None) == (inputs_embeds is None):
            got = "both" if input_ids is not None else "none"
            raise OptionError(message("input_ids, inputs_embeds", "exactly one", got, "Pass tokens or embeddings."))
        if inputs_embeds is not None:
            _check_embeddings(inputs_embeds, config.hidden_size)
        else:
            check_tokens(input_ids, config.vocab_size)
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        _check_others(kwargs)
        told = Told(position_ids, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k, seq_idx)
        rows, columns = x.shape[:2]
        skipped = offsets = None
        if cache is None and attention_mask is None:
            offsets = packing.read(told, rows, columns)
        else:
            packing.refuse_beside("a cache" if attention_mask is None else "an attention_mask", told)
            skipped = _skipped(attention_mask, x, cache)
            _check_positions(position_ids, skipped, cache, x)
        if offsets is not None:
            if use_cache:
                raise OptionError(
                    message("use_cache", "False for packed sequences", "True", "A cache has one sequence for each row.")
                )
            use_cache = False
            x = x.reshape(1, rows * columns, -1)
            packing.refuse_groups(self.layers)
        use_cache = (config.use_cache and not self.training) if use_cache is None else use_cache
        output_hidden_states = config.output_hidden_states if output_hidden_states is None else output_hidden_states
        if cache is None and use_cache:
            cache = HLACache(config)
        if cache is not None and (not isinstance(cache, HLACache) or len(cache.layers) != len(self.layers)):
            raise DTypeError(
                message("cache", f"an HLACache of {len(self.layers)} layers",
                        f"{type(cache).__name__} of {len(cache.layers)}" if isinstance(cache, HLACache)
                        else type(cache).__name__, "Pass none, or HLACache(model.config).")
            )  # fmt: skip
        if cache is not None and not arrays.is_compiling():
            _check_whole(cache)
        x = functional.dropout(x, config.dropout, self.training)
        hidden = [x]
        for i, layer in enumerate(self.layers):
            before = None if cache is None else cache.layers[i].state
            x, after = layer(x, before, cache is not None, skipped, offsets)
            if cache is not None:
                cache.layers[i].advance(after, x.shape[1])
            hidden.append(x)
        hidden[-1] = self.norm(x).to(x.dtype)
        if offsets is not None:
            hidden = [x.view(rows, columns, -1) for x in hidden]
        found = BaseModelOutputWithPast(
            last_hidden_state=hidden[-1],
            hidden_states=tuple(hidden) if output_hidden_states else None,
            **{CACHE: cache if use_cache else None},
        )
        return found if _returns_dict(config, return_dict) else found.to_tuple()


class HLAForCausalLM(HLAPreTrainedModel, GenerationMixin):
    """A language model with a state of constant size, for `generate`, `Trainer` and the like.

    Args:
        config: an `HLAConfig`.

    Example:
        >>> import torch
        >>> from transformers import AutoModelForCausalLM
        >>> from hla.integrations.transformers import HLAConfig
        >>> model = AutoModelForCausalLM.from_config(HLAConfig(vocab_size=50, hidden_size=32, num_hidden_layers=2))
        >>> tokens = torch.randint(50, (2, 7))
        >>> model(tokens, labels=tokens).logits.shape
        torch.Size([2, 7, 50])
        >>> model.generate(tokens, max_new_tokens=5, do_sample=False).shape
        torch.Size([2, 12])
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 (Transformers reads a dict)

    def __init__(self, config: HLAConfig) -> None:
        super().__init__(config)
        self.model = HLAModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: HLACache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        cache: HLACache | None = None,
        position_ids: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        max_length_q: int | None = None,
        max_length_k: int | None = None,
        seq_idx: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Logits, and the loss where there are labels.

        Args:
            input_ids: as for `HLAModel`, like the rest.
            attention_mask: see `input_ids`.
            past_key_values: see `input_ids`.
            inputs_embeds: see `input_ids`.
            labels: int64 (B, T), the tokens themselves; −100 where there is no loss. They are shifted here, and no
                token is expected to say the first one of another packed sequence.
            use_cache: see `input_ids`.
            output_hidden_states: see `input_ids`.
            return_dict: see `input_ids`.
            logits_to_keep: the last so many columns, 0 for all; or the indices of columns. Not beside labels.
            cache: see `input_ids`.
            position_ids: see `input_ids`; from here on they tell of packed sequences.
            cu_seq_lens_q: see `input_ids`.
            cu_seq_lens_k: see `input_ids`.
            max_length_q: see `input_ids`.
            max_length_k: see `input_ids`.
            seq_idx: see `input_ids`.
            **kwargs: `num_items_in_batch`, by which the sum of losses is divided, and none else that has a value.

        Raises:
            OptionError, ShapeError, DTypeError, TypeError: as `HLAModel`.
        """
        cache = _one_cache(cache, past_key_values)
        told = Told(position_ids, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k, seq_idx)
        _check_kept(logits_to_keep)
        if labels is not None:
            _check_labels(labels, input_ids if inputs_embeds is None else inputs_embeds, logits_to_keep)
            if cache is None and attention_mask is None and labels.ndim == 2:
                rows, columns = labels.shape
                offsets = packing.read(told, rows, columns)
                told = Told(cu_seq_lens_q=offsets)
                if offsets is not None:
                    labels = labels.masked_fill(packing.starts(offsets, rows, columns, labels.device), -100)
        loss_options = {name: kwargs.pop(name) for name in ("num_items_in_batch",) if name in kwargs}
        found = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            cache=cache,
            **told._asdict(),
            **kwargs,
        )
        x = found.last_hidden_state
        kept = logits_to_keep if isinstance(logits_to_keep, (Tensor, list)) else slice(-logits_to_keep or None, None)
        logits = self.lm_head(x[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **loss_options)
        made = CausalLMOutputWithPast(
            loss=loss, logits=logits, hidden_states=found.hidden_states, **{CACHE: found.get(CACHE)}
        )
        return made if _returns_dict(self.config, return_dict) else made.to_tuple()

    @classmethod
    def from_decoder(cls, decoder: Decoder, **kwargs: Any) -> HLAForCausalLM:
        """The model with copies of a decoder's weights, in its dtype and mode.

        Args:
            decoder: an `hla.models.Decoder`.
            **kwargs: fields of `HLAConfig` that a decoder does not have, as `eos_token_id`.

        Raises:
            DTypeError: something else than a decoder.
        """
        if not isinstance(decoder, Decoder):
            raise DTypeError(
                message("decoder", "an hla.models.Decoder", type(decoder).__name__,
                        "Models of Transformers are loaded with from_pretrained.")
            )  # fmt: skip
        config = HLAConfig.from_model_config(decoder.config, **kwargs)
        parameter = decoder.embedding.weight
        model: HLAForCausalLM = cls(config).to(device=parameter.device, dtype=parameter.dtype)
        found = {}
        for name, x in decoder.state_dict().items():
            start, new = next((start, new) for start, new in _RENAMED if name.startswith(start))
            found[new + name.removeprefix(start)] = x
        if config.tie_word_embeddings:
            found["lm_head.weight"] = found["model.embed_tokens.weight"]
        model.load_state_dict(found)
        model.train(decoder.training)
        return model

    def to_decoder(self) -> Decoder:
        """An `hla.models.Decoder` with copies of the weights, in their dtype and mode."""
        config = self.config.to_model_config()
        parameter = self.model.embed_tokens.weight
        decoder = Decoder(config, device=parameter.device, dtype=parameter.dtype)
        found = {}
        for name, x in self.state_dict().items():
            new, start = next((new, start) for new, start in _RENAMED if name.startswith(start))
            found[new + name.removeprefix(start)] = x
        if config.tie_embeddings:
            del found["head.weight"]
        decoder.load_state_dict(found)
        return decoder.train(self.training)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def _prepare_position_ids_for_generation(self, *args: Any, **kwargs: Any) -> None:
        """None: the model counts tokens, and looking at positions would wait for the device at each token."""

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises: its cache is one of keys and values, in pages. So do `generate_batch` and the like."""
        raise OptionError(message("generate_batch", "a model with keys and values", "one with states", "Use generate."))

    def _prepare_cache_for_generation(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """An empty cache before the first token, which chunked prefill needs."""
        mask = model_kwargs.get("attention_mask")
        if mask is not None:
            _check_mask(mask)
        if mask is not None and bool((mask[:, -1] == 0).any()):
            raise OptionError(
                message("attention_mask", "a token at the end of each prompt", "padding there",
                        "The next token comes after the last column: pad on the left (padding_side=\"left\").")
            )  # fmt: skip
        if generation_config.cache_implementation is not None:
            raise OptionError(
                message("cache_implementation", "None", repr(generation_config.cache_implementation),
                        "The model has a state of constant size, and no other cache.")
            )  # fmt: skip
        embeds: Any = model_kwargs.get("inputs_embeds")
        cache: Any = model_kwargs.get(CACHE)
        seen = cache.get_seq_length() if isinstance(cache, HLACache) else 0
        if embeds is not None:
            columns = embeds.shape[1]
        elif mask is not None:
            columns = mask.shape[1]
        else:  # Transformers drops a mask of ones, and keeps its length
            columns = getattr(generation_config, "_mask_length", seen + 1)
        if columns == 0:
            raise OptionError(message("input_ids", "a token in each prompt", "none", "Begin with one: bos_token_id."))
        if seen > 0 and columns <= seen:
            raise OptionError(
                message("cache", f"fewer tokens than the {columns} of the text", f"{seen}",
                        "Pass the whole text so far, longer than the cache, or the new tokens with an attention_mask "
                        "of all.")
            )  # fmt: skip
        copies = max(generation_config.num_beams, generation_config.num_return_sequences)
        if seen > 0 and cache.batch_size != batch_size * copies:
            raise OptionError(
                message("cache", f"one of {batch_size} × {copies} sequences", f"one of {cache.batch_size}",
                        "For several continuations of each prompt take a copy: fork = copy.deepcopy(cache), then "
                        f"fork.batch_repeat_interleave({copies}).")
            )  # fmt: skip
        if generation_config.use_cache is not False and cache is None:
            model_kwargs[CACHE] = HLACache(self.config)


def _no_choice(chosen: Any) -> OptionError:
    return OptionError(
        message("attn_implementation", "none for this model", repr(chosen),
                "Its config says what each layer is: layers=…, and attention={\"backend\": …}.")
    )  # fmt: skip


def _check_whole(cache: HLACache) -> None:
    """OptionError unless all layers have seen the same tokens."""
    seen = [layer.seen for layer in cache.layers]
    if len(set(seen)) > 1:
        raise OptionError(
            message("cache", "layers that have seen the same tokens", f"{seen} tokens",
                    "Use methods of the cache, not of one layer, or start anew: HLACache(model.config).")
        )  # fmt: skip


def _one_cache(cache: Any, past_key_values: Any) -> Any:
    if cache is not None and past_key_values is not None:
        raise OptionError(message("cache, past_key_values", "one of them", "both", "They are the same thing."))
    return past_key_values if cache is None else cache


def _returns_dict(config: HLAConfig, return_dict: bool | None) -> bool:
    return bool(config.return_dict if return_dict is None else return_dict)


def _skipped(attention_mask: Any, x: Tensor, cache: HLACache | None) -> Tensor | None:
    """bool (B, T), True for padding; None where there is none."""
    if attention_mask is None:
        return None
    batch, length = x.shape[:2]
    seen = cache.get_seq_length() if isinstance(cache, HLACache) else 0
    if not isinstance(attention_mask, Tensor) or attention_mask.ndim != 2:
        got = f"{tuple(attention_mask.shape)}" if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
        raise ShapeError(
            message("attention_mask", "a tensor (B, T), 0 for padding", got,
                    "The layers are causal and know no other masks.")
        )  # fmt: skip
    if attention_mask.shape[0] != batch or attention_mask.shape[1] not in (length, seen + length):
        raise ShapeError(
            message("attention_mask", f"shape ({batch}, {length})" + f" or ({batch}, {seen + length})" * (seen > 0),
                    f"{tuple(attention_mask.shape)}", "One entry for each token, with or without those of the cache.")
        )  # fmt: skip
    mask = attention_mask[:, attention_mask.shape[1] - length :].to(x.device)
    return mask == 0 if _check_mask(mask) else None


def _check_mask(mask: Tensor) -> bool:
    """Errors for a mask that means something else; whether there is padding, or may be."""
    if mask.is_floating_point() or mask.is_complex():
        raise DTypeError(
            message("attention_mask", "bool or int, 1 for tokens and 0 for padding", f"{mask.dtype}",
                    "Pass mask.bool(); of an additive mask, which is 0 for tokens, mask == 0.")
        )  # fmt: skip
    if arrays.is_traced(mask):
        return True
    if not bool((mask != 1).any()):
        return False
    if bool(((mask != 1) & (mask != 0)).any()):
        raise OptionError(
            message("attention_mask", "1 for tokens and 0 for padding", f"{sorted(set(mask.flatten().tolist()))[:5]}",
                    "The model knows no other masks. Packed sequences are told by position_ids, without a mask.")
        )  # fmt: skip
    return True


def _check_embeddings(x: Any, width: int) -> None:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        got = f"{x.dtype}" if isinstance(x, Tensor) else type(x).__name__
        raise DTypeError(message("inputs_embeds", "a floating-point tensor", got, "Pass tokens as input_ids."))
    if x.ndim != 3 or x.shape[2] != width:
        raise ShapeError(
            message("inputs_embeds", f"shape (B, T, {width})", f"{tuple(x.shape)}", "The last axis is hidden_size.")
        )


def _check_kept(logits_to_keep: Any) -> None:
    if not isinstance(logits_to_keep, (Tensor, list)) and not (
        arrays.is_integer(logits_to_keep) and logits_to_keep >= 0
    ):
        raise OptionError(
            message("logits_to_keep", "a number of columns, or a tensor of their indices", repr(logits_to_keep),
                    "0 is all of them.")
        )  # fmt: skip


def _check_labels(labels: Any, tokens: Any, logits_to_keep: Any) -> None:
    """`tokens` (B, T, …), or what the model refuses."""
    if not isinstance(labels, Tensor) or labels.dtype != torch.int64:
        got = f"{labels.dtype}" if isinstance(labels, Tensor) else type(labels).__name__
        raise DTypeError(message("labels", "an int64 tensor", got, "Convert them: labels.long()."))
    if isinstance(tokens, Tensor) and labels.shape != tokens.shape[:2]:
        raise ShapeError(
            message("labels", f"shape {tuple(tokens.shape[:2])}, as the tokens", f"{tuple(labels.shape)}",
                    "One for each token, not shifted; −100 where there is no loss.")
        )  # fmt: skip
    if isinstance(logits_to_keep, Tensor) or logits_to_keep != 0:
        raise OptionError(
            message("logits_to_keep", "0 beside labels", repr(logits_to_keep), "The loss needs all logits.")
        )


def _check_others(kwargs: dict[str, Any]) -> None:
    """Errors for what would change nothing."""
    for name, value in kwargs.items():
        if name == "output_attentions":
            if value:
                raise OptionError(message(name, "False", "True", "There are no attention weights."))
        elif value is not None:
            raise TypeError(message(name, "no such argument", type(value).__name__, "The model does not know it."))


def _check_positions(positions: Any, skipped: Tensor | None, cache: Any, x: Tensor) -> None:
    """Errors for positions beside a mask or a cache that do not count the tokens."""
    if positions is None:
        return
    refused = OptionError(
        message("position_ids", "none, or the number of tokens before each", "others",
                "The model counts tokens itself. Packed sequences go without attention_mask and cache "
                "(use_cache=False).")
    )  # fmt: skip
    if not isinstance(positions, Tensor) or positions.ndim != 2 or arrays.is_traced(positions):
        raise refused
    present = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if skipped is None else ~skipped
    state = None if cache is None or not isinstance(cache, HLACache) else cache.layers[0].state
    before = present.new_zeros(x.shape[0], dtype=torch.int64) if state is None else state.position
    counted = before[:, None] + present.cumsum(1) - 1
    if positions.shape[0] not in (1, x.shape[0]) or positions.shape[1] != x.shape[1]:
        raise refused
    if bool(((positions.to(x.device) != counted) & present).any()):
        raise refused

"""A decoder-only language model of `HigherOrderAttention`, softmax attention, or both."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from hla.arrays import is_integer
from hla.errors import DTypeError, OptionError, message
from hla.files import write_whole
from hla.models.config import Layer, ModelConfig
from hla.nn.refusals import check_count
from hla.nn.torch import sampling
from hla.nn.torch.attention import HigherOrderAttention
from hla.nn.torch.checks import check_dtype, check_index, check_tokens
from hla.nn.torch.parts import RMSNorm
from hla.nn.torch.softmax import SoftmaxAttention

FORMAT = "hla-decoder"
STD = 0.02
"""Of embeddings and MLPs at the start of training."""


class DecoderState(NamedTuple):
    """The states of all layers; of constant size where no layer is softmax attention.

    Attributes:
        layers: a `LayerState`, or the keys and values of a softmax layer, for each block.
    """

    layers: tuple[Any, ...]

    def map(self, function: Callable[[Tensor], Tensor]) -> DecoderState:
        """The state with `function` applied to each of its tensors."""
        return DecoderState(tuple(layer.map(function) for layer in self.layers))

    def to(self, device: torch.device | str) -> DecoderState:
        """The state on another device."""
        return self.map(lambda x: x.to(device))

    def detach(self) -> DecoderState:
        """The state cut off from the graph."""
        return self.map(lambda x: x.detach())

    def reorder(self, index: Tensor) -> DecoderState:
        """The entries of the batch that `index` names, in its order.

        Raises:
            DTypeError, ShapeError, OptionError: `index` is no int tensor (N,), or names an entry that is none.
        """
        check_index(index, self.layers[0].position.shape[0])
        return self.map(lambda x: x.index_select(0, index.to(x.device)))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(x.numel() * x.element_size() for layer in self.layers for x in layer.tensors())


torch.serialization.add_safe_globals([DecoderState])


class SwiGLU(nn.Module):
    """W_down(SiLU(W_gate x) ⊙ W_up x)."""

    def __init__(self, d_model: int, inner: int, **placed: Any) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(d_model, inner, bias=False, **placed)
        self.up_proj = nn.Linear(d_model, inner, bias=False, **placed)
        self.down_proj = nn.Linear(inner, d_model, bias=False, **placed)

    def forward(self, x: Tensor) -> Tensor:
        """(…, d_model) → the same."""
        y: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class Block(nn.Module):
    """x + attention(norm(x)), then x + SwiGLU(norm(x))."""

    def __init__(self, config: ModelConfig, kind: Layer, **placed: Any) -> None:
        super().__init__()
        self.attention_norm = RMSNorm((config.d_model,), config.norm_eps, **placed)
        self.attention = _attention(config, kind, **placed)
        self.mlp_norm = RMSNorm((config.d_model,), config.norm_eps, **placed)
        self.mlp = SwiGLU(config.d_model, config.inner, **placed)
        self.dropout = config.dropout
        self.shrink = (2 * config.num_layers) ** -0.5

    def reset_parameters(self) -> None:
        """Draw all anew, as `Decoder.reset_parameters` says."""
        self.attention.reset_parameters()
        self.attention_norm.reset_parameters()
        self.mlp_norm.reset_parameters()
        nn.init.normal_(self.mlp.gate_proj.weight, std=STD)
        nn.init.normal_(self.mlp.up_proj.weight, std=STD)
        nn.init.normal_(self.mlp.down_proj.weight, std=STD * self.shrink)
        with torch.no_grad():
            self.attention.out_proj.weight.mul_(self.shrink)

    def forward(
        self,
        x: Tensor,
        state: Any = None,
        return_state: bool = False,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        """(B, T, d_model) and the layer's state → the same."""
        normed = self.attention_norm(x).to(x.dtype)
        found = self.attention(normed, state, return_state, key_padding_mask=key_padding_mask, cu_seqlens=cu_seqlens)
        y, state = found if return_state else (found, None)
        x = x + functional.dropout(y, self.dropout, self.training)
        y = self.mlp(self.mlp_norm(x).to(x.dtype))
        return x + functional.dropout(y, self.dropout, self.training), state


class Decoder(nn.Module):
    r"""A language model: tokens (B, T) → logits (B, T, vocabulary).

    Args:
        config: a `ModelConfig`.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        DTypeError: `config` is no `ModelConfig`, or `dtype` is none for parameters.

    Example:
        >>> import torch
        >>> from hla.models import Decoder, ModelConfig
        >>> model = Decoder(ModelConfig(vocab_size=50, d_model=32, num_layers=2, num_heads=4))
        >>> prompt = torch.randint(50, (2, 7))
        >>> model(prompt).shape, model.generate(prompt, 5, temperature=0.0).shape
        (torch.Size([2, 7, 50]), torch.Size([2, 5]))
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(config, ModelConfig):
            raise DTypeError(message("config", "a ModelConfig", type(config).__name__, "Make one: ModelConfig(…)."))
        check_dtype(dtype)
        self.config = config
        placed: dict[str, Any] = {"device": device, "dtype": dtype}
        self.embedding = nn.Embedding(config.vocab_size, config.d_model, **placed)
        self.blocks = nn.ModuleList(Block(config, kind, **placed) for kind in config.kinds())
        self.norm = RMSNorm((config.d_model,), config.norm_eps, **placed)
        self.head = (
            None if config.tie_embeddings else nn.Linear(config.d_model, config.vocab_size, bias=False, **placed)
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all anew: N(0, 0.02²), attention its own; what is added to the residual stream 1/√(2 layers) of it."""
        nn.init.normal_(self.embedding.weight, std=STD)
        if self.head is not None:
            nn.init.normal_(self.head.weight, std=STD)
        self.norm.reset_parameters()
        for block in self.blocks:
            assert isinstance(block, Block)
            block.reset_parameters()

    def forward(
        self,
        tokens: Tensor,
        state: DecoderState | None = None,
        return_state: bool = False,
        *,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Any:
        """Logits of the next token after each.

        Args:
            tokens: int (B, T).
            state: what an earlier call or `init_state` returned.
            return_state: return (logits, state).
            key_padding_mask: bool (B, T), True for padding, wherever it is: it changes nothing.
            cu_seqlens: int (N + 1,), from 0 to T: tokens are (1, T) and hold N sequences one after another. States are
                for a batch of N; softmax layers take none beside it.

        Returns:
            logits (B, T, vocabulary), or (logits, state).

        Raises:
            ShapeError, DTypeError, OptionError: tokens are no integers, have no rows, or are not in the vocabulary
                (looked at on the CPU only); as `HigherOrderAttention`.
        """
        x, following = self._hidden(tokens, state, return_state, key_padding_mask, cu_seqlens)
        logits = self._logits(x)
        return (logits, following) if return_state else logits

    def step(self, tokens: Tensor, state: DecoderState) -> tuple[Tensor, DecoderState]:
        """One token for each sequence: int (B,) → (logits (B, vocabulary), state).

        Raises:
            OptionError, ShapeError, DTypeError: as a call; a layer has a process group.
        """
        self._check_alone("step")
        check_tokens(tokens, self.config.vocab_size, ("B",))
        self._check_state(state)
        logits, state = self(tokens[:, None], state, True)
        return logits[:, 0], state

    def init_state(self, batch: int) -> DecoderState:
        """The state before the first token.

        Raises:
            OptionError: `batch` is no size.
        """
        count = check_count("batch", batch)
        return DecoderState(tuple(self._attention(i).init_state(count) for i in range(len(self.blocks))))

    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor,
        count: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        stop: int | Sequence[int] | None = None,
        key_padding_mask: Tensor | None = None,
        generator: torch.Generator | None = None,
        on_token: Callable[[Tensor], Any] | None = None,
    ) -> Tensor:
        """Continue prompts, one token at a time, without dropout.

        Args:
            tokens: int (B, T), the prompts, each of one token at least.
            count: tokens to make, at most.
            temperature: divides the logits; 0 takes the likeliest token.
            top_k: keep only so many of the likeliest tokens.
            top_p: then keep the fewest of the likeliest whose probabilities reach this.
            stop: a token that ends a sequence, or several of them; what follows the first of them in a row is this
                token, too. Generation ends when all rows have ended.
            key_padding_mask: bool (B, T), True for padding.
            generator: of the random numbers.
            on_token: called with each new column (B,) as soon as it is there; if it returns True, generation ends.

        Returns:
            The new tokens, int (B, n), n ≤ count, without the prompts.

        Raises:
            OptionError: an option is not allowed, a prompt is empty, or a layer has a process group.
        """
        self._check_alone("generate")
        sampling.check_sampling(temperature, top_k, top_p)
        stops = self._stops(stop)
        check_count("count", count, "a number of tokens")
        if on_token is not None and not callable(on_token):
            raise DTypeError(message("on_token", "a function of a column, or None", repr(on_token), "Pass a function."))
        modes = [(module, module.training) for module in self.modules()]
        self.eval()
        try:
            logits, state = self._prefill(tokens, key_padding_mask)
            made: list[Tensor] = []
            ended = torch.zeros(tokens.shape[0], dtype=torch.bool, device=tokens.device)
            ends = tokens.new_tensor(stops)
            while len(made) < count:
                token = sampling.draw(sampling.probabilities(logits, temperature, top_k, top_p), generator)
                if stops:
                    token = torch.where(ended, made[-1], token) if made else token
                    ended = ended | torch.isin(token, ends)
                made.append(token)
                if (on_token is not None and on_token(token) is True) or len(made) == count:
                    break
                if stops and bool(ended.all()):
                    break
                logits, state = self.step(token, state)
        finally:
            for module, training in modes:
                module.training = training
        return torch.stack(made, 1) if made else tokens.new_zeros(tokens.shape[0], 0)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write parameters and config into one safetensors file, which is complete or absent."""
        from safetensors.torch import save

        tensors = {name: x.detach().contiguous().cpu() for name, x in self.state_dict().items()}
        data = save(tensors, {"format": FORMAT, "config": self.config.to_json()})
        write_whole(path, data)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, device: torch.device | str = "cpu") -> Decoder:
        """The model that `save` wrote, in the dtype that it had.

        Raises:
            ValueError: the file is damaged or holds no such model.
            FileNotFoundError: there is no such file.
        """
        from safetensors import SafetensorError, safe_open

        if not Path(path).is_file():
            raise FileNotFoundError(os.fspath(path))
        try:
            with safe_open(os.fspath(path), framework="pt", device="cpu") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (it is no mapping)
            if metadata.get("format") != FORMAT:
                raise ValueError("a safetensors file without the mark of a model")
            config = ModelConfig.from_json(metadata["config"])
            model = cls(config, device="meta")
            model.load_state_dict(tensors, strict=True, assign=True)
        except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
            got = f"{os.fspath(path)}: {error}"
            raise ValueError(message("path", "a model written by Decoder.save", got, "Save it again.")) from None
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        return model.to(device)

    def _check_alone(self, name: str) -> None:
        """OptionError where a call is that of one rank among others, each with tokens of its own."""
        for block in self.blocks:
            attention: Any = block.attention
            if attention.process_group is not None:
                raise OptionError(
                    message("process_group", f"None in all layers for {name}", f"{attention.process_group!r:.60}",
                            "Set layer.process_group = None in each; states stay valid.")
                )  # fmt: skip

    def _hidden(
        self,
        tokens: Tensor,
        state: DecoderState | None,
        return_state: bool,
        key_padding_mask: Tensor | None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, DecoderState | None]:
        check_tokens(tokens, self.config.vocab_size)
        if state is not None:
            self._check_state(state)
        x = functional.dropout(self.embedding(tokens), self.config.dropout, self.training)
        after = []
        for i, block in enumerate(self.blocks):
            before = None if state is None else state.layers[i]
            x, layer = block(x, before, return_state, key_padding_mask, cu_seqlens)
            after.append(layer)
        return x, DecoderState(tuple(after)) if return_state else None

    def _check_state(self, state: Any) -> None:
        if not isinstance(state, DecoderState):
            raise DTypeError(
                message("state", "a DecoderState", type(state).__name__, "Use return_state=True or init_state(batch).")
            )
        found = sum(layer is not None for layer in state.layers)
        if found != len(self.blocks) or found != len(state.layers):
            raise OptionError(
                message("state", f"states of {len(self.blocks)} layers", f"{found}", "Use its own state.")
            )

    def _logits(self, x: Tensor) -> Tensor:
        weight = self.embedding.weight if self.head is None else self.head.weight
        return functional.linear(self.norm(x).to(x.dtype), weight)

    def _prefill(self, tokens: Tensor, key_padding_mask: Tensor | None) -> tuple[Tensor, DecoderState]:
        """Logits (B, vocabulary) after the last token of each prompt, and the state."""
        x, state = self._hidden(tokens, None, True, key_padding_mask)
        assert state is not None
        time = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        last = time if key_padding_mask is None else time.masked_fill(key_padding_mask, -1)
        if tokens.shape[1] == 0 or bool((last.amax(1) < 0).any()):
            raise OptionError(
                message("tokens", "prompts of one token at least", "an empty one", "Begin with a token of your own.")
            )
        rows = torch.arange(tokens.shape[0], device=tokens.device)
        return self._logits(x[rows, last.amax(1)]), state

    def _stops(self, stop: Any) -> list[int]:
        size = self.config.vocab_size
        stops = [] if stop is None else list(stop) if isinstance(stop, (list, tuple)) else [stop]
        for token in stops:
            if not is_integer(token) or not 0 <= token < size:
                raise OptionError(
                    message("stop", f"a token below vocab_size = {size}, several of them, or None", repr(stop),
                            "None ends no sequence.")
                )  # fmt: skip
        return [int(token) for token in stops]

    def _attention(self, i: int) -> Any:
        return self.blocks[i].attention


def _attention(config: ModelConfig, kind: Layer, **placed: Any) -> Any:
    kv_heads = config.num_kv_heads or config.num_heads
    if kind == "softmax":
        return SoftmaxAttention(config.d_model, config.num_heads, kv_heads, config.rotary_base, **placed)
    told = dict(config.attention)
    return HigherOrderAttention(
        config.d_model, config.num_heads, operator=kind, num_kv_heads=kv_heads, **told, **placed
    )

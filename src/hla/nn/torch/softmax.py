"""Softmax attention with the interface of `HigherOrderAttention`, for layers of a model that are to have it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from hla import arrays
from hla.errors import DTypeError, OptionError, message
from hla.nn.kinds import kind_of
from hla.nn.options import check_softmax_sizes
from hla.nn.torch.checks import check_field, check_mask, check_offsets
from hla.nn.torch.parts import rotate
from hla.nn.torch.sequences import packed


class SoftmaxState(NamedTuple):
    """Keys (turned by their positions) and values of all tokens seen: it grows.

    Attributes:
        past: keys and values, (B, L, Hkv, d) each, a named tuple whose class knows the options of the layer.
        places: int (B, L), where in its sequence each token is; −1 for padding.
        position: (B,), the number of tokens seen, without the skipped ones.
    """

    past: Any
    places: Tensor
    position: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> SoftmaxState:
        """The state with `function` applied to each of its tensors."""
        past = type(self.past)(*map(function, self.past))
        return SoftmaxState(past, function(self.places), function(self.position))

    def tensors(self) -> list[Tensor]:
        """All tensors, in order."""
        return [*self.past, self.places, self.position]


torch.serialization.add_safe_globals([SoftmaxState])


class SoftmaxAttention(nn.Module):
    """Causal softmax attention with rotary positions and grouped heads.

    Args:
        d_model: features of x and y.
        num_heads: query heads, a divisor of `d_model`.
        num_kv_heads: key/value heads, a divisor of `num_heads`.
        rotary_base: of the rotary rates.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        OptionError: sizes that do not divide, or an odd number of features in a head.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        num_kv_heads: int,
        rotary_base: float,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_softmax_sizes(d_model, num_heads, num_kv_heads)
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, d_model // num_heads
        self.rotary_base = rotary_base
        sizes = {"d_model": d_model, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
        self._kind = kind_of("KeysAndValues", ("keys", "values"), **sizes, rotary_base=float(rotary_base))
        width = num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(d_model, d_model, bias=False, device=device, dtype=dtype)
        self.k_proj = nn.Linear(d_model, width, bias=False, device=device, dtype=dtype)
        self.v_proj = nn.Linear(d_model, width, bias=False, device=device, dtype=dtype)
        self.out_proj = nn.Linear(d_model, d_model, bias=False, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier's uniform rule."""
        for projection in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            nn.init.xavier_uniform_(projection.weight)

    @property
    def process_group(self) -> None:
        """None: it sees whole sequences only."""

    @process_group.setter
    def process_group(self, group: None) -> None:
        if group is not None:
            raise OptionError(
                message("process_group", "None for softmax attention, which takes whole sequences", f"{group!r:.60}",
                        "Use layers of higher-order attention alone where a sequence is spread over processes.")
            )  # fmt: skip

    def init_state(self, batch: int) -> SoftmaxState:
        """The state before the first token."""
        return self._zeros(batch, self.q_proj.weight.device)

    def _zeros(self, batch: int, device: torch.device) -> SoftmaxState:
        empty = self.q_proj.weight.new_zeros(batch, 0, self.num_kv_heads, self.head_dim, device=device)
        places = torch.zeros(batch, 0, dtype=torch.int64, device=device)
        return SoftmaxState(self._kind.type(empty, empty), places, places.sum(1))

    def forward(
        self,
        x: Tensor,
        state: SoftmaxState | None = None,
        return_state: bool = False,
        *,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Any:
        """(B, T, d_model) → y or (y, state); padding and, without states, packed sequences as in
        `HigherOrderAttention`."""
        if cu_seqlens is not None:
            self._check_packed(x, state, return_state, key_padding_mask, cu_seqlens)
            lengths = _known_lengths(cu_seqlens)
            if lengths:  # scores within sequences alone
                return torch.cat([self(part) for part in torch.split(x, lengths, dim=1)], dim=1)
        whole = state is None and key_padding_mask is None and cu_seqlens is None
        if state is None:
            state = self._zeros(x.shape[0], x.device)  # parameters may be elsewhere until they are used
        else:
            self._check_state(state, x)
        if key_padding_mask is None:
            present = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        else:
            check_mask(key_padding_mask, x.shape[:2], x)
            present = ~key_padding_mask
            x = x.masked_fill(key_padding_mask[..., None], 0.0)
        at = state.position[:, None] + present.cumsum(1) - 1
        rows = None if cu_seqlens is None else packed(cu_seqlens, x.shape[1], x.device)
        if rows is not None:
            at = rows.positions(torch.zeros_like(rows.offsets[1:]), x.shape[1])
        q, k, v = self._heads(self.q_proj(x)), self._heads(self.k_proj(x)), self._heads(self.v_proj(x))
        turned_q, turned_k = rotate(q, k, at, self.rotary_base)
        q, k = turned_q.to(v.dtype), turned_k.to(v.dtype)
        keys, values = (torch.cat([old.to(v.dtype), new], 1) for old, new in zip(state.past, (k, v), strict=True))
        places = torch.cat([state.places, torch.where(present, at, -1)], 1)
        visible = None
        if not whole:  # then SDPA needs no T×T mask
            visible = (places >= 0)[:, None] & (places[:, None] <= at[..., None])
            if rows is not None:
                visible = visible & (rows.owner[:, None] == rows.owner)
            visible = visible | ~present[..., None]  # where nothing is visible it would be NaN; the output is 0 there
            visible = visible[:, None]
        q, k, v = q.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)
        o = functional.scaled_dot_product_attention(q, k, v, visible, is_causal=whole, enable_gqa=True)
        y: Tensor = self.out_proj(o.transpose(1, 2).flatten(-2))
        if key_padding_mask is not None:
            y = y.masked_fill(key_padding_mask[..., None], 0.0)
        if not return_state:
            return y
        return y, SoftmaxState(self._kind.type(keys, values), places, state.position + present.sum(1))

    def _check_packed(
        self, x: Tensor, state: Any, return_state: bool, key_padding_mask: Any, cu_seqlens: Tensor
    ) -> None:
        """Errors unless packed sequences come alone."""
        check_offsets(cu_seqlens, x)
        for name, there in (
            ("state", state is not None),
            ("return_state", return_state),
            ("key_padding_mask", key_padding_mask is not None),
        ):
            if there:
                raise OptionError(
                    message(name, "none beside cu_seqlens in softmax attention", "one",
                            "Give each sequence a row of its own, with padding where they differ in length.")
                )  # fmt: skip

    def _check_state(self, state: Any, x: Tensor) -> None:
        """Errors unless the state is one of a layer like this, for this batch and device."""
        if not isinstance(state, SoftmaxState):
            raise DTypeError(
                message("state", "a SoftmaxState", type(state).__name__, "Use return_state=True or init_state(batch).")
            )
        self._kind.check(state.past)
        own, rows = self.q_proj.weight.dtype, x.shape[0]
        length = next((y.shape[1] for y in (*state.past, state.places) if isinstance(y, Tensor) and y.ndim > 1), 0)
        for name, y in zip(("keys", "values"), state.past, strict=True):
            narrow = isinstance(y, Tensor) and y.dtype.is_floating_point and torch.float64 not in (own, y.dtype)
            dtype = y.dtype if narrow else own  # autocast changes among the narrow ones
            check_field(f"past.{name}", y, (rows, length, self.num_kv_heads, self.head_dim), dtype, x)
        check_field("places", state.places, (rows, length), torch.int64, x)
        check_field("position", state.position, (rows,), torch.int64, x)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], x.shape[-1] // self.head_dim, self.head_dim)

    def step(
        self, x_t: Tensor, state: SoftmaxState, *, key_padding_mask: Tensor | None = None
    ) -> tuple[Tensor, SoftmaxState]:
        """One token, (B, d_model)."""
        mask = None if key_padding_mask is None else key_padding_mask[:, None]
        y, state = self(x_t[:, None], state, True, key_padding_mask=mask)
        return y[:, 0], state


def _known_lengths(cu_seqlens: Tensor) -> list[int]:
    """Those of packed sequences, where they are at hand; else none."""
    if arrays.is_traced(cu_seqlens) or cu_seqlens.device.type != "cpu":
        return []
    return [n for n in cu_seqlens.diff().tolist() if n]

"""The attention sublayer of a transformer block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import hla
from hla import arrays
from hla.errors import DTypeError, OptionError, ShapeError, message
from hla.nn.groups import Group, Runs, back_in_order, check_state, describe
from hla.nn.kinds import layer_kind
from hla.nn.options import Decay, HeadGroup, LayerOptions, read_layer_options
from hla.nn.refusals import check_count, no_state
from hla.nn.torch import sequences
from hla.nn.torch.checks import check_dtype, check_field, check_mask, check_offsets, is_cast
from hla.nn.torch.convolution import ShortConvolution
from hla.nn.torch.operator import HigherOrderOperator
from hla.nn.torch.parts import (
    FixedDecay,
    ForgetGate,
    LearnedDecay,
    RMSNorm,
    UnitLength,
    accumulation_dtype,
    rotate,
)
from hla.nn.torch.slices import Kept, Slices, begin, spread
from hla.nn.torch.state import LayerState


class HigherOrderAttention(nn.Module):
    r"""Attention with a state of constant size, for the place of the attention in a transformer block.

    $$q, k, v = W_q x,\; W_k x,\; W_v x \;\to\; \mathrm{SiLU}(\mathrm{conv}(\cdot)), \qquad
    q, k \;\to\; R_t\,\mathrm{norm}(\varphi(\cdot)), \qquad o = \mathrm{HLA}(q, k, v; \gamma),$$

    $$y = W_o\,\mathrm{dropout}\big(\mathrm{norm}(o) \odot \mathrm{SiLU}(W_g x)\big)$$

    Args:
        d_model: features of x and y.
        num_heads: query heads H.
        operator: "hla2", "ahla", "hla3" or "linear_attention", or a list with one of them for each head.
        num_kv_heads: key/value heads Hkv, a divisor of H: each serves H/Hkv query heads next to each other. H by
            default; 1 is multi-query attention.
        head_dim: d of q and k for each head; d_model/H by default.
        value_dim: dv of v for each head; `head_dim` by default.
        causal: False for bidirectional attention, which has no decay, convolution or state.
        decay: "auto" is "forget_gate", or None where not causal. A number γ in (0, 1] or one for each key/value head;
            "learned" for γ = σ(b), one for each key/value head; "forget_gate" for γ_t = σ(w·x_t + b), which depends on
            the token; None for γ = 1.
        decay_range: learned γ at the start, from the first key/value head to the last, 1 − γ spaced geometrically.
        qk_norm: "rms" (with weights), "l2" (unit length) or None.
        feature_map: φ of q and k: "identity", "elu+1", "relu" or "softmax".
        conv_size: tokens of the short causal convolutions of q, k and v; None for none. "auto" is 4, or None where
            not causal.
        rotary: turn q and k by their positions.
        rotary_base: of the rotary rates.
        output_norm: RMS norm of each head's output, with weights.
        output_gate: multiply by SiLU(W_g x).
        norm_eps: of all norms.
        normalize: divide by the operator's denominator + `eps`.
        eps: see `normalize`.
        ridge: of the heads with hla2.
        scale: multiplies q. By default products of random q and k have unit variance: d^(−1/2), or d^(1/2) where
            `qk_norm` is "l2".
        dropout: probability that a feature of the heads' outputs is dropped in training.
        bias: of the projections.
        form: as for the operators.
        chunk_size: as for the operators.
        backend: as for the operators.
        process_group: where sequences are spread over processes, the group (or DeviceMesh, as for
            `hla.distributed.torch`) in the order of whose ranks the slices lie; None where they are not.
        device: of the parameters.
        dtype: of the parameters.

    Raises:
        OptionError: an option is not allowed, or two contradict each other.
        UnknownBackendError: `backend` names none that is registered.
        DTypeError: `dtype` is not float16, bfloat16, float32 or float64.

    Shapes: x (B, T, d_model), y the same. Dtypes: projections in the dtype of x, or autocast's; convolution, φ, norms,
    positions and decays in float32; the operator takes q, k and v in the dtype of the projections, accumulates in
    float32 and keeps float32 states. With parameters in float64 all of it is float64.

    Example:
        >>> import torch
        >>> from hla.nn.torch import HigherOrderAttention
        >>> layer = HigherOrderAttention(32, 4, num_kv_heads=2)
        >>> x = torch.randn(2, 11, 32)
        >>> y, state = layer(x[:, :10], return_state=True)
        >>> y_t, state = layer.step(x[:, 10], state)
        >>> torch.allclose(y_t, layer(x)[:, 10], atol=1e-5)
        True
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        *,
        operator: str | Sequence[str] = "hla2",
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        causal: bool = True,
        decay: Decay = "auto",
        decay_range: tuple[float, float] | None = None,
        qk_norm: str | None = "rms",
        feature_map: str = "identity",
        conv_size: int | str | None = "auto",
        rotary: bool = False,
        rotary_base: float = 10_000.0,
        output_norm: bool = True,
        output_gate: bool = True,
        norm_eps: float = 1e-6,
        normalize: bool = False,
        eps: float = 1e-6,
        ridge: float = 0.0,
        scale: float | None = None,
        dropout: float = 0.0,
        bias: bool = False,
        form: str = "auto",
        chunk_size: int | None = None,
        backend: Any = None,
        process_group: Any = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_dtype(dtype)
        self._kept = Kept(process_group)
        options = self.options = read_layer_options(
            d_model=d_model,
            num_heads=num_heads,
            operator=operator,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            value_dim=value_dim,
            causal=causal,
            decay=decay,
            decay_range=decay_range,
            qk_norm=qk_norm,
            feature_map=feature_map,
            conv_size=conv_size,
            rotary=rotary,
            rotary_base=rotary_base,
            output_norm=output_norm,
            output_gate=output_gate,
            norm_eps=norm_eps,
            normalize=normalize,
            eps=eps,
            ridge=ridge,
            scale=scale,
            dropout=dropout,
            bias=bias,
            form=form,
            chunk_size=chunk_size,
            backend=backend,
        )
        placed: dict[str, Any] = {"device": device, "dtype": dtype}
        widths = options.widths()
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(options.d_model, width, bias=bias, **placed) for width in widths
        )
        heads_width = options.num_heads * options.value_dim
        self.output_gate = nn.Linear(options.d_model, heads_width, bias=bias, **placed) if output_gate else None
        self.out_proj = nn.Linear(heads_width, options.d_model, bias=bias, **placed)
        size = options.conv_size
        self.q_conv, self.k_conv, self.v_conv = (
            None if size is None else ShortConvolution(width, size, **placed) for width in widths
        )
        self.q_norm, self.k_norm = (_qk_norm(options, **placed) for _ in range(2))
        self.decay = _decay(options, **placed)
        groups = options.groups()
        self.operators = nn.ModuleList(
            HigherOrderOperator(**asdict(options.operator_options(group)), process_group=process_group)
            for group in groups
        )
        self.output_norm = (
            RMSNorm((options.num_heads, options.value_dim), options.norm_eps, unbounded=True, **placed)
            if output_norm
            else None
        )
        self._groups = tuple(map(self._group, groups, self.operators))
        self._kind = layer_kind(options)
        if feature_map != "identity":  # a first call fills tables of the library, which a tracer must not see change
            hla.feature_map(torch.ones(1, device="cpu", dtype=accumulation_dtype(self.q_proj.weight)), feature_map)
        self._back = back_in_order(options)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters anew: projections by Xavier's rule, biases 0, the rest as their modules say."""
        for module in self.modules():
            if module in (self.q_proj, self.k_proj, self.v_proj, self.output_gate, self.out_proj):
                assert isinstance(module, nn.Linear)
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, (ShortConvolution, RMSNorm, LearnedDecay, ForgetGate)):
                module.reset_parameters()

    @property
    def process_group(self) -> Any:
        """The group of processes that share sequences, or None. It is no part of a state dict or of a pickle."""
        return self._kept.group

    @process_group.setter
    def process_group(self, group: Any) -> None:
        self._kept = Kept(group)
        for operator in self.operators:
            operator.process_group = group

    def forward(
        self,
        x: Tensor,
        state: LayerState | None = None,
        return_state: bool = False,
        *,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Any:
        """The whole sequence, or the part of it that follows `state`.

        Args:
            x: (B, T, d_model).
            state: what `init_state` or an earlier call of this layer returned, for a batch of B.
            return_state: return (y, state).
            key_padding_mask: bool (B, T), True for padding, as in `nn.MultiheadAttention`. The sequence does not have
                these tokens, wherever they are: they change no output, no convolution, no position and no state; y
                is 0 there. x may hold anything there.
            cu_seqlens: int (N + 1,), from 0 to T: x is (1, T, d_model) and holds N sequences one after another. States
                are for a batch of N.

        Returns:
            y (B, T, d_model), or (y, state).

        Raises:
            ShapeError: x, the mask, or the state's batch.
            DTypeError: x is not in the dtype of the parameters, without autocast; the mask is not bool.
            OptionError: a state and a bidirectional layer; a state of another layer; a mask beside `cu_seqlens`.

        With a process group x and the mask are this rank's slice, `cu_seqlens` are the offsets in the whole, and states
        are those before and after the whole sequence, the same on every rank. All ranks call together, and so they do
        with `backward`. `step` needs no other rank.
        """
        if self._kept.shared:
            return self._forward_slice(x, state, return_state, key_padding_mask, cu_seqlens)
        batch = self._check_forward(x, state, return_state, key_padding_mask, cu_seqlens)
        if key_padding_mask is None:
            rows = sequences.Rows() if cu_seqlens is None else sequences.packed(cu_seqlens, x.shape[1], x.device)
            y, following = self._run(x, state, batch, rows, cu_seqlens, return_state)
        else:
            x, counts, places = sequences.move_together(x, key_padding_mask)
            y, following = self._run(x, state, batch, sequences.Rows(counts), None, return_state)
            y = sequences.move_back(y, places, key_padding_mask)
        return (y, following) if return_state else y

    def _forward_slice(
        self,
        x: Tensor,
        state: LayerState | None,
        return_state: bool,
        key_padding_mask: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> Any:
        """`forward` with a process group."""
        if arrays.is_compiling():
            from hla.nn.torch import compilation

            return compilation.run_slice(self, x, state, return_state, key_padding_mask, cu_seqlens)
        refusal: Exception | None = None
        batch = 0
        try:
            batch = self._check_forward(x, state, return_state, key_padding_mask, cu_seqlens)
        except Exception as error:
            refusal = error
        session = begin(self, x, state, return_state, key_padding_mask, cu_seqlens, refusal)
        counts = places = None
        if key_padding_mask is not None:
            x, counts, places = sequences.move_together(x, key_padding_mask)
        by_state = state is not None or return_state
        rows, slices = spread(session, x, batch, counts, cu_seqlens, by_state)
        y, following = self._run(x, state, batch, rows, cu_seqlens, return_state, slices=slices)
        told = [] if following is None else following.tensors()
        y, *told = session.exchanges.tied([y, *told])
        if key_padding_mask is not None and places is not None:
            y = sequences.move_back(y, places, key_padding_mask)
        if following is None:
            return y
        fields = iter(told)
        return y, following.map(lambda _: next(fields))

    def _check_forward(
        self,
        x: Tensor,
        state: LayerState | None,
        return_state: bool,
        key_padding_mask: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> int:
        """The batch; errors for what cannot be."""
        self._check_input("x", x, ("B", "T"))
        if not self.options.causal and (state is not None or return_state):
            raise no_state("state" if state is not None else "return_state")
        batch = x.shape[0]
        if cu_seqlens is not None:
            if key_padding_mask is not None:
                raise OptionError(
                    message("key_padding_mask", "none beside cu_seqlens", "both", "Leave the padding out of x.")
                )
            batch = check_offsets(cu_seqlens, x, slice_only=self.process_group is not None)
        if state is not None:
            self._check_state(state, batch, x)
        if key_padding_mask is not None:
            check_mask(key_padding_mask, x.shape[:2], x)
        return batch

    def step(
        self, x_t: Tensor, state: LayerState, *, key_padding_mask: Tensor | None = None
    ) -> tuple[Tensor, LayerState]:
        """One token for each sequence. The given state is not written to.

        Args:
            x_t: (B, d_model).
            state: what `init_state`, `forward` or `step` of this layer returned, for a batch of B.
            key_padding_mask: bool (B,), True where there is no token: y is 0 and the state stays.

        Returns:
            (y_t, state), y_t (B, d_model).

        Raises:
            ShapeError, DTypeError, OptionError: as `forward`.
        """
        self._check_input("x_t", x_t, ("B",))
        if not self.options.causal:
            raise no_state("step")
        batch = x_t.shape[0]
        self._check_state(state, batch, x_t)
        rows = sequences.Rows()
        if key_padding_mask is not None:
            check_mask(key_padding_mask, x_t.shape[:1], x_t)
            rows = sequences.Rows((~key_padding_mask).to(torch.int64))
            x_t = x_t.masked_fill(key_padding_mask[:, None], 0.0)
        y, following = self._run(x_t[:, None], state, batch, rows, None, True, one_token=True)
        assert following is not None
        y_t = y[:, 0]
        return (y_t if key_padding_mask is None else y_t.masked_fill(key_padding_mask[:, None], 0.0)), following

    def init_state(self, batch: int) -> LayerState:
        """The state before the first token, for a batch of so many sequences, on the device of the parameters.

        Raises:
            OptionError: the layer is bidirectional, or `batch` is no size.
        """
        if not self.options.causal:
            raise no_state("init_state")
        return self._zeros(check_count("batch", batch), self.q_proj.weight.device)

    def state_bytes(self, batch: int = 1) -> int:
        """Bytes of the state of so many sequences, however long; 0 where not causal."""
        count = check_count("batch", batch)
        return self._zeros(count, torch.device("meta")).nbytes if self.options.causal else 0

    def flops(self, length: int, batch: int = 1) -> int:
        """Floating-point operations of the forward pass over (batch, length, d_model), a multiply-add counted as two.

        Of projections, convolutions and operators (`hla.cost`), which are all but a few operations per feature.
        """
        return self.options.flops(length, batch)

    def extra_repr(self) -> str:
        """Sizes, and the options that are not shown by a module of their own."""
        o = self.options
        told = [f"{o.d_model}, {o.num_heads}, num_kv_heads={o.num_kv_heads}, head_dim={o.head_dim}"]
        told.append(f"value_dim={o.value_dim}, causal={o.causal}")
        if len(set(o.operators)) > 1:
            told.append(f"operator={list(o.operators)}")
        if o.feature_map != "identity":
            told.append(f"feature_map={o.feature_map!r}")
        if o.rotary:
            told.append(f"rotary=True, rotary_base={o.rotary_base:g}")
        if o.dropout:
            told.append(f"dropout={o.dropout:g}")
        if self._kept.shared:
            told.append("process_group=…")
        return ", ".join(told)

    def _run(
        self,
        x: Tensor,
        state: LayerState | None,
        batch: int,
        rows: sequences.Rows | sequences.Packed,
        cu_seqlens: Tensor | None,
        return_state: bool,
        one_token: bool = False,
        slices: Slices | None = None,
    ) -> tuple[Tensor, LayerState | None]:
        """The layer on checked inputs; skipped tokens are at the end of their rows."""
        options = self.options
        length = x.shape[1]
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        given = v.dtype
        windows: tuple[Tensor, ...] = ()
        if self.q_conv is not None and self.k_conv is not None and self.v_conv is not None:
            before = self._windows(batch, x.device) if state is None else state.windows
            if slices is not None:
                before, last = slices.windows(rows, (q, k, v), before)
            q, q_window = self.q_conv(q, before[0], rows)
            k, k_window = self.k_conv(k, before[1], rows)
            v, v_window = self.v_conv(v, before[2], rows)
            windows = (q_window, k_window, v_window) if slices is None else last
        q = q.unflatten(-1, (options.num_heads, options.head_dim))
        k = k.unflatten(-1, (options.num_kv_heads, options.head_dim))
        v = v.unflatten(-1, (options.num_kv_heads, options.value_dim))
        if options.feature_map != "identity":
            wide = accumulation_dtype(q)
            q = hla.feature_map(q.to(wide), options.feature_map)
            k = hla.feature_map(k.to(wide), options.feature_map)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        seen = x.new_zeros(batch, dtype=torch.int64) if state is None else state.position
        if options.rotary:
            earlier = seen if slices is None else seen + slices.halo.before
            q, k = rotate(q, k, rows.positions(earlier, length), options.rotary_base)
        # unnormalised outputs overflow float16, so they must not be rounded to it before the norm
        heads = q.to(given), k.to(given), v.to(torch.float32 if given == torch.float16 else given)
        decays = {} if self.decay is None else self.decay(x)
        present = None
        if isinstance(rows, sequences.Rows) and rows.counts is not None:
            present = (torch.arange(length, device=x.device) < rows.counts[:, None])[:, None, None]
        before_operators = None if state is None else state.operators
        o, after = self._operate(heads, decays, present, before_operators, cu_seqlens, return_state, one_token, slices)
        if self.output_norm is not None:
            o = self.output_norm(o)
        o = o.flatten(-2)
        if self.output_gate is not None:
            raised = self.output_gate(x)
            wide = accumulation_dtype(raised)
            o = o.to(wide) * functional.silu(raised.to(wide))
        y = self.out_proj(functional.dropout(o.to(given), options.dropout, self.training))
        if not return_state:
            return y, None
        position = rows.seen(seen, length) if slices is None else seen + slices.halo.total
        return y, LayerState(self._kind.type(*after), windows, position)

    def _operate(
        self,
        heads: tuple[Tensor, Tensor, Tensor],
        decays: dict[str, Tensor],
        present: Tensor | None,
        states: tuple[Any, ...] | None,
        cu_seqlens: Tensor | None,
        return_state: bool,
        one_token: bool,
        slices: Slices | None,
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """q (B, T, H, d), k, v (B, T, Hkv, ·) → o (B, T, H, dv): one call for each group of heads."""
        outputs, finals = [], []
        for i, (group, operator) in enumerate(zip(self._groups, self.operators, strict=True)):
            q, k, v = _pick(heads[0], group.heads, 2), *(_pick(x, group.kv_heads, 2) for x in heads[1:])
            k, v = k[:, :, :, None], v[:, :, :, None]
            q = q.reshape(*q.shape[:2], k.shape[2], group.per_kv_head, q.shape[-1])
            told: dict[str, Any] = {}
            if "decay" in decays:
                told["decay"] = _pick(decays["decay"], group.kv_heads, 0)
            if "log_decay" in decays:
                told["log_decay"] = _pick(decays["log_decay"], group.kv_heads, 1)
            if present is not None:
                told["token_mask"] = present
            assert isinstance(operator, HigherOrderOperator)
            if one_token:
                assert states is not None
                told = {name: x if name == "decay" else x[..., 0] for name, x in told.items()}
                o, final = operator.step(q[:, 0], k[:, 0], v[:, 0], states[i], **told)
                o = o[:, None]
            else:
                told |= {"cu_seqlens": cu_seqlens, "axis": -4}
                if slices is not None:
                    told["session"] = slices.session
                state = None if states is None else states[i]
                if state is not None and cu_seqlens is not None:  # sequences before the rows, of which there is one
                    state = type(state)(*(x[:, None] for x in state))
                o = operator(q, k, v, state, return_state, **told)
                final = None
                if return_state:
                    o, final = o
                    if cu_seqlens is not None:
                        final = type(final)(*(x[:, 0] for x in final))
            outputs.append(o.flatten(2, 3))
            finals.append(final)
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
        return _pick(joined, self._back, 2), tuple(finals)

    def _group(self, group: HeadGroup, operator: Any) -> Group:
        options, wide = self.options, accumulation_dtype(self.q_proj.weight)
        sizes = (1, 1, 1), options.head_dim, options.value_dim
        return describe(group, operator.init_state(*sizes, device="meta", dtype=wide) if options.causal else None)

    def _zeros(self, batch: int, device: torch.device) -> LayerState:
        options, wide = self.options, accumulation_dtype(self.q_proj.weight)
        states = []
        for group, operator in zip(options.groups(), self.operators, strict=True):
            assert isinstance(operator, HigherOrderOperator)
            keys = (batch, len(group.kv_heads))
            states.append(
                operator.init_state(
                    (*keys, group.per_kv_head),
                    options.head_dim,
                    options.value_dim,
                    kv_batch=(*keys, 1),
                    device=device,
                    dtype=wide,
                )
            )
        windows = () if options.conv_size is None else self._windows(batch, device)
        return LayerState(self._kind.type(*states), windows, torch.zeros(batch, dtype=torch.int64, device=device))

    def _windows(self, batch: int, device: torch.device) -> tuple[Tensor, ...]:
        behind = (self.options.conv_size or 1) - 1
        wide = accumulation_dtype(self.q_proj.weight)
        return tuple(torch.zeros(batch, behind, n, device=device, dtype=wide) for n in self.options.widths())

    def _check_input(self, name: str, x: Any, axes: tuple[str, ...]) -> None:
        layout = f"({', '.join(axes)}, d_model = {self.options.d_model})"
        if not isinstance(x, Tensor):
            raise DTypeError(message(name, "a torch.Tensor", type(x).__name__, "Convert it, e.g. torch.as_tensor."))
        if x.ndim != len(axes) + 1 or x.shape[-1] != self.options.d_model:
            raise ShapeError(message(name, f"shape {layout}", f"{tuple(x.shape)}", "One row for each sequence."))
        own = self.q_proj.weight.dtype
        if x.dtype != own and not is_cast(x, own):
            raise DTypeError(
                message(name, f"{own}, the dtype of the parameters", f"{x.dtype}",
                        f"Convert it with {name}.to({own}), or use torch.autocast.")
            )  # fmt: skip

    def _check_state(self, state: Any, batch: int, x: Tensor) -> None:
        """Errors unless the state is one of a layer like this, for this batch and device."""
        wide = accumulation_dtype(self.q_proj.weight)

        def check(name: str, found: Tensor, shape: tuple[int, ...]) -> None:
            check_field(name, found, shape, torch.int64 if name == "position" else wide, x)

        check_state(state, LayerState, self._kind, self.options, self._groups, batch, check)


def _qk_norm(options: LayerOptions, **placed: Any) -> nn.Module | None:
    if options.qk_norm is None:
        return None
    return UnitLength(options.norm_eps) if options.qk_norm == "l2" else _rms(options, **placed)


def _rms(options: LayerOptions, **placed: Any) -> RMSNorm:
    return RMSNorm((options.head_dim,), options.norm_eps, **placed)


def _decay(options: LayerOptions, **placed: Any) -> nn.Module | None:
    """The module that makes decays; None where there are none, or one number that the operators know."""
    if options.decay == "learned":
        return LearnedDecay(options, **placed)
    if options.decay == "forget_gate":
        return ForgetGate(options, **placed)
    return None if options.decay is None or options.single_decay() is not None else FixedDecay(options)


def _pick(x: Tensor, runs: Runs, axis: int) -> Tensor:
    """x at these indices of an axis; a view where they are consecutive."""
    parts = [x.narrow(axis, start, count) for start, count in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=axis)

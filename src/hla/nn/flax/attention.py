"""The attention sublayer of a transformer block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

import hla
from hla.errors import OptionError, message
from hla.nn.flax import sequences
from hla.nn.flax.checks import check_field, check_offsets, check_rngs, read_dtype, read_input, read_mask
from hla.nn.flax.operator import HigherOrderOperator
from hla.nn.flax.parts import (
    FixedDecay,
    ForgetGate,
    LearnedDecay,
    RMSNorm,
    ShortConvolution,
    UnitLength,
    accumulation_dtype,
    rotate,
    widened,
)
from hla.nn.flax.state import LayerState
from hla.nn.groups import Runs, back_in_order, check_state, describe
from hla.nn.kinds import layer_kind
from hla.nn.options import Decay, LayerOptions, read_layer_options
from hla.nn.refusals import check_count, no_state


class HigherOrderAttention(nnx.Module):
    r"""Attention with a state of constant size, for the place of the attention in a transformer block.

    $$q, k, v = W_q x,\; W_k x,\; W_v x \;\to\; \mathrm{SiLU}(\mathrm{conv}(\cdot)), \qquad
    q, k \;\to\; R_t\,\mathrm{norm}(\varphi(\cdot)), \qquad o = \mathrm{HLA}(q, k, v; \gamma),$$

    $$y = W_o\,\mathrm{dropout}\big(\mathrm{norm}(o) \odot \mathrm{SiLU}(W_g x)\big)$$

    It is the layer of `hla.nn.torch`, with the same options; weights are carried over by `from_torch` and `to_torch`.

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
        dropout: probability that a feature of the heads' outputs is dropped, until `eval()` turns that off.
        bias: of the projections.
        form: as for the operators.
        chunk_size: as for the operators.
        backend: as for the operators.
        dtype: in which projections are computed; by default the common one of x and the parameters.
        param_dtype: of the parameters.
        rngs: draws the parameters (stream ``params``), and the dropout (``dropout``).

    Raises:
        OptionError: an option is not allowed, or two contradict each other; `rngs` lacks a stream and has no default.
        UnknownBackendError: `backend` names none that is registered.
        DTypeError: a dtype is not floating, or has 64 bits without ``jax_enable_x64``.

    Shapes: x (B, T, d_model), y the same. Dtypes: projections in `dtype`; convolution, φ, norms, positions and decays
    in float32; the operator takes q, k and v in the dtype of the projections, accumulates in float32 and keeps float32
    states. Where `dtype`, or by default that of the parameters, is float64, all of it is float64.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from flax import nnx
        >>> from hla.nn.flax import HigherOrderAttention
        >>> layer = HigherOrderAttention(32, 4, num_kv_heads=2, rngs=nnx.Rngs(0))
        >>> x = jax.random.normal(jax.random.key(1), (2, 11, 32), jnp.float32)
        >>> y, state = layer(x[:, :10], return_state=True)
        >>> y_t, state = layer.step(x[:, 10], state)
        >>> bool(jnp.allclose(y_t, layer(x)[:, 10], atol=1e-5))
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
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
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
        self.dtype = dtype = read_dtype("dtype", dtype)
        param_dtype = read_dtype("param_dtype", jnp.float32 if param_dtype is None else param_dtype)
        check_rngs(rngs, ("params", "dropout") if options.dropout else ("params",))
        linear = partial(
            nnx.Linear,
            use_bias=bias,
            kernel_init=nnx.initializers.xavier_uniform(),
            dtype=dtype,
            param_dtype=param_dtype,
            rngs=rngs,
        )
        widths = options.widths()
        self.q_proj, self.k_proj, self.v_proj = (linear(options.d_model, width) for width in widths)
        heads_width = options.num_heads * options.value_dim
        self.output_gate = linear(options.d_model, heads_width) if output_gate else None
        self.out_proj = linear(heads_width, options.d_model)
        size = options.conv_size
        self.q_conv, self.k_conv, self.v_conv = (
            None if size is None else ShortConvolution(width, size, param_dtype, rngs) for width in widths
        )
        self.q_norm, self.k_norm = (_qk_norm(options, param_dtype) for _ in range(2))
        self.decay = _decay(options, dtype, param_dtype, rngs)
        groups = options.groups()
        self.operators = nnx.List(HigherOrderOperator(**asdict(options.operator_options(group))) for group in groups)
        self.output_norm = (
            RMSNorm((options.num_heads, options.value_dim), options.norm_eps, param_dtype, unbounded=True)
            if output_norm
            else None
        )
        self.dropout = nnx.Dropout(options.dropout, rngs=rngs if options.dropout else None)
        self._groups = tuple(
            describe(group, self._empty(operator) if causal else None)
            for group, operator in zip(groups, self.operators, strict=True)
        )
        self._back = back_in_order(options)
        self._kind = layer_kind(options)

    def __call__(
        self,
        x: Array,
        state: LayerState | None = None,
        return_state: bool = False,
        *,
        key_padding_mask: Array | None = None,
        cu_seqlens: Array | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | Array | None = None,
    ) -> Any:
        """The whole sequence, or the part of it that follows `state`.

        Args:
            x: (B, T, d_model).
            state: what `init_state` or an earlier call of this layer returned, for a batch of B.
            return_state: return (y, state).
            key_padding_mask: bool (B, T), True for padding. The sequence does not have these tokens, wherever they
                are: they change no output, no convolution, no position and no state; y is 0 there. x may hold
                anything there.
            cu_seqlens: int (N + 1,), from 0 to T: x is (1, T, d_model) and holds N sequences one after another. States
                are for a batch of N.
            deterministic: no dropout; by default as `train()` and `eval()` say.
            rngs: of the dropout, in place of the layer's own.

        Returns:
            y (B, T, d_model), or (y, state).

        Raises:
            ShapeError: x, the mask, or the state's batch.
            DTypeError: x is not floating, or float64 where the layer is not; the mask is not bool.
            OptionError: a state and a bidirectional layer; a state of another layer; a mask beside `cu_seqlens`.
        """
        x = self._read("x", x, ("B", "T"))
        if not self.options.causal and (state is not None or return_state):
            raise no_state("state" if state is not None else "return_state")
        batch = x.shape[0]
        if cu_seqlens is not None:
            if key_padding_mask is not None:
                raise OptionError(
                    message("key_padding_mask", "none beside cu_seqlens", "both", "Leave the padding out of x.")
                )
            batch = check_offsets(cu_seqlens, x)
        if state is not None:
            state = self._read_state(state, batch)
        drop = partial(self.dropout, deterministic=deterministic, rngs=rngs)
        if key_padding_mask is None:
            rows = sequences.Rows() if cu_seqlens is None else sequences.packed(cu_seqlens, x.shape[1])
            y, following = self._run(x, state, batch, rows, cu_seqlens, return_state, drop)
        else:
            mask = read_mask(key_padding_mask, x.shape[:2])
            x, counts, places = sequences.move_together(x, mask)
            y, following = self._run(x, state, batch, sequences.Rows(counts), None, return_state, drop)
            y = sequences.move_back(y, places, mask)
        return (y, following) if return_state else y

    def step(
        self,
        x_t: Array,
        state: LayerState,
        *,
        key_padding_mask: Array | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | Array | None = None,
    ) -> tuple[Array, LayerState]:
        """One token for each sequence.

        Args:
            x_t: (B, d_model).
            state: what `init_state`, a call or `step` of this layer returned, for a batch of B.
            key_padding_mask: bool (B,), True where there is no token: y is 0 and the state stays.
            deterministic: as for a call.
            rngs: as for a call.

        Returns:
            (y_t, state), y_t (B, d_model).

        Raises:
            ShapeError, DTypeError, OptionError: as a call.
        """
        x_t = self._read("x_t", x_t, ("B",))
        if not self.options.causal:
            raise no_state("step")
        batch = x_t.shape[0]
        state = self._read_state(state, batch)
        rows = sequences.Rows()
        mask = None
        if key_padding_mask is not None:
            mask = read_mask(key_padding_mask, x_t.shape[:1])
            rows = sequences.Rows((~mask).astype(jnp.int32))
            x_t = sequences.blank(x_t, mask)
        drop = partial(self.dropout, deterministic=deterministic, rngs=rngs)
        y, following = self._run(x_t[:, None], state, batch, rows, None, True, drop, one_token=True)
        assert following is not None
        return (y[:, 0] if mask is None else sequences.blank(y[:, 0], mask)), following

    def init_state(self, batch: int) -> LayerState:
        """The state before the first token, for a batch of so many sequences.

        Raises:
            OptionError: the layer is bidirectional, or `batch` is no size.
        """
        if not self.options.causal:
            raise no_state("init_state")
        return self._zeros(check_count("batch", batch))

    def state_bytes(self, batch: int = 1) -> int:
        """Bytes of the state of so many sequences, however long; 0 where not causal."""
        count = check_count("batch", batch)
        if not self.options.causal:
            return 0
        shapes: LayerState = jax.eval_shape(lambda: self._zeros(count))
        return shapes.nbytes

    def flops(self, length: int, batch: int = 1) -> int:
        """Floating-point operations of the forward pass over (batch, length, d_model), a multiply-add counted as two.

        Of projections, convolutions and operators (`hla.cost`), which are all but a few operations per feature.
        """
        return self.options.flops(length, batch)

    def _run(
        self,
        x: Array,
        state: LayerState | None,
        batch: int,
        rows: sequences.Rows | sequences.Packed,
        cu_seqlens: Array | None,
        return_state: bool,
        drop: Any,
        one_token: bool = False,
    ) -> tuple[Array, LayerState | None]:
        """The layer on checked inputs; skipped tokens are at the end of their rows."""
        options = self.options
        length = x.shape[1]
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        given = v.dtype
        seen = _no_tokens(x, batch) if state is None else state.position
        windows: tuple[Array, ...] = ()
        if self.q_conv is not None and self.k_conv is not None and self.v_conv is not None:
            before = self._windows(seen) if state is None else state.windows
            q, q_window = self.q_conv(q, before[0], rows)
            k, k_window = self.k_conv(k, before[1], rows)
            v, v_window = self.v_conv(v, before[2], rows)
            windows = (q_window, k_window, v_window)
        q = q.reshape(*q.shape[:2], options.num_heads, options.head_dim)
        k = k.reshape(*k.shape[:2], options.num_kv_heads, options.head_dim)
        v = v.reshape(*v.shape[:2], options.num_kv_heads, options.value_dim)
        if options.feature_map != "identity":
            q = hla.feature_map(widened(q), options.feature_map)
            k = hla.feature_map(widened(k), options.feature_map)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if options.rotary:
            q, k = rotate(q, k, rows.positions(seen, length), options.rotary_base)
        # unnormalised outputs overflow float16, so they must not be rounded to it before the norm
        heads = q.astype(given), k.astype(given), v.astype(jnp.float32 if given == jnp.float16 else given)
        decays = {} if self.decay is None else self.decay(x, accumulation_dtype(given))
        present = None
        if isinstance(rows, sequences.Rows) and rows.counts is not None:
            present = (jnp.arange(length) < rows.counts[:, None])[:, None, None]
        before_operators = None if state is None else state.operators
        o, after = self._operate(heads, decays, present, before_operators, cu_seqlens, return_state, one_token)
        if self.output_norm is not None:
            o = self.output_norm(o)
        o = o.reshape(*o.shape[:2], options.num_heads * options.value_dim)
        if self.output_gate is not None:
            raised = widened(self.output_gate(x))
            o = o.astype(raised.dtype) * jax.nn.silu(raised)
        y = self.out_proj(drop(o.astype(given)))
        if not return_state:
            return y, None
        return y, LayerState(self._kind.type(*after), windows, rows.seen(seen, length))

    def _operate(
        self,
        heads: tuple[Array, Array, Array],
        decays: dict[str, Array],
        present: Array | None,
        states: tuple[Any, ...] | None,
        cu_seqlens: Array | None,
        return_state: bool,
        one_token: bool,
    ) -> tuple[Array, tuple[Any, ...]]:
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
            if one_token:
                assert states is not None
                told = {name: x if name == "decay" else x[..., 0] for name, x in told.items()}
                o, final = operator.step(q[:, 0], k[:, 0], v[:, 0], states[i], **told)
                o = o[:, None]
            else:
                told |= {"cu_seqlens": cu_seqlens, "axis": -4}
                state = None if states is None else states[i]
                if state is not None and cu_seqlens is not None:  # sequences before the rows, of which there is one
                    state = jax.tree.map(lambda x: x[:, None], state)
                o = operator(q, k, v, state, return_state, **told)
                final = None
                if return_state:
                    o, final = o
                    if cu_seqlens is not None:
                        final = jax.tree.map(lambda x: x[:, 0], final)
            outputs.append(o.reshape(*o.shape[:2], o.shape[2] * o.shape[3], o.shape[4]))
            finals.append(final)
        joined = outputs[0] if len(outputs) == 1 else jnp.concatenate(outputs, axis=2)
        return _pick(joined, self._back, 2), tuple(finals)

    def _wide(self) -> Any:
        """The dtype of states."""
        return accumulation_dtype(self.q_proj.kernel.dtype if self.dtype is None else self.dtype)

    def _empty(self, operator: HigherOrderOperator) -> Any:
        """The shapes of a state of one head."""
        options = self.options
        return jax.eval_shape(lambda: operator.init_state((1, 1, 1), options.head_dim, options.value_dim))

    def _zeros(self, batch: int) -> LayerState:
        options, states = self.options, []
        for group, operator in zip(options.groups(), self.operators, strict=True):
            keys = (batch, len(group.kv_heads))
            states.append(
                operator.init_state(
                    (*keys, group.per_kv_head),
                    options.head_dim,
                    options.value_dim,
                    kv_batch=(*keys, 1),
                    dtype=self._wide(),
                )
            )
        position = jnp.zeros(batch, jnp.int32)
        windows = () if options.conv_size is None else self._windows(position)
        return LayerState(self._kind.type(*states), windows, position)

    def _windows(self, zeros: Array) -> tuple[Array, ...]:
        """Windows before the first token, of as many zeros as there are sequences."""
        behind, zeros = (self.options.conv_size or 1) - 1, zeros.astype(self._wide())[:, None, None]
        return tuple(jnp.tile(zeros, (1, behind, n)) for n in self.options.widths())

    def _read(self, name: str, x: Any, axes: tuple[str, ...]) -> Array:
        return read_input(name, x, axes, self.options.d_model, self.dtype, self.q_proj.kernel.dtype)

    def _read_state(self, state: Any, batch: int) -> LayerState:
        """The state in arrays of JAX; errors unless it is one of a layer like this, for this batch."""
        wide = self._wide()

        def check(name: str, found: Any, shape: tuple[int, ...]) -> None:
            check_field(name, found, shape, jnp.int32 if name == "position" else wide)

        check_state(state, LayerState, self._kind, self.options, self._groups, batch, check)
        found: LayerState = jax.tree.map(jnp.asarray, state)
        return found


def _qk_norm(options: LayerOptions, param_dtype: Any) -> nnx.Module | None:
    if options.qk_norm is None:
        return None
    if options.qk_norm == "l2":
        return UnitLength(options.norm_eps)
    return RMSNorm((options.head_dim,), options.norm_eps, param_dtype)


def _decay(options: LayerOptions, dtype: Any, param_dtype: Any, rngs: nnx.Rngs) -> nnx.Module | None:
    """The module that makes decays; None where there are none, or one number that the operators know."""
    if options.decay == "learned":
        return LearnedDecay(options, param_dtype)
    if options.decay == "forget_gate":
        return ForgetGate(options, dtype, param_dtype, rngs)
    return None if options.decay is None or options.single_decay() is not None else FixedDecay(options)


def _no_tokens(x: Array, batch: int) -> Array:
    """(B,) zeros; spread over devices as the rows of x, where these are the sequences."""
    return x[:, :0, 0].sum(1).astype(jnp.int32) if batch == x.shape[0] else jnp.zeros(batch, jnp.int32)


def _pick(x: Array, runs: Runs, axis: int) -> Array:
    """x at these indices of an axis, as slices."""
    if runs == ((0, x.shape[axis]),):
        return x
    parts = [jax.lax.slice_in_dim(x, start, start + count, axis=axis) for start, count in runs]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=axis)

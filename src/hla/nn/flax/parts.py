"""The parts of a layer around its operator: norms, positions, decays, convolution. All compute in float32 or float64.

Parameters have the names and shapes of those of `hla.nn.torch`; only `nnx.Linear` has its own (``kernel``, transposed).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from hla.nn.flax.sequences import Packed, Rows
from hla.nn.options import LayerOptions


def accumulation_dtype(dtype: Any) -> Any:
    """float64 for float64, else float32."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


def widened(x: Array) -> Array:
    """x in its accumulation dtype."""
    return x.astype(accumulation_dtype(x.dtype))


class RMSNorm(nnx.Module):
    """x / √(mean of x² over the last axis + eps) · weight, in float32 or float64, whatever dtype comes in.

    Args:
        shape: of the weight; its last axis is normalised over, axes before it are heads.
        eps: added to the mean square.
        param_dtype: of the weight.
        unbounded: x may be so large that its squares, or in gradients the third powers of its inverse, leave float32.
    """

    def __init__(self, shape: tuple[int, ...], eps: float, param_dtype: Any, *, unbounded: bool = False) -> None:
        self.eps, self.unbounded = eps, unbounded
        self.weight = nnx.Param(jnp.ones(shape, param_dtype))

    def __call__(self, x: Array) -> Array:
        """(…, *shape) → the same in float32 or float64."""
        x = widened(x)
        eps: Array | float = self.eps
        if self.unbounded:  # any divisor gives the same function, so it has no gradient
            divisor = jnp.maximum(jax.lax.stop_gradient(jnp.abs(x).max(-1, keepdims=True)), 1.0)
            x, eps = x / divisor, self.eps / jnp.square(divisor)
        mean = jnp.square(x).mean(-1, keepdims=True)
        return x * jax.lax.rsqrt(mean + eps) * self.weight[...].astype(x.dtype)


class UnitLength(nnx.Module):
    """x / √(sum of x² over the last axis + eps), in float32 or float64."""

    def __init__(self, eps: float) -> None:
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        """(…, d) → the same in float32 or float64."""
        x = widened(x)
        return x * jax.lax.rsqrt(jnp.square(x).sum(-1, keepdims=True) + self.eps)


def rotate(q: Array, k: Array, positions: Array, base: float) -> tuple[Array, Array]:
    """Features i and i + d/2 of q and k (B, T, heads, d) turned by position · base^(−2i/d); positions (B, T)."""
    half = q.shape[-1] // 2
    dtype = accumulation_dtype(q.dtype)
    rates = base ** (jnp.arange(half, dtype=dtype) / -half)
    angles = positions.astype(dtype)[..., None, None] * rates
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return _turn(q.astype(dtype), cos, sin), _turn(k.astype(dtype), cos, sin)


def _turn(x: Array, cos: Array, sin: Array) -> Array:
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)


class ShortConvolution(nnx.Module):
    r"""SiLU(Σ_j w_j ⊙ x_{t−K+1+j}): depthwise, causal, K tokens, in float32 or float64; w uniform in ±K^(−1/2).

    Args:
        channels: features of x.
        size: K.
        param_dtype: of the weight (K, channels).
        rngs: for the weight.
    """

    def __init__(self, channels: int, size: int, param_dtype: Any, rngs: nnx.Rngs) -> None:
        bound = size**-0.5
        drawn = jax.random.uniform(rngs.params(), (size, channels), minval=-bound, maxval=bound)
        self.weight = nnx.Param(drawn.astype(param_dtype))

    def __call__(self, x: Array, window: Array, sequences: Rows | Packed) -> tuple[Array, Array]:
        """(B, T, channels), the K − 1 tokens before → (the same in float32 or float64, the last K − 1 tokens)."""
        mixed, window = sequences.convolve(x, window, self.weight[...].astype(accumulation_dtype(x.dtype)))
        return jax.nn.silu(mixed), window


class FixedDecay(nnx.Module):
    """A constant γ for each key/value head. They are numbers: parameters would be rounded to 16 bits."""

    def __init__(self, options: LayerOptions) -> None:
        assert isinstance(options.decay, tuple)
        self.decays = options.decay

    def __call__(self, x: Array, wide: Any) -> dict[str, Array]:
        """Of the layer's input (B, T, d_model) → decay (Hkv, 1) in this dtype."""
        return {"decay": _above_zero(jnp.asarray(self.decays, wide))[:, None]}


class LearnedDecay(nnx.Module):
    """γ = σ(b), constant in time, learned for each key/value head."""

    def __init__(self, options: LayerOptions, param_dtype: Any) -> None:
        self.bias = nnx.Param(_logits(options, param_dtype))

    def __call__(self, x: Array, wide: Any) -> dict[str, Array]:
        """Of the layer's input → decay (Hkv, 1) in this dtype."""
        return {"decay": _above_zero(jax.nn.sigmoid(self.bias[...].astype(wide)))[:, None]}


class ForgetGate(nnx.Module):
    """log γ_t = log σ(W x_t + b) for each key/value head; W x_t in the layer's dtype, the rest in float32 or 64."""

    def __init__(self, options: LayerOptions, dtype: Any, param_dtype: Any, rngs: nnx.Rngs) -> None:
        self.proj = nnx.Linear(
            options.d_model,
            options.num_kv_heads,
            use_bias=False,
            kernel_init=nnx.initializers.normal(0.1 * options.d_model**-0.5),
            dtype=dtype,
            param_dtype=param_dtype,
            rngs=rngs,
        )
        self.bias = nnx.Param(_logits(options, param_dtype))

    def __call__(self, x: Array, wide: Any) -> dict[str, Array]:
        """(B, T, d_model) → log_decay (B, Hkv, 1, T) in this dtype."""
        raised = self.proj(x).astype(wide) + self.bias[...].astype(wide)
        return {"log_decay": jax.nn.log_sigmoid(raised).mT[:, :, None]}


def _above_zero(decay: Array) -> Array:
    """γ, also where it has been rounded to 0, which operators do not take."""
    return jnp.maximum(decay, np.finfo(decay.dtype).tiny)


def _logits(options: LayerOptions, param_dtype: Any) -> Array:
    """b with σ(b) = γ as the options say for the start."""
    start = np.asarray(options.decays_at_start())
    return jnp.asarray(np.log(start) - np.log1p(-start), param_dtype)

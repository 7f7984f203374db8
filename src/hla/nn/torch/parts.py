"""The parts of a layer around its operator: norms, rotary positions, decays. All compute in float32 or float64."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from hla.nn.options import LayerOptions


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """float64 for float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class RMSNorm(nn.Module):
    """x / √(mean of x² over the last axis + eps) · weight, in float32 or float64, whatever dtype comes in.

    Args:
        shape: of the weight; its last axis is normalised over, axes before it are heads.
        eps: added to the mean square.
        device: of the weight.
        dtype: of the weight.
        unbounded: x may be so large that its squares, or in gradients the third powers of its inverse, leave float32.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        eps: float,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        unbounded: bool = False,
    ) -> None:
        super().__init__()
        self.eps, self.unbounded = eps, unbounded
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weights of 1."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """(…, *shape) → the same in float32 or float64."""
        x = x.to(accumulation_dtype(x))
        eps: Tensor | float = self.eps
        if self.unbounded:  # any divisor gives the same function, so it has no gradient
            divisor = torch.linalg.vector_norm(x.detach(), torch.inf, -1, keepdim=True).clamp_min(1.0)
            x, eps = x / divisor, self.eps / divisor.square()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * self.weight.to(x.dtype)

    def extra_repr(self) -> str:
        """Shape and eps."""
        return f"{tuple(self.weight.shape)}, eps={self.eps}"


class UnitLength(nn.Module):
    """x / √(sum of x² over the last axis + eps), in float32 or float64."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """(…, d) → the same in float32 or float64."""
        x = x.to(accumulation_dtype(x))
        return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + self.eps)

    def extra_repr(self) -> str:
        """eps."""
        return f"eps={self.eps}"


def rotate(q: Tensor, k: Tensor, positions: Tensor, base: float) -> tuple[Tensor, Tensor]:
    """Features i and i + d/2 of q and k (B, T, heads, d) turned by position · base^(−2i/d); positions (B, T)."""
    half = q.shape[-1] // 2
    dtype = accumulation_dtype(q)
    rates = base ** (torch.arange(half, device=q.device, dtype=dtype) / -half)
    angles = positions.to(dtype)[..., None, None] * rates
    cos, sin = angles.cos(), angles.sin()
    return _turn(q.to(dtype), cos, sin), _turn(k.to(dtype), cos, sin)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


class FixedDecay(nn.Module):
    """A constant γ for each key/value head. They are numbers: parameters and buffers would be rounded to 16 bits."""

    def __init__(self, options: LayerOptions) -> None:
        super().__init__()
        assert isinstance(options.decay, tuple)
        self.decays = options.decay

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Of the layer's input (B, T, d_model) → decay (Hkv, 1)."""
        return {"decay": fixed_decays(self.decays, x)}

    def extra_repr(self) -> str:
        """The decays."""
        return ", ".join(f"{x:.6g}" for x in self.decays)


class LearnedDecay(nn.Module):
    """γ = σ(b), constant in time, learned for each key/value head."""

    def __init__(
        self, options: LayerOptions, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.start = tuple(options.decays_at_start())
        self.bias = nn.Parameter(torch.empty(options.num_kv_heads, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """γ as the options say."""
        set_logits(self.bias, self.start)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Of the layer's input → decay (Hkv, 1)."""
        return {"decay": _above_zero(torch.sigmoid(self.bias.to(accumulation_dtype(self.bias))))[:, None]}


class ForgetGate(nn.Module):
    """log γ_t = log σ(W x_t + b) for each key/value head; W x_t in the layer's dtype, the rest in float32 or 64."""

    def __init__(
        self, options: LayerOptions, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.start = tuple(options.decays_at_start())
        self.proj = nn.Linear(options.d_model, options.num_kv_heads, bias=False, device=device, dtype=dtype)
        self.bias = nn.Parameter(torch.empty(options.num_kv_heads, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """γ as the options say where x is 0; W small, so that γ stays near it."""
        nn.init.normal_(self.proj.weight, std=0.1 * self.proj.in_features**-0.5)
        set_logits(self.bias, self.start)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """(B, T, d_model) → log_decay (B, Hkv, 1, T)."""
        raised: Tensor = self.proj(x)
        dtype = accumulation_dtype(raised)
        return {"log_decay": functional.logsigmoid(raised.to(dtype) + self.bias.to(dtype)).mT[:, :, None]}


def fixed_decays(decays: tuple[float, ...], x: Tensor) -> Tensor:
    """γ of each key/value head (Hkv, 1), for operators on tensors like x."""
    return _above_zero(torch.tensor(decays, device=x.device, dtype=accumulation_dtype(x)))[:, None]


def _above_zero(decay: Tensor) -> Tensor:
    """γ, also where it has been rounded to 0, which operators do not take."""
    return decay.clamp_min(torch.finfo(decay.dtype).tiny)


def set_logits(parameter: nn.Parameter, decays: tuple[float, ...]) -> None:
    """σ(parameter) = decays, in place."""
    with torch.no_grad():
        parameter.copy_(torch.tensor(decays, dtype=torch.float64, device="cpu").logit().to(parameter.dtype))

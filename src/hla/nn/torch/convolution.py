"""The short causal convolution in front of the operator."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from hla.nn.torch.parts import accumulation_dtype
from hla.nn.torch.sequences import Packed, Rows


class ShortConvolution(nn.Module):
    r"""SiLU(Σ_j w_j ⊙ x_{t−K+1+j}): depthwise, causal, K tokens, in float32 or float64.

    Args:
        channels: features of x.
        size: K.
        device: of the weight.
        dtype: of the weight.
    """

    def __init__(
        self,
        channels: int,
        size: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, channels, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform in ±K^(−1/2), as `nn.Conv1d`."""
        bound = self.weight.shape[0] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, x: Tensor, window: Tensor, sequences: Rows | Packed) -> tuple[Tensor, Tensor]:
        """(B, T, channels), the K − 1 tokens before → (the same in float32 or float64, the last K − 1 tokens)."""
        mixed, window = sequences.convolve(x, window, self.weight.to(accumulation_dtype(x)))
        return functional.silu(mixed), window

    def extra_repr(self) -> str:
        """Channels and size."""
        return f"{self.weight.shape[1]}, size={self.weight.shape[0]}"

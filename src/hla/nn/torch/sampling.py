"""From logits to tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hla.arrays import is_integer, is_number
from hla.errors import OptionError, message
from hla.nn.torch.parts import accumulation_dtype


def check_sampling(temperature: Any, top_k: Any, top_p: Any) -> None:
    """OptionError unless these are a temperature ≥ 0, a count or None, and a probability or None."""
    if not is_number(temperature) or not 0 <= temperature < float("inf"):
        raise OptionError(message("temperature", "a number ≥ 0", repr(temperature), "0 takes the likeliest token."))
    if top_k is not None and (not is_integer(top_k) or top_k < 1):
        raise OptionError(message("top_k", "an integer ≥ 1 or None", repr(top_k), "None keeps all tokens."))
    if top_p is not None and (not is_number(top_p) or not 0 < top_p <= 1):
        raise OptionError(message("top_p", "a probability in (0, 1] or None", repr(top_p), "None keeps all tokens."))


def probabilities(
    logits: Tensor, temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None
) -> Tensor:
    """softmax(logits / temperature) of the tokens that are kept, (B, vocabulary) in float32 or float64.

    `top_k` keeps the k likeliest; `top_p` then the fewest likeliest whose probabilities reach p, at least one. Of equal
    ones the lower index comes first. Temperature 0 keeps the likeliest alone.
    """
    logits = logits.to(accumulation_dtype(logits))
    if temperature == 0:
        return torch.zeros_like(logits).scatter(-1, logits.argmax(-1, keepdim=True), 1.0)
    below = logits - logits.amax(-1, keepdim=True)  # 0 at the likeliest, which no temperature makes infinite
    range_ = torch.finfo(logits.dtype)
    divisor = min(max(temperature, range_.tiny), range_.max)
    ordered, order = (below / divisor).sort(dim=-1, descending=True, stable=True)
    kept = ordered.softmax(-1)
    if top_k is not None:
        rank = torch.arange(kept.shape[-1], device=kept.device)
        kept = torch.where(rank < min(top_k, kept.shape[-1]), kept, 0.0)
        kept = kept / kept.sum(-1, keepdim=True)
    if top_p is not None:
        before = kept.cumsum(-1) - kept
        kept = torch.where(before < top_p, kept, 0.0)
        kept = kept / kept.sum(-1, keepdim=True)
    return torch.zeros_like(kept).scatter(-1, order, kept)


def draw(chances: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """(B,): one token for each row of probabilities."""
    return chances.multinomial(1, generator=generator)[:, 0]

"""Sizes, operators and inputs that several files of tests share. All sizes are prime, and none is another."""

from __future__ import annotations

from typing import Any

import numpy as np

BATCH, HEADS, TOKENS, D, DV = 2, 3, 17, 5, 7
CHUNK = 5
FORMS = ("recurrent", "scan", "chunkwise", "parallel")
OPERATORS: dict[str, tuple[str, dict[str, Any]]] = {
    "linear_attention": ("linear_attention", {}),
    "hla2": ("hla2", {"ridge": 0.7}),
    "hla2 prefix": ("hla2", {"mask": "prefix"}),
    "hla2 printed": ("hla2", {"definition": "as_printed"}),
    "ahla": ("ahla", {}),
    "hla3": ("hla3", {}),
    "hla3 printed": ("hla3", {"definition": "as_printed"}),
    "order 4": ("higher_order", {"order": 4}),
}
FEW = ("hla2", "ahla", "hla3 printed", "order 4")
NAMES = ("q", "k", "v", "log_decay")


def draw(length: int = TOKENS, *, batch: tuple[int, ...] = (BATCH, HEADS)) -> tuple[Any, ...]:
    """q, k, v, log-decays and a cotangent of the output, in NumPy float64."""
    rng = np.random.default_rng(41)
    q, k, v = (0.7 * rng.normal(size=(*batch, length, n)) for n in (D, D, DV))
    return q, k, v, -rng.exponential(0.2, size=(*batch, length)), rng.normal(size=(*batch, length, DV))

"""Layers with a process group under torch.compile: they run outside of the compiled program, at a graph break."""

from __future__ import annotations

from typing import Any

import torch._dynamo


def _run(layer: Any, *arguments: Any) -> Any:
    return layer._forward_slice(*arguments)


run_slice = torch._dynamo.disable(_run)  # type: ignore[no-untyped-call]

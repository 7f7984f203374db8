"""Under torch.compile: the collectives run outside of compiled programs, at a graph break."""

from __future__ import annotations

import torch._dynamo

from hla.distributed.torch.operators import run_here

run_outside = torch._dynamo.disable(run_here)  # type: ignore[no-untyped-call]

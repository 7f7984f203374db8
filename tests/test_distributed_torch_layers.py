"""Layers of `hla.nn.torch` with a process group; what the processes run is in `distributed_layers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ranks
from libraries import only

torch: Any = only("torch")
pytest.importorskip("hla.distributed.torch")
pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch was built without gloo")


@pytest.mark.parametrize("size", [2, 3, 4])
def test_slices_are_the_whole(size: int, tmp_path: Path) -> None:
    ranks.run("distributed_layers:all_cases", size, tmp_path)

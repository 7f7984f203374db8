"""Layers of `hla.nn.torch` with a process group; what the processes run is in `distributed_layers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ranks
from libraries import only

torch: Any = only("torch")
pytest.importorskip("hla.distributed.torch")

import hla  # noqa: E402
from hla.nn.torch.softmax import SoftmaxAttention  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch was built without gloo")


def test_softmax_attention_takes_no_group() -> None:
    """It would silently attend to its slice alone."""
    layer = SoftmaxAttention(12, 3, 3, 1e4)
    layer.process_group = None
    assert layer.process_group is None
    with pytest.raises(hla.OptionError, match="process_group: expected None for softmax"):
        layer.process_group = object()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_slices_are_the_whole(size: int, tmp_path: Path) -> None:
    ranks.run("distributed_layers:all_cases", size, tmp_path)

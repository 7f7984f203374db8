"""`hla.distributed.torch`: processes that share a sequence compute what one process does. What they run is in
`distributed_calls`, `distributed_behaviour`, `distributed_groups` and `distributed_device`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ranks
from libraries import only

torch: Any = only("torch")
pytest.importorskip("hla.distributed.torch")

from distributed_behaviour import BEHAVIOURS  # noqa: E402
from distributed_groups import GROUPS  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch was built without gloo")


@pytest.mark.parametrize("size", [4, 3, 2, 1])
def test_equals_one_process(size: int, tmp_path: Path) -> None:
    ranks.run("distributed_calls:equal_cases", size, tmp_path)


@pytest.mark.parametrize("name", BEHAVIOURS)
def test_behaviour(name: str, tmp_path: Path) -> None:
    ranks.run(f"distributed_behaviour:{name}", 3, tmp_path)


@pytest.mark.parametrize(("name", "size"), GROUPS)
def test_groups(name: str, size: int, tmp_path: Path) -> None:
    ranks.run(f"distributed_groups:{name}", size, tmp_path)


def test_on_a_device_that_is_elsewhere(tmp_path: Path) -> None:
    if not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this PyTorch takes no backends written in Python")
    ranks.run("distributed_device:on_a_device", 2, tmp_path)


def test_a_killed_rank_is_an_error_in_the_others(tmp_path: Path) -> None:
    ranks.run("distributed_behaviour:lose_a_rank", 3, tmp_path, alive=2, seconds=60)


def test_on_triton(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    ranks.run("distributed_behaviour:on_triton", 2, tmp_path)

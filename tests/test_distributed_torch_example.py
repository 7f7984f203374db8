"""examples/long_context.py under torchrun: one process's losses, and as many bytes whatever the length."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from libraries import only

torch: Any = only("torch")
pytest.importorskip("hla.distributed.torch")
pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch was built without gloo")

EXAMPLE = Path(__file__).parents[1] / "examples" / "long_context.py"
SMALL = ["--tokens", "301", "--steps", "3", "--width", "16", "--heads", "2", "--growth", "200,400"]


def run(*words: str, size: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(size)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*command, str(EXAMPLE), *SMALL, *words], capture_output=True, text=True, timeout=200, env=environment
    )


def test_trains_as_one_process() -> None:
    done = run(size=2)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = re.findall(r"^ +\d+ +(\S+) +(\S+) +\S+ +\S+$", done.stdout, re.MULTILINE)[:3]
    assert [a for a, _ in losses] == [b for _, b in losses], done.stdout
    assert float(losses[2][0]) < float(losses[0][0]), done.stdout
    table = re.findall(r"^ +\d+ +(\d+) +(\d+) +(\d+) +(\d+) +\d+ MiB$", done.stdout, re.MULTILINE)
    assert [row[0] for row in table] == ["100", "200"], done.stdout
    assert table[0][1:3] == table[1][1:3], done.stdout
    assert int(table[0][1]) > 0

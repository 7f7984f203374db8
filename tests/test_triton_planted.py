"""A few of the faults that docs/design.md lists, planted in the Triton backend: the test that is named there fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import hla
import libraries

libraries.only("torch")

from triton_planted import FAULTS, FOLDER, plant  # noqa: E402
from triton_runs import NAMED  # noqa: E402

if NAMED is not None:
    pytest.skip("of the interpreter alone", allow_module_level=True)

TESTS = Path(__file__).parent


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str, tmp_path: Path) -> None:
    fault = FAULTS[name]
    plant(fault, Path(hla.__file__).parent, tmp_path)
    paths = os.pathsep.join((str(tmp_path), str(TESTS)))
    env = {**os.environ, FOLDER: str(tmp_path), "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "--arrays=torch", "-p", "triton_planted", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "-p", "no:xdist", fault.test], cwd=TESTS.parent, env=env, check=False, capture_output=True, text=True
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed" in done.stdout
    assert any(error in done.stdout for error in ("AssertionError: ", "OutOfBoundsError: ", "assert 1.")), done.stdout

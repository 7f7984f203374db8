"""Running `hla` in a process of its own, and reading what it prints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest

in_a_terminal = pytest.mark.skipif(find_spec("rich") is None, reason="of the extra cli: these commands draw with rich")


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hla", *arguments],
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=300,
        env={**os.environ, "PYTHONUTF8": "1", **environment},
        check=False,
    )


def one_object(stdout: str) -> dict[str, Any]:
    """The single JSON object on stdout, and nothing beside it."""
    assert stdout.count("\n") == 1
    assert stdout.endswith("\n")

    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON")

    found = json.loads(stdout, parse_constant=refuse)
    assert isinstance(found, dict)
    return found


def measured(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The object of a command that compares, after the checks that hold for all of them."""
    assert done.returncode == 0, done.stderr
    found = one_object(done.stdout)
    assert found["ok"] is True
    assert found["checks"] > 0
    assert 0 < found["worst_error"] < 1e-3
    assert found["rows"]
    return found

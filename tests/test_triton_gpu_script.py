"""`benchmarks/gpu.py`, tried on the CPU in Triton's interpreter: what it writes, and how it runs the tests."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import hla
import libraries

torch: Any = libraries.only("torch")

from triton_runs import NAMED  # noqa: E402

if NAMED is not None:
    pytest.skip("this is the script that sets HLA_TEST_DEVICE", allow_module_level=True)

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu.py"
OURS = ("hla2, triton", "ahla, triton", "hla3, triton", "linear_attention, triton")


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_writes_what_it_measures(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    command = [sys.executable, str(SCRIPT), "--device", "cpu", "--no-tests", "--sizes", "1,40,2,16"]
    command += ["--dtype", "float32", "--rounds", "1", "--json", str(file)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text(encoding="utf-8"))
    assert found["tests"] is None
    assert found["copy_bytes_per_second"] > 0
    assert (found["machine"]["device"], found["machine"]["hla"]) == ("cpu", hla.__version__)
    rows = {(row["pass"], row["name"]): row for row in found["rows"]}
    assert len(rows) == len(found["rows"])
    peers = ("hla2, torch", "softmax, SDPA")
    assert set(rows) == {(which, name) for which in ("forward", "backward") for name in (*OURS, *peers)} | {
        ("decode", "hla2, triton, step"),
        ("decode", "copy of the state"),
    }
    for (which, name), row in rows.items():
        length = 1 if which == "decode" else 40
        assert (row["B"], row["T"], row["H"], row["d"], row["dtype"]) == (1, length, 2, 16, "float32")
        assert row["seconds"] > 0
        assert ("share_of_ceiling" in row) == ("triton" in name)
        assert name in done.stdout
    for name in OURS:  # counted, so exact
        cost = hla.cost(name.partition(",")[0], T=40, d=16, dv=16, heads=2, dtype="float32")
        assert rows["forward", name]["traffic_bytes"] == cost.traffic_bytes
        assert rows["backward", name]["traffic_bytes"] == cost.traffic_bytes + cost.backward_traffic_bytes


def test_it_names_the_device_to_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files of tests exist, and pytest's exit status is handed on."""
    script = load()
    seen: list[Any] = []

    def run(command: list[str], **options: Any) -> Any:
        seen.append((command, options))
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(script.subprocess, "run", run)
    for backend, words in script.TESTS.items():
        assert script.run_tests(torch.device("cuda"), words) == 1
        command, options = seen.pop()
        assert options["env"]["HLA_TEST_DEVICE"] == "cuda"
        assert command[-len(words) :] == list(words)
        assert words[0] == ("--arrays=torch" if backend == "triton" else "--arrays=cupy")
        assert all((options["cwd"] / file).exists() for file in words[1:])


def test_without_a_gpu_it_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    done = subprocess.run([sys.executable, str(SCRIPT)], check=False, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("No GPU")

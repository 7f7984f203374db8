"""Faults to plant in a copy of the package; and what a process with one needs, as a plugin of pytest."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import NamedTuple

FOLDER = "HLA_PLANTED"
"""The variable with the folder that hla must come from."""


class Fault(NamedTuple):
    """A line of a file under hla/backends, what it is turned into, and a test that must fail then."""

    file: str
    line: str
    wrong: str
    test: str


GRADIENTS, VALUES = "tests/test_triton_gradients.py::", "tests/test_triton.py::"
FAULTS = {
    "the causal mask is dropped": Fault(
        "triton/kernels/decay.py",
        "return tl.where(seen, product, 0.0)",
        "return product",
        VALUES + "test_definition[linear_attention-causal-none-chunkwise]",
    ),
    "a strict read sees its own token": Fault(
        "triton/kernels/decay.py",
        "seen = row > column if STRICT else row >= column",
        "seen = row >= column",
        VALUES + "test_definition[hla2 printed-causal-none-chunkwise]",
    ),
    "a decay has the wrong power": Fault(
        "triton/kernels/decay.py",
        "tl.exp(tl.where(clock[9] == 0, log, 0.0) * POWER)",
        "tl.exp(tl.where(clock[9] == 0, log, 0.0))",
        VALUES + "test_lengths[33-None-32]",
    ),
    "states are kept in bfloat16": Fault(
        "triton/kernels/chain.py",
        "state += tl.dot(tl.trans(y_rows), z_rows, input_precision=PRECISION) * into_state",
        "state = (state + tl.dot(tl.trans(y_rows), z_rows, input_precision=PRECISION)).to(DOT).to(tl.float32)",
        VALUES + "test_states_of_bfloat16_are_float32",
    ),
    "the second term of a read is left out": Fault(
        "triton/kernels/read.py",
        "        total += _term(",
        "        _term(",
        GRADIENTS + "test_lengths[1]",
    ),
    "what precedes a part is not decayed": Fault(
        "triton/kernels/carry.py",
        "state = tl.where(factor == 0.0, 0.0, state * factor) + added",
        "state = tl.where(factor == 0.0, 0.0, state) + added",
        VALUES + "test_parts[1-linear_attention]",
    ),
    "a step reads the state before it moves": Fault(
        "triton/kernels/token.py",
        "result += tl.sum(query[:, None] * tile, axis=0)",
        "result += tl.sum(query[:, None] * (tile - key[:, None] * value[None, :]), axis=0)",
        VALUES + "test_definition[linear_attention-causal-none-recurrent]",
    ),
    "heads that share keys have a stride": Fault(
        "staged/views.py",
        "found = [0 if n == 1 else step for",
        "found = [step for",
        VALUES + "test_layouts[shared keys-recurrent]",
    ),
}


def plant(fault: Fault, package: Path, folder: Path) -> None:
    """A copy of the package in a folder, with the fault."""
    shutil.copytree(package, folder / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    file = folder / package.name / "backends" / fault.file
    text = file.read_text(encoding="utf-8")
    assert text.count(fault.line) == 1, f"{fault.file} has changed: {fault.line}"
    file.write_text(text.replace(fault.line, fault.wrong), encoding="utf-8")


def pytest_configure() -> None:
    """The tests must find the fault, not the backend's test of itself, which would refuse every call."""
    import hla
    from hla.backends.triton import selftest

    assert Path(hla.__file__).is_relative_to(os.environ[FOLDER])
    selftest._CASES = ()

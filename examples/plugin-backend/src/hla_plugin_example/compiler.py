"""The C compiler of this machine, and what it makes of state.c."""

from __future__ import annotations

import ctypes
import functools
import importlib.resources
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from typing import Any

import hla

TYPES = {"float32": "float", "float64": "double"}
OPTIONS = ("-std=c11", "-O3", "-fPIC", "-shared")
"""Not -ffast-math: it supposes that there is no NaN, which hla lets pass."""


def command() -> list[str] | None:
    """How to call the compiler: what CC says, or the first one found."""
    for words in (shlex.split(os.environ.get("CC", "")), ["cc"], ["gcc"], ["clang"]):
        if words and shutil.which(words[0]):
            return words
    return None


@functools.cache
def function(dtype: str) -> Callable[..., Any]:
    """`move_and_read` for a dtype, compiled once a process. The file may go as soon as it is loaded."""
    source = importlib.resources.files(__package__).joinpath("state.c").read_text(encoding="utf-8")
    words = command() or ["cc"]
    with tempfile.TemporaryDirectory() as folder:
        made = os.path.join(folder, "state.so")
        arguments = [*words, *OPTIONS, f"-DREAL={TYPES[dtype]}", "-x", "c", "-", "-o", made]
        done = subprocess.run(arguments, input=source, capture_output=True, text=True, check=False)
        if done.returncode:
            raise hla.BackendUnsupportedError(f"c_loop: {words[0]} does not compile state.c:\n{done.stderr}")
        found = ctypes.CDLL(made).move_and_read
    found.argtypes = [ctypes.c_size_t] * 4 + [ctypes.c_void_p] * 6
    found.restype = None
    return found

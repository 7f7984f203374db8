"""The example of a third-party backend, examples/plugin-backend, installed and used as its users do."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hla
import libraries

libraries.only("numpy")

EXAMPLE = Path(__file__).parents[1] / "examples" / "plugin-backend"
METADATA = tomllib.loads((EXAMPLE / "pyproject.toml").read_text(encoding="utf-8"))

pytestmark = pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="with a C compiler")


def by_pip(target: Path) -> None:
    """As a user does it, but for what pip would fetch."""
    options = ("--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--quiet")
    source = shutil.copytree(EXAMPLE, target / "source")
    done = run("-m", "pip", "install", *options, "--target", str(target), str(source))
    assert done.returncode == 0, done.stderr


def by_hand(target: Path) -> None:
    """What an installer leaves, made without one: packages, and what their metadata says of entry points."""
    project = METADATA["project"]
    for package in METADATA["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]:
        shutil.copytree(EXAMPLE / package, target / Path(package).name)
    announce(target, project["name"], project["version"], project["entry-points"]["hla.backends"])


def announce(target: Path, name: str, version: str, backends: dict[str, str]) -> None:
    folder = target / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [f"{key} = {value}" for key, value in backends.items()]
    (folder / "entry_points.txt").write_text("\n".join(["[hla.backends]", *lines, ""]))


def run(*arguments: str, target: Path | None = None, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Python, where the package is installed in `target`."""
    environment = {key: value for key, value in os.environ.items() if key != "HLA_BACKEND"}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    if target is not None:
        path = [str(target), str(Path(hla.__file__).parents[1]), *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(path)
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, check=False)


def answer(code: str, target: Path) -> Any:
    """What a program writes, as JSON."""
    done = run("-W", "error", "-c", code, target=target)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    by_hand(target)
    return target


USE = """
import json, sys
import hla
loaded = [name for name in sys.modules if name.startswith("hla_plugin_example")]
names = hla.backends.available()
early = "numpy" in sys.modules
import numpy as np
q, k, v = np.random.default_rng(0).normal(size=(3, 2, 11, 5))
options = {"decay": 0.9, "normalize": True}
ours = hla.hla2(q, k, v, **options, backend="c_loop")
theirs = hla.hla2(q, k, v, **options)
try:
    refused = hla.hla2(q, k, v, mask="none", backend="c_loop")
except hla.BackendUnsupportedError as error:
    refused = str(error)
print(json.dumps({
    "loaded": loaded, "early": early, "names": names, "error": float(abs(ours - theirs).max() / abs(theirs).max()),
    "plan": [hla.explain("hla2", q, k, v, backend="c_loop").backend, hla.explain("hla2", q, k, v).backend],
    "refused": refused,
}))
"""


def can_build() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in ("pip", "hatchling"))


@pytest.mark.parametrize(
    "install",
    [by_hand, pytest.param(by_pip, marks=pytest.mark.skipif(not can_build(), reason="with pip and hatchling"))],
)
def test_it_is_found_chosen_and_right(install: Callable[[Path], None], tmp_path: Path) -> None:
    install(tmp_path)
    found = answer(USE, tmp_path)
    assert found["loaded"] == [], "import hla loads no plug-in"
    assert not found["early"], "nor does looking for backends load what a plug-in works with"
    assert "c_loop" in found["names"]
    assert found["names"].index("c_loop") > found["names"].index("numpy")
    assert found["error"] < 1e-13
    assert found["plan"] == ["c_loop", "numpy"]
    assert "c_loop: runs forward in time only, so mask 'causal' or 'prefix'" in found["refused"]


def test_its_own_tests_pass(installed: Path, tmp_path: Path) -> None:
    tests = shutil.copytree(EXAMPLE, tmp_path / "copy", ignore=shutil.ignore_patterns("src"))
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", target=installed, folder=tests)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


def test_the_library_lists_it_with_its_own_check(installed: Path) -> None:
    done = run("-m", "hla", "info", "--json", target=installed)
    assert done.returncode == 0, done.stderr
    row = next(row for row in json.loads(done.stdout)["rows"] if row.get("backend") == "c_loop")
    assert (row["available"], row["checked"]) == (True, True)
    assert row["reason"] == "compiles, and agrees with the definition"


BROKEN = {
    "raises": ("own_broken:nothing", "def nothing():\n    raise OSError('no such chip')\n", "OSError: no such chip"),
    "absent": ("own_absent:backend", None, "No module named 'own_absent'"),
    "other": ("own_other:backend", "backend = 3\n", "is int, not hla.backends.Backend"),
}

THIEF = """
from dataclasses import replace
import hla_plugin_example as example
backend = replace(example.backend(), spec=replace(example.SPEC, name="numpy"))
"""
"""A plug-in that would take the name of a backend of the library."""


def test_plug_ins_that_fail_disturb_no_other(tmp_path: Path) -> None:
    by_hand(tmp_path)
    for name, (entry, text, _) in BROKEN.items():
        announce(tmp_path, f"own-{name}", "1", {name: entry})
        if text is not None:
            (tmp_path / f"{entry.partition(':')[0]}.py").write_text(text)
    announce(tmp_path, "own-thief", "1", {"numpy": "own_thief:backend"})
    (tmp_path / "own_thief.py").write_text(THIEF)
    code = """
import json, hla, numpy as np
x = np.ones((7, 5))
names = hla.backends.available()
reasons = {name: hla.backends.get(name).availability().reason for name in %r}
print(json.dumps([names, reasons, hla.hla2(x, x, x, backend="c_loop").shape, hla.explain("hla2", x, x, x).backend]))
""" % list(BROKEN)  # noqa: UP031 (the code has braces)
    names, reasons, shape, chosen = answer(code, tmp_path)
    assert {"c_loop", "numpy"} <= set(names)
    assert not set(BROKEN) & set(names)
    for name, (entry, _, reason) in BROKEN.items():
        assert reasons[name].startswith(f"plug-in {entry} failed to load: ")
        assert reasons[name].endswith(reason)
    assert (shape, chosen) == ([7, 5], "numpy")

"""Importing the package costs nothing and changes nothing; a framework is there only when its arrays are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import hla
from libraries import Library

FRAMEWORKS = ("torch", "jax", "jaxlib", "cupy", "triton", "flax", "transformers", "array_api_strict", "ml_dtypes")
HEAVY = ("numpy", "safetensors", "rich", "matplotlib", "scipy", "pandas", *FRAMEWORKS)
FRAMEWORK_MODULES = ("nn", "distributed", "integrations")
"""Parts of the package that are for one framework each; importing them imports it."""

KEPT = ("PATH", "PYTHONPATH", "HOME", "LANG", "TMPDIR", "TEMP", "SYSTEMROOT", "LD_LIBRARY_PATH", "OMP_NUM_THREADS")
"""What a fresh interpreter is given of the environment; importing the package here must leave no trace there."""


def run(script: str, *, env: dict[str, str] | None = None) -> Any:
    """A fresh interpreter in which every warning is an error; what it prints, as JSON."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        env={**{name: os.environ[name] for name in KEPT if name in os.environ}, **(env or {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


LOADED = f"""
import json, sys
def loaded():
    return sorted({{name.partition(".")[0] for name in sys.modules}} & set({HEAVY!r}))
"""


def test_the_package_alone() -> None:
    """Not even NumPy; nor anything that takes a while to import."""
    script = LOADED + "import hla\nprint(json.dumps([loaded(), sorted(sys.modules)]))"
    heavy, modules = run(script)
    assert heavy == []
    assert "importlib.metadata" not in modules
    assert not {"asyncio", "multiprocessing", "unittest", "urllib.request", "concurrent.futures"} & set(modules)


def test_without_arrays_there_is_no_framework() -> None:
    """Choosing, listing and costing need none either."""
    script = (
        LOADED
        + """
import hla
hla.set_backend("numpy")
hla.get_backend()
hla.set_backend(None)
hla.backends.available()
hla.cost("hla2", T=8, d=4, dv=4)
hla.paper
dir(hla)
print(json.dumps(loaded()))
"""
    )
    assert not set(run(script)) & set(FRAMEWORKS)


def test_numpy_arrays_load_no_framework() -> None:
    script = (
        LOADED
        + """
import numpy as np, hla, tempfile, os
before = set(loaded())
q, k, v = np.random.default_rng(0).normal(size=(3, 11, 5)).astype(np.float32)
for operator in (hla.linear_attention, hla.hla2, hla.ahla, hla.hla3):
    o, state = operator(q, k, v, decay=0.9, normalize=True, return_state=True)
    o_t, state = hla.step(state, q[0], k[0], v[0], normalize=True)
hla.higher_order(q, k, v, order=4)
hla.vjp("hla2", q, k, v)[1](o)
a = hla.segments.from_tokens("hla2", q, k, v)
hla.segments.combine(a, a)
hla.explain("hla2", q, k, v)
hla.feature_map(q, "softmax")
unused = set(loaded()) - before
path = os.path.join(tempfile.mkdtemp(), "state")
hla.save_state(path, state)
hla.load_state(path, like=q)
print(json.dumps([sorted(unused), loaded()]))
"""
    )
    unused, all_loaded = run(script)
    assert unused == []
    assert not set(all_loaded) & (set(FRAMEWORKS) - {"ml_dtypes"})
    assert "safetensors" in all_loaded, "loaded where it is needed"


def test_a_framework_loads_no_other(lib: Library) -> None:
    """Its arrays, from one end to the other, without any of the others."""
    if lib.name == "cupy":
        pytest.skip("the process would need a GPU")
    module = {"strict": "array_api_strict", "jax": "jax", "torch": "torch", "numpy": "numpy"}[lib.name]
    spelling = {"jax": "jax.numpy"}.get(lib.name, module)
    script = (
        LOADED
        + f"""
import importlib
xp = importlib.import_module({spelling!r})
before = set(loaded())
import hla
x = xp.ones((5, 3), dtype=xp.float32)
o, state = hla.hla2(x, x, x, decay=0.5, return_state=True)
hla.vjp("ahla", x, x, x)[1](o)
hla.explain("hla2", x, x, x)
print(json.dumps(sorted(set(loaded()) - before)))
"""
    )
    assert run(script) == []


def modules() -> list[str]:
    base = Path(hla.__file__).parent
    found = []
    for path in sorted(base.rglob("*.py")):
        parts = path.relative_to(base.parent).with_suffix("").parts
        name = ".".join(parts).removesuffix(".__init__")
        if path.name != "__main__.py":
            found.append(name)
    return found


def is_for_one_framework(name: str) -> bool:
    """Whether a module may import a framework: parts of the package for one, and the inside of a backend's folder."""
    parts = name.split(".")
    return parts[1:2] in ([x] for x in FRAMEWORK_MODULES) or (parts[1:2] == ["backends"] and len(parts) > 3)


def test_every_module_by_itself() -> None:
    """Each can be the first to be imported; none changes the environment, starts a thread, prints, or writes a file."""
    names = [name for name in modules() if not is_for_one_framework(name)]
    script = (
        LOADED
        + f"""
import importlib, io, os, tempfile, threading, contextlib, warnings, signal, locale
os.chdir(tempfile.mkdtemp())
found = {{}}
for name in {names!r}:
    for known in [m for m in sys.modules if m.partition(".")[0] == "hla"]:
        del sys.modules[known]
    before = (dict(os.environ), threading.active_count(), sys.path[:], list(warnings.filters), os.getcwd(),
              signal.getsignal(signal.SIGINT), sys.getrecursionlimit(), locale.setlocale(locale.LC_ALL))
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "hla").partition(".")[0] == "hla":
            raise
        found[name] = ["needs " + error.name]
        continue
    after = (dict(os.environ), threading.active_count(), sys.path[:], list(warnings.filters), os.getcwd(),
             signal.getsignal(signal.SIGINT), sys.getrecursionlimit(), locale.setlocale(locale.LC_ALL))
    found[name] = [i for i, (x, y) in enumerate(zip(before, after)) if x != y]
    found[name] += [said.getvalue()] * bool(said.getvalue())
    found[name] += [x for x in loaded() if x in {FRAMEWORKS!r}] + os.listdir()
print(json.dumps(found))
"""
    )
    found = run(script)
    assert set(found) == set(names)
    terminal = {"rich", "matplotlib", "numpy", "psutil"}
    bad = {
        name: effects
        for name, effects in found.items()
        if effects and not all(str(x).removeprefix("needs ") in terminal for x in effects)
    }
    assert bad == {}


def test_names_on_demand() -> None:
    """`hla.paper` and the like are imported when they are first used, and an unknown name is an AttributeError."""
    script = (
        LOADED
        + """
import hla
before = "hla.paper" in sys.modules
hla.paper.algorithm1
try:
    hla.no_such_name
    error = ""
except AttributeError as e:
    error = str(e)
print(json.dumps([before, "hla.paper" in sys.modules, error, "paper" in dir(hla)]))
"""
    )
    assert run(script) == [False, True, "module 'hla' has no attribute 'no_such_name'", True]


def test_star_import() -> None:
    script = """
import json
space = {}
exec("from hla import *", space)
import hla
print(json.dumps(sorted(set(hla.__all__) - set(space))))
"""
    assert run(script) == []


@pytest.mark.parametrize("value", ["numpy", "no_such_backend"])
def test_the_environment_is_not_read_on_import(value: str) -> None:
    """A wrong HLA_BACKEND is an error of the first call, not of the import."""
    script = """
import json, hla
import numpy as np
x = np.ones((3, 2))
try:
    hla.hla2(x, x, x)
    print(json.dumps("ran"))
except hla.UnknownBackendError as error:
    print(json.dumps("refused"))
"""
    assert run(script, env={"HLA_BACKEND": value}) == ("ran" if value == "numpy" else "refused")

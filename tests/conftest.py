"""The option --arrays: which array library the shared tests run on."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import libraries
from hla.backends import selection


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--arrays", choices=libraries.NAMES, default="numpy", help="array library of the shared tests")
    parser.addoption("--every", action="store_true", help="leave nothing to the sessions of other libraries")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "optimised: with all of XLA's optimisations, in processes of their own in nox")
    name = libraries.chosen = config.getoption("--arrays")
    if name == "cupy":
        stand_in(config)
    libraries.Library(name).module  # noqa: B018 (a missing library must fail the session, not skip it)
    if name == "jax":
        import jax

        jax.config.update("jax_enable_x64", True)


def stand_in(config: pytest.Config) -> None:
    """Where no GPU is at hand, as CuPy sees it, its stand-in runs the CUDA sources on the CPU."""
    if os.environ.get("HLA_TEST_DEVICE") == "cuda":
        return
    from cuda import standin

    installed = standin.install()
    installed.__enter__()
    config.add_cleanup(lambda: installed.__exit__(None, None, None))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests that ask for `lib` run on every device of the chosen library."""
    if "lib" in metafunc.fixturenames:
        found = libraries.libraries(metafunc.config.getoption("--arrays"))
        metafunc.parametrize("lib", found, ids=[x.device or x.name for x in found], scope="session")


@pytest.fixture(autouse=True)
def own_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a library has a backend of its own, it and not the reference runs every shared call that names none."""
    if "lib" not in request.fixturenames:
        return
    choose = selection.resolve

    def resolve(call: Any, argument: Any, gradient: bool = False) -> Any:
        found = choose(call, argument, gradient)
        named, _ = selection._selected(argument)
        own = call.family in ("torch", "jax") or (call.family == "cupy" and call.form not in ("scan", "parallel"))
        if not named and own:
            assert found.spec.name != "numpy", f"backend numpy for {call.family} arrays: {call}"
        return found

    monkeypatch.setattr(selection, "resolve", resolve)


@pytest.fixture(autouse=True)
def in_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What backend "cupy" computes over tokens it computes in its kernels: products of CuPy itself raise meanwhile."""
    if libraries.chosen != "cupy" or os.environ.get("HLA_TEST_DEVICE") == "cuda":
        return
    from cuda import standin
    from hla.backends.staged import execution

    def guarded(function: Any) -> Any:
        def run(engine: Any, *arguments: Any, **keywords: Any) -> Any:
            with standin.kernels_only() if engine is ENGINE else nullcontext():
                return function(engine, *arguments, **keywords)

        return run

    from hla.backends.cupy.engine import ENGINE

    for name in ("compute", "differentiate"):
        monkeypatch.setattr(execution, name, guarded(getattr(execution, name)))


@pytest.fixture(autouse=True, scope="module")
def quick_programs(request: pytest.FixtureRequest) -> Iterator[None]:
    """For the shared tests JAX compiles without most optimisations, three times as fast; tests/test_jax.py has them.

    Programs are forgotten after each file: thousands of them fill the memory.
    """
    name = request.path.stem
    if request.config.getoption("--arrays") != "jax" or name == "test_jax":
        yield
        return
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()


ONCE = ("concurrency", "cost", "errata", "imports", "inspect", "memory", "public_api", "storage", "testing")
"""Files whose tests, but for the shared ones, are about no array library: the session of NumPy runs them."""
LONG = ("errors", "forms", "inputs", "nonfinite", "packing", "reference")
COMPILED = ("gradients", "paper", "scan", "segments", "states", "storage")
SAMPLED = {
    "strict": dict.fromkeys((*LONG, "segments", "states"), 3),
    "jax": {**dict.fromkeys(LONG, 12), **dict.fromkeys(COMPILED, 3)},
    "cupy": dict.fromkeys((*LONG, "gradients", "states"), 4),
}
"""Files of which a library runs one in so many parameters of each test: what array-api-strict is for is every
operation, not every number; XLA compiles every operation for every shape; and without a GPU the CUDA kernels run thread
by thread."""
OWN = {"cupy": ("cupy", "docs")}
"""Beside shared tests a library's session runs these files only."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what another session runs. No shared test is left out, and which parameters JAX runs is fixed.

    They are the first of each test and, of the others, one in so many by a checksum of its name, so that no value of a
    parameter is always left out; --every runs all.
    """
    name = config.getoption("--arrays")
    if name == "numpy" or config.getoption("--every"):
        return
    sampled_files = SAMPLED.get(name, {})
    seen: dict[str, int] = {}
    kept, left = [], []
    for item in items:
        file, test = item.path.stem.removeprefix("test_"), item.nodeid.partition("[")[0]
        count = seen[test] = seen.get(test, -1) + 1
        shared = "lib" in getattr(item, "fixturenames", ())
        elsewhere = not shared and (file in ONCE or file not in OWN.get(name, (file,)))
        sampled = shared and count and crc32(item.nodeid.encode()) % sampled_files.get(file, 1)
        (left if elsewhere or sampled else kept).append(item)
    config.hook.pytest_deselected(items=left)
    items[:] = kept

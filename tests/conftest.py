"""The option --arrays: which array library the shared tests run on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import libraries


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--arrays", choices=libraries.NAMES, default="numpy", help="array library of the shared tests")
    parser.addoption("--every", action="store_true", help="with --arrays=jax: all parameters of every shared test")


def pytest_configure(config: pytest.Config) -> None:
    name = config.getoption("--arrays")
    libraries.Library(name).module  # noqa: B018 (a missing library must fail the session, not skip it)
    if name == "jax":
        import jax

        jax.config.update("jax_enable_x64", True)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests that ask for `lib` run on every device of the chosen library."""
    if "lib" in metafunc.fixturenames:
        found = libraries.libraries(metafunc.config.getoption("--arrays"))
        metafunc.parametrize("lib", found, ids=[x.device or x.name for x in found], scope="session")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """XLA compiles every operation for every shape: on JAX each shared test runs one in five of its parameters.

    No test is left out, and which parameters run is fixed: the first, the sixth, … of each test in order. The other
    libraries run all of them, and so does JAX with --every.
    """
    if config.getoption("--arrays") != "jax" or config.getoption("--every"):
        return
    seen: dict[str, int] = {}
    kept, left = [], []
    for item in items:
        test = item.nodeid.partition("[")[0]
        count = seen[test] = seen.get(test, -1) + 1
        shared = "lib" in getattr(item, "fixturenames", ())
        (left if shared and count % 5 else kept).append(item)
    config.hook.pytest_deselected(items=left)
    items[:] = kept

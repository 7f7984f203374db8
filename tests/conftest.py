"""The option --arrays: which array library the shared tests run on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import libraries


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--arrays", choices=libraries.NAMES, default="numpy", help="array library of the shared tests")


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

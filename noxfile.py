"""What is checked, and how: `nox` runs all of it, `nox -s NAME` one session, `nox -R` in environments that are kept.

The project is installed as its users install it (not editable), so the wheel's contents are what is tested.
Words after ``--`` go to pytest, for example ``nox -R -s tests-torch -- -k step``.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import wraps
from pathlib import Path

import nox
from nox.virtualenv import VirtualEnv

nox.needs_version = ">=2024.10.9"
nox.options.default_venv_backend = "venv"
nox.options.sessions = (
    "lint",
    "types",
    "tests-numpy",
    "tests-strict",
    "tests-torch",
    "tests-jax",
    "tests-triton",
    "triton-compile",
    "tests-cupy",
    "cupy-sanitize",
    "cupy-compile",
    "tests-flax",
    "tests-transformers",
    "tests-distributed",
    "minimal",
    "docs",
)

PYPROJECT = nox.project.load_toml("pyproject.toml")
ONE_THREAD = {  # two workers on two cores: a thread pool in each would only get in the other's way
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
# Bytecode is written at the first import, not for all that is installed: of torch most is never imported.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
FRAMEWORKS = ("torch", "jax", "jaxlib", "cupy", "triton", "array_api_strict")
TERMINAL = ("rich", "matplotlib")


def group(*names: str) -> list[str]:
    """The requirements of dependency groups. pip has `--group` from 25.1 on; this works with any."""
    result: list[str] = []
    for name in names:
        for entry in PYPROJECT["dependency-groups"][name]:
            result += [entry] if isinstance(entry, str) else group(entry["include-group"])
    return list(dict.fromkeys(result))


def checks(name: str, *, default: bool = True) -> Callable[[Callable[[nox.Session], None]], Callable[..., None]]:
    """A session. Its environment goes when it has passed, except with -r and -R: all of them are 13 GB."""

    def register(function: Callable[[nox.Session], None]) -> Callable[..., None]:
        @nox.session(name=name, default=default)
        @wraps(function)
        def run(session: nox.Session) -> None:
            function(session)
            environment = session.virtualenv
            if isinstance(environment, VirtualEnv) and not environment.reuse_existing:
                shutil.rmtree(environment.location, ignore_errors=True)

        return run

    return register


def install(session: nox.Session, *requirements: str) -> None:
    session.install("--no-compile", *requirements)


def quick_programs(session: nox.Session) -> dict[str, str]:
    """With these flags XLA compiles three to four times as fast; a version that lacks one ends at its sight."""
    quick = {"XLA_FLAGS": "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"}
    script = ("python", "-c", "import jax; jax.devices(); print('taken')")
    printed = session.run(*script, env=quick, silent=True, log=False, success_codes=range(-32, 256))
    if "taken" in str(printed):
        return quick
    session.warn(f"this version of XLA does not take {quick['XLA_FLAGS']}")
    return {}


@checks("lint")
def lint(session: nox.Session) -> None:
    install(session, *group("lint"))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@checks("types")
def types(session: nox.Session) -> None:
    install(session, ".", *group("types"))
    session.run("mypy", "--strict", "src/hla")


def install_for(session: nox.Session, name: str, module: str) -> None:
    """What the whole suite needs for one array library; where that is missing the session fails."""
    install(session, ".", *group("test", "cli", "numpy", name))
    session.run("python", "-c", f"import rich, {module}; print({module}.__name__, {module}.__version__)")


def run_tests(session: nox.Session, name: str, module: str, *words: str) -> None:
    """The whole suite, its shared tests on one array library."""
    install_for(session, name, module)
    session.run("pytest", f"--arrays={name}", "-n", "2", "tests", *words, *session.posargs, env=ONE_THREAD)


WITHOUT_CUDA = "--ignore-glob=*/test_cu[dp]*"
"""Left to the sessions of CuPy."""
WITHOUT_PROCESSES = "--ignore-glob=*/test_distributed*"
"""Left to the session of several processes."""


@checks("tests-numpy")
def tests_numpy(session: nox.Session) -> None:
    run_tests(session, "numpy", "numpy", WITHOUT_CUDA)


@checks("tests-strict")
def tests_strict(session: nox.Session) -> None:
    run_tests(session, "strict", "array_api_strict")


@checks("tests-torch")
def tests_torch(session: nox.Session) -> None:
    run_tests(session, "torch", "torch", WITHOUT_PROCESSES)


@checks("tests-jax")
def tests_jax(session: nox.Session) -> None:
    """What is marked as optimised runs by itself, with XLA as it is."""
    install_for(session, "jax", "jax")
    quick = {**ONE_THREAD, **quick_programs(session)}
    rest = ("-m", "not optimised and not all_configs", WITHOUT_PROCESSES)
    session.run("pytest", "--arrays=jax", "-n", "2", "tests", *rest, *session.posargs, env=quick)
    marked = ("-m", "optimised", "tests/test_jax.py")
    session.run("pytest", "--arrays=jax", "-n", "2", *marked, *session.posargs, env=ONE_THREAD)


TRITON_FILES = ("interpreter", "large", "gradients", "library", "gpu_script", "planted")


@checks("tests-triton")
def tests_triton(session: nox.Session) -> None:
    """The Triton backend's kernels in Triton's interpreter, on the CPU."""
    install(session, ".", *group("test", "cli", "triton"))
    files = ["tests/test_triton.py", *(f"tests/test_triton_{name}.py" for name in TRITON_FILES)]
    interpreted = {**ONE_THREAD, "TRITON_INTERPRET": "1"}
    session.run("pytest", "--arrays=torch", "-n", "2", *files, *session.posargs, env=interpreted)


@checks("triton-compile")
def triton_compile(session: nox.Session) -> None:
    """The Triton backend's kernels compiled for several GPUs, without one."""
    install(session, ".", *group("test", "triton"))
    session.run("pytest", "--arrays=torch", "-n", "2", "tests/test_triton_compile.py", *session.posargs, env=ONE_THREAD)


@checks("triton-compile-all", default=False)
def triton_compile_all(session: nox.Session) -> None:
    """Every configuration of every kernel, for every GPU: the better part of an hour."""
    install(session, ".", *group("test", "triton"))
    file = "tests/test_triton_compile.py"
    session.run("pytest", "--arrays=torch", "-n", "2", "-m", "all_configs", file, *session.posargs, env=ONE_THREAD)


@checks("triton-semantics", default=False)
def triton_semantics(session: nox.Session) -> None:
    """The compiler's intermediate code of the Triton kernels, run on the CPU by ttsem: a second opinion, optional."""
    install(session, ".", *group("test", "triton"))
    install(session, "--no-deps", "--ignore-requires-python", "ttsem==0.1.0")
    file = "tests/test_triton_semantics.py"
    session.run("python", "-m", "ttsem.sanitize", "pytest", "--arrays=torch", file, *session.posargs, env=ONE_THREAD)


CUDA_FILES = tuple(f"tests/test_{name}.py" for name in ("cupy_kernels", "cuda_cpu", "cuda_standin"))


@checks("tests-cupy")
def tests_cupy(session: nox.Session) -> None:
    """The CUDA sources on the CPU, by themselves and through a stand-in for CuPy under the shared suite."""
    run_tests(session, "cupy", "ml_dtypes")
    alone = ("-m", "not sanitizers and not all_configs", *CUDA_FILES)
    session.run("pytest", "--arrays=numpy", "-n", "2", *alone, *session.posargs, env=ONE_THREAD)


@checks("cupy-sanitize")
def cupy_sanitize(session: nox.Session) -> None:
    """The CUDA sources under the address, undefined-behaviour and thread sanitizers."""
    install(session, ".", *group("test", "cupy"))
    session.run(
        "pytest", "--arrays=numpy", "-n", "2", "-m", "sanitizers", *CUDA_FILES, *session.posargs, env=ONE_THREAD
    )


@checks("cupy-compile")
def cupy_compile(session: nox.Session) -> None:
    """The CUDA sources compiled by NVRTC for several GPUs, without one."""
    install(session, ".", *group("test", "nvrtc"))
    files = ("tests/test_cupy_compile.py", "tests/test_cuda_nvrtc.py")
    session.run("pytest", "--arrays=numpy", "-n", "2", *files, *session.posargs, env=ONE_THREAD)


def run_files(session: nox.Session, pattern: str, arrays: str, *groups: str) -> None:
    """Only the files that are about what these groups install."""
    install(session, ".", *group("test", *groups))
    files = sorted(map(str, Path("tests").glob(pattern)))
    environment = {**ONE_THREAD, **(quick_programs(session) if arrays == "jax" else {})}
    session.run("pytest", f"--arrays={arrays}", "-n", "2", *files, *session.posargs, env=environment)


@checks("tests-flax")
def tests_flax(session: nox.Session) -> None:
    """The layer for Flax beside that for PyTorch."""
    run_files(session, "test_nn_flax*.py", "jax", "flax")
    pages = ("tests/test_docs.py", "-k", "flax")  # Flax and PyTorch are together in this session only
    session.run("pytest", "--arrays=jax", "-n", "2", *pages, *session.posargs, env=ONE_THREAD)


@checks("tests-transformers")
def tests_transformers(session: nox.Session) -> None:
    """The model and the attention functions for Transformers."""
    run_files(session, "test_transformers*.py", "torch", "transformers")


@checks("tests-distributed")
def tests_distributed(session: nox.Session) -> None:
    """Sequences over several processes of PyTorch, and over several devices of JAX, on the CPU."""
    run_files(session, "test_distributed_torch*.py", "torch", "torch", "cli")
    run_files(session, "test_distributed_jax*.py", "jax", "jax")


AGAIN = ("concurrency", "cost", "errata", "forms", "gradients", "inputs", "memory", "nonfinite", "packing", "scan")
"""Operators on NumPy arrays, which nothing for the terminal has a part in: left to the session of NumPy."""


@checks("minimal")
def minimal(session: nox.Session) -> None:
    """NumPy alone: no other array library, nothing for the terminal."""
    install(session, ".[numpy]", *group("test", "numpy"))
    absent = (*FRAMEWORKS, *TERMINAL)
    session.run(
        "python",
        "-c",
        f"from importlib.util import find_spec; found = [m for m in {absent} if find_spec(m)]; assert not found, found",
    )
    imported = ("numpy", *absent)
    session.run(
        "python", "-c", f"import sys, hla; found = [m for m in {imported} if m in sys.modules]; assert not found, found"
    )
    words = (WITHOUT_CUDA, *(f"--ignore=tests/test_{name}.py" for name in AGAIN))
    session.run("pytest", "--arrays=numpy", "-n", "2", "tests", *words, *session.posargs, env=ONE_THREAD)


@checks("docs")
def docs(session: nox.Session) -> None:
    install(session, *group("docs"))
    session.run("mkdocs", "build", "--strict", env={"NO_MKDOCS_2_WARNING": "1"})

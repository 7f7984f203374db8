"""`hla info`: versions, and every backend, available or why not."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import platform
import sys
from typing import Any

from hla.cli.report import Report, Table

LIBRARIES = {
    "numpy": ("numpy",),
    "torch": ("torch",),
    "triton": ("triton",),
    "jax": ("jax",),
    "cupy": ("cupy-cuda12x", "cupy-cuda13x", "cupy"),
    "array_api_strict": ("array-api-strict",),
    "array_api_compat": ("array-api-compat",),
    "ml_dtypes": ("ml-dtypes",),
    "safetensors": ("safetensors",),
    "rich": ("rich",),
    "matplotlib": ("matplotlib",),
}
"""Modules, and the distributions that they may come from."""


def add_parser(commands: Any, shared: argparse.ArgumentParser) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "info", parents=[shared], help="versions, and every backend: available, or why not and what to install"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> Report:
    """Versions and backends. Works without any of the optional packages."""
    import hla

    versions: dict[str, str | None] = {"hla": hla.__version__, "python": platform.python_version()}
    versions |= {name: _version(name) for name in LIBRARIES}
    available = hla.backends.available()
    registered = hla.backends.registered()
    rows: list[dict[str, Any]] = []
    for name in [*available, *sorted(registered.keys() - set(available))]:
        backend = registered[name]
        verdict = backend.availability()
        if verdict.ok and backend.check is not None:
            verdict = backend.check()
        rows.append(
            {
                "backend": name,
                "available": verdict.ok,
                "reason": verdict.reason,
                "checked": backend.check is not None,
                "install": None if backend.installed else backend.spec.install,
                "libraries": list(backend.spec.families),
                "forms": list(backend.spec.forms),
                "gradients": backend.spec.gradients,
                "description": backend.spec.description,
            }
        )
    tables = [
        Table("Versions", ("package", "version"), [(n, v or "not installed") for n, v in versions.items()]),
        Table(
            "Backends, best first",
            ("backend", "available", "arrays", "forms", "gradients", "reason, or what it is"),
            [
                (
                    row["backend"],
                    "yes" if row["available"] else "no",
                    "any" if row["libraries"] == ["*"] else ", ".join(row["libraries"]),
                    ", ".join(row["forms"]),
                    "yes" if row["gradients"] else "no",
                    row["description"] if row["available"] and not row["checked"] else row["reason"],
                )
                for row in rows
            ],
        ),
    ]
    if not versions["rich"] or not versions["numpy"]:
        print('hla: verify, bench and demo need more packages. Run: pip install "hla[cli]"', file=sys.stderr)
    return Report(
        ok=bool(available),
        rows=rows,
        tables=tables,
        lines=[f"Selection in force: {_selection()}. {platform.system()} {platform.machine()}."],
        more={"versions": versions, "platform": f"{platform.system()} {platform.machine()}"},
    )


def _selection() -> str:
    import hla

    try:
        chosen = hla.get_backend()
    except hla.UnknownBackendError as error:
        return str(error)
    return chosen if isinstance(chosen, str) else ", ".join(chosen)


def _version(module: str) -> str | None:
    if importlib.util.find_spec(module) is None:
        return None
    for distribution in LIBRARIES[module]:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"

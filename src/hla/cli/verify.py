"""`hla verify`: the matrix operators × forms × cases on every backend and array library, against the definition."""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import asdict
from typing import Any

from hla.cli.report import Failure, Report, Table, pick_backends, progress_bar, require
from hla.cli.threads import use_one_thread


def add_parser(commands: Any, shared: argparse.ArgumentParser) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "verify",
        parents=[shared],
        help="check every operator, form and backend against the definition in float64",
        description="Checks operators x forms x backends x array libraries, with decays, masks, packed sequences, "
        "states and gradients, against the dense definition in float64. Each row names the backend that ran.",
    )
    parser.add_argument("--quick", action="store_true", help="fewer combinations: seconds instead of a minute or two")
    parser.add_argument("--backend", metavar="NAMES", help="only these, comma-separated; default: all available")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> Report:
    """Plan the checks, run them with a progress bar, and report."""
    require("numpy", "rich")
    use_one_thread()
    from hla.testing import Check, Row, placements, plan_checks

    backends, absent = pick_backends(arguments.backend)
    checks: list[Check] = []
    idle = []
    for name in backends:
        places = placements(name, every_device=not arguments.quick)
        if not places:
            idle.append(f"{name}: takes none of the installed array libraries")
        for place in places:
            checks += plan_checks(name, place, _coverage(name, place.library, arguments.quick))
    if not checks:
        raise Failure("no backend takes the arrays of an installed library. " + "; ".join(idle), code=1)
    rows: list[Row] = []
    with progress_bar(len(checks)) as bar:
        for check in checks:
            bar.now(f"{check.backend} on {check.place}: {check.operator}, {check.form}, {check.case.name}")
            rows.append(check.run())
            bar.advance()
    return _report(rows, [*absent, *idle])


def _coverage(backend: str, library: str, quick: bool) -> str:
    """How much of the matrix: all of it where a check takes a millisecond, less where each one compiles."""
    import hla

    native = "*" not in hla.backends.get(backend).spec.families
    if library == "numpy":
        return "pairs" if quick else "full"
    elsewhere = not native and library in hla.backends.available()  # the library has a backend of its own
    if library == "jax":
        return "one" if quick or elsewhere else "few"
    if quick:
        return "one" if elsewhere else "few"
    return "few" if elsewhere else "pairs"


def _report(rows: list[Any], absent: list[str]) -> Report:
    failed = [row for row in rows if row.status == "failed"]
    refused = [row for row in rows if row.status == "unsupported"]
    compared = [row for row in rows if row.error is not None]
    full = [row for row in compared if row.dtype in ("float32", "float64")]
    values = sum(row.values for row in rows)
    checks = len(rows) - len(refused)
    shares = {row: row.error / row.budget for row in compared}
    lines = [
        f"{checks} checks, {values:,} values compared with the definition, {len(failed)} failed, "
        f"{len(refused)} not supported.",
        *(f"  {count} x {reason}" for reason, count in Counter(row.note for row in refused).most_common(8)),
        *(f"Not run: {reason}" for reason in absent),
    ]
    if shares:
        worst = max(shares, key=lambda row: shares[row])
        lines.append(
            f"Closest to its budget: {worst.operator}, {worst.form}, {worst.case} "
            f"({worst.backend} on {worst.library}), error {worst.error:.1e} of {worst.budget:.1e} allowed."
        )
    tables = [_summary(rows)]
    if failed:
        shown: list[tuple[str, ...]] = [
            (row.backend, row.library, _name(row), row.form, row.case, row.note.splitlines()[0][:200])
            for row in failed[:40]
        ]
        title = f"Failed ({len(failed)}" + (", the first 40 shown)" if len(failed) > 40 else ")")
        tables.append(Table(title, ("backend", "arrays", "operator", "form", "case", "why"), shown))
    return Report(
        ok=not failed and checks > 0,
        rows=[asdict(row) for row in rows],
        checks=checks,
        worst_error=max((row.error for row in full), default=None),
        tables=tables,
        lines=lines,
        more={
            "values": values,
            "failed": len(failed),
            "unsupported": len(refused),
            "worst_share_of_budget": max(shares.values(), default=None),
            "not_run": absent,
        },
    )


def _name(row: Any) -> str:
    return row.operator if row.order is None else f"order {row.order}"


def _summary(rows: list[Any]) -> Table:
    """Checks passed per backend, arrays, operator and form, with the largest share of an error budget."""
    from hla.testing.cases import FORMS

    groups: dict[tuple[str, str, str], list[Any]] = {}
    for row in rows:
        groups.setdefault((row.backend, row.library, _name(row)), []).append(row)
    lines: list[tuple[str, ...]] = []
    for key, members in groups.items():
        cells = []
        for form in FORMS:
            run = [row for row in members if row.form == form and row.status != "unsupported"]
            passed = sum(row.status == "ok" for row in run)
            cells.append("" if not run else f"{passed}" if passed == len(run) else f"{passed} of {len(run)}")
        errors = [row.error for row in members if row.error is not None and row.dtype in ("float32", "float64")]
        share = max((row.error / row.budget for row in members if row.error is not None), default=0.0)
        lines.append((*key, *cells, f"{max(errors, default=0.0):.1e}", f"{share:.0%}"))
    columns = ("backend", "arrays", "operator", *(f" {form}" for form in FORMS), " worst error", " of its budget")
    return Table("Checks passed", columns, lines)

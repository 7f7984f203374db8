"""What a command has found, and how it is shown: tables and lines for a reader, one JSON object for a program."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hla.errors import message


@dataclass(frozen=True)
class Table:
    """A table; columns whose heading starts with a space are set to the right."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]


@dataclass
class Report:
    """The result of a command.

    Attributes:
        ok: whether all went well; decides the exit code.
        rows: what was found, as plain values, for ``--json``.
        checks: how many comparisons were made; None where the command makes none.
        worst_error: the largest error of a comparison in float32 or float64; None where none was measured.
        tables: for a reader.
        lines: sentences under the tables.
        more: further entries of the JSON object.
    """

    ok: bool
    rows: list[dict[str, Any]]
    checks: int | None = None
    worst_error: float | None = None
    tables: list[Table] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The JSON object."""
        measured = {} if self.checks is None else {"checks": self.checks}
        if self.checks is not None:
            measured["worst_error"] = self.worst_error  # type: ignore[assignment]
        return {"ok": self.ok, **measured, **self.more, "rows": self.rows}


class Failure(Exception):
    """A command could not be run as asked."""

    def __init__(self, text: str, code: int = 2) -> None:
        super().__init__(text)
        self.code = code


def require(*packages: str) -> None:
    """Failure with the pip command unless all packages are installed."""
    missing = [name for name in packages if sys.modules.get(name, ...) is None or not _found(name)]
    if missing:
        raise Failure(
            message(
                "hla",
                f"the packages {', '.join(packages)}",
                f"no {', '.join(missing)}",
                'Run: pip install "hla[cli]"',
            ),
            code=1,
        )


def _found(name: str) -> bool:
    return name in sys.modules or importlib.util.find_spec(name) is not None


def print_report(report: Report, as_json: bool) -> None:
    """Print a report to stdout."""
    if as_json:
        print(json.dumps(_plain(report.as_dict()), allow_nan=False))
        return
    if _found("rich"):
        _print_rich(report)
        return
    for table in report.tables:
        print(table.title)
        for row in (table.columns, *table.rows):
            print("  " + "  ".join(cell.strip() for cell in row))
    for line in report.lines:
        print(line)


def _print_rich(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=160)
    for table in report.tables:
        shown = RichTable(title=table.title, title_justify="left", title_style="bold")
        for column in table.columns:
            shown.add_column(column.strip(), justify="right" if column.startswith(" ") else "left", overflow="fold")
        for row in table.rows:
            shown.add_row(*(Text(cell) for cell in row))  # as it is: "hla[torch]" is no markup
        console.print(shown)
    for line in report.lines:
        console.print(line, markup=False)


def print_failure(failure: Failure, as_json: bool) -> None:
    """The reason on stderr, and for ``--json`` an object that says the same."""
    print(f"hla: error: {failure}", file=sys.stderr)
    if as_json:
        print(json.dumps({"ok": False, "error": str(failure), "checks": 0, "worst_error": None, "rows": []}))


def _plain(value: Any) -> Any:
    """Numbers that JSON does not have become null."""
    if isinstance(value, dict):
        return {name: _plain(x) for name, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(x) for x in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


class Bar:
    """A progress bar on stderr."""

    def __init__(self, progress: Any, task: Any) -> None:
        self._progress, self._task = progress, task

    def now(self, what: str) -> None:
        """Say what is being done."""
        self._progress.update(self._task, description=what)

    def advance(self, steps: float = 1) -> None:
        """Some of it is done."""
        self._progress.advance(self._task, steps)


@contextlib.contextmanager
def progress_bar(total: float) -> Iterator[Bar]:
    """A bar over `total` steps, on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(bar_width=30), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True)) as progress:
        yield Bar(progress, progress.add_task("", total=total))


def pick_backends(named: str | None) -> tuple[list[str], list[str]]:
    """(backends to run, a sentence for each that cannot): the named ones, or all that are registered.

    Failure when a named one is unknown or cannot run here, or when none is left.
    """
    import hla

    chosen = hla.backends.available() if named is None else split(named)
    absent = []
    if named is None:
        known = hla.backends.registered()
        absent = [f"{name}: {known[name].availability().reason}" for name in known if name not in chosen]
    else:
        for name in chosen:
            try:
                verdict = hla.backends.get(name).availability()
            except hla.UnknownBackendError as error:
                raise Failure(str(error)) from None
            if not verdict.ok:
                raise Failure(
                    message("--backend", "a backend that can run here", f"{name}, {verdict.reason}", "See hla info.")
                )
    if not chosen:
        raise Failure(message("backend", "at least one that can run here", "none", 'Run: pip install "hla[numpy]"'))
    return chosen, absent


def split(text: str) -> list[str]:
    """The parts of a comma-separated argument."""
    return [part.strip() for part in text.split(",") if part.strip()]


def size_text(count: float) -> str:
    """Bytes for a reader."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"

"""Runs of `hla bench` on disk, and what has changed between two of them."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hla.cli.report import Failure, Table
from hla.errors import message

FORMAT, VERSION = "hla bench", 1
KEY = ("arrays", "backend", "name", "form_asked", "pass", "T", "heads", "d", "dv", "dtype")
"""Rows are the same measurement if these are equal."""


@dataclass(frozen=True)
class Run:
    """What was measured, and on what."""

    machine: dict[str, str]
    rows: list[dict[str, Any]]


@dataclass(frozen=True)
class Comparison:
    """Ratios new / old of all rows that both runs have."""

    rows: list[dict[str, Any]]
    table: Table
    lines: list[str]


def check_target(file: str) -> None:
    """Failure when a run could not be written there: known before anything is measured."""
    path = Path(file)
    if not path.absolute().parent.is_dir() or path.is_dir():
        raise Failure(message("--save", "a file in a folder that exists", file, "Create the folder."))


def save(file: str, run: Run) -> None:
    """Write a run as JSON."""
    content = {"format": FORMAT, "version": VERSION, "machine": run.machine, "rows": run.rows}
    Path(file).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def load(file: str) -> Run:
    """A run from disk; Failure when the file is none."""
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise _no_run(file, (error.strerror or str(error)).lower()) from None
    except ValueError as error:  # JSON, UTF-8, a null character in the path
        raise _no_run(file, f"no JSON: {error}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise _no_run(file, f'no "format": "{FORMAT}" in it')
    if content.get("version") != VERSION:
        raise _no_run(file, f"version {content.get('version')!r} of the format, this is version {VERSION}")
    machine, rows = content.get("machine"), content.get("rows")
    if not isinstance(machine, dict) or not isinstance(rows, list) or not all(map(_is_row, rows)):
        raise _no_run(file, "rows without what identifies them")
    return Run(machine, rows)


def _is_row(row: Any) -> bool:
    if not isinstance(row, dict) or not all(name in row for name in KEY):
        return False
    seconds = row.get("seconds", "")
    return seconds is None or (isinstance(seconds, float) and seconds > 0)


def _no_run(file: str, why: str) -> Failure:
    return Failure(
        message("--compare", "a file that hla bench --save wrote", f"{file} ({why})", "Make one with --save FILE.")
    )


def compare(old: Run, new: Run) -> Comparison:
    """Match the rows of two runs; times first, peak memory where both know it."""
    before = {tuple(row[name] for name in KEY): row for row in old.rows if row["seconds"] is not None}
    rows: list[dict[str, Any]] = []
    shown: list[tuple[str, ...]] = []
    matched = set()
    measured = [row for row in new.rows if row["seconds"] is not None]
    for row in measured:
        key = tuple(row[name] for name in KEY)
        other = before.get(key)
        if other is None:
            continue
        matched.add(key)
        ratio = row["seconds"] / other["seconds"]
        bytes_now, bytes_then = row.get("peak_bytes"), other.get("peak_bytes")
        memory = bytes_now / bytes_then if bytes_now and bytes_then else None
        rows.append(
            {
                **dict(zip(KEY, key, strict=True)),
                "old_seconds": other["seconds"],
                "new_seconds": row["seconds"],
                "new_per_old": ratio,
                "memory_new_per_old": memory,
            }
        )
        shown.append(
            (
                str(row["arrays"]),
                row["backend"] or "",
                str(row["name"]),
                row["form_asked"] or "",
                str(row["pass"]),
                str(row["T"]),
                f"{other['seconds'] * 1e3:.3f}",
                f"{row['seconds'] * 1e3:.3f}",
                f"{ratio:.2f}",
                "" if memory is None else f"{memory:.2f}",
            )
        )
    columns = (
        "arrays",
        "backend",
        "what",
        "form",
        "pass",
        " T",
        " old ms",
        " new ms",
        " new / old",
        " memory new / old",
    )
    lines = _lines(old, new, rows)
    lines += _left("the new run", len(measured) - len(matched)) + _left("the old run", len(before) - len(matched))
    return Comparison(rows, Table("New against old; below 1 is faster", columns, shown), lines)


def _lines(old: Run, new: Run, rows: list[dict[str, Any]]) -> list[str]:
    names = sorted(old.machine.keys() | new.machine.keys())
    pairs = {name: (old.machine.get(name, "none"), new.machine.get(name, "none")) for name in names}
    changed = [f"Differs: {name}, {a} -> {b}." for name, (a, b) in pairs.items() if a != b]
    if not rows:
        return [*changed, "The two runs have no measurement in common."]
    mean = math.exp(sum(math.log(row["new_per_old"]) for row in rows) / len(rows))
    return [*(changed or ["Machine and versions are the same."]),
            f"{len(rows)} measurements compared, new / old {mean:.2f} on geometric average."]  # fmt: skip


def _left(where: str, count: int) -> list[str]:
    return [f"Only in {where}: {count} measurements."] if count else []

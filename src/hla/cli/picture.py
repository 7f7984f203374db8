"""The picture of `hla bench`: time against T for each pass, and peak memory below it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hla.cli.report import Failure
from hla.errors import message

_STYLES = {"operator": "-", "loop": ":", "composition": "-.", "softmax": "--", "fla": (0, (5, 1, 1, 1, 1, 1))}
_MARKERS = "osD^vP*X"


def check_target(file: str) -> None:
    """Failure when a picture could not be drawn there: known before anything is measured."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    known = Figure().canvas.get_supported_filetypes()
    path = Path(file)
    if path.suffix.lstrip(".") not in known:
        raise Failure(message("--plot", f"a file named .{', .'.join(sorted(known))}", file, "Change its ending."))
    if not path.absolute().parent.is_dir() or path.is_dir():
        raise Failure(message("--plot", "a file in a folder that exists", file, "Create the folder."))


def draw(file: str, rows: list[dict[str, Any]], title: str) -> None:
    """Logarithmic axes; operators in full lines, what they are compared with broken, one marker for each library."""
    from matplotlib.figure import Figure

    rows = [row for row in rows if row["seconds"] is not None]
    passes = list(dict.fromkeys(row["pass"] for row in rows))
    if not passes:
        raise Failure("--plot: nothing was measured that could be drawn", code=1)
    figure = Figure(figsize=(5.5 * len(passes) + 2.5, 8), layout="constrained")
    grid = figure.subplots(2, len(passes), squeeze=False, sharex="col")
    for column, name in enumerate(passes):
        found = [row for row in rows if row["pass"] == name]
        memory = "state_bytes" if name == "decode" else "peak_bytes"
        for axes, quantity in ((grid[0][column], "seconds"), (grid[1][column], memory)):
            _lines(axes, found, quantity)
        grid[0][column].set(title=name, ylabel="seconds a token" if name == "decode" else "seconds a call")
        grid[1][column].set(xlabel="T, tokens", ylabel="bytes of state" if name == "decode" else "peak bytes of a call")
    handles = {
        text: line
        for axes in grid.flat
        for line, text in zip(*axes.get_legend_handles_labels(), strict=True)
    }  # fmt: skip
    figure.legend(handles.values(), handles.keys(), fontsize=7, loc="outside right upper")
    figure.suptitle(title)
    figure.savefig(file)


def _lines(axes: Any, rows: list[dict[str, Any]], quantity: str) -> None:
    libraries = sorted({row["arrays"] for row in rows})
    operators = sorted({row["operator_label"] for row in rows if row["kind"] != "softmax"})
    series = dict.fromkeys((row["arrays"], row["backend"], row["name"], row["form_asked"]) for row in rows)
    for arrays, backend, name, form in series:
        mine = (arrays, backend, name, form)
        points = [row for row in rows if (row["arrays"], row["backend"], row["name"], row["form_asked"]) == mine]
        points = [row for row in points if row.get(quantity)]
        if not points:
            continue
        first = points[0]
        color = "black" if first["kind"] == "softmax" else f"C{operators.index(first['operator_label'])}"
        how = ", ".join(filter(None, (arrays, backend if backend != arrays else "", form if form != "auto" else "")))
        axes.plot(
            [row["T"] for row in points],
            [row[quantity] for row in points],
            linestyle=_STYLES[first["kind"]],
            color=color,
            marker=_MARKERS[libraries.index(arrays) % len(_MARKERS)],
            markersize=4,
            label=f"{name} ({how})",
        )
    lengths = sorted({row["T"] for row in rows})
    axes.set(xscale="log", yscale="log")
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.minorticks_off()
    axes.grid(alpha=0.3)

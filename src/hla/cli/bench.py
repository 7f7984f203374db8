"""`hla bench`: time and peak memory of the operators beside softmax attention and plain code, in turns in one run."""

from __future__ import annotations

import argparse
from typing import Any

from hla.cli.report import Failure, Report, Table, pick_backends, progress_bar, require, size_text, split
from hla.errors import message

DEFAULT_OPERATORS = "hla2,ahla"
LIBRARIES = ("numpy", "torch", "jax", "cupy")
DTYPES = ("float32", "float64", "bfloat16", "float16")


def add_parser(commands: Any, shared: argparse.ArgumentParser) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "bench",
        parents=[shared],
        help="speed and peak memory against softmax attention and plain code",
        description="Times the operators on every backend next to causal softmax attention, a plain loop over "
        "tokens and a straightforward chunked composition, in turns within one run, with the machine's matmul rate as "
        "the ceiling. Every result is checked before it is timed. Runs can be saved and compared.",
    )
    add = parser.add_argument
    add("--operators", default=DEFAULT_OPERATORS, metavar="NAMES",
        help="comma-separated; higher_order:N for order N (default: %(default)s)")  # fmt: skip
    add("--backends", "--backend", dest="backend", metavar="NAMES",
        help="only these, comma-separated; default: all available")  # fmt: skip
    add("--arrays", metavar="NAMES",
        help=f"array libraries, of {', '.join(LIBRARIES)}; default: each backend's own, and for a library without "
        "a backend the one that runs its arrays")  # fmt: skip
    add("--lengths", default="256,1024", metavar="T,T,…", help="tokens (default: %(default)s)")
    add("--forms", default="auto", metavar="NAMES", help="comma-separated (default: %(default)s, the backend's choice)")
    add("--passes", default="forward,backward,decode", metavar="NAMES",
        help="comma-separated; backward is forward and backward together (default: %(default)s)")  # fmt: skip
    add("--peers", default="softmax,loop,composition,fla", metavar="NAMES",
        help="what to compare with, comma-separated, or none (default: %(default)s)")  # fmt: skip
    add("--heads", type=_size, default=8, help="heads (default: %(default)s)")
    add("--d", type=_size, default=64, help="features of q and k (default: %(default)s)")
    add("--dv", type=_size, default=None, help="features of v (default: d)")
    add("--dtype", choices=DTYPES, default="float32", help="of the inputs (default: %(default)s)")
    add("--repeats", "--repeat", dest="repeat", type=_size, default=5, metavar="N",
        help="rounds; the median counts (default: %(default)s)")  # fmt: skip
    add("--plot", metavar="FILE", help="also draw time and memory against T, e.g. to a .png, .svg or .pdf file")
    add("--save", metavar="FILE", help="also write the run to a file")
    add("--compare", nargs="+", metavar="FILE",
        help="one saved run: compare this run with it; two: compare them and measure nothing")  # fmt: skip
    parser.set_defaults(run=run)


def _size(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text!r}")
    return value


def run(arguments: argparse.Namespace) -> Report:
    """Check, time and measure everything; optionally draw, save and compare."""
    from hla.cli import saved

    files = arguments.compare or []
    if len(files) > 2:
        raise Failure(message("--compare", "one file or two", f"{len(files)} files", "Name the old run, then the new."))
    if len(files) == 2:
        return _compare_only(*(saved.load(file) for file in files))
    require("numpy", "rich", *(["matplotlib"] if arguments.plot else []))
    plan = _read(arguments)
    old = saved.load(files[0]) if files else None
    if arguments.save:
        saved.check_target(arguments.save)
    if arguments.plot:
        from hla.cli import picture

        picture.check_target(arguments.plot)
    places, idle = _places(arguments)
    found = _measure(arguments, plan, places)
    report = _report(arguments, found, idle)
    now = saved.Run(report.more["machine"], found["rows"])
    if arguments.save:
        saved.save(arguments.save, now)
        report.lines.append(f"Saved: {arguments.save}")
    if arguments.plot:
        picture.draw(arguments.plot, found["rows"], _title(arguments))
        report.lines.append(f"Picture: {arguments.plot}")
    if old is not None:
        comparison = saved.compare(old, now)
        report.tables.append(comparison.table)
        report.lines += comparison.lines
        report.more["comparison"] = comparison.rows
    return report


def _compare_only(old: Any, new: Any) -> Report:
    from hla.cli import saved

    found = saved.compare(old, new)
    if not found.rows:
        raise Failure(
            message("--compare", "two runs with measurements in common", "none in common",
                    "Save both with the same options.")
        )  # fmt: skip
    errors = [row["error"] for row in new.rows if row.get("error") is not None]
    return Report(True, found.rows, len(found.rows), max(errors, default=None), [found.table], found.lines,
                  {"machine": {"old": old.machine, "new": new.machine}})  # fmt: skip


def _read(arguments: argparse.Namespace) -> dict[str, Any]:
    """The comma-separated arguments, each checked."""
    from hla.cli.baselines import PEERS
    from hla.cli.passes import PASSES
    from hla.options import FORMS

    operators = [_operator(text) for text in split(arguments.operators)]
    lengths = sorted({_length(text) for text in split(arguments.lengths)})
    if not operators or not lengths:
        raise Failure(message("--operators and --lengths", "at least one each", "none", "Name some."))
    arguments.dv = arguments.dv or arguments.d
    peers = [] if arguments.peers == "none" else _names("--peers", arguments.peers, PEERS)
    return {
        "operators": list(dict.fromkeys(operators)),
        "lengths": lengths,
        "forms": _names("--forms", arguments.forms, FORMS),
        "passes": _names("--passes", arguments.passes, PASSES),
        "peers": tuple(peers),
    }


def _names(option: str, text: str, known: tuple[str, ...]) -> list[str]:
    names = list(dict.fromkeys(split(text)))
    wrong = [name for name in names if name not in known]
    if wrong or not names:
        got = repr(wrong[0]) if wrong else "none"
        raise Failure(message(option, f"some of {', '.join(known)}", got, "Check the spelling."))
    return names


def _operator(text: str) -> tuple[str, int | None]:
    from hla.family import OPERATORS

    name, _, order = text.partition(":")
    numbered = order.isdigit() and int(order) >= 1
    if name not in OPERATORS or (name == "higher_order") != numbered or (order and not numbered):
        known = ", ".join(n for n in OPERATORS if n != "higher_order")
        raise Failure(message("--operators", f"{known} or higher_order:N", repr(text), "Check the spelling."))
    return name, int(order) if order else None


def _length(text: str) -> int:
    try:
        return _size(text)
    except argparse.ArgumentTypeError as error:
        raise Failure(f"--lengths: {error}") from None


def _places(arguments: argparse.Namespace) -> tuple[dict[Any, list[str]], list[str]]:
    """Backends by the place whose arrays they are to run, and a sentence for everything that cannot."""
    from hla.testing.inputs import find_dtype, has_float64
    from hla.testing.libraries import find_library, home, placements

    backends, absent = pick_backends(arguments.backend)
    found: dict[Any, list[str]] = {}
    if arguments.arrays is None:
        for name in backends:
            place = home(name)
            if place is None:
                absent.append(f"{name}: takes none of the installed array libraries")
            else:
                found.setdefault(place, []).append(name)
    libraries = _names("--arrays", arguments.arrays, LIBRARIES) if arguments.arrays else []
    if arguments.arrays is None and arguments.backend is None:
        served = {place.library for place in found}
        libraries = [name for name in LIBRARIES if name not in served and find_library(name) is not None]
    for library in libraries:
        if find_library(library) is None:
            raise Failure(message("--arrays", "installed libraries", library, f'Run: pip install "hla[{library}]"'))
        for name in backends:
            takes = placements(name, [library], every_device=False)
            if takes and (arguments.arrays or takes[-1] not in found):
                found.setdefault(takes[-1], []).append(name)
    usable: dict[Any, list[str]] = {}
    for place, names in found.items():
        try:
            find_dtype(place.xp, arguments.dtype)
            fits = arguments.dtype != "float64" or has_float64(place.xp)
        except ValueError:
            fits = False
        if fits:
            usable[place] = names
        else:
            absent.append(f"{place}: has no {arguments.dtype} as it is set up here")
    if not usable:
        raise Failure("no backend takes the arrays of an installed library. " + "; ".join(absent), code=1)
    return usable, absent


def _measure(arguments: argparse.Namespace, plan: dict[str, Any], places: dict[Any, list[str]]) -> dict[str, Any]:
    from hla.cli.baselines import operator_on, peers_of, softmax_peer
    from hla.cli.measuring import Group, Setting

    setting = Setting(arguments.heads, arguments.d, arguments.dv, arguments.dtype, arguments.repeat)
    rows: list[dict[str, Any]] = []
    rates: dict[str, dict[str, float]] = {}
    left_out: list[str] = []
    with progress_bar(len(places) * len(plan["lengths"]) * len(plan["passes"])) as bar:
        for length in plan["lengths"]:
            judges: dict[str, Any] = {}
            for place, backends in places.items():
                contenders = []
                for operator, order in plan["operators"]:
                    contenders += [
                        operator_on(place, backend, operator, order, form)
                        for backend in backends
                        for form in plan["forms"]
                    ]
                    contenders += peers_of(place, operator, order, plan["peers"])
                if "softmax" in plan["peers"]:
                    contenders.append(softmax_peer(place))
                group = Group(setting, place, length, contenders, judges)
                for what in plan["passes"]:
                    bar.now(f"{what} on {place}, T = {length}")
                    rows += group.measure(what)
                    bar.advance()
                best = rates.setdefault(str(place), {})
                best |= {name: max(rate, best.get(name, 0.0)) for name, rate in group.rates.items()}
                left_out += group.left_out
    if "fla" in plan["peers"] and any(operator == "linear_attention" for operator, _ in plan["operators"]):
        from hla.cli.flash_linear_attention import find_references

        left_out += filter(None, [find_references().reason])
    order = {name: i for i, name in enumerate(plan["passes"])}
    rows.sort(key=lambda row: order[row["pass"]])  # stable: otherwise as measured
    return {"rows": rows, "rates": rates, "left_out": left_out}


def _report(arguments: argparse.Namespace, found: dict[str, Any], idle: list[str]) -> Report:
    from hla.cli.machine import machine

    rows, rates = found["rows"], found["rates"]
    failed = [row for row in rows if not row["ok"]]
    compared = [row["error"] for row in rows if row["error"] is not None]
    lines = [
        f"{len(compared)} results compared with the float64 definition before timing, {len(failed)} of {len(rows)} "
        f"failed. Times are medians of up to {arguments.repeat} samples taken in turns.",
        *(f"FAILED: {row['name']}, {row['pass']}, T = {row['T']} on {row['arrays']}: {_why(row)}" for row in failed),
        *(
            f"float32 matmul of {place}, the ceiling: {r['batched'] / 1e9:.0f} Gflop/s in products of 64x64, "
            f"{r['large'] / 1e9:.0f} Gflop/s in one large product. Memory, the other one: {r['copy'] / 1e9:.0f} GB/s."
            for place, r in rates.items()
            if r
        ),
        *(f"Not run: {reason}" for reason in dict.fromkeys([*found["left_out"], *idle])),
    ]
    passes = list(dict.fromkeys(row["pass"] for row in rows))
    return Report(
        ok=not failed and bool(compared),
        rows=rows,
        checks=len(compared),
        worst_error=max(compared, default=None),
        tables=[_table(arguments, name, [row for row in rows if row["pass"] == name]) for name in passes],
        lines=lines,
        more={
            "heads": arguments.heads,
            "d": arguments.d,
            "dv": arguments.dv,
            "dtype": arguments.dtype,
            "matmul_flops_per_second": {
                place: {name: rate for name, rate in r.items() if name != "copy"} for place, r in rates.items()
            },
            "copy_bytes_per_second": {place: r["copy"] for place, r in rates.items() if r},
            "machine": machine(),
            "not_run": [*found["left_out"], *idle],
        },
    )


def _why(row: dict[str, Any]) -> str:
    return row["note"] or f"error {row['error']:.1e}, allowed {row['budget']:.1e}; not timed"


def _title(arguments: argparse.Namespace) -> str:
    return f"{arguments.heads} heads, d = {arguments.d}, dv = {arguments.dv}, {arguments.dtype}"


_HEADINGS = {"forward": "Forward", "backward": "Forward and backward", "decode": "Decode: one token after T - 1"}


def _table(arguments: argparse.Namespace, what: str, rows: list[dict[str, Any]]) -> Table:
    """Of one pass: how many times faster than each peer, and the share of the ceiling."""
    peers = {
        (r["arrays"], r["T"], r["kind"], r["operator_label"]): r["seconds"] for r in rows if r["kind"] != "operator"
    }

    def faster(row: dict[str, Any], kind: str) -> str:
        other = peers.get((row["arrays"], row["T"], kind, "softmax" if kind == "softmax" else row["operator_label"]))
        return f"{other / row['seconds']:.2f}" if other and row["kind"] == "operator" else ""

    lines: list[tuple[str, ...]] = []
    for row in rows:
        timed = row["seconds"] is not None
        memory = row["state_bytes"] if what == "decode" else row["peak_bytes"]
        lines.append(
            (
                row["arrays"],
                row["backend"] or "",
                row["name"],
                row["form"] or "",
                str(row["T"]),
                f"{row['seconds'] * 1e3:.3f}" if timed else "",
                f"{row['tokens_per_second']:,.0f}" if timed else "",
                *(faster(row, kind) if timed else "" for kind in ("softmax", "loop", "composition")),
                f"{row['flops_per_second'] / 1e9:.1f}" if timed else "",
                f"{row['share_of_matmul_rate']:.0%}" if timed else "",
                f"{row['share_of_copy_rate']:.0%}" if timed and row["share_of_copy_rate"] is not None else "",
                "" if memory is None else size_text(memory),
                ("" if row["error"] is None else f"{row['error']:.0e}") + ("" if row["ok"] else " WRONG"),
            )
        )
    columns = ("arrays", "backend", "what", "form", " T", " ms", " tokens/s", " softmax / it", " loop / it",
               " composed / it", " Gflop/s", " of matmul", " of memory",
               " state" if what == "decode" else " peak memory", " error")  # fmt: skip
    return Table(f"{_HEADINGS[what]}, {_title(arguments)}", columns, lines)

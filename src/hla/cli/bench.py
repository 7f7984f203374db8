"""`hla bench`: time and peak memory against softmax attention and a plain loop over tokens, side by side in one run."""

from __future__ import annotations

import argparse
import statistics
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hla.cli.report import Failure, Report, Table, pick_backends, progress_bar, require, size_text, split
from hla.errors import message

DEFAULT_OPERATORS = "linear_attention,hla2,ahla,hla3"
FIRST_TOKENS = 128
"""So many are compared with the dense definition; causal outputs do not depend on what follows."""


def add_parser(commands: Any, shared: argparse.ArgumentParser) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "bench",
        parents=[shared],
        help="speed and peak memory against softmax attention and a plain per-token loop",
        description="Times every operator on every backend next to causal softmax attention and a plain loop over "
        "tokens, in turns within one run. Every result is checked before it is timed.",
    )
    parser.add_argument("--operators", default=DEFAULT_OPERATORS, metavar="NAMES",
                        help="comma-separated; higher_order:N for order N (default: %(default)s)")  # fmt: skip
    parser.add_argument("--lengths", default="256,1024,4096", metavar="T,T,…", help="tokens (default: %(default)s)")
    parser.add_argument("--heads", type=_size, default=8, help="heads (default: %(default)s)")
    parser.add_argument("--d", type=_size, default=64, help="features of q and k (default: %(default)s)")
    parser.add_argument("--dv", type=_size, default=None, help="features of v (default: d)")
    parser.add_argument("--repeat", type=_size, default=5, help="rounds; the median counts (default: %(default)s)")
    parser.add_argument("--backend", metavar="NAMES", help="only these, comma-separated; default: all available")
    parser.add_argument("--plot", metavar="FILE", help="also draw time against T, e.g. to a .png or .svg file")
    parser.set_defaults(run=run)


def _size(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text!r}")
    return value


@dataclass(frozen=True)
class Runner:
    """Something to time: a name, and a function of (q, k, v)."""

    name: str
    kind: str
    """ "operator", "loop" or "softmax" """
    function: Callable[..., Any]
    operator: str
    order: int | None = None


def run(arguments: argparse.Namespace) -> Report:
    """Check, time and measure everything; optionally draw."""
    require("numpy", "rich", *(["matplotlib"] if arguments.plot else []))
    operators = [_operator(text) for text in split(arguments.operators)]
    lengths = sorted({_length(text) for text in split(arguments.lengths)})
    if not operators or not lengths:
        raise Failure(message("--operators and --lengths", "at least one each", "none", "Name some."))
    if arguments.plot:
        _check_plot(arguments.plot)
    arguments.dv = arguments.dv or arguments.d
    backends, absent = pick_backends(arguments.backend)
    from hla.testing.libraries import home

    places = {name: place for name in backends if (place := home(name)) is not None}
    if not places:
        raise Failure("no backend takes the arrays of an installed library", code=1)
    rows: list[dict[str, Any]] = []
    rates: dict[str, float] = {}
    with progress_bar(len(places) * len(lengths)) as bar:
        for backend, place in places.items():
            for length in lengths:
                bar.now(f"{backend} on {place}, T = {length}")
                found, rate = _measure(backend, place, operators, length, arguments)
                rows += found
                rates[backend] = max(rate, rates.get(backend, 0.0))
                bar.advance()
    if arguments.plot:
        _plot(rows, arguments)
    failed = [row for row in rows if not row["ok"]]
    compared = [row["error"] for row in rows if row["error"] is not None]
    lines = [
        f"{len(compared)} results compared with the definition and a float64 loop before timing, {len(failed)} failed.",
        *(f"float32 matmul of {b} on {places[b]}, the ceiling: {r / 1e9:.0f} Gflop/s." for b, r in rates.items()),
        *(f"Not run: {reason}" for reason in absent),
        *([f"Picture: {arguments.plot}"] if arguments.plot else []),
    ]
    return Report(
        ok=not failed and bool(compared),
        rows=rows,
        checks=len(compared),
        worst_error=max(compared, default=None),
        tables=[_table(rows, arguments)],
        lines=lines,
        more={"heads": arguments.heads, "d": arguments.d, "dv": arguments.dv, "matmul_flops_per_second": rates},
    )


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


def _check_plot(file: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    known = Figure().canvas.get_supported_filetypes()
    path = Path(file)
    if path.suffix.lstrip(".") not in known:
        raise Failure(message("--plot", f"a file named .{', .'.join(sorted(known))}", file, "Change its ending."))
    if not path.absolute().parent.is_dir() or path.is_dir():
        raise Failure(message("--plot", "a file in a folder that exists", file, "Create the folder."))


def _runners(backend: str, place: Any, operators: list[tuple[str, int | None]]) -> list[Runner]:
    import hla
    from hla.cli.baselines import LOOPS, softmax_attention, token_loop

    runners = []
    for operator, order in operators:
        named = {} if order is None else {"order": order}
        label = operator if order is None else f"{operator}:{order}"

        def call(q: Any, k: Any, v: Any, operator: str = operator, named: dict[str, Any] = named) -> Any:
            return getattr(hla, operator)(q, k, v, backend=backend, **named)

        runners.append(Runner(label, "operator", place.compiled(call), operator, order))
        if operator in LOOPS:
            runners.append(Runner(f"{label}, loop", "loop", token_loop(place, operator), operator, order))
    return [*runners, Runner("softmax", "softmax", softmax_attention(place), "softmax")]


def _measure(
    backend: str,
    place: Any,
    operators: list[tuple[str, int | None]],
    length: int,
    arguments: argparse.Namespace,
) -> tuple[list[dict[str, Any]], float]:
    """One backend at one length: check all, then time all in turns, then memory without a clock.

    Returns the rows, and the rate of matrix products in the same rounds.
    """
    import hla
    from hla.cli.baselines import MATMUL_FLOPS, matmul
    from hla.testing.inputs import make_inputs

    sizes: dict[str, Any] = {"T": length, "d": arguments.d, "dv": arguments.dv, "batch": (arguments.heads,)}
    inputs = make_inputs(place.xp, device=place.device, **sizes)
    runners = _runners(backend, place, operators)
    plans = {
        r.name: hla.explain(r.operator, *inputs, backend=backend, order=r.order)
        for r in runners
        if r.kind == "operator"
    }
    judged = {runner.name: _judge(runner, inputs) for runner in runners}
    ceiling = matmul(place)
    contenders = [(runner.name, runner.function) for runner in runners] + [("matmul", lambda q, k, v: ceiling())]
    times: dict[str, list[float]] = {name: [] for name, _ in contenders}
    for _ in range(arguments.repeat):
        for name, function in contenders:
            start = time.perf_counter()
            place.wait(function(*inputs))
            times[name].append(time.perf_counter() - start)
    rate = MATMUL_FLOPS / statistics.median(times["matmul"])
    rows = []
    for runner in runners:
        seconds = statistics.median(times[runner.name])
        error, budget = judged[runner.name]
        plan = plans.get(runner.name)
        flops = _flops(runner, length, arguments)
        rows.append(
            {
                "name": runner.name,
                "kind": runner.kind,
                "operator": runner.operator,
                "order": runner.order,
                "backend": plan.backend if plan else None,
                "form": plan.form if plan else None,
                "beside": backend,
                "arrays": str(place),
                "T": length,
                "seconds": seconds,
                "fastest": min(times[runner.name]),
                "tokens_per_second": length / seconds,
                "flops_per_second": flops / seconds,
                "share_of_matmul_rate": flops / seconds / rate,
                "peak_bytes": _peak(place, runner, inputs),
                "error": error,
                "budget": budget,
                "ok": error <= budget and (plan is None or plan.backend == backend),
            }
        )
    return rows, rate


def _flops(runner: Runner, length: int, arguments: argparse.Namespace) -> int:
    """The least that has to be computed: the recurrence, whatever a form adds to it; half of all pairs of softmax."""
    import hla

    if runner.kind == "softmax":
        return int(length * length * (arguments.d + arguments.dv) * arguments.heads)
    sizes = {"T": length, "d": arguments.d, "dv": arguments.dv, "heads": arguments.heads}
    return hla.cost(runner.operator, **sizes, form="recurrent", order=runner.order).flops


def _judge(runner: Runner, inputs: Any) -> tuple[float, float]:
    """(error, budget): the first tokens against the dense definition, then one head against a float64 loop."""
    from hla.cli.baselines import LOOPS, blocked_softmax, token_loop
    from hla.testing.budgets import error_budget, per_token_error
    from hla.testing.expected import expected
    from hla.testing.inputs import Inputs
    from hla.testing.libraries import Placement, to_numpy

    o = to_numpy(runner.function(*inputs))
    host = Inputs(*(to_numpy(x) for x in inputs))
    first = min(FIRST_TOKENS, o.shape[-2])
    head = Inputs(*(x[:1] for x in host))
    length, d, dv = o.shape[-2], host.q.shape[-1], o.shape[-1]
    if runner.kind == "softmax":
        # One read with weights of sum 1, and an exponential: the budget of one normalised read.
        budget = error_budget("linear_attention", "float32", length, d, dv=dv, normalize=True, values=o.size)
        import numpy as np

        return max(
            per_token_error(o[:, :first], _dense_softmax(*(x[:, :first] for x in host))),
            per_token_error(o[:1], blocked_softmax(np, *head)),
        ), budget
    budget = error_budget(runner.operator, "float32", length, d, dv=dv, order=runner.order, values=o.size)
    error = per_token_error(o[:, :first], expected(runner.operator, *(x[:, :first] for x in host), order=runner.order))
    if runner.operator in LOOPS:
        error = max(error, per_token_error(o[:1], token_loop(Placement("numpy"), runner.operator)(*head)))
    return error, budget


def _dense_softmax(q: Any, k: Any, v: Any) -> Any:
    import numpy as np

    scores = q @ k.swapaxes(-1, -2) * q.shape[-1] ** -0.5
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True)) * np.tri(q.shape[-2])
    return weights / weights.sum(axis=-1, keepdims=True) @ v


def _peak(place: Any, runner: Runner, inputs: Any) -> int | None:
    """Peak memory of one call, its output included; None where the library does not tell."""
    if place.library == "numpy":
        tracemalloc.start()
        try:
            runner.function(*inputs)
            return int(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    if place.library == "torch" and place.device.type == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        place.wait(runner.function(*inputs))
        return int(torch.cuda.max_memory_allocated() - before)
    return None


def _table(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> Table:
    softmax = {(row["beside"], row["T"]): row["seconds"] for row in rows if row["kind"] == "softmax"}
    loops = {(row["beside"], row["T"], row["operator"]): row["seconds"] for row in rows if row["kind"] == "loop"}
    lines: list[tuple[str, ...]] = []
    for row in rows:
        loop = loops.get((row["beside"], row["T"], row["operator"]))
        faster = row["kind"] == "operator"
        lines.append(
            (
                row["beside"],
                row["name"],
                row["form"] or "",
                str(row["T"]),
                f"{row['seconds'] * 1e3:.2f}",
                f"{row['tokens_per_second']:,.0f}",
                f"{softmax[row['beside'], row['T']] / row['seconds']:.2f}" if faster else "",
                f"{loop / row['seconds']:.1f}" if faster and loop else "",
                f"{row['share_of_matmul_rate']:.0%}",
                "" if row["peak_bytes"] is None else size_text(row["peak_bytes"]),
                f"{row['error']:.1e}" + ("" if row["ok"] else " WRONG"),
            )
        )
    columns = ("backend", "what", "form", " T", " ms", " tokens/s", " softmax / it", " loop / it", " of matmul rate",
               " peak memory", " error")  # fmt: skip
    return Table(f"{arguments.heads} heads, d = {arguments.d}, dv = {arguments.dv}, float32", columns, lines)


def _plot(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    """Time against T on logarithmic axes: operators in full lines, what they are compared with dashed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5.5), layout="constrained")
    axes = figure.subplots()
    markers = "osD^vP*X"
    backends = sorted({row["beside"] for row in rows})
    names = sorted({row["name"].removesuffix(", loop") for row in rows})
    for backend in backends:
        for name in dict.fromkeys(row["name"] for row in rows if row["beside"] == backend):
            points = [row for row in rows if row["beside"] == backend and row["name"] == name]
            plain = name.removesuffix(", loop")
            style = "-" if points[0]["kind"] == "operator" else ":" if points[0]["kind"] == "loop" else "--"
            axes.plot(
                [row["T"] for row in points],
                [row["seconds"] for row in points],
                style,
                color="black" if plain == "softmax" else f"C{names.index(plain)}",
                marker=markers[backends.index(backend) % len(markers)],
                markersize=4,
                label=f"{name} ({backend})",
            )
    axes.set(xscale="log", yscale="log", xlabel="T, tokens", ylabel="seconds a call",
             title=f"{arguments.heads} heads, d = {arguments.d}, dv = {arguments.dv}, float32")  # fmt: skip
    axes.set_xticks(sorted({row["T"] for row in rows}), [str(t) for t in sorted({row["T"] for row in rows})])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7, ncols=2)
    figure.savefig(arguments.plot)

"""`hla demo [FILE]`: real text through every operator on every backend, and what can be relied on when it is streamed.

Two arrangements of the same bytes, so that every byte meets the dense definition:

- documents of 256 bytes as a batch, without decay: every form against the definition, all bytes;
- one stream over the whole text with a decay per head, its state carried through all of it, in pieces and then token
  by token: against the one call over everything, and against the definition on windows. With γ ≤ 0.97 what lies more
  than 768 tokens back weighs less than 10⁻¹⁰, so a window of 1024 tokens gives its last 256 outputs.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from typing import Any

from hla.cli.report import Bar, Failure, Report, Table, pick_backends, progress_bar, require, size_text
from hla.cli.text import embed, read_text
from hla.cli.threads import use_one_thread

BYTES = 65_536
HEADS, FEATURES, VALUES = 2, 16, 16
DECAYS = (0.97, 0.9)
DOCUMENT = 256
HISTORY, COMPARED, WINDOWS = 768, 256, 12
PIECE, DECODED = 4096, 64
OPERATORS: tuple[tuple[str, int | None], ...] = (
    ("linear_attention", None),
    ("hla2", None),
    ("ahla", None),
    ("hla3", None),
    ("higher_order", 4),
)
FORMS = ("chunkwise", "recurrent", "scan", "parallel")


def add_parser(commands: Any, shared: argparse.ArgumentParser) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "demo",
        parents=[shared],
        help="stream real text through every operator and backend, and compare",
        description="Streams text through every operator on every backend: all forms agree with the definition, "
        "prefill and decode equal the whole, and the state stays small. Without FILE: English text that comes "
        "with Python.",
    )
    parser.add_argument("file", nargs="?", metavar="FILE", help="a UTF-8 text file")
    parser.add_argument("--bytes", type=int, default=BYTES, metavar="N", help="how much of it (default: %(default)s)")
    parser.add_argument("--backend", metavar="NAMES", help="only these, comma-separated; default: all available")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> Report:
    """Read, embed, stream, compare, report."""
    if arguments.bytes < 1:
        raise Failure(
            f"--bytes: expected an integer of at least 1, got {arguments.bytes}. Pass how many bytes to stream."
        )
    text = read_text(arguments.file)
    data = text.data[: arguments.bytes]
    require("numpy", "rich")
    use_one_thread()
    backends, absent = pick_backends(arguments.backend)
    from hla.testing.libraries import home

    places = {name: place for name in backends if (place := home(name)) is not None}
    if not places:
        raise Failure("no backend takes the arrays of an installed library", code=1)
    streams = embed(data, HEADS, FEATURES, VALUES)
    rows: list[dict[str, Any]] = []
    with progress_bar(len(OPERATORS) * (1 + len(places))) as bar:
        for operator, order in OPERATORS:
            name = operator if order is None else f"{operator}, order {order}"
            bar.now(f"{name}: the definition in float64")
            judge = _Judge(operator, order, streams)
            bar.advance()
            for backend, place in places.items():
                rows.append(_stream(_Subject(backend, place, operator, order), streams, judge, bar))
                bar.advance()
    checks = sum(row["checks"] for row in rows)
    values = sum(row["values"] for row in rows)
    ok = all(row["ok"] for row in rows)
    worst = max(row["worst_error"] for row in rows)
    kept = len(data)
    lines = [
        f"{kept:,} bytes of {text.source}, {HEADS} heads, d = {FEATURES}, dv = {VALUES}, float32, one thread.",
        f"{values:,} values compared in {checks} comparisons, largest error per token {worst:.1e}: "
        + ("all within the budget that float32 allows." if ok else "NOT all within the budget that float32 allows."),
        *(f"FAILED: {row['operator']} on {row['backend']}: {'; '.join(row['notes'])}" for row in rows if not row["ok"]),
        *(f"Not run: {reason}" for reason in absent),
    ]
    return Report(
        ok=ok and checks > 0,
        rows=rows,
        checks=checks,
        worst_error=worst,
        tables=[_agreement(rows), _costs(rows)],
        lines=lines,
        more={"values": values, "source": text.source, "bytes": kept, "not_run": absent},
    )


class _Judge:
    """What the definition gives in float64: for all documents, and for windows of the stream."""

    def __init__(self, operator: str, order: int | None, streams: Any) -> None:
        import numpy as np

        from hla.testing.expected import expected

        self.documents = []
        for piece in documents(streams):
            parts = [
                expected(operator, *(x[start : start + 32] for x in piece), order=order)
                for start in range(0, len(piece[0]), 32)
            ]
            self.documents.append(np.concatenate(parts))
        length = streams.q.shape[-2]
        self.windows: list[tuple[int, int, Any]] = []
        """(first token compared, past the last one, the definition's output)"""
        for start, stop in windows(length):
            first = 0 if start == 0 else start + HISTORY
            whole = expected(operator, *(x[:, start:stop] for x in streams), order=order, decay=np.array(DECAYS))
            self.windows.append((first, stop, whole[:, first - start :]))


def documents(streams: Any) -> list[tuple[Any, Any, Any]]:
    """The stream cut into documents as a batch, (n, H, 256, ·); what is left at the end is a batch of one."""
    length = streams.q.shape[-2]
    full = length // DOCUMENT * DOCUMENT

    def cut(x: Any, start: int, stop: int, size: int) -> Any:
        import numpy as np

        pieces = x[:, start:stop].reshape(x.shape[0], -1, size, x.shape[-1])
        return np.ascontiguousarray(np.moveaxis(pieces, 0, 1))

    found = []
    for start, stop, size in ((0, full, DOCUMENT), (full, length, length - full)):
        if stop > start:
            q, k, v = (cut(x, start, stop, size) for x in streams)
            found.append((q, k, v))
    return found


def windows(length: int) -> list[tuple[int, int]]:
    """Windows over the stream, evenly spread from its start to its end."""
    size = HISTORY + COMPARED
    if length <= size:
        return [(0, length)]
    count = min(WINDOWS, -(-length // size))
    starts = {round(i * (length - size) / max(count - 1, 1)) for i in range(count)}
    return [(start, start + size) for start in sorted(starts)]


@dataclass(frozen=True)
class _Subject:
    """An operator on a backend."""

    backend: str
    place: Any
    operator: str
    order: int | None

    @property
    def named(self) -> dict[str, Any]:
        return {} if self.order is None else {"order": self.order}

    def send(self, arrays: Any) -> tuple[Any, ...]:
        from hla.testing.inputs import to_library

        return tuple(to_library(self.place.xp, x, "float32", self.place.device) for x in arrays)

    def supports(self, form: str, inputs: tuple[Any, ...]) -> str:
        """ "" where the form is to be run, else why not; the backend has to be the one that runs."""
        import hla

        try:
            plan = hla.explain(self.operator, *inputs, form=form, backend=self.backend, **self.named)
        except hla.BackendUnsupportedError as error:
            return str(error)
        if (plan.backend, plan.form) != (self.backend, form):
            raise AssertionError(f"{plan.backend} would run {plan.form}, not {self.backend} {form}")
        return ""

    def function(self, **options: Any) -> Any:
        """The operator as a function of (q, k, v, state), compiled where the library compiles."""
        import hla

        def call(q: Any, k: Any, v: Any, state: Any = None) -> Any:
            operator = getattr(hla, self.operator)
            return operator(q, k, v, backend=self.backend, initial_state=state, **self.named, **options)

        return self.place.compiled(call)

    def stepper(self, **options: Any) -> Any:
        """`hla.step` as a function of (state, q_t, k_t, v_t)."""
        import hla

        def call(state: Any, q: Any, k: Any, v: Any) -> Any:
            return hla.step(state, q, k, v, backend=self.backend, **self.named, **options)

        return self.place.compiled(call)


class _Tally:
    """Errors against budgets, and how many values went into them."""

    def __init__(self, budget: float) -> None:
        self.budget = budget
        self.checks, self.values, self.worst = 0, 0, 0.0
        self.notes: list[str] = []

    def compare(self, what: str, got: Any, want: Any, times: float = 1.0) -> float:
        """Add a comparison; `times` budgets are allowed where both sides have rounding errors."""
        from hla.testing.budgets import per_token_error

        error = per_token_error(got, want)
        self.checks += 1
        self.values += want.size
        self.worst = max(self.worst, error)
        if not error <= times * self.budget:
            self.notes.append(f"{what}: error {error:.1e}, allowed {times * self.budget:.1e}")
        return error


def _stream(subject: _Subject, streams: Any, judge: _Judge, bar: Bar) -> dict[str, Any]:
    """All comparisons of one operator on one backend."""
    from hla.testing.budgets import error_budget

    # A stream forgets what is further back than its windows reach, so those bound the sums of both arrangements.
    budget = error_budget(subject.operator, "float32", HISTORY + COMPARED, FEATURES, dv=VALUES, order=subject.order,
                          values=streams.v.size)  # fmt: skip
    tally = _Tally(budget)
    row: dict[str, Any] = {
        "operator": subject.operator,
        "order": subject.order,
        "backend": subject.backend,
        "arrays": str(subject.place),
        "budget": budget,
    }
    try:
        row |= _run_documents(subject, streams, judge, tally, bar) | _run_stream(subject, streams, judge, tally, bar)
    except Exception as error:  # the other backends and operators still have something to show
        tally.notes.append(f"{type(error).__name__}: {error}")
    return {
        **row,
        "checks": tally.checks,
        "values": tally.values,
        "worst_error": tally.worst,
        "ok": not tally.notes and tally.checks > 0,
        "notes": tally.notes,
    }


def _run_documents(subject: _Subject, streams: Any, judge: _Judge, tally: _Tally, bar: Bar) -> dict[str, Any]:
    """Every form on the documents, against the definition and each other."""
    from hla.testing.libraries import to_numpy

    outputs: dict[str, list[Any]] = {}
    forms: dict[str, Any] = {}
    for form in FORMS:
        call = subject.function(form=form)
        for piece, want in zip(documents(streams), judge.documents, strict=True):
            inputs = subject.send(piece)
            refusal = subject.supports(form, inputs)
            if refusal:
                forms[form] = None
                break
            bar.now(f"{subject.operator} on {subject.backend}: documents, {form}")
            o = to_numpy(subject.place.wait(call(*inputs)))
            outputs.setdefault(form, []).append(o)
            error = tally.compare(f"documents, {form}", o, want)
            forms[form] = max(error, forms.get(form) or 0.0)
    between = None
    if "chunkwise" in outputs and "recurrent" in outputs:
        pairs = zip(outputs["chunkwise"], outputs["recurrent"], strict=True)
        between = max(tally.compare("chunkwise against recurrent", a, b, 2.0) for a, b in pairs)
    return {"forms": forms, "chunkwise_recurrent": between}


def _run_stream(subject: _Subject, streams: Any, judge: _Judge, tally: _Tally, bar: Bar) -> dict[str, Any]:
    """One state through the whole text: pieces, then single tokens; against one call, and the definition on windows."""
    import numpy as np

    import hla
    from hla.testing.libraries import to_numpy

    length = streams.q.shape[-2]
    decay = np.array(DECAYS, dtype=np.float32)
    inputs = subject.send(streams)
    bar.now(f"{subject.operator} on {subject.backend}: {length:,} tokens in one call")
    whole = to_numpy(subject.place.wait(subject.function(form="chunkwise", decay=decay)(*inputs)))
    bar.now(f"{subject.operator} on {subject.backend}: {length:,} tokens as a stream")
    prefilled = max(length - DECODED, 0)
    call = subject.function(form="chunkwise", decay=decay, return_state=True)
    state = hla.init_state(subject.operator, batch=(HEADS,), d=FEATURES, dv=VALUES, like=inputs[0], **subject.named)
    empty = state
    pieces = [(start, min(start + PIECE, prefilled)) for start in range(0, prefilled, PIECE)]
    cut = {piece: tuple(x[:, piece[0] : piece[1]] for x in inputs) for piece in pieces}
    for piece in pieces[:1] + pieces[-1:]:  # what compiles, compiles before the clock runs
        subject.place.wait(call(*cut[piece], empty))
    outputs = []
    start = time.perf_counter()
    for piece in pieces:
        o, state = call(*cut[piece], state)
        outputs.append(o)
    subject.place.wait((outputs, state))
    prefill_seconds = time.perf_counter() - start
    step = subject.stepper(decay=decay)
    tokens = [tuple(x[:, t] for x in inputs) for t in range(prefilled, length)]
    subject.place.wait(step(state, *tokens[0]))
    decoded = []
    start = time.perf_counter()
    for token in tokens:
        o, state = step(state, *token)
        decoded.append(o)
    subject.place.wait((decoded, state))
    decode_seconds = time.perf_counter() - start
    streamed = np.concatenate([*map(to_numpy, outputs), *(to_numpy(o)[:, None] for o in decoded)], axis=1)
    split = tally.compare("stream against one call", streamed, whole, 2.0)
    window = max(
        max(
            tally.compare("stream, window", streamed[:, a:b], want),
            tally.compare("one call, window", whole[:, a:b], want),
        )
        for a, b, want in judge.windows
    )
    return {
        "stream_whole": split,
        "stream_definition": window,
        "prefill_tokens_per_second": prefilled / prefill_seconds if pieces else None,
        "decode_tokens_per_second": len(tokens) / decode_seconds,
        "state_bytes": sum(int(to_numpy(x).size) * 4 for x in state),
        "kv_cache_bytes": hla.cost(
            subject.operator, T=length, d=FEATURES, dv=VALUES, heads=HEADS, **subject.named
        ).kv_cache_bytes,
    }


def _label(row: dict[str, Any]) -> str:
    return row["operator"] if row["order"] is None else f"order {row['order']}"


def _error(value: float | None) -> str:
    return "" if value is None else f"{value:.0e}"


def _agreement(rows: list[dict[str, Any]]) -> Table:
    lines = [
        (
            row["backend"],
            _label(row),
            *(_error(row.get("forms", {}).get(form)) for form in FORMS),
            _error(row.get("chunkwise_recurrent")),
            _error(row.get("stream_definition")),
            _error(row.get("stream_whole")),
            f"{row['budget']:.0e}",
            f"{row['values']:,}",
            "yes" if row["ok"] else "NO",
        )
        for row in rows
    ]
    columns = ("backend", "operator", *(f" {form}" for form in FORMS), " chunkwise / recurrent", " stream",
               " prefill + decode / whole", " allowed", " values", "ok")  # fmt: skip
    return Table("Largest error per token against the float64 definition (with /: between two results)", columns, lines)


def _costs(rows: list[dict[str, Any]]) -> Table:
    lines: list[tuple[str, ...]] = [
        (
            row["backend"],
            _label(row),
            f"{row['prefill_tokens_per_second']:,.0f}" if row["prefill_tokens_per_second"] else "",
            f"{row['decode_tokens_per_second']:,.0f}",
            size_text(row["state_bytes"]),
            size_text(row["kv_cache_bytes"]),
            f"{row['kv_cache_bytes'] / row['state_bytes']:,.0f}",
        )
        for row in rows
        if "state_bytes" in row
    ]
    columns = (
        "backend",
        "operator",
        " prefill tokens/s",
        " decode tokens/s",
        " state",
        " key-value cache",
        " times smaller",
    )
    return Table("The stream: one state through the whole text", columns, lines)

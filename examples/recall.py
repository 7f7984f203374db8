"""Recall from a state of constant size: the operators against softmax attention, everything else equal.

    python examples/recall.py                                   # three tasks, five mixers: minutes on two cores
    python examples/recall.py --task mqar:16:48 --decay none --steps 2000 --out runs/longer
    python examples/recall.py --full --out runs/recall-full     # more of everything: a day or two on them

Tasks are NAME:ITEMS:LENGTH. mqar: ITEMS pairs of a key and a value, then keys alone; the answer is the key's value.
induction: random tokens, ITEMS different ones; the answer is what followed the token when it came last. copy: ITEMS
tokens among blanks, then ITEMS marks; the answers are the tokens in their order.

All mixers have the same projections, convolution, norms, gate, decay, MLP, initial parameters and batches. Each gets
its best learning rate by the validation data. Where softmax, the control, stays below --control, the whole comparison
is marked INVALID and the exit status is 1. Finished cells are kept: the same command continues where another one ended.

It needs `pip install ".[torch,cli]"`; without rich there is no progress bar, without matplotlib no picture.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

import hla
from hla.errors import OptionError
from hla.models import Decoder, ModelConfig
from hla.nn.torch import HigherOrderAttention, HigherOrderOperator

MIXERS = ("softmax", "linear_attention", "hla2", "ahla", "hla3")
DECAYS = ("none", "forget_gate")
SHORT = {
    "task": "mqar:8:24,induction:10:30,copy:6:24",
    "heads": "2",
    "decay": "forget_gate",
    "lr": "0.005,0.015",
    "seeds": 3,
    "steps": 400,
}
FULL = {
    "task": "mqar:8:24,mqar:16:48,mqar:32:96,induction:10:30,induction:20:80,copy:6:24,copy:12:48",
    "heads": "2,4",
    "decay": "none,forget_gate",
    "lr": "0.003,0.01,0.03",
    "seeds": 5,
    "steps": 2000,
}
IGNORED = -100
"""the label of a place without an answer"""
VALIDATION, TEST = (1, 256), (2, 1024)
"""seed and rows of the data that choose the learning rate, and of those in the table; training has seeds above"""


# --- tasks: (items, length, rows, generator) → tokens and labels, both (rows, length) --------------------------------


def mqar(items: int, length: int, rows: int, dice: torch.Generator) -> tuple[Tensor, Tensor]:
    """Multi-query associative recall: pairs of different keys and any values, then different ones of these keys."""
    kinds = 2 * items
    keys = torch.rand(rows, kinds, generator=dice).argsort(1)[:, :items]
    values = kinds + torch.randint(kinds, (rows, items), generator=dice)
    asked = torch.rand(rows, items, generator=dice).argsort(1)[:, : length - 2 * items]
    tokens = torch.cat([torch.stack([keys, values], 2).flatten(1), keys.gather(1, asked)], 1)
    labels = torch.full_like(tokens, IGNORED)
    labels[:, 2 * items :] = values.gather(1, asked)
    return tokens, labels


def induction(items: int, length: int, rows: int, dice: torch.Generator) -> tuple[Tensor, Tensor]:
    """Induction heads: any tokens; where a token was there before, the one that followed it the last time."""
    tokens = torch.randint(items, (rows, length), generator=dice)
    before = (tokens[:, :, None] == tokens[:, None, :]).tril(-1)
    last = torch.where(before, torch.arange(length), -1).amax(2)
    return tokens, torch.where(last < 0, IGNORED, tokens.gather(1, last + 1))


def copy(items: int, length: int, rows: int, dice: torch.Generator) -> tuple[Tensor, Tensor]:
    """Selective copying: any tokens at any places among blanks, then marks at which to repeat them in order."""
    kinds, seen = 16, length - items
    places = torch.rand(rows, seen, generator=dice).argsort(1)[:, :items].sort(1).values
    content = torch.randint(kinds, (rows, items), generator=dice)
    tokens = torch.full((rows, length), kinds).scatter_(1, places, content)
    tokens[:, seen:] = kinds + 1
    labels = torch.full_like(tokens, IGNORED)
    labels[:, seen:] = content
    return tokens, labels


class Task(NamedTuple):
    """How to make rows; how many different tokens and answers there are; which lengths are possible."""

    make: Callable[[int, int, int, torch.Generator], tuple[Tensor, Tensor]]
    vocabulary: Callable[[int], int]
    answers: Callable[[int], int]
    lengths: Callable[[int], range]


TASKS = {
    "mqar": Task(mqar, lambda n: 4 * n, lambda n: 2 * n, lambda n: range(2 * n + 1, 3 * n + 1)),
    "induction": Task(induction, lambda n: n, lambda n: n, lambda n: range(n + 2, 1 << 20)),
    "copy": Task(copy, lambda n: 18, lambda n: 16, lambda n: range(2 * n, 1 << 20)),
}


def one_answer(labels: Tensor) -> float:
    """The accuracy of the best single answer for each row: of who knows what occurred, but not where."""
    found = labels != IGNORED
    counts = torch.stack([(labels == x).sum(1) for x in range(int(labels.max()) + 1)], 1)
    return float(counts.amax(1).sum() / found.sum())


# --- models ----------------------------------------------------------------------------------------------------------


class SoftmaxOperator(HigherOrderOperator):
    """Causal softmax attention in the place of a layer's operator; log decays are added to the logits of later queries.

    For training only: it has no state.
    """

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: Any = None,
        return_state: bool = False,
        *,
        log_decay: Tensor | None = None,
        axis: int = -2,
        **others: Any,
    ) -> Tensor:
        """q, k, v with time at `axis` → o, softmax(scale · q·k + Σ log_decay of the tokens after the key) v."""
        if return_state or any(x is not None for x in (state, *others.values())):
            raise OptionError("SoftmaxOperator takes whole sequences and log_decay only")
        q, k, v = (x.movedim(axis, -2) for x in (q, k, v))
        length = q.shape[-2]
        bias = torch.full((length, length), -torch.inf, device=q.device).triu(1)
        if log_decay is not None:
            total = log_decay.float().cumsum(-1)
            bias = bias + (total[..., :, None] - total[..., None, :])
        logits = self.options.scale * (q @ k.mT).float() + bias
        return (logits.softmax(-1).to(v.dtype) @ v).movedim(-2, axis)


@dataclass(frozen=True)
class Cell:
    """One model in training: all that its result depends on."""

    task: str
    items: int
    length: int
    width: int
    layers: int
    heads: int
    decay: str
    mixer: str
    steps: int
    batch: int
    lr: float
    seed: int
    device: str
    precision: str
    versions: str

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.task}:{self.items}:{self.length} {self.mixer}, learning rate {self.lr:g}, seed {self.seed}"


def build(cell: Cell) -> Decoder:
    """The cell's model. Softmax takes the operator's place in a model that is otherwise that of the operators."""
    torch.manual_seed(cell.seed)
    operator = "linear_attention" if cell.mixer == "softmax" else cell.mixer
    decay = None if cell.decay == "none" else cell.decay
    model = Decoder(
        ModelConfig(
            TASKS[cell.task].vocabulary(cell.items),
            cell.width,
            cell.layers,
            cell.heads,
            layers=operator,
            hidden_size=cell.width,
            attention={"decay": decay},
        )
    )
    if cell.mixer == "softmax":
        for layer in attentions(model):
            layer.operators[0] = SoftmaxOperator(scale=layer.options.scale)
    return model


def attentions(model: Decoder) -> list[HigherOrderAttention]:
    """The attention of every block."""
    return [x for x in model.modules() if isinstance(x, HigherOrderAttention)]


def kept(model: Decoder, cell: Cell) -> int:
    """Numbers that the operators remember after the last token; for softmax all keys and values."""
    if cell.mixer == "softmax":
        return 2 * cell.layers * cell.width * cell.length
    states = [layer.init_state(1).operators for layer in attentions(model)]
    return sum(x.numel() for operators in states for state in operators for x in state)


def rate(cell: Cell, step: int) -> float:
    """The learning rate of a step: up in a line for a tenth of the steps, down to 0 by a cosine."""
    warmup = max(1, cell.steps // 10)
    if step < warmup:
        return cell.lr * (step + 1) / warmup
    return cell.lr * (0.5 + 0.5 * math.cos(math.pi * (step - warmup) / (cell.steps - warmup)))


def predict(model: Decoder, tokens: Tensor, cell: Cell) -> Tensor:
    """Logits in float32."""
    low = cell.precision == "bfloat16"
    with torch.autocast(cell.device, torch.bfloat16, enabled=low):
        logits: Tensor = model(tokens)
    return logits.float()


@torch.no_grad()
def accuracy(model: Decoder, cell: Cell, seed: int, rows: int) -> float:
    """The share of right answers in rows of this seed."""
    tokens, labels = TASKS[cell.task].make(cell.items, cell.length, rows, torch.Generator().manual_seed(seed))
    answers = torch.cat([predict(model, x.to(cell.device), cell).argmax(-1).cpu() for x in torch.split(tokens, 256)])
    return float((answers == labels).sum() / (labels != IGNORED).sum())


def train(cell: Cell) -> dict[str, Any]:
    """Train one model; its description with what came out."""
    began = time.perf_counter()
    model = build(cell).to(cell.device)
    dice = torch.Generator().manual_seed(1000 + cell.seed)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=cell.lr, betas=(0.9, 0.95))
    loss = torch.zeros(())
    for step in range(cell.steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(cell, step)
        tokens, labels = TASKS[cell.task].make(cell.items, cell.length, cell.batch, dice)
        logits = predict(model, tokens.to(cell.device), cell)
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten().to(cell.device), ignore_index=IGNORED)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    finite = math.isfinite(loss.item())
    return {
        **asdict(cell),
        "loss": loss.item() if finite else None,
        "validation": accuracy(model, cell, *VALIDATION) if finite else 0.0,
        "test": accuracy(model, cell, *TEST) if finite else 0.0,
        "parameters": sum(p.numel() for p in model.parameters()),
        "kept": kept(model, cell),
        "seconds": time.perf_counter() - began,
    }


# --- the grid --------------------------------------------------------------------------------------------------------


def arguments(words: list[str] | None) -> argparse.Namespace:
    """The command line."""
    summary, details = (__doc__ or "").split("\n", 1)
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("runs/recall"), help="folder of all results (%(default)s)")
    add("--full", action="store_true", help="the large grid")

    def grid(name: str, kind: Any, meaning: str) -> None:
        add(f"--{name}", type=kind, help=f"{meaning} ({SHORT[name]}; with --full {FULL[name]})")

    grid("task", str, "NAME:ITEMS:LENGTH, or several with commas between")
    grid("heads", str, "heads of each block, likewise: a head has width/heads features")
    grid("decay", str, "none, forget_gate, or both")
    grid("lr", str, "peaks of the learning rate")
    grid("seeds", positive, "seeds of parameters and batches")
    grid("steps", positive, "steps of the optimizer")
    add("--mixer", default=",".join(MIXERS), help="likewise (%(default)s)")
    for name, default, meaning in (
        ("width", 32, "features of the residual stream, and inside the MLPs"),
        ("layers", 2, "blocks"),
        ("batch", 64, "rows of a batch"),
        ("threads", torch.get_num_threads(), "of the CPU: so many cells at once, each on one"),
    ):
        add(f"--{name}", type=positive, default=default, help=f"{meaning} (%(default)s)")
    add("--control", type=float, default=0.95, help="what softmax has to reach (%(default)s)")
    gpu = torch.cuda.is_available()
    add("--device", choices=("cpu", "cuda"), default="cuda" if gpu else "cpu", help="(%(default)s)")
    add("--precision", choices=("float32", "bfloat16"), help="bfloat16 is autocast, and the default on cuda")
    found = parser.parse_args(words)
    for name, value in (FULL if found.full else SHORT).items():
        if getattr(found, name) is None:
            setattr(found, name, value)
    found.precision = found.precision or ("bfloat16" if found.device == "cuda" else "float32")
    return found


def positive(word: str) -> int:
    """A number ≥ 1."""
    if int(word) < 1:
        raise argparse.ArgumentTypeError(f"{word} is not at least 1")
    return int(word)


def read_task(word: str) -> tuple[str, int, int]:
    """NAME:ITEMS:LENGTH."""
    name, *sizes = word.split(":")
    if name not in TASKS or len(sizes) != 2 or not all(x.isdecimal() and int(x) > 0 for x in sizes):
        raise SystemExit(f"error: --task {word}: expected NAME:ITEMS:LENGTH with a name of {', '.join(TASKS)}")
    items, length = map(int, sizes)
    possible = TASKS[name].lengths(items)
    if length not in possible:
        raise SystemExit(f"error: --task {word}: {items} items need a length from {possible[0]} to {possible[-1]}")
    return name, items, length


def choices(option: str, text: str, allowed: tuple[str, ...]) -> list[str]:
    """Words with commas between, without repetition."""
    found = list(dict.fromkeys(text.split(",")))
    for word in found:
        if word not in allowed:
            raise SystemExit(f"error: --{option} {word}: expected some of {', '.join(allowed)}")
    return found


def numbers(option: str, text: str, kind: type) -> list[Any]:
    """Numbers > 0 with commas between, without repetition."""
    try:
        found = list(dict.fromkeys(map(kind, text.split(","))))
    except ValueError:
        found = []
    if not found or not all(0 < x < math.inf for x in found):
        raise SystemExit(f"error: --{option} {text}: expected numbers > 0 with commas between")
    return found


def cells(options: argparse.Namespace) -> list[Cell]:
    """The grid, seed by seed: what ends early has all of the first seeds."""
    tasks = list(dict.fromkeys(map(read_task, options.task.split(","))))
    heads, rates = numbers("heads", options.heads, int), numbers("lr", options.lr, float)
    decays, mixers = choices("decay", options.decay, DECAYS), choices("mixer", options.mixer, MIXERS)
    versions = f"hla {hla.__version__}, torch {torch.__version__}"
    grid = product(range(options.seeds), tasks, heads, decays, mixers, rates)
    return [
        Cell(
            *(task, items, length, options.width, options.layers, head_count, decay, mixer),
            *(options.steps, options.batch, lr, seed, options.device, options.precision, versions),
        )
        for seed, (task, items, length), head_count, decay, mixer, lr in grid
    ]


class Results:
    """results.json: every cell that was ever finished in this folder."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "results.json"
        self.cells: dict[Cell, dict[str, Any]] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SystemExit(f"error: --out {folder}: {error.strerror}") from None
        if self.path.exists():
            try:
                found = json.loads(self.path.read_text(encoding="utf-8"))["cells"]
                for entry in found:
                    self.cells[Cell(**{x: entry[x] for x in Cell.__dataclass_fields__})] = entry
            except (ValueError, KeyError, TypeError) as error:
                raise SystemExit(f"error: {self.path} is no result of this program: {error!r}") from None

    def write(self, **more: Any) -> None:
        """The file, complete or as before."""
        write(self.path, json.dumps({**more, "cells": list(self.cells.values())}, indent=1))


def write(path: Path, text: str) -> None:
    """A file that is complete or as before."""
    beside = path.with_name(f".{path.name}")
    beside.write_text(text, encoding="utf-8")
    os.replace(beside, path)


@contextmanager
def progress(done: int, total: int) -> Iterator[Callable[[int, str], object]]:
    """A function of (cells done, words): a bar on a terminal, a line for each cell elsewhere."""
    if not sys.stdout.isatty() or find_spec("rich") is None:
        yield lambda count, words: print(f"{count}/{total} {words}", flush=True)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    with Progress(BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.fields[words]}")) as bar:
        task = bar.add_task("cells", total=total, completed=done, words="")
        yield lambda count, words: bar.update(task, completed=count, words=words)


def worker(heeds: bool) -> None:
    """What a process does first: one thread, and Ctrl-C ends it without a word, unless the whole command ignores it."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_DFL if heeds else signal.SIG_IGN)


def finished(todo: list[Cell], at_once: int) -> Iterator[dict[str, Any]]:
    """Results as they come, from so many processes at once."""
    if at_once == 1:
        torch.set_num_threads(1)
        yield from map(train, todo)
        return
    heeds = signal.getsignal(signal.SIGINT) is not signal.SIG_IGN  # a shell's background jobs do not
    with ProcessPoolExecutor(at_once, multiprocessing.get_context("spawn"), worker, (heeds,)) as pool:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # what processes inherit that are not ready for it
        futures = [pool.submit(train, cell) for cell in todo]
        signal.signal(signal.SIGINT, before)
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def run(grid: list[Cell], results: Results, at_once: int) -> None:
    """Train all cells of the grid that have no result yet."""
    todo = [cell for cell in grid if cell not in results.cells]
    done = len(grid) - len(todo)
    if done:
        print(f"{done} of {len(grid)} cells are there already")
    if not todo:
        return
    with progress(done, len(grid)) as report:
        for entry in finished(todo, min(at_once, len(todo))):
            cell = Cell(**{x: entry[x] for x in Cell.__dataclass_fields__})
            results.cells[cell] = entry
            results.write()
            done += 1
            report(done, f"{cell.name}: {entry['test']:.3f}, {entry['seconds']:.1f} s")


# --- results ---------------------------------------------------------------------------------------------------------


def summary(grid: list[Cell], results: Results, control: float) -> list[dict[str, Any]]:
    """For each setting: chance, what the control reached, and a row for each mixer at its best learning rate."""
    settings: dict[tuple[Any, ...], list[Cell]] = {}
    for cell in grid:
        settings.setdefault((cell.task, cell.items, cell.length, cell.heads, cell.decay), []).append(cell)
    groups = []
    for (task, items, length, heads, decay), members in settings.items():
        rows = [
            row([x for x in members if x.mixer == mixer], results) for mixer in dict.fromkeys(x.mixer for x in members)
        ]
        reached = next((x["test"] for x in rows if x["mixer"] == "softmax"), None)
        labels = TASKS[task].make(items, length, TEST[1], torch.Generator().manual_seed(TEST[0]))[1]
        groups.append(
            {
                "task": f"{task}:{items}:{length}",
                "heads": heads,
                "head_dim": members[0].width // heads,
                "decay": decay,
                "chance": 1 / TASKS[task].answers(items),
                "one_answer": one_answer(labels),
                "control": reached,
                "valid": reached is not None and reached >= control,
                "rows": rows,
            }
        )
    return groups


def row(members: list[Cell], results: Results) -> dict[str, Any]:
    """A mixer at the learning rate whose mean over seeds on the validation data is best."""
    by_rate: dict[float, list[dict[str, Any]]] = {}
    for cell in members:
        by_rate.setdefault(cell.lr, []).append(results.cells[cell])

    def mean(lr: float, name: str) -> float:
        return math.fsum(x[name] for x in by_rate[lr]) / len(by_rate[lr])

    best = max(by_rate, key=lambda lr: mean(lr, "validation"))
    tests = [x["test"] for x in by_rate[best]]
    return {
        "mixer": members[0].mixer,
        "test": mean(best, "test"),
        "least": min(tests),
        "most": max(tests),
        "lr": best,
        "validation": {f"{lr:g}": mean(lr, "validation") for lr in by_rate},
        "parameters": by_rate[best][0]["parameters"],
        "kept": by_rate[best][0]["kept"],
        "seconds": mean(best, "seconds"),
    }


def table(groups: list[dict[str, Any]], options: argparse.Namespace) -> str:
    """The groups in markdown."""
    lines = ["| task | heads × d | decay | mixer | accuracy, mean (least to most) | learning rate | numbers kept |  |"]
    lines.append("|---" * 8 + "|")
    for group in groups:
        for x in group["rows"]:
            verdict = ("control" if x["mixer"] == "softmax" else "") if group["valid"] else "INVALID"
            where = f"`{group['task']}` | {group['heads']} × {group['head_dim']} | {group['decay']}"
            spread = f"{x['test']:.3f} ({x['least']:.3f} to {x['most']:.3f})"
            lines.append(f"| {where} | {x['mixer']} | {spread} | {x['lr']:g} | {x['kept']} | {verdict} |")
    lines.append("")
    for group in groups:
        counts = " or ".join(str(x) for x in sorted({x["parameters"] for x in group["rows"]}))
        lines.append(
            f"- `{group['task']}`, {group['heads']} heads, decay {group['decay']}: {counts} parameters; chance "
            f"{group['chance']:.3f}, the best single answer for each row {group['one_answer']:.3f}."
        )
    lines += [
        "",
        f"{options.seeds} seeds, {options.steps} steps of {options.batch} rows, {options.layers} layers of width "
        f"{options.width}, {options.precision} on {options.device}. Test data, at the learning rate of {options.lr} "
        f"that is best by validation. The control, softmax, has to reach {options.control:g}; a comparison where it "
        "does not, or is missing, is marked INVALID.",
        "",
    ]
    return "\n".join(lines)


def draw(groups: list[dict[str, Any]], path: Path) -> None:
    """A picture: means, with bars from the least to the most."""
    if find_spec("matplotlib") is None:
        print("no picture: it needs matplotlib (pip install 'hla[cli]')")
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(3, len(groups))
    lines = -(-len(groups) // columns)
    figure, axes = pyplot.subplots(
        lines, columns, figsize=(4 * columns, 3.2 * lines), squeeze=False, layout="constrained"
    )
    for place in axes.flat[len(groups) :]:
        place.set_axis_off()
    for place, group in zip(axes.flat, groups, strict=False):
        for i, x in enumerate(group["rows"]):
            spread = [[max(0.0, x["test"] - x["least"])], [max(0.0, x["most"] - x["test"])]]
            place.errorbar(i, x["test"], spread, fmt="o", capsize=4)
        place.axhline(group["chance"], color="gray", ls="--", lw=1)
        title = f"{group['task']}, {group['heads']} × {group['head_dim']}, decay {group['decay']}"
        place.set_title(title if group["valid"] else f"INVALID\n{title}", fontsize=9)
        names = [x["mixer"].replace("linear_attention", "linear") for x in group["rows"]]
        place.set_xticks(range(len(names)), names, rotation=20)
        place.set(ylim=(-0.03, 1.03), ylabel="accuracy")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    print(f"picture: {path}")


def main(words: list[str] | None = None) -> int:
    """Train the grid and show what came out; 1 if a control failed."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    options = arguments(words)
    grid = cells(options)
    try:
        for cell in grid:
            if (cell.seed, cell.lr) == (grid[0].seed, grid[0].lr):
                with torch.device("meta"):
                    build(cell)
    except OptionError as error:
        raise SystemExit(f"error: {error}") from None
    results = Results(options.out)
    try:
        try:
            run(grid, results, options.threads if options.device == "cpu" else 1)
        except BrokenProcessPool:
            time.sleep(0.5)  # where Ctrl-C has ended the processes, it may be on its way to this one
            raise
    except KeyboardInterrupt:
        print("stopped; what is finished is kept, and the same command continues", file=sys.stderr)
        return 130
    except BrokenProcessPool:
        raise SystemExit("error: a process was killed; what is finished is kept, use fewer --threads") from None
    groups = summary(grid, results, options.control)
    results.write(valid=all(x["valid"] for x in groups), groups=groups)
    text = table(groups, options)
    write(options.out / "table.md", text)
    print("\n" + text)
    draw(groups, options.out / "recall.png")
    failed = [x for x in groups if not x["valid"]]
    for x in failed:
        said = "there is no control" if x["control"] is None else f"softmax reaches {x['control']:.3f}"
        print(
            f"INVALID: {x['task']}, {x['heads']} heads, decay {x['decay']}: {said}, below {options.control:g}",
            file=sys.stderr,
        )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Train a small language model on bytes of real text, and compare operators with softmax attention.

    python examples/train_lm.py                                     # HLA₂ on the text that ships with Python
    python examples/train_lm.py --text book.txt --out runs/book     # text of your own
    python examples/train_lm.py --out runs/book --text book.txt --resume
    python examples/train_lm.py --mixer hla2,ahla,linear_attention,softmax --out runs/compared

It needs `pip install ".[torch,cli]"`; without rich there is no progress bar, without matplotlib no picture.

A run can end at any moment, by Ctrl-C or kill -9: `--resume` continues from the last checkpoint as if nothing had
happened. On a CPU with the same number of threads every later loss is the same, bit for bit.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import io
import json
import math
import os
import pickle
import platform
import shutil
import signal
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import hla
from hla.errors import OptionError
from hla.models import Decoder, ModelConfig

BITS = 1 / math.log(2)  # cross entropies in nats become bits
LENGTHS = {"1k": 1024, "64k": 65536}


def arguments(words: list[str] | None) -> argparse.Namespace:
    """The command line."""
    summary, details = (__doc__ or "").split("\n", 1)
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--text", type=Path, help="file to learn; by default the text that ships with Python: its topics and modules")
    add("--out", type=Path, default=Path("runs/lm"), help="folder of all results (%(default)s)")
    add(
        "--resume",
        action="store_true",
        help="continue what is in --out, with the same options; where there is no checkpoint yet, start",
    )
    add("--mixer", default="hla2", help="hla2, ahla, hla3, linear_attention, softmax, or several with commas between")
    for name, default, meaning in (
        ("width", 128, "features of the residual stream"),
        ("layers", 2, "blocks"),
        ("heads", 4, "heads of each block"),
        ("steps", 1000, "steps of the optimizer"),
        ("batch", 8, "rows of a batch"),
        ("context", 256, "bytes of a row"),
        ("validate-every", 100, "steps between validations"),
        ("validation-rows", 64, "rows, evenly from the last 5%% of the text"),
        ("checkpoint-every", 100, "steps between checkpoints"),
        ("threads", torch.get_num_threads(), "of the CPU"),
    ):
        add(f"--{name}", type=positive, default=default, help=f"{meaning} (%(default)s)")
    add("--sample", type=count, default=300, help="bytes to generate after training, 0 for none (%(default)s)")
    add("--dropout", type=float, default=0.0, help="probability that a feature is dropped (%(default)s)")
    add("--lr", type=not_negative, default=3e-3, help="peak of the learning rate (%(default)s)")
    add("--seed", type=int, default=0, help="of parameters, batches and samples (%(default)s)")
    gpu = torch.cuda.is_available()
    add("--device", choices=("cpu", "cuda"), default="cuda" if gpu else "cpu", help="(%(default)s)")
    add("--precision", choices=("float32", "bfloat16"), help="bfloat16 is autocast, and the default on cuda")
    add("--prompt", type=some, default="def __init__(self, ", help="what the sample begins with (%(default)r)")
    add("--temperature", type=not_negative, default=0.7, help="of the sample (%(default)s)")
    found = parser.parse_args(words)
    if found.device == "cuda" and not gpu:
        parser.error("argument --device: this PyTorch sees no GPU; use cpu")
    if found.resume and not found.out.exists():
        parser.error(f"argument --resume: there is no folder {found.out}; check --out, or start without --resume")
    found.mixer = list(dict.fromkeys(found.mixer.split(",")))
    found.precision = found.precision or ("bfloat16" if found.device == "cuda" else "float32")
    return found


def positive(word: str) -> int:
    """A number ≥ 1."""
    return count(word, 1)


def count(word: str, least: int = 0) -> int:
    """A number ≥ `least`."""
    if not word.lstrip("+-").isdecimal() or int(word) < least:
        raise argparse.ArgumentTypeError(f"{word} is no whole number of at least {least}")
    return int(word)


def not_negative(word: str) -> float:
    """A finite number ≥ 0."""
    try:
        fits = 0 <= float(word) < math.inf
    except ValueError:
        fits = False
    if not fits:
        raise argparse.ArgumentTypeError(f"{word} is not a finite number of at least 0")
    return float(word)


def some(word: str) -> str:
    """Words, of one byte or more."""
    if not word:
        raise argparse.ArgumentTypeError("it needs a byte to begin with")
    return word


# --- text ------------------------------------------------------------------------------------------------------------


def read_text(path: Path | None) -> tuple[bytes, str]:
    """The text and what to call it."""
    if path is not None:
        try:
            return path.read_bytes(), str(path)
        except OSError as error:
            raise SystemExit(f"error: --text {path}: {error.strerror}") from None
    from pydoc_data.topics import topics

    folder = Path(sysconfig.get_path("stdlib"))
    modules = sorted(x for x in folder.glob("[a-z]*.py") if x.stem in sys.stdlib_module_names)
    parts = [topics[name].encode() for name in sorted(topics)] + [x.read_bytes() for x in modules]
    name = f"topics and modules of Python {platform.python_version()} (PSF License Version 2)"
    return b"\n".join(parts), name


class Text:
    """Bytes to learn from, and the last 5% to judge by."""

    def __init__(self, path: Path | None, context: int) -> None:
        data, self.name = read_text(path)
        self.size, self.sha256 = len(data), hashlib.sha256(data).hexdigest()
        tokens = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        cut = len(tokens) - len(tokens) // 20
        self.train, self.held_out, self.window = tokens[:cut], tokens[cut:], torch.arange(context + 1)
        if len(self.held_out) <= context:
            least = 20 * (context + 1)
            raise SystemExit(f"error: {self.name} has {len(data)} bytes; --context {context} needs {least} at least")
        shares = torch.bincount(tokens.int(), minlength=256) / len(tokens)
        self.unigram = -float((shares * shares.clamp_min(1e-30).log2()).sum())

    def batch(self, rows: int, sampler: torch.Generator) -> Tensor:
        """Rows of the training part that begin anywhere, (rows, context + 1)."""
        start = torch.randint(len(self.train) - len(self.window) + 1, (rows, 1), generator=sampler)
        return self.train[start + self.window].long()

    def validation(self, rows: int) -> Tensor:
        """Rows of the held-out part, evenly spaced."""
        start = torch.linspace(0, len(self.held_out) - len(self.window), rows, dtype=torch.float64).long()
        return self.held_out[start[:, None] + self.window].long()


# --- models ----------------------------------------------------------------------------------------------------------


def parameters(config: ModelConfig) -> int:
    """How many a model has; none are made."""
    return sum(p.numel() for p in Decoder(config, device="meta").parameters())


def equal_configs(options: argparse.Namespace) -> dict[str, ModelConfig]:
    """A config for each mixer; the MLPs of all but the first are as wide as makes the parameters equal."""
    configs: dict[str, ModelConfig] = {}
    for mixer in options.mixer:
        config = ModelConfig(256, options.width, options.layers, options.heads, layers=mixer, dropout=options.dropout)
        if configs:
            target = parameters(next(iter(configs.values())))
            missing = target - parameters(config)
            inner = config.inner + round(missing / (3 * options.width * options.layers))
            config = dataclasses.replace(config, hidden_size=max(inner, 1))
            if abs(parameters(config) - target) > 0.01 * target:
                raise SystemExit(f"error: no MLP makes {mixer} as large as {options.mixer[0]}; use a larger --width")
        configs[mixer] = config
    return configs


def cache_bytes(config: ModelConfig, tokens: int) -> int:
    """Keys and values of all layers in 16 bits, as softmax attention would keep them."""
    return 2 * 2 * config.num_layers * config.d_model * tokens


def human(size: float) -> str:
    """Bytes with a unit."""
    unit = min(int(math.log(max(size, 1), 1024)), 3)
    return f"{size / 1024**unit:.{1 if unit else 0}f} {('B', 'KiB', 'MiB', 'GiB')[unit]}"


# --- one run ---------------------------------------------------------------------------------------------------------


class Run:
    """One model in training: everything that a checkpoint has to hold."""

    def __init__(self, mixer: str, config: ModelConfig, options: argparse.Namespace, text: Text) -> None:
        self.mixer, self.options, self.text, self.folder = mixer, options, text, options.out / mixer
        free = ("out", "resume", "mixer", "checkpoint_every", "prompt", "sample", "temperature", "threads")
        fixed = {name: value for name, value in vars(options).items() if name not in free}
        self.settings = {**fixed, "text": text.sha256[:16], "model": config.to_json()}
        self.step, self.seconds, self.log = 0, 0.0, list[dict[str, float]]()
        self.sampler = torch.Generator().manual_seed(options.seed)
        self.validation = text.validation(options.validation_rows)
        torch.manual_seed(options.seed)
        saved = sorted(self.folder.glob("step-*"))
        if saved and not options.resume:
            raise SystemExit(f"error: {self.folder} holds a run; continue it with --resume, or choose another --out")
        before = self.read(saved[-1]) if saved else None
        self.model = (before["model"] if before else Decoder(config)).to(options.device)
        matrices = [p for p in self.model.parameters() if p.ndim > 1]
        others = [p for p in self.model.parameters() if p.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.95))
        if before:
            self.restore(before)
            print(f"{mixer}: continues after step {self.step}")
        elif options.resume:
            print(f"{mixer}: no checkpoint in {self.folder}; starts at step 0")

    def loss(self, rows: Tensor) -> Tensor:
        """Mean cross entropy of each next byte, in nats."""
        rows = rows.to(self.options.device)
        low = self.options.precision == "bfloat16"
        with torch.autocast(torch.device(self.options.device).type, torch.bfloat16, enabled=low):
            logits = self.model(rows[:, :-1])
        return functional.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())

    def rate(self) -> float:
        """The learning rate of the next step: up in a line, down to a tenth by a cosine."""
        warmup = max(1, self.options.steps // 20)
        if self.step < warmup:
            return float(self.options.lr * (self.step + 1) / warmup)
        past = (self.step - warmup) / (self.options.steps - warmup)
        return float(self.options.lr * (0.55 + 0.45 * math.cos(math.pi * past)))

    def speed(self) -> float:
        """Bytes trained in a second."""
        return float(self.step * self.options.batch * self.options.context / self.seconds)

    def advance(self) -> dict[str, float]:
        """One step, and what the log says of it: losses in bits per byte."""
        began = time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate()
        loss = self.loss(self.text.batch(self.options.batch, self.sampler))
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        entry = {"step": self.step, "training": loss.item() * BITS}
        self.seconds += time.perf_counter() - began
        if not math.isfinite(entry["training"]):
            raise SystemExit(f"error: {self.mixer}: the loss is {loss.item()} at step {self.step}; use a smaller --lr")
        if self.step % self.options.validate_every == 0 or self.step == self.options.steps:
            entry["validation"] = self.validate()
        self.log.append(entry)
        return entry

    @torch.no_grad()
    def validate(self) -> float:
        """Bits per byte of the held-out rows."""
        self.model.eval()
        rows, batch = self.validation, self.options.batch
        parts = [rows[i : i + batch] for i in range(0, len(rows), batch)]
        total = sum(self.loss(part).item() * len(part) for part in parts)
        self.model.train()
        return total / len(rows) * BITS

    def save(self) -> None:
        """Write a checkpoint: a folder that gets its name when it is complete. Only then older ones go."""
        beside, older = self.folder / ".writing", list(self.folder.glob("step-*"))
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir()
        self.model.save(beside / "model.safetensors")
        training = {
            "settings": self.settings, "step": self.step, "seconds": self.seconds, "log": self.log,
            "optimizer": self.optimizer.state_dict(), "sampler": self.sampler.get_state(), "rng": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if self.options.device == "cuda" else [],
        }  # fmt: skip
        torch.save(training, beside / "training.pt")
        os.replace(beside, self.folder / f"step-{self.step:08d}")
        for folder in older:
            shutil.rmtree(folder)

    def read(self, saved: Path) -> dict[str, Any]:
        """A checkpoint of this very run; an error for any other."""
        try:
            found: dict[str, Any] = torch.load(saved / "training.pt", map_location="cpu", weights_only=True)
            found["model"], before = Decoder.load(saved / "model.safetensors"), dict(found["settings"])
        except (OSError, EOFError, KeyError, TypeError, ValueError, RuntimeError, pickle.UnpicklingError) as error:
            raise SystemExit(f"error: {saved} is no checkpoint of this program: {error}") from None
        names = [x for x in sorted({*before, *self.settings}) if before.get(x) != self.settings.get(x)]
        if names:
            other = "".join(f"\n  {x} was {before.get(x)}, is {self.settings.get(x)}" for x in names)
            raise SystemExit(f"error: {saved} is of another run; use its options and text, or another --out:{other}")
        return found

    def restore(self, found: dict[str, Any]) -> None:
        """All that a checkpoint holds beside the model."""
        self.step, self.seconds, self.log = found["step"], found["seconds"], found["log"]
        self.optimizer.load_state_dict(found["optimizer"])
        self.sampler.set_state(found["sampler"])
        torch.set_rng_state(found["rng"])
        if found["cuda"]:
            torch.cuda.set_rng_state_all(found["cuda"])


@contextmanager
def progress(run: Run, total: int) -> Iterator[Callable[[str, bool], object]]:
    """A function of (words, whether they are news): a bar on a terminal, a line for all news elsewhere."""
    if not sys.stdout.isatty() or find_spec("rich") is None:
        yield lambda words, news: news and print(f"{run.mixer} {run.step}/{total}: {words}", flush=True)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[words]}")) as bar:
        task = bar.add_task(run.mixer, total=total, completed=run.step, words="")
        yield lambda words, news: bar.update(task, completed=run.step, words=words)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """An error if another process trains in this folder. The lock goes with the process, however that ends."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        if find_spec("fcntl") is not None:  # not on Windows
            import fcntl

            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                said = f"error: another process trains in {folder}; wait for it, or choose another --out"
                raise SystemExit(said) from None
            except OSError:  # a file system without locks
                pass
        yield


def train(run: Run) -> None:
    """All steps that are left, each a line of log.jsonl. The first Ctrl-C ends it after a step, the second at once."""
    options, last, stop = run.options, "", False

    def ask(*_: Any) -> None:
        nonlocal stop
        stop = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    with ExitStack() as stack:
        stack.callback(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, ask))
        log = stack.enter_context((run.folder / "log.jsonl").open("w", encoding="utf-8"))
        report = stack.enter_context(progress(run, options.steps))
        log.writelines(json.dumps(entry) + "\n" for entry in run.log)
        while run.step < options.steps and not stop:
            entry = run.advance()
            log.write(json.dumps(entry) + "\n")
            log.flush()
            if "validation" in entry:
                last = f", validation {entry['validation']:.3f}"
            words = f"training {entry['training']:.3f}{last} bits per byte, {run.speed():.0f} bytes/s"
            report(words, "validation" in entry)
            if stop or run.step % options.checkpoint_every == 0 or run.step == options.steps:
                run.save()
    if stop:
        print(f"stopped after step {run.step}; --resume continues", file=sys.stderr)
        raise SystemExit(130)


# --- results ---------------------------------------------------------------------------------------------------------


def sample(run: Run) -> int:
    """Print a continuation of the prompt; bytes of the state after it."""
    options, config = run.options, run.model.config
    prompt = torch.tensor([list(os.fsencode(options.prompt))], device=options.device)
    dice = torch.Generator(options.device).manual_seed(options.seed)
    made = run.model.generate(prompt, options.sample, temperature=options.temperature, generator=dice)
    whole = torch.cat([prompt, made], 1)
    with torch.no_grad():
        state = run.model.eval()(whole, return_state=True)[1]
    words = bytes(whole[0].tolist()).decode("utf-8", "replace") if options.sample else ""
    print(f"\n--- {run.mixer} ---\n" + "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in words))
    caches = ", ".join(f"{human(cache_bytes(config, n))} at {name}" for name, n in LENGTHS.items())
    length = whole.shape[1]
    kind = "keys and values" if run.mixer == "softmax" else "of this size at any length"
    print(f"--- state after {length} tokens: {human(state.nbytes)}, {kind}")
    print(f"--- KV cache in 16 bits: {human(cache_bytes(config, length))} at {length}, {caches} tokens")
    return int(state.nbytes)


def row(run: Run, state: int) -> dict[str, Any]:
    """A row of the table."""
    caches = {name: cache_bytes(run.model.config, n) for name, n in LENGTHS.items()}
    return {
        "mixer": run.mixer,
        "bits_per_byte": run.log[-1]["validation"],
        "parameters": parameters(run.model.config),
        "mlp": run.model.config.inner,
        "bytes_per_second": run.speed(),
        "state_bytes": caches if run.mixer == "softmax" else dict.fromkeys(LENGTHS, state),
        "kv_cache_bytes": caches,
    }


def write_table(rows: list[dict[str, Any]], text: Text, options: argparse.Namespace) -> str:
    """results.json and table.md, each complete or absent."""
    facts = {
        "text": text.name, "sha256": text.sha256, "unigram_bits_per_byte": text.unigram, "steps": options.steps,
        "batch": options.batch, "context": options.context, "device": options.device, "precision": options.precision,
        "threads": options.threads, "hla": hla.__version__, "torch": torch.__version__, "rows": rows,
    }  # fmt: skip
    sizes = "".join(f" state at {x} tokens | KV cache at {x} |" for x in LENGTHS)
    lines = [f"| mixer | validation, bits per byte | parameters | MLP width | bytes/s in training |{sizes}"]
    lines.append("|---" * (5 + 2 * len(LENGTHS)) + "|")
    for x in rows:
        sizes = "".join(f" {human(x['state_bytes'][n])} | {human(x['kv_cache_bytes'][n])} |" for n in LENGTHS)
        numbers = f"{x['bits_per_byte']:.3f} | {x['parameters']} | {x['mlp']} | {x['bytes_per_second']:.0f}"
        lines.append(f"| {x['mixer']} | {numbers} |{sizes}")
    lines += ["", f"Unigram entropy of the text: {text.unigram:.3f} bits per byte. KV caches in 16 bits.", ""]
    for name, content in (("results.json", json.dumps(facts, indent=1)), ("table.md", "\n".join(lines))):
        beside = options.out / f".{name}"
        beside.write_text(content, encoding="utf-8")
        os.replace(beside, options.out / name)
    return "\n".join(lines)


def draw(runs: list[Run], text: Text, path: Path) -> None:
    """A picture of all losses."""
    if find_spec("matplotlib") is None:
        print("no picture of the losses: it needs matplotlib (pip install 'hla[cli]')")
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for i, run in enumerate(runs):
        axes.plot([x["step"] for x in run.log], [x["training"] for x in run.log], color=f"C{i}", alpha=0.25, lw=0.8)
        judged = [x for x in run.log if "validation" in x]
        steps, losses = [x["step"] for x in judged], [x["validation"] for x in judged]
        axes.plot(steps, losses, "o-", color=f"C{i}", ms=3, label=f"{run.mixer}, validation")
    axes.axhline(text.unigram, color="gray", ls="--", label="unigram entropy")
    axes.set(xlabel="step", ylabel="bits per byte")
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    print(f"losses: {path}")


def main(words: list[str] | None = None) -> None:
    """Train each mixer, then show what came out."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    options = arguments(words)
    torch.set_num_threads(options.threads)
    text = Text(options.text, options.context)
    print(f"text: {text.name}, {text.size / 1e6:.2f} MB; unigram entropy {text.unigram:.3f} bits per byte")
    try:
        configs = equal_configs(options)
    except OptionError as error:
        raise SystemExit(f"error: {error}") from None
    for mixer, config in configs.items():
        print(f"{mixer}: {parameters(config)} parameters, MLP width {config.inner}")
    runs = []
    try:
        for mixer, config in configs.items():
            with alone(options.out / mixer):
                runs.append(Run(mixer, config, options, text))
                train(runs[-1])
        rows = [row(run, sample(run)) for run in runs]
        print("\n" + write_table(rows, text, options))
        draw(runs, text, options.out / "loss.png")
    except BrokenPipeError:  # whoever read the output has gone
        raise
    except OSError as error:  # no folder, no right, no space
        raise SystemExit(f"error: --out {options.out}: {error}; checkpoints stay, and --resume continues") from None


if __name__ == "__main__":
    main()

"""Does it train? Losses, gradients and the size of outputs, over thousands of steps in bfloat16.

Small decoders learn the text that ships with Python, T = 1024, under autocast with bfloat16. The long runs are those of
the layer's defaults; the short ones leave out one part of the defaults at a time, at a usual and at a high learning
rate. A run fails when its loss or its gradient is not finite, which ends it, or when its last losses are above the
unigram entropy of the text: then it has learned less than how often each byte occurs.

    python benchmarks/stability.py [--steps 2000] [--short-steps 200] [--out runs/stability]

Cells that are in OUT/results.json are not run again. The picture needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import torch
from common import adamw, machine
from torch import Tensor

import hla
from hla.models import Decoder, ModelConfig
from hla.nn.torch import HigherOrderOperator
from hla.nn.torch.parts import ForgetGate

OPERATORS = ("hla2", "ahla", "hla3", "linear_attention")
SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "decay=None": {"decay": None},
    'decay="learned"': {"decay": "learned"},
    "qk_norm=None": {"qk_norm": None},
    "output_norm=False": {"output_norm": False},
    "decay=None, output_norm=False": {"decay": None, "output_norm": False},
    "all three": {"decay": None, "output_norm": False, "qk_norm": None},
    "normalize=True for output_norm": {"output_norm": False, "normalize": True, "feature_map": "elu+1"},
}
LR, HIGH_LR = 3e-3, 1e-2
LAST = 20
"""Steps over which the last losses are averaged."""


def text() -> Tensor:
    """The topics of pydoc, as bytes."""
    from pydoc_data.topics import topics

    return torch.frombuffer(bytearray("\n".join(topics[x] for x in sorted(topics)).encode()), dtype=torch.uint8)


def unigram(data: Tensor) -> float:
    """Bits per byte of single bytes."""
    shares = torch.bincount(data.int(), minlength=256) / len(data)
    return -float((shares * shares.clamp_min(1e-30).log2()).sum())


def watch(model: Decoder) -> list[tuple[float, float]]:
    """Fills with (largest |o|, exponent of its growth along the sequence) of each operator, call by call."""
    seen: list[tuple[float, float]] = []

    def look(_: Any, __: Any, o: Tensor) -> None:
        scales = hla.inspect.token_scales(o.detach().float().movedim(1, -2))
        seen.append((float(o.detach().abs().max()), float(scales.exponent.nanmean())))

    for module in model.modules():
        if isinstance(module, HigherOrderOperator):
            module.register_forward_hook(look)
    return seen


def memory(model: Decoder) -> list[list[float]]:
    """1/(1 − γ) of each head of each layer with forget gates, where x is 0."""
    return [
        (1 / (1 - torch.sigmoid(module.bias.detach().double()))).tolist()
        for module in model.modules()
        if isinstance(module, ForgetGate)
    ]


def run(
    operator: str, setting: str, lr: float, steps: int, options: argparse.Namespace, data: Tensor
) -> dict[str, Any]:
    """One training, as numbers by step."""
    torch.manual_seed(options.seed)
    config = ModelConfig(256, options.width, 2, options.heads, layers=operator, attention=SETTINGS[setting])
    model = Decoder(config, device=options.device)
    optimizer = adamw(model, lr)
    warmup, window = max(1, steps // 20), torch.arange(options.tokens + 1)
    losses: list[float] = []
    gradients: list[float] = []
    outputs: dict[int, list[tuple[float, float]]] = {}
    began = time.perf_counter()
    for step in range(steps):
        cosine = 0.55 + 0.45 * math.cos(math.pi * max(0, step - warmup) / (steps - warmup))
        for group in optimizer.param_groups:
            group["lr"] = lr * min((step + 1) / warmup, cosine)
        start = torch.randint(len(data) - len(window) + 1, (options.batch, 1))
        rows = data[start + window].long().to(options.device)
        look = step % max(1, steps // 40) == 0 or step == steps - 1
        seen = watch(model) if look else []
        with torch.autocast(torch.device(options.device).type, torch.bfloat16):
            logits = model(rows[:, :-1])
        if look:
            outputs[step + 1] = seen
            for module in model.modules():
                module._forward_hooks.clear()
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        losses.append(float(loss.detach()) / math.log(2))
        gradients.append(float(norm))
        if not (math.isfinite(losses[-1]) and math.isfinite(gradients[-1])):
            break
        optimizer.step()
    ended = losses[-LAST:]
    return {
        "operator": operator, "setting": setting, "lr": lr, "steps": steps, "done": len(losses),
        "finite": math.isfinite(losses[-1]) and math.isfinite(gradients[-1]), "last": sum(ended) / len(ended),
        "seconds": time.perf_counter() - began, "losses": losses, "gradients": gradients, "outputs": outputs,
        "memory": memory(model),
    }  # fmt: skip


def table(cells: list[dict[str, Any]], least: float) -> str:
    """A row for each run."""
    heads = ("operator", "setting", "lr", "steps", "last losses", "largest gradient after warm-up", "largest output")
    lines = ["| " + " | ".join((*heads, "its exponent", "")) + "|", "|---" * (len(heads) + 2) + "|"]
    for x in cells:
        after = x["gradients"][max(1, x["steps"] // 20) :] or x["gradients"]
        last = x["outputs"][max(x["outputs"], key=int)]
        fate = "" if x["last"] < least else "above unigram"
        if not x["finite"]:
            fate = f"not finite at step {x['done']}"
        numbers = f"{x['last']:.2f} | {max(after):.3g} | {max(o for o, _ in last):.3g} | {max(p for _, p in last):.2f}"
        lines.append(f"| {x['operator']} | {x['setting']} | {x['lr']} | {x['steps']} | {numbers} | {fate} |")
    return "\n".join(lines)


def draw(cells: list[dict[str, Any]], steps: int, least: float, path: Path) -> None:
    """The long runs: losses and gradients."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(8, 6), sharex=True, layout="constrained")
    for i, x in enumerate(x for x in cells if x["steps"] == steps):
        for axes, values in ((above, x["losses"]), (below, x["gradients"])):
            size = max(1, len(values) // 200)
            means = [sum(values[j : j + size]) / len(values[j : j + size]) for j in range(0, len(values), size)]
            axes.plot([size * (j + 0.5) for j in range(len(means))], means, color=f"C{i}", lw=1, label=x["operator"])
    above.axhline(least, color="gray", ls="--", lw=0.8, label="unigram entropy")
    above.set(ylabel="training loss, bits per byte")
    below.set(xlabel="step", ylabel="gradient norm before clipping", yscale="log")
    above.legend()
    figure.savefig(path)
    pyplot.close(figure)


def main() -> None:
    """All runs that are missing, then the table and the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--steps", type=int, default=2000, help="of the long runs (%(default)s)")
    add("--short-steps", type=int, default=200, help="of the runs that leave something out (%(default)s)")
    add("--tokens", type=int, default=1024, help="T (%(default)s)")
    add("--batch", type=int, default=2, help="rows (%(default)s)")
    add("--width", type=int, default=96, help="features of the residual stream (%(default)s)")
    add("--heads", type=int, default=3, help="(%(default)s)")
    add("--operators", default=",".join(OPERATORS), help="of the long runs (%(default)s)")
    add("--short-operators", default="hla2,hla3", help="of the short runs (%(default)s)")
    add("--seed", type=int, default=0, help="(%(default)s)")
    add("--device", default="cpu", help="(%(default)s)")
    add("--out", type=Path, default=Path("runs/stability"), help="folder of the results (%(default)s)")
    options = parser.parse_args()
    data = text()
    least = unigram(data)
    print(f"{machine()}, torch {torch.__version__}; unigram entropy {least:.2f} bits per byte", flush=True)
    cells = [(x, "defaults", LR, options.steps) for x in options.operators.split(",") if x]
    cells += [
        (operator, setting, lr, options.short_steps)
        for operator in options.short_operators.split(",")
        if operator
        for setting in SETTINGS
        for lr in (LR, HIGH_LR)
    ]
    options.out.mkdir(parents=True, exist_ok=True)
    results = options.out / "results.json"
    done = json.loads(results.read_text()) if results.exists() else []
    known = {(x["operator"], x["setting"], x["lr"], x["steps"]) for x in done}
    for cell in cells:
        if cell in known:
            continue
        done.append(run(*cell, options, data))
        print(table(done[-1:], least).splitlines()[-1], flush=True)
        beside = results.with_suffix(".part")
        beside.write_text(json.dumps(done))
        os.replace(beside, results)
    print("\n" + table(done, least))
    draw(done, options.steps, least, options.out / "stability.svg")


if __name__ == "__main__":
    main()

"""Train a language model on a text longer than one process wants to hold: each has a slice of every sequence.

    torchrun --nproc-per-node 4 examples/long_context.py              # on the CPU, with gloo
    torchrun --nproc-per-node 8 examples/long_context.py --device cuda --tokens 1048576 --no-check
    python examples/long_context.py                                   # one process, to compare

First the model is trained for a few steps on sequences of --tokens bytes, of which each process takes its slice; the
first process also trains a second model alone, on whole sequences, and compares losses and gradients. Then a step is
made for sequences of growing length, and what a process sends and holds is shown.

It needs `pip install ".[torch]"`. Nothing is downloaded: the text is what ships with Python.
"""

from __future__ import annotations

import argparse
import math
import os
import resource
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from hla.models import Decoder, ModelConfig

BITS = 1 / math.log(2)  # cross entropies in nats become bits


def arguments(words: list[str] | None) -> argparse.Namespace:
    """The command line."""
    summary, details = (__doc__ or "").split("\n", 1)
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--text", type=Path, help="file to learn; by default the topics of Python's own help")
    add("--tokens", type=int, default=4096, help="bytes of a sequence, over all processes (%(default)s)")
    add("--steps", type=int, default=10, help="of training (%(default)s)")
    add("--width", type=int, default=64, help="features of the residual stream (%(default)s)")
    add("--layers", type=int, default=2, help="blocks (%(default)s)")
    add("--heads", type=int, default=4, help="heads of each block (%(default)s)")
    mixers = ("hla2", "ahla", "hla3", "linear_attention")
    add("--mixer", choices=mixers, default="hla2", help="(%(default)s)")
    add("--lr", type=float, default=3e-3, help="learning rate (%(default)s)")
    add("--growth", default="2048,4096,8192,16384", help="lengths of the second part, or 0 (%(default)s)")
    add("--no-check", action="store_true", help="no second model in one process")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="(%(default)s)")
    add("--dtype", choices=("float32", "float64"), help="of everything; float64 on cpu, else float32")
    chosen = parser.parse_args(words)
    chosen.dtype = chosen.dtype or ("float64" if chosen.device == "cpu" else "float32")
    chosen.growth = [int(n) for n in chosen.growth.split(",") if int(n)]
    return chosen


def join(device: str) -> tuple[int, int]:
    """This process's rank and how many there are."""
    backend = "nccl" if device == "cuda" else "gloo"
    if "RANK" not in os.environ:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    else:
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(backend)
    return dist.get_rank(), dist.get_world_size()


def read(path: Path | None) -> Tensor:
    """The text as bytes, (length,)."""
    if path is None:
        from pydoc_data import topics

        data = "\n\n".join(text for _, text in sorted(topics.topics.items())).encode()
    else:
        data = path.read_bytes()
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


def piece(text: Tensor, step: int, tokens: int) -> Tensor:
    """The sequence of a step with the byte that follows it, (tokens + 1,); the text again when it ends."""
    places = torch.arange(step * tokens, (step + 1) * tokens + 1)
    return text[places % len(text)]


def make(chosen: argparse.Namespace, group: Any) -> Decoder:
    """The model; with a group its layers take slices of sequences."""
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=256,
        d_model=chosen.width,
        num_layers=chosen.layers,
        num_heads=chosen.heads,
        layers=chosen.mixer,
    )
    model = Decoder(config, device=chosen.device, dtype=getattr(torch, chosen.dtype))
    for block in model.blocks:
        block.attention.process_group = group
    return model


def learn(model: Decoder, sequence: Tensor, part: slice) -> Tensor:
    """The part's share of the mean loss of a sequence in bits per byte, and its gradients in the parameters."""
    device = next(model.parameters()).device
    inputs, targets = sequence[:-1][part].to(device), sequence[1:][part].to(device)
    logits = model(inputs[None])[0]
    total = functional.cross_entropy(logits, targets, reduction="sum")
    loss = total * BITS / (len(sequence) - 1)
    model.zero_grad()
    loss.backward()
    return loss.detach()


def add_up(loss: Tensor, model: Decoder) -> Tensor:
    """The loss of all slices; gradients too become those of all, in one message."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    row = torch.cat([loss.reshape(1), *(d.flatten() for d in gradients)])
    dist.all_reduce(row)
    for d, found in zip(gradients, row[1:].split([d.numel() for d in gradients]), strict=True):
        d.copy_(found.view_as(d))
    return row[0]


def slice_of(tokens: int, rank: int, size: int) -> slice:
    """The slice of a rank."""
    return slice(tokens * rank // size, tokens * (rank + 1) // size)


class Sent(TorchDispatchMode):
    """Counts what this process sends: in all_gather its tensor to each of the others, in all_reduce (a ring) twice."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.exchanged, self.summed = size, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if name.startswith("c10d."):
            sizes = [x.nbytes for x in torch.utils._pytree.tree_leaves(args) if isinstance(x, Tensor)]
            if "gather" in name:
                self.exchanged += min(sizes) * (self.size - 1)
            elif "reduce" in name:
                self.summed += 2 * sum(sizes) * (self.size - 1) // self.size
        return func(*args, **(kwargs or {}))


def train(chosen: argparse.Namespace, text: Tensor, rank: int, size: int) -> bool:
    """The first part; whether the losses and gradients are those of one process."""
    model = make(chosen, dist.group.WORLD)
    alone = make(chosen, None) if rank == 0 and not chosen.no_check else None
    optimizers = [torch.optim.AdamW(m.parameters(), lr=chosen.lr) for m in (model, alone) if m]
    say(rank, f"{size} processes, {chosen.tokens} bytes in each sequence, {chosen.dtype}")
    say(rank, "step  bits per byte" + ("  in one process  difference  of gradients" if alone else ""))
    worst = 0.0
    for step in range(chosen.steps):
        sequence = piece(text, step, chosen.tokens)
        loss = add_up(learn(model, sequence, slice_of(chosen.tokens, rank, size)), model)
        line = f"{step:4}  {loss:13.9f}"
        if alone is not None:
            wanted = learn(alone, sequence, slice(None))
            apart = max(distance(p.grad, q.grad) for p, q in zip(model.parameters(), alone.parameters(), strict=True))
            worst = max(worst, apart, abs(float(loss - wanted)))
            line += f"  {wanted:14.9f}  {abs(float(loss - wanted)):10.1e}  {apart:12.1e}"
        say(rank, line)
        for optimizer in optimizers:
            optimizer.step()
    allowed = torch.finfo(getattr(torch, chosen.dtype)).eps * max(chosen.tokens, 1000) * 1000
    if alone is not None:
        told = "rounding" if worst < allowed else "MORE THAN ROUNDING"
        say(rank, f"largest difference {worst:.1e}: {told} (up to {allowed:.1e})")
    return bool(worst < allowed)


def distance(x: Tensor | None, y: Tensor | None) -> float:
    """The largest difference, relative to the largest number."""
    assert x is not None
    assert y is not None
    return float((x - y).abs().max() / y.abs().max())


def grow(chosen: argparse.Namespace, text: Tensor, rank: int, size: int) -> None:
    """The second part: what a process sends and holds as sequences grow."""
    model = make(chosen, dist.group.WORLD)
    item = torch.finfo(getattr(torch, chosen.dtype)).bits // 8
    say(rank, "\nA step, for each process, in bytes:")
    say(rank, "   tokens  of one process  sent by layers  for gradients  as keys and values  memory")
    for tokens in chosen.growth:
        part = slice_of(tokens, rank, size)
        before = held(chosen.device, start=True)
        with Sent(size) as sent:
            add_up(learn(model, piece(text, 0, tokens), part), model)
        most = torch.tensor(held(chosen.device) - before, device=chosen.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        if rank == 0:
            attention = 2 * chosen.layers * chosen.width * item * (part.stop - part.start) * (size - 1)
            shown = f"{sent.exchanged:14}  {sent.summed:13}  {attention:18}  {most / 2**20:.0f} MiB"
            say(rank, f"{tokens:9}  {part.stop - part.start:14}  {shown}")


def held(device: str, *, start: bool = False) -> int:
    """The most bytes that this process has held since it was asked to `start`, or holds then."""
    if device == "cuda":
        if start:
            torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() if start else torch.cuda.max_memory_allocated()
    try:
        if start:
            Path("/proc/self/clear_refs").write_text("5")
        return 1024 * int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
    except (OSError, IndexError, ValueError):  # no Linux: the peak of the process's life
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def say(rank: int, line: str) -> None:
    """One process speaks."""
    if rank == 0:
        print(line, flush=True)


def main(words: list[str] | None = None) -> int:
    """The command; 0 where one process has found the same."""
    chosen = arguments(words)
    rank, size = join(chosen.device)
    try:
        text = read(chosen.text)
        same = train(chosen, text, rank, size)
        grow(chosen, text, rank, size)
        dist.barrier()
    finally:
        dist.destroy_process_group()
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())

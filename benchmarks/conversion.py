"""What becomes of a model whose softmax attention is replaced: its loss right after `hla.nn.convert`, and trained on.

A GPT of `nn.TransformerEncoderLayer` learns the text that ships with Python, byte by byte. Then copies of it are
converted and trained on for as long, beside the model itself (more training alone helps, too) and a model with the same
layers that starts from nothing. All see the same batches at the same learning rate. Validation is the last 5%.

    python benchmarks/conversion.py [--steps 600] [--after 600] [--operators hla2,ahla,linear_attention]
"""

from __future__ import annotations

import argparse
import copy
import math
from pydoc_data.topics import topics

import torch
from common import adamw, machine
from torch import Tensor, nn
from torch.nn import functional

import hla

ROWS, CONTEXT = 8, 256


class GPT(nn.Module):
    """Embeddings of bytes and positions, causal blocks, logits."""

    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(256, width), nn.Embedding(CONTEXT, width)
        block = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.ModuleList(copy.deepcopy(block) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        for p in self.parameters():
            if p.ndim > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, T) → (B, T, 256)."""
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        x = self.embedding(tokens) + self.positions.weight[:length]
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        y: Tensor = self.head(self.norm(x))
        return y


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    """Bits per byte."""
    logits = model(rows[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()) / math.log(2)


@torch.no_grad()
def validate(model: nn.Module, held_out: Tensor) -> float:
    """Bits per byte of 64 rows, evenly from the held-out text."""
    start = torch.linspace(0, len(held_out) - CONTEXT - 1, 64, dtype=torch.float64).long()
    rows = held_out[start[:, None] + torch.arange(CONTEXT + 1)].long()
    return sum(float(loss_of(model, part)) for part in rows.split(ROWS)) / (64 / ROWS)


def train(model: nn.Module, data: Tensor, steps: int, lr: float, seed: int, marks: tuple[int, ...]) -> dict[int, float]:
    """Validation losses after so many steps; the batches are those of the seed."""
    train_part, held_out = data[: -len(data) // 20], data[-len(data) // 20 :]
    dice = torch.Generator().manual_seed(seed)
    optimizer = adamw(model, lr)
    found = {0: validate(model, held_out)}
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, step / 30)
        start = torch.randint(len(train_part) - CONTEXT, (ROWS, 1), generator=dice)
        optimizer.zero_grad()
        loss_of(model, train_part[start + torch.arange(CONTEXT + 1)].long()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step in marks or step == steps:
            found[step] = validate(model, held_out)
    return found


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600, help="of the model with softmax (%(default)s)")
    parser.add_argument("--after", type=int, default=600, help="steps after the conversion (%(default)s)")
    parser.add_argument("--operators", default="hla2,ahla,linear_attention", help="(%(default)s)")
    parser.add_argument("--lr", type=float, default=1e-3, help="(%(default)s)")
    options = parser.parse_args()
    print(f"{machine()}, torch {torch.__version__}", flush=True)
    data = "\n".join(topics[name] for name in sorted(topics)).encode()
    tokens = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    torch.manual_seed(0)
    fresh = GPT(128, 4, 2)
    softmax = copy.deepcopy(fresh)
    before = train(softmax, tokens, options.steps, options.lr, 0, ())
    print(f"softmax: {before[options.steps]:.3f} bits per byte after {options.steps} steps", flush=True)
    marks = tuple(x for x in (25, 100, 300) if x < options.after)
    columns = (0, *marks, options.after)
    print("| model | " + " | ".join(f"after {x}" for x in columns) + " |\n" + "|---" * (1 + len(columns)) + "|")

    def show(name: str, model: nn.Module) -> None:
        found = train(model, tokens, options.after, options.lr, 1, marks)
        print(f"| {name} | " + " | ".join(f"{found[x]:.2f}" for x in columns) + " |", flush=True)

    show("softmax, trained on", copy.deepcopy(softmax))
    for operator in options.operators.split(","):
        show(f"converted to {operator}", hla.nn.convert(copy.deepcopy(softmax), operator, decay="learned")[0])
        show(f"{operator} from nothing", hla.nn.convert(copy.deepcopy(fresh), operator, decay="learned")[0])


if __name__ == "__main__":
    main()

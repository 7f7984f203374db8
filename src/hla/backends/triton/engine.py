"""The kernels with their configurations, on torch tensors: the engine of `hla.backends.staged`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from hla.backends.staged.engine import Arithmetic, rounded_chunk
from hla.backends.torch.namespace import PLAIN
from hla.backends.triton.kernels.carry import carry as _carry
from hla.backends.triton.kernels.chain import chain as _chain
from hla.backends.triton.kernels.clock import clock as _clock
from hla.backends.triton.kernels.rate import rate as _rate
from hla.backends.triton.kernels.read import read as _read
from hla.backends.triton.kernels.token import token as _token
from hla.backends.triton.launch import Config, Kernel
from hla.problem import Problem

_DOT = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


def padded(width: int) -> int:
    """A block that holds a width: a power of two, at least 16, as products of tiles need."""
    return max(16, 1 << (width - 1).bit_length())


def _bytes(arguments: dict[str, Any]) -> int:
    return 4 if arguments["DOT"] == tl.float32 else 2


def _chain_shared(a: dict[str, Any], c: Config) -> int:
    """The tiles of a chunk, for every stage of the pipeline, and the states as operands."""
    columns = c.blocks["BZ"]
    held = (max(a["BD"], a["BW"]) + a["C"]) * columns + a["C"] * a["C"]
    tiles = 0
    if c.stages > 1 and not _scalar(a):
        rows = (a["x"] is not None) + (a["y"] is not None) * (2 if a["DECAY"] == 2 else 1)
        tiles = a["C"] * (a["BD"] * rows + a["BW"] * (a["w"] is not None) + columns) * c.stages
    return int((tiles + held) * _bytes(a))


def _read_shared(a: dict[str, Any], c: Config) -> int:
    block, columns = max(a["BK"], a["BK2"]), c.blocks["BZ"]
    return int((2 * a["C"] * block + block * columns + a["C"] * (columns + a["C"])) * _bytes(a))


def _rate_shared(a: dict[str, Any], c: Config) -> int:
    columns = c.blocks["BZ"]
    return int((a["C"] * (2 * a["BD"] + 2 * columns) + 2 * a["BD"] * columns) * _bytes(a))


def _useful(a: dict[str, Any], c: Config) -> bool:
    """Blocks no wider than the matrix; without tensor cores small ones, shared by many threads."""
    if c.blocks["BZ"] > padded(a["DZ"]):
        return False
    if not _scalar(a):
        return True
    most = 16 if a.get("x2") is not None or "d" in a else 32  # two terms, or a rate: more to hold
    return c.blocks["BZ"] <= most and c.warps == 8 and c.stages == 1


def _scalar(a: dict[str, Any]) -> bool:
    """Whether products run without tensor cores."""
    return bool(a["DOT"] == tl.float32 and a["PRECISION"] == "ieee")


CHAIN = Kernel(
    _chain,
    [
        Config({"BZ": 16}, 8, 2),
        Config({"BZ": 32}, 4, 2),
        Config({"BZ": 32}, 8, 2),
        Config({"BZ": 64}, 8, 2),
        Config({"BZ": 16}, 4, 2),
        Config({"BZ": 32}, 8, 1),
        Config({"BZ": 16}, 8, 1),
    ],
    ("D", "DW", "DZ", "DOT", "C"),
    ("BD", "BW", "x", "y", "w", "DECAY", "PRECISION"),
    shared=_chain_shared,
    useful=_useful,
)
READ = Kernel(
    _read,
    [
        Config({"BZ": 64}, 4, 2),
        Config({"BZ": 64}, 8, 2),
        Config({"BZ": 128}, 8, 2),
        Config({"BZ": 64}, 4, 3),
        Config({"BZ": 32}, 8, 2),
        Config({"BZ": 32}, 8, 1),
        Config({"BZ": 32}, 4, 2),
        Config({"BZ": 16}, 8, 1),
        Config({"BZ": 16}, 4, 1),
    ],
    ("D", "D2", "DZ", "DOT", "C"),
    ("BK", "BK2", "x2", "PRECISION"),
    shared=_read_shared,
    useful=_useful,
    writes=("r",),
)
RATE = Kernel(
    _rate,
    [Config({"BZ": 32}, 8, 1), Config({"BZ": 64}, 8, 1), Config({"BZ": 16}, 8, 1), Config({"BZ": 16}, 4, 1)],
    ("D", "DZ", "DOT", "C"),
    ("BD", "PRECISION"),
    shared=_rate_shared,
    useful=_useful,
    writes=("result",),
)
CLOCK = Kernel(_clock, [Config({}, 4, 1)])
CARRY = Kernel(_carry, [Config({"BD": 16, "BZ": 64}, 4, 1)])
TOKEN = Kernel(_token, [Config({"SIZE": 4096}, 4, 1)])


def _across(a: dict[str, Any], blocks: dict[str, int]) -> int:
    """Blocks of columns."""
    return int(-(-a["DZ"] // blocks["BZ"]))


_KERNELS: dict[str, tuple[Kernel, Callable[[dict[str, Any], dict[str, int]], int]]] = {
    "clock": (CLOCK, lambda a, blocks: int(a["count"])),
    "chain": (CHAIN, lambda a, blocks: int(a["part_count"]) * _across(a, blocks)),
    "carry": (CARRY, lambda a, blocks: -(-int(a["D"]) // blocks["BD"]) * _across(a, blocks)),
    "read": (READ, lambda a, blocks: int(a["count"]) * _across(a, blocks)),
    "rate": (RATE, lambda a, blocks: int(a["count"])),
    "token": (TOKEN, lambda a, blocks: int(a["part_count"])),
}
"""With the number of programs for each entry of the batch."""


class Triton:
    """See `hla.backends.staged.engine.Engine`."""

    xp = PLAIN
    scratch = True

    def empty(self, like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A new tensor."""
        return like.new_empty(shape, dtype=dtype)

    def number(self, like: Tensor, value: float) -> Tensor:
        """A tensor without axes."""
        return like.new_full((), value)

    def strides(self, x: Tensor) -> tuple[int, ...]:
        """In elements."""
        return x.stride()

    def dense(self, x: Tensor) -> Tensor:
        """Without gaps."""
        return x.contiguous()

    def fill(self, target: Tensor, source: Tensor) -> None:
        """Write one tensor into another."""
        target.copy_(source)

    def place(self, x: Tensor) -> torch.device:
        """The device."""
        return x.device

    def table(self, where: torch.device, rows: Sequence[Any]) -> Tensor:
        """int64."""
        return torch.tensor(rows, dtype=torch.int64).to(where)

    def arithmetic(self, problem: Problem) -> Arithmetic:
        """The dtype of operands and their precision.

        bfloat16 is multiplied as it is. float16 cannot hold what stages hand on, which grows like t²: its inputs are
        multiplied as TF32, which holds them exactly. Everything else is float32 throughout.
        """
        kinds = {x.dtype for x in (problem.q, problem.k, problem.v)}
        if kinds == {torch.bfloat16} and not problem.scale_varies:
            return Arithmetic(torch.bfloat16, "ieee", torch.float32)
        if kinds == {torch.float16} and torch.version.hip is None:
            return Arithmetic(torch.float32, "tf32", torch.float32)
        return Arithmetic(torch.float32, "ieee", torch.float32)

    def chunk_size(self, problem: Problem, arithmetic: Arithmetic) -> int:
        """The power of two at or below what was asked for that the tiles allow."""
        widest = max(padded(int(x.shape[-1])) for x in (problem.q, problem.v))
        if arithmetic.operands == torch.float32 and arithmetic.precision == "ieee":
            most = 32 if widest <= 128 else 16  # no tensor cores: tiles live in the registers
        else:
            most = max(16, min(64, 128 * 64 // widest // (1 if arithmetic.operands == torch.bfloat16 else 2)))
        return rounded_chunk(problem, most)

    def chains(self, arithmetic: Arithmetic, chunk: int, rows: int, wide: int, columns: int, like: Tensor) -> bool:
        """Always: the widest states fit into the registers of a program."""
        return True

    def launch(self, kernel: str, batch: int, arguments: dict[str, Any], arithmetic: Arithmetic, like: Tensor) -> None:
        """With blocks that hold the widths, and the types of products."""
        a = dict(arguments)
        chosen, programs = _KERNELS[kernel]
        for name in ("mask", "starts"):
            if a.get(name) is not None:
                a[name] = a[name].view(torch.uint8)
        if kernel not in ("carry", "token"):
            a["TABLE"] = a["chunks"] is not None
        if kernel in ("chain", "read", "rate"):
            a |= {"DOT": _DOT[arithmetic.operands], "PRECISION": arithmetic.precision}
        if kernel == "chain":
            a |= {"BD": padded(a["D"]), "BW": padded(a["DW"])}
        elif kernel == "read":
            widest = 32 if _scalar(a) else 64
            a |= {"BK": min(widest, padded(a["D"])), "BK2": min(widest, padded(a["D2"]))}
        elif kernel == "rate":
            a["BD"] = padded(a["D"])
        elif kernel == "token":
            a["BV"] = 1 << (a["DV"] - 1).bit_length()
        chosen(lambda blocks: batch * programs(a, blocks), a, like)


ENGINE = Triton()

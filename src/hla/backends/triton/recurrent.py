"""Form "recurrent" and decode steps: all lines of a program, for every head, in one launch."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from hla.arrays import broadcast_shapes
from hla.backends.triton.forward import final_state, inputs, natural
from hla.backends.triton.kernels.token import token as _token
from hla.backends.triton.launch import Config, Kernel
from hla.backends.triton.timeline import timeline
from hla.backends.triton.views import arrange
from hla.family import Program
from hla.problem import Problem, States
from hla.recurrent import lines as recurrence

TOKEN = Kernel(_token, [Config({"SIZE": 4096}, 4, 1)])
NOTHING = -1


@cache
def encoded(program: Program) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
    """Streams by number, and the program's lines in the kernel's terms.

    Strict reads come first: they look at a state that another line moves on. What they ask with is there by then.
    """
    names = ["q", "k", "v", "one", *(read.result for read in program.reads)]
    symbols = [s.symbol for s in program.states]
    lines = recurrence(program)
    ordered = [line for line in lines if line[1] is not None and line[1].strict]
    ordered += [line for line in lines if line not in ordered]
    result: list[tuple[int, ...]] = []
    for state, read in ordered:
        moved = program.state(read.state) if state is None and read is not None else state
        assert moved is not None
        result.append(
            (
                names.index(moved.key),
                names.index(moved.value),
                NOTHING if state is None else symbols.index(state.symbol),
                moved.power,
                NOTHING if read is None else names.index(read.query),
                NOTHING if read is None else names.index(read.result),
                symbols.index(moved.symbol),
                int(read is not None and read.strict),
            )
        )
    return tuple(names), tuple(result)


def run(problem: Problem) -> tuple[Tensor, States]:
    """Output and final states, token after token."""
    program, v = problem.program, problem.v
    shapes = natural(problem).shapes()
    names, lines = encoded(program)
    options = [x for x in (problem.log_decay, problem.token_mask, problem.starts) if x is not None]
    batch = broadcast_shapes(
        problem.output_batch(), *(shape[:-2] for shape in shapes.state.values()), *(x.shape[:-2] for x in options)
    )
    packed = problem.cu_seqlens is not None
    offsets = tuple(problem.cu_seqlens) if problem.cu_seqlens is not None else None
    cut = timeline(problem.length, 16, offsets, v.device)
    output_batch = broadcast_shapes(*(shapes.batch[name] for name, _ in (*program.output, *program.denominator)))
    output = v.new_empty((*batch, problem.length, v.shape[-1]))

    given = inputs(problem)
    given.setdefault("one", given["v"])
    streams = {name: x.tensor for name, x in given.items()}
    for read in program.reads:  # a place for one token of one sequence
        place = v.new_empty((*batch, cut.parts, shapes.width[read.result]), dtype=torch.float32)
        streams[read.result] = place
    results = {read.result for read in program.reads}

    before: dict[str, Tensor | None] = {}
    after: dict[str, Tensor] = {}
    for state in program.states:
        start = (problem.initial or {}).get(state.symbol)
        if start is not None:
            start = start.movedim(0, -3) if packed else start.unsqueeze(-3)
        before[state.symbol] = start
        place = _in_place(problem, start, (*batch, cut.parts, *shapes.state[state.symbol][-2:]))
        if place is None:
            place = v.new_empty((cut.parts, *batch, *shapes.state[state.symbol][-2:]), dtype=torch.float32)
            place = place.movedim(0, -3)
        after[state.symbol] = place

    def column(x: Tensor | None) -> tuple[Tensor, int] | None:
        if x is None:
            return None
        x = x.view(torch.uint8) if x.dtype == torch.bool else x
        return x[..., 0].expand(*x.shape[:-2], problem.length), 1

    tensors: dict[str, tuple[Tensor, int] | None] = {
        "output": (output, 2),
        "log_decay": column(problem.log_decay),
        "mask": column(problem.token_mask),
        "starts": column(problem.starts),
    }
    tensors |= {f"stream {name}": (x, 2) for name, x in streams.items()}
    tensors |= {f"before {name}": None if x is None else (x, 3) for name, x in before.items()}
    tensors |= {f"after {name}": (x, 3) for name, x in after.items()}
    grid = arrange(batch, tensors)

    def pointers(kind: str, of: tuple[str, ...]) -> tuple[tuple[Tensor | None, ...], tuple[tuple[int, ...], ...]]:
        views = [grid.views[f"{kind} {name}"] for name in of]
        return (
            tuple(None if view is None else view.tensor for view in views),
            tuple((0,) if view is None else view.strides for view in views),
        )

    symbols = tuple(s.symbol for s in program.states)
    arguments: dict[str, object] = {"n1": grid.sizes[1], "n2": grid.sizes[2]}
    for name in ("output", "log_decay", "mask", "starts"):
        view = grid.views[name]
        arguments[name] = None if view is None else view.tensor
        arguments[f"s_{name}"] = (0,) if view is None else view.strides
    arguments["streams"], arguments["s_streams"] = pointers("stream", names)
    arguments["before"], arguments["s_before"] = pointers("before", symbols)
    arguments["after"], arguments["s_after"] = pointers("after", symbols)
    arguments |= {
        "bounds": cut.tokens,
        "T": problem.length,
        "part_count": cut.parts,
        "factors": tuple(given[name].factor if name in given else 1.0 for name in names),
        "weights": tuple(problem.ridge if w is None else w for _, w in program.output),
        "masses": tuple(problem.ridge if w is None else w for _, w in program.denominator),
        "eps": problem.eps,
        "LINES": lines,
        "SCRATCH": tuple(name in results for name in names),
        "WIDTHS": tuple(shapes.width[name] for name in names),
        "OUTPUT": tuple(names.index(name) for name, _ in program.output),
        "MASSES": tuple(names.index(name) for name, _ in program.denominator),
        "DV": int(v.shape[-1]),
        "BV": 1 << (int(v.shape[-1]) - 1).bit_length(),
    }
    TOKEN(lambda _: grid.batch * cut.parts, arguments, v)
    for symbol, x in after.items():
        view = grid.views[f"after {symbol}"]
        if view is not None and view.tensor is not x:
            x.copy_(view.tensor)
    finals: States = {}
    for symbol, x in after.items():
        own = _at(x, (*shapes.state[symbol][:-2], cut.parts), 2)
        finals[symbol] = final_state(problem, own.movedim(-3, 0))
    return _at(output, output_batch, 2), finals


def _in_place(problem: Problem, start: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    """The given state's own memory, if the caller wants it overwritten and every head has its own."""
    if start is None or not problem.overwrite or tuple(start.shape) != shape or start.dtype != torch.float32:
        return None
    spread = all(step != 0 or n == 1 for n, step in zip(start.shape, start.stride(), strict=True))
    return start if spread else None


def _at(x: Tensor, batch: tuple[int, ...], own: int) -> Tensor:
    """The first along every axis that `batch` lacks."""
    axes = x.ndim - own
    wanted = (*(1,) * (axes - len(batch)), *batch)
    for axis, n in enumerate(wanted):
        if n == 1 and x.shape[axis] != 1:
            x = x.narrow(axis, 0, 1)
    return x[(0,) * (axes - len(batch))] if len(batch) < axes else x

"""The backend's two directions as operations of torch, ``hla::triton`` and ``hla::triton_gradient``.

Eager calls go past them, as an operation costs more than a small launch. They are what a tracer records: under
`torch.compile`, `torch.export` and `make_fx`, with fake and functional tensors. Their derivatives and their batching
rule are those of `hla.backends.triton.autograd`, which calls them.
"""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hla.arrays import broadcast_shapes
from hla.backends.staged.forward import natural
from hla.backends.torch.autograd import Split
from hla.backends.torch.namespace import PLAIN
from hla.backends.triton.execution import compute, differentiate
from hla.family import Spec, program
from hla.problem import Problem, States


def is_traced(tensors: Any) -> bool:
    """Whether there is more to a call than the values of its tensors."""
    return torch.compiler.is_compiling() or any(type(x) not in (Tensor, torch.nn.Parameter) for x in tensors)


def run(split: Split, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Output, and the final states where the caller wants them."""
    if is_traced(tensors):
        return tuple(torch.ops.hla.triton(list(tensors), describe(split)))
    return _results(split.problem(tensors, split.namespace), split.states)


def pull(split: Split, have: tuple[bool, ...], rate: bool, cotangents: Any, tensors: Any) -> tuple[Tensor, ...]:
    """Gradients of the tensors. `have`: which states have a cotangent."""
    if is_traced([*tensors, *cotangents]):
        how = describe(split)
        return tuple(torch.ops.hla.triton_gradient(list(tensors), list(cotangents), how, list(have), rate))
    return _gradients(split.problem(tensors, split.namespace), split, have, rate, cotangents, tensors)


def describe(split: Split) -> str:
    """A call without its tensors, as a literal."""
    problem = split.rest
    scale = problem.scale if isinstance(problem.scale, float) else None
    numbers = (scale, problem.eps, problem.ridge)
    how = (problem.return_state, problem.form, problem.chunk_size, problem.constant, problem.cu_seqlens)
    return repr((tuple(problem.program.spec), split.fields, split.symbols, split.states, numbers, how))


def read(how: str, tensors: Any) -> tuple[Problem, Split]:
    """The problem of a described call, and how it is split."""
    spec, fields, symbols, states, numbers, options = ast.literal_eval(how)
    given: dict[str, Any] = dict(zip(fields, tensors, strict=False))
    scale, eps, ridge = numbers
    return_state, form, chunk_size, constant, cu_seqlens = options
    problem = Problem(
        PLAIN,
        program(Spec(*spec)),
        given["q"],
        given["k"],
        given["v"],
        torch.float32,
        log_decay=given.get("log_decay"),
        constant=constant,
        token_mask=given.get("token_mask"),
        starts=given.get("starts"),
        cu_seqlens=cu_seqlens,
        initial=dict(zip(symbols, tensors[len(fields) :], strict=True)) if symbols else None,
        scale=given["scale"] if scale is None else scale,
        eps=eps,
        ridge=ridge,
        return_state=return_state,
        form=form,
        chunk_size=chunk_size,
    )
    split = Split(problem)
    split.states = states
    return problem, split


def _results(problem: Problem, symbols: tuple[str, ...]) -> tuple[Tensor, ...]:
    output, states = compute(replace(problem, overwrite=False))
    return (output, *(states[symbol] for symbol in symbols)) if problem.return_state else (output,)


def _gradients(
    problem: Problem, split: Split, have: Any, rate: bool, cotangents: Any, tensors: Any
) -> tuple[Tensor, ...]:
    given = [symbol for symbol, there in zip(split.states, have, strict=False) if there]
    d_final: States = dict(zip(given, cotangents[1:], strict=True))
    found = differentiate(problem, cotangents[0], d_final, rate=rate)
    by_name = found._asdict()
    made = [*(by_name.get(name) for name in split.fields), *(found.initial[s] for s in split.symbols)]
    return tuple(
        x.new_zeros((1,) * x.ndim).expand(x.shape) if d is None else d.to(x.dtype)
        for x, d in zip(tensors, made, strict=True)
    )


def _run_forward(tensors: list[Tensor], how: str) -> list[Tensor]:
    problem, split = read(how, tensors)
    return [x.contiguous().clone() if _shares(x, tensors) else x.contiguous() for x in _results(problem, split.states)]


def _run_gradient(
    tensors: list[Tensor], cotangents: list[Tensor], how: str, have: list[bool], rate: bool
) -> list[Tensor]:
    problem, split = read(how, tensors)
    found = _gradients(problem, split, have, rate, cotangents, tensors)
    return [x.contiguous().clone() if _shares(x, [*tensors, *cotangents]) else x.contiguous() for x in found]


def _fake_forward(tensors: list[Tensor], how: str) -> list[Tensor]:
    problem, split = read(how, tensors)
    sizes, v = natural(problem).shapes(), problem.v
    parts = () if problem.cu_seqlens is None else (len(problem.cu_seqlens) - 1,)
    names = (name for name, _ in (*problem.program.output, *problem.program.denominator))
    batch = broadcast_shapes(*(sizes.batch[name] for name in names))
    output = v.new_empty((*batch, problem.length, v.shape[-1]))
    if not problem.return_state:
        return [output]
    return [output, *(v.new_empty((*parts, *sizes.state[s]), dtype=torch.float32) for s in split.states)]


def _fake_gradient(tensors: list[Tensor], cotangents: Any, how: str, have: Any, rate: bool) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in tensors]


def _shares(x: Tensor, others: list[Tensor]) -> bool:
    """Whether a result lies in an input's memory, which an operation's must not."""
    place = x.untyped_storage()._cdata
    return any(place == y.untyped_storage()._cdata for y in others)


registered = torch.library.Library("hla", "FRAGMENT")  # type: ignore[no-untyped-call]
for _schema, _run, _fake in (
    ("triton(Tensor[] tensors, str how) -> Tensor[]", _run_forward, _fake_forward),
    (
        "triton_gradient(Tensor[] tensors, Tensor[] cotangents, str how, bool[] have, bool rate) -> Tensor[]",
        _run_gradient,
        _fake_gradient,
    ),
):
    _name: str = registered.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    registered.impl(_name, _run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"hla::{_name}", _fake, lib=registered)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    tensors, ctx.how = inputs
    ctx.shape = output[0].shape
    ctx.save_for_backward(*tensors)


def _back(ctx: Any, cotangents: list[Tensor | None]) -> tuple[Any, None]:
    tensors, (d_output, *d_states) = list(ctx.saved_tensors), cotangents
    if d_output is None:
        d_output = tensors[2].new_zeros(()).expand(ctx.shape)
    given, have = [d for d in d_states if d is not None], [d is not None for d in d_states]
    found = torch.ops.hla.triton_gradient(tensors, [d_output, *given], ctx.how, have, True)
    return [d if x.is_floating_point() else None for x, d in zip(tensors, found, strict=True)], None


torch.library.register_autograd("hla::triton", _back, setup_context=_keep, lib=registered)

"""How a problem runs on torch tensors: as plain operations where something watches them, else in a loop that writes to
its temporaries, and, where a gradient is wanted, as one node of the graph (`hla.backends.torch.autograd`).

Plain operations are what `torch.func` transformations, forward-mode derivatives, fake tensors and tensor subclasses
see: all of these then work as they do for any other torch code.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from hla import forms, packing
from hla.arrays import undisturbed
from hla.backends.torch.autograd import Operator, is_watched
from hla.backends.torch.flattening import Flat
from hla.backends.torch.namespace import PLAIN, Namespace
from hla.gradients import ProblemGradients
from hla.problem import Problem, States


def run(problem: Problem) -> tuple[Tensor, States]:
    """Output and final states of any problem."""
    with undisturbed(problem.xp, problem.v):
        tensors = list(_tensors(problem))
        single = problem.length == 1 and forms.plain_form(problem) == "recurrent"
        if single or any(map(is_watched, tensors)):
            return forms.run(replace(problem, xp=PLAIN))
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            return Operator.of(problem)
        with torch.no_grad():
            return eager(problem)


def pull(problem: Problem, d_output: Tensor, d_final: States | None) -> ProblemGradients:
    """The gradient of `run` applied to cotangents of output and final states."""
    with undisturbed(problem.xp, problem.v):
        tensors = [*_tensors(problem), d_output, *(d_final or {}).values()]
        if any(map(is_watched, tensors)) or (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
            return forms.pull(replace(problem, xp=PLAIN), d_output, d_final)
        with torch.no_grad():
            return forms.pull(replace(problem, xp=Namespace(eager=True)), d_output, d_final)


def eager(problem: Problem) -> tuple[Tensor, States]:
    """Output and final states, without a graph."""
    if problem.cu_seqlens is not None:
        return packing.run(problem, eager)
    flat = Flat(replace(problem, xp=Namespace(eager=True)))
    output, states = forms.run_one(flat.problem)
    return flat.restore(output), {symbol: flat.restore(x) for symbol, x in states.items()}


def _tensors(problem: Problem) -> Iterator[Tensor]:
    yield from (problem.q, problem.k, problem.v)
    for x in (problem.log_decay, problem.scale, problem.token_mask, problem.starts, problem.cu_seqlens):
        if isinstance(x, Tensor):
            yield x
    if problem.initial is not None:
        yield from problem.initial.values()

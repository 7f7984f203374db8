"""An operator as one node of torch's graph: it saves inputs and the states between chunks, and recomputes the rest.

A gradient of a gradient (``create_graph=True``) is recorded as plain operations, so it can be differentiated again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from hla import chunkwise, forms, gradients
from hla.arrays import undisturbed
from hla.backends.torch.flattening import Flat
from hla.backends.torch.namespace import PLAIN, Namespace
from hla.problem import Problem, States

_FIELDS = ("q", "k", "v", "log_decay", "scale", "token_mask", "starts")


class Split:
    """A problem taken apart into what torch follows, a list of tensors, and the rest."""

    def __init__(self, problem: Problem) -> None:
        self.fields = tuple(name for name in _FIELDS if isinstance(getattr(problem, name), Tensor))
        self.symbols = tuple(problem.initial or ())
        self.states = tuple(problem.shapes().state)
        self.packed = problem.cu_seqlens is not None
        self.namespace = problem.xp
        empty: dict[str, Any] = dict.fromkeys(self.fields)
        self.rest = replace(problem, **empty, initial=None)

    def tensors(self, problem: Problem) -> list[Tensor]:
        """The tensors, fields before states."""
        return [*(getattr(problem, name) for name in self.fields), *((problem.initial or {}).values())]

    def problem(self, tensors: tuple[Tensor, ...], xp: Any) -> Problem:
        """The problem with these tensors in their places."""
        count = len(self.fields)
        initial = dict(zip(self.symbols, tensors[count:], strict=True)) if self.symbols else None
        fields: dict[str, Any] = dict(zip(self.fields, tensors[:count], strict=True))
        return replace(self.rest, xp=xp, initial=initial, **fields)


class Operator(torch.autograd.Function):
    """(split, *tensors) → (output, *final states)."""

    @staticmethod
    def of(problem: Problem) -> tuple[Tensor, States]:
        """Output and final states, as results of one node."""
        split = Split(problem)
        output, *states = Operator.apply(split, *split.tensors(problem))  # type: ignore[no-untyped-call]
        return output, dict(zip(split.states, states, strict=False))

    @staticmethod
    def forward(ctx: Any, split: Split, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Runs under no_grad."""
        problem = split.problem(tensors, Namespace(eager=True))
        ctx.split, ctx.count, ctx.kept = split, len(tensors), False
        ctx.set_materialize_grads(False)
        if _in_chunks(problem):
            flat = Flat(problem)
            output, states, entering = chunkwise.run_and_keep(flat.problem)
            kept = [entering[i][symbol] for i in range(len(entering)) for symbol in split.states]
            ctx.kept = True
            output, states = flat.restore(output), {s: flat.restore(x) for s, x in states.items()}
        else:
            from hla.backends.torch.execution import eager

            (output, states), kept = eager(problem), []
        ctx.save_for_backward(*tensors, *kept)
        if not problem.return_state:
            return (output,)
        return (output, *(states[symbol] for symbol in split.states))

    @staticmethod
    def backward(ctx: Any, d_output: Tensor | None, *d_states: Tensor | None) -> tuple[Any, ...]:
        """By a loop that writes to its temporaries; by plain operations where a graph is wanted or cotangents are
        watched (many at once, ``is_grads_batched``)."""
        split, saved = ctx.split, ctx.saved_tensors
        again = torch.is_grad_enabled() or any(is_watched(d) for d in (d_output, *d_states) if d is not None)
        problem = split.problem(saved[: ctx.count], PLAIN if again else Namespace(eager=True))
        with undisturbed(problem.xp, problem.v):
            if d_output is None:
                d_output = torch.zeros_like(problem.v).expand(*problem.output_batch(), *problem.v.shape[-2:])
            d_final = {s: d for s, d in zip(split.states, d_states, strict=False) if d is not None} or None
            if again or not ctx.kept:
                found = forms.pull(problem, d_output, d_final)
            else:
                each = len(split.states)
                pieces = (saved[i : i + each] for i in range(ctx.count, len(saved), each))
                entering = {i: dict(zip(split.states, piece, strict=True)) for i, piece in enumerate(pieces)}
                flat = Flat(problem)
                d_final = None if d_final is None else {s: flat.flat(d) for s, d in d_final.items()}
                found = flat.restore_gradients(gradients.pull(flat.problem, flat.flat(d_output), d_final, entering))
        given = {**found._asdict(), "token_mask": None, "starts": None}
        return (None, *(given[name] for name in split.fields), *(found.initial[s] for s in split.symbols))


def _in_chunks(problem: Problem) -> bool:
    return (
        problem.cu_seqlens is None
        and problem.length > 0
        and forms.plain_form(problem) == "chunkwise"
        and (problem.program.spec.mask != "none")
    )


def is_watched(x: Any) -> bool:
    """Whether `x` is more than a tensor with values: a transformation's, a dual, fake or of a subclass."""
    return bool(
        type(x) not in (Tensor, torch.nn.Parameter)
        or torch._C._functorch.is_functorch_wrapped_tensor(x)
        or torch._C._functorch.is_legacy_batchedtensor(x)
        or x.is_meta
        or torch.compiler.is_compiling()
        or (forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None)  # type: ignore[no-untyped-call]
    )

"""An operator as one node of torch's graph, which `torch.func.grad` and `vmap` follow too.

Both directions are nodes, as a gradient may itself be mapped over (``vmap(grad(f))``). Neither has forward-mode
derivatives, and the gradient has no gradient: these are refused, not dropped.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from hla import packing
from hla.backends.torch.autograd import Split
from hla.backends.triton import library
from hla.backends.triton.execution import compute, differentiate
from hla.errors import BackendUnsupportedError, message
from hla.gradients import ProblemGradients
from hla.problem import Problem, States

_OWN_AXES = 2
"""of every tensor of a problem, behind its batch axes"""


def run(problem: Problem) -> tuple[Tensor, States]:
    """Output and final states of any problem."""
    if isinstance(problem.cu_seqlens, Tensor):  # hidden by a transformation
        return packing.run(problem, run)
    split = Split(problem)
    tensors = split.tensors(problem)
    mapped = torch._C._are_functorch_transforms_active()
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if mapped or recorded or forward_ad._current_level >= 0:
        output, *states = Operator.apply(split, *tensors)  # type: ignore[no-untyped-call]
    elif library.is_traced(tensors):
        output, *states = library.run(split, tuple(tensors))
    else:
        with torch.no_grad():
            return compute(problem)
    return output, dict(zip(split.states, states, strict=False))


def pull(problem: Problem, d_output: Tensor, d_final: States | None) -> ProblemGradients:
    """The gradient of `run` applied to cotangents, for `hla.vjp`. What watches it sees a node that refuses to go on."""
    split = Split(problem)
    tensors, given = split.tensors(problem), d_final or {}
    everything = [*tensors, d_output, *given.values()]
    mapped = torch._C._are_functorch_transforms_active()
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in everything)
    if not mapped and not recorded and not library.is_traced(everything):
        with torch.no_grad():
            return differentiate(problem, d_output, d_final)
    have = tuple(symbol in given for symbol in split.states)
    cotangents = [given[symbol] for symbol in split.states if symbol in given]
    found = Gradient.apply(split, have, True, d_output, *cotangents, *tensors)  # type: ignore[no-untyped-call]
    fields = dict(zip(split.fields, found, strict=False))
    initial = dict(zip(split.symbols, found[len(split.fields) :], strict=True))
    log_decay, scale = fields.get("log_decay"), fields.get("scale")
    return ProblemGradients(fields["q"], fields["k"], fields["v"], log_decay, initial, scale)


def _refused(what: str) -> BackendUnsupportedError:
    return BackendUnsupportedError(
        message("backend", "first derivatives in reverse mode from triton", what, 'Use backend="torch" for these.')
    )


class Operator(torch.autograd.Function):
    """(split, *tensors) → (output, *final states)."""

    @staticmethod
    def forward(split: Split, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Output, and states where the caller wants them."""
        return library.run(split, tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Inputs only: the rest is computed again."""
        split, *tensors = inputs
        ctx.split, ctx.shape = split, output[0].shape
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, d_output: Tensor | None, *d_states: Tensor | None) -> tuple[Any, ...]:
        """By `Gradient`."""
        tensors = ctx.saved_tensors
        if d_output is None:
            d_output = tensors[2].new_zeros(()).expand(ctx.shape)
        given = [d for d in d_states if d is not None]
        have = tuple(d is not None for d in d_states)
        rate = "log_decay" in ctx.split.fields and ctx.needs_input_grad[1 + ctx.split.fields.index("log_decay")]
        found = Gradient.apply(ctx.split, have, rate, d_output, *given, *tensors)  # type: ignore[no-untyped-call]
        wanted = zip(tensors, found, ctx.needs_input_grad[1:], strict=True)
        return (None, *(d if x.is_floating_point() and needed else None for x, d, needed in wanted))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """Refused."""
        raise _refused("a forward-mode derivative (jvp)")

    @staticmethod
    def vmap(info: Any, dims: tuple[Any, ...], split: Split, *tensors: Tensor) -> tuple[Any, Any]:
        """The mapped axis as one more batch axis."""
        rank = _rank(tensors, dims[1:], split)
        moved = _mapped(split, tensors, dims[1:], info.batch_size, rank)
        found = Operator.apply(split, *moved)  # type: ignore[no-untyped-call]
        return _unmapped(split, found, info.batch_size, rank)


class Gradient(torch.autograd.Function):
    """(split, which states have cotangents, whether that of log-decays is wanted, cotangents, tensors) → gradients of
    the tensors, zeros for those that have none."""

    @staticmethod
    def forward(
        split: Split, have: tuple[bool, ...], rate: bool, d_output: Tensor, *rest: Tensor
    ) -> tuple[Tensor, ...]:
        """The ordinary gradient."""
        count = sum(have)
        return library.pull(split, have, rate, (d_output, *rest[:count]), rest[count:])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Nothing is kept."""

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        """Refused."""
        raise _refused("a gradient of a gradient (create_graph=True)")

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        """Refused."""
        raise _refused("a forward-mode derivative of a gradient")

    @staticmethod
    def vmap(
        info: Any,
        dims: tuple[Any, ...],
        split: Split,
        have: tuple[bool, ...],
        rate: bool,
        d_output: Tensor,
        *rest: Tensor,
    ) -> tuple[Any, Any]:
        """The mapped axis as one more batch axis of everything."""
        count, size = sum(have), info.batch_size
        tensors, axes = rest[count:], dims[4 + count :]
        rank = _rank(tensors, axes, split)
        # every tensor gets the axis: a gradient may differ along it where the tensor does not
        spread = [
            x if axis is not None else x.unsqueeze(0).expand(size, *x.shape)
            for x, axis in zip(tensors, axes, strict=True)
        ]
        moved = _mapped(split, spread, [0 if axis is None else axis for axis in axes], size, rank)
        d_output = _led(d_output, dims[3], size, rank)
        d_states = [
            _led_state(split, d, axis, size, rank) for d, axis in zip(rest[:count], dims[4 : 4 + count], strict=True)
        ]
        found = Gradient.apply(split, have, rate, d_output, *d_states, *moved)  # type: ignore[no-untyped-call]
        packed = split.packed
        result = []
        for i, (d, x, axis) in enumerate(zip(found, tensors, axes, strict=True)):
            if i >= len(split.fields) and packed:
                d = d.movedim(1, 0)
            shape = [n for a, n in enumerate(x.shape) if a != axis] if axis is not None else list(x.shape)
            result.append(d.reshape(size, *shape))
        return tuple(result), (0,) * len(result)


def _logical(x: Tensor, axis: Any) -> int:
    return x.ndim - (axis is not None)


def _rank(tensors: Any, axes: Any, split: Split) -> int:
    """The most batch axes of a tensor, not counting the mapped one nor that of packed sequences."""
    found = []
    for i, (x, axis) in enumerate(zip(tensors, axes, strict=True)):
        extra = 1 if split.packed and i >= len(split.fields) else 0
        found.append(max(0, _logical(x, axis) - _OWN_AXES - extra))
    return max(found)


def _led(x: Tensor, axis: Any, size: int, rank: int) -> Tensor:
    """A tensor with the mapped axis in front of `rank` batch axes; without it, as it was."""
    if axis is None:
        return x
    x = x.movedim(axis, 0)
    missing = rank + _OWN_AXES - (x.ndim - 1)
    return x.reshape(size, *(1,) * missing, *x.shape[1:])


def _led_state(split: Split, x: Tensor, axis: Any, size: int, rank: int) -> Tensor:
    if not split.packed or axis is None:
        return _led(x, axis, size, rank)
    x = x.movedim(axis, 0)  # (size, N, *b, ·, ·)
    count, missing = x.shape[1], rank + _OWN_AXES - (x.ndim - 2)
    return x.movedim(1, 0).reshape(count, size, *(1,) * missing, *x.shape[2:])


def _mapped(split: Split, tensors: Any, axes: Any, size: int, rank: int) -> list[Tensor]:
    moved = []
    for i, (x, axis) in enumerate(zip(tensors, axes, strict=True)):
        moved.append(_led_state(split, x, axis, size, rank) if i >= len(split.fields) else _led(x, axis, size, rank))
    return moved


def _unmapped(split: Split, found: tuple[Tensor, ...], size: int, rank: int) -> tuple[Any, Any]:
    """Results with the mapped axis in front; what lacks it does not depend on it."""
    results, axes = [], []
    for i, x in enumerate(found):
        packed = split.packed and i > 0
        own = x.ndim - _OWN_AXES - packed
        has = own > rank
        results.append(x.movedim(1, 0) if packed and has else x)
        axes.append(0 if has else None)
    return tuple(results), tuple(axes)


def _mapped_triton(info: Any, dims: Any, tensors: list[Tensor], how: str) -> tuple[Any, Any]:
    split, size = library.read(how, tensors)[1], info.batch_size
    rank = _rank(tensors, dims[0], split)
    found = torch.ops.hla.triton(_mapped(split, tensors, dims[0], size, rank), how)
    results, axes = _unmapped(split, found, size, rank)
    return list(results), list(axes)


torch.library.register_vmap("hla::triton", _mapped_triton, lib=library.registered)

"""Operators under torch.compile and torch.export: one opaque operation for a whole call.

A loop over chunks would be unrolled into the program, and the checks are Python that a tracer cannot follow. So a call
becomes the custom op ``hla::operator``, whose kernel is the ordinary eager call: whatever T, the program holds one
node, and the backend is chosen when it runs. Its derivative is ``hla::gradient``, the ordinary `hla.vjp`.

Where the traced code is itself transformed (`torch.func`, forward mode) and for `step`, whose few operations a compiler
fuses, the call is traced through instead, as plain operations.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import torch
import torch._dynamo
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.symbolic_shapes import guard_scalar

from hla import arrays, ops
from hla.backends import selection
from hla.checks import Checked, check_call, spec_of
from hla.differentiation import Gradients, input_gradients
from hla.family import Spec
from hla.options import Options, read_options
from hla.states import State, state_type, to_arrays
from hla.streaming import take_step


def call(operator: str, q: Tensor, k: Tensor, v: Tensor, given: dict[str, Any], order: int | None) -> Any:
    """An operator's call while a tracer watches: this function's own Python is traced, so it is kept plain."""
    tensors, how = _flatten(operator, (q, k, v), given, order)
    if _transform() is None and forward_ad._current_level < 0:
        found = torch.ops.hla.operator(tensors, how)
    else:
        found = _traced_operator(tensors, how)
    if not given.get("return_state", False):
        return found[0]
    output, *fields = found
    return output, _STATES[_remember_state(how)](*fields)


def step(state: State, tokens: tuple[Tensor, Tensor, Tensor], given: dict[str, Any]) -> tuple[Tensor, State]:
    """A decode step while a tracer watches."""
    tensors, how = _flatten("", tokens, {**given, "initial_state": state}, None)
    output, *fields = _traced_step(tensors, how)
    return output, state if given.get("inplace", False) else type(state)(*fields)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _transform() -> str | None:
    """The `torch.func` transformation around the traced code, if any."""
    level = torch._C._functorch.peek_interpreter_stack()
    return None if level is None else str(level.key())


def _flatten(
    operator: str, inputs: tuple[Tensor, Tensor, Tensor], given: dict[str, Any], order: int | None
) -> tuple[list[Tensor], str]:
    """A call as a list of tensors and a literal that says what they are, and all the rest."""
    tensors: list[Tensor] = list(inputs)
    roles: list[tuple[str, str | None, int]] = []
    fixed: list[tuple[str, Any]] = []
    for name, value in given.items():
        if isinstance(value, Tensor):
            roles.append((name, None, 1))
            tensors.append(value)
        elif isinstance(value, tuple) and hasattr(value, "label"):
            roles.append((name, value.label, len(value)))
            tensors.extend(value)
        elif arrays.is_array(value):  # NumPy's, taken as host data
            roles.append((name, None, 1))
            tensors.append(torch.as_tensor(value, device=inputs[2].device))
        else:
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                value = guard_scalar(value)  # a tracer may keep it open; this fixes it
            fixed.append((name, value))
    if order is not None:
        order = guard_scalar(order)  # type: ignore[assignment]
    return tensors, repr((operator, order, tuple(roles), tuple(fixed)))


class _Call:
    """What `_flatten` took apart."""

    def __init__(self, tensors: list[Tensor], how: str) -> None:
        self.operator, self.order, roles, fixed = ast.literal_eval(how)
        self.inputs, rest = tensors[:3], tensors[3:]
        self.options: dict[str, Any] = dict(fixed)
        self.names = ["q", "k", "v"]
        for name, label, count in roles:
            part, rest = rest[:count], rest[count:]
            self.names += [name] * count
            self.options[name] = part[0] if label is None else _class_of(label)(*part)

    def checked(self) -> tuple[Checked, Options]:
        options = read_options(self.operator, self.options)
        q, k, v = self.inputs
        return check_call(self.operator, q, k, v, options, self.order), options

    def gradients_like(self, found: Gradients) -> Iterator[Tensor | None]:
        """The gradients in the order of the tensors; None for those that have none."""
        parts = {name: iter(x if isinstance(x, tuple) else (x,)) for name, x in found._asdict().items()}
        return (next(parts[name]) if name in parts else None for name in self.names)


_STATES: dict[str, Any] = {}
"""Classes of states by label: a tracer follows a class only to a place where it can look it up again."""


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _remember_state(how: str) -> str:
    """The key in `_STATES` of the state that a call returns."""
    operator, order, _, fixed = ast.literal_eval(how)
    made = state_type(spec_of(operator, read_options(operator, dict(fixed)), order))
    _STATES[made.label] = made
    label: str = made.label
    return label


def _class_of(label: str) -> Any:
    return state_type(Spec(*ast.literal_eval(label)))


def _fields(found: Any) -> list[Tensor]:
    """Output, or output and state, as tensors that lie in one piece."""
    output, state = found if isinstance(found, tuple) else (found, ())
    return [x.contiguous() for x in (output, *state)]


@torch.library.custom_op("hla::operator", mutates_args=())
def _operator(tensors: list[Tensor], how: str) -> list[Tensor]:
    with torch.no_grad():
        return _fields(ops.execute(*_Call(tensors, how).checked()))


@_operator.register_fake
def _(tensors: list[Tensor], how: str) -> list[Tensor]:
    checked, _options = _Call(tensors, how).checked()
    problem = checked.problem
    output = problem.v.new_empty((*checked.batch, problem.length, problem.v.shape[-1]))
    output = output.moveaxis(-2, checked.axis).contiguous()
    if not checked.return_state:
        return [output]
    states = {s: problem.v.new_empty(shape, dtype=problem.dtype) for s, shape in problem.shapes().state.items()}
    if problem.cu_seqlens is not None:
        rank, count = len(checked.batch) + 2, len(problem.cu_seqlens) - 1
        states = {s: x.expand(count, *(1,) * (rank - x.ndim), *x.shape) for s, x in states.items()}
    return _fields((output, ops.finish_states(checked, states)))


@torch.library.custom_op("hla::gradient", mutates_args=())
def _gradient(tensors: list[Tensor], cotangents: list[Tensor], how: str) -> list[Tensor]:
    called = _Call(tensors, how)
    with torch.no_grad():
        checked, options = called.checked()
        problem = checked.problem
        backend = selection.resolve(selection.call_of(problem, checked.form), options.backend, gradient=True)
        d_state = None
        if checked.return_state:
            d_state = to_arrays(state_type(problem.program.spec)(*cotangents[1:]))
        found = input_gradients(checked, options, backend, cotangents[0], d_state)
        made = zip(tensors, called.gradients_like(found), strict=True)
        return [torch.empty_like(x) if d is None else d.contiguous().clone() for x, d in made]


@_gradient.register_fake
def _(tensors: list[Tensor], cotangents: list[Tensor], how: str) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in tensors]


def _setup_context(ctx: Any, inputs: tuple[list[Tensor], str], output: list[Tensor]) -> None:
    tensors, ctx.how = inputs
    ctx.save_for_backward(*tensors)
    ctx.results = [(x.shape, x.dtype, x.device) for x in output]


def _backward(ctx: Any, d_outputs: list[Tensor | None]) -> tuple[list[Tensor | None], None]:
    cotangents = [
        torch.zeros(shape, dtype=dtype, device=device) if d is None else d
        for d, (shape, dtype, device) in zip(d_outputs, ctx.results, strict=True)
    ]
    tensors = list(ctx.saved_tensors)
    found = torch.ops.hla.gradient(tensors, cotangents, ctx.how)
    return [d if x.is_floating_point() else None for x, d in zip(tensors, found, strict=True)], None


_operator.register_autograd(_backward, setup_context=_setup_context)


def _run_traced(tensors: list[Tensor], how: str) -> tuple[Tensor, ...]:
    return tuple(_fields(ops.execute(*_Call(tensors, how).checked())))


def _step_traced(tensors: list[Tensor], how: str) -> tuple[Tensor, ...]:
    called = _Call(tensors, how)
    options = dict(called.options)
    q, k, v = called.inputs
    output, state = take_step(options.pop("initial_state"), q, k, v, options)
    return (output,) if options.get("inplace", False) else (output, *state)


_traced_operator = torch._dynamo.allow_in_graph(_run_traced)  # type: ignore[no-untyped-call]
_traced_step = torch._dynamo.allow_in_graph(_step_traced)  # type: ignore[no-untyped-call]

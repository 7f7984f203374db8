"""Operators under torch.compile and torch.export: one opaque operation for a whole call.

A loop over chunks would be unrolled into the program, and the checks are Python that a tracer cannot follow. So a call
becomes the custom op ``hla::operator``, whose kernel is the ordinary eager call: whatever T, the program holds one
node, and the backend is chosen when it runs. Its derivative is ``hla::gradient``, the ordinary `hla.vjp`.

Where the traced code is itself transformed (`torch.func`, forward mode) and for `step`, whose few operations a compiler
fuses, the call is traced through instead, as plain operations. So is an exported program that is transformed later.
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
from hla.family import Spec, program, shapes
from hla.options import Options, read_options
from hla.states import State, is_mass, state_type, to_arrays
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
    return output, getattr(_States, _remember_state(how))(*fields)


def step(state: State, tokens: tuple[Tensor, Tensor, Tensor], given: dict[str, Any]) -> tuple[Tensor, State]:
    """A decode step while a tracer watches."""
    tensors, how = _flatten("", tokens, {**given, "initial_state": state}, None)
    output, *fields = _traced_step(tensors, how)
    return output, state if given.get("inplace", False) else type(state)(*fields)


def init_state(
    operator: str,
    batches: tuple[Any, Any],
    sizes: tuple[int, int],
    like: Tensor,
    order: int | None,
    fixed: tuple[tuple[str, Any], ...],
) -> State:
    """`hla.init_state` while a tracer watches; `batches` are those of the state and of its key-only field."""
    how = repr((operator, _known(order), (), tuple((name, _known(value)) for name, value in fixed)))
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    fields = _state_shapes(how, *map(_known, sizes))
    zeros = [like.new_zeros((*batches[kind], *shape), dtype=dtype) for kind, shape in fields]
    return getattr(_States, _remember_state(how))(*zeros)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _state_shapes(how: str, d: int, dv: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Of every field of a state, whether it is the key-only one, and its axes behind the batch."""
    operator, order, _, fixed = ast.literal_eval(how)
    made = program(spec_of(operator, read_options(operator, dict(fixed)), order))
    natural = shapes(made, (), (), (), d, dv).state
    return tuple((int(s == "S"), natural[s][:1] if is_mass(s) else natural[s]) for s in natural)


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
            fixed.append((name, _known(value)))
    return tensors, repr((operator, _known(order), tuple(roles), tuple(fixed)))


def _known(value: Any) -> Any:
    """A number that a tracer may keep open, fixed."""
    return guard_scalar(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else value


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


class _States:
    """Classes of states as attributes, by label: a tracer follows a class only to where it can look it up again.

    No dictionary: a tracer reads all of it at the first look, and does not see what a later call of the program adds.
    """


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _remember_state(how: str) -> str:
    """The name in `_States` of the state that a call returns."""
    operator, order, _, fixed = ast.literal_eval(how)
    made = state_type(spec_of(operator, read_options(operator, dict(fixed)), order))
    setattr(_States, made.label, made)
    label: str = made.label
    return label


def _class_of(label: str) -> Any:
    return state_type(Spec(*ast.literal_eval(label)))


def _fields(found: Any) -> list[Tensor]:
    """Output, or output and state, as tensors that lie in one piece."""
    output, state = found if isinstance(found, tuple) else (found, ())
    return [x.contiguous() for x in (output, *state)]


def _run_operator(tensors: list[Tensor], how: str) -> list[Tensor]:
    with torch.no_grad():
        return _fields(ops.execute(*_Call(tensors, how).checked()))


def _fake_operator(tensors: list[Tensor], how: str) -> list[Tensor]:
    checked, _options = _Call(tensors, how).checked()
    problem = checked.problem
    output = problem.v.new_empty((*checked.batch, problem.length, problem.v.shape[-1]))
    output = output.moveaxis(-2, checked.axis).contiguous()
    if not checked.return_state:
        return [output]
    final = {s: problem.v.new_empty(shape, dtype=problem.dtype) for s, shape in problem.shapes().state.items()}
    if problem.cu_seqlens is not None and problem.initial is None:  # initial states have the axis N already
        rank, count = len(checked.batch) + 2, len(problem.cu_seqlens) - 1
        final = {s: x.expand(count, *(1,) * (rank - x.ndim), *x.shape) for s, x in final.items()}
    return _fields((output, ops.finish_states(checked, final)))


def _pull(tensors: list[Tensor], cotangents: list[Tensor], how: str) -> list[Tensor]:
    called = _Call(tensors, how)
    checked, options = called.checked()
    problem = checked.problem
    backend = selection.resolve(selection.call_of(problem, checked.form), options.backend, gradient=True)
    d_state = None
    if checked.return_state:
        d_state = to_arrays(state_type(problem.program.spec)(*cotangents[1:]))
    found = input_gradients(checked, options, backend, cotangents[0], d_state)
    made = zip(tensors, called.gradients_like(found), strict=True)
    return [torch.zeros_like(x) if d is None else d.contiguous().clone() for x, d in made]


def _run_gradient(tensors: list[Tensor], cotangents: list[Tensor], how: str) -> list[Tensor]:
    with torch.no_grad():
        return _pull(tensors, cotangents, how)


def _fake_gradient(tensors: list[Tensor], cotangents: list[Tensor], how: str) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in tensors]


class _Node(torch.autograd.Function):
    """``hla::operator`` in torch's graph."""

    @staticmethod
    def forward(ctx: Any, how: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.how = how
        ctx.save_for_backward(*tensors)
        with torch._C._AutoDispatchBelowAutograd():
            return tuple(torch.ops.hla.operator(list(tensors), how))

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        tensors = list(ctx.saved_tensors)
        found = torch.ops.hla.gradient(tensors, list(cotangents), ctx.how)
        return None, *(d if x.is_floating_point() else None for x, d in zip(tensors, found, strict=True))


def _is_transformed(tensors: list[Tensor]) -> bool:
    """Whether a `torch.func` transformation or forward mode follows the tensors, which a node would lose."""
    if torch._C._are_functorch_transforms_active():
        return True
    if forward_ad._current_level < 0:
        return False
    return any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)  # type: ignore[no-untyped-call]


def _is_recorded(tensors: list[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _derive_operator(tensors: list[Tensor], how: str) -> list[Tensor]:
    if _is_transformed(tensors):
        return list(_run_traced(tensors, how))
    if _is_recorded(tensors):
        return list(_Node.apply(how, *tensors))  # type: ignore[no-untyped-call]
    with torch._C._AutoDispatchBelowAutograd():
        found: list[Tensor] = torch.ops.hla.operator(tensors, how)
    return found


def _derive_gradient(tensors: list[Tensor], cotangents: list[Tensor], how: str) -> list[Tensor]:
    both = [*tensors, *cotangents]
    if _is_transformed(both) or _is_recorded(both):
        return _pull(tensors, cotangents, how)
    with torch._C._AutoDispatchBelowAutograd():
        found: list[Tensor] = torch.ops.hla.gradient(tensors, cotangents, how)
    return found


_library = torch.library.Library("hla", "FRAGMENT")  # type: ignore[no-untyped-call]
for _schema, _run, _fake, _derive in (
    ("operator(Tensor[] tensors, str how) -> Tensor[]", _run_operator, _fake_operator, _derive_operator),
    (
        "gradient(Tensor[] tensors, Tensor[] cotangents, str how) -> Tensor[]",
        _run_gradient,
        _fake_gradient,
        _derive_gradient,
    ),
):
    _name: str = _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    _library.impl(_name, torch._dynamo.disable(_run), "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    _library.impl(_name, _derive, "Autograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"hla::{_name}", _fake, lib=_library)


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

"""Under torch.compile: one opaque operation for a whole call, as for the operators themselves.

``hla::shared`` is the call with its exchanges, and returns beside the results what this rank has heard from the others.
``hla::shared_gradient`` runs the call again with that at hand, so that forward exchanges are made once, and pulls back.
"""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import Any, cast

import torch
import torch._dynamo
from torch import Tensor
from torch.distributed import ProcessGroup, distributed_c10d

from hla.backends.torch import compilation as whole
from hla.checks import check_call
from hla.distributed.rounds import rounds
from hla.distributed.torch.exchange import Exchanges
from hla.distributed.torch.groups import Place
from hla.distributed.torch.operators import Call, Session, Sharing, begin
from hla.distributed.torch.sums import decay_shape, field_shapes
from hla.distributed.torch.waiting import heard
from hla.family import steps
from hla.options import read_options
from hla.rules import RHO


def call(
    function: str, q: Tensor, k: Tensor, v: Tensor, given: dict[str, Any], sharing: Sharing, order: int | None
) -> Any:
    """An operator's call while a tracer watches: this function's own Python is traced, so it is kept plain."""
    tensors, how = whole._flatten(function, (q, k, v), given, order)
    name, rank, size = _place(sharing.group)
    found = torch.ops.hla.shared(tensors, how, name, size, rank, sharing.method, repr(sharing.check))
    if not given.get("return_state", False):
        return found[0]
    label = whole._remember_state(how)
    made = getattr(whole._States, label)
    return found[0], made(*found[1 : 1 + len(made._fields)])


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _place(group: Any) -> tuple[str, int, int]:
    with heard():
        place = Place.of(group)
    return place.group.group_name, place.rank, place.size


class Taped:
    """A place that writes down what it hears, or reads it from there as long as there is any."""

    def __init__(self, place: Place, heard: list[Tensor] | None) -> None:
        self.group, self.rank, self.size = place
        self._place, self._replay = place, None if heard is None else list(heard)
        self.heard: list[Tensor] = []

    def gather(self, x: Tensor) -> Tensor:
        """As `Place.gather`."""
        if self._replay:
            return self._replay.pop(0)
        found = self._place.gather(x).clone()
        self.heard.append(found)
        return found


def _call(
    tensors: list[Tensor], how: str, place: Place, method: str, check: str, heard: list[Tensor] | None
) -> tuple[list[Tensor], list[Tensor]]:
    """Results, and what has been heard: the lengths of slices first, where they are needed."""
    made = whole._Call(tensors, how)
    q, k, v = made.inputs
    if heard is None:
        sharing = Sharing(None, method, ast.literal_eval(check))
        found, session = begin(place, made.operator, q, k, v, made.options, sharing, made.order)
        lengths = session.lengths
    else:
        options = read_options(made.operator, made.options)
        found, lengths = Call(place, made.operator, q, k, v, options, method, made.order), None
        if found.offsets is not None:
            lengths, heard = tuple(heard[0].tolist()), heard[1:]
    taped = Taped(place, heard)
    found.place = cast(Place, taped)
    results = found.run(Session(found.place, Exchanges(found.place, v.device, torch.is_grad_enabled()), lengths))
    told = taped.heard
    if found.offsets is not None:
        told = [torch.tensor(lengths, device=v.device), *told]
    output, state = results if found.options.return_state else (results, ())
    return [output, *state], told


def _run(tensors: list[Tensor], how: str, name: str, size: int, rank: int, method: str, check: str) -> list[Tensor]:
    with torch.no_grad():
        results, told = _call(tensors, how, Place(_group(name), rank, size), method, check, None)
    return [x.contiguous().clone() for x in (*results, *told)]


def _group(name: str) -> ProcessGroup:
    resolve: Any = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    found: ProcessGroup = resolve(name)
    return found


def _fake(tensors: list[Tensor], how: str, name: str, size: int, rank: int, method: str, check: str) -> list[Tensor]:
    made = whole._Call(tensors, how)
    options = read_options(made.operator, made.options)
    q, k, v = made.inputs
    by_sequence = options.cu_seqlens is not None and (options.return_state or options.initial_state is not None)
    own = options if by_sequence else replace(options, cu_seqlens=None)
    checked = check_call(made.operator, q, k, v, own, made.order)
    problem = checked.problem
    found = whole._fake_operator(tensors, how)
    if options.cu_seqlens is not None:
        found.append(v.new_empty((size,), dtype=torch.int64))
        if not by_sequence:
            problem = replace(problem, starts=v.new_empty((problem.length, 1), dtype=torch.bool))
    if options.segment_ids is not None:
        assert problem.starts is not None
        batch = torch.Size(problem.starts.shape[:-2]).numel()
        found.append(v.new_empty((size, 2 * batch), dtype=torch.int64))
    if problem.program.spec.mask == "none":
        sizes = problem.shapes().state
        symbols = dict.fromkeys(symbol for symbol, _, _ in steps(problem.program))
        rows = [torch.Size(sizes[s]).numel() + 1 for s in symbols]
    else:
        rows = []
        for part, rule in rounds(problem.program.spec, method):
            fields = {RHO: decay_shape(problem), **field_shapes(problem, part)}
            rows.append(sum(torch.Size(fields[s]).numel() for s in (RHO, *rule.symbols)))
    count = len(cast(Tensor, options.cu_seqlens)) - 1 if by_sequence else 1
    return [*found, *(v.new_empty((size, n * count), dtype=problem.dtype) for n in rows)]


def _run_gradient(
    tensors: list[Tensor],
    heard: list[Tensor],
    cotangents: list[Tensor],
    how: str,
    name: str,
    size: int,
    rank: int,
    method: str,
) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() if x.is_floating_point() else x for x in tensors]
    with torch.enable_grad():
        results, _ = _call(leaves, how, Place(_group(name), rank, size), method, "False", heard)
        wanted = [x for x in leaves if x.requires_grad]
        found = iter(torch.autograd.grad(results, wanted, cotangents, allow_unused=True))
    made = [next(found) if x.requires_grad else None for x in leaves]
    return [torch.zeros_like(x) if d is None else d.contiguous().clone() for x, d in zip(tensors, made, strict=True)]


def _fake_gradient(tensors: list[Tensor], heard: Any, cotangents: Any, *how: Any) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in tensors]


class _Node(torch.autograd.Function):
    """``hla::shared`` in torch's graph."""

    @staticmethod
    def forward(ctx: Any, count: int, how: tuple[Any, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.how, ctx.count = how, len(tensors)
        with torch._C._AutoDispatchBelowAutograd():
            found = tuple(torch.ops.hla.shared(list(tensors), *how))
        ctx.results = count
        ctx.save_for_backward(*tensors, *found[count:])
        ctx.mark_non_differentiable(*found[count:])
        return found

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:
        saved = list(ctx.saved_tensors)
        tensors, heard = saved[: ctx.count], saved[ctx.count :]
        how = ctx.how[:-1]
        found = torch.ops.hla.shared_gradient(tensors, heard, list(cotangents[: ctx.results]), *how)
        return None, None, *(d if x.is_floating_point() else None for x, d in zip(tensors, found, strict=True))


def _derive(tensors: list[Tensor], *how: Any) -> list[Tensor]:
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        _, _, _, fixed = ast.literal_eval(how[0])
        count = 1
        if dict(fixed).get("return_state", False):
            count += len(getattr(whole._States, whole._remember_state(how[0]))._fields)
        return list(_Node.apply(count, how, *tensors))  # type: ignore[no-untyped-call]
    with torch._C._AutoDispatchBelowAutograd():
        found: list[Tensor] = torch.ops.hla.shared(tensors, *how)
    return found


_library = torch.library.Library("hla", "FRAGMENT")  # type: ignore[no-untyped-call]
_HOW = "str how, str name, int size, int rank, str method"
for _schema, _kernel, _shape in (
    (f"shared(Tensor[] tensors, {_HOW}, str check) -> Tensor[]", _run, _fake),
    (
        f"shared_gradient(Tensor[] tensors, Tensor[] heard, Tensor[] cotangents, {_HOW}) -> Tensor[]",
        _run_gradient,
        _fake_gradient,
    ),
):
    _name: str = _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    _library.impl(_name, torch._dynamo.disable(_kernel), "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"hla::{_name}", _shape, lib=_library)
_library.impl("shared", _derive, "Autograd")  # type: ignore[no-untyped-call]

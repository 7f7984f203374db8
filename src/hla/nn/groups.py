"""How a layer's heads are computed together, and what its state must look like; for layers of any framework."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from hla.errors import DTypeError, message
from hla.family import Spec
from hla.nn.kinds import Kind
from hla.nn.options import HeadGroup, LayerOptions
from hla.nn.refusals import other_layer
from hla.states import describe_spec

Runs = tuple[tuple[int, int], ...]
"""Indices as (start, count) of consecutive ones: slices, where an index array would be a copy to the device."""


class Field(NamedTuple):
    """A field of an operator's state: its name, whether it is stored once per key/value head, its last axes."""

    name: str
    keys_only: bool
    axes: tuple[int, ...]


class Group(NamedTuple):
    """A group of heads as a layer needs it, and the state of its operator."""

    heads: Runs
    kv_heads: Runs
    per_kv_head: int
    spec: Spec | None
    """of its operator's states, None where not causal"""
    label: str
    """the same as text, which tracers take as a constant"""
    fields: tuple[Field, ...]


def describe(group: HeadGroup, empty: Any) -> Group:
    """The group, with an empty state of its operator for a batch of (1, 1, 1); None where not causal."""
    spec, label, fields = None, "", []
    if empty is not None:
        spec, label = empty.spec, empty.label
        fields = [Field(f, f == "key_moment", tuple(x.shape[3:])) for f, x in zip(empty._fields, empty, strict=True)]
    return Group(runs(group.heads), runs(group.kv_heads), group.per_kv_head, spec, label, tuple(fields))


def runs(indices: tuple[int, ...]) -> Runs:
    """Indices as runs of consecutive ones."""
    found: list[tuple[int, int]] = []
    for i in indices:
        if found and sum(found[-1]) == i:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((i, 1))
    return tuple(found)


def back_in_order(options: LayerOptions) -> Runs:
    """Where each head is among the heads of all groups, one group after another."""
    order = [head for group in options.groups() for head in group.heads]
    return runs(tuple(sorted(range(len(order)), key=order.__getitem__)))


def check_state(
    state: Any,
    kind: type,
    owner: Kind,
    options: LayerOptions,
    groups: tuple[Group, ...],
    batch: int,
    check_field: Callable[[str, Any, tuple[int, ...]], None],
) -> None:
    """Errors unless `state` is a `kind` of a layer like this, its `owner`; `check_field` takes a name, an array and its
    shape."""
    if not isinstance(state, kind):
        name, got = kind.__name__, type(state).__name__
        if got == name:
            name, got = (f"{name} of {x.__module__}" for x in (kind, type(state)))
        raise DTypeError(
            message(
                "state",
                f"a {name}",
                got,
                "One comes from return_state=True or init_state(batch); q, k and v are made of x.",
            )
        )
    given: Any = state
    owner.check(given.operators)
    for i, (group, found) in enumerate(zip(groups, given.operators, strict=True)):
        if getattr(type(found), "label", None) != group.label:
            assert group.spec is not None
            other = getattr(type(found), "spec", None)
            got = type(found).__name__ if other is None else describe_spec(other)
            raise other_layer(f"state.operators[{i}]", f"that of {describe_spec(group.spec)}", got)
    for group, found in zip(groups, given.operators, strict=True):
        kv_heads = sum(count for _, count in group.kv_heads)
        for field, x in zip(group.fields, found, strict=True):
            check_field(field.name, x, (batch, kv_heads, 1 if field.keys_only else group.per_kv_head, *field.axes))
    widths = () if options.conv_size is None else options.widths()
    if len(given.windows) != len(widths):
        told = f"{len(widths)}, as conv_size = {options.conv_size}"
        raise other_layer("state.windows", told, len(given.windows))
    for window, width in zip(given.windows, widths, strict=True):
        check_field("windows", window, (batch, (options.conv_size or 1) - 1, width))
    check_field("position", given.position, (batch,))

"""Whose a state is: the part of a layer's state whose class was made for the layer's options.

Two layers may have states of the same shapes and still mean other things by them: another decay, other positions,
another feature map. What tells them apart is in the type, so no array is read for it, and tracers, pytrees and devices
see tuples of arrays.
"""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, TypeAlias

from hla.nn.options import LayerOptions
from hla.nn.refusals import other_layer
from hla.states import one_class

Options: TypeAlias = tuple[tuple[str, Any], ...]
"""(name, value) of each."""

FREE = ("decay_range", "dropout", "form", "chunk_size", "backend")
"""Options that may differ between the layer that made a state and the one that goes on from it: where training starts,
and how the same numbers are computed."""


@dataclass(frozen=True)
class Kind:
    """What states of layers with certain options have in common: a named-tuple class of its own."""

    name: str
    fields: tuple[str, ...]
    options: Options
    type: Any = field(init=False, compare=False, repr=False)
    label: str = field(init=False, compare=False, repr=False)
    """the options as text, which tracers take as a constant"""

    def __post_init__(self) -> None:
        made = _tuple_type(self.name, self.fields, self.options)
        object.__setattr__(self, "type", made)
        object.__setattr__(self, "label", made.label)

    def __reduce__(self) -> tuple[Any, ...]:
        return Kind, (self.name, self.fields, self.options)

    def check(self, found: Any) -> None:
        """OptionError unless `found`, of a state, was made for these options."""
        if getattr(type(found), "label", None) == self.label:
            return
        others = dict(getattr(type(found), "options", ()))
        for option, value in self.options:
            if option in others and others[option] != value:
                raise other_layer("state", f"that of a layer with {option}={value!r}", f"{option}={others[option]!r}")
        raise other_layer("state", f"one with {self.name} that a layer has made", f"one with a {type(found).__name__}")


def kind_of(name: str, fields: tuple[str, ...], **options: Any) -> Kind:
    """Of a layer with these options."""
    return Kind(name, fields, tuple(options.items()))


def layer_kind(options: LayerOptions) -> Kind:
    """Of a `HigherOrderAttention`: a state for each of its groups of heads, named as its operator."""
    names: list[str] = []
    for group in options.groups():
        count = sum(name.split("_group_")[0] == group.operator for name in names)
        names.append(f"{group.operator}_group_{count + 1}" if count else group.operator)
    told = {x.name: getattr(options, x.name) for x in fields(options) if x.name not in FREE}
    return kind_of("OperatorStates", tuple(names), **told)


def _tuple_type(name: str, names: tuple[str, ...], options: Options) -> Any:
    return one_class((name, names, options), partial(_make_type, name, names, options))


def _make_type(name: str, names: tuple[str, ...], options: Options) -> Any:
    make: Any = namedtuple
    made = make(name, names)
    made.options = options
    made.label = repr(options)
    made.__reduce__ = lambda self: (rebuild, (name, names, options, tuple(self)))
    made.__doc__ = f"{', '.join(names)} of a layer with {', '.join(f'{key}={value!r}' for key, value in options)}."
    made.__module__ = __name__
    return made


def rebuild(name: str, names: tuple[str, ...], options: Options, values: tuple[Any, ...]) -> Any:
    """What a pickle holds."""
    return _tuple_type(name, names, options)(*values)

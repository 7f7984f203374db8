"""A call on whole arrays, whose time axis is spread over a mesh: `jax.shard_map` around each device's part."""

from __future__ import annotations

import math
from dataclasses import fields
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from hla import arrays
from hla.checks import Checked, check_call
from hla.distributed.jax import slices
from hla.distributed.jax.slices import Call
from hla.errors import DTypeError, OptionError, ShapeError, message
from hla.options import Options

BY_TOKEN = ("log_decay", "token_mask", "segment_ids")
"""Options with time as their last axis."""
place: Any = PartitionSpec
reshard: Any = jax.sharding.reshard


class _Static(NamedTuple):
    """What of a call is part of the program: all that is no array."""

    call: Call
    mesh: Mesh
    options: tuple[tuple[str, Any], ...]
    axis: int
    """of time, from the end"""

    @property
    def names(self) -> tuple[Any, ...]:
        """The mesh axes that time is spread over."""
        name = self.call.axis_name
        return name if isinstance(name, tuple) else (name,)

    def spec(self, time: int | None) -> PartitionSpec:
        """Of an array with time on that axis."""
        spec: PartitionSpec = place() if time is None else place(*(None,) * time, self.call.axis_name)
        return spec


def run(call: Call, q: Any, k: Any, v: Any, options: Options, mesh: Any) -> Any:
    """Output, spread like the inputs, and the last state, on all devices."""
    if not isinstance(mesh, Mesh):
        raise OptionError(message("mesh", "a jax.sharding.Mesh", type(mesh).__name__, "Make one with jax.make_mesh."))
    for name in call.axis_name if isinstance(call.axis_name, tuple) else (call.axis_name,):
        if name not in mesh.axis_names:
            known = ", ".join(map(repr, mesh.axis_names))
            raise OptionError(message("axis_name", f"an axis of the mesh ({known})", repr(name), "Check the spelling."))
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, jax.Array):
            raise DTypeError(message(name, "a JAX array", type(x).__name__, "Convert it with jax.numpy.asarray."))
    data = {f.name: x for f in fields(options) if _is_data(x := getattr(options, f.name))}
    rest = {f.name: x for f in fields(options) if f.name not in data and (x := getattr(options, f.name)) != f.default}
    given = {"q": q, "k": k, "v": v, **data}
    checked = _check(call, given, rest)
    if isinstance(rest.get("backend"), list):
        rest["backend"] = tuple(rest["backend"])
    static = _Static(call, mesh, tuple(sorted(rest.items())), checked.axis)
    length, size = checked.problem.length, math.prod(mesh.shape[name] for name in static.names)
    if length % size:
        raise ShapeError(
            message(
                "q, k, v",
                f"a length that divides by the {size} devices along {call.axis_name!r}",
                f"T = {length}",
                "Append tokens that token_mask skips.",
            )
        )
    return _compiled(static)(given)


def _is_data(x: Any) -> bool:
    """Whether an option is an array, or a state."""
    return arrays.is_array(x) or (isinstance(x, tuple) and hasattr(x, "_fields"))


def _check(call: Call, given: dict[str, Any], rest: dict[str, Any]) -> Checked:
    """The checks of the contract, by whole arrays; nothing is computed."""
    at_hand = {n: x for n, x in given.items() if arrays.is_array(x) and arrays.family(x) == "numpy"}
    passed: list[Checked] = []

    def check(given: dict[str, Any]) -> None:
        given = given | at_hand  # these are checked by value
        q, k, v = (given.pop(name) for name in ("q", "k", "v"))
        passed.append(check_call(call.operator, q, k, v, Options(**rest, **given), call.order))

    jax.eval_shape(check, given)
    return passed[0]


@lru_cache(maxsize=256)
def _compiled(static: _Static) -> Any:
    fixed = dict(static.options)

    def own(given: dict[str, Any]) -> Any:
        given = dict(given)
        q, k, v = (given.pop(name) for name in ("q", "k", "v"))
        return slices.run(static.call, q, k, v, Options(**fixed, **given))

    def hla_over_devices(given: dict[str, Any]) -> Any:
        length = given["v"].shape[static.axis]

        def time(name: str, x: Any) -> int | None:
            if name in ("q", "k", "v"):
                return int(x.ndim + static.axis)
            return x.ndim - 1 if name in BY_TOKEN and x.ndim and x.shape[-1] == length else None

        specs = {name: static.spec(time(name, x)) for name, x in given.items()}
        rank = max(given[name].ndim for name in ("q", "k", "v"))
        out: Any = static.spec(rank + static.axis)
        mapped = jax.shard_map(
            own,
            mesh=static.mesh,
            in_specs=(specs,),
            out_specs=(out, static.spec(None)) if fixed.get("return_state") else out,
            axis_names=frozenset(static.names),
        )
        placed = {n: jax.tree.map(partial(_placed, static, specs[n]), x) for n, x in given.items()}
        return mapped(placed)

    return jax.jit(hla_over_devices)


def _placed(static: _Static, spec: PartitionSpec, x: Array) -> Array:
    """x spread as `spec` says, where the mesh's axes are explicit. Elsewhere XLA sees to it."""
    kinds = dict(zip(static.mesh.axis_names, static.mesh.axis_types, strict=True))
    explicit = {name for name, kind in kinds.items() if kind == AxisType.Explicit}
    if not explicit & set(static.names):
        return x
    parts = (part if isinstance(part, tuple) else (part,) for part in jax.typeof(x).sharding.spec)
    others = {name for part in parts for name in part} & explicit - set(static.names)
    if others:  # JAX 0.10 would gather these, and its gradient fails
        raise OptionError(
            message(
                "mesh",
                f"arrays spread over no explicit axis but {static.call.axis_name!r}",
                f"some over {', '.join(sorted(map(repr, others)))}",
                "Leave mesh out and call inside jax.shard_map over all axes.",
            )
        )
    placed: Array = reshard(x, NamedSharding(static.mesh, spec))
    return placed

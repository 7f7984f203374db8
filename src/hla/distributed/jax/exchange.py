"""What enters a slice: how the summaries of the slices before it come together, along a named axis of a mesh."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from hla.backends.jax.namespace import XP
from hla.errors import OptionError, message
from hla.problem import States
from hla.rules import RHO, Rule, combine_values

lax: Any = jax.lax


class Axis(NamedTuple):
    """The axis that time is spread over, seen from one of its devices."""

    name: Any
    size: int
    rank: Array

    @classmethod
    def called(cls, name: Any) -> Axis:
        """The axis of that name, or of several names, that surrounds this call."""
        try:
            return cls(name, int(lax.axis_size(name)), lax.axis_index(name))
        except (NameError, TypeError):
            raise OptionError(
                message(
                    "axis_name",
                    "a named axis that this call is mapped over",
                    f"{name!r}, which is none here",
                    "Call inside jax.shard_map over a mesh with that axis, or pass mesh=… with whole arrays.",
                )
            ) from None

    def spread(self, x: Array) -> Array:
        """x, as one that `jax.shard_map` takes to differ from device to device."""
        return jnp.where(self.rank >= 0, x, x)

    def from_before(self, x: Array, distance: int) -> Array:
        """What the device so many places before holds; zeros where there is none.

        All devices send, the last ones to the first: `jax.vmap` with a named axis takes no less.
        """
        pairs = [(i, (i + distance) % self.size) for i in range(self.size)]
        return jnp.where(self.rank < distance, jnp.zeros_like(x), lax.ppermute(x, self.name, pairs))

    def total(self, x: Array) -> Array:
        """The sum over all devices, the same on each."""
        return lax.psum(x, self.name)  # type: ignore[no-any-return]

    def last(self, x: Array) -> Array:
        """What the last device holds, on each."""
        return self.total(jnp.where(self.rank == self.size - 1, x, jnp.zeros_like(x)))


def gather(rule: Rule, own: States, initial: States, axis: Axis) -> States:
    """Every device gets all summaries, and moves the initial state past those before its own."""
    if axis.size == 1:
        return initial
    # Untiled, JAX 0.10 gets explicit axes wrong.
    summaries = {symbol: lax.all_gather(x[None], axis.name, tiled=True) for symbol, x in own.items()}

    def turn(carry: tuple[States, States], item: tuple[Array, States]) -> tuple[tuple[States, States], None]:
        states, entering = carry
        device, summary = item
        entering = {s: jnp.where(device == axis.rank, x, entering[s]) for s, x in states.items()}
        return (combine_values(XP, rule, states, summary, tuple(states)), entering), None

    found: tuple[tuple[States, States], None] = lax.scan(turn, (initial, initial), (jnp.arange(axis.size), summaries))
    return found[0][1]


def double(rule: Rule, own: States, initial: States, axis: Axis) -> States:
    """From the neighbour, then from 1, 2, 4, … devices before: the scan of Hillis and Steele.

    After n steps a device has the summary of 2ⁿ slices before its own. Where there is no device that far before are
    zeros: with ρ = 1 the summary of nothing.
    """
    if axis.size == 1:
        return initial

    def moved(values: States, distance: int) -> States:
        found = {symbol: axis.from_before(x, distance) for symbol, x in values.items()}
        found[RHO] = jnp.where(axis.rank < distance, jnp.ones_like(found[RHO]), found[RHO])
        return found

    before, distance = moved(own, 1), 1
    while distance < axis.size - 1:
        before = combine_values(XP, rule, moved(before, distance), before, rule.symbols)
        distance *= 2
    return combine_values(XP, rule, initial, before, tuple(initial))


EXCHANGES = {"gather": gather, "doubling": double}

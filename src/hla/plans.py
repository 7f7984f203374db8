"""Decode steps without repeating their checks.

A step is a few small operations; checking and dispatching a call costs several times as much. What the checks found
depends only on types, shapes, dtypes, devices, plain options and the backend in force, so it is kept under these: a
step like an earlier one goes straight to the arithmetic.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from hla import arrays
from hla.arrays import Array, Namespace, cast, undisturbed
from hla.backends import Backend, selection
from hla.checks import Checked
from hla.family import Program
from hla.problem import combine_reads
from hla.recurrent import token
from hla.states import State, from_arrays, to_arrays

_LIMIT = 1024
_plans: dict[Any, Plan] = {}


class Plan(NamedTuple):
    """What is left to do in a step whose checks have passed before."""

    program: Program
    dtype: Any
    """of states and arithmetic"""
    output: Any
    """dtype of the output"""
    casts: bool
    """whether inputs come in another dtype"""
    keeping: Namespace
    overwriting: Namespace
    writes: bool
    """whether the state may be overwritten as the step goes: not where a read looks at the state before the token"""
    decay: float | None
    """a constant one"""
    scale: float
    eps: float
    ridge: float

    def run(self, state: State, q_t: Array, k_t: Array, v_t: Array, given: dict[str, Any]) -> tuple[Array, State]:
        """The step; in place, what could not be overwritten as it went is copied at the end."""
        with undisturbed(self.keeping, v_t):
            inplace: bool = given.get("inplace", False)
            writes = inplace and self.writes
            xp = self.overwriting if writes else self.keeping
            q, k, v = q_t[..., None, :], k_t[..., None, :], v_t[..., None, :]
            if self.casts:
                q, k, v = (cast(xp, x, self.dtype) for x in (q, k, v))
            if self.scale != 1.0:
                q = q * self.scale
            streams = {"q": q, "k": k, "v": v}
            if self.program.denominator:
                streams["one"] = xp.ones_like(v[..., :1])
            decay: Any = self.decay
            log_decay = given.get("log_decay")
            if log_decay is not None:
                decay = xp.exp(cast(xp, log_decay, self.dtype))[..., None, None]
            elif decay is None and given.get("decay") is not None:
                decay = cast(xp, given["decay"], self.dtype)[..., None, None]
            before = to_arrays(state)
            after = token(xp, self.program, decay, None, before, streams, log_decay is not None, spare=writes)
            output = combine_reads(self.program, streams, self.ridge, self.eps)[..., 0, :]
            output = cast(xp, output, self.output)
            if not inplace:
                return output, from_arrays(self.program.spec, after)
            for symbol, x in after.items():
                if x is not before[symbol]:
                    before[symbol][...] = x
            return output, state


def signature(state: State, q_t: Array, k_t: Array, v_t: Array, given: dict[str, Any]) -> Any:
    """What the checks of a step depend on, as a key; None where that is more than a key can hold."""
    try:
        return _signature(state, q_t, k_t, v_t, given)
    except (AttributeError, TypeError):  # no arrays, no state: the checks will say so
        return None


def _signature(state: State, q_t: Array, k_t: Array, v_t: Array, given: dict[str, Any]) -> Any:
    library = arrays.family(v_t)
    # A value of another type, a tracer or a fake one say, has another key.
    if library not in ("torch", "numpy") or (library == "torch" and arrays.is_transformed()):
        return None
    parts: list[Any] = [type(state), selection.in_force(given.get("backend"))]
    for x in (q_t, k_t, v_t, *state):
        parts += (type(x), x.shape, x.dtype)
        if library == "torch":
            parts += (x.device, x.requires_grad)
    if given.get("inplace") is True:
        parts += map(arrays.writability, state)
    for name, value in given.items():
        if hasattr(value, "shape"):
            if name not in ("decay", "log_decay") or library != "torch" or arrays.family(value) != "torch":
                return None  # read by value, or rare
            parts += (name, value.shape, value.dtype, value.device, value.requires_grad)
        elif name != "backend":
            parts += (name, type(value), value)
    return tuple(parts)


def find(key: Any) -> Plan | None:
    """The plan kept under a key."""
    try:
        return None if key is None else _plans.get(key)
    except TypeError:  # an option that has no hash: an error, which the checks will explain
        return None


def chosen(key: Any, argument: Any) -> Any:
    """The selection that a key holds: the one in force may have changed since, in another thread."""
    return argument if key is None else key[1][0] or "auto"


def keep(key: Any, checked: Checked, backend: Backend, state: State, following: State, given: dict[str, Any]) -> None:
    """Keep the plan of a step that has run, where later ones may go the short way."""
    problem = checked.problem
    plain = backend.step_namespaces is not None and not problem.scale_varies
    same = all(x.shape == y.shape and x.dtype == y.dtype for x, y in zip(state, following, strict=True))
    if key is None or not plain or not same or given.get("token_mask") is not None or arrays.is_traced(problem.v):
        return
    assert backend.step_namespaces is not None
    keeping, overwriting = backend.step_namespaces(problem)
    program, number = problem.program, given.get("decay")
    if len(_plans) >= _LIMIT:
        _plans.clear()
    _plans[key] = Plan(
        program,
        problem.dtype,
        problem.v.dtype,
        any(x.dtype != problem.dtype for x in (problem.q, problem.k, problem.v)),
        keeping,
        overwriting,
        keeping is not overwriting
        and not any(read.strict for read in program.reads)
        and not any(getattr(x, "requires_grad", False) for x in (problem.q, problem.k, problem.v, *state)),
        float(number) if number is not None and arrays.is_number(number) else None,
        float(problem.scale),
        problem.eps,
        problem.ridge,
    )

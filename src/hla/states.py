r"""States: what an operator remembers of the tokens it has seen, as immutable named tuples of arrays.

Which fields a state has is fixed by operator, mask, definition, order, normalize and whether there is a ridge
(`hla.family.Spec`), so each combination has its own class, made on demand. The field names spell the letters of
docs/mathematics.md out:

=== ==================== ==================================== =====================
X   field                sum (undecayed)                      denominator's field
=== ==================== ==================================== =====================
S   key_moment           Σ k kᵀ, d×d                          —
P   key_value_moment     Σ k vᵀ, d×dv                         key_mass (d)
C   query_value_moment   Σ q vᵀ, d×dv                         query_mass
Q   query_moment         Σ q qᵀ, d×d                          —
R   key_query_moment     Σ k qᵀ, d×d                          —
F   corrected_state      HLA₂ Σ (S q) vᵀ, HLA₃ Σ (S q)(qᵀP)   corrected_mass
F2… corrected_state_2 …  further stages of higher orders      corrected_mass_2 …
E   cascade_state        AHLA Σ k (qᵀP)                       cascade_mass
G   correction           what as_printed subtracts            correction_mass
=== ==================== ==================================== =====================

Named tuples are pytrees in JAX and in torch as they are.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from functools import cache, partial
from threading import Lock
from typing import Any, TypeAlias
from weakref import WeakValueDictionary

from hla import arrays
from hla.arrays import Array, Namespace, broadcast_shapes
from hla.errors import DTypeError, OptionError, message
from hla.family import MASS, Program, Spec, program
from hla.options import Options
from hla.problem import States

State: TypeAlias = Any
"""A state: an immutable named tuple of arrays of a class made by `state_type`."""

_WORDS = {
    "S": "key_moment",
    "P": "key_value_moment",
    "C": "query_value_moment",
    "Q": "query_moment",
    "R": "key_query_moment",
    "F": "corrected_state",
    "E": "cascade_state",
    "G": "correction",
    "H": "correction_2",
    "J": "correction_3",
    "D": "strict_key_moment",
    "U": "corrected_query_moment",
    "W": "corrected_value_moment",
    "K": "spanned_key_moment",
    "N": "spanned_query_moment",
    "X": "spanned_key_value_moment",
    "L": "key_query_coupling",
    "T": "query_value_coupling",
    "V": "query_key_coupling",
    "Y": "key_value_coupling",
    "M": "key_map",
    "Z": "value_map",
}
_MASSES = {
    "P": "key_mass",
    "C": "query_mass",
    "F": "corrected_mass",
    "E": "cascade_mass",
    "G": "correction_mass",
    "H": "correction_mass_2",
    "J": "correction_mass_3",
    "W": "corrected_value_mass",
    "X": "spanned_key_mass",
    "T": "query_coupling_mass",
    "Y": "key_coupling_mass",
    "M": "key_map_mass",
    "Z": "value_map_mass",
}
SYMMETRIC = ("S", "Q")
"""States that are symmetric matrices: stored on disk as their upper triangle (§5.2)."""


def field_name(symbol: str) -> str:
    """The word for a symbol: "F" → "corrected_state", "F'" → its denominator, "F2" → the second stage's."""
    letter, rest = symbol[0], symbol[1:]
    mass = rest.endswith(MASS)
    stage = rest[: -len(MASS)] if mass else rest
    return (_MASSES if mass else _WORDS)[letter] + (f"_{stage}" if stage else "")


def is_mass(symbol: str) -> bool:
    """Whether the state is a denominator's: a vector (*batch, d) to the outside, a d×1 matrix inside."""
    return len(symbol) > 1 and symbol.endswith(MASS)


def describe_spec(spec: Spec) -> str:
    """A spec in words, for messages."""
    name = f"higher_order(order={spec.order})" if spec.order else spec.operator
    parts = [f"mask={spec.mask!r}", f"definition={spec.definition!r}", f"normalize={spec.normalize}"]
    return f"{name} with {', '.join(parts)}, {'a' if spec.ridge else 'no'} ridge"


def _rebuild(spec: tuple[Any, ...], values: tuple[Any, ...]) -> State:
    return state_type(Spec(*spec))(*values)


_classes: WeakValueDictionary[tuple[Any, ...], type] = WeakValueDictionary()
_lock = Lock()


def one_class(key: tuple[Any, ...], make: Callable[[], type]) -> type:
    """The class of this key: the one in use, else a new one. All threads get the same, since pytrees with different
    classes are different."""
    with _lock:
        found = _classes.get(key)
        if found is None:
            found = _classes[key] = make()
    return found


def tuple_type(name: str, spec: Spec, symbols: tuple[str, ...], rebuild: Any, doc: str) -> type:
    """A named-tuple class of arrays whose fields spell `symbols` out and which remembers its spec."""
    return one_class((name, spec), partial(_make_type, name, spec, symbols, rebuild, doc))


def _make_type(name: str, spec: Spec, symbols: tuple[str, ...], rebuild: Any, doc: str) -> type:
    fields = {field_name(s) if s != "rho" else "decay": s for s in symbols}
    make: Any = namedtuple
    made = make(name, fields)
    made.spec = spec
    made.label = repr(tuple(spec))  # a constant to tracers, which keep numbers open
    made.symbols = symbols
    made.field_of = staticmethod({s: f for f, s in fields.items()}.__getitem__)
    made.__reduce__ = lambda self: (rebuild, (tuple(spec), tuple(self)))
    made.__doc__ = doc
    made.__module__ = __name__
    return made  # type: ignore[no-any-return]


@cache
def state_type(spec: Spec) -> Any:
    """The class of an operator's states."""
    name = "".join(part.capitalize() for part in spec.operator.split("_")) + (str(spec.order) if spec.order else "")
    symbols = tuple(s.symbol for s in program(spec).states)
    return tuple_type(f"{name}State", spec, symbols, _rebuild, f"State of {describe_spec(spec)}.")


def is_state(x: Any) -> bool:
    """Whether `x` is a state of this library."""
    spec = getattr(type(x), "spec", None)
    return isinstance(spec, Spec) and type(x) is state_type(spec)


def to_arrays(state: State) -> States:
    """A state's arrays by symbol, denominators as matrices of one column."""
    return {s: x[..., None] if is_mass(s) else x for s, x in zip(state.symbols, state, strict=True)}


def from_arrays(spec: Spec, values: States) -> State:
    """The inverse of `to_arrays`."""
    made = state_type(spec)
    return made(*(values[s][..., 0] if is_mass(s) else values[s] for s in made.symbols))


def finished(xp: Namespace, program: Program, values: States, batch: tuple[int, ...]) -> State:
    """Final states as they are handed out: every field at the full batch shape, the key-only S at its own."""
    result: States = {}
    for symbol, x in values.items():
        axes = tuple(x.shape[:-2])
        if symbol == "S":
            wanted = (*(1,) * (len(batch) - len(axes)), *axes)
            result[symbol] = x if wanted == axes else xp.reshape(x, (*wanted, *x.shape[-2:]))
        elif axes != batch:
            # A sum is the caller's own array; asarray(copy=True) would be too, but leaves torch's graph before 2.13.
            result[symbol] = xp.broadcast_to(x, (*batch, *x.shape[-2:])) + 0.0
        else:
            result[symbol] = x
    return from_arrays(program.spec, result)


def init_state(
    operator: str,
    *,
    batch: tuple[int, ...],
    d: int,
    dv: int,
    like: Array,
    kv_batch: tuple[int, ...] | None = None,
    mask: str = "causal",
    definition: str = "exact",
    order: int | None = None,
    normalize: bool = False,
    ridge: float = 0.0,
) -> State:
    r"""The state before the first token: all zeros.

    Args:
        operator: "linear_attention", "hla2", "ahla", "hla3" or "higher_order" (with `order`).
        batch: the batch axes of the output, e.g. (B, H).
        d: features of q and k.
        dv: features of v.
        like: an array that gives library, device and dtype (float64 for float64, else float32).
        kv_batch: the batch axes of k where they differ from `batch`, e.g. (B, Hkv, 1): the key-only
            field ``key_moment`` (S) is stored once per key/value head.
        mask: as for the operator.
        definition: as for the operator.
        order: of `higher_order`.
        normalize: as for the operator; True adds the denominators.
        ridge: as for the operator; any value but 0 adds ``query_value_moment`` (C).

    Returns:
        A named tuple of arrays (*batch, d, ·), denominators (*batch, d).

    Raises:
        OptionError: an unknown operator, or options that are not defined together.
        ShapeError: `kv_batch` does not broadcast to `batch`.

    Example:
        >>> import numpy as np, hla
        >>> state = hla.init_state("hla2", batch=(2, 3), d=5, dv=7, like=np.zeros(1, np.float32))
        >>> state._fields, state.corrected_state.shape
        (('key_moment', 'corrected_state'), (2, 3, 5, 7))
    """
    from hla.checks import accumulation_dtype, check_batches, spec_of

    if arrays.is_compiling():
        from hla.backends.torch import compilation

        fixed = (("mask", mask), ("definition", definition), ("normalize", normalize), ("ridge", ridge))
        return compilation.init_state(operator, check_batches(batch, kv_batch), (d, dv), like, order, fixed)
    options = Options(mask=mask, definition=definition, normalize=normalize, ridge=ridge)
    spec = spec_of(operator, options, order)
    if spec.mask == "none":
        raise OptionError(message("mask", '"causal" or "prefix"', '"none"', "A bidirectional operator has no state."))
    for name, size in (("d", d), ("dv", dv)):
        if not arrays.is_integer(size) or size < 1:
            raise OptionError(message(name, "an integer ≥ 1", repr(size), "Pass the size of the last axis."))
    batch, kv_batch = check_batches(batch, kv_batch)
    xp = arrays.namespace(like, "like")
    if arrays.dtype_name(like.dtype) not in arrays.FLOATING:
        raise DTypeError(message("like", "a floating array", arrays.dtype_name(like.dtype), "Pass q, for example."))
    placed = arrays.beside(like)
    from hla.family import shapes

    sizes = shapes(program(spec), (), (), (), int(d), int(dv)).state
    zeros = {
        symbol: xp.zeros((*(kv_batch if symbol == "S" else batch), *size), dtype=accumulation_dtype(xp, like), **placed)
        for symbol, size in sizes.items()
    }
    return from_arrays(spec, zeros)


def full_batch(batch: tuple[int, ...], values: States) -> tuple[int, ...]:
    """The batch axes of a state's arrays together."""
    return broadcast_shapes(batch, *(tuple(x.shape[:-2]) for x in values.values()))

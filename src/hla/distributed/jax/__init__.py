r"""Sequences over several devices of JAX: each holds a slice of the sequence along a named axis of a mesh.

Every device sums its slice up (`hla.distributed.rounds`), the summaries travel, each device combines those before its
own into the state that enters its slice, and runs the operator there from that state. What travels does not grow with
the length of the sequence. All of it is plain JAX: derivatives of both modes and of any order are JAX's own, in which
the exchanges run backwards.
"""

from __future__ import annotations

from typing import Any, Unpack

from jax import Array
from jax.sharding import Mesh

from hla.distributed.jax import slices, whole
from hla.distributed.jax.exchange import EXCHANGES
from hla.distributed.jax.slices import Call
from hla.distributed.rounds import METHODS
from hla.errors import OptionError, message
from hla.options import Keywords, read_options, with_signature

__all__ = ["ahla", "higher_order", "hla2", "hla3", "linear_attention"]


@with_signature
def linear_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    axis_name: Any,
    mesh: Mesh | None = None,
    exchange: str = "gather",
    method: str = "auto",
    **options: Unpack[Keywords],
) -> Any:
    r"""`hla.linear_attention` of a sequence that is spread over devices. Arguments and results are those of `hla2`.

    Every device sends the field P of its slice's segment, d·dv numbers per head, and ρ.
    """
    return _call("linear_attention", q, k, v, axis_name, mesh, exchange, method, options)


@with_signature
def hla2(
    q: Array,
    k: Array,
    v: Array,
    *,
    axis_name: Any,
    mesh: Mesh | None = None,
    exchange: str = "gather",
    method: str = "auto",
    **options: Unpack[Keywords],
) -> Any:
    r"""`hla.hla2` of a sequence that is spread over devices, to be called inside `jax.shard_map`.

    A slice's segment has the fields S, C and F, and A ⊕ B ⊕ … of all slices before a device's own takes the initial
    state to the one that its slice starts from (math, "Segments"). Every device sends d² + 2·d·dv numbers per head, and
    ρ.

    Args:
        q: (*batch, T, d): this device's tokens. Slices are equally long and in the order of the devices; where the
            sequence does not divide, fill it up with tokens that ``token_mask`` skips.
        k: (*batch, T, d).
        v: (*batch, T, dv).
        axis_name: the mesh axis that time is spread over; several as a tuple, the first one outermost.
        mesh: call with whole arrays, outside `jax.shard_map`: the call is mapped over this mesh. Other axes of it stay
            with the compiler if they are automatic; explicit ones must not be used by the arrays.
        exchange: "gather" collects all summaries on all devices in one exchange, and each device runs through them.
            "doubling" has ⌈log₂(P − 1)⌉ + 1 exchanges with one other device each, after which no device has seen more
            than that many summaries: for many devices.
        method: "segments" sends segments, once. "stages" sends the states themselves, those that feed on others in
            another round: fewer numbers, and any order. "auto" is "segments" where they are matrices of the operator
            (``definition="exact"``, orders up to 3), else "stages".
        **options: see [Options](../options.md). ``log_decay``, ``token_mask`` and ``segment_ids`` are this device's
            slices, sequences may cross borders; ``cu_seqlens`` are offsets in the whole sequence; ``decay``,
            ``initial_state``, ``scale`` and all that is no array are the same on all devices. The initial state is the
            one before the first device's tokens. ``form``, ``chunk_size`` and ``backend`` say how a slice is computed.

    Returns:
        o (*batch, T, dv), this device's tokens; with ``return_state=True`` (o, state), the state after the last
        device's tokens, on every device. Within `jax.shard_map` its type is replicated: ``out_specs=P()``.

    Raises:
        OptionError: `axis_name` is not mapped over here, or q, k, v do not differ along it; mask "none" with packed
            sequences; "segments" where there are none.
        ShapeError: with `mesh`, a length that does not divide by the devices.
        All that `hla.hla2` raises.

    Summaries are float32, or float64 for float64 inputs. With ``cu_seqlens`` and states the sequences become a batch
    axis: N times the work, and N summaries. With mask "none" the states are added up over all devices.

    Example:
        >>> import jax, hla.distributed.jax
        >>> from jax.sharding import PartitionSpec as P
        >>> mesh = jax.make_mesh((1,), ("seq",))  # as many devices as there are
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 8, 5))
        >>> def attend(q, k, v):
        ...     return hla.distributed.jax.hla2(q, k, v, axis_name="seq", decay=0.9)
        >>> spread = jax.shard_map(attend, mesh=mesh, in_specs=P("seq"), out_specs=P("seq"))
        >>> q, k, v = (jax.device_put(x, jax.NamedSharding(mesh, P("seq"))) for x in (q, k, v))
        >>> jax.jit(spread)(q, k, v).shape
        (8, 5)
        >>> hla.distributed.jax.hla2(q, k, v, axis_name="seq", mesh=mesh, decay=0.9).shape
        (8, 5)
    """
    return _call("hla2", q, k, v, axis_name, mesh, exchange, method, options)


@with_signature
def ahla(
    q: Array,
    k: Array,
    v: Array,
    *,
    axis_name: Any,
    mesh: Mesh | None = None,
    exchange: str = "gather",
    method: str = "auto",
    **options: Unpack[Keywords],
) -> Any:
    r"""`hla.ahla` of a sequence that is spread over devices. Arguments and results are those of `hla2`.

    Every device sends the fields R, P and E of its slice's segment, d² + 2·d·dv numbers per head, and ρ.
    """
    return _call("ahla", q, k, v, axis_name, mesh, exchange, method, options)


@with_signature
def hla3(
    q: Array,
    k: Array,
    v: Array,
    *,
    axis_name: Any,
    mesh: Mesh | None = None,
    exchange: str = "gather",
    method: str = "auto",
    **options: Unpack[Keywords],
) -> Any:
    r"""`hla.hla3` of a sequence that is spread over devices. Arguments and results are those of `hla2`.

    Every device sends the six fields of its slice's segment, 3·d² + 3·d·dv numbers per head, and ρ. With
    ``definition="as_printed"`` there are two rounds, of three states each.
    """
    return _call("hla3", q, k, v, axis_name, mesh, exchange, method, options)


@with_signature
def higher_order(
    q: Array,
    k: Array,
    v: Array,
    *,
    order: int,
    axis_name: Any,
    mesh: Mesh | None = None,
    exchange: str = "gather",
    method: str = "auto",
    **options: Unpack[Keywords],
) -> Any:
    r"""`hla.higher_order` of a sequence that is spread over devices. Arguments and results are those of `hla2`.

    Above order 3 the states of each stage travel in a round of their own: ⌊order/2⌋ + 1 rounds, of d·dv numbers per
    head and ρ, the first of d² (odd orders: d² + d·dv).
    """
    return _call("higher_order", q, k, v, axis_name, mesh, exchange, method, options, order)


def _call(
    operator: str,
    q: Any,
    k: Any,
    v: Any,
    axis_name: Any,
    mesh: Any,
    exchange: Any,
    method: Any,
    given: Any,
    order: int | None = None,
) -> Any:
    options = read_options(operator, given)
    for name, value, allowed in (("exchange", exchange, tuple(EXCHANGES)), ("method", method, METHODS)):
        if value not in allowed:
            raise OptionError(message(name, f"one of {', '.join(allowed)}", repr(value), "Check the spelling."))
    call = Call(operator, order, axis_name, exchange, method)
    if mesh is None:
        return slices.run(call, q, k, v, options)
    return whole.run(call, q, k, v, options, mesh)

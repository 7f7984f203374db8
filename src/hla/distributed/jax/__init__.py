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
    r"""`hla.linear_attention` of a sequence that is spread over devices, to be called inside `jax.shard_map`.

    The slices' states add up, with ρ_B the decay through the later slice (§2.2):

    $$P_{AB} = \rho_B P_A + P_B, \qquad P = \textstyle\sum_t \Gamma(T-1,t)\, k_t v_t^\top$$

    Every device sends P of its slice, d·dv numbers per head, and ρ.

    Args:
        q: (*batch, T, d): this device's tokens.
        k: (*batch, T, d).
        v: (*batch, T, dv).
        axis_name: see `hla2`.
        mesh: see `hla2`.
        exchange: see `hla2`.
        method: see `hla2`.
        **options: see `hla2`.

    Returns:
        o (*batch, T, dv), this device's tokens, or (o, state), as of `hla2`.

    Raises:
        OptionError, ShapeError: as `hla2`, and all that `hla.linear_attention` raises.

    Example:
        >>> import jax, jax.numpy as jnp, hla.distributed.jax
        >>> mesh = jax.make_mesh((1,), ("seq",))  # as many devices as there are
        >>> x = jnp.ones((3, 1))
        >>> hla.distributed.jax.linear_attention(x, x, x, axis_name="seq", mesh=mesh, decay=0.5)[:, 0].tolist()
        [1.0, 1.5, 1.75]
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

    A slice's segment has S, C = Σ q vᵀ and F, and two of them, A before B, combine (§4, its decay corrected) by

    $$S_{AB} = \rho_B S_A + S_B, \quad C_{AB} = \rho_B C_A + C_B, \quad
    F_{AB} = \rho_B^2 F_A + F_B + \rho_B S_A C_B$$

    so that those of all slices before a device's own take the initial state to the one that its slice starts from.
    Every device sends these, d² + 2·d·dv numbers per head, and ρ.

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
    r"""`hla.ahla` of a sequence that is spread over devices, to be called inside `jax.shard_map`.

    A slice's segment has R = Σ k qᵀ, P and E, and two of them, A before B, combine (§6.2, its decay corrected) by

    $$R_{AB} = R_A + R_B, \quad P_{AB} = \rho_B P_A + P_B, \quad
    E_{AB} = \rho_B E_A + E_B + \rho_B R_B P_A$$

    Every device sends these, d² + 2·d·dv numbers per head, and ρ.

    Args:
        q: (*batch, T, d): this device's tokens.
        k: (*batch, T, d).
        v: (*batch, T, dv).
        axis_name: see `hla2`.
        mesh: see `hla2`.
        exchange: see `hla2`.
        method: see `hla2`.
        **options: see `hla2`.

    Returns:
        o (*batch, T, dv), this device's tokens, or (o, state), as of `hla2`.

    Raises:
        OptionError, ShapeError: as `hla2`, and all that `hla.ahla` raises.

    Example:
        >>> import jax, jax.numpy as jnp, hla.distributed.jax
        >>> mesh = jax.make_mesh((1,), ("seq",))  # as many devices as there are
        >>> x = jnp.ones((3, 1))
        >>> hla.distributed.jax.ahla(x, x, x, axis_name="seq", mesh=mesh)[:, 0].tolist()
        [1.0, 3.0, 6.0]
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
    r"""`hla.hla3` of a sequence that is spread over devices, to be called inside `jax.shard_map`.

    A slice's segment has S, Q = Σ q qᵀ, P, E, U and F, and two of them, A before B, combine like those of `hla2`, with

    $$F_{AB} = \rho_B^3 F_A + F_B + \rho_B^2 S_A Q_B P_A + \rho_B S_A E_B + \rho_B U_B P_A$$

    where §7.3 has maps of d³·dv numbers; all six are in math, "Segments". Every device sends them, 3·d² + 3·d·dv
    numbers per head, and ρ. With ``definition="as_printed"`` there are two rounds, of three states each.

    Args:
        q: (*batch, T, d): this device's tokens.
        k: (*batch, T, d).
        v: (*batch, T, dv).
        axis_name: see `hla2`.
        mesh: see `hla2`.
        exchange: see `hla2`.
        method: see `hla2`.
        **options: see `hla2`.

    Returns:
        o (*batch, T, dv), this device's tokens, or (o, state), as of `hla2`.

    Raises:
        OptionError, ShapeError: as `hla2`, and all that `hla.hla3` raises.

    Example:
        >>> import jax, jax.numpy as jnp, hla.distributed.jax
        >>> mesh = jax.make_mesh((1,), ("seq",))  # as many devices as there are
        >>> x = jnp.ones((3, 1))
        >>> hla.distributed.jax.hla3(x, x, x, axis_name="seq", mesh=mesh)[:, 0].tolist()
        [1.0, 5.0, 14.0]
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
    r"""`hla.higher_order` of a sequence that is spread over devices, to be called inside `jax.shard_map`.

    Above order 3 the states travel, stage by stage; a slice sums its own from the S and the o that enter it (§7):

    $$F^{(n)}_{AB} = \rho_B^2 F^{(n)}_A + F^{(n)}_B, \qquad
    F^{(n)}_B = \textstyle\sum_{t \in B} \Gamma(T-1,t)^2\, (S_t q_t)\, o^{(n-1)\top}_t$$

    There are ⌊order/2⌋ + 1 rounds, of d·dv numbers per head and ρ, the first of d² (odd orders: d² + d·dv).

    Args:
        q: (*batch, T, d): this device's tokens.
        k: (*batch, T, d).
        v: (*batch, T, dv).
        order: the interaction degree, an integer ≥ 1.
        axis_name: see `hla2`.
        mesh: see `hla2`.
        exchange: see `hla2`.
        method: see `hla2`.
        **options: see `hla2`.

    Returns:
        o (*batch, T, dv), this device's tokens, or (o, state), as of `hla2`.

    Raises:
        OptionError, ShapeError: as `hla2`, and all that `hla.higher_order` raises.

    Example:
        >>> import jax, jax.numpy as jnp, hla.distributed.jax
        >>> mesh = jax.make_mesh((1,), ("seq",))  # as many devices as there are
        >>> x = jnp.ones((3, 1))
        >>> o = hla.distributed.jax.higher_order(x, x, x, order=4, axis_name="seq", mesh=mesh)
        >>> bool(jnp.array_equal(o, hla.hla2(x, x, hla.hla2(x, x, x))))
        True
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

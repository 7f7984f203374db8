"""Sequences over several processes of `torch.distributed`: each rank has a slice, what travels is of constant size.

The functions are the operators of `hla`, on the slice of this rank. The slices lie in the order of the ranks of a
group; they may differ in length and be empty. All ranks call together, with the same options; all of them must call
`backward` too, in the same order, on something that comes from each call's results (``(o * 0).sum()`` will do), as each
exchange has its counterpart there.

Args of all functions, beside those of the operators:
    group: a ProcessGroup, a DeviceMesh of one dimension, (mesh, name of a dimension), or None for the default group.
        Ranks that wait for each other in different groups, or for one whose group was refused, get an error: see
        `hla.distributed.torch.waiting`. A group on which a call was interrupted or has failed takes no more of them.
    method: "segments": one exchange, for linear_attention, hla2, ahla and hla3 in their exact definition. "stages":
        one exchange for each stage of the operator, for all of them. "auto": segments where there are such. See
        `hla.distributed.rounds`.
    check: compare the calls of all ranks first, so that different sizes or options are an error on all of them: 1 KiB
        and one more round. True: in each call. False: never. None: in each call on CPU; on accelerators, where hearing
        the others means to wait for the device, when a call is new to this process; known calls that differ between
        ranks are not found there. The same on every rank. Values of tensors are not compared.

And what differs from the operators:
    log_decay, token_mask, segment_ids: of the slice. Ids are those of the whole: a sequence goes on in the next slice
        where the id does.
    cu_seqlens: offsets in the whole sequence, the same on every rank.
    initial_state: the state before the whole sequence, on every rank or on none; the values of rank 0 count.
    return_state: the state after the whole sequence, on every rank.

Gradients of what every rank holds (decay, scale, the initial state) are this rank's part: they add up over the group
to the gradient. That of the initial state is all on rank 0. Outputs require a gradient where an input of any rank does
(where the ranks do not compare their calls: wherever gradients are recorded).
Derivatives of derivatives work, on backends that have them, whichever inputs each rank asks for.
Forward-mode derivatives and `torch.func` are refused.
"""

from __future__ import annotations

from typing import Any, Unpack

from torch import Tensor

from hla.distributed.torch.groups import Group
from hla.distributed.torch.operators import Sharing, run
from hla.options import Keywords, with_signature

__all__ = ["ahla", "higher_order", "hla2", "hla3", "linear_attention"]


@with_signature
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Group = None,
    method: str = "auto",
    check: bool | None = None,
    **options: Unpack[Keywords],
) -> Any:
    r"""`hla.linear_attention` over a group of processes: this rank computes the outputs of its slice.

    The slices' states add up, with ρ_B the decay through the later slice (§2.2):

    $$P_{AB} = \rho_B P_A + P_B, \qquad P = \textstyle\sum_t \Gamma(T-1,t)\, k_t v_t^\top$$

    In one exchange d·dv numbers per head and ρ travel from each rank.

    Args:
        q: (*batch, T, d), T tokens of this rank.
        k: (*batch, T, d).
        v: (*batch, T, dv).
        group: see `hla.distributed.torch`.
        method: see `hla.distributed.torch`.
        check: see `hla.distributed.torch`.
        **options: those of the operator.

    Returns:
        o (*batch, T, dv) of this rank's tokens, or (o, state) with the state after the last rank's.

    Raises:
        OptionError, ShapeError, DTypeError: as the operator, and on every rank where the ranks differ or one of them
            has been refused.

    Example:
        >>> import torch, torch.distributed as dist, hla.distributed.torch
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # under torchrun: ("gloo")
        >>> x = torch.ones(3, 1)
        >>> hla.distributed.torch.linear_attention(x, x, x, decay=0.5)[:, 0]
        tensor([1.0000, 1.5000, 1.7500])
        >>> dist.destroy_process_group()
    """
    return run("linear_attention", q, k, v, dict(options), Sharing(group, method, check))


@with_signature
def hla2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Group = None,
    method: str = "auto",
    check: bool | None = None,
    **options: Unpack[Keywords],
) -> Any:
    r"""`hla.hla2` over a group of processes: this rank computes the outputs of its slice.

    A slice's segment has S, C = Σ q vᵀ and F, and two of them, A before B, combine (§4, its decay corrected) by

    $$S_{AB} = \rho_B S_A + S_B, \quad C_{AB} = \rho_B C_A + C_B, \quad
    F_{AB} = \rho_B^2 F_A + F_B + \rho_B S_A C_B$$

    In one exchange d² + 2·d·dv numbers per head and ρ travel from each rank; with method "stages" S, and then F.

    Args:
        q: (*batch, T, d), T tokens of this rank.
        k: (*batch, T, d).
        v: (*batch, T, dv).
        group: see `hla.distributed.torch`.
        method: see `hla.distributed.torch`.
        check: see `hla.distributed.torch`.
        **options: those of the operator.

    Returns:
        o (*batch, T, dv) of this rank's tokens, or (o, state) with the state after the last rank's.

    Raises:
        OptionError, ShapeError, DTypeError: as the operator, and on every rank where the ranks differ or one of them
            has been refused.

    Example:
        >>> import torch, torch.distributed as dist, hla.distributed.torch
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # under torchrun: ("gloo")
        >>> x = torch.ones(3, 1)
        >>> hla.distributed.torch.hla2(x, x, x)[:, 0]
        tensor([1., 3., 6.])
        >>> dist.destroy_process_group()
    """
    return run("hla2", q, k, v, dict(options), Sharing(group, method, check))


@with_signature
def ahla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Group = None,
    method: str = "auto",
    check: bool | None = None,
    **options: Unpack[Keywords],
) -> Any:
    r"""`hla.ahla` over a group of processes: this rank computes the outputs of its slice.

    A slice's segment has R = Σ k qᵀ, P and E, and two of them, A before B, combine (§6.2, its decay corrected) by

    $$R_{AB} = R_A + R_B, \quad P_{AB} = \rho_B P_A + P_B, \quad
    E_{AB} = \rho_B E_A + E_B + \rho_B R_B P_A$$

    In one exchange d² + 2·d·dv numbers per head and ρ travel from each rank; with method "stages" P, and then E.

    Args:
        q: (*batch, T, d), T tokens of this rank.
        k: (*batch, T, d).
        v: (*batch, T, dv).
        group: see `hla.distributed.torch`.
        method: see `hla.distributed.torch`.
        check: see `hla.distributed.torch`.
        **options: those of the operator.

    Returns:
        o (*batch, T, dv) of this rank's tokens, or (o, state) with the state after the last rank's.

    Raises:
        OptionError, ShapeError, DTypeError: as the operator, and on every rank where the ranks differ or one of them
            has been refused.

    Example:
        >>> import torch, torch.distributed as dist, hla.distributed.torch
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # under torchrun: ("gloo")
        >>> x = torch.ones(3, 1)
        >>> hla.distributed.torch.ahla(x, x, x)[:, 0]
        tensor([1., 3., 6.])
        >>> dist.destroy_process_group()
    """
    return run("ahla", q, k, v, dict(options), Sharing(group, method, check))


@with_signature
def hla3(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Group = None,
    method: str = "auto",
    check: bool | None = None,
    **options: Unpack[Keywords],
) -> Any:
    r"""`hla.hla3` over a group of processes: this rank computes the outputs of its slice.

    A slice's segment has S, Q = Σ q qᵀ, P, E, U and F, and two of them, A before B, combine like those of `hla2`, with

    $$F_{AB} = \rho_B^3 F_A + F_B + \rho_B^2 S_A Q_B P_A + \rho_B S_A E_B + \rho_B U_B P_A$$

    where §7.3 has maps of d³·dv numbers; all six are in math, "Segments".

    In one exchange 3·d² + 3·d·dv numbers per head and ρ travel from each rank; with method "stages" S and P, then F.

    Args:
        q: (*batch, T, d), T tokens of this rank.
        k: (*batch, T, d).
        v: (*batch, T, dv).
        group: see `hla.distributed.torch`.
        method: see `hla.distributed.torch`.
        check: see `hla.distributed.torch`.
        **options: those of the operator. definition="as_printed" takes method "stages".

    Returns:
        o (*batch, T, dv) of this rank's tokens, or (o, state) with the state after the last rank's.

    Raises:
        OptionError, ShapeError, DTypeError: as the operator, and on every rank where the ranks differ or one of them
            has been refused.

    Example:
        >>> import torch, torch.distributed as dist, hla.distributed.torch
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # under torchrun: ("gloo")
        >>> x = torch.ones(3, 1)
        >>> hla.distributed.torch.hla3(x, x, x)[:, 0]
        tensor([ 1.,  5., 14.])
        >>> dist.destroy_process_group()
    """
    return run("hla3", q, k, v, dict(options), Sharing(group, method, check))


@with_signature
def higher_order(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    order: int,
    group: Group = None,
    method: str = "auto",
    check: bool | None = None,
    **options: Unpack[Keywords],
) -> Any:
    r"""`hla.higher_order` over a group of processes: this rank computes the outputs of its slice.

    Above order 3 the states travel, stage by stage; a slice sums its own from the S and the o that enter it (§7):

    $$F^{(n)}_{AB} = \rho_B^2 F^{(n)}_A + F^{(n)}_B, \qquad
    F^{(n)}_B = \textstyle\sum_{t \in B} \Gamma(T-1,t)^2\, (S_t q_t)\, o^{(n-1)\top}_t$$

    There are ⌊order/2⌋ + 1 exchanges, one for each stage, of d·dv numbers per head and ρ, the first with S too.

    Args:
        q: (*batch, T, d), T tokens of this rank.
        k: (*batch, T, d).
        v: (*batch, T, dv).
        order: as for the operator.
        group: see `hla.distributed.torch`.
        method: see `hla.distributed.torch`.
        check: see `hla.distributed.torch`.
        **options: those of the operator.

    Returns:
        o (*batch, T, dv) of this rank's tokens, or (o, state) with the state after the last rank's.

    Raises:
        OptionError, ShapeError, DTypeError: as the operator, and on every rank where the ranks differ or one of them
            has been refused.

    Example:
        >>> import torch, torch.distributed as dist, hla.distributed.torch
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # under torchrun: ("gloo")
        >>> x = torch.ones(3, 1)
        >>> torch.equal(hla.distributed.torch.higher_order(x, x, x, order=4), hla.hla2(x, x, hla.hla2(x, x, x)))
        True
        >>> dist.destroy_process_group()
    """
    return run("higher_order", q, k, v, dict(options), Sharing(group, method, check), order)

"""Sequences over several processes of `torch.distributed`: each rank has a slice, what travels is of constant size.

The functions are the operators of `hla`, on the slice of this rank. The slices lie in the order of the ranks of a
group; they may differ in length and be empty. All ranks call together, with the same options; all of them must call
`backward` too, in the same order, on something that comes from each call's results (``(o * 0).sum()`` will do), as each
exchange has its counterpart there.

Args of all functions, beside those of the operators:
    group: a ProcessGroup, a DeviceMesh of one dimension, (mesh, name of a dimension), or None for the default group.
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
Derivatives of derivatives work, on backends that have them, where all ranks ask for the gradients of the same inputs.
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
    """`hla.linear_attention` over a group of processes. One exchange of P, d·dv numbers per head.

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
    """`hla.hla2` over a group of processes. One exchange of S, C, F, or with method "stages" one of S and one of F.

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
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> q, k, v = torch.randn(3, 2, 11, 4).unbind()
        >>> o, state = hla.distributed.torch.hla2(q, k, v, decay=0.9, return_state=True)
        >>> torch.allclose(o, hla.hla2(q, k, v, decay=0.9), atol=1e-4)
        True
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
    """`hla.ahla` over a group of processes. One exchange of R, P, E, or with method "stages" one of P and one of E.

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
    """`hla.hla3` over a group of processes. One exchange of six matrices, or with method "stages" one of S and P and
    one of F.

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
    """`hla.higher_order` over a group of processes. Above order 3 one exchange for each stage.

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
    """
    return run("higher_order", q, k, v, dict(options), Sharing(group, method, check), order)

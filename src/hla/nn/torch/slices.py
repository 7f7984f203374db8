"""A layer whose sequences are spread over processes, each of which has a slice of every one."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hla.errors import OptionError, message
from hla.nn.refusals import check_known_offsets
from hla.nn.torch.sequences import Packed, Rows, packed

if TYPE_CHECKING:
    from hla.distributed.torch.halo import Halo
    from hla.distributed.torch.operators import Session


class Kept:
    """A module's process group. Copies of the module have the same; what comes out of a pickle, in a process that may
    have other groups, has none, and says so when it is asked for it."""

    def __init__(self, group: Any, lost: bool = False) -> None:
        _check_group(group)
        self._group, self._lost = group, lost

    @property
    def group(self) -> Any:
        """The group, or None."""
        if self._lost:
            raise OptionError(
                message("process_group", "a group of this process", "a layer from a pickle, which carries none",
                        "Set it: layer.process_group = group, or None for whole sequences.")
            )  # fmt: skip
        return self._group

    @property
    def shared(self) -> bool:
        """Whether there is one, or was before a pickle."""
        return self._lost or self._group is not None

    def __deepcopy__(self, memo: Any) -> Kept:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Kept, (None, self.shared)


def _check_group(group: Any) -> None:
    """OptionError unless this is of a kind that `hla.distributed.torch` takes."""
    if group is None:
        return
    if torch.distributed.is_available():
        from torch.distributed import GroupMember, ProcessGroup
        from torch.distributed.device_mesh import DeviceMesh

        if isinstance(group, (ProcessGroup, DeviceMesh)) or group is GroupMember.NON_GROUP_MEMBER:
            return
        if isinstance(group, tuple) and len(group) == 2 and isinstance(group[0], DeviceMesh):
            return
    raise OptionError(
        message("process_group", "a ProcessGroup, a DeviceMesh, (mesh, its dimension) or None", repr(group),
                "All processes together are torch.distributed.group.WORLD.")
    )  # fmt: skip


@dataclass(frozen=True)
class Slices:
    """How the rows of one call go on from slice to slice."""

    session: Session
    halo: Halo
    some: Tensor | None = None
    """of packed sequences, those with tokens on several ranks, where no others have to be known"""

    def windows(
        self, rows: Rows | Packed, streams: tuple[Tensor, ...], before: tuple[Tensor, ...]
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The windows before this slice and those after the last, from the windows before the first."""
        exchanges, count = self.session.exchanges, before[0].shape[1]
        if not count or (self.some is not None and not self.some.shape[0]):
            return before, before
        widths = [x.shape[2] for x in streams]
        tails = torch.cat([rows.tail(x, count) for x in streams], dim=2).to(before[0].dtype)
        whole = initial = torch.cat(before, dim=2)
        halo = self.halo
        if self.some is not None:
            tails, initial = tails[self.some], initial[self.some]
            halo = halo._replace(counts=halo.counts[:, self.some])
        own, last, tie = halo.windows(tails, initial, exchanges.tie)
        if exchanges.tie is not None:
            exchanges.tie = tie
        if self.some is not None:
            own, last = (whole.index_copy(0, self.some, x) for x in (own, last))
        return torch.split(own, widths, dim=2), torch.split(last, widths, dim=2)


def begin(
    layer: Any,
    x: Any,
    state: Any,
    return_state: bool,
    key_padding_mask: Any,
    cu_seqlens: Any,
    refusal: Exception | None,
) -> Session:
    """What the ranks of a layer's group agree on before a call."""
    from hla.distributed.torch.groups import Place
    from hla.distributed.torch.operators import Session, told_offsets
    from hla.distributed.torch.waiting import heard

    wants_grad = any(p.requires_grad for p in layer.parameters())
    claim: tuple[tuple[str, str], ...] = ()
    length = 0
    if refusal is None:
        offsets = None if cu_seqlens is None else cu_seqlens.tolist()
        tensors = [] if state is None else state.tensors()
        wants_grad = wants_grad or any(y.requires_grad for y in (x, *tensors))
        length = x.shape[1]
        claim = (
            ("layer", type(layer).__name__),
            *((field.name, _told(getattr(layer.options, field.name))) for field in fields(layer.options)),
            ("shape of x (batch; d_model)", f"{x.shape[0]}; {x.shape[2]}"),
            ("dtype of x", f"{x.dtype}"),
            (
                "dtype of autocast",
                f"{torch.is_autocast_enabled(x.device.type) and torch.get_autocast_dtype(x.device.type)}",
            ),
            ("return_state", f"{return_state}"),
            ("state", "none" if state is None else f"{[tuple(y.shape) for y in tensors]}"),
            ("key_padding_mask", "none" if key_padding_mask is None else "a tensor"),
            ("cu_seqlens", "none" if offsets is None else told_offsets(offsets)),
            ("torch.is_grad_enabled()", f"{torch.is_grad_enabled()}"),
        )
    with heard():
        place = Place.of(layer.process_group)
    like = x if isinstance(x, Tensor) else torch.empty(0)
    return Session.begin(place, like, claim, wants_grad, refusal, length=length, need_lengths=cu_seqlens is not None)


def _told(value: Any) -> str:
    """In a few words, that differ where the values do."""
    if isinstance(value, tuple) and len(value) > 1 and len(set(value)) == 1:
        return f"{len(value)} times {value[0]!r}"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:24]}… with digest {hashlib.sha256(text.encode()).hexdigest()[:12]}"


def spread(
    session: Session, x: Tensor, batch: int, counts: Tensor | None, cu_seqlens: Tensor | None, by_state: bool
) -> tuple[Rows | Packed, Slices]:
    """The rows of x, and how they go on. `counts`: of tokens that are not skipped; `by_state`: whether states come or
    go, for which every packed sequence counts."""
    from hla.distributed.torch.halo import Halo

    place, lengths = session.place, session.lengths
    if cu_seqlens is not None:
        assert lengths is not None
        offsets = cu_seqlens.tolist()
        check_known_offsets(offsets, sum(lengths))
        halo, local = Halo.of_offsets(place, lengths, offsets, x.device)
        some = None if by_state else ((halo.counts > 0).sum(0) > 1).nonzero()[:, 0]
        return packed(local, x.shape[1], x.device), Slices(session, halo, some)
    if counts is not None or lengths is None:
        own = torch.full((batch,), x.shape[1], device=x.device) if counts is None else counts
        return Rows(counts), Slices(session, Halo.of_counts(place, own))
    return Rows(), Slices(session, Halo.of_lengths(place, lengths, batch, x.device))

"""Groups of processes, and the one collective that everything here is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from hla.errors import OptionError, message

# its name since torch 2.13, where the old one warns
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

Group: TypeAlias = ProcessGroup | DeviceMesh | tuple[DeviceMesh, str | int] | None
"""What callers may pass: a ProcessGroup, a DeviceMesh of one dimension, a mesh and one of its dimensions, or None for
the default group."""


_out_of_step: WeakSet[ProcessGroup] = WeakSet()
"""Groups of which this process has made a collective that it did not see the end of: what it sends next there may be
taken for something else."""


def leave(group: ProcessGroup) -> None:
    """This process has left a call on the group that the others may go on with."""
    _out_of_step.add(group)


class Place(NamedTuple):
    """A group, and where in it this process is: the slices of the sequence lie in the order of the ranks."""

    group: ProcessGroup
    rank: int
    size: int

    @classmethod
    def of(cls, group: Group) -> Place:
        """This process's place; OptionError where it has none."""
        found = _group_of(group)
        try:
            rank = dist.get_rank(found)
        except ValueError as error:
            raise OptionError(
                message(
                    "group", "a group of this process", f"one that PyTorch does not know: {error}", "Make a new one."
                )
            ) from error
        if rank < 0:
            raise OptionError(
                message("group", "a group that this process is in", f"one without rank {dist.get_rank()}",
                        "Call only on the processes that hold a slice.")
            )  # fmt: skip
        return cls(found, rank, dist.get_world_size(found))

    @property
    def name(self) -> str:
        """The group, with its processes."""
        return named(self.group.group_name, dist.get_process_group_ranks(self.group))

    def check(self) -> None:
        """OptionError where the group has been left."""
        if self.group in _out_of_step:
            raise OptionError(
                message("group", "one on which this process has seen each of its calls to the end",
                        f"{self.name}, on which a call was interrupted or has failed on process {dist.get_rank()}",
                        "Make a new one on all of its ranks: torch.distributed.new_group, or init_process_group again.")
            )  # fmt: skip

    def gather(self, x: Tensor, wait: Callable[[Any], None] | None = None) -> Tensor:
        """(n,) on every rank → (size, n): one collective with messages of equal size. `wait` waits for it, if given."""
        if self.size == 1:
            return x[None]
        self.check()
        found, x = x.new_empty(self.size * x.shape[0]), x.contiguous()
        try:
            work = _all_gather(found, x, group=self.group, async_op=wait is not None)
            if wait is not None:
                wait(work)
        except BaseException as error:
            leave(self.group)
            if wait is None and isinstance(error, RuntimeError):
                raise self.failure("an exchange with", error, _EXCHANGE) from error
            raise
        return found.reshape(self.size, -1)

    def failure(self, what: str, error: RuntimeError, todo: str) -> RuntimeError:
        """For the error of a collective."""
        got = f"an error where process {dist.get_rank()} waited for the others: {str(error).split('. ')[0]:.300}"
        return RuntimeError(message("group", f"{what} all ranks of {self.name}", got, todo))


_EXCHANGE = (
    "Every rank has to make the same calls, and to call backward on something of each result, in the same order; "
    "see whether one has left that out, has raised an error, or has ended."
)


def named(name: str, processes: Sequence[int]) -> str:
    """A group, in words."""
    ranks = [str(rank) for rank in processes]
    shown = ranks if len(ranks) < 10 else [*ranks[:4], "…", *ranks[-4:]]
    return f"group {name!r} of processes {', '.join(shown)}"


def _group_of(group: Any) -> ProcessGroup:
    if not dist.is_available() or not dist.is_initialized():
        raise OptionError(
            message("group", "processes that know each other", "torch.distributed without a default group",
                    "Call torch.distributed.init_process_group first.")
        )  # fmt: skip
    if group is None:
        found = dist.group.WORLD
        assert found is not None
        return found
    if isinstance(group, ProcessGroup):
        return group
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise OptionError(
                message("group", "a DeviceMesh of one dimension", f"one of {group.ndim}",
                        "Pass mesh[name], or (mesh, name), for the dimension that the sequence is spread over.")
            )  # fmt: skip
        return _along(group, 0)
    if isinstance(group, tuple) and len(group) == 2 and isinstance(group[0], DeviceMesh):
        return _along(*group)
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise OptionError(
            message("group", "a group that this process is in", "one without it",
                    "Call only on the processes that hold a slice.")
        )  # fmt: skip
    raise OptionError(
        message("group", "a ProcessGroup, a DeviceMesh, (mesh, dimension) or None", _told(group), "Pass one of these.")
    )


_straight: WeakKeyDictionary[DeviceMesh, set[Any]] = WeakKeyDictionary()
"""Meshes, with dimensions along which ranks come in the order of their groups."""


def _along(mesh: DeviceMesh, dimension: Any) -> ProcessGroup:
    """The group of one dimension. PyTorch sorts its ranks, so that a mesh may have them in another order."""
    where = mesh.get_coordinate()
    if where is None:
        raise OptionError(
            message("group", "a mesh that this process is in", f"{mesh} on process {dist.get_rank()}",
                    "Call only on the processes that hold a slice.")
        )  # fmt: skip
    try:
        group = mesh.get_group(dimension)
        names = mesh.mesh_dim_names or ()
        index: list[Any] = list(where)
        index[names.index(dimension) if isinstance(dimension, str) else dimension] = slice(None)
    except (KeyError, IndexError, RuntimeError, TypeError, ValueError) as error:
        raise OptionError(message("group", f"a dimension of {mesh}", repr(dimension), "Check the name.")) from error
    known = _straight.setdefault(mesh, set())
    if dimension not in known:
        ranks = mesh.mesh[tuple(index)].tolist()
        if ranks != dist.get_process_group_ranks(group):
            raise OptionError(
                message("group", "a mesh with its ranks in ascending order", f"{ranks} along {dimension!r} of {mesh}",
                        "Slices lie in the order of the ranks of the group, which PyTorch sorts.")
            )  # fmt: skip
        known.add(dimension)
    return group


def _told(x: Any) -> str:
    return f"{x!r:.60}"


def pack(tensors: list[Tensor], like: torch.dtype) -> Tensor:
    """Tensors as one row of numbers."""
    return torch.cat([x.reshape(-1).to(like) for x in tensors])


def unpack(row: Tensor, shapes: list[tuple[int, ...]]) -> list[Tensor]:
    """The inverse of `pack`."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    return [x.reshape(shape) for x, shape in zip(torch.split(row, sizes), shapes, strict=True)]

"""What happens where ranks are not given the same group, for `test_distributed_torch`."""

from __future__ import annotations

import datetime
import pickle
import random as chances
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import hla
import hla.distributed.torch as shared
import ranks
from distributed_behaviour import away_from_hand, counting, expect, patience
from distributed_calls import DV, D, H
from hla.distributed.torch import operators, waiting
from hla.nn.torch import HigherOrderAttention

GROUPS = (
    ("other_groups", 3),
    ("other_layouts", 4),
    ("refused_groups", 3),
    ("groups_in_turn", 4),
    ("nobody_comes", 3),
    ("values_of_options", 3),
    ("started_again", 2),
    ("refused_before", 3),
    ("threads_in_turn", 2),
    ("interrupted", 2),
    ("backward_left_out", 2),
)
"""functions, with the number of processes"""


def inputs() -> list[Any]:
    return [torch.ones(H, 2, n, dtype=torch.float64) for n in (D, D, DV)]


def call(group: Any, **options: Any) -> Any:
    return shared.hla2(*inputs(), group=group, **options)


def wanted(group: Any) -> Any:
    """This rank's part of what `call` returns."""
    whole = [torch.cat([x] * dist.get_world_size(group), dim=-2) for x in inputs()]
    first = 2 * dist.get_rank(group)
    return hla.hla2(*whole)[:, first : first + 2]


def check_usable(*groups: Any) -> None:
    """No group has a collective that only some ranks have made."""
    for group in groups:
        if dist.get_rank(group) >= 0:
            assert torch.allclose(call(group), wanted(group), rtol=1e-12)
            total = torch.ones(())
            dist.all_reduce(total, group=group)
            assert total == dist.get_world_size(group)


def refuse(words: str, function: Callable[[], Any], within: float = 10.0) -> None:
    """An OptionError with these words, in good time."""
    start = time.monotonic()
    expect(hla.OptionError, words, function)
    took = time.monotonic() - start
    assert took < within, f"{words}: {took} s"


def other_groups(rank: int, size: int) -> None:
    """Ranks that wait for each other in different groups all hear who waits where."""
    world = dist.group.WORLD
    pairs = [dist.new_group([0, 1]), dist.new_group([1, 2]), dist.new_group([0, 2])]
    again = dist.new_group([0, 1, 2])
    with patience(0.3):
        refuse("process 1 waiting in group", lambda: call(pairs[0] if rank == 1 else world))
        check_usable(world, *pairs)
        refuse(f"process {rank} waiting in group {pairs[rank].group_name!r} of", lambda: call(pairs[rank]))
        check_usable(world, *pairs)
        words = f"process 2 waiting in group {again.group_name!r} of processes 0, 1, 2"
        refuse(words, lambda: call(again if rank == 2 else world))
        check_usable(world, again)
        layer = HigherOrderAttention(12, 3, process_group=again if rank == 0 else world)
        refuse("process 0 waiting in group", lambda: layer(torch.ones(2, 5, 12)))
        check_usable(world, again)


def other_layouts(rank: int, size: int) -> None:
    """Two ranks take the columns of a mesh for its rows; a mesh that counts backwards."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    with patience(0.3):
        refuse(f"process {rank} waiting in group", lambda: call((mesh, "data" if rank in (0, 3) else "sequence")))
        check_usable(mesh.get_group("data"), mesh.get_group("sequence"))
    backwards = DeviceMesh("cpu", [[3, 2], [1, 0]], mesh_dim_names=("data", "sequence"))
    with patience(5.0):
        for group in ((backwards, "sequence"), (backwards, 1), backwards["sequence"]):
            refuse("ascending order", lambda group=group: call(group), within=4.0)
    part = DeviceMesh("cpu", [0, 1])
    if rank < 2:
        assert torch.allclose(call(part), wanted(part.get_group()), rtol=1e-12)
    else:
        with patience(0.1):
            refuse("a mesh that this process is in", lambda: call(part))


def refused_groups(rank: int, size: int) -> None:
    """What one rank is refused as a group, the others hear of."""
    world = dist.group.WORLD
    square = init_device_mesh("cpu", (1, size), mesh_dim_names=("data", "sequence"))
    backwards = DeviceMesh("cpu", [2, 1, 0])
    apart, gone = (dist.new_group(x) for x in ([0, 1], [0, 1, 2]))
    brief = dist.new_group([0, 1, 2], timeout=datetime.timedelta(seconds=2))
    dist.destroy_process_group(gone)
    layer, flat = (HigherOrderAttention(12, 3, process_group=group) for group in (world, square))
    lost = pickle.loads(pickle.dumps(layer))
    cases: list[tuple[int, str, Any]] = [
        (2, "a layer from a pickle", lambda odd: (lost if odd else layer)(torch.ones(2, 5, 12))),
        (0, "got 3", lambda odd: call(3 if odd else world)),
        (1, "a DeviceMesh of one dimension", lambda odd: call(square if odd else world)),
        (2, "a dimension of DeviceMesh", lambda odd: call((square, "time" if odd else "sequence"))),
        (2, "a group that this process is in", lambda odd: call(apart if odd else world)),
        (0, "one that PyTorch does not know", lambda odd: call(gone if odd else world)),
        (1, "ascending order", lambda odd: call(backwards if odd else world)),
        (1, "a DeviceMesh of one dimension", lambda odd: (flat if odd else layer)(torch.ones(2, 5, 12))),
    ]
    with patience(0.3):
        for odd, words, function in cases:
            refuse(words, lambda function=function, odd=odd: function(rank == odd), within=5.0)
            check_usable(world, apart)
            # refused alike on all, which nobody has to be told
            if "that this process is in" not in words:
                dist.barrier()
                with patience(5.0):
                    refuse(words, lambda function=function: function(True), within=4.0)
        # those who come when that rank has given up looking for them hear of it when the group does
        if rank:
            time.sleep(7 * waiting.PATIENCE)
        refuse("got 4", lambda: call(4 if rank == 0 else brief))
        dist.barrier()


def groups_in_turn(rank: int, size: int) -> None:
    """No error where ranks are late, groups change from call to call, and notes are written all the time."""
    world = dist.group.WORLD
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    some = [dist.new_group(x) for x in ([0, 1, 2], [1, 2, 3], [0, 3])]
    groups = [world, mesh.get_group("data"), mesh.get_group("sequence"), *some]
    plan, pauses = chances.Random(1), chances.Random(rank)
    read: list[Any] = []
    find = waiting.Board.read

    def counted(self: Any, rank: int) -> Any:
        read.append(find(self, rank))
        return read[-1]

    waiting.Board.read = counted  # type: ignore[method-assign]
    with patience(0.004):
        for _ in range(60):
            group = groups[plan.randrange(len(groups))]
            time.sleep(pauses.choice([0.0, 0.0, 0.03]))
            if dist.get_rank(group) >= 0:
                assert torch.allclose(call(group), wanted(group), rtol=1e-12)
    waiting.Board.read = find  # type: ignore[method-assign]
    assert sum(x is not None for x in read) > 20, "notes were hardly read"
    # an error that was the same everywhere is no reason not to wait, later than for a rank alone
    with patience(0.05):
        refuse("got 3", lambda: call(3))
        if rank == 2:
            time.sleep(20 * waiting.PATIENCE)
        assert torch.allclose(call(world), wanted(world), rtol=1e-12)


def nobody_comes(rank: int, size: int) -> None:
    """A timeout, in words, with the error that it was; that is all where another thread may call."""
    limit = datetime.timedelta(seconds=3)
    group = dist.new_group([0, 1, 2], timeout=limit)
    pairs = [dist.new_group([0, 1], timeout=limit) for _ in range(2)]
    check_usable(group, *pairs)

    def refuse(group: Any) -> None:
        caught: Any = None
        try:
            call(group)
        except RuntimeError as error:
            caught = error
        ranks = ", ".join(str(x) for x in dist.get_process_group_ranks(group))
        words = f"all ranks of group {group.group_name!r} of processes {ranks}"
        assert words in str(caught), str(caught)
        assert isinstance(caught.__cause__, RuntimeError)

    if rank < 2:
        refuse(group)
        over = threading.Event()
        thread = threading.Thread(target=over.wait)
        thread.start()
        with patience(0.2):
            refuse(pairs[rank])
        over.set()
        thread.join()
    dist.barrier()


def values_of_options(rank: int, size: int) -> None:
    """Arrays as options are the same on all ranks, where that can be seen; what is of the slice may differ."""
    odd = rank == 1
    decay = torch.tensor([0.5, 0.75, 0.25], dtype=torch.float64)
    other = decay + 2.0**-50 * odd
    scale = torch.tensor(0.5 - 0.25 * odd, dtype=torch.float64)
    refuse("decay: expected torch.float64 (3,) with digest", lambda: call(None, decay=other))
    refuse("scale: expected torch.float64 () with digest", lambda: call(None, scale=scale))
    refuse("on rank 1", lambda: call(None, decay=decay.float() if odd else decay))
    refuse("digest", lambda: call(None, decay=other.requires_grad_(), check=True))
    call(None, decay=decay.clone().requires_grad_(), scale=torch.tensor(0.5, dtype=torch.float64))
    call(None, scale=torch.full((), float("nan"), dtype=torch.float64))
    call(None, log_decay=torch.tensor(-0.5 - rank, dtype=torch.float64))
    call(None, log_decay=torch.full((H, 1), -0.5 - rank, dtype=torch.float64))
    call(None, decay=other, check=False)
    with away_from_hand():
        call(None, decay=other)
        refuse("digest", lambda: call(None, decay=other, check=True))
        # what one rank is refused where it compares nothing any more, those hear who do
        with patience(0.3):
            options: dict[str, Any] = {"method": "other"} if odd else {"ridge": 0.7}
            refuse("method: expected", lambda: call(None, **options))
        check_usable(dist.group.WORLD)


def started_again(rank: int, size: int) -> None:
    """Processes that end their groups and make new ones have compared nothing in these."""
    world = dist.group.WORLD
    notes = waiting.Board()._prefix
    with away_from_hand(), counting() as sent:
        for _ in range(2):
            call(None)
        assert len(sent) == 3
        told = [tempfile.mkdtemp() if rank == 0 else ""]
        dist.broadcast_object_list(told, src=0)
        dist.destroy_process_group()
        store = dist.FileStore(str(Path(told[0]) / "meeting"), size)
        limit = datetime.timedelta(seconds=ranks.SECONDS)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
        assert dist.group.WORLD.group_name == world.group_name
        call(None)
        assert len(sent) == 5, f"{len(sent)} messages"
    assert waiting.Board()._prefix != notes
    told = [""] * size
    dist.all_gather_object(told, waiting.Board()._prefix)
    assert len(set(told)) == 1, told


def refused_before(rank: int, size: int) -> None:
    """A refusal that a rank has caught is no error for those who wait for its next call, however long."""
    world = dist.group.WORLD
    check_usable(world)
    with patience(0.1):
        if rank == 1:
            time.sleep(0.8)  # when nobody is told any more
        else:
            refuse("nonsense", lambda: call("nonsense"))
            time.sleep(1.5)
        check_usable(world, world)
    # that the others were refused earlier does not mean that they know of the next time
    with patience(0.3):
        if rank == 1:
            refuse("nonsense", lambda: call("nonsense"))
        else:
            time.sleep(0.2)
            refuse("an error on rank 1", lambda: call(world))
        check_usable(world)


def threads_in_turn(rank: int, size: int) -> None:
    """What may be another thread's call is waited for."""
    one, two = dist.new_group([0, 1]), dist.new_group([0, 1])
    check_usable(one, two)
    failures: list[Any] = []
    begun = threading.Event()

    def second(daemon: bool) -> None:
        try:
            if daemon:  # known from what it has compared
                call(two)
            begun.wait()
            time.sleep(1.0)
            assert torch.allclose(call(two), wanted(two), rtol=1e-12)
        except Exception as error:
            failures.append(error)

    for daemon in (False, True):
        with patience(0.1):
            if rank == 0:
                begun.clear()
                thread = threading.Thread(target=second, args=(daemon,), daemon=daemon)
                thread.start()
                dist.barrier()
                begun.set()
                check_usable(one)
                thread.join()
            else:
                if daemon:
                    call(two)
                dist.barrier()
                assert torch.allclose(call(two), wanted(two), rtol=1e-12)
                check_usable(one)
    assert not failures, failures
    dist.barrier()


def interrupted(rank: int, size: int) -> None:
    """What is left in the middle makes a group unusable on that rank, and no numbers wrong on others."""
    limit = datetime.timedelta(seconds=2)
    groups = [dist.new_group([0, 1], timeout=limit) for _ in range(2)]
    check_usable(*groups)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    def leave(where: Any, name: str, group: Any) -> None:
        if rank == 0:
            kept = getattr(where, name)
            setattr(where, name, interrupt)
            try:
                call(group)
            except KeyboardInterrupt:
                pass
            else:
                raise AssertionError("no interrupt")
            setattr(where, name, kept)
        else:
            if where is waiting:
                time.sleep(0.5)
            expect(RuntimeError, f"an exchange with all ranks of group {group.group_name!r}", lambda: call(group))
        for check in (None, False):
            refuse("on which a call was interrupted", lambda check=check: call(group, check=check))

    with patience(0.1):
        leave(waiting, "_look", groups[0])
        leave(operators, "slice_sums", groups[1])
    dist.barrier()
    check_usable(dist.group.WORLD)


def backward_left_out(rank: int, size: int) -> None:
    """Its error says what to look for."""
    group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=2))
    output = shared.hla2(*(x.requires_grad_() for x in inputs()), group=group)
    if rank == 0:
        caught: Any = None
        try:
            output.sum().backward()
        except RuntimeError as error:
            caught = error
        words = (
            f"an exchange with all ranks of group {group.group_name!r} of processes 0, 1, got an error where process 0"
        )
        assert words in str(caught), str(caught)
        assert "call backward" in str(caught)
        assert isinstance(caught.__cause__, RuntimeError)
    dist.barrier()

"""A device that is elsewhere, for `test_distributed_torch`: what a backend such as NCCL asks of those who call it.

Its tensors say that they lie on "away:0", as PyTorch lets a backend written in Python say, and keep their numbers on
the CPU, where gloo takes them. All that is done with them is seen: what goes into a collective, which tensors meet,
and what the host reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import hla
import hla.distributed.torch as shared
import ranks
from distributed_calls import DV, D, H, error, part_of, random
from hla.nn.torch import HigherOrderAttention

COLLECTIVE = "c10d._allgather_base_.default"
DTYPES = {torch.uint8, torch.int64, torch.float32, torch.float64}
"""of what is sent: NCCL has all of them, and bool, complex and 16-bit integers only in part"""
SHAPED_BY_VALUES = (
    "aten.nonzero",
    "aten.masked_select",
    "aten.unique",
    "aten._unique",
    "aten.repeat_interleave.Tensor",
)
READ = ("aten._local_scalar_dense.default", "aten.equal.default", "aten.is_nonzero.default", *SHAPED_BY_VALUES)


class Away(torch.Tensor):
    """A tensor on that device."""

    near: torch.Tensor
    """its numbers"""

    @staticmethod
    def __new__(cls, near: torch.Tensor) -> Away:
        made: Away = torch.Tensor._make_wrapper_subclass(
            cls, near.shape, near.stride(), near.storage_offset(), dtype=near.dtype, device="away:0"
        )
        made.near = near
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _perform(op, *args, **(kwargs or {}))

    def tolist(self) -> Any:
        """Which PyTorch does not ask a backend for."""
        _log.read.append("tolist")
        return self.near.tolist()


class Log:
    """What has been seen."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, ...]] = []
        """(dtype, numbers) that went into each collective"""
        self.read: list[str] = []
        """operations in which the host waits for the device"""
        self.written: list[str] = []
        """copies from the host"""
        self.wrong: list[str] = []


_log = Log()


class Host(TorchDispatchMode):
    """Sees what is sent from the host, where it should not be."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(op).startswith("c10d.") and not any(issubclass(x, Away) for x in types):
            _log.wrong.append(f"{op} of what is not on the device")
        return op(*args, **(kwargs or {}))


@contextmanager
def seen() -> Iterator[Log]:
    global _log
    _log, before = Log(), _log
    try:
        with Host():
            yield _log
    finally:
        _log = before


def _perform(op: Any, *args: Any, **kwargs: Any) -> Any:
    """On the numbers."""
    name = str(op)
    wrappers: dict[int, Away] = {}
    met: list[torch.Tensor] = []

    def near(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            met.append(x)
        if isinstance(x, Away):
            wrappers[id(x.near)] = x
            return x.near
        return x

    plain, named = tree_map(near, args), tree_map(near, kwargs)
    device = named.get("device")
    if device is not None and torch.device(device).type == "away":
        named["device"] = torch.device("cpu")
    leaves = device is not None and torch.device(device).type == "cpu"
    _look(name, met, leaves, args)

    def away(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or leaves:
            return x
        return wrappers.get(id(x)) if id(x) in wrappers else Away(x)

    return tree_map(away, op(*plain, **named))


def _look(name: str, met: list[torch.Tensor], leaves: bool, args: Any) -> None:
    here = [x for x in met if not isinstance(x, Away)]
    if name.startswith("c10d."):
        if name != COLLECTIVE:
            _log.wrong.append(f"{name} is another collective")
        if here:
            _log.wrong.append("a tensor on the host goes into a collective")
        if not all(x.is_contiguous() for x in met):
            _log.wrong.append("what is sent or received is not contiguous")
        received, sent = met
        _log.sent.append((sent.dtype, sent.numel()))
        if received.dtype != sent.dtype or sent.dtype not in DTYPES:
            _log.wrong.append(f"{sent.dtype} is sent, {received.dtype} received")
    elif name.startswith(("aten.copy_", "aten._to_copy")):
        if leaves or (name.startswith("aten.copy_") and not isinstance(args[0], Away)):
            _log.read.append(f"{name} {tuple(met[0].shape)}")
        elif here:
            _log.written.append(f"{name} {tuple(met[0].shape)}")
    elif name.startswith(READ) or (name.startswith("aten.index.") and any(_is_mask(x) for x in args[1])):
        _log.read.append(name)
    elif any(x.ndim for x in here) and len(here) < len(met):
        _log.wrong.append(f"{name} takes tensors on two devices")


def _is_mask(index: Any) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def register() -> None:
    """Once in a process."""
    backend_registration._setup_privateuseone_for_python_backend("away")
    library = torch.library.Library("_", "IMPL")
    library.fallback(_perform, "PrivateUse1")
    register.library = library  # type: ignore[attr-defined]
    for made in (torch.tensor, torch.as_tensor):  # which move what they made below the reach of such a backend
        setattr(torch, made.__name__, partial(_made, made))


def _made(make: Any, x: Any, *, dtype: Any = None, device: Any = None, **more: Any) -> Any:
    if device is None or torch.device(device).type != "away":
        return make(x, dtype=dtype, device=device, **more)
    return make(x, dtype=dtype, **more).to(device)


LENGTHS = [9, 4]
T = sum(LENGTHS)
CLOSE = 1e-12
BY_TOKEN = ("log_decay", "token_mask", "segment_ids")
OPTIONS: tuple[tuple[str, ...], ...] = (
    ("log_decay",),
    ("decay", "scale"),
    ("token_mask", "normalize"),
    ("segment_ids",),
    ("initial_state", "log_decay"),
    ("cu_seqlens",),
)


def on_a_device(rank: int, size: int) -> None:
    """Operators and layers twice, forwards and backwards: what travels is fit for NCCL, and in the second, equal call
    the host reads nothing and copies nothing."""
    register()
    failures: list[str] = []
    calls = [("hla2", "segments", options) for options in OPTIONS]
    calls += [
        (name, "stages", options) for name in ("linear_attention", "hla2") for options in (OPTIONS[0], OPTIONS[4])
    ]
    calls += [("linear_attention", "stages", ("mask",)), ("hla3", "segments", ("log_decay",))]
    for name, method, options in calls:
        what = f"{name}, {method}, {options}"
        ranks.attempt(failures, what, lambda n=name, m=method, o=options: operator(rank, n, m, o))
    layers: list[tuple[dict[str, Any], bool]] = [
        ({}, False),
        ({"operator": "ahla", "rotary": True, "decay": "learned"}, True),
        ({"conv_size": None, "decay": 0.9}, True),
    ]
    for given, padded in layers:
        ranks.attempt(failures, f"layer {given}", lambda o=given, p=padded: layer(rank, o, p))
    ranks.attempt(failures, "second derivatives", lambda: second(rank))
    assert not failures, "\n".join(failures)


def moved(x: Any, cut: Any = None) -> Any:
    """On the device, without a trace."""
    if isinstance(x, tuple):
        return type(x)(*(moved(y) for y in x))
    return Away((x if cut is None else x[cut]).detach().clone()) if isinstance(x, torch.Tensor) else x


def check(log: Log, again: bool) -> None:
    """What has been seen of a call on this rank, and that the other one has sent as much."""
    assert not log.wrong, log.wrong
    assert not (again and log.read), f"the host reads: {log.read}"
    assert not (again and log.written), f"the host copies to the device: {log.written}"
    numbers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(numbers, log.sent)
    assert numbers[0] == numbers[1], f"ranks send {numbers}"
    assert numbers[0]


def operator(rank: int, name: str, method: str, options: tuple[str, ...]) -> None:
    q, k, v = (random(H, T, n, seed=i) for i, n in enumerate((D, D, DV)))
    choice: dict[str, Any] = {
        "log_decay": -random(H, T, seed=3).abs(),
        "decay": torch.sigmoid(random(H, seed=5)),
        "scale": torch.tensor(0.7, dtype=torch.float64),
        "token_mask": torch.rand(H, T, generator=torch.Generator().manual_seed(6)) < 0.7,
        "normalize": True,
        "segment_ids": torch.tensor([3] * 4 + [5] * 7 + [6] * 2),
        "mask": "none",
        "cu_seqlens": torch.tensor([0, 3, 11, T]),
        "initial_state": getattr(hla, name)(q, k, v, return_state=True)[1],
    }
    given = {n: choice[n] for n in options}
    if "normalize" in options:
        q, k = q.abs() + 0.1, k.abs() + 0.1
    if "initial_state" in options:
        given["return_state"] = True
    weight = random(H, T, DV, seed=9)

    def run(function: Any, inputs: list[Any], weight: Any, given: Any, **more: Any) -> tuple[Any, list[Any]]:
        output = function(*inputs, **given, **more)
        loss = 0.0
        if isinstance(output, tuple):
            loss = sum(x.square().sum() for x in output[1]) if more.get("method", "") == "" or rank == 0 else 0.0
            output = output[0]
        return output, list(torch.autograd.grad((output * weight).sum() + loss, inputs))

    wanted, gradients = run(getattr(hla, name), [x.requires_grad_() for x in (q, k, v)], weight, given)
    part = (..., part_of(LENGTHS, rank), slice(None))
    for again in (False, True):
        inputs = [moved(x, part).requires_grad_() for x in (q, k, v)]
        own = {n: moved(x, part[:2] if n in BY_TOKEN else None) for n, x in given.items()}
        own_weight = moved(weight, part)
        with seen() as log:
            output, found = run(getattr(shared, name), inputs, own_weight, own, method=method)
        check(log, again and "cu_seqlens" not in options)
        assert again or log.read, "the comparison of the calls is not seen"
        assert output.device.type == "away"
        for x, y in zip([output, *found], [wanted, *gradients], strict=True):
            assert error(x.near, y[part], y) < CLOSE


def layer(rank: int, options: dict[str, Any], padded: bool) -> None:
    torch.manual_seed(3)
    plain = HigherOrderAttention(12, 3, dtype=torch.float64, **options)
    own = HigherOrderAttention(12, 3, dtype=torch.float64, device="away", process_group=dist.group.WORLD, **options)
    for x, y in zip(own.parameters(), plain.parameters(), strict=True):
        x.data.copy_(y.data)
    batch = 2
    x, mask = random(batch, T, 12, seed=1), torch.rand(batch, T, generator=torch.Generator().manual_seed(2)) < 0.4
    y = plain(x, key_padding_mask=mask if padded else None)
    part = (slice(None), part_of(LENGTHS, rank))
    for again in (False, True):
        own_x, own_mask = moved(x, part).requires_grad_(), moved(mask, part) if padded else None
        with seen() as log:
            found = own(own_x, key_padding_mask=own_mask)
            found.square().sum().backward()
        check(log, again)
        assert error(found.near, y[part], y) < CLOSE


def second(rank: int) -> None:
    inputs = [moved(random(H, LENGTHS[rank], n, seed=i)).requires_grad_() for i, n in enumerate((D, D, DV))]
    with seen() as log:
        output = shared.hla2(*inputs, decay=0.9, ridge=0.3)
        first = torch.autograd.grad(output.square().sum(), inputs, create_graph=True)
        torch.autograd.grad(sum(x.square().sum() for x in first), inputs)
    check(log, False)

"""What ranks may do beside calling an operator all alike, for `test_distributed_torch`."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh

import hla
import hla.distributed.torch as shared
import ranks
from distributed_calls import CLOSE, DV, Call, Case, D, H, T, compare, error, part_of, random
from hla.distributed.torch import operators, waiting
from hla.distributed.torch.groups import Place

LENGTHS = [6, 0, 11]
"""tokens on each rank"""
METHODS = [(name, method) for name in ("hla2", "ahla", "hla3") for method in ("segments", "stages")]


BEHAVIOURS = (
    "part_of_the_result",
    "gradients_on_some_ranks",
    "gradients_of_some_inputs",
    "checkpoints",
    "second_derivatives",
    "second_derivatives_of_some_inputs",
    "sixteen_bits",
    "autocast",
    "what_travels",
    "comparing_calls",
    "nothing_to_differentiate",
    "meshes",
    "compiled",
    "disagreements",
    "refusals",
)


def whole(name: str, **options: Any) -> Call:
    return Call(Case(name, options, ("log_decay", "initial_state")))


def local(call: Call, rank: int) -> dict[str, Any]:
    part = part_of(LENGTHS, rank)
    return {name: call.cut(name, x.detach(), part).clone().requires_grad_() for name, x in call.leaves.items()}


def value(call: Call, leaves: dict[str, Any], method: str, **more: Any) -> Any:
    return call.call(getattr(shared, call.case.operator), leaves, {"method": method, **more})


def check_gradients(what: str, call: Call, rank: int, leaves: dict[str, Any], found: Any, wanted: Any) -> None:
    part = part_of(LENGTHS, rank)
    worst = {}
    for name, d, whole_d in zip(leaves, found, wanted, strict=True):
        if name not in ("q", "k", "v", "log_decay"):
            dist.all_reduce(d)
        worst[name] = error(d, call.cut(name, whole_d, part), whole_d)
    bad = {name: x for name, x in worst.items() if not x < CLOSE}
    assert not bad, f"{what}: gradients {bad}"


def part_of_the_result(rank: int, size: int) -> None:
    """Whatever of its result a rank uses, gradients are those of what was used: an exchange left out by one rank would
    hang, or lose what the others send."""
    for name, method in METHODS:
        call = whole(name)
        for what in ("output of the first", "output of the last", "state on the first", "state, output detached"):
            leaves = local(call, rank)
            output, state = value(call, leaves, method)
            of_state = sum((x * d).sum() for x, d in zip(state, call.d_state, strict=True))
            of_output = (output * call.cut("o", call.d_output, part_of(LENGTHS, rank))).sum()
            wanted_by = size - 1 if "last" in what else 0
            if "output of" in what:  # the others use nothing but their state, times zero
                loss = of_output if rank == wanted_by else state[0].sum() * 0
                part = part_of(LENGTHS, wanted_by)
                total = (call.cut("o", call.output, part) * call.cut("o", call.d_output, part)).sum()
            else:
                loss = of_state if rank == wanted_by else (output * 0).sum()
                if "detached" in what:
                    loss = (output.detach() * 3).sum() + (of_state if rank == 0 else state[-1].sum() * 0)
                total = sum((x * d).sum() for x, d in zip(call.state, call.d_state, strict=True))
            wanted = torch.autograd.grad(total, list(call.leaves.values()), retain_graph=True)
            found = torch.autograd.grad(loss, list(leaves.values()))
            check_gradients(f"{name}, {method}, {what}", call, rank, leaves, found, wanted)


def gradients_on_some_ranks(rank: int, size: int) -> None:
    """Rank 0 has inputs without gradients; the others get theirs, through it."""
    for name, method in METHODS:
        call = whole(name)
        leaves = local(call, rank)
        if rank == 0:
            leaves = {n: x.detach() for n, x in leaves.items()}
        output, state = value(call, leaves, method)
        assert output.requires_grad
        loss = (output * call.cut("o", call.d_output, part_of(LENGTHS, rank))).sum()
        if rank == 0:
            loss = loss + sum((x * d).sum() for x, d in zip(state, call.d_state, strict=True))
        loss.backward()
        for n, x in leaves.items():
            if rank and n in ("q", "k", "v", "log_decay"):
                wanted = call.gradients[n]
                off = error(x.grad, call.cut(n, wanted, part_of(LENGTHS, rank)), wanted)
                assert off < CLOSE, f"{name}, {method}, {n}: {off}"


def gradients_of_some_inputs(rank: int, size: int) -> None:
    """Each rank may ask for the gradients of other inputs."""
    call = whole("hla2")
    for method in ("segments", "stages"):
        leaves = local(call, rank)
        output, state = value(call, leaves, method)
        loss = (output * call.cut("o", call.d_output, part_of(LENGTHS, rank))).sum()
        loss = loss + (sum((x * d).sum() for x, d in zip(state, call.d_state, strict=True)) if rank == 2 else 0.0)
        names = [("v",), ("log_decay",), ("q", "k")][rank]
        found = torch.autograd.grad(loss, [leaves[n] for n in names])
        for n, d in zip(names, found, strict=True):
            off = error(d, call.cut(n, call.gradients[n], part_of(LENGTHS, rank)), call.gradients[n])
            assert off < CLOSE, f"{method}, {n}: {off}"


def checkpoints(rank: int, size: int) -> None:
    """Activation checkpointing runs forward exchanges again, on all ranks alike."""
    from torch.utils.checkpoint import checkpoint

    call = whole("hla2")
    leaves = local(call, rank)
    inputs = [leaves[n] for n in ("q", "k", "v", "log_decay")]

    def attend(q: Any, k: Any, v: Any, g: Any) -> Any:
        return shared.hla2(q, k, v, log_decay=g)

    weight = call.cut("o", call.d_output, part_of(LENGTHS, rank))
    wanted = torch.autograd.grad((attend(*inputs) * weight).sum(), inputs)
    found = torch.autograd.grad((checkpoint(attend, *inputs, use_reentrant=False) * weight).sum(), inputs)
    assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


def second_derivatives(rank: int, size: int) -> None:
    def twice(output: Any, state: Any, leaves: Any, d_output: Any, d_state: Any, weights: Any) -> Any:
        loss = (output.square() * d_output).sum() + sum(
            (x.square() * d).sum() for x, d in zip(state, d_state, strict=True)
        )
        first = torch.autograd.grad(loss, list(leaves.values()), create_graph=True)
        return torch.autograd.grad(
            sum((d * w).sum() for d, w in zip(first, weights, strict=True)), list(leaves.values())
        )

    for name, method in METHODS:
        call = whole(name)
        weights = [random(*x.shape, seed=40 + i) for i, x in enumerate(call.leaves.values())]
        output, state = call.call(getattr(hla, name), call.leaves, {})
        wanted = twice(output, state, call.leaves, call.d_output, call.d_state, weights)
        part = part_of(LENGTHS, rank)
        leaves = local(call, rank)
        output, state = value(call, leaves, method)
        # only rank 1, which has no tokens, uses the state; only rank 0 weighs the gradient of the initial one
        shares = [x * (rank == 1) for x in call.d_state]
        own = [
            call.cut(n, w, part) if n in ("q", "k", "v", "log_decay") else w * (rank == 0)
            for n, w in zip(call.leaves, weights, strict=True)
        ]
        found = twice(output, state, leaves, call.cut("o", call.d_output, part), shares, own)
        check_gradients(f"{name}, {method}, second", call, rank, leaves, found, wanted)


def second_derivatives_of_some_inputs(rank: int, size: int) -> None:
    """Each rank asks for other first derivatives, and for other second ones of these; where only these inputs have
    any, too."""
    first = [("q",), ("log_decay", "v"), ("k", "q")]
    then = [("q",), ("v",), ("log_decay", "k")]
    part = part_of(LENGTHS, rank)
    for name, method in METHODS:
        call = whole(name)
        output, _ = call.call(getattr(hla, name), call.leaves, {})
        loss = (output.square() * call.d_output).sum()
        found = torch.autograd.grad(loss, list(call.leaves.values()), create_graph=True)
        weights = [random(*x.shape, seed=40 + i) for i, x in enumerate(found)]
        weighed = {n: d * w for n, d, w in zip(call.leaves, found, weights, strict=True)}
        total = sum(call.cut(n, weighed[n], part_of(LENGTHS, r)).sum() for r in range(size) for n in first[r])
        wanted = torch.autograd.grad(total, [call.leaves[n] for n in then[rank]])
        for alone in (False, True):
            leaves = local(call, rank)
            if alone:
                leaves = {n: x if n in first[rank] + then[rank] else x.detach() for n, x in leaves.items()}
            output, _ = value(call, leaves, method)
            own = (output.square() * call.cut("o", call.d_output, part)).sum()
            ones = torch.autograd.grad(own, [leaves[n] for n in first[rank]], create_graph=True)
            own_weights = [call.cut(n, w, part) for n, w in zip(call.leaves, weights, strict=True) if n in first[rank]]
            order = [n for n in call.leaves if n in first[rank]]
            given = dict(zip(first[rank], ones, strict=True))
            loss = sum((given[n] * w).sum() for n, w in zip(order, own_weights, strict=True))
            twos = torch.autograd.grad(loss, [leaves[n] for n in then[rank]])
            for n, d, w in zip(then[rank], twos, wanted, strict=True):
                off = error(d, call.cut(n, w, part), w)
                assert off < CLOSE, f"{name}, {method}, alone {alone}, {n}: {off}"


def sixteen_bits(rank: int, size: int) -> None:
    """What travels is float32: states and outputs are those of one process, whose inputs are as rough."""
    part = part_of(LENGTHS, rank)
    for name, method in METHODS:
        q, k, v = (random(H, T, n, seed=i).to(torch.bfloat16) for i, n in enumerate((D, D, DV)))
        _, final = getattr(hla, name)(q, k, v, decay=0.9, return_state=True)
        exact = getattr(hla, name)(q.double(), k.double(), v.double(), decay=0.9)
        sizes = getattr(hla, name)(q.double().abs(), k.double().abs(), v.double().abs(), decay=0.9, return_state=True)
        cut = (x[..., part, :] for x in (q, k, v))
        output, state = getattr(shared, name)(*cut, decay=0.9, return_state=True, method=method)
        assert output.dtype == torch.bfloat16
        # the budgets of sums in float32 (`hla.testing.error_budget`), twice: both sides have one
        close = 2 * hla.testing.error_budget(name, "float32", T, D)
        rounded = (output.double() - exact[..., part, :]).abs() - 2.0**-8 * exact[..., part, :].abs()
        assert not (rounded > close * sizes[0][..., part, :].amax(-1, keepdim=True)).any(), f"{name}, {method}"
        for x, y, most in zip(state, final, sizes[1], strict=True):
            assert x.dtype == torch.float32
            assert ((x - y).abs() <= close * most.amax()).all(), f"{name}, {method}: state"


def autocast(rank: int, size: int) -> None:
    """Sums and states are not rounded to 16 bits where products are."""
    for name, method in METHODS:
        given = [random(H, LENGTHS[rank], n, seed=i).float().requires_grad_() for i, n in enumerate((D, D, DV))]
        found = []
        for enabled in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                output, state = getattr(shared, name)(*given, decay=0.9, return_state=True, method=method)
                loss = output.square().sum() + sum(x.sum() for x in state)
                found.append([output, *state, *torch.autograd.grad(loss, given)])
        assert all(torch.equal(x, y) for x, y in zip(*found, strict=True)), f"{name}, {method}"


def what_travels(rank: int, size: int) -> None:
    """What is sent is what `hla.cost` says, in the dtype of sums, in as many rounds."""
    causal = [*METHODS, ("linear_attention", "segments"), ("linear_attention", "stages")]
    everything = [(name, "auto") for name in ("linear_attention", "hla2", "ahla", "hla3")]
    for mask, (name, method) in (*(("causal", x) for x in causal), *(("none", x) for x in everything)):
        q, k, v = (random(H, LENGTHS[rank], n, seed=i).requires_grad_() for i, n in enumerate((D, D, DV)))
        log_decay = -random(H, LENGTHS[rank], seed=3).abs() if mask == "causal" else None
        sizes = {"T": sum(LENGTHS), "d": D, "dv": DV, "heads": H, "dtype": "float64"}
        cost = hla.cost(name, **sizes, devices=size, method=method, library="torch", mask=mask)
        with counting() as sent:
            output = getattr(shared, name)(q, k, v, log_decay=log_decay, mask=mask, method=method, check=False)
            there = len(sent)
            output.sum().backward()
        assert {kind for _, kind in sent} == {torch.float64}
        assert there == len(sent) - there == cost.rounds, f"{name}, {method}, {mask}: {len(sent)} messages"
        forward, back = sum(n for n, _ in sent[:there]), sum(n for n, _ in sent[there:])
        assert forward == cost.sent_bytes, f"{name}, {method}, {mask}: {forward} bytes, not {cost.sent_bytes}"
        assert back == cost.backward_sent_bytes, (
            f"{name}, {method}, {mask}: {back} bytes, not {cost.backward_sent_bytes}"
        )


def comparing_calls(rank: int, size: int) -> None:
    """Where to hear the others is to wait for a device, equal calls are compared once."""
    call = whole("hla2")
    x = [random(H, LENGTHS[rank], n, seed=i) for i, n in enumerate((D, D, DV))]
    with counting() as sent, away_from_hand():
        numbers = []
        for check, times in ((None, 2), (True, 2), (False, 1)):
            for _ in range(times):
                sent.clear()
                shared.hla2(*x, decay=0.6, scale=0.3, check=check)
                numbers.append(len(sent))
        assert numbers == [2, 1, 2, 2, 1], f"messages {numbers}"
        with torch.no_grad():
            sent.clear()
            shared.hla2(*x, decay=0.6, scale=0.3)
            assert len(sent) == 2
        for method in ("segments", "stages"):
            for _ in range(2):
                compare(call, LENGTHS, rank, method)
        remembered, operators._REMEMBERED = operators._REMEMBERED, 5
        apart = dist.new_group([0])
        for i in range(6 * (rank == 0)):  # what one rank shares with others makes it forget nothing of this group
            shared.hla2(*x, ridge=float(i), group=apart)
        operators._REMEMBERED = remembered
        sent.clear()
        shared.hla2(*x, decay=0.6, scale=0.3)
        assert len(sent) == 1, f"{len(sent)} messages"
    with counting() as sent:
        for _ in range(2):
            shared.hla2(*x, decay=0.6, scale=0.3)
        assert len(sent) == 4


@contextmanager
def away_from_hand() -> Iterator[None]:
    operators.at_hand, before = lambda like: False, operators.at_hand
    try:
        yield
    finally:
        operators.at_hand = before


@contextmanager
def patience(seconds: float) -> Iterator[None]:
    waiting.PATIENCE, before = seconds, waiting.PATIENCE
    try:
        yield
    finally:
        waiting.PATIENCE = before


@contextmanager
def counting() -> Iterator[list[tuple[int, Any]]]:
    """(bytes sent, dtype) of each message."""
    sent: list[tuple[int, Any]] = []
    gather = Place.gather

    def counted(self: Place, x: Any, *wait: Any) -> Any:
        sent.append((x.numel() * x.element_size() * (self.size - 1), x.dtype))
        return gather(self, x, *wait)

    Place.gather = counted  # type: ignore[method-assign]
    try:
        yield sent
    finally:
        Place.gather = gather  # type: ignore[method-assign]


def nothing_to_differentiate(rank: int, size: int) -> None:
    q, k, v = (random(H, LENGTHS[rank], n, seed=i) for i, n in enumerate((D, D, DV)))
    assert not shared.hla2(q, k, v).requires_grad
    with torch.no_grad():
        assert not shared.hla2(q.requires_grad_(), k, v).requires_grad


def meshes(rank: int, size: int) -> None:
    """A DeviceMesh and its dimensions, and DTensors through local_map."""
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.experimental import local_map

    call = whole("hla2")
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("sequence",))
    square = init_device_mesh("cpu", (1, size), mesh_dim_names=("data", "sequence"))
    for group in (mesh, square["sequence"], (square, "sequence"), (square, 1), mesh.get_group()):
        compare(call, LENGTHS, rank, "auto", group=group)
    # local_map takes the shards of its output to be equal
    q, k, v, weight = (random(H, 6 * size, n, seed=i) for i, n in enumerate((D, D, DV, DV)))
    log_decay = -random(H, 6 * size, seed=4).abs()
    shards = [Shard(1)]
    attend = local_map(
        lambda q, k, v, g: shared.hla2(q, k, v, log_decay=g, group=mesh),
        out_placements=shards,
        in_placements=(shards, shards, shards, shards),
        device_mesh=mesh,
    )
    given = [distribute_tensor(x, mesh, shards).requires_grad_() for x in (q, k, v, log_decay)]
    wanted = [x.clone().requires_grad_() for x in (q, k, v, log_decay)]
    output = attend(*given)
    expected = hla.hla2(*wanted[:3], log_decay=wanted[3])
    assert error(output.full_tensor(), expected) < CLOSE
    (expected * weight).sum().backward()
    (output * distribute_tensor(weight, mesh, shards)).sum().backward()
    for x, y in zip(given, wanted, strict=True):
        assert error(x.grad.full_tensor(), y.grad) < CLOSE


def compiled(rank: int, size: int) -> None:
    """Within torch.compile, as one operation of the program: values, states, gradients, and what is sent."""
    cases = [
        ("ahla", {}, ("log_decay",)),
        ("hla2", {"method": "stages", "normalize": True, "scale": 0.3}, ()),
        ("hla2", {}, ("segment_ids",)),
        ("ahla", {}, ("cu_seqlens", "initial_state")),
        ("linear_attention", {"mask": "none"}, ("no_state",)),
    ]
    for name, options, more in cases:
        method = options.pop("method", "auto")
        call = Call(Case(name, options, more))
        function = getattr(shared, name)

        def traced(q: Any, k: Any, v: Any, function: Any = function, **given: Any) -> Any:
            return function(q * 1.0, k, v, **given)

        torch._dynamo.reset()
        with warnings.catch_warnings(), counting() as sent:
            warnings.simplefilter("ignore")
            fast = torch.compile(traced, backend="aot_eager", fullgraph=True)
            compare(call, LENGTHS, rank, method, function=fast)
            times = len(sent)
            sent.clear()
            compare(call, LENGTHS, rank, method)
            assert times == len(sent), f"{name} {more}: {times} messages, not {len(sent)}"
    again = dist.new_group([0, 1, 2])
    own = dist.group.WORLD if rank else again
    fast = torch.compile(lambda q, k, v: shared.hla2(q, k, v, group=own), backend="eager")
    x = [torch.ones(H, 2, n) for n in (D, D, DV)]
    with patience(0.3):
        expect(hla.OptionError, "process 0 waiting in group", lambda: fast(*x))
        own = 3 if rank == 1 else dist.group.WORLD
        fast = torch.compile(lambda q, k, v: shared.hla2(q, k, v, group=own), backend="eager")
        if rank == 1:
            with suppress(Exception):  # an error of torch.compile, with that of the call
                fast(*x)
        else:
            expect(hla.OptionError, "an error on rank 1: OptionError: group: expected a ProcessGroup", lambda: fast(*x))


def expect(kind: Any, words: str, function: Callable[[], Any]) -> None:
    caught: Any = None
    try:
        function()
    except Exception as error:
        caught = error
    assert type(caught) is kind, f"{caught!r} for {kind.__name__} about {words!r}"
    assert words in str(caught), f"{words!r} is not in {caught}"
    assert ".." not in str(caught), str(caught)


def disagreements(rank: int, size: int) -> None:
    """Calls that differ on one rank are refused on all, with both values; the group is usable afterwards."""
    odd = rank == 1

    def inputs(d: int = D, dv: int = DV, batch: int = H, dtype: Any = torch.float64) -> list[Any]:
        return [torch.ones(batch, 2, n, dtype=dtype) for n in (d, d, dv)]

    x = inputs()
    state = hla.init_state("hla2", batch=(H,), d=D, dv=DV, like=x[0])
    wide = torch.float64
    cases: list[tuple[Any, str, Any]] = [
        (hla.ShapeError, f"{D + 1} on rank 1", lambda: shared.hla2(*inputs(d=D + odd))),
        (hla.ShapeError, f"{DV + 1} on rank 1", lambda: shared.hla2(*inputs(dv=DV + odd))),
        (hla.ShapeError, "on rank 1", lambda: shared.hla2(*inputs(batch=H + odd))),
        (hla.DTypeError, "float32 on rank 1", lambda: shared.hla2(*inputs(dtype=torch.float32 if odd else wide))),
        (hla.OptionError, "ahla on rank 1", lambda: (shared.ahla if odd else shared.hla2)(*x)),
        (hla.OptionError, "0.25 on rank 1", lambda: shared.hla2(*x, decay=0.25 if odd else 0.5)),
        (hla.OptionError, "0.25 on rank 1", lambda: shared.hla2(*x, scale=0.25 if odd else 0.5)),
        (hla.OptionError, "decay", lambda: shared.hla2(*x, decay=0.5 if odd else None)),
        (hla.OptionError, "prefix on rank 1", lambda: shared.hla2(*x, mask="prefix" if odd else "causal")),
        (hla.OptionError, "True", lambda: shared.hla2(*x, normalize=odd)),
        (hla.OptionError, "return_state", lambda: shared.hla2(*x, return_state=odd)),
        (hla.OptionError, "stages on rank 1", lambda: shared.hla2(*x, method="stages" if odd else "auto")),
        (hla.OptionError, "initial_state", lambda: shared.hla2(*x, initial_state=state if odd else None)),
        (hla.OptionError, "cu_seqlens", lambda: shared.hla2(*x, cu_seqlens=torch.tensor([0, 1 + odd, 6]))),
        (hla.OptionError, "from 0 to the 6 tokens", lambda: shared.hla2(*x, cu_seqlens=torch.tensor([0, 1, 7]))),
    ]
    for kind, words, function in cases:
        expect(kind, words, function)
    with torch.set_grad_enabled(not odd):
        expect(hla.OptionError, "is_grad_enabled", lambda: shared.hla2(*x))
    # what one rank is refused it sees itself, and the others hear of it
    refused = [torch.ones(H, 2 + (odd and i == 1), n, dtype=wide) for i, n in enumerate((D, D, DV))]
    kind = hla.ShapeError if odd else hla.OptionError
    expect(kind, "T = 3", lambda: shared.hla2(*refused))
    unknown = {"decays": 0.5} if odd else {}
    expect(TypeError if odd else hla.OptionError, "decays", lambda: shared.hla2(*x, **unknown))
    expect(hla.OptionError, "True, False or None", lambda: shared.hla2(*x, check="always" if odd else None))
    one, whole_one = [y.float() for y in x], 1 if odd else 1.0
    assert torch.equal(shared.hla2(*one, decay=whole_one, scale=whole_one), shared.hla2(*one))
    assert shared.hla2(*x).shape == (H, 2, DV)


def forward_mode(q: Any, k: Any, v: Any) -> Any:
    with forward_ad.dual_level():
        return shared.hla2(forward_ad.make_dual(q, torch.ones_like(q)), k, v)


def followed(name: str, q: Any, k: Any, v: Any) -> Any:
    """The derivative by an option, with `torch.func`."""
    state = hla.init_state("hla2", batch=(H,), d=D, dv=DV, like=q)
    given = {"decay": 0.5 * q[:, 0, 0], "log_decay": -q[..., 0], "scale": q[0, 0, 0], "initial_state": state[0]}

    def loss(x: Any) -> Any:
        if name == "initial_state":
            x = state._replace(**{state._fields[0]: x})
        return shared.hla2(q, k, v, **{name: x}).sum()

    return torch.func.grad(loss)(given[name])


def refusals(rank: int, size: int) -> None:
    """What no rank may ask for."""
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (size,))
    x = [torch.ones(H, 2, n) for n in (D, D, DV)]
    cases: list[tuple[Any, str, Any]] = [
        (hla.OptionError, "method", lambda: shared.hla2(*x, method="other")),
        (hla.OptionError, "stages", lambda: shared.higher_order(*x, order=4, method="segments")),
        (hla.OptionError, "stages", lambda: shared.hla2(*x, definition="as_printed", method="segments")),
        (hla.OptionError, "check", lambda: shared.hla2(*x, check="always")),
        (hla.OptionError, "group", lambda: shared.hla2(*x, group=3)),
        (hla.OptionError, "mask", lambda: shared.hla2(*x, mask="none", cu_seqlens=torch.tensor([0, 6]))),
        (hla.OptionError, "segment_ids", lambda: shared.hla2(*x, segment_ids=torch.zeros(2).int(), return_state=True)),
        (hla.DTypeError, "torch tensors", lambda: shared.hla2(*(y.numpy() for y in x))),
        (hla.DTypeError, "local_map", lambda: shared.hla2(*(DTensor.from_local(y, mesh, [Shard(1)]) for y in x))),
        (
            hla.BackendUnsupportedError,
            "torch.func",
            lambda: torch.func.grad(lambda q: shared.hla2(q, *x[1:]).sum())(x[0]),
        ),
        (hla.BackendUnsupportedError, "tangent", lambda: forward_mode(*x)),
        *(
            (hla.BackendUnsupportedError, name, lambda name=name: followed(name, *x))
            for name in ("decay", "log_decay", "scale", "initial_state")
        ),
        (TypeError, "decays", lambda: shared.hla2(*x, decays=0.5)),
    ]
    for kind, words, function in cases:
        expect(kind, words, function)
    apart = dist.new_group([0, 1])
    if rank == 2:
        with patience(0.1):
            expect(hla.OptionError, "group", lambda: shared.hla2(*x, group=apart))
    else:
        shared.hla2(*x, group=apart)


def lose_a_rank(rank: int, size: int) -> None:
    """The last rank dies between two calls: the others get an error, soon."""
    x = [random(H, 2, n, seed=i).requires_grad_() for i, n in enumerate((D, D, DV))]
    other = dist.new_group([0, 1, 2])
    output = shared.hla2(*x)
    shared.hla2(*x, group=other)
    if rank == size - 1:
        os._exit(1)
    start = time.monotonic()
    expect(RuntimeError, "group: expected an exchange with all ranks of group", lambda: output.sum().backward())
    with patience(0.1):
        for check in (False, None):
            words = f"has failed on process {rank}"
            expect(hla.OptionError, words, lambda check=check: shared.hla2(*x, check=check))
        expect(RuntimeError, "group: expected a call by all ranks of group", lambda: shared.hla2(*x, group=other))
    assert time.monotonic() - start < ranks.SECONDS / 2


def on_triton(rank: int, size: int) -> None:
    """Sums and operators on Triton's kernels, in its interpreter."""
    os.environ["TRITON_INTERPRET"] = "1"
    from hla.backends.torch import autograd as plain
    from hla.backends.triton import launch

    assert launch.interpreting()

    def refused(*_: Any) -> None:
        raise AssertionError("backend torch has run")

    plain.Operator.forward = refused  # type: ignore[assignment]
    lengths = [5, 6]
    part, total = part_of(lengths, rank), sum(lengths)
    q, k, v = (random(2, total, n, seed=i).float().abs() for i, n in enumerate((16, 16, 8)))
    log_decay = -random(2, total, seed=3).float().abs()
    wanted = [x.double().requires_grad_() for x in (q, k, v, log_decay)]
    named: dict[str, Any] = {"normalize": True, "return_state": True}
    output, state = hla.hla2(*wanted[:3], log_decay=wanted[3], backend="numpy", **named)
    (output.sum() + state.corrected_state.sum()).backward()
    own = [x[:, part].clone().requires_grad_() for x in (q, k, v, log_decay)]
    found, last = shared.hla2(*own[:3], log_decay=own[3], backend="triton", chunk_size=16, **named)
    (found.sum() + last.corrected_state.sum() * (rank == 1)).backward()
    pairs = [(found, output[:, part], output), (last.corrected_state, state.corrected_state, state.corrected_state)]
    pairs += [(x.grad, y.grad[:, part], y.grad) for x, y in zip(own, wanted, strict=True)]
    close = hla.testing.error_budget("hla2", "float32", total, 16, normalize=True, gradient=True)
    for i, (x, y, z) in enumerate(pairs):
        off = float((x.detach() - y.detach()).abs().max() / z.detach().abs().max())
        assert off < close, f"{i}: {off} for {close}"

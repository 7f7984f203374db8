"""What ranks run for `test_distributed_torch_layers`: a layer on slices is the layer on the whole."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import hla
import ranks
from distributed_behaviour import away_from_hand, expect
from distributed_calls import CLOSE, error, part_of, random
from hla.nn.torch import HigherOrderAttention, HigherOrderOperator

B, T, D_MODEL, HEADS = 2, 17, 12, 6
SLICES = {2: [[16, 1], [0, 17]], 3: [[1, 0, 16], [2, 2, 13]], 4: [[1, 1, 0, 15], [3, 7, 6, 1]]}
MIXED = ["hla2", "ahla", "hla2", "linear_attention", "hla3", "hla2"]
OFFSETS = [0, 1, 1, 2, 9, 17]
CASES: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({}, ("state",)),
    ({"operator": "ahla", "decay": "learned", "rotary": True, "num_kv_heads": 3}, ("state", "mask")),
    (
        {"operator": MIXED, "num_kv_heads": 2, "rotary": True, "normalize": True, "qk_norm": "l2", "bias": True},
        ("mask",),
    ),
    ({"operator": "hla3", "conv_size": None, "decay": 0.9}, ("state",)),
    ({"operator": "hla2", "conv_size": 1, "decay": None, "rotary": True}, ()),
    ({"operator": "hla2", "conv_size": 6, "rotary": True}, ("packed",)),
    ({"operator": MIXED, "conv_size": 3, "rotary": True}, ("packed", "state")),
    ({"operator": "ahla", "causal": False, "rotary": True}, ("mask",)),
]


def make(options: dict[str, Any], group: Any = None) -> Any:
    torch.manual_seed(3)
    return HigherOrderAttention(D_MODEL, HEADS, dtype=torch.float64, process_group=group, **options)


def all_cases(rank: int, size: int) -> None:
    failures: list[str] = []
    for i, (options, more) in enumerate(CASES):
        lengths = SLICES[size][i % 2]
        ranks.attempt(failures, f"{options} {more}", lambda o=options, m=more, n=lengths: compare(rank, n, o, m))
    with away_from_hand():
        for options, more in CASES[:3]:
            for _ in range(2):  # compared once, so that lengths are not known the second time
                again = lambda o=options, m=more: compare(rank, SLICES[size][0], o, m)  # noqa: E731
                ranks.attempt(failures, f"again {options} {more}", again)
    if size == 3:
        for function in (state_alone, kept, refused, compiled, operator_module):
            ranks.attempt(failures, function.__name__, lambda f=function: f(rank, size))
    assert not failures, "\n".join(failures)


def compare(rank: int, lengths: list[int], options: dict[str, Any], more: tuple[str, ...]) -> None:
    part = part_of(lengths, rank)
    single, shared = make(options), make(options, dist.group.WORLD)
    packed = "packed" in more
    batch = 1 if packed else B
    x = random(batch, T, D_MODEL, seed=1)
    given: dict[str, Any] = {"cu_seqlens": torch.tensor(OFFSETS)} if packed else {}
    mask = None
    if "mask" in more:
        mask = torch.rand(batch, T, generator=torch.Generator().manual_seed(2)) < 0.4
        mask[0, 3:9] = True
    states = None
    if "state" in more:
        first = single.init_state(len(OFFSETS) - 1 if packed else B)
        states = first.map(lambda y: torch.randn_like(y) * 0.3 if y.dtype == torch.float64 else y + 5)

    def run(layer: Any, cut: slice) -> Any:
        own = x[:, cut].clone().requires_grad_()
        state = states
        if state is not None:
            state = state.map(lambda y: y.clone().requires_grad_() if y.dtype == torch.float64 else y)
            given["return_state"] = True
        if mask is not None:
            given["key_padding_mask"] = mask[:, cut]
        found = layer(own, state, **given)
        y, final = found if isinstance(found, tuple) else (found, None)
        weight = random(batch, T, D_MODEL, seed=4)[:, cut]
        loss = (y * weight).sum()
        ends = [] if final is None else [z for z in final.tensors() if z.requires_grad]
        if cut == slice(0, T) or rank == 1:
            loss = loss + sum((z * random(*z.shape, seed=5 + i)).sum() for i, z in enumerate(ends))
        inputs = [z for z in ([] if state is None else state.tensors()) if z.requires_grad]
        leaves = [own, *layer.parameters(), *inputs]
        return y, final, torch.autograd.grad(loss, leaves, allow_unused=True)

    y, final, wanted = run(single, slice(0, T))
    own, last, found = run(shared, part)
    worst = {"y": error(own, y[:, part], y)}
    if final is not None:
        for i, (a, b) in enumerate(zip(last.tensors(), final.tensors(), strict=True)):
            assert a.shape == b.shape
            assert a.dtype == b.dtype
            worst[f"state {i}"] = error(a.double(), b.double())
    worst["d x"] = error(found[0], wanted[0][:, part], wanted[0])
    for i, (d, b) in enumerate(zip(found[1:], wanted[1:], strict=True)):
        assert (d is None) == (b is None)
        if d is not None:
            a = d.contiguous()
            dist.all_reduce(a)
            worst[f"d {i}"] = float((a - b).abs().max() / b.abs().max().clamp_min(1e-3))
    bad = {name: z for name, z in worst.items() if not z < CLOSE}
    assert not bad, f"slices {lengths}: {bad}"


def state_alone(rank: int, size: int) -> None:
    """Only one group of heads' state is used by rank 1, only y by the others: all exchanges run, in one order."""
    lengths = [4, 0, 13]
    options = {"operator": MIXED, "rotary": True}
    x = random(B, T, D_MODEL, seed=1)
    single, shared = make(options), make(options, dist.group.WORLD)
    whole = x.clone().requires_grad_()
    y, state = single(whole, return_state=True)
    weight = random(*y.shape, seed=4)
    ((y * weight)[:, :4].sum() + (y * weight)[:, 4:].sum() + state.operators[1][0].square().sum()).backward()
    part = part_of(lengths, rank)
    own = x[:, part].clone().requires_grad_()
    y, state = shared(own, return_state=True)
    (state.operators[1][0].square().sum() if rank == 1 else (y * weight[:, part]).sum()).backward()
    assert error(own.grad, whole.grad[:, part], whole.grad) < CLOSE
    for a, b in zip(shared.parameters(), single.parameters(), strict=True):
        total = torch.zeros_like(a) if a.grad is None else a.grad.clone()
        dist.all_reduce(total)
        assert float((total - b.grad).abs().max() / b.grad.abs().max()) < CLOSE


def kept(rank: int, size: int) -> None:
    """Copies keep the group, pickles do not; it is in no state dict, and can be set."""
    layer = make({}, dist.group.WORLD)
    assert "process_group" in repr(layer)
    assert copy.deepcopy(layer).process_group is dist.group.WORLD
    assert layer.state_dict().keys() == make({}).state_dict().keys()
    again = pickle.loads(pickle.dumps(layer))
    x = random(B, 2, D_MODEL, seed=1)
    expect(hla.OptionError, "pickle", lambda: again(x))
    again.process_group = dist.group.WORLD
    assert torch.equal(again(x), layer(x))
    again.process_group = None
    assert again.operators[0].process_group is None
    assert torch.equal(again(x), make({})(x))
    # decoding needs no other rank
    _, state = layer(x, return_state=True)
    if rank == 0:
        y_t, _ = layer.step(x[:, 0], state)
        everything = torch.cat([x] * size + [x[:, :1]], dim=1)
        assert error(y_t, make({})(everything)[:, -1]) < 1e-11


def refused(rank: int, size: int) -> None:
    """What differs on one rank, or is refused there, is an error on all."""
    odd = rank == 1
    x = random(B + odd, 3, D_MODEL, seed=1)
    layer = make({}, dist.group.WORLD)
    expect(hla.ShapeError, "on rank 1", lambda: layer(x))
    x = random(B, 3, D_MODEL + odd, seed=1)
    expect(hla.ShapeError if odd else hla.OptionError, f"{D_MODEL + 1}", lambda: layer(x))
    x = random(1, 3, D_MODEL, seed=1)
    decays = [0.5 + 2.0**-i for i in range(2, 2 + layer.options.num_kv_heads)]
    others: list[tuple[str, dict[str, Any]]] = [
        ("rotary: expected False on every rank, as on rank 0, got True on rank 1", {"rotary": odd}),
        ("decay: expected (0.75, ", {"decay": [*decays[:-1], 0.125 if odd else decays[-1]]}),
        ("backend: expected None on every rank, as on rank 0, got 'torch' on rank 1",
         {"backend": "torch" if odd else None, "decay": decays}),
    ]  # fmt: skip
    for words, options in others:
        other = make(options, dist.group.WORLD)
        expect(hla.OptionError, words, lambda other=other: other(x))
    expect(hla.OptionError, "T = 9", lambda: layer(x, cu_seqlens=torch.tensor([0, 3])))
    cases: list[Callable[[], Any]] = [
        lambda: layer(x, return_state=odd),
        lambda: layer(x, cu_seqlens=torch.tensor([0, 8 + odd, 9])),
    ]
    for case in cases:
        expect(hla.OptionError, "on rank 1", case)
    assert layer(x).shape == x.shape


def compiled(rank: int, size: int) -> None:
    layer = make({}, dist.group.WORLD)
    x = random(B, 3, D_MODEL, seed=rank)
    fast = torch.compile(lambda x: layer(x * 1.0) * 2.0, backend="eager")
    y = fast(x)
    assert torch.equal(y, layer(x) * 2.0)
    y.sum().backward()


def operator_module(rank: int, size: int) -> None:
    part = part_of([4, 0, 13], rank)
    q, k, v = (random(B, T, n, seed=n) for n in (4, 4, 5))
    attend = HigherOrderOperator("hla2", decay=0.9, process_group=dist.group.WORLD)
    wanted = hla.hla2(q, k, v, decay=0.9)
    assert error(attend(q[:, part], k[:, part], v[:, part]), wanted[:, part], wanted) < CLOSE
    odd = rank == 1
    state = attend.init_state((B + odd,), 4, 5, dtype=torch.float64)
    expect(hla.ShapeError if odd else hla.OptionError, "", lambda: attend(q, k, v, state))
    twice = torch.tensor(0.5, dtype=torch.float64) if odd else None
    expect(hla.OptionError, "rank 1" if not odd else "decay=0.9", lambda: attend(q, k, v, decay=twice))

"""Calls of operators for tests of `hla.distributed.torch`: on the whole sequence, and what a rank has of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

import hla
import hla.distributed.torch as shared
import ranks

B, H, T, D, DV = 2, 3, 17, 4, 5
OFFSETS = [0, 3, 3, 4, 12, 17]
"""of packed sequences; with the slices above one ends at a border, one spans three slices, one is empty"""


CLOSE = 1e-12
SLICES = {
    1: [[17]],
    2: [[11, 6], [0, 17]],
    3: [[5, 0, 12], [1, 15, 1]],
    4: [[0, 9, 0, 8], [3, 7, 6, 1]],
}


@dataclass(frozen=True)
class Case:
    """A call: an operator, its plain options, and the names of its options that are arrays."""

    operator: str
    options: dict[str, Any] = field(default_factory=dict)
    arrays: tuple[str, ...] = ()
    methods: tuple[str, ...] = ("segments", "stages")
    grouped: bool = False

    def __str__(self) -> str:
        return f"{self.operator} {self.options} {' '.join(self.arrays)}"


PLAIN = ("linear_attention", "hla2", "ahla", "hla3")
STAGES = ("stages",)
CASES = [
    *(Case(name) for name in PLAIN),
    *(Case(name, {"decay": 0.8, "scale": 0.5}, ("initial_state",)) for name in PLAIN),
    *(Case(name, {}, ("log_decay", "initial_state"), grouped=True) for name in PLAIN),
    *(Case(name, {"normalize": True, "scale": 0.5}, ("log_decay",)) for name in PLAIN),
    *(Case(name, {"mask": "prefix"}, ("log_decay", "initial_state", "token_mask")) for name in PLAIN[1:]),
    *(Case(name, {}, ("log_decay", "token_mask")) for name in PLAIN),
    *(Case(name, {"decay": 0.9}, ("segment_ids",)) for name in PLAIN),
    *(Case(name, {}, ("log_decay", "cu_seqlens", "initial_state"), grouped=True) for name in PLAIN),
    *(Case(name, {}, ("log_decay", "cu_seqlens", "no_state")) for name in PLAIN[1:]),
    *(Case("higher_order", {"order": n}, ("log_decay", "initial_state"), STAGES) for n in (4, 5)),
    *(Case("higher_order", {"order": n, "normalize": True, "decay": 0.9}, (), STAGES) for n in (4,)),
    *(Case(name, {"definition": "as_printed"}, ("log_decay", "initial_state"), STAGES) for name in ("hla2", "hla3")),
    Case("hla2", {"definition": "as_printed", "normalize": True}, ("segment_ids", "token_mask"), STAGES),
    *(Case(name, {"mask": "none"}, ("no_state", "token_mask"), ("auto",)) for name in PLAIN),
    Case("hla2", {"mask": "none", "normalize": True, "ridge": 0.3}, ("no_state",), ("auto",)),
    Case("higher_order", {"order": 4, "mask": "none"}, ("no_state",), ("auto",)),
    *(Case(name, {"mask": "none", "normalize": True}, ("no_state", "one_head"), ("auto",)) for name in PLAIN[:2]),
    Case("hla2", {"ridge": 0.3}, ("decay", "scale", "initial_state", "axis")),
    Case("hla2", {"normalize": True, "ridge": 0.3}, ("log_decay",)),
    Case("ahla", {"form": "recurrent", "chunk_size": 3}, ("decay", "scale")),
    Case("hla2", {"form": "scan", "chunk_size": 2}, ("log_decay", "segment_ids", "token_mask")),
    Case("hla2", {"form": "parallel"}, ("decay", "initial_state", "token_mask")),
    Case("hla2", {"backend": "numpy"}, ("log_decay", "initial_state")),
]


def random(*shape: int, seed: int) -> Any:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class Call:
    """A case on the whole sequence: inputs, value and gradients."""

    def __init__(self, case: Case) -> None:
        self.case = case
        options = case.options
        q, k, v = (
            random(B, 1 if "one_head" in case.arrays else H, T, D, seed=1),
            random(B, 1 if case.grouped or "one_head" in case.arrays else H, T, D, seed=2),
            random(B, H, T, DV, seed=3),
        )
        if options.get("normalize"):
            q, k = q.abs() + 0.1, k.abs() + 0.1
        self.axis = -3 if "axis" in case.arrays else -2
        leaves = {"q": q, "k": k, "v": v}
        if self.axis == -3:
            leaves = {name: x.movedim(-2, -3) for name, x in leaves.items()}
        if "log_decay" in case.arrays:
            leaves["log_decay"] = -random(B, 1, T, seed=4).abs()
            if "segment_ids" not in case.arrays:
                leaves["log_decay"][..., 6] = float("-inf")
        if "decay" in case.arrays:
            leaves["decay"] = torch.sigmoid(random(H, seed=5))
        if "scale" in case.arrays:
            leaves["scale"] = torch.tensor(0.7, dtype=torch.float64)
        self.fixed: dict[str, Any] = dict(options)
        if self.axis == -3:
            self.fixed["axis"] = -3
        if "token_mask" in case.arrays:
            self.fixed["token_mask"] = torch.rand(B, 1, T, generator=torch.Generator().manual_seed(6)) < 0.7
        if "segment_ids" in case.arrays:
            self.fixed["segment_ids"] = torch.tensor([3] * 4 + [5] * 9 + [6] * 4)
        if "cu_seqlens" in case.arrays:
            self.fixed["cu_seqlens"] = torch.tensor(OFFSETS)
        stateless = {"segment_ids", "no_state"} & {*case.arrays}
        self.fixed["return_state"] = not stateless
        self.fields: tuple[str, ...] = ()
        self.state_type: Any = None
        if "initial_state" in case.arrays:
            _, state = self.call(getattr(hla, case.operator), leaves, {})
            self.state_type, self.fields = type(state), state._fields
            leaves |= {name: random(*x.shape, seed=7 + i) for i, (name, x) in enumerate(state._asdict().items())}
            if "key_moment" in leaves:  # symmetric, as a state's is
                leaves["key_moment"] = leaves["key_moment"] + leaves["key_moment"].mT
        self.leaves = {name: x.requires_grad_() for name, x in leaves.items()}
        output, state = self.call(getattr(hla, case.operator), self.leaves, {})
        self.output, self.state = output, state
        self.d_output = random(*output.shape, seed=20)
        self.d_state = [random(*x.shape, seed=21 + i) for i, x in enumerate(state)]
        loss = (output * self.d_output).sum() + sum((x * d).sum() for x, d in zip(state, self.d_state, strict=True))
        self.gradients = dict(
            zip(self.leaves, torch.autograd.grad(loss, list(self.leaves.values()), retain_graph=True), strict=True)
        )

    def call(self, function: Any, leaves: dict[str, Any], more: dict[str, Any]) -> Any:
        """(output, state or ()) of the operator or its shared version."""
        given = {**self.fixed, **leaves, **more}
        fields = [given.pop(name) for name in self.fields]
        if fields:
            given["initial_state"] = self.state_type(*fields)
        found = function(given.pop("q"), given.pop("k"), given.pop("v"), **given)
        return found if self.fixed["return_state"] else (found, ())

    def cut(self, name: str, x: Any, part: slice) -> Any:
        """A slice of an input or output."""
        if name in ("q", "k", "v", "o"):
            return x[..., part, :] if self.axis == -2 else x[..., part, :, :]
        return x[..., part] if name in ("log_decay", "token_mask", "segment_ids") else x


def error(found: Any, wanted: Any, whole: Any = None) -> float:
    """The largest error of a token, relative to it or to the mean size of all tokens."""
    found, wanted = found.detach(), wanted.detach()
    if not wanted.numel():
        return 0.0
    mean = (wanted if whole is None else whole.detach()).abs().mean()
    size = torch.maximum(wanted.abs().amax(-1, keepdim=True) if wanted.ndim > 1 else wanted.abs(), mean)
    return float(((found - wanted).abs() / size.clamp_min(1e-300)).max())


def part_of(lengths: list[int], rank: int) -> slice:
    start = [0, *accumulate(lengths)][rank]
    return slice(start, start + lengths[rank])


def compare(call: Call, lengths: list[int], rank: int, method: str, function: Any = None, **more: Any) -> None:
    """One case on this rank, and what must be equal."""
    part = part_of(lengths, rank)
    local = {name: call.cut(name, x.detach(), part).clone().requires_grad_() for name, x in call.leaves.items()}
    fixed = {name: call.cut(name, x, part) for name, x in call.fixed.items() if name in ("token_mask", "segment_ids")}
    function = function or getattr(shared, call.case.operator)
    output, state = call.call(function, {**local, **fixed}, {"method": method, **more})
    worst = {"o": error(output, call.cut("o", call.output, part), call.output)}
    for name, x, y in zip(getattr(state, "_fields", ()), state, call.state, strict=True):
        assert x.shape == y.shape, f"state {name}: {x.shape} for {y.shape}"
        worst[f"state {name}"] = error(x, y)
    loss = (output * call.cut("o", call.d_output, part)).sum()
    if rank == (len(lengths) - 1) // 2:
        loss = loss + sum((x * d).sum() for x, d in zip(state, call.d_state, strict=True))
    for name, found in zip(local, torch.autograd.grad(loss, list(local.values())), strict=True):
        d = found.contiguous()
        if name not in ("q", "k", "v", "log_decay"):
            dist.all_reduce(d)
        worst[f"d {name}"] = error(d, call.cut(name, call.gradients[name], part), call.gradients[name])
    bad = {name: x for name, x in worst.items() if not x < CLOSE}
    assert not bad, f"slices {lengths}, method {method}: {bad}"


def equal_cases(rank: int, size: int) -> None:
    """All cases; what a process of `test_equals_one_process` does."""
    failures: list[str] = []
    chosen = {4: CASES, 3: CASES[::2], 2: CASES[1::2], 1: CASES[::4]}[size]
    for i, case in enumerate(chosen):
        call = Call(case)
        for j, method in enumerate(case.methods):
            lengths = SLICES[size][(i + j) % len(SLICES[size])]
            ranks.attempt(failures, str(case), lambda c=call, n=lengths, m=method: compare(c, n, rank, m))
    assert not failures, "\n".join(failures)

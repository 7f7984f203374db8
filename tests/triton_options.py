"""Calls that hold every pair of values of two options which exists, for backend "triton" in Triton's interpreter."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import torch

from triton_runs import OPERATORS, draw, initial, placed

HEADS = 2
FACTORS: dict[str, tuple[Any, ...]] = {
    "operator": tuple(name for name in OPERATORS if name != "hla2 prefix"),
    "mask": ("causal", "prefix", "none"),
    "decay": ("none", "number", "array", "log_decay"),
    "scale": ("one", "number", "tensor"),
    "normalize": (False, True),
    "ridge": (0.0, 0.7),
    "tokens": ("all", "masked"),
    "packed": ("no", "segment_ids", "cu_seqlens"),
    "state": ("none", "returned", "through"),
    "axis": (-2, -3),
    "heads": ("own", "grouped", "wide v"),
}
Case = dict[str, Any]


def exists(case: Case) -> bool:
    """Whether the options are defined together."""
    name, mask = case["operator"], case["mask"]
    if name.endswith("printed") and mask != "causal":
        return False
    if name.startswith("order") and mask == "prefix":
        return False
    if case["ridge"] and not name.startswith("hla2"):
        return False
    if mask == "none" and (case["decay"] != "none" or case["state"] != "none" or case.get("form") == "recurrent"):
        return False
    if case["heads"] == "wide v" and (name == "hla3 printed" or name.startswith("order")):
        return False  # up to 66 launches for one gradient: others have the combination
    return not (case["packed"] == "segment_ids" and case["state"] != "none")


def in_pairs(**more: tuple[Any, ...]) -> list[Case]:
    """Few cases that hold every pair of values of two factors which exists."""
    rng = random.Random(0)
    factors = {**FACTORS, **more}
    drawn: list[Case] = []
    while len(drawn) < 3000:
        case = {name: rng.choice(values) for name, values in factors.items()}
        if exists(case):
            drawn.append(case)
    holding: dict[Any, list[Case]] = {}
    for case in drawn:
        for pair in _pairs(case):
            holding.setdefault(pair, []).append(case)
    left = dict.fromkeys(sorted(holding, key=repr))
    result = []
    while left:
        rarest = min(left, key=lambda pair: len(holding[pair]))
        best = max(holding[rarest][:40], key=lambda case: sum(pair in left for pair in _pairs(case)))
        result.append(best)
        for pair in _pairs(best):
            left.pop(pair, None)
    return result


def _pairs(case: Case) -> Iterator[Any]:
    return itertools.combinations(sorted(case.items(), key=lambda item: item[0]), 2)


def names(cases: list[Case]) -> list[str]:
    """Of cases, for pytest."""
    return ["-".join(str(value).replace(" ", "_") for value in case.values()) for case in cases]


def build(case: Case) -> tuple[str, list[Any], dict[str, Any]]:
    """Operator; q, k and v; options."""
    length = case["length"]
    batch, few, wide = (HEADS,), (1,), (3, HEADS)
    q, k, v = draw(length, batch=batch)
    if case["heads"] == "grouped":
        k, v = k[:1], v[:1]
    elif case["heads"] == "wide v":
        v = draw(length, batch=wide)[2]
    if case["normalize"]:  # denominators far from 0
        q, k = q.abs(), k.abs()
    operator, own = OPERATORS[case["operator"]]
    options: dict[str, Any] = {"normalize": case["normalize"], "eps": 2.0, **own}
    options |= {"mask": case["mask"], "axis": case["axis"]}
    if "chunk" in case:
        options["chunk_size"] = case["chunk"]
    if operator == "hla2":
        options["ridge"] = case["ridge"]
    generator = torch.Generator().manual_seed(42)
    if case["decay"] == "number":
        options["decay"] = 0.9
    elif case["decay"] == "array":
        options["decay"] = 0.7 + 0.3 * torch.rand(HEADS, generator=generator)
    elif case["decay"] == "log_decay":
        gates = -0.3 * torch.rand(HEADS, length, generator=generator)
        gates[1:, 4] = gates[:, length - 2] = -torch.inf
        options["log_decay"] = gates
    if case["scale"] == "number":
        options["scale"] = 0.37 if case["normalize"] else -0.7
    elif case["scale"] == "tensor":
        options["scale"] = torch.tensor(0.37)
    if case["tokens"] == "masked":
        mask = torch.ones(HEADS, length, dtype=torch.bool)
        mask[0, [0, 4, length - 1]] = mask[1, 3:6] = False
        options["token_mask"] = mask
    if case["packed"] == "segment_ids":
        options["segment_ids"] = (torch.arange(length) > 4) + 3 * (torch.arange(length) > length - 5).long()
    elif case["packed"] == "cu_seqlens":
        options["cu_seqlens"] = torch.tensor([0, 0, 5, 5, max(5, length - 4), length])
    if case["state"] != "none":
        options["return_state"] = True
    if case["state"] == "through":
        shape, keys = torch.broadcast_shapes(batch, v.shape[:-2]), few if case["heads"] == "grouped" else batch
        keys = (*(1,) * (len(shape) - len(keys)), *keys)
        lead = (5,) if case["packed"] == "cu_seqlens" else ()
        sizes = {"d": q.shape[-1], "dv": v.shape[-1], "kv_batch": (*lead, *keys)}
        options["initial_state"] = initial(operator, options, q, (*lead, *shape), **sizes)
    if case["axis"] == -3:
        q, k, v = (x.movedim(-2, -3) for x in (q, k, v))
    return operator, [q, k, v], placed(options)

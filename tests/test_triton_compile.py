"""The kernels compiled for GPUs that are not here: shared memory, registers, tensor cores; and launches beyond 2³¹.

Nothing runs, so nothing here says whether a result is right, nor how fast it comes.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import os
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import pytest

import libraries

torch: Any = libraries.only("torch")

if os.environ.get("TRITON_INTERPRET") or importlib.util.find_spec("triton") is None:
    pytest.skip("with triton, and without TRITON_INTERPRET", allow_module_level=True)

import triton  # noqa: E402

from hla.backends.triton.launch import Config, Launch  # noqa: E402
from triton_targets import (  # noqa: E402
    KERNELS,
    TARGETS,
    Target,
    Usage,
    compile,
    described,
    launches,
    problem,
    run,
    watching,
)

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""As they are called in names of tests."""
CHECKED = ("sm_80", "sm_90", "sm_100", "gfx942")
"""Targets, by name."""


class Case(NamedTuple):
    """A launch and what it is compiled for."""

    target: str
    dtype: str
    d: int
    dv: int
    launch: Launch
    always: bool = True
    """or only where every configuration is compiled too"""

    @property
    def size(self) -> str:
        return f"{self.dtype} {self.d}x{self.dv}"

    @property
    def name(self) -> str:
        return f"{self.target}, {self.size}: {described(self.launch)}"


EACH = (("hla2", "forget", ""), ("hla2", "recurrent", ""), ("hla2", "long", "carry"))
"""Calls whose launches, or those of one kernel, have every kernel."""
USUAL = (("hla2", "state", ""), *EACH, ("ahla", "state", ""))
"""And those that have every way in which a chain and a read are made."""
WIDE = tuple(
    ("hla2", call, "")
    for call in ("plain", "constant", "segments", "packed", "long", "long forget", "decode", "none", "none packed")
)
"""And those compiled for one target and size besides."""
BESIDES = tuple(("ahla", call, kernel) for _, call, kernel in WIDE)
HALF, SINGLE = ("bf16", 64, 64), ("fp32", 64, 64)
PLAN = (
    *((target, HALF, USUAL, True) for target in CHECKED),
    *((target, SINGLE, EACH, True) for target in CHECKED),
    *(("sm_90", HALF, WIDE, True), ("sm_90", ("bf16", 60, 100), EACH, True)),
    *((target, size, USUAL, False) for target in CHECKED for size in (("bf16", 128, 128), SINGLE)),
    *(("sm_90", size, USUAL, False) for size in (("fp32", 32, 32), ("bf16", 60, 100))),
    ("sm_90", HALF, BESIDES, False),
)
"""Target, dtype and widths, calls, and whether they are compiled always."""


def cases() -> Iterator[Case]:
    """One launch of each description, for every target and size."""
    seen: set[str] = set()
    for target, (dtype, d, dv), calls, always in PLAN:
        for operator, call, kernel in calls:
            for one in launches(operator, DTYPES[dtype], d, dv, call):
                case = Case(target, dtype, d, dv, one, always)
                if case.name not in seen and kernel in ("", one.kernel):
                    seen.add(case.name)
                    yield case


CASES = list(cases())


class Allowance(NamedTuple):
    """Bytes of its own memory that a thread may take in some cases, by their names, and why."""

    cases: str
    spills: int
    reason: str


CLOSE = "operands come to the tensor cores by way of registers, and a few do not fit"
WAVES = "eight wavefronts of 64 threads have 256 registers each; with four, which have 512, nothing spills"
TILES = "without tensor cores whole tiles are in registers, and these of 32 columns do not fit; those of 16 do"
ROWS = "rows that are no multiple of 16 bytes are loaded number by number, each with an address in registers"
SPILLS = (
    Allowance("sm_80, bf16 64x64: chain with read backwards decay *", 160, CLOSE),
    Allowance("sm_80, bf16 64x64: read of two* decay *", 384, CLOSE),
    Allowance("sm_80, bf16 128x128: read of two*", 144, CLOSE),
    Allowance("sm_80, bf16 128x128: chain *", 3264, CLOSE),
    Allowance("sm_80, bf16 128x128: rate *", 32, CLOSE),
    Allowance("gfx942, bf16 64x64: chain with read* decay *", 1152, WAVES),
    Allowance("gfx942, bf16 128x128: chain *", 1408, WAVES),
    Allowance("gfx942, bf16 128x128: rate *", 256, WAVES),
    Allowance("gfx942, fp32 64x64: chain with read backwards decay *", 288, WAVES),
    Allowance("sm_80, fp32 64x64: chain with *", 3968, TILES),
    Allowance("sm_90, fp32 64x64: chain with *", 896, TILES),
    Allowance("sm_100, fp32 64x64: chain with *", 896, TILES),
    Allowance("sm_90, fp32 32x32: chain with output *", 192, TILES),
    Allowance("sm_90, bf16 60x100: *", 1280, ROWS),
)
"""Every case of whose kernel some of the registers go to memory; all others keep them."""


def allowances(case: Case) -> list[Allowance]:
    return [x for x in SPILLS if fnmatchcase(case.name, x.cases)]


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is compiled here is compiled now, and not found from an earlier day; by one worker for all."""
    base = tmp_path_factory.getbasetemp()
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "triton")
        yield


def faults(case: Case, usage: Usage) -> list[str]:
    """What is wrong with a compiled kernel, but for its spills."""
    target, found = TARGETS[case.target], []
    if usage.shared > target.shared:
        found.append(f"{usage.shared} bytes of shared memory, and {target.name} has {target.shared}")
    narrow = case.dtype == "bf16" or case.launch.arguments.get("PRECISION") == "tf32"
    if narrow and case.launch.kernel in ("chain", "read", "rate") and not usage.products:
        found.append("no tensor-core instructions")
    if usage.doubles:
        found.append(f"float64: {', '.join(usage.doubles)}")
    if usage.axes:
        found.append(f"the grid has more than one axis: {', '.join(usage.axes)}")
    return found


def marked(always: bool, *values: Any, id: str) -> Any:
    return pytest.param(*values, id=id, marks=() if always else pytest.mark.all_configs)


@pytest.mark.parametrize("case", [marked(case.always, case, id=case.name) for case in CASES])
def test_a_kernel_fits_its_target(case: Case) -> None:
    usage = compile(case.launch, TARGETS[case.target])
    assert not faults(case, usage)
    allowed, reason = next(((x.spills, x.reason) for x in allowances(case)), (0, "not in SPILLS"))
    assert usage.spills <= allowed, f"spills {usage.spills} bytes, allowed {allowed}: {reason}"


def always(allowance: Allowance) -> bool:
    return any(case.always for case in CASES if allowance in allowances(case))


@pytest.mark.parametrize("allowance", [marked(always(x), x, id=x.cases) for x in SPILLS])
def test_an_allowance_is_needed(allowance: Allowance) -> None:
    cases = [case for case in CASES if allowance in allowances(case)]
    cases.sort(key=lambda case: not case.always)
    assert any(compile(case.launch, TARGETS[case.target]).spills for case in cases), "spills nothing: take it out"


def test_every_kernel_is_compiled_and_has_one_allowance_at_most() -> None:
    for target, size in itertools.product(CHECKED, (HALF, SINGLE)):
        found = [
            case for case in CASES if case.always and (case.target, case.dtype, case.d, case.dv) == (target, *size)
        ]
        assert {case.launch.kernel for case in found} == set(KERNELS)
    assert all(len(allowances(case)) <= 1 for case in CASES)


EVERY = (("hla2", "state"), ("hla2", "forget"), ("hla2 printed", "state"), ("ahla", "long"), ("hla2", "recurrent"))


@pytest.mark.all_configs
@pytest.mark.parametrize(("operator", "call"), EVERY, ids=[" ".join(names) for names in EVERY])
@pytest.mark.parametrize("d", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_every_configuration_fits_its_target(target: Target, dtype: str, d: int, operator: str, call: str) -> None:
    """What a launch may try. Some spill, and then others are faster; but no launch has only such."""
    wrong = []
    for one in launches(operator, DTYPES[dtype], d, d, call, hip=target.backend == "hip"):
        case = Case(target.name, dtype, d, d, one)
        spills = {}
        for config in KERNELS[one.kernel].candidates(one.arguments, target.shared):
            usage = compile(one, target, config)
            spills[shown(config)] = usage.spills
            wrong += [f"{described(one)}, {shown(config)}: {fault}" for fault in faults(case, usage)]
        if min(spills.values()) > 0:
            wrong.append(f"{described(one)}: every configuration spills: {spills}")
    assert not wrong, "\n".join(wrong)


def shown(config: Config) -> str:
    return f"{config.blocks}, {config.warps} warps, {config.stages} stages"


# --- launches beyond 2³¹ ------------------------------------------------------------------------------------------

LIMIT = 2**31


def seen_by(operator: str, call: str, **options: Any) -> list[Launch]:
    with watching() as found:
        run(problem(operator, torch.bfloat16, call=call, **options), call)
    return found


@pytest.mark.parametrize("axis", [-2, -3])
@pytest.mark.parametrize("call", ["plain", "state", "constant", "forget", "masked", "none"])
@pytest.mark.parametrize(
    ("operator", "heads", "length", "d", "dv"),
    [
        ("hla2", 8, 2**22 + 3, 96, 128),  # 2³² elements: one head's tokens alone are 2²⁹
        ("hla2", 1, 2**25 + 3, 96, 128),  # in one head
        ("hla2", 70_000, 300, 96, 128),  # more heads than a grid's second axis has room for
        ("ahla", 70_000, 300, 128, 96),
    ],
)
def test_launches_of_huge_calls(operator: str, heads: int, length: int, d: int, dv: int, call: str, axis: int) -> None:
    found = seen_by(operator, call, heads=heads, length=length, d=d, dv=dv, axis=axis)
    assert {"chain", "read"} <= {one.kernel for one in found}
    beyond = 0
    for one in found:
        assert isinstance(one.programs, int)
        assert one.programs == programs(one, heads, length)
        assert 0 < one.programs < LIMIT
        beyond = max(beyond, *(last for _, last in offsets(one, heads)))
    assert beyond > LIMIT


def programs(one: Launch, heads: int, length: int) -> int:
    """How many a launch needs: one for each head, chunk or part, and block of columns."""
    a, blocks = one.arguments, one.config.blocks
    across = math.ceil(a.get("DZ", 1) / blocks.get("BZ", 1))
    if one.kernel in ("clock", "rate"):
        return heads * math.ceil(length / a["C"])
    if one.kernel == "read":
        return heads * math.ceil(length / a["C"]) * across
    if one.kernel == "carry":
        return heads * math.ceil(a["D"] / blocks["BD"]) * across
    assert one.kernel == "chain"
    return heads * (1 if a["parts"] is None else a["parts"].shape[0] - 1) * across


def offsets(one: Launch, heads: int) -> Iterator[tuple[str, int]]:
    """The largest offset into each tensor of a launch, from its strides; it must be that of the last element."""
    a = one.arguments
    batch = (heads // (a["n1"] * a["n2"]), a["n1"], a["n2"])
    assert math.prod(batch) == heads
    for name, x in a.items():
        if not isinstance(x, torch.Tensor) or name in ("chunks", "parts", "high", "low", "era"):
            continue
        strides = a[f"s_{name}"]
        own = tuple(x.shape[x.ndim - len(strides) + 3 :])
        last = sum((n - 1) * step for n, step in zip((*batch, *own), strides, strict=True))
        assert last == sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)), name
        yield name, last

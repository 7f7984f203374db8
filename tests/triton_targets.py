"""Kernels compiled for GPUs that are not here: which launches there are, and what each takes of a GPU.

`launches()` runs a call on tensors without memory and keeps what it would have launched; `compile()` takes one of these
through Triton's own path, as a launch does, but for the launch itself. A stand-in for the GPU's driver says what to
compile for.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget

from hla.backends.triton import engine, execution, launch
from hla.backends.triton.launch import Config, Launch
from hla.checks import check_call
from hla.options import read_options
from hla.problem import Problem


class Target(NamedTuple):
    """A GPU to compile for."""

    name: str
    backend: str
    arch: int | str
    warp: int
    shared: int
    """bytes of shared memory that a program may take"""


TARGETS = {
    target.name: target
    for target in (
        Target("sm_80", "cuda", 80, 32, 166_912),  # A100
        Target("sm_86", "cuda", 86, 32, 101_376),  # RTX 30xx, A10
        Target("sm_90", "cuda", 90, 32, 232_448),  # H100
        Target("sm_100", "cuda", 100, 32, 232_448),  # B200
        Target("gfx942", "hip", "gfx942", 64, 65_536),  # MI300
    )
}
KERNELS = {
    kernel.name: kernel
    for kernel in (
        engine.CHAIN,
        engine.READ,
        engine.RATE,
        engine.CLOCK,
        engine.CARRY,
        engine.TOKEN,
    )
}
OPERATORS: dict[str, tuple[str, dict[str, Any]]] = {
    "linear_attention": ("linear_attention", {}),
    "hla2": ("hla2", {}),
    "hla2 ridge": ("hla2", {"ridge": 0.7}),
    "hla2 normalized": ("hla2", {"normalize": True}),
    "hla2 printed": ("hla2", {"definition": "as_printed"}),
    "ahla": ("ahla", {}),
    "hla3": ("hla3", {}),
    "hla3 printed": ("hla3", {"definition": "as_printed"}),
}
CALLS = (
    *("plain", "state", "constant", "forget", "masked", "segments", "packed"),
    *("long", "long forget", "recurrent", "recurrent packed", "decode", "none", "none packed"),
)
"""What a call is like: forward and backward but for the recurrent form. "state" has one before and after, "constant"
one log-decay for all tokens, "forget" one for each, "long" so many tokens that they are cut into parts."""
HEADS, TOKENS, MANY = 8, 400, 65_536
"""So few tokens are in one part, however small its chunks are."""


def launches(operator: str, dtype: torch.dtype, d: int, dv: int, call: str = "plain", **options: Any) -> list[Launch]:
    """The launches of a call (`OPERATORS`, `CALLS`) that differ in what is compiled, and their options.

    `hip`: as where PyTorch is one for AMD.
    """
    hip = "6.0" if options.pop("hip", False) else None
    with mock.patch.object(torch.version, "hip", hip), watching() as seen:
        run(problem(operator, dtype, d, dv, call, **options), call)
    found: dict[str, Launch] = {}
    for one in seen:
        found.setdefault(specialization(one), one)
    return list(found.values())


@contextmanager
def watching() -> Iterator[list[Launch]]:
    """The launches in this block."""
    seen: list[Launch] = []
    launch.watchers.append(seen.append)
    try:
        yield seen
    finally:
        launch.watchers.remove(seen.append)


def run(of: Problem, call: str = "plain") -> None:
    """Forward, and backward where the form has one."""
    with torch.no_grad():
        if call == "decode":
            states = execution.compute(replace(of, return_state=True))[1]
            execution.compute(replace(of, initial=states, overwrite=True, return_state=True))
            return
        if call == "state":
            states = execution.compute(replace(of, return_state=True))[1]
            of = replace(of, initial=states, return_state=True)
        output, states = execution.compute(of)
        if not call.startswith("recurrent"):
            execution.differentiate(of, output, states or None)


def problem(operator: str, dtype: torch.dtype, d: int, dv: int, call: str = "plain", **options: Any) -> Problem:
    """A call on tensors that have no memory."""
    name, given = OPERATORS[operator]
    length = options.pop("length", MANY if call.startswith("long") else 1 if call == "decode" else TOKENS)
    heads = options.pop("heads", 1 if call.startswith("long") else HEADS)

    def empty(*shape: int, of: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(1, heads, *shape, dtype=of, device="meta")

    more: dict[str, Any] = {}
    if call == "constant":
        more["decay"] = torch.empty(1, heads, device="meta")
    if call.endswith("forget"):
        more["log_decay"] = empty(length)
    if call == "masked":
        more["token_mask"] = empty(length, of=torch.bool)
    if call == "segments":
        more["segment_ids"] = empty(length, of=torch.int32)
    if call.endswith("packed"):
        more["cu_seqlens"] = torch.tensor([0, length // 3, length])
    if call.startswith("none"):
        more["mask"] = "none"
    tensors = [empty(length, width, of=dtype) for width in (d, d, dv)]
    if options.get("axis") == -3:  # (1, T, heads, d)
        tensors = [torch.empty_like(x.transpose(1, 2), memory_format=torch.contiguous_format) for x in tensors]
    made = check_call(name, *tensors, read_options(name, {**given, **more, **options}), None).problem
    form = "recurrent" if call.startswith(("recurrent", "decode")) else "chunkwise"
    return replace(made, form=form)


def specialization(one: Launch) -> str:
    """What tells a launch from others for the compiler: constants, dtypes, which tensors there are, kinds of stride."""

    def kind(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(map(kind, x))
        if isinstance(x, torch.Tensor):
            return str(x.dtype)
        if isinstance(x, int) and not isinstance(x, bool):
            return "1" if x == 1 else "16" if x % 16 == 0 else "n", x.bit_length() > 31
        return type(x).__name__

    found = {name: x if name.isupper() else kind(x) for name, x in one.arguments.items()}
    return f"{one.kernel} {found}"


def described(one: Launch) -> str:
    """A launch in words: what sets it apart from the kernel's others."""
    a = one.arguments
    words = [one.kernel]
    if one.kernel == "token":
        return f"token of {len(a['LINES'])} lines" + (", packed" if a["bounds"] is not None else "")
    if one.kernel == "chain":
        words.append("state" if a["x"] is None else "with output" if a["o"] is not None else "with read")
        words += ["by decay alone"] * (a["y"] is None) + ["in parts"] * (a["through"] is not None)
        words += ["from parts"] * (a["parts"] is not None and a["through"] is None)
    if one.kernel == "read":
        words += ["of two"] * (a["x2"] is not None) + ["of a state"] * (a["y"] is None)
        words += ["of pairs"] * (a["state"] is None) + ["whole"] * (not a["PER_CHUNK"]) + ["added"] * a["ADD"]
    if one.kernel == "rate":
        words += ["passing"] * (a["d"] is None) + ["added"] * a["ADD"]
    words += ["backwards"] * bool(a.get("REVERSE")) + ["strict"] * bool(a.get("STRICT"))
    words += [("", "constant decay", "decay")[a.get("DECAY", 0)]] * bool(a.get("DECAY"))
    words += ["packed"] * bool(a.get("TABLE"))
    words += ["transposed"] * any(_turned(a.get(f"s_{name}", ())) for name in MATRICES)
    widths = (a.get(name) for name in ("D", "DW", "D2", "DZ"))
    words += ["x".join(str(n) for n in widths if n is not None)] * (a.get("D") is not None)
    return " ".join(words)


MATRICES = ("state", "state2", "initial", "initial2", "borders", "borders2", "after", "final", "final2")
"""Arguments whose strides are those of three batch axes and of (n, row, column)."""


def _turned(strides: tuple[int, ...]) -> bool:
    """Whether matrices lie column by column."""
    return len(strides) == 6 and strides[4] == 1 and strides[5] > 1


class Usage(NamedTuple):
    """What a compiled kernel takes."""

    registers: int
    """of a thread; on AMD vector registers, those for accumulators among them"""
    spills: int
    """bytes of a thread's own memory, for what does not fit into the registers"""
    shared: int
    """bytes of a program"""
    seconds: float
    """to compile it"""
    products: tuple[str, ...]
    """tensor-core instructions"""
    doubles: tuple[str, ...]
    """instructions in float64"""
    axes: tuple[str, ...]
    """of the grid, beyond the first, that it looks at"""


class StandIn:
    """A driver's answers, for a GPU that is not here. A number of its own for each target: Triton keeps what it has
    compiled by the number of the device."""

    def __init__(self, target: Target) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return GPUTarget(self.target.backend, self.target.arch, self.target.warp)

    def get_current_device(self) -> int:
        return 1000 + list(TARGETS).index(self.target.name)

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@contextmanager
def standing_in(target: Target) -> Iterator[None]:
    """Triton compiles for a target in this block."""
    before = triton.runtime.driver._active
    triton.runtime.driver.set_active(StandIn(target))
    try:
        yield
    finally:
        triton.runtime.driver._active = before


def first(one: Launch, target: Target) -> Config:
    """The configuration that a target takes before it has tried any."""
    return KERNELS[one.kernel].candidates(one.arguments, target.shared)[0]


def compile(one: Launch, target: Target, config: Config | None = None) -> Usage:
    """A launch compiled for a target, with the first configuration if none is given."""
    chosen = first(one, target) if config is None else config
    options = {"num_warps": chosen.warps, "num_stages": chosen.stages, "enable_fp_fusion": True}
    start = time.perf_counter()
    with standing_in(target):
        made = KERNELS[one.kernel].function.warmup(**one.arguments, **chosen.blocks, **options, grid=(1,))
    seconds = time.perf_counter() - start
    nvidia = target.backend == "cuda"
    text = made.asm["ptx" if nvidia else "amdgcn"]
    registers, spills = _nvidia(made.asm["cubin"]) if nvidia else _amd(text)
    patterns = PATTERNS[target.backend]
    found = (tuple(sorted(set(re.findall(pattern, text)))) for pattern in patterns)
    return Usage(registers, spills, made.metadata.shared, seconds, *found)


PATTERNS = {
    "cuda": (r"\b(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)\b", r"\b\S+\.f64\b", r"%ctaid\.[yz]"),
    "hip": (r"\bv_mfma_\w+", r"\bv_\w+_f64\w*", r"\.amdhsa_system_sgpr_workgroup_id_([yz]) 1"),
}
"""In assembly: products of a tensor core, float64, other axes of the grid."""


def _nvidia(cubin: bytes) -> tuple[int, int]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        tool = triton.knobs.nvidia.cuobjdump.path
        done = subprocess.run([tool, "-res-usage", path], check=True, capture_output=True, text=True)
    found = {name: int(n) for name, n in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", done.stdout)}
    return found["REG"], found["STACK"] + found["LOCAL"]


def _amd(assembly: str) -> tuple[int, int]:
    found = {name: int(n) for name, n in re.findall(r"^\s*\.(\w+):\s*(\d+)$", assembly, re.MULTILINE)}
    return found["vgpr_count"], found["private_segment_fixed_size"]

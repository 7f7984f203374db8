"""Backends with kernels on a GPU: first their tests on that device, then times, against peers and the memory's rate.

One command, and one file to plot from:

    python benchmarks/gpu.py --json FILE [--backends triton,cupy] [--no-tests] [--sizes B,T,H,d;…] [--dtype bfloat16]
        [--rounds 20]

Forward, and forward with backward: hla2, ahla, hla3 and linear_attention on each backend, hla2 on the torch backend,
causal softmax attention (torch's SDPA, flash), and, where flash-linear-attention is installed, its pass once and HLA₂
as two of its passes. "cupy" gets the same tensors, through DLPack, and its gradient is `hla.vjp`. Decode: one step of
hla2 in place, replayed as a CUDA graph, against a copy of the state. All take turns within one run; before each sample
the caches are overwritten. The share of the ceiling is the traffic that `hla.cost` counts over the time, as part of
the rate of a large copy.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import hla

SIZES = "1,8192,96,128;1,8192,96,64;4,2048,32,128;1,65536,8,128;1,512,32,64"
OPERATORS = ("hla2", "ahla", "hla3", "linear_attention")
OPTIONS: dict[str, Any] = {"decay": 0.99}
ROOT = Path(__file__).resolve().parent.parent
TRITON = tuple(f"tests/test_triton{name}.py" for name in ("", "_gradients", "_library", "_large"))
TESTS = {"triton": ("--arrays=torch", *TRITON), "cupy": ("--arrays=cupy", "tests")}
"""By backend: what pytest is told, with HLA_TEST_DEVICE in the environment."""
Call = Callable[[], Any]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cuda, xpu; cpu is for trying the script in the interpreter")
    parser.add_argument("--backends", default="triton", help="triton, cupy or both, separated by a comma")
    parser.add_argument("--dtype", default="bfloat16", choices=("float16", "bfloat16", "float32"))
    parser.add_argument("--sizes", default=SIZES, help="B,T,H,d, separated by semicolons")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--no-tests", action="store_true", help="times only")
    parser.add_argument("--json", metavar="FILE", help="also write everything to a file")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type != "cpu" and not getattr(torch, device.type).is_available():
        print("No GPU that torch can use.", file=sys.stderr)
        return 2
    found: dict[str, Any] = {"machine": machine(device), "tests": None, "rows": []}
    print(json.dumps(found["machine"]))
    backends = tuple(arguments.backends.split(","))
    if not arguments.no_tests:
        found["tests"] = max(run_tests(device, TESTS[backend]) for backend in backends)
    clock = Clock(device)
    found["copy_bytes_per_second"] = copy_rate(clock, device, arguments.rounds)
    print(f"copy: {found['copy_bytes_per_second'] / 1e9:.0f} GB/s")
    for size in arguments.sizes.split(";"):
        batch, length, heads, d = map(int, size.split(","))
        dtype, sizes = getattr(torch, arguments.dtype), (batch, length, heads, d)
        rows = measure(clock, device, dtype, sizes, arguments.rounds, backends)
        for row in rows:
            if row.get("traffic_bytes"):
                row["share_of_ceiling"] = row["traffic_bytes"] / row["seconds"] / found["copy_bytes_per_second"]
            share = f"{row['share_of_ceiling']:7.0%}" if "share_of_ceiling" in row else "       "
            print(f"{size:18s} {row['pass']:9s} {row['name']:28s} {row['seconds'] * 1e3:10.3f} ms {share}", flush=True)
        found["rows"] += rows
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found, indent=1))
    return 0 if found["tests"] in (None, 0) else 1


def machine(device: torch.device) -> dict[str, str]:
    """What the numbers depend on."""
    versions = {name: version(name) for name in ("torch", "triton", "cupy-cuda12x", "cupy-cuda13x")}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {
        "device": name,
        "date": datetime.date.today().isoformat(),
        "hla": hla.__version__,
        **{name: found for name, found in versions.items() if found},
        "cuda": str(torch.version.cuda),
        "hip": str(torch.version.hip),
    }


def version(distribution: str) -> str:
    """Of what is installed; empty where it is not."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def run_tests(device: torch.device, words: tuple[str, ...]) -> int:
    """A backend's tests with their arrays on the device; pytest's exit status."""
    command = [sys.executable, "-m", "pytest", "-q", *words]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "HLA_TEST_DEVICE": str(device)}, check=False).returncode


class Clock:
    """Times calls on a device, by its own events where it has them; caches are overwritten before each."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.before = 0 if device.type == "cpu" else 2
        """calls that are not timed; on a GPU they compile and tune"""
        self._flush = torch.empty(64 * 2**20 if device.type != "cpu" else 1, dtype=torch.int32, device=device)

    def __call__(self, call: Call) -> float:
        """Seconds of one call."""
        self._flush.zero_()
        if self._device.type == "cpu":
            start = time.perf_counter()
            call()
            return time.perf_counter() - start
        module = getattr(torch, self._device.type)
        start, stop = (module.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        module.synchronize()
        return float(start.elapsed_time(stop) / 1e3)


def in_turns(clock: Clock, calls: dict[str, Call], rounds: int) -> dict[str, float]:
    """Median seconds."""
    for call in calls.values():
        for _ in range(clock.before):
            call()
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            samples[name].append(clock(call))
    return {name: statistics.median(times) for name, times in samples.items()}


def copy_rate(clock: Clock, device: torch.device, rounds: int) -> float:
    """Bytes per second, read and written, of a copy of 1 GiB."""
    x = torch.empty(2**28 if device.type != "cpu" else 2**20, dtype=torch.float32, device=device)
    y = torch.empty_like(x)
    return 2 * 4 * x.numel() / in_turns(clock, {"copy": lambda: y.copy_(x)}, rounds)["copy"]


def measure(
    clock: Clock,
    device: torch.device,
    dtype: torch.dtype,
    size: tuple[int, int, int, int],
    rounds: int,
    backends: tuple[str, ...],
) -> list[dict[str, Any]]:
    batch, length, heads, d = size
    q, k, v = (torch.randn(batch, heads, length, d, device=device, dtype=dtype) * d**-0.25 for _ in range(3))
    cotangent = torch.randn_like(v)
    rows: list[dict[str, Any]] = []
    attend = contenders(backends)
    name = str(dtype).removeprefix("torch.")

    def forward(function: Any) -> Call:
        return lambda: function(q, k, v)

    def backward(function: Any) -> Call:
        if hasattr(function, "pulled"):
            return lambda: function.pulled(q, k, v)(cotangent)
        inputs = [x.detach().requires_grad_() for x in (q, k, v)]
        return lambda: torch.autograd.grad(function(*inputs), inputs, cotangent)

    for what, made in (("forward", forward), ("backward", backward)):
        calls, failed = {}, {}
        for title, (function, _) in attend.items():
            call = made(function)
            try:
                call()
            except Exception as error:  # a peer that cannot run this size is a row without a time
                failed[title] = f"{type(error).__name__}: {error}"[:200]
            else:
                calls[title] = call
        times = in_turns(clock, calls, rounds)
        for title, (_, operator) in attend.items():
            row: dict[str, Any] = {"pass": what, "name": title, "B": batch, "T": length, "H": heads, "d": d}
            row["dtype"] = name
            if title in failed:
                print(f"{title}, {what}: {failed[title]}", file=sys.stderr)
                continue
            row["seconds"] = times[title]
            if operator is not None:
                cost = hla.cost(operator, T=length, d=d, dv=d, heads=batch * heads, dtype=name)
                row["traffic_bytes"] = cost.traffic_bytes
                row["traffic_bytes"] += cost.backward_traffic_bytes if what == "backward" else 0
            rows.append(row)
    rows += decode(clock, device, backends, (q, k, v), rounds, {"B": batch, "H": heads, "d": d, "T": 1, "dtype": name})
    return rows


class On:
    """An operator on a backend."""

    def __init__(self, operator: str, backend: str) -> None:
        self.operator, self.backend = operator, backend
        if backend == "cupy":  # whose gradient no autograd records
            self.pulled = lambda q, k, v: hla.vjp(operator, q, k, v, backend=backend, **OPTIONS)[1]

    def __call__(self, q: Any, k: Any, v: Any) -> Any:
        return getattr(hla, self.operator)(q, k, v, backend=self.backend, **OPTIONS)


def contenders(backends: tuple[str, ...]) -> dict[str, tuple[Any, str | None]]:
    """Functions of q, k, v (B, H, T, d), and the operator whose traffic they have."""
    found: dict[str, tuple[Any, str | None]] = {
        f"{operator}, {backend}": (On(operator, backend), operator) for backend in backends for operator in OPERATORS
    }
    found["hla2, torch"] = (lambda q, k, v: hla.hla2(q, k, v, backend="torch", **OPTIONS), None)
    found["softmax, SDPA"] = (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), None)
    try:
        from fla.ops.linear_attn import chunk_linear_attn
    except ImportError:
        return found

    def once(q: Any, k: Any, v: Any) -> Any:
        return chunk_linear_attn(q, k, v, scale=1.0, normalize=False)[0]

    def fla(*functions: Any) -> Any:
        """Between (B, H, T, d) and the (B, T, H, d) that it takes."""

        def run(q: Any, k: Any, v: Any) -> Any:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            return functions[0](q, k, v).transpose(1, 2)

        return run

    found["flash-linear-attention, once"] = (fla(once), None)
    found["flash-linear-attention, chained"] = (fla(lambda q, k, v: once(q, once(q, k, k), v)), None)
    return found


def decode(
    clock: Clock,
    device: torch.device,
    backends: tuple[str, ...],
    inputs: tuple[Any, Any, Any],
    rounds: int,
    row: dict[str, Any],
) -> list[dict[str, Any]]:
    """A step in place against a copy of its state."""
    q, k, v = (x[:, :, 0].contiguous() for x in inputs)
    _, state = hla.hla2(*(x[:, :, :1] for x in inputs), backend="torch", return_state=True, **OPTIONS)
    state = type(state)(*(x.contiguous() for x in state))
    other = [torch.empty_like(x) for x in state]

    def step(backend: str) -> Call:
        return lambda: hla.step(state, q, k, v, backend=backend, inplace=True, **OPTIONS)

    def copy() -> None:
        for x, y in zip(state, other, strict=True):
            y.copy_(x)

    calls: dict[str, Call] = {f"hla2, {backend}, step": step(backend) for backend in backends}
    calls["copy of the state"] = copy
    if device.type == "cuda":
        calls = {name: replayed(name, call) for name, call in calls.items()}
    times = in_turns(clock, calls, rounds)
    moved = hla.cost("hla2", T=1, d=row["d"], dv=row["d"], heads=row["B"] * row["H"], form="recurrent").traffic_bytes
    rows = [{**row, "pass": "decode", "name": name, "seconds": seconds} for name, seconds in times.items()]
    for one in rows[:-1]:
        one["traffic_bytes"] = moved
    return rows


def replayed(name: str, call: Call) -> Call:
    """A call as a CUDA graph, which leaves the device's time; or the call itself, where it cannot be captured."""
    side = torch.cuda.Stream()
    try:
        with torch.cuda.stream(side):  # where it is captured: CuPy's memory is kept for each stream
            call()
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side, capture_error_mode="relaxed"):
            call()
    except Exception as error:
        print(f"{name}: timed without a CUDA graph: {type(error).__name__}: {error}"[:300], file=sys.stderr)
        torch.cuda.synchronize()
        return call
    return graph.replay


if __name__ == "__main__":
    sys.exit(main())

"""Sequences over several devices: bytes that JAX's compiled programs send against `hla.cost`, and a projection.

The projection is arithmetic, no measurement: `hla.cost` for one attention layer, over rates that are assumptions. A
device computes at `--flops`, sends at `--link` bytes a second, and an exchange with another takes `--latency` seconds
before its first byte; gathering from P devices along a ring takes P − 1 of these. Nothing overlaps. Beside it, what
ring attention, exact softmax attention over devices, sends and computes: all keys and values pass all devices.

    python benchmarks/devices.py [--measure] [--operator hla2] [--heads 32] [--size 128] [--flops 200e12] [--link 50e9]
"""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import hla

KINDS = "all-gather|all-reduce|all-to-all|collective-permute|collective-broadcast|reduce-scatter|ragged-all-to-all"
OPERATION = re.compile(rf"= (\([^()]*\)|\S+) ({KINDS})(-start)?\(")
ARRAY = re.compile(r"([a-z]+\d*)\[([\d,]*)\]")
SIZE = {"pred": 1, "f16": 2, "bf16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "f64": 8}


class Operation(NamedTuple):
    """One exchange of a compiled program."""

    kind: str
    arrays: tuple[tuple[str, tuple[int, ...]], ...]
    """dtype and shape of each result"""


def operations(compiled: Any) -> list[Operation]:
    """All that devices exchange, from the program as XLA runs it."""
    found = []
    for shapes, kind, started in OPERATION.findall(compiled.as_text()):
        if started:
            raise NotImplementedError("the arrays of an asynchronous operation would have to be told apart")
        arrays = ((dtype, tuple(int(n) for n in size.split(",") if n)) for dtype, size in ARRAY.findall(shapes))
        found.append(Operation(kind, tuple(arrays)))
    return found


def sent(found: Iterable[Operation], devices: int) -> float:
    """Bytes that one device sends, each exchange along a ring."""
    share = {
        "all-gather": (devices - 1) / devices,  # of what is there at the end
        "reduce-scatter": devices - 1,  # times what is left at the end
        "collective-permute": 1,
        "all-reduce": 2 * (devices - 1) / devices,
    }
    sizes = [(x.kind, sum(SIZE[dtype] * math.prod(shape) for dtype, shape in x.arrays)) for x in found]
    return sum(share[kind] * size for kind, size in sizes)


def measure(operator: str, heads: int, size: int, devices: int, tokens: int, exchange: str) -> tuple[float, float]:
    """Bytes that a device sends in the forward pass, and in forward and backward pass together; nothing runs."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    import hla.distributed.jax as distributed

    mesh = jax.make_mesh((devices,), ("seq",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec(None, "seq")

    def own(q: Any, k: Any, v: Any, log_decay: Any) -> Any:
        call = getattr(distributed, operator)
        return call(q, k, v, axis_name="seq", log_decay=log_decay, exchange=exchange)

    attend = jax.shard_map(own, mesh=mesh, in_specs=spec, out_specs=spec)
    shapes = [(heads, tokens, size)] * 3 + [(heads, tokens)]
    xs = [jax.ShapeDtypeStruct(x, jnp.bfloat16, sharding=NamedSharding(mesh, spec)) for x in shapes]
    gradient = jax.grad(lambda *xs: attend(*xs).astype(jnp.float32).sum(), argnums=(0, 1, 2, 3))
    compiled = [jax.jit(function).lower(*xs).compile() for function in (attend, gradient)]
    forward, both = (sent(operations(x), devices) for x in compiled)
    return forward, both


def print_measured(operator: str, heads: int, size: int, devices: int) -> None:
    print(f"{operator}, {heads} heads of {size}, {devices} devices: bytes sent by each, compiled / modelled\n")
    print("| tokens | exchange | forward | forward and backward |\n|---|---|---|---|")
    for tokens in (1024, 16384):
        for exchange in ("gather", "doubling"):
            found = measure(operator, heads, size, devices, tokens, exchange)
            model = hla.cost(operator, T=tokens, d=size, dv=size, heads=heads, devices=devices, exchange=exchange)
            both = model.sent_bytes + model.backward_sent_bytes
            print(f"| {tokens} | {exchange} | {found[0]:.0f} / {model.sent_bytes} | {found[1]:.0f} / {both} |")


def seconds(x: float) -> str:
    return f"{x:.0f} s" if x >= 100 else f"{x:.3g} s" if x >= 1 else f"{1e3 * x:.3g} ms"


def size_of(x: float) -> str:
    unit, name = next((u, n) for u, n in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (0, "B")) if x >= u)
    return f"{x / (unit or 1):.3g} {name}"


def print_projection(operator: str, heads: int, size: int, flops: float, link: float, latency: float) -> None:
    print(f"{operator}, one layer of {heads} heads of {size}, bfloat16, forward; {flops:.3g} flop/s,", end=" ")
    print(f"{link:.3g} B/s, {latency:.3g} s\n")
    print("| tokens | devices | memory | compute | gather: sent | takes | doubling: sent | takes |", end=" ")
    print("ring attention: sent | takes | compute |\n|" + 11 * "---|")
    for tokens in (10**6, 10**7, 10**8):
        for devices in (8, 64, 1024):
            costs = {
                name: hla.cost(
                    operator, T=tokens, d=size, dv=size, heads=heads, dtype="bfloat16", devices=devices, exchange=name
                )
                for name in ("gather", "doubling")
            }
            steps = {"gather": devices - 1, "doubling": costs["doubling"].rounds}
            gather = costs["gather"]
            cells = [f"10{'⁶⁷⁸'[round(math.log10(tokens)) - 6]}", devices, size_of(gather.device_bytes)]
            cells.append(seconds(gather.flops / flops))
            for name, cost in costs.items():
                cells += [size_of(cost.sent_bytes), seconds(steps[name] * latency + cost.sent_bytes / link)]
            passed = gather.kv_cache_bytes * (devices - 1) // devices
            cells += [size_of(passed), seconds((devices - 1) * latency + passed / link)]
            cells.append(seconds(2 * tokens**2 * size * heads / devices / flops))
            print("| " + " | ".join(map(str, cells)) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--measure", action="store_true", help="compile for 8 simulated devices of JAX and count")
    parser.add_argument("--operator", default="hla2", choices=["linear_attention", "hla2", "ahla", "hla3"])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--size", type=int, default=128, help="features of a head")
    parser.add_argument("--flops", type=float, default=200e12, help="operations a second and device, as achieved")
    parser.add_argument("--link", type=float, default=50e9, help="bytes a second that a device sends")
    parser.add_argument("--latency", type=float, default=1e-5, help="seconds before an exchange's first byte")
    given = parser.parse_args()
    if given.measure:
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
        print_measured(given.operator, 8, 64, 8)
        print()
    print_projection(given.operator, given.heads, given.size, given.flops, given.link, given.latency)


if __name__ == "__main__":
    main()

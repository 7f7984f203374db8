"""`hla.distributed.jax` on four devices of JAX, simulated on the CPU, in processes of their own.

Values and gradients are judged by `hla.vjp` on NumPy arrays of the whole sequence. What the devices send is read off
the compiled programs and compared with `hla.cost`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import libraries

libraries.only("jax")

ON_FOUR = """
import re
from functools import partial
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import hla, hla.distributed.jax as distributed

jax.config.update("jax_enable_x64", True)
assert jax.device_count() == 4
H, D, DV = 3, 5, 7
rng = np.random.default_rng(0)
checks = 0


def mesh_of(n, kind=AxisType.Auto):
    return jax.make_mesh((n,), ("seq",), axis_types=(kind,), devices=jax.devices()[:n])


def draw(T):
    q, k, v = (0.7 * rng.normal(size=(H, T, n)) for n in (D, D, DV))
    return q, k, v, -rng.exponential(0.2, size=(H, T))


def state_of(name):
    q, k, v, g = draw(4)
    return getattr(hla, name)(*map(np.abs, (q, k, v)), log_decay=g, return_state=True)[1]


def put(mesh, spec, tree):
    return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, spec)), tree)


def same(found, want, label):
    global checks
    found, want = jax.tree.leaves(found), jax.tree.leaves(want)
    assert len(found) == len(want), label
    for i, (x, y) in enumerate(zip(found, want)):
        y = np.asarray(y)
        floor = np.maximum.accumulate(np.abs(y), axis=-2) if y.ndim > 2 else np.abs(y).max(initial=0)
        apart = np.abs(np.asarray(x) - y) / np.maximum(floor, 1e-3 * np.abs(y).max(initial=1e-300))
        assert x.shape == y.shape and (apart < 1e-12).all(), f"{label}: {i}: {apart.max()}"
        checks += 1
"""

VALUES = (
    ON_FOUR
    + """
jax.config.update("jax_disable_most_optimizations", True)
S = P(None, "seq")


def inside(name, n, T, kind, initial, shard_options, **options):
    '''shard_map around the call; gradients of everything, through the output and the state.'''
    q, k, v, g = draw(T)
    masks = rng.random((n, H, T // n)) < rng.uniform(0.3, 1.0, size=(n, 1, 1))  # slices of other lengths
    mask = np.concatenate(list(masks), axis=-1)
    exchange = options.pop("exchange", "gather")
    state = state_of(name) if initial else None
    more = dict(token_mask=mask, return_state=True, chunk_size=3, **options)
    value, pull = hla.vjp(name, q, k, v, log_decay=g, initial_state=state, **more)
    slopes = pull(value)
    want = value, (slopes.q, slopes.k, slopes.v, slopes.log_decay, slopes.initial_state)
    mesh = mesh_of(n, kind)
    op = partial(getattr(distributed, name), axis_name="seq", exchange=exchange)

    def own(q, k, v, g, state, mask):
        return op(q, k, v, log_decay=g, initial_state=state, **{**more, "token_mask": mask})

    mapped = jax.shard_map(
        own, mesh=mesh, in_specs=(S, S, S, S, P(), S), out_specs=(S, P()), **shard_options
    )

    @jax.jit
    def both(q, k, v, g, state, mask, cotangent):
        out, pull = jax.vjp(lambda *xs: mapped(*xs, mask), q, k, v, g, state)
        return out, pull(cotangent)

    with jax.set_mesh(mesh):
        xs = (*put(mesh, S, (q, k, v, g)), put(mesh, P(), state), put(mesh, S, mask))
        cotangent = put(mesh, S, value[0]), put(mesh, P(), value[1])
        found = both(*xs, cotangent)
    same(found, want, f"{name}, {n}, {kind}")
    assert all(x.sharding.is_fully_replicated for x in found[0][1])
    assert found[0][0].sharding.is_equivalent_to(xs[2].sharding, 3)


inside("hla2", 4, 20, AxisType.Explicit, True, {})
inside("hla2", 3, 12, AxisType.Auto, True, {"check_vma": False}, exchange="doubling")
inside("ahla", 2, 6, AxisType.Auto, False, {}, exchange="doubling")

# Whole arrays, wherever they lie; packed sequences across borders; gradients
q, k, v, g = draw(20)
ids = np.cumsum(rng.random((H, 20)) < 0.2, axis=-1)
offsets = np.asarray([0, 3, 3, 11, 20])
state = state_of("ahla")
states = type(state)(*(np.stack([(n + 1) * x for n in range(4)]) for x in state))
for kind, options in (
    (AxisType.Auto, dict(segment_ids=ids)),
    (AxisType.Explicit, dict(cu_seqlens=offsets, return_state=True, initial_state=states, exchange="doubling")),
):
    plain = {n: x for n, x in options.items() if n != "exchange"}
    value, pull = hla.vjp("ahla", q, k, v, log_decay=g, **plain)
    mesh = mesh_of(4, kind)

    @jax.jit
    def both(q, k, v, g):
        run = lambda *xs: distributed.ahla(*xs[:3], axis_name="seq", mesh=mesh, log_decay=xs[3], **options)
        out, pull = jax.vjp(run, q, k, v, g)
        return out, pull(out)

    slopes = pull(value)
    xs = tuple(map(jnp.asarray, (q, k, v, g)))
    same(both(*xs), (value, (slopes.q, slopes.k, slopes.v, slopes.log_decay)), f"whole, {kind}")

# One of two axes, heads over the other, and time over both
q, k, v = (jnp.concat([x, x[:1]]) for x in map(jnp.asarray, (q, k, v)))
want = hla.hla2(q, k, v, decay=0.9)
for kind in (AxisType.Auto, AxisType.Explicit):
    mesh = jax.make_mesh((2, 2), ("heads", "seq"), axis_types=(kind, kind))
    spec = P("heads", "seq")
    attend = partial(distributed.hla2, axis_name="seq", decay=0.9)
    mapped = jax.shard_map(attend, mesh=mesh, in_specs=spec, out_specs=spec)
    xs = put(mesh, spec, (q, k, v))
    same(jax.jit(mapped)(*xs), want, f"two axes, {kind}")
    if kind == AxisType.Auto:
        same(distributed.hla2(*xs, axis_name="seq", mesh=mesh, decay=0.9), want, "whole, two axes")
    else:
        try:
            distributed.hla2(*xs, axis_name="seq", mesh=mesh, decay=0.9)
        except hla.OptionError as error:
            assert "Leave mesh out" in str(error)
            checks += 1
        else:
            raise AssertionError("explicit axes of heads")
    xs = put(mesh, P(), (q, k, v))
    both = distributed.hla2(*xs, axis_name=("heads", "seq"), mesh=mesh, decay=0.9)
    same(both, want, f"time over two axes, {kind}")

# What is refused
mesh = mesh_of(4)
elsewhere = partial(distributed.hla2, axis_name="time")
for words, run in (
    ("the same on all of its devices", jax.shard_map(attend, mesh=mesh, in_specs=P(), out_specs=P())),
    ("divides by the 4 devices", lambda q, k, v: attend(q[:, :7], k[:, :7], v[:, :7], mesh=mesh)),
    ("which is none here", jax.jit(attend)),
    ("which is none here", jax.shard_map(elsewhere, mesh=mesh, in_specs=S, out_specs=S)),
):
    try:
        jax.eval_shape(run, q, k, v)
    except ValueError as error:
        assert words in str(error), error
        checks += 1
    else:
        raise AssertionError(words)
print(checks)
"""
)

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
"""One of which counts what is sent."""
EXAMPLE = Path(__file__).parents[1] / "examples" / "long_context_jax.py"

SENT = (
    ON_FOUR
    + """
from devices import operations, sent

S = P(None, "seq")
CASES = [  # called inside shard_map, or with mesh on whole arrays
    ("hla2", AxisType.Auto, "inside", dict(exchange="gather")),
    ("hla2", AxisType.Explicit, "inside", dict(exchange="doubling")),
    ("ahla", AxisType.Auto, "whole", dict(exchange="gather", normalize=True)),
    ("higher_order", AxisType.Explicit, "whole", dict(exchange="doubling", order=4)),
    ("hla3", AxisType.Auto, "inside", dict(exchange="gather", mask="none")),
]
for name, kind, how, options in CASES:
    shapes = []
    for T in (64, 4096)[: 2 if name == "hla2" else 1]:  # the longer one takes long to compile
        mesh = mesh_of(4, kind)
        op = partial(getattr(distributed, name), axis_name="seq", chunk_size=16, **options)

        def attend(q, k, v, g, **more):
            return op(q, k, v, log_decay=None if "mask" in options else g, **more)

        attend = (
            partial(attend, mesh=mesh) if how == "whole"
            else jax.shard_map(attend, mesh=mesh, in_specs=S, out_specs=S)
        )
        loss = lambda *xs: (attend(*xs) ** 2).sum()
        xs = [
            jax.ShapeDtypeStruct((H, T, *more), jnp.float32, sharding=NamedSharding(mesh, S))
            for more in ((D,), (D,), (DV,), ())
        ]
        forward = jax.jit(attend).lower(*xs).compile()
        gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3))).lower(*xs).compile()
        shapes.append((sorted(operations(forward)), sorted(operations(gradient))))
        cost = hla.cost(name, T=T, d=D, dv=DV, heads=H, devices=4, chunk_size=16, **options)
        memory = forward.memory_analysis()
        slices = memory.argument_size_in_bytes + memory.output_size_in_bytes
        measured = sent(shapes[-1][0], 4), sent(shapes[-1][1], 4)
        modelled = cost.sent_bytes, cost.sent_bytes + cost.backward_sent_bytes
        # the decay through a slice is sent in every round, and XLA sees that it is the same
        again = 4 * H * cost.rounds if options.get("order") == 4 else 0
        for x, y in zip(measured, modelled):
            assert y - again <= x <= y and x > 0, (name, options, T, measured, modelled)
        decays = 4 * H * T // 4
        assert slices in (4 * H * 2 * (D + DV) * T // 4 + decays, 4 * H * 2 * (D + DV) * T // 4), slices
        assert slices <= cost.device_bytes + decays
        assert memory.temp_size_in_bytes < 2 * (cost.device_bytes + decays), (memory.temp_size_in_bytes, cost)
        checks += 1
    assert shapes[0] == shapes[-1], f"{name}: what is sent grows with T"
    sizes = [n for x in sum(shapes[0], []) for _, shape in x.arrays for n in shape]
    assert max(sizes) < 64 // 4, f"{name}: tokens are sent"
print(checks)
"""
)


@pytest.mark.parametrize(("script", "checks"), [(VALUES, 47), (SENT, 7)], ids=["values", "sent"])
def test_on_four_devices(script: str, checks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices on 2, 3 and 4 devices, both kinds of axes: values, gradients, states; only summaries travel."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("PYTHONPATH", str(BENCHMARKS), prepend=os.pathsep)
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) == checks


def test_the_training_example(monkeypatch: pytest.MonkeyPatch) -> None:
    """It compares itself with one device, and fails where they differ."""
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    options = {"devices": 2, "tokens": 256, "steps": 2, "width": 16, "layers": 1, "heads": 2}
    words = [x for name, value in options.items() for x in (f"--{name}", str(value))]
    command = [sys.executable, "-W", "error", str(EXAMPLE), *words, "--exchange", "doubling"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    _, first, second, *_ = done.stdout.splitlines()
    assert first.split()[0] == "1"
    assert first.split()[1] == first.split()[2]
    assert float(second.split()[1]) < float(first.split()[1])
    sent = [line.split()[1] for line in done.stdout.splitlines() if line.endswith("MB")]
    assert len(sent) == 2
    assert sent[0] == sent[1]

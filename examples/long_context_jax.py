"""Train a small language model on one long text that is spread over devices of JAX, and check it against one device.

    python examples/long_context_jax.py                                # 4 simulated devices on the CPU
    python examples/long_context_jax.py --tokens 65536 --steps 50
    python examples/long_context_jax.py --real --devices 8             # the accelerators that are there

It needs `pip install ".[jax]"`. Each step's batch is one piece of text of that many tokens, a slice on each device;
parameters are the same everywhere. Losses and gradients are compared with those of one device that has the whole text.
Then follow the bytes that a device sends in a step and its memory, as the text grows.
"""

from __future__ import annotations

import argparse
import math
import os
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    summary, details = (__doc__ or "").split("\n", 1)
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, help="file to learn; by default the topics of pydoc")
    for name, default, meaning in (
        ("devices", 4, "over which the text is spread"),
        ("tokens", 8192, "bytes of text in a step"),
        ("steps", 20, "of the optimizer"),
        ("width", 64, "features of the residual stream"),
        ("layers", 2, "blocks"),
        ("heads", 4, "heads of each block"),
        ("seed", 0, "of the parameters"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{meaning} (%(default)s)")
    parser.add_argument("--operator", default="hla2", choices=["linear_attention", "hla2", "ahla", "hla3"])
    parser.add_argument("--exchange", default="gather", choices=["gather", "doubling"])
    parser.add_argument("--lr", type=float, default=3e-3, help="(%(default)s)")
    parser.add_argument("--real", action="store_true", help="on the accelerators, not on simulated devices")
    return parser.parse_args(words)


GIVEN = arguments()
if not GIVEN.real:  # before JAX looks at its devices
    os.environ["JAX_PLATFORMS"] = "cpu"
    given = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{given} --xla_force_host_platform_device_count={GIVEN.devices}"

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax import Array  # noqa: E402
from jax.sharding import AxisType, NamedSharding, PartitionSpec  # noqa: E402

import hla  # noqa: E402
import hla.distributed.jax  # noqa: E402

AXIS = "time"
Parameters = dict[str, Any]


def read_text(path: Path | None) -> bytes:
    """What to learn."""
    if path is not None:
        return path.read_bytes()
    from pydoc_data.topics import topics

    return b"\n".join(topics[name].encode() for name in sorted(topics))


# The model: nothing but attention looks at other tokens


def parameters(given: argparse.Namespace) -> Parameters:
    """Of all layers, stacked."""
    keys = iter(jax.random.split(jax.random.key(given.seed), 6))
    width, layers = given.width, given.layers

    def matrix(*shape: int) -> Array:
        return jax.random.normal(next(keys), shape, jnp.float32) / math.sqrt(shape[-2])

    return {
        "embedding": matrix(256, width),
        "layers": {
            "qkv": matrix(layers, width, 3 * width),
            "forget": matrix(layers, width, given.heads) / 10,
            "out": matrix(layers, width, width) / 2,
            "up": matrix(layers, width, 4 * width),
            "down": matrix(layers, 4 * width, width) / 2,
        },
    }


def normalized(x: Array) -> Array:
    """Every token at one length."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def model(attend: Any, heads: int, theta: Parameters, tokens: Array) -> Array:
    """Logits (T, 256). `attend` is `hla.hla2`, or the same over devices."""

    def block(x: Array, layer: Parameters) -> tuple[Array, None]:
        y = normalized(x)
        q, k, v = (z.reshape(len(x), heads, -1) for z in jnp.split(y @ layer["qkv"], 3, axis=-1))
        forget = jax.nn.log_sigmoid((y @ layer["forget"]).T + 5.0)  # (heads, T)
        o = attend(normalized(q), normalized(k), v, log_decay=forget, scale=q.shape[-1] ** -0.5, axis=-3)
        x = x + normalized(o).reshape(x.shape) @ layer["out"]
        return x + jax.nn.gelu(normalized(x) @ layer["up"]) @ layer["down"], None

    x, _ = jax.lax.scan(block, theta["embedding"][tokens], theta["layers"])
    return normalized(x) @ theta["embedding"].T


def loss_of(attend: Any, heads: int, theta: Parameters, tokens: Array, targets: Array) -> Array:
    """Bits of all tokens together."""
    logits = jax.nn.log_softmax(model(attend, heads, theta, tokens))
    return -jnp.take_along_axis(logits, targets[:, None], axis=-1).sum() / math.log(2)


# One step, on one device and on several


class Steps(NamedTuple):
    """(parameters, tokens, targets) → (bits per token, gradients), compiled."""

    alone: Any
    spread: Any


def steps(given: argparse.Namespace, mesh: jax.sharding.Mesh) -> Steps:
    """The two that have to agree."""
    spec = PartitionSpec(AXIS)
    attend = partial(getattr(hla.distributed.jax, given.operator), axis_name=AXIS, exchange=given.exchange)

    def slice_loss(theta: Parameters, tokens: Array, targets: Array) -> Array:
        return jax.lax.psum(loss_of(attend, given.heads, theta, tokens, targets), AXIS)

    mapped = jax.shard_map(slice_loss, mesh=mesh, in_specs=(PartitionSpec(), spec, spec), out_specs=PartitionSpec())
    whole = partial(loss_of, getattr(hla, given.operator), given.heads)

    def compiled(loss: Any) -> Any:
        return jax.jit(jax.value_and_grad(lambda theta, x, y: loss(theta, x, y) / len(x)))

    return Steps(compiled(whole), compiled(mapped))


def adam(state: Any, slope: Parameters, t: int, lr: float) -> Any:
    """(parameters, mean, mean square) after one more step."""
    theta, mean, square = state
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, slope)
    square = jax.tree.map(lambda s, g: 0.99 * s + 0.01 * g * g, square, slope)
    scale = lr * math.sqrt(1 - 0.99**t) / (1 - 0.9**t)
    return jax.tree.map(lambda x, m, s: x - scale * m / (jnp.sqrt(s) + 1e-8), theta, mean, square), mean, square


def apart(x: Any, y: Any) -> float:
    """The largest distance of two trees of arrays, in each by its largest number."""
    found = [
        float(jnp.max(jnp.abs(a - b)) / jnp.maximum(jnp.max(jnp.abs(b)), 1e-30))
        for a, b in zip(jax.tree.leaves(jax.device_get(x)), jax.tree.leaves(jax.device_get(y)), strict=True)
    ]
    return max(found)


def train(given: argparse.Namespace, mesh: jax.sharding.Mesh, run: Steps, text: bytes) -> None:
    """Two runs, step by step, from the same parameters; each goes its own way."""
    data = jnp.frombuffer(text, dtype=jnp.uint8).astype(jnp.int32)
    update = jax.jit(adam, static_argnums=(2, 3))
    theta = parameters(given)
    zero = jax.tree.map(jnp.zeros_like, theta)
    alone = (theta, zero, zero)
    spread = jax.device_put(alone, NamedSharding(mesh, PartitionSpec()))
    places = max(1, (len(data) - 1) // given.tokens)
    worst = 0.0
    print(f"{'step':>5} {'one device':>12} {given.devices:>3} devices  gradients apart")
    for t in range(1, given.steps + 1):
        start = (t - 1) % places * given.tokens
        piece = data[start : start + given.tokens + 1]
        x, y = (jax.device_put(z, NamedSharding(mesh, PartitionSpec(AXIS))) for z in (piece[:-1], piece[1:]))
        loss, slope = run.alone(alone[0], piece[:-1], piece[1:])
        found, slopes = run.spread(spread[0], x, y)
        difference = apart(slopes, slope)
        worst = max(worst, abs(float(found) - float(loss)), difference if t == 1 else 0.0)
        print(f"{t:>5} {float(loss):>12.5f} {float(found):>11.5f} {difference:>16.1e}")
        alone = update(alone, slope, t, given.lr)
        spread = update(spread, slopes, t, given.lr)
    # as many roundings as lie between a parameter and the loss, were they independent
    allowed = 5 * math.sqrt(given.layers * 3 * (2 * given.tokens + given.width)) * 2.0**-24
    print(f"\nlargest difference of losses, and of the first gradients: {worst:.1e} (allowed {allowed:.1e})")
    if not worst <= allowed:
        raise SystemExit("error: the devices do not agree with one")


def print_sizes(given: argparse.Namespace, mesh: jax.sharding.Mesh, run: Steps) -> None:
    """What a device sends for attention in a step, and the memory of a step, as the text grows."""
    theta = jax.eval_shape(lambda: parameters(given))
    gradients = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(theta))
    share = 2 * (given.devices - 1) / given.devices
    print(f"\n{'tokens':>8} {'sent for attention':>19} {'memory per device':>18} {'of one device':>14}")
    for tokens in (given.tokens, 4 * given.tokens):
        cost = hla.cost(
            given.operator, T=tokens, d=given.width // given.heads, dv=given.width // given.heads, heads=given.heads,
            devices=given.devices, exchange=given.exchange,
        )  # fmt: skip
        sent = given.layers * (cost.sent_bytes + cost.backward_sent_bytes)
        memory = []
        for step, spec in ((run.spread, PartitionSpec(AXIS)), (run.alone, None)):
            where = None if spec is None else NamedSharding(mesh, spec)
            x = jax.ShapeDtypeStruct((tokens,), jnp.int32, sharding=where)
            found = step.lower(theta, x, x).compile().memory_analysis()
            memory.append(found.argument_size_in_bytes + found.output_size_in_bytes + found.temp_size_in_bytes)
        print(f"{tokens:>8} {sent / 1e3:>16.1f} kB {memory[0] / 1e6:>15.1f} MB {memory[1] / 1e6:>11.1f} MB")
    print(f"The sum of the gradients of {gradients / 4:.0f} parameters takes {share * gradients / 1e3:.1f} kB more.")


def main() -> None:
    """Train, compare, measure."""
    if GIVEN.tokens % GIVEN.devices:
        raise SystemExit("error: --tokens must divide by --devices")
    if GIVEN.devices > len(jax.devices()):
        raise SystemExit(f"error: --devices {GIVEN.devices}, but there are {len(jax.devices())}")
    text = read_text(GIVEN.text)
    if len(text) <= GIVEN.tokens:
        raise SystemExit(f"error: --tokens {GIVEN.tokens} and one to predict, but the text has {len(text)}")
    devices = jax.devices()[: GIVEN.devices]
    mesh = jax.make_mesh((GIVEN.devices,), (AXIS,), axis_types=(AxisType.Auto,), devices=devices)
    run = steps(GIVEN, mesh)
    train(GIVEN, mesh, run, text)
    print_sizes(GIVEN, mesh, run)


if __name__ == "__main__":
    main()

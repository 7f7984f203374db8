"""Tokens, features and heads that lie more than 2³¹ elements apart, in Triton's interpreter: offsets need 64 bits.

The memory between them is reserved and never touched. The judge is the same call on copies that lie close.
"""

from __future__ import annotations

import mmap
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hla
import libraries

torch: Any = libraries.only("torch")
pytest.importorskip("triton")

from hla.backends.staged import operations  # noqa: E402
from hla.backends.triton import launch  # noqa: E402
from triton_runs import DEVICE, NAMED, chosen, placed, watched  # noqa: E402, F401

Place = Callable[[Any], Any]
"""From a tensor to a copy that lies elsewhere."""
HEADS, TOKENS, D, DV = 3, 19, 5, 7
FAR = 2**31
APART = 1000
"""Elements between tensors of one buffer; none is longer, where it lies close."""
NO_RESERVE = 0x4000
"""Linux's MAP_NORESERVE, which the module mmap has from Python 3.13 on."""
AXES = {"heads": 0, "tokens": 1, "features": 2}


class Room:
    """One buffer for tensors that are spread out along an axis."""

    def __init__(self, axis: int) -> None:
        self.axis, self._buffers, self._used = axis, {}, 0

    def spread(self, x: Any) -> Any:
        """A copy of x whose last entry along the axis lies more than 2³¹ elements behind its first."""
        axis = min(self.axis, x.ndim - 1)
        steps = list(x.stride())
        steps[axis] = FAR // (x.shape[axis] - 1) + APART * 10
        if x.dtype not in self._buffers:
            self._buffers[x.dtype] = reserved(x.dtype, FAR + 20 * APART * max(x.shape))
        made = self._buffers[x.dtype].as_strided(x.shape, steps, self._used)
        self._used += APART
        assert (x.shape[axis] - 1) * made.stride(axis) > FAR
        return made.copy_(x)


def reserved(dtype: Any, count: int) -> Any:
    """Zeros that take no memory until they are written to, on the CPU."""
    if DEVICE.type != "cpu":
        if DEVICE.type == "cuda" and torch.cuda.mem_get_info(DEVICE)[0] < 2**35:
            pytest.skip("needs 32 GiB of the GPU's memory")
        return torch.empty(count, dtype=dtype, device=DEVICE)
    memory = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
    return torch.frombuffer(memory, dtype=dtype)


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()


def inputs(dtype: Any) -> tuple[Any, ...]:
    """q, k, v, log-decays and a cotangent of the output."""
    generator = torch.Generator().manual_seed(7)

    def draw(*shape: int) -> Any:
        return torch.randn(HEADS, *shape, generator=generator)

    q, k, v, do = (draw(TOKENS, width).to(dtype) for width in (D, D, DV, DV))
    return placed((q, k, v, -draw(TOKENS).abs(), do))


def agree(call: Callable[[Place], list[Any]], far: Place) -> None:
    """A call on tensors that lie close, and on tensors that do not."""
    wanted = call(torch.clone)
    before = resident()
    found = call(far)
    assert NAMED or resident() - before < 2**28
    assert {name for name, _ in chosen} == {"triton"}
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("form", ["chunkwise", "recurrent"])
@pytest.mark.parametrize("axis", AXES)
def test_entries_far_apart(axis: str, form: str, dtype: str) -> None:
    """Output and final state, and the gradients where the form has them."""

    def call(place: Place) -> list[Any]:
        q, k, v, log_decay, do = map(place, inputs(getattr(torch, dtype)))
        options = {"log_decay": log_decay, "form": form, "backend": "triton"}
        o, state = hla.hla2(q, k, v, return_state=True, **options)
        if form == "recurrent":
            return [o, *state]
        found = hla.vjp("hla2", q, k, v, **options)[1](do)
        return [o, *state, found.q, found.k, found.v, found.log_decay]

    agree(call, Room(AXES[axis]).spread)


@pytest.mark.parametrize("axis", ["sequences", "heads"])
def test_states_of_parts_far_apart(axis: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of packed sequences, and the one that the first of a sequence's parts begins with."""
    monkeypatch.setattr(operations, "FEWEST_CHUNKS", 1)
    q, k, v, log_decay, _ = inputs(torch.float32)
    packed = {} if axis == "heads" else {"cu_seqlens": placed(torch.tensor([0, 5, 5, TOKENS]))}
    options = {"log_decay": log_decay, "return_state": True, "chunk_size": 16, "backend": "triton", **packed}
    _, start = hla.hla2(q, k, v, **options)

    def call(place: Place) -> list[Any]:
        before = launch.counts["carry"]
        o, after = hla.hla2(q, k, v, initial_state=type(start)(*map(place, start)), **options)
        assert (launch.counts["carry"] > before) == (axis == "heads")
        return [o, *after]

    agree(call, Room(0).spread)


@pytest.mark.parametrize("axis", ["heads", "rows", "columns"])
def test_states_far_apart(axis: str) -> None:
    """The state that a call begins with, and that a step overwrites."""
    q, k, v, *_ = inputs(torch.float32)
    _, start = hla.hla2(q, k, v, return_state=True, backend="triton")

    def call(place: Place) -> list[Any]:
        state = type(start)(*map(place, start))
        o, after = hla.hla2(q, k, v, initial_state=state, return_state=True, backend="triton")
        last, moved = hla.step(state, q[:, 0], k[:, 0], v[:, 0], inplace=True, backend="triton")
        assert all(x is y for x, y in zip(moved, state, strict=True))
        return [o, *after, last, *moved]

    agree(call, Room(("heads", "rows", "columns").index(axis)).spread)

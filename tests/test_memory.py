"""What a call allocates: nothing of size T×T, nothing that grows with T but its results. And what it imports."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hla

D, DV = 5, 7
CHUNK = 32
OPERATORS: dict[str, tuple[str, dict[str, Any]]] = {
    "linear_attention": ("linear_attention", {}),
    "hla2": ("hla2", {"ridge": 0.7, "normalize": True}),
    "hla2 printed": ("hla2", {"definition": "as_printed"}),
    "ahla": ("ahla", {}),
    "hla3": ("hla3", {}),
    "hla3 printed": ("hla3", {"definition": "as_printed"}),
    "order 4": ("higher_order", {"order": 4}),
}
KINDS = ("decay", "log_decay", "token_mask", "segment_ids", "cu_seqlens", "initial_state", "axis")


@pytest.fixture(autouse=True)
def _numpy(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--arrays") != "numpy":
        pytest.skip("NumPy's allocations are those that tracemalloc sees")


def peak(function: Callable[[], Any]) -> int:
    """The most that was allocated at one time while the function ran, beyond what was there before."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        kept = function()
        _, most = tracemalloc.get_traced_memory()
        del kept
        return most - before
    finally:
        tracemalloc.stop()


def draw(length: int, batch: tuple[int, ...] = (2,)) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(51)
    return tuple(rng.normal(size=(*batch, length, n)) for n in (D, D, DV))  # type: ignore[return-value]


def draw_option(kind: str, length: int, op: str, own: dict[str, Any]) -> dict[str, Any]:
    if kind == "decay":
        return {"decay": np.asarray([0.9, 0.99])}
    if kind == "log_decay":
        return {"log_decay": np.full((2, length), -0.01)}
    if kind == "token_mask":
        return {"token_mask": np.arange(length) % 7 != 3, "decay": 0.9}
    if kind == "segment_ids":
        return {"segment_ids": np.arange(length) // 100}
    if kind == "cu_seqlens":
        return {"cu_seqlens": np.asarray([0, length // 3, length // 3, length])}
    if kind == "initial_state":
        return {"initial_state": getattr(hla, op)(*draw(4), return_state=True, **own)[1], "return_state": True}
    return {"axis": -3}


def outgrown(run: Callable[[int], Callable[[], Any]], short: int, result: int) -> int:
    """Bytes by which the peak grows beyond the result when T goes from `short` to 8·`short`; `result` bytes a token."""
    run(short)()  # caches and imports
    small, large = peak(run(short)), peak(run(8 * short))
    return large - small - 7 * short * result


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("form", ["recurrent", "chunkwise"])
def test_memory_of_the_forms_is_constant_in_the_length(name: str, form: str) -> None:
    op, own = OPERATORS[name]
    arrays = draw(8 * 512)

    def run(length: int) -> Callable[[], Any]:
        pieces = [x[..., :length, :] for x in arrays]
        return lambda: getattr(hla, op)(*pieces, form=form, chunk_size=CHUNK, return_state=True, **own)

    run(8 * 512)
    chunk = 2 * CHUNK * CHUNK * 8
    assert outgrown(run, 512, 2 * DV * 8) < chunk // 2
    assert peak(run(8 * 512)) < 8 * 512 * 2 * DV * 8 + 20 * chunk


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["recurrent", "chunkwise"])
def test_options_do_not_make_it_grow(kind: str, form: str) -> None:
    """At most a few bytes a token, of what an option holds itself."""
    for op in ("hla2", "ahla"):
        arrays = draw(8 * 512, batch=(2, 1) if kind == "axis" else (2,))

        def run(length: int, op: str = op, arrays: Any = arrays) -> Callable[[], Any]:
            pieces = [np.ascontiguousarray(x[..., :length, :]) for x in arrays]
            if kind == "axis":
                pieces = [np.ascontiguousarray(np.swapaxes(x, -2, -3)) for x in pieces]
            options = draw_option(kind, length, op, {})
            return lambda: getattr(hla, op)(*pieces, form=form, chunk_size=CHUNK, **options)

        option = 2 * 8 + 8  # a float64 for each token and head, and flags
        assert outgrown(run, 512, 2 * DV * 8 + option) < 2 * CHUNK * CHUNK * 8, op


def test_the_bidirectional_form_is_constant_in_the_length() -> None:
    for op in ("linear_attention", "hla2", "ahla", "hla3"):
        arrays = draw(8 * 512)

        def run(length: int, op: str = op, arrays: Any = arrays) -> Callable[[], Any]:
            pieces = [x[..., :length, :] for x in arrays]
            return lambda: getattr(hla, op)(*pieces, mask="none", chunk_size=CHUNK)

        assert outgrown(run, 512, 2 * DV * 8) < CHUNK * CHUNK * 8, op


@pytest.mark.parametrize("name", ["linear_attention", "hla2", "ahla", "hla3", "order 4"])
def test_gradients_keep_nothing_of_the_size_of_all_pairs(name: str) -> None:
    """T = 65,536: inputs, stages and one state for each chunk are far from the 32 GiB of T×T numbers."""
    op, own = OPERATORS[name]
    length = 65536
    arrays = [x.astype(np.float32) for x in draw(length, batch=())]
    gates = np.full(length, -0.01, dtype=np.float32)
    do = np.ones((length, DV), dtype=np.float32)
    kept: list[Any] = []

    def run() -> Any:
        out, pull = hla.vjp(op, *arrays, log_decay=gates, chunk_size=64, **own)
        kept.append(pull(do))
        return out

    # A stream of T tokens has at most DV columns; a stage's result, its gradient and the pass that makes it are a few
    # of them, for each of the reads of the operator.
    stream = length * DV * 4
    reads = {"linear_attention": 1, "hla2": 4, "ahla": 2, "hla3": 3, "order 4": 3}[name]
    most = peak(run)
    assert most < (8 + 2 * reads) * stream
    assert most < length * length * 4 / 200
    assert all(np.isfinite(x).all() for x in kept[0][:3])


def test_gradients_grow_with_the_length_only_linearly() -> None:
    for op in ("hla2", "ahla"):
        arrays = draw(8 * 1024)
        do = np.ones((2, 8 * 1024, DV))

        def run(length: int, op: str = op, arrays: Any = arrays, do: Any = do) -> Callable[[], Any]:
            pieces = [x[..., :length, :] for x in arrays]
            return lambda: hla.vjp(op, *pieces, decay=0.9, chunk_size=CHUNK)[1](do[..., :length, :])

        run(512)()
        small, large = peak(run(1024)), peak(run(8 * 1024))
        assert large < 8.5 * small, op


def fresh(program: str) -> str:
    """What a program prints in a new interpreter."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_package_imports_no_framework() -> None:
    found = fresh("import hla, sys; print(*sorted({n.partition('.')[0] for n in sys.modules}))").split()
    assert "hla" in found
    assert not {"numpy", "torch", "jax", "jaxlib", "cupy", "triton", "array_api_strict", "ml_dtypes"} & set(found)


def test_numpy_calls_import_no_other_framework() -> None:
    """Operators in all forms, steps, states, gradients, segments, packing, plans."""
    program = """
import sys
import numpy as np
import hla
q, k, v = np.random.default_rng(0).normal(size=(3, 9, 4))
for form in ("recurrent", "scan", "chunkwise", "parallel"):
    hla.hla3(q, k, v, form=form, decay=0.9, normalize=True)
(o, state), pull = hla.vjp("hla2", q, k, v, decay=np.asarray(0.9), return_state=True)
pull(o, state)
hla.step(state, q[0], k[0], v[0], decay=0.9)
hla.hla2(q, k, v, cu_seqlens=np.asarray([0, 3, 9]), return_state=True)
hla.ahla(q, k, v, segment_ids=np.asarray([0] * 4 + [1] * 5))
hla.segments.advance(state, hla.segments.from_tokens("hla2", q, k, v, decay=0.9))
hla.explain("hla2", q, k, v)
print(*sorted({n.partition('.')[0] for n in sys.modules}))
"""
    found = fresh(program).split()
    assert {"hla", "numpy"} <= set(found)
    assert not {"torch", "jax", "jaxlib", "cupy", "triton", "array_api_strict", "ml_dtypes"} & set(found)

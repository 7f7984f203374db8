"""Backend "cupy" from a call to its launches: which kernels run, on what, with how much memory, and what goes wrong."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hla
import libraries
from cuda import cpu, standin
from hla.testing import error_budget, per_token_error
from samples import OPERATORS

cupy: Any = libraries.only("cupy")
device_only = pytest.mark.skipif(os.environ.get("HLA_TEST_DEVICE") == "cuda", reason="about the stand-in")

if not cpu.available():
    pytest.skip("with g++", allow_module_level=True)

from hla.backends.cupy import launch, parameters  # noqa: E402
from hla.backends.staged import forward, operations  # noqa: E402


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[launch.Launch]:
    """Launches, in order."""
    seen: list[launch.Launch] = []
    monkeypatch.setattr(launch, "watchers", [seen.append])
    return seen


def given(length: int = 17, *, d: int = 5, dv: int = 7, batch: tuple[int, ...] = (2, 3)) -> list[Any]:
    rng = np.random.default_rng(47)
    return [0.7 * rng.normal(size=(*batch, length, n)) for n in (d, d, dv)]


def put(x: Any, dtype: Any = np.float32) -> Any:
    return cupy.asarray(np.asarray(x, dtype))


def agree(operator: str, arrays: list[Any], own: dict[str, Any], **options: Any) -> None:
    """Output and final states in float32, against the core in float64."""
    o, state = getattr(hla, operator)(*map(put, arrays), return_state=True, **own, **options)
    exact = {name: x.get().astype(np.float64) if isinstance(x, cupy.ndarray) else x for name, x in options.items()}
    inputs = [x.astype(np.float32).astype(np.float64) for x in arrays]
    wanted, following = getattr(hla, operator)(*inputs, return_state=True, **own, **exact)
    budget = error_budget(operator, "float32", arrays[0].shape[-2], arrays[0].shape[-1], dv=arrays[2].shape[-1])
    assert per_token_error(o.get(), wanted) <= budget
    for x, y in zip(state, following, strict=True):
        assert np.abs(x.get() - y).max() <= budget * np.abs(y).max()


# ---- which kernels

CHUNKWISE = {
    "linear_attention": {"state": 1, "read": 1},
    "hla2": {"chain": 1, "read": 1},
    "hla2 prefix": {"state": 2, "read": 2},
    "ahla": {"chain": 1},
    "hla3": {"state": 1, "read": 2, "chain": 1},
    "order 4": {"chain": 1, "read": 2, "state": 1},
}


@pytest.mark.parametrize("name", CHUNKWISE)
def test_kernels(name: str, launched: list[Any]) -> None:
    operator, own = OPERATORS[name]
    own = {n: x for n, x in own.items() if n != "ridge"}
    before = Counter(launch.counts)
    getattr(hla, operator)(*map(put, given()), **own)
    assert Counter(one.kernel for one in launched) == CHUNKWISE[name]
    assert Counter(launch.counts) - before == CHUNKWISE[name]


def test_kernels_of_a_gradient(launched: list[Any]) -> None:
    q, k, v = map(put, given())
    log_decay = put(-np.ones((2, 3, 17)))
    o, pull = hla.vjp("hla2", q, k, v, log_decay=log_decay)
    launched.clear()
    pull(cupy.ones_like(o))
    counts = Counter(one.kernel for one in launched)
    assert counts == {"clock": 1, "chain": 2, "read": 3, "rate": 2}  # forwards again, backwards; dq, dk, dv


def test_one_launch_for_all_heads(launched: list[Any]) -> None:
    q, k, v = (put(x[..., 0, :]) for x in given())
    state = hla.init_state("hla2", batch=(2, 3), d=5, dv=7, like=q)
    places = [x.data.ptr for x in state]
    _, moved = hla.step(state, q, k, v, inplace=True)
    assert [one.kernel for one in launched] == ["token"]
    assert launched[0].blocks == 6
    assert [x.data.ptr for x in launched[0].arguments["after"]] == places
    assert moved is state


def test_grouped_heads_move_a_shared_state_once(launched: list[Any]) -> None:
    q, k, v = (x[..., 0, :] for x in given())
    k, v = k[:, :1], v[:, :1]
    options = {"decay": 0.9}
    apart = [np.broadcast_to(x, (2, 3, x.shape[-1])) for x in (q, k, v)]
    start = hla.hla2(*(x[..., None, :] for x in apart), return_state=True, **options)[1]
    wanted, following = hla.step(start, *apart, **options)
    state = hla.hla2(*(put(x)[..., None, :] for x in (q, k, v)), return_state=True, **options)[1]
    assert state.key_moment.shape == (2, 1, 5, 5)
    launched.clear()
    o, moved = hla.step(state, *map(put, (q, k, v)), inplace=True, **options)
    assert [(one.kernel, one.blocks) for one in launched] == [("token", 2), ("token", 6)]
    assert np.abs(o.get() - wanted).max() <= 1e-5 * np.abs(wanted).max()
    assert np.abs(moved.key_moment.get() - following.key_moment[:, :1]).max() <= 1e-6


# ---- sizes


@pytest.mark.parametrize(("d", "dv"), [(1, 1), (33, 3), (70, 130), (300, 11), (11, 300)])
@pytest.mark.parametrize("name", ["hla2", "ahla", "hla3"])
def test_any_widths(name: str, d: int, dv: int) -> None:
    operator, own = OPERATORS[name]
    arrays = [x / d**0.25 for x in given(71, d=d, dv=dv, batch=(2,))]
    agree(operator, arrays, {n: x for n, x in own.items() if n != "ridge"}, decay=0.9)


@pytest.mark.parametrize("name", ["linear_attention", "hla2", "ahla"])
def test_parts(name: str, monkeypatch: pytest.MonkeyPatch, launched: list[Any]) -> None:
    """Few heads and many tokens: parts side by side."""
    monkeypatch.setattr(operations, "FEWEST_CHUNKS", 1)
    operator, own = OPERATORS[name]
    arrays = given(101, batch=(1,))
    log_decay = put(-np.random.default_rng(0).exponential(0.1, size=(1, 101)))
    agree(operator, arrays, {n: x for n, x in own.items() if n != "ridge"}, log_decay=log_decay, chunk_size=16)
    assert "carry" in {one.kernel for one in launched}


@device_only
def test_states_that_do_not_fit(launched: list[Any]) -> None:
    """On a small device the chain of wide states is a state and a read; there is no other difference."""
    arrays = [x / 4 for x in given(20, d=900, dv=13, batch=(1,))]
    q, k, v = map(put, arrays)
    whole = hla.hla2(q, k, v).get()
    assert {one.kernel for one in launched} == {"chain", "read"}
    with standin.install(shared_memory=65_536, compute_capability="75") as small:
        launched.clear()
        cut = hla.hla2(*(small.asarray(np.asarray(x, np.float32)) for x in arrays)).get()
        assert {one.kernel for one in launched} == {"state", "read"}
        assert max(one.shared for one in launched) <= 65_536
    assert per_token_error(cut, whole) <= 2 * error_budget("hla2", "float32", 20, 900, dv=13)


def test_nothing_to_do(launched: list[Any]) -> None:
    q, k, v = map(put, given(0))
    o, state = hla.hla2(q, k, v, return_state=True)
    assert o.shape == (2, 3, 0, 7)
    assert not state.key_moment.get().any()
    q, k, v = map(put, given(batch=(0, 3)))
    assert hla.hla2(q, k, v).shape == (0, 3, 17, 7)
    assert not launched


# ---- launches


@device_only
def test_memory_is_asked_for() -> None:
    """More than 48 KiB of shared memory, and as much as the kernel uses."""
    before = len(standin.launches)
    hla.hla2(*map(put, given(70, d=128, dv=64)))
    asked = [one.shared_mem for one in standin.launches[before:]]
    assert max(asked) > launch.UNASKED


@device_only
def test_options_of_the_compiler() -> None:
    hla.hla2(*map(put, given()), chunk_size=16)
    options, names = standin.compilations[-1]
    assert "-std=c++17" in options
    assert f"-I{launch.SOURCES}" in options
    assert f"-DHLA_SOURCES=0x{launch.fingerprint()}" in options, "CuPy's cache does not see included files"
    assert names[0].startswith("hla::")


@device_only
def test_the_device_of_the_arrays() -> None:
    """Not the current one: there they are launched, and there their results are."""
    with standin.install(devices=2) as own:
        with own.cuda.Device(1):
            q, k, v = (own.asarray(np.asarray(x, np.float32)) for x in given())
            log_decay, mask = own.full((2, 3, 17), -0.1, np.float32), own.ones((2, 3, 17), bool)
        assert own.cuda.runtime.getDevice() == 0
        offsets = [0, 6, 17]
        kinds: list[dict[str, Any]] = [{"log_decay": log_decay, "token_mask": mask}, {"cu_seqlens": np.array(offsets)}]
        kinds += [{"decay": 0.9}, {"decay": own.cuda.Device(1).use() and own.full((3,), 0.9, np.float32)}]
        own.cuda.Device(0).use()
        kinds += [{"segment_ids": np.arange(17) // 6}, {"normalize": True}]
        for options in kinds:
            o = hla.hla2(q, k, v, **options)
            assert o.device.id == 1
            found = hla.vjp("hla2", q, k, v, **options)[1](o)
            assert {x.device.id for x in found if x is not None} == {1}
        o, state = hla.step(hla.hla2(q, k, v, return_state=True)[1], q[..., 0, :], k[..., 0, :], v[..., 0, :])
        assert {x.device.id for x in (o, *state)} == {1}


@device_only
def test_the_host_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does anything but launches happen in a second call: so it can be captured as a CUDA graph."""
    q, k, v = map(put, given())
    log_decay, mask = put(-np.ones((2, 3, 17))), cupy.ones((2, 3, 17), bool)
    kinds: list[dict[str, Any]] = [
        {"log_decay": log_decay, "token_mask": mask},
        {"cu_seqlens": np.array([0, 5, 17])},
        {"normalize": True},
    ]
    state = hla.hla2(q, k, v, return_state=True)[1]

    def calls() -> None:
        for options in kinds:
            o, pull = hla.vjp("hla2", q, k, v, **options)
            pull(o)
        hla.step(state, q[..., 0, :], k[..., 0, :], v[..., 0, :], inplace=True)

    calls()

    def refused(*_: Any, **__: Any) -> Any:
        raise AssertionError("the host waits")

    for owner, name in (
        *((cupy.ndarray, name) for name in ("get", "item", "tolist", "__bool__", "__float__", "__int__")),
        *((cupy, name) for name in ("asarray", "array", "asnumpy")),
        (cupy.cuda.Stream, "synchronize"),
        (cupy.cuda.Device, "synchronize"),
        (cupy.cuda.runtime, "deviceSynchronize"),
    ):
        monkeypatch.setattr(owner, name, refused)
    calls()


def test_parameters_fit() -> None:
    """Up to the highest order, normalised."""
    from hla.backends.cupy import HIGHEST
    from hla.backends.staged.recurrent import encoded
    from hla.family import Spec, program

    for order in range(4, HIGHEST + 1):
        made = program(Spec("higher_order", order=order, normalize=True))
        names, lines = encoded(made)
        assert parameters.takes(len(made.states), len(lines), len(names))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gradients_of_shared_heads_are_rounded_once(dtype: str) -> None:
    """Not for each of the heads whose sum they are."""
    import ml_dtypes

    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    rng = np.random.default_rng(3)
    q = rng.normal(size=(32, 17, 5)).astype(kind)
    k, v = (rng.normal(size=(1, 17, n)).astype(kind) for n in (5, 7))
    do = rng.normal(size=(32, 17, 7)).astype(kind)
    found = hla.vjp("hla2", *map(cupy.asarray, (q, k, v)), decay=0.9)[1](cupy.asarray(do))
    right = hla.vjp("hla2", *(x.astype(np.float64) for x in (q, k, v)), decay=0.9)[1](do.astype(np.float64))
    unit = 2.0**-8 if dtype == "bfloat16" else 2.0**-11
    for x, y in ((found.k, right.k), (found.v, right.v)):
        off = np.abs(x.get().astype(np.float64) - y)
        assert (off <= 1.01 * unit * np.abs(y) + 1e-4 * unit * np.abs(y).max() + 1e-5 * np.abs(y).max()).all()


def test_a_test_of_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    check = hla.backends.get("cupy").check
    assert check is not None
    assert check().ok
    assert "passed its test of itself with CuPy" in check().reason
    run = operations.run_read
    monkeypatch.setattr(forward, "run_read", lambda *args, **options: run(*args, **options) * 1.001)
    verdict = check()
    assert not verdict.ok
    assert "hla2, float32, chunkwise: output off by" in verdict.reason


# ---- what goes wrong


@device_only
def test_a_kernel_that_does_not_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for source in launch.SOURCES.iterdir():
        text = source.read_text()
        (tmp_path / source.name).write_text(
            text.replace("__global__", "__nowhere__") if source.name == "read.cu" else text
        )
    monkeypatch.setattr(launch, "SOURCES", tmp_path)
    monkeypatch.setattr(launch, "_kernels", {})
    with pytest.raises(hla.BackendUnsupportedError) as caught:
        hla.hla2(*map(put, given()))
    text = str(caught.value)
    assert text.startswith(
        "backend: expected kernels that compile for compute capability 80, got this of read.cu, hla::read<"
    )
    assert "__nowhere__" in text, "the compiler's own words"
    assert "Use another backend" in text


def test_orders() -> None:
    q, k, v = map(put, given(3))
    assert hla.explain("higher_order", q, k, v, order=18).backend == "cupy"
    assert hla.explain("higher_order", q, k, v, order=19).backend == "cupy"
    assert hla.explain("higher_order", q, k, v, order=19, form="recurrent").backend == "numpy"
    with pytest.raises(hla.BackendUnsupportedError, match="cupy: has form recurrent for orders up to 18, not 19"):
        hla.higher_order(q, k, v, order=19, form="recurrent", backend="cupy")
    arrays = [x / 2 for x in given(3)]
    o, state = hla.higher_order(*map(put, (x[..., :2, :] for x in arrays)), order=20, normalize=True, return_state=True)
    o_t, _ = hla.step(state, *(put(x[..., 2, :]) for x in arrays), normalize=True, backend="cupy")
    right = hla.higher_order(*(x.astype(np.float32).astype(np.float64) for x in arrays), order=20, normalize=True)
    for found, wanted in ((o.get(), right[..., :2, :]), (o_t.get(), right[..., 2, :])):
        assert (
            np.abs(found - wanted).max()
            <= error_budget("higher_order", "float32", 3, 5, dv=7, order=20) * np.abs(wanted).max()
        )


def test_forms() -> None:
    q, k, v = map(put, given())
    assert hla.explain("hla2", q, k, v).form == "chunkwise"
    assert hla.explain("hla2", q[..., :1, :], k[..., :1, :], v[..., :1, :]).form == "recurrent"
    for form in ("scan", "parallel"):
        assert hla.explain("hla2", q, k, v, form=form).backend == "numpy"
        with pytest.raises(hla.BackendUnsupportedError, match=f"has the forms recurrent, chunkwise, not {form}"):
            hla.hla2(q, k, v, form=form, backend="cupy")


@device_only
def test_gpus_that_are_too_old() -> None:
    with standin.install(compute_capability="70") as old:
        x = old.ones((3, 2), np.float32)
        assert hla.explain("hla2", x, x, x).backend == "numpy"
        with pytest.raises(
            hla.BackendUnsupportedError, match=r"needs a GPU of compute capability 7\.5 or later, not 7\.0"
        ):
            hla.hla2(x, x, x, backend="cupy")


@device_only
def test_rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    with standin.install() as other:
        monkeypatch.setattr(other.cuda.runtime, "is_hip", True)
        assert hla.backends.get("cupy").availability() == (
            False,
            "has kernels for NVIDIA GPUs, and this CuPy is for ROCm",
        )


@device_only
def test_vectors_that_do_not_fit() -> None:
    with standin.install(shared_memory=65_536, compute_capability="75") as small:
        q = small.ones((1, 1, 9000), np.float32)
        with pytest.raises(
            hla.BackendUnsupportedError, match=r"^d, dv: expected sizes .* 65536 bytes .* d = 9000, dv = 9000"
        ):
            hla.linear_attention(q, q, q, form="recurrent")


def test_a_broadcast_state_is_not_written_to() -> None:
    q, k, v = (put(x[..., 0, :]) for x in given())
    state = hla.init_state("hla2", batch=(2, 3), d=5, dv=7, like=q)
    shared = state._replace(corrected_state=cupy.broadcast_to(state.corrected_state[:1], state.corrected_state.shape))
    with pytest.raises(hla.OptionError, match=r"^inplace: expected writable arrays, got a broadcast corrected_state"):
        hla.step(shared, q, k, v, inplace=True)
    assert not state.key_moment.get().any()


@device_only
def test_without_a_gpu() -> None:
    with standin.install(devices=0):
        assert hla.backends.get("cupy").availability() == (False, "no NVIDIA GPU that CuPy can use")
        assert "cupy" not in hla.backends.available()

"""Arrays of other libraries on backend "cupy": only where it is named, in their own memory, and back as they came."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import hla
import libraries
from cuda import cpu, standin
from hla.backends import cupy as backend
from hla.backends import selection
from hla.testing import error_budget, per_token_error
from samples import OPERATORS, draw

torch: Any = libraries.only("torch")

if not cpu.available():
    pytest.skip("with g++", allow_module_level=True)

from hla.backends.cupy import exchange, execution, launch  # noqa: E402

FEW = ("hla2", "ahla", "hla3 printed")


@pytest.fixture(autouse=True)
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The stand-in, whose device is the CPU."""
    monkeypatch.setattr(backend, "DEVICES", ("cpu",))
    with standin.install() as module:
        yield module


def tensors(dtype: Any = None) -> tuple[Any, ...]:
    q, k, v, log_decay, do = (torch.from_numpy(x) for x in draw())
    return tuple(x.to(dtype or torch.float32) for x in (q, k, v)), log_decay.float(), do.to(dtype or torch.float32)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("name", FEW)
def test_tensors(name: str, dtype: str, cupy: Any) -> None:
    operator, own = OPERATORS[name]
    (q, k, v), log_decay, do = tensors(getattr(torch, dtype))
    exact = [x.double() for x in (q, k, v)]
    given, judged = ({**own, "log_decay": g} for g in (log_decay.to(v.dtype), log_decay.to(v.dtype).double()))
    with standin.kernels_only():
        o, state = getattr(hla, operator)(q, k, v, backend="cupy", return_state=True, **given)
        found = hla.vjp(operator, q, k, v, backend="cupy", **given)[1](do)
    assert standin.launches
    assert all(type(x) is torch.Tensor for x in (o, *state, found.q))
    assert (o.dtype, found.q.dtype, found.log_decay.dtype) == (v.dtype, q.dtype, v.dtype)
    wanted, following = getattr(hla, operator)(*exact, backend="torch", return_state=True, **judged)
    right = hla.vjp(operator, *exact, backend="torch", **judged)[1](do.double())
    budget = error_budget(operator, dtype, q.shape[-2], q.shape[-1], dv=v.shape[-1])
    assert per_token_error(o.double(), wanted) <= budget
    for x, y in zip(state, following, strict=True):
        assert off(x, y) <= budget
    for field in ("q", "k", "v", "log_decay"):
        assert off(getattr(found, field), getattr(right, field)) <= 3 * budget  # each read is computed again


def off(x: Any, wanted: Any) -> float:
    return float((x.double() - wanted).abs().max() / wanted.abs().max())


def test_memory_is_shared(monkeypatch: pytest.MonkeyPatch, cupy: Any) -> None:
    """Inputs are read where they lie, and a step in place writes to the caller's state."""
    (q, k, v), _, _ = tensors()
    seen: list[Any] = []
    monkeypatch.setattr(launch, "watchers", [seen.append])
    _, state = hla.hla2(q, k, v, return_state=True, backend="cupy")
    chain = next(one for one in seen if one.kernel == "chain")
    assert {chain.arguments["y"].data.ptr, chain.arguments["x"].data.ptr} <= {q.data_ptr(), k.data_ptr()}
    places = [x.data_ptr() for x in state]
    before = [x.clone() for x in state]
    _, moved = hla.step(state, q[..., 0, :], k[..., 0, :], v[..., 0, :], inplace=True, backend="cupy")
    assert moved is state
    assert [x.data_ptr() for x in state] == places
    assert not any(map(torch.equal, state, before))
    token = next(one for one in seen if one.kernel == "token")
    assert [x.data.ptr for x in token.arguments["after"]] == places


def test_the_stream_of_the_tensors(monkeypatch: pytest.MonkeyPatch, cupy: Any) -> None:
    """Kernels run on torch's current stream, not on CuPy's."""
    place = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=77))
    monkeypatch.setattr(exchange, "family", lambda x: "torch")
    with warnings.catch_warnings(action="error"), exchange.stream_of(SimpleNamespace(is_cuda=True, device=place)):
        assert cupy.cuda.get_current_stream().ptr == 77
    assert cupy.cuda.get_current_stream().ptr != 77
    inside: list[int] = []
    monkeypatch.undo()
    monkeypatch.setattr(backend, "DEVICES", ("cpu",))
    monkeypatch.setattr(execution.exchange, "stream_of", lambda x: cupy.cuda.ExternalStream(78))
    monkeypatch.setattr(launch, "watchers", [lambda one: inside.append(cupy.cuda.get_current_stream().ptr)])
    (q, k, v), _, do = tensors()
    hla.vjp("hla2", q, k, v, backend="cupy")[1](do)
    assert set(inside) == {78}


def test_only_on_request() -> None:
    (q, k, v), _, _ = tensors()
    assert hla.explain("hla2", q, k, v).backend == "torch"
    plan = hla.explain("hla2", q, k, v, backend="cupy")
    assert plan.backend == "cupy"
    with hla.use_backend("cupy"):
        assert hla.explain("hla2", q, k, v).backend == "cupy"
    verdict = next(c for c in hla.explain("hla2", q, k, v).candidates if c.name == "cupy")
    assert (verdict.ok, verdict.reason) == (False, "takes torch arrays only when it is named")


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    (q, k, v), _, _ = tensors()
    with pytest.raises(hla.BackendUnsupportedError, match=r"not followed by torch's autograd"):
        hla.hla2(q.requires_grad_(), k, v, backend="cupy")
    q = q.detach()
    with pytest.raises(hla.BackendUnsupportedError, match="not while they are traced"):
        torch.func.vmap(lambda q: hla.hla2(q, k[0], v[0], backend="cupy"))(q)
    monkeypatch.setattr(backend, "DEVICES", ("cuda", "gpu"))
    selection._choices.clear()
    with pytest.raises(hla.BackendUnsupportedError, match="runs on NVIDIA GPUs, not cpu"):
        hla.hla2(q, k, v, backend="cupy")


class Guest:
    """An array of a library that hla does not know, on the device."""

    def __init__(self, x: Any) -> None:
        self.x = x

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**self.x.__array_interface__, "version": 3}


def test_a_state_that_may_not_be_written_to() -> None:
    """It is refused before anything is."""
    (q, k, v), _, _ = tensors()
    _, state = hla.hla2(q, k, v, return_state=True, backend="cupy")
    wide = state._replace(corrected_state=state.corrected_state[:, :1].expand(state.corrected_state.shape))
    before = [x.clone() for x in wide]
    with pytest.raises(hla.OptionError, match=r"^inplace: expected writable arrays, got a broadcast"):
        hla.step(wide, q[..., 0, :], k[..., 0, :], v[..., 0, :], inplace=True, backend="cupy")
    assert all(map(torch.equal, wide, before))


def test_guests(cupy: Any) -> None:
    """Objects with `__cuda_array_interface__` alone, options among them, where the backend is named."""
    q, k, v, log_decay, _ = (x.astype(np.float32) for x in draw())
    given = [Guest(x) for x in (q, k, v)]
    o, state = hla.hla2(*given, log_decay=Guest(log_decay), backend="cupy", return_state=True)
    assert type(o) is cupy.ndarray
    assert all(type(x) is cupy.ndarray for x in state)
    wanted = hla.hla2(*(x.astype(np.float64) for x in (q, k, v)), log_decay=log_decay.astype(np.float64))
    assert per_token_error(o.get(), wanted) <= error_budget("hla2", "float32", 17, 5, dv=7)
    assert hla.explain("hla2", *given, backend="cupy").backend == "cupy"
    token = [Guest(np.ascontiguousarray(x[..., 0, :])) for x in (q, k, v)]
    o_t, state = hla.step(state, *token, log_decay=Guest(np.ascontiguousarray(log_decay[..., 0])), backend="cupy")
    assert type(o_t) is cupy.ndarray
    value, pull = hla.vjp("hla2", *given, decay=0.9, backend="cupy")
    found = pull(Guest(np.ones(value.shape, np.float32)))
    right = hla.vjp("hla2", *(x.astype(np.float64) for x in (q, k, v)), decay=0.9)[1](np.ones(value.shape))
    for x, y in ((found.q, right.q), (found.v, right.v), (found.decay, right.decay)):
        assert type(x) is cupy.ndarray
        assert np.abs(x.get() - y).max() <= 1e-5 * np.abs(y).max()
    for name in (None, "numpy"):
        with pytest.raises(hla.DTypeError, match=r"^q: expected an array .*Guest"):
            hla.hla2(*given, backend=name)
        with pytest.raises(hla.DTypeError, match=r"^q: expected an array .*Guest"):
            hla.vjp("hla2", *given, backend=name)
    with pytest.raises(hla.DTypeError, match=r"^q: expected an array .*builtins\.list"):
        hla.hla2([1.0], [1.0], [1.0], backend="cupy")


def test_the_script_for_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    """`benchmarks/gpu.py` measures this backend too."""
    path = Path(__file__).parents[1] / "benchmarks" / "gpu.py"
    spec = importlib.util.spec_from_file_location("gpu", path)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    place = torch.device("cpu")
    rows = script.measure(script.Clock(place), place, torch.float32, (1, 40, 2, 16), 1, ("cupy",))
    found = {(row["pass"], row["name"]): row for row in rows}
    ours = [f"{operator}, cupy" for operator in script.OPERATORS]
    wanted = {(which, name) for which in ("forward", "backward") for name in (*ours, "hla2, torch", "softmax, SDPA")}
    assert set(found) == {*wanted, ("decode", "hla2, cupy, step"), ("decode", "copy of the state")}
    assert all(("traffic_bytes" in row) == ("cupy" in name) for (_, name), row in found.items())
    assert not capsys.readouterr().err, "nothing failed"

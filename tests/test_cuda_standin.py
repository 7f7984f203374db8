"""The stand-in for CuPy behaves as CuPy does where it says so, runs kernels, and leaves nothing behind."""

from __future__ import annotations

import copy
import gc
import importlib.util
import operator
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import array_api_compat
import numpy as np
import pytest

import hla
import libraries
from cuda import cpu, standin
from hla import arrays
from hla.backends import registry
from hla.testing import error_budget, per_token_error

libraries.only("numpy")

if not cpu.available():
    pytest.skip("with g++", allow_module_level=True)

SHAPE = (2, 3, 5)


@pytest.fixture
def cupy() -> Iterator[Any]:
    with standin.install() as module:
        yield module


@pytest.fixture
def pair(cupy: Any) -> tuple[np.ndarray, Any]:
    """The same numbers in NumPy and in CuPy."""
    host = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
    return host, cupy.asarray(host)


def same(x: Any, host: Any) -> bool:
    """Whether an array of CuPy's holds what NumPy says, to the bit."""
    host = np.asarray(host)
    assert type(x) is standin.ndarray
    assert (x.shape, x.dtype) == (host.shape, host.dtype)
    return bool(np.array_equal(x.get(), host, equal_nan=host.dtype.kind == "f"))


# ---- the module


def test_it_is_cupy_for_everybody_and_gone_afterwards() -> None:
    compat = "array_api_compat.cupy"
    missing = importlib.util.find_spec("cupy") is None
    before = {name for name in sys.modules if name.partition(".")[0] == "cupy" or name.startswith(compat)}
    with standin.install() as module:
        import cupy
        import cupy.cuda.compiler
        from cupy.cuda import runtime

        assert cupy is module
        assert importlib.util.find_spec("cupy") is not None
        assert runtime.getDeviceCount() == 1
        x = cupy.ones(SHAPE)
        assert arrays.family(x) == "cupy"
        assert array_api_compat.is_cupy_array(x)
        assert array_api_compat.array_namespace(x).__name__ == compat
        assert array_api_compat.cupy is sys.modules[compat]
    assert {name for name in sys.modules if name.partition(".")[0] == "cupy" or name.startswith(compat)} == before
    assert standin.ndarray not in arrays._namespaces
    assert not array_api_compat.is_cupy_array(x)
    assert hasattr(array_api_compat, "cupy") == (compat in before)
    if missing:
        with pytest.raises(ImportError):
            import cupy


def test_what_was_there_before_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    real = standin.modules()["cupy"]
    monkeypatch.setitem(sys.modules, "cupy", real)
    broken = standin.install(devices=2)
    module = broken.__enter__()
    assert sys.modules["cupy"] is module is not real
    module.cuda.Device(1).use()
    assert not broken.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
    assert sys.modules["cupy"] is real
    with standin.install() as module:
        assert module.cuda.Device().id == 0
        assert module.cuda.runtime.getDeviceCount() == 1


def test_a_backend_is_asked_again_whether_it_can_work() -> None:
    with standin.install():
        own = registry.registered().get("cupy")
        if own is not None:
            assert own.availability().ok
    if own is not None:
        assert "availability" not in own._memo


def test_no_device() -> None:
    with standin.install(devices=0) as cupy:
        assert not cupy.cuda.is_available()
        with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="cudaErrorNoDevice"):
            cupy.cuda.runtime.getDeviceCount()


@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="with CuPy, which needs no GPU for its names")
def test_it_has_nothing_that_cupy_lacks() -> None:
    import cupy

    def public(x: Any) -> set[str]:
        return {name for name in dir(x) if not name.startswith("_") or name.endswith("__")}

    common = set(dir(type("", (), {})())) | {"__slots__", "__annotations__", "__static_attributes__", "__firstlineno__"}
    for name, module in standin.modules().items():
        assert not public(module) - {"__builtins__"} - set(dir(importlib.import_module(name))), name
    for name in ("ndarray", "RawModule", "RawKernel", "cuda.Device", "cuda.Stream", "cuda.driver.CUDADriverError"):
        mine, real = (operator.attrgetter(name)(x) for x in (standin.modules()["cupy"], cupy))
        assert not public(mine) - common - set(dir(real)), name


# ---- arrays


def test_nothing_becomes_an_array_of_numpy_by_itself(pair: tuple[np.ndarray, Any]) -> None:
    host, x = pair
    for convert in (np.asarray, np.array, lambda x: np.stack([x.get(), x[0]]), lambda x: np.asarray([x, x])):
        with pytest.raises(TypeError):
            convert(x)
    assert not isinstance(x, np.ndarray)
    with pytest.raises(TypeError):
        memoryview(x)
    copied = x.get()
    assert type(copied) is np.ndarray
    copied[...] = 0
    assert same(x, host)


def test_nor_does_an_array_of_numpy_become_one_of_cupy(cupy: Any, pair: tuple[np.ndarray, Any]) -> None:
    host, x = pair
    for mix in (
        lambda: x + host,
        lambda: host + x,
        lambda: cupy.matmul(x, host.mT if hasattr(host, "mT") else host.swapaxes(-1, -2)),
        lambda: cupy.concatenate([x, host]),
        lambda: cupy.where(host > 0, x, x),
        lambda: np.add(host, x),
    ):
        with pytest.raises(TypeError, match=r"Unsupported type <class 'numpy\.ndarray'>"):
            mix()
    with pytest.raises(ValueError, match="cannot be used for fill"):
        x[...] = host
    with pytest.raises(TypeError, match="Unsupported type <class 'list'>"):
        x + [1.0] * 5
    kept = host.copy()
    for made in (cupy.asarray(host), cupy.array(host)):
        host[...] = 7
        assert same(made, kept)
        host[...] = kept


def test_numbers_mix_with_arrays_and_numpys_functions_are_cupys(pair: tuple[np.ndarray, Any]) -> None:
    host, x = pair
    for result, expected in (
        (2 * x, 2 * host), (x**2, np.power(host, 2)), (1 / x, 1 / host), (np.float32(3) - x, np.float32(3) - host),
        (np.float64(3) * x, np.float64(3) * host), (-x, -host), (abs(x), abs(host)), (x > 0, host > 0),
        (x == x, host == host),
        (np.exp(x), np.exp(host)), (np.sum(x, axis=1), np.sum(host, axis=1)), (x @ x.mT, host @ host.swapaxes(-1, -2)),
    ):  # fmt: skip
        assert same(result, expected)


def test_a_result_without_axes_is_an_array(cupy: Any, pair: tuple[np.ndarray, Any]) -> None:
    host, x = pair
    for result, expected in (
        (x.sum(), host.sum()), (cupy.max(x), host.max()), (x[1, 2, 3], host[1, 2, 3]),
        (cupy.add(x[0, 0, 0], 1), host[0, 0, 0] + 1), (x.mean(), host.mean()),
    ):  # fmt: skip
        assert result.shape == ()
        assert same(result, expected)
    assert float(x[0, 0, 1]) == host[0, 0, 1] == x[0, 0, 1].item()
    assert cupy.asarray(5).item() == 5
    with pytest.raises(TypeError):
        operator.index(cupy.asarray(5))
    with pytest.raises(TypeError):
        hash(x)
    with pytest.raises(ValueError, match="ambiguous"):
        bool(x)


def test_parts_are_views_and_know_where_they_are(cupy: Any, pair: tuple[np.ndarray, Any]) -> None:
    host, x = pair
    start = x.data.ptr
    assert x.strides == host.strides == (60, 20, 4)
    for part, offset in (
        (x[1], 60), (x[1, 2, 3], 60 + 40 + 12), (x[:, ::-1], 40), (x.T, 0), (x.mT, 0), (x.reshape(6, 5), 0),
        (x[..., 1:], 4), (x[None], 0), (cupy.moveaxis(x, 0, 1), 0), (x.view("int32"), 0),
        (cupy.broadcast_to(x, (7, *SHAPE)), 0),
    ):  # fmt: skip
        assert part.data.ptr == start + offset
    x[1, 2, 3][...] = 9
    x[0, :, 0] = x[0, :, 1]
    host[1, 2, 3], host[0, :, 0] = 9, host[0, :, 1]
    assert same(x, host)
    assert [same(row, host[i]) for i, row in enumerate(x)] == [True, True]
    assert cupy.asarray(x) is x.astype("float32", copy=False) is cupy.ascontiguousarray(x) is x
    assert cupy.ascontiguousarray(x.mT).flags.c_contiguous
    assert not x.mT.flags["C_CONTIGUOUS"]
    for copied in (x.copy(), cupy.array(x), copy.deepcopy(x), x.astype("float32"), x.flatten()):
        assert copied.data.ptr != start
    x += 1
    assert (x.data.ptr, same(x, host + 1)) == (start, True)
    out = cupy.empty_like(x)
    assert cupy.add(x, x, out=out) is out
    assert same(out, x.get() * 2)


def test_empty_memory_shows(cupy: Any) -> None:
    assert np.isnan(cupy.empty(SHAPE, "float16").get()).all()
    assert (cupy.empty(SHAPE, "int32").get() == -(2**31)).all()
    assert (cupy.empty_like(cupy.zeros(SHAPE, "uint8")).get() == 255).all()
    assert cupy.empty(0).size == 0


def test_no_warning_about_values(cupy: Any) -> None:
    x = cupy.asarray([3e38, -1, 0], dtype="float32")
    assert same(x * 10, np.array([np.inf, -10, 0], "float32"))
    assert cupy.isnan(cupy.sqrt(x)).tolist() == [False, True, False]
    assert (x / 0).tolist() == [np.inf, -np.inf, pytest.approx(np.nan, nan_ok=True)]


class Foreign:
    """An array of a library that nobody knows, with no more than CUDA's array interface."""

    def __init__(self, host: np.ndarray) -> None:
        self.host = host
        self.__cuda_array_interface__ = {
            "shape": host.shape,
            "typestr": host.dtype.str,
            "strides": None if host.flags.c_contiguous else host.strides,
            "version": 3,
            "data": (host.__array_interface__["data"][0], False),
        }


def test_memory_of_other_libraries_is_taken_and_given_without_a_copy(cupy: Any) -> None:
    host = np.arange(30, dtype=np.float32).reshape(SHAPE)
    for given in (host, host[1], host[:, ::-1, 1:], host.T, host[:0], host[1, 2, 3:4].reshape(())):
        taken = cupy.asarray(Foreign(given))
        assert same(taken, given)
        assert given.size == 0 or taken.data.ptr == given.__array_interface__["data"][0]
        assert same(cupy.asarray(Foreign(given), dtype="float64"), given.astype("float64"))
    view = cupy.asarray(Foreign(host))
    view[0, 0, 0] = 100
    assert host[0, 0, 0] == 100
    for mine in (view, view.mT, view[:0]):
        interface = mine.__cuda_array_interface__
        assert interface["data"][0] == (mine.data.ptr if mine.size else 0)
        assert interface["strides"] == (mine.strides if mine is not view and mine.size else None)
    assert np.from_dlpack(view).__array_interface__["data"][0] == view.data.ptr
    memory = cupy.cuda.UnownedMemory(view.data.ptr, view.nbytes, view)
    pointer = cupy.cuda.MemoryPointer(memory, 4)
    assert same(cupy.ndarray((4,), "float32", pointer, strides=(8,)), host.ravel()[1:8:2])
    assert same(cupy.ndarray(SHAPE, "float32", cupy.cuda.MemoryPointer(memory, 0)), host)


def test_memory_lives_as_long_as_somebody_looks_at_it(cupy: Any) -> None:
    foreign = Foreign(np.full(1 << 16, 7.0))
    there = weakref.ref(foreign)
    taken = cupy.asarray(foreign)[5:]
    del foreign
    gc.collect()
    assert there() is not None
    assert float(taken.sum()) == 7 * ((1 << 16) - 5)
    del taken
    gc.collect()
    assert there() is None


def test_torch_tensors_through_dlpack(cupy: Any) -> None:
    torch = pytest.importorskip("torch")
    for dtype in (torch.float32, torch.float16, torch.int64, torch.uint8):
        tensor = torch.arange(30).reshape(SHAPE).to(dtype)
        for given in (tensor, tensor.mT, tensor[:, ::2, 1:], tensor[:0]):
            taken = cupy.from_dlpack(given)
            assert same(taken, given.numpy())
            assert given.numel() == 0 or taken.data.ptr == given.data_ptr()
            back = torch.from_dlpack(taken)
            assert given.numel() == 0 or back.data_ptr() == given.data_ptr()
            assert torch.equal(back, given)
    pytest.importorskip("ml_dtypes")
    tensor = torch.arange(30, dtype=torch.bfloat16)
    taken = cupy.from_dlpack(tensor)
    assert taken.dtype.name == "bfloat16"
    taken[3] = 5
    assert tensor[3] == 5


def test_jax_arrays_through_dlpack(cupy: Any) -> None:
    jax = pytest.importorskip("jax")
    x = jax.numpy.arange(12.0)
    taken = cupy.from_dlpack(x)
    assert taken.data.ptr == x.unsafe_buffer_pointer()
    assert jax.dlpack.from_dlpack(taken).tolist() == x.tolist()


def test_devices() -> None:
    with standin.install(devices=2, compute_capability="90", shared_memory=232_448, processors=132) as cupy:
        x = cupy.ones(3)
        with cupy.cuda.Device(1) as device:
            assert cupy.cuda.Device() == device != cupy.cuda.Device(0)
            assert cupy.cuda.runtime.getDevice() == 1
            y = cupy.ones(3)
            z = cupy.asarray(x)
        assert [int(a.device.id) for a in (x, y, z, y[1:], y.T)] == [0, 1, 1, 1, 1]
        assert cupy.cuda.Device().id == 0
        with pytest.raises(ValueError, match="is different from the current device"):
            x + y
        assert device.compute_capability == "90"
        assert device.attributes["MaxSharedMemoryPerBlockOptin"] == 232_448
        assert device.attributes["MultiProcessorCount"] == 132
        assert array_api_compat.device(y) == device
        assert array_api_compat.to_device(y, cupy.cuda.Device(0)).device.id == 0
        with pytest.raises(TypeError, match="unhashable"):
            hash(device)
        with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="invalid device ordinal"):
            cupy.cuda.Device(2).use()


def test_streams(cupy: Any) -> None:
    assert cupy.cuda.get_current_stream().ptr == 0
    with cupy.cuda.Stream() as stream:
        assert cupy.cuda.get_current_stream() is stream
        with cupy.cuda.ExternalStream(12_345):
            assert cupy.cuda.get_current_stream().ptr == 12_345
    cupy.cuda.get_current_stream().synchronize()
    assert cupy.cuda.get_current_stream() is cupy.cuda.Stream.null


@pytest.mark.parametrize("name", standin.GUARDED)
def test_products_can_be_left_to_kernels(cupy: Any, pair: tuple[np.ndarray, Any], name: str) -> None:
    _, x = pair
    if not hasattr(cupy, name):
        pytest.skip("newer NumPy")
    call = getattr(cupy, name)
    with standin.kernels_only():
        with pytest.raises(AssertionError, match=name):
            call("ij,ij", x[0], x[0]) if name == "einsum" else call(x[0], x[0])
        assert same(x + x, x.get() * 2)
    with standin.kernels_only(), pytest.raises(AssertionError, match="matmul"):
        x @ x.mT
    with standin.kernels_only(), pytest.raises(AssertionError, match="cumsum"):
        x.cumsum()
    assert x.cumsum().shape == (30,)


# ---- the core on these arrays


@pytest.mark.parametrize("operator", ["linear_attention", "hla2", "ahla", "hla3"])
@pytest.mark.parametrize("form", ["recurrent", "scan", "chunkwise", "parallel"])
def test_the_core_computes_on_them_what_it_computes_on_numpy(cupy: Any, operator: str, form: str) -> None:
    rng = np.random.default_rng(1)
    q, k, v = (rng.normal(size=(3, 19, n)) for n in (5, 5, 7))
    log_decay = -np.exp(rng.normal(size=(3, 19)))
    options = {"form": form, "backend": "numpy", "return_state": True, "normalize": True}
    there = [cupy.asarray(x) for x in (q, k, v, log_decay)]
    plan = hla.explain(operator, *there[:3], log_decay=there[3], form=form, backend="numpy")
    assert (plan.backend, plan.form) == ("numpy", form)
    o, state = getattr(hla, operator)(*there[:3], log_decay=there[3], **options)
    expected, last = getattr(hla, operator)(q, k, v, log_decay=log_decay, **options)
    budget = 2 * error_budget(operator, "float64", 19, 5, dv=7, normalize=True, values=expected.size)
    assert type(o) is standin.ndarray
    assert per_token_error(o, expected) < budget
    for x, y in zip(state, last, strict=True):
        assert per_token_error(x, y) < budget
    token = [cupy.asarray(x[:, 0]) for x in (q, k, v)]
    o_t, _ = hla.step(state, *token, normalize=True, backend="numpy")
    expected_t, _ = hla.step(last, q[:, 0], k[:, 0], v[:, 0], normalize=True, backend="numpy")
    assert per_token_error(o_t[:, None], expected_t[:, None]) < budget


def test_gradients_of_the_core(cupy: Any) -> None:
    rng = np.random.default_rng(2)
    q, k, v, do = (rng.normal(size=(2, 11, n)) for n in (5, 5, 3, 3))
    _, pull = hla.vjp("hla2", *map(cupy.asarray, (q, k, v)), decay=0.9, backend="numpy")
    _, expected = hla.vjp("hla2", q, k, v, decay=0.9, backend="numpy")
    budget = 2 * error_budget("hla2", "float64", 11, 5, dv=3, values=q.size, gradient=True)
    for name in ("q", "k", "v"):
        found = getattr(pull(cupy.asarray(do)), name)
        assert per_token_error(found, getattr(expected(do), name)) < budget


# ---- kernels

SOURCE = """
#ifndef FACTOR
#define FACTOR 2
#endif
struct Sizes { int n; float by; const float* shift; };
template <class T> __global__ void scale(const T* x, T* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = x == nullptr ? T(FACTOR) : FACTOR * x[i];
}
extern "C" __global__ void shifted(const float* x, float* y, Sizes sizes) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < sizes.n) y[i] = x[i] * sizes.by + sizes.shift[i];
}
extern "C" __global__ void reversed(float* x) {
  extern __shared__ float tile[];
  tile[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = tile[blockDim.x - 1 - threadIdx.x];
}
__global__ void mangled(float* x) { x[0] = 1; }
"""
SIZES = np.dtype([("n", "int32"), ("by", "float32"), ("shift", "uintp")])


def module(cupy: Any, *names: str, options: tuple[str, ...] = ()) -> Any:
    return cupy.RawModule(code=SOURCE, options=options, name_expressions=names or None)


def test_a_template_runs_and_is_written_down(cupy: Any) -> None:
    x, y = cupy.arange(37, dtype="float32"), cupy.empty(37, "float32")
    made = module(cupy, "scale<float>", "scale<double>", options=("-std=c++17", "-DFACTOR=3", "-DUNUSED"))
    assert standin.compilations == []
    kernel = made.get_function("scale<float>")
    assert made.get_function("scale<float>") is kernel
    kernel((2,), (32,), (x, y, np.int32(37)))
    assert same(y, np.arange(37, dtype="float32") * 3)
    kernel((2, 1), (32,), (None, y, np.int32(36)))
    assert y.tolist() == [3] * 36 + [108]
    made.get_function("scale<double>")((1,), (8,), (cupy.ones(8), out := cupy.empty(8), np.int32(8)), shared_mem=16)
    assert out.tolist() == [3] * 8
    assert standin.launches == [
        ("scale<float>", (2,), (32,), 0),
        ("scale<float>", (2, 1), (32,), 0),
        ("scale<double>", (1,), (8,), 16),
    ]
    assert len(standin.compilations) == 1
    with standin.install():
        assert standin.launches == []


def test_structures_are_passed_by_value(cupy: Any) -> None:
    x, shift, y = cupy.arange(5, dtype="float32"), cupy.full(5, 0.5, "float32"), cupy.empty(5, "float32")
    kernel = module(cupy).get_function("shifted")
    sizes = np.array([(5, 2.0, shift.data.ptr)], SIZES)
    kernel((1,), (8,), (x, y, sizes))
    assert y.tolist() == [0.5, 2.5, 4.5, 6.5, 8.5]
    with pytest.raises(TypeError, match=r"numpy.ndarray of shape \(2,\) as a kernel parameter"):
        kernel((1,), (8,), (x, y, np.repeat(sizes, 2)))
    with pytest.raises(cpu.KernelError, match="argument 2: expected"):
        kernel((1,), (8,), (x, y, sizes[["n", "by"]].astype([("n", "int32"), ("by", "float32")])))


def test_arguments_have_cupys_types(cupy: Any) -> None:
    x, y = cupy.arange(7, dtype="float32"), cupy.empty(7, "float32")
    kernel = module(cupy, "scale<float>").get_function("scale<float>")
    kernel((1,), (8,), [x, y, np.array(7, "int32")])
    assert same(y, x.get() * 2)
    for n, message in ((7, "expected int, got int"), (np.int64(7), "expected int"), (7.0, "expected int, got float")):
        with pytest.raises(cpu.KernelError, match=message.partition(",")[0]):
            kernel((1,), (8,), (x, y, n))
    for n in ("7", [7], object()):
        with pytest.raises(TypeError, match="Unsupported type"):
            kernel((1,), (8,), (x, y, n))
    with pytest.raises(TypeError, match="You are trying to pass"):
        kernel((1,), (8,), (x.get(), y, np.int32(7)))
    with pytest.raises(cpu.KernelError, match="argument 0"):
        kernel((1,), (8,), (x.astype("float64"), y, np.int32(7)))
    with pytest.raises(cpu.KernelError, match="expected 3 arguments, got 2"):
        kernel((1,), (8,), (x, y))
    with pytest.raises(TypeError, match="'grid' has incorrect type"):
        kernel([1], (8,), (x, y, np.int32(7)))


def test_a_grid_of_no_blocks_has_one(cupy: Any) -> None:
    y = cupy.zeros(3, "float32")
    module(cupy, "scale<float>").get_function("scale<float>")((0,), (4,), (None, y, np.int32(3)))
    assert y.tolist() == [2, 2, 2]


def test_shared_memory_has_to_be_asked_for() -> None:
    with standin.install(shared_memory=65_536) as cupy:
        x = cupy.arange(9, dtype="float32")
        kernel = module(cupy).get_function("reversed")
        kernel((1,), (9,), (x,), shared_mem=48 * 1024)
        assert x.tolist() == list(range(9))[::-1]
        error = cupy.cuda.driver.CUDADriverError
        with pytest.raises(error, match="CUDA_ERROR_INVALID_VALUE"):
            kernel((1,), (9,), (x,), shared_mem=48 * 1024 + 4)
        kernel.max_dynamic_shared_size_bytes = 65_536
        kernel((1,), (9,), (x,), shared_mem=65_536)
        assert x.tolist() == list(range(9))
        with pytest.raises(error, match="CUDA_ERROR_INVALID_VALUE"):
            kernel.max_dynamic_shared_size_bytes = 65_537
        with pytest.raises(error, match="CUDA_ERROR_INVALID_VALUE"):
            kernel((1,), (9,), (x,), shared_mem=65_537)
        assert kernel.max_dynamic_shared_size_bytes == 65_536
        assert module(cupy).get_function("reversed").max_dynamic_shared_size_bytes == 48 * 1024


def test_names_that_are_not_there(cupy: Any) -> None:
    for made, name in (
        (module(cupy), "nothing"),
        (module(cupy), "mangled"),
        (module(cupy, "scale<float>"), "scale<double>"),
    ):
        with pytest.raises(cupy.cuda.driver.CUDADriverError, match="CUDA_ERROR_NOT_FOUND"):
            made.get_function(name)
    assert module(cupy, "mangled").get_function("mangled").name == "mangled"


def test_sources_that_do_not_compile(cupy: Any, tmp_path: Path) -> None:
    error = cupy.cuda.compiler.CompileException
    with pytest.raises(error, match="nowhere") as caught:
        cupy.RawModule(code='extern "C" __global__ void f(int* x) { *x = nowhere; }').get_function("f")
    assert "nowhere" in caught.value.get_message()
    assert "nowhere" in caught.value.source
    with pytest.raises(error, match="unrecognized option --unheard-of"):
        module(cupy, options=("--unheard-of=3",)).get_function("reversed")
    with pytest.raises(TypeError, match="'options' has incorrect type"):
        cupy.RawModule(code=SOURCE, options=["-DFACTOR=3"])
    with pytest.raises(TypeError, match="Exactly one of"):
        cupy.RawModule()
    code = '#include "own.cuh"\nextern "C" __global__ void f(int* x) { *x = OWN; }'
    with pytest.raises(error, match=r"own\.cuh"):
        cupy.RawModule(code=code).get_function("f")
    (tmp_path / "own.cuh").write_text("#define OWN 8\n")
    x = cupy.zeros(1, "int32")
    cupy.RawModule(code=code, options=(f"-I{tmp_path}",)).get_function("f")((1,), (1,), (x,))
    assert x.item() == 8


def test_a_kernel_of_its_own(cupy: Any) -> None:
    x = cupy.arange(4, dtype="float32")
    cupy.RawKernel(SOURCE, "reversed")((1,), (4,), (x,), shared_mem=16)
    assert x.tolist() == [3, 2, 1, 0]


def test_faults_of_kernels_are_found(cupy: Any) -> None:
    x = cupy.zeros(3, "float32")
    with pytest.raises(cpu.KernelError, match="past the end of argument 1"):
        module(cupy, "scale<float>").get_function("scale<float>")((1,), (4,), (None, x, np.int32(4)))


def test_an_array_of_another_device_is_no_argument() -> None:
    with standin.install(devices=2) as cupy:
        x = cupy.zeros(4, "float32")
        kernel = module(cupy).get_function("reversed")
        with cupy.cuda.Device(1), pytest.raises(cupy.cuda.driver.CUDADriverError, match="ILLEGAL_ADDRESS"):
            kernel((1,), (4,), (x,), shared_mem=16)
        kernel((1,), (4,), (x,), shared_mem=16)

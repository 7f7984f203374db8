"""CUDA C++ on the CPU: right kernels give right results in every order and build; each planted fault is found."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import libraries
from cuda import cpu

libraries.only("numpy")

if not cpu.available():
    pytest.skip("with g++", allow_module_level=True)

KERNELS = Path(cpu.__file__).parent / "kernels"
TURN = (
    *("misaligned", "unaligned_tile", "load", "store", "uninitialised", "divergent", "early_return"),
    *("no_barrier", "no_second_barrier", "past_array"),
)
FAULTS = (
    *(f"turn<{fault}>" for fault in ("none", *TURN)),
    *(f"sums<{fault}>" for fault in ("none", "narrow_mask", "wide_mask", "outside_mask")),
    *(
        "dynamic",
        "pass<none>",
        "pass<shuffle_for_barrier>",
        "offsets<none>",
        "offsets<overflow>",
        "total<none>",
        "total<no_atomic>",
    ),
)


def faulty(name: str) -> cpu.Kernel:
    return cpu.compile(KERNELS / "faults.cu", kernels=FAULTS).kernel(name)


def written(folder: Path, text: str) -> Path:
    source = folder / "own.cu"
    source.write_text(text)
    return source


def line(comment: str) -> str:
    """The line of faults.cu that ends in that comment."""
    found = [i for i, text in enumerate((KERNELS / "faults.cu").read_text().splitlines(), 1) if text.endswith(comment)]
    assert len(found) == 1, (comment, found)
    return f"faults.cu:{found[0]}"


# ---- what runs, here and in the processes of the sanitizers

SIZES = (1, 3, 255, 256, 257, 510, 512)


def turned(x: np.ndarray, rounds: int) -> np.ndarray:
    """What turn<none> computes."""
    padded = np.concatenate([x, np.zeros(-len(x) % 256, x.dtype)])
    tiles = padded.reshape(-1, 256)
    result = (tiles[:, ::-1] if rounds % 2 else tiles).reshape(-1)[: len(x)]
    return result + np.append(x[1:], 0).astype(x.dtype)


def turn(fault: str, n: int = 510, rounds: int = 3, order: str | None = None, start: int = 0) -> np.ndarray:
    x = np.arange(1, 1 + start + n, dtype=np.float32)[start:]
    y = np.full(n, np.nan, np.float32)
    faulty(f"turn<{fault}>")((-(-n // 256),), (64,), (x, y, np.int32(n), np.int32(rounds)), order=order)
    return y


def sums(fault: str) -> np.ndarray:
    x, y = np.arange(48, dtype=np.float32), np.full(48, np.nan, np.float32)
    faulty(f"sums<{fault}>")((1,), (48,), (x, y))
    return y


def dynamic(floats: int, threads: int = 64) -> np.ndarray:
    y = np.full(threads, np.nan, np.float32)
    faulty("dynamic")((1,), (threads,), (y,), shared_bytes=4 * floats)
    return y


def passed(fault: str) -> np.ndarray:
    y = np.zeros(32, np.int32)
    faulty(f"pass<{fault}>")((1,), (32,), (y,))
    return y


def offsets(fault: str) -> int:
    y = np.zeros(1, np.int64)
    faulty(f"offsets<{fault}>")((1,), (1,), (y, np.int32(70_000), np.int32(70_000)))
    return int(y[0])


def total(fault: str, blocks: int = 5) -> int:
    y = np.zeros(1, np.int32)
    faulty(f"total<{fault}>")((blocks,), (32,), (y,))
    return int(y[0])


def sound(*names: str, **options: Any) -> cpu.Kernel:
    module = cpu.compile(KERNELS / "sound.cu", kernels=names, **options)
    return module.kernel(names[0])


def check_turn() -> None:
    for n in SIZES:
        for rounds in (1, 2, 3):
            np.testing.assert_array_equal(
                turn("none", n, rounds), turned(np.arange(1, n + 1, dtype=np.float32), rounds)
            )


def check_sums() -> None:
    expected = np.arange(48, dtype=np.float32)
    expected[:8], expected[32:40] = 28, 284
    np.testing.assert_array_equal(sums("none"), expected)


def check_others() -> None:
    np.testing.assert_array_equal(dynamic(64), np.arange(64)[::-1])
    np.testing.assert_array_equal(passed("none"), np.roll(np.arange(32), 1))
    assert offsets("none") == 4_900_000_000
    assert total("none") == 10


def check_sum() -> None:
    x = np.random.default_rng(0).integers(-9, 9, 1000).astype(np.float32)
    for grid, block in ((1, 1024), (4, 256), (11, 96)):
        sums, positive = np.zeros(1, np.float32), np.zeros(1, np.int32)
        sound("sum")((grid,), (block,), (x, sums, positive, np.int32(1000)))
        assert sums[0] == x.sum()
        assert positive[0] == (x > 0).sum()


def check_scan() -> None:
    x = np.random.default_rng(1).integers(-9, 9, 96, dtype=np.int32)
    x[32:64] *= 2
    x[64:] = 2 * x[64:] + 1
    y, even = np.zeros(96, np.int32), np.zeros((96, 2), np.int32)
    sound("scan")((1,), (96,), (x, y, even))
    rows = x.reshape(6, 16)
    np.testing.assert_array_equal(y, (rows.cumsum(1) - rows[:, :1]).reshape(-1))
    assert even[64:].sum() == 0
    assert even[32:64].all()
    np.testing.assert_array_equal(even[:32], [[(x[:32] % 2 == 0).any(), (x[:32] % 2 == 0).all()]] * 32)


def check_shifts() -> None:
    y, i = np.zeros((4, 32), np.int32), np.arange(32)
    sound("shifts")((1,), (32,), (y,))
    np.testing.assert_array_equal(y[0], np.where(i % 8 < 3, i, i - 3))
    np.testing.assert_array_equal(y[1], np.where(i % 8 > 4, i, i + 3))
    np.testing.assert_array_equal(
        y[2], np.where(i // 8 % 2 == 0, i, i - 8)
    )  # from an earlier group, not from a later one
    np.testing.assert_array_equal(y[3], i // 8 * 8 + 2)


def check_transpose() -> None:
    names = ("transpose<float, 16>", "transpose<double, 32>", "transpose<unsigned char, 16>")
    for name, dtype, tile in zip(names, (np.float32, np.float64, np.uint8), (16, 32, 16), strict=True):
        x = np.arange(37 * 53).reshape(37, 53).astype(dtype)
        y = np.zeros((53, 37), dtype)
        sizes = np.array((37, 53), [("rows", "i4"), ("columns", "i4")])[()]
        kernel = cpu.compile(KERNELS / "sound.cu", kernels=names, macros={"ROWS": 4}).kernel(name)
        kernel((-(-53 // tile), -(-37 // tile)), (tile, 4), (x, y, sizes))
        np.testing.assert_array_equal(y, x.T)


def check_neighbours() -> None:
    x, y = np.arange(90.0), np.full(90, np.nan)
    sound("neighbours")((1,), (96,), (x, y, 90), shared_bytes=8 * 96)
    padded = np.append(x, np.zeros(6))
    np.testing.assert_array_equal(y, np.roll(padded.reshape(3, 32), -1, 1).reshape(-1)[::-1][:90])


def numbers16() -> np.ndarray:
    """Numbers for conversions: of all sizes, ties between two of 16 bits, denormal, too large, not finite."""
    rng = np.random.default_rng(2)
    wide = rng.standard_normal(2000) * 2.0 ** rng.integers(-140, 128, 2000)
    near = (1 + rng.integers(0, 4096, 2000) / 4096) * 2.0 ** rng.integers(-27, 17, 2000)
    edges = [0.0, -0.0, 65504, 65519.99, 65520, 2.0**-14, 2.0**-24, 2.0**-25, 1.5 * 2.0**-25, np.inf, -np.inf, np.nan]
    with np.errstate(over="ignore"):
        return np.concatenate([wide, near, edges]).astype(np.float32)


def check_conversions(name: str, dtype: Any) -> None:
    x = numbers16()
    with np.errstate(over="ignore"):
        expected = x.astype(dtype)
    one, two = np.zeros(len(x), dtype), np.zeros(len(x), dtype)
    back = np.zeros(len(x), np.float32)
    sound(name)((1,), (64,), (x, one, two, back, np.int32(len(x) // 2)))
    for result in (one, two, back):
        np.testing.assert_array_equal(result.astype(np.float32), expected.astype(np.float32))
        np.testing.assert_array_equal(np.signbit(result[:-1]), np.signbit(expected[:-1]))


def check_halves() -> None:
    check_conversions("halves", np.float16)


def check_bfloats() -> None:
    check_conversions("bfloats", libraries.Library("numpy").dtype("bfloat16"))


def check_functions() -> None:
    x = np.random.default_rng(3).uniform(0.1, 4, 100).astype(np.float32)
    y = np.zeros((5, 100), np.float32)
    sound("functions")((2,), (64,), (x, y, np.int32(100)))
    z = x.astype(np.float64)
    expected = [np.exp(-z), np.exp2(z), z**-0.5, 1 / z + z, np.maximum(z * z + 1, np.minimum(z, 2))]
    np.testing.assert_allclose(y, expected, rtol=4e-7)


def check_numbers() -> None:
    y = np.zeros((24 * 30, 4), np.int32)
    sound("numbers")((2, 3, 4), (5, 3, 2), (y,))
    i = np.arange(24 * 30)
    np.testing.assert_array_equal(y, np.stack([i, i // 30, i % 30, np.array([5, 7, 11])[i % 3]], 1))


CHECKS: tuple[Callable[[], None], ...] = (
    *(check_turn, check_sums, check_others, check_sum, check_scan, check_shifts),
    *(check_transpose, check_neighbours, check_halves, check_bfloats, check_functions, check_numbers),
)


def check_all(orders: tuple[str, ...]) -> int:
    """Every right kernel, for the processes of the sanitizers."""
    for order in orders:
        with cpu.order(order):
            for check in CHECKS:
                check()
    return len(CHECKS)


# ---- right kernels


@pytest.mark.parametrize("order", cpu.ORDERS)
@pytest.mark.parametrize("check", CHECKS)
def test_right_kernels_give_right_results(check: Callable[[], None], order: str) -> None:
    with cpu.order(order):
        check()


@pytest.mark.sanitizers
@pytest.mark.parametrize(("build", "orders"), [("address", cpu.ORDERS), ("thread", ("shuffled",))])
def test_the_sanitizers_find_nothing_in_right_kernels(build: str, orders: tuple[str, ...]) -> None:
    report = cpu.sanitized(build, check_all, orders)
    assert report.faults == ()
    assert report.result == len(CHECKS)


def test_every_half_comes_back_as_itself() -> None:
    every = np.arange(65536, dtype=np.uint16)
    x = every.view(np.float16).astype(np.float32)
    one, two, back = np.zeros(65536, np.float16), np.zeros(65536, np.float16), np.zeros(65536, np.float32)
    sound("halves")((1,), (128,), (x, one, two, back, np.int32(32768)))
    np.testing.assert_array_equal(back, x)
    finite = ~np.isnan(x)
    np.testing.assert_array_equal(one.view(np.uint16)[finite], every[finite])


def test_orders() -> None:
    def run(order: str, seed: int = 0) -> np.ndarray:
        y, following = np.zeros(240, np.int32), np.zeros(1, np.int32)
        sound("order")((3,), (80,), (y, following), order=order, seed=seed)
        return y

    np.testing.assert_array_equal(run("forward"), np.arange(240))
    np.testing.assert_array_equal(run("reverse"), np.arange(240)[::-1])
    shuffled = run("shuffled")
    np.testing.assert_array_equal(np.sort(shuffled), np.arange(240))
    blocks = shuffled.reshape(3, 80) // 80
    assert (blocks == blocks[:, :1]).all(), "blocks run one after another"
    np.testing.assert_array_equal(shuffled, run("shuffled"))
    assert len({run("shuffled", seed).tobytes() for seed in range(8)}) == 8


def test_fibers_by_the_system() -> None:
    """What runs where the switch between fibers has not been written for the processor."""
    sums, positive = np.zeros(1, np.float32), np.zeros(1, np.int32)
    x = np.arange(-50, 70, dtype=np.float32)
    sound("sum", flags=("-DHLA_CPU_UCONTEXT",))((2,), (96,), (x, sums, positive, np.int32(120)))
    assert (sums[0], positive[0]) == (x.sum(), 69)


# ---- planted faults, as a launch by itself finds them


def raises(function: Callable[..., Any], *args: Any) -> str:
    with pytest.raises(cpu.KernelError) as found:
        function(*args)
    return str(found.value)


@pytest.mark.parametrize("order", cpu.ORDERS)
def test_misaligned_vectors(order: str) -> None:
    message = raises(turn, "misaligned", 510, 3, order)
    assert message.startswith("kernel turn<misaligned> in faults.cu: block (")
    assert message.endswith(f"at {line('// misaligned')}: misaligned access")


def test_vectors_in_shared_memory_that_is_not_declared_to_be_aligned() -> None:
    assert raises(turn, "unaligned_tile").endswith(f"at {line('// writing the tile')}: misaligned access")


def test_a_view_that_starts_off_a_vector() -> None:
    assert "misaligned access" in raises(turn, "none", 510, 3, None, 1)
    np.testing.assert_array_equal(turn("none", start=4), turned(np.arange(5, 515, dtype=np.float32), 3))


def test_an_index_past_an_array() -> None:
    message = raises(turn, "past_array")
    assert message.endswith(f"thread (0, 0, 0) at {line('// reading the tile')}: index out of the bounds of an array")


def test_a_load_out_of_bounds_is_nan() -> None:
    assert np.isnan(turn("load")[-1])
    assert not np.isnan(turn("load")[:-1]).any()


def test_a_store_out_of_bounds() -> None:
    assert "a store 0 bytes past the end of argument 1" in raises(turn, "store")


def test_uninitialised_shared_memory_is_nan() -> None:
    for order in cpu.ORDERS:
        assert np.isnan(turn("uninitialised", 512, 1, order)).sum() == 8


@pytest.mark.parametrize("order", cpu.ORDERS)
def test_shared_memory_of_another_block_is_gone(tmp_path: Path, order: str) -> None:
    text = """
        __global__ void f(float2* y) {
          __shared__ float a;
          extern __shared__ float b[];
          if (blockIdx.x == 1) a = b[0] = 1;
          y[blockIdx.x] = make_float2(a, b[0]);
        }
    """
    y = np.zeros((3, 2), np.float32)
    for _ in range(2):
        cpu.compile(written(tmp_path, text)).kernel("f")((3,), (1,), (y,), shared_bytes=4, order=order)
        np.testing.assert_array_equal(y, [[np.nan] * 2, [1] * 2, [np.nan] * 2])


def test_divergent_barrier() -> None:
    message = raises(turn, "divergent")
    assert "divergent barrier: 32 threads wait for __syncthreads at " + line("// divergent") in message
    assert "(first (0, 0, 0)); 32 threads wait for __syncthreads at " in message
    assert "(first (16, 0, 0))" in message


def test_barrier_after_some_have_returned() -> None:
    message = raises(turn, "early_return", 500)
    assert f"61 threads wait for __syncthreads at {line('// first barrier')} (first (0, 0, 0)); 3 threads" in message
    assert "block (1, 0, 0)" in message


def test_more_shared_memory_than_asked_for() -> None:
    assert "a store outside the 252 bytes of dynamic shared memory" in raises(dynamic, 63)


def test_a_mask_without_the_lane_itself() -> None:
    message = raises(sums, "narrow_mask")
    assert f"thread (7, 0, 0) at {line('// shuffle')}: the mask of a warp function lacks the lane that" in message


def test_a_mask_with_lanes_that_do_not_come() -> None:
    message = raises(sums, "wide_mask")
    assert f"deadlock: 16 threads wait for a shuffle at {line('// shuffle')} with mask 0x0000ffff" in message
    assert f"32 threads wait for __syncthreads at {line('// after the shuffle')} (first (8, 0, 0))" in message


def test_a_shuffle_from_a_lane_outside_the_mask_is_nan() -> None:
    assert np.isnan(sums("outside_mask")[:8]).all()


def test_a_shuffle_from_a_lane_past_the_block_is_nan() -> None:
    total, positive = np.zeros(1, np.float32), np.zeros(1, np.int32)
    sound("sum")((1,), (120,), (np.ones(120, np.float32), total, positive, np.int32(120)))
    assert np.isnan(total[0])
    assert positive[0] == 120


@pytest.mark.parametrize(("fault", "rounds"), [("no_barrier", 1), ("no_second_barrier", 3)])
def test_a_missing_barrier_shows_in_some_order(fault: str, rounds: int) -> None:
    def run(fault: str) -> np.ndarray:
        x, y = np.arange(510, dtype=np.float32), np.full(510, np.nan, np.float32)
        cpu.in_every_order(faulty(f"turn<{fault}>"), (2,), (64,), (x, y, np.int32(510), np.int32(rounds)))
        return y

    message = raises(run, fault)
    assert f"kernel turn<{fault}> in faults.cu: the result depends on the order of threads: argument 1 at (" in message
    np.testing.assert_array_equal(run("none"), turned(np.arange(510, dtype=np.float32), 3))


def test_launches_that_no_gpu_takes() -> None:
    y = np.zeros(1, np.int32)
    kernel = faulty("total<none>")
    for grid, block, shared, what in (
        ((0,), (1,), 0, "grid x: expected 1 to 2147483647, got 0"),
        ((1, 65_536), (1,), 0, "grid y: expected 1 to 65535, got 65536"),
        ((1,), (1025,), 0, "block x: expected 1 to 1024, got 1025"),
        ((1,), (64, 32), 0, "block: expected 1024 threads at most, got 2048"),
        ((1,), (1,), 232_449, "shared_bytes: expected 0 to 232448, got 232449"),
    ):
        assert raises(kernel, grid, block, (y,), shared) == f"kernel total<none> in faults.cu: {what}"


def test_arguments_that_do_not_fit() -> None:
    kernel = faulty("turn<none>")
    x, y, n = np.zeros(4, np.float32), np.zeros(4, np.float32), np.int32(4)
    fixed = y.view()
    fixed.flags.writeable = False
    for args, what in (
        ((x, y, n), "expected 4 arguments, got 3"),
        ((x.astype(np.float64), y, n, n), "argument 0: expected const float*, got an array of float64"),
        ((x, fixed, n, n), "argument 1: expected float*, got a read-only array of float32"),
        ((x, y, 4, n), "argument 2: expected int, got int"),  # a Python integer has 64 bits
        ((x, y, n, np.float32(1)), "argument 3: expected int, got float32"),
        ((n, y, n, n), "argument 0: expected const float*, got int32"),
        ((x, y, x, n), "argument 2: expected int, got an array of float32"),
    ):
        assert raises(kernel, (1,), (64,), args) == f"kernel turn<none> in faults.cu: {what}"


def test_overlapping_arguments_stay_together(tmp_path: Path) -> None:
    source = written(tmp_path, "__global__ void f(int* x, int* y) { y[0] = 7; x[0] = x[3] + 1; }\n")
    both = np.arange(6, dtype=np.int32)
    cpu.compile(source).kernel("f")((1,), (1,), (both[:4], both[3:]))
    np.testing.assert_array_equal(both, [8, 1, 2, 7, 4, 5])


# ---- planted faults, as the sanitizers find them


@pytest.mark.sanitizers
@pytest.mark.parametrize(
    ("function", "argument", "kind", "comment"),
    [
        (turn, "load", "heap-buffer-overflow", "// load"),
        (turn, "store", "heap-buffer-overflow", "// store"),
        (turn, "misaligned", "misaligned address", "// misaligned"),
        (turn, "past_array", "out of bounds", "// reading the tile"),
        (dynamic, 63, "heap-buffer-overflow", "// keeping"),
        (offsets, "overflow", "signed integer overflow", "// overflow"),
    ],
)
def test_the_address_build_finds(function: Callable[..., Any], argument: Any, kind: str, comment: str) -> None:
    (fault,) = cpu.sanitized("address", function, argument).faults
    assert kind in fault.kind
    assert fault.places[0] == line(comment)


@pytest.mark.sanitizers
@pytest.mark.parametrize(
    ("function", "fault", "comments"),
    [
        (turn, "no_barrier", ("// writing the tile", "// reading the tile")),
        (turn, "no_second_barrier", ("// writing the tile", "// reading the tile")),
        (passed, "shuffle_for_barrier", ("// passing", "// receiving")),
        (total, "no_atomic", ("// no atomic",)),
    ],
)
def test_the_thread_build_finds(function: Callable[..., Any], fault: str, comments: tuple[str, ...]) -> None:
    faults = cpu.sanitized("thread", function, fault).faults
    assert faults
    assert {found.kind for found in faults} == {"data race"}
    assert set(faults[0].places) == {line(comment) for comment in comments}
    assert "of block (" in faults[0].text, "names the threads"


@pytest.mark.sanitizers
def test_the_thread_build_says_how_much_it_takes() -> None:
    with pytest.raises(cpu.KernelError, match="runs 4000 threads at most"):
        cpu.sanitized("thread", total, "none", 126)


@pytest.mark.sanitizers
def test_an_error_in_the_process_of_a_sanitizer_is_raised_here() -> None:
    with pytest.raises(cpu.KernelError, match="divergent barrier"):
        cpu.sanitized("address", turn, "divergent")


@pytest.mark.sanitizers
@pytest.mark.parametrize("build", ["address", "thread"])
def test_a_program_under_a_sanitizer(build: str) -> None:
    program = "import os, test_cuda_cpu as t; t.check_turn(); print(os.environ['HLA_CUDA_BUILD'])"
    command = [sys.executable, cpu.__file__, build, sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"{build}\n"), done.stderr


# ---- compiling


def test_errors_of_the_compiler_name_file_and_line(tmp_path: Path) -> None:
    source = written(tmp_path, "\n__global__ void f(float* x) {\n  x[0] = y;\n}\n")
    with pytest.raises(cpu.CompileError, match=r"own.cu does not compile:(.|\n)*own.cu:3:"):
        cpu.compile(source)


def test_what_there_is_to_launch(tmp_path: Path) -> None:
    source = written(tmp_path, "template <int N> __global__ void f(int* x) { *x = N; }\n")
    with pytest.raises(cpu.CompileError, match="only templates"):
        cpu.compile(source)
    module = cpu.compile(source, kernels=["f<3>", "f<4>"])
    y = np.zeros(1, np.int32)
    module.kernel("f<4>")((1,), (1,), (y,))
    assert y[0] == 4
    with pytest.raises(KeyError, match=r"own.cu has no kernel 'f<5>'; it has f<3>, f<4>"):
        module.kernel("f<5>")


def test_made_once_for_each_source_and_each_set_of_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "CACHE", tmp_path / "cache")

    def run(text: str, **macros: int) -> tuple[int, int]:
        cpu._module.cache_clear()
        y = np.zeros(1, np.int32)
        cpu.compile(written(tmp_path, text), macros=macros).kernel("f")((1,), (1,), (y,))
        return int(y[0]), len(list(cpu.CACHE.glob("own-*.so")))

    text = '#include "more.cuh"\n__global__ void f(int* x) { *x = A + B; }\n'
    (tmp_path / "more.cuh").write_text("#define B 10\n")
    assert run(text, A=1) == (11, 1)
    assert run(text, A=1) == (11, 1)
    assert run(text, A=2) == (12, 2)
    (tmp_path / "more.cuh").write_text("#define B 20\n")
    assert run(text, A=2) == (22, 3)
    assert len(list(cpu.CACHE.glob("cpu-*.o"))) == 1


def test_assertions_of_a_kernel(tmp_path: Path) -> None:
    source = written(tmp_path, "__global__ void f(int n) {\n  assert(int(threadIdx.x) < n);\n}\n")
    kernel = cpu.compile(source).kernel("f")
    kernel((1,), (4,), (np.int32(4),))
    message = raises(kernel, (1,), (5,), (np.int32(4),))
    assert message.endswith("block (0, 0, 0): thread (4, 0, 0) at own.cu:2: assertion failed: int(threadIdx.x) < n")
    kernel((1,), (4,), (np.int32(4),))


@pytest.mark.skipif(cpu._version() < 12, reason="of g++ 12 and later")
def test_variables_without_a_value(tmp_path: Path) -> None:
    text = (
        "__global__ void f(const float* x, float* y, int n) {\n  float s;\n  for (int i = 0; i < n; ++i) s += x[i];\n"
    )
    kernel = cpu.compile(written(tmp_path, text + "  *y = s;\n}\n")).kernel("f")
    y = np.zeros(1, np.float32)
    kernel((1,), (1,), (np.ones(3, np.float32), y, np.int32(3)))
    assert y[0] < -1e38


def test_declarations_of_shared_memory(tmp_path: Path) -> None:
    text = """
        struct Pair { float a, b; };
        template <int N, int M> struct Table { int of[N][M]; };
        __device__ int* own() { static __shared__ int first[3]; return first; }
        __global__ void f(int* y) {
          extern __shared__ __align__(16) unsigned long long more[];
          __shared__ __align__(sizeof(float4)) Pair pairs[2][3], one;
          volatile __shared__ unsigned int word;
          __shared__ Table<2, 3> tables[2], *chosen;
          y[0] = sizeof(pairs), y[1] = sizeof(one), y[2] = sizeof(word), y[3] = sizeof(tables), y[4] = sizeof(chosen);
          y[5] = sizeof(more[0]), y[6] = own() == own(), y[7] = size_t(pairs) % 16, y[8] = size_t(own()) % 16;
          one.a = 1, word = 2, tables[1].of[1][2] = 3, chosen = tables + 1, more[1] = 4;
          y[9] = one.a + word + chosen->of[1][2] + more[1];
        }
    """
    y = np.zeros(10, np.int32)
    cpu.compile(written(tmp_path, text)).kernel("f")((1,), (1,), (y,), shared_bytes=16)
    np.testing.assert_array_equal(y, [48, 8, 4, 48, 8, 8, 1, 0, 4, 10])


@pytest.mark.parametrize("declaration", ["__shared__ int a[4];", "extern __shared__ int a[];"])
def test_shared_memory_outside_of_functions(tmp_path: Path, declaration: str) -> None:
    source = written(tmp_path, f"{declaration}\n__global__ void f(int* x) {{ *x = a[0]; }}\n")
    with pytest.raises(cpu.CompileError, match=r"own.cu:1:"):
        cpu.compile(source)


def test_how_much_shared_memory_there_is(tmp_path: Path) -> None:
    text = "template <int N> __global__ void f(int* x) { __shared__ int a[N]; a[0] = 1; *x = a[0]; }\n"
    module = cpu.compile(written(tmp_path, text), kernels=["f<12288>", "f<12289>", "f<1>"])
    y = np.zeros(1, np.int32)
    module.kernel("f<12288>")((1,), (1,), (y,), shared_bytes=232_448 - 49_152)
    assert "more than 48 KiB of shared memory that is not dynamic" in raises(
        module.kernel("f<12289>"), (1,), (1,), (y,)
    )
    assert "more than 227 KiB of shared memory" in raises(module.kernel("f<1>"), (1,), (1,), (y,), 232_448)


def test_the_build_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HLA_CUDA_BUILD", "no such build")
    with pytest.raises(KeyError, match="no such build"):
        cpu.compile(written(tmp_path, "__global__ void f(int* x) { *x = 1; }\n"))

"""CUDA C++ compiled for GPUs that are not here: what a kernel takes is read right, and what goes wrong is said."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import libraries
from cuda import nvrtc

libraries.only("numpy")

if not nvrtc.available():
    pytest.skip("with nvidia-cuda-nvrtc-cu12", allow_module_level=True)

KERNELS = Path(nvrtc.__file__).parent / "kernels"
COMPILERS = nvrtc._compilers()

# Sums that need many registers at once, and a table indexed at run time.
HEAVY = """
extern "C" __global__ void heavy(const float* x, float* y, int rounds) {
  float sums[64];
  #pragma unroll
  for (int i = 0; i < 64; ++i) sums[i] = x[threadIdx.x + 32 * i];
  for (int round = 0; round < rounds; ++round) {
    #pragma unroll
    for (int i = 0; i < 64; ++i) sums[i] = sums[i] * sums[(i + 7) % 64] + sums[(i + 31) % 64];
  }
  #pragma unroll
  for (int i = 0; i < 64; ++i) y[threadIdx.x + 32 * i] = sums[i];
}
extern "C" __global__ void table(const int* x, int* y) {
  int counts[32] = {};
  for (int i = 0; i < 32; ++i) counts[x[32 * threadIdx.x + i] % 32] += i;
  for (int i = 0; i < 32; ++i) y[32 * threadIdx.x + i] = counts[i];
}
"""


@pytest.fixture(params=list(COMPILERS), autouse=True)
def each_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "_compiler", lambda: COMPILERS[request.param])


def written(folder: Path, text: str) -> Path:
    source = folder / "own.cu"
    source.write_text(text)
    return source


def test_version() -> None:
    assert nvrtc.version() >= (12, 8), "that knows sm_100"


@pytest.mark.parametrize("architecture", nvrtc.ARCHITECTURES)
def test_kernels_for_each_gpu(architecture: str) -> None:
    if not nvrtc.includes():
        pytest.skip("with nvidia-cuda-runtime-cu12")
    names = ("transpose<float, 16>", "transpose<double, 32>")
    made = nvrtc.compile(KERNELS / "sound.cu", architecture, kernels=names, macros={"ROWS": 4})
    plain = set(re.findall(r'extern "C" __global__ void (?:__launch_bounds__\(\d+\)\s+)?(\w+)', source("sound.cu")))
    assert set(made.usage) == {*names, *plain}
    assert "scan" in plain
    for usage in made.usage.values():
        assert 0 < usage.registers <= 64
        assert usage.spills == usage.stack == 0
    assert made.usage["transpose<float, 16>"].shared == 4 * 16 * 17
    assert made.usage["transpose<double, 32>"].shared == 8 * 32 * 33
    assert made.usage["sum"].shared == 128
    assert made.cubin.startswith(b"\x7fELF")


def source(name: str) -> str:
    return (KERNELS / name).read_text()


def test_what_the_tests_of_faults_run_is_cuda() -> None:
    made = nvrtc.compile(KERNELS / "faults.cu", "sm_80", kernels=["turn<none>", "turn<divergent>", "sums<none>"])
    assert made.usage["turn<none>"].shared == 1024
    assert {"dynamic", "sums<none>"} < set(made.usage)


def test_spills_and_the_stack(tmp_path: Path) -> None:
    path = written(tmp_path, HEAVY)
    free = nvrtc.compile(path, "sm_90").usage
    held = nvrtc.compile(path, "sm_90", flags=["--maxrregcount=32"]).usage
    assert free["heavy"].registers > 64
    assert free["heavy"].spills == 0
    assert held["heavy"].registers <= 32
    assert held["heavy"].spills > 0
    assert free["table"].stack >= 128
    assert free["table"].spills == 0


WRONG = "\n\n__global__ void f(float* x) { *x = y; }\n"
LARGE = """
extern "C" __global__ void f(int* x) {
  __shared__ int a[20000];
  a[*x] = 1;
  __syncthreads();
  *x = a[x[1]];
}
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [(WRONG, r'own.cu\(3\): error: identifier "y" is undefined'), (LARGE, "too much shared data")],
)
def test_errors_are_those_of_the_compiler(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(nvrtc.CompileError, match=rf"own.cu does not compile for sm_80:\n(.|\n)*{said}"):
        nvrtc.compile(written(tmp_path, text), "sm_80")


def test_macros_and_files_beside_the_source(tmp_path: Path) -> None:
    kernel = "template <int N> __global__ void f(int* x) { __shared__ int a[N]; a[*x] = SIZE; *x = a[x[1]]; }\n"
    (tmp_path / "more.cuh").write_text(kernel)
    path = written(tmp_path, '#include "more.cuh"\n')
    usage: dict[str, Any] = nvrtc.compile(path, "sm_75", kernels=["f<SIZE>", "f<3>"], macros={"SIZE": 100}).usage
    assert {name: found.shared for name, found in usage.items()} == {"f<SIZE>": 400, "f<3>": 12}

"""The CUDA kernels on CuPy arrays: the engine of `hla.backends.staged`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hla.arrays import Array, DType, Namespace, dtype_name
from hla.backends.cupy import launch, parameters
from hla.backends.cupy.launch import cupy
from hla.backends.staged.engine import Arithmetic, rounded_chunk
from hla.errors import BackendUnsupportedError, message
from hla.problem import Problem

_TYPES = {"float32": "float", "float64": "double"}


class Cupy:
    """See `hla.backends.staged.engine.Engine`; all of it on the current device.

    Operands are kept as accumulators are, float32 or float64: the kernels multiply without tensor cores, and only what
    callers give and get is stored in 16 bits.
    """

    scratch = False

    @property
    def xp(self) -> Namespace:
        """CuPy as the Array API has it."""
        import array_api_compat.cupy

        return array_api_compat.cupy

    def empty(self, like: Array, shape: tuple[int, ...], dtype: DType) -> Array:
        """A new array."""
        return cupy().empty(shape, dtype)

    def number(self, like: Array, value: float) -> Array:
        """An array without axes, made on the device."""
        return cupy().full((), value, like.dtype)

    def strides(self, x: Array) -> tuple[int, ...]:
        """In elements."""
        return tuple(step // x.dtype.itemsize for step in x.strides)

    def dense(self, x: Array) -> Array:
        """Without gaps."""
        return cupy().ascontiguousarray(x)

    def fill(self, target: Array, source: Array) -> None:
        """Write one array into another."""
        target[...] = source

    def place(self, x: Array) -> int:
        """The number of the device."""
        return launch.device(x)

    def table(self, where: int, rows: Sequence[Any]) -> Array:
        """int64."""
        return cupy().asarray(rows, dtype="int64", blocking=True)  # it is kept, for other streams too

    def arithmetic(self, problem: Problem) -> Arithmetic:
        """All in the dtype of accumulators."""
        return Arithmetic(problem.dtype, "", problem.dtype)

    def chunk_size(self, problem: Problem, arithmetic: Arithmetic) -> int:
        """The power of two at or below what was asked for, 64 at most, 32 in float64."""
        most = 64 if dtype_name(arithmetic.sums) == "float32" else 32
        return rounded_chunk(problem, most)

    def chains(self, arithmetic: Arithmetic, chunk: int, rows: int, wide: int, columns: int, like: Array) -> bool:
        """Where both states fit into the shared memory of a block."""
        return self._chosen("chain", arithmetic, {"C": chunk, "D": rows, "DW": wide, "DZ": columns}, like) is not None

    def launch(self, kernel: str, batch: int, arguments: dict[str, Any], arithmetic: Arithmetic, like: Array) -> None:
        """Pack, choose a variant, launch."""
        a = {**arguments, "batch": batch}
        for option in ("mask", "starts"):
            if a.get(option) is not None:
                a[option] = a[option].view("uint8")
        name = "state" if kernel == "chain" and a["x"] is None else kernel
        found = self._chosen(name, arithmetic, a, like)
        if found is None:
            limit = launch.shared_memory(launch.device(like))
            raise BackendUnsupportedError(
                message("d, dv", f"sizes whose vectors of a token fit into {limit} bytes of shared memory",
                        f"d = {a['WIDTHS'][0]}, dv = {a['DV']}", 'Use form="chunkwise", or backend="numpy".')
            )  # fmt: skip
        chunk, columns = found
        kind = _TYPES[dtype_name(arithmetic.sums)]
        launch.launch(
            name,
            parameters.name(name, kind, chunk, columns),
            parameters.grid(name, a, columns),
            parameters.THREADS,
            parameters.pack(name, a),
            parameters.shared_bytes(name, kind, chunk, columns, a),
            a,
            like,
            parameters.macros(name, a),
        )

    def _chosen(
        self, kernel: str, arithmetic: Arithmetic, arguments: dict[str, Any], like: Array
    ) -> tuple[int, int] | None:
        """Tokens per chunk and columns of a block: the first variant that fits the device, no wider than need be."""
        limit, kind = launch.shared_memory(launch.device(like)), _TYPES[dtype_name(arithmetic.sums)]
        fitting = [
            (chunk, columns)
            for chunk, columns in parameters.VARIANTS[kernel]
            if chunk == arguments.get("C", chunk)
            and parameters.shared_bytes(kernel, kind, chunk, columns, arguments) <= limit
        ]
        if not fitting:
            return None
        narrow = [one for one in fitting if one[1] < arguments.get("DZ", 0) + 16]
        return narrow[0] if narrow else fitting[-1]


ENGINE = Cupy()

"""Which chunk size is fastest, and how far the default is from it: HLA₂ on NumPy in float32.

For each d and T all sizes and the default (`chunk_size=None`) take turns within one run; 8 heads, fewer where T is
long. The last column is the default's time over the best time.

On a busy machine set OPENBLAS_NUM_THREADS=1: threads that wait for each other measure the neighbours.

    python benchmarks/chunk_size.py [--d 32,64,128] [--lengths 64,512,4096,65536] [--rounds 5]
"""

from __future__ import annotations

import argparse
import math

import numpy as np
from common import in_turns, machine

import hla
from hla.testing import error_budget, make_inputs, per_token_error

SIZES = (16, 32, 64, 128, 256)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--operator", default="hla2")
    parser.add_argument("--d", default="32,64,128")
    parser.add_argument("--lengths", default="64,512,4096,65536")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    call = getattr(hla, arguments.operator)
    print(machine())
    print(f"{arguments.operator}, milliseconds a call")
    print("    d       T  heads " + "".join(f"  C = {size:<5d}" for size in SIZES) + "    default   default / best")
    ratios = []
    for d in (int(x) for x in arguments.d.split(",")):
        for length in (int(x) for x in arguments.lengths.split(",")):
            heads = min(8, max(1, 65536 // length))
            q, k, v = make_inputs(np, T=length, d=d, dv=d, batch=(heads,))

            def run(size: int | None, q: np.ndarray = q, k: np.ndarray = k, v: np.ndarray = v) -> np.ndarray:
                return call(q, k, v, form="chunkwise", chunk_size=size, backend="numpy")

            contenders = {size: lambda size=size, run=run: run(size) for size in (*SIZES, None)}
            default = run(None)
            for size in SIZES:
                error = per_token_error(run(size), default)
                budget = 2 * error_budget(arguments.operator, "float32", length, d)
                assert error <= budget, f"C = {size}: differs by {error:.1e} from the default, allowed {budget:.1e}"
            seconds = in_turns(contenders, arguments.rounds)
            ratio = seconds[None] / min(seconds[size] for size in SIZES)
            ratios.append(ratio)
            cells = "".join(f"{seconds[size] * 1e3:11.2f}" for size in (*SIZES, None))
            print(f"{d:5d} {length:7d} {heads:6d} {cells}   {ratio:8.2f}")
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    print(f"default / best: {mean:.2f} on geometric average, {max(ratios):.2f} at worst")


if __name__ == "__main__":
    main()

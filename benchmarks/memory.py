"""Memory of a long sequence: one head of d = 64 in float32, beyond the inputs and the output.

Measured twice, in processes of their own: by `tracemalloc`, with which NumPy registers every array, and as the growth
of the resident set from before to the peak of the call. Target at one million tokens: 400 MB, and no growth with T.

    python benchmarks/memory.py [--tokens 1000000] [--operators hla2,ahla,hla3]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

import numpy as np
from common import machine, verdict

import hla

D = 64
TARGET = 400e6


def measure(operator: str, tokens: int, how: str) -> dict[str, float]:
    """In this process: peak bytes of one call, beyond inputs and output."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, tokens, D), dtype=np.float32) for _ in range(3))
    for x in (q, k):
        x /= 8  # in place: the peak of the resident set must not have been higher before the call
    call = getattr(hla, operator)
    call(q[:, :256], k[:, :256], v[:, :256], backend="numpy")
    if how == "tracemalloc":
        import tracemalloc

        tracemalloc.start()
        o = call(q, k, v, backend="numpy")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    else:
        before = _resident()
        o = call(q, k, v, backend="numpy")
        peak = _peak_resident() - before
    assert o.shape == v.shape
    return {"beyond": peak - o.nbytes, "finite": float(np.isfinite(o[:, -64:]).all())}


def _resident() -> int:
    """Bytes of this process in memory now."""
    with open("/proc/self/statm", encoding="ascii") as status:
        return int(status.read().split()[1]) * _page()


def _page() -> int:
    import resource

    return resource.getpagesize()


def _peak_resident() -> int:
    """The most bytes of this process that were ever in memory."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def in_subprocess(operator: str, tokens: int, how: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--measure", operator, str(tokens), how]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--operators", default="hla2,ahla,hla3")
    parser.add_argument("--measure", nargs=3, metavar=("OPERATOR", "T", "HOW"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        operator, tokens, how = arguments.measure
        print(json.dumps(measure(operator, int(tokens), how)))
        return
    print(machine())
    ways = ["tracemalloc"] + (["resident set"] if sys.platform.startswith("linux") else [])
    for operator in arguments.operators.split(","):
        for how in ways:
            short, long = (in_subprocess(operator, n, how) for n in (arguments.tokens // 4, arguments.tokens))
            extra, growth = long["beyond"], long["beyond"] - short["beyond"]
            what = f"{operator}, {arguments.tokens:,} tokens, {how}"
            print(verdict(f"{what}, beyond inputs and output", f"{extra / 1e6:.1f} MB", "< 400 MB", extra < TARGET))
            # A tenth of a byte a token is noise of the allocator; one number a token would be four.
            still = growth < max(0.1 * arguments.tokens, 8e6)
            print(verdict(f"{what}, growth over a quarter of the tokens", f"{growth / 1e6:.1f} MB", "none", still))


if __name__ == "__main__":
    main()

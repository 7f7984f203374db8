"""What a call costs beyond its arithmetic, and what `import hla` costs.

Checks and dispatch are timed alone, by handing the checked call to a backend that does nothing; the target is 50 µs.
The import is timed in processes of its own, next to processes that import nothing, in turns; the target is 0.1 s.

    python benchmarks/overhead.py [--calls 2000] [--processes 11]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np
from common import machine, verdict

import hla
from hla.backends import Backend, BackendSpec
from hla.testing import make_decay, make_inputs, make_log_decay

SIZES = {"T": 16, "d": 8, "dv": 8, "batch": (2, 3)}


def checks_and_dispatch(calls: int) -> None:
    q, k, v = make_inputs(np, **SIZES)
    output = np.zeros_like(v)

    def nothing(problem: Any) -> Any:
        return output, {}

    spec = BackendSpec(name="nothing", families=("numpy",), forms=("recurrent", "scan", "chunkwise", "parallel"))
    hla.register_backend(Backend(spec=spec, load=lambda operator: nothing))
    cases = {
        "no options": {},
        "decay 0.9": {"decay": 0.9},
        "decay per head": {"decay": make_decay(np, batch=(3,))},
        "log_decay": {"log_decay": make_log_decay(np, T=16, batch=(2, 3))},
        "normalize, scale, chunk_size": {"normalize": True, "scale": 0.35, "chunk_size": 8},
    }
    try:
        for name, options in cases.items():
            hla.hla2(q, k, v, backend="nothing", **options)
            times = []
            for _ in range(calls):
                start = time.perf_counter()
                hla.hla2(q, k, v, backend="nothing", **options)
                times.append(time.perf_counter() - start)
            micro = statistics.median(times) * 1e6
            print(verdict(f"checks and dispatch, {name}", f"{micro:.1f} µs a call", "< 50 µs", micro < 50))
    finally:
        hla.backends.unregister_backend("nothing")


def imports(processes: int) -> None:
    def run(code: str) -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        return time.perf_counter() - start

    run("import hla")
    pairs = [(run("pass"), run("import hla")) for _ in range(processes)]
    beyond = statistics.median(own - bare for bare, own in pairs)
    print(verdict("import hla, beyond the interpreter", f"{beyond * 1e3:.0f} ms", "< 100 ms", beyond < 0.1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--processes", type=int, default=11)
    arguments = parser.parse_args()
    print(machine())
    checks_and_dispatch(arguments.calls)
    imports(arguments.processes)


if __name__ == "__main__":
    main()

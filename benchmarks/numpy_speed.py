"""HLA₂ on NumPy, (1, 8, 4096, 64) in float32: chunkwise against plain loops over tokens, in turns within one run.

Compared are `hla.hla2(form="chunkwise")`, a loop over the corrected state (S, F), o = qᵀF, and a loop over the state of
the paper's Algorithm 1, (S, C, m, G, h), o = q(SC − G). Targets: 6 times the first loop, 9 times the second.

On a busy machine set OPENBLAS_NUM_THREADS=1: threads that wait for each other measure the neighbours.

    python benchmarks/numpy_speed.py [--T 4096] [--rounds 5]
"""

from __future__ import annotations

import argparse

import numpy as np
from algorithm_1 import algorithm_1
from common import in_turns, machine, verdict

import hla
from hla.cli.recurrence import token_loop
from hla.testing import Placement, error_budget, make_inputs, per_token_error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--T", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    q, k, v = make_inputs(np, T=arguments.T, d=64, dv=64, batch=(1, 8))
    loop = token_loop(Placement("numpy"), "hla2")
    contenders = {
        "chunkwise": lambda: hla.hla2(q, k, v, form="chunkwise", backend="numpy"),
        "loop over (S, F)": lambda: loop(q[0], k[0], v[0])[None],
        "loop over (S, C, m, G, h)": lambda: algorithm_1(np, q[0], k[0], v[0])[None],
    }
    judge = loop(*(x[0].astype(np.float64) for x in (q, k, v)))[None]
    budget = error_budget("hla2", "float32", arguments.T, 64)
    print(machine())
    for name, run in contenders.items():
        # Algorithm 1 subtracts two sums that are larger than what remains, each with its own rounding.
        allowed = error_budget("hla2", "float32", arguments.T, 64, definition="as_printed") if "C" in name else budget
        error = per_token_error(run(), judge)
        assert error <= allowed, f"{name}: error {error:.1e}, allowed {allowed:.1e}"
        print(f"{name}: error per token {error:.1e} of {allowed:.1e} allowed, against a float64 loop")
    seconds = in_turns(contenders, arguments.rounds)
    for name, found in seconds.items():
        print(f"{name}: {found * 1e3:.1f} ms, {arguments.T / found:,.0f} tokens/s")
    for name, target in (("loop over (S, F)", 6), ("loop over (S, C, m, G, h)", 9)):
        ratio = seconds[name] / seconds["chunkwise"]
        print(verdict(f"{name} / chunkwise", f"{ratio:.1f}", f">= {target}", ratio >= target))


if __name__ == "__main__":
    main()

"""Which chunk size is fastest, and how far the default is from it: HLA₂ in float32 on NumPy, torch and JAX.

For each d and T all sizes and the default (`chunk_size=None`) take turns within one run; 8 heads, fewer where T is
long. The last column is the default's time over the best time; wanted is 1.15 at most.

On a busy machine set OMP_NUM_THREADS=1: threads that wait for each other measure the neighbours.

    python benchmarks/chunk_size.py [--arrays numpy,torch,jax] [--backend NAME] [--operator hla2] [--d 32,64,128]
        [--lengths 64,512,4096,65536] [--sizes 16,32,64,128,256] [--passes forward,backward] [--rounds 5] [--json]
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from typing import Any

from common import in_turns, machine, place_of, verdict

import hla
from hla.cli.passes import backward, forward
from hla.testing import error_budget, make_inputs, per_token_error

WANTED = 1.15


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arrays", default="numpy,torch,jax")
    parser.add_argument("--backend", help="default: the automatic choice for the arrays")
    parser.add_argument("--operator", default="hla2")
    parser.add_argument("--d", default="32,64,128")
    parser.add_argument("--lengths", default="64,512,4096,65536")
    parser.add_argument("--sizes", default="16,32,64,128,256")
    parser.add_argument("--passes", default="forward")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    sizes = tuple(map(int, arguments.sizes.split(",")))
    out = sys.stderr if arguments.json else sys.stdout
    print(machine(), file=out)
    print(f"{arguments.operator}, milliseconds a call", file=out)
    heading = "arrays  pass          d       T  heads " + "".join(f"  C = {size:<5d}" for size in sizes)
    print(heading + "    default   default / best", file=out)
    rows = []
    for library in arguments.arrays.split(","):
        place = place_of(library)
        for what in arguments.passes.split(","):
            for d in map(int, arguments.d.split(",")):
                for length in map(int, arguments.lengths.split(",")):
                    row = measure(arguments, place, what, d, length, sizes)
                    rows.append(row)
                    cells = "".join(f"{row['seconds'][str(size)] * 1e3:11.2f}" for size in (*sizes, None))
                    start = f"{library:7s} {what:9s} {d:5d} {length:7d} {row['heads']:6d} "
                    print(f"{start}{cells}   {row['ratio']:8.2f}", file=out, flush=True)
    ratios = [row["ratio"] for row in rows]
    mean, worst = math.exp(sum(map(math.log, ratios)) / len(ratios)), max(ratios)
    print(f"default / best: {mean:.2f} on geometric average", file=out)
    print(verdict("default / best, worst", f"{worst:.2f}", f"<= {WANTED}", worst <= WANTED), file=out)
    if arguments.json:
        print(json.dumps({"machine": machine(), "rows": rows, "worst": worst, "wanted": WANTED}))


def measure(
    arguments: argparse.Namespace, place: Any, what: str, d: int, length: int, sizes: tuple[int, ...]
) -> dict[str, Any]:
    """One cell: every size gives the default's result, then all take turns."""
    heads = min(8, max(1, 65536 // length))
    inputs = make_inputs(place.xp, T=length, d=d, dv=d, batch=(heads,), device=place.device)
    operands: tuple[Any, ...] = tuple(inputs)
    if what == "backward":
        operands += (make_inputs(place.xp, T=length, d=d, dv=d, batch=(heads,), device=place.device, seed=1).v,)

    def function(size: int | None) -> Any:
        chosen = {"form": "chunkwise", "chunk_size": size, "backend": arguments.backend}

        def attend(q: Any, k: Any, v: Any) -> Any:
            return getattr(hla, arguments.operator)(q, k, v, **chosen)

        def pull(q: Any, k: Any, v: Any, do: Any) -> Any:
            o, pulled = hla.vjp(arguments.operator, q, k, v, **chosen)
            found = pulled(do)
            return o, (found.q, found.k, found.v)

        return forward(place, attend) if what == "forward" else backward(place, attend, pull)

    functions = {size: function(size) for size in (*sizes, None)}
    results = {size: outputs(what, run(*operands)) for size, run in functions.items()}
    budget = 2 * error_budget(arguments.operator, "float32", length, d, gradient=what == "backward")
    for size in sizes:
        error = max(per_token_error(x, y) for x, y in zip(results[size], results[None], strict=True))
        assert error <= budget, f"C = {size}: differs by {error:.1e} from the default, allowed {budget:.1e}"
    turns = {size: lambda run=run: place.wait(run(*operands)) for size, run in functions.items()}
    seconds = in_turns(turns, arguments.rounds)
    return {
        "arrays": str(place),
        "pass": what,
        "d": d,
        "T": length,
        "heads": heads,
        "seconds": {str(size): found for size, found in seconds.items()},
        "ratio": seconds[None] / min(seconds[size] for size in sizes),
    }


def outputs(what: str, result: Any) -> tuple[Any, ...]:
    return (result,) if what == "forward" else tuple(result[1])


if __name__ == "__main__":
    main()

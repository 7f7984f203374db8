"""Every speed target beside its measured value: (1, 8, T, 64) in float32, contenders in turns within one run.

Ratios are of medians, and above 1 the first one is faster. Every result is checked against the float64 definition
before it is timed (`hla.cli.judging`); a wrong one ends the run. Names of rows: --list.

    python benchmarks/speed_table.py [NAME ...] [--rounds 7] [--json] [--list] [--quick]

--quick divides all T by 16, to see that everything runs; its numbers have no meaning beside the targets.
On a busy machine set OMP_NUM_THREADS=1: threads that wait for each other measure the neighbours.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from algorithm_1 import algorithm_1
from common import LEAST, place_of

import hla
from hla.cli import baselines, judging, passes, recurrence, softmax
from hla.cli.ceiling import batched_matmul
from hla.cli.machine import machine
from hla.cli.timing import Timing, in_turns
from hla.testing import error_budget, expected, make_inputs, make_log_decay, per_token_error, to_numpy

HEADS, D = 8, 64
LOOP_TOKENS = 512
"""The loop is timed on so many, and its time scaled: a token costs the same anywhere."""


@dataclass(frozen=True)
class Result:
    """A line of the table."""

    name: str
    what: str
    measured: float | None
    target: float | None
    aim: float | None = None
    less: bool = False
    """whether less is better"""
    unit: str = ""
    note: str = ""

    @property
    def reached(self) -> bool | None:
        """None where there is no target."""
        if self.target is None:
            return None
        if self.measured is None:
            return False
        return self.measured <= self.target if self.less else self.measured >= self.target


class Bench:
    """Sizes and rounds of a run."""

    def __init__(self, rounds: int, quick: bool) -> None:
        self.rounds, self.quick = rounds, quick
        self._judges: dict[Any, judging.Judge] = {}

    def length(self, tokens: int) -> int:
        return max(tokens // 16, 16) if self.quick else tokens

    def inputs(self, library: str, length: int, d: int = D) -> tuple[Any, tuple[Any, ...], Any]:
        """(place, (q, k, v), do), each (H, T, d)."""
        place = place_of(library)
        sizes = {"T": length, "d": d, "dv": d, "batch": (HEADS,), "device": place.device}
        return place, tuple(make_inputs(place.xp, **sizes)), make_inputs(place.xp, **sizes, seed=1).v

    def judge(self, operator: str, inputs: tuple[Any, ...], do: Any) -> judging.Judge:
        key = operator, inputs[0].shape
        if key not in self._judges:
            self._judges[key] = judging.judge_of(operator, None, judging.Inputs(*inputs), do, "float32")
        return self._judges[key]

    def turns(self, contenders: dict[str, Callable[[], Any]]) -> dict[str, Timing]:
        return in_turns(contenders, self.rounds, least=LEAST)


def require(verdict: judging.Verdict, what: str) -> None:
    if not verdict.ok:
        raise SystemExit(f"{what}: WRONG, error {verdict.error:.1e}, allowed {verdict.budget:.1e}; not timed")


def operator(name: str, **options: Any) -> Any:
    """A function of (H, T, ·) that calls the operator on (1, H, T, ·)."""

    def attend(q: Any, k: Any, v: Any) -> Any:
        return getattr(hla, name)(q[None], k[None], v[None], **options)[0]

    return attend


def checked(bench: Bench, library: str, names: tuple[str, ...], length: int, what: str) -> dict[str, Any]:
    """Functions without arguments, checked, of operators and "softmax": a "forward" or a "backward" pass."""
    place, inputs, do = bench.inputs(library, length)
    found = {}
    for name in names:
        attend = softmax.softmax_attention(place) if name == "softmax" else operator(name)
        judge = bench.judge(name, inputs, do)
        if what == "forward":
            run, operands = passes.forward(place, attend), inputs
            require(judge.forward(run(*operands)), f"{name} on {place}, T = {length}")
        else:
            run, operands = passes.backward(place, attend), (*inputs, do)
            require(judge.backward(*run(*operands)), f"gradient of {name} on {place}, T = {length}")
        found[name] = lambda run=run, operands=operands: place.wait(run(*operands))
    return found


def ratio(times: dict[str, Timing], slow: str, fast: str) -> float:
    """How many times faster the second is than the first."""
    return times[slow].median / times[fast].median


def against_softmax(name: str, library: str, tokens: int, what: str, target: float, aim: float | None) -> Any:
    peer = {"torch": "SDPA", "jax": "jax.nn.dot_product_attention"}[library]

    def row(bench: Bench) -> Iterator[Result]:
        length = bench.length(tokens)
        times = bench.turns(checked(bench, library, ("hla2", "softmax"), length, what))
        shown = "forward" if what == "forward" else "forward and backward"
        note = f"{times['hla2'].median * 1e3:.2f} ms, {times['softmax'].median * 1e3:.2f} ms"
        yield Result(name, f"{library} hla2 over {peer}, {shown}, T = {length}", ratio(times, "softmax", "hla2"),
                     target, aim, note=note)  # fmt: skip

    return row


def matmul_share(bench: Bench) -> Iterator[Result]:
    length = bench.length(4096)
    work = batched_matmul(place_of("torch"))
    times = bench.turns({**checked(bench, "torch", ("hla2",), length, "forward"), "matmul": work.run})
    rate = work.amount / times["matmul"].median
    own = hla.cost("hla2", T=length, d=D, dv=D, heads=HEADS, chunk_size=64).flops / times["hla2"].median
    note = f"{own / 1e9:.0f} of {rate / 1e9:.0f} Gflop/s"
    yield Result("matmul-share", f"torch hla2 of the batched matmul rate, T = {length}, counting chunks of 64",
                 own / rate, 0.55, 0.8, note=note)  # fmt: skip


def ahla(bench: Bench) -> Iterator[Result]:
    length = bench.length(4096)
    times = bench.turns(checked(bench, "torch", ("hla2", "ahla"), length, "forward"))
    yield Result("ahla", f"torch ahla over hla2, forward, T = {length}", ratio(times, "hla2", "ahla"), 1.0, 1.2)


def loop(bench: Bench) -> Iterator[Result]:
    length = bench.length(4096)
    place, inputs, _ = bench.inputs("torch", length)
    some = min(LOOP_TOKENS, length)
    few = tuple(x[:, :some] for x in inputs)
    error = per_token_error(algorithm_1(place.xp, *few), expected("hla2", *few))
    budget = error_budget("hla2", "float32", some, D, definition="as_printed")  # it subtracts two large sums
    require(judging.Verdict(error, budget), "Algorithm 1")
    run = checked(bench, "torch", ("hla2",), length, "forward")
    times = bench.turns({**run, "loop": lambda: algorithm_1(place.xp, *few)})
    scale = length / some
    yield Result("loop", f"torch hla2 over a loop of Algorithm 1, T = {length}", ratio(times, "loop", "hla2") * scale,
                 100, note=f"the loop timed on {some} tokens, times {scale:g}")  # fmt: skip


def jax_against_torch(bench: Bench) -> Iterator[Result]:
    length = bench.length(4096)
    runs = {name: checked(bench, name, ("hla2",), length, "forward")["hla2"] for name in ("torch", "jax")}
    times = bench.turns(runs)
    yield Result(
        "jax-torch", f"jax hla2 over torch hla2, forward, T = {length}", ratio(times, "torch", "jax"), 0.4, 0.6
    )


def jax_memory(bench: Bench) -> Iterator[Result]:
    import jax

    length = bench.length(16384)
    place, inputs, do = bench.inputs("jax", length)
    run: Any = passes.backward(place, operator("hla2"))
    start = time.perf_counter()
    lowered = run.lower(*inputs, do)
    compiled = lowered.compile()
    seconds = time.perf_counter() - start
    require(bench.judge("hla2", inputs, do).backward(*compiled(*inputs, do)), "gradient of hla2 on jax")
    name, what = "jax-memory", f"jax hla2, value_and_grad, T = {length}"
    temporary = compiled.memory_analysis().temp_size_in_bytes / 2**20
    yield Result(name, f"{what}: temporary memory", temporary, 280, less=True, unit="MiB")
    yield Result(name, f"{what}: trace and compile", seconds, 2, less=True, unit="s")
    _, short, short_do = bench.inputs("jax", length // 4)
    counts = [equations(jax.make_jaxpr(run)(*x).jaxpr) for x in ((*short, short_do), (*inputs, do))]
    yield Result(name, f"{what}: equations of the jaxpr over those of T = {length // 4}", counts[1] / counts[0], 1.0,
                 less=True, note=f"{counts[0]}, {counts[1]}")  # fmt: skip


def equations(jaxpr: Any) -> int:
    """Of a jaxpr and all that are in it."""
    count = 0
    for equation in jaxpr.eqns:
        count += 1
        for value in equation.params.values():
            for x in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(x, "jaxpr", x)
                count += equations(inner) if hasattr(inner, "eqns") else 0
    return count


def log_decay(bench: Bench) -> Iterator[Result]:
    for library in ("torch", "jax"):
        for d, tokens in ((64, 4096), (60, 4001)):
            length = bench.length(tokens)
            place, inputs, do = bench.inputs(library, length, d)
            gates = make_log_decay(place.xp, T=length, batch=(HEADS,), mean=0.01, device=place.device)
            plain = passes.forward(place, operator("hla2"))
            require(bench.judge("hla2", inputs, do).forward(plain(*inputs)), f"hla2 on {place}, T = {length}")

            def decayed(q: Any, k: Any, v: Any, gates: Any) -> Any:
                return operator("hla2", log_decay=gates[None])(q, k, v)

            run: Any = place.compiled(decayed)
            require(_with_decay(run(*inputs, gates), inputs, gates, d), f"hla2 with log_decay on {place}")
            times = bench.turns(
                {
                    "plain": lambda run=plain, x=inputs, place=place: place.wait(run(*x)),
                    "decayed": lambda run=run, x=(*inputs, gates), place=place: place.wait(run(*x)),
                }
            )
            yield Result("log-decay", f"{library} hla2 with log_decay over without, d = {d}, T = {length}",
                         ratio(times, "plain", "decayed"), 0.6)  # fmt: skip


def _with_decay(o: Any, inputs: tuple[Any, ...], gates: Any, d: int) -> judging.Verdict:
    """The first tokens by the definition, all of them by the reference backend in float64, held against it too."""
    first = judging.FIRST_TOKENS
    host = tuple(map(to_numpy, (*inputs, gates)))
    whole = hla.hla2(*host[:3], log_decay=host[3], backend="numpy")
    want = expected("hla2", *(x[:, :first] for x in host[:3]), log_decay=host[3][:, :first])
    own = per_token_error(whole[:, :first], want)
    assert own <= error_budget("hla2", "float64", first, d), f"the judge is off by {own:.1e}"
    error = max(per_token_error(o[:, :first], want), per_token_error(o, whole))
    return judging.Verdict(error, error_budget("hla2", "float32", o.shape[1], d, values=whole.size))


def decode(bench: Bench) -> Iterator[Result]:
    yield from _decode_torch(bench)
    yield from _decode_jax(bench)


def own_step(state: Any, q: Any, k: Any, v: Any) -> Any:
    o, state = hla.step(state, q, k, v)
    return state, o


def own_step_inplace(state: Any, q: Any, k: Any, v: Any) -> Any:
    o, state = hla.step(state, q, k, v, inplace=True)
    return state, o


def hand_step_fused(states: Any, q: Any, k: Any, v: Any) -> Any:
    """The same with torch's products that add."""
    import torch

    s, f = states
    s = torch.baddbmm(s, k[:, :, None], k[:, None, :])
    u = torch.bmm(q[:, None, :], s)
    f = torch.baddbmm(f, u.mT, v[:, None, :])
    return (s, f), torch.bmm(q[:, None, :], f)[:, 0, :]


def hand_step_inplace(states: Any, q: Any, k: Any, v: Any) -> Any:
    s, f = states
    s += k[:, :, None] * k[:, None, :]
    u = (q[:, None, :] @ s)[:, 0, :]
    f += u[:, :, None] * v[:, None, :]
    return states, (q[:, None, :] @ f)[:, 0, :]


def _decode_torch(bench: Bench) -> Iterator[Result]:
    import torch

    plain = recurrence.STEPS["hla2"]
    yield _one_token(bench, "torch", "eager", own_step, plain, 0.75)
    yield _one_token(bench, "torch", "eager, by hand with baddbmm", own_step, hand_step_fused, None)
    try:
        compiled = [torch.compile(step, fullgraph=True) for step in (own_step, plain)]
        yield _one_token(bench, "torch", "torch.compile, fullgraph", *compiled, 0.9)
    except Exception as error:  # whatever the compiler raises: the row says so, and the others are shown
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:100]}"
        yield Result("decode", "torch hla.step over by hand, torch.compile, fullgraph", None, 0.9, note=reason)
    yield _one_token(bench, "torch", "in place", own_step_inplace, hand_step_inplace, 0.9, copies=True)


def _decode_jax(bench: Bench) -> Iterator[Result]:
    import jax

    yield _one_token(bench, "jax", "jit", jax.jit(own_step), jax.jit(recurrence.STEPS["hla2"]), 0.9)


def _one_token(
    bench: Bench, library: str, how: str, own: Any, hand: Any, target: float | None, copies: bool = False
) -> Result:
    """Both after 126 tokens of 8 heads, d = 64; two steps are checked against the definition."""
    place, inputs, do = bench.inputs(library, 128)
    contenders = (
        baselines.operator_on(place, None, "hla2", None, "auto"),
        *baselines.peers_of(place, "hla2", None, ("loop",)),
    )
    judge = bench.judge("hla2", inputs, do)
    turns = {}
    for name, contender, step in zip(("own", "hand"), contenders, (own, hand), strict=True):
        state = contender.prepare(*inputs, 2)
        if copies:  # a step that writes into its state must not write into what others share
            state = (
                type(state)(*(x.clone() for x in state)) if hasattr(state, "_fields") else [x.clone() for x in state]
            )
        rows = []
        after = state
        for t in (126, 127):
            after, o = step(after, *(x[:, t] for x in inputs))
            rows.append(o)
        require(judge.decode(place.xp.stack(rows, axis=1)), f"decode on {place}, {how}, {name}")
        token = tuple(x[:, 127] for x in inputs)
        turns[name] = lambda step=step, state=state, token=token: place.wait(step(state, *token))
    times = bench.turns(turns)
    note = f"{times['own'].median * 1e6:.0f} µs, {times['hand'].median * 1e6:.0f} µs"
    what = f"{library} hla.step over by hand, {how}"
    return Result("decode", what, ratio(times, "hand", "own"), target, note=note)


ROWS: dict[str, Callable[[Bench], Iterator[Result]]] = {
    "softmax-512": against_softmax("softmax-512", "torch", 512, "forward", 1.0, 1.3),
    "softmax-4096": against_softmax("softmax-4096", "torch", 4096, "forward", 4.5, 5.5),
    "softmax-16384": against_softmax("softmax-16384", "torch", 16384, "forward", 15, 18),
    "softmax-backward": against_softmax("softmax-backward", "torch", 4096, "backward", 3.5, 4.5),
    "matmul-share": matmul_share,
    "ahla": ahla,
    "loop": loop,
    "jax-torch": jax_against_torch,
    "jax-softmax": against_softmax("jax-softmax", "jax", 4096, "forward", 10, None),
    "jax-softmax-backward": against_softmax("jax-softmax-backward", "jax", 4096, "backward", 15, None),
    "jax-memory": jax_memory,
    "log-decay": log_decay,
    "decode": decode,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="*", metavar="NAME", help="only these rows; default: all")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true", help="one object on stdout, the table on stderr")
    parser.add_argument("--list", action="store_true", help="names of the rows")
    parser.add_argument("--quick", action="store_true", help="T divided by 16: only to see that it runs")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(ROWS))
        return
    unknown = [name for name in arguments.rows if name not in ROWS]
    if unknown:
        parser.error(f"rows: expected some of {', '.join(ROWS)}, got {unknown[0]!r}")
    out = sys.stderr if arguments.json else sys.stdout
    facts = machine()
    print(", ".join(f"{name} {value}" for name, value in facts.items()), file=out)
    if arguments.quick:
        print("--quick: T divided by 16, the targets do not apply", file=out)
    print(f"{'':86s}{'measured':>12s}{'target':>9s}{'aim':>6s}", file=out)
    bench = Bench(arguments.rounds, arguments.quick)
    results = []
    for name in arguments.rows or ROWS:
        for result in ROWS[name](bench):
            results.append(result)
            print(shown(result), file=out, flush=True)
    if arguments.json:
        rows = [{**asdict(result), "reached": result.reached} for result in results]
        print(json.dumps({"machine": facts, "quick": arguments.quick, "rows": rows}))


def shown(result: Result) -> str:
    """One line."""
    measured = "failed" if result.measured is None else f"{result.measured:.2f} {result.unit}".strip()
    sign = "<=" if result.less else ">="
    target = "" if result.target is None else f"{sign} {result.target:g}"
    aim = "" if result.aim is None else f"{result.aim:g}"
    reached = {True: "reached", False: "NOT reached", None: ""}[result.reached]
    note = f"  ({result.note})" if result.note else ""
    return f"{result.what:86s}{measured:>12s}{target:>9s}{aim:>6s}  {reached}{note}"


if __name__ == "__main__":
    main()

"""The CUDA kernels of the CuPy backend on the CPU: results as by the definitions, and planted faults are found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import budget
import cupy_kernels as ck
import libraries
from cuda import cpu
from hla.backends.cupy import parameters

libraries.only("numpy")

if not cpu.available():
    pytest.skip("with g++", allow_module_level=True)

FLOAT, DOUBLE = "float", "double"


# ---- the clock


def check_clock(kind: str, time: ck.Time, seed: int, dtype: str = "float32", folder: Path = ck.KERNELS) -> None:
    """One launch of `clock`."""
    arguments, gate = ck.clock_inputs(time, kind, seed, dtype)
    ck.launch("clock", kind, (time.C, 0), arguments, folder)
    high, low, era = (arguments[x] for x in ("high", "low", "era"))
    given = np.where(gate.kept, ck.value(arguments["log_decay"]), 0.0)
    given = np.where(given < ck.LOWEST[kind], 0.0, given)
    for b in ck.entries():
        for start, stop, _ in time.chunks:
            number, total = 0, 0.0
            for t in range(start, stop):
                begins = bool(gate.resets[b][t])
                number, total = number + begins, given[b][t] + (0.0 if begins else total)
                assert era[b][t] == number * 4 + (not gate.kept[b][t]) + 2 * bool(gate.starts[b][t])
                assert abs(low[b][t]) <= (t - start + 1) * 2.0**-10
                assert high[b][t] * 512 == np.floor(high[b][t] * 512), "a sum without roundings"
                off = abs(float(high[b][t]) + float(low[b][t]) - total)
                assert off <= 64 * 64 * 2.0**-10 * budget.UNIT[ck.KINDS[kind].name], "roundings of 64 small numbers"


@pytest.mark.parametrize("kind", [FLOAT, DOUBLE])
@pytest.mark.parametrize(
    "time", [ck.Time(37, 16), ck.Time(65, 32), ck.Time(40, 16, (0, 5, 5, 38, 40)), ck.Time(1, 16)], ids=str
)
def test_clock(kind: str, time: ck.Time) -> None:
    check_clock(kind, time, 3, "float16" if kind == FLOAT and time.T == 37 else "float32")


def test_clock_of_long_chunks() -> None:
    check_clock(FLOAT, ck.Time(133, 64), 4, "bfloat16")


def test_clock_without_anything() -> None:
    time = ck.Time(19, 16)
    arguments, _ = ck.clock_inputs(time, FLOAT, 0)
    arguments |= {"log_decay": None, "mask": None, "starts": None}
    ck.launch("clock", FLOAT, (16, 0), arguments)
    assert not arguments["high"].any()
    assert not arguments["era"].any()


# ---- the state, and the chain


def factors(gate: ck.Gate, b: tuple[int, ...], time: ck.Time, n: int, strict: bool) -> ck.Factors:
    start, stop, _ = time.chunks[n]
    return ck.Factors(gate, b, start, stop, strict)


def chain_of(time: ck.Time, gate: ck.Gate, options: dict[str, Any], *arrays: Any) -> dict[str, np.ndarray]:
    """All that `chain` or, without x, `state` leaves."""
    x, y, z, w, initial, initial2 = arrays
    D, DW, DZ = options["D"], options["DW"], options["DZ"]
    count, parts, reverse, strict = len(time.chunks), len(time.parts) - 1, options["REVERSE"], options["STRICT"]
    scalar = {name: options[name] for name in options if name.startswith(("by_", "into_"))}
    if options["absolute"]:
        scalar = {name: abs(v) for name, v in scalar.items()}
    found = {
        "borders": np.zeros((*ck.BATCH, count, D, DZ)),
        "borders2": np.zeros((*ck.BATCH, count, DW, DZ)),
        "r": np.full((*ck.BATCH, time.T, DZ), np.nan),
        "o": np.full((*ck.BATCH, time.T, DZ), np.nan),
        "final": np.zeros((*ck.BATCH, parts, D, DZ)),
        "final2": np.zeros((*ck.BATCH, parts, DW, DZ)),
        "through": np.zeros((*ck.BATCH, parts)),
    }
    p, p2 = options["POWER"], options["POWER2"]
    for b in ck.entries():
        kept = gate.kept[b]
        for part in range(parts):
            state = np.zeros((D, DZ)) if initial is None else initial[b][part]
            state2 = np.zeros((DW, DZ)) if initial2 is None else initial2[b][part]
            through = 1.0
            chunks = range(time.parts[part], time.parts[part + 1])
            for n in reversed(chunks) if reverse else chunks:
                f = factors(gate, b, time, n, strict)
                found["borders"][b][n], found["borders2"][b][n] = state, state2
                if x is not None:
                    rows = slice(f.start, f.stop)
                    r = ck.read_chunk(
                        f, x[b], y[b], z[b], state, kept, p, scalar["by_state"], scalar["by_pair"], reverse
                    )
                    found["r"][b][rows] = r
                    whole = np.zeros((time.T, DZ))
                    whole[rows] = r
                    if options["output"]:
                        found["o"][b][rows] = ck.read_chunk(
                            f, x[b], y[b], whole, state2, kept, p2, scalar["by_state"], scalar["by_pair2"], reverse
                        )
                    state2 = ck.move_state(f, state2, w[b], whole, kept, p2, scalar["into_state2"], reverse)
                own_y, own_z = (None, None) if y is None else (y[b], z[b])
                state = ck.move_state(f, state, own_y, own_z, kept, p, scalar["into_state"], reverse)
                through = 0.0 if f.through is None else through * f.through**p
            found["final"][b][part], found["final2"][b][part], found["through"][b][part] = state, state2, through
    return found


SCALARS = {"by_state": 0.7, "by_pair": -1.3, "into_state": 0.6, "into_state2": 0.9, "by_pair2": 1.1}


def check_chain(
    kind: str,
    variant: tuple[int, int],
    time: ck.Time,
    gate: ck.Gate,
    *,
    D: int,
    DW: int,
    DZ: int,
    dtype: str = "float32",
    layout: str = "plain",
    power: int = 1,
    power2: int = 2,
    strict: bool = False,
    reverse: bool = False,
    alone: bool = False,
    output: bool = False,
    only_decay: bool = False,
    initial: bool = True,
    spoil: Any = None,
    folder: Path = ck.KERNELS,
) -> None:
    """One launch of `chain`, or, alone, of `state`."""
    make = ck.Maker(D + 3 * DZ, dtype, layout)
    parts, count, T, sums = len(time.parts) - 1, len(time.chunks), time.T, ck.KINDS[kind].name
    states = "turned" if layout == "turned" else "plain"
    x, w = (None, None) if alone else (make(T, D), make(T, DW))
    y, z = (None, None) if only_decay else (make(T, D), make(T, DZ))
    first = make(parts, D, DZ, dtype=sums, layout=states) if initial else None
    second = make(parts, DW, DZ, dtype=sums, layout=states) if initial and not alone else None
    if output:
        w = y
    outputs = {
        "borders": make.empty(count, D, DZ, dtype=sums, layout=states),
        "borders2": None if alone else make.empty(count, DW, DZ, dtype=sums),
        "r": None if alone else make.empty(T, DZ, dtype=sums),
        "o": make.empty(T, DZ, dtype=dtype) if output else None,
        "final": make.empty(parts, D, DZ, dtype=sums),
        "final2": None if alone else make.empty(parts, DW, DZ, dtype=sums, layout=states),
        "through": make.empty(parts, dtype=sums),
    }
    if spoil:
        spoil(gate, *(array for array in (x, y, z, w) if array is not None))
    options = {"D": D, "DW": DW, "DZ": DZ, "POWER": power, "POWER2": power2, "STRICT": strict, "REVERSE": reverse}
    ck.launch(
        "state" if alone else "chain",
        kind,
        variant,
        {
            **ck.views(x=x, y=y, z=z, w=w, initial=first, initial2=second, **outputs),
            **time.arguments(),
            **gate.arguments,
            **SCALARS,
            **options,
        },
        folder,
    )
    if spoil:  # what masked tokens read is nobody's
        for name in ("r", "o"):
            if outputs[name] is not None:
                outputs[name][~gate.kept] = 0
    options |= {**SCALARS, "output": output}
    given = ck.numbers(x, y, z, w, first, second)
    want = chain_of(time, gate, {**options, "absolute": False}, *given)
    scale = chain_of(time, gate, {**options, "absolute": True}, *(None if g is None else np.abs(g) for g in given))
    passes = {"o": 2, "final2": 2, "borders2": 2}
    for name, out in outputs.items():
        if out is not None:
            ck.compare(out, want[name], scale[name], kind, T, max(D, DW), passes.get(name, 1), name)


@pytest.mark.parametrize("decay", [0, 1, 2])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("kind", [FLOAT, DOUBLE])
def test_state(kind: str, decay: int, reverse: bool) -> None:
    time = ck.Time(37, 16, None, 2) if decay < 2 else ck.Time(37, 16, (0, 5, 5, 36, 37))
    gate = ck.gates(decay, time, kind)
    check_chain(kind, (16, 16), time, gate, D=7, DW=1, DZ=17, power=2, reverse=reverse, alone=True, strict=decay == 2)


@pytest.mark.parametrize("variant", parameters.VARIANTS["state"], ids=str)
def test_every_variant_of_state(variant: tuple[int, int]) -> None:
    time = ck.Time(2 * variant[0] + 1, variant[0])
    kind = FLOAT if variant[0] == 64 else DOUBLE
    check_chain(kind, variant, time, ck.gates(2, time, kind), D=65, DW=1, DZ=68, alone=True)


def test_a_state_that_only_decays() -> None:
    time = ck.Time(37, 16, None, 2)
    check_chain(FLOAT, (16, 16), time, ck.gates(1, time, FLOAT), D=5, DW=1, DZ=7, alone=True, only_decay=True)


@pytest.mark.parametrize("decay", [0, 1, 2])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("kind", [FLOAT, DOUBLE])
def test_chain(kind: str, decay: int, reverse: bool, strict: bool) -> None:
    time = ck.Time(37, 16, None, 2) if decay < 2 else ck.Time(37, 16, (0, 5, 5, 36, 37))
    gate = ck.gates(decay, time, kind, seed=reverse)
    check_chain(kind, (16, 16), time, gate, D=7, DW=5, DZ=17, reverse=reverse, strict=strict, initial=not strict)


@pytest.mark.parametrize("decay", [0, 1, 2])
@pytest.mark.parametrize("powers", [(1, 1), (1, 2)])
def test_chain_with_an_output(decay: int, powers: tuple[int, int]) -> None:
    time = ck.Time(35, 16)
    gate = ck.gates(decay, time, FLOAT, seed=2)
    power, power2 = powers
    check_chain(FLOAT, (16, 16), time, gate, D=33, DW=33, DZ=9, output=True, power=power, power2=power2)


@pytest.mark.parametrize("variant", parameters.VARIANTS["chain"], ids=str)
def test_every_variant_of_chain(variant: tuple[int, int]) -> None:
    time = ck.Time(2 * variant[0] - 3, variant[0])
    kind = FLOAT if variant[0] == 64 else DOUBLE
    check_chain(kind, variant, time, ck.gates(2, time, kind), D=65, DW=65, DZ=36, output=True)


# ---- what precedes the parts


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(("kind", "layout", "sizes"), [(FLOAT, "plain", (5, 33)), (DOUBLE, "turned", (17, 65))])
def test_carry(kind: str, layout: str, sizes: tuple[int, int], reverse: bool) -> None:
    parts, sums = 4, ck.KINDS[kind].name
    make = ck.Maker(1, sums, layout)
    total, initial, through = make(parts, *sizes), make(1, *sizes), np.abs(make(parts, layout="plain"))
    through[0, ..., 2] = 0
    total[1, 0, 1, 1] = np.inf
    through[1, 0, 1, 2 if not reverse else 0] = 0  # nothing of that total passes
    outputs = {"before": make.empty(parts, *sizes), "final": make.empty(1, *sizes)}
    arguments = ck.views(total=total, through=through, initial=initial, **outputs)
    ck.launch(
        "carry", kind, (0, 0), {**arguments, "part_count": parts, "D": sizes[0], "DZ": sizes[1], "REVERSE": reverse}
    )
    state = initial[..., 0, :, :].copy()
    for part in reversed(range(parts)) if reverse else range(parts):
        np.testing.assert_allclose(outputs["before"][..., part, :, :], state, rtol=1e-6)
        factor = through[..., part, None, None]
        with np.errstate(invalid="ignore"):
            state = np.where(factor == 0, 0, state * factor) + total[..., part, :, :]
    np.testing.assert_allclose(outputs["final"][..., 0, :, :], state, rtol=1e-6)


# ---- reads


def read_of(time: ck.Time, gate: ck.Gate, options: dict[str, Any], *arrays: Any) -> np.ndarray:
    terms = [arrays[i : i + 4] for i in (0, 4)]
    result = np.zeros((*ck.BATCH, time.T, options["DZ"])) if arrays[8] is None else arrays[8].copy()
    sign = np.abs if options["absolute"] else np.asarray
    for b in ck.entries():
        for n, (start, stop, sequence) in enumerate(time.chunks):
            for (x, y, z, state), more in zip(terms, ("", "2"), strict=True):
                if x is None:
                    continue
                one = None if state is None else state[b][n if options["PER_CHUNK"] else sequence]
                result[b][start:stop] += ck.read_chunk(
                    factors(gate, b, time, n, options["STRICT"]), x[b], None if y is None else y[b],
                    None if z is None else z[b], one, gate.kept[b], options[f"POWER{more}"],
                    float(sign(options[f"by_state{more}"])), float(sign(options[f"by_pair{more}"])), options["REVERSE"],
                )  # fmt: skip
    return result


def check_read(
    kind: str,
    variant: tuple[int, int],
    time: ck.Time,
    gate: ck.Gate,
    *,
    D: int,
    D2: int | None = None,
    DZ: int,
    dtype: str = "float32",
    layout: str = "plain",
    strict: bool = False,
    reverse: bool = False,
    per_chunk: bool = True,
    add: bool = False,
    pairs: bool = True,
    states: bool = True,
    spoil: Any = None,
    folder: Path = ck.KERNELS,
) -> None:
    """One launch of `read`."""
    make, T, sums = ck.Maker(D + 3 * DZ, dtype, layout), time.T, ck.KINDS[kind].name
    count = len(time.chunks) if per_chunk else len(time.parts) - 1
    lie = "turned" if layout == "heads" else layout

    def term(width: int) -> tuple[Any, ...]:
        y, z = (make(T, width), make(T, DZ)) if pairs else (None, None)
        return make(T, width), y, z, make(count, width, DZ, dtype=sums, layout=lie) if states else None

    terms = (*term(D), *(term(D2) if D2 else (None,) * 4))
    r = make(T, DZ, dtype=sums, layout="plain") if add else make.empty(T, DZ, dtype=dtype)
    if spoil:
        spoil(gate, *(x for x in terms[:3] if x is not None))
    names = ("x", "y", "z", "state", "x2", "y2", "z2", "state2")
    options = {
        "by_state": 0.7,
        "by_pair": -1.3,
        "by_state2": -0.4,
        "by_pair2": 0.8,
        "D": D,
        "D2": D2 or D,
        "DZ": DZ,
        "POWER": 1,
        "POWER2": 2,
        "STRICT": strict,
        "REVERSE": reverse,
        "PER_CHUNK": per_chunk,
        "ADD": add,
    }
    held = ck.value(r) if add else None
    ck.launch(
        "read",
        kind,
        variant,
        {**ck.views(**dict(zip(names, terms, strict=True)), r=r), **time.arguments(), **gate.arguments, **options},
        folder,
    )
    if spoil:
        r[~gate.kept] = 0
    given = [*ck.numbers(*terms), held]
    want = read_of(time, gate, {**options, "absolute": False}, *given)
    scale = read_of(time, gate, {**options, "absolute": True}, *(None if g is None else np.abs(g) for g in given))
    ck.compare(r, want, scale, kind, T, max(D, D2 or 0), 1)


@pytest.mark.parametrize("decay", [0, 1, 2])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("kind", [FLOAT, DOUBLE])
def test_read(kind: str, decay: int, reverse: bool, strict: bool) -> None:
    time = ck.Time(37, 16) if decay < 2 else ck.Time(37, 16, (0, 5, 5, 36, 37))
    gate = ck.gates(decay, time, kind, seed=5)
    check_read(kind, (16, 16), time, gate, D=33, D2=7, DZ=17, reverse=reverse, strict=strict)


@pytest.mark.parametrize("offsets", [None, (0, 20, 20, 35)])
def test_read_of_whole_states(offsets: tuple[int, ...] | None) -> None:
    time = ck.Time(35, 16, offsets)
    check_read(FLOAT, (16, 16), time, ck.no_gate(35), D=5, DZ=33, per_chunk=False, pairs=False)


def test_read_adds() -> None:
    time = ck.Time(35, 16)
    check_read(FLOAT, (16, 16), time, ck.gates(2, time, FLOAT), D=5, D2=33, DZ=7, add=True)
    check_read(FLOAT, (16, 16), time, ck.gates(1, time, FLOAT), D=5, DZ=7, add=True, states=False)


@pytest.mark.parametrize("variant", parameters.VARIANTS["read"], ids=str)
def test_every_variant_of_read(variant: tuple[int, int]) -> None:
    time = ck.Time(2 * variant[0] - 3, variant[0])
    kind = FLOAT if variant[0] == 64 else DOUBLE
    check_read(kind, variant, time, ck.gates(2, time, kind), D=65, D2=32, DZ=68, layout="heads")


# ---- the gradient of the log-decays


def rate_of(time: ck.Time, gate: ck.Gate, options: dict[str, Any], *arrays: Any) -> np.ndarray:
    """By its definition: what passes token s, of each pair and state on either side of it."""
    x, y, z, d, state, after, held = arrays
    result = np.zeros((*ck.BATCH, time.T)) if held is None else held.copy()
    p, strict, kept = options["POWER"], options["STRICT"], gate.kept
    by = {name: abs(v) if options["absolute"] else v for name, v in options.items() if name.startswith("by_")}
    for b in ck.entries():
        for n, (start, stop, _) in enumerate(time.chunks):
            f = factors(gate, b, time, n, strict)
            before, behind = state[b][n], after[b][n]
            products = None if d is None else (x[b] @ y[b].T) * (d[b] @ z[b].T)
            span = 0.0 if f.through is None else f.through**p * by["by_span"] * np.sum(before * behind)
            for s in range(start, stop):
                if not kept[b][s]:
                    continue
                total = span
                for j in range(start, s):
                    factor = f.leave(j)
                    if factor is not None and kept[b][j]:
                        total += by["by_right"] * factor**p * (y[b][j] @ behind @ z[b][j])
                for t in range(s + strict, stop) if d is not None else ():
                    factor = f.reach(t)
                    if factor is not None and kept[b][t]:
                        total += by["by_left"] * factor**p * (x[b][t] @ before @ d[b][t])
                    for j in range(start, s):
                        pair = f.pair(t, j)
                        if pair is not None and kept[b][t] and kept[b][j]:
                            total += by["by_pair"] * pair**p * products[t, j]
                result[b][s] += p * total
    return result


def check_rate(
    kind: str, variant: tuple[int, int], time: ck.Time, gate: ck.Gate, *, D: int, DZ: int, dtype: str = "float32",
    layout: str = "plain", strict: bool = False, add: bool = False, reads: bool = True, folder: Path = ck.KERNELS,
) -> None:  # fmt: skip
    """One launch of `rate`."""
    make, T, sums, count = ck.Maker(D + 3 * DZ, dtype, layout), time.T, ck.KINDS[kind].name, len(time.chunks)
    lie = "turned" if layout == "heads" else layout
    arrays = {
        "x": make(T, D),
        "y": make(T, D),
        "z": make(T, DZ),
        "d": make(T, DZ) if reads else None,
        "state": make(count, D, DZ, dtype=sums, layout=lie),
        "after": make(count, D, DZ, dtype=sums),
    }
    result = make(T, dtype=sums, layout="plain") if add else make.empty(T, dtype=sums)
    held = ck.value(result) if add else None
    options = {
        "by_pair": -0.8,
        "by_left": 1.2,
        "by_right": 0.7,
        "by_span": 0.9,
        "D": D,
        "DZ": DZ,
        "POWER": 2,
        "STRICT": strict,
        "ADD": add,
    }
    ck.launch(
        "rate",
        kind,
        variant,
        {**ck.views(**arrays, result=result), **time.arguments(), **gate.arguments, **options},
        folder,
    )
    given = [*ck.numbers(*arrays.values()), held]
    want = rate_of(time, gate, {**options, "absolute": False}, *given)
    scale = rate_of(time, gate, {**options, "absolute": True}, *(None if g is None else np.abs(g) for g in given))
    ck.compare(result, want, scale, kind, T, D + DZ, 2)


@pytest.mark.parametrize("decay", [1, 2])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("kind", [FLOAT, DOUBLE])
def test_rate(kind: str, decay: int, strict: bool) -> None:
    time = ck.Time(21, 16) if decay < 2 else ck.Time(21, 16, (0, 3, 3, 20, 21))
    gate = ck.gates(decay, time, kind, seed=6)
    check_rate(kind, (16, 32), time, gate, D=33, DZ=35 if strict else 5, strict=strict, add=strict)


def test_rate_of_a_state_that_nothing_reads() -> None:
    time = ck.Time(21, 16)
    check_rate(FLOAT, (16, 32), time, ck.gates(2, time, FLOAT), D=5, DZ=7, reads=False)


@pytest.mark.parametrize("variant", parameters.VARIANTS["rate"], ids=str)
def test_every_variant_of_rate(variant: tuple[int, int]) -> None:
    time = ck.Time(variant[0] - 3, variant[0])
    check_rate(FLOAT, variant, time, ck.gates(1, time, FLOAT), D=20, DZ=36, layout="heads")


# ---- token after token

HLA2 = (  # streams q, k, v, one, u, o; states S = Σ k kᵀ, F = Σ u vᵀ
    ((1, 1, 0, 1, 0, 4, 0, 0), (4, 2, 1, 2, 0, 5, 1, 0)),
    ("d", "d", "v", 1, "d", "v"),
    ((5, 1.0),),
    (),
)
NORMALIZED = (  # linear attention: P = Σ k vᵀ, P' = Σ k, and λ times the query's own read, strictly
    (
        *((1, 2, -1, 1, 1, 6, 0, 1), (1, 2, 0, 1, 0, 4, 0, 0)),
        *((1, 3, 1, 1, 0, 5, 1, 0), (0, 2, 2, 3, -1, -1, 2, 0), (1, 2, -1, 1, 6, 7, 0, 0)),
    ),
    ("d", "d", "v", 1, "v", 1, "v", "v"),
    ((4, 1.0), (6, -0.5), (4, 0.25)),
    ((5, 1.0),),
)
"""Lines, widths of the streams, output and denominator. The query of the last line is a result: d = dv."""


def tokens_of(
    program: Any, options: dict[str, Any], streams: list[np.ndarray], log: np.ndarray | None, mask: np.ndarray | None,
    starts: np.ndarray | None, before: list[np.ndarray | None], bounds: tuple[int, ...],
) -> tuple[np.ndarray, list[np.ndarray]]:  # fmt: skip
    lines, _, output, masses = program
    widths, sign = options["widths"], np.abs if options["absolute"] else np.asarray
    parts, T = len(bounds) - 1, bounds[-1]
    shapes = {line[2]: (widths[line[0]], widths[line[1]]) for line in lines if line[2] >= 0}
    after = [np.zeros((*ck.BATCH, parts, *shapes[i])) for i in range(len(before))]
    result = np.zeros((*ck.BATCH, T, widths[2]))
    for b in ck.entries():
        for part in range(parts):
            states = [np.zeros(shapes[i]) if x is None else x[b][part] for i, x in enumerate(before)]
            for t in range(bounds[part], bounds[part + 1]):
                kept = mask is None or mask[b][t]
                if starts is not None and starts[b][t]:
                    states = [np.zeros_like(x) for x in states]
                held = list(states)
                own = {i: x[b][t] * sign(f) for i, (x, f) in enumerate(zip(streams, options["factors"], strict=False))}
                own[3] = np.ones(1)
                for key, value, moved, power, query, into, state, strict in lines:
                    if moved >= 0 and kept:
                        gamma = 1.0 if log is None else np.exp(log[b][t])
                        decayed = np.zeros_like(states[moved]) if gamma == 0 else gamma**power * states[moved]
                        states[moved] = decayed + np.outer(own[key], own[value])
                    if query >= 0:
                        own[into] = own[query] @ (held if strict else states)[state]
                if kept:
                    total = sum(sign(w) * own[i] for i, w in output)
                    mass = options["eps"] + sum(sign(w) * own[i][0] for i, w in masses)
                    result[b][t] = total / mass if masses and not options["absolute"] else total
            for i, x in enumerate(states):
                after[i][b][part] = x
    return result, after


def check_token(
    kind: str,
    program: Any,
    *,
    T: int,
    d: int,
    dv: int,
    dtype: str = "float32",
    layout: str = "plain",
    offsets: tuple[int, ...] | None = None,
    gated: bool = True,
    begins: bool = False,
    in_place: bool = False,
    initial: bool = True,
    states: str = "plain",
    folder: Path = ck.KERNELS,
) -> None:
    """One launch of `token`."""
    lines, names, output, masses = program
    widths = tuple({"d": d, "v": dv, 1: 1}[n] for n in names)
    make, sums, random = ck.Maker(T + d, dtype, layout), ck.KINDS[kind].name, np.random.default_rng(d)
    bounds = offsets or (0, T)
    parts, count = len(bounds) - 1, 1 + max(line[2] for line in lines)
    shapes = {line[2]: (widths[line[0]], widths[line[1]]) for line in lines if line[2] >= 0}
    streams = [make(T, d), make(T, d), make(T, dv)]
    if masses:
        streams[:2] = [abs(x) if dtype != "bfloat16" else x & 0x7FFF for x in streams[:2]]
    log = ck.stored(-random.gamma(0.5, 0.4, (*ck.BATCH, T)), dtype) if gated else None
    mask = np.broadcast_to(random.random((*ck.BATCH[:2], 1, T)) > 0.2, (*ck.BATCH, T)) if gated else None
    starts = np.zeros((*ck.BATCH, T), bool) if begins else None
    if log is not None and log.dtype != np.uint16 and T > 2:
        log[0, 0, :, T // 2] = -np.inf
    if starts is not None:
        starts[..., list(bounds[:-1])] = True
        starts[..., T // 3] = True
    full = [make(parts, *shapes[i], dtype=sums, layout=states) if initial else None for i in range(count)]
    held = [None if x is None else ck.value(x).copy() for x in full]
    lie = "plain" if states == "broadcast" else states
    after = [
        x if in_place and x is not None else make.empty(parts, *shapes[i], dtype=sums, layout=lie)
        for i, x in enumerate(full)
    ]
    out = make.empty(T, dv, dtype=dtype)
    options = {"factors": (0.7, *(1.0,) * (len(widths) - 1)), "eps": 0.5, "widths": widths}
    of_streams = (*streams, streams[2], *(None,) * (len(widths) - 4))
    arguments = {
        **ck.views(output=out, log_decay=log, mask=mask, starts=starts),
        "streams": of_streams,
        "s_streams": tuple((0,) if x is None else ck.strides(x) for x in of_streams),
        "before": tuple(full),
        "s_before": tuple((0,) if x is None else ck.strides(x) for x in full),
        "after": tuple(after),
        "s_after": tuple(map(ck.strides, after)),
        "bounds": np.array(bounds, np.int64) if offsets else None,
        "T": T,
        "part_count": parts,
        "factors": options["factors"],
        "eps": options["eps"],
        "LINES": lines,
        "WIDTHS": widths,
        "DV": dv,
        "OUTPUT": tuple(i for i, _ in output),
        "weights": tuple(w for _, w in output),
        "MASSES": tuple(i for i, _ in masses),
        "masses": tuple(w for _, w in masses),
    }
    ck.launch("token", kind, (0, 0), arguments, folder)
    given = [[ck.value(x) for x in streams], None if log is None else ck.value(log), mask, starts, held, bounds]
    want, finals = tokens_of(program, {**options, "absolute": False}, *given)
    given[0], given[4] = [np.abs(x) for x in given[0]], [None if x is None else np.abs(x) for x in held]
    scale, sizes = tokens_of(program, {**options, "absolute": True}, *given)
    if masses:  # all that is divided by is above 1/2, and positive
        scale = scale * 8
    ck.compare(out, want, scale, kind, T, d, 4, "output")
    for i, x in enumerate(after):
        ck.compare(x, finals[i], sizes[i], kind, T, d, 2, f"state {i}")


@pytest.mark.parametrize("kind", [FLOAT, DOUBLE])
@pytest.mark.parametrize("sizes", [(5, 7), (8, 36), (33, 17)])
def test_tokens(kind: str, sizes: tuple[int, int]) -> None:
    d, dv = sizes
    check_token(kind, HLA2, T=7, d=d, dv=dv)
    check_token(kind, HLA2, T=6, d=d, dv=dv, offsets=(0, 2, 2, 6), begins=True, initial=False)
    check_token(kind, HLA2, T=1, d=d, dv=dv, in_place=True, gated=False)


@pytest.mark.parametrize("kind", [FLOAT, DOUBLE])
def test_tokens_with_denominators_and_strict_reads(kind: str) -> None:
    check_token(kind, NORMALIZED, T=5, d=17, dv=17)
    check_token(kind, NORMALIZED, T=1, d=64, dv=64, in_place=True)
    check_token(kind, NORMALIZED, T=4, d=5, dv=5, offsets=(0, 0, 4), begins=True)


def test_wide_states() -> None:
    check_token(FLOAT, HLA2, T=2, d=3, dv=1030)
    check_token(FLOAT, HLA2, T=1, d=132, dv=260, in_place=True)
    check_token(FLOAT, HLA2, T=2, d=9, dv=68, states="turned", in_place=True)


# ---- how arrays are stored, and where they lie

STORED = ["float16", "bfloat16", "float32", "float64"]


@pytest.mark.parametrize("dtype", STORED)
@pytest.mark.parametrize("layout", ["plain", "heads", "turned", "odd", "broadcast"])
@pytest.mark.parametrize("kind", [FLOAT, DOUBLE])
def test_storage(kind: str, layout: str, dtype: str) -> None:
    time = ck.Time(19, 16)
    gate = ck.gates(1, time, kind)
    sizes = {"D": 12, "DZ": 20} if layout != "odd" else {"D": 11, "DZ": 18}
    check_chain(kind, (16, 16), time, gate, **sizes, DW=sizes["D"], output=True, dtype=dtype, layout=layout)
    check_chain(kind, (16, 16), time, gate, **sizes, DW=1, alone=True, dtype=dtype, layout=layout)
    check_read(kind, (16, 16), time, gate, **sizes, dtype=dtype, layout=layout)
    check_rate(kind, (16, 32), time, gate, **sizes, dtype=dtype, layout=layout)
    check_token(kind, HLA2, T=2, d=sizes["D"], dv=sizes["DZ"], dtype=dtype, layout=layout, states=layout)


def rounded(x: np.ndarray, digits: int, least: int, most: int) -> np.ndarray:
    """To nearest, ties to even: so many binary digits, exponents from `least` to `most`."""
    unit = np.ldexp(1.0, np.maximum(np.frexp(x)[1] - 1, least) - digits + 1)
    near = np.rint(x / unit) * unit
    return np.where(np.abs(near) >= 2.0 * 2.0**most, np.copysign(np.inf, x), near)


def flushed(x: np.ndarray) -> np.ndarray:
    """Without the denormals of float32, by way of which bfloat16 is widened and narrowed."""
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(0.0, x), x)


@pytest.mark.parametrize("kind", [FLOAT, DOUBLE])
@pytest.mark.parametrize(("dtype", "form"), [("float16", (11, -14, 15)), ("bfloat16", (8, -126, 127))])
def test_every_number_of_16_bits(kind: str, dtype: str, form: tuple[int, int, int]) -> None:
    """Widened, and rounded from what lies between it and the next. `carry` is what copies."""

    def copied(x: np.ndarray, into: np.ndarray) -> np.ndarray:
        one = np.ones(1, ck.KINDS[kind])
        sizes = {"D": 2, "DZ": x.size // 2, "part_count": 1, "REVERSE": False, "batch": 1, "n1": 1, "n2": 1}
        arguments = {"total": one, "through": one, "initial": x, "before": into, "final": None}
        steps = {"s_initial": (0, 0, 0, 0, x.size // 2, 1), "s_before": (0, 0, 0, 0, x.size // 2, 1)}
        steps |= {"s_total": (0,) * 6, "s_through": (0,) * 4, "s_final": (0,)}
        ck.launch("carry", kind, (0, 0), {**arguments, **steps, **sizes})
        return into

    bits = np.arange(1 << 16, dtype=np.uint16)
    own = bits.view(np.float16) if dtype == "float16" else bits
    wide = copied(own, np.zeros(1 << 16, ck.KINDS[kind]))
    np.testing.assert_array_equal(flushed(wide), flushed(ck.value(own)))
    finite = np.sort(wide[np.isfinite(wide)])
    middle = (finite[1:].astype(np.float64) + finite[:-1]) / 2
    middle = np.append(middle, [rounded(finite[-1:], *form)[0] * (1 + 2.0 ** -form[0]), 3e38]).astype(ck.KINDS[kind])
    with np.errstate(under="ignore", over="ignore"):
        tried = np.concatenate([finite, middle, np.nextafter(middle, np.inf), np.nextafter(middle, -np.inf)])
        if kind == DOUBLE:
            tried = np.append(tried, [1e300, -1e300, 1e-300, np.inf, -np.inf, np.nan, *(middle * (1 + 2.0**-45))])
        want = rounded(tried.astype(np.float64), *form)
    tried = tried[: tried.size // 2 * 2]
    got, want = ck.value(copied(tried, np.zeros(tried.size, own.dtype))), want[: tried.size]
    denormal = (np.abs(want) <= np.finfo(np.float32).tiny) & (np.abs(got) <= np.finfo(np.float32).tiny)
    np.testing.assert_array_equal(np.where(denormal, 0.0, got), np.where(denormal, 0.0, want))


# ---- what is not finite


@pytest.mark.parametrize("kind", [FLOAT, DOUBLE])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_spoils_its_own_era_only(kind: str, reverse: bool, strict: bool, bad: float) -> None:
    """Masked tokens spoil nothing. A token that is seen spoils those that see it, and no others."""
    time = ck.Time(53, 16, (0, 30, 53))
    gate = ck.gates(2, time, kind, seed=9)

    def spoil(gate: ck.Gate, *arrays: np.ndarray) -> None:
        for b in ck.entries():
            hidden = np.flatnonzero(~gate.kept[b])
            shown = [19, 41] if b[0] == 0 else []
            for x in arrays:
                x[b][hidden[::2]] = bad
                x[b][shown] = np.nan

    with np.errstate(invalid="ignore"):
        sizes = {"D": 5, "DZ": 7}
        check_chain(
            kind, (16, 16), time, gate, **sizes, DW=5, output=True, reverse=reverse, strict=strict, initial=False,
            spoil=spoil,
        )  # fmt: skip
        check_chain(kind, (16, 16), time, gate, **sizes, DW=1, alone=True, reverse=reverse, spoil=spoil)
        check_read(kind, (16, 16), time, gate, **sizes, reverse=reverse, strict=strict, spoil=spoil)


# ---- every order of the threads


@pytest.fixture
def every_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ck, "orders", ["every"])


def selection(folder: Path = ck.KERNELS, only: str | None = None) -> None:
    """A little of everything, few enough threads at once for the thread sanitizer."""
    time = ck.Time(19, 16, (0, 7, 19))
    own = {"folder": folder}
    check_clock(FLOAT, time, 1, **own)
    gate = ck.gates(2, time, FLOAT)
    checks = {
        "chain": lambda: check_chain(FLOAT, (16, 16), time, gate, D=68, DW=68, DZ=9, output=True, **own),
        "state": lambda: check_chain(FLOAT, (16, 16), time, gate, D=9, DW=1, DZ=5, alone=True, **own),
        "read": lambda: check_read(FLOAT, (16, 16), ck.Time(19, 16), ck.no_gate(19), D=35, D2=4, DZ=9, **own),
        "rate": lambda: check_rate(FLOAT, (16, 32), ck.Time(19, 16), ck.constant_gate(19), D=35, DZ=36, **own),
        "token": lambda: check_token(FLOAT, NORMALIZED, T=2, d=36, dv=36, in_place=True, **own),
    }
    for name, check in checks.items():
        if only in (None, name):
            check()


@pytest.mark.usefixtures("every_order")
def test_the_order_of_threads_is_nothing_to_the_result() -> None:
    selection()
    time = ck.Time(67, 32)
    check_chain(DOUBLE, (32, 32), time, ck.gates(2, time, DOUBLE), D=33, DW=9, DZ=36, strict=True, reverse=True)
    check_read(DOUBLE, (32, 32), time, ck.gates(2, time, DOUBLE), D=33, D2=40, DZ=36, add=True)


# ---- far from the start of an array


FAR, NUMBER = 2**31 + 5, 2**29
"""The first token; the number of a chunk and of a sequence."""


def far_arguments(far: bool) -> dict[str, tuple[dict[str, Any], dict[str, int], list[np.ndarray]]]:
    """For kernels: arguments, how far before its memory each pointer lies, and outputs. One chunk of 9 tokens."""
    random = np.random.default_rng(0)
    start, number, D, DZ = (FAR if far else 0), (NUMBER if far else 0), 5, 7

    def array(*shape: int, like: Any = np.float32) -> np.ndarray:
        return random.standard_normal(shape).astype(like)

    def stream(width: int) -> tuple[np.ndarray, tuple[int, ...]]:
        return array(9, width), (0, 0, 0, width, 1)

    x, y, z = stream(D), stream(D), stream(DZ)
    high, low = -np.abs(array(9)), array(9) / 1024
    era, out = np.zeros(9, np.int32), np.full((9, DZ), np.nan, np.float32)
    border = np.full((D, DZ), np.nan, np.float32)
    state, steps = array(D, DZ), (0, 0, 0, D * DZ, DZ, 1)
    common = {
        "T": start + 9,
        "count": 1,
        "part_count": 1,
        "gate": (high, low, era),
        "s_gate": (0, 0, 0),
        "DECAY": 2,
        "POWER": 1,
        "POWER2": 2,
        "STRICT": True,
        "REVERSE": False,
        "ADD": False,
        "D": D,
        "D2": D,
        "DW": D,
        "DZ": DZ,
        "by_left": 1.0,
        "by_right": 1.0,
        "by_span": 1.0,
        "by_state2": 1.0,
        "PER_CHUNK": False,
        "C": 16,
        **SCALARS,
        "chunks": np.array([[start, start + 9, number]], np.int64),
        "parts": np.array([number, number + 1]),
        "x": x[0],
        "s_x": x[1],
        "y": y[0],
        "s_y": y[1],
        "z": z[0],
        "s_z": z[1],
        "w": y[0],
        "s_w": y[1],
        "r": out,
        "s_r": (0, 0, 0, DZ, 1),
        "borders": border,
        "s_borders": steps,
        "state": state,
        "s_state": steps,
        "after": state,
        "s_after": (0, 0, 0, 0, DZ, 1),
        "d": z[0],
        "s_d": z[1],
    }
    tokens = {"x": D, "y": D, "z": DZ, "w": D, "d": DZ, "r": DZ, "gate0": 1, "gate1": 1, "gate2": 1, "result": 1}
    before = {name: start * width for name, width in tokens.items()}
    passes = {**before, "borders": number * D * DZ, "chunks": 3 * number, "parts": 0}
    result = np.full(9, np.nan, np.float32)
    sums = [np.full(9, np.nan, np.float32) for _ in range(2)]
    clock = {"log_decay": high, "s_log_decay": (0, 0, 0, 1), "mask": None, "starts": None, "s_out": (0, 0, 0, 1)}
    clock |= {"high": sums[0], "low": sums[1], "era": np.zeros(9, np.int32)}
    states = [np.full((1, *shape), np.nan, np.float32) for shape in ((D, D), (D, DZ))]
    token = {
        "streams": (x[0], y[0], z[0]),
        "s_streams": (x[1], y[1], z[1]),
        "output": out,
        "s_output": (0, 0, 0, DZ, 1),
        "log_decay": high,
        "s_log_decay": (0, 0, 0, 1),
        "mask": None,
        "s_mask": (0,),
        "starts": None,
        "s_starts": (0,),
        "before": (None, None),
        "s_before": ((0,), (0,)),
        "after": tuple(states),
        "eps": 0.0,
        "s_after": tuple((0, 0, 0, x[0].size, x.shape[2], 1) for x in states),
        "factors": (1.0,) * 6,
        "DV": DZ,
        "bounds": np.array([start, start + 9], np.int64),
        "part_count": 1,
        "T": start + 9,
        "LINES": HLA2[0],
        "WIDTHS": (D, D, DZ, 1, D, DZ),
        "OUTPUT": (5,),
        "weights": (1.0,),
        "MASSES": (),
        "masses": (),
    }
    far_tokens = {"q": start * D, "k": start * D, "v": start * DZ, "output": start * DZ, "log_decay": start}
    return {
        "chain": (common, passes, [out, border]),
        "state": (common, passes, [border]),
        "read": (common, {**before, "state": number * D * DZ}, [out]),
        "rate": ({**common, "result": result, "s_result": (0, 0, 0, 1)}, before, [result]),
        "clock": ({**common, **clock}, dict.fromkeys(("log_decay", "high", "low", "era"), start), sums),
        "token": (token, far_tokens, [out, *states]),
    }


@pytest.mark.parametrize("kernel", ["clock", "chain", "state", "read", "rate", "token"])
def test_offsets_beyond_32_bits(kernel: str) -> None:
    """Numbers of tokens, chunks and sequences that need 64 bits once they are multiplied by a stride, at pointers that
    lie as far before the memory that is used: the results are those of the first ones."""
    variant = {"clock": (16, 0), "token": (0, 0), "rate": (16, 32)}.get(kernel, (16, 16))
    found = []
    for far in (False, True):
        arguments, before, outputs = far_arguments(far)[kernel]
        ck.launch_far(kernel, FLOAT, variant, arguments, before)
        assert all(np.isfinite(x).all() for x in outputs)
        found.append(outputs)
    for near, far_away in zip(*found, strict=True):
        np.testing.assert_array_equal(near, far_away)


# ---- planted faults


def planted(folder: Path, file: str, old: str, new: str, count: int = 1) -> Path:
    """A copy of the kernels with a fault."""
    for path in ck.KERNELS.iterdir():
        if path.suffix in (".cu", ".cuh"):
            (folder / path.name).write_text(path.read_text())
    text = (folder / file).read_text()
    assert text.count(old) >= 1, f"{file} has changed: {old!r}"
    (folder / file).write_text(text.replace(old, new, count))
    return folder


@pytest.mark.usefixtures("every_order")
def test_a_missing_barrier_is_found(tmp_path: Path) -> None:
    old = "put_pairs(pairs, product, k, pass, second ? pass.power2 : pass.power);\n      __syncthreads();"
    folder = planted(tmp_path, "read.cu", old, old.replace("__syncthreads();", ""))
    with pytest.raises(cpu.KernelError, match="depends on the order of threads"):
        selection(folder, "read")


def test_a_bound_that_is_off_by_one_is_found(tmp_path: Path) -> None:
    folder = planted(tmp_path, "views.cuh", "if (column + i < to.width)", "if (column + i <= to.width)")
    with pytest.raises(cpu.KernelError, match=r"a store .* past the end of argument"):
        selection(folder, "state")


def test_a_load_that_is_not_aligned_is_found(tmp_path: Path) -> None:
    folder = planted(tmp_path, "views.cuh", "reinterpret_cast<size_t>(at) % aligned == 0", "true")
    time = ck.Time(19, 16)
    sizes = {"D": 12, "DZ": 9, "DW": 1}
    with pytest.raises(cpu.KernelError, match="misaligned"):
        check_chain(FLOAT, (16, 16), time, ck.no_gate(19), **sizes, layout="shifted", alone=True, folder=folder)


def test_shared_memory_without_a_value_is_found(tmp_path: Path) -> None:
    old = "for (int i = 0; i < 4; ++i) v[i] = 0;"
    folder = planted(tmp_path, "views.cuh", old, old.replace("4", "0"))
    with pytest.raises(AssertionError):
        selection(folder, "chain")


@pytest.mark.sanitizers
def test_sanitizers_find_nothing() -> None:
    for build in ("address", "thread"):
        assert cpu.sanitized(build, selection).faults == ()


@pytest.mark.sanitizers
def test_the_thread_build_finds_a_missing_barrier(tmp_path: Path) -> None:
    folder = planted(tmp_path, "chain.cu", "VALID | LEAVES);\n    __syncthreads();", "VALID | LEAVES);")
    faults = cpu.sanitized("thread", selection, folder, "chain").faults
    assert {fault.kind for fault in faults} == {"data race"}


@pytest.mark.sanitizers
def test_the_address_build_finds_a_load_past_the_end(tmp_path: Path) -> None:
    folder = planted(tmp_path, "views.cuh", "there && column + i < from.width", "there && column + i <= from.width")
    faults = cpu.sanitized("address", selection, folder, "state").faults
    assert [fault.kind for fault in faults] == ["heap-buffer-overflow"]


# ---- what Python says of the kernels is what they say


def test_constants_are_those_of_the_source() -> None:
    text = (ck.KERNELS / "tile.cuh").read_text() + (ck.KERNELS / "views.cuh").read_text()
    for name in ("PAD", "SLAB", "ROWS", "THREADS"):
        assert f"constexpr int {name} = {getattr(parameters, name)};" in text

"""The CUDA kernels of the CuPy backend, compiled by g++ and run on NumPy arrays: against the definitions, pair by pair."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cupy_kernels as ck
import libraries
from cuda import cpu
from hla.backends.cupy import parameters

libraries.only("numpy")

if not cpu.available():
    pytest.skip("with g++", allow_module_level=True)

FLOAT, DOUBLE = "float", "double"


# ---- the clock


def check_clock(kind: str, time: ck.Time, seed: int, dtype: str = "float32") -> None:
    arguments, gate = ck.clock_inputs(time, kind, seed, dtype)
    ck.launch("clock", kind, (time.C, 0), arguments)
    high, low, era = (arguments[x] for x in ("high", "low", "era"))
    for b in ck.entries():
        for start, stop, _ in time.chunks:
            number, total = 0, 0.0
            for t in range(start, stop):
                begins = bool(gate.resets[b][t])
                number, total = number + begins, gate.log[b][t] + (0.0 if begins else total)
                if gate.starts[b][t] and gate.kept[b][t]:
                    total = _own(arguments, b, t, kind)
                flags = ck_flags(not gate.kept[b][t], bool(gate.starts[b][t]))
                assert era[b][t] == number * 4 + flags
                assert abs(low[b][t]) <= (t - start + 1) * 2.0**-10
                assert high[b][t] * 512 == np.floor(high[b][t] * 512), "a sum without roundings"
                np.testing.assert_allclose(
                    float(high[b][t]) + float(low[b][t]), total, rtol=0, atol=2.0**-10 * 64 * ck.KINDS_UNIT[kind]
                )


def _own(arguments: dict[str, Any], b: tuple[int, ...], t: int, kind: str) -> float:
    """A start's own log-decay, if it resets nothing by itself."""
    g = float(ck.value(arguments["log_decay"])[b][t])
    return 0.0 if g < {"float": -110, "double": -750}[kind] else g


def ck_flags(masked: bool, starts: bool) -> int:
    return masked + 2 * starts


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
    options |= {**SCALARS, "output": output}
    given = ck.numbers(x, y, z, w, first, second)
    want = chain_of(time, gate, {**options, "absolute": False}, *given)
    scale = chain_of(time, gate, {**options, "absolute": True}, *(None if g is None else np.abs(g) for g in given))
    passes = {"o": 2, "final2": 2, "borders2": 2}
    for name, out in outputs.items():
        if out is not None:
            ck.compare(out, want[name], scale[name], kind, T, max(D, DW), passes.get(name, 1), name)


STATE = [v for v in parameters.VARIANTS["state"] if v[0] == 16]


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
                            products = (x[b][t] @ y[b][j]) * (z[b][j] @ d[b][t])
                            total += by["by_pair"] * pair**p * products
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
    time = ck.Time(variant[0] + 3, variant[0])
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
    full = [
        make(parts, *shapes[i], dtype=sums, layout=states) + (2 if masses else 0) if initial else None
        for i in range(count)
    ]
    held = [None if x is None else ck.value(x).copy() for x in full]
    after = [
        x if in_place and x is not None else make.empty(parts, *shapes[i], dtype=sums, layout=states)
        for i, x in enumerate(full)
    ]
    before = [None if x is None else x for x in full]
    out = make.empty(T, dv, dtype=dtype)
    options = {"factors": (0.7, *(1.0,) * (len(widths) - 1)), "eps": 0.5, "widths": widths}
    of_streams = (*streams, streams[2], *(None,) * (len(widths) - 4))
    arguments = {
        **ck.views(output=out, log_decay=log, mask=mask, starts=starts),
        "streams": of_streams,
        "s_streams": tuple((0,) if x is None else ck.strides(x) for x in of_streams),
        "before": tuple(before),
        "s_before": tuple((0,) if x is None else ck.strides(x) for x in before),
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

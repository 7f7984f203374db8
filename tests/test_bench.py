"""`hla bench`: what it measures beside what, that nothing wrong is timed, and saved runs. No test depends on a time."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import hla
from commands import in_a_terminal, measured, one_object, run
from faults import fault_in_the_state, fault_late, fault_raises
from hla.backends import Backend, BackendSpec, registered
from hla.cli import (
    ceiling,
    composition,
    judging,
    main,
    memory,
    picture,
    recurrence,
    report,
    saved,
    softmax,
    timing,
)
from hla.problem import Problem
from hla.testing import Placement, error_budget, expected, expected_gradients, make_inputs, per_token_error

HOST = Placement("numpy")
TINY = ("--lengths", "67", "--heads", "3", "--d", "5", "--dv", "7", "--repeat", "1")
EVERY = [("linear_attention", None), ("hla2", None), ("ahla", None), ("hla3", None)] + [
    ("higher_order", order) for order in (1, 2, 3, 4, 5, 6)
]


def bench_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON object of a run on NumPy arrays."""
    code = main(["bench", *TINY, "--json", "--arrays", "numpy", *arguments])
    return code, one_object(capsys.readouterr().out)


# --- a run ------------------------------------------------------------------------------------------------------


@in_a_terminal
def test_every_library_pass_and_peer(tmp_path: Path) -> None:
    picture_file = tmp_path / "time.svg"
    done = run("bench", *TINY, "--operators", "hla2,higher_order:5", "--json", "--plot", str(picture_file))
    found = measured(done)
    rows = found["rows"]
    assert found["checks"] == len(rows)
    assert len({tuple(row[name] for name in saved.KEY) for row in rows}) == len(rows)
    installed = {name for name in ("numpy", "torch", "jax") if find_spec(name)}
    assert {row["arrays"].split()[0] for row in rows} >= installed
    for library in installed:
        own = [row for row in rows if row["arrays"].split()[0] == library]
        for what in ("forward", "backward"):
            names = {row["name"] for row in own if row["pass"] == what}
            # A loop over NumPy arrays has no gradient.
            loop = set() if (library, what) == ("numpy", "backward") else {"hla2, loop"}
            composed = {"hla2, composed", "higher_order:5, composed"}
            assert names == {"hla2", "higher_order:5", "softmax"} | composed | loop
        assert {row["name"] for row in own if row["pass"] == "decode"} == {
            "hla2",
            "hla2, loop",
            "higher_order:5",
            "softmax",
        }
    for row in rows:
        assert 0 < row["fastest"] <= row["seconds"]
        assert row["error"] <= row["budget"]
        assert row["flops_per_second"] > 0
        assert (row["backend"] is not None) == (row["kind"] == "operator")
        if row["pass"] == "decode":
            assert row["state_bytes"] > 0
        elif row["peak_bytes"] is not None:
            assert row["peak_bytes"] >= 3 * 67 * 7 * 4  # its output at least
    assert all(rate > 0 for rates in found["matmul_flops_per_second"].values() for rate in rates.values())
    assert all(rate > 0 for rate in found["copy_bytes_per_second"].values())
    assert found["machine"]["hla"] == hla.__version__
    assert picture_file.read_text().lstrip().startswith("<?xml")


@in_a_terminal
def test_forms_are_rows_of_their_own_and_decode_has_none(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = bench_of(
        capsys, "--operators", "ahla", "--forms", "recurrent,parallel", "--peers", "none", "--backend", "numpy"
    )
    assert code == 0
    shown = [(row["pass"], row["form"]) for row in found["rows"]]
    assert shown == [
        ("forward", "recurrent"),
        ("forward", "parallel"),
        ("backward", "recurrent"),
        ("backward", "parallel"),
        ("decode", None),
    ]


@in_a_terminal
@pytest.mark.parametrize("dtype", ["float64", "float16"])
def test_other_dtypes(dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = bench_of(capsys, "--operators", "hla2", "--dtype", dtype, "--lengths", "1,150")
    assert code == 0, [row for row in found["rows"] if not row["ok"]]
    assert {(row["dtype"], row["T"]) for row in found["rows"]} == {(dtype, 1), (dtype, 150)}


@in_a_terminal
def test_the_table_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *TINY, "--arrays", "numpy", "--operators", "hla2"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for word in ("Forward,", "Forward and backward,", "Decode:", "medians", "Gflop/s", "the ceiling"):
        assert word in out


@pytest.mark.parametrize(
    "arguments",
    [
        ["--operators", "hla4"],
        ["--operators", "higher_order"],
        ["--operators", "hla2:3"],
        ["--lengths", "0"],
        ["--lengths", "12,x"],
        ["--lengths", ","],
        ["--backend", "nump"],
        ["--arrays", "numpi"],
        ["--forms", "chunk"],
        ["--passes", "forwards"],
        ["--peers", "hla"],
        ["--plot", "no/such/folder/time.png"],
        ["--plot", "time.doc"],
        ["--save", "no/such/folder/run.json"],
        ["--compare", "a", "b", "c"],
    ],
)
@in_a_terminal
def test_misuse(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 2
    captured = capsys.readouterr()
    assert "expected" in captured.err
    assert captured.out == ""


# --- what is wrong is not timed ---------------------------------------------------------------------------------


def fault_in_the_gradient(problem: Problem, *cotangents: Any) -> Any:
    found = registered()["numpy"].gradient(problem.program.spec.operator)(problem, *cotangents)
    return found._replace(k=found.k * np.asarray(1.001, found.k.dtype))


def right(problem: Problem) -> Any:
    return registered()["numpy"].runner(problem.program.spec.operator)(problem)


@pytest.fixture
def broken(request: pytest.FixtureRequest) -> Iterator[None]:
    run_one, pull = request.param
    spec = BackendSpec(name="broken", families=("numpy",), gradients=pull is not None, priority=-1)
    gradient = None if pull is None else lambda operator: pull
    hla.register_backend(Backend(spec=spec, load=lambda operator: run_one, load_gradient=gradient))
    yield
    hla.backends.unregister_backend("broken")


@in_a_terminal
@pytest.mark.parametrize(
    ("broken", "what"),
    [
        ((fault_late, None), "forward"),
        ((fault_raises, None), "forward"),
        ((right, fault_in_the_gradient), "backward"),
        ((fault_in_the_state, None), "decode"),
    ],
    indirect=["broken"],
)
def test_a_wrong_operator(broken: None, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = bench_of(capsys, "--operators", "ahla", "--backend", "broken", "--passes", what)
    assert code == 1
    assert found["ok"] is False
    operators = [row for row in found["rows"] if row["kind"] == "operator"]
    assert [(row["ok"], row["seconds"], row["samples"]) for row in operators] == [(False, None, 0)]
    assert all(row["ok"] and row["seconds"] for row in found["rows"] if row["kind"] != "operator")


@in_a_terminal
def test_what_a_backend_refuses_is_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    spec = BackendSpec(name="narrow", families=("numpy",), forms=("chunkwise",), priority=-1)
    hla.register_backend(Backend(spec=spec, load=lambda operator: right))
    try:
        code, found = bench_of(
            capsys, "--operators", "ahla", "--backend", "narrow", "--forms", "scan", "--passes", "forward"
        )
    finally:
        hla.backends.unregister_backend("narrow")
    assert code == 0
    assert "operator" not in {row["kind"] for row in found["rows"]}
    assert any("ahla, forward" in reason for reason in found["not_run"])


@in_a_terminal
@pytest.mark.parametrize("kind", ["softmax", "loop", "composition"])
def test_a_wrong_peer(kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    if kind == "softmax":
        monkeypatch.setattr(softmax, "softmax_attention", lambda place: lambda q, k, v: v)
    elif kind == "loop":
        step = recurrence.STEPS["ahla"]
        monkeypatch.setitem(recurrence.STEPS, "ahla", lambda states, q, k, v: step(states, q, k, v * np.float32(1.001)))
    else:
        linear = composition.linear
        monkeypatch.setattr(composition, "linear", lambda xp, a, b, c: linear(xp, a, b, c) + a[..., :1] * 1e-3)
    code, found = bench_of(capsys, "--operators", "ahla", "--passes", "forward", "--peers", kind)
    assert code == 1
    for row in found["rows"]:
        assert (row["seconds"] is None) == (not row["ok"]) == (row["kind"] == kind)


@in_a_terminal
def test_a_wrong_judge_is_found_out(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Beyond the first tokens the composition judges, after it was held against the definition."""
    linear = composition.linear
    monkeypatch.setattr(composition, "linear", lambda xp, a, b, c: linear(xp, a, b, c) + a[..., :1] * 1e-3)
    code, found = bench_of(capsys, "--operators", "ahla", "--passes", "forward", "--peers", "none", "--lengths", "131")
    assert code == 1
    assert all("the judge of ahla is off" in row["note"] for row in found["rows"])


# --- the judges and the peers -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("operator", "order"), EVERY)
def test_the_composition_is_the_operator(operator: str, order: int | None) -> None:
    x = make_inputs(np, T=131, d=5, dv=7, batch=(2,), dtype="float64")
    error = per_token_error(composition.attend(np, operator, *x, order=order), expected(operator, *x, order=order))
    assert error <= error_budget(operator, "float64", 131, 5, dv=7, order=order)


@pytest.mark.parametrize(("operator", "order"), EVERY)
def test_the_gradient_of_the_composition(operator: str, order: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(composition, "CHUNK", 4)  # differences of the definition are for few tokens
    x = make_inputs(np, T=9, d=3, dv=2, batch=(2,), dtype="float64")
    do = make_inputs(np, T=9, d=3, dv=2, batch=(2,), dtype="float64", seed=1).v
    o, found = composition.attend_and_pull(np, operator, *x, do, order=order)
    assert np.array_equal(o, composition.attend(np, operator, *x, order=order))
    want = expected_gradients(operator, *x, do, order=order)
    for name, gradient in zip("qkv", found, strict=True):
        assert per_token_error(gradient, want[name]) <= 1e-9  # what the differences miss


@pytest.mark.parametrize("operator", sorted(recurrence.STEPS))
def test_the_loop_and_its_states(operator: str) -> None:
    x = make_inputs(np, T=70, d=5, dv=7, batch=(2,), dtype="float64")
    want = expected(operator, *x)
    budget = error_budget(operator, "float64", 70, 5, dv=7)
    assert per_token_error(recurrence.token_loop(HOST, operator)(*x), want) <= budget
    states = tuple(composition.states_after(np, operator, *(y[:, :69] for y in x)))
    after, o = recurrence.STEPS[operator](states, *(y[:, 69] for y in x))
    assert per_token_error(o[:, None], want[:, 69:]) <= budget
    assert [y.shape for y in after] == [y.shape for y in recurrence.empty_states(np, operator, x.q, x.v)]


def test_softmax_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    x = make_inputs(np, T=11, d=3, dv=2, batch=(2,), dtype="float64")
    do = make_inputs(np, T=11, d=3, dv=2, batch=(2,), dtype="float64", seed=1).v
    scores = np.exp(x.q @ x.k.swapaxes(-1, -2) * 3**-0.5) * np.tri(11)
    want = scores / scores.sum(-1, keepdims=True) @ x.v
    monkeypatch.setattr(softmax, "QUERY_BLOCK", 4)
    o, found = softmax.blocked_softmax_and_pull(np, *x, do)
    assert np.allclose(o, want, rtol=1e-13, atol=1e-13)
    assert np.array_equal(o, softmax.blocked_softmax(np, *x))
    h = 1e-5
    for position, gradient in enumerate(found):
        for index in np.ndindex(gradient.shape):
            moved = []
            for sign in (1, -1):
                y = [z.copy() for z in x]
                y[position][index] += sign * h
                moved.append((softmax.blocked_softmax(np, *y) * do).sum())
            assert abs((moved[0] - moved[1]) / (2 * h) - gradient[index]) < 1e-8


@pytest.mark.parametrize("operator", ["hla2", "softmax"])
@pytest.mark.parametrize("length", [67, 150])
def test_judges_see_every_single_error(operator: str, length: int) -> None:
    """One wrong number in the last row of the output, of dq or of dk."""
    x = make_inputs(np, T=length, d=5, dv=7, batch=(2,))
    do = make_inputs(np, T=length, d=5, dv=7, batch=(2,), seed=1).v
    judge = judging.judge_of(operator, None, x, do, "float32")
    if operator == "softmax":
        o, gradients = softmax.blocked_softmax_and_pull(np, *x, do)
    else:
        o, gradients = composition.attend_and_pull(np, operator, *x, do)
    assert judge.forward(o).ok
    assert judge.backward(o, gradients).ok
    assert judge.backward((o * do).sum(), gradients).ok
    assert judge.decode(o[:, -1:]).ok
    wrong = o.copy()
    wrong[1, -1] *= np.float32(1.01)
    assert not judge.forward(wrong).ok
    assert not judge.decode(wrong[:, -1:]).ok
    assert not judge.backward(wrong, gradients).ok
    if operator == "hla2":
        assert not judge.backward((o * do).sum() * np.float32(1.1), gradients).ok
    for i in range(2):
        moved = [y.copy() for y in gradients]
        moved[i][0, length // 2 if operator == "hla2" else -3] *= np.float32(1.05)
        assert not judge.backward(o, tuple(moved)).ok
    assert not judge.forward(np.full_like(o, np.nan)).ok


# --- flash-linear-attention -------------------------------------------------------------------------------------


@pytest.fixture
def fla(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Stands for the package: its names and array layout, (B, T, H, d), its default scale, its whole chunks."""
    pytest.importorskip("torch")
    module = ModuleType("fla.ops.linear_attn.naive")
    for name in ("fla", "fla.ops", "fla.ops.linear_attn"):
        package = ModuleType(name)
        package.__spec__ = ModuleSpec(name, None)
        package.__path__ = []
        monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def attend(q: Any, k: Any, v: Any, scale: float | None = None) -> Any:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        return (((q * scale) @ k.mT).tril() @ v).transpose(1, 2)

    def recurrent(q: Any, k: Any, v: Any, scale: float | None = None) -> Any:
        return attend(q, k, v, scale), None

    def chunk(q: Any, k: Any, v: Any, scale: float | None = None) -> Any:
        assert q.shape[1] % 64 == 0
        return attend(q, k, v, scale)

    module.naive_recurrent_linear_attn, module.naive_chunk_linear_attn = recurrent, chunk  # type: ignore[attr-defined]
    return module


def fla_rows(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
    code = main(
        ["bench", *TINY, "--json", "--arrays", "torch", "--operators", "linear_attention", "--peers", "fla",
         "--passes", "forward,backward"]
    )  # fmt: skip
    return code, one_object(capsys.readouterr().out)


@in_a_terminal
def test_flash_linear_attention_is_a_peer(fla: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = fla_rows(capsys)
    assert code == 0
    names = [(row["name"], row["pass"]) for row in found["rows"] if row["kind"] == "fla"]
    assert sorted(names) == [
        (f"linear_attention, fla, {kind}", what) for kind in ("chunk", "recurrent") for what in ("backward", "forward")
    ]


@in_a_terminal
def test_flash_linear_attention_of_another_version(fla: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    del fla.naive_recurrent_linear_attn
    code, found = fla_rows(capsys)
    assert code == 0
    assert any("does not have" in reason for reason in found["not_run"])


@in_a_terminal
def test_without_flash_linear_attention(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name, found=find_spec: None if name == "fla" else found(name)
    )
    code, found = bench_of(capsys, "--operators", "linear_attention", "--passes", "forward")
    assert code == 0
    assert "flash-linear-attention: not installed" in found["not_run"]


# --- time and memory --------------------------------------------------------------------------------------------


def test_contenders_take_turns() -> None:
    called: list[str] = []
    found = timing.in_turns({name: lambda name=name: called.append(name) for name in "abc"}, rounds=3)
    assert "".join(called) == "abc" * 4  # once uncounted
    assert all(len(x.samples) == 3 for x in found.values())


def test_quick_functions_are_repeated_and_slow_ones_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    calls = {"quick": 0, "slow": 0}
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])

    def run(name: str, seconds: float) -> None:
        calls[name] += 1
        now[0] += seconds

    found = timing.in_turns(
        {"quick": lambda: run("quick", 0.25), "slow": lambda: run("slow", 4.0)}, rounds=5, least=1.0, most=6.0
    )
    assert calls == {"quick": 1 + 5 * 4, "slow": 1 + 2}
    assert found["quick"] == timing.Timing((0.25,) * 5)
    assert found["slow"].samples == (4.0, 4.0)


def test_median_and_fastest() -> None:
    found = timing.Timing((3.0, 1.0, 2.0))
    assert (found.median, found.fastest) == (2.0, 1.0)


@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
def test_peak_memory_counts_what_is_released_again(library: str) -> None:
    """Two arrays at a time, of which one is kept."""
    pytest.importorskip(library)
    place = Placement(library, __import__("torch").device("cpu") if library == "torch" else None)
    xp, size = place.xp, 1 << 20

    def call(x: Any) -> Any:
        y = xp.flip(x, axis=(0,)) @ x
        return xp.sum(y * y.T)

    x = xp.ones((512, 512), dtype=xp.float32)
    peak = memory.peak_bytes(place, place.compiled(call), (x,))
    assert peak is not None
    assert size <= peak <= 5 * size


def test_the_ceilings_count_their_work() -> None:
    work = ceiling.batched_matmul(HOST)
    assert work.run().shape == (64, 64, 64)
    assert work.amount == 64 * 2 * 64**3
    assert ceiling.large_copy(HOST).amount == 2 * 4 * ceiling.large_copy(HOST).run().shape[0]


def test_nothing_to_draw(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(report.Failure, match="nothing was measured"):
        picture.draw(str(tmp_path / "x.png"), [], "title")


# --- saved runs -------------------------------------------------------------------------------------------------


def row_of(seconds: float | None, **changes: Any) -> dict[str, Any]:
    row = {"arrays": "numpy", "backend": "numpy", "name": "hla2", "form_asked": "auto", "pass": "forward", "T": 64,
           "heads": 8, "d": 64, "dv": 64, "dtype": "float32", "error": 1e-7, "peak_bytes": 1000}  # fmt: skip
    return {**row, "seconds": seconds, **changes}


def write(file: Path, rows: list[dict[str, Any]], **machine: str) -> str:
    saved.save(str(file), saved.Run(machine, rows))
    return str(file)


@in_a_terminal
def test_a_run_is_saved_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.json"
    asked = ("--operators", "hla2", "--passes", "forward,decode")
    code, first = bench_of(capsys, *asked, "--save", str(file))
    assert code == 0
    old = saved.load(str(file))
    assert old.rows == first["rows"]
    code, second = bench_of(capsys, *asked, "--compare", str(file))
    assert code == 0
    assert len(second["comparison"]) == len(second["rows"])
    for entry, before, after in zip(second["comparison"], first["rows"], second["rows"], strict=True):
        assert entry["new_per_old"] == pytest.approx(after["seconds"] / before["seconds"])


def test_two_files_are_compared_without_measuring(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = write(tmp_path / "old", [row_of(0.2), row_of(0.1, T=128), row_of(None, T=32)], hla="0.1.0", cores="2")
    new = write(tmp_path / "new", [row_of(0.3, peak_bytes=500), row_of(0.1, T=256)], hla="0.2.0", cores="2")
    assert main(["bench", "--json", "--compare", old, new]) == 0
    found = one_object(capsys.readouterr().out)
    (entry,) = found["rows"]
    assert entry["new_per_old"] == pytest.approx(1.5)
    assert entry["memory_new_per_old"] == pytest.approx(0.5)
    assert found["checks"] == 1
    assert main(["bench", "--compare", old, new]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "1.50" in out
    assert "Differs: hla, 0.1.0 -> 0.2.0." in out
    assert "cores" not in out
    assert "Only in the new run: 1 measurements." in out
    assert "Only in the old run: 1 measurements." in out


def test_runs_without_a_common_measurement(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [write(tmp_path / str(length), [row_of(0.2, T=length)]) for length in (64, 128)]
    assert main(["bench", "--compare", *files]) == 2
    assert "in common" in capsys.readouterr().err


BAD = {
    "empty": "",
    "text": "hla2 took 3 ms",
    "list": "[1, 2]",
    "other": '{"ok": true, "rows": []}',
    "stranger": json.dumps({"format": "times", "version": saved.VERSION, "machine": {}, "rows": [row_of(0.1)]}),
    "newer": json.dumps({"format": saved.FORMAT, "version": saved.VERSION + 1, "machine": {}, "rows": []}),
    "rows": json.dumps({"format": saved.FORMAT, "version": saved.VERSION, "machine": {}, "rows": [{"T": 3}]}),
    "seconds": json.dumps({"format": saved.FORMAT, "version": saved.VERSION, "machine": {}, "rows": [row_of(-1.0)]}),
    "machine": json.dumps({"format": saved.FORMAT, "version": saved.VERSION, "machine": 3, "rows": []}),
}


@in_a_terminal
@pytest.mark.parametrize("name", [*BAD, "missing", "folder", "binary"])
def test_a_file_that_is_no_saved_run(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / name
    if name in BAD:
        file.write_text(BAD[name])
    elif name == "binary":
        file.write_bytes(b"\xff\xfe\x00")
    elif name == "folder":
        file.mkdir()
    good = write(tmp_path / "good", [row_of(0.1)])
    for arguments in ([str(file)], [good, str(file)]):
        assert main(["bench", "--compare", *arguments]) == 2
        captured = capsys.readouterr()
        assert "expected a file that hla bench --save wrote" in captured.err
        assert str(file) in captured.err
        assert captured.out == ""

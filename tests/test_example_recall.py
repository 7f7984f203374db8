"""examples/recall.py: tasks with the right answers, mixers with all else equal, tables that say what was found."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from libraries import only

torch: Any = only("torch")

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "recall.py"
TASKS = {"mqar": (5, 13), "induction": (7, 23), "copy": (3, 11)}
SIZES = {"width": 12, "layers": 1, "heads": 3, "batch": 5, "steps": 2, "seeds": 1, "threads": 1}


@pytest.fixture(scope="module")
def recall() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("recall", SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["recall"] = module  # where dataclasses look for their annotations
    threads = torch.get_num_threads()
    spec.loader.exec_module(module)
    yield module
    del sys.modules["recall"]
    torch.set_num_threads(threads)


def words(out: Path, **told: Any) -> list[str]:
    given = {"task": "mqar:2:6,induction:3:7,copy:2:5", "lr": "0.01,0.002", "control": 0, **SIZES, "out": out, **told}
    return [x for name, value in given.items() for x in (f"--{name}", str(value))]


def start(command: list[str], ignoring: bool = False) -> subprocess.Popen[str]:
    """`ignoring`: Ctrl-C, as what a shell starts in the background; whatever these tests have been started by."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUTF8": "1"}
    environment.pop("HLA_BACKEND", None)
    command = [sys.executable, str(SCRIPT), *command]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    handler = signal.SIG_IGN if ignoring else signal.SIG_DFL
    more: dict[str, Any] = {}
    if os.name == "posix":
        more = {"start_new_session": True, "preexec_fn": lambda: signal.signal(signal.SIGINT, handler)}
    return subprocess.Popen(command, text=True, env=environment, **pipes, **more)


def interrupted(process: subprocess.Popen[str], results: Path) -> str:
    """Ctrl-C for the process and its own as soon as it has results; what it says at its end."""
    deadline = time.monotonic() + 100
    while not results.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGINT)
    return process.communicate(timeout=100)[1]


# --- tasks -----------------------------------------------------------------------------------------------------------


def mqar_answer(seen: list[int], items: int, length: int) -> int | None:
    """What follows from the tokens so far alone."""
    if len(seen) <= 2 * items:
        return None
    return dict(zip(seen[: 2 * items : 2], seen[1 : 2 * items : 2], strict=True))[seen[-1]]


def induction_answer(seen: list[int], items: int, length: int) -> int | None:
    for i in range(len(seen) - 2, -1, -1):
        if seen[i] == seen[-1]:
            return seen[i + 1]
    return None


def copy_answer(seen: list[int], items: int, length: int) -> int | None:
    marks = seen.count(17)
    return [x for x in seen if x < 16][marks - 1] if marks else None


@pytest.mark.parametrize("name", TASKS)
def test_answers(recall: ModuleType, name: str) -> None:
    answer = {"mqar": mqar_answer, "induction": induction_answer, "copy": copy_answer}[name]
    items, length = TASKS[name]
    task = recall.TASKS[name]
    rows, labels = task.make(items, length, 41, torch.Generator().manual_seed(3))
    assert rows.shape == labels.shape == (41, length)
    for row, label in zip(rows.tolist(), labels.tolist(), strict=True):
        expected = [answer(row[: t + 1], items, length) for t in range(length)]
        assert label == [-100 if x is None else x for x in expected]
    assert set(rows.flatten().tolist()) <= set(range(task.vocabulary(items)))
    answers = set(labels.flatten().tolist()) - {-100}
    assert len(answers) == task.answers(items)
    again = task.make(items, length, 41, torch.Generator().manual_seed(3))
    assert torch.equal(rows, again[0])
    assert not torch.equal(rows, task.make(items, length, 41, torch.Generator().manual_seed(4))[0])


def test_rows_of_the_tasks(recall: ModuleType) -> None:
    rows = recall.mqar(5, 13, 41, torch.Generator().manual_seed(3))[0]
    for row in rows.tolist():
        keys, asked = row[:10:2], row[10:]
        assert len(set(keys)) == 5
        assert len(set(asked)) == 3
        assert max(keys) < 10 <= min(row[1:10:2])
    assert {row.index(asked) for row in rows.tolist() for asked in row[10:]} == {0, 2, 4, 6, 8}
    rows = recall.copy(3, 11, 200, torch.Generator().manual_seed(3))[0]
    assert {tuple(row[8:]) for row in rows.tolist()} == {(17, 17, 17)}
    assert all(Counter(row)[16] == 5 for row in rows.tolist())
    places = Counter(t for row in rows.tolist() for t in range(8) if row[t] < 16)
    assert set(places) == set(range(8))
    assert max(places.values()) < 2 * min(places.values())


def test_one_answer(recall: ModuleType) -> None:
    labels = torch.tensor([[-100, 3, 3, 0], [-100, -100, 1, 1], [2, 1, 0, -100]])
    assert recall.one_answer(labels) == pytest.approx((2 + 2 + 1) / 8)


# --- models ----------------------------------------------------------------------------------------------------------


def cell(recall: ModuleType, **told: Any) -> Any:
    given = {"task": "mqar", "items": 2, "length": 6, "width": 12, "layers": 2, "heads": 3, "decay": "forget_gate"}
    given |= {"mixer": "hla2", "steps": 3, "batch": 5, "lr": 0.01, "seed": 0, "device": "cpu", "precision": "float32"}
    return recall.Cell(**{**given, "versions": "", **told})


@pytest.mark.parametrize("decay", ["none", "forget_gate"])
def test_all_but_the_operator_is_equal(recall: ModuleType, decay: str) -> None:
    models = {x: recall.build(cell(recall, mixer=x, decay=decay)) for x in recall.MIXERS}
    first = models["softmax"].state_dict()
    tokens = recall.mqar(2, 6, 5, torch.Generator().manual_seed(0))[0]
    outputs = []
    for mixer, model in models.items():
        found = model.state_dict()
        assert found.keys() == first.keys()
        assert all(torch.equal(x, first[name]) for name, x in found.items())
        layers = recall.attentions(model)
        assert len(layers) == 2
        for layer in layers:
            (operator,) = layer.operators
            assert isinstance(operator, recall.SoftmaxOperator) == (mixer == "softmax")
            assert mixer in ("softmax", operator.options.operator)
            assert operator.options.scale == 0.5
            same = dataclasses.replace(layer.options, operators=())
            assert same == dataclasses.replace(recall.attentions(models["hla2"])[0].options, operators=())
            assert (layer.decay is None) == (decay == "none")
        outputs.append(model(tokens))
    for i, x in enumerate(outputs):
        assert all(not torch.allclose(x, y) for y in outputs[:i])


def test_softmax(recall: ModuleType) -> None:
    dice = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, 7, 3, 1, n, generator=dice, dtype=torch.float64) for n in (4, 4, 5))
    logs = -torch.rand(2, 3, 1, 7, generator=dice, dtype=torch.float64)
    attend = recall.SoftmaxOperator(scale=0.7)
    for log_decay in (None, logs):
        o = attend(q, k, v, None, False, log_decay=log_decay, axis=-4, token_mask=None, cu_seqlens=None)
        assert o.shape == v.shape
        for b, t, h in ((0, 0, 0), (1, 3, 2), (1, 6, 1)):
            weights = []
            for s in range(t + 1):
                decayed = 0.0 if log_decay is None else float(log_decay[b, h, 0, s + 1 : t + 1].sum())
                weights.append(float(q[b, t, h, 0] @ k[b, s, h, 0]) * 0.7 + decayed)
            expected = torch.tensor(weights, dtype=torch.float64).softmax(0) @ v[b, : t + 1, h, 0]
            # logits and bias are rounded to float32: a few roundings of numbers below 8
            assert torch.allclose(o[b, t, h, 0], expected, atol=64 * 2**-24, rtol=0)
    for refused in ({"return_state": True}, {"decay": torch.ones(3, 1)}, {"token_mask": torch.ones(2, 1, 1, 7)}):
        with pytest.raises(recall.OptionError, match="whole sequences"):
            attend(q, k, v, axis=-4, **refused)


def test_numbers_kept(recall: ModuleType) -> None:
    sizes = {x: recall.kept(recall.build(cell(recall, mixer=x)), cell(recall, mixer=x)) for x in recall.MIXERS}
    square = 2 * 3 * 4 * 4  # layers, heads, d, dv
    assert sizes == {
        "softmax": 2 * 2 * 12 * 6,
        "linear_attention": square,
        "hla2": 2 * square,
        "ahla": 2 * square,
        "hla3": 3 * square,
    }


def test_one_seed_one_result(recall: ModuleType) -> None:
    def trained(**told: Any) -> dict[str, Any]:
        return {x: y for x, y in recall.train(cell(recall, **told)).items() if x != "seconds"}

    first = trained()
    torch.rand(3)
    assert trained() == first
    assert trained(seed=1)["loss"] != first["loss"]
    assert trained(mixer="softmax")["loss"] != first["loss"]
    assert 0 < first["test"] < 1
    assert first["test"] != first["validation"]


def test_same_batches_for_all(recall: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    predict = recall.predict
    monkeypatch.setattr(
        recall, "predict", lambda model, tokens, of: (seen.append(tokens), predict(model, tokens, of))[1]
    )
    found = []
    for mixer, seed in (("hla2", 0), ("softmax", 0), ("hla2", 1)):
        seen: list[Any] = []
        recall.train(cell(recall, mixer=mixer, seed=seed, steps=2, batch=7))
        assert [len(x) for x in seen] == [7, 7, 256, 256, 256, 256, 256]
        found.append(seen)
    assert all(map(torch.equal, found[0], found[1]))
    assert all(map(torch.equal, found[0][2:], found[2][2:]))
    batches = [x[:7] for x in (*found[0], *found[2][:2])]
    assert all(not torch.equal(x, y) for i, x in enumerate(batches) for y in batches[:i])


def test_softmax_learns(recall: ModuleType) -> None:
    told = {"task": "mqar", "items": 2, "length": 6, "width": 16, "heads": 2, "steps": 120, "batch": 32, "lr": 0.02}
    assert recall.train(cell(recall, mixer="softmax", **told))["test"] > 0.95


def test_no_number_is_no_accuracy(recall: ModuleType) -> None:
    found = recall.train(cell(recall, lr=1e30))
    assert (found["loss"], found["validation"], found["test"]) == (None, 0.0, 0.0)


def test_rate(recall: ModuleType) -> None:
    of = cell(recall, steps=40, lr=0.5)
    rates = [recall.rate(of, step) for step in range(40)]
    assert rates[:5] == pytest.approx([0.125, 0.25, 0.375, 0.5, 0.5])
    assert rates[22] == pytest.approx(0.25)
    assert 0 < rates[-1] < 0.002


# --- the grid --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Every mixer at every task, and what is printed."""
    out = tmp_path_factory.mktemp("whole") / "run"
    process = start(words(out))
    printed, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    return out, printed


def test_files(whole: tuple[Path, str]) -> None:
    out, printed = whole
    files = {"results.json", "table.md"}
    if importlib.util.find_spec("matplotlib"):
        files.add("recall.png")
        assert (out / "recall.png").read_bytes().startswith(b"\x89PNG")
    assert {x.name for x in out.iterdir()} == files
    assert "30/30 " in printed
    table = (out / "table.md").read_text(encoding="utf-8")
    assert table in printed
    found = json.loads((out / "results.json").read_text())
    assert found["valid"] is True
    assert [x["task"] for x in found["groups"]] == ["mqar:2:6", "induction:3:7", "copy:2:5"]
    assert [x["chance"] for x in found["groups"]] == [1 / 4, 1 / 3, 1 / 16]
    for group in found["groups"]:
        assert [x["mixer"] for x in group["rows"]] == ["softmax", "linear_attention", "hla2", "ahla", "hla3"]
        assert len({x["parameters"] for x in group["rows"]}) == 1
        for x in group["rows"]:
            assert f"| `{group['task']}` | 3 × 4 | forget_gate | {x['mixer']} | {x['test']:.3f} (" in table
    assert len(found["cells"]) == 30


def test_the_same_in_this_process(recall: ModuleType, whole: tuple[Path, str]) -> None:
    found = json.loads((whole[0] / "results.json").read_text())["cells"]
    same(recall, next(x for x in found if (x["task"], x["mixer"], x["lr"]) == ("copy", "ahla", 0.002)))


def same(recall: ModuleType, entry: dict[str, Any]) -> None:
    """Fails unless this process finds what another one did."""
    again = recall.train(recall.Cell(**{x.name: entry[x.name] for x in dataclasses.fields(recall.Cell)}))
    assert {**again, "seconds": 0} == {**entry, "seconds": 0}


def test_finished_cells_are_read(
    recall: ModuleType,
    whole: tuple[Path, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole[0], out)
    before = (out / "results.json").read_text()
    trained: list[Any] = []
    train = recall.train
    monkeypatch.setattr(recall, "train", lambda of: (trained.append(of), train(of))[1])
    assert recall.main(words(out)) == 0
    assert trained == []
    assert (out / "results.json").read_text() == before
    assert "30 of 30 cells are there already" in capsys.readouterr().out

    assert recall.main(words(out, task="copy:2:5", mixer="softmax,hla2", lr="0.01,0.05")) == 0
    assert [(x.mixer, x.lr) for x in trained] == [("softmax", 0.05), ("hla2", 0.05)]
    found = json.loads((out / "results.json").read_text())
    assert len(found["cells"]) == 32
    assert [x["mixer"] for x in found["groups"][0]["rows"]] == ["softmax", "hla2"]
    trained.clear()
    for changed in ({"decay": "none"}, {"steps": 1}, {"width": 24}, {"batch": 4}, {"seeds": 2}):
        more = {"task": "copy:2:5", "mixer": "softmax", "lr": "0.01", **changed}
        assert recall.main(words(out, **more)) == 0
    assert len(trained) == 5
    assert trained[-1].seed == 1


def test_a_failed_control_is_invalid(
    recall: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few = {"task": "mqar:2:6,copy:2:5", "mixer": "softmax,ahla", "lr": "0.01"}
    train = recall.train
    monkeypatch.setattr(
        recall, "train", lambda of: {**train(of), "test": 0.94 if (of.task, of.mixer) == ("mqar", "softmax") else 0.96}
    )
    status = recall.main(words(tmp_path, **few, control=0.95))
    said = capsys.readouterr()
    assert status == 1
    assert said.err == "INVALID: mqar:2:6, 3 heads, decay forget_gate: softmax reaches 0.940, below 0.95\n"
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["valid"] is False
    assert [(x["control"], x["valid"]) for x in found["groups"]] == [(0.94, False), (0.96, True)]
    table = [x for x in (tmp_path / "table.md").read_text(encoding="utf-8").splitlines() if x.startswith("| `")]
    assert [x.split("|")[-2].strip() for x in table] == ["INVALID", "INVALID", "control", ""]

    assert recall.main(words(tmp_path, **few, control=0.94)) == 0
    few["mixer"] = "ahla"
    assert recall.main(words(tmp_path, **few)) == 1
    assert capsys.readouterr().err.count("there is no control") == 2
    assert json.loads((tmp_path / "results.json").read_text())["groups"][0]["control"] is None


def test_best_rate_by_validation(recall: ModuleType, tmp_path: Path) -> None:
    results = recall.Results(tmp_path)
    accuracies = {(0.1, 0): (0.5, 0.9), (0.1, 1): (0.6, 0.8), (0.3, 0): (0.4, 0.3), (0.3, 1): (0.9, 0.7)}
    grid = []
    for (lr, seed), (validation, test) in accuracies.items():
        grid.append(cell(recall, mixer="softmax", lr=lr, seed=seed))
        more = {"validation": validation, "test": test, "parameters": 7, "kept": 5, "seconds": 1.0}
        results.cells[grid[-1]] = {**dataclasses.asdict(grid[-1]), **more}
    (group,) = recall.summary(grid, results, 0.5)
    (row,) = group["rows"]
    assert (row["lr"], row["test"], row["least"], row["most"]) == (0.3, 0.5, 0.3, 0.7)
    assert row["validation"] == pytest.approx({"0.1": 0.55, "0.3": 0.65})
    assert (group["control"], group["valid"]) == (0.5, True)


@pytest.mark.skipif(os.name != "posix", reason="signals to a group of processes")
def test_in_the_background_nothing_is_interrupted(tmp_path: Path) -> None:
    command = words(tmp_path, task="mqar:2:6", mixer="softmax", lr=0.01, seeds=4, steps=20, threads=2)
    process = start(command, ignoring=True)
    err = interrupted(process, tmp_path / "results.json")
    assert process.returncode == 0, err
    assert len(json.loads((tmp_path / "results.json").read_text())["cells"]) == 4


def test_interrupt_that_reaches_the_processes_first(
    recall: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The pool is broken, and Ctrl-C comes while the example waits for what broke it."""

    def raising(error: type[BaseException]) -> Callable[..., None]:
        def function(*_: Any) -> None:
            raise error

        return function

    monkeypatch.setattr(recall, "run", raising(BrokenProcessPool))
    command = words(tmp_path, task="mqar:2:6", mixer="softmax", lr=0.01, seeds=1, steps=20)
    with pytest.raises(SystemExit, match="a process was killed"):
        recall.main(command)
    monkeypatch.setattr(recall.time, "sleep", raising(KeyboardInterrupt))
    assert recall.main(command) == 130
    assert capsys.readouterr().err.startswith("stopped")


@pytest.mark.skipif(os.name != "posix", reason="signals to a group of processes")
def test_two_processes_interrupt_and_continue(
    recall: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = words(tmp_path, task="mqar:2:6", mixer="softmax", lr=0.01, seeds=40, steps=20, threads=2)
    process, path = start(command), tmp_path / "results.json"
    err = interrupted(process, path)
    assert process.returncode == 130, err
    assert err == "stopped; what is finished is kept, and the same command continues\n"
    found = json.loads(path.read_text())["cells"]
    assert 1 <= len(found) < 40
    same(recall, found[0])
    few = words(tmp_path, task="mqar:2:6", mixer="softmax", lr=0.01, seeds=max(x["seed"] for x in found) + 2, steps=20)
    assert recall.main(few) == 0
    assert f"{len(found)} of " in capsys.readouterr().out
    assert json.loads(path.read_text())["cells"][: len(found)] == found


def test_a_killed_process(recall: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: Any) -> Iterator[Any]:
        yield recall.train(todo[0])
        raise recall.BrokenProcessPool

    command = words(tmp_path, task="copy:2:5", mixer="softmax")
    todo = recall.cells(recall.arguments(command))
    monkeypatch.setattr(recall, "finished", killed)
    assert refused(recall, command).startswith("error: a process was killed")
    assert list(recall.Results(tmp_path).cells) == todo[:1]


def test_bfloat16_on_a_terminal(
    recall: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    find_spec = recall.find_spec
    monkeypatch.setattr(recall, "find_spec", lambda name: None if name == "matplotlib" else find_spec(name))
    seen = []
    predict = recall.predict
    model_dtypes = []

    def noted(model: Any, tokens: Any, of: Any) -> Any:
        hook = model.register_forward_hook(lambda _, given, made: model_dtypes.append(made.dtype))
        seen.append(predict(model, tokens, of))
        hook.remove()
        return seen[-1]

    monkeypatch.setattr(recall, "predict", noted)
    few = {"task": "copy:2:5", "mixer": "softmax,hla3", "lr": "0.01", "steps": 1}
    assert recall.main(words(tmp_path, **few, precision="bfloat16")) == 0
    assert set(model_dtypes) == {torch.bfloat16}
    assert {x.dtype for x in seen} == {torch.float32}
    printed = capsys.readouterr().out
    assert "no picture: it needs matplotlib" in printed
    if importlib.util.find_spec("rich"):
        assert "2/2" in printed
        assert "1/2 copy" not in printed, "a line, not a bar"
    assert not (tmp_path / "recall.png").exists()


def test_full(recall: ModuleType) -> None:
    short, full = (recall.cells(recall.arguments(x)) for x in ([], ["--full"]))
    assert {x.mixer for x in short} == {x.mixer for x in full} == set(recall.MIXERS)
    for name in ("items", "heads", "decay", "lr", "seed", "length"):
        assert len({getattr(x, name) for x in full}) > len({getattr(x, name) for x in short})
    assert len({(x.lr, x.seed) for x in short}) >= 4
    assert len(set(short)) == len(short)
    told = recall.cells(recall.arguments(["--full", "--steps", "7", "--task", "copy:2:9"]))
    assert {(x.steps, x.task, x.items, x.length) for x in told} == {(7, "copy", 2, 9)}


def refused(recall: ModuleType, command: list[str]) -> str:
    with pytest.raises(SystemExit) as found:
        recall.main(command)
    assert isinstance(found.value.code, str), "an exit without words"
    return found.value.code


def test_options_are_refused(recall: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    for task in ("sort:2:6", "mqar:2", "mqar:0:6", "mqar:-2:6", "mqar:a:6"):
        assert refused(recall, words(out, task=task)).startswith(f"error: --task {task}: expected NAME:ITEMS:LENGTH")
    assert refused(recall, words(out, task="mqar:2:7")) == "error: --task mqar:2:7: 2 items need a length from 5 to 6"
    assert "from 4 to" in refused(recall, words(out, task="copy:2:3"))
    assert "from 5 to" in refused(recall, words(out, task="induction:3:4"))
    assert refused(recall, words(out, mixer="hla2,lstm")).startswith("error: --mixer lstm: expected some of softmax")
    assert refused(recall, words(out, decay="some")) == "error: --decay some: expected some of none, forget_gate"
    for lr in ("0", "a", "", "-1", "nan", "inf"):
        assert refused(recall, words(out, lr=lr)) == f"error: --lr {lr}: expected numbers > 0 with commas between"
    assert "heads" in refused(recall, words(out, heads=5))
    assert not out.exists()
    out.touch()
    assert refused(recall, words(out)).startswith(f"error: --out {out}: ")
    with pytest.raises(SystemExit, match="2"):
        recall.main(words(out, steps=0))
    assert "argument --steps: 0 is not at least 1" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "[]", '{"cells": [{"task": "mqar"}]}', "{}", '{"cells": 3}'])
def test_other_results_are_refused(recall: ModuleType, tmp_path: Path, text: str) -> None:
    (tmp_path / "results.json").write_text(text)
    assert f"{tmp_path / 'results.json'} is no result of this program" in refused(recall, words(tmp_path))
    assert (tmp_path / "results.json").read_text() == text

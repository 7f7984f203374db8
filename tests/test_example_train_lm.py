"""examples/train_lm.py: a run from text to table, killed and continued, and what it refuses."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from libraries import only

torch: Any = only("torch")

from hla.models import Decoder  # noqa: E402

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "examples" / "train_lm.py"
STEPS, SAVED_EVERY = 60, 5
SIZES = {"width": 16, "layers": 1, "heads": 2, "batch": 4, "context": 24, "validation-rows": 6, "sample": 17}
OPTIONS = {**SIZES, "steps": STEPS, "checkpoint-every": SAVED_EVERY, "validate-every": 20, "lr": 0.02, "threads": 1}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(b"".join(b"%d times %d is %d.\n" % (i, i + 7, i * (i + 7)) for i in range(1000)))
    return path


def words(text: Path, out: Path, **told: Any) -> list[str]:
    options = {**OPTIONS, "dropout": 0.1, "text": text, "out": out, **told}
    return [x for name, value in options.items() for x in (f"--{name.replace('_', '-')}", str(value))]


def start(command: list[str]) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUTF8": "1"}
    environment.pop("HLA_BACKEND", None)
    command = [sys.executable, str(SCRIPT), *command]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def finish(command: list[str]) -> str:
    process = start(command)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    return out


def lines(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A comparison that nothing interrupts, and what it prints."""
    out = tmp_path_factory.mktemp("whole") / "run"
    return out, finish(words(text, out, mixer="hla2,softmax"))


# --- a run -----------------------------------------------------------------------------------------------------------


def test_loss_falls(whole: tuple[Path, str]) -> None:
    out, printed = whole
    unigram = json.loads((out / "results.json").read_text())["unigram_bits_per_byte"]
    for mixer in ("hla2", "softmax"):
        log = lines(out / mixer / "log.jsonl")
        assert [x["step"] for x in log] == list(range(1, STEPS + 1))
        assert [x["step"] for x in log if "validation" in x] == [20, 40, 60]
        assert log[0]["training"] > 6
        assert log[-1]["validation"] < unigram < log[0]["training"]
        assert f"{mixer} 60/60: training {log[-1]['training']:.3f}, validation {log[-1]['validation']:.3f}" in printed


def test_files(whole: tuple[Path, str]) -> None:
    out, _ = whole
    expected = {"hla2", "softmax", "results.json", "table.md"}
    if importlib.util.find_spec("matplotlib"):
        expected.add("loss.png")
        assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert {x.name for x in out.iterdir()} == expected
    assert {x.name for x in (out / "hla2").iterdir()} == {".lock", "log.jsonl", f"step-{STEPS:08d}"}


def test_table(whole: tuple[Path, str]) -> None:
    out, printed = whole
    table = (out / "table.md").read_text()
    assert table in printed
    found = json.loads((out / "results.json").read_text())
    rows = {x["mixer"]: x for x in found["rows"]}
    assert list(rows) == ["hla2", "softmax"]
    counts = []
    for mixer, x in rows.items():
        model = Decoder.load(out / mixer / f"step-{STEPS:08d}" / "model.safetensors")
        counts.append(sum(p.numel() for p in model.parameters()))
        assert x["parameters"] == counts[-1]
        assert x["mlp"] == model.config.inner
        assert x["bits_per_byte"] == lines(out / mixer / "log.jsonl")[-1]["validation"]
        cache = 2 * 2 * SIZES["layers"] * SIZES["width"]
        assert x["kv_cache_bytes"] == {"1k": cache * 1024, "64k": cache * 65536}
        own = model.init_state(1).nbytes
        assert x["state_bytes"] == (x["kv_cache_bytes"] if mixer == "softmax" else {"1k": own, "64k": own})
        assert f"| {mixer} | {x['bits_per_byte']:.3f} | {counts[-1]} |" in table
    assert abs(counts[1] - counts[0]) <= 0.01 * counts[0]
    assert rows["hla2"]["mlp"] != rows["softmax"]["mlp"]


def test_sample(whole: tuple[Path, str]) -> None:
    printed = whole[1]
    assert re.search(r"--- hla2 ---\ndef __init__\(self, .", printed)
    assert re.search(r"state after 36 tokens: [\d.]+ (KiB|B), of this size at any length", printed)
    assert "state after 36 tokens: 4.8 KiB, keys and values" in printed
    assert "KV cache in 16 bits: 2.2 KiB at 36, 64.0 KiB at 1k, 4.0 MiB at 64k tokens" in printed


def test_same_batches_for_all(text: Path) -> None:
    script = load()
    data, other = script.Text(text, 24), script.Text(text, 24)
    drawn = [x.batch(4, torch.Generator().manual_seed(3)) for x in (data, other)]
    assert torch.equal(*drawn)
    assert drawn[0].shape == (4, 25)
    assert int(drawn[0].max()) < 128
    counts = torch.bincount(torch.tensor(list(text.read_bytes()))).double()
    shares = counts[counts > 0] / counts.sum()
    assert data.unigram == pytest.approx(-float((shares * shares.log2()).sum()), rel=1e-5)
    held_out = data.validation(6)
    assert bytes(held_out[0].tolist()) == text.read_bytes()[len(data.train) :][:25]
    assert bytes(held_out[-1].tolist()) == text.read_bytes()[-25:]


# --- ended and continued ---------------------------------------------------------------------------------------------


def ended(command: list[str], log: Path, count: int, end: Any) -> tuple[int, str]:
    """Start it, end it as soon as the log has so many lines; exit status and stderr."""
    process, deadline = start(command), time.monotonic() + 100
    before = log.stat().st_mtime_ns if log.exists() else 0
    while not (log.exists() and log.stat().st_mtime_ns > before and log.read_bytes().count(b"\n") >= count):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    end(process)
    return process.wait(timeout=100), process.communicate()[1]


def test_kill_interrupt_and_resume(whole: tuple[Path, str], text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    command, log = words(text, out, mixer="hla2"), out / "hla2" / "log.jsonl"
    status, _ = ended(command, log, 13, lambda process: process.kill())
    assert status != 0
    assert 13 <= len(log.read_bytes().splitlines()) < STEPS
    newest = max(x.name for x in log.parent.glob("step-*"))
    assert int(newest[5:]) % SAVED_EVERY == 0
    if os.name == "posix":
        resumed = [*command, "--resume"]
        status, said = ended(resumed, log, 33, lambda process: process.send_signal(signal.SIGINT))
        assert status == 130, said
        stopped = re.fullmatch(r"stopped after step (\d+); --resume continues\n", said)
        assert stopped, said
        assert 33 <= int(stopped[1]) < STEPS
        assert [x.name for x in log.parent.glob("step-*")] == [f"step-{int(stopped[1]):08d}"]
        newest = f"step-{int(stopped[1]):08d}"
    printed = finish([*command, "--resume"])
    assert f"hla2: continues after step {int(newest[5:])}\n" in printed
    last = Path("hla2") / f"step-{STEPS:08d}" / "model.safetensors"
    assert lines(log) == lines(whole[0] / "hla2" / "log.jsonl")
    found, expected = (Decoder.load(x / last).state_dict() for x in (out, whole[0]))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


# --- in this process -------------------------------------------------------------------------------------------------


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_lm", SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_bfloat16_on_a_terminal(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    script = load()
    find_spec = script.find_spec
    monkeypatch.setattr(script, "find_spec", lambda name: None if name == "matplotlib" else find_spec(name))
    seen = []
    loss = script.functional.cross_entropy
    monkeypatch.setattr(script.functional, "cross_entropy", lambda x, y: (seen.append(x), loss(x, y))[1])
    low = []
    monkeypatch.setattr(Decoder, "__call__", lambda self, *a, **k: noted(low, self, a, k))
    script.main(words(text, tmp_path / "run", steps=3, precision="bfloat16"))
    assert low[0] == torch.bfloat16
    assert seen[0].dtype == torch.float32
    printed = capsys.readouterr().out
    assert "no picture of the losses: it needs matplotlib" in printed
    assert "3/3" in printed
    if importlib.util.find_spec("rich"):
        assert "hla2 3/3: training" not in printed, "a line, not a bar"
    assert not (tmp_path / "run" / "loss.png").exists()


def noted(dtypes: list[Any], model: Any, arguments: Any, named: Any) -> Any:
    result = torch.nn.Module.__call__(model, *arguments, **named)
    dtypes.append((result[0] if isinstance(result, tuple) else result).dtype)
    return result


def refused(command: list[str]) -> str:
    with pytest.raises(SystemExit) as found:
        load().main(command)
    assert isinstance(found.value.code, str), "an exit without words"
    return found.value.code


def test_text_is_refused(text: Path, tmp_path: Path) -> None:
    missing = tmp_path / "absent.txt"
    assert refused(words(missing, tmp_path / "run")) == f"error: --text {missing}: No such file or directory"
    short = tmp_path / "short.txt"
    for content in (b"", 499 * b"x"):
        short.write_bytes(content)
        expected = f"error: {short} has {len(content)} bytes; --context 24 needs 500 at least"
        assert refused(words(short, tmp_path / "run")) == expected
    assert not (tmp_path / "run").exists()


def test_options_are_refused(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "layers: expected one of" in refused(words(text, tmp_path / "run", mixer="hla2,lstm"))
    unequal = refused(words(text, tmp_path / "run", mixer="softmax,hla2", width=2, heads=1, layers=20))
    assert unequal.startswith("error: no MLP makes hla2 as large as softmax")
    with pytest.raises(SystemExit, match="2"):
        load().main(words(text, tmp_path / "run", steps=0))
    assert "argument --steps: 0 is no whole number of at least 1" in capsys.readouterr().err
    for name, word, said in (
        ("prompt", "", "it needs a byte to begin with"),
        ("temperature", "-1", "-1 is not a finite number of at least 0"),
        ("lr", "nan", "nan is not a finite number of at least 0"),
        ("lr", "fast", "fast is not a finite number of at least 0"),
        ("batch", "2.5", "2.5 is no whole number of at least 1"),
    ):
        with pytest.raises(SystemExit, match="2"):  # not after the training
            load().main(words(text, tmp_path / "run", **{name: word}))
        assert f"argument --{name}: {said}" in capsys.readouterr().err
    handler = signal.getsignal(signal.SIGINT)
    assert "the loss is" in refused(words(text, tmp_path / "run", lr="1e30"))
    assert signal.getsignal(signal.SIGINT) is handler


def test_folders_are_refused(text: Path, tmp_path: Path) -> None:
    """What is no folder, and one in which another process trains: that one's log stays as it is."""
    assert refused(words(text, text)).startswith(f"error: --out {text}: ")
    fcntl = pytest.importorskip("fcntl")
    (tmp_path / "hla2").mkdir()
    log = tmp_path / "hla2" / "log.jsonl"
    log.write_text("of another")
    (tmp_path / "hla2" / "step-00000003").mkdir()  # half read, half removed: not looked at
    handler = signal.getsignal(signal.SIGINT)
    with (log.parent / ".lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        said = f"error: another process trains in {log.parent}; wait for it, or choose another --out"
        assert refused([*words(text, tmp_path, mixer="hla2"), "--resume"]) == said
    assert signal.getsignal(signal.SIGINT) is handler
    assert log.read_text() == "of another"


def test_what_is_not_there(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, mistyped = load(), tmp_path / "rnu"
    monkeypatch.setattr(script.torch.cuda, "is_available", lambda: False)
    for more, says in (
        (["--resume"], f"argument --resume: there is no folder {mistyped}; check --out, or start without --resume"),
        (["--device", "cuda"], "argument --device: this PyTorch sees no GPU; use cpu"),
    ):
        with pytest.raises(SystemExit, match="2"):
            script.main([*words(text, mistyped), *more])
        assert says in capsys.readouterr().err
        assert not mistyped.exists()


def test_resume_without_a_checkpoint(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = load()
    data = script.Text(text, 24)
    for more, said in ((["--resume"], f"hla2: no checkpoint in {tmp_path / 'hla2'}; starts at step 0\n"), ([], "")):
        options = script.arguments([*words(text, tmp_path), *more])
        run = script.Run("hla2", script.equal_configs(options)["hla2"], options, data)
        assert run.step == 0
        assert capsys.readouterr().out == said


def test_checkpoints_are_refused(whole: tuple[Path, str], text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole[0], out)
    command = words(text, out, mixer="hla2")
    assert refused(command).startswith(f"error: {out / 'hla2'} holds a run; continue it with --resume")

    other = refused([*words(text, out, mixer="hla2", width=24, seed=5), "--resume"])
    assert "is of another run" in other
    for line in ("  seed was 0, is 5", "  width was 16, is 24"):
        assert line in other.splitlines()
    more = tmp_path / "more.txt"
    more.write_bytes(text.read_bytes() + b"more")
    assert re.search(r"another --out:\n  text was \w{16}, is \w{16}$", refused([*words(more, out), "--resume"]))

    saved = out / "hla2" / f"step-{STEPS:08d}" / "training.pt"
    for content in (b"", saved.read_bytes()[:1000], b"not a checkpoint"):
        saved.write_bytes(content)
        assert f"{saved.parent} is no checkpoint of this program" in refused([*command, "--resume"])

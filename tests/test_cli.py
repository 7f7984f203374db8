"""The command line: what it prints where, its exit codes, and that a wrong backend does not pass."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hla
from commands import in_a_terminal, measured, one_object, run
from faults import fault_in_the_state, fault_late, fault_raises
from hla.backends import Backend, BackendSpec, registered
from hla.cli import main, report, text

# --- info -------------------------------------------------------------------------------------------------------


def test_info() -> None:
    done = run("info", "--json")
    assert done.returncode == 0
    found = one_object(done.stdout)
    assert found["ok"] is True
    assert found["versions"]["hla"] == hla.__version__
    assert found["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    rows = {row["backend"]: row for row in found["rows"]}
    assert rows["numpy"]["available"]
    for row in rows.values():
        assert row["available"] or row["reason"]
    assert rows.keys() == registered().keys()


def test_info_says_how_to_install_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    spec = BackendSpec(name="absent", families=("numpy",), requires=("no_such_package_hla",), extra="torch")
    hla.register_backend(Backend(spec=spec, load=registered()["numpy"].load))
    try:
        assert main(["info"]) == 0
        assert 'pip install "hla[torch]"' in capsys.readouterr().out
        assert main(["info", "--json"]) == 0
        rows = {row["backend"]: row for row in one_object(capsys.readouterr().out)["rows"]}
        assert rows["absent"]["install"] == 'pip install "hla[torch]"'
        assert not rows["absent"]["available"]
    finally:
        hla.backends.unregister_backend("absent")


def test_info_in_a_table() -> None:
    done = run("info")
    assert done.returncode == 0
    assert "numpy" in done.stdout
    assert hla.__version__ in done.stdout


def test_version() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"hla {hla.__version__}\n")


@pytest.mark.parametrize("arguments", [[], ["verfy"], ["demo", "--byts", "3"], ["bench", "--heads", "0"]])
def test_misuse(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2
    assert "usage: hla" in capsys.readouterr().err


# --- verify -----------------------------------------------------------------------------------------------------


@in_a_terminal
def test_verify_quick() -> None:
    done = run("verify", "--quick", "--json", "--backend", "numpy")
    found = measured(done)
    rows = found["rows"]
    assert {row["backend"] for row in rows} == {"numpy"}
    assert {row["form"] for row in rows} == {"recurrent", "scan", "chunkwise", "parallel"}
    assert {"linear_attention", "hla2", "ahla", "hla3", "higher_order"} == {row["operator"] for row in rows}
    assert {1, 2, 3, 4, 5} <= {row["order"] for row in rows if row["operator"] == "higher_order"}
    for row in rows:
        assert row["status"] == "ok" or (row["status"] == "unsupported" and row["note"]), row
        assert row["status"] != "ok" or row["error"] <= row["budget"]
    assert found["checks"] == sum(row["status"] == "ok" for row in rows)
    assert "numpy" in {row["library"] for row in rows}
    assert done.stderr  # the progress bar


# --- demo -------------------------------------------------------------------------------------------------------


@in_a_terminal
def test_demo() -> None:
    done = run("demo", "--json", "--bytes", "1409", "--backend", "numpy")
    found = measured(done)
    assert found["bytes"] == 1409
    assert found["source"] == "pydoc_data.topics"
    assert [(row["operator"], row["order"]) for row in found["rows"]] == [
        ("linear_attention", None),
        ("hla2", None),
        ("ahla", None),
        ("hla3", None),
        ("higher_order", 4),
    ]
    for row in found["rows"]:
        assert row["backend"] == "numpy"
        # every byte of both heads, in each form
        assert row["values"] >= 4 * 1409 * 2 * 16
        assert row["forms"].keys() == {"chunkwise", "recurrent", "scan", "parallel"}
        assert row["state_bytes"] < row["kv_cache_bytes"]
        assert row["prefill_tokens_per_second"] > 0
        assert row["decode_tokens_per_second"] > 0
        for error in (
            *row["forms"].values(),
            row["chunkwise_recurrent"],
            row["stream_whole"],
            row["stream_definition"],
        ):
            assert 0 <= error <= 2 * row["budget"]
    assert found["values"] == sum(row["values"] for row in found["rows"])


@in_a_terminal
def test_demo_of_a_file_says_how_many_values(tmp_path: Path) -> None:
    file = tmp_path / "gedicht.txt"
    file.write_text("Wer reitet so spät durch Nacht und Wind? " * 3, encoding="utf-8")
    done = run("demo", str(file), "--backend", "numpy")
    assert done.returncode == 0, done.stderr
    size = len(file.read_bytes())
    assert f"{size:,} bytes of" in " ".join(done.stdout.split())
    assert "values compared in" in done.stdout


def test_the_text_is_long_enough() -> None:
    assert len(text.read_text(None).data) >= 65_536


def test_the_embedding_is_the_same_every_time() -> None:
    first, second = (text.embed(b"abab", heads=3, d=5, dv=7) for _ in range(2))
    for x, y in zip(first, second, strict=True):
        assert x.dtype == np.float32
        assert np.array_equal(x, y)
    assert first.q.shape == (3, 4, 5)
    assert first.v.shape == (3, 4, 7)
    assert np.allclose(np.linalg.norm(first.k, axis=-1), 1)
    assert np.array_equal(first.q[:, 1], first.q[:, 3])  # position-free: the same two bytes


@in_a_terminal
def test_bad_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty, latin = tmp_path / "empty.txt", tmp_path / "latin.txt"
    empty.write_bytes(b"")
    latin.write_bytes("spät".encode("latin-1"))
    reasons = {str(tmp_path / "none.txt"): "no such file", str(tmp_path): "directory", str(empty): "empty"}
    for file, reason in (reasons | {str(latin): "byte 2 is not UTF-8", "a\0b": "null"}).items():
        assert main(["demo", file]) == 2
        captured = capsys.readouterr()
        assert reason in captured.err
        assert "expected a readable UTF-8 text file" in captured.err
        assert captured.out == ""


@in_a_terminal
def test_bad_file_in_a_process_of_its_own(tmp_path: Path) -> None:
    done = run("demo", str(tmp_path / "none.txt"), "--json")
    assert done.returncode == 2
    found = one_object(done.stdout)
    assert found["ok"] is False
    assert found["checks"] == 0
    assert "Traceback" not in done.stderr


@in_a_terminal
def test_bytes_below_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--bytes", "0"]) == 2
    assert "--bytes" in capsys.readouterr().err


# --- a wrong backend does not pass -----------------------------------------------------------------------------


@pytest.fixture(params=[fault_late, fault_in_the_state, fault_raises])
def broken(request: pytest.FixtureRequest) -> Any:
    spec = BackendSpec(
        name="broken", families=("numpy",), forms=("recurrent", "scan", "chunkwise", "parallel"), priority=-1
    )
    hla.register_backend(Backend(spec=spec, load=lambda operator: request.param))
    yield request.param
    hla.backends.unregister_backend("broken")


@in_a_terminal
def test_verify_finds_a_planted_fault(broken: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--quick", "--json", "--backend", "broken"]) == 1
    found = one_object(capsys.readouterr().out)
    assert found["ok"] is False
    assert found["checks"] > 0
    failed = [row for row in found["rows"] if row["status"] == "failed"]
    assert failed
    assert len(failed) == found["failed"]
    assert all(row["backend"] == "broken" and row["note"] for row in failed)


@in_a_terminal
def test_demo_finds_a_planted_fault(broken: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--bytes", "401", "--json", "--backend", "broken"]) == 1
    found = one_object(capsys.readouterr().out)
    assert found["ok"] is False
    assert not any(row["ok"] for row in found["rows"])
    assert all(row["notes"] for row in found["rows"])


@in_a_terminal
def test_the_table_shows_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    spec = BackendSpec(name="broken", families=("numpy",), priority=-1)
    hla.register_backend(Backend(spec=spec, load=lambda operator: fault_raises))
    try:
        assert main(["verify", "--quick", "--backend", "broken"]) == 1
    finally:
        hla.backends.unregister_backend("broken")
    assert "RuntimeError: planted" in capsys.readouterr().out


# --- what is missing --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("package", ["rich", "numpy"])
@pytest.mark.parametrize("command", ["verify", "bench", "demo"])
def test_missing_packages(
    package: str, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "_found", lambda name: name != package)
    assert main([command]) != 0
    assert 'pip install "hla[cli]"' in capsys.readouterr().err


def test_info_without_rich(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(report, "_found", lambda name: name != "rich")
    assert main(["info"]) == 0
    assert "numpy" in capsys.readouterr().out


@in_a_terminal
def test_prints_of_libraries_do_not_reach_stdout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def chatty() -> list[str]:
        print("some library says hello")
        return ["numpy"]

    monkeypatch.setattr(hla.backends, "available", chatty)
    assert main(["info", "--json"]) == 0
    captured = capsys.readouterr()
    one_object(captured.out)
    assert "hello" in captured.err

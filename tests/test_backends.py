"""The registry and the choice: who runs a call, who decided, and what is said when nobody can.

Most tests use loop-back backends: a plain runner over `Problem` that records that it ran.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hla
from hla import backends
from hla.backends import Backend, BackendSpec, Call, Verdict
from hla.errors import BackendNotInstalledError, BackendUnsupportedError, UnknownBackendError
from libraries import Library

TOKENS, HEADS, D, DV = 11, 3, 5, 7


@pytest.fixture(autouse=True)
def untouched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No choice made before, none left behind, and the registry as it was."""
    monkeypatch.delenv("HLA_BACKEND", raising=False)
    nothing = {"context": None, "global": None}
    backends.restore(nothing)
    before = set(backends.registered())
    yield
    backends.restore(nothing)
    for name in set(backends.registered()) - before:
        backends.unregister_backend(name)


class LoopBack:
    """A backend that computes linear attention from all pairs, plainly, and remembers each call."""

    def __init__(self, name: str, **spec: Any) -> None:
        self.ran: list[tuple[int, ...]] = []
        self.loaded: list[str] = []
        self.asked: list[Call] = []
        given = {"families": ("*",), "forms": ("chunkwise", "parallel", "recurrent"), "priority": -50, **spec}
        self.spec = BackendSpec(name=name, **given)

    def load(self, operator: str) -> Any:
        self.loaded.append(operator)
        return self.run

    def run(self, problem: Any) -> Any:
        assert problem.program.spec.operator == "linear_attention"
        xp = problem.xp
        self.ran.append(tuple(problem.v.shape))
        q, k, v = (xp.astype(x, problem.dtype) for x in (problem.q, problem.k, problem.v))
        scores = xp.tril(xp.matmul(q * problem.scale, xp.matrix_transpose(k)))
        state = xp.matmul(xp.matrix_transpose(k), v)
        return xp.astype(xp.matmul(scores, v), problem.v.dtype), {"P": state}

    def supports(self, call: Call) -> Verdict:
        self.asked.append(call)
        return Verdict(call.operator == "linear_attention", "linear attention only")

    def register(self, **more: Any) -> LoopBack:
        functions = {"supports": self.supports, **more}
        hla.register_backend(Backend(spec=self.spec, load=self.load, **functions))
        return self


def inputs(lib: Library | None = None, *, batch: tuple[int, ...] = (HEADS,), tokens: int = TOKENS) -> list[Any]:
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(*batch, tokens, size)) for size in (D, D, DV)]
    return arrays if lib is None else [lib.asarray(x) for x in arrays]


def who(**options: Any) -> tuple[str, str]:
    """(backend, source) of a plain call."""
    plan = hla.explain("linear_attention", *inputs(), **options)
    return plan.backend, plan.source


# --- a backend of one's own ------------------------------------------------------------------------------------------


def test_a_named_backend_runs(lib: Library) -> None:
    """It and no other: it says so, and the result is its own."""
    mine = LoopBack("mine").register()
    q, k, v = inputs(lib)
    got, state = hla.linear_attention(q, k, v, scale=0.5, backend="mine", return_state=True)
    assert mine.ran == [(HEADS, TOKENS, DV)]
    assert mine.loaded == ["linear_attention"]
    expected, final = hla.linear_attention(q, k, v, scale=0.5, backend="numpy", return_state=True)
    np.testing.assert_allclose(lib.numpy(got), lib.numpy(expected), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(lib.numpy(state[0]), lib.numpy(final[0]), rtol=1e-12, atol=1e-12)
    hla.linear_attention(q, k, v, backend="mine")
    assert len(mine.ran) == 2
    assert mine.loaded == ["linear_attention"], "loaded once"
    hla.linear_attention(q, k, v)
    assert len(mine.ran) == 2, "not chosen, not run"


def test_automatic_takes_the_highest_priority() -> None:
    low, high = LoopBack("low", priority=1).register(), LoopBack("high", priority=2).register()
    hla.linear_attention(*inputs())
    assert (len(low.ran), len(high.ran)) == (0, 1)
    assert hla.explain("linear_attention", *inputs()).source == "auto"
    backends.unregister_backend("high")
    hla.linear_attention(*inputs())
    assert (len(low.ran), len(high.ran)) == (1, 1), "the registry changed, so the choice is made anew"
    assert who() == ("low", "auto")


def test_automatic_passes_over_what_cannot_run() -> None:
    mine = LoopBack("mine", priority=9).register()
    hla.ahla(*inputs())
    assert not mine.ran
    assert hla.explain("ahla", *inputs()).backend == "numpy"
    assert mine.asked, "it was asked"


def test_automatic_keeps_to_the_arrays_own_library(lib: Library) -> None:
    other = "torch" if lib.name != "torch" else "numpy"
    LoopBack("foreign", families=(other,), priority=19).register()
    own = LoopBack("own", families=(lib.family,), priority=18).register()
    hla.linear_attention(*inputs(lib))
    assert len(own.ran) == 1
    plan = hla.explain("linear_attention", *inputs(lib))
    reasons = {c.name: (c.ok, c.reason) for c in plan.candidates}
    assert reasons["foreign"] == (False, f"takes {other} arrays, not {lib.family}")


def test_equal_priorities_are_ordered_by_name() -> None:
    for name in ("bbb", "aaa", "ccc"):
        LoopBack(name, priority=17).register()
    assert backends.available()[:3] == ["aaa", "bbb", "ccc"]
    assert who() == ("aaa", "auto")


def test_available() -> None:
    LoopBack("mine").register()
    LoopBack("absent", requires=("no_such_package_at_all",)).register()
    LoopBack("broken").register(probe=lambda: Verdict(False, "no device"))
    found = backends.available()
    assert "mine" in found
    assert "numpy" in found
    assert found.index("numpy") < found.index("mine")
    assert "absent" not in found
    assert "broken" not in found


@pytest.mark.parametrize("name", ["auto", "", "two words", "a-b", "1st"])
def test_names_that_are_refused(name: str) -> None:
    with pytest.raises(hla.OptionError, match=r"^name: expected an identifier other than auto, got "):
        LoopBack(name).register()


def test_a_taken_name() -> None:
    first = LoopBack("mine").register()
    second = LoopBack("mine")
    with pytest.raises(
        hla.OptionError, match=r"^name: expected a new name, got 'mine', which is taken\. .*replace=True"
    ):
        second.register()
    hla.register_backend(Backend(spec=second.spec, load=second.load, supports=second.supports), replace=True)
    hla.linear_attention(*inputs(), backend="mine")
    assert (len(first.ran), len(second.ran)) == (0, 1)


def test_unregister() -> None:
    LoopBack("mine").register()
    backends.unregister_backend("mine")
    assert "mine" not in backends.registered()
    with pytest.raises(UnknownBackendError):
        backends.unregister_backend("mine")
    with pytest.raises(UnknownBackendError):
        hla.linear_attention(*inputs(), backend="mine")


def test_the_registry_is_a_snapshot() -> None:
    before = backends.registered()
    with pytest.raises(TypeError):
        before["mine"] = None  # type: ignore[index]
    names = set(before)
    LoopBack("mine").register()
    assert set(before) == names
    assert set(backends.registered()) == {*names, "mine"}


# --- precedence ------------------------------------------------------------------------------------------------------

LEVELS = ("argument", "context", "global", "env", "auto")


@contextlib.contextmanager
def choose(level: str, name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Choose a backend on one level; yields the arguments of a call."""
    with contextlib.ExitStack() as stack:
        if level == "context":
            stack.enter_context(hla.use_backend(name))
        elif level == "global":
            hla.set_backend(name)
        elif level == "env":
            monkeypatch.setenv("HLA_BACKEND", name)
        yield {"backend": name} if level == "argument" else {}


@pytest.mark.parametrize(("higher", "lower"), list(itertools.combinations(LEVELS, 2)))
def test_precedence(higher: str, lower: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each level against each below it; on each the one that was chosen is the one that runs."""
    upper, under = LoopBack("upper").register(), LoopBack("under").register()
    with choose(lower, "under", monkeypatch) as low:
        expected = ("under", lower) if lower != "auto" else ("numpy", "auto")
        assert who(**low) == expected
        with choose(higher, "upper", monkeypatch) as high:
            options = {**low, **high}
            assert who(**options) == ("upper", higher)
            hla.linear_attention(*inputs(), **options)
            assert (len(upper.ran), len(under.ran)) == (1, 0)
            assert hla.get_backend() == ("upper" if higher != "argument" else "under" if lower != "auto" else "auto")


@pytest.mark.parametrize(("higher", "lower"), list(itertools.combinations(LEVELS[:-1], 2)))
def test_auto_undoes_a_choice_from_further_out(higher: str, lower: str, monkeypatch: pytest.MonkeyPatch) -> None:
    under = LoopBack("under").register()
    with choose(lower, "under", monkeypatch) as low, choose(higher, "auto", monkeypatch) as high:
        if higher == "global":  # "auto" there is no choice at all
            assert who(**{**low, **high}) == ("under", "env")
            return
        assert who(**{**low, **high}) == ("numpy", "auto")
        hla.linear_attention(*inputs(), **{**low, **high})
        assert not under.ran


def test_contexts_nest_and_end() -> None:
    LoopBack("one").register()
    LoopBack("two").register()
    with hla.use_backend("one"):
        with hla.use_backend("two"):
            assert hla.get_backend() == "two"
            with hla.use_backend("auto"):
                assert hla.get_backend() == "auto"
            with hla.use_backend(None):
                assert hla.get_backend() == "auto"
        assert hla.get_backend() == "one"
        with pytest.raises(RuntimeError, match="inside"), hla.use_backend("two"):
            raise RuntimeError("inside")
        assert hla.get_backend() == "one"
    assert hla.get_backend() == "auto"


def test_get_and_set() -> None:
    LoopBack("one").register()
    assert hla.get_backend() == "auto"
    hla.set_backend("one")
    assert hla.get_backend() == "one"
    hla.set_backend(["one", "numpy"])
    assert hla.get_backend() == ("one", "numpy")
    for nothing in (None, "auto"):
        hla.set_backend("one")
        hla.set_backend(nothing)
        assert hla.get_backend() == "auto"
    with pytest.raises(UnknownBackendError):
        hla.set_backend("two")
    assert hla.get_backend() == "auto", "a refused choice changes nothing"


def test_the_environment_is_read_on_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = LoopBack("one").register(), LoopBack("two").register()
    for name, counts in (("one", (1, 0)), ("two", (1, 1)), ("one", (2, 1))):
        monkeypatch.setenv("HLA_BACKEND", name)
        hla.linear_attention(*inputs())
        assert (len(one.ran), len(two.ran)) == counts
    monkeypatch.delenv("HLA_BACKEND")
    assert who() == ("numpy", "auto")
    for value in ("", "  ", "auto", " auto "):
        monkeypatch.setenv("HLA_BACKEND", value)
        assert who() == ("numpy", "auto"), value
    monkeypatch.setenv("HLA_BACKEND", " two , one ")
    assert who() == ("two", "env")
    assert hla.get_backend() == ("two", "one")
    monkeypatch.setenv("HLA_BACKEND", "tow")
    with pytest.raises(UnknownBackendError, match="Did you mean 'two'"):
        hla.linear_attention(*inputs())


# --- named backends run or raise -------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS[:-1])
def test_a_named_backend_never_falls_back(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However it was named: it cannot run ahla, so ahla does not run, though another backend could."""
    mine = LoopBack("mine").register()
    with (
        choose(level, "mine", monkeypatch) as options,
        pytest.raises(BackendUnsupportedError, match=r"^backend: expected one that can run ahla on numpy arrays"),
    ):
        hla.ahla(*inputs(), **options)
    assert not mine.ran


def test_lists_are_an_order_of_preference() -> None:
    one, two = LoopBack("one", operators=("ahla",)).register(), LoopBack("two").register()
    for names in (["one", "two"], ("one", "two"), ["two", "one"], ["two"]):
        hla.linear_attention(*inputs(), backend=names)
        assert who(backend=names) == ("two", "argument")
    assert (len(one.ran), len(two.ran)) == (0, 4)
    with pytest.raises(BackendUnsupportedError) as found:
        hla.hla3(*inputs(), backend=["one", "two"])
    assert "one: has no hla3" in str(found.value)
    assert "two: linear attention only" in str(found.value)
    assert "numpy:" not in str(found.value), "not named, not offered"


def test_a_list_passes_over_what_is_not_installed() -> None:
    LoopBack("absent", requires=("no_such_package_at_all",)).register()
    mine = LoopBack("mine").register()
    hla.linear_attention(*inputs(), backend=["absent", "mine"])
    assert len(mine.ran) == 1
    with pytest.raises(BackendUnsupportedError) as found:
        hla.ahla(*inputs(), backend=["absent", "mine"])
    assert "absent: not installed: no_such_package_at_all (pip install" in str(found.value)
    assert "mine: linear attention only" in str(found.value)


@pytest.mark.parametrize("value", [[], (), 5, 1.0, object(), ["numpy", 5], [None], {"numpy": 1}])
def test_selections_that_are_none(value: Any) -> None:
    with pytest.raises((hla.OptionError, UnknownBackendError), match=r"^backend: expected .*, got .*\. "):
        hla.linear_attention(*inputs(), backend=value)


CLOSE = {"nunpy": "numpy", "num": "numpy", "mnie": "mine", "quantum": None, "": None, "Auto": "auto"}


@pytest.mark.parametrize(("name", "close"), list(CLOSE.items()))
def test_unknown_names(name: str, close: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """By argument, context, setting and environment; with the close name, or all names."""
    LoopBack("mine").register()

    def use() -> None:
        with hla.use_backend(name):
            raise AssertionError("entered")

    calls = [lambda: hla.linear_attention(*inputs(), backend=name), lambda: hla.set_backend(name), use]
    if name:
        monkeypatch.setenv("HLA_BACKEND", name)
        calls.append(lambda: hla.linear_attention(*inputs()))
    for i, call in enumerate(calls):
        with pytest.raises(UnknownBackendError) as found:
            call()
        message = str(found.value)
        assert message.startswith(f"backend{' from HLA_BACKEND' * (i == 3)}: expected one of ")
        assert f"got {name!r}. " in message
        assert "numpy" in message
        assert "mine" in message
        if close is not None:
            assert message.endswith(f"Did you mean {close!r}?")
        else:
            assert message.endswith("Register it with hla.register_backend, or choose one of these.")


def test_auto_in_a_list_is_not_offered_as_its_own_correction() -> None:
    """ "auto" stands alone; among names it is refused, with a word that helps."""
    with pytest.raises((hla.OptionError, UnknownBackendError)) as found:
        hla.linear_attention(*inputs(), backend=["numpy", "auto"])
    assert "Did you mean 'auto'?" not in str(found.value)


@pytest.mark.parametrize(
    ("spec", "command"),
    [
        ({"extra": "mine"}, 'pip install "hla[mine]"'),
        ({"extra": "mine", "pip": "my-plugin[gpu]>=2"}, 'pip install "my-plugin[gpu]>=2"'),
        ({}, 'pip install "no_such_package_at_all"'),
    ],
)
def test_not_installed(spec: dict[str, Any], command: str) -> None:
    """The exact command, which pip understands."""
    LoopBack("mine", requires=("no_such_package_at_all",), **spec).register()
    for call in (
        lambda: hla.linear_attention(*inputs(), backend="mine"),
        lambda: hla.explain("linear_attention", *inputs(), backend="mine"),
        lambda: hla.vjp("linear_attention", *inputs(), backend="mine"),
    ):
        with pytest.raises(BackendNotInstalledError) as found:
            call()
        assert str(found.value).startswith(
            "backend: expected mine with its packages installed (no_such_package_at_all)"
        )
        assert str(found.value).endswith(f"Run: {command}")


def test_the_command_for_two_packages() -> None:
    """Two requirements are two arguments of pip, not one."""
    LoopBack("mine", requires=("no_such_package_at_all", "nor_this_one")).register()
    with pytest.raises(BackendNotInstalledError) as found:
        hla.linear_attention(*inputs(), backend="mine")
    command = str(found.value).rpartition("Run: ")[2]
    assert command.replace('"', "") == "pip install no_such_package_at_all nor_this_one"
    assert '"no_such_package_at_all nor_this_one"' not in command


def test_some_packages_are_there() -> None:
    """Only what is missing is called missing."""
    LoopBack("mine", requires=("numpy", "no_such_package_at_all")).register()
    reasons = {c.name: c.reason for c in hla.explain("linear_attention", *inputs()).candidates}
    assert reasons["mine"].startswith("not installed: no_such_package_at_all (")


def test_unsupported_has_every_reason() -> None:
    """Of each backend that was named; without names of every backend there is."""
    rows = {
        "families": LoopBack("families", families=("torch", "jax")),
        "operators": LoopBack("operators", operators=("linear_attention",)),
        "forms": LoopBack("forms", forms=("chunkwise",)),
        "dtypes": LoopBack("dtypes", dtypes=("float16", "float32")),
        "own": LoopBack("own"),
    }
    for row in rows.values():
        row.register()
    LoopBack("probe").register(probe=lambda: Verdict(False, "no device of capability 9"))
    names = [*rows, "probe"]
    with pytest.raises(BackendUnsupportedError) as found:
        hla.ahla(*inputs(), form="parallel", backend=names)
    message = str(found.value)
    assert message.startswith(
        "backend: expected one that can run ahla on numpy arrays (float64/float64/float64, form parallel), got "
    )
    for reason in (
        "families: takes torch, jax arrays, not numpy",
        "operators: has no ahla",
        "forms: has the forms chunkwise, not parallel",
        "dtypes: takes float16, float32, not float64",
        "own: linear attention only",
        "probe: no device of capability 9",
    ):
        assert reason in message
    assert message.endswith('Choose another backend or form, or backend="auto".')


def test_nobody_can_run_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Automatic choice without a taker: every backend's reason."""
    LoopBack("mine").register()
    replaced = backends.get("numpy")
    try:
        hla.register_backend(
            Backend(spec=replaced.spec, load=replaced.load, supports=lambda call: Verdict(False, "on holiday")),
            replace=True,
        )
        with pytest.raises(BackendUnsupportedError) as found:
            hla.ahla(*inputs())
        assert "numpy: on holiday" in str(found.value)
        assert "mine: linear attention only" in str(found.value)
    finally:
        hla.register_backend(replaced, replace=True)


def test_gradients_of_a_backend_without_them(lib: Library) -> None:
    """Refused, in vjp and where autograd would need them: never quietly without a gradient."""
    LoopBack("mine", gradients=False).register()
    with pytest.raises(BackendUnsupportedError, match=r"mine: has no gradient for hla\.vjp"):
        hla.vjp("linear_attention", *inputs(lib), backend="mine")
    if lib.name != "torch":
        return
    for i in range(3):
        given = inputs(lib)
        given[i].requires_grad_()
        with pytest.raises(BackendUnsupportedError, match="mine: has no gradients"):
            hla.linear_attention(*given, backend="mine")


@pytest.mark.parametrize("option", ["decay", "log_decay", "scale", "initial_state"])
def test_gradients_of_options_count_too(lib: Library, option: str) -> None:
    if lib.name != "torch":
        pytest.skip("requires_grad: in the session of torch")
    mine = LoopBack("mine", gradients=False).register()
    q, k, v = inputs(lib)
    start = hla.init_state("linear_attention", batch=(HEADS,), d=D, dv=DV, like=q)
    value = {
        "decay": lambda: lib.asarray(np.full(HEADS, 0.9)).requires_grad_(),
        "log_decay": lambda: lib.asarray(np.full(TOKENS, -0.1)).requires_grad_(),
        "scale": lambda: lib.asarray(np.full(1, 0.5))[0].requires_grad_(),
        "initial_state": lambda: start._replace(key_value_moment=start.key_value_moment.requires_grad_()),
    }[option]()
    with pytest.raises(BackendUnsupportedError, match="mine: has no gradients"):
        hla.linear_attention(q, k, v, backend="mine", **{option: value})
    assert not mine.ran


def test_a_backend_with_gradients_of_its_own() -> None:
    """`hla.vjp` takes value and gradient from the same backend."""
    mine = LoopBack("mine")
    calls = []

    def load_gradient(operator: str) -> Any:
        def pull(problem: Any, d_output: Any, d_final: Any) -> Any:
            calls.append(operator)
            return backends.get("numpy").gradient(operator)(problem, d_output, d_final)

        return pull

    mine.register(load_gradient=load_gradient)
    q, k, v = inputs()
    o, pull = hla.vjp("linear_attention", q, k, v, backend="mine")
    assert len(mine.ran) == 1
    got = pull(o)
    assert calls == ["linear_attention"]
    expected = hla.vjp("linear_attention", q, k, v)[1](o)
    np.testing.assert_array_equal(got.q, expected.q)


def test_exceptions_in_supports_are_not_a_no() -> None:
    """A fault there must be seen, not taken for a reason to choose another backend."""

    def broken(call: Call) -> Verdict:
        raise ZeroDivisionError("a fault")

    LoopBack("mine", priority=9).register(supports=broken)
    for call in (
        lambda: hla.linear_attention(*inputs()),
        lambda: hla.linear_attention(*inputs(), backend="mine"),
        lambda: hla.explain("linear_attention", *inputs()),
        lambda: hla.explain("linear_attention", *inputs(), backend="numpy"),
    ):
        with pytest.raises(ZeroDivisionError, match="a fault"):
            call()
    hla.linear_attention(*inputs(), backend="numpy")


def test_exceptions_in_a_runner_are_not_a_no() -> None:
    def load(operator: str) -> Any:
        def run(problem: Any) -> Any:
            raise ZeroDivisionError("a fault")

        return run

    hla.register_backend(Backend(spec=BackendSpec("mine", ("*",), priority=9), load=load))
    with pytest.raises(ZeroDivisionError, match="a fault"):
        hla.linear_attention(*inputs())


# --- explain ---------------------------------------------------------------------------------------------------------


def test_explain_runs_nothing() -> None:
    mine = LoopBack("mine", priority=9).register()
    probed = []
    LoopBack("other").register(probe=lambda: (probed.append(1), Verdict(True, "available"))[1])
    plan = hla.explain("linear_attention", *inputs())
    assert plan.backend == "mine"
    assert not mine.ran
    assert not mine.loaded
    hla.explain("linear_attention", *inputs())
    assert probed == [1], "a probe is asked once"


def test_a_plan() -> None:
    LoopBack("mine").register()
    LoopBack("absent", requires=("no_such_package_at_all",), extra="absent").register()
    plan = hla.explain("linear_attention", *inputs(), form="parallel")
    assert (plan.backend, plan.form, plan.source) == ("numpy", "parallel", "auto")
    assert {c.name for c in plan.candidates} == set(backends.registered())
    specs = [backends.get(c.name).spec for c in plan.candidates]
    assert specs == sorted(specs, key=lambda spec: (-spec.priority, spec.name)), "best first"
    assert specs[0].priority > specs[-1].priority
    found = {c.name: c for c in plan.candidates}
    assert (found["numpy"].ok, found["mine"].ok, found["absent"].ok) == (True, True, False)
    assert found["absent"].reason == 'not installed: no_such_package_at_all (pip install "hla[absent]")'
    assert all(c.reason for c in plan.candidates)
    text = str(plan)
    assert text.startswith("numpy, form parallel (chosen by auto)")
    assert all(c.name in text and c.reason in text for c in plan.candidates)
    with pytest.raises(AttributeError):
        plan.backend = "mine"


def test_a_plan_says_who_was_not_named() -> None:
    LoopBack("mine").register()
    plan = hla.explain("linear_attention", *inputs(), backend="mine")
    assert (plan.backend, plan.source) == ("mine", "argument")
    reasons = {c.name: c.reason for c in plan.candidates}
    assert reasons["numpy"] == "supported; not named"
    assert reasons["mine"] == "linear attention only"


def test_what_auto_stands_for() -> None:
    """The form that would run, from the backend that would run it."""
    q, k, v = inputs()
    assert hla.explain("hla2", q, k, v).form == "chunkwise"
    assert hla.explain("hla2", q[:, :1], k[:, :1], v[:, :1]).form == "recurrent"
    assert hla.explain("hla2", q[:, :1], k[:, :1], v[:, :1], form="chunkwise").form == "chunkwise"
    assert hla.explain("hla2", q[:, :1], k[:, :1], v[:, :1], mask="none").form == "chunkwise"
    LoopBack("mine").register(plain_form=lambda problem: "parallel")
    assert hla.explain("linear_attention", q, k, v, backend="mine").form == "parallel"


def test_explain_of_higher_orders() -> None:
    assert hla.explain("higher_order", *inputs(), order=5).backend == "numpy"


# --- the memory of choices -------------------------------------------------------------------------------------------


def test_a_choice_does_not_depend_on_batch_or_length(lib: Library) -> None:
    """One question per kind of call, whatever the sizes; a new one where something else differs."""
    mine = LoopBack("mine", priority=19).register()
    for batch, tokens in (((HEADS,), TOKENS), ((1,), 1), ((HEADS + 2,), TOKENS + 2), ((0,), TOKENS)):
        hla.linear_attention(*inputs(lib, batch=batch, tokens=tokens))
    assert len(mine.ran) == 4
    assert len(mine.asked) == 1
    hla.linear_attention(*inputs(lib, batch=(2, HEADS)))
    assert len(mine.asked) == 2, "another rank"
    hla.linear_attention(*(lib.asarray(x, "float32") for x in inputs()))
    assert len(mine.asked) == 3, "another dtype"
    hla.linear_attention(*inputs(lib), form="recurrent")
    assert len(mine.asked) == 4, "another form"


def test_what_a_call_shows() -> None:
    mine = LoopBack("mine", priority=9).register()
    q, k, v = inputs()
    options = {
        "decay": 0.9,
        "token_mask": np.ones(TOKENS, bool),
        "normalize": True,
        "return_state": True,
        "cu_seqlens": np.asarray([0, TOKENS]),
        "initial_state": hla.init_state("linear_attention", batch=(1, HEADS), d=D, dv=DV, like=q, normalize=True),
    }
    hla.explain("linear_attention", q, k.astype(np.float32), v, form="parallel", **options)
    call = mine.asked[-1]
    assert call == Call(
        operator="linear_attention",
        family="numpy",
        dtypes=("float64", "float32", "float64"),
        device="",
        d=D,
        dv=DV,
        rank=3,
        form="parallel",
        needs_grad=False,
        traced=False,
        options=frozenset(
            {
                "log_decay",  # a decay with skipped tokens differs from token to token
                "token_mask",
                "normalize",
                "return_state",
                "cu_seqlens",
                "initial_state",
                "mask=causal",
                "definition=exact",
            }
        ),
    )
    hash(call)


def test_what_a_call_shows_of_its_arrays(lib: Library) -> None:
    mine = LoopBack("mine", priority=9).register()
    q, k, v = inputs(lib)
    hla.explain("linear_attention", q, k, v)
    call = mine.asked[-1]
    assert call.family == lib.family
    assert (call.device == "") == (lib.name == "numpy")
    assert not call.traced
    assert call.needs_grad is (None if lib.name == "jax" else False)
    if lib.name == "torch":
        hla.explain("linear_attention", q, k.requires_grad_(), v)
        assert mine.asked[-1].needs_grad is True
    if lib.name == "jax":
        import jax

        jax.jit(lambda *x: hla.explain("linear_attention", *x) and x[0])(q, k, v)
        assert mine.asked[-1].traced


# --- under jit -------------------------------------------------------------------------------------------------------


def test_the_context_is_part_of_jits_key(lib: Library) -> None:
    """A function compiled under one backend is traced again under another, and only then."""
    if lib.name != "jax":
        pytest.skip("jax.jit: in the session of jax")
    import jax

    one, two = LoopBack("one").register(), LoopBack("two").register()
    attend = jax.jit(lambda q, k, v: hla.linear_attention(q, k, v))
    q, k, v = inputs(lib)
    plain = attend(q, k, v)
    assert (len(one.ran), len(two.ran)) == (0, 0)
    for name, counts in (("one", (1, 0)), ("two", (1, 1)), ("one", (1, 1)), ("two", (1, 1)), ("auto", (1, 1))):
        with hla.use_backend(name):
            got = attend(q, k, v)
        assert (len(one.ran), len(two.ran)) == counts, name
        np.testing.assert_allclose(lib.numpy(got), lib.numpy(plain), rtol=1e-12)
    attend(q, k, v)
    assert (len(one.ran), len(two.ran)) == (1, 1)


def test_the_setting_is_part_of_jits_key(lib: Library) -> None:
    """A function compiled under one setting is traced again under another, also one made before there was any."""
    if lib.name != "jax":
        pytest.skip("jax.jit: in the session of jax")
    import jax

    one, two = LoopBack("one").register(), LoopBack("two").register()
    attend = jax.jit(lambda q, k, v: hla.linear_attention(q, k, v))
    attend(*inputs(lib))
    for name, counts in (("one", (1, 0)), ("two", (1, 1)), ("one", (1, 1)), (None, (1, 1)), ("two", (1, 1))):
        hla.set_backend(name)
        attend(*inputs(lib))
        assert (len(one.ran), len(two.ran)) == counts, name
    hla.set_backend("one")
    with hla.use_backend("two"):
        attend(*inputs(lib))
    assert (len(one.ran), len(two.ran)) == (1, 1)
    handed = threading.Thread(target=lambda: (backends.restore(choice), attend(*inputs(lib))))
    with hla.use_backend("two"):
        choice = backends.snapshot()
    handed.start()
    handed.join()
    assert (len(one.ran), len(two.ran)) == (1, 1)


# --- handing a choice on ---------------------------------------------------------------------------------------------


def test_snapshot_and_restore() -> None:
    LoopBack("one").register()
    LoopBack("two").register()
    hla.set_backend("one")
    with hla.use_backend(["two", "one"]):
        choice = pickle.loads(pickle.dumps(backends.snapshot()))
    hla.set_backend(None)
    found = []

    def work() -> None:
        found.append(hla.get_backend())
        backends.restore(choice)
        found.append(hla.get_backend())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == ["auto", ("two", "one")]
    assert hla.get_backend() == "one", "the setting is the process's, the context the thread's own"


# --- plug-ins --------------------------------------------------------------------------------------------------------

PLUGIN = """
from hla.backends import Backend, BackendSpec, registered

ran = []


def load(operator):
    def run(problem):
        ran.append(operator)
        return registered()["numpy"].runner(operator)(problem)
    return run


def make():
    return Backend(spec=BackendSpec(name="good", families=("numpy",), priority=5), load=load)


instance = Backend(spec=BackendSpec(name="ready", families=("numpy",), priority=-5), load=load)
nonsense = {"name": "nonsense"}


def faulty():
    raise RuntimeError("a fault of its own")
"""
POINTS = """[hla.backends]
good = a_plugin:make
ready = a_plugin:instance
missing = no_such_plugin_module:make
lacking = a_plugin:no_such_name
faulty = a_plugin:faulty
nonsense = a_plugin:nonsense
"""
SCRIPT = """
import json, sys
import hla
assert "a_plugin" not in sys.modules, "loaded on import"
import numpy as np
x = np.ones((5, 3))
hla.hla2(x, x, x)
import a_plugin
plan = hla.explain("hla2", x, x, x)
errors = {}
for name in ("missing", "lacking", "faulty", "nonsense"):
    try:
        hla.hla2(x, x, x, backend=name)
    except hla.BackendUnsupportedError as error:
        errors[name] = str(error)
print(json.dumps({
    "ran": a_plugin.ran,
    "available": hla.backends.available(),
    "registered": sorted(hla.backends.registered()),
    "candidates": {c.name: [c.ok, c.reason] for c in plan.candidates},
    "errors": errors,
}))
"""


def run_with_plugins(tmp_path: Path, points: str, script: str) -> Any:
    (tmp_path / "a_plugin.py").write_text(PLUGIN)
    info = tmp_path / "a_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: a-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(points)
    found = os.pathsep.join([str(tmp_path), *([os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else [])])
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        env={**os.environ, "PYTHONPATH": found},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_plug_ins(tmp_path: Path) -> None:
    """Found by their entry points when backends are first asked for; a broken one is a reason and no more."""
    said = run_with_plugins(tmp_path, POINTS, SCRIPT)
    assert said["ran"] == ["hla2"], "automatic choice took the plug-in"
    names = {"good", "ready", "missing", "lacking", "faulty", "nonsense"}
    assert names < set(said["registered"])
    assert set(said["available"]) & names == {"good", "ready"}
    assert said["available"].index("good") < said["available"].index("numpy") < said["available"].index("ready")
    for name, words in {
        "missing": "plug-in no_such_plugin_module:make failed to load: ModuleNotFoundError: ",
        "lacking": "plug-in a_plugin:no_such_name failed to load: AttributeError: ",
        "faulty": "plug-in a_plugin:faulty failed to load: RuntimeError: a fault of its own",
        "nonsense": "plug-in a_plugin:nonsense failed to load: TypeError: a_plugin:nonsense is dict, not ",
    }.items():
        ok, reason = said["candidates"][name]
        assert not ok
        assert reason.startswith(words)
        assert words in said["errors"][name]


def test_a_broken_plug_in_does_not_take_a_built_in_name(tmp_path: Path) -> None:
    script = """
import json
import numpy as np
import hla
x = np.ones((5, 3))
print(json.dumps({"shape": list(hla.hla2(x, x, x, backend="numpy").shape)}))
"""
    said = run_with_plugins(tmp_path, "[hla.backends]\nnumpy = no_such_plugin_module:make\n", script)
    assert said["shape"] == [5, 3]


def test_a_plug_in_goes_by_one_name(tmp_path: Path) -> None:
    """The entry's name and the spec's differ: what `explain` and `available` say is what can be asked for."""
    script = """
import json
import numpy as np
import hla
x = np.ones((5, 3))
plan = hla.explain("hla2", x, x, x)
usable = {}
for name in [plan.backend, *hla.backends.available()]:
    try:
        hla.hla2(x, x, x, backend=name)
        usable[name] = True
    except hla.BackendUnsupportedError as error:
        usable[name] = f"{name}: takes {name} arrays" in str(error)  # it is known, and for another library
    except Exception as error:
        usable[name] = repr(error)
print(json.dumps(usable))
"""
    said = run_with_plugins(tmp_path, "[hla.backends]\nanother = a_plugin:make\n", script)
    assert set(said.values()) == {True}, said


def test_registering_comes_before_or_after_the_plug_ins(tmp_path: Path) -> None:
    """A name registered by hand before the first look is kept, whatever a plug-in says."""
    script = """
import json
import hla
from hla.backends import Backend, BackendSpec
mine = Backend(spec=BackendSpec(name="good", families=("numpy",)), load=lambda operator: None)
try:
    hla.register_backend(mine)
    refused = False
except hla.OptionError:
    refused = True
hla.register_backend(mine, replace=True)
print(json.dumps({"refused": refused, "mine": hla.backends.get("good") is mine}))
"""
    said = run_with_plugins(tmp_path, POINTS, script)
    assert said == {"refused": True, "mine": True}

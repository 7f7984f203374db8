"""Threads, pools and asyncio tasks: each runs with its own choice, and sees the process's."""

from __future__ import annotations

import asyncio
import contextvars
import pickle
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest

import hla
from hla import backends, states, streaming
from hla.backends import Backend, BackendSpec, Verdict
from hla.family import Spec

TOKENS, D, DV = 11, 5, 7
WORKERS = 4
ROUNDS = 25
WAIT = 60.0


class Recorder:
    """A backend that computes as "numpy" does and remembers which threads it ran in, at a pace that lets others in."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.threads: list[int] = []

    def backend(self) -> Backend:
        return Backend(spec=BackendSpec(name=self.name, families=("numpy",), priority=-9), load=self.load)

    def load(self, operator: str) -> Any:
        inner = backends.get("numpy").runner(operator)

        def run(problem: Any) -> Any:
            self.threads.append(threading.get_ident())
            return inner(problem)

        return run


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Recorder]]:
    monkeypatch.delenv("HLA_BACKEND", raising=False)
    nothing = {"context": None, "global": None}
    backends.restore(nothing)
    made = [Recorder(f"recorder{i}") for i in range(WORKERS)]
    for recorder in made:
        hla.register_backend(recorder.backend())
    yield made
    backends.restore(nothing)
    for recorder in made:
        backends.unregister_backend(recorder.name)


def inputs(seed: int) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(TOKENS, size)) for size in (D, D, DV)]


def start_together(works: list[Any]) -> list[Any]:
    """Run functions in threads that leave at the same moment; their results, or the first error."""
    gate = threading.Barrier(len(works))

    def run(work: Any) -> Any:
        gate.wait(WAIT)
        return work()

    with ThreadPoolExecutor(len(works)) as pool:
        return [future.result(WAIT) for future in [pool.submit(run, work) for work in works]]


def test_threads_that_need_a_new_class_of_states_get_one() -> None:
    """Pytrees with different classes are different."""
    spec = Spec("hla2")
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for i in range(100):
            work = partial(states.tuple_type, f"New{i}", spec, ("S", "F"), None, "")
            assert len(set(start_together([work] * WORKERS))) == 1
    finally:
        sys.setswitchinterval(interval)


def test_threads_with_choices_of_their_own(recorders: list[Recorder]) -> None:
    """Entered and left many times at once, each thread runs on its own backend, and gets its own result."""
    operators = (hla.linear_attention, hla.hla2, hla.ahla, hla.hla3)
    expected = [operators[i](*inputs(i), decay=0.9) for i in range(WORKERS)]

    def work(i: int) -> int:
        for _ in range(ROUNDS):
            with hla.use_backend(recorders[i].name):
                assert hla.get_backend() == recorders[i].name
                got = operators[i](*inputs(i), decay=0.9)
                np.testing.assert_array_equal(got, expected[i])
                with hla.use_backend("numpy"):
                    np.testing.assert_array_equal(operators[i](*inputs(i), decay=0.9), expected[i])
            assert hla.get_backend() == "auto"
        return threading.get_ident()

    threads = start_together([lambda i=i: work(i) for i in range(WORKERS)])
    for recorder, thread in zip(recorders, threads, strict=True):
        assert recorder.threads == [thread] * ROUNDS


def test_a_choice_made_while_a_step_is_checked(recorders: list[Recorder], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept of a step's checks is kept for the choice they were made under, not for one that came between."""
    q, k, v = inputs(0)
    state = hla.init_state("hla2", batch=(), d=D, dv=DV, like=q)
    recorder, check = recorders[0], streaming.check_call

    def interrupted(*args: Any) -> Any:
        hla.set_backend("numpy")
        return check(*args)

    hla.set_backend(recorder.name)
    monkeypatch.setattr(streaming, "check_call", interrupted)
    hla.step(state, q[0], k[0], v[0])
    assert len(recorder.threads) == 1
    for count in (2, 3):
        hla.set_backend(recorder.name)
        hla.step(state, q[0], k[0], v[0])
        assert len(recorder.threads) == count


def test_tasks_with_choices_of_their_own(recorders: list[Recorder]) -> None:
    """asyncio tasks take turns inside their contexts; none sees another's."""

    async def work(recorder: Recorder) -> None:
        for i in range(ROUNDS):
            with hla.use_backend(recorder.name):
                await asyncio.sleep(0)
                assert hla.get_backend() == recorder.name
                before = len(recorder.threads)
                hla.hla2(*inputs(i))
                assert len(recorder.threads) == before + 1
                await asyncio.sleep(0)
                assert hla.explain("hla2", *inputs(i)).source == "context"
            assert hla.get_backend() == "auto"
            await asyncio.sleep(0)

    async def main() -> None:
        await asyncio.gather(*(work(recorder) for recorder in recorders))

    asyncio.run(main())
    assert [len(recorder.threads) for recorder in recorders] == [ROUNDS] * WORKERS


def test_a_task_starts_with_its_parents_choice(recorders: list[Recorder]) -> None:
    """As every context variable; what it then chooses stays its own."""

    async def child() -> tuple[Any, Any]:
        first = hla.get_backend()
        with hla.use_backend(recorders[1].name):
            await asyncio.sleep(0)
            return first, hla.get_backend()

    async def main() -> list[Any]:
        with hla.use_backend(recorders[0].name):
            found = await asyncio.gather(child(), child())
            assert hla.get_backend() == recorders[0].name
        return found

    assert asyncio.run(main()) == [(recorders[0].name, recorders[1].name)] * 2


def test_a_pool_sees_the_setting_of_the_process(recorders: list[Recorder]) -> None:
    """Also workers that were started before it was made."""
    with ThreadPoolExecutor(2) as pool:
        assert pool.submit(hla.get_backend).result(WAIT) == "auto"
        hla.set_backend(recorders[0].name)
        assert [pool.submit(hla.get_backend).result(WAIT) for _ in range(4)] == [recorders[0].name] * 4
        pool.submit(hla.hla2, *inputs(0)).result(WAIT)
        assert len(recorders[0].threads) == 1
        pool.submit(hla.set_backend, recorders[1].name).result(WAIT)
    assert hla.get_backend() == recorders[1].name, "and a worker can make it"


def test_a_pool_does_not_see_the_context(recorders: list[Recorder]) -> None:
    """A thread's context is its own; a snapshot hands it on."""
    with hla.use_backend(recorders[0].name):
        choice = pickle.loads(pickle.dumps(backends.snapshot()))
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(hla.get_backend).result(WAIT) == "auto"
        with ThreadPoolExecutor(2, initializer=backends.restore, initargs=(choice,)) as pool:
            assert {pool.submit(hla.get_backend).result(WAIT) for _ in range(4)} == {recorders[0].name}
        with ThreadPoolExecutor(1) as pool:
            copied = contextvars.copy_context()
            assert pool.submit(copied.run, hla.get_backend).result(WAIT) == recorders[0].name


def test_the_environment_is_read_in_every_thread(recorders: list[Recorder], monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadPoolExecutor(1) as pool:
        for recorder in recorders[:2]:
            monkeypatch.setenv("HLA_BACKEND", recorder.name)
            assert pool.submit(hla.get_backend).result(WAIT) == recorder.name


def test_the_registry_changes_while_others_read(recorders: list[Recorder]) -> None:
    """Registering and forgetting in some threads; iterating, explaining and running in others: nobody stumbles."""
    stop = threading.Event()
    x = inputs(0)
    expected = hla.hla2(*x)

    def change(i: int) -> int:
        for n in range(10 * ROUNDS):
            name = f"passing{i}"
            spec = BackendSpec(name=name, families=("torch",), priority=n)
            hla.register_backend(Backend(spec=spec, load=lambda operator: None))
            assert name in backends.registered()
            backends.unregister_backend(name)
            assert name not in backends.registered()
        return 10 * ROUNDS

    def iterate() -> int:
        rounds = 0
        while not stop.is_set() or not rounds:
            names = [name for name, backend in backends.registered().items() if backend.spec.name == name]
            assert "numpy" in names
            assert "numpy" in backends.available()
            assert len({c.name for c in hla.explain("hla2", *x).candidates}) >= len(recorders) + 1
            np.testing.assert_array_equal(hla.hla2(*x), expected)
            rounds += 1
        return rounds

    def changes() -> int:
        try:
            return sum(start_together([lambda: change(0), lambda: change(1)]))
        finally:
            stop.set()

    done = start_together([changes, iterate, iterate])
    assert done[0] == 20 * ROUNDS
    assert not [name for name in backends.registered() if name.startswith("passing")]


def test_two_threads_register_one_name(recorders: list[Recorder]) -> None:
    """Exactly one of them has it."""

    def register(i: int) -> bool:
        spec = BackendSpec(name="contested", families=("numpy",), description=str(i))
        try:
            hla.register_backend(Backend(spec=spec, load=lambda operator: None))
        except hla.OptionError:
            return False
        return True

    try:
        won = start_together([lambda i=i: register(i) for i in range(WORKERS)])
        assert sum(won) == 1
        assert backends.get("contested").spec.description == str(won.index(True))
    finally:
        backends.unregister_backend("contested")


def test_one_probe_for_many_threads_is_consistent(recorders: list[Recorder]) -> None:
    """Whoever asks first, all get the same answer."""
    asked = []

    def probe() -> Verdict:
        asked.append(threading.get_ident())
        return Verdict(len(asked) > 0, "available")

    spec = BackendSpec(name="probed", families=("numpy",), priority=-9)
    hla.register_backend(Backend(spec=spec, load=recorders[0].load, probe=probe))
    try:
        plans = start_together([lambda: hla.explain("hla2", *inputs(0), backend="probed")] * WORKERS)
        assert {plan.backend for plan in plans} == {"probed"}
    finally:
        backends.unregister_backend("probed")


def test_first_use_from_many_threads() -> None:
    """The built-in backends are loaded once, and nobody sees a half-filled registry."""
    import subprocess
    import sys

    script = """
import threading
import numpy as np
import hla
x = np.ones((5, 3))
gate, seen, results = threading.Barrier(8), [], []
def work():
    gate.wait(60)
    seen.append(sorted(hla.backends.registered()))
    results.append(hla.hla2(x, x, x, backend="numpy").sum())
threads = [threading.Thread(target=work) for _ in range(8)]
[t.start() for t in threads]
[t.join() for t in threads]
assert len(seen) == len(results) == 8, (seen, results)
assert all(s == seen[0] for s in seen), seen
assert len(set(results)) == 1
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr

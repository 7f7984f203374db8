"""One place and one length: every contender is checked, then all take turns, then memory without a clock."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hla.cli.baselines import Contender, label
from hla.cli.ceiling import batched_matmul, large_copy, large_matmul
from hla.cli.judging import Judge, Verdict, judge_of
from hla.cli.memory import peak_bytes
from hla.cli.passes import backward, forward
from hla.cli.timing import Timing, in_turns
from hla.testing.inputs import make_inputs
from hla.testing.libraries import Placement

LEAST_SAMPLE, MOST_SAMPLES = 2e-3, 0.5
"""Seconds that a sample lasts at least; and after which a contender takes no more of them."""
LOOP_STATES = 2**27
"""Bytes of states up to which a loop's backward pass is run: it has to keep the state of every token."""
GRADIENT_WORK = 3
"""Forward and backward in forwards: the gradient of a matrix product is two of its size, if nothing is recomputed."""


@dataclass(frozen=True)
class Setting:
    """What all measurements of a run share."""

    heads: int
    d: int
    dv: int
    dtype: str
    rounds: int


class Subject(NamedTuple):
    """A pass of a contender."""

    contender: Contender
    form: str
    """that runs; "" for a peer"""
    call: Callable[..., Any]
    arguments: tuple[Any, ...]
    check: Callable[[], Verdict]
    state_bytes: int | None = None


@dataclass
class Group:
    """Contenders on the arrays of one place, at one length."""

    setting: Setting
    place: Placement
    length: int
    contenders: Sequence[Contender]
    judges: dict[str, Judge]
    """by operator; places share them, as inputs are the same numbers everywhere"""
    rates: dict[str, float] = field(default_factory=dict)
    """flops per second of "batched" and "large" matrix products, the larger of which is a ceiling; bytes per second of
    a "copy", which is another"""
    left_out: list[str] = field(default_factory=list)
    """a sentence for each that was not run"""

    def __post_init__(self) -> None:
        s = self.setting
        sizes: dict[str, Any] = {"T": self.length, "d": s.d, "dv": s.dv, "batch": (s.heads,), "dtype": s.dtype}
        self.inputs = make_inputs(self.place.xp, device=self.place.device, **sizes)
        self.do = make_inputs(self.place.xp, device=self.place.device, seed=1, **sizes).v

    def measure(self, what: str) -> list[dict[str, Any]]:
        """The rows of one pass: "forward", "backward" or "decode"."""
        import hla

        make = {"forward": self._forward, "backward": self._backward, "decode": self._decode}[what]
        checked: list[tuple[Subject, Verdict | None, str]] = []
        for contender in self.contenders:
            try:
                subject = make(contender)
                if subject is not None:
                    checked.append((subject, subject.check(), ""))
            except hla.BackendUnsupportedError as error:
                self.left_out.append(f"{contender.name}, {what}: {error}")
            except Exception as error:  # the others still have something to show
                failed = Subject(contender, contender.form or "", _nothing, (), _no_verdict)
                checked.append((failed, None, f"{type(error).__name__}: {error}"))
        times = self._times(checked)
        return [self._row(what, *entry, times.get(i)) for i, entry in enumerate(checked)]

    def _times(self, checked: list[tuple[Subject, Verdict | None, str]]) -> dict[Any, Timing]:
        """Of those that are right, beside the machine's matmul rate; nothing is timed if none is."""
        turns: dict[Any, Callable[[], Any]] = {}
        for i, (subject, verdict, _) in enumerate(checked):
            if verdict is not None and verdict.ok:
                turns[i] = self._waiting(subject)
        if not turns:
            return {}
        ceilings = {
            "batched": batched_matmul(self.place),
            "large": large_matmul(self.place),
            "copy": large_copy(self.place),
        }
        turns |= {name: work.run for name, work in ceilings.items()}
        times = in_turns(turns, self.setting.rounds, least=LEAST_SAMPLE, most=MOST_SAMPLES)
        for name, work in ceilings.items():
            self.rates[name] = work.amount / times[name].median
        return times

    def _waiting(self, subject: Subject) -> Callable[[], Any]:
        call, arguments, wait = subject.call, subject.arguments, self.place.wait
        return lambda: wait(call(*arguments))

    def _judge(self, contender: Contender) -> Judge:
        name = label(contender.operator, contender.order)
        if name not in self.judges:
            self.judges[name] = judge_of(contender.operator, contender.order, self.inputs, self.do, self.setting.dtype)
        return self.judges[name]

    def _form(self, contender: Contender) -> str:
        """The form that will run, "" for a peer; raises if the backend named is not the one to run it."""
        import hla

        if contender.kind != "operator":
            return ""
        plan = hla.explain(
            contender.operator, *self.inputs, backend=contender.backend, order=contender.order,
            form=contender.form or "auto",
        )  # fmt: skip
        if plan.backend != contender.backend:
            raise AssertionError(f"{plan.backend} would run, not {contender.backend}")
        return plan.form

    def _forward(self, contender: Contender) -> Subject:
        call = forward(self.place, contender.attend)

        def check() -> Verdict:
            return self._judge(contender).forward(call(*self.inputs))

        return Subject(contender, self._form(contender), call, tuple(self.inputs), check)

    def _backward(self, contender: Contender) -> Subject | None:
        call = backward(self.place, contender.attend, contender.pull) if contender.differentiable else None
        if call is None:
            return None
        if contender.kind == "loop" and self._loop_states(contender) > LOOP_STATES:
            kept = self._loop_states(contender) / 2**20
            self.left_out.append(
                f"{contender.name}, backward, T = {self.length}: it would keep {kept:,.0f} MiB of states"
            )
            return None
        arguments = (*self.inputs, self.do)
        return Subject(
            contender,
            self._form(contender),
            call,
            arguments,
            lambda: self._judge(contender).backward(*call(*arguments)),
        )

    def _loop_states(self, contender: Contender) -> int:
        return int(self._cost(contender, "recurrent", self.length).state_bytes) * self.length

    def _decode(self, contender: Contender) -> Subject | None:
        if contender.prepare is None or contender.step is None:
            return None
        same = [c for c in self.contenders if (c.name, c.backend) == (contender.name, contender.backend)]
        if contender is not same[0]:
            return None  # a single token has no other form
        self._form(contender)
        last = min(contender.decoded, self.length)
        before = contender.prepare(*self.inputs, last)
        step = self.place.compiled(contender.step)
        tokens = [tuple(x[:, t] for x in self.inputs) for t in range(self.length - last, self.length)]

        def check() -> Verdict:
            state, outputs = before, []
            for token in tokens:
                state, o = step(state, *token)
                outputs.append(o)
            return self._judge(contender).decode(self.place.xp.stack(outputs, axis=1))

        state_bytes = sum(math.prod(x.shape) * x.dtype.itemsize for x in before)
        return Subject(contender, "", step, (before, *tokens[0]), check, state_bytes)

    def _cost(self, contender: Contender, form: str, length: int) -> Any:
        import hla

        s = self.setting
        return hla.cost(
            contender.operator, T=length, d=s.d, dv=s.dv, heads=s.heads, form=form, dtype=s.dtype, order=contender.order
        )

    def _flops(self, what: str, subject: Subject) -> int:
        """Operations of the form that runs, in chunks of 64; of softmax attention half of all pairs."""
        s, contender = self.setting, subject.contender
        if contender.kind == "softmax":
            pairs = 2 * self.length if what == "decode" else self.length**2
            flops = pairs * (s.d + s.dv) * s.heads
        elif what == "decode":
            flops = int(self._cost(contender, "recurrent", 1).flops)
        else:
            flops = int(self._cost(contender, contender.work or subject.form, self.length).flops)
        return flops * (GRADIENT_WORK if what == "backward" else 1)

    def _traffic(self, what: str, subject: Subject) -> int | None:
        """Bytes that the form that runs has to move; None for peers that are something else."""
        contender = subject.contender
        if contender.kind != "operator":
            return None
        if what == "decode":
            return int(self._cost(contender, "recurrent", 1).traffic_bytes)
        found = self._cost(contender, subject.form, self.length)
        return int(found.traffic_bytes + (found.backward_traffic_bytes if what == "backward" else 0))

    def _row(
        self, what: str, subject: Subject, verdict: Verdict | None, note: str, timing: Timing | None
    ) -> dict[str, Any]:
        s, contender = self.setting, subject.contender
        seconds = None if timing is None else timing.median
        rate = None if seconds is None else self._flops(what, subject) / seconds
        moved = self._traffic(what, subject)
        traffic = None if seconds is None or moved is None else moved / seconds
        tokens = 1 if what == "decode" else self.length
        peak = None
        if seconds is not None and what != "decode":
            peak = peak_bytes(self.place, subject.call, subject.arguments)
        return {
            "name": contender.name,
            "kind": contender.kind,
            "operator": contender.operator,
            "order": contender.order,
            "operator_label": label(contender.operator, contender.order),
            "backend": contender.backend,
            "arrays": str(self.place),
            "form_asked": None if what == "decode" else contender.form,
            "form": subject.form or None,
            "pass": what,
            "T": self.length,
            "heads": s.heads,
            "d": s.d,
            "dv": s.dv,
            "dtype": s.dtype,
            "seconds": seconds,
            "fastest": None if timing is None else timing.fastest,
            "samples": 0 if timing is None else len(timing.samples),
            "tokens_per_second": None if seconds is None else tokens / seconds,
            "flops_per_second": rate,
            "share_of_matmul_rate": None if rate is None else rate / max(self.rates["batched"], self.rates["large"]),
            "bytes_per_second": traffic,
            "share_of_copy_rate": None if traffic is None else traffic / self.rates["copy"],
            "peak_bytes": peak,
            "state_bytes": subject.state_bytes,
            "error": None if verdict is None else verdict.error,
            "budget": None if verdict is None else verdict.budget,
            "ok": verdict is not None and verdict.ok,
            "note": note,
        }


def _nothing() -> None:
    """What stands for a contender that could not be made."""


def _no_verdict() -> Verdict:
    raise AssertionError("a contender that failed is not checked again")

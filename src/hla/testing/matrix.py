"""The matrix of checks: operators × forms × cases on one backend, each against the definition in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import hla
from hla import arrays
from hla.arrays import Array
from hla.backends import registered
from hla.errors import BackendNotInstalledError, BackendUnsupportedError, OptionError, message
from hla.testing.budgets import UNIT_ROUNDOFF, error_budget, per_token_error
from hla.testing.cases import CASES, FORMS, OPERATORS, Case, Options
from hla.testing.expected import DIFFERENCE_ERROR, expected, expected_gradients
from hla.testing.inputs import Inputs, find_dtype, has_float64, make_inputs
from hla.testing.libraries import Placement, placements, to_numpy

COVERAGES = ("full", "pairs", "few", "one")


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one check."""

    backend: str
    library: str
    operator: str
    order: int | None
    form: str
    case: str
    dtype: str
    status: str
    """ "ok", "failed" or "unsupported" """
    error: float | None
    """the largest error per token; None where nothing was compared"""
    budget: float | None
    values: int
    """how many numbers were compared"""
    note: str = ""
    """why a check failed, or why the backend does not support it"""


class Outcome:
    """Errors and budgets of the comparisons of one check."""

    def __init__(self) -> None:
        self.error, self.budget, self.values = 0.0, math.inf, 0
        self._share = -1.0

    def compare(self, error: float, budget: float, values: int) -> None:
        """Add a comparison; the one that takes the largest share of its budget is kept."""
        share = error / budget
        if share > self._share:
            self._share, self.error, self.budget = share, error, budget
        self.values += values


@dataclass(frozen=True)
class Check:
    """One operator in one form on one placement, for one case."""

    backend: str
    place: Placement
    operator: str
    order: int | None
    form: str
    case: Case

    def run(self) -> Row:
        """Run the check; whatever goes wrong is in the row."""
        outcome = Outcome()
        try:
            refusal = self._refusal()
            if refusal:
                return self._row("unsupported", outcome, refusal)
            _KINDS[self.case.kind](self, outcome)
        except (BackendUnsupportedError, BackendNotInstalledError) as error:
            return self._row("unsupported", outcome, str(error))
        except Exception as error:  # a row of its own: one broken case must not hide the others
            return self._row("failed", outcome, f"{type(error).__name__}: {error}")
        if outcome.error <= outcome.budget:
            return self._row("ok", outcome)
        return self._row("failed", outcome, f"error {outcome.error:.1e} above the budget {outcome.budget:.1e}")

    def _refusal(self) -> str:
        xp, dtype = self.place.xp, self.case.dtype
        if dtype == "float64" and not has_float64(xp):
            return "no float64 without jax_enable_x64"
        try:
            find_dtype(xp, dtype)
        except OptionError:
            return f"{self.place.library} has no {dtype}"
        return ""

    def _row(self, status: str, outcome: Outcome, note: str = "") -> Row:
        compared = status != "unsupported" and outcome.budget < math.inf
        return Row(
            self.backend,
            str(self.place),
            self.operator,
            self.order,
            self.form,
            self.case.name,
            self.case.dtype,
            status,
            outcome.error if compared else None,
            outcome.budget if compared else None,
            outcome.values,
            note,
        )

    @property
    def named(self) -> Options:
        """The keyword `order`, where the operator has it."""
        return {} if self.order is None else {"order": self.order}

    def call(self, inputs: Inputs, options: Options, state: Any = None) -> Any:
        """The operator on the backend under test, which has to be the one that runs."""
        chosen = {"form": self.form, "backend": self.backend, **options, **self.named}
        plan = hla.explain(self.operator, *inputs, **chosen)
        if (plan.backend, plan.form) != (self.backend, self.form):
            raise AssertionError(f"{plan.backend} would run, form {plan.form}, not {self.backend}, form {self.form}")

        def run(q: Array, k: Array, v: Array, state: Any) -> Any:
            return getattr(hla, self.operator)(q, k, v, **chosen, initial_state=state)

        return self.place.compiled(run)(*inputs, state)

    def stepper(self, options: Options) -> Callable[[Any, Inputs, Options], Any]:
        """`hla.step` on the backend under test, as a function of (state, token, options that vary over time)."""

        def run(state: Any, token: Inputs, timed: Options) -> Any:
            q, k, v = token
            return hla.step(state, q, k, v, **options, **timed, **self.named, backend=self.backend)

        return self.place.compiled(run)

    def expected(self, inputs: Inputs, options: Options) -> Any:
        """The definition's output."""
        return expected(self.operator, *inputs, order=self.order, **options)

    def cotangent(self, inputs: Inputs) -> Array:
        """A random do, of the output's shape."""
        batch = arrays.broadcast_shapes(*(tuple(x.shape[:-2]) for x in inputs))
        length, dv = inputs.v.shape[-2:]
        place = self.place
        return make_inputs(
            place.xp, T=length, d=1, dv=dv, batch=batch, dtype=self.case.dtype, device=place.device, seed=7
        ).v

    def budget(self, inputs: Inputs, options: Options, values: int, *, gradient: bool = False) -> float:
        """The budget of this check's comparisons."""
        return error_budget(
            self.operator,
            self.case.dtype,
            inputs.v.shape[-3 if options.get("axis") == -3 else -2],
            inputs.q.shape[-1],
            dv=inputs.v.shape[-1],
            order=self.order,
            definition=options.get("definition", "exact"),
            normalize=options.get("normalize", False),
            gradient=gradient,
            values=values,
            products=registered()[self.backend].spec.products.get(self.case.dtype),
        )


def _check_whole(check: Check, outcome: Outcome) -> None:
    inputs, options = check.case.make(check.place)
    want = check.expected(inputs, options)
    o = check.call(inputs, options)
    _require_output(o, inputs, want)
    got = to_numpy(o)
    if options.get("axis") == -3:
        got, want = (x.swapaxes(-2, -3) for x in (got, want))
    outcome.compare(per_token_error(got, want), check.budget(inputs, options, want.size), want.size)


def _require_output(o: Array, inputs: Inputs, want: Any) -> None:
    if arrays.family(o) != arrays.family(inputs.v) or o.dtype != inputs.v.dtype:
        raise AssertionError(f"the output is {arrays.family(o)} {o.dtype}, v is {inputs.v.dtype}")
    if tuple(o.shape) != want.shape:
        raise AssertionError(f"the output has shape {tuple(o.shape)}, not {want.shape}")


_TIMED = ("log_decay", "token_mask")


def _cut(inputs: Inputs, options: Options, start: int, stop: int) -> tuple[Inputs, Options]:
    """Some of the tokens, and their share of the options that have a time axis."""
    pieces = Inputs(*(x[..., start:stop, :] for x in inputs))
    return pieces, {n: x[..., start:stop] if n in _TIMED else x for n, x in options.items()}


def _check_split(check: Check, outcome: Outcome) -> None:
    """Three pieces, the second one empty, then single tokens: together they are the whole."""
    inputs, options = check.case.make(check.place)
    want = check.expected(inputs, options)
    length, last = want.shape[-2], want.shape[-2] - 5
    state, outputs = None, []
    for start, stop in ((0, 13), (13, 13), (13, last)):
        piece, own = _cut(inputs, options, start, stop)
        o, state = check.call(piece, {**own, "return_state": True}, state)
        outputs.append(to_numpy(o))
    step = check.stepper({n: x for n, x in options.items() if n not in ("chunk_size", *_TIMED)})
    for t in range(last, length):
        token = Inputs(*(x[..., t, :] for x in inputs))
        o, state = step(state, token, {n: options[n][..., t] for n in _TIMED if n in options})
        outputs.append(to_numpy(o)[..., None, :])
    import numpy as np

    got = np.concatenate(outputs, axis=-2)
    outcome.compare(per_token_error(got, want), check.budget(inputs, options, want.size), want.size)


def _check_packed(check: Check, outcome: Outcome) -> None:
    """Packed sequences, and one more token for each of the states that come back."""
    inputs, options = check.case.make(check.place)
    want = check.expected(inputs, options)
    o, state = check.call(inputs, {**options, "return_state": True})
    _require_output(o, inputs, want)
    offsets = [int(i) for i in to_numpy(options["cu_seqlens"])]
    budget = check.budget(inputs, options, want.size)
    outcome.compare(per_token_error(o, want, cu_seqlens=options["cu_seqlens"]), budget, want.size)
    count, xp = len(offsets) - 1, check.place.xp
    more = make_inputs(xp, T=count, d=inputs.q.shape[-1], dv=inputs.v.shape[-1], batch=inputs.q.shape[:-2],
                       dtype=check.case.dtype, device=check.place.device, seed=6)  # fmt: skip
    kept = {n: x for n, x in options.items() if n not in ("cu_seqlens", "chunk_size")}
    o_t, _ = check.stepper(kept)(state, Inputs(*(xp.moveaxis(x, -2, 0) for x in more)), {})
    stepped = to_numpy(o_t)
    for n, (start, stop) in enumerate(pairwise(offsets)):
        longer = Inputs(
            *(
                xp.concat([x[..., start:stop, :], y[..., n : n + 1, :]], axis=-2)
                for x, y in zip(inputs, more, strict=True)
            )
        )
        whole = check.expected(longer, kept)
        got = whole.copy()
        got[..., -1, :] = stepped[n]
        outcome.compare(per_token_error(got, whole), budget, stepped[n].size)


def _check_gradient(check: Check, outcome: Outcome) -> None:
    """`hla.vjp`, and differentiation by the library itself."""
    inputs, options = check.case.make(check.place)
    do = check.cotangent(inputs)
    want = expected_gradients(check.operator, *inputs, do, order=check.order, **options)
    for found in _gradients(check, inputs, options, do):
        _compare_gradients(check, outcome, inputs, options, found, want)


def _gradients(check: Check, inputs: Inputs, options: Options, do: Array) -> Iterator[dict[str, Array]]:
    """From `hla.vjp` where the backend has a gradient for it, and from torch or JAX."""
    library = arrays.family(inputs.q)
    native = library in ("torch", "jax")
    if hla.backends.get(check.backend).load_gradient is not None or not native:
        chosen = {"form": check.form, "backend": check.backend, **options, **check.named}

        def pulled(q: Array, k: Array, v: Array, do: Array) -> dict[str, Array]:
            _, pull = hla.vjp(check.operator, q, k, v, **chosen)
            return {n: x for n, x in pull(do)._asdict().items() if x is not None}

        yield check.place.compiled(pulled)(*inputs, do)
    if not native:
        return
    arguments = {
        **inputs._asdict(),
        **{n: options[n] for n in ("decay", "log_decay") if arrays.is_array(options.get(n))},
    }
    fixed = {n: x for n, x in options.items() if n not in arguments}

    def run(*values: Array) -> Array:
        given = dict(zip(arguments, values, strict=True))
        own = Inputs(given.pop("q"), given.pop("k"), given.pop("v"))
        return check.call(own, {**fixed, **given})

    found: Sequence[Array]
    if library == "torch":
        import torch

        leaves = [x.detach().clone().requires_grad_(True) for x in arguments.values()]
        found = torch.autograd.grad(run(*leaves), leaves, do)
    else:
        import jax

        found = jax.jit(lambda values, do: jax.vjp(run, *values)[1](do))(tuple(arguments.values()), do)
    yield dict(zip(arguments, found, strict=True))


def _compare_gradients(
    check: Check, outcome: Outcome, inputs: Inputs, options: Options, found: dict[str, Array], want: dict[str, Any]
) -> None:
    for name, gradient in found.items():
        got, reference = to_numpy(gradient), want[name]
        if name in ("decay", "log_decay"):
            got, reference = got.reshape(-1, 1, 1), reference.reshape(-1, 1, 1)
            got, reference = got.swapaxes(0, 1), reference.swapaxes(0, 1)
        budget = check.budget(inputs, options, reference.size, gradient=True) + DIFFERENCE_ERROR
        budget += UNIT_ROUNDOFF[arrays.dtype_name(gradient.dtype)]  # a decay has a dtype of its own
        outcome.compare(per_token_error(got, reference), budget, reference.size)


def _check_gradient_through_state(check: Check, outcome: Outcome) -> None:
    """Two pieces, whose gradients together are those of the whole."""
    inputs, options = check.case.make(check.place)
    xp, length, do = check.place.xp, inputs.v.shape[-2], check.cotangent(inputs)
    want = expected_gradients(check.operator, *inputs, do, order=check.order, **options)
    chosen = {"form": check.form, "backend": check.backend, "return_state": True, **options, **check.named}

    def pulled(q: Array, k: Array, v: Array, do: Array) -> dict[str, Array]:
        first, second = (Inputs(*(x[..., a:b, :] for x in (q, k, v))) for a, b in ((0, 4), (4, length)))
        (_, state), pull_first = hla.vjp(check.operator, *first, **chosen)
        (_, final), pull_second = hla.vjp(check.operator, *second, **chosen, initial_state=state)
        zero = type(final)(*(xp.zeros_like(x) for x in final))
        later = pull_second((do[..., 4:, :], zero))
        earlier = pull_first((do[..., :4, :], later.initial_state))
        found = {n: xp.concat([getattr(earlier, n), getattr(later, n)], axis=-2) for n in ("q", "k", "v")}
        rates: list[Array] = [earlier.decay, later.decay]
        return {**found, "decay": rates[0] + rates[1]}

    _compare_gradients(check, outcome, inputs, options, check.place.compiled(pulled)(*inputs, do), want)


_KINDS: dict[str, Callable[[Check, Outcome], None]] = {
    "whole": _check_whole,
    "split": _check_split,
    "packed": _check_packed,
    "gradient": _check_gradient,
    "gradient through a state": _check_gradient_through_state,
}


def plan_checks(backend: str, place: Placement, coverage: str = "full") -> list[Check]:
    """The checks of a backend on one placement, not yet run.

    Args:
        backend: the name of a registered backend.
        place: see `placements`.
        coverage: "full": all operators, forms and cases. "pairs": every operator with every case, the forms taking
            turns. "few": every operator in every form once, and every case once, operators and forms taking turns.
            "one": every operator once, plain and chunkwise.

    Returns:
        Checks, each with a method `run`.

    Raises:
        OptionError: an unknown coverage.
        UnknownBackendError: no backend of that name.

    Example:
        >>> check = plan_checks("numpy", Placement("numpy"), "few")[0]
        >>> check.run().status
        'ok'
    """
    if coverage not in COVERAGES:
        raise OptionError(message("coverage", f"one of {', '.join(COVERAGES)}", repr(coverage), "Check the spelling."))
    hla.backends.get(backend)
    if coverage == "one":
        return [Check(backend, place, operator, order, "chunkwise", CASES[0]) for operator, order in OPERATORS]
    checks = []
    for j, case in enumerate(CASES):
        chosen = []
        for i, (operator, order) in enumerate(OPERATORS):
            forms = [form for form in FORMS if case.exists_for(operator, order, form)]
            if coverage != "full" and case.name != "plain" and forms:
                forms = [forms[(i + j // 2) % len(forms)]]
            chosen += [Check(backend, place, operator, order, form, case) for form in forms]
        if coverage == "few" and case.name != "plain":
            chosen = chosen[j % len(chosen) :][:1]
        checks += chosen
    return checks


def check_backend(
    name: str,
    *,
    coverage: str = "full",
    libraries: Sequence[str] | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> list[Row]:
    """Run a backend through the matrix: operators × forms × cases, on every library and device that it serves here.

    Each check names the backend and asserts that it is the one that runs. What it refuses with a
    `BackendUnsupportedError` is a row of its own, "unsupported", with the reason; nothing else is let pass.

    Args:
        name: a registered backend.
        coverage: as for `plan_checks`.
        libraries: names of array libraries; None for all that are installed.
        progress: called before each check with (number of checks done, number of all checks, what comes now).

    Returns:
        One `Row` a check.

    Raises:
        UnknownBackendError: no backend of that name.
        BackendUnsupportedError: it cannot run here at all.

    Example:
        >>> rows = check_backend("numpy", coverage="few", libraries=["numpy"])
        >>> {row.status for row in rows}
        {'ok'}
    """
    places = placements(name, libraries)
    if not places:
        reason = hla.backends.get(name).availability().reason
        raise BackendUnsupportedError(
            message("name", "a backend that can run here", f"{name}: {reason}", "See hla info.")
        )
    checks = [check for place in places for check in plan_checks(name, place, coverage)]
    rows = []
    for done, check in enumerate(checks):
        if progress is not None:
            progress(done, len(checks), f"{name} on {check.place}: {check.operator}, {check.case.name}")
        rows.append(check.run())
    return rows

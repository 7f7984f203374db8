"""Every operator against its definition, with every option: per head, per token, in every dtype.

The product of all options is too large, so `CASES` is a fixed design in which every pair of settings occurs; each case
runs in every form, on every backend that takes it. Tokens, heads, d and dv are different primes.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

import budget
import hla

BATCH, HEADS, TOKENS, D, DV = 2, 3, 17, 5, 7
CHUNK = 5
LAMBDA = 0.7
CAUSAL = ("recurrent", "scan", "chunkwise", "parallel")
WHOLE = ("chunkwise", "parallel")


class Variant(NamedTuple):
    """What fixes the mathematics."""

    op: str
    order: int | None = None
    mask: str = "causal"
    definition: str = "exact"


NAMED = ("linear_attention", "hla2", "ahla", "hla3")
VARIANTS = (
    *(Variant(op, None, mask) for op in NAMED for mask in ("causal", "prefix", "none")),
    *(Variant(op, definition="as_printed") for op in ("hla2", "hla3")),
    *(Variant("higher_order", order, mask) for order in (4, 5) for mask in ("causal", "none")),
)
FACTORS: dict[str, tuple[Any, ...]] = {
    "variant": VARIANTS,
    "decay": (None, "number", "per head", "per token", "resets"),
    "scale": (1.0, 0.3, -1.7),
    "normalize": (False, True),
    "ridge": (False, True),
    "token_mask": (False, True),
}


class Case(NamedTuple):
    """One setting of every factor."""

    variant: Variant
    decay: str | None
    scale: float
    normalize: bool
    ridge: bool
    token_mask: bool

    @property
    def valid(self) -> bool:
        """Whether the contract defines it."""
        op, _, mask, _ = self.variant
        return not (mask == "none" and self.decay) and not (self.ridge and op != "hla2")

    @property
    def pairs(self) -> frozenset[tuple[Any, ...]]:
        """All pairs of settings in it."""
        return frozenset(itertools.combinations(zip(self._fields, self, strict=True), 2))

    @property
    def forms(self) -> tuple[str, ...]:
        return WHOLE if self.variant.mask == "none" else CAUSAL

    @property
    def options(self) -> dict[str, Any]:
        """The options that are no arrays."""
        op, order, mask, definition = self.variant
        found: dict[str, Any] = {
            "mask": mask,
            "definition": definition,
            "scale": self.scale,
            "normalize": self.normalize,
        }
        if op == "hla2" and self.ridge:
            found["ridge"] = LAMBDA
        if order is not None:
            found["order"] = order
        return found

    def __str__(self) -> str:
        op, order, mask, definition = self.variant
        words = [op + (str(order) if order else ""), mask, definition, self.decay or "no decay", f"scale {self.scale}"]
        return ", ".join(words + [n for n in ("normalize", "ridge", "token_mask") if getattr(self, n)])


def every_case() -> Iterator[Case]:
    return (case for case in itertools.starmap(Case, itertools.product(*FACTORS.values())) if case.valid)


def pairwise() -> list[Case]:
    """Few cases with all pairs: one for each variant and decay that adds most new pairs, then what is still missing."""
    groups: dict[Any, list[Case]] = {}
    for case in every_case():
        groups.setdefault((case.variant, case.decay), []).append(case)
    missing = set().union(*(case.pairs for group in groups.values() for case in group))
    chosen = []

    def take(group: list[Case]) -> None:
        best = max(group, key=lambda case: len(case.pairs & missing))
        missing.difference_update(best.pairs)
        chosen.append(best)

    for group in groups.values():
        take(group)
    while missing:
        take([case for group in groups.values() for case in group if case.pairs & missing])
    return chosen


CASES = pairwise()


class Arrays(NamedTuple):
    """A case's arrays in NumPy float64."""

    q: Any
    k: Any
    v: Any
    decay: Any
    log_decay: Any
    token_mask: Any

    @property
    def log_decays(self) -> Any:
        """(*batch, T), whatever the kind; None for none."""
        if self.decay is None:
            return self.log_decay
        return np.broadcast_to(np.log(np.asarray(self.decay, dtype=np.float64))[..., None], (BATCH, HEADS, TOKENS))


def draw(case: Case, rounding: Any = lambda x: x, size: float = 1.0) -> Arrays:
    """Inputs of a case, as `rounding` leaves them."""
    rng = np.random.default_rng(20251027)
    q = size * rng.normal(size=(BATCH, HEADS, TOKENS, D))
    k = size * rng.normal(size=(BATCH, HEADS, TOKENS, D))
    v = rng.normal(size=(BATCH, HEADS, TOKENS, DV))
    decay = {"number": 0.83, "per head": rounding(np.asarray([0.6, 0.9, 1.0]))}.get(case.decay or "")
    log_decay = None
    if case.decay in ("per token", "resets"):
        log_decay = -rng.exponential(0.3, size=(BATCH, HEADS, TOKENS))
        if case.decay == "resets":
            log_decay[rng.random(log_decay.shape) < 0.15] = -np.inf
        log_decay = rounding(log_decay)
    token_mask = rng.random((BATCH, 1, TOKENS)) < 0.8 if case.token_mask else None
    return Arrays(*(rounding(x) for x in (q, k, v)), decay, log_decay, token_mask)


def judge(case: Case, arrays: Arrays) -> budget.Expected:
    q, k, v = arrays[:3]
    options = {"log_decay": arrays.log_decays, "token_mask": arrays.token_mask}
    return budget.expected(case.variant.op, q, k, v, **options, **case.options)


@functools.cache
def judged(case: Case) -> budget.Expected:
    return judge(case, draw(case))


def allowed(case: Case, dtype: str) -> float:
    op, order, _, definition = case.variant
    return budget.tolerance(dtype, TOKENS, D, budget.stages(op, order, definition) + 2 * case.normalize)


def outputs(lib: Any, case: Case, arrays: Arrays, dtype: str, forms: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """(label, output) in every form and on every backend that takes the call."""
    q, k, v = (lib.asarray(x, dtype) for x in arrays[:3])
    options: dict[str, Any] = dict(case.options)
    if arrays.decay is not None:
        options["decay"] = lib.asarray(arrays.decay, dtype) if case.decay == "per head" else arrays.decay
    for name, x, kind in (("log_decay", arrays.log_decay, dtype), ("token_mask", arrays.token_mask, None)):
        if x is not None:
            options[name] = lib.asarray(x, kind)
    for form in forms:
        more = {**options, "form": form, "chunk_size": CHUNK}
        plan = hla.explain(case.variant.op, q, k, v, **more)
        assert plan.form == form
        for backend in (c.name for c in plan.candidates if c.ok):
            out = getattr(hla, case.variant.op)(q, k, v, **more, backend=backend)
            assert out.dtype == v.dtype
            assert out.shape == (BATCH, HEADS, TOKENS, DV)
            yield f"{case}, {form} on {backend}", lib.numpy(out)


def test_the_design_holds_every_pair() -> None:
    wanted = set().union(*(case.pairs for case in every_case()))
    assert wanted == set().union(*(case.pairs for case in CASES))
    assert all(case.valid for case in CASES)
    assert len(wanted) > 250


@pytest.mark.parametrize("case", CASES, ids=str)
def test_operator_equals_its_definition(lib: Any, case: Case) -> None:
    for label, out in outputs(lib, case, draw(case), "float64", case.forms):
        budget.assert_within(out, judged(case), allowed(case, "float64"), "float64", label)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("number", range(len(CASES)), ids=[str(case) for case in CASES])
def test_low_precision_inputs_lose_only_their_own_rounding(lib: Any, number: int, dtype: str) -> None:
    """Accumulation in float32: the result is that of the rounded inputs, rounded once more."""
    if dtype not in lib.floats:
        pytest.skip(f"{lib.name} has no {dtype}")
    case = CASES[number]
    arrays = draw(case, lambda x: lib.numpy(lib.asarray(x, dtype)).astype(np.float64), size=0.4)
    want = judge(case, arrays)
    assert np.abs(want.value).max() < 6e4  # float16 holds it
    form = case.forms[(number + len(dtype)) % len(case.forms)]
    for label, out in outputs(lib, case, arrays, dtype, (form,)):
        budget.assert_within(out, want, allowed(case, "float32"), dtype, label)

"""Every operator against its definition, with every option: per head, per token, in every dtype.

The product of all options is too large, so `CASES` is a fixed design in which every pair of settings occurs; each case
runs in every form, on every backend that takes it. Tokens, heads, d and dv are different primes.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
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
    """Few cases with all pairs: one for each variant and decay that adds most new pairs, then what is still missing.

    Among equals the case wins whose settings have been used least.
    """
    groups: dict[Any, list[Case]] = {}
    for case in every_case():
        groups.setdefault((case.variant, case.decay), []).append(case)
    missing = set().union(*(case.pairs for group in groups.values() for case in group))
    used: Counter[Any] = Counter()
    chosen = []

    def take(group: list[Case]) -> None:
        best = max(group, key=lambda case: (len(case.pairs & missing), -sum(used[pair] for pair in case.pairs)))
        missing.difference_update(best.pairs)
        used.update(best.pairs)
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


@pytest.mark.parametrize("number", range(len(CASES)), ids=[str(case) for case in CASES])
def test_low_precision_inputs_lose_only_their_own_rounding(lib: Any, number: int) -> None:
    """Accumulation in float32: the result is that of the rounded inputs, rounded once more. A form for each dtype."""
    case = CASES[number]
    for turn, dtype in enumerate(name for name in lib.floats if name != "float64"):
        arrays = draw(case, functools.partial(rounded, lib, dtype), size=0.4)
        want = judge(case, arrays)
        assert np.abs(want.value).max() < 6e4  # float16 holds it
        form = case.forms[(number + turn) % len(case.forms)]
        for label, out in outputs(lib, case, arrays, dtype, (form,)):
            budget.assert_within(out, want, allowed(case, "float32"), dtype, f"{label} in {dtype}")


def test_the_budget_sees_a_single_wrong_token(lib: Any) -> None:
    """Outputs grow like t³: an error norm over all tokens would not notice that the first ones are wrong."""
    case = Case(Variant("hla3"), None, 1.0, False, False, False)
    want = judge(case, draw(case))
    wrong = np.array(want.value)
    wrong[0, 0, 0] *= 1.000001
    relative = np.linalg.norm(wrong - want.value) / np.linalg.norm(want.value)
    assert relative < 1e-8
    found = budget.errors(wrong, want, "float64")
    assert found[0, 0, 0] > 1e6 * allowed(case, "float64")
    assert np.count_nonzero(found) == 1
    wrong[0, 0, 0] = np.nan
    with pytest.raises(AssertionError, match=r"token 0 of batch \(0, 0\)"):
        budget.assert_within(wrong, want, 1.0, "float64")


def rounded(lib: Any, dtype: str, x: Any) -> Any:
    return lib.numpy(lib.asarray(x, dtype)).astype(np.float64)


def streams(lib: Any, dtype: str = "float64") -> tuple[list[Any], list[Any]]:
    """q, k, v in NumPy and in the library."""
    arrays = draw(Case(Variant("hla2"), None, 1.0, False, False, False))[:3]
    return list(arrays), [lib.asarray(x, dtype) for x in arrays]


def within(lib: Any, out: Any, want: budget.Expected, passes: int) -> None:
    budget.assert_within(lib.numpy(out), want, budget.tolerance("float64", TOKENS, D, passes), "float64")


@pytest.mark.parametrize("op", NAMED)
@pytest.mark.parametrize("form", ["recurrent", "scan", "chunkwise"])
def test_float32_does_not_drift_over_hundreds_of_tokens(lib: Any, op: str, form: str) -> None:
    """Judged by the same operator in float64; the scale of a row is that operator on absolute values."""
    length = 509
    rng = np.random.default_rng(20251028)
    values = [rng.normal(size=(length, n)).astype(np.float32).astype(np.float64) for n in (D, D, DV)]
    for decay in (None, 0.99):
        want = budget.Expected(
            getattr(hla, op)(*values, decay=decay),
            getattr(hla, op)(*(np.abs(x) for x in values), decay=decay).max(axis=-1),
        )
        out = getattr(hla, op)(*(lib.asarray(x, "float32") for x in values), decay=decay, form=form)
        most = budget.tolerance("float32", length, D, budget.stages(op))
        budget.assert_within(lib.numpy(out), want, most, "float32", f"{op}, {form}, {decay}")


@pytest.mark.parametrize("form", CAUSAL)
@pytest.mark.parametrize("mask", ["causal", "prefix"])
@pytest.mark.parametrize("normalize", [False, True])
def test_a_key_moment_held_at_the_identity_gives_linear_attention_over_queries(
    lib: Any, form: str, mask: str, normalize: bool
) -> None:
    """With S = I throughout, o_t = q_tᵀ Σ (S q_j) v_jᵀ = Σ (q_t·q_j) v_j. Zero keys leave an S given at the start."""
    (q, _, v), (x, y, z) = streams(lib)
    options: dict[str, Any] = {"mask": mask, "normalize": normalize}
    state = hla.init_state("hla2", batch=(BATCH, HEADS), d=D, dv=DV, like=x, **options)
    state = state._replace(key_moment=lib.asarray(np.broadcast_to(np.eye(D), (BATCH, HEADS, D, D))))
    out = hla.hla2(x, 0 * y, z, initial_state=state, form=form, chunk_size=CHUNK, **options)
    within(lib, out, budget.expected("linear_attention", q, q, v, normalize=normalize), 4)


@pytest.mark.parametrize("form", CAUSAL)
def test_a_key_moment_that_starts_at_the_identity_decays_with_the_state(lib: Any, form: str) -> None:
    """With zero keys S_j = γ^(j+1) I and F decays by γ²: v_j weighs γ^(2(t−j)) γ^(j+1) = γ^(t+1) γ^(t−j)."""
    (q, _, v), (x, y, z) = streams(lib)
    state = hla.init_state("hla2", batch=(BATCH, HEADS), d=D, dv=DV, like=x)
    state = state._replace(key_moment=lib.asarray(np.broadcast_to(np.eye(D), (BATCH, HEADS, D, D))))
    out, last = hla.hla2(x, 0 * y, z, initial_state=state, decay=0.9, form=form, chunk_size=CHUNK, return_state=True)
    plain = budget.expected("linear_attention", q, q, v, log_decay=np.full((1, TOKENS), np.log(0.9)))
    fade = 0.9 ** (np.arange(TOKENS) + 1.0)
    within(lib, out, budget.Expected(plain.value * fade[:, None], plain.scale * fade), 2)
    assert np.allclose(lib.numpy(last.key_moment), 0.9**TOKENS * np.eye(D), rtol=1e-13, atol=0)


def test_ridge_without_keys_is_linear_attention_over_queries(lib: Any) -> None:
    (q, _, v), (x, y, z) = streams(lib)
    for mask in ("causal", "prefix", "none"):
        out = hla.hla2(x, 0 * y, z, ridge=1.0, mask=mask, chunk_size=CHUNK)
        within(lib, out, budget.expected("linear_attention", q, q, v, mask=mask), 2)


def test_queries_that_are_the_keys(lib: Any) -> None:
    """With q = k, A is symmetric: HLA₂ and AHLA part the pairs i ≤ j and j ≤ i of the same sum, the prefix form's."""
    (q, _, v), (x, _, z) = streams(lib)
    everything = budget.expected("hla2", q, q, v, mask="prefix")
    prefix, other = (op(x, x, z, mask="prefix", chunk_size=CHUNK) for op in (hla.hla2, hla.ahla))
    within(lib, prefix, everything, 2)
    within(lib, other, everything, 2)
    sizes = (q**2).sum(axis=-1, keepdims=True)
    twice = hla.linear_attention(x, x, lib.asarray(sizes * v), chunk_size=CHUNK)  # the pairs i = j
    both = hla.hla2(x, x, z, chunk_size=CHUNK) + hla.ahla(x, x, z, chunk_size=CHUNK) - twice
    within(lib, both, budget.Expected(everything.value, 3 * everything.scale), 2)


@pytest.mark.parametrize(("order", "name"), [(1, "linear_attention"), (2, "hla2"), (3, "hla3")])
def test_low_orders_are_the_named_operators(lib: Any, order: int, name: str) -> None:
    """Exactly: same operator, same state."""
    _, (q, k, v) = streams(lib)
    for mask in ("causal", "prefix", "none"):
        options: dict[str, Any] = {"mask": mask, "scale": 0.7, "normalize": True, "return_state": mask != "none"}
        if mask != "none":
            options["decay"] = 0.9
        named, general = getattr(hla, name)(q, k, v, **options), hla.higher_order(q, k, v, order=order, **options)
        if mask == "none":
            named, general = (named, ()), (general, ())
        assert np.array_equal(lib.numpy(named[0]), lib.numpy(general[0]))
        assert type(named[1]) is type(general[1])
        for x, y in zip(named[1], general[1], strict=True):
            assert np.array_equal(lib.numpy(x), lib.numpy(y))


@pytest.mark.parametrize("order", [4, 5, 6, 7])
@pytest.mark.parametrize("mask", ["causal", "none"])
def test_high_orders_are_compositions(lib: Any, order: int, mask: str) -> None:
    """Order 2m is HLA₂ m times; order 2m + 1 is HLA₂ m − 1 times after HLA₃; each with the decay."""
    (q, k, v), (x, y, z) = streams(lib)
    options: dict[str, Any] = {"mask": mask, "scale": 0.3, "chunk_size": CHUNK}
    decays = {} if mask == "none" else {"log_decay": np.full((1, TOKENS), np.log(0.9))}
    if decays:
        options["decay"] = 0.9
    want = budget.expected("higher_order", q, k, v, order=order, mask=mask, scale=0.3, **decays)
    composed = z if order % 2 == 0 else hla.hla3(x, y, z, **options)
    for _ in range(order // 2 - order % 2):
        composed = hla.hla2(x, y, composed, **options)
    within(lib, composed, want, order)
    within(lib, hla.higher_order(x, y, z, order=order, **options), want, order)


@pytest.mark.parametrize("form", CAUSAL)
def test_heads_and_batch_entries_do_not_meet(lib: Any, form: str) -> None:
    """Reordering them reorders the outputs; changing one leaves the others as they are, to the last bit.

    (Reordered, libraries may add up in another order, for reasons of alignment.)
    """
    (q, k, v), _ = streams(lib)
    decay = np.asarray([[0.6, 0.9, 1.0], [0.8, 0.7, 0.5]])

    def run(q: Any, k: Any, v: Any, decay: Any) -> Any:
        x, y, z, g = (lib.asarray(a) for a in (q, k, v, decay))
        options: dict[str, Any] = {"normalize": True, "form": form, "chunk_size": CHUNK, "return_state": True}
        out, state = hla.hla3(x, y, z, decay=g, **options)
        return [lib.numpy(a) for a in (out, *state)]

    plain = run(q, k, v, decay)
    order = (slice(None, None, -1), [2, 0, 1])
    for x, y in zip(plain, run(*(a[order] for a in (q, k, v, decay))), strict=True):
        assert np.allclose(x[order], y, rtol=1e-12, atol=1e-12 * np.abs(x).max())
    for changed in range(3):
        inputs = [np.array(a) for a in (q, k, v)]
        inputs[changed][1, 2] += 1.0
        for x, y in zip(plain, run(*inputs, decay), strict=True):
            same = np.all(x == y, axis=tuple(range(2, x.ndim)))
            assert same.sum() >= BATCH * HEADS - 1
            assert same[:1].all()
            assert same[:, :2].all()

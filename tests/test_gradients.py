"""`hla.vjp`: every option, against differences, against autograd of the definitions, and in float32 over long time.

Three judges, from small to large: central differences of the operator in NumPy float64, along random directions (all
options, pairwise); autograd of the defining sums (in the session of torch); and a dense reverse pass written here
(`Dense`), which is itself held against differences of the definition and then judges a thousand tokens in float32.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest

import hla
import oracle
from libraries import Library

TOKENS, HEADS, D, DV = 7, 2, 3, 5
NUMPY = Library("numpy")


# --- all options, pairwise -------------------------------------------------------------------------------------------

FACTORS: dict[str, tuple[Any, ...]] = {
    "operator": ("linear_attention", "hla2", "ahla", "hla3", "order 4", "order 5"),
    "decay": ("none", "number", "heads", "tokens", "shared tokens", "resets"),
    "mask": ("causal", "prefix", "none", "as_printed"),
    "normalize": (False, True),
    "ridge": (0.0, 0.7),
    "scale": (1.0, 0.37, -2.0),
    "token_mask": ("none", "shared", "heads"),
    "packing": ("none", "segment_ids", "cu_seqlens"),
    "state": ("none", "returned", "initial", "both"),
    "batch": ("heads", "grouped", "none", "broadcast", "wide values"),
    "axis": (-2, -3),
    "form": ("auto", "recurrent", "scan", "parallel"),
    "chunk_size": (None, 1, 3, 11),
}
Options = dict[str, Any]


def defined(case: Options) -> bool:
    """Whether the options of a (partial) case are defined together."""
    get = case.get
    operator, mask = get("operator"), get("mask")
    if mask == "as_printed" and operator not in (None, "hla2", "hla3"):
        return False
    if mask == "prefix" and operator in ("order 4", "order 5"):
        return False
    if mask == "none" and (
        get("decay", "none") != "none" or get("state", "none") != "none" or get("form") in ("recurrent", "scan")
    ):
        return False
    if get("ridge") and operator not in (None, "hla2"):
        return False
    if get("packing") == "segment_ids" and get("state", "none") != "none":
        return False
    if get("batch") == "none" and (get("axis") == -3 or get("decay") in ("heads", "tokens", "resets")):
        return False
    return not (get("batch") == "none" and get("token_mask") == "heads")


def pairwise(factors: dict[str, tuple[Any, ...]]) -> list[Options]:
    """Cases in which every two values of two options that are defined together meet at least once."""
    names = list(factors)
    missing: set[Any] = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i, x in enumerate(factors[a])
        for j, y in enumerate(factors[b])
        if defined({a: x, b: y})
    }
    cases = []
    while missing:
        case: dict[str, int] = {}
        (a, i), (b, j) = min(missing)
        case[a], case[b] = i, j
        for name in names:
            if name in case:
                continue

            fits = [
                i
                for i, x in enumerate(factors[name])
                if extendable({**{n: factors[n][v] for n, v in case.items()}, name: x}, factors)
            ]
            case[name] = max(fits, key=partial(newly_met, missing, case, name))
        missing -= set(itertools.permutations(case.items(), 2))
        cases.append({name: factors[name][case[name]] for name in names})
    return cases


def newly_met(missing: set[Any], case: dict[str, int], name: str, i: int) -> int:
    """How many pairs that have not met yet would meet in a case with this value."""
    return sum((x, (name, i)) in missing or ((name, i), x) in missing for x in case.items())


def extendable(case: Options, factors: dict[str, tuple[Any, ...]]) -> bool:
    """Whether every other option still has a value that is defined with what is chosen."""
    return defined(case) and all(
        any(defined({**case, name: x}) for x in values) for name, values in factors.items() if name not in case
    )


CASES = pairwise(FACTORS)


def describe(case: Options) -> str:
    return "-".join(str(x).replace(" ", "_") for x in case.values())


def test_every_pair_of_options_is_covered() -> None:
    assert all(defined(case) for case in CASES)
    for a, b in itertools.combinations(FACTORS, 2):
        for x, y in itertools.product(FACTORS[a], FACTORS[b]):
            if defined({a: x, b: y}):
                assert any(case[a] == x and case[b] == y for case in CASES), (a, x, b, y)


class Call(NamedTuple):
    """One case: the operator and its options, and everything that is differentiated, in NumPy float64."""

    operator: str
    options: Options
    arrays: dict[str, Any]
    """q, k, v, decay or log_decay, and the fields of the initial state as "state.field" """
    state: Any
    """the class of the initial state, or None"""

    def keywords(self, arrays: dict[str, Any]) -> Options:
        found = {**self.options, **{name: arrays[name] for name in ("decay", "log_decay") if name in arrays}}
        if self.state is not None:
            found["initial_state"] = self.state(*(arrays[f"state.{field}"] for field in self.state._fields))
        return found

    def value(self, arrays: dict[str, Any]) -> Any:
        """What the operator returns on these arrays."""
        q, k, v = (arrays[name] for name in "qkv")
        keywords = self.keywords(arrays)
        order = keywords.pop("order", None)
        if order is not None:
            return hla.higher_order(q, k, v, order=order, **keywords)
        return getattr(hla, self.operator)(q, k, v, **keywords)


def make_call(case: Options, seed: int = 0) -> Call:
    rng = np.random.default_rng(seed)
    operator, options = case["operator"], dict[str, Any](normalize=case["normalize"], ridge=case["ridge"])
    if operator.startswith("order"):
        operator, options["order"] = "higher_order", int(operator[-1])
    if case["mask"] == "as_printed":
        options["definition"] = "as_printed"
    else:
        options["mask"] = case["mask"]
    options |= {name: case[name] for name in ("scale", "axis", "form", "chunk_size")}
    # axes of the output, of q, of k and of v
    batch, bq, bk, bv = {
        "heads": ((HEADS,),) * 4,
        "none": ((),) * 4,
        "grouped": ((HEADS, 3), (HEADS, 3), (HEADS, 1), (HEADS, 1)),
        "broadcast": ((3, HEADS), (1, HEADS), (3, 1), (HEADS,)),
        "wide values": ((3, HEADS), (HEADS,), (1,), (3, HEADS)),
    }[case["batch"]]
    if case["axis"] == -3:  # batch axes of one rank, so that the time axis is the same for all three
        bq, bk, bv = ((1,) * (len(batch) - len(axes)) + axes for axes in (bq, bk, bv))
    arrays = {
        name: rng.normal(size=(*axes, TOKENS, size)) / size**0.5
        for name, axes, size in (("q", bq, D), ("k", bk, D), ("v", bv, DV))
    }
    if case["normalize"]:  # denominators away from zero
        arrays["q"], arrays["k"] = abs(arrays["q"]) + 0.5, abs(arrays["k"]) + 0.5
        options["eps"] = 0.3
    heads = batch[-1:]
    log_decay = -rng.exponential(0.4, (*heads, TOKENS))
    arrays |= {
        "none": dict,
        "number": lambda: {"decay": 0.8},
        "heads": lambda: {"decay": rng.uniform(0.4, 0.95, heads)},
        "tokens": lambda: {"log_decay": log_decay},
        "shared tokens": lambda: {"log_decay": log_decay.reshape(-1, TOKENS)[0]},
        "resets": lambda: {"log_decay": np.where(rng.random(log_decay.shape) < 0.3, -np.inf, log_decay)},
    }[case["decay"]]()
    if case["token_mask"] != "none":
        axes = heads if case["token_mask"] == "heads" else ()
        options["token_mask"] = rng.random((*axes, TOKENS)) < 0.7
    count = None
    if case["packing"] == "segment_ids":
        options["segment_ids"] = np.asarray([0, 0, 0, 1, 4, 4, 4])
    elif case["packing"] == "cu_seqlens":
        options["cu_seqlens"], count = np.asarray([0, 3, 3, 4, 7]), 4
    state = None
    if case["state"] in ("initial", "both"):
        names = ("mask", "definition", "order", "normalize", "ridge")
        start = hla.init_state(
            operator, batch=batch, d=D, dv=DV, like=arrays["q"], **{n: options[n] for n in names if n in options}
        )
        state = type(start)
        leading = () if count is None else (count,)
        for field, x in start._asdict().items():
            drawn = rng.normal(size=(*leading, *x.shape)) / D
            arrays[f"state.{field}"] = abs(drawn) if case["normalize"] else drawn
    options["return_state"] = case["state"] in ("returned", "both")
    if case["axis"] == -3:
        arrays |= {name: np.ascontiguousarray(arrays[name].swapaxes(-2, -3)) for name in "qkv"}
    for x in (*arrays.values(), *options.values()):
        if isinstance(x, np.ndarray):
            x.flags.writeable = False
    return Call(operator, options, arrays, state)


def leaves(value: Any) -> list[Any]:
    return [y for x in value for y in leaves(x)] if isinstance(value, tuple) else [value]


def like(lib: Library, value: Any, rng: np.random.Generator) -> tuple[Any, list[Any]]:
    """A random cotangent in the form of a NumPy value, in the library, and its leaves in NumPy."""
    if isinstance(value, tuple):
        parts = [like(lib, x, rng) for x in value]
        flat = [y for _, ys in parts for y in ys]
        made = [x for x, _ in parts]
        return (type(value)(*made) if hasattr(value, "_fields") else tuple(made)), flat
    drawn = rng.normal(size=value.shape)
    return lib.asarray(drawn), [drawn]


def derivative(function: Callable[[float], float], h: float = 2.0**-10) -> float:
    """f'(0) by six points: the error is h⁶/140·f⁽⁷⁾."""
    weights = ((1, 45.0), (2, -9.0), (3, 1.0))
    return sum(w * (function(i * h) - function(-i * h)) for i, w in weights) / (60 * h)


def pulled(lib: Library, operator: str, arrays: dict[str, Any], cotangent: Any, **options: Any) -> Any:
    """(value, gradients) of `hla.vjp`; of the whole as one program where every shape would be compiled op by op."""

    def run(arrays: dict[str, Any], cotangent: Any) -> Any:
        inputs = dict(arrays)
        q, k, v = (inputs.pop(name) for name in "qkv")
        value, pull = hla.vjp(operator, q, k, v, **inputs, **options)
        return value, pull(cotangent)

    if lib.name != "jax":
        return run(arrays, cotangent)
    import jax

    value, found = jax.jit(run)(arrays, cotangent)
    return value, found


@pytest.mark.parametrize("case", CASES, ids=describe)
def test_against_finite_differences(lib: Library, case: Options) -> None:
    """In every input along a random direction, through the output and the returned state; shapes and dtypes too."""
    if lib.name == "jax" and case not in CASES[::9]:
        pytest.skip("every ninth case on jax, where each is compiled; the core's own gradient is the judge there")
    call = make_call(case)
    value = call.value(call.arrays)
    rng = np.random.default_rng(1)
    cotangent, flat = like(lib, value, rng)

    def loss(arrays: dict[str, Any]) -> float:
        return sum(float(np.sum(x * d)) for x, d in zip(leaves(call.value(arrays)), flat, strict=True))

    placed = {name: lib.asarray(x) for name, x in call.arrays.items() if isinstance(x, np.ndarray)}
    keywords = call.keywords({**call.arrays, **placed})
    traced = {name: keywords.pop(name) for name in ("log_decay", "initial_state") if name in keywords}
    traced |= {"decay": keywords.pop("decay")} if "decay" in placed else {}
    options = {name: lib.asarray(x) if isinstance(x, np.ndarray) else x for name, x in keywords.items()}
    inputs = {**{name: placed[name] for name in "qkv"}, **traced}
    got, gradients = pulled(lib, call.operator, inputs, cotangent, **options)
    for mine, its in zip(leaves(got), leaves(value), strict=True):
        np.testing.assert_allclose(lib.numpy(mine), its, rtol=1e-10, atol=1e-10)
    assert (gradients.decay is None) == ("decay" not in call.arrays)
    assert (gradients.log_decay is None) == ("log_decay" not in call.arrays)
    assert (gradients.initial_state is None) == (call.state is None)
    for name, x in call.arrays.items():
        gradient = (
            getattr(gradients.initial_state, name.removeprefix("state."))
            if name.startswith("state.")
            else getattr(gradients, name)
        )
        assert tuple(gradient.shape) == np.shape(x), name
        assert gradient.dtype == lib.dtype("float64"), name
        assert type(gradient) is type(placed["q"]), name
        g = lib.numpy(gradient)
        direction = rng.normal(size=np.shape(x))
        if name == "log_decay":
            np.testing.assert_array_equal(g[np.isinf(x)], 0)
            direction[np.isinf(x)] = 0
            keep = call.options.get("token_mask", np.asarray(True))
            if keep.ndim <= x.ndim:
                np.testing.assert_array_equal(g[~np.broadcast_to(keep, x.shape)], 0)

        def along(step: float, name: str = name, x: Any = x, direction: Any = direction) -> float:
            with np.errstate(invalid="ignore"):
                return loss({**call.arrays, name: x + step * direction})

        wanted, found = derivative(along), float(np.sum(g * direction))
        scale = max(abs(wanted), float(np.sum(np.abs(g * direction))), abs(along(0.0)), 1.0)
        assert abs(found - wanted) <= 1e-10 * scale, f"{name}: {found} against {wanted}"


@pytest.mark.parametrize("case", CASES[::3], ids=describe)
def test_inputs_are_not_written_to(case: Options) -> None:
    """All arrays of a case are read-only; and pulling twice gives the same, so nothing is used up."""
    call = make_call(case)
    value, pull = hla.vjp(call.operator, *(call.arrays[x] for x in "qkv"), **call.keywords(call.arrays))
    cotangent, flat = like(NUMPY, value, np.random.default_rng(1))
    for x in flat:
        x.flags.writeable = False
    first, second = pull(cotangent), pull(cotangent)
    for mine, its in zip(leaves(tuple(first)), leaves(tuple(second)), strict=True):
        np.testing.assert_array_equal(mine, its) if mine is not None else None


# --- against autograd of the defining sums ---------------------------------------------------------------------------


def definition(operator: str, q: Any, k: Any, v: Any, log_decay: Any, mask: str, normalize: bool, eps: float) -> Any:
    """The operators' defining sums in torch, one head: no state, no composition, differentiable by autograd.

    Γ(t, j) over tokens without resets from differences of cumulative sums; resets by comparing how many lie between.
    """
    import torch

    count = q.shape[0]
    time = torch.arange(count)
    row, column = time[:, None], time[None, :]
    before = column <= row
    affinity = q @ k.T
    boundary = torch.isinf(log_decay)
    total = torch.cumsum(torch.where(boundary, torch.zeros_like(log_decay), log_decay), 0)
    resets = torch.cumsum(boundary.to(torch.int64), 0)
    seen = before & (resets[:, None] == resets[None, :])
    exponent = torch.where(seen, total[:, None] - total[None, :], torch.zeros_like(affinity))
    survival = torch.where(seen, torch.exp(exponent), torch.zeros_like(exponent))  # 0 where j > t
    every = torch.ones_like(affinity)
    up_to = before.to(q.dtype)
    earlier = up_to if mask == "causal" else every  # [j, i]: i ≤ j, or any
    if operator == "linear_attention":
        weights = survival * affinity
    elif operator == "hla2":  # i ≤ j ≤ t
        weights = torch.einsum("ti,tj,ti,ji,ji->tj", survival, survival, affinity, affinity, earlier)
    elif operator == "ahla":  # j ≤ i ≤ t, weight Γ(t,i) Γ(i,j); over the prefix Γ(t,i) Γ(t,j)
        if mask == "causal":
            weights = torch.einsum("ti,ij,ti,ij->tj", survival, survival, affinity, affinity)
        else:
            weights = torch.einsum("ti,tj,ti,ij->tj", survival, survival, affinity, affinity)
    else:  # i, j ≤ u ≤ t
        weights = torch.einsum(
            "ti,tu,tj,ti,ui,uj,ui,uj->tj",
            survival, survival, survival, affinity, affinity, affinity, earlier, earlier,
        )  # fmt: skip
    output = weights @ v
    return output / (weights.sum(1, keepdim=True) + eps) if normalize else output


@pytest.mark.parametrize("operator", ["linear_attention", "hla2", "ahla", "hla3"])
@pytest.mark.parametrize("mask", ["causal", "prefix"])
@pytest.mark.parametrize("decay", ["tokens", "resets"])
@pytest.mark.parametrize("normalize", [False, True])
def test_against_autograd_of_the_definition(
    lib: Library, operator: str, mask: str, decay: str, normalize: bool
) -> None:
    """Every entry of every gradient, of `hla.vjp` and of autograd through the operator itself."""
    if lib.name != "torch":
        pytest.skip("autograd: in the session of torch")
    import torch

    rng = np.random.default_rng(2)
    q, k, v, do = (lib.asarray(rng.normal(size=(TOKENS, size))) for size in (D, D, DV, DV))
    if normalize:
        q, k = abs(q), abs(k)
    log_decay = -rng.exponential(0.4, TOKENS)
    if decay == "resets":
        log_decay[[0, 3]] = -np.inf
    inputs = [x.requires_grad_() for x in (q, k, v, lib.asarray(log_decay))]
    judged = definition(operator, *inputs, mask, normalize, 0.3)
    options = {"log_decay": inputs[3], "mask": mask, "normalize": normalize, "eps": 0.3}
    mine = getattr(hla, operator)(*inputs[:3], **options)
    torch.testing.assert_close(mine, judged, rtol=1e-11, atol=1e-11)
    expected = torch.autograd.grad(judged, inputs, do)
    own = torch.autograd.grad(mine, inputs, do)
    pulled = hla.vjp(operator, *inputs[:3], **options)[1](do)
    for name, want, by_autograd, by_vjp in zip(
        ("q", "k", "v", "log_decay"), expected, own, (pulled.q, pulled.k, pulled.v, pulled.log_decay), strict=True
    ):
        for got in (by_autograd, by_vjp):
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}")


# --- against jax.grad of the core ------------------------------------------------------------------------------------


JAX_CASES = [
    {"operator": "hla2", "decay": "tokens", "normalize": True, "state": "both"},
    {"operator": "ahla", "decay": "number", "state": "returned", "batch": "wide values"},
    {"operator": "hla2", "decay": "resets", "state": "initial", "chunk_size": 3},
    {"operator": "hla3", "decay": "heads", "batch": "grouped", "scale": 0.37},
    {"operator": "hla2", "mask": "none", "packing": "segment_ids", "ridge": 0.7},
]


@pytest.mark.parametrize("given", JAX_CASES, ids=lambda x: "-".join(map(str, x.values())))
def test_jax_differentiates_the_core_alike(lib: Library, given: Options) -> None:
    if lib.name != "jax":
        pytest.skip("jax.vjp: in the session of jax")
    import jax

    call = make_call({**{name: values[0] for name, values in FACTORS.items()}, **given})
    placed = {name: lib.asarray(x) for name, x in call.arrays.items()}
    cotangent, _ = like(lib, call.value(call.arrays), np.random.default_rng(3))

    @jax.jit
    def by_jax(arrays: dict[str, Any], d: Any) -> Any:
        return jax.vjp(call.value, arrays)[1](d)[0]

    @jax.jit
    def by_hla(arrays: dict[str, Any], d: Any) -> Any:
        return hla.vjp(call.operator, *(arrays[x] for x in "qkv"), **call.keywords(arrays))[1](d)

    expected, got = by_jax(placed, cotangent), by_hla(placed, cotangent)
    for name, want in expected.items():
        gradient = getattr(got.initial_state, name.removeprefix("state.")) if "." in name else getattr(got, name)
        want, mine = lib.numpy(want), lib.numpy(gradient)
        np.testing.assert_allclose(mine, want, rtol=1e-9, atol=1e-11 * max(1.0, np.max(np.abs(want))), err_msg=name)


# --- float32 over a thousand tokens ----------------------------------------------------------------------------------


STAGES = {  # result, (a, b, c), exponent
    "linear_attention": [("o", ("q", "k", "v"), 1)],
    "hla2": [("u", ("q", "k", "k"), 1), ("o", ("q", "u", "v"), 2)],
    "ahla": [("w", ("q", "k", "v"), 1), ("o", ("q", "k", "w"), 1)],
    "hla3": [("u", ("q", "k", "k"), 1), ("w", ("q", "k", "v"), 1), ("o", ("q", "u", "w"), 3)],
}


class Dense:
    """The exact causal operators as T×T matrices in float64, with a reverse pass by hand.

    The primitive is o = (Γ^p ∘ a bᵀ) c over j ≤ t. For M = Γ^p ∘ (d cᵀ): da = M b, db = Mᵀ a, dc = (Γ^p ∘ a bᵀ)ᵀ d,
    and with N = p·Γ^p ∘ (a bᵀ) ∘ (d cᵀ), the gradient of log γ_s sums N over j < s ≤ t.
    """

    def __init__(self, operator: str, q: Any, k: Any, v: Any, log_decay: Any) -> None:
        self._stages = STAGES[operator]
        self.streams = {"q": q, "k": k, "v": v}
        reset = np.isinf(log_decay)
        total = np.cumsum(np.where(reset, 0.0, log_decay))
        count = np.cumsum(reset)
        seen = np.tril(count[:, None] == count[None, :])
        self._survival = np.exp(np.where(seen, total[:, None] - total[None, :], -np.inf))
        self._reset = reset
        for result, names, power in self._stages:
            a, b, c = (self.streams[name] for name in names)
            self.streams[result] = (self._survival**power * (a @ b.T)) @ c

    def gradients(self, do: Any) -> dict[str, Any]:
        d = {name: np.zeros_like(x) for name, x in self.streams.items()}
        d["o"] = do
        pairs = np.zeros_like(self._survival)
        for result, names, power in reversed(self._stages):
            a, b, c = (self.streams[name] for name in names)
            factor, dr = self._survival**power, d[result]
            weights, values = factor * (a @ b.T), factor * (dr @ c.T)
            for name, x in zip(names, (values @ b, values.T @ a, weights.T @ dr), strict=True):
                d[name] = d[name] + x
            pairs += power * weights * (dr @ c.T)
        # never as a difference of sums: their diagonal would drown what a strong decay leaves over
        before, spans = np.zeros(len(pairs)), np.zeros(len(pairs))
        for s in range(1, len(pairs)):
            before = before + pairs[:, s - 1]
            spans[s] = np.sum(before[s:])
        return {"q": d["q"], "k": d["k"], "v": d["v"], "log_decay": np.where(self._reset, 0.0, spans)}


@pytest.mark.parametrize("operator", STAGES)
def test_the_dense_judge(operator: str) -> None:
    """Its output is the definition's, its gradients are differences of the definition's output."""
    rng = np.random.default_rng(4)
    inputs = [rng.normal(size=(TOKENS, size)) for size in (D, D, DV)] + [-rng.exponential(0.4, TOKENS)]
    inputs[3][[2, 5]] = -np.inf
    do = rng.normal(size=(TOKENS, DV))

    def loss(q: Any, k: Any, v: Any, log_decay: Any) -> float:
        return float(np.sum(do * oracle.attend(operator, q, k, v, log_decay=log_decay)))

    judge = Dense(operator, *inputs)
    np.testing.assert_allclose(
        judge.streams["o"], oracle.attend(operator, *inputs[:3], log_decay=inputs[3]), rtol=1e-12, atol=1e-12
    )
    for i, gradient in enumerate(judge.gradients(do).values()):
        direction = rng.normal(size=inputs[i].shape)
        direction[np.isinf(inputs[i])] = 0

        def along(step: float, i: int = i, direction: Any = direction) -> float:
            return loss(*(x + step * direction if i == j else x for j, x in enumerate(inputs)))

        assert float(np.sum(gradient * direction)) == pytest.approx(derivative(along), rel=1e-9, abs=1e-9)


LONG = 1009
LONG_DECAYS = {
    "none": lambda rng: np.zeros(LONG),
    "weak": lambda rng: -rng.exponential(0.003, LONG),
    "strong": lambda rng: -rng.exponential(2.0, LONG),
    "very strong": lambda rng: -rng.uniform(5, 30, LONG),
    "mixed": lambda rng: -np.where(rng.random(LONG) < 0.05, 20.0, 0.01) * rng.random(LONG),
    "resets": lambda rng: np.where(rng.random(LONG) < 0.02, -np.inf, -rng.exponential(0.05, LONG)),
}


@pytest.mark.parametrize("operator", STAGES)
@pytest.mark.parametrize("decay", LONG_DECAYS)
def test_float32_over_long_time(lib: Library, operator: str, decay: str) -> None:
    """Each entry of each gradient, token by token.

    An entry is a sum of products. The same reverse pass over absolute values gives A, the sum of the terms' absolute
    values: a token's measure is its own, it cannot hide behind a larger one. A term goes through at most 2L passes of
    the primitive (L stages, again forward, then backward). In each it is rounded in d products, a chunk's tokens and
    one carry per chunk, and takes a factor exp(x) whose error is u·|x|·exp(x) for a sum x of log-decays, below 8u.
    Rounding errors of n operations add up to u·√n, u = 2⁻²⁴ (Higham and Mary 2019), relative to A at most.
    """
    if lib.name == "jax" and operator != "hla3":
        pytest.skip("the longest operator on jax, where each is compiled")
    rng = np.random.default_rng(5)
    q, k, v = (rng.normal(size=(LONG, size)).astype(np.float32) for size in (D, D, DV))
    do = rng.normal(size=(LONG, DV)).astype(np.float32)
    log_decay = LONG_DECAYS[decay](rng).astype(np.float32)
    wide = [x.astype(np.float64) for x in (q, k, v, log_decay)]
    expected = Dense(operator, *wide).gradients(do.astype(np.float64))
    terms = Dense(operator, *(abs(x) for x in wide[:3]), wide[3]).gradients(abs(do).astype(np.float64))
    depth = 2 * len({"linear_attention": "1", "hla2": "12", "ahla": "12", "hla3": "123"}[operator])
    budget = 2.0**-24 * depth * (math.sqrt(64 + LONG / 32 + D) + 8)

    def run(q: Any, k: Any, v: Any, log_decay: Any, do: Any) -> Any:
        return tuple(x for x in hla.vjp(operator, q, k, v, log_decay=log_decay)[1](do) if x is not None)

    if lib.name == "jax":
        run = _compiled(run, operator)
    got = run(*(lib.asarray(x) for x in (q, k, v, log_decay, do)))
    for (name, want), mine in zip(expected.items(), got, strict=True):
        assert mine.dtype == lib.dtype("float32")
        error = np.abs(lib.numpy(mine).astype(np.float64) - want)
        allowed = budget * terms[name]
        wrong = np.argwhere(error > allowed)
        assert not wrong.size, f"{name}: {len(wrong)} entries, the first at {wrong[0]}, off by {error[tuple(wrong[0])]}"


_programs: dict[str, Any] = {}


def _compiled(run: Any, operator: str) -> Any:
    import jax

    return _programs.setdefault(operator, jax.jit(run))


# --- shapes, dtypes, cotangents --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_gradients_have_their_inputs_dtypes(lib: Library, dtype: str) -> None:
    """Each its own: q, v and the decay in `dtype`, k in float32, and a state in float32 whatever the inputs."""
    if dtype not in lib.floats:
        pytest.skip(f"{lib.name} has no {dtype}")
    if (lib.name, dtype) == ("numpy", "bfloat16"):
        pytest.importorskip("ml_dtypes")
    rng = np.random.default_rng(6)
    q, v = (lib.asarray(rng.normal(size=(HEADS, TOKENS, size)), dtype) for size in (D, DV))
    k = lib.asarray(rng.normal(size=(TOKENS, D)), "float32")
    decay = lib.asarray(np.asarray([0.5, 0.9]), dtype)
    state = hla.init_state("hla2", batch=(HEADS,), d=D, dv=DV, like=lib.asarray(np.zeros(1), "float32"))
    given = {"q": q, "k": k, "v": v, "decay": decay, "initial_state": state}
    do = lib.asarray(np.ones((HEADS, TOKENS, DV)), dtype)
    o, found = pulled(lib, "hla2", given, do)
    assert o.dtype == lib.dtype(dtype)
    assert [x.dtype for x in (found.q, found.v, found.decay)] == [lib.dtype(dtype)] * 3
    assert found.k.dtype == lib.dtype("float32")
    assert tuple(found.k.shape) == (TOKENS, D)
    assert [x.dtype for x in found.initial_state] == [lib.dtype("float32")] * 2
    wide = "float64" if dtype == "float64" else "float32"
    number = pulled(lib, "hla2", {"q": q, "k": k, "v": v}, do, decay=0.5)[1].decay
    assert tuple(number.shape) == ()
    assert number.dtype == lib.dtype(wide)
    assert type(number) is type(lib.asarray(np.zeros(())))


OWN_SHAPES = {
    "decay": [(), (1,), (HEADS,), (1, 1), (3, 1), (3, HEADS)],
    "log_decay": [(TOKENS,), (1,), (HEADS, 1), (3, 1, TOKENS), (3, HEADS, TOKENS)],
}


@pytest.mark.parametrize("name", OWN_SHAPES)
def test_the_decays_own_shape(lib: Library, name: str) -> None:
    """Summed over what it was broadcast along, from the gradient of the decay at full shape."""
    rng = np.random.default_rng(7)
    q, k, v, d = (rng.normal(size=(3, HEADS, TOKENS, size)) for size in (D, D, DV, DV))
    inputs = {"q": q, "k": k, "v": v}
    *_, full = OWN_SHAPES[name]
    for shape in OWN_SHAPES[name] if lib.name != "jax" else OWN_SHAPES[name][::4]:
        x = rng.uniform(0.5, 0.9, shape) if name == "decay" else -rng.exponential(0.3, shape)
        whole = hla.vjp("hla2", q, k, v, **{name: np.broadcast_to(x, full)})[1](d)._asdict()[name]
        placed = {n: lib.asarray(y) for n, y in {**inputs, name: x}.items()}
        got = lib.numpy(pulled(lib, "hla2", placed, lib.asarray(d))[1]._asdict()[name])
        assert got.shape == shape
        padded = (1,) * (len(full) - len(shape)) + shape
        axes = tuple(i for i, n in enumerate(padded) if n == 1)
        np.testing.assert_allclose(got, whole.sum(axis=axes, keepdims=True).reshape(shape), rtol=1e-12)


def test_a_number_and_an_array_are_one_decay(lib: Library) -> None:
    """dγ of a number, of an array and, as dlog γ / γ, of the same decay per token."""
    rng = np.random.default_rng(9)
    q, k, v, d = (lib.asarray(rng.normal(size=(TOKENS, size))) for size in (D, D, DV, DV))
    inputs = {"q": q, "k": k, "v": v}
    number = float(pulled(lib, "ahla", inputs, d, decay=0.7)[1].decay)
    array = float(pulled(lib, "ahla", {**inputs, "decay": lib.asarray(np.asarray(0.7))}, d)[1].decay)
    log_decay = lib.asarray(np.full(TOKENS, math.log(0.7)))
    tokens = lib.numpy(pulled(lib, "ahla", {**inputs, "log_decay": log_decay}, d)[1].log_decay)
    assert number == pytest.approx(array, rel=1e-13)
    assert number == pytest.approx(float(tokens.sum()) / 0.7, rel=1e-12)


def test_forms_of_pull(lib: Library) -> None:
    """pull((do, dstate)), pull(do, dstate), and None for a cotangent of zeros."""
    rng = np.random.default_rng(10)
    q, k, v = (lib.asarray(rng.normal(size=(TOKENS, size))) for size in (D, D, DV))
    (o, state), pull = hla.vjp("hla3", q, k, v, decay=0.9, return_state=True)
    d_state, _ = like(lib, type(state)(*(lib.numpy(x) for x in state)), rng)
    zeros = type(state)(*(0 * x for x in state))
    for mine, its in ((pull((o, d_state)), pull(o, d_state)), (pull(o, zeros), pull((o, None)))):
        for x, y in zip(mine[:4], its[:4], strict=True):
            np.testing.assert_array_equal(lib.numpy(x), lib.numpy(y))


def test_linear_in_the_cotangent(lib: Library) -> None:
    rng = np.random.default_rng(11)
    q, k, v = (lib.asarray(rng.normal(size=(TOKENS, size))) for size in (D, D, DV))
    value, pull = hla.vjp("hla2", q, k, v, decay=0.9, return_state=True)
    host = tuple(type(x)(*map(lib.numpy, x)) if isinstance(x, tuple) else lib.numpy(x) for x in value)
    a, b = (like(lib, host, rng)[0] for _ in range(2))
    both = (a[0] + 2 * b[0], type(a[1])(*(x + 2 * y for x, y in zip(a[1], b[1], strict=True))))
    for x, y, z in zip(pull(a)[:4], pull(b)[:4], pull(both)[:4], strict=True):
        np.testing.assert_allclose(lib.numpy(z), lib.numpy(x) + 2 * lib.numpy(y), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("operator", ["linear_attention", "hla2", "ahla", "hla3"])
@pytest.mark.parametrize("decay", [{}, {"decay": 0.5}, {"log_decay": "tokens"}], ids=["none", "number", "tokens"])
def test_no_tokens(lib: Library, operator: str, decay: Options) -> None:
    """The state passes through, and so does its cotangent; all other gradients are empty or zero."""
    q, k, v = (lib.asarray(np.zeros((HEADS, 0, size))) for size in (D, D, DV))
    start = hla.init_state(operator, batch=(HEADS,), d=D, dv=DV, like=q)
    if "log_decay" in decay:
        decay = {"log_decay": lib.asarray(np.zeros((HEADS, 0)))}
    (o, state), pull = hla.vjp(operator, q, k, v, initial_state=start, return_state=True, **decay)
    d_state, flat = like(lib, type(state)(*(lib.numpy(x) for x in state)), np.random.default_rng(12))
    found = pull(o, d_state)
    assert [tuple(x.shape) for x in (found.q, found.k, found.v)] == [(HEADS, 0, D)] * 2 + [(HEADS, 0, DV)]
    for x, y in zip(found.initial_state, flat, strict=True):
        np.testing.assert_array_equal(lib.numpy(x), y)
    if "decay" in decay:
        assert found.decay.shape == ()
        assert float(found.decay) == 0
    if "log_decay" in decay:
        assert tuple(found.log_decay.shape) == (HEADS, 0)


@pytest.mark.parametrize("operator", ["linear_attention", "hla2", "ahla", "hla3"])
def test_one_token(lib: Library, operator: str) -> None:
    """o = (q·k)^n v with n reads of k: 1, 2, 2, 3; the decay has nothing to act on."""
    power = {"linear_attention": 1, "hla2": 2, "ahla": 2, "hla3": 3}[operator]
    rng = np.random.default_rng(13)
    q, k, v, d = (rng.normal(size=(1, size)) for size in (D, D, DV, DV))
    found = hla.vjp(operator, *map(lib.asarray, (q, k, v)), decay=0.5)[1](lib.asarray(d))
    a, b = float(np.sum(q * k)), float(np.sum(v * d))
    np.testing.assert_allclose(lib.numpy(found.v), a**power * d, rtol=1e-13)
    np.testing.assert_allclose(lib.numpy(found.q), power * a ** (power - 1) * b * k, rtol=1e-13)
    np.testing.assert_allclose(lib.numpy(found.k), power * a ** (power - 1) * b * q, rtol=1e-13)
    assert float(found.decay) == 0


def test_empty_batch(lib: Library) -> None:
    q, k, v = (lib.asarray(np.zeros((0, TOKENS, size))) for size in (D, D, DV))
    o, pull = hla.vjp("hla2", q, k, v, decay=0.5)
    found = pull(o)
    assert [tuple(x.shape) for x in found[:3]] == [(0, TOKENS, D)] * 2 + [(0, TOKENS, DV)]
    assert float(found.decay) == 0


def test_masked_tokens_may_hold_anything(lib: Library) -> None:
    """NaN in a skipped token, and in its cotangent, reaches no gradient, and its own gradients are 0."""
    rng = np.random.default_rng(14)
    keep = np.asarray([True, True, False, True, False, True, True])
    q, k, v, d = (rng.normal(size=(TOKENS, size)) for size in (D, D, DV, DV))
    log_decay = -rng.exponential(0.3, TOKENS)
    clean = hla.vjp("hla3", *(x[keep] for x in (q, k, v)), log_decay=log_decay[keep])[1](d[keep])
    spoilt = [np.where(keep[:, None], x, np.nan) for x in (q, k, v, d)]
    for normalize in (False, True):
        options = {"normalize": normalize, "eps": 0.3}
        clean = hla.vjp("hla3", *(x[keep] for x in (q, k, v)), log_decay=log_decay[keep], **options)[1](d[keep])
        found = hla.vjp(
            "hla3",
            *(lib.asarray(x) for x in spoilt[:3]),
            log_decay=lib.asarray(np.where(keep, log_decay, np.nan)),
            token_mask=lib.asarray(keep),
            **options,
        )[1](lib.asarray(spoilt[3]))
        for name in ("q", "k", "v", "log_decay"):
            got = lib.numpy(getattr(found, name))
            np.testing.assert_array_equal(got[~keep], 0, err_msg=name)
            np.testing.assert_allclose(got[keep], getattr(clean, name), rtol=1e-9, atol=1e-10, err_msg=name)


def test_strided_inputs() -> None:
    """Reversed, transposed, broadcast and sliced arrays have the gradients of their copies."""
    rng = np.random.default_rng(15)
    base = rng.normal(size=(2 * TOKENS, HEADS, D)).swapaxes(0, 1)
    views = {
        "sliced": base[:, ::2],
        "reversed": base[:, :TOKENS][:, ::-1],
        "stride 0": np.broadcast_to(rng.normal(size=D), (HEADS, TOKENS, D)),
        "features reversed": base[:, :TOKENS, ::-1],
    }
    v, d = rng.normal(size=(2, HEADS, TOKENS, DV))
    for name, x in views.items():
        x.flags.writeable = False
        expected = hla.vjp("hla2", x.copy(), x.copy(), v, decay=0.9)[1](d)
        got = hla.vjp("hla2", x, x, v[..., ::-1], decay=0.9)[1](d[..., ::-1])
        np.testing.assert_allclose(got.q, expected.q, rtol=1e-12, atol=1e-12, err_msg=name)
        np.testing.assert_allclose(got.k, expected.k, rtol=1e-12, atol=1e-12, err_msg=name)
        np.testing.assert_allclose(got.v[..., ::-1], expected.v, rtol=1e-12, atol=1e-12, err_msg=name)


def test_what_pull_refuses(lib: Library) -> None:
    rng = np.random.default_rng(16)
    q, k, v = (lib.asarray(rng.normal(size=(TOKENS, size))) for size in (D, D, DV))
    o, pull = hla.vjp("hla2", q, k, v)
    (_, state), pull_both = hla.vjp("hla2", q, k, v, return_state=True)
    other = hla.init_state("ahla", batch=(), d=D, dv=DV, like=q)
    short = state._replace(corrected_state=state.corrected_state[1:, :])
    refused: list[tuple[Callable[[], Any], type[Exception], str]] = [
        (lambda: pull(o[1:, :]), hla.ShapeError, r"^do: expected the shape of o, \(7, 5\), got \(6, 5\)\. "),
        (lambda: pull(o, state), hla.OptionError, r"^pull: expected one cotangent, do, got 2 values\. "),
        (lambda: pull_both(o), hla.OptionError, r"^pull: expected \(do, dstate\), .*, got 1 values\. "),
        (lambda: pull_both((o, other)), hla.OptionError, r"^dstate: expected Hla2State, got AhlaState\. "),
        (lambda: pull_both(o, tuple(state)), hla.OptionError, r"^dstate: expected Hla2State, got tuple\. "),
        (
            lambda: pull_both(o, short),
            hla.ShapeError,
            r"^dstate\.corrected_state: expected shape \(3, 5\), got \(2, 5\)",
        ),
        (lambda: pull([[1.0]]), hla.DTypeError, r"^do: expected an array .*, got builtins\.list\. "),
    ]
    for call, error, text in refused:
        with pytest.raises(error, match=text):
            call()


def test_pull_of_two_libraries(lib: Library) -> None:
    if lib.name == "numpy":
        pytest.skip("needs a second library")
    q, k, v = (lib.asarray(np.ones((TOKENS, size))) for size in (D, D, DV))
    _, pull = hla.vjp("hla2", q, k, v)
    with pytest.raises(hla.MixedArrayError, match=r"^do: expected an array of the same library as o "):
        pull(np.ones((TOKENS, DV)))


def test_no_tokens_no_aliases(lib: Library) -> None:
    """On no tokens the initial state's gradient is the final one's cotangent, in arrays of its own."""
    q, k, v = (lib.asarray(np.ones((0, n))) for n in (5, 5, 7))
    state = hla.init_state("hla2", batch=(), d=5, dv=7, like=q)
    _, pull = hla.vjp("hla2", q, k, v, initial_state=state, return_state=True)
    d_state = type(state)(*(x + 2.0 for x in state))
    found = pull(lib.asarray(np.ones((0, 7))), d_state).initial_state
    for x, d in zip(found, d_state, strict=True):
        assert x is not d
        np.testing.assert_array_equal(lib.numpy(x), 2.0)
        if lib.name in ("numpy", "torch"):
            assert not np.shares_memory(lib.numpy(x), lib.numpy(d))

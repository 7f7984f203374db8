"""Backend "torch", eager: gradients of every option, `torch.func`, autocast, memory, aliasing, threads and workers.

The judges: differences (`gradcheck`), and `hla.vjp` on NumPy arrays, which shares nothing with PyTorch's own
differentiation. Sizes are distinct primes, and chunks are shorter than the sequence.
"""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest

import budget
import hla
import hla.testing
import libraries
import workers
from hla import arrays
from samples import BATCH, CHUNK, DV, FEW, FORMS, HEADS, NAMES, OPERATORS, TOKENS, D, draw

torch: Any = libraries.only("torch")

from torch.autograd import forward_ad  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten  # noqa: E402

# PyTorch's forward mode loads its own deprecated scripts.
forward_mode = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")


def tensors(values: Any, grad: bool = False, dtype: Any = None) -> list[Any]:
    return [torch.tensor(x, dtype=dtype, requires_grad=grad) for x in values]


def call(
    name: str, q: Any, k: Any, v: Any, log_decay: Any = None, *, backend: str | None = None, **options: Any
) -> Any:
    """An operator on tensors (backend "torch" runs, unless another is named) or on NumPy arrays."""
    op, own = OPERATORS[name]
    options = {"chunk_size": CHUNK, "log_decay": log_decay, "backend": backend, **own, **options}
    plan = hla.explain(op, q, k, v, **options)
    library = arrays.family(v)
    assert plan.backend == (backend or library)
    traced = v.is_meta or isinstance(v, torch._subclasses.FakeTensor) if library == "torch" else False
    form = options.get("form", "chunkwise")
    assert plan.form == ("scan" if traced and form == "chunkwise" else form)
    return getattr(hla, op)(q, k, v, **options)


def start(name: str) -> Any:
    """A state that some tokens have made, in NumPy."""
    rng = np.random.default_rng(42)
    return call(name, *(rng.normal(size=(BATCH, HEADS, 4, n)) for n in (D, D, DV)), return_state=True)[1]


def judge(name: str, values: Any, do: Any, **options: Any) -> Any:
    """Value and gradients by hla.vjp in NumPy; the last state's cotangent is the state itself."""
    op, own = OPERATORS[name]
    q, k, v, log_decay = values
    options = {"chunk_size": CHUNK, "log_decay": log_decay, "return_state": True, **own, **options}
    (out, state), pull = hla.vjp(op, q, k, v, **options)
    return (out, state), pull(do, state)


def close(x: Any, y: Any, label: str = "", rtol: float = 1e-9) -> None:
    x, y = (np.asarray(z.detach() if isinstance(z, torch.Tensor) else z) for z in (x, y))
    assert x.shape == y.shape, label
    assert np.allclose(x, y, rtol=rtol, atol=rtol * max(1.0, np.abs(y).max(initial=0.0))), label


def same(found: Any, want: Any, label: str = "") -> None:
    """Gradients, and those of the initial state."""
    for name in NAMES:
        close(found[name], getattr(want, name), f"{label}: {name}")
    for field, x, y in zip(want.initial_state._fields, found["initial_state"], want.initial_state, strict=True):
        close(x, y, f"{label}: {field}")


# --- differences, options in pairs -------------------------------------------------------------------------------

FACTORS: dict[str, tuple[Any, ...]] = {
    "operator": tuple(name for name in OPERATORS if name != "hla2 prefix"),
    "mask": ("causal", "prefix", "none"),
    "decay": ("none", "number", "array", "log_decay"),
    "scale": ("one", "number", "tensor"),
    "normalize": (False, True),
    "ridge": (0.0, 0.7),
    "tokens": ("all", "masked"),
    "packed": ("no", "segment_ids", "cu_seqlens"),
    "state": ("none", "returned", "through"),
    "axis": (-2, -3),
    "form": FORMS,
    "heads": ("own", "grouped"),
}
Case = dict[str, Any]


def exists(case: Case) -> bool:
    """Whether the options are defined together."""
    name, mask = case["operator"], case["mask"]
    if name.endswith("printed") and mask != "causal":
        return False
    if name == "order 4" and mask == "prefix":
        return False
    if case["ridge"] and not name.startswith("hla2"):
        return False
    if mask == "none" and (case["decay"] != "none" or case["state"] != "none" or case["form"] in ("recurrent", "scan")):
        return False
    return not (case["packed"] == "segment_ids" and case["state"] != "none")


def pairs_of(case: Case) -> set[Any]:
    return set(itertools.combinations(sorted(case.items(), key=lambda item: item[0]), 2))


def in_pairs() -> list[Case]:
    """Few cases that hold every pair of values of two options which exists."""
    rng = random.Random(0)
    drawn: list[Case] = []
    while len(drawn) < 3000:
        case = {name: rng.choice(values) for name, values in FACTORS.items()}
        if exists(case):
            drawn.append(case)
    holding: dict[Any, list[Case]] = {}
    for case in drawn:
        for pair in pairs_of(case):
            holding.setdefault(pair, []).append(case)
    left = dict.fromkeys(sorted(holding, key=repr))
    chosen = []
    while left:
        rarest = min(left, key=lambda pair: len(holding[pair]))
        best = max(holding[rarest][:40], key=lambda case: sum(pair in left for pair in pairs_of(case)))
        chosen.append(best)
        for pair in pairs_of(best):
            left.pop(pair, None)
    return chosen


CASES = in_pairs()
TIDS = ["-".join(str(value).replace(" ", "_") for value in case.values()) for case in CASES]


def build(case: Case, tokens: int = 7) -> tuple[Any, list[Any]]:
    """A function from tensors to outputs and final states, and the tensors; tiny, in float64."""
    torch.manual_seed(5)
    make = lambda *shape: torch.randn(*shape, dtype=torch.float64)  # noqa: E731
    batch = (5,) if case["heads"] == "own" else (2, 5)
    keys = batch if case["heads"] == "own" else (2, 1)
    inputs = [make(*batch, tokens, 2), make(*keys, tokens, 2), make(*keys, tokens, 3)]
    if case["normalize"]:  # denominators far from 0
        inputs[:2] = (x.abs() for x in inputs[:2])
    op, own = OPERATORS[case["operator"]]
    options: dict[str, Any] = {"form": case["form"], "chunk_size": 3, "normalize": case["normalize"], "eps": 2.0, **own}
    options |= {"mask": case["mask"], "axis": case["axis"]}
    if op == "hla2":
        options["ridge"] = case["ridge"]
    if case["axis"] == -3:
        inputs = [x.movedim(-2, -3) for x in inputs]
    names = ["q", "k", "v"]

    def also(name: str, x: Any) -> None:
        names.append(name)
        inputs.append(x)

    if case["decay"] == "number":
        options["decay"] = 0.8
    elif case["decay"] == "array":
        also("decay", 0.5 + 0.4 * torch.rand(5, dtype=torch.float64))
    elif case["decay"] == "log_decay":
        gates = -torch.rand(5, tokens, dtype=torch.float64)
        gates[1:, 4] = -torch.inf
        also("log_decay", gates)
    if case["scale"] == "number":
        options["scale"] = -0.7
    elif case["scale"] == "tensor":
        also("scale", torch.tensor(-0.7 if not case["normalize"] else 0.7, dtype=torch.float64))
    if case["normalize"] and "scale" in options:
        options["scale"] = 0.7
    if case["tokens"] == "masked":
        mask = torch.ones(5, tokens, dtype=torch.bool)
        mask[0, [1, 4]] = mask[2, 0] = mask[4, tokens - 1] = False
        options["token_mask"] = mask
    if case["packed"] == "segment_ids":
        options["segment_ids"] = torch.tensor([0, 0, 1, 1, 1, 1, 4][:tokens])
    elif case["packed"] == "cu_seqlens":
        options["cu_seqlens"] = torch.tensor([0, 2, 2, tokens])
    state = None
    if case["state"] != "none":
        options["return_state"] = True
    if case["state"] == "through":
        shape = batch if case["packed"] == "no" else (3, *batch)
        fixing = {n: options[n] for n in ("mask", "definition", "order", "normalize", "ridge") if n in options}
        state = hla.init_state(op, batch=shape, d=2, dv=3, like=inputs[0], **fixing)
        for x, symbol in zip(state, state.symbols, strict=True):
            x = make(*x.shape)
            if case["normalize"]:
                x = x.abs()
            also("state", x + x.mT if symbol in hla.states.SYMMETRIC else x)

    def run(*given: Any) -> Any:
        more: dict[str, Any] = {
            **options,
            **{n: x for n, x in zip(names, given, strict=True) if n not in ("q", "k", "v", "state")},
        }
        if state is not None:
            more["initial_state"] = type(state)(*given[-len(state) :])
        if not torch.compiler.is_compiling():
            plan = hla.explain(op, *given[:3], **more)
            assert (plan.backend, plan.form) == ("torch", options["form"])
        found = getattr(hla, op)(*given[:3], **more)
        return (found[0], *found[1]) if isinstance(found, tuple) else found

    return run, [x.detach().requires_grad_() for x in inputs]


@forward_mode
@pytest.mark.parametrize("case", CASES, ids=TIDS)
def test_gradients(case: Case) -> None:
    """Of every input through every result, forward mode and many cotangents at once included, against differences."""
    run, inputs = build(case)
    assert torch.autograd.gradcheck(run, inputs, fast_mode=True, check_forward_ad=True, check_batched_grad=True)


@pytest.mark.parametrize("case", CASES[::2], ids=TIDS[::2])
def test_second_derivatives(case: Case) -> None:
    run, inputs = build(case, tokens=5)
    assert torch.autograd.gradgradcheck(run, inputs, fast_mode=True)


@pytest.mark.parametrize(
    ("length", "options"),
    [
        (4, {"cu_seqlens": np.asarray([0, 4])}),
        (4, {"cu_seqlens": np.asarray([0, 0, 4]), "mask": "none"}),
        (0, {"cu_seqlens": np.asarray([0, 0])}),
        (1, {"segment_ids": np.asarray([1]), "mask": "none"}),
    ],
)
def test_many_cotangents_where_a_sequence_is_all_there_is(length: int, options: dict[str, Any]) -> None:
    """A slice of everything is a view for which torch's batched gradients have no rule."""
    leaf = tensors(draw(length)[:3], grad=True)
    o = hla.hla2(*leaf, **options)
    many = torch.stack([torch.ones_like(o), o.detach()])
    found = torch.autograd.grad(o, leaf, many, is_grads_batched=True, retain_graph=True)
    for i, cotangent in enumerate(many):
        for x, y in zip(found, torch.autograd.grad(o, leaf, cotangent, retain_graph=True), strict=True):
            torch.testing.assert_close(x[i], y)


@pytest.mark.parametrize("name", OPERATORS)
def test_every_entry_of_the_jacobian(name: str) -> None:
    """The checks above look at random directions; this one at each entry."""
    op, own = OPERATORS[name]
    values = [x[0, 0, :, :n] for x, n in zip(draw(5)[:3], (2, 2, 3), strict=True)] + [draw(5)[3][0, 0]]
    run = lambda q, k, v, g: getattr(hla, op)(q, k, v, log_decay=g, chunk_size=2, **own)  # noqa: E731
    assert torch.autograd.gradcheck(run, tensors(values, grad=True))


def test_cases_hold_every_pair() -> None:
    """Of the options that the issue of gradients is about: nothing was lost to a constraint."""
    seen = set().union(*map(pairs_of, CASES))
    for (one, these), (other, those) in itertools.combinations(sorted(FACTORS.items()), 2):
        for x, y in itertools.product(these, those):
            rest = {n: v[0] for n, v in FACTORS.items()}
            found = [
                c for c in (dict(rest, **{one: x, other: y, "form": f}) for f in FORMS) if c[one] == x and c[other] == y
            ]
            if any(map(exists, found)):
                assert ((one, x), (other, y)) in seen


# --- against the reference's gradients ---------------------------------------------------------------------------


@pytest.mark.parametrize("backend", [None, "numpy"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", OPERATORS)
def test_autograd(name: str, form: str, backend: str | None) -> None:
    """Through outputs and states, with respect to everything; also of the reference on tensors."""
    *values, do = draw()
    state = start(name)
    (out, last), want = judge(name, values, do, initial_state=state)
    inputs = tensors(values, grad=True)
    first = type(state)(*tensors(state, grad=True))
    found, final = call(name, *inputs, form=form, backend=backend, initial_state=first, return_state=True)
    close(found, out, form)
    for x, y in zip(final, last, strict=True):
        close(x, y, form)
    total = (found * torch.tensor(do)).sum() + sum(
        (x * torch.tensor(y)).sum() for x, y in zip(final, last, strict=True)
    )
    gradients = torch.autograd.grad(total, [*inputs, *first])
    same({**dict(zip(NAMES, gradients, strict=False)), "initial_state": gradients[4:]}, want, f"{name}, {form}")


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("only", ["output", "state"])
def test_gradients_of_one_result(name: str, only: str) -> None:
    """The others have no cotangent at all."""
    *values, do = draw()
    op, own = OPERATORS[name]
    inputs = tensors(values, grad=True)
    found, final = call(name, *inputs, return_state=True)
    (out, last), pull = hla.vjp(op, *values[:3], log_decay=values[3], chunk_size=CHUNK, return_state=True, **own)
    nothing = type(last)(*(np.zeros_like(x) for x in last))
    if only == "output":
        want, total = pull(do, nothing), (found * torch.tensor(do)).sum()
    else:
        want, total = pull(np.zeros_like(out), last), sum((x * x.detach()).sum() for x in final)
    gradients = torch.autograd.grad(total, inputs, allow_unused=True)
    for label, x in zip(NAMES, gradients, strict=True):
        close(torch.zeros(()).expand(getattr(want, label).shape) if x is None else x, getattr(want, label), label)


@pytest.mark.parametrize("name", OPERATORS)
def test_gradients_reach_broadcast_states(name: str) -> None:
    """Fields of a state that are expanded to the full batch keep their gradients."""
    q, k, v, _, _ = draw(4)
    small = tensors((q, k[:1, :1], v[:1, :1]), grad=True)
    _, state = call(name, *small, return_state=True)
    total = sum((x * x).sum() for x in state)
    found = torch.autograd.grad(total, small, allow_unused=True)
    op, own = OPERATORS[name]
    (out, last), pull = hla.vjp(op, q, k[:1, :1], v[:1, :1], chunk_size=CHUNK, return_state=True, **own)
    want = pull(np.zeros_like(out), type(last)(*(2 * x for x in last)))
    for label, x in zip(NAMES, found, strict=False):
        close(0 * getattr(want, label) if x is None else x, getattr(want, label), label)


@pytest.mark.parametrize("name", FEW)
def test_gradients_of_gradients(name: str) -> None:
    """A loss of gradients, differentiated once more, against differences of the reference's gradients."""
    *values, do = draw(7)
    op, own = OPERATORS[name]
    inputs = tensors(values, grad=True)
    out = call(name, *inputs)
    first = torch.autograd.grad((out * torch.tensor(do)).sum(), inputs, create_graph=True)
    found = torch.autograd.grad(sum((x * x).sum() for x in first), inputs)

    def loss(shift: float) -> float:
        moved = [x + shift * y for x, y in zip(values, directions, strict=True)]
        _, pull = hla.vjp(op, *moved[:3], log_decay=moved[3], chunk_size=CHUNK, **own)
        grads = pull(do)
        return float(sum((getattr(grads, n) ** 2).sum() for n in NAMES))

    rng = np.random.default_rng(6)
    directions = [rng.normal(size=x.shape) for x in values]
    h = 1e-4
    slope = (8 * (loss(h) - loss(-h)) - (loss(2 * h) - loss(-2 * h))) / (12 * h)
    analytic = sum(float((x.numpy() * y).sum()) for x, y in zip(found, directions, strict=True))
    assert np.isclose(analytic, slope, rtol=1e-7)


def test_graphs_are_kept_or_freed() -> None:
    q, k, v, _, do = tensors(draw())
    leaf = q.clone().requires_grad_()
    out = hla.hla2(leaf, k, v, chunk_size=CHUNK)
    once = torch.autograd.grad(out, leaf, do, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(out, leaf, do)[0], once)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out, leaf, do)
    out = hla.hla2(leaf, k, v, chunk_size=CHUNK)
    leaf.data.mul_(1.0)  # not seen by autograd
    with torch.no_grad():
        leaf.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out, leaf, do)


def test_no_graph_where_none_is_wanted() -> None:
    inputs = tensors(draw()[:4], grad=True)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            out, state = call("hla2", *inputs, return_state=True)
        assert not any(x.requires_grad for x in (out, *state))
    out, state = call("hla2", *(x.detach() for x in inputs), return_state=True)
    assert not any(x.requires_grad for x in (out, *state))
    out, state = call("hla2", *inputs, return_state=True)
    assert all(x.requires_grad for x in (out, *state))


def test_gradients_through_decoding() -> None:
    """Back through steps; states are pytrees."""
    q, k, v, log_decay, do = draw()
    inputs = tensors((q, k, v, log_decay), grad=True)
    state = hla.init_state("hla2", batch=(BATCH, HEADS), d=D, dv=DV, like=inputs[0])
    leaves, structure = tree_flatten(state)
    assert len(leaves) == len(state)
    assert type(tree_unflatten(leaves, structure)) is type(state)
    outs = []
    for t in range(TOKENS):
        out, state = hla.step(state, *(x[..., t, :] for x in inputs[:3]), log_decay=inputs[3][..., t])
        outs.append(out)
    gradients = torch.autograd.grad((torch.stack(outs, -2) * torch.tensor(do)).sum(), inputs)
    _, pull = hla.vjp("hla2", q, k, v, log_decay=log_decay, chunk_size=CHUNK)
    want = pull(do)
    for label, x in zip(NAMES, gradients, strict=True):
        close(x, getattr(want, label), label)


# --- transformations ---------------------------------------------------------------------------------------------


@forward_mode
@pytest.mark.parametrize("backend", [None, "numpy"])
@pytest.mark.parametrize("name", FEW)
def test_func(name: str, backend: str | None) -> None:
    """vmap, grad, vmap of grad, jacobians."""
    values = draw()
    q, k, v, log_decay, do = tensors(values)
    vmap, grad = torch.func.vmap, torch.func.grad

    def run(*xs: Any, **options: Any) -> Any:
        if backend == "numpy" and torch._C._functorch.is_functorch_wrapped_tensor(xs[2]):
            op, own = OPERATORS[name]
            log_decay = xs[3] if len(xs) > 3 else None
            return getattr(hla, op)(
                *xs[:3], log_decay=log_decay, **{"backend": backend, "chunk_size": CHUNK, **own, **options}
            )
        return call(name, *xs, backend=backend, **options)

    whole = run(q, k, v, log_decay)
    close(whole, call(name, *values[:4]))
    for form in FORMS:
        close(vmap(vmap(lambda *xs: run(*xs, form=form)))(q, k, v, log_decay), whole, form)  # noqa: B023
    shared = vmap(lambda a, c: run(a, k[0], c), in_dims=(0, 1), out_dims=1)(q, v.swapaxes(0, 1))
    close(shared, run(q, k[:1], v).swapaxes(0, 1))
    by_time = [x.movedim(-2, 0) for x in (q, k, v)]
    close(vmap(lambda *xs: run(*xs, axis=0), in_dims=1, out_dims=1)(*by_time), run(q, k, v).movedim(-2, 0))

    def loss(a: Any, b: Any, c: Any, g: Any, d: Any) -> Any:
        return (run(a, b, c, g) * d).sum()

    op, own = OPERATORS[name]
    _, pull = hla.vjp(op, *values[:3], log_decay=values[3], chunk_size=CHUNK, **own)
    want = pull(values[4])
    for found in (
        grad(loss, argnums=(0, 1, 2, 3))(q, k, v, log_decay, do),
        vmap(vmap(grad(loss, argnums=(0, 1, 2, 3))))(q, k, v, log_decay, do),
    ):
        for label, x in zip(NAMES, found, strict=True):
            close(x, getattr(want, label), label)
    small = [x[0, 0, :4] for x in (q, k, v, log_decay)]
    forward, reverse = (j(lambda *xs: run(*xs, chunk_size=3))(*small) for j in (torch.func.jacfwd, torch.func.jacrev))
    close(forward, reverse)
    assert forward.any()


@forward_mode
@pytest.mark.parametrize("name", OPERATORS)
def test_forward_mode(name: str) -> None:
    """Is the transpose of reverse mode: ⟨do, J x⟩ = ⟨Jᵀ do, x⟩; by jvp, dual numbers, and on one input alone."""
    *values, do = draw()
    state = start(name)
    op, own = OPERATORS[name]
    options = {"chunk_size": CHUNK, **own, "return_state": True}
    (_, last), pull = hla.vjp(op, *values[:3], log_decay=values[3], initial_state=state, **options)
    want = pull(do, last)
    rng = np.random.default_rng(43)
    tangents = [torch.tensor(rng.normal(size=x.shape)) for x in (*values, *state)]
    inputs = tensors((*values, *state))

    def loss(found: Any) -> Any:
        out, final = found
        return (out * torch.tensor(do)).sum() + sum(
            (x * torch.tensor(y)).sum() for x, y in zip(final, last, strict=True)
        )

    def run(*xs: Any) -> Any:
        return loss(call(name, *xs[:4], initial_state=type(state)(*xs[4:]), return_state=True))

    wanted = [*(getattr(want, n) for n in NAMES), *want.initial_state]
    parts = [float((torch.tensor(x) * t).sum()) for x, t in zip(wanted, tangents, strict=True)]
    _, slope = torch.func.jvp(run, tuple(inputs), tuple(tangents))
    assert np.isclose(float(slope), sum(parts), rtol=1e-9)
    with forward_ad.dual_level():
        dual = run(*map(forward_ad.make_dual, inputs, tangents))
        assert np.isclose(float(forward_ad.unpack_dual(dual).tangent), sum(parts), rtol=1e-9)
        for i, part in enumerate(parts):
            xs = list(inputs)
            xs[i] = forward_ad.make_dual(inputs[i], tangents[i])
            assert np.isclose(float(forward_ad.unpack_dual(run(*xs)).tangent), part, rtol=1e-8, atol=1e-9), i
        # A dual number that also records: forward over reverse.
        leaf = inputs[1].clone().requires_grad_()
        xs = [inputs[0], forward_ad.make_dual(leaf, tangents[1]), *inputs[2:]]
        gradient = torch.autograd.grad(run(*xs), leaf)[0]
        product = forward_ad.unpack_dual(gradient).tangent
    leaf = inputs[1].clone().requires_grad_()
    first = torch.autograd.grad(run(inputs[0], leaf, *inputs[2:]), leaf, create_graph=True)[0]
    if op == "linear_attention":  # linear in k
        assert product is None or not product.any()
    else:
        close(product, torch.autograd.grad(first, leaf, tangents[1])[0])


@forward_mode
def test_forward_mode_of_scale_decay_and_steps() -> None:
    q, k, v = tensors(draw(batch=(HEADS,))[:3])
    decay = torch.tensor([0.6, 0.8, 0.9], dtype=torch.float64)
    state = hla.hla3(q, k, v, return_state=True)[1]
    h = 1e-5
    for run, x in (
        (lambda x: hla.hla2(q, k, v, decay=x, chunk_size=CHUNK), decay),
        (lambda x: hla.hla2(q, k, v, scale=x, chunk_size=CHUNK), torch.tensor(0.7, dtype=torch.float64)),
        (lambda x: hla.step(state, q[:, 0], k[:, 0], v[:, 0], decay=x)[0], decay),
        (lambda x: hla.step(type(state)(x, *state[1:]), q[:, 0], k[:, 0], v[:, 0], decay=decay)[0], state[0]),
        (lambda x: hla.step(state, x, k[:, 0], v[:, 0], decay=decay)[0], q[:, 0]),
    ):
        direction = torch.linspace(0.5, 1.5, x.numel(), dtype=torch.float64).reshape(x.shape)
        _, slope = torch.func.jvp(run, (x,), (direction,))
        differences = (run(x + h * direction) - run(x - h * direction)) / (2 * h)
        close(slope, differences, rtol=1e-7)
        assert slope.any()
        with forward_ad.dual_level():
            close(forward_ad.unpack_dual(run(forward_ad.make_dual(x, direction))).tangent, slope)


@forward_mode
@pytest.mark.parametrize("name", ["linear_attention", "hla2", "ahla", "hla3"])
def test_hessians(name: str) -> None:
    """Forward over reverse and twice reverse, of a loss in which the operator is not linear."""
    q, k, v, g, _ = (x[0, 0] for x in tensors(draw(3)))

    def loss(x: Any) -> Any:
        return (call(name, x, k, v, g, chunk_size=2) ** 2).sum()

    leaf = q.clone().requires_grad_()
    found = torch.func.hessian(loss)(q)
    close(found, torch.autograd.functional.hessian(loss, leaf))
    close(found, torch.func.jacrev(torch.func.jacrev(loss))(q))
    vectorised = torch.autograd.functional.hessian(loss, leaf, vectorize=True)
    close(found, vectorised)
    assert found.any()


@pytest.mark.parametrize("option", ["token_mask", "segment_ids", "cu_seqlens", "decay", "scale", "initial_state"])
@pytest.mark.parametrize("grad", [False, True])
def test_vmap_over_an_option_alone(option: str, grad: bool) -> None:
    """Where q, k and v have no such axis."""
    q, k, v = tensors(draw(batch=(HEADS,))[:3], grad=grad)
    rng = np.random.default_rng(3)
    state = hla.hla2(*(x.detach() for x in (q, k, v)), return_state=True)[1]
    values = {
        "token_mask": torch.tensor(rng.random((4, TOKENS)) < 0.7),
        "segment_ids": torch.tensor(np.sort(rng.integers(0, 4, (4, TOKENS)), axis=-1)),
        "cu_seqlens": torch.tensor([[0, 3, 17], [0, 0, 17], [0, 17, 17], [0, 9, 17]]),
        "decay": torch.tensor(rng.uniform(0.5, 1, (4, HEADS))),
        "scale": torch.tensor(rng.normal(size=4)),
        "initial_state": type(state)(*(torch.stack([x, 2 * x, 3 * x, -x]) for x in state)),
    }[option]
    run = lambda x: hla.hla2(q, k, v, chunk_size=CHUNK, **{option: x})  # noqa: E731
    found = torch.func.vmap(run)(values)
    each = [tree_unflatten([x[i] for x in tree_leaves(values)], tree_flatten(values)[1]) for i in range(4)]
    want = torch.stack([run(x) for x in each])
    close(found, want)
    if grad:
        cotangent = torch.tensor(rng.normal(size=found.shape))
        for x, y in zip(*(torch.autograd.grad(o, (q, k, v), cotangent) for o in (found, want)), strict=True):
            close(x, y)


@pytest.mark.parametrize("offsets", [[0, 17, 17], [0, 0, 17], [0, 0, 0, 5, 5, 17, 17], [0, 17]])
def test_packed_with_and_without_a_graph(offsets: list[int]) -> None:
    """Empty sequences before, between and after; the paths of recording and not recording calls meet here."""
    values = draw()
    ids = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    want = hla.testing.expected("hla2", *values[:3], segment_ids=ids)
    for grad in (False, True):
        out = hla.hla2(*tensors(values[:3], grad=grad), cu_seqlens=torch.tensor(offsets), chunk_size=CHUNK)
        assert out.requires_grad == grad
        assert hla.testing.per_token_error(out.detach().numpy(), want) < 1e-12


def test_vjp_under_func() -> None:
    """hla.vjp inside vmap, where tensors have no values to look at; and of tensors that record."""
    *values, do = draw()

    def run(q: Any, k: Any, v: Any, g: Any, d: Any) -> Any:
        _, pull = hla.vjp("hla2", q, k, v, log_decay=g, chunk_size=CHUNK)
        found = pull(d)
        return found.q, found.k, found.v, found.log_decay

    _, pull = hla.vjp("hla2", *values[:3], log_decay=values[3], chunk_size=CHUNK)
    want = pull(do)
    for found in (torch.func.vmap(run)(*tensors((*values, do))), run(*tensors((*values, do)))):
        for label, x in zip(NAMES, found, strict=True):
            close(x, getattr(want, label), label)
    inputs = tensors((*(x[:1, 0, :4] for x in values), do[:1, 0, :4]), grad=True)
    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)


# --- dtypes ------------------------------------------------------------------------------------------------------


class Watch(TorchDispatchMode):
    """Sees every tensor that an operation makes: dtypes, and the storages that are new."""

    def __init__(self, *known: Any) -> None:
        super().__init__()
        self._seen = {x.untyped_storage().data_ptr() for x in tree_leaves(known) if isinstance(x, torch.Tensor)}
        self._alive: list[Any] = []  # so that no address is used twice
        self.sizes: list[int] = []
        """bytes of each new storage"""
        self.dtypes: set[Any] = set()
        self.operations = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        self.operations += 1
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.dtypes.add(x.dtype)
                storage = x.untyped_storage()
                if storage.data_ptr() not in self._seen:
                    self._seen.add(storage.data_ptr())
                    self._alive.append(storage)
                    self.sizes.append(storage.nbytes())
        return out


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_no_float64(dtype: str) -> None:
    """Unless an input is; nor from numbers, in values or gradients."""
    inputs = tensors(draw()[:4], dtype=getattr(torch, dtype))
    operations = 0
    for name, form in itertools.product(OPERATORS, FORMS):
        with Watch() as watch:
            call(name, *inputs, form=form, normalize=True, scale=0.3, return_state=True)
        assert torch.float64 not in watch.dtypes, (name, form)
        operations += watch.operations
    leaves = [x.clone().requires_grad_() for x in inputs]
    with Watch() as watch:
        hla.hla2(*leaves[:3], decay=0.9, chunk_size=CHUNK).sum().backward()
        _, pull = hla.vjp("hla2", *inputs[:3], decay=0.9, chunk_size=CHUNK)
        pull(inputs[2])
    assert torch.float64 not in watch.dtypes
    assert operations > 1000


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bits_accumulate_in_float32(name: str, dtype: str) -> None:
    """Only inputs and results are rounded: the judge is the definition on the rounded inputs, token by token."""
    length, scale = 97, 0.3
    rng = np.random.default_rng(9)
    kind = getattr(torch, dtype)
    inputs = [torch.tensor(rng.normal(size=(HEADS, length, n)), dtype=kind) for n in (D, D, DV)]
    inputs[0] *= scale
    gates = torch.tensor(-rng.exponential(0.2, size=(HEADS, length)), dtype=torch.float32)
    op, own = OPERATORS[name]
    out, state = call(name, *inputs, gates, return_state=True)
    assert out.dtype == kind
    assert {x.dtype for x in state} == {torch.float32}
    exact = [x.double().numpy() for x in (*inputs, gates)]
    plain = dict(own)
    want = budget.expected(op, *exact[:3], log_decay=exact[3], **plain)
    passes = budget.stages(op, own.get("order"), own.get("definition", "exact"))
    budget.assert_within(out.float().numpy(), want, budget.tolerance("float32", length, D, passes), dtype, name)

    leaves = [x.clone().requires_grad_() for x in (*inputs, gates)]
    do = torch.tensor(rng.normal(size=(HEADS, length, DV)), dtype=kind)
    found = torch.autograd.grad(call(name, *leaves), leaves, do)
    assert [x.dtype for x in found] == [kind, kind, kind, torch.float32]
    _, pull = hla.vjp(op, *exact[:3], log_decay=exact[3], **own)
    wanted = pull(do.double().numpy())
    for label, x in zip(NAMES, found, strict=True):
        y, unit = getattr(wanted, label), budget.UNIT["float32" if label == "log_decay" else dtype]
        x = x.double().numpy()
        row = np.abs(y).max(axis=None if label == "log_decay" else -1, keepdims=True)
        least = 2.0**-24 if dtype == "float16" else 0.0
        assert (np.abs(x - y) <= unit * np.abs(y) + 2e-4 * row + least).all(), label


@pytest.mark.parametrize("name", FEW)
def test_autocast_changes_nothing(name: str) -> None:
    """It is off inside: the inputs' own dtypes decide, forward and backward, also where only backward is inside."""
    q, k, v, gates, do = tensors(draw(), dtype=torch.float32)

    def run(inside: bool, pulled_inside: bool) -> list[Any]:
        leaves = [x.clone().requires_grad_() for x in (q, k, v, gates)]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
            out, state = call(name, *leaves, return_state=True)
            product = torch.ones(2, 2) @ torch.ones(2, 2)
        assert product.dtype == (torch.bfloat16 if inside else torch.float32)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=pulled_inside):
            found = torch.autograd.grad((out, *state), leaves, (do, *map(torch.ones_like, state)), retain_graph=True)
            again = torch.autograd.grad(out, leaves, do, create_graph=True)
            step, moved = hla.step(
                type(state)(*(x.detach() for x in state)),
                *(x[..., 0, :] for x in (q, k, v)),
                **{n: x for n, x in OPERATORS[name][1].items() if n != "order"},
            )
            _, pull = hla.vjp(OPERATORS[name][0], q, k, v, chunk_size=CHUNK, **OPERATORS[name][1])
            by_hand = pull(do)[:3]
        return [x.detach() for x in (out, *state, *found, *again, step, *moved, *by_hand)]

    want = run(False, False)
    assert {x.dtype for x in want} == {torch.float32}
    for inside, pulled in ((True, True), (True, False), (False, True)):
        for i, (x, y) in enumerate(zip(run(inside, pulled), want, strict=True)):
            assert x.dtype == torch.float32
            assert torch.equal(x, y), i


# --- settings of PyTorch -----------------------------------------------------------------------------------------


def test_deterministic_algorithms() -> None:
    """Nothing in the backend is refused, and uninitialised memory, then filled with NaN, is not read."""
    inputs = tensors(draw()[:4])
    options = {"return_state": True, "normalize": True, "eps": 3.0}
    ids = torch.tensor([0] * 4 + [1] * 13)

    def run() -> list[Any]:
        found = []
        for name, form in itertools.product(FEW, FORMS):
            leaves = [x.clone().requires_grad_() for x in inputs]
            out, state = call(name, *leaves, form=form, **options)
            found += [out, *state, *torch.autograd.grad(out.sum() + state[0].sum(), leaves)]
        found.append(hla.hla2(*inputs[:3], segment_ids=ids, mask="none", chunk_size=CHUNK))
        return [x.detach() for x in found]

    want = run()
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    try:
        torch.utils.deterministic.fill_uninitialized_memory = True
        found = run()
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = before
    assert all(torch.equal(x, y) for x, y in zip(found, want, strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool) -> None:
    """Recomputed activations give the same gradients."""
    q, k, v, gates, do = tensors(draw())

    def block(a: Any, b: Any, c: Any, g: Any) -> Any:
        out, state = hla.hla2(
            a, b, hla.ahla(a, b, c, chunk_size=CHUNK), log_decay=g, chunk_size=CHUNK, return_state=True
        )
        return out * 2.0, state[1].sum()

    results = []
    for wrapped in (False, True):
        leaves = [x.clone().requires_grad_() for x in (q, k, v, gates)]
        run = torch.utils.checkpoint.checkpoint if wrapped else lambda f, *xs, **_: f(*xs)
        out, total = run(block, *leaves, use_reentrant=reentrant)
        results.append(torch.autograd.grad if not wrapped or not reentrant else None)
        ((out * do).sum() + total).backward()
        results[-1] = [x.grad for x in leaves]
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))
    assert all(x.any() for x in results[0])


def test_offloaded_activations() -> None:
    """Saved tensors may be moved away and back, as `torch.autograd.graph.save_on_cpu` does."""
    inputs, do = tensors(draw()[:4]), torch.tensor(draw()[4])
    results = []
    for hooked in (False, True):
        leaves = [x.clone().requires_grad_() for x in inputs]
        pack = (lambda x: x.clone(), lambda x: x.clone()) if hooked else (lambda x: x, lambda x: x)
        with torch.autograd.graph.saved_tensors_hooks(*pack):
            out = call("hla3", *leaves)
        results.append(torch.autograd.grad(out, leaves, do))
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))


# --- layouts, and whose memory is whose --------------------------------------------------------------------------


def layouts() -> dict[str, list[Any]]:
    """The same q, k, v laid out in different ways."""
    rng = np.random.default_rng(12)
    base = [torch.tensor(rng.normal(size=(BATCH, HEADS, TOKENS, n))) for n in (D, D, DV)]
    reverse = torch.arange(TOKENS - 1, -1, -1)
    backwards = [x[:, :, reverse].contiguous() for x in base]
    return {
        "heads behind time": [x.transpose(1, 2).contiguous().transpose(1, 2) for x in base],
        "features first": [x.movedim(-1, 0).contiguous().movedim(0, -1) for x in base],
        "every other": [torch.stack([x, x + 9], -1).flatten(-2)[..., ::2] for x in base],
        "flipped by index": [x[:, :, reverse] for x in backwards],
        "a slice of time": [torch.cat([x, x, x], -2)[:, :, TOKENS : 2 * TOKENS] for x in base],
        "batch axes swapped": [x.transpose(0, 1).contiguous().transpose(0, 1) for x in base],
        "negated on use": [torch.complex(x, -x).conj().imag for x in base],
        "plain": base,
    }


@pytest.mark.parametrize("layout", [name for name in layouts() if name != "plain"])
@pytest.mark.parametrize("name", ["hla2", "ahla", "order 4"])
def test_layouts(name: str, layout: str) -> None:
    """Same values and gradients, in the inputs' own places."""
    laid = layouts()
    given, plain = laid[layout], laid["plain"]
    do = torch.randn(BATCH, HEADS, TOKENS, DV, dtype=torch.float64)
    results = []
    for inputs in (given, plain):
        leaves = [x.detach().requires_grad_() for x in inputs]
        assert [x.stride() for x in leaves] == [x.stride() for x in inputs]
        out, state = call(name, *leaves, decay=0.9, return_state=True)
        results.append([out, *state, *torch.autograd.grad((out * do).sum() + state[-1].sum(), leaves)])
    for x, y in zip(*results, strict=True):
        close(x, y)


def test_repeated_entries() -> None:
    """Stride 0 along any axis: the gradient of an expanded tensor counts every place."""
    rng = np.random.default_rng(13)
    small = [
        torch.tensor(rng.normal(size=s)) for s in ((1, HEADS, TOKENS, D), (BATCH, 1, TOKENS, D), (BATCH, HEADS, 1, 1))
    ]
    shapes = [(BATCH, HEADS, TOKENS, n) for n in (D, D, DV)]
    do = torch.tensor(rng.normal(size=(BATCH, HEADS, TOKENS, DV)))
    results = []
    for copied in (False, True):
        leaves = [x.clone().requires_grad_() for x in small]
        wide = [x.expand(shape) for x, shape in zip(leaves, shapes, strict=True)]
        wide = [x.contiguous() for x in wide] if copied else wide
        assert copied or 0 in wide[0].stride()
        out = call("hla2", *wide, decay=0.9)
        results.append([out, *torch.autograd.grad(out, leaves, do.expand_as(out))])
    for x, y in zip(*results, strict=True):
        close(x, y)
    out = call("hla2", *leaves[:1], *wide[1:])
    total = torch.autograd.grad(out.sum(), leaves[0])[0]  # whose cotangent has stride 0 everywhere
    close(total, torch.autograd.grad(call("hla2", *leaves[:1], *wide[1:]), leaves[0], torch.ones_like(out))[0])


@pytest.mark.parametrize("name", FEW)
def test_one_tensor_in_two_places(name: str) -> None:
    """The gradient is the sum of those of its places; also as q, k and v."""
    q, _, v, _, do = tensors(draw())
    leaf, one, other = (q.clone().requires_grad_() for _ in range(3))
    together = torch.autograd.grad(call(name, leaf, leaf, v, decay=0.9), leaf, do)[0]
    apart = torch.autograd.grad(call(name, one, other, v, decay=0.9), (one, other), do)
    close(together, apart[0] + apart[1])
    leaves = [q.clone().requires_grad_() for _ in range(3)]
    do = torch.randn_like(q)
    together = torch.autograd.grad(call(name, leaf, leaf, leaf), leaf, do)[0]
    close(together, sum(torch.autograd.grad(call(name, *leaves), leaves, do)))


@pytest.mark.parametrize("name", ["linear_attention", "hla2", "ahla", "hla3", "order 4"])
@pytest.mark.parametrize("form", ["chunkwise", "recurrent"])
def test_shared_keys_are_not_copied(name: str, form: str) -> None:
    """Grouped heads by expand: no new tensor is as large as the expanded keys. Gradients are those of a copy."""
    length, d, dv, heads = 257, 31, 3, 13
    rng = np.random.default_rng(14)
    q, k, v = (torch.tensor(rng.normal(size=s)) for s in ((2, heads, length, d), (2, 1, length, d), (2, 1, length, dv)))
    wide = [x.expand(2, heads, *x.shape[-2:]) for x in (k, v)]
    for given in (wide, (k, v)):
        with Watch(q, k, v) as watch:
            out = call(name, q, *given, decay=0.97, form=form, chunk_size=16)
        assert max(watch.sizes) == out.nbytes or max(watch.sizes) <= 2 * heads * max(16 * d, d * d) * 8
        assert max(watch.sizes) < wide[0].numel() * 8 // 4
    do = torch.tensor(rng.normal(size=out.shape))
    results = []
    for copied in (False, True):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        wide = [x.expand(2, heads, *x.shape[-2:]) for x in leaves[1:]]
        out = call(name, leaves[0], *(x.contiguous() if copied else x for x in wide), decay=0.97, chunk_size=16)
        results.append([out, *torch.autograd.grad(out, leaves, do)])
    for x, y in zip(*results, strict=True):
        close(x, y)


def storages(*values: Any) -> set[int]:
    return {x.untyped_storage().data_ptr() for x in tree_leaves(values) if x.numel()}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["linear_attention", "hla2", "hla2 prefix", "ahla", "hla3 printed"])
@pytest.mark.parametrize("length", [0, 1, TOKENS])
def test_nothing_is_written_or_shared(name: str, form: str, length: int) -> None:
    """Inputs, options, states and cotangents stay as they are, and no result or gradient lies in their memory."""
    torch.manual_seed(3)
    op, own = OPERATORS[name]
    shapes = [(BATCH, HEADS, length, n) for n in (D, D, DV)]
    inputs = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    gates = (-torch.rand(BATCH, HEADS, length, dtype=torch.float64)).requires_grad_()
    mask = torch.rand(BATCH, HEADS, length) < 0.8
    state = type(start(name))(*tensors(start(name), grad=True))
    do = torch.randn(BATCH, HEADS, length, DV, dtype=torch.float64)
    d_state = tuple(torch.randn_like(x) for x in state)
    for options in ({"log_decay": gates}, {"token_mask": mask, "decay": 1.0}, {}):
        leaves = [*inputs, *state, *([gates] if "log_decay" in options else [])]
        given = [*leaves, mask, do, *d_state]
        before = [x.detach().clone() for x in given]
        kept = storages(given)

        def run(options: Any = options) -> Any:
            out, last = getattr(hla, op)(
                *inputs,
                **own,
                **options,
                initial_state=state,
                return_state=True,
                form=form,
                chunk_size=CHUNK,
            )
            return [out, *last]

        results = run()
        assert not storages(results) & kept
        for extra in ({}, {"create_graph": True}):
            found = torch.autograd.grad(results, leaves, (do, *d_state), retain_graph=True, allow_unused=True, **extra)
            found = [x for x in found if x is not None]
            assert found
            assert not storages(found) & storages(results) or not length
        with torch.no_grad():
            assert not storages(run()) & kept
        _, pull = hla.vjp(op, *inputs, **own, **options, initial_state=state, return_state=True, form=form)
        pull(do, type(state)(*d_state))
        assert all(torch.equal(x.detach(), y) for x, y in zip(given, before, strict=True))
        # Results are the caller's own: writing to them changes no other.
        results = [x.detach() for x in run()]
        for i, x in enumerate(results):
            others = [y.clone() for j, y in enumerate(results) if j != i]
            x.add_(1.0)
            assert all(torch.equal(y, z) for y, z in zip(results[:i] + results[i + 1 :], others, strict=True))


def test_gradients_are_not_the_cotangents() -> None:
    """A gradient that an optimiser scales in place is not memory of the caller's cotangent, or of another gradient."""
    for name, options in (("linear_attention", {}), ("hla2", {"decay": 1.0}), ("hla2", {"mask": "none"})):
        leaves = tensors(draw(1)[:3], grad=True)
        op, _ = OPERATORS[name]
        fixed = torch.tensor(draw(1)[4])
        found = torch.autograd.grad(getattr(hla, op)(*leaves, **options), leaves, fixed)
        assert len(storages(found)) == 3
        assert not storages(found) & storages(fixed, leaves)


def test_steps_in_place_and_not() -> None:
    q, k, v = (x[..., 0, :] for x in tensors(draw()[:3]))
    state = type(start("hla2 prefix"))(*tensors(start("hla2 prefix")))
    before = [x.clone() for x in state]
    out, following = hla.step(state, q, k, v, mask="prefix", decay=0.9)
    assert all(torch.equal(x, y) for x, y in zip(state, before, strict=True))
    assert not storages(following) & storages(state, q, k, v)
    places = [x.data_ptr() for x in state]
    again, moved = hla.step(state, q, k, v, mask="prefix", decay=0.9, inplace=True)
    assert moved is state
    assert [x.data_ptr() for x in moved] == places
    close(again, out)
    for x, y in zip(moved, following, strict=True):
        close(x, y)


# --- values that are not there -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["meta", "fake"])
@pytest.mark.parametrize("name", OPERATORS)
def test_shapes_without_values(name: str, kind: str) -> None:
    """Right shapes and dtypes, states and gradients included; no value is asked for."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    values = [x.astype("float32") for x in draw()[:4]]
    want = call(name, *tensors(values, grad=True), return_state=True, normalize=True)
    mode = FakeTensorMode() if kind == "fake" else torch.device("meta")
    with mode:
        inputs = [torch.empty(x.shape, dtype=torch.bfloat16) for x in values[:3]]
        gates = torch.empty(values[3].shape, dtype=torch.float16)
        leaves = [x.requires_grad_() for x in (*inputs, gates)]
        found = call(name, *leaves, return_state=True, normalize=True)
        gradients = torch.autograd.grad(found[0].sum() + found[1][0].sum(), leaves)
        masked = call(
            name,
            *inputs,
            token_mask=torch.empty(TOKENS, dtype=torch.bool),
            segment_ids=torch.empty(TOKENS, dtype=torch.int64),
        )
        _, moved = hla.step(found[1], *(x[..., 0, :] for x in inputs), normalize=True, **OPERATORS[name][1])
    assert found[0].dtype == masked.dtype == torch.bfloat16
    assert found[0].shape == masked.shape == want[0].shape
    for x, y, z in zip(found[1], want[1], moved, strict=True):
        assert (x.shape, x.dtype) == (y.shape, torch.float32)
        assert (z.shape, z.dtype) == (y.shape, torch.float32)
    assert [(x.shape, x.dtype) for x in gradients] == [(x.shape, x.dtype) for x in leaves]
    if kind == "meta":
        assert all(x.is_meta for x in (found[0], *found[1], *gradients))


# --- memory ------------------------------------------------------------------------------------------------------


def long(length: int, gated: bool) -> list[Any]:
    torch.manual_seed(4)
    inputs = [torch.randn(HEADS, length, n, dtype=torch.float64, requires_grad=True) for n in (D, D, DV)]
    if gated:
        inputs.append((-torch.rand(HEADS, length, dtype=torch.float64)).requires_grad_())
    return inputs


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", OPERATORS)
def test_the_graph_keeps_inputs_and_one_state_per_chunk(name: str, gated: bool) -> None:
    """Nothing else; so it grows like T, and holds no result of a stage."""
    chunk, totals = 16, []
    for length in (256, 512):
        inputs = long(length, gated)
        saved: dict[int, int] = {}

        def keep(x: Any, saved: Any = saved) -> Any:
            saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            out, state = call(name, *inputs, return_state=True, chunk_size=chunk)
        alone = sum(x.nbytes for x in inputs)
        states = length // chunk * sum(x.nbytes for x in state)
        total = sum(saved.values())
        assert alone < total <= alone + states
        totals.append(total)
        assert torch.autograd.grad(out.sum(), inputs)[0].any()
    assert totals[1] == 2 * totals[0]


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", OPERATORS)
def test_nothing_long_but_results(name: str, gated: bool) -> None:
    """Neither forward nor backward makes a tensor of T×T, or the result of a stage at full length."""
    length, chunk = 512, 16
    inputs = long(length, gated)
    least = HEADS * length * D * 8  # bytes of a stage's result
    with Watch(inputs) as watch:
        out, state = call(name, *inputs, return_state=True, chunk_size=chunk)
    assert [n for n in watch.sizes if n >= least] == [out.nbytes]
    cotangents = (torch.ones_like(out), *map(torch.ones_like, state))
    with Watch(inputs, out, state, cotangents) as watch:
        found = torch.autograd.grad((out, *state), inputs, cotangents)
    assert sorted(n for n in watch.sizes if n >= least) == sorted(x.nbytes for x in found[:3])
    largest = HEADS * length * DV * 8
    assert max(watch.sizes) == largest
    with torch.no_grad(), Watch(inputs) as watch:
        call(name, *inputs, return_state=True, chunk_size=chunk)
    assert [n for n in watch.sizes if n >= least] == [out.nbytes]


# --- threads and workers -----------------------------------------------------------------------------------------


def test_threads_keep_the_setting_and_not_the_context() -> None:
    x = torch.ones(TOKENS, D)
    seen: dict[str, str] = {}

    def look(label: str) -> None:
        hla.hla2(x, x, x)
        seen[label] = hla.explain("hla2", x, x, x).backend

    def beside(label: str) -> None:
        thread = threading.Thread(target=look, args=(label,))
        thread.start()
        thread.join()

    with hla.use_backend("numpy"):
        beside("context elsewhere")
        look("context here")
    try:
        hla.set_backend("numpy")
        beside("setting elsewhere")
    finally:
        hla.set_backend(None)
    beside("after")
    assert seen == {
        "context elsewhere": "torch",
        "context here": "numpy",
        "setting elsewhere": "numpy",
        "after": "torch",
    }


def test_backward_in_another_thread() -> None:
    """A graph may be pulled elsewhere, by several threads at once."""
    inputs, do = tensors(draw()[:4]), torch.tensor(draw()[4])
    leaves = [x.clone().requires_grad_() for x in inputs]
    want = torch.autograd.grad(call("hla2", *leaves), leaves, do)
    found: dict[int, Any] = {}
    out = call("hla2", *leaves)

    def pull(i: int) -> None:
        found[i] = torch.autograd.grad(out, leaves, do, retain_graph=True)

    threads = [threading.Thread(target=pull, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(torch.equal(x, y) for result in found.values() for x, y in zip(result, want, strict=True))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_data_loader_workers(method: str) -> None:
    """Forked workers have the setting; those that start afresh get it as a snapshot."""
    try:
        hla.set_backend("numpy")
        dataset = workers.Chosen(hla.backends.snapshot() if method == "spawn" else None)
        loader = torch.utils.data.DataLoader(
            dataset, batch_size=2, num_workers=2, collate_fn=workers.together, multiprocessing_context=method
        )
        items = [item for batch in loader for item in batch]
    finally:
        hla.set_backend(None)
    assert {(chosen, ran) for chosen, ran, _ in items} == {("numpy", "numpy")}
    assert {worker for _, _, worker in items} == {0, 1}
    assert workers.Chosen()[0] == ("auto", "torch", -1)


def test_tensors_alone_load_no_other_library() -> None:
    """The backend is PyTorch only."""
    script = (
        "import sys, torch, hla\n"
        "x = torch.ones(7, 2, requires_grad=True)\n"
        "hla.hla2(x, x, x).sum().backward()\n"
        "print(hla.explain('hla2', x, x, x).backend, 'jax' in sys.modules, torch.get_num_threads() > 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["torch", "False", "True"], done.stderr

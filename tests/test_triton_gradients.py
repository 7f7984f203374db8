"""Backend "triton" in Triton's interpreter: gradients, transformations, programs, threads.

The judge is backend "torch" in float64, through output and final states, which `tests/test_torch.py` holds to
differences of the definition.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import hla
import libraries

torch: Any = libraries.only("torch")
pytest.importorskip("triton")

from torch.autograd import forward_ad  # noqa: E402

from hla.backends.staged import operations  # noqa: E402
from hla.backends.triton import engine, launch  # noqa: E402
from hla.errors import BackendUnsupportedError  # noqa: E402
from test_triton import FEW, FORMS, LAYOUTS, SHORT, gates  # noqa: E402
from triton_options import Case, build, in_pairs, names  # noqa: E402
from triton_runs import (  # noqa: E402, F401
    CHUNKWISE,
    DEVICE,
    OPERATORS,
    Launched,
    budget,
    check,
    chosen,
    cotangents,
    draw,
    entries,
    fetched,
    flat,
    initial,
    judge,
    placed,
    run,
    tokens,
    watched,
)

# --- options, layouts, sizes -------------------------------------------------------------------------------------

CASES = in_pairs(chunk=(1, None), length=(16, 17, 21))


@pytest.mark.parametrize("case", CASES, ids=names(CASES))
def test_options(case: Case) -> None:
    """Values, states, and all gradients through all of them, with NaN at tokens that are skipped."""
    operator, inputs, options = build(case)
    check(operator, *inputs, gradient=True, spoil=case["tokens"] == "masked", **options)


@pytest.mark.parametrize("name", FEW)
def test_recurrent(name: str) -> None:
    """What ran token after token has the gradient of chunks."""
    check(name, *draw(5), form="recurrent", gradient=True, return_state=True, **gates("log_decay", 5))


@pytest.mark.parametrize(("name", "mask"), [("hla2 printed", "causal"), ("hla2", "none"), ("order 4", "causal")])
def test_borders_for_each_head(name: str, mask: str) -> None:
    """At a chunk's first token for one head, within it for another: strict reads and cotangents stop there too."""
    operator, own = OPERATORS[name]
    ids = torch.tensor([[0] * 3 + [1] * 14 + [7] * 2, [0] * 16 + [1] * 3])
    options = {"segment_ids": ids, "mask": mask, "chunk_size": 16, **own}
    options |= {} if mask == "none" else {"log_decay": torch.full((19,), -0.2)}
    check(operator, *draw(19), gradient=True, **options)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str) -> None:
    """Of what is laid out, for what it was made of; expanded axes are summed."""
    options = {"decay": torch.tensor([[0.9], [0.7]]), "return_state": True, "chunk_size": 16}
    check("hla2", *draw(17, batch=(2, 3)), gradient=True, lay=LAYOUTS[layout], **options)


def test_batch_axes_in_turns() -> None:
    """More batch axes than a launch has, none of which lie behind one another."""
    generator = torch.Generator().manual_seed(2)
    shapes = ((2, 1, 2, 1, 5, 3), (1, 2, 1, 2, 5, 3), (2, 1, 1, 1, 5, 4), (1, 2, 2, 1, 5))
    q, k, v, g = (placed(torch.randn(shape, generator=generator)) for shape in shapes)
    check("hla2", q, k, v, gradient=True, log_decay=-g.abs(), return_state=True)
    offsets = {"cu_seqlens": torch.tensor([0, 2, 2, 5]), "return_state": True}
    start = initial("linear_attention", {}, q, (3, 2, 2, 2, 2), d=3, dv=4)
    check("linear_attention", q, k, v, gradient=True, decay=torch.tensor(0.9), initial_state=start, **offsets)


@pytest.mark.parametrize("name", FEW)
def test_one_tensor_in_three_places(name: str) -> None:
    """The sum over its places."""
    check(name, *draw(17), gradient=True, decay=0.9, lay=lambda q, k, v: (q, q, q))


@pytest.mark.parametrize("axis", [-3, 0])
def test_time_on_another_axis(axis: int) -> None:
    q, k, v = (x.movedim(-2, axis).contiguous() for x in draw(17, batch=(2, 3)))
    check("hla2", q, k, v, gradient=True, axis=axis, decay=torch.tensor([[0.9], [0.7]]))


@pytest.mark.parametrize(("d", "dv"), [(1, 1), (2, 3), (13, 1), (100, 7), (60, 100)])
def test_widths(d: int, dv: int) -> None:
    options = {"scale": d**-0.5, "return_state": True, "log_decay": gates("log_decay", 17)["log_decay"][0]}
    for name in ("hla2", "ahla") if d < 60 else ("hla2",):
        check(name, *draw(17, batch=(), d=d, dv=dv), gradient=True, chunk_size=16, **options)


@pytest.mark.parametrize("length", [1, 15, 16, 33])
def test_lengths(length: int) -> None:
    for name in ("hla2", "hla3"):
        options = {"log_decay": torch.full((length,), -0.1), "return_state": True}
        check(name, *draw(length, batch=()), gradient=True, chunk_size=16, **options)


@pytest.mark.parametrize("name", ["hla2", "hla3 printed"])
@pytest.mark.parametrize(("length", "batch"), [(0, (2,)), (5, (0,)), (5, (0, 2))])
def test_nothing(length: int, batch: tuple[int, ...], name: str) -> None:
    """No tokens or no heads: zeros, and the state goes through."""
    operator, own = OPERATORS[name]
    q, k, v = (x.requires_grad_() for x in draw(length, batch=batch))
    state = initial(operator, own, q, batch, d=5, dv=7)
    state = type(state)(*(x.requires_grad_() for x in state))
    gate = torch.zeros(*batch, length, device=DEVICE).requires_grad_()
    found = run(operator, q, k, v, log_decay=gate, initial_state=state, return_state=True, **own)
    inputs = [q, k, v, gate, *state]
    made = torch.autograd.grad(flat(found), inputs, cotangents(flat(found)), allow_unused=True)
    for x, y in zip(inputs[:4], made, strict=False):
        assert y is None or (y.shape == x.shape and not y.any())
    assert all(map(torch.equal, made[4:], cotangents(flat(found))[1:]))


def test_no_sequences() -> None:
    q, k, v = (x.requires_grad_() for x in draw(0))
    for offsets in ([0], [0, 0, 0]):
        found = run("hla2", q, k, v, cu_seqlens=torch.tensor(offsets), decay=0.9, return_state=True)
        made = torch.autograd.grad(sum(x.sum() for x in flat(found)), (q, k, v), allow_unused=True)
        assert all(y is None or y.shape == x.shape for x, y in zip((q, k, v), made, strict=True))


@pytest.mark.parametrize("decay", [0.2, 0.01, 1e-30])
@pytest.mark.parametrize("name", ["linear_attention", "hla2", "ahla", "hla3", "hla2 printed"])
def test_strong_decay(name: str, decay: float) -> None:
    """Constant or as a forget gate, over chunks that are not full."""
    operator, own = OPERATORS[name]
    inputs = draw(20, batch=())
    if "printed" in name and decay < 0.01:
        return  # what remains is the difference of sums that are larger by 1/γ
    check(operator, *inputs, gradient=True, decay=torch.tensor(decay), return_state=True, **own)
    if decay > 1e-20:
        gate = torch.full((20,), decay).log()
        check(operator, *inputs, gradient=True, log_decay=gate, return_state=True, **own)


@pytest.mark.parametrize("name", [*FEW, "hla2 printed", "order 4"])
def test_parts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sequence side by side with itself: from a state to a state, the last part and chunk not full."""
    monkeypatch.setattr(operations, "FEWEST_CHUNKS", 1)
    operator, own = OPERATORS[name]
    q, k, v = draw(37, batch=(1,))
    state = initial(operator, own, q, (1,), d=5, dv=7)
    log_decay = -0.2 * torch.rand(1, 37, generator=torch.Generator().manual_seed(1))
    log_decay[0, 20] = -torch.inf
    options = {"chunk_size": 16, "initial_state": state, "return_state": True, **own}
    with Launched() as kernels:
        check(operator, q, k, v, gradient=True, log_decay=log_decay, **options)
    assert kernels["carry"] >= 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "mixed"])
@pytest.mark.parametrize("name", ["linear_attention", "hla2", "ahla", "hla3", "hla2 printed"])
def test_dtypes(name: str, dtype: str) -> None:
    """Each in its input's dtype; of states in float32."""
    operator, own = OPERATORS[name]
    kinds = {"mixed": (torch.bfloat16, torch.float32, torch.float16)}.get(dtype, (getattr(torch, dtype, None),) * 3)
    inputs = [0.7 * x.to(t) for x, t in zip(draw(19), kinds, strict=True)]
    state = initial(operator, own, inputs[0], (2,), d=5, dv=7)
    options = {"chunk_size": 16, "initial_state": state, "return_state": True, **own}
    check(operator, *inputs, gradient=True, decay=torch.tensor([0.9, 0.5]), **options)


def test_scale_of_another_dtype() -> None:
    """Gradients of q and of the scale are no rounder than these are."""
    for kinds in ((torch.bfloat16, torch.float32, torch.float32), (torch.float32,) * 3, (torch.bfloat16,) * 3):
        inputs = [x.to(t) for x, t in zip(draw(17), kinds, strict=True)]
        check("hla2", *inputs, gradient=True, scale=torch.tensor(0.3))


# --- which gradients ---------------------------------------------------------------------------------------------

THROUGH: dict[str, Callable[[list[Any]], list[Any]]] = {
    "the output": lambda found: found[:1],
    "the states": lambda found: found[1:],
    "the first state": lambda found: found[1:2],
    "the last state": lambda found: found[-1:],
}


SOME = [("hla2", through) for through in THROUGH]
SOME += [(name, f"the {which} state") for name in ("ahla", "hla2 printed", "order 4") for which in ("first", "last")]


@pytest.mark.parametrize(("name", "through"), SOME)
def test_some_of_the_results(name: str, through: str) -> None:
    """The others have no cotangent at all."""
    operator, own = OPERATORS[name]
    state = initial(operator, own, draw(1)[0], (2,), d=5, dv=7)
    options = {"initial_state": state, "return_state": True, **own, **gates("log_decay", 17)}
    check(operator, *draw(17), gradient=True, chunk_size=16, through=THROUGH[through], **options)


def test_some_of_the_inputs() -> None:
    """Those that need none get none, and the gradient of log-decays is not computed for nothing."""
    values = placed({**dict(zip("qkv", draw(17), strict=True)), "log_decay": -0.1 * torch.ones(2, 17)})
    whole = {n: x.clone().requires_grad_() for n, x in values.items()}
    do = torch.ones(2, 17, 7, device=DEVICE)
    want = dict(zip(whole, torch.autograd.grad(run("hla2", **whole), list(whole.values()), do), strict=True))
    for name in values:
        some = {n: x.clone().requires_grad_(n == name) for n, x in values.items()}
        out = run("hla2", **some)
        with Launched() as kernels:
            out.backward(do)
        assert torch.equal(some[name].grad, want[name])
        assert all(x.grad is None for n, x in some.items() if n != name)
        assert bool(kernels["rate"]) == (name == "log_decay")
    with torch.no_grad():
        assert not run("hla2", **whole).requires_grad
    assert not run("hla2", **values).requires_grad


def test_pieces_and_steps() -> None:
    """Through the states that two pieces and a token hand on: the gradient of the whole."""
    for name in ("hla2", "hla2 printed"):
        operator, own = OPERATORS[name]
        leaves = [x.requires_grad_() for x in placed((*draw(19), -0.2 * torch.ones(2, 19)))]
        q, k, v, g = leaves
        first, state = run(operator, q[:, :3], k[:, :3], v[:, :3], log_decay=g[:, :3], return_state=True, **own)
        options = {"log_decay": g[:, 3:18], "initial_state": state, "return_state": True, **own}
        second, state = run(operator, q[:, 3:18], k[:, 3:18], v[:, 3:18], **options)
        third, state = hla.step(state, q[:, 18], k[:, 18], v[:, 18], log_decay=g[:, 18], backend="triton", **own)
        assert chosen[-1] == ("triton", False)
        results = [torch.cat([first, second, third[:, None]], 1), *state]
        found = torch.autograd.grad(results, leaves, cotangents(results))
        exact = [x.double().requires_grad_() for x in fetched([x.detach() for x in leaves])]
        wanted = flat(judge(operator, *exact[:3], log_decay=exact[3], return_state=True, **own))
        want = torch.autograd.grad(wanted, exact, cotangents(wanted))
        allowed = 2 * budget(operator, q, k, v, gradient=True, **own)
        for x, y, backwards in zip(found[:3], want[:3], (False, True, True), strict=True):
            tokens(x, y, allowed, name, backwards=backwards)
        entries(found[3], want[3], allowed, name, axes=1)


def test_cotangents_of_any_layout() -> None:
    """Expanded, transposed, and NaN at tokens that are skipped."""
    inputs = [x.requires_grad_() for x in draw(17)]
    mask = torch.ones(2, 17, dtype=torch.bool, device=DEVICE)
    mask[0, 3] = mask[1, 16] = False
    for normalize in (False, True):
        options = {"token_mask": mask, "normalize": normalize, "eps": 40.0}
        out = run("hla2", *inputs, **options)
        expanded = torch.randn(17, 7, device=DEVICE).expand(2, 17, 7)
        hidden = torch.where(mask[..., None], expanded, torch.nan)
        laid = expanded.mT.contiguous().mT
        want = torch.autograd.grad(out, inputs, expanded.contiguous(), retain_graph=True)
        for do in (expanded, laid, hidden):
            assert all(map(torch.equal, torch.autograd.grad(out, inputs, do, retain_graph=True), want))


def test_nothing_is_written_or_shared() -> None:
    """Inputs and cotangents stay as they are, and no gradient lies in their memory or in another's."""
    for length, options in ((17, {"decay": 0.9}), (1, {"decay": 1.0}), (17, {"mask": "none"})):
        inputs = [x.requires_grad_() for x in draw(length)]
        do = torch.randn(2, length, 7, device=DEVICE)
        kept = [x.detach().clone() for x in (*inputs, do)]
        found = torch.autograd.grad(run("hla2", *inputs, **options), inputs, do)
        assert all(torch.equal(x.detach(), y) for x, y in zip((*inputs, do), kept, strict=True))
        places = [x.untyped_storage().data_ptr() for x in (*found, *inputs, do)]
        assert len({*places}) == len(places)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", FEW)
def test_bad_values_stay_in_their_head(name: str) -> None:
    values = placed({**dict(zip("qkv", draw(19), strict=True)), "log_decay": -0.1 * torch.ones(2, 19)})

    def gradients(values: Any) -> Any:
        leaves = {n: x.clone().requires_grad_() for n, x in values.items()}
        return torch.autograd.grad(run(name, **leaves), list(leaves.values()), torch.ones(2, 19, 7, device=DEVICE))

    clean = gradients(values)
    for which in values:
        spoilt = {n: x.clone() for n, x in values.items()}
        spoilt[which][1, 7] = torch.nan
        assert all(torch.equal(x[0], y[0]) for x, y in zip(gradients(spoilt), clean, strict=True))


def test_autocast_changes_nothing() -> None:
    inputs = [x.requires_grad_() for x in draw(17)]
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        out = run("hla2", *inputs)
    want = run("hla2", *inputs)
    assert torch.equal(out, want)
    do = torch.ones_like(out)
    assert all(map(torch.equal, torch.autograd.grad(out, inputs, do), torch.autograd.grad(want, inputs, do)))


def test_checkpoint() -> None:
    """Computed again in the backward pass, kernels and all."""
    from torch.utils.checkpoint import checkpoint

    results = []
    for keep in (False, True):
        leaves = [x.clone().requires_grad_() for x in draw(17)]
        layer = lambda q, k, v: hla.hla2(q.tanh(), k, v, decay=0.9, backend="triton")  # noqa: E731
        with Launched() as kernels:
            out = layer(*leaves) if keep else checkpoint(layer, *leaves, use_reentrant=False)
            out.square().sum().backward()
        results.append([out, *(x.grad for x in leaves)])
        assert kernels["read"]
    assert all(map(torch.equal, *results))


# --- hla.vjp -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in OPERATORS if name != "order 5"])
def test_vjp(name: str) -> None:
    """Output, states and all gradients; that of a number too."""
    operator, own = OPERATORS[name]
    q, k, v = draw(19)
    state = initial(operator, own, q, (2,), d=5, dv=7)
    mask = torch.ones(2, 19, dtype=torch.bool)
    mask[0, 3] = False
    shared = {"decay": 0.9, "return_state": True, **own}
    results = []
    for backend, cast in (("triton", placed), ("torch", lambda x: fetched(x).double())):
        chosen.clear()
        options = {"scale": cast(torch.tensor(0.4)), "initial_state": type(state)(*map(cast, state)), **shared}
        options["token_mask"] = mask.to(options["scale"].device)
        with Launched() as kernels:
            value, pull = hla.vjp(operator, *map(cast, (q, k, v)), backend=backend, **options)
            found = pull(*(cotangents(flat(value))[:1]), type(value[1])(*cotangents(flat(value))[1:]))
        assert {name for name, _ in chosen} == {backend}
        assert (set(kernels) <= CHUNKWISE and kernels["rate"] > 0) == (backend == "triton")
        results.append((flat(value), found))
    (values, found), (wanted, want) = results
    allowed, loose = (budget(operator, q, k, v, gradient=g, **own) for g in (False, True))
    tokens(values[0], wanted[0], allowed)
    for x, y in (("q", False), ("k", True), ("v", True)):
        tokens(getattr(found, x), getattr(want, x), loose, x, backwards=y)
    for x, y in zip(found.initial_state, want.initial_state, strict=True):
        entries(x, y, loose, axes=x.ndim - 1)
    terms = (want.q * fetched(q)).abs().sum() / 0.4
    entries(found.scale, want.scale, loose, "scale", axes=0, sizes=terms)
    assert found.decay.shape == ()
    assert found.log_decay is None
    entries(found.decay, want.decay, loose, "decay", axes=0)


def test_vjp_of_watched_inputs_is_not_cut_off() -> None:
    """Its gradients depend on inputs and cotangent: what would differentiate them is refused, not dropped."""
    q, k, v = draw(5)
    q.requires_grad_()
    out, pull = hla.vjp("hla2", q, k, v, backend="triton")
    with pytest.raises(BackendUnsupportedError, match="gradient of a gradient"):
        torch.autograd.grad(pull(torch.ones_like(out)).k.sum(), q)
    do = torch.ones_like(out).requires_grad_()
    _, pull = hla.vjp("hla2", q.detach(), k, v, backend="triton")
    with pytest.raises(BackendUnsupportedError, match="gradient of a gradient"):
        torch.autograd.grad(pull(do).k.sum(), do)


# --- transformations ---------------------------------------------------------------------------------------------


def attend(q: Any, k: Any, v: Any, log_decay: Any = None, **options: Any) -> Any:
    return hla.hla2(q, k, v, log_decay=log_decay, backend="triton", **options)


def same(found: Any, want: Any) -> None:
    """Equal but for the order of some sums over a batch."""
    found, want = ([x] if isinstance(x, torch.Tensor) else list(x) for x in (found, want))
    assert len(found) == len(want)
    for x, y in zip(found, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5 * max(1.0, float(y.abs().max()) if y.numel() else 0.0))


def test_grad() -> None:
    values = placed([*draw(5), -0.2 * torch.ones(2, 5)])
    loss = lambda *xs: attend(*xs).square().sum()  # noqa: E731
    leaves = [x.clone().requires_grad_() for x in values]
    want = torch.autograd.grad(loss(*leaves), leaves)
    with Launched() as kernels:
        found = torch.func.grad(loss, argnums=(0, 1, 2, 3))(*values)
    assert kernels["read"]
    assert all(map(torch.equal, found, want))
    out, pull = torch.func.vjp(attend, *values)
    assert all(map(torch.equal, pull(2 * out.detach()), want))
    row = torch.func.jacrev(lambda q: attend(q, *values[1:])[0, 4, :2])(values[0])
    for i in range(2):
        leaf = values[0].clone().requires_grad_()
        same(row[i], torch.autograd.grad(attend(leaf, *values[1:])[0, 4, i], leaf)[0])


IN_DIMS = {
    "all": (0, 0, 0, 0),
    "anywhere": (1, 2, -1, -1),
    "queries": (0, None, None, None),
    "keys and gates": (None, -3, None, 1),
    "values": (None, None, 1, None),
}


@pytest.mark.parametrize("dims", IN_DIMS)
def test_vmap(dims: str) -> None:
    """One more batch axis, of the inputs that have it; and of gradients."""
    axes = IN_DIMS[dims]
    one = placed([*draw(5), -0.2 * torch.ones(2, 5)])
    other = [x if axis is None else 0.7 * x for x, axis in zip(one, axes, strict=True)]
    given = [x if a is None else torch.stack([x, y], a) for x, y, a in zip(one, other, axes, strict=True)]
    with Launched() as kernels:
        found = torch.func.vmap(attend, in_dims=axes)(*given)
    assert 1 <= kernels["read"] <= 2
    same(found, torch.stack([attend(*one), attend(*other)]))
    gradient = torch.func.grad(lambda *xs: attend(*xs).square().sum(), argnums=(0, 1, 2, 3))
    want = [torch.stack(x) for x in zip(gradient(*one), gradient(*other), strict=True)]
    same(torch.func.vmap(gradient, in_dims=axes)(*given), want)


def masked(q: Any, k: Any, v: Any, mask: Any, scale: Any) -> Any:
    return [attend(q, k, v, token_mask=mask, scale=scale)]


def stateful(q: Any, k: Any, v: Any, state: Any) -> Any:
    out, last = attend(q, k, v, decay=0.9, initial_state=state, return_state=True)
    return [out, *last]


OFFSETS = placed(torch.tensor([0, 2, 2, 5]))


def in_sequences(q: Any, k: Any, v: Any, state: Any) -> Any:
    out, last = attend(q, k, v, cu_seqlens=OFFSETS, initial_state=state, return_state=True)
    return [out, *last]


MAPPED: dict[str, tuple[Any, Any, tuple[int, ...]]] = {
    "masks and scales": (masked, lambda q: placed([torch.rand(2, 2, 5) < 0.7, torch.tensor([0.3, -2.0])]), (0, 1, 4)),
    "states": (stateful, lambda q: [initial("hla2", {}, q, (2, 2), d=5, dv=7)], (0, 2, 3)),
    "a state for each sequence": (in_sequences, lambda q: [initial("hla2", {}, q, (2, 3, 2), d=5, dv=7)], (0, 2, 3)),
}


@pytest.mark.parametrize("options", MAPPED)
def test_vmap_of_options(options: str) -> None:
    """Over what else a call is given; states are returned, and gradients mapped."""
    function, make, places = MAPPED[options]
    (q, _, v), (_, k, _) = draw(5, batch=(2, 2)), draw(5)
    given, axes = (q, k, v, *make(q)), (0, None, 0, *(0 for _ in make(q)))
    pick = lambda x, i: type(x)(*(y[i] for y in x)) if isinstance(x, tuple) else x[i]  # noqa: E731
    singles = [[x if a is None else pick(x, i) for x, a in zip(given, axes, strict=True)] for i in range(2)]
    stacked = lambda results: [torch.stack(x) for x in zip(*results, strict=True)]  # noqa: E731
    same(torch.func.vmap(function, in_dims=axes)(*given), stacked(function(*one) for one in singles))

    def gradients(*xs: Any) -> list[Any]:
        found = torch.func.grad(lambda *ys: sum(y.square().sum() for y in function(*ys)), argnums=places)(*xs)
        return [y for x in found for y in (x if isinstance(x, tuple) else (x,))]

    same(torch.func.vmap(gradients, in_dims=axes)(*given), stacked(gradients(*one) for one in singles))


def test_vmap_of_vmap() -> None:
    """Two more batch axes, the inner one in front of the outer one in memory."""
    q, k, v = (draw(5, batch=batch)[i] for i, batch in enumerate(((3, 2, 1), (2, 1), (3, 1))))
    inner = torch.func.vmap(attend, in_dims=(0, None, 0))
    found = torch.func.vmap(inner, in_dims=(1, 0, None))(q, k, v)
    same(found, torch.stack([torch.stack([attend(q[j, i], k[i], v[j]) for j in range(3)]) for i in range(2)]))


def test_vmap_of_recurrent_form() -> None:
    q, k, v = draw(3, batch=(3, 2))
    function = lambda q, k, v: attend(q, k, v, form="recurrent", decay=0.9)  # noqa: E731
    with Launched() as kernels:
        found = torch.func.vmap(function, in_dims=(0, None, 0))(q, k[0], v)
    assert kernels == {"token": 1}
    same(found, torch.stack([function(q[i], k[0], v[i]) for i in range(3)]))


def refused(run: Callable[[], Any], words: str) -> None:
    with pytest.raises(BackendUnsupportedError, match=words):
        run()


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("form", FORMS)
def test_what_is_refused(form: str) -> None:
    """Forward mode, and gradients of gradients: by name, and never by leaving them out."""
    q, k, v = draw(5)
    run = lambda q: hla.hla2(q, k, v, form=form, backend="triton")  # noqa: E731
    refused(lambda: torch.func.jvp(run, (q,), (q,)), "forward-mode derivative")
    refused(lambda: torch.func.jacfwd(run)(q), "forward-mode derivative")
    refused(lambda: torch.func.hessian(lambda q: run(q).sum())(q), "forward-mode derivative")
    with forward_ad.dual_level():
        refused(lambda: run(forward_ad.make_dual(q, q)), "forward-mode derivative")
    gradient = torch.func.grad(lambda q: run(q).square().sum())
    refused(lambda: torch.func.grad(lambda q: gradient(q).sum())(q), "gradient of a gradient")
    refused(lambda: torch.func.jvp(gradient, (q,), (q,)), "forward-mode derivative")
    leaf = q.clone().requires_grad_()
    first = torch.autograd.grad(run(leaf).square().sum(), leaf, create_graph=True)[0]
    refused(lambda: first.sum().backward(), "gradient of a gradient")
    out = run(leaf)
    with pytest.raises(NotImplementedError):
        torch.autograd.grad(out, leaf, torch.stack([out, out]).detach(), is_grads_batched=True)


# --- programs ----------------------------------------------------------------------------------------------------


@pytest.fixture
def afresh() -> Iterator[None]:
    """No program of another test is used again."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def with_gradients(function: Any, inputs: list[Any]) -> list[Any]:
    """Results, and the gradients of a mixture of them."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    found = function(*leaves)
    found = [found] if isinstance(found, torch.Tensor) else list(found)
    return [*(x.detach() for x in found), *torch.autograd.grad(found, leaves, cotangents(found))]


PROGRAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("hla2", {}),
    "state": ("ahla", {"return_state": True, "normalize": True, "eps": 40.0}),
    "packed": ("hla3", {"cu_seqlens": OFFSETS, "return_state": True}),
    "masked": ("linear_attention", placed({"token_mask": torch.arange(5) != 3, "segment_ids": torch.arange(5) // 4})),
    "behind": ("hla2", {"axis": -3, "ridge": 0.5, "definition": "as_printed"}),
    "token by token": ("hla2", {"form": "recurrent"}),
}


def program_of(name: str) -> tuple[Any, list[Any]]:
    """A function of q, k, v and decays, and these."""
    operator, options = PROGRAMS[name]
    inputs = placed([*draw(5), torch.tensor([0.9, 0.7])])
    if options.get("axis") == -3:
        inputs[:3] = (x.movedim(-2, -3) for x in inputs[:3])

    def function(q: Any, k: Any, v: Any, decay: Any) -> Any:
        found = getattr(hla, operator)(q, k, v, decay=decay, backend="triton", **options)
        return (found[0], *found[1]) if isinstance(found, tuple) else found

    return function, inputs


COMPILED = [(name, "aot_eager") for name in PROGRAMS]
COMPILED += [(name, "eager") for name in ("plain", "packed")]


@pytest.mark.parametrize(("name", "compiler"), COMPILED)
def test_compiled(name: str, compiler: str, afresh: None) -> None:
    """Values and gradients of the eager call, from the kernels."""
    function, inputs = program_of(name)
    want = with_gradients(function, inputs)
    chosen.clear()
    with Launched() as kernels:
        found = with_gradients(torch.compile(function, fullgraph=True, backend=compiler), inputs)
    assert {name for name, _ in chosen} == {"triton"}
    assert kernels["read"]
    same(found, want)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_compiled_step(compiler: str, afresh: None) -> None:
    q, k, v = (x[:, 0] for x in draw(1))
    state = initial("hla2", {}, q, (2,), d=5, dv=7)

    def step(q: Any, k: Any, v: Any, *fields: Any) -> Any:
        out, last = hla.step(type(state)(*fields), q, k, v, decay=0.9, backend="triton")
        return (out, *last)

    with Launched() as kernels:
        found = torch.compile(step, fullgraph=True, backend=compiler)(q, k, v, *state)
    assert kernels["token"]
    same(found, step(q, k, v, *state))


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_compiled_transformations(compiler: str, afresh: None) -> None:
    q, k, v = draw(5)
    gradient = torch.func.grad(lambda q: attend(q, k, v).square().sum())
    mapped = torch.func.vmap(lambda q: attend(q, k[0], v[0]))
    for function in (gradient, mapped):
        with Launched() as kernels:
            found = torch.compile(function, fullgraph=True, backend=compiler)(q)
        assert kernels["read"]
        same(found, function(q))
        torch._dynamo.reset()


class Module(torch.nn.Module):
    def forward(self, q: Any, k: Any, v: Any) -> Any:
        out, state = hla.hla2(q, k, v, decay=0.9, return_state=True, backend="triton")
        return (out, *state)


def test_exported() -> None:
    """One node of the program, at any length."""
    length = torch.export.Dim("length", min=2, max=64)
    shapes = {n: {1: length} for n in "qkv"}
    program = torch.export.export(Module(), tuple(draw(5)), dynamic_shapes=shapes)
    assert sum("hla" in str(node.target) for node in program.graph.nodes if node.op == "call_function") == 1
    for length in (5, 17):
        chosen.clear()
        with Launched() as kernels:
            found = program.module()(*draw(length))
        assert chosen == [("triton", False)]
        assert kernels["read"] == 1
        assert all(map(torch.equal, found, Module()(*draw(length))))


@pytest.mark.parametrize("name", ["plain", "packed"])
def test_opcheck(name: str, afresh: None) -> None:
    """The operations that stand for a call and its gradient in a program."""
    function, inputs = program_of(name)
    seen: list[Any] = []

    def keep(graph: Any, examples: Any) -> Any:
        class Keep(torch.fx.Interpreter):
            def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
                if "hla" in str(target):
                    seen.append(args)
                return super().call_function(target, args, kwargs)

        return Keep(graph).run

    torch.compile(function, fullgraph=True, backend=keep)(*(x.requires_grad_() for x in inputs))
    ((values, how),) = seen
    assert "triton" in how
    torch.library.opcheck(torch.ops.hla.operator, (values, how))
    results = torch.ops.hla.operator(values, how)
    plain = [x.detach() for x in values]
    torch.library.opcheck(torch.ops.hla.gradient, (plain, [torch.randn_like(x) for x in results], how))


@pytest.mark.parametrize("name", PROGRAMS)
def test_shapes_without_values(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake tensors: the shapes and dtypes of the real call and of its gradient, and no launch."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    if name == "packed":
        return  # offsets are values
    function, inputs = program_of(name)
    want = with_gradients(function, inputs)

    def raises(*_: Any, **__: Any) -> None:
        raise AssertionError("a launch on fake tensors")

    kernels = (engine.CHAIN, engine.READ, engine.RATE, engine.CLOCK, engine.CARRY, engine.TOKEN)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        leaves = [mode.from_tensor(x.detach()).requires_grad_() for x in inputs]
        for kernel in kernels:
            monkeypatch.setattr(kernel.function, "run", raises)
        found = function(*leaves)
        found = [found] if isinstance(found, torch.Tensor) else list(found)
        found += torch.autograd.grad(found, leaves, [torch.ones_like(x) for x in found])
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in want]


# --- threads -----------------------------------------------------------------------------------------------------


def test_threads() -> None:
    """Calls and gradients at once, each with its own numbers."""
    cases = [(name, form) for name in ("hla2", "ahla") for form in FORMS]
    found: dict[int, Any] = {}
    faults: list[BaseException] = []

    def work(i: int) -> Any:
        name, form = cases[i]
        leaves = [(x * (i + 1)).requires_grad_() for x in draw(SHORT[form])]
        out = getattr(hla, name)(*leaves, decay=0.9, form=form, backend="triton")
        return [out, *torch.autograd.grad(out.sum(), leaves)]

    def beside(i: int) -> None:
        try:
            found[i] = work(i)
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=beside, args=(i,)) for i in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    for i in range(len(cases)):
        assert all(map(torch.equal, found[i], work(i)))
    assert launch.counts["token"]

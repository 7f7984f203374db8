"""Calls of backend "triton" in Triton's interpreter: watched while they run, and judged in float64.

Importing this skips a module of tests unless TRITON_INTERPRET=1 was set before triton was imported. With
HLA_TEST_DEVICE, "cuda" for example, the same tests run on that device, without the guards of the interpreter's memory:
all that a call is given lies there, and what it returns is judged on the CPU.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs triton", allow_module_level=True)

from hla.backends.triton import launch

if os.environ.get("HLA_TEST_DEVICE", "cpu") == "cpu" and not launch.interpreting():
    pytest.skip("of TRITON_INTERPRET=1, set before triton is imported", allow_module_level=True)

import triton.language as tl
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter as machine

import hla
from hla.backends import registered, selection
from hla.backends.triton.selftest import selftest
from hla.states import is_mass, is_state
from hla.testing import error_budget, per_token_error
from hla.testing.budgets import FIRST_ROWS, UNIT_ROUNDOFF
from samples import OPERATORS as SAMPLES
from triton_bounds import checked, nan_filled

NAMED = os.environ.get("HLA_TEST_DEVICE")
"""The device that was asked for; without one the tests are the interpreter's."""
DEVICE = torch.device(NAMED or "cpu")
INTERPRETED = pytest.mark.skipif(NAMED is not None, reason="of the interpreter alone")
"""For tests that are about the interpreter."""
if NAMED is not None:  # Triton's default, which it warns of where nobody says it; and here warnings are errors
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
OPERATORS = {**SAMPLES, "order 5": ("higher_order", {"order": 5})}
"""By the names of `samples`, and one order more."""
CHUNKWISE, RECURRENT = {"clock", "chain", "carry", "read", "rate"}, {"token"}
"""The kernels of each form."""

# --- places ------------------------------------------------------------------------------------------------------


def placed(x: Any, device: torch.device = DEVICE) -> Any:
    """Tensors on a device, that of the tests unless another is given; in lists, tuples, states and dictionaries too."""
    if isinstance(x, torch.Tensor):
        return x.to(device)
    if isinstance(x, dict):
        return {name: placed(value, device) for name, value in x.items()}
    if is_state(x):
        return type(x)(*(placed(field, device) for field in x))
    return type(x)(placed(one, device) for one in x) if type(x) in (list, tuple) else x


def fetched(x: Any) -> Any:
    """On the CPU, where results are judged."""
    return placed(x, torch.device("cpu"))


# --- watching ----------------------------------------------------------------------------------------------------

SUMS = frozenset(
    (
        *("mm", "bmm", "addmm", "addbmm", "baddbmm", "mv", "addmv", "dot", "vdot", "addr", "ger", "outer", "inner"),
        *("linear", "matmul", "einsum", "tensordot", "linalg_vecdot", "convolution", "addcmul", "addcmul_"),
        *("cumsum", "cumsum_", "cumprod", "cumprod_", "logcumsumexp", "cumulative_trapezoid"),
        *("scaled_dot_product_attention", "_scaled_dot_product_flash_attention_for_cpu"),
    )
)
"""Operations of PyTorch that multiply and add up, or add up along an axis, whatever function calls them."""


class KernelsOnly(TorchDispatchMode):
    """Arithmetic over tokens is the kernels': what else multiplies and adds up raises."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in SUMS:
            raise AssertionError(f"torch.{name} while the backend runs")
        return func(*args, **(kwargs or {}))


chosen: list[tuple[str, bool]] = []
"""Backends in the order in which calls chose them, and whether for a gradient."""


@pytest.fixture(autouse=True)
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Memory is guarded, choices are noted, and what the backend computes it computes in kernels."""
    choose = selection.resolve

    def resolve(call: Any, argument: Any, gradient: bool = False) -> Any:
        found = choose(call, argument, gradient)
        chosen.append((found.spec.name, gradient))
        return found

    def in_kernels(compute: Any) -> Any:
        @functools.wraps(compute)
        def guarded(*arguments: Any, **keywords: Any) -> Any:
            with KernelsOnly():
                return compute(*arguments, **keywords)

        return guarded

    with contextlib.ExitStack() as guards:
        if NAMED is None:
            guards.enter_context(checked())
            guards.enter_context(nan_filled())
        if launch.interpreting():
            monkeypatch.setattr(machine, "_patch_lang", once_a_launch(machine._patch_lang))
            monkeypatch.setattr(machine, "_get_np_dtype", once_a_name(machine._get_np_dtype))
        verdict = selftest(str(placed(torch.zeros(())).device))  # now, or a test would count its launches
        assert verdict.ok, verdict.reason
        registered()["triton"].runner("hla2")
        monkeypatch.setattr(selection, "resolve", resolve)
        own = [x for name, x in sys.modules.items() if name.startswith("hla.backends.triton.")]
        for owner, name in itertools.product(own, ("compute", "differentiate")):
            if hasattr(owner, name):
                monkeypatch.setattr(owner, name, in_kernels(getattr(owner, name)))
        chosen.clear()
        yield


def once_a_launch(patch: Any) -> Any:
    """The interpreter puts functions of its own in Triton's place, and again whenever a kernel calls a function.

    That is half of its time, and once is enough.
    """
    done: set[int] = set()

    @functools.cache
    def languages(function: Any) -> frozenset[int]:
        return frozenset(id(x) for x in function.__globals__.values() if x is tl or x is tl.core)

    def once(function: Any) -> Any:
        needed = languages(function)
        if needed <= done:
            return machine._LangPatchScope()
        outermost = not done
        done.update(needed)
        scope = patch(function)
        if outermost:
            restore = scope.restore
            scope.restore = lambda: (done.clear(), restore())
        return scope

    return once


def once_a_name(find: Any) -> Any:
    """NumPy's dtype of one of Triton's, which the interpreter looks up in a table that it makes each time."""
    known: dict[str, Any] = {}

    def found(dtype: Any) -> Any:
        name = str(dtype)
        if name not in known:
            known[name] = find(dtype)
        return known[name]

    return found


class Launched(Counter[str]):
    """Kernels that were launched in a block, by name."""

    def __enter__(self) -> Launched:
        self._before = Counter(launch.counts)
        return self

    def __exit__(self, *_: object) -> None:
        self.update(Counter(launch.counts) - self._before)


def run(operator: str, q: Any, k: Any, v: Any, *, form: str = "chunkwise", **options: Any) -> Any:
    """A call that backend "triton" answers, in that form, with that form's kernels."""
    (q, k, v), options = placed((q, k, v)), placed(options)
    del chosen[:]
    with Launched() as kernels:
        found = getattr(hla, operator)(q, k, v, form=form, backend="triton", **options)
    assert chosen == [("triton", False)]
    if form == "auto":
        form = hla.explain(operator, q, k, v, backend="triton", **options).form
    output = found[0] if isinstance(found, tuple) else found
    assert set(kernels) <= (RECURRENT if form == "recurrent" else CHUNKWISE)
    assert bool(kernels) == (output.numel() > 0)
    return found


def pulled(results: list[Any], inputs: list[Any], cotangents: list[Any]) -> list[Any]:
    """Gradients of results, which kernels made."""
    with Launched() as kernels:
        found = torch.autograd.grad(results, inputs, cotangents, allow_unused=True)
    assert set(kernels) <= CHUNKWISE
    assert kernels["read"] or kernels["chain"]
    return list(found)


def judge(operator: str, q: Any, k: Any, v: Any, *, form: str = "parallel", **options: Any) -> Any:
    """The same in float64 by backend "torch": dense sums, unless another form is asked for."""
    assert all((x.dtype, x.device.type) == (torch.float64, "cpu") for x in (q, k, v))
    del chosen[:]
    found = getattr(hla, operator)(q, k, v, form=form, backend="torch", **options)
    assert chosen == [("torch", False)]
    return found


# --- how far off -------------------------------------------------------------------------------------------------


def budget(
    operator: str,
    q: Any,
    k: Any,
    v: Any,
    *,
    axis: int = -2,
    order: int | None = None,
    definition: str = "exact",
    normalize: bool = False,
    gradient: bool = False,
    **_: Any,
) -> float:
    """How far off a result of this call may be.

    bfloat16 and float16 inputs are multiplied with operands rounded to 8 and to 11 bits (TF32's; the interpreter
    multiplies float32 there, so that this is a bound), if all three have that dtype; the derivation is in
    `hla.testing.budgets`.
    """
    kinds = {name_of(x.dtype) for x in (q, k, v)}
    rounded = len(kinds) == 1 and kinds < {"bfloat16", "float16"}
    return error_budget(
        operator,
        name_of(v.dtype),
        v.shape[axis],
        q.shape[-1],
        dv=v.shape[-1],
        order=order,
        definition=definition,
        normalize=normalize,
        gradient=gradient,
        products=name_of(v.dtype) if rounded else None,
    )


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def tokens(got: Any, want: Any, allowed: float, label: str = "", *, backwards: bool = False, cut: Any = None) -> None:
    """Rows over time, (*batch, T, ·): each within its budget. `backwards`: they grow from the last to the first."""
    assert got.shape == want.shape, f"{label}: {tuple(got.shape)}, not {tuple(want.shape)}"
    got, want = fetched((got.detach().double(), want.detach().double()))
    if backwards:
        got, want = got.flip(-2), want.flip(-2)
        cut = None if cut is None else (cut[-1] - cut).flip(0)
    error = per_token_error(got, want, cu_seqlens=cut)
    assert error <= allowed, f"{label}: error {error:.2e}, allowed {allowed:.2e}"


def entries(got: Any, want: Any, allowed: float, label: str = "", *, axes: int = 2, sizes: Any = None) -> None:
    """All numbers of each batch entry, relative to the largest of them or of `sizes`; exact where that is 0."""
    assert got.shape == want.shape, f"{label}: {tuple(got.shape)}, not {tuple(want.shape)}"
    if not want.numel():
        return
    got, want = fetched((got, want))
    off, size = (got.detach().double() - want.detach()).abs(), (want if sizes is None else sizes).detach().abs()
    if axes:
        off, size = (x.amax(tuple(range(-axes, 0))) for x in (off, size))
    error = torch.where(off == 0, off, off / size)
    assert bool((error <= allowed).all()), f"{label}: error {float(error.max()):.2e}, allowed {allowed:.2e}"


# --- a call and its judge ----------------------------------------------------------------------------------------

Tensors = dict[str, Any]
Lay = Callable[[Any, Any, Any], tuple[Any, ...]]


def as_they_are(q: Any, k: Any, v: Any) -> tuple[Any, ...]:
    return q, k, v


def taken_apart(q: Any, k: Any, v: Any, options: dict[str, Any]) -> tuple[Tensors, dict[str, Any]]:
    """The tensors of a call that have gradients, by name, and what else it has."""
    found: Tensors = {"q": q, "k": k, "v": v}
    rest: dict[str, Any] = {}
    for name, x in options.items():
        if is_state(x):
            found |= {f"{name}.{i}": field for i, field in enumerate(x)}
            rest[name] = type(x)
        elif isinstance(x, torch.Tensor) and x.is_floating_point():
            found[name] = x
        else:
            rest[name] = x
    return found, rest


def put_together(values: Tensors, rest: dict[str, Any], lay: Lay) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """q, k, v and options."""
    options = dict(rest)
    for name, x in values.items():
        if name not in "qkv" and "." not in name:
            options[name] = x
    if isinstance(rest.get("initial_state"), type):
        fields = (x for name, x in values.items() if name.startswith("initial_state."))
        options["initial_state"] = rest["initial_state"](*fields)
    return lay(*(values[n] for n in "qkv")), options


def flat(found: Any) -> list[Any]:
    """Output and fields of the state."""
    return [found[0], *found[1]] if isinstance(found, tuple) else [found]


def cotangents(results: list[Any]) -> list[Any]:
    """The same numbers for the same shapes, in any dtype: bfloat16 holds them."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(x.shape, generator=generator).bfloat16().to(x.device, x.dtype) for x in results]


def check(
    operator: str,
    q: Any,
    k: Any,
    v: Any,
    *,
    form: str = "chunkwise",
    gradient: bool = False,
    spoil: bool = False,
    lay: Lay = as_they_are,
    through: Callable[[list[Any]], list[Any]] = list,
    judge_form: str = "parallel",
    **options: Any,
) -> Any:
    """A call, judged: output, final states and, with `gradient`, the gradients through all of them, or through those
    that `through` takes.

    `spoil`: NaN at tokens that are skipped. `lay`: from the tensors that have gradients to q, k and v.
    """
    values, rest = map(placed, taken_apart(q, k, v, options))
    own = spoilt(values, rest) if spoil else values
    own = {n: x.detach().requires_grad_(gradient) for n, x in own.items()}
    inputs, given = put_together(own, rest, lay)
    found = run(operator, *inputs, form=form, **given)
    allowed = budget(operator, *inputs, **rest)

    values, rest = fetched(values), fetched(rest)
    exact = {n: x.detach().double().requires_grad_(gradient) for n, x in values.items()}
    leaves = dict(exact)
    length = inputs[2].shape[rest.get("axis", -2)]
    if gradient and "decay" in leaves:  # per token, so that the terms of its gradient are known
        decay = leaves.pop("decay").detach()
        leaves["log_decay"] = decay.log()[..., None].repeat(*(1,) * decay.ndim, length).requires_grad_()
    arguments, given = put_together(leaves, rest, lay)
    given.pop("chunk_size", None)
    want = judge(operator, *arguments, form=judge_form, **given)
    check_results(found, want, allowed, **rest)
    if not gradient:
        return found

    some, wanted = through(flat(found)), through(flat(want))
    made = dict(zip(own, pulled(some, list(own.values()), cotangents(some)), strict=True))
    right = torch.autograd.grad(wanted, list(leaves.values()), cotangents(wanted), allow_unused=True)
    sizes: Tensors = {}
    by_name = dict(zip(leaves, right, strict=True))
    if "decay" in exact:
        each = by_name.pop("log_decay")
        if each is not None:
            each = each / exact["decay"].detach()[..., None]
            by_name["decay"], sizes["decay"] = each.sum(-1), each.abs().sum(-1)
    if by_name.get("scale") is not None:
        sizes["scale"] = (exact["q"] * by_name["q"]).abs().sum() / exact["scale"].abs()
    check_gradients(own, made, by_name, budget(operator, *inputs, gradient=True, **rest), sizes, **rest)
    return found


def spoilt(values: Tensors, rest: dict[str, Any]) -> Tensors:
    """NaN in q, k, v and log-decays where the mask skips a token of all that they are broadcast to."""
    hidden = ~rest["token_mask"]
    rows = hidden[..., None].movedim(-2, rest.get("axis", -2))
    found = dict(values)
    for name, where in (("q", rows), ("k", rows), ("v", rows), ("log_decay", hidden)):
        x = values.get(name)
        if x is not None and torch.broadcast_shapes(x.shape[:-1], where.shape[:-1]) == x.shape[:-1]:
            found[name] = torch.where(where, torch.nan, x)
    return found


def offsets_of(options: dict[str, Any]) -> Any:
    """Borders of packed sequences, where these are the same for all and long enough to have scales of their own."""
    offsets, ids = options.get("cu_seqlens"), options.get("segment_ids")
    if ids is not None and ids.ndim == 1:
        offsets = torch.cat([torch.tensor([0]), 1 + (ids[1:] != ids[:-1]).nonzero()[:, 0], torch.tensor([len(ids)])])
    if offsets is None:
        return None
    lengths = offsets.diff()
    return offsets if bool(((lengths == 0) | (lengths >= FIRST_ROWS)).all()) else None


def check_results(found: Any, want: Any, allowed: float, *, axis: int = -2, **options: Any) -> None:
    """Output and states."""
    output, wanted = (flat(x)[0].movedim(axis, -2) for x in (found, want))
    tokens(output, wanted, allowed, "output", cut=offsets_of(options))
    if isinstance(want, tuple):
        assert type(found[1]) is type(want[1])
        for symbol, x, y in zip(want[1].symbols, found[1], want[1], strict=True):
            assert x.dtype == torch.float32
            entries(x, y, allowed, f"state {symbol}", axes=1 if is_mass(symbol) else 2)


def check_gradients(
    inputs: Tensors, made: Tensors, right: Tensors, allowed: float, sizes: Tensors, *, axis: int = -2, **options: Any
) -> None:
    """All gradients, each in its input's dtype. Those of k and v grow from the last token to the first."""
    for name, want in right.items():
        like = fetched(inputs[name].detach())
        got = torch.zeros_like(like) if made[name] is None else fetched(made[name])
        want = torch.zeros_like(like) if want is None else want
        assert got.dtype == like.dtype
        label, own = f"gradient of {name}", allowed + UNIT_ROUNDOFF[name_of(got.dtype)]  # it has a dtype of its own
        if name in "qkv":
            got, want = got.movedim(axis, -2), want.movedim(axis, -2)
            tokens(got, want, own, label, backwards=name != "q", cut=offsets_of(options))
        elif name == "log_decay":
            assert not got[like == -torch.inf].any()
            entries(got, want, own, label, axes=1)
        else:
            entries(got, want, own, label, axes=0 if name in sizes else min(2, want.ndim), sizes=sizes.get(name))


def draw(length: int, *, batch: tuple[int, ...] = (2,), d: int = 5, dv: int = 7, dtype: Any = torch.float32) -> Any:
    """q, k and v of unit variance."""
    generator = torch.Generator().manual_seed(41)
    return [placed(torch.randn(*batch, length, n, generator=generator).to(dtype)) for n in (d, d, dv)]


def initial(operator: str, options: dict[str, Any], like: Any, batch: tuple[int, ...], **sizes: Any) -> Any:
    """A state to start from, of numbers like those of a few tokens."""
    fixing = {n: options[n] for n in ("mask", "definition", "order", "normalize", "ridge") if n in options}
    zeros = hla.init_state(operator, batch=batch, like=fetched(like).float(), **sizes, **fixing)
    generator = torch.Generator().manual_seed(43)
    fields = []
    for x, symbol in zip(zeros, zeros.symbols, strict=True):
        x = torch.randn(x.shape, generator=generator)
        x = x.abs() if options.get("normalize") else x  # denominators far from 0
        fields.append(x + x.mT if symbol in hla.states.SYMMETRIC else x)
    return placed(type(zeros)(*fields))

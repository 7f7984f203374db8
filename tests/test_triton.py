"""Backend "triton" in Triton's interpreter: values and states, of every option, layout, size and dtype.

The judges are the definition (`tests/oracle.py`), and backend "torch" in float64, as dense sums.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import budget as absolute
import hla
import libraries

torch: Any = libraries.only("torch")
pytest.importorskip("triton")

from hla.backends import selection  # noqa: E402
from hla.backends.staged import backward, execution, forward, operations  # noqa: E402
from hla.backends.staged.engine import Arithmetic  # noqa: E402
from hla.backends.triton import engine, launch, selftest  # noqa: E402
from hla.cli import main  # noqa: E402
from hla.errors import BackendUnsupportedError  # noqa: E402
from hla.testing import placements, plan_checks  # noqa: E402
from triton_options import Case, build, in_pairs, names  # noqa: E402
from triton_runs import (  # noqa: E402, F401
    DEVICE,
    INTERPRETED,
    OPERATORS,
    KernelsOnly,
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
    placed,
    run,
    tokens,
    watched,
)

FORMS = ("chunkwise", "recurrent")
SHORT = {"chunkwise": 19, "recurrent": 7}
"""Tokens: two chunks, the second one not full; or as few as make a point."""
FEW = ("linear_attention", "hla2", "ahla", "hla3")


@pytest.fixture
def launches() -> Iterator[list[launch.Launch]]:
    """Every launch of a test, as it was asked for."""
    seen: list[launch.Launch] = []
    note = seen.append
    launch.watchers.append(note)
    yield seen
    launch.watchers.remove(note)


def gates(kind: str, length: int) -> dict[str, Any]:
    """Options of decay for two heads."""
    generator = torch.Generator().manual_seed(47)
    if kind == "none":
        return {}
    if kind == "number":
        return {"decay": 0.83}
    if kind == "heads":
        return {"decay": placed(torch.tensor([0.9, 0.3]))}
    found = -0.4 * torch.rand(2, length, generator=generator)
    found[0, 3] = found[1, length - 2] = -torch.inf
    return {"log_decay": placed(found)}


# --- the definition ----------------------------------------------------------------------------------------------

MASKS = [(name, "causal") for name in OPERATORS if name != "hla2 prefix"]
MASKS += [(name, "prefix") for name in ("linear_attention", "hla2", "ahla", "hla3")]
MASKS += [(name, "none") for name in ("linear_attention", "hla2", "ahla", "hla3", "order 4", "order 5")]
DEFINITIONS = [
    (name, mask, gate, form)
    for (name, mask), gate, form in itertools.product(MASKS, ("none", "number", "heads", "log_decay"), FORMS)
    if mask != "none" or (gate == "none" and form == "chunkwise")
]


@pytest.mark.parametrize(("name", "mask", "gate", "form"), DEFINITIONS)
def test_definition(name: str, mask: str, gate: str, form: str) -> None:
    """Sums of the definition itself; hla2 with its ridge."""
    operator, own = OPERATORS[name]
    length = SHORT[form]
    q, k, v = draw(length)
    options = {**own, **gates(gate, length), "mask": mask, "scale": 0.61}
    plain = {n: x for n, x in options.items() if n not in ("decay", "log_decay")}
    if "decay" in options:
        plain["log_decay"] = np.log(np.broadcast_to(np.asarray(fetched(options["decay"])), (2,)))[:, None]
    elif "log_decay" in options:
        plain["log_decay"] = fetched(options["log_decay"]).double().numpy()
    want = absolute.expected(operator, *(fetched(x).double().numpy() for x in (q, k, v)), **plain)
    found = run(operator, q, k, v, form=form, **options)
    tokens(found, torch.tensor(want.value), budget(operator, q, k, v, **options), name)


RECURRENT = in_pairs(form=("recurrent",), length=(7,))


@pytest.mark.parametrize("case", RECURRENT, ids=names(RECURRENT))
def test_recurrent_options(case: Case) -> None:
    """Values and states token after token; those of chunks are in `tests/test_triton_gradients.py`."""
    operator, inputs, options = build(case)
    check(operator, *inputs, form="recurrent", spoil=case["tokens"] == "masked", **options)


# --- lengths, chunks and sizes -----------------------------------------------------------------------------------

LENGTHS = (0, 1, 15, 16, 17, 33, 67)


@pytest.mark.parametrize(("chunk", "tokens_a_chunk"), [(1, 16), (16, 16), (24, 16), (64, 32), (None, 32)])
@pytest.mark.parametrize("length", LENGTHS)
def test_lengths(length: int, chunk: int | None, tokens_a_chunk: int, launches: Any) -> None:
    """Any T with any chunk size, which is what was asked for as far as the tiles go."""
    q, k, v = draw(length, batch=())
    name = FEW[(length + tokens_a_chunk // 16) % 4]
    check(name, q, k, v, chunk_size=chunk, decay=0.95, return_state=True)
    chains = [x for x in launches if x.kernel == "chain"]
    assert bool(chains) == (length > 0)
    assert all(
        (x.arguments["C"], x.arguments["count"]) == (tokens_a_chunk, -(-length // tokens_a_chunk)) for x in chains
    )


@pytest.mark.parametrize("length", [0, 1, 2, 17])
@pytest.mark.parametrize("name", FEW)
def test_lengths_in_recurrent_form(length: int, name: str) -> None:
    check(name, *draw(length, batch=()), form="recurrent", decay=0.95, return_state=True)


@pytest.mark.parametrize("length", [0, 1, 5])
def test_automatic_form(length: int) -> None:
    """Recurrent for one token, else chunkwise."""
    q, k, v = draw(length, batch=())
    with Launched() as kernels:
        run("hla2", q, k, v, form="auto")
    assert set(kernels) == {0: set(), 1: {"token"}, 5: {"chain", "read"}}[length]


@pytest.mark.parametrize(("d", "dv"), [(1, 1), (1, 7), (2, 3), (13, 11), (60, 17), (100, 1), (7, 100), (60, 100)])
@pytest.mark.parametrize("form", FORMS)
def test_widths(d: int, dv: int, form: str) -> None:
    """Powers of two or not, less than a tile or more."""
    for name in ("hla2", "ahla"):
        length = 19 if form == "chunkwise" else 3
        check(name, *draw(length, batch=(), d=d, dv=dv), form=form, decay=0.9, scale=d**-0.5, return_state=True)


def test_the_widest() -> None:
    """Ranges of a program's own tiles, in blocks of columns and of rows."""
    for d, dv in ((256, 3), (3, 256)):
        check("hla2", *draw(17, batch=(), d=d, dv=dv), scale=d**-0.5, return_state=True)
        check("hla2", *draw(2, batch=(), d=d, dv=dv), scale=d**-0.5, return_state=True, form="recurrent")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scale", [0.0, -1.7, 3])
def test_scales(scale: float, form: str) -> None:
    """As a number and as a tensor; 0 among them."""
    q, k, v = draw(19 if form == "chunkwise" else 3)
    for name in ("hla2", "hla3"):
        for given in (scale, torch.tensor(float(scale)), torch.tensor(float(scale), dtype=torch.float64)):
            found = run(name, q, k, v, form=form, scale=given)
            want = absolute.expected(name, *(fetched(x).double().numpy() for x in (q, k, v)), scale=float(scale))
            tokens(found, torch.tensor(want.value), budget(name, q, k, v), name)


@pytest.mark.parametrize("decay", [1.0, 0.2, 0.01, 1e-12, 1e-60])
@pytest.mark.parametrize("name", ["linear_attention", "hla2", "hla3", "hla3 printed"])
def test_strong_decay(name: str, decay: float) -> None:
    """γ to the power of a chunk's length, and its inverse, are beyond float32; chunks are not full."""
    operator, own = OPERATORS[name]
    check(operator, *draw(33), decay=decay, return_state=True, **own)
    check(operator, *draw(4), decay=decay, return_state=True, form="recurrent", **own)


@pytest.mark.parametrize("log_decay", [-3.0, -20.0, -109.0, -300.0])
@pytest.mark.parametrize("name", ["linear_attention", "hla2", "ahla", "hla3", "hla3 printed"])
def test_strong_gates(name: str, log_decay: float) -> None:
    """The same for forget gates that are no reset."""
    operator, own = OPERATORS[name]
    check(operator, *draw(20), log_decay=torch.full((20,), log_decay), return_state=True, **own)


@pytest.mark.parametrize("name", ["linear_attention", "hla2", "hla3", "hla3 printed"])
def test_digits_of_gates(name: str) -> None:
    """Log-decays whose sums over a chunk would lose digits, were they added up as they are."""
    operator, own = OPERATORS[name]
    q, k, v = draw(37)
    generator = torch.Generator().manual_seed(3)
    log_decay = -60.0 * (torch.rand(2, 37, generator=generator) < 0.2) - 1e-3 * torch.rand(2, 37, generator=generator)
    check(operator, q, k, v, log_decay=log_decay, return_state=True, **own)


# --- layouts -----------------------------------------------------------------------------------------------------


def wide(x: Any, *batch: int) -> Any:
    return x.expand(*batch, *x.shape[-2:])


def spread(x: Any) -> Any:
    """Every other element of a larger tensor, along every axis."""
    room = x.new_full([2 * n + 1 for n in x.shape], torch.nan)
    place = room[tuple(slice(1, None, 2) for _ in x.shape)]
    place.copy_(x)
    return place


LAYOUTS: dict[str, Any] = {
    "sliced and strided": lambda q, k, v: tuple(map(spread, (q, k, v))),
    "features first": lambda q, k, v: tuple(x.mT.contiguous().mT for x in (q, k, v)),
    "heads last": lambda q, k, v: tuple(x.movedim(1, -1).contiguous().movedim(-1, 1) for x in (q, k, v)),
    "behind one another": lambda q, k, v: torch.cat([q, k, v], -1).split([q.shape[-1], k.shape[-1], v.shape[-1]], -1),
    "expanded keys": lambda q, k, v: (q, wide(k[:, :1], 2, 3), wide(v[:1, :1], 2, 3)),
    "shared keys": lambda q, k, v: (q, k[:, :1], v[:, :1]),
    "keys of no batch": lambda q, k, v: (q, k[0, 0], v[0, 0]),
    "one query": lambda q, k, v: (wide(q[:1, :1], 2, 3), k, v),
    "tokens expanded": lambda q, k, v: (q, k[..., :1, :].expand_as(k), v[..., :1, :1].expand_as(v)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, form: str) -> None:
    length = 17 if form == "chunkwise" else 4
    q, k, v = LAYOUTS[layout](*draw(length, batch=(2, 3)))
    for name in ("hla2", "ahla"):
        check(name, q, k, v, form=form, decay=torch.tensor([[0.9], [0.7]]), return_state=True, chunk_size=16)


@pytest.mark.parametrize("form", FORMS)
def test_batch_axes_in_turns(form: str) -> None:
    """More batch axes than a launch has, none of which lie behind one another; with a state for each sequence too."""
    generator = torch.Generator().manual_seed(2)
    length = 18 if form == "chunkwise" else 3
    make = lambda *shape: placed(torch.randn(*shape, generator=generator))  # noqa: E731
    q, k, v = make(2, 1, 2, 1, length, 3), make(1, 2, 1, 2, length, 3), make(2, 1, 1, 1, length, 5)
    log_decay = -torch.rand(1, 2, 2, 1, length, generator=generator)
    for name in ("hla2", "ahla"):
        check(name, q, k, v, form=form, return_state=True)
        check(name, q, k, v, form=form, log_decay=log_decay, return_state=True)
        offsets = torch.tensor([0, 2, 2, length])
        found = check(name, q, k, v, form=form, cu_seqlens=offsets, decay=0.9, return_state=True)
        check(name, q, k, v, form=form, cu_seqlens=offsets, return_state=True, initial_state=found[1])


@pytest.mark.parametrize("form", FORMS)
def test_states_of_few_axes(form: str) -> None:
    """Packed, where v has batch axes that keys and queries lack: N stands before them all."""
    length = 18 if form == "chunkwise" else 5
    q, k, _ = draw(length)
    v = draw(length, batch=(3, 2))[2]
    for name, mask in (("hla2", "causal"), ("ahla", "prefix"), ("hla3", "prefix")):
        options = {"mask": mask, "cu_seqlens": torch.tensor([0, 2, 2, 4, length]), "return_state": True}
        found = check(name, q, k, v, form=form, **options)
        check(name, q, k, v, form=form, initial_state=found[1], **options)


def apart(x: Any) -> Any:
    """A copy with a gap behind every number: all strides are twice as long."""
    if isinstance(x, tuple):
        return tuple(map(apart, x))
    if not isinstance(x, torch.Tensor):
        return x
    span = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    made = x.new_empty(2 * span).as_strided(x.shape, [2 * step for step in x.stride()])
    own = tuple(slice(0, None if step else 1) for step in x.stride())
    made[own].copy_(x[own])
    return made


def each(x: Any) -> list[Any]:
    return [y for one in x for y in each(one)] if isinstance(x, tuple) else [x] * isinstance(x, torch.Tensor)


def doubled(strides: Any) -> Any:
    return tuple(map(doubled, strides)) if isinstance(strides, tuple) else 2 * strides


DENSE = ("high", "low", "era", "out", "gate", "chunks", "parts", "bounds")
"""Arguments that have no stride over time."""
STRIDES = {
    "hla2": {"chunk_size": 16},
    "ahla packed": {"chunk_size": 16, "cu_seqlens": [0, 1, 1, 17]},
    "linear_attention in parts": {"chunk_size": 16},
    "hla2 segments": {
        "chunk_size": 16,
        "segment_ids": [0] * 3 + [1] * 14,
        "token_mask": [True] * 4 + [False] + [True] * 12,
    },
    "hla2 printed": {"form": "recurrent"},
}


@pytest.mark.parametrize("case", STRIDES)
def test_kernels_honour_all_strides(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of results, which here always lie close: launches once more, on tensors that do not."""
    name = case.removesuffix(" in parts").removesuffix(" packed").removesuffix(" segments")
    if "parts" in case:
        monkeypatch.setattr(operations, "FEWEST_CHUNKS", 1)
    operator, own = OPERATORS[name]
    options = placed({n: torch.tensor(x) if isinstance(x, list) else x for n, x in STRIDES[case].items()})
    length, lead = (17 if "chunk_size" in options else 3), ((3,) if "cu_seqlens" in options else ())
    inputs = [x.requires_grad_(length > 3) for x in draw(length)]
    if "segments" not in case:
        options |= {"initial_state": initial(operator, own, inputs[0], (*lead, 2), d=5, dv=7), "return_state": True}
    options["log_decay"] = -0.3 * torch.rand(2, length, generator=torch.Generator().manual_seed(5))
    kernels = {kernel.name: kernel for kernel in KERNELS}
    seen: dict[Any, Any] = {}
    waiting: list[tuple[launch.Launch, dict[str, Any]]] = []

    def compare() -> None:
        """What lies apart, with what the launch itself has written by now."""
        for one, far in waiting:
            for key in far.keys() - set(DENSE):
                for x, y in zip(each(one.arguments[key]), each(far[key]), strict=True):
                    torch.testing.assert_close(y, x, rtol=0, atol=0, equal_nan=True, msg=f"{one.kernel}: {key}")
        waiting.clear()

    def again(one: launch.Launch) -> None:
        compare()
        kind = (one.kernel, *(x if isinstance(x, int) else x is None for x in one.arguments.values()))
        if kind in seen:
            return
        far = seen[kind] = {}
        for key, x in one.arguments.items():
            dense = key.removeprefix("s_") in DENSE or x is None
            far[key] = x if dense else doubled(x) if key.startswith("s_") else apart(x)
        options = {} if launch.interpreting() else {"num_warps": one.config.warps, "num_stages": one.config.stages}
        kernels[one.kernel].function[(one.programs,)](**far, **one.config.blocks, **options)
        waiting.append((one, far))

    launch.watchers.append(again)
    try:
        found = flat(run(operator, *inputs, **options, **own))
        if length > 3:
            torch.autograd.grad(found, inputs, cotangents(found))
        compare()
    finally:
        launch.watchers.remove(again)
    some = {"token"} if length == 3 else {"carry" if "parts" in case else "clock", "chain", "read"}
    assert {kernel for kernel, *_ in seen} >= some


def test_one_tensor_in_three_places() -> None:
    x = draw(17)[0]
    for form, name in itertools.product(FORMS, FEW):
        y = x if form == "chunkwise" else x[:, :5]
        check(name, y, y, y, form=form, decay=0.9)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("axis", [-3, 0])
def test_time_on_another_axis(axis: int, form: str) -> None:
    """Nothing is copied to get there."""
    q, k, v = (x.movedim(-2, axis).contiguous() for x in draw(SHORT[form], batch=(2, 3)))
    found = check("hla2", q, k, v, form=form, axis=axis, decay=0.9, return_state=True)
    assert found[0].shape == v.shape


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("batch", [(0,), (3, 0), (0, 2)])
def test_empty_batches(batch: tuple[int, ...], form: str) -> None:
    for name in ("hla2", "hla3 printed"):
        operator, own = OPERATORS[name]
        found = check(operator, *draw(5, batch=batch), form=form, decay=0.9, return_state=True, **own)
        assert found[0].shape == (*batch, 5, 7)


@pytest.mark.parametrize("form", FORMS)
def test_inputs_are_not_written_to(form: str) -> None:
    """Nor do results lie in their memory."""
    q, k, v = draw(SHORT[form])
    log_decay, state = gates("log_decay", SHORT[form])["log_decay"], initial("hla2", {}, q, (2,), d=5, dv=7)
    given = [q, k, v, log_decay, *state]
    before = [x.clone() for x in given]
    found = flat(run("hla2", q, k, v, form=form, log_decay=log_decay, initial_state=state, return_state=True))
    assert all(map(torch.equal, given, before))
    places = {x.untyped_storage().data_ptr() for x in given}
    assert not places & {x.untyped_storage().data_ptr() for x in found}
    for i, x in enumerate(found):
        others = [y.clone() for y in found]
        x.add_(1.0)
        assert all(torch.equal(y, z) for j, (y, z) in enumerate(zip(found, others, strict=True)) if j != i)


# --- packed sequences --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seed", range(4))
def test_packed_sequences(seed: int, form: str) -> None:
    """Random borders, empty sequences among them: each as if alone, with its own states."""
    rng = np.random.default_rng(seed)
    length = 41 if form == "chunkwise" else 9
    offsets = np.sort(rng.integers(0, length + 1, size=6))
    offsets[0], offsets[-1] = 0, length
    offsets[3] = offsets[2]
    name = FEW[seed]
    q, k, v = draw(length)
    state = initial(name, {}, q, (5, 2), d=5, dv=7)
    options = {"chunk_size": 16, "cu_seqlens": torch.tensor(offsets), "initial_state": state, "return_state": True}
    _, last = check(name, q, k, v, form=form, decay=torch.tensor([0.9, 0.7]), **options)
    for n, (a, b) in enumerate(itertools.pairwise(offsets)):
        if a == b:
            assert all(torch.equal(x[n], y[n]) for x, y in zip(last, state, strict=True))
    ids = torch.tensor(np.repeat(np.arange(5), np.diff(offsets)))
    one = run(name, q, k, v, form=form, decay=torch.tensor([0.9, 0.7]), segment_ids=ids, chunk_size=16)
    other = run(name, q, k, v, form=form, decay=torch.tensor([0.9, 0.7]), cu_seqlens=torch.tensor(offsets))
    tokens(one, other.double(), 2 * budget(name, q, k, v), cut=torch.tensor(offsets))


def test_sequences_do_not_share_scratch(launches: Any) -> None:
    """Programs of a GPU run side by side: each has its own place for what passes from line to line."""
    run("hla2", *draw(4), form="recurrent", cu_seqlens=torch.tensor([0, 1, 3, 4]), decay=0.9)
    (one,) = launches
    own = [x for x, scratch in zip(one.arguments["streams"], one.arguments["SCRATCH"], strict=True) if scratch]
    assert [x.shape for x in own] == [(2, 3, 5), (2, 3, 7)]
    for x in own:
        assert x.isfinite().all()
        assert all(not torch.equal(x[:, i], x[:, j]) for i, j in ((0, 1), (0, 2), (1, 2)))


@pytest.mark.parametrize("form", FORMS)
def test_no_sequences(form: str) -> None:
    q, k, v = draw(0)
    for offsets in ([0], [0, 0, 0]):
        out, state = check(
            "hla2", q, k, v, form=form, cu_seqlens=torch.tensor(offsets), return_state=True, judge_form="chunkwise"
        )
        assert out.shape == (2, 0, 7)
        assert state[1].shape == (len(offsets) - 1, 2, 5, 7)


def test_borders_for_each_head() -> None:
    """segment_ids that differ from head to head, with borders at a chunk's first token, and skipped tokens there."""
    ids = torch.tensor([[0] * 3 + [1] * 14 + [7] * 2, [0] * 16 + [1] * 3])
    mask = torch.ones(2, 19, dtype=torch.bool)
    mask[0, 3] = mask[1, 15] = mask[1, 0] = False
    for form, name in itertools.product(FORMS, ("hla2 printed", "hla3 printed", "ahla", "order 4")):
        operator, own = OPERATORS[name]
        length = SHORT[form]
        q, k, v = draw(length)
        options = {"segment_ids": ids[:, :length], "token_mask": mask[:, :length], "spoil": True, "form": form}
        check(operator, q, k, v, decay=0.8, chunk_size=16, **options, **own)


# --- dtypes ------------------------------------------------------------------------------------------------------

DTYPES = {
    "bfloat16": (torch.bfloat16,) * 3,
    "float16": (torch.float16,) * 3,
    "mixed": (torch.bfloat16, torch.float32, torch.float16),
    "values in float32": (torch.bfloat16, torch.bfloat16, torch.float32),
    "queries in float16": (torch.float16, torch.float32, torch.float32),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [n for n in OPERATORS if n != "order 5"])
def test_dtypes(name: str, dtype: str, form: str) -> None:
    """The output has the dtype of v, states are float32."""
    operator, own = OPERATORS[name]
    length = 35 if form == "chunkwise" else 5
    inputs = [0.7 * x.to(t) for x, t in zip(draw(length), DTYPES[dtype], strict=True)]
    out, _ = check(operator, *inputs, form=form, chunk_size=16, return_state=True, **gates("heads", length), **own)
    assert out.dtype == inputs[2].dtype


@pytest.mark.parametrize("dtype", DTYPES)
def test_scale_and_decay_of_other_dtypes(dtype: str) -> None:
    """They never lower the precision, nor raise that of the output."""
    q, k, v = (0.7 * x.to(t) for x, t in zip(draw(19), DTYPES[dtype], strict=True))
    for kind in (torch.float32, torch.bfloat16, torch.float64):
        options = {"scale": torch.tensor(0.3, dtype=kind), "log_decay": torch.full((2, 19), -0.25, dtype=kind)}
        check("hla2", q, k, v, **options)
        check("linear_attention", q, k, v, scale=options["scale"], decay=torch.tensor([0.5, 0.75], dtype=kind))


def test_states_of_bfloat16_are_float32() -> None:
    """A sum of many small terms beside a large one: exact in float32, lost where a state has 8 bits."""
    length = 48 * 16
    k = torch.full((length, 1), 2.0**-7, dtype=torch.bfloat16, device=DEVICE)
    v = torch.full((length, 1), 2.0**-6, dtype=torch.bfloat16, device=DEVICE)
    k[0], v[0] = 1.0, 1.0
    want = 1.0 + (length - 1) * 2.0**-13
    out, state = run("linear_attention", k, k, v, chunk_size=16, return_state=True)
    assert float(state[0]) == want
    assert abs(float(out[-1]) / (want * 2.0**-7) - 1.0) <= 2 * 2.0**-8
    _, state = run("linear_attention", k[:40], k[:40], v[:40], form="recurrent", return_state=True)
    assert float(state[0]) == 1.0 + 39 * 2.0**-13
    k, v = k[: 30 * 16], v[: 30 * 16]  # in one part, so that one pass makes both states
    one = torch.zeros_like(k)
    one[0] = 1.0  # hla2: S = 1, u = q, F = Σ q v; ahla: P = 1, w = q, E = Σ k q
    for name, values in (("hla2", (k, one, v)), ("ahla", (k, v, one))):
        with Launched() as kernels:
            _, state = run(name, *values, chunk_size=16, return_state=True)
        assert kernels["chain"] == 1
        assert [float(x) for x in state] == [1.0, 1.0 + (len(k) - 1) * 2.0**-13], name


# --- one sequence in parts ---------------------------------------------------------------------------------------


@pytest.fixture(params=[1, 2])
def in_parts(request: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sequences of few chunks are cut, as long ones are where there are few heads."""
    monkeypatch.setattr(operations, "FEWEST_CHUNKS", request.param)


@pytest.mark.parametrize("name", OPERATORS)
def test_parts(name: str, in_parts: None) -> None:
    """From a state to a state, resets among the tokens, the last part and chunk not full."""
    operator, own = OPERATORS[name]
    q, k, v = draw(67, batch=(1,))
    state = initial(operator, own, q, (1,), d=5, dv=7)
    log_decay = -0.2 * torch.rand(1, 67, generator=torch.Generator().manual_seed(1))
    for options in ({"log_decay": log_decay}, {"decay": 0.9}):
        with Launched() as kernels:
            check(operator, q, k, v, chunk_size=16, initial_state=state, return_state=True, **options, **own)
        assert kernels["carry"] >= 1
        log_decay[0, 37] = -torch.inf


def test_parts_of_wide_states(in_parts: None) -> None:
    """More than one tile of a state in what precedes a part."""
    q, k, v = draw(67, batch=(), d=20, dv=70)
    with Launched() as kernels:
        check("linear_attention", q, k, v, chunk_size=16, decay=0.9, return_state=True)
    assert kernels["carry"] == 1


def test_parts_are_cut_where_a_gpu_would_idle() -> None:
    """Without any changed threshold: 33 chunks of one head are two parts, those of 128 programs are one."""
    q, k, v = draw(33 * 16, batch=())
    with Launched() as kernels:
        check("linear_attention", q, k, v, chunk_size=16, decay=0.99, return_state=True)
    assert kernels["carry"] == 1
    setting = operations.Setting(
        engine.ENGINE,
        operations.Timeline(10**6, 64, 10**6 // 64, 1),
        operations.Gate(0),
        Arithmetic(torch.float32, "ieee", torch.float32),
    )
    assert operations.pieces(setting, (8, 16), 64) == 1
    assert operations.pieces(setting, (2, 16), 64) == 2
    assert operations.pieces(setting, (), 1) == 128


# --- streaming ---------------------------------------------------------------------------------------------------

STEPS = {
    "plain": {},
    "gated": {"log_decay": True},
    "masked": {"token_mask": True, "decay": 0.8, "scale": 0.7},
    "normalized": {"normalize": True, "eps": 2.0, "decay": 0.9},
}


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("name", OPERATORS)
def test_pieces_equal_the_whole(name: str, kind: str) -> None:
    """Prefill in two pieces, one of them empty, then tokens: the dense sum over all of it."""
    operator, own = OPERATORS[name]
    length = 21
    q, k, v = draw(length)
    if kind == "normalized":
        q, k = q.abs(), k.abs()
    generator = torch.Generator().manual_seed(9)
    options, timed = {**own, **STEPS[kind]}, {}
    if options.pop("log_decay", False):
        timed["log_decay"] = -0.4 * torch.rand(2, length, generator=generator)
        timed["log_decay"][0, 2] = timed["log_decay"][:, 18] = -torch.inf
    if options.pop("token_mask", False):
        timed["token_mask"] = torch.rand(2, length, generator=generator) < 0.7
    timed, state, outputs = placed(timed), None, []
    for a, b, form in ((0, 2, "recurrent"), (2, 2, "chunkwise"), (2, 18, "chunkwise")):
        part = {n: x[:, a:b] for n, x in timed.items()}
        cut = (x[:, a:b] for x in (q, k, v))
        out, state = run(operator, *cut, form=form, initial_state=state, return_state=True, **part, **options)
        outputs.append(out)
    for t in range(18, length):
        part = {n: x[:, t] for n, x in timed.items()}
        with Launched() as kernels:
            del chosen[:]
            out, state = hla.step(state, q[:, t], k[:, t], v[:, t], backend="triton", **part, **options)
        assert kernels == {"token": 1}
        assert chosen == [("triton", False)]
        outputs.append(out[:, None])
    whole = check(operator, q, k, v, return_state=True, **timed, **options)
    allowed = budget(operator, q, k, v, **options)
    tokens(torch.cat(outputs, 1), whole[0].double(), 2 * allowed, name)
    for x, y in zip(state, whole[1], strict=True):
        entries(x, y.double(), 2 * allowed, name, axes=x.ndim - 1)


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("gated", [False, True])
def test_steps_in_place(name: str, gated: bool) -> None:
    """The same numbers in the same memory; without `inplace` the state stays as it was."""
    operator, own = OPERATORS[name]
    q, k, v = (x[:, 0] for x in draw(1))
    state = initial(operator, own, q, (2,), d=5, dv=7)
    options = {**own, **({"log_decay": torch.tensor([-0.3, -torch.inf])} if gated else {"decay": 0.9})}
    options = placed({**options, "token_mask": torch.tensor([True, False])})
    kept = [x.clone() for x in state]
    out, following = hla.step(state, q, k, v, backend="triton", **options)
    assert all(map(torch.equal, state, kept))
    places = [x.data_ptr() for x in state]
    again, moved = hla.step(state, q, k, v, backend="triton", inplace=True, **options)
    assert moved is state
    assert [x.data_ptr() for x in moved] == places
    assert torch.equal(out, again)
    assert all(map(torch.equal, moved, following))
    assert not all(map(torch.equal, moved, kept))
    assert all(torch.equal(x[1], y[1]) for x, y in zip(moved, kept, strict=True))
    assert {name for name, _ in chosen} == {"triton"}


def test_steps_in_place_of_views() -> None:
    """States whose heads are shared by several queries, lie apart, or are one tensor seen twice."""
    q, k, v = (x[..., 0, :] for x in draw(1, batch=(2, 3)))
    whole = initial("hla2", {}, q, (2, 3), d=5, dv=7, kv_batch=(2, 1))
    for lay in (lambda x: x.clone(), spread, lambda x: x.mT.contiguous().mT):
        state = type(whole)(*map(lay, whole))
        want, following = hla.step(whole, q, k[:, :1], v[:, :1], backend="triton")
        out, moved = hla.step(state, q, k[:, :1], v[:, :1], backend="triton", inplace=True)
        assert moved is state
        assert torch.equal(out, want)
        assert all(map(torch.equal, moved, following))
    shared = [x.expand(4, *x.shape) for x in whole]
    with pytest.raises(hla.OptionError, match="inplace"):
        hla.step(type(whole)(*shared), wide(q, 4, 2), k[:, :1], v[:, :1], backend="triton", inplace=True)


@pytest.mark.parametrize(
    ("name", "launches"),
    [
        ("hla2", {"chain": 1, "read": 1}),
        ("ahla", {"chain": 1}),
        ("hla3", {"chain": 2, "read": 2}),
        ("order 4", {"chain": 2, "read": 2}),
    ],
)
def test_as_few_launches_as_documented(name: str, launches: dict[str, int]) -> None:
    operator, own = OPERATORS[name]
    with Launched() as kernels:
        getattr(hla, operator)(*draw(17), backend="triton", **{n: x for n, x in own.items() if n != "ridge"})
    assert kernels == launches


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", OPERATORS)
def test_steps_of_grouped_heads(name: str, gated: bool) -> None:
    """A state that several queries share moves once, in its own memory, and all of them see it moved."""
    operator, own = OPERATORS[name]
    q, k, v = (x[..., 0, :] for x in draw(1, batch=(2, 3)))
    k, v = k[:, :1], v[:, :1]
    options = {**own, "decay": 0.9}
    if gated:
        decays, mask = placed((torch.tensor([[-0.3], [-torch.inf]]), torch.tensor([[True], [False]])))
        options = {**own, "log_decay": decays, "token_mask": mask}
    state = initial(operator, own, q, (2, 3), d=5, dv=7, kv_batch=(2, 1))
    apart = type(state)(*(x.expand(2, 3, *x.shape[-2:]).clone() for x in state))
    want, following = hla.step(apart, q, k.expand_as(q), v.expand(2, 3, 7), backend="triton", **options)
    places = {x.data_ptr() for x in state}
    written: list[int] = []
    launch.watchers.append(lambda one: written.extend(x.data_ptr() for x in one.arguments["after"] if x is not None))
    with Launched() as kernels:
        out, moved = hla.step(state, q, k, v, backend="triton", inplace=True, **options)
    launch.watchers.pop()
    looks_back = name == "hla3 printed"  # strict reads see a shared state as it was
    shared = any(x.shape[1] == 1 for x in state) and not looks_back
    assert kernels["token"] == 1 + shared
    assert moved is state
    assert looks_back or set(written) == places
    assert torch.equal(out, want)
    for x, y in zip(moved, following, strict=True):
        assert torch.equal(x.expand_as(y), y)


# --- what is not finite ------------------------------------------------------------------------------------------

CHUNK = 16
overflowing = pytest.mark.filterwarnings("ignore::RuntimeWarning")
"""NumPy, which computes for the interpreter, warns of what does not raise."""


def same(found: Any, clean: Any, where: Any, label: str) -> None:
    """Equal bits at the marked tokens."""
    found, clean = fetched((found, clean))
    assert torch.equal(found[where], clean[where]), label


def bad(values: Any, which: str, token: int, value: float = torch.nan) -> dict[str, Any]:
    found = {n: x.clone() for n, x in values.items()}
    found[which][1, token, ...] = value
    return found


def reach(form: str, token: int) -> int:
    """The first token that a bad value may spoil."""
    return token if form == "recurrent" else token // CHUNK * CHUNK


@overflowing
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", [n for n in OPERATORS if n not in ("hla2 prefix", "order 5")])
def test_bad_values(name: str, form: str) -> None:
    """They spoil their own token and, from keys and values, all later ones; no earlier chunk, and no other head."""
    operator, own = OPERATORS[name]
    length, token = (37, 18) if form == "chunkwise" else (6, 2)
    q, k, v = draw(length)
    values = {"q": q, "k": k, "v": v, **gates("log_decay", length)}
    values["log_decay"] = values["log_decay"].clamp(min=-1.0)
    clean = run(operator, **values, form=form, chunk_size=CHUNK, **own)
    for which, value in (("q", torch.nan), ("k", torch.inf), ("v", torch.nan), ("log_decay", torch.nan)):
        found = run(operator, **bad(values, which, token, value), form=form, chunk_size=CHUNK, **own)
        safe = torch.ones(2, length, dtype=torch.bool)
        safe[1, reach(form, token) :] = False
        same(found, clean, safe, f"{which}")
        spoilt = ~found[1].isfinite().all(-1)
        assert spoilt[token]
        if which != "q":
            assert spoilt[token:].all(), which


@overflowing
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("packed", ["cu_seqlens", "segment_ids", "log_decay"])
@pytest.mark.parametrize("name", ["hla2", "ahla", "hla3 printed", "order 4"])
def test_bad_values_stay_in_their_sequence(name: str, packed: str, form: str) -> None:
    """The carry takes neither NaN nor what overflows across a border of packed sequences, or across a reset."""
    operator, own = OPERATORS[name]
    if (name, packed) == ("hla3 printed", "log_decay"):
        return  # its strict reads are not decayed, so nothing resets them
    offsets = [0, 2, 20, 22, 37] if form == "chunkwise" else [0, 1, 3, 4, 6]
    length, token, border = offsets[-1], offsets[2] - 1, offsets[2]
    q, k, v = draw(length)
    values = {"q": q, "k": k, "v": v}
    ids = torch.tensor(np.repeat(np.arange(4), np.diff(offsets)))
    resets = torch.where(torch.arange(length) == border, -torch.inf, -0.1)
    option = {packed: {"cu_seqlens": torch.tensor(offsets), "segment_ids": ids, "log_decay": resets}[packed]}
    clean = run(operator, **values, form=form, chunk_size=CHUNK, **option, **own)
    for which, value in (("q", torch.nan), ("k", torch.nan), ("v", torch.inf), ("k", 1e30)):
        found = run(operator, **bad(values, which, token, value), form=form, chunk_size=CHUNK, **option, **own)
        safe = torch.ones(2, length, dtype=torch.bool)
        if packed == "cu_seqlens":
            safe[1] = ids != 1
        elif form == "recurrent":
            safe[1, token:border] = False
        else:  # a chunk may hold several sequences
            start = token // CHUNK * CHUNK
            safe[1, start : start + CHUNK] = False
        same(found, clean, safe, f"{value} in {which}")


@overflowing
@pytest.mark.parametrize("border", ["segment_ids", "log_decay"])
@pytest.mark.parametrize("name", ["linear_attention", "hla2", "ahla"])
def test_bad_values_stay_in_their_part_of_a_chunk(name: str, border: str) -> None:
    """One chunk holds several sequences, or a reset: what is bad before is not behind."""
    values = placed(dict(zip("qkv", draw(16), strict=True)) | {"log_decay": torch.full((2, 16), -0.1)})
    behind = torch.arange(16) >= 9
    options = {"chunk_size": CHUNK} | ({"segment_ids": behind.long()} if border == "segment_ids" else {})
    if border == "log_decay":
        values["log_decay"][:, 9] = -300.0
    clean = run(name, **values, **options)
    for which in values:
        found = run(name, **bad(values, which, 5), **options)
        same(found[1], clean[1], behind, which)
        assert found[1, 5].isnan().all()


@overflowing
def test_an_overflow_between_two_stages_shows() -> None:
    """Finite inputs, a first result that is not: nor is what is computed of it."""
    values = placed({"q": torch.ones(16, 5), "k": torch.ones(16, 5), "v": torch.ones(16, 7)})
    values["v"][5] = 3e38
    found = run("ahla", **values, log_decay=torch.full((16,), -0.1), chunk_size=CHUNK)
    assert found[:5].isfinite().all()
    assert not found[5:].isfinite().any()


@overflowing
@pytest.mark.parametrize("form", FORMS)
def test_bad_states(form: str) -> None:
    """They spoil their own head and sequence, and nothing behind a reset."""
    length = 18 if form == "chunkwise" else 5
    q, k, v = draw(length)
    for name in ("hla2", "ahla", "hla3", "order 4"):
        operator, own = OPERATORS[name]
        state = initial(operator, own, q, (2,), d=5, dv=7)
        spoilt = type(state)(*(x.clone() for x in state))
        for x in spoilt:
            x[1] = torch.nan
        options = {"form": form, "return_state": True, **own}
        out, last = run(operator, q, k, v, initial_state=state, **options)
        found, end = run(operator, q, k, v, initial_state=spoilt, **options)
        assert torch.equal(found[0], out[0])
        assert found[1].isnan().all()
        assert all(torch.equal(x[0], y[0]) for x, y in zip(last, end, strict=True))
        gate = torch.zeros(2, length)
        gate[:, 0] = -torch.inf
        out, last = run(operator, q, k, v, initial_state=state, log_decay=gate, **options)
        found, end = run(operator, q, k, v, initial_state=spoilt, log_decay=gate, **options)
        assert torch.equal(found, out)
        assert all(map(torch.equal, last, end))
        many = type(state)(*(torch.stack([x, y, x]) for x, y in zip(state, spoilt, strict=True)))
        found, end = run(operator, q, k, v, initial_state=many, cu_seqlens=torch.tensor([0, 2, 4, length]), **options)
        assert found[1, 2:4].isnan().all()
        assert found[0].isfinite().all()
        assert found[1, [0, 1, *range(4, length)]].isfinite().all()
        assert all(x[[0, 2]].isfinite().all() and x[1, 0].isfinite().all() for x in end)


@overflowing
@pytest.mark.parametrize("name", ["linear_attention", "hla2", "ahla", "order 4"])
def test_bad_values_in_parts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a part with a reset is given, a token's or a state's, it does not hand on."""
    monkeypatch.setattr(operations, "FEWEST_CHUNKS", 1)
    operator, own = OPERATORS[name]
    q, k, v = draw(48)
    log_decay = torch.where(torch.arange(48) == 20, -torch.inf, -0.1)
    state = initial(operator, own, q, (2,), d=5, dv=7)
    options = {"log_decay": log_decay, "chunk_size": CHUNK, "return_state": True, **own}
    with Launched() as kernels:
        clean, last = run(operator, q, k, v, initial_state=state, **options)
    assert kernels["carry"]
    spoilt = type(state)(*(torch.full_like(x, torch.nan) for x in state))
    for given, start in ((bad({"q": q, "k": k, "v": v}, "k", 3), state), ({"q": q, "k": k, "v": v}, spoilt)):
        found, end = run(operator, **given, initial_state=start, **options)
        assert torch.equal(found[:, 20:], clean[:, 20:])
        assert all(map(torch.equal, end, last))


@overflowing
def test_bidirectional_bad_values() -> None:
    """Other heads never; other packed sequences not by way of the carry."""
    q, k, v = draw(37)
    values = {"q": q, "k": k, "v": v}
    offsets = [0, 17, 17, 37]
    ids = torch.tensor(np.repeat(np.arange(3), np.diff(offsets)))
    for packed in ({}, {"segment_ids": ids}, {"cu_seqlens": torch.tensor(offsets)}):
        for name in ("hla2", "ahla"):
            clean = run(name, **values, mask="none", chunk_size=CHUNK, **packed)
            found = run(name, **bad(values, "k", 35), mask="none", chunk_size=CHUNK, **packed)
            same(found[0], clean[0], slice(None), name)
            if packed:
                same(found[1], clean[1], slice(0, 16), name)
            if "cu_seqlens" in packed:
                same(found[1], clean[1], slice(0, 17), name)


# --- configurations ----------------------------------------------------------------------------------------------

KERNELS = (engine.CHAIN, engine.READ, engine.RATE, engine.CLOCK, engine.CARRY, engine.TOKEN)


def test_every_configuration(monkeypatch: pytest.MonkeyPatch, launches: Any) -> None:
    """Each of each kernel: the same numbers, but for the order of sums. float16 takes all, as it uses tensor cores."""
    monkeypatch.setattr(operations, "FEWEST_CHUNKS", 1)
    q, k, v = draw(19, batch=(), d=3, dv=100, dtype=torch.float16)
    log_decay = torch.full((19,), -0.1, device=DEVICE)

    def results() -> list[Any]:
        leaves = [x.clone().requires_grad_() for x in (q, k, v, log_decay)]
        options = {"log_decay": leaves[3], "return_state": True, "chunk_size": 16}
        found = flat(run("ahla", *leaves[:3], **options))
        found += torch.autograd.grad(found, leaves, cotangents(found))
        return [*found, *flat(run("ahla", q[:2], k[:2], v[:2], form="recurrent", return_state=True))]

    check("ahla", q, k, v, log_decay=log_decay, gradient=True, return_state=True, chunk_size=16)
    want = results()
    for i in range(max(len(kernel.configs) for kernel in KERNELS)):
        for kernel in KERNELS:
            monkeypatch.setitem(launch.forced, kernel.name, i)
        for x, y in zip(results(), want, strict=True):
            off = 1e-5 if launch.interpreting() and x.dtype != torch.float16 else 2.0**-10  # TF32's, or its own
            torch.testing.assert_close(x, y, rtol=off, atol=off * float(y.detach().abs().max()))
    seen = {(one.kernel, str(one.config)) for one in launches}
    assert seen >= {(kernel.name, str(config)) for kernel in KERNELS for config in kernel.configs}


@pytest.mark.parametrize("length", [5, 19])
def test_blocks_without_tensor_cores(length: int, monkeypatch: pytest.MonkeyPatch, launches: Any) -> None:
    """float32 takes those that are small, all of which it is right with."""
    for i in range(2):
        for kernel in KERNELS:
            monkeypatch.setitem(launch.forced, kernel.name, i)
        check("ahla", *draw(length, batch=(), dv=40), return_state=True, decay=0.9)
    assert {one.config.blocks["BZ"] for one in launches if one.kernel == "chain"} == {16, 32}


def test_configurations_that_fit() -> None:
    """What needs more shared memory than a device has is not tried, unless all do; remembered by device and sizes."""
    needs = {16: 100, 32: 200, 64: 50}
    configs = [launch.Config({"BZ": block}) for block in needs]
    kernel = launch.Kernel(
        engine.READ.function,
        configs,
        ("D",),
        shared=lambda a, c: needs[c.blocks["BZ"]] * a["D"],
        useful=lambda a, c: c.blocks["BZ"] >= a["D"],
    )

    def blocks(limit: int, width: int) -> list[int]:
        return [c.blocks["BZ"] for c in kernel._found({"D": width}, limit)]

    assert blocks(150, 1) == [16, 64]
    assert blocks(10, 1) == [64]
    assert blocks(150, 2) == [64]
    assert blocks(10_000, 20) == [32, 64]
    assert blocks(150, 1) == [16, 64]


def test_what_is_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each chip and set of configurations, by sizes and dtype, and never twice into one result."""
    asked: list[Any] = []

    def autotune(configs: Any, key: Any, restore_value: Any) -> Any:
        asked.append(([(c.kwargs, c.num_warps, c.num_stages) for c in configs], key, restore_value))
        return lambda function: (function, len(asked))

    chips = iter(["cuda 80", "cuda 90", "cuda 90", "cuda 90"])
    monkeypatch.setattr(launch.triton, "autotune", autotune)
    monkeypatch.setattr(launch, "chip", lambda device: next(chips))
    read = engine.READ
    monkeypatch.setattr(read, "_tuned", {})
    tuners = [read._tuner(list(some), torch.zeros(1)) for some in (read.configs,) * 3]
    assert [number for _, number in tuners] == [1, 2, 2]
    assert read._tuner(list(read.configs[1:]), torch.zeros(1))[1] == 3
    every = [(c.blocks, c.warps, c.stages) for c in read.configs]
    assert [x for x, *_ in asked] == [every, every, every[1:]]
    for _, key, restored in asked:
        assert set(key) >= {"D", "D2", "DZ", "DOT"}
        assert "T" not in key
        assert restored == ["r"]


# --- registration ------------------------------------------------------------------------------------------------


@INTERPRETED
def test_automatic_choice_leaves_cpu_tensors_alone() -> None:
    """The interpreter is for tests: it runs when it is named, with whatever reason to tell."""
    q, k, v = draw(5)
    plan = hla.explain("hla2", q, k, v)
    assert (plan.backend, plan.source) == ("torch", "auto")
    ours = next(one for one in plan.candidates if one.name == "triton")
    assert not ours.ok
    assert "only when it is named" in ours.reason
    chosen.clear()
    hla.hla2(q, k, v)
    assert chosen == [("torch", False)]
    plan = hla.explain("hla2", q, k, v, backend="triton")
    assert (plan.backend, plan.form, plan.source) == ("triton", "chunkwise", "argument")
    assert "passed its test of itself" in next(one for one in plan.candidates if one.name == "triton").reason
    assert "triton" in hla.backends.available()


def test_every_way_to_name_it(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = draw(5)
    with hla.use_backend("triton"):
        hla.hla2(q, k, v)
        assert hla.explain("hla2", q, k, v).source == "context"
    hla.set_backend("triton")
    try:
        hla.hla2(q, k, v)
    finally:
        hla.set_backend(None)
    monkeypatch.setenv("HLA_BACKEND", "triton")
    hla.hla2(q, k, v)
    with pytest.raises(BackendUnsupportedError, match="not float64"):
        hla.hla2(q.double(), k.double(), v.double())
    hla.hla2(q, k, v, backend=["triton", "torch"])
    assert {name for name, _ in chosen} == {"triton"}
    hla.hla2(q.double(), k.double(), v.double(), backend=["triton", "torch"])
    assert chosen[-1] == ("torch", False)


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "float64": (lambda x: x.double(), {}, "takes float16, bfloat16, float32, not float64"),
    "numpy": (lambda x: fetched(x).numpy(), {}, "takes torch arrays, not numpy"),
    "wide": (lambda x: x.repeat(1, 1, 64), {}, "takes d and dv up to 256, not"),
    "scan": (lambda x: x, {"form": "scan"}, "has the forms recurrent, chunkwise, not scan"),
    "parallel": (lambda x: x, {"form": "parallel"}, "has the forms recurrent, chunkwise, not parallel"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str) -> None:
    """Named it raises, with the reason, for calls, their gradients, steps and explanations alike."""
    change, options, reason = REFUSED[case]
    inputs = [change(x) for x in draw(5)]
    for call in (
        hla.hla2,
        lambda *xs, **more: hla.vjp("hla2", *xs, **more),
        lambda *xs, **more: hla.explain("hla2", *xs, **more),
    ):
        with pytest.raises(BackendUnsupportedError, match=reason):
            call(*inputs, backend="triton", **options)
    hla.hla2(*inputs, **options)  # another can
    assert chosen[-1][0] != "triton"


def test_errors_come_before_the_backend() -> None:
    """Arguments are checked as for every backend."""
    q, k, v = draw(5)
    with pytest.raises(hla.ShapeError, match="k: expected"):
        hla.hla2(q, k[:, :3], v, backend="triton")
    with pytest.raises(hla.OptionError, match="cu_seqlens"):
        hla.hla2(q, k, v, cu_seqlens=placed(torch.tensor([0, 4, 3, 5])), backend="triton")
    with pytest.raises(hla.OptionError, match="none"):
        hla.hla2(q, k, v, mask="none", return_state=True, backend="triton")
    assert not chosen


# --- the test of itself ------------------------------------------------------------------------------------------


@pytest.fixture
def untested(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a new process."""
    monkeypatch.setattr(selection, "_choices", {})
    selftest.forget()
    yield
    selftest.forget()


def info(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What `hla info` says of the backend."""
    assert main(["info", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    return next(row for row in rows if row["backend"] == "triton")


def test_it_passes_its_test(untested: None, capsys: pytest.CaptureFixture[str]) -> None:
    with Launched() as kernels:
        row = info(capsys)
    assert row["available"]
    assert "passed its test of itself" in row["reason"]
    assert kernels.keys() >= {"clock", "chain", "read", "rate", "token"}
    with Launched() as kernels:
        info(capsys)
    assert not kernels  # once is enough


def slightly_off(made: Any) -> Any:
    made[..., -1, :] *= 1.001
    return made


def not_a_number(made: Any) -> Any:
    made[..., -1, -1] = torch.nan
    return made


def broken(made: Any) -> Any:
    raise RuntimeError("planted: no such instruction")


WRONG = {
    "output": (forward, "run_read", slightly_off, "hla2, float32, chunkwise: output off by"),
    "NaN": (forward, "run_read", not_a_number, "hla2, float32, chunkwise: output off by"),
    "error": (forward, "run_read", broken, "RuntimeError: planted: no such instruction"),
    "gradient": (backward, "run_read", slightly_off, "gradient of . off by"),
    "rate": (backward, "run_rate", lambda made: made.mul_(1.001), "gradient of log_decay off by"),
    "state": (forward, "run_chain", lambda made: made.second.final.mul_(1.001) is None or made, "state . off by"),
    "tokens": (execution.recurrent, "run", lambda made: (made[0] * 1.001, made[1]), "recurrent: output off by"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_kernel_is_refused(
    fault: str, untested: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the reason, wherever one asks; lists and the automatic choice go on to the next backend."""
    owner, name, spoil, reason = WRONG[fault]
    right = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *xs, **options: spoil(right(*xs, **options)))
    q, k, v = draw(5)
    with pytest.raises(BackendUnsupportedError, match=f"failed its test of itself.*{reason}"):
        hla.hla2(q, k, v, backend="triton")
    chosen.clear()
    for backend in (None, ["triton", "torch"]):
        hla.hla2(q, k, v, backend=backend)
    assert chosen == [("torch", False)] * 2
    ours = next(
        one for one in hla.explain("hla2", q, k, v, backend=["triton", "torch"]).candidates if one.name == "triton"
    )
    assert not ours.ok
    row = info(capsys)
    assert not row["available"]
    assert "failed its test of itself" in row["reason"]


# --- the matrix of checks ----------------------------------------------------------------------------------------

CHECKED = (
    "bfloat16, split",
    "float16",
    "packed states, decay",
    "split, as printed",
    "wide v, split",
    "time first",
    "none, packed, normalize",
    "gradient, through a state, wide v, prefix",
)


@pytest.mark.parametrize("number", range(9))
def test_every_operator_is_checked(number: int) -> None:
    """`hla.testing.check_backend` in its shortest form."""
    (place,) = placements("triton", ["torch"])
    row = plan_checks("triton", place, "one")[number].run()
    assert row.status == "ok", row.note


@pytest.mark.parametrize("case", CHECKED)
def test_some_cases_are_checked(case: str) -> None:
    (place,) = placements("triton", ["torch"])
    checks = [one for one in plan_checks("triton", place) if one.case.name == case and one.form in FORMS]
    quickest = min(checks, key=lambda one: (one.form == "recurrent", one.operator == "hla3", one.order or 2))
    row = quickest.run()
    assert row.status == "ok", row.note


# --- the guards --------------------------------------------------------------------------------------------------


def test_arithmetic_outside_of_kernels_is_seen() -> None:
    """What stands guard over all tests here, seen to bark."""
    x = torch.ones(3, 3, device=DEVICE)
    for multiply in (torch.matmul, torch.mm, lambda a, b: a @ b, lambda a, b: torch.einsum("ij,jk", a, b)):
        with KernelsOnly(), pytest.raises(AssertionError, match="while the backend runs"):
            multiply(x, x)
    for add_up in (lambda: x.cumsum(0), lambda: torch.addcmul(x, x, x), lambda: torch.bmm(x[None], x[None])):
        with KernelsOnly(), pytest.raises(AssertionError, match="while the backend runs"):
            add_up()

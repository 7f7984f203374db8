"""Backend "triton" under tracers: what they record is an operation, with a fake, a derivative and a batching rule."""

from __future__ import annotations

from typing import Any

import pytest

import libraries

torch = libraries.only("torch")
pytest.importorskip("triton")
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

import hla  # noqa: E402
from hla.backends.torch.autograd import Split  # noqa: E402
from hla.backends.triton import launch, library  # noqa: E402
from hla.checks import check_call  # noqa: E402
from hla.options import Options  # noqa: E402
from triton_runs import placed  # noqa: E402 (skips this file where no kernel runs)

BATCH, HEADS, TOKENS, D, DV = 2, 3, 11, 5, 7


def draw() -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return placed([0.5 * torch.randn(BATCH, HEADS, TOKENS, n, generator=generator) for n in (D, D, DV)])


def attend(q: Any, k: Any, v: Any) -> Any:
    return hla.hla2(q, k, v, decay=0.9, backend="triton")


def calls(module: Any) -> list[str]:
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize(
    "options",
    [{}, {"decay": 0.9, "return_state": True}, {"mask": "none", "ridge": 0.7}, {"normalize": True, "eps": 3.0}],
    ids=str,
)
def test_opcheck(options: dict[str, Any]) -> None:
    inputs = [x[0].requires_grad_() for x in draw()]
    problem = check_call("hla2", *inputs, Options(**options)).problem
    split = Split(problem)
    found = torch.library.opcheck(torch.ops.hla.triton, (split.tensors(problem), library.describe(split)))
    assert set(found.values()) == {"SUCCESS"}


@pytest.mark.parametrize("offsets", [None, [0, 4, 4, TOKENS]])
def test_a_described_call_is_the_call(offsets: Any) -> None:
    q, k, v = draw()
    options = Options(
        decay=0.9, scale=0.3, return_state=True, cu_seqlens=None if offsets is None else torch.tensor(offsets)
    )
    problem = check_call("ahla", q, k, v, options).problem
    split = Split(problem)
    tensors = split.tensors(problem)
    found = torch.ops.hla.triton(tensors, library.describe(split))
    o, state = hla.ahla(
        q, k, v, decay=0.9, scale=0.3, return_state=True, cu_seqlens=options.cu_seqlens, backend="triton"
    )
    assert torch.equal(found[0], o)
    assert [x.shape for x in found[1:]] == [x.shape for x in state]
    assert all(map(torch.equal, found[1:], state))


def test_a_traced_program_holds_one_operation_and_can_be_differentiated_and_mapped() -> None:
    q, k, v = draw()
    traced = make_fx(attend, tracing_mode="fake")(q, k, v)
    assert calls(traced).count("hla.triton.default") == 1
    before = launch.counts.total()
    assert torch.equal(traced(q, k, v), attend(q, k, v))
    assert launch.counts.total() > before
    gradients = []
    for function in (traced, attend):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        gradients.append(torch.autograd.grad(function(*inputs).square().sum(), inputs))
    assert all(map(torch.equal, *gradients))
    twice = torch.func.vmap(traced, (0, None, None))(torch.stack([q, 2 * q]), k, v)
    assert torch.equal(twice[0], attend(q, k, v))
    assert torch.equal(twice[1], attend(2 * q, k, v))


def test_a_map_within_a_compiled_program() -> None:
    q, k, v = draw()

    def mapped(q: Any) -> Any:
        return torch.func.vmap(lambda q: attend(q, k[0], v[0]))(q)

    compiled = torch.compile(mapped, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(q), mapped(q))


def test_fake_tensors_launch_nothing() -> None:
    from torch._subclasses import FakeTensorMode

    before = launch.counts.total()
    with FakeTensorMode() as mode:
        q, k, v = (mode.from_tensor(x) for x in draw())
        problem = check_call("hla2", q, k, v, Options(return_state=True)).problem
        split = Split(problem)
        found = torch.ops.hla.triton(split.tensors(problem), library.describe(split))
    assert launch.counts.total() == before
    assert [tuple(x.shape) for x in found] == [(BATCH, HEADS, TOKENS, DV), (BATCH, HEADS, D, D), (BATCH, HEADS, D, DV)]

"""The Triton kernels as the compiler sees them: their intermediate code run on the CPU by ttsem, as if on a GPU.

A second opinion beside Triton's interpreter: bfloat16 and TF32 as the hardware has them, accesses out of bounds, and
races between programs. `nox -s triton-semantics` runs it; ttsem is young and no part of the ordinary checks.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

import hla
import libraries
from hla.testing import error_budget, per_token_error

torch = libraries.only("torch")
if "ttsem" not in sys.modules:
    pytest.skip("of the session triton-semantics, under ttsem.sanitize", allow_module_level=True)
launch = pytest.importorskip("hla.backends.triton.launch")

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # or Triton warns, and here warnings are errors

BATCH, HEADS, TOKENS, D, DV = 1, 2, 37, 19, 23
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "linear_attention": ("linear_attention", {"decay": 0.9}),
    "hla2": ("hla2", {}),
    "hla2 ridge": ("hla2", {"ridge": 0.7, "scale": 0.3}),
    "hla2 printed": ("hla2", {"definition": "as_printed", "decay": 0.9}),
    "ahla": ("ahla", {}),
    "hla3": ("hla3", {}),
    "hla2 packed": ("hla2", {"cu_seqlens": [0, 5, 5, 22, 37]}),
    "hla2 none": ("hla2", {"mask": "none"}),
}


@pytest.fixture(autouse=True)
def first_configurations(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tuning: it would run every kernel many times."""
    for name in ("chain", "read", "rate", "carry", "clock", "token"):
        monkeypatch.setitem(launch.forced, name, 0)


def draw(dtype: Any, *, forgets: bool) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(0)
    made = [0.5 * torch.randn(BATCH, HEADS, TOKENS, n, generator=generator) for n in (D, D, DV, DV)]
    g = -0.2 * torch.rand(BATCH, HEADS, TOKENS, generator=generator) if forgets else None
    return (*(x.to(dtype) for x in made), g)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients(case: str, dtype: Any) -> None:
    operator, options = CASES[case]
    options = dict(options)
    if "cu_seqlens" in options:
        options["cu_seqlens"] = torch.tensor(options["cu_seqlens"])
    forgets = "decay" not in options and options.get("mask") != "none"
    *inputs, cotangent, g = draw(dtype, forgets=forgets)
    before = sum(launch.counts.values())

    def run(backend: str, place: Any) -> tuple[Any, list[Any]]:
        given = [place(x).requires_grad_() for x in (*inputs, *([g] if forgets else []))]
        gate = {"log_decay": given[3]} if forgets else {}
        o = getattr(hla, operator)(*given[:3], **gate, **options, backend=backend)
        return o.detach(), list(torch.autograd.grad(o, given, place(cotangent)))

    o, gradients = run("triton", lambda x: x.detach().clone().to("cuda"))
    assert sum(launch.counts.values()) > before
    want, right = run("torch", lambda x: x.detach().clone().double())
    name = str(dtype).removeprefix("torch.")
    products = None if name == "float32" else name
    shared = {"dv": DV, "definition": options.get("definition", "exact"), "products": products}
    error = per_token_error(o.cpu().double().numpy(), want.numpy())
    assert error <= error_budget(operator, name, TOKENS, D, **shared)
    allowed = error_budget(operator, name, TOKENS, D, gradient=True, **shared)
    for got, expected in zip(gradients, right, strict=True):
        assert float((got.cpu().double() - expected).abs().max() / expected.abs().max()) <= allowed


@pytest.mark.parametrize("operator", ["hla2", "ahla", "hla3"])
def test_decode(operator: str) -> None:
    q, k, v, _, _ = draw(torch.float32, forgets=False)
    length = 5
    q, k, v = (x[:, :, :length].to("cuda") for x in (q, k, v))
    call = getattr(hla, operator)
    want = call(*(x.cpu().double() for x in (q, k, v)), decay=0.9, backend="torch")
    o, state = call(q[:, :, :-1], k[:, :, :-1], v[:, :, :-1], decay=0.9, backend="triton", return_state=True)
    places = [x.data_ptr() for x in state]
    last, state = hla.step(state, *(x[:, :, -1] for x in (q, k, v)), decay=0.9, backend="triton", inplace=True)
    assert [x.data_ptr() for x in state] == places
    found = torch.cat([o, last[:, :, None]], dim=2)
    error = per_token_error(found.cpu().double().numpy(), want.numpy())
    assert error <= error_budget(operator, "float32", length, D, dv=DV)

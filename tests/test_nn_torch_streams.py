"""`hla.nn.torch`: any split, any padding and any packing give what each sequence gives by itself."""

from __future__ import annotations

import copy
import io
import pickle
import shutil
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import budget
import layers
from layers import BATCH, BIDIRECTIONAL, CAUSAL, D_MODEL, MASKS, OFFSETS, RICH, TOKENS
from libraries import only

torch: Any = only("torch")

from hla.nn.torch import LayerState  # noqa: E402
from hla.nn.torch.sequences import Rows  # noqa: E402
from test_nn_torch import assert_close, make, parameters, tokens  # noqa: E402

UNIT = budget.UNIT["float64"]


def allowed(layer: Any, options: dict[str, Any], x: Any) -> Any:
    """(B, T): twice the error of one evaluation, as two are compared."""
    moved = layers.sensitivity(parameters(layer), x.numpy(), options)
    return 2 * moved * layers.tolerance(options, x.shape[1], UNIT)


def in_pieces(layer: Any, x: Any, borders: list[int], state: Any = None) -> tuple[Any, Any]:
    """Calls from border to border, tokens after the last one by steps."""
    pieces = []
    for start, stop in pairwise(borders):
        y, state = layer(x[:, start:stop], state, return_state=True)
        pieces.append(y)
    for t in range(borders[-1], x.shape[1]):
        y, state = layer.step(x[:, t], state)
        pieces.append(y[:, None])
    return torch.cat(pieces, dim=1).detach(), state


def assert_same_state(found: Any, want: Any, bound: float = 2 * 30 * layers.tolerance(RICH, TOKENS, UNIT)) -> None:
    """All tensors, relative to the largest entry: of degree 6 at most in q, k, v, which a few times a change moves."""
    assert len(found.tensors()) == len(want.tensors())
    for a, b in zip(found.detach().tensors(), want.detach().tensors(), strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        if b.numel():
            assert float((a - b).abs().max()) <= bound * float(b.abs().max())


@pytest.mark.parametrize("options", CAUSAL, ids=layers.name_of)
def test_call_step_and_pieces_agree(options: dict[str, Any]) -> None:
    layer, x = make(options), tokens()
    whole, last = layer(x, return_state=True)
    bound = allowed(layer, options, x)
    for borders in ([0], [0, 1], [0, 2, 2, 7], [0, 5, TOKENS]):
        start = layer.init_state(BATCH) if borders == [0] else None
        y, state = in_pieces(layer, x, borders, start)
        assert_close(y, whole.detach(), bound, f"pieces {borders}")
        assert_same_state(state, last)
    assert last.position.tolist() == [TOKENS] * BATCH


@pytest.mark.parametrize("how", ["float32", "autocast", "bfloat16"])
@pytest.mark.parametrize("options", CAUSAL[::7], ids=layers.name_of)
def test_call_and_step_agree_in_low_precision(options: dict[str, Any], how: str) -> None:
    """Both round in the same places, so they differ by the rounding of sums alone, and of what follows from it."""
    layer, x = make(options, dtype=torch.float32), tokens().float()
    if how == "bfloat16":
        layer, x = layer.bfloat16(), x.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        whole = layer(x).detach()
        y, state = in_pieces(layer, x, [0, 3])
    name = "float32" if how == "float32" else "bfloat16"
    moved = layers.sensitivity(parameters(layer), x.double().numpy(), options)
    bound = layers.tolerance(options, TOKENS, budget.UNIT["float32"])
    if name == "bfloat16":  # ten roundings to 16 bits at most in a row
        bound = budget.LAMBDA * 10**0.5 * budget.UNIT["bfloat16"]
    assert y.dtype == getattr(torch, name)
    assert_close(y.float(), whole.float(), 2 * bound * moved)
    assert {s.dtype for s in state.tensors()} == {torch.float32, torch.int64}


@pytest.mark.parametrize("options", CAUSAL[::9], ids=layers.name_of)
def test_the_future_has_no_influence(options: dict[str, Any]) -> None:
    layer, x = make(options), tokens()
    other = x.clone()
    other[:, 6:] = torch.randn_like(other[:, 6:])
    assert_close(layer(other)[:, :6].detach(), layer(x)[:, :6].detach(), allowed(layer, options, x)[:, :6])


# --- padding ---------------------------------------------------------------------------------------------------------

PADDED = [(options, True) for options in [*CAUSAL[::3], RICH]] + [(options, False) for options in BIDIRECTIONAL]


@pytest.mark.parametrize("where", MASKS)
@pytest.mark.parametrize(("options", "causal"), PADDED, ids=[layers.name_of(o) + str(c) for o, c in PADDED])
def test_padding(options: dict[str, Any], causal: bool, where: str) -> None:
    """Each row is what its tokens are by themselves, NaN in the padding or not."""
    layer, x = make(options, causal=causal), tokens()
    mask = torch.tensor(MASKS[where], dtype=torch.bool)
    x[mask] = torch.nan
    y = layer(x, key_padding_mask=mask).detach()
    given = parameters(layer)
    assert torch.equal(y[mask], torch.zeros_like(y[mask]))
    for row, skipped, out in zip(x.numpy(), mask.numpy(), y.numpy(), strict=True):
        kept = row[~skipped][None]
        if not kept.size:
            continue
        want = layers.batched(given, kept, options, causal=causal)
        moved = layers.sensitivity(given, kept, options, causal=causal)
        assert_close(out[~skipped][None], want, moved * layers.tolerance(options, TOKENS, UNIT))


@pytest.mark.parametrize("options", [CAUSAL[0], CAUSAL[4], RICH], ids=layers.name_of)
def test_padding_in_states(options: dict[str, Any]) -> None:
    """A state after padded tokens is that of the tokens alone, and goes on like it, padded steps between."""
    layer, x = make(options), tokens()
    mask = torch.tensor(MASKS["inside"], dtype=torch.bool)
    y, state = layer(x[:, :5], return_state=True, key_padding_mask=mask[:, :5])
    pieces = [y]
    y, state = layer(x[:, 5:8], state, return_state=True, key_padding_mask=mask[:, 5:8])
    pieces.append(y)
    for t in range(8, TOKENS):
        hidden = torch.where(mask[:, t, None], torch.nan, x[:, t])
        y, state = layer.step(hidden, state, key_padding_mask=mask[:, t])
        pieces.append(y[:, None])
    found = torch.cat(pieces, dim=1).detach()
    assert torch.equal(found[mask], torch.zeros_like(found[mask]))
    assert state.position.tolist() == (~mask).sum(1).tolist()
    for row in range(BATCH):
        kept = x[row, ~mask[row]][None]
        want, last = layer(kept, return_state=True)
        assert_close(found[row, ~mask[row]][None], want.detach(), allowed(layer, options, kept))
        assert_same_state(state.reorder(torch.tensor([row])), last)


@pytest.mark.parametrize("causal", [True, False])
def test_gradients_pass_padding_by(causal: bool) -> None:
    options = {"operator": layers.MIXED, "num_kv_heads": 3, "rotary": True}
    layer, x = make(options, causal=causal), tokens()
    mask = torch.tensor(MASKS["left"], dtype=torch.bool)
    padded = torch.where(mask[..., None], torch.nan, x).requires_grad_()
    weights = tokens(3)
    (layer(padded, key_padding_mask=mask) * weights).sum().backward()
    found = {name: p.grad.clone() for name, p in layer.named_parameters()}
    layer.zero_grad()
    assert torch.equal(padded.grad[mask], torch.zeros_like(padded.grad[mask]))
    sum((layer(x[b, ~mask[b]][None]) * weights[b, ~mask[b]]).sum() for b in range(BATCH)).backward()
    for name, p in layer.named_parameters():
        assert float((p.grad - found[name]).abs().max()) <= 1e-10 * float(p.grad.abs().max()), name


def test_gradients_of_steps_pass_padding_by() -> None:
    layer, x = make(RICH), tokens()
    _, state = layer(x, return_state=True)
    state = state.detach()
    found = {}
    for hidden, rows in ((True, [0, 1]), (False, [1])):
        x_t = x[rows, 3].clone()
        mask = torch.tensor([hidden, False])[-len(rows) :]
        x_t[mask] = torch.nan
        layer.zero_grad()
        y, after = layer.step(x_t.requires_grad_(), state.reorder(torch.tensor(rows)), key_padding_mask=mask)
        (y.sum() + after.operators[0][0].sum()).backward()
        found[hidden] = {"x": x_t.grad[-1:].clone()} | {name: p.grad.clone() for name, p in layer.named_parameters()}
        assert not hidden or not x_t.grad[0].any()
    for name, want in found[False].items():
        assert float((found[True][name] - want).abs().max()) <= 1e-10 * float(want.abs().max()), name


# --- packed sequences ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["int64", "int32"])
@pytest.mark.parametrize(("options", "causal"), PADDED, ids=[layers.name_of(o) + str(c) for o, c in PADDED])
def test_packed(options: dict[str, Any], causal: bool, device: str) -> None:
    layer, x = make(options, causal=causal), tokens(shape=(1, TOKENS, D_MODEL))
    y = layer(x, cu_seqlens=torch.tensor(OFFSETS, dtype=getattr(torch, device))).detach()
    given = parameters(layer)
    for start, stop in pairwise(OFFSETS):
        if start == stop:
            continue
        own = x[:, start:stop].numpy()
        want = layers.batched(given, own, options, causal=causal)
        moved = layers.sensitivity(given, own, options, causal=causal)
        assert_close(y[:, start:stop], want, moved * layers.tolerance(options, TOKENS, UNIT))


@pytest.mark.parametrize("options", [CAUSAL[0], CAUSAL[4], RICH], ids=layers.name_of)
def test_packed_states(options: dict[str, Any]) -> None:
    """States of packed sequences are those of a batch: packed prefill goes on as a batch, and the other way round."""
    layer = make(options)
    rows = tokens(shape=(3, 9, D_MODEL))
    lengths = [4, 0, 6]
    want, last = zip(*(layer(rows[n : n + 1], return_state=True) for n in range(3)), strict=True)
    one = torch.cat([rows[n, : lengths[n]] for n in range(3)])[None]
    y, state = layer(one, return_state=True, cu_seqlens=torch.tensor([0, 4, 4, 10]))
    assert state.batch == 3
    assert [s.shape for s in state.tensors()] == [s.shape for s in layer.init_state(3).tensors()]
    assert state.position.tolist() == lengths
    # the rest: two tokens of the first and third, all but one of the second, packed; then one token each
    rest = torch.cat([rows[0, 4:6], rows[1, 0:8], rows[2, 6:8]])[None]
    z, state = layer(rest, state, return_state=True, cu_seqlens=torch.tensor([0, 2, 10, 12]))
    assert state.position.tolist() == [6, 8, 8]
    places = torch.tensor([6, 8, 8])
    last_y, state = layer.step(rows[torch.arange(3), places], state)
    bound = [allowed(layer, options, rows[n : n + 1]) for n in range(3)]
    assert_close(y[:, 0:4].detach(), want[0][:, :4].detach(), bound[0][:, :4])
    assert_close(y[:, 4:10].detach(), want[2][:, :6].detach(), bound[2][:, :6])
    assert_close(z[:, 0:2].detach(), want[0][:, 4:6].detach(), bound[0][:, 4:6])
    assert_close(z[:, 2:10].detach(), want[1][:, :8].detach(), bound[1][:, :8])
    assert_close(z[:, 10:12].detach(), want[2][:, 6:8].detach(), bound[2][:, 6:8])
    for n in range(3):
        assert_close(last_y[n].detach(), want[n][0, places[n]].detach(), bound[n][0, places[n]])
    assert_same_state(state.reorder(torch.tensor([1])), last[1])


def test_no_packed_sequences() -> None:
    layer = make(RICH)
    x = torch.zeros(1, 0, D_MODEL, dtype=torch.float64)
    y, state = layer(x, return_state=True, cu_seqlens=torch.tensor([0]))
    assert y.shape == x.shape
    assert state.batch == 0


def test_gradients_of_packed_sequences() -> None:
    """With states in and out: the same as one by one."""
    layer = make(RICH)
    x = tokens(shape=(1, TOKENS, D_MODEL)).requires_grad_()
    weights = tokens(3, shape=(1, TOKENS, D_MODEL))

    def loss(state: Any) -> Any:
        total = (state.operators[0].key_moment * 0.01).sum() + (state.windows[0] * 0.1).sum()
        return total + (state.operators[1][0] * 0.02).sum()

    prompt = tokens(4, shape=(6, 5, D_MODEL))
    _, before = layer(prompt, return_state=True)
    y, state = layer(x, before, return_state=True, cu_seqlens=torch.tensor(OFFSETS))
    ((y * weights).sum() + loss(state)).backward()
    found = {"x": x.grad.clone()} | {name: p.grad.clone() for name, p in layer.named_parameters()}
    layer.zero_grad()
    x.grad = None
    total = 0.0
    for n, (start, stop) in enumerate(pairwise(OFFSETS)):
        _, own = layer(prompt[n : n + 1], return_state=True)
        y, own = layer(x[:, start:stop], own, return_state=True)
        total = total + (y * weights[:, start:stop]).sum() + loss(own)
    total.backward()
    want = {"x": x.grad} | {name: p.grad for name, p in layer.named_parameters()}
    for name in want:
        assert float((found[name] - want[name]).abs().max()) <= 1e-9 * float(want[name].abs().max()), name


# --- states ----------------------------------------------------------------------------------------------------------


def test_states_are_not_written_to() -> None:
    layer, x = make(RICH), tokens()
    _, state = layer(x[:, :4], return_state=True)
    before = [s.clone() for s in state.tensors()]
    layer(x[:, 4:], state, return_state=True)
    layer.step(x[:, 4], state)
    assert all(torch.equal(a, b) for a, b in zip(before, state.tensors(), strict=True))


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("padded", [False, True])
def test_states_keep_no_token_alive(dtype: str, padded: bool) -> None:
    layer = make(RICH, dtype=getattr(torch, dtype))

    def kept(length: int) -> int:
        x = tokens(shape=(BATCH, length, D_MODEL)).to(layer.q_proj.weight.dtype)
        skipped = torch.zeros(BATCH, length, dtype=torch.bool)
        skipped[0, :3] = padded
        with torch.no_grad():
            state = layer(x, return_state=True, key_padding_mask=skipped if padded else None)[1]
        return sum(x.untyped_storage().nbytes() for x in state.tensors())

    assert kept(10) == kept(300)


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler")
def test_compiled_windows_keep_no_prompt() -> None:
    """The compiler returns a view where a copy of equal strides is asked for."""
    weight = torch.randn(4, 5)
    compiled = torch.compile(lambda x, window: Rows().convolve(x, window, weight)[1], fullgraph=True)
    window = compiled(torch.randn(1, 200, 5), torch.zeros(1, 3, 5))
    assert window.untyped_storage().nbytes() == 4 * window.numel()


def test_reorder_for_beams() -> None:
    layer, x = make(RICH), tokens()
    _, state = layer(x, return_state=True)
    index = torch.tensor([1, 1, 0])
    beams = state.reorder(index)
    assert beams.batch == 3
    y, _ = layer.step(x[index, 3], beams)
    want, _ = layer.step(x[:, 3], state)
    assert torch.allclose(y, want[index], rtol=1e-12, atol=1e-12)


def test_states_survive_copies() -> None:
    layer, x = make(RICH), tokens()
    _, state = layer(x, return_state=True)
    state = state.detach()
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    for again in (
        copy.deepcopy(state),
        pickle.loads(pickle.dumps(state)),
        torch.load(file, weights_only=True),
        state.to("cpu"),
        torch.utils._pytree.tree_map(lambda s: s.clone(), state),
    ):
        assert isinstance(again, LayerState)
        assert torch.equal(layer.step(x[:, 0], again)[0], layer.step(x[:, 0], state)[0])
    assert not any(s.requires_grad for s in state.tensors())
    assert state.to("meta").position.device.type == "meta"


def test_equal_tokens_make_equal_rows() -> None:
    """No row of a batch reaches another."""
    layer, x = make(RICH), tokens(shape=(3, TOKENS, D_MODEL))
    other = x.clone()
    other[1] = torch.randn_like(other[1])
    y, state = layer(x, return_state=True)
    z, other_state = layer(other, return_state=True)
    assert np.array_equal(y[[0, 2]].detach(), z[[0, 2]].detach())
    assert not torch.equal(y[1], z[1])
    keep = torch.tensor([0, 2])
    assert_same_state(state.reorder(keep), other_state.reorder(keep), 0.0)

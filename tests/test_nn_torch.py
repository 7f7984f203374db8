"""`hla.nn.torch`: the layer is what tests/layers.py says it is, in outputs and in the gradients of everything."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import numpy as np
import pytest

import budget
import hla
import layers
from layers import BATCH, BIDIRECTIONAL, CAUSAL, D_MODEL, DV, HEADS, TOKENS, D
from libraries import only

torch: Any = only("torch")

from hla.nn.torch import HigherOrderAttention, HigherOrderOperator  # noqa: E402

ALL = [(options, True) for options in CAUSAL] + [(options, False) for options in BIDIRECTIONAL]
NAMES = [layers.name_of(options) + ("" if causal else "-bidirectional") for options, causal in ALL]


def make(options: dict[str, Any], *, causal: bool = True, dtype: Any = None) -> Any:
    """A layer whose parameters are all drawn at random, the biases and norms included."""
    torch.manual_seed(5)
    sizes = {"d_model": D_MODEL, "num_heads": HEADS, "head_dim": D, "value_dim": DV}
    layer = HigherOrderAttention(**{**sizes, "causal": causal, "dtype": dtype or torch.float64, **options})
    with torch.no_grad():
        for name, p in layer.named_parameters():
            if "norm" in name:
                p.add_(0.3 * torch.randn_like(p))
            elif "bias" in name:
                p.add_(0.5 * torch.randn_like(p))
            elif "decay" in name:
                p.copy_(0.5 * torch.randn_like(p))
            else:
                p.mul_(1.5)
    return layer


def tokens(seed: int = 7, shape: tuple[int, ...] = (BATCH, TOKENS, D_MODEL)) -> Any:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


def parameters(layer: Any) -> dict[str, Any]:
    return {name: p.detach().double().numpy() for name, p in layer.named_parameters()}


def assert_close(out: Any, want: Any, allowed: Any, label: str = "") -> None:
    """(…, T, d_model) within `allowed` (…, T)."""
    apart = np.abs(np.asarray(out, dtype=np.float64) - np.asarray(want, dtype=np.float64)).max(-1)
    assert apart.shape == np.broadcast_shapes(apart.shape, np.shape(allowed))
    assert (apart <= allowed).all(), f"{label}: {(apart / allowed).max():.3g} times what is allowed"


# --- outputs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("options", "causal"), ALL, ids=NAMES)
def test_outputs(options: dict[str, Any], causal: bool) -> None:
    layer, x = make(options, causal=causal), tokens()
    given, at = parameters(layer), x.numpy()
    want = layers.batched(given, at, options, causal=causal)
    allowed = layers.sensitivity(given, at, options, causal=causal) * layers.tolerance(
        options, TOKENS, budget.UNIT["float64"]
    )
    assert np.median(allowed) < 1e-11 * np.abs(want).max(), "these options compare nothing"
    assert_close(layer(x).detach(), want, allowed)


@pytest.mark.parametrize(("options", "causal"), ALL[:6] + ALL[-2:], ids=NAMES[:6] + NAMES[-2:])
def test_outputs_in_float32(options: dict[str, Any], causal: bool) -> None:
    layer, x = make(options, causal=causal, dtype=torch.float32), tokens().float()
    given, at = parameters(layer), x.double().numpy()
    want = layers.batched(given, at, options, causal=causal)
    unit = layers.tolerance(options, TOKENS, budget.UNIT["float32"])
    y = layer(x)
    assert y.dtype == torch.float32
    assert_close(y.detach(), want, unit * layers.sensitivity(given, at, options, causal=causal))


@pytest.mark.parametrize("how", ["autocast", "parameters"])
@pytest.mark.parametrize("options", CAUSAL[::6], ids=layers.name_of)
def test_outputs_in_bfloat16(options: dict[str, Any], how: str) -> None:
    """What is rounded to 16 bits: x, W, projections, q, k, v, o, and the output: ten roundings at most in a row."""
    layer, x = make(options, dtype=torch.float32), tokens().float()
    if how == "parameters":
        layer, x = layer.bfloat16(), x.bfloat16()
    given, at = parameters(layer), x.double().numpy()
    want = layers.batched(given, at, options)
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        y, state = layer(x, return_state=True)
    assert y.dtype == torch.bfloat16
    assert all(s.dtype == torch.float32 for s in state.tensors()[:-1])
    allowed = budget.LAMBDA * 10**0.5 * budget.UNIT["bfloat16"] * layers.sensitivity(given, at, options)
    assert_close(y.detach().float(), want, allowed)


def test_float16_does_not_overflow_before_the_norm() -> None:
    """Unnormalised HLA₃ grows like t³: past 65504 within these tokens, while the layer's output is of order 1."""
    torch.manual_seed(0)
    layer = HigherOrderAttention(32, 2, operator="hla3", decay=None, conv_size=None, scale=1.0)
    x = torch.randn(1, 3, 32).repeat(1, 50, 1)
    with torch.autocast("cpu", torch.float16):
        y = layer(x)
    assert y.dtype == torch.float16
    assert torch.isfinite(y).all()


@pytest.mark.parametrize("how", [{"form": "recurrent"}, {"chunk_size": 3}, {"form": "scan"}, {"backend": "numpy"}])
def test_how_it_is_computed_changes_nothing(how: dict[str, Any]) -> None:
    """And it reaches the operator."""
    options = CAUSAL[4]
    layer, other, x = make(options), make({**options, **how}), tokens()
    given = parameters(layer)
    allowed = layers.sensitivity(given, x.numpy(), options) * layers.tolerance(options, TOKENS, budget.UNIT["float64"])
    assert_close(other(x).detach(), layer(x).detach(), 2 * allowed)
    for operator in other.operators:
        assert {name: getattr(operator.options, name) for name in how} == how


@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (2, 1), (0, 0)])
def test_empty(shape: tuple[int, int]) -> None:
    layer = make({"operator": layers.MIXED, "rotary": True})
    x = torch.zeros(*shape, D_MODEL, dtype=torch.float64)
    y, state = layer(x, return_state=True)
    assert y.shape == x.shape
    assert [s.shape for s in state.tensors()] == [s.shape for s in layer.init_state(shape[0]).tensors()]
    mask = torch.ones(shape, dtype=torch.bool)
    assert torch.equal(layer(x, key_padding_mask=mask), torch.zeros_like(x))


def test_dropout() -> None:
    """Features of the heads' outputs, in training only; with p they are 0 or 1/(1 − p) times as large."""
    layer = make({"operator": "hla2", "dropout": 0.25})
    seen: list[Any] = []
    layer.out_proj.register_forward_pre_hook(lambda module, given: seen.append(given[0].detach()))
    x = tokens()
    layer.eval()
    layer(x)
    layer.train()
    layer(x)
    kept = seen[1] / seen[0]
    assert torch.allclose(kept[kept != 0], torch.tensor(4 / 3, dtype=torch.float64))
    assert 0.15 < (kept == 0).double().mean() < 0.35


# --- gradients -------------------------------------------------------------------------------------------------------


def derivative(function: Any, step: float) -> float:
    """Of a function of a number at 0, by differences of fourth order."""
    near, far = function(step) - function(-step), function(2 * step) - function(-2 * step)
    return float((8 * near - far) / (12 * step))


def check_gradients(options: dict[str, Any], causal: bool, directions: dict[str, dict[str, Any]], step: float) -> None:
    """Derivatives of Σ c·y of the plain layer in these directions of parameters and x, by differences."""
    layer, x = make(options, causal=causal), tokens().requires_grad_()
    given, at = parameters(layer), x.detach().numpy()
    cotangent = np.random.default_rng(11).normal(size=at.shape)
    (layer(x) * torch.from_numpy(cotangent)).sum().backward()
    gradients = {name: p.grad.numpy() for name, p in layer.named_parameters()} | {"x": x.grad.numpy()}
    assert set(gradients) == {*given, "x"}
    total = float(np.abs(cotangent * layers.batched(given, at, options, causal=causal)).sum())
    for label, direction in directions.items():

        def loss(s: float, direction: dict[str, Any] = direction) -> float:
            moved = {name: p + s * direction.get(name, 0.0) for name, p in given.items()}
            y = layers.batched(moved, at + s * direction.get("x", 0.0), options, causal=causal)
            return float((cotangent * y).sum())

        coarse, fine = derivative(loss, 2 * step), derivative(loss, step)
        parts = {name: float((gradients[name] * direction[name]).sum()) for name in direction}
        size = float(sum(np.abs(gradients[name] * direction[name]).sum() for name in direction))
        # what the plain layer rounds, in differences; their truncation is what the two steps differ by
        noise = 1.5 * layers.tolerance(options, TOKENS, budget.UNIT["float64"]) * total / step
        allowed = abs(coarse - fine) + noise
        assert allowed < 1e-6 * size, f"{label}: these differences prove nothing"
        assert abs(sum(parts.values()) - fine) <= allowed, label


def random_direction(given: dict[str, Any]) -> dict[str, Any]:
    """Of all at once, so that every parameter has a like part in the derivative."""
    rng = np.random.default_rng(13)
    return {name: rng.normal(size=p.shape) for name, p in given.items()}


@pytest.mark.parametrize(("options", "causal"), ALL, ids=NAMES)
def test_gradients(options: dict[str, Any], causal: bool) -> None:
    layer = make(options, causal=causal)
    everything = {**parameters(layer), "x": tokens().numpy()}
    check_gradients(options, causal, {"all": random_direction(everything)}, 1e-6)  # small, for the kinks of relu


@pytest.mark.parametrize("options", [CAUSAL[4], CAUSAL[7], CAUSAL[12]], ids=layers.name_of)
def test_gradient_of_each_parameter(options: dict[str, Any]) -> None:
    everything = {**parameters(make(options)), "x": tokens().numpy()}
    check_gradients(options, True, {name: {name: y} for name, y in random_direction(everything).items()}, 2e-5)


@pytest.mark.parametrize("decay", ["learned", [1e-50, 1e-60, 1e-70]], ids=str)
def test_decays_that_round_to_zero(decay: Any) -> None:
    """Every token is alone, and nothing becomes NaN."""
    options = {"operator": layers.MIXED, "num_kv_heads": 3, "conv_size": None, "decay": decay}
    layer, x = make(options, dtype=torch.float32), tokens().float().requires_grad_()
    if decay == "learned":
        with torch.no_grad():
            layer.decay.bias.fill_(-200.0)
    y, state = layer(x, return_state=True)
    given, at = parameters(layer), x.detach().double().numpy()
    allowed = layers.sensitivity(given, at, options) * layers.tolerance(options, TOKENS, budget.UNIT["float32"])
    assert_close(y.detach(), layers.batched(given, at, options), allowed)
    after, _ = layer.step(x[:, 3], state)
    assert_close(after.detach(), layers.batched(given, at[:, 3:4], options)[:, 0], allowed[:, 3])
    y.square().sum().backward()
    assert all(torch.isfinite(g).all() for g in (x.grad, *(p.grad for p in layer.parameters())))


@pytest.mark.parametrize("power", [40, 66])
def test_outputs_as_large_as_after_millions_of_tokens(power: int) -> None:
    """Without a decay those of hla3 reach 1e18 and more. The output norm makes the same of them as of smaller ones;
    powers of two round nothing."""
    layer, x = make({"operator": layers.MIXED, "decay": None, "conv_size": None}, dtype=torch.float32), tokens().float()
    found = []
    for n in (10, power):
        layer.zero_grad()
        given = x.clone().requires_grad_()
        scaled = {**layer.state_dict(), "v_proj.weight": layer.v_proj.weight.detach() * 2.0**n}
        y = torch.func.functional_call(layer, scaled, (given,))
        y.backward(tokens(3).float())
        found.append((y.detach(), given.grad))
    for large, small in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(large, small, rtol=1e-6, atol=1e-6 * float(small.abs().max()))


def test_gradients_through_the_state() -> None:
    """Backwards through a state, and through what it holds besides outputs, as through the whole sequence."""
    layer, x = make({"operator": layers.MIXED, "num_kv_heads": 3, "rotary": True, "normalize": True}), tokens()
    weights = tokens(3)
    (layer(x) * weights).sum().backward()
    want = {name: p.grad.clone() for name, p in layer.named_parameters()}
    layer.zero_grad()
    first, state = layer(x[:, :4], return_state=True)
    second, state = layer(x[:, 4:9], state, return_state=True)
    third = torch.stack([(out := layer.step(x[:, t], state), state := out[1])[0][0] for t in (9, 10)], dim=1)
    (torch.cat([first, second, third], dim=1) * weights).sum().backward()
    for name, p in layer.named_parameters():
        assert torch.allclose(p.grad, want[name], rtol=1e-10, atol=1e-10 * float(want[name].abs().max())), name


def test_detached_states_cut_the_graph() -> None:
    layer, x = make({"operator": "hla2"}), tokens()
    first = x[:, :4].clone().requires_grad_()
    _, state = layer(first, return_state=True)
    assert all(s.requires_grad for s in state.tensors()[:-1])
    layer(x[:, 4:], state.detach()).sum().backward()
    assert first.grad is None


# --- the module around one operator ----------------------------------------------------------------------------------


@pytest.mark.parametrize("operator", ["linear_attention", "hla2", "ahla", "hla3"])
@pytest.mark.parametrize("normalize", [False, True])
def test_operator_module(operator: str, normalize: bool) -> None:
    """It is the public function, streaming included."""
    rng = np.random.default_rng(0)
    q, k, v = (torch.from_numpy(rng.normal(size=(2, 3, TOKENS, n))).abs() for n in (D, D, DV))
    told: dict[str, Any] = {"normalize": normalize, "scale": 0.3, "eps": 0.01, "decay": 0.9, "chunk_size": 4}
    told |= {"ridge": 0.2} if operator == "hla2" else {}
    module = HigherOrderOperator(operator, **told)
    want, want_state = getattr(hla, operator)(q, k, v, **told, return_state=True)
    o, state = module(q, k, v, return_state=True)
    assert torch.equal(o, want)
    assert all(torch.equal(a, b) for a, b in zip(state, want_state, strict=True))
    state = module.init_state((2, 3), D, DV, dtype=torch.float64)
    o, state = module(q[:, :, :7], k[:, :, :7], v[:, :, :7], state, return_state=True)
    pieces = [o]
    for t in range(7, TOKENS):
        o_t, state = module.step(q[:, :, t], k[:, :, t], v[:, :, t], state)
        pieces.append(o_t[:, :, None])
    bound = 5 * (3 * (2 * TOKENS + D + 4)) ** 0.5 * budget.UNIT["float64"] * float(want.abs().max()) * 10
    assert float((torch.cat(pieces, 2) - want).abs().max()) < bound
    assert not list(module.parameters())


def test_operator_module_takes_what_belongs_to_a_call() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (torch.from_numpy(rng.normal(size=(2, TOKENS, 3, n))) for n in (D, D, DV))
    log_decay = -torch.from_numpy(rng.exponential(size=(2, 3, TOKENS)))
    mask = torch.from_numpy(rng.random((2, 1, TOKENS)) < 0.7)
    module = HigherOrderOperator("ahla")
    o = module(q, k, v, log_decay=log_decay, token_mask=mask, axis=-3)
    assert torch.equal(o, hla.ahla(q, k, v, log_decay=log_decay, token_mask=mask, axis=-3))
    offsets = torch.tensor([0, 4, 4, TOKENS])
    decay = torch.tensor([0.5, 0.9, 1.0], dtype=torch.float64)
    o, state = module(q, k, v, decay=decay, cu_seqlens=offsets, axis=-3, return_state=True)
    assert torch.equal(o, hla.ahla(q, k, v, decay=decay, cu_seqlens=offsets, axis=-3))
    again = module(q, k, v, state, decay=decay, cu_seqlens=offsets, axis=-3)
    assert torch.equal(again, hla.ahla(q, k, v, decay=decay, cu_seqlens=offsets, axis=-3, initial_state=state))
    bidirectional = HigherOrderOperator("ahla", causal=False)
    assert torch.equal(bidirectional(q, k, v, axis=-3), hla.ahla(q, k, v, axis=-3, mask="none"))


# --- what the layer says of itself -----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", CAUSAL[::4], ids=layers.name_of)
def test_state_bytes(options: dict[str, Any]) -> None:
    layer = make(options, dtype=torch.float32)
    state = layer.init_state(3)
    assert layer.state_bytes(3) == state.nbytes == sum(x.numel() * x.element_size() for x in state.tensors())
    _, after = layer(tokens().float(), return_state=True)
    assert after.nbytes == layer.state_bytes(BATCH)
    assert make(BIDIRECTIONAL[0], causal=False).state_bytes(3) == 0


def test_key_only_state_is_stored_once_per_key_value_head() -> None:
    for decay in ("forget_gate", "learned", 0.9, None, NUMBERS_OF_3):
        layer = make({"operator": "hla2", "num_kv_heads": 3, "decay": decay})
        mask = torch.zeros(BATCH, TOKENS, dtype=torch.bool)
        for state in (layer.init_state(BATCH), layer(tokens(), None, True, key_padding_mask=mask)[1]):
            assert state.operators[0].key_moment.shape == (BATCH, 3, 1, D, D)
            assert state.operators[0].corrected_state.shape == (BATCH, 3, 2, D, DV)


NUMBERS_OF_3 = layers.NUMBERS[3]


def test_flops() -> None:
    """Projections by hand, operators from `hla.cost`; twice the batch is twice the work."""
    layer = make({"operator": layers.MIXED, "num_kv_heads": 3, "conv_size": 4, "decay": "forget_gate"})
    widths = {"q": HEADS * D, "k": 3 * D, "v": 3 * DV}
    gate = out = HEADS * DV
    per_token = 2 * D_MODEL * (sum(widths.values()) + gate + out + 3) + 2 * 4 * sum(widths.values())
    operators = sum(
        hla.cost(name, T=TOKENS, d=D, dv=DV, heads=len(list(heads))).flops
        for name, heads in itertools.groupby(sorted(layers.MIXED))
    )
    assert layer.flops(TOKENS) == per_token * TOKENS + operators
    assert layer.flops(TOKENS, batch=5) == 5 * layer.flops(TOKENS)


def test_repr_shows_the_options() -> None:
    text = repr(make({"operator": layers.MIXED, "rotary": True, "feature_map": "relu", "dropout": 0.1, "decay": 0.9}))
    for part in (
        "13, 6",
        "head_dim=8",
        "value_dim=7",
        "operator=['hla2', 'ahla'",
        "rotary=True",
        "'relu'",
        "dropout=0.1",
    ):
        assert part in text
    assert "decay=0.9" in text
    assert "0.9, 0.6" in repr(make({"operator": "hla2", "num_kv_heads": 3, "decay": [0.9, 0.6, 1.0]}))
    text = repr(make({"operator": "hla2", "normalize": True, "eps": 0.25, "qk_norm": "l2", "norm_eps": 0.125}))
    assert "normalize=True, eps=0.25)" in text
    assert "UnitLength(eps=0.125)" in text


def test_names_of_the_contract() -> None:
    names = inspect.signature(HigherOrderAttention).parameters
    assert list(names)[:2] == ["d_model", "num_heads"]
    assert names["operator"].default == "hla2"
    assert names["num_kv_heads"].default is None
    assert {"device", "dtype", "bias", "dropout"} <= set(names)
    call = inspect.signature(HigherOrderAttention.forward).parameters
    assert list(call)[:4] == ["self", "x", "state", "return_state"]
    assert call["return_state"].default is False

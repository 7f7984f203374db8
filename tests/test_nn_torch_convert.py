"""`hla.nn.convert`: converted attention is the operator on the projections that were there, in every model it is in.

Judge. `recomputed` takes the weights out of the `nn.MultiheadAttention` and sums linear attention in float64 NumPy.

Tolerance. Three projections and a bias (E + 1 sums each), a score (d) and a sum over tokens (T) lie on the way to an
output: n = 3 (E + 1) + d + T roundings at most. In the model of tests/budget.py the error is at most λ √n u times the
same computation with everything positive.
"""

from __future__ import annotations

import copy
import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import budget
import hla
from libraries import only

torch: Any = only("torch")

from torch import nn  # noqa: E402

from hla.nn.torch import ConvertedAttention, HigherOrderAttention, convert, from_projections  # noqa: E402

BATCH, TOKENS, HEADS, D = 2, 11, 3, 5
WIDTH = HEADS * D
BARE: dict[str, Any] = {"decay": None, "qk_norm": None, "output_norm": False}
"""linear attention with these is the softmax attention without the softmax"""


def multihead(**options: Any) -> Any:
    torch.manual_seed(2)
    options = {"batch_first": True, "dtype": torch.float64, **options}
    block = nn.MultiheadAttention(WIDTH, HEADS, **options)
    with torch.no_grad():
        for p in block.parameters():
            p.copy_(torch.randn_like(p))
    return block


def tokens(seed: int = 7, shape: tuple[int, ...] = (BATCH, TOKENS, WIDTH)) -> Any:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


def weights(block: Any) -> dict[str, Any]:
    return {name: p.detach().numpy().astype(np.float64) for name, p in block.named_parameters()}


def recomputed(given: dict[str, Any], x: Any, *, causal: bool = True, absolute: bool = False) -> Any:
    """Linear attention of one sequence x (T, E) with the weights of an `nn.MultiheadAttention`."""
    if absolute:
        given, x = {name: np.abs(p) for name, p in given.items()}, np.abs(x)
    zeros = np.zeros(3 * WIDTH)
    qkv = x @ given["in_proj_weight"].T + given.get("in_proj_bias", zeros)
    made = np.zeros_like(x)
    for head in range(HEADS):
        q, k, v = (qkv[:, i * WIDTH + head * D : i * WIDTH + (head + 1) * D] for i in range(3))
        for t in range(len(x)):
            for j in range(t + 1 if causal else len(x)):
                made[t, head * D : (head + 1) * D] += q[t] @ k[j] / math.sqrt(D) * v[j]
    return made @ given["out_proj.weight"].T + given.get("out_proj.bias", zeros[:WIDTH])


def assert_recomputed(y: Any, given: dict[str, Any], x: Any, *, causal: bool = True) -> None:
    """y of one sequence, within its budget."""
    y, x = y.detach().numpy(), x.numpy()
    n = 3 * (WIDTH + 1) + D + TOKENS
    allowed = budget.LAMBDA * math.sqrt(n) * budget.UNIT["float64"] * recomputed(given, x, causal=causal, absolute=True)
    assert (np.abs(y - recomputed(given, x, causal=causal)) <= allowed).all()


# --- one block -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_projections_are_kept(bias: bool, batch_first: bool, causal: bool) -> None:
    block = multihead(bias=bias, batch_first=batch_first)
    given, x = weights(block), tokens()
    new, report = convert(block, "linear_attention", causal=causal, **BARE)
    assert report.replaced == ("",)
    assert report.left == {}
    at = x if batch_first else x.transpose(0, 1)
    y, nothing = new(at, at, at)
    assert nothing is None
    assert y.shape == at.shape
    y = y if batch_first else y.transpose(0, 1)
    for i in range(BATCH):
        assert_recomputed(y[i], given, x[i], causal=causal)
    y, _ = new(x[0], x[0], x[0])  # without a batch
    assert_recomputed(y, given, x[0], causal=causal)


def test_the_original_is_not_touched_and_shares_nothing() -> None:
    block = multihead()
    before = weights(copy.deepcopy(block))
    new, _ = convert(block)
    with torch.no_grad():
        for p in new.parameters():
            p.add_(1.0)
    assert all(np.array_equal(p, before[name]) for name, p in weights(block).items())


def test_state_dict() -> None:
    new, _ = convert(multihead(), "linear_attention", **BARE)
    names = [f"attention.{name}_proj.{x}" for name in ("q", "k", "v", "out") for x in ("weight", "bias")]
    assert list(new.state_dict()) == names
    other, _ = convert(nn.MultiheadAttention(WIDTH, HEADS, dtype=torch.float64), "linear_attention", **BARE)
    other.load_state_dict(new.state_dict())
    assert all(torch.equal(x, y) for x, y in zip(new.parameters(), other.parameters(), strict=True))


def test_no_part_with_random_weights_unless_asked_for() -> None:
    """But for the forget gate, whose start is near a constant."""
    new, _ = convert(multihead())
    drawn = [name for name in new.state_dict() if not name.split(".")[1].endswith("_proj")]
    assert drawn == [
        f"attention.{x}"
        for x in ("q_norm.weight", "k_norm.weight", "decay.bias", "decay.proj.weight", "output_norm.weight")
    ]
    new, _ = convert(multihead(), conv_size=4, output_gate=True)
    assert new.attention.q_conv is not None
    assert new.attention.output_gate is not None


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("training", [True, False])
def test_dtype_mode_and_dropout(dtype: str, training: bool) -> None:
    block = multihead(dtype=getattr(torch, dtype), dropout=0.25).train(training)
    new, _ = convert(block, decay=0.9)
    assert {p.dtype for p in new.parameters()} == {getattr(torch, dtype)}
    assert all(x.training is training for x in new.modules())
    assert new.attention.options.dropout == 0.25
    assert convert(block, dropout=0.1)[0].attention.options.dropout == 0.1
    x = tokens().to(getattr(torch, dtype))
    torch.manual_seed(0)
    assert torch.equal(new(x, x, x)[0], new(x, x, x)[0]) is not training


def test_meta_device() -> None:
    new, _ = convert(nn.MultiheadAttention(WIDTH, HEADS, device="meta"))
    assert all(p.is_meta for p in new.parameters())


def test_frozen_weights_stay_frozen() -> None:
    block = multihead()
    block.in_proj_weight.requires_grad_(False)
    block.out_proj.bias.requires_grad_(False)
    with torch.no_grad():
        new, _ = convert(block, decay=0.9)
    frozen = {name.removeprefix("attention.") for name, p in new.named_parameters() if not p.requires_grad}
    assert frozen == {"q_proj.weight", "k_proj.weight", "v_proj.weight", "out_proj.bias"}


def test_generation_after_conversion() -> None:
    """The layer inside has a state."""
    new, _ = convert(multihead(), rotary=False, decay=0.9)
    x = tokens()
    whole, _ = new(x, x, x)
    _, state = new.attention(x[:, :-1], return_state=True)
    y, _ = new.attention.step(x[:, -1], state)
    assert torch.allclose(y, whole[:, -1], rtol=1e-11, atol=1e-12)


# --- masks -----------------------------------------------------------------------------------------------------------


def causal_masks(length: int) -> dict[str, Any]:
    blocked = torch.ones(length, length, dtype=torch.bool).triu(1)
    return {"bool": blocked, "float": nn.Transformer.generate_square_subsequent_mask(length, dtype=torch.float64)}


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_the_causal_mask_changes_nothing(kind: str) -> None:
    new, _ = convert(multihead())
    x, mask = tokens(), causal_masks(TOKENS)[kind]
    assert torch.equal(new(x, x, x, attn_mask=mask)[0], new(x, x, x)[0])
    assert torch.equal(new(x, x, x, attn_mask=mask, is_causal=True)[0], new(x, x, x)[0])


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("batch_first", [True, False])
def test_padding(kind: str, batch_first: bool) -> None:
    new, _ = convert(multihead(batch_first=batch_first))
    x = tokens()
    padding = torch.zeros(BATCH, TOKENS, dtype=torch.bool)
    padding[0, 8:] = True
    mask = padding if kind == "bool" else torch.zeros(padding.shape).masked_fill(padding, -torch.inf)
    at = x if batch_first else x.transpose(0, 1)
    y = new(at, at, at, key_padding_mask=mask)[0]
    y = y if batch_first else y.transpose(0, 1)
    short = x[:1, :8]
    short = short if batch_first else short.transpose(0, 1)
    alone = new(short, short, short)[0]
    assert torch.allclose(y[0, :8], alone[0] if batch_first else alone[:, 0], rtol=1e-12, atol=1e-13)
    assert not y[0, 8:].any()
    one = new(x[0], x[0], x[0], key_padding_mask=mask[0])[0]
    assert torch.allclose(one, y[0], rtol=1e-12, atol=1e-13)


def refused_calls() -> dict[str, tuple[bool, Any, type[Exception], str]]:
    """(causal, keywords of the call, error, a part of its message)."""
    other = causal_masks(TOKENS)["bool"].clone()
    other[3, 1] = True
    biased = causal_masks(TOKENS)["float"].clone()
    biased[3, 1] = 0.5
    return {
        "another mask": (True, {"attn_mask": other}, hla.OptionError, "skip"),
        "all tokens": (True, {"attn_mask": torch.zeros_like(other)}, hla.OptionError, "causal mask"),
        "a bias": (True, {"attn_mask": biased}, hla.OptionError, "bias"),
        "an integer mask": (True, {"attn_mask": other.long()}, hla.DTypeError, "bool"),
        "a mask of another length": (True, {"attn_mask": other[:-1, :-1], "is_causal": True}, hla.ShapeError, "shape"),
        "one mask a head": (True, {"attn_mask": other[None].expand(BATCH * HEADS, -1, -1)}, hla.ShapeError, "shape"),
        "causal mask, bidirectional": (False, {"attn_mask": ~other}, hla.OptionError, "causal=True"),
        "hint, bidirectional": (False, {"is_causal": True}, hla.OptionError, "is_causal=True"),
        "weights": (True, {"need_weights": True}, hla.OptionError, "need_weights"),
        "a padding mask with biases": (
            True, {"key_padding_mask": torch.ones(BATCH, TOKENS)}, hla.OptionError, "key_padding_mask"),
        "padding of another batch": (
            True, {"key_padding_mask": torch.zeros(1, TOKENS, dtype=torch.bool)}, hla.ShapeError, "key_padding_mask"),
    }  # fmt: skip


@pytest.mark.parametrize("name", refused_calls())
def test_refused_calls(name: str) -> None:
    causal, keywords, error, said = refused_calls()[name]
    new, _ = convert(multihead(), causal=causal)
    x = tokens()
    with pytest.raises(error, match=said):
        new(x, x, x, **keywords)


def test_cross_attention_is_refused_in_a_call() -> None:
    new, _ = convert(multihead())
    x = tokens()
    watched = x.clone().requires_grad_()
    for k, v in ((x.clone(), x), (x, x.clone()), (x[:1], x)):
        with pytest.raises(hla.OptionError, match="skip"):
            new(x, k, v)
    with pytest.raises(hla.OptionError, match="skip"):
        new(watched, watched.detach(), watched)
    assert torch.equal(new(x[:], x[:], x[:])[0], new(x, x, x)[0])  # views of the same


# --- models ----------------------------------------------------------------------------------------------------------


class Tiny(nn.Module):
    """An encoder, a decoder's layer, one attention in two places, and something else."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 7, batch_first=True, dtype=torch.float64)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoderLayer(WIDTH, HEADS, 7, batch_first=True, dtype=torch.float64)
        self.first = multihead()
        self.rest = nn.ModuleList([nn.Linear(WIDTH, WIDTH), self.first])


def test_a_whole_model() -> None:
    model = Tiny()
    kept = model.decoder.multihead_attn
    same, report = convert(model, "ahla", decay=0.9)
    assert same is model
    assert report.replaced == (
        "encoder.layers.0.self_attn",
        "encoder.layers.1.self_attn",
        "decoder.self_attn",
        "first",
        "rest.1",
    )
    assert report.left == {"decoder.multihead_attn": "cross-attention"}
    assert model.decoder.multihead_attn is kept
    assert model.first is model.rest[1]
    for name in report.replaced:
        assert isinstance(model.get_submodule(name), ConvertedAttention)
    assert "replaced: first" in str(report)
    assert "left alone: decoder.multihead_attn: cross-attention" in str(report)
    assert model.decoder(tokens(), tokens(8)).shape == (BATCH, TOKENS, WIDTH)


@pytest.mark.parametrize("norm_first", [False, True])
def test_encoder_layers_have_no_fast_path(norm_first: bool) -> None:
    """In evaluation without gradients torch would call its own kernel for softmax attention."""
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 7, batch_first=True, dtype=torch.float64, norm_first=norm_first)
    layer.eval()
    before = copy.deepcopy(layer)
    convert(layer, decay=0.9)
    x = tokens()
    with torch.no_grad():
        quick = layer(x)
        assert not torch.allclose(quick, before(x))
    slow = layer(x)
    assert torch.equal(quick, slow.detach())
    mask = causal_masks(TOKENS)["float"]
    assert torch.equal(layer(x, mask, is_causal=True), slow)
    assert torch.equal(layer(x, mask), slow)


def test_an_encoder_with_padding_in_evaluation() -> None:
    """Before, padding would have become a nested tensor, for the fast path only."""
    layer = nn.TransformerEncoderLayer(2 * WIDTH, 2 * HEADS, 7, batch_first=True, dtype=torch.float64)
    model = nn.TransformerEncoder(layer, 2).eval()
    assert model.use_nested_tensor
    convert(model, decay=0.9)
    x = tokens(7, (BATCH, TOKENS, 2 * WIDTH))
    padding = torch.zeros(BATCH, TOKENS, dtype=torch.bool)
    padding[1, 6:] = True
    with torch.no_grad():
        y = model(x, src_key_padding_mask=padding)
        alone = model(x[1:, :6])
        masked = model(x, mask=causal_masks(TOKENS)["bool"], src_key_padding_mask=padding)
    assert torch.allclose(y[1:, :6], alone, rtol=1e-12, atol=1e-13)
    assert torch.equal(masked, y)


def test_training_after_conversion() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 7, dropout=0.0, batch_first=True, dtype=torch.float64)
    convert(layer)
    x, target = tokens(), tokens(9)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.02)
    losses = []
    for _ in range(20):
        loss = (layer(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert all(p.grad is not None and p.grad.any() for p in layer.self_attn.parameters())


# --- what is left alone, and what is refused -------------------------------------------------------------------------


class Own(nn.MultiheadAttention):
    pass


def alone() -> dict[str, tuple[Any, str]]:
    hooked = multihead()
    hooked.out_proj.register_forward_hook(lambda *_: None)
    weighted = multihead()
    nn.utils.parametrizations.weight_norm(weighted.out_proj)
    mixed = multihead()
    mixed.out_proj.float()
    return {
        "kdim": (multihead(kdim=7), "kdim=7"),
        "vdim": (multihead(vdim=7), "vdim=7"),
        "bias_kv": (multihead(add_bias_kv=True), "add_bias_kv"),
        "zero_attn": (multihead(add_zero_attn=True), "add_zero_attn"),
        "subclass": (Own(WIDTH, HEADS), "subclass"),
        "hooks": (hooked, "hooks"),
        "parametrization": (weighted, "parametrizations"),
        "dtypes": (mixed, "torch.float32"),
    }


@pytest.mark.parametrize("name", alone())
def test_left_alone(name: str) -> None:
    block, reason = alone()[name]
    model = nn.ModuleDict({"odd": block, "usual": multihead()})
    _, report = convert(model)
    assert report.replaced == ("usual",)
    assert reason in report.left["odd"]
    assert model["odd"] is block
    with pytest.raises(hla.OptionError, match="blocks=") as refused:
        convert(block)
    assert reason in str(refused.value)


def test_blocks_that_share_weights_are_left_alone() -> None:
    """Copies would part them. A block in two places is one, and stays one."""
    model = nn.ModuleDict({name: multihead() for name in ("a", "b", "c", "d")})
    model["b"].in_proj_weight = model["a"].in_proj_weight
    model["c"].out_proj = nn.Linear(WIDTH, WIDTH, dtype=model["c"].in_proj_weight.dtype)
    model["elsewhere"] = nn.ParameterList([model["c"].out_proj.weight])
    model["e"] = model["d"]
    _, report = convert(model)
    assert report.replaced == ("d", "e")
    assert set(report.left) == {"a", "b", "c"}
    assert all("same weights" in reason for reason in report.left.values())
    assert model["d"] is model["e"]


def test_skip() -> None:
    model = Tiny()
    kept = model.encoder.layers[0].self_attn
    _, report = convert(model, skip=["encoder.layers.0.self_attn", "rest.1"])
    assert report.left["encoder.layers.0.self_attn"] == "in skip"
    assert model.encoder.layers[0].self_attn is kept
    assert isinstance(model.first, ConvertedAttention)
    assert model.rest[1] is not model.first


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"skip": "frist"}, hla.OptionError, "frist"),
        ({"operator": "hla4"}, hla.OptionError, "operator"),
        ({"operator": ["hla2", "ahla"]}, hla.OptionError, "num_heads = 3"),
        ({"num_heads": 5}, hla.OptionError, "num_heads"),
        ({"bias": True}, hla.OptionError, "bias"),
        ({"dtype": torch.float32}, hla.OptionError, "dtype"),
        ({"rotary": True}, hla.OptionError, "even"),
        ({"causal": False, "decay": 0.9}, hla.OptionError, "decay"),
        ({"colour": "red"}, TypeError, "colour"),
    ],
    ids=str,
)
def test_after_an_error_the_model_is_as_it_was(options: dict[str, Any], error: type[Exception], said: str) -> None:
    model = Tiny()
    before = list(model.named_modules(remove_duplicate=False))
    with pytest.raises(error, match=said):
        convert(model, **options)
    assert list(model.named_modules(remove_duplicate=False)) == before
    assert all(x is y for (_, x), (_, y) in zip(before, model.named_modules(remove_duplicate=False), strict=True))


def test_nothing_to_convert() -> None:
    with pytest.raises(hla.OptionError, match="blocks="):
        convert(nn.Sequential(nn.Linear(3, 5)))
    with pytest.raises(hla.DTypeError, match="Module"):
        convert("model")


# --- blocks of other kinds -------------------------------------------------------------------------------------------


class Packed(nn.Module):
    """A block of user code around scaled_dot_product_attention, with grouped heads."""

    KV = 1

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * self.KV) * D, bias=False, dtype=torch.float64)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64)

    def forward(self, x: Any) -> Any:
        q, k, v = self.qkv(x).split([WIDTH, self.KV * D, self.KV * D], -1)
        q, k, v = (y.unflatten(-1, (-1, D)).transpose(1, 2) for y in (q, k, v))
        o = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(o.transpose(1, 2).flatten(-2))


def from_packed(block: Any, **options: Any) -> Any:
    q, k, v = block.qkv.weight.split([WIDTH, block.KV * D, block.KV * D])
    return from_projections(q, k, v, block.out, num_heads=HEADS, num_kv_heads=block.KV, **options)


def test_blocks_by_a_builder() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=torch.float64), Packed(), Packed())
    kept, old = model[2], model[1]
    _, report = convert(
        model,
        "linear_attention",
        blocks={Packed: lambda block, **options: None if block is kept else from_packed(block, **options)},
        **BARE,
    )
    assert report.replaced == ("1",)
    assert report.left == {"2": "its builder returned None"}
    assert isinstance(model[1], HigherOrderAttention)
    assert model[1].training is old.training
    q, k, v = old.qkv.weight.split([WIDTH, D, D])
    packed = {
        "in_proj_weight": torch.cat([q, k.repeat(HEADS, 1), v.repeat(HEADS, 1)]).detach().numpy(),
        "out_proj.weight": old.out.weight.detach().numpy(),
    }
    x = tokens()
    assert_recomputed(model[1](x)[1], packed, x[1])


def test_a_builder_must_return_a_module() -> None:
    with pytest.raises(hla.DTypeError, match=r"blocks\[Packed\]"):
        convert(nn.Sequential(Packed()), blocks={Packed: lambda block, **options: block.qkv.weight})


def test_parts_of_a_parameter_stay_trainable_or_frozen() -> None:
    block = Packed()
    with torch.no_grad():
        assert all(p.requires_grad for p in from_packed(block, decay=0.9).parameters())
    block.qkv.weight.requires_grad_(False)
    made = from_packed(block, decay=0.9)
    assert [made.k_proj.weight.requires_grad, made.out_proj.weight.requires_grad] == [False, True]


@pytest.mark.parametrize(("dtype", "device"), [("bfloat16", "cpu"), ("float64", "cpu"), ("float32", "meta")])
def test_pairs_of_weight_and_bias(dtype: str, device: str) -> None:
    packed = nn.Linear(WIDTH, 3 * WIDTH, dtype=getattr(torch, dtype), device=device)
    packed.bias.requires_grad_(False)
    out = nn.Linear(WIDTH, WIDTH, dtype=packed.weight.dtype, device=device)
    pairs = list(zip(packed.weight.chunk(3), packed.bias.chunk(3), strict=True))
    layer = from_projections(*pairs, (out.weight, out.bias), num_heads=HEADS, decay=0.9)
    made = (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj)
    for projection, (weight, bias) in zip(made, [*pairs, (out.weight, out.bias)], strict=True):
        assert (projection.weight.dtype, projection.weight.device) == (weight.dtype, weight.device)
        assert projection.weight.requires_grad
        assert projection.bias.requires_grad is bias.requires_grad
        if device == "cpu":
            assert torch.equal(projection.weight, weight)
            assert torch.equal(projection.bias, bias)
    bare = [(weight, None) for weight, _ in pairs]
    assert from_projections(*bare, out.weight, num_heads=HEADS).q_proj.bias is None


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"q": (torch.zeros(WIDTH, WIDTH), torch.zeros(1))}, hla.ShapeError, r"q: expected a bias .*, got \(1,\)"),
        ({"q": (torch.zeros(WIDTH, WIDTH), 0.0)}, hla.ShapeError, "q: expected a bias .*, got float"),
        ({"q": (1, 2)}, hla.DTypeError, "q: expected an nn.Linear, .*, got int"),
        ({"num_heads": 2}, hla.ShapeError, "2 query"),
        ({"num_heads": 0}, hla.OptionError, "num_heads"),
        ({"num_kv_heads": 2}, hla.ShapeError, "2 key/value"),
        ({"k": torch.zeros(D + 1, WIDTH)}, hla.ShapeError, "k "),
        ({"k": torch.zeros(WIDTH)}, hla.DTypeError, "k"),
        ({"k": torch.zeros(WIDTH, WIDTH, dtype=torch.int64)}, hla.DTypeError, "int64"),
        ({"out": nn.Linear(WIDTH, WIDTH, bias=True)}, hla.OptionError, "bias"),
        ({"out": nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64)}, hla.DTypeError, "torch.float64"),
        ({"head_dim": 5}, hla.OptionError, "head_dim"),
    ],
    ids=str,
)
def test_projections_that_do_not_fit(change: dict[str, Any], error: type[Exception], said: str) -> None:
    given: dict[str, Any] = {name: nn.Linear(WIDTH, WIDTH, bias=False) for name in ("q", "k", "v", "out")}
    with pytest.raises(error, match=said):
        from_projections(**{**given, "num_heads": HEADS, **change})


# --- with the rest ---------------------------------------------------------------------------------------------------


def test_compiled() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 7, batch_first=True, dtype=torch.float64).eval()
    convert(layer, decay=0.9)
    x = tokens()
    torch._dynamo.reset()
    fast = torch.compile(layer, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert torch.allclose(fast(x), layer(x), rtol=1e-12, atol=1e-13)
    torch._dynamo.reset()


def test_importing_layers_imports_no_framework() -> None:
    script = """
import sys, hla
assert "convert" in dir(hla.nn) and "torch" not in sys.modules
hla.nn.convert
assert "torch" in sys.modules
try:
    hla.nn.no_such_name
except AttributeError as error:
    assert "no_such_name" in str(error)
"""
    subprocess.run([sys.executable, "-c", script], check=True)
    assert hla.nn.convert is convert

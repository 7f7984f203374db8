"""`hla.integrations.transformers.register`: operators as attention functions of models that exist, and conversion.

Judge. The function alone is held against the sums of tests/oracle.py, head by head. In models what is padded or packed
is held against each sequence alone, and the number of calls says that the operator ran, not softmax.

Tolerance. That of tests/budget.py for the function. In a model two computations of the same logits differ by λ √n u
times how far logits move when all parameters move by a relative u, n = layers (s (2 T + d + 4) + 6 width) roundings.
Transformers computes rotary angles in float32, whatever the model's dtype, so positions are told where tokens move.
"""

from __future__ import annotations

import copy
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ["HF_HUB_OFFLINE"] = "1"

import budget
import hla
from libraries import only

torch: Any = only("torch")
transformers: Any = pytest.importorskip("transformers")

from torch import nn  # noqa: E402
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, DynamicCache  # noqa: E402
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaAttention  # noqa: E402

from hla.integrations.transformers import HLACache, HLACacheLayer, cache_layer, register  # noqa: E402
from hla.integrations.transformers.model import CACHE  # noqa: E402
from hla.nn.torch import HigherOrderAttention, from_projections  # noqa: E402

BATCH, TOKENS, HEADS, KV_HEADS, D, DV, WIDTH, VOCABULARY, DEPTH = 2, 11, 6, 3, 8, 5, 18, 31, 2
OPERATORS = ("linear_attention", "hla2", "ahla", "hla3")
UNIT = budget.UNIT["float64"]
FED_FORWARD = {"vocab_size": VOCABULARY, "intermediate_size": 20, "num_hidden_layers": DEPTH}
GROUPED = {**FED_FORWARD, "hidden_size": WIDTH, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
ENCODER = {**FED_FORWARD, "hidden_size": WIDTH, "num_attention_heads": 3, "attention_probs_dropout_prob": 0.0}


@pytest.fixture(autouse=True)
def registered() -> None:
    assert register() == OPERATORS


def llama(**told: Any) -> Any:
    return transformers.LlamaConfig(**{**GROUPED, "head_dim": D, **told})


def gpt2(**told: Any) -> Any:
    sizes = {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": DEPTH, "n_head": 3, "n_positions": 40}
    return transformers.GPT2Config(**{**sizes, "attn_pdrop": 0.0, **told})


CONFIGS: dict[str, Any] = {
    "llama": llama,
    "qwen2": lambda: transformers.Qwen2Config(**{**GROUPED, "hidden_size": 24}),
    "qwen3": lambda: transformers.Qwen3Config(**GROUPED, head_dim=D),
    "mistral": lambda: transformers.MistralConfig(**GROUPED, head_dim=D, sliding_window=4096),
    "gpt2": gpt2,
    "opt": lambda: transformers.OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        word_embed_proj_dim=WIDTH,
        ffn_dim=20,
        num_hidden_layers=DEPTH,
        num_attention_heads=3,
        max_position_embeddings=40,
        attention_dropout=0.0,
    ),
    "bert": lambda: transformers.BertConfig(**ENCODER),
}


def make(name: str = "llama", attention: str = "hla2", **told: Any) -> Any:
    """A model whose attention matters: weights larger than at the start of training."""
    torch.manual_seed(0)
    auto = AutoModelForMaskedLM if name == "bert" else AutoModelForCausalLM
    model = auto.from_config(CONFIGS[name](**told), attn_implementation=attention).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6.0) if parameter.ndim > 1 else parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def text(seed: int = 1, shape: tuple[int, ...] = (BATCH, TOKENS)) -> Any:
    return torch.from_numpy(np.random.default_rng(seed).integers(3, VOCABULARY, size=shape))


def allowed(model: Any, tokens: Any) -> Any:
    """How far logits (B, T) may be off."""
    want, step = model(tokens, use_cache=False).logits.detach() if has_cache(model) else model(tokens).logits, 1e-6
    moved, moving = want.abs().amax(-1), copy.deepcopy(model)
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        with torch.no_grad():
            for p, q in zip(model.parameters(), moving.parameters(), strict=True):
                q.copy_(p * (1 + step * torch.randn(p.shape, dtype=p.dtype, generator=generator)))
            moved = moved.maximum((moving(tokens).logits - want).abs().amax(-1) / step)
    n = DEPTH * (3 * (2 * tokens.shape[1] + D + 4) + 6 * WIDTH)
    return budget.LAMBDA * math.sqrt(n) * UNIT * moved.detach()


def has_cache(model: Any) -> bool:
    return model.config.model_type != "bert"


def assert_close(found: Any, want: Any, bound: Any) -> None:
    apart = (found - want).detach().abs().amax(-1)
    assert bool((apart <= bound).all()), float((apart / bound).max())


class Calls(list[Any]):
    """Shapes of q and k of every call of the operators, and their keywords."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Any:
    seen = Calls()
    for name in OPERATORS:
        own = getattr(hla, name)

        def counted(q: Any, k: Any, v: Any, own: Any = own, name: str = name, **told: Any) -> Any:
            seen.append((name, tuple(q.shape), tuple(k.shape), told))
            return own(q, k, v, **told)

        monkeypatch.setattr(hla, name, counted)
    return seen


# --- the function alone ----------------------------------------------------------------------------------------------


def heads(seed: int = 5) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(BATCH, HEADS, TOKENS, D))
    k = rng.normal(size=(BATCH, KV_HEADS, TOKENS, D))
    return q, k, rng.normal(size=(BATCH, KV_HEADS, TOKENS, DV))


class Module(nn.Module):
    """As much of an attention module as the functions look at."""

    def __init__(self, is_causal: bool = True) -> None:
        super().__init__()
        self.is_causal = is_causal


def attend(name: str, *qkv: Any, mask: Any = None, causal: bool = True, **told: Any) -> Any:
    tensors = [torch.from_numpy(x) for x in qkv]
    mask = None if mask is None else torch.from_numpy(mask)
    o, weights = ALL_ATTENTION_FUNCTIONS[name](Module(causal), *tensors, mask, **told)
    assert weights is None
    assert o.shape == (BATCH, TOKENS, HEADS, DV)
    return o.transpose(1, 2).numpy()


def repeated(x: Any) -> Any:
    return np.repeat(x, HEADS // KV_HEADS, axis=1)


FUNCTIONS = {
    "plain": ({}, {}),
    "scaled": ({}, {"scaling": 0.3}),
    "scaled down": ({}, {"scaling": -1.7}),
    "decayed": ({"decay": 0.9}, {}),
    "decays": ({"decay": [0.9, 0.99, 0.7]}, {}),
    "normalized": ({"normalize": True, "eps": 0.5, "feature_map": "elu+1"}, {}),
    "bidirectional": ({}, {"causal": False}),
    "told": ({}, {"causal": True, "is_causal": False}),
    "masked": ({"decay": 0.9}, {"mask": True}),
    "masked, bidirectional": ({}, {"mask": True, "causal": False}),
    "in chunks": ({"decay": 0.9, "form": "chunkwise", "chunk_size": 4}, {}),
    "ridge": ({"ridge": 0.7, "decay": 0.9}, {}),
}


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("case", FUNCTIONS.values(), ids=FUNCTIONS)
def test_the_function_is_the_operator(name: str, case: Any) -> None:
    options, told = case
    if "ridge" in options and name != "hla2":
        with pytest.raises(hla.OptionError, match=f"ridge: expected 0 for {name}"):
            register(name, prefix="tested-", **options)
        return
    assert register(name, prefix="tested-", **options) == (f"tested-{name}",)
    q, k, v = heads()
    mask = None
    if "mask" in told:
        mask = np.random.default_rng(2).random((BATCH, TOKENS)) < 0.6
    found = attend(f"tested-{name}", q, k, v, **{**told, "mask": mask})
    causal = told.get("is_causal", told.get("causal", True))
    decay = np.repeat(np.broadcast_to(options.get("decay", 1.0), KV_HEADS), HEADS // KV_HEADS)
    phi = (lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))) if "feature_map" in options else (lambda x: x)
    want = budget.expected(
        name,
        phi(q),
        repeated(phi(k)),
        repeated(v),
        log_decay=np.log(decay)[:, None] if causal else None,
        token_mask=None if mask is None else mask[:, None],
        mask="causal" if causal else "none",
        scale=told.get("scaling", D**-0.5),
        normalize=options.get("normalize", False),
        eps=options.get("eps", 1e-6),
        **({"ridge": options["ridge"]} if "ridge" in options else {}),
    )
    budget.assert_within(
        found, want, budget.tolerance("float64", TOKENS, D, budget.stages(name)), "float64", f"{name} {case}"
    )


def test_keys_are_not_repeated(calls: Any) -> None:
    attend("hla2", *heads())
    ((name, q, k, told),) = calls
    assert (name, q, k) == ("hla2", (2, 3, 2, 11, 8), (2, 3, 1, 11, 8))
    assert told["scale"] == D**-0.5


def test_options_belong_to_a_name(calls: Any) -> None:
    register("hla2", prefix="a-", decay=0.5, chunk_size=4)
    register(["hla2", "ahla"], prefix="b-", normalize=True)
    for name in ("a-hla2", "b-hla2", "hla2", "b-ahla"):
        attend(name, *heads())
    assert [(x["decay"], x["normalize"], x["chunk_size"]) for *_, x in calls] == [
        (0.5, False, 4), (None, True, None), (None, False, None), (None, True, None)
    ]  # fmt: skip
    register("hla2", prefix="a-", decay=0.25)
    attend("a-hla2", *heads())
    assert calls[-1][3]["decay"] == 0.25


# --- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(name: str, side: str, calls: Any) -> None:
    for attention in ("hla2", "ahla") if name == "llama" else ("hla2",):
        model = make(name, attention)
        short, long = text(2, (1, 7)), text(3, (1, TOKENS))
        at = slice(0, 7) if side == "right" else slice(TOKENS - 7, TOKENS)
        tokens, mask = text(4), torch.ones(BATCH, TOKENS, dtype=torch.int64)
        tokens[0, at], tokens[1], mask[0] = short[0], long[0], 0
        mask[0, at] = 1
        calls.clear()
        told = {"position_ids": (mask.cumsum(1) - 1).clamp_min(0)} if side == "left" else {}
        found = model(tokens, attention_mask=mask, **told).logits
        assert [x[0] for x in calls] == [attention] * DEPTH
        mode = "none" if name == "bert" else "causal"
        assert {x[3]["mask"] for x in calls} == {mode}
        assert_close(found[:1, at], model(short).logits, allowed(model, short))
        assert_close(found[1:], model(long).logits, allowed(model, long))
        again = model(tokens).logits
        assert not torch.allclose(again[:1, at], found[:1, at], rtol=1e-3) or (side == "right" and name != "bert")


@pytest.mark.parametrize("name", ["llama", "mistral", "bert"])
def test_masks_that_say_nothing_are_dropped(name: str, calls: Any) -> None:
    """A mask of ones, positions in a row, a window longer than the text: nothing is masked, nothing is packed."""
    model, tokens = make(name), text()
    for told in ({}, {"attention_mask": torch.ones_like(tokens)}, {"position_ids": torch.arange(TOKENS)[None]}):
        model(tokens, **told)
    assert len(calls) == 3 * DEPTH
    assert not any({"token_mask", "segment_ids"} & set(told) for *_, told in calls)


def test_files_do_not_hold_the_attention(tmp_path: Path, calls: Any) -> None:
    make().save_pretrained(tmp_path)
    for told, count in (({}, 0), ({"attn_implementation": "hla2"}, DEPTH)):
        calls.clear()
        AutoModelForCausalLM.from_pretrained(tmp_path, **told)(text())
        assert len(calls) == count


LENGTHS = (4, 1, 6)


def packed() -> tuple[Any, Any]:
    """Tokens of three texts in one row, and the places of each in its text."""
    return text(5, (1, sum(LENGTHS))), torch.cat([torch.arange(n) for n in LENGTHS])[None]


def alone(model: Any, tokens: Any) -> tuple[Any, Any]:
    """Logits of the texts, each by itself, and how far they may be off."""
    parts = tokens.split(LENGTHS, 1)
    return torch.cat([model(x).logits for x in parts], 1), torch.cat([allowed(model, x) for x in parts], 1)


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2"])
def test_packed_sequences_are_alone(name: str) -> None:
    model, (tokens, positions) = make(name), packed()
    found = model(tokens, position_ids=positions, use_cache=False).logits
    assert_close(found, *alone(model, tokens))
    later = positions[:, :4] + 3  # in a row, from somewhere else
    assert model(tokens[:, :4], position_ids=later).logits.shape == (1, 4, VOCABULARY)


@pytest.mark.parametrize("name", ["llama", "gpt2", "opt"])
def test_packed_sequences_that_transformers_does_not_tell_of(name: str) -> None:
    """It tells of none where there is a mask or a cache."""
    model, (tokens, positions) = make(name), packed()
    ones, padded = torch.ones_like(tokens), torch.ones_like(tokens)
    padded[:, -2:] = 0
    told = [{"use_cache": cached, "attention_mask": mask} for cached in (True, False) for mask in (ones, padded)]
    for given in [{"use_cache": True}, *told, *([{"use_cache": False}] if name == "opt" else [])]:
        with pytest.raises(hla.OptionError, match=r"position_ids: .* Pass use_cache=False and no attention_mask"):
            model(tokens, position_ids=positions, **given)


@pytest.mark.parametrize("side", ["left", "right", "inside"])
def test_positions_beside_padding(side: str, calls: Any) -> None:
    """Those of the tokens or those of the columns: neither are packed sequences."""
    model, tokens = make(), text()
    mask = torch.ones_like(tokens)
    mask[0, {"left": [0, 1, 2], "right": [8, 9, 10], "inside": [3, 4, 7]}[side]] = 0
    of_tokens = (mask.cumsum(1) - 1).clamp_min(0)
    for positions in (of_tokens, of_tokens.masked_fill(mask == 0, 1), torch.arange(TOKENS)[None]):
        calls.clear()
        model(tokens, position_ids=positions, attention_mask=mask)
        assert len(calls) == DEPTH
        assert all("token_mask" in told and "segment_ids" not in told for *_, told in calls)


@pytest.mark.parametrize("masked", [True, False])
def test_packed_sequences_in_a_compiled_model(masked: bool) -> None:
    """Positions are not known there, so tokens are kept apart by them, beside a cache and a mask, too."""
    model, (tokens, positions) = make(num_hidden_layers=1), packed()
    mask = torch.ones_like(tokens)
    mask[:, -2:] = 0
    told = {"attention_mask": mask} if masked else {}
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=False)
    with torch.no_grad():
        found = compiled(tokens, position_ids=positions, use_cache=not masked, **told).logits
    want, bound = alone(model, tokens)
    assert_close(found[:, :9], want[:, :9], bound[:, :9])


def test_packed_sequences_behind_layers_of_another_kind() -> None:
    """Positions are looked at in the first layer, unless that has no attention."""
    module = Module()
    module.config, module.layer_idx = llama(), 3
    tensors = [torch.from_numpy(x) for x in heads()]
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6]]).expand(BATCH, -1)
    ALL_ATTENTION_FUNCTIONS["hla2"](module, *tensors, None, position_ids=positions)
    module.config.layer_types = ["mamba", "mamba", "mamba", "full_attention"]
    with pytest.raises(hla.OptionError, match="position_ids: expected positions in a row"):
        ALL_ATTENTION_FUNCTIONS["hla2"](module, *tensors, None, position_ids=positions)


@pytest.mark.parametrize(("name", "attention"), [("llama", "hla2"), ("gpt2", "ahla"), ("bert", "hla2")])
def test_training(name: str, attention: str) -> None:
    """It learns to say again what came before, or what is masked."""
    torch.manual_seed(0)
    auto = AutoModelForMaskedLM if name == "bert" else AutoModelForCausalLM
    model = auto.from_config(CONFIGS[name](), attn_implementation=attention).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(40):
        tokens = torch.randint(3, VOCABULARY, (16, 1)).expand(-1, 7)
        given = tokens.masked_fill(torch.rand(tokens.shape) < 0.3, 1) if name == "bert" else tokens
        mask = torch.ones_like(tokens)
        mask[:3, 5:] = 0
        loss = model(given, labels=tokens.masked_fill(mask == 0, -100), attention_mask=mask).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5]), losses[::5]


def test_gradients_reach_everything() -> None:
    model, tokens = make().train(), text()
    model(tokens, labels=tokens).loss.backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert bool(torch.isfinite(p.grad).all()), name
        assert bool((p.grad != 0).any()), name


@pytest.mark.parametrize("masked", [True, False])
def test_compiled(masked: bool) -> None:
    model, tokens = make(num_hidden_layers=1), text()
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    told = {"attention_mask": mask, "use_cache": False} if masked else {"use_cache": False}
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=False)
    with torch.no_grad():
        found = compiled(tokens, **told).logits
    kept = mask.bool() if masked else torch.ones_like(mask, dtype=torch.bool)
    assert_close(found[kept], model(tokens, **told).logits[kept], allowed(model, tokens)[kept])


# --- generation ------------------------------------------------------------------------------------------------------


def test_generation_without_a_cache() -> None:
    model = make()
    prompts = [text(2, (1, 4)), text(3, (1, 7))]
    tokens, mask = torch.zeros(2, 7, dtype=torch.int64), torch.zeros(2, 7, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        tokens[row, 7 - prompt.shape[1] :], mask[row, 7 - prompt.shape[1] :] = prompt[0], 1
    told = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "use_cache": False, "eos_token_id": None}
    made = model.generate(tokens, attention_mask=mask, **told)[:, 7:]
    for row, prompt in enumerate(prompts):
        want = prompt
        for _ in range(6):
            want = torch.cat([want, model(want).logits[:, -1:].argmax(-1)], 1)
        assert torch.equal(made[row], want[0, prompt.shape[1] :])


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
@pytest.mark.parametrize("told", [{}, {"cache_implementation": "static"}, {"num_beams": 2}], ids=str)
def test_generation_with_a_cache_says_why_not(name: str, told: dict[str, Any]) -> None:
    model, tokens = make(name), text()
    says = r"these operators need past queries, too.*use_cache=False.*HLAForCausalLM.*hla\.nn\.convert"
    mask = torch.ones_like(tokens)
    with pytest.raises(hla.OptionError, match=says):
        model.generate(tokens, attention_mask=mask, max_new_tokens=3, pad_token_id=0, **told)
    cache = DynamicCache(config=model.config)
    model(tokens, **{CACHE: cache})
    with pytest.raises(hla.OptionError, match=says):
        model(tokens[:, :1], **{CACHE: cache})
    with pytest.raises(hla.OptionError, match="an HLACache, which has states"):
        model(tokens, **{CACHE: HLACache(model.config)})


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("says", "told"),
    [
        (r"dropout: expected 0, got 0\.1\. .*attn_pdrop", {"dropout": 0.1}),
        ("sliding_window: expected None", {"sliding_window": 5}),
        ("softcap: .* no scores to cap", {"softcap": 30.0}),
        ("s_aux: .* no softmax for a sink", {"s_aux": torch.zeros(3)}),
        ("sinks: .* no softmax for a sink", {"sinks": torch.zeros(3)}),
        ("position_bias: .* no scores to add a bias to", {"position_bias": torch.zeros(1)}),
        ("head_mask: ", {"head_mask": torch.zeros(6)}),
        ("output_attentions: .* no attention weights", {"output_attentions": True}),
        ("cu_seq_lens_q: .* told by position_ids", {"cu_seq_lens_q": torch.tensor([0, 11])}),
        ("indices: .* no selection of keys", {"indices": torch.zeros(1)}),
        ("alibi: expected a keyword that is known", {"alibi": torch.zeros(1)}),
    ],
    ids=lambda x: "" if isinstance(x, str) else next(iter(x)),
)
def test_what_models_ask_for_in_vain(says: str, told: dict[str, Any]) -> None:
    with pytest.raises(hla.OptionError, match=says):
        attend("hla2", *heads(), **told)


def test_what_says_nothing_is_taken() -> None:
    want = attend("hla2", *heads())
    harmless = {"sliding_window": TOKENS, "softcap": None, "output_attentions": False, "use_cache": True, "alibi": None}
    assert np.array_equal(attend("hla2", *heads(), **harmless), want)


def test_masks_that_cannot_be_told() -> None:
    q, k, v = heads()
    square = np.ones((BATCH, 1, TOKENS, TOKENS), dtype=bool)
    for kind, says, mask in (
        (hla.ShapeError, r"attention_mask: expected shape \(2, 11\)", square),
        (hla.ShapeError, r"attention_mask: expected shape \(2, 11\)", square[:, 0, 0, :5]),
        (hla.ShapeError, r"attention_mask: expected shape \(2, 11\)", square[:1, 0, 0]),
        (hla.DTypeError, "attention_mask: expected bool", np.zeros((BATCH, 1, TOKENS, TOKENS))),
    ):
        with pytest.raises(kind, match=says):
            attend("hla2", q, k, v, mask=mask)
    with pytest.raises(hla.ShapeError, match="Masks of queries by keys"):
        make()(text(), attention_mask=torch.ones(BATCH, 1, TOKENS, TOKENS, dtype=torch.bool))


@pytest.mark.parametrize("mask", [True, False])
@pytest.mark.parametrize(
    "config",
    [
        lambda: transformers.MistralConfig(**GROUPED, head_dim=D, sliding_window=5),
        lambda: transformers.Gemma2Config(**GROUPED, head_dim=D, sliding_window=5),
        lambda: transformers.ModernBertConfig(**{**ENCODER, "pad_token_id": 0}, cls_token_id=1, sep_token_id=2),
        lambda: transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=WIDTH, n_layer=1, n_head=3),
        lambda: transformers.BartConfig(vocab_size=VOCABULARY, d_model=WIDTH, encoder_layers=1, decoder_layers=1,
                                        encoder_attention_heads=3, decoder_attention_heads=3),
        lambda: gpt2(add_cross_attention=True),
    ],
    ids=["sliding", "softcap", "local", "alibi", "encoder and decoder", "cross"],
)  # fmt: skip
def test_models_that_cannot_be_served(config: Any, mask: bool) -> None:
    """None computes something else in silence."""
    model = AutoModel.from_config(config(), attn_implementation="hla2").eval()
    told = {"attention_mask": torch.tensor([[0] * 4 + [1] * 7, [1] * 11])} if mask else {}
    with pytest.raises(hla.OptionError):
        model(text(), **told)


def test_cross_attention_of_a_decoder_by_itself() -> None:
    """Also where there are as many keys as queries; the decoder's own attention is the operator."""
    sizes = {"vocab_size": VOCABULARY, "d_model": WIDTH, "decoder_layers": 1, "decoder_attention_heads": 3}
    config = transformers.BartConfig(**sizes, decoder_ffn_dim=20, max_position_embeddings=40)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="hla2").eval()
    assert model(text()).logits.shape == (BATCH, TOKENS, VOCABULARY)
    with pytest.raises(hla.OptionError, match="expected a model without cross-attention"):
        model(text(), encoder_hidden_states=torch.zeros(BATCH, TOKENS, WIDTH))


def test_a_layer_that_does_not_say_whether_it_is_causal() -> None:
    """Splinter's see their future, and have no word for it."""
    model = AutoModel.from_config(transformers.SplinterConfig(**ENCODER), attn_implementation="hla2").double().eval()
    with pytest.raises(hla.OptionError, match=r"is_causal: expected an attribute .* none in SplinterSelfAttention"):
        model(text())
    for layer in model.encoder.layer:
        layer.attention.self.is_causal = False
    tokens = text()
    other = tokens.clone()
    other[:, -1] = (tokens[:, -1] + 1) % VOCABULARY
    apart = (model(tokens).last_hidden_state - model(other).last_hidden_state).abs().amax(-1)
    assert bool((apart > 0).all())


def test_a_window_that_holds_everything_is_none() -> None:
    tokens, mask = text(), torch.tensor([[0] * 4 + [1] * 7, [1] * 11])
    model = make("mistral")
    want = model(tokens, attention_mask=mask).logits
    model.config.sliding_window = TOKENS
    for layer in model.model.layers:
        layer.self_attn.sliding_window = TOKENS
    assert torch.equal(model(tokens, attention_mask=mask).logits, want)
    model.config.sliding_window = TOKENS - 1
    with pytest.raises(hla.OptionError, match="mask: expected causal or bidirectional"):
        model(tokens, attention_mask=mask)


def test_blocks_of_tokens_that_see_their_future() -> None:
    """A mask function of one's own, as vision-language models have it for images."""
    from transformers.masking_utils import create_causal_mask

    embeds = torch.zeros(BATCH, TOKENS, WIDTH)
    told = {"config": llama(), "inputs_embeds": embeds, "attention_mask": None, CACHE: None}
    told["config"]._attn_implementation = "hla2"
    assert create_causal_mask(**told) is None
    for other in (lambda b, h, i, j: (i < 4) & (j < 4), lambda b, h, i, j: i == j):
        with pytest.raises(hla.OptionError, match="mask: expected causal or bidirectional"):
            create_causal_mask(**told, or_mask_function=other)
    with pytest.raises(hla.OptionError, match="mask: expected causal or bidirectional"):
        create_causal_mask(**told, and_mask_function=lambda b, h, i, j: i - j < 40)


def test_refused_options() -> None:
    for says, told in (
        ("operator: expected one of", {"operators": "hla4"}),
        ("operator: expected one of", {"operators": ["hla2", "hla4"]}),
        ("prefix: expected letters", {"prefix": "org/name"}),
        ("prefix: expected letters", {"prefix": "flash_"}),
        ("decay: expected a number in", {"decay": 1.5}),
        ("decay: expected a number in", {"decay": [0.5, 0.0]}),
        ("decay: expected a number in", {"decay": []}),
        ("decay: expected a number in", {"decay": "learned"}),
        ("feature_map: expected one of", {"feature_map": "gelu"}),
        ("normalize: expected True or False", {"normalize": 1}),
        ("form: expected one of", {"form": "fast"}),
        ("chunk_size: expected an integer", {"chunk_size": 0}),
        ("ridge: expected 0 for ahla", {"operators": ["ahla"], "ridge": 0.1}),
    ):
        with pytest.raises(hla.OptionError, match=says):
            register(**told)
    register("hla2", prefix="two-", decay=[0.9, 0.8])
    with pytest.raises(hla.OptionError, match="one for each of 3 key/value heads, got 2 numbers"):
        make(attention="two-hla2")(text())
    with pytest.raises(hla.OptionError, match="decay: expected None in a bidirectional layer"):
        make("bert", attention="two-hla2")(text())
    assert "hla4" not in ALL_ATTENTION_FUNCTIONS.valid_keys()


def test_decays_that_round_to_zero() -> None:
    register("hla2", prefix="t-", decay=[1e-50, 0.9, 0.8])
    assert torch.isfinite(make(attention="t-hla2").float()(text()).logits).all()


# --- conversion ------------------------------------------------------------------------------------------------------


class Converted(nn.Module):
    """A layer with a state in place of the attention of Llama."""

    def __init__(self, layer: Any, layer_idx: int) -> None:
        super().__init__()
        self.layer, self.layer_idx = layer, layer_idx

    def forward(self, hidden_states: Any, attention_mask: Any = None, **told: Any) -> Any:
        cache = told.get(CACHE)
        padding = None if attention_mask is None else ~attention_mask
        if cache is None:
            return self.layer(hidden_states, key_padding_mask=padding), None
        own = cache_layer(cache, self.layer_idx)
        y, after = self.layer(hidden_states, own.state, True, key_padding_mask=padding)
        own.advance(after, hidden_states.shape[1])
        return y, None


def rebuilt(block: Any, **options: Any) -> Any:
    options.pop("causal")
    layer = from_projections(
        block.q_proj, block.k_proj, block.v_proj, block.o_proj, rotary=True,
        num_heads=block.config.num_attention_heads, num_kv_heads=block.config.num_key_value_heads, **options
    )  # fmt: skip
    return Converted(layer, block.layer_idx)


BARE: dict[str, Any] = {"qk_norm": None, "output_norm": False, "decay": None}


def converted(operator: str = "hla2", **options: Any) -> Any:
    model, report = hla.nn.convert(make(attention=operator), operator, blocks={LlamaAttention: rebuilt}, **options)
    assert len(report.replaced) == DEPTH
    assert all(isinstance(layer.self_attn.layer, HigherOrderAttention) for layer in model.model.layers)
    return model


def test_a_converted_model_is_the_registered_one() -> None:
    for operator in ("hla2", "ahla"):
        model, tokens = converted(operator, **BARE), text()
        # Transformers turns in float32, whatever the model's dtype: angles are off by TOKENS u(float32) radians
        bound = allowed(make(attention=operator), tokens) * TOKENS * budget.UNIT["float32"] / UNIT
        assert_close(model(tokens, use_cache=False).logits, make(attention=operator)(tokens).logits, bound)


def test_a_converted_model_generates_with_states() -> None:
    model, tokens = converted(decay=0.95), text()
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    told = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "attention_mask": mask}
    for mode in ({}, {"num_beams": 3}):
        cache = HLACache(model.config)
        found = model.generate(tokens, **told, **mode, **{CACHE: cache})
        assert cache.get_seq_length() == found.shape[1] - 1
        assert torch.equal(found, model.generate(tokens, **told, **mode, use_cache=False))
        assert torch.equal(found, model.generate(tokens, **told, **mode))  # in the cache that it makes


def test_states_in_the_cache_that_generate_makes() -> None:
    """They take the place of keys and values, in caches that know the config and in those that grow."""
    model, tokens = converted(decay=0.95), text()
    for cache in (DynamicCache(), DynamicCache(config=model.config)):
        with torch.no_grad():
            pieces = [model(part, **{CACHE: cache}).logits for part in tokens.split([4, 1, TOKENS - 5], 1)]
            want = model(tokens, use_cache=False).logits
        assert_close(torch.cat(pieces, 1), want, allowed(model, tokens))
        assert [type(layer) for layer in cache.layers] == DEPTH * [HLACacheLayer]
        assert cache.get_seq_length() == TOKENS
    softmax = make(attention="sdpa")(tokens, use_cache=True)[CACHE]
    for kind, says, call in (
        (hla.OptionError, f"that this layer has not seen, got {TOKENS}", lambda: cache_layer(softmax, 0)),
        (hla.OptionError, f"index: expected the number of one of {DEPTH}", lambda: cache_layer(cache, DEPTH)),
        (hla.OptionError, "index: expected the number of one of", lambda: cache_layer(DynamicCache(), -1)),
        (hla.DTypeError, "an HLACache or a DynamicCache, got StaticCache",
         lambda: cache_layer(transformers.StaticCache(config=model.config, max_cache_len=40), 0)),
    ):  # fmt: skip
        with pytest.raises(kind, match=says):
            call()


def test_a_layer_of_softmax_beside_states() -> None:
    """Masks have the sizes of its keys, so it never sees too little; the layer of states refuses a later piece."""
    model, tokens = make(attention="sdpa"), text()
    model, report = hla.nn.convert(model, "hla2", blocks={LlamaAttention: rebuilt}, skip=["model.layers.1.self_attn"])
    assert len(report.replaced) == DEPTH - 1
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        want = model(tokens, use_cache=False).logits
        first = model(tokens[:, :4], **{CACHE: cache}).logits
        assert_close(first, want[:, :4], allowed(model, tokens)[:, :4])
        with pytest.raises((hla.ShapeError, TypeError)):
            model(tokens[:, 4:], **{CACHE: cache})


def test_offloaded_states_come_back_and_others_stay() -> None:
    layer = HLACacheLayer()
    layer.advance(HigherOrderAttention(8, 2, device="meta").init_state(BATCH), 1)
    layer.prefetch()  # was never offloaded
    assert layer.state.position.device.type == "meta"
    assert layer.home is None


def rebuilt_gpt2(block: Any, **options: Any) -> Any:
    options.pop("causal")
    w, b = block.c_attn.weight.T.chunk(3), block.c_attn.bias.chunk(3)
    with pytest.raises(hla.DTypeError, match=r"out: .* got Conv1D. Pass .*\(weight.T, bias\)"):
        from_projections(*zip(w, b, strict=True), block.c_proj, num_heads=block.num_heads, **options)
    out = (block.c_proj.weight.T, block.c_proj.bias)
    layer = from_projections(*zip(w, b, strict=True), out, num_heads=block.num_heads, **options)
    return Converted(layer, block.layer_idx)


def test_a_converted_gpt2_is_the_registered_one() -> None:
    model, tokens = make("gpt2"), text()
    want, bound = model(tokens).logits, allowed(model, tokens)
    model, report = hla.nn.convert(model, "hla2", blocks={GPT2Attention: rebuilt_gpt2}, **BARE)
    assert len(report.replaced) == DEPTH
    assert_close(model(tokens, use_cache=False).logits, want, bound)

"""`hla.integrations.transformers`: the model with its cache, in everything that Transformers does with a model.

Judge. The model's weights are those of a `Decoder`, which tests/test_models.py holds against float64 NumPy. What is
streamed is held against the whole, what is padded against what is not, generation against itself without a cache.

Tolerance. That of tests/test_models.py: λ √n u times how far logits move when all parameters move by a relative u.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ["HF_HUB_OFFLINE"] = "1"

import budget
import hla
import layers
from hla.models import ModelConfig
from libraries import only

torch: Any = only("torch")
pytest.importorskip("transformers")

from transformers import (  # noqa: E402
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
)

from hla.integrations.transformers import HLACache, HLAConfig, HLAForCausalLM, HLAModel, register  # noqa: E402
from hla.integrations.transformers.model import CACHE  # noqa: E402
from hla.models import Decoder  # noqa: E402
from hla.nn.torch import HigherOrderAttention  # noqa: E402

VOCABULARY, WIDTH, INNER, TOKENS, BATCH, DEPTH = 31, 18, 20, 11, 2, 3
CONSTANT = ["hla2", layers.MIXED, "ahla"]
GROWING = ["hla2", "softmax", "linear_attention"]
FIELDS = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": layers.HEADS,
    "num_key_value_heads": 3,
    "attention": {"head_dim": layers.D, "value_dim": layers.DV, "rotary": True},
}


def config(kinds: Any = CONSTANT, **told: Any) -> Any:
    width = {"hidden_size": 24} if "softmax" in kinds else {}  # heads of an even size
    return HLAConfig(**{**FIELDS, **width, "layers": kinds, **told})


def decoder(kinds: Any = CONSTANT, dtype: Any = None, **told: Any) -> Any:
    """A decoder whose parts all matter: weights larger than at the start of training."""
    torch.manual_seed(0)
    found = Decoder(config(kinds, **told).to_model_config(), dtype=dtype or torch.float64)
    with torch.no_grad():
        for name, p in found.named_parameters():
            if "norm" in name or name.endswith("bias"):
                p.add_(0.3 * torch.randn_like(p))
            else:
                p.mul_(15.0 if "mlp" in name or "embedding" in name or "head" in name else 2.0)
    return found.eval()


def make(kinds: Any = CONSTANT, dtype: Any = None, **told: Any) -> Any:
    return HLAForCausalLM.from_decoder(decoder(kinds, dtype, **told))


def text(seed: int = 1, shape: tuple[int, ...] = (BATCH, TOKENS)) -> Any:
    return torch.from_numpy(np.random.default_rng(seed).integers(1, VOCABULARY, size=shape))


def allowed(model: Any, tokens: Any) -> Any:
    """How far logits (B, T) may be off."""
    want, step = model(tokens).logits.detach(), 1e-6
    moved = want.abs().amax(-1)
    moving = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        with torch.no_grad():
            for p, q in zip(model.parameters(), moving.parameters(), strict=True):
                q.copy_(p * (1 + step * torch.randn(p.shape, dtype=p.dtype, generator=generator)))
        moved = moved.maximum((moving(tokens).logits.detach() - want).abs().amax(-1) / step)
    per_block = layers.tolerance({"operator": layers.MIXED}, tokens.shape[1], budget.UNIT["float64"])
    return per_block * DEPTH**0.5 * moved


def assert_close(found: Any, want: Any, bound: Any) -> None:
    apart = (found - want).detach().abs().amax(-1)
    assert bool((apart <= bound).all()), float((apart / bound).max())


KINDS = pytest.mark.parametrize("kinds", [CONSTANT, GROWING], ids=["constant", "growing"])


# --- weights ---------------------------------------------------------------------------------------------------------


@KINDS
@pytest.mark.parametrize("tied", [True, False])
def test_the_decoder_and_back(kinds: Any, tied: bool) -> None:
    own = decoder(kinds, tie_word_embeddings=tied)
    model, tokens = HLAForCausalLM.from_decoder(own, eos_token_id=5), text()
    assert torch.equal(model(tokens).logits, own(tokens))
    assert torch.equal(model.model(tokens).last_hidden_state @ model.lm_head.weight.T, own(tokens))
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is tied
    assert model.config.eos_token_id == 5
    assert not model.training
    again = model.to_decoder()
    assert again.config.kinds() == own.config.kinds()
    assert list(again.state_dict()) == list(own.state_dict())
    for name, x in own.state_dict().items():
        assert torch.equal(again.state_dict()[name], x), name
        assert again.state_dict()[name].data_ptr() not in {x.data_ptr(), *(p.data_ptr() for p in model.parameters())}
    assert HLAForCausalLM.from_decoder(own.bfloat16().train()).dtype == torch.bfloat16


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_save_and_load(tied: bool, dtype: str, tmp_path: Path) -> None:
    model = make(dtype=getattr(torch, dtype), tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    assert {p.suffix for p in tmp_path.iterdir()} == {".json", ".safetensors"}
    for auto in (AutoModelForCausalLM, HLAForCausalLM):
        again, info = auto.from_pretrained(tmp_path, output_loading_info=True)
        assert type(again) is HLAForCausalLM
        assert not any(info.values()), info
        assert again.dtype == model.dtype
        assert all(torch.equal(p, q) for p, q in zip(again.parameters(), model.parameters(), strict=True))
        assert (again.lm_head.weight is again.model.embed_tokens.weight) is tied
    trunk = AutoModel.from_pretrained(tmp_path)
    assert type(trunk) is HLAModel
    assert all(torch.equal(p, q) for p, q in zip(trunk.parameters(), model.model.parameters(), strict=True))
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
    assert half(text()).logits.dtype == torch.bfloat16


def test_what_a_file_lacks_is_drawn_and_the_rest_is_kept(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = make(dtype=torch.float32)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    lost = "model.layers.0.attention.out_proj.weight"
    del tensors[lost]
    save_file(tensors, file, {"format": "pt"})
    again, info = HLAForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert set(info["missing_keys"]) == {lost}
    for name, p in again.named_parameters():
        assert torch.equal(p, model.get_parameter(name)) is (name != lost), name
    bound = (2 * DEPTH) ** -0.5 * (6 / sum(again.get_parameter(lost).shape)) ** 0.5
    assert 0.9 * bound < float(again.get_parameter(lost).detach().abs().max()) <= bound


def test_the_start_of_training() -> None:
    """As a decoder's, from the same seed again."""
    told = config(hidden_size=60, num_hidden_layers=6, layers="hla2", attention={})
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(told)
    torch.manual_seed(1)
    again = HLAForCausalLM(told)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))
    for layer in model.model.layers:
        out, down = layer.attention.out_proj.weight.detach(), layer.mlp.down_proj.weight.detach()
        assert float(out.abs().max()) == pytest.approx(12**-0.5 * (6 / 120) ** 0.5, rel=0.02)
        assert float(down.std()) == pytest.approx(0.02 * 12**-0.5, rel=0.1)
        assert float(layer.mlp.up_proj.weight.detach().std()) == pytest.approx(0.02, rel=0.1)
        gate = torch.sigmoid(layer.attention.decay.bias.detach())
        assert torch.allclose(gate, torch.tensor([0.97, 0.994523, 0.999]), atol=1e-5)
    assert float(model.lm_head.weight.detach().std()) == pytest.approx(0.02, rel=0.1)


def test_resized_embeddings() -> None:
    model, tokens = make(), text()
    before = model(tokens).logits
    model.resize_token_embeddings(VOCABULARY + 6)
    after = model(tokens).logits
    assert model.config.vocab_size == after.shape[-1] == VOCABULARY + 6
    assert model.lm_head.weight is model.model.embed_tokens.weight is model.get_input_embeddings().weight
    assert torch.allclose(after[..., :VOCABULARY], before, rtol=1e-12, atol=1e-12)
    assert model.to_decoder()(tokens).shape == after.shape


def test_copies() -> None:
    model = make()
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(again(text()).logits, model(text()).logits)


# --- the config ------------------------------------------------------------------------------------------------------


def test_config_as_text(tmp_path: Path) -> None:
    kinds = ["hla2", "softmax", tuple(layers.MIXED)]
    told = config(kinds, dropout=0.1, attention={"decay": (0.9, 0.95, 0.99), "chunk_size": 16}, eos_token_id=[2, 3])
    told.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "hla"
    for again in (
        AutoConfig.from_pretrained(tmp_path),
        HLAConfig.from_dict(told.to_dict()),
        HLAConfig.from_model_config(told.to_model_config(), eos_token_id=[2, 3]),
        copy.deepcopy(told),
        pickle.loads(pickle.dumps(told)),
    ):
        assert type(again) is HLAConfig
        assert again.to_model_config() == told.to_model_config()
        assert again.to_model_config().kinds() == tuple(kinds)
        assert again.eos_token_id == [2, 3]
    assert AutoConfig.for_model("hla", vocab_size=5).vocab_size == 5
    assert HLAConfig().intermediate_size == ModelConfig(5).inner
    assert HLAConfig().attention is not HLAConfig().attention
    assert isinstance(HLAConfig.keys_to_ignore_at_inference, list), "to which Trainer adds another"


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ({"hidden_size": 0}, "^hidden_size: expected an integer ≥ 1, got 0"),
        ({"intermediate_size": 0}, "^intermediate_size: expected an integer ≥ 1, got 0"),
        ({"layers": "hla4"}, "layers: expected one of"),
        ({"layers": ["hla2"] * 2}, "a list of one for each of num_hidden_layers = 3 blocks, got 2"),
        ({"layers": ["hla2", "hla2", ["softmax"] * 6]}, "Softmax is for whole layers"),
        ({"num_key_value_heads": 4}, "^num_key_value_heads: expected a divisor of num_attention_heads = 6"),
        ({"num_key_value_heads": 4, "layers": "softmax"}, "^num_key_value_heads: expected a divisor of num_att"),
        ({"layers": ["hla2", "hla2", "softmax"]}, "^hidden_size: expected a multiple of twice num_attention_heads = 6"),
        ({"attention": {"head_dim": 7, "rotary": True}}, "head_dim: expected an even size"),
        ({"attention": {}, "hidden_size": 20}, "head_dim: expected a size, as num_attention_heads = 6 does not divide"),
        ({"attention": {"decay": 1.5}}, r"decay: expected a number in \(0, 1\]"),
        ({"attention": {"causal": False}}, "attention: expected options that the model does not set itself"),
        ({"attention": {"d_model": 20}}, "attention: .* does not set itself, got d_model. Use hidden_size=…"),
        ({"attention": None}, "attention: expected a mapping"),
        ({"attention": {"norm_eps": -1.0}}, "^norm_eps: expected a small number > 0"),
        ({"rms_norm_eps": -1.0}, "^rms_norm_eps: expected"),
        ({"rms_norm_eps": 0.0}, "^rms_norm_eps: expected"),
        ({"rotary_base": 0.0}, "^rotary_base: expected"),
        ({"rotary_base": -3.0}, "^rotary_base: expected"),
        ({"attention": {"operator": "ahla"}}, "attention: expected options that the model does not set itself"),
        ({"attention": {"ridge": 0.1}, "layers": "ahla"}, "ridge: expected 0 for ahla"),
        ({"dropout": 1.0}, "dropout: expected a probability"),
        ({"hiden_size": 20}, "Did you mean hidden_size"),
        ({"num_attention_head": 20}, "Did you mean num_attention_heads"),
    ],
    ids=str,
)
def test_refused_configs(told: dict[str, Any], says: str) -> None:
    with pytest.raises(hla.OptionError, match=says):
        config(**{"kinds": CONSTANT, **told} if "layers" not in told else {"kinds": [], **told})


def test_names_from_elsewhere_are_refused(tmp_path: Path) -> None:
    """No name of another config is kept as if it were read."""
    known = set(HLAConfig(vocab_size=VOCABULARY).to_dict())
    elsewhere = {
        "d_model": "Use hidden_size=…", "num_layers": "Use num_hidden_layers=…", "norm_eps": "Use rms_norm_eps=…",
        "num_heads": "Use num_attention_heads=…", "num_kv_heads": "Use num_key_value_heads=…", "rope_theta": "rotary_b",
        "tie_embeddings": "Use tie_word_embeddings=…", "operator": "Use layers=…", "mixer": "Use layers=…",
        "n_embd": "Use hidden_size=…", "n_layer": "Use num_hidden_layers=…", "n_head": "Use num_attention_heads=…",
        "attention_dropout": "Use dropout=…", "causal": "is causal", "layer_types": "Use layers=…",
        "hidden_act": "SwiGLU",
        "attention_bias": 'Use attention={"bias": …}', "sliding_window": "decay", "rope_scaling": "Use rotary_base=…",
        "rope_parameters": "Use rotary_base=…", "is_encoder_decoder": "is a decoder",
        "add_cross_attention": "is a decoder", "output_attentions": "without attention weights",
    }  # fmt: skip
    own = set(inspect.signature(HigherOrderAttention).parameters) - {"device", "dtype", "process_group"}
    own |= {field.name for field in dataclasses.fields(ModelConfig)}
    for name in own - known - set(elsewhere):
        elsewhere[name] = f'Use attention={{"{name}": …}}'
    assert {"head_dim", "decay", "conv_size", "form"} <= set(elsewhere)
    for name, says in elsewhere.items():
        with pytest.raises(hla.OptionError, match=f"^{name}: .*{says}"):
            HLAConfig(vocab_size=VOCABULARY, **{name: 7})
    told = {"architectures": ["HLAForCausalLM"], "dtype": "float64", "id2label": {0: "a"}, "transformers_version": "5"}
    found = HLAConfig(vocab_size=VOCABULARY, **told, name_or_path="here", output_attentions=False)
    found.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).dtype == found.dtype == torch.float64


# --- a call ----------------------------------------------------------------------------------------------------------


def test_what_a_call_returns() -> None:
    model, tokens = make(), text()
    whole, bound = model(tokens, output_hidden_states=True), allowed(model, tokens)
    assert len(whole.hidden_states) == DEPTH + 1
    assert torch.equal(whole.hidden_states[0], model.get_input_embeddings()(tokens))
    assert torch.equal(model.lm_head(whole.hidden_states[-1]), whole.logits)
    assert isinstance(whole[CACHE], HLACache)
    assert CACHE not in model(tokens, use_cache=False)
    assert CACHE not in model.train()(tokens)
    assert isinstance(model(tokens, use_cache=True)[CACHE], HLACache)
    model.eval()
    assert model(tokens, use_cache=False).hidden_states is None
    for kept, want in ((1, slice(-1, None)), (3, slice(-3, None)), (torch.tensor([0, 4]), torch.tensor([0, 4]))):
        assert_close(model(tokens, logits_to_keep=kept).logits, whole.logits[:, want], bound[:, want])
    as_tuple = model(tokens, return_dict=False, use_cache=False)
    assert isinstance(as_tuple, tuple)
    assert torch.equal(as_tuple[0], whole.logits)
    assert torch.equal(model.model(tokens, return_dict=False)[0], whole.hidden_states[-1])
    embedded = model(inputs_embeds=model.get_input_embeddings()(tokens)).logits
    assert torch.equal(embedded, whole.logits)
    positions = torch.arange(TOKENS)[None]
    assert torch.equal(model(tokens, position_ids=positions).logits, whole.logits)


def test_loss() -> None:
    model, tokens = make(), text()
    labels = tokens.clone()
    labels[0, :4] = -100
    found = model(tokens, labels=labels)
    chances = found.logits.double().log_softmax(-1)
    terms = [-chances[b, t - 1, labels[b, t]] for b in range(BATCH) for t in range(1, TOKENS) if labels[b, t] >= 0]
    want = float(sum(terms).detach()) / len(terms)
    assert float(found.loss.detach()) == pytest.approx(want, rel=1e-5)  # Transformers computes it in float32
    shared = model(tokens, labels=labels, num_items_in_batch=torch.tensor(100))
    assert float(shared.loss.detach()) == pytest.approx(want * len(terms) / 100, rel=1e-5)
    assert model(tokens, labels=labels, return_dict=False, use_cache=False)[0] == found.loss


@KINDS
@pytest.mark.parametrize("side", ["left", "right", "inside"])
def test_padding_changes_nothing(kinds: Any, side: str) -> None:
    model = make(kinds)
    short, long, pads = text(2, (1, 7)), text(3, (1, TOKENS)), TOKENS - 7
    at = {"left": range(pads, TOKENS), "right": range(7), "inside": [0, 1, 4, 6, 7, 9, 10]}[side]
    tokens, mask = text(4), torch.ones(BATCH, TOKENS, dtype=torch.int64)
    tokens[0, at], tokens[1], mask[0] = short[0], long[0], 0
    mask[0, at] = 1
    found, want = model(tokens, attention_mask=mask).logits, model(short).logits
    assert_close(found[:1, at], want, allowed(model, short))
    assert_close(found[1:], model(long).logits, allowed(model, long))
    other = torch.where(mask == 0, 3, tokens)
    assert torch.equal(model(other, attention_mask=mask).logits[0, at], found[0, at])
    for same in (mask.bool(), mask.to(torch.int8)):
        assert torch.equal(model(tokens, attention_mask=same).logits, found)
    assert not torch.allclose(model(tokens).logits[0, at], want[0]) or side == "right"
    positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 0)
    assert torch.equal(model(tokens, attention_mask=mask, position_ids=positions).logits, found)


def test_a_mask_of_ones_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from hla.nn.torch import sequences

    model, tokens, moved = make(), text(), []
    own = sequences.move_together
    monkeypatch.setattr(sequences, "move_together", lambda *told: moved.append(1) or own(*told))
    mask = torch.ones_like(tokens)
    model(tokens, attention_mask=mask)
    assert not moved
    mask[0, 0] = 0
    model(tokens, attention_mask=mask)
    assert len(moved) == DEPTH


@KINDS
def test_any_split_equals_the_whole(kinds: Any) -> None:
    model, tokens = make(kinds), text()
    mask = torch.ones_like(tokens)
    mask[0, [0, 1, 5]] = 0
    present = mask.bool()
    want, bound = model(tokens, attention_mask=mask).logits, allowed(model, tokens)
    for pieces in ((4, 7), (1, 1, 9), (1,) * TOKENS, (10, 1), (0, 11)):
        cache = HLACache(model.config)
        found, done = [], 0
        for count in pieces:
            part = slice(done, done + count)
            done += count
            told = mask[:, :done] if count % 2 else mask[:, part]  # with the columns before, or without
            at = {} if done % 2 else {"position_ids": (mask.cumsum(1) - 1)[:, part]}
            found.append(model(tokens[:, part], attention_mask=told, **at, **{CACHE: cache}).logits)
            assert cache.get_seq_length() == done
        assert_close(torch.cat(found, 1)[present], want[present], bound[present])
    positions = cache.layers[0].state.position.tolist()
    assert positions == [TOKENS - 3, TOKENS]


def test_training() -> None:
    """It learns to say again what came before, with dropout, in bf16 autocast."""
    torch.manual_seed(0)
    model = HLAForCausalLM(config(GROWING, attention={}, dropout=0.05)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(40):
        tokens = torch.randint(VOCABULARY, (16, 1)).expand(-1, 7)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5]), losses[::5]
    first, second = (model(tokens, output_hidden_states=True).hidden_states for _ in range(2))
    assert float((first[0] == 0).double().mean()) == pytest.approx(0.05, abs=0.02), "dropout of embeddings"
    assert not torch.equal(first[1] - first[0], second[1] - second[0]), "dropout of blocks"


def test_smoothed_labels(tmp_path: Path) -> None:
    """`Trainer` smooths them itself, and has to know that the model's are shifted."""
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    told = {"output_dir": str(tmp_path), "label_smoothing_factor": 0.2, "use_cpu": True, "report_to": "none"}
    model, tokens = make(), text()
    trainer = Trainer(model, TrainingArguments(**told))
    labels = tokens.clone()
    labels[0, 7:] = -100
    found = trainer.compute_loss(model, {"input_ids": tokens, "labels": labels})
    logits = model(tokens).logits[:, :-1].flatten(0, 1)
    want = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), label_smoothing=0.2)
    assert float(found.detach()) == pytest.approx(float(want.detach()), rel=1e-5)  # Transformers computes it in float32


def test_config_of_numpy_numbers_can_be_saved(tmp_path: Path) -> None:
    config = HLAConfig(hidden_size=np.int64(24), num_attention_heads=np.int32(6), dropout=np.float32(0.25))
    config.save_pretrained(tmp_path)
    again = HLAConfig.from_pretrained(tmp_path)
    assert (again.hidden_size, again.num_attention_heads, again.num_key_value_heads, again.dropout) == (24, 6, 6, 0.25)


def test_trainer_leaves_decays_and_norms_to_the_gradient() -> None:
    """Weight decay would pull every γ to ½."""
    pytest.importorskip("accelerate")
    from transformers import Trainer

    model = make("hla2", attention={"decay": "learned"})
    model.model.layers[1].attention = HigherOrderAttention(model.config.hidden_size, 6, decay="forget_gate")
    decayed = Trainer.get_decay_parameter_names(None, model)
    left = {name for name, _ in model.named_parameters()} - set(decayed)
    assert {f"model.layers.{i}.attention.decay.bias" for i in (0, 1)} <= left
    assert not any("norm" in name for name in decayed)
    assert {name for name in left if name.endswith("weight")} == {name for name in left if "norm" in name}


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("cached", [True, False])
def test_gradient_checkpointing(reentrant: bool, cached: bool) -> None:
    model, tokens = make().train(), text()
    told = {"labels": tokens, "use_cache": cached}

    def gradients() -> list[Any]:
        model.zero_grad()
        model(tokens, **told).loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    want = gradients()
    calls: list[int] = []
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda module, x: calls.append(1))
    gradients()
    assert len(calls) == DEPTH
    calls.clear()
    name = "activation_checkpointing" if hasattr(model, "activation_checkpointing_enable") else "gradient_checkpointing"
    getattr(model, f"{name}_enable")({"use_reentrant": reentrant})
    assert getattr(model, f"is_{name}")
    found = gradients()
    assert len(calls) == 2 * DEPTH, "computed again"
    for (parameter, _), a, b in zip(model.named_parameters(), found, want, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-12 * float(b.abs().max())), parameter
    getattr(model, f"{name}_disable")()
    calls.clear()
    gradients()
    assert len(calls) == DEPTH


def test_compiled() -> None:
    model, tokens = make(["hla2", "softmax"], num_hidden_layers=2), text()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=False)
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    want = model(tokens, attention_mask=mask).logits
    with torch.no_grad():
        found = compiled(tokens, attention_mask=mask, use_cache=False).logits
    assert_close(found[mask.bool()], want[mask.bool()], allowed(model, tokens)[mask.bool()])


def test_compiled_generation() -> None:
    """One program for the prompt, one for all tokens after it: the number of columns is not in it."""
    from torch._dynamo.testing import CompileCounterWithBackend

    model, tokens = make(["hla2"], num_hidden_layers=1), text()
    want = generated(model, tokens)
    programs = CompileCounterWithBackend("aot_eager")
    model.forward = torch.compile(model.forward, fullgraph=True, backend=programs)
    assert torch.equal(generated(model, tokens), want)
    assert programs.frame_count == 2


def test_exported() -> None:
    model, tokens = make(["hla2"], num_hidden_layers=1, attention={"conv_size": None}), text()
    length = torch.export.Dim("length", min=2, max=64)
    program = torch.export.export(
        model, (tokens,), {"use_cache": False}, dynamic_shapes={"input_ids": {1: length}, "use_cache": None}
    )
    longer = text(9, (BATCH, TOKENS + 6))
    assert_close(program.module()(longer, use_cache=False).logits, model(longer).logits, allowed(model, longer))


# --- the cache -------------------------------------------------------------------------------------------------------


def after(model: Any, tokens: Any) -> Any:
    cache = HLACache(model.config)
    with torch.no_grad():
        model(tokens, **{CACHE: cache})
    return cache


def storages(cache: Any) -> int:
    """Bytes that the tensors of a cache keep alive."""
    tensors = [x for layer in cache.layers for x in layer.state.tensors()]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


def test_the_cache_has_constant_size() -> None:
    model = make(dtype=torch.float32)
    cache = HLACache(model.config)
    assert cache.nbytes == cache.get_seq_length() == 0
    tokens, sizes = text(5, (BATCH, 1000)), {}
    with torch.no_grad():
        for start in range(0, 1000, 10):
            model(tokens[:, start : start + 10], **{CACHE: cache})
            sizes[start + 10] = cache.nbytes
        assert cache.get_seq_length() == 1000
        assert sizes[10] == sizes[1000] == sum(layer.attention.state_bytes(BATCH) for layer in model.model.layers)
        assert storages(after(model, tokens)) == storages(after(model, tokens[:, :10])), "no token behind a view"
        long = after(make(GROWING), tokens[:, :20]).nbytes
        assert long > after(make(GROWING), tokens[:, :10]).nbytes
    assert cache.layers[0].keys is None


@KINDS
def test_sequences_of_a_cache(kinds: Any) -> None:
    model = make(kinds)
    tokens, new = text(), text(7, (4, 3))
    cases = {
        "reorder_cache": (torch.tensor([1, 0, 1, 1]), [1, 0, 1, 1]),
        "batch_select_indices": (torch.tensor([1]), [1]),
        "batch_repeat_interleave": (2, [0, 0, 1, 1]),
    }
    for name, (argument, rows) in cases.items():
        cache = after(model, tokens)
        assert cache.batch_size == BATCH
        getattr(cache, name)(argument)
        assert cache.batch_size == len(rows)
        found = model(new[: len(rows)], **{CACHE: cache}).logits
        whole = torch.cat([tokens[rows], new[: len(rows)]], 1)
        assert_close(found, model(whole).logits[:, TOKENS:], allowed(model, whole)[:, TOKENS:])
    cache = after(model, tokens)
    cache.reset()
    assert cache.nbytes == cache.get_seq_length() == 0
    assert cache.batch_size == -1
    assert_close(model(new, **{CACHE: cache}).logits, model(new).logits, allowed(model, new))


def test_a_copy_of_a_cache_is_a_fork() -> None:
    model, tokens, new = make(), text(), text(7, (BATCH, 3))
    cache = after(model, tokens)
    for fork in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        with torch.no_grad():
            first = model(new, **{CACHE: fork}).logits
        assert fork.get_seq_length() == TOKENS + 3
    assert cache.get_seq_length() == TOKENS
    assert torch.equal(model(new, **{CACHE: cache}).logits, first)
    cache.layers[0].offload()
    cache.layers[0].prefetch()
    assert cache.batch_size == BATCH


def test_what_a_cache_cannot_do() -> None:
    model = make()
    cache = after(model, text())
    cache.crop(0)
    assert not cache.is_croppable
    assert not cache.is_compileable
    assert cache.get_max_length() == -1
    keys = torch.zeros(BATCH, 3, 4, 8)
    for says, call in (
        ("crop: .* A state is a sum over all tokens", lambda: cache.crop(-1)),
        ("an HLACache, which has states", lambda: cache.update(keys, keys, 0)),
        ("an HLACache, which has states", lambda: cache.layers[0].lazy_initialization(keys, keys)),
    ):
        with pytest.raises(hla.OptionError, match=says):
            call()
    assert cache.get_seq_length() == TOKENS
    assert torch.equal(model(text(8), **{CACHE: cache}).logits, model(text(8), **{CACHE: after(model, text())}).logits)


# --- generation ------------------------------------------------------------------------------------------------------


def generated(model: Any, tokens: Any, count: int = 9, **told: Any) -> Any:
    torch.manual_seed(11)
    told = {"max_new_tokens": count, "do_sample": False, "pad_token_id": 0, **told}
    if tokens is not None and "attention_mask" not in told:
        told["attention_mask"] = torch.ones_like(tokens)
    return model.generate(tokens, **told)


MODES = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_k": 20},
    "beams": {"num_beams": 3},
    "samples": {"do_sample": True, "num_return_sequences": 3},
    "best beams": {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.5},
    "stopping": {"eos_token_id": "the fourth that is made"},
    "stopping beams": {"num_beams": 3, "eos_token_id": "the fourth that is made"},
    "repetition": {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2},
}


@KINDS
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_generation_equals_that_without_a_cache(kinds: Any, mode: dict[str, Any]) -> None:
    model, tokens = make(kinds), text()
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    if "eos_token_id" in mode:
        greedy = generated(model, tokens, attention_mask=mask, num_beams=mode.get("num_beams", 1))
        mode = {**mode, "eos_token_id": int(greedy[1, TOKENS + 3])}
    columns: list[int] = []
    model.model.norm.register_forward_pre_hook(lambda module, x: columns.append(x[0].shape[1]))
    found = generated(model, tokens, attention_mask=mask, **mode)
    assert columns == [TOKENS] + [1] * (len(columns) - 1)
    columns.clear()
    want = generated(model, tokens, attention_mask=mask, use_cache=False, **mode)
    assert columns == list(range(TOKENS, TOKENS + len(columns)))
    assert torch.equal(found, want)
    assert len(columns) > 2


@KINDS
@pytest.mark.parametrize("mode", ["greedy", "beams"])
def test_left_padding_equals_none(kinds: Any, mode: str) -> None:
    model = make(kinds)
    prompts = [text(seed, (1, length)) for seed, length in ((2, 5), (3, TOKENS), (4, 1))]
    tokens, mask = torch.zeros(3, TOKENS, dtype=torch.int64), torch.zeros(3, TOKENS, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        tokens[row, TOKENS - prompt.shape[1] :], mask[row, TOKENS - prompt.shape[1] :] = prompt[0], 1
    made = generated(model, tokens, attention_mask=mask, **MODES[mode])[:, TOKENS:]
    inferred = generated(model, tokens, attention_mask=None, **MODES[mode])[:, TOKENS:]
    assert torch.equal(made, inferred)
    for row, prompt in enumerate(prompts):
        alone = generated(model, prompt, **MODES[mode])[0, prompt.shape[1] :]
        assert torch.equal(made[row], alone)


@KINDS
@pytest.mark.parametrize("size", [1, 4, TOKENS, 50])
def test_chunked_prefill(kinds: Any, size: int) -> None:
    model, tokens = make(kinds), text()
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    columns: list[int] = []
    want = generated(model, tokens, attention_mask=mask)
    model.model.norm.register_forward_pre_hook(lambda module, x: columns.append(x[0].shape[1]))
    assert torch.equal(generated(model, tokens, attention_mask=mask, prefill_chunk_size=size), want)
    whole, rest = divmod(TOKENS, size)
    assert columns[: whole + (rest > 0)] == [size] * whole + [rest] * (rest > 0)
    assert torch.equal(generated(model, tokens, attention_mask=mask, prefill_chunk_size=size, num_beams=2),
                       generated(model, tokens, attention_mask=mask, num_beams=2))  # fmt: skip


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_generation_in_16_bits(dtype: str) -> None:
    """States are float32; the logits of the whole text agree with those on the way to the rounding of 16 bits."""
    model, tokens = make(GROWING, getattr(torch, dtype)), text()
    out = generated(model, tokens, output_logits=True, return_dict_in_generate=True)
    states = [layer.state for layer in out[CACHE].layers]
    assert {x.dtype for i in (0, 2) for x in states[i].operators[0]} == {torch.float32}
    assert [x.dtype for x in states[1].tensors()[:2]] == [model.dtype] * 2
    whole = model(out.sequences[:, :-1]).logits[:, TOKENS - 1 :].float()
    assert torch.isfinite(whole).all()
    exact = make(GROWING, torch.float64)
    bound = allowed(exact, out.sequences[:, :-1])[:, TOKENS - 1 :] * (budget.UNIT[dtype] / budget.UNIT["float64"])
    assert_close(torch.stack(out.logits, 1).float(), whole, 2 * bound)  # each of them is so far from the exact ones


def test_several_turns() -> None:
    """A cache goes on where the last turn ended, and the first turn's padding stays what it was."""
    model, tokens = make(), text()
    mask = torch.ones_like(tokens)
    mask[0, :4] = 0
    cache = HLACache(model.config)
    turn, done = tokens, 0
    columns: list[int] = []
    model.model.norm.register_forward_pre_hook(lambda module, x: columns.append(x[0].shape[1]))
    for seed in (5, 6, 7):
        columns.clear()
        answer = generated(model, turn, 4, attention_mask=mask, **{CACHE: cache})
        assert columns == [turn.shape[1] - done, 1, 1, 1]
        assert cache.get_seq_length() == answer.shape[1] - 1
        assert torch.equal(answer, generated(model, turn, 4, attention_mask=mask))
        done = cache.get_seq_length()
        turn = torch.cat([answer, text(seed, (BATCH, 3))], 1)
        mask = torch.cat([mask, torch.ones(BATCH, 7, dtype=torch.int64)], 1)
    out = generated(model, tokens, 4, return_dict_in_generate=True)
    assert out[CACHE].get_seq_length() == TOKENS + 3
    assert torch.equal(generated(model, out.sequences, 5, **{CACHE: out[CACHE]}), generated(model, tokens, 9))


def test_generation_from_embeddings_and_from_nothing() -> None:
    model, tokens = make(), text()
    embedded = model.generate(
        inputs_embeds=model.get_input_embeddings()(tokens), max_new_tokens=5, do_sample=False, pad_token_id=0
    )
    assert torch.equal(embedded, generated(model, tokens, 5)[:, TOKENS:])
    model.generation_config.bos_token_id = 3
    made = model.generate(max_new_tokens=4, do_sample=False)
    assert made.shape == (1, 5)
    assert made[0, 0] == 3


def test_what_generation_cannot_do() -> None:
    model, tokens = make(), text()
    mask = torch.ones_like(tokens)
    mask[1, -2:] = 0
    for kind, says, told in (
        (hla.OptionError, "pad on the left", {"attention_mask": mask}),
        (hla.OptionError, "cache_implementation: expected None, got 'static'", {"cache_implementation": "static"}),
        (hla.OptionError, "cache_implementation: expected None", {"cache_implementation": "offloaded"}),
        (hla.DTypeError, "cache: expected an HLACache of 3 layers, got DynamicCache", {CACHE: DynamicCache()}),
        (hla.OptionError, "generate_batch: .* Use generate", {"cache_implementation": "paged"}),
        (hla.OptionError, "There are no attention weights", {"output_attentions": True}),
        (ValueError, "assisted generation is not supported with stateful models", {"prompt_lookup_num_tokens": 2}),
        (ValueError, "assisted generation is not supported with stateful models", {"assistant_model": make()}),
    ):
        with pytest.raises(kind, match=says):
            generated(model, tokens, **told)
    with pytest.raises(hla.OptionError, match=r"generate_batch: .* Use generate"):
        model.generate_batch([[1, 2]])
    for empty in ({"inputs": tokens[:, :0]}, {"inputs_embeds": torch.zeros(BATCH, 0, WIDTH, dtype=torch.float64)}):
        with pytest.raises(hla.OptionError, match="input_ids: expected a token in each prompt"):
            model.generate(**empty, max_new_tokens=2)


def test_it_assists_no_other_model() -> None:
    """What it guesses is taken back where the other model says something else."""
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 1}
    other = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=3, num_key_value_heads=3)).double().eval()
    with pytest.raises(hla.OptionError, match=r"crop: .* assisted generation, which rolls back, is not possible"):
        generated(other, text(1, (1, TOKENS)), assistant_model=make())


@KINDS
@pytest.mark.parametrize("mode", ["samples", "best beams"])
def test_several_continuations_of_a_cache(kinds: Any, mode: str) -> None:
    model, tokens = make(kinds), text()
    told, longer = MODES[mode], torch.cat([tokens, text(8, (BATCH, 3))], 1)
    cache = after(model, tokens)
    copies = max(told.get("num_beams", 1), told["num_return_sequences"])
    with pytest.raises(hla.OptionError, match=f"cache: expected one of 2 × {copies} sequences, got one of 2"):
        generated(model, longer, **told, **{CACHE: cache})
    fork = copy.deepcopy(cache)
    fork.batch_repeat_interleave(copies)
    assert torch.equal(generated(model, longer, **told, **{CACHE: fork}), generated(model, longer, **told))
    assert cache.get_seq_length() == TOKENS


# --- the rest --------------------------------------------------------------------------------------------------------


def test_masks_that_mean_something_else() -> None:
    """An additive mask would hide what it shows; 2 would be a token."""
    model, tokens = make(), text()
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    additive = (1.0 - mask.float()) * -1e9
    for kind, says, told in (
        (hla.DTypeError, "attention_mask: expected bool or int, .* mask == 0", additive),
        (hla.DTypeError, "attention_mask: expected bool or int", mask.float()),
        (hla.OptionError, "attention_mask: expected 1 for tokens and 0 for padding", 2 * mask),
        (hla.OptionError, "attention_mask: expected 1 for tokens and 0 for padding", -mask),
    ):
        with pytest.raises(kind, match=says):
            model(tokens, attention_mask=told)
        with pytest.raises(kind, match=says):
            model.generate(tokens, attention_mask=told, max_new_tokens=2)


def test_labels_that_do_not_fit() -> None:
    model, tokens = make(), text()
    cache = after(model, tokens)
    for kind, says, told in (
        (
            hla.ShapeError,
            r"labels: expected shape \(2, 11\), as the tokens, got \(1, 22\)",
            {"labels": tokens.view(1, -1)},
        ),
        (hla.ShapeError, r"labels: .* got \(22,\)", {"labels": tokens.view(-1)}),
        (hla.ShapeError, r"labels: .* got \(11, 2\)", {"labels": tokens.T}),
        (hla.DTypeError, "labels: expected an int64 tensor, got torch.int32", {"labels": tokens.int()}),
        (hla.DTypeError, "labels: expected an int64 tensor, got list", {"labels": tokens.tolist()}),
        (hla.OptionError, "logits_to_keep: expected 0 beside labels", {"labels": tokens, "logits_to_keep": 3}),
        (hla.OptionError, "logits_to_keep: ", {"labels": tokens, "logits_to_keep": torch.tensor([0])}),
    ):
        with pytest.raises(kind, match=says):
            model(tokens, **told, **{CACHE: cache})
    assert cache.get_seq_length() == TOKENS
    embeds = model.get_input_embeddings()(tokens)
    assert torch.equal(model(inputs_embeds=embeds, labels=tokens).loss, model(tokens, labels=tokens).loss)


def test_embeddings_that_do_not_fit() -> None:
    model = make()
    for kind, says, embeds in (
        (
            hla.ShapeError,
            r"inputs_embeds: expected shape \(B, T, 18\), got \(2, 11, 1\)",
            torch.zeros(BATCH, TOKENS, 1),
        ),
        (hla.ShapeError, r"inputs_embeds: .* got \(2, 11, 19\)", torch.zeros(BATCH, TOKENS, WIDTH + 1)),
        (hla.ShapeError, r"inputs_embeds: .* got \(11, 18\)", torch.zeros(TOKENS, WIDTH)),
        (hla.DTypeError, "inputs_embeds: expected a floating-point tensor, got torch.int64", text()),
    ):
        with pytest.raises(kind, match=says):
            model(inputs_embeds=embeds.double() if embeds.is_floating_point() else embeds)


def test_a_cache_as_long_as_the_text() -> None:
    """It would be fed tokens that it has seen."""
    model, tokens = make(), text()
    longer = torch.cat([tokens, text(7, (BATCH, 4))], 1)
    embeds, mask = model.get_input_embeddings()(longer), torch.ones_like(longer)
    padded = mask[:, :TOKENS].clone()
    padded[0, :2] = 0
    for given in (
        {"inputs": tokens},
        {"inputs": tokens, "attention_mask": padded},
        {"inputs": tokens[:, :8], "attention_mask": mask[:, :8]},
        {"inputs": tokens[:, :3]},
        {"inputs_embeds": embeds[:, :TOKENS]},
        {"inputs_embeds": embeds[:, TOKENS:], "attention_mask": mask},
    ):
        cache = after(model, tokens)
        with pytest.raises(hla.OptionError, match=r"cache: expected fewer tokens than .* Pass the whole text so far"):
            model.generate(**given, **{CACHE: cache}, max_new_tokens=2)
        assert cache.get_seq_length() == TOKENS
    want = generated(model, longer)[:, TOKENS + 4 :]
    for given in (
        {"inputs": longer},
        {"inputs": longer[:, TOKENS:], "attention_mask": mask},
        {"inputs_embeds": embeds},
    ):
        told = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0, CACHE: after(model, tokens)}
        assert torch.equal(model.generate(**given, **told)[:, -9:], want)


def test_caches_that_do_not_fit() -> None:
    model, tokens = make(), text()
    cache = after(model, tokens)
    cache.layers[1].reset()
    for call in (lambda: model(tokens, **{CACHE: cache}), lambda: generated(model, text(1, (2, 20)), **{CACHE: cache})):
        with pytest.raises(hla.OptionError, match=r"cache: .* seen the same tokens, got \[11, 0, 11\] tokens"):
            call()
    with pytest.raises(hla.DTypeError, match="state: expected the state of a layer, got Tensor"):
        cache.layers[1].advance(tokens, 3)
    others = {
        "another operator": (make(["ahla", layers.MIXED, "ahla"]), hla.OptionError),
        "another decay": (make(attention={**FIELDS["attention"], "decay": 0.9}), hla.OptionError),
        "softmax": (make(GROWING), (hla.OptionError, hla.DTypeError)),
        "another dtype": (make(dtype=torch.float32), hla.DTypeError),
    }
    for name, (other, kind) in others.items():
        cache = after(other, tokens)
        with pytest.raises(kind, match="state"):
            model(tokens, **{CACHE: cache})
        assert [layer.seen for layer in cache.layers] == [TOKENS] * DEPTH, name
        assert other(tokens, **{CACHE: cache}).logits.shape == (BATCH, TOKENS, VOCABULARY)


def test_a_cache_that_fits_the_first_layers_alone() -> None:
    """They have taken it on before the error; it is not used on."""
    model, other, tokens = make(["hla2", "ahla", "ahla"]), make(["hla2", "hla2", "ahla"]), text()
    cache = after(other, tokens)
    with pytest.raises(hla.OptionError, match="A state serves only layers with the options that made it"):
        model(tokens, **{CACHE: cache})
    with pytest.raises(hla.OptionError, match=r"seen the same tokens, got \[22, 11, 11\] tokens"):
        other(tokens, **{CACHE: cache})


def test_indices_of_no_sequence() -> None:
    model = make()
    cache = after(model, text())
    for kind, says, call in (
        (
            hla.OptionError,
            "beam_idx: expected entries of a batch of 2, .* got 4",
            ("reorder_cache", torch.tensor([4])),
        ),
        (hla.OptionError, "beam_idx: .* got -1", ("reorder_cache", torch.tensor([0, -1]))),
        (hla.DTypeError, "beam_idx: expected an int64 or int32 tensor, got list", ("reorder_cache", [1])),
        (hla.DTypeError, "got torch.float32", ("reorder_cache", torch.ones(1))),
        (hla.ShapeError, r"beam_idx: expected shape \(N,\)", ("reorder_cache", torch.zeros(1, 2).long())),
        (hla.OptionError, "indices: expected entries of a batch of 2", ("batch_select_indices", torch.tensor([2]))),
        (hla.ShapeError, r"indices: expected shape \(2,\)", ("batch_select_indices", torch.ones(3).bool())),
        (hla.OptionError, "repeats: expected an integer ≥ 1, got 0", ("batch_repeat_interleave", 0)),
    ):
        with pytest.raises(kind, match=says):
            getattr(cache, call[0])(call[1])
    assert cache.batch_size == BATCH
    cache.batch_select_indices(torch.tensor([False, True]))
    assert cache.batch_size == 1
    for other in ("x", object()):
        with pytest.raises(hla.DTypeError, match="config: expected a config with num_hidden_layers"):
            HLACache(other)
    with pytest.raises(hla.DTypeError, match=r"decoder: expected an hla\.models\.Decoder, got HLAForCausalLM"):
        HLAForCausalLM.from_decoder(model)


def test_refused_calls() -> None:
    model, tokens = make(), text()
    mask = torch.ones_like(tokens)
    cache = after(model, tokens)
    small = HLACache(config(["hla2"], num_hidden_layers=1))
    for kind, says, told in (
        (hla.OptionError, "input_ids, inputs_embeds: expected exactly one, got none", {"input_ids": None}),
        (hla.OptionError, "expected exactly one, got both", {"inputs_embeds": torch.zeros(BATCH, TOKENS, WIDTH)}),
        (hla.ShapeError, r"tokens: expected shape \(B, T\)", {"input_ids": tokens[0]}),
        (hla.DTypeError, "tokens: expected an int64 or int32 tensor", {"input_ids": tokens.double()}),
        (hla.OptionError, "tokens: expected numbers below vocab_size = 31", {"input_ids": tokens + VOCABULARY}),
        (hla.OptionError, "logits_to_keep: expected a number of columns", {"logits_to_keep": -1, CACHE: cache}),
        (hla.OptionError, "logits_to_keep: expected a number of columns", {"logits_to_keep": True}),
        (hla.ShapeError, r"attention_mask: expected shape \(2, 11\), got \(2, 10\)", {"attention_mask": mask[:, 1:]}),
        (hla.ShapeError, r"attention_mask: expected shape \(2, 11\), got \(1, 11\)", {"attention_mask": mask[:1]}),
        (hla.ShapeError, r"or \(2, 22\), got \(2, 12\)", {"attention_mask": torch.ones(2, 12), CACHE: cache}),
        (hla.ShapeError, "know no other masks", {"attention_mask": torch.ones(BATCH, 1, TOKENS, TOKENS)}),
        (hla.ShapeError, "a batch of 1, as x, got 2", {"input_ids": tokens[:1], CACHE: cache}),
        (hla.DTypeError, "an HLACache of 3 layers, got HLACache of 1", {CACHE: small}),
        (hla.DTypeError, "an HLACache of 3 layers, got DynamicCache", {CACHE: DynamicCache()}),
        (hla.OptionError, "They are the same thing", {"past_key_values": cache, "cache": cache}),
        (hla.OptionError, "position_ids: expected none", {"position_ids": torch.arange(1, 12)[None]}),
        (hla.OptionError, "position_ids: expected none", {"position_ids": torch.arange(11)[None], CACHE: cache}),
        (hla.OptionError, "There are no attention weights", {"output_attentions": True}),
        (TypeError, "token_type_ids: expected no such argument", {"token_type_ids": tokens}),
        (TypeError, "attention_msk: expected no such argument", {"attention_msk": mask}),
    ):
        with pytest.raises(kind, match=says):
            model(**{"input_ids": tokens, **told})
    assert cache.get_seq_length() == TOKENS, "an error leaves the cache as it was"
    with pytest.raises(hla.OptionError, match="Its config says what each layer is"):
        AutoModelForCausalLM.from_config(config(), attn_implementation=register("hla2")[0])
    with pytest.raises(hla.OptionError, match="Its config says what each layer is"):
        model.set_attn_implementation("hla2")
    model.set_attn_implementation("eager")
    with pytest.raises(hla.DTypeError, match="config: expected an HLAConfig"):
        HLAForCausalLM(config().to_model_config())


def test_importing_the_package_imports_no_framework() -> None:
    names = "{'torch', 'transformers', 'jax', 'numpy'} & set(sys.modules)"
    script = f"import json, sys, hla, hla.integrations; print(json.dumps(sorted({names})))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=300)
    assert json.loads(done.stdout) == []

"""`hla.models`: the model against a plain one, streaming, generation, files."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import budget
import hla
import layers
from hla.models import ModelConfig
from libraries import only

torch: Any = only("torch")

from hla.models import Decoder  # noqa: E402
from hla.nn.torch.sampling import probabilities  # noqa: E402
from hla.nn.torch.softmax import SoftmaxAttention  # noqa: E402

VOCABULARY, WIDTH, TOKENS, BATCH = 31, 24, 11, 2
ATTENTION = {"head_dim": layers.D, "value_dim": layers.DV, "rotary": True}
KINDS = ["hla2", "softmax", layers.MIXED]
UNIT = budget.UNIT["float64"]


def config(**told: Any) -> ModelConfig:
    common = {"d_model": WIDTH, "num_layers": 3, "num_heads": layers.HEADS, "num_kv_heads": 3, "attention": ATTENTION}
    return ModelConfig(vocab_size=VOCABULARY, **{**common, "layers": KINDS, **told})


def make(seed: int = 0, dtype: Any = None, **told: Any) -> Any:
    """A model whose parts all matter: weights larger than at the start of training."""
    torch.manual_seed(seed)
    model = Decoder(config(**told), dtype=dtype or torch.float64)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                p.add_(0.3 * torch.randn_like(p))
            elif "mlp" in name or "embedding" in name or "head" in name:
                p.mul_(15.0)
            else:
                p.mul_(2.0)
    return model


def text(seed: int = 1, shape: tuple[int, ...] = (BATCH, TOKENS)) -> Any:
    return torch.from_numpy(np.random.default_rng(seed).integers(VOCABULARY, size=shape))


# --- the plain model -------------------------------------------------------------------------------------------------


def rms(x: Any, weight: Any) -> Any:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight


def softmax_attention(parameters: dict[str, Any], x: Any, kv_heads: int) -> Any:
    size = WIDTH // layers.HEADS
    q, k, v = (x @ parameters[f"{name}_proj.weight"].T for name in "qkv")
    outputs = []
    for head in range(layers.HEADS):
        shared = slice(head * kv_heads // layers.HEADS * size, (head * kv_heads // layers.HEADS + 1) * size)
        turned_q = layers.turn(q[:, head * size : (head + 1) * size], 10_000.0)
        scores = turned_q @ layers.turn(k[:, shared], 10_000.0).T * size**-0.5
        raised = np.exp(np.where(np.tri(len(x), dtype=bool), scores, -np.inf))
        outputs.append(raised / raised.sum(-1, keepdims=True) @ v[:, shared])
    return np.concatenate(outputs, -1) @ parameters["out_proj.weight"].T


def plain(parameters: dict[str, Any], tokens: Any, told: ModelConfig) -> Any:
    """Logits (T, vocabulary) of one sequence."""
    x = parameters["embedding.weight"][tokens]
    for i, kind in enumerate(told.kinds()):
        start = f"blocks.{i}."
        own = {name.removeprefix(start): p for name, p in parameters.items() if name.startswith(start)}
        attention = {name.removeprefix("attention."): p for name, p in own.items() if name.startswith("attention.")}
        y = rms(x, own["attention_norm.weight"])
        if kind == "softmax":
            x = x + softmax_attention(attention, y, told.num_kv_heads or 0)
        else:
            options = {"operator": kind if isinstance(kind, str) else list(kind), "num_kv_heads": told.num_kv_heads}
            x = x + layers.reference(attention, y, {**options, "decay": "forget_gate", "rotary": True})
        y = rms(x, own["mlp_norm.weight"])
        inner = layers.silu(y @ own["mlp.gate_proj.weight"].T) * (y @ own["mlp.up_proj.weight"].T)
        x = x + inner @ own["mlp.down_proj.weight"].T
    return rms(x, parameters["norm.weight"]) @ parameters.get("head.weight", parameters["embedding.weight"]).T


def parameters_of(model: Any) -> dict[str, Any]:
    return {name: p.detach().double().numpy() for name, p in model.named_parameters()}


def expected(model: Any, tokens: Any) -> tuple[Any, Any]:
    """Logits (T, vocabulary) and what they may be off by (T,): the model of tests/layers.py, blocks in a row."""
    given = parameters_of(model)
    want = plain(given, tokens, model.config)
    rng, step = np.random.default_rng(3), 1e-6
    moved = np.abs(want).max(-1)
    for _ in range(3):
        changed = {name: p * (1 + step * rng.normal(size=p.shape)) for name, p in given.items()}
        moved = np.maximum(moved, np.abs(plain(changed, tokens, model.config) - want).max(-1) / step)
    per_block = layers.tolerance({"operator": layers.MIXED}, len(tokens), UNIT)
    return want, per_block * model.config.num_layers**0.5 * moved


def assert_close(found: Any, want: Any, allowed: Any) -> None:
    apart = np.abs(found.detach().numpy() - want).max(-1)
    assert (apart <= allowed).all(), (apart / allowed).max()


@pytest.mark.parametrize("told", [{}, {"tie_embeddings": False}, {"layers": "softmax"}, {"num_kv_heads": 1}], ids=str)
def test_logits(told: dict[str, Any]) -> None:
    model, tokens = make(**told), text()
    logits = model(tokens)
    for row in range(BATCH):
        want, allowed = expected(model, tokens[row].numpy())
        assert np.median(allowed) < 1e-10 * np.abs(want).max(), "this compares nothing"
        assert_close(logits[row], want, allowed)


def test_every_parameter_learns() -> None:
    model = make(tie_embeddings=False)
    model(text()).square().sum().backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert float(p.grad.abs().max()) > 0, name


def test_ties() -> None:
    assert not any("head" in name for name, _ in Decoder(config()).named_parameters())
    own = Decoder(config(tie_embeddings=False))
    assert own.head.weight.shape == (VOCABULARY, WIDTH)


# --- streaming -------------------------------------------------------------------------------------------------------


def test_pieces_and_steps() -> None:
    model, tokens = make(), text()
    pieces, state = [], model.init_state(BATCH)
    for start, stop in ((0, 4), (4, 4), (4, 9)):
        logits, state = model(tokens[:, start:stop], state, True)
        pieces.append(logits)
    for t in (9, 10):
        logits, state = model.step(tokens[:, t], state)
        pieces.append(logits[:, None])
    found = torch.cat(pieces, 1)
    for row in range(BATCH):
        assert_close(found[row], *expected(model, tokens[row].numpy()))


MASKS = {
    "left": [[1] * 4 + [0] * 7, [0] * 11],
    "right": [[0] * 11, [0] * 5 + [1] * 6],
    "inside": [[0, 1, 1, 0] * 2 + [0, 1, 0], [1, 0, 1] * 3 + [0, 1]],
}


@pytest.mark.parametrize("where", MASKS)
def test_padding(where: str) -> None:
    """Also in two pieces and a step."""
    model, tokens, mask = make(), text(), torch.tensor(MASKS[where], dtype=torch.bool)
    whole = model(tokens, key_padding_mask=mask)
    first, state = model(tokens[:, :6], None, True, key_padding_mask=mask[:, :6])
    second, state = model(tokens[:, 6:], state, True, key_padding_mask=mask[:, 6:])
    last, _ = model.step(tokens[:, 0], state)
    for row in range(BATCH):
        kept = tokens[row, ~mask[row]]
        want, allowed = expected(model, torch.cat([kept, tokens[row, :1]]).numpy())
        for found in (whole, torch.cat([first, second], 1)):
            assert_close(found[row, ~mask[row]], want[:-1], allowed[:-1])
        assert_close(last[row], want[-1], allowed[-1])


def test_size_of_the_state() -> None:
    """Constant without softmax layers; with one it grows by its keys and values, and by a place."""
    model = make(layers="hla2")
    sizes = [model(text(shape=(BATCH, n)), None, True)[1].nbytes for n in (1, 5, 20)]
    assert sizes == [model.init_state(BATCH).nbytes] * 3
    model = make()
    sizes = [model(text(shape=(BATCH, n)), None, True)[1].nbytes for n in (1, 5)]
    assert sizes[1] - sizes[0] == 4 * BATCH * (2 * 3 * 4 * 8 + 8)


def test_saved_states(tmp_path: Path) -> None:
    """`torch.save` and `torch.load`, which reads tensors and known types only; of all that a model's state holds."""
    model, tokens = make(attention={**ATTENTION, "normalize": True}), text()
    _, state = model(tokens, None, True)
    torch.save({"all": state, "first": state.layers[0]}, tmp_path / "state.pt")
    found = torch.load(tmp_path / "state.pt", weights_only=True)
    want, _ = model.step(tokens[:, 0], state)
    assert torch.equal(model.step(tokens[:, 0], found["all"])[0], want)
    assert type(found["first"]) is type(state.layers[0])


def test_reordered_states() -> None:
    model, tokens = make(), text()
    _, state = model(tokens, None, True)
    index = torch.tensor([1, 1, 0])
    found, _ = model.step(tokens[index, 0], state.reorder(index).to("cpu").detach())
    want, _ = model.step(tokens[:, 0], state)
    assert torch.allclose(found, want[index], rtol=1e-12, atol=1e-12)


# --- generation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("told", [{}, {"layers": "ahla"}], ids=str)
def test_greedy_generation(told: dict[str, Any]) -> None:
    """The likeliest token of the whole sequence so far, again and again; prompts padded on the left or not."""
    model, prompt = make(**told), text()
    made = model.generate(prompt, 9, temperature=0.0)
    sequence = prompt
    for _ in range(9):
        sequence = torch.cat([sequence, model(sequence)[:, -1].argmax(-1, keepdim=True)], 1)
    assert torch.equal(made, sequence[:, TOKENS:])
    padded = torch.cat([torch.zeros(BATCH, 3, dtype=torch.int64), prompt], 1)
    mask = torch.arange(TOKENS + 3).expand(BATCH, -1) < 3
    assert torch.equal(model.generate(padded, 9, temperature=0.0, key_padding_mask=mask), made)
    behind = torch.cat([prompt, torch.zeros(BATCH, 3, dtype=torch.int64)], 1)
    assert torch.equal(model.generate(behind, 9, temperature=0.0, key_padding_mask=mask.flip(1)), made)


def test_generation_draws_from_the_model() -> None:
    """What is drawn is distributed as the logits say: frequencies of the second token, given the first."""
    model, count = make(layers="hla2", num_layers=1), 4000
    prompt = text(shape=(1, 5)).repeat(count, 1)
    told: dict[str, Any] = {"temperature": 1.3, "top_k": 12, "top_p": 0.9}
    made = model.generate(prompt, 2, generator=torch.Generator().manual_seed(0), **told)
    first = probabilities(model(prompt[:1])[:, -1], **told)[0].detach()
    check_frequencies(made[:, 0], first)
    common = int(made[:, 0].mode().values)
    after = probabilities(model(torch.cat([prompt[:1], torch.tensor([[common]])], 1))[:, -1], **told)[0].detach()
    check_frequencies(made[made[:, 0] == common, 1], after)


def check_frequencies(drawn: Any, chances: Any) -> None:
    """Each within five standard deviations; none that has no chance."""
    found = torch.bincount(drawn, minlength=VOCABULARY).double()
    spread = (len(drawn) * chances * (1 - chances)).sqrt()
    assert ((found - len(drawn) * chances).abs() <= 5 * spread).all()
    assert (chances > 0).sum() > 2


def kept_plainly(logits: Any, temperature: float, top_k: int | None, top_p: float | None) -> Any:
    """One row, with loops."""
    raised = np.exp((logits - logits.max()) / temperature)
    chances = raised / raised.sum()
    order = sorted(range(len(logits)), key=lambda i: (-chances[i], i))[:top_k]
    total = sum(chances[i] for i in order)
    chosen, reached = [], 0.0
    for i in order:
        if top_p is None or reached < top_p or not chosen:
            chosen.append(i)
        reached += chances[i] / total
    result = np.zeros_like(chances)
    result[chosen] = chances[chosen] / chances[chosen].sum()
    return result


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [None, 1, 4, 100])
@pytest.mark.parametrize("top_p", [None, 1e-9, 0.5, 0.93, 1.0])
def test_probabilities(temperature: float, top_k: int | None, top_p: float | None) -> None:
    logits = 2 * torch.from_numpy(np.random.default_rng(5).normal(size=(3, VOCABULARY)))
    logits[2] = logits[2].round()  # equal ones
    found = probabilities(logits, temperature, top_k, top_p)
    want = np.stack([kept_plainly(row, temperature, top_k, top_p) for row in logits.numpy()])
    assert np.array_equal(found.numpy() > 0, want > 0)
    assert np.allclose(found.numpy(), want, rtol=1e-12, atol=0)


def test_coldest_temperature_and_largest_count() -> None:
    """Neither infinite logits nor numbers without a dtype: the likeliest, and everything."""
    logits = 9 * torch.from_numpy(np.random.default_rng(5).normal(size=(3, VOCABULARY))).float()
    for cold in (1e-20, 1e-40, 1e-320):
        assert torch.equal(probabilities(logits, cold), probabilities(logits, 0.0)), cold
    shut = logits.index_fill(1, torch.tensor([2, 5]), -torch.inf)
    assert torch.allclose(probabilities(shut, 1e300), (shut > -torch.inf) / (VOCABULARY - 2), rtol=1e-5, atol=0)
    assert torch.equal(probabilities(logits, 1.0, 10**30), probabilities(logits, 1.0, VOCABULARY))


def test_top_p_at_the_border() -> None:
    """Two of four equal ones are one half exactly: no third is kept."""
    found = probabilities(torch.zeros(1, 4), 1.0, None, 0.5)
    assert found.tolist() == [[0.5, 0.5, 0.0, 0.0]]


def test_temperature_zero_takes_the_likeliest() -> None:
    logits = torch.randn(3, VOCABULARY, dtype=torch.bfloat16)
    found = probabilities(logits, 0.0)
    assert torch.equal(found.argmax(-1), logits.float().argmax(-1))
    assert torch.equal(found.sum(-1), torch.ones(3))


def test_stop_and_stream() -> None:
    model, prompt = make(), text()
    whole = model.generate(prompt, 12, temperature=0.0)
    stop = int(whole[0, 4])
    seen: list[Any] = []
    made = model.generate(prompt, 12, temperature=0.0, stop=stop, on_token=seen.append)
    assert torch.equal(made, torch.stack(seen, 1))
    for row in range(BATCH):
        at = (whole[row] == stop).nonzero()[:1].flatten().tolist()
        end = at[0] if at else 11
        kept = min(end + 1, made.shape[1])
        assert torch.equal(made[row, :kept], whole[row, :kept])
        assert (made[row, kept:] == stop).all()
    ended = model.generate(prompt[:1], 12, temperature=0.0, stop=stop)
    assert ended.shape[1] == whole[0].tolist().index(stop) + 1
    assert model.generate(prompt, 12, on_token=lambda token: True).shape == (BATCH, 1)
    assert model.generate(prompt, 0).shape == (BATCH, 0)
    assert model.generate(prompt[:0], 3).shape == (0, 3)


def test_several_stops() -> None:
    """The first in a row ends it, and is what follows."""
    model, prompt = make(), text()
    whole = model.generate(prompt, 12, temperature=0.0)
    stops = [int(whole[0, 5]), int(whole[1, 2])]
    made = model.generate(prompt, 12, temperature=0.0, stop=stops)
    ends = [next(i for i, token in enumerate(row) if token in stops) for row in whole.tolist()]
    assert ends[0] != ends[1], "this compares nothing"
    assert made.shape[1] == max(ends) + 1
    for row, end in enumerate(ends):
        assert torch.equal(made[row, : end + 1], whole[row, : end + 1])
        assert (made[row, end:] == whole[row, end]).all()


def test_generation_leaves_the_model_as_it_was() -> None:
    model = make(dropout=0.5)
    first = model.generate(text(), 5, temperature=0.0)
    assert model.training
    assert torch.equal(first, model.generate(text(), 5, temperature=0.0)), "no dropout"
    assert not torch.equal(model(text()), model(text())), "dropout in training"
    model.eval()
    model.generate(text(), 1)
    assert not model.training

    def fails(token: Any) -> None:
        raise RuntimeError("planted")

    model.train()
    model.blocks[1].eval()
    modes = [module.training for module in model.modules()]
    with pytest.raises(RuntimeError, match="planted"):
        model.generate(text(), 1, on_token=fails)
    model.generate(text(), 1)
    assert [module.training for module in model.modules()] == modes, "a part in another mode stays there"


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("told", [{}, {"tie_embeddings": False}], ids=str)
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_save_and_load(told: dict[str, Any], dtype: str, tmp_path: Path) -> None:
    model = make(**told).to(getattr(torch, dtype))
    path = tmp_path / "model.safetensors"
    model.save(path)
    again = Decoder.load(path)
    assert again.config.kinds() == model.config.kinds()
    assert {p.dtype for p in again.parameters()} == {getattr(torch, dtype)}
    for (name, p), q in zip(model.state_dict().items(), again.state_dict().values(), strict=True):
        assert torch.equal(p, q), name
    assert all(p.requires_grad for p in again.parameters())
    found, want = again(text()).detach().double(), model(text()).detach().double()
    assert torch.allclose(found, want, rtol=1e-12, atol=1e-12 if dtype == "float64" else 1e-1)
    path.unlink()
    assert list(tmp_path.iterdir()) == []


def test_damaged_files(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model, path = make(), tmp_path / "model.safetensors"
    model.save(path)
    whole = path.read_bytes()
    tensors = dict(model.state_dict())
    right = {"format": "hla-decoder", "config": model.config.to_json()}

    def load(says: str) -> None:
        with pytest.raises(ValueError, match=says):
            Decoder.load(path)

    path.write_bytes(whole[: len(whole) // 2])
    load("a model written by Decoder.save")
    path.write_bytes(b"")
    load("a model written by Decoder.save")
    save_file(tensors, path)
    load("without the mark of a model")
    save_file(tensors, path, {**right, "config": "{}"})
    load("an object with the fields")
    save_file(tensors, path, {**right, "config": "nonsense"})
    load("a model written by Decoder.save")
    save_file({name: x for name, x in tensors.items() if name != "norm.weight"}, path, right)
    load(r"norm\.weight")
    save_file({**tensors, "norm.weight": torch.ones(3)}, path, right)
    load(r"norm\.weight")
    with pytest.raises(FileNotFoundError):
        Decoder.load(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError):
        Decoder.load(tmp_path)


def test_inner_size() -> None:
    """8/3 of the width, rounded up to a multiple of 8, or as told."""
    assert [config(d_model=width, layers="hla2").inner for width in (24, 25, 256)] == [64, 72, 688]
    assert Decoder(config(hidden_size=10)).blocks[0].mlp.up_proj.weight.shape == (10, WIDTH)
    assert Decoder(config()).blocks[0].mlp.up_proj.weight.shape == (64, WIDTH)


def test_config_as_text() -> None:
    told = config(layers=["hla2", "softmax", layers.MIXED], dropout=0.1)
    again = ModelConfig.from_json(told.to_json())
    assert again.kinds() == told.kinds() == ("hla2", "softmax", tuple(layers.MIXED))
    assert json.loads(again.to_json()) == json.loads(told.to_json())


def test_config_of_numpy_numbers(tmp_path: Path) -> None:
    """A model of them can be saved."""
    attention = {"decay": np.float32(0.5), "conv_size": np.int64(2)}
    told = config(d_model=np.int64(WIDTH), layers="hla2", dropout=np.float32(0.25), attention=attention)
    Decoder(told).save(tmp_path / "model.safetensors")
    again = Decoder.load(tmp_path / "model.safetensors").config
    assert again == told
    assert type(again.dropout) is float


def test_config_keeps_what_it_was_told() -> None:
    kinds: list[Any] = ["hla2", "softmax", list(layers.MIXED)]
    attention: dict[str, Any] = {"decay": [0.9, 0.8, 0.7]}
    told = config(layers=kinds, attention=attention)
    before = told.to_json()
    kinds[0], kinds[2][0] = "ahla", "ahla"
    attention["decay"][0] = 0.1
    attention["rotary"] = True
    assert told.to_json() == before


# --- the rest of PyTorch ---------------------------------------------------------------------------------------------


def test_copies_and_meta() -> None:
    model = make()
    assert torch.allclose(copy.deepcopy(model)(text()), model(text()), rtol=1e-12, atol=1e-12)
    empty = Decoder(config(), device="meta")
    assert empty(text().to("meta")).shape == (BATCH, TOKENS, VOCABULARY)
    empty.to_empty(device="cpu")
    with torch.no_grad():
        for p in empty.parameters():
            p.fill_(torch.nan)
    empty.reset_parameters()
    assert torch.isfinite(empty(text())).all()


def test_the_start_of_training() -> None:
    """All tokens about equally likely, and what a block adds is small."""
    torch.manual_seed(0)
    model = Decoder(config(num_layers=6, layers="hla2", attention={}))
    tokens = torch.randint(VOCABULARY, (4, 40))
    loss = torch.nn.functional.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    assert float(loss.detach()) == pytest.approx(np.log(VOCABULARY), rel=0.05)
    shrink = 12**-0.5
    for block in model.blocks:
        out, down = block.attention.out_proj.weight.detach(), block.mlp.down_proj.weight.detach()
        assert float(out.abs().max()) == pytest.approx(shrink * (6 / (WIDTH + WIDTH)) ** 0.5, rel=0.02)
        assert float(down.std()) == pytest.approx(0.02 * shrink, rel=0.1)
        assert float(block.mlp.up_proj.weight.detach().std()) == pytest.approx(0.02, rel=0.1)
    assert float(model.embedding.weight.detach().std()) == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize("kinds", ["hla2", ["ahla", "softmax", "hla3"]], ids=str)
def test_training(kinds: Any) -> None:
    """It learns to say again what came before."""
    torch.manual_seed(0)
    model = Decoder(config(layers=kinds, attention={}, num_kv_heads=None))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(40):
        tokens = torch.randint(VOCABULARY, (16, 1)).expand(-1, 7)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert all(torch.isfinite(p).all() for p in model.parameters())
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5]), losses[::5]


@pytest.mark.parametrize("kinds", [*KINDS[:2], ["ahla", "softmax", layers.MIXED]], ids=str)
def test_packed_sequences(kinds: Any) -> None:
    """Each as if it were alone, empty ones among them; without softmax with states, too."""
    model, tokens = make(layers=kinds), text(shape=(1, TOKENS))
    offsets = torch.tensor([0, 4, 4, 5, TOKENS])
    found = model(tokens, cu_seqlens=offsets)
    alone = [model(part) for part in torch.split(tokens, offsets.diff().tolist(), dim=1)]
    assert torch.allclose(found, torch.cat(alone, 1), rtol=1e-11, atol=1e-11 * float(found.detach().abs().max()))
    mask = torch.zeros(1, TOKENS, dtype=torch.bool)
    with pytest.raises(hla.OptionError, match="cu_seqlens"):
        model(tokens, cu_seqlens=offsets, key_padding_mask=mask)
    with pytest.raises(hla.OptionError, match=f"from 0 to T = {TOKENS}"):
        model(tokens, cu_seqlens=offsets[:-1])
    if "softmax" not in model.config.kinds():
        _, state = model(tokens, return_state=True, cu_seqlens=offsets)
        after, _ = model.step(tokens.expand(4, -1)[:, 0], state)
        longer = torch.cat([tokens[:, 5:], tokens[:, :1]], 1)
        assert torch.allclose(after[3], model(longer)[0, -1], rtol=1e-11, atol=1e-11)
        again = model(tokens, state, cu_seqlens=offsets)
        assert torch.allclose(again[0, 4], model(tokens[:, [4, 4]])[0, 1], rtol=1e-11, atol=1e-11)
    else:
        for told in ({"return_state": True}, {"state": model.init_state(4)}):
            with pytest.raises(hla.OptionError, match="none beside cu_seqlens in softmax attention, got one"):
                model(tokens, cu_seqlens=offsets, **told)


def test_packed_softmax_in_a_program_is_as_exact_as_alone() -> None:
    """Positions start anew: rounded angles of late ones would be errors twenty times as large."""
    torch.manual_seed(0)
    wide = SoftmaxAttention(24, 3, 1, 10_000.0, dtype=torch.float64)
    narrow = copy.deepcopy(wide).float()
    x = torch.randn(1, 1550, 24)
    with torch.no_grad():
        want = wide(x[:, 1500:].double())
        packed = torch.compile(lambda x, n: narrow(x, cu_seqlens=n), backend="eager", fullgraph=True)
        found = packed(x, torch.tensor([0, 1500, 1550]))[:, 1500:]
        errors = [float((y - want).abs().max()) for y in (found, narrow(x[:, 1500:]))]
    assert errors[0] < 4 * errors[1], errors


def test_compiled() -> None:
    model, tokens = make(layers=["hla2", "softmax"], num_layers=2, attention={"conv_size": None}), text()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(tokens), model(tokens), rtol=1e-12, atol=1e-12)


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ({"d_model": 0}, "d_model: expected an integer ≥ 1"),
        ({"num_layers": 2.0}, "num_layers: expected an integer ≥ 1"),
        ({"hidden_size": 0}, "hidden_size: expected an integer ≥ 1"),
        ({"layers": "hla4"}, "layers: expected one of linear_attention, hla2, ahla, hla3, softmax, got 'hla4'"),
        (
            {"layers": ["hla2"] * 2},
            "layers: expected a name, or a list .* of num_layers = 3 blocks, got 2",
        ),
        ({"layers": ["hla2", "hla2", "mamba"]}, r"layers\[2\]: expected one of"),
        ({"layers": ["hla2", "hla2", ["hla2"] * 5]}, r"layers\[2\]: expected one of .* for each of num_heads = 6"),
        ({"layers": ["hla2", "hla2", ["softmax"] * 6]}, r"layers\[2\]: .* Softmax is for whole layers"),
        ({"attention": {"operator": "ahla"}}, "attention: expected options that the model does not set itself"),
        ({"dropout": 1}, "dropout: expected a probability"),
        ({"tie_embeddings": 1}, "tie_embeddings: expected True or False"),
        ({"num_kv_heads": 4}, "num_kv_heads: expected a divisor of num_heads = 6"),
        ({"layers": "softmax", "num_kv_heads": 4}, "num_kv_heads: expected a divisor of num_heads = 6"),
        ({"layers": "softmax", "d_model": 18}, "d_model: expected a multiple of twice num_heads = 6"),
        ({"num_kv_heads": 4, "layers": "hla2"}, "num_kv_heads: expected a divisor of num_heads = 6"),
        ({"attention": {"decay": 2.0}}, "decay: expected a number in"),
        ({"attention": {"process_group": None}}, "got process_group. Set it on the layers"),
        ({"attention": {"decays": 0.9}}, "attention: expected options of HigherOrderAttention, got 'decays'"),
        ({"attention": {3: 4}}, "attention: expected options of HigherOrderAttention, got 3"),
        ({"attention": None}, "attention: expected a mapping .*, got None"),
        ({"attention": ["decay"]}, "attention: expected a mapping"),
        ({"norm_eps": 0.0}, "norm_eps: expected a small number > 0, got 0.0"),
        ({"rotary_base": 1.0}, "rotary_base: expected a number above 1, got 1.0"),
        ({"d_model": 25, "layers": "hla2", "attention": {}}, "head_dim: expected a size, as num_heads = 6"),
    ],
    ids=str,
)
def test_refused_configs(told: dict[str, Any], says: str) -> None:
    with pytest.raises(hla.OptionError, match=says):
        config(**told)


def test_generation_is_not_shared() -> None:
    """With a process group a call is of one rank's slice, so a token that all pass would count for each of them."""
    model, tokens = make(layers=["hla2", "softmax"], num_layers=2), text()
    state = model.init_state(BATCH)
    model.blocks[0].attention.process_group = torch.distributed.GroupMember.NON_GROUP_MEMBER
    for name, call in (
        ("step", lambda: model.step(tokens[:, 0], state)),
        ("generate", lambda: model.generate(tokens, 3)),
    ):
        with pytest.raises(hla.OptionError, match=f"process_group: expected None in all layers for {name}"):
            call()
    model.blocks[0].attention.process_group = None
    assert model.generate(tokens, 3).shape == (BATCH, 3)


def test_whole_texts_need_no_table_of_queries_by_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = make(layers="softmax", num_layers=1), text()
    own, seen = torch.nn.functional.scaled_dot_product_attention, []

    def looked_at(q: Any, k: Any, v: Any, mask: Any, *, is_causal: bool, **told: Any) -> Any:
        seen.append((mask is None, is_causal))
        return own(q, k, v, mask, is_causal=is_causal, **told)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", looked_at)
    whole, state = model(tokens, return_state=True)
    padded = model(tokens, key_padding_mask=torch.zeros(BATCH, TOKENS, dtype=torch.bool))
    assert torch.allclose(whole, padded, rtol=0, atol=1e-10)
    model.step(tokens[:, 0], state)
    assert seen == [(True, True), (False, False), (False, False)]


def test_states_of_softmax_layers_are_checked() -> None:
    """Nothing is rounded, and nothing broadcasts over heads, tokens or the batch."""
    model, tokens = make(layers="softmax", num_layers=1), text()
    state = model(tokens, return_state=True)[1]
    [own] = state.layers
    past, places = own.past, own.places
    for kind, says, changed in (
        (
            hla.DTypeError,
            "past.keys: expected torch.float64, got torch.float32",
            {"past": own.map(torch.Tensor.float).past},
        ),
        (hla.OptionError, "past.keys: expected ", {"past": type(past)(past[0][:, :, :1], past[1])}),
        (hla.OptionError, "past.values: expected ", {"past": type(past)(past[0], past[1][:, :-1])}),
        (hla.OptionError, "places: expected ", {"places": places[:, :1]}),
        (hla.DTypeError, "places: expected a torch.Tensor, got list", {"places": [1]}),
        (hla.DTypeError, "past.keys: expected a torch.Tensor, got NoneType", {"past": type(past)(None, past[1])}),
        (hla.OptionError, "places: expected ", {"places": places[..., None]}),
        (hla.DTypeError, "places: expected torch.int64, got torch.int32", {"places": places.int()}),
        (hla.ShapeError, "position: expected a batch of", {"position": own.position[:1]}),
    ):
        with pytest.raises(kind, match=f"state.{says}"):
            model(tokens, state._replace(layers=(own._replace(**changed),)))
    narrow = make(layers="softmax", num_layers=1, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        state = narrow(tokens, return_state=True)[1]
    assert state.layers[0].past[0].dtype == torch.bfloat16
    assert narrow(tokens, state).dtype == torch.float32


def test_refused_calls() -> None:
    model, tokens = make(), text()
    mask = torch.zeros(BATCH, TOKENS, dtype=torch.bool)
    short = make(num_layers=1, layers="hla2")
    for kind, says, call in (
        (hla.DTypeError, "tokens: expected an int64 or int32 tensor", lambda: model(tokens.double())),
        (hla.ShapeError, r"tokens: expected shape \(B, T\)", lambda: model(tokens[0])),
        (hla.ShapeError, r"tokens: expected shape \(B,\)", lambda: model.step(tokens, model.init_state(BATCH))),
        (
            hla.OptionError,
            "states of 3 layers, got 1",
            lambda: model(tokens, short.init_state(2)),
        ),
        (hla.DTypeError, "a SoftmaxState", lambda: model(tokens, make(layers="hla2").init_state(2))),
        (hla.DTypeError, "a LayerState", lambda: model(tokens, make(layers="softmax").init_state(2))),
        (hla.ShapeError, "a batch of 2, as x, got 1", lambda: model(tokens, model.init_state(1))),
        (hla.ShapeError, "as x, got 1", lambda: make(layers="softmax")(tokens, make(layers="softmax").init_state(1))),
        (
            hla.OptionError,
            "that of a layer with rotary_base=10000.0, got rotary_base=500.0",
            lambda: make(layers="softmax")(tokens, make(layers="softmax", rotary_base=500.0).init_state(BATCH)),
        ),
        (
            hla.OptionError,
            "that of a layer with num_kv_heads=3, got num_kv_heads=1",
            lambda: make(layers="softmax", num_kv_heads=3)(
                tokens, make(layers="softmax", num_kv_heads=1).init_state(BATCH)
            ),
        ),
        (
            hla.MixedArrayError,
            "past.keys: expected a tensor on cpu, as x, got meta",
            lambda: make(layers="softmax")(tokens, make(layers="softmax").init_state(BATCH).to("meta")),
        ),
        (hla.ShapeError, "key_padding_mask", lambda: make(layers="softmax")(tokens, key_padding_mask=mask[:1])),
        (hla.DTypeError, "key_padding_mask", lambda: make(layers="softmax")(tokens, key_padding_mask=mask.long())),
        (hla.DTypeError, "state: expected a DecoderState, got list", lambda: model(tokens, [1, 2, 3])),
        (hla.DTypeError, "tokens: expected an int64 or int32 tensor, got list", lambda: model.step([1, 2], None)),
        (hla.DTypeError, "state: expected a DecoderState, got NoneType", lambda: model.step(tokens[:, 0], None)),
        (
            hla.OptionError,
            "states of 3 layers, got 2",
            lambda: model(tokens, model.init_state(BATCH)._replace(layers=(None, *model.init_state(BATCH).layers[1:]))),
        ),
        (hla.OptionError, "batch: expected an integer ≥ 0, got 2.5", lambda: make(layers="softmax").init_state(2.5)),
        (hla.DTypeError, "on_token: expected a function", lambda: model.generate(tokens, 1, on_token=3)),
        (hla.OptionError, "below vocab_size = 31, from 0, got 31", lambda: model(tokens * 0 + VOCABULARY)),
        (hla.OptionError, "below vocab_size = 31, from 0, got -1", lambda: model.generate(tokens * 0 - 1, 1)),
        (hla.OptionError, "from 0, got 31", lambda: model.step(tokens[:, 0] * 0 + 31, model.init_state(BATCH))),
        (hla.DTypeError, "config: expected a ModelConfig, got dict", lambda: Decoder({"vocab_size": 3})),
        (hla.DTypeError, "dtype: expected one of", lambda: Decoder(config(), dtype=torch.int64)),
        (hla.DTypeError, "index: expected an int64", lambda: model.init_state(BATCH).reorder([0])),
        (hla.OptionError, "index: .* got 2", lambda: model.init_state(BATCH).reorder(torch.tensor([2]))),
        (hla.OptionError, "stop: expected a token below vocab_size = 31", lambda: model.generate(tokens, 1, stop=31)),
        (hla.OptionError, "stop: expected a token below", lambda: model.generate(tokens, 1, stop=[1, "a"])),
        (hla.OptionError, "temperature: expected a number ≥ 0", lambda: model.generate(tokens, 1, temperature=-1.0)),
        (hla.OptionError, "top_k: expected an integer ≥ 1", lambda: model.generate(tokens, 1, top_k=0)),
        (hla.OptionError, "top_p: expected a probability", lambda: model.generate(tokens, 1, top_p=0.0)),
        (hla.OptionError, "count: expected an integer ≥ 0", lambda: model.generate(tokens, -1)),
        (hla.OptionError, "prompts of one token at least", lambda: model.generate(tokens[:, :0], 1)),
        (hla.OptionError, "prompts of one token at least", lambda: model.generate(tokens, 1, key_padding_mask=~mask)),
    ):
        with pytest.raises(kind, match=says):
            call()


def test_importing_models_imports_no_framework() -> None:
    script = "import json, sys, hla.models; print(json.dumps(sorted({'torch', 'jax', 'numpy'} & set(sys.modules))))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=300)
    assert json.loads(done.stdout) == []
    with pytest.raises(AttributeError, match="no attribute 'Encoder'"):
        hla.models.Encoder  # noqa: B018
    assert {"Decoder", "ModelConfig"} <= set(dir(hla.models))

"""Packed sequences in `hla.integrations.transformers`: several texts in one row, as padding-free training has them.

Judge. The same model on each text by itself: logits, losses and gradients.

Tolerance. That of tests/test_transformers.py for logits. For gradients the same with gradients in the place of logits;
backward takes twice the roundings of forward, so λ √(3 n) u.
"""

from __future__ import annotations

import copy
import inspect
import os
from pathlib import Path
from typing import Any

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"

import budget
import hla
import layers
from libraries import only

torch: Any = only("torch")
pytest.importorskip("transformers")

from torch.nn import functional  # noqa: E402
from transformers import DataCollatorWithFlattening  # noqa: E402

from hla.integrations.transformers import HLACache, HLAForCausalLM, HLAModel, packing  # noqa: E402
from hla.integrations.transformers.model import CACHE  # noqa: E402
from hla.nn.torch import HigherOrderAttention  # noqa: E402
from test_transformers import (  # noqa: E402
    CONSTANT,
    DEPTH,
    GROWING,
    KINDS,
    VOCABULARY,
    allowed,
    assert_close,
    generated,
    make,
    text,
)

LENGTHS = (4, 1, 6, 2)
TOTAL = sum(LENGTHS)
TOLD = {
    "positions": ("position_ids",),
    "offsets": ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
    "numbers": ("seq_idx",),
    "all": packing.Told._fields,
}


def texts(seed: int = 0, lengths: tuple[int, ...] = LENGTHS) -> list[Any]:
    return [text(seed + i, (1, n)) for i, n in enumerate(lengths)]


def batch(rows: list[Any], told: tuple[str, ...] = packing.Told._fields) -> dict[str, Any]:
    """One row of all of them, as the collator makes it."""
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    made = collator([{"input_ids": row[0].tolist()} for row in rows])
    return {name: made[name] for name in ("input_ids", "labels", *told)}


def alone(model: Any, rows: list[Any]) -> tuple[Any, Any]:
    """Logits of each text by itself, and how far they may be off."""
    logits = [model(row, use_cache=False).logits for row in rows]
    return torch.cat(logits, 1), torch.cat([allowed(model, row) for row in rows], 1)


def loss(logits: Any, tokens: Any) -> Any:
    """The sum over all next tokens, in float64: that of `loss_function` is in float32."""
    return functional.cross_entropy(logits[0, :-1], tokens[0, 1:], reduction="sum")


def losses_alone(model: Any, rows: list[Any]) -> Any:
    return sum(loss(model(row, use_cache=False).logits, row) for row in rows if row.shape[1] > 1)


def gradients(model: Any, value: Any) -> list[Any]:
    return [x.detach() for x in torch.autograd.grad(value, list(model.parameters()))]


@KINDS
@pytest.mark.parametrize("told", TOLD.values(), ids=TOLD)
def test_each_text_is_as_if_alone(kinds: Any, told: Any) -> None:
    model, rows = make(kinds), texts()
    given = batch(rows, told)
    labels = given.pop("labels")
    found = model(**given, output_hidden_states=True)
    want, bound = alone(model, rows)
    assert_close(found.logits, want, bound)
    assert CACHE not in found
    assert [x.shape[:2] for x in found.hidden_states] == [(1, TOTAL)] * (DEPTH + 1)
    joined = torch.cat(rows, 1)
    assert float((model(joined).logits - want).detach().abs().max()) > 1e6 * float(bound.max()), (
        "texts that see each other"
    )
    for mine in (labels, joined):  # that one text does not say the next is not left to who makes the labels
        got = float(model(**given, labels=mine).loss.detach())
        assert got == pytest.approx(float(losses_alone(model, rows).detach()) / (TOTAL - len(LENGTHS)), rel=1e-5)
    shared = model(**given, labels=labels, num_items_in_batch=torch.tensor(40)).loss
    assert float(shared.detach()) == pytest.approx(float(losses_alone(model, rows).detach()) / 40, rel=1e-5)


@KINDS
def test_gradients(kinds: Any) -> None:
    model, rows = make(kinds).train(), texts()
    given = batch(rows, ("position_ids",))
    kept = given.pop("labels")[0, 1:] >= 0
    logits = model(**given).logits[0, :-1][kept]
    found = gradients(model, functional.cross_entropy(logits, given["input_ids"][0, 1:][kept], reduction="sum"))
    want = gradients(model, losses_alone(model, rows))
    moving, step = copy.deepcopy(model), 1e-6
    moved = [x.abs().max() for x in want]
    generator = torch.Generator().manual_seed(3)
    for _ in range(3):
        with torch.no_grad():
            for p, q in zip(model.parameters(), moving.parameters(), strict=True):
                q.copy_(p * (1 + step * torch.randn(p.shape, dtype=p.dtype, generator=generator)))
        again = gradients(moving, losses_alone(moving, rows))
        moved = [torch.maximum(m, (x - w).abs().max() / step) for m, x, w in zip(moved, again, want, strict=True)]
    per_block = layers.tolerance({"operator": layers.MIXED}, max(LENGTHS), budget.UNIT["float64"])
    for (name, _), x, w, m in zip(model.named_parameters(), found, want, moved, strict=True):
        assert float((x - w).abs().max()) <= per_block * (3 * DEPTH) ** 0.5 * float(m), name


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant: bool) -> None:
    model = make(GROWING).train()
    given = batch(texts())
    want = gradients(model, model(**given).loss)
    calls: list[int] = []
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda module, x: calls.append(1))
    name = "activation_checkpointing" if hasattr(model, "activation_checkpointing_enable") else "gradient_checkpointing"
    getattr(model, f"{name}_enable")({"use_reentrant": reentrant})
    model(**given).loss.backward()
    assert len(calls) == 2 * DEPTH, "computed again"
    for p, b in zip(model.parameters(), want, strict=True):
        assert torch.allclose(p.grad, b, rtol=1e-12, atol=1e-12 * float(b.abs().max()))


def test_compiled() -> None:
    """One program for all numbers and lengths of texts; with gradients."""
    from torch._dynamo.testing import CompileCounterWithBackend

    model = make(["hla2", "softmax"], num_hidden_layers=2).train()
    programs = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, fullgraph=True, backend=programs, dynamic=True)
    for seed, lengths in enumerate((LENGTHS, (5, 3, 3), (2, 2, 2, 2, 9))):
        rows = texts(10 * seed, lengths)
        given = batch(rows, ("position_ids", "cu_seq_lens_q"))
        found, want = compiled(**given), model(**given)
        assert_close(found.logits, want.logits, alone(model, rows)[1])
        for a, b in zip(gradients(model, found.loss), gradients(model, want.loss), strict=True):
            assert torch.allclose(a, b, rtol=1e-12, atol=1e-12 * float(b.abs().max()))
    assert programs.frame_count == 1


def test_several_rows_in_a_program() -> None:
    model, tokens = make(["hla2", "softmax"], num_hidden_layers=2), text(3, (2, 7))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for offsets in ([0, 4, 7, 8, 10, 14], [0, 7, 14], [0, 2, 2, 7, 7, 14, 14]):
        given = {"cu_seq_lens_q": torch.tensor(offsets), "labels": tokens}
        found, want = compiled(tokens, **given), model(tokens, **given)
        assert torch.allclose(
            found.logits, want.logits, rtol=1e-11, atol=1e-11 * float(want.logits.detach().abs().max())
        )
        assert float(found.loss.detach()) == pytest.approx(float(want.loss.detach()), rel=1e-6)


def test_compiled_in_parts() -> None:
    """Where values are needed that a program does not know, it ends, and another one goes on."""
    model, rows = make(["softmax", "hla2"], num_hidden_layers=2), texts()
    given = batch(rows, ("position_ids",))
    with torch.no_grad():
        found = torch.compile(model, backend="eager")(**given)
    assert_close(found.logits, *alone(model, rows))
    assert float(found.loss) == pytest.approx(float(model(**given).loss.detach()), rel=1e-5)
    torch.compiler.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="pass cu_seq_lens_q"):
        torch.compile(model, backend="eager", fullgraph=True)(**batch(rows, ("position_ids",)))


def test_exported() -> None:
    model, rows = make(["hla2", "softmax"], num_hidden_layers=2, attention={"conv_size": None}), texts()
    given = batch(rows, ("cu_seq_lens_q",))
    told = {"cu_seq_lens_q": given["cu_seq_lens_q"], "use_cache": False}
    program = torch.export.export(model, (given["input_ids"],), told)
    assert_close(program.module()(given["input_ids"], **told).logits, *alone(model, rows))
    wrong = {"use_cache": False, "position_ids": torch.arange(TOTAL)[None]}
    with pytest.raises(hla.OptionError, match="a traced program"):
        torch.export.export(model, (given["input_ids"],), wrong, strict=False)


@KINDS
def test_several_rows(kinds: Any) -> None:
    model, tokens = make(kinds), text(3, (2, 7))
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2], [0, 0, 1, 0, 1, 2, 3]])
    rows = [tokens[:1, :4], tokens[:1, 4:], tokens[1:, :1], tokens[1:, 1:3], tokens[1:, 3:]]
    want, bound = (x.view(2, 7, *x.shape[2:]) for x in alone(model, rows))
    numbers = torch.tensor([[3, 3, 3, 3, 4, 4, 4], [0, 1, 1, 2, 2, 2, 2]])
    offsets = torch.tensor([0, 4, 7, 8, 8, 10, 14])  # with an empty one
    ways = {"position_ids": positions}, {"seq_idx": numbers}, {"cu_seq_lens_q": offsets}
    for told in (*ways, {**ways[0], **ways[1], **ways[2]}):
        found = model(tokens, labels=tokens, output_hidden_states=True, **told)
        assert_close(found.logits, want, bound)
        assert [x.shape[:2] for x in found.hidden_states] == [(2, 7)] * (DEPTH + 1)
        assert float(found.loss.detach()) == pytest.approx(float(losses_alone(model, rows).detach()) / 9, rel=1e-5)
    same = model(tokens, position_ids=positions[:1]).logits
    assert_close(same[:1], want[:1], bound[:1])
    assert torch.equal(same, model(tokens, position_ids=positions[:1].expand(2, -1)).logits)
    embeds = model.get_input_embeddings()(tokens)
    assert torch.equal(model(inputs_embeds=embeds, position_ids=positions).logits[0, :4], same[0, :4])


def test_lengths_are_not_waited_for_in_each_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offsets reach the layers on the CPU, and nothing is looked at where nothing is told."""
    model, rows = make(CONSTANT), texts()
    seen: list[Any] = []
    own = HigherOrderAttention.forward

    def watched(self: Any, *args: Any, cu_seqlens: Any = None, **told: Any) -> Any:
        seen.append(cu_seqlens)
        return own(self, *args, cu_seqlens=cu_seqlens, **told)

    monkeypatch.setattr(HigherOrderAttention, "forward", watched)
    read: list[int] = []
    positions_of = packing._from_positions
    monkeypatch.setattr(packing, "_from_positions", lambda *told: read.append(1) or positions_of(*told))
    model(**batch(rows))
    assert len(read) == 1
    assert [x.tolist() for x in seen] == [[0, 4, 5, 11, 13]] * DEPTH
    assert {x.device.type for x in seen} == {"cpu"}
    seen.clear()
    monkeypatch.setattr(packing, "_agreed", None)
    joined = torch.cat(rows, 1)
    model(joined, labels=joined)
    assert seen == [None] * DEPTH


def test_rows_of_one_text_are_not_packed() -> None:
    model, tokens = make(), text()
    count = tokens.shape[1]
    want = model(tokens)
    for told in (
        {"position_ids": torch.arange(count)[None]},
        {"position_ids": torch.arange(count, dtype=torch.int32).expand(2, -1)},
        {"seq_idx": torch.tensor([[0], [1]]).expand(-1, count)},
        {"cu_seq_lens_q": torch.tensor([0, count, 2 * count]), "max_length_q": count},
    ):
        found = model(tokens, **told)
        assert torch.equal(found.logits, want.logits)
        assert isinstance(found[CACHE], HLACache)
    assert model(tokens[:, :0], position_ids=torch.zeros(1, 0, dtype=torch.int64)).logits.shape == (2, 0, VOCABULARY)


def test_generation_makes_no_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model counts; positions that are given are looked at, and go on."""
    model, tokens = make(), text()
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    told: list[Any] = []
    own = HLAModel.forward
    monkeypatch.setattr(
        HLAModel, "forward", lambda self, *args, **kw: told.append(kw["position_ids"]) or own(self, *args, **kw)
    )
    want = generated(model, tokens, attention_mask=mask)
    assert set(told) == {None}
    told.clear()
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    assert torch.equal(generated(model, tokens, attention_mask=mask, position_ids=positions), want)
    assert [x[1].tolist() for x in told[1:3]] == [[11], [12]]
    with pytest.raises(hla.OptionError, match="position_ids: expected none, or the number of tokens"):
        generated(model, tokens, attention_mask=mask, position_ids=positions + 1)


@KINDS
def test_the_last_text_of_a_row_goes_on(kinds: Any) -> None:
    """Without a cache; with one packed sequences are refused."""
    model, rows = make(kinds), texts()
    given = batch(rows, ("position_ids",))
    made = generated(model, given["input_ids"], position_ids=given["position_ids"], use_cache=False)
    assert torch.equal(made[:, TOTAL:], generated(model, rows[-1])[:, LENGTHS[-1] :])


def test_layers_that_share_a_sequence_with_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    monkeypatch.setattr(HigherOrderAttention, "process_group", "a group")
    with pytest.raises(hla.OptionError, match="process_group: expected None beside packed sequences"):
        model(**batch(texts()))


def test_arguments_that_trainer_would_drop() -> None:
    """It keeps the columns of a data set that `forward` has by name."""
    for model in (HLAModel, HLAForCausalLM):
        assert set(packing.Told._fields) <= set(inspect.signature(model.forward).parameters)


def test_refused() -> None:
    model, rows = make(), texts()
    given = batch(rows)
    tokens = given.pop("input_ids")
    del given["labels"]
    positions, offsets, numbers = given["position_ids"], given["cu_seq_lens_q"], given["seq_idx"]
    cache = HLACache(model.config)
    mask = torch.ones_like(tokens)
    other = torch.tensor([0, 4, 6, 11, 13])
    beside = "position_ids: .* Packed sequences go without attention_mask and cache"
    differ = "position_ids, {}: expected the same sequences"
    for kind, says, told in (
        (hla.OptionError, "use_cache: expected False for packed", {**given, "use_cache": True}),
        (hla.OptionError, "cu_seq_lens_q: expected none beside a cache", {**given, CACHE: cache}),
        (hla.OptionError, beside, {"position_ids": positions, CACHE: cache}),
        (hla.OptionError, "cu_seq_lens_q: expected none beside an attention_mask", {**given, "attention_mask": mask}),
        (hla.OptionError, "seq_idx: expected none beside", {"seq_idx": numbers, "attention_mask": mask}),
        (hla.OptionError, "max_length_k: expected none beside", {"max_length_k": 9, "attention_mask": mask}),
        (hla.OptionError, beside, {"position_ids": positions, "attention_mask": mask}),
        (hla.OptionError, differ.format("cu_seq_lens_q"), {**given, "cu_seq_lens_q": other}),
        (hla.OptionError, differ.format("cu_seq_lens_k"), {**given, "cu_seq_lens_k": other}),
        (hla.OptionError, differ.format("seq_idx"), {**given, "seq_idx": numbers * 0}),
        (hla.OptionError, "max_length_q: expected 6", {**given, "max_length_q": 5}),
        (hla.OptionError, "max_length_k: expected 13", {"max_length_k": 12}),
        (hla.DTypeError, "max_length_q: expected an integer", {**given, "max_length_q": 6.0}),
        (hla.OptionError, "position_ids: expected none, or 0, 1, 2", {"position_ids": positions + 2}),
        (hla.OptionError, "position_ids: expected none, or 0, 1, 2", {"position_ids": positions * 2}),
        (hla.OptionError, "position_ids: expected none, or 0, 1, 2", {"position_ids": positions.flip(1)}),
        (hla.OptionError, "seq_idx: expected non-decreasing", {"seq_idx": -numbers}),
        (hla.OptionError, "cu_seq_lens_q: .* from 0 to 13 tokens", {"cu_seq_lens_q": offsets[:-1]}),
        (hla.OptionError, "cu_seq_lens_q: .* from 0 to 13 tokens", {"cu_seq_lens_q": offsets[1:]}),
        (hla.OptionError, "cu_seq_lens_q: .* None may decrease", {"cu_seq_lens_q": torch.tensor([0, 5, 4, 13])}),
        (hla.ShapeError, r"cu_seq_lens_k: expected shape \(N \+ 1,\)", {"cu_seq_lens_k": offsets[None]}),
        (hla.ShapeError, r"position_ids: expected shape \(1, 13\)", {"position_ids": positions[:, 1:]}),
        (hla.ShapeError, r"position_ids: expected shape \(1, 13\)", {"position_ids": positions.expand(3, -1)}),
        (hla.ShapeError, r"seq_idx: expected shape \(1, 13\)", {"seq_idx": numbers[0]}),
        (hla.DTypeError, "position_ids: expected an int64 or int32", {"position_ids": positions.double()}),
        (hla.DTypeError, "cu_seq_lens_q: expected an int64 or int32", {"cu_seq_lens_q": offsets.tolist()}),
    ):  # fmt: skip
        for labels in ({}, {"labels": tokens}):
            with pytest.raises(kind, match=says):
                model(tokens, **told, **labels)
    assert cache.get_seq_length() == 0
    twice = tokens.expand(2, -1)
    with pytest.raises(hla.OptionError, match="cu_seq_lens_q: expected a start at each of 2 rows"):
        model(twice, cu_seq_lens_q=torch.tensor([0, 4, 26]))
    with pytest.raises(hla.OptionError, match=beside):
        generated(model, tokens, position_ids=positions)


def test_trainer(tmp_path: Path) -> None:
    """The same losses as with padding, in training and evaluation."""
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": row[0].tolist()} for row in texts(0, (4, 1, 6, 2, 5, 7, 3, 8))]

    def padded(features: list[Any]) -> dict[str, Any]:
        longest = max(len(x["input_ids"]) for x in features)
        tokens, labels = torch.zeros(len(features), longest).long(), torch.full((len(features), longest), -100)
        for i, x in enumerate(features):
            n = len(x["input_ids"])
            tokens[i, :n] = torch.tensor(x["input_ids"])
            labels[i, 1:n] = tokens[i, 1:n]
        return {"input_ids": tokens, "labels": labels, "attention_mask": (tokens > 0).long()}

    found = []
    for collator in (padded, DataCollatorWithFlattening(), DataCollatorWithFlattening(return_flash_attn_kwargs=True)):
        torch.manual_seed(0)
        arguments = TrainingArguments(
            output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2,
            per_device_eval_batch_size=4, learning_rate=0.1, optim="sgd", lr_scheduler_type="constant", logging_steps=1,
            report_to="none", use_cpu=True, save_strategy="no", disable_tqdm=True, prediction_loss_only=True,
        )  # fmt: skip
        trainer = Trainer(make(GROWING), arguments, train_dataset=rows, eval_dataset=rows, data_collator=collator)
        trainer.train()
        logged = [x["loss"] for x in trainer.state.log_history if "loss" in x]
        assert len(logged) == 3
        found.append([*logged, trainer.evaluate()["eval_loss"]])
    assert found[1] == pytest.approx(found[0], rel=1e-5)  # Transformers computes them in float32
    assert found[2] == pytest.approx(found[0], rel=1e-5)
    assert found[0][0] != pytest.approx(found[0][2], rel=1e-2), "it learns"

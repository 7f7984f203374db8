"""`hla.nn.torch`: what contradicts itself is refused, at construction where it can be, and errors say the way out."""

from __future__ import annotations

import dataclasses
import gc
import inspect
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import hla
from layers import BATCH, CONTRADICTIONS, D_MODEL, MIXED, OTHERS, SAME, TOKENS
from libraries import only

torch: Any = only("torch")

from hla import states  # noqa: E402
from hla.nn.kinds import FREE, kind_of  # noqa: E402
from hla.nn.options import DEFAULTS, LayerOptions  # noqa: E402
from hla.nn.torch import HigherOrderAttention, HigherOrderOperator  # noqa: E402
from test_nn_torch import make, tokens  # noqa: E402

OPTION, SHAPE, DTYPE = hla.OptionError, hla.ShapeError, hla.DTypeError


@pytest.mark.parametrize(("told", "says"), CONTRADICTIONS, ids=[str(c[0]) for c in CONTRADICTIONS])
def test_construction(told: dict[str, Any], says: str) -> None:
    with pytest.raises(OPTION, match=re.escape(says)) as caught:
        HigherOrderAttention(**{"d_model": 12, "num_heads": 4, **told})
    assert re.search(r"got .+\. \S.+\.$", str(caught.value)), "it says what to do"


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ({"operator": "softmax"}, "operator: expected one of"),
        ({"operator": "ahla", "ridge": 1.0}, "ridge: expected 0 for ahla"),
        ({"causal": False, "decay": 0.9}, "decay: expected None with causal=False"),
        ({"decay": 2.0}, "decay: expected a number in (0, 1]"),
        ({"causal": None}, "causal: expected True or False"),
        ({"decay": [0.9, 0.8]}, "got list. Decays of heads or tokens go into each call"),
        ({"decay": torch.ones(3)}, "got Tensor. Decays of heads or tokens go into each call"),
    ],
    ids=str,
)
def test_construction_of_the_operator(told: dict[str, Any], says: str) -> None:
    with pytest.raises(OPTION, match=re.escape(says)):
        HigherOrderOperator(**told)


@pytest.mark.parametrize("dtype", ["float32", torch.int64, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_dtypes_that_parameters_cannot_have(dtype: Any) -> None:
    refused(
        DTYPE, "dtype: expected one of torch.float16, torch.bfloat16", lambda: HigherOrderAttention(12, 4, dtype=dtype)
    )


@pytest.mark.parametrize("group", ["world", 3, True, ("mesh", "sp"), [None]], ids=str)
def test_process_groups_are_looked_at_when_they_are_set(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    says, layer = "process_group: expected a ProcessGroup, a DeviceMesh", HigherOrderAttention(12, 4)
    for kind in (HigherOrderOperator, lambda **told: HigherOrderAttention(12, 4, **told)):
        refused(OPTION, says, lambda kind=kind: kind(process_group=group))
    refused(OPTION, says, lambda: setattr(layer, "process_group", group))
    assert layer.process_group is None
    monkeypatch.setattr(torch.distributed, "is_available", lambda: False)
    refused(OPTION, says, lambda: setattr(layer, "process_group", group))


@pytest.mark.parametrize(("backend", "got"), [("zz", "'zz'"), (3, "3"), (["torch", "zz"], "'zz'")], ids=str)
def test_backends_that_there_are_not(backend: Any, got: str) -> None:
    says = f"backend: expected one of cupy, jax, numpy, torch, triton, auto, got {got}. Register it"
    refused(hla.UnknownBackendError, says, lambda: HigherOrderAttention(12, 4, backend=backend))
    refused(hla.UnknownBackendError, says, lambda: HigherOrderOperator(backend=backend))


def test_defaults() -> None:
    """Those of the layer, which models read without a framework."""
    found = inspect.signature(HigherOrderAttention).parameters.values()
    others = ("d_model", "num_heads", "process_group", "device", "dtype")
    assert dict(DEFAULTS) == {p.name: p.default for p in found if p.name not in others}


def test_unknown_keyword() -> None:
    with pytest.raises(TypeError, match="num_key_heads"):
        HigherOrderAttention(12, 4, num_key_heads=2)


# --- calls -----------------------------------------------------------------------------------------------------------


def refused(kind: Any, says: str, call: Any) -> None:
    with pytest.raises(kind, match=re.escape(says)) as caught:
        call()
    assert re.search(r"got .+\. \S.+\.$", str(caught.value)), "it says what to do"


def test_inputs() -> None:
    layer, x = make({"operator": "hla2"}), tokens()
    refused(SHAPE, "x: expected shape (B, T, d_model = 13), got (11, 13)", lambda: layer(x[0]))
    refused(SHAPE, "x: expected shape (B, T, d_model = 13), got (2, 11, 12)", lambda: layer(x[..., :12]))
    refused(
        DTYPE, "x: expected torch.float64, the dtype of the parameters, got torch.float32", lambda: layer(x.float())
    )
    refused(DTYPE, "x: expected torch.float64", lambda: layer(x.long()))
    refused(DTYPE, "x: expected a torch.Tensor, got ndarray", lambda: layer(x.numpy()))
    state = layer.init_state(BATCH)
    refused(SHAPE, "x_t: expected shape (B, d_model = 13)", lambda: layer.step(x, state))
    refused(SHAPE, "x_t: expected shape (B, d_model = 13), got (2, 7)", lambda: layer.step(x[:, 0, :7], state))
    with torch.autocast("cpu", torch.bfloat16):
        refused(DTYPE, "x: expected torch.float64", lambda: layer(x.float()))
        refused(DTYPE, "x: expected torch.float64", lambda: layer(x.long()))
    single = make({"operator": "hla2"}, dtype=torch.float32)
    refused(DTYPE, "use torch.autocast", lambda: single(x.bfloat16()))
    with torch.autocast("cpu", torch.bfloat16):
        assert single(x.bfloat16()).dtype == torch.bfloat16


def test_masks() -> None:
    layer, x = make({"operator": "hla2"}), tokens()
    mask = torch.zeros(BATCH, TOKENS, dtype=torch.bool)
    for wrong, kind, says in (
        (mask.long(), DTYPE, "key_padding_mask: expected a bool tensor, True for padding, got torch.int64"),
        (mask.float(), DTYPE, "key_padding_mask: expected a bool tensor"),
        (mask.tolist(), DTYPE, "key_padding_mask: expected a bool tensor, True for padding, got list"),
        (mask[:1], SHAPE, "key_padding_mask: expected shape (2, 11), got (1, 11)"),
        (mask[:, :1], SHAPE, "key_padding_mask: expected shape (2, 11), got (2, 1)"),
        (mask[0], SHAPE, "key_padding_mask: expected shape (2, 11), got (11,)"),
        (mask.to("meta"), hla.MixedArrayError, "key_padding_mask: expected a tensor on cpu"),
    ):
        refused(kind, says, lambda wrong=wrong: layer(x, key_padding_mask=wrong))
    state = layer.init_state(BATCH)
    refused(SHAPE, "expected shape (2,), got (1,)", lambda: layer.step(x[:, 0], state, key_padding_mask=mask[:1, 0]))
    offsets = torch.tensor([0, TOKENS])
    refused(
        OPTION,
        "key_padding_mask: expected none beside cu_seqlens",
        lambda: layer(x[:1], key_padding_mask=mask[:1], cu_seqlens=offsets),
    )


@pytest.mark.parametrize(
    ("offsets", "kind", "says"),
    [
        ([0, 5], OPTION, "cu_seqlens: expected offsets from 0 to T = 11, got 0 … 5"),
        ([1, 11], OPTION, "cu_seqlens: expected offsets from 0 to T = 11"),
        ([0, 7, 4, 11], OPTION, "cu_seqlens: expected non-decreasing offsets"),
        ([[0, 11]], SHAPE, "cu_seqlens: expected shape (N + 1,), got (1, 2)"),
        ([], DTYPE, "cu_seqlens: expected an integer tensor"),
        ([0.0, 11.0], DTYPE, "cu_seqlens: expected an integer tensor"),
        ([0j, 11 + 0j], DTYPE, "cu_seqlens: expected an integer tensor"),
    ],
)
def test_offsets(offsets: Any, kind: Any, says: str) -> None:
    layer, x = make({"operator": "hla2"}), tokens(shape=(1, TOKENS, D_MODEL))
    refused(kind, says, lambda: layer(x, cu_seqlens=torch.tensor(offsets)))


def test_packed_sequences_are_one_row() -> None:
    layer, x = make({"operator": "hla2"}), tokens()
    refused(SHAPE, "x: expected shape (1, T, d_model)", lambda: layer(x, cu_seqlens=torch.tensor([0, TOKENS])))
    refused(DTYPE, "cu_seqlens: expected an integer tensor", lambda: layer(x[:1], cu_seqlens=[0, TOKENS]))


@pytest.mark.parametrize(("options", "says"), OTHERS, ids=[str(told) for told, _ in OTHERS])
def test_states_of_other_layers(options: dict[str, Any], says: str) -> None:
    layer, other, x = make({"operator": "hla2"}), make({"operator": "hla2", **options}), tokens()
    y = torch.zeros(BATCH, TOKENS, options.get("d_model", D_MODEL), dtype=torch.float64)
    state = layer.init_state(BATCH)
    refused(OPTION, f"state: expected that of a layer with {says}", lambda: other(y, state))
    refused(OPTION, f"state: expected that of a layer with {says}", lambda: other.step(y[:, 0], state))
    refused(OPTION, "A state serves only layers with", lambda: layer(x, other(y, return_state=True)[1]))


def test_every_option_is_that_of_a_state_or_is_free() -> None:
    """A new option has to be put into one of the lists."""
    told = {"operators" if name == "operator" else name for options, _ in OTHERS for name in options}
    assert told.isdisjoint(FREE)
    assert told | {*FREE, "causal"} == {field.name for field in dataclasses.fields(LayerOptions)}


@pytest.mark.parametrize("options", SAME, ids=str)
def test_states_go_on_where_only_the_way_of_computing_differs(options: dict[str, Any]) -> None:
    layer, other, x = make({"operator": "hla2"}), make({"operator": "hla2", **options}).eval(), tokens()
    other.load_state_dict(layer.state_dict())
    _, state = layer(x[:, :5], return_state=True)
    torch.testing.assert_close(other(x[:, 5:], state), layer(x)[:, 5:], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("put", "says"),
    [
        ({"operators": (1,)}, "state: expected one with OperatorStates that a layer has made, got one with a tuple"),
        ({"windows": ()}, "state.windows: expected 3, as conv_size = 4, got 0"),
    ],
    ids=str,
)
def test_states_put_together_by_hand(put: dict[str, Any], says: str) -> None:
    layer = make({"operator": "hla2"})
    refused(OPTION, says, lambda: layer(tokens(), layer.init_state(BATCH)._replace(**put)))


def test_kinds_of_states() -> None:
    """One class for equal options, also where threads ask at the same time, and none where nobody asks any more."""

    def ask(i: int) -> Any:
        gate.wait(60.0)
        return kind_of("OperatorStates", ("hla2",), ridge=i / 7).type

    gate, interval = threading.Barrier(4), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            for i in range(100):
                assert len(set(pool.map(ask, [i] * 4))) == 1, i
    finally:
        sys.setswitchinterval(interval)
    gc.collect()
    assert not [key for key in states._classes if key[-1] == (("ridge", 3 / 7),)]


def test_operators_that_changed_places() -> None:
    layer = make({"operator": MIXED})
    state = layer.init_state(BATCH)
    turned = state._replace(operators=type(state.operators)(*reversed(state.operators)))
    says = "state.operators[0]: expected that of hla2 with mask='causal', definition='exact', normalize=False, no ridge"
    refused(OPTION, says, lambda: layer(tokens(), turned))


def test_states_that_are_none() -> None:
    layer, x = make({"operator": "hla2"}), tokens()
    state = layer.init_state(BATCH)
    other = type("LayerState", (tuple,), {"__module__": "elsewhere"})()
    refused(
        DTYPE,
        "state: expected a LayerState of hla.nn.torch.state, got LayerState of elsewhere",
        lambda: layer(x, other),
    )
    operator, at = HigherOrderOperator("hla2"), torch.zeros(BATCH, 8)
    for wrong, name in ((None, "NoneType"), (state, "LayerState"), ((at, at), "tuple")):
        refused(DTYPE, f"state: expected a state, got {name}", lambda w=wrong: operator.step(at, at, at, w))


@pytest.mark.parametrize("operator", ["hla2", "linear_attention"])
def test_tokens_beside_a_state(operator: str) -> None:
    """What no operator takes is refused in its words, although the state's batch cannot be known."""
    module, q, v = HigherOrderOperator(operator), torch.randn(3, 2, TOKENS, 8), torch.randn(3, 2, TOKENS, 7)
    _, state = module(q, q, v, return_state=True)
    now = [x[:, :, 0] for x in (q, q, v)]
    for kind, says, call in (
        (SHAPE, "batch axes", lambda: module(q, q[:2], v, state)),
        (SHAPE, "batch axes", lambda: module.step(now[0], now[1][:2], now[2], state)),
        (SHAPE, "q: expected", lambda: module(q[0, 0, 0], q, v, state)),
        (SHAPE, "q: expected", lambda: module.step(now[0][0, 0, 0], *now[1:], state)),
        (SHAPE, "cu_seqlens: expected", lambda: module(q, q, v, state, cu_seqlens=torch.tensor(3))),
        (OPTION, "axis: expected", lambda: module(q, q, v, state, axis=7)),
        (OPTION, "axis: expected", lambda: module(q, q, v, state, axis="time")),
        (DTYPE, "q: expected", lambda: module([1.0], q, v, state)),
        (DTYPE, "q: expected", lambda: module.step([1.0], *now[1:], state)),
    ):
        refused(kind, says, call)


def test_reordering() -> None:
    state = make({"operator": "hla2"}).init_state(BATCH)
    for wrong, kind, says in (
        ([0, 1], DTYPE, "index: expected an int64 or int32 tensor, got list"),
        (torch.tensor([True, False]), DTYPE, "got torch.bool"),
        (torch.tensor([0.0]), DTYPE, "got torch.float32"),
        (torch.tensor([[0]]), SHAPE, "index: expected shape (N,), got (1, 1)"),
        (torch.tensor(0), SHAPE, "index: expected shape (N,), got ()"),
        (torch.tensor([0, BATCH]), OPTION, "index: expected entries of a batch of 2, from 0, got 2"),
        (torch.tensor([0, -1, 1]), OPTION, "index: expected entries of a batch of 2, from 0, got -1"),
    ):
        refused(kind, says, lambda w=wrong: state.reorder(w))
    assert state.reorder(torch.tensor([1, 0, 1], dtype=torch.int32)).batch == 3
    assert state.reorder(torch.tensor([], dtype=torch.int64)).batch == 0


def test_states_of_other_sizes() -> None:
    layer, x = make({"operator": "hla2"}), tokens()
    wide = HigherOrderAttention(D_MODEL, 6, head_dim=8, value_dim=5, dtype=torch.float64)
    refused(OPTION, "with value_dim=7, got value_dim=5", lambda: layer(x, wide.init_state(BATCH)))
    narrow = layer.init_state(BATCH).map(lambda x: x[..., :3])
    refused(OPTION, "state.key_moment: expected (B, 6, 1, 8, 8), got", lambda: layer(x, narrow))
    # one row never serves a whole batch
    for batch in (1, 3):
        state = layer.init_state(batch)
        refused(SHAPE, f"expected a batch of 2, as x, got {batch}", lambda s=state: layer(x, s))
        refused(SHAPE, f"expected a batch of 2, as x, got {batch}", lambda s=state: layer.step(x[:, 0], s))
    offsets = torch.tensor([0, 4, 8, TOKENS])
    state = layer.init_state(BATCH)
    refused(SHAPE, "expected a batch of 3, as x, got 2", lambda: layer(x[:1], state, cu_seqlens=offsets))
    refused(hla.MixedArrayError, "expected a tensor on cpu", lambda: layer(x, state.to("meta")))
    refused(DTYPE, "torch.float64, got torch.float32", lambda: layer(x, make_single(layer).init_state(BATCH)))
    refused(DTYPE, "state: expected a LayerState, got Tensor", lambda: layer(x, x))
    for wrong in (state.map(lambda s: s.numpy()), state._replace(position=[0, 0])):
        refused(DTYPE, "a torch.Tensor, got", lambda s=wrong: layer(x, s))
    refused(DTYPE, "state: expected a LayerState, got Hla2State", lambda: layer.step(x[:, 0], state.operators[0]))
    # every field is checked, not only the first
    for i in range(len(state.tensors())):
        shrunk = [s[:1] if j == i else s for j, s in enumerate(state.tensors())]
        fields = iter(shrunk)
        broken = state.map(lambda _, fields=fields: next(fields))
        refused(SHAPE, "expected a batch of 2, as x, got 1", lambda b=broken: layer(x, b))


def make_single(layer: Any) -> Any:
    return make({"operator": "hla2"}, dtype=torch.float32)


def test_sizes_of_states() -> None:
    layer = make({"operator": "hla2"})
    for batch in (-1, 2.0, (2,), True):
        refused(OPTION, "batch: expected an integer ≥ 0", lambda b=batch: layer.init_state(b))
        refused(OPTION, "batch: expected an integer ≥ 0", lambda b=batch: layer.flops(TOKENS, b))
        refused(OPTION, "batch: expected an integer ≥ 0", lambda b=batch: layer.state_bytes(b))
        refused(OPTION, "length: expected an integer ≥ 0", lambda b=batch: layer.flops(b))


def test_bidirectional_layers_have_no_state() -> None:
    layer, x = make({"operator": "hla2"}, causal=False), tokens()
    state = make({"operator": "hla2"}).init_state(BATCH)
    for name, call in (
        ("return_state", lambda: layer(x, return_state=True)),
        ("state", lambda: layer(x, state)),
        ("step", lambda: layer.step(x[:, 0], state)),
        ("init_state", lambda: layer.init_state(2)),
    ):
        refused(OPTION, f"{name}: expected a causal module, got causal=False", call)


def test_operator_module() -> None:
    q = torch.zeros(2, 3, TOKENS, 8)
    module = HigherOrderOperator("hla2", decay=0.9)
    gates = torch.zeros(2, 3, TOKENS)
    refused(OPTION, "decay: expected none, as the module has decay=0.9", lambda: module(q, q, q, log_decay=gates))
    _, state = module(q[:1], q[:1], q[:1], return_state=True)
    refused(SHAPE, "state.corrected_state: expected the batch axes (2, 3)", lambda: module(q, q, q, state))
    at = q[:, :, 0]
    refused(SHAPE, "state.corrected_state: expected the batch axes (2, 3)", lambda: module.step(at, at, at, state))
    refused(DTYPE, "state", lambda: module(q, q, q, q))
    other = HigherOrderOperator("ahla")
    refused(OPTION, "initial_state: expected a state of ahla", lambda: other(q[:1], q[:1], q[:1], state))
    bidirectional = HigherOrderOperator("hla2", causal=False)
    refused(OPTION, "step: expected a causal module", lambda: bidirectional.step(at, at, at, state))
    refused(OPTION, "init_state: expected a causal module", lambda: bidirectional.init_state((2,), 3, 4))
    refused(OPTION, "return_state", lambda: bidirectional(q, q, q, return_state=True))

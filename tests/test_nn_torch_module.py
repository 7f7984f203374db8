"""`hla.nn.torch` among the rest of PyTorch: saving, copying, compiling, checkpoints, placement, sharding, training."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest

import layers
from layers import BATCH, BIDIRECTIONAL, CAUSAL, D_MODEL, HEADS, TOKENS
from libraries import only

torch: Any = only("torch")

from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from hla.nn.torch import HigherOrderAttention, LayerState  # noqa: E402
from test_nn_torch import make, tokens  # noqa: E402
from test_nn_torch_streams import OFFSETS, RICH  # noqa: E402

SOME = [*CAUSAL[:9:2], RICH]


@pytest.fixture(autouse=True)
def afresh() -> Iterator[None]:
    """No program of another test is used again."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def gradients(layer: Any, y: Any) -> dict[str, Any]:
    layer.zero_grad()
    (y * tokens(3, tuple(y.shape))).sum().backward()
    return {name: p.grad.clone() for name, p in layer.named_parameters()}


def assert_equal(found: dict[str, Any], want: dict[str, Any]) -> None:
    """The same computation, maybe with sums in another order."""
    assert set(found) == set(want)
    for name, x in want.items():
        assert float((found[name] - x).abs().max()) <= 1e-12 * max(float(x.abs().max()), 1.0), name


# --- saving and copying ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", SOME, ids=layers.name_of)
def test_state_dict(options: dict[str, Any]) -> None:
    layer, x = make(options), tokens()
    other = HigherOrderAttention(D_MODEL, HEADS, head_dim=8, value_dim=7, dtype=torch.float64, **options)
    assert not torch.equal(other(x), layer(x))
    other.load_state_dict(layer.state_dict(), strict=True)
    assert torch.equal(other(x), layer(x))


def test_names_of_parameters() -> None:
    """They are what a saved model holds: a change of them is a change of format."""
    layer = HigherOrderAttention(12, 4, num_kv_heads=2, bias=True)
    shapes = {name: tuple(p.shape) for name, p in layer.state_dict().items()}
    assert shapes == {
        "q_proj.weight": (12, 12),
        "q_proj.bias": (12,),
        "k_proj.weight": (6, 12),
        "k_proj.bias": (6,),
        "v_proj.weight": (6, 12),
        "v_proj.bias": (6,),
        "output_gate.weight": (12, 12),
        "output_gate.bias": (12,),
        "out_proj.weight": (12, 12),
        "out_proj.bias": (12,),
        "q_conv.weight": (4, 12),
        "k_conv.weight": (4, 6),
        "v_conv.weight": (4, 6),
        "q_norm.weight": (3,),
        "k_norm.weight": (3,),
        "decay.proj.weight": (2, 12),
        "decay.bias": (2,),
        "output_norm.weight": (4, 3),
    }
    assert list(layer.buffers()) == []
    assert HigherOrderAttention(12, 4, decay="learned").state_dict()["decay.bias"].shape == (4,)
    assert list(HigherOrderAttention(12, 4, decay=[0.5, 0.6, 0.7, 0.8]).buffers()) == []


@pytest.mark.parametrize("options", SOME, ids=layers.name_of)
def test_copies(options: dict[str, Any]) -> None:
    layer, x = make(options), tokens()
    for again in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(again(x), layer(x))
        _, state = again(x[:, :4], return_state=True)
        assert torch.equal(layer.step(x[:, 4], state)[0], again.step(x[:, 4], state)[0])
        assert repr(again) == repr(layer)


# --- placement -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", SOME, ids=layers.name_of)
def test_meta_device(options: dict[str, Any]) -> None:
    """Made without memory, placed later, drawn then; shapes work before."""
    layer = HigherOrderAttention(D_MODEL, HEADS, head_dim=8, value_dim=7, device="meta", **options)
    assert all(p.is_meta for p in layer.parameters())
    y, state = layer(torch.zeros(BATCH, TOKENS, D_MODEL, device="meta"), return_state=True)
    assert y.shape == (BATCH, TOKENS, D_MODEL)
    assert state.position.is_meta
    layer.to_empty(device="cpu")
    with torch.no_grad():
        for p in layer.parameters():
            p.fill_(torch.nan)
    torch.manual_seed(1)
    layer.reset_parameters()
    torch.manual_seed(1)
    direct = HigherOrderAttention(D_MODEL, HEADS, head_dim=8, value_dim=7, **options)
    torch.manual_seed(1)
    direct.reset_parameters()
    for (name, p), q in zip(layer.named_parameters(), direct.parameters(), strict=True):
        assert torch.equal(p, q), name
    assert torch.isfinite(layer(tokens().float())).all()


def test_factory_arguments() -> None:
    layer = HigherOrderAttention(12, 4, dtype=torch.bfloat16, device="cpu", bias=True)
    assert {p.dtype for p in layer.parameters()} == {torch.bfloat16}
    state = layer.init_state(2)
    assert {s.dtype for s in state.tensors()} == {torch.float32, torch.int64}
    double = HigherOrderAttention(12, 4, dtype=torch.float64)
    assert {s.dtype for s in double.init_state(2).tensors()} == {torch.float64, torch.int64}


@pytest.mark.parametrize("heads", [1, 2, 7])
def test_decays_at_the_start(heads: int) -> None:
    """γ from the first to the last key/value head, 1 − γ spaced geometrically, 0.97 to 0.999 by default."""
    for low, high in ((0.97, 0.999), (0.5, 0.5), (0.2, 0.9)):
        told = {} if low == 0.97 else {"decay_range": (low, high)}
        learned = HigherOrderAttention(28, heads, decay="learned", dtype=torch.float64, **told)
        gated = HigherOrderAttention(28, heads, decay="forget_gate", dtype=torch.float64, **told)
        found = torch.sigmoid(learned.decay.bias.detach())
        assert torch.equal(learned.decay.bias, gated.decay.bias)
        share = [i / (heads - 1) for i in range(heads)] if heads > 1 else [0.5]
        want = [1 - (1 - low) ** (1 - s) * (1 - high) ** s for s in share]
        assert torch.allclose(found, torch.tensor(want, dtype=torch.float64), rtol=0, atol=1e-14)
        # and for tokens of unit variance γ stays near: |w·x| is below 0.5 (five standard deviations)
        raised = gated.decay.proj(torch.randn(50, 28, dtype=torch.float64)).detach().abs().max()
        assert float(raised) < 0.5


def test_initial_projections() -> None:
    """Xavier's rule, and no dependence on the order in which submodules are made."""
    torch.manual_seed(0)
    layer = HigherOrderAttention(64, 4, num_kv_heads=2, bias=True)
    for name in ("q_proj", "k_proj", "v_proj", "output_gate", "out_proj"):
        projection = getattr(layer, name)
        bound = (6 / (projection.in_features + projection.out_features)) ** 0.5
        assert 0.97 * bound < float(projection.weight.detach().abs().max()) <= bound
        assert not projection.bias.any()
    assert float(layer.q_conv.weight.detach().abs().max()) <= 0.5
    assert torch.equal(layer.output_norm.weight, torch.ones(4, 16))


@pytest.mark.parametrize("how", ["autocast", "parameters"])
def test_parts_compute_in_float32(how: str) -> None:
    """Convolutions and norms hand on float32; projections and the operator's output are in 16 bits."""
    layer = HigherOrderAttention(D_MODEL, HEADS, head_dim=8, operator=layers.MIXED)
    layer = layer.bfloat16() if how == "parameters" else layer
    seen: dict[str, Any] = {}

    def note(name: str) -> Any:
        def hook(module: Any, given: Any, result: Any) -> None:
            if name != "decay":  # a dictionary of options
                seen[name] = (result[0] if isinstance(result, tuple) else result).dtype

        return hook

    for name, module in layer.named_modules():
        module.register_forward_hook(note(name))
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        layer(tokens().to(layer.q_proj.weight.dtype))
    wide = {"q_conv", "k_conv", "v_conv", "q_norm", "k_norm", "output_norm"}
    assert {name for name, dtype in seen.items() if dtype == torch.float32} == wide
    assert {seen[name] for name in seen.keys() - wide} == {torch.bfloat16}


# --- compiling, checkpoints ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [CAUSAL[0], CAUSAL[2], RICH], ids=layers.name_of)
def test_compiled_equals_eager(options: dict[str, Any]) -> None:
    layer, x = make(options), tokens()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    want = gradients(layer, layer(x))
    assert_equal(gradients(layer, compiled(x)), want)
    mask = torch.tensor([[True] * 3 + [False] * 8, [False] * 11])
    first = {"y": layer(x, key_padding_mask=mask).detach()}
    assert_equal({"y": compiled(x, key_padding_mask=mask).detach()}, first)


def test_compiled_bidirectional() -> None:
    layer, x = make(BIDIRECTIONAL[0], causal=False), tokens()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert_equal(gradients(layer, compiled(x)), gradients(layer, layer(x)))


def test_compiled_with_states() -> None:
    layer, x = make(RICH), tokens()

    @torch.compile(fullgraph=True, backend="aot_eager")
    def prefill(x: Any, state: Any) -> Any:
        return layer(x, state, return_state=True)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def decode(x_t: Any, state: Any) -> Any:
        return layer.step(x_t, state)

    with torch.no_grad():
        y, state = prefill(x[:, :5], layer.init_state(BATCH))
        z, state = prefill(x[:, 5:9], state)
        last, state = decode(x[:, 9], state)
        want, want_state = layer(x[:, :10], return_state=True)
    assert_equal({"y": torch.cat([y, z, last[:, None]], 1)}, {"y": want})
    found = dict(enumerate(state.tensors()))
    assert_equal(found, dict(enumerate(want_state.tensors())))


def test_compiled_with_packed_sequences() -> None:
    layer, x = make(RICH), tokens(shape=(1, TOKENS, D_MODEL))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    offsets = torch.tensor(OFFSETS)
    y, state = compiled(x, return_state=True, cu_seqlens=offsets)
    want, want_state = layer(x, return_state=True, cu_seqlens=offsets)
    assert_equal({"y": y.detach()}, {"y": want.detach()})
    assert_equal(dict(enumerate(state.detach().tensors())), dict(enumerate(want_state.detach().tensors())))


def test_any_length_is_one_program() -> None:
    layer = make({"operator": "hla2", "decay": "learned", "rotary": True, "qk_norm": None, "output_gate": False})
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    counts = []
    for length in (7, 11, 29):
        x = tokens(shape=(BATCH, length, D_MODEL))
        assert_equal({"y": compiled(x).detach()}, {"y": layer(x).detach()})
        counts.append(counter.frame_count)
    assert counts[2] == counts[0]  # PyTorch starts the first one again when it meets a number


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint(reentrant: bool) -> None:
    layer, x = make({**RICH, "dropout": 0.2}), tokens().requires_grad_()
    torch.manual_seed(0)
    want = gradients(layer, layer(x))
    torch.manual_seed(0)
    assert_equal(gradients(layer, checkpoint(layer, x, use_reentrant=reentrant)), want)


def test_gradients_of_gradients() -> None:
    layer, x = make(RICH), tokens().requires_grad_()
    (dx,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    dx.square().sum().backward()
    assert torch.isfinite(x.grad).all()
    step = 1e-5 * tokens(2)
    moved = []
    for sign in (1, -1):
        y = (x.detach() + sign * step).requires_grad_()
        (dy,) = torch.autograd.grad(layer(y).square().sum(), y)
        moved.append(float(dy.square().sum()))
    assert float((x.grad * step).sum()) == pytest.approx((moved[0] - moved[1]) / 2, rel=1e-6)


def test_gradients_per_example() -> None:
    layer, x = make(RICH), tokens()
    given = {name: p.detach() for name, p in layer.named_parameters()}

    def loss(parameters: Any, row: Any) -> Any:
        return torch.func.functional_call(layer, parameters, (row[None],)).square().sum()

    found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(given, x)
    for row in range(BATCH):
        want = torch.func.grad(loss)(given, x[row])
        for name, g in want.items():
            assert float((found[name][row] - g).abs().max()) <= 1e-10 * float(g.abs().max()), name


def test_several_layers_at_once() -> None:
    """vmap over their parameters, and over rows with their states."""
    several, x = [make(RICH) for _ in range(3)], tokens()
    with torch.no_grad():
        for i, layer in enumerate(several):
            layer.v_proj.weight.mul_(1.0 + i)
    given, _ = torch.func.stack_module_state(several)

    def run(parameters: Any) -> Any:
        return torch.func.functional_call(several[0], parameters, (x,), {"return_state": True})

    y, state = torch.func.vmap(run)(given)
    assert isinstance(state, LayerState)
    for i, layer in enumerate(several):
        want, after = layer(x, return_state=True)
        for got, expected in zip((y, *state.tensors()), (want, *after.tensors()), strict=True):
            assert torch.allclose(got[i], expected, rtol=1e-12, atol=1e-12 * float(expected.detach().abs().max()))
    rows = torch.func.vmap(lambda row: several[1](row[None])[0])(x)
    assert torch.allclose(rows, several[1](x), rtol=1e-12, atol=1e-12)


def test_export() -> None:
    layer = make({"operator": "hla2", "rotary": True})
    shapes = ({1: torch.export.Dim("T", min=2, max=1000)},)
    program = torch.export.export(layer, (tokens(),), dynamic_shapes=shapes).module()
    longer = tokens(shape=(BATCH, 29, D_MODEL))
    assert_equal({"y": program(longer).detach()}, {"y": layer(longer).detach()})


def test_deterministic_algorithms() -> None:
    layer = make(RICH)
    torch.use_deterministic_algorithms(True)
    try:
        mask = torch.zeros(BATCH, TOKENS, dtype=torch.bool)
        gradients(layer, layer(tokens(), key_padding_mask=mask))
        gradients(layer, layer(tokens(shape=(1, TOKENS, D_MODEL)), cu_seqlens=torch.tensor(OFFSETS)))
    finally:
        torch.use_deterministic_algorithms(False)


SHARDED = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from hla.nn.torch import HigherOrderAttention

rank, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
torch.manual_seed(0)
options = dict(operator=["hla2", "ahla", "hla2", "hla3"], num_kv_heads=2, dtype=torch.float64)
whole = HigherOrderAttention(20, 4, **options)
layer = HigherOrderAttention(20, 4, device="meta", **options)
mesh = dist.init_device_mesh("cpu", (2,))
fully_shard(layer, mesh=mesh)
layer.to_empty(device="cpu")
with torch.no_grad():
    for p, q in zip(layer.parameters(), whole.parameters()):
        p.copy_(torch.distributed.tensor.distribute_tensor(q.detach(), mesh, p.placements))
x = torch.randn(2, 7, 20, dtype=torch.float64)
y = layer(x)
want = whole(x)
assert torch.allclose(y, want, rtol=1e-12, atol=1e-12)
y.square().sum().backward()
want.square().sum().backward()
for (name, p), q in zip(layer.named_parameters(), whole.parameters()):
    assert torch.allclose(p.grad.full_tensor(), q.grad, rtol=1e-10, atol=1e-10), name

rows = torch.randn(4, 7, 20, dtype=torch.float64)
copied = torch.nn.parallel.DistributedDataParallel(HigherOrderAttention(20, 4, **options))
copied.module.load_state_dict(whole.state_dict())
copied(rows[2 * rank : 2 * rank + 2]).square().mean().backward()
whole.zero_grad()
whole(rows).square().mean().backward()
for (name, p), q in zip(copied.module.named_parameters(), whole.parameters()):
    assert torch.allclose(p.grad, q.grad, rtol=1e-10, atol=1e-10), name
dist.destroy_process_group()
"""


def test_sharded(tmp_path: Any) -> None:
    """Made on the meta device, sharded by two processes, equal to the whole in outputs and gradients; and by data."""
    script = tmp_path / "sharded.py"
    script.write_text(SHARDED)
    command = [sys.executable, str(script)]
    running = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    said = [process.communicate(timeout=300)[1] for process in running]
    assert [process.returncode for process in running] == [0, 0], said


FRESH = """
import torch
from hla.nn.torch import HigherOrderAttention
layer = HigherOrderAttention(16, 4, dtype=torch.float64, feature_map="softmax", causal=False)
x = torch.randn(2, 7, 16, dtype=torch.float64)
found = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
assert torch.allclose(found, layer(x), rtol=1e-12, atol=1e-12)
"""


def test_the_first_call_of_a_process_may_be_compiled() -> None:
    """No table that an eager call would have filled is missing."""
    subprocess.run([sys.executable, "-c", FRESH], capture_output=True, check=True, timeout=300)


# --- training --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"operator": "ahla", "num_kv_heads": 1, "rotary": True},
        {"operator": ["hla3", "linear_attention", "hla2", "ahla"], "decay": "learned", "qk_norm": "l2"},
        {"operator": "hla3", "decay_range": (0.5, 0.9), "feature_map": "relu", "normalize": True, "output_norm": False},
    ],
    ids=["defaults", "ahla", "mixed", "hla3"],
)
def test_training_in_bfloat16(options: dict[str, Any]) -> None:
    """Nothing becomes NaN, and the loss falls to less than half: which token comes, two after an earlier one."""
    torch.manual_seed(0)
    embed, layer = torch.nn.Embedding(8, 32), HigherOrderAttention(32, 4, **options)
    norm, head = torch.nn.LayerNorm(32), torch.nn.Linear(32, 8)
    weights = [p for module in (embed, layer, norm, head) for p in module.parameters()]
    optimizer = torch.optim.AdamW(weights, lr=1e-2)
    losses = []
    for _ in range(60):
        text = torch.randint(8, (4, 48))
        with torch.autocast("cpu", torch.bfloat16):
            x = embed(text)
            logits = head(norm(x + layer(x)))
        loss = torch.nn.functional.cross_entropy(logits[:, 2:].flatten(0, 1).float(), text[:, :-2].flatten())
        optimizer.zero_grad()
        loss.backward()
        assert all(torch.isfinite(p.grad).all() for p in weights)
        optimizer.step()
        losses.append(float(loss.detach()))
    assert all(p.dtype == torch.float32 and torch.isfinite(p).all() for p in weights)
    assert sum(losses[-5:]) < 0.5 * sum(losses[:5]), losses[::6]


@pytest.mark.parametrize("operator", ["hla2", "ahla", "hla3", "linear_attention"])
def test_long_sequences_at_the_start(operator: str) -> None:
    """The defaults at 1024 tokens in bfloat16: outputs and gradients are finite and of the size of the inputs."""
    torch.manual_seed(0)
    layer = HigherOrderAttention(32, 2, operator=operator)
    x = torch.randn(1, 1024, 32, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    y.float().square().mean().backward()
    y = y.detach().float()
    assert 0.1 < float(y.std()) < 2
    assert all(torch.isfinite(p.grad).all() for p in layer.parameters())
    late = y[:, -100:].std() / y[:, 100:200].std()
    assert 0.5 < float(late) < 2, "the output's size does not grow with the sequence"


# --- imports ---------------------------------------------------------------------------------------------------------


def test_options_need_no_framework() -> None:
    script = textwrap.dedent("""
        import json, sys
        import hla.nn.options
        print(json.dumps(sorted({"torch", "jax", "numpy"} & set(sys.modules))))
    """)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=300)
    assert json.loads(done.stdout) == []

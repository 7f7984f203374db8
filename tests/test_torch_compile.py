"""Backend "torch" in programs: `torch.compile`, `torch.export`, the custom ops themselves.

The judge is the eager call, which the other tests judge. Most programs are compiled with "aot_eager", which traces
forward and backward as for a real compiler but generates no code.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hla
import libraries
from hla.backends import selection

torch: Any = libraries.only("torch")

from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402

from test_torch import CASES, OPERATORS, TIDS, Watch, build, forward_mode, storages  # noqa: E402

HEADS, TOKENS, D, DV = 3, 17, 5, 7
CHUNK = 5
EAGER = "aot_eager"


@pytest.fixture(autouse=True)
def afresh() -> Iterator[None]:
    """No program of another test is used again."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """The backends chosen by calls, in order, and whether for a gradient."""
    seen: list[tuple[str, bool]] = []
    choose = selection.resolve

    def resolve(call: Any, argument: Any, gradient: bool = False) -> Any:
        found = choose(call, argument, gradient)
        seen.append((found.spec.name, gradient))
        return found

    monkeypatch.setattr(selection, "resolve", resolve)
    return seen


def draw(length: int = TOKENS, *, grad: bool = False, batch: tuple[int, ...] = (HEADS,)) -> list[Any]:
    """q, k, v and log-decays."""
    torch.manual_seed(length)
    made = [0.7 * torch.randn(*batch, length, n, dtype=torch.float64) for n in (D, D, DV)]
    made.append(-0.3 * torch.rand(*batch, length, dtype=torch.float64))
    return [x.requires_grad_(grad) for x in made]


def compiled(run: Any, **options: Any) -> Any:
    return torch.compile(run, **{"fullgraph": True, "backend": EAGER, **options})


def traced_by(see: Any) -> Any:
    """A compiler that shows `see` the size of each program, forward and backward, in PyTorch's own ops."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def compiler(graph: Any, _: Any) -> Any:
        see(len(graph.graph.nodes))
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=compiler, bw_compiler=compiler)


class Counter:
    """A compiler that remembers the programs it was given, but for empty ones (a trace that was started again)."""

    def __init__(self) -> None:
        self._compiler = CompileCounterWithBackend(EAGER)

    def __call__(self, graph: Any, examples: Any) -> Any:
        return self._compiler(graph, examples)

    @property
    def sizes(self) -> list[int]:
        """Nodes of each program."""
        graphs = [graph.graph for graph in self._compiler.graphs]
        return [len(graph.nodes) for graph in graphs if any(node.op == "call_function" for node in graph.nodes)]


def close(found: Any, want: Any, tolerance: float = 1e-12) -> None:
    found, want = ([x] if isinstance(x, torch.Tensor) else list(x) for x in (found, want))
    assert len(found) == len(want)
    for x, y in zip(found, want, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        largest = max([1.0, *y.detach().abs().flatten().tolist()])
        assert torch.allclose(x, y, rtol=tolerance, atol=tolerance * largest)


def pulled(run: Any, inputs: list[Any]) -> list[Any]:
    """Results and the gradients of a mixture of them."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    found = run(*leaves)
    found = [found] if isinstance(found, torch.Tensor) else list(found)
    total = sum((x * torch.linspace(-1, 1, x.numel(), dtype=x.dtype).reshape(x.shape)).sum() for x in found)
    return [*(x.detach() for x in found), *torch.autograd.grad(total, leaves)]


# --- compiled equals eager ---------------------------------------------------------------------------------------

SOME = slice(None, None, 4)


@pytest.mark.parametrize("case", CASES[SOME], ids=TIDS[SOME])
def test_options(case: Any, ran: Any) -> None:
    """Values and gradients of every result with respect to every input."""
    run, inputs = build(case)
    want = pulled(run, inputs)
    ran.clear()
    found = pulled(compiled(run), inputs)
    close(found, want)
    assert ("torch", False) in ran
    assert ("torch", True) in ran
    assert {name for name, _ in ran} == {"torch"}


@pytest.mark.parametrize("name", OPERATORS)
def test_lengths_share_one_program(name: str) -> None:
    """A dynamic T compiles once; values, states and gradients are those of the eager call at each T."""
    op, own = OPERATORS[name]

    def run(q: Any, k: Any, v: Any, g: Any) -> Any:
        out, state = getattr(hla, op)(q, k, v, log_decay=g, return_state=True, chunk_size=CHUNK, **own)
        return out * 2.0, *state

    counter = Counter()
    program = compiled(run, backend=counter, dynamic=True)
    for length in (11, TOKENS, 41, 2):
        close(pulled(program, draw(length)), pulled(run, draw(length)))
    assert len(counter.sizes) == 1


def test_lengths_become_dynamic_by_themselves() -> None:
    """As PyTorch does: the second length compiles again, a third does not."""
    counter = Counter()
    program = compiled(lambda q, k, v: hla.hla2(q, k, v, decay=0.9), backend=counter)
    for length in (11, TOKENS, 41, 23):
        close(program(*draw(length)[:3]), hla.hla2(*draw(length)[:3], decay=0.9))
    assert len(counter.sizes) == 2


@pytest.mark.parametrize("name", ["hla2", "hla3 printed"])
def test_programs_do_not_grow_with_the_length(name: str) -> None:
    """One node forward, one backward, at any T; the chunks are not unrolled."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    op, own = OPERATORS[name]
    sizes = []
    for length in (2 * CHUNK, 200 * CHUNK):
        counts: list[int] = []
        called: list[int] = []

        def count(graph: Any, _: Any, counts: Any = counts, called: Any = called) -> Any:
            counts.append(len(graph.graph.nodes))
            called.append(sum("hla" in str(node.target) for node in graph.graph.nodes if node.op == "call_function"))
            return make_boxed_func(graph.forward)

        backend = aot_autograd(fw_compiler=count, bw_compiler=count)
        program = compiled(lambda q, k, v, g: getattr(hla, op)(q, k, v, log_decay=g, **own), backend=backend)
        pulled(program, draw(length))
        assert called == [1, 1]
        sizes.append(counts)
        torch._dynamo.reset()
    assert sizes[0] == sizes[1]
    assert max(sizes[0]) < 40


def test_numbers_are_never_stale() -> None:
    """Another number is another program, or the same with another value: right either way, dynamic or not."""
    q, k, v, _ = draw()

    def run(decay: Any, scale: Any, eps: Any, chunk: Any, ridge: Any) -> Any:
        return hla.hla2(q, k, v, decay=decay, scale=scale, normalize=True, eps=eps, chunk_size=chunk, ridge=ridge)

    for dynamic in (None, True):
        program = compiled(run, dynamic=dynamic)
        for numbers in ((0.9, 1.0, 1.0, 5, 0.0), (0.8, 1.0, 1.0, 5, 0.0), (0.8, 0.5, 2.0, 3, 0.7), (1, 2, 1.5, 64, 1)):
            close(program(*numbers), run(*numbers))
        torch._dynamo.reset()


def test_options_as_tensors_keep_one_program() -> None:
    """Their values are inputs of the program."""
    q, k, v, _ = draw()
    counter = Counter()

    def run(decay: Any, scale: Any, mask: Any, ids: Any) -> Any:
        return hla.ahla(q, k, v, decay=decay, scale=scale, token_mask=mask, segment_ids=ids, chunk_size=CHUNK)

    program = compiled(run, backend=counter)
    for i in range(3):
        torch.manual_seed(i)
        options = (
            0.5 + 0.5 * torch.rand(HEADS),
            torch.randn((), dtype=torch.float64),
            torch.rand(TOKENS) < 0.7,
            torch.randint(0, 3, (TOKENS,)).sort()[0],
        )
        close(program(*options), run(*options))
    assert len(counter.sizes) == 1


def test_offsets_are_read_when_the_program_runs() -> None:
    """cu_seqlens by value, with states for each sequence; only their number is part of the program."""
    q, k, v, _ = draw()
    counter = Counter()

    def run(offsets: Any) -> Any:
        out, state = hla.hla2(q, k, v, decay=0.9, cu_seqlens=offsets, return_state=True, chunk_size=CHUNK)
        return out, *state

    program = compiled(run, backend=counter)
    for offsets in ([0, 3, 3, 17], [0, 0, 11, 17], [0, 17, 17, 17]):
        close(program(torch.tensor(offsets)), run(torch.tensor(offsets)))
    assert len(counter.sizes) == 1
    with pytest.raises(hla.OptionError, match="cu_seqlens"):
        program(torch.tensor([0, 9, 5, 17]))


def test_a_state_for_every_sequence_goes_in_and_out() -> None:
    q, k, v = draw(grad=True)[:3]
    offsets = torch.tensor([0, 2, 2, TOKENS])
    zeros = hla.init_state("hla2", batch=(3, HEADS), d=D, dv=DV, like=q)
    leaves = [q, k, v, *(torch.rand_like(x).requires_grad_() for x in zeros)]

    def run(q: Any, k: Any, v: Any, *fields: Any) -> Any:
        start = type(zeros)(*fields)
        out, state = hla.hla2(q, k, v, decay=0.9, cu_seqlens=offsets, initial_state=start, return_state=True)
        return (out, *state)

    close(compiled(run)(*leaves), run(*leaves))
    close(pulled(compiled(run), leaves), pulled(run, leaves))


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
def test_host_options() -> None:
    """NumPy arrays and numbers inside the program."""
    q, k, v, _ = draw()
    offsets, decay, mask = np.asarray([0, 3, 3, 17]), np.asarray([0.6, 0.8, 1.0]), np.arange(TOKENS) % 3 > 0

    def run(x: Any) -> Any:
        one = hla.hla2(x, k, v, decay=decay, cu_seqlens=offsets, chunk_size=CHUNK)
        return one + hla.ahla(x, k, v, decay=np.float64(0.7), token_mask=mask, chunk_size=CHUNK)

    close(pulled(compiled(run), [q]), pulled(run, [q]))


def test_one_tensor_in_three_places() -> None:
    x = draw()[0]
    run = lambda x: hla.hla2(x, x, x, decay=0.9, chunk_size=CHUNK)  # noqa: E731
    close(pulled(compiled(run), [x]), pulled(run, [x]))
    twice = lambda q, v: hla.linear_attention(q, q, v, chunk_size=CHUNK)  # noqa: E731
    close(pulled(compiled(twice), [x, draw()[2]]), pulled(twice, [x, draw()[2]]))


@pytest.mark.parametrize("name", ["hla2", "order 4"])
@pytest.mark.parametrize("only", ["output", "state", "state comes in"])
def test_results_that_are_not_used(name: str, only: str) -> None:
    """Gradients through the output alone, and through the returned state alone; and to a given state."""
    op, own = OPERATORS[name]
    state = getattr(hla, op)(*draw(4)[:3], return_state=True, **own)[1]
    kind = type(state)

    def run(q: Any, k: Any, v: Any, g: Any, *fields: Any) -> Any:
        options = {"initial_state": kind(*fields)} if fields else {}
        out, last = getattr(hla, op)(q, k, v, log_decay=g, return_state=True, chunk_size=CHUNK, **options, **own)
        return out if only == "output" else list(last)

    inputs = [*draw(), *(state if only == "state comes in" else ())]

    def gradients(run: Any) -> list[Any]:
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        found = run(*leaves)
        total = sum((x * x).sum() for x in ([found] if only == "output" else found))
        found = torch.autograd.grad(total, leaves, allow_unused=True)
        return [torch.zeros_like(x) if d is None else d for d, x in zip(found, leaves, strict=True)]

    want = gradients(run)
    close(gradients(compiled(run)), want)
    assert want[1].any()


def test_without_a_graph() -> None:
    q, k, v, _ = draw(grad=True)
    run = lambda q, k, v: hla.hla3(q, k, v, decay=0.9, chunk_size=CHUNK)  # noqa: E731
    want = run(q, k, v).detach()
    for mode in (torch.no_grad, torch.inference_mode):
        program = compiled(run)
        with mode():
            found = program(q, k, v)
        assert not found.requires_grad
        close(found, want)
        torch._dynamo.reset()


def test_dtypes_and_autocast() -> None:
    """float32 inputs are not rounded inside autocast; 16-bit inputs give what they give eagerly."""
    inputs = [x.float() for x in draw()]

    def run(q: Any, k: Any, v: Any, g: Any) -> Any:
        out, state = hla.hla2(q, k, v, log_decay=g, return_state=True, chunk_size=CHUNK)
        return out, *state

    def inside(*xs: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return run(*xs)

    want = pulled(run, inputs)
    close(pulled(compiled(inside), inputs), want, 1e-5)
    assert torch.equal(compiled(inside)(*inputs)[0], want[0])
    low = [x.bfloat16() for x in inputs[:3]] + inputs[3:]
    close(pulled(compiled(run), low), pulled(run, low), 2.0**-7)
    assert torch.equal(compiled(run)(*low)[0], run(*low)[0])


def test_layouts() -> None:
    """Time behind heads in memory, axis −3, expanded keys: results lie in one piece, as the program is told."""
    q, k, v, _ = draw(batch=(2, HEADS))
    laid = [x.transpose(1, 2).contiguous() for x in (q, k, v)]

    def run(q: Any, k: Any, v: Any) -> Any:
        return hla.hla2(q, k, v, decay=0.9, axis=-3, chunk_size=CHUNK).flatten(-2)

    close(pulled(compiled(run), laid), pulled(run, laid))

    def grouped(q: Any, k: Any, v: Any) -> Any:
        k, v = (x[:, :1].expand(2, HEADS, TOKENS, -1) for x in (k, v))
        return hla.ahla(q, k, v, chunk_size=CHUNK).transpose(1, 2)

    close(pulled(compiled(grouped), [q, k, v]), pulled(grouped, [q, k, v]))


def test_the_backend_is_chosen_when_the_program_runs(ran: Any) -> None:
    """Never stale: a choice made after compiling counts."""
    q, k, v, _ = draw()
    program = compiled(lambda q: hla.hla2(q, k, v, chunk_size=CHUNK))
    want = program(q)
    ran.clear()
    for name in ("numpy", "torch", "numpy"):
        with hla.use_backend(name):
            close(program(q), want)
    assert ran == [("numpy", False), ("torch", False), ("numpy", False)]
    named = compiled(lambda q: hla.hla2(q, k, v, backend="numpy"))
    ran.clear()
    close(named(q), want)
    assert ("numpy", False) in ran
    assert ("torch", False) not in ran


def test_errors_name_the_argument() -> None:
    """While the program is compiled; the message of the eager call is in it."""
    q, k, v, _ = draw()
    for call, words in (
        (lambda: hla.hla2(q, k[:, :3], v), "k: expected"),
        (lambda: hla.hla2(q, k, v, decay=1.5), "decay: expected"),
        (lambda: hla.hla2(q, k, v, maks="none"), "unexpected keyword argument 'maks'"),
        (lambda: hla.higher_order(q, k, v, order=0), "order: expected"),
    ):
        with pytest.raises(Exception, match=words):
            compiled(call)()


# --- decoding ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["linear_attention", "hla2 prefix", "ahla", "hla3 printed", "order 4"])
def test_steps(name: str) -> None:
    """Compiled steps after a prefill equal the whole, also in place; one program serves all of them."""
    op, own = OPERATORS[name]
    q, k, v, g = draw()
    whole, last = getattr(hla, op)(q, k, v, log_decay=g, return_state=True, **own)
    counter = Counter()
    options = {n: x for n, x in own.items() if n != "order"}

    def step(state: Any, q: Any, k: Any, v: Any, g: Any) -> Any:
        return hla.step(state, q, k, v, log_decay=g, **options)

    def write(state: Any, q: Any, k: Any, v: Any, g: Any) -> Any:
        return hla.step(state, q, k, v, log_decay=g, inplace=True, **options)[0]

    _, first = getattr(hla, op)(*(x[:, :4] for x in (q, k, v)), log_decay=g[:, :4], return_state=True, **own)
    own_state = type(first)(*(x.clone() for x in first))
    program, writing, state = compiled(step, backend=counter), compiled(write), first
    places = [x.data_ptr() for x in own_state]
    for t in range(4, TOKENS):
        tokens = (q[:, t], k[:, t], v[:, t], g[:, t])
        kept = [x.clone() for x in state]
        out, following = program(state, *tokens)
        assert type(following) is type(first)
        close(out, whole[:, t])
        close(state, kept)
        assert not storages(following) & storages(state)
        close(writing(own_state, *tokens), whole[:, t])
        state = following
    assert len(counter.sizes) == 1
    close(state, last)
    close(own_state, last)
    assert [x.data_ptr() for x in own_state] == places


def test_gradients_through_compiled_steps() -> None:
    q, k, v, _ = draw()
    state = hla.hla2(q, k, v, return_state=True)[1]
    kind = type(state)

    def run(q: Any, k: Any, v: Any, decay: Any, *fields: Any) -> Any:
        out, following = hla.step(kind(*fields), q, k, v, decay=decay)
        return out, *following

    inputs = [q[:, 0], k[:, 0], v[:, 0], torch.rand(HEADS, dtype=torch.float64), *state]
    close(pulled(compiled(run), inputs), pulled(run, inputs))


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
@pytest.mark.parametrize("name", ["hla2", "hla3 printed", "order 4"])
def test_a_loop_in_the_program(name: str) -> None:
    """Zeros, prefill and some steps, all compiled together."""
    op, own = OPERATORS[name]
    q, k, v, _ = draw()
    fixing = {n: x for n, x in own.items() if n in ("definition", "order", "ridge")}
    options = {n: x for n, x in own.items() if n != "order"}

    def run(q: Any, k: Any, v: Any) -> Any:
        state = hla.init_state(op, batch=(HEADS,), d=D, dv=DV, like=q, normalize=True, **fixing)
        outs = [hla.step(state, q[:, 0], k[:, 0], v[:, 0], normalize=True, eps=3.0, **options)[0][:, None]]
        some, state = getattr(hla, op)(
            *(x[:, :9] for x in (q, k, v)), initial_state=state, return_state=True, normalize=True, eps=3.0, **own
        )
        for t in range(9, 12):
            out, state = hla.step(state, q[:, t], k[:, t], v[:, t], normalize=True, eps=3.0, **options)
            outs.append(out[:, None])
        return torch.cat([*outs, some], 1), *state

    close(pulled(compiled(run), [q, k, v]), pulled(run, [q, k, v]))


# --- transformations in and around programs ----------------------------------------------------------------------


@forward_mode
@pytest.mark.parametrize(
    ("name", "what"),
    [("ahla", "vmap"), ("linear_attention", "grad"), ("linear_attention", "vmap of grad"), ("hla2", "jvp")],
)
def test_func_inside(name: str, what: str) -> None:
    """vmap, grad, jvp inside the program, as plain operations."""
    op, own = OPERATORS[name]

    def run(q: Any, k: Any, v: Any) -> Any:
        return getattr(hla, op)(q, k, v, decay=0.9, chunk_size=CHUNK, **own)

    def loss(q: Any, k: Any, v: Any) -> Any:
        return (run(q, k, v) ** 2).sum()

    function = {
        "vmap": torch.func.vmap(run),
        "grad": torch.func.grad(loss, argnums=(0, 1, 2)),
        "vmap of grad": torch.func.vmap(torch.func.grad(loss, argnums=(0, 2))),
        "jvp": lambda q, k, v: torch.func.jvp(run, (q, k, v), (k, q, v)),
    }[what]
    inputs = [x[:2] for x in draw(7)[:3]]
    want = function(*inputs)
    close(compiled(function)(*inputs), want)
    assert all(x.any() for x in ([want] if isinstance(want, torch.Tensor) else want))


def test_func_inside_with_open_lengths() -> None:
    """A second length makes T a symbol, also where it is less than a chunk."""

    def run(q: Any, k: Any, v: Any) -> Any:
        return torch.func.grad(lambda q: hla.hla2(q, k, v, decay=0.9).sum())(q)

    program = torch.compile(run, backend="aot_eager", fullgraph=True)
    for length in (5, 7, 11):
        q, k, v = draw(length)[:3]
        close(program(q, k, v), run(q, k, v))


def test_func_inside_is_not_unrolled() -> None:
    """Eight times the chunks: three more levels of the scan, not eight times the program."""
    sizes = []
    for length in (8 * CHUNK, 64 * CHUNK):
        torch._dynamo.reset()
        counts: list[int] = []
        run = torch.func.vmap(lambda q, k, v: hla.linear_attention(q, k, v, chunk_size=CHUNK))
        compiled(run, backend=traced_by(counts.append))(*draw(length)[:3])
        sizes += counts
    assert len(sizes) == 2
    assert sizes[0] < sizes[1] < 2.5 * sizes[0]


@forward_mode
def test_forward_mode_around() -> None:
    """Dual numbers given to a program: the right tangent, never a silent zero."""
    q, k, v, g = draw()
    run = lambda q: hla.hla2(q, k, v, log_decay=g, chunk_size=CHUNK)  # noqa: E731
    program, tangent = compiled(run), torch.ones_like(q)
    program(q)
    _, want = torch.func.jvp(run, (q,), (tangent,))
    with forward_ad.dual_level():
        close(forward_ad.unpack_dual(program(forward_ad.make_dual(q, tangent))).tangent, want)


# --- export ------------------------------------------------------------------------------------------------------


class Module(torch.nn.Module):
    """A call with a parameter of its own."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.decay = torch.nn.Parameter(torch.linspace(0.5, 1.0, HEADS, dtype=torch.float64))

    def forward(self, q: Any, k: Any, v: Any, state: Any = None) -> Any:
        out, last = hla.hla2(q, k, v, decay=self.decay, initial_state=state, return_state=True, **self.options)
        return out * 2.0, tuple(last)


def exported(module: Any, length: int = TOKENS) -> Any:
    time = torch.export.Dim("time", min=2, max=4096)
    shapes = {n: {1: time} for n in "qkv"}
    return torch.export.export(module, tuple(draw(length)[:3]), dynamic_shapes=shapes)


@pytest.mark.parametrize("options", [{}, {"normalize": True, "eps": 3.0, "chunk_size": CHUNK}, {"form": "recurrent"}])
def test_export(options: dict[str, Any]) -> None:
    """Run at other lengths than it was exported at; gradients of any order; saved and loaded."""
    module = Module(**options)
    program = exported(module)
    assert sum("hla" in str(node.target) for node in program.graph.nodes if node.op == "call_function") == 1
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    for run in (program.module(), torch.export.load(file).module()):
        for length in (2, 41, 211):
            inputs = draw(length)[:3]
            (out, last), (wanted, final) = run(*inputs), module(*inputs)
            close([out, *last], [wanted, *final])
        flat = lambda f: lambda *xs: (f(*xs)[0], *f(*xs)[1])  # noqa: E731
        close(pulled(flat(run), draw(11)[:3]), pulled(flat(module), draw(11)[:3]))


def test_a_saved_program_in_another_process(tmp_path: Path) -> None:
    """Needs nothing but the import that the documentation names."""
    q, k, v, _ = draw()
    path = str(tmp_path / "program.pt2")
    torch.export.save(exported(Module()), path)
    torch.save((q, k, v), path + ".inputs")
    script = (
        "import sys, torch, hla.backends.torch.compilation\n"
        "found, _ = torch.export.load(sys.argv[1]).module()(*torch.load(sys.argv[1] + '.inputs'))\n"
        "torch.save(found.detach(), sys.argv[1] + '.output')\n"
    )
    done = subprocess.run([sys.executable, "-c", script, path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    close(torch.load(path + ".output"), Module()(q, k, v)[0])


@forward_mode
def test_transformations_of_exported_programs() -> None:
    """The program's one node is no wall for derivatives: forward mode, second derivatives, `torch.func`."""
    q, k, v, _ = draw(7)
    module = Module(chunk_size=3)
    program = exported(module).module()
    run, wanted = ((lambda x, f=f: f(x, k, v)[0]) for f in (program, module))
    tangent = torch.linspace(-1, 1, q.numel(), dtype=q.dtype).reshape(q.shape)
    (_, found), (_, want) = (torch.func.jvp(f, (q,), (tangent,)) for f in (run, wanted))
    close(found, want)
    assert want.any()
    with forward_ad.dual_level():
        close(forward_ad.unpack_dual(run(forward_ad.make_dual(q, tangent))).tangent, want)
    loss = lambda f: lambda x: (f(x) ** 2).sum()  # noqa: E731
    close(torch.func.grad(loss(run))(q), torch.func.grad(loss(wanted))(q))
    small = [x[:, :3] for x in (q, k, v)]
    few, same = ((lambda x, f=f: (f(x, *small[1:])[0] ** 2).sum()) for f in (program, module))
    close(torch.func.hessian(few)(small[0]), torch.func.hessian(same)(small[0]))
    leaf = q.clone().requires_grad_()
    results = []
    for f in (run, wanted):
        first = torch.autograd.grad(loss(f)(leaf), leaf, create_graph=True)[0]
        results.append(torch.autograd.grad((first * first).sum(), leaf)[0])
    close(*results)
    # Forward over reverse reaches the gradient's own node.
    results = []
    for f in (run, wanted):
        with forward_ad.dual_level():
            leaf = q.clone().requires_grad_()
            gradient = torch.autograd.grad(loss(f)(forward_ad.make_dual(leaf, tangent)), leaf)[0]
            results.append(forward_ad.unpack_dual(gradient).tangent)
    close(*results)
    with pytest.raises(RuntimeError, match="atching rule"):  # said, not guessed
        torch.func.vmap(run)(torch.stack([q, q]))


# --- the ops themselves ------------------------------------------------------------------------------------------


def taken_apart(run: Any, inputs: list[Any]) -> list[tuple[Any, ...]]:
    """The arguments of each hla op in the program of a call."""
    found = []

    def keep(graph: Any, examples: Any) -> Any:
        class Keep(torch.fx.Interpreter):
            def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
                if "hla" in str(target):
                    found.append(args)
                return super().call_function(target, args, kwargs)

        return Keep(graph).run

    compiled(run, backend=keep)(*inputs)
    return found


CHECKED: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("hla2", {}),
    "state": ("ahla", {"return_state": True, "normalize": True}),
    "packed": ("hla3", {"cu_seqlens": torch.tensor([0, 2, 2, 7]), "return_state": True}),
    "masked": ("linear_attention", {"token_mask": torch.arange(7) != 3, "segment_ids": torch.arange(7) // 4}),
    "behind": ("hla2", {"axis": -3, "ridge": 0.5, "definition": "as_printed"}),
    "both ways": ("higher_order", {"order": 4, "mask": "none"}),
}


@pytest.mark.parametrize("name", CHECKED)
def test_opcheck(name: str) -> None:
    """Schema, registration, fake kernels, and tracing with dynamic shapes."""
    op, options = CHECKED[name]
    more = () if options.get("mask") == "none" else (torch.tensor(0.8, dtype=torch.float64, requires_grad=True),)
    inputs = [x.detach().requires_grad_() for x in draw(7)[:3]]
    if options.get("axis") == -3:
        inputs = [x.detach().movedim(-2, -3).requires_grad_() for x in inputs]
    run = lambda *xs: getattr(hla, op)(*xs[:3], chunk_size=3, **options, **({"decay": xs[3]} if more else {}))  # noqa: E731
    (tensors, how), *rest = taken_apart(run, [*inputs, *more])
    assert not rest
    torch.library.opcheck(torch.ops.hla.operator, (tensors, how))
    results = torch.ops.hla.operator(tensors, how)
    assert not storages(results) & storages(tensors)
    cotangents = [torch.randn_like(x) for x in results]
    plain = [x.detach() for x in tensors]
    torch.library.opcheck(torch.ops.hla.gradient, (plain, cotangents, how))
    torch.library.opcheck(
        torch.ops.hla.gradient,
        (tensors, [x.requires_grad_() for x in cotangents], how),
        test_utils=("test_schema", "test_faketensor"),
    )


# --- a compiler that generates code ------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
@forward_mode
def test_inductor() -> None:
    """Around the operator and its gradient the compiler fuses what it likes."""
    backend = "inductor" if shutil.which("g++") or shutil.which("clang++") else EAGER

    def run(q: Any, k: Any, v: Any, g: Any) -> Any:
        q, k = (torch.nn.functional.silu(x).transpose(0, 1) for x in (q, k))
        out, state = hla.hla2(q, k, torch.tanh(v).transpose(0, 1), log_decay=-g.abs(), axis=-3, return_state=True)
        step, state = hla.step(state, q[0], k[0], v[:, 0], decay=0.9)
        return torch.sigmoid(out).sum(-1), step * 2.0, *state

    close(pulled(compiled(run, backend=backend, dynamic=True), draw()), pulled(run, draw()), 1e-9)


def test_memory_of_the_program() -> None:
    """Between forward and backward it keeps the inputs; nothing of T×T, no result of a stage."""
    length = 512
    inputs = [x.detach().requires_grad_() for x in draw(length)[:3]]
    run = lambda *xs: hla.hla3(*xs, decay=0.97, chunk_size=16)  # noqa: E731
    kept: set[int] = set()

    def keep(x: Any) -> Any:
        kept.add(x.untyped_storage().data_ptr())
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        compiled(run)(*inputs).sum()
    assert kept == storages(inputs)
    ((tensors, how),) = taken_apart(run, [x.detach() for x in inputs])
    with Watch(tensors) as watch:
        out = torch.ops.hla.operator(tensors, how)[0]
    assert max(watch.sizes) == out.nbytes
    cotangent = torch.ones_like(out)
    with Watch(tensors, cotangent) as watch:
        torch.ops.hla.gradient(tensors, [cotangent], how)
    assert max(watch.sizes) == HEADS * length * DV * 8

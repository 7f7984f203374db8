"""The public contract, line by line: names, signatures, defaults, and that everything is documented."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hla
from hla import options
from libraries import Library

TOKENS, HEADS, D, DV = 11, 3, 5, 7
OPERATORS: dict[str, Callable[..., Any]] = {
    "linear_attention": hla.linear_attention,
    "hla2": hla.hla2,
    "ahla": hla.ahla,
    "hla3": hla.hla3,
    "higher_order": hla.higher_order,
}
DEFAULTS = {
    "decay": None,
    "log_decay": None,
    "scale": 1.0,
    "normalize": False,
    "eps": 1e-6,
    "ridge": 0.0,
    "mask": "causal",
    "definition": "exact",
    "token_mask": None,
    "segment_ids": None,
    "cu_seqlens": None,
    "initial_state": None,
    "return_state": False,
    "axis": -2,
    "form": "auto",
    "chunk_size": None,
    "backend": None,
}
NAMES = {
    *OPERATORS,
    "step",
    "init_state",
    "save_state",
    "load_state",
    "pack_symmetric",
    "unpack_symmetric",
    "feature_map",
    "vjp",
    "segments",
    "scan",
    "paper",
    "backends",
    "explain",
    "set_backend",
    "get_backend",
    "use_backend",
    "register_backend",
    "ShapeError",
    "DTypeError",
    "OptionError",
    "MixedArrayError",
    "UnknownBackendError",
    "BackendNotInstalledError",
    "BackendUnsupportedError",
    "cost",
}


def inputs(*, batch: tuple[int, ...] = (HEADS,)) -> list[Any]:
    rng = np.random.default_rng(0)
    return [rng.normal(size=(*batch, TOKENS, size)) for size in (D, D, DV)]


def keywords(function: Callable[..., Any]) -> dict[str, Any]:
    """Keyword-only parameters with their defaults, in order."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def positional(function: Callable[..., Any]) -> list[str]:
    return [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]


# --- names -----------------------------------------------------------------------------------------------------------


def test_names() -> None:
    assert set(hla.__all__) >= NAMES
    assert len(hla.__all__) == len(set(hla.__all__))
    assert hla.__all__ == sorted(hla.__all__)
    for name in hla.__all__:
        assert hasattr(hla, name), name
        assert name in dir(hla)
    assert isinstance(hla.__version__, str)


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("segments", ["from_tokens", "combine", "identity", "advance", "combine_vjp"]),
        ("scan", ["associative_scan"]),
        ("backends", ["available", "register_backend", "set_backend", "get_backend", "use_backend", "Backend"]),
        ("paper", ["algorithm1", "algorithm2", "algorithm3", "algorithm4"]),
    ],
)
def test_names_of_modules(module: str, names: list[str]) -> None:
    for name in names:
        assert callable(getattr(getattr(hla, module), name))


def test_version_is_that_of_the_distribution() -> None:
    import importlib.metadata

    assert importlib.metadata.version("hla") == hla.__version__


# --- signatures ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPERATORS)
def test_signatures_of_operators(name: str) -> None:
    """(q, k, v, *, …) with the same keywords and defaults for all; `order` has no default."""
    function = OPERATORS[name]
    assert positional(function) == ["q", "k", "v"]
    found = keywords(function)
    if name == "higher_order":
        assert found.pop("order") is inspect.Parameter.empty
        assert next(iter(keywords(function))) == "order"
    assert found == DEFAULTS
    assert list(found) == list(DEFAULTS)
    assert all(type(found[x]) is type(DEFAULTS[x]) for x in DEFAULTS)


@pytest.mark.parametrize("function", [hla.explain, hla.vjp], ids=["explain", "vjp"])
def test_signatures_beside_the_operators(function: Callable[..., Any]) -> None:
    assert positional(function) == ["operator", "q", "k", "v"]
    found = keywords(function)
    assert found.pop("order") is None
    assert found == DEFAULTS


def test_one_list_of_keywords() -> None:
    """The defaults, the type checkers' list and the signatures are the same list."""
    found = {field.name: field.default for field in dataclasses.fields(options.Options)}
    assert found == DEFAULTS
    assert set(typing.get_type_hints(options.Keywords)) == set(DEFAULTS)
    assert options.Keywords.__total__ is False
    assert set(options.NAMES) == set(DEFAULTS)
    assert set(typing.get_type_hints(options.StepKeywords)) - {"order", "inplace"} <= set(DEFAULTS)


def test_signature_of_step() -> None:
    """The operators' options that make sense for one token."""
    assert positional(hla.step) == ["state", "q_t", "k_t", "v_t"]
    allowed = set(typing.get_type_hints(options.StepKeywords))
    left_out = {"segment_ids", "cu_seqlens", "initial_state", "return_state", "axis", "form", "chunk_size"}
    assert allowed == (set(DEFAULTS) - left_out) | {"order", "inplace"}
    found = keywords(hla.step)
    if found:  # the written-out signature, where there is one
        assert set(found) == allowed
        assert found["inplace"] is False
        assert all(found[name] == DEFAULTS[name] for name in allowed & set(DEFAULTS))


@pytest.mark.parametrize(
    ("name", "first", "named"),
    [
        (
            "init_state",
            ["operator"],
            {
                "batch": None,
                "d": None,
                "dv": None,
                "like": None,
                "kv_batch": (None,),
                "mask": ("causal",),
                "definition": ("exact",),
                "order": (None,),
                "normalize": (False,),
                "ridge": (0.0,),
            },
        ),
        ("save_state", ["path", "state"], {}),
        ("load_state", ["path", "like"], {}),
        ("pack_symmetric", ["S"], {}),
        ("unpack_symmetric", ["x"], {}),
        ("feature_map", ["x", "name"], {}),
        ("set_backend", ["backend"], {}),
        ("get_backend", [], {}),
        ("use_backend", ["backend"], {}),
        ("register_backend", ["backend"], {"replace": (False,)}),
        ("backends.available", [], {}),
        ("segments.combine", ["a", "b"], {}),
        ("segments.advance", ["state", "segment"], {}),
        ("segments.combine_vjp", ["a", "b"], {}),
        (
            "scan.associative_scan",
            ["op", "elems", "axis"],
            {"exclusive": (False,), "reverse": (False,), "identity": (None,)},
        ),
        (
            "cost",
            ["operator"],
            {
                "T": None,
                "d": None,
                "dv": None,
                "heads": (1,),
                "form": ("chunkwise",),
                "chunk_size": (None,),
                "dtype": ("float32",),
                "order": (None,),
                "normalize": (False,),
                "mask": ("causal",),
                "definition": ("exact",),
                "ridge": (0.0,),
                "devices": (1,),
                "exchange": ("gather",),
                "method": ("auto",),
                "library": ("jax",),
            },
        ),
    ],
)
def test_other_signatures(name: str, first: list[str], named: dict[str, Any]) -> None:
    """Names in order; keyword-only ones with their default in a 1-tuple, None for a required one."""
    function: Any = hla
    for part in name.split("."):
        function = getattr(function, part)
    assert positional(function) == first
    found = keywords(function)
    assert set(found) == set(named)
    for keyword, default in named.items():
        assert found[keyword] == (inspect.Parameter.empty if default is None else default[0]), keyword


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_signatures_of_the_papers_algorithms(number: int) -> None:
    function = getattr(hla.paper, f"algorithm{number}")
    assert positional(function) == ["q", "k", "v"]
    found = keywords(function)
    assert (found["normalize"], found["eps"]) == (False, 1e-6)
    if number != 4:
        assert found["decay"] is None


def test_defaults_do_not_depend_on_form() -> None:
    """Leaving an option out and giving its default are one thing, in every form."""
    q, k, v = inputs()
    for form in ("chunkwise", "recurrent", "scan", "parallel"):
        for name, function in OPERATORS.items():
            order = {"order": 5} if name == "higher_order" else {}
            given = {**DEFAULTS, "form": form, **order}
            np.testing.assert_array_equal(function(q, k, v, form=form, **order), function(q, k, v, **given))


# --- what comes back -------------------------------------------------------------------------------------------------


def test_outputs(lib: Library) -> None:
    """(*batch, T, dv) in dtype, library and device of v; with return_state a pair."""
    q, k, v = (lib.asarray(x) for x in inputs(batch=(2, HEADS)))
    v32 = lib.asarray(lib.numpy(v), "float32")
    for name, function in OPERATORS.items():
        order = {"order": 4} if name == "higher_order" else {}
        o = function(q, k, v32, **order)
        assert tuple(o.shape) == (2, HEADS, TOKENS, DV)
        assert o.dtype == lib.dtype("float32")
        assert type(o) is type(v)
        if lib.device is not None:
            assert str(o.device) == str(v.device)
        pair = function(q, k, v, return_state=True, **order)
        assert type(pair) is tuple
        assert len(pair) == 2
        assert isinstance(pair[1], tuple)
        assert pair[1]._fields


def test_grouped_heads_are_broadcasting(lib: Library) -> None:
    """q (B, Hkv, G, T, d) with k, v (B, Hkv, 1, T, ·)."""
    rng = np.random.default_rng(1)
    q = rng.normal(size=(2, HEADS, 4, TOKENS, D))
    k, v = rng.normal(size=(2, HEADS, 1, TOKENS, D)), rng.normal(size=(2, HEADS, 1, TOKENS, DV))
    got, state = hla.hla2(*(lib.asarray(x) for x in (q, k, v)), return_state=True)
    wide = (np.broadcast_to(x, (2, HEADS, 4, *x.shape[-2:])) for x in (k, v))
    np.testing.assert_allclose(lib.numpy(got), hla.hla2(q, *wide), rtol=1e-11, atol=1e-11)
    assert tuple(state.key_moment.shape) == (2, HEADS, 1, D, D)


def test_the_order_of_an_operator() -> None:
    q, k, v = inputs()
    for order, name in ((1, "linear_attention"), (2, "hla2"), (3, "hla3")):
        np.testing.assert_array_equal(hla.higher_order(q, k, v, order=order), OPERATORS[name](q, k, v))


def test_a_plan_has_the_promised_fields() -> None:
    plan = hla.explain("hla2", *inputs())
    assert plan.source in ("argument", "context", "global", "env", "auto")
    assert isinstance(plan.backend, str)
    assert isinstance(plan.form, str)
    for candidate in plan.candidates:
        assert isinstance(candidate.name, str)
        assert isinstance(candidate.ok, bool)
        assert isinstance(candidate.reason, str)


def test_gradients_have_the_promised_fields() -> None:
    q, k, v = inputs()
    o, pull = hla.vjp("hla2", q, k, v, decay=0.9)
    found = pull(o)
    assert found._fields == ("q", "k", "v", "decay", "log_decay", "initial_state", "scale")
    assert found.log_decay is None
    assert found.initial_state is None
    assert found.scale is None
    o, pull = hla.vjp("hla2", q, k, v, scale=np.asarray(2.0, q.dtype))
    np.testing.assert_allclose(pull(o).scale, float(np.sum(pull(o).q * q)) / 2, rtol=1e-5)  # o is a form in scale · q
    (o, state), pull = hla.vjp("hla2", q, k, v, return_state=True)
    assert pull((o, state)).decay is None


def test_a_cost_has_the_promised_fields() -> None:
    found = hla.cost("hla2", T=8, d=4, dv=4, heads=2, form="chunkwise", chunk_size=4, dtype="float32")
    for name in ("flops", "state_bytes", "activation_bytes", "kv_cache_bytes", "crossover"):
        assert getattr(found, name) >= 0


# --- documentation ---------------------------------------------------------------------------------------------------


def public_objects() -> dict[str, Any]:
    """Every public function and class by the name it is used under."""
    found = {name: getattr(hla, name) for name in hla.__all__}
    for module in ("segments", "scan", "backends", "paper"):
        own = importlib.import_module(f"hla.{module}")
        names = getattr(own, "__all__", None) or [
            name for name, x in vars(own).items() if inspect.isfunction(x) and x.__module__ == own.__name__
        ]
        found |= {f"{module}.{name}": getattr(own, name) for name in names if not name.startswith("_")}
    return {name: x for name, x in found.items() if not inspect.ismodule(x)}


@pytest.mark.parametrize("name", sorted(public_objects()))
def test_documented(name: str) -> None:
    """A docstring with a first sentence; functions with an example, or a word where it is."""
    x = public_objects()[name]
    if not (inspect.isroutine(x) or inspect.isclass(x)):
        return  # a constant or the alias of a type
    text = inspect.getdoc(x) or ""
    assert text.split("\n")[0].strip(), "no docstring"
    if inspect.isfunction(x):
        assert "Example:" in text or ">>>" in text, "no example"


def test_modules_say_what_they_are() -> None:
    root = Path(hla.__file__).parent
    for path in root.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        assert ast.get_docstring(tree) or not tree.body, path.relative_to(root)


@pytest.mark.parametrize("name", OPERATORS)
def test_docstrings_of_operators(name: str) -> None:
    """Equation, arguments, what comes back, errors, the paper's section, an example; in this order."""
    text = inspect.getdoc(OPERATORS[name]) or ""
    places = [text.index(word) for word in ("$$", "Args:", "Returns:", "Raises:", "Example:")]
    assert places == sorted(places)
    assert "§" in text or "Theorem" in text
    for error in ("ShapeError", "DTypeError", "OptionError", "MixedArrayError"):
        assert error in text


def test_typed() -> None:
    """The marker that makes type checkers read the annotations, and an annotation on every public function."""
    assert (Path(hla.__file__).parent / "py.typed").exists()
    for name, x in public_objects().items():
        if inspect.isfunction(x) and not name.startswith("paper."):
            assert "return" in x.__annotations__, name
